"""What counts as an id, and when two are equal."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import unicodedata
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.data.ids import Ids, by_id, read_ids
from treaty.errors import ConfigError, DataError

DAY = datetime.date(2020, 2, 29)


def forms(ids: Ids) -> list[bytes]:
    return [ids.data[a:b].tobytes() for a, b in zip(ids.offsets, ids.offsets[1:], strict=False)]


def groups(ids: Ids) -> list[list[int]]:
    return [ids.rows[a:b].tolist() for a, b in zip(ids.starts, ids.starts[1:], strict=False)]


SAME_NUMBERS: dict[str, Any] = {
    "list": [3, 1, 20],
    "uint8": np.array([3, 1, 20], np.uint8),
    "float": np.array([3.0, 1.0, 20.0]),
    "float16": np.array([3, 1, 20], np.float16),
    "decimal": [Decimal("3.00"), Decimal("1.0"), Decimal(20)],
    "pandas nullable": pd.Series([3, 1, 20], dtype="Int32"),
    "polars": pl.Series([3, 1, 20], dtype=pl.UInt64),
    "arrow chunks": pa.chunked_array([[3], [1, 20]]),
}
SAME_TEXTS: dict[str, Any] = {
    "list": ["b", "a", "é"],
    "numpy": np.array(["b", "a", "é"]),
    "pandas": pd.Series(["b", "a", "é"]),
    "pandas object": pd.Series(["b", "a", "é"], dtype=object),
    "pandas category": pd.Series(["b", "a", "é"], dtype="category"),
    "polars": pl.Series(["b", "a", "é"]),
    "polars category": pl.Series(["b", "a", "é"], dtype=pl.Categorical),
    "arrow view": pa.array(["b", "a", "é"], pa.string_view()),
    "decomposed, with spaces": [" b", "a\t", "e\u0301\u00a0"],
}
SAME_DATES: dict[str, Any] = {
    "list": [DAY],
    "pandas": pd.to_datetime(pd.Series([DAY.isoformat()])),
    "polars": pl.Series([DAY]),
    "date64": pa.array([DAY], pa.date64()),
}


@pytest.mark.parametrize("column", SAME_NUMBERS.values(), ids=SAME_NUMBERS)
def test_numbers_are_the_same_whatever_holds_them(column: Any) -> None:
    assert forms(read_ids(column)) == [b"i3", b"i1", b"i20"]


@pytest.mark.parametrize("column", SAME_TEXTS.values(), ids=SAME_TEXTS)
def test_texts_are_the_same_whatever_holds_them(column: Any) -> None:
    assert forms(read_ids(column)) == [b"tb", b"ta", "té".encode()]


@pytest.mark.parametrize("column", SAME_DATES.values(), ids=SAME_DATES)
def test_dates_are_the_same_whatever_holds_them(column: Any) -> None:
    ids = read_ids(column)
    assert (ids.kind, forms(ids)) == ("date", [b"d2020-02-29"])


def test_kinds_never_collide() -> None:
    columns: list[Any] = [[20200229], ["20200229"], [b"20200229"], [DAY], [DAY.isoformat()]]
    assert len({forms(read_ids(column))[0] for column in columns}) == len(columns)


BAD: dict[str, tuple[Any, str]] = {
    "fractions": ([1.0, 2.5], "expected whole numbers.* got 1 others"),
    "infinite": ([float("inf")], "expected whole numbers"),
    "too large for a float": ([2.0**60], "expected whole numbers"),
    "too large for a float32": (np.array([2.0**25], np.float32), "up to 16777216"),
    "decimal fractions": ([Decimal("0.5")], "with fractions"),
    "too large": ([2**70], "one type"),
    "mixed": ([1, "a"], "one type"),
    "mixed pandas": (pd.Series([1, "a"], dtype=object), "one type"),
    "no text": (["\ud800"], "one type"),
    "bool": ([True], "got bool"),
    "time of day": (pd.to_datetime(pd.Series(["2020-01-01 01:00"])), "times of day"),
    "time zone": (pd.to_datetime(pd.Series(["2020-01-01"])).dt.tz_localize("UTC"), "time zone"),
    "dataframe": (pd.DataFrame({"id": [1]}), "got a dataframe"),
    "matrix": ([[1, 2]], "2 dimensions"),
    "empty": ([], "0 rows without any"),
    "nulls": ([None, None], "2 rows without any"),
}


@pytest.mark.parametrize(("column", "message"), BAD.values(), ids=BAD)
def test_columns_that_hold_no_ids_are_refused(column: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_ids(column)


@pytest.mark.parametrize("options", [{"normalise": ["upper"]}, {"normalise": "nfc"}, {"on_duplicate": "last"}], ids=str)
def test_unknown_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        read_ids(["a"], **options)


@pytest.mark.parametrize(
    "column",
    [
        ["a", None, "", " ", "b"],
        pd.Series(["a", None, "", pd.NA, "b"], dtype=object),
        pl.Series(["a", None, "", None, "b"]),
    ],
    ids=["list", "pandas", "polars"],
)
def test_nulls_and_empty_texts_are_dropped_and_counted(column: Any) -> None:
    ids = read_ids(column)
    assert (ids.n_rows, ids.n_null, ids.rows.tolist()) == (5, 3, [0, 4])


def test_not_a_number_is_no_id() -> None:
    ids = read_ids(np.array([1.0, np.nan, 2.0]))
    assert (ids.n_null, forms(ids)) == (1, [b"i1", b"i2"])


def test_case_is_kept_unless_declared() -> None:
    assert forms(read_ids(["Ab"])) == [b"tAb"]
    assert forms(read_ids(["Ab", "É"], normalise=["lower"])) == [b"tab", "té".encode()]
    assert forms(read_ids([" a"], normalise=[])) == [b"t a"]


def test_accents_compose_whatever_arrow_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pa.compute, "utf8_normalize")  # arrow's decomposes before version 26
    column = ["Zo\u00eb", "plain", None, "Zoe\u0308 ", "\u212b", "a\u0308\u0323"]
    assert forms(read_ids(column, on_duplicate="first")) == [
        b"t" + form.encode() for form in ("Zo\u00eb", "plain", "\u00c5", "\u1ea1\u0308")
    ]


def test_case_of_all_letters_is_ignored_alike() -> None:
    same = ["ΟΔΟΣ", "οδος", "οδοσ", "Οδος"]
    assert {read_ids([form], normalise=["lower"]).data.tobytes() for form in same} == {b"t" + same[2].encode()}
    assert forms(read_ids(["\u212a\u00a0B"], normalise=["lower", "strip"])) == ["tk\u00a0b".encode()]


def test_letters_have_the_forms_that_every_python_gives_them() -> None:
    """What form and case change is the same under Unicode 14, 15 and 15.1 (Python 3.11, 3.12 and 3.13)."""
    letters = [chr(code) for code in range(0x1C80) if unicodedata.category(chr(code)) != "Cn"]
    column = [f"{ord(letter)} {letter}" for letter in letters]
    found = [form.decode() for form in forms(read_ids(column, normalise=["nfc", "lower"]))]
    changed = sorted({form.removeprefix("t") for form in found}.difference(column))
    assert len(changed) == 639
    assert hashlib.sha256("\n".join(changed).encode()).hexdigest()[:16] == "b35f31342bce0156"


def test_white_space_is_what_python_takes_for_it() -> None:
    white = [chr(code) for code in range(0x110000) if chr(code).isspace()]
    assert forms(read_ids([f"{''.join(white)}a{''.join(white)}"])) == [b"ta"]
    assert forms(read_ids(["\u200b\ufeff"])) == ["t\u200b\ufeff".encode()]


def test_characters_that_python_does_not_know_are_refused_where_their_form_matters() -> None:
    column = ["secret\u0378", "b", "\U000e0fff"]  # assigned in no Unicode so far
    for steps in (["nfc"], ["lower"]):
        with pytest.raises(
            DataError, match=r"bank: expected ids with characters of Unicode .*, got 2 with others"
        ) as caught:
            read_ids(column, party="bank", normalise=steps)  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)
    assert len(read_ids(column, normalise=["strip"])) == 3
    assert len(read_ids(["\ue000\ufffd"])) == 1


def test_text_that_is_not_utf8_is_refused() -> None:
    column = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xffa")]
    )
    with pytest.raises(DataError, match="expected ids as text in UTF-8"):
        read_ids(column)


def test_normalisation_is_the_same_in_any_order() -> None:
    assert read_ids(["a"], normalise=["strip", "nfc"]).normalise == read_ids(["a"]).normalise


def test_repeated_ids_are_refused_and_never_shown() -> None:
    with pytest.raises(DataError, match="bank: expected every id once, got 2 rows") as caught:
        read_ids(["secret", "b", "secret", " secret"], party="bank")
    assert "secret" not in str(caught.value)
    assert caught.value.public == "its table holds ids more than once"


def test_first_keeps_first_rows_and_expand_all() -> None:
    column = [None, "b", "a", "b", "c", "b"]
    first, every = (read_ids(column, on_duplicate=how) for how in ("first", "expand"))  # type: ignore[arg-type]
    assert forms(first) == forms(every) == [b"tb", b"ta", b"tc"]
    assert groups(first) == [[1], [2], [4]]
    assert groups(every) == [[1, 3, 5], [2], [4]]
    assert first.n_repeated == every.n_repeated == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=4)), min_size=1))
def test_groups_are_those_of_a_dictionary(column: list[str | None]) -> None:
    expected: dict[str, list[int]] = {}
    for row, value in enumerate(column):
        key = unicodedata.normalize("NFC", value or "")
        if key:
            expected.setdefault(key, []).append(row)
    if not expected:
        return
    ids = read_ids(column, normalise=["nfc"], on_duplicate="expand")
    found = {form[1:].decode(): group for form, group in zip(forms(ids), groups(ids), strict=True)}
    assert found == expected


# ---------------------------------------------------------------- columns too long to hold

COLUMNS: dict[str, Any] = {
    "numbers": [5, None, 3, 5, 20, 3, -1, None, 5, 7],
    "floats": np.array([5.0, np.nan, 3.0, 5.0, 7.0, 8.0]),
    "texts": ["b", "", "é", "e\u0301", " b", None, "a" * 300, "中", "b", "\U0001f600"],
    "bytes": [b"x", b"\0", b"x", b"", b"yy"],
    "dates": [DAY, None, DAY, datetime.date(1969, 1, 1)],
    "categories": pd.Series(["b", "a", "é", "b", None, "a"], dtype="category"),
    "chunks": pa.chunked_array([["b", "a"], [], ["é", "b", None], ["c"]]),
    "one null piece": [None, None, None, "a", "b", "a"],
    "all the same": ["x"] * 20,
}


@pytest.mark.parametrize("how", ["first", "expand"])
@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("in_memory", [1, 3, 24], ids=str)
def test_long_columns_are_read_from_files_to_the_same_ids(column: Any, how: Any, in_memory: int) -> None:
    held, stored = read_ids(column, on_duplicate=how), read_ids(column, on_duplicate=how, in_memory=in_memory)
    assert isinstance(stored.data.base, memoryview) == (in_memory < len(column))
    same_ids(stored, held)


def same_ids(stored: Ids, held: Ids) -> None:
    for name in ("kind", "n_rows", "n_null", "n_repeated"):
        assert getattr(stored, name) == getattr(held, name)
    for name in ("data", "offsets", "rows", "starts"):
        assert getattr(stored, name).dtype == getattr(held, name).dtype
        assert getattr(stored, name).tolist() == getattr(held, name).tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 9), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=80),
    st.sampled_from(["first", "expand"]),
    st.integers(1, 40),
)
def test_long_columns_with_repeats_are_grouped_as_short_ones(column: list[Any], how: Any, in_memory: int) -> None:
    if any(value is not None for value in column):
        column = pa.array(column, pa.int64())
        same_ids(read_ids(column, on_duplicate=how, in_memory=in_memory), read_ids(column, on_duplicate=how))


@pytest.mark.parametrize("column", [["a", "b", "c", "a", "a"], [None] * 5], ids=["repeated", "nothing"])
def test_long_columns_are_refused_like_short_ones(
    column: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    messages = []
    for in_memory in (3, 100):
        with pytest.raises(DataError) as caught:
            read_ids(column, in_memory=in_memory)
        messages.append((str(caught.value), caught.value.public))
    assert messages[0] == messages[1]
    assert list(tmp_path.iterdir()) == []


def test_long_column_in_chunks_is_copied_in_pieces_alone() -> None:
    column = pa.chunked_array(
        [[f"customer-{k:08d}" for k in range(start, start + 500)] for start in range(0, 20_000, 500)]
    )
    plain = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(plain)
    pa.set_memory_pool(counted)
    try:
        read_ids(column, in_memory=1000)
    finally:
        pa.set_memory_pool(plain)
    assert 0 < counted.max_memory() < column.nbytes / 2


def test_files_of_ids_last_as_long_as_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ids = read_ids(list(range(100)), in_memory=10)
    data, offsets = ids.strings(98, 100)
    assert [data[a:b].tobytes() for a, b in itertools.pairwise(offsets)] == [b"i98", b"i99"]
    assert ids.first_rows(97, 100).tolist() == [97, 98, 99]
    mapped = Path("/proc/self/maps").read_text().count(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    del ids
    assert (mapped, Path("/proc/self/maps").read_text().count(str(tmp_path))) == (4, 0)


@settings(deadline=None)
@given(
    ids=st.lists(st.text("abé0", min_size=1, max_size=4), min_size=1, max_size=30, unique=True),
    seed=st.integers(0, 9),
)
def test_rows_sorted_by_id_are_the_same_whatever_their_order(ids, seed):
    column = pa.chunked_array([pa.array(sorted(ids)[:3]), pa.array(sorted(ids)[3:], pa.string())])
    place = np.random.default_rng(seed).permutation(len(ids))
    moved = column.take(pa.array(place))
    (order, digest), (other, again) = by_id(column), by_id(moved)
    assert column.take(pa.array(order)).to_pylist() == moved.take(pa.array(other)).to_pylist()
    assert digest == again
    if len(ids) > 1:
        assert by_id(column.slice(1))[1] != digest


def test_digests_of_ids_tell_kinds_and_borders_apart_and_ignore_widths():
    digests = [by_id(pa.array(ids))[1] for ids in (["1", "2"], [1, 2], ["12", ""], ["1", "2", ""])]
    assert len(set(digests)) == 4
    assert by_id(pa.array([2.0, 1.0]))[1] == by_id(pa.array([1, 2], pa.int16()))[1]
    assert by_id(pa.array([" B", "a"]), normalise=["strip", "lower"])[1] == by_id(pa.array(["a", "b "]))[1]
    assert by_id(pa.array(["b", "a", "b"]))[0].tolist() == [1, 0, 2]
