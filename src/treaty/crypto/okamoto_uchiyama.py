"""The Okamoto-Uchiyama cipher with small subgroups, on many numbers at once.

    n = p^2 q,   c = g^m h^r mod n,   c^u mod p^2 = 1 + a m u p      (m < 2^{|n|/3 - 2})

The product of ciphertexts encrypts the sum of the messages. u and v are 256-bit primes with u | p - 1 and
v | q - 1; h has order u v; g mod p^2 = (1 + p)^a w, where w has order u, and g mod q lies in <h mod q>.
g = 1 + p would do for decryption, but then gcd(g - 1, n) = p: the factor w hides p in the public key.

* *Assumptions.* Factoring n = p^2 q is hard, and so are discrete logarithms and membership in the subgroup of
  order u v (Coron, Naccache, Paillier), knowing g, h. Chosen plaintexts only: whoever decrypts chosen
  ciphertexts for an adversary gives the key away, so decrypted values are used and never sent back.
* *Who learns what.* From the public key and ciphertexts: nothing about messages. The key's owner learns the
  message *and* works modulo p and q apart, so a returned ciphertext shows it which of its own ciphertexts
  were multiplied, unless it is re-randomised by h^r with r as long as the order of h plus 80 bits.
* *Key-owner encryption* computes c mod p^2 = (1 + a m p) h^{r_u} and c mod q = h^{r_v} from tables, with
  r_u, r_v exactly uniform modulo u and v: then c is distributed as g^m h^r with r uniform modulo u v. c mod q
  must stay in <h mod q>; uniform in all of Z_q* it could not be hidden by any h^r.

Ciphertexts are *packed Montgomery forms* modulo n (see `montgomery`), so that the receiver multiplies them as
they come. Time does not depend on messages, but table look-ups with secret indices show in the cache.

References
----------
Okamoto and Uchiyama, A New Public-Key Cryptosystem as Secure as Factoring, EUROCRYPT 1998.
Coron, Naccache, Paillier, Accelerating Okamoto-Uchiyama Public-Key Cryptosystem, Electronics Letters 35, 1999.
"""

from __future__ import annotations

from collections.abc import Sequence

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.compute import concurrently, pieces
from treaty.crypto import parameters
from treaty.crypto.keystream import Keystream
from treaty.crypto.montgomery import FixedBase, Modulus, from_words, to_words
from treaty.errors import CryptoError

Words = NDArray[np.uint64]

_OWNER_WINDOW = 9  # bits per table look-up; larger tables fall out of the second-level cache
_RANDOMISER_WINDOW = 6
_CHUNK = 256  # rows a thread takes at a time: working arrays stay in the cache


class PublicKey:
    """A public key, checked as far as one without the factors can.

    Parameters
    ----------
    n, g, h : int
        Modulus and bases.
    subgroup_bits : int
        2 * 256 when the owner states that h has order u v below 2^512, else 0 (order unknown).
    insecure_test_key_bits : int, optional
        Accept moduli of at least this size. Tests only.

    Attributes
    ----------
    plaintext_bits : int
        P = |n| // 3; messages are below 2^{P - 2}.
    randomness_bits : int
        Length of the exponent r that hides a ciphertext from the key's owner too.
    modulus : Modulus
        Arithmetic modulo n.

    Raises
    ------
    CryptoError
        When the key is too short or not well formed.
    """

    def __init__(
        self, n: int, g: int, h: int, subgroup_bits: int, *, insecure_test_key_bits: int | None = None
    ) -> None:
        check_key_size(n.bit_length(), insecure_test_key_bits)
        full = 2 * parameters.OU_SUBGROUP_PRIME_BITS
        if subgroup_bits not in (0, full) and insecure_test_key_bits is None:
            raise CryptoError(f"expected subgroup_bits 0 or {full}, got {subgroup_bits} - in the public key")
        if n % 2 == 0 or gmpy2.gcd(n, gmpy2.primorial(parameters.SMALL_FACTOR_BOUND)) != 1:
            raise CryptoError("expected a modulus without small factors - in the public key")
        if gmpy2.is_prime(n) or gmpy2.is_power(n):
            raise CryptoError("expected a modulus of the form p^2 q - in the public key")
        for name, base in (("g", g), ("h", h)):
            if not 1 < base < n or gmpy2.gcd(base, n) != 1 or gmpy2.gcd(base - 1, n) != 1:
                raise CryptoError(f"expected 1 < {name} < n, {name} and {name} - 1 coprime to n - in the public key")
        self.n, self.g, self.h, self.subgroup_bits = n, g, h, subgroup_bits
        self.plaintext_bits = n.bit_length() // 3
        order_bits = subgroup_bits or -(-2 * n.bit_length() // 3)
        self.randomness_bits = order_bits + parameters.STATISTICAL_BITS
        self.modulus = Modulus(n)

    def encrypt(self, values: Sequence[int], keystream: Keystream | None = None) -> Words:
        """Encrypt with the public key alone, c = g^m h^r (slow; the owner's `PrivateKey.encrypt` is fast).

        Parameters
        ----------
        values : sequence of int
            |value| < 2^{plaintext_bits - 2}; a negative value x is encoded as n + x.
        keystream : Keystream, optional
            Source of r; a fresh one when left out.

        Returns
        -------
        ndarray of uint64, shape (len(values), words)
            Packed Montgomery forms.

        Raises
        ------
        CryptoError
            When a value is too large.
        """
        if any(abs(x) >> (self.plaintext_bits - 2) for x in values):
            raise CryptoError(f"expected values below 2^{self.plaintext_bits - 2} in size - lower fractional_bits")
        exponents = from_words((keystream or Keystream()).bits(self.randomness_bits, len(values)))
        n = self.n
        ciphertexts = [
            int(gmpy2.powmod(self.g, x % n, n) * gmpy2.powmod(self.h, r, n) % n)
            for x, r in zip(values, exponents, strict=True)
        ]
        return self.modulus.pack(self.modulus.montgomery(ciphertexts))


class Randomiser:
    """Fresh encryptions of zero, h^r, that hide a product of ciphertexts from the key's owner.

    Parameters
    ----------
    key : PublicKey
        The owner's key.
    """

    def __init__(self, key: PublicKey) -> None:
        self._bits = key.randomness_bits
        self._powers = FixedBase(key.modulus, key.h, self._bits, _RANDOMISER_WINDOW)

    def exponents(self, rows: int) -> Words:
        """Uniform exponents r below 2^randomness_bits, uint64 (rows, limbs), from a fresh keystream."""
        return Keystream().bits(self._bits, rows)

    def factors(self, exponents: Words) -> Words:
        """h^r for each exponent: working Montgomery forms."""
        return self._powers.power(exponents)


class PrivateKey:
    """Key of the owner: encrypts by the factors, decrypts.

    Parameters
    ----------
    p, q : int
        Primes with n = p^2 q.
    u, v : int
        Primes dividing p - 1 and q - 1: orders of h modulo p^2 and q.
    a : int
        Exponent in g mod p^2 = (1 + p)^a w.
    public : PublicKey
        The key to give away.
    """

    def __init__(self, p: int, q: int, u: int, v: int, a: int, public: PublicKey) -> None:
        self.public = public
        self._p, self._u, self._v = p, u, v
        p2, n = p * p, public.modulus
        self._mod_p2, self._mod_q = Modulus(p2), Modulus(q)
        self._powers_p = FixedBase(self._mod_p2, public.h % p2, u.bit_length(), _OWNER_WINDOW)
        self._powers_q = FixedBase(self._mod_q, public.h % q, v.bit_length(), _OWNER_WINDOW)
        self._message_factor = self._mod_p2.montgomery([a * p])
        self._plain_one = self._mod_p2.working([1])
        # The two halves meet in c = c_p E_p + c_q E_q with E_p = 1 mod p^2, 0 mod q, and E_q the other way. The
        # half modulo q comes with its own radix R_q, and products here divide by R once.
        idempotent_p = q * pow(q, -1, p2)
        idempotent_q = p2 * pow(p2, -1, q) * pow(self._mod_q.radix, -1, n.value)
        self._join_p = n.montgomery([idempotent_p * n.radix])
        self._join_q = n.montgomery([idempotent_q * n.radix])
        # c R mod n arrives in pieces of as many words as p^2 has; each one's weight also takes R away.
        parts = -(-n.words // self._mod_p2.words)
        away = pow(n.radix, -1, p2) * self._mod_p2.radix
        self._weights = [self._mod_p2.montgomery([(away << (64 * self._mod_p2.words * i)) % p2]) for i in range(parts)]
        self._to_message = int(gmpy2.invert(a * u, p))

    def encrypt(self, messages: Words, threads: int, keystream: Keystream | None = None) -> Words:
        """Encrypt non-negative numbers by the factors of n.

        Parameters
        ----------
        messages : ndarray of uint64, shape (rows, limbs)
            Little-endian words, each number below 2^{plaintext_bits - 2}.
        threads : int
            Threads to use.
        keystream : Keystream, optional
            Source of r_u, r_v; a fresh one when left out.

        Returns
        -------
        ndarray of uint64, shape (rows, words)
            Packed Montgomery forms.

        Raises
        ------
        CryptoError
            When a message is too large.
        """
        if not _below_power(messages, self.public.plaintext_bits - 2):
            raise CryptoError(f"expected messages below 2^{self.public.plaintext_bits - 2} - lower fractional_bits")
        messages = messages[:, : self._mod_p2.words]
        keystream = keystream or Keystream()
        n, mod_p2, mod_q = self.public.modulus, self._mod_p2, self._mod_q
        exponents_p = keystream.below(self._u, len(messages))
        exponents_q = keystream.below(self._v, len(messages))
        out = np.empty((len(messages), n.words), np.uint64)

        def chunk(rows: slice) -> None:
            linear = mod_p2.add(
                mod_p2.multiply(mod_p2.unpack(messages[rows]), self._message_factor), self._plain_one.copy()
            )
            half_p = mod_p2.multiply(self._powers_p.power(exponents_p[rows]), linear)
            half_q = self._powers_q.power(exponents_q[rows])
            joined_p = n.multiply(n.adopt(half_p, mod_p2), self._join_p)
            joined_q = n.multiply(n.adopt(half_q, mod_q), self._join_q)
            out[rows] = n.pack(n.add(joined_p, joined_q))

        concurrently(chunk, pieces(len(messages), _CHUNK), threads)
        return out

    def decrypt(self, ciphertexts: Words, threads: int) -> Words:
        """Decrypt to numbers modulo p.

        Parameters
        ----------
        ciphertexts : ndarray of uint64, shape (rows, words)
            Packed Montgomery forms, below n.
        threads : int
            Threads to use.

        Returns
        -------
        ndarray of uint64, shape (rows, limbs)
            Little-endian words.

        Raises
        ------
        CryptoError
            When something is not a ciphertext of this key.
        """
        results = concurrently(lambda rows: self._decrypt(ciphertexts[rows]), pieces(len(ciphertexts), 32), threads)
        return to_words([m for part in results for m in part], -(-self._p.bit_length() // 64))

    def decrypt_signed(self, ciphertexts: Words, threads: int = 1) -> list[int]:
        """Decrypt to integers, those above p / 2 standing for negative ones; otherwise as `decrypt`."""
        return [m - self._p if 2 * m > self._p else m for m in from_words(self.decrypt(ciphertexts, threads))]

    def _decrypt(self, ciphertexts: Words) -> list[int]:
        mod_p2, length = self._mod_p2, self._mod_p2.words
        total = mod_p2.working([0] * len(ciphertexts))
        for i, weight in enumerate(self._weights):
            part = np.ascontiguousarray(ciphertexts[:, length * i : length * (i + 1)])
            total = mod_p2.add(total, mod_p2.multiply(mod_p2.unpack(part), weight))
        powers = mod_p2.multiply(mod_p2.power(total, self._u), self._plain_one)
        p, messages = gmpy2.mpz(self._p), []
        for x in from_words(mod_p2.pack(powers)):
            quotient, rest = gmpy2.f_divmod(x - 1, p)
            if rest:
                raise CryptoError("expected a ciphertext under this key, got something else - at decryption")
            messages.append(int(quotient * self._to_message % p))
        return messages


def check_key_size(bits: int, insecure_test_key_bits: int | None) -> None:
    """Raise CryptoError unless `bits` is an accepted size of n, or at least that of the test key."""
    if insecure_test_key_bits is not None:
        if bits < max(insecure_test_key_bits, 96):
            raise CryptoError(f"expected a key of at least {max(insecure_test_key_bits, 96)} bits, got {bits}")
    elif bits not in parameters.OU_KEY_BITS:
        raise CryptoError(f"expected a key of {parameters.OU_KEY_BITS} bits, got {bits}")


def _below_power(rows: Words, bits: int) -> bool:
    """Whether every number, uint64 (rows, limbs) little-endian, is below 2^bits."""
    word, rest = divmod(bits, 64)
    if word >= rows.shape[1]:
        return True
    return not (rows[:, word + 1 :].any() or (rows[:, word] >> np.uint64(rest)).any())
