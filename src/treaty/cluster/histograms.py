"""Bin sums of gradients that a party knows, added up by its cluster."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.shards import ByRows, Shard, Shards, added_up
from treaty.compute import Int32s, Integers
from treaty.scratch import contiguous
from treaty.trees.columns import BinSums, MakeSums
from treaty.trees.histograms import Histograms


class ClusterHistograms:
    """See `trees.histograms.Histograms`, of the codes of `n_rows` rows that workers keep under the name `codes`.

    `name` tells trees apart that grow at the same time.
    """

    def __init__(self, shards: Shards, codes: str, offsets: Int32s, n_rows: int, name: str = "") -> None:
        self._shards, self._codes, self._offsets, self._name, self._n_rows = shards, codes, offsets, name, n_rows

    @classmethod
    def of_columns(cls, shards: Shards | None, name: str) -> MakeSums | None:
        """Return what gives the workers the columns of one owner, to be added up there; None without workers."""
        if shards is None:
            return None

        def make(codes: NDArray[np.uint8], offsets: Int32s) -> ClusterHistograms:
            shards.keep(f"codes of {name}", contiguous(codes))
            return cls(shards, f"codes of {name}", offsets, len(codes), f" of {name}")

        return make

    @classmethod
    def of_rows(
        cls, shards: Shards | None, codes: NDArray[np.uint8], offsets: Int32s
    ) -> Callable[[int], BinSums] | None:
        """Return what adds up rows for each tree of a round, by its number; None without workers."""
        if shards is None:
            return None
        shards.keep("codes", contiguous(codes))
        return lambda output: cls(shards, "codes", offsets, len(codes), f" {output}")

    def start_tree(self, grad: Integers, hess: Integers, features: Int32s) -> None:
        self._features = features.copy()
        for what, values in (("grad", grad), ("hess", hess)):
            self._shards.keep(f"{what}{self._name}", values)

    def end_tree(self) -> None:
        """Let the workers forget the tree's gradients."""
        for what in ("grad", "hess"):
            self._shards.drop(f"{what}{self._name}")

    def sums(self, rows: Int32s, starts: Integers, firsts: Integers | None = None) -> Integers:
        nodes = nodes_of(rows, starts, starts if firsts is None else firsts, self._n_rows)
        args = self._codes, self._name, self._offsets, self._features, len(starts) - 1, ByRows(nodes)
        return added_up(self._shards.each(bin_sums, *args))


def nodes_of(rows: Int32s, starts: Integers, firsts: Integers, n_rows: int) -> NDArray[np.signedinteger]:
    """Return the number of each row's node, -1 in none, in the narrowest type: node k as in `Histograms.sums`."""
    count = len(starts) - 1
    dtype = next(kind for kind in (np.int8, np.int16, np.int32) if count <= np.iinfo(kind).max)
    nodes: NDArray[np.signedinteger] = np.full(n_rows, -1, dtype)
    for node, (first, size) in enumerate(zip(firsts[:count].tolist(), np.diff(starts).tolist(), strict=True)):
        nodes[rows[first : first + size]] = node
    return nodes


def members(nodes: NDArray[np.signedinteger], count: int) -> tuple[Int32s, Integers]:
    """Return the rows of `count` nodes, one node after the other, and where each begins."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(nodes[nodes >= 0], minlength=count))])
    rows = np.argsort(nodes, kind="stable")[len(nodes) - int(starts[-1]) :].astype(np.int32)
    return rows, starts.astype(np.int64)


def bin_sums(
    shard: Shard, codes: str, name: str, offsets: Int32s, features: Int32s, count: int, nodes: NDArray[np.signedinteger]
) -> Integers:
    """Return a worker's part of the sums of `count` nodes, int64 (count, slots, 3); a step."""
    grad, hess = f"grad{name}", f"hess{name}"

    def of_tree() -> Histograms:
        rows = shard.arrays[codes]
        columns = shard.made_of(f"columns of {codes}", [codes], lambda: np.ascontiguousarray(rows.T))
        made = Histograms(rows, columns, offsets.copy(), shard.threads)  # received arrays are read-only
        made.start_tree(shard.arrays[grad], shard.arrays[hess], features)
        return made

    histograms: Histograms = shard.made_of(f"histograms{name}", [codes, grad, hess], of_tree)
    return histograms.sums(*members(nodes, count))
