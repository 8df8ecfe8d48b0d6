"""One column of a dataframe or array as numbers or category codes; labels and sample weights.

The result is a float32 array with NaN for missing values and, for a categorical column, the category values whose
position is the code. An unusable column raises `ColumnProblem`; the caller adds the party and the column's name.

Numbers are float64 where float32 would change bins: where it changes a whole number, as it does times in milliseconds
and numeric ids, and where one float32 stands for several numbers in more than a thousandth of the rows, as for fine
steps at a large offset. A few numbers that meet by chance do not count, so that parts of a table are judged as all of
it. Whole numbers from 2^53 on are exact within 2^53 of the largest: the column's `origin`, a multiple of 2^53, is
subtracted before they become float64.
"""

from __future__ import annotations

import datetime
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import EllipsisType
from typing import Any, Final, Literal

import narwhals as nw
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treaty.errors import DataError
from treaty.machine.arrays import Flags, Floats

Category = str | int | float | bool

LARGEST = float(np.finfo(np.float32).max)
Origin = int | None
"""What is subtracted from a column's numbers to make them float64; None where they are float32."""

DOUBLE: Final = "double"
Sought = Origin | EllipsisType | Literal["double"]
"""An origin that is known, or is found (``...``); `DOUBLE`: found, and 0 wherever float32 changes a number."""

WHOLE = 1 << 53
"""From here on float64 skips whole numbers."""

# rows, at least, by which a column of fractions is judged
_LOOKED_AT = 1 << 14
# a block of rows is transposed inside the processor's cache
_ROWS_AT_ONCE = 4096

_MAKE_CATEGORY = 'if these are categories convert with .astype("category"), else drop the column'
_CORRECT = (
    'correct these cells, or make them missing with pandas.to_numeric(column, errors="coerce"); if these are '
    'categories convert with .astype(str).astype("category"), else drop the column'
)
# the advice above in terms of polars
IN_POLARS = (
    ('.astype(str).astype("category")', ".cast(pl.String).cast(pl.Categorical)"),
    ('.astype("category")', ".cast(pl.Categorical)"),
    ('pandas.to_numeric(column, errors="coerce")', "column.cast(pl.Float64, strict=False)"),
)
_MAKE_NUMBER = "convert to numbers (say, days since a fixed date) or drop the column (`drop` in a job file)"
_TAKE_APART = "make a column of each part, or drop the column"
_NUMBERS = (numbers.Real, Decimal, np.bool_)
_DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)


class ColumnProblem(ValueError):
    """Why a column cannot be used; without party and column name, which the caller adds."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A column ready for binning: own values (n_rows,), NaN where missing, float64 where it has an `origin`.

    `categories` are the category value of each code; None for numbers.
    """

    values: NDArray[Any]
    categories: tuple[Category, ...] | None = None
    origin: Origin = None

    def at(self, origin: Origin) -> Column:
        """Return the column's own numbers with another origin."""
        if origin == self.origin:
            return Column(self.values.copy(), self.categories, origin)
        if origin is None:
            return Column((self.values + float(self.origin or 0)).astype(np.float32))
        return Column(self.values.astype(np.float64) + float((self.origin or 0) - origin), None, origin)


def is_missing(value: Any) -> bool:
    """Whether an object means "no value": None, NaN of any kind (numpy's and `Decimal` too), NaT, pandas' NA."""
    # by name, as pandas is no dependency
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, (float, np.floating, Decimal)):
        return math.isnan(value)
    return isinstance(value, (np.datetime64, np.timedelta64)) and bool(np.isnat(value))


def column_from_series(series: nw.Series[Any], *, text_as_categories: bool = False, origin: Sought = ...) -> Column:
    """Convert one column of a pandas, polars, pyarrow, ... dataframe.

    Categories get the codes of the dtype's own order (pandas' `.cat.codes`); text becomes sorted categories with
    `text_as_categories`, and is refused otherwise. The `origin` of numbers is found unless it is given. Raises
    ColumnProblem for dates, lists, structs and other cells that are neither number nor text, for complex, infinite or
    too large numbers, and for unusual categories.
    """
    dtype = series.dtype
    if dtype.is_nested():
        if series.null_count() == len(series):
            return Column(np.full(len(series), np.nan, np.float32))
        raise ColumnProblem(f"{_native_dtype(series)}, several values in a row: {_TAKE_APART}")
    if dtype in (nw.Categorical, nw.Enum):
        return _categories(series)
    if dtype.is_temporal():
        raise ColumnProblem(f"{_native_dtype(series)}, a date or time: {_MAKE_NUMBER}")
    if dtype == nw.String:
        n_present = len(series) - series.null_count()
        if n_present == 0:
            # pandas calls a column of None text
            return Column(np.full(len(series), np.nan, np.float32))
        if not text_as_categories:
            raise _text_problem(_native_dtype(series), series.to_arrow(), n_present)
        return _text(series.to_arrow())
    if dtype in (nw.Boolean, nw.Decimal, nw.Int128, nw.UInt128):
        # with missing values numpy has these as objects, or not at all
        return column_from_array(series.cast(nw.Float64).to_numpy(), origin=origin)
    # with gaps numpy would have these as floats
    if dtype in (nw.Int64, nw.UInt64) and 0 < series.null_count() < len(series):
        return _with_gaps(series.drop_nulls().to_numpy(), series.is_null().to_numpy(), origin)
    try:
        return column_from_array(series.to_numpy(), text_as_categories=text_as_categories, origin=origin)
    except (TypeError, NotImplementedError) as error:
        # arrow's own error is one of the latter
        raise ColumnProblem(f"{_native_dtype(series)}: {error}; {_TAKE_APART}") from None


def column_from_array(values: NDArray[Any], *, text_as_categories: bool = False, origin: Sought = ...) -> Column:
    """Convert one column of a numpy array of any dtype, of objects if all are numbers or all are text.

    Arguments and errors as in `column_from_series`, and TypeError for cells that are neither number nor text.
    """
    kind = values.dtype.kind
    if kind in "biuf":
        return number_columns(values[:, None], None if isinstance(origin, EllipsisType) else [origin])(0)
    if kind in "mM":
        raise ColumnProblem(f"{values.dtype}, a date or time: {_MAKE_NUMBER}")
    if kind == "c":
        raise ColumnProblem("Complex data not supported")
    if kind == "U":
        values = values.astype(object)
    elif kind != "O":
        raise ColumnProblem(f"{values.dtype} is not a number; {_MAKE_CATEGORY}")
    return _objects(values, text_as_categories, origin)


def floats_from_objects(values: NDArray[np.object_]) -> Floats:
    """Convert Python numbers of any real type, `Decimal` and booleans included, to float64, NaN where missing.

    Raises ColumnProblem for text (also text that looks like a number), dates, bytes, complex numbers and integers
    beyond float64, TypeError for cells that are neither number nor text.
    """
    absent = np.fromiter(map(is_missing, values), np.bool_, len(values))
    types: set[type] = set(map(type, values[~absent]))
    for t in sorted(types, key=lambda t: t.__name__):
        if issubclass(t, _DATES):
            raise ColumnProblem(f"object holding {t.__name__}: {_MAKE_NUMBER}")
        if issubclass(t, numbers.Complex) and not issubclass(t, numbers.Real):
            raise ColumnProblem("Complex data not supported")
        if issubclass(t, bytes):
            raise ColumnProblem(f"object holding bytes: decode to text first; {_MAKE_CATEGORY}")
        if not issubclass(t, (str, *_NUMBERS)):
            # scikit-learn's wording, and its type of error, for a cell that can never be a feature
            raise TypeError(f"argument must be a string or a number, not '{t.__name__}'")
    if any(issubclass(t, str) for t in types):
        rows = [row for row, value in enumerate(values) if isinstance(value, str)]
        raise ColumnProblem(
            f"object mixing numbers with text in {len(rows)} rows, the first of them row {rows[0]}: {_CORRECT}"
        )
    numbers_only = values.copy()
    numbers_only[absent] = math.nan
    try:
        return numbers_only.astype(np.float64)
    except OverflowError:
        # a Python integer has no largest value
        raise ColumnProblem("holds integers beyond the range of float: clip them or mark them missing") from None


def _objects(values: NDArray[np.object_], text_as_categories: bool, origin: Sought) -> Column:
    absent = np.fromiter(map(is_missing, values), np.bool_, len(values))
    n_present = len(values) - int(np.count_nonzero(absent))
    if n_present and all(isinstance(value, str) for value in values[~absent]):
        text = pa.array(values, type=pa.large_string(), mask=absent)
        if not text_as_categories:
            raise _text_problem("object", text, n_present)
        return _text(text)
    floats = floats_from_objects(values)
    if np.any(np.abs(floats) >= WHOLE) and all(isinstance(value, int | np.integer) for value in values[~absent]):
        # as it came, unless it is longer than 64 bits
        whole = np.array(values[~absent].tolist())
        if whole.dtype.kind in "iu":
            return _with_gaps(whole, absent, origin)
    return column_from_array(floats, origin=origin)


def _with_gaps(there: NDArray[Any], absent: Flags, origin: Sought) -> Column:
    column = column_from_array(there, origin=origin)
    values = np.full(len(absent), np.nan, column.values.dtype)
    values[~absent] = column.values
    return Column(values, None, column.origin)


def number_columns(array: NDArray[Any], known: Sequence[Any] | None = None) -> Callable[[int], Column]:
    """Convert numbers (n_rows, n_columns); return a function from a column's place to the column, or ColumnProblem.

    Origins are found unless they are `known`, `DOUBLE` or not. The values of float32 columns are rows of one array.
    """
    doubles = known is not None and DOUBLE in known
    known = None if doubles else known
    n_rows, n_columns = array.shape
    exact = np.can_cast(array.dtype, np.float32)
    long = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    turned, wide = np.empty((n_columns, n_rows), np.float32), np.zeros(n_columns, np.bool_)
    for start in range(0, n_rows, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        block = array[rows] if exact else array[rows].astype(np.float64, copy=False)
        with np.errstate(over="ignore"):
            turned[:, rows] = block.T
        if not exact and known is None:
            # a whole number that float32 changes needs float64
            wide |= ((turned[:, rows].T != block) & (np.floor(block) == block)).any(axis=0)
            wide |= long and (np.abs(block) >= WHOLE).any(axis=0)

    def column(place: int) -> Column:
        check_range(turned[place])
        values = array[:, place]
        if known is not None:
            origin = known[place]
        elif not wide[place] and (
            exact or (np.array_equal(values, turned[place], equal_nan=True) if doubles else _tells_apart(values))
        ):
            origin = None
        else:
            lowest, highest = (int(values.min()), int(values.max())) if values.dtype.kind in "iu" else (0, 0)
            origin = int(highest / WHOLE) * WHOLE if max(highest, -lowest) >= WHOLE else 0
        return Column(turned[place]) if origin is None else Column(_doubles(values, origin), None, origin)

    return column


def needs_doubles(column: Column) -> bool:
    """Whether float32 would change the bins of a column of float64."""
    values, narrow = column.values, column.values.astype(np.float32)
    return bool(column.origin or np.any((values != narrow) & (np.floor(values) == values))) or not _tells_apart(values)


def _tells_apart(values: NDArray[Any]) -> bool:
    """Whether float32 tells numbers apart well enough for bins, judged by some rows."""
    some = np.sort(values[:: max(1, len(values) // _LOOKED_AT)].astype(np.float64))
    some = some[: np.searchsorted(some, np.nan)]
    narrow = some.astype(np.float32)
    if np.array_equal(narrow, some):
        return True
    # numbers that are one float32 are a group
    group = np.cumsum(np.append(False, narrow[1:] != narrow[:-1]))
    # rows of the groups with more than one number: the largest may hold a thousandth; by chance a few rows meet
    several = np.unique(group[1:][(narrow[1:] == narrow[:-1]) & (some[1:] != some[:-1])])
    rows, few = np.bincount(group)[several], min(max(2, len(some) >> 8), len(some) - 1)
    return int(rows.max(initial=0)) << 10 < len(some) or int(rows.sum()) <= few


def _doubles(values: NDArray[Any], origin: int) -> Floats:
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        # rounded once: the halves are exact in float64
        upper = (values >> 32).astype(np.float64) * float(1 << 32) - float(origin)
        return np.asarray(upper + (values & 0xFFFFFFFF).astype(np.float64))
    return np.asarray(values.astype(np.float64) - float(origin))


def check_range(values: NDArray[np.float32]) -> None:
    """Raise ColumnProblem for values that are infinite, or were beyond float32 before the cast."""
    n_infinite = int(np.count_nonzero(np.isinf(values)))
    if n_infinite:
        raise ColumnProblem(
            f"{n_infinite} rows are infinite (inf) or beyond the float32 range of {LARGEST:.2g}: "
            "clip them or mark them missing (NaN)"
        )


def _categories(series: nw.Series[Any]) -> Column:
    remedy = "make them text with .cat.rename_categories(str)"
    try:
        encoded = series.to_arrow()
        values = encoded.dictionary.to_pylist()
    except (pa.ArrowException, TypeError):
        raise ColumnProblem(f"{_native_dtype(series)} with categories of several types: {remedy}") from None
    # a dictionary may hold a value twice, or "missing" as a value: positions are not yet codes
    categories: dict[Category, int] = {}
    codes = np.full(len(values), np.nan, dtype=np.float32)
    for position, value in enumerate(values):
        if is_missing(value):
            continue
        if not isinstance(value, (str, int, float)):
            of_type = f"categories of type {type(value).__name__}"
            raise ColumnProblem(f"{_native_dtype(series)} with {of_type}: {remedy}")
        codes[position] = categories.setdefault(value, len(categories))
    # null is one more position, of NaN
    positions = encoded.indices.cast(pa.int64()).fill_null(len(codes)).to_numpy(zero_copy_only=False)
    return Column(np.append(codes, np.float32(np.nan))[positions], tuple(categories))


def _text(strings: Any) -> Column:
    strings = strings.cast(pa.large_string())
    categories = sorted(strings.unique().drop_null().to_pylist())
    codes = pc.index_in(strings, pa.array(categories, strings.type)).cast(pa.float32(), safe=False)
    return Column(np.array(codes.to_numpy(zero_copy_only=False)), tuple(categories))


def _text_problem(dtype: str, strings: Any, n_present: int) -> ColumnProblem:
    # that module imports this one
    from treaty.data.arrow_tables import strays_of

    strays = strays_of(strings)
    if strays is not None:
        return ColumnProblem(
            f"{dtype} with {strays.described(strays.rows[: len(strays.first)].tolist(), 'row')}: {_CORRECT}"
        )
    return ColumnProblem(f"{dtype}, text in {n_present} rows: {_MAKE_CATEGORY}")


def _native_dtype(series: nw.Series[Any]) -> str:
    native = series.to_native()
    return str(getattr(native, "dtype", getattr(native, "type", series.dtype)))


def quoted(names: Iterable[Any]) -> str:
    """Return names in quotes, separated by commas, for a message."""
    return ", ".join(repr(name) for name in names)


def refuse_repeated(names: Sequence[str], party: str, more: str = "") -> None:
    """Raise DataError for column names that occur more than once; `more` ends the message."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{party}: expected unique column names, got more than one of {quoted(repeated)}{more}")


_LABELS = (numbers.Number, np.bool_, str)


def check_labels(y: Any, party: str, n_rows: int | None = None) -> NDArray[Any]:
    """Return class labels as an array (n_rows,) of their own dtype, from any container that `to_table` takes.

    Raises DataError unless they are one-dimensional, as many as the rows, complete, finite, and numbers, booleans or
    text.
    """
    if y is None:
        # scikit-learn's words
        raise DataError(f"{party}: requires y to be passed, but the target y is None")
    labels = _one_dimensional(y, party, "labels", n_rows)
    kind, got, of_bytes, n_missing = labels.dtype.kind, "", False, 0
    if kind == "O":
        present = [label for label in labels if not is_missing(label)]
        n_missing = len(labels) - len(present)
        other = next((of for of in map(type, present) if not issubclass(of, _LABELS)), None)
        if other is not None:
            # arrow's lists come as arrays
            got = "list" if issubclass(other, np.ndarray) else other.__name__
            of_bytes = issubclass(other, bytes)
    elif kind in "mMSV":
        got, of_bytes = str(labels.dtype), kind == "S"
    elif kind == "f":
        n_missing = int(np.count_nonzero(np.isnan(labels)))
    if got:
        remedy = "; decode them to text first (save a CSV file as UTF-8)" if of_bytes else ""
        raise DataError(f"{party}: expected labels of numbers, booleans or text, got {got}{remedy}")
    if n_missing:
        raise DataError(f"{party}: expected a label in every row, got {n_missing} of {len(labels)} rows without (NaN)")
    if kind == "f":
        _refuse_infinite(labels, party, "labels")
    return labels


def check_targets(y: Any, party: str, n_rows: int | None = None) -> Floats:
    """Return a finite numeric target, float64 (n_rows,); raise DataError otherwise."""
    return _finite(check_labels(y, party, n_rows), party, "target")


def check_weights(weights: Any, n_rows: int, party: str) -> Floats:
    """Return sample weights, float64 (n_rows,), finite, >= 0 and not all 0; raise DataError for any others."""
    checked = _finite(_one_dimensional(weights, party, "sample weights", n_rows), party, "sample weights")
    n_negative = int(np.count_nonzero(checked < 0))
    if n_negative:
        raise DataError(f"{party}: expected sample weights >= 0, got {n_negative} negative ones")
    if not checked.any():
        raise DataError(f"{party}: expected a sample weight above 0, got only zeros")
    return checked


def _one_dimensional(values: Any, party: str, what: str, n_rows: int | None) -> NDArray[Any]:
    native = nw.from_native(values, pass_through=True, allow_series=True)
    if isinstance(native, (nw.Series, nw.DataFrame)):
        array = native.to_numpy()
    else:
        try:
            array = np.asarray(native)
        except ValueError:
            raise DataError(f"{party}: {what} should be a 1d array, got lists of several lengths instead.") from None
        if isinstance(native, np.ma.MaskedArray):
            array = array.astype(object)
            array[np.ma.getmaskarray(native)] = None
        if array.dtype.kind in "US" and not isinstance(native, np.ndarray):
            # NaN next to text would have become the text "nan"
            array = np.asarray(native, dtype=object)
    if array.ndim != 1:
        raise DataError(f"{party}: {what} should be a 1d array, got an array of shape {array.shape} instead.")
    if array.dtype.kind == "c":
        raise DataError(f"{party}: Complex data not supported")
    if len(array) == 0:
        raise DataError(f"{party}: Found array with 0 sample(s) in {what} while a minimum of 1 is required.")
    if n_rows is not None and len(array) != n_rows:
        raise DataError(f"{party}: expected {n_rows} {what}, one per row of the table, got {len(array)}")
    return array


def _finite(values: NDArray[Any], party: str, what: str) -> Floats:
    try:
        if values.dtype.kind not in "biufO":
            raise ColumnProblem(f"{values.dtype} is not a number")
        floats = floats_from_objects(values) if values.dtype.kind == "O" else values.astype(np.float64)
    except (ColumnProblem, TypeError) as error:
        raise DataError(f"{party}: expected numbers as {what}: {error}") from None
    n_missing = int(np.count_nonzero(np.isnan(floats)))
    if n_missing:
        raise DataError(f"{party}: expected {what} without missing values, got {n_missing} NaN of {len(floats)}")
    _refuse_infinite(floats, party, what)
    return floats


def _refuse_infinite(values: NDArray[Any], party: str, what: str) -> None:
    n_infinite = int(np.count_nonzero(np.isinf(values)))
    if n_infinite:
        raise DataError(f"{party}: expected finite {what}, got {n_infinite} infinite (inf) of {len(values)}")
