"""The two losses: formulas against numerical differentiation, and where they part."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from treaty.linear.preparation import LOGISTIC, SQUARED, TAYLOR, probabilities, warn_beyond_taylor

EACH = pytest.mark.parametrize("loss", [TAYLOR, LOGISTIC, SQUARED], ids=lambda loss: loss.name)
STEP = 1e-5


def rows(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(40, 5)), rng.choice([-1.0, 1.0], 40), rng.normal(size=5)


@EACH
@settings(deadline=None)
@given(u=st.floats(-6, 6), y=st.sampled_from([-1.0, 1.0]))
def test_residual_is_the_derivative_of_the_value(loss, u, y):
    at, y = np.array([u - STEP, u, u + STEP]), np.full(3, y)
    below, _, above = loss.values(at, y)
    assert loss.residuals(at, y)[1] == pytest.approx((above - below) / (2 * STEP), abs=1e-8)


@EACH
@settings(deadline=None)
@given(u=st.floats(-6, 6), x_s=st.floats(-3, 3))
def test_curvature_is_the_derivative_of_the_residual_along_s(loss, u, x_s):
    below, above = loss.residuals(u + np.array([-STEP, STEP]) * x_s, np.ones(2))
    assert loss.curvatures(np.array([u]), np.array([x_s]))[0] == pytest.approx((above - below) / (2 * STEP), abs=1e-8)


@EACH
@pytest.mark.parametrize("seed", range(3))
def test_means_over_rows_are_gradient_and_hessian_product(loss, seed):
    X, y, w = rows(seed)
    s = np.random.default_rng(seed + 10).normal(size=5)

    def gradient(w):
        return X.T @ loss.residuals(X @ w, y) / len(X)

    sides = [np.mean(loss.values(X @ (w + sign * STEP * s), y)) for sign in (1, -1)]
    assert gradient(w) @ s == pytest.approx((sides[0] - sides[1]) / (2 * STEP), abs=1e-8)
    numeric = (gradient(w + STEP * s) - gradient(w - STEP * s)) / (2 * STEP)
    np.testing.assert_allclose(X.T @ loss.curvatures(X @ w, X @ s) / len(X), numeric, atol=1e-8)


@settings(deadline=None)
@given(u=st.floats(-1, 1), y=st.sampled_from([-1.0, 1.0]))
def test_taylor_loss_follows_the_logistic_loss_to_third_order(u, y):
    u, y = np.array([u]), np.array([y])
    assert abs(TAYLOR.values(u, y) - LOGISTIC.values(u, y))[0] <= u[0] ** 4 / 192 + 1e-15


def test_taylor_loss_is_the_residual_formula_of_the_corrected_paper():
    X, y, w = rows(0)
    u = X @ w
    np.testing.assert_allclose(TAYLOR.residuals(u, y), u / 4 - y / 2, rtol=1e-15)
    np.testing.assert_allclose(TAYLOR.values(u, y), np.log(2) - y * u / 2 + u**2 / 8, rtol=1e-15)


def test_probabilities_are_the_sigmoid_without_overflow():
    u = np.array([-1e6, -30.0, -1.0, 0.0, 2.0, 1e6])
    np.testing.assert_allclose(probabilities(u), expit(u), rtol=1e-14)


def test_a_warning_tells_where_the_taylor_loss_is_not_the_logistic_loss():
    u = np.zeros(1000)
    u[:10] = 4.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_beyond_taylor(u)
        warn_beyond_taylor(np.empty(0))
    u[10] = -4.1
    with pytest.warns(UserWarning, match=r"1\.1% of rows have a margin beyond 4"):
        warn_beyond_taylor(u)
