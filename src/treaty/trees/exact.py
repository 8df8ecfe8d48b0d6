"""Which of two splits of a node gains more, decided in whole numbers where float64 cannot tell.

In units of the fixed point, with G and H of a node, ridge = reg_lambda, a = H_L + ridge, T = H + 2 ridge and
V = T G_L - G a, a split gains (XGBoost Eq. 7 without the factor 1/2)

    V^2 / (T a (T - a)) - G^2 ridge / (T (H + ridge)),

so the best split of a node has the largest fraction V^2 / (a (T - a)), and one is admissible where that passes

    (T (H + ridge) threshold + G^2 ridge) / (H + ridge),    rounded down above the line.

Kernels do the same in digits of 32 bits (`scanning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treaty.machine.arrays import Floats, Integers
from treaty.trees.scanning import DIGITS

_MOST = (1 << 32 * DIGITS) - 1  # no numerator is as large


def fraction(totals: Integers, left: Integers, ridge: int) -> tuple[int, int]:
    """Return V^2 and a (T - a) of a split, from the sums of grad, hess and rows of its node and its left child."""
    grad, a = int(totals[0]), int(left[1]) + ridge
    whole = int(totals[1]) + 2 * ridge
    return (whole * int(left[0]) - grad * a) ** 2, a * (whole - a)


def bound(totals: Integers, ridge: int, threshold: float) -> tuple[int, int]:
    """Return the fraction that a node's splits have to pass; `threshold` is a gain in units of the fixed point.

    Totals with a negative hess, which a party that cheats can bring about, count as without.
    """
    _, top, below = _bound(int(totals[0]), max(int(totals[1]), 0), ridge, *threshold.as_integer_ratio())
    return top, below


def bounds(totals: Integers, ridge: int, threshold: float) -> tuple[Floats, Any, Any]:
    """Return `bound` of nodes (n, 3): the gains it stands for, numerators and denominators in digits.

    Gains, float64 (n,), are in units of the fixed point. Where units are coarse, rounding down takes more off them than
    float64 could.
    """
    if threshold == 0.0:  # mostly
        tops = [min(grad * grad * ridge, _MOST) for grad in totals[:, 0].tolist()]
        belows = [hess + ridge for hess in np.maximum(totals[:, 1], 0).tolist()]
        return np.zeros(len(totals)), _digits(tops, DIGITS), _digits(belows, 4)
    ratio = threshold.as_integer_ratio()
    found = [_bound(grad, max(hess, 0), ridge, *ratio) for grad, hess, _ in totals.tolist()]
    gains = np.array([gain for gain, _, _ in found])
    return gains, _digits([top for _, top, _ in found], DIGITS), _digits([below for _, _, below in found], 4)


def _bound(grad: int, hess: int, ridge: int, above: int, below: int) -> tuple[float, int, int]:
    """Return a node's least gain, and the fraction, where the threshold is ``above / below``."""
    whole, parent = (hess + 2 * ridge) * (hess + ridge), grad * grad * ridge
    top = min(whole * above // below + parent, _MOST)
    return (top - parent) / whole, top, hess + ridge


def _digits(numbers: Sequence[int], digits: int) -> Any:
    """Return whole numbers in digits, uint64 (n, digits)."""
    raw = b"".join([number.to_bytes(4 * digits, "little") for number in numbers])
    return np.frombuffer(raw, "<u4").astype(np.uint64).reshape(-1, digits)
