"""Parquet files, and folders of them that are one table: its files in the order of their names, all of one schema."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from treaty.data.columns import quoted


class FolderProblem(ValueError):
    """Why a folder is no table; without its name and the party, which the caller adds."""


def files_of(path: Path) -> list[Path]:
    """Return the files of a Parquet table: itself, or those of a folder in the order of their names.

    Raises FolderProblem where a folder has anything but Parquet files, even a hidden one: a file that was copied by
    half, or a second table, would else be part of the table, or missing in it, and nobody would know.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.iterdir(), key=lambda file: file.name)
    strays = [file.name for file in files if file.name.startswith(".") or not _is_parquet(file)]
    if strays:
        raise FolderProblem(
            f"expected a folder of Parquet files alone, got one with {quoted(strays)}; move what is not of the table "
            "elsewhere"
        )
    if not files:
        raise FolderProblem("expected a folder of Parquet files, got an empty one")
    return files


def read_parquet(path: Path) -> Any:
    """Read a Parquet file, or a folder of them as one table.

    Raises FolderProblem, and of a single file that is none what arrow raises.
    """
    files = files_of(path)
    if files == [path]:
        return pyarrow.parquet.read_table(path, partitioning=None)
    first = _schema_of(path, files)
    schema = pa.schema([pa.field(field.name, field.type) for field in first], first.metadata)
    tables = []
    for file in files:
        with _named(file):
            tables.append(pyarrow.parquet.read_table(file, partitioning=None).cast(schema))
    return pa.concat_tables(tables).unify_dictionaries()


def parquet_facts(path: Path) -> tuple[int, Any]:
    """Return the number of rows and the schema of a Parquet file or folder, without its rows; errors as of reading."""
    files = files_of(path)
    schema = _schema_of(path, files)
    return sum(pyarrow.parquet.read_metadata(file).num_rows for file in files), schema


def _is_parquet(file: Path) -> bool:
    return file.is_file() and file.name.lower().endswith(".parquet")


def _schema_of(path: Path, files: list[Path]) -> Any:
    """Return the schema of all files of a table; refuse a folder's where they differ, or one is no such file."""
    if files == [path]:
        return pyarrow.parquet.read_schema(path)
    schemas = []
    for file in files:
        with _named(file):
            schemas.append(pyarrow.parquet.read_schema(file))
    _refuse_others(files, schemas)
    return schemas[0]


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file of a folder that cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError):
        raise FolderProblem(
            f"expected a folder of Parquet files, got one whose file {file.name} is damaged, cut off or of another kind"
        ) from None


def _refuse_others(files: list[Path], schemas: list[Any]) -> None:
    """Refuse files whose columns, their order or types differ from those of the first."""
    first = schemas[0]
    for file, schema in zip(files, schemas, strict=True):
        if schema.names == first.names and schema.types == first.types:
            continue
        more = [name for name in schema.names if name not in first.names]
        fewer = [name for name in first.names if name not in schema.names]
        told = [f"{what} {quoted(names)}" for what, names in (("has also", more), ("lacks", fewer)) if names]
        told += [
            f"has {name!r} as {schema.field(name).type}, not {first.field(name).type}"
            for name in first.names
            if schema.names.count(name) == first.names.count(name) == 1
            and schema.field(name).type != first.field(name).type
        ]
        how = "; ".join(told) or "has the columns in another order"
        raise FolderProblem(f"expected files with the columns of {files[0].name}, got {file.name}, which {how}")
