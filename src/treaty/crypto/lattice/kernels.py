"""Compiled steps of the linear map; `linear_map` is their only caller.

The transform takes natural order to bit-reversed order; products of polynomials modulo X^N + 1 are products of
transforms, element by element; the transform of p(1 / X) is that of p read backwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.lattice.ring import (
    LANES,
    WORDS,
    Tables,
    add_words,
    dot,
    forward_1,
    forward_2,
    forward_4,
    forward_8,
    forward_far,
    inverse_1,
    inverse_2,
    inverse_4,
    inverse_8,
    inverse_far,
    multiply_lanes,
)
from treaty.crypto.parameters import DIGIT_BITS, Digits
from treaty.machine.arrays import Int32s, Integers, Words
from treaty.machine.kernels import kernel, new_array

Residues = NDArray[np.uint32]
Int8s = NDArray[np.int8]
Int16s = NDArray[np.int16]
Codes = NDArray[np.uint8]
Rows = tuple[NDArray[Any], Integers, Integers]  # the arrays of a `SecretMatrix`
Factors = tuple[Residues, Residues]  # numbers and their Shoup quotients

_LOW, _HALF_WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
COPIES = 4  # of each place that residues are added up in
_STRIP = 256  # numbers that are scaled together
_TILE = 1024  # rows taken through all columns at a time, a multiple of COPIES: their residues stay in the cache


@kernel
def forward_transform(a: Residues, start: int, degree: int, w: Residues, shoup: Residues, q: np.uint32) -> None:
    """Transform a[start:start + degree] in place; degree at least 128, values below q."""
    step, blocks = degree >> 1, 1
    # butterflies over a vector or more, then those within pairs of vectors
    while step >= LANES:
        for block in range(blocks):
            factor, quotient = w[blocks + block], shoup[blocks + block]
            first = start + 2 * block * step
            for i in range(first, first + step, LANES):
                forward_far(a, i, i + step, factor, quotient, q)
        step >>= 1
        blocks <<= 1
    half = degree >> 1
    for pair in range(degree // (2 * LANES)):
        i, k = start + 2 * LANES * pair, degree + LANES * pair
        forward_8(a, i, w, shoup, k, q)
        forward_4(a, i, w, shoup, k + half, q)
        forward_2(a, i, w, shoup, k + 2 * half, q)
        forward_1(a, i, w, shoup, k + 3 * half, q)


@kernel
def inverse_transform(a: Residues, start: int, degree: int, w: Residues, shoup: Residues, q: np.uint32) -> None:
    """Undo `forward_transform` but for a factor N."""
    half = degree >> 1
    for pair in range(degree // (2 * LANES)):
        i, k = start + 2 * LANES * pair, degree + LANES * pair
        inverse_1(a, i, w, shoup, k + 3 * half, q)
        inverse_2(a, i, w, shoup, k + 2 * half, q)
        inverse_4(a, i, w, shoup, k + half, q)
        inverse_8(a, i, w, shoup, k, q)
    step, blocks = LANES, degree // (2 * LANES)
    while blocks >= 1:
        for block in range(blocks):
            factor, quotient = w[blocks + block], shoup[blocks + block]
            first = start + 2 * block * step
            for i in range(first, first + step, LANES):
                inverse_far(a, i, i + step, factor, quotient, q)
        step <<= 1
        blocks >>= 1


@kernel
def encrypt_block(
    public: Residues, secret: Factors, error: Int32s, fields: Int32s, scales: Words, factors: Tables, out: Residues
) -> None:
    """Out = a s + e + sum over fields of field * scale, modulo q, of one block of at most N numbers.

    `public` and `secret` (N,) are transforms of a and s / N, the latter with its Shoup quotients; `error` and `out` are
    (m,), `fields` (fields, m), all in size below q; the sizes of a number's fields, q for one with negative numbers,
    add up to at most 2^32. `scales` (fields + 1,) are residues of the fields' scales times 2^32, and -1 / q mod 2^32.
    """
    q, _, _, inverse, inverse_shoup = factors
    numbers, shoup = secret
    degree = len(public)
    product = new_array(degree, np.uint32)
    for i in range(0, degree, LANES):
        multiply_lanes(product, i, public, i, numbers, shoup, i, q)
    # typed: for a plain 0 the transform would be compiled once more
    nothing: Any = np.int64(0)
    inverse_transform(product, nothing, degree, inverse, inverse_shoup, q)
    wide, count = np.uint64(q), len(scales) - 1
    # fields times scales 2^32 modulo q: negative numbers count from q on, so that all is below 2^63
    for i in range(len(out)):
        total = np.uint64(0)
        for f in range(count):
            value = np.int64(fields[f, i])
            total += np.uint64(value + (np.int64(wide) if value < 0 else np.int64(0))) * scales[f]
        # Montgomery's reduction: divides what is below 2^63 by 2^32, to below 2^31 + q
        total = (total + (((total & _LOW) * scales[count]) & _LOW) * wide) >> _HALF_WORD
        e = np.int64(error[i])
        total += np.uint64(product[i]) + np.uint64(e + np.int64(wide))
        total -= wide + wide if total >= wide + wide else np.uint64(0)
        total -= wide + wide if total >= wide + wide else np.uint64(0)
        total -= wide if total >= wide else np.uint64(0)
        out[i] = np.uint32(total)


@kernel
def interleave(planes: Residues, primes: Residues, first: int, stop: int, out: Residues) -> bool:
    """Write out[i, p] = planes[p, i]; return False if a residue is not below its prime."""
    fine = True
    for p in range(len(primes)):
        for i in range(first, stop):
            fine &= planes[p, i] < primes[p]
    for start in range(first, stop, LANES):
        for i in range(start, min(start + LANES, stop)):
            for p in range(len(primes)):
                out[i, p] = planes[p, i]
    return fine


@kernel
def bin_sums(
    words: Residues, codes: Codes, base: int, offsets: Integers, features: Integers, first: int, stop: int, sums: Words
) -> None:
    """Add words[i * 8:] to the place of bin offsets[f] + codes[f, base + i], over all i, of features[first:stop].

    `sums` has `COPIES` copies of each place side by side, whose sum is the result.
    """
    rows = len(words) // WORDS
    # An addition to a place waits for the last one to it: with a single copy the time would tell how skewed bins are.
    # Row i goes to copy i % COPIES. Copies are side by side: processors mistake addresses that differ by a multiple of
    # 4096 bytes for the same one, and would wait all the same.
    for start in range(0, rows, _TILE):
        end = min(start + _TILE, rows)
        whole = start + (end - start) // COPIES * COPIES
        for k in range(first, stop):
            column, offset = codes[features[k]][base:], offsets[features[k]]
            for i in range(start, whole, COPIES):
                for copy in range(COPIES):
                    place = (offset + np.int64(column[i + copy])) * COPIES + copy
                    add_words(sums, place * WORDS, words, (i + copy) * WORDS)
            for i in range(whole, end):
                place = (offset + np.int64(column[i])) * COPIES + i - whole
                add_words(sums, place * WORDS, words, i * WORDS)


@kernel
def dense_sums(planes: Residues, values: Int32s, rows: Integers, primes: Residues, out: Integers) -> None:
    """out[s, p] = sum over i of values[rows[s], i] * planes[p, i], modulo primes[p]; |values| below 2^31."""
    for s in range(len(rows)):
        row = values[rows[s]]
        for p in range(len(primes)):
            q, low, high = np.int64(primes[p]), np.int64(0), np.int64(0)
            for i in range(len(row)):
                # halves of 63-bit products add up without overflow; one reduction for each at the end
                product = np.int64(row[i]) * np.int64(planes[p, i])
                low += product & np.int64(0xFFFFFFFF)
                high += product >> np.int64(32)
            out[s, p] = ((high % q * ((np.int64(1) << np.int64(32)) % q)) % q + low % q) % q


@kernel
def add_hints(
    rows: Rows, first: int, public: Factors, own: tuple[Int8s, Int8s], factors: Tables, total: Residues
) -> None:
    """Add the sum over j of u_j a_j, plus r a + e', of rows of the matrix from `first`, to `total` (rows, N), modulo q.

    `public` (count, N) are transforms of a_j / N and at last of a / N, with their Shoup quotients; `own` are r and e',
    (rows, N) each, or of no rows, and then there is no a.
    """
    columns, column_of_row, code_of_row = rows
    numbers, quotients = public
    random, error = own
    q, forward, forward_shoup, inverse, inverse_shoup = factors
    degree, modulus, signed = numbers.shape[1], np.uint32(q), np.int64(q)
    blocks = len(numbers) - 1 if len(random) > 0 else len(numbers)
    nothing: Any = np.int64(0)  # as in `encrypt_block`
    t, sums = new_array(degree, np.uint32), new_array(degree, np.uint32)
    for s in range(len(total)):
        column, code = columns[column_of_row[first + s]], code_of_row[first + s]
        for i in range(degree):
            sums[i] = np.uint32(0)
        for j in range(len(numbers)):
            # r, which is ternary, and columns of integers: negative numbers are counted from q on
            if j == blocks:
                for i in range(degree):
                    value = np.int64(random[s, i])
                    t[i] = np.uint32(value + signed if value < 0 else value)
            else:
                part = column[j * degree : (j + 1) * degree]
                if code >= 0:
                    # compared as narrow numbers, of which a vector has more
                    for i in range(np.uint64(len(part))):
                        t[i] = np.uint32(np.int32(part[i]) == np.int32(code))
                else:
                    for i in range(np.uint64(len(part))):
                        value = np.int64(part[i])
                        t[i] = np.uint32(value + signed if value < 0 else value)
                for i in range(len(part), degree):
                    t[i] = np.uint32(0)
            # u_j a_j in the transform, whose sums are transformed back once
            forward_transform(t, nothing, degree, forward, forward_shoup, q)
            for i in range(0, degree, LANES):
                multiply_lanes(t, i, t, i, numbers[j], quotients[j], i, q)
            for i in range(np.uint64(degree)):
                # added - q wraps around if it is negative, so the smaller is the residue
                added = np.uint32(sums[i] + t[i])
                sums[i] = min(added, np.uint32(added - modulus))
        inverse_transform(sums, nothing, degree, inverse, inverse_shoup, q)
        if len(random) > 0:
            for i in range(degree):
                e = np.int64(error[s, i])
                added = np.uint32(sums[i] + np.uint32(e + signed if e < 0 else e))
                sums[i] = min(added, np.uint32(added - modulus))
        for i in range(np.uint64(degree)):
            added = np.uint32(total[s, i] + sums[i])
            total[s, i] = min(added, np.uint32(added - modulus))


@kernel
def rescale(
    residues: Residues, inverses: Words, primes: Words, scales: Words, guard: int, balanced: bool, out: Int16s
) -> None:
    """Write round(x q' / q) modulo q' = 2^(16 D), in digits (D, m), of numbers x given by residues (primes, m).

    `inverses` (primes,) are (q / p)^-1 mod p; `scales` (primes, words) are 2^(16 D + guard) / p rounded, in 32-bit
    words; `guard` is a multiple of 16. `balanced` digits are from -2^15 to 2^15 - 1, others from 0, as the bits of
    int16.
    """
    words, digits = scales.shape[1], len(out)
    # x / q is the sum of z_p / p modulo 1 with z_p = x (q / p)^-1 mod p: the result is off by less than 0.51
    bottom = guard - 1
    acc, z = new_array((words + 1, _STRIP), np.uint64), new_array(_STRIP, np.uint64)
    borrow = new_array(_STRIP, np.int64)
    # each step for a strip of numbers, in vector registers
    for begin in range(0, residues.shape[1], _STRIP):
        count = min(_STRIP, residues.shape[1] - begin)
        # half of the guard's unit, so that dropping the guard rounds to the nearest
        for x in range(words + 1):
            start = np.uint64(1) << np.uint64(bottom % 32) if x == bottom // 32 else np.uint64(0)
            for k in range(count):
                acc[x, k] = start
        for p in range(len(primes)):
            q, inverse = primes[p] & _LOW, inverses[p] & _LOW
            quotient = ((inverse << _HALF_WORD) // q) & _LOW
            for k in range(count):
                residue = np.uint64(residues[p, begin + k])
                # Shoup's product, below 2 q
                rest = residue * inverse - ((residue * quotient) >> _HALF_WORD) * q
                z[k] = min(rest, rest - q)
            # products of 32-bit words, low and high halves, added up in 64 bits; carries follow
            for x in range(words):
                scale = scales[p, x] & _LOW
                for k in range(count):
                    product = (z[k] & _LOW) * scale
                    acc[x, k] += product & _LOW
                    acc[x + 1, k] += product >> _HALF_WORD
        for x in range(words):
            for k in range(count):
                acc[x + 1, k] += acc[x, k] >> _HALF_WORD
                acc[x, k] &= _LOW
        for k in range(count):
            borrow[k] = 0
        # a balanced digit from 2^15 on borrows from the next one
        for d in range(digits):
            bit = guard + 16 * d
            x, by = bit // 32, np.uint64(bit % 32)
            for k in range(count):
                digit = np.int64((acc[x, k] >> by) & np.uint64(0xFFFF)) + borrow[k]
                borrow[k] = np.int64(1) if balanced and digit >= 1 << 15 else np.int64(0)
                out[d, begin + k] = np.int16(digit - (borrow[k] << 16))


def dots(a: Int16s, rows: Integers, b: Int16s, first: int, stop: int, out: Int32s) -> None:
    """out[i, j] = sum over k of a[rows[i], k] * b[j, k], i in first:stop; one factor of each product is -1, 0 or 1."""
    # read-only as hints of a message are, or the kernel would be compiled for either kind
    a = a.view()
    a.flags.writeable = False
    _dots(a, rows, b, first, stop, out)


@kernel
def _dots(a: Int16s, rows: Integers, b: Int16s, first: int, stop: int, out: Int32s) -> None:
    # exact in 32 bits: at most 2^15 products below 2^15 in size
    for i in range(first, stop):
        for j in range(len(b)):
            out[i, j] = dot(a[rows[i]], 0, b[j], 0, len(b[j]))


def reduced(numbers: Integers) -> Digits:
    """Return numbers modulo q', (..., D), from digits of any size."""
    out = numbers.copy()
    # carries go up; that of the last digit is dropped, modulo q'
    for d in range(out.shape[-1] - 1):
        out[..., d + 1] += out[..., d] >> DIGIT_BITS
    return (out & (1 << DIGIT_BITS) - 1).astype(np.uint16)
