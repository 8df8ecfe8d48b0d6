"""Arithmetic modulo a part of a composite modulus N, for the owner of a key who knows the parts.

`Residues` passes packed Montgomery forms modulo N to Montgomery forms modulo a divisor d, and back: numbers modulo
coprime d_1 d_2 = N meet in x = x_1 E_1 + x_2 E_2 with E_1 = 1 mod d_1, 0 mod d_2, and E_2 the other way. `PrimeSquare`
is the divisor p^2 in which Okamoto-Uchiyama and Paillier keep messages: c mod p^2 = (1 + f m p) w^r, where the order of
w divides the secret exponent e, and so c^e = 1 + e f m p.

References: Okamoto and Uchiyama, A New Public-Key Cryptosystem as Secure as Factoring, EUROCRYPT 1998, section 3.
Paillier, Public-Key Cryptosystems Based on Composite Degree Residuosity Classes, EUROCRYPT 1999, section 7.
"""

from __future__ import annotations

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.montgomery import FixedBase, Modulus, from_words
from treaty.errors import CryptoError

Words = NDArray[np.uint64]


class Residues:
    """A divisor d of a modulus N, coprime to N / d; `modulus` is the arithmetic modulo d."""

    def __init__(self, whole: Modulus, divisor: int) -> None:
        self.modulus = own = Modulus(divisor)
        self._whole = whole
        rest = whole.value // divisor
        idempotent = rest * pow(rest, -1, divisor)
        # Lifted numbers come with d's own radix, and a product modulo N divides by N's once.
        self._join = whole.montgomery([idempotent * pow(own.radix, -1, divisor) * whole.radix])
        # x R mod N arrives in pieces of as many words as d has; each one's weight also exchanges the radix.
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
    """The part p^2 of a modulus N, where messages are: c mod p^2 = (1 + f m p) w^r, with f = `factor` prime to p.

    `base` is w, of an order that divides `exponent`, e, which is prime to p; `order_bits` is the length of the longest
    r; `window` as of `FixedBase`.
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
        powers = own.power(self.residues.reduce(ciphertexts), self._exponent)
        messages = []
        for x in from_words(own.pack(own.multiply(powers, own.working([1])))):
            quotient, rest = gmpy2.f_divmod(x - 1, p)
            if rest:
                raise CryptoError("expected a ciphertext under this key, got something else - at decryption")
            messages.append(int(quotient * self._to_message % p))
        return messages
