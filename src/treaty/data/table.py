"""A party's features as columns of float32, or float64, from any dataframe or array.

`to_table` is the only entry for data: its result is checked, so later code does not check again. At prediction time it
is given the training table's `Schema`, takes the columns by name and maps categories by value, so that code k always
means the same category.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from types import EllipsisType
from typing import Any

import narwhals as nw
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treaty.data.arrow_tables import FileTable, features_of
from treaty.data.columns import (
    DOUBLE,
    IN_POLARS,
    Category,
    Column,
    ColumnProblem,
    Sought,
    column_from_array,
    column_from_series,
    number_columns,
    quoted,
    refuse_repeated,
)
from treaty.data.sparse import SparseColumns, canonical, dense_column, is_sparse
from treaty.errors import DataError
from treaty.machine.arrays import Flags, folder_of, forget, new

# columns of a file that a message names, and categories that a warning names
LISTED, _SHOWN = 20, 3
# share of rows with unknown categories from which on a warning asks how they are written
_LARGE_SHARE = 0.1
# a block of rows is transposed inside the processor's cache
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Schema:
    """Names and kinds of a table's features; raises DataError for a repeated name or tuples of different lengths."""

    names: tuple[str, ...]
    # None for a numeric feature; position = category code
    categories: tuple[tuple[Category, ...] | None, ...]
    # of numeric features that are float64, by name
    origins: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.names) != len(self.categories) or len(set(self.names)) != len(self.names):
            raise DataError("expected unique feature names and as many entries of categories - at Schema")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each feature: "numeric" or "categorical"."""
        return tuple("numeric" if values is None else "categorical" for values in self.categories)

    @property
    def categorical(self) -> Flags:
        """Whether each feature holds categories, bool (n_features,)."""
        return np.array([values is not None for values in self.categories], np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A party's checked features, column by column."""

    schema: Schema
    # each (n_rows,), NaN = missing; a numeric column is finite, a categorical one holds codes 0..K-1, or K for a
    # category the schema does not know; those of a sparse matrix are made anew whenever one is used
    columns: Sequence[NDArray[Any]]
    n_rows: int  # also where there is no column

    def matrix(self, rows: slice | None = None) -> NDArray[Any]:
        """Return the columns copied into one array (n_rows, n_features) in C order, float64 if one of them is.

        It lies on disk if the columns do; some `rows` alone are copied to memory.
        """
        first, last, _ = (rows or slice(None)).indices(self.n_rows)
        if isinstance(self.columns, SparseColumns):
            return self.columns.block(slice(first, last))
        shape, folder = (last - first, len(self.columns)), self.folder
        dtype = np.float64 if self.schema.origins else np.float32
        copied = np.empty(shape, dtype) if folder is None or rows else new(shape, dtype, folder)
        for start in range(first, last, _ROWS_AT_ONCE):
            block = slice(start, min(start + _ROWS_AT_ONCE, last))
            for feature, column in enumerate(self.columns):
                copied[block.start - first : block.stop - first, feature] = column[block]
        if rows and folder is not None:
            for column in {id(column.base): column for column in self.columns}.values():
                forget(column)
        return copied

    def rows(self, chosen: Flags) -> "Table":
        """Return the table of some rows, bool (n_rows,), on disk if this one is."""
        n_rows = int(np.count_nonzero(chosen))
        if isinstance(self.columns, SparseColumns):
            return Table(self.schema, self.columns.rows(chosen), n_rows)
        if self.folder is None:
            return Table(self.schema, [column[chosen] for column in self.columns], n_rows)
        stored = [new((n_rows,), column.dtype, self.folder) for column in self.columns]
        for out, column in zip(stored, self.columns, strict=True):
            out[:] = column[chosen]
            forget(out)
        return Table(self.schema, stored, n_rows)

    @property
    def folder(self) -> Path | None:
        """The folder of the files that the columns lie in; None in memory."""
        if isinstance(self.columns, SparseColumns):
            return None
        # mostly there is one base for all columns, which is quick
        bases = {id(column.base): column.base for column in self.columns}.values()
        return next((folder for base in bases if (folder := folder_of(base)) is not None), None)


@dataclass(frozen=True, slots=True)
class _Source:
    """What `to_table` needs of any input.

    ``read(i, text_as_categories, origin, out)`` converts column i; an origin of ``...`` is found. The columns of a
    table on disk go to `folder`, and `read` may write to `out` and return it.
    """

    # None for an array, whose columns go by position
    names: tuple[str, ...] | None
    n_columns: int
    n_rows: int
    read: Callable[[int, bool, Sought, NDArray[np.float32] | None], Column]
    folder: Path | None = None
    sparse: Any = None  # a matrix in CSC format


def to_table(
    data: Any,
    *,
    party: str = "the table",
    schema: Schema | None = None,
    text_as_categories: bool = False,
    allow_no_features: bool = False,
    on_unseen: Callable[[str], None] | None = None,
    place: str = "",
    doubles: bool = False,
) -> Table:
    """Check a party's data and convert it to a `Table` with its own memory, or on disk if the data is.

    `data` is any eager dataframe that narwhals knows (pandas, polars, pyarrow, ...), an array (n_rows, n_features),
    nested lists, a scipy sparse matrix or array, a Table or a `FileTable`. A sparse matrix stays sparse; its absent
    cells are the number 0. Whole, real and boolean columns (and decimals, and objects that are all
    numbers) become numeric features, categorical dtypes categorical ones with the dtype's codes; None, NaN, NA and null
    are missing. Columns of arrays are named f0, f1, ... With the training `schema`, columns are taken by name in its
    order (arrays by position) and categories mapped by value, unseen ones to the code K = number of known categories;
    text is taken where the schema has categories. `text_as_categories` turns text columns into sorted categories (files
    have no categorical dtype), `allow_no_features` accepts the table of an active party with labels alone. `on_unseen`
    is called with a sentence for each column with categories unknown from training. `place` is named in errors. With
    `doubles` a table in memory keeps float64 wherever float32 changes a number, until participants who hold rows of one
    table have agreed on the columns that need it.

    Raises DataError if the data is not two-dimensional, has no rows or columns, repeated names or columns that differ
    from `schema`, or unusable columns (one message names all of them), and TypeError for cells of an array that are
    neither numbers nor text.
    """
    source = _open(data, party, schema, doubles=doubles)
    shape = (source.n_rows, source.n_columns)
    if source.n_rows == 0:
        raise DataError(f"{party}: Found array with 0 sample(s) (shape={shape}) while a minimum of 1 is required.")
    if source.n_columns == 0 and not allow_no_features:
        raise DataError(f"{party}: Found array with 0 feature(s) (shape={shape}) while a minimum of 1 is required.")
    positions = _positions(source, schema, party, place)
    names = schema.names if schema else source.names or tuple(f"f{i}" for i in positions)
    columns: list[Column] = []
    problems: list[str] = []
    stored = None if source.folder is None else new((len(names), source.n_rows), np.float32, source.folder)
    for feature, (name, position) in enumerate(zip(names, positions, strict=True)):
        known = schema.categories[feature] if schema else None
        try:
            out = None if stored is None else stored[feature]
            origin: Sought = schema.origins.get(name) if schema else DOUBLE if doubles else ...
            column = source.read(position, text_as_categories or known is not None, origin, out)
            matched = _match(column, known) if schema else column
            if source.folder is not None and folder_of(matched.values) is None:
                out = out if matched.origin is None else new((source.n_rows,), np.float64, source.folder)
                assert out is not None
                out[:] = matched.values
                matched = Column(out, matched.categories, matched.origin)
            columns.append(
                matched if source.sparse is None else Column(matched.values[:0].copy(), None, matched.origin)
            )
            if on_unseen is not None and known is not None and (warning := _unseen(column, matched, known)):
                on_unseen(f"{party}: column {name!r}: {warning}")
        except ColumnProblem as problem:
            problems.append(f"column {name!r}: {problem}")
        except TypeError as error:
            raise TypeError(f"{party}: column {name!r}: {error}") from None
        if stored is not None:
            forget(stored)
    if type(data).__module__.startswith("polars"):
        problems = [reduce(lambda text, pair: text.replace(*pair), IN_POLARS, problem) for problem in problems]
    if problems:
        raise DataError(f"{party}: {'; '.join(problems)} - at {place or f'a table of {source.n_rows} rows'}")
    origins = {name: of.origin for name, of in zip(names, columns, strict=True) if of.origin is not None}
    made = schema or Schema(names, tuple(column.categories for column in columns), origins)
    if source.sparse is not None:
        return Table(made, SparseColumns(source.sparse, [column.origin for column in columns]), source.n_rows)
    return Table(made, [column.values for column in columns], source.n_rows)


def match_rows(tables: Mapping[str, Table], y: Sized | None = None) -> int:
    """Return the number of rows, the same in all parties' tables and the labels; raise DataError if they differ."""
    counts = {party: table.n_rows for party, table in tables.items()}
    if not counts:
        raise DataError("expected at least one party's table, got none")
    listed = ", ".join(f"{party} {n}" for party, n in counts.items())
    if y is not None:
        listed += f", labels {len(y)}"
    n_rows = next(iter(counts.values()))
    if set(counts.values()) | ({len(y)} if y is not None else set()) != {n_rows}:
        raise DataError(f"expected the same number of rows everywhere, as rows go by position, got {listed}")
    return n_rows


def _open(data: Any, party: str, schema: Schema | None, *, doubles: bool) -> _Source:
    if isinstance(data, Table):
        return _table_source(data)
    if isinstance(data, FileTable | pa.Table):
        data = features_of(data)
    if isinstance(data, FileTable):
        return _file_source(data)
    if is_sparse(data):
        return _sparse_source(data, party)
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    native = of_frame(data, party)
    if isinstance(native, nw.LazyFrame):
        raise DataError(f"{party}: expected a dataframe in memory, got a lazy one; call .collect() first")
    if isinstance(native, nw.DataFrame):
        return _frame_source(native, party)
    if isinstance(native, nw.Series):
        native = native.to_numpy()
    return _array_source(native, party, schema, doubles=doubles)


def of_frame(data: Any, party: str) -> Any:
    """Return a dataframe or series wrapped by narwhals, other data as it is; refuse repeated column names."""
    try:
        return nw.from_native(data, pass_through=True, allow_series=True)
    except nw.exceptions.DuplicateError:
        names = data.column_names if isinstance(data, pa.Table) else data.columns
        return refuse_repeated(list(map(str, names)), party)


def _frame_source(frame: nw.DataFrame[Any], party: str) -> _Source:
    # pandas names may be numbers
    names = tuple(map(str, frame.columns))
    refuse_repeated(names, party)
    series = list(frame.iter_columns())

    def read(i: int, text: bool, origin: Sought, out: NDArray[np.float32] | None) -> Column:
        return column_from_series(series[i], text_as_categories=text, origin=origin)

    return _Source(names, len(names), len(frame), read)


def _table_source(table: Table) -> _Source:
    if isinstance(table.columns, SparseColumns):
        # names of arrays, f0, f1, ..., which are matched by position
        return _sparse_source(table.columns.by_column, "the table")
    names, categories, origins = table.schema.names, table.schema.categories, table.schema.origins

    def read(i: int, text: bool, origin: Sought, out: NDArray[np.float32] | None) -> Column:
        own = Column(table.columns[i], categories[i], origins.get(names[i]))
        return own.at(own.origin if isinstance(origin, EllipsisType | str) else origin)

    return _Source(names, len(names), table.n_rows, read, table.folder)


def _sparse_source(data: Any, party: str) -> _Source:
    if len(data.shape) != 2:
        raise DataError(f"{party}: Expected 2D array, got a sparse {len(data.shape)}D array instead.")
    if data.dtype.kind not in "biuf":
        what = "Complex data not supported" if data.dtype.kind == "c" else f"{data.dtype} is not a number"
        raise DataError(f"{party}: {what} - at a sparse matrix")
    try:
        matrix = canonical(data)
    except ValueError as error:
        raise DataError(f"{party}: {error} - at a sparse matrix") from None

    def read(i: int, text: bool, origin: Sought, out: NDArray[np.float32] | None) -> Column:
        return column_from_array(dense_column(matrix, i), origin=origin)

    return _Source(None, matrix.shape[1], matrix.shape[0], read, sparse=matrix)


def _file_source(table: FileTable) -> _Source:
    names = tuple(table.column_names)

    def read(i: int, text: bool, origin: Sought, out: NDArray[np.float32] | None) -> Column:
        # so many rows are judged as all of them are
        on_disk = ... if isinstance(origin, str) else origin
        if out is not None and (column := table.numbers_into(names[i], out, on_disk)) is not None:
            return column
        series = nw.from_native(table[names[i]], series_only=True)
        return column_from_series(series, text_as_categories=text, origin=origin)

    return _Source(names, len(names), table.num_rows, read, table.folder)


def _array_source(data: Any, party: str, schema: Schema | None, *, doubles: bool) -> _Source:
    try:
        array = np.asarray(data)
        if array.dtype.kind in "US" and not isinstance(data, np.ndarray):
            # numbers next to text would have become text
            array = np.asarray(data, dtype=object)
    except ValueError as error:
        raise DataError(f"{party}: expected rows of equal length, got {error}") from None
    if array.ndim != 2:
        got = {0: f"a scalar or {type(data).__name__}", 1: "1D array"}.get(array.ndim, f"{array.ndim}D array")
        raise DataError(
            f"{party}: Expected 2D array, got {got} instead. Reshape your data either using array.reshape(-1, 1) "
            "if your data has a single feature or array.reshape(1, -1) if it contains a single sample."
        )
    if array.dtype.kind == "c":
        raise DataError(f"{party}: Complex data not supported")
    n_rows, n_columns = array.shape
    if np.ma.isMaskedArray(data):
        array = np.ma.filled(np.ma.asarray(data, dtype=np.float64), np.nan)
    if array.dtype.kind in "biuf":
        known: list[Any] | None = [DOUBLE] * n_columns if doubles else None
        known = known if schema is None else [schema.origins.get(name) for name in schema.names]
        column = number_columns(array, known if known is None or len(known) == n_columns else [None] * n_columns)
        return _Source(None, n_columns, n_rows, lambda i, text, origin, out: column(i))

    def read(i: int, text: bool, origin: Sought, out: NDArray[np.float32] | None) -> Column:
        return column_from_array(array[:, i], text_as_categories=text, origin=origin)

    return _Source(None, n_columns, n_rows, read)


def refuse_absent(meant: Sequence[str], what: str, names: Sequence[str], path: str | Path, party: str) -> None:
    """Raise DataError if `meant` columns are absent; `what` describes them: "the columns to drop"."""
    absent = [name for name in meant if name not in names]
    if absent:
        raise DataError(f"{party}: expected {what}, {quoted(absent)}, {file_without(absent, names)} - at {path}")


def file_without(absent: Sequence[str], names: Sequence[str]) -> str:
    """Describe a file that lacks columns: those it has, and which of these may be meant."""
    near = list(dict.fromkeys(close for name in absent for close in get_close_matches(name, names, 2)))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    meant = f"; did you mean {quoted(near)}?" if near else ""
    return f"got a file without {'it' if len(absent) == 1 else 'them'}, with {quoted(names[:LISTED])}{more}{meant}"


def check_names(schema: Schema, names: Sequence[str], party: str, place: str = "") -> None:
    """Raise DataError for a table whose columns, `names`, are not those of training; the error ends with `place`."""
    there, known = set(names), set(schema.names)
    missing = [name for name in schema.names if name not in there]
    unknown = [name for name in names if name not in known]
    if missing or unknown:
        parts = [f"missing columns {quoted(missing)}"] if missing else []
        parts += [f"columns unknown from training, to be dropped: {quoted(unknown)}"] if unknown else []
        at = f" - at {place}" if place else ""
        raise DataError(f"{party}: expected the columns of training, got {' and '.join(parts)}{at}")


def _positions(source: _Source, schema: Schema | None, party: str, place: str) -> list[int]:
    """Return the position in the data of every feature, in the schema's order."""
    if schema is not None and source.names is None and source.n_columns != len(schema.names):
        # scikit-learn's words
        raise DataError(
            f"X has {source.n_columns} features, but Schema is expecting {len(schema.names)} features as input "
            f"- at {party}"
        )
    if schema is None or source.names is None:
        return list(range(source.n_columns))
    position = {name: i for i, name in enumerate(source.names)}
    check_names(schema, source.names, party, place)
    return [position[name] for name in schema.names]


def _match(column: Column, known: tuple[Category, ...] | None) -> Column:
    """Convert a column to the kind and the category codes of training."""
    if column.categories == known:
        return column
    # a column without values fits any kind
    if np.isnan(column.values).all():
        return Column(column.values, known, column.origin)
    if known is None:
        raise ColumnProblem("expected numbers, as in training, got categories")
    if column.categories is None:
        raise ColumnProblem("expected categories, as in training, got numbers; convert with the training categories")
    text_here = {isinstance(value, str) for value in column.categories}
    if known and text_here.isdisjoint(isinstance(value, str) for value in known):
        here, there = ("text", "numbers") if True in text_here else ("numbers", "text")
        raise ColumnProblem(f"expected categories that are {there}, as in training, got {here}")
    # map by value, not by code: another file may list the same categories in another order
    code = {value: position for position, value in enumerate(known)}
    unseen = len(known)
    codes = np.array([code.get(value, unseen) for value in column.categories] + [unseen], dtype=np.float32)
    # missing stays missing; codes are looked up for the other rows alone
    present = ~np.isnan(column.values)
    values = column.values.copy()
    values[present] = codes[column.values[present].astype(np.intp)]
    return Column(values, known)


def _unseen(column: Column, matched: Column, known: tuple[Category, ...]) -> str:
    """Describe how many rows have categories unknown from training, and which; "" if there are none."""
    rows = matched.values == len(known)
    n_rows = int(np.count_nonzero(rows))
    if n_rows == 0 or column.categories is None or column.categories == known:
        return ""
    values = [column.categories[int(code)] for code in np.unique(column.values[rows])]
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    share = n_rows / len(rows)
    hint = "; are they written as in training (upper case, spaces, codes)?" if share >= _LARGE_SHARE else ""
    return (
        f"{n_rows} of {len(rows)} rows ({share:.1%}) have categories that training did not have, "
        f"{quoted(values[:_SHOWN])}{more}, which count as one unknown category{hint}"
    )
