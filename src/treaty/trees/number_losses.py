"""Losses of numbers: squared error, Poisson, Tweedie, gamma, pseudo-Huber, quantile, as in XGBoost.

XGBoost leaves derivatives without a bound. Sums of fixed-point integers need one, so every loss here has its own:
predicted means (Poisson, Tweedie, gamma) or gradients (squared error) are clipped at a power of two above what the
labels call for, and the rows that this changed are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from msgspec.structs import replace

from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import Floats, Integers
from treaty.trees.losses import FixedPointLoss, power_of_two

# steps of the fixed point that the hessian of a row at `base_score` must have: its rounding is then within 3 %
_LEAST_STEPS = 16
_FINE_BITS = 60
# of Tweedie's terms: predictions may fall to base_score / 16 (at a power of 1.5) before one is clipped
_ROOM = 4.0


STEPS_REACH = 16  # how many times `grad_clip` a gradient of whole steps may be


class SquaredError(FixedPointLoss, frozen=True, tag="squared_error"):
    """Half the squared error: grad = margin - y, clipped; hess = 1. The metric is its root mean square."""

    metric: ClassVar[str] = "rmse"
    xgboost_name: ClassVar[str] = "reg:squarederror"

    def clip_of(self, y: Floats) -> float:
        return power_of_two(2.0 * float(np.max(np.abs(y - self.base_score), initial=0.0)))

    @property
    def label_ends(self) -> tuple[float, float]:
        return self.base_score - self.grad_clip / 2.0, self.base_score + self.grad_clip / 2.0

    def bounded_from(self, y: Floats, margins: Floats) -> Self:
        return self.bounded(self.base_score + y - margins[:, 0])

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        return float(np.sqrt(np.average((margins[:, 0] - y) ** 2, weights=weight)))

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        g = margins[:, 0] - y
        clipped = int((np.abs(g) > self.grad_clip).sum())
        grad[0] = np.rint(np.clip(g, -self.grad_clip, self.grad_clip) / self.grad_clip * scales)
        hess[0] = np.rint(scales)
        return clipped


def squares_shift(n_rows: int) -> int:
    """Return how many of the lowest bits of so many rows' squared errors together do not count, in squared units.

    A row half a `grad_clip` off, farther than any label of the training is from the start, adds 8 at most.
    """
    return 19 + max(0, n_rows.bit_length() - 13)


class SquaredErrorSteps(SquaredError, frozen=True, tag="squared_error_steps"):
    """Half the squared error by whole numbers alone, which a protocol on secret shares can compute.

    The start and leaf values are whole multiples of 2^-12 of `grad_clip`, margins less the start and labels less it are
    rounded, and gradients are clipped at `STEPS_REACH` times the bound of `SquaredError`, so that none are in fact.
    Squared errors of rows without weights are rounded down together (`squares_shift`), so that a protocol opens no
    more of them; labels farther from the start than those of the training may be count as the farthest.
    """

    # XGBoost has no such loss
    xgboost_name: ClassVar[str] = "squared_error_steps"
    leaf_unit: ClassVar[float] = 2.0**-12

    @property
    def margin_unit(self) -> float:
        return self.leaf_unit * self.grad_clip

    @property
    def base_margins(self) -> Floats:
        return np.asarray(np.rint(super().base_margins / self.margin_unit) * self.margin_unit)

    @property
    def grad_bound(self) -> int:
        return STEPS_REACH * super().grad_bound

    def in_units(self, numbers: Floats, most: float) -> Integers:
        """Return numbers less the start, up to `most` times `grad_clip`, in units of leaf values."""
        units = np.rint((numbers - self.base_margins[0]) / self.margin_unit)
        return np.asarray(np.clip(units, -most / self.leaf_unit, most / self.leaf_unit).astype(np.int64))

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        if weight is not None:
            return super().loss(margins, y, weight)
        off = self.in_units(margins[:, 0], STEPS_REACH) - self.in_units(y, 0.5)
        return self.loss_of(int(off @ off) >> squares_shift(len(y)), len(y))

    def loss_of(self, units: int, n_rows: int) -> float:
        """Return the loss of rows that count once each, by the squares of all together, rounded down."""
        return math.sqrt((units << squares_shift(n_rows)) / n_rows) * self.margin_unit

    @property
    def most_loss(self) -> float:
        """What the loss of rows is below."""
        return 2.0 * STEPS_REACH * self.grad_clip

    def in_steps(self, numbers: Floats) -> Floats:
        """Return margins or labels less the start, in units of gradients."""
        return np.asarray(np.rint((numbers - self.base_margins[0]) / self.grad_clip * 2.0**self.fractional_bits))

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        g, most = self.in_steps(margins[:, 0]) - self.in_steps(y), STEPS_REACH * 2.0**self.fractional_bits
        grad[0] = np.rint(np.clip(g, -most, most) * (scales * 2.0**-self.fractional_bits))
        hess[0] = np.rint(scales)
        return int((np.abs(g) > most).sum())


class MeanByLogarithm(FixedPointLoss, frozen=True):
    """What losses with the link log(mean) = margin share: labels, means and hessians have one bound, `grad_clip`."""

    hess_has_clip: ClassVar[bool] = True
    # whether labels must be above 0
    positive: ClassVar[bool] = False

    @classmethod
    def check_labels(cls, y: Floats, whose: str) -> None:
        n_wrong = int(np.count_nonzero(y <= 0.0 if cls.positive else y < 0.0))
        if n_wrong:
            name, expected = cls.__struct_config__.tag, "labels above 0" if cls.positive else "no label below 0"
            raise DataError(f"{whose}: expected {expected} for objective={name!r}, got {n_wrong} of {len(y)}")

    def check(self) -> None:
        super().check()
        if self.base_score <= 0.0:
            raise ConfigError(
                f"expected base_score above 0, a mean, for objective={self.__struct_config__.tag!r}, got "
                f"{self.base_score}"
            )

    def start_of(self, totals: Sequence[int], label_unit: float) -> tuple[float, ...]:
        (mean,) = super().start_of(totals, label_unit)
        # where all labels are 0, what XGBoost starts from without an estimate
        return (mean if mean > 0.0 else self.base_score,)

    def bounded(self, y: Floats) -> Self:
        loss = super().bounded(y)
        # steps that fit the largest labels must not be too coarse for `base_score`; hessians must fit 62 bits
        fine_bits = _FINE_BITS - max(0, math.ceil(math.log2(loss.largest_hess)))
        fine = replace(loss, fractional_bits=fine_bits, weight_bound=1.0)
        label = np.full(1, self.base_score if self.positive else 0.0)
        _, hess, _ = fine.gradients(np.full((1, 1), self.base_margins), label, None)
        lacking = math.ceil(fine_bits - self.fractional_bits + math.log2(_LEAST_STEPS / max(int(hess[0, 0]), 1)))
        if lacking > 0:
            raise ConfigError(
                f"labels are so far above base_score={self.base_score:g} that fractional_bits={self.fractional_bits} "
                f"is too coarse for it: set base_score near the mean of the labels, or fractional_bits to at least "
                f"{self.fractional_bits + lacking}",
                public="its labels need a base_score nearer to their mean, or more fractional_bits; it has the details",
            )
        return loss

    def bounded_from(self, y: Floats, margins: Floats) -> Self:
        # the largest mean counts like a label, and the smallest is what steps must not be too coarse for
        means = self.predictions(margins[:, 0])
        loss = replace(self, base_score=max(float(means.min()), math.ulp(0.0))).bounded(np.maximum(y, means))
        return replace(loss, base_score=self.base_score)

    @property
    def base_margins(self) -> Floats:
        return np.array([math.log(self.base_score)])

    def predictions(self, margins: Floats) -> Floats:
        with np.errstate(over="ignore"):
            means: Floats = np.exp(margins)
        return means


class Poisson(MeanByLogarithm, frozen=True, tag="poisson"):
    """Poisson loss of counts, mean mu = exp(margin): grad = mu - y, hess = mu exp(max_delta_step), mu clipped.

    The metric is the mean Poisson deviance.
    """

    max_delta_step: float = 0.7
    metric: ClassVar[str] = "poisson-deviance"
    xgboost_name: ClassVar[str] = "count:poisson"
    delta_step: ClassVar[float] = 0.7

    def clip_of(self, y: Floats) -> float:
        return power_of_two(2.0 * max(self.base_score, float(y.max(initial=0.0))))

    @property
    def label_ends(self) -> tuple[float, float]:
        return 0.0, self.grad_clip / 2.0

    @property
    def largest_hess(self) -> float:
        return math.exp(self.max_delta_step)

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        m = margins[:, 0]
        return 2.0 * (self.predictions(m) - y + y * (np.log(np.where(y > 0.0, y, 1.0)) - m))

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        mean = self.predictions(margins[:, 0])
        clipped = int((mean > self.grad_clip).sum())
        mean = np.minimum(mean, self.grad_clip)
        grad[0] = np.rint((mean - np.minimum(y, self.grad_clip)) / self.grad_clip * scales)
        hess[0] = np.rint(mean / self.grad_clip * self.largest_hess * scales)
        return clipped


class _OfVariance(MeanByLogarithm, frozen=True):
    """What losses share whose variance is a `power` p of the mean mu = exp(margin), its square unless one has another.

    With a = y mu^(1 - p) and b = mu^(2 - p), each clipped: grad = b - a and hess = (2 - p) b + (p - 1) a.
    """

    hess_tells_labels: ClassVar[bool] = True

    @property
    def power(self) -> float:
        return 2.0

    def clip_of(self, y: Floats) -> float:
        p, most = self.power, max(self.base_score, float(y.max(initial=0.0)))
        return power_of_two(_ROOM * max(most ** (2.0 - p), most * self.base_score ** (1.0 - p)))

    @property
    def label_ends(self) -> tuple[float, float]:
        return 0.0, self.grad_clip / _ROOM * self.base_score ** (self.power - 1.0)

    def _terms(self, m: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return a and b of rows (n_rows,)."""
        p = self.power
        with np.errstate(over="ignore", invalid="ignore"):
            a = np.where(y > 0.0, y * np.exp((1.0 - p) * m), 0.0)
            return a, np.exp((2.0 - p) * m)

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        p, clip = self.power, self.grad_clip
        a, b = self._terms(margins[:, 0], y)
        clipped = int(((a > clip) | (b > clip)).sum())
        a, b = np.minimum(a, clip) / clip, np.minimum(b, clip) / clip
        grad[0] = np.rint((b - a) * scales)
        hess[0] = np.rint(np.minimum((2.0 - p) * b + (p - 1.0) * a, 1.0) * scales)
        return clipped


class Tweedie(_OfVariance, frozen=True, tag="tweedie"):
    """Tweedie loss of variance power between 1 and 2; the metric is the mean Tweedie deviance."""

    tweedie_variance_power: float = 1.5
    metric: ClassVar[str] = "tweedie-deviance"
    xgboost_name: ClassVar[str] = "reg:tweedie"

    @property
    def power(self) -> float:
        return self.tweedie_variance_power

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        p, (a, b) = self.power, self._terms(margins[:, 0], y)
        return 2.0 * (y ** (2.0 - p) / ((1.0 - p) * (2.0 - p)) - a / (1.0 - p) + b / (2.0 - p))


class Gamma(_OfVariance, frozen=True, tag="gamma"):
    """Gamma loss of labels above 0: grad = 1 - y / mu and hess = y / mu; the metric is the mean gamma deviance."""

    metric: ClassVar[str] = "gamma-deviance"
    xgboost_name: ClassVar[str] = "reg:gamma"
    positive: ClassVar[bool] = True

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        ratio, _ = self._terms(margins[:, 0], y)
        return 2.0 * (ratio - 1.0 - np.log(ratio))


class PseudoHuber(FixedPointLoss, frozen=True, tag="huber"):
    """Pseudo-Huber loss of slope d: with z = margin - y and r = sqrt(1 + (z / d)^2), grad = z / r and hess = 1 / r^3.

    The gradient's bound is d for any labels. The metric is the mean of d^2 (r - 1).
    """

    huber_slope: float = 1.0
    metric: ClassVar[str] = "mphe"
    xgboost_name: ClassVar[str] = "reg:pseudohubererror"
    hess_tells_labels: ClassVar[bool] = True

    def estimated_start(self, y: Floats, weight: Floats | None) -> tuple[float, ...]:
        # the median: XGBoost's Newton step from 0 lands far outside labels far from 0
        return Quantile().estimated_start(y, weight)

    def clip_of(self, y: Floats) -> float:
        return power_of_two(self.huber_slope)

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        return self.huber_slope**2 * (np.hypot(1.0, (margins[:, 0] - y) / self.huber_slope) - 1.0)

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        z = (margins[:, 0] - y) / self.huber_slope
        root = np.hypot(1.0, z)
        grad[0] = np.rint(np.clip(z / root, -1.0, 1.0) * (self.huber_slope / self.grad_clip) * scales)
        with np.errstate(over="ignore"):
            hess[0] = np.rint(scales / root**3)
        return 0


class Quantile(FixedPointLoss, frozen=True, tag="quantile"):
    """Pinball loss of the quantile alpha: grad = 1 - alpha from y on and -alpha below it, hess = 1.

    Leaves get the alpha-quantile of their rows' residuals, as in XGBoost. The metric is the mean pinball loss.
    """

    quantile_alpha: float = 0.5
    metric: ClassVar[str] = "quantile"
    xgboost_name: ClassVar[str] = "reg:quantileerror"
    refreshes_leaves: ClassVar[bool] = True

    def estimated_start(self, y: Floats, weight: Floats | None) -> tuple[float, ...]:
        return (float(self.leaf_values(y, weight, np.array([0, len(y)]))[0]),)

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        above = y - margins[:, 0]
        return np.maximum(self.quantile_alpha * above, (self.quantile_alpha - 1.0) * above)

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        alpha = self.quantile_alpha
        grad[0] = np.rint(np.where(margins[:, 0] >= y, 1.0 - alpha, -alpha) * scales)
        hess[0] = np.rint(scales)
        return 0

    def leaf_values(self, residuals: Floats, weight: Floats | None, starts: Integers) -> Floats:
        """Return the quantile of each leaf, interpolated; with weights, the least residual that reaches their share."""
        counts = np.diff(starts)
        order = np.lexsort((residuals, np.repeat(np.arange(len(counts)), counts)))
        ascending = residuals[order]
        if weight is not None:
            up_to = np.cumsum(weight[order])
            before = np.concatenate([[0.0], up_to])[starts]
            wanted = before[:-1] + self.quantile_alpha * np.diff(before)
            found = np.searchsorted(up_to, wanted)
            values: Floats = ascending[np.clip(found, starts[:-1], starts[1:] - 1)]
            return values
        place = self.quantile_alpha * (counts + 1.0) - 1.0
        below = np.clip(np.floor(place), 0, counts - 1).astype(np.int64)
        share = np.clip(place - below, 0.0, 1.0)
        low = ascending[starts[:-1] + below]
        high = ascending[starts[:-1] + np.minimum(below + 1, counts - 1)]
        between: Floats = low + share * (high - low)
        return between
