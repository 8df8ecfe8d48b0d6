"""Rows that an active party marks in the randomness of their ciphertexts, under keys made for that.

The attacks succeed where a server re-randomises by powers of the key's own base, and fail where it draws n-th powers;
keys and ciphertexts under which these would not help are refused.
"""

import itertools
import math
import secrets

import gmpy2
import numpy as np
import pytest

from crypto.asking import answered, asked, begun
from marks import slow
from treaty.crypto.additive import ciphers, key_proofs
from treaty.crypto.additive.ciphers import _prime_with_subgroup, generate_key, generate_paillier_key
from treaty.crypto.additive.key_proofs import (
    OKAMOTO_UCHIYAMA_NUMBERS,
    KeyRandomness,
    prove_okamoto_uchiyama,
    prove_paillier,
)
from treaty.crypto.parameters import KEY_BITS
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums import additive_sums
from treaty.crypto.sums.additive_sums import AdditiveSumsClient
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client, make_server
from treaty.crypto.sums.hidden_vectors import Hider
from treaty.errors import CryptoError

ROWS = 60
OFFSETS = np.array([0, 3], np.int32)
PRIMES = [p for p in range(3, 1 << 13) if gmpy2.is_prime(p)]


def joined(x, modulus, y, other):
    return x + modulus * ((y - x) * pow(modulus, -1, other) % other)


@pytest.fixture
def by_powers_of_the_keys_base(monkeypatch):
    """Re-randomise as the package did before: by w^r with r as long as the key says."""

    class Old(KeyRandomness):
        def __init__(self, key, threads):
            super().__init__(key)

    monkeypatch.setattr(additive_sums, "Randomiser", Old)


class Attack:
    """One column, three bins, of which the fullest is left out and the last is empty: the answer is one ciphertext."""

    def __init__(self, cipher, key, insecure_test_key_bits):
        rng = np.random.default_rng(17)
        self.member = rng.random(ROWS) < 0.3
        self.grad, self.hess = rng.integers(-(1 << 10), 1 << 10, ROWS), rng.integers(0, 1 << 8, ROWS)
        self.client = AdditiveSumsClient(key, SumsBounds(ROWS, 1 << 10, 1 << 8))
        self.n, self.modulus = key.public.n, key.public.modulus
        size = {"threads": 1, "insecure_test_key_bits": insecure_test_key_bits}
        codes = self.member.astype(np.uint8)[:, None]
        self.server = make_server(cipher, self.client.setup(), codes, OFFSETS, **size)
        self.client.accept_hint("peer", next(self.server.hint()), OFFSETS)
        (payload,) = begun(self.client, self.grad, self.hess)
        away = pow(self.modulus.radix, -1, self.modulus.value)
        self.honest = [x * away % self.modulus.value for x in from_words(payload.view(np.uint64))]

    def send(self, ciphertexts):
        numbers = [x * self.modulus.radix % self.modulus.value for x in ciphertexts]
        payload = [to_words(numbers, self.modulus.words).view(np.uint8)]
        self.server.begin_tree(payload, np.arange(ROWS, dtype=np.int32))

    def answer(self):
        """The answer, whose sums are right: nobody else notices."""
        order = np.arange(ROWS, dtype=np.int32)
        answer = answered(self.server, asked(self.client, order, np.array([0, ROWS], np.int32)))
        sums = self.client.open("peer", answer, np.array([[self.grad.sum(), self.hess.sum(), ROWS]]))
        of = [self.grad[self.member].sum(), self.hess[self.member].sum(), self.member.sum()]
        assert sums[0, 1].tolist() == of
        (ciphertext,) = from_words(answer[1])
        return ciphertext * pow(self.modulus.radix, -1, self.modulus.value) % self.modulus.value

    def mark(self, marks):
        self.send([c * marks.get(row, 1) % self.modulus.value for row, c in enumerate(self.honest)])


# ---------------------------------------------------------------- h of smooth order


def key_of_smooth_order(bits):
    """A key of the right form whose h has an order of small primes modulo q, longer than the key says; and v, q."""
    insecure = None if bits in KEY_BITS else bits
    stated = 512 if insecure is None else 2 * (bits // 12)
    p, u = _prime_with_subgroup(bits // 3, 3)
    p2, found = p * p, None
    low, high = (1 << (bits - 1)) // p2 + 1, (1 << bits) // p2
    while found is None:
        order = 1
        for prime in secrets.SystemRandom().sample(PRIMES, len(PRIMES)):
            if order.bit_length() > low.bit_length() - 32:
                break
            order *= prime
        lasts = range(low // (2 * order) | 1, high // (2 * order), 2)
        found = next((x for x in lasts if is_order(x, order)), None)
    v, q = order * found, 2 * order * found + 1
    n = p2 * q
    h_p = next(x for x in (pow(y, p * (p - 1) // u, p2) for y in range(2, 99)) if x != 1)
    h_q = next(x for x in (y * y % q for y in range(2, 999)) if all(pow(x, v // l, q) != 1 for l in primes_of(v)))
    a = secrets.randbelow(p - 1) + 1
    g = joined((1 + a * p) * pow(h_p, 5, p2) % p2, p2, pow(h_q, 7, q), q)
    h = joined(h_p, p2, h_q, q)
    proof = prove_okamoto_uchiyama(n, g, h, p, q, a)
    public = ciphers.OUPublicKey(n, g, h, stated, proof, insecure_test_key_bits=insecure)
    return ciphers.OUPrivateKey(p, q, u, v, a, public), v, q


def is_order(last, order):
    """Tell whether q = 2 order last + 1 is a prime that the proof of a key takes, and so is `last`."""
    q = 2 * order * last + 1
    return q % 8 == 7 and gmpy2.is_prime(last) and gmpy2.is_prime(q)


def primes_of(v):
    small = [p for p in PRIMES if v % p == 0]
    for p in small:
        v //= p
    return [*small, v]


def logarithm(x, h, v, q):
    """log_h x for h of order v modulo q, prime by prime (Pohlig and Hellman), each by small and large steps."""
    found, modulus = 0, 1
    for l in primes_of(v):
        base, target = pow(h, v // l, q), pow(x, v // l, q)
        steps, small, power = int(l**0.5) + 1, {}, 1
        for i in range(steps):
            small[power] = i
            power = power * base % q
        large, at, part = pow(base, -steps, q), target, 0
        while at not in small:
            at, part = at * large % q, part + steps
        found, modulus = joined(found, modulus, (part + small[at]) % l, l), modulus * l
    return found


def marks_read(attack, key, first, count, v, q):
    """Bits of the logarithm of an answer's randomness from `first` on: who is in the bin, if nothing else is there."""
    answer, n = attack.answer(), attack.n
    packed = to_words([answer * attack.modulus.radix % n], attack.modulus.words)
    (message,) = from_words(key.decrypt(packed, 1))
    left = answer * pow(key.public.g, -message, n) % n
    halved = logarithm(left * left % q, key.public.h % q, v, q) * pow(2, -1, v) % v  # a random power may be no square
    return halved >> first & ((1 << count) - 1)


def marked(bits):
    """An attack whose ciphertexts are g^m h^mark; where marks begin, beyond r, and how many there are room for."""
    key, v, q = key_of_smooth_order(bits)
    attack = Attack("ou", key, None if bits in KEY_BITS else bits)
    n, g, h = key.public.n, key.public.g, key.public.h
    first = key.public.subgroup_bits + 80 + 1
    count = min(ROWS, v.bit_length() - first - 2)
    packed = attack.client._packing.pack_rows(attack.grad, attack.hess)
    marks = [1 << (first + row) if row < count else 0 for row in range(ROWS)]
    attack.send([pow(g, m, n) * pow(h, mark, n) % n for m, mark in zip(from_words(packed), marks, strict=True)])
    sought = sum(1 << row for row in range(count) if attack.member[row])
    return sought, lambda: marks_read(attack, key, first, count, v, q)


@pytest.mark.parametrize("bits", [600, slow(3072)])
@pytest.mark.usefixtures("by_powers_of_the_keys_base")
def test_an_order_longer_than_the_key_says_shows_rows_where_its_base_hides_them(bits):
    sought, read = marked(bits)
    assert sought.bit_count() > 2
    assert read() == sought


@pytest.mark.parametrize("bits", [600, slow(3072)])
def test_an_order_longer_than_the_key_says_shows_no_rows(bits):
    """The key is accepted: its form is right, and nothing rests on the order of h."""
    sought, read = marked(bits)
    found = [read() for _ in range(4)]
    assert sought not in found
    assert len(set(found)) > 2


# ---------------------------------------------------------------- marks outside of what h generates


def paillier_signs():
    """Of one marked row in the bin and of one that is not: the answers' Jacobi symbols modulo p, asked 40 times."""
    key = generate_paillier_key(insecure_test_key_bits=256)
    p, q = key.secret_numbers[0], key.secret_numbers[1]
    no_square = joined(p * p - 1, p * p, 1, q * q)  # (p - 1) / 2 is odd
    attack, signs = Attack("paillier", key, 256), []
    for inside in (True, False):
        attack.mark({int(np.flatnonzero(attack.member == inside)[0]): no_square})
        signs.append({gmpy2.jacobi(attack.answer(), p) for _ in range(40)})
    return signs


@pytest.mark.usefixtures("by_powers_of_the_keys_base")
def test_a_mark_that_is_no_square_shows_a_row_where_squares_hide_it():
    assert paillier_signs() == [{-1}, {1}]


def test_a_mark_that_is_no_square_shows_no_row():
    assert paillier_signs() == [{-1, 1}, {-1, 1}]


SMOOTH = 131101


def paillier_classes():
    """Under an h that generates only a part: the answers' parts of order SMOOTH, and the one that marks make."""
    q = generate_paillier_key(insecure_test_key_bits=256).secret_numbers[1]
    p = next(p for i in itertools.count(1 << 100) if gmpy2.is_prime(p := 2 * SMOOTH * (2 * i + 1) + 1) and p % 8 == 3)
    n, h = p * q, pow(7, 2 * SMOOTH, p * q)
    public = ciphers.PaillierPublicKey(n, h, prove_paillier(n, h, p, q), insecure_test_key_bits=200)
    attack = Attack("paillier", ciphers.PaillierPrivateKey(p, q, public), 200)
    t = joined(pow(3, (p - 1) // SMOOTH * p, p * p), p * p, 1, q * q)
    attack.mark(dict.fromkeys(range(0, ROWS, 2), t))
    # the client's own ciphertexts have powers of h alone, so that nothing else is of that order
    marks = pow(t, (p - 1) // SMOOTH * int(attack.member[::2].sum()), p)
    return [pow(attack.answer(), (p - 1) // SMOOTH, p) for _ in range(3)], marks


@pytest.mark.usefixtures("by_powers_of_the_keys_base")
def test_a_base_that_generates_little_shows_rows_where_it_hides_them():
    found, marks = paillier_classes()
    assert found == [marks] * 3 != [1] * 3


def test_a_base_that_generates_little_shows_no_rows():
    found, marks = paillier_classes()
    assert marks not in found  # by chance in 1 run of 40,000
    assert len(set(found)) > 1


# ---------------------------------------------------------------- refused


def key_of_two_dimensions():
    """p divides q - 1, so that units modulo q have classes modulo n-th powers, too; t is of order p modulo q."""
    p, u = _prime_with_subgroup(200, 3)
    while True:
        v = int(gmpy2.next_prime(secrets.randbits(50)))
        q = 2 * v * p * secrets.randbits(60) + 1
        if q % 8 == 7 and gmpy2.is_prime(q):
            break
    n, p2 = p * p * q, p * p
    h_p, h_q, t = pow(2, p * (p - 1) // u, p2), pow(3, (q - 1) // v, q), pow(5, (q - 1) // p, q)
    assert 1 not in (h_p, h_q, t)
    g, h = joined((1 + p) * h_p % p2, p2, h_q, q), joined(h_p, p2, h_q, q)
    public = ciphers.OUPublicKey(n, g, h, 100, [1] * OKAMOTO_UCHIYAMA_NUMBERS, insecure_test_key_bits=400)
    return ciphers.OUPrivateKey(p, q, u, v, 1, public), joined(1, p2, t, q), q


def test_a_key_with_room_for_a_second_message_is_refused(monkeypatch):
    """n-th powers would not hide it: the marks are read where the proof of the key is not looked at."""
    key, t, q = key_of_two_dimensions()
    with pytest.raises(CryptoError, match="expected a proof that units are"):
        Attack("ou", key, 400)
    monkeypatch.setattr(key_proofs, "check_okamoto_uchiyama", lambda *_: None)
    attack = Attack("ou", key, 400)
    attack.mark(dict.fromkeys(range(0, ROWS, 2), t))
    to_class = (q - 1) // key.secret_numbers[0]
    assert pow(attack.answer(), to_class, q) == pow(t, to_class * int(attack.member[::2].sum()), q) != 1


@pytest.mark.parametrize(("cipher", "make"), [("ou", generate_key), ("paillier", generate_paillier_key)])
def test_ciphertexts_that_are_no_units_are_refused(cipher, make):
    """A multiple of q makes every product a multiple of q, and n-th powers leave it one."""
    key = make(insecure_test_key_bits=256)
    attack = Attack(cipher, key, 256)
    for factor in (key.secret_numbers[0], key.public.n // key.secret_numbers[0], 0):
        with pytest.raises(CryptoError, match="prime to n - at the start of a tree"):
            attack.mark({33: factor})
    attack.mark({33: 1})


def test_blind_sums_refuse_ciphertexts_that_are_no_units():
    codes, size = np.zeros((4, 1), np.uint8), {"threads": 1, "insecure_test_key_bits": 256, "blind": True}
    client = make_client("ou", SumsBounds(4, 10, 10), **size)
    server = make_server("ou", client.setup(), codes, OFFSETS, **size)
    rows = np.arange(4, dtype=np.int32)
    server.begin_tree(begun(client, np.zeros(4, np.int64), np.zeros(4, np.int64)), None)
    query = asked(client, rows, np.array([0, 4], np.int32))
    modulus = client._key.public.modulus
    query[0] = query[0].copy()
    query[0][0, 2] = to_words([client._key.secret_numbers[0]], modulus.words).view(np.uint8)[0]
    with pytest.raises(CryptoError, match="prime to n - in a query"):
        answered(server, query)


def test_what_others_hide_from_each_other_rests_on_the_key_s_base():
    """Not an owner's attack, and not prevented: see docs/explanation/ciphers.md. The reader needs n, g and h alone."""
    orders = 65537, 65539
    p, q = (_prime_of_order(170, 3, orders[0]), _prime_of_order(172, 7, orders[1]))
    n, p2 = p * p * q, p * p
    h_p, h_q = _base(orders[0], p * (p - 1), p2), _base(orders[1], q - 1, q)
    h, g = joined(h_p, p2, h_q, q), joined((1 + p) * pow(h_p, 5, p2) % p2, p2, pow(h_q, 7, q), q)
    size = n.bit_length()
    made = ciphers.OUPublicKey(n, g, h, 512, prove_okamoto_uchiyama(n, g, h, p, q, 1), insecure_test_key_bits=size)
    hider = Hider(ciphers.OUPublicKey.from_payload(made.to_payload(), size), 64, 1)
    (packed,) = from_words(hider.hide(np.array([-37]), 8))
    primes = (x for x in range(65537, 65600) if gmpy2.is_prime(x))
    square = next(x for x in (math.gcd(pow(h, prime, n) - 1, n) for prime in primes) if x > 1)
    found = math.isqrt(square)
    of_c, of_g = ((pow(x, found - 1, square) - 1) // found for x in (packed * pow(hider.modulus.radix, -1, n), g))
    assert of_c * pow(of_g, -1, found) % found == -37 + 128


def _prime_of_order(bits, residue, order):
    """A prime of about so many bits, of this residue modulo 8, and 1 modulo `order`."""
    while True:
        p = 2 * order * secrets.randbits(bits - order.bit_length() - 1) + 1
        if p % 8 == residue and gmpy2.is_prime(p):
            return p


def _base(order, group_order, modulus):
    return next(x for k in range(2, 100) if (x := pow(k, group_order // order, modulus)) != 1)
