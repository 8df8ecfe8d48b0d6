"""Floats as whole numbers in the same order, so that a search can halve the range between two of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ZERO = np.uint32(1 << 31)  # key of both float32 zeros; that of float64 zeros is 0
_LEAST = np.int64(-(1 << 63))


def keys_of(values: NDArray[Any]) -> NDArray[Any]:
    """Map floats (no NaN) to keys: in order, neighbours differing by 1, both zeros the same.

    Those of float64 are int64, those of float32 uint32.
    """
    if values.dtype == np.float64:
        wide = values.view(np.int64)
        return np.where(wide < 0, _LEAST - wide, wide)
    bits = values.view(np.uint32)
    return np.where(bits < _ZERO, bits | _ZERO, np.bitwise_invert(bits) + np.uint32(1))


def floats_of(keys: NDArray[Any], *, wide: bool = False) -> NDArray[Any]:
    """Return the values, float64 or float32, with these keys: the inverse of `keys_of`, with a positive zero."""
    if wide:
        return np.where(keys < 0, _LEAST - keys, keys).view(np.float64)
    keys = np.asarray(keys).astype(np.uint32)
    return np.where(keys >= _ZERO, keys ^ _ZERO, np.bitwise_invert(keys) + np.uint32(1)).view(np.float32)
