"""The float32 values as whole numbers in the same order, so that a search can halve the range between two of them."""

import numpy as np
from numpy.typing import NDArray

_ZERO = np.uint32(1 << 31)  # key of both zeros


def keys_of(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Map float32 values (no NaN) to uint32 keys: in order, neighbours differing by 1, both zeros the same."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return np.where(bits < _ZERO, bits | _ZERO, np.bitwise_invert(bits) + np.uint32(1))


def floats_of(keys: NDArray[np.unsignedinteger] | NDArray[np.signedinteger]) -> NDArray[np.float32]:
    """Return the values with these keys: the inverse of `keys_of`, with a positive zero."""
    keys = np.asarray(keys).astype(np.uint32)
    return np.where(keys >= _ZERO, keys ^ _ZERO, np.bitwise_invert(keys) + np.uint32(1)).view(np.float32)
