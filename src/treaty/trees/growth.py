"""Grow one tree level by level from node totals alone.

The grower holds no rows and knows no parties: it asks a split finder for the best splits of a whole level, decides
which to keep, tells the finder, and turns totals into leaf weights. Whatever differs between protocols is in their
finders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Floats, Int32s, Integers
from treaty.trees.ensemble import Tree
from treaty.trees.splits import Level, SplitRules, Splits


class NoMoreTrees(Exception):
    """A split finder may not start another tree."""


class SplitFinder(Protocol):
    """Finds splits and applies them; holds the rows, or asks those who do."""

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> Integers:
        """Take a tree's gradients (n_rows,), sampled rows (None: all) and columns; return the root's totals (3,).

        Raises `NoMoreTrees` when no further tree may be grown: the finished rounds are the model.
        """

    def best_splits(self, level: Level) -> Splits:
        """Return the best admissible split of every node of `level`."""

    def divide(self, nodes: Int32s, children: Int32s, chosen: Splits) -> Int32s:
        """Apply the `chosen` splits of `nodes`; return the owners' record numbers of the splits.

        ``children`` are the left children; a right child's number is one higher.
        """

    def leaf_rows(self, leaves: Int32s) -> tuple[Int32s, Integers]:
        """Return all rows leaf after leaf, whether sampled or not, and where those of each leaf start, and end."""

    def finish(self, tree: Tree, margins: Floats) -> None:
        """Add the finished tree's leaf values to the margins (n_rows,) of the rows."""


LeafValues = Callable[[Int32s, Integers], Floats]
"""``leaf_values(rows, starts)`` returns the weight of each leaf, whose rows are ``rows[starts[k]:starts[k + 1]]``."""


class Growth:
    """One tree while it grows, without its rows: the nodes to split next, and the totals of all others.

    `totals` (3,) are the root's sum of grad, sum of hess and number of sampled rows. `level` holds the nodes whose
    best splits are wanted next; None when the tree is complete.
    """

    def __init__(self, totals: Integers, rules: SplitRules) -> None:
        self._rules = rules
        self._totals = [totals[None]]
        self._n_nodes = 1
        self._divided: list[_Divided] = []
        self.level = _first_level(totals[None], rules)

    def take(self, splits: Splits) -> tuple[Int32s, Int32s, Splits] | None:
        """Take the level's best splits; return nodes to divide, their left children and splits, or None for none.

        `divided` must follow before the next level.
        """
        assert self.level is not None
        kept = np.flatnonzero(splits.feature >= 0)
        level, self.level = self.level, None
        if len(kept) == 0:
            return None
        nodes, chosen, totals = level.nodes, splits, level.totals
        if len(kept) < len(nodes):
            nodes, chosen, totals = nodes[kept], splits.take(kept), totals[kept]
        children = (self._n_nodes + 2 * np.arange(len(kept))).astype(np.int32)
        of_pairs = np.empty((len(kept), 2, 3), np.int64)
        of_pairs[:, 0] = chosen.left_totals
        np.subtract(totals, chosen.left_totals, out=of_pairs[:, 1])
        self._totals.append(of_pairs.reshape(-1, 3))
        self._n_nodes += 2 * len(kept)
        self.level = _next_level(level.depth + 1, of_pairs, children, kept, self._rules)
        self._taken = nodes, children, chosen
        return self._taken

    def divided(self, records: Int32s) -> None:
        """Record the owners' record numbers of the splits that `take` returned."""
        nodes, children, chosen = self._taken
        self._divided.append((nodes, children, records, chosen))

    def tree(self) -> Tree:
        return _tree(np.concatenate(self._totals), self._divided, self._rules)


def grow_tree(
    finder: SplitFinder,
    grad: Integers,
    hess: Integers,
    margins: Floats,
    rules: SplitRules,
    *,
    rows: Int32s | None,
    columns: Int32s,
    leaf_values: LeafValues | None = None,
) -> Tree:
    """Grow one tree on fixed-point gradients (n_rows,) and add its leaf values to `margins` (n_rows,).

    `rows` (None: all) and `columns`, counted over all parties, are the tree's samples, ascending. `leaf_values` gives
    leaves other weights than those by gradients, before the learning rate.
    """
    growth = Growth(finder.start_tree(grad, hess, rows, columns), rules)
    while growth.level is not None:
        taken = growth.take(finder.best_splits(growth.level))
        if taken is not None:
            growth.divided(finder.divide(*taken))
    tree = growth.tree()
    if leaf_values is not None:
        leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
        tree.value[leaves] = rules.learning_rate * leaf_values(*finder.leaf_rows(leaves))
    finder.finish(tree, margins)
    return tree


_Divided = tuple[Int32s, Int32s, Int32s, Splits]
"""Nodes of a level, their left children, records and splits."""


def _tree(totals: Integers, divided: list[_Divided], rules: SplitRules) -> Tree:
    """Build the tree from all nodes' totals and the divisions of every level."""
    source, gain = np.full(len(totals), -1, np.int16), np.zeros(len(totals))
    record, left = np.full(len(totals), -1, np.int32), np.full(len(totals), -1, np.int32)
    for nodes, children, records, chosen in divided:
        source[nodes], record[nodes], left[nodes], gain[nodes] = chosen.source, records, children, chosen.gain
    return Tree(
        source=source,
        record=record,
        left=left,
        value=np.where(left < 0, rules.learning_rate * rules.leaf_weight(totals), 0.0),
        gain=gain,
        cover=(totals[:, 1] * rules.hess_unit).astype(np.float64),
        count=totals[:, 2],
    )


def _first_level(total: Integers, rules: SplitRules) -> Level | None:
    if rules.max_depth < 1 or total[0, 2] < 2 * rules.min_child_samples:
        return None
    root = np.zeros(1, np.int32)
    return Level(0, root, total, root, total, root, root - 1)


def _next_level(
    depth: int, totals: Integers, children: Int32s, parents: NDArray[np.intp], rules: SplitRules
) -> Level | None:
    """List the children still to be split, and of each pair the smaller one, whose sums are computed.

    ``totals`` are (n_pairs, 2, 3), ``children`` the left ones' numbers, ``parents`` positions in the last level.
    """
    counts = totals[:, :, 2]
    wanted = counts >= 2 * rules.min_child_samples
    asked = wanted.any(axis=1)
    if depth >= rules.max_depth or not asked.any():
        return None
    smaller = (counts[:, 0] > counts[:, 1]).astype(np.int32)
    sides = np.arange(2, dtype=np.int32)
    asked_index = np.repeat(np.cumsum(asked, dtype=np.int32)[:, None] - 1, 2, axis=1)
    parent_index = np.where(sides == smaller[:, None], -1, parents[:, None]).astype(np.int32)
    return Level(
        depth,
        (children[:, None] + sides)[wanted],
        totals[wanted],
        (children + smaller)[asked],
        totals[np.arange(len(totals)), smaller][asked],
        asked_index[wanted],
        parent_index[wanted],
    )
