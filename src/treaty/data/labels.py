"""Labels and sample weights: complete, finite and as long as the table, or one clear error."""

import numbers
from typing import Any

import narwhals as nw
import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import ColumnProblem, floats_from_objects, is_missing
from treaty.errors import DataError

_LABELS = (numbers.Number, np.bool_, str)


def check_labels(y: Any, party: str, n_rows: int | None = None) -> NDArray[Any]:
    """Return class labels as an array (n_rows,) of their own dtype; `y` may be any container that `to_table` takes.

    Raises DataError if they are not one-dimensional, empty, of the wrong length, complex, dates, bytes, lists or other
    objects, or if labels are missing or infinite (counted).
    """
    if y is None:  # scikit-learn's words
        raise DataError(f"{party}: requires y to be passed, but the target y is None")
    labels = _one_dimensional(y, party, "labels", n_rows)
    if labels.dtype.kind == "O":
        present = [label for label in labels if not is_missing(label)]
        n_missing = len(labels) - len(present)
        other = next((kind for kind in map(type, present) if not issubclass(kind, _LABELS)), None)
        if other is not None:  # arrow's lists come as arrays
            got = "list" if issubclass(other, np.ndarray) else other.__name__
            raise _of_another_kind(party, got, of_bytes=issubclass(other, bytes))
    elif labels.dtype.kind in "mMSV":
        raise _of_another_kind(party, str(labels.dtype), of_bytes=labels.dtype.kind == "S")
    else:
        n_missing = int(np.count_nonzero(np.isnan(labels))) if labels.dtype.kind == "f" else 0
    if n_missing:
        raise DataError(f"{party}: expected a label in every row, got {n_missing} of {len(labels)} rows without (NaN)")
    if labels.dtype.kind == "f":
        _refuse_infinite(labels, party, "labels")
    return labels


def check_targets(y: Any, party: str, n_rows: int | None = None) -> NDArray[np.float64]:
    """Return a finite numeric target, float64 (n_rows,); raise DataError as `check_labels`, or if it is not numeric."""
    return _finite(check_labels(y, party, n_rows), party, "target")


def check_weights(weights: Any, n_rows: int, party: str) -> NDArray[np.float64]:
    """Return sample weights, float64 (n_rows,), finite, >= 0 and not all 0; raise DataError for any others."""
    given = _one_dimensional(weights, party, "sample weights", n_rows)
    checked = _finite(given, party, "sample weights")
    n_negative = int(np.count_nonzero(checked < 0))
    if n_negative:
        raise DataError(f"{party}: expected sample weights >= 0, got {n_negative} negative ones")
    if not checked.any():
        raise DataError(f"{party}: expected a sample weight above 0, got only zeros")
    return checked


def _of_another_kind(party: str, got: str, *, of_bytes: bool) -> DataError:
    remedy = "; decode them to text first (save a CSV file as UTF-8)" if of_bytes else ""
    return DataError(f"{party}: expected labels of numbers, booleans or text, got {got}{remedy}")


def _one_dimensional(values: Any, party: str, what: str, n_rows: int | None) -> NDArray[Any]:
    native = nw.from_native(values, pass_through=True, allow_series=True)
    if isinstance(native, (nw.Series, nw.DataFrame)):
        array = native.to_numpy()
    else:
        try:
            array = np.asarray(native)
        except ValueError:  # lists of several lengths
            raise DataError(f"{party}: {what} should be a 1d array, got lists of several lengths instead.") from None
        if isinstance(native, np.ma.MaskedArray):
            array = array.astype(object)
            array[np.ma.getmaskarray(native)] = None
        if array.dtype.kind in "US" and not isinstance(native, np.ndarray):
            array = np.asarray(native, dtype=object)  # NaN beside text would have become the text "nan"
    if array.ndim != 1:
        raise DataError(f"{party}: {what} should be a 1d array, got an array of shape {array.shape} instead.")
    if array.dtype.kind == "c":
        raise DataError(f"{party}: Complex data not supported")
    if len(array) == 0:
        raise DataError(f"{party}: Found array with 0 sample(s) in {what} while a minimum of 1 is required.")
    if n_rows is not None and len(array) != n_rows:
        raise DataError(f"{party}: expected {n_rows} {what}, one per row of the table, got {len(array)}")
    return array


def _finite(values: NDArray[Any], party: str, what: str) -> NDArray[np.float64]:
    try:
        if values.dtype.kind not in "biufO":
            raise ColumnProblem(f"{values.dtype} is not a number")
        floats = floats_from_objects(values) if values.dtype.kind == "O" else values.astype(np.float64)
    except (ColumnProblem, TypeError) as error:
        raise DataError(f"{party}: expected numbers as {what}, got something else: {error}") from None
    n_missing = int(np.count_nonzero(np.isnan(floats)))
    if n_missing:
        raise DataError(f"{party}: expected {what} without missing values, got {n_missing} NaN of {len(floats)}")
    _refuse_infinite(floats, party, what)
    return floats


def _refuse_infinite(values: NDArray[Any], party: str, what: str) -> None:
    n_infinite = int(np.count_nonzero(np.isinf(values)))
    if n_infinite:
        raise DataError(f"{party}: expected finite {what}, got {n_infinite} infinite (inf) of {len(values)}")
