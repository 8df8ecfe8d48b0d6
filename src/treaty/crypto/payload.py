"""What the two ends of a cipher exchange: payloads, lists of arrays that are checked before use, and bounds of sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from treaty.errors import CryptoError

Payload = list[NDArray[Any]]


def check_payload(payload: Payload, what: str, *expected: tuple[DTypeLike, tuple[int | None, ...]]) -> None:
    """Check number, dtypes and shapes (None: any length) of the arrays of a payload, and that rows are contiguous.

    CryptoError, which says `what` it was, if anything differs.
    """
    if len(payload) != len(expected):
        raise CryptoError(f"expected {len(expected)} arrays, got {len(payload)} - in {what}")
    for number, (array, (dtype, shape)) in enumerate(zip(payload, expected, strict=True)):
        fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
        if array.dtype != np.dtype(dtype) or not fits or not array.flags.c_contiguous:
            raise CryptoError(
                f"expected {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape} - in array {number} of {what}"
            )


LEAST_ROWS = 4096
"""Fewest rows of a piece that is not the last one, where a row's ciphertexts leave room: each piece costs something."""


@dataclass(frozen=True, slots=True)
class SumsBounds:
    """Public bounds of a job's sums, in fixed-point integers; CryptoError if negative or if sums may exceed 62 bits."""

    n_rows: int  # most rows a sum may hold, at least 1
    grad_bound: int  # |grad_i| <= grad_bound
    hess_bound: int  # 0 <= hess_i <= hess_bound

    def __post_init__(self) -> None:
        if self.n_rows < 1 or self.grad_bound < 0 or self.hess_bound < 0:
            raise CryptoError("expected n_rows >= 1 and bounds >= 0 - in the bounds of the sums")
        if max(2 * self.n_rows * self.grad_bound, self.n_rows * self.hess_bound, self.n_rows) >= 1 << 62:
            raise CryptoError("sums would exceed 62 bits - lower fractional_bits, or the bound of the gradients")

    def check(self, grad: NDArray[np.int64], hess: NDArray[np.int64], where: str) -> None:
        """Raise CryptoError for derivatives (rows,) beyond their bounds."""
        if len(grad) and not (-self.grad_bound <= grad.min() <= grad.max() <= self.grad_bound):
            raise CryptoError(f"a gradient exceeds its declared bound - at {where}")
        if len(hess) and not (0 <= hess.min() <= hess.max() <= self.hess_bound):
            raise CryptoError(f"a hessian is negative or exceeds its declared bound - at {where}")

    def allow(self, sums: NDArray[np.int64]) -> bool:
        """Tell whether sums (..., 3) of grad, hess and count are possible for rows within the bounds."""
        grad, hess, count = np.moveaxis(sums, -1, 0)
        most_grad, most_hess = self.grad_bound * count, self.hess_bound * count
        fits = (count >= 0) & (-most_grad <= grad) & (grad <= most_grad) & (0 <= hess) & (hess <= most_hess)
        return bool(fits.all())
