"""Trees as flat arrays, the owners' lookup tables of splits, and walking rows down both.

A tree has, for each inner node, the owner of its split and that owner's record number. The owner's `SplitTable` has the
record: feature, threshold or categories, the side of missing values. Only together are they the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Bytes, Flags, Floats, Int32s, Integers
from treaty.machine.kernels import inner, kernel, new_array
from treaty.machine.shared_work import share

if TYPE_CHECKING:
    from treaty.trees.splits import SplitRules

# ---------------------------------------------------------------- kernels that walk rows down trees

# rows that walk down a tree together, so that their cache misses overlap
BATCH = 64
# bytes of packed decisions, for eight rows each, made together
BYTES = 256


class Nodes(NamedTuple):
    """The nodes of all trees, one tree after another."""

    # first node of each tree, and the tree's depth
    start: Integers
    depth: Integers
    # joined record number; 0 in a leaf
    split: NDArray[np.uint32]
    # left child, counted over all trees, the right one being the next; a leaf's own number
    left: NDArray[np.uint32]
    leaf: Flags
    value: Floats


class NodeSplits(NamedTuple):
    """The split of each node; entries of leaves are unused, but have to be valid."""

    feature: NDArray[np.uint32]
    threshold: NDArray[Any]
    missing_left: Flags
    # the node's part of category_left; empty for a threshold split
    category_start: Integers
    category_stop: Integers
    # of all nodes; empty without categories
    category_left: Bytes


@kernel
def record_bits(
    matrix: Any, records: Any, feature: Any, threshold: Any, missing_left: Any,
    category_start: Any, category_left: Any, first: int, last: int, packed: Any,
) -> None:  # fmt: skip
    """Write into ``packed[:, first:last]`` (records, n_rows / 8) which rows go left, as `numpy.packbits` does.

    ``matrix`` is (n_rows, n_features); the rest is as in `NodeSplits`, by record instead of by node.
    """
    n_rows = matrix.shape[0]
    # these rows stay in the cache while all records are decided
    for block in range(first, last, BYTES):
        stop = min(block + BYTES, last)
        for k in range(records.shape[0]):
            split = records[k]
            column = feature[split]
            start = category_start[split]
            # -1 for a threshold split
            unseen = category_start[split + 1] - start - 1
            for byte in range(block, stop):
                bits = 0
                for row in range(8 * byte, min(8 * byte + 8, n_rows)):
                    x = matrix[row, column]
                    goes = (x < threshold[split]) | ((x != x) & missing_left[split])
                    if unseen >= 0 and x == x:
                        # any other value must not become an index
                        code = np.int64(x) if 0.0 <= x < unseen else unseen
                        goes = category_left[start + code] != 0
                    bits |= int(goes) << (7 - row % 8)
                packed[k, byte] = bits


@inner
def _add_values(at: Any, size: Any, batch: int, tree: int, value: Any, margins: Any) -> None:
    """Add to the margins the value of the leaf of `tree` that each row of a batch reached."""
    output = np.uint64(tree % margins.shape[1])
    for row in range(size):
        margins[np.uint64(batch) + row, output] += value[np.uint64(at[row])]


@kernel
def walk_values(matrix: Any, nodes: Nodes, splits: NodeSplits, first: int, last: int, margins: Any) -> None:
    """Walk rows ``first..last`` to their leaves; splits are decided from the matrix.

    ``matrix`` is (n_rows, n_features) in C order. Leaf values are added to ``margins`` (n_rows, n_outputs),
    tree i to output ``i % n_outputs``.
    """
    # All rows of a batch take one step together and a row in a leaf stays there: without branches, which no processor
    # can predict here, this is forty times faster than walking row by row.
    start, depth, _, left, leaf, value = nodes
    feature, threshold, missing_left, category_start, category_stop, category_left = splits
    flat = matrix.reshape(-1)
    width = np.uint64(matrix.shape[1])
    one = np.uint32(1)
    any_category = category_left.shape[0] > 0
    at = new_array(BATCH, np.uint32)
    for batch in range(first, last, BATCH):
        size = np.uint64(min(BATCH, last - batch))
        origin = np.uint64(batch) * width
        for tree in range(start.shape[0]):
            at[:] = start[tree]
            for _ in range(depth[tree]):
                for row in range(size):
                    node = np.uint64(at[row])
                    x = flat[origin + row * width + np.uint64(feature[node])]
                    goes = (x < threshold[node]) | ((x != x) & missing_left[node]) | leaf[node]
                    if any_category and category_start[node] < category_stop[node] and x == x:
                        unseen = category_stop[node] - category_start[node] - 1
                        code = np.int64(x) if 0.0 <= x < unseen else unseen
                        goes = category_left[category_start[node] + code] != 0
                    at[row] = left[node] + (one - np.uint32(goes))
            _add_values(at, size, batch, tree, value, margins)


@kernel
def walk_bits(packed: Any, nodes: Nodes, first: int, last: int, margins: Any, leaves: Any) -> None:
    """Walk rows ``first..last`` to their leaves; ``packed[split]`` has a node's decisions, see `record_bits`.

    The rest is as in `walk_values`, but where ``leaves`` (n_rows, n_trees) has rows, it gets leaf numbers within each
    tree, and ``margins`` nothing.
    """
    start, depth, split, left, leaf, value = nodes
    one = np.uint32(1)
    at = new_array(BATCH, np.uint32)
    for batch in range(first, last, BATCH):
        size = np.uint64(min(BATCH, last - batch))
        for tree in range(start.shape[0]):
            at[:] = start[tree]
            for _ in range(depth[tree]):
                for position in range(size):
                    node = np.uint64(at[position])
                    row = np.uint64(batch) + position
                    byte = packed[np.uint64(split[node]), row >> np.uint64(3)]
                    goes = ((byte >> (np.uint64(7) - (row & np.uint64(7)))) & np.uint64(1) != 0) | leaf[node]
                    at[position] = left[node] + (one - np.uint32(goes))
            if leaves.shape[0] > 0:
                for position in range(size):
                    leaf_number = np.int64(at[position]) - start[tree]
                    leaves[np.uint64(batch) + position, np.uint64(tree)] = np.int32(leaf_number)
            else:
                _add_values(at, size, batch, tree, value, margins)


# ---------------------------------------------------------------- ensemble


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree; node 0 is the root, all arrays have one entry per node."""

    # the owner of the split, by its place in the job's list of parties, and its record; -1 in a leaf
    source: NDArray[np.int16]
    record: Int32s
    # left child, the right child being one higher; -1 in a leaf
    left: Int32s
    # leaf weight times learning rate; 0 in an inner node
    value: Floats
    # of the split, without the factor 1/2; 0 in a leaf
    gain: Floats
    # sum of hess, and rows of the tree's sample
    cover: Floats
    count: Integers

    def __eq__(self, other: object) -> bool:
        """Compare bit for bit."""
        return isinstance(other, Tree) and all(
            np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class SplitTable:
    """One owner's splits, by record number; grows during training and never leaves its owner."""

    # within the owner's table
    feature: list[int] = field(default_factory=list)
    # values below it go left (of the column's type; inf: all present values do); NaN for a split on categories
    threshold: list[float] = field(default_factory=list)
    missing_left: list[bool] = field(default_factory=list)
    # byte k is 1 where category code k goes left, and one more byte is for unseen codes; None for a threshold
    category_left: list[bytes | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.feature)

    def add(self, feature: int, threshold: float, missing_left: bool, category_left: bytes | None = None) -> int:
        """Write a record and return its number."""
        self.feature.append(feature)
        self.threshold.append(threshold)
        self.missing_left.append(missing_left)
        self.category_left.append(category_left)
        return len(self.feature) - 1

    def decide(self, matrix: NDArray[Any], records: Int32s | None = None, threads: int = 1) -> Bytes:
        """Return what `JoinedSplits.decide` does, of this table alone."""
        return join_splits([self], [matrix.shape[1]]).decide(matrix, records, threads)


@dataclass(frozen=True, slots=True)
class JoinedSplits:
    """The owners' split tables joined: record r of owner s is row ``base[s] + r``; features count over all owners.

    `threshold` is float32 where that is exact; `category_start` is (n + 1,), with an empty range for a threshold split.
    """

    base: Integers
    feature: Int32s
    threshold: NDArray[Any]
    missing_left: Flags
    category_start: Integers
    category_left: Bytes

    def __len__(self) -> int:
        return len(self.feature)

    def decide(self, matrix: NDArray[Any], records: Int32s | None = None, threads: int = 1) -> Bytes:
        """Return packed bits (`numpy.packbits`), uint8 (records, ceil(n_rows / 8)): which rows go left at each record.

        `matrix` is (n_rows, n_features); NaN is missing, a categorical feature holds category codes. `records` are rows
        of the joined table (None: all).
        """
        # read-only arrays, as of a message, are another type to numba
        records = np.arange(len(self), dtype=np.int32) if records is None else records.copy()
        packed = np.empty((len(records), -(-len(matrix) // 8)), np.uint8)

        def work(first: int, last: int) -> None:
            record_bits(
                matrix, records, self.feature, self.threshold, self.missing_left,
                self.category_start, self.category_left, first, last, packed,
            )  # fmt: skip

        share(work, packed.shape[1], threads, least=256)
        return packed


def join_splits(tables: Sequence[SplitTable], n_features: Sequence[int]) -> JoinedSplits:
    """Join the split tables of owners with `n_features` features each, in the order of the joined table."""
    offsets = np.cumsum([0, *n_features])
    of_category = [going or b"" for table in tables for going in table.category_left]
    threshold = np.array([t for table in tables for t in table.threshold], np.float64)
    narrow = threshold.astype(np.float32)
    return JoinedSplits(
        base=np.cumsum([0, *(len(table) for table in tables)]),
        feature=np.array([f + offsets[s] for s, table in enumerate(tables) for f in table.feature], np.int32),
        threshold=narrow if np.array_equal(narrow, threshold, equal_nan=True) else threshold,
        missing_left=np.array([m for table in tables for m in table.missing_left], np.bool_),
        category_start=np.cumsum([0, *(len(going) for going in of_category)]),
        category_left=np.frombuffer(b"".join(of_category), np.uint8),
    )


class Walk:
    """Trees whose splits are all known, prepared once for rows that may come a few at a time."""

    # preparing takes thirty times as long as one row's walk down a hundred trees
    def __init__(self, trees: Sequence[Tree], splits: JoinedSplits) -> None:
        self._nodes = _stack(trees, splits.base)
        # leaves have zeros
        at = np.where(self._nodes.leaf, len(splits.feature), self._nodes.split)
        start, stop = splits.category_start[:-1], splits.category_start[1:]
        of_records = splits.feature.astype(np.uint32), splits.threshold, splits.missing_left, start, stop
        feature, threshold, missing_left, start, stop = (np.append(of, np.zeros(1, of.dtype))[at] for of in of_records)
        self._splits = NodeSplits(feature, threshold, missing_left, start, stop, splits.category_left)

    def add_to(self, margins: Floats, matrix: NDArray[Any], threads: int = 1) -> None:
        """Walk rows down the trees and add leaf values to `margins` in place.

        `matrix` (n_rows, n_features) has all owners' columns side by side; tree i adds to output ``i %
        n_outputs`` of `margins` (n_rows, n_outputs).
        """
        matrix, nodes, splits = np.ascontiguousarray(matrix), self._nodes, self._splits
        share(lambda a, b: walk_values(matrix, nodes, splits, a, b, margins), len(matrix), threads, least=256)


class BitWalk:
    """Trees whose splits are decided by their owners, prepared once for rows that may come a few at a time.

    Decisions are `packed`, uint8 (n_records, ceil(n_rows / 8)): the lines of `SplitTable.decide`, owners one after
    another. ``base[s]`` is the line of owner s's first record.
    """

    def __init__(self, trees: Sequence[Tree], base: Integers) -> None:
        self._nodes = _stack(trees, base)

    def add_to(self, margins: Floats, packed: Bytes, threads: int = 1) -> None:
        """Walk rows down the trees and add leaf values to `margins` in place, as `Walk.add_to` does."""
        nodes, no_leaves = self._nodes, np.zeros((0, 0), np.int32)
        share(lambda a, b: walk_bits(packed, nodes, a, b, margins, no_leaves), len(margins), threads, least=256)

    def leaves(self, packed: Bytes, n_rows: int, threads: int = 1) -> Int32s:
        """Return the leaf of each row in each tree, int32 (n_rows, n_trees), numbered within the tree."""
        nodes, no_margins = self._nodes, np.zeros((0, 1))
        found = np.empty((n_rows, len(nodes.start)), np.int32)
        share(lambda a, b: walk_bits(packed, nodes, a, b, no_margins, found), n_rows, threads, least=256)
        return found


def _stack(trees: Sequence[Tree], base: Integers) -> Nodes:
    sizes = [len(tree.left) for tree in trees]
    start = np.cumsum([0, *sizes])[:-1]
    first = np.repeat(start, sizes)
    of_tree = np.concatenate([tree.left for tree in trees] or [np.zeros(0, np.int32)])
    leaf = of_tree < 0
    left = np.where(leaf, np.arange(len(of_tree)), of_tree + first)
    split = [np.where(tree.source < 0, 0, base[np.maximum(tree.source, 0)] + tree.record) for tree in trees]
    depth = np.zeros(len(trees), np.int64)
    # the nodes of one depth, and their trees
    numbers, nodes = np.arange(len(trees)), start
    while len(numbers := numbers[inner := ~leaf[nodes]]):
        nodes = left[nodes[inner]]
        depth[numbers] += 1
        numbers, nodes = np.concatenate([numbers, numbers]), np.concatenate([nodes, nodes + 1])
    return Nodes(
        start=start, depth=depth, split=np.concatenate(split or [start]).astype(np.uint32),
        left=left.astype(np.uint32), leaf=leaf,
        value=np.concatenate([tree.value for tree in trees] or [np.zeros(0)]),
    )  # fmt: skip


# ---------------- new leaf weights, from rows that were walked down finished trees (XGBoost's ``updater="refresh"``)


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
    # as in XGBoost, where other rows leave a node with too little hess for a weight
    term = np.where(totals[:, 1] >= rules.least_hess, rules.term(totals), 0.0)
    gain[inner] = term[tree.left[inner]] + term[tree.left[inner] + 1] - term[inner]
    return replace(
        tree,
        value=np.where(inner, 0.0, rules.leaf_value(totals)), gain=gain,
        cover=(totals[:, 1] * rules.hess_unit).astype(np.float64), count=totals[:, 2],
    )  # fmt: skip
