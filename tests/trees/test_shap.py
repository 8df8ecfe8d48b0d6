"""TreeSHAP against its definition (every subset of features) and against XGBoost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.vertical.models_of_owners import contributions_of_xgboost, vertical_model
from treaty.models.interpretation import explain_pooled, joined_booster
from treaty.trees.ensemble import BitWalk, Tree
from treaty.trees.shap import contributions, node_weights

BASE_MARGIN = 0.25
CASES = {
    "stumps": {"max_depth": 1},
    "depth-two": {"max_depth": 2},
    "depth-three": {"max_depth": 3},
    "depth-four-softmax": {"max_depth": 4, "objective": "softmax", "n_classes": 3},
    "depth-five": {"max_depth": 5, "min_child_samples": 2},
    "depth-six-softmax": {"max_depth": 6, "objective": "softmax", "n_classes": 4, "base_score": 0.1},
    "depth-seven": {"max_depth": 7, "min_child_weight": 0.5},
    "depth-eight-regression": {"max_depth": 8, "objective": "squared_error", "base_score": -2.0},
    "regression": {"objective": "squared_error", "missing": 0.0, "categorical": []},
    "mostly-missing": {"missing": 0.7, "max_depth": 5},
    "all-categories": {"categorical": range(6), "max_depth": 5},
    "base-score": {"base_score": 0.2},
    "single-leaves": {"min_split_loss": 1e9},
}


def _random_tree(rng, depth, first_record, n_features, *, empty=0.0, chain=False):
    """A tree of random shape; its records are new lines, whose features are returned. Covers and counts add up."""
    left, value, cover, record, features = [-1], [0.0], [float(rng.integers(1, 1000))], [-1], []
    level = [0]
    for _ in range(depth):
        below = []
        for node in level:
            if not chain and rng.random() < 0.25:
                continue
            record[node], left[node] = first_record + len(features), len(left)
            features.append(len(features) % n_features if chain else int(rng.integers(n_features)))
            share = 0.0 if rng.random() < empty else rng.integers(1, 8) / 8
            below += [len(left)] if chain else [len(left), len(left) + 1]
            left += [-1, -1]
            value += [0.0, 0.0]
            record += [-1, -1]
            cover += [cover[node] * share, cover[node] * (1.0 - share)]
        level = below
    left_, count = np.array(left, np.int32), rng.integers(1, 9, len(left))
    for node in np.flatnonzero(left_ >= 0)[::-1]:
        count[node] = count[left_[node]] + count[left_[node] + 1]
    tree = Tree(
        source=np.where(left_ < 0, -1, 0).astype(np.int16),
        record=np.array(record, np.int32),
        left=left_,
        value=np.where(left_ < 0, rng.normal(0, 1, len(left)), 0.0),
        gain=np.zeros(len(left)),
        cover=np.array(cover),
        count=count,
    )
    return tree, features


def _random_forest(seed, n_rows, n_features, n_outputs, n_rounds, depth, **options):
    """Trees, the features of their records, and rows that go either way at each as a coin says."""
    rng = np.random.default_rng(seed)
    trees, features = [], []
    for _ in range(n_rounds * n_outputs):
        tree, more = _random_tree(rng, depth, len(features), n_features, **options)
        trees.append(tree)
        features += more
    left = rng.random((len(features), n_rows)) < 0.5
    return trees, np.array(features, np.int32), left


def _explain(trees, features, left, n_features, n_outputs, threads=1):
    return contributions(
        trees, np.zeros(1, np.int64), np.packbits(left, axis=1), features, n_rows=left.shape[1],
        n_features=n_features, n_outputs=n_outputs, base_margins=np.full(n_outputs, BASE_MARGIN), threads=threads,
    )  # fmt: skip


def _expectation(tree, features, left, known, node=0):
    """Value of each row (n_rows,) when only the features `known` are: elsewhere children are averaged by weight."""
    child = tree.left[node]
    if child < 0:
        return np.full(left.shape[1], tree.value[node])
    sides = [_expectation(tree, features, left, known, child + side) for side in (0, 1)]
    if features[tree.record[node]] in known:
        return np.where(left[tree.record[node]], *sides)
    weights = node_weights(tree)
    return (weights[child] * sides[0] + weights[child + 1] * sides[1]) / weights[node]


def _by_definition(trees, features, left, n_features, n_outputs):
    """Shapley values as the mean over all orders: Lundberg et al. 2020, equation 5, one subset after another."""
    phi = np.zeros((n_outputs, left.shape[1], n_features + 1))
    phi[:, :, -1] = BASE_MARGIN
    for number, tree in enumerate(trees):
        worth = {
            subset: _expectation(tree, features, left, set(subset))
            for size in range(n_features + 1)
            for subset in itertools.combinations(range(n_features), size)
        }
        phi[number % n_outputs, :, -1] += worth[()]
        for subset, value in worth.items():
            for feature in set(range(n_features)) - set(subset):
                size = len(subset)
                weight = factorial(size) * factorial(n_features - size - 1) / factorial(n_features)
                gained = worth[tuple(sorted([*subset, feature]))] - value
                phi[number % n_outputs, :, feature] += weight * gained
    return phi


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    n_rows=st.integers(1, 20),
    n_features=st.integers(1, 5),
    n_outputs=st.integers(1, 3),
    n_rounds=st.integers(0, 2),
    depth=st.integers(0, 6),
    empty=st.sampled_from([0.0, 0.2]),
)
def test_contributions_equal_the_shapley_values_by_definition(
    seed, n_rows, n_features, n_outputs, n_rounds, depth, empty
):
    forest = _random_forest(seed, n_rows, n_features, n_outputs, n_rounds, depth, empty=empty)
    found = _explain(*forest, n_features, n_outputs)
    np.testing.assert_allclose(found, _by_definition(*forest, n_features, n_outputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_features", [9, 10, 4], ids=["odd", "even", "repeated"])
def test_contributions_of_a_long_path_equal_the_shapley_values(n_features):
    forest = _random_forest(1, 4, n_features, 1, 1, 10, chain=True)
    expected = _by_definition(*forest, n_features, 1)
    np.testing.assert_allclose(_explain(*forest, n_features, 1), expected, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), n_rows=st.integers(1, 600), n_features=st.integers(1, 30), depth=st.integers(0, 9))
def test_contributions_and_bias_add_up_to_the_margin(seed, n_rows, n_features, depth):
    trees, features, left = _random_forest(seed, n_rows, n_features, 2, 2, depth, empty=0.1)
    margins = np.full((n_rows, 2), BASE_MARGIN)
    BitWalk(trees, np.zeros(1, np.int64)).add_to(margins, np.packbits(left, axis=1))
    found = _explain(trees, features, left, n_features, 2)
    np.testing.assert_allclose(found.sum(axis=2).T, margins, rtol=0, atol=1e-11)


def test_contributions_add_up_at_the_greatest_depth():
    trees, features, left = _random_forest(2, 50, 24, 1, 2, 24, chain=True)
    margins = np.full((50, 1), BASE_MARGIN)
    BitWalk(trees, np.zeros(1, np.int64)).add_to(margins, np.packbits(left, axis=1))
    np.testing.assert_allclose(_explain(trees, features, left, 24, 1).sum(axis=2).T, margins, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_rows", [1, 127, 128, 129, 1500], ids=lambda n: f"{n}-rows")
def test_contributions_of_a_row_do_not_depend_on_its_neighbours_or_threads(n_rows):
    trees, features, left = _random_forest(3, 1500, 5, 1, 3, 5)
    every = _explain(trees, features, left, 5, 1)
    for threads in (1, 3):
        np.testing.assert_array_equal(_explain(trees, features, left[:, -n_rows:], 5, 1, threads), every[:, -n_rows:])


def test_renumbering_features_moves_their_contributions():
    trees, features, left = _random_forest(4, 30, 5, 1, 3, 5)
    order = np.random.default_rng(0).permutation(9).astype(np.int32)[:5]
    found = _explain(trees, order[features], left, 9, 1)
    np.testing.assert_array_equal(found[:, :, [*order, 9]], _explain(trees, features, left, 5, 1))
    assert np.all(found[:, :, np.setdiff1d(np.arange(9), order)] == 0.0)


def test_bias_is_the_mean_over_the_training_rows():
    parts, tables = vertical_model(objective="squared_error")  # whose cover is the number of rows
    found = explain_pooled(parts, tables)
    np.testing.assert_allclose(found[:, 0, -1], found.sum(axis=2).mean(axis=1), rtol=1e-12)


def test_noisy_covers_leave_finite_contributions_that_add_up():
    trees, features, left = _random_forest(5, 40, 4, 1, 4, 5)
    noise = np.random.default_rng(5)
    noisy = [replace(tree, cover=noise.normal(0, 50, len(tree.cover)) + tree.cover / 20) for tree in trees]
    assert min(tree.cover.min() for tree in noisy) < 0
    margins = np.full((40, 1), BASE_MARGIN)
    BitWalk(noisy, np.zeros(1, np.int64)).add_to(margins, np.packbits(left, axis=1))
    found = _explain(noisy, features, left, 4, 1)
    np.testing.assert_allclose(found.sum(axis=2).T, margins, rtol=0, atol=1e-10)
    assert np.abs(found).max() < 100


def test_trees_without_cover_are_averaged_by_rows():
    trees, features, left = _random_forest(6, 20, 3, 1, 2, 3)
    trees = [replace(tree, count=np.round(tree.cover * 512).astype(np.int64)) for tree in trees]
    without = [replace(tree, cover=np.zeros(len(tree.cover))) for tree in trees]
    np.testing.assert_allclose(
        _explain(without, features, left, 3, 1), _explain(trees, features, left, 3, 1), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_contributions_equal_those_of_xgboost(case):
    pytest.importorskip("xgboost")
    parts, tables = vertical_model(**case)
    theirs = contributions_of_xgboost(joined_booster(parts, [part.party for part in parts]), tables)
    # XGBoost adds in float32, and loses some digits where it takes features off a path again
    size = np.abs(theirs).max()
    np.testing.assert_allclose(explain_pooled(parts, tables).transpose(1, 0, 2), theirs, rtol=0, atol=1e-5 * (1 + size))


def test_contributions_at_a_leaf_without_cover_equal_those_of_xgboost():
    pytest.importorskip("xgboost")
    parts, tables = vertical_model(n_estimators=1, max_depth=3)
    (tree,) = parts[0].forest.trees
    leaf = int(np.flatnonzero(tree.left[7:] < 0)[0]) + 7
    cover = tree.cover
    node = leaf
    while node > 0:  # take it off all nodes above, so that covers still add up
        node = int(np.flatnonzero((tree.left >= 0) & ((tree.left == node) | (tree.left + 1 == node)))[0])
        cover[node] -= cover[leaf]
    cover[leaf] = 0.0
    theirs = contributions_of_xgboost(joined_booster(parts, [part.party for part in parts]), tables)
    np.testing.assert_allclose(explain_pooled(parts, tables).transpose(1, 0, 2), theirs, rtol=0, atol=1e-6)
