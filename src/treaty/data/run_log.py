"""The log a party keeps of its alignments: who asked, how large, and how near its ids are to those of earlier times.

Whoever may align again and again with slightly changed ids can find out about single ids (Guo et al., Birds of a
Feather Flock Together, USENIX Security 2022). So each party commits to its ids in every run under a key it keeps
(`treaty.crypto.psi.hashing.commit`); the partner writes the commitment down and compares it with all earlier ones. The
last alone would not do: a run with another table between two would hide how little these differ.

A log is a file of JSON lines, only ever appended to. Each line holds the SHA-256 of the line before, so that a line
taken out or changed shows. The party's key lies beside it, readable to the owner alone: ``NAME.jsonl.key``. Several
jobs of a party may use the log at once, also in different processes: ``NAME.jsonl.lock`` is locked meanwhile. What a
crash left of a line is moved to ``NAME.jsonl.torn``.
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
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

MAX_RUNS = 20
"""Alignments that a partner may start within `WINDOW`, by default."""

WINDOW = timedelta(days=30)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line.

    Attributes
    ----------
    time : datetime
        UTC.
    event : {"started", "finished"}
        "started" is written before anything that depends on ids is sent, and counts towards the limit.
    job, peer : str
    own_size, peer_size : int
        Buckets: numbers of ids, rounded up and padded.
    own_commitment, peer_commitment : str
        Base64 of uint8 (nodes, 32).
    changed : int or None
        At least so many ids of the peer differ from those of the nearest of its earlier runs in this log; None when
        there is none. It saturates: 256 nodes tell few changes from each other, many no more.
    common : int or None
        Ids found in common, where this party learned it; of "finished".
    previous : str
        SHA-256 of the line before, in hex; empty in the first.
    """

    time: datetime
    event: Literal["started", "finished"]
    job: str
    peer: str
    own_size: int
    peer_size: int
    own_commitment: str = ""
    peer_commitment: str = ""
    changed: int | None = None
    common: int | None = None
    previous: str = ""


class RunLog:
    """A party's log of alignments.

    Parameters
    ----------
    path : str or Path
        The file; made, with its folder and key, when it is not there.
    max_runs : int, default 20
        Alignments a partner may start within `WINDOW`.

    Raises
    ------
    ConfigError
        When the file or key cannot be read or written, or `max_runs` is below 1.
    DataError
        When a line was changed, taken out or is malformed.
    """

    def __init__(self, path: str | Path, *, max_runs: int = MAX_RUNS) -> None:
        if max_runs < 1:
            raise ConfigError(f"expected max_runs of at least 1, got {max_runs}")
        self.path = Path(path)
        self.max_runs = max_runs
        with self._locked():
            self.key = self._read_key()
            self._read()

    def entries(self) -> list[Entry]:
        """Read and check all lines.

        Raises
        ------
        ConfigError
            When the file cannot be read.
        DataError
            When a line was changed, taken out or is malformed.
        """
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
        """Note that an alignment with a peer begins.

        Returns
        -------
        int or None
            `Entry.changed`.

        Raises
        ------
        ConfigError
            When the peer has reached its limit, which is not noted; when the file cannot be written.
        DataError
            When a line was changed, taken out or is malformed.
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
        """Note that it ended well; `common` is None where this party did not learn it. Errors as of `start`."""
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
        """Have the log's files to oneself, among threads and processes: each opening of the lock is one holder."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._beside("lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # given back when closed, also by a crash
                yield
        except OSError as error:
            raise ConfigError(f"cannot use the run log {self.path}: {error.strerror}") from None

    def _read(self) -> tuple[list[Entry], str]:
        """Return the entries, checked, and the hash of the last line; mend the end of the file."""
        *lines, tail = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        if tail and self._mended(tail):
            lines.append(tail)
        entries, previous = [], ""
        for number, line in enumerate(lines, 1):
            entry = _entry(line)
            if entry is None:
                raise DataError(f"expected a line of a run log, got none - at line {number} of {self.path}")
            if entry.previous != previous:
                raise DataError(
                    f"expected an untouched run log, but what came before line {number} of {self.path} was changed"
                )
            entries.append(entry)
            previous = hashlib.sha256(line).hexdigest()
        return entries, previous

    def _mended(self, tail: bytes) -> bool:
        """End a line that lacks its end alone; set aside what a crash left of another. Return whether it is a line."""
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
        _write(self.path, msgspec.json.encode(entry) + b"\n")

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def _read_key(self) -> bytes:
        path = self._beside("key")
        if not path.exists():
            made = self._beside("key.new")  # a crash leaves no half a key under the name that counts
            made.unlink(missing_ok=True)
            with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                os.fsync(file.fileno())
            made.replace(path)
        key = path.read_bytes()
        if len(key) != 32:
            raise ConfigError(f"expected a key of 32 bytes, got {len(key)} - at {path}")
        return key


def _entry(line: bytes) -> Entry | None:
    try:
        return msgspec.json.decode(line, type=Entry)
    except (msgspec.MsgspecError, ValueError):
        return None


def _write(path: Path, data: bytes) -> None:
    """Append, and see that it is on the disk."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def nearest(before: Iterable[str], now: NDArray[np.uint8]) -> int | None:
    """Count the nodes in which a commitment differs from the nearest of earlier ones.

    Parameters
    ----------
    before : iterable of str
        As `encode` writes them; empty ones do not count.
    now : uint8 (nodes, 32)

    Returns
    -------
    int or None
        None when there is no earlier one.
    """
    return min((count_changed(decode(text), now) for text in set(before) if text), default=None)


def count_changed(before: NDArray[np.uint8], now: NDArray[np.uint8]) -> int:
    """Count the nodes of two commitments that differ: so many ids, at least, came or went.

    Parameters
    ----------
    before, now : uint8 (nodes, 32)

    Returns
    -------
    int
        All of `now`'s nodes when the numbers of nodes differ.
    """
    if before.shape != now.shape:
        return len(now)
    return int(np.count_nonzero((before != now).any(axis=1)))


def encode(commitment: NDArray[np.uint8]) -> str:
    """Write a commitment as text; an empty one as nothing."""
    return b64encode(commitment.tobytes()).decode()


def decode(text: str) -> NDArray[np.uint8]:
    """Read what `encode` wrote."""
    return np.frombuffer(b64decode(text), np.uint8).reshape(-1, 32)
