import math
import secrets

import gmpy2
import numpy as np
import pytest

from treaty.crypto.additive import key_proofs
from treaty.crypto.additive.ciphers import OUPublicKey, PaillierPublicKey, generate_key, generate_paillier_key
from treaty.crypto.additive.key_proofs import check_okamoto_uchiyama, check_paillier, prove_okamoto_uchiyama
from treaty.errors import CryptoError


def prime(bits, residue, factor=1):
    """A prime of about so many bits, of this residue modulo 8 and 1 modulo `factor`."""
    while True:
        x = secrets.randbits(bits) | 1 << (bits - 1)
        x += -(x - 1) % factor if factor > 1 else 0
        for k in range(8):
            if (x + k * factor) % 8 == residue and gmpy2.is_prime(x + k * factor):
                return x + k * factor


def ou_numbers(key):
    n, g, h, *proof = (key.public.n, key.public.g, key.public.h, *key.public._proof)
    return n, g, h, proof


@pytest.mark.parametrize("bits", [96, 97, 256, 600])
def test_made_keys_prove_what_they_are(bits):
    key, other = generate_key(insecure_test_key_bits=bits), generate_paillier_key(insecure_test_key_bits=bits)
    n, g, h, proof = ou_numbers(key)
    check_okamoto_uchiyama(n, g, h, proof)
    check_paillier(other.public.n, other.public.h, other.public._proof)
    assert max(proof[:8]) < 1 << bits // 2
    for public, kind in ((key.public, OUPublicKey), (other.public, PaillierPublicKey)):
        again = kind.from_payload(public.to_payload(), bits)
        assert all(np.array_equal(a, b) for a, b in zip(again.to_payload(), public.to_payload(), strict=True))


@pytest.mark.slow
def test_made_keys_of_full_size_prove_what_they_are():
    for key, kind in ((generate_key(), OUPublicKey), (generate_paillier_key(), PaillierPublicKey)):
        assert kind.from_payload(key.public.to_payload()).n == key.public.n


def test_every_number_of_a_proof_counts():
    key, other = generate_key(insecure_test_key_bits=96), generate_paillier_key(insecure_test_key_bits=96)
    n, g, h, proof = ou_numbers(key)
    for k in range(len(proof)):
        with pytest.raises(CryptoError, match="expected a proof"):
            check_okamoto_uchiyama(n, g, h, [*proof[:k], proof[k] + 1, *proof[k + 1 :]])
    n, h, proof = other.public.n, other.public.h, other.public._proof
    for k in range(len(proof)):
        with pytest.raises(CryptoError, match="expected a proof"):
            check_paillier(n, h, [*proof[:k], proof[k] + 1, *proof[k + 1 :]])
    for wrong in ([], proof[:-1], [*proof, 1], [proof[0] + n, *proof[1:]]):
        with pytest.raises(CryptoError, match="numbers below n"):
            check_paillier(n, h, wrong)


def test_a_proof_belongs_to_all_numbers_of_its_key():
    """Numbers to take roots of are a hash of the whole key, so that none can be chosen after them."""
    key, other = generate_key(insecure_test_key_bits=256), generate_paillier_key(insecure_test_key_bits=256)
    n, g, h, proof = ou_numbers(key)
    for wrong in ((n, g * h % n, h), (n, g, h * h % n)):
        with pytest.raises(CryptoError, match="expected a proof"):
            check_okamoto_uchiyama(*wrong, proof)
    with pytest.raises(CryptoError, match="expected a proof"):
        check_paillier(other.public.n, pow(other.public.h, 2, other.public.n), other.public._proof)


def test_proofs_of_one_key_differ_in_every_number():
    """They are drawn among all answers that there are: a root alone would tell two roots of one number, so factors."""
    key = generate_key(insecure_test_key_bits=256)
    n, g, h, _ = ou_numbers(key)
    p, q = key.secret_numbers[0], key.secret_numbers[1]
    a = ((pow(g, p - 1, p * p) - 1) // p) * pow(p - 1, -1, p) % p
    proofs = np.array([prove_okamoto_uchiyama(n, g, h, p, q, a) for _ in range(20)])
    assert all(len(set(column)) > 1 for column in proofs.T)
    assert all(len(set(column)) == 20 for column in proofs[:, :16].T)
    for proof in proofs:
        check_okamoto_uchiyama(n, g, h, proof.tolist())
    symbols = [[(gmpy2.jacobi(x, p), gmpy2.jacobi(x, q)) for x in proof[16:]] for proof in proofs]
    assert len({pair for row in symbols for pair in row}) == 4


def test_a_modulus_of_three_primes_has_no_proof():
    """Its maker takes roots where there are any, and wins half of 128 tosses."""
    p, q, r = prime(80, 3), prime(81, 7), prime(82, 7)
    n, h = p * q * r, 4
    to_root = pow(n, -1, math.lcm(p - 1, q - 1, r - 1))
    proof = [pow(x, to_root, n) for x in key_proofs._challenges("messages", (n, h), 8)]
    roots, found = [], 0
    for x in key_proofs._challenges("two primes", (n, h), 128):
        root = 1
        for sign in (1, -1, 2, -2):
            if all(gmpy2.jacobi(x * sign, y) == 1 for y in (p, q, r)):
                parts = [pow(x * sign, (y + 1) // 4, y) for y in (p, q, r)]
                root = sum(part * (n // y) * pow(n // y, -1, y) for part, y in zip(parts, (p, q, r), strict=True)) % n
                found += 1
        roots.append(root)
    assert 20 < found < 108
    with pytest.raises(CryptoError, match="two prime factors"):
        check_paillier(n, h, [*proof, *roots])


def test_a_modulus_whose_plaintexts_are_of_two_dimensions_has_no_proof():
    """p divides q - 1: units modulo n-th powers are p^2 classes, of which a message tells p."""
    p = prime(100, 3)
    q = prime(220, 7, p)
    n, g, h = p * p * q, 3, 5
    a = ((pow(g, p - 1, p * p) - 1) // p) * pow(p - 1, -1, p) % p
    with pytest.raises(ZeroDivisionError):
        prove_okamoto_uchiyama(n, g, h, p, q, a)
    roots = key_proofs._square_roots((n, g, h), p, p * p, q)
    guessed = [1, *(secrets.randbelow(n) for _ in range(15))]
    with pytest.raises(CryptoError, match=r"units are g\^m x\^n"):
        check_okamoto_uchiyama(n, g, h, [*guessed, *roots])


def test_a_paillier_modulus_not_prime_to_its_totient_has_no_proof():
    """x^n is not one to one then, and does not tell units apart that the owner can."""
    p = prime(100, 3)
    q = prime(160, 7, p)
    n, h = p * q, 4
    to_root = pow(n // p, -1, (p - 1) * (q - 1) // p)  # the best its maker can do: n-th roots of p-th powers
    proof = [pow(x, to_root, n) for x in key_proofs._challenges("messages", (n, h), 8)]
    with pytest.raises(CryptoError, match=r"units are x\^n"):
        check_paillier(n, h, [*proof, *key_proofs._square_roots((n, h), p, p, q)])


@pytest.mark.parametrize("what", ["messages", "two primes"])
def test_numbers_that_are_no_units_prove_nothing(what):
    """A multiple of a small factor has roots where most units have none: a false key would pass half as often again."""
    p, q = 65539, 2**127 - 1
    n, counts = p * q, {"messages": 8, "two primes": 128}

    def multiples(h, statement):
        return sum(x % p == 0 for x in key_proofs._challenges(statement, (n, h), counts[statement]))

    h = next(h for h in range(2, n) if all((multiples(h, name) > 0) == (name == what) for name in counts))
    to_root = pow(n, -1, (p - 1) * (q - 1))
    roots = [pow(x, to_root, n) for x in key_proofs._challenges("messages", (n, h), 8)]
    squares = []
    for x in key_proofs._challenges("two primes", (n, h), 128):
        square = next(x * s for s in (1, -1, 2, -2) if gmpy2.jacobi(x * s, p) >= 0 and gmpy2.jacobi(x * s, q) == 1)
        parts = [pow(square, (y + 1) // 4, y) for y in (p, q)]
        squares.append(key_proofs._joined(parts[0], p, parts[1], q))
    with pytest.raises(CryptoError, match="prime to n"):
        check_paillier(n, h, [*roots, *squares])
