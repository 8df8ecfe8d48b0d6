"""Files and data sets as users hand them to an estimator, by the rules of job files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import pyarrow as pa

from treaty.data.arrow_tables import FileTable, as_numbers_in_features, as_text, changed, typed_ids, with_categories
from treaty.data.file_formats import lossy_as_ids
from treaty.data.reading import is_csv, is_dataset, open_dataset, refuse_strays
from treaty.data.reading import open_table as open_file
from treaty.data.reading import read_table as read_file
from treaty.data.table import refuse_absent
from treaty.errors import ConfigError
from treaty.files import as_path


def read_table(
    path: str | Path,
    *,
    categorical: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
) -> pa.Table:
    """Read a file by the rules of job files: what is a number, what a category, and what is refused.

    Parameters
    ----------
    path : str or Path
        A .csv or .csv.gz file (UTF-8, a header, commas between), .parquet, or .arrow, or a folder of Parquet files.
    categorical : sequence of str, default ()
        Columns of categories whose cells may look like numbers: postal codes, say.
    columns : sequence of str, optional
        The columns to read, in this order; by default all.
    drop : sequence of str, default ()
        Columns to leave out; the file must have them.

    Returns
    -------
    pyarrow.Table
        Columns of text as categories, sorted. Estimators take it as it is; ``.to_pandas()`` makes a dataframe of it.
        A CSV file's whole numbers that are not written as such (007, 1e3) stay the text that the file has, as ids and
        codes are; where an estimator gets such a column of this table, it takes the numbers.

    Raises
    ------
    DataError
        The file is missing, malformed or has other columns; or a column has numbers, or dates, and some cells that
        are none (``treaty.data.arrow_tables`` has the rule). The error names their lines.
    """
    return _opened(as_path(path, "path"), "the table", categorical, columns, drop, in_memory=True, any_ids=True)


def open_table(
    source: Any,
    *,
    categorical: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    id: str | None = None,
    folder: str | Path | None = None,
) -> Any:
    """Name a table that need not fit into memory, for an estimator to read.

    A table of less than 1 GiB, each number taken as 4 bytes, and a CSV file of less than that are read at once, as
    `read_table` does. Columns of another are read one after the other when an estimator takes it, and what is made of
    them is kept in files: 8 bytes a number at most. Models are the same, bit for bit. Paths and data sets may be given
    to estimators as they are, too; this function says which columns are meant.

    Parameters
    ----------
    source : str, Path or pyarrow.dataset.Dataset
        A file as of `read_table`, a folder of Parquet files, or a data set.
    categorical : sequence of str, default ()
        Columns of categories whose cells may look like numbers: postal codes, say.
    columns : sequence of str, optional
        The columns to take, in this order; by default all.
    drop : sequence of str, default ()
        Columns to leave out, which the file must have: that of labels, say.
    id : str, optional
        A column of ids, for `treaty.align`: it may hold anything.
    folder : str or Path, optional
        Where a large table's values and bins are kept while an estimator needs them, in files that are gone with the
        process; by default the system's folder of temporary files, which ``TMPDIR`` names.

    Returns
    -------
    table
        For `fit`, `predict` and `treaty.align`, as a party's table. ``table["label"]`` reads one column, a
        `pyarrow.ChunkedArray`, and ``table.drop_columns(["label"])`` returns the table without it.

    Raises
    ------
    DataError
        As of `read_table`.
    ConfigError
        The folder has not enough room.
    """
    folder = None if folder is None else as_path(folder, "folder")
    if not isinstance(id, str | NoneType):
        raise ConfigError(f"expected id to be the name of a column, got {type(id).__name__}")
    return _opened(source, "the table", categorical, columns, drop, id, folder, any_ids=id is None)


def _opened(
    source: Any, party: str, categorical: Sequence[str] = (), columns: Sequence[str] | None = None,
    drop: Sequence[str] = (), ids: str | None = None, folder: Path | None = None, *, in_memory: bool = False,
    any_ids: bool = False,
) -> Any:  # fmt: skip
    for what, names in (("categorical", categorical), ("columns", columns or ()), ("drop", drop)):
        if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(of, str) for of in names):
            raise ConfigError(f"expected {what} to be a list of columns' names, got {names!r}")
        if what == "columns" and len(set(names)) < len(names):
            raise ConfigError(f"expected every column once, got columns={names!r}")
    read = partial(
        read_file if in_memory else partial(open_file, folder=folder), columns=columns, drop=drop, party=party
    )
    lossy: dict[str, pa.DataType] = {}
    if is_dataset(source):
        place = "a pyarrow data set"
        table = open_dataset(source, columns=columns, drop=drop, drop_all=True, folder=folder, party=party)
    else:
        source = as_path(source, "source")
        place = str(source)
        text = [*categorical, *([] if ids is None else [ids])]
        table = read(source, drop_all=True, text=text)
        if any_ids and is_csv(source) and (lossy := lossy_as_ids(source, table.schema)):
            table = read(source, text=[*text, *lossy])
        if ids in table.column_names and is_csv(source):
            typed = typed_ids(table[ids])
            table = changed(table, str(ids), typed.type, lambda _: typed)
    refuse_absent([] if ids is None else [ids], "a column of ids", table.column_names, place, party)
    return _with_kinds(table, place, party, [name for name in categorical if name not in drop], ids, lossy)


def opened(data: Any, party: str = "the table", ids: str | None = None) -> Any:
    """Return a party's table: what a path or data set names, `ids` being its column of ids; others as they came."""
    if not isinstance(data, str | Path) and not is_dataset(data):
        return data
    return _opened(data, party, ids=ids)


def opened_by_participant(X: Any) -> Any:
    """Return a mapping of participant to (X, y) with `opened` tables; anything else as it came."""
    if not isinstance(X, Mapping):
        return X
    return {
        name: (opened(given[0], str(name)), *given[1:]) if isinstance(given, tuple) and given else given
        for name, given in X.items()
    }


def shown(X: Any) -> Any:
    """Return a table that shows scikit-learn the columns: for one on disk a table without rows."""
    return X.schema.empty_table() if isinstance(X, FileTable) else X


def _with_kinds(
    table: Any, place: Any, party: str, categorical: Sequence[str], ids: str | None, lossy: Mapping[str, pa.DataType]
) -> Any:
    """Return a file's table with its text as categories; refuse columns of numbers that have text in some cells.

    Its column of ids stays as it is, and the text of those that are `lossy`, which are numbers as features.
    """
    refuse_absent(categorical, "columns", table.column_names, place, party)
    table = as_text(table, categorical)
    refuse_strays(
        table, place, party, features=[name for name in table.column_names if name not in (*categorical, *lossy, ids)],
        remedy="name it in categorical",
    )  # fmt: skip
    for name, kind in lossy.items():
        table = as_numbers_in_features(table, name, kind)
    return with_categories(table, but=[ids, *lossy])
