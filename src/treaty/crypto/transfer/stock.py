"""What two parties compute with transfers alike: steps taken together, a stock of transfers, and sides of rows by path.

*Steps*: at each, both parties send arrays at the same time, and continue with the other's. A computation is a
generator, the same at both ends: it yields what its party sends and is given what the other has sent.

*The stock* (`Transfers`): each party is the sender of as many random transfers as it is the receiver of. Everything
drawn from it is drawn by both at once, so that rows and their numbers agree; nothing is used twice.

*Sides* (`Paths`): one party knows each row's node, the other the sides at all nodes. A node's path has a bit for each
level above it. For each row and bit the first party, the receiver, gets one correlated transfer, q = t xor bit Delta.
Rows of transfers are joined level by level, as x r + new in GF(2^128), so that the sender's joined row less the
receiver's is the path, as an element of the field, times Delta. The sender has the pad H(q + p Delta) of every path p,
the receiver that of its row's own path alone, H(t): of a row it reads the side at one node at most, whatever it chose,
and the sender does not learn at which. Joined rows serve all levels of a tree, each level under tweaks of its own. A
table has a bit for each row and each node that the sender splits, however long the paths are.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer import extension
from treaty.errors import CryptoError
from treaty.machine.arrays import Words, pieces

Result = TypeVar("Result")
Arrays = list[NDArray[Any]]
Steps = Generator[Arrays, Arrays, Result]


def together(*protocols: Steps[Any]) -> Steps[list[Any]]:
    """Run independent protocols at once, each step of all of them in one message; return their results."""
    results: list[Any] = [None] * len(protocols)
    waiting: dict[int, Arrays] = {}
    given: dict[int, Arrays | None] = {k: None for k in range(len(protocols))}
    while given:
        for k, arrays in given.items():
            try:
                waiting[k] = next(protocols[k]) if arrays is None else protocols[k].send(arrays)
            except StopIteration as stop:
                results[k] = stop.value
        if not waiting:
            break
        # the first array says how many arrays each protocol sends
        sizes = np.array([len(waiting.get(k, ())) for k in range(len(protocols))], np.int64)
        came = yield [sizes, *(array for k in sorted(waiting) for array in waiting[k])]
        given, at = {}, 1
        fine = bool(came) and came[0].dtype == np.int64 and came[0].shape == (len(protocols),)
        counts = came[0].tolist() if fine else []
        if not fine or min(counts) < 0 or sum(counts) != len(came) - 1:
            raise CryptoError("expected a step of as many protocols as this end's")
        for k in sorted(waiting):
            given[k] = came[at : at + counts[k]]
            at += counts[k]
        waiting = {}
    return results


def take(came: Arrays, *expected: tuple[type[np.generic], tuple[int, ...]]) -> Arrays:
    """Return what the other party sent; CryptoError unless element types and shapes are those expected."""
    fine = len(came) == len(expected) and all(
        array.dtype == kind and array.shape == shape for array, (kind, shape) in zip(came, expected, strict=True)
    )
    if not fine:
        what = [(str(array.dtype), array.shape) for array in came]
        raise CryptoError(f"expected arrays {[(kind.__name__, shape) for kind, shape in expected]}, got {what}")
    return came


_FEW, _MANY = 1 << 15, 1 << 19  # transfers that are made when the stock is empty, twice as many each time

Bits = NDArray[np.uint8]
_Piece = tuple[Words, Words, Bits]

_NOTHING: _Piece = np.empty((0, 2), np.uint64), np.empty((0, 2), np.uint64), np.empty(0, np.uint8)


@dataclass(slots=True)
class QuadStock:
    """Quads that were made of transfers and are left to draw (`comparison.draw_quads`)."""

    words: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    next: int = 1 << 12  # how many are made when there are none, twice as many each time
    promised: int = 0


class Transfers:
    """The stock, made by `open_transfers`; `used` is the number of the next transfer."""

    def __init__(self, sender: extension.Sender, receiver: extension.Receiver) -> None:
        self.sender, self.receiver = sender, receiver
        self._stock: list[_Piece] = []
        self._left = self.used = self._promised = 0
        self._next = _FEW
        self.quads = QuadStock()

    def reserve(self, count: int) -> Steps[None]:
        """Make more where fewer than `count` are left: a step, or none. The caller draws them at once."""
        # less what other protocols wait for that run together with this one
        left = self._left - self._promised
        if left >= count:
            return
        self._promised += count
        more = -(-max(count - left, self._next) // extension.STEP) * extension.STEP
        self._next = min(2 * self._next, _MANY)
        message, bits, rows = self.receiver.extend(more)
        (came,) = take((yield [message]), (np.uint64, message.shape))
        # q of the own end as the sender, t and its bits as the receiver: rows of both directions have the same number
        self._stock.append((self.sender.extend(more, came), rows, extension.unpacked(bits, more)))
        self._left += more
        self._promised -= count

    def drawn(self, count: int, choices: Bits | None = None) -> Drawn:
        """Draw transfers that were reserved, for own choice bits, (count,), or for random ones."""
        assert self._left >= count
        first, wanted, parts = self.used, count, [_NOTHING]
        while wanted:
            piece = self._stock[0]
            taken = min(wanted, len(piece[0]))
            parts.append(_part(piece, slice(0, taken)))
            self._stock[:1] = [_part(piece, slice(taken, None))] if taken < len(piece[0]) else []
            wanted -= taken
        self._left, self.used = self._left - count, first + count
        q, t, r = parts[1] if len(parts) == 2 else (np.concatenate(of) for of in zip(*parts, strict=True))
        return Drawn(first, q, t, r, np.zeros_like(r) if choices is None else choices ^ r, self.sender, self.receiver)

    def draw_for(self, choices: Bits) -> Steps[Drawn]:
        """Draw a transfer for each own choice bit, (n,), and as many for the other party; a step, or none."""
        yield from self.reserve(len(choices))
        return self.drawn(len(choices), choices)

    def choose(self, choices: Bits) -> Steps[tuple[int, Words, Words]]:
        """Draw transfers for chosen instead of random bits, (n,): two steps at most.

        Return the first one's number, the sender's rows under the other party's choices and the receiver's rows.
        """
        drawn = yield from self.draw_for(choices)
        flips = extension.packed(drawn.flips)
        (came,) = take((yield [flips]), (np.uint64, flips.shape))
        return drawn.first, extension.chosen(drawn.q, self.sender.delta, came), drawn.t


@dataclass(frozen=True, slots=True)
class Drawn:
    """Transfers drawn for n choice bits of either party; `sender` and `receiver` are this party's ends."""

    first: int  # number of the first
    q: Words  # (n, 2), the sender's rows
    t: Words  # (n, 2), the receiver's
    random: Bits  # (n,), its bits
    flips: Bits  # (n,), where these differ from its choices
    sender: extension.Sender
    receiver: extension.Receiver

    def only(self, part: slice) -> Drawn:
        rows = self.q[part], self.t[part], self.random[part], self.flips[part]
        return Drawn(self.first + part.start, *rows, self.sender, self.receiver)


def _part(piece: _Piece, rows: slice) -> _Piece:
    return piece[0][rows], piece[1][rows], piece[2][rows]


def open_transfers() -> Steps[Transfers]:
    """Exchange base transfers in both directions: three steps."""
    receiver = extension.Receiver()
    (offer,) = take((yield [receiver.offer]), (np.uint8, receiver.offer.shape))
    sender = extension.Sender(offer)
    (points,) = take((yield [sender.points]), (np.uint8, sender.points.shape))
    (corrections,) = take((yield [receiver.prepare(points)]), (np.uint8, (extension.KAPPA, 2, extension.KEY)))
    sender.prepare(corrections)
    return Transfers(sender, receiver)


def triples(transfers: Transfers, count: int) -> tuple[Bits, Bits, Bits]:
    """Return shares of random a (n,), b (2, n) and a and b, made of reserved transfers without a message."""

    def two(words: Words) -> Bits:
        return np.stack([words & np.uint64(1), (words >> np.uint64(1)) & np.uint64(1)]).astype(np.uint8)

    drawn = transfers.drawn(count)
    zero, one = (pad[:, 0] for pad in extension.random_pairs(drawn.sender, drawn.q, drawn.first))
    own, a = drawn.receiver.hash.rows(drawn.t, drawn.first)[:, 0], drawn.random
    # b is the xor of the pads: with pad a of the receiver's random bit a, both have shares of a times the other's b
    b = zero ^ one
    c = (b & (np.uint64(0) - a.astype(np.uint64))) ^ own ^ zero
    return a, two(b), two(c)


_AT_ONCE = 32  # nodes whose pads are made in one pass over the rows


class Paths:
    """One end's transfers on the paths of `n_rows` rows in a tree, of which `levels` bits were transferred so far."""

    def __init__(self, transfers: Transfers, n_rows: int) -> None:
        self._transfers, self._rows, self.levels = transfers, np.zeros((n_rows, 2), np.uint64), 0

    def choose(self, bits: Bits, of: slice) -> tuple[Words, Words]:
        """Transfer the next bits of some rows as the receiver: return the message, and its choices under a mask."""
        # in one direction alone, apart from the stock
        count = len(bits)
        message, random, rows = self._transfers.receiver.extend(-(-count // extension.STEP) * extension.STEP)
        self._join(rows[:count], of)
        return message, extension.packed(bits ^ extension.unpacked(random, count))

    def accept(self, message: Words, flips: Words, of: slice) -> None:
        """Take what the receiver's `choose` has returned; CryptoError for a message of another shape."""
        count, sender = of.stop - of.start, self._transfers.sender
        rows = sender.extend(-(-count // extension.STEP) * extension.STEP, message)[:count]
        self._join(extension.chosen(rows, sender.delta, flips), of)

    def next_level(self) -> int:
        """Return the first tweak of a level's pads, one for each row; called at both ends, once a level."""
        # numbers that no transfer of either end will have
        first = self._transfers.used
        self._transfers.used += len(self._rows)
        return first

    def hide(self, sides: NDArray[np.uint8], paths: Bits, first: int, of: slice) -> NDArray[np.uint8]:
        """Return some rows' sides, packed bits uint8 (nodes, bytes), under pads of `paths`, (nodes, levels)."""
        # all rows are in the root, which has no path
        if not self.levels:
            return sides
        hidden, sender = np.empty_like(sides), self._transfers.sender
        # the pads of path p, whose oldest bit is first, are those at q + p Delta
        offsets = extension.joined((paths[:, ::-1, None].astype(np.uint64) * sender.delta).reshape(-1, 2), self.levels)
        for part in pieces(len(paths), _AT_ONCE):
            pads = sender.hash.low_bits(self._rows[of], first + of.start, offsets[part], 1)
            for number in range(part.start, part.stop):
                hidden[number] = sides[number] ^ np.packbits(
                    (pads >> np.uint32(number - part.start)).astype(np.uint8) & 1
                )
        return hidden

    def own_pads(self, first: int) -> Bits:
        """Return the pad of each row's own path at the receiver, uint8 (n_rows,)."""
        if not self.levels:
            return np.zeros(len(self._rows), np.uint8)
        own = self._transfers.receiver.hash
        return own.low_bits(self._rows, first, np.zeros((1, 2), np.uint64), 1).astype(np.uint8)

    def _join(self, rows: Words, of: slice) -> None:
        self._rows[of] = extension.joined(np.stack([rows, self._rows[of]], axis=1).reshape(-1, 2), 2)
