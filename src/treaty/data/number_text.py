"""Text that should be numbers: a blank, a decimal comma or a stray word makes a whole column of numbers text.

A column of text counts as categories where fewer than one in ten of its values look like numbers. Else it has to be
declared, or its cells to be corrected: trees would otherwise take every number for a category of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

FEWEST = 0.1
"""The share of values that look like numbers from which on a column of text is not taken for categories."""

SHOWN = 3  # cells that a message shows
_LONGEST = 24  # characters of a cell that a message shows

_NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
_WRITTEN_OTHERWISE = (
    r"[+-]?([0-9]+,[0-9]*|,[0-9]+)([eE][+-]?[0-9]+)?",  # decimal comma
    r"[+-]?[0-9]{1,3}([.,' \x{a0}\x{202f}][0-9]{3})+([.,][0-9]+)?",  # thousands apart
    _NUMBER.replace(r"\.", "[.,]") + r"\s?%",
    r"[$€£]\s?" + _NUMBER.replace(r"\.", "[.,]"),
    _NUMBER.replace(r"\.", "[.,]") + r"\s?([$€£]|EUR|USD|GBP|CHF)",
    r"[\x{2212}\x{2013}]" + _NUMBER.replace(r"\.", "[.,]"),  # a minus sign, or dash, of typesetting
)


@dataclass(frozen=True, slots=True, eq=False)
class Strays:
    """Cells of a column that are no numbers, where the column should have numbers.

    `rows`, int64 in rising order, are where they stand and `first` what the first `SHOWN` of them hold.
    """

    rows: NDArray[np.int64]
    first: list[str]
    n_numbers: int

    def told(self, places: Sequence[int], place: str) -> str:
        """Say what is where: `places` are the lines, or rows, of the first ones, `place` is "line" or "row"."""
        cells = [f"{shortened(cell)} in {place} {at}" for cell, at in zip(self.first, places, strict=True)]
        more = len(self.rows) - len(cells)
        further = f" and {more} more" if more else ""
        rows = "1 row" if self.n_numbers == 1 else f"{self.n_numbers} rows"
        return f"numbers in {rows}, but {', '.join(cells)}{further}"


def strays_of(strings: Any, *, fewest: float = FEWEST) -> Strays | None:
    """Return what is no number in an arrow array of text, where at least a share `fewest` looks like numbers.

    None where fewer do, and where all cells are numbers or missing; see `are_numbers`.
    """
    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    encoded = strings.cast(pa.large_string()).dictionary_encode()
    cells = encoded.dictionary
    trimmed = pc.utf8_trim_whitespace(cells)
    number = _matches(trimmed, _NUMBER)
    looks = number | _matches(trimmed, "|".join(f"({written})" for written in _WRITTEN_OTHERWISE))
    positions = encoded.indices.cast(pa.int64()).fill_null(len(cells)).to_numpy(zero_copy_only=False)
    n_present = int(np.count_nonzero(positions < len(cells)))
    n_looking = int(np.count_nonzero(np.append(looks, False)[positions]))
    rows = np.flatnonzero(~np.append(number, True)[positions])
    if len(rows) == 0 or n_looking < fewest * n_present:
        return None
    first = [cells[int(positions[row])].as_py() for row in rows[:SHOWN]]
    return Strays(rows, first, n_present - len(rows))


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
