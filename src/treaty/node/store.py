"""A node's database: its jobs, what peers reported about them, commands of its users, and the audit log.

It is one SQLite file, ``node.db`` in the node's folder, which the node's threads and its users' commands open at the
same time. A change and its entry in the audit log are one transaction, on the disk before the call returns. If the end
of SQLite's own log is damaged, the newest transactions are lost without an error; only heads that peers hold show it.

The audit log records what the node did and why. An entry's digest is SHA-256 over the digest before it and the
canonical JSON (sorted keys, no spaces) of its number, time and event. An entry that was changed, removed or moved no
longer fits the next one, and `Store.verify_audit` names it.

A chain of digests has limits. The owner can rewrite the file from any entry on, or remove its newest entries. Only
heads that others hold bind the owner: an entry's number and digest stand for that entry and all before it
(`Store.holds`), and the owner cannot deny a signed one (`head_statement`). Entries may still be untrue.

The file may be restored from a copy: jobs are then as they were. The ledgers in the folder ``stores`` must not be.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from treaty.errors import ConfigError, LocalProtocolError
from treaty.machine.database import Database

FILE = "node.db"
VERSION = 4

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
    """CREATE TABLE audit (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, event TEXT NOT NULL,
    previous BLOB NOT NULL, digest BLOB NOT NULL, job TEXT NOT NULL)""",
    "CREATE INDEX audit_job ON audit (job)",
)

FINAL = frozenset({"rejected", "cancelled", "finished", "failed"})
# The states that may follow each state; setting the same state again is allowed, unless it is final.
TRANSITIONS: dict[str, frozenset[str]] = {
    "proposed": frozenset({"approved", "rejected", "cancelled", "failed"}),
    "approved": frozenset({"queued", "running", "waiting", "finished", "rejected", "cancelled", "failed"}),
    "queued": frozenset({"running", "waiting", "finished", "rejected", "cancelled", "failed"}),
    "running": frozenset({"queued", "waiting", "finished", "cancelled", "failed"}),
    "waiting": frozenset({"queued", "running", "finished", "rejected", "cancelled", "failed"}),
} | dict.fromkeys(sorted(FINAL), frozenset())


@dataclass(frozen=True)
class JobRow:
    """A job as this node has it; times are seconds since 1970, and the store sets them if they are 0.

    `attempt` is the last attempt, `kept` the last one that stored this party's part, `done` the last one that succeeded
    here; 0: none. `tries` counts the attempts since the last progress. `answered` counts the rounds in which this party
    has taken part, over all attempts, and one more for each attempt: the round in which it ended.
    """

    id: str
    proposal: bytes
    signature: bytes
    submitter: str
    verb: str
    state: str = "proposed"
    reason: str = ""
    attempt: int = 0
    rounds: int = 0
    total: int = 0
    kept: int = 0
    done: int = 0
    tries: int = 0
    answered: int = 0
    created: float = 0.0
    changed: float = 0.0


# The columns of a job that stay, and the one that each change sets.
_FIXED = frozenset({"id", "proposal", "signature", "submitter", "verb", "created", "changed"})
_JOB = "SELECT {} FROM jobs".format(", ".join(field.name for field in fields(JobRow)))  # noqa: S608


@dataclass(frozen=True)
class Command:
    """A command of this node's user on the command line; `job` is empty if it is about none."""

    job: str
    command: str
    argument: bytes


@dataclass(frozen=True)
class PeerState:
    """Whether a peer's node is connected, since when, and its last message or the last error in reaching it."""

    up: bool
    since: float
    said: str


@dataclass(frozen=True)
class AuditEntry:
    """An entry of the audit log: its number from 1 on, its time (UTC, ISO 8601), what happened, and its digest."""

    seq: int
    time: str
    event: dict[str, Any]
    digest: bytes


@dataclass(frozen=True)
class AuditHead:
    """The newest entry of an audit log, by number and digest; number 0 for an empty log.

    `signature` is that of the log's owner over `head_statement`; empty if the head is not signed.
    """

    seq: int
    digest: bytes
    signature: bytes = b""

    def __str__(self) -> str:
        return f"{self.seq}:{self.digest.hex()}{':' * bool(self.signature)}{self.signature.hex()}"


EMPTY_HEAD = AuditHead(0, bytes(32))


class Store(Database):
    """A node's database, in the node's `folder`. Threads may share one; each process opens its own.

    It is made if there is none and `create` is set; otherwise that raises ConfigError.
    """

    def __init__(self, folder: Path | str, create: bool = True) -> None:
        self.path = Path(folder) / FILE
        if not create and not self.path.exists():
            raise ConfigError(f"expected a node's database, got none - at {self.path}; start the node once")
        super().__init__(self.path, VERSION, _TABLES, what="node's database", where=str(self.path), write_ahead=True)
        self._data_version = -1
        self.changed()

    def damaged(self, fault: str) -> ConfigError:
        return ConfigError(
            f"the node's database is damaged: {fault} - at {self.path}; stop the node, move {FILE}, {FILE}-wal and "
            f"{FILE}-shm away and bring back the newest copy of {FILE}. Leave the folder stores as it is: an older "
            "copy of its ledgers would forget what was spent"
        )

    # ------------------------------------------------------------ jobs

    def add_job(self, job: JobRow, *, event: Mapping[str, Any] | None = None) -> bool:
        """Add a job, and `event` to the audit log; False, and nothing is written, if its id is there already."""
        if job.state not in TRANSITIONS:
            raise LocalProtocolError(f"expected a job's state, got {job.state!r} - at {self.path}")
        created = job.created or time.time()
        row = astuple(replace(job, created=created, changed=job.changed or created))
        with self.transaction() as db:
            marks = ", ".join("?" * len(row))
            if not db.execute(f"INSERT OR IGNORE INTO jobs VALUES ({marks})", row).rowcount:  # noqa: S608
                return False
            if event is not None:
                _append_event(db, {"job": job.id, **event})
        return True

    def jobs(self, states: Collection[str] | None = None, newest: int | None = None) -> list[JobRow]:
        """Return jobs, all or those in one of `states`, oldest first; or the `newest` changed ones, newest first."""
        among = "" if states is None else f" WHERE state IN ({', '.join('?' * len(states))})"
        order = " ORDER BY created, rowid" if newest is None else f" ORDER BY changed DESC LIMIT {newest:d}"
        return [JobRow(*row) for row in self.read(_JOB + among + order, tuple(states or ()))]

    def states(self) -> dict[str, tuple[str, str]]:
        """Return verb and state of all jobs by their ids."""
        rows = self.read("SELECT id, verb, state FROM jobs ORDER BY created, rowid")
        return {id: (verb, state) for id, verb, state in rows}

    def received(self, submitter: str, since: float) -> Counter[str]:
        """Return how many jobs of each verb a party has proposed since a time."""
        of_verbs = "SELECT verb, COUNT(*) FROM jobs WHERE submitter = ? AND created >= ? GROUP BY verb"
        return Counter(dict(self.read(of_verbs, (submitter, since))))

    def has(self, id: str) -> bool:
        return bool(self.read("SELECT 1 FROM jobs WHERE id = ?", (id,)))

    def job(self, prefix: str) -> JobRow:
        """Return the one job whose id begins with `prefix`; ConfigError if there is none, or several."""
        rows = self.read(f"{_JOB} WHERE substr(id, 1, ?) = ? ORDER BY id LIMIT 3", (len(prefix), prefix))
        if not prefix or not rows:
            raise ConfigError(f"expected the first letters of a job's id, got {prefix!r}: no such job - at {self.path}")
        if len(rows) > 1 and rows[0][0] != prefix:
            ids = ", ".join(str(row[0]) for row in rows[:2])
            raise ConfigError(f"several jobs have ids like {prefix!r}: {ids} - at {self.path}; give more letters")
        return JobRow(*rows[0])

    def change(self, id: str, *, event: Mapping[str, Any] | None = None, **to: Any) -> JobRow:
        """Change columns of a job, append `event` with the job's id to the audit log, and return the job.

        It is one transaction: there is no change without its entry. If the job's state is final, or the new state may
        not follow it, nothing is written and LocalProtocolError is raised.
        """
        # names become part of the statement below
        if unknown := to.keys() - ({field.name for field in fields(JobRow)} - _FIXED):
            raise LocalProtocolError(f"{', '.join(sorted(unknown))} of a job cannot change")
        values: dict[str, Any] = {**to, "changed": time.time()}
        with self.transaction() as db:
            row = db.execute(f"{_JOB} WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise LocalProtocolError(f"expected the id of a job, got {id!r} - at {self.path}")
            old, state = JobRow(*row), to.get("state")
            if old.state in FINAL or (state not in (None, old.state) and state not in TRANSITIONS[old.state]):
                wanted = "a change" if state is None else repr(state)
                raise LocalProtocolError(f"a job that is {old.state!r} cannot take {wanted} - at job {id}, {self.path}")
            db.execute(f"UPDATE jobs SET {' = ?, '.join(values)} = ? WHERE id = ?", (*values.values(), id))  # noqa: S608
            if event is not None:
                _append_event(db, {"job": id, **event})
        return replace(old, **values)

    def put_view(self, job: str, party: str, view: bytes) -> None:
        """Store the last status of a job that a party's node has sent."""
        with self.transaction() as db:
            if not db.execute("SELECT 1 FROM jobs WHERE id = ?", (job,)).fetchone():
                raise LocalProtocolError(f"expected the id of a job, got {job!r} - at {self.path}")
            db.execute("INSERT OR REPLACE INTO views VALUES (?, ?, ?)", (job, party, view))

    def views(self, job: str) -> dict[str, bytes]:
        """Return the last status of a job from each party's node."""
        return dict(self.read("SELECT party, view FROM views WHERE job = ? ORDER BY party", (job,)))

    # ------------------------------------------------------------ commands

    def command(self, job: str, command: str, argument: bytes = b"") -> None:
        """Queue a command for the node."""
        row = (job, command, argument, time.time())
        with self.transaction() as db:
            db.execute("INSERT INTO commands (job, command, argument, time, done) VALUES (?, ?, ?, ?, 0)", row)

    def take_commands(self) -> Iterator[Command]:
        """Yield queued commands, oldest first.

        A command is marked as done when the next one is requested. If handling it was interrupted, it is yielded again,
        so handling a command twice must do no harm.
        """
        for seq, *row in self.read("SELECT seq, job, command, argument FROM commands WHERE NOT done ORDER BY seq"):
            yield Command(*row)
            with self.transaction() as db:
                db.execute("UPDATE commands SET done = 1 WHERE seq = ?", (seq,))

    def changed(self) -> bool:
        """Return whether another process has changed the database since the last call; costs microseconds."""
        with self.reading() as db:
            before, self._data_version = self._data_version, int(db.execute("PRAGMA data_version").fetchone()[0])
            return before != self._data_version

    # ------------------------------------------------------------ this node's audit log, and those of peers

    def note(self, event: Mapping[str, Any]) -> None:
        """Append an event to the audit log."""
        with self.transaction() as db:
            _append_event(db, event)

    def audit(self, since: int = 0, job: str | None = None) -> list[AuditEntry]:
        """Return entries after number `since`, of one job or of all, oldest first, as stored, not verified."""
        about, given = ("", (since,)) if job is None else (" AND job = ?", (since, job))
        sql = f"SELECT seq, time, event, digest FROM audit WHERE seq > ?{about} ORDER BY seq"  # noqa: S608
        return [
            AuditEntry(seq, str(when), _decoded(event) or {"what": "an entry that cannot be read"}, digest)
            for seq, when, event, digest in self.read(sql, given)
        ]

    def verify_audit(self) -> list[str]:
        """Return the entries that are not as they were written, in sentences; none if the log is whole."""
        found: list[str] = []
        expected, before = 1, EMPTY_HEAD.digest
        rows = self.read(
            "SELECT seq, typeof(time), CAST(time AS BLOB), typeof(event), CAST(event AS BLOB), typeof(previous),"
            " previous, typeof(digest), digest, typeof(job), CAST(job AS BLOB) FROM audit ORDER BY seq"
        )
        for seq, *columns in rows:
            kinds, (time, event, previous, digest, job) = columns[::2], columns[1::2]
            if seq < expected:
                found.append(f"entry {seq} has an invalid number")
                continue
            if seq > expected:
                lost = f"entry {expected} is" if seq == expected + 1 else f"entries {expected} to {seq - 1} are"
                found.append(f"{lost} missing")
            elif previous != before:
                found.append(f"entry {seq} does not follow the entry before it: one of them was changed or moved")
            if kinds != ["text", "text", "blob", "blob", "text"] or digest != digest_of(previous, seq, time, event):
                found.append(f"entry {seq} was changed")
            # The column repeats the event's job, so that a job's entries are found without reading all.
            elif job != _job_of(_decoded(event) or {}).encode():
                found.append(f"entry {seq} was assigned to another job")
            # The next entry is compared with the stored digest, so that one fault is not reported for all that follow.
            expected, before = seq + 1, digest
        return found

    def head(self) -> AuditHead:
        """Return the head of the audit log, which peers receive."""
        with self.reading() as db:
            return _head(db)

    def holds(self, noted: AuditHead) -> bool:
        """Return whether a head that was noted elsewhere is an entry of this log."""
        found = self.read("SELECT digest FROM audit WHERE seq = ?", (noted.seq,))
        return bool(found[0][0] == noted.digest if found else noted == EMPTY_HEAD)

    def note_head(self, party: str, seq: int, digest: bytes, signature: bytes) -> str:
        """Store the newest head of a peer's audit log; its signature was checked.

        Returns "", or how the peer's log was cut or rewritten; the earlier head is then kept.
        """
        row = party, seq, digest, signature, time.time()
        with self.transaction() as db:
            old = db.execute("SELECT seq, digest FROM heads WHERE party = ?", (party,)).fetchone()
            if old is None or seq > old[0]:
                db.execute("INSERT OR REPLACE INTO heads VALUES (?, ?, ?, ?, ?)", row)
            elif seq < old[0]:
                return (
                    f"the audit log of {party} had {old[0]} entries and now has {seq}: it was cut, or is an older copy"
                )
            elif digest != old[1]:
                return f"the audit log of {party} has another entry {seq} than before: it was rewritten"
        return ""

    def heads(self) -> dict[str, AuditHead]:
        """Return the newest head of each peer's own audit log."""
        rows = self.read("SELECT party, seq, digest, signature FROM heads ORDER BY party")
        return {party: AuditHead(*head) for party, *head in rows}

    def set_peer(self, party: str, up: bool, said: str = "") -> bool:
        """Store whether a peer is connected; return whether that has changed, or was unknown."""
        with self.transaction() as db:
            old = db.execute("SELECT up, since, said FROM seen WHERE party = ?", (party,)).fetchone()
            turned = old is None or bool(old[0]) != up
            if turned or old[2] != said:
                since = time.time() if turned else old[1]
                db.execute("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", (party, int(up), since, said))
        return turned

    def peers(self) -> dict[str, PeerState]:
        """Return the state of each peer."""
        rows = self.read("SELECT party, up, since, said FROM seen ORDER BY party")
        return {party: PeerState(bool(up), since, said) for party, up, since, said in rows}


def _append_event(db: sqlite3.Connection, event: Mapping[str, Any]) -> None:
    """Append an event to the audit log; ValueError or TypeError if it has no JSON text."""
    last, text = _head(db), canonical(event)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    digest = digest_of(last.digest, last.seq + 1, now.encode(), text.encode())
    row = last.seq + 1, now, text, last.digest, digest, _job_of(event)
    db.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)", row)


def canonical(event: Mapping[str, Any]) -> str:
    """Return the one JSON text of an event."""
    return json.dumps(event, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(previous: bytes, seq: int, time: bytes, event: bytes) -> bytes:
    """Return an entry's digest, of `time` and `event` as stored: neither has a quote that JSON would escape."""
    text = b'{"event":' + event + b',"seq":' + str(seq).encode() + b',"time":"' + time + b'"}'
    return hashlib.sha256(previous + text).digest()


def _job_of(event: Mapping[str, Any]) -> str:
    """Return the id of an event's job; "" if it has none."""
    job = event.get("job", "")
    return job if isinstance(job, str) else ""


def _decoded(event: str | bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(event)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def _head(db: sqlite3.Connection) -> AuditHead:
    row = db.execute("SELECT seq, digest FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return AuditHead(*row) if row else EMPTY_HEAD


def head_statement(owner: str, seq: int, digest: bytes) -> bytes:
    """Return what the owner of a log signs of its head."""
    return b"\0".join([b"treaty audit head 1", owner.encode(), str(seq).encode(), digest])
