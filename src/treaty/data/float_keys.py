"""The float32 values as whole numbers in the same order, so that a search can halve what lies between two of them."""

import numpy as np
from numpy.typing import NDArray

_ZERO = np.uint32(1 << 31)  # key of both zeros


def keys_of(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Give each float32 value a whole number: in order, neighbours differing by 1, both zeros the same.

    Parameters
    ----------
    values : NDArray[np.float32]
        Any shape, no NaN; infinities are values.

    Returns
    -------
    NDArray[np.uint32]
        Same shape.
    """
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return np.where(bits < _ZERO, bits | _ZERO, np.bitwise_invert(bits) + np.uint32(1))


def floats_of(keys: NDArray[np.unsignedinteger] | NDArray[np.signedinteger]) -> NDArray[np.float32]:
    """Return the values with these keys: the inverse of `keys_of`, zero being positive.

    Parameters
    ----------
    keys : NDArray of whole numbers
        Any shape, from the key of -inf to the key of inf.

    Returns
    -------
    NDArray[np.float32]
        Same shape.
    """
    keys = np.asarray(keys).astype(np.uint32)
    return np.where(keys >= _ZERO, keys ^ _ZERO, np.bitwise_invert(keys) + np.uint32(1)).view(np.float32)
