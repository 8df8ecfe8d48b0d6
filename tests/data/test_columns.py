import datetime
import math
import re
from decimal import Decimal
from fractions import Fraction

import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from treaty.data.columns import Column, ColumnProblem, column_from_array, column_from_series, is_missing

NAN = math.nan


def column_of(native: object, **options: bool) -> Column:
    return column_from_series(nw.from_native(native, series_only=True), **options)


def same(column: Column, expected: list[float]) -> bool:
    assert column.values.dtype == np.float32
    return np.array_equal(column.values, np.array(expected, dtype=np.float32), equal_nan=True)


def objects(*values: object) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@pytest.mark.parametrize("value", [None, NAN, np.float32(NAN), Decimal("NaN"), pd.NA, pd.NaT, np.datetime64("NaT")])
def test_every_kind_of_nothing_is_missing(value: object) -> None:
    assert is_missing(value)


@pytest.mark.parametrize("value", [0, "", "nan", False, math.inf, Decimal(0), np.datetime64("2020-01-01")])
def test_values_are_not_missing(value: object) -> None:
    assert not is_missing(value)


NUMBERS = {
    "pandas int8": pd.Series([1, 0, 3], dtype="int8"),
    "pandas float64": pd.Series([1, None, 3], dtype="float64"),
    "pandas float16": pd.Series([1, None, 3], dtype="float16"),
    "pandas Int64": pd.Series([1, None, 3], dtype="Int64"),
    "pandas UInt8": pd.Series([1, None, 3], dtype="UInt8"),
    "pandas Float32": pd.Series([1, None, 3], dtype="Float32"),
    "pandas boolean": pd.Series([True, None, False], dtype="boolean"),
    "pandas bool": pd.Series([True, False, False]),
    "pandas objects": pd.Series([1, None, 3.0], dtype=object),
    "pandas decimals": pd.Series([Decimal(1), None, Decimal(3)]),
    "pandas of None": pd.Series([None, None, None], dtype=object),
    "pandas sparse": pd.Series(pd.arrays.SparseArray([1.0, NAN, 3.0])),
    "pandas arrow int": pd.Series([1, None, 3], dtype="int64[pyarrow]"),
    "pandas arrow bool": pd.Series([True, None, False], dtype="bool[pyarrow]"),
    "pandas arrow decimal": pd.Series([Decimal(1), None, Decimal(3)], dtype=pd.ArrowDtype(pa.decimal128(9, 2))),
    "pandas arrow null": pd.Series([None] * 3, dtype=pd.ArrowDtype(pa.null())),
    "polars int": pl.Series([1, None, 3]),
    "polars float with NaN": pl.Series([1.0, NAN, 3.0]),
    "polars Int128": pl.Series([1, None, 3], dtype=pl.Int128),
    "polars bool": pl.Series([True, None, False]),
    "polars decimal": pl.Series([Decimal(1), None, Decimal(3)]),
    "polars null": pl.Series([None, None, None]),
    "arrow int": pa.chunked_array([[1, None], [3]]),
    "arrow float16": pa.chunked_array([pa.array(np.array([1, NAN, 3], np.float16), from_pandas=True)]),
    "arrow bool": pa.chunked_array([[True, None, False]]),
    "arrow decimal": pa.chunked_array([[Decimal(1), None, Decimal(3)]]),
    "arrow null": pa.chunked_array([pa.nulls(3)]),
}


@pytest.mark.parametrize("native", NUMBERS.values(), ids=NUMBERS.keys())
def test_numbers_of_any_library_become_float32_with_nan_for_missing(native: object) -> None:
    expected = [NAN if is_missing(v) else float(v) for v in nw.from_native(native, series_only=True).to_list()]
    column = column_of(native)
    assert column.categories is None
    assert same(column, expected)
    assert column.values.flags.writeable


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "bool"])
def test_numeric_arrays_become_float32(dtype: str) -> None:
    assert same(column_from_array(np.array([0, 1, 1], dtype=dtype)), [0, 1, 1])


def test_column_does_not_share_memory_with_its_source() -> None:
    source = np.array([1, 2], dtype=np.float32)
    column = column_from_array(source)
    source[0] = 9
    assert same(column, [1, 2])


def test_large_whole_numbers_are_equal_with_and_without_missing_values() -> None:
    # rounds up when taken from int64 to float32 at once, down by way of float64
    number = (1 << 62) + (1 << 38) + 1
    whole = column_of(pd.Series([number, 0]))
    with_missing = column_of(pd.Series([number, None], dtype="Int64"))
    assert whole.values[0] == with_missing.values[0]


def test_objects_that_are_all_numbers_are_numbers() -> None:
    mixed = objects(1, 2.5, None, True, np.bool_(True), Decimal("0.5"), Fraction(1, 4), pd.NA, np.int8(3), NAN)
    assert same(column_from_array(mixed), [1, 2.5, NAN, 1, 1, 0.5, 0.25, NAN, 3, NAN])


CATEGORIES = {
    "pandas": pd.Series(pd.Categorical(["b", None, "a"], categories=["z", "b", "a"])),
    "pandas ordered": pd.Series(pd.Categorical(["b", None, "a"], categories=["z", "b", "a"], ordered=True)),
    "polars Enum": pl.Series(["b", None, "a"], dtype=pl.Enum(["z", "b", "a"])),
    "arrow": pa.chunked_array([pa.DictionaryArray.from_arrays(pa.array([1, None, 2]), pa.array(["z", "b", "a"]))]),
    "pandas arrow": pd.Series(
        pd.arrays.ArrowExtensionArray(
            pa.chunked_array([pa.DictionaryArray.from_arrays(pa.array([1, None, 2]), pa.array(["z", "b", "a"]))])
        )
    ),
}


@pytest.mark.parametrize("native", CATEGORIES.values(), ids=CATEGORIES.keys())
def test_category_codes_follow_the_order_of_the_dtype(native: object) -> None:
    column = column_of(native)
    assert column.categories == ("z", "b", "a")
    assert same(column, [1, NAN, 2])


def test_category_codes_are_those_of_pandas() -> None:
    series = pd.Series(np.random.default_rng(0).choice(["x", "y", "w", None], 200)).astype("category")
    codes = series.cat.codes.to_numpy().astype(np.float32)
    assert same(column_of(series), np.where(codes < 0, np.nan, codes).tolist())


def test_polars_categorical_codes_name_the_right_categories() -> None:
    values = ["zz", None, "b", "zz"]
    column = column_of(pl.Series(values, dtype=pl.Categorical))
    assert column.categories is not None
    assert [None if np.isnan(c) else column.categories[int(c)] for c in column.values] == values


def test_chunks_with_different_dictionaries_agree_on_codes() -> None:
    chunks = pa.chunked_array([pa.array(["b", "a"]).dictionary_encode(), pa.array(["a", None]).dictionary_encode()])
    column = column_of(chunks)
    assert column.categories == ("b", "a")
    assert same(column, [0, 1, 1, NAN])


def test_dictionary_with_null_and_repeated_values_is_cleaned() -> None:
    encoded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3, None]), pa.array(["x", None, "x", "y"]))
    column = column_of(pa.chunked_array([encoded]))
    assert column.categories == ("x", "y")
    assert same(column, [0, NAN, 0, 1, NAN])


@pytest.mark.parametrize("values", [[5, 3], [0.5, 0.25], [True, False]], ids=["int", "float", "bool"])
def test_categories_may_be_numbers(values: list[float]) -> None:
    column = column_of(pd.Series(pd.Categorical(values, categories=values)))
    assert column.categories == tuple(values)
    assert list(map(type, column.categories)) == list(map(type, values))
    assert same(column, [0, 1])


@pytest.mark.parametrize(
    "values",
    [
        pd.cut([1, 2, 3], 2),
        pd.Categorical([1, "a"], categories=[1, "a"]),
        pd.Categorical([datetime.date(2020, 1, 1)]),
    ],
    ids=["intervals", "mixed", "dates"],
)
def test_categories_that_are_no_plain_values_are_a_problem(values: pd.Categorical) -> None:
    with pytest.raises(ColumnProblem, match=r"rename_categories"):
        column_of(pd.Series(values))


TEXT = {
    "pandas str": pd.Series(["b", None, "a", "b"]),
    "pandas object": pd.Series(["b", None, "a", "b"], dtype=object),
    "pandas string": pd.Series(["b", None, "a", "b"], dtype="string"),
    "polars": pl.Series(["b", None, "a", "b"]),
    "arrow": pa.chunked_array([["b", None], ["a", "b"]]),
    "arrow view": pa.chunked_array([pa.array(["b", None, "a", "b"], type=pa.string_view())]),
}


@pytest.mark.parametrize("native", TEXT.values(), ids=TEXT.keys())
def test_text_is_a_problem_that_names_dtype_rows_and_remedy(native: object) -> None:
    with pytest.raises(ColumnProblem, match=r'(?i)(str|object).*text in 3 rows.*astype\("category"\)'):
        column_of(native)


@pytest.mark.parametrize("native", TEXT.values(), ids=TEXT.keys())
def test_text_on_request_becomes_sorted_categories(native: object) -> None:
    column = column_of(native, text_as_categories=True)
    assert column.categories == ("a", "b")
    assert same(column, [1, NAN, 0, 1])


@pytest.mark.parametrize("values", [objects("b", None, "a", NAN), np.array(["b", "a"])], ids=["object", "str"])
def test_text_in_arrays_is_treated_like_text_in_dataframes(values: np.ndarray) -> None:
    with pytest.raises(ColumnProblem, match=r"text in 2 rows"):
        column_from_array(values)
    column = column_from_array(values, text_as_categories=True)
    assert column.categories == ("a", "b")


DATES = {
    "pandas datetime": pd.Series(pd.to_datetime(["2020-01-01", None])),
    "pandas zone": pd.Series(pd.to_datetime(["2020-01-01"]).tz_localize("UTC")),
    "pandas timedelta": pd.Series(pd.to_timedelta([1, 2])),
    "pandas time": pd.Series([datetime.time(1), None]),
    "pandas date": pd.Series([datetime.date(2020, 1, 1), None], dtype=object),
    "polars date": pl.Series([datetime.date(2020, 1, 1)]),
    "polars time": pl.Series([datetime.time(1)]),
    "polars duration": pl.Series([datetime.timedelta(1)]),
    "arrow timestamp": pa.chunked_array([[datetime.datetime(2020, 1, 1)]]),
}


@pytest.mark.parametrize("native", DATES.values(), ids=DATES.keys())
def test_dates_and_times_are_a_problem_with_a_remedy(native: object) -> None:
    with pytest.raises(ColumnProblem, match=r"convert to numbers"):
        column_of(native)


def test_date_arrays_are_a_problem() -> None:
    with pytest.raises(ColumnProblem, match=r"convert to numbers"):
        column_from_array(np.array(["2020-01-01"], dtype="datetime64[D]"))


@pytest.mark.parametrize(
    ("values", "n_rows"),
    [
        (np.array([1.0, np.inf, -np.inf, np.nan]), 2),
        (np.array([1e39, -1e300, 3e38]), 2),
        (objects(10**40, 1), 1),
        (np.array([np.inf], dtype=np.float32), 1),
    ],
)
def test_infinite_and_too_large_numbers_are_a_problem_with_a_count(values: np.ndarray, n_rows: int) -> None:
    with pytest.raises(ColumnProblem, match=rf"^{n_rows} rows are infinite \(inf\) or beyond"):
        column_from_array(values)


def test_integers_beyond_any_float_are_a_problem() -> None:
    with pytest.raises(ColumnProblem, match=r"beyond the range of float"):
        column_from_array(objects(10**400, 1))


@pytest.mark.parametrize("values", [np.array([1j]), objects(1j, 2), objects(np.complex64(1))])
def test_complex_numbers_are_a_problem(values: np.ndarray) -> None:
    with pytest.raises(ColumnProblem, match=r"Complex data not supported"):
        column_from_array(values)


@pytest.mark.parametrize(
    "cell", [{"foo": "bar"}, [1], object(), np.array([1])], ids=["dict", "list", "object", "array"]
)
def test_cells_that_can_never_be_features_are_a_type_error(cell: object) -> None:
    with pytest.raises(TypeError, match=r"argument must be .* string.* number"):
        column_from_array(objects(1.0, cell, "text"))


SEVERAL = {
    "polars list": (pl.Series([[1, 2], [3]]), "List"),
    "polars array": (pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int64, 2)), "Array"),
    "polars struct": (pl.Series([{"a": 1}, {"a": 2}]), "Struct"),
    "arrow list": (pa.chunked_array([[[1, 2], None]]), "list<item: int64>"),
    "arrow struct": (pa.chunked_array([[{"a": 1}, {"a": 2}]]), "struct<a: int64>"),
    "arrow map": (pa.chunked_array([pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))]), "map<string, int64>"),
    "pandas lists": (pd.Series([[1, 2], [3]]), "object"),
}


@pytest.mark.parametrize(("values", "dtype"), SEVERAL.values(), ids=SEVERAL)
def test_columns_of_lists_or_structs_are_a_problem(values: object, dtype: str) -> None:
    with pytest.raises(ColumnProblem, match=rf"^{re.escape(dtype)}.*make a column of each part, or drop the column"):
        column_of(values)


def test_a_column_of_no_lists_is_missing() -> None:
    assert same(column_of(pa.chunked_array([pa.nulls(2, pa.list_(pa.int64()))])), [NAN, NAN])
    assert same(column_of(pl.Series([None, None], dtype=pl.Struct({"a": pl.Int64}))), [NAN, NAN])


@pytest.mark.parametrize("values", [objects(b"x"), np.array([b"x"]), np.zeros(2, dtype="i4,i4")])
def test_bytes_and_records_are_a_problem(values: np.ndarray) -> None:
    with pytest.raises(ColumnProblem, match=r"drop the column"):
        column_from_array(values)


def test_text_among_numbers_is_a_problem() -> None:
    with pytest.raises(ColumnProblem, match=r"mixing numbers with text in 1 rows"):
        column_from_array(objects("a", 1, None))


def test_text_in_pieces_is_text() -> None:
    """Concatenated frames hold arrow text in several chunks."""
    column = pd.concat([pd.Series(["b", None], dtype="string[pyarrow]"), pd.Series(["a"], dtype="string[pyarrow]")])
    made = column_from_series(nw.from_native(column, series_only=True), text_as_categories=True)
    assert made.categories == ("a", "b")
    np.testing.assert_array_equal(made.values, [1, np.nan, 0])


@pytest.mark.parametrize(
    "make", [pd.Series, pl.Series, lambda cells: pa.chunked_array([cells])], ids=["pd", "pl", "pa"]
)
def test_text_that_is_mostly_numbers_names_its_first_cells(make) -> None:
    column = make(["1.5", "2", " ", "3,5", "x", None, "4"] * 4)
    with pytest.raises(ColumnProblem, match=r"numbers in 12 rows, but ' ' in row 2, '3,5' in row 3, 'x' in row 4 and"):
        column_of(column)
    with pytest.raises(ColumnProblem, match=r"text in 4 rows: if these are categories convert"):
        column_of(make(["a", "b", "17b", "2020-01-01"]))


def test_numbers_mixed_with_text_name_the_first_row_of_text() -> None:
    with pytest.raises(
        ColumnProblem, match=r"in 2 rows, the first of them row 1: correct these cells, or .*to_numeric"
    ):
        column_from_array(objects(1.5, "x", None, "y"))
