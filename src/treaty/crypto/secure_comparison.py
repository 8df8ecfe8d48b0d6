"""Comparison of shared numbers: shares of [x < y], of many pairs at a time, and nobody learns x, y or the answer.

(a) `less_than` on Shamir shares modulo p = 2^127 - 1 among n >= 3 servers, by Toft's method.
(b) `sign_bit` on additive shares modulo 2^64 between two servers helped by a dealer, by a binary adder.

**The seam.** A server's program is a generator. In each round it yields ``{receiver: array}``, one uint64 array for
each of the other servers, and is sent ``{sender: array}``, what each of them has yielded for it in the same round.
Servers are numbered from 0. What carries the arrays must hide them from everybody but the receiver, name the sender
truly, and is not here. Every round holds all comparisons of the batch.

**Assumed of (a):** honest but curious servers of which at most t < n/2 put together what they see, secure channels, and
AES as a pseudorandom generator for each server's own numbers. t servers together learn nothing of x, y and the answer
but with a statistical distance of 2^(1 - kappa) per comparison (a carry into the opened c); all else they receive is
uniform, whatever is compared: shares; c mod 2^l; squares of random numbers; the zero test's answer, a coin that the
secret sign turns over, and a random number besides. Nobody proves what it sends: a server that lies is noticed only
where shares of degree below n - 1 are opened and do not belong together (c always does, so a wrong degree of inputs
does not go unseen); otherwise the answer is wrong.

**Cost of (a)**, numbers of 16 bytes, over all n (n - 1) pairs of servers:

===================  =============================  =============================================
part                 rounds                         numbers per comparison and pair
===================  =============================  =============================================
`prepare`            2                              2 (l + 2) / (n - t) + 1 dealt, l + 1 opened
`less_than`          1 + ceil(log2(l + 2))          2 opened, l shares of products
===================  =============================  =============================================

`prepare` needs no inputs. Random numbers are drawn n - t at a time from one that each server deals (Damgård, Nielsen).

**Assumed of (b):** honest but curious, neither the two servers together nor one of them with the dealer. The dealer
learns the number of comparisons. Each server receives operands under one-time pads, uniform bits; the two output bits
are each uniform. For whoever is to learn an answer: both servers send their bit to it, and to nobody else.

**Cost of (b):** the dealer's message, 7 rounds, and 243 bits per comparison from each server to the other, 61 bytes in
all; from the dealer a key for each and 181 bits for server 1, 23 bytes.

References
----------
Toft, Primitives and Applications for Multi-party Computation, PhD thesis, Aarhus 2007 (comparison, random bits).
Gennaro, Rabin, Rabin, Simplified VSS and Fast-track Multiparty Computations, PODC 1998 (degree reduction).
Damgård, Nielsen, Scalable and Unconditionally Secure Multiparty Computation, CRYPTO 2007 (random numbers, zeros).
Beaver, Efficient Multiparty Protocols Using Circuit Randomization, CRYPTO 1991 (AND triples).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import shamir_field as field
from treaty.crypto.keystream import Keystream
from treaty.crypto.secret_sharing import make_shares
from treaty.crypto.shamir_field import Words
from treaty.errors import CryptoError

Result = TypeVar("Result")

Program = Generator[dict[int, Words], dict[int, Words], Result]
"""A server's part: see the module's text on the seam."""

_FIELD_BITS = 127
_CARRIES = 63  # bits below the sign, whose carry is wanted


# ---------------------------------------------------------------- (a) Shamir shares, three or more servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all servers agree on before they compare.

    Server i holds the value at the point i + 1 of each polynomial.

    Parameters
    ----------
    servers : int
        Their number n, 3 or more.
    degree : int
        t, from 1, below n / 2: t servers together learn nothing, t + 1 shares give a secret.
    bits : int
        l: numbers tested for their sign are above -2^(l-1) and below 2^(l-1); not checked, as nobody sees them.
    kappa : int, default 40
        Bits by which random numbers are longer than what they hide, 40 or more. More costs nothing while they fit.

    Raises
    ------
    CryptoError
        When a number is out of range, or bits + kappa + log2(servers) + 2 < 127 does not hold.
    """

    servers: int
    degree: int
    bits: int
    kappa: int = 40

    def __post_init__(self) -> None:
        if self.servers < 3 or not 1 <= self.degree or not 2 * self.degree < self.servers:
            raise CryptoError(
                f"expected 3 or more servers and shares of a degree from 1 to below half of them, got {self.servers} "
                f"and {self.degree} - at secure comparison"
            )
        if self.bits < 2 or self.kappa < 40:
            raise CryptoError(f"expected bits >= 2 and kappa >= 40, got {self.bits} and {self.kappa}")
        total = self.bits + self.kappa + (self.servers - 1).bit_length() + 2
        if total >= _FIELD_BITS:
            raise CryptoError(
                f"expected bits + kappa + log2(servers) + 2 below {_FIELD_BITS}, got {total}: compare shorter numbers"
            )

    @property
    def points(self) -> range:
        """Where the servers' shares are values of a polynomial."""
        return range(1, self.servers + 1)

    @property
    def online_rounds(self) -> int:
        """Rounds of `less_than`."""
        return 1 + (self.bits + 1).bit_length()


class Prepared:
    """One server's shares of random numbers for comparisons to come, of which each serves once.

    A number used twice would give away the difference of what it hid.

    Attributes
    ----------
    left : int
        Comparisons for which there are numbers.
    """

    def __init__(self, bits: Words, low: Words, mask: Words, signs: Words, blinds: Words, zeros: Words) -> None:
        self.left = len(signs)
        self._numbers = (bits, low, mask, signs, blinds, zeros)

    def take(self, rows: int) -> tuple[Words, Words, Words, Words, Words, Words]:
        """Take the numbers of some comparisons; all servers must take alike.

        Parameters
        ----------
        rows : int
            Number of comparisons m.

        Returns
        -------
        bits : uint64 (l, m, 2)
            r_0 to r_{l-1}.
        low, mask : uint64 (m, 2)
            r = sum r_i 2^i, and r + 2^l r'.
        signs, blinds, zeros : uint64 (m, 2)
            s, a random number, and zero in shares of degree 2 t.

        Raises
        ------
        CryptoError
            When fewer are left.
        """
        if rows > self.left:
            raise CryptoError(f"expected random numbers for {rows} comparisons, got {self.left}; prepare more")
        end = self.left
        self.left -= rows
        bits, low, mask, signs, blinds, zeros = (numbers[..., self.left : end, :] for numbers in self._numbers)
        return bits, low, mask, signs, blinds, zeros


def prepare(setting: Setting, own: int, rows: int) -> Program[Prepared]:
    """Make shared random numbers for comparisons: two rounds, before any input is known.

    Parameters
    ----------
    setting : Setting
    own : int
        This server, from 0.
    rows : int
        Number of comparisons.

    Returns
    -------
    Prepared

    Raises
    ------
    CryptoError
        When what another server sent is out of range, or a square is zero (a chance below 2^-100; try again).

    Notes
    -----
    A random bit is (rho / sqrt(rho^2) + 1) / 2; rho^2 is opened, in shares of degree 2 t made random by adding a shared
    zero. The numbers take 16 (l + 5) bytes per comparison; making them, about ten times as much for a moment.
    """
    n, t, l = setting.servers, setting.degree, setting.bits
    signed, needed = rows * (l + 1), rows * (l + 2)
    dealt = -(-needed // (n - t))
    mine = np.concatenate(
        [
            make_shares(field.random_numbers(dealt), setting.points, t + 1),
            make_shares(np.zeros((dealt, 2), np.uint64), setting.points, 2 * t + 1),
            make_shares(_below_power_of_two(setting.kappa, rows), setting.points, t + 1),
        ],
        axis=1,
    )
    shares = yield from _exchange(own, mine)
    high = field.combine(shares[:, 2 * dealt :], np.tile(field.constant(1), (1, n, 1)))[0]
    drawn = field.combine(shares[:, : 2 * dealt], _extraction(n, n - t))
    numbers = drawn[:, :dealt].reshape(-1, 2)[:needed]
    zeros = drawn[:, dealt:].reshape(-1, 2)[:needed]
    roots = numbers[:signed]
    squares = yield from _open(setting, own, field.add(field.multiply(roots, roots), zeros[:signed]), 2 * t)
    signs = field.multiply(roots, field.inverse(field.square_root(squares))).reshape(l + 1, rows, 2)
    half = field.constant(pow(2, -1, field.P))
    bits = field.multiply(field.add(signs[:l], field.constant(1)), half)
    low = field.combine(bits, np.stack([field.constant(1 << i) for i in range(l)])[None])[0]
    mask = field.add(low, field.multiply(high, field.constant(1 << l)))
    return Prepared(bits, low, mask, signs[l], numbers[signed:].copy(), zeros[signed:].copy())


def less_than(setting: Setting, own: int, x: Words, y: Words, prepared: Prepared) -> Program[Words]:
    """Return shares of [x < y], for -2^(l-1) < x - y < 2^(l-1); see `is_negative`."""
    return is_negative(setting, own, field.subtract(x, y), prepared)


def is_negative(setting: Setting, own: int, values: Words, prepared: Prepared) -> Program[Words]:
    """Return shares of [a < 0] for numbers between -2^(l-1) and 2^(l-1).

    Parameters
    ----------
    setting : Setting
    own : int
        This server, from 0.
    values : uint64 (m, 2)
        Its shares of degree t of a.
    prepared : Prepared
        Of this server, for m comparisons or more; the same comparisons as of the others.

    Returns
    -------
    uint64 (m, 2)
        Its shares of degree t of 0 or 1, uniform to any t servers.

    Raises
    ------
    CryptoError
        When fewer comparisons are prepared, what another server sent is out of range, or shares of c do not belong
        together: the inputs are of another degree or the servers do not work on the same comparisons.

    Notes
    -----
    With random bits r_i (r in all), r' and a sign s, c = a + 2^l + r + 2^l r' is opened. The product of
    e_i = s + r_i - c_i + 3 sum_{j>i} (r_j xor c_j), i < l, and e_l = s - 1 + 3 sum_j (r_j xor c_j) is zero iff
    s = 1 and c mod 2^l >= r, or s = -1 and c mod 2^l < r. It is multiplied by a random number and opened: that it is
    zero tells nothing without s (should the random number be zero, the answer is wrong: a chance of 2^-127). Then
    a mod 2^l = (c mod 2^l) - r + 2^l [c mod 2^l < r], and [a < 0] is (a mod 2^l - a) / 2^l. The last product is opened
    instead of reduced in degree, which saves a round.
    """
    field.check_numbers(values, "shares to compare")
    l, one = setting.bits, field.constant
    bits, low, mask, signs, blinds, zeros = prepared.take(len(values))
    masked = field.add(field.add(values, one(1 << l)), mask)
    opened = yield from _open(setting, own, masked, setting.degree)
    opened &= np.array([(1 << min(l, 64)) - 1, (1 << max(l - 64, 0)) - 1], np.uint64)
    factors = np.concatenate([field.comparison_factors(bits, signs, opened), blinds[None]])
    while len(factors) > 2:
        pairs = len(factors) // 2
        products = yield from multiply(setting, own, factors[:pairs], factors[pairs : 2 * pairs])
        factors = np.concatenate([products, factors[2 * pairs :]])
    test = yield from _open(setting, own, field.add(field.multiply(factors[0], factors[1]), zeros), 2 * setting.degree)
    turned = np.where(field.is_zero(test)[:, None], field.subtract(one(0), signs), signs)
    turned = field.multiply(field.add(turned, one(1)), one(1 << (l - 1)))  # 2^l [c mod 2^l < r]
    rest = field.subtract(field.subtract(opened, low), values)
    return field.multiply(field.add(rest, turned), one(pow(2, -l, field.P)))


def multiply(setting: Setting, own: int, a: Words, b: Words) -> Program[Words]:
    """Return shares of degree t of a b, from those of a and b, uint64 (..., 2); one round. See `reduce_degree`."""
    return reduce_degree(setting, own, field.multiply(a, b))


def reduce_degree(setting: Setting, own: int, shares: Words) -> Program[Words]:
    """Return shares of degree t of what shares of degree 2 t are of, such as sums of products; one round.

    Each server shares its share, and combines the shares it gets by the weights that give the value at 0.

    Parameters
    ----------
    setting : Setting
    own : int
        This server, from 0.
    shares : uint64 (..., 2)

    Returns
    -------
    uint64 (..., 2)
    """
    mine = make_shares(shares.reshape(-1, 2), setting.points, setting.degree + 1)
    received = yield from _exchange(own, mine)
    reduced: Words = field.combine(received, field.lagrange_weights(setting.points)[None]).reshape(shares.shape)
    return reduced


def _exchange(own: int, mine: Words) -> Program[Words]:
    """Send row i to server i, (n, m, 2); return the rows of all, own included, in order."""
    replies = yield {i: shares for i, shares in enumerate(mine) if i != own}
    if set(replies) != {i for i in range(len(mine)) if i != own}:
        raise CryptoError(
            f"expected a message of each of {len(mine) - 1} other servers, got those of {sorted(replies)}"
        )
    for sender, shares in replies.items():
        _check_message(sender, shares, mine.shape[1:])
        field.check_numbers(shares, f"shares of server {sender}")
    return np.stack([mine[i] if i == own else replies[i] for i in range(len(mine))])


def _open(setting: Setting, own: int, shares: Words, degree: int) -> Program[Words]:
    """Return what shares are of, to all; any beyond the first degree + 1 must agree with them."""
    received = yield from _exchange(own, np.broadcast_to(shares, (setting.servers, *shares.shape)))
    points = setting.points[: degree + 1]
    weights = [field.lagrange_weights(points, at) for at in (0, *setting.points[degree + 1 :])]
    values = field.combine(received[: degree + 1], np.stack(weights))
    if not np.array_equal(values[1:], received[degree + 1 :]):
        raise CryptoError(
            f"expected shares of degree {degree} to open, got shares that do not belong together - at secure comparison"
        )
    opened: Words = values[0]
    return opened


def _extraction(columns: int, rows: int) -> Words:
    """Return a matrix (rows, columns, 2) of which any `rows` columns are independent: powers of 1, 2, ...

    The numbers of `rows` servers that keep theirs secret make as many sums independent and uniform, whatever the
    others' numbers are.
    """
    return np.stack([np.stack([field.constant(pow(j, i)) for j in range(1, columns + 1)]) for i in range(rows)])


def _below_power_of_two(bits: int, rows: int) -> Words:
    out = np.zeros((rows, 2), np.uint64)
    drawn = Keystream().bits(bits, rows)
    out[:, : drawn.shape[1]] = drawn
    return out


def _check_message(sender: int, got: Words, shape: tuple[int, ...]) -> None:
    if not isinstance(got, np.ndarray) or got.dtype != np.uint64 or got.shape != shape:
        what = f"{got.dtype} {got.shape}" if isinstance(got, np.ndarray) else type(got).__name__
        raise CryptoError(f"expected uint64 {shape} of server {sender}, got {what} - at secure comparison")


# ---------------------------------------------------------------- (b) additive shares modulo 2^64, two servers
#
# Bits are cut in slices: words of slice i hold bit i of 64 comparisons each, so that nothing sent is padding.


class Dealt:
    """What the dealer gives one server for one batch of comparisons: a key and, for server 1, corrections.

    Attributes
    ----------
    rows : int
        Comparisons of the batch.
    key : bytes of length 32
        Its shares of operands and products are a keystream under it.
    corrections : uint64 (181, ceil(rows / 64))
        Server 1's shares of the products; empty (0, ...) for server 0.
    """

    def __init__(self, rows: int, key: bytes, corrections: Words) -> None:
        self.rows, self.key, self.corrections = rows, key, corrections
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


def deal(rows: int) -> tuple[Dealt, Dealt]:
    """Make AND triples for one batch of comparisons, as the dealer.

    Parameters
    ----------
    rows : int
        Number of comparisons.

    Returns
    -------
    Dealt, Dealt
        For server 0 and for server 1, each to be kept from the other.
    """
    words = -(-rows // 64)
    none = np.empty((0, words), np.uint64)
    dealt = [Dealt(rows, secrets.token_bytes(32), none) for _ in range(2)]
    first, second = (_Triples(own, words, one) for own, one in enumerate(dealt))
    corrections = [first.operands(_CARRIES) & second.operands(_CARRIES) ^ first.products(_CARRIES)]
    for slices in _levels():
        pairs = slices // 2
        upper, lower, lower_p = (first.operands(count) ^ second.operands(count) for count in (pairs, pairs, pairs - 1))
        corrections.append(upper & lower ^ first.products(pairs))
        corrections.append(upper[1:] & lower_p ^ first.products(pairs - 1))
    return dealt[0], Dealt(rows, dealt[1].key, np.concatenate(corrections))


def sign_bit(own: int, values: NDArray[np.uint64], dealt: Dealt) -> Program[NDArray[np.uint8]]:
    """Return XOR shares of the most significant bits of numbers modulo 2^64: of [a < 0] in two's complement.

    Parameters
    ----------
    own : int
        This server, 0 or 1.
    values : uint64 (m,)
        Its additive shares of a; for [x < y] those of x - y, with |x - y| < 2^63.
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
    The sum's sign is that of both shares and of the carry out of 63 bits, added up. A span of bits generates a carry
    (g) or passes one on (p); for one bit g = a & b, p = a ^ b. Neighbouring spans are joined, six times:
    g = g_upper ^ (p_upper & g_lower), p = p_upper & p_lower. Joining opens p_upper under one pad for both products; the
    lowest span needs no p. For the first g each operand is known to one server, which opens it alone.
    """
    dealt.use(len(values))
    slices = _transposed(values)
    triples = _Triples(own, slices.shape[1], dealt)
    a = triples.operands(_CARRIES)
    mine = slices[:_CARRIES] ^ a
    other = yield from _swap(own, mine)
    g = other & a ^ triples.products(_CARRIES)
    if own == 0:
        g ^= other & mine
    p = slices[:_CARRIES]
    for _ in _levels():
        g, p = yield from _join(own, g, p, triples)
    bits = np.unpackbits((slices[_CARRIES] ^ g[0]).astype("<u8").view(np.uint8), bitorder="little")
    return bits[: len(values)]


def _levels() -> list[int]:
    """How many spans there are before each joining: 63, 32, 16, 8, 4, 2."""
    counts = [_CARRIES]
    while counts[-1] > 2:
        counts.append(-(-counts[-1] // 2))
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
    _check_message(1 - own, replies[1 - own], mine.shape)
    return replies[1 - own]


def _transposed(values: NDArray[np.uint64]) -> Words:
    """Bit i of 64 numbers in each word of row i: (m,) -> (64, ceil(m / 64))."""
    padded = np.zeros(-(-len(values) // 64) * 64, "<u8")
    padded[: len(values)] = values
    bits = np.unpackbits(padded.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    packed = np.packbits(np.ascontiguousarray(bits.T), axis=1, bitorder="little")
    return packed.view("<u8").astype(np.uint64)
