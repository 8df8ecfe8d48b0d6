"""A node's audit log: what it did and why, each entry bound to all before it by SHA-256.

An entry's digest is SHA-256 over the digest before it and the canonical JSON (sorted keys, no spaces) of its number,
time and event. So an entry that was changed, or removed or moved among others, no longer fits the next one, and
`faults` says where. The column `job` repeats what the event says, so that a job's entries are found without reading
all; `faults` compares the two.

What a chain does not show: whoever may write the file can write it anew from any entry on, with new digests, or take
away its newest entries. Only heads that others keep bind its owner: an entry's number and digest hold that entry and
all before it (`holds`). The owner's signature of a head (`head_statement`) shows whose head it is, so that the owner
cannot deny it later; it does not show that there was no other log beside it. Nor does a log show that what it says is
true, only that it was not changed later.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

TABLES = (
    """CREATE TABLE audit (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, event TEXT NOT NULL,
    previous BLOB NOT NULL, digest BLOB NOT NULL, job TEXT NOT NULL)""",
    "CREATE INDEX audit_job ON audit (job)",
)
FIRST = bytes(32)  # what stands before the first entry


@dataclass(frozen=True)
class AuditEntry:
    """One entry: its number from 1 on, its time (UTC, ISO 8601), what happened, and its digest."""

    seq: int
    time: str
    event: dict[str, Any]
    digest: bytes


@dataclass(frozen=True)
class AuditHead:
    """The newest entry of a log, by number and digest, which stand for all before it; number 0 where there is none.

    `signature` is the log's owner's, over `head_statement`; empty where the head was not signed.
    """

    seq: int
    digest: bytes
    signature: bytes = b""

    def __str__(self) -> str:
        return f"{self.seq}:{self.digest.hex()}{':' * bool(self.signature)}{self.signature.hex()}"


def canonical(event: Mapping[str, Any]) -> str:
    """Return the one JSON text of an event; ValueError or TypeError where it has none."""
    return json.dumps(event, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(previous: bytes, seq: int, time: bytes, event: bytes) -> bytes:
    """Return an entry's digest; `time` and `event` as the bytes that are kept, in which no quote needs escaping."""
    text = b'{"event":' + event + b',"seq":' + str(seq).encode() + b',"time":"' + time + b'"}'
    return hashlib.sha256(previous + text).digest()


def head_statement(owner: str, seq: int, digest: bytes) -> bytes:
    """Return what the owner of a log signs of its head."""
    return b"\0".join([b"treaty audit head 1", owner.encode(), str(seq).encode(), digest])


def head(db: sqlite3.Connection) -> AuditHead:
    """Return the newest entry's number and digest."""
    row = db.execute("SELECT seq, digest FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return AuditHead(*row) if row else AuditHead(0, FIRST)


def append(db: sqlite3.Connection, event: Mapping[str, Any]) -> None:
    """Append an event to the log, in the caller's transaction."""
    last, text = head(db), canonical(event)
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    digest = digest_of(last.digest, last.seq + 1, time.encode(), text.encode())
    row = last.seq + 1, time, text, last.digest, digest, _job_of(event)
    db.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)", row)


def entries(db: sqlite3.Connection, since: int = 0, job: str | None = None) -> Iterator[AuditEntry]:
    """Yield entries after number `since`, of one job or of all, oldest first, as they were written, not verified."""
    about, given = ("", (since,)) if job is None else (" AND job = ?", (since, job))
    sql = f"SELECT seq, time, event, digest FROM audit WHERE seq > ?{about} ORDER BY seq"  # noqa: S608
    for seq, time, event, digest in db.execute(sql, given):
        yield AuditEntry(seq, str(time), _decoded(event) or {"what": "an entry that cannot be read"}, digest)


def _decoded(event: str | bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(event)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def _job_of(event: Mapping[str, Any]) -> str:
    """Return the id of the job that an event is about, "" where it is about none."""
    job = event.get("job", "")
    return job if isinstance(job, str) else ""


def faults(db: sqlite3.Connection) -> list[str]:
    """Return where the log is not what was written, in sentences; none for a log that is whole.

    Each entry is compared with the digests that stand in the log, so that those after a fault are not faults, too.
    """
    found: list[str] = []
    expected, before = 1, FIRST
    rows = db.execute(
        "SELECT seq, typeof(time), CAST(time AS BLOB), typeof(event), CAST(event AS BLOB), typeof(previous), previous,"
        " typeof(digest), digest, typeof(job), CAST(job AS BLOB) FROM audit ORDER BY seq"
    )
    for seq, *columns in rows:
        kinds, (time, event, previous, digest, job) = columns[::2], columns[1::2]
        if seq < expected:
            found.append(f"entry {seq} has a number that is never given")
            continue
        if seq > expected:
            lost = f"entry {expected} is" if seq == expected + 1 else f"entries {expected} to {seq - 1} are"
            found.append(f"{lost} missing")
        elif previous != before:
            found.append(f"entry {seq} does not follow the entry before it: one of them was changed or moved")
        if kinds != ["text", "text", "blob", "blob", "text"] or digest != digest_of(previous, seq, time, event):
            found.append(f"entry {seq} was changed")
        elif job != _job_of(_decoded(event) or {}).encode():
            found.append(f"entry {seq} was put to another job's")
        expected, before = seq + 1, digest
    return found


def holds(db: sqlite3.Connection, told: AuditHead) -> bool:
    """Tell whether a head that was noted elsewhere is an entry of this log."""
    row = db.execute("SELECT digest FROM audit WHERE seq = ?", (told.seq,)).fetchone()
    return bool((told.seq, told.digest) == (0, FIRST) if row is None else row[0] == told.digest)
