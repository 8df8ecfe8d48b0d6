"""Comparison of Shamir-shared numbers, and routing of rows down a hidden tree with it, among three or more servers.

SecPred of FedXGB. Users share their rows and the model's owner shares its splits, both encoded by
`systems.fedxgb.pieces.Layout`. The owner fills the tree up to its depth with dummy splits, which hides its shape, too.
In each level the servers compute one number per row, that of the row's node, and compare it with zero by Toft's method,
modulo p = 2^127 - 1.

**The message seam.** A server's program is a generator, for all rows, nodes and trees at a time. In each round it
yields ``{receiver: array}``, one uint64 array for each of the other servers, and is sent ``{sender: array}``, the
arrays that they yielded for it in the same round. Servers are numbered from 0. The transport, which is not here, must
hide arrays from all but the receiver and authenticate the sender.

**Assumptions:** honest but curious servers of which at most t < n/2 collude, secure channels, and AES as a pseudorandom
generator for each server's own numbers. Nobody proves what it sends. A lie is noticed where shares of degree below
n - 1 are opened and do not belong together (always so for c, hence inputs of a wrong degree are noticed). Otherwise the
answer is wrong, as it is for numbers beyond `ServerSetting.bits`.

**What is learned.** A server learns numbers of rows, columns, levels and leaves, and who asks. Of x, y and the answer
of a comparison, t servers together learn a statistical distance of 2^-100 (a carry into the opened c, under masks of
100 bits), 2^-60 for a million million comparisons. All else they receive is uniform, whatever is compared: shares; c
mod 2^l; squares of random numbers; a random number, zero or not as a secret sign decides. A user learns what is opened
to it: the sides of its rows where it is sent shares of them, else their leaf values. With t servers it learns no more;
with made-up rows it can find the splits. The owner learns nothing. In paper mode (`route_shown`) all servers and the
user see every bit.

**Cost**, numbers of 16 bytes per row (or comparison) and ordered pair of servers; K = 2^level:

===============  ======================================  ============================================
part             rounds                                  numbers
===============  ======================================  ============================================
`prepare`        2, before inputs are known              2 (l + 2) / (n - t) + 1 dealt, l + 1 opened
`is_negative`    1 + ceil(log2(l + 2))                   l + 2
`route_level`    1 (below the root 3) + comparison       l + 3 (below the root 2 K more)
`leaf_values`    1                                       1
`route_shown`    1 + comparison                          l + 3
===============  ======================================  ============================================

References: Liu, Ma, Liu, Ma, Nepal, Deng, Boosting Privately, ICDCS 2020 (SecPred; there two servers' comparison, bits
opened). Toft, Primitives and Applications for Multi-party Computation, PhD thesis, Aarhus 2007 (comparison, random
bits). Gennaro, Rabin, Rabin, Simplified VSS and Fast-track Multiparty Computations, PODC 1998 (degree reduction).
Damgård, Nielsen, Scalable and Unconditionally Secure Multiparty Computation, CRYPTO 2007 (random numbers, zeros).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.parameters import COMPARISON_MASK_BITS
from treaty.crypto.sharing import shamir as field
from treaty.crypto.sharing.shamir import Words, make_shares
from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Integers

Result = TypeVar("Result")

# A server's part, by the message seam above
Program = Generator[dict[int, Words], dict[int, Words], Result]

_FIELD_BITS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetting:
    """What all servers agree on beforehand; server i holds each polynomial's value at the point i + 1.

    CryptoError if a number is out of range, or unless bits + 100 + log2(servers) + 2 < 127, so that c never exceeds p.
    """

    servers: int  # n, 3 or more
    degree: int  # t, from 1, below n / 2: t servers together learn nothing, t + 1 shares give a secret
    bits: int  # l: numbers tested for their sign are within +-2^(l-1); not checked, as no server sees them

    def __post_init__(self) -> None:
        if self.servers < 3 or not 1 <= self.degree or not 2 * self.degree < self.servers:
            raise CryptoError(
                f"expected 3 or more servers and shares of a degree from 1 to below half of them, got {self.servers} "
                f"and {self.degree} - at secure comparison"
            )
        if self.bits < 2:
            raise CryptoError(f"expected numbers of 2 bits or more, got {self.bits} - at secure comparison")
        most = _FIELD_BITS - 1 - COMPARISON_MASK_BITS - (self.servers - 1).bit_length() - 2
        if self.bits > most:
            raise CryptoError(
                f"expected numbers of at most {most} bits among {self.servers} servers, got {self.bits} - at secure "
                "comparison"
            )

    @property
    def points(self) -> range:
        return range(1, self.servers + 1)


class RandomNumbers:
    """One server's shares of random numbers for `left` comparisons to come, each of which serves once."""

    def __init__(self, bits: Words, low: Words, mask: Words, signs: Words, blinds: Words, zeros: Words) -> None:
        self.left = len(signs)
        self._numbers = (bits, low, mask, signs, blinds, zeros)

    def take(self, rows: int) -> tuple[Words, Words, Words, Words, Words, Words]:
        """Take the numbers of some comparisons, all servers alike; CryptoError if fewer are left.

        In this order: bits (l, m, 2): r_0 to r_{l-1}; low and mask (m, 2): r = sum r_i 2^i, and r + 2^l r'; signs s,
        blinds (random numbers) and zeros (shares of zero of degree 2 t), (m, 2) each.
        """
        if rows > self.left:
            raise CryptoError(f"expected random numbers for {rows} comparisons, got {self.left}; prepare more")
        end = self.left
        self.left -= rows
        bits, low, mask, signs, blinds, zeros = (numbers[..., self.left : end, :] for numbers in self._numbers)
        return bits, low, mask, signs, blinds, zeros


def prepare(setting: ServerSetting, own: int, rows: int) -> Program[RandomNumbers]:
    """Make shared random numbers for `rows` comparisons: two rounds, before any input is known.

    The numbers take 16 (l + 5) bytes per comparison; making them takes about ten times as much for a moment.
    CryptoError if a received number is out of range or a square is zero (a chance below 2^-100; try again).
    """
    n, t, l = setting.servers, setting.degree, setting.bits
    signed, needed = rows * (l + 1), rows * (l + 2)
    dealt = -(-needed // (n - t))
    # Each server deals numbers, shares of zero of degree 2 t, and 100 bits of every mask.
    mine = np.concatenate(
        [
            make_shares(field.random_numbers(dealt), setting.points, t + 1),
            make_shares(np.zeros((dealt, 2), np.uint64), setting.points, 2 * t + 1),
            make_shares(Keystream().bits(COMPARISON_MASK_BITS, rows), setting.points, t + 1),
        ],
        axis=1,
    )
    shares = yield from _exchange(own, mine)
    high = field.combine(shares[:, 2 * dealt :], np.tile(field.constant(1), (1, n, 1)))[0]
    # Of n servers' numbers n - t independent sums are uniform, whatever t servers deal. Their weights are powers of 1,
    # 2, ...: any n - t columns of this matrix are independent.
    weights = np.stack([np.stack([field.constant(pow(j, i)) for j in range(1, n + 1)]) for i in range(n - t)])
    drawn = field.combine(shares[:, : 2 * dealt], weights)
    numbers = drawn[:, :dealt].reshape(-1, 2)[:needed]
    zeros = drawn[:, dealt:].reshape(-1, 2)[:needed]
    # A random bit is (rho / sqrt(rho^2) + 1) / 2; rho^2 is opened, its shares made random by adding a shared zero.
    roots = numbers[:signed]
    squares = yield from open_to_all(setting, own, field.add(field.multiply(roots, roots), zeros[:signed]), 2 * t)
    signs = field.multiply(roots, field.inverse(field.square_root(squares))).reshape(l + 1, rows, 2)
    half = field.constant(pow(2, -1, field.P))
    bits = field.multiply(field.add(signs[:l], field.constant(1)), half)
    low = field.combine(bits, np.stack([field.constant(1 << i) for i in range(l)])[None])[0]
    mask = field.add(low, field.multiply(high, field.constant(1 << l)))
    return RandomNumbers(bits, low, mask, signs[l], numbers[signed:].copy(), zeros[signed:].copy())


def is_negative(setting: ServerSetting, own: int, values: Words, prepared: RandomNumbers) -> Program[Words]:
    """Return shares of degree t of [a < 0], uint64 (m, 2), uniform to any t servers, for -2^(l-1) < a < 2^(l-1).

    `values` (m, 2) are server `own`'s shares of degree t of a; all servers must use the same prepared comparisons.
    CryptoError if too few are prepared, a received number is out of range, or the shares of c do not belong together:
    then inputs are of another degree, or servers work on different comparisons.
    """
    field.check_numbers(values, "shares to compare")
    l, one = setting.bits, field.constant
    bits, low, mask, signs, blinds, zeros = prepared.take(len(values))
    # With random bits r_i (r in all), r' (a sum of numbers of 100 bits, one of each server) and a sign s, c = a + 2^l +
    # r + 2^l r' is opened.
    masked = field.add(field.add(values, one(1 << l)), mask)
    opened = yield from open_to_all(setting, own, masked, setting.degree)
    opened &= np.array([(1 << l) - 1, 0], np.uint64)
    # The product of e_i = s + r_i - c_i + 3 sum_{j>i} (r_j xor c_j), i < l, and e_l = s - 1 + 3 sum_j (r_j xor c_j) is
    # zero iff s = 1 and c mod 2^l >= r, or s = -1 and c mod 2^l < r. It is multiplied by a random number and opened:
    # that it is zero means nothing without s (should the random number be zero, the answer is wrong: a chance of
    # 2^-127).
    factors = np.concatenate([field.comparison_factors(bits, signs, opened), blinds[None]])
    while len(factors) > 2:
        pairs = len(factors) // 2
        products = yield from multiply(setting, own, factors[:pairs], factors[pairs : 2 * pairs])
        factors = np.concatenate([products, factors[2 * pairs :]])
    # The last product is opened instead of reduced in degree, which saves a round.
    product = field.add(field.multiply(factors[0], factors[1]), zeros)
    test = yield from open_to_all(setting, own, product, 2 * setting.degree)
    turned = np.where(field.is_zero(test)[:, None], field.subtract(one(0), signs), signs)
    turned = field.multiply(field.add(turned, one(1)), one(1 << (l - 1)))  # 2^l [c mod 2^l < r]
    # a mod 2^l = (c mod 2^l) - r + 2^l [c mod 2^l < r], and [a < 0] is (a mod 2^l - a) / 2^l.
    rest = field.subtract(field.subtract(opened, low), values)
    return field.multiply(field.add(rest, turned), one(pow(2, -l, field.P)))


def multiply(setting: ServerSetting, own: int, a: Words, b: Words) -> Program[Words]:
    """Return shares of degree t of a b, from those of a and b, uint64 (..., 2); one round."""
    return reduce_degree(setting, own, field.multiply(a, b))


def reduce_degree(setting: ServerSetting, own: int, shares: Words) -> Program[Words]:
    """Turn shares of degree 2 t, uint64 (..., 2), such as sums of products, into shares of degree t; one round."""
    # Each server shares its share, and combines the shares it gets by the weights that give the value at 0.
    mine = make_shares(shares.reshape(-1, 2), setting.points, setting.degree + 1)
    received = yield from _exchange(own, mine)
    reduced: Words = field.combine(received, field.lagrange_weights(setting.points)[None]).reshape(shares.shape)
    return reduced


def _exchange(own: int, mine: Words) -> Program[Words]:
    """Send row i to server i, (n, m, 2); return the rows of all servers in order, this one's included."""
    replies = yield {i: shares for i, shares in enumerate(mine) if i != own}
    if set(replies) != {i for i in range(len(mine)) if i != own}:
        raise CryptoError(
            f"expected a message of each of {len(mine) - 1} other servers, got messages of {sorted(replies)}"
        )
    for sender, shares in replies.items():
        check_message(sender, shares, mine.shape[1:])
        field.check_numbers(shares, f"shares of server {sender}")
    return np.stack([mine[i] if i == own else replies[i] for i in range(len(mine))])


def open_to_all(setting: ServerSetting, own: int, shares: Words, degree: int) -> Program[Words]:
    """Open shares (m, 2) of some degree to every server; one round. See `open_checked`."""
    received = yield from _exchange(own, np.broadcast_to(shares, (setting.servers, *shares.shape)))
    return open_checked(setting, received, degree)


def open_checked(setting: ServerSetting, shares: Words, degree: int) -> Words:
    """Open shares, uint64 (servers, m, 2) below p, of all servers in order: (m, 2).

    CryptoError unless all shares beyond the first degree + 1 agree with these: up to servers - degree - 1 wrong ones
    are noticed.
    """
    points = setting.points[: degree + 1]
    weights = [field.lagrange_weights(points, at) for at in (0, *setting.points[degree + 1 :])]
    values = field.combine(shares[: degree + 1], np.stack(weights))
    if not np.array_equal(values[1:], shares[degree + 1 :]):
        raise CryptoError(
            f"expected shares of degree {degree} to open, got shares that do not belong together - at secure comparison"
        )
    opened: Words = values[0]
    return opened


def check_message(sender: int, got: Words, shape: tuple[int, ...]) -> None:
    """Raise CryptoError unless a server's message is uint64 of the expected shape."""
    if not isinstance(got, np.ndarray) or got.dtype != np.uint64 or got.shape != shape:
        what = f"{got.dtype} {got.shape}" if isinstance(got, np.ndarray) else type(got).__name__
        raise CryptoError(f"expected uint64 {shape} of server {sender}, got {what} - at secure comparison")


def share_integers(setting: ServerSetting, values: Integers, key: bytes | None = None) -> Words:
    """Share rows, splits, thresholds or leaf values, as their owner, with degree t.

    int64 (...) -> uint64 (servers, ..., 2); row i is for server i alone. `key` seeds the `Keystream` and must serve
    these values alone.
    """
    numbers = field.from_signed(values.reshape(-1))
    return make_shares(numbers, setting.points, setting.degree + 1, key).reshape(setting.servers, *values.shape, 2)


def open_integers(setting: ServerSetting, shares: Words) -> Integers:
    """Open the shares of all servers, in order, as their user: uint64 (servers, ..., 2) -> int64 (...).

    CryptoError if shares are malformed or do not belong together, or an integer exceeds 63 bits and its sign.
    """
    opened = _opened(setting, shares)
    negative = opened[..., 1] > 0  # p + x = 2^127 + x - 1
    values = (opened[..., 0] + negative.astype(np.uint64)).astype(np.int64)
    if not np.array_equal(field.from_signed(values), opened):
        raise CryptoError("expected integers of 63 bits and sign to open, got larger ones")
    return values


def open_bits(setting: ServerSetting, shares: Words) -> Flags:
    """Open bits, uint64 (servers, ..., 2) -> bool (...); as `open_integers`, and CryptoError unless all are 0 or 1."""
    return _as_bits(_opened(setting, shares))


def route_level(
    setting: ServerSetting, own: int, rows: Words, weights: Words, thresholds: Words, paths: Words | None,
    prepared: RandomNumbers, threads: int = 1,
) -> Program[tuple[Words, Words]]:  # fmt: skip
    """Route n rows one level down; return shares of b = [row goes left], (*, n, 2), and of the next level's paths.

    Server `own`'s shares, of degree t: `rows` (n, D, 2), copied in every level unless contiguous and writable;
    `weights` (*, K, D, 2) and `thresholds` (*, K, 2) of the splits of the level's K = 2^level nodes of a complete tree;
    `paths` (*, K, n, 2) as returned for the level above, None at the root: 1 at the row's node, else 0. The children of
    node k are 2 k (left) and 2 k + 1. Leading axes * hold any number of trees, which go in the same rounds; `prepared`
    must hold n comparisons per tree. CryptoError if shapes do not match or a number is not below p, and as in
    `is_negative`.
    """
    if weights.ndim < 3:
        raise CryptoError(f"expected weights of splits (*, K, D, 2), got {weights.shape} - at secure routing")
    *trees, nodes, columns = weights.shape[:-1]
    _check(weights, (*trees, nodes, columns), "weights of splits")
    _check(thresholds, (*trees, nodes), "thresholds of splits")
    _check(rows, (len(rows), columns), "rows")
    if paths is not None:
        _check(paths, (*trees, nodes, len(rows)), "paths")
    elif nodes != 1:
        raise CryptoError(f"expected paths of rows to {nodes} nodes, got none: they are required below the root")
    # a_k = w_k.z - T_k; a = sum_k p_k a_k, so that one comparison per row does; b = [a < 0].
    values = field.inner_products(rows, weights.reshape(-1, columns, 2), threads)
    values = values.reshape(*trees, nodes, len(rows), 2)
    values = yield from reduce_degree(setting, own, field.subtract(values, thresholds[..., None, :]))
    if paths is None:
        at_node = values[..., 0, :, :]
    else:
        at_node = yield from reduce_degree(setting, own, _sum_over_nodes(field.multiply(paths, values)))
    left = yield from is_negative(setting, own, at_node.reshape(-1, 2), prepared)
    left = left.reshape(at_node.shape)
    if paths is None:
        return left, np.stack([left, field.subtract(field.constant(1), left)], axis=-3)
    # The left child gets p_k b, the right one p_k - p_k b. As all p_k add up to 1, the last p_k b is b less the others.
    goes_left = yield from multiply(setting, own, paths[..., :-1, :, :], left[..., None, :, :])
    last = field.subtract(left, _sum_over_nodes(goes_left))
    goes_left = np.concatenate([goes_left, last[..., None, :, :]], axis=-3)
    children = np.stack([goes_left, field.subtract(paths, goes_left)], axis=-3)
    return left, children.reshape(*trees, 2 * nodes, len(rows), 2)


def leaf_values(setting: ServerSetting, own: int, paths: Words, values: Words) -> Program[Words]:
    """Return shares of degree t of the value of each row's leaf, uint64 (n, 2).

    `paths` (L, n, 2) and `values` (L, 2) are server `own`'s shares. For the sum over trees, whose single values the
    user is not to learn, pass the leaves of all trees as one tree's.
    """
    _check(paths, (len(values), *paths.shape[1:2]), "paths")
    _check(values, (len(values),), "leaf values")
    return (yield from reduce_degree(setting, own, _sum_over_nodes(field.multiply(paths, values[:, None]))))


def route_shown(
    setting: ServerSetting, own: int, values: Words, thresholds: Words, nodes: NDArray[np.intp], prepared: RandomNumbers
) -> Program[Flags]:
    """Route rows one level down where every server may see their paths, the paper's SecPred: bool (n,), row goes left.

    Server `own`'s shares: `values` (n, 2), the value that each row's node compares (`Layout.encode_shown`), and
    `thresholds` (K, 2); `nodes` (n,) is each row's node. CryptoError if an opened bit is neither 0 nor 1, and as in
    `route_level`.
    """
    _check(values, nodes.shape, "values")
    _check(thresholds, (len(thresholds),), "thresholds")
    left = yield from is_negative(setting, own, field.subtract(values, thresholds[nodes]), prepared)
    opened = yield from open_to_all(setting, own, left, setting.degree)
    return _as_bits(opened)


def _sum_over_nodes(values: Words) -> Words:
    """Add up over the last axis but two: (*, K, n, 2) -> (*, n, 2)."""
    total = values[..., 0, :, :]
    for node in range(1, values.shape[-3]):
        total = field.add(total, values[..., node, :, :])
    return total


def _opened(setting: ServerSetting, shares: Words) -> Words:
    if len(shares) != setting.servers:
        raise CryptoError(f"expected shares of {setting.servers} servers to open, got {len(shares)}")
    field.check_numbers(shares, "shares to open")
    flat = open_checked(setting, shares.reshape(setting.servers, -1, 2), setting.degree)
    return flat.reshape(shares.shape[1:])


def _as_bits(opened: Words) -> Flags:
    bits: Flags = opened[..., 0] == 1
    if not np.array_equal(field.from_signed(bits.astype(np.int64)), opened):
        raise CryptoError("expected bits of 0 or 1, got other numbers - at secure routing")
    return bits


def _check(numbers: Words, shape: tuple[int, ...], what: str) -> None:
    field.check_numbers(numbers, what)
    if numbers.shape[:-1] != shape:
        raise CryptoError(f"expected {what} of shape {shape}, got {numbers.shape[:-1]} - at secure routing")
