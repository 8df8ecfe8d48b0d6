"""What all losses share (derivatives in fixed point, base score, link), and the losses of classes.

`number_losses`, `ranking_losses`, `custom_losses` and `logistic_pieces` have the others, `objectives` the table of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import msgspec
import numpy as np
from msgspec.structs import replace

from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Integers
from treaty.machine.kernels import kernel
from treaty.machine.shared_work import share

# rows whose intermediate values stay in the cache
BLOCK = 1 << 14
# the least share of a class, so that its log-odds are finite; XGBoost's
_LEAST_SHARE = 1e-6
# bits of a row's part in the sums that decide where training starts: a float32 has 24
_TALLY_BITS = 40
# below it labels are coin tosses, and debiasing them only costs bits of the fixed point
LEAST_EPSILON = 2.0**-20

Takes = Literal["classes", "numbers", "groups"]
"""What labels are: class numbers, numbers, or relevance with a group (of a ranking)."""

# Limit of a leaf weight of log-odds, before the learning rate. Where p has come near 0 or 1 by mistake, hessians are
# near 0 and -G / (H + reg_lambda) is in the hundreds. One such step raises the loss of a leaf's other rows by as much,
# and no hessian is left to take it back.
LOG_ODDS_LIMIT = 10.0


def power_of_two(size: float) -> float:
    """Return the least power of two at or above a size (1 for 0); raise ConfigError beyond float64."""
    if not size <= 2.0**1023:
        raise ConfigError("labels, or the bounds that follow from them, do not fit float64; scale the labels down")
    return 2.0 ** math.ceil(math.log2(size)) if size > 0.0 else 1.0


def to_float32(number: float) -> float:
    """Round to float32 where the number fits, as XGBoost's boosters keep it."""
    rounded = float(np.float32(number)) if abs(number) < float(np.finfo(np.float32).max) else number
    return rounded if rounded != 0.0 else number


class TallyUnits(NamedTuple):
    """Fixed point of the sums that decide where training starts: units of labels and weights, bits of a row's part."""

    label: float = 1.0
    weight: float = 1.0
    bits: int = 0

    @classmethod
    def of(cls, n_rows: int, label: float, weight: float) -> Self:
        """Return units in which sums over `n_rows` fit 62 bits; powers of two bound labels and weights."""
        return cls(label, weight, min(_TALLY_BITS, 61 - n_rows.bit_length()))


class FixedPointLoss(msgspec.Struct, frozen=True, tag_field="name"):
    """A loss whose derivatives are rounded once to integers.

    `n_outputs` trees grow per round. `base_score` is the prediction that training starts from: a probability for the
    logistic loss, a mean for those with a logarithm as link, a margin for the others. `grad_clip` is a power of two
    that gradients are divided by, and clipped to where nothing else bounds them (1 for classes).
    `weight_bound` is the largest sample weight, rounded up to a power of two; weights below 1 are divided by it, so
    that they keep their fractional bits. With `epsilon`, labels went through randomised response and are debiased
    (Ghazi, Golowich, Kumar, Manurangsi, Zhang, NeurIPS 2021, arXiv 2102.06062); None: labels as they are.
    """

    n_outputs: int = 1
    base_score: float = 0.5
    fractional_bits: int = 16
    grad_clip: float = 1.0
    weight_bound: float = 1.0
    epsilon: float | None = None

    takes: ClassVar[Takes] = "numbers"
    # names of the metric and of the loss, XGBoost's where it has them
    metric: ClassVar[str]
    xgboost_name: ClassVar[str]
    # of the metric
    higher_is_better: ClassVar[bool] = False
    # default of `max_delta_step`; at 0 gains are those of weights without a limit
    delta_step: ClassVar[float] = 0.0
    # the largest leaf weight before the learning rate; gains are without it
    leaf_limit: ClassVar[float] = math.inf
    leaf_unit: ClassVar[float] = 0.0  # leaf values are whole multiples of it times `grad_clip`, unless it is 0
    # `largest_hess`, unless a loss computes it
    hess_limit: ClassVar[float] = 1.0
    # whether hessians, too, are divided by `grad_clip`
    hess_has_clip: ClassVar[bool] = False
    # whether hessians depend on labels, not on margins and weights alone
    hess_tells_labels: ClassVar[bool] = False
    # whether `leaf_values` replace -G / (H + reg_lambda)
    refreshes_leaves: ClassVar[bool] = False

    @classmethod
    def check_labels(cls, y: Floats, whose: str) -> None:
        """Raise DataError, which names whose they are, for labels that this loss cannot take."""

    @classmethod
    def check_weights(cls, y: Floats, weight: Floats) -> None:
        """Raise DataError for sample weights that do not go with these labels."""

    def check(self) -> None:
        """Raise ConfigError for a base score or an epsilon that this loss cannot take."""
        if self.epsilon is not None and self.takes != "classes":
            raise ConfigError("expected classes for mechanism='label_rr', got a regression target")
        if self.epsilon is not None and not LEAST_EPSILON <= self.epsilon < math.inf:
            raise ConfigError(f"expected a finite epsilon of at least {LEAST_EPSILON:.1e}, got {self.epsilon}")

    def estimated_start(self, y: Floats, weight: Floats | None) -> tuple[float, ...]:
        """Return the `start` for labels that are all in one place."""
        units = TallyUnits.of(len(y), self.label_bound(y), bound_of_weights(weight))
        return self.start_of(self.tallies(y, weight, units).tolist(), units.label)

    def label_bound(self, y: Floats) -> float:
        """Return a power of two that no label's absolute value exceeds; of classes 1."""
        return power_of_two(float(np.max(np.abs(y), initial=0.0)))

    def tallies(self, y: Floats, weight: Floats | None, units: TallyUnits) -> Integers:
        """Return what rows add to the sums that `start_of` takes, int64: of weights, and of weighted labels."""
        # each row's part is rounded, so that it does not matter who holds which rows
        each = (np.ones(len(y)) if weight is None else weight) * (2.0**units.bits / units.weight)
        parts = np.rint(each), np.rint(each * (y / units.label))
        return np.array([part.astype(np.int64).sum() for part in parts])

    def start_of(self, totals: Sequence[int], label_unit: float) -> tuple[float, ...]:
        """Return the `start` for the `tallies` of all rows: the mean, unless a loss has another."""
        return (to_float32(label_unit * (totals[1] / totals[0])) if totals[0] > 0 else self.base_score,)

    @property
    def start(self) -> tuple[float, ...]:
        """Where training starts: `base_score`, or a margin of each class."""
        return (self.base_score,)

    def starting(self, start: Sequence[float]) -> Self:
        """Return the loss with this `start`; raise ConfigError unless it has as many finite numbers."""
        if len(start) != len(self.start) or not np.all(np.isfinite(start)):
            raise ConfigError(f"expected {len(self.start)} finite numbers that training starts from, got {start}")
        return replace(self, base_score=start[0])

    def clip_of(self, y: Floats) -> float:
        """Return `grad_clip` for these labels."""
        return 1.0

    def bounded(self, y: Floats) -> Self:
        """Return the loss with its bounds for these labels; raise ConfigError where the fixed point is too coarse."""
        return replace(self, grad_clip=self.clip_of(y))

    def bounded_from(self, y: Floats, margins: Floats) -> Self:
        """Return the loss with its bounds for rows that start from `margins` (n_rows, n_outputs) of their own."""
        return self.bounded(y)

    @property
    def clips(self) -> tuple[float, ...]:
        """The powers of two that follow from labels; several holders of rows agree on the largest."""
        return (self.grad_clip,)

    def agreed(self, clips: Sequence[float], weight_bound: float) -> Self:
        """Return the loss with bounds that hold for all holders' rows."""
        return replace(self, grad_clip=clips[0], weight_bound=weight_bound)

    @property
    def largest_hess(self) -> float:
        """Largest hessian of a row of weight 1, in units of `hess_clip`."""
        return self.hess_limit

    @property
    def hess_clip(self) -> float:
        """What hessians are divided by: a power of two, as `grad_clip` is."""
        return self.grad_clip if self.hess_has_clip else 1.0

    @property
    def base_margins(self) -> Floats:
        """The margins every row starts from, float64 (n_outputs,)."""
        return np.array(self.start)

    def predictions(self, margins: Floats) -> Floats:
        """Return probabilities (of class 1; of every class for softmax), means, or the margins themselves."""
        return margins

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        """Return each row's loss (n_rows,), given margins (n_rows, n_outputs)."""
        raise NotImplementedError

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        """Return the weighted mean loss, which is what `metric` names."""
        return float(np.average(self.row_losses(margins, y), weights=weight))

    def leaf_values(self, residuals: Floats, weight: Floats | None, starts: Integers) -> Floats:
        """Return what each leaf k, with ``residuals[starts[k]:starts[k + 1]]`` (label minus margin), should add."""
        raise NotImplementedError

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        """Write a block's derivatives times `scales` (n_rows,), rounded; return how many rows were clipped."""
        raise NotImplementedError

    def gradients(
        self, margins: Floats, y: Floats, weight: Floats | None, threads: int = 1
    ) -> tuple[Integers, Integers, int]:
        """Return grad and hess, int64 (n_outputs, n_rows), and how many rows' gradients were clipped.

        `margins` is (n_rows, n_outputs); `y` is a number, 0 or 1, or a class number (with `epsilon`, the noisy one).
        """
        n_rows = len(y)
        grad = np.empty((self.n_outputs, n_rows), np.int64)
        hess = np.empty((self.n_outputs, n_rows), np.int64)
        # by block: threads may append at the same time, but not add to one number
        clipped: list[int] = []
        scale = 2.0**self.fractional_bits / self.weight_unit
        # a whole weight multiplies what is rounded, so that a row of weight 2 counts as two rows, to the bit; each row
        # for itself, so that it does not matter who holds which rows
        factors, times = np.ones(0), None
        if weight is not None:
            whole = weight == np.rint(weight)
            factors, times = np.where(whole, 1.0, weight), np.where(whole, weight, 1.0).astype(np.int64)

        def work(first: int, last: int) -> None:
            for start in range(first, last, BLOCK):
                rows = slice(start, min(start + BLOCK, last))
                scales = np.full(rows.stop - start, scale)
                if times is not None:
                    scales *= factors[rows]
                clipped.append(self.write_derivatives(margins[rows], y[rows], scales, grad[:, rows], hess[:, rows]))
                if times is not None:
                    grad[:, rows] *= times[rows]
                    hess[:, rows] *= times[rows]

        share(work, n_rows, threads, least=4 * BLOCK)
        return grad, hess, sum(clipped)

    @property
    def weight_unit(self) -> float:
        """What a sample weight is divided by before rounding."""
        return min(1.0, self.weight_bound)

    @property
    def grad_unit(self) -> float:
        """What one integer step of a gradient is worth."""
        return self.grad_clip * self.weight_unit * 2.0**-self.fractional_bits

    @property
    def hess_unit(self) -> float:
        """What one integer step of a hessian is worth."""
        return self.hess_clip * self.weight_unit * 2.0**-self.fractional_bits

    @property
    def label_ends(self) -> tuple[float, float] | None:
        """The least and the largest label there may be, if grad falls and hess never falls as labels rise; else None.

        They follow from bounds that are public.
        """
        return None

    def ranges(self, margins: Floats, weighted: bool, threads: int = 1) -> tuple[Integers, Integers]:
        """Return the ends of what grad and hess of each row may be, int64 (2, n_outputs, n_rows) both, low ends first.

        They follow from the rows' `margins` (n_rows, n_outputs) and from bounds of labels and weights, not from labels.
        If rows are `weighted`, a weight may be anything from 0 to `weight_bound`.
        """
        n_rows = len(margins)
        if self.label_ends is None:
            shape = np.ones((self.n_outputs, n_rows), np.int64)
            return np.stack([-shape, shape]) * self.grad_bound, np.stack([0 * shape, shape]) * self.hess_bound
        heaviest = np.full(n_rows, self.weight_bound) if weighted else None
        # of two classes the gradients of one label give those of the other
        ends = self.label_ends[:1] if self.takes == "classes" and self.n_outputs == 1 else self.label_ends
        found = [self.gradients(margins, np.full(n_rows, y), heaviest, threads) for y in ends]
        (grad, hess_low, _), (grad_low, hess_high, _) = found[0], found[-1]
        grad_high = np.maximum(grad, grad_low)
        if self.takes == "classes":
            # p of every class, and p less 1: where there are more than two, neither label above is of most classes
            grad_low = grad_high - (1 << self.fractional_bits) * self._most_times
        if weighted:
            grad_low, grad_high, hess_low = np.minimum(grad_low, 0), np.maximum(grad_high, 0), 0 * hess_low
        return np.stack([grad_low, grad_high]), np.stack([hess_low, hess_high])

    @property
    def debiasing(self) -> tuple[float, float]:
        """The s and t for which s 1[noisy label = k] - t is 1[label = k] on average; 1 and 0 without noise.

        A label of K classes is kept with probability p = e^epsilon / (e^epsilon + K - 1) and becomes each other one
        with r = 1 / (e^epsilon + K - 1): s = 1 / (p - r) and t = r / (p - r).
        """
        if self.epsilon is None:
            return 1.0, 0.0
        others = max(self.n_outputs, 2) - 1
        fade, rest = math.exp(-self.epsilon), -math.expm1(-self.epsilon)
        return (1.0 + others * fade) / rest, fade / rest

    @property
    def grad_bound(self) -> int:
        """Largest absolute gradient, as an integer.

        Debiased labels lie in [-t, s - t], so that |g| <= max(1 + t, s - t) = (e^epsilon + K - 2) / (e^epsilon - 1).
        """
        # the same additions as in `write_derivatives`, so that rounding is bounded too
        s, t = self.debiasing
        return math.ceil(max(1.0 + t, s - t) * 2.0**self.fractional_bits) * self._most_times

    @property
    def hess_bound(self) -> int:
        """Largest hessian, as an integer."""
        return math.ceil(self.largest_hess * 2.0**self.fractional_bits) * self._most_times

    @property
    def _most_times(self) -> int:
        """By how much a weight may multiply the largest integer of a row."""
        return math.ceil(self.weight_bound / self.weight_unit)

    def check_sums(self, n_rows: int) -> None:
        """Refuse a job whose sums could leave int64, so that none overflows at run time."""
        if n_rows * max(self.grad_bound, self.hess_bound) >= 2**62:
            noise = "" if self.epsilon is None else f" and labels debiased at epsilon={self.epsilon:g}"
            raise ConfigError(
                f"sums of {n_rows} gradients at fractional_bits={self.fractional_bits} with weights up to "
                f"{self.weight_bound:g}{noise} do not fit 62 bits; lower fractional_bits or scale the weights down"
            )


class _LossOfClasses(FixedPointLoss, frozen=True):
    """What log-losses share: labels are class numbers, and training starts from the classes' weights."""

    takes: ClassVar[Takes] = "classes"
    leaf_limit: ClassVar[float] = LOG_ODDS_LIMIT

    @property
    def label_ends(self) -> tuple[float, float]:
        return 0.0, 1.0

    def label_bound(self, y: Floats) -> float:
        return 1.0

    def tallies(self, y: Floats, weight: Floats | None, units: TallyUnits) -> Integers:
        """Return the sum of the weights of each class's rows."""
        each = (np.ones(len(y)) if weight is None else weight) / units.weight
        rounded = np.rint(each * 2.0**units.bits).astype(np.int64)
        return np.array([rounded[y == k].sum() for k in range(max(2, self.n_outputs))])

    def shares_of(self, totals: Sequence[int]) -> Floats:
        """Return each class's share; of randomised labels what it was before, on average, and at least 0."""
        (s, t), whole = self.debiasing, sum(totals)
        shares = [total / whole if whole > 0 else 1.0 / len(totals) for total in totals]
        return np.maximum(s * np.array(shares) - t, 0.0)


class Logistic(_LossOfClasses, frozen=True, tag="logistic"):
    """Log-loss of two classes: grad = p - y, hess = p (1 - p)."""

    metric: ClassVar[str] = "logloss"
    xgboost_name: ClassVar[str] = "binary:logistic"
    hess_limit: ClassVar[float] = 0.25

    def check(self) -> None:
        super().check()
        if not 0.0 < self.base_score < 1.0:
            raise ConfigError(f"expected base_score between 0 and 1 for a classifier, got {self.base_score}")

    def start_of(self, totals: Sequence[int], label_unit: float) -> tuple[float, ...]:
        each = self.shares_of(totals)[self.n_outputs == 1 :].tolist()  # of two classes the second's
        return tuple(to_float32(min(max(share, _LEAST_SHARE), 1.0 - _LEAST_SHARE)) for share in each)

    @property
    def base_margins(self) -> Floats:
        return np.array([math.log(share / (1.0 - share)) for share in self.start])

    def predictions(self, margins: Floats) -> Floats:
        return 1.0 / (1.0 + _odds(margins))

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        return np.logaddexp(0.0, np.where(y > 0.5, -margins[:, 0], margins[:, 0]))

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        _write_logistic(_odds(margins[:, 0]), y, *self.debiasing, scales, grad[0], hess[0])
        return 0


class Softmax(_LossOfClasses, frozen=True, tag="softmax"):
    """Log-loss of several classes: grad = p - 1[y = k], hess = 2 p (1 - p), XGBoost's upper bound of the diagonal.

    `class_scores` are the margins that classes start from where these were estimated; else all have `base_score`.
    """

    class_scores: tuple[float, ...] = ()

    metric: ClassVar[str] = "mlogloss"
    xgboost_name: ClassVar[str] = "multi:softprob"
    hess_limit: ClassVar[float] = 0.5

    def start_of(self, totals: Sequence[int], label_unit: float) -> tuple[float, ...]:
        # as in XGBoost: logarithms of the classes' shares, less their mean
        scores = np.log(self.shares_of(totals) + _LEAST_SHARE)
        return tuple(to_float32(score) for score in (scores - scores.mean()).tolist())

    @property
    def start(self) -> tuple[float, ...]:
        return self.class_scores or (self.base_score,) * self.n_outputs

    def starting(self, start: Sequence[float]) -> Self:
        return replace(super().starting(start), base_score=0.0, class_scores=tuple(start))

    def predictions(self, margins: Floats) -> Floats:
        p: Floats = np.exp(margins - margins.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return p

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        all_classes: Floats = np.logaddexp.reduce(margins, axis=1)
        return all_classes - margins[np.arange(len(y)), y.astype(np.intp)]

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        p = self.predictions(margins)
        s, t = self.debiasing
        g = p + t
        g[np.arange(len(y)), y.astype(np.intp)] -= s
        grad[:] = np.rint(g * scales[:, None]).T
        hess[:] = np.rint(2.0 * p * (1.0 - p) * scales[:, None]).T
        return 0


def bound_of_weights(weight: Floats | None) -> float:
    """Return a power of two that no sample weight exceeds."""
    # a bound is public, and reveals less than the largest weight
    return 1.0 if weight is None or not len(weight) else 2.0 ** math.ceil(math.log2(float(weight.max())))


def _odds(margins: Floats) -> Floats:
    """Return (1 - p) / p."""
    # numpy's exp everywhere: another one's last bits may differ
    odds = np.negative(margins)
    with np.errstate(over="ignore"):
        return np.exp(odds, out=odds)


@kernel
def _write_logistic(odds: Any, y: Any, s: float, t: float, scales: Any, grad: Any, hess: Any) -> None:
    """Write the derivatives of rows with these odds of class 0; `s` and `t` are `FixedPointLoss.debiasing`."""
    # one pass without the interpreter lock: a dozen short numpy calls on two threads wait for it more than they compute
    for i in range(np.uint64(odds.shape[0])):
        p = 1.0 / (1.0 + odds[i])
        grad[i] = np.int64(np.rint((p - (s * y[i] - t)) * scales[i]))
        hess[i] = np.int64(np.rint(p * (1.0 - p) * scales[i]))
