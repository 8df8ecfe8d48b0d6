"""Which of shared numbers are negative: the carry of two parties' shares, by digits of four bits.

The top bit of z0 + z1 is that of the shares and a carry from below, which is there where one party's low bits exceed
the complement of the other's. Digits are compared by a transfer of 1 of 16 each, and joined in a tree, four at a time:
the millionaires' protocol of Rathee et al., "CrypTFlow2", CCS 2020 (section 3), whose tree joins two. Bits are shared
exclusively.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.sealed.quads import Steps, join, take
from treaty.crypto.sealed.transfers import Bits, Transfers, triples
from treaty.crypto.transfer.bits import packed, unpacked
from treaty.crypto.transfer.extension import joined, message_bits
from treaty.crypto.wide import Wide, bit, bits_of
from treaty.machine.kernels import kernel

_DIGIT = 4


def negatives(transfers: Transfers, z: Wide, bits: int, role: int) -> Steps[Bits]:
    """Return shares of the top bit of each z, (n,), from shares modulo 2^bits, (n, words)."""
    low, top = bits_of(z, bits - 1), bit(z, bits - 1)
    return top ^ (yield from carries(transfers, low, role))


def comparison_steps(bits: int) -> int:
    """Return the steps that `negatives` takes, besides those that fill the stocks."""
    digits, steps = -(-(bits - 1) // _DIGIT), 2
    while digits > 1:
        digits, steps = -(-digits // 4), steps + 1
    return steps


def carries(transfers: Transfers, low: Bits, role: int) -> Steps[Bits]:
    """Return shares of whether the numbers of both parties, given by bits (n, count), together reach 2^count."""
    half = len(low) // 2  # each party compares its digits with the other's complements in one half
    mine, theirs = (low[:half], low[half:]) if role == 0 else (low[half:], low[:half])
    greater, equal = yield from _digits(transfers, _whole(1 - mine), _whole(theirs))
    if role == 1:
        greater, equal = (np.concatenate([x[len(mine) :], x[: len(mine)]]) for x in (greater, equal))
    carry = yield from join(transfers, np.ascontiguousarray(greater.T), np.ascontiguousarray(equal.T), role)
    return carry


def conjunctions(transfers: Transfers, x: Bits, ys: Bits, role: int) -> Steps[Bits]:
    """Return shares of x and y for each of at most two `ys`, (k, n): one step."""
    count, n = ys.shape
    yield from transfers.reserve(n)
    a, b, c = triples(transfers, n)
    opened = np.concatenate([(x ^ a)[None], ys ^ b[:count]])
    sent = packed(opened.reshape(-1))
    (came,) = take((yield [sent]), (np.uint64, sent.shape))
    opened ^= unpacked(came, opened.size).reshape(opened.shape)
    e, f = opened[0], opened[1:]
    out: Bits = c[:count] ^ (e & b[:count]) ^ (f & a)
    return np.bitwise_xor(out, e & f) if role == 0 else out


def _whole(bits: Bits) -> Bits:
    """Return bits (n, count) with zeros above, so that they make whole digits."""
    out = np.zeros((len(bits), -(-bits.shape[1] // _DIGIT) * _DIGIT), np.uint8)
    out[:, : bits.shape[1]] = bits
    return out


def _numbers(bits: Bits, longest: int) -> Bits:
    """Return the digits of bits (n, 4 digits) in one row, with zeros for `longest` - n numbers more."""
    raw = np.packbits(bits.reshape(-1), bitorder="little")  # two digits in a byte
    out = np.zeros((max(len(raw), longest * bits.shape[1] // (2 * _DIGIT) + 1), 2), np.uint8)
    out[: len(raw), 0], out[: len(raw), 1] = raw & np.uint8(15), raw >> np.uint8(4)
    return out.reshape(-1)[: longest * bits.shape[1] // _DIGIT]


def _digits(transfers: Transfers, y: Bits, x: Bits) -> Steps[tuple[Bits, Bits]]:
    """Return shares of whether x > y and x = y, digit by digit, (n + m, digits).

    `y`, bits (n, 4 digits), are compared with the other party's x, whose shares come first, and `x` (m, 4 digits) with
    its y.
    """
    longest, digits = -(-(len(x) + len(y)) // 2), y.shape[1] // _DIGIT
    choices = np.zeros((longest, y.shape[1]), np.uint8)
    choices[: len(y)] = y
    first, q, t = yield from transfers.choose(choices.reshape(-1))
    shares = np.frombuffer(Keystream().raw(longest * digits), np.uint8) & np.uint8(3)
    table = np.empty(longest * digits, np.uint32)
    _write_tables(_numbers(x, longest), shares, table)
    table ^= message_bits(transfers.sender, joined(q, _DIGIT), first, _DIGIT, 2)
    (came,) = take((yield [table]), (np.uint32, table.shape))
    mine = (came >> (2 * _numbers(y, longest)).astype(np.uint32)).astype(np.uint8)
    mine = (mine ^ transfers.receiver.hash.rows(joined(t, _DIGIT), first)[:, 0].astype(np.uint8)) & np.uint8(3)
    both: Bits = np.concatenate([mine.reshape(longest, digits)[: len(y)], shares.reshape(longest, digits)[: len(x)]])
    return both & np.uint8(1), both >> np.uint8(1)


@kernel
def _write_tables(given: Bits, shares: Bits, tables: NDArray[np.uint32]) -> None:
    """Write for each digit of four bits a table of two bits per number, xor the share's two bits.

    They are 1 for numbers below the digit, 2 for the digit itself.
    """
    one, even = np.uint32(1), np.uint32(0x55555555)
    for k in range(len(given)):
        at = np.uint32(2 * given[k])
        tables[k] = ((((one << at) - one) & even) | (one << at << one)) ^ (np.uint32(shares[k]) * even)
