from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.trees.ensemble import (
    BitWalk,
    SplitTable,
    Tree,
    Walk,
    join_splits,
)
from trees.plain import random_codes, random_labels, train

N_CATEGORIES = 4  # codes 0..3; higher ones were never seen in training


def _random_tree(rng, depth, tables, n_numeric, n_categorical):
    """A tree of random shape whose splits go to random owners; columns after `n_numeric` are categories."""
    source, record, left, value = [-1], [-1], [-1], [0.0]
    level = [0]
    for _ in range(depth):
        below = []
        for node in level:
            if rng.random() < 0.3:
                continue
            owner = int(rng.integers(len(tables)))
            feature = int(rng.integers(n_numeric + n_categorical))
            missing_left = bool(rng.random() < 0.5)
            going, threshold = None, np.float32(rng.choice([-np.inf, np.inf, 0.0, *rng.normal(0, 1, 3)]))
            if feature >= n_numeric:
                going, threshold = rng.integers(0, 2, N_CATEGORIES + 1).astype(np.uint8).tobytes(), np.nan
            source[node], left[node] = owner, len(left)
            record[node] = tables[owner].add(feature, float(threshold), missing_left, going)
            below += [len(left), len(left) + 1]
            for column, empty in ((source, -1), (record, -1), (left, -1), (value, 0.0)):
                column += [empty, empty]
        level = below
    left_ = np.array(left, np.int32)
    return Tree(
        source=np.array(source, np.int16),
        record=np.array(record, np.int32),
        left=left_,
        value=np.where(left_ < 0, rng.normal(0, 1, len(left)), 0.0),
        gain=np.zeros(len(left)),
        cover=np.zeros(len(left)),
        count=np.zeros(len(left), np.int64),
    )


def _goes_left(table, record, values):
    x = values[table.feature[record]]
    if np.isnan(x):
        return table.missing_left[record]
    going = table.category_left[record]
    if going is None:
        return bool(x < np.float32(table.threshold[record]))
    return bool(going[int(x)] if int(x) < len(going) - 1 else going[-1])


def _leaf(tree, tables, parts, row, node=0):
    if tree.left[node] < 0:
        return node
    owner = tree.source[node]
    left = _goes_left(tables[owner], tree.record[node], parts[owner][row])
    return _leaf(tree, tables, parts, row, tree.left[node] + (0 if left else 1))


def _naive_leaves(trees, tables, parts):
    rows = range(len(parts[0]))
    leaves = [[_leaf(tree, tables, parts, row) for tree in trees] for row in rows]
    return np.array(leaves, np.int32).reshape(len(rows), len(trees))


def _naive_margins(trees, tables, parts, n_outputs):
    margins = np.full((len(parts[0]), n_outputs), 0.25)
    for number, leaves in enumerate(_naive_leaves(trees, tables, parts).T):
        margins[:, number % n_outputs] += trees[number].value[leaves]
    return margins


def _random_forest(seed, n_rows, n_owners, n_outputs, n_rounds, depth):
    rng = np.random.default_rng(seed)
    n_numeric, n_categorical = 3, 2
    tables = [SplitTable() for _ in range(n_owners)]
    trees = [_random_tree(rng, depth, tables, n_numeric, n_categorical) for _ in range(n_rounds * n_outputs)]
    parts = []
    for _ in range(n_owners):
        numeric = rng.normal(0, 1, (n_rows, n_numeric)).round(1)
        codes = rng.integers(0, N_CATEGORIES + 3, (n_rows, n_categorical))
        part = np.hstack([numeric, codes]).astype(np.float32)
        part[rng.random(part.shape) < 0.2] = np.nan
        parts.append(part)
    return trees, tables, parts


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    n_rows=st.integers(0, 150),
    n_owners=st.integers(1, 3),
    n_outputs=st.integers(1, 3),
    n_rounds=st.integers(0, 3),
    depth=st.integers(0, 5),
    threads=st.integers(1, 3),
)
def test_walking_by_values_and_by_bits_equals_a_recursive_walk(
    seed, n_rows, n_owners, n_outputs, n_rounds, depth, threads
):
    trees, tables, parts = _random_forest(seed, n_rows, n_owners, n_outputs, n_rounds, depth)
    expected = _naive_margins(trees, tables, parts, n_outputs)
    splits = join_splits(tables, [part.shape[1] for part in parts])
    by_values, by_bits = (np.full((n_rows, n_outputs), 0.25) for _ in range(2))
    Walk(trees, splits).add_to(by_values, np.hstack(parts), threads)
    bits = [table.decide(part, threads=threads) for table, part in zip(tables, parts, strict=True)]
    BitWalk(trees, splits.base).add_to(by_bits, np.vstack(bits), threads)
    np.testing.assert_array_equal(by_values, expected)
    np.testing.assert_array_equal(by_bits, expected)
    leaves = _naive_leaves(trees, tables, parts)
    found = BitWalk(trees, splits.base).leaves(np.vstack(bits), n_rows, threads)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, leaves)


@pytest.mark.parametrize("n_rows", [1, 63, 64, 65, 512, 777, 2049], ids=lambda n: f"{n}-rows")
def test_walking_many_rows_is_the_same_with_any_number_of_threads(n_rows):
    trees, tables, parts = _random_forest(7, n_rows, 2, 2, 3, 5)
    splits = join_splits(tables, [5, 5])
    results = []
    for threads in (1, 2, 3):
        by_values, by_bits = np.zeros((n_rows, 2)), np.zeros((n_rows, 2))
        Walk(trees, splits).add_to(by_values, np.hstack(parts), threads)
        bits = np.vstack([table.decide(part, threads=threads) for table, part in zip(tables, parts, strict=True)])
        walk = BitWalk(trees, splits.base)
        walk.add_to(by_bits, bits, threads)
        results += [by_values, by_bits]
        leaves = walk.leaves(bits, n_rows, threads)
        np.testing.assert_array_equal(leaves, _naive_leaves(trees, tables, parts))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    np.testing.assert_allclose(results[0] + 0.25, _naive_margins(trees, tables, parts, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "record", "left"),
    [
        pytest.param(1.0, 0, False, id="threshold-itself-goes-right"),
        pytest.param(np.nextafter(np.float32(1), np.float32(0)), 0, True, id="just-below-goes-left"),
        pytest.param(np.nan, 0, False, id="missing-right"),
        pytest.param(np.nan, 1, True, id="missing-left"),
        pytest.param(np.finfo(np.float32).max, 2, True, id="present-below-infinite-threshold"),
        pytest.param(np.nan, 2, False, id="missing-at-infinite-threshold"),
        pytest.param(0.0, 3, False, id="category-right"),
        pytest.param(1.0, 3, True, id="category-left"),
        pytest.param(2.0, 3, False, id="category-never-seen-right"),
        pytest.param(200.0, 4, True, id="category-never-seen-left"),
        pytest.param(np.nan, 3, True, id="missing-category"),
        pytest.param(-1.0, 4, True, id="negative-code-is-never-seen"),
        pytest.param(1e30, 4, True, id="huge-code-is-never-seen"),
        pytest.param(np.inf, 3, False, id="infinite-code-is-never-seen"),
    ],
)
def test_decide_sends_a_value(value, record, left):
    table = SplitTable()
    table.add(0, 1.0, False)
    table.add(0, 1.0, True)
    table.add(0, np.inf, False)
    table.add(0, np.nan, True, bytes([0, 1, 0]))
    table.add(0, np.nan, False, bytes([0, 0, 1]))
    assert table.decide(np.array([[value]], np.float32), np.array([record], np.int32)).tolist() == [[128 * left]]
    assert table.decide(np.array([[value]], np.float32))[record, 0] == 128 * left


def test_split_table_numbers_its_records():
    table = SplitTable()
    assert [table.add(5, 0.5, False), table.add(2, np.nan, True, b"\1\0")] == [0, 1]
    assert len(table) == 2
    assert (table.feature, table.missing_left, table.category_left) == ([5, 2], [False, True], [None, b"\1\0"])


def test_join_splits_counts_records_and_features_over_all_owners():
    first, none, last = SplitTable(), SplitTable(), SplitTable()
    first.add(1, 0.5, False)
    last.add(0, np.nan, True, b"\1\0\1")
    last.add(2, 7.0, False)
    joined = join_splits([first, none, last], [2, 0, 3])
    assert joined.base.tolist() == [0, 1, 1, 3]
    assert joined.feature.tolist() == [1, 2, 4]
    assert joined.threshold[[0, 2]].tolist() == [0.5, 7.0]
    assert joined.category_start.tolist() == [0, 0, 3, 3]
    assert joined.category_left.tolist() == [1, 0, 1]


def test_trees_compare_bit_for_bit():
    (tree,), _, _ = _random_forest(1, 1, 1, 1, 1, 4)
    assert len(tree.left) > 1
    copy = Tree(*(getattr(tree, name).copy() for name in Tree.__slots__))
    assert tree == copy
    copy.value[-1] = np.nextafter(copy.value[-1], 9.0)
    assert tree != copy
    assert tree != "a tree"


@pytest.mark.parametrize("objective", ["logistic", "softmax", "squared_error"])
@pytest.mark.parametrize("subsample", [1.0, 0.6], ids=["all-rows", "subsample"])
def test_margins_after_training_equal_those_of_walking_the_training_rows(objective, subsample):
    rng = np.random.default_rng(5)
    table = random_codes(rng, 333, [9, 4, 5, 12], missing=0.15, categorical=[1, 3])
    y = random_labels(rng, table, objective, 3)
    trained = train(
        table.cut(2), y, objective=objective, n_classes=3, max_depth=4, n_estimators=6, subsample=subsample,
        random_state=1,
    )  # fmt: skip
    assert sum(len(tree.left) for tree in trained.trees) > 50
    np.testing.assert_array_equal(trained.walk(trained.matrix), trained.margins)
    by_bits = trained.start(len(y))
    bits = np.vstack([part.splits.decide(part.matrix) for part in trained.parts])
    BitWalk(trained.trees, trained.joined().base).add_to(by_bits, bits)
    np.testing.assert_array_equal(by_bits, trained.margins)
