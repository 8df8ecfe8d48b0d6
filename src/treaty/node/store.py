"""What a node keeps: its jobs, what peers said of them, commands of its users, and the audit log.

One SQLite file, ``node.db`` in the node's folder, which the node's threads and the commands of its users have open at
once, in processes of their own. Whatever changes is one transaction that is on the disk before the call returns, with
its entry in the audit log (`audit`): after a crash or a kill there are both or neither. SQLite keeps a log
written ahead; should its end be damaged on the disk, the newest transactions are lost without a word, and only the
heads of the audit log that peers were told show it.

The file may be brought back from a copy: jobs are then as they were. The ledgers in the folder ``stores`` may not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from treaty.errors import ConfigError, LocalProtocolError
from treaty.machine.database import Database
from treaty.node import audit_log as audit
from treaty.node.audit_log import AuditEntry, AuditHead

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
    *audit.TABLES,
)

FINAL = frozenset({"rejected", "cancelled", "finished", "failed"})
TRANSITIONS: dict[str, frozenset[str]] = {
    "proposed": frozenset({"approved", "rejected", "cancelled", "failed"}),
    "approved": frozenset({"queued", "running", "waiting", "finished", "rejected", "cancelled", "failed"}),
    "queued": frozenset({"running", "waiting", "finished", "rejected", "cancelled", "failed"}),
    "running": frozenset({"queued", "waiting", "finished", "cancelled", "failed"}),
    "waiting": frozenset({"queued", "running", "finished", "rejected", "cancelled", "failed"}),
} | dict.fromkeys(sorted(FINAL), frozenset())
"""The states that may follow each; a job may be set to the state it has, unless that is final."""


@dataclass(frozen=True)
class JobRow:
    """A job as this node has it; times are seconds since 1970, and are set by the store where they are 0.

    `attempt` is the last attempt, `kept` the last one that left this party's part in its place, and `done` the last one
    that ended well here; 0: none. `tries` counts the attempts begun here since one last got further than all before,
    that one included; `answered` the rounds in which this party has taken part, over all attempts, and one more for
    each attempt: the round in which it ended.
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


_JOB = "SELECT {} FROM jobs".format(", ".join(field.name for field in fields(JobRow)))  # noqa: S608


@dataclass(frozen=True)
class Command:
    """What a user of this node asked for by a command line; `job` is empty where it is about none."""

    seq: int
    job: str
    command: str
    argument: bytes
    time: float


@dataclass(frozen=True)
class PeerState:
    """Whether a peer's node is connected, since when, and what it, or the attempt to reach it, said last."""

    up: bool
    since: float
    said: str


class Store(Database):
    """A node's database. Threads may share one; each process opens its own.

    Parameters
    ----------
    folder : Path or str
        The node's folder.
    create : bool
        Make the database where there is none; otherwise that is a `ConfigError`.
    """

    def __init__(self, folder: Path | str, create: bool = True) -> None:
        self.path = Path(folder) / FILE
        if not create and not self.path.exists():
            raise ConfigError(f"expected a node's database, got none - at {self.path}; start the node once")
        super().__init__(self.path, VERSION, _TABLES, what="node's database", where=str(self.path), write_ahead=True)
        self._data_version = self._read_data_version()

    def damaged(self, fault: str) -> ConfigError:
        return ConfigError(
            f"the node's database is damaged: {fault} - at {self.path}; stop the node, move {FILE}, {FILE}-wal and "
            f"{FILE}-shm away and bring back the newest copy of {FILE}. Leave the folder stores as it is: an older "
            "copy of its ledgers would forget what was spent"
        )

    def _read_data_version(self) -> int:
        return int(self.connection.execute("PRAGMA data_version").fetchone()[0])

    def add_job(self, job: JobRow, *, event: Mapping[str, Any] | None = None) -> bool:
        """Add a job, and `event` to the audit log; False, and nothing is written, where a job has its id already."""
        if job.state not in TRANSITIONS:
            raise LocalProtocolError(f"expected a job's state, got {job.state!r} - at {self.path}")
        created = job.created or time.time()
        job = replace(job, created=created, changed=job.changed or created)
        row = astuple(job)
        with self.transaction() as db:
            marks = ", ".join("?" * len(row))
            if not db.execute(f"INSERT OR IGNORE INTO jobs VALUES ({marks})", row).rowcount:  # noqa: S608
                return False
            if event is not None:
                audit.append(db, {"job": job.id, **event})
        return True

    def jobs(self, states: Collection[str] | None = None, newest: int | None = None) -> list[JobRow]:
        """Return all jobs, or those in one of the states, oldest first; or the `newest` that changed, newest first."""
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
        """Tell whether a job is here."""
        return bool(self.read("SELECT 1 FROM jobs WHERE id = ?", (id,)))

    def job(self, prefix: str) -> JobRow:
        """Return the one job whose id begins like that; ConfigError where there is none, or several."""
        rows = self.read(f"{_JOB} WHERE substr(id, 1, ?) = ? ORDER BY id LIMIT 3", (len(prefix), prefix))
        if not prefix or not rows:
            raise ConfigError(f"expected the first letters of a job's id, got {prefix!r}, like none - at {self.path}")
        if len(rows) > 1 and rows[0][0] != prefix:
            ids = ", ".join(str(row[0]) for row in rows[:2])
            raise ConfigError(
                f"expected the id of one job, got {prefix!r}, like {ids} - at {self.path}; write more of it"
            )
        return JobRow(*rows[0])

    def change(
        self,
        id: str,
        *,
        state: str | None = None,
        reason: str | None = None,
        attempt: int | None = None,
        rounds: int | None = None,
        total: int | None = None,
        kept: int | None = None,
        done: int | None = None,
        tries: int | None = None,
        answered: int | None = None,
        event: Mapping[str, Any] | None = None,
    ) -> JobRow:
        """Change what is given of a job, append `event` with the job's id to the audit log, and return the job.

        One transaction: there is no change without its entry. LocalProtocolError, and nothing is written, where the
        job's state is final or the new one may not follow it.
        """
        given = {
            "state": state, "reason": reason, "attempt": attempt, "rounds": rounds, "total": total, "kept": kept,
            "done": done, "tries": tries, "answered": answered,
        }  # fmt: skip
        to: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        with self.transaction() as db:
            row = db.execute(f"{_JOB} WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise LocalProtocolError(f"expected the id of a job, got {id!r} - at {self.path}")
            old = JobRow(*row)
            if old.state in FINAL or (state not in (None, old.state) and state not in TRANSITIONS[old.state]):
                wanted = "a change" if state is None else f"{state!r}"
                raise LocalProtocolError(f"a job that is {old.state!r} cannot take {wanted} - at job {id}, {self.path}")
            to["changed"] = time.time()
            columns = ", ".join(f"{name} = ?" for name in to)
            db.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*to.values(), id))  # noqa: S608
            new = replace(old, **to)
            if event is not None:
                audit.append(db, {"job": id, **event})
        return new

    def put_view(self, job: str, party: str, view: bytes) -> None:
        """Keep what a party's node last said of a job that is here."""
        with self.transaction() as db:
            if not db.execute("SELECT 1 FROM jobs WHERE id = ?", (job,)).fetchone():
                raise LocalProtocolError(f"expected the id of a job, got {job!r} - at {self.path}")
            db.execute("INSERT OR REPLACE INTO views VALUES (?, ?, ?)", (job, party, view))

    def views(self, job: str) -> dict[str, bytes]:
        """Return what each party's node last said of a job."""
        return dict(self.read("SELECT party, view FROM views WHERE job = ? ORDER BY party", (job,)))

    def command(self, job: str, command: str, argument: bytes = b"") -> None:
        """Leave a command for the node, which takes it when it runs."""
        with self.transaction() as db:
            db.execute(
                "INSERT INTO commands (job, command, argument, time, done) VALUES (?, ?, ?, ?, 0)",
                (job, command, argument, time.time()),
            )

    def take_commands(self) -> Iterator[Command]:
        """Yield the commands that wait, oldest first; each counts as done when the next one is asked for.

        So a command whose handling was cut off comes again: handling one twice must do no harm.
        """
        for row in self.read("SELECT seq, job, command, argument, time FROM commands WHERE NOT done ORDER BY seq"):
            yield Command(*row)
            with self.transaction() as db:
                db.execute("UPDATE commands SET done = 1 WHERE seq = ?", row[:1])

    def changed(self) -> bool:
        """Tell whether another process has changed anything since this was last asked; costs microseconds."""
        with self.reading():
            before, self._data_version = self._data_version, self._read_data_version()
            return before != self._data_version

    def note(self, event: Mapping[str, Any]) -> None:
        """Append an event to the audit log."""
        with self.transaction() as db:
            audit.append(db, event)

    def audit(self, since: int = 0) -> list[AuditEntry]:
        """Return the audit log's entries after number `since`, oldest first; they are not verified."""
        with self.reading() as db:
            return list(audit.entries(db, since))

    def events_of(self, job: str) -> list[dict[str, Any]]:
        """Return what the audit log has about a job, oldest first; it is not verified."""
        with self.reading() as db:
            return [entry.event for entry in audit.entries(db, job=job)]

    def verify_audit(self) -> list[str]:
        """Return where the audit log is not what was written; nothing where it is whole."""
        with self.reading() as db:
            return audit.faults(db)

    def head(self) -> AuditHead:
        """Return the head of the audit log, which peers are told."""
        with self.reading() as db:
            return audit.head(db)

    def holds(self, told: AuditHead) -> bool:
        """Tell whether a head of this node's audit log that was noted elsewhere is an entry of it."""
        with self.reading() as db:
            return audit.holds(db, told)

    def note_head(self, party: str, seq: int, digest: bytes, signature: bytes) -> str:
        """Keep a peer's head of its own audit log, of which the signature was checked, in the order of their coming.

        Returns "", or what shows that the peer's log was cut or written anew; the head told before is then kept.
        """
        with self.transaction() as db:
            old = db.execute("SELECT seq, digest FROM heads WHERE party = ?", (party,)).fetchone()
            if old is not None and seq < old[0]:
                return (
                    f"the audit log of {party} had {old[0]} entries and now has {seq}: it was cut, or is an older copy"
                )
            if old is not None and seq == old[0] and digest != old[1]:
                return f"the audit log of {party} has another entry {seq} than it had: it was written anew"
            if old is None or seq > old[0]:
                db.execute(
                    "INSERT OR REPLACE INTO heads VALUES (?, ?, ?, ?, ?)", (party, seq, digest, signature, time.time())
                )
        return ""

    def heads(self) -> dict[str, AuditHead]:
        """Return the newest head that each peer has told of its own audit log."""
        rows = self.read("SELECT party, seq, digest, signature FROM heads ORDER BY party")
        return {party: AuditHead(*head) for party, *head in rows}

    def set_peer(self, party: str, up: bool, said: str = "") -> bool:
        """Keep whether a peer is connected; True where it was not known or was otherwise."""
        with self.transaction() as db:
            old = db.execute("SELECT up, since, said FROM seen WHERE party = ?", (party,)).fetchone()
            turned = old is None or bool(old[0]) != up
            if turned or old[2] != said:
                since = time.time() if turned else old[1]
                db.execute("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", (party, int(up), since, said))
        return turned

    def peers(self) -> dict[str, PeerState]:
        """Return whether each peer that was ever set is connected."""
        rows = self.read("SELECT party, up, since, said FROM seen ORDER BY party")
        return {party: PeerState(bool(up), since, said) for party, up, since, said in rows}
