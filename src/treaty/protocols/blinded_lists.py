"""Lists of ids as their partners see them: points under secret keys, in secret orders, padded to a bucket.

The arithmetic of `alignment`; messages and the order of steps are there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import hashing, ristretto
from treaty.crypto.keystream import Keystream
from treaty.data.ids import Ids
from treaty.errors import CryptoError, PeerProtocolError
from treaty.messaging.messages import Array, view

Result = TypeVar("Result")
SMALLEST, LARGEST = 1 << 10, 1 << 28
"""Sizes of lists, in points."""


def bucket(count: int) -> int:
    """Round a set's size up to a multiple of an eighth of the power of two below it, at least 1024.

    Partners see the bucket only: a size to within an eighth. That costs an eighth more work at most, a sixteenth on
    average. Powers of two would hide little more (one in two instead of eight buckets) for up to twice the work.
    """
    step = max(SMALLEST, 1 << max(count - 1, 1).bit_length() - 1) // 8
    return max(SMALLEST, -(-count // step) * step)


class OwnList:
    """A party's ids as the other sees them: under a key of this run, padded to the bucket, in a secret order."""

    def __init__(self, ids: Ids, domain: bytes, threads: int) -> None:
        self.size = bucket(len(ids))
        # Place k of the list holds id order[k]; from len(ids) on it is a random point.
        self.order = np.argsort(Keystream().bits(64, self.size)[:, 0]).astype(np.int32)
        self.threads = threads
        self._ids = ids
        self._domain = domain
        self._key = ristretto.random_scalar()

    def blinded(self, part: slice) -> NDArray[np.uint8]:
        """Return H(id)^key of some places, uint8 (n, 32); padding takes the same way, so it takes the same time."""
        number = self.order[part].astype(np.int64)
        real = number < len(self._ids)
        strings = np.where(real, number, 0)
        uniform = hashing.expand(self._ids.data, self._ids.offsets, strings, self._domain, self.threads)
        padding = np.frombuffer(secrets.token_bytes(uniform[0].nbytes * len(uniform)), np.uint8)
        uniform = np.where(real[:, None], uniform, padding.reshape(uniform.shape))
        return ristretto.multiply(ristretto.from_uniform(uniform, self.threads), self._key, self.threads)

    def raised(self, points: Array, part: slice, peer: str) -> NDArray[np.uint8]:
        """Return a peer's points to the power of the own key, uint8 (n, 32)."""
        received = points_of(points, part, peer, "Blinded")
        return valid(peer, "Blinded", lambda: ristretto.multiply(received, self._key, self.threads))


def points_of(points: Array, part: slice, peer: str, what: str) -> NDArray[np.uint8]:
    """Check the length of a batch of points, uint8 (n, 32); `valid` checks the points."""
    length = part.stop - part.start
    return view(points, np.uint8, (length, ristretto.POINT), peer=peer, what=f"{what}.points")


def valid(peer: str, what: str, work: Callable[[], Result]) -> Result:
    """Do something with a peer's points; it is to blame where one is none."""
    try:
        return work()
    except CryptoError as error:
        raise PeerProtocolError(peer, f"{error} - at {what}.points from {peer}") from None


def in_both(
    left: NDArray[np.uint64], right: NDArray[np.uint64], peer: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places in both lists, uint64 (n, 2) and (m, 2), of the values that are in both.

    The lists are cut by a few bits of the values first, so that sorting needs little memory beside them.
    """
    found: list[NDArray[np.int64]] = []
    parts = 1 + ((len(left) + len(right)) >> 18)
    for number in range(parts):
        a, b = (
            np.flatnonzero((values[:, 0] >> np.uint64(32)) % np.uint64(parts) == number) for values in (left, right)
        )
        both = np.concatenate([left[a], right[b]])
        order = np.lexsort((both[:, 1], both[:, 0]))  # keeps equal values in order, those of `left` first
        both = both[order]
        equal = np.flatnonzero((both[1:] == both[:-1]).all(axis=1))
        first, second = order[equal], order[equal + 1]
        if np.any(first >= len(a)) or np.any(second < len(a)):
            raise PeerProtocolError(peer, f"expected a list of different points, got one twice - from {peer}")
        found.append(np.stack([a[first], b[second - len(a)]]))
    pairs = np.concatenate(found, axis=1)
    return pairs[0], pairs[1]


def values_of(points: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return what is kept of double-encrypted points, uint64 (n, 2): their first 16 bytes."""
    return from_bytes(points[:, :16])


def from_bytes(values: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Read values uint8 (n, 16) as words, to be compared and sorted."""
    return np.ascontiguousarray(values).view("<u8").astype(np.uint64, copy=False)


def to_bytes(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Write values as bytes, uint8 (n, 16)."""
    return np.ascontiguousarray(values).astype("<u8", copy=False).view(np.uint8)
