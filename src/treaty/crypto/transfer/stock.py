"""What two parties compute with transfers alike: steps taken together, stocks of transfers, and sides of rows by path.

*Steps*: at each, both parties send arrays at the same time, and continue with the other's. A computation is a
generator, the same at both ends: it yields what its party sends and is given what the other has sent.

*Stocks* (`Transfers`): each party is the sender of as many random transfers as it is the receiver of. Everything drawn
from them, and from the stocks of what is made of transfers, is drawn by both at once, so that rows and their numbers
agree; nothing is used twice.

*Sides* (`Paths`): one party knows each row's node, the other the sides at all nodes. A node's path has a bit for each
level above it. For each row and bit the first party, the receiver, gets one correlated transfer, q = t xor bit Delta.
Rows of transfers are joined level by level, as x r + new in GF(2^128), so that the sender's joined row less the
receiver's is the path, as an element of the field, times Delta. The sender has the pad H(q + p Delta) of every path p,
the receiver that of its row's own path alone, H(t): of a row it reads the side at one node at most, whatever it chose,
and the sender does not learn at which. Joined rows serve all levels of a tree, each level under tweaks of its own. A
table has a bit for each row and each node that the sender splits, however long the paths are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.parameters import DEGREE
from treaty.crypto.transfer import extension
from treaty.crypto.transfer.ring_products import Giver, Holder, RingKind
from treaty.errors import CryptoError
from treaty.machine.arrays import Words, pieces

Result = TypeVar("Result")
Arrays = list[NDArray[Any]]
Steps = Generator[Arrays, Arrays, Result]


class OpenedArrays(list[NDArray[Any]]):
    """What a protocol yields where it opens shares to the other party."""


def together(*protocols: Steps[Any]) -> Steps[list[Any]]:
    """Run independent protocols at once, each step of all of them in one message; return their results.

    A message with an opening of one of them is an opening.
    """
    if len(protocols) == 1:
        return [(yield from protocols[0])]
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
        opening = any(isinstance(arrays, OpenedArrays) for arrays in waiting.values())
        sent = [sizes, *(array for k in sorted(waiting) for array in waiting[k])]
        came = yield OpenedArrays(sent) if opening else sent
        given, at, counts = {}, 1, sizes_of(came, len(protocols))
        for k in sorted(waiting):
            given[k] = came[at : at + counts[k]]
            at += counts[k]
        waiting = {}
    return results


def sizes_of(came: Arrays, protocols: int) -> list[int]:
    """Return how many arrays of a message each protocol has sent, as its first array says."""
    fine = bool(came) and came[0].dtype == np.int64 and came[0].shape == (protocols,)
    counts: list[int] = came[0].tolist() if fine else []
    if not fine or min(counts) < 0 or sum(counts) != len(came) - 1:
        raise CryptoError("expected a step of as many protocols as this end's")
    return counts


def take(came: Arrays, *expected: tuple[type[np.generic], tuple[int, ...]]) -> Arrays:
    """Return what the other party sent; CryptoError unless element types and shapes are those expected."""
    fine = len(came) == len(expected) and all(
        array.dtype == kind and array.shape == shape for array, (kind, shape) in zip(came, expected, strict=True)
    )
    if not fine:
        what = [(str(array.dtype), array.shape) for array in came]
        raise CryptoError(f"expected arrays {[(kind.__name__, shape) for kind, shape in expected]}, got {what}")
    return came


OF_A_TRANSFER = 2.65  # bytes that are sent to make one (`extension.QUICK`)
_FEW, _MANY = 1 << 15, 1 << 19  # transfers that are made when the stock is empty, twice as many each time

Bits = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Correlation:
    """A kind of products (`correlations`): of a receiver's number of some bits with `values` of a sender's of `words`.

    Shares of products are modulo 2^modulo, at most 2^(64 words). With `one_way` role 1 is the sender alone, and role 0
    the receiver.
    """

    bits: int
    values: int
    words: int
    modulo: int
    one_way: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each bit's numbers that are sent: those of the bit of weight 2^i count modulo 2^(modulo - i)."""
        return _sizes(self.bits, self.values, self.modulo)

    @property
    def nbytes(self) -> int:
        """Bytes that an end sends to make one ahead."""
        return round(self.bits * OF_A_TRANSFER) + sum(self.sizes)


@cache
def _sizes(bits: int, values: int, modulo: int) -> tuple[int, ...]:
    return tuple(max(-(-(modulo - i) // 8), 0) for i in range(bits) for _ in range(values))


@dataclass(slots=True)
class Stock:
    """Things made of transfers: how many are left, are `coming`, were `drawn` in this tree, are `wanted` in stock.

    If none are wanted, at least `few` are made at once, twice as many each time up to `many`. `left` does not count
    what a protocol holds back while it waits for more. They are made in multiples of `unit`.
    """

    few: int = 0
    many: int = 0
    unit: int = 1
    left: int = 0
    coming: int = 0
    drawn: int = 0
    wanted: int = 0
    _made: deque[Any] = field(default_factory=deque)

    def reserve(self, count: int, make: Callable[[int], Steps[None]]) -> Steps[None]:
        """Make more where fewer than `count` are left; the caller draws them at once."""
        if self.left < count:
            # protocols that run together with this one must not draw what it waits with
            claimed, self.left = self.left, 0
            more = count - claimed
            if not self.wanted:
                more, self.few = max(more, self.few), min(2 * self.few, self.many)
            yield from make(self.whole(more))
            self.left += claimed

    def whole(self, count: int) -> int:
        """Return the next multiple of the unit."""
        return -(-count // self.unit) * self.unit

    @property
    def short(self) -> int:
        """How many are to be made ahead."""
        return self.wanted - self.left - self.coming

    def add(self, made: Any) -> None:
        self._made.append(made)
        self.left += len(made)

    def draw(self, count: int) -> list[Any]:
        """Draw things that are left, in parts."""
        assert self.left >= count
        self.left, self.drawn = self.left - count, self.drawn + count
        parts = []
        while count:
            part = self._made.popleft()
            if len(part) > count:
                self._made.appendleft(part[count:])
                part = part[:count]
            parts.append(part)
            count -= len(part)
        return parts

    def drop(self, count: int) -> None:
        """Discard things that are left."""
        self.draw(count)
        self.drawn -= count


@dataclass(slots=True)
class RingEnd:
    """One end's products by ring-LWE of a kind (`shared_products`): those `made`, and those asked for, by any means."""

    stock: Stock = field(default_factory=lambda: Stock(unit=DEGREE))
    holders: list[Holder] = field(default_factory=list)
    givers: list[Giver] = field(default_factory=list)
    made: int = 0
    asked: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Transfers: the sender's rows q (n, 2), the receiver's t (n, 2), and its random bits (n,)."""

    q: Words
    t: Words
    random: Bits

    def __len__(self) -> int:
        return len(self.random)

    def __getitem__(self, part: slice) -> _Rows:
        return _Rows(self.q[part], self.t[part], self.random[part])


_NOTHING = _Rows(np.empty((0, 2), np.uint64), np.empty((0, 2), np.uint64), np.empty(0, np.uint8))


class Transfers:
    """The stocks, made by `open_transfers`; `used` is the number of the next transfer, `role` 0 or 1.

    `rows` is the stock of transfers, `quads` that of `comparison.draw_quads`, `products` are those of `correlations`,
    `rings` those of `shared_products`.
    """

    def __init__(self, sender: extension.Sender, receiver: extension.Receiver, role: int) -> None:
        self.sender, self.receiver, self.role, self.used = sender, receiver, role, 0
        self.rows, self.quads = Stock(_FEW, _MANY), Stock(1 << 12, 1 << 17)
        self.products: defaultdict[Correlation, Stock] = defaultdict(Stock)
        self.rings: defaultdict[RingKind, RingEnd] = defaultdict(RingEnd)
        self._lane = 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Extend transfers in a lane of their own: their messages pass those of steps that are due."""
        self._lane = 1
        try:
            yield
        finally:
            self._lane = 0

    def tweaks(self, count: int) -> int:
        """Return the first of `count` numbers that no transfer of either end has, nor other tweaks."""
        first, self.used = self.used, self.used + count
        return first

    def rekey(self) -> None:
        """Hash under other keys from here on, at both ends at once."""
        # copies: what was drawn before is hashed as before, at both ends
        self.sender, self.receiver = copy(self.sender), copy(self.receiver)
        for end in (self.sender, self.receiver):
            end.hash = extension.hash_of(end.session, self.used)

    def reserve(self, count: int) -> Steps[None]:
        """Make more where fewer than `count` are left: a step, or none. The caller draws them at once."""
        yield from self.rows.reserve(count, self.extend)

    def extend(self, count: int) -> Steps[None]:
        """Make transfers for the stock: a step."""
        self.rows.add((yield from self._extended(count)))

    def fresh(self, count: int) -> Steps[Drawn]:
        """Make transfers for random bits, apart from the stock: a step."""
        rows = yield from self._extended(count)
        if len(rows) > count:
            self.rows.add(rows[count:])
        return self._numbered(rows[:count])

    def _extended(self, count: int) -> Steps[_Rows]:
        count, lane = count + -count % extension.STEP, self._lane
        message, bits, rows = self.receiver.extend(count, lane)
        (came,) = take((yield [message]), (np.uint64, message.shape))
        # q of the own end as the sender, t and its bits as the receiver: rows of both directions have the same number
        return _Rows(self.sender.extend(count, came, lane), rows, extension.unpacked(bits, count))

    def drawn(self, count: int, choices: Bits | None = None) -> Drawn:
        """Draw transfers that were reserved, for own choice bits, (count,), or for random ones."""
        parts = [_NOTHING, *self.rows.draw(count)]
        joined = (np.concatenate([getattr(part, name) for part in parts]) for name in _Rows.__slots__)
        return self._numbered(parts[1] if len(parts) == 2 else _Rows(*joined), choices)

    def _numbered(self, rows: _Rows, choices: Bits | None = None) -> Drawn:
        first = self.tweaks(len(rows))
        flips = np.zeros_like(rows.random) if choices is None else choices ^ rows.random
        return Drawn(first, rows.q, rows.t, rows.random, flips, self.sender, self.receiver)

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


_SHAPES = extension.QUICK, extension.SHORT


def open_transfers(role: int, *, short: bool = False) -> Steps[Transfers]:
    """Exchange base transfers in both directions: three steps; `role` is 0 at one party and 1 at the other.

    Role 0 says whether messages are `short`, which takes longer to compute.
    """
    receiver, own = extension.Receiver(), np.array([short], np.uint8)
    offer, theirs = take((yield [receiver.offer, own]), (np.uint8, receiver.offer.shape), (np.uint8, (1,)))
    number = int((theirs if role else own)[0])
    if number >= len(_SHAPES):
        raise CryptoError(f"expected 0 or 1, got {number} - in base transfers")
    receiver.shape = _SHAPES[number]
    sender = extension.Sender(offer, receiver.shape)
    (points,) = take((yield [sender.points]), (np.uint8, sender.points.shape))
    (corrections,) = take((yield [receiver.prepare(points)]), (np.uint8, (extension.KAPPA, 2, extension.KEY)))
    sender.prepare(corrections)
    return Transfers(sender, receiver, role)


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
        self.n_rows = n_rows
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
        return self._transfers.tweaks(len(self._rows))

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
