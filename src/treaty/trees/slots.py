"""Complete trees of hidden shape: a participant's rows in numbered slots, and splits from the sums of all slots.

A level of depth k has 2^k slots; the children of slot s are 2 s and 2 s + 1. A slot whose node is not split sends all
rows to 2 s + 1, so that a participant who follows its rows cannot distinguish nodes from other slots. All slots are
summed, never one child alone: if participants leave between two levels, a parent's sums minus one child's are not the
other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Codes, Flags, Floats, Int32s, Integers, contiguous
from treaty.trees.columns import BinSums
from treaty.trees.ensemble import Tree
from treaty.trees.growth import Growth, RowPartition, look_up_left
from treaty.trees.histograms import Histograms, width_of
from treaty.trees.objectives import Objective
from treaty.trees.splits import SplitRules, scan

VALUE_BITS = 32
"""Fractional bits of leaf values, which are rounded so that sums of shares of them are exact."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The sums that are exchanged: bins of a tree's columns, and missing values only of features that have some.

    `offsets` has each feature's first slot in a node's sums; `may_miss`, bool (n_features,), marks features with
    missing values in any row anywhere. `count_bits` is the width of the count packed below the sum of hess; 0 if both
    do not fit one number.
    """

    offsets: Int32s
    may_miss: Flags
    count_bits: int

    @classmethod
    def of(cls, offsets: Int32s, may_miss: Flags, n_rows: int, objective: Objective) -> Cells:
        """Return the cells for `n_rows` rows in total."""
        count_bits = n_rows.bit_length()
        fits = (n_rows * objective.hess_bound).bit_length() + count_bits <= 62
        return cls(offsets, may_miss, count_bits if fits else 0)

    @property
    def numbers(self) -> int:
        """Numbers exchanged per cell."""
        return 2 if self.count_bits else 3

    def of_columns(self, columns: Int32s) -> NDArray[np.intp]:
        """Return the indices of a node's sums that are exchanged."""
        parts = [np.arange(self.offsets[f], self.offsets[f + 1] - (not self.may_miss[f])) for f in columns.tolist()]
        return np.concatenate([np.empty(0, np.intp), *parts]).astype(np.intp)

    def pack(self, sums: Integers, columns: Int32s) -> Integers:
        """Return a participant's summand, int64 (n,), from its sums (n_slots, slots, 3)."""
        chosen = sums[:, self.of_columns(columns)]
        if not self.count_bits:
            return chosen.ravel()
        packed = np.stack([chosen[..., 0], (chosen[..., 1] << self.count_bits) + chosen[..., 2]], axis=-1)
        return packed.ravel()

    def length(self, n_slots: int, columns: Int32s) -> int:
        """Return the length of the result of `pack`."""
        return self.numbers * n_slots * len(self.of_columns(columns))

    def unpack(self, opened: Integers, n_slots: int, columns: Int32s) -> Integers:
        """Return sums (n_slots, slots, 3) from the sum over all participants."""
        cells = self.of_columns(columns)
        given = opened.reshape(n_slots, len(cells), self.numbers)
        sums = np.zeros((n_slots, int(self.offsets[-1]), 3), np.int64)
        if self.count_bits:
            sums[:, cells, 0] = given[..., 0]
            sums[:, cells, 1] = given[..., 1] >> self.count_bits
            sums[:, cells, 2] = given[..., 1] & ((1 << self.count_bits) - 1)
        else:
            sums[:, cells] = given
        return sums


class SlotShard:
    """A participant's binned, labelled rows, and their slots.

    `margins` is float64 (n_outputs, n_rows); `slots`, int64 (n_outputs, n_rows), has the slot of each row in each tree
    of the round; `clipped` counts the last round's clipped gradients.
    """

    def __init__(self, codes: Codes, y: Floats, weight: Floats | None, objective: Objective, cells: Cells) -> None:
        self.margins = np.full((objective.n_outputs, len(y)), objective.base_margins[:, None])
        self.slots = np.zeros((objective.n_outputs, len(y)), np.int64)
        self.clipped = 0
        self._codes, self._columns = np.ascontiguousarray(codes), np.ascontiguousarray(codes.T)
        self._y, self._weight, self._objective, self._cells = y, weight, objective, cells
        self._trees: list[tuple[Histograms, Int32s, Int32s | None]] = []

    def start_round(self, columns: Sequence[Int32s], rows: Sequence[Int32s | None]) -> None:
        """Compute gradients and put all rows into slot 0 of a tree per output.

        Each tree has its ascending features, and its ascending sample of rows (None: all).
        """
        grad, hess, self.clipped = self._objective.gradients(self.margins.T, self._y, self._weight)
        self.slots[:] = 0
        self._trees = []
        for output, (features, sampled) in enumerate(zip(columns, rows, strict=True)):
            histograms = Histograms(self._codes, self._columns, self._cells.offsets)
            histograms.start_tree(grad[output], hess[output], features)
            self._trees.append((histograms, features, sampled))

    def level(self, depth: int) -> Integers:
        """Return the participant's summand for all slots of a level of all trees, int64 (n,)."""
        parts = []
        for (histograms, features, sampled), slots in zip(self._trees, self.slots, strict=True):
            rows = np.arange(slots.shape[0], dtype=np.int32) if sampled is None else sampled
            order = np.argsort(slots[rows], kind="stable")
            starts = np.searchsorted(slots[rows][order], np.arange((1 << depth) + 1))
            parts.append(self._cells.pack(histograms.sums(rows[order], starts.astype(np.int64)), features))
        return np.concatenate(parts)

    def divide(self, output: int, left: Flags) -> None:
        """Send each row of a tree to the left or the right child of its slot."""
        self.slots[output] = 2 * self.slots[output] + ~left

    def decide(self, output: int, features: Int32s, left_bins: Flags) -> None:
        """Divide by known splits: each slot's feature (-1: none) and bins going left (n_slots, width)."""
        feature = features[self.slots[output]]
        codes = self._codes[np.arange(len(feature)), np.maximum(feature, 0)]
        self.divide(output, left_bins[self.slots[output], codes] & (feature >= 0))


@dataclass(frozen=True, slots=True)
class SlotSplits:
    """Splits of a level's slots: features, int32 (n_slots,), -1 for none; bins going left, bool (n_slots, width)."""

    features: Int32s
    left_bins: Flags


class SlotTree:
    """One tree that grows on the sums of all slots: call `split` for each level, then `finish`.

    `columns` are the tree's features, ascending; ``record(feature, left_bins) -> int`` writes a chosen split into the
    lookup table. `note` gets each node that may be split and its opened sums, int64 (slots, 3).
    """

    def __init__(
        self, rules: SplitRules, cells: Cells, columns: Int32s, categorical: Flags, record: Callable[[int, Flags], int],
        threads: int = 1, note: Callable[[int, Integers], None] | None = None,
    ) -> None:  # fmt: skip
        self._rules, self._cells, self._columns = rules, cells, columns
        self._categorical, self._record, self._threads, self._note = categorical, record, threads, note
        self._growth: Growth | None = None
        # of each node of the tree
        self._slot_of = np.zeros(1, np.int64)

    def split(self, opened: Integers | None, depth: int) -> SlotSplits:
        """Choose the splits of a level on the opened sums of its slots, int64 (n,).

        If sums below the root could not be opened (None), the level's nodes become leaves, by their parents' sums.
        """
        n_slots = 1 << depth
        chosen = SlotSplits(
            np.full(n_slots, -1, np.int32), np.zeros((n_slots, width_of(self._cells.offsets)), np.bool_)
        )
        if opened is None:
            assert self._growth is not None
            self._growth.level = None
            return chosen
        sums = self._cells.unpack(opened, n_slots, self._columns)
        first = slice(*self._cells.offsets[self._columns[0] : self._columns[0] + 2])
        # every row is in one bin of each feature
        totals = sums[:, first].sum(axis=1)
        if self._growth is None:
            self._growth = Growth(totals[0], self._rules)
        growth = self._growth
        if growth.level is None or growth.level.depth != depth:
            return chosen
        slots = self._slot_of[growth.level.nodes]
        if self._note is not None:
            for node, of_node in zip(growth.level.nodes.tolist(), sums[slots], strict=True):
                self._note(node, of_node)
        # participants may have left since the last level
        growth.level = replace(growth.level, totals=totals[slots])
        found = scan(
            sums[slots], totals[slots], self._columns, self._cells.offsets, self._categorical, self._rules,
            limits=growth.level.limits, threads=self._threads,
        )  # fmt: skip
        taken = growth.take(found)
        if taken is None:
            return chosen
        nodes, _, splits = taken
        records = [self._record(int(f), left) for f, left in zip(splits.feature, splits.left_bins, strict=True)]
        growth.divided(np.array(records, np.int32))
        of_nodes = self._slot_of[nodes]
        self._slot_of = np.concatenate([self._slot_of, np.stack([2 * of_nodes, 2 * of_nodes + 1], axis=1).ravel()])
        chosen.features[of_nodes], chosen.left_bins[of_nodes] = splits.feature, splits.left_bins
        return chosen

    @property
    def growing(self) -> bool:
        """Whether a slot of the next level may be split."""
        return self._growth is None or self._growth.level is not None

    def finish(self, depth: int) -> tuple[Tree, Floats]:
        """Return the tree, and its leaves' values in the slots of level `depth`, below all of them."""
        assert self._growth is not None
        tree = self._growth.tree()
        tree.value[:] = np.rint(tree.value * 2.0**VALUE_BITS) / 2.0**VALUE_BITS
        values = np.zeros(1 << depth)
        leaves = np.flatnonzero(tree.left < 0)
        values[((self._slot_of[leaves] + 1) << (depth - self._growth.depths[leaves])) - 1] = tree.value[leaves]
        return tree, values


# -------- one participant's rows of a table split by rows: a round's trees, grown by splits that another party chooses
#
# That party sees sums of many participants' rows and has `growth.Growth`; a participant has a `RowShard`.


@dataclass(slots=True)
class LevelSplits:
    """Splits of a tree level: nodes, left children and features, int32 (k,), and bins going left, bool (k, width)."""

    nodes: Int32s
    children: Int32s
    features: Int32s
    left_bins: Flags


@dataclass(slots=True)
class _GrowingTree:
    rows: RowPartition
    histograms: BinSums
    n_nodes: int = 1
    divided: list[LevelSplits] = field(default_factory=list)


class RowShard:
    """Binned, labelled rows, and their margins, float64 (n_outputs, n_rows); tree i adds to output ``i % n_outputs``.

    `codes` is (n_rows, n_features); `offsets` has each feature's first slot in a node's sums, its last slot being
    missing values. `clipped` counts the rows of the last round whose gradient was clipped. `histograms` returns
    the sums elsewhere of a round's tree, by its number; None: they are added up here.
    """

    def __init__(
        self, codes: Codes, offsets: Int32s, y: Floats, weight: Floats | None, objective: Objective, threads: int = 1,
        histograms: Callable[[int], BinSums] | None = None,
    ) -> None:  # fmt: skip
        self._histograms = histograms
        self.margins = np.full((objective.n_outputs, len(y)), objective.base_margins[:, None])
        self.clipped = 0
        self._codes, self._offsets = contiguous(codes), offsets
        self._columns = contiguous(codes.T)
        self._y, self._weight, self._objective, self._threads = y, weight, objective, threads
        self._growing: list[_GrowingTree] = []

    def start_round(self, columns: Sequence[Int32s], rows: Sequence[Int32s | None]) -> Integers:
        """Compute gradients, begin the round's trees (dropping unfinished ones), return their totals (n_trees, 3).

        Each tree has its ascending features, and its ascending sample of rows (None: all).
        """
        grad, hess, self.clipped = self._objective.gradients(self.margins.T, self._y, self._weight, self._threads)
        self._forget()
        totals = np.empty((len(columns), 3), np.int64)
        for number, (features, sampled) in enumerate(zip(columns, rows, strict=True)):
            output = number % len(self.margins)
            if self._histograms is None:
                histograms: BinSums = Histograms(self._codes, self._columns, self._offsets, self._threads)
            else:
                histograms = self._histograms(number)
            histograms.start_tree(grad[output], hess[output], features)
            self._growing.append(_GrowingTree(RowPartition(len(self._y), sampled, self._threads), histograms))
            among = slice(None) if sampled is None else sampled
            of_sample = grad[output][among], hess[output][among]
            totals[number] = of_sample[0].sum(), of_sample[1].sum(), len(of_sample[0])
        return totals

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
        for number, (tree, value, gain) in enumerate(zip(self._growing, values, gains, strict=True)):
            source, record = np.full(tree.n_nodes, -1, np.int16), np.full(tree.n_nodes, -1, np.int32)
            left = np.full(tree.n_nodes, -1, np.int32)
            for level in tree.divided:
                k = len(level.nodes)
                source[level.nodes], left[level.nodes] = 0, level.children
                record[level.nodes] = first_record + np.arange(k)
                first_record += k
            is_leaf, no_count = left < 0, np.zeros(tree.n_nodes, np.int64)
            of_leaves, of_splits = np.where(is_leaf, value, 0.0), np.where(is_leaf, 0.0, gain)
            trees.append(Tree(source, record, left, of_leaves, of_splits, np.zeros(tree.n_nodes), no_count))
            leaves = np.flatnonzero(is_leaf).astype(np.int32)
            tree.rows.add_to(self.margins[number % len(self.margins)], leaves, trees[-1].value[leaves])
        self._forget()
        return trees

    def _forget(self) -> None:
        for tree in self._growing:
            tree.histograms.end_tree()
        self._growing = []
