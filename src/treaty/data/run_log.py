"""The log a party keeps of its alignments: who asked, with how many ids, and how close these are to earlier ones.

A partner that aligns again and again with slightly changed ids can find out about single ids (Guo et al., Birds of a
Feather Flock Together, USENIX Security 2022). So each party commits to its ids in every run under a key it keeps
(`treaty.crypto.transfer.sodium.commit`); the partner writes the commitment down and compares it with all earlier ones.
The last alone would not do: a run with another table between two would hide how little these differ.

A log is a file of JSON lines, only ever appended to. Each line holds its own SHA-256 and that of the line before, so
that a line removed or changed shows. The party's key lies beside it: ``NAME.jsonl.key``. So does how many lines there
are, and what the last one is, so that a log that is gone, cut off or an older copy shows: ``NAME.jsonl.kept``. All are
readable to their owner alone. Several jobs of a party may use the log at once, also in different processes:
``NAME.jsonl.lock`` is locked meanwhile. A line cut off by a crash is moved to ``NAME.jsonl.torn``.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError, DataError
from treaty.files import Format, json_decoder_of, read_file, write_file
from treaty.machine.database import KEPT, Mark, kept_file, mark_of, owner_of

logger = logging.getLogger(__name__)

_KEY_FORM = Format("run-log-key", 1)

MAX_RUNS = 20
"""Alignments that a partner may start within `WINDOW`, by default."""

WINDOW = timedelta(days=30)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of the log; sizes are numbers of ids, rounded up and padded, commitments base64 of uint8 (nodes, 32)."""

    time: datetime  # UTC
    # "started" is written before anything that depends on ids is sent, and counts towards the limit
    event: Literal["started", "finished"]
    job: str
    peer: str
    own_size: int
    peer_size: int
    own_commitment: str = ""
    peer_commitment: str = ""
    # fewest ids of the peer that differ from those of the most similar of its earlier runs in this log; None without an
    # earlier run. It is the number of a commitment's 256 nodes that differ, so many changes show as 256 or little less
    changed: int | None = None
    common: int | None = None  # of "finished": ids in common, if this party learned it
    previous: str = ""  # SHA-256 of the line before, in hex; empty in the first
    digest: str = ""  # SHA-256 of this line without it, in hex


class Key(msgspec.Struct):
    """The file of a log's key: 32 bytes."""

    key: bytes


class RunLog:
    """A party's log of alignments; the file is made, with its folder and key, if it does not exist.

    Where parties keep no log to compare ids, a log with empty commitments counts runs.
    A partner may start `max_runs` alignments within `WINDOW`. Constructor and methods raise ConfigError when a file
    cannot be used (or `max_runs` is below 1), and DataError when a line was changed, removed or is malformed.
    """

    def __init__(self, path: str | Path, *, max_runs: int = MAX_RUNS) -> None:
        if max_runs < 1:
            raise ConfigError(f"expected max_runs of at least 1, got {max_runs}")
        self.path = Path(path)
        self.max_runs = max_runs
        with self._locked():
            self.key = self._read_key(mark_of(self.path))
            self._read()

    def entries(self) -> list[Entry]:
        """Read and check all lines."""
        with self._locked():
            return self._read()[0]

    def start(
        self,
        job: str,
        peer: str,
        own_size: int,
        peer_size: int,
        own_commitment: NDArray[np.uint8],
        peer_commitment: NDArray[np.uint8],
    ) -> int | None:
        """Record that an alignment with a peer begins; return `Entry.changed`.

        Raises ConfigError when the peer has reached its limit, which is not recorded.
        """
        with self._locked():
            entries, previous = self._read()
            theirs = [entry for entry in entries if entry.peer == peer and entry.event == "started"]
            now = datetime.now(UTC)
            recent = [entry for entry in theirs if now - entry.time < WINDOW]
            if len(recent) >= self.max_runs:
                raise ConfigError(
                    f"{peer} has started {len(recent)} alignments within {WINDOW.days} days, the limit is "
                    f"{self.max_runs}; raise max_runs if that is meant - at {self.path}",
                    public=f"its limit of {self.max_runs} alignments within {WINDOW.days} days is reached",
                )
            changed = nearest([entry.peer_commitment for entry in theirs], peer_commitment)
            entry = Entry(
                time=now,
                event="started",
                job=job,
                peer=peer,
                own_size=own_size,
                peer_size=peer_size,
                own_commitment=encode(own_commitment),
                peer_commitment=encode(peer_commitment),
                changed=changed,
                previous=previous,
            )
            self._append(entry)
        if changed:
            logger.warning("%s has other ids than ever before: %d or more differ from the nearest", peer, changed)
        return changed

    def finish(self, job: str, peer: str, own_size: int, peer_size: int, common: int | None) -> None:
        """Record that the alignment succeeded; `common` is None if this party did not learn it."""
        with self._locked():
            self._append(
                Entry(
                    time=datetime.now(UTC),
                    event="finished",
                    job=job,
                    peer=peer,
                    own_size=own_size,
                    peer_size=peer_size,
                    common=common,
                    previous=self._read()[1],
                )
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the log's files exclusively, among threads and processes: each opening of the lock is one holder."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _appending(self._beside("lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released when closed, also by a crash
                yield
        except OSError as error:
            raise ConfigError(f"cannot use the run log {self.path}: {error.strerror}") from None

    def _read(self) -> tuple[list[Entry], str]:
        """Return the entries, checked, and the hash of the last line; repair the end of the file."""
        kept = mark_of(self.path)
        *lines, tail = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        there = len(lines) + (_entry(tail) is not None)
        if kept is None or kept.changes > there:
            fault = "the file beside it that says how many lines it has is missing" if kept is None else (
                f"the run log has {there} lines of {kept.changes}, or is missing"
            )  # fmt: skip
            raise self._refused(fault)
        if tail and self._mended(tail):
            lines.append(tail)
        entries, previous = [], ""
        for number, line in enumerate(lines, 1):
            entry = _entry(line)
            if entry is None:
                raise DataError(f"expected a line of a run log, got none - at line {number} of {self.path}")
            if entry.previous != previous:
                raise DataError(
                    f"expected an unchanged run log, but lines before {number} of {self.path} were changed or removed"
                )
            entries.append(entry)
            previous = hashlib.sha256(line).hexdigest()
            if number == kept.changes and previous != kept.name:
                raise self._refused("the run log is another one, or changed")
        return entries, previous

    def _refused(self, fault: str) -> DataError:
        return DataError(
            f"{fault} - at {self.path}; bring back the newest copy of it and of the .kept and .key files beside it. To "
            f"begin anew is to forget how often partners aligned, and with which ids: treaty ledger reset {self.path}",
            public="its run log cannot be used; it has the details",
        )

    def _mended(self, tail: bytes) -> bool:
        """Complete a last line that lacks only its end; set aside the rest of a crash. Return whether it is a line."""
        if _entry(tail) is not None:
            _write(self.path, b"\n")
            return True
        torn = self._beside("torn")
        _write(torn, tail + b"\n")
        with self.path.open("r+b") as file:
            file.truncate(self.path.stat().st_size - len(tail))
            os.fsync(file.fileno())
        logger.warning(
            "the last line of %s was cut off, as by a crash; its %d bytes are in %s", self.path, len(tail), torn
        )
        return False

    def _append(self, entry: Entry) -> None:
        line = _line(entry)
        _write(self.path, line + b"\n")
        self._vouch(Mark(hashlib.sha256(line).hexdigest(), len(self.path.read_bytes().splitlines())))

    def _vouch(self, mark: Mark) -> None:
        """Say how far the log is; after its line is written, so that it is never ahead."""
        write_file(kept_file(self.path), mark, KEPT, owner_of(self.path))

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def _read_key(self, kept: Mark | None) -> bytes:
        """Return the key of the commitments, made together with the log."""
        file = self._beside("key")
        if kept is None and not file.exists() and not self.path.exists():
            self._vouch(kept := Mark("", 0))
        if not file.exists():
            if kept is None or kept.changes or self.path.exists():
                raise self._refused("the key of the run log is missing")
            write_file(file, Key(secrets.token_bytes(32)), _KEY_FORM, owner_of(self.path))
        return read_file(file, Key, _KEY_FORM, owner_of(self.path)).key


def _line(entry: Entry) -> bytes:
    """Encode an entry with its digest."""
    blank = msgspec.json.encode(msgspec.structs.replace(entry, digest=""))
    return msgspec.json.encode(msgspec.structs.replace(entry, digest=hashlib.sha256(blank).hexdigest()))


def _entry(line: bytes) -> Entry | None:
    """Decode a line; None if it is none, or not as it was written."""
    try:
        entry: Entry = json_decoder_of(Entry).decode(line)
    except (msgspec.MsgspecError, ValueError):
        return None
    return entry if _line(entry) == line else None


def _appending(path: Path) -> BinaryIO:
    """Open a file for appending, and close it to all but its owner, also one that was made more open."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    file = os.fdopen(handle, "ab")
    os.fchmod(handle, 0o600)
    return file


def _write(path: Path, data: bytes) -> None:
    """Append and sync to disk."""
    with _appending(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def nearest(before: Iterable[str], now: NDArray[np.uint8]) -> int | None:
    """Return in how many nodes a commitment differs from the nearest of earlier ones; None without any."""
    return min((count_changed(decode(text), now) for text in set(before) if text), default=None)


def count_changed(before: NDArray[np.uint8], now: NDArray[np.uint8]) -> int:
    """Count the nodes, uint8 (nodes, 32), that differ (all for other sizes): at least as many ids came or went."""
    if before.shape != now.shape:
        return len(now)
    return int(np.count_nonzero((before != now).any(axis=1)))


def encode(commitment: NDArray[np.uint8]) -> str:
    """Write a commitment as text; an empty one as empty text."""
    return b64encode(commitment.tobytes()).decode()


def decode(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(b64decode(text), np.uint8).reshape(-1, 32)
