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

from treaty.errors import DataError, warn_user
from treaty.machine.arrays import Floats

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


# -------------------------- Platt scaling: margins that a loss other than the logistic one has trained become log-odds
#
# The Taylor loss is a least-squares loss. Its margins rank rows well, but the probabilities 1 / (1 + exp(-u)) are
# biased: too near 1/2, so that their mean is not the rate of the labels. Two numbers, fitted to margins and labels of
# the training rows by the exact logistic loss, put that right.
#
# References
# ----------
# Platt, "Probabilistic Outputs for Support Vector Machines", 1999; its smoothed targets, (n + 1) / (n + 2) for n rows
# of a class, keep the two numbers finite where the classes are separable.

SAME = 1e-9
"""Margins whose deviation is a smaller share of their size differ by rounding alone: all get the labels' rate."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The log-odds of a row with margin u are `slope` u + `offset`."""

    slope: float
    offset: float

    def log_odds(self, margins: Floats) -> Floats:
        """Return log-odds of the second class, of the margins' shape."""
        return self.slope * margins + self.offset


def fit_calibration(margins: Floats, y: Floats, weight: Floats | None = None) -> Calibration:
    """Fit Platt's two numbers to margins (n_rows,), labels y of 0 or 1, and weights of rows.

    Whole weights count rows, others are scaled to mean 1.
    """
    from sklearn.linear_model import LogisticRegression  # late: only a party with labels needs it, once

    weight = np.ones(len(y)) if weight is None else weight
    if np.any(weight != np.rint(weight)):
        weight = weight / weight.mean()
    positive, negative = float(weight @ y), float(weight @ (1.0 - y))
    targets = np.where(y > 0.5, (positive + 1.0) / (positive + 2.0), 1.0 / (negative + 2.0))
    centre = float(np.average(margins, weights=weight))
    spread = math.sqrt(float(np.average((margins - centre) ** 2, weights=weight)))
    if spread <= SAME * max(1.0, abs(centre)):
        margins, spread = np.full_like(margins, centre), 1.0
    scores = ((margins - centre) / spread)[:, np.newaxis]
    # a row of either class for every row, weighted by its target
    fitted = LogisticRegression(C=np.inf, tol=1e-9, max_iter=1000).fit(
        np.vstack([scores, scores]),
        np.repeat([1, 0], len(y)),
        sample_weight=np.concatenate([weight * targets, weight * (1.0 - targets)]),
    )
    slope = float(fitted.coef_[0, 0]) / spread
    return Calibration(slope, float(fitted.intercept_[0]) - slope * centre)


# -------- what a regression on the whole table regresses on: labels or numbers, in units in which all losses are alike

LARGEST_TARGET = 512.0
"""In standard deviations; a target with rows further out has a larger unit."""

LEAST_SPREAD = 1e-12


@dataclass(frozen=True, slots=True)
class Target:
    """Labels for a loss, in a unit of their own: a margin for labels as they came is `shift` + `unit` times one here.

    The covariance of weights is `variance` times the inverse Hessian, unless that is estimated from the residuals.
    """

    loss: Loss
    labels: Floats
    shift: float = 0.0
    unit: float = 1.0
    variance: float = 1.0

    @property
    def hidden(self) -> Floats:
        """What margins come near to under a quadratic loss, whose residuals are its curvature times the difference."""
        return 2.0 * self.labels if self.loss is TAYLOR else self.labels

    @property
    def start(self) -> float:
        """Mean loss of margins of 0."""
        return float(np.mean(self.loss.values(np.zeros(len(self.labels)), self.labels)))


def target_of(y: Floats, family: str, party: str, weight: Floats | None = None) -> Target:
    """Prepare 0 and 1 of a logistic regression, counts, or any numbers; DataError for others, or all the same."""
    if family == "logistic":
        return Target(TAYLOR, 2.0 * y - 1.0)
    if family == "poisson":
        negative, rate = int(np.count_nonzero(y < 0.0)), float(np.average(y, weights=weight))
        if negative or not rate > 0.0:
            got = f"{negative} negative ones" if negative else "only zeros" + ("" if weight is None else " with weight")
            raise DataError(f"{party}: expected counts, 0 or more and not all 0, got {got} in {len(y)} rows")
        return Target(POISSON, y / rate, math.log(rate), variance=1.0 / rate)
    with np.errstate(over="ignore", invalid="ignore"):
        shift = float(np.average(y, weights=weight))
        far = float(np.abs(y - shift).max(initial=0.0))
        unit = max(math.sqrt(np.average((y - shift) ** 2, weights=weight)), far / LARGEST_TARGET)
    if not math.isfinite(unit):
        raise DataError(f"{party}: expected a target of numbers below 1e150 in size, got {np.abs(y).max():.3g}")
    if unit <= LEAST_SPREAD * abs(shift):
        got = "one sample" if len(y) == 1 else f"a deviation of {unit:.1g} around {shift:.6g} in {len(y)} rows"
        raise DataError(f"{party}: expected a target that varies by more than {LEAST_SPREAD:g} of its mean, got {got}")
    return Target(SQUARED, (y - shift) / unit, shift, unit)
