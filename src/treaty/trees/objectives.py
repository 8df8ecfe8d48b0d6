"""Losses as classes: derivatives with respect to the margin, base score and link, and the fixed point of sums.

A new loss is one class here and its name in the union `Objective`; a saved forest names the class by its tag.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, get_args

import msgspec
import numpy as np

from treaty.compute import Floats, Integers, kernel, share
from treaty.errors import ConfigError

BLOCK = 1 << 14  # rows whose intermediate values stay in the cache
LEAST_EPSILON = 2.0**-20  # below it labels are coin tosses, and debiasing them only costs bits of the fixed point


class FixedPointLoss(msgspec.Struct, frozen=True, tag_field="name"):
    """A loss whose derivatives are rounded once to integers.

    `n_outputs` trees grow per round. `base_score` is a probability for the logistic loss, a margin for the others.
    `grad_clip` is a power of two that gradients are clipped to and divided by (squared error; 1 for the others).
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

    metric: ClassVar[str]  # as XGBoost names it; so does the next
    xgboost_name: ClassVar[str]
    largest_hess: ClassVar[float]

    @classmethod
    def check(cls, base_score: float, epsilon: float | None) -> None:
        """Raise ConfigError for a base score or an epsilon that this loss cannot take."""
        if epsilon is not None and not LEAST_EPSILON <= epsilon < math.inf:
            raise ConfigError(f"expected a finite epsilon of at least {LEAST_EPSILON:.1e}, got {epsilon}")

    @classmethod
    def outputs(cls, n_classes: int) -> int:
        """Return the number of trees per round."""
        return 1

    @classmethod
    def clip_of(cls, y: Floats, base_score: float) -> float:
        """Return `grad_clip` for these labels."""
        return 1.0

    @property
    def base_margin(self) -> float:
        """The margin every row starts from."""
        return self.base_score

    @property
    def n_classes(self) -> int:
        """XGBoost's num_class: the classes that have a margin each; 0 for a single margin."""
        return 0

    def predictions(self, margins: Floats) -> Floats:
        """Return probabilities (of class 1; of every class for softmax) or means, shaped as `margins`."""
        raise NotImplementedError

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        """Return the weighted mean loss, which is what `metric` names."""
        raise NotImplementedError

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        """Write a block's derivatives times `scales` (n_rows,), rounded, to (n_outputs, n_rows); count clipped rows."""
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
        clipped: list[int] = []  # by block: threads may append at the same time, but not add to one number
        scale = 2.0**self.fractional_bits / self.weight_unit

        def work(first: int, last: int) -> None:
            for start in range(first, last, BLOCK):
                rows = slice(start, min(start + BLOCK, last))
                scales = np.full(rows.stop - start, scale) if weight is None else scale * weight[rows]
                clipped.append(self.write_derivatives(margins[rows], y[rows], scales, grad[:, rows], hess[:, rows]))

        share(work, n_rows, threads, least=4 * BLOCK)
        return grad, hess, sum(clipped)

    @property
    def weight_unit(self) -> float:
        """What a sample weight is divided by before rounding."""
        return min(1.0, self.weight_bound)

    @property
    def grad_unit(self) -> float:
        """What one integer step of a gradient is worth."""
        return self.grad_clip * self.hess_unit

    @property
    def hess_unit(self) -> float:
        """What one integer step of a hessian is worth."""
        return self.weight_unit * 2.0**-self.fractional_bits

    @property
    def debiasing(self) -> tuple[float, float]:
        """The s and t for which s 1[noisy label = k] - t is 1[label = k] on average; 1 and 0 without noise.

        A label of K classes is kept with probability p = e^epsilon / (e^epsilon + K - 1) and becomes each other one
        with r = 1 / (e^epsilon + K - 1): s = 1 / (p - r) and t = r / (p - r).
        """
        if self.epsilon is None:
            return 1.0, 0.0
        others = max(self.n_outputs, 2) - 1
        fade = math.exp(-self.epsilon)
        rest = -math.expm1(-self.epsilon)
        return (1.0 + others * fade) / rest, fade / rest

    @property
    def grad_bound(self) -> int:
        """Largest absolute gradient, as an integer.

        Debiased labels lie in [-t, s - t], so that |g| <= max(1 + t, s - t) = (e^epsilon + K - 2) / (e^epsilon - 1).
        """
        s, t = self.debiasing  # the same additions as in `write_derivatives`, so that rounding is bounded too
        return math.ceil(max(1.0 + t, s - t) * self.weight_bound / self.weight_unit * 2.0**self.fractional_bits)

    @property
    def hess_bound(self) -> int:
        """Largest hessian, as an integer."""
        return math.ceil(self.largest_hess * self.weight_bound / self.weight_unit * 2.0**self.fractional_bits)

    def check_sums(self, n_rows: int) -> None:
        """Refuse a job whose sums could leave int64, so that none overflows at run time."""
        if n_rows * max(self.grad_bound, self.hess_bound) >= 2**62:
            noise = "" if self.epsilon is None else f" and labels debiased at epsilon={self.epsilon:g}"
            raise ConfigError(
                f"sums of {n_rows} gradients at fractional_bits={self.fractional_bits} with weights up to "
                f"{self.weight_bound:g}{noise} do not fit 62 bits; lower fractional_bits or scale the weights down"
            )


class Logistic(FixedPointLoss, frozen=True, tag="logistic"):
    """Log-loss of two classes: grad = p - y, hess = p (1 - p)."""

    metric: ClassVar[str] = "logloss"
    xgboost_name: ClassVar[str] = "binary:logistic"
    largest_hess: ClassVar[float] = 0.25

    @classmethod
    def check(cls, base_score: float, epsilon: float | None) -> None:
        """See `FixedPointLoss`."""
        super().check(base_score, epsilon)
        if not 0.0 < base_score < 1.0:
            raise ConfigError(f"expected base_score between 0 and 1 for a classifier, got {base_score}")

    @property
    def base_margin(self) -> float:
        """See `FixedPointLoss`."""
        return math.log(self.base_score / (1.0 - self.base_score))

    def predictions(self, margins: Floats) -> Floats:
        """See `FixedPointLoss`."""
        return 1.0 / (1.0 + _odds(margins))

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        """See `FixedPointLoss`."""
        each = np.logaddexp(0.0, np.where(y > 0.5, -margins[:, 0], margins[:, 0]))
        return float(np.average(each, weights=weight))

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        """See `FixedPointLoss`."""
        _write_logistic(_odds(margins[:, 0]), y, *self.debiasing, scales, grad[0], hess[0])
        return 0


class Softmax(FixedPointLoss, frozen=True, tag="softmax"):
    """Log-loss of several classes: grad = p - 1[y = k], hess = 2 p (1 - p), XGBoost's upper bound of the diagonal."""

    metric: ClassVar[str] = "mlogloss"
    xgboost_name: ClassVar[str] = "multi:softprob"
    largest_hess: ClassVar[float] = 0.5

    @classmethod
    def outputs(cls, n_classes: int) -> int:
        """See `FixedPointLoss`."""
        return n_classes

    @property
    def n_classes(self) -> int:
        """See `FixedPointLoss`."""
        return self.n_outputs

    def predictions(self, margins: Floats) -> Floats:
        """See `FixedPointLoss`."""
        p: Floats = np.exp(margins - margins.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return p

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        """See `FixedPointLoss`."""
        each = np.logaddexp.reduce(margins, axis=1) - margins[np.arange(len(y)), y.astype(np.intp)]
        return float(np.average(each, weights=weight))

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        """See `FixedPointLoss`."""
        p = self.predictions(margins)
        s, t = self.debiasing
        g = p + t
        g[np.arange(len(y)), y.astype(np.intp)] -= s
        grad[:] = np.rint(g * scales[:, None]).T
        hess[:] = np.rint(2.0 * p * (1.0 - p) * scales[:, None]).T
        return 0


class SquaredError(FixedPointLoss, frozen=True, tag="squared_error"):
    """Half the squared error: grad = margin - y, clipped; hess = 1. The metric is its root mean square."""

    metric: ClassVar[str] = "rmse"
    xgboost_name: ClassVar[str] = "reg:squarederror"
    largest_hess: ClassVar[float] = 1.0

    @classmethod
    def check(cls, base_score: float, epsilon: float | None) -> None:
        """See `FixedPointLoss`."""
        if epsilon is not None:
            raise ConfigError("expected classes for mechanism='label_rr', got a regression target")

    @classmethod
    def clip_of(cls, y: Floats, base_score: float) -> float:
        """See `FixedPointLoss`."""
        spread = 2.0 * float(np.max(np.abs(y - base_score), initial=0.0))
        if not math.isfinite(spread):
            raise ConfigError("labels and base_score are too far apart to subtract; scale the labels down")
        return 2.0 ** math.ceil(math.log2(spread)) if spread > 0.0 else 1.0

    def predictions(self, margins: Floats) -> Floats:
        """See `FixedPointLoss`."""
        return margins

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        """See `FixedPointLoss`."""
        return float(np.sqrt(np.average((margins[:, 0] - y) ** 2, weights=weight)))

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        """See `FixedPointLoss`."""
        g = margins[:, 0] - y
        clipped = int((np.abs(g) > self.grad_clip).sum())
        grad[0] = np.rint(np.clip(g, -self.grad_clip, self.grad_clip) / self.grad_clip * scales)
        hess[0] = np.rint(scales)
        return clipped


Objective = Logistic | Softmax | SquaredError
LOSSES: dict[str, type[Objective]] = {kind.__struct_config__.tag: kind for kind in get_args(Objective)}


def make_objective(
    name: str,
    y: Floats,
    weight: Floats | None,
    *,
    n_classes: int = 2,
    base_score: float = 0.5,
    fractional_bits: int = 16,
    epsilon: float | None = None,
) -> Objective:
    """Return the loss of this name for these labels, with its public bounds; raise ConfigError as `check` does.

    `epsilon` is that of the randomised response which `y` went through (`treaty.privacy.label_rr`), if it did.
    """
    kind = LOSSES[name]
    kind.check(base_score, epsilon)
    return kind(
        n_outputs=kind.outputs(n_classes),
        base_score=base_score,
        fractional_bits=fractional_bits,
        grad_clip=kind.clip_of(y, base_score),
        # the bound is public: a power of two tells less than the largest weight itself
        weight_bound=1.0 if weight is None or not len(weight) else 2.0 ** math.ceil(math.log2(float(weight.max()))),
        epsilon=epsilon,
    )


def _odds(margins: Floats) -> Floats:
    """Return (1 - p) / p; numpy's exp everywhere, for another one's last bits may differ."""
    odds = np.negative(margins)
    with np.errstate(over="ignore"):
        return np.exp(odds, out=odds)


@kernel
def _write_logistic(odds: Any, y: Any, s: float, t: float, scales: Any, grad: Any, hess: Any) -> None:
    """Write the derivatives of rows with these odds of class 0; `s` and `t` are `FixedPointLoss.debiasing`.

    One pass without the interpreter lock: a dozen short numpy calls on two threads wait for the lock more than they
    compute.
    """
    for i in range(np.uint64(odds.shape[0])):
        p = 1.0 / (1.0 + odds[i])
        grad[i] = np.int64(np.rint((p - (s * y[i] - t)) * scales[i]))
        hess[i] = np.int64(np.rint(p * (1.0 - p) * scales[i]))
