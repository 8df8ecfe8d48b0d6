"""The logistic loss, its second-order Taylor form, the squared and the Poisson loss: values, residuals, curvatures.

Labels y are -1 or +1 (of a regression of numbers these), u = w^T x are the rows' margins. The derivatives of the mean
loss are sums over rows of what `Loss` gives: `mean_over_rows(X, residuals)` is the gradient;
`mean_over_rows(X, curvatures)`, with curvatures computed from `X @ s`, is the Hessian's product with s.

References
----------
Yang, Fan, Chen, Shi, Yang, "A Quasi-Newton Method Based Vertical Federated Learning Framework for Logistic Regression",
2019 (arXiv 1912.00513), equations 4 to 8, with signs and factors corrected, see docs/logistic.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from treaty.compute import Floats
from treaty.errors import warn_user

TAYLOR_RANGE = 4.0  # beyond |u| = 4 the Taylor loss rises where the logistic loss still falls or has flattened out
TAYLOR_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of rows; all functions take and return float64 (n_rows,)."""

    name: str  # "taylor", "logistic", "squared" or "poisson"
    values: Callable[[Floats, Floats], Floats]  # of u, y
    residuals: Callable[[Floats, Floats], Floats]  # of u, y: d, the derivative with respect to u
    curvatures: Callable[[Floats, Floats], Floats]  # of u, X @ s: h, the second derivative times the row's x^T s
    least: float | None = None  # of a quadratic loss: its values are this and half a squared residual of y


def _logistic_curvatures(u: Floats, x_s: Floats) -> Floats:
    p = probabilities(u)
    return p * (1.0 - p) * x_s


def _poisson_values(u: Floats, y: Floats) -> Floats:
    from scipy.special import xlogy  # type: ignore[import-untyped]  # not at every process's start: 0.15 s

    values: Floats = np.exp(u) - y * u + xlogy(y, y) - y
    return values


TAYLOR = Loss(
    "taylor",
    values=lambda u, y: math.log(2.0) - 0.5 * y * u + 0.125 * u * u,
    residuals=lambda u, y: 0.25 * u - 0.5 * y,
    curvatures=lambda u, x_s: 0.25 * x_s,
    least=math.log(2.0) - 0.5,
)
LOGISTIC = Loss(
    "logistic",
    values=lambda u, y: np.logaddexp(0.0, -y * u),
    residuals=lambda u, y: -y * probabilities(-y * u),
    curvatures=_logistic_curvatures,
)
SQUARED = Loss(
    "squared",
    values=lambda u, y: 0.5 * (u - y) ** 2,
    residuals=lambda u, y: u - y,
    curvatures=lambda u, x_s: x_s,
    least=0.0,
)


POISSON = Loss(
    "poisson",  # half the deviance
    values=_poisson_values,
    residuals=lambda u, y: np.exp(u) - y,
    curvatures=lambda u, x_s: np.exp(u) * x_s,
)


def probabilities(u: Floats) -> Floats:
    """Return 1 / (1 + exp(-u)), without overflow (n_rows,)."""
    return np.exp(-np.logaddexp(0.0, -u))


def mean_over_rows(X: Floats, of_rows: Floats) -> Floats:
    """Return X^T r / n_rows (n_columns,): from residuals the gradient, from curvatures the Hessian's product."""
    return X.T @ of_rows / len(X)


def beyond_taylor(u: Floats) -> str | None:
    """Return a warning if over 1 % of margins are beyond 4, where the Taylor loss is not the logistic loss."""
    share = float(np.mean(np.abs(u) > TAYLOR_RANGE)) if len(u) else 0.0
    if share <= TAYLOR_SHARE:
        return None
    return (
        f"{share:.1%} of rows have a margin beyond {TAYLOR_RANGE:g}, where the Taylor loss, which the model is trained "
        "on, is not the logistic loss: take probabilities there with care, or raise l2"
    )


def warn_beyond_taylor(u: Floats) -> None:
    said = beyond_taylor(u)
    if said is not None:
        warn_user(said)
