"""Sign bits of numbers that two servers share modulo 2^l, as XOR shares, with the help of a dealer.

A binary adder on AND triples, many comparisons at a time. A server's program is a generator with the message seam of
`secure_comparison`.

**Assumed:** honest but curious servers and dealer; neither the two servers nor a server and the dealer collude. The
dealer learns the number of comparisons. Each server receives operands under one-time pads, which are uniform bits, and
each of the two output bits is uniform by itself. Both servers send their output bit to whoever is to learn the answer
and to nobody else, re-randomised (`fresh_shares`) if that receiver may have the dealer's numbers.

**Cost:** the dealer's message, 1 + ceil(log2(l - 1)) rounds, and less than 4 l bits per comparison from each server to
the other; from the dealer a key for each server and less than 3 l bits for server 1. For l = 64: 7 rounds, 243 bits (61
bytes in all) and 181 (23 bytes). For l = 6, enough for 32 bins: 4 rounds, 14 bits and 10.

References: Beaver, Efficient Multiparty Protocols Using Circuit Randomization, CRYPTO 1991 (AND triples).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.masks import KEY_BYTES, mask_key
from treaty.crypto.keystream import Keystream
from treaty.crypto.sharing.secure_comparison import Program, check_message
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import CryptoError

# Bits are cut in slices: words of slice i hold bit i of 64 comparisons each, so that nothing sent is padding.


class TripleShares:
    """The dealer's message to one server for one batch of comparisons modulo 2^bits.

    Operands and products are a keystream under `key`; `corrections`, uint64 (triples, ceil(rows / 64)), are server 1's
    shares of the products, and empty (0, ...) for server 0.
    """

    def __init__(self, rows: int, key: bytes, corrections: Words, bits: int = 64) -> None:
        self.rows, self.key, self.corrections, self.bits = rows, key, corrections, bits
        self._used = False

    def use(self, rows: int) -> None:
        """Mark the batch as used; CryptoError if it was used before or has another number of rows."""
        if self._used or rows != self.rows:
            what = "used ones" if self._used else f"those for {self.rows}"
            raise CryptoError(f"expected new triples for {rows} comparisons, got {what}; have them dealt again")
        self._used = True


class _TripleStream:
    """One server's shares of a batch's operands a, b and products a & b, slice after slice."""

    def __init__(self, own: int, words: int, dealt: TripleShares) -> None:
        stream = Keystream(dealt.key)
        self._own, self._words, self._corrections, self._at = own, words, dealt.corrections, 0
        self._draw: Callable[[int], Words] = lambda slices: stream.bits(64, slices * words).reshape(slices, words)

    def operands(self, slices: int) -> Words:
        return self._draw(slices)

    def products(self, slices: int) -> Words:
        """Random for server 0, the dealer's corrections for server 1."""
        if self._own == 0:
            return self._draw(slices)
        self._at += slices
        return self._corrections[self._at - slices : self._at]


def triples_of(bits: int) -> int:
    """Return the number of triples per comparison modulo 2^bits: 181 for 64."""
    return bits - 1 + sum(2 * (spans // 2) - 1 for spans in _levels(bits))


def deal(rows: int, bits: int = 64, keys: tuple[bytes, bytes] | None = None) -> tuple[TripleShares, TripleShares]:
    """Make AND triples for `rows` comparisons modulo 2^bits (2 to 64), as the dealer: for server 0 and for server 1.

    Secret `keys` of 32 bytes each, used for nothing else, may be given; the default is the operating system's
    generator.
    """
    words = -(-rows // 64)
    none = np.empty((0, words), np.uint64)
    dealt = [TripleShares(rows, key, none, bits) for key in keys or (secrets.token_bytes(32), secrets.token_bytes(32))]
    first, second = (_TripleStream(own, words, one) for own, one in enumerate(dealt))
    corrections = [first.operands(bits - 1) & second.operands(bits - 1) ^ first.products(bits - 1)]
    for spans in _levels(bits):
        pairs = spans // 2
        upper, lower, lower_p = (first.operands(count) ^ second.operands(count) for count in (pairs, pairs, pairs - 1))
        corrections.append(upper & lower ^ first.products(pairs))
        corrections.append(upper[1:] & lower_p ^ first.products(pairs - 1))
    return dealt[0], TripleShares(rows, dealt[1].key, np.concatenate(corrections), bits)


def sign_bit(own: int, values: NDArray[np.uint64], dealt: TripleShares) -> Program[NDArray[np.uint8]]:
    """Return XOR shares, uint8 (m,), of the sign bits of numbers modulo 2^l: of [a < 0] in two's complement.

    `values` uint64 (m,) are server `own`'s additive shares of a, modulo 2^l or more; only the lowest l bits count. For
    [x < y] give shares of x - y, with |x - y| < 2^(l - 1). CryptoError for used or unfitting triples or a malformed
    message.

    The sum's sign is the sum of both shares' signs and the carry out of l - 1 bits. A span of bits generates a carry
    (g) or passes one on (p); for one bit g = a & b, p = a ^ b. Neighbouring spans are joined until one is left:
    g = g_upper ^ (p_upper & g_lower), p = p_upper & p_lower. Joining opens p_upper under one pad for both products; the
    lowest span needs no p. For the first g each operand is known to one server, which opens it alone.
    """
    dealt.use(len(values))
    carries = dealt.bits - 1  # of the bits below the sign
    slices = _transposed(values)
    triples = _TripleStream(own, slices.shape[1], dealt)
    a = triples.operands(carries)
    mine = slices[:carries] ^ a
    other = yield from swap(own, mine)
    g = other & a ^ triples.products(carries)
    if own == 0:
        g ^= other & mine
    p = slices[:carries]
    for _ in _levels(dealt.bits):
        g, p = yield from _join(own, g, p, triples)
    bits = np.unpackbits((slices[carries] ^ g[0]).astype("<u8").view(np.uint8), bitorder="little")
    return bits[: len(values)]


def _levels(bits: int) -> list[int]:
    """Return the number of spans before each joining: 63, 32, 16, 8, 4, 2 for 64 bits."""
    counts = []
    spans = bits - 1
    while spans > 1:
        counts.append(spans)
        spans = -(-spans // 2)
    return counts


def _join(own: int, g: Words, p: Words, triples: _TripleStream) -> Program[tuple[Words, Words]]:
    """Join spans 2i and 2i + 1, lowest first; an odd last one stays."""
    pairs = len(g) // 2
    even = 2 * pairs
    upper, lower, lower_p = (triples.operands(count) for count in (pairs, pairs, pairs - 1))
    mine = np.concatenate([p[1:even:2] ^ upper, g[:even:2] ^ lower, p[2:even:2] ^ lower_p])
    opened = (yield from swap(own, mine)) ^ mine
    d, e, f = opened[:pairs], opened[pairs : 2 * pairs], opened[2 * pairs :]
    carried = (d & lower) ^ (upper & e) ^ triples.products(pairs)
    passed = (d[1:] & lower_p) ^ (upper[1:] & f) ^ triples.products(pairs - 1)
    if own == 0:
        carried ^= d & e
        passed ^= d[1:] & f
    carried ^= g[1:even:2]
    unused = np.zeros_like(p[:1])  # the lowest span's p
    return np.concatenate([carried, g[even:]]), np.concatenate([unused, passed, p[even:]])


def swap(own: int, mine: Words) -> Program[Words]:
    """Send an array to the other server and return the one it sent, of the same shape."""
    replies = yield {1 - own: mine}
    if set(replies) != {1 - own}:
        raise CryptoError(f"expected a message of server {1 - own} alone, got those of {sorted(replies)}")
    check_message(1 - own, replies[1 - own], mine.shape)
    return replies[1 - own]


def _transposed(values: NDArray[np.uint64]) -> Words:
    """Put bit i of 64 numbers into each word of row i: (m,) -> (64, ceil(m / 64))."""
    padded = np.zeros(-(-len(values) // 64) * 64, "<u8")
    padded[: len(values)] = values
    bits = np.unpackbits(padded.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    packed = np.packbits(np.ascontiguousarray(bits.T), axis=1, bitorder="little")
    return packed.view("<u8").astype(np.uint64)


# ----------------------------------------------------------------
# Re-randomisation of shares before they are opened: their sum stays, and nothing else can be inferred from them.
#
# Shares that two servers compute, as in `additive_routing`, consist of a dealer's random numbers and of what the
# servers keep. A receiver of both shares who has the dealer's help could subtract these numbers and would be left with
# equations about the rest: leaf values of other rows, thresholds, columns. So the two servers have a seed that the
# dealer never sees, and change what they send by a keystream under it: one adds what the other subtracts, or both XOR
# it::
#
#     keystream of message i = AES-256-CTR under HKDF-Expand-SHA256(seed, info = "treaty fresh shares" || i)
#
# To everybody without the seed, the shares of a message are then uniform among all shares of the same numbers, whatever
# else they know (HKDF and AES as pseudorandom functions). A server that has the seed knew its own share before, and the
# other follows from what is opened.

_PURPOSE = b"treaty fresh shares"


class FreshShares:
    """The end of server `own`, 0 or 1; only the other server has the seed, too, and it is used for nothing else."""

    def __init__(self, own: int, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise CryptoError(f"expected a seed of {KEY_BYTES} bytes, got {len(seed)} - at shares for users")
        self._own, self._seed, self._last = own, seed, -1

    def numbers(self, message: int, shares: Words) -> Words:
        """Re-randomise additive shares modulo 2^64, uint64 (...).

        `message` is the same at both servers and must exceed that of every message before, of numbers or bits
        (CryptoError): the difference of two messages under one keystream would be that of the original shares.
        """
        mask = self._stream(message).bits(64, shares.size).reshape(shares.shape)
        fresh: Words = shares - mask if self._own else shares + mask
        return fresh

    def bits(self, message: int, shares: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Re-randomise XOR shares of bits, uint8 (...) of 0 and 1; see `numbers`."""
        drawn = np.frombuffer(self._stream(message).raw(-(-shares.size // 8)), np.uint8)
        return shares ^ np.unpackbits(drawn, count=shares.size).reshape(shares.shape)

    def _stream(self, message: int) -> Keystream:
        if message <= self._last:
            raise CryptoError(
                f"expected a message after number {self._last}, got {message}, whose keystream may have been used - at"
                " shares for users"
            )
        self._last = message
        return Keystream(mask_key(self._seed, _PURPOSE + message.to_bytes(8, "big")))
