"""Proofs, made once by a key's owner and checked by whoever receives the key, of what its modulus n is.

Re-randomisation multiplies by n-th powers (`randomiser`), which leave of a ciphertext what tells units modulo n-th
powers apart. Two statements make that the message and nothing else, whatever secrets the owner has built into the key:

* *Two primes*: n has at most two different prime factors. Of each of 128 numbers x, which a hash of the key chooses,
  the proof has a square root modulo n of x, -x, 2 x or -2 x. Every unit x has one if p = 3 and q = 7 modulo 8; with
  three or more prime factors at most half of them do. So two of them generate all units modulo n, or n^2.
* *Messages*: under Okamoto-Uchiyama every unit modulo n is g^m x^n for some m and x, under Paillier every unit modulo
  n is x^n. The proof has m and x of 8 numbers that a hash of the key chooses. The units that have them are a subgroup,
  and prime factors of its index divide n (they divide the order of units modulo n-th powers), so none is below 2^16:
  unless the subgroup is everything, each number has them with probability 2^-16 at most. Ciphertexts of one message
  then differ by an n-th power, which re-randomisation makes a random one. For Paillier it follows that n is prime to
  its totient, so p q.

*Soundness*: a key that is otherwise passes with probability 2^-128 for each that is tried, in the random oracle model
(Fiat and Shamir). The numbers must be units, for a multiple of a small factor has roots where most units have none; an
honest key fails by that with probability 2^-600.
*Zero knowledge* in that model: m, x and roots are as random as if they had been drawn first and the numbers computed
from them (m has half as many bits as n: a distance of 2^{|p| - |n| / 2}).
*Not proved*: that n = p^2 q with p of a third of the bits, hence how much a message can hold; that the owner drew h as
it should, on which its own secrets rest, and what others hide from each other under its key (`KeyRandomness`); that
numbers encrypted are gradients; that whoever sends the key has its factors: a copied key is of the same form, and tells
whoever copied it nothing.

References: Goldberg, Reyzin, Sagga, Baldimtsi, Efficient Noninteractive Certification of RSA Moduli and Beyond,
ASIACRYPT 2019 (n-th roots of random numbers: the proof for Paillier; for Okamoto-Uchiyama, with g^m beside, the same
argument is ours). van de Graaf and Peralta, A Simple and Secure Way to Show the Validity of Your Public Key, CRYPTO
1987 (two primes).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.errors import CryptoError

OKAMOTO_UCHIYAMA_NUMBERS = 2 * parameters.KEY_PROOF_ROOTS + parameters.KEY_PROOF_SQUARES
PAILLIER_NUMBERS = parameters.KEY_PROOF_ROOTS + parameters.KEY_PROOF_SQUARES

_SIGNS = (1, -1, 2, -2)


def prove_okamoto_uchiyama(n: int, g: int, h: int, p: int, q: int, a: int) -> list[int]:
    """Prove both statements of a key with n = p^2 q and g mod p^2 = (1 + p)^a w: `OKAMOTO_UCHIYAMA_NUMBERS` numbers."""
    key, p2 = (n, g, h), p * p
    to_message = gmpy2.invert(a * (p - 1), p)
    to_root_p, to_root_q = gmpy2.invert(n, p - 1), gmpy2.invert(n, q - 1)
    exponents, roots = [], []
    for x in _challenges("messages", key, parameters.KEY_PROOF_ROOTS):
        message = (gmpy2.powmod(x, p - 1, p2) - 1) // p * to_message % p
        exponents.append(int(message + p * secrets.randbelow((1 << n.bit_length() // 2) // p)))
        power = x * gmpy2.powmod(g, -exponents[-1], n) % n
        one_of_p = gmpy2.powmod(power, to_root_p, p2) * (1 + p * secrets.randbelow(p))
        roots.append(_joined(one_of_p, p2, gmpy2.powmod(power, to_root_q, q), q))
    return [*exponents, *roots, *_square_roots(key, p, p2, q)]


def check_okamoto_uchiyama(n: int, g: int, h: int, proof: Sequence[int]) -> None:
    """Raise CryptoError unless a proof is one of this key, whose n has no factor below 2^16 and is no power."""
    count = parameters.KEY_PROOF_ROOTS
    _check_numbers(proof, OKAMOTO_UCHIYAMA_NUMBERS, n)
    exponents, roots, squares = proof[:count], proof[count : 2 * count], proof[2 * count :]
    for x, m, root in zip(_unit_challenges("messages", (n, g, h), count), exponents, roots, strict=True):
        if gmpy2.powmod(g, m, n) * gmpy2.powmod(root, n, n) % n != x:
            raise CryptoError("expected a proof that units are g^m x^n, got another - in the public key")
    _check_two_primes((n, g, h), squares)


def prove_paillier(n: int, h: int, p: int, q: int) -> list[int]:
    """Prove both statements of a key with n = p q: `PAILLIER_NUMBERS` numbers."""
    key, to_root = (n, h), gmpy2.invert(n, (p - 1) * (q - 1))
    roots = [int(gmpy2.powmod(x, to_root, n)) for x in _challenges("messages", key, parameters.KEY_PROOF_ROOTS)]
    return [*roots, *_square_roots(key, p, p, q)]


def check_paillier(n: int, h: int, proof: Sequence[int]) -> None:
    """Raise CryptoError unless a proof is one of this key, whose n has no factor below 2^16 and is no power."""
    count = parameters.KEY_PROOF_ROOTS
    _check_numbers(proof, PAILLIER_NUMBERS, n)
    for x, root in zip(_unit_challenges("messages", (n, h), count), proof[:count], strict=True):
        if gmpy2.powmod(root, n, n) != x:
            raise CryptoError("expected a proof that units are x^n, got another - in the public key")
    _check_two_primes((n, h), proof[count:])


def _square_roots(key: tuple[int, ...], p: int, p_power: int, q: int) -> list[int]:
    """Return a root, at random one of four, for each number, where p = 3 and q = 7 modulo 8; `p_power` is p or p^2."""
    found = []
    for x in _challenges("two primes", key, parameters.KEY_PROOF_SQUARES):
        square = next(x * s for s in _SIGNS if gmpy2.jacobi(x * s, p) == gmpy2.jacobi(x * s, q) == 1)
        root = gmpy2.powmod(square, (p + 1) // 4, p)
        root -= (root * root - square) * gmpy2.invert(2 * root, p_power)  # Newton: from modulo p to modulo p^2
        signs = (1 - 2 * secrets.randbelow(2) for _ in range(2))
        found.append(_joined(root * next(signs), p_power, gmpy2.powmod(square, (q + 1) // 4, q) * next(signs), q))
    return found


def _check_two_primes(key: tuple[int, ...], roots: Sequence[int]) -> None:
    n = key[0]
    for x, root in zip(_unit_challenges("two primes", key, parameters.KEY_PROOF_SQUARES), roots, strict=True):
        if root * root % n not in {x * sign % n for sign in _SIGNS}:
            raise CryptoError("expected a proof that n has two prime factors, got another - in the public key")


def _check_numbers(proof: Sequence[int], count: int, n: int) -> None:
    if len(proof) != count or not all(0 <= x < n for x in proof):
        raise CryptoError(f"expected a proof of {count} numbers below n, got {len(proof)} - in the public key")


def _unit_challenges(what: str, key: tuple[int, ...], count: int) -> list[int]:
    numbers = _challenges(what, key, count)
    if any(gmpy2.gcd(x, key[0]) != 1 for x in numbers):
        raise CryptoError("expected a proof of numbers prime to n, got one of another - in the public key")
    return numbers


def _challenges(what: str, key: tuple[int, ...], count: int) -> list[int]:
    """Return numbers modulo n, the key's first, by SHAKE-256 of what is proved and the key: to 2^-128 uniform."""
    n, said = key[0], hashlib.shake_256(f"treaty key proof: {what}".encode())
    for number in key:
        said.update(number.to_bytes(n.bit_length() // 8 + 1, "little"))
    size = n.bit_length() // 8 + 17
    stream = said.digest(count * size)
    return [int.from_bytes(stream[k : k + size], "little") % n for k in range(0, len(stream), size)]


def _joined(x: int, modulus: int, y: int, other: int) -> int:
    """Return the number that is x modulo one and y modulo the other."""
    return int(x % modulus + modulus * ((y - x % modulus) * gmpy2.invert(modulus, other) % other))


# --------------- checks of a public key that need none of its secrets; both ciphers rest on the factors of a modulus n
#
# What passes is odd, of an accepted size, without small factors, neither prime nor a power, and its bases are units
# other than 1 modulo every factor; the base of the randomness is of no tiny order there. What else is known of n the
# owner proves (`key_proofs`). The order of the base cannot be checked without the factors, so nothing that is hidden
# from the owner rests on it. Its own secrets do, and what others hide from each other under its key: there it is
# trusted not to give that away, as it could by showing the key.
#
# References: Pohlig, Hellman, An Improved Algorithm for Computing Logarithms over GF(p) and Its Cryptographic
# Significance, IEEE Transactions on Information Theory 24, 1978.

_LEAST_TEST_BITS = 96


def check_key_size(bits: int, insecure_test_key_bits: int | None) -> None:
    """Raise CryptoError unless `bits` is an accepted size of n, or at least that of the test key."""
    if insecure_test_key_bits is not None:
        least = max(insecure_test_key_bits, _LEAST_TEST_BITS)
        if bits < least:
            raise CryptoError(f"expected a key of at least {least} bits, got {bits}")
    elif bits not in parameters.KEY_BITS:
        raise CryptoError(f"expected a key of {parameters.KEY_BITS} bits, got {bits}")


def check_modulus(n: int, insecure_test_key_bits: int | None) -> None:
    """Raise CryptoError unless n can be the modulus of a key."""
    check_key_size(n.bit_length(), insecure_test_key_bits)
    if n % 2 == 0 or gmpy2.gcd(n, gmpy2.primorial(parameters.SMALL_FACTOR_BOUND)) != 1:
        raise CryptoError("expected a modulus without small factors - in the public key")
    if gmpy2.is_prime(n) or gmpy2.is_power(n):
        raise CryptoError("expected a modulus that is neither prime nor a power - in the public key")


def check_base(name: str, base: int, n: int) -> None:
    """Raise CryptoError unless a base is a unit modulo n, and not 1 modulo any factor."""
    if not 1 < base < n or gmpy2.gcd(base, n) != 1 or gmpy2.gcd(base - 1, n) != 1:
        raise CryptoError(f"expected 1 < {name} < n, {name} and {name} - 1 coprime to n - in the public key")


def check_order(name: str, base: int, n: int) -> None:
    """Raise CryptoError when a base's order modulo any prime factor of n divides lcm(1..2^16).

    Powers of such a base hide nothing: whoever knows the factors of n takes logarithms to it (Pohlig and Hellman), or
    tries them all. An order made of larger primes that are still small for logarithms passes. Test keys below 256 bits
    are held to a smaller bound.
    """
    bound = min(parameters.SMALL_ORDER_BOUND, 1 << n.bit_length() // parameters.SMALL_ORDER_INSECURE_SHARE)
    # lcm(1..b) is the product over k of the primes up to b^{1/k}
    multiple = math.prod(gmpy2.primorial(int(gmpy2.iroot(bound, k)[0])) for k in range(1, bound.bit_length()))
    if gmpy2.gcd(gmpy2.powmod(base, multiple, n) - 1, n) != 1:
        raise CryptoError(f"expected {name} of an order with large factors, got a tiny one - in the public key")


def check_messages(messages: NDArray[np.uint64], plaintext_bits: int) -> None:
    """Raise CryptoError unless numbers, uint64 (rows, limbs) little-endian, are below 2^{plaintext_bits - 2}."""
    word, rest = divmod(plaintext_bits - 2, 64)
    if word < messages.shape[1] and (messages[:, word + 1 :].any() or (messages[:, word] >> np.uint64(rest)).any()):
        raise CryptoError(f"expected messages below 2^{plaintext_bits - 2} - lower fractional_bits")
