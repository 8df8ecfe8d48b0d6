"""The Paillier cipher with a fixed base for randomness, on many numbers at once.

    n = p q,   c = (1 + n m) w^r mod n^2,   w = h^n mod n^2,   h = x^2 mod n for a random x

The product of ciphertexts encrypts the sum of the messages, m < 2^{|n| - 2}. As in Damgard, Jurik and Nielsen, h is
fixed, so that w^r comes from a table; unlike there, h is a square, not the negative of one, and r is not cut to half
the length of n. p - 1 = 2 u k and q - 1 = 2 v l with four distinct primes, so that the owner can make sure that h
generates all squares, a cyclic group of order (p - 1)(q - 1) / 4. Others have only its word for that.

* *Assumption.* Decisional composite residuosity: with r uniform modulo the order of h, w^r is a uniform n-th
  power among the squares, and no assumption on short exponents or subgroups is needed. Chosen plaintexts only.
* *Who learns what.* From the public key and ciphertexts: nothing about messages. The key's owner learns the message
  *and* the randomness, (c (1 + n m)^{-1})^{1/n} mod n, so a returned ciphertext shows it which of its own ciphertexts
  were multiplied, unless it is multiplied by a random n-th power (`randomiser`): w^r hides nothing that an owner put
  outside of what its h generates.
* *Key-owner encryption* works modulo p^2 and q^2 from tables, with r_p, r_q exactly uniform modulo the coprime
  (p - 1) / 2 and (q - 1) / 2: then w^r is distributed as with r uniform modulo their product.

Ciphertexts are *packed Montgomery forms* modulo n^2 (see `montgomery`), so that the receiver multiplies them as
received. Time does not depend on messages, but table look-ups with secret indices show in the cache.

References: Paillier, Public-Key Cryptosystems Based on Composite Degree Residuosity Classes, EUROCRYPT 1999. Damgard,
Jurik, Nielsen, A Generalization of Paillier's Public-Key System with Applications to Electronic Voting, International
Journal of Information Security 9, 2010, section 4.2 (fixed base).
"""

from __future__ import annotations

from collections.abc import Sequence

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.crypto.additive.key_proofs import (
    PAILLIER_NUMBERS,
    check_base,
    check_messages,
    check_modulus,
    check_order,
    check_paillier,
)
from treaty.crypto.additive.montgomery import Modulus, PrimeSquare, from_words, to_words
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import Payload, check_payload
from treaty.errors import CryptoError
from treaty.machine.arrays import pieces
from treaty.machine.process import concurrently

Words = NDArray[np.uint64]

_OWNER_WINDOW = 8  # bits per table look-up
_CHUNK = 128  # rows a thread encrypts at a time: working arrays stay in the cache
_DECRYPTED_AT_A_TIME = 32


class PublicKey:
    """A public key, checked as far as possible without the factors; CryptoError if too short or not well formed.

    Messages are below 2^{plaintext_bits - 2}; `randomness_bits` is the length of an exponent r with which w^r hides a
    message from others than the owner; `randomiser_base` is w = h^n mod n^2, computed here so that it is an n-th power
    for certain. `proof` is the owner's of `key_proofs`, which `from_payload` checks.
    """

    def __init__(self, n: int, h: int, proof: Sequence[int] = (), *, insecure_test_key_bits: int | None = None) -> None:
        check_modulus(n, insecure_test_key_bits)
        check_base("h", h, n)
        if gmpy2.gcd(h + 1, n) != 1 or gmpy2.jacobi(h, n) != 1:
            raise CryptoError("expected h to be a square, h + 1 coprime to n - in the public key")
        check_order("h", h, n)
        self.n, self.h, self._proof = n, h, list(proof)
        self.plaintext_bits = n.bit_length()
        self.randomness_bits = n.bit_length() + parameters.STATISTICAL_BITS
        self.modulus = Modulus(n * n)
        self.randomiser_base = int(gmpy2.powmod(h, n, n * n))

    @classmethod
    def from_payload(cls, payload: Payload, insecure_test_key_bits: int | None = None) -> PublicKey:
        """Read a key from uint64 (numbers, words) n, h and its proof, and int64 (0,).

        CryptoError as the constructor, or if the proof does not hold.
        """
        check_payload(payload, "the public key", (np.uint64, (2 + PAILLIER_NUMBERS, None)), (np.int64, (0,)))
        n, h, *proof = from_words(payload[0])
        key = cls(n, h, proof, insecure_test_key_bits=insecure_test_key_bits)
        check_paillier(n, h, proof)
        return key

    def to_payload(self) -> Payload:
        return [to_words([self.n, self.h, *self._proof], -(-self.n.bit_length() // 64)), np.empty(0, np.int64)]


class PrivateKey:
    """The owner's key: primes p, q with n = p q; (p - 1) / 2, (q - 1) / 2 odd, coprime, h of order their product."""

    def __init__(self, p: int, q: int, public: PublicKey) -> None:
        self.public = public
        self._p, self._q = p, q
        self.secret_numbers = (p, q)  # what an auditor is shown
        self._square_p, self._square_q = (
            PrimeSquare(
                public.modulus,
                prime,
                factor=other,  # 1 + n m = 1 + q m p
                base=public.randomiser_base,
                order_bits=prime.bit_length() - 1,
                exponent=prime - 1,  # not half of it: other programs' randomness need not be a square
                window=_OWNER_WINDOW,
            )
            for prime, other in ((p, q), (q, p))
        )
        self._q_inverse = pow(q, -1, p)

    def encrypt(self, messages: Words, threads: int, keystream: Keystream | None = None) -> Words:
        """Encrypt numbers below 2^{plaintext_bits - 2}, little-endian words (rows, limbs), by the factors of n."""
        check_messages(messages, self.public.plaintext_bits)
        keystream, n2 = keystream or Keystream(), self.public.modulus
        exponents_p = keystream.below((self._p - 1) // 2, len(messages))
        exponents_q = keystream.below((self._q - 1) // 2, len(messages))
        out = np.empty((len(messages), n2.words), np.uint64)

        def chunk(rows: slice) -> None:
            part_p = self._square_p.encrypt(messages[rows], exponents_p[rows])
            part_q = self._square_q.encrypt(messages[rows], exponents_q[rows])
            out[rows] = n2.pack(n2.add(part_p, part_q))

        concurrently(chunk, pieces(len(messages), _CHUNK), threads)
        return out

    def decrypt(self, ciphertexts: Words, threads: int) -> Words:
        """Decrypt packed Montgomery forms below n^2 to numbers modulo n, little-endian words (rows, limbs).

        CryptoError if something is not a ciphertext of this key.
        """
        parts = pieces(len(ciphertexts), _DECRYPTED_AT_A_TIME)
        results = concurrently(lambda rows: self._decrypt(ciphertexts[rows]), parts, threads)
        return to_words([m for part in results for m in part], -(-self.public.n.bit_length() // 64))

    def _decrypt(self, ciphertexts: Words) -> list[int]:
        """Join the messages modulo p and q (Garner)."""
        halves = zip(self._square_p.decrypt(ciphertexts), self._square_q.decrypt(ciphertexts), strict=True)
        return [m_q + self._q * ((m_p - m_q) * self._q_inverse % self._p) for m_p, m_q in halves]
