"""Newton's method, coordinates without correlation, and steps along all that is known: the pieces of whole tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LogisticRegression

from treaty.errors import DataError
from treaty.linear.lbfgs import Coordinator, Slice
from treaty.linear.preparation import (
    LARGEST_TARGET,
    LOGISTIC,
    POISSON,
    SQUARED,
    TAYLOR,
    random_rotation,
    target_of,
    uncorrelated,
)
from treaty.linear.training import minimise, standard_errors

EXACT = {"l2": 0.0, "tol": 1e-14, "max_iter": 50}


def table(loader, n: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    X, y = loader(return_X_y=True)
    X = X[:rows, :n]
    return np.column_stack([(X - X.mean(axis=0)) / X.std(axis=0), np.ones(len(X))]), y[:rows].astype(float)


def test_squared_loss_has_the_weights_and_errors_of_ordinary_least_squares():
    X, y = table(load_diabetes, 4, 300)
    fitted = minimise(X, y, SQUARED, **EXACT)
    best = np.linalg.solve(X.T @ X, X.T @ y)
    np.testing.assert_allclose(fitted.weights, best, rtol=1e-9)
    errors, degrees = standard_errors(X, y, fitted.weights, SQUARED)
    residual = y - X @ best
    covariance = np.linalg.inv(X.T @ X) * (residual @ residual) / (300 - 5)
    np.testing.assert_allclose(errors, np.sqrt(np.diag(covariance)), rtol=1e-9)
    assert degrees == 295
    one = stats.linregress(X[:, 2], y)  # an implementation that knows nothing of matrices
    alone = minimise(X[:, [2, 4]], y, SQUARED, **EXACT).weights
    np.testing.assert_allclose(alone[0], one.slope, rtol=1e-9)
    np.testing.assert_allclose(standard_errors(X[:, [2, 4]], y, alone, SQUARED)[0][0], one.stderr, rtol=1e-9)


def test_logistic_loss_has_scikit_learns_weights_and_the_errors_of_fishers_information():
    X, y = table(load_breast_cancer, 2, 569)
    fitted = minimise(X, 2 * y - 1, LOGISTIC, **EXACT)
    theirs = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(X[:, :-1], y)
    np.testing.assert_allclose(fitted.weights, np.append(theirs.coef_[0], theirs.intercept_), atol=1e-5)
    p = theirs.predict_proba(X[:, :-1])[:, 1]
    information = X.T @ (X * (p * (1 - p))[:, None])
    errors, _ = standard_errors(X, 2 * y - 1, fitted.weights, LOGISTIC)
    np.testing.assert_allclose(errors, np.sqrt(np.diag(np.linalg.inv(information))), rtol=1e-4)


def test_taylor_loss_is_least_squares_of_labels_on_half_the_columns():
    X, y = table(load_breast_cancer, 4, 400)
    labels = 2 * y - 1
    taylor = minimise(X, labels, TAYLOR, **EXACT).weights
    np.testing.assert_allclose(taylor, np.linalg.lstsq(X / 2, labels, rcond=None)[0], atol=1e-9)
    squared = minimise(X / 2, labels, SQUARED, **EXACT).weights
    ours, theirs = standard_errors(X, labels, taylor, TAYLOR), standard_errors(X / 2, labels, squared, SQUARED)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-9)
    assert ours[1] == theirs[1]


def test_penalty_leaves_the_intercept_alone_and_weights_of_rows_repeat_them():
    X, y = table(load_diabetes, 3, 120)
    penalty = 0.7 * np.diag([1.0, 1.0, 1.0, 0.0])
    best = np.linalg.solve(X.T @ X / 120 + penalty, X.T @ y / 120)
    np.testing.assert_allclose(minimise(X, y, SQUARED, **{**EXACT, "l2": 0.7}).weights, best, rtol=1e-9)
    weight = np.arange(120) % 3
    rows = np.repeat(np.arange(120), weight)
    weighted = minimise(X, y, SQUARED, **EXACT, weight=weight.astype(float)).weights
    np.testing.assert_allclose(weighted, minimise(X[rows], y[rows], SQUARED, **EXACT).weights, rtol=1e-9)


def test_columns_that_repeat_share_their_weight_and_constant_ones_have_none():
    X, y = table(load_diabetes, 2, 200)
    doubled = np.column_stack([X[:, 0], X[:, 0], np.zeros(200), X[:, 1:]])
    fitted = minimise(doubled, y, SQUARED, **EXACT).weights
    once = minimise(X, y, SQUARED, **EXACT).weights
    np.testing.assert_allclose(fitted, [once[0] / 2, once[0] / 2, 0.0, *once[1:]], atol=1e-9)
    errors, degrees = standard_errors(doubled, y, fitted, SQUARED)
    assert np.isnan(errors).tolist() == [False, False, True, False, False]
    assert degrees == 197


@pytest.mark.parametrize("max_iter", [12, 20, 30, 60])
def test_a_separated_column_has_no_small_error_however_far_training_goes(max_iter):
    """Its curvature falls towards 0 with every step; the other columns' errors are those without it."""
    rng = np.random.default_rng(0)
    x, rare = rng.normal(size=1000), np.arange(1000) % 20 == 0
    y = np.where(rare, 0.0, rng.poisson(np.exp(0.3 * x)))
    X = np.column_stack([x, rare, np.ones(1000)])
    fitted = minimise(X, y, POISSON, l2=0.0, tol=0.0, max_iter=max_iter).weights
    errors, degrees = standard_errors(X, y, fitted, POISSON)
    without = standard_errors(X[~rare][:, [0, 2]], y[~rare], fitted[[0, 2]], POISSON)[0]
    assert np.isnan(errors[1]) or errors[1] > abs(fitted[1])
    np.testing.assert_allclose(errors[[0, 2]], without, rtol=0.02)
    assert degrees == 997


def test_no_more_rows_than_columns_are_refused():
    X, y = table(load_diabetes, 4, 5)
    with pytest.raises(DataError, match="more rows than columns, got 5 rows and 5 columns"):
        standard_errors(X, y, np.zeros(5), SQUARED)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_coordinates_are_uncorrelated_and_span_the_columns(independent, dependent, seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(50, independent))
    X = np.hstack([X, X @ rng.normal(size=(independent, dependent)), np.zeros((50, 1))])
    local = uncorrelated(X.T @ X / 50)
    assert local.shape == (X.shape[1], independent)
    Z = X @ local
    np.testing.assert_allclose(Z.T @ Z / 50, np.eye(independent), atol=1e-6)
    np.testing.assert_allclose(Z @ np.linalg.lstsq(Z, X, rcond=None)[0], X, atol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 5])
def test_a_rotation_is_orthogonal_and_another_every_time(size):
    one, other = random_rotation(size), random_rotation(size)
    np.testing.assert_allclose(one.T @ one, np.eye(size), atol=1e-12)
    assert size < 2 or np.abs(one - other).max() > 1e-6


@pytest.mark.parametrize("parties", [2, 3])
def test_steps_along_all_that_is_known_reach_the_optimum_in_as_many_as_there_are_columns(parties):
    rng = np.random.default_rng(parties)
    X = rng.normal(size=(80, 6)) @ rng.normal(size=(6, 6))
    y = rng.normal(size=80)
    blocks = np.split(np.arange(6), parties)
    T = np.zeros((6, 6))
    for block in blocks:
        T[np.ix_(block, block)] = uncorrelated(X[:, block].T @ X[:, block] / 80)
    Z = X @ T
    slice_ = Slice(6, memory=30, period=1)
    coordinator = Coordinator(memory=30, learning_rate=1.0 / (parties - 1), whole_table=True)
    before, losses = np.zeros(6), []
    for _ in range(9):
        losses.append(0.5 * np.mean((Z @ slice_.weights - y) ** 2))
        grad = Z.T @ (Z @ slice_.weights - y) / 80
        v = None if slice_.candidate() is None else grad - before
        before = grad
        slice_.step(coordinator.decide(slice_.products(grad, v)))
    np.testing.assert_allclose(T @ slice_.weights, np.linalg.lstsq(X, y, rcond=None)[0], atol=1e-6)
    assert (np.diff(losses) < 1e-12).all(), "the loss rose"


def test_a_target_is_scaled_and_comes_back():
    y = np.array([3.0, 5.0, 4.0, 8.0])
    target = target_of(y, "linear", "p0")
    np.testing.assert_allclose([target.labels.mean(), target.labels.std()], [0.0, 1.0], atol=1e-12)
    np.testing.assert_allclose(target.shift + target.unit * target.labels, y)
    assert target.loss.values(np.zeros(4), target.labels).mean() == pytest.approx(0.5)
    far = np.append(np.zeros(10**6), 1e9)
    assert np.abs(target_of(far, "linear", "p0").labels).max() <= LARGEST_TARGET
    with pytest.raises(DataError, match="p0: expected a target that varies"):
        target_of(np.full(5, 0.1), "linear", "p0")


@pytest.mark.parametrize(
    ("y", "words"),
    [
        ([1e9 + 1e-4, 1e9, 1e9 - 1e-4], "varies by more than 1e-12 of its mean, got a deviation of .* around 1e"),
        ([1e200, -1e200, 0.0], r"numbers below 1e150 in size, got 1e\+200"),
        ([5.0], "got one sample"),
    ],
)
def test_a_target_that_cannot_be_used_is_described_as_it_is(y, words):
    with pytest.raises(DataError, match=words):
        target_of(np.array(y), "linear", "p0")


def test_rows_without_weight_have_no_say_about_the_target():
    weight = np.array([1.0, 0.0, 2.0, 0.0])
    with pytest.raises(DataError, match="got only zeros with weight in 4 rows"):
        target_of(np.array([0.0, 3.0, 0.0, 1.0]), "poisson", "p0", weight)
    one, repeated = np.array([2.0, 9.0, 5.0, 7.0]), np.array([2.0, 5.0, 5.0])
    for family in ("linear", "poisson"):
        weighted, plain = target_of(one, family, "p0", weight), target_of(repeated, family, "p0")
        assert [weighted.shift, weighted.unit] == pytest.approx([plain.shift, plain.unit])
