"""Arithmetic modulo an odd number on many residues at once.

`Modulus` holds the constants of one modulus n and wraps the compiled kernels for two-dimensional arrays, one number per
row. In Montgomery form x stands for x R mod n; a product of two such forms is one again, and no division occurs.
R = 2^{52 d} is the same on every machine (d the least number of 52-bit digits with R >= 4 n and R >= 2^{64 words}), so
packed Montgomery forms can be sent as they are.

Arrays: *packed* is uint64 (rows, words), little-endian words, every value below n; *working* is uint64 (rows, width) in
the machine's own form (see `montgomery_kernels`) and never leaves the process.

References: Montgomery, Modular Multiplication Without Trial Division, Math. Comp. 44, 1985. Okamoto and Uchiyama, A New
Public-Key Cryptosystem as Secure as Factoring, EUROCRYPT 1998, section 3. Paillier, Public-Key Cryptosystems Based on
Composite Degree Residuosity Classes, EUROCRYPT 1999, section 7 (decryption modulo parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive import montgomery_kernels as kernels
from treaty.crypto.additive.multiplier import DIGIT_BITS, GROUP, HAS_FMA, HAS_IFMA, HEADER, LANES, VECTOR_COUNTS
from treaty.crypto.payload import from_words, to_words
from treaty.errors import CryptoError
from treaty.machine.arrays import Int32s, Integers, Words, pieces
from treaty.machine.process import concurrently

_FORMS = ("words", "ifma", "fma")  # in the order of their numbers in `montgomery_kernels`
_ALIGNMENT = 64  # bytes of a vector: loads that straddle cache lines cost twice


class Modulus:
    """An odd modulus of at least 3 and its arithmetic, with `words` per packed and `width` per working number.

    `radix` is R, `one` the Montgomery form of 1, R mod n in working form (width,). `form` is how products are made,
    with equal results: "ifma" or "fma", if the processor has the instructions, or "words"; None is the fastest here.
    """

    def __init__(self, value: int, *, form: str | None = None) -> None:
        if value < 3 or value % 2 == 0:
            raise CryptoError("expected an odd modulus of at least 3")
        self.value, self.bits = value, value.bit_length()
        self.words = -(-self.bits // 64)
        # R >= 4 n, so that sums of two products stay in bounds, and R >= 2^{64 words}
        digits = max(-(-(self.bits + 2) // DIGIT_BITS), -(-64 * self.words // DIGIT_BITS))
        vectors = min((count for count in VECTOR_COUNTS if LANES * count >= digits), default=0)
        self.form = (form or ("ifma" if HAS_IFMA else "fma" if HAS_FMA else "words")) if vectors else "words"
        self.digit_form = self.form != "words"
        self.width = LANES * vectors if self.digit_form else self.words
        self.radix = 1 << (DIGIT_BITS * digits)
        self._constants = aligned(HEADER + self.width)
        # -1 / n mod 2^64, by which kernels find the multiple of n that clears a lowest word or digit
        inverse = -pow(value, -1, 1 << 64) % (1 << 64)
        self._constants[:HEADER] = 0
        # bits by which R exceeds 2^{64 words}: the word form divides by them at the end
        tail = DIGIT_BITS * digits - 64 * self.words
        self._constants[:6] = [inverse, digits, self.words, tail, _FORMS.index(self.form), vectors]
        self._constants[HEADER:] = self.working([value])[0]
        self.one = self.working([self.radix % value])[0]

    def working(self, values: Sequence[int]) -> Words:
        """Convert integers below R to working rows, values unchanged (not in Montgomery form)."""
        if not self.digit_form:
            return to_words(values, self.words)
        digits = np.array([[x >> (DIGIT_BITS * i) & (1 << DIGIT_BITS) - 1 for i in range(self.width)] for x in values])
        out = aligned(len(values) * self.width).reshape(len(values), self.width)
        out[:] = digits.astype(np.uint64).reshape(out.shape)
        return out

    def montgomery(self, values: Sequence[int]) -> Words:
        """Return working Montgomery forms of integers."""
        return self.working([x * self.radix % self.value for x in values])

    def empty(self, rows: int) -> Words:
        return aligned(rows * self.width).reshape(rows, self.width)

    def unpack(self, packed: Words) -> Words:
        """Convert packed numbers, or any uint64 rows of at most `words` words, to working form, values unchanged."""
        if packed.shape[1] < self.words:
            padded = np.zeros((len(packed), self.words), np.uint64)
            padded[:, : packed.shape[1]] = packed
            packed = padded
        out = self.empty(len(packed))
        kernels.unpack_rows(_raw(packed), out.reshape(-1), self._constants)
        return out

    def pack(self, rows: Words) -> Words:
        """Convert working rows (overwritten) to packed numbers below n."""
        out = np.empty((len(rows), self.words), np.uint64)
        kernels.pack_rows(rows.reshape(-1), out.reshape(-1), self._constants)
        return out

    def adopt(self, rows: Words, source: Modulus) -> Words:
        """Convert working rows of a smaller modulus to working rows of this one, values unchanged."""
        # digits are the same in both, where both have digits
        if rows.shape[1] > self.width or source.digit_form != self.digit_form:
            return self.unpack(source.pack(rows))
        out = self.empty(len(rows))
        out[:, : rows.shape[1]] = rows
        out[:, rows.shape[1] :] = 0
        return out

    def multiply(self, a: Words, b: Words) -> Words:
        """Return a b / R mod n row by row; `b` has as many rows as `a`, or one. Needs a b < R n."""
        out = self.empty(len(a))
        step = 0 if len(b) == 1 else 1
        kernels.multiply_rows(a.reshape(-1), b.reshape(-1), out.reshape(-1), step, self._constants)
        return out

    def add(self, a: Words, b: Words) -> Words:
        """Return a + b mod n row by row; `b` has as many rows or one. Both may be reduced in place."""
        out = self.empty(len(a))
        step = 0 if len(b) == 1 else 1
        kernels.add_rows(a.reshape(-1), b.reshape(-1), out.reshape(-1), step, self._constants)
        return out

    def power(self, bases: Words, exponent: int) -> Words:
        """Raise every row to one non-negative exponent; Montgomery working forms."""
        windows = -(-exponent.bit_length() // 4)
        digits = np.array([exponent >> (4 * i) & 15 for i in range(windows - 1, -1, -1)], np.uint8)
        out = self.empty(len(bases))
        kernels.power_rows(bases.reshape(-1), out.reshape(-1), digits, self.one, self._constants)
        return out

    def segment_products(self, packed: Words, index: Int32s, starts: Integers, out: Words) -> None:
        """Write to `out`, packed (segments, words), the product of packed[index[starts[s]:starts[s + 1]]] for each s.

        `packed` (items, words) are Montgomery forms, perhaps read-only and unaligned, in C order. No segment may be
        empty.
        """
        kernels.segment_products(_raw(packed), index, starts, out.reshape(-1), self.one, self._constants)

    def horner(self, packed: Words, starts: Integers, bits: int, factors: Words) -> Words:
        """Compress groups of numbers: factor * prod_j x_j^{2^{bits (last - j)}} per group, packed (groups, words).

        Group r is packed[starts[r]:starts[r + 1]], Montgomery forms, never empty; `bits` is the distance of
        neighbouring plaintexts; `factors` (groups, width) are working Montgomery forms.
        """
        out = np.empty((len(starts) - 1, self.words), np.uint64)
        args = (starts, bits, factors.reshape(-1), out.reshape(-1), self.one, self._constants)
        kernels.horner_rows(_raw(packed), *args)
        return out

    def bucket_products(self, bases: Words, exponents: Words, pairs: Integers, bits: int, threads: int) -> Words:
        """Return prod_i bases[i, column]^{exponents[i, kind]} of each pair (column, kind), (pairs, width) (Pippenger).

        `bases` (rows, columns, width) are Montgomery working forms, as are the products; `exponents` (rows, kinds) are
        below 2^bits, of at most 63 bits.
        """
        # the window with fewest products: each costs one per row and two per bucket
        window = min(range(1, 11), key=lambda w: -(-bits // w) * (len(bases) + 2 * 2**w))
        out = self.empty(len(pairs))
        given = (bases.reshape(len(bases), -1), np.ascontiguousarray(exponents), np.ascontiguousarray(pairs))

        def work(part: slice) -> None:
            kernels.bucket_rows(*given, bits, window, part.start, part.stop, out.reshape(-1), self.one, self._constants)

        concurrently(work, pieces(len(pairs), 2), threads)
        return out

    def are_units(self, packed: Words, threads: int) -> bool:
        """Return whether every packed number is at least 1, below n and prime to n."""
        if not self.in_range(packed):
            return False
        # a product is a unit iff each factor is; some products, for threads
        starts = np.linspace(0, len(packed), min(len(packed), GROUP * threads) + 1).astype(np.int64)
        index = np.arange(len(packed), dtype=np.int32)
        products = np.empty((len(starts) - 1, self.words), np.uint64)

        def work(part: slice) -> None:
            self.segment_products(packed, index, starts[part.start : part.stop + 1], products[part])

        concurrently(work, pieces(len(products), GROUP), threads)
        return all(gmpy2.gcd(product, self.value) == 1 for product in from_words(products))

    def in_range(self, packed: Words) -> bool:
        """Return whether every packed number is at least 1 and below n."""
        return bool(kernels.all_in_range(_raw(packed), len(packed), self._constants))


class FixedBases:
    """Products of powers of bases from a table: one product per `window` bits of the exponents (Brickell et al.).

    `bases` (k, width) are Montgomery working forms; each takes `windows` windows of an exponent, the first the lowest.
    Which entries are read shows in the cache, so a hostile program on the same machine could learn exponents.

    References: Brickell, Gordon, McCurley, Wilson, Fast Exponentiation with Precomputation, EUROCRYPT 1992.
    """

    def __init__(self, modulus: Modulus, bases: Words, windows: int, window: int) -> None:
        self._modulus, self._window = modulus, window
        entries = 1 << window
        self._table = aligned(len(bases) * windows * entries * modulus.width)
        for base, table in zip(bases, self._table.reshape(len(bases), -1), strict=True):
            kernels.fixed_base_table(base.copy(), table, entries, modulus.one, modulus._constants)

    def power(self, exponents: Words) -> Words:
        """Return the product of powers of each row, uint64 (rows, limbs) little-endian; working Montgomery forms."""
        out = self._modulus.empty(len(exponents))
        flat = np.ascontiguousarray(exponents).reshape(-1)
        kernels.fixed_base_rows(self._table, flat, self._window, out.reshape(-1), self._modulus._constants)
        return out


class FixedBase(FixedBases):
    """Powers of one base, an integer, to exponents of at most `exponent_bits`."""

    def __init__(self, modulus: Modulus, base: int, exponent_bits: int, window: int) -> None:
        super().__init__(modulus, modulus.montgomery([base]), -(-exponent_bits // window), window)


def aligned(words: int, zeroed: bool = False) -> Words:
    """Return a uint64 array, by default uninitialised, that starts on a cache line."""
    raw = (np.zeros if zeroed else np.empty)(words * 8 + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + words * 8].view(np.uint64)


def _raw(packed: Words) -> NDArray[np.uint8]:
    # bytes, read-only: one type for kernels, whatever alignment and access the array has
    raw: NDArray[Any] = packed.view(np.uint8).reshape(-1)
    raw.flags.writeable = False
    return raw


class Residues:
    """A divisor d of a composite modulus N, coprime to N / d, which the owner of a key knows.

    `modulus` is the arithmetic modulo d. Packed Montgomery forms modulo N pass to Montgomery forms modulo d, and back.
    """

    def __init__(self, whole: Modulus, divisor: int) -> None:
        self.modulus = own = Modulus(divisor)
        self._whole = whole
        # numbers modulo coprime d_1 d_2 = N are joined as x = x_1 E_1 + x_2 E_2 with E_1 = 1 mod d_1, 0 mod d_2
        rest = whole.value // divisor
        idempotent = rest * pow(rest, -1, divisor)
        # lifted numbers have d's own radix, and a product modulo N divides by N's once
        self._join = whole.montgomery([idempotent * pow(own.radix, -1, divisor) * whole.radix])
        # x R mod N is read in pieces of as many words as d has, whose weights also exchange the radix
        parts = -(-whole.words // own.words)
        exchange = pow(whole.radix, -1, divisor) * own.radix
        self._weights = [own.montgomery([(exchange << (64 * own.words * i)) % divisor]) for i in range(parts)]

    def reduce(self, packed: Words) -> Words:
        """Convert packed Montgomery forms modulo N, uint64 (rows, words of N), to working ones modulo d."""
        own, length = self.modulus, self.modulus.words
        total = own.working([0] * len(packed))
        for i, weight in enumerate(self._weights):
            part = np.ascontiguousarray(packed[:, length * i : length * (i + 1)])
            total = own.add(total, own.multiply(own.unpack(part), weight))
        return total

    def lift(self, rows: Words) -> Words:
        """Convert working Montgomery forms modulo d to those modulo N of x mod d, 0 mod N / d."""
        return self._whole.multiply(self._whole.adopt(rows, self.modulus), self._join)


class PrimeSquare:
    """The part p^2 of a modulus N, where Okamoto-Uchiyama and Paillier have messages: c mod p^2 = (1 + f m p) w^r.

    f = `factor` is prime to p; `base` is w, of an order that divides `exponent`, e, which is prime to p; `order_bits`
    is the length of the longest r; `window` as of `FixedBase`.
    """

    def __init__(
        self, whole: Modulus, prime: int, *, factor: int, base: int, order_bits: int, exponent: int, window: int
    ) -> None:
        self.residues = Residues(whole, prime * prime)
        own = self.residues.modulus
        self._prime, self._exponent = prime, exponent
        self._powers = FixedBase(own, base % own.value, order_bits, window)
        self._factor = own.montgomery([factor * prime * own.radix])
        self._to_message = int(gmpy2.invert(factor * exponent, prime))

    def encrypt(self, messages: Words, exponents: Words) -> Words:
        """Return (1 + f m p) w^r lifted to N, from little-endian words of m, below R, and r, below 2^order_bits."""
        own = self.residues.modulus
        scaled = own.multiply(own.unpack(messages[:, : own.words]), self._factor)
        linear = own.add(scaled, own.one[np.newaxis].copy())
        return self.residues.lift(own.multiply(self._powers.power(exponents), linear))

    def decrypt(self, ciphertexts: Words) -> list[int]:
        """Return messages modulo p of packed Montgomery forms modulo N; CryptoError if something is no ciphertext."""
        own, p = self.residues.modulus, gmpy2.mpz(self._prime)
        # c^e = 1 + e f m p modulo p^2, as the order of w divides e
        powers = own.power(self.residues.reduce(ciphertexts), self._exponent)
        messages = []
        # a product with 1 takes numbers out of Montgomery form
        for x in from_words(own.pack(own.multiply(powers, own.working([1])))):
            quotient, rest = gmpy2.f_divmod(x - 1, p)
            if rest:
                raise CryptoError("cannot decrypt: a number is no ciphertext under this key - at decryption")
            messages.append(int(quotient * self._to_message % p))
        return messages
