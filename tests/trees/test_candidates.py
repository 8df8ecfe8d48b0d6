"""Candidates' sums are the bins' sums again, whatever bins a node has rows in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.trees.histograms import bin_sums, candidate_columns, candidate_slots, count_bins, undivided, whole_numbers
from treaty.trees.splits import SplitRules, scan

N_BINS = np.array([5, 3, 0, 1, 4])
CATEGORICAL = np.array([False, True, False, False, True])
OFFSETS = np.concatenate([[0], np.cumsum(N_BINS + 1)]).astype(np.int32)
RULES = SplitRules(grad_unit=2.0**-16, hess_unit=2.0**-16, min_child_weight=0.0)


def node(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, bins + 1, rows) for bins in N_BINS], axis=1).astype(np.uint8)
    return codes, np.stack([rng.integers(-(2**16), 2**16, rows), rng.integers(0, 2**14, rows)], axis=1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 40), st.sets(st.integers(0, 4)))
def test_sums_of_candidates_give_the_sums_of_bins(seed, rows, chosen):
    codes, values = node(seed, rows)
    features = np.array(sorted(chosen), np.int32)
    counts = count_bins(codes, features, OFFSETS)
    slots = candidate_slots(counts, features, OFFSETS)
    columns = candidate_columns(codes, slots, OFFSETS, CATEGORICAL)
    assert columns.shape == (rows, len(slots))
    totals = np.array([*values.sum(axis=0), rows])
    found = bin_sums(
        whole_numbers(values.T.astype(float) @ columns), slots, counts, totals, features, OFFSETS, CATEGORICAL
    )
    expected = np.zeros_like(found)
    for feature in features:
        np.add.at(expected, OFFSETS[feature] + codes[:, feature], np.column_stack([values, np.ones(rows, int)]))
    np.testing.assert_array_equal(found, expected)


def test_columns_are_candidates_with_missing_values_going_right():
    codes = np.array([[0, 2], [1, 0], [3, 2], [3, 3], [1, 0]], np.uint8)
    offsets, categorical = np.array([0, 4, 8], np.int32), np.array([False, True])
    counts = count_bins(codes, np.arange(2, dtype=np.int32), offsets)
    slots = candidate_slots(counts, np.arange(2, dtype=np.int32), offsets)
    assert slots.tolist() == [0, 1, 4, 6]  # bin 2 is empty, the last with rows has the rest
    columns = candidate_columns(codes, slots, offsets, categorical)
    np.testing.assert_array_equal(columns.T, [[1, 0, 0, 0, 0], [1, 1, 0, 0, 1], [0, 1, 0, 0, 1], [1, 0, 1, 0, 0]])


def test_a_node_left_undivided_has_no_split():
    totals = np.array([[5 << 16, 3 << 16, 9]])
    features = np.arange(5, dtype=np.int32)
    sums = undivided(totals[0], features, OFFSETS)
    assert all(sums[OFFSETS[f] : OFFSETS[f + 1]].sum(axis=0).tolist() == totals[0].tolist() for f in features)
    assert scan(sums[None], totals, features, OFFSETS, CATEGORICAL, RULES).feature.tolist() == [-1]


def test_gains_of_totals_are_those_of_the_scan():
    codes, values = node(3, 40)
    features = np.arange(5, dtype=np.int32)
    sums = np.zeros((1, OFFSETS[-1], 3), np.int64)
    for feature in features:
        np.add.at(sums[0], OFFSETS[feature] + codes[:, feature], np.column_stack([values, np.ones(40, int)]))
    totals = np.array([[*values.sum(axis=0), 40]])
    for rules in (
        RULES,
        SplitRules(grad_unit=2.0**-16, hess_unit=2.0**-16, reg_alpha=0.4, reg_lambda=2.0),
        SplitRules(grad_unit=2.0**-16, hess_unit=2.0**-16, max_delta_step=0.02),
    ):
        found = scan(sums, totals, features, OFFSETS, CATEGORICAL, rules)
        assert found.gain[0] > 0
        np.testing.assert_allclose(rules.gain(totals, found.left_totals), found.gain, rtol=1e-12)


@pytest.mark.parametrize("wrong", [0.5, -3.3, np.nan, np.inf, 2.0**63])
def test_what_is_no_sum_of_whole_numbers_is_refused(wrong):
    with pytest.raises(ValueError, match="whole numbers"):
        whole_numbers(np.array([[1.0, wrong]]))
    assert whole_numbers(np.array([1.0 + 1e-7, -7.0 - 1e-7])).tolist() == [1, -7]
