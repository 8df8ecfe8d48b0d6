"""Ids in CSV files, which do not say what is a number: 00123 is another id than 123."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_WHOLE = r"^(0|-?[1-9][0-9]{0,18})$"
_WHOLE_DECIMAL = r"^(0|-?[1-9][0-9]{0,14})(\.0*)?$"  # as pandas writes whole numbers with a missing one among them
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
    said = [f"{counts[k]:,} of {lengths[k]}{f' {unit}' if not at else ''}" for at, k in enumerate(order)]
    others = len(ids) - ids.null_count - int(counts[order].sum())
    return ", ".join([kind, *said, *([f"{others:,} of other lengths"] if others else [])])


def _all(found: Any) -> bool:
    return bool(pc.all(found).as_py())  # the null ones are left out
