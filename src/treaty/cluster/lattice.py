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

from treaty.cluster.shards import STRIPE, ByRows, Shard, Shards, added_up, own_stripes, rows_before
from treaty.crypto.lattice.map_client import EncryptedQuery, LinearMapClient
from treaty.crypto.lattice.map_server import LinearMapServer
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
    at: int
    parameters: Parameters
    seed: bytes
    column_of_row: NDArray[np.int64]
    code_of_row: NDArray[np.int64]
    length: int


class ClusterMapServer(LinearMapServer):
    """See `LinearMapServer`. `name` tells the matrices of a job apart; rows are dealt out as if they began at `at`."""

    def __init__(
        self, shards: Shards, name: str, at: int, parameters: Parameters, matrix: SecretMatrix, seed: bytes,
        **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(parameters, matrix, seed, **given)
        self._shards, self._at = shards, at
        self._there = _Matrix(name, at, parameters, seed, matrix.column_of_row, matrix.code_of_row, matrix.length)
        shards.keep(name, matrix.columns.T, first=at)

    def all_products(
        self, words: Residues, first: int, features: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        given = ByRows(words, axis=2, first=self._at + first)
        found = added_up(self._shards.each(vector_products, self._there, given, first, features, rows))
        return found % self.primes.astype(np.int64)

    def partial_hints(self, start: int, stop: int, numbers: Sequence[int] | None = None) -> Residues:
        """See `LinearMapServer.partial_hints`; of all blocks."""
        assert numbers is None, "workers know their own blocks"
        parts: list[Residues] = self._shards.each(hints_of, self._there, start, stop)
        total, moduli = parts[0].copy(), self.primes[:, None, None]
        for part in parts[1:]:
            total += part  # below 2^32
            total -= np.where(total >= moduli, moduli, np.uint32(0))
        return total


class ClusterLatticeServer(LatticeSumsServer):
    """See `LatticeSumsServer`."""

    def __init__(self, shards: Shards, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._shards = shards

    def settle(self, seed: bytes, kept: bytes | None = None) -> None:
        super().settle(seed, kept)
        self._map = server_over_cluster(self._shards, "bins", 0, self._map, self._threads)


class ClusterLatticeClient(LatticeSumsClient):
    """See `LatticeSumsClient`."""

    def __init__(self, shards: Shards, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._shards = shards

    def settle(self, seed: bytes, kept: Mapping[str, bytes] | None = None) -> None:
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
        return _ClusterQuery(self, self._shards, self._given, secrets, key)


class _ClusterQuery(EncryptedQuery):
    """Has entries encrypted by workers, who are told its secrets and its key; b_0 is made here."""

    def __init__(
        self, client: LinearMapClient, shards: Shards, given: _Client, secrets: NDArray[np.int8], key: bytes | None
    ) -> None:
        super().__init__(client, secrets, key)
        self._shards, self._given = shards, given

    def encrypt_from(self, before: int, vectors: Sequence[NDArray[np.int32]]) -> Residues:
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
    """See `VectorServer`. `number` is that of the block of rows: blocks, of a stripe or less, are dealt out in turn."""

    def __init__(self, shards: Shards, number: int, *given: Any, threads: int = 1) -> None:
        super().__init__(*given, threads=threads)
        self._map = server_over_cluster(shards, f"block {number}", number * STRIPE, self._map, threads)


def server_over_cluster(shards: Shards, name: str, at: int, alone: LinearMapServer, threads: int) -> ClusterMapServer:
    """Give a server's matrix to the workers; return the server whose products they make."""
    return ClusterMapServer(
        shards, name, at, alone.parameters, alone.matrix, alone.seed, threads=threads, random=alone.random
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
    held: dict[tuple[Any, ...], EncryptedQuery] = shard.made_of("query", [], dict)
    terms = given[2], key, secrets.tobytes()
    if terms not in held:  # the next query: its secrets are transformed once
        client: LinearMapClient = shard.made_of(
            f"client of {given[2].hex()}", [], lambda: LinearMapClient(*given, threads=shard.threads)
        )
        held.clear()
        held[terms] = EncryptedQuery(client, secrets.copy(), key)
    query, done = held[terms], 0
    words = np.empty((len(vectors), len(given[0].primes), vectors.shape[2]), np.uint32)
    for part in own_stripes(shard.number, shard.count, first, count):
        at = slice(done, done + part.stop - part.start)
        words[..., at] = query.encrypt_from(first + part.start, [vector[:, at].copy() for vector in vectors])
        done = at.stop
    return words


def server_at(shard: Shard, matrix: _Matrix) -> LinearMapServer:
    """Return a server of a worker's rows of a matrix."""

    def of_rows() -> LinearMapServer:
        columns = np.ascontiguousarray(shard.arrays[matrix.name].T)
        shard.arrays[matrix.name] = columns.T  # so that it is there once
        held = SecretMatrix(columns, matrix.column_of_row.copy(), matrix.code_of_row.copy())
        return LinearMapServer(matrix.parameters, held, matrix.seed, threads=shard.threads)

    made: LinearMapServer = shard.made_of(f"server of {matrix.name}", [matrix.name], of_rows)
    return made


def vector_products(
    shard: Shard, matrix: _Matrix, words: Residues, first: int, features: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return what a worker's entries from row `first` of the matrix on add to <u_S, b> of each vector; a step."""
    before = rows_before(shard.number, shard.count, matrix.at)
    start = rows_before(shard.number, shard.count, matrix.at + first) - before
    return server_at(shard, matrix).all_products(words, start, features, rows)


def hints_of(shard: Shard, matrix: _Matrix, start: int, stop: int) -> Residues:
    """Return what a worker's rows add to hints of some rows of the matrix, uint32 (primes, stop - start, N); a step."""
    server, degree = server_at(shard, matrix), matrix.parameters.degree
    own = own_stripes(shard.number, shard.count, matrix.at, matrix.length)
    blocks = [range(1 + part.start // degree, 1 + -(-part.stop // degree)) for part in own]
    return server.partial_hints(start, stop, list(chain.from_iterable(blocks)))
