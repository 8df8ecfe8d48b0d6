"""Hidden vectors and matrices against plain integers, and against phe."""

from __future__ import annotations

import gmpy2
import numpy as np
import phe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import FORMS
from treaty.crypto.additive.ciphers import generate_key, generate_paillier_key
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums.hidden_vectors import Fields, HiddenMatrix, Hider, hide_rows, opened, product_bits
from treaty.errors import CryptoError

KEYS = {"ou": generate_key(insecure_test_key_bits=768), "paillier": generate_paillier_key(insecure_test_key_bits=512)}
CIPHERS = pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
WEIGHT, VECTOR = 29, 44


def drawn(rng, shape, bits):
    """Signed numbers of so many bits, the extremes among them."""
    half = 1 << (bits - 1)
    numbers = rng.integers(-half, half, shape)
    flat = numbers.reshape(-1)
    flat[: min(3, len(flat))] = [-half, half - 1, 0][: min(3, len(flat))]
    return rng.permutation(flat).reshape(shape)


def exact(matrix, vector):
    """Return X^T v in Python's integers."""
    return [sum(int(x) * int(v) for x, v in zip(column, vector, strict=True)) for column in matrix.T]


@FORMS
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.integers(1, 63), st.integers(0, 2**32))
def test_bucket_products_equal_powers(form, rows, kinds, columns, bits, seed):
    rng = np.random.default_rng(seed)
    n = int.from_bytes(rng.bytes(40), "little") | 1 | 1 << 319
    modulus = Modulus(n, form=form)
    bases = [[int.from_bytes(rng.bytes(40), "little") % n for _ in range(columns)] for _ in range(rows)]
    exponents = rng.integers(0, 1 << bits, (rows, kinds), dtype=np.uint64)
    pairs = np.array([(c, k) for c in range(columns) for k in range(kinds)])
    working = modulus.montgomery([x for row in bases for x in row]).reshape(rows, columns, -1)
    made = modulus.bucket_products(working, exponents, pairs, bits, 2)
    found = from_words(modulus.pack(modulus.multiply(made, modulus.working([1]))))
    for (c, k), product in zip(pairs.tolist(), found, strict=True):
        expected = 1
        for row, of_row in zip(bases, exponents.tolist(), strict=True):
            expected = expected * pow(row[c], of_row[k], n) % n
        assert product == expected


@CIPHERS
@settings(deadline=None, max_examples=8)
@given(st.integers(1, 25), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_weighted_sums_of_a_hidden_vector_are_exact(key, rows, columns, masked, seed):
    rng = np.random.default_rng(seed)
    one, other = drawn(rng, rows, VECTOR), drawn(rng, rows, VECTOR)
    weights = drawn(rng, (rows, columns), WEIGHT)
    hider = Hider(key.public, key.public.plaintext_bits - 2, 1)
    hidden = hider.multiply([hider.hide(one, VECTOR), hider.hide(other, VECTOR)])
    fields = Fields.of(WEIGHT + VECTOR + 8, key.public.plaintext_bits, masks=int(masked))
    masks = fields.masks(columns)
    half = 1 << (fields.bits - 1)
    covered = hider.cover(hider.weigh(hidden, weights, WEIGHT), [half + mask for mask in masks], fields)
    numbers = fields.signed(opened(key, covered, columns, fields, 1), masks)
    offset = 2 << (VECTOR - 1)  # of two parties
    assert numbers == exact(weights, one.astype(object) + other.astype(object) + offset)


@CIPHERS
@settings(deadline=None, max_examples=8)
@given(st.integers(1, 25), st.integers(1, 7), st.booleans(), st.integers(0, 2**32))
def test_products_with_a_hidden_matrix_are_exact(key, rows, columns, masked, seed):
    rng = np.random.default_rng(seed)
    matrix, vector = drawn(rng, (rows + 3, columns), WEIGHT), drawn(rng, rows, VECTOR)
    index = rng.permutation(rows + 3)[:rows]
    fields = Fields.of(product_bits(rows, WEIGHT, VECTOR), key.public.plaintext_bits, masks=int(masked))
    hidden = HiddenMatrix(
        Hider(key.public, key.public.plaintext_bits - 2, 1), hide_rows(key, matrix, WEIGHT, fields, 1),
        WEIGHT, VECTOR, fields, 1,
    )  # fmt: skip
    masks = fields.masks(columns)
    numbers = opened(key, hidden.times(index, vector, masks), columns, fields, 1)
    found = fields.signed(numbers, masks)
    assert found == exact(matrix[index], vector.astype(object) + (1 << (VECTOR - 1)))


def test_paillier_vectors_are_those_of_phe():
    key = KEYS["paillier"]
    public = phe.PaillierPublicKey(key.public.n)
    private = phe.PaillierPrivateKey(public, key.secret_numbers[0], key.secret_numbers[1])
    hider = Hider(key.public, 200, 1)
    vector, weights = np.array([5, -7, 1 << 40]), np.array([[3, -1], [-4, 9], [2, 0]])
    hidden = hider.hide(vector, VECTOR)
    fields = Fields.of(90, key.public.plaintext_bits, most=1)
    covered = hider.cover(hider.weigh(hidden, weights, 5), [1 << 89] * 2, fields)
    n2 = key.public.modulus
    plain = [x * pow(n2.radix, -1, n2.value) % n2.value for x in from_words(np.concatenate([hidden, covered]))]
    decrypted = [private.raw_decrypt(c) for c in plain]
    assert decrypted[:3] == [int(v) + (1 << 43) for v in vector]
    assert [d - (1 << 89) for d in decrypted[3:]] == exact(weights, vector + (1 << 43))


@CIPHERS
def test_equal_inputs_never_give_equal_ciphertexts(key):
    hider = Hider(key.public, key.public.plaintext_bits - 2, 1)
    twice = hider.hide(np.array([3, 3]), VECTOR)
    assert (twice[0] != twice[1]).any()
    fields = Fields.of(80, key.public.plaintext_bits)
    products = hider.weigh(twice, np.array([[2], [1]]), 3)
    first, second = (hider.cover(products, [1 << 79], fields) for _ in range(2))
    assert (first != second).any()
    assert opened(key, first, 1, fields, 1) == opened(key, second, 1, fields, 1)


@CIPHERS
def test_difference_of_ciphertexts_is_that_of_messages(key):
    hider = Hider(key.public, 120, 1)
    more, less = hider.hide(np.array([90]), 20), hider.hide(np.array([57]), 20)
    fields = Fields.of(30, key.public.plaintext_bits, most=1)
    covered = hider.cover(hider.subtract(more, less), [1 << 29], fields)
    assert fields.signed(opened(key, covered, 1, fields, 1), [0]) == [33]


def test_masked_fields_are_uniform_but_for_their_ends():
    fields = Fields.of(20, 400, masks=1)
    assert (fields.mask_bits, fields.width) == (100, 102)
    opened_numbers = np.array([m + 5 + (1 << 19) >> 96 for m in fields.masks(4000)])
    counts = np.bincount(opened_numbers, minlength=16)
    assert len(counts) == 16
    assert ((counts - 250) ** 2 / 250).sum() < 44.3  # chi-squared, 15 degrees: false alarm 1e-4


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 30), st.lists(st.integers(0, 2**40 - 1), min_size=1, max_size=9))
def test_fields_part_what_they_join(per, numbers):
    fields = Fields(40, 0, 40, per)
    assert fields.part(fields.join(numbers), len(numbers)) == numbers


@given(st.integers(1, 150), st.integers(300, 1024), st.integers(0, 3), st.sampled_from([None, 1, 3]))
def test_fields_leave_eighty_bits_free(bits, plaintext_bits, masks, most):
    try:
        fields = Fields.of(bits, plaintext_bits, masks=masks, most=most)
    except CryptoError:
        return
    assert fields.per_plaintext * fields.width <= plaintext_bits - 82


def test_a_message_above_p_is_not_opened():
    """It comes back modulo p, and the greatest common divisor of the difference and n is p."""
    key = KEYS["ou"]
    n, p, bits = key.public.n, key.secret_numbers[0], key.public.plaintext_bits
    fields = Fields.of((bits - 2) // 4, bits)  # without spare bits four would fit, and any number below p / 2
    for above in (1 << bits - 82, 1 << bits - 3, p - 1):
        value = pow(key.public.g, p + above, n) * pow(key.public.h, 12345, n) % n
        hidden = key.public.modulus.pack(key.public.modulus.montgomery([value]))
        assert from_words(key.decrypt(hidden, 1)) == [above], "the message did not come back modulo p"
        with pytest.raises(CryptoError, match="more than its fields"):
            opened(key, hidden, fields.per_plaintext, fields, 1)


@CIPHERS
def test_what_is_no_ciphertext_is_refused(key):
    modulus, fields = key.public.modulus, Fields.of(80, key.public.plaintext_bits)
    hider = Hider(key.public, 100, 1)
    with pytest.raises(CryptoError, match="not in range"):
        opened(key, np.zeros((1, modulus.words), np.uint64), 1, fields, 1)
    with pytest.raises(CryptoError, match="not in range"):
        hider.check(np.full((2, modulus.words), 2**64 - 1, np.uint64), (2,), "a test")
    with pytest.raises(CryptoError, match="expected uint64"):
        hider.check(np.ones((2, modulus.words), np.int64), (2,), "a test")
    with pytest.raises(CryptoError, match="more than its fields"):
        opened(key, hider.hide_words(np.array([[0, 1 << 30]], np.uint64)), 1, fields, 1)
    with pytest.raises(CryptoError, match="exceeds its bound"):
        fields.signed([1 << 82], [0])
    with pytest.raises(CryptoError, match="below 2"):
        hider.hide(np.array([1 << 20]), 21)
    with pytest.raises(CryptoError, match="longer key"):
        Fields.of(200, 170, masks=1)


@CIPHERS
def test_ciphertexts_that_are_no_units_are_refused(key):
    """A multiple of a factor of n would be one in every product, whatever it is multiplied by."""
    hider = Hider(key.public, 40, 1)
    hidden = hider.hide(np.arange(5), VECTOR)
    assert hider.check(hidden, (5,), "a test") is hidden
    hidden[3] = to_words([key.secret_numbers[0]], hider.modulus.words)[0]
    with pytest.raises(CryptoError, match="prime to n - in a test"):
        hider.check(hidden, (5,), "a test")


@CIPHERS
def test_products_for_the_owner_of_the_key_are_not_hidden_by_powers_of_its_base(key, monkeypatch):
    """Those are squares, so that a mark which is none would outlast them."""
    hider = Hider(key.public, 40, 1)
    fields = Fields.of(41, key.public.plaintext_bits)
    p, signs = key.secret_numbers[0], []
    for randomiser in (hider._key_randomness, hider._randomiser):
        monkeypatch.setattr(hider, "_randomiser", randomiser)
        covered = (hider.cover(hider.hide(np.array([5]), 41), [0], fields) for _ in range(40))
        signs.append({gmpy2.jacobi(from_words(one)[0], p) for one in covered})
    assert [len(seen) for seen in signs] == [1, 2]
