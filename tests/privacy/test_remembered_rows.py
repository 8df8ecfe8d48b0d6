"""Rows whose buckets were randomised: who is recognised, and what is decided of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.data.binning import fit_bins
from treaty.data.ids import canonical_ids
from treaty.data.table import to_table
from treaty.models.trees import record_split
from treaty.privacy.randomised_response import KnownRows, RandomisedRows
from treaty.systems.federboost_vertical.buckets import stand_ins
from treaty.trees.ensemble import SplitTable

NAN = np.float32(np.nan)


@settings(max_examples=80)
@given(data=st.data())
def test_a_stand_in_goes_where_every_split_sends_its_bucket(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    n_rows, max_bin = data.draw(st.integers(1, 60)), data.draw(st.integers(2, 9))
    numbers_of = rng.choice([0.0, -0.0, 1.5, 2.0, 1e30, -1e30, 3.25], n_rows).astype(np.float32)
    numbers_of[rng.random(n_rows) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))] = NAN
    kinds = pd.Categorical(rng.choice(list("abcdefghij"), n_rows), categories=list("abcdefghijk"))
    table = to_table(pd.DataFrame({"number": numbers_of, "kind": kinds}), party="shop")
    bins = fit_bins(table, max_bin)
    values, splits = stand_ins(bins), SplitTable()
    for feature in range(2):
        n_bins = int(bins.n_bins[feature])
        going = np.zeros(256, np.bool_)
        if feature == 0:
            going[: data.draw(st.integers(1, max(1, n_bins)))] = True
        else:
            going[:n_bins] = data.draw(st.lists(st.booleans(), min_size=n_bins, max_size=n_bins))
        going[n_bins] = data.draw(st.booleans())
        record = record_split(splits, bins, feature, going)
        assert len(values[feature]) == n_bins + 1
        matrix = np.full((n_bins + 1, 2), NAN)
        matrix[:, feature] = values[feature]
        packed = splits.decide(matrix, np.array([record], np.int32))
        went = np.unpackbits(packed[0], count=n_bins + 1).astype(bool)
        np.testing.assert_array_equal(went, going[: n_bins + 1])


def known(matrix, ids=None) -> KnownRows:
    return KnownRows.of(np.array(matrix, np.float32), ids)


def test_rows_with_the_values_of_known_ones_in_all_columns_are_counted():
    rows = known([[1.0, 2.0], [0.0, NAN], [3.0, 4.0]])
    same = np.array([[-0.0, -NAN], [3.0, 4.0], [3.0, 4.0], [3.0, NAN], [2.0, 1.0], [1.0, 4.0]], np.float32)
    assert rows.with_equal_values(same).sum() == 3
    assert not rows.recognise("")
    assert not known(np.zeros((3, 0))).with_equal_values(np.zeros((5, 0), np.float32)).any()


def test_ids_are_found_at_their_first_place():
    rows = known(np.zeros((4, 1)), ["text b", "text a", "text b", "integer 7"])
    assert rows.recognise("")
    assert rows.places(["integer 7", "text a", "text b", "text 7", ""]).tolist() == [3, 1, 0, -1, -1]


def test_digests_are_of_this_model_alone():
    rows, ids = np.arange(8, dtype=np.float32)[:, None], [f"text {k}" for k in range(8)]
    one, other = known(rows, ids), known(rows, ids)
    assert one.key != other.key
    assert not set(one.values.tolist()) & set(other.values.tolist())
    assert not set(one.ids.tolist()) & set(other.ids.tolist())
    assert not set(one.ids.tolist()) & set(one.values.tolist())
    # a row and an id of the same bytes
    alike = known(np.frombuffer(b"abcd", np.float32)[None], ["abcd"])
    assert alike.values[0] != alike.ids[0]


def test_known_persons_get_stand_ins_and_others_keep_their_values():
    rows = known([[5.0, 6.0], [7.0, 8.0]], ["a", "b"])
    stand = [np.array([-1.0, -2.0, NAN], np.float32), np.array([-3.0, NAN], np.float32)]
    told = RandomisedRows(rows, np.array([1, 0, 2, 1], np.uint8), stand)
    matrix = np.array([[7.0, 8.0], [9.0, 9.0], [5.0, 6.0]], np.float32)
    shown = told.in_place_of_values(matrix, ["b", "c", "a"])
    np.testing.assert_array_equal(shown, np.array([[NAN, NAN], [9.0, 9.0], [-2.0, -3.0]], np.float32))
    np.testing.assert_array_equal(matrix[0], [7.0, 8.0])
    assert told.in_place_of_values(matrix, ["x", "y", "z"]) is matrix


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (["Ana ", "bo"], ["ana", "bo "], False),
        (["7", "8"], [7, 8], False),
        ([7.0, 8.0], [7, 8], True),
        (["é", "b"], ["e\u0301", "b"], True),
        ([b"\x01", b"\x02"], ["01", "02"], False),
    ],
)
def test_ids_are_compared_in_canonical_form(left, right, same):
    found = [canonical_ids(pd.Series(of), normalise=("nfc",)) for of in (left, right)]
    assert (found[0] == found[1]) is same
    assert canonical_ids(pd.Series(left), normalise=("nfc", "strip", "lower")) == canonical_ids(
        pd.Series(left[::-1]), normalise=("nfc", "strip", "lower")
    )[::-1]  # fmt: skip
