import secrets
from types import SimpleNamespace

import gmpy2
import numpy as np
import phe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import slow
from treaty.crypto.additive.ciphers import PaillierPrivateKey, PaillierPublicKey, generate_paillier_key
from treaty.crypto.additive.key_proofs import KeyRandomness, Randomiser
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import from_words, to_words
from treaty.errors import CryptoError

P, Q = 340282366920938463463374607431768211507, 302231454903657293676544999999999999927  # for known answers only


class PlainKey:
    """Paillier by the textbook, in Python integers: g = 1 + n, any r in Z*_n."""

    def __init__(self, key):
        self.modulus = key.public.modulus
        self.p, self.q, self.n = key.secret_numbers[0], key.secret_numbers[1], key.public.n
        self.order = (self.p - 1) * (self.q - 1)

    def encrypt(self, m):
        n2 = self.n**2
        return pow(1 + self.n, m, n2) * pow(2 + secrets.randbelow(self.n - 2), self.n, n2) % n2

    def decrypt(self, c):
        return (pow(c, self.order, self.n**2) - 1) // self.n * pow(self.order, -1, self.n) % self.n

    def to_packed(self, ciphertexts):
        return to_words([c * self.modulus.radix % self.modulus.value for c in ciphertexts], self.modulus.words)

    def from_packed(self, packed):
        away = pow(self.modulus.radix, -1, self.modulus.value)
        return [x * away % self.modulus.value for x in from_words(packed)]


def joined(x, modulus, y, other):
    """The number that is x modulo one and y modulo the other."""
    return x + modulus * ((y - x) * pow(modulus, -1, other) % other)


@pytest.fixture(scope="module")
def key():
    return generate_paillier_key(insecure_test_key_bits=256)


@pytest.fixture(scope="module")
def plain(key):
    return PlainKey(key)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_owner_encryption_is_read_by_the_textbook_decryption(key, plain, data):
    limit = (1 << (key.public.plaintext_bits - 2)) - 1
    messages = [*data.draw(st.lists(st.integers(0, limit), max_size=4)), 0, 1, limit]
    packed = key.encrypt(to_words(messages, 4), 1)
    assert [plain.decrypt(c) for c in plain.from_packed(packed)] == messages
    assert from_words(key.decrypt(packed, 1)) == messages


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 2**200), min_size=1, max_size=5))
def test_textbook_encryption_is_read_by_decryption(key, plain, messages):
    packed = plain.to_packed([plain.encrypt(m) for m in messages])
    assert from_words(key.decrypt(packed, 2)) == messages


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 2**200), min_size=1, max_size=8))
def test_product_of_ciphertexts_decrypts_to_the_sum(key, messages):
    ciphertexts = key.encrypt(to_words(messages, 4), 1)
    total = np.empty((1, key.public.modulus.words), np.uint64)
    index = np.arange(len(messages), dtype=np.int32)
    key.public.modulus.segment_products(ciphertexts, index, np.array([0, len(messages)], np.int64), total)
    assert from_words(key.decrypt(total, 1)) == [sum(messages)]


@pytest.mark.parametrize("bits", [96, 97, 130, 255, 512])
def test_small_and_odd_sizes_encrypt_and_decrypt(bits):
    key = generate_paillier_key(insecure_test_key_bits=bits)
    limit = (1 << (bits - 2)) - 1
    messages = [0, 1, limit, limit // 3]
    packed = key.encrypt(to_words(messages, -(-bits // 64)), 1)
    assert from_words(key.decrypt(packed, 1)) == messages
    assert [PlainKey(key).decrypt(c) for c in PlainKey(key).from_packed(packed)] == messages


@pytest.mark.slow
@pytest.mark.parametrize("bits", [512, 2048])
def test_phe_reads_our_ciphertexts_and_we_read_its(bits):
    key = generate_paillier_key(bits, insecure_test_key_bits=None if bits == 2048 else bits)
    plain = PlainKey(key)
    theirs = phe.PaillierPublicKey(key.public.n)
    secret = phe.PaillierPrivateKey(theirs, key.secret_numbers[0], key.secret_numbers[1])
    messages = [0, 1, *(secrets.randbits(bits - 3) for _ in range(4))]
    words = -(-bits // 64)
    ours = plain.from_packed(key.encrypt(to_words(messages, words), 1))
    assert [secret.raw_decrypt(c) for c in ours] == messages
    packed = plain.to_packed([theirs.raw_encrypt(m) for m in messages])
    assert from_words(key.decrypt(packed, 1)) == messages
    mixed = plain.to_packed([a * theirs.raw_encrypt(5) % key.public.n**2 for a in ours])
    assert from_words(key.decrypt(mixed, 1)) == [m + 5 for m in messages]


def test_known_key_gives_the_known_ciphertext():
    """By hand: with r_p = r_q = 3 the ciphertext is (1 + n m) h^{3 n} mod n^2."""
    p, q = (int(gmpy2.next_prime(x)) for x in (P, Q))
    n, h, message = p * q, pow(5, 2, p * q), 123456789
    key = PaillierPrivateKey(p, q, PaillierPublicKey(n, h, insecure_test_key_bits=250))
    three = to_words([3], 2)
    square_p, square_q = (s.encrypt(to_words([message], 4), three) for s in (key._square_p, key._square_q))
    modulus = key.public.modulus
    packed = modulus.pack(modulus.add(square_p, square_q))
    assert PlainKey(key).from_packed(packed) == [(1 + n * message) * pow(h, 3 * n, n * n) % (n * n)]


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "threads"), [(2048, 1), slow(2048, 2), slow(3072, 1), slow(3072, 2), slow(4096, 1)])
def test_real_keys_encrypt_randomise_and_decrypt(bits, threads):
    key = generate_paillier_key(bits)
    limit = (1 << (bits - 2)) - 1
    messages = [0, 1, limit, *(secrets.randbits(79) for _ in range(150))]
    packed = key.encrypt(to_words(messages, bits // 64), threads)
    assert packed.shape == (len(messages), bits // 32)
    assert from_words(key.decrypt(packed, threads)) == messages
    modulus, randomiser = key.public.modulus, Randomiser(key.public, 1)
    hidden = modulus.pack(modulus.multiply(modulus.unpack(packed[:3]), randomiser.factors(randomiser.exponents(3))))
    assert not (hidden == packed[:3]).all(axis=1).any()
    assert from_words(key.decrypt(hidden, 1)) == messages[:3]


def randomness(plain, ciphertext):
    """The n-th root modulo n of c (1 + n m)^{-1}, which the owner can take."""
    return pow(ciphertext % plain.n, pow(plain.n, -1, plain.order), plain.n)


def test_owner_ciphertexts_draw_their_randomness_from_the_squares(key, plain):
    """As h^r does; the squares are the numbers of order dividing (p - 1)(q - 1) / 4."""
    for c in plain.from_packed(key.encrypt(to_words(range(200), 4), 1)):
        root = randomness(plain, c)
        assert gmpy2.jacobi(root, plain.p) == gmpy2.jacobi(root, plain.q) == 1
        assert pow(root, plain.n, plain.n**2) * (1 + plain.n * plain.decrypt(c)) % plain.n**2 == c


def test_owner_randomness_is_uniform_among_the_squares():
    """Of one message, c mod p^2 takes (p - 1) / 2 values equally often."""
    p, q, order = 2027, 4294967291, 1013  # p = 2 * 1013 + 1; n is far too small for the checks of a public key
    n = p * q
    h = next(x * x % n for x in range(3, 99) if x * x % p != 1)
    public = SimpleNamespace(n=n, h=h, plaintext_bits=n.bit_length(), modulus=Modulus(n * n))
    public.randomiser_base = pow(h, n, n * n)
    key = PaillierPrivateKey(p, q, public)
    ciphertexts = PlainKey(key).from_packed(key.encrypt(to_words([5] * 50_000, 1), 1))
    counts = np.unique([c % p**2 for c in ciphertexts], return_counts=True)[1]
    assert len(counts) == order
    expected = len(ciphertexts) / order
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < order - 1 + 6 * np.sqrt(2 * (order - 1))  # false alarms in fewer than one run of a million


def test_key_randomness_raises_the_nth_power_of_h(key, plain):
    randomness, modulus = KeyRandomness(key.public), key.public.modulus
    exponents = randomness.exponents(5)
    assert max(x.bit_length() for x in from_words(exponents)) <= 256 + 80
    factors = plain.from_packed(modulus.pack(randomness.factors(exponents)))
    assert factors == [pow(key.public.h, plain.n * r, plain.n**2) for r in from_words(exponents)]
    assert [plain.decrypt(f) for f in factors] == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2048, 3072])
def test_randomness_covers_the_order_of_h_and_80_bits_more(bits):
    key = generate_paillier_key(bits)
    assert key.public.randomness_bits == bits + 80
    exponents = from_words(KeyRandomness(key.public).exponents(200))
    assert max(exponents).bit_length() == bits + 80  # by chance shorter with probability 2^-200
    assert len(set(exponents)) == 200


def test_encryption_with_a_given_keystream_repeats_itself(key):
    messages = to_words([1, 2, 3], 1)
    first, second = (key.encrypt(messages, 1, Keystream(b"k" * 32)) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, key.encrypt(messages, 1))


def test_same_message_is_never_encrypted_alike(key):
    assert len(set(from_words(key.encrypt(to_words([7] * 500, 1), 2)))) == 500


def test_messages_beyond_the_plaintext_are_refused(key):
    with pytest.raises(CryptoError, match="lower fractional_bits"):
        key.encrypt(to_words([1 << 254], 4), 1)
    with pytest.raises(CryptoError, match="lower fractional_bits"):
        key.encrypt(to_words([1 << 300], 7), 1)


def test_decryption_of_something_else_is_an_error(key, plain):
    with pytest.raises(CryptoError, match="at decryption"):
        key.decrypt(plain.to_packed([3 * plain.p]), 1)


def test_key_below_2048_bits_is_refused_unless_a_test_says_so(key):
    n, h = key.public.n, key.public.h
    with pytest.raises(CryptoError, match="expected a key"):
        PaillierPublicKey(n, h)
    with pytest.raises(CryptoError, match="expected a key"):
        PaillierPublicKey(n, h, insecure_test_key_bits=257)
    assert PaillierPublicKey(n, h, insecure_test_key_bits=256).n == n


FAULTS = {
    "even": lambda k: (k.n - 1, 4),
    "small factor": lambda k: (65521 * (k.n // 65521 | 1), 4),
    "prime": lambda k: (2**255 - 19, 4),
    "square": lambda k: ((2**130 - 5) ** 2, 4),
    "h is one": lambda k: (k.n, 1),
    "h is minus one": lambda k: (k.n, k.n - 1),
    "h is zero": lambda k: (k.n, 0),
    "h too large": lambda k: (k.n, 4 + k.n),
    "h is one modulo p": lambda k: (k.n, 1 + 3 * k.p),
    "h is minus one modulo q": lambda k: (k.n, 7 * k.q - 1),
    "h shares a factor": lambda k: (k.n, 2 * k.p),
    "h is no square": lambda k: (k.n, next(x for x in range(2, 99) if gmpy2.jacobi(x, k.n) == -1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_malformed_public_key_is_refused(plain, fault):
    with pytest.raises(CryptoError, match="in the public key"):
        PaillierPublicKey(*FAULTS[fault](plain), insecure_test_key_bits=240)


def test_public_key_goes_through_its_payload(key):
    again = PaillierPublicKey.from_payload(key.public.to_payload(), 256)
    assert (again.n, again.h, again.randomiser_base) == (key.public.n, key.public.h, key.public.randomiser_base)
    assert np.array_equal(again.to_payload()[0], key.public.to_payload()[0])
    with pytest.raises(CryptoError, match="public key"):
        PaillierPublicKey.from_payload(key.public.to_payload()[:1], 256)
