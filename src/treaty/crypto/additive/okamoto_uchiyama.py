"""The Okamoto-Uchiyama cipher with small subgroups, on many numbers at once.

    n = p^2 q,   c = g^m h^r mod n,   c^{p-1} mod p^2 = 1 + a m (p - 1) p      (m < 2^{|n|/3 - 2})

The product of ciphertexts encrypts the sum of the messages. u and v are 256-bit primes with u | p - 1 and v | q - 1; h
has order u v; g mod p^2 = (1 + p)^a w, where w has order u, and g mod q lies in <h mod q>. g = 1 + p would do for
decryption, but then gcd(g - 1, n) = p: the factor w hides p in the public key.

* *Assumptions.* Factoring n = p^2 q is hard, and so are discrete logarithms and membership in the subgroup of
  order u v (Coron, Naccache, Paillier), knowing g, h. Chosen plaintexts only: whoever decrypts chosen
  ciphertexts for an adversary gives the key away, so decrypted values are used and never sent back.
* *Who learns what.* From the public key and ciphertexts: nothing about messages. The key's owner learns the
  message *and* works modulo p and q apart, so a returned ciphertext shows it which of its own ciphertexts
  were multiplied, unless it is multiplied by a random n-th power (`randomiser`): h^r hides nothing from an owner who
  chose h, or marked its ciphertexts outside of what h generates.
* *Key-owner encryption* computes c mod p^2 = (1 + a m p) h^{r_u} and c mod q = h^{r_v} from tables, with
  r_u, r_v exactly uniform modulo u and v: then c is distributed as g^m h^r with r uniform modulo u v.

Ciphertexts are *packed Montgomery forms* modulo n (see `montgomery`), so that the receiver multiplies them as received.
Time does not depend on messages, but table look-ups with secret indices show in the cache.

References: Okamoto and Uchiyama, A New Public-Key Cryptosystem as Secure as Factoring, EUROCRYPT 1998. Coron, Naccache,
Paillier, Accelerating Okamoto-Uchiyama Public-Key Cryptosystem, Electronics Letters 35, 1999.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.crypto.additive.key_proofs import (
    OKAMOTO_UCHIYAMA_NUMBERS,
    check_base,
    check_messages,
    check_modulus,
    check_okamoto_uchiyama,
    check_order,
)
from treaty.crypto.additive.montgomery import FixedBase, Modulus, PrimeSquare, Residues, from_words, to_words
from treaty.crypto.additive.multiplier import HAS_IFMA
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import Payload, check_payload
from treaty.errors import CryptoError
from treaty.machine.arrays import pieces
from treaty.machine.process import concurrently

Words = NDArray[np.uint64]

# Bits per table look-up. Larger tables fall out of the second-level cache, which costs more than the products that they
# save where products are as fast as with IFMA.
_OWNER_WINDOW = 9 if HAS_IFMA else 11
_CHUNK = 256  # rows a thread encrypts at a time: working arrays stay in the cache
_DECRYPTED_AT_A_TIME = 32


class PublicKey:
    """A public key, checked as far as possible without the factors; CryptoError if too short or not well formed.

    `subgroup_bits` is 2 * 256 when the owner states that h has order u v below 2^512, else 0 (order unknown). Messages
    are below 2^{plaintext_bits - 2}; `randomness_bits` is the length of an exponent r with which h^r hides a message
    from others than the owner. `proof` is the owner's of `key_proofs`, which `from_payload` checks.
    """

    def __init__(
        self,
        n: int,
        g: int,
        h: int,
        subgroup_bits: int,
        proof: Sequence[int] = (),
        *,
        insecure_test_key_bits: int | None = None,
    ) -> None:
        check_modulus(n, insecure_test_key_bits)
        full = 2 * parameters.OU_SUBGROUP_PRIME_BITS
        if subgroup_bits not in (0, full) and insecure_test_key_bits is None:
            raise CryptoError(f"expected subgroup_bits 0 or {full}, got {subgroup_bits} - in the public key")
        check_base("g", g, n)
        check_base("h", h, n)
        check_order("h", h, n)
        self.n, self.g, self.h, self.subgroup_bits, self._proof = n, g, h, subgroup_bits, list(proof)
        self.plaintext_bits = n.bit_length() // 3
        order_bits = subgroup_bits or -(-2 * n.bit_length() // 3)
        self.randomness_bits = order_bits + parameters.STATISTICAL_BITS
        self.modulus = Modulus(n)

    @property
    def randomiser_base(self) -> int:
        """The base h of the randomness h^r."""
        return self.h

    @classmethod
    def from_payload(cls, payload: Payload, insecure_test_key_bits: int | None = None) -> PublicKey:
        """Read a key from uint64 (numbers, words) n, g, h and its proof, and int64 (1,) subgroup_bits.

        CryptoError as the constructor, or if the proof does not hold.
        """
        shape = (3 + OKAMOTO_UCHIYAMA_NUMBERS, None)
        check_payload(payload, "the public key", (np.uint64, shape), (np.int64, (1,)))
        n, g, h, *proof = from_words(payload[0])
        key = cls(n, g, h, int(payload[1][0]), proof, insecure_test_key_bits=insecure_test_key_bits)
        check_okamoto_uchiyama(n, g, h, proof)
        return key

    def to_payload(self) -> Payload:
        numbers = to_words([self.n, self.g, self.h, *self._proof], self.modulus.words)
        return [numbers, np.array([self.subgroup_bits], np.int64)]


class PrivateKey:
    """The owner's key: primes p, q with n = p^2 q; orders u, v of h modulo p^2 and q; a of g mod p^2 = (1 + p)^a w."""

    def __init__(self, p: int, q: int, u: int, v: int, a: int, public: PublicKey) -> None:
        self.public = public
        self._p, self._q, self._u, self._v = p, q, u, v
        self._square = PrimeSquare(
            public.modulus,
            p,
            factor=a,
            base=public.h,
            order_bits=u.bit_length(),
            exponent=p - 1,  # not u: others re-randomise by any n-th power
            window=_OWNER_WINDOW,
        )
        self._mod_q = Residues(public.modulus, q)
        self._powers_q = FixedBase(self._mod_q.modulus, public.h % q, v.bit_length(), _OWNER_WINDOW)
        self.secret_numbers = (p, q, u, v, a)  # what an auditor is shown

    def encrypt(self, messages: Words, threads: int, keystream: Keystream | None = None) -> Words:
        """Encrypt numbers below 2^{plaintext_bits - 2}, little-endian words (rows, limbs), by the factors of n."""
        check_messages(messages, self.public.plaintext_bits)
        keystream, n = keystream or Keystream(), self.public.modulus
        exponents_p = keystream.below(self._u, len(messages))
        exponents_q = keystream.below(self._v, len(messages))
        out = np.empty((len(messages), n.words), np.uint64)

        def chunk(rows: slice) -> None:
            part_p = self._square.encrypt(messages[rows], exponents_p[rows])
            part_q = self._mod_q.lift(self._powers_q.power(exponents_q[rows]))
            out[rows] = n.pack(n.add(part_p, part_q))

        concurrently(chunk, pieces(len(messages), _CHUNK), threads)
        return out

    def decrypt(self, ciphertexts: Words, threads: int) -> Words:
        """Decrypt packed Montgomery forms below n to numbers modulo p, little-endian words (rows, limbs).

        CryptoError if something is not a ciphertext of this key.
        """
        parts = pieces(len(ciphertexts), _DECRYPTED_AT_A_TIME)
        results = concurrently(lambda rows: self._square.decrypt(ciphertexts[rows]), parts, threads)
        return to_words([m for part in results for m in part], -(-self._p.bit_length() // 64))
