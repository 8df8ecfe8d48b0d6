"""What edge servers and users keep beside checkpoints until the model is safe, so that a training can go on.

An edge server keeps its domain's cohorts, written before a sum is opened, for what was opened in the first run still
counts; and, where it holds shares of rows, a digest of each user's. A user keeps a digest of its rows, and the seed of
their shares. So sums and hidden trees are of the first run's rows alone: numbers are packed for as many rows as there
were then, and rows brought later would be told their way down all finished trees again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.files import Format, read_file, write_file
from treaty.models.checkpoints import Keeper
from treaty.systems.fedxgb.sums.cohorts import Cohorts, Rules, Standing

_DOMAIN, _ROWS = Format("cohorts", 3), Format("row-digest", 1)
ROUNDS = 2  # rounds begun by when the server has kept one, and files of earlier models serve nobody
COHORTS, ROWS = "cohorts", "digest"  # kinds of files


# ---------------------------------------------------------------- edge server


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
    """An edge server's file about its domain; nothing is kept without a `keeper`.

    `standings` are read as the file is written. `shares` has the `digest` of each user's shares of its rows.
    """

    def __init__(self, keeper: Keeper | None, owner: str, model_id: str, standings: Mapping[str, Standing]) -> None:
        self.shares: dict[str, bytes] = {}
        self._path = None if keeper is None else keeper.beside(model_id, COHORTS)
        self._owner, self._model_id, self._standings = owner, model_id, standings

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
        """Return the cohorts of a training that goes on, and set standings; ConfigError where they are not known."""
        path = self._path
        kept = read_file(path, _KeptDomain, _DOMAIN, self._owner) if path is not None and path.exists() else None
        if kept is None or kept.model_id != self._model_id:
            got = "none" if kept is None else f"those of model {kept.model_id[:8]}"
            raise ConfigError(
                f"cannot resume: expected the cohorts whose sums were opened for model {self._model_id[:8]}, got {got} "
                f"- at {path or self._owner}; bring the file back. To begin anew, without --resume or the server's "
                "checkpoint, opens sums of the same rows over other cohorts: with those of before, the server may find "
                "sums of single users",
                public="it does not know whose sums were opened before",
            )
        self.shares = kept.shares
        for name, (called, lost) in kept.called.items():
            if name in self._standings:
                self._standings[name].called, self._standings[name].lost = called, lost
        return Cohorts.known(rules, rng, kept.users, kept.opened, kept.groups, kept.running)


def digest(pieces: Iterable[NDArray[np.uint64]]) -> bytes:
    """Return SHA-256 of a user's shares of its rows, however they are cut."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(np.ascontiguousarray(piece).reshape(-1).data)
    return found.digest()


# ---------------------------------------------------------------- user


class _KeptRows(msgspec.Struct):
    """A seed, and HMAC-SHA256 of the rows under it."""

    model_id: str
    seed: bytes
    rows: bytes


def seed_of_rows(keeper: Keeper | None, owner: str, model_id: str, rows: bytes, *, resumed: bool) -> bytes:
    """Return the secret seed, 32 bytes, of the shares of a user's rows, given their fingerprint.

    Raises ConfigError where a training goes on (`resumed`) that had other rows of this user, or none.
    """
    path = None if keeper is None else keeper.beside(model_id, ROWS)
    if resumed:
        kept = read_file(path, _KeptRows, _ROWS, owner) if path is not None and path.exists() else None
        if kept is None or kept.model_id != model_id:
            raise ConfigError(
                f"{owner}: cannot resume: it has no record of its rows of the first run, in which it took no part, or "
                f"whose file is gone - at {path or owner}; it can take part when training begins anew",
                public="it cannot resume: it has no record of its rows of the first run",
            )
        if not hmac.compare_digest(kept.rows, _under(kept.seed, rows)):
            raise ConfigError(
                f"{owner}: cannot resume: the training rows, labels or weights are not those of the first run, for "
                f"which sums were laid out; bring them back - at {path}",
                public="it cannot resume: its training rows have changed",
            )
        return kept.seed
    seed = secrets.token_bytes(32)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, _KeptRows(model_id, seed, _under(seed, rows)), _ROWS, owner)
    return seed


def row_key(seed: bytes, encoded: NDArray[np.int64], holders: Sequence[str]) -> bytes:
    """Return the key of the randomness with which rows are shared: another one for other rows, or other holders."""
    head = msgspec.msgpack.encode([encoded.shape, list(holders)])
    return _under(seed, hashlib.sha256(head).digest() + np.ascontiguousarray(encoded).tobytes())


def _under(seed: bytes, content: bytes) -> bytes:
    return hmac.digest(seed, content, "sha256")
