"""SQLite files of a party: `Database`, and `SealedDatabase` for records that must not be lost unnoticed.

A `Database` is a file that only its owner may read, with tables that are made once and checked at each opening. The
node's jobs and audit log are in one.

A `SealedDatabase`, of what a party has paid or leaked, is refused if it is damaged, emptied, deleted or rolled back. It
has a random name and a number that each change raises; both are also in a small file next to its folder,
``FOLDER.kept``, and in the models trained with it. If these are ahead of the database, or it is gone, it is refused.
All rows of its tables are under a SHA-256 that is checked before and renewed after every transaction, as SQLite itself
has no checksum. It keeps a rollback journal: from a damaged write-ahead log SQLite drops commits without an error.

Deleting folder, ``.kept`` and models together is not noticed, nor is a deliberate change by someone who may write all
of them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import msgspec

from treaty.errors import ConfigError
from treaty.files import Format, explained, read_file, write_file

KEPT = Format("kept", 1)
# seconds for other processes to release the database, which takes milliseconds
_WAIT = 60.0
_STATE = """CREATE TABLE state (one INTEGER PRIMARY KEY, name TEXT NOT NULL, changes INTEGER NOT NULL,
    seal BLOB NOT NULL)"""


class Database:
    """An SQLite file that its owner alone may read, made with its tables if there is none.

    Threads may share one; each process opens its own. `file` None keeps it in memory. Errors name it `what`, at
    `where`. With `write_ahead` readers need not wait for a writer.

    Constructor and methods raise ConfigError if the file cannot be used, is damaged or of another version.
    """

    def __init__(
        self,
        file: Path | None,
        version: int,
        tables: tuple[str, ...],
        *,
        what: str,
        where: str,
        write_ahead: bool = False,
    ) -> None:
        self.what, self.where = what, where
        self._version, self._made = version, tables
        self._lock = threading.RLock()
        with self._translated():
            if file is not None:
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._before_making(file)
                # SQLite alone opens an existing file: closing it here would drop this process's locks on it
                with suppress(FileExistsError):
                    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            self.connection = sqlite3.connect(
                file or ":memory:", timeout=_WAIT, isolation_level=None, check_same_thread=False
            )
            self._closing = weakref.finalize(self, self.connection.close)
            try:
                if write_ahead:
                    self._write_ahead()
                self._open()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closing()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lock the connection for this thread."""
        with self._translated(), self._lock:
            yield self.connection

    def read(self, sql: str, given: tuple[Any, ...] = ()) -> list[Any]:
        """Return all rows of a query."""
        with self.reading() as db:
            return db.execute(sql, given).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Lock the database for this thread and process; all that is written meanwhile is kept, or nothing."""
        with self.reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def damaged(self, fault: str) -> ConfigError:
        """Return the error for a damaged database, with its remedy."""
        return ConfigError(f"the {self.what} is damaged: {fault} - at {self.where}; bring back the newest copy")

    def _before_making(self, file: Path) -> None:
        """Refuse to make the file, if that would be wrong."""

    def _fill(self) -> None:
        """Write the first rows of a new database, after its tables are made."""

    def _check(self) -> None:
        if self.connection.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
            raise self.damaged("its pages do not fit together")

    def _open(self) -> None:
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "cell_size_check = ON"):
            self.connection.execute(f"PRAGMA {pragma}")
        with Database.transaction(self) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if not version and not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                for sql in self._made:
                    db.execute(sql)
                db.execute(f"PRAGMA user_version = {self._version}")
                self._fill()
            elif version != self._version:
                raise ConfigError(
                    f"expected the {self.what} to be of version {self._version}, got {version} - at {self.where}; use "
                    "the version of Treaty that made it, or a newer one"
                )
            # SQLite makes sqlite_sequence for AUTOINCREMENT; indexes of keys have no text
            found = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name <> 'sqlite_sequence'")
            if {sql for (sql,) in found} != set(self._made):
                raise self.damaged("other tables than were made")
            self._check()

    def _write_ahead(self) -> None:
        """Switch to a write-ahead log; of several processes that make the database, the first one does it."""
        until = time.monotonic() + _WAIT
        while True:
            try:
                if self.connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    self.connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                # SQLite itself does not wait here
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn SQLite's errors, and those of files, into ours, which quote nothing unreadable."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            # pages that make no sense; others are full disks, locks and such
            if type(error) is sqlite3.DatabaseError:
                raise self.damaged(str(error)) from None
            if type(error) is sqlite3.OperationalError and not hasattr(error, "sqlite_errorcode"):
                # Python's own error, which quotes it
                raise self.damaged("a text is not UTF-8") from None
            raise self._unusable(error) from None
        except UnicodeDecodeError:
            raise self.damaged("a text is not UTF-8") from None
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> ConfigError:
        public = f"its {self.what} cannot be used; it has the details"
        return ConfigError(f"cannot use the {self.what}: {error} - at {self.where}", public=public)


class Mark(msgspec.Struct, frozen=True):
    """The name of a database, and its number of changes."""

    name: str
    changes: int


class SealedDatabase(Database):
    """A database in a folder of its own, which is refused if anything in it was lost; in memory if `folder` is None.

    `tables` are their SQL by name: all their rows are under the seal, so they should be small. `what` names it in
    errors, `lost` what a reset would forget. A folder named ``PARTY.something`` is the party's.
    """

    def __init__(
        self, folder: Path | None, file: str, form: Format, tables: Mapping[str, str], *, what: str, lost: str
    ) -> None:
        self.folder, self._form, self._tables, self._lost = folder, form, tuple(tables), lost
        self._is_marked = folder is None
        super().__init__(
            None if folder is None else folder / file, form.version, (_STATE, *tables.values()), what=what,
            where=str(folder or f"{what} in memory"),
        )  # fmt: skip
        if not self._is_marked:
            with self._translated():
                self._write_mark()

    @property
    def name(self) -> str:
        """The random name."""
        return self._state()[0]

    @contextmanager
    def transaction(self, *, counts: bool = True) -> Iterator[sqlite3.Connection]:
        """Lock the database among processes; all changes are kept, or none.

        A change that `counts` must not be forgotten: it is recorded in the file next to the folder, too.
        """
        with self.reading():
            with super().transaction() as db:
                self._check_seal()
                before = db.total_changes
                yield db
                # reading alone changes no seal
                changed = db.total_changes > before
                if changed:
                    self._seal(1 if counts else 0)
            if changed and counts:
                self._write_mark()

    def refuse(self, fault: str) -> ConfigError:
        """Return the error for a database that is not what it was, with its remedy."""
        return ConfigError(
            f"{fault} - at {self.where}; bring back the newest copy of this folder and of the .kept file next to it. A "
            f"reset would forget {self._lost}: treaty ledger reset {self.where}",
            public=f"its {self.what} cannot be used; it has the details",
        )

    def damaged(self, fault: str) -> ConfigError:
        return self.refuse(f"the {self.what} is damaged: {fault}")

    def _before_making(self, file: Path) -> None:
        """Refuse to make a database where there was one."""
        left = [
            path.name for path in file.parent.iterdir() if path != file and not path.name.startswith(f"{file.name}-")
        ]
        signs = [path.name for path in [kept_file(file.parent)] if path.exists()] + sorted(left)
        # signs are looked for first: another job that makes the database now writes it before anything else
        if signs and not (file.exists() and file.stat().st_size):
            raise self.refuse(f"the {self.what}: {file.name} is missing or empty, but {signs[0]} is there")

    def _fill(self) -> None:
        self.connection.execute("INSERT INTO state VALUES (1, ?, 0, x'')", (secrets.token_hex(16),))
        self._seal(0)

    def _check(self) -> None:
        """Refuse pages that do not fit together, other rows than were written, and an older copy.

        Called under the lock, so that no other job changes the database or the file next to it meanwhile.
        """
        # 0, unless a bit has flipped, by which pages are lost
        if self.connection.execute("PRAGMA auto_vacuum").fetchone()[0]:
            raise self.damaged("other tables than were made")
        for table in ("state", *self._tables):
            if self.connection.execute(f"PRAGMA integrity_check({table})").fetchall() != [("ok",)]:
                raise self.damaged("its pages do not fit together")
        self._check_seal()
        if self.folder is None:
            return
        name, changes, _ = self._state()
        kept = mark_of(self.folder)
        # made just now, perhaps by a job that a crash ended
        if kept is None and changes == 0:
            return
        if kept is None:
            raise self.refuse(f"the {self.what}: {kept_file(self.folder).name} is missing, which says how far it was")
        if kept.name != name:
            raise self.refuse(f"the {self.what} is another one than {kept_file(self.folder).name} says")
        if kept.changes > changes:
            raise self.refuse(f"the {self.what} is an older copy: {changes} of {kept.changes} changes")
        self._is_marked = True

    def _write_mark(self) -> None:
        """Write the number of changes next to the folder, after the commit, so that it is never ahead."""
        if self.folder is None:
            return
        # of two jobs, none writes an earlier state after a later one
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            name, changes, _ = self._state()
            write_file(kept_file(self.folder), Mark(name, changes), KEPT, owner_of(self.folder))
        finally:
            self.connection.execute("ROLLBACK")

    def _state(self) -> tuple[str, int, bytes]:
        rows = self.connection.execute("SELECT name, changes, seal FROM state").fetchall()
        if len(rows) != 1:
            raise self.damaged(f"it has {len(rows)} states")
        return rows[0]  # type: ignore[no-any-return]

    def _check_seal(self) -> None:
        name, changes, seal = self._state()
        if seal != self._digest(name, changes):
            raise self.damaged("its rows are not what was written")

    def _seal(self, more: int) -> None:
        name, changes, _ = self._state()
        changes += more
        self.connection.execute("UPDATE state SET changes = ?, seal = ?", (changes, self._digest(name, changes)))

    def _digest(self, name: str, changes: int) -> bytes:
        """Return SHA-256 over every value of the tables, and the kind of each."""
        owner = "" if self.folder is None else owner_of(self.folder)
        # form, owner and number of changes are under the seal, too: a row cannot be moved to another ledger
        digest = hashlib.sha256(repr((self._form, owner, name, changes)).encode())
        for table in self._tables:
            for row in self.connection.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid"):  # noqa: S608
                digest.update(repr((table, row)).encode())
        return digest.digest()


def kept_file(folder: Path) -> Path:
    """Return the file next to a database's folder that has its mark."""
    return folder.with_name(f"{folder.name}.kept")


def owner_of(folder: Path) -> str:
    """Return the party whose folder it is, by its name."""
    return unquote(folder.stem)


def mark_of(folder: Path) -> Mark | None:
    """Return the mark next to a database's folder; None if there is none."""
    file = kept_file(folder)
    return read_file(file, Mark, KEPT, owner_of(folder)) if file.exists() else None


def set_aside(folder: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> list[Path]:
    """Rename a database's folder, or a run log, and the files next to it; return the new paths."""
    moved = []
    for path in (folder, *(folder.with_name(f"{folder.name}.{what}") for what in ("kept", "key"))):
        if path.exists():
            away = path.with_name(f"{path.name}.until-{now():%Y%m%dT%H%M%SZ}")
            with explained(f"cannot move {path}"):
                path.rename(away)
            moved.append(away)
    if not moved:
        raise ConfigError(
            f"expected NAME.noise, .hints, .sides, .answers or .queries, or a run log, got nothing - at {folder}"
        )
    return moved
