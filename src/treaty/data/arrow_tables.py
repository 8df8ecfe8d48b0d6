"""Arrow tables in memory, or on disk (`FileTable`) and read a column at a time; and what text in their columns is.

Functions take tables of both kinds. Text is judged by `strays_of` and `dates_of` (should it be numbers or dates?) and,
for ids, by `typed_ids`.
"""

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
from treaty.machine.arrays import Flags, Integers, forget, new

Change = Callable[[Any], Any]

# in a field's metadata: the type that a column of text has as a feature
_NUMBERS = b"treaty.numbers"


def is_text(kind: pa.DataType) -> bool:
    """Whether arrow's type is one of text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def as_numbers_in_features(table: Any, name: str, kind: pa.DataType) -> Any:
    """Mark a column of text, which keeps a file's own words, as numbers for `features_of`; return the table."""
    at = table.schema.get_field_index(name)
    schema = table.schema.set(at, table.schema.field(at).with_metadata({_NUMBERS: str(kind)}))
    return table._with(schema) if isinstance(table, FileTable) else table.cast(schema)


def features_of(table: Any) -> Any:
    """Return a table whose columns that `as_numbers_in_features` marked are numbers."""
    for field in table.schema:
        if field.metadata and _NUMBERS in field.metadata:
            kind = pa.type_for_alias(field.metadata[_NUMBERS].decode())

            def numbers(column: Any, kind: pa.DataType = kind) -> Any:
                return pc.utf8_trim_whitespace(column).cast(kind)

            table = changed(table, field.name, kind, numbers)
    return table


class FileTable:
    """Columns of a `pyarrow.dataset.Dataset`, with the methods of `pyarrow.Table` that reading a party's table needs.

    Nothing is kept in memory. Arrays made of its columns go to files in `folder`; `damaged` turns what arrow raises for
    a damaged file into our error.
    """

    def __init__(self, source: Any, schema: pa.Schema, folder: Path, damaged: Callable[[Exception], Exception]) -> None:
        self.schema, self.folder = schema, folder
        self._source, self._damaged = source, damaged
        # of the files, before `take`
        self._rows: int = source.count_rows()
        self._order: Integers | None = None
        self._changes: dict[str, Change] = {}

    @property
    def num_rows(self) -> int:
        return self._rows if self._order is None else len(self._order)

    @property
    def column_names(self) -> list[str]:
        return list(self.schema.names)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, len(self.schema)

    def __getitem__(self, name: str) -> Any:
        """Read one column, a `pyarrow.ChunkedArray`."""
        if name in self._source.schema.names:
            column = pa.chunked_array(list(self._chunks(name)), self._source.schema.field(name).type)
        else:
            # of `append_column`
            column = pa.chunked_array([pa.nulls(self._rows, self.schema.field(name).type)])
        if name in self._changes:
            column = self._changes[name](column)
        return column if self._order is None else column.take(pa.array(self._order))

    def numbers_into(self, name: str, out: NDArray[np.float32], origin: Origin | EllipsisType) -> Column | None:
        """Read a column of numbers by batches, as `column_from_series` does, to `out` (num_rows,) or to a file.

        Returns None for a column of another kind, of unusable numbers, or of whole numbers beyond 2^53 without a given
        origin.
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
            # perhaps in rows that are not among the common ones
            return None
        return Column(values, None, as_given)

    def _numbers(self, name: str, out: NDArray[np.float32], origin: Origin) -> NDArray[Any]:
        """Read a column's numbers to `out`, or with an origin to a file of their own; return where they are."""
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

    def select(self, names: Sequence[str]) -> FileTable:
        return self._with(pa.schema([self.schema.field(name) for name in names], self.schema.metadata))

    def drop_columns(self, names: Sequence[str]) -> FileTable:
        return self.select([name for name in self.column_names if name not in names])

    def take(self, rows: Any) -> FileTable:
        order = np.asarray(rows, np.int64)
        made = self._with(self.schema)
        made._order = order if self._order is None else self._order[order]
        return made

    def changed(self, name: str, kind: pa.DataType, change: Change) -> FileTable:
        """Return a table whose column `name` goes through `change` when it is read, and then has the type `kind`."""
        before = self._changes.get(name)
        made = self._with(self.schema.set(self.schema.get_field_index(name), pa.field(name, kind)))
        made._changes[name] = change if before is None else lambda column: change(before(column))
        return made

    def append_column(self, name: str, nulls: Any) -> FileTable:
        """Return a table with one more column, without values, of the type of `nulls`."""
        return self._with(self.schema.append(pa.field(name, nulls.type)))

    def _chunks(self, name: str) -> Iterator[Any]:
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
    """Turn those columns of `names` that hold numbers or booleans into text."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
    for name in set(names) & set(table.column_names):
        if any(is_kind(table.schema.field(name).type) for is_kind in kinds):
            table = changed(table, name, pa.string(), lambda column: column.cast(pa.string()))
    return table


def changed(table: Any, name: str, kind: pa.DataType, change: Callable[[Any], Any]) -> Any:
    """Return a table whose column `name` is changed and then of arrow's type `kind`."""
    if isinstance(table, FileTable):
        return table.changed(name, kind, change)
    return table.set_column(table.schema.get_field_index(name), name, change(table[name]))


def has_values(table: Any, name: str) -> bool:
    """Whether a column has a value in any row."""
    if isinstance(table, FileTable):
        there = name in table._source.schema.names
        return there and any(chunk.null_count < len(chunk) for chunk in table._chunks(name))
    return bool(table[name].null_count < table.num_rows)


def with_categories(table: Any, *, but: Sequence[str | None] = ()) -> Any:
    """Turn columns of text, all `but` some, into arrow dictionaries of their sorted values."""

    def categories(column: Any) -> Any:
        values = pa.array(sorted(column.unique().drop_null().to_pylist()), pa.string())
        return pa.chunked_array([pa.DictionaryArray.from_arrays(pc.index_in(column.combine_chunks(), values), values)])

    for field in table.schema:
        if field.name not in but and is_text(field.type):
            table = changed(table, field.name, pa.dictionary(pa.int32(), pa.string()), categories)
    return table


def numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column as an array."""
    # plain numbers without arrow's own `to_numpy`, which imports pandas if there is one, for half a second
    kind = column.type
    plain = (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and column.null_count == 0
    if not plain or column.num_chunks == 0:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])


# ------------------------------------------------------------------------------ text that should be numbers or dates
#
# A blank, a decimal comma or a stray word makes a whole column of numbers text. Trees would then take every number for
# a category of its own. So a column of text counts as categories only where few cells look like numbers; else it has to
# be declared, or its cells corrected. "Few" is less than half of the rows that have a value, and either less than a
# tenth of the different values, or less than `MANY` of these in less than a tenth of the rows. So a code that is a
# number may be among many names, however common it is, and amounts that only few rows have are found because they
# differ. Dates follow the same rule.

FEWEST, MOST, MANY = 0.1, 0.5, 10
# cells that a message shows, and characters of one
SHOWN, _LONGEST = 3, 24

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
    """Cells of a column of numbers, or dates, that are none.

    `rows`, int64 in rising order, are their rows, `first` the text of the first `SHOWN` of them, and `n_others` the
    number of cells that are `of` the right kind.
    """

    rows: Integers
    first: list[str]
    n_others: int
    of: Literal["numbers", "dates"] = "numbers"

    def described(self, places: Sequence[int], place: str) -> str:
        """Describe them for a message, the first ones with their `places`, each a "line" or a "row"."""
        shown = [repr(cell) if len(cell) <= _LONGEST else f"{cell[:_LONGEST]!r}..." for cell in self.first]
        cells = [f"{cell} in {place} {at}" for cell, at in zip(shown, places, strict=True)]
        more = len(self.rows) - len(cells)
        further = f" and {more} more" if more else ""
        rows = "1 row" if self.n_others == 1 else f"{self.n_others} rows"
        but = f", but {', '.join(cells)}{further}" if cells else ""
        return f"{self.of} in {rows}{but}"


def strays_of(strings: Any, *, must: bool = False) -> Strays | None:
    """Return the cells that are no numbers in an arrow array of text.

    None where few cells look like numbers, unless all `must` be, and where all cells are numbers or missing.
    """
    cells, positions = _cells(strings)
    number = _matches(cells, _NUMBER)
    looks = number | _matches(cells, "|".join(f"({written})" for written in _WRITTEN_OTHERWISE))
    if not (must or _more_than_few(looks, positions)):
        return None
    strays = _strays(strings, number, positions, "numbers")
    return strays if len(strays.rows) else None


def dates_of(strings: Any) -> Strays | None:
    """Return the cells that are no dates in an arrow array of text; None where few are dates."""
    cells, positions = _cells(strings)
    date = _matches(cells, "|".join(f"({written})" for written in _DATES))
    return _strays(strings, date, positions, "dates") if _more_than_few(date, positions) else None


def _strays(strings: Any, fine: Flags, positions: Integers, of: Literal["numbers", "dates"]) -> Strays:
    """Return the rows whose cell, by its position among the different ones, is not fine."""
    rows = np.flatnonzero(~np.append(fine, True)[positions])
    first = [strings[int(row)].as_py() for row in rows[:SHOWN]]
    return Strays(rows, first, int(np.count_nonzero(positions < len(fine))) - len(rows), of)


def _cells(strings: Any) -> tuple[Any, Integers]:
    """Return the different cells, trimmed, and each row's position among them; missing ones have the next number."""
    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    encoded = strings.cast(pa.large_string()).dictionary_encode()
    cells = encoded.dictionary
    positions = encoded.indices.cast(pa.int64()).fill_null(len(cells)).to_numpy(zero_copy_only=False)
    return pc.utf8_trim_whitespace(cells), positions


def _more_than_few(looks: Flags, positions: Integers) -> bool:
    """Apply the rule above to `looks`, of the different cells, and each row's position among them."""
    n_present = int(np.count_nonzero(positions < len(looks)))
    n_rows, n_different = int(np.count_nonzero(np.append(looks, False)[positions])), int(np.count_nonzero(looks))
    if n_rows == 0 or n_rows >= MOST * n_present:
        return n_rows > 0
    return n_different >= FEWEST * len(looks) and (n_different >= MANY or n_rows >= FEWEST * n_present)


def are_numbers(strings: Any) -> bool:
    """Whether an arrow array of text has numbers in all cells that are not missing, and has any."""
    cells = pc.utf8_trim_whitespace(strings.cast(pa.large_string()).unique().drop_null())
    return len(cells) > 0 and bool(np.all(_matches(cells, _NUMBER)))


def _matches(cells: Any, pattern: str) -> Flags:
    found = pc.match_substring_regex(cells, f"^({pattern})$")
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


_WHOLE = r"^(0|-?[1-9][0-9]{0,18})$"
# as pandas writes whole numbers with a missing one among them
_WHOLE_DECIMAL = r"^(0|-?[1-9][0-9]{0,14})(\.0*)?$"
# lengths of ids that a line names
_LISTED = 3


def typed_ids(cells: Any) -> Any:
    """Return a CSV file's ids, an arrow array of text, as numbers or dates where that loses nothing.

    So they match those of files with types. All stay text where one has a leading zero or plus, an exponent, or more
    digits than a number keeps.
    """
    # `pc.all` leaves missing cells out
    trimmed = pc.utf8_trim_whitespace(cells)
    if cells.null_count == len(cells):
        return cells
    if pc.all(pc.match_substring_regex(trimmed, _WHOLE)).as_py():
        try:
            return trimmed.cast(pa.int64())
        except pa.ArrowInvalid:
            # 2^63 or more
            return cells
    if pc.all(pc.match_substring_regex(trimmed, _WHOLE_DECIMAL)).as_py():
        return trimmed.cast(pa.float64()).cast(pa.int64())
    try:
        times = trimmed.cast(pa.timestamp("s"))
        days = times.cast(pa.date32(), safe=False)
    except pa.ArrowInvalid:
        return cells
    return days if pc.all(pc.equal(days.cast(times.type), times)).as_py() else cells


def widths(ids: Any) -> str:
    """Describe how many ids of an arrow array are how long, to compare with partners without showing an id."""
    if pa.types.is_dictionary(ids.type):
        ids = ids.cast(ids.type.value_type)
    if pa.types.is_integer(ids.type):
        kind, unit = "whole numbers", "digits"
    elif is_text(ids.type):
        kind, unit = "text", "characters"
    else:
        return str(ids.type)
    lengths, counts = np.unique(pc.utf8_length(ids.drop_null().cast(pa.large_string())).to_numpy(), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_LISTED]
    listed = [f"{counts[k]:,} of {lengths[k]}{f' {unit}' if not at else ''}" for at, k in enumerate(order)]
    others = len(ids) - ids.null_count - int(counts[order].sum())
    return ", ".join([kind, *listed, *([f"{others:,} of other lengths"] if others else [])])
