"""Whole numbers of several words, and products of shared ones and a choice between them, by transfers.

Numbers are modulo 2^(64 words): uint64 (..., words), lowest word first.

A *guarded* sharing of x in m bits is x0 + x1 = x + w 2^m with 0 <= x < 2^(m-1): then w, whether the shares wrap around,
is the disjunction of their top bits. Products of guarded numbers are sums of one party's bits times the other's
numbers, each a correlated transfer (Gilboa, "Two Party RSA Key Generation", CRYPTO 1999).

Every function of `Steps` here is one step. A transfer's receiver has a random bit r, and needs the number y for its bit
x: it sends whether they differ, f, while the sender sends what makes shares of r y. As x y is r y or y - r y, by f,
both ends correct their shares without another message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import to_words
from treaty.crypto.transfer.extension import packed, random_pairs, unpacked
from treaty.crypto.transfer.stock import Bits, Drawn, Steps, Transfers, take
from treaty.machine.arrays import Words, pieces
from treaty.machine.kernels import kernel

Wide = NDArray[np.uint64]


def wide(numbers: NDArray[np.integer], words: int) -> Wide:
    """Return whole numbers of 64 bits as wide ones, signed ones by their two's complement."""
    out = np.zeros((*numbers.shape, words), np.uint64)
    out[..., 0] = numbers.astype(np.uint64)
    if numbers.dtype.kind == "i":
        out[..., 1:] = np.where(numbers < 0, ~np.uint64(0), np.uint64(0))[..., None]
    return out


def resized(a: Wide, words: int) -> Wide:
    """Return numbers with more words, of zeros, or fewer: modulo 2^(64 words)."""
    out = np.zeros((*a.shape[:-1], words), np.uint64)
    kept = min(words, a.shape[-1])
    out[..., :kept] = a[..., :kept]
    return out


def from_ints(numbers: Sequence[int], words: int) -> Wide:
    """Return Python integers as wide ones, (n, words)."""
    return to_words([x % (1 << 64 * words) for x in numbers], words)


def add(a: Wide, b: Wide) -> Wide:
    return _with(_add, a, b)


def subtract(a: Wide, b: Wide) -> Wide:
    return _with(_subtract, a, b)


def negative(a: Wide) -> Wide:
    return subtract(np.zeros_like(a), a)


def _with(kernel: Callable[[Wide, Wide], None], a: Wide, b: Wide) -> Wide:
    """Apply a kernel that changes its first number to a copy of a, and b, of any shapes that fit."""
    a, b = np.broadcast_arrays(a, b)
    out, other = np.array(a, order="C"), np.ascontiguousarray(b)
    words = out.shape[-1]
    kernel(out.reshape(-1, words), other.reshape(-1, words))
    return out


@kernel
def _add(a: Wide, b: Wide) -> None:
    for n in range(a.shape[0]):
        carry = np.uint64(0)
        for word in range(a.shape[1]):
            total = a[n, word] + b[n, word]
            over = np.uint64(total < b[n, word])
            a[n, word] = total + carry
            # at most one of the two additions carries
            carry = over | np.uint64(a[n, word] < carry)


@kernel
def _subtract(a: Wide, b: Wide) -> None:
    for n in range(a.shape[0]):
        borrow = np.uint64(0)
        for word in range(a.shape[1]):
            less = a[n, word] - b[n, word]
            under = np.uint64(a[n, word] < b[n, word])
            a[n, word] = less - borrow
            borrow = under | np.uint64(less < borrow)


def prefix_sums(a: Wide) -> Wide:
    """Return sums of the first 1, 2, ... numbers along the last axis but one, of at most 2^32 numbers."""
    # 32-bit halves add up without overflow; carries are passed on afterwards
    parts = np.cumsum(np.ascontiguousarray(a).view(np.uint32).astype(np.uint64), axis=-2)
    out, carry = np.empty(parts.shape, np.uint32), np.zeros(parts.shape[:-1], np.uint64)
    for half in range(parts.shape[-1]):
        total = parts[..., half] + carry
        out[..., half] = total.astype(np.uint32)
        carry = total >> np.uint64(32)
    return out.view(np.uint64)


def times(a: Wide, b: Wide) -> Wide:
    shape: tuple[int, ...] = np.broadcast_shapes(a.shape, b.shape)
    a, b, out = np.broadcast_to(a, shape).copy(), np.broadcast_to(b, shape).copy(), np.zeros(shape, np.uint64)
    _times(*(x.view(np.uint32).reshape(-1, 2 * x.shape[-1]) for x in (a, b, out)))
    return out


@kernel
def _times(a: NDArray[np.uint32], b: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    # school-book products of 32-bit digits, whose sums with two carries fit 64 bits
    for n in range(a.shape[0]):
        for i in range(a.shape[1]):
            carry, digit = np.uint64(0), np.uint64(a[n, i])
            for j in range(a.shape[1] - i):
                total = digit * np.uint64(b[n, j]) + np.uint64(out[n, i + j]) + carry
                out[n, i + j] = total & low
                carry = total >> half


def shifted(a: Wide, bits: int) -> Wide:
    """Return a 2^bits."""
    out = np.zeros_like(a)
    words, rest = divmod(bits, 64)
    for word in range(words, a.shape[-1]):
        out[..., word] = a[..., word - words] << np.uint64(rest)
        if rest and word > words:
            out[..., word] |= a[..., word - words - 1] >> np.uint64(64 - rest)
    return out


def cut(a: Wide, bits: int) -> Wide:
    """Return a modulo 2^bits."""
    out = a.copy()
    for word in range(a.shape[-1]):
        kept = min(max(bits - 64 * word, 0), 64)
        out[..., word] &= np.uint64((1 << kept) - 1)
    return out


def bit(a: Wide, number: int) -> Bits:
    """Return one bit of each number."""
    return ((a[..., number // 64] >> np.uint64(number % 64)) & np.uint64(1)).astype(np.uint8)


def bits_of(a: Wide, count: int) -> Bits:
    """Return the lowest bits of each number, (..., count)."""
    raw = np.ascontiguousarray(a.astype("<u8", copy=False)).view(np.uint8)
    return np.unpackbits(raw, axis=-1, count=count, bitorder="little")


def only(bits: Bits, a: Wide) -> Wide:
    """Return a where the bit is 1, else 0, without a branch."""
    return a & (np.uint64(0) - bits.astype(np.uint64))[..., None]


def signed(bits: Bits, a: Wide) -> Wide:
    """Return -a where the bit is 1, else a, without a branch."""
    flip = (np.uint64(0) - bits.astype(np.uint64))[..., None]
    one = np.zeros((*bits.shape, a.shape[-1]), np.uint64)
    one[..., 0] = bits
    return add(a ^ flip, one)


_AT_ONCE = 1 << 16  # blocks of 16 bytes of pads in memory


def products(transfers: Transfers, x: Wide, y: Wide, x_bits: int, y_bits: int, bits: int) -> Steps[Wide]:
    """Return shares modulo 2^bits of x y_v, (n, v, words), from guarded shares of x (n, words) and y (n, v, words).

    A product takes m + 1 transfers in each direction for an x of m bits; bits <= x_bits + y_bits.
    """
    # x y = (x0 + x1) (y0 + y1) - v 2^n (x0 + x1) - w 2^m (y0 + y1), where w (s0 + s1) = w0 s0 + w1 s1 +
    # w0 (1 - w1) s1 + w1 (1 - w0) s0 for shares s0 + s1 of any number and the top bits w0 and w1.
    n, v, words = y.shape
    own, top = bits_of(x, x_bits), bit(x, x_bits - 1)
    wraps = bit(y, y_bits - 1)
    drawn = yield from transfers.draw_for(np.concatenate([own.reshape(-1), wraps.reshape(-1)]))
    low, high = drawn.only(slice(0, n * x_bits)), drawn.only(slice(n * x_bits, None))
    # Those of w share the transfer of a factor's top bit, which offers minus 2^(m-1) y and 2^m (1 - w) y at once.
    sent = _Sent(low, y, 1 - top, x_bits)
    other = shifted(only(1 - wraps, np.broadcast_to(x[:, None], y.shape)), y_bits).reshape(n * v, 1, words)
    sent_top = _Sent(high, other, np.zeros(n * v, np.uint8), 1)
    flips = packed(drawn.flips)
    came, message, message_top = take(
        (yield [flips, sent.message, sent_top.message]),
        *((np.uint64, array.shape) for array in (flips, sent.message, sent_top.message)),
    )
    theirs, split = unpacked(came, len(drawn.flips)), n * x_bits
    cross = add(_received(low, message, y.shape, x_bits), sent.share(theirs[:split]))
    cross_top = add(_received(high, message_top, other.shape, 1), sent_top.share(theirs[split:]))
    # own shares' product, and what wraps around
    out = add(times(x[:, None], y), cross)
    out = subtract(out, shifted(only(np.broadcast_to(top[:, None], wraps.shape), y), x_bits))
    both = cross_top.reshape(y.shape)
    out = subtract(out, add(both, shifted(only(wraps, np.broadcast_to(x[:, None], y.shape)), y_bits)))
    return cut(out, bits)


def squares(transfers: Transfers, u: Wide, u_bits: int, bits: int, role: int) -> Steps[Wide]:
    """Return shares modulo 2^bits of u^2 from shares modulo 2^u_bits of u (n, words), |u| < 2^(u_bits - 2).

    `bits` is at most 2 u_bits - 1. `role` is 0 at one party and 1 at the other.
    """
    words = u.shape[-1]
    half = shifted(np.eye(1, words, dtype=np.uint64), u_bits - 2)[0]
    # u + half is not negative: u^2 = (u + half)^2 - 2 half (u + half) + half^2
    positive = cut(add(u, half), u_bits) if role == 0 else u
    (square,) = (yield from products(transfers, positive, positive[:, None], u_bits, u_bits, bits)).transpose(1, 0, 2)
    out = subtract(square, shifted(positive, u_bits - 1))
    return cut(add(out, shifted(half, u_bits - 2)) if role == 0 else out, bits)


def selected(transfers: Transfers, bits: Bits, values: Wide) -> Steps[Wide]:
    """Return shares modulo 2^(64 words) of values (n, v, words) where the bit is 1, of 0 where it is 0.

    Shares of bits, (n,), are exclusive: their sum modulo 2 is the bit.
    """
    of_all = np.broadcast_to(bits[:, None], values.shape[:2])
    drawn = yield from transfers.draw_for(bits)
    received, given = yield from _swapped(drawn, signed(of_all, values))
    return add(add(only(of_all, values), received), given)


def both_of(transfers: Transfers, bits: Bits, words: int, role: int) -> Steps[Wide]:
    """Return additive shares, (n, words), of the conjunction of one party's bit, (n,), and the other's."""
    # of one half each party is the receiver
    half = len(bits) // 2
    mine, theirs = (bits[:half], bits[half:]) if role == 0 else (bits[half:], bits[:half])
    longest = len(bits) - half
    drawn = yield from transfers.draw_for(np.pad(mine, (0, longest - len(mine))))
    offered = np.zeros((longest, 1, words), np.uint64)
    offered[: len(theirs), 0, 0] = theirs
    received, given = yield from _swapped(drawn, offered)
    parts = received[: len(mine), 0], given[: len(theirs), 0]
    return np.concatenate(parts if role == 0 else parts[::-1])


def times_known(transfers: Transfers, known: Sequence[int], bits: int, y: Wide, role: int) -> Steps[Wide]:
    """Return shares modulo 2^(64 words) of x y_v from shares of y, (n, v, words), and x, (n,), that role 0 knows.

    `known` are the x, |x| < 2^(bits - 1); role 1 gives zeros.
    """
    n, v, words = y.shape
    # of a number that one party knows in full, only products with the other's shares need transfers
    own = bits_of(from_ints(known, -(-bits // 64)), bits).reshape(-1)
    drawn = yield from transfers.draw_for(own)
    flips = packed(drawn.flips)
    if role == 1:
        sent = _Sent(drawn, y, np.ones(n, np.uint8), bits)
        (came,) = take((yield [sent.message]), (np.uint64, flips.shape))
        return sent.share(unpacked(came, len(own)))
    (message,) = take((yield [flips]), (np.uint64, (n * bits, v * words)))
    return add(times(from_ints(known, words)[:, None], y), _received(drawn, message, y.shape, bits))


def _swapped(drawn: Drawn, offered: Wide) -> Steps[tuple[Wide, Wide]]:
    """Return shares of own bits times what the other offers, and of the other's times what is `offered`."""
    sent, flips = _Sent(drawn, offered, np.zeros(len(offered), np.uint8), 1), packed(drawn.flips)
    came, message = take((yield [flips, sent.message]), *((np.uint64, of.shape) for of in (flips, sent.message)))
    return _received(drawn, message, offered.shape, 1), sent.share(unpacked(came, len(offered)))


class _Sent:
    """A sender's end of sums over a receiver's `bits` bits, of weights 1, 2, ..., times y (n, v, words).

    The top bit counts with a negative weight where `minus`, (n,), is 1. `message` is (n * bits, v * words).
    """

    def __init__(self, drawn: Drawn, y: Wide, minus: Bits, bits: int) -> None:
        n, v, words = y.shape
        self._y = np.ascontiguousarray(y)
        self._last = signed(np.broadcast_to(minus[:, None], y.shape[:2]), y)
        blocks = -(-v * words // 2)
        self._pads = np.empty((n * bits, v * words), np.uint64)
        self.message = np.empty((n * bits, v * words), np.uint64)
        for part in pieces(n, max(1, _AT_ONCE // (bits * blocks))):
            rows = slice(part.start * bits, part.stop * bits)
            pads = random_pairs(drawn.sender, drawn.q[rows], drawn.first + rows.start, blocks)
            _correlate(*pads, self._y[part], self._last[part], bits, self._pads[rows], self.message[rows])

    def share(self, flips: Bits) -> Wide:
        """Return the own shares, (n, v, words), by the receiver's flips, (n * bits,)."""
        out = np.zeros(self._y.shape, np.uint64)
        _turn(self._pads, self._y, self._last, flips, out)
        return out


def _received(drawn: Drawn, message: Words, shape: tuple[int, ...], bits: int) -> Wide:
    """Return the receiver's shares, (n, v, words), for the bits that it drew for."""
    n, v, words = shape
    out, blocks = np.zeros((n, v, words), np.uint64), -(-v * words // 2)
    for part in pieces(n, max(1, _AT_ONCE // (bits * blocks))):
        rows = slice(part.start * bits, part.stop * bits)
        pads = drawn.receiver.hash.rows(drawn.t[rows], drawn.first + rows.start, blocks)
        _add_up(pads, drawn.random[rows], drawn.flips[rows], np.ascontiguousarray(message[rows]), out[part])
    return out


@kernel
def _correlate(zero: Words, one: Words, y: Wide, last: Wide, bits: int, pads: Words, message: Words) -> None:
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
def _turn(pads: Words, y: Wide, last: Wide, flips: Bits, out: Wide) -> None:
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
def _add_up(pads: Words, random: Bits, flips: Bits, message: Words, out: Wide) -> None:
    """Write sums of pads, plus the message where the random bit is 1, negative where flipped."""
    words, bits = out.shape[2], flips.size // out.shape[0]
    for n in range(out.shape[0]):
        for i in range(bits - 1, -1, -1):
            row = n * bits + i
            mask, flip = np.uint64(0) - np.uint64(random[row]), np.uint64(0) - np.uint64(flips[row])
            for v in range(out.shape[1]):
                carry, less = np.uint64(0), np.uint64(1) & flip
                lower, over = np.uint64(0), np.uint64(0)
                for word in range(words):
                    at = v * words + word
                    given = message[row, at] & mask
                    total = pads[row, at] + given
                    above = np.uint64(total < given)
                    summed = total + carry
                    carry = above | np.uint64(summed < total)
                    turned = (summed ^ flip) + less
                    less = np.uint64(turned < less)
                    lower, over = _double_and_add(out, n, v, word, turned, lower, over)


@kernel
def _double_and_add(
    out: Wide, n: int, v: int, word: int, number: np.uint64, lower: np.uint64, carry: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Double a word of a number of `out` and add one; return `lower` and `carry` for the word above."""
    before = out[n, v, word]
    doubled = (before << np.uint64(1)) | lower
    total = doubled + number
    over = np.uint64(total < number)
    out[n, v, word] = total + carry
    return before >> np.uint64(63), over | np.uint64(out[n, v, word] < carry)
