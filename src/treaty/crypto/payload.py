"""Payloads of the two ends of a cipher: lists of arrays, checked before use."""

from __future__ import annotations

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
