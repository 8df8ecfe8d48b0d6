"""What a party must not forget: its privacy ledger, of all noisy releases about its rows, and its log of alignments.

An entry of the ledger is the cost of a release: `epsilon` of a mechanism that is local or pure, or `rho` of Gaussian
noise on sums (zero-concentrated differential privacy). It is written before the release, and refused if a person would
pay more than is allowed. A draw that is used again costs nothing: entries are identified by their draw, and noise is
computed from a secret key that lies next to the ledger.

**Per person** everything adds up: a person has a value in every column, a gradient in every tree and a row in every
sum. The sum of epsilons needs no delta; with a delta, an accountant of Rényi divergences is used as well, and the
smaller result counts. Releases may depend on earlier ones.

**Neighbours.** A value or label is replaced by another; a row in sums is added or removed. A ledger with entries of
both kinds counts rows in sums as replaced, too, which is four times the rho.

The ledger cannot count releases about another copy of the table, or under another name of a column. A ledger or log
that was deleted, emptied or replaced by an older copy is refused if anything shows that (`machine.database`).

References: Kairouz, Oh, Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015: randomised response
is the worst of all epsilon-private mechanisms. Bun, Steinke, TCC 2016 (arXiv 1605.02065): zCDP. Mironov, "Rényi
Differential Privacy", CSF 2017.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np

from treaty.errors import BudgetSpent, ConfigError
from treaty.files import Format, read_file, write_file
from treaty.machine.arrays import Bytes
from treaty.machine.database import SealedDatabase, owner_of
from treaty.privacy.discrete_gaussian import epsilon_of, renyi_epsilon

logger = logging.getLogger(__name__)

KEY_BYTES = 32
FILE = "ledger"
KEY_FILE = "key"
DEFAULT_DELTA = 1e-6
_FORM = Format("ledger", 2)
_KEY_FORM = Format("noise-key", 1)
_TABLE = """CREATE TABLE entries (draw TEXT PRIMARY KEY, job TEXT NOT NULL, mechanism TEXT NOT NULL, what TEXT NOT NULL,
    epsilon REAL NOT NULL CHECK (typeof(epsilon) = 'real' AND epsilon >= 0),
    rho REAL NOT NULL CHECK (typeof(rho) = 'real' AND rho >= 0), delta REAL NOT NULL)"""
ROUNDED = 1.0 + 1e-9  # ten times 0.1 must not exceed 1


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What one release costs."""

    # what distinguishes this draw of noise from all others
    draw: str
    # for people: which job (and model, see `model_job`), which noise, and on what
    job: str
    mechanism: str
    what: str
    # of a value, where the noise is on values; infinite for no noise
    epsilon: float = 0.0
    # of a row added or removed, where the noise is on sums
    rho: float = 0.0
    # that the job stated its cost with; 0 where it needs none
    delta: float = 0.0


@dataclass(frozen=True, slots=True)
class EpsilonLimits:
    """The most epsilon that a party lets a person pay: in one job, all attempts together, and in all; None: any."""

    job: float | None = None
    total: float | None = None


def model_job(job: str, model_id: str) -> str:
    """Return the ledger's name of a training: all fits of an estimator share the job's name."""
    return f"{job}, model {model_id[:8]}"


def job_of(entry: LedgerEntry) -> str:
    """Return the job of an entry without the model, as each attempt of a job may start another one."""
    return re.sub(r", model [0-9a-f]{8}$", "", entry.job)


def per_person(entries: Sequence[LedgerEntry], delta: float | None = None) -> float:
    """Return the epsilon that entries cost a person together.

    With a delta it is the smaller of the sum of epsilons and what an accountant finds at this delta. Without a delta it
    is the sum; Gaussian noise, which needs one, is taken at the largest delta that its jobs stated, but at most 1e-6:
    at a delta near 1 any noise costs nothing. Raises ConfigError when an accountant is needed and dp-accounting is not
    installed, or `delta` is out of range.
    """
    rho = math.fsum(entry.rho for entry in entries)
    added = math.fsum(entry.epsilon for entry in entries)
    if math.isinf(added) or (rho == 0.0 and delta is None):
        return added
    delta = delta or min(DEFAULT_DELTA, max(entry.delta for entry in entries))
    # Gaussian noise alone: zCDP converts to epsilon and delta directly
    if added == 0.0:
        return epsilon_of(rho, delta)
    found = renyi_epsilon([entry.epsilon for entry in entries if entry.epsilon > 0.0], 4.0 * rho, delta)
    return min(found, added) if rho == 0.0 else found


def cost(entries: Sequence[LedgerEntry], delta: float | None = None) -> str:
    """Describe what entries cost per value and per person; `delta` as in `per_person`."""
    values = sorted({entry.epsilon for entry in entries if entry.epsilon > 0.0})
    each = "none" if not values else f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
    rho = math.fsum(entry.rho for entry in entries)
    parts = [f"epsilon {each} per value"] if values or rho == 0.0 else []
    parts += [f"rho {rho:.3g} per row"] if rho > 0.0 else []
    used = delta or max((entry.delta for entry in entries if entry.rho > 0.0), default=None)
    total, added = per_person(entries, used), math.fsum(entry.epsilon for entry in entries)
    without_delta = rho == 0.0 and f"{total:.4g}" == f"{added:.4g}"
    person = f"{added:g} per person"
    if used is not None and not without_delta:
        kind = "row added or removed" if added == 0.0 else "person"
        person = f"epsilon {total:.4g} at delta {used:g} per {kind}"
    return f"{', '.join(parts)}; {person} over {len(entries)} release{'' if len(entries) == 1 else 's'}"


def summary(entries: Sequence[LedgerEntry]) -> str:
    """Describe what entries are about, by the first and the last of them."""
    first, last = entries[0].what, entries[-1].what
    return first if first == last else f"{first} to {last}"


class Key(msgspec.Struct):
    """The file of the noise's key: the ledger's name, by which both belong together, and 32 bytes."""

    ledger: str
    key: bytes


class Ledger:
    """A party's ledger, and the key of its noise.

    Both are kept in `folder`, readable by the owner alone, one for all jobs about a table (None: in memory, for this
    object). Constructor and methods raise ConfigError when the files cannot be used, or one is missing, damaged or an
    older copy: another ledger would forget what was paid, another key would be new noise for free. `limits` are the
    party's own: they hold for all that is spent, besides the limits of jobs.
    """

    def __init__(self, folder: Path | None, limits: EpsilonLimits | None = None) -> None:
        self._limits = limits or EpsilonLimits()
        self._db = SealedDatabase(
            folder, FILE, _FORM, {"entries": _TABLE}, what="privacy ledger",
            lost="what people have paid: they may then pay all of it once more",
        )  # fmt: skip
        self._where = self._db.where
        # what noise is computed from, so that a draw has the same noise in a later job
        self.key = secrets.token_bytes(KEY_BYTES) if folder is None else self._read_key(folder)

    def _read_key(self, folder: Path) -> bytes:
        """Return the noise's key, made with the first opening of a ledger."""
        file = folder / KEY_FILE
        with self._db.transaction() as db:
            name = self._db.name
            if not file.exists():
                if _entries(db):
                    raise self._db.refuse(f"the key of the noise, {KEY_FILE}, is missing")
                write_file(file, Key(name, secrets.token_bytes(KEY_BYTES)), _KEY_FORM, owner_of(folder), replace=False)
        found = read_file(file, Key, _KEY_FORM, owner_of(folder))
        if found.ledger != name or len(found.key) != KEY_BYTES:
            raise self._db.refuse(f"the key of the noise, {KEY_FILE}, is of another ledger")
        return found.key

    def entries(self) -> list[LedgerEntry]:
        """Return all entries, the oldest first."""
        with self._db.transaction() as db:
            return _entries(db)

    def spend(self, entries: Sequence[LedgerEntry], *, most: float | None = None, delta: float | None = None) -> None:
        """Enter releases before they are made: all of them, or none.

        Entries whose draw is in the ledger already cost nothing. Raises BudgetSpent, and then nothing may be released,
        when a person would pay more than `most` (None: no limit) for everything in the ledger, at `delta` as in
        `per_person`, or more than the party's own limits allow. The ledger is locked meanwhile, so that of two jobs
        that spend at once the second one finds what the first one has paid.
        """
        with self._db.transaction() as db:
            new = self._affordable(db, entries, most, delta)
            db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", map(astuple, new))

    def check(self, entries: Sequence[LedgerEntry], *, most: float | None = None, delta: float | None = None) -> None:
        """Refuse releases that would cost too much, as `spend` would, and enter nothing.

        Another job may spend meanwhile, so each release must still be entered before it is made.
        """
        with self._db.transaction() as db:
            self._affordable(db, entries, most, delta)

    def _affordable(
        self, db: sqlite3.Connection, entries: Sequence[LedgerEntry], most: float | None, delta: float | None
    ) -> list[LedgerEntry]:
        """Return the entries that are not in the ledger yet, if a person may pay for them, too."""
        for entry in entries:
            if not entry.epsilon >= 0.0 or not 0.0 <= entry.rho < math.inf:
                raise ConfigError(f"expected costs of 0 or more, got {entry.epsilon} and {entry.rho} - in the ledger")
        # one draw costs once, however often it is used; its most expensive entry counts
        wanted: dict[str, LedgerEntry] = {}
        for entry in entries:
            other = wanted.get(entry.draw)
            if other is None or (entry.epsilon, entry.rho) > (other.epsilon, other.rho):
                wanted[entry.draw] = entry
        # draws that were paid before are the same noise again, and free
        known = {draw for draw in wanted if db.execute("SELECT 1 FROM entries WHERE draw = ?", (draw,)).fetchone()}
        new = [entry for draw, entry in wanted.items() if draw not in known]
        if not new:
            return new
        before, own = _entries(db), self._limits
        jobs = set() if own.job is None else {job_of(entry) for entry in new}
        of_jobs = [entry for entry in before if jobs and job_of(entry) in jobs]
        # the job's limit on everything, then the party's own on everything and on one job
        for paid, limit, at, where in (
            (before, most, delta, ""),
            (before, own.total, None, " here (most_epsilon_total)"),
            (of_jobs, own.job, None, " in one job (most_epsilon)"),
        ):
            if limit is not None and not per_person(total := [*paid, *new], at) <= limit * ROUNDED:
                raise BudgetSpent(
                    f"a person may pay epsilon {limit:g}{where}, has paid {per_person(paid, at):g} and would pay "
                    f"{per_person(total, at):g} with {summary(new)} - at {self._where}"
                )
        return new


def read_ledger(path: Path) -> list[LedgerEntry]:
    """Return the entries of a ledger's file, or of the folder it is in; raise ConfigError if there is none."""
    folder = path if path.is_dir() else path.parent
    if not (folder / FILE).is_file() or (path != folder and path.name != FILE):
        raise ConfigError(f"expected a ledger, got no such file - at {folder / FILE if path == folder else path}")
    # opening checks it, and rolls a killed job's unfinished transaction back
    return Ledger(folder).entries()


def _entries(db: sqlite3.Connection) -> list[LedgerEntry]:
    return [LedgerEntry(*row) for row in db.execute("SELECT * FROM entries ORDER BY rowid")]


# ------------------------------------------------ the log of alignments: who asked, with how many and how similar ids
#
# A partner that aligns again and again with slightly changed ids can find out about single ids (Guo et al., Birds of a
# Feather Flock Together, USENIX Security 2022). So each party commits to its ids in every run under a key it keeps
# (`treaty.crypto.transfer.sodium.commit`); the partner records the commitment and compares it with all earlier ones.
# Comparing with the last one alone would not do: a run with another table in between would hide how little they differ.

MAX_RUNS = 20
"""Alignments that a partner may start within `WINDOW`, by default."""

WINDOW = timedelta(days=30)

RUNS_FILE = "runs"
_RUNS_FORM = Format("run-log", 1)
_RUNS_TABLES = {
    "runs": """CREATE TABLE runs (number INTEGER PRIMARY KEY, time TEXT NOT NULL, event TEXT NOT NULL,
    job TEXT NOT NULL, peer TEXT NOT NULL, own_size INTEGER NOT NULL, peer_size INTEGER NOT NULL,
    own_commitment BLOB NOT NULL,
    peer_commitment BLOB NOT NULL, changed INTEGER, common INTEGER)""",
    "key": "CREATE TABLE key (one INTEGER PRIMARY KEY, key BLOB NOT NULL)",
}


_ADD_RUN = "INSERT INTO runs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One entry of the log; sizes are numbers of ids, rounded up and padded, commitments bytes of uint8 (nodes, 32)."""

    # UTC, ISO 8601
    time: str
    # "started", which counts, is written before anything that depends on ids is sent; or "finished"
    event: str
    job: str
    peer: str
    own_size: int
    peer_size: int
    own_commitment: bytes = b""
    peer_commitment: bytes = b""
    # how many of a commitment's 256 nodes differ from the most similar earlier run of the peer: at least as many ids
    # have changed. None without an earlier run
    changed: int | None = None
    # of "finished": ids in common, if this party learned their number
    common: int | None = None


class RunLog:
    """A party's log of alignments in `folder`, which is made, with its key, if it does not exist.

    A partner may start `max_runs` alignments within `WINDOW`; a log with empty commitments only counts them. Several
    jobs of a party may use a log at once. Constructor and methods raise ConfigError when the log cannot be used, is
    damaged or was written by an earlier Treaty, or `max_runs` is below 1.
    """

    def __init__(self, folder: str | Path, *, max_runs: int = MAX_RUNS) -> None:
        if max_runs < 1:
            raise ConfigError(f"expected max_runs of at least 1, got {max_runs}")
        self.folder = Path(folder)
        self.max_runs = max_runs
        # files of JSON lines
        for earlier in (self.folder, self.folder.with_suffix(".jsonl")):
            if earlier.is_file():
                raise ConfigError(
                    f"an earlier Treaty wrote the run log {earlier}; this one cannot read it. To start a new log, "
                    f"which forgets how often partners aligned, run: treaty ledger reset {earlier}",
                    public="its run log cannot be used; it has the details",
                )
        self._db = SealedDatabase(
            self.folder, RUNS_FILE, _RUNS_FORM, _RUNS_TABLES, what="run log",
            lost="how often partners aligned, and with which ids",
        )  # fmt: skip
        with self._db.transaction() as db:
            db.execute("INSERT OR IGNORE INTO key VALUES (1, ?)", (secrets.token_bytes(32),))
            (self.key,) = db.execute("SELECT key FROM key").fetchone()

    def entries(self) -> list[RunEntry]:
        """Return all entries, the oldest first."""
        with self._db.transaction() as db:
            return _runs(db)

    def start(
        self, job: str, peer: str, own_size: int, peer_size: int, own_commitment: Bytes, peer_commitment: Bytes
    ) -> int | None:
        """Record that an alignment with a peer begins; return `RunEntry.changed`.

        Raises ConfigError when the peer has reached its limit, which is not recorded.
        """
        with self._db.transaction() as db:
            theirs = [entry for entry in _runs(db) if entry.peer == peer and entry.event == "started"]
            now = datetime.now(UTC)
            recent = [entry for entry in theirs if now - datetime.fromisoformat(entry.time) < WINDOW]
            if len(recent) >= self.max_runs:
                raise ConfigError(
                    f"{peer} has started {len(recent)} alignments within {WINDOW.days} days, the limit is "
                    f"{self.max_runs}; raise max_runs if that is meant - at {self.folder}",
                    public=f"its limit of {self.max_runs} alignments within {WINDOW.days} days is reached",
                )
            changed = nearest([entry.peer_commitment for entry in theirs], peer_commitment)
            mine, their = own_commitment.tobytes(), peer_commitment.tobytes()
            entry = RunEntry(now.isoformat(), "started", job, peer, own_size, peer_size, mine, their, changed)
            db.execute(_ADD_RUN, astuple(entry))
        if changed:
            logger.warning(
                "%s uses other ids than in earlier runs: at least %d differ from the most similar", peer, changed
            )
        return changed

    def finish(self, job: str, peer: str, own_size: int, peer_size: int, common: int | None) -> None:
        """Record that the alignment succeeded; `common` is None if this party did not learn it."""
        now = datetime.now(UTC).isoformat()
        with self._db.transaction() as db:
            db.execute(_ADD_RUN, astuple(RunEntry(now, "finished", job, peer, own_size, peer_size, common=common)))


def _runs(db: sqlite3.Connection) -> list[RunEntry]:
    return [RunEntry(*row[1:]) for row in db.execute("SELECT * FROM runs ORDER BY number")]


def nearest(before: Iterable[bytes], now: Bytes) -> int | None:
    """Return in how many nodes a commitment differs from the nearest of earlier ones; None without any."""
    earlier = (np.frombuffer(content, np.uint8).reshape(-1, 32) for content in set(before) if content)
    return min((count_changed(nodes, now) for nodes in earlier), default=None)


def count_changed(before: Bytes, now: Bytes) -> int:
    """Count the nodes, uint8 (nodes, 32), that differ (all for other sizes); at least as many ids have changed."""
    if before.shape != now.shape:
        return len(now)
    return int(np.count_nonzero((before != now).any(axis=1)))
