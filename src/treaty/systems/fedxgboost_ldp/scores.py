"""Splits chosen by scores: each owner of columns reports its best gain per node, and only the winner reveals its split.

`ScoresFinder` is a split finder whose three steps are apart: scores of a level, decisions at the chosen splits,
division of the rows. Each party runs it over its own columns, between messages; the one that grows the tree also has
the others' scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.compute import Flags, Int32s, Integers, kernel
from treaty.trees.columns import SumsFinder


@dataclass(frozen=True, slots=True)
class TreeGradients:
    """What a tree is grown on: `grad` and `hess` for scores, the counted ones for nodes' totals and so leaf weights.

    All are int64 (n_rows,).
    """

    grad: Integers
    hess: Integers
    counted_grad: Integers
    counted_hess: Integers

    def totals(self, rows: Int32s | None) -> Integers:
        """Return the root's totals (3,) over sampled rows (None: all)."""
        counted = slice(None) if rows is None else rows
        n_rows = len(self.grad) if rows is None else len(rows)
        return np.array([self.counted_grad[counted].sum(), self.counted_hess[counted].sum(), n_rows])


class ScoresFinder(SumsFinder):
    """A split finder in steps; `rules` are those of scores (`noise.scoring_rules`).

    The first-order score of Le et al. 2021, -G_L G_R / reg_lambda, is half the gain under a `hess_unit` of 0.
    """

    def start(self, gradients: TreeGradients, rows: Int32s | None, columns: Int32s) -> None:
        """Begin a tree on sampled rows (None: all) and columns."""
        self.begin_tree(gradients.grad, gradients.hess, rows, columns)
        self._counted = gradients.counted_grad, gradients.counted_hess

    def n_rows_of(self, nodes: Int32s) -> int:
        """Return the number of the table's rows in these nodes together."""
        return len(self._rows.rows(nodes, sampled=False)[0])

    def count_left(self, nodes: Int32s, left: Flags) -> Integers:
        """Return the number of sampled rows of each node that go left; `left` is as in `left_totals`."""
        starts = self._rows.rows(nodes, sampled=False)[1][:-1]
        stops = starts + np.diff(self._rows.rows(nodes, sampled=True)[1])
        return np.array([np.count_nonzero(left[a:b]) for a, b in zip(starts, stops, strict=True)], np.int64)

    def left_totals(self, nodes: Int32s, left: Flags, wanted: NDArray[np.intp]) -> Integers:
        """Return totals int64 (n_wanted, 3) of left children of ``nodes[wanted]``; `left` is that of all `nodes`."""
        rows, starts = self._rows.rows(nodes, sampled=False)
        sampled = np.diff(self._rows.rows(nodes, sampled=True)[1])
        totals = np.zeros((len(wanted), 3), np.int64)
        _add_left(*self._counted, rows, starts, sampled, left, wanted, totals)
        return totals

    def apply(self, nodes: Int32s, children: Int32s, left: Flags) -> None:
        """Divide the rows of nodes, as `RowPartition.divide` does."""
        self._rows.divide(nodes, children, left)


@kernel
def _add_left(grad: Any, hess: Any, rows: Any, starts: Any, sampled: Any, left: Any, wanted: Any, totals: Any) -> None:
    """Sum up the rows going left of the first ``sampled[k]`` of ``rows[starts[k]:starts[k + 1]]`` of wanted nodes k."""
    for position in range(wanted.shape[0]):
        node = wanted[position]
        total_grad, total_hess, count = np.int64(0), np.int64(0), np.int64(0)
        for i in range(np.uint64(starts[node]), np.uint64(starts[node] + sampled[node])):
            row, goes = np.uint64(rows[i]), np.int64(left[i])  # no branch: half would be mispredicted
            total_grad += grad[row] * goes
            total_hess += hess[row] * goes
            count += goes
        totals[position, 0], totals[position, 1], totals[position, 2] = total_grad, total_hess, count
