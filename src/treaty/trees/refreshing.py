"""New leaf weights for finished trees, from rows that were walked down them (XGBoost's ``updater="refresh"``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treaty.machine.arrays import Floats, Int32s, Integers
from treaty.trees.ensemble import Tree
from treaty.trees.splits import SplitRules


class LeafRows:
    """All rows of a table by the `leaf` of a tree that each is in, (n_rows,); `left` are the nodes' children."""

    def __init__(self, left: Int32s, leaf: Int32s | Integers) -> None:
        self._left, self._leaf = left, leaf

    def totals(self, grad: Integers, hess: Integers, sampled: Int32s | None = None) -> Integers:
        """Return the sums of grad and hess and the number of rows of every node, of all rows or the `sampled` ones."""
        among = slice(None) if sampled is None else sampled
        totals = np.zeros((len(self._left), 3), np.int64)
        for column, values in enumerate((grad, hess, np.ones(len(grad), np.int64))):
            np.add.at(totals[:, column], self._leaf[among], values[among])
        # children have higher numbers than their parents
        for node in np.flatnonzero(self._left >= 0)[::-1]:
            child = self._left[node]
            totals[node] = totals[child] + totals[child + 1]
        return totals

    def rows(self, nodes: Int32s, *, sampled: bool) -> tuple[Int32s, Integers]:
        """Return all rows leaf after leaf, and where those of each node start."""
        order = np.argsort(self._leaf, kind="stable").astype(np.int32)
        return order, np.searchsorted(self._leaf[order], np.append(nodes, len(self._left)))

    def add_to(self, margins: Floats, leaves: Int32s, values: Floats) -> None:
        """Add each leaf's value to the margins of its rows."""
        of_nodes = np.zeros(len(self._left))
        of_nodes[leaves] = values
        margins += of_nodes[self._leaf]


def refreshed(tree: Tree, rows: LeafRows, grad: Integers, hess: Integers, rules: SplitRules) -> Tree:
    """Return a tree of the same splits whose weights, gains and covers are those of other rows; 0 in empty leaves."""
    totals, inner, gain = rows.totals(grad, hess), tree.left >= 0, np.zeros(len(tree.left))
    gain[inner] = rules.gain(totals[inner], totals[tree.left[inner]])
    return replace(
        tree,
        value=np.where(inner, 0.0, rules.learning_rate * rules.leaf_weight(totals)),
        gain=gain,
        cover=(totals[:, 1] * rules.hess_unit).astype(np.float64),
        count=totals[:, 2],
    )
