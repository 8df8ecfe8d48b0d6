"""Karr's product gives the plain one, from vectors that are orthogonal to what they should be."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.keystream import Keystream
from treaty.errors import CryptoError
from treaty.systems.fedxgboost_smm import node_products as karr
from treaty.systems.fedxgboost_smm.options import Sizes
from treaty.systems.fedxgboost_smm.published import _hide_gradients


def matrices(seed: int, rows: int, columns: int, others: int, dependent: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw D_A, whose columns may depend on each other, and D_B."""
    rng = np.random.default_rng(seed)
    first = rng.integers(-(2**16), 2**16, (rows, columns)).astype(float)
    if dependent:
        first[:, -1] = first[:, 0]
    return first, rng.integers(0, 2, (rows, others)).astype(float)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_product_of_the_answer_is_the_plain_one(data):
    rows, columns = data.draw(st.integers(4, 60)), data.draw(st.integers(1, 3))
    first, second = matrices(
        data.draw(st.integers(0, 99)), rows, columns, data.draw(st.integers(0, 5)), data.draw(st.booleans())
    )
    random = Keystream(bytes(31) + bytes([data.draw(st.integers(0, 255))]))
    vectors = karr.null_vectors(first, data.draw(st.integers(1, rows - columns)), random)
    assert karr.are_orthonormal(vectors)
    np.testing.assert_allclose(first.T @ vectors, 0.0, atol=1e-9 * np.abs(first).sum())
    picked = karr.chosen(vectors, random)
    assert 1 <= picked.shape[1] <= vectors.shape[1]
    assert all(any(np.array_equal(own, given) for given in vectors.T) for own in picked.T)
    answer = karr.response(second, picked)
    assert answer.shape == second.shape
    truth = first.T @ second
    np.testing.assert_allclose(first.T @ answer, truth, rtol=0, atol=1e-9 * max(1.0, np.abs(truth).max(initial=0.0)))


def test_an_answer_differs_from_the_matrix_by_its_projection():
    first, second = matrices(1, 40, 2, 3, False)
    vectors = karr.null_vectors(first, 10, Keystream())
    answer = karr.response(second, vectors)
    np.testing.assert_allclose(answer, second - (vectors @ vectors.T) @ second, atol=1e-12)
    np.testing.assert_allclose(vectors.T @ answer, 0.0, atol=1e-12)


def test_vectors_are_drawn_anew_and_subsets_vary():
    first, _ = matrices(2, 50, 2, 1, False)
    assert not np.allclose(karr.null_vectors(first, 5, Keystream()), karr.null_vectors(first, 5, Keystream()))
    vectors, random = karr.null_vectors(first, 4, Keystream()), Keystream()
    counts = np.bincount([karr.chosen(vectors, random).shape[1] for _ in range(200)], minlength=5)
    assert counts[0] == 0
    assert counts[1:].min() > 20  # of 50 each: below with probability 1e-7


@pytest.mark.slow
def test_null_vectors_of_everything_but_the_matrix_are_precise():
    rng = np.random.default_rng(3)
    matrix = np.stack([rng.normal(size=200), np.ones(200)], axis=1)
    vectors = karr.null_vectors(matrix, 198, Keystream(bytes(32)))
    np.testing.assert_allclose(matrix.T @ vectors, 0.0, atol=2e-14)  # after one pass 1e-13 and more
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(198), atol=1e-11)


@pytest.mark.parametrize("count", [0, 9, 50])
def test_null_vectors_that_cannot_be_are_refused(count):
    with pytest.raises(CryptoError, match=f"expected 1 to 8 null vectors of 10 rows, got {count}"):
        karr.null_vectors(np.ones((10, 2)), count, Keystream())


def test_a_disguised_matrix_has_its_columns_where_it_says():
    rng = np.random.default_rng(4)
    matrix = rng.integers(0, 2, (200, 6)).astype(float)
    mixed, places = karr.disguised(matrix, 12, 5, Keystream())
    assert mixed.shape == (200, 23)
    np.testing.assert_array_equal(mixed[:, places], matrix)
    rest = np.delete(mixed, places, axis=1)
    bits = np.isin(rest, [0.0, 1.0]).all(axis=0)
    assert bits.sum() == 12
    assert np.all(np.abs(rest[:, bits].mean(axis=0) - 0.5) < 0.2)
    assert len({tuple(karr.disguised(matrix, 12, 5, Keystream())[1]) for _ in range(5)}) > 1


def test_normal_numbers_have_the_moments_of_normal_numbers():
    drawn = karr.normals(Keystream(bytes(32)), 401, 501)
    assert drawn.shape == (401, 501)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert np.mean(drawn**power) == pytest.approx(moment, abs=0.12)
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.01


def test_sizes_shrink_in_the_papers_order_and_then_give_up():
    sizes = Sizes()
    assert sizes.of_disguised(160, 40) == (80, 8, 32)
    assert sizes.of_disguised(159, 40) == (79, 8, 32)
    assert sizes.of_disguised(81, 40) == (1, 8, 32)
    assert sizes.of_disguised(80, 40) == (1, 7, 32)
    assert sizes.of_disguised(74, 40) == (1, 1, 32)
    assert sizes.of_disguised(73, 40) == (1, 1, 31)
    assert sizes.of_disguised(43, 40) == (1, 1, 1)
    assert sizes.of_disguised(42, 40) is None


def test_sizes_that_are_named_are_drawn_where_rows_suffice():
    named = Sizes(null_vectors=5, bit_columns=7, normal_columns=3)
    assert named.of_disguised(55, 40) == (7, 3, 5)
    assert named.of_disguised(54, 40) == (6, 3, 5)


def test_as_many_null_vectors_of_gradients_are_sent_as_options_and_rows_allow():
    gradients, sent = np.random.default_rng(6).normal(size=(100, 2)), []
    party = SimpleNamespace(peers=["p"], send=lambda peer, message: sent.append(message))
    nodes = [np.arange(rows) for rows in (100, 10, 3, 2, 1)]
    for sizes, expected in ((Sizes(), [32, 8, 1, 0, 0]), (Sizes(null_vectors=5), [5, 5, 1, 0, 0])):
        _, asked = _hide_gradients(party, gradients, nodes, sizes)
        assert np.frombuffer(sent[-1].widths.data, np.int32).tolist() == expected
        assert asked.tolist() == [True, True, True, False, False]


# ---------------------------------------------------------------- what is refused


def test_a_row_with_a_single_entry_is_found_without_the_projection():
    rng = np.random.default_rng(5)
    vectors = np.linalg.qr(rng.normal(size=(30, 4)))[0]
    assert not karr.single_entries(vectors).any()
    with_unit = np.zeros((31, 5))
    with_unit[1:, 1:], with_unit[0, 0] = vectors, 1.0
    mixed = with_unit @ np.linalg.qr(rng.normal(size=(5, 5)))[0]  # the same span in another basis
    for basis in (with_unit, mixed):
        whole = basis @ basis.T
        expected = [np.count_nonzero(np.abs(row) > 1e-9) == 1 for row in whole]
        assert karr.single_entries(basis).tolist() == expected == [True, *[False] * 30]


def test_rows_no_vector_has_are_told_apart_from_single_entries():
    rng = np.random.default_rng(6)
    vectors = np.zeros((20, 3))
    vectors[2:] = np.linalg.qr(rng.normal(size=(18, 3)))[0]
    assert karr.empty_rows(vectors).tolist() == [True, True, *[False] * 18]
    assert not karr.single_entries(vectors).any()
    matrix = rng.normal(size=(20, 2))
    np.testing.assert_array_equal(karr.response(matrix, vectors)[:2], matrix[:2])


def test_vectors_that_are_none_are_noticed():
    vectors = np.linalg.qr(np.random.default_rng(7).normal(size=(12, 3)))[0]
    assert karr.are_orthonormal(vectors)
    assert not karr.are_orthonormal(vectors * 1.01)
    assert not karr.are_orthonormal(np.where(np.arange(12)[:, None] == 3, np.nan, vectors))
    assert not karr.are_orthonormal(vectors[:, [0, 0, 1]])
