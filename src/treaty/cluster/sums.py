"""Sums that a party's cluster computes: bin sums of gradients, the lattice map, and products of ciphertexts.

- Bin sums of known gradients (`ClusterHistograms`): each worker adds up its rows.
- The lattice map: hints and products are sums over rows, modulo the primes, so a worker computes those of its rows. The
  server's secrets (r_S, e', floods) and the ledger stay with the driver. For vectors, a worker encrypts its blocks;
  the errors follow from the query's key and the block, so that a replacement worker makes the same bytes.
- Additive ciphers, at a passive party: each worker multiplies the ciphertexts of its rows, for the bins of each column;
  the driver multiplies the results, and re-randomises sums as one machine does. Workers see only the public key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.shards import STRIPE, ByRows, Shard, Shards, added_up, local_rows, own_stripes, places, rows_before
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.lattice.linear_map import EncryptedQuery, LinearMapClient, LinearMapServer
from treaty.crypto.lattice.ring import Residues
from treaty.crypto.parameters import Field, Parameters, SecretMatrix
from treaty.crypto.sums.additive_sums import PRODUCT_BYTES, AdditiveSumsServer, BlindSumsServer
from treaty.crypto.sums.bin_products import Block, Items, bin_products, keep_features, plan_blocks
from treaty.crypto.sums.encrypted_sums import Ends
from treaty.crypto.sums.hidden_vectors import VectorServer
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.machine.arrays import Codes, Int32s, Integers, Words, contiguous, pieces
from treaty.machine.shared_work import share
from treaty.trees.columns import BinSums, MakeSums
from treaty.trees.histograms import Histograms


class ClusterHistograms:
    """`trees.histograms.Histograms` of `n_rows` rows, whose codes the workers keep under the name `codes`.

    `name` distinguishes trees that grow at the same time.
    """

    def __init__(self, shards: Shards, codes: str, offsets: Int32s, n_rows: int, name: str = "") -> None:
        self._shards, self._codes, self._offsets, self._name, self._n_rows = shards, codes, offsets, name, n_rows

    @classmethod
    def of_columns(cls, shards: Shards | None, name: str) -> MakeSums | None:
        """Return a function that gives the workers one owner's columns; None without workers."""
        if shards is None:
            return None

        def make(codes: Codes, offsets: Int32s) -> ClusterHistograms:
            shards.keep(f"codes of {name}", contiguous(codes))
            return cls(shards, f"codes of {name}", offsets, len(codes), f" of {name}")

        return make

    @classmethod
    def of_rows(cls, shards: Shards | None, codes: Codes, offsets: Int32s) -> Callable[[int], BinSums] | None:
        """Return a function that makes the sums for each tree of a round, by its number; None without workers."""
        if shards is None:
            return None
        shards.keep("codes", contiguous(codes))
        return lambda output: cls(shards, "codes", offsets, len(codes), f" {output}")

    def start_tree(self, grad: Integers, hess: Integers, features: Int32s) -> None:
        self._features = features.copy()
        for what, values in (("grad", grad), ("hess", hess)):
            self._shards.keep(f"{what}{self._name}", values)

    def end_tree(self) -> None:
        for what in ("grad", "hess"):
            self._shards.drop(f"{what}{self._name}")

    def sums(self, rows: Int32s, starts: Integers, firsts: Integers | None = None) -> Integers:
        nodes = nodes_of(rows, starts, starts if firsts is None else firsts, self._n_rows)
        args = self._codes, self._name, self._offsets, self._features, len(starts) - 1, ByRows(nodes)
        return added_up(self._shards.each(bin_sums, *args))


def nodes_of(rows: Int32s, starts: Integers, firsts: Integers, n_rows: int) -> NDArray[np.signedinteger]:
    """Return each row's node, -1 for none, in the narrowest type; nodes are numbered as in `Histograms.sums`."""
    count = len(starts) - 1
    dtype = next(kind for kind in (np.int8, np.int16, np.int32) if count <= np.iinfo(kind).max)
    nodes: NDArray[np.signedinteger] = np.full(n_rows, -1, dtype)
    for node, (first, size) in enumerate(zip(firsts[:count].tolist(), np.diff(starts).tolist(), strict=True)):
        nodes[rows[first : first + size]] = node
    return nodes


def members(nodes: NDArray[np.signedinteger], count: int) -> tuple[Int32s, Integers]:
    """Return the rows of `count` nodes, node by node, and where each node starts."""
    # Rows of node -1 sort first and are cut off below.
    starts = np.concatenate([[0], np.cumsum(np.bincount(nodes[nodes >= 0], minlength=count))])
    rows = np.argsort(nodes, kind="stable")[len(nodes) - int(starts[-1]) :].astype(np.int32)
    return rows, starts.astype(np.int64)


def bin_sums(
    shard: Shard, codes: str, name: str, offsets: Int32s, features: Int32s, count: int, nodes: NDArray[np.signedinteger]
) -> Integers:
    """Return a worker's part of the sums of `count` nodes, int64 (count, slots, 3). A step."""
    grad, hess = f"grad{name}", f"hess{name}"

    def of_tree() -> Histograms:
        rows = shard.arrays[codes]
        columns = shard.made_of(f"columns of {codes}", [codes], lambda: np.ascontiguousarray(rows.T))
        # Received arrays are read-only.
        made = Histograms(rows, columns, offsets.copy(), shard.threads)
        made.start_tree(shard.arrays[grad], shard.arrays[hess], features)
        return made

    histograms: Histograms = shard.made_of(f"histograms{name}", [codes, grad, hess], of_tree)
    return histograms.sums(*members(nodes, count))


class _OverWorkers:
    """What servers and clients over workers share: the workers, given before all other arguments, and these."""

    def __init__(self, shards: Shards, *given: Any, **options: Any) -> None:
        self._shards, self._given = shards, given
        super().__init__(*given, **options)


_Client = tuple[Parameters, Sequence[Field], bytes, int]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The data of a `SecretMatrix` that a worker needs besides its columns; `length` is that of the whole matrix."""

    name: str
    at: int
    parameters: Parameters
    seed: bytes
    column_of_row: Integers
    code_of_row: Integers
    length: int


class ClusterMapServer(LinearMapServer):
    """`LinearMapServer` over workers. `name` identifies the matrix; rows are assigned as if they started at `at`."""

    def __init__(
        self, shards: Shards, name: str, at: int, parameters: Parameters, matrix: SecretMatrix, seed: bytes,
        **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(parameters, matrix, seed, **given)
        self._shards, self._at = shards, at
        self._there = _Matrix(name, at, parameters, seed, matrix.column_of_row, matrix.code_of_row, matrix.length)
        shards.keep(name, matrix.columns.T, first=at)

    def all_products(self, words: Residues, first: int, features: Integers, rows: Integers) -> Integers:
        given = ByRows(words, axis=2, first=self._at + first)
        found = added_up(self._shards.each(vector_products, self._there, given, first, features, rows))
        return found % self.primes.astype(np.int64)

    def partial_hints(self, start: int, stop: int, numbers: Sequence[int] | None = None) -> Residues:
        assert numbers is None, "workers know their own blocks"
        parts: list[Residues] = self._shards.each(hints_of, self._there, start, stop)
        total, moduli = parts[0].copy(), self.primes[:, None, None]
        for part in parts[1:]:
            # Both terms are below a prime, so the sum fits into 32 bits and one subtraction reduces it.
            total += part
            total -= np.where(total >= moduli, moduli, np.uint32(0))
        return total


class ClusterLatticeServer(_OverWorkers, LatticeSumsServer):
    """`LatticeSumsServer` over workers."""

    def settle(self, seed: bytes, kept: bytes | None = None) -> None:
        super().settle(seed, kept)
        self._map = server_over_cluster(self._shards, "bins", 0, self._map, self._threads)


class ClusterLatticeClient(_OverWorkers, LatticeSumsClient):
    """`LatticeSumsClient` over workers."""

    def settle(self, seed: bytes, kept: Mapping[str, bytes] | None = None) -> None:
        super().settle(seed, kept)
        given = self._parameters, self._fields, seed, self._bounds.n_rows
        self._map = ClusterMapClient(self._shards, *given, threads=self._threads)


class ClusterMapClient(_OverWorkers, LinearMapClient):
    """`LinearMapClient` over workers."""

    def query_of(self, secrets: NDArray[np.int8], key: bytes | None) -> EncryptedQuery:
        return _ClusterQuery(self, secrets, key)


class _ClusterQuery(EncryptedQuery):
    """A query whose entries the workers encrypt, with its secrets and its key; b_0 is made here."""

    _client: ClusterMapClient

    def encrypt_from(self, before: int, vectors: Sequence[Int32s]) -> Residues:
        if before == 0:
            super().encrypt_from(0, [vector[:, :0] for vector in vectors])
        stacked = np.stack(vectors)
        count, shards = stacked.shape[2], self._client._shards
        entries = ByRows(stacked, axis=2, first=before)
        made = shards.each(encrypted_rows, self._client._given, self.secrets, self._key, before, count, entries)
        words = np.empty((len(vectors), made[0].shape[1], count), np.uint32)
        for number, of_worker in enumerate(made):
            done = 0
            for part in own_stripes(number, shards.count, before, count):
                words[..., part] = of_worker[..., done : done + part.stop - part.start]
                done += part.stop - part.start
        return words


class ClusterVectorServer(VectorServer):
    """`VectorServer` over workers. Blocks of at most a stripe are assigned in turn; `number` is that of the block."""

    def __init__(self, shards: Shards, number: int, *given: Any, threads: int = 1) -> None:
        super().__init__(*given, threads=threads)
        self._map = server_over_cluster(shards, f"block {number}", number * STRIPE, self._map, threads)


def server_over_cluster(shards: Shards, name: str, at: int, alone: LinearMapServer, threads: int) -> ClusterMapServer:
    """Give a server's matrix to the workers; return the server whose products they compute."""
    return ClusterMapServer(
        shards, name, at, alone.parameters, alone.matrix, alone.seed, threads=threads, random=alone.random
    )


def encrypted_rows(
    shard: Shard, given: _Client, secrets: NDArray[np.int8], key: bytes | None, first: int, count: int, vectors: Int32s
) -> Residues:
    """Return a worker's rows of ``EncryptedQuery.encrypt_from(first, ...)`` of `count` entries. A step."""
    held: dict[tuple[Any, ...], EncryptedQuery] = shard.made_of("query", [], dict)
    terms = given[2], key, secrets.tobytes()
    # A new query: transform its secrets once.
    if terms not in held:
        client: LinearMapClient = shard.made_of(
            f"client of {given[2].hex()}", [], lambda: LinearMapClient(*given, threads=shard.threads)
        )
        held.clear()
        held[terms] = EncryptedQuery(client, secrets.copy(), key)
    query, done = held[terms], 0
    # Encrypt stripe by stripe: errors depend on the absolute position of an entry.
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
        # Keep one copy only.
        shard.arrays[matrix.name] = columns.T
        held = SecretMatrix(columns, matrix.column_of_row.copy(), matrix.code_of_row.copy())
        return LinearMapServer(matrix.parameters, held, matrix.seed, threads=shard.threads)

    made: LinearMapServer = shard.made_of(f"server of {matrix.name}", [matrix.name], of_rows)
    return made


def vector_products(
    shard: Shard, matrix: _Matrix, words: Residues, first: int, features: Integers, rows: Integers
) -> Integers:
    """Return what a worker's entries from row `first` of the matrix on add to <u_S, b> of each vector. A step."""
    before = rows_before(shard.number, shard.count, matrix.at)
    start = rows_before(shard.number, shard.count, matrix.at + first) - before
    return server_at(shard, matrix).all_products(words, start, features, rows)


def hints_of(shard: Shard, matrix: _Matrix, start: int, stop: int) -> Residues:
    """Return what a worker's rows add to hints of some matrix rows, uint32 (primes, stop - start, N). A step."""
    server, degree = server_at(shard, matrix), matrix.parameters.degree
    own = own_stripes(shard.number, shard.count, matrix.at, matrix.length)
    blocks = [range(1 + part.start // degree, 1 + -(-part.stop // degree)) for part in own]
    return server.partial_hints(start, stop, list(chain.from_iterable(blocks)))


Found = tuple[Integers, Words]

_CODES, _CIPHERTEXTS, _ROWS = "codes", "ciphertexts", "rows of ciphertexts"


@dataclass(frozen=True, slots=True)
class _CipherBins:
    """The parameters of an additive cipher and its columns that a worker needs."""

    modulus: int
    offsets: Integers
    left_out: Integers


class ClusterSumsServer(_OverWorkers, AdditiveSumsServer):
    """`AdditiveSumsServer` over workers, who compute the products; they keep the codes of all rows."""

    _kept: Words | None = None
    _features: Int32s | None = None

    def _plan(self, codes: Codes) -> list[Block]:
        self._shards.keep(_CODES, codes)
        return []

    def _begin(self, features: Int32s | None) -> None:
        super()._begin(features)
        self._features = features

    def end_tree(self) -> None:
        super().end_tree()
        self._forget()

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept = None
            self._shards.drop(_CIPHERTEXTS)
            self._shards.drop(_ROWS)

    def _products(self, positions: Int32s, node_starts: Integers) -> Iterator[Found]:
        found = self._ciphertexts
        assert found is not None
        at = places(self._rows, self._shards.count)
        # The ciphertexts of a tree travel to the workers once, with the first query.
        if self._kept is not found:
            self._kept = found
            self._shards.keep(_CIPHERTEXTS, found, at)
            self._shards.keep(_ROWS, local_rows(self._rows, self._shards.count), at)
        nodes = ByRows(nodes_of(positions, node_starts, node_starts, len(found)), places=at)
        bins = _CipherBins(self._modulus.value, self._offsets, self._left_out)
        count, slots = len(node_starts) - 1, int(self._offsets[-1])
        for part in pieces(count, max(1, PRODUCT_BYTES // max(1, 8 * slots * self._modulus.words))):
            parts = self._shards.each(bin_products_of, bins, self._features, count, part, nodes)
            yield merged(self._modulus, parts, self._threads)


class ClusterBlindServer(ClusterSumsServer, BlindSumsServer):
    """`BlindSumsServer` over workers."""

    def _products(self, positions: Int32s, node_starts: Integers) -> Iterator[Found]:
        yield from super()._products(positions, node_starts)
        # Ciphertexts serve one query.
        self._forget()


def over_cluster(shards: Shards) -> Ends:
    """Return the constructors of ends whose rows are at these workers; additive ciphers encrypt at the driver."""
    return Ends(
        partial(ClusterSumsServer, shards),
        partial(ClusterBlindServer, shards),
        partial(ClusterLatticeServer, shards),
        partial(ClusterLatticeClient, shards),
    )


def bin_products_of(
    shard: Shard, bins: _CipherBins, features: Int32s | None, count: int, part: slice, nodes: NDArray[np.signedinteger]
) -> Found:
    """Return a worker's part of ``AdditiveSumsServer._products`` for some of `count` nodes. A step."""
    modulus: Modulus = shard.made_of(f"modulus {bins.modulus}", [], lambda: Modulus(bins.modulus))
    positions, starts = members(nodes, count)
    kept, source = shard.arrays[_ROWS], shard.arrays[_CIPHERTEXTS]
    held = Items(source, positions, kept[positions], starts, np.arange(count)).of_range(part.start, part.stop)
    groups = [group for block in _blocks(shard, bins, features) for group in block.groups]
    return bin_products(modulus, groups, bins.offsets, held, shard.threads)


def _blocks(shard: Shard, bins: _CipherBins, features: Int32s | None) -> list[Block]:
    """Return the groups of columns of a worker's rows, restricted to the tree's columns."""
    codes, sizes = shard.arrays[_CODES], np.diff(bins.offsets)
    blocks: list[Block] = shard.made_of(
        "blocks", [_CODES], lambda: plan_blocks(codes, bins.left_out.copy(), sizes, shard.threads)
    )
    if features is None:
        return blocks
    kept: set[int] = set(features.tolist())
    return [Block(block.columns, keep_features(block.groups, kept)) for block in blocks]


def merged(modulus: Modulus, parts: list[Found], threads: int) -> Found:
    """Multiply the workers' products at equal places."""
    # sorted by place, runs of equal places are segments
    at = np.concatenate([where for where, _ in parts])
    numbers = np.concatenate([products for _, products in parts])
    order = np.argsort(at, kind="stable").astype(np.int32)
    held, starts = np.unique(at[order], return_index=True)
    starts = np.append(starts, len(order)).astype(np.int64)
    out = np.empty((len(held), modulus.words), np.uint64)

    def multiply(first: int, stop: int) -> None:
        modulus.segment_products(numbers, order, starts[first : stop + 1], out[first:stop])

    share(multiply, len(held), threads, 64)
    return held, out
