"""Text that should be numbers or dates: a blank, a decimal comma or a stray word makes a whole column of them text.

A column of text counts as categories where few cells look like numbers. Else it has to be declared, or its cells to be
corrected: trees would otherwise take every number for a category of its own. Few are less than half of the rows that
have a value, and either less than a tenth of the different values, or less than `MANY` of these in less than a tenth
of the rows. So a code that is a number may be among many names, however common it is; amounts that only few rows have
are found by their being different. Dates follow the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

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
