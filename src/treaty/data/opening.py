"""A party's table by its size: in memory, or on disk, where it is read column by column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from treaty.data.file_tables import FileTable
from treaty.data.parquet_files import files_of
from treaty.data.sources import checked_ending, facts_of, kept_names, not_that, read_table
from treaty.errors import DataError
from treaty.scratch import check_room, usual_folder

ON_DISK = 1 << 30
"""Bytes of a table's columns, as float32, from which on they lie in files."""

_BYTES_ON_DISK = 6  # of a value: float32, and its bin twice, by column and by row


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

    A table is large from `ON_DISK` bytes on. What is made of it goes to files in `folder` (None: the system's folder of
    temporary files), which must have the room. Errors are those of `read_table`, and ConfigError for the folder.
    """
    path = Path(path)
    ending = checked_ending(path, party)
    facts = facts_of(path, ending, party)
    if facts is None or not is_large(*facts):
        return read_table(path, columns=columns, drop=drop, drop_all=drop_all, text=text, party=party)
    kind, called = ("parquet", "a Parquet file") if ending == ".parquet" else ("ipc", "an arrow file")
    names = kept_names(facts[1], path, columns, drop, drop_all, party)
    dataset = pyarrow.dataset.dataset([str(file) for file in files_of(path)], format=kind, schema=facts[1])

    def damaged(error: Exception) -> DataError:
        return DataError(f"{party}: expected {called}, got {not_that(path, error)} - at {path}")

    return large_table(dataset, names, folder, damaged)


def open_dataset(
    dataset: Any,
    *,
    folder: Path | None = None,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    party: str = "the table",
) -> Any:
    """Return columns of a `pyarrow.dataset.Dataset` as `open_table` does."""
    place = Path("a pyarrow data set")
    names = kept_names(dataset.schema, place, columns, drop, False, party)

    def damaged(error: Exception) -> DataError:
        return DataError(f"{party}: cannot read the data set: {type(error).__name__} - at {place}")

    rows = dataset.count_rows()
    if rows == 0:
        raise DataError(f"{party}: expected at least one row, got only column names - at {place}")
    if is_large(rows, dataset.schema):
        return large_table(dataset, names, folder, damaged)
    try:
        return dataset.to_table(columns={name: pc.field(name) for name in names})
    except (pa.ArrowException, OSError) as error:
        raise damaged(error) from None


def is_large(rows: int, schema: Any) -> bool:
    """Whether a table's columns, as float32, are too much for memory."""
    return rows * len(schema) * np.dtype(np.float32).itemsize >= ON_DISK


def large_table(
    dataset: Any, names: Sequence[str], folder: Path | None, damaged: Callable[[Exception], DataError]
) -> FileTable:
    """Return columns of a dataset that is too large for memory; `damaged` says what an error in reading it means.

    Raises ConfigError where `folder` has not the room that reading and training need.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    table = FileTable(dataset, dataset.schema, usual_folder() if folder is None else folder, damaged).select(names)
    check_room(table.folder, table.num_rows * len(names) * _BYTES_ON_DISK)
    return table
