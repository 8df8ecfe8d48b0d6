"""The group ristretto255 (RFC 9496), many points at a time, by libsodium.

Points and scalars are rows of 32 bytes in their standard encoding. The group has prime order, so a point that decodes
and is not the identity generates all of it: there are no points of small order to refuse.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.psi import sodium
from treaty.errors import CryptoError
from treaty.machine.shared_work import share

GENERATOR = np.frombuffer(bytes.fromhex("e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76"), np.uint8)
ORDER = 2**252 + 27742317777372353535851937790883648493
POINT = sodium.POINT
_LEAST = 64  # points worth a thread of their own


def random_scalar() -> NDArray[np.uint8]:
    """Draw a secret key: uniform in [1, ORDER), uint8 (32,), little-endian."""
    number = 1 + secrets.randbelow(ORDER - 1)
    return np.frombuffer(number.to_bytes(sodium.SCALAR, "little"), np.uint8)


def multiply(points: NDArray[np.uint8], scalar: NDArray[np.uint8], threads: int = 1) -> NDArray[np.uint8]:
    """Multiply every point, uint8 (n, 32), by one scalar (in the notation of the papers: raise it to that power).

    The scalar is little-endian, in [1, ORDER); running time does not depend on it. Points are checked, wherever they
    come from: CryptoError counts those that are the identity or no canonical encoding of a point of the group.
    """
    return _combined("crypto_scalarmult_ristretto255", scalar[None], points, threads)


def multiples(point: NDArray[np.uint8], scalars: NDArray[np.uint8], threads: int = 1) -> NDArray[np.uint8]:
    """Multiply one point, uint8 (32,), by every scalar, (n, 32); scalars and errors as of `multiply`."""
    return _combined("crypto_scalarmult_ristretto255", scalars, point[None], threads)


def shifted(points: NDArray[np.uint8], point: NDArray[np.uint8], *, back: bool = False) -> NDArray[np.uint8]:
    """Add one point, uint8 (32,), to every point, (n, 32), or subtract it (`back`); CryptoError where one is none."""
    return _combined(f"crypto_core_ristretto255_{'sub' if back else 'add'}", points, point[None], 1)


def validate(points: NDArray[np.uint8], threads: int = 1) -> None:
    """Check points that are only compared, not multiplied; errors as of `multiply`."""
    points = _rows(points, POINT)
    function = sodium.address("crypto_core_ristretto255_is_valid_point")
    _refuse(lambda a, b: sodium.validate_each(function, points, a, b), len(points), threads)


def from_uniform(uniform: NDArray[np.uint8], threads: int = 1) -> NDArray[np.uint8]:
    """Map uniform bytes, uint8 (n, 64), to points nobody knows a logarithm of, (n, 32) (RFC 9496, 4.3.4).

    Of `hashing.expand` this is hash_to_ristretto255 of RFC 9380, appendix B.
    """
    uniform = _rows(uniform, sodium.UNIFORM)
    out = np.empty((len(uniform), POINT), np.uint8)
    function = sodium.address("crypto_core_ristretto255_from_hash")
    share(lambda start, stop: sodium.map_each(function, uniform, out, start, stop), len(uniform), threads, _LEAST)
    return out


def _combined(name: str, left: NDArray[np.uint8], right: NDArray[np.uint8], threads: int) -> NDArray[np.uint8]:
    """Apply a function of two elements row by row; one of the arrays may have a single row for all of the other."""
    left, right = _rows(left, POINT), _rows(right, POINT)  # scalars have as many bytes
    total = min(len(left), len(right)) and max(len(left), len(right))
    out = np.empty((total, POINT), np.uint8)
    function = sodium.address(name)
    _refuse(lambda a, b: sodium.combine_each(function, left, right, out, a, b), total, threads)
    return out


def _rows(values: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Check the shape, so that a kernel reads only what is there."""
    if values.dtype != np.uint8 or values.ndim != 2 or values.shape[1] != width:
        raise CryptoError(f"expected uint8 (n, {width}), got {values.dtype} {values.shape} - at ristretto255")
    return np.require(values, requirements=["C", "W"])  # a copy where read-only, or kernels would be compiled twice


def _refuse(invalid: Callable[[int, int], int], total: int, threads: int) -> None:
    """Raise CryptoError if `invalid` counts any among the points from one number to another."""
    counts = np.zeros(total, np.int64)  # by part, at the part's first place

    def work(start: int, stop: int) -> None:
        if start < stop:
            counts[start] = invalid(start, stop)

    share(work, total, threads, _LEAST)
    count = int(counts.sum())
    if count:
        raise CryptoError(f"expected points of ristretto255 other than the identity, got {count} others of {total}")
