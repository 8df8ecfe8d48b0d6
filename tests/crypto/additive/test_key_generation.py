import math

import gmpy2
import numpy as np
import pytest

from treaty.crypto.additive.ciphers import generate_key, generate_paillier_key
from treaty.errors import CryptoError


def factors(key):
    """p, q, u, v of a private key."""
    return key.secret_numbers[0], key.secret_numbers[1], key.secret_numbers[2], key.secret_numbers[3]


@pytest.mark.parametrize("bits", [96, 97, 128, 255, 512, 1024])
def test_key_has_the_asked_size_and_structure(bits):
    key = generate_key(insecure_test_key_bits=bits)
    p, q, u, v = factors(key)
    n, g, h = key.public.n, key.public.g, key.public.h
    assert n == p * p * q
    assert n.bit_length() == bits
    assert p > 1 << (key.public.plaintext_bits - 1)
    assert all(gmpy2.is_prime(x) for x in (p, q, u, v))
    assert (p - 1) % u == 0
    assert (q - 1) % v == 0
    assert pow(h, u, p * p) == 1 != h % (p * p)
    assert pow(h, v, q) == 1 != h % q
    assert pow(g, v, q) == 1
    assert (pow(g, u, p * p) - 1) % p == 0
    assert pow(g, u, p * p) != 1


def test_default_key_is_of_3072_bits_with_256_bit_subgroups():
    key = generate_key()
    _, _, u, v = factors(key)
    assert key.public.n.bit_length() == 3072
    assert u.bit_length() == v.bit_length() == 256
    assert key.public.subgroup_bits == 512


def test_public_key_does_not_show_a_factor():
    key = generate_key(insecure_test_key_bits=256)
    n, g, h = key.public.n, key.public.g, key.public.h
    assert math.gcd(g - 1, n) == math.gcd(h - 1, n) == 1
    p, _, u, _ = factors(key)
    w = pow(g, pow(u, -1, p) * u % (p * u), p * p)  # g without its part of order u is a power of 1 + p
    assert math.gcd(w - 1, n) == p


@pytest.mark.parametrize("bits", [512, 1024, 2047, 3000])
def test_short_and_odd_sizes_are_refused(bits):
    with pytest.raises(CryptoError, match="expected a key of"):
        generate_key(bits)


def test_tiny_test_key_is_refused():
    with pytest.raises(CryptoError, match="at least 96"):
        generate_key(insecure_test_key_bits=64)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [96, 97, 128, 255, 512, 1024])
def test_paillier_key_has_the_asked_size_and_h_generates_the_squares(bits):
    key = generate_paillier_key(insecure_test_key_bits=bits)
    p, q, n, h = key.secret_numbers[0], key.secret_numbers[1], key.public.n, key.public.h
    assert n == p * q
    assert n.bit_length() == bits
    assert gmpy2.is_prime(p)
    assert gmpy2.is_prime(q)
    assert p % 4 == q % 4 == 3
    assert math.gcd((p - 1) // 2, (q - 1) // 2) == 1
    assert math.gcd(n, (p - 1) * (q - 1)) == 1
    order = (p - 1) * (q - 1) // 4
    assert pow(h, order, n) == 1
    if bits == 96:  # small enough to factor the order
        odd = np.arange(3, 1 << 24, 2)
        for half in ((p - 1) // 2, (q - 1) // 2):
            small = [int(x) for x in odd[half % odd == 0]]
            assert small
            assert all(pow(h, order // prime, n) != 1 for prime in {*small, *(half // x for x in small)})


@pytest.mark.slow
def test_paillier_primes_have_no_small_subgroups():
    key = generate_paillier_key(2048)
    for prime in (key.secret_numbers[0], key.secret_numbers[1]):
        assert math.gcd((prime - 1) // 2, int(gmpy2.primorial(1 << 16))) == 1
        assert prime.bit_length() == 1024


@pytest.mark.slow
def test_default_paillier_key_is_of_3072_bits():
    assert generate_paillier_key().public.n.bit_length() == 3072


@pytest.mark.parametrize("bits", [512, 1024, 2047, 3000])
def test_short_and_odd_paillier_sizes_are_refused(bits):
    with pytest.raises(CryptoError, match="expected a key of"):
        generate_paillier_key(bits)


def test_tiny_paillier_test_key_is_refused():
    with pytest.raises(CryptoError, match="at least 96"):
        generate_paillier_key(insecure_test_key_bits=64)
