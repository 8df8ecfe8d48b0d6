"""The log a party keeps of its alignments: who asked, how large, and whether the ids changed since the last time.

Whoever may align again and again with slightly changed ids can find out about single ids (Guo et al., Birds of a
Feather Flock Together, USENIX Security 2022). So each party commits to its ids in every run under a key it keeps
(`treaty.crypto.hashing.commit`); the partner writes the commitment down and compares it with that of the run before.

A log is a file of JSON lines, only ever appended to. Each line holds the SHA-256 of the line before, so that a line
taken out or changed shows. The party's key lies beside it, readable to the owner alone: ``NAME.jsonl.key``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from base64 import b64decode, b64encode
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
        At least so many ids came or went at the peer since its last run in this log; None when there is none. It
        saturates: 256 nodes tell few changes from each other, many no more.
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
        self._writing = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.key = self._read_key()
            self.entries()
        except OSError as error:
            raise ConfigError(f"cannot use the run log {self.path}: {error.strerror}") from None

    def entries(self) -> list[Entry]:
        """Read and check all lines.

        Raises
        ------
        DataError
            When a line was changed, taken out or is malformed.
        """
        entries, previous = [], ""
        for number, line in enumerate(self._lines(), 1):
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.MsgspecError:
                raise DataError(f"expected a line of a run log, got none - at line {number} of {self.path}") from None
            if entry.previous != previous:
                raise DataError(
                    f"expected an untouched run log, but what came before line {number} of {self.path} was changed"
                )
            entries.append(entry)
            previous = hashlib.sha256(line).hexdigest()
        return entries

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
            When the peer has reached its limit; the attempt is not noted.
        """
        theirs = [entry for entry in self.entries() if entry.peer == peer and entry.event == "started"]
        now = datetime.now(UTC)
        recent = [entry for entry in theirs if now - entry.time < WINDOW]
        if len(recent) >= self.max_runs:
            error = ConfigError(
                f"{peer} has started {len(recent)} alignments within {WINDOW.days} days, the limit is {self.max_runs}; "
                f"raise max_runs if that is meant - at {self.path}"
            )
            error.public = f"its limit of {self.max_runs} alignments within {WINDOW.days} days is reached"
            raise error
        changed = None
        if theirs and theirs[-1].peer_commitment:
            changed = count_changed(decode(theirs[-1].peer_commitment), peer_commitment)
            if changed:
                logger.warning("%s changed its ids since its last alignment: %d or more came or went", peer, changed)
        self._append(
            Entry(
                time=now,
                event="started",
                job=job,
                peer=peer,
                own_size=own_size,
                peer_size=peer_size,
                own_commitment=encode(own_commitment),
                peer_commitment=encode(peer_commitment),
                changed=changed,
            )
        )
        return changed

    def finish(self, job: str, peer: str, own_size: int, peer_size: int, common: int | None) -> None:
        """Note that it ended well; `common` is None where this party did not learn it."""
        now = datetime.now(UTC)
        self._append(
            Entry(time=now, event="finished", job=job, peer=peer, own_size=own_size, peer_size=peer_size, common=common)
        )

    def _append(self, entry: Entry) -> None:
        with self._writing:
            lines = self._lines()
            previous = hashlib.sha256(lines[-1]).hexdigest() if lines else ""
            line = msgspec.json.encode(msgspec.structs.replace(entry, previous=previous)) + b"\n"
            with self.path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines() if self.path.exists() else []

    def _read_key(self) -> bytes:
        path = self.path.with_name(self.path.name + ".key")
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
        except FileExistsError:
            pass
        key = path.read_bytes()
        if len(key) != 32:
            raise ConfigError(f"expected a key of 32 bytes, got {len(key)} - at {path}")
        return key


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
