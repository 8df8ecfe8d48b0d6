import datetime
import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from treaty.data.reading import check_there, read_table, refuse_strays, table_facts, write_predictions
from treaty.data.table import to_table
from treaty.errors import DataError

CSV = "id,x,city,late\n1,0.5,Rom,true\n2,,Oslo,false\n3,-2,NA,true\n"


def write(path: Path, content: str | bytes) -> Path:
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.fixture(params=["t.csv", "t.csv.gz", "T.CSV", "t.parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    if path.suffix != ".parquet":
        return write(path, CSV)
    frame = pd.DataFrame({"id": [1, 2, 3], "x": [0.5, None, -2], "city": ["Rom", "Oslo", None]})
    frame.assign(late=[True, False, True]).set_index(pd.Index([7, 8, 9])).to_parquet(path)
    return path


def test_every_format_reads_the_same(file: Path) -> None:
    table = read_table(file)
    assert isinstance(table, pa.Table)
    assert table.to_pydict() == {
        "id": [1, 2, 3],
        "x": [0.5, None, -2.0],
        "city": ["Rom", "Oslo", None],
        "late": [True, False, True],
    }


def test_columns_are_kept_in_order_and_dropped(file: Path) -> None:
    assert read_table(file, columns=["late", "x"]).column_names == ["late", "x"]
    assert read_table(file, drop=["id", "not there"]).column_names == ["x", "city", "late"]
    assert read_table(str(file), columns=["late", "x"], drop=["x"]).column_names == ["late"]


def test_a_misspelt_column_to_drop_is_refused_with_near_names(file: Path) -> None:
    with pytest.raises(
        DataError, match=r"^shop: .* drop, 'Late', 'nothing', got .*; did you mean 'late'\? - at .*[tT]\."
    ):
        read_table(file, drop=["Late", "id", "nothing"], drop_all=True, party="shop")
    assert read_table(file, drop=["id"], drop_all=True).column_names == ["x", "city", "late"]


def test_text_of_a_file_becomes_categories(file: Path) -> None:
    table = to_table(read_table(file, drop=["id"]), text_as_categories=True)
    assert table.schema.categories == (None, ("Oslo", "Rom"), None)
    assert np.array_equal(table.matrix(), [[0.5, 1, 1], [np.nan, 0, 0], [-2, np.nan, 1]], equal_nan=True)


def test_absent_columns_are_named(file: Path) -> None:
    with pytest.raises(
        DataError, match=r"^shop: expected columns 'y', 'z', got .* without them, with 'id', 'x', 'city'"
    ):
        read_table(file, columns=["x", "y", "z"], party="shop")


def test_text_that_is_not_utf_8_is_named_by_its_column(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "x,city,late\n1,Malmö,ja\n2,Rom,nein\n".encode("latin-1"))
    with pytest.raises(
        DataError, match=r"^shop: expected text in UTF-8, got another encoding in 'city'; save .*t\.csv$"
    ):
        read_table(path, party="shop")
    assert read_table(path, drop=["city"]).column_names == ["x", "late"]


def test_type_of_a_column_is_settled_by_all_rows(tmp_path: Path) -> None:
    numbers = "\n".join(map(str, range(300_000)))  # more than arrow's usual block
    table = read_table(write(tmp_path / "t.csv", f"x\n{numbers}\n0.5\n"))
    assert table["x"].type == pa.float64()
    text = read_table(write(tmp_path / "t.csv.gz", f"x\n{numbers}\nword\n"))
    assert text["x"].type == pa.string()


def test_numbers_are_taken_as_text_on_request(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "zip,x\n01,1\n22,2\n"), text=["zip"])
    assert table["zip"].to_pylist() == ["01", "22"]
    assert table["x"].to_pylist() == [1, 2]


def test_dates_in_files_are_refused_by_to_table(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "day\n2020-01-01\n"))
    assert table["day"].to_pylist() == [datetime.date(2020, 1, 1)]
    with pytest.raises(DataError, match=r"column 'day'.*convert to numbers"):
        to_table(table, text_as_categories=True)


def test_parquet_categories_keep_their_order(tmp_path: Path) -> None:
    frame = pd.DataFrame({"c": pd.Categorical(["b", "a"], categories=["z", "b", "a"])})
    frame.to_parquet(tmp_path / "t.parquet")
    assert to_table(read_table(tmp_path / "t.parquet")).schema.categories == (("z", "b", "a"),)


def test_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    assert read_table(write(tmp_path / "t.csv", b"\xef\xbb\xbfx,y\n1,2\n")).column_names == ["x", "y"]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"^shop: expected a file at .*{name}, got none"):
        read_table(tmp_path / name, party="shop")


@pytest.mark.parametrize("name", ["t.xlsx", "t.gz", "csv", "t.csv.zip"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"ending in \.csv, \.csv\.gz, \.parquet"):
        read_table(write(tmp_path / name, CSV))
    with pytest.raises(DataError, match=r"ending in \.csv, \.csv\.gz, \.parquet"):
        write_predictions(tmp_path / name, {"p": [1]})


@pytest.mark.parametrize("content", ["", "\n\n"])
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_empty_files_are_refused(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(DataError, match=r"got an empty file"):
        read_table(write(tmp_path / name, content))


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"at least one row"):
        read_table(write(tmp_path / "t.csv", "a,b\n"))
    pa.parquet.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"at least one row"):
        read_table(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("content", "line", "length"),
    [
        ("a,b\n1,2\n3\n", 3, 1),
        ("a,b\n\n1,2\n\n3,4,5\n", 5, 3),
        ('a,b\n"x\ny",1\nsecret\n', 4, 1),
    ],
    ids=["short", "long after blank lines", "short after a quoted line break"],
)
def test_ragged_rows_are_named_by_line_without_their_values(
    tmp_path: Path, content: str, line: int, length: int
) -> None:
    with pytest.raises(DataError, match=rf"expected 2 values per row.*got {length} in line {line} - at") as raised:
        read_table(write(tmp_path / "t.csv", content))
    assert "secret" not in str(raised.value)


def test_repeated_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^shop: .*more than one of 'a'"):
        read_table(write(tmp_path / "t.csv", "a,b,a\n1,2,3\n"), party="shop")


@pytest.mark.parametrize("name", ["t.csv.gz", "t.parquet"])
def test_files_that_are_not_what_they_are_called_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"neither packed nor a parquet file")
    with pytest.raises(DataError, match=r"got text: name it \.csv"):
        read_table(tmp_path / name)


def test_damaged_gzip_files_are_refused(tmp_path: Path) -> None:
    packed = gzip.compress(CSV.encode() * 50)
    for damaged in (packed[: len(packed) // 2], packed[:12] + bytes(8) + packed[20:]):
        (tmp_path / "t.csv.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"expected a readable file"):
            read_table(tmp_path / "t.csv.gz")


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"UTF-8"):
        read_table(write(tmp_path / "t.csv", b"caf\xe9,b\n1,2\n"))


@pytest.mark.parametrize("name", ["p.csv", "p.csv.gz", "p.parquet"])
def test_predictions_are_read_back_exactly(tmp_path: Path, name: str) -> None:
    probability = np.random.default_rng(0).random(50)
    label = np.array(["yes", "no, never"] * 25)
    write_predictions(tmp_path / name, {"label": label, "probability": probability})
    table = read_table(tmp_path / name)
    assert table["probability"].to_pylist() == probability.tolist()
    assert table["label"].to_pylist() == label.tolist()
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1, 2], "b": [1]}, r"got 'a' \(2,\), 'b' \(1,\)"),
        ({}, "no columns"),
        ({"a": [[1]]}, r"'a' \(1, 1\)"),
    ],
)
def test_predictions_of_unequal_length_are_refused(tmp_path: Path, columns: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_predictions(tmp_path / "p.csv", columns)
    assert not (tmp_path / "p.csv").exists()


def test_predictions_into_a_folder_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"existing folder"):
        write_predictions(tmp_path / "nowhere" / "p.csv", {"a": [1]})


def refused(path: Path, features: list[str] | None = None, numeric: tuple[str, ...] = ()) -> str:
    """Return what is said of a file's cells that are no numbers; "" where nothing is."""
    table = read_table(path)
    features = [name for name in table.column_names if name not in numeric] if features is None else features
    try:
        refuse_strays(table, path, "shop", features=features, numeric=numeric, remedy="name it in categorical")
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_cells_that_are_no_numbers_are_named_by_their_lines(tmp_path: Path, name: str) -> None:
    rows = ['1,"a\nb"', "", "2,c", " ,d", '"3,5",e', "?,f", "x,g", "7,h"]
    said = refused(write(tmp_path / name, "\n".join(["n,city", *rows, ""])))
    assert said.startswith(
        "shop: column 'n' has numbers in 3 rows, but ' ' in line 6, '3,5' in line 7, '?' in line 8 and 1 more: correct"
    )
    assert "name it in categorical" in said
    assert "city" not in said


@pytest.mark.parametrize(
    ("cells", "taken"),
    [
        (["Rome", "Oslo"] * 10, True),
        (["1", "2", None], True),  # numbers, one missing
        (["1st", "2nd", "12-14", "A7", "2020-01-x"] * 4, True),
        (["B1"] * 19 + ["17"], True),  # fewer than a tenth
        (["B1"] * 18 + ["17", "18"], False),
        (["1,5", "2,5"], False),
        (["1.234,50", "17,00"], False),
        (["12%", "7 %"], False),
        (["€ 12", "$3.50"], False),
        (["1 000", "2 000"], False),
        (["12.50 EUR", "3 €"], False),
        (["\u221212", "\u22123.5"], False),
        (["1.5", "2.5 ", ""], True),  # arrow trims
        (["1.5", "n.a."], False),
        ([*(f"shoe {k}" for k in range(30)), *["501"] * 20], True),  # one code among many names
        (["none"] * 300 + [f"{k}.25" for k in range(20)], False),  # few rows, but all different
        (["2020-01-31", "2020-02-01", "soon"], False),
        (["31.01.2020"] * 3, False),
        (["1/31/20 12:30 PM", "2/1/20"], False),
        (["31-Jan-2020", "1 February 2020"], False),
        (["1.2.10", "1.3.0", "2.0.1"], True),  # versions
        (["B1"] * 19 + ["2020-01-31"], True),
    ],
    ids=str,
)
def test_a_column_of_text_is_one_of_categories_where_few_values_look_like_numbers(
    tmp_path: Path, cells: list[str | None], taken: bool
) -> None:
    path = write(tmp_path / "t.csv", "\n".join(["c,d", *(f'"{cell}",x' if cell else ",x" for cell in cells)]))
    assert (refused(path) == "") == taken
    assert refused(path, features=["d"]) == ""


def test_a_word_among_dates_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "day,n\n2020-01-31,1\n,2\nsoon,3\n2020-02-01,x\n")
    said = refused(path)
    assert "column 'day' has dates in 2 rows, but 'soon' in line 4; column 'n' has numbers in 3 rows, but" in said
    assert "make numbers of dates (days since a fixed one, say) or drop the column and correct these cells" in said
    assert "column 'day' has dates in 2 rows:" in refused(write(tmp_path / "t.csv", "day,n\n1.2.2020,1\n2.2.2020,2\n"))


@pytest.mark.parametrize(
    ("header", "column", "hint"),
    [
        (",a,b", "1", "; pandas writes its index so, unless index=False"),
        ('a," ",b', "2", ""),
        ("a,b,", "3", "; does a comma end the header?"),
    ],
)
def test_a_column_without_a_name_is_refused(tmp_path: Path, header: str, column: str, hint: str) -> None:
    path = write(tmp_path / "t.csv", f"{header}\n1,2,3\n")
    with pytest.raises(DataError, match=r"^shop: ") as refused:
        read_table(path, party="shop")
    assert f"expected a name for every column, got none for column {column}{hint} - at " in str(refused.value)
    assert read_table(path, drop=["", " "]).column_names == ["a", "b"]
    assert read_table(path, columns=["a"]).column_names == ["a"]


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "SEP=;\r"])
def test_a_line_for_excel_alone_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "t.csv", f"\ufeff{line}\na;b\n1;2\n")
    with pytest.raises(DataError, match=r"got sep=;, .*: remove that line, and save .* commas"):
        read_table(path)
    path = write(tmp_path / "t.csv", "sep=,\na,b\n1,2\n")
    with pytest.raises(DataError, match=r"got sep=,, which is for Excel alone: remove that line - at"):
        read_table(path)


def test_two_byte_order_marks_are_no_part_of_a_name(tmp_path: Path) -> None:
    assert read_table(write(tmp_path / "t.csv", "\ufeff\ufeffx,y\n1,2\n")).column_names == ["x", "y"]


def test_a_column_that_must_be_of_numbers_names_its_first_word(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "y,x\n" + "word,1\n" * 30)
    assert refused(path) == ""
    said = refused(path, numeric=("y",))
    assert "column 'y' has numbers in 0 rows, but 'word' in line 2" in said
    assert "categorical" not in said


def test_numbers_stored_as_text_have_to_be_declared(tmp_path: Path) -> None:
    """Only files with types can have them; each number would be a category."""
    pa.parquet.write_table(pa.table({"zip": ["01", "22"], "n": ["1", " "], "w": [None, None]}), tmp_path / "t.parquet")
    assert "column 'n' has numbers in 1 row, but ' ' in row 1: correct" in refused(tmp_path / "t.parquet", ["n", "w"])
    said = refused(tmp_path / "t.parquet")
    assert "shop: 'zip' is stored as text, but every cell is a number: store numbers as numbers, or, if" in said
    assert "name it in categorical" in said


def test_long_cells_are_cut(tmp_path: Path) -> None:
    assert f"{'z' * 24!r}... in line 3" in refused(write(tmp_path / "t.csv", "x,y\n1,1\n" + "z" * 500 + ",2\n"))


@pytest.mark.parametrize(("separator", "called"), [(";", "';'"), ("\t", "tabs"), ("|", r"'\|'")])
def test_other_separators_are_named(tmp_path: Path, separator: str, called: str) -> None:
    path = write(tmp_path / "t.csv", f"\ufeffa{separator}b\n1,5{separator}2\n")
    with pytest.raises(DataError, match=rf"^shop: .* that looks separated by {called}; save .* - at .*t\.csv$"):
        read_table(path, party="shop")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PAR1\x15", r"a Parquet file: name it \.parquet"),
        (b"ARROW1\0\0", r"an arrow file: name it \.arrow"),
        (gzip.compress(b"a,b\n1,2\n"), r"gzip: name it \.csv\.gz"),
        (b"PK\x03\x04", "Excel"),
        ("\ufeffa,b\n1,2\n".encode("utf-16-le"), "UTF-16"),
    ],
    ids=["parquet", "arrow", "gzip", "excel", "utf-16"],
)
def test_files_that_are_called_csv_and_are_not_are_named(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=what):
        read_table(tmp_path / "t.csv")


def parquet(path: Path, frame: pd.DataFrame) -> Path:
    path.parent.mkdir(exist_ok=True)
    frame.to_parquet(path)
    return path


def test_a_folder_of_parquet_files_is_one_table_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "t.parquet"
    for name, first in (("b.parquet", 3), ("a.PARQUET", 1), ("c.parquet", 5)):
        frame = pd.DataFrame({"id": [first, first + 1], "city": ["Rom", None], "x": [0.5, None]})
        parquet(folder / name, frame.set_index(pd.Index([7, 9])))
    table = read_table(folder)
    assert table.to_pydict() == {"id": [1, 2, 3, 4, 5, 6], "city": ["Rom", None] * 3, "x": [0.5, None] * 3}
    assert read_table(folder, columns=["x", "id"], drop=["x"]).column_names == ["id"]
    rows, schema = table_facts(folder)
    assert (rows, schema.names) == (6, ["id", "city", "x"])
    check_there(folder, "shop")
    features = to_table(read_table(folder, drop=["id"]), text_as_categories=True)
    assert features.schema.categories == (("Rom",), None)


def test_categories_of_the_files_of_a_folder_are_one_column(tmp_path: Path) -> None:
    for name, city in (("a", "Rom"), ("b", "Oslo")):
        parquet(tmp_path / "t" / f"{name}.parquet", pd.DataFrame({"city": pd.Categorical([city])}))
    assert read_table(tmp_path / "t")["city"].to_pylist() == ["Rom", "Oslo"]
    assert to_table(read_table(tmp_path / "t")).schema.categories[0] == ("Rom", "Oslo")


def test_names_of_folders_above_are_no_columns(tmp_path: Path) -> None:
    file = parquet(tmp_path / "year=2026" / "t.parquet", pd.DataFrame({"x": [1]}))
    assert read_table(file).column_names == read_table(file.parent).column_names == ["x"]


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        ({"x": [1.0], "y": [1]}, r"got b\.parquet, which has also 'y'"),
        ({"z": [1.0]}, r"got b\.parquet, which has also 'z'; lacks 'x', 'city'"),
        ({"x": [1], "city": ["Rom"]}, r"got b\.parquet, which has 'x' as int64, not double"),
        ({"city": ["Rom"], "x": [1.0]}, r"got b\.parquet, which has the columns in another order"),
    ],
)
def test_a_file_of_a_folder_with_other_columns_is_named(tmp_path: Path, frame: dict[str, list], said: str) -> None:
    parquet(tmp_path / "t" / "a.parquet", pd.DataFrame({"x": [1.0], "city": ["Rom"]}))
    parquet(tmp_path / "t" / "b.parquet", pd.DataFrame(frame))
    for read in (read_table, table_facts):
        with pytest.raises(DataError, match=rf"^shop: expected files with the columns of a\.parquet, {said}.* - at"):
            read(tmp_path / "t", party="shop")


@pytest.mark.parametrize("stray", [".part", "_SUCCESS", "b.csv", ".b.parquet", "sub.parquet/"])
def test_a_folder_with_anything_else_is_refused(tmp_path: Path, stray: str) -> None:
    parquet(tmp_path / "t" / "a.parquet", pd.DataFrame({"x": [1.0]}))
    path = tmp_path / "t" / stray.rstrip("/")
    path.mkdir() if stray.endswith("/") else path.write_text("x")
    for read in (read_table, table_facts, lambda path, party: check_there(path, party)):
        with pytest.raises(
            DataError, match=rf"^shop: expected a folder of Parquet files alone, got one with '{path.name}'"
        ):
            read(tmp_path / "t", party="shop")


def test_a_damaged_file_of_a_folder_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "t" / "a.parquet", pd.DataFrame({"x": [1.0]}))
    for damaged in (b"", b"PAR1 and no more", (tmp_path / "t" / "a.parquet").read_bytes()[:-20]):
        (tmp_path / "t" / "b.parquet").write_bytes(damaged)
        for read in (read_table, table_facts):
            with pytest.raises(DataError, match=r"one whose file b\.parquet is damaged, cut off or of another kind"):
                read(tmp_path / "t")


def test_folders_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.csv").mkdir()
    for read in (read_table, table_facts):
        with pytest.raises(DataError, match="expected a folder of Parquet files, got an empty one"):
            read(tmp_path / "empty")
        with pytest.raises(DataError, match=r"expected a file at .*t\.csv, got a folder"):
            read(tmp_path / "t.csv")
        with pytest.raises(DataError, match=r"expected a file at .*none\.parquet, got none"):
            read(tmp_path / "none.parquet")


def test_facts_of_every_format_are_those_of_the_table(file: Path) -> None:
    rows, schema = table_facts(file)
    table = read_table(file)
    assert (rows, schema.names, schema.types) == (table.num_rows, table.schema.names, table.schema.types)
    assert table_facts(file, text=["id"])[1].field("id").type == (pa.int64() if "parquet" in file.name else pa.string())


def test_facts_of_an_arrow_file(tmp_path: Path) -> None:
    write_predictions(tmp_path / "t.arrow", {"id": [1, 2], "x": [0.5, 1.5]})
    rows, schema = table_facts(tmp_path / "t.arrow")
    assert (rows, schema.names) == (2, ["id", "x"])
