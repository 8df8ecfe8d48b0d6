"""Random trees: what one row changes, sums of leaves, their values, and what is drawn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.systems.horizontal.random_trees import LeafNoise, LeafShard, RandomTrees, column_sets, draw_trees, row_norm
from treaty.trees.constraints import Constraints
from treaty.trees.objectives import make_objective
from treaty.trees.splits import SplitRules

NOISE = LeafNoise(sigma=30.0, honest=2, rounds=50, parallel=10, rate=0.6)
RULES = SplitRules(grad_unit=0.5, hess_unit=0.25, reg_lambda=1.0, learning_rate=0.1, min_child_weight=0.0)


# ---------------------------------------------------------------- what one row changes


@settings(deadline=None, max_examples=200)
@given(
    margins=st.lists(st.floats(-40.0, 40.0), min_size=1, max_size=6),
    data=st.data(),
    bits=st.integers(4, 30),
    weight=st.sampled_from([None, 0.3, 1.0, 2.7, 3.0, 8.0]),
)
def test_a_row_of_classes_changes_no_more_than_its_norm(margins, data, bits, weight):
    """Whatever the margins are, the label, the fixed point, and a weight within the bound."""
    n_classes = 2 if len(margins) == 1 else len(margins)
    y = np.array([float(data.draw(st.integers(0, n_classes - 1)))])
    bound = None if weight is None else np.array([weight])
    loss = make_objective(
        "logistic" if len(margins) == 1 else "softmax", y, bound, n_classes=n_classes, fractional_bits=bits
    )
    grad, hess, _ = loss.gradients(np.array([margins]), y, bound)
    limit, unit = NOISE.limit(loss), NOISE.units(loss)
    assert np.abs(grad).max() <= limit
    norm = math.sqrt(float(((grad / unit[0]) ** 2).sum() + ((hess / unit[1]) ** 2).sum()))
    assert norm <= row_norm(len(margins), classes=True, fractional_bits=bits)


def test_the_norm_is_reached_and_hessians_of_two_classes_cost_nothing():
    y = np.array([1.0])
    loss = make_objective("logistic", y, None)
    grad, hess, _ = loss.gradients(np.array([[-40.0]]), y, None)
    assert abs(int(grad[0, 0])) == NOISE.limit(loss)
    assert hess[0, 0] == 0
    q = np.linspace(0.0, 1.0, 100_001)
    assert np.max(q**2 + (3.2 * q * (1 - q)) ** 2) <= 1.0
    assert np.max(q**2 + (3.4 * q * (1 - q)) ** 2) > 1.0  # not much more would still cost nothing


@settings(deadline=None)
@given(target=st.floats(-5.0, 5.0), margin=st.floats(-50.0, 50.0), weight=st.sampled_from([None, 0.5, 2.0, 3.5]))
def test_a_row_of_a_regression_changes_no_more_than_its_norm(target, margin, weight):
    noise = replace(NOISE, half_range=5.0)
    loss = make_objective(
        "squared_error", np.array([-5.0, 5.0]), None if weight is None else np.array([4.0]), base_score=0.0
    )
    row = None if weight is None else np.array([weight])
    grad, hess, _ = loss.gradients(np.array([[margin]]), np.array([target]), row)
    grad, unit = np.clip(grad, -noise.limit(loss), noise.limit(loss)), noise.units(loss)
    norm = math.hypot(float(grad[0, 0]) / unit[0], float(hess[0, 0]) / unit[1])
    assert norm <= row_norm(1, classes=False, fractional_bits=16)
    # half of the range, and not the power of two above it
    assert noise.limit(loss) * loss.grad_unit == pytest.approx(5.0 * loss.weight_bound, rel=1e-3)


def test_gradients_beyond_half_of_the_range_count_as_this_and_of_how_many_rows_is_not_kept():
    loss = make_objective("squared_error", np.array([-5.0, 5.0]), None, base_score=0.0)
    shard = LeafShard(np.zeros((3, 1), np.uint8), np.array([0, 2], np.int32), np.array([-5.0, 0.0, 5.0]), None, loss)
    shard.margins[:] = 40.0, 40.0, 4.0
    limit = replace(NOISE, half_range=5.0).limit(loss)
    trees = RandomTrees(np.zeros((1, 0), np.int32), np.ones((1, 0, 8), np.bool_))
    (((grad, _),),) = shard.leaf_sums(trees, limit)
    assert grad == 2 * limit - round(2**16 / loss.grad_clip)
    assert loss.grad_clip == 16.0 > limit * loss.grad_unit
    assert shard.clipped == 0


def releases(parallel, outputs, norm, bits=16):
    return replace(NOISE, parallel=parallel).releases(0.02, outputs, norm, 2.0**bits)


def test_a_batch_is_one_release_and_classes_share_the_budget_by_the_norm():
    one, batch = (releases(b, 1, 1.0) for b in (1, 10))
    assert batch.sigma == pytest.approx(math.sqrt(10) * one.sigma, rel=1e-6)
    assert max(one.rho, batch.rho) <= 0.02 < 1.001 * min(one.rho, batch.rho)
    two, nine = (releases(1, k, row_norm(k, classes=True, fractional_bits=16)) for k in (1, 9))
    assert nine.sigma == pytest.approx(math.sqrt(2.0) * two.sigma, rel=1e-3)  # and not sqrt(9) times as much
    coarse = releases(1, 1, 1.0, bits=4)
    assert coarse.sigma / 2**4 == pytest.approx(one.sigma / 2**16, rel=1e-3)


# ---------------------------------------------------------------- sums and values


def leaf_of(trees, tree, codes):
    """Return the leaf of a row, by the definition."""
    node, inner = 0, trees.features.shape[1]
    while node < inner:
        node = 2 * node + (1 if trees.left_bins[tree, node, codes[trees.features[tree, node]]] else 2)
    return node - inner


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32), depth=st.integers(0, 4), n_trees=st.integers(1, 5), n_rows=st.integers(0, 30),
    outputs=st.integers(1, 3),
)  # fmt: skip
def test_sums_are_those_of_the_rows_in_each_leaf(seed, depth, n_trees, n_rows, outputs):
    rng = np.random.default_rng(seed)
    inner, width = (1 << depth) - 1, 8
    trees = RandomTrees(
        rng.integers(0, 3, (n_trees, inner)).astype(np.int32), rng.random((n_trees, inner, width)) < 0.5
    )
    columns = rng.integers(0, width, (3, n_rows)).astype(np.uint8)
    grad, hess = rng.integers(-(2**40), 2**40, (2, outputs, n_rows))
    sums, leaves = trees.sums(columns, grad, hess)
    expected = np.zeros((n_trees, 1 << depth, 2), np.int64)
    for tree in range(n_trees):
        for row in range(n_rows):
            leaf = leaf_of(trees, tree, columns[:, row])
            assert leaves[tree, row] == leaf
            expected[tree, leaf] += grad[tree % outputs, row], hess[tree % outputs, row]
    np.testing.assert_array_equal(sums, expected)


def test_values_are_newton_steps_of_noisy_sums():
    trees = RandomTrees(np.zeros((2, 3), np.int32), np.ones((2, 3, 8), np.bool_))
    sums = np.array([[[8, 4], [-8, 4], [0, -100], [40, 0]], [[1, 1]] * 4])
    first, second = trees.grown(sums, RULES, first_record=7)
    # grad in halves, hess in quarters; a negative sum of hess counts as none, and gives no weight
    np.testing.assert_allclose(first.value, [0, 0, 0, -0.1 * 4 / 2, 0.1 * 4 / 2, 0.0, 0.0])
    np.testing.assert_array_equal(first.left, [1, 3, 5, -1, -1, -1, -1])
    np.testing.assert_array_equal(first.source, [0, 0, 0, -1, -1, -1, -1])
    np.testing.assert_array_equal(second.record, [10, 11, 12, -1, -1, -1, -1])
    np.testing.assert_allclose(first.cover, [2.0, 2.0, 0.0, 1.0, 1.0, 0.0, 0.0])  # a node's is that of its leaves
    assert first.gain[1] == pytest.approx(16 / 2 + 16 / 2)
    assert (first.gain >= 0.0).all()
    assert not first.gain[3:].any()


def test_a_tree_without_splits_has_one_leaf():
    trees = RandomTrees(np.zeros((1, 0), np.int32), np.ones((1, 0, 8), np.bool_))
    (tree,) = trees.grown(np.array([[[4, 12]]]), RULES, 0)
    assert (tree.left.tolist(), tree.value[0]) == ([-1], pytest.approx(-0.1 * 2 / 4))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), depth=st.integers(1, 4))
def test_values_rise_and_fall_with_constrained_columns(seed, depth):
    rng, inner = np.random.default_rng(seed), (1 << depth) - 1
    features = rng.integers(0, 3, (2, inner)).astype(np.int32)
    cuts = rng.integers(1, 7, (2, inner))
    trees = RandomTrees(features, np.arange(8) < cuts[..., None])
    directions = np.array([1, -1, 0], np.int8)
    rules = replace(RULES, constraints=Constraints(directions, np.empty((0, 3), np.bool_), np.array([0, 3])))
    sums = np.stack([rng.integers(-50, 50, (2, inner + 1)), rng.integers(1, 9, (2, inner + 1))], axis=-1)
    plain, grown = (trees.grown(sums, of, 0) for of in (RULES, rules))
    grid = rng.integers(0, 7, (40, 3))
    for number, tree in enumerate(grown):
        for column, sign in ((0, 1), (1, -1)):
            along = [
                np.repeat(grid[:, [k]], 7, axis=1) if k != column else np.tile(np.arange(7), (40, 1)) for k in range(3)
            ]
            codes = np.stack(along, axis=-1)
            values = [[tree.value[inner + leaf_of(trees, number, row)] for row in line] for line in codes]
            assert (sign * np.diff(values, axis=1) >= 0).all()
    free = [not np.isin(features[k], (0, 1)).any() for k in range(2)]
    assert all(np.array_equal(a.value, b.value) for a, b, of in zip(plain, grown, free, strict=True) if of)


# ---------------------------------------------------------------- what is drawn


def table():
    import pandas as pd

    rng = np.random.default_rng(0)
    return to_table(
        pd.DataFrame({
            "numbers": rng.normal(size=200), "constant": np.ones(200), "nothing": np.full(200, np.nan),
            "kind": pd.Categorical(rng.choice(list("abcde"), 200)),
            "gaps": np.where(rng.random(200) < 0.5, 1.0, np.nan),
        })
    )  # fmt: skip


def test_every_kind_of_column_is_split_and_empty_ones_never():
    bins = fit_bins(table(), 8)
    every = np.arange(5, dtype=np.int32)
    trees = draw_trees(np.random.default_rng(1), bins, 2, [[every]] * 400)
    assert set(np.unique(trees.features)) == {0, 1, 3, 4}
    for feature in (0, 1, 3, 4):
        drawn = trees.left_bins[trees.features == feature]
        n_bins = bins.n_bins[feature]
        sides = drawn[:, :n_bins].sum(axis=1)
        assert set(sides) == (set(range(1, n_bins)) or {1})
        if bins.category_bins[feature] is None:
            assert (np.diff(drawn[:, :n_bins].astype(int), axis=1) <= 0).all()  # a cut
        else:
            assert len(np.unique(drawn[:, :n_bins], axis=0)) == 2**n_bins - 2  # all ways to part the categories
        # values that are missing go either way; of a column with one bin, they are parted from all others
        assert set(drawn[:, n_bins].tolist()) == ({False} if n_bins == 1 else {False, True})


def test_without_any_value_trees_have_no_split():
    bins = fit_bins(to_table(np.full((20, 2), np.nan)), 8)
    assert draw_trees(np.random.default_rng(0), bins, 3, [[np.arange(2, dtype=np.int32)]]).features.shape == (1, 0)
    bins = fit_bins(table(), 8)
    (features,) = draw_trees(np.random.default_rng(0), bins, 2, [[np.array([2], np.int32)]]).left_bins
    assert features.all()  # a tree of empty columns keeps all rows together


def test_a_tree_uses_the_columns_of_one_group_or_one_column_alone():
    groups = np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]], bool)
    drawn = np.array([0, 2, 3, 4], np.int32)
    assert [of.tolist() for of in column_sets(drawn, groups)] == [[0], [2], [3], [4]]
    assert [of.tolist() for of in column_sets(np.arange(5, dtype=np.int32), groups)] == [[0, 1], [1, 2], [3], [4]]
    assert [of.tolist() for of in column_sets(drawn, groups[:0])] == [[0, 2, 3, 4]]


@settings(deadline=None)
@given(rows=st.integers(0, 10**7), sigma=st.floats(1.0, 1e6), most=st.integers(1, 8))
def test_trees_are_as_deep_as_their_leaves_stand_out(rows, sigma, most):
    loss, noise = make_objective("logistic", np.zeros(1), None), replace(NOISE, sigma=sigma)
    depth = noise.depth(rows, loss, most)
    assert 1 <= depth <= most
    assert noise.depth(2 * rows, loss, most) >= depth >= replace(noise, sigma=2.0 * sigma).depth(rows, loss, most)


def test_denominators_grow_by_the_noise_of_all_trees_together():
    loss = make_objective("logistic", np.zeros(1), None)
    rules = NOISE.rules(RULES, loss)
    assert rules.reg_lambda == pytest.approx(1.0 + 50 * 0.6 * 30.0 / math.sqrt(500))
    # as many steps in more and smaller ones leave the same noise: sigma grows with the root of the number of trees
    more = replace(NOISE, rounds=200, rate=0.15, sigma=60.0)
    assert more.rules(RULES, loss).reg_lambda == pytest.approx(rules.reg_lambda)
