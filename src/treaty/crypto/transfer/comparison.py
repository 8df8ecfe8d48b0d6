"""Which of shared numbers are negative: the carry of two parties' shares, by digits of three bits.

The top bit of z0 + z1 is the xor of the shares' top bits and of a carry, which is 1 if one party's low bits exceed the
complement of the other's. Digits are compared by a transfer of 1 of 8 each, and joined in a tree, four at a time: the
millionaires' protocol of Rathee et al., "CrypTFlow2", CCS 2020 (section 3), whose tree joins two. Bits are shared
exclusively. A digit takes one step, not two: the receiver has the pad of a random number, and sends its digit's
difference from that while the sender sends, under each number's pad, the results for all eight differences.

Of two digits the upper decides unless it is equal: with shared bits g (greater) and e (equal) of four digits, the third
the uppermost,

    g = g3 + e3 g2 + e3 e2 g1 + e3 e2 e1 g0,    e = e3 e2 e1 e0    (modulo 2).

Each of e0, ..., e3, g0, g1, g2 is opened under a random bit, of which both parties have a share, as they have of every
product of these bits that occurs when the sums are multiplied out (Beaver, "Efficient Multiparty Protocols Using
Circuit Randomization", CRYPTO 1991, for more than two factors). A *quad* has own shares of the 7 bits and 22 products
in one word: what is opened says which of them count, and the result is their parity.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer.arithmetic import Wide, bit, bits_of
from treaty.crypto.transfer.extension import entry_of, joined, message_words, packed, random_pairs, unpacked
from treaty.crypto.transfer.stock import Bits, Drawn, Steps, Transfers, take, triples

_E0, _E1, _E2, _E3, _G0, _G1, _G2 = range(7)
_Product = tuple[int, ...]

_GREATER: list[_Product] = [(_E3, _G2), (_E3, _E2, _G1), (_E3, _E2, _E1, _G0)]
_EQUAL: list[_Product] = [(_E3, _E2, _E1, _E0)]

# What each product is multiplied by in the first and in the second step of making quads.
_FIRST: dict[_Product, list[_Product]] = {
    (_E3,): [(_E2,), (_E1,), (_E0,), (_G0,), (_G1,), (_G2,)],
    (_E2,): [(_E1,), (_E0,), (_G0,), (_G1,)],
    (_E1,): [(_E0,), (_G0,)],
}
_SECOND: dict[_Product, list[_Product]] = {
    (_E3, _E2): [(_E1,), (_E0,), (_G0,), (_G1,), (_E1, _E0), (_E1, _G0)],
    (_E3, _E1): [(_E0,), (_G0,)],
    (_E2, _E1): [(_E0,), (_G0,)],
}
# What the bits of a quad's word are shares of, the lowest first; the first, which is empty, is 1.
_PRODUCTS: list[frozenset[int]] = [
    frozenset(),
    *sorted(
        {frozenset(part) for term in _GREATER + _EQUAL for n in range(1, 5) for part in combinations(term, n)},
        key=lambda part: (len(part), sorted(part)),
    ),
]

QuadWords = NDArray[np.uint32]


@cache
def _counting() -> QuadWords:
    """Return which products make up greater, and equal, of four digits, by the opened bits, (2, 128)."""
    out = np.zeros((2, 128), np.uint32)
    for result, terms in enumerate((_GREATER, _EQUAL)):
        for opened, term in product(range(128), terms):
            for place, part in enumerate(_PRODUCTS):
                if part <= set(term) and all(opened >> bit & 1 for bit in set(term) - part):
                    out[result, opened] ^= np.uint32(1 << place)
    return out


def draw_quads(transfers: Transfers, count: int) -> Steps[QuadWords]:
    """Draw quads, uint32 (count,); if fewer are left, more are made of transfers first, in some steps."""
    yield from transfers.quads.reserve(count, lambda missing: make_quads(transfers, missing))
    parts = transfers.quads.draw(count)
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def join(transfers: Transfers, greater: Bits, equal: Bits, role: int) -> Steps[tuple[Bits, Bits]]:
    """Return shares of whether numbers are greater, and equal, (n,), of digits (digits, n), lowest first."""
    n = greater.shape[1]
    while len(greater) > 1:
        missing = -len(greater) % 4  # digits that are equal, below all others
        greater = np.concatenate([np.zeros((missing, n), np.uint8), greater]).reshape(-1, 4, n)
        equal = np.concatenate([np.full((missing, n), 1 - role, np.uint8), equal]).reshape(-1, 4, n)
        quads = (yield from draw_quads(transfers, greater.shape[0] * n)).reshape(-1, n)
        # e_0 to e_3 and g_0 to g_2, each under a random bit of the quad
        masked = (quads >> np.uint32(1)).astype(np.uint8) & np.uint8(127)
        masked ^= np.packbits(np.concatenate([equal, greater[:, :3]], 1), axis=1, bitorder="little")[:, 0]
        (came,) = take((yield [masked]), (np.uint8, masked.shape))
        # the parity of the products that count, by what was opened
        counting = (quads | np.uint32(1 - role)) & np.take(_counting(), (masked ^ came) & np.uint8(127), axis=1)
        found = np.bitwise_count(counting) & np.uint8(1)
        greater, equal = found[0] ^ greater[:, 3], found[1]
    return greater[0], equal[0]


def make_quads(transfers: Transfers, count: int) -> Steps[None]:
    """Make quads for the stock, of six transfers each, in two steps or three."""
    yield from transfers.reserve(6 * count)
    drawn, others = transfers.drawn(3 * count), transfers.drawn(3 * count)
    # e1, e2 and e3 are random bits of the first three transfers; the others are drawn
    noise = np.frombuffer(Keystream().raw(count), np.uint8)
    shares: dict[frozenset[int], Bits] = {
        frozenset([bit]): noise >> np.uint8(place) & np.uint8(1) for place, bit in enumerate((_E0, _G0, _G1, _G2))
    }
    shares |= {frozenset(factor): bits for factor, bits in zip(_FIRST, np.split(drawn.random, 3), strict=True)}
    yield from _multiply(shares, _FIRST, drawn, turned=False)
    chosen = np.concatenate([shares[frozenset(factor)] for factor in _SECOND])
    yield from _multiply(shares, _SECOND, replace(others, flips=chosen ^ others.random), turned=True)
    out = np.zeros(count, np.uint32)
    for place, part in enumerate(_PRODUCTS[1:], 1):
        out |= shares[part].astype(np.uint32) << np.uint32(place)
    transfers.quads.add(out)


def _multiply(
    shares: dict[frozenset[int], Bits], plan: dict[_Product, list[_Product]], drawn: Drawn, *, turned: bool
) -> Steps[None]:
    """Add shares of the products that the plan has; the first factors are the drawn choices, (len(plan) * n,).

    Choices that are not the transfers' random bits are `turned`: their differences are sent as well.
    """
    # own choices times own others need no message; choices times the other party's others are a transfer
    side_by_side = np.zeros((len(plan), len(drawn.random) // len(plan)), np.uint8)
    for row, others in zip(side_by_side, plan.values(), strict=True):
        for place, other in enumerate(others):
            row |= shares[frozenset(other)] << np.uint8(place)
    offered = side_by_side.reshape(-1)
    first, length = drawn.first, len(offered)
    zero, one = (pad[:, 0].astype(np.uint8) for pad in random_pairs(drawn.sender, drawn.q, first))
    message, flips = zero ^ one ^ offered, packed(drawn.flips)
    if turned:
        their_flips, came = take((yield [flips, message]), (np.uint64, flips.shape), (np.uint8, message.shape))
        zero ^= _only(unpacked(their_flips, length), offered)
    else:
        (came,) = take((yield [message]), (np.uint8, message.shape))
    received = drawn.receiver.hash.rows(drawn.t, first)[:, 0].astype(np.uint8) ^ _only(drawn.random, came)
    found = np.split(_only(drawn.random ^ drawn.flips, offered) ^ zero ^ received, len(plan))
    for (factor, others), products in zip(plan.items(), found, strict=True):
        for place, other in enumerate(others):
            shares[frozenset(factor) | frozenset(other)] = products >> np.uint8(place) & np.uint8(1)


def _only(bits: Bits, values: Bits) -> Bits:
    """Return values where the bit is 1, else 0, without a branch."""
    return values & (np.uint8(0) - bits)


_DIGIT = 3


def negatives(transfers: Transfers, z: Wide, bits: int, role: int) -> Steps[Bits]:
    """Return shares of the top bit of each z, (n,), from shares modulo 2^bits, (n, words)."""
    return bit(z, bits - 1) ^ (yield from carries(transfers, bits_of(z, bits - 1), role))


def comparison_steps(bits: int) -> int:
    """Return the steps of `negatives`, without those that fill the stocks."""
    return 1 + _joins(-(-(bits - 1) // _DIGIT))


def _joins(digits: int) -> int:
    steps = 0
    while digits > 1:
        digits, steps = -(-digits // 4), steps + 1
    return steps


def carries(transfers: Transfers, low: Bits, role: int) -> Steps[Bits]:
    """Return shares of whether the numbers of both parties, given by bits (n, count), together reach 2^count."""
    # of one half each party is the receiver of the comparisons
    half = len(low) // 2
    mine, theirs = (low[:half], low[half:]) if role == 0 else (low[half:], low[:half])
    greater, equal = yield from _digits(transfers, _whole(1 - mine), _whole(theirs))
    if role == 1:
        greater, equal = (np.concatenate([x[len(mine) :], x[: len(mine)]]) for x in (greater, equal))
    carry, _ = yield from join(transfers, np.ascontiguousarray(greater.T), np.ascontiguousarray(equal.T), role)
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
    # Beaver: x y = (e + a) (f + b) = e f + e b + f a + a b, all modulo 2
    e, f = opened[0], opened[1:]
    out: Bits = c[:count] ^ (e & b[:count]) ^ (f & a)
    return np.bitwise_xor(out, e & f) if role == 0 else out


def all_of(transfers: Transfers, bits: Bits, role: int) -> Steps[Bits]:
    """Return shares of the conjunction of bits along their first axis: a step where there are up to four, and so on."""
    both: Bits
    if len(bits) == 2:
        (both,) = yield from conjunctions(transfers, bits[0].ravel(), bits[1].reshape(1, -1), role)
        return both.reshape(bits.shape[1:])
    # all digits are equal
    flat = bits.reshape(len(bits), -1)
    _, equal = yield from join(transfers, np.zeros_like(flat), flat, role)
    return equal.reshape(bits.shape[1:])


def steps_of_all(count: int) -> int:
    """Return the steps of `all_of`, without those that fill the stocks."""
    return _joins(count)


def _whole(bits: Bits) -> Bits:
    """Add zeros above to make whole digits."""
    out = np.zeros((len(bits), -(-bits.shape[1] // _DIGIT) * _DIGIT), np.uint8)
    out[:, : bits.shape[1]] = bits
    return out


def _numbers(bits: Bits) -> Bits:
    """Return the digits that bits, (3 n,), are of, the first the lowest."""
    of = bits.reshape(-1, _DIGIT)
    numbers: Bits = of[:, 0] | of[:, 1] << np.uint8(1) | of[:, 2] << np.uint8(2)
    return numbers


@cache
def _results() -> NDArray[np.uint16]:
    """Return for a digit x and a number r, (8, 8), eight times two bits: whether x is above, and is, r xor 0, 1, ..."""
    x, r, flip = np.ix_(*[np.arange(8)] * 3)
    each = (x > (r ^ flip)) | (x == (r ^ flip)) << 1
    results: NDArray[np.uint16] = (each << 2 * flip).sum(axis=2).astype(np.uint16)
    return results


def _digits(transfers: Transfers, y: Bits, x: Bits) -> Steps[tuple[Bits, Bits]]:
    """Return shares of whether x > y and x = y, digit by digit, (n + m, digits): one step.

    `y`, bits (n, 3 digits), are compared with the other party's x, whose shares come first, and `x` (m, 3 digits) with
    its y.
    """
    longest, width = -(-(len(x) + len(y)) // 2), y.shape[1]
    own, offered = np.zeros((2, longest, width), np.uint8)
    own[: len(y)], offered[: len(x)] = y, x
    drawn = yield from transfers.draw_for(own.reshape(-1))
    # a transfer of 1 of 8: each entry is under the pad of its number, of which the receiver has a random one
    table = np.take(_results(), _numbers(offered.reshape(-1)), axis=0)
    table ^= message_words(transfers.sender, joined(drawn.q, _DIGIT), drawn.first, _DIGIT)
    # the sender's shares of greater and equal, for each difference, are xored into every entry; the first is 0 then,
    # and not sent
    shares = table[:, 0]
    sent = table[:, 1:] ^ shares[:, None]
    flips = packed(drawn.flips)
    came, entries = take((yield [flips, sent]), (np.uint64, flips.shape), (np.uint16, sent.shape))
    opened = transfers.receiver.hash.rows(joined(drawn.t, _DIGIT), drawn.first)[:, 0].astype(np.uint16)
    tables = entries.view(np.uint8).reshape(*entries.shape, 2)
    opened ^= entry_of(tables, _numbers(drawn.random), 1).view(np.uint16)[:, 0]
    both = [
        (of >> (2 * _numbers(differ)).astype(np.uint16)).astype(np.uint8).reshape(longest, -1)
        for of, differ in ((opened, drawn.flips), (shares, unpacked(came, len(drawn.flips))))
    ]
    found = np.concatenate([both[0][: len(y)], both[1][: len(x)]])
    return found & np.uint8(1), found >> np.uint8(1) & np.uint8(1)
