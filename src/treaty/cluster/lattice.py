"""Both ends of the lattice map, where the rows of a matrix or of vectors lie at the workers of a cluster.

Hints and products are sums over rows, each modulo the primes: a worker makes those of its rows. Secrets of the server
(r_S, e', floods) and the ledger stay with the driver. Of vectors a worker encrypts its blocks, with errors that follow
from the query's key and the block, so that another in its place makes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.shards import ByRows, Shard, Shards, added_up, own_stripes, rows_before
from treaty.crypto.lattice.linear_map import EncryptedQuery, LinearMapClient, LinearMapServer
from treaty.crypto.lattice.matrix import Field, SecretMatrix
from treaty.crypto.lattice.parameters import Parameters
from treaty.crypto.lattice.transform import Residues
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.crypto.vectors.lattice_vectors import VectorServer

_Client = tuple[Parameters, Sequence[Field], bytes, int]  # what a `LinearMapClient` is made of


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What a worker needs to know of a matrix whose columns it keeps: see `SecretMatrix`; `length` is that of all."""

    name: str
    parameters: Parameters
    seed: bytes
    column_of_row: NDArray[np.int64]
    code_of_row: NDArray[np.int64]
    length: int


class ClusterMapServer(LinearMapServer):
    """See `LinearMapServer`. `name` tells the matrices of a job apart."""

    def __init__(
        self, shards: Shards, name: str, parameters: Parameters, matrix: SecretMatrix, seed: bytes, **given: Any
    ) -> None:
        super().__init__(parameters, matrix, seed, **given)
        self._shards = shards
        self._there = _Matrix(name, parameters, seed, matrix.column_of_row, matrix.code_of_row, matrix.length)
        shards.keep(name, matrix.columns.T)

    def products(
        self, planes: Residues, first: int, features: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """See `LinearMapServer.products`."""
        given = ByRows(planes, axis=1, first=first)
        found = added_up(self._shards.each(products_of, self._there, given, first, features, rows))
        return found % self.primes.astype(np.int64)

    def partial_hints(self, start: int, stop: int, numbers: Sequence[int] | None = None) -> Residues:
        """See `LinearMapServer.partial_hints`; of all blocks."""
        assert numbers is None, "workers know their own blocks"
        parts = self._shards.each(hints_of, self._there, start, stop)
        total = added_up([part.astype(np.uint64) for part in parts])
        return (total % self.primes[:, None, None]).astype(np.uint32)


class ClusterLatticeServer(LatticeSumsServer):
    """See `LatticeSumsServer`."""

    def __init__(self, shards: Shards, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._shards = shards

    def settle(self, seed: bytes, kept: bytes | None = None) -> None:
        """See `LatticeSumsServer.settle`."""
        super().settle(seed, kept)
        self._map = over_cluster(self._shards, "bins", self._map, self._threads)


class ClusterLatticeClient(LatticeSumsClient):
    """See `LatticeSumsClient`."""

    def __init__(self, shards: Shards, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._shards = shards

    def settle(self, seed: bytes, kept: Mapping[str, bytes] | None = None) -> None:
        """See `LatticeSumsClient.settle`."""
        super().settle(seed, kept)
        given = self._parameters, self._fields, seed, self._bounds.n_rows
        self._map = ClusterMapClient(self._shards, *given, threads=self._threads)


class ClusterMapClient(LinearMapClient):
    """See `LinearMapClient`."""

    def __init__(
        self, shards: Shards, parameters: Parameters, fields: Sequence[Field], seed: bytes, length: int, threads: int
    ) -> None:
        super().__init__(parameters, fields, seed, length, threads=threads)
        self._shards, self._given = shards, (parameters, fields, seed, length)

    def query_of(self, secrets: NDArray[np.int8], key: bytes | None) -> EncryptedQuery:
        """See `LinearMapClient.query_of`."""
        return _ClusterQuery(self, self._shards, self._given, secrets, key)


class _ClusterQuery(EncryptedQuery):
    """Has entries encrypted by workers, who are told its secrets and its key; b_0 is made here."""

    def __init__(
        self, client: LinearMapClient, shards: Shards, given: _Client, secrets: NDArray[np.int8], key: bytes | None
    ) -> None:
        super().__init__(client, secrets, key)
        self._shards, self._given = shards, given

    def encrypt_from(self, before: int, vectors: Sequence[NDArray[np.int32]]) -> Residues:
        """See `EncryptedQuery.encrypt_from`."""
        if before == 0:
            super().encrypt_from(0, [vector[:, :0] for vector in vectors])
        stacked = np.stack(vectors)
        count, shards = stacked.shape[2], self._shards
        entries = ByRows(stacked, axis=2, first=before)
        made = shards.each(encrypted_rows, self._given, self.secrets, self._key, before, count, entries)
        words = np.empty((len(vectors), made[0].shape[1], count), np.uint32)
        for number, of_worker in enumerate(made):
            done = 0
            for part in own_stripes(number, shards.count, before, count):
                words[..., part] = of_worker[..., done : done + part.stop - part.start]
                done += part.stop - part.start
        return words


class ClusterVectorServer(VectorServer):
    """See `VectorServer`. `name` tells blocks of rows apart."""

    def __init__(self, shards: Shards, name: str, *given: Any, threads: int = 1) -> None:
        super().__init__(*given, threads=threads)
        self._map = over_cluster(shards, name, self._map, threads)


def over_cluster(shards: Shards, name: str, alone: LinearMapServer, threads: int) -> ClusterMapServer:
    """Give a server's matrix to the workers; return the server whose products they make."""
    return ClusterMapServer(
        shards, name, alone.parameters, alone.matrix, alone.seed, threads=threads, random=alone.random
    )


def encrypted_rows(
    shard: Shard,
    given: _Client,
    secrets: NDArray[np.int8],
    key: bytes | None,
    first: int,
    count: int,
    vectors: NDArray[np.int32],
) -> Residues:
    """Return a worker's rows of ``EncryptedQuery.encrypt_from(first, ...)`` of `count` entries; a step."""
    client: LinearMapClient = shard.made_of(
        "client of the lattice map", [], lambda: LinearMapClient(*given, threads=shard.threads)
    )
    query, done = EncryptedQuery(client, secrets.copy(), key), 0
    words = np.empty((len(vectors), len(client.parameters.primes), vectors.shape[2]), np.uint32)
    for part in own_stripes(shard.number, shard.count, first, count):
        at = slice(done, done + part.stop - part.start)
        words[..., at] = query.encrypt_from(first + part.start, [vector[:, at].copy() for vector in vectors])
        done = at.stop
    return words


def server_at(shard: Shard, matrix: _Matrix) -> LinearMapServer:
    """Return a server of a worker's rows of a matrix."""

    def of_rows() -> LinearMapServer:
        columns = np.ascontiguousarray(shard.arrays[matrix.name].T)
        held = SecretMatrix(columns, matrix.column_of_row.copy(), matrix.code_of_row.copy())
        return LinearMapServer(matrix.parameters, held, matrix.seed, threads=shard.threads)

    made: LinearMapServer = shard.made_of(f"server of {matrix.name}", [matrix.name], of_rows)
    return made


def products_of(
    shard: Shard, matrix: _Matrix, planes: Residues, first: int, features: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return what a worker's entries from row `first` of the table on add to <u_S, b>; a step."""
    server = server_at(shard, matrix)
    return server.products(planes, rows_before(shard.number, shard.count, first), features, rows)


def hints_of(shard: Shard, matrix: _Matrix, start: int, stop: int) -> Residues:
    """Return what a worker's rows add to hints of some rows of the matrix, uint32 (primes, stop - start, N); a step."""
    server, degree = server_at(shard, matrix), matrix.parameters.degree
    own = own_stripes(shard.number, shard.count, 0, matrix.length)
    blocks = [range(1 + part.start // degree, 1 + -(-part.stop // degree)) for part in own]
    return server.partial_hints(start, stop, list(chain.from_iterable(blocks)))
