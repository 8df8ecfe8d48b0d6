"""A passive party's end of an additive cipher, where ciphertexts of rows are multiplied by the workers of a cluster.

Each worker multiplies those of its rows over the bins of every column; the driver multiplies what they return, and puts
sums together and re-randomises them as one machine does. Workers learn what the party itself does: the public key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.histograms import members, nodes_of
from treaty.cluster.lattice import ClusterLatticeClient, ClusterLatticeServer
from treaty.cluster.shards import ByRows, Shard, Shards, local_rows, places
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.sums.additive_sums import PRODUCT_BYTES, AdditiveSumsServer
from treaty.crypto.sums.bin_products import Block, Group, Items, bin_products, keep_features, plan_blocks
from treaty.crypto.sums.blind_sums import BlindSumsServer
from treaty.crypto.sums.encrypted_sums import Ends
from treaty.parallel import pieces, share

Words = NDArray[np.uint64]
Found = tuple[NDArray[np.int64], Words]

_CODES, _CIPHERTEXTS, _ROWS = "codes", "ciphertexts", "rows of ciphertexts"


@dataclass(frozen=True, slots=True)
class _CipherBins:
    """What a worker needs to know of an additive cipher and the columns: the modulus, slots and bins of columns."""

    modulus: int
    offsets: NDArray[np.int64]
    left_out: NDArray[np.int64]


class _OverCluster(AdditiveSumsServer):
    """Multiplies at the workers, which keep the codes of all rows."""

    _kept: Words | None = None
    _features: NDArray[np.int32] | None = None
    _shards: Shards

    def __init__(self, shards: Shards, *given: Any, **options: Any) -> None:
        self._shards = shards
        super().__init__(*given, **options)

    def _plan(self, codes: NDArray[np.uint8]) -> list[Block]:
        self._shards.keep(_CODES, codes)
        return []

    def _begin(self, features: NDArray[np.int32] | None) -> None:
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

    def _products(self, positions: NDArray[np.int32], node_starts: NDArray[np.int64]) -> Iterator[Found]:
        found = self._ciphertexts
        assert found is not None
        at = places(self._rows, self._shards.count)
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


class ClusterSumsServer(_OverCluster):
    """See `AdditiveSumsServer`."""


class ClusterBlindServer(_OverCluster, BlindSumsServer):
    """See `BlindSumsServer`."""

    def _products(self, positions: NDArray[np.int32], node_starts: NDArray[np.int64]) -> Iterator[Found]:
        yield from super()._products(positions, node_starts)
        self._forget()  # ciphertexts serve one query


def over_cluster(shards: Shards) -> Ends:
    """Return what makes ends whose rows are at these workers; keys of additive ciphers encrypt at the driver."""
    return Ends(
        partial(ClusterSumsServer, shards),
        partial(ClusterBlindServer, shards),
        partial(ClusterLatticeServer, shards),
        partial(ClusterLatticeClient, shards),
    )


def bin_products_of(
    shard: Shard,
    bins: _CipherBins,
    features: NDArray[np.int32] | None,
    count: int,
    part: slice,
    nodes: NDArray[np.signedinteger],
) -> Found:
    """Return a worker's part of what `AdditiveSumsServer._products` makes of some of `count` nodes; a step."""
    modulus: Modulus = shard.made_of(f"modulus {bins.modulus}", [], lambda: Modulus(bins.modulus))
    positions, starts = members(nodes, count)
    kept, source = shard.arrays[_ROWS], shard.arrays[_CIPHERTEXTS]
    items = Items(source, positions, kept[positions], starts, np.arange(count))
    held = items.of_range(part.start, part.stop)
    groups = [group for block in _blocks(shard, bins, features) for group in block.groups]
    return bin_products(modulus, groups, bins.offsets, held, shard.threads)


def _blocks(shard: Shard, bins: _CipherBins, features: NDArray[np.int32] | None) -> list[Block]:
    """Return the groups of columns of a worker's rows, those of the tree's columns alone."""
    codes = shard.arrays[_CODES]
    sizes = np.diff(bins.offsets)
    blocks: list[Block] = shard.made_of(
        "blocks", [_CODES], lambda: plan_blocks(codes, bins.left_out.copy(), sizes, shard.threads)
    )
    if features is None:
        return blocks
    kept: set[int] = set(features.tolist())

    def of_tree(groups: list[Group]) -> list[Group]:
        return keep_features(groups, kept)

    return [Block(block.columns, of_tree(block.groups)) for block in blocks]


def merged(modulus: Modulus, parts: list[Found], threads: int) -> Found:
    """Multiply what workers found at the same places."""
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
