"""Bin sums of gradients that a party knows, added up by its cluster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.shards import ByRows, Shard, Shards, added_up
from treaty.compute import Int32s, Integers
from treaty.scratch import contiguous
from treaty.trees.histograms import Histograms

CODES = "codes"


class ClusterHistograms:
    """See `trees.histograms.Histograms`, of codes that workers keep.

    `codes`, uint8 (n_rows, n_features), are given to the workers unless they keep them already, with `codes` None.
    `name` tells the trees of a round apart.
    """

    def __init__(
        self, shards: Shards, codes: NDArray[np.uint8] | None, offsets: Int32s, n_rows: int, name: str = ""
    ) -> None:
        self._shards, self._offsets, self._name, self._n_rows = shards, offsets, name, n_rows
        if codes is not None:
            shards.keep(CODES, contiguous(codes))

    def start_tree(self, grad: Integers, hess: Integers, features: Int32s) -> None:
        """See `Histograms`."""
        self._features = features.copy()
        for what, values in (("grad", grad), ("hess", hess)):
            self._shards.keep(f"{what}{self._name}", values)

    def end_tree(self) -> None:
        """Let the workers forget the tree's gradients."""
        for what in ("grad", "hess"):
            self._shards.drop(f"{what}{self._name}")

    def sums(self, rows: Int32s, starts: Integers, firsts: Integers | None = None) -> Integers:
        """See `Histograms`."""
        nodes = nodes_of(rows, starts, starts if firsts is None else firsts, self._n_rows)
        args = self._name, self._offsets, self._features, len(starts) - 1, ByRows(nodes)
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
    shard: Shard, name: str, offsets: Int32s, features: Int32s, count: int, nodes: NDArray[np.signedinteger]
) -> Integers:
    """Return a worker's part of the sums of `count` nodes, int64 (count, slots, 3); a step."""
    codes, grad, hess = CODES, f"grad{name}", f"hess{name}"

    def of_tree() -> Histograms:
        rows = shard.arrays[codes]
        columns = shard.made_of("columns", [codes], lambda: np.ascontiguousarray(rows.T))
        made = Histograms(rows, columns, offsets.copy(), shard.threads)  # received arrays are read-only
        made.start_tree(shard.arrays[grad], shard.arrays[hess], features)
        return made

    histograms: Histograms = shard.made_of(f"histograms{name}", [codes, grad, hess], of_tree)
    return histograms.sums(*members(nodes, count))
