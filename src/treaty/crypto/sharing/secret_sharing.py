"""Shamir's secret sharing over the integers modulo p = 2^127 - 1, many secrets at a time.

Each secret is the value at 0 of a polynomial of its own, of degree t - 1 with otherwise uniform coefficients; a
holder's share is the value at its point. Any t shares give the secret (Lagrange at 0); t - 1 are independent of it,
whatever the computing power. A wrong share goes unnoticed here and gives another secret. Where the right one can be
recognised (a secret key by its public key), the caller does that.

Numbers are two little-endian uint64 words, below p. Secret bytes are cut into 15-byte pieces.

References: Shamir, How to Share a Secret, CACM 1979.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treaty.crypto.additive.montgomery import from_words, to_words
from treaty.crypto.sharing import shamir_field as field
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import CryptoError

_PIECE = 15  # bytes of a secret in one field element
_WIDTH = 16  # bytes of a field element


def make_shares(secrets: Words, points: Sequence[int], threshold: int, key: bytes | None = None) -> Words:
    """Share secrets, uint64 (m, 2) below p, among n holders: (n, m, 2), any `threshold` (1 to n) of which give them.

    `points` are the holders', distinct, from 1 to p - 1. `key` is of the randomness, as of `Keystream`: it must serve
    these secrets alone. CryptoError if anything is out of range or a point is
    repeated.
    """
    field.check_points(points)
    if not 1 <= threshold <= len(points):
        raise CryptoError(f"expected a threshold from 1 to {len(points)} shares, got {threshold}")
    field.check_numbers(secrets, "secrets")
    coefficients = field.random_numbers(threshold - 1, len(secrets), key=key)
    return field.evaluate(np.concatenate([secrets[None], coefficients]), points)


def open_shares(points: Sequence[int], shares: Words) -> Words:
    """Return the secrets (m, 2) behind shares (n, m, 2), in the order of `points`, at least as many as the threshold.

    CryptoError for a bad point or a share that is not below p; fewer shares than the threshold give a wrong secret.
    """
    field.check_points(points)
    if len(shares) != len(points):
        raise CryptoError(f"expected a share for each of {len(points)} points, got {len(shares)}")
    field.check_numbers(shares, "shares")
    opened: Words = field.combine(shares, field.lagrange_weights(points)[None])[0]
    return opened


def share_bytes(secret: bytes, points: Sequence[int], threshold: int) -> list[bytes]:
    """Share a byte string as `make_shares` does; every share has `share_length` bytes."""
    cut = [int.from_bytes(secret[i : i + _PIECE], "little") for i in range(0, len(secret), _PIECE)]
    shares = make_shares(to_words(cut, 2), points, threshold)
    return [share.astype("<u8").tobytes() for share in shares]


def open_bytes(points: Sequence[int], shares: Sequence[Sequence[bytes]], length: int) -> list[bytes]:
    """Return the byte strings of `length` behind shares from `share_bytes`, given by holder and string.

    CryptoError as in `open_shares`, for shares of another length, and for shares that belong to no string of this
    length.
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
    """Return the bytes in a share of a `length`-byte string."""
    return -(-length // _PIECE) * _WIDTH
