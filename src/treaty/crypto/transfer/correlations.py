"""Numbers multiplied by another party's bits: what depends on neither is made ahead.

A receiver has n numbers of some bits, a sender as many rows of numbers y. Their products are sums over the receiver's
bits, each a correlated transfer (Gilboa, "Two Party RSA Key Generation", CRYPTO 1999). These are made of random bits r
and random rows y' before it is known what will be multiplied: of each bit the sender has a pad, the receiver the pad
plus r y'. To multiply, the receiver sends which of its bits x differ from the random ones, and the sender y - y', which
is uniform. As x y = x y' + x (y - y'), and of each bit x y' is r y' or y' - r y', both ends have shares of the products
after this one step (`arithmetic.multiplied`), whose message is a small part of what was sent ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer.extension import random_pairs
from treaty.crypto.transfer.stock import Bits, Correlation, Drawn, Steps, Transfers, take
from treaty.machine.arrays import Words, pieces
from treaty.machine.kernels import kernel

Bytes = NDArray[np.uint8]

_AT_ONCE = 1 << 16  # blocks of 16 bytes of pads in memory


@dataclass(frozen=True, slots=True)
class Correlated:
    """One end's part of n products as their sender, and of n as their receiver; each is used once.

    `numbers` and `last`, (n, v, words), are the sender's y', and those of the top bit, whose y may have another sign.
    `pads` and `held`, (n * bits, v * words), are the sender's and the receiver's shares of each bit's product;
    `random`, (n * bits,), are the receiver's bits. What was not made ahead is `begun`: it is held once the other end's
    message of the same step has come.
    """

    kind: Correlation
    numbers: Words
    last: Words
    pads: Words
    held: Words
    random: Bits
    begun: Begun | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> Correlated:
        first, last, _ = part.indices(len(self))
        rows = slice(first * self.kind.bits, last * self.kind.bits)
        return Correlated(
            self.kind, self.numbers[part], self.last[part], self.pads[rows], self.held[rows], self.random[rows]
        )

    def added_up(self, shares: Words, flips: Bits) -> Words:
        """Return sums over the bits of `shares`, `pads` or `held`, negative where flipped, (n, v, words)."""
        out = np.zeros(self.numbers.shape, np.uint64)
        _add_up(shares, flips, out)
        return out


@dataclass(frozen=True, slots=True)
class Begun:
    """What correlates products that were drawn and not made ahead: own message, and what opens the other end's."""

    kind: Correlation
    drawn: Drawn
    message: Words
    receives: bool

    @property
    def sent(self) -> Bytes:
        """Own message as it is sent, (n, bytes)."""
        kind = self.kind
        return narrowed(self.message.reshape(-1, kind.bits * kind.values, kind.words), kind.sizes)

    @property
    def expected(self) -> tuple[int, int]:
        """Shape of the other end's message, uint8."""
        return len(self.drawn.random) // self.kind.bits if self.receives else 0, sum(self.kind.sizes)

    def held(self, came: Bytes) -> Words:
        """Return the receiver's shares, by the sender's message."""
        kind, drawn = self.kind, self.drawn
        message = widened(came, kind.sizes, kind.words).reshape(-1, kind.values * kind.words)
        held = np.empty_like(message)
        for _, at in _parts(kind, len(came)):
            own = drawn.receiver.hash.rows(drawn.t[at], drawn.first + at.start, -(-message.shape[1] // 2))
            _hold(own, drawn.random[at], message[at], kind.words, held[at])
        return held


def draw(transfers: Transfers, kind: Correlation, count: int) -> Steps[Correlated]:
    """Draw `count` products of a kind; if fewer were made ahead, others are begun: a step for transfers, or none."""
    stock = transfers.products[kind]
    if stock.left < count:
        yield from transfers.reserve(count * kind.bits)
        drawn = transfers.drawn(count * kind.bits)
        # later trees will have these made ahead, of transfers apart from the stock's
        stock.drawn, transfers.rows.drawn = stock.drawn + count, transfers.rows.drawn - count * kind.bits
        return _begin(transfers, kind, drawn)
    parts = stock.draw(count)
    if len(parts) == 1:
        return cast(Correlated, parts[0])
    arrays = ([getattr(part, name) for part in parts] for name in Correlated.__slots__[1:-1])
    numbers, last, pads, held, random = map(np.concatenate, arrays)
    return Correlated(kind, numbers, last, pads, held, random)


def make(transfers: Transfers, kind: Correlation, count: int) -> Steps[None]:
    """Make products for the stock: a step for transfers, and one that correlates them."""
    of = _begin(transfers, kind, (yield from transfers.fresh(count * kind.bits)))
    begun = of.begun
    assert begun is not None
    (came,) = take((yield [begun.sent]), (np.uint8, begun.expected))
    transfers.products[kind].add(replace(of, held=begun.held(came), begun=None))


def narrowed(numbers: Words, sizes: Sequence[int]) -> Bytes:
    """Return the lowest bytes of numbers (n, k, words), of each k so many as its size, uint8 (n, bytes)."""
    raw = np.ascontiguousarray(numbers).astype("<u8", copy=False).view(np.uint8)
    # neighbours of one size are copied at once
    runs = [raw[:, of, :size].reshape(len(raw), (of.stop - of.start) * size) for of, size in _runs(sizes)]
    return np.concatenate(runs, axis=1)


def widened(came: Bytes, sizes: Sequence[int], words: int) -> Words:
    """Return the numbers, uint64 (n, k, words), whose lowest bytes are given; other bytes are zeros."""
    raw, at = np.zeros((len(came), len(sizes), 8 * words), np.uint8), 0
    for of, size in _runs(sizes):
        count = of.stop - of.start
        raw[:, of, :size] = came[:, at : at + count * size].reshape(len(came), count, size)
        at += count * size
    whole: Words = raw.view("<u8").astype(np.uint64, copy=False)
    return whole


def _runs(sizes: Sequence[int]) -> Iterator[tuple[slice, int]]:
    first = 0
    for size, run in groupby(sizes):
        last = first + len(list(run))
        yield slice(first, last), size
        first = last


def _begin(transfers: Transfers, kind: Correlation, drawn: Drawn) -> Correlated:
    """Begin products of transfers for random bits."""
    count = len(drawn.random) // kind.bits
    shape, width = (count, kind.values, kind.words), kind.values * kind.words
    sends, receives = (not kind.one_way or transfers.role == role for role in (1, 0))
    numbers, last = np.zeros((2, *shape), np.uint64)
    pads = np.zeros((len(drawn.random) if sends else 0, width), np.uint64)
    message = np.empty_like(pads)
    if sends:
        numbers, last = Keystream().bits(64, 2 * numbers.size).reshape(2, *shape)
    for part, at in _parts(kind, count if sends else 0):
        pair = random_pairs(drawn.sender, drawn.q[at], drawn.first + at.start, -(-width // 2))
        _correlate(*pair, numbers[part], last[part], kind.bits, pads[at], message[at])
    begun = Begun(kind, drawn, message, receives)
    return Correlated(kind, numbers, last, pads, np.empty((0, width), np.uint64), drawn.random, begun)


def _parts(kind: Correlation, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield some products at a time, and their transfers."""
    blocks = kind.bits * -(-kind.values * kind.words // 2)
    for part in pieces(count, max(1, _AT_ONCE // blocks)):
        yield part, slice(part.start * kind.bits, part.stop * kind.bits)


@kernel
def _correlate(zero: Words, one: Words, y: Words, last: Words, bits: int, pads: Words, message: Words) -> None:
    words = y.shape[2]
    for n in range(y.shape[0]):
        for i in range(bits):
            row = n * bits + i
            for v in range(y.shape[1]):
                carry, borrow = np.uint64(0), np.uint64(0)
                for word in range(words):
                    at = v * words + word
                    number = last[n, v, word] if i == bits - 1 else y[n, v, word]
                    pads[row, at] = zero[row, at]
                    # y + pad_0 - pad_1, word by word: a receiver of bit 1 adds its pad_1 and has y + pad_0, one of bit
                    # 0 has pad_0
                    total = zero[row, at] + number
                    over = np.uint64(total < number)
                    summed = total + carry
                    carry = over | np.uint64(summed < total)
                    less = summed - one[row, at]
                    under = np.uint64(summed < one[row, at])
                    message[row, at] = less - borrow
                    borrow = under | np.uint64(less < borrow)


@kernel
def _hold(pads: Words, random: Bits, message: Words, words: int, held: Words) -> None:
    """Write pads, plus the message where the random bit is 1."""
    for row in range(held.shape[0]):
        mask = np.uint64(0) - np.uint64(random[row])
        for v in range(held.shape[1] // words):
            carry = np.uint64(0)
            for at in range(v * words, (v + 1) * words):
                given = message[row, at] & mask
                total = pads[row, at] + given
                above = np.uint64(total < given)
                held[row, at] = total + carry
                carry = above | np.uint64(held[row, at] < total)


@kernel
def _add_up(shares: Words, flips: Bits, out: Words) -> None:
    """Write sums of shares, negative where flipped, doubled from the top bit down."""
    words, bits = out.shape[2], flips.size // out.shape[0]
    for n in range(out.shape[0]):
        for i in range(bits - 1, -1, -1):
            row = n * bits + i
            flip = np.uint64(0) - np.uint64(flips[row])
            for v in range(out.shape[1]):
                less, lower, over = np.uint64(1) & flip, np.uint64(0), np.uint64(0)
                for word in range(words):
                    turned = (shares[row, v * words + word] ^ flip) + less
                    less = np.uint64(turned < less)
                    lower, over = _double_and_add(out, n, v, word, turned, lower, over)


@kernel
def _double_and_add(
    out: Words, n: int, v: int, word: int, number: np.uint64, lower: np.uint64, carry: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Double a word of a number of `out` and add one; return `lower` and `carry` for the word above."""
    before = out[n, v, word]
    doubled = (before << np.uint64(1)) | lower
    total = doubled + number
    over = np.uint64(total < number)
    out[n, v, word] = total + carry
    return before >> np.uint64(63), over | np.uint64(out[n, v, word] < carry)
