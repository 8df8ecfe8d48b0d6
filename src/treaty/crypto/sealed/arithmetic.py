"""Products of shared whole numbers, and a choice between them, by transfers.

A *guarded* sharing of x in m bits is x0 + x1 = x + w 2^m with 0 <= x < 2^(m-1): then w, whether the shares wrap around,
is the disjunction of their top bits. With guarded x (m bits) and y (n bits), modulo 2^k with k <= m + n,

    x y = (x0 + x1) (y0 + y1) - v 2^n (x0 + x1) - w 2^m (y0 + y1),

where, for shares s0 + s1 of any number, w (s0 + s1) = w0 s0 + w1 s1 + w0 (1 - w1) s1 + w1 (1 - w0) s0 with the top bits
w0 and w1. Cross terms are sums of one party's bits times the other's numbers, each a correlated transfer (Gilboa,
"Two Party RSA Key Generation", CRYPTO 1999). Those of w ride on the top bit of a factor: a product takes m + 1
transfers in each direction and two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.compute import kernel, pieces
from treaty.crypto.sealed.steps import Steps, take
from treaty.crypto.sealed.transfers import Bits, Transfers, Words
from treaty.crypto.transfer.aes import hashed
from treaty.crypto.wide import (
    Wide,
    add,
    bit,
    bits_of,
    cut,
    from_ints,
    negative,
    only,
    shifted,
    signed,
    subtract,
    times,
)

_AT_ONCE = 1 << 16  # blocks of 16 bytes of pads in memory


def products(transfers: Transfers, x: Wide, y: Wide, x_bits: int, y_bits: int, bits: int) -> Steps[Wide]:
    """Return shares modulo 2^bits of x y_v, (n, v, words), from guarded shares of x (n, words) and y (n, v, words)."""
    n, v, words = y.shape
    own, top = bits_of(x, x_bits), bit(x, x_bits - 1)
    wraps = bit(y, y_bits - 1)
    first, q, t = yield from transfers.choose(np.concatenate([own.reshape(-1), wraps.reshape(-1)]))
    delta, split = transfers.delta, n * x_bits
    sent, message = _send(q[:split], delta, first, y, 1 - top, x_bits)
    other = shifted(only(1 - wraps, np.broadcast_to(x[:, None], y.shape)), y_bits).reshape(n * v, 1, words)
    sent_top, message_top = _send(q[split:], delta, first + split, other, np.zeros(n * v, np.uint8), 1)
    came, came_top = take(
        (yield [message, message_top]), (np.uint64, message.shape), (np.uint64, message_top.shape)
    )  # fmt: skip
    cross = _receive(t[:split], first, own, came, y.shape)
    cross_top = _receive(t[split:], first + split, wraps.reshape(-1, 1), came_top, other.shape)
    out = add(add(times(x[:, None], y), sent), cross)
    out = subtract(out, shifted(only(np.broadcast_to(top[:, None], wraps.shape), y), x_bits))
    both = add(sent_top, cross_top).reshape(y.shape)
    out = subtract(out, add(both, shifted(only(wraps, np.broadcast_to(x[:, None], y.shape)), y_bits)))
    return cut(out, bits)


def squares(transfers: Transfers, u: Wide, u_bits: int, bits: int, role: int) -> Steps[Wide]:
    """Return shares modulo 2^bits of u^2 from shares modulo 2^u_bits of u (n, words), |u| < 2^(u_bits - 2).

    `bits` is at most 2 u_bits - 1. `role` is 0 at one party and 1 at the other.
    """
    words = u.shape[-1]
    half = shifted(np.eye(1, words, dtype=np.uint64), u_bits - 2)[0]
    positive = cut(add(u, half), u_bits) if role == 0 else u  # u + half is not negative
    (square,) = (yield from products(transfers, positive, positive[:, None], u_bits, u_bits, bits)).transpose(1, 0, 2)
    out = subtract(square, shifted(positive, u_bits - 1))
    return cut(add(out, shifted(half, u_bits - 2)) if role == 0 else out, bits)


def selected(transfers: Transfers, bits: Bits, values: Wide) -> Steps[Wide]:
    """Return shares modulo 2^(64 words) of values (n, v, words) where the bit is 1, of 0 where it is 0.

    Shares of bits, (n,), are exclusive: their sum modulo 2 is the bit.
    """
    first, q, t = yield from transfers.choose(bits)
    of_all = np.broadcast_to(bits[:, None], values.shape[:2])
    sent, message = _send(q, transfers.delta, first, signed(of_all, values), np.zeros(len(bits), np.uint8), 1)
    (came,) = take((yield [message]), (np.uint64, message.shape))
    cross = _receive(t, first, bits[:, None], came, values.shape)
    return add(add(only(of_all, values), sent), cross)


def both_of(transfers: Transfers, bits: Bits, words: int, role: int) -> Steps[Wide]:
    """Return additive shares, (n, words), of the conjunction of one party's bit, (n,), and the other's."""
    half = len(bits) // 2  # of one half each party is the receiver
    mine, theirs = (bits[:half], bits[half:]) if role == 0 else (bits[half:], bits[:half])
    longest = len(bits) - half
    first, q, t = yield from transfers.choose(_padded(mine, longest))
    offered = np.zeros((longest, 1, words), np.uint64)
    offered[: len(theirs), 0, 0] = theirs
    sent, message = _send(q, transfers.delta, first, offered, np.zeros(longest, np.uint8), 1)
    (came,) = take((yield [message]), (np.uint64, message.shape))
    cross = _receive(t, first, _padded(mine, longest)[:, None], came, offered.shape)[:, 0]
    received, given = cross[: len(mine)], sent[: len(theirs), 0]
    return np.concatenate([received, given] if role == 0 else [given, received])


def times_known(transfers: Transfers, known: Sequence[int], bits: int, y: Wide, role: int) -> Steps[Wide]:
    """Return shares modulo 2^(64 words) of x y_v from shares of y, (n, v, words), and x, (n,), that role 0 knows.

    `known` are the x, |x| < 2^(bits - 1); role 1 gives zeros.
    """
    n, v, words = y.shape
    first, q, t = yield from transfers.choose(bits_of(from_ints(known, -(-bits // 64)), bits).reshape(-1))
    if role == 1:
        sent, message = _send(q, transfers.delta, first, y, np.ones(n, np.uint8), bits)
        take((yield [message]))
        return sent
    (came,) = take((yield []), (np.uint64, (n * bits, v * words)))
    own = bits_of(from_ints(known, -(-bits // 64)), bits)
    cross = _receive(t, first, own, came, y.shape)
    return add(times(from_ints(known, words)[:, None], y), cross)


def _padded(bits: Bits, length: int) -> Bits:
    out = np.zeros(length, np.uint8)
    out[: len(bits)] = bits
    return out


# ---------------------------------------------------------------- correlated transfers of wide numbers


def _send(q: Words, delta: Words, first: int, y: Wide, minus: Bits, bits: int) -> tuple[Wide, Words]:
    """Return the sender's shares of sums over a receiver's `bits` bits, of weights 1, 2, ..., times y (n, v, words).

    The top bit counts with a negative weight where `minus`, (n,), is 1. The second result is the message,
    (n * bits, v * words).
    """
    n, v, words = y.shape
    share, message = np.zeros(y.shape, np.uint64), np.empty((n * bits, v * words), np.uint64)
    last = signed(np.broadcast_to(minus[:, None], y.shape[:2]), y)
    blocks = -(-v * words // 2)
    for part in pieces(n, max(1, _AT_ONCE // (bits * blocks))):
        rows = slice(part.start * bits, part.stop * bits)
        at = first + rows.start
        pads = hashed(q[rows], at, blocks), hashed(q[rows] ^ delta, at, blocks)
        _correlate(*pads, np.ascontiguousarray(y[part]), last[part], bits, share[part], message[rows])
    return negative(share), message


def _receive(t: Words, first: int, own: Bits, message: Words, shape: tuple[int, ...]) -> Wide:
    """Return the receiver's shares, (n, v, words), for its bits, (n, bits)."""
    n, v, words = shape
    bits, out, blocks = own.shape[1], np.zeros((n, v, words), np.uint64), -(-v * words // 2)
    for part in pieces(n, max(1, _AT_ONCE // (bits * blocks))):
        rows = slice(part.start * bits, part.stop * bits)
        _add_up(hashed(t[rows], first + rows.start, blocks), own[part], np.ascontiguousarray(message[rows]), out[part])
    return out


@kernel
def _correlate(zero: Words, one: Words, y: Wide, last: Wide, bits: int, share: Wide, message: Words) -> None:
    words = y.shape[2]
    for n in range(y.shape[0]):
        for i in range(bits):
            row = n * bits + i
            for v in range(y.shape[1]):
                carry, borrow = np.uint64(0), np.uint64(0)
                for word in range(words):
                    at = v * words + word
                    number = last[n, v, word] if i == bits - 1 else y[n, v, word]
                    total = zero[row, at] + number
                    over = np.uint64(total < number)
                    summed = total + carry
                    carry = over | np.uint64(summed < total)
                    less = summed - one[row, at]
                    under = np.uint64(summed < one[row, at])
                    message[row, at] = less - borrow
                    borrow = under | np.uint64(less < borrow)
                _add_shifted(share, n, v, zero, row, v * words, i)


@kernel
def _add_up(pads: Words, own: NDArray[np.uint8], message: Words, out: Wide) -> None:
    words, bits = out.shape[2], own.shape[1]
    for n in range(out.shape[0]):
        for i in range(bits):
            row, mask = n * bits + i, np.uint64(0) - np.uint64(own[n, i])
            for v in range(out.shape[1]):
                carry = np.uint64(0)
                for word in range(words):
                    at = v * words + word
                    given = message[row, at] & mask
                    total = pads[row, at] + given
                    over = np.uint64(total < given)
                    summed = total + carry
                    carry = over | np.uint64(summed < total)
                    pads[row, at] = summed
                _add_shifted(out, n, v, pads, row, v * words, i)


@kernel
def _add_shifted(out: Wide, n: int, v: int, numbers: Words, row: int, first: int, shift: int) -> None:
    """Add a number of `numbers`, from its word `first`, times 2^shift to a number of `out`."""
    words, skipped, rest = out.shape[2], shift // 64, np.uint64(shift % 64)
    carry, lower = np.uint64(0), np.uint64(0)
    for word in range(words - skipped):
        number = numbers[row, first + word]
        moved = (number << rest) | lower
        lower = (number >> (np.uint64(64) - rest)) if rest else np.uint64(0)
        total = out[n, v, word + skipped] + moved
        over = np.uint64(total < moved)
        summed = total + carry
        carry = over | np.uint64(summed < total)
        out[n, v, word + skipped] = summed
