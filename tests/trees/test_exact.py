"""Splits are chosen by their exact gains, where float64 cannot tell them apart."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.trees.splits import SplitRules, Splits, best_of, bound, bounds, fraction, scan

BINS, FEATURES = 4, 3
OFFSETS = np.arange(0, FEATURES * (BINS + 1) + 1, BINS + 1).astype(np.int32)
ALL = np.arange(FEATURES, dtype=np.int32)


def node_of(data: Any) -> tuple[np.ndarray, np.ndarray, SplitRules, np.ndarray]:
    """Draw bin sums, (1, slots, 3), of a node whose features tie, or nearly; its totals, rules, what is a category."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    size = data.draw(st.sampled_from([3, 1 << 20, 1 << 45]))
    unit = data.draw(st.sampled_from([2.0**-16, 2.0**-2])) if size < 1 << 40 else 2.0**-50  # the bound, rounded down
    slots = np.stack([
        rng.integers(-size, size + 1, BINS + 1), rng.integers(1, size + 2, BINS + 1), rng.integers(1, 4, BINS + 1)
    ], axis=1)  # fmt: skip
    features = [slots]
    for _ in range(FEATURES - 1):  # the same bins in another order; some with a step of a gradient moved between two
        moved = slots[rng.permutation(BINS + 1)].copy()
        if data.draw(st.booleans()):
            one, other = rng.choice(BINS + 1, 2, replace=False)
            moved[one, 0] += 1
            moved[other, 0] -= 1
        features.append(moved)
    rules = SplitRules(
        grad_unit=unit, hess_unit=unit, min_child_weight=unit,
        reg_lambda=data.draw(st.sampled_from([1.0, 0.3, unit])),
        min_gain=data.draw(st.sampled_from([0.0, 1e-6])), min_split_loss=data.draw(st.sampled_from([0.0, 1e-9, 0.01])),
        onehot_below=data.draw(st.sampled_from([0, BINS + 1])), halves=True,
        min_child_samples=data.draw(st.sampled_from([1, 1, 3])),
    )  # fmt: skip
    categorical = np.array([data.draw(st.booleans()) for _ in range(FEATURES)])
    return np.concatenate(features)[None], slots.sum(axis=0)[None], rules, categorical


def gain(totals: np.ndarray, left: np.ndarray, rules: SplitRules) -> Fraction:
    """Return the gain of Eq. 7 in units of the fixed point, exactly."""

    def term(sums: np.ndarray) -> Fraction:
        return Fraction(int(sums[0]) ** 2, int(sums[1]) + rules.ridge)

    return term(left) + term(totals - left) - term(totals)


def candidates_of(slots: np.ndarray, totals: np.ndarray, rules: SplitRules, categorical: bool) -> Any:
    """Yield the bins that go left in a column's candidates, in their order."""
    if categorical and rules.onehot_below <= BINS:
        fewest = -(-rules.min_child_samples // 2)
        grad, hess = int(totals[0]), int(totals[1]) + 2 * rules.ridge
        above = np.array([hess * int(slot[0]) > grad * int(slot[1]) for slot in slots])
        enough = slots[:, 2] >= fewest
        yield from (above & enough, ~above & enough)
        return
    for missing_left in (False, True):
        for k in reversed(range(BINS)) if missing_left else range(BINS):
            going = np.zeros(BINS + 1, np.bool_)
            going[(k if categorical else 0) : k + 1] = True
            going[BINS] = missing_left
            yield going


def exhaustive(sums: np.ndarray, totals: np.ndarray, rules: SplitRules, categorical: np.ndarray) -> Any:
    """Return the first split of the largest exact gain: its feature and the bins that go left; None without one."""
    best, least = None, Fraction(rules.threshold_in_units)
    least_top, least_below = bound(totals[0], rules.ridge, rules.threshold_in_units)
    for feature in range(FEATURES):
        slots = sums[0, OFFSETS[feature] : OFFSETS[feature + 1]]
        for going in candidates_of(slots, totals[0], rules, categorical[feature]):
            left = slots[going].sum(axis=0)
            right = totals[0] - left
            if min(left[1], right[1]) < rules.least_hess or min(left[2], right[2]) < rules.min_child_samples:
                continue
            top, below = fraction(totals[0], left, rules.ridge)
            if top * least_below <= least_top * below:
                continue
            found = gain(totals[0], left, rules)
            if best is None or found > least:
                best, least = (feature, going), found
    return best


@given(
    st.lists(st.tuples(st.integers(-(2**62), 2**62), st.integers(-5, 2**62), st.just(1)), max_size=4),
    st.integers(1, 1 << 60),
    st.sampled_from([0.0, 1e-6, 0.0655, 3.7e20]),
)
def test_bounds_of_a_level_are_those_of_its_nodes(nodes, ridge, threshold):
    totals = np.array(nodes, np.int64).reshape(-1, 3)
    gains, tops, belows = bounds(totals, ridge, threshold)
    for k, of_node in enumerate(totals):
        top, below = bound(of_node, ridge, threshold)
        for digits, number in ((tops[k], top), (belows[k], below)):
            assert sum(int(digit) << 32 * place for place, digit in enumerate(digits)) == number
        grad, hess = int(of_node[0]), max(int(of_node[1]), 0)
        assert gains[k] == (top - grad * grad * ridge) / ((hess + 2 * ridge) * (hess + ridge))


@given(st.data())
def test_the_first_of_the_largest_exact_gains_is_chosen(data: Any) -> None:
    sums, totals, rules, categorical = node_of(data)
    assert rules.exact
    expected = exhaustive(sums, totals, rules, categorical)
    found = scan(sums, totals, ALL, OFFSETS, categorical, rules)
    if expected is None:
        assert found.feature[0] == -1
        return
    assert found.feature[0] == expected[0]
    assert found.left_bins[0, : BINS + 1].tolist() == expected[1].tolist()
    of_best = sums[0, OFFSETS[expected[0]] : OFFSETS[expected[0] + 1]]
    assert found.left_totals[0].tolist() == of_best[expected[1]].sum(axis=0).tolist()


@pytest.mark.parametrize("size", [1, 1 << 52])
def test_a_category_just_at_the_mean_is_not_above_it(size: int) -> None:
    """float64 cannot tell the products; by a step of the gradient the category is above."""
    rules = SplitRules(grad_unit=2.0**-50, hess_unit=2.0**-50, reg_lambda=2.0**-50, onehot_below=0, halves=True,
                       min_child_weight=2.0**-50, min_gain=0.0)  # fmt: skip
    for step in (0, 1):
        # G / (H + 2) is 3 / 14, as the first category's, exactly where step is 0
        slots = np.array([[3 * size + step, 14 * size, 2], [9 * size, 2, 2], [-6 * size, 14 * size - 4, 2], [0, 0, 0]])
        totals = slots.sum(axis=0)
        whole, grad = int(totals[1]) + 2, int(totals[0])
        above = [whole * int(slot[0]) > grad * int(slot[1]) for slot in slots[:3]]
        found = scan(slots[None], totals[None], ALL[:1], np.array([0, 4], np.int32), np.array([True]), rules)
        assert found.feature[0] == 0
        assert above == [bool(step), True, False]
        assert found.left_bins[0, :3].tolist() in (above, [not bit for bit in above])


@given(st.data())
def test_columns_of_several_sources_give_the_split_of_all_together(data: Any) -> None:
    sums, totals, rules, categorical = node_of(data)
    whole = scan(sums, totals, ALL, OFFSETS, categorical, rules)
    apart: list[Splits] = []
    for feature in range(FEATURES):
        part = sums[:, OFFSETS[feature] : OFFSETS[feature + 1]]
        one = categorical[feature : feature + 1]
        apart.append(scan(part, totals, ALL[:1], OFFSETS[:2], one, rules, source=feature))
    found = best_of(apart, totals, rules)
    if whole.feature[0] == -1:
        assert found.feature[0] == -1
    else:
        assert (found.source[0], found.feature[0]) == (whole.feature[0], 0)
        np.testing.assert_array_equal(found.left_bins, whole.left_bins)


@given(st.integers(0, 2**32 - 1))
def test_the_fraction_orders_splits_as_gains_do(seed: int) -> None:
    rng, rules = np.random.default_rng(seed), SplitRules(grad_unit=2.0**-16, hess_unit=2.0**-16)
    left = rng.integers(-1000, 1000, (2, 3))
    left[:, 1:] = rng.integers(0, 1000, (2, 2))
    totals = np.array([rng.integers(-2000, 2000), 1000 + rng.integers(0, 1000), 0])
    (top, below), (other_top, other_below) = (fraction(totals, of, rules.ridge) for of in left)
    one, other = (gain(totals, of, rules) for of in left)
    assert (one > other) == (top * other_below > other_top * below)
    threshold = float(one) * rules.grad_unit**2 / rules.hess_unit if one > 0 else 0.0
    passed, over = bound(totals, rules.ridge, threshold)
    if one > Fraction(threshold) + 1 or one < Fraction(threshold) - 1:  # but for the rounding of the bound
        assert (one > Fraction(threshold)) == (top * over > passed * below)


def test_float64_alone_would_take_the_worse_of_two_splits() -> None:
    """Two features whose left sums differ by a step in 2^57: the gains are the same as float64."""
    unit, size = 2.0**-57, 1 << 57
    rules = SplitRules(grad_unit=unit, hess_unit=unit, min_child_weight=unit, reg_lambda=1.0)
    totals = np.array([[0, 4 * size, 8]])
    first = np.array([[size, 2 * size, 4], [-size, 2 * size, 4], [0, 0, 0]])
    second = first + np.array([[1, 0, 0], [-1, 0, 0], [0, 0, 0]])
    offsets = np.array([0, 3, 6], np.int32)
    found = scan(
        np.concatenate([first, second])[None], totals, ALL[:2], offsets, np.zeros(2, np.bool_), rules
    )  # fmt: skip
    gains = rules.gain(totals.repeat(2, axis=0), np.stack([first[0], second[0]]))
    assert gains[0] == gains[1]  # the first one would win
    assert found.feature[0] == 1


@pytest.mark.parametrize(
    "without", [{"reg_alpha": 0.1}, {"max_delta_step": 1.0}, {"reg_lambda": 0.0}, {"min_child_weight": 0.0}]
)
def test_gains_that_are_no_fractions_are_compared_as_floats(without: dict[str, float]) -> None:
    assert not SplitRules(**{"grad_unit": 2.0**-16, "hess_unit": 2.0**-16, **without}).exact
