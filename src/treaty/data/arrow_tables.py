"""Arrow tables in memory, or on disk (`FileTable`), read column by column when a column is asked for; both alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal

import narwhals as nw
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treaty.data.columns import WHOLE, Column, ColumnProblem, Origin, column_from_series, number_columns
from treaty.machine.arrays import forget, new

Change = Callable[[Any], Any]

# in a field's metadata: of which type a column of text is as a feature
_NUMBERS = b"treaty.numbers"


def as_numbers_in_features(table: Any, name: str, kind: pa.DataType) -> Any:
    """Return a table one of whose columns, text that keeps what a file says, is numbers to `features_of`."""
    at = table.schema.get_field_index(name)
    schema = table.schema.set(at, table.schema.field(at).with_metadata({_NUMBERS: str(kind)}))
    return table._with(schema) if isinstance(table, FileTable) else table.cast(schema)


def features_of(table: Any) -> Any:
    """Return an arrow table, or one on disk, whose columns of `as_numbers_in_features` are these numbers."""
    for at, field in enumerate(table.schema):
        if field.metadata and _NUMBERS in field.metadata:
            kind = pa.type_for_alias(field.metadata[_NUMBERS].decode())

            def numbers(column: Any, kind: pa.DataType = kind) -> Any:
                return pc.utf8_trim_whitespace(column).cast(kind)

            if isinstance(table, FileTable):
                table = table.changed(field.name, kind, numbers)
            else:
                table = table.set_column(at, field.name, numbers(table[field.name]))
    return table


class FileTable:
    """Columns of a `pyarrow.dataset.Dataset`, with those methods of `pyarrow.Table` that reading a party's table needs.

    Nothing of it is kept in memory. What is made of its columns goes to files in `folder`; `damaged` makes an error of
    what arrow raises when it reads a file that is not whole.
    """

    def __init__(self, source: Any, schema: pa.Schema, folder: Path, damaged: Callable[[Exception], Exception]) -> None:
        self.schema, self.folder = schema, folder
        self._source, self._damaged = source, damaged
        self._rows: int = source.count_rows()  # of the files
        self._order: NDArray[np.int64] | None = None
        self._changes: dict[str, Change] = {}

    @property
    def num_rows(self) -> int:
        return self._rows if self._order is None else len(self._order)

    @property
    def column_names(self) -> list[str]:
        return list(self.schema.names)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.num_rows, len(self.schema)

    def __getitem__(self, name: str) -> Any:
        """Read one column, a `pyarrow.ChunkedArray`."""
        if name in self._source.schema.names:
            column = pa.chunked_array(list(self._chunks(name)), self._source.schema.field(name).type)
        else:  # of `append_column`
            column = pa.chunked_array([pa.nulls(self._rows, self.schema.field(name).type)])
        if name in self._changes:
            column = self._changes[name](column)
        return column if self._order is None else column.take(pa.array(self._order))

    def numbers_into(self, name: str, out: NDArray[np.float32], origin: Origin | EllipsisType) -> Column | None:
        """Read a column of numbers by batches as `column_from_series` converts it: to `out` (num_rows,), or a file.

        Returns None for a column of another kind, of unusable numbers, or of whole numbers beyond 2^53 whose origin has
        to be found.
        """
        kind = self.schema.field(name).type
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if not (plain or pa.types.is_decimal(kind)) or name in self._changes or name not in self._source.schema.names:
            return None
        exact = plain and np.can_cast(kind.to_pandas_dtype(), np.float32)
        as_given = origin if not isinstance(origin, EllipsisType) else None if exact else 0
        try:
            values = self._numbers(name, out, as_given)
            if isinstance(origin, EllipsisType) and as_given is not None:
                if pa.types.is_integer(kind) and np.nanmax(np.abs(values), initial=0) >= WHOLE:
                    return None
                found = number_columns(values[:, None])(0)
                if found.origin is None:
                    out[:] = found.values
                    return Column(out)
        except ColumnProblem:
            # perhaps of rows that are not among the common ones
            return None
        return Column(values, None, as_given)

    def _numbers(self, name: str, out: NDArray[np.float32], origin: Origin) -> NDArray[Any]:
        """Read a column's numbers to `out`, or of an origin to a file of their own, which is returned."""
        into = out if origin is None else new((self.num_rows,), np.float64, self.folder)
        values = into if self._order is None else np.empty(self._rows, into.dtype)
        done = 0
        for chunk in self._chunks(name):
            series = nw.from_native(pa.chunked_array([chunk]), series_only=True)
            values[done : done + len(series)] = column_from_series(series, origin=origin).values
            done += len(series)
            forget(values)
        if self._order is not None:
            np.take(values, self._order, out=into)
        return into

    def has_values(self, name: str) -> bool:
        """Whether a column is not missing in all rows of the files."""
        there = name in self._source.schema.names
        return there and any(chunk.null_count < len(chunk) for chunk in self._chunks(name))

    def select(self, names: Sequence[str]) -> FileTable:
        """Return a table of some columns, in this order."""
        return self._with(pa.schema([self.schema.field(name) for name in names], self.schema.metadata))

    def drop_columns(self, names: Sequence[str]) -> FileTable:
        return self.select([name for name in self.column_names if name not in names])

    def take(self, rows: Any) -> FileTable:
        """Return the table of these rows, whole numbers, in their order."""
        order = np.asarray(rows, np.int64)
        made = self._with(self.schema)
        made._order = order if self._order is None else self._order[order]
        return made

    def changed(self, name: str, kind: pa.DataType, change: Change) -> FileTable:
        """Return a table one of whose columns is what `change` makes of it when it is read, of arrow's type `kind`."""
        before = self._changes.get(name)
        made = self._with(self.schema.set(self.schema.get_field_index(name), pa.field(name, kind)))
        made._changes[name] = change if before is None else lambda column: change(before(column))
        return made

    def append_column(self, name: str, nulls: Any) -> FileTable:
        """Return a table with one more column, without values, of the type of `nulls`."""
        return self._with(self.schema.append(pa.field(name, nulls.type)))

    def _chunks(self, name: str) -> Iterator[Any]:
        """Read a column batch by batch, in the files' order."""
        try:
            for batch in self._source.scanner(columns={name: pc.field(name)}).to_batches():
                yield batch.column(0)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from None

    def _with(self, schema: pa.Schema) -> FileTable:
        made = copy(self)
        made.schema, made._changes = schema, dict(self._changes)
        return made


def as_text(table: Any, names: Sequence[str]) -> Any:
    """Return a table whose columns `names`, as far as it has them, hold text where they held numbers or booleans."""
    for name in set(names) & set(table.column_names):
        kind = table.schema.field(name).type
        if any(
            of(kind) for of in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
        ):
            table = changed(table, name, pa.string(), lambda column: column.cast(pa.string()))
    return table


def changed(table: Any, name: str, kind: pa.DataType, change: Callable[[Any], Any]) -> Any:
    """Return a table one of whose columns is what `change` makes of it, of arrow's type `kind`."""
    if isinstance(table, FileTable):
        return table.changed(name, kind, change)
    return table.set_column(table.schema.get_field_index(name), name, change(table[name]))


def has_values(table: Any, name: str) -> bool:
    """Whether a column is not missing in all rows."""
    if isinstance(table, FileTable):
        return table.has_values(name)
    return bool(table[name].null_count < table.num_rows)


def with_categories(table: Any, *, but: Sequence[str | None] = ()) -> Any:
    """Return a table whose columns of text, all `but` some, are arrow dictionaries of their sorted values."""
    for field in table.schema:
        if field.name in but:
            continue
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            table = changed(table, field.name, pa.dictionary(pa.int32(), pa.string()), _sorted_categories)
    return table


def _sorted_categories(column: Any) -> Any:
    values = pa.array(sorted(column.unique().drop_null().to_pylist()), pa.string())
    return pa.chunked_array([pa.DictionaryArray.from_arrays(pc.index_in(column.combine_chunks(), values), values)])


def numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column as an array, without arrow's own `to_numpy` for plain numbers.

    That function imports pandas if there is one, which takes half a second.
    """
    kind = column.type
    plain = (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and column.null_count == 0
    if not plain or column.num_chunks == 0:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])


# ----------------------------------------------------------------
# Text that should be numbers or dates: a blank, a decimal comma or a stray word makes a whole column of them text.
#
# A column of text counts as categories where few cells look like numbers. Else it has to be declared, or its cells to
# be corrected: trees would otherwise take every number for a category of its own. Few are less than half of the rows
# that have a value, and either less than a tenth of the different values, or less than `MANY` of these in less than a
# tenth of the rows. So a code that is a number may be among many names, however common it is; amounts that only few
# rows have are found by their being different. Dates follow the same rule.

FEWEST, MOST, MANY = 0.1, 0.5, 10

SHOWN = 3  # cells that a message shows
_LONGEST = 24  # characters of a cell that a message shows

_NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
_CLOCK = r"([ T][0-9]{1,2}:[0-9]{2}(:[0-9]{2}([.,][0-9]+)?)?( ?[AaPp][Mm])?(Z|[+-][0-9]{2}:?[0-9]{2})?)?"
_DATES = (
    r"[0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}" + _CLOCK,
    r"[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{4}" + _CLOCK,
    r"([0-9]{2}[/.][0-9]{2}[/.][0-9]{2}|[0-9]{1,2}/[0-9]{1,2}/[0-9]{2})" + _CLOCK,
    r"[0-9]{1,2}[- ]?(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*[- ]?[0-9]{2,4}",
)
_WRITTEN_OTHERWISE = (
    # decimal comma
    r"[+-]?([0-9]+,[0-9]*|,[0-9]+)([eE][+-]?[0-9]+)?",
    # thousands apart
    r"[+-]?[0-9]{1,3}([.,' \x{a0}\x{202f}][0-9]{3})+([.,][0-9]+)?",
    _NUMBER.replace(r"\.", "[.,]") + r"\s?%",
    r"[$€£]\s?" + _NUMBER.replace(r"\.", "[.,]"),
    _NUMBER.replace(r"\.", "[.,]") + r"\s?([$€£]|EUR|USD|GBP|CHF)",
    # a minus sign, or dash, of typesetting
    r"[\x{2212}\x{2013}]" + _NUMBER.replace(r"\.", "[.,]"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Strays:
    """Cells of a column that are no numbers, or dates, where the column should have these.

    `rows`, int64 in rising order, are where they stand and `first` what the first `SHOWN` of them hold. The column has
    `n_others` cells as they should be, which are `of` that kind.
    """

    rows: NDArray[np.int64]
    first: list[str]
    n_others: int
    of: Literal["numbers", "dates"] = "numbers"

    def described(self, places: Sequence[int], place: str) -> str:
        """Say what is where: `places` are the lines, or rows, of the first ones, `place` is "line" or "row"."""
        cells = [f"{shortened(cell)} in {place} {at}" for cell, at in zip(self.first, places, strict=True)]
        more = len(self.rows) - len(cells)
        further = f" and {more} more" if more else ""
        rows = "1 row" if self.n_others == 1 else f"{self.n_others} rows"
        but = f", but {', '.join(cells)}{further}" if cells else ""
        return f"{self.of} in {rows}{but}"


def strays_of(strings: Any, *, must: bool = False) -> Strays | None:
    """Return what is no number in an arrow array of text, where more than few cells look like numbers, or all `must`.

    None where few do, and where all cells are numbers or missing; see `are_numbers`.
    """
    cells, positions = _cells(strings)
    number = _matches(cells, _NUMBER)
    looks = number | _matches(cells, "|".join(f"({written})" for written in _WRITTEN_OTHERWISE))
    rows = np.flatnonzero(~np.append(number, True)[positions])
    if len(rows) == 0 or not (must or _more_than_few(looks, positions)):
        return None
    return Strays(rows, _first(strings, rows), int(np.count_nonzero(positions < len(cells))) - len(rows))


def dates_of(strings: Any) -> Strays | None:
    """Return what is no date in an arrow array of text, of which more than few are dates; None where few are."""
    cells, positions = _cells(strings)
    date = _matches(cells, "|".join(f"({written})" for written in _DATES))
    if not _more_than_few(date, positions):
        return None
    rows = np.flatnonzero(~np.append(date, True)[positions])
    n_dates = int(np.count_nonzero(positions < len(cells))) - len(rows)
    return Strays(rows, _first(strings, rows), n_dates, "dates")


def _cells(strings: Any) -> tuple[Any, NDArray[np.int64]]:
    """Return the different cells without white space around them, and of each row which it has; missing is the last."""
    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    encoded = strings.cast(pa.large_string()).dictionary_encode()
    cells = encoded.dictionary
    positions = encoded.indices.cast(pa.int64()).fill_null(len(cells)).to_numpy(zero_copy_only=False)
    return pc.utf8_trim_whitespace(cells), positions


def _more_than_few(looks: NDArray[np.bool_], positions: NDArray[np.int64]) -> bool:
    """Whether more than few cells look like it: `looks` is of different cells, `positions` which each row has."""
    n_present = int(np.count_nonzero(positions < len(looks)))
    n_rows, n_different = int(np.count_nonzero(np.append(looks, False)[positions])), int(np.count_nonzero(looks))
    if n_rows == 0 or n_rows >= MOST * n_present:
        return n_rows > 0
    return n_different >= FEWEST * len(looks) and (n_different >= MANY or n_rows >= FEWEST * n_present)


def _first(strings: Any, rows: NDArray[np.int64]) -> list[str]:
    return [strings[int(row)].as_py() for row in rows[:SHOWN]]


def are_numbers(strings: Any) -> bool:
    """Whether an arrow array of text has numbers in all cells but missing ones, and some."""
    cells = pc.utf8_trim_whitespace(strings.cast(pa.large_string()).unique().drop_null())
    return len(cells) > 0 and bool(np.all(_matches(cells, _NUMBER)))


def shortened(cell: str) -> str:
    """Return a cell in quotes, cut where it is long."""
    return repr(cell) if len(cell) <= _LONGEST else repr(cell[:_LONGEST]) + "..."


def _matches(cells: Any, pattern: str) -> NDArray[np.bool_]:
    found = pc.match_substring_regex(cells, f"^({pattern})$")
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


# ----------------------------------- ids in CSV files, which do not say what is a number: 00123 is another id than 123

_WHOLE = r"^(0|-?[1-9][0-9]{0,18})$"
# as pandas writes whole numbers with a missing one among them
_WHOLE_DECIMAL = r"^(0|-?[1-9][0-9]{0,14})(\.0*)?$"
_LISTED = 3  # lengths of ids that a line names


def typed_ids(cells: Any) -> Any:
    """Return ids that a CSV file has, an arrow array of text, as numbers or dates where that loses nothing.

    Whole numbers and dates so match those of files with types. All stay text where one has a zero or a plus in front,
    an exponent, or more digits than a number keeps.
    """
    trimmed = pc.utf8_trim_whitespace(cells)
    if cells.null_count == len(cells):
        return cells
    if _all(pc.match_substring_regex(trimmed, _WHOLE)):
        try:
            return trimmed.cast(pa.int64())
        except pa.ArrowInvalid:  # 2^63 or more
            return cells
    if _all(pc.match_substring_regex(trimmed, _WHOLE_DECIMAL)):
        return trimmed.cast(pa.float64()).cast(pa.int64())
    try:
        times = trimmed.cast(pa.timestamp("s"))
        days = times.cast(pa.date32(), safe=False)
    except pa.ArrowInvalid:
        return cells
    return days if _all(pc.equal(days.cast(times.type), times)) else cells


def stays_text(cells: Any) -> bool:
    """Whether ids that a CSV file has, of which some are there, are none of the numbers that they look like."""
    return bool(cells.null_count < len(cells) and typed_ids(cells).type == cells.type)


def widths(ids: Any) -> str:
    """Say how many ids of a column, an arrow array, are how long: to compare with partners, without any id."""
    if pa.types.is_dictionary(ids.type):
        ids = ids.cast(ids.type.value_type)
    if pa.types.is_integer(ids.type):
        kind, unit = "whole numbers", "digits"
    elif pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type):
        kind, unit = "text", "characters"
    else:
        return str(ids.type)
    lengths, counts = np.unique(pc.utf8_length(ids.drop_null().cast(pa.large_string())).to_numpy(), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_LISTED]
    listed = [f"{counts[k]:,} of {lengths[k]}{f' {unit}' if not at else ''}" for at, k in enumerate(order)]
    others = len(ids) - ids.null_count - int(counts[order].sum())
    return ", ".join([kind, *listed, *([f"{others:,} of other lengths"] if others else [])])


def _all(found: Any) -> bool:
    return bool(pc.all(found).as_py())  # the null ones are left out
