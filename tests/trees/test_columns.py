from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import all_but_first_slow
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import JoinedColumns, SplitSearch, grow_tree
from treaty.trees.ensemble import Tree
from treaty.trees.splits import SplitRules
from trees.oracle import slow_tree
from trees.plain import Codes, random_codes, random_labels, train

CASES = {
    "logistic": {},
    "logistic-deep": {"max_depth": 6, "min_child_weight": 0.0},
    "stumps": {"max_depth": 1, "n_estimators": 6},
    "depth-two": {"max_depth": 2},
    "softmax": {"objective": "softmax", "n_classes": 4, "n_estimators": 3},
    "softmax-deep": {"objective": "softmax", "n_classes": 3, "max_depth": 5, "n_estimators": 3},
    "squared-error": {"objective": "squared_error"},
    "squared-error-deep": {"objective": "squared_error", "max_depth": 6},
    "missing": {"missing": 0.3, "max_depth": 4},
    "missing-softmax": {"missing": 0.3, "objective": "softmax", "n_classes": 3},
    "missing-regression": {"missing": 0.5, "objective": "squared_error", "max_depth": 5},
    "weights": {"weighted": True, "max_depth": 4},
    "weights-regression": {"weighted": True, "objective": "squared_error"},
    "categories": {"categorical": [0, 3, 5], "max_depth": 4},
    "categories-missing": {"categorical": [1, 2, 6], "missing": 0.2, "max_depth": 4},
    "categories-softmax": {"categorical": [0, 5], "objective": "softmax", "n_classes": 3},
    "only-categories": {"categorical": list(range(7)), "missing": 0.1},
    "subsample": {"subsample": 0.5, "random_state": 3, "max_depth": 4},
    "colsample": {"colsample_bytree": 0.5, "random_state": 4},
    "one-column-a-tree": {"colsample_bytree": 0.01, "random_state": 5, "n_estimators": 8},
    "both-samples": {"subsample": 0.7, "colsample_bytree": 0.6, "random_state": 6, "missing": 0.2, "weighted": True},
    "min-split-loss": {"min_split_loss": 2.0, "max_depth": 6},
    "reg-alpha": {"reg_alpha": 1.0, "max_depth": 4},
    "no-reg-lambda": {"reg_lambda": 0.0, "min_child_weight": 0.0, "max_depth": 5},
    "single-rows": {"min_child_samples": 1, "min_child_weight": 0.0, "max_depth": 6, "n_rows": 40},
    "few-rows": {"min_child_samples": 20, "max_depth": 6},
    "constant-columns": {"constant": [0, 4], "missing": 0.1},
    "all-missing-columns": {"empty": [1, 6], "max_depth": 4},
    "nothing-but-constants": {"constant": list(range(7))},
    "imbalanced": {"imbalanced": True, "max_depth": 4, "min_child_weight": 0.0, "reg_lambda": 0.0},
    "more-bits": {"fractional_bits": 40},
    "few-bits": {"fractional_bits": 4, "max_depth": 4},
    "base-score": {"base_score": 0.1},
    "equal-columns": {"repeated": True, "max_depth": 4, "missing": 0.2},
}
CUTS = {
    "two": (3,),
    "three": (1, 5),
    "five-one-empty": (2, 2, 4, 5),
    "first-empty": (0, 4),
    "last-empty": (4, 7),
}
N_BINS = [8, 3, 32, 5, 1, 12, 2]


def _table(options, seed=11):
    """The table and labels of a case; takes what describes them out of `options`."""
    rng = np.random.default_rng(seed)
    n_rows = options.pop("n_rows", 240)
    table = random_codes(
        rng, n_rows, N_BINS, missing=options.pop("missing", 0.0), categorical=options.pop("categorical", [])
    )
    values = table.values
    for column in options.pop("constant", []):
        values[:, column] = 0
    for column in options.pop("empty", []):
        values[:, column] = -1
    n_bins = list(N_BINS)
    if options.pop("repeated", False):
        values[:, 3], values[:, 5], n_bins[3], n_bins[5] = values[:, 0], values[:, 1], n_bins[0], n_bins[1]
    table = Codes(values, n_bins, np.flatnonzero(table.categorical))
    y = random_labels(rng, table, options.get("objective", "logistic"), options.get("n_classes", 2))
    if options.pop("imbalanced", False):
        score = random_labels(rng, table, "squared_error")
        y = (score >= np.sort(score)[-6]).astype(np.float64)
    weight = rng.gamma(2.0, 1.0, n_rows) if options.pop("weighted", False) else None
    return table, y, weight


def _split(trained, tree, node):
    """What a node's record means in the joined table: feature, threshold, missing direction, categories."""
    owner = tree.source[node]
    table, record = trained.parts[owner].splits, tree.record[node]
    first = sum(len(part.n_bins) for part in trained.parts[:owner])
    threshold = table.threshold[record]
    return (
        first + table.feature[record],
        None if np.isnan(threshold) else threshold,
        table.missing_left[record],
        table.category_left[record],
    )


def _assert_same_trees(one, other):
    assert len(one.trees) == len(other.trees)
    for ours, theirs in zip(one.trees, other.trees, strict=True):
        for name in set(Tree.__slots__) - {"source", "record"}:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        for node in np.flatnonzero(ours.left >= 0):
            assert _split(one, ours, node) == _split(other, theirs, node)
        np.testing.assert_array_equal(ours.source < 0, theirs.source < 0)
    np.testing.assert_array_equal(one.margins, other.margins)


@pytest.mark.parametrize("cut", all_but_first_slow(*CUTS.values()), ids=CUTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_columns_cut_over_parties_give_the_trees_of_one_table(case, cut):
    options = {"n_estimators": 4, **case}
    table, y, weight = _table(options)
    pooled = train(table.take(np.arange(len(y))), y, weight, **options)
    parties = train(table.cut(*cut), y, weight, threads=2, **options)
    _assert_same_trees(pooled, parties)
    if case is not CASES["nothing-but-constants"]:
        assert sum(len(tree.left) > 1 for tree in pooled.trees) > 0


def test_cut_columns_are_owned_by_the_party_that_has_them():
    table, y, _ = _table({})
    parties = train(table.cut(3, 3, 5), y, max_depth=5)
    owners = np.concatenate([tree.source[tree.left >= 0] for tree in parties.trees])
    assert set(owners.tolist()) == {0, 2, 3}
    assert [len(part.splits) for part in parties.parts] == [int((owners == party).sum()) for party in range(4)]


@pytest.mark.parametrize("threads", [2, 3, 7], ids=lambda n: f"{n}-threads")
def test_trees_do_not_depend_on_the_number_of_threads(threads):
    options = {"missing": 0.2, "categorical": [2], "n_rows": 40_000}
    table, y, _ = _table(options)
    one = train(table.take(np.arange(len(y))), y, max_depth=5, n_estimators=3, subsample=0.8, random_state=0)
    many = train(table, y, max_depth=5, n_estimators=3, subsample=0.8, random_state=0, threads=threads)
    _assert_same_trees(one, many)


def add_leaves(margins, tree, rows):
    """Add a tree's leaf values to the margins of its rows."""
    leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
    rows.add_to(margins, leaves, tree.value[leaves])


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    n_rows=st.integers(1, 60),
    n_bins=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    edges=st.lists(st.integers(0, 4), max_size=3),
    depth=st.integers(0, 4),
    rules=st.fixed_dictionaries({
        "reg_lambda": st.sampled_from([0.0, 1.0]),
        "reg_alpha": st.sampled_from([0.0, 0.5]),
        "min_split_loss": st.sampled_from([0.0, 0.3]),
        "min_child_weight": st.sampled_from([0.0, 1.0]),
        "min_child_samples": st.sampled_from([1, 2, 4]),
    }),
    sample=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_trees_equal_those_of_the_slow_grower(n_rows, n_bins, missing, edges, depth, rules, sample, seed):
    rng = np.random.default_rng(seed)
    categorical = np.flatnonzero(rng.random(len(n_bins)) < 0.4)
    table = random_codes(rng, n_rows, n_bins, missing=missing, categorical=categorical)
    grad, hess = rng.integers(-4, 5, n_rows), rng.integers(0, 4, n_rows)
    rows = None if sample is None else np.flatnonzero(rng.random(n_rows) < sample).astype(np.int32)
    columns = np.flatnonzero(rng.random(len(n_bins)) < 0.8).astype(np.int32)
    of_rules = SplitRules(grad_unit=0.5, hess_unit=0.25, max_depth=depth, learning_rate=0.25, **rules)
    parts = table.cut(*sorted(min(edge, len(n_bins)) for edge in edges))
    margins = np.zeros(n_rows)
    sample = TreeSample(grad, hess, rows, columns)
    tree, leaves = grow_tree(SplitSearch([part.source() for part in parts], sample, of_rules), sample, of_rules)
    add_leaves(margins, tree, leaves)

    again = table.cut(*sorted(min(edge, len(n_bins)) for edge in edges))
    joined = JoinedColumns([part.source() for part in again])
    margins_again = np.zeros(n_rows)
    same, leaves = grow_tree(SplitSearch([joined], sample, of_rules), sample, of_rules)
    joined.name_owners(same)
    add_leaves(margins_again, same, leaves)
    assert same == tree
    assert [part.splits for part in again] == [part.splits for part in parts]
    np.testing.assert_array_equal(margins_again, margins)

    members = range(n_rows) if rows is None else rows.tolist()
    slow = slow_tree(table.codes, table.n_bins, table.categorical, grad, hess, of_rules, members, columns.tolist())
    assert tree.left.tolist() == _left_children(slow)
    assert tree.count.tolist() == [node.total[2] for node in slow]
    assert tree.cover.tolist() == [node.total[1] * 0.25 for node in slow]
    assert tree.gain.tolist() == [0.0 if node.split is None else node.split.gain for node in slow]
    assert tree.value.tolist() == [node.value for node in slow]
    for node in slow:
        if node.split is None:
            np.testing.assert_array_equal(margins[list(node.rows)], node.value)


def _left_children(slow):
    left, n_nodes = [], 1
    for node in slow:
        left.append(-1 if node.split is None else n_nodes)
        n_nodes += 0 if node.split is None else 2
    return left


def test_rows_in_another_order_give_the_same_trees():
    table, y, weight = _table({"missing": 0.2, "categorical": [5], "weighted": True})
    order = np.random.default_rng(0).permutation(len(y))
    one = train(table, y, weight, max_depth=5)
    other = train(table.take(order), y[order], weight[order], max_depth=5)
    for ours, theirs in zip(one.trees, other.trees, strict=True):
        assert ours == theirs
    np.testing.assert_array_equal(one.margins[order], other.margins)


def test_single_row_leaves_are_reached():
    table, y, _ = _table({"n_rows": 40})
    trained = train(table, y, max_depth=6, min_child_samples=1, min_child_weight=0.0)
    assert any(np.any((tree.left < 0) & (tree.count == 1)) for tree in trained.trees)


@pytest.mark.parametrize("least", [2, 5, 20], ids=lambda n: f"{n}-rows")
def test_no_child_has_fewer_sampled_rows_than_allowed(least):
    table, y, _ = _table({"missing": 0.3})
    trained = train(table, y, max_depth=6, min_child_samples=least, min_child_weight=0.0, subsample=0.6, random_state=2)
    counts = np.concatenate([tree.count[1:] for tree in trained.trees])
    assert counts.min() >= least


def test_a_split_without_missing_rows_sends_missing_right():
    table, y, _ = _table({})
    trained = train(table, y, max_depth=5)
    assert len(trained.parts[0].splits) > 20
    assert not any(trained.parts[0].splits.missing_left)
