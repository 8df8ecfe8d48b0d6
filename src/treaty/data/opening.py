"""A party's table by its size: in memory, or on disk, where it is read column by column."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treaty.data.csv_files import write_csv_columns
from treaty.data.file_tables import FileTable
from treaty.data.parquet_files import files_of
from treaty.data.sources import checked_ending, facts_of, kept_names, not_that, read_table, refuse_bytes
from treaty.errors import DataError
from treaty.machine.arrays import check_room, usual_folder

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
