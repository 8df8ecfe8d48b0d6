"""The logistic loss in linear pieces of whole numbers, which a protocol on secret shares can compute.

Margins are whole multiples of 2^-12. Between -8 and 8 there are 16 pieces, one between each two whole numbers; within
a piece, the probability and the hessian are an offset plus a slope times the next 8 bits of the margin, whole numbers
all. The remaining bits do not count, and beyond -8 and 8 the end pieces go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar, Self

import numpy as np
from msgspec.structs import replace

from treaty.machine.arrays import Flags, Floats, Integers
from treaty.machine.kernels import kernel
from treaty.trees.losses import Logistic

MARGIN_BITS, LOW_BITS = 12, 8
"""Fractional bits of margins, and how many of these say where in its piece a margin is."""


class LogisticPieces(Logistic, frozen=True, tag="logistic_pieces"):
    """Log-loss of two classes whose derivatives are linear in pieces: grad = p - y and hess = h, whole numbers.

    p is within 0.0065 of the logistic function, h within 0.0063 of its slope, at 16 fractional bits. The start and leaf
    values are rounded to whole multiples of 2^-12. Predictions are those of `Logistic`; the metric is linear in pieces,
    within 0.016 of the log-loss of rows whose margin is within -7 and 7. The sum of rows without weights is rounded
    down (`loss_shift`), so that a protocol opens no more of it. A sample weight that is no whole number multiplies the
    whole numbers, and so do debiased labels: the result is rounded, as there.
    """

    # XGBoost has no such loss
    xgboost_name: ClassVar[str] = "logistic_pieces"
    # a little above 1/4: the pieces next to 0 are shifted up
    hess_limit: ClassVar[float] = 0.26
    leaf_unit: ClassVar[float] = 2.0**-MARGIN_BITS

    @property
    def base_margins(self) -> Floats:
        return np.asarray(np.rint(super().base_margins / self.leaf_unit) * self.leaf_unit)

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        pieces, one = pieces_of(self.fractional_bits), 2.0**self.fractional_bits
        for k in range(self.n_outputs):
            labels = y if self.n_outputs == 1 else (y == k).astype(np.float64)
            _write_pieces(margins[:, k], labels, *self.debiasing, one, scales / one, pieces, grad[k], hess[k])
        return 0

    def positive(self, y: Floats) -> Flags:
        """Return whether each row is of the class of each output, bool (n_rows, n_outputs)."""
        classes = [1] if self.n_outputs == 1 else range(self.n_outputs)
        return np.asarray(np.rint(y)[:, None] == np.array(classes))

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        x = np.clip(np.where(self.positive(y), -margins, margins), -9.0, 9.0)
        steps = np.rint(x * (1 << MARGIN_BITS)).astype(np.int64)
        (offsets, slopes), piece = loss_pieces(self.fractional_bits), np.clip((steps >> MARGIN_BITS) + 8, 0, 15)
        low = (steps >> MARGIN_BITS - LOW_BITS) & ((1 << LOW_BITS) - 1)
        return np.asarray((offsets[piece] + slopes[piece] * low).sum(axis=1) * 2.0**-self.fractional_bits)

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        if weight is not None:
            return super().loss(margins, y, weight)
        return self.loss_of(math.floor(float(self.row_losses(margins, y).sum()) / self._loss_unit(len(y))), len(y))

    def loss_of(self, units: int, n_rows: int) -> float:
        """Return the loss of rows that count once each, by that of all together, rounded down."""
        return units * self._loss_unit(n_rows) / n_rows

    def _loss_unit(self, n_rows: int) -> float:
        return float(2.0 ** (loss_shift(n_rows * self.n_outputs, self.fractional_bits) - self.fractional_bits))

    @property
    def most_loss(self) -> float:
        """What the loss of rows is below."""
        return 8.0 * self.n_outputs


class PiecesOfClasses(LogisticPieces, frozen=True, tag="pieces_of_classes"):
    """The loss in pieces of several classes, each against the rest: trees of a class are those of two classes.

    A class's probability is its own logistic function, divided by the sum of all classes'. `class_shares` are what
    classes start from where these were estimated; else all have `base_score`. The metric is what trees lower: a row's
    losses of all classes, each against the rest, added up.
    """

    class_shares: tuple[float, ...] = ()

    metric: ClassVar[str] = "ovr-logloss"
    xgboost_name: ClassVar[str] = "pieces_of_classes"

    @property
    def start(self) -> tuple[float, ...]:
        return self.class_shares or (self.base_score,) * self.n_outputs

    def starting(self, start: Sequence[float]) -> Self:
        return replace(super().starting(start), class_shares=tuple(start))

    def predictions(self, margins: Floats) -> Floats:
        p = np.maximum(super().predictions(margins), np.finfo(np.float64).tiny)
        p /= p.sum(axis=1, keepdims=True)
        return p


@cache
def pieces_of(fractional_bits: int) -> Integers:
    """Return offsets and slopes of p and of h in each piece, in units of 2^-fractional_bits: int64 (2, 2, 16)."""
    one = 2.0**fractional_bits

    def curve(m: Floats, degree: int) -> Floats:
        p = 1.0 / (1.0 + np.exp(-m))
        return np.asarray(p * (1.0 - p) ** degree * one)

    return np.stack([_fitted(partial(curve, degree=degree), 8.0) for degree in (0, 1)])


@cache
def loss_pieces(fractional_bits: int) -> Integers:
    """Return offsets and slopes of a row's loss of label 0 in each piece, as `pieces_of` does: int64 (2, 16)."""
    return _fitted(lambda m: np.logaddexp(0.0, m) * 2.0**fractional_bits, 7.0)


def loss_shift(n_rows: int, fractional_bits: int) -> int:
    """Return how many of the lowest bits of so many rows' losses together do not count.

    What is left are whole numbers, and 15 bits at most: one row of many hardly shows.
    """
    return fractional_bits + max(0, n_rows.bit_length() - 1 - MARGIN_BITS)


def _fitted(curve: Callable[[Floats], Floats], end: float) -> Integers:
    """Return offsets and slopes that fit a curve; the first and the last piece have its value at -`end` and `end`."""
    (offsets, slopes), knots, low = np.zeros((2, 16), np.int64), np.arange(-8.0, 9.0), np.arange(1 << LOW_BITS)
    slopes[1:-1] = np.rint(np.diff(curve(knots))[1:-1] / len(low))
    # the offset halves the largest error that the rounded slope leaves
    left = curve(knots[:-1, None] + (low + 0.5) / len(low)) - slopes[:, None] * low
    offsets[:] = np.rint((left.max(axis=1) + left.min(axis=1)) / 2.0)
    offsets[[0, -1]] = np.rint(curve(np.array([-end, end])))
    return np.stack([offsets, slopes])


@kernel
def _write_pieces(
    margins: Any, y: Any, s: float, t: float, one: float, scales: Any, pieces: Any, grad: Any, hess: Any
) -> None:
    """Write the derivatives of rows; `s` and `t` are `FixedPointLoss.debiasing`, `one` a probability of 1."""
    for i in range(np.uint64(margins.shape[0])):
        x = np.int64(np.rint(min(max(margins[i], -9.0), 9.0) * (1 << MARGIN_BITS)))
        piece = min(max((x >> MARGIN_BITS) + 8, 0), 15)
        low = (x >> (MARGIN_BITS - LOW_BITS)) & ((1 << LOW_BITS) - 1)
        p = pieces[0, 0, piece] + pieces[0, 1, piece] * low
        h = pieces[1, 0, piece] + pieces[1, 1, piece] * low
        grad[i] = np.int64(np.rint((p - (s * y[i] - t) * one) * scales[i]))
        hess[i] = np.int64(np.rint(h * scales[i]))
