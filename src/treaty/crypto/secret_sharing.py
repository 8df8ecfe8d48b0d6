"""Shamir's secret sharing over the integers modulo p = 2^127 - 1, many secrets at a time.

Each secret is the value at 0 of an own polynomial of degree t - 1 with otherwise uniform coefficients; a holder's share
is the value at its point. Any t shares give the secret (Lagrange at 0); t - 1 are independent of it, whatever the
computing power. A wrong share is not noticed here: it gives another secret. Where the right one can be recognised
(a secret key by its public key), the caller does that.

Numbers are two little-endian uint64 words, below p. Secret bytes are cut into 15-byte pieces.

References
----------
Shamir, How to Share a Secret, CACM 1979.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.compute import kernel
from treaty.crypto.keystream import Keystream
from treaty.crypto.montgomery import from_words, to_words
from treaty.crypto.multiplier import multiply_add
from treaty.errors import CryptoError

P = (1 << 127) - 1
"""The field's order, a prime."""

Words = NDArray[np.uint64]

_PIECE = 15  # bytes of a secret in one field element
_WIDTH = 16  # bytes of a field element
_TOP = np.uint64((1 << 63) - 1)
_ZERO, _ONE, _LAST = np.uint64(0), np.uint64(1), np.uint64(63)


def make_shares(secrets: Words, points: Sequence[int], threshold: int) -> Words:
    """Share secrets among the holders of `points`.

    Parameters
    ----------
    secrets : uint64 (m, 2)
        Below p.
    points : sequence of int
        One for each of the n holders: distinct, from 1 to p - 1.
    threshold : int
        How many shares give the secrets, 1 to n.

    Returns
    -------
    uint64 (n, m, 2)

    Raises
    ------
    CryptoError
        When a secret, a point or the threshold is out of range, or a point is repeated.
    """
    _check_points(points)
    if not 1 <= threshold <= len(points):
        raise CryptoError(f"expected a threshold from 1 to {len(points)} shares, got {threshold}")
    _check_numbers(secrets, "secrets")
    count = len(secrets)
    coefficients = np.empty((threshold, count, 2), np.uint64)
    coefficients[0] = secrets
    coefficients[1:] = Keystream().below(P, (threshold - 1) * count).reshape(threshold - 1, count, 2)
    shares = np.empty((len(points), count, 2), np.uint64)
    _evaluate(coefficients, to_words(points, 2), shares)
    return shares


def open_shares(points: Sequence[int], shares: Words) -> Words:
    """Return the secrets behind shares; only right where `points` are at least as many as the threshold.

    Parameters
    ----------
    points : sequence of int
        Of the holders: distinct, from 1 to p - 1.
    shares : uint64 (n, m, 2)
        In the order of the points, below p.

    Returns
    -------
    uint64 (m, 2)

    Raises
    ------
    CryptoError
        When a point is zero, out of range or repeated, or a share is not below p.
    """
    _check_points(points)
    if len(shares) != len(points):
        raise CryptoError(f"expected a share for each of {len(points)} points, got {len(shares)}")
    _check_numbers(shares, "shares")
    secrets = np.zeros(shares.shape[1:], np.uint64)
    _weigh(shares, to_words(_at_zero(points), 2), secrets)
    return secrets


def share_bytes(secret: bytes, points: Sequence[int], threshold: int) -> list[bytes]:
    """Share a byte string as in `make_shares`; every share has `share_length` bytes."""
    cut = [int.from_bytes(secret[i : i + _PIECE], "little") for i in range(0, len(secret), _PIECE)]
    shares = make_shares(to_words(cut, 2), points, threshold)
    return [share.astype("<u8").tobytes() for share in shares]


def open_bytes(points: Sequence[int], shares: Sequence[Sequence[bytes]], length: int) -> list[bytes]:
    """Return the byte strings of `length` behind shares from `share_bytes`, given by holder and string.

    Raises
    ------
    CryptoError
        As in `open_shares`, when a share has another length, or the shares belong to no string of this length.
    """
    width = share_length(length)
    if any(len(share) != width for held in shares for share in held):
        raise CryptoError(f"expected shares of {width} bytes, got others")
    words = np.frombuffer(b"".join(share for held in shares for share in held), np.dtype("<u8")).astype(np.uint64)
    opened = open_shares(points, words.reshape(len(shares), -1, 2))
    sizes = [min(_PIECE, length - start) for start in range(0, length, _PIECE)]
    numbers = from_words(opened)
    try:
        return [
            b"".join(
                number.to_bytes(size, "little") for number, size in zip(numbers[i : i + len(sizes)], sizes, strict=True)
            )
            for i in range(0, len(numbers), len(sizes))
        ]
    except OverflowError:
        raise CryptoError("expected shares of one string, got shares that do not belong together") from None


def share_length(length: int) -> int:
    """Return how many bytes a share of a `length`-byte string has."""
    return -(-length // _PIECE) * _WIDTH


def _at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange's factors: the value at 0 of the polynomial that is 1 at one point and 0 at the others."""
    factors = []
    for own in points:
        above, below = 1, 1
        for other in points:
            if other != own:
                above, below = above * other % P, below * (other - own) % P
        factors.append(above * pow(below, -1, P) % P)
    return factors


def _check_points(points: Sequence[int]) -> None:
    if not points or not all(0 < point < P for point in points):
        raise CryptoError("expected one or more points from 1 to p - 1 (the secret is at 0), got others")
    if len(set(points)) != len(points):
        raise CryptoError(f"expected distinct points, got {len(points) - len(set(points))} repeated")


def _check_numbers(numbers: Words, what: str) -> None:
    if numbers.dtype != np.uint64 or numbers.shape[-1:] != (2,):
        raise CryptoError(f"expected uint64 (..., 2) {what}, got {numbers.dtype} {numbers.shape}")
    high, low = numbers[..., 1], numbers[..., 0]
    if ((high > _TOP) | ((high == _TOP) & (low == ~_ZERO))).any():
        raise CryptoError(f"expected {what} below 2^127 - 1, got larger ones")


@kernel
def _add(a0: np.uint64, a1: np.uint64, b0: np.uint64, b1: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return a + b mod p for numbers up to p: 2^127 = 1, so the bit above 127 is added at the bottom."""
    low = a0 + b0
    high = a1 + b1 + (_ONE if low < a0 else _ZERO)
    over = high >> _LAST
    high &= _TOP
    low += over
    if low < over:
        high += _ONE
    if high == _TOP and low == ~_ZERO:
        return _ZERO, _ZERO
    return low, high


@kernel
def _multiply(a0: np.uint64, a1: np.uint64, b0: np.uint64, b1: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return a b mod p: the 254-bit product's upper 127 bits are added to its lower ones."""
    r0, carry = multiply_add(a0, b0, _ZERO, _ZERO)
    r1, upper = multiply_add(a0, b1, carry, _ZERO)
    r1, carry = multiply_add(a1, b0, r1, _ZERO)
    r2, r3 = multiply_add(a1, b1, upper, carry)
    return _add(r0, r1 & _TOP, (r1 >> _LAST) | (r2 << _ONE), (r2 >> _LAST) | (r3 << _ONE))


@kernel
def _evaluate(coefficients: Words, points: Words, out: Words) -> None:
    """Evaluate polynomials at points by Horner's rule: (t, m, 2), (n, 2) -> (n, m, 2)."""
    for i in range(points.shape[0]):
        for j in range(coefficients.shape[1]):
            low, high = _ZERO, _ZERO
            for k in range(coefficients.shape[0] - 1, -1, -1):
                low, high = _multiply(low, high, points[i, 0], points[i, 1])
                low, high = _add(low, high, coefficients[k, j, 0], coefficients[k, j, 1])
            out[i, j, 0], out[i, j, 1] = low, high


@kernel
def _weigh(shares: Words, factors: Words, out: Words) -> None:
    """Add up shares times factors: (n, m, 2), (n, 2) -> (m, 2)."""
    for i in range(shares.shape[0]):
        for j in range(shares.shape[1]):
            low, high = _multiply(shares[i, j, 0], shares[i, j, 1], factors[i, 0], factors[i, 1])
            out[j, 0], out[j, 1] = _add(out[j, 0], out[j, 1], low, high)
