import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sharing import shamir as field
from treaty.crypto.sharing.shamir import P
from treaty.errors import CryptoError

EDGES = [0, 1, 2, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, P - 1, P - 2, (1 << 126) + 1, P - (1 << 64)]
NUMBERS = st.one_of(st.sampled_from(EDGES), st.integers(0, P - 1))
ROWS = st.lists(NUMBERS, min_size=1, max_size=20)  # more than a block of powers
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20)

kernels_may_compile = settings(deadline=None)


def words(numbers):
    return to_words(numbers, 2)


def test_the_order_is_a_prime_with_roots_by_one_power():
    s = 4  # Lucas and Lehmer: 2^127 - 1 is prime iff s becomes zero
    for _ in range(125):
        s = (s * s - 2) % P
    assert s == 0
    assert P % 4 == 3


@kernels_may_compile
@given(PAIRS)
def test_sums_differences_and_products_are_those_of_integers(pairs):
    a, b = (words(column) for column in zip(*pairs, strict=True))
    assert from_words(field.add(a, b)) == [(x + y) % P for x, y in pairs]
    assert from_words(field.subtract(a, b)) == [(x - y) % P for x, y in pairs]
    assert from_words(field.multiply(a, b)) == [x * y % P for x, y in pairs]


def test_edges_are_right_in_every_pair():
    pairs = list(itertools.product(EDGES, repeat=2))
    a, b = (words(column) for column in zip(*pairs, strict=True))
    assert from_words(field.add(a, b)) == [(x + y) % P for x, y in pairs]
    assert from_words(field.subtract(a, b)) == [(x - y) % P for x, y in pairs]
    assert from_words(field.multiply(a, b)) == [x * y % P for x, y in pairs]


@kernels_may_compile
@given(ROWS, st.one_of(st.integers(0, 5), NUMBERS))
def test_powers_are_those_of_integers(numbers, exponent):
    assert from_words(field.power(words(numbers), exponent)) == [pow(x, exponent, P) for x in numbers]


@pytest.mark.slow
@kernels_may_compile
@given(ROWS)
def test_square_root_of_a_square_is_the_root_that_is_a_square(numbers):
    roots = from_words(field.square_root(words([x * x % P for x in numbers])))
    assert all(root in (x, P - x) or x == root == 0 for x, root in zip(numbers, roots, strict=True))
    assert all(pow(root, (P - 1) // 2, P) in (0, 1) for root in roots)


@kernels_may_compile
@given(st.lists(NUMBERS.filter(bool), max_size=20))
def test_inverses_are_those_of_integers(numbers):
    assert from_words(field.inverse(words(numbers))) == [pow(x, -1, P) for x in numbers]


def test_zero_has_no_inverse():
    with pytest.raises(CryptoError, match="other than zero"):
        field.inverse(words([3, 0, 5]))


@kernels_may_compile
@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=9))
def test_signed_integers_are_taken_modulo_the_order(values):
    assert from_words(field.from_signed(np.array(values, np.int64))) == [value % P for value in values]
    assert [from_words(field.constant(value)[None])[0] for value in values] == [value % P for value in values]


@kernels_may_compile
@given(ROWS, NUMBERS)
def test_arrays_of_any_shape_and_layout_are_broadcast(numbers, one):
    column = words(numbers)
    expected = [x * one % P for x in numbers]
    read_only = column.copy()
    read_only.flags.writeable = False
    strided = np.repeat(column, 2, axis=0)[::2]
    for a in (column, read_only, strided):
        assert from_words(field.multiply(a, words([one])[0])) == expected
        assert from_words(field.multiply(words([one])[0], a)) == expected
    table = field.multiply(column[:, None], column[None])
    assert table.shape == (len(numbers), len(numbers), 2)
    assert from_words(table.reshape(-1, 2)) == [x * y % P for x in numbers for y in numbers]
    assert np.array_equal(column, words(numbers))  # inputs are left alone


@kernels_may_compile
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5), st.data())
def test_polynomials_are_evaluated_and_interpolated_anywhere(coefficients, data):
    points = data.draw(st.lists(NUMBERS.filter(bool), min_size=len(coefficients), max_size=7, unique=True))
    at = data.draw(NUMBERS)
    values = field.evaluate(np.stack([words(row) for row in coefficients]), points)

    def value(j, x):
        return sum(row[j] * pow(x, k, P) for k, row in enumerate(coefficients)) % P

    assert [from_words(row) for row in values] == [[value(j, x) for j in range(3)] for x in points]
    found = field.combine(values, field.lagrange_weights(points, at)[None])
    assert from_words(found[0]) == [value(j, at) for j in range(3)]


@kernels_may_compile
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_combining_is_a_matrix_product(n, k, data):
    matrix = data.draw(st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=k, max_size=k))
    values = data.draw(st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=n, max_size=n))
    found = field.combine(np.stack([words(row) for row in values]), np.stack([words(row) for row in matrix]))
    assert [from_words(row) for row in found] == [
        [sum(w * value[j] for w, value in zip(row, values, strict=True)) % P for j in range(2)] for row in matrix
    ]


@pytest.mark.slow
@kernels_may_compile
@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 9), st.data())
def test_inner_products_are_those_of_integers(n, k, d, data):
    rows, weights = (
        data.draw(st.lists(st.lists(NUMBERS, min_size=d, max_size=d), min_size=count, max_size=count))
        for count in (n, k)
    )
    found = field.inner_products(
        np.array([words(row) for row in rows], np.uint64).reshape(n, d, 2), np.stack([words(row) for row in weights])
    )
    expected = [[sum(w * x for w, x in zip(one, row, strict=True)) % P for row in rows] for one in weights]
    assert found.shape == (k, n, 2)
    assert [from_words(row) for row in found] == expected


@pytest.mark.parametrize("edge", EDGES[3:], ids=hex)
def test_inner_products_of_any_length_carry_rightly(edge):
    """Thousands of the same large product, so that every sum of words overflows, on several threads."""
    rows = np.broadcast_to(words([edge]), (1000, 3000, 2))
    found = field.inner_products(rows, np.broadcast_to(words([P - 1]), (1, 3000, 2)), threads=3)
    assert set(from_words(found[0])) == {3000 * edge * (P - 1) % P}


@pytest.mark.slow
@kernels_may_compile
@given(st.integers(2, 82), st.data())
def test_comparison_factors_are_those_of_the_formula(length, data):
    """Of numbers that need be no bits, as shares are not."""
    r = data.draw(st.lists(NUMBERS, min_size=length, max_size=length))
    s, c = data.draw(NUMBERS), data.draw(st.integers(0, (1 << length) - 1))
    digits = [c >> i & 1 for i in range(length)]
    xors = [1 - x if digit else x for x, digit in zip(r, digits, strict=True)]
    expected = [(s + r[i] - digits[i] + 3 * sum(xors[i + 1 :])) % P for i in range(length)]
    expected.append((s - 1 + 3 * sum(xors)) % P)
    found = field.comparison_factors(words(r)[:, None], words([s]), words([c]))
    assert from_words(found[:, 0]) == expected


def test_random_numbers_are_uniform_and_new():
    """Both ends of the number by chi-squared, false alarm 1e-9 each."""
    drawn = field.random_numbers(2, 50_000)
    assert drawn.shape == (2, 50_000, 2)
    field.check_numbers(drawn, "numbers")
    for ends in (drawn[..., 1] >> np.uint64(55), drawn[..., 0] & np.uint64(255)):
        assert stats.chisquare(np.bincount(ends.reshape(-1).astype(np.int64), minlength=256)).pvalue > 1e-9
    assert not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn, field.random_numbers(2, 50_000))


def test_zeros_are_told_from_numbers_with_a_zero_word():
    assert field.is_zero(words([0, 1, 1 << 64, 0])).tolist() == [True, False, False, True]


@pytest.mark.parametrize("points", [[0, 1], [1, P], [2, 2], []], ids=["zero", "order", "repeated", "none"])
def test_points_that_hold_no_share_are_refused(points):
    with pytest.raises(CryptoError, match="points"):
        field.lagrange_weights(points)
