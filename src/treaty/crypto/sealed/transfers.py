"""A stock of random transfers between two parties, in both directions alike, and transfers made of it.

Each party is the sender of as many as it is the receiver of. Everything drawn from the stock is drawn by both at once,
so that rows and their numbers agree; nothing is used twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sealed.steps import Steps, take
from treaty.crypto.transfer.aes import hashed
from treaty.crypto.transfer.base import KEY
from treaty.crypto.transfer.extension import KAPPA, STEP, Receiver, Sender, chosen

_AT_ONCE = 1 << 17  # transfers that are made when the stock is empty
_FOLD = 2

Words = NDArray[np.uint64]
Bits = NDArray[np.uint8]


class Transfers:
    """The stock; made by `open_transfers`."""

    def __init__(self, sender: Sender, receiver: Receiver) -> None:
        self._sender, self._receiver = sender, receiver
        self.delta = sender.delta
        self._q, self._t, self._r = np.empty((0, 2), np.uint64), np.empty((0, 2), np.uint64), np.empty(0, np.uint8)
        self._used = self._promised = 0

    def reserve(self, count: int) -> Steps[None]:
        """Make more where fewer than `count` are left: a step, or none. The caller draws them at once.

        What others wait for, who take their steps together with this one, is theirs.
        """
        left = len(self._q) - self._promised
        if left >= count:
            return
        self._promised += count
        more = -(-max(count - left, _AT_ONCE) // STEP) * STEP
        message, bits, rows = self._receiver.extend(more)
        (came,) = take((yield [message]), (np.uint64, message.shape))
        self._q = np.concatenate([self._q, self._sender.extend(more, came)])
        self._t = np.concatenate([self._t, rows])
        self._r = np.concatenate([self._r, unpacked(bits, more)])
        self._promised -= count

    def draw(self, count: int) -> tuple[int, Words, Words, Bits]:
        """Draw transfers that were reserved: the first one's number, the sender's rows, the receiver's and its bits."""
        assert len(self._q) >= count
        first, part, rest = self._used, slice(0, count), slice(count, None)
        drawn = first, self._q[part], self._t[part], self._r[part]
        self._q, self._t, self._r = self._q[rest], self._t[rest], self._r[rest]
        self._used += count
        return drawn

    def choose(self, choices: Bits) -> Steps[tuple[int, Words, Words]]:
        """Draw a transfer for each of own choice bits, (n,), and of as many of the other party: two steps at most.

        Return the first one's number, the sender's rows under the other party's choices and the receiver's rows.
        """
        count = len(choices)
        yield from self.reserve(count)
        first, q, t, r = self.draw(count)
        flips = packed(choices ^ r)
        (came,) = take((yield [flips]), (np.uint64, flips.shape))
        return first, chosen(q, self.delta, came), t


def open_transfers() -> Steps[Transfers]:
    """Exchange base transfers in both directions: three steps."""
    receiver = Receiver(_FOLD)
    (offer,) = take((yield [receiver.offer]), (np.uint8, receiver.offer.shape))
    sender = Sender(offer, _FOLD)
    (points,) = take((yield [sender.points]), (np.uint8, sender.points.shape))
    (corrections,) = take((yield [receiver.prepare(points)]), (np.uint8, (KAPPA, 2, KEY)))
    sender.prepare(corrections)
    return Transfers(sender, receiver)


def packed(bits: Bits) -> Words:
    """Pack bits (n,) into words, the first lowest, uint64 (ceil(n / 64),)."""
    padded = np.zeros(-(-len(bits) // 64) * 64, np.uint8)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def unpacked(words: Words, count: int) -> Bits:
    """Return the first `count` bits of words, uint8 (count,)."""
    return np.unpackbits(words.astype("<u8", copy=False).view(np.uint8), count=count, bitorder="little")


def triples(transfers: Transfers, count: int) -> tuple[Bits, Bits, Bits]:
    """Return shares of random a (n,), b (2, n) and a and b, made of reserved transfers without a message."""
    first, q, t, a = transfers.draw(count)
    zero, one, own = hashed(q, first)[:, 0], hashed(q ^ transfers.delta, first)[:, 0], hashed(t, first)[:, 0]
    b = zero ^ one
    c = (b & (np.uint64(0) - a.astype(np.uint64))) ^ own ^ zero
    return a, _two(b), _two(c)


def _two(words: Words) -> Bits:
    return np.stack([words & np.uint64(1), (words >> np.uint64(1)) & np.uint64(1)]).astype(np.uint8)
