import datetime
from collections.abc import Callable

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from treaty.data.table import Schema, Table, match_rows, to_table
from treaty.errors import DataError

NAN = float("nan")
COLUMNS = {"whole": [3, 1, 2], "real": [0.5, None, -1.5], "flag": [True, False, True]}
EXPECTED = np.array([[3, 0.5, 1], [1, NAN, 0], [2, -1.5, 1]], dtype=np.float32)

FRAMES: dict[str, Callable[[dict], object]] = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "pyarrow": pa.table,
}
frames = pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())


def same(table: Table, expected: object) -> bool:
    return np.array_equal(table.matrix(), np.asarray(expected, dtype=np.float32), equal_nan=True)


@frames
def test_every_dataframe_gives_the_same_table(frame: Callable) -> None:
    table = to_table(frame(COLUMNS))
    assert table.schema == Schema(("whole", "real", "flag"), (None, None, None))
    assert table.schema.kinds == ("numeric",) * 3
    assert not table.schema.categorical.any()
    assert table.n_rows == 3
    assert same(table, EXPECTED)


ARRAYS = {
    "C order": EXPECTED.astype(np.float64),
    "Fortran order": np.asfortranarray(EXPECTED),
    "strided": np.repeat(EXPECTED, 2, axis=0)[::2],
    "big endian": EXPECTED.astype(">f8"),
    "object": EXPECTED.astype(object),
    "lists": EXPECTED.tolist(),
    "lists with None": [[3, 0.5, True], [1, None, False], [2, -1.5, True]],
    "masked": np.ma.masked_array(np.nan_to_num(EXPECTED), np.isnan(EXPECTED)),
    "record batch": pa.RecordBatch.from_pydict({"f0": [3, 1, 2], "f1": [0.5, None, -1.5], "f2": [1, 0, 1]}),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_and_lists_give_the_same_table_with_numbered_names(array: object) -> None:
    table = to_table(array)
    assert table.schema.names == ("f0", "f1", "f2")
    assert same(table, EXPECTED)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64", "float16", "bool"])
def test_arrays_of_every_number_are_taken(dtype: str) -> None:
    assert same(to_table(np.array([[0, 1], [1, 0]], dtype=dtype)), [[0, 1], [1, 0]])


def test_columns_are_contiguous_and_own_their_memory() -> None:
    array = np.ones((3, 2), dtype=np.float32)
    frame = pd.DataFrame(array)
    for data in (array, frame, to_table(array)):
        table = to_table(data)
        table.columns[0][:] = 5
        assert table.columns[0].flags.c_contiguous
        assert same(to_table(data), np.ones((3, 2)))


def test_matrix_has_rows_in_order_over_many_blocks() -> None:
    array = np.random.default_rng(0).normal(size=(10_001, 3)).astype(np.float32)
    rows = to_table(array).matrix()
    assert rows.flags.c_contiguous
    assert rows.dtype == np.float32
    assert np.array_equal(rows, array)


def test_pandas_index_is_ignored_and_names_become_text() -> None:
    table = to_table(pd.DataFrame({0: [1, 2], "b": [3, 4]}, index=[9, 9]))
    assert table.schema.names == ("0", "b")
    assert same(table, [[1, 3], [2, 4]])


@pytest.mark.parametrize("kind", ["pandas", "pyarrow"])
def test_repeated_names_are_refused_with_party_and_names(kind: str) -> None:
    table = pa.table([[1], [2], [3]], names=["a", "b", "a"])
    with pytest.raises(DataError, match=r"^shop: .*more than one of 'a'"):
        to_table(table.to_pandas() if kind == "pandas" else table, party="shop")


def test_names_that_differ_only_in_type_are_repeated() -> None:
    with pytest.raises(DataError, match=r"more than one of '1'"):
        to_table(pd.DataFrame([[1, 2]], columns=[1, "1"]))


def test_one_message_names_every_column_at_fault_with_party_and_rows() -> None:
    frame = pd.DataFrame(
        {
            "ok": [1.0, 2.0],
            "carrier": ["UA", "AA"],
            "when": [datetime.datetime(2020, 1, 1)] * 2,
            "huge": [np.inf, 1.0],
        }
    )
    with pytest.raises(DataError) as raised:
        to_table(frame, party="shop")
    message = str(raised.value)
    text = frame["carrier"].dtype  # "object" before pandas 3
    assert message.startswith(f"shop: column 'carrier': {text}, text in 2 rows")
    assert '.astype("category")' in message
    assert "column 'when': datetime64" in message
    assert "column 'huge': 1 rows are infinite" in message
    assert "ok" not in message
    assert "UA" not in message


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e39])
def test_infinite_array_cells_are_refused_with_party_column_and_count(value: float) -> None:
    array = np.ones((5, 2))
    array[1:4, 1] = value
    with pytest.raises(DataError, match=r"^bank: column 'f1': 3 rows are infinite \(inf\)"):
        to_table(array, party="bank")


@frames
def test_text_becomes_sorted_categories_on_request(frame: Callable) -> None:
    table = to_table(frame({"t": ["b", None, "a"]}), text_as_categories=True)
    assert table.schema.categories == (("a", "b"),)
    assert table.schema.kinds == ("categorical",)
    assert table.schema.categorical.tolist() == [True]
    assert same(table, [[1], [NAN], [0]])


@pytest.mark.parametrize("cell", [{"foo": "bar"}, [1, 2], object()], ids=["dict", "list", "object"])
def test_odd_cells_of_an_object_array_are_a_type_error_in_known_words(cell: object) -> None:
    array = np.ones((3, 2)).astype(object)
    array[0, 0] = cell
    with pytest.raises(TypeError, match=r"bank: column 'f0': argument must be .* string.* number"):
        to_table(array, party="bank")


@pytest.mark.parametrize(
    "data",
    [
        np.ones(3),
        [1, 2],
        pd.Series([1, 2]),
        pl.Series([1]),
        pa.chunked_array([[1]]),
        5,
        None,
        "x.csv",
        {"a": [1]},
        [],
    ],
    ids=lambda data: type(data).__name__,
)
def test_anything_but_two_dimensions_is_asked_to_be_reshaped(data: object) -> None:
    with pytest.raises(DataError, match=r"Expected 2D array, got .* instead.*Reshape your data"):
        to_table(data)


def test_three_dimensions_are_refused() -> None:
    with pytest.raises(DataError, match=r"got 3D array instead"):
        to_table(np.ones((2, 2, 2)))


def test_ragged_lists_are_refused() -> None:
    with pytest.raises(DataError, match=r"rows of equal length"):
        to_table([[1, 2], [3]])


def test_complex_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Complex data not supported"):
        to_table(np.ones((2, 2)) * 1j)


def test_lazy_frames_are_not_collected() -> None:
    with pytest.raises(DataError, match=r"collect"):
        to_table(pl.DataFrame({"a": [1]}).lazy())


def test_no_rows_are_refused() -> None:
    for data in (np.empty((0, 3)), pd.DataFrame({"a": []}), pl.DataFrame({"a": []}), pa.table({"a": []})):
        with pytest.raises(DataError, match=r"0 sample\(s\) \(shape=\(0, \d\)\) while a minimum of 1 is required"):
            to_table(data)


@pytest.mark.parametrize(
    "data", [np.empty((12, 0)), pd.DataFrame(index=range(12)), pa.table({"a": range(12)}).select([])]
)
def test_no_columns_are_accepted_only_on_request(data: object) -> None:
    with pytest.raises(DataError, match=r"0 feature\(s\) \(shape=\(12, 0\)\) while a minimum of 1 is required"):
        to_table(data)
    table = to_table(data, allow_no_features=True)
    assert table.n_rows == 12
    assert table.matrix().shape == (12, 0)


TRAINING = Schema(("x", "c"), (None, ("red", "green")))


@frames
def test_schema_takes_columns_by_name_and_text_by_value(frame: Callable) -> None:
    table = to_table(frame({"c": ["green", "red", "blue", None], "x": [1, 2, 3, 4]}), schema=TRAINING)
    assert table.schema is TRAINING
    unseen = 2
    assert same(table, [[1, 1], [2, 0], [3, unseen], [4, NAN]])


def test_schema_maps_the_codes_of_another_category_order() -> None:
    data = {
        "pandas": pd.Categorical(["green", "blue", None], categories=["blue", "green"]),
        "polars": pl.Series(["green", "blue", None], dtype=pl.Enum(["blue", "green"])),
        "pyarrow": pa.array(["green", "blue", None]).dictionary_encode(),
    }
    for kind, values in data.items():
        table = to_table(FRAMES[kind]({"x": [1, 2, 3], "c": values}), schema=TRAINING)
        assert same(table, [[1, 1], [2, 2], [3, NAN]])


def test_table_that_has_the_schema_passes_through_and_unseen_stays_unseen() -> None:
    table = Table(TRAINING, [np.zeros(3, np.float32), np.array([0, 2, np.nan], np.float32)], 3)
    assert same(to_table(table, schema=TRAINING), table.matrix())
    turned = Schema(("c", "x"), (("green", "red", "blue"), None))
    assert same(to_table(table, schema=turned), [[1, 0], [3, 0], [NAN, 0]])
    assert same(to_table(table), table.matrix())


def test_numeric_categories_match_by_value() -> None:
    schema = Schema(("c",), ((10, 20),))
    assert same(to_table(pd.DataFrame({"c": pd.Categorical([20.0, 10.0, 5.0])}), schema=schema), [[1], [0], [2]])


def test_arrays_go_by_position_and_need_the_right_number_of_columns() -> None:
    schema = Schema(("x", "y"), (None, None))
    assert to_table(np.ones((2, 2)), schema=schema).schema is schema
    with pytest.raises(DataError, match=r"X has 1 features, but \w+ is expecting 2 features as input.*bank"):
        to_table(np.ones((2, 1)), schema=schema, party="bank")


def test_object_arrays_may_hold_the_categories_of_training() -> None:
    array = np.array([[1.5, "green"], [2, None]], dtype=object)
    assert same(to_table(array, schema=TRAINING), [[1.5, 1], [2, NAN]])
    assert same(to_table(array.tolist(), schema=TRAINING), [[1.5, 1], [2, NAN]])


def test_missing_and_unknown_columns_are_all_named() -> None:
    with pytest.raises(DataError, match=r"^shop: .*missing columns 'x', 'c' and .*to be dropped: 'id', 'label'"):
        to_table(pd.DataFrame({"id": [1], "label": [0]}), schema=TRAINING, party="shop")


def test_unknown_columns_alone_are_refused() -> None:
    with pytest.raises(DataError, match=r"got columns unknown from training, to be dropped: 'id' *$"):
        to_table(pd.DataFrame({"x": [1.0], "c": ["red"], "id": [3]}), schema=TRAINING)


@pytest.mark.parametrize(
    ("x", "c", "message"),
    [
        ([1.0], [2.0], "column 'c': expected categories, as in training, got numbers"),
        (pd.Categorical(["red"]), ["red"], "column 'x': expected numbers, as in training, got categories"),
        (
            [1.0],
            pd.Categorical([7]),
            "column 'c': expected categories that are text, as in training, got numbers",
        ),
    ],
    ids=["number for category", "category for number", "category of numbers for text"],
)
def test_a_column_of_the_wrong_kind_is_refused(x: object, c: object, message: str) -> None:
    with pytest.raises(DataError, match=f"^shop: {message}"):
        to_table(pd.DataFrame({"x": x, "c": c}), schema=TRAINING, party="shop")


def test_columns_without_any_value_are_of_either_kind() -> None:
    table = to_table(pd.DataFrame({"x": pd.Categorical([None, None]), "c": [NAN, NAN]}), schema=TRAINING)
    assert same(table, [[NAN, NAN]] * 2)


def test_schema_refuses_repeated_names_and_uneven_parts() -> None:
    for names, categories in ((("a", "a"), (None, None)), (("a",), ())):
        with pytest.raises(DataError, match=r"unique feature names"):
            Schema(names, categories)


def test_equal_numbers_of_rows_match() -> None:
    tables = {"bank": to_table(np.ones((4, 1))), "shop": to_table(np.ones((4, 2)))}
    assert match_rows(tables) == 4
    assert match_rows(tables, [0, 1, 0, 1]) == 4


@pytest.mark.parametrize("n_labels", [None, 4, 5])
def test_unequal_numbers_of_rows_are_listed(n_labels: int | None) -> None:
    tables = {"bank": to_table(np.ones((4, 1))), "shop": to_table(np.ones((3, 2)))}
    labels = None if n_labels is None else np.zeros(n_labels)
    listed = "bank 4, shop 3" + (f", labels {n_labels}" if n_labels else "")
    with pytest.raises(DataError, match=listed):
        match_rows(tables, labels)


def test_labels_of_another_length_are_listed() -> None:
    with pytest.raises(DataError, match=r"bank 4, labels 2"):
        match_rows({"bank": to_table(np.ones((4, 1)))}, [0, 1])


def test_no_party_is_refused() -> None:
    with pytest.raises(DataError, match=r"at least one party"):
        match_rows({})
