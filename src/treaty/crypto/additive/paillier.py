"""The Paillier cipher with a fixed base for randomness, on many numbers at once.

    n = p q,   c = (1 + n m) w^r mod n^2,   w = h^n mod n^2,   h = x^2 mod n for a random x

The product of ciphertexts encrypts the sum of the messages, m < 2^{|n| - 2}. As in Damgard, Jurik and Nielsen, h is
fixed, so that w^r comes from a table; unlike there, h is a square, not the negative of one, and r is not cut to half
the length of n. p - 1 = 2 u k and q - 1 = 2 v l with four distinct primes, so that the owner can make sure that h
generates all squares, a cyclic group of order (p - 1)(q - 1) / 4.

* *Assumption.* Decisional composite residuosity: with r uniform modulo the order of h, w^r is a uniform n-th
  power among the squares, and no assumption on short exponents or subgroups is needed. Chosen plaintexts only.
* *Who learns what.* From the public key and ciphertexts: nothing about messages. The key's owner learns the message
  *and* the randomness, (c (1 + n m)^{-1})^{1/n} mod n, so a returned ciphertext shows it which of its own ciphertexts
  were multiplied, unless it is re-randomised by w^r with r of |n| + 80 bits.
* *Key-owner encryption* works modulo p^2 and q^2 from tables, with r_p, r_q exactly uniform modulo the coprime
  (p - 1) / 2 and (q - 1) / 2: then w^r is distributed as with r uniform modulo their product. Randomness outside <h>
  could not be hidden by any w^r.

Ciphertexts are *packed Montgomery forms* modulo n^2 (see `montgomery`), so that the receiver multiplies them as
received. Time does not depend on messages, but table look-ups with secret indices show in the cache.

References: Paillier, Public-Key Cryptosystems Based on Composite Degree Residuosity Classes, EUROCRYPT 1999. Damgard,
Jurik, Nielsen, A Generalization of Paillier's Public-Key System with Applications to Electronic Voting, International
Journal of Information Security 9, 2010, section 4.2 (fixed base).
"""

from __future__ import annotations

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.compute import concurrently, pieces
from treaty.crypto import parameters
from treaty.crypto.additive.key_checks import check_base, check_messages, check_modulus, check_order
from treaty.crypto.additive.montgomery import Modulus, from_words, to_words
from treaty.crypto.additive.residues import PrimeSquare
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import Payload, check_payload
from treaty.errors import CryptoError

Words = NDArray[np.uint64]

_OWNER_WINDOW = 8  # bits per table look-up
_CHUNK = 128  # rows a thread encrypts at a time: working arrays stay in the cache
_DECRYPTED_AT_A_TIME = 32


class PublicKey:
    """A public key, checked as far as possible without the factors; CryptoError if too short or not well formed.

    Messages are below 2^{plaintext_bits - 2}; `randomness_bits` is the length of an exponent r that hides a ciphertext
    from the key's owner too; `randomiser_base` is w = h^n mod n^2, computed here so that it is an n-th power for
    certain.
    """

    def __init__(self, n: int, h: int, *, insecure_test_key_bits: int | None = None) -> None:
        check_modulus(n, insecure_test_key_bits)
        check_base("h", h, n)
        if gmpy2.gcd(h + 1, n) != 1 or gmpy2.jacobi(h, n) != 1:
            raise CryptoError("expected h to be a square, h + 1 coprime to n - in the public key")
        check_order("h", h, n)
        self.n, self.h = n, h
        self.plaintext_bits = n.bit_length()
        self.randomness_bits = n.bit_length() + parameters.STATISTICAL_BITS
        self.modulus = Modulus(n * n)
        self.randomiser_base = int(gmpy2.powmod(h, n, n * n))

    @classmethod
    def from_payload(cls, payload: Payload, insecure_test_key_bits: int | None = None) -> PublicKey:
        """Read a key from uint64 (2, words) n, h and int64 (0,); CryptoError as the constructor."""
        check_payload(payload, "the public key", (np.uint64, (2, None)), (np.int64, (0,)))
        n, h = from_words(payload[0])
        return cls(n, h, insecure_test_key_bits=insecure_test_key_bits)

    def to_payload(self) -> Payload:
        """Return what `from_payload` reads."""
        return [to_words([self.n, self.h], -(-self.n.bit_length() // 64)), np.empty(0, np.int64)]


class PrivateKey:
    """The owner's key: primes p, q with n = p q; (p - 1) / 2 and (q - 1) / 2 odd and coprime, h of order their product.

    k and l are the smaller primes in p - 1 = 2 u k and q - 1 = 2 v l, by which an auditor verifies that order.
    """

    def __init__(self, p: int, q: int, k: int, l: int, public: PublicKey) -> None:
        self.public = public
        self._p, self._q, self._k, self._l = p, q, k, l
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

    def unhidden(self, ciphertexts: Words, threads: int) -> NDArray[np.bool_]:
        """Tell which ciphertexts re-randomisation does not hide, as an auditor who is shown the factors: bool (rows,).

        True where the ciphertext is not (1 + n m) w^r for any m and r. w^r covers the n-th powers of squares; outside
        of that an owner may mark its rows, or publish an h that generates less, and recognise the marks in every
        answer. CryptoError if the factors are not what the class says, or h does not generate all squares.
        """
        p, q, w = self._p, self._q, self.public.randomiser_base
        orders = [(prime, x) for prime, k in ((p, self._k), (q, self._l)) for x in (k, (prime - 1) // (2 * k))]
        factors = [x for _, x in orders]
        primes = len(set(factors)) == 4 and all(
            gmpy2.is_prime(x, parameters.PRIMALITY_ROUNDS) for x in (p, q, *factors)
        )
        whole = (2 * factors[0] * factors[1] + 1, 2 * factors[2] * factors[3] + 1) == (p, q) and p * q == self.public.n
        if not primes or not whole:
            raise CryptoError("expected primes with n = p q, p = 2 u k + 1, q = 2 v l + 1 - in the private key")
        # w is h^n: its order modulo p^2 is the one modulo p, and lacks a prime x if its power (p - 1) / (2 x) is 1
        lacking = any(gmpy2.powmod(w, (prime - 1) // (2 * x), prime) == 1 for prime, x in orders)
        if lacking or gmpy2.jacobi(w, p) != 1 or gmpy2.jacobi(w, q) != 1:
            raise CryptoError("expected h to generate all squares, got one of smaller order - in the private key")

        def part(rows: slice) -> NDArray[np.bool_]:
            hidden_p = self._square_p.order_divides(ciphertexts[rows], (p - 1) // 2)
            return hidden_p & self._square_q.order_divides(ciphertexts[rows], (q - 1) // 2)

        hidden = concurrently(part, pieces(len(ciphertexts), _DECRYPTED_AT_A_TIME), threads)
        return ~np.concatenate([np.empty(0, np.bool_), *hidden])

    def _decrypt(self, ciphertexts: Words) -> list[int]:
        """Join the messages modulo p and q (Garner)."""
        halves = zip(self._square_p.decrypt(ciphertexts), self._square_q.decrypt(ciphertexts), strict=True)
        return [m_q + self._q * ((m_p - m_q) * self._q_inverse % self._p) for m_p, m_q in halves]
