"""Independent trees of a round that grow level by level together, such as those of its classes.

A training over a network asks about the nodes of all these trees in the same messages, and so takes the round trips of
one tree. The trees do not depend on each other, as their gradients are those before the round: they are the same as if
they were grown one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.trees.boosting import TreeSample
from treaty.trees.constraints import Directions
from treaty.trees.ensemble import Tree
from treaty.trees.growth import Growth, Places, RowPartition
from treaty.trees.splits import Level, SplitRules, Splits, end_to_end

# node u of tree t has the number t * (_NUMBERS // trees) + u
_NUMBERS = 1 << 30

_TOTALS = "totals", "asked_totals"


def joined_sample(samples: Sequence[TreeSample]) -> TreeSample:
    """Return the samples of trees on the same columns as one, whose gradients are (trees, n_rows) if there are many.

    Of many trees, `rows` is None: each has its own.
    """
    if len(samples) == 1:
        return samples[0]
    grad, hess = (np.stack([getattr(sample, name) for sample in samples]) for name in ("grad", "hess"))
    return TreeSample(grad, hess, None, samples[0].columns)


class Lockstep:
    """Trees while they grow together, without their rows; used as `growth.Growth` is.

    `level` has the nodes of all trees to split next, tree after tree; None when all trees are complete. Several trees
    take neither constraints nor `max_leaves`.
    """

    def __init__(self, samples: Sequence[TreeSample], rules: SplitRules) -> None:
        self._growths = [Growth(sample.totals, rules) for sample in samples]
        self._stride = _NUMBERS // len(samples)
        # of each tree, the place of its first node among those of the last level
        self._first = [0] * len(samples)
        self.level = self._joined()

    def take(self, splits: Splits) -> tuple[Int32s, Int32s, Splits] | None:
        """Take the level's best splits, see `Growth.take`."""
        self._divided: list[tuple[Growth, int]] = []
        found, first = [], 0
        for number, growth in enumerate(self._growths):
            if growth.level is None:
                continue
            count = len(growth.level.nodes)
            of_tree = splits if count == len(splits.feature) else splits.take(np.arange(first, first + count))
            first += count
            if (taken := growth.take(of_tree)) is not None:
                nodes, children, chosen = taken
                offset = np.int32(number * self._stride)
                found.append((nodes + offset, children + offset, chosen))
                self._divided.append((growth, len(nodes)))
        self.level = self._joined()
        if not found:
            return None
        nodes_of, children_of, chosen_of = zip(*found, strict=True)
        return np.concatenate(nodes_of), np.concatenate(children_of), end_to_end(chosen_of)

    def divided(self, records: Int32s) -> None:
        """Record the owners' record numbers of the splits that `take` returned."""
        first = 0
        for growth, count in self._divided:
            growth.divided(records[first : first + count])
            first += count

    def trees(self) -> list[tuple[Tree, Directions]]:
        """Return the trees as far as they are grown, with their splits' directions (`Growth.directions`)."""
        return [(growth.tree(), growth.directions) for growth in self._growths]

    def _joined(self) -> Level | None:
        """Return the next level of all trees."""
        levels = [(number, growth.level) for number, growth in enumerate(self._growths) if growth.level is not None]
        if not levels or len(self._growths) == 1:
            return levels[0][1] if levels else None
        # nodes, those asked about, `asked_index` and `parent_index`
        parts: list[tuple[Int32s, Int32s, Int32s, Int32s]] = []
        before, self._first = self._first, [0] * len(self._growths)
        first = first_asked = 0
        for number, level in levels:
            offset = np.int32(number * self._stride)
            parents = np.where(level.parent_index < 0, -1, level.parent_index + before[number]).astype(np.int32)
            positions = level.asked_index + np.int32(first_asked)
            parts.append((level.nodes + offset, level.asked + offset, positions, parents))
            self._first[number], first, first_asked = first, first + len(level.nodes), first_asked + len(level.asked)
        nodes, asked, asked_index, parent_index = map(np.concatenate, zip(*parts, strict=True))
        of = [level for _, level in levels]
        totals, asked_totals = (np.concatenate([getattr(level, name) for level in of]) for name in _TOTALS)
        return Level(of[0].depth, nodes, totals, asked, asked_totals, asked_index, parent_index, of[0].last)


class LockstepRows:
    """Which rows are in which nodes of trees that grow together; used as `growth.RowPartition` is.

    `of_trees` are the trees' own partitions, `n_rows` the rows of the table.
    """

    def __init__(self, samples: Sequence[TreeSample], threads: int = 1) -> None:
        self.of_trees = [sample.partition(threads) for sample in samples]
        self.n_rows = samples[0].grad.shape[-1]
        self._stride = _NUMBERS // len(samples)

    def trees(self, nodes: Int32s) -> Int32s:
        """Return the number of each node's tree, int32 (n,)."""
        return nodes // np.int32(self._stride)

    def rows(self, nodes: Int32s, *, sampled: bool) -> tuple[Int32s, Integers]:
        """Return rows of `nodes`, sampled or all, and starts, as `RowPartition.rows` does."""
        found = [of.rows(own, sampled=sampled) for of, own, _ in self._runs(nodes)]
        if len(found) == 1:
            return found[0]
        starts = np.cumsum([0, *(size for _, of in found for size in np.diff(of))])
        return np.concatenate([np.empty(0, np.int32), *(rows for rows, _ in found)]), starts

    def rows_of_trees(self, nodes: Int32s, *, sampled: bool) -> tuple[Integers, Integers]:
        """Return the same as `rows`, but row r in tree t as ``t * n_rows + r``."""
        rows, starts = self.rows(nodes, sampled=sampled)
        first_rows = self.trees(nodes).astype(np.int64) * self.n_rows
        return rows + np.repeat(first_rows, np.diff(starts)), starts

    def parts(self, nodes: Int32s) -> Iterator[tuple[slice, Places]]:
        """Yield the sampled rows of nodes tree by tree, see `RowPartition.parts`; `nodes` are in the trees' order."""
        for number, (of, own, _) in zip(dict.fromkeys(self.trees(nodes).tolist()), self._runs(nodes), strict=True):
            outputs = slice(None) if len(self.of_trees) == 1 else slice(number, number + 1)
            yield outputs, of.places(own, sampled=True)

    def left_totals(self, grad: Integers, hess: Integers, nodes: Int32s, left: Flags) -> Integers:
        """Return the totals of left children, int64 (n_nodes, 3), by gradients of each tree, (trees, n_rows)."""
        totals, first = [np.empty((0, 3), np.int64)], 0
        for of, own, number in self._runs(nodes):
            size = int(of.places(own, sampled=False)[1][-1])
            wanted, going = np.arange(len(own)), left[first : first + size]
            totals.append(of.left_totals(grad[number], hess[number], own, going, wanted))
            first += size
        return np.concatenate(totals)

    def divide(self, nodes: Int32s, children: Int32s, left: Flags) -> None:
        """Move the rows of `nodes`, which are in the trees' order, to their children, see `RowPartition.divide`."""
        first_node, first = 0, 0
        for of, own, number in self._runs(nodes):
            of_children = children[first_node : first_node + len(own)] - np.int32(number * self._stride)
            size = int(of.places(own, sampled=False)[1][-1])
            of.divide(own, of_children, left[first : first + size])
            first_node, first = first_node + len(own), first + size

    def _runs(self, nodes: Int32s) -> Iterator[tuple[RowPartition, Int32s, int]]:
        """Yield runs of nodes of one tree: its rows, the nodes' numbers in the tree, and the tree's number."""
        trees = self.trees(nodes)
        changes = np.flatnonzero(np.diff(trees)) + 1
        for first, last in pairwise([0, *changes.tolist(), len(nodes)] if len(nodes) else []):
            number = int(trees[first])
            yield self.of_trees[number], nodes[first:last] - np.int32(number * self._stride), number
