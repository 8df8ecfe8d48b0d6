"""Which of two splits of a node gains more, decided in whole numbers where float64 cannot tell.

In units of the fixed point, with G and H of a node, ridge = reg_lambda, a = H_L + ridge, T = H + 2 ridge and
V = T G_L - G a, a split gains (XGBoost Eq. 7 without the factor 1/2)

    V^2 / (T a (T - a)) - G^2 ridge / (T (H + ridge)),

so the best split of a node has the largest fraction V^2 / (a (T - a)), and one is admissible where that passes

    (T (H + ridge) threshold + G^2 ridge) / (H + ridge),    rounded down above the line.

Numbers of many digits are uint64 arrays of 32 bits each, the lowest first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treaty.compute import Integers, kernel

DIGITS = 8
"""Of a numerator; it is below 2^254 for sums of 62 bits."""


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


def digits_of(numbers: list[int], digits: int) -> Any:
    """Return whole numbers in digits, uint64 (n, digits)."""
    raw = b"".join(number.to_bytes(4 * digits, "little") for number in numbers)
    return np.frombuffer(raw, "<u4").astype(np.uint64).reshape(-1, digits)


@kernel
def write_fraction(left_grad: Any, left_hess: Any, totals: Any, ridge: Any, top: Any, below: Any) -> None:
    """Write V^2, (8,), and a (T - a), (4,), of a split to `top` and `below`."""
    whole, a = totals[1] + 2 * ridge, left_hess + ridge
    first, second, v = np.zeros(4, np.uint64), np.zeros(4, np.uint64), np.zeros(4, np.uint64)
    _multiply_words(whole, abs(left_grad), first)
    _multiply_words(abs(totals[0]), a, second)
    if (left_grad < 0) == (totals[0] < 0):
        if _less(first, second):
            _subtract(second, first, v)
        else:
            _subtract(first, second, v)
    else:
        carry = np.uint64(0)
        for k in range(4):
            total = first[k] + second[k] + carry
            v[k] = total & np.uint64(0xFFFFFFFF)
            carry = total >> np.uint64(32)
    multiply(v, v, top)
    _multiply_words(a, whole - a, below)


@kernel
def multiply(a: Any, b: Any, out: Any) -> None:
    """Write a b to `out`, which has as many digits as both together."""
    out[:] = np.uint64(0)
    for i in range(a.shape[0]):
        carry = np.uint64(0)
        for j in range(b.shape[0]):
            total = a[i] * b[j] + out[i + j] + carry
            out[i + j] = total & np.uint64(0xFFFFFFFF)
            carry = total >> np.uint64(32)
        out[i + b.shape[0]] = carry


@kernel
def passes(top: Any, below: Any, other_top: Any, other_below: Any) -> bool:
    """Tell whether a fraction is larger than another one."""
    ours, theirs = np.zeros(12, np.uint64), np.zeros(12, np.uint64)
    multiply(top, other_below, ours)
    multiply(other_top, below, theirs)
    return _less(theirs, ours)


@kernel
def _multiply_words(a: int, b: int, out: Any) -> None:
    low = np.uint64(0xFFFFFFFF)
    first, second = np.zeros(2, np.uint64), np.zeros(2, np.uint64)
    first[0], first[1] = np.uint64(a) & low, np.uint64(a) >> np.uint64(32)
    second[0], second[1] = np.uint64(b) & low, np.uint64(b) >> np.uint64(32)
    multiply(first, second, out)


@kernel
def _subtract(a: Any, b: Any, out: Any) -> None:
    borrow = np.uint64(0)
    for k in range(a.shape[0]):
        taken = b[k] + borrow
        borrow = np.uint64(1) if a[k] < taken else np.uint64(0)
        out[k] = (a[k] + (borrow << np.uint64(32)) - taken) & np.uint64(0xFFFFFFFF)


@kernel
def _less(a: Any, b: Any) -> bool:
    for k in range(a.shape[0] - 1, -1, -1):
        if a[k] != b[k]:
            return bool(a[k] < b[k])
    return False
