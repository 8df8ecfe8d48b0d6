"""What linear models are trained on: prepared columns, targets in a unit of their own, and losses of both.

**Columns.** A numeric column's missing values become its median. A categorical column becomes a column per category, 1
in its rows and 0 elsewhere; a missing or unknown category is 0 in all of them. Every column then loses its mean and is
divided by its standard deviation, or by a tenth of its farthest value where that is more: no value of the training rows
is then above 10, and none has to be cut off. A constant column becomes 0, so that its weight stays 0. All numbers are
those of the training rows, which the owner keeps to itself.

**Losses.** Labels y are -1 or +1, or numbers; u = w^T x are the rows' margins. With the residuals d of a `Loss` the
gradient of the mean loss is X^T d / n; with its curvatures h, computed from `X @ s`, the Hessian's product with s is
X^T h / n. The Taylor loss is the logistic loss to second order, after Yang et al. 2019 (arXiv 1912.00513), equations 4
to 8, with signs and factors corrected, see docs/logistic.md.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.errors import DataError, warn_user
from treaty.machine.arrays import Flags, Floats

# Value of a training row; with more, single rows of Give Me Some Credit make training diverge
LARGEST = 10.0
COLUMN_FRACTION = 24


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a table's features become columns of a linear model."""

    n_categories: tuple[int | None, ...]  # of each feature; None for a numeric one
    median: Floats  # (n_features,) replaces missing values; 0 for categorical features
    mean: Floats  # (n_columns,) of the columns, in the features' order
    scale: Floats  # (n_columns,) standard deviation, more where values are far from the mean; 0 for a constant column
    first: int = 0  # number of the first category with a column: 1 where the one before it is the reference

    @property
    def n_columns(self) -> int:
        """Columns that enter the model."""
        return sum(1 if n is None else max(0, n - self.first) for n in self.n_categories)

    @property
    def at_zero(self) -> Floats:
        """Prepared values (n_columns,) of a row that is 0 in all original columns, but for constant columns."""
        return -np.divide(self.mean, self.scale, out=np.zeros_like(self.mean), where=self.scale > 0.0)

    def matrix(self, features: Sequence[NDArray[Any]], n_rows: int) -> Floats:
        """Return the prepared columns (n_rows, n_columns) of features as a `Table` has them."""
        columns = _spread(features, self.n_categories, self.median, n_rows, self.first)
        columns -= self.mean
        columns *= np.divide(1.0, self.scale, out=np.zeros_like(self.scale), where=self.scale > 0.0)
        # between parties columns are integers in this unit: were they not rounded here, too, weights would differ from
        # a pooled training's, the more the closer columns are to linear dependence
        return np.rint(columns * 2.0**COLUMN_FRACTION) * 2.0**-COLUMN_FRACTION

    def names(self, features: Sequence[str], categories: Sequence[Sequence[object] | None]) -> list[str]:
        """Return the columns' names: the feature's, or "feature=category"."""
        return [
            name if values is None else f"{name}={value}"
            for name, values in zip(features, categories, strict=True)
            for value in ((None,) if values is None else values[self.first :])
        ]


def prepare(
    features: Sequence[NDArray[Any]],
    n_categories: Sequence[int | None],
    n_rows: int,
    largest: float = LARGEST,
    weight: Floats | None = None,
    first: int = 0,
    centred: bool = True,
) -> Preparation:
    """Learn from the training rows how to prepare columns; `n_categories` has None for numeric features.

    No value is further from the mean than `largest` times the scale. A row counts as often as it weighs. Columns that
    are not `centred` keep their zero, so that no part of their owner's is in the intercept.
    """
    known = tuple(n_categories)
    median = np.zeros(len(features))
    for feature, (values, n) in enumerate(zip(features, known, strict=True)):
        present = values[~np.isnan(values)]
        if n is None and len(present):
            of_present = None if weight is None else weight[~np.isnan(values)]
            median[feature] = _median(present.astype(np.float64), of_present)
    columns = _spread(features, known, median, n_rows, first)
    if weight is None:
        mean, scale = columns.mean(axis=0), columns.std(axis=0)
    else:
        mean = np.average(columns, axis=0, weights=weight)
        scale = np.sqrt(np.average((columns - mean) ** 2, axis=0, weights=weight))
    if not centred:
        mean = np.zeros_like(mean)
    if n_rows:
        # the computed standard deviation of a constant column need not be 0
        constant = np.ptp(columns, axis=0) == 0.0
        mean, scale = np.where(constant, columns[0], mean), np.where(constant, 0.0, scale)
        counted = columns if weight is None else columns[weight > 0.0]
        farthest = np.maximum(counted.max(axis=0) - mean, mean - counted.min(axis=0))
        scale = np.where(scale > 0.0, np.maximum(scale, farthest / largest), 0.0)
    return Preparation(known, median, mean, scale, first)


def _median(values: Floats, weight: Floats | None) -> float:
    if weight is None or not weight.any():
        return float(np.median(values))
    order = np.argsort(values)
    up_to = np.cumsum(weight[order])
    at = int(np.searchsorted(up_to, up_to[-1] / 2.0))
    beyond = int(np.searchsorted(up_to, up_to[-1] / 2.0, side="right"))
    return float((values[order[at]] + values[order[min(beyond, len(values) - 1)]]) / 2.0)


def _spread(
    features: Sequence[NDArray[Any]], n_categories: Sequence[int | None], median: Floats, n_rows: int, first: int
) -> Floats:
    """Return columns without missing values, a categorical feature as one per category from `first` on."""
    columns: list[Floats] = []
    for values, n, middle in zip(features, n_categories, median, strict=True):
        if n is None:
            columns.append(np.where(np.isnan(values), middle, values.astype(np.float64)))
        else:
            columns.extend((values == code).astype(np.float64) for code in range(first, n))
    return np.stack(columns, axis=1) if columns else np.empty((n_rows, 0))


# Eigenvalues below this share of the largest count as 0: columns that depend on the others linearly
DEPENDENT = 1e-9


def uncorrelated(hessian: Floats) -> Floats:
    """Return T (n_columns, rank) with T^T F T = I for a Hessian F (n_columns, n_columns); constant columns: rows of 0.

    In z, where w = T z, gradient steps do not depend on how one party's columns are scaled or correlated. Correlations
    between parties are left: of two parties' Hessian all eigenvalues then lie between 0 and 2.
    """
    if not len(hessian):
        return np.zeros((0, 0))
    values, vectors = np.linalg.eigh(hessian)
    spanned = values > DEPENDENT * max(float(values[-1]), 0.0)
    local: Floats = vectors[:, spanned] / np.sqrt(values[spanned])
    # these rows are 0 but for rounding
    local[np.diag(hessian) == 0.0] = 0.0
    return local


TOO_FEW_ROWS = "standard errors need more rows than columns, got {rows} rows and {columns} columns"

# Curvatures below this share of the largest, of a loss along columns that do vary, leave weights undetermined
FLAT = 1e-9


def determined(columns: Floats, hessian: Floats) -> tuple[Floats, Flags, int]:
    """Return T with T^T F T = I for the Hessian F at an optimum, which weights it determines, and the columns' rank."""
    # columns (n_rows, n_columns) alone decide which of them depend on each other
    spanned = uncorrelated(columns.T @ columns / len(columns))
    values, vectors = np.linalg.eigh(spanned.T @ hessian @ spanned)
    # the loss is flat along independent columns, too, where classes or counts are separable: the optimum is infinitely
    # far away
    flat = values <= FLAT * max(float(values[-1]), 0.0) if len(values) else np.zeros(0, bool)
    local: Floats = spanned @ (vectors[:, ~flat] / np.sqrt(values[~flat]))
    along = np.abs(spanned @ vectors[:, flat]).max(axis=1, initial=0.0)
    moves = along > 1e-6 * np.abs(spanned).max(axis=1, initial=0.0)
    return local, np.any(spanned, axis=1) & ~moves, spanned.shape[1]


def with_sums(T: Floats, known: Flags, sums: Floats) -> tuple[Floats, Flags]:
    """Append weighted sums of weights (n_sums, n_columns) to the rows of T, and whether their weights are known."""
    # a sum is known if every weight in it is
    return np.vstack([T, sums @ T]), np.append(known, ~np.any((sums != 0.0) & ~known, axis=1))


def random_rotation(size: int) -> Floats:
    """Return a uniformly random orthogonal matrix (size, size), from the system's generator."""
    system = secrets.SystemRandom()
    q, r = np.linalg.qr(np.array([system.gauss() for _ in range(size * size)]).reshape(size, size))
    rotation: Floats = q * np.sign(np.diag(r))
    return rotation


# Beyond |u| = 4 the Taylor loss rises where the logistic loss still falls or has flattened out
TAYLOR_RANGE = 4.0
TAYLOR_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of rows; all functions take and return float64 (n_rows,)."""

    name: str  # "taylor", "logistic", "squared" or "poisson"
    values: Callable[[Floats, Floats], Floats]  # of u, y
    residuals: Callable[[Floats, Floats], Floats]  # of u, y: d, the derivative with respect to u
    curvatures: Callable[[Floats, Floats], Floats]  # of u, X @ s: h, the second derivative times the row's x^T s
    least: float | None = None  # of a quadratic loss: its values are this and half a squared residual of y


def _poisson_values(u: Floats, y: Floats) -> Floats:
    """Return half the deviance of each row."""
    from scipy.special import xlogy  # type: ignore[import-untyped]  # late: takes 0.15 s

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
    curvatures=lambda u, x_s: probabilities(u) * (1.0 - probabilities(u)) * x_s,
)
SQUARED = Loss(
    "squared",
    values=lambda u, y: 0.5 * (u - y) ** 2,
    residuals=lambda u, y: u - y,
    curvatures=lambda u, x_s: x_s,
    least=0.0,
)
POISSON = Loss(
    "poisson", values=_poisson_values, residuals=lambda u, y: np.exp(u) - y, curvatures=lambda u, x_s: np.exp(u) * x_s
)


def probabilities(u: Floats) -> Floats:
    """Return 1 / (1 + exp(-u)) (n_rows,), without overflow."""
    return np.exp(-np.logaddexp(0.0, -u))


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
    warning = beyond_taylor(u)
    if warning is not None:
        warn_user(warning)


# Margins whose deviation is a smaller share of their size differ by rounding alone: all get the labels' rate
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Calibration:
    """The log-odds of a row with margin u are `slope` u + `offset`."""

    slope: float
    offset: float

    def log_odds(self, margins: Floats) -> Floats:
        """Return log-odds of the second class, of the margins' shape."""
        return self.slope * margins + self.offset

    def margins(self, log_odds: Floats) -> Floats:
        """Return the margins that have these log-odds."""
        return (log_odds - self.offset) / self.slope if self.slope else np.zeros_like(log_odds)


def fit_calibration(margins: Floats, y: Floats, weight: Floats | None = None) -> Calibration:
    """Fit Platt's two numbers to margins (n_rows,), labels y of 0 or 1, and weights of rows, by the logistic loss.

    The Taylor loss is a least-squares loss: its margins rank rows well, but 1 / (1 + exp(-u)) is too near 1/2, so that
    its mean is not the rate of the labels. Whole weights count rows, others are scaled to mean 1. After Platt,
    "Probabilistic Outputs for Support Vector Machines", 1999.
    """
    from sklearn.linear_model import LogisticRegression  # late: only a party with labels needs it, once

    weight = np.ones(len(y)) if weight is None else weight
    if np.any(weight != np.rint(weight)):
        weight = weight / weight.mean()
    positive, negative = float(weight @ y), float(weight @ (1.0 - y))
    # smoothed targets keep both numbers finite where the classes are separable
    targets = np.where(y > 0.5, (positive + 1.0) / (positive + 2.0), 1.0 / (negative + 2.0))
    centre = float(np.average(margins, weights=weight))
    spread = math.sqrt(float(np.average((margins - centre) ** 2, weights=weight)))
    if spread <= SAME * max(1.0, abs(centre)):
        margins, spread = np.full_like(margins, centre), 1.0
    scores = ((margins - centre) / spread)[:, np.newaxis]
    # every row counts once in either class, weighted by its target
    fitted = LogisticRegression(C=np.inf, tol=1e-9, max_iter=1000).fit(
        np.vstack([scores, scores]),
        np.repeat([1, 0], len(y)),
        sample_weight=np.concatenate([weight * targets, weight * (1.0 - targets)]),
    )
    slope = float(fitted.coef_[0, 0]) / spread
    return Calibration(slope, float(fitted.intercept_[0]) - slope * centre)


# In standard deviations; a target with rows further out has a larger unit
LARGEST_TARGET = 512.0

LEAST_SPREAD = 1e-12


@dataclass(frozen=True, slots=True)
class Target:
    """Labels in units in which all losses are alike: a margin of original labels is `shift` + `unit` times one here.

    The covariance of weights is `variance` times the inverse Hessian, unless that is estimated from the residuals.
    """

    loss: Loss
    labels: Floats
    shift: float = 0.0
    unit: float = 1.0
    variance: float = 1.0


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
