"""Bins from noisy counts: they follow the rows where noise lets them, and are never more or out of order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.data.noisy_quantiles import MOST_PROBES, ROUNDS, NoisyQuantiles, between
from treaty.data.quantile_search import count_below, sorted_keys


def search(columns, max_bin, sigma, seed=0):
    """Return the cuts of a search whose counts carry noise."""
    rng = np.random.default_rng(seed)
    wide = np.array([column.dtype == np.float64 for column in columns])
    found = NoisyQuantiles(max_bin, sigma=max(sigma, 1e-9), wide=wide)
    found.present(np.array([np.count_nonzero(~np.isnan(column)) for column in columns]))
    ordered, rounds = sorted_keys(columns), 0
    while (probes := found.probes()) is not None:
        rounds += 1
        assert (np.diff(probes.offsets) <= MOST_PROBES).all()
        counts = between(count_below(ordered, probes), probes.offsets)
        # a row is counted once in a column, and nowhere twice
        for column, (a, b) in zip(columns, zip(probes.offsets, probes.offsets[1:], strict=False), strict=True):
            assert 0 <= counts[a:b].sum() <= len(column)
        found.take(counts + np.rint(rng.normal(0.0, sigma, len(counts))).astype(np.int64))
    assert rounds <= ROUNDS
    return found.cuts()


def shares(column, cuts):
    return np.bincount(np.searchsorted(cuts, column[~np.isnan(column)], side="right"), minlength=len(cuts) + 1) / len(
        column
    )


COLUMNS = {
    "normal": lambda rng: rng.normal(size=20_000),
    "lognormal": lambda rng: rng.lognormal(3.0, 2.0, 20_000),
    "uniform": lambda rng: rng.random(20_000) + 1000.0,
    "codes": lambda rng: rng.integers(-2, 6, 20_000),
    "two signs": lambda rng: np.where(rng.random(20_000) < 0.5, -1.0, 1.0) * rng.exponential(50.0, 20_000),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bins_hold_about_as_many_rows_each(kind, dtype):
    column = COLUMNS[kind](np.random.default_rng(5)).astype(dtype)
    for sigma in (0.0, 60.0):
        (cuts,) = search([column], 16, sigma)
        assert cuts.dtype == dtype
        distinct = len(np.unique(column))
        assert min(6, distinct - 1) <= len(cuts) < 16
        # no bin without a reason has a quarter of all rows
        heaviest = np.unique(column, return_counts=True)[1].max() / len(column)
        assert shares(column, cuts).max() <= max(0.2, heaviest + 0.02)


def test_a_value_that_many_rows_share_has_a_bin_to_itself():
    rng = np.random.default_rng(1)
    column = np.where(rng.random(20_000) < 0.7, 0.0, rng.normal(50.0, 20.0, 20_000)).astype(np.float32)
    (cuts,) = search([column], 16, 60.0)
    code = np.searchsorted(cuts, 0.0, side="right")
    inside = np.searchsorted(cuts, column, side="right") == code
    assert (column[inside] == 0.0).mean() > 0.95


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32), sigma=st.floats(0.0, 1e4), max_bin=st.integers(2, 40), n_rows=st.integers(0, 300),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)  # fmt: skip
def test_cuts_ascend_and_are_fewer_than_bins_whatever_the_noise(seed, sigma, max_bin, n_rows, scale):
    rng = np.random.default_rng(seed)
    columns = [
        (rng.normal(size=n_rows) * scale).astype(np.float32), np.full(n_rows, np.nan, np.float32),
        np.ones(n_rows, np.float32), rng.integers(0, 3, n_rows).astype(np.float64),
    ]  # fmt: skip
    for cuts in search(columns, max_bin, sigma, seed):
        assert len(cuts) < max_bin
        assert (np.diff(cuts) > 0).all()
        assert np.isfinite(cuts).all()


def test_counts_between_probes_begin_anew_with_each_column():
    below = np.array([2, 5, 5, 1, 9])
    np.testing.assert_array_equal(between(below, np.array([0, 3, 3, 5], np.int32)), [2, 3, 0, 1, 8])
