"""Files: CSV, Parquet and arrow in, predictions out.

Reading gives an arrow table; `to_table(..., text_as_categories=True)` turns it into features. A CSV file is
parsed as one block, so that all values of a column settle its type, not the first ones.
"""

import csv
import gzip
import io
import re
import secrets
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
from numpy.typing import ArrayLike, NDArray

from treaty.compute import json_decoder_of
from treaty.data.columns import quoted
from treaty.data.table import Schema, Table
from treaty.errors import DataError

_CHECKED = b"treaty.schema"
_ENDINGS = (".csv", ".csv.gz", ".parquet", ".arrow")
_LARGEST_BLOCK = (1 << 31) - 1  # arrow counts the bytes of a block in int32
_SMALLEST_BLOCK = 1 << 16
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # what pandas calls its index in a Parquet file


def read_table(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    drop_all: bool = False,
    text: Sequence[str] = (),
    party: str = "the table",
) -> Any:
    """Read a .csv, .csv.gz (with a header line, commas between), .parquet or .arrow file (IPC) into an arrow table.

    Only .arrow keeps the order of categories. `columns` are kept, in this order (default all), less those of `drop`;
    with `drop_all` a file that lacks one of `drop`, perhaps misspelt, is refused. `text` names columns of a CSV file
    to take as text even where every value looks like a number. Empty cells and the usual marks (NA, NaN, null, ...)
    are null.

    Raises DataError if the file does not exist, has another ending, is empty, without rows or malformed (a CSV row of
    the wrong length is named by its line, a column of text that is not UTF-8 by its name), repeats a column name, or
    lacks one of `columns`.
    """
    path = Path(path)
    ending = _ending(path, party)
    if not path.is_file():
        raise DataError(f"{party}: expected a file at {path}, got none")
    if path.stat().st_size == 0:
        raise DataError(f"{party}: expected a table, got an empty file - at {path}")
    read = {".parquet": _read_parquet, ".arrow": _read_arrow}.get(ending)
    table = _read_csv(path, ending, text, party) if read is None else read(path, party)
    names = table.column_names
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{party}: expected unique column names, got more than one of {quoted(repeated)} - at {path}")
    of_pandas = b"pandas" in (table.schema.metadata or {})
    usual = [name for name in names if not (of_pandas and _PANDAS_INDEX.fullmatch(name))]
    wanted = usual if columns is None else list(columns)
    absent = [name for name in wanted if name not in names]
    if absent:
        raise DataError(f"{party}: expected columns {quoted(absent)}, got a file without them - at {path}")
    if drop_all:
        _refuse_absent(drop, names, path, party)
    if table.num_rows == 0:
        raise DataError(f"{party}: expected at least one row, got only column names - at {path}")
    kept = table.select([name for name in wanted if name not in set(drop)])
    if read is None:
        _refuse_bytes(kept, path, party)
    return kept


def write_predictions(path: str | Path, columns: Mapping[str, ArrayLike]) -> None:
    """Write columns (n_rows,) to a file as `read_table` reads them, replacing what was there.

    Raises DataError for another ending, a folder that does not exist, no columns, or columns of different lengths.
    """
    path = Path(path)
    ending = _ending(path, "predictions")
    if not path.parent.is_dir():
        raise DataError(f"predictions: expected an existing folder, got {path.parent}")
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    if len({array.shape for array in arrays.values()}) != 1 or any(array.ndim != 1 for array in arrays.values()):
        shapes = ", ".join(f"{name!r} {array.shape}" for name, array in arrays.items())
        raise DataError(f"predictions: expected columns of one length, got {shapes or 'no columns'}")
    whole = path.with_name(f".{secrets.token_hex(8)}{ending}")  # what was there is replaced by a whole file only
    try:
        _write(whole, pa.table(arrays), ending)
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)


def _write(path: Path, table: pa.Table, ending: str) -> None:
    if ending == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="zstd")
    elif ending == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif ending == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        with gzip.open(path, "wb") as file:
            pyarrow.csv.write_csv(table, file)


def write_columns(path: str | Path, table: Table, extra: Mapping[str, NDArray[Any]]) -> None:
    """Write a checked table and further columns to an arrow file for another process; see `checked_columns`."""
    names = [f"c{k}" for k in range(len(table.columns))]
    arrays = dict(zip(names, table.columns, strict=True)) | dict(extra)
    if not arrays:  # a table without columns still has rows
        arrays = {"rows": np.zeros(table.n_rows)}
    arrow = pa.table(arrays).replace_schema_metadata({_CHECKED: msgspec.json.encode(table.schema)})
    with pa.ipc.new_file(path, arrow.schema) as writer:
        writer.write_table(arrow)


def checked_columns(arrow: pa.Table) -> Table | None:
    """Return the table that `write_columns` wrote; None for any other."""
    metadata = arrow.schema.metadata or {}
    if _CHECKED not in metadata:
        return None
    schema = json_decoder_of(Schema).decode(metadata[_CHECKED])
    columns = [numbers(arrow[f"c{k}"]) for k in range(len(schema.names))]
    return Table(schema, columns, arrow.num_rows)


def numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column as an array, without arrow's own `to_numpy` for plain numbers.

    That function imports pandas if there is one, which takes half a second.
    """
    kind = column.type
    plain = (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and column.null_count == 0
    if not plain or column.num_chunks == 0:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])


def _ending(path: Path, party: str) -> str:
    for ending in _ENDINGS:
        if path.name.lower().endswith(ending):
            return ending
    raise DataError(f"{party}: expected a file ending in {', '.join(_ENDINGS)}, got {path.name!r}")


def _read_parquet(path: Path, party: str) -> Any:
    try:
        return pyarrow.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{party}: expected a Parquet file, got {type(error).__name__} - at {path}") from None


def _read_arrow(path: Path, party: str) -> Any:
    try:
        with pa.ipc.open_file(path) as reader:
            return reader.read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{party}: expected an arrow file, got {type(error).__name__} - at {path}") from None


def _read_csv(path: Path, ending: str, text: Sequence[str], party: str) -> Any:
    try:
        content = gzip.decompress(path.read_bytes()) if ending == ".csv.gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        raise DataError(f"{party}: expected a readable file, got {type(error).__name__} - at {path}") from None
    if not content.strip():
        raise DataError(f"{party}: expected a table, got an empty file - at {path}")
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
        reason = _what_is_wrong(content)
        raise DataError(f"{party}: {reason} - at {path}") from None


def _refuse_absent(drop: Sequence[str], names: Sequence[str], path: Path, party: str) -> None:
    """Refuse to drop absent columns: the one that was meant would stay."""
    absent = [name for name in drop if name not in names]
    if absent:
        near = list(dict.fromkeys(close for name in absent for close in get_close_matches(name, names, 2)))
        raise DataError(
            f"{party}: expected the columns to drop, {quoted(absent)}, got a file without them"
            + (f"; did you mean {quoted(near)}?" if near else "")
            + f" - at {path}"
        )


def _refuse_bytes(table: Any, path: Path, party: str) -> None:
    """Refuse columns whose text is not UTF-8, which arrow reads as bytes."""
    undecoded = [field.name for field in table.schema if pa.types.is_binary(field.type)]
    if undecoded:
        raise DataError(
            f"{party}: expected text in UTF-8, got another encoding in {quoted(undecoded)}; save the file as UTF-8, or "
            f"drop the column - at {path}"
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
