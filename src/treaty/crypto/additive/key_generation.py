"""Key generation from the operating system's randomness.

*Okamoto-Uchiyama*, with small subgroups: p = 2 u k + 1 and q = 2 v l + 1 for random primes u, v and random k, l. h is a
random element of order u modulo p^2 and of order v modulo q. g must not be 1 + p, although decryption would be simplest
then: gcd(g - 1, n) would be p. So g mod p^2 = (1 + p)^a w with random a and random w of order u, g mod q random in <h
mod q>. One of p and q is 3, the other 7 modulo 8, as the proofs need that go with a key (`key_proofs`).

*Paillier*, without: p = 2 u k + 1 and q = 2 v l + 1 for four distinct random primes, k and l of 64 bits. Then the
squares modulo n form a cyclic group of order u k v l, and it is easy to test whether a random square h generates it.
(Safe primes would do, too, but take many times longer to find.)

References: Coron, Naccache, Paillier, Accelerating Okamoto-Uchiyama Public-Key Cryptosystem, Electronics Letters 35,
1999. Damgard, Jurik, Nielsen, A Generalization of Paillier's Public-Key System with Applications to Electronic Voting,
International Journal of Information Security 9, 2010, section 4.
"""

from __future__ import annotations

import secrets

import gmpy2

from treaty.crypto import parameters
from treaty.crypto.additive import paillier
from treaty.crypto.additive.key_proofs import check_key_size, prove_okamoto_uchiyama, prove_paillier
from treaty.crypto.additive.okamoto_uchiyama import PrivateKey, PublicKey


def generate_key(
    bits: int = parameters.OU_DEFAULT_KEY_BITS, *, insecure_test_key_bits: int | None = None
) -> PrivateKey:
    """Make an Okamoto-Uchiyama key pair with n of 2048, 3072 or 4096 bits, or of 96 or more insecure ones for tests."""
    bits = bits if insecure_test_key_bits is None else insecure_test_key_bits
    check_key_size(bits, insecure_test_key_bits)
    while True:
        p, u = _prime_with_subgroup(bits // 3, 3)
        q, v = _prime_with_subgroup(bits - 2 * (bits // 3), 7)
        p2, n = p * p, p * p * q
        if u == v or n.bit_length() != bits or (p - 1) % q == 0 or (q - 1) % p == 0:
            continue
        h_p = _element_of_order(u, p * (p - 1), p2)
        h_q = _element_of_order(v, q - 1, q)
        a = 1 + secrets.randbelow(p - 1)
        g_p = (1 + a * p) * pow(h_p, 1 + secrets.randbelow(u - 1), p2) % p2
        g_q = pow(h_q, 1 + secrets.randbelow(v - 1), q)
        inverse = pow(p2, -1, q)
        g, h = (x + p2 * ((y - x) * inverse % q) for x, y in ((g_p, g_q), (h_p, h_q)))
        subgroup = u.bit_length() + v.bit_length()
        proof = prove_okamoto_uchiyama(n, g, h, p, q, a)
        public = PublicKey(n, g, h, subgroup, proof, insecure_test_key_bits=insecure_test_key_bits)
        return PrivateKey(p, q, u, v, a, public)


def generate_paillier_key(
    bits: int = parameters.PAILLIER_DEFAULT_KEY_BITS, *, insecure_test_key_bits: int | None = None
) -> paillier.PrivateKey:
    """Make a Paillier key pair with n of 2048, 3072 or 4096 bits, or of 96 or more insecure ones (the papers': 512)."""
    bits = bits if insecure_test_key_bits is None else insecure_test_key_bits
    check_key_size(bits, insecure_test_key_bits)
    while True:
        p, u, k = _prime_without_small_subgroups(bits // 2, 3)
        q, v, l = _prime_without_small_subgroups(bits - bits // 2, 7)
        n = p * q
        if len({u, k, v, l}) < 4 or n.bit_length() != bits:
            continue
        h = pow(2 + secrets.randbelow(n - 2), 2, n)
        orders = ((p, u), (p, k), (q, v), (q, l))
        if all(pow(h, order, prime) not in (0, 1) for prime, order in orders):
            proof = prove_paillier(n, h, p, q)
            public = paillier.PublicKey(n, h, proof, insecure_test_key_bits=insecure_test_key_bits)
            return paillier.PrivateKey(p, q, public)


def _prime_without_small_subgroups(bits: int, residue: int) -> tuple[int, int, int]:
    """Draw a prime p = 2 u k + 1 in [7/8 2^bits, 2^bits), 3 or 7 modulo 8, and the primes u, k."""
    small = min(parameters.PAILLIER_SMALL_PRIME_BITS, bits // parameters.PAILLIER_INSECURE_SMALL_PRIME_SHARE)
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
    lowest, highest = (7 << (bits - 3)) // (2 * u) + 1, (1 << bits) // (2 * u)
    k = (lowest + secrets.randbelow(highest - lowest)) // 4 * 4 + residue // 2 * u % 4
    return 2 * u * k + 1, k


def _random_prime(bits: int) -> int:
    """Draw a prime in [2^{bits - 1}, 2^bits)."""
    while True:
        x = secrets.randbits(bits) | 1 << (bits - 1) | 1
        if gmpy2.is_prime(x, parameters.PRIMALITY_ROUNDS):
            return x


def _element_of_order(order: int, group_order: int, modulus: int) -> int:
    """Draw an element of prime order modulo p^2 or q."""
    while True:
        x = int(gmpy2.powmod(2 + secrets.randbelow(modulus - 2), group_order // order, modulus))
        if x != 1 and gmpy2.powmod(x, order, modulus) == 1:  # the second fails only when p divided the draw
            return x
