"""Attacks on encrypted sums at the seam: they succeed where a defence is off or cannot exist, else fail."""

import itertools

import numpy as np
import pytest

from crypto.asking import answered, asked, begun
from treaty.crypto.payload import from_words
from treaty.crypto.sums.encrypted_sums import DisclosedKey, SumsBounds, make_client, make_server

pytestmark = pytest.mark.slow

CIPHERS = pytest.mark.parametrize("cipher", ["ou", "paillier"])
BOUNDS = {"ou": SumsBounds(10, 1 << 16, 1 << 16), "paillier": SumsBounds(10, 1 << 36, 1 << 36)}
BITS = {"ou": 256, "paillier": 160}


class KnownRandomness:
    """The client seeks the rows of a bin by the randomness of its own ciphertexts.

    One column, three bins; the fullest is left out, and a plaintext holds one sum. So an answer that was only added up
    *is* the product of the bin's ciphertexts, randomness and all.
    """

    def __init__(self, cipher, rerandomise=True):
        self.bin, size = np.array([0] * 6 + [1] * 4, np.uint8), {"insecure_test_key_bits": BITS[cipher]}
        offsets, self.bounds = np.array([0, 3], np.int32), BOUNDS[cipher]
        self.client = make_client(cipher, self.bounds, threads=1, **size)
        self.server = make_server(
            cipher, self.client.setup(), self.bin[:, None], offsets, threads=1, rerandomise=rerandomise, **size
        )
        assert self.server._packing.per_plaintext == 1
        self.client.accept_hint("peer", next(self.server.hint()), offsets)
        rng = np.random.default_rng(6)
        self.grad, self.hess = rng.integers(-(1 << 16), 1 << 16, 10), rng.integers(0, 1 << 16, 10)
        self.rows = np.arange(10, dtype=np.int32)
        self.ciphertexts = begun(self.client, self.grad, self.hess)
        self.server.begin_tree(self.ciphertexts, self.rows)
        self.key = self.client._key
        self.modulus = self.key.public.modulus

    def answered(self):
        """The answer's only ciphertext; the sums are right, randomised or not."""
        answer = answered(self.server, asked(self.client, self.rows, np.array([0, 10], np.int32)))
        totals = np.array([[self.grad.sum(), self.hess.sum(), 10]])
        sums = self.client.open("peer", answer, totals)
        expected = [
            [self.grad[self.bin == b].sum(), self.hess[self.bin == b].sum(), (self.bin == b).sum()] for b in (0, 1)
        ]
        assert sums[0, :2].tolist() == expected
        (ciphertext,) = self.plain(answer[1])
        return ciphertext

    def plain(self, packed):
        away = pow(self.modulus.radix, -1, self.modulus.value)
        return [x * away % self.modulus.value for x in from_words(packed)]

    def own(self):
        return self.plain(self.ciphertexts[0].view(np.uint64))

    def matching(self, target, factors, modulus):
        """Sets of four rows (the decrypted count) whose factors' product explains the target."""
        found = []
        for rows in itertools.combinations(range(10), 4):
            product = 1
            for row in rows:
                product = product * factors[row] % modulus
            if (product - target) % modulus == 0:
                found.append(list(rows))
        return found


def paillier_randomness(attack, ciphertext):
    """(c g^{-m})^{1/n} mod n by the key's owner: m disappears modulo n, where g = 1 + n is 1."""
    p, q, n = attack.key.secret_numbers[0], attack.key.secret_numbers[1], attack.key.public.n
    return pow(ciphertext % n, pow(n, -1, (p - 1) * (q - 1)), n)


def okamoto_uchiyama_randomness(attack, ciphertext):
    """c g^{-m} = h^r mod n by the key's owner."""
    n, g = attack.key.public.n, attack.key.public.g
    packed = attack.modulus.pack(attack.modulus.montgomery([ciphertext]))
    (message,) = from_words(attack.key.decrypt(packed, 1))
    return ciphertext * pow(g, -message, n) % n


RANDOMNESS = {"ou": okamoto_uchiyama_randomness, "paillier": paillier_randomness}


@CIPHERS
def test_randomness_of_an_answer_names_the_rows_of_a_bin_without_rerandomisation(cipher):
    attack = KnownRandomness(cipher, rerandomise=False)
    known = [RANDOMNESS[cipher](attack, c) for c in attack.own()]
    assert attack.matching(RANDOMNESS[cipher](attack, attack.answered()), known, attack.key.public.n) == [[6, 7, 8, 9]]


@CIPHERS
def test_randomness_of_an_answer_names_no_rows_with_rerandomisation(cipher):
    attack = KnownRandomness(cipher)
    known = [RANDOMNESS[cipher](attack, c) for c in attack.own()]
    target = RANDOMNESS[cipher](attack, attack.answered())
    factors = {
        "ou": lambda k: (k.secret_numbers[0], k.secret_numbers[1]),
        "paillier": lambda k: (k.secret_numbers[0], k.secret_numbers[1]),
    }[cipher](attack.key)
    for modulus in (attack.key.public.n, *factors):  # nor by the parts that the key's owner can look at
        assert attack.matching(target, known, modulus) == []


@CIPHERS
def test_answer_without_rerandomisation_is_the_product_of_ciphertexts(cipher):
    attack = KnownRandomness(cipher, rerandomise=False)
    assert attack.matching(attack.answered(), attack.own(), attack.modulus.value) == [[6, 7, 8, 9]]
    assert attack.answered() == attack.answered()


@CIPHERS
def test_repeated_query_is_answered_with_fresh_randomness(cipher):
    attack = KnownRandomness(cipher)
    assert attack.answered() != attack.answered()


@CIPHERS
def test_crafted_gradients_read_the_bins_of_single_rows(cipher):
    """Magic numbers: g_i = 2^i makes a bin's sum the list of its rows. No additive cipher prevents it; the audit of
    g and h (`disclosed_sums`) does find it. Marks in the randomness are in `test_marked_rows`."""
    rng = np.random.default_rng(15)
    rows, spied = 200, rng.choice(200, 16, replace=False)
    codes, offsets = rng.integers(0, 8, (rows, 3)).astype(np.uint8), np.array([0, 9, 18, 27], np.int32)
    size = {"threads": 1, "insecure_test_key_bits": 256}
    client = make_client(cipher, SumsBounds(rows, 1 << 16, 1 << 14), **size)
    server = make_server(cipher, client.setup(), codes, offsets, **size)
    client.accept_hint("peer", next(server.hint()), offsets)
    grad, hess = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    grad[spied] = 1 << np.arange(16)
    payload = begun(client, grad, hess)
    server.begin_tree(payload, np.arange(rows, dtype=np.int32))
    answer = answered(server, asked(client, np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32)))
    sums = client.open("peer", answer, np.array([[grad.sum(), 0, rows]]))[0, :, 0]
    members = sums[:, np.newaxis] >> np.arange(16) & 1
    for feature in range(3):
        slots = slice(offsets[feature], offsets[feature + 1])
        assert np.array_equal(np.argmax(members[slots], axis=0), codes[spied, feature])
    auditor = DisclosedKey(client._key, SumsBounds(rows, 1 << 16, 1 << 14))
    auditor.begin_tree(np.zeros(rows, np.int64), hess)
    assert np.array_equal(np.flatnonzero(auditor.open(payload).wrong), np.sort(spied))
