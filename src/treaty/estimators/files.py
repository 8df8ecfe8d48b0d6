"""Tables before an estimator sees them: read from files by the rules of job files, and aligned by ids (`align`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any
from urllib.parse import quote

import narwhals as nw
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treaty.data.arrow_tables import FileTable, as_numbers_in_features, as_text, changed, typed_ids, with_categories
from treaty.data.file_formats import lossy_as_ids
from treaty.data.ids import NORMALISE, Ids, Normalisation, OnDuplicate, Psi, read_ids
from treaty.data.reading import is_csv, is_dataset, open_dataset, refuse_strays
from treaty.data.reading import open_table as open_file
from treaty.data.reading import read_table as read_file
from treaty.data.table import of_frame, refuse_absent
from treaty.errors import ConfigError, DataError, warn_user
from treaty.files import as_path
from treaty.machine.process import cores
from treaty.privacy.ledger import MAX_RUNS, RunLog
from treaty.runs.progress import steps_bar
from treaty.runs.threads import Role, play, star
from treaty.systems.alignment.alignment import AlignmentOptions, ResultTo, align_active, align_passive
from treaty.systems.alignment.leakage import report_shared
from treaty.systems.options import spelled_out


def read_table(
    path: str | Path, *, categorical: Sequence[str] = (), columns: Sequence[str] | None = None, drop: Sequence[str] = ()
) -> pa.Table:
    """Read a file by the rules of job files, which decide what is a number, a category, or an error.

    Parameters
    ----------
    path : str or Path
        A .csv or .csv.gz file (UTF-8, a header, comma-separated), .parquet, or .arrow, or a folder of Parquet files.
    categorical : sequence of str, default ()
        Columns of categories whose cells may look like numbers, such as postal codes.
    columns : sequence of str, optional
        The columns to read, in this order. None: all.
    drop : sequence of str, default ()
        Columns to leave out; the file must have them.

    Returns
    -------
    pyarrow.Table
        Columns of text become sorted categories. Estimators accept the table; ``.to_pandas()`` converts it to a
        dataframe. Whole numbers in unusual notation in a CSV file (007, 1e3) stay text, since they may be ids or codes;
        an estimator that gets such a column converts it to numbers.

    Raises
    ------
    DataError
        If the file is missing, malformed or lacks columns; or if some cells of a column of numbers, or dates, are
        neither (``treaty.data.arrow_tables`` has the rule). The error names their lines.

    See Also
    --------
    open_table : A table that may be larger than memory.

    Examples
    --------
    >>> import pathlib, tempfile, treaty, pandas as pd
    >>> shop = pd.DataFrame({"customer": [17, 18], "orders": [3, None], "device": ["phone", "desktop"]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "shop.csv")
    ...     shop.to_csv(path, index=False)
    ...     table = treaty.read_table(path, drop=["customer"])
    >>> table["orders"].to_pylist()
    [3.0, None]
    >>> str(table["device"].type)
    'dictionary<values=string, indices=int32, ordered=0>'
    """
    return _opened(as_path(path, "path"), "the table", categorical, columns, drop, in_memory=True, any_ids=True)


@spelled_out(read_table)
def open_table(
    source: Any,
    *,
    categorical: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    id: str | None = None,
    folder: str | Path | None = None,
) -> Any:
    """Open a table that may be larger than memory, for an estimator to read.

    A table of less than 1 GiB, with 4 bytes per number, and a CSV file of less than 1 GiB are read at once, as by
    `read_table`. Columns of a larger table are read one after the other when an estimator needs them, and their values
    and bins are kept in files, with at most 8 bytes per number. Models are the same, bit for bit. Estimators also
    accept paths and data sets; this function selects columns.

    Parameters
    ----------
    source : str, Path or pyarrow.dataset.Dataset
        A .csv or .csv.gz file (UTF-8, a header, comma-separated), .parquet, or .arrow, a folder of Parquet files, or a
        data set.
    categorical : sequence of str, default ()
        Columns of categories whose cells may look like numbers, such as postal codes.
    columns : sequence of str, optional
        The columns to use, in this order. None: all.
    drop : sequence of str, default ()
        Columns to leave out, such as that of labels; the file must have them.
    id : str, optional
        A column of ids, for `treaty.align`: it may hold anything.
    folder : str or Path, optional
        Where a large table's values and bins are kept while an estimator needs them, in files that disappear with the
        process. None: the system's folder of temporary files (``TMPDIR``).

    Returns
    -------
    table
        For `fit`, `predict` and `treaty.align`, as a party's table. ``table["label"]`` reads one column, a
        `pyarrow.ChunkedArray`, and ``table.drop_columns(["label"])`` returns the table without it.

    Raises
    ------
    DataError
        As for `read_table`.
    ConfigError
        If the folder has too little space.

    See Also
    --------
    read_table : Reads a file at once.
    align : Finds the rows that all parties have.

    Examples
    --------
    >>> import pathlib, tempfile, treaty, pandas as pd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "bank.csv")
    ...     pd.DataFrame({"age": [31, 65] * 30, "late": [0, 1] * 30}).to_csv(path, index=False)
    ...     table = treaty.open_table(path)
    ...     y = table["late"].to_numpy()
    ...     model = treaty.GBDTClassifier(n_estimators=2).fit(table.drop_columns(["late"]), y)
    >>> model.feature_names_in_
    array(['age'], dtype=object)
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
        # As numbers, ids such as 007 would lose their digits: read such columns as text, too.
        if any_ids and is_csv(source) and (lossy := lossy_as_ids(source, table.schema)):
            table = read(source, text=[*text, *lossy])
        if ids in table.column_names and is_csv(source):
            typed = typed_ids(table[ids])
            table = changed(table, str(ids), typed.type, lambda _: typed)
    refuse_absent([] if ids is None else [ids], "a column of ids", table.column_names, place, party)
    return _with_kinds(table, place, party, [name for name in categorical if name not in drop], ids, lossy)


def opened(data: Any, party: str = "the table", ids: str | None = None) -> Any:
    """Open a party's table if it is a path or data set, with the column `ids`; return other tables unchanged."""
    if not isinstance(data, str | Path) and not is_dataset(data):
        return data
    return _opened(data, party, ids=ids)


def opened_by_participant(X: Any) -> Any:
    """Return a mapping of participant to (X, y) with `opened` tables; anything else unchanged."""
    if not isinstance(X, Mapping):
        return X
    return {
        name: (opened(given[0], str(name)), *given[1:]) if isinstance(given, tuple) and given else given
        for name, given in X.items()
    }


def shown(X: Any) -> Any:
    """Return a table from which scikit-learn reads the columns: for one on disk, a table without rows."""
    return X.schema.empty_table() if isinstance(X, FileTable) else X


def _with_kinds(
    table: Any, place: Any, party: str, categorical: Sequence[str], ids: str | None, lossy: Mapping[str, pa.DataType]
) -> Any:
    """Return a file's table with its text as categories; refuse columns of numbers that have text in some cells.

    The column of ids, and the text of `lossy` columns, which are numbers as features, are unchanged.
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


# The types that an argument may have, and the words for them in an error.
_TYPES: dict[str, tuple[Any, str]] = {
    "tables": (Mapping, "a mapping of party to table"),
    "on": ((str, Mapping), "one column, or a mapping of party to column; first join ids of several columns into one"),
    "active": ((str, NoneType), "the name of a party"),
    "normalise": (Sequence, 'a list of "nfc", "strip", "lower"'),
    "n_jobs": ((int, np.integer, NoneType), "a whole number or None"),
    "log": ((str, Path, NoneType), "the path of a folder"),
    "max_runs": ((int, np.integer), "a whole number"),
    "progress": ((Callable, NoneType), "a function of two numbers"),
}


def framed(columns: Mapping[str, Any]) -> Any:
    """Return columns as a dataframe of pandas if it is installed, else as a `pyarrow.Table`."""
    return nw.from_dict(dict(columns), backend="pandas" if find_spec("pandas") else "pyarrow").to_native()


def align(
    tables: Mapping[str, Any],
    on: str | Mapping[str, str] = "id",
    *,
    active: str | None = None,
    psi: Psi = "auto",
    result_to: ResultTo = "both",
    on_duplicate: OnDuplicate = "error",
    normalise: Sequence[Normalisation] = NORMALISE,
    drop_id: bool = True,
    n_jobs: int | None = None,
    log: str | Path | None = None,
    max_runs: int = MAX_RUNS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Keep the rows whose ids all parties hold, in one common random order, by private set intersection.

    Parameters
    ----------
    tables : mapping of party name to dataframe
        Each is an eager dataframe that narwhals supports (pandas, polars, pyarrow, ...), a result of
        `treaty.open_table`, or a path or `pyarrow.dataset.Dataset` for it.
    on : str or mapping of party name to str, default "id"
        The column of ids, or the column of each party if the names differ.
    active : str, optional
        The active party. None: the first.
    psi : {"auto", "ecdh", "kkrt"}, default "auto"
        How common ids are found. "ecdh": by commutative encryption. "kkrt": by an oblivious pseudorandom function, much
        faster, with weaker guarantees against a party that departs from the protocol (``docs/alignment.md``). "auto":
        "kkrt" if either list has more than about eight thousand ids.
    result_to : {"both", "active"}, default "both"
        "active": only the active party learns which of its ids all parties hold, and only its table is returned.
        Passive parties do not learn their rows then, so such a result can be counted, but not trained on.
    on_duplicate : {"error", "first", "expand"}, default "error"
        If an id is in several rows: raise an error; keep the first row; or keep every combination of the parties' rows,
        as a plain join does.
    normalise : sequence of {"nfc", "strip", "lower"}, default ("nfc", "strip")
        How text ids are normalised before they are compared.
    drop_id : bool, default True
        Drop the id column from the results: it is no feature, and a model would memorise it. False keeps it.
    n_jobs : int, optional
        Threads of each party; None for all cores.
    log : str or Path, optional
        Folder of the parties' run logs, ``PARTY.runs``, which are created or continued. None: no log.
    max_runs : int, default 20
        Alignments that a partner may start within 30 days, by the log. Without a log, runs are not counted: one process
        holds all tables anyway. Jobs between parties always limit runs.
    progress : callable, optional
        The active party calls it with the points done, and their total. None: a bar, if standard error is a terminal.

    Returns
    -------
    dict of party name to dataframe
        Each has the type of the given table (for a file, as `treaty.open_table` returns it). All have the same number
        of rows, and row i has the same id everywhere. A pandas index is reset. Labels in a column of the active party's
        table are in the same order.

    Warns
    -----
    UserWarning
        If fewer than one in ten of a party's ids are common. Their number is logged
        (``treaty.systems.alignment.leakage``).

    Raises
    ------
    ConfigError
        For fewer than two tables, an unknown party or option, ids of different kinds, or if a limit of runs is reached.
    DataError
        If a column is missing or holds no ids, ids are repeated, or the parties have no id in common.

    Notes
    -----
    Every party runs in a thread of this process. Between organisations, `treaty.systems.alignment.alignment` runs over
    the network. ``docs/alignment.md`` lists what each party learns.

    See Also
    --------
    open_table : Tables in files.
    GBDTClassifier : Train on the result.

    Examples
    --------
    >>> import pandas as pd, treaty
    >>> bank = pd.DataFrame({"id": ["ann", "bob", "eve"], "age": [31, 45, 27]})
    >>> shop = pd.DataFrame({"id": ["eve", "joe", "ann"], "orders": [2, 9, 4]})
    >>> both = treaty.align({"bank": bank, "shop": shop}, drop_id=False)
    >>> sorted(both["bank"]["id"]), both["bank"]["id"].equals(both["shop"]["id"])
    (['ann', 'eve'], True)
    """
    _check_types(locals())
    active = next(iter(tables), "") if active is None else active
    column = {party: on for party in tables} if isinstance(on, str) else dict(on)
    _check_parties(tables, active, column)
    frames = {party: _frame(table, column[party], party) for party, table in tables.items()}
    threads = cores(n_jobs)
    logs = {
        party: RunLog(as_path(log, "log") / f"{quote(party, safe=' ')}.runs", max_runs=max_runs) if log else None
        for party in tables
    }

    def ids(party: str) -> Ids:
        return read_ids(frames[party][column[party]], party=party, normalise=normalise, on_duplicate=on_duplicate)

    # Ids are read inside the role, so that each party's thread reads its own.
    roles: dict[str, Role] = {
        name: lambda party, name=name: align_passive(  # type: ignore[misc]
            party, ids(name), AlignmentOptions(psi=psi, result_to=result_to, log=logs[name], threads=threads)
        )
        for name in tables
    }
    with steps_bar("aligning", shown=progress is None) as bar:
        options = AlignmentOptions(
            psi=psi, result_to=result_to, log=logs[active], threads=threads, progress=progress or bar
        )
        roles[active] = lambda party: align_active(party, ids(active), options)
        played = play(roles, star(active, tables), job="align", protocol="alignment").results
    # Each party warns of what it learned itself.
    learn = tables if result_to == "both" else [active]
    for party in learn:
        report_shared(party, played[party], warn_user)
    return {party: _taken(frames[party], played[party].rows, column[party], drop_id) for party in learn}


def _check_types(given: Mapping[str, Any]) -> None:
    for name, (kinds, words) in _TYPES.items():
        if not isinstance(given[name], kinds):
            raise ConfigError(f"expected {name} to be {words}, got {type(given[name]).__name__}")


def _check_parties(tables: Mapping[str, Any], active: str, column: Mapping[str, str]) -> None:
    if not all(isinstance(party, str) for party in tables):
        raise ConfigError(f"expected names of parties as text, got {', '.join(map(repr, tables))}")
    if len(tables) < 2:
        raise ConfigError(f"expected the tables of at least two parties, got {len(tables)}")
    if active not in tables:
        raise ConfigError(f"expected active to be one of {', '.join(tables)}, got {active!r}")
    if set(column) != set(tables):
        raise ConfigError(f"expected `on` to name a column of {', '.join(tables)}, got {', '.join(column)}")


def _frame(table: Any, column: str, party: str) -> nw.DataFrame[Any] | FileTable:
    table = opened(table, party, column)
    # narwhals does not take record batches.
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    frame = table if isinstance(table, FileTable) else of_frame(table, party)
    if not isinstance(frame, nw.DataFrame | FileTable):
        lazy = "; call .collect() first" if isinstance(frame, nw.LazyFrame) else ""
        raise DataError(f"{party}: expected a dataframe in memory, got {type(table).__name__}{lazy}")
    names = frame.column_names if isinstance(frame, FileTable) else frame.columns
    if column not in names:
        each = f"on={{{party!r}: NAME, ...}} names one for each party"
        raise DataError(f"{party}: expected a column {column!r} of ids, got {', '.join(names)}; {each}")
    return frame


def _taken(frame: nw.DataFrame[Any] | FileTable, rows: NDArray[np.int64], column: str, drop_id: bool) -> Any:
    if isinstance(frame, FileTable):
        return frame.drop_columns([column] if drop_id else []).take(rows)
    if drop_id:
        frame = frame.drop(column)
    elif frame.implementation.is_pyarrow() and frame[column].dtype == nw.Categorical:
        frame = frame.with_columns(nw.col(column).cast(nw.String))  # pyarrow cannot sort by categories
    return nw.maybe_reset_index(frame[rows]).to_native()
