"""A party's SQLite database that is refused where it is damaged, emptied, deleted or rolled back.

What a party has paid or leaked must not be forgotten without a word. So a database has a name, drawn when it is made,
and a number that each change raises; both also stand in a small file beside its folder, ``FOLDER.kept``, and in the
models trained with it. Where these are ahead of the database, or it is gone, it is refused. All rows of its tables are
under a SHA-256 that is checked before and renewed after every transaction, for SQLite itself has no checksum. It keeps
a rollback journal: of a log written ahead SQLite drops what is damaged, and the commits in it, in silence.

Who deletes folder, ``.kept`` and models together is not noticed; nor is who may write them and means to.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

import msgspec

from treaty.errors import ConfigError
from treaty.files import Format, read_file, write_file

KEPT = Format("kept", 1)
_WAIT = 60.0  # seconds for other processes to release the database, which takes milliseconds
_STATE = """CREATE TABLE state (one INTEGER PRIMARY KEY, name TEXT NOT NULL, changes INTEGER NOT NULL,
    seal BLOB NOT NULL)"""


@contextmanager
def translated(damaged: Callable[[str], ConfigError], unusable: Callable[[Exception], ConfigError]) -> Iterator[None]:
    """Raise SQLite's errors, and those of files, as errors that say what to do; none quotes what cannot be read."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if type(error) is sqlite3.DatabaseError:  # pages that make no sense; others are full disks, locks and such
            raise damaged(str(error)) from None
        if type(error) is sqlite3.OperationalError and not hasattr(error, "sqlite_errorcode"):
            raise damaged("a text is not UTF-8") from None  # Python's own error, which quotes it
        raise unusable(error) from None
    except UnicodeDecodeError:
        raise damaged("a text is not UTF-8") from None
    except (sqlite3.Error, OSError) as error:
        raise unusable(error) from None


class Mark(msgspec.Struct, frozen=True):
    """Which database it was, and how many changes it had at least."""

    name: str
    changes: int


class Database:
    """A database in a folder of its own, readable by the owner alone; in memory where `folder` is None.

    `tables` are their SQL by name: those of `sealed` are small, and all their rows are under the seal; `what` says in
    words what is kept, `lost` what beginning anew would forget. A folder named ``PARTY.something`` is the party's.
    """

    def __init__(
        self,
        folder: Path | None,
        file: str,
        form: Format,
        tables: Mapping[str, str],
        sealed: tuple[str, ...],
        *,
        what: str,
        lost: str,
    ) -> None:
        self.folder, self._form, self._tables, self._sealed = folder, form, tables, sealed
        self._what, self._lost = what, lost
        self.where = str(folder or f"{what} in memory")
        self._file = None if folder is None else folder / file
        with self._translated():
            if folder is not None and self._file is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._check_new(folder, self._file)
                self._make(self._file)
            self.connection = sqlite3.connect(
                self._file or ":memory:", timeout=_WAIT, isolation_level=None, check_same_thread=False
            )
            weakref.finalize(self, self.connection.close)
            try:
                self._open()
            except BaseException:
                self.connection.close()
                raise

    @property
    def name(self) -> str:
        """The name it was given when it was made."""
        return str(self._state(self.connection)[0])

    @contextmanager
    def transaction(self, *, counts: bool = True) -> Iterator[sqlite3.Connection]:
        """Hold the database exclusively, among processes; all that is changed meanwhile is kept, or nothing of it.

        A change that `counts` is one that must not be forgotten: the file beside the folder then says so.
        """
        with self._translated():
            changed = False
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                self._check_seal()
                before = self.connection.total_changes
                yield self.connection
                changed = self.connection.total_changes > before
                if changed:
                    self._seal(1 if counts else 0)
                    self.connection.execute("COMMIT")
            finally:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
            if changed and counts:
                self._vouch()

    def refuse(self, fault: str) -> ConfigError:
        """Return the error for a database that cannot be what it was, with what to do."""
        return ConfigError(
            f"{fault} - at {self.where}; bring back the newest copy of this folder and of the .kept file beside it. To "
            f"begin anew is to forget {self._lost}: treaty ledger reset {self.where}",
            public=f"its {self._what} cannot be used; it has the details",
        )

    def _translated(self) -> AbstractContextManager[None]:
        return translated(lambda fault: self.refuse(f"the {self._what} is damaged: {fault}"), self._unusable)

    def _unusable(self, error: Exception) -> ConfigError:
        public = f"its {self._what} cannot be used; it has the details"
        return ConfigError(f"cannot use the {self._what}: {error} - at {self.where}", public=public)

    def _check_new(self, folder: Path, file: Path) -> None:
        """Refuse to make a database where there was one."""
        left = [path.name for path in folder.iterdir() if path != file and not path.name.startswith(f"{file.name}-")]
        signs = [path.name for path in [kept_file(folder)] if path.exists()] + sorted(left)
        # looked for first: another job that makes the database now writes it before anything else
        if signs and not (file.exists() and file.stat().st_size):
            raise self.refuse(f"the {self._what}: {file.name} is missing or empty, but {signs[0]} is there")

    @staticmethod
    def _make(file: Path) -> None:
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:  # never opened here otherwise: closing it would drop this process's locks on it
            pass

    def _open(self) -> None:
        db = self.connection
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "cell_size_check = ON"):
            db.execute(f"PRAGMA {pragma}")
        db.execute("BEGIN IMMEDIATE")
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            made = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] > 0
            if not made and not version:
                for sql in (_STATE, *self._tables.values()):
                    db.execute(sql)
                db.execute(f"PRAGMA user_version = {self._form.version}")
                db.execute("INSERT INTO state VALUES (1, ?, 0, x'')", (secrets.token_hex(16),))
                self._seal(0)
            elif version != self._form.version:
                raise ConfigError(
                    f"expected the {self._what} to be of version {self._form.version}, got {version} - at {self.where}"
                )
            self._check_whole()
            vouched = self._check_kept()
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        if not vouched:
            self._vouch()

    def _check_whole(self) -> None:
        """Refuse another schema, pages that do not fit together, and other rows than were written."""
        db = self.connection
        written = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        vacuum = db.execute("PRAGMA auto_vacuum").fetchone()[0]  # 0, but for a flipped bit, by which pages are lost
        if written != {_STATE, *self._tables.values()} or vacuum:
            raise self.refuse(f"the {self._what} is damaged: expected other tables")
        for table in ("state", *self._sealed):
            if db.execute(f"PRAGMA integrity_check({table})").fetchall() != [("ok",)]:
                raise self.refuse(f"the {self._what} is damaged")
        self._check_seal()

    def _check_kept(self) -> bool:
        """Refuse a database that others know to have been ahead, or another one in its place.

        While it is held, so that no other job changes both meanwhile. Returns False where none knows of it yet.
        """
        if self.folder is None:
            return True
        mark, kept = self._mark(), mark_of(self.folder)
        if kept is None and mark.changes == 0:  # made just now, perhaps by a job that a crash ended
            return False
        if kept is None:
            raise self.refuse(f"the {self._what}: {kept_file(self.folder).name} is missing, which says how far it was")
        if kept.name != mark.name:
            raise self.refuse(f"the {self._what} is another one than {kept_file(self.folder).name} says")
        if kept.changes > mark.changes:
            raise self.refuse(f"the {self._what} is an older copy: {mark.changes} of {kept.changes} changes")
        return True

    def _vouch(self) -> None:
        """Write beside the folder how far the database is; after the commit, so that it is never ahead."""
        if self.folder is None:
            return
        self.connection.execute("BEGIN IMMEDIATE")  # of two jobs, none writes an earlier state after a later one
        try:
            write_file(kept_file(self.folder), self._mark(), KEPT, owner_of(self.folder))
        finally:
            self.connection.execute("ROLLBACK")

    def _mark(self) -> Mark:
        name, changes, _ = self._state(self.connection)
        return Mark(name, changes)

    def _state(self, db: sqlite3.Connection) -> tuple[str, int, bytes]:
        rows = db.execute("SELECT name, changes, seal FROM state").fetchall()
        if len(rows) != 1:
            raise self.refuse(f"the {self._what} is damaged")
        return rows[0]  # type: ignore[no-any-return]

    def _check_seal(self) -> None:
        name, changes, seal = self._state(self.connection)
        if seal != self._digest(name, changes):
            raise self.refuse(f"the {self._what} is damaged")

    def _seal(self, more: int) -> None:
        name, changes, _ = self._state(self.connection)
        changes += more
        seal = self._digest(name, changes)
        self.connection.execute("UPDATE state SET changes = ?, seal = ?", (changes, seal))

    def _digest(self, name: str, changes: int) -> bytes:
        """Return SHA-256 over every value of the sealed tables, and the kind of each."""
        owner = "" if self.folder is None else owner_of(self.folder)
        digest = hashlib.sha256(repr((self._form, owner, name, changes)).encode())
        for table in self._sealed:
            for row in self.connection.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid"):  # noqa: S608
                digest.update(repr((table, row)).encode())
        return digest.digest()


def kept_file(folder: Path) -> Path:
    """Return the file beside a database's folder that says how far it is."""
    return folder.with_name(f"{folder.name}.kept")


def owner_of(folder: Path) -> str:
    """Return whose folder it is, by its name."""
    return unquote(folder.stem)


def mark_of(folder: Path) -> Mark | None:
    """Return what the file beside a database's folder says; None where there is none."""
    file = kept_file(folder)
    return read_file(file, Mark, KEPT, owner_of(folder)) if file.exists() else None


def set_aside(folder: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> list[Path]:
    """Move a database's folder, or a run log, and what lies beside it away; return where they are now."""
    moved = []
    for path in (folder, *(folder.with_name(f"{folder.name}.{what}") for what in ("kept", "key"))):
        if path.exists():
            away = path.with_name(f"{path.name}.until-{now():%Y%m%dT%H%M%SZ}")
            try:
                path.rename(away)
            except OSError as error:
                raise ConfigError(f"cannot move {path}: {error.strerror}") from None
            moved.append(away)
    if not moved:
        raise ConfigError(
            f"expected NAME.noise, NAME.hints, NAME.sides, NAME.queries, or a run log, got nothing - at {folder}"
        )
    return moved
