import secrets

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.additive.ciphers import OUPublicKey, generate_key
from treaty.crypto.additive.key_proofs import KeyRandomness, Randomiser
from treaty.crypto.keystream import Keystream
from treaty.crypto.payload import from_words, to_words
from treaty.errors import CryptoError


class PlainKey:
    """Okamoto-Uchiyama by the textbook, in Python integers."""

    def __init__(self, key):
        self.public = key.public
        self.n, self.g, self.h = key.public.n, key.public.g, key.public.h
        self.p, self.q, self.u, self.v = (
            key.secret_numbers[0],
            key.secret_numbers[1],
            key.secret_numbers[2],
            key.secret_numbers[3],
        )

    def encrypt(self, m):
        return pow(self.g, m % self.n, self.n) * pow(self.h, secrets.randbits(2 * self.n.bit_length()), self.n) % self.n

    def decrypt(self, c):
        p2 = self.p**2
        c_p, g_p = (pow(x % p2, self.p - 1, p2) for x in (c, self.g))
        return (c_p - 1) // self.p * pow((g_p - 1) // self.p, -1, self.p) % self.p

    def signed(self, packed):
        """Decrypted numbers modulo p, those above p / 2 standing for negative ones."""
        return [m - self.p if 2 * m > self.p else m for m in from_words(packed)]

    def to_packed(self, ciphertexts):
        modulus = self.public.modulus
        return to_words([c * modulus.radix % self.n for c in ciphertexts], modulus.words)

    def from_packed(self, packed):
        away = pow(self.public.modulus.radix, -1, self.n)
        return [x * away % self.n for x in from_words(packed)]


def joined(x, modulus, y, other):
    """The number that is x modulo one and y modulo the other."""
    return x + modulus * ((y - x) * pow(modulus, -1, other) % other)


@pytest.fixture(scope="module")
def key():
    return generate_key(insecure_test_key_bits=400)


@pytest.fixture(scope="module")
def plain(key):
    return PlainKey(key)


def chi_square_limit(cells):
    """Six standard deviations above the mean: false alarms in fewer than one run of a million."""
    return cells - 1 + 6 * np.sqrt(2 * (cells - 1))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_owner_encryption_is_read_by_the_textbook_decryption(key, plain, data):
    limit = (1 << (key.public.plaintext_bits - 2)) - 1
    messages = [*data.draw(st.lists(st.integers(0, limit), max_size=4)), 0, 1, limit]
    packed = key.encrypt(to_words(messages, 3), 1)
    assert [plain.decrypt(c) for c in plain.from_packed(packed)] == messages


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_textbook_encryption_is_read_by_decryption(key, plain, data):
    limit = (1 << (key.public.plaintext_bits - 2)) - 1
    values = [*data.draw(st.lists(st.integers(-limit, limit), max_size=4)), 0, -1, limit, -limit]
    assert plain.signed(key.decrypt(plain.to_packed([plain.encrypt(x) for x in values]), 1)) == values


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-(2**100), 2**100), min_size=1, max_size=8))
def test_product_of_ciphertexts_decrypts_to_the_sum(key, plain, values):
    ciphertexts = plain.to_packed([plain.encrypt(x) for x in values])
    total = np.empty((1, key.public.modulus.words), np.uint64)
    index = np.arange(len(values), dtype=np.int32)
    key.public.modulus.segment_products(ciphertexts, index, np.array([0, len(values)], np.int64), total)
    assert plain.signed(key.decrypt(total, 1)) == [sum(values)]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2048, 3072])
@pytest.mark.parametrize("threads", [1, 2])
def test_real_keys_encrypt_add_randomise_and_decrypt(bits, threads):
    key = generate_key(bits)
    limit = (1 << (key.public.plaintext_bits - 2)) - 1
    messages = [0, 1, limit, *(secrets.randbits(79) for _ in range(600))]
    packed = key.encrypt(to_words(messages, -(-key.public.plaintext_bits // 64)), threads)
    assert packed.shape == (len(messages), bits // 64)
    assert from_words(key.decrypt(packed, threads)) == messages
    modulus, randomiser = key.public.modulus, Randomiser(key.public, 1)
    hidden = modulus.pack(modulus.multiply(modulus.unpack(packed[:3]), randomiser.factors(randomiser.exponents(3))))
    assert not (hidden == packed[:3]).all(axis=1).any()
    assert from_words(key.decrypt(hidden, 1)) == messages[:3]


def test_owner_ciphertexts_lie_where_public_ones_do(key, plain):
    """c^u = 1 + ... mod p^2 and c^v = 1 mod q: c mod q is in <h>, so that h^r can hide it."""
    ciphertexts = plain.from_packed(key.encrypt(to_words(range(200), 3), 1))
    for c in ciphertexts + [plain.encrypt(m) for m in range(5)]:
        assert pow(c, plain.v, plain.q) == 1
        assert pow(c, plain.u, plain.p**2) % plain.p == 1
        assert pow(c, plain.u * plain.v, plain.n) != 1 or plain.decrypt(c) == 0


@pytest.mark.parametrize("side", ["modulo p^2", "modulo q"])
def test_owner_randomness_is_uniform_in_the_subgroups(side):
    """Of one message, c mod p^2 takes u values and c mod q takes v values, equally often."""
    key = generate_key(insecure_test_key_bits=96)
    plain = PlainKey(key)
    ciphertexts = plain.from_packed(key.encrypt(to_words([5] * 40_000, 1), 1))
    modulus, order = (plain.p**2, plain.u) if side == "modulo p^2" else (plain.q, plain.v)
    counts = np.unique([c % modulus for c in ciphertexts], return_counts=True)[1]
    assert len(counts) == order
    expected = len(ciphertexts) / order
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "subgroup_bits", "expected"), [(2048, 512, 592), (2048, 0, 1446), (3072, 512, 592), (3072, 0, 2128)]
)
def test_randomness_covers_the_order_of_h_and_80_bits_more(bits, subgroup_bits, expected):
    public = generate_key(bits).public
    key = OUPublicKey(public.n, public.g, public.h, subgroup_bits)
    assert key.randomness_bits == expected
    exponents = from_words(KeyRandomness(key).exponents(200))
    assert max(exponents).bit_length() == expected  # by chance shorter with probability 2^-200
    assert len(set(exponents)) == 200


def test_key_randomness_raises_h_to_its_exponents(key, plain):
    randomness, modulus = KeyRandomness(key.public), key.public.modulus
    exponents = randomness.exponents(5)
    factors = plain.from_packed(modulus.pack(randomness.factors(exponents)))
    assert factors == [pow(plain.h, r, plain.n) for r in from_words(exponents)]


def test_encryption_with_a_given_keystream_repeats_itself(key):
    messages = to_words([1, 2, 3], 1)
    first, second = (key.encrypt(messages, 1, Keystream(b"k" * 32)) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, key.encrypt(messages, 1))


def test_same_message_is_never_encrypted_alike(key):
    packed = key.encrypt(to_words([7] * 500, 1), 2)
    assert len(set(from_words(packed))) == 500


def test_messages_beyond_the_plaintext_are_refused(key):
    limit = 1 << (key.public.plaintext_bits - 2)
    with pytest.raises(CryptoError, match="lower fractional_bits"):
        key.encrypt(to_words([limit], 3), 1)
    with pytest.raises(CryptoError, match="lower fractional_bits"):
        key.encrypt(to_words([1 << 300], 7), 1)


def test_decryption_of_something_else_is_an_error(key, plain):
    with pytest.raises(CryptoError, match="at decryption"):
        key.decrypt(plain.to_packed([3 * plain.p]), 1)


def test_key_below_2048_bits_is_refused_unless_a_test_says_so(key):
    public = key.public
    arguments = (public.n, public.g, public.h, public.subgroup_bits)
    with pytest.raises(CryptoError, match="expected a key"):
        OUPublicKey(*arguments)
    with pytest.raises(CryptoError, match="expected a key"):
        OUPublicKey(*arguments, insecure_test_key_bits=401)
    assert OUPublicKey(*arguments, insecure_test_key_bits=400).n == public.n


FAULTS = {
    "even": lambda k: (k.n - 1, k.g, k.h),
    "small factor": lambda k: (65521 * (k.n // 65521 | 1), k.g, k.h),
    "prime": lambda k: (2**400 - 593, k.g, k.h),
    "square": lambda k: ((2**200 - 75) ** 2, 2, 3),
    "g is one": lambda k: (k.n, 1, k.h),
    "g too large": lambda k: (k.n, k.g + k.n, k.h),
    "h is zero": lambda k: (k.n, k.g, 0),
    "h is one modulo q": lambda k: (k.n, k.g, 1 + k.q),
    "h shares a factor": lambda k: (k.n, k.g, 2 * k.p),
    "h is minus one": lambda k: (k.n, k.g, k.n - 1),
    "h is minus one modulo q": lambda k: (k.n, k.g, 7 * k.q - 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_malformed_public_key_is_refused(plain, fault):
    with pytest.raises(CryptoError, match="in the public key"):
        OUPublicKey(*FAULTS[fault](plain), 0, insecure_test_key_bits=300)


def test_declared_subgroup_shorter_than_512_bits_is_refused():
    public = generate_key(2048).public
    with pytest.raises(CryptoError, match="subgroup_bits"):
        OUPublicKey(public.n, public.g, public.h, 256)
