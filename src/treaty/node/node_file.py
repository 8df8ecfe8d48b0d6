"""The node's SQLite file: how it is made, opened, checked and changed, by several threads and processes at once."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from treaty.errors import ConfigError
from treaty.machine.database import translated
from treaty.node import audit_log as audit

FILE = "node.db"
VERSION = 4

_WAIT = 30.0  # seconds for other processes to release the database, which takes milliseconds
_TABLES = (
    """CREATE TABLE jobs (id TEXT PRIMARY KEY, proposal BLOB NOT NULL, signature BLOB NOT NULL,
    submitter TEXT NOT NULL, verb TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    attempt INTEGER NOT NULL, rounds INTEGER NOT NULL, total INTEGER NOT NULL, kept INTEGER NOT NULL,
    done INTEGER NOT NULL, tries INTEGER NOT NULL, answered INTEGER NOT NULL, created REAL NOT NULL,
    changed REAL NOT NULL)""",
    """CREATE TABLE views (job TEXT NOT NULL REFERENCES jobs (id), party TEXT NOT NULL, view BLOB NOT NULL,
    PRIMARY KEY (job, party))""",
    """CREATE TABLE commands (seq INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL,
    command TEXT NOT NULL, argument BLOB NOT NULL, time REAL NOT NULL, done INTEGER NOT NULL)""",
    "CREATE TABLE seen (party TEXT PRIMARY KEY, up INTEGER NOT NULL, since REAL NOT NULL, said TEXT NOT NULL)",
    """CREATE TABLE heads (party TEXT PRIMARY KEY, seq INTEGER NOT NULL, digest BLOB NOT NULL,
    signature BLOB NOT NULL, time REAL NOT NULL)""",
    *audit.TABLES,
)
_MADE = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name <> 'sqlite_sequence'"


class NodeFile:
    """A node's database, open; threads may share one, each process opens its own.

    It is readable by the owner alone, and refused where it is damaged or of a newer version.
    """

    def __init__(self, folder: Path | str, create: bool = True) -> None:
        folder = Path(folder)
        self.path = folder / FILE
        self._lock = threading.RLock()
        with self._translated():
            if create:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                try:
                    os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                except FileExistsError:  # never opened here otherwise: closing it would drop this process's locks
                    pass
            elif not self.path.exists():
                raise ConfigError(f"expected a node's database, got none - at {self.path}; start the node once")
            self._db = sqlite3.connect(self.path, timeout=_WAIT, isolation_level=None, check_same_thread=False)
            self._closing = weakref.finalize(self, self._db.close)
            try:
                self._open()
                self._data_version = self._read_data_version()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; nothing can be asked of it afterwards."""
        with self._lock:
            self._closing()

    def _read(self, sql: str, given: tuple[Any, ...] = ()) -> list[Any]:
        with self._translated(), self._lock:
            return self._db.execute(sql, given).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the database, among threads and processes; all that is written meanwhile is kept, or nothing of it."""
        with self._translated(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _read_data_version(self) -> int:
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def _open(self) -> None:
        db = self._db
        self._write_ahead()
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "cell_size_check = ON"):
            db.execute(f"PRAGMA {pragma}")
        with self._transaction():
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if not version and not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                for sql in _TABLES:
                    db.execute(sql)
                db.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise ConfigError(
                    f"expected a node's database of version {VERSION}, got {version} - at {self.path}; use the version "
                    "of Treaty that made it, or a newer one"
                )
            if {sql for (sql,) in db.execute(_MADE)} != set(_TABLES):
                raise self._damaged("other tables than were made")
            if db.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
                raise self._damaged("its pages do not fit together")

    def _write_ahead(self) -> None:
        """Have SQLite keep a log written ahead; of several processes that make the database, the first one does it."""
        until = time.monotonic() + _WAIT
        while True:
            try:
                if self._db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:  # here SQLite does not wait by itself
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def _damaged(self, fault: str) -> ConfigError:
        return ConfigError(
            f"the node's database is damaged: {fault} - at {self.path}; stop the node, move {FILE}, {FILE}-wal and "
            f"{FILE}-shm away and bring back the newest copy of {FILE}. Leave the folder stores as it is: an older "
            "copy of its ledgers would forget what was spent"
        )

    def _unusable(self, error: Exception) -> ConfigError:
        return ConfigError(f"cannot use the node's database: {error} - at {self.path}")

    def _translated(self) -> AbstractContextManager[None]:
        return translated(self._damaged, self._unusable)
