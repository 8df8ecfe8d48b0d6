"""Large CSV files are read piece by piece, into what one reading of all would give."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from treaty.data import file_formats, reading
from treaty.data.arrow_tables import FileTable
from treaty.data.file_formats import csv_facts, lines_of, opened_text, read_csv, write_csv_columns
from treaty.data.reading import open_table, read_table, table_facts
from treaty.data.table import to_table
from treaty.errors import DataError

POOLS = {
    "whole": ["1", "0", "-7", ""],
    "number": ["1", "2.5", "1e300", "NA", "12345678901234567890"],
    "truth": ["1", "0", "true", "false", ""],
    "more truth": ["1", "5", "true"],
    "day": ["2020-01-01", "", "2020-01-02"],
    "moment": ["2020-01-01", "2020-01-01 10:00:00", "2020-01-01 10:00:00.25"],
    "zone": ["2020-01-01", "2020-01-01T10:00:00Z"],
    "hour": ["10:00", "10:00:01", "1"],
    "town": ["Rome", "1", '"a, b"', '"two\nlines"', '"so ""said"""', 'five" wide', '"" x'],
    "none": ["", "NA"],
}


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_pieces_of_a_file_have_the_types_and_values_of_the_whole(tmp_path, seed, ends, monkeypatch):
    """Cells come in runs, so that pieces differ in what their cells could be."""
    rng = np.random.default_rng(seed)
    names = list(POOLS) if seed else ["whole"]
    rows = []
    for row in range(60):
        few = [POOLS[name][: 1 + (row * len(POOLS[name])) // 60] for name in names]
        rows.append(",".join(pool[rng.integers(len(pool))] for pool in few))
    text = ends.join([",".join(names), *rows, *([""] if seed % 2 else [])])
    content = (b"\xef\xbb\xbf" if seed % 3 == 0 else b"") + text.encode()
    path = tmp_path / ("t.csv.gz" if seed % 4 == 0 else "t.csv")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    monkeypatch.setattr(file_formats, "PIECE", int(rng.integers(40, 400)))
    whole = read_csv(path, ["truth"])
    n_rows, schema = csv_facts(path, ["truth"])
    assert (n_rows, schema) == (whole.num_rows, whole.schema)
    assert write_csv_columns(path, schema, tmp_path).equals(whole)


def test_text_in_another_encoding_is_found_in_any_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "PIECE", 16)
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,b\n" + b"x,1\n" * 20 + b"\xff,2\n")
    assert [str(kind) for kind in csv_facts(path, [])[1].types] == ["binary", "int64"]


@pytest.mark.parametrize(
    "content",
    [
        b"a,b\n1,2\n3\n",
        b"a,b\n" + b"1,2\n" * 30 + b"3,4,5\n" + b"1,2\n" * 9,
        b"a;b\n1;2\n",
        b"PAR1 and more",
        b" \n\n",
        b"a,b\n",
        b"a,a\n1,x\n2,3\n",
        b"a,\n1,2\n",
        b"a,b\n" + b"1,2\n" * 30 + b"\xff,2\n",
    ],
    ids=["short row", "long row", "separator", "Parquet", "empty", "no rows", "repeated", "nameless", "encoding"],
)
def test_files_that_cannot_be_read_are_refused_in_the_same_words(tmp_path, content, monkeypatch):
    monkeypatch.setattr(file_formats, "PIECE", 16)
    (tmp_path / "t.csv").write_bytes(content)
    said = []
    for limit in (1 << 40, 0):
        monkeypatch.setattr(reading, "ON_DISK", limit)
        with pytest.raises(DataError) as caught:
            open_table(tmp_path / "t.csv", party="bank")
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_packed_file_that_is_cut_off_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "ON_DISK", 0)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 300)[:-9])
    with pytest.raises(DataError, match=r"bank: expected a readable file, got one that is damaged, cut off"):
        open_table(tmp_path / "t.csv.gz", party="bank")


def test_a_quote_that_is_not_closed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "PIECE", 16)
    monkeypatch.setattr(file_formats, "_LONGEST", 64)
    (tmp_path / "t.csv").write_text('a,b\n1,"2\n' + "1,2\n" * 50)
    with pytest.raises(DataError, match=r"expected lines, got none that ends within \d+ bytes; is a quote not closed"):
        table_facts(tmp_path / "t.csv")


def test_a_large_file_is_the_table_that_a_small_one_is(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "PIECE", 64)
    monkeypatch.setattr(reading, "ON_DISK", 100)
    lines = [f"{k / 7},{'' if k % 3 else k},{'xyz'[k % 3]}" for k in range(50)]
    (tmp_path / "t.csv").write_text("\n".join(["number,gaps,town", *lines]))
    table = open_table(tmp_path / "t.csv", folder=tmp_path / "scratch", drop=["gaps"])
    assert isinstance(table, FileTable)
    one, other = (
        to_table(of, text_as_categories=True) for of in (read_table(tmp_path / "t.csv", drop=["gaps"]), table)
    )
    assert one.schema == other.schema
    assert one.matrix().tobytes() == other.matrix().tobytes()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_lines_of_rows_are_found_without_the_whole_file(tmp_path):
    (tmp_path / "t.csv").write_text('a,b\n"x\ny",1\n\nz,2\n')
    with opened_text(tmp_path / "t.csv") as lines:
        assert lines_of(lines, [0, 1]) == [2, 5]
