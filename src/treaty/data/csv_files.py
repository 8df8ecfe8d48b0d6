"""CSV files: comma-separated values in UTF-8 with a header, and what is wrong with files that are none.

A file is parsed as one block, so that all values of a column settle its type, not the first ones.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv

_LARGEST_BLOCK = (1 << 31) - 1  # arrow counts the bytes of a block in int32
_SMALLEST_BLOCK = 1 << 16
_MARK = "\ufeff".encode()
_OF_EXCEL = re.compile(r'"?sep=(.)"?,?\s*$', re.IGNORECASE)
_SEPARATORS = {";": "';'", "\t": "tabs", "|": "'|'"}
_BEGINNINGS = {
    b"PAR1": "a Parquet file: name it .parquet",
    b"ARROW1": "an arrow file: name it .arrow",
    b"\x1f\x8b": "a file packed by gzip: name it .csv.gz",
    b"PK\x03\x04": "a zip file or an Excel workbook: save the sheet as CSV, in UTF-8",
    b"\xff\xfe": "text in UTF-16: save the file as UTF-8",
    b"\xfe\xff": "text in UTF-16: save the file as UTF-8",
}


class CsvProblem(ValueError):
    """Why a file cannot be read; without its name and the party, which the caller adds."""


def parse_csv(content: bytes, text: Sequence[str]) -> Any:
    """Parse a file's content into an arrow table; columns named by `text` are text also where they look like numbers.

    Raises CsvProblem, which never shows a value.
    """
    for beginning, what in _BEGINNINGS.items():
        if content.startswith(beginning):
            raise CsvProblem(f"expected comma-separated values, got {what}")
    while content.startswith(_MARK):  # arrow takes one away, and some programs write two
        content = content.removeprefix(_MARK)
    _refuse_other_separators(content)
    block = min(max(len(content) + 1, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    try:
        table = pyarrow.csv.read_csv(
            io.BytesIO(content),
            read_options=pyarrow.csv.ReadOptions(block_size=block),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                strings_can_be_null=True, column_types=dict.fromkeys(text, pa.string())
            ),
        )
        table.column_names  # noqa: B018 - names are decoded here, and may not be UTF-8
        return table
    except (pa.ArrowException, UnicodeDecodeError):  # arrow's message would show the values
        raise CsvProblem(_what_is_wrong(content)) from None


def lines_of(content: bytes, rows: Sequence[int]) -> list[int]:
    """Return the lines in which rows begin, both in rising order; rows count from 0 behind the header, lines from 1.

    Slow, but only for files that are refused.
    """
    reader = csv.reader(io.StringIO(content.decode("utf-8-sig", errors="replace"), newline=""))
    wanted, lines = set(rows), []
    row, begins = -1, 1  # the header is row -1
    for values in reader:
        if values:  # arrow skips empty lines
            if row in wanted:
                lines.append(begins)
            row += 1
        begins = reader.line_num + 1
        if len(lines) == len(wanted):
            break
    return lines


def _refuse_other_separators(content: bytes) -> None:
    """Refuse a header that has one field with commas between, and several with another separator."""
    header = content.lstrip(b"\r\n").partition(b"\n")[0].decode("utf-8", errors="replace")
    if of_excel := _OF_EXCEL.match(header):
        other = "" if of_excel[1] == "," else ", and save the file with commas, and decimals with a point"
        raise CsvProblem(
            f"expected the columns' names in the first line, got sep={of_excel[1]}, which is for Excel alone: remove "
            f"that line{other}"
        )
    if "," in header:
        return
    for separator, called in _SEPARATORS.items():
        if separator in header:
            raise CsvProblem(
                f"expected commas between the columns, got a header that looks separated by {called}; save the file "
                "with commas, and decimals with a point"
            )


def _what_is_wrong(content: bytes) -> str:
    """Find the first row whose length is not the header's; slow, but only for a file that failed."""
    rows = csv.reader(io.StringIO(content.decode("utf-8", errors="replace"), newline=""))
    header: list[str] | None = None
    for row in rows:
        if header is None:
            header = row or None
        elif row and len(row) != len(header):
            return f"expected {len(header)} values per row, as in the header, got {len(row)} in line {rows.line_num}"
    return "expected comma-separated values in UTF-8, got something else"
