"""Compiled kernels of Montgomery arithmetic; `montgomery.Modulus` is their only caller.

A kernel takes flat arrays and an array of constants `m` made by `Modulus`: m[0] = -1/n mod 2^64, m[1] digits, m[2]
words, m[3] tail bits, m[4] the form (0 to 2: below), m[5] vectors of eight digits, m[8:] the modulus in working form.

Two forms of a number x mod n:

* *packed*: `words` little-endian 64-bit words, x < n: what is stored and sent;
* *working*: `m.size - 8` words. With AVX-512 IFMA (m[4] = 1) or AVX2 and FMA (2), 52-bit digits of a value below 2 n;
  otherwise (0) the packed words, and then x < n throughout.

Both forms divide by the same R = 2^{52 digits}, so what one machine writes the other reads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.multiplier import (
    DIGIT_BITS,
    GROUP,
    HEADER,
    SCRATCH,
    fma_multiply_four,
    ifma_multiply_pair,
    load_word,
    multiply_add,
    unpack_digits,
)
from treaty.machine.arrays import Int32s, Integers, Words
from treaty.machine.kernels import inlined, kernel

Bytes = NDArray[np.uint8]

_MASK = np.uint64((1 << DIGIT_BITS) - 1)
_ZERO, _ONE, _WORD = np.uint64(0), np.uint64(1), np.uint64(64)
# typed: for a literal 0 kernels would be compiled once more
_START: int = np.intp(0)  # type: ignore[assignment]
_DIGIT, _IFMA, _FMA = np.uint64(DIGIT_BITS), np.uint64(1), np.uint64(2)  # the latter two are values of m[4]


@kernel
def multiply_word_form(out: Words, o: int, a: Words, i: int, b: Words, j: int, m: Words, t: Words) -> None:
    """out[o:] = a[i:] b[j:] / R mod n, below n, in 64-bit words, for a b < R n; `t` is scratch of words + 2."""
    words, n = np.intp(m[2]), HEADER
    for y in range(words + 2):
        t[y] = _ZERO
    # operand scanning: t += a b_x, then the multiple of n that clears the lowest word, which is dropped
    for x in range(words):
        factor, carry = b[j + x], _ZERO
        for y in range(words):
            t[y], carry = multiply_add(a[i + y], factor, t[y], carry)
        top = t[words] + carry
        t[words + 1] = _ONE if top < carry else _ZERO
        t[words] = top
        # t + clear n is a multiple of 2^64: the words move down by one as they are written
        clear = t[0] * m[0]
        _, carry = multiply_add(clear, m[n], t[0], _ZERO)
        for y in range(1, words):
            t[y - 1], carry = multiply_add(clear, m[n + y], t[y], carry)
        low = t[words] + carry
        t[words - 1] = low
        t[words] = t[words + 1] + (_ONE if low < carry else _ZERO)
    # R = 2^{52 digits} is no power of 2^64: the tail of 52 digits - 64 words bits is cleared in the same way
    if m[3] != _ZERO:
        clear, carry = (t[0] * m[0]) & ((_ONE << m[3]) - _ONE), _ZERO
        for y in range(words):
            t[y], carry = multiply_add(clear, m[n + y], t[y], carry)
        t[words] += carry
        for y in range(words):
            t[y] = (t[y] >> m[3]) | (t[y + 1] << (_WORD - m[3]))
        t[words] >>= m[3]
    for y in range(words):
        out[o + y] = t[y]
    _reduce(out, o, t[words], m)


@kernel
def _reduce(x: Words, o: int, over: np.uint64, m: Words) -> None:
    """Subtract n from x[o:] (plus over * 2^{64 words}) when that is not negative: packed words, or 52-bit digits."""
    width = m.size - HEADER
    if over == _ZERO:
        # the highest word that differs decides; equal numbers are subtracted, too
        for y in range(width - 1, -1, -1):
            if x[o + y] != m[HEADER + y]:
                if x[o + y] < m[HEADER + y]:
                    return
                break
    # digits keep 52 bits of a difference, words all
    mask = _MASK if m[4] != _ZERO else ~_ZERO
    borrow = _ZERO
    for y in range(width):
        left, right = x[o + y], m[HEADER + y]
        x[o + y] = (left - right - borrow) & mask
        borrow = _ONE if left < right or (left == right and borrow != _ZERO) else _ZERO


@inlined
def _multiply(
    out: Words, at: Integers, a: Words, of_a: Integers, b: Words, of_b: Integers, live: int, m: Words, t: Words
) -> None:
    """out[at[k]:] = a[of_a[k]:] b[of_b[k]:] / R for k < live; `t` is scratch. In place is allowed."""
    # flat arguments, as this is the innermost call; offsets from `live` on repeat that of number live - 1
    if m[4] == _FMA:
        fma_multiply_four(out, at, a, of_a, b, of_b, m, t)
    elif m[4] == _IFMA:
        ifma_multiply_pair(out, at[0], at[1], a, of_a[0], of_a[1], b, of_b[0], of_b[1], m)
        if live > 2:
            ifma_multiply_pair(out, at[2], at[3], a, of_a[2], of_a[3], b, of_b[2], of_b[3], m)
    else:
        for k in range(live):
            multiply_word_form(out, at[k], a, of_a[k], b, of_b[k], m, t)


@kernel
def _spread(at: Integers, first: int, count: int, step: int) -> int:
    """Write the offsets first * step, (first + 1) * step, ... below count * step; return how many are different."""
    for k in range(GROUP):
        at[k] = min(first + k, count - 1) * step
    return min(GROUP, count - first)


@kernel
def _scratch(words: int) -> Words:
    # aligned to a cache line: vector loads that straddle two cost twice
    x = np.empty(words + 8, np.uint64)
    skip = (-(x.ctypes.data >> 3)) & 7
    return x[skip : skip + words]


@kernel
def _copy(x: Words, o: int, out: Words, p: int, m: Words) -> None:
    # assigning slices would compile ten times as long
    for y in range(m.size - HEADER):
        out[p + y] = x[o + y]


@kernel
def _unpack(raw: Bytes, item: int, x: Words, o: int, m: Words) -> None:
    """Convert packed number `item` of raw bytes to working form at x[o:]."""
    words, width = np.intp(m[2]), m.size - HEADER
    start = item * words * 8
    if m[4] == _ZERO:
        for y in range(words):
            x[o + y] = load_word(raw, start + 8 * y)
        return
    first, y = 0, 0
    # 13 words are 16 digits; vectors take them at once where a 14th word may be read
    while first + 14 <= words:
        unpack_digits(raw, start + 8 * first, x, o + y)
        first, y = first + 13, y + 16
    # the rest digit by digit: `used` bits of `word` are taken
    word, used = load_word(raw, start + 8 * first), _ZERO
    for k in range(first + 1, words + 1):
        following = load_word(raw, start + 8 * k) if k < words else _ZERO
        while used < _WORD and y < width:
            digit = word >> used
            if used > _WORD - _DIGIT:
                digit |= following << (_WORD - used)
            x[o + y] = digit & _MASK
            y += 1
            used += _DIGIT
        word, used = following, used - _WORD
    for k in range(y, width):
        x[o + k] = _ZERO


@kernel
def _pack(x: Words, o: int, out: Words, item: int, m: Words) -> None:
    """Convert working form at x[o:] (destroyed) to packed number `item` of out, below n."""
    words = np.intp(m[2])
    _reduce(x, o, _ZERO, m)
    start = item * words
    if m[4] == _ZERO:
        for y in range(words):
            out[start + y] = x[o + y]
        return
    for y in range(words):
        out[start + y] = _ZERO
    for y in range(np.intp(m[1])):
        bit = np.uint64(y) * _DIGIT
        k, shift = np.intp(bit >> np.uint64(6)), bit & np.uint64(63)
        if k < words:
            out[start + k] |= x[o + y] << shift
        if k + 1 < words and shift > _WORD - _DIGIT:
            out[start + k + 1] |= x[o + y] >> (_WORD - shift)


@kernel
def unpack_rows(raw: Bytes, out: Words, m: Words) -> None:
    width = m.size - HEADER
    for row in range(out.size // width):
        _unpack(raw, row, out, row * width, m)


@kernel
def pack_rows(rows: Words, out: Words, m: Words) -> None:
    width = m.size - HEADER
    for row in range(rows.size // width):
        _pack(rows, row * width, out, row, m)


@kernel
def multiply_rows(a: Words, b: Words, out: Words, b_step: int, m: Words) -> None:
    """out[r] = a[r] b[r] / R, or a[r] b[0] / R with b_step 0; `out` may be a or b (the latter with a step)."""
    width = m.size - HEADER
    t, count = _scratch(SCRATCH * width + 2), out.size // width
    at, of_b = np.zeros(GROUP, np.int64), np.zeros(GROUP, np.int64)
    for r in range(0, count, GROUP):
        live = _spread(at, r, count, width)
        _spread(of_b, r, count, width * b_step)
        _multiply(out, at, a, at, b, of_b, live, m, t)


@kernel
def add_rows(a: Words, b: Words, out: Words, b_step: int, m: Words) -> None:
    """out[r] = a[r] + b[r] mod n, below n; working forms, both reduced first, in place."""
    width = m.size - HEADER
    for row in range(out.size // width):
        o, p = row * width, row * width * b_step
        _reduce(a, o, _ZERO, m)
        _reduce(b, p, _ZERO, m)
        carry = _ZERO
        for y in range(width):
            total = a[o + y] + b[p + y] + carry
            if m[4] != _ZERO:
                carry = total >> _DIGIT
                total &= _MASK
            else:
                carry = _ONE if total < a[o + y] or (carry != _ZERO and total == a[o + y]) else _ZERO
            out[o + y] = total
        _reduce(out, o, carry, m)


@kernel
def power_rows(bases: Words, out: Words, windows: Bytes, one: Words, m: Words) -> None:
    """out[r] = bases[r]^e for one exponent given as 4-bit windows, highest first. Montgomery working forms."""
    width = m.size - HEADER
    t, count = _scratch(SCRATCH * width + 2), out.size // width
    table = _scratch(16 * GROUP * width)  # powers 0..15 of each base
    at, below, above = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    for r in range(0, count, GROUP):
        live = _spread(at, r, count, width)
        for lane in range(live):
            _copy(one, _START, out, at[lane], m)
            _copy(one, _START, table, 16 * lane * width, m)
        for k in range(1, 16):
            for lane in range(GROUP):
                above[lane] = (16 * min(lane, live - 1) + k) * width
                below[lane] = above[lane] - width
            _multiply(table, above, table, below, bases, at, live, m, t)
        # four squarings and one product per window, also of zero: time does not depend on the exponent
        for window in windows:
            for _ in range(4):
                _multiply(out, at, out, at, out, at, live, m, t)
            for lane in range(GROUP):
                below[lane] = (16 * min(lane, live - 1) + int(np.intp(window))) * width
            _multiply(out, at, out, at, table, below, live, m, t)


@kernel
def fixed_base_table(base: Words, table: Words, entries: int, one: Words, m: Words) -> None:
    """table[i, d] = base^{d entries^i} for d < entries (a power of two). Montgomery working forms."""
    width = m.size - HEADER
    t, power, windows = _scratch(SCRATCH * width + 2), _scratch(width), table.size // (entries * width)
    at, below, base_at = np.zeros(GROUP, np.int64), np.empty(GROUP, np.int64), np.zeros(GROUP, np.int64)
    _copy(base, _START, power, _START, m)
    # base^{entries^i} for each window, by squaring
    for i in range(windows):
        _copy(one, _START, table, i * entries * width, m)
        _copy(power, _START, table, (i * entries + 1) * width, m)
        squared = 1
        while squared < entries:
            _multiply(power, at, power, at, power, at, 1, m, t)
            squared *= 2
    # then the multiples d = 2, 3, ... of all windows, GROUP of them at a time
    for i in range(0, windows, GROUP):
        live = _spread(base_at, i, windows, entries * width)
        for lane in range(GROUP):
            base_at[lane] += width
            at[lane] = base_at[lane]
        for _ in range(2, entries):
            for lane in range(GROUP):
                below[lane] = at[lane]
                at[lane] += width
            _multiply(table, at, table, below, table, base_at, live, m, t)


@kernel
def fixed_base_rows(table: Words, exponents: Words, window: int, out: Words, m: Words) -> None:
    """out[r] = base^{exponents[r]}: one product per window (Brickell, Gordon, McCurley, Wilson 1992)."""
    width, count = m.size - HEADER, out.size // (m.size - HEADER)
    t, entries = _scratch(SCRATCH * width + 2), 1 << window
    limbs, windows = exponents.size // max(count, 1), table.size // (entries * width)
    at, entry = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    for r in range(0, count, GROUP):
        live = _spread(at, r, count, width)
        for i in range(windows):
            for lane in range(GROUP):
                row = r + min(lane, live - 1)
                entry[lane] = (i * entries + _bits(exponents, row * limbs, limbs, i * window, window)) * width
            if i == 0:
                for lane in range(live):
                    _copy(table, entry[lane], out, at[lane], m)
            else:
                _multiply(out, at, table, entry, out, at, live, m, t)


@kernel
def _bits(x: Words, o: int, limbs: int, bit: int, count: int) -> int:
    """Return bits [bit, bit + count) of the number at x[o : o + limbs], zero beyond it."""
    k, shift = bit >> 6, np.uint64(bit & 63)
    value = x[o + k] >> shift if k < limbs else _ZERO
    if shift + np.uint64(count) > _WORD and k + 1 < limbs:
        value |= x[o + k + 1] << (_WORD - shift)
    return int(np.intp(value & ((_ONE << np.uint64(count)) - _ONE)))


@kernel
def segment_products(raw: Bytes, index: Int32s, starts: Integers, out: Words, one: Words, m: Words) -> None:
    """out[s] = product of raw[index[j]] over starts[s] <= j < starts[s + 1]; no segment is empty. Packed forms."""
    width, segments = m.size - HEADER, starts.size - 1
    t, lanes = _scratch(SCRATCH * width + 2), min(GROUP, segments)
    product, item = _scratch(GROUP * width), _scratch(GROUP * width)
    segment, position = np.full(GROUP, -1, np.int64), np.zeros(GROUP, np.int64)
    at = np.empty(GROUP, np.int64)
    _spread(at, 0, lanes, width)
    # GROUP segments are multiplied at a time; a lane whose segment is finished takes the next one
    following, active = 0, lanes
    while active > 0:
        active = 0
        for lane in range(lanes):
            o = lane * width
            while segment[lane] < segments and (segment[lane] < 0 or position[lane] == starts[segment[lane] + 1]):
                if segment[lane] >= 0:
                    _pack(product, o, out, segment[lane], m)
                segment[lane] = following
                following += 1
                if segment[lane] < segments:
                    position[lane] = starts[segment[lane]] + 1
                    _unpack(raw, int(np.intp(index[position[lane] - 1])), product, o, m)
            if segment[lane] < segments:
                _unpack(raw, int(np.intp(index[position[lane]])), item, o, m)
                position[lane] += 1
                active += 1
            else:
                _copy(one, _START, item, o, m)
                _copy(one, _START, product, o, m)
        if active > 0:
            _multiply(product, at, product, at, item, at, lanes, m, t)


@kernel
def horner_rows(raw: Bytes, starts: Integers, bits: int, factors: Words, out: Words, one: Words, m: Words) -> None:
    """out[r] = factors[r] prod_j x_j^{2^{bits (last - j)}} over the packed x_j, starts[r] <= j < starts[r + 1]."""
    width, rows = m.size - HEADER, starts.size - 1
    t = _scratch(SCRATCH * width + 2)
    total, item = _scratch(GROUP * width), _scratch(GROUP * width)
    at, of_factors = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    for r in range(0, rows, GROUP):
        live = _spread(of_factors, r, rows, width)
        _spread(at, 0, live, width)
        longest = 0
        for row in range(r, r + live):
            longest = max(longest, starts[row + 1] - starts[row])
        # shorter rows begin with ones, so that all lanes end together
        for step in range(longest):
            for lane in range(live):
                j = starts[r + lane + 1] - longest + step
                if j >= starts[r + lane]:
                    _unpack(raw, j, item, lane * width, m)
                else:
                    _copy(one, _START, item, lane * width, m)
            if step == 0:
                for lane in range(live):
                    _copy(item, lane * width, total, lane * width, m)
                continue
            # squarings shift the plaintext up by one field
            for _ in range(bits):
                _multiply(total, at, total, at, total, at, live, m, t)
            _multiply(total, at, total, at, item, at, live, m, t)
        _multiply(total, at, total, at, factors, of_factors, live, m, t)
        for lane in range(live):
            _pack(total, lane * width, out, r + lane, m)


@kernel
def all_in_range(raw: Bytes, count: int, m: Words) -> bool:
    """Return whether every packed number is in [1, n)."""
    width = m.size - HEADER
    x = np.empty(width, np.uint64)
    for item in range(count):
        _unpack(raw, item, x, _START, m)
        # upwards, so that the highest word that differs decides
        below, nonzero = False, False
        for y in range(width):
            if x[y] != m[HEADER + y]:
                below = x[y] < m[HEADER + y]
            nonzero = nonzero or x[y] != _ZERO
        if not (below and nonzero):
            return False
    return True


@kernel
def bucket_rows(
    rows: Words, exponents: Words, pairs: Integers, bits: int, window: int, first: int, stop: int,
    out: Words, one: Words, m: Words,
) -> None:  # fmt: skip
    """out[j] = product over i of rows[i, column]^{exponents[i, kind]}, (column, kind) = pairs[j], j in first:stop."""
    width, entries = m.size - HEADER, 1 << window
    bases, across = rows.reshape(-1), rows.shape[1]
    t, size = _scratch(SCRATCH * width + 2), entries * width
    buckets, running = _scratch(GROUP * size), _scratch(2 * GROUP * width)
    at, of_bases = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    bucket, high, total = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    mask = np.uint64(entries - 1)
    for j in range(first, stop, GROUP):
        live = _spread(at, j, stop, width)
        _spread(high, 0, live, width)
        _spread(total, GROUP, GROUP + live, width)
        for lane in range(live):
            _copy(one, _START, out, at[lane], m)
        # Pippenger: of each window of the exponents, rows are multiplied into the bucket of their digit
        for position in range((bits - 1) // window * window, -1, -window):
            for _ in range(window):
                _multiply(out, at, out, at, out, at, live, m, t)
            for d in range(live * entries):
                _copy(one, _START, buckets, d * width, m)
            shift = np.uint64(position)
            # digits of zero fill a bucket that does not count, so that time does not depend on exponents
            for i in range(len(rows)):
                for k in range(GROUP):
                    lane = min(k, live - 1)
                    digit = int(np.intp((exponents[i, pairs[j + lane, 1]] >> shift) & mask))
                    bucket[k] = lane * size + digit * width
                    of_bases[k] = i * across + pairs[j + lane, 0] * width
                _multiply(buckets, bucket, buckets, bucket, bases, of_bases, live, m, t)
            for lane in range(live):
                _copy(one, _START, running, high[lane], m)
                _copy(one, _START, running, total[lane], m)
            # bucket d counts d times: running products from the highest bucket down, and the product of these
            for d in range(entries - 1, 0, -1):
                for lane in range(GROUP):
                    bucket[lane] = min(lane, live - 1) * size + d * width
                _multiply(running, high, running, high, buckets, bucket, live, m, t)
                _multiply(running, total, running, total, running, high, live, m, t)
            _multiply(out, at, out, at, running, total, live, m, t)
