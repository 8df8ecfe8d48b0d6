"""Comparison of numbers shared modulo 2^l between two servers helped by a dealer: XOR shares of a sign bit.

A binary adder on AND triples, many comparisons at a time. A server's program is a generator; the seam is that of
`secure_comparison`.

**Assumed:** honest but curious, neither the two servers together nor one of them with the dealer. The dealer
learns the number of comparisons. Each server receives operands under one-time pads, uniform bits; the two output bits
are each uniform. For whoever is to learn an answer: both servers send their bit to it, and to nobody else, made anew
(`fresh_shares`) in case that one has the dealer's numbers.

**Cost:** the dealer's message, 1 + ceil(log2(l - 1)) rounds, and less than 4 l bits per comparison from each server to
the other; from the dealer a key for each and less than 3 l bits for server 1. For l = 64: 7 rounds, 243 bits (61 bytes
in all) and 181 (23 bytes). For l = 6, which 32 bins take: 4 rounds, 14 bits and 10.

References
----------
Beaver, Efficient Multiparty Protocols Using Circuit Randomization, CRYPTO 1991 (AND triples).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.sharing.secure_comparison import Program, check_message
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import CryptoError

# Bits are cut in slices: words of slice i hold bit i of 64 comparisons each, so that nothing sent is padding.


class Dealt:
    """What the dealer gives one server for one batch of comparisons: a key and, for server 1, corrections.

    Attributes
    ----------
    rows : int
        Comparisons of the batch.
    key : bytes of length 32
        Its shares of operands and products are a keystream under it.
    corrections : uint64 (triples, ceil(rows / 64))
        Server 1's shares of the products; empty (0, ...) for server 0.
    bits : int
        l: numbers are compared modulo 2^l.
    """

    def __init__(self, rows: int, key: bytes, corrections: Words, bits: int = 64) -> None:
        self.rows, self.key, self.corrections, self.bits = rows, key, corrections, bits
        self._used = False

    def use(self, rows: int) -> None:
        """Note that a batch is computed; CryptoError when it has other rows, or was computed before."""
        if self._used or rows != self.rows:
            what = "used ones" if self._used else f"those for {self.rows}"
            raise CryptoError(f"expected new triples for {rows} comparisons, got {what}; have them dealt again")
        self._used = True


class _Triples:
    """One server's shares of a batch's operands a, b and products a & b, slice after slice."""

    def __init__(self, own: int, words: int, dealt: Dealt) -> None:
        stream = Keystream(dealt.key)
        self._own, self._words, self._corrections, self._at = own, words, dealt.corrections, 0
        self._draw: Callable[[int], Words] = lambda slices: stream.bits(64, slices * words).reshape(slices, words)

    def operands(self, slices: int) -> Words:
        return self._draw(slices)

    def products(self, slices: int) -> Words:
        """Server 0's are random, server 1's what the dealer has put right."""
        if self._own == 0:
            return self._draw(slices)
        self._at += slices
        return self._corrections[self._at - slices : self._at]


def triples_of(bits: int) -> int:
    """Return how many triples a comparison modulo 2^bits takes: 181 for 64."""
    return bits - 1 + sum(2 * (spans // 2) - 1 for spans in _levels(bits))


def deal(rows: int, bits: int = 64, keys: tuple[bytes, bytes] | None = None) -> tuple[Dealt, Dealt]:
    """Make AND triples for one batch of comparisons, as the dealer.

    Parameters
    ----------
    rows : int
        Number of comparisons.
    bits : int, default 64
        l, from 2 to 64: numbers are compared modulo 2^l.
    keys : two bytes of length 32, optional
        Secret, of server 0 and server 1, and used for nothing else; by default from the operating system.

    Returns
    -------
    Dealt, Dealt
        For server 0 and for server 1, each to be kept from the other.
    """
    words = -(-rows // 64)
    none = np.empty((0, words), np.uint64)
    dealt = [Dealt(rows, key, none, bits) for key in keys or (secrets.token_bytes(32), secrets.token_bytes(32))]
    first, second = (_Triples(own, words, one) for own, one in enumerate(dealt))
    corrections = [first.operands(bits - 1) & second.operands(bits - 1) ^ first.products(bits - 1)]
    for spans in _levels(bits):
        pairs = spans // 2
        upper, lower, lower_p = (first.operands(count) ^ second.operands(count) for count in (pairs, pairs, pairs - 1))
        corrections.append(upper & lower ^ first.products(pairs))
        corrections.append(upper[1:] & lower_p ^ first.products(pairs - 1))
    return dealt[0], Dealt(rows, dealt[1].key, np.concatenate(corrections), bits)


def sign_bit(own: int, values: NDArray[np.uint64], dealt: Dealt) -> Program[NDArray[np.uint8]]:
    """Return XOR shares of the most significant bits of numbers modulo 2^l: of [a < 0] in two's complement.

    Parameters
    ----------
    own : int
        This server, 0 or 1.
    values : uint64 (m,)
        Its additive shares of a, modulo 2^l or more, of which the lowest l bits are looked at; for [x < y] those of
        x - y, with |x - y| < 2^(l - 1).
    dealt : Dealt
        The dealer's message to this server, for m comparisons.

    Returns
    -------
    uint8 (m,)
        0 or 1; the answer is the exclusive or of both servers'.

    Raises
    ------
    CryptoError
        When the triples are for another number of comparisons or were used, or a message has another form.

    Notes
    -----
    The sum's sign is that of both shares and of the carry out of l - 1 bits, added up. A span of bits generates a carry
    (g) or passes one on (p); for one bit g = a & b, p = a ^ b. Neighbouring spans are joined until one is left:
    g = g_upper ^ (p_upper & g_lower), p = p_upper & p_lower. Joining opens p_upper under one pad for both products; the
    lowest span needs no p. For the first g each operand is known to one server, which opens it alone.
    """
    dealt.use(len(values))
    carries = dealt.bits - 1  # of the bits below the sign
    slices = _transposed(values)
    triples = _Triples(own, slices.shape[1], dealt)
    a = triples.operands(carries)
    mine = slices[:carries] ^ a
    other = yield from _swap(own, mine)
    g = other & a ^ triples.products(carries)
    if own == 0:
        g ^= other & mine
    p = slices[:carries]
    for _ in _levels(dealt.bits):
        g, p = yield from _join(own, g, p, triples)
    bits = np.unpackbits((slices[carries] ^ g[0]).astype("<u8").view(np.uint8), bitorder="little")
    return bits[: len(values)]


def _levels(bits: int) -> list[int]:
    """How many spans there are before each joining: 63, 32, 16, 8, 4, 2 for 64 bits."""
    counts = []
    spans = bits - 1
    while spans > 1:
        counts.append(spans)
        spans = -(-spans // 2)
    return counts


def _join(own: int, g: Words, p: Words, triples: _Triples) -> Program[tuple[Words, Words]]:
    """Join spans 2i and 2i + 1, lowest first; an odd last one stays."""
    pairs = len(g) // 2
    even = 2 * pairs
    upper, lower, lower_p = (triples.operands(count) for count in (pairs, pairs, pairs - 1))
    mine = np.concatenate([p[1:even:2] ^ upper, g[:even:2] ^ lower, p[2:even:2] ^ lower_p])
    opened = (yield from _swap(own, mine)) ^ mine
    d, e, f = opened[:pairs], opened[pairs : 2 * pairs], opened[2 * pairs :]
    carried = (d & lower) ^ (upper & e) ^ triples.products(pairs)
    passed = (d[1:] & lower_p) ^ (upper[1:] & f) ^ triples.products(pairs - 1)
    if own == 0:
        carried ^= d & e
        passed ^= d[1:] & f
    carried ^= g[1:even:2]
    unused = np.zeros_like(p[:1])  # the lowest span's p
    return np.concatenate([carried, g[even:]]), np.concatenate([unused, passed, p[even:]])


def _swap(own: int, mine: Words) -> Program[Words]:
    """Send to the other server; return what it sent."""
    replies = yield {1 - own: mine}
    if set(replies) != {1 - own}:
        raise CryptoError(f"expected a message of server {1 - own} alone, got those of {sorted(replies)}")
    check_message(1 - own, replies[1 - own], mine.shape)
    return replies[1 - own]


def _transposed(values: NDArray[np.uint64]) -> Words:
    """Bit i of 64 numbers in each word of row i: (m,) -> (64, ceil(m / 64))."""
    padded = np.zeros(-(-len(values) // 64) * 64, "<u8")
    padded[: len(values)] = values
    bits = np.unpackbits(padded.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    packed = np.packbits(np.ascontiguousarray(bits.T), axis=1, bitorder="little")
    return packed.view("<u8").astype(np.uint64)
