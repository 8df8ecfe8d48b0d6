"""Routing of rows down a hidden tree on additive shares: no server learns a row, a split or a path.

The cheaper form of `shamir_routing`: two servers compute modulo 2^64 with the help of a dealer, who makes random
numbers and products of them and sees none of the servers' data. Rows and splits are encoded alike. In each level the
servers compute one number per row, that of the row's node, and compare it with zero: `sign_bit`, a binary adder on AND
triples, many comparisons at a time.

Programs are generators of one server for all rows, nodes and trees at a time, with the message seam of
`shamir_routing`. Messages are checked for their form only. Every number is a valid share, so wrong shares, and numbers
outside the ranges of `Layout`, give wrong answers for their rows unnoticed.

**Assumptions:** honest but curious servers and dealer; neither the two servers nor a server and the dealer collude;
secure channels.

**What is learned.** Servers and dealer learn numbers of rows, columns, levels and leaves; all else that a server
receives is uniform, whatever is routed. A user learns what is opened to it: the sides of its rows where it is sent
shares of them, else leaf values. The owner learns nothing. A user who colludes with one server or with the dealer still
learns only that if its shares are re-randomised (`keystream.FreshShares`). Never send a user shares as programs return
them: all random numbers in these are the dealer's, who together with the user could take off all leaf values, and
narrow splits down to a few candidates.

**Cost**, in words of 8 bytes per row and tree; K = 2^level, l = `Layout.bits`. A tree of L leaves:

=================  ==============================  ========================  =========================
part               rounds                          one server to the other   dealer to server 1
=================  ==============================  ========================  =========================
`mask_rows`        1                               D once, 4 for all rows    0
comparison         1 + ceil(log2(l - 1))           less than l / 16          less than 3 l / 64
`route_level`      2 + comparison (the root's)     1/64 + comparison         3 + comparison
                   3 + comparison (a later's)      2 (K - 1) + the same      2 K + 1 + the same
`leaf_values`      1                               L                         1
=================  ==============================  ========================  =========================

For l = 64 a comparison takes 7 rounds, 243 bits between servers and 181 from the dealer; for l = 6, enough for 32 bins,
4 rounds, 14 bits and 10.

References: Beaver, Efficient Multiparty Protocols Using Circuit Randomization, CRYPTO 1991 (AND triples, products).
Liu, Ma, Liu, Ma, Nepal, Deng, Boosting Privately, ICDCS 2020 (SecPred; there two servers' comparison, bits opened).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.sharing.shamir import Words
from treaty.crypto.sharing.shamir_routing import Program, check_message
from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Integers

# -------------------------------------------------- comparison
#
# Bits are cut in slices: words of slice i hold bit i of 64 comparisons each, so that nothing sent is padding.


class TripleShares:
    """The dealer's message to one server for one batch of comparisons modulo 2^bits.

    A keystream under `key` gives operands and products; `corrections`, uint64 (triples, ceil(rows / 64)), are server
    1's shares of the products, and empty (0, ...) for server 0.
    """

    def __init__(self, rows: int, key: bytes, corrections: Words, bits: int = 64) -> None:
        self.rows, self.key, self.corrections, self.bits = rows, key, corrections, bits
        self._used = False

    def use(self, rows: int) -> None:
        if self._used or rows != self.rows:
            what = "used ones" if self._used else f"those for {self.rows}"
            raise CryptoError(f"expected new triples for {rows} comparisons, got {what}; have them dealt again")
        self._used = True


def triples_of(bits: int) -> int:
    """Return the number of triples per comparison modulo 2^bits: 181 for 64."""
    return bits - 1 + sum(2 * (spans // 2) - 1 for spans in _levels(bits))


def deal(rows: int, bits: int = 64, keys: tuple[bytes, bytes] | None = None) -> tuple[TripleShares, TripleShares]:
    """Make AND triples for `rows` comparisons modulo 2^bits (2 to 64), as the dealer: for server 0 and for server 1.

    Secret `keys` of 32 bytes each, used for nothing else, may be given; the default is the system's generator.
    """
    words = -(-rows // 64)
    keys = keys or (secrets.token_bytes(32), secrets.token_bytes(32))
    none = np.empty((0, words), np.uint64)
    first, second = (_ServerNumbers(own, key, none) for own, key in enumerate(keys))
    operands = first.numbers(bits - 1, words) & second.numbers(bits - 1, words)
    corrections = [operands ^ first.products(bits - 1, words)]
    for spans in _levels(bits):
        pairs = spans // 2
        upper, lower, lower_p = (
            first.numbers(count, words) ^ second.numbers(count, words) for count in (pairs, pairs, pairs - 1)
        )
        corrections.append(upper & lower ^ first.products(pairs, words))
        corrections.append(upper[1:] & lower_p ^ first.products(pairs - 1, words))
    return TripleShares(rows, keys[0], none, bits), TripleShares(rows, keys[1], np.concatenate(corrections), bits)


def sign_bit(own: int, values: NDArray[np.uint64], dealt: TripleShares) -> Program[NDArray[np.uint8]]:
    """Return XOR shares, uint8 (m,), of the sign bits of numbers modulo 2^l: of [a < 0] in two's complement.

    `values` uint64 (m,) are server `own`'s additive shares of a, modulo 2^l or more; only the lowest l bits count.
    CryptoError for used or unfitting triples or a malformed message.
    """
    # The sum's sign is the sum of both shares' signs and the carry out of l - 1 bits. A span of bits generates a carry
    # (g) or passes one on (p); for one bit g = a & b, p = a ^ b.
    dealt.use(len(values))
    carries = dealt.bits - 1  # of the bits below the sign
    # bit i of 64 numbers goes into each word of row i: (m,) -> (64, ceil(m / 64))
    padded = np.zeros(-(-len(values) // 64) * 64, "<u8")
    padded[: len(values)] = values
    by_number = np.unpackbits(padded.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    by_bit = np.packbits(np.ascontiguousarray(by_number.T), axis=1, bitorder="little")
    slices = by_bit.view("<u8").astype(np.uint64)
    triples = _ServerNumbers(own, dealt.key, dealt.corrections.reshape(-1))
    a = triples.numbers(*slices[:carries].shape)
    # For the first g each operand is known to one server, which opens it alone.
    mine = slices[:carries] ^ a
    other = yield from swap(own, mine)
    g = other & a ^ triples.products(*a.shape)
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


def _join(own: int, g: Words, p: Words, triples: _ServerNumbers) -> Program[tuple[Words, Words]]:
    """Join spans 2i and 2i + 1, lowest first; an odd last one stays."""
    pairs, words = len(g) // 2, g.shape[1]
    even = 2 * pairs
    upper, lower, lower_p = (triples.numbers(count, words) for count in (pairs, pairs, pairs - 1))
    # g = g_upper ^ (p_upper & g_lower), p = p_upper & p_lower: p_upper is opened under one pad for both products; the
    # lowest span needs no p.
    mine = np.concatenate([p[1:even:2] ^ upper, g[:even:2] ^ lower, p[2:even:2] ^ lower_p])
    opened = (yield from swap(own, mine)) ^ mine
    d, e, f = opened[:pairs], opened[pairs : 2 * pairs], opened[2 * pairs :]
    carried = (d & lower) ^ (upper & e) ^ triples.products(pairs, words)
    passed = (d[1:] & lower_p) ^ (upper[1:] & f) ^ triples.products(pairs - 1, words)
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
        raise CryptoError(f"expected a message of server {1 - own} alone, got messages of {sorted(replies)}")
    check_message(1 - own, replies[1 - own], mine.shape)
    return replies[1 - own]


Keys = tuple[bytes, bytes]  # of server 0 and of server 1; each to be kept from the other


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRows:
    """One server's view of n rows: rows minus their mask, which both servers know, and its share of the mask."""

    opened: Words  # (n, D), as the mask
    mask: Words

    def __len__(self) -> int:
        return len(self.opened)

    def part(self, rows: slice) -> MaskedRows:
        return MaskedRows(self.opened[rows], self.mask[rows])


def share_integers(values: Integers, key: bytes | None = None) -> Words:
    """Share rows, splits or leaf values among both servers, as their owner: int64 (...) -> uint64 (2, ...).

    `key` seeds the `Keystream` and must serve these values alone.
    """
    first = Keystream(key).bits(64, values.size).reshape(values.shape)
    return np.stack([first, values.astype(np.uint64) - first])


def open_integers(shares: Words) -> Integers:
    """Open the shares of both servers, as the user who is to learn them: uint64 (2, ...) -> int64 (...)."""
    opened: Words = shares[0] + shares[1]
    return opened.view(np.int64)


def open_bits(shares: NDArray[np.uint8]) -> Flags:
    """Open bits, uint8 (2, ...) -> bool (...); CryptoError unless all shares are 0 or 1."""
    if np.any(shares > 1):
        raise CryptoError("expected shares of bits, 0 or 1, got other numbers - at secure routing")
    opened: Flags = shares[0] != shares[1]
    return opened


def deal_mask(rows: int, columns: int) -> tuple[Words, Keys]:
    """Return the mask of some rows, uint64 (rows, columns), and the servers' keys to their shares of it.

    The mask stays with the dealer and serves all levels of all trees.
    """
    numbers = _DealerNumbers()
    return numbers.drawn(rows, columns), numbers.keys


def deal_level(mask: Words, trees: int, nodes: int, bits: int) -> tuple[Keys, Words]:
    """Return the servers' keys, and server 1's shares of products, for rows with this mask (n, D) to go down one level.

    `nodes` counts those of each tree in the level, `bits` is `Layout.bits`; the shares are uint64
    (`numbers_of_level`,).
    """
    numbers, n = _DealerNumbers(), len(mask)
    corrected = [deal(trees * n, bits, (numbers.first.key(), numbers.second.key()))[1].corrections]
    split_masks = numbers.drawn(trees, nodes, mask.shape[1])
    corrected.append(numbers.corrected(_values(split_masks, mask)))
    coins = numbers.coins(trees, n).astype(np.uint64)
    corrected.append(numbers.corrected(coins))
    path_masks, value_masks = numbers.drawn(trees, nodes - 1, n), numbers.drawn(trees, nodes - 1, n)
    corrected.append(numbers.corrected((path_masks * value_masks).sum(axis=1)))
    corrected.append(numbers.corrected(path_masks * coins[:, None]))
    return numbers.keys, np.concatenate([of.reshape(-1) for of in corrected])


def numbers_of_level(rows: int, trees: int, nodes: int, bits: int) -> int:
    """Return how many numbers of `deal_level` server 1 gets."""
    return triples_of(bits) * -(-trees * rows // 64) + trees * rows * (2 * nodes + 1)


def deal_leaves(rows: int, trees: int, leaves: int) -> tuple[Keys, Words]:
    """Return the servers' keys, and server 1's shares of products, uint64 (trees * rows,), for `leaf_values`."""
    numbers = _DealerNumbers()
    path_masks, value_masks = numbers.drawn(trees, leaves, rows), numbers.drawn(trees, leaves)
    return numbers.keys, numbers.corrected((path_masks * value_masks[..., None]).sum(axis=1)).reshape(-1)


def mask_rows(own: int, rows: Words, key: bytes) -> Program[tuple[MaskedRows, bytes]]:
    """Open server `own`'s shares of encoded rows, uint64 (n, D), minus their mask to both servers; agree on a seed.

    The 32-byte seed is for `FreshShares`: each server contributes to it and the dealer does not see it. `key` is the
    dealer's. CryptoError if the other server's message is malformed, as in all programs here.
    """
    mask = _ServerNumbers(own, key, np.empty(0, np.uint64)).numbers(*rows.shape)
    given = np.frombuffer(secrets.token_bytes(32), "<u8").astype(np.uint64)
    opened, seed = yield from _open(own, [rows - mask, given])
    return MaskedRows(opened, mask), seed.astype("<u8").tobytes()


def route_level(
    own: int, rows: MaskedRows, weights: Words, thresholds: Words, paths: Words | None, bits: int, key: bytes,
    corrections: Words,
) -> Program[tuple[NDArray[np.uint8], Words]]:  # fmt: skip
    """Route n rows one level down; return XOR shares of b = [row goes left], and shares of the next level's paths.

    `weights` (trees, K, D) and `thresholds` (trees, K) are server `own`'s shares of the splits of the level's K =
    2^level nodes of complete trees; `paths` (trees, K, n) those of each row's node, as returned for the level above,
    None at the root; `bits` is `Layout.bits`; `key` and `corrections`, of `numbers_of_level` (server 1) or none
    (server 0), are the dealer's. Returned are uint8 (trees, n), which only the row's user may open, re-randomised, and
    uint64 (trees, 2 K, n): 1 at the row's next node, else 0; node k's children are 2 k (left) and 2 k + 1. CryptoError
    if shapes do not match.
    """
    if weights.ndim != 3:
        raise CryptoError(f"expected weights of splits (trees, K, D), got {weights.shape} - at secure routing")
    trees, nodes, columns = weights.shape
    n = len(rows.opened)
    if paths is None:
        paths = np.full((trees, 1, n), 1 - own, np.uint64)
    _check(thresholds, (trees, nodes), "thresholds of splits")
    _check(rows.opened, (n, columns), "rows")
    _check(paths, (trees, nodes, n), "paths")
    _check(corrections, (own * numbers_of_level(n, trees, nodes, bits),), "the dealer's numbers")
    dealt = _ServerNumbers(own, key, corrections)
    compared = dealt.comparison(trees * n, bits)
    split_masks = dealt.numbers(trees, nodes, columns)
    masked_values = dealt.products(trees, nodes, n)
    coins = dealt.coins(trees, n)
    coin = dealt.products(trees, n)
    path_masks, value_masks = dealt.numbers(trees, nodes - 1, n), dealt.numbers(trees, nodes - 1, n)
    summed, masked_coins = dealt.products(trees, n), dealt.products(trees, nodes - 1, n)
    splits, in_path = yield from _open(own, [weights - split_masks, paths[:, :-1] - path_masks])
    # a_k = w_k.z - T_k of every node: w = (w - mask) + mask, z = (z - mask) + mask, multiplied out
    values = masked_values - thresholds[..., None]
    values += _values(split_masks + splits if own == 0 else split_masks, rows.opened) + _values(splits, rows.mask)
    over = values[:, :-1] - values[:, -1:] - value_masks
    if nodes > 1:
        (over,) = yield from _open(own, [over])
    # a = a_last + sum_k p_k (a_k - a_last), by Beaver's products
    products = in_path * (value_masks + over if own == 0 else value_masks) + over * path_masks
    at_node = values[:, -1] + products.sum(axis=1) + summed
    left = yield from sign_bit(own, np.ascontiguousarray(at_node.reshape(-1)), compared)
    left = left.reshape(trees, n)
    # The servers' XOR shares of b = [a < 0] are opened under a coin c of the dealer: m = b ^ c, so b = m + (1 - 2 m) c.
    turned = yield from _open_turned(own, left ^ coins)
    sign = 1 - 2 * turned.astype(np.int64)
    # p_k c = (p_k - x_k) c + x_k c takes no further round: p_k - x_k was opened for the product above, and shares of
    # x_k c are dealt. As all p_k add up to 1, the last p_k b is b less the others.
    turned, sign = turned.astype(np.uint64), sign.astype(np.uint64)
    goes_left = sign * coin + (turned if own == 0 else 0)
    of_nodes = turned[:, None] * paths[:, :-1] + sign[:, None] * (in_path * coin[:, None] + masked_coins)
    goes_left = np.concatenate([of_nodes, (goes_left - of_nodes.sum(axis=1))[:, None]], axis=1)
    children = np.stack([goes_left, paths - goes_left], axis=2)
    return left, children.reshape(trees, 2 * nodes, n)


def leaf_values(own: int, paths: Words, values: Words, key: bytes, corrections: Words) -> Program[Words]:
    """Return shares, uint64 (trees, n), of the value of each row's leaf; re-randomise them before they are opened.

    `paths` (trees, L, n) and `values` (trees, L) are server `own`'s shares; `corrections` (trees * n,) for server 1,
    (0,) for server 0. For the sum over trees, whose single values the user is not to learn, pass the leaves of all
    trees as one tree's.
    """
    trees, leaves, n = paths.shape
    _check(values, (trees, leaves), "leaf values")
    _check(corrections, (own * trees * n,), "the dealer's numbers")
    dealt = _ServerNumbers(own, key, corrections)
    path_masks, value_masks = dealt.numbers(trees, leaves, n), dealt.numbers(trees, leaves)
    summed = dealt.products(trees, n)
    in_path, over = yield from _open(own, [paths - path_masks, values - value_masks])
    products = in_path * (value_masks + over if own == 0 else value_masks)[..., None] + over[..., None] * path_masks
    found: Words = products.sum(axis=1) + summed
    return found


class _ServerNumbers:
    """A server's shares of a batch's random numbers and of their products, in the order in which they were dealt.

    Shares are additive, or, of the slices of comparisons, exclusive.
    """

    def __init__(self, own: int, key: bytes, corrections: Words) -> None:
        self._own, self._stream, self._corrections = own, Keystream(key), corrections

    def comparison(self, rows: int, bits: int) -> TripleShares:
        triples, words = self._own * triples_of(bits), -(-rows // 64)  # none for server 0
        corrections = self._taken(triples * words).reshape(triples, words)
        return TripleShares(rows, self._stream.raw(32), corrections, bits)

    def key(self) -> bytes:
        return self._stream.raw(32)

    def numbers(self, *shape: int) -> Words:
        return self._stream.bits(64, math.prod(shape)).reshape(shape)

    def coins(self, *shape: int) -> NDArray[np.uint8]:
        # XOR shares of random bits
        count = math.prod(shape)
        drawn = self._stream.bits(64, -(-count // 64)).astype("<u8").view(np.uint8)
        return np.unpackbits(drawn.reshape(-1), count=count).reshape(shape)

    def products(self, *shape: int) -> Words:
        # random for server 0, the dealer's corrections for server 1
        return self._taken(math.prod(shape)).reshape(shape) if self._own else self.numbers(*shape)

    def _taken(self, count: int) -> Words:
        taken, self._corrections = self._corrections[:count], self._corrections[count:]
        return taken


class _DealerNumbers:
    """Both servers' shares, as the dealer knows them."""

    def __init__(self) -> None:
        self.keys = secrets.token_bytes(32), secrets.token_bytes(32)
        none = np.empty(0, np.uint64)
        self.first, self.second = (_ServerNumbers(own, key, none) for own, key in enumerate(self.keys))

    def drawn(self, *shape: int) -> Words:
        return self.first.numbers(*shape) + self.second.numbers(*shape)

    def coins(self, *shape: int) -> NDArray[np.uint8]:
        return self.first.coins(*shape) ^ self.second.coins(*shape)

    def corrected(self, products: Words) -> Words:
        # server 1's shares, which make up for the random ones of server 0
        return products - self.first.products(*products.shape)


def _values(splits: Words, rows: Words) -> Words:
    """Inner products (trees, K, n) of splits (trees, K, D) and rows (n, D)."""
    return (splits.reshape(-1, splits.shape[-1]) @ rows.T).reshape(*splits.shape[:-1], len(rows))


def _open(own: int, shares: Sequence[Words]) -> Program[list[Words]]:
    mine = np.concatenate([of.reshape(-1) for of in shares])
    opened = mine + (yield from swap(own, mine))
    ends = np.cumsum([of.size for of in shares])[:-1]
    return [of.reshape(own.shape) for of, own in zip(np.split(opened, ends), shares, strict=True)]


def _open_turned(own: int, bits: NDArray[np.uint8]) -> Program[NDArray[np.uint8]]:
    # 64 bits in a word
    packed = np.zeros(-(-bits.size // 64) * 8, np.uint8)
    packed[: -(-bits.size // 8)] = np.packbits(bits.reshape(-1))
    mine = packed.view("<u8").astype(np.uint64)
    opened = mine ^ (yield from swap(own, mine))
    return np.unpackbits(opened.astype("<u8").view(np.uint8), count=bits.size).reshape(bits.shape)


def _check(numbers: Words, shape: tuple[int, ...], what: str) -> None:
    if numbers.dtype != np.uint64 or numbers.shape != shape:
        raise CryptoError(f"expected {what} uint64 {shape}, got {numbers.dtype} {numbers.shape} - at secure routing")
