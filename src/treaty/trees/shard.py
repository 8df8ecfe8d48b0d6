"""One holder's rows of a table that is cut by rows: all trees of a round, grown by splits that somebody else chooses.

Whoever chooses sees sums of many holders' rows and keeps `growth.Growth`; a holder keeps this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treaty.trees.ensemble import Tree
from treaty.trees.histograms import Histograms
from treaty.trees.kernels import look_up_left
from treaty.trees.objectives import Objective
from treaty.trees.partition import RowPartition


@dataclass(slots=True)
class Divided:
    """Splits of one tree level.

    Attributes
    ----------
    nodes, children, features : int32 (k,)
        Nodes, their left children, the features they are divided by.
    left_bins : bool (k, 256)
        Bins going left.
    """

    nodes: NDArray[np.int32]
    children: NDArray[np.int32]
    features: NDArray[np.int32]
    left_bins: NDArray[np.bool_]


@dataclass(slots=True)
class _Growing:
    """A tree that grows: its rows, and the shape so far."""

    rows: RowPartition
    histograms: Histograms
    n_nodes: int = 1
    divided: list[Divided] = field(default_factory=list)


class RowShard:
    """Binned, labelled rows.

    Parameters
    ----------
    codes : uint8 (n_rows, n_features)
    offsets : int32 (n_features + 1,)
        First slot of each feature in a node's sums; its last slot is missing values.
    y, weight : float64 (n_rows,)
        `weight` may be None.
    objective : Objective
    threads : int

    Attributes
    ----------
    margins : float64 (n_outputs, n_rows)
    clipped : int
        Rows of the last round whose gradient was clipped.
    """

    def __init__(
        self,
        codes: NDArray[np.uint8],
        offsets: NDArray[np.int32],
        y: NDArray[np.float64],
        weight: NDArray[np.float64] | None,
        objective: Objective,
        threads: int = 1,
    ) -> None:
        self.margins = np.full((objective.n_outputs, len(y)), objective.base_margin)
        self.clipped = 0
        self._codes, self._offsets = np.ascontiguousarray(codes), offsets
        self._columns = np.ascontiguousarray(codes.T)
        self._y, self._weight, self._objective, self._threads = y, weight, objective, threads
        self._growing: list[_Growing] = []

    def start_round(
        self, columns: Sequence[NDArray[np.int32]], rows: Sequence[NDArray[np.int32] | None]
    ) -> NDArray[np.int64]:
        """Compute gradients and begin a tree per output; trees that were growing are forgotten.

        Parameters
        ----------
        columns : sequence of int32
            Of each tree, its ascending features.
        rows : sequence of int32 or None
            Of each tree, its ascending sample of rows; None for all.

        Returns
        -------
        int64 (n_outputs, 3)
            Each tree's sum of grad, sum of hess and number of sampled rows.
        """
        grad, hess, self.clipped = self._objective.gradients(self.margins.T, self._y, self._weight, self._threads)
        self._growing, totals = [], np.empty((len(columns), 3), np.int64)
        for output, (features, sampled) in enumerate(zip(columns, rows, strict=True)):
            histograms = Histograms(self._codes, self._columns, self._offsets, self._threads)
            histograms.start_tree(grad[output], hess[output], features)
            self._growing.append(_Growing(RowPartition(len(self._y), sampled, self._threads), histograms))
            among = slice(None) if sampled is None else sampled
            of_sample = grad[output][among], hess[output][among]
            totals[output] = of_sample[0].sum(), of_sample[1].sum(), len(of_sample[0])
        return totals

    def sums(self, output: int, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return bin sums of nodes of a tree: int64 (n_nodes, slots, 3)."""
        tree = self._growing[output]
        return tree.histograms.sums(*tree.rows.rows(nodes, sampled=True))

    def divide(self, output: int, chosen: Divided) -> None:
        """Send the rows of nodes to their children.

        Raises
        ------
        ValueError
            When a node is none, or divided before, or children are not the next numbers.
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
        """Return how many nodes each tree of the round has."""
        return [tree.n_nodes for tree in self._growing]

    def splits(self) -> list[tuple[int, NDArray[np.bool_]]]:
        """Return feature and bins going left of all splits of the round, in the order in which `finish` records them.

        That is tree after tree, in each as they came.
        """
        return [
            (int(feature), bins)
            for tree in self._growing
            for level in tree.divided
            for feature, bins in zip(level.features, level.left_bins, strict=True)
        ]

    def finish(
        self, values: Sequence[NDArray[np.float64]], gains: Sequence[NDArray[np.float64]], first_record: int
    ) -> list[Tree]:
        """Add the leaves' values to the margins and return the round's trees, which say nothing of how many rows.

        Parameters
        ----------
        values, gains : sequence of float64 (n_nodes,)
            Of each tree's nodes: value of leaves, gain of splits.
        first_record : int
            Number of the record of the first of `splits`.
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
        self._growing = []
        return trees
