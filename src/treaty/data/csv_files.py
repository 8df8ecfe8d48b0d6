"""CSV files: comma-separated values in UTF-8 with a header, and what is wrong with files that are none.

A file is parsed as one block, so that all values of a column settle its type, not the first ones.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
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
    content = beginning_of(content)
    try:
        return parse(content, dict.fromkeys(text, pa.string()))
    except (pa.ArrowException, UnicodeDecodeError):  # arrow's message would show the values
        raise CsvProblem(what_is_wrong(io.StringIO(content.decode("utf-8", errors="replace"), newline=""))) from None


def beginning_of(content: bytes) -> bytes:
    """Return a file's first bytes without marks; CsvProblem where they are of no file of comma-separated values."""
    for beginning, what in _BEGINNINGS.items():
        if content.startswith(beginning):
            raise CsvProblem(f"expected comma-separated values, got {what}")
    while content.startswith(_MARK):  # arrow takes one away, and some programs write two
        content = content.removeprefix(_MARK)
    _refuse_other_separators(content)
    return content


def parse(
    content: bytes,
    kinds: Mapping[str, pa.DataType],
    names: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> Any:
    """Parse lines into an arrow table whose columns are of these types, or of those that their cells have.

    With `names` there is no header; `only` some columns may be meant. Raises what arrow raises, which shows values.
    """
    table = pyarrow.csv.read_csv(
        io.BytesIO(content),
        read_options=pyarrow.csv.ReadOptions(
            block_size=min(max(len(content) + 1, _SMALLEST_BLOCK), _LARGEST_BLOCK), column_names=names
        ),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True, column_types=kinds, include_columns=only),
    )
    table.column_names  # noqa: B018 - names are decoded here, and may not be UTF-8
    return table


def lines_of(lines: Iterable[str], rows: Sequence[int]) -> list[int]:
    """Return in which of a file's lines rows begin, both in rising order.

    Rows count from 0 behind the header, lines from 1. Slow, but only for files that are refused.
    """
    reader = csv.reader(lines)
    wanted, found = set(rows), []
    row, begins = -1, 1  # the header is row -1
    for values in reader:
        if values:  # arrow skips empty lines
            if row in wanted:
                found.append(begins)
            row += 1
        begins = reader.line_num + 1
        if len(found) == len(wanted):
            break
    return found


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


def what_is_wrong(lines: Iterable[str]) -> str:
    """Find the first row whose length is not the header's; slow, but only for a file that failed."""
    rows = csv.reader(lines)
    header: list[str] | None = None
    for row in rows:
        if header is None:
            header = row or None
        elif row and len(row) != len(header):
            return f"expected {len(header)} values per row, as in the header, got {len(row)} in line {rows.line_num}"
    return "expected comma-separated values in UTF-8, got something else"
