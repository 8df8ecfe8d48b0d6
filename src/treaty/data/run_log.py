"""The log a party keeps of its alignments: who asked, with how many ids, and how close these are to earlier ones.

A partner that aligns again and again with slightly changed ids can find out about single ids (Guo et al., Birds of a
Feather Flock Together, USENIX Security 2022). So each party commits to its ids in every run under a key it keeps
(`treaty.crypto.transfer.sodium.commit`); the partner writes the commitment down and compares it with all earlier ones.
Comparing with the last one alone would not do: a run with another table between two would hide how little these differ.

A log is a `SealedDatabase`, a folder, with the party's key in it. A log that is gone, changed, cut off or an older copy
is refused. Several jobs of a party may use it at once, also in different processes.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.files import Format
from treaty.machine.database import SealedDatabase

logger = logging.getLogger(__name__)

MAX_RUNS = 20
"""Alignments that a partner may start within `WINDOW`, by default."""

WINDOW = timedelta(days=30)

FILE = "runs"
_FORM = Format("run-log", 1)
_TABLES = {
    "runs": """CREATE TABLE runs (number INTEGER PRIMARY KEY, time TEXT NOT NULL, event TEXT NOT NULL,
    job TEXT NOT NULL, peer TEXT NOT NULL, own_size INTEGER NOT NULL, peer_size INTEGER NOT NULL,
    own_commitment BLOB NOT NULL,
    peer_commitment BLOB NOT NULL, changed INTEGER, common INTEGER)""",
    "key": "CREATE TABLE key (one INTEGER PRIMARY KEY, key BLOB NOT NULL)",
}


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One entry of the log; sizes are numbers of ids, rounded up and padded, commitments bytes of uint8 (nodes, 32)."""

    time: str  # UTC, ISO 8601
    # "started" is written before anything that depends on ids is sent, and counts; or "finished"
    event: str
    job: str
    peer: str
    own_size: int
    peer_size: int
    own_commitment: bytes = b""
    peer_commitment: bytes = b""
    # fewest ids of the peer that differ from those of the most similar of its earlier runs in this log; None without an
    # earlier run. It is the number of a commitment's 256 nodes that differ, so many changes show as 256 or little less
    changed: int | None = None
    # of "finished": ids in common, if this party learned it
    common: int | None = None


class RunLog:
    """A party's log of alignments in `folder`, which is made, with its key, if it does not exist.

    Where parties keep no log to compare ids, a log with empty commitments counts runs.
    A partner may start `max_runs` alignments within `WINDOW`. Constructor and methods raise ConfigError when the log
    cannot be used, is damaged or was written by an earlier Treaty (or `max_runs` is below 1).
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
            self.folder, FILE, _FORM, _TABLES, what="run log", lost="how often partners aligned, and with which ids"
        )
        with self._db.transaction() as db:
            db.execute("INSERT OR IGNORE INTO key VALUES (1, ?)", (secrets.token_bytes(32),))
            (self.key,) = db.execute("SELECT key FROM key").fetchone()

    def entries(self) -> list[RunEntry]:
        """Return all entries, the oldest first."""
        with self._db.transaction() as db:
            return _entries(db)

    def start(
        self,
        job: str,
        peer: str,
        own_size: int,
        peer_size: int,
        own_commitment: NDArray[np.uint8],
        peer_commitment: NDArray[np.uint8],
    ) -> int | None:
        """Record that an alignment with a peer begins; return `RunEntry.changed`.

        Raises ConfigError when the peer has reached its limit, which is not recorded.
        """
        with self._db.transaction() as db:
            theirs = [entry for entry in _entries(db) if entry.peer == peer and entry.event == "started"]
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
            _append(db, RunEntry(now.isoformat(), "started", job, peer, own_size, peer_size, mine, their, changed))
        if changed:
            logger.warning("%s has other ids than ever before: %d or more differ from the nearest", peer, changed)
        return changed

    def finish(self, job: str, peer: str, own_size: int, peer_size: int, common: int | None) -> None:
        """Record that the alignment succeeded; `common` is None if this party did not learn it."""
        now = datetime.now(UTC).isoformat()
        with self._db.transaction() as db:
            _append(db, RunEntry(now, "finished", job, peer, own_size, peer_size, common=common))


def _entries(db: sqlite3.Connection) -> list[RunEntry]:
    return [RunEntry(*row[1:]) for row in db.execute("SELECT * FROM runs ORDER BY number")]


def _append(db: sqlite3.Connection, entry: RunEntry) -> None:
    db.execute("INSERT INTO runs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(entry))


def nearest(before: Iterable[bytes], now: NDArray[np.uint8]) -> int | None:
    """Return in how many nodes a commitment differs from the nearest of earlier ones; None without any."""
    earlier = (np.frombuffer(content, np.uint8).reshape(-1, 32) for content in set(before) if content)
    return min((count_changed(nodes, now) for nodes in earlier), default=None)


def count_changed(before: NDArray[np.uint8], now: NDArray[np.uint8]) -> int:
    """Count the nodes, uint8 (nodes, 32), that differ (all for other sizes): at least as many ids came or went."""
    if before.shape != now.shape:
        return len(now)
    return int(np.count_nonzero((before != now).any(axis=1)))
