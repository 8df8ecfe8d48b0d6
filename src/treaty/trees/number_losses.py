"""Losses of numbers: squared error, Poisson, Tweedie, gamma, pseudo-Huber, quantile, as in XGBoost; and the user's own.

XGBoost leaves derivatives without a bound. Sums of fixed-point integers need one, so every loss here has its own:
predicted means (Poisson, Tweedie, gamma) or gradients (squared error) are clipped at a power of two above what the
labels call for, and the rows that this changed are counted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from msgspec.structs import replace

from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import Floats, Integers
from treaty.machine.process import imported
from treaty.trees.losses import FixedPointLoss, power_of_two

# steps of the fixed point that the hessian of a row at `base_score` must have: its rounding is then within 3 %
_LEAST_STEPS = 16
_FINE_BITS = 60
Link = Literal["identity", "log", "logistic"]
# of Tweedie's terms: predictions may fall to base_score / 16 (at a power of 1.5) before one is clipped
_ROOM = 4.0


class SquaredError(FixedPointLoss, frozen=True, tag="squared_error"):
    """Half the squared error: grad = margin - y, clipped; hess = 1. The metric is its root mean square."""

    metric: ClassVar[str] = "rmse"
    xgboost_name: ClassVar[str] = "reg:squarederror"

    def clip_of(self, y: Floats) -> float:
        return power_of_two(2.0 * float(np.max(np.abs(y - self.base_score), initial=0.0)))

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
    """What losses share whose variance is a `power` p of the mean mu = exp(margin).

    With a = y mu^(1 - p) and b = mu^(2 - p), each clipped: grad = b - a and hess = (2 - p) b + (p - 1) a.
    """

    hess_tells_labels: ClassVar[bool] = True

    @property
    def power(self) -> float:
        raise NotImplementedError

    def clip_of(self, y: Floats) -> float:
        p, most = self.power, max(self.base_score, float(y.max(initial=0.0)))
        return power_of_two(_ROOM * max(most ** (2.0 - p), most * self.base_score ** (1.0 - p)))

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

    @property
    def power(self) -> float:
        return 2.0

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


class CustomLoss(ABC):
    """Base of the classes that `objective` may name; they are made without arguments, at parties with labels alone.

    Methods are given copies, which they may change.

    Attributes
    ----------
    link : {"identity", "log", "logistic"}
        How predictions follow from margins: as they are, exp(margin), or 1 / (1 + exp(-margin)).
    """

    link: Link

    @abstractmethod
    def bounds(self, y: Floats) -> tuple[float, float]:
        """Return the largest absolute gradient and the largest hessian of a row of weight 1, both above 0.

        What `gradients` returns beyond is clipped, and the rows are counted.

        Parameters
        ----------
        y : float64 (n_rows,)
            The training labels; where rows are split, those of one participant, and the largest bounds among all count.
        """

    @abstractmethod
    def gradients(self, margins: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return first and second derivatives of the loss with respect to the margin, float64 (n_rows,) both.

        Hessians must not be negative. Sample weights are multiplied in afterwards. The result must depend on each row's
        own margin and label alone, as rows come in blocks.

        Parameters
        ----------
        margins, y : float64 (n_rows,)
            Of some of the rows.
        """

    @abstractmethod
    def loss(self, margins: Floats, y: Floats) -> Floats:
        """Return each row's loss, float64 (n_rows,), whose weighted mean eval sets show.

        Parameters
        ----------
        margins, y : float64 (n_rows,)
        """


class Custom(FixedPointLoss, frozen=True, tag="custom"):
    """A `CustomLoss` under its name, ``package.module:CLASS``; predicting needs no more than its link."""

    objective: str = ""
    link: Link = "identity"
    hess_scale: float = 1.0
    metric: ClassVar[str] = "custom"
    xgboost_name: ClassVar[str] = ""
    hess_tells_labels: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        b = self.base_score
        if (self.link == "log" and b <= 0.0) or (self.link == "logistic" and not 0.0 < b < 1.0):
            raise ConfigError(f"expected a base_score that the link {self.link!r} of {self.objective} gives, got {b}")

    def start_of(self, totals: Sequence[int], label_unit: float) -> tuple[float, ...]:
        (mean,) = super().start_of(totals, label_unit)
        given = self.link == "identity" or (mean > 0.0 if self.link == "log" else 0.0 < mean < 1.0)
        return (mean if given else self.base_score,)

    def bounded(self, y: Floats) -> Self:
        # without labels, as at a server, there are no bounds yet
        if not len(y):
            return self
        found = _ask(self.objective, "bounds", y)
        bounds = _numbers(found, (2,))
        if bounds is None or not np.all(bounds > 0.0):
            raise ConfigError(f"expected {self.objective}.bounds to return two numbers above 0, got {found!r}")
        grad_bound, hess_bound = map(power_of_two, bounds.tolist())
        return replace(self, grad_clip=grad_bound, hess_scale=hess_bound)

    @property
    def clips(self) -> tuple[float, ...]:
        return self.grad_clip, self.hess_scale

    def agreed(self, clips: Sequence[float], weight_bound: float) -> Self:
        return replace(super().agreed(clips, weight_bound), hess_scale=clips[1])

    @property
    def hess_clip(self) -> float:
        return self.hess_scale

    @property
    def base_margins(self) -> Floats:
        b = self.base_score
        if self.link == "identity":
            return np.array([b])
        return np.array([math.log(b) if self.link == "log" else math.log(b / (1.0 - b))])

    def predictions(self, margins: Floats) -> Floats:
        with np.errstate(over="ignore"):
            if self.link == "identity":
                return margins
            return np.asarray(np.exp(margins) if self.link == "log" else 1.0 / (1.0 + np.exp(-margins)))

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        """Return what the class's `loss` gives; raise ConfigError unless it is a finite number of each row."""
        found = _ask(self.objective, "loss", margins[:, 0], y)
        each = _numbers(found, y.shape)
        if each is None:
            raise ConfigError(
                f"expected {self.objective}.loss to return an array of {len(y)} finite numbers, got {_form(found)}"
            )
        return each

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        found = _ask(self.objective, "gradients", margins[:, 0], y)
        several = isinstance(found, tuple | list) or getattr(found, "ndim", 0) > 0
        parts = list(found) if several and len(found) == 2 else [found]
        values = [part for part in (_numbers(part, y.shape) for part in parts) if part is not None]
        if len(values) != 2:
            raise ConfigError(
                f"expected {self.objective}.gradients to return two arrays of {len(y)} finite numbers, got "
                f"{', '.join(map(_form, parts))}"
            )
        g, h = values[0] / self.grad_clip, values[1] / self.hess_scale
        if np.any(h < 0.0):
            raise ConfigError(f"expected no hessian below 0 of {self.objective}.gradients, got {np.sum(h < 0.0)}")
        grad[0], hess[0] = np.rint(np.clip(g, -1.0, 1.0) * scales), np.rint(np.minimum(h, 1.0) * scales)
        return int(np.count_nonzero((np.abs(g) > 1.0) | (h > 1.0)))


def loss_at(name: str) -> CustomLoss:
    """Return an instance of the class called ``package.module:CLASS``; raise ConfigError if there is none that fits."""
    # only trusted names are imported (`treaty.machine.process`), and only subclasses of `CustomLoss` are called
    try:
        kind = imported(name, "the loss")
        if not (isinstance(kind, type) and issubclass(kind, CustomLoss)):
            raise TypeError("it is no subclass of treaty.CustomLoss")
        loss = kind()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"cannot make the loss {name!r}: {error}; expected package.module:CLASS, a class at the top of a module "
            "that every party with labels can import"
        ) from None
    if getattr(loss, "link", None) not in get_args(Link):
        raise ConfigError(
            f"expected {name!r} to have a link of {', '.join(get_args(Link))}, got {getattr(loss, 'link', None)!r}"
        )
    return loss


def _ask(objective: str, method: str, *arrays: Floats) -> Any:
    """Return what a method of the class returns for copies of arrays, as it may work in place."""
    asked = getattr(loss_at(objective), method)
    try:
        return asked(*(np.array(values) for values in arrays))
    except Exception as error:
        raise ConfigError(f"{objective}.{method} raised {type(error).__name__}: {error}") from error


def _numbers(found: Any, shape: tuple[int, ...]) -> Floats | None:
    """Return what a method gave as float64 of this shape; None for anything else, or numbers that are not finite."""
    try:
        values = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        return None
    return values if values.shape == shape and np.isfinite(values).all() else None


def _form(found: Any) -> str:
    """Describe what a method gave: its type and shape, and how many of its numbers are not finite."""
    kind = type(found).__name__
    try:
        values = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        return kind
    odd = int(np.count_nonzero(~np.isfinite(values)))
    return f"{kind} {values.shape}" + (f" with {odd} not finite" if odd else "")
