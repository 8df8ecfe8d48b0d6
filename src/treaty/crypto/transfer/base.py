"""Base transfers: a sender gets pairs of keys, a receiver one key of each pair, by choices that the sender never sees.

Chou and Orlandi, "The Simplest Protocol for Oblivious Transfer", LATINCRYPT 2015, over ristretto255, whose order is
prime. Three steps: `offer` (sender), `choose` (receiver), `pairs` (sender); what the first two return second goes to
the other party.

Assumptions: computational Diffie-Hellman in ristretto255 (about 128 bits), SHA-256 as a random oracle, parties that are
honest but curious. The receiver's choices are hidden whatever the sender computes: its points are uniform either way.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.psi import ristretto

KEY = 16
"""Bytes of a key."""

Bytes = NDArray[np.uint8]


def offer() -> tuple[Bytes, Bytes]:
    """Draw the sender's secret scalar, uint8 (32,), to keep, and its point, (32,), to send."""
    secret = ristretto.random_scalar()
    return secret, ristretto.multiples(ristretto.GENERATOR, secret[None])[0]


def choose(offered: Bytes, choices: NDArray[np.bool_]) -> tuple[Bytes, Bytes]:
    """Choose one key of each of n pairs: return the keys, uint8 (n, 16), to keep, and points, (n, 32), to send.

    `offered` is the sender's point, (32,). Raises CryptoError where it is the identity or no point. The choices, (n,),
    change neither the instructions that run nor their order.
    """
    scalars = np.stack([ristretto.random_scalar() for _ in choices])
    shared = ristretto.multiples(offered, scalars)
    points = ristretto.multiples(ristretto.GENERATOR, scalars)
    mask = -choices.astype(np.uint8)[:, None]
    points ^= mask & (points ^ ristretto.shifted(points, offered))
    return _keys(offered, points, shared), points


def pairs(secret: Bytes, offered: Bytes, points: Bytes) -> Bytes:
    """Return both keys of each pair, uint8 (n, 2, 16), after the receiver's points, (n, 32), have come.

    Raises CryptoError where one of these is the identity or no point.
    """
    shared = ristretto.multiply(points, secret)
    other = ristretto.shifted(shared, ristretto.multiples(offered, secret[None])[0], back=True)
    return np.stack([_keys(offered, points, shared), _keys(offered, points, other)], axis=1)


def _keys(offered: Bytes, points: Bytes, shared: Bytes) -> Bytes:
    """Hash shared points to keys; number, offer and answer are hashed with each, or keys of two runs could be equal."""
    domain = b"treaty base transfer\0" + offered.tobytes()
    rows = zip(points, shared, strict=True)
    hashed = (
        hashlib.sha256(domain + number.to_bytes(4, "little") + point.tobytes() + common.tobytes()).digest()[:KEY]
        for number, (point, common) in enumerate(rows)
    )
    return np.frombuffer(b"".join(hashed), np.uint8).reshape(-1, KEY)
