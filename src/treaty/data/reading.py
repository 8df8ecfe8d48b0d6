"""Reads tables from files (CSV, Parquet, arrow) and writes predictions to files.

`read_table` returns an arrow table, `open_table` one on disk where the file is too large for memory.
`to_table(..., text_as_categories=True)` turns either into features.
"""

import gzip
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
from numpy.typing import ArrayLike, NDArray

from treaty.data import file_formats
from treaty.data.arrow_tables import SHOWN, FileTable, are_numbers, dates_of, is_text, numbers, strays_of
from treaty.data.columns import quoted, refuse_repeated
from treaty.data.table import LISTED, Schema, Table, file_without, refuse_absent
from treaty.errors import ConfigError, DataError
from treaty.files import json_decoder_of, replacing
from treaty.machine.arrays import check_room, forget, new

Read = TypeVar("Read")

_CHECKED = b"treaty.schema"
# what an error calls a file of this ending
_CALLED = {
    ".csv": "a readable file", ".csv.gz": "a readable file", ".parquet": "a Parquet file", ".arrow": "an arrow file"
}  # fmt: skip
_REMEDIES = {
    "numbers": "correct these cells (an empty one is a missing value, decimals have a point)",
    "dates": "make numbers of dates (days since a fixed one, say) or drop the column",
}
# what pandas calls its index in a Parquet file
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")

ON_DISK = 1 << 30
"""Bytes of a table's columns, as float32, from which on they lie in files."""

# of a value: float32, and its bin by column and by row, or float32 by row, to predict
_BYTES_ON_DISK = 8
# of a value, while a file is read
_BYTES_OF_CSV = 8
# times the size of a packed file
_UNPACKED = 4


def read_table(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    drop_all: bool = False,
    text: Sequence[str] = (),
    party: str = "the table",
) -> Any:
    """Read a .csv, .csv.gz (with a header, separated by commas), .parquet or .arrow (IPC) file into an arrow table.

    A folder is read as one table of all its Parquet files, in the order of their names. Only .arrow keeps the order of
    categories. `columns` are kept, in this order (default all), less those of `drop`; with `drop_all` a file that lacks
    one of `drop`, perhaps misspelt, is refused. `text` names columns of a CSV file to take as text even where every
    value looks like a number. Empty cells and the usual marks (NA, NaN, null, ...) are null.

    Raises DataError if the file does not exist, has another ending, is empty, without rows or malformed, repeats a
    column name, or lacks one of `columns`; if a folder holds anything else, or files of different columns.
    """
    path = Path(path)
    ending = checked_ending(path, party)
    readers = {".parquet": file_formats.read_parquet, ".arrow": lambda path: pa.ipc.open_file(path).read_all()}
    table = _readable(readers.get(ending, partial(file_formats.read_csv, text=text)), path, ending, party)
    kept = table.select(kept_names(table.schema, path, columns, drop, drop_all, party))
    if table.num_rows == 0:
        raise DataError(f"{party}: expected at least one row, got only column names - at {path}")
    if ending in (".csv", ".csv.gz"):
        refuse_bytes(kept, path, party)
    return kept


def facts_of(path: Path, ending: str, party: str, text: Sequence[str] = ()) -> tuple[int, Any]:
    """Return the number of rows and the schema of a file; only CSV is read for that, piece by piece."""
    reader: Callable[[Path], tuple[int, Any]] = partial(file_formats.csv_facts, text=text)
    if ending in (".parquet", ".arrow"):
        reader = file_formats.parquet_facts if ending == ".parquet" else _arrow_facts
    return _readable(reader, path, ending, party)


def _arrow_facts(path: Path) -> tuple[int, Any]:
    # rows are counted where one column is decoded
    first = pa.ipc.IpcReadOptions(included_fields=[0])
    with pa.memory_map(str(path)) as content:
        schema = pa.ipc.open_file(content).schema
        reader = pa.ipc.open_file(content, options=first)
        return sum(reader.get_batch(k).num_rows for k in range(reader.num_record_batches)), schema


def kept_names(
    schema: Any, path: Path, columns: Sequence[str] | None, drop: Sequence[str], drop_all: bool, party: str
) -> list[str]:
    """Return the names of the columns to read of a file with this schema; refuse what `read_table` refuses."""
    names = schema.names
    _refuse_nameless([name for name in names if name not in drop] if columns is None else [], names, path, party)
    refuse_repeated(names, party, f" - at {path}")
    wanted = _usual(schema) if columns is None else list(columns)
    absent = [name for name in wanted if name not in names]
    if absent:
        raise DataError(f"{party}: expected columns {quoted(absent)}, {file_without(absent, names)} - at {path}")
    if drop_all:
        refuse_absent(drop, "the columns to drop", names, path, party)
    return [name for name in wanted if name not in set(drop)]


def table_facts(path: str | Path, *, text: Sequence[str] = (), party: str = "the table") -> tuple[int, Any]:
    """Return the number of rows and the schema of what `read_table` reads; no row of a Parquet file is read for it."""
    path = Path(path)
    rows, schema = facts_of(path, checked_ending(path, party), party, text)
    return rows, pa.schema([schema.field(schema.names.index(name)) for name in _usual(schema)])


def _usual(schema: Any) -> list[str]:
    """Return the names of all columns except an index that pandas wrote."""
    of_pandas = b"pandas" in (schema.metadata or {})
    return [name for name in schema.names if not (of_pandas and _PANDAS_INDEX.fullmatch(name))]


def check_there(path: str | Path, party: str) -> None:
    """Raise DataError unless there is a file, or a folder of Parquet files alone."""
    path = Path(path)
    if path.is_dir() and not path.name.lower().endswith((".csv", ".csv.gz", ".arrow")):
        _readable(file_formats.files_of, path, ".parquet", party)
    elif not path.is_file():
        raise DataError(f"{party}: expected a file at {path}, got {'a folder' if path.is_dir() else 'none'}")


def checked_ending(path: Path, party: str) -> str:
    """Return the ending that decides how a table is read, .parquet for a folder; refuse a missing or empty file."""
    ending = ".parquet" if path.is_dir() else ending_of(path, party)
    check_there(path, party)
    if path.is_file() and path.stat().st_size == 0:
        raise DataError(f"{party}: expected a table, got an empty file - at {path}")
    return ending


def write_predictions(path: str | Path, columns: Mapping[str, ArrayLike]) -> None:
    """Write columns (n_rows,) to a file as `read_table` reads them, replacing what was there.

    Raises DataError for another ending, a folder that does not exist, no columns, or columns of different lengths, and
    ConfigError where the file cannot be written.
    """
    path = Path(path)
    ending = ending_of(path, "predictions")
    if not path.parent.is_dir():
        raise DataError(f"predictions: expected an existing folder, got {path.parent}")
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    if len({array.shape for array in arrays.values()}) != 1 or any(array.ndim != 1 for array in arrays.values()):
        shapes = ", ".join(f"{name!r} {array.shape}" for name, array in arrays.items())
        raise DataError(f"predictions: expected columns of one length, got {shapes or 'no columns'}")
    table = pa.table(arrays)
    try:
        with replacing(path, ending) as whole:
            if ending == ".parquet":
                pyarrow.parquet.write_table(table, whole, compression="zstd")
            elif ending == ".arrow":
                with pa.ipc.new_file(whole, table.schema) as writer:
                    writer.write_table(table)
            else:
                with gzip.open(whole, "wb") if ending == ".csv.gz" else whole.open("wb") as file:
                    pyarrow.csv.write_csv(table, file)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; make room, or name another file") from None


def write_columns(path: str | Path, table: Table, extra: Mapping[str, NDArray[Any]]) -> None:
    """Write a checked table and further columns to an arrow file for another process (`checked_columns`)."""
    arrays = {f"c{k}": column for k, column in enumerate(table.columns)} | dict(extra)
    if not arrays:
        # a table without columns still has rows
        arrays = {"rows": np.zeros(table.n_rows)}
    arrow = pa.table(arrays).replace_schema_metadata({_CHECKED: msgspec.json.encode(table.schema)})
    with pa.ipc.new_file(path, arrow.schema) as writer:
        writer.write_table(arrow)


def checked_columns(arrow: Any) -> Table | None:
    """Return the table that `write_columns` wrote; None for any other."""
    metadata = arrow.schema.metadata or {}
    if _CHECKED not in metadata:
        return None
    schema = json_decoder_of(Schema).decode(metadata[_CHECKED])
    columns = [f"c{k}" for k in range(len(schema.names))]
    if isinstance(arrow, FileTable):
        stored = []
        for name in columns:
            of_file = np.dtype(arrow.schema.field(name).type.to_pandas_dtype())
            stored.append(new((arrow.num_rows,), of_file, arrow.folder))
            stored[-1][:] = numbers(arrow[name])
            forget(stored[-1])
        return Table(schema, stored, arrow.num_rows)
    return Table(schema, [numbers(arrow[name]) for name in columns], arrow.num_rows)


def ending_of(path: Path, party: str) -> str:
    """Return the ending of a file; raise DataError unless it is a known one."""
    for ending in _CALLED:
        if path.name.lower().endswith(ending):
            return ending
    raise DataError(f"{party}: expected a file ending in {', '.join(_CALLED)}, got {path.name!r}")


def _readable(read: Callable[[Path], Read], path: Path, ending: str, party: str) -> Read:
    """Read a file or folder, with errors that name the party and show nothing of the content."""
    try:
        return read(path)
    except file_formats.FileProblem as problem:
        raise DataError(f"{party}: {problem} - at {path}") from None
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        # a damaged .gz is an OSError, too
        raise _damaged(path, ending, party, error) from None


def _damaged(path: Path, ending: str, party: str, error: Exception) -> DataError:
    """Return the error for a file that is not what its ending states."""
    if isinstance(error, OSError) and error.strerror:
        got = f"an error of the system, {error.strerror}"
    else:
        got = "text: name it .csv if its values are separated by commas"
        try:
            with path.open("rb") as file:
                file.read(4096).decode()
        except UnicodeDecodeError:
            got = "one that is damaged, cut off or of another kind"
    return DataError(f"{party}: expected {_CALLED[ending]}, got {got} - at {path}")


def refuse_strays(
    table: pa.Table, path: str | Path, party: str, *, features: Sequence[str], numeric: Sequence[str] = (), remedy: str
) -> None:
    """Refuse columns that some cells, which are no numbers, made text; the error names lines and cells.

    `table` has all rows of the file at `path`, in its order. A text column of `features` counts as categories where few
    of its values look like numbers or dates (`treaty.data.arrow_tables`); those of `numeric` must be numbers. Numbers
    and dates that a file with types stores as text are refused, too. `remedy` says how to declare categories.

    Raises DataError, whose text other parties do not see.
    """
    found, stored = {}, []
    for name in dict.fromkeys([*features, *numeric]):
        if is_text(table.schema.field(name).type):
            strays = strays_of(table[name], must=name in numeric)
            if strays is None and name not in numeric:
                if are_numbers(table[name]):
                    stored.append(name)
                strays = dates_of(table[name])
            if strays is not None:
                found[name] = strays
    if stored:
        raise DataError(
            f"{party}: {quoted(stored)} {'is' if len(stored) == 1 else 'are'} stored as text, but every cell is a "
            f"number: store numbers as numbers, or, if these are categories, {remedy} - at {path}"
        )
    if not found:
        return
    described = []
    for name, strays in found.items():
        places = rows = [int(row) for row in strays.rows[:SHOWN]]
        if is_csv(path):
            with file_formats.opened_text(Path(path)) as lines:
                places = file_formats.lines_of(lines, rows)
        described.append(f"column {name!r} has {strays.described(places, 'line' if is_csv(path) else 'row')}")
    remedies = {strays.of: _REMEDIES[strays.of] for strays in found.values()}
    declare = f", or, if these are categories, {remedy}" if set(found) - set(numeric) else ""
    raise DataError(f"{party}: {'; '.join(described)}: {' and '.join(remedies.values())}{declare} - at {path}")


def _refuse_nameless(kept: Sequence[str], names: Sequence[str], path: Path, party: str) -> None:
    """Refuse columns without a name: an index that pandas wrote would reveal the order of rows to trees."""
    places = [place for place, name in enumerate(names, 1) if name in kept and not name.strip()]
    if not places:
        return
    hint = ""
    if is_csv(path):
        of_pandas = "; pandas writes its index so, unless index=False" if places[0] == 1 else ""
        hint = of_pandas or ("; does a comma end the header?" if places[-1] == len(names) else "")
    listed = ", ".join(map(str, places[:LISTED]))
    raise DataError(f"{party}: expected a name for every column, got none for column {listed}{hint} - at {path}")


def is_csv(path: str | Path) -> bool:
    """Whether a file's ending is that of CSV, packed or not."""
    return Path(path).name.lower().endswith((".csv", ".csv.gz"))


def refuse_bytes(table: Any, path: Path, party: str) -> None:
    # arrow reads text that is not UTF-8 as bytes
    undecoded = [field.name for field in table.schema if pa.types.is_binary(field.type)]
    if undecoded:
        raise DataError(
            f"{party}: expected text in UTF-8, got another encoding in {quoted(undecoded)}; save the file as UTF-8, or "
            f"drop the column - at {path}"
        )


def open_table(
    path: str | Path,
    *,
    folder: Path | None = None,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    drop_all: bool = False,
    text: Sequence[str] = (),
    party: str = "the table",
) -> Any:
    """Read a small table as `read_table` does; return a large one as a `FileTable`, of which nothing is read yet.

    A table is large from `ON_DISK` bytes on, one in CSV by the size of its file. Arrays made of it go to files in
    `folder` (None: the system's folder of temporary files), which must have the room. Errors are those of `read_table`,
    and ConfigError for the folder.
    """
    path = Path(path)
    ending = checked_ending(path, party)
    of_csv = ending in (".csv", ".csv.gz")
    size = path.stat().st_size * (_UNPACKED if ending == ".csv.gz" else 1)
    facts = None if of_csv and size < ON_DISK else facts_of(path, ending, party, text)
    if facts is None or facts[0] == 0 or not (of_csv or _is_large(*facts)):
        return read_table(path, columns=columns, drop=drop, drop_all=drop_all, text=text, party=party)
    rows, schema = facts
    names = kept_names(schema, path, columns, drop, drop_all, party)
    damaged = partial(_damaged, path, ending, party)
    # takes as long to load as a small job
    import pyarrow.dataset

    if of_csv:
        folder = _usable(folder, rows * (len(names) * _BYTES_ON_DISK + len(schema) * _BYTES_OF_CSV))
        dataset = pyarrow.dataset.dataset(file_formats.write_csv_columns(path, schema, folder))
        table = FileTable(dataset, schema, folder, damaged).select(names)
        refuse_bytes(table, path, party)
        return table
    kind = "parquet" if ending == ".parquet" else "ipc"
    dataset = pyarrow.dataset.dataset([str(file) for file in file_formats.files_of(path)], format=kind, schema=schema)
    return FileTable(dataset, schema, _usable(folder, rows * len(names) * _BYTES_ON_DISK), damaged).select(names)


def open_dataset(
    dataset: Any,
    *,
    folder: Path | None = None,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    drop_all: bool = False,
    party: str = "the table",
) -> Any:
    """Return columns of a `pyarrow.dataset.Dataset` as `open_table` does."""
    place = Path("a pyarrow data set")
    names = kept_names(dataset.schema, place, columns, drop, drop_all, party)

    def damaged(error: Exception) -> DataError:
        return DataError(f"{party}: cannot read the data set: {type(error).__name__} - at {place}")

    rows = dataset.count_rows()
    if rows == 0:
        raise DataError(f"{party}: expected at least one row, got only column names - at {place}")
    if _is_large(rows, dataset.schema):
        folder = _usable(folder, rows * len(names) * _BYTES_ON_DISK)
        return FileTable(dataset, dataset.schema, folder, damaged).select(names)
    try:
        return dataset.to_table(columns={name: pc.field(name) for name in names})
    except (pa.ArrowException, OSError) as error:
        raise damaged(error) from None


def _is_large(rows: int, schema: Any) -> bool:
    return rows * len(schema) * np.dtype(np.float32).itemsize >= ON_DISK


def is_dataset(data: Any) -> bool:
    """Whether data is a `pyarrow.dataset.Dataset`."""
    # its module is not loaded to find out
    module = sys.modules.get("pyarrow.dataset")
    return module is not None and isinstance(data, module.Dataset)


def _usable(folder: Path | None, size: int) -> Path:
    """Return the folder for a large table, which has room for so many bytes; raise ConfigError otherwise."""
    if folder is None:
        folder = Path(tempfile.gettempdir())
    else:
        folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, size)
    return folder
