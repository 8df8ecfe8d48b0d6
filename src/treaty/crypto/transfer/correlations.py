"""Numbers multiplied by another party's bits: what depends on neither is made ahead.

A receiver has n numbers of some bits, a sender as many rows of numbers y. Their products are sums over the receiver's
bits, each a correlated transfer (Gilboa, "Two Party RSA Key Generation", CRYPTO 1999). These are made of random bits r
and random rows y' before it is known what will be multiplied: of each bit the sender has a pad, the receiver the pad
plus r y'. To multiply, the receiver sends which of its bits x differ from the random ones, and the sender y - y', which
is uniform. As x y = x y' + x (y - y'), and of each bit x y' is r y' or y' - r y', both ends have shares of the products
after this one step (`arithmetic.multiplied`), whose message is a small part of what was sent ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer.extension import random_pairs
from treaty.crypto.transfer.stock import Bits, Correlation, Steps, Transfers, take
from treaty.machine.arrays import Words, pieces
from treaty.machine.kernels import kernel

_AT_ONCE = 1 << 16  # blocks of 16 bytes of pads in memory


@dataclass(frozen=True, slots=True)
class Correlated:
    """One end's part of n products as their sender, and of n as their receiver; each is used once.

    `numbers` and `last`, (n, v, words), are the sender's y', and those of the top bit, whose y may have another sign.
    `pads` and `held`, (n * bits, v * words), are the sender's and the receiver's shares of each bit's product;
    `random`, (n * bits,), are the receiver's bits.
    """

    bits: int
    numbers: Words
    last: Words
    pads: Words
    held: Words
    random: Bits

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> Correlated:
        first, last, _ = part.indices(len(self))
        rows = slice(first * self.bits, last * self.bits)
        return Correlated(
            self.bits, self.numbers[part], self.last[part], self.pads[rows], self.held[rows], self.random[rows]
        )

    def sender_share(self, flips: Bits) -> Words:
        """Return shares of the receiver's numbers times y', (n, v, words); `flips` say where its bits differ."""
        out = np.zeros(self.numbers.shape, np.uint64)
        _turn(self.pads, self.numbers, self.last, flips, out)
        return out

    def receiver_share(self, flips: Bits) -> Words:
        """Return shares of own numbers times y', (n, v, words); `flips` say where own bits differ."""
        out = np.zeros(self.numbers.shape, np.uint64)
        _add_up(self.held, flips, out)
        return out


def draw(transfers: Transfers, kind: Correlation, count: int) -> Steps[Correlated]:
    """Draw `count` products of a kind; if fewer are left, the others are made first, in two steps."""
    stock = transfers.products[kind]
    yield from stock.reserve(count, lambda missing: make(transfers, kind, missing))
    parts = stock.draw(count)
    if len(parts) == 1:
        return cast(Correlated, parts[0])
    arrays = ([getattr(part, name) for part in parts] for name in Correlated.__slots__[1:])
    return Correlated(kind.bits, *map(np.concatenate, arrays))


def make(transfers: Transfers, kind: Correlation, count: int) -> Steps[None]:
    """Make products for the stock: a step for transfers, and one that correlates them."""
    bits, sizes = kind.bits, kind.row_bytes
    drawn = yield from transfers.fresh(count * bits)
    shape, rows = (count, kind.values, kind.words), (count * bits, kind.values * kind.words)
    length, blocks = kind.values * int(sizes.sum()), -(-rows[1] // 2)
    sends, receives = (not kind.one_way or transfers.role == role for role in (1, 0))
    numbers, last = np.zeros((2, *shape), np.uint64)
    pads, held = (np.zeros(rows if used else (0, rows[1]), np.uint64) for used in (sends, receives))
    message = np.empty((count if sends else 0, length), np.uint8)
    of = list(pieces(count, max(1, _AT_ONCE // (bits * blocks))))
    if sends:
        numbers, last = Keystream().bits(64, 2 * numbers.size).reshape(2, *shape)
        for part in of:
            at = slice(part.start * bits, part.stop * bits)
            pair = random_pairs(drawn.sender, drawn.q[at], drawn.first + at.start, blocks)
            _correlate(*pair, numbers[part], last[part], sizes, pads[at], message[part])
    (came,) = take((yield [message]), (np.uint8, (count if receives else 0, length)))
    if receives:
        for part in of:
            at = slice(part.start * bits, part.stop * bits)
            own = drawn.receiver.hash.rows(drawn.t[at], drawn.first + at.start, blocks)
            _hold(own, drawn.random[at], np.ascontiguousarray(came[part]), sizes, kind.words, held[at])
    transfers.products[kind].add(Correlated(bits, numbers, last, pads, held, drawn.random))


@kernel
def _correlate(
    zero: Words, one: Words, y: Words, last: Words, sizes: NDArray[np.int64], pads: Words, message: NDArray[np.uint8]
) -> None:
    words, bits = y.shape[2], sizes.size
    for n in range(y.shape[0]):
        place = 0
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
                    number = less - borrow
                    borrow = under | np.uint64(less < borrow)
                    for byte in range(8 * word, min(8 * word + 8, sizes[i])):
                        message[n, place + byte] = np.uint8(number & np.uint64(255))
                        number >>= np.uint64(8)
                place += sizes[i]


@kernel
def _hold(
    pads: Words, random: Bits, message: NDArray[np.uint8], sizes: NDArray[np.int64], words: int, held: Words
) -> None:
    """Write pads, plus the message where the random bit is 1."""
    bits = sizes.size
    for n in range(message.shape[0]):
        place = 0
        for i in range(bits):
            row = n * bits + i
            mask = np.uint64(0) - np.uint64(random[row])
            for v in range(held.shape[1] // words):
                carry = np.uint64(0)
                for word in range(words):
                    given, at = np.uint64(0), v * words + word
                    for byte in range(8 * word, min(8 * word + 8, sizes[i])):
                        given |= np.uint64(message[n, place + byte]) << np.uint64(8 * (byte - 8 * word))
                    given &= mask
                    total = pads[row, at] + given
                    above = np.uint64(total < given)
                    held[row, at] = total + carry
                    carry = above | np.uint64(held[row, at] < total)
                place += sizes[i]


@kernel
def _turn(pads: Words, y: Words, last: Words, flips: Bits, out: Words) -> None:
    """Write sums of -pad, or of y + pad where flipped, doubled from the top bit down."""
    # without a branch: -pad is 1 + not pad
    words, bits = y.shape[2], flips.size // y.shape[0]
    for n in range(y.shape[0]):
        for i in range(bits - 1, -1, -1):
            row = n * bits + i
            flip = np.uint64(0) - np.uint64(flips[row])
            for v in range(y.shape[1]):
                carry, lower, over = np.uint64(1) & ~flip, np.uint64(0), np.uint64(0)
                for word in range(words):
                    number = (last[n, v, word] if i == bits - 1 else y[n, v, word]) & flip
                    total = (pads[row, v * words + word] ^ ~flip) + number
                    above = np.uint64(total < number)
                    summed = total + carry
                    carry = above | np.uint64(summed < total)
                    lower, over = _double_and_add(out, n, v, word, summed, lower, over)


@kernel
def _add_up(held: Words, flips: Bits, out: Words) -> None:
    """Write sums of what is held, negative where flipped, doubled from the top bit down."""
    words, bits = out.shape[2], flips.size // out.shape[0]
    for n in range(out.shape[0]):
        for i in range(bits - 1, -1, -1):
            row = n * bits + i
            flip = np.uint64(0) - np.uint64(flips[row])
            for v in range(out.shape[1]):
                less, lower, over = np.uint64(1) & flip, np.uint64(0), np.uint64(0)
                for word in range(words):
                    turned = (held[row, v * words + word] ^ flip) + less
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
