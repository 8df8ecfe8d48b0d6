from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from large_tables import WRITTEN, all_large, random_table, write  # noqa: F401
from treaty.data.arrow_tables import FileTable, as_text, has_values
from treaty.data.binning import fit_bins
from treaty.data.reading import open_table, read_table
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import contiguous, folder_of

IN_FILES = [name for name in WRITTEN if name != "t.csv"]


def both(path, folder=None):
    return read_table(path), open_table(path, folder=folder)


def assert_same(one: Table, other: Table) -> None:
    assert one.schema == other.schema
    assert one.n_rows == other.n_rows
    for name, left, right in zip(one.schema.names, one.columns, other.columns, strict=True):
        assert left.dtype == right.dtype == (np.float64 if name in one.schema.origins else np.float32)
        assert left.tobytes() == right.tobytes()


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("name", IN_FILES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_table_on_disk_equals_the_one_in_memory(tmp_path, name, shuffled):
    in_memory, on_disk = both(write(random_table(), tmp_path / name), tmp_path / "scratch")
    assert isinstance(on_disk, FileTable)
    if shuffled:
        rows = pa.array(np.random.default_rng(1).permutation(700)[:300])
        in_memory, on_disk = in_memory.take(rows), on_disk.take(rows)
    one, other = (to_table(table, text_as_categories=True) for table in (in_memory, on_disk))
    assert_same(one, other)
    assert all(folder_of(column) == tmp_path / "scratch" for column in other.columns)
    assert other.matrix().tobytes() == one.matrix().tobytes()
    assert folder_of(other.matrix()) is not None
    assert list((tmp_path / "scratch").iterdir()) == []  # its files have no names


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("max_bin", [2, 32, 255])
def test_bins_and_codes_on_disk_equal_those_in_memory(tmp_path, max_bin):
    in_memory, on_disk = both(write(random_table(), tmp_path / "t.parquet"))
    one, other = (to_table(table, text_as_categories=True) for table in (in_memory, on_disk))
    bins, same = fit_bins(one, max_bin), fit_bins(other, max_bin)
    assert np.array_equal(bins.n_bins, same.n_bins)
    for left, right in zip(bins.cuts, same.cuts, strict=True):
        assert (left is None) == (right is None)
        assert left is None or left.tobytes() == right.tobytes()
    codes, mapped = bins.transform(one), same.transform(other)
    assert np.array_equal(codes, mapped)
    assert np.shares_memory(contiguous(mapped.T), mapped)  # by column there is one copy
    by_row = contiguous(mapped)
    assert by_row.flags.c_contiguous
    assert folder_of(by_row) is not None
    assert np.array_equal(by_row, codes)


@pytest.mark.usefixtures("all_large")
def test_columns_on_disk_change_as_those_in_memory(tmp_path):
    for table in both(write(random_table(), tmp_path / "t.parquet")):
        changed = as_text(table, ["whole"]).drop_columns(["town"])
        changed = changed.append_column("new", pa.nulls(700, pa.float32())).take(pa.array([5, 3]))
        assert changed["whole"].to_pylist() == [str(table["whole"][row]) for row in (5, 3)]
        assert changed["new"].to_pylist() == [None, None]
        assert changed.num_rows == 2
        assert [has_values(table, name) for name in ("plain", "of none")] == [True, False]


@pytest.mark.usefixtures("all_large")
def test_the_schema_of_training_is_kept_on_disk(tmp_path):
    table = random_table()
    schema = to_table(table, text_as_categories=True).schema
    other = random_table(seed=3).select(["town", *(name for name in table.column_names if name != "town")])
    other = other.set_column(0, "town", pa.array([None, "Paris", "Lima", *other["town"].to_pylist()[3:]]))
    said: list[list[str]] = [[], []]
    made = [
        to_table(read, schema=schema, on_unseen=words.append)
        for read, words in zip(both(write(other, tmp_path / "t.parquet")), said, strict=True)
    ]
    assert_same(*made)
    assert said[0] == said[1] != []


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize(
    "column",
    [
        [1.0, float("inf"), 3.0],
        [1e300, 1.0, 2.0],
        [None, datetime.date(2020, 1, 1), None],
        [[1], [2], None],
        [decimal.Decimal("1.50"), None, decimal.Decimal("2.25")],
        [b"a", b"b", None],
    ],
    ids=["infinite", "beyond float32", "dates", "lists", "decimals", "bytes"],
)
def test_unusual_columns_are_told_as_in_memory(tmp_path, column):
    pq.write_table(pa.table({"a": [1, 2, 3], "odd": pa.array(column)}), tmp_path / "t.parquet", row_group_size=1)
    ends = []
    for table in both(tmp_path / "t.parquet"):
        try:
            ends.append(repr(to_table(table, text_as_categories=True, place="t").matrix()))
        except (DataError, TypeError) as error:
            ends.append(str(error))
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("all_large")
def test_rows_that_are_not_used_may_be_infinite(tmp_path):
    pq.write_table(pa.table({"a": [1.0, float("inf"), 3.0]}), tmp_path / "t.parquet")
    made = [to_table(table.take(pa.array([2, 0]))) for table in both(tmp_path / "t.parquet")]
    assert_same(*made)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_a_damaged_file_is_refused_by_name(tmp_path, name):
    path = write(random_table(5000), tmp_path / name)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 200 + content[204:] if "parquet" in name else content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"bank: expected (a Parquet|an arrow) file, got .* - at .*{name}"):
        to_table(open_table(path, party="bank"), text_as_categories=True)


@pytest.mark.usefixtures("all_large")
def test_a_folder_without_room_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    path = write(random_table(), tmp_path / "t.parquet")
    monkeypatch.setattr("treaty.machine.arrays.shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConfigError, match=r"cannot keep a table .* in .*scratch, .* 0\.0 GB are free; make room"):
        open_table(path, folder=tmp_path / "scratch")


@pytest.mark.usefixtures("all_large")
def test_other_files_are_refused_as_in_memory(tmp_path):
    table = random_table(30)
    path = write(table, tmp_path / "t.parquet")
    nameless = write(table.rename_columns(["", *table.column_names[1:]]), tmp_path / "n.parquet")
    repeated = write(table.rename_columns(["gaps", *table.column_names[1:]]), tmp_path / "r.arrow")
    for given, drop in ((path, ["twon"]), (nameless, []), (repeated, []), (tmp_path / "none.parquet", [])):
        said = []
        for read in (read_table, open_table):
            with pytest.raises(DataError) as caught:
                read(given, drop=drop, drop_all=True)
            said.append(str(caught.value))
        assert said[0] == said[1]


def test_small_tables_stay_in_memory(tmp_path):
    assert isinstance(open_table(write(random_table(), tmp_path / "t.parquet")), pa.Table)
