"""Attacks on encrypted sums at the seam: they succeed where a defence is off or cannot exist, else fail."""

import itertools
import secrets

import gmpy2
import numpy as np
import pytest

from treaty.crypto.additive import okamoto_uchiyama, paillier
from treaty.crypto.additive.key_generation import generate_key, generate_paillier_key
from treaty.crypto.additive.montgomery import from_words, to_words
from treaty.crypto.additive.randomiser import Randomiser
from treaty.crypto.sums.additive_sums import AdditiveSumsClient
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client, make_server
from treaty.errors import CryptoError

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
        self.ciphertexts = self.client.begin_tree(self.grad, self.hess)
        self.server.begin_tree(self.ciphertexts, self.rows)
        self.key = self.client._key
        self.modulus = self.key.public.modulus

    def answered(self):
        """The answer's only ciphertext; the sums are right, randomised or not."""
        answer = self.server.answer(self.client.query(self.rows, np.array([0, 10], np.int32)))
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
    p, q, n = attack.key._p, attack.key._q, attack.key.public.n
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
    factors = {"ou": lambda k: (k._p, k._mod_q.modulus.value), "paillier": lambda k: (k._p, k._q)}[cipher](attack.key)
    for modulus in (attack.key.public.n, *factors):  # nor by the parts that the key's owner can look at
        assert attack.matching(target, known, modulus) == []


@CIPHERS
def test_answer_without_rerandomisation_is_the_product_of_ciphertexts(cipher):
    attack = KnownRandomness(cipher, rerandomise=False)
    assert attack.matching(attack.answered(), attack.own(), attack.modulus.value) == [[6, 7, 8, 9]]
    assert attack.answered() == attack.answered()


@CIPHERS
def test_short_exponent_does_not_hide_from_the_key_owner(monkeypatch, cipher):
    """Why r must cover the order of the base: with 8 bits the owner tries all powers."""
    monkeypatch.setattr(
        Randomiser,
        "exponents",
        lambda self, rows: np.random.default_rng(7).integers(0, 256, (rows, 1)).astype(np.uint64),
    )
    attack = KnownRandomness(cipher)
    answer, own, modulus = attack.answered(), attack.own(), attack.modulus.value
    product, base = own[6] * own[7] * own[8] * own[9], attack.key.public.randomiser_base
    assert any((product * pow(base, r, modulus) - answer) % modulus == 0 for r in range(256))


@CIPHERS
def test_repeated_query_is_answered_with_fresh_randomness(cipher):
    attack = KnownRandomness(cipher)
    assert attack.answered() != attack.answered()


@CIPHERS
def test_crafted_gradients_read_the_bins_of_single_rows(cipher):
    """Magic numbers: g_i = 2^i makes a bin's sum the list of its rows. No additive cipher prevents it; the audit of
    g and h, by way of `decrypt_rows`, does find it."""
    rng = np.random.default_rng(15)
    rows, spied = 200, rng.choice(200, 16, replace=False)
    codes, offsets = rng.integers(0, 8, (rows, 3)).astype(np.uint8), np.array([0, 9, 18, 27], np.int32)
    size = {"threads": 1, "insecure_test_key_bits": 256}
    client = make_client(cipher, SumsBounds(rows, 1 << 16, 1 << 14), **size)
    server = make_server(cipher, client.setup(), codes, offsets, **size)
    client.accept_hint("peer", next(server.hint()), offsets)
    grad, hess = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    grad[spied] = 1 << np.arange(16)
    payload = client.begin_tree(grad, hess)
    server.begin_tree(payload, np.arange(rows, dtype=np.int32))
    answer = server.answer(client.query(np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32)))
    sums = client.open("peer", answer, np.array([[grad.sum(), 0, rows]]))[0, :, 0]
    members = sums[:, np.newaxis] >> np.arange(16) & 1
    for feature in range(3):
        slots = slice(offsets[feature], offsets[feature + 1])
        assert np.array_equal(np.argmax(members[slots], axis=0), codes[spied, feature])
    shown = client.decrypt_rows(payload)
    assert np.array_equal(shown[0], grad)
    assert np.array_equal(shown[1], hess)


SMOOTH = 131101  # a prime order in which logarithms are looked up; 17 bits for 17 rows


def joined(x, modulus, y, other):
    return x + modulus * ((y - x) * pow(modulus, -1, other) % other)


def okamoto_uchiyama_key_with_room_for_marks():
    """A valid key with q - 1 = 2 v SMOOTH k, and t of order SMOOTH modulo q, 1 modulo p^2."""
    key = generate_key(insecure_test_key_bits=600)
    p, u, v, square = key._p, key._u, key._v, key._p**2
    while True:
        q = 2 * v * SMOOTH * secrets.randbits(60) + 1
        t, h_q = (pow(2 + secrets.randbelow(q - 3), (q - 1) // order, q) for order in (SMOOTH, v))
        if gmpy2.is_prime(q) and 1 not in (t, h_q):
            break
    g, h = (joined(x % square, square, pow(h_q, r, q), q) for x, r in ((key.public.g, 5), (key.public.h, 1)))
    a = ((pow(g, u, square) - 1) // p) * pow(u, -1, p) % p
    public = okamoto_uchiyama.PublicKey(square * q, g, h, key.public.subgroup_bits, insecure_test_key_bits=400)
    return okamoto_uchiyama.PrivateKey(p, q, u, v, a, public), q, joined(1, square, t, q)


class MarkedRows:
    """The client multiplies some rows' ciphertexts by numbers that no power of h hides; their decryption is right.

    One column, three bins, of which the fullest is left out and the last is empty: the answer is one ciphertext.
    """

    def __init__(self, cipher, key, bits, marks):
        rng = np.random.default_rng(17)
        rows = 60
        self.member = rng.random(rows) < 0.3
        self.grad, self.hess = rng.integers(-(1 << 10), 1 << 10, rows), rng.integers(0, 1 << 8, rows)
        self.client = AdditiveSumsClient(key, SumsBounds(rows, 1 << 10, 1 << 8))
        offsets, self.modulus = np.array([0, 3], np.int32), key.public.modulus
        size = {"threads": 1, "insecure_test_key_bits": bits}
        server = make_server(cipher, self.client.setup(), self.member.astype(np.uint8)[:, None], offsets, **size)
        self.client.accept_hint("peer", next(server.hint()), offsets)
        (payload,) = self.client.begin_tree(self.grad, self.hess)
        numbers = from_words(payload.view(np.uint64))
        for row, mark in marks.items():  # a Montgomery form times a number is the product's Montgomery form
            numbers[row] = numbers[row] * mark % self.modulus.value
        self.payload = [to_words(numbers, self.modulus.words).view(np.uint8)]
        order = np.arange(rows, dtype=np.int32)
        server.begin_tree(self.payload, order)
        answer = server.answer(self.client.query(order, np.array([0, rows], np.int32)))
        sums = self.client.open("peer", answer, np.array([[self.grad.sum(), self.hess.sum(), rows]]))
        member_sums = [self.grad[self.member].sum(), self.hess[self.member].sum(), self.member.sum()]
        assert sums[0, 1].tolist() == member_sums
        (ciphertext,) = from_words(answer[1])
        self.answer = ciphertext * pow(self.modulus.radix, -1, self.modulus.value) % self.modulus.value


def test_audit_finds_okamoto_uchiyama_rows_marked_in_their_randomness():
    key, q, t = okamoto_uchiyama_key_with_room_for_marks()
    spied = np.arange(20, 37)
    attack = MarkedRows("ou", key, 400, {row: pow(t, 1 << i, key.public.n) for i, row in enumerate(spied)})
    # h^r has gone in the v-th power: what is left is t to the sum of the marks of the rows in the bin
    base, power, logarithms = pow(t, key._v, q), 1, {}
    for i in range(SMOOTH):
        logarithms[power] = i
        power = power * base % q
    members = logarithms[pow(attack.answer, key._v, q)] >> np.arange(17) & 1
    sought = sum(1 << i for i, row in enumerate(spied) if attack.member[row]) % SMOOTH
    assert np.array_equal(members, sought >> np.arange(17) & 1)  # mod SMOOTH, of 17 bits: all but the largest sums
    with pytest.raises(CryptoError, match="other in 17 of 60 rows"):
        attack.client.decrypt_rows(attack.payload)


def test_audit_finds_a_paillier_row_marked_in_its_randomness():
    key = generate_paillier_key(insecure_test_key_bits=256)
    p, q = key._p, key._q
    sign = joined(p * p - 1, p * p, 1, q * q)  # no square: (p - 1) / 2 is odd
    read = []
    for row in range(12):
        attack = MarkedRows("paillier", key, 256, {row: sign})
        read.append(gmpy2.jacobi(attack.answer, p) == -1)
        with pytest.raises(CryptoError, match="other in 1 of 60 rows"):
            attack.client.decrypt_rows(attack.payload)
    assert np.array_equal(read, attack.member[:12])


def test_audit_finds_a_paillier_base_that_leaves_room_for_marks():
    """h = x^{2 SMOOTH} generates only a part of the squares; t of order SMOOTH outlasts w^r."""
    honest = generate_paillier_key(insecure_test_key_bits=256)
    q, l = honest._q, honest._l
    p = next(p for i in itertools.count(1 << 100) if gmpy2.is_prime(p := 2 * SMOOTH * (2 * i + 1) + 1))
    h = pow(7, 2 * SMOOTH, p * q)
    public = paillier.PublicKey(p * q, h, insecure_test_key_bits=200)
    t = joined(pow(3, (p - 1) // SMOOTH * p, p * p), p * p, 1, q * q)
    for k in (1, SMOOTH):
        key = paillier.PrivateKey(p, q, k, l, public)
        attack = MarkedRows("paillier", key, 200, {row: t for row in range(0, 60, 2)})
        marked = pow(t, int(attack.member[::2].sum()), p)
        assert pow(attack.answer, (p - 1) // SMOOTH, p) == pow(marked, (p - 1) // SMOOTH, p) != 1
        with pytest.raises(CryptoError, match="in the private key"):
            attack.client.decrypt_rows(attack.payload)
