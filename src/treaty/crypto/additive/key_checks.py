"""Checks of a public key that need none of its secrets; both ciphers rest on the factors of a modulus n.

What passes is odd, of an accepted size, without small factors, neither prime nor a power, and its bases are units other
than 1 modulo every factor; the base of the randomness is of no tiny order there. What else is known of n the owner
proves (`key_proofs`). The order of the base cannot be checked without the factors, so nothing that is hidden from the
owner rests on it. Its own secrets do, and what others hide from each other under its key: there it is trusted not to
give that away, as it could by showing the key.

References: Pohlig, Hellman, An Improved Algorithm for Computing Logarithms over GF(p) and Its Cryptographic
Significance, IEEE Transactions on Information Theory 24, 1978.
"""

from __future__ import annotations

import math

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.errors import CryptoError

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
