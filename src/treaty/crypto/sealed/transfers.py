"""A stock of random transfers between two parties, in both directions alike, and transfers made of it.

Each party is the sender of as many as it is the receiver of. Everything drawn from the stock is drawn by both at once,
so that rows and their numbers agree; nothing is used twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sealed.quads import Quads, Steps, take
from treaty.crypto.transfer.base import KEY
from treaty.crypto.transfer.bits import packed, unpacked
from treaty.crypto.transfer.extension import KAPPA, STEP, Receiver, Sender, chosen, random_pairs

_FEW, _MANY = 1 << 15, 1 << 19  # transfers that are made when the stock is empty, twice as many each time
_FOLD = 4  # 31 bits travel for each transfer, for as much time as 63 at 2; 8 takes five times as long

Words = NDArray[np.uint64]
Bits = NDArray[np.uint8]
_Piece = tuple[Words, Words, Bits]

_NOTHING: _Piece = np.empty((0, 2), np.uint64), np.empty((0, 2), np.uint64), np.empty(0, np.uint8)


class Transfers:
    """The stock; made by `open_transfers`."""

    def __init__(self, sender: Sender, receiver: Receiver) -> None:
        self.sender, self.receiver = sender, receiver
        self._stock: list[_Piece] = []
        self._left = self._used = self._promised = 0
        self._next = _FEW
        self.quads = Quads()

    def reserve(self, count: int) -> Steps[None]:
        """Make more where fewer than `count` are left: a step, or none. The caller draws them at once.

        What others wait for, who take their steps together with this one, is theirs.
        """
        left = self._left - self._promised
        if left >= count:
            return
        self._promised += count
        more = -(-max(count - left, self._next) // STEP) * STEP
        self._next = min(2 * self._next, _MANY)
        message, bits, rows = self.receiver.extend(more)
        (came,) = take((yield [message]), (np.uint64, message.shape))
        self._stock.append((self.sender.extend(more, came), rows, unpacked(bits, more)))
        self._left += more
        self._promised -= count

    def drawn(self, count: int, choices: Bits | None = None) -> Drawn:
        """Draw transfers that were reserved, for own choice bits, (count,), or for random ones."""
        assert self._left >= count
        first, wanted, parts = self._used, count, [_NOTHING]
        while wanted:
            piece = self._stock[0]
            taken = min(wanted, len(piece[0]))
            parts.append(_part(piece, slice(0, taken)))
            self._stock[:1] = [_part(piece, slice(taken, None))] if taken < len(piece[0]) else []
            wanted -= taken
        self._left, self._used = self._left - count, first + count
        q, t, r = parts[1] if len(parts) == 2 else (np.concatenate(of) for of in zip(*parts, strict=True))
        return Drawn(first, q, t, r, np.zeros_like(r) if choices is None else choices ^ r, self.sender, self.receiver)

    def draw_for(self, choices: Bits) -> Steps[Drawn]:
        """Draw a transfer for each of own choice bits, (n,), and of as many of the other party; a step, or none."""
        yield from self.reserve(len(choices))
        return self.drawn(len(choices), choices)

    def choose(self, choices: Bits) -> Steps[tuple[int, Words, Words]]:
        """Draw transfers whose sender knows them under the receiver's choice bits, (n,): two steps at most.

        Return the first one's number, the sender's rows under the other party's choices and the receiver's rows.
        """
        drawn = yield from self.draw_for(choices)
        flips = packed(drawn.flips)
        (came,) = take((yield [flips]), (np.uint64, flips.shape))
        return drawn.first, chosen(drawn.q, self.sender.delta, came), drawn.t

    def choose_alone(self, choices: Bits) -> tuple[Words, Words, Words]:
        """Make transfers in one direction, as the receiver of own choice bits, (n,), beside the stock.

        Return the message and the choices under a mask, both for the sender's `accept_alone`, and own rows, (n, 2).
        """
        count = len(choices)
        message, random, rows = self.receiver.extend(-(-count // STEP) * STEP)
        return message, packed(choices ^ unpacked(random, count)), rows[:count]

    def accept_alone(self, message: Words, flips: Words, count: int) -> Words:
        """Return the sender's rows of what the receiver's `choose_alone` has made, under its choices, (count, 2)."""
        rows = self.sender.extend(-(-count // STEP) * STEP, message)[:count]
        return chosen(rows, self.sender.delta, flips)

    def numbers(self, count: int) -> int:
        """Return the first of `count` tweaks that no transfer of either end has, nor will have."""
        first, self._used = self._used, self._used + count
        return first


@dataclass(frozen=True, slots=True)
class Drawn:
    """Transfers drawn for n choice bits of either party.

    `first` is the number of the first; `q`, (n, 2), are the sender's rows, `t`, (n, 2), the receiver's, `random`, (n,),
    its bits, and `flips`, (n,), where these differ from its choices. `sender` and `receiver` are this party's ends.
    """

    first: int
    q: Words
    t: Words
    random: Bits
    flips: Bits
    sender: Sender
    receiver: Receiver

    def only(self, part: slice) -> Drawn:
        """Return some of them; the part has a start."""
        rows = self.q[part], self.t[part], self.random[part], self.flips[part]
        return Drawn(self.first + part.start, *rows, self.sender, self.receiver)


def _part(piece: _Piece, rows: slice) -> _Piece:
    return piece[0][rows], piece[1][rows], piece[2][rows]


def open_transfers() -> Steps[Transfers]:
    """Exchange base transfers in both directions: three steps."""
    receiver = Receiver(_FOLD)
    (offer,) = take((yield [receiver.offer]), (np.uint8, receiver.offer.shape))
    sender = Sender(offer, _FOLD)
    (points,) = take((yield [sender.points]), (np.uint8, sender.points.shape))
    (corrections,) = take((yield [receiver.prepare(points)]), (np.uint8, (KAPPA, 2, KEY)))
    sender.prepare(corrections)
    return Transfers(sender, receiver)


def triples(transfers: Transfers, count: int) -> tuple[Bits, Bits, Bits]:
    """Return shares of random a (n,), b (2, n) and a and b, made of reserved transfers without a message."""
    drawn = transfers.drawn(count)
    zero, one = (pad[:, 0] for pad in random_pairs(drawn.sender, drawn.q, drawn.first))
    own, a = drawn.receiver.hash.rows(drawn.t, drawn.first)[:, 0], drawn.random
    b = zero ^ one
    c = (b & (np.uint64(0) - a.astype(np.uint64))) ^ own ^ zero
    return a, _two(b), _two(c)


def _two(words: Words) -> Bits:
    return np.stack([words & np.uint64(1), (words >> np.uint64(1)) & np.uint64(1)]).astype(np.uint8)
