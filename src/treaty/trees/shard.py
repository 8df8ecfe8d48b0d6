"""One participant's rows of a table split by rows: a round's trees, grown by splits that another party chooses.

Whoever chooses sees sums of many participants' rows and keeps `growth.Growth`; a participant keeps this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treaty.compute import Flags, Floats, Int32s, Integers
from treaty.scratch import contiguous
from treaty.trees.columns import BinSums
from treaty.trees.ensemble import Tree
from treaty.trees.histograms import Histograms
from treaty.trees.objectives import Objective
from treaty.trees.partition import RowPartition, look_up_left


@dataclass(slots=True)
class LevelSplits:
    """Splits of a tree level: nodes, left children and features, int32 (k,), and bins going left, bool (k, 256)."""

    nodes: Int32s
    children: Int32s
    features: Int32s
    left_bins: Flags


@dataclass(slots=True)
class _GrowingTree:
    """A tree that grows: its rows, and the splits so far."""

    rows: RowPartition
    histograms: BinSums
    n_nodes: int = 1
    divided: list[LevelSplits] = field(default_factory=list)


class RowShard:
    """Binned, labelled rows, and their margins, float64 (n_outputs, n_rows).

    `codes` is uint8 (n_rows, n_features); `offsets` has each feature's first slot in a node's sums, its last slot
    being missing values. `clipped` counts the rows of the last round whose gradient was clipped. `histograms` returns
    what adds up the codes of a round's tree of that number, elsewhere; None: it is done here.
    """

    def __init__(
        self,
        codes: NDArray[np.uint8],
        offsets: Int32s,
        y: Floats,
        weight: Floats | None,
        objective: Objective,
        threads: int = 1,
        histograms: Callable[[int], BinSums] | None = None,
    ) -> None:
        self._histograms = histograms or self._of_own_codes
        self.margins = np.full((objective.n_outputs, len(y)), objective.base_margins[:, None])
        self.clipped = 0
        self._codes, self._offsets = contiguous(codes), offsets
        self._columns = contiguous(codes.T)
        self._y, self._weight, self._objective, self._threads = y, weight, objective, threads
        self._growing: list[_GrowingTree] = []

    def start_round(self, columns: Sequence[Int32s], rows: Sequence[Int32s | None]) -> Integers:
        """Compute gradients, begin a tree per output (dropping unfinished ones), return their totals (n_outputs, 3).

        Each tree has its ascending features, and its ascending sample of rows (None: all).
        """
        grad, hess, self.clipped = self._objective.gradients(self.margins.T, self._y, self._weight, self._threads)
        self._forget()
        totals = np.empty((len(columns), 3), np.int64)
        for output, (features, sampled) in enumerate(zip(columns, rows, strict=True)):
            histograms = self._histograms(output)
            histograms.start_tree(grad[output], hess[output], features)
            self._growing.append(_GrowingTree(RowPartition(len(self._y), sampled, self._threads), histograms))
            among = slice(None) if sampled is None else sampled
            of_sample = grad[output][among], hess[output][among]
            totals[output] = of_sample[0].sum(), of_sample[1].sum(), len(of_sample[0])
        return totals

    def _of_own_codes(self, output: int) -> Histograms:
        return Histograms(self._codes, self._columns, self._offsets, self._threads)

    def sums(self, output: int, nodes: Int32s) -> Integers:
        """Return bin sums of nodes of a tree: int64 (n_nodes, slots, 3)."""
        tree = self._growing[output]
        return tree.histograms.sums(*tree.rows.rows(nodes, sampled=True))

    def divide(self, output: int, chosen: LevelSplits) -> None:
        """Send the rows of nodes to their children.

        Raises ValueError for an unknown or already divided node, and for children that are not the next numbers.
        """
        tree, k = self._growing[output], len(chosen.nodes)
        before = np.concatenate([np.empty(0, np.int32), *(level.nodes for level in tree.divided)])
        if (
            len(np.unique(chosen.nodes)) < k
            or np.any((chosen.nodes < 0) | (chosen.nodes >= tree.n_nodes))
            or np.isin(chosen.nodes, before).any()
            or not np.array_equal(chosen.children, tree.n_nodes + 2 * np.arange(k))
            or np.any((chosen.features < 0) | (chosen.features >= self._codes.shape[1]))
        ):
            raise ValueError("splits that do not fit the tree")
        rows, starts = tree.rows.rows(chosen.nodes, sampled=False)
        left = np.empty(len(rows), np.bool_)
        look_up_left(self._columns, rows, starts, chosen.features, chosen.left_bins, 0, len(rows), left)
        tree.rows.divide(chosen.nodes, chosen.children, left)
        tree.n_nodes += 2 * k
        tree.divided.append(chosen)

    def n_nodes(self) -> list[int]:
        """Return the number of nodes of each tree of the round."""
        return [tree.n_nodes for tree in self._growing]

    def splits(self) -> list[tuple[int, Flags]]:
        """Return feature and left bins of the round's splits in the order in which `finish` records them."""
        return [
            (int(feature), bins)
            for tree in self._growing
            for level in tree.divided
            for feature, bins in zip(level.features, level.left_bins, strict=True)
        ]

    def finish(self, values: Sequence[Floats], gains: Sequence[Floats], first_record: int) -> list[Tree]:
        """Add the leaf values to the margins and return the round's trees, without counts of rows.

        `values` and `gains`, float64 (n_nodes,) of each tree, hold the values of leaves and the gains of splits;
        `first_record` is the record number of the first of `splits`.
        """
        trees = []
        for output, (tree, value, gain) in enumerate(zip(self._growing, values, gains, strict=True)):
            source, record = np.full(tree.n_nodes, -1, np.int16), np.full(tree.n_nodes, -1, np.int32)
            left = np.full(tree.n_nodes, -1, np.int32)
            for level in tree.divided:
                k = len(level.nodes)
                source[level.nodes], left[level.nodes] = 0, level.children
                record[level.nodes] = first_record + np.arange(k)
                first_record += k
            is_leaf = left < 0
            trees.append(
                Tree(
                    source=source,
                    record=record,
                    left=left,
                    value=np.where(is_leaf, value, 0.0),
                    gain=np.where(is_leaf, 0.0, gain),
                    cover=np.zeros(tree.n_nodes),
                    count=np.zeros(tree.n_nodes, np.int64),
                )
            )
            leaves = np.flatnonzero(is_leaf).astype(np.int32)
            tree.rows.add_to(self.margins[output], leaves, trees[-1].value[leaves])
        self._forget()
        return trees

    def _forget(self) -> None:
        for tree in self._growing:
            tree.histograms.end_tree()
        self._growing = []
