"""Shares that pass from one passive party to the next, by way of the active party and hidden from it.

Two passive parties share a seed from which each draws the same masks: one subtracts a mask from its shares and sends
the rest to the active party, which adds it to its own; the mask is then the other passive party's share. An active
party and a passive one that collude learn what passes between them: the best fraction so far, at every node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.crypto.aggregation.key_agreement import agree_with
from treaty.crypto.keystream import Keystream
from treaty.crypto.wide import Wide, subtract


class MovingKey:
    """A passive party's key for moving shares, new for every job."""

    def __init__(self, name: str) -> None:
        self._name, self._secret = name, X25519PrivateKey.generate()
        self._seeds: dict[str, bytes] = {}
        self._drawn: dict[str, int] = {}

    @property
    def public(self) -> bytes:
        """What the other passive parties need."""
        return self._secret.public_key().public_bytes_raw()

    def meet(self, keys: Mapping[str, bytes]) -> None:
        """Derive a seed with each owner of these public keys; CryptoError for what is none."""
        self._seeds = agree_with(self._secret, keys, "sealed sums", self._name)
        self._drawn = dict.fromkeys(keys, 0)

    @property
    def others(self) -> frozenset[str]:
        """The passive parties met."""
        return frozenset(self._seeds)

    def mask(self, other: str, shape: tuple[int, int, int]) -> Wide:
        """Return the next mask shared with another passive party, uniform uint64 of this shape."""
        number, self._drawn[other] = self._drawn[other], self._drawn[other] + 1
        key = hashlib.sha256(self._seeds[other] + number.to_bytes(8, "little")).digest()
        return np.frombuffer(Keystream(key).raw(8 * int(np.prod(shape))), "<u8").astype(np.uint64).reshape(shape)

    def without_mask(self, other: str, shares: Wide) -> Wide:
        """Return shares less the next mask shared with another passive party."""
        return subtract(shares, self.mask(other, (len(shares), *shares.shape[1:])))
