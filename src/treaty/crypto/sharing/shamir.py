"""Shamir's secret sharing over the integers modulo the prime p = 2^127 - 1, and arithmetic in that field.

Each secret is the value at 0 of its own polynomial of degree t - 1, whose other coefficients are uniform. A holder's
share is the value at its point. Any t shares give the secret (Lagrange at 0); t - 1 shares are independent of it,
whatever the computing power. A wrong share gives another secret, unnoticed here: a caller that can recognise the right
one (a secret key by its public key) must check. Secret bytes are cut into 15-byte pieces.

A number is two little-endian uint64 words, below p, on the last axis of an array. Functions broadcast the axes in front
of it and return new arrays. They do not check that arguments are below p: check received numbers once, with
`check_numbers`. Running times differ only by carries that branch; numbers are shares, which are random, or public.

References: Shamir, How to Share a Secret, CACM 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.multiplier import multiply_add
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import from_words, to_words
from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Integers
from treaty.machine.kernels import kernel
from treaty.machine.shared_work import share

P = (1 << 127) - 1  # the field's order, a prime

Words = NDArray[np.uint64]

_BLOCK = 16  # numbers raised to a power side by side: one alone would wait for its own products
_LEAST_ROWS = 256  # of inner products worth a thread of their own
_TOP = np.uint64((1 << 63) - 1)
_BITS = np.array([(1 << 64) - 1, _TOP], np.uint64)  # of a number
_ZERO, _ONE, _LAST, _LOW6 = np.uint64(0), np.uint64(1), np.uint64(63), np.uint64(63)


def add(a: Words, b: Words) -> Words:
    return _apply(_add_all, a, b)


def subtract(a: Words, b: Words) -> Words:
    # p - b is b with its 127 bits turned over
    return _apply(_add_all, a, b ^ _BITS)


def multiply(a: Words, b: Words) -> Words:
    return _apply(_multiply_all, a, b)


def power(a: Words, exponent: int) -> Words:
    """Return a^exponent, exponent >= 0; 0^0 is 1."""
    flat = _flat(a, a.shape)
    digits = np.array([int(digit) for digit in f"{exponent:b}"], np.uint8)
    out = np.empty(a.shape, np.uint64)
    _raise(flat, digits, out.reshape(-1, 2))
    return out


def square_root(a: Words) -> Words:
    """Return a^((p + 1) / 4), as p = 3 mod 4: of a square its root that is a square, of another number that of -a."""
    return power(a, (P + 1) // 4)


def inverse(a: Words) -> Words:
    """Return 1 / a by Montgomery's trick, three products per number and one inversion; CryptoError if one is zero."""
    flat = _flat(a, a.shape)
    before = np.empty_like(flat)
    total = from_words(_running_products(flat, before)[None])[0]
    if total == 0:
        raise CryptoError("expected numbers other than zero to invert, got zero")
    out = np.empty(a.shape, np.uint64)
    _unwind(flat, before, constant(pow(total, -1, P)), out.reshape(-1, 2))
    return out


def constant(value: int) -> Words:
    """Return an integer of either sign, modulo p, uint64 (2,)."""
    number: Words = to_words([value % P], 2)[0]
    return number


def from_signed(values: Integers) -> Words:
    """Return int64 (...) as numbers, uint64 (..., 2); -x is p - x."""
    out = np.empty((*values.shape, 2), np.uint64)
    negative = values < 0
    # -x is p - x = 2^127 + (-x) - 1
    out[..., 0] = values.astype(np.uint64) - negative
    out[..., 1] = np.where(negative, _TOP, _ZERO)
    return out


def random_numbers(*shape: int, key: bytes | None = None) -> Words:
    """Return uniform secret numbers, uint64 (..., 2), from the `Keystream` under a key, or a fresh one."""
    return Keystream(key).below(P, int(np.prod(shape))).reshape(*shape, 2)


def is_zero(a: Words) -> Flags:
    zero: Flags = (a[..., 0] | a[..., 1]) == 0
    return zero


def lagrange_weights(points: Sequence[int], at: int = 0) -> Words:
    """Return weights (n, 2) that combine values at n points to the value `at` of the polynomial of degree below n."""
    check_points(points)
    factors = []
    # the weight of a point is the product of (at - other) / (own - other)
    for own in points:
        above, below = 1, 1
        for other in points:
            if other != own:
                above, below = above * (at - other) % P, below * (own - other) % P
        factors.append(above * pow(below, -1, P) % P)
    return to_words(factors, 2)


def combine(values: Words, weights: Words) -> Words:
    """Return sums of values times weights: (n, m, 2) and (k, n, 2) give (k, m, 2)."""
    out = np.zeros((len(weights), *values.shape[1:]), np.uint64)
    _combine(_plain(values), _plain(weights), out)
    return out


def inner_products(rows: Words, weights: Words, threads: int = 1) -> Words:
    """Return the inner product of each row (n, d, 2) with each of k vectors of weights (k, d, 2): uint64 (k, n, 2)."""
    rows, weights = _plain(rows), _plain(weights)
    out = np.empty((len(weights), len(rows), 2), np.uint64)
    share(lambda start, stop: _inner_products(rows, weights, start, stop, out), len(rows), threads, _LEAST_ROWS)
    return out


def evaluate(coefficients: Words, points: Sequence[int]) -> Words:
    """Return values of polynomials, lowest coefficient first: (t, m, 2) at n points give (n, m, 2)."""
    out = np.empty((len(points), *coefficients.shape[1:]), np.uint64)
    _evaluate(_plain(coefficients), to_words(points, 2), out)
    return out


def check_points(points: Sequence[int]) -> None:
    """Raise CryptoError unless the points of shares are distinct and from 1 to p - 1."""
    if not points or not all(0 < point < P for point in points):
        raise CryptoError("expected one or more points from 1 to p - 1 (the secret is at 0), got others")
    if len(set(points)) != len(points):
        raise CryptoError(f"expected distinct points, got {len(points) - len(set(points))} repeated")


def check_numbers(numbers: Words, what: str) -> None:
    """Raise CryptoError unless an array is of this field: uint64 (..., 2) below p."""
    if numbers.dtype != np.uint64 or numbers.shape[-1:] != (2,):
        raise CryptoError(f"expected uint64 (..., 2) {what}, got {numbers.dtype} {numbers.shape}")
    high, low = numbers[..., 1], numbers[..., 0]
    if ((high > _TOP) | ((high == _TOP) & (low == ~_ZERO))).any():
        raise CryptoError(f"expected {what} below 2^127 - 1, got larger ones")


def comparison_factors(bits: Words, signs: Words, opened: Words) -> Words:
    """Return Toft's e_0 to e_l, uint64 (l + 1, m, 2), at most one of which is zero (`shamir_routing.is_negative`).

    `bits` (l, m, 2) are r_0 to r_{l-1}, `signs` (m, 2) s, or shares of them; `opened` (m, 2) is the public c mod 2^l.
    """
    out = np.empty((len(bits) + 1, *signs.shape), np.uint64)
    _comparison_factors(_plain(bits), _plain(signs), _plain(opened), out)
    return out


def _apply(kernel: Callable[[Words, Words, Words], None], a: Words, b: Words) -> Words:
    shape = np.broadcast_shapes(a.shape, b.shape)
    out = np.empty(shape, np.uint64)
    kernel(_flat(a, shape), _flat(b, shape), out.reshape(-1, 2))
    return out


def _flat(a: Words, shape: tuple[int, ...]) -> Words:
    return _plain(a if a.shape == shape else np.broadcast_to(a, shape)).reshape(-1, 2)


def _plain(a: Words) -> Words:
    # kernels are compiled for contiguous, writable arrays; those of messages may be neither
    return np.require(a, requirements=("C", "W"))


@kernel
def _add(a0: np.uint64, a1: np.uint64, b0: np.uint64, b1: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return a + b mod p for numbers up to p."""
    # 2^127 = 1, so the bit above 127 is added at the bottom
    low = a0 + b0
    high = a1 + b1 + (_ONE if low < a0 else _ZERO)
    over = high >> _LAST
    high &= _TOP
    low += over
    if low < over:
        high += _ONE
    # p itself is 0
    if high == _TOP and low == ~_ZERO:
        return _ZERO, _ZERO
    return low, high


@kernel
def _subtract(a0: np.uint64, a1: np.uint64, b0: np.uint64, b1: np.uint64) -> tuple[np.uint64, np.uint64]:
    # p - b is b with its 127 bits turned over
    return _add(a0, a1, ~b0, b1 ^ _TOP)


@kernel
def _multiply(a0: np.uint64, a1: np.uint64, b0: np.uint64, b1: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return a b mod p."""
    # the 254-bit product's upper 127 bits are added to its lower ones
    r0, carry = multiply_add(a0, b0, _ZERO, _ZERO)
    r1, upper = multiply_add(a0, b1, carry, _ZERO)
    r1, carry = multiply_add(a1, b0, r1, _ZERO)
    r2, r3 = multiply_add(a1, b1, upper, carry)
    return _add(r0, r1 & _TOP, (r1 >> _LAST) | (r2 << _ONE), (r2 >> _LAST) | (r3 << _ONE))


@kernel
def _add_all(a: Words, b: Words, out: Words) -> None:
    for j in range(len(a)):
        out[j, 0], out[j, 1] = _add(a[j, 0], a[j, 1], b[j, 0], b[j, 1])


@kernel
def _multiply_all(a: Words, b: Words, out: Words) -> None:
    for j in range(len(a)):
        out[j, 0], out[j, 1] = _multiply(a[j, 0], a[j, 1], b[j, 0], b[j, 1])


@kernel
def _raise(a: Words, digits: NDArray[np.uint8], out: Words) -> None:
    for start in range(0, len(a), _BLOCK):
        stop = min(start + _BLOCK, len(a))
        for j in range(start, stop):
            out[j, 0], out[j, 1] = _ONE, _ZERO
        # square and multiply, highest digit first, a block of numbers side by side
        for digit in digits:
            for j in range(start, stop):
                out[j, 0], out[j, 1] = _multiply(out[j, 0], out[j, 1], out[j, 0], out[j, 1])
            if digit:
                for j in range(start, stop):
                    out[j, 0], out[j, 1] = _multiply(out[j, 0], out[j, 1], a[j, 0], a[j, 1])


@kernel
def _running_products(a: Words, before: Words) -> Words:
    total = np.empty(2, np.uint64)
    low, high = _ONE, _ZERO
    # the product of all numbers before each; returned is that of all
    for j in range(len(a)):
        before[j, 0], before[j, 1] = low, high
        low, high = _multiply(low, high, a[j, 0], a[j, 1])
    total[0], total[1] = low, high
    return total


@kernel
def _unwind(a: Words, before: Words, total: Words, out: Words) -> None:
    """Write 1 / a, given the products before each number and the inverse of the product of all."""
    # from the last number down: 1 / (a_0 ... a_j) times the product before j is 1 / a_j
    low, high = total[0], total[1]
    for j in range(len(a) - 1, -1, -1):
        out[j, 0], out[j, 1] = _multiply(low, high, before[j, 0], before[j, 1])
        low, high = _multiply(low, high, a[j, 0], a[j, 1])


@kernel
def _evaluate(coefficients: Words, points: Words, out: Words) -> None:
    for i in range(points.shape[0]):
        x, small = points[i, 0], points[i, 1] == _ZERO
        for j in range(coefficients.shape[1]):
            low, high = _ZERO, _ZERO
            # Horner's rule
            for k in range(coefficients.shape[0] - 1, -1, -1):
                if small:  # as servers' numbers are: half the products
                    low, carry = multiply_add(low, x, _ZERO, _ZERO)
                    high, upper = multiply_add(high, x, carry, _ZERO)
                    low, high = _add(low, high & _TOP, (high >> _LAST) | (upper << _ONE), _ZERO)
                else:
                    low, high = _multiply(low, high, x, points[i, 1])
                low, high = _add(low, high, coefficients[k, j, 0], coefficients[k, j, 1])
            out[i, j, 0], out[i, j, 1] = low, high


@kernel
def _combine(values: Words, weights: Words, out: Words) -> None:
    for k in range(weights.shape[0]):
        for i in range(values.shape[0]):
            for j in range(values.shape[1]):
                low, high = _multiply(values[i, j, 0], values[i, j, 1], weights[k, i, 0], weights[k, i, 1])
                out[k, j, 0], out[k, j, 1] = _add(out[k, j, 0], out[k, j, 1], low, high)


@kernel
def _inner_products(rows: Words, weights: Words, start: int, stop: int, out: Words) -> None:
    """Write row times weights for some rows, reduced once: (n, d, 2), (k, d, 2) -> (k, n, 2)."""
    for j in range(start, stop):
        for k in range(weights.shape[0]):
            # products of words are added up in three words for each of the places 1 (x), 2^64 (y) and 2^128 (z)
            x0 = x1 = x2 = y0 = y1 = y2 = z0 = z1 = z2 = _ZERO
            for i in range(rows.shape[1]):
                a0, a1, b0, b1 = rows[j, i, 0], rows[j, i, 1], weights[k, i, 0], weights[k, i, 1]
                x0, upper = multiply_add(a0, b0, x0, _ZERO)
                x1 += upper
                x2 += _ONE if x1 < upper else _ZERO
                y0, carry = multiply_add(a0, b1, y0, _ZERO)
                y0, upper = multiply_add(a1, b0, y0, _ZERO)
                upper += carry  # below 2^64, as a1 and b1 are below 2^63
                y1 += upper
                y2 += _ONE if y1 < upper else _ZERO
                z0, upper = multiply_add(a1, b1, z0, _ZERO)
                z1 += upper
                z2 += _ONE if z1 < upper else _ZERO
            x0, x1 = _fold(x0, x1, x2)
            y0, y1 = _fold(y0, y1, y2)
            z0, z1 = _fold(z0, z1, z2)
            z0, z1 = _add(z0, z1, z0, z1)  # 2^128 = 2
            y0, y1 = _multiply(y0, y1, _ZERO, _ONE)
            x0, x1 = _add(x0, x1, y0, y1)
            out[k, j, 0], out[k, j, 1] = _add(x0, x1, z0, z1)


@kernel
def _fold(low: np.uint64, middle: np.uint64, high: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return three words, the highest below 2^63, modulo p."""
    return _add(low, middle & _TOP, (middle >> _LAST) | (high << _ONE), high >> _LAST)


@kernel
def _comparison_factors(bits: Words, signs: Words, opened: Words, out: Words) -> None:
    for j in range(signs.shape[0]):
        # from the highest bit down: s, plus three times the differing bits so far
        low, high = signs[j, 0], signs[j, 1]
        for i in range(bits.shape[0] - 1, -1, -1):
            r0, r1 = bits[i, j, 0], bits[i, j, 1]
            e0, e1 = _add(low, high, r0, r1)
            # c_i = 1: r_i - c_i, and r_i xor c_j = 1 - r_i
            if (opened[j, i >> 6] >> (np.uint64(i) & _LOW6)) & _ONE:
                e0, e1 = _subtract(e0, e1, _ONE, _ZERO)
                r0, r1 = _subtract(_ONE, _ZERO, r0, r1)
            out[i, j, 0], out[i, j, 1] = e0, e1
            for _ in range(3):
                low, high = _add(low, high, r0, r1)
        last = bits.shape[0]
        out[last, j, 0], out[last, j, 1] = _subtract(low, high, _ONE, _ZERO)


_PIECE = 15  # bytes of a secret in one field element
_WIDTH = 16  # bytes of a field element


def make_shares(secrets: Words, points: Sequence[int], threshold: int, key: bytes | None = None) -> Words:
    """Share secrets, uint64 (m, 2) below p, among n holders: (n, m, 2), any `threshold` (1 to n) of which give them.

    `points` are the holders', distinct, from 1 to p - 1. `key` seeds the `Keystream` of the coefficients and must serve
    these secrets alone. CryptoError if anything is out of range, or a point is repeated.
    """
    check_points(points)
    if not 1 <= threshold <= len(points):
        raise CryptoError(f"expected a threshold from 1 to {len(points)} shares, got {threshold}")
    check_numbers(secrets, "secrets")
    coefficients = random_numbers(threshold - 1, len(secrets), key=key)
    return evaluate(np.concatenate([secrets[None], coefficients]), points)


def open_shares(points: Sequence[int], shares: Words) -> Words:
    """Return the secrets (m, 2) behind shares (n, m, 2), in the order of `points`, at least as many as the threshold.

    CryptoError for a bad point or a share that is not below p; fewer shares than the threshold give a wrong secret.
    """
    if len(shares) != len(points):
        raise CryptoError(f"expected a share for each of {len(points)} points, got {len(shares)}")
    check_numbers(shares, "shares")
    opened: Words = combine(shares, lagrange_weights(points)[None])[0]
    return opened


def share_bytes(secret: bytes, points: Sequence[int], threshold: int) -> list[bytes]:
    """Share a byte string as `make_shares` does; every share has `share_length` bytes."""
    cut = [int.from_bytes(secret[i : i + _PIECE], "little") for i in range(0, len(secret), _PIECE)]
    shares = make_shares(to_words(cut, 2), points, threshold)
    return [share.astype("<u8").tobytes() for share in shares]


def open_bytes(points: Sequence[int], shares: Sequence[Sequence[bytes]], length: int) -> list[bytes]:
    """Return the byte strings of `length` behind shares from `share_bytes`, given by holder and string.

    CryptoError as in `open_shares`, and for shares that belong to no string of this length.
    """
    width = share_length(length)
    if any(len(share) != width for held in shares for share in held):
        raise CryptoError(f"expected shares of {width} bytes, got others")
    words = np.frombuffer(b"".join(share for held in shares for share in held), np.dtype("<u8")).astype(np.uint64)
    numbers = from_words(open_shares(points, words.reshape(len(shares), -1, 2)))
    # the last piece of a string is shorter
    sizes = [min(_PIECE, length - start) for start in range(0, length, _PIECE)]
    try:
        return [
            b"".join(
                number.to_bytes(size, "little") for number, size in zip(numbers[i : i + len(sizes)], sizes, strict=True)
            )
            for i in range(0, len(numbers), len(sizes))
        ]
    except OverflowError:
        raise CryptoError("expected shares of one string, got shares that do not belong together") from None


def share_length(length: int) -> int:
    """Return the bytes in a share of a `length`-byte string."""
    return -(-length // _PIECE) * _WIDTH
