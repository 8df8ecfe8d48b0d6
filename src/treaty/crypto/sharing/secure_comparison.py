"""Comparison of Shamir-shared numbers among three or more servers: shares of [x < y]; nobody learns x, y or the answer.

Shares are modulo p = 2^127 - 1, many comparisons at a time, by Toft's method. (`additive_comparison` does the same
between two servers helped by a dealer.)

**The message seam.** A server's program is a generator. In each round it yields ``{receiver: array}``, one uint64 array
for each of the other servers, and is sent ``{sender: array}``, the arrays that they yielded for it in the same round.
Servers are numbered from 0. The transport, which is not here, must hide arrays from everybody but the receiver and
authenticate the sender. Every round holds all comparisons of the batch.

**Assumed:** honest but curious servers of which at most t < n/2 collude, secure channels, and AES as a pseudorandom
generator for each server's own numbers. t servers together learn nothing of x, y and the answer beyond a statistical
distance of 2^-100 per comparison (a carry into the opened c, under masks of 100 bits), so N 2^-100 over a training of N
comparisons: 2^-60 for a million million. All else they receive is uniform, whatever is compared: shares; c mod 2^l;
squares of random numbers; the zero test's answer, which the secret sign turns into a fair coin, and a random number
besides. Nobody proves what it sends: a lie is noticed only where shares of degree below n - 1 are opened and do not
belong together (always so for c, hence inputs of a wrong degree are noticed); otherwise the answer is wrong.

**Cost**, numbers of 16 bytes, over all n (n - 1) pairs of servers:

===================  =============================  =============================================
part                 rounds                         numbers per comparison and pair
===================  =============================  =============================================
`prepare`            2                              2 (l + 2) / (n - t) + 1 dealt, l + 1 opened
`less_than`          1 + ceil(log2(l + 2))          2 opened, l shares of products
===================  =============================  =============================================

`prepare` needs no inputs. Random numbers are drawn n - t at a time from one that each server deals (Damgård, Nielsen).

References: Toft, Primitives and Applications for Multi-party Computation, PhD thesis, Aarhus 2007 (comparison, random
bits). Gennaro, Rabin, Rabin, Simplified VSS and Fast-track Multiparty Computations, PODC 1998 (degree reduction).
Damgård, Nielsen, Scalable and Unconditionally Secure Multiparty Computation, CRYPTO 2007 (random numbers, zeros).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from treaty.crypto.keystream import Keystream
from treaty.crypto.parameters import COMPARISON_MASK_BITS
from treaty.crypto.sharing import shamir_field as field
from treaty.crypto.sharing.secret_sharing import make_shares
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import CryptoError

Result = TypeVar("Result")

Program = Generator[dict[int, Words], dict[int, Words], Result]  # a server's part: see the module's text on the seam

_FIELD_BITS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all servers agree on beforehand; server i holds each polynomial's value at the point i + 1.

    CryptoError if a number is out of range, or unless bits + 100 + log2(servers) + 2 < 127, so that c never exceeds p.
    """

    servers: int  # n, 3 or more
    degree: int  # t, from 1, below n / 2: t servers together learn nothing, t + 1 shares give a secret
    bits: int  # l: numbers tested for their sign are within +-2^(l-1); not checked, as nobody sees them

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
        """The points at which the servers' shares are values of a polynomial."""
        return range(1, self.servers + 1)


class RandomNumbers:
    """One server's shares of random numbers for `left` comparisons to come.

    Each serves once: a number used twice would reveal the difference of what it hid.
    """

    def __init__(self, bits: Words, low: Words, mask: Words, signs: Words, blinds: Words, zeros: Words) -> None:
        self.left = len(signs)
        self._numbers = (bits, low, mask, signs, blinds, zeros)

    def take(self, rows: int) -> tuple[Words, Words, Words, Words, Words, Words]:
        """Take the numbers of some comparisons, all servers alike; CryptoError if fewer are left. In this order:.

        bits (l, m, 2): r_0 to r_{l-1}; low and mask (m, 2): r = sum r_i 2^i, and r + 2^l r'; signs s, blinds (random
        numbers) and zeros (shares of zero of degree 2 t), (m, 2) each.
        """
        if rows > self.left:
            raise CryptoError(f"expected random numbers for {rows} comparisons, got {self.left}; prepare more")
        end = self.left
        self.left -= rows
        bits, low, mask, signs, blinds, zeros = (numbers[..., self.left : end, :] for numbers in self._numbers)
        return bits, low, mask, signs, blinds, zeros


def prepare(setting: Setting, own: int, rows: int) -> Program[RandomNumbers]:
    """Make shared random numbers for `rows` comparisons: two rounds, before any input is known.

    A random bit is (rho / sqrt(rho^2) + 1) / 2; rho^2 is opened, in shares of degree 2 t made random by adding a shared
    zero. The numbers take 16 (l + 5) bytes per comparison; making them takes about ten times as much for a moment.
    CryptoError if a received number is out of range or a square is zero (a chance below 2^-100; try again).
    """
    n, t, l = setting.servers, setting.degree, setting.bits
    signed, needed = rows * (l + 1), rows * (l + 2)
    dealt = -(-needed // (n - t))
    mine = np.concatenate(
        [
            make_shares(field.random_numbers(dealt), setting.points, t + 1),
            make_shares(np.zeros((dealt, 2), np.uint64), setting.points, 2 * t + 1),
            make_shares(_below_power_of_two(COMPARISON_MASK_BITS, rows), setting.points, t + 1),
        ],
        axis=1,
    )
    shares = yield from _exchange(own, mine)
    high = field.combine(shares[:, 2 * dealt :], np.tile(field.constant(1), (1, n, 1)))[0]
    drawn = field.combine(shares[:, : 2 * dealt], _extraction(n, n - t))
    numbers = drawn[:, :dealt].reshape(-1, 2)[:needed]
    zeros = drawn[:, dealt:].reshape(-1, 2)[:needed]
    roots = numbers[:signed]
    squares = yield from open_to_all(setting, own, field.add(field.multiply(roots, roots), zeros[:signed]), 2 * t)
    signs = field.multiply(roots, field.inverse(field.square_root(squares))).reshape(l + 1, rows, 2)
    half = field.constant(pow(2, -1, field.P))
    bits = field.multiply(field.add(signs[:l], field.constant(1)), half)
    low = field.combine(bits, np.stack([field.constant(1 << i) for i in range(l)])[None])[0]
    mask = field.add(low, field.multiply(high, field.constant(1 << l)))
    return RandomNumbers(bits, low, mask, signs[l], numbers[signed:].copy(), zeros[signed:].copy())


def less_than(setting: Setting, own: int, x: Words, y: Words, prepared: RandomNumbers) -> Program[Words]:
    """Return shares of [x < y], for -2^(l-1) < x - y < 2^(l-1); see `is_negative`."""
    return is_negative(setting, own, field.subtract(x, y), prepared)


def is_negative(setting: Setting, own: int, values: Words, prepared: RandomNumbers) -> Program[Words]:
    """Return shares of degree t of [a < 0], uint64 (m, 2), uniform to any t servers, for -2^(l-1) < a < 2^(l-1).

    `values` (m, 2) are server `own`'s shares of degree t of a; all servers must use the same prepared comparisons.
    CryptoError if too few are prepared, a received number is out of range, or the shares of c do not belong together:
    then inputs are of another degree, or servers work on different comparisons.

    With random bits r_i (r in all), r' (a sum of numbers of 100 bits, one of each server) and a sign s, c = a + 2^l + r
    + 2^l r' is opened. The product of e_i = s + r_i - c_i + 3 sum_{j>i} (r_j xor c_j), i < l, and e_l = s - 1 + 3 sum_j
    (r_j xor c_j) is zero iff s = 1 and c mod 2^l >= r, or s = -1 and c mod 2^l < r. It is multiplied by a random number
    and opened: that it is zero tells nothing without s (should the random number be zero, the answer is wrong: a chance
    of 2^-127). Then a mod 2^l = (c mod 2^l) - r + 2^l [c mod 2^l < r], and [a < 0] is (a mod 2^l - a) / 2^l. The last
    product is opened instead of reduced in degree, which saves a round.
    """
    field.check_numbers(values, "shares to compare")
    l, one = setting.bits, field.constant
    bits, low, mask, signs, blinds, zeros = prepared.take(len(values))
    masked = field.add(field.add(values, one(1 << l)), mask)
    opened = yield from open_to_all(setting, own, masked, setting.degree)
    opened &= np.array([(1 << l) - 1, 0], np.uint64)
    factors = np.concatenate([field.comparison_factors(bits, signs, opened), blinds[None]])
    while len(factors) > 2:
        pairs = len(factors) // 2
        products = yield from multiply(setting, own, factors[:pairs], factors[pairs : 2 * pairs])
        factors = np.concatenate([products, factors[2 * pairs :]])
    product = field.add(field.multiply(factors[0], factors[1]), zeros)
    test = yield from open_to_all(setting, own, product, 2 * setting.degree)
    turned = np.where(field.is_zero(test)[:, None], field.subtract(one(0), signs), signs)
    turned = field.multiply(field.add(turned, one(1)), one(1 << (l - 1)))  # 2^l [c mod 2^l < r]
    rest = field.subtract(field.subtract(opened, low), values)
    return field.multiply(field.add(rest, turned), one(pow(2, -l, field.P)))


def multiply(setting: Setting, own: int, a: Words, b: Words) -> Program[Words]:
    """Return shares of degree t of a b, from those of a and b, uint64 (..., 2); one round."""
    return reduce_degree(setting, own, field.multiply(a, b))


def reduce_degree(setting: Setting, own: int, shares: Words) -> Program[Words]:
    """Turn shares of degree 2 t, uint64 (..., 2), such as sums of products, into shares of degree t; one round.

    Each server shares its share, and combines the shares it gets by the weights that give the value at 0.
    """
    mine = make_shares(shares.reshape(-1, 2), setting.points, setting.degree + 1)
    received = yield from _exchange(own, mine)
    reduced: Words = field.combine(received, field.lagrange_weights(setting.points)[None]).reshape(shares.shape)
    return reduced


def _exchange(own: int, mine: Words) -> Program[Words]:
    """Send row i to server i, (n, m, 2); return the rows of all servers in order, this one's included."""
    replies = yield {i: shares for i, shares in enumerate(mine) if i != own}
    if set(replies) != {i for i in range(len(mine)) if i != own}:
        raise CryptoError(
            f"expected a message of each of {len(mine) - 1} other servers, got those of {sorted(replies)}"
        )
    for sender, shares in replies.items():
        check_message(sender, shares, mine.shape[1:])
        field.check_numbers(shares, f"shares of server {sender}")
    return np.stack([mine[i] if i == own else replies[i] for i in range(len(mine))])


def open_to_all(setting: Setting, own: int, shares: Words, degree: int) -> Program[Words]:
    """Open shares (m, 2) of some degree to every server; one round. See `open_checked`."""
    received = yield from _exchange(own, np.broadcast_to(shares, (setting.servers, *shares.shape)))
    return open_checked(setting, received, degree)


def open_checked(setting: Setting, shares: Words, degree: int) -> Words:
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


def _extraction(columns: int, rows: int) -> Words:
    """Return powers of 1, 2, ...: a matrix (rows, columns, 2) of which any `rows` columns are independent.

    The secret numbers of `rows` servers give as many independent uniform sums, whatever the others' numbers are.
    """
    return np.stack([np.stack([field.constant(pow(j, i)) for j in range(1, columns + 1)]) for i in range(rows)])


def _below_power_of_two(bits: int, rows: int) -> Words:
    out = np.zeros((rows, 2), np.uint64)
    drawn = Keystream().bits(bits, rows)
    out[:, : drawn.shape[1]] = drawn
    return out


def check_message(sender: int, got: Words, shape: tuple[int, ...]) -> None:
    """Raise CryptoError unless a server's message is uint64 of the expected shape."""
    if not isinstance(got, np.ndarray) or got.dtype != np.uint64 or got.shape != shape:
        what = f"{got.dtype} {got.shape}" if isinstance(got, np.ndarray) else type(got).__name__
        raise CryptoError(f"expected uint64 {shape} of server {sender}, got {what} - at secure comparison")
