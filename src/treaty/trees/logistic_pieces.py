"""The logistic loss of two classes in linear pieces of whole numbers, which a protocol on secret shares can compute.

Margins are whole multiples of 2^-12. Between -8 and 8 there are 16 pieces, one between each two whole numbers; within
a piece, the probability and the hessian are an offset plus a slope times the next 8 bits of the margin, whole numbers
all. The remaining bits do not count, and beyond -8 and 8 the end pieces go on.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np

from treaty.machine.arrays import Floats, Integers
from treaty.machine.kernels import kernel
from treaty.trees.losses import Logistic

MARGIN_BITS, LOW_BITS = 12, 8
"""Fractional bits of margins, and how many of these say where in its piece a margin is."""


class LogisticPieces(Logistic, frozen=True, tag="logistic_pieces"):
    """Log-loss of two classes whose derivatives are linear in pieces: grad = p - y and hess = h, whole numbers.

    p is within 0.0065 of the logistic function, h within 0.0063 of its slope, at 16 fractional bits. The start and leaf
    values are rounded to whole multiples of 2^-12. Predictions and the metric are those of `Logistic`. A sample weight
    that is no whole number multiplies the whole numbers, and so do debiased labels: the result is rounded, as there.
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
        _write_pieces(margins[:, 0], y, *self.debiasing, one, scales / one, pieces, grad[0], hess[0])
        return 0


@cache
def pieces_of(fractional_bits: int) -> Integers:
    """Return offsets and slopes of p and of h in each piece, in units of 2^-fractional_bits: int64 (2, 2, 16)."""
    found, knots, low = np.zeros((2, 2, 16), np.int64), np.arange(-8.0, 9.0), np.arange(1 << LOW_BITS)
    within = (low + 0.5) / len(low)
    for (offsets, slopes), degree in zip(found, (0, 1), strict=True):

        def curve(m: Floats, degree: int = degree) -> Floats:
            p = 1.0 / (1.0 + np.exp(-m))
            return np.asarray(p * (1.0 - p) ** degree * 2.0**fractional_bits)

        slopes[1:-1] = np.rint(np.diff(curve(knots))[1:-1] / len(low))
        # the offset halves the largest error that the rounded slope leaves
        left = curve(knots[:-1, None] + within) - slopes[:, None] * low
        offsets[:] = np.rint((left.max(axis=1) + left.min(axis=1)) / 2.0)
        offsets[[0, -1]] = np.rint(curve(knots[[0, -1]]))
    return found


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
