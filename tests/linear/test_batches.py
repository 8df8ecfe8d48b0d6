"""One partition into batches for a whole training; only their order changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.errors import ConfigError
from treaty.linear.lbfgs import batch_seed, check_batch_size, fewest_rows, partition, rows_alone

SEED = batch_seed(0)


@settings(deadline=None)
@given(n_rows=st.integers(1, 300), batch_size=st.integers(1, 300))
def test_batches_are_full_and_share_no_row(n_rows, batch_size):
    batches = partition(n_rows, batch_size, SEED)
    size = min(batch_size, n_rows)
    assert batches.shape == (n_rows // size, size)
    assert len(np.unique(batches)) == batches.size
    assert batches.min() >= 0
    assert batches.max() < n_rows


def test_seeds_differ_in_everything():
    assert partition(50, 10, SEED).tolist() != partition(50, 10, batch_seed(1)).tolist()
    assert batch_seed(None) != batch_seed(None)


def test_what_is_drawn_is_the_same_everywhere():
    """Parties on other machines, with another numpy, must draw these very numbers."""
    assert partition(7, 3, bytes(32)).tolist() == [[1, 0, 4], [2, 3, 5]]


def test_rows_are_spread_evenly():
    """Each row is in the first batch half of the time: 200 seeds, five standard deviations."""
    counts = np.zeros(40)
    for number in range(200):
        counts[partition(40, 20, batch_seed(number))[0]] += 1
    assert np.all(np.abs(counts - 100) < 5 * np.sqrt(50))


@pytest.mark.parametrize(
    ("n_columns", "of_labels", "least"),
    [(12, False, 120), (3, True, 120), (7, True, 280), (8, True, 300), (30, True, 300), (31, True, 310), (0, True, 0)],
)
def test_batches_of_too_few_rows_are_refused(n_columns, of_labels, least):
    check_batch_size(least, n_columns, "bank", n_rows=1000, of_labels=of_labels)
    assert fewest_rows(n_columns, of_labels=of_labels) == least
    with pytest.raises(
        ConfigError, match=rf"at least {least} rows for the {n_columns - (not of_labels)} columns of bank"
    ):
        check_batch_size(least - 1, n_columns, "bank", n_rows=1000, of_labels=of_labels)


@pytest.mark.parametrize(
    ("n_columns", "of_labels", "n_rows", "words"),
    [
        (3, True, 120, "the 3 columns of bank (one per category), got 5: from smaller ones labels can be solved for; "
         "raise batch_size or fewer columns"),
        (3, True, 119, "the table has only 119 rows: bring more or fewer columns"),
        (1, True, 50, "the column of bank, got"),
        (2, False, 50, "the column of bank and the intercept, got 5: from smaller ones margins"),
        (1, False, 9, "the intercept of bank, got 5: from smaller ones margins can be solved for; the table has only 9 "
         "rows: bring more"),
    ],
)  # fmt: skip
def test_refused_batches_are_told_what_helps(n_columns, of_labels, n_rows, words):
    with pytest.raises(ConfigError) as caught:
        check_batch_size(5, n_columns, "bank", n_rows=n_rows, of_labels=of_labels)
    assert words in str(caught.value)


def test_rows_alone_are_those_of_large_leverage():
    rng = np.random.default_rng(0)
    kinds = np.repeat([0, 1, 2, 3], [50, 40, 9, 1])
    X = np.hstack([np.eye(4)[kinds], rng.standard_normal((100, 2)), np.zeros((100, 1))])  # as many as sum up to ones
    assert rows_alone(X) == 1
    X[7, 4] = 40.0
    assert rows_alone(X) == 2
    A = np.hstack([X, np.ones((100, 1))])
    leverage = np.diag(A @ np.linalg.pinv(A))
    assert np.count_nonzero(leverage > 1 / 3) == 2
    assert rows_alone(X[:, :0]) == 0
    assert rows_alone(np.zeros((100, 3))) == 0
    assert rows_alone(np.eye(4)) == 4
