"""Lists of ids as their partners see them: points under secret keys, in secret orders, padded to a bucket.

The arithmetic of `alignment.roles`, where messages and the order of steps are.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.psi import hashing, ristretto
from treaty.data.ids import Ids
from treaty.data.large import WORDS, Scratch, records
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Integers, pieces
from treaty.messaging.messages import Array, view

Result = TypeVar("Result")
SMALLEST, LARGEST = 1 << 10, 1 << 28
"""Sizes of lists, in points."""

_DRAWN = np.dtype([("drawn", np.uint64), ("number", np.int32)])
_LEAF = np.dtype([("node", np.int32), ("leaf", np.uint64, (2,))])
_HASHED = np.dtype([*_DRAWN.descr, ("uniform", np.uint8, (64,))])


def bucket(count: int) -> int:
    """Round a set's size up to a multiple of an eighth of the power of two below it, at least 1024.

    Partners see the bucket only: a size to within an eighth. That costs an eighth more work at most, a sixteenth on
    average. Powers of two would hide little more (one in two instead of eight buckets) for up to twice the work.
    """
    step = max(SMALLEST, 1 << max(count - 1, 1).bit_length() - 1) // 8
    return max(SMALLEST, -(-count // step) * step)


class OwnList:
    """A party's ids as the other sees them: under a key of this run, padded to the bucket, in a secret order.

    A list kept in a file is hashed when it is made, in the order of the ids, as the ids of a batch lie all over it.
    """

    def __init__(self, ids: Ids, domain: bytes, threads: int, scratch: Scratch | None = None) -> None:
        scratch = scratch or Scratch()
        self.size = bucket(len(ids))
        self.threads = threads
        self._ids = ids
        self._domain = domain
        self._key = ristretto.random_scalar()
        self._hashed = self.size > scratch.in_memory
        # PartySpec k of the list holds the id whose number is there; from len(ids) on it is a random point.
        self._list = scratch.sorted(_HASHED if self._hashed else _DRAWN, "drawn", WORDS, self.size)
        stream = Keystream()
        for part in pieces(self.size, scratch.part):
            number = np.arange(part.start, part.stop)
            columns = {"drawn": stream.bits(64, len(number))[:, 0], "number": number}
            if self._hashed:
                columns["uniform"] = self._uniform(number)
            self._list.add(records(self._list.dtype, **columns))

    def numbers(self, part: slice) -> Integers:
        """Return the numbers of the ids at some places, int64 (n,); a number beyond the ids is padding."""
        return self._list[part]["number"].astype(np.int64)

    def blinded(self, part: slice) -> NDArray[np.uint8]:
        """Return H(id)^key of some places, uint8 (n, 32); padding takes the same steps, and so the same time."""
        rows = self._list[part]
        uniform = rows["uniform"].copy() if self._hashed else self._uniform(rows["number"].astype(np.int64))
        return ristretto.multiply(ristretto.from_uniform(uniform, self.threads), self._key, self.threads)

    def _uniform(self, number: Integers) -> NDArray[np.uint8]:
        """Hash ids to uniform bytes, uint8 (n, 64); padding gets random ones."""
        real = number < len(self._ids)
        if self._hashed:  # ascending
            kept = number[real] if real.any() else np.zeros(1, np.int64)
            data, offsets = self._ids.strings(int(kept[0]), int(kept[-1]) + 1)
            strings = np.where(real, number - kept[0], 0)
        else:
            data, offsets = self._ids.data, self._ids.offsets
            strings = np.where(real, number, 0)
        uniform = hashing.expand(data, offsets, strings, self._domain, self.threads)
        padding = np.frombuffer(secrets.token_bytes(uniform[0].nbytes * len(uniform)), np.uint8)
        return np.where(real[:, None], uniform, padding.reshape(uniform.shape))

    def close(self) -> None:
        """Free the list's memory or file."""
        self._list.close()

    def raised(self, points: Array, part: slice, peer: str) -> NDArray[np.uint8]:
        """Return a peer's points raised to the own key, uint8 (n, 32)."""
        received = points_of(points, part, peer, "BlindedPoints")
        return valid(peer, "BlindedPoints.points", lambda: ristretto.multiply(received, self._key, self.threads))


def points_of(points: Array, part: slice, peer: str, what: str) -> NDArray[np.uint8]:
    """Check the length of a batch of points, uint8 (n, 32); `valid` checks the points."""
    length = part.stop - part.start
    return view(points, np.uint8, (length, ristretto.POINT), peer=peer, what=f"{what}.points")


def valid(peer: str, what: str, work: Callable[[], Result]) -> Result:
    """Return what `work` does with a peer's points; raise PeerProtocolError where one is no point of the group."""
    try:
        return work()
    except CryptoError as error:
        raise PeerProtocolError(peer, f"{error} - at {what} from {peer}") from None


def array_of(data: bytes) -> Array:
    """Make bytes an array of uint8."""
    return Array.of(np.frombuffer(data, np.uint8))


def bytes_of(array: Array, peer: str, what: str) -> bytes:
    """Return 32 bytes that a peer sent: a key, salt or digest."""
    return view(array, np.uint8, (32,), peer=peer, what=what).tobytes()


def committed(ids: Ids, key: bytes, threads: int, scratch: Scratch) -> NDArray[np.uint8]:
    """Commit to the set of ids as `hashing.commit` does, uint8 (NODES, 32), with some nodes in memory at a time."""
    leaves = scratch.sorted(_LEAF, "node", hashing.NODES, len(ids))
    for part in pieces(len(ids), scratch.part):
        data, offsets = ids.strings(part.start, part.stop)
        leaf = hashing.digests(data, offsets, np.arange(len(offsets) - 1), key, threads)
        leaves.add(records(_LEAF, node=leaf[:, 0] % np.uint64(hashing.NODES), leaf=leaf))
    out = hashing.commit(np.zeros((0, 2), np.uint64), key)
    for some in leaves.parts():
        nodes = np.unique(some["node"])
        out[nodes] = hashing.commit(some["leaf"], key)[nodes]
    leaves.close()
    return out


def values_of(points: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the first 16 bytes of double-encrypted points, which are kept, as words uint64 (n, 2)."""
    return from_bytes(points[:, :16])


def from_bytes(values: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Read values uint8 (n, 16) as words uint64 (n, 2), to compare and sort them."""
    return np.ascontiguousarray(values).view("<u8").astype(np.uint64, copy=False)


def to_bytes(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Write values as bytes, uint8 (n, 16)."""
    return np.ascontiguousarray(values).astype("<u8", copy=False).view(np.uint8)
