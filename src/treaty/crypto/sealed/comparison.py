"""Which of shared numbers are negative: the carry of two parties' shares, by digits of four bits.

The top bit of z0 + z1 is that of the shares and a carry from below, which is there where one party's low bits exceed
the complement of the other's. Digits are compared by a transfer of 1 of 16 each, and joined in a tree, four at a time:
the millionaires' protocol of Rathee et al., "CrypTFlow2", CCS 2020 (section 3), whose tree joins two. Bits are shared
exclusively.
"""

from __future__ import annotations

import numpy as np

from treaty.crypto.keystream import Keystream
from treaty.crypto.sealed.quads import join
from treaty.crypto.sealed.steps import Steps, take
from treaty.crypto.sealed.transfers import Bits, Transfers, triples
from treaty.crypto.transfer.aes import hashed
from treaty.crypto.transfer.bits import packed, unpacked
from treaty.crypto.transfer.extension import joined, messages_of
from treaty.crypto.wide import Wide, bit, bits_of

_DIGIT = 4
_ONE, _EVEN = np.uint32(1), np.uint32(0x55555555)


def negatives(transfers: Transfers, z: Wide, bits: int, role: int) -> Steps[Bits]:
    """Return shares of the top bit of each z, (n,), from shares modulo 2^bits, (n, words)."""
    low, top = bits_of(z, bits - 1), bit(z, bits - 1)
    return top ^ (yield from carries(transfers, low, role))


def carries(transfers: Transfers, low: Bits, role: int) -> Steps[Bits]:
    """Return shares of whether the numbers of both parties, given by bits (n, count), together reach 2^count."""
    half = len(low) // 2  # each party compares its digits with the other's complements in one half
    mine, theirs = (low[:half], low[half:]) if role == 0 else (low[half:], low[:half])
    greater, equal = yield from _digits(transfers, _numbers(1 - mine), _numbers(theirs))
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


def _numbers(bits: Bits) -> Bits:
    """Return digits (n, digits) of four bits each, the lowest first."""
    count = -(-bits.shape[1] // _DIGIT)
    padded = np.zeros((len(bits), count * _DIGIT), np.uint8)
    padded[:, : bits.shape[1]] = bits
    weights = np.array([1, 2, 4, 8], np.uint8)
    digits: Bits = (padded.reshape(len(bits), count, _DIGIT) * weights).sum(axis=2, dtype=np.uint8)
    return digits


def _digits(transfers: Transfers, y: Bits, x: Bits) -> Steps[tuple[Bits, Bits]]:
    """Return shares of whether x > y and x = y, digit by digit.

    `y` (n, digits) are compared with the other party's x, whose shares come first, and `x` (m, digits) with its y.
    """
    longest, digits = -(-(len(x) + len(y)) // 2), y.shape[1]
    chosen = np.zeros((longest, digits), np.uint8)
    chosen[: len(y)] = y
    choices: Bits = (chosen[..., None] >> np.arange(_DIGIT, dtype=np.uint8)) & np.uint8(1)
    first, q, t = yield from transfers.choose(choices.reshape(-1))
    count = longest * digits
    shares = np.frombuffer(Keystream().raw(count), np.uint8) & 3
    given = np.zeros((longest, digits), np.uint32)
    given[: len(x)] = x
    at = 2 * given.reshape(-1)  # a table has two bits for each number: below the given one greater, there equal
    table = (((_ONE << at) - _ONE) & _EVEN) | (_ONE << at << _ONE)
    table ^= shares * _EVEN
    for number, pad in enumerate(messages_of(joined(q, _DIGIT), transfers.delta, first, _DIGIT)):
        table ^= (pad[:, 0].astype(np.uint32) & np.uint32(3)) << np.uint32(2 * number)
    (came,) = take((yield [table]), (np.uint32, table.shape))
    mine = (came >> (2 * chosen.reshape(-1)).astype(np.uint32)).astype(np.uint8)
    mine = (mine ^ hashed(joined(t, _DIGIT), first)[:, 0].astype(np.uint8)) & np.uint8(3)
    both: Bits = np.concatenate([mine.reshape(longest, digits)[: len(y)], shares.reshape(longest, digits)[: len(x)]])
    return both & np.uint8(1), both >> np.uint8(1)
