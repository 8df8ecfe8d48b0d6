"""Sets of categories: their order, and sums and sides of columns with more bins than one byte counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.trees.growth import look_up_left
from treaty.trees.histograms import Histograms, width_of
from treaty.trees.splits import SplitRules, best_of, scan

RULES = SplitRules(grad_unit=2.0**-8, hess_unit=2.0**-8, min_child_weight=1.0)


def best_prefix(slots: np.ndarray, rules: SplitRules) -> tuple[float, set[int]]:
    """Return the gain and the categories of the best prefix, found with floats and numpy's sort."""
    filled = np.flatnonzero(slots[:-1, 2])
    grad, hess = slots[filled, 0] * rules.grad_unit, slots[filled, 1] * rules.hess_unit
    key = np.where(hess >= rules.min_child_weight, grad / (hess + rules.reg_lambda), 0.0)
    order = filled[np.argsort(key, kind="stable")]
    left = np.cumsum(slots[order], axis=0)
    total = np.broadcast_to(slots.sum(axis=0), left.shape)
    gains = rules.gain(total, left)
    least = rules.min_child_weight
    fit = (left[:, 1] * rules.hess_unit >= least) & ((total - left)[:, 1] * rules.hess_unit >= least)
    fit &= np.minimum(left, total - left)[:, 2] >= 1
    gains[~fit] = -np.inf
    best = int(np.argmax(gains))
    return float(gains[best]), set(order[: best + 1].tolist())


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 2000), st.integers(0, 2**32 - 1))
def test_the_best_set_is_a_prefix_of_the_stable_order(bins: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = np.zeros((bins + 1, 3), np.int64)
    slots[:-1, 2] = rng.integers(0, 30, bins)
    # few values, so that many ratios are equal
    slots[:-1, 0] = 64 * rng.integers(-3, 4, bins) * slots[:-1, 2]
    slots[:-1, 1] = 64 * slots[:-1, 2]
    offsets = np.array([0, bins + 1], np.int32)
    found = scan(slots[None], slots.sum(axis=0)[None], np.zeros(1, np.int32), offsets, np.ones(1, np.bool_), RULES)
    gain, left = best_prefix(slots, RULES)
    assert found.left_bins.shape == (1, width_of(offsets))
    if found.feature[0] < 0:
        assert gain <= RULES.threshold * (1 + 1e-9)
    else:
        assert found.gain[0] == pytest.approx(gain, rel=1e-9)
        mine = set(np.flatnonzero(found.left_bins[0]).tolist())
        np.testing.assert_array_equal(found.left_totals[0], slots[sorted(mine)].sum(axis=0))
        if gain > RULES.threshold * (1 + 1e-6):
            assert mine == left or RULES.gain(slots.sum(axis=0)[None], slots[sorted(left)].sum(axis=0)[None])[
                0
            ] == pytest.approx(gain, rel=1e-12)


def test_few_rows_do_not_sort_a_category() -> None:
    # two categories of many rows, and 31 of one row with larger gradients: with H below 1 they come between the two
    slots = np.zeros((34, 3), np.int64)
    slots[0], slots[1] = (2560, 25_600, 300), (-2560, 25_600, 300)
    slots[2:-1] = 255, 64, 1
    offsets = np.array([0, 34], np.int32)
    args = slots[None], slots.sum(axis=0)[None], np.zeros(1, np.int32), offsets, np.ones(1, np.bool_)
    assert np.flatnonzero(scan(*args, RULES).left_bins[0]).tolist() == [1]
    loose = SplitRules(grad_unit=2.0**-8, hess_unit=2.0**-8, min_child_weight=0.1)
    assert np.flatnonzero(scan(*args, loose).left_bins[0]).tolist() == [0, 1]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_of_codes_of_two_bytes_are_those_of_numpy(large: bool, threads: int) -> None:
    rng = np.random.default_rng(3)
    sizes, n = np.array([2000, 3, 300, 1, *[17] * 14]), 20_000
    codes = (rng.random((n, len(sizes))) * (sizes + 1)).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(sizes + 1)]).astype(np.int32)
    grad = rng.integers(-(2**40), 2**40, n) if large else rng.integers(-1000, 1000, n)  # large: they fit no word
    hess = rng.integers(0, 2**40 if large else 1000, n)
    histograms = Histograms(codes, np.ascontiguousarray(codes.T), offsets, threads)
    features = np.array([0, 1, 2, 4, 5, 16], np.int32)
    histograms.start_tree(grad, hess, features)
    rows = rng.permutation(n).astype(np.int32)
    starts = np.array([0, 5000, 5001, 15_000])
    sums = histograms.sums(rows, starts)
    for node, (first, last) in enumerate(pairwise(starts)):
        of = rows[first:last]
        expected = np.zeros((int(offsets[-1]), 3), np.int64)
        for feature in features:
            for part, values in enumerate((grad, hess, np.ones(n, np.int64))):
                np.add.at(expected[:, part], offsets[feature] + codes[of, feature].astype(int), values[of])
        np.testing.assert_array_equal(sums[node], expected)


def test_rows_go_by_lists_of_bins_of_any_width() -> None:
    rng = np.random.default_rng(4)
    columns = rng.integers(0, 1000, (2, 500)).astype(np.uint16)
    left_bins, rows = rng.random((2, 1000)) < 0.5, np.arange(500, dtype=np.int32)
    left, starts, features = np.empty(500, np.bool_), np.array([0, 200, 500]), np.array([1, 0], np.int32)
    look_up_left(columns, rows, starts, features, left_bins, 0, 500, left)
    expected = np.concatenate([left_bins[0, columns[1, :200]], left_bins[1, columns[0, 200:]]])
    np.testing.assert_array_equal(left, expected)


def test_the_best_of_two_widths_keeps_its_bins() -> None:
    slots = np.array([[-500, 300, 5], [500, 300, 5], [0, 0, 0]])
    wide = np.zeros((1, 401, 3), np.int64)
    wide[0, [3, 399]] = 2 * slots[0], 2 * slots[1]
    flags, one = np.ones(1, np.bool_), np.zeros(1, np.int32)
    narrow = scan(slots[None], slots.sum(axis=0)[None], one, np.array([0, 3], np.int32), flags, RULES)
    other = scan(wide, wide.sum(axis=1), one, np.array([0, 401], np.int32), flags, RULES, source=1)
    for first, last, going, source in ((narrow, other, 3, 1), (other, narrow, 3, 1)):
        best = best_of([first, last])
        assert best.left_bins.shape == (1, 408)
        assert (best.source[0], np.flatnonzero(best.left_bins[0]).tolist()) == (source, [going])
