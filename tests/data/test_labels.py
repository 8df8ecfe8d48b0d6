from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from treaty.data.columns import check_labels, check_targets, check_weights
from treaty.errors import DataError

NAN = float("nan")
CONTAINERS = {
    "list": list,
    "array": np.array,
    "object": lambda values: np.array(values, dtype=object),
    "pandas": pd.Series,
    "polars": pl.Series,
    "arrow": lambda values: pa.chunked_array([values]),
}
containers = pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS.keys())


@containers
@pytest.mark.parametrize("values", [[1, 0, 1], ["b", "a", "b"], [True, False, True], [0.5, 1.5, 0.5]])
def test_whole_labels_of_any_container_pass_unchanged(container, values: list) -> None:
    labels = check_labels(container(values), "bank", 3)
    assert labels.shape == (3,)
    assert labels.tolist() == values


MISSING = {
    "float": np.array([1, NAN, NAN]),
    "object None": np.array(["a", None, None], dtype=object),
    "object NaN": np.array(["a", NAN, None], dtype=object),
    "list": ["a", NAN, None],
    "list of numbers": [1, None, NAN],
    "pandas str": pd.Series(["a", None, None]),
    "pandas Int64": pd.Series([1, None, None], dtype="Int64"),
    "pandas boolean": pd.Series([True, None, None], dtype="boolean"),
    "pandas category": pd.Series(["a", None, None], dtype="category"),
    "polars": pl.Series(["a", None, None]),
    "arrow": pa.chunked_array([["a", None, None]]),
    "masked": np.ma.masked_array([1, 2, 3], [False, True, True]),
}


@pytest.mark.parametrize("y", MISSING.values(), ids=MISSING.keys())
def test_missing_labels_are_counted_and_the_party_named(y: object) -> None:
    with pytest.raises(DataError, match=r"^bank: .*got 2 of 3 rows without"):
        check_labels(y, "bank")
    with pytest.raises(DataError, match=r"^bank: "):
        check_targets(y, "bank")


def test_dates_are_no_labels() -> None:
    with pytest.raises(DataError, match=r"^bank: expected labels of numbers, booleans or text, got datetime64"):
        check_labels(np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]"), "bank")


OTHERS = {
    "lists": ([[1, 2], [3]], "a 1d array, got lists of several lengths"),
    "polars lists": (pl.Series([[1, 2], [3]]), "numbers, booleans or text, got list$"),
    "arrow lists": (pa.chunked_array([[[1, 2], [3]]]), "numbers, booleans or text, got list$"),
    "arrow structs": (pa.chunked_array([[{"a": 1}, {"a": 2}]]), "numbers, booleans or text, got dict$"),
    "bytes": (np.array([b"a", b"b"]), "got .*S1; decode them to text first"),
    "objects of bytes": (np.array([b"a", None], dtype=object), "got bytes; decode them to text first"),
    "arrow binary": (pa.chunked_array([[b"a", b"b"]]), "got bytes; decode them to text first"),
}


@pytest.mark.parametrize("check", [check_labels, check_targets])
@pytest.mark.parametrize(("y", "message"), OTHERS.values(), ids=OTHERS)
def test_labels_that_are_no_single_values_or_bytes_are_refused(check, y: object, message: str) -> None:
    with pytest.raises(DataError, match=f"^bank: .*{message}"):
        check(y, "bank")


@pytest.mark.parametrize("check", [check_labels, check_targets])
def test_infinite_labels_are_counted(check) -> None:
    with pytest.raises(DataError, match=r"^bank: .*got 2 infinite \(inf\) of 3"):
        check(np.array([np.inf, -np.inf, 0]), "bank")


@pytest.mark.parametrize("check", [check_labels, check_targets])
def test_labels_of_the_wrong_length_are_refused(check) -> None:
    with pytest.raises(DataError, match=r"^bank: expected 3 labels, one per row of the table, got 2"):
        check([1, 0], "bank", 3)


@pytest.mark.parametrize("y", [np.ones((3, 1)), np.ones((3, 2)), pd.DataFrame({"y": [1, 0]}), 5, {"a": 1}])
def test_labels_that_are_not_one_dimensional_are_refused(y: object) -> None:
    with pytest.raises(DataError, match=r"^bank: labels should be a 1d array, got an array of shape"):
        check_labels(y, "bank")


def test_absent_empty_and_complex_labels_are_refused() -> None:
    with pytest.raises(DataError, match=r"requires y to be passed, but the target y is None"):
        check_labels(None, "bank")
    with pytest.raises(DataError, match=r"0 sample\(s\)"):
        check_labels([], "bank")
    with pytest.raises(DataError, match=r"Complex data not supported"):
        check_labels(np.array([1j]), "bank")


@containers
def test_targets_become_float64(container) -> None:
    targets = check_targets(container([1.5, 2.0, -3.25]), "bank", 3)
    assert targets.dtype == np.float64
    assert targets.tolist() == [1.5, 2, -3.25]


def test_targets_keep_numbers_too_large_for_float32() -> None:
    assert check_targets([1e300, 0.0], "bank").tolist() == [1e300, 0.0]
    assert check_targets(np.array([1e300, 0.0], dtype=object), "bank").tolist() == [1e300, 0.0]
    assert check_targets([10**60, 2], "bank").tolist() == [1e60, 2]


def test_decimal_targets_are_numbers() -> None:
    assert check_targets([Decimal("0.5"), Decimal(2)], "bank").tolist() == [0.5, 2]


@pytest.mark.parametrize(
    "y",
    [
        ["1", "2"],
        np.array(["a"]),
        [1, "b"],
        pd.Series(pd.to_datetime(["2020-01-01"])),
        [{"a": 1}],
        [10**400, 1],
    ],
)
def test_targets_that_are_no_numbers_are_refused(y: object) -> None:
    with pytest.raises(DataError, match=r"^bank: expected (numbers as target|labels of numbers)"):
        check_targets(y, "bank")


@containers
def test_weights_become_float64(container) -> None:
    weights = check_weights(container([1, 0, 2]), 3, "bank")
    assert weights.dtype == np.float64
    assert weights.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], "expected 3 sample weights, one per row of the table, got 2"),
        (np.ones((3, 1)), "sample weights should be a 1d array"),
        ([1, -1, -2], "got 2 negative"),
        ([0, 0, 0], "expected a sample weight above 0"),
        ([1, NAN, 2], "got 1 NaN of 3"),
        ([1, None, 2], "got 1 NaN of 3"),
        ([1, np.inf, 2], "got 1 infinite"),
        (["a", "b", "c"], "expected numbers as sample weights"),
        (None, "sample weights should be a 1d array"),
    ],
)
def test_unusable_weights_are_refused(weights: object, message: str) -> None:
    with pytest.raises(DataError, match=f"^bank: .*{message}"):
        check_weights(weights, 3, "bank")
