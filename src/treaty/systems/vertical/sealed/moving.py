"""Shares that pass from one passive party to the next, by way of the active party and hidden from it.

Two passive parties share a seed from which each draws the same masks: one subtracts a mask from its shares and sends
the rest to the active party, which adds it to its own; the mask is then the other passive party's share. An active
party and a passive one that collude learn what passes between them: the best fraction so far, at every node.

The active party carries the public keys that seeds are made from, too. Each is signed with the key of its owner's
certificate, for this job and system, so that the active party cannot put its own in their place; it can bring one of an
earlier run, whose secret nobody has any more. Between threads of one process there are no certificates, and nobody to
deceive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.crypto.aggregation.key_agreement import agree_with
from treaty.crypto.aggregation.masks import length_prefixed
from treaty.crypto.keystream import Keystream
from treaty.crypto.wide import Wide, subtract
from treaty.errors import CryptoError
from treaty.messaging.party import Party
from treaty.systems.system import Vouching


class MovingKey:
    """A passive party's key for moving shares, new for every training."""

    def __init__(self, party: Party, vouching: Vouching) -> None:
        self._party, self._vouching, self._secret = party, vouching, X25519PrivateKey.generate()
        self._seeds: dict[str, bytes] = {}
        self._drawn: dict[str, int] = {}

    def signed(self) -> tuple[bytes, bytes]:
        """Return what the other passive parties need: the public key, and a signature on it."""
        key = self._secret.public_key().public_bytes_raw()
        return key, self._vouching.vouch(self._content(self._party.name, key))

    def meet(self, signed: Mapping[str, tuple[bytes, bytes]]) -> None:
        """Derive a seed with each owner of these public keys; CryptoError for what is none, or not its owner's."""
        for name, (key, signature) in signed.items():
            if not self._vouching.check(name, signature, self._content(name, key)):
                raise CryptoError(
                    f"expected a key signed by {name} with the key of its certificate, got no such signature"
                )
        keys = {name: key for name, (key, _) in signed.items()}
        self._seeds = agree_with(self._secret, keys, "sealed sums", self._party.name)
        self._drawn = dict.fromkeys(keys, 0)

    @property
    def others(self) -> frozenset[str]:
        """The passive parties met."""
        return frozenset(self._seeds)

    def _content(self, name: str, key: bytes) -> bytes:
        return length_prefixed("treaty key for moved shares", self._party.job, self._party.protocol, name, key)

    def mask(self, other: str, shape: tuple[int, int, int]) -> Wide:
        """Return the next mask of what another passive party moves to this one, uniform uint64 of this shape."""
        return self._next(other, self._party.name, shape)

    def without_mask(self, other: str, shares: Wide) -> Wide:
        """Return shares, which move to another passive party, less the next mask."""
        return subtract(shares, self._next(other, other, (len(shares), *shares.shape[1:])))

    def _next(self, other: str, receiver: str, shape: tuple[int, int, int]) -> Wide:
        # the active party says who moves shares to whom: two that move theirs to each other must not have one mask
        number, self._drawn[other] = self._drawn[other], self._drawn[other] + 1
        key = hashlib.sha256(self._seeds[other] + number.to_bytes(8, "little") + receiver.encode()).digest()
        return np.frombuffer(Keystream(key).raw(8 * int(np.prod(shape))), "<u8").astype(np.uint64).reshape(shape)
