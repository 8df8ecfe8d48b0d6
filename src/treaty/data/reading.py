"""Tables from files (CSV, Parquet, arrow), predictions to files.

`read_table` gives an arrow table, `open_table` one on disk where the file is too large for memory.
`to_table(..., text_as_categories=True)` turns either into features.
"""

import gzip
import re
import secrets
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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

from treaty.data.arrow_tables import SHOWN, FileTable, are_numbers, dates_of, numbers, strays_of
from treaty.data.columns import quoted
from treaty.data.file_formats import (
    CsvProblem,
    FolderProblem,
    csv_facts,
    files_of,
    lines_of,
    opened_text,
    parquet_facts,
    parse_csv,
    read_parquet,
    write_csv_columns,
)
from treaty.data.table import LISTED, Schema, Table, file_without, refuse_absent
from treaty.errors import ConfigError, DataError
from treaty.files import json_decoder_of
from treaty.machine.arrays import check_room, forget, new, usual_folder

Read = TypeVar("Read")

_CHECKED = b"treaty.schema"
_ENDINGS = (".csv", ".csv.gz", ".parquet", ".arrow")
_REMEDIES = {
    "numbers": "correct these cells (an empty one is a missing value, decimals have a point)",
    "dates": "make numbers of dates (days since a fixed one, say) or drop the column",
}
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

    A folder is read as one table of all its Parquet files, in the order of their names. Only .arrow keeps the order of
    categories. `columns` are kept, in this order (default all), less those of `drop`; with `drop_all` a file that lacks
    one of `drop`, perhaps misspelt, is refused. `text` names columns of a CSV file to take as text even where every
    value looks like a number. Empty cells and the usual marks (NA, NaN, null, ...) are null.

    Raises DataError if the file does not exist, has another ending, is empty, without rows or malformed (a CSV row of
    the wrong length is named by its line, a column of text that is not UTF-8 by its name), repeats a column name, or
    lacks one of `columns`; of a folder, if it holds anything else, or files of different columns.
    """
    path = Path(path)
    ending = checked_ending(path, party)
    if ending == ".parquet":
        table = _readable(read_parquet, path, "a Parquet file", party)
    elif ending == ".arrow":
        table = _readable(lambda path: pa.ipc.open_file(path).read_all(), path, "an arrow file", party)
    else:
        table = of_csv(partial(_read_csv, text=text), path, party)
    kept = table.select(kept_names(table.schema, path, columns, drop, drop_all, party))
    if table.num_rows == 0:
        raise DataError(f"{party}: expected at least one row, got only column names - at {path}")
    if ending in (".csv", ".csv.gz"):
        refuse_bytes(kept, path, party)
    return kept


def facts_of(path: Path, ending: str, party: str, text: Sequence[str] = ()) -> tuple[int, Any]:
    """Return the number of rows and the schema of a file, of which only CSV is read for that, piece by piece."""
    if ending == ".parquet":
        return _readable(parquet_facts, path, "a Parquet file", party)
    if ending == ".arrow":
        return _readable(_arrow_facts, path, "an arrow file", party)
    return of_csv(partial(csv_facts, text=text), path, party)


def _arrow_facts(path: Path) -> tuple[int, Any]:
    first = pa.ipc.IpcReadOptions(included_fields=[0])  # rows are counted where one column is decoded
    with pa.memory_map(str(path)) as content:
        schema = pa.ipc.open_file(content).schema
        reader = pa.ipc.open_file(content, options=first)
        return sum(reader.get_batch(k).num_rows for k in range(reader.num_record_batches)), schema


def kept_names(
    schema: Any, path: Path, columns: Sequence[str] | None, drop: Sequence[str], drop_all: bool, party: str
) -> list[str]:
    """Return the names of the columns to read of a file that has these, in order; refuse what `read_table` refuses."""
    names = schema.names
    _refuse_nameless([name for name in names if name not in drop] if columns is None else [], names, path, party)
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{party}: expected unique column names, got more than one of {quoted(repeated)} - at {path}")
    wanted = _usual(schema) if columns is None else list(columns)
    absent = [name for name in wanted if name not in names]
    if absent:
        raise DataError(f"{party}: expected columns {quoted(absent)}, {file_without(absent, names)} - at {path}")
    if drop_all:
        refuse_absent(drop, "the columns to drop", names, path, party)
    return [name for name in wanted if name not in set(drop)]


def table_facts(path: str | Path, *, text: Sequence[str] = (), party: str = "the table") -> tuple[int, Any]:
    """Return the number of rows and the arrow schema of a table that `read_table` reads; `text` is as there.

    Of Parquet files no row is read for that. Raises DataError as `read_table` does, for what can be seen so.
    """
    path = Path(path)
    ending = checked_ending(path, party)
    rows, schema = facts_of(path, ending, party, text)
    return rows, pa.schema([schema.field(schema.names.index(name)) for name in _usual(schema)])


def _usual(schema: Any) -> list[str]:
    """Return the names of all columns but an index that pandas wrote."""
    of_pandas = b"pandas" in (schema.metadata or {})
    return [name for name in schema.names if not (of_pandas and _PANDAS_INDEX.fullmatch(name))]


def check_there(path: str | Path, party: str) -> None:
    """Raise DataError unless there is a file, or a folder of Parquet files alone."""
    path = Path(path)
    if path.is_dir() and not path.name.lower().endswith((".csv", ".csv.gz", ".arrow")):
        _readable(files_of, path, "a Parquet file", party)
    elif not path.is_file():
        raise DataError(f"{party}: expected a file at {path}, got {'a folder' if path.is_dir() else 'none'}")


def checked_ending(path: Path, party: str) -> str:
    """Return the ending that says how a table is read, that of Parquet for a folder; refuse what is not there."""
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
    # what was there is replaced by a whole file only
    whole = path.with_name(f".{secrets.token_hex(8)}{ending}")
    try:
        whole.touch(mode=0o600)
        _write(whole, pa.table(arrays), ending)
        whole.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; make room, or name another file") from None
    finally:
        with suppress(OSError):
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
    """Return which of the known endings a file has; raise DataError where it has another."""
    for ending in _ENDINGS:
        if path.name.lower().endswith(ending):
            return ending
    raise DataError(f"{party}: expected a file ending in {', '.join(_ENDINGS)}, got {path.name!r}")


def _readable(read: Callable[[Path], Read], path: Path, called: str, party: str) -> Read:
    """Read a file or folder of the kind `called`, with errors that name the party."""
    try:
        return read(path)
    except FolderProblem as problem:
        raise DataError(f"{party}: {problem} - at {path}") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{party}: expected {called}, got {not_that(path, error)} - at {path}") from None


def not_that(path: Path, error: Exception) -> str:
    """Say what is wrong with a file that is not what its ending says, without its content."""
    if isinstance(error, OSError) and error.strerror:
        return f"an error of the system, {error.strerror}"
    try:
        with path.open("rb") as file:
            file.read(4096).decode()
    except UnicodeDecodeError:
        return "one that is damaged, cut off or of another kind"
    return "text: name it .csv if its values are separated by commas"


def _read_csv(path: Path, text: Sequence[str]) -> Any:
    content = gzip.decompress(path.read_bytes()) if path.name.lower().endswith(".gz") else path.read_bytes()
    if not content.strip():
        raise CsvProblem("expected a table, got an empty file")
    return parse_csv(content, text)


def of_csv(read: Callable[[Path], Read], path: Path, party: str) -> Read:
    """Read a CSV file, packed or not, with errors that name the party."""
    try:
        return read(path)
    except CsvProblem as problem:
        raise DataError(f"{party}: {problem} - at {path}") from None
    except (OSError, EOFError, zlib.error) as error:
        # BadGzipFile is an OSError
        raise DataError(f"{party}: expected a readable file, got {not_that(path, error)} - at {path}") from None


def refuse_strays(
    table: pa.Table, path: str | Path, party: str, *, features: Sequence[str], numeric: Sequence[str] = (), remedy: str
) -> None:
    """Refuse columns of numbers in which some cells are none, which made them text; the error names lines and cells.

    `table` has all rows of the file at `path`, in its order. Of `features` a column of text is one of categories where
    few of its values look like numbers or dates (`treaty.data.arrow_tables`); those of `numeric` must be numbers.
    Refused are, too, numbers that are stored as text, as files with types can have them, and dates that are. `remedy`
    says how a column is declared one of categories.

    Raises DataError, whose text other parties do not see.
    """
    found, stored = {}, []
    for name in dict.fromkeys([*features, *numeric]):
        kind = table.schema.field(name).type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
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
            with opened_text(Path(path)) as lines:
                places = lines_of(lines, rows)
        described.append(f"column {name!r} has {strays.described(places, 'line' if is_csv(path) else 'row')}")
    remedies = {strays.of: _REMEDIES[strays.of] for strays in found.values()}
    declare = f", or, if these are categories, {remedy}" if set(found) - set(numeric) else ""
    raise DataError(f"{party}: {'; '.join(described)}: {' and '.join(remedies.values())}{declare} - at {path}")


def _refuse_nameless(kept: Sequence[str], names: Sequence[str], path: Path, party: str) -> None:
    """Refuse columns without a name, of which an index that pandas wrote would tell trees the order of rows."""
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
    """Whether a file's ending says that it holds comma-separated values, packed or not."""
    return Path(path).name.lower().endswith((".csv", ".csv.gz"))


def refuse_bytes(table: Any, path: Path, party: str) -> None:
    """Refuse columns whose text is not UTF-8, which arrow reads as bytes."""
    undecoded = [field.name for field in table.schema if pa.types.is_binary(field.type)]
    if undecoded:
        raise DataError(
            f"{party}: expected text in UTF-8, got another encoding in {quoted(undecoded)}; save the file as UTF-8, or "
            f"drop the column - at {path}"
        )


ON_DISK = 1 << 30
"""Bytes of a table's columns, as float32, from which on they lie in files."""

_BYTES_ON_DISK = 8  # of a value: float32, and its bin by column and by row, or float32 by row, to predict
_BYTES_OF_CSV = 8  # of a value, while a file is read
_UNPACKED = 4  # times the size of a packed file


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
    """Read a table as `read_table` does if it is small; else return it as a `FileTable`, of which nothing is read yet.

    A table is large from `ON_DISK` bytes on, one in CSV by the size of its file. What is made of it goes to files in
    `folder` (None: the system's folder of temporary files), which must have the room. Errors are those of `read_table`,
    and ConfigError for the folder.
    """
    path = Path(path)
    ending = checked_ending(path, party)
    of_csv = ending in (".csv", ".csv.gz")
    size = path.stat().st_size * (_UNPACKED if ending == ".csv.gz" else 1)
    facts = None if of_csv and size < ON_DISK else facts_of(path, ending, party, text)
    if facts is None or facts[0] == 0 or not (of_csv or is_large(*facts)):
        return read_table(path, columns=columns, drop=drop, drop_all=drop_all, text=text, party=party)
    rows, schema = facts
    names = kept_names(schema, path, columns, drop, drop_all, party)
    called = "a Parquet file" if ending == ".parquet" else "an arrow file"

    def damaged(error: Exception) -> DataError:
        return DataError(f"{party}: expected {called}, got {not_that(path, error)} - at {path}")

    import pyarrow.dataset  # takes as long to load as a small job

    if of_csv:
        folder = _usable(folder, rows * (len(names) * _BYTES_ON_DISK + len(schema) * _BYTES_OF_CSV))
        dataset = pyarrow.dataset.dataset(write_csv_columns(path, schema, folder))
        table = FileTable(dataset, schema, folder, damaged).select(names)
        refuse_bytes(table, path, party)
        return table
    kind = "parquet" if ending == ".parquet" else "ipc"
    dataset = pyarrow.dataset.dataset([str(file) for file in files_of(path)], format=kind, schema=schema)
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
    if is_large(rows, dataset.schema):
        folder = _usable(folder, rows * len(names) * _BYTES_ON_DISK)
        return FileTable(dataset, dataset.schema, folder, damaged).select(names)
    try:
        return dataset.to_table(columns={name: pc.field(name) for name in names})
    except (pa.ArrowException, OSError) as error:
        raise damaged(error) from None


def is_large(rows: int, schema: Any) -> bool:
    """Whether a table's columns, as float32, are too much for memory."""
    return rows * len(schema) * np.dtype(np.float32).itemsize >= ON_DISK


def is_dataset(data: Any) -> bool:
    """Whether something is a `pyarrow.dataset.Dataset`; its module is not loaded to find out."""
    module = sys.modules.get("pyarrow.dataset")
    return module is not None and isinstance(data, module.Dataset)


def _usable(folder: Path | None, size: int) -> Path:
    """Return the folder for a large table; raise ConfigError where it has not the room."""
    if folder is None:
        folder = usual_folder()
    else:
        folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, size)
    return folder
