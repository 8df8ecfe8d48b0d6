import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import FORMS
from treaty.crypto.additive.montgomery import FixedBase, Modulus
from treaty.crypto.payload import from_words, to_words
from treaty.errors import CryptoError


@st.composite
def modulus_and_residues(draw, most_bits=700):
    """An odd modulus of any size, near a power of two at times, and a few residues with the extremes."""
    bits = draw(st.integers(2, most_bits))
    shape = draw(st.sampled_from(["random", "largest", "smallest"]))
    n = {
        "random": draw(st.integers(1 << (bits - 1), (1 << bits) - 1)) | 1,
        "largest": (1 << bits) - 1,
        "smallest": (1 << (bits - 1)) + 1,
    }[shape]
    residue = st.integers(0, n - 1)
    return n, [*draw(st.lists(residue, min_size=1, max_size=5)), n - 1, 0, 1]


def plain(modulus, rows):
    """Working Montgomery forms as ordinary integers."""
    return from_words(modulus.pack(modulus.multiply(rows, modulus.working([1]))))


@FORMS
@settings(deadline=None, max_examples=60)
@given(modulus_and_residues())
def test_multiply_equals_integer_product_over_radix(form, drawn):
    n, xs = drawn
    modulus, ys = Modulus(n, form=form), xs[::-1]
    product = from_words(modulus.pack(modulus.multiply(modulus.working(xs), modulus.working(ys))))
    inverse = pow(modulus.radix, -1, n)
    assert product == [x * y * inverse % n for x, y in zip(xs, ys, strict=True)]
    single = from_words(modulus.pack(modulus.multiply(modulus.working(xs), modulus.working(ys[:1]))))
    assert single == [x * ys[0] * inverse % n for x in xs]


@FORMS
@pytest.mark.parametrize("words", [*range(1, 9), 16, 32, 48, 52, 64, 65, 96, 97, 128, 130])
@pytest.mark.parametrize("offset", [-1, 1], ids=["below", "above"])
def test_multiply_is_right_next_to_powers_of_two(form, words, offset):
    n = (1 << (64 * words - (offset > 0))) + offset
    modulus = Modulus(n, form=form)
    xs = [n - 1, n - 2, n // 2, (1 << (64 * words - 2)) % n, 3 % n]
    assert plain(modulus, modulus.multiply(modulus.montgomery(xs), modulus.montgomery(xs[::-1]))) == [
        x * y % n for x, y in zip(xs, xs[::-1], strict=True)
    ]


@FORMS
@settings(deadline=None, max_examples=40)
@given(modulus_and_residues())
def test_add_pack_and_unpack_equal_integers(form, drawn):
    n, xs = drawn
    modulus = Modulus(n, form=form)
    packed = to_words(xs, modulus.words)
    assert from_words(modulus.pack(modulus.unpack(packed))) == xs
    total = modulus.add(modulus.working(xs), modulus.working(xs[::-1]))
    assert from_words(modulus.pack(total)) == [(x + y) % n for x, y in zip(xs, xs[::-1], strict=True)]


@FORMS
@settings(deadline=None, max_examples=25)
@given(modulus_and_residues(400), st.integers(0, 2**200))
def test_power_equals_pow(form, drawn, exponent):
    n, xs = drawn
    modulus = Modulus(n, form=form)
    assert plain(modulus, modulus.power(modulus.montgomery(xs), exponent)) == [pow(x, exponent, n) for x in xs]


@FORMS
@settings(deadline=None, max_examples=25)
@given(modulus_and_residues(400), st.integers(1, 11), st.lists(st.integers(0, 2**130 - 1), max_size=5))
def test_fixed_base_power_equals_pow(form, drawn, window, exponents):
    n, xs = drawn
    modulus = Modulus(n, form=form)
    powers = FixedBase(modulus, xs[0], 130, window).power(to_words(exponents, 3))
    assert plain(modulus, powers) == [pow(xs[0], e, n) for e in exponents]


@FORMS
@settings(deadline=None, max_examples=40)
@given(modulus_and_residues(), st.data())
def test_segment_products_equal_products_of_integers(form, drawn, data):
    n, xs = drawn
    modulus = Modulus(n, form=form)
    segments = data.draw(
        st.lists(st.lists(st.integers(0, len(xs) - 1), min_size=1, max_size=9), max_size=8), label="segments"
    )
    index = np.array([i for segment in segments for i in segment], np.int32)
    starts = np.cumsum([0, *(len(segment) for segment in segments)]).astype(np.int64)
    out = np.empty((len(segments), modulus.words), np.uint64)
    modulus.segment_products(modulus.pack(modulus.montgomery(xs)), index, starts, out)
    assert plain(modulus, modulus.unpack(out)) == [math.prod(xs[i] for i in segment) % n for segment in segments]


@FORMS
@settings(deadline=None, max_examples=25)
@given(modulus_and_residues(300), st.integers(1, 40), st.data())
def test_horner_sets_powers_side_by_side(form, drawn, bits, data):
    n, xs = drawn
    modulus = Modulus(n, form=form)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), label="sizes")
    items = [xs[i % len(xs)] for i in range(sum(sizes))]
    factors = [xs[-4 - i % (len(xs) - 3)] for i in range(len(sizes))]
    starts = np.cumsum([0, *sizes]).astype(np.int64)
    packed = modulus.pack(modulus.montgomery(items))
    got = plain(modulus, modulus.unpack(modulus.horner(packed, starts, bits, modulus.montgomery(factors))))
    want = []
    for factor, start, stop in zip(factors, starts[:-1], starts[1:], strict=True):
        total = 1
        for x in items[start:stop]:
            total = pow(total, 1 << bits, n) * x % n
        want.append(total * factor % n)
    assert got == want


@FORMS
def test_all_forms_write_the_same_bytes(form):
    n = (1 << 683) - 1283
    one, words = Modulus(n, form=form), Modulus(n, form="words")
    assert (one.form, words.form) == (form, "words")
    values = [pow(7, i, n) for i in range(9)]
    assert one.radix == words.radix
    assert np.array_equal(one.pack(one.montgomery(values)), words.pack(words.montgomery(values)))


def test_segment_products_read_unaligned_read_only_rows():
    modulus = Modulus((1 << 2048) - 1)
    packed = modulus.pack(modulus.montgomery([3, 5, 7]))
    buffer = b"x" + packed.tobytes()
    view = np.frombuffer(buffer, np.uint8)[1:].view(np.uint64).reshape(packed.shape)
    assert not view.flags.writeable
    out = np.empty((1, modulus.words), np.uint64)
    modulus.segment_products(view, np.array([0, 1, 2], np.int32), np.array([0, 3], np.int64), out)
    assert plain(modulus, modulus.unpack(out)) == [105]


@FORMS
def test_adopt_keeps_values_of_a_smaller_modulus(form):
    small, large = Modulus((1 << 128) - 159, form=form), Modulus((1 << 700) + 1, form=form)
    values = [0, 1, small.value - 1]
    assert from_words(large.pack(large.adopt(small.working(values), small))) == values


@pytest.mark.parametrize(("value", "accepted"), [(0, False), (1, True), (-1, True), (None, False), (2, False)])
def test_in_range_accepts_one_to_n_minus_one(value, accepted):
    n = (1 << 200) - 1001
    number = n if value is None else n + 1 if value == 2 else value % n
    modulus = Modulus(n)
    assert modulus.in_range(to_words([1, number, 1], modulus.words)) == accepted


@pytest.mark.parametrize("value", [-3, 0, 1, 2, 10])
def test_modulus_refuses_even_and_tiny_values(value):
    with pytest.raises(CryptoError, match="odd"):
        Modulus(value)
