from __future__ import annotations

import pyarrow as pa
import pytest

from treaty.data.arrow_tables import typed_ids, widths
from treaty.data.ids import canonical_ids


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["123", " 7", "-5", "0", None], ["123", "7", "-5", "0", None]),
        (["123.0", "7."], ["123", "7"]),
        (["9223372036854775807", "-1"], ["9223372036854775807", "-1"]),
        (["2020-01-31", None], ["2020-01-31", None]),
        (["2020-01-31 00:00:00"], ["2020-01-31"]),
    ],
)
def test_ids_that_lose_nothing_match_those_of_files_with_types(cells, found):
    ids = typed_ids(pa.array(cells))
    assert not pa.types.is_string(ids.type)
    assert [None if id is None else str(id) for id in ids.to_pylist()] == found


@pytest.mark.parametrize(
    "cells",
    [
        ["00123", "124"],
        ["+5", "6"],
        ["12E3", "13"],
        ["12345678901234567890", "1"],
        ["9223372036854775808", "1"],
        ["2020-01-31 12:30:00"],
        ["A1", "2"],
        ["1.5", "2"],
        [None, None],
        ["-0", "1"],
    ],
    ids=str,
)
def test_ids_that_would_lose_something_stay_as_the_file_has_them(cells):
    assert typed_ids(pa.array(cells, pa.string())).to_pylist() == cells


def test_padded_and_unpadded_ids_are_two():
    first, second = (canonical_ids(typed_ids(pa.array(cells))) for cells in (["00123", "7"], ["123", "7"]))
    assert set(first).isdisjoint(second)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (pa.array([*range(100, 400), 7, None]), "whole numbers, 300 of 3 digits, 1 of 1"),
        (pa.array(["00123"] * 1200 + ["é"]), "text, 1,200 of 5 characters, 1 of 1"),
        (
            pa.chunked_array([["a" * k] for k in (1, 1, 2, 3, 4, 5)]),
            "text, 2 of 1 characters, 1 of 2, 1 of 3, 2 of other lengths",
        ),
        (pa.array(["a", "bb"]).dictionary_encode(), "text, 1 of 1 characters, 1 of 2"),
        (pa.array([0], pa.date32()), "date32[day]"),
        (pa.array([None], pa.string()), "text"),
    ],
    ids=["numbers", "text", "many", "dictionary", "dates", "none"],
)  # fmt: skip
def test_how_long_ids_are_is_said(ids, said):
    assert widths(ids) == said
