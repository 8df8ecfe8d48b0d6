"""Lattice hints that a party keeps between jobs, and its ledger of what its answers have leaked.

A *client* keeps the hints it received: they are large, and stay valid as long as tables, parties and seed do. A
*server* keeps what it made each hint with, and how much all the answers it ever gave about each of its columns may
have revealed beyond the sums.

A folder holds one SQLite database and a .npy file for each array, readable by the owner alone; several jobs of a party
may use it at once, also in different processes. Arrays are written through memory as rows arrive (`NewHint`), and kept
only once they are whole. Without the database, or with an older copy of it, leaks that have happened would be
forgotten: `machine.database` refuses that. An array that is missing or damaged is forgotten, and a new hint made.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import secrets
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from mmap import ACCESS_READ, ACCESS_WRITE, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.parameters import LEAK_LIMIT
from treaty.errors import ConfigError, CryptoError, LocalProtocolError
from treaty.files import Format
from treaty.machine.database import SealedDatabase

# bytes of an array without a folder that is held in memory; a larger one takes a temporary file
IN_MEMORY = 256 << 20


class NewHint(AbstractContextManager["NewHint", None]):
    """An array for a store, written in pieces; gone with this object, or at the end of a ``with``, unless it was kept.

    Memory and disk are taken as rows are written, not for all that a peer announces. Its file is opened without a
    buffer, which would not see what is written through the mapping.
    """

    def __init__(self, shape: tuple[int, ...], dtype: type[np.integer[Any]], file: FileIO | None, path: Path | None):
        self.array: NDArray[Any] = np.empty(shape if file is None else 0, dtype)
        self._file, self.path = file, path
        self._discard = weakref.finalize(self, _discard, file, path)
        if file is not None:
            # the form of numpy's .npy files
            header = {"descr": self.array.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            self._start = file.tell()
            file.truncate(self._start + math.prod(shape) * self.array.itemsize)  # takes no room yet
            self.array = map_array(file, ACCESS_WRITE)

    def write(self, first: int, rows: NDArray[Any]) -> None:
        """Write rows from the one numbered `first` on; ConfigError if the disk has no room for them."""
        if self._file is not None:
            row = math.prod(self.array.shape[1:]) * self.array.itemsize
            try:
                # reserve the disk's space first: on a full disk, writing to a mapped file would end the process
                if rows.size and hasattr(os, "posix_fallocate"):  # macOS has none
                    os.posix_fallocate(self._file.fileno(), self._start + first * row, len(rows) * row)
            except OSError as error:
                raise ConfigError(
                    f"cannot keep a hint: {error.strerror} - at {self.path or tempfile.gettempdir()}",
                    public="it has no room for a hint of the lattice map, or for masked bins",
                ) from None
        self.array[first : first + len(rows)] = rows

    def __exit__(self, *_: object) -> None:
        self._discard()

    def finish(self) -> tuple[NDArray[Any], bytes]:
        """Return the array, read-only and on the disk, and its file's digest."""
        self.array.flags.writeable = False
        if self._file is None:
            return self.array, b""
        os.fsync(self._file.fileno())
        return map_array(self._file, ACCESS_READ), digest_of(self._file)


def temporary_hint(shape: tuple[int, ...], dtype: type[np.integer[Any]]) -> NewHint:
    """Return a new array that is gone with this process: in memory, or in a temporary file beyond `IN_MEMORY` bytes."""
    large = math.prod(shape) * np.dtype(dtype).itemsize > IN_MEMORY
    return NewHint(shape, dtype, tempfile.TemporaryFile(buffering=0) if large else None, None)


def _discard(file: FileIO | None, path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)  # no such file once the array was kept, which renames it
    if file is not None:
        file.close()


def map_array(file: FileIO, access: int = ACCESS_READ) -> NDArray[Any]:
    """Map the array of a .npy file into memory; the file may be closed then."""
    file.seek(0)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    start = file.tell()
    return np.frombuffer(mmap(file.fileno(), 0, access=access), dtype, math.prod(shape), start).reshape(shape)


def digest_of(file: FileIO) -> bytes:
    """Return the SHA-256 of a whole file."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").digest()


KEPT = 16  # newest hints that a server keeps; a client keeps as many of each peer, while they take no more bytes than
KEPT_BYTES = 16 << 30

_FORM = Format("hints", 3)
_NAME = re.compile(r"array-[0-9a-f]{32}\.npy(\.part)?")
_ENTER = "INSERT OR REPLACE INTO leaks (name, spent) VALUES (?, ?)"
_UNUSABLE = "its stored hint for the lattice map cannot be used; it has the details"
_TABLES = {
    "hints": """CREATE TABLE hints (id INTEGER PRIMARY KEY, peer TEXT NOT NULL, binding BLOB NOT NULL,
       seed BLOB NOT NULL, terms BLOB NOT NULL, name TEXT NOT NULL, digest BLOB NOT NULL, UNIQUE (peer, terms))""",
    "own": """CREATE TABLE own (id INTEGER PRIMARY KEY, binding BLOB NOT NULL UNIQUE, nonce BLOB NOT NULL,
       seed BLOB NOT NULL, name TEXT NOT NULL, digest BLOB NOT NULL)""",
    "leaks": "CREATE TABLE leaks (name TEXT PRIMARY KEY, spent REAL NOT NULL CHECK (spent >= 0))",
}


class HintStore(AbstractContextManager["HintStore", None]):
    """A party's store of hints and leaks, a context manager; several threads may use it.

    The folder is made, for the owner alone, if it does not exist; with None nothing outlives the object, not even the
    ledger. Every method raises ConfigError if the store cannot be read or written, and LocalProtocolError in a process
    forked from the one that opened it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._process, self._lock = folder, os.getpid(), threading.RLock()
        self._arrays: dict[str, NDArray[Any]] = {}  # by name, when there is no folder
        self._db = SealedDatabase(
            folder, "hints.sqlite", _FORM, _TABLES, what="store of hints",
            lost="what answers about the table have leaked: they may then leak as much once more",
        )  # fmt: skip
        self._where = self._db.where
        with self._transaction() as db:
            self._sweep(db)

    def close(self) -> None:
        """Close the database; arrays it returned stay valid."""
        with self._lock:
            self._db.connection.close()
            self._arrays.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, wanted: Mapping[str, bytes]) -> tuple[bytes, dict[str, bytes]] | None:
        """Return the seed of all peers' kept hints, and peer -> binding; None if one is missing or seeds differ.

        `wanted` maps each peer to its terms, a digest of all that its hint must be made for.
        """
        # one seed serves all servers of a job, so hints of different seeds cannot be used together
        seeds, bindings = set(), {}
        with self._transaction() as db:
            for peer, terms in wanted.items():
                rows = db.execute("SELECT seed, binding FROM hints WHERE peer = ? AND terms = ?", (peer, terms))
                for seed, bindings[peer] in rows:
                    seeds.add(seed)
        return (seeds.pop(), bindings) if len(seeds) == 1 and len(bindings) == len(wanted) else None

    def keep_hint(self, peer: str, binding: bytes, seed: bytes, terms: bytes, new: NewHint) -> NDArray[np.int16]:
        """Keep a hint, replacing one of the same peer and terms; return it, read-only."""
        array, digest = new.finish()
        with new, self._transaction() as db:
            gone = db.execute("SELECT name FROM hints WHERE peer = ? AND terms = ?", (peer, terms)).fetchall()
            # before the new one is entered: no two may have the same peer and terms
            self._forget(db, gone)
            db.execute(
                "INSERT INTO hints (peer, binding, seed, terms, name, digest) VALUES (?, ?, ?, ?, ?, ?)",
                (peer, binding, seed, terms, self._place(new, array), digest),
            )
            # all but the newest of this peer are forgotten
            kept = db.execute("SELECT name FROM hints WHERE peer = ? ORDER BY id DESC", (peer,)).fetchall()
            within = int(np.searchsorted(np.cumsum([self._bytes(name) for (name,) in kept]), KEPT_BYTES, "right"))
            gone += kept[max(1, min(KEPT, within)) :]
            self._forget(db, gone)
        self._remove(gone)
        return array

    def hint(self, peer: str, binding: bytes) -> NDArray[np.int16]:
        """Return a kept hint, int16 (rows, D, N), read-only.

        ConfigError if it is unknown, or its file missing or damaged; then it is forgotten.
        """
        with self._transaction() as db:
            found = db.execute("SELECT name, digest FROM hints WHERE peer = ? AND binding = ?", (peer, binding))
            row = found.fetchone()
        if row is None:
            raise ConfigError(f"no hint of {peer} with this binding is stored - at {self._where}", public=_UNUSABLE)
        return self._read(*row)

    def forget_hint(self, peer: str, binding: bytes) -> None:
        """Forget a hint that gave wrong sums, if it is kept."""
        with self._transaction() as db:
            gone = db.execute("SELECT name FROM hints WHERE peer = ? AND binding = ?", (peer, binding)).fetchall()
            self._forget(db, gone)
        self._remove(gone)

    def keep_own(self, binding: bytes, nonce: bytes, seed: bytes, random: NDArray[np.int16]) -> None:
        """Keep what a hint was made with, `random` being the r_S, (rows, N) of -1, 0, 1; forget all but the newest 16.

        CryptoError if a hint of this binding is kept, or `random` holds other numbers.
        """
        if random.size and (random.min() < -1 or random.max() > 1):
            raise CryptoError("expected numbers from -1 to 1 - in the randomness of a hint")
        with self.new_hint(random.shape, np.int8) as new:
            new.write(0, random)
            array, digest = new.finish()
            with self._transaction() as db:
                if db.execute("SELECT 1 FROM own WHERE binding = ?", (binding,)).fetchone():
                    raise CryptoError("expected a new hint, got one that is stored already")
                db.execute(
                    "INSERT INTO own (binding, nonce, seed, name, digest) VALUES (?, ?, ?, ?, ?)",
                    (binding, nonce, seed, self._place(new, array), digest),
                )
                older = "SELECT name FROM own ORDER BY id DESC LIMIT -1 OFFSET ?"
                gone = db.execute(older, (KEPT,)).fetchall()
                self._forget(db, gone)
        self._remove(gone)

    def own(self, binding: bytes) -> tuple[bytes, bytes, NDArray[np.int16]] | None:
        """Return nonce, seed and the r_S, int16 (rows, N), of a hint; None if it is not kept.

        ConfigError if its file is missing or damaged; then it is forgotten.
        """
        with self._transaction() as db:
            row = db.execute("SELECT nonce, seed, name, digest FROM own WHERE binding = ?", (binding,)).fetchone()
        return (row[0], row[1], self._read(*row[2:]).astype(np.int16)) if row else None

    def reserve(self, leaks: Mapping[str, float]) -> None:
        """Enter leaks, column -> total variation, before the answers that cause them; after a crash they stay.

        CryptoError, and nothing is entered, if with all earlier ones they would exceed `LEAK_LIMIT`, or if one is
        negative or not finite. The limit is on all columns named here together: give a column without answers as 0.
        """
        _check(leaks)
        with self._transaction(counts=True) as db:
            before = _spent(db, leaks)
            past, total = math.fsum(before.values()), math.fsum([*before.values(), *leaks.values()])
            # the comparison is exact; entries are rounded by 2^-94 at most, as they stay below 2^-40, so that after a
            # billion entries a sum is off by 2^-64
            if math.fsum([*before.values(), *leaks.values(), -LEAK_LIMIT]) > 0:
                raise CryptoError(
                    "the answers about this table have reached the limit of what they may leak together (2^-40): "
                    f"{past / LEAK_LIMIT:.1%} of it so far, {total / LEAK_LIMIT:.1%} with these; "
                    'keep on with encryption="ou", whose sums are open - fewer fractional_bits make later answers leak '
                    "less, but take nothing back",
                    public="its answer budget for the lattice map is used up",
                )
            db.executemany(_ENTER, {name: before[name] + leak for name, leak in leaks.items()}.items())

    def give_back(self, leaks: Mapping[str, float]) -> None:
        """Take back what was reserved and will not be used; never below zero. Errors as of `reserve`."""
        _check(leaks)
        with self._transaction() as db:
            before = _spent(db, leaks)
            db.executemany(_ENTER, {name: max(before[name] - leak, 0.0) for name, leak in leaks.items()}.items())

    def spent(self, columns: Iterable[str]) -> float:
        """Add up what was reserved for columns."""
        with self._transaction() as db:
            return math.fsum(_spent(db, columns).values())

    @property
    def room(self) -> int:
        """Free bytes where hints are kept."""
        return shutil.disk_usage(self._folder or tempfile.gettempdir()).free

    def _bytes(self, name: str) -> int:
        if self._folder is None:
            return self._arrays[name].nbytes
        path = self._folder / name
        return path.stat().st_size if path.exists() else 0

    def _sweep(self, db: sqlite3.Connection) -> None:
        """Remove what crashes left: arrays without a record that no process is writing."""
        kept = {name for (name,) in db.execute("SELECT name FROM hints UNION SELECT name FROM own")}
        for path in self._folder.iterdir() if self._folder else ():
            if _NAME.fullmatch(path.name) and path.name not in kept:
                with path.open("rb") as file:
                    # locked by the process that is writing it
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    path.unlink()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"cannot use the store of hints: {error} - at {self._where}", public=_UNUSABLE) from None

    @contextmanager
    def _transaction(self, *, counts: bool = False) -> Iterator[sqlite3.Connection]:
        """Lock the database for this thread and process; `counts` as of `SealedDatabase.transaction`."""
        if os.getpid() != self._process:
            raise LocalProtocolError("a hint store was inherited through a fork; open another one in this process")
        with self._lock, self._translated(), self._db.transaction(counts=counts) as db:
            yield db

    def _forget(self, db: sqlite3.Connection, names: list[tuple[str]]) -> None:
        if names:
            db.executemany("DELETE FROM hints WHERE name = ?", names)
            db.executemany("DELETE FROM own WHERE name = ?", names)

    def new_hint(self, shape: tuple[int, ...], dtype: type[np.integer[Any]] = np.int16) -> NewHint:
        """Return a new array, such as (rows, D, N), to be written as it arrives and given to `keep_hint`."""
        if self._folder is None:
            with self._translated():
                return temporary_hint(shape, dtype)
        path = self._folder / f"array-{secrets.token_hex(16)}.npy.part"
        # in a transaction, so that no other process sweeps the file away before it is locked
        with self._transaction():
            file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b", buffering=0)
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or the process ends
        with self._translated():
            return NewHint(shape, dtype, file, path)

    def _place(self, new: NewHint, array: NDArray[Any]) -> str:
        """Move an array to its final place, in one transaction with its record; return its name."""
        if new.path is None:
            name = secrets.token_hex(16)
            self._arrays[name] = array
            return name
        final = new.path.with_suffix("")
        new.path.replace(final)
        return final.name

    def _read(self, name: str, digest: bytes) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is not None:
            return array
        # a damaged hint would give wrong sums: checked before each job
        path, fault = Path(self._where, name), "damaged"
        with self._translated():
            try:
                with path.open("rb", buffering=0) as file:
                    if digest_of(file) == digest:
                        return map_array(file)
            except FileNotFoundError:
                fault = "missing"
        with self._transaction() as db:
            self._forget(db, [(name,)])
        self._remove([(name,)])
        raise ConfigError(
            f"a hint's file is {fault}: {path}; start again, and a new hint will be made", public=_UNUSABLE
        )

    def _remove(self, names: Iterable[tuple[str]]) -> None:
        """Remove arrays that have no record any more; mappings of them stay valid."""
        for (name,) in names:
            self._arrays.pop(name, None)
            if self._folder is not None:
                (self._folder / name).unlink(missing_ok=True)


class Reservation:
    """Leaks of answers, reserved ahead in a store for `step` vectors at a time; `leaks` are those of one vector."""

    def __init__(self, store: HintStore, leaks: Mapping[str, float], step: int) -> None:
        self._store, self._leaks, self._step = store, dict(leaks), step
        self._reserved = self._used = 0

    def use(self, vectors: int) -> None:
        """Reserve the leak of answers about some more vectors, before they are sent."""
        # many at a time, so that the ledger is written seldom
        if self._used + vectors > self._reserved:
            more = max(self._step, vectors)
            try:
                self._store.reserve({name: more * leak for name, leak in self._leaks.items()})
            except CryptoError:
                # the rest of the budget may suffice for these alone
                more = vectors
                self._store.reserve({name: more * leak for name, leak in self._leaks.items()})
            self._reserved += more
        self._used += vectors

    def close(self) -> None:
        """Give back what was reserved and not used."""
        unused, self._reserved = self._reserved - self._used, self._used
        if unused:
            self._store.give_back({name: unused * leak for name, leak in self._leaks.items()})


def _check(leaks: Mapping[str, float]) -> None:
    for leak in leaks.values():
        if not 0 <= leak < math.inf:
            raise CryptoError(f"expected leaks of at least 0, got {leak} - in the ledger of the lattice map")


def _spent(db: sqlite3.Connection, columns: Iterable[str]) -> dict[str, float]:
    entries = dict(db.execute("SELECT name, spent FROM leaks"))
    return {name: entries.get(name, 0.0) for name in columns}
