from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer

from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.privacy.leaks import (
    OpenedTree,
    RebuiltRows,
    _keys,
    _taken_apart,
    agreement,
    invert,
    rebuild,
)
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.pooled.options import BoostingOptions
from treaty.trees.boosting import Boosting, Forest
from treaty.trees.columns import ColumnSource, grow_trees
from treaty.trees.objectives import make_objective


class OpenedSums(ColumnSource):
    """Keeps what whoever opens the sums sees."""

    def watch(self):
        self.opened = []

    def start_tree(self, *tree):
        super().start_tree(*tree)
        self.opened.append({})

    def ask_sums(self, level, rows):
        super().ask_sums(level, rows)
        self.opened[-1].update(zip(level.asked.tolist(), self._sums.copy(), strict=True))


@pytest.fixture(scope="module")
def cancer():
    x, y = load_breast_cancer(return_X_y=True)
    return x[::2], y[::2].astype(float)


def attack(x, y, **changes):
    """Grow trees, give the attack their sums, and rebuild the table without and with what it finds."""
    options = BoostingOptions(**{"n_estimators": 10, "max_depth": 3, **changes}).checked(FederBoostHorizontal())
    table = to_table(x)
    bins, loss = (
        fit_bins(table, options.max_bin),
        make_objective("logistic", y, None, fractional_bits=options.fractional_bits),
    )
    source = OpenedSums(bins.transform(table), bins.offsets, np.zeros(x.shape[1], bool), lambda feature, left: 0)
    source.watch()
    forest = Forest(loss, ("all",))
    grow_trees(Boosting(y, None, forest, options.rules(loss), options.plan(x.shape[1])), [source])
    opened = [OpenedTree(asked, tree.left) for asked, tree in zip(source.opened, forest.trees, strict=True)]
    found = invert(opened, bins.offsets)
    slots = source.codes + bins.offsets[:-1]
    nothing = RebuiltRows(found.possible[:0], found.labels[:0])
    by_class = rows_by_class(slots, y, bins.offsets)
    base, got = (agreement(*rebuild(f, by_class, bins.offsets), source.codes, y) for f in (nothing, found))
    return found, slots, bins.offsets, base, got


def rows_by_class(slots, y, offsets):
    return np.stack([np.bincount(slots[y == label].ravel(), minlength=offsets[-1]) for label in (0, 1)])


def confident(found, slots, y, offsets):
    """How many rows are known but for a tenth, and how many of those can be rows of the table with that label."""
    mostly = np.flatnonzero(found.known(offsets) >= 0.9 * slots.shape[1])
    right = [(found.possible[row][slots].all(axis=1) & (y == found.labels[row])).any() for row in mostly]
    return len(mostly), sum(right)


@pytest.mark.parametrize("min_child_samples", [1, 20])
def test_rows_are_rebuilt_from_exact_sums_with_min_child_samples_and_without(cancer, min_child_samples):
    found, slots, offsets, base, got = attack(*cancer, min_child_samples=min_child_samples)
    sure, right = confident(found, slots, cancer[1], offsets)
    assert sure >= 20
    assert right >= 0.95 * sure
    assert base.mostly == 0.0
    assert got.mostly > 0.1
    assert got.mean > base.mean + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "guard",
    [
        {"min_child_samples": 100},  # a third of the rows: hardly a node but the root
        {"min_child_samples": 20, "max_bin": 8},
        {"min_child_samples": 20, "n_estimators": 1},  # gradients of one class are still alike
    ],
)
def test_hardly_a_row_is_rebuilt_from_bins_of_many_rows_or_one_tree(cancer, guard):
    found, slots, offsets, base, got = attack(*cancer, **guard)
    assert confident(found, slots, cancer[1], offsets)[0] <= 1
    assert got.mostly < 0.02
    assert got.mean < base.mean + 0.05


@pytest.mark.slow
def test_fewer_fractional_bits_leave_fewer_rows_to_rebuild(cancer):
    rebuilt = [attack(*cancer, min_child_samples=20, fractional_bits=bits)[-1].mostly for bits in (16, 8, 4)]
    assert rebuilt == sorted(rebuilt, reverse=True)
    assert rebuilt[-1] < 0.3 * rebuilt[0]


def root_of(slots, y, n_slots, asked=slice(None)):
    """A tree of one node whose rows have distinct gradients that no two sums of three share."""
    rows = np.arange(len(y))
    triples = np.stack([np.where(y, -1, 1) * (rows + 1), 8**rows, np.ones_like(rows)], axis=1)
    sums = np.zeros((n_slots, 3), np.int64)
    for column in slots.T[asked]:
        np.add.at(sums, column, triples)
    return OpenedTree({0: sums}, np.array([-1], np.int32))


@given(st.integers(4, 9), st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_of_rows_with_distinct_gradients_all_bins_of_up_to_three_are_found(n_rows, n_bins, seed):
    rng = np.random.default_rng(seed)
    offsets = np.append(np.arange(0, 4 * n_bins + 1, n_bins), 4 * n_bins + n_rows).astype(np.int32)
    slots = offsets[:-1] + np.column_stack([rng.integers(0, n_bins, (n_rows, 4)), rng.permutation(n_rows)])
    y, counts = rng.integers(0, 2, n_rows), np.bincount(slots.ravel(), minlength=offsets[-1])
    expected = np.zeros((n_rows, offsets[-1]), bool)
    for row, own in enumerate(slots):
        for slot, first, stop in zip(own, offsets[:-1], offsets[1:], strict=True):
            expected[row, first:stop] = counts[first:stop] > 3  # what is left, where the row is in none of the others
            if counts[slot] <= 3:
                expected[row, first:stop] = np.arange(first, stop) == slot
    found = invert([root_of(slots, y, offsets[-1])], offsets)
    rows = zip(found.possible.tolist(), found.labels.tolist(), strict=True)
    assert sorted(rows) == sorted(zip(expected.tolist(), y.tolist(), strict=True))


@example([(1, 1), (2, 1), (4, 1)], 0)  # 1 + 1 + 4 = 2 + 2 + 2
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_a_bin_is_taken_apart_when_there_is_one_way(keys, seed):
    known = np.unique(_keys(np.array(keys)))
    rng = np.random.default_rng(seed)
    held_rows = [rng.integers(0, len(known), size) for size in rng.integers(1, 5, 12)]
    totals = [known[rows].sum() for rows in held_rows]
    sums = np.array(
        [[total >> 32, total & 0xFFFFFFFF, len(rows)] for total, rows in zip(totals, held_rows, strict=True)]
    )
    held, settled = _taken_apart(sums, known)
    for slot, (total, rows) in enumerate(zip(totals, held_rows, strict=True)):
        choices = itertools.combinations_with_replacement(range(len(known)), len(rows))
        ways = [way for way in choices if known[list(way)].sum() == total]
        only = np.bincount(ways[0], minlength=len(known)) if len(ways) == 1 and len(rows) <= 3 else np.zeros(len(known))
        assert settled[slot] == only.any()
        assert np.array_equal(held[:, slot], np.minimum(only, 2))


def test_a_gradient_that_was_rounded_to_zero_makes_no_row():
    offsets = np.array([0, 3, 6], np.int32)
    slots = offsets[:-1] + np.array([[0, 1], [1, 2], [2, 0]])
    tree = root_of(slots, np.array([0, 1, 0]), 6)
    tree.asked[0][slots[0], 0] = 0
    assert len(invert([tree], offsets).labels) == 2


@pytest.mark.parametrize(
    ("shared", "same_labels", "n_found", "known"), [(4, True, 6, 12), (1, True, 12, 8), (4, False, 12, 8)]
)
def test_rows_of_two_trees_are_united_when_they_share_more_than_chance_explains(shared, same_labels, n_found, known):
    rng = np.random.default_rng(0)
    offsets = np.arange(0, 6 * (16 - shared) + 1, 6, dtype=np.int32)
    slots = offsets[:-1] + np.stack([rng.permutation(6) for _ in offsets[:-1]], axis=1)
    y = np.array([0, 1, 0, 1, 1, 0])
    columns = slice(8), slice(8 - shared, None)
    labels = y, y if same_labels else 1 - y
    trees = [root_of(slots, own, offsets[-1], asked) for own, asked in zip(labels, columns, strict=True)]
    found = invert(trees, offsets)
    assert len(found.labels) == n_found
    assert (found.known(offsets) == known).all()
    for possible, label in zip(found.possible, found.labels, strict=True):
        assert (possible[slots].all(axis=1) & ((y == label) | (not same_labels))).any()


def test_sums_of_a_sibling_are_those_of_the_parent_without_the_asked_one():
    root, right = np.array([[5, 3, 9], [1, 1, 2]]), np.array([[2, 1, 4], [0, 0, 0]])
    nodes = OpenedTree({0: root, 2: right}, np.array([1, -1, -1], np.int32)).nodes()
    assert {node: sums.tolist() for node, sums in nodes.items()} == {
        0: root.tolist(), 1: [[3, 2, 5], [1, 1, 2]], 2: right.tolist()
    }  # fmt: skip


def test_the_baseline_has_the_columns_of_each_class_and_the_true_table_agrees_with_itself():
    rng = np.random.default_rng(0)
    codes, y = np.column_stack([rng.integers(0, [3, 5], (40, 2)), rng.permutation(40)]), rng.integers(0, 2, 40)
    offsets = np.array([0, 3, 8, 48], np.int32)
    by_class = rows_by_class(codes + offsets[:-1], y, offsets)
    guessed, labels = rebuild(RebuiltRows(np.zeros((0, 48), bool), np.zeros(0, np.int64)), by_class, offsets)
    assert np.array_equal(rows_by_class(guessed + offsets[:-1], labels, offsets), by_class)
    same = agreement(codes[::-1], y[::-1], codes, y)
    assert (same.mean, same.mostly, same.labels) == (1.0, 1.0, 1.0)
    assert agreement(guessed, labels, codes, y).mean < 1.0
