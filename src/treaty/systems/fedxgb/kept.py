"""What users and edge servers keep on disk, so that a second run learns no more than the first.

An edge server keeps the cohorts of its domain: sums of an interrupted run count when the training resumes, and the file
is written before a sum is opened. Where it holds shares of rows, it keeps a digest of each user's. A user keeps a
digest of its rows and the seed of their shares. Sums and hidden trees are thus of the first run's rows alone: numbers
are packed for as many rows as there were then, and new rows would be led down all finished trees.

An edge server also counts the rows of each user that a hidden model has predicted, over all runs: what a user learns of
the model grows with each of them. Rows count before anything is computed, again each time they are asked for, and even
if the prediction fails. One refusal is enough: a user needs the shares of all edge servers.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.files import Format, read_file, write_file
from treaty.machine.database import SealedDatabase
from treaty.models.checkpoints import Keeper
from treaty.systems.fedxgb.cohorts import Cohorts, Rules, UserStanding

_DOMAIN, _ROWS = Format("cohorts", 3), Format("row-digest", 1)
_QUERIES = Format("query-record", 1)
ROUNDS = 2  # rounds begun by when the server has kept one, so that files of earlier models are of no more use
COHORTS, ROWS = "cohorts", "digest"  # kinds of files


class _KeptDomain(msgspec.Struct):
    """The users of the first sum, independent cohorts, groups, the last cohort, users' calls and losses, digests."""

    model_id: str
    users: list[str]
    opened: list[list[str]]
    groups: list[list[str]]
    running: list[str]
    called: dict[str, tuple[int, int]]
    shares: dict[str, bytes]


class DomainFile:
    """An edge server's file about its domain; without a `keeper` nothing is kept.

    `standings` are read as the file is written. `shares` has the `digest` of each user's shares of its rows.
    """

    def __init__(self, keeper: Keeper | None, owner: str, model_id: str, standings: Mapping[str, UserStanding]) -> None:
        self.shares: dict[str, bytes] = {}
        self._path = None if keeper is None else keeper.beside(model_id, COHORTS)
        self._keeper, self._owner, self._model_id, self._standings = keeper, owner, model_id, standings

    def write(self, cohorts: Cohorts) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = _KeptDomain(
            self._model_id,
            sorted(cohorts.users or ()),
            [sorted(cohort) for cohort in cohorts.opened.independent],
            [sorted(group) for group in cohorts.groups],
            sorted(cohorts.running),
            {name: (standing.called, standing.lost) for name, standing in self._standings.items()},
            self.shares,
        )
        write_file(self._path, kept, _DOMAIN, self._owner)

    def read(self, rules: Rules, rng: np.random.Generator) -> Cohorts:
        """Return the cohorts of the training that resumes, and set standings; ConfigError if they are not known."""
        path = self._path
        kept = read_file(path, _KeptDomain, _DOMAIN, self._owner) if path is not None and path.exists() else None
        if kept is None or kept.model_id != self._model_id:
            got = "none" if kept is None else f"those of model {kept.model_id[:8]}"
            raise ConfigError(
                f"cannot resume: expected the cohorts whose sums were opened for model {self._model_id[:8]}, got {got} "
                f"- at {path or self._owner}; bring the file back. A fresh training, without --resume or the server's "
                "checkpoint, opens sums of the same rows over other cohorts: with the earlier sums, the server "
                "may find sums of single users",
                public="it does not know whose sums were opened before",
            )
        self.shares = kept.shares
        for name, (called, lost) in kept.called.items():
            if name in self._standings:
                self._standings[name].called, self._standings[name].lost = called, lost
        return Cohorts.known(rules, rng, kept.users, kept.opened, kept.groups, kept.running)

    def round_began(self, rounds: int) -> None:
        """Drop files of earlier models once the server must have kept a round."""
        if self._keeper is not None and rounds == ROUNDS:
            self._keeper.keep_only(self._model_id)


def digest(pieces: Iterable[NDArray[np.uint64]]) -> bytes:
    """Return SHA-256 of a user's shares of its rows, however they are cut."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(np.ascontiguousarray(piece).reshape(-1).data)
    return found.digest()


class _KeptRows(msgspec.Struct):
    """A user's seed, and HMAC-SHA256 of its rows under it."""

    model_id: str
    seed: bytes
    rows: bytes


def seed_of_rows(keeper: Keeper | None, owner: str, model_id: str, rows: bytes, *, resumed: bool) -> bytes:
    """Return the secret seed, 32 bytes, of the shares of a user's rows, given their fingerprint.

    Raises ConfigError if the training is `resumed`, and had other rows of this user or none.
    """
    path = None if keeper is None else keeper.beside(model_id, ROWS)
    if resumed:
        kept = read_file(path, _KeptRows, _ROWS, owner) if path is not None and path.exists() else None
        if kept is None or kept.model_id != model_id:
            raise ConfigError(
                f"{owner}: cannot resume: it has no record of its rows of the first run, because it took no part or "
                f"the file is gone - at {path or owner}; it can take part in a fresh training",
                public="it cannot resume: it has no record of its rows of the first run",
            )
        if not hmac.compare_digest(kept.rows, hmac.digest(kept.seed, rows, "sha256")):
            raise ConfigError(
                f"{owner}: cannot resume: the training rows, labels or weights are not those of the first run, for "
                f"which sums were laid out; bring them back - at {path}",
                public="it cannot resume: its training rows have changed",
            )
        return kept.seed
    # drawn once per training: shares made again when it resumes are the same, and so are their digests
    seed = secrets.token_bytes(32)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, _KeptRows(model_id, seed, hmac.digest(seed, rows, "sha256")), _ROWS, owner)
    return seed


def row_key(seed: bytes, encoded: NDArray[np.int64], holders: Sequence[str]) -> bytes:
    """Return the key of the randomness with which rows are shared: another one for other rows, or other holders."""
    # the shape as well: the same bytes in another shape are other rows
    head = msgspec.msgpack.encode([encoded.shape, list(holders)])
    return hmac.digest(seed, hashlib.sha256(head).digest() + np.ascontiguousarray(encoded).tobytes(), "sha256")


_TABLE = """CREATE TABLE asked (model TEXT NOT NULL, user TEXT NOT NULL,
    rows INTEGER NOT NULL CHECK (typeof(rows) = 'integer' AND rows >= 0), PRIMARY KEY (model, user))"""


def queries_folder(store: Path, party: str) -> Path:
    """Return where an edge server keeps its count."""
    return store / f"{party}.queries"


class QueryRecord:
    """How many rows of each user each model has predicted, by an edge server's count.

    It is kept in `folder`, readable by the owner alone (None: in memory, for this object). Constructor and methods
    raise ConfigError if the files cannot be used, or one is missing, damaged or an older copy (`machine.database`).
    """

    def __init__(self, folder: Path | None) -> None:
        self._db = SealedDatabase(
            folder, "queries", _QUERIES, {"asked": _TABLE}, what="record of queries",
            lost="how many rows users have had predicted: they may then ask for as many once more",
        )  # fmt: skip

    def asked(self, model_id: str) -> dict[str, int]:
        """Return how many rows users have had predicted by a model."""
        with self._db.transaction() as db:
            return _asked(db, model_id)

    def count(self, model_id: str, rows: Mapping[str, int], most: int) -> list[str]:
        """Count users' rows before anything is computed for them; return the users whose rows are counted.

        Users who would exceed `most`, together with what runs at the same time have counted, are left out.
        """
        with self._db.transaction() as db:
            before = _asked(db, model_id)
            total = {user: before.get(user, 0) + more for user, more in rows.items()}
            # in one transaction with the reading: two runs at a time cannot both fit
            fit = {user: asked for user, asked in total.items() if asked <= most}
            _write(db, model_id, fit)
        return list(fit)

    def add(self, model_id: str, rows: Mapping[str, int]) -> None:
        """Add rows that were counted elsewhere, or (negative) take back rows that were counted and not predicted."""
        with self._db.transaction() as db:
            before = _asked(db, model_id)
            _write(db, model_id, {user: max(0, before.get(user, 0) + more) for user, more in rows.items()})
            db.execute("DELETE FROM asked WHERE rows = 0")


def _write(db: sqlite3.Connection, model_id: str, rows: Mapping[str, int]) -> None:
    db.executemany(
        "INSERT INTO asked VALUES (?, ?, ?) ON CONFLICT (model, user) DO UPDATE SET rows = excluded.rows",
        [(model_id, user, asked) for user, asked in rows.items()],
    )


def _asked(db: sqlite3.Connection, model_id: str) -> dict[str, int]:
    return dict(db.execute("SELECT user, rows FROM asked WHERE model = ?", (model_id,)).fetchall())
