"""`align`: bring tables of several parties into common order, every party played on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any
from urllib.parse import quote

import narwhals as nw
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treaty.data.arrow_tables import FileTable
from treaty.data.ids import NORMALISE, Ids, Normalisation, OnDuplicate, Psi, read_ids
from treaty.data.table import of_frame
from treaty.errors import ConfigError, DataError, warn_user
from treaty.estimators.files import opened
from treaty.files import as_path
from treaty.machine.process import cores
from treaty.privacy.ledger import MAX_RUNS, RunLog
from treaty.runs.progress import steps_bar
from treaty.runs.threads import Role, play, star
from treaty.systems.alignment.alignment import AlignmentOptions, ResultTo, align_active, align_passive
from treaty.systems.alignment.leakage import report_shared

# what an argument may be, and the words for it in an error
_TYPES: dict[str, tuple[Any, str]] = {
    "tables": (Mapping, "a mapping of party to table"),
    "on": ((str, Mapping), "one column, or a mapping of party to column; join ids of several columns to one before"),
    "active": ((str, NoneType), "the name of a party"),
    "normalise": (Sequence, 'a list of "nfc", "strip", "lower"'),
    "n_jobs": ((int, np.integer, NoneType), "a whole number or None"),
    "log": ((str, Path, NoneType), "the path of a folder"),
    "max_runs": ((int, np.integer), "a whole number"),
    "progress": ((Callable, NoneType), "a function of two numbers"),
}


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
        Each of any eager dataframe that narwhals knows (pandas, polars, pyarrow, ...); what `treaty.open_table`
        returns; or a path or `pyarrow.dataset.Dataset` as it takes them.
    on : str or mapping of party name to str, default "id"
        The column of ids, at each party where they differ.
    active : str, optional
        The active party, by default the first.
    psi : {"auto", "ecdh", "kkrt"}, default "auto"
        How common ids are found. "ecdh": by commutative encryption. "kkrt": by an oblivious pseudorandom function, much
        faster, with weaker guarantees against a party that departs from the protocol (``docs/alignment.md``). "auto":
        "kkrt" where either list has more than some eight thousand ids.
    result_to : {"both", "active"}, default "both"
        "active": only the active party learns which of its ids all hold, and only its table comes back. Passive parties
        do not learn their rows then, so such a result counts and cannot be trained on.
    on_duplicate : {"error", "first", "expand"}, default "error"
        Of an id in several rows: refuse; keep the first row; keep every combination of the parties' rows, as a plain
        join does.
    normalise : sequence of {"nfc", "strip", "lower"}, default ("nfc", "strip")
        What is done to ids that are text before they are compared.
    drop_id : bool, default True
        Leave the id column out of what comes back: it is no feature, and a model would learn it by heart. False keeps
        it.
    n_jobs : int, optional
        Threads of each party; None for all cores.
    log : str or Path, optional
        Folder of the parties' run logs, ``PARTY.runs``, which are made or continued; by default none is kept.
    max_runs : int, default 20
        Alignments a partner may start within 30 days, by the log. Without one nothing is counted: whoever plays all
        parties in one process holds all tables. In jobs between parties runs are limited in any case.
    progress : callable, optional
        Called with points done and points in all, by the active party. None: a bar, where standard error is a terminal.

    Returns
    -------
    dict of party name to dataframe
        Of the type each came as (of a file, as `treaty.open_table` returns it), with as many rows each, row i
        everywhere of the same id; a pandas index is reset.
        Labels in a column of the active party's table come in the same order.

    Warns
    -----
    UserWarning
        Fewer than one in ten of a party's ids are common; how many are is logged
        (``treaty.systems.alignment.leakage``).

    Raises
    ------
    ConfigError
        Fewer than two tables, an unknown party or option, ids of different kinds, or a limit of runs that is reached.
    DataError
        A column is missing or holds no ids; ids are repeated; the parties have no id in common.

    Notes
    -----
    Every party runs in a thread of this process. Between organisations `treaty.systems.alignment.alignment` runs over
    the network. What each party learns is in ``docs/alignment.md``.
    """
    given = locals()
    for name, (kinds, words) in _TYPES.items():
        if not isinstance(given[name], kinds):
            raise ConfigError(f"expected {name} to be {words}, got {type(given[name]).__name__}")
    if not all(isinstance(party, str) for party in tables):
        raise ConfigError(f"expected names of parties as text, got {', '.join(map(repr, tables))}")
    if len(tables) < 2:
        raise ConfigError(f"expected the tables of at least two parties, got {len(tables)}")
    active = next(iter(tables)) if active is None else active
    if active not in tables:
        raise ConfigError(f"expected active to be one of {', '.join(tables)}, got {active!r}")
    column = {party: on for party in tables} if isinstance(on, str) else dict(on)
    if set(column) != set(tables):
        raise ConfigError(f"expected `on` to name a column of {', '.join(tables)}, got {', '.join(column)}")
    frames = {party: _frame(table, column[party], party) for party, table in tables.items()}
    threads = cores(n_jobs)
    logs = {
        party: RunLog(as_path(log, "log") / f"{quote(party, safe=' ')}.runs", max_runs=max_runs) if log else None
        for party in tables
    }

    def ids(party: str) -> Ids:
        return read_ids(frames[party][column[party]], party=party, normalise=normalise, on_duplicate=on_duplicate)

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
    learn = tables if result_to == "both" else [active]
    for party in learn:
        report_shared(party, played[party], warn_user)
    return {party: _taken(frames[party], played[party].rows, column[party] if drop_id else None) for party in learn}


def _frame(table: Any, column: str, party: str) -> nw.DataFrame[Any] | FileTable:
    table = opened(table, party, column)
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    frame = table if isinstance(table, FileTable) else of_frame(table, party)
    if not isinstance(frame, nw.DataFrame | FileTable):
        lazy = "; call .collect() first" if isinstance(frame, nw.LazyFrame) else ""
        raise DataError(f"{party}: expected a dataframe in memory, got {type(table).__name__}{lazy}")
    if column not in (frame.column_names if isinstance(frame, FileTable) else frame.columns):
        raise DataError(f"{party}: expected a column {column!r} of ids, got a table without it")
    return frame


def _taken(frame: nw.DataFrame[Any] | FileTable, rows: NDArray[np.int64], without: str | None) -> Any:
    if isinstance(frame, FileTable):
        return frame.drop_columns([] if without is None else [without]).take(rows)
    if without is not None:
        frame = frame.drop(without)
    return nw.maybe_reset_index(frame[rows]).to_native()
