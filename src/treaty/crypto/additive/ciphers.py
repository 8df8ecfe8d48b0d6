"""The additive ciphers, Okamoto-Uchiyama and Paillier: keys, encryption and decryption of many numbers at once.

*Okamoto-Uchiyama* with small subgroups::

    n = p^2 q,   c = g^m h^r mod n,   c^{p-1} mod p^2 = 1 + a m (p - 1) p      (m < 2^{|n|/3 - 2})

p = 2 u k + 1 and q = 2 v l + 1 for random 256-bit primes u, v; h has order u modulo p^2 and v modulo q. g mod p^2 =
(1 + p)^a w, where w has order u, and g mod q lies in <h mod q>. (g = 1 + p would do for decryption, but gcd(g - 1, n)
would be p: the factor w hides it.) Secure if factoring n is hard, and discrete logarithms and membership in the
subgroup of order u v, knowing g and h.

*Paillier* with a fixed base for randomness::

    n = p q,   c = (1 + n m) w^r mod n^2,   w = h^n mod n^2,   h = x^2 mod n   (m < 2^{|n| - 2})

p = 2 u k + 1 and q = 2 v l + 1 for four distinct primes, k and l of 64 bits. So squares form a cyclic group of order
u k v l, and the owner can test whether h generates it; others have only its word for that. With r uniform modulo that
order w^r is a uniform n-th power among the squares: decisional composite residuosity is the only assumption.

For both: the product of ciphertexts encrypts the sum of the messages. p = 3 and q = 7 modulo 8, as `key_proofs` need.
Security is against chosen plaintexts only: an owner that decrypts chosen ciphertexts for others gives its key away.
Public key and ciphertexts reveal nothing of messages. The owner decrypts, and sees of a returned ciphertext which of
its own were multiplied, unless it is multiplied by a random n-th power (`key_proofs.Randomiser`).

The owner encrypts modulo the factors of n, from tables, with exponents exactly uniform modulo the orders there: the
ciphertexts are distributed as the formula's. They are *packed Montgomery forms* (`montgomery`), so that the receiver
multiplies them as received. Time does not depend on messages; table look-ups with secret indices show in the cache.

References: Okamoto and Uchiyama, A New Public-Key Cryptosystem as Secure as Factoring, EUROCRYPT 1998. Coron, Naccache,
Paillier, Accelerating Okamoto-Uchiyama Public-Key Cryptosystem, Electronics Letters 35, 1999. Paillier, Public-Key
Cryptosystems Based on Composite Degree Residuosity Classes, EUROCRYPT 1999. Damgard, Jurik, Nielsen, A Generalization
of Paillier's Public-Key System with Applications to Electronic Voting, Int. J. Information Security 9, 2010, section 4.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import gmpy2
import numpy as np

from treaty.crypto import parameters
from treaty.crypto.additive import key_proofs
from treaty.crypto.additive.montgomery import FixedBase, Modulus, PrimeSquare, Residues
from treaty.crypto.additive.multiplier import HAS_IFMA
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import Payload, check_payload, from_words, to_words
from treaty.errors import CryptoError
from treaty.machine.arrays import Words, pieces
from treaty.machine.process import concurrently

# Bits per table look-up of the owner. Larger tables do not fit the second-level cache, which costs more than the
# products that they save where products are as fast as with IFMA.
_OU_WINDOW = 9 if HAS_IFMA else 11
_PAILLIER_WINDOW = 8
_OU_ROWS, _PAILLIER_ROWS = 256, 128  # rows a thread encrypts at a time: working arrays stay in the cache
_DECRYPTED_AT_A_TIME = 32


class OUPublicKey:
    """An Okamoto-Uchiyama public key, checked as far as possible without the factors; CryptoError if malformed.

    `subgroup_bits` is 2 * 256 when the owner states that h has order u v below 2^512, else 0 (order unknown). Messages
    are below 2^{plaintext_bits - 2}; `randomness_bits` is the length of an exponent r with which h^r hides a message
    from others than the owner. `proof` is the owner's of `key_proofs`, which `from_payload` checks.
    """

    def __init__(
        self, n: int, g: int, h: int, subgroup_bits: int, proof: Sequence[int] = (), *,
        insecure_test_key_bits: int | None = None,
    ) -> None:  # fmt: skip
        key_proofs.check_modulus(n, insecure_test_key_bits)
        full = 2 * parameters.OU_SUBGROUP_PRIME_BITS
        if subgroup_bits not in (0, full) and insecure_test_key_bits is None:
            raise CryptoError(f"expected subgroup_bits 0 or {full}, got {subgroup_bits} - in the public key")
        key_proofs.check_base("g", g, n)
        key_proofs.check_base("h", h, n)
        key_proofs.check_order("h", h, n)
        self.n, self.g, self.h, self.subgroup_bits, self._proof = n, g, h, subgroup_bits, list(proof)
        self.randomiser_base = h
        self.plaintext_bits = n.bit_length() // 3
        order_bits = subgroup_bits or -(-2 * n.bit_length() // 3)
        self.randomness_bits = order_bits + parameters.STATISTICAL_BITS
        self.modulus = Modulus(n)

    @classmethod
    def from_payload(cls, payload: Payload, insecure_test_key_bits: int | None = None) -> OUPublicKey:
        """Read a key from uint64 (numbers, words) n, g, h, proof and int64 (1,) subgroup_bits; check the proof."""
        shape = (3 + key_proofs.OKAMOTO_UCHIYAMA_NUMBERS, None)
        check_payload(payload, "the public key", (np.uint64, shape), (np.int64, (1,)))
        n, g, h, *proof = from_words(payload[0])
        key = cls(n, g, h, int(payload[1][0]), proof, insecure_test_key_bits=insecure_test_key_bits)
        key_proofs.check_okamoto_uchiyama(n, g, h, proof)
        return key

    def to_payload(self) -> Payload:
        numbers = to_words([self.n, self.g, self.h, *self._proof], self.modulus.words)
        return [numbers, np.array([self.subgroup_bits], np.int64)]


class OUPrivateKey:
    """The owner's key: primes p, q with n = p^2 q; orders u, v of h modulo p^2 and q; a of g mod p^2 = (1 + p)^a w."""

    def __init__(self, p: int, q: int, u: int, v: int, a: int, public: OUPublicKey) -> None:
        # the numbers are what an auditor may see
        self.public, self.secret_numbers = public, (p, q, u, v, a)
        self._square = PrimeSquare(
            public.modulus,
            p,
            factor=a,
            base=public.h,
            order_bits=u.bit_length(),
            exponent=p - 1,  # not u: others re-randomise by any n-th power
            window=_OU_WINDOW,
        )
        self._mod_q = Residues(public.modulus, q)
        self._powers_q = FixedBase(self._mod_q.modulus, public.h % q, v.bit_length(), _OU_WINDOW)

    def encrypt(self, messages: Words, threads: int, keystream: Keystream | None = None) -> Words:
        """Encrypt numbers below 2^{plaintext_bits - 2}, little-endian words (rows, limbs), by the factors of n."""
        key_proofs.check_messages(messages, self.public.plaintext_bits)
        keystream, n, (_, _, u, v, _) = keystream or Keystream(), self.public.modulus, self.secret_numbers
        # exactly uniform modulo u and v: as h^r with r uniform modulo u v
        exponents_p, exponents_q = keystream.below(u, len(messages)), keystream.below(v, len(messages))
        out = np.empty((len(messages), n.words), np.uint64)

        def chunk(rows: slice) -> None:
            part_p = self._square.encrypt(messages[rows], exponents_p[rows])
            # q holds no message: c mod q = h^{r_v}
            part_q = self._mod_q.lift(self._powers_q.power(exponents_q[rows]))
            out[rows] = n.pack(n.add(part_p, part_q))

        concurrently(chunk, pieces(len(messages), _OU_ROWS), threads)
        return out

    def decrypt(self, ciphertexts: Words, threads: int) -> Words:
        """Decrypt packed Montgomery forms below n to numbers modulo p, little-endian words (rows, limbs).

        CryptoError if something is not a ciphertext of this key.
        """
        parts = pieces(len(ciphertexts), _DECRYPTED_AT_A_TIME)
        results = concurrently(lambda rows: self._square.decrypt(ciphertexts[rows]), parts, threads)
        return to_words([m for part in results for m in part], -(-self.secret_numbers[0].bit_length() // 64))


class PaillierPublicKey:
    """A Paillier public key, checked as far as possible without the factors; CryptoError if malformed.

    Messages are below 2^{plaintext_bits - 2}; `randomness_bits` is the length of an exponent r with which w^r hides a
    message from others than the owner. `proof` is the owner's of `key_proofs`, which `from_payload` checks.
    """

    def __init__(self, n: int, h: int, proof: Sequence[int] = (), *, insecure_test_key_bits: int | None = None) -> None:
        key_proofs.check_modulus(n, insecure_test_key_bits)
        key_proofs.check_base("h", h, n)
        if gmpy2.gcd(h + 1, n) != 1 or gmpy2.jacobi(h, n) != 1:
            raise CryptoError("expected h to be a square, h + 1 coprime to n - in the public key")
        key_proofs.check_order("h", h, n)
        self.n, self.h, self._proof = n, h, list(proof)
        self.plaintext_bits = n.bit_length()
        self.randomness_bits = n.bit_length() + parameters.STATISTICAL_BITS
        self.modulus = Modulus(n * n)
        # w, computed here and not received, so that it is an n-th power for certain
        self.randomiser_base = int(gmpy2.powmod(h, n, n * n))

    @classmethod
    def from_payload(cls, payload: Payload, insecure_test_key_bits: int | None = None) -> PaillierPublicKey:
        """Read a key from uint64 (numbers, words) n, h and its proof, and int64 (0,); check the proof."""
        check_payload(payload, "the public key", (np.uint64, (2 + key_proofs.PAILLIER_NUMBERS, None)), (np.int64, (0,)))
        n, h, *proof = from_words(payload[0])
        key = cls(n, h, proof, insecure_test_key_bits=insecure_test_key_bits)
        key_proofs.check_paillier(n, h, proof)
        return key

    def to_payload(self) -> Payload:
        return [to_words([self.n, self.h, *self._proof], -(-self.n.bit_length() // 64)), np.empty(0, np.int64)]


class PaillierPrivateKey:
    """The owner's key: primes p, q with n = p q; (p - 1) / 2, (q - 1) / 2 odd, coprime, h of order their product."""

    def __init__(self, p: int, q: int, public: PaillierPublicKey) -> None:
        # the numbers are what an auditor may see
        self.public, self.secret_numbers = public, (p, q)
        self._square_p, self._square_q = (
            PrimeSquare(
                public.modulus,
                prime,
                factor=other,  # 1 + n m = 1 + q m p
                base=public.randomiser_base,
                order_bits=prime.bit_length() - 1,
                exponent=prime - 1,  # not half of it: other programs' randomness need not be a square
                window=_PAILLIER_WINDOW,
            )
            for prime, other in ((p, q), (q, p))
        )

    def encrypt(self, messages: Words, threads: int, keystream: Keystream | None = None) -> Words:
        """Encrypt numbers below 2^{plaintext_bits - 2}, little-endian words (rows, limbs), by the factors of n."""
        key_proofs.check_messages(messages, self.public.plaintext_bits)
        keystream, n2, (p, q) = keystream or Keystream(), self.public.modulus, self.secret_numbers
        # uniform modulo the coprime (p - 1) / 2 and (q - 1) / 2: as w^r with r uniform modulo their product
        exponents_p = keystream.below((p - 1) // 2, len(messages))
        exponents_q = keystream.below((q - 1) // 2, len(messages))
        out = np.empty((len(messages), n2.words), np.uint64)

        # lifted parts are 0 modulo the other square, so their sum is the ciphertext modulo n^2
        def chunk(rows: slice) -> None:
            part_p = self._square_p.encrypt(messages[rows], exponents_p[rows])
            part_q = self._square_q.encrypt(messages[rows], exponents_q[rows])
            out[rows] = n2.pack(n2.add(part_p, part_q))

        concurrently(chunk, pieces(len(messages), _PAILLIER_ROWS), threads)
        return out

    def decrypt(self, ciphertexts: Words, threads: int) -> Words:
        """Decrypt packed Montgomery forms below n^2 to numbers modulo n, little-endian words (rows, limbs).

        CryptoError if something is not a ciphertext of this key.
        """
        p, q = self.secret_numbers
        q_inverse = pow(q, -1, p)

        def chunk(rows: slice) -> list[int]:
            of_p, of_q = self._square_p.decrypt(ciphertexts[rows]), self._square_q.decrypt(ciphertexts[rows])
            # Garner: join the messages modulo p and q
            return [m_q + q * ((m_p - m_q) * q_inverse % p) for m_p, m_q in zip(of_p, of_q, strict=True)]

        results = concurrently(chunk, pieces(len(ciphertexts), _DECRYPTED_AT_A_TIME), threads)
        return to_words([m for part in results for m in part], -(-self.public.n.bit_length() // 64))


PublicKey = OUPublicKey | PaillierPublicKey
PrivateKey = OUPrivateKey | PaillierPrivateKey


def generate_key(
    bits: int = parameters.OU_DEFAULT_KEY_BITS, *, insecure_test_key_bits: int | None = None
) -> OUPrivateKey:
    """Make an Okamoto-Uchiyama key pair with n of 2048, 3072 or 4096 bits, or of 96 or more, insecure, for tests."""
    bits = bits if insecure_test_key_bits is None else insecure_test_key_bits
    key_proofs.check_key_size(bits, insecure_test_key_bits)
    while True:
        p, u = _prime_with_subgroup(bits // 3, 3)
        q, v = _prime_with_subgroup(bits - 2 * (bits // 3), 7)
        p2, n = p * p, p * p * q
        # neither prime may divide the other's order, or the orders of h modulo p^2 and q would not be u and v
        if u == v or n.bit_length() != bits or (p - 1) % q == 0 or (q - 1) % p == 0:
            continue
        h_p = _element_of_order(u, p * (p - 1), p2)
        h_q = _element_of_order(v, q - 1, q)
        a = 1 + secrets.randbelow(p - 1)
        # g mod p^2 is (1 + p)^a w, and g mod q a power of h
        g_p = (1 + a * p) * pow(h_p, 1 + secrets.randbelow(u - 1), p2) % p2
        g_q = pow(h_q, 1 + secrets.randbelow(v - 1), q)
        # the numbers modulo n that are these modulo p^2 and q
        inverse = pow(p2, -1, q)
        g, h = (x + p2 * ((y - x) * inverse % q) for x, y in ((g_p, g_q), (h_p, h_q)))
        proof = key_proofs.prove_okamoto_uchiyama(n, g, h, p, q, a)
        subgroup = u.bit_length() + v.bit_length()
        public = OUPublicKey(n, g, h, subgroup, proof, insecure_test_key_bits=insecure_test_key_bits)
        return OUPrivateKey(p, q, u, v, a, public)


def generate_paillier_key(
    bits: int = parameters.PAILLIER_DEFAULT_KEY_BITS, *, insecure_test_key_bits: int | None = None
) -> PaillierPrivateKey:
    """Make a Paillier key pair with n of 2048, 3072 or 4096 bits, or of 96 or more, insecure (the papers': 512)."""
    bits = bits if insecure_test_key_bits is None else insecure_test_key_bits
    key_proofs.check_key_size(bits, insecure_test_key_bits)
    while True:
        p, u, k = _prime_without_small_subgroups(bits // 2, 3)
        q, v, l = _prime_without_small_subgroups(bits - bits // 2, 7)
        n = p * q
        if len({u, k, v, l}) < 4 or n.bit_length() != bits:
            continue
        h = pow(2 + secrets.randbelow(n - 2), 2, n)
        # h generates all squares unless its order misses one of the four primes
        if all(pow(h, order, prime) not in (0, 1) for prime, order in ((p, u), (p, k), (q, v), (q, l))):
            proof = key_proofs.prove_paillier(n, h, p, q)
            public = PaillierPublicKey(n, h, proof, insecure_test_key_bits=insecure_test_key_bits)
            return PaillierPrivateKey(p, q, public)


def _prime_without_small_subgroups(bits: int, residue: int) -> tuple[int, int, int]:
    """Draw a prime p = 2 u k + 1 in [7/8 2^bits, 2^bits), 3 or 7 modulo 8, and the primes u, k."""
    small = min(parameters.PAILLIER_SMALL_PRIME_BITS, bits // parameters.PAILLIER_INSECURE_SMALL_PRIME_SHARE)
    # safe primes would serve as well, but take many times longer to find
    u = _random_prime(bits - small)
    while True:
        p, k = _candidate(bits, u, residue)
        if gmpy2.is_prime(k, parameters.PRIMALITY_ROUNDS) and gmpy2.is_prime(p, parameters.PRIMALITY_ROUNDS):
            return p, u, k


def _prime_with_subgroup(bits: int, residue: int) -> tuple[int, int]:
    """Draw a prime p = 2 u k + 1 in [7/8 2^bits, 2^bits), 3 or 7 modulo 8, and the prime u."""
    order_bits = parameters.OU_SUBGROUP_PRIME_BITS
    if bits < 2 * order_bits:  # a test key
        order_bits = bits // parameters.OU_INSECURE_SUBGROUP_SHARE
    u = _random_prime(order_bits)
    while True:
        p, _ = _candidate(bits, u, residue)
        if gmpy2.is_prime(p, parameters.PRIMALITY_ROUNDS):
            return p, u


def _candidate(bits: int, u: int, residue: int) -> tuple[int, int]:
    """Draw p = 2 u k + 1 in about [7/8 2^bits, 2^bits), 3 or 7 modulo 8 for an odd u, and k."""
    # the top three bits are set, so that n has its full length
    lowest, highest = (7 << (bits - 3)) // (2 * u) + 1, (1 << bits) // (2 * u)
    # k such that 2 u k + 1 is 3 or 7 modulo 8
    k = (lowest + secrets.randbelow(highest - lowest)) // 4 * 4 + residue // 2 * u % 4
    return 2 * u * k + 1, k


def _random_prime(bits: int) -> int:
    while True:
        # the highest and the lowest bit are set
        x = secrets.randbits(bits) | 1 << (bits - 1) | 1
        if gmpy2.is_prime(x, parameters.PRIMALITY_ROUNDS):
            return x


def _element_of_order(order: int, group_order: int, modulus: int) -> int:
    while True:
        # a power of prime order; the check of its order fails only if p divides the number drawn
        x = int(gmpy2.powmod(2 + secrets.randbelow(modulus - 2), group_order // order, modulus))
        if x != 1 and gmpy2.powmod(x, order, modulus) == 1:
            return x
