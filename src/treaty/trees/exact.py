"""Which of two splits of a node gains more, decided in whole numbers where float64 cannot tell.

In units of the fixed point, with G and H of a node, ridge = reg_lambda, a = H_L + ridge, T = H + 2 ridge and
V = T G_L - G a, a split gains (XGBoost Eq. 7 without the factor 1/2)

    V^2 / (T a (T - a)) - G^2 ridge / (T (H + ridge)),

so the best split of a node has the largest fraction V^2 / (a (T - a)), and one is admissible where that passes

    (T (H + ridge) threshold + G^2 ridge) / (H + ridge),    rounded down above the line.

Kernels do the same in digits of 32 bits (`scanning`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treaty.compute import Integers
from treaty.trees.scanning import DIGITS


def fraction(totals: Integers, left: Integers, ridge: int) -> tuple[int, int]:
    """Return V^2 and a (T - a) of a split, from the sums of grad, hess and rows of its node and its left child."""
    grad, a = int(totals[0]), int(left[1]) + ridge
    whole = int(totals[1]) + 2 * ridge
    return (whole * int(left[0]) - grad * a) ** 2, a * (whole - a)


def bound(totals: Integers, ridge: int, threshold: float) -> tuple[int, int]:
    """Return the fraction that a node's splits have to pass; `threshold` is a gain in units of the fixed point.

    Totals with a negative hess, which a party that cheats can bring about, count as without.
    """
    grad, hess = int(totals[0]), max(int(totals[1]), 0)
    above, below = threshold.as_integer_ratio()
    top = (hess + 2 * ridge) * (hess + ridge) * above // below + grad * grad * ridge
    return min(top, (1 << 32 * DIGITS) - 1), hess + ridge  # no numerator is as large


def least_gain(totals: Integers, ridge: int, top: int) -> float:
    """Return the gain that a `bound` with numerator `top` stands for, in units of the fixed point.

    Where units are coarse, rounding down takes more off it than float64 could.
    """
    grad, hess = int(totals[0]), max(int(totals[1]), 0)
    return (top - grad * grad * ridge) / ((hess + 2 * ridge) * (hess + ridge))


def digits_of(numbers: list[int], digits: int) -> Any:
    """Return whole numbers in digits, uint64 (n, digits)."""
    raw = b"".join(number.to_bytes(4 * digits, "little") for number in numbers)
    return np.frombuffer(raw, "<u4").astype(np.uint64).reshape(-1, digits)
