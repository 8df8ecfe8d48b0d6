"""Losses, their derivatives with respect to the margin, and the fixed point they are rounded to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.compute import kernel, share
from treaty.errors import ConfigError

BLOCK = 1 << 14  # rows whose intermediate values stay in the cache
LEAST_EPSILON = 2.0**-20  # below it labels are coin tosses, and debiasing them only costs bits of the fixed point


@kernel
def fixed_logistic(odds: Any, y: Any, s: float, t: float, scales: Any, grad: Any, hess: Any) -> None:
    """Write the fixed-point derivatives of rows with these odds of class 0; `s` and `t` are `Objective.debiasing`.

    One pass without the interpreter lock: a dozen short numpy calls on two threads wait for the lock more than they
    compute.
    """
    for i in range(np.uint64(odds.shape[0])):
        p = 1.0 / (1.0 + odds[i])
        grad[i] = np.int64(np.rint((p - (s * y[i] - t)) * scales[i]))
        hess[i] = np.int64(np.rint(p * (1.0 - p) * scales[i]))


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss and its fixed point.

    Parameters
    ----------
    name : {"logistic", "softmax", "squared_error"}
    n_outputs : int
        Trees per round: the number of classes for softmax, else 1.
    base_score : float
        Probability for logistic, margin for the others.
    fractional_bits : int
        grad and hess are rounded once to multiples of 2^-fractional_bits.
    grad_clip : float
        Squared error: gradients are clipped to it and divided by it (a power of two); 1 for the others.
    weight_bound : float
        Largest sample weight, rounded up to a power of two. Weights below 1 are divided by it, so that they keep their
        fractional bits.
    epsilon : float or None
        Classifiers: labels went through randomised response with this epsilon and are debiased; None: labels as they
        are.

    References
    ----------
    Ghazi, Golowich, Kumar, Manurangsi, Zhang, "Deep Learning with Label Differential Privacy", NeurIPS 2021
    (arXiv 2102.06062), on randomised response.
    """

    name: str
    n_outputs: int = 1
    base_score: float = 0.5
    fractional_bits: int = 16
    grad_clip: float = 1.0
    weight_bound: float = 1.0
    epsilon: float | None = None

    @property
    def base_margin(self) -> float:
        """The margin every row starts from."""
        if self.name == "logistic":
            return math.log(self.base_score / (1.0 - self.base_score))
        return self.base_score

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
        s, t = self.debiasing  # the very additions of `_derivatives`: what they round to is bounded, too
        return math.ceil(max(1.0 + t, s - t) * self.weight_bound / self.weight_unit * 2.0**self.fractional_bits)

    @property
    def hess_bound(self) -> int:
        """Largest hessian, as an integer."""
        largest = {"logistic": 0.25, "softmax": 0.5, "squared_error": 1.0}[self.name]
        return math.ceil(largest * self.weight_bound / self.weight_unit * 2.0**self.fractional_bits)

    def check_sums(self, n_rows: int) -> None:
        """Refuse a job whose sums could leave int64; overflow is found here, never at run time."""
        if n_rows * max(self.grad_bound, self.hess_bound) >= 2**62:
            noise = "" if self.epsilon is None else f" and labels debiased at epsilon={self.epsilon:g}"
            raise ConfigError(
                f"sums of {n_rows} gradients at fractional_bits={self.fractional_bits} with weights up to "
                f"{self.weight_bound:g}{noise} do not fit 62 bits; lower fractional_bits or scale the weights down"
            )

    def gradients(
        self,
        margins: NDArray[np.float64],
        y: NDArray[np.float64],
        weight: NDArray[np.float64] | None,
        threads: int = 1,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return the fixed-point derivatives of the loss.

        Parameters
        ----------
        margins : float64 (n_rows, n_outputs)
        y : float64 (n_rows,)
            0 or 1 for logistic, the class number for softmax; with `epsilon`, the noisy ones.
        weight : float64 (n_rows,) or None

        Returns
        -------
        grad, hess : int64 (n_outputs, n_rows)
        clipped : int
            Rows whose gradient was clipped (squared error only).
        """
        n_rows = len(y)
        grad = np.empty((self.n_outputs, n_rows), np.int64)
        hess = np.empty((self.n_outputs, n_rows), np.int64)
        clipped: list[int] = []  # by block: threads may append at the same time, but not add to one number
        scale = 2.0**self.fractional_bits / self.weight_unit

        def work(first: int, last: int) -> None:
            for start in range(first, last, BLOCK):
                rows = slice(start, min(start + BLOCK, last))
                if self.name == "logistic":
                    of_rows = np.full(rows.stop - start, scale) if weight is None else scale * weight[rows]
                    odds = self._odds(margins[rows, 0])
                    fixed_logistic(odds, y[rows], *self.debiasing, of_rows, grad[0, rows], hess[0, rows])
                    continue
                g, h = self._derivatives(margins[rows], y[rows])
                if self.name == "squared_error":
                    over = np.abs(g) > self.grad_clip
                    clipped.append(int(over.sum()))
                    g = np.clip(g, -self.grad_clip, self.grad_clip) / self.grad_clip
                factor = scale if weight is None else scale * weight[rows, None]
                grad[:, rows] = np.rint(g * factor).T
                hess[:, rows] = np.rint(h * factor).T

        share(work, n_rows, threads, least=4 * BLOCK)
        return grad, hess, sum(clipped)

    def _derivatives(
        self, margins: NDArray[np.float64], y: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if self.name == "squared_error":
            return margins - y[:, None], np.ones_like(margins)
        p = self.predictions(margins)  # softmax
        s, t = self.debiasing
        g = p + t
        g[np.arange(len(y)), y.astype(np.intp)] -= s
        return g, 2.0 * p * (1.0 - p)

    def _odds(self, margins: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (1 - p) / p; numpy's exp everywhere, for another one's last bits may differ."""
        odds = np.negative(margins)
        with np.errstate(over="ignore"):
            return np.exp(odds, out=odds)

    def predictions(self, margins: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return probabilities (of class 1; of every class for softmax) or means, shaped as `margins`."""
        if self.name == "logistic":
            return 1.0 / (1.0 + self._odds(margins))
        if self.name == "softmax":
            p: NDArray[np.float64] = np.exp(margins - margins.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            return p
        return margins

    @property
    def metric(self) -> str:
        """Name of the evaluation metric, as XGBoost names it."""
        return {"logistic": "logloss", "softmax": "mlogloss", "squared_error": "rmse"}[self.name]

    def loss(self, margins: NDArray[np.float64], y: NDArray[np.float64], weight: NDArray[np.float64] | None) -> float:
        """Return the weighted mean loss: log-loss, or root mean squared error."""
        if self.name == "logistic":
            each = np.logaddexp(0.0, np.where(y > 0.5, -margins[:, 0], margins[:, 0]))
        elif self.name == "softmax":
            each = np.logaddexp.reduce(margins, axis=1) - margins[np.arange(len(y)), y.astype(np.intp)]
        else:
            return float(np.sqrt(np.average((margins[:, 0] - y) ** 2, weights=weight)))
        return float(np.average(each, weights=weight))


def make_objective(
    name: str,
    y: NDArray[np.float64],
    weight: NDArray[np.float64] | None,
    *,
    n_classes: int = 2,
    base_score: float = 0.5,
    fractional_bits: int = 16,
    epsilon: float | None = None,
) -> Objective:
    """Build the objective for these labels, with its public bounds.

    Parameters
    ----------
    epsilon : float or None
        Of randomised response, if that is what `y` went through (`treaty.privacy.label_rr`).

    Raises
    ------
    ConfigError
        If `base_score` is not a probability where one is needed, or `epsilon` is given for a regression or is not a
        finite number of at least 2^-20.
    """
    if epsilon is not None:
        if name == "squared_error":
            raise ConfigError("expected classes for mechanism='label_rr', got a regression target")
        if not LEAST_EPSILON <= epsilon < math.inf:
            raise ConfigError(f"expected a finite epsilon of at least {LEAST_EPSILON:.1e}, got {epsilon}")
    if name == "logistic" and not 0.0 < base_score < 1.0:
        raise ConfigError(f"expected base_score between 0 and 1 for a classifier, got {base_score}")
    spread = 2.0 * float(np.max(np.abs(y - base_score), initial=0.0)) if name == "squared_error" else 0.0
    if not math.isfinite(spread):
        raise ConfigError("labels and base_score are too far apart to subtract; scale the labels down")
    return Objective(
        name=name,
        n_outputs=n_classes if name == "softmax" else 1,
        base_score=base_score,
        fractional_bits=fractional_bits,
        grad_clip=2.0 ** math.ceil(math.log2(spread)) if spread > 0.0 else 1.0,
        # the bound is public: a power of two tells less than the largest weight itself
        weight_bound=1.0 if weight is None or not len(weight) else 2.0 ** math.ceil(math.log2(float(weight.max()))),
        epsilon=epsilon,
    )
