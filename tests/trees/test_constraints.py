"""The best split of a node within bounds, against a slow search; and what constraints leave to children."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.trees.constraints import Constraints, NodeConstraints
from treaty.trees.growth import Growth
from treaty.trees.splits import SplitRules, Splits, scan
from trees.oracle import add, left_sets
from trees.plain import Codes, random_labels, train

NO_GROUPS = np.zeros((0, 0), np.bool_)


def constraints(directions=(), groups=(), n_columns=None):
    n = n_columns or len(directions)
    of = np.zeros((len(groups), n), np.bool_)
    for k, group in enumerate(groups):
        of[k, list(group)] = True
    given = np.zeros(n, np.int8) if not len(directions) else np.array(directions, np.int8)
    found = Constraints.over([(given, of)])
    assert found is not None
    return found


def weight_of(slot, rules, low, high):
    grad, hess = slot[0] * rules.grad_unit, slot[1] * rules.hess_unit
    if hess <= 0.0:
        return min(max(0.0, low), high)
    size = min(max(abs(grad) - rules.reg_alpha, 0.0) / (hess + rules.reg_lambda), rules.step)
    return min(max(-np.sign(grad) * size, low), high)


def term_of(slot, rules, weight):
    """What a child with this weight takes off twice the regularised loss (XGBoost Eq. 4)."""
    grad, hess = slot[0] * rules.grad_unit, slot[1] * rules.hess_unit
    if hess <= 0.0:
        return 0.0
    return -(2 * grad * weight + 2 * rules.reg_alpha * abs(weight) + (hess + rules.reg_lambda) * weight**2)


def gain_within(total, left, rules, low, high):
    right = tuple(t - s for t, s in zip(total, left, strict=True))
    terms = [term_of(slot, rules, weight_of(slot, rules, low, high)) for slot in (left, right, total)]
    return terms[0] + terms[1] - terms[2]


def slow_gains(slots, total, directions, rules, low, high):
    """Return the gains of all admissible splits by feature and bins that go left."""
    found = {}
    for feature, of_feature in enumerate(slots):
        for left in left_sets(of_feature, False, rules):
            of_left = add([of_feature[b] for b in left])
            right = tuple(t - s for t, s in zip(total, of_left, strict=True))
            enough = min(of_left[1], right[1]) * rules.hess_unit >= rules.min_child_weight
            enough &= min(of_left[2], right[2]) >= rules.min_child_samples
            rises = weight_of(right, rules, low, high) - weight_of(of_left, rules, low, high)
            # all present values left, missing right: there is no order between them
            unordered = len(left) == len(of_feature) - 1 and len(of_feature) - 1 not in left
            if enough and (unordered or directions[feature] * rises >= 0.0):
                found[feature, frozenset(left)] = gain_within(total, of_left, rules, low, high)
    return {split: gain for split, gain in found.items() if gain > rules.threshold}


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    n_bins=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    missing=st.booleans(),
    limits=st.tuples(st.sampled_from([-np.inf, -0.8, -0.1, 0.2]), st.sampled_from([0.25, 0.9, np.inf])),
    options=st.fixed_dictionaries({
        "reg_lambda": st.sampled_from([0.0, 1.0]),
        "reg_alpha": st.sampled_from([0.0, 0.5]),
        "max_delta_step": st.sampled_from([0.0, 0.3]),
        "min_child_weight": st.sampled_from([0.5, 2.0]),
    }),
)  # fmt: skip
def test_the_best_split_within_bounds_is_that_of_a_slow_search(seed, n_bins, missing, limits, options):
    rng = np.random.default_rng(seed)
    directions = rng.integers(-1, 2, len(n_bins))
    if not directions.any():
        directions[0] = 1
    n_rows = 60
    grad, hess = rng.integers(-40, 41, n_rows), rng.integers(1, 17, n_rows)
    slots, sums = [], []
    for bins in n_bins:
        codes = rng.integers(0, bins + missing, n_rows)
        of_feature = np.zeros((bins + 1, 3), np.int64)
        np.add.at(of_feature, codes, np.stack([grad, hess, np.ones(n_rows, np.int64)], axis=1))
        slots.append([tuple(slot) for slot in of_feature.tolist()])
        sums.append(of_feature)
    total = np.array([[grad.sum(), hess.sum(), n_rows]])
    kept = constraints(directions)
    rules = SplitRules(grad_unit=1 / 16, hess_unit=1 / 16, constraints=kept, **options)
    low, high = limits
    # a weight below another bound is never within both
    bounds = NodeConstraints(np.array([limits]), np.ones((1, 0), np.bool_), np.ones((1, 0), np.bool_))
    offsets = np.concatenate([[0], np.cumsum(np.array(n_bins) + 1)]).astype(np.int32)
    found = scan(
        np.concatenate(sums)[None], total, np.arange(len(n_bins), dtype=np.int32), offsets,
        np.zeros(len(n_bins), np.bool_), rules, limits=bounds,
    )  # fmt: skip
    expected = slow_gains(slots, tuple(total[0].tolist()), directions, rules, low, high)
    assert not rules.exact
    if not expected or max(expected.values()) <= rules.threshold + 1e-9:
        assert found.feature[0] < 0 or found.gain[0] <= rules.threshold + 1e-9
        return
    feature = int(found.feature[0])
    left = (
        frozenset(np.flatnonzero(found.left_bins[0, : n_bins[feature] + 1]).tolist()) if feature >= 0 else frozenset()
    )
    # of gains that tie to rounding, float64 may take either
    assert expected.get((feature, left), -1.0) == pytest.approx(max(expected.values()), rel=1e-9, abs=1e-9)
    assert found.gain[0] == pytest.approx(max(expected.values()), rel=1e-9, abs=1e-9)
    if directions[feature]:
        sides = rules.weight(np.stack([found.left_totals[0], total[0] - found.left_totals[0]]), np.array([limits] * 2))
        assert (sides[1] - sides[0]) * found.direction[0] >= -1e-12
    else:
        assert found.direction[0] == 0


def leaves_by_code(trained, column, n_bins):
    """Margins (codes, rows) of random rows whose `column` runs through all codes."""
    rng = np.random.default_rng(5)
    rows = rng.integers(-1, n_bins, (50, len(n_bins)))
    found = []
    for code in range(n_bins[column]):
        matrix = np.where(rows < 0, np.nan, rows).astype(np.float32)
        matrix[:, column] = code
        found.append(trained.walk(matrix)[:, 0])
    return np.array(found)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    objective=st.sampled_from(["squared_error", "logistic", "poisson"]),
    options=st.fixed_dictionaries({
        "max_depth": st.integers(1, 6),
        "reg_lambda": st.sampled_from([0.0, 1.0, 10.0]),
        "reg_alpha": st.sampled_from([0.0, 0.5]),
        "leaf_limit": st.sampled_from([0.2, np.inf]),
        "min_child_weight": st.sampled_from([0.0, 1.0]),
        "subsample": st.sampled_from([0.5, 1.0]),
    }),
)  # fmt: skip
def test_margins_move_in_the_direction_of_each_column(seed, objective, options):
    rng, n_bins = np.random.default_rng(seed), np.array([8, 5, 12])
    table = Codes(np.where(rng.random((200, 3)) < 0.1, -1, rng.integers(0, n_bins, (200, 3))), n_bins)
    y = random_labels(rng, table, objective)
    kept = constraints([1, -1, 0])
    trained = train(
        table, y, objective=objective, n_estimators=5, min_child_samples=1, random_state=1, constraints=kept, **options
    )
    assert np.diff(leaves_by_code(trained, 0, n_bins), axis=0).min() >= 0.0
    assert np.diff(leaves_by_code(trained, 1, n_bins), axis=0).max() <= 0.0


def test_a_table_without_constraints_grows_the_same_trees_as_under_groups_of_all_columns():
    rng, n_bins = np.random.default_rng(0), np.array([8, 5, 12])
    values = rng.integers(0, n_bins, (300, 3))
    y = random_labels(rng, Codes(values, n_bins), "squared_error")
    plain, grouped = (
        train(Codes(values, n_bins), y, objective="squared_error", n_estimators=3, constraints=of)
        for of in (None, constraints(groups=[{0, 1, 2}], n_columns=3))
    )
    assert grouped.rules.exact
    np.testing.assert_array_equal(plain.margins, grouped.margins)


def test_children_get_the_middle_of_their_weights_as_bounds_and_the_groups_that_are_left():
    kept = constraints([1, -1, 0, 0], groups=[{0, 1}, {1, 2}])
    root = kept.root()
    np.testing.assert_array_equal(root.allowed, [[True, True, True, True]])
    zero = np.zeros(1, np.int32)
    rising = kept.below(root, zero, zero, np.array([1], np.int8), np.array([[-0.5, 1.0]]))
    np.testing.assert_array_equal(rising.bounds, [[-np.inf, 0.25], [0.25, np.inf]])
    np.testing.assert_array_equal(rising.allowed, [[True, True, False, False]] * 2)
    falling = kept.below(rising.take(slice(1, 2)), zero, zero + 1, np.array([-1], np.int8), np.array([[1.0, 0.5]]))
    np.testing.assert_array_equal(falling.bounds, [[0.75, np.inf], [0.25, 0.75]])
    np.testing.assert_array_equal(falling.allowed, [[True, True, False, False]] * 2)
    # of both groups, then of one
    shared = kept.below(root, zero, zero + 1, np.array([0], np.int8), np.zeros((1, 2)))
    np.testing.assert_array_equal(shared.allowed, [[True, True, True, False]] * 2)
    np.testing.assert_array_equal(shared.bounds, [[-np.inf, np.inf]] * 2)
    # a column of no group stays alone
    alone = kept.below(root, zero, zero + 3, np.array([0], np.int8), np.zeros((1, 2)))
    again = kept.below(alone.take(slice(0, 1)), zero, zero + 3, np.array([0], np.int8), np.zeros((1, 2)))
    np.testing.assert_array_equal(np.concatenate([alone.allowed, again.allowed]), [[False, False, False, True]] * 4)


def test_nothing_asked_is_no_constraint():
    assert Constraints.over([(np.zeros(2, np.int8), np.zeros((0, 2), np.bool_))] * 2) is None


def test_leaves_stay_within_bounds_whatever_splits_a_caller_chose():
    # as under noise, where totals of children are not those that splits were chosen on
    rules = SplitRules(grad_unit=1.0, hess_unit=1.0, max_depth=2, learning_rate=1.0, constraints=constraints([1]))
    growth = Growth(np.array([0, 19, 40]), rules)
    for totals in ([[-9, 8, 20]], [[9, 3, 10], [-20, 4, 10]]):
        split = Splits.none(len(totals))
        split.feature[:], split.direction[:], split.left_totals[:], split.gain[:] = 0, 1, totals, 1.0
        growth.take(split)
        growth.divided(np.zeros(len(totals), np.int32))
    value = growth.tree().value[3:]
    assert value[:2].max() <= value[2:].min()
    # without bounds -2.25, 3, 4 and -1.375; the root's middle is 1/8, the right child's (4 + 1/8) / 2
    np.testing.assert_array_equal(value, [-2.25, 0.125, 2.0625, 2.0625])
