import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.payload import Packing, SumsBounds, from_words, to_words
from treaty.errors import CryptoError


def packed_by_hand(packing, g, h, count):
    """Formula of SecureBoost+ in Python integers."""
    shifted = g + packing.bounds.grad_bound * count
    return ((shifted << packing.hess_bits) + h << packing.count_bits) + count


BOUNDS = st.builds(SumsBounds, st.integers(1, 1 << 22), st.integers(0, 1 << 36), st.integers(0, 1 << 36))


@settings(deadline=None)
@given(BOUNDS, st.data())
def test_rows_are_packed_by_the_formula(bounds, data):
    packing = Packing(bounds, 1024)
    rows = data.draw(st.integers(0, min(5, bounds.n_rows)))
    grad = [data.draw(st.integers(-bounds.grad_bound, bounds.grad_bound)) for _ in range(rows)]
    hess = [data.draw(st.integers(0, bounds.hess_bound)) for _ in range(rows)]
    words = packing.pack_rows(np.array(grad, np.int64), np.array(hess, np.int64))
    assert from_words(words) == [packed_by_hand(packing, g, h, 1) for g, h in zip(grad, hess, strict=True)]


@settings(deadline=None)
@given(BOUNDS, st.integers(0, 20), st.data())
def test_unpacked_sums_equal_the_packed_ones(bounds, sums, data):
    packing = Packing(bounds, 700)
    counts = [data.draw(st.sampled_from([0, 1, bounds.n_rows])) for _ in range(sums)]
    triples = [
        (
            data.draw(st.integers(-bounds.grad_bound * c, bounds.grad_bound * c)),
            data.draw(st.integers(0, bounds.hess_bound * c)),
            c,
        )
        for c in counts
    ]
    plaintexts, k = [], packing.per_plaintext
    for start in range(0, sums, k):
        total = 0
        for triple in triples[start : start + k]:
            total = (total << packing.sum_bits) + packed_by_hand(packing, *triple)
        plaintexts.append(total)
    assert all(x.bit_length() <= 700 - 2 for x in plaintexts)
    got = packing.unpack_sums(to_words(plaintexts, 11), sums)
    assert got.tolist() == [list(triple) for triple in triples]


def test_widths_follow_the_specification():
    packing = Packing(SumsBounds(20_000, 1 << 16, 1 << 14), 682)
    assert packing.grad_bits == (20_000 * 2 << 16).bit_length() + 1
    assert packing.hess_bits == (20_000 << 14).bit_length() + 1
    assert packing.count_bits == (20_000).bit_length() + 1
    assert packing.per_plaintext == 680 // packing.sum_bits == 8


@pytest.mark.parametrize(
    "bounds", [(1 << 22, 1 << 40, 1), (1 << 22, 1, 1 << 41), (1 << 62, 0, 0)], ids=["grad", "hess", "rows"]
)
def test_sums_beyond_64_bits_are_refused_at_the_start(bounds):
    with pytest.raises(CryptoError, match="lower fractional_bits"):
        SumsBounds(*bounds)


@pytest.mark.parametrize("bounds", [(0, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_negative_bounds_are_refused(bounds):
    with pytest.raises(CryptoError, match="bounds"):
        SumsBounds(*bounds)


def test_sum_wider_than_the_plaintext_is_refused_at_the_start():
    bounds = SumsBounds(1000, 1 << 20, 1 << 20)
    bits = Packing(bounds, 1000).sum_bits
    assert Packing(bounds, bits + 2).per_plaintext == 1
    with pytest.raises(CryptoError, match="longer key"):
        Packing(bounds, bits + 1)


@pytest.mark.parametrize(
    ("grad", "hess"), [([5], [0]), ([-5], [0]), ([0], [4]), ([0], [-1]), ([0] * 9, [0] * 9)],
    ids=["grad above", "grad below", "hess above", "hess below", "too many rows"],
)  # fmt: skip
def test_rows_beyond_the_bounds_are_refused(grad, hess):
    packing = Packing(SumsBounds(8, 4, 3), 100)
    with pytest.raises(CryptoError, match="at packing"):
        packing.pack_rows(np.array(grad, np.int64), np.array(hess, np.int64))


def test_impossible_sums_are_refused():
    packing = Packing(SumsBounds(8, 4, 3), 100)
    for total in (packed_by_hand(packing, 0, 0, 9), packed_by_hand(packing, 0, 4, 1), packed_by_hand(packing, 5, 0, 1)):
        with pytest.raises(CryptoError, match="exceeds"):
            packing.unpack_sums(to_words([total], 2), 1)
    with pytest.raises(CryptoError, match="plaintexts"):
        packing.unpack_sums(to_words([0, 0], 2), 1)
