"""Sums of a cluster's workers are those of one machine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.local_shards import LocalShards
from treaty.cluster.shards import STRIPE, ByRows, local_rows, places, rows_before
from treaty.cluster.sums import ClusterHistograms
from treaty.trees.histograms import Histograms


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 5), first=st.integers(0, 12 * STRIPE), length=st.integers(0, 9 * STRIPE))
def test_every_row_is_at_one_worker(count, first, length):
    rows = np.arange(first, first + length, dtype=np.int32)
    parts = [ByRows(rows, first=first).of(number, count) for number in range(count)]
    assert np.array_equal(np.sort(np.concatenate(parts)), rows)
    for number, part in enumerate(parts):
        assert (part // STRIPE % count == number).all()
        assert np.array_equal(local_rows(part, count), rows_before(number, count, first) + np.arange(len(part)))
        assert np.array_equal(part, rows[places(rows, count)[number]])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("n", "count"), [(STRIPE * 5 + 77, 3), (STRIPE * 2, 4), (900, 3)])
def test_sums_are_those_of_one_machine(n, count, large):
    rng = np.random.default_rng(n)
    bins = np.array([4, 1, 200, 17])
    codes = rng.integers(0, bins, (n, 4)).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(bins)]).astype(np.int32)
    shards = LocalShards(count)
    found = ClusterHistograms.of_columns(shards, "own")(codes, offsets)
    expected = Histograms(codes, np.ascontiguousarray(codes.T), offsets)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        grad = rng.integers(-(1 << 40 if large else 1 << 20), 1 << 20, n)
        hess = rng.integers(0, 1 << 18, n)
        rows = rng.permutation(n).astype(np.int32)
        starts = np.array([0, n // 3, n // 3, n // 2 + 1])
        features = np.array([0, 2, 3], np.int32)
        for histograms in (found, expected):
            histograms.start_tree(grad, hess, features)
        assert np.array_equal(found.sums(rows, starts), expected.sums(rows, starts))
        shards.lose(seed)
        firsts = np.array([n - n // 3, 0, 3])
        assert np.array_equal(found.sums(rows, starts, firsts), expected.sums(rows, starts, firsts))
        found.end_tree()
