"""A recorded tree as an auditor sees it: which rows are in which node, and how it grows once more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treaty.machine.arrays import Flags, Floats, Int32s, Integers
from treaty.messaging.messages import Array, view
from treaty.systems.vertical.audit.record import KeptTree
from treaty.trees.boosting import TreeSample
from treaty.trees.ensemble import Tree
from treaty.trees.growth import Growth
from treaty.trees.splits import Level, SplitRules, Splits

_NOT_ALLOWED = "it has splits that the job's options do not allow"


class Unsound(Exception):
    """What the active party's record says cannot have been; the text says what."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree's nodes, and its leaves counted from left to right.

    Node k has the leaves ``first[k]`` to ``stop[k] - 1``; `leaf` is the node of each row's leaf, `place` its count.
    """

    source: Int32s
    record: Int32s
    left: Int32s
    first: Integers
    stop: Integers
    leaf: Integers
    place: Integers

    def rows(self, node: int) -> Flags:
        """Return which rows are in a node, bool (n_rows,)."""
        inside: Flags = (self.place >= self.first[node]) & (self.place < self.stop[node])
        return inside


def shape_of(tree: KeptTree, n_rows: int, party: str) -> Shape:
    """Return a recorded tree's shape; Unsound where its nodes are no tree, or rows are in none of its leaves."""

    def read(array: Array, what: str, dtype: type[np.integer]) -> Integers:
        return view(array, dtype, (None,), peer=party, what=f"KeptTree.{what}").astype(np.int64)

    left = read(tree.left, "left", np.int32)
    source, record = read(tree.source, "source", np.int32), read(tree.record, "record", np.int32)
    leaf = read(tree.leaf, "leaf", np.uint8 if tree.leaf.dtype == "uint8" else np.int32)
    inner = np.flatnonzero(left >= 0)
    below = np.sort(np.concatenate([left[inner], left[inner] + 1]))
    if not np.array_equal(below, np.arange(1, len(left))) or (left[inner] <= inner).any() or len(left) == 0:
        raise Unsound("its nodes are not those of a tree")
    if not len(source) == len(record) == len(left):
        raise Unsound("its nodes are not those of a tree")
    if len(leaf) != n_rows or (leaf < 0).any() or (leaf >= len(left)).any() or (left[leaf] >= 0).any():
        raise Unsound(f"it does not have a leaf for each of {n_rows} rows")
    leaves = np.ones(len(left), np.int64)
    for node in inner[::-1]:  # children have higher numbers
        leaves[node] = leaves[left[node]] + leaves[left[node] + 1]
    first = np.zeros(len(left), np.int64)
    for node in inner:
        first[left[node]] = first[node]
        first[left[node] + 1] = first[node] + leaves[left[node]]
    return Shape(
        source.astype(np.int32), record.astype(np.int32), left.astype(np.int32),
        first, first + leaves, leaf, first[leaf],
    )  # fmt: skip


class SampledNodes:
    """The nodes of a tree by their sampled rows, bool (n_rows,)."""

    def __init__(self, shape: Shape, sampled: Flags) -> None:
        self._shape, self._sampled = shape, sampled
        self._spans = set(zip(shape.first.tolist(), shape.stop.tolist(), strict=True))
        in_leaf = np.bincount(shape.place[sampled], minlength=int(shape.stop.max(initial=1)))
        self._up_to = np.cumsum([0, *in_leaf])

    def has(self, rows: Flags) -> bool:
        """Tell whether these are all sampled rows of a node."""
        places = self._shape.place[rows]
        if not len(places) or (rows & ~self._sampled).any():
            return False
        first, stop = int(places.min()), int(places.max()) + 1
        return (first, stop) in self._spans and len(places) == self._up_to[stop] - self._up_to[first]


class Replay:
    """A tree that grows once more with the splits of a record, on the gradients that are expected.

    Raises Unsound for splits that the job's options do not allow: deeper, or into children of fewer than `fewest_rows`.
    """

    def __init__(self, shape: Shape, sample: TreeSample, fewest_rows: int) -> None:
        self._shape, self._fewest_rows = shape, fewest_rows
        n_rows = len(sample.grad)
        sampled = np.arange(n_rows) if sample.rows is None else sample.rows
        self._totals = np.zeros((len(shape.left), 3), np.int64)
        for column, values in enumerate((sample.grad, sample.hess, np.ones(n_rows, np.int64))):
            np.add.at(self._totals[:, column], shape.leaf[sampled], values[sampled])
        for node in np.flatnonzero(shape.left >= 0)[::-1]:  # children have higher numbers
            child = shape.left[node]
            self._totals[node] = self._totals[child] + self._totals[child + 1]

    def grow(self, rules: SplitRules) -> Tree:
        """Return the tree, whose leaf weights follow from the expected gradients."""
        growth = Growth(self._totals[0], rules)
        while growth.level is not None:
            chosen = growth.take(self._recorded_splits(growth.level))
            if chosen is not None:
                nodes, children, _ = chosen
                if not np.array_equal(self._shape.left[nodes], children):
                    raise Unsound("its nodes are in another order than a tree's grow in")
                growth.divided(self._shape.record[nodes])
        tree = growth.tree()
        if not np.array_equal(tree.left, self._shape.left):
            raise Unsound(_NOT_ALLOWED)
        return tree

    def _recorded_splits(self, level: Level) -> Splits:
        shape, splits = self._shape, Splits.none(len(level.nodes))
        for k, node in enumerate(level.nodes.tolist()):
            if node < len(shape.left) and shape.left[node] >= 0:
                child = shape.left[node]
                if self._totals[child : child + 2, 2].min() < self._fewest_rows:
                    raise Unsound(_NOT_ALLOWED)
                splits.source[k], splits.feature[k] = shape.source[node], 0
                splits.left_totals[k] = self._totals[child]
        return splits

    def rows(self, nodes: Int32s, *, sampled: bool) -> tuple[Int32s, Integers]:
        """Return all rows leaf after leaf, and where those of each start."""
        order = np.argsort(self._shape.leaf, kind="stable").astype(np.int32)
        return order, np.searchsorted(self._shape.leaf[order], np.append(nodes, len(self._shape.left)))

    def add_to(self, margins: Floats, leaves: Int32s, values: Floats) -> None:
        """Add each leaf's value to the margins of its rows."""
        of_nodes = np.zeros(len(self._shape.left))
        of_nodes[leaves] = values
        margins += of_nodes[self._shape.leaf]
