"""Columns made ready for a linear model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from treaty.linear.preparation import prepare

NAN = np.nan


def columns(*features: Sequence[float] | np.ndarray) -> list[np.ndarray]:
    return [np.array(feature, np.float32) for feature in features]


def test_columns_lose_their_mean_and_get_unit_deviation():
    rng = np.random.default_rng(0)
    features = [rng.normal(50, 7, 300).astype(np.float32), rng.exponential(1e-3, 300).astype(np.float32)]
    made = prepare(features, [None, None], 300)
    X = made.matrix(features, 300)
    np.testing.assert_allclose(X[:, 0].mean(), 0.0, atol=2.0**-25)  # what columns are rounded to
    np.testing.assert_allclose(X[:, 0].std(), 1.0, rtol=2.0**-24)
    expected = (features[1].astype(float) - made.mean[1]) / made.scale[1]
    np.testing.assert_allclose(X[:, 1], expected, rtol=0, atol=2.0**-25)


def test_rows_to_come_are_prepared_with_numbers_of_the_training_rows():
    made = prepare(columns([0, 2, 4]), [None], 3)
    np.testing.assert_allclose(made.matrix(columns([2, 2 + math.sqrt(8 / 3)]), 2), [[0], [1]], atol=2.0**-24)


def test_missing_values_become_the_median_of_the_others():
    made = prepare(columns([1, NAN, 3, 100]), [None], 4)
    assert made.median == [3.0]
    X = made.matrix(columns([3, NAN]), 2)
    assert X[0, 0] == X[1, 0]


LONG_TAIL = np.where(np.arange(1000) == 7, 1e30, np.random.default_rng(3).normal(size=1000))
RARE = (np.arange(1000) < 3) * 1.0


@pytest.mark.parametrize("feature", [LONG_TAIL, RARE, 1.0 - RARE], ids=["long tail", "rare 1", "rare 0"])
def test_no_value_of_the_training_rows_is_cut_off_or_above_ten(feature):
    made = prepare(columns(feature), [None], 1000)
    X = made.matrix(columns(feature), 1000)[:, 0]
    far = np.abs(feature - feature.mean()).max()
    np.testing.assert_allclose(X, (feature.astype(np.float32) - feature.mean()) * 10.0 / far, rtol=0, atol=1e-6)
    assert np.abs(X).max() == 10.0  # to the last bit: parties count on it
    assert abs(X.mean()) < 2.0**-24


def test_a_rare_number_is_prepared_as_a_rare_category():
    number, category = (prepare(columns(RARE), [n], 1000).matrix(columns(RARE), 1000) for n in (None, 2))
    np.testing.assert_array_equal(number[:, 0], category[:, 1])


def test_rows_to_come_may_be_further_from_the_mean():
    made = prepare(columns(RARE), [None], 1000)
    per_one = 10.0 / 0.997
    np.testing.assert_allclose(
        made.matrix(columns([3.0, -2.0]), 2)[:, 0], [2.997 * per_one, -2.003 * per_one], rtol=1e-6
    )


def test_rows_of_weight_0_do_not_count():
    feature, weight = np.append(RARE, 500.0), np.append(np.ones(1000), 0.0)
    alone, beside = prepare(columns(RARE), [None], 1000), prepare(columns(feature), [None], 1001, weight=weight)
    np.testing.assert_allclose(beside.scale, alone.scale, rtol=1e-12)
    np.testing.assert_allclose(beside.mean, alone.mean, rtol=1e-12)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -3e30, 0.0])
def test_a_constant_column_becomes_zero_also_for_rows_to_come(value):
    made = prepare(columns([value] * 7, [value, NAN] * 3 + [NAN], [NAN] * 7), [None] * 3, 7)
    assert not made.matrix(columns([value, 5, NAN], [value, 5, NAN], [value, 5, NAN]), 3).any()


def test_categories_become_a_column_each():
    codes = columns([0, 2, 2, 0, NAN, 2])
    made = prepare(codes, [3], 6)
    X = made.matrix(codes, 6)
    assert made.n_columns == X.shape[1] == 3
    of_first = np.array([1, 0, 0, 1, 0, 0])
    np.testing.assert_allclose(X[:, 0], (of_first - of_first.mean()) / of_first.std(), rtol=0, atol=2.0**-25)
    assert not X[:, 1].any()  # nobody is in the second category
    unknown = made.matrix(columns([3, NAN]), 2)
    np.testing.assert_allclose(
        unknown[0], (-made.mean * (made.scale > 0)) / np.where(made.scale > 0, made.scale, 1), atol=2.0**-25
    )
    np.testing.assert_array_equal(unknown[0], unknown[1])


def test_names_tell_columns_of_categories():
    made = prepare(columns([1, 2], [0, 1]), [None, 2], 2)
    assert made.names(["age", "sex"], [None, ("f", "m")]) == ["age", "sex=f", "sex=m"]


def test_a_table_without_columns_gives_none():
    made = prepare([], [], 5)
    assert made.n_columns == 0
    assert made.matrix([], 5).shape == (5, 0)


def test_columns_are_multiples_of_what_parties_count_in():
    rng = np.random.default_rng(4)
    features = [rng.normal(size=50).astype(np.float32), rng.integers(0, 3, 50).astype(np.float32)]
    columns = prepare(features, (None, 3), 50).matrix(features, 50) * 2.0**24
    np.testing.assert_array_equal(columns, np.rint(columns))
    assert len(np.unique(columns)) > 40
