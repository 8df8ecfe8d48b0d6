"""Checkpoints, from which an interrupted training resumes: one file per party, written while it runs.

For trees, the active party decides when all keep a round, and writes its own file only after every other party has. So
the others' files are never behind; their later trees are dropped when training resumes. In a regression all parties
write after every epoch and keep the last two, as a party that was killed may lack the last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import quote

import msgspec
import numpy as np

from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.files import Format, kind_of, read_file, write_file
from treaty.linear.lbfgs import EpochState
from treaty.machine.arrays import Floats
from treaty.machine.database import Mark, mark_of
from treaty.models.linear import FORMAT as LINEAR_PART
from treaty.models.linear import LinearPart
from treaty.models.statistics import FORMAT as STATISTICS_PART
from treaty.models.statistics import StatisticsPart
from treaty.models.trees import FORMAT as PART
from treaty.models.trees import ModelPart, check_part
from treaty.trees.boosting import RoundState

AnyPart = TypeVar("AnyPart", ModelPart, LinearPart, StatisticsPart, "LinearCheckpoint")
logger = logging.getLogger(__name__)

FORMAT, LINEAR = Format("checkpoint", 4), Format("linear-checkpoint", 2)
ANEW = (
    "start again: remove the .checkpoint files from the folder given to fit as checkpoint, or run the job without "
    "--resume. Keep all other files there: a .noise folder has the ledger of what was paid, and the key of its noise"
)


class Checkpoint(msgspec.Struct, kw_only=True):
    """One party's file."""

    # at the active party all finished trees, at the others all their splits so far
    part: ModelPart
    options: dict[str, Any]
    # `fingerprint` of the training rows
    table: bytes
    # those that every party has kept, after which training continues; at the active party also the margins,
    # (n_outputs * n_rows,), and the state of the sampling generator after them
    rounds: int = 0
    margins: Floats | None = None
    random_state: str | None = None
    # encoded, where rows are split: finding them takes rounds
    bins: bytes = b""

    def progressed(self, n_outputs: int) -> RoundState:
        """Return the state from which boosting resumes."""
        assert self.margins is not None
        assert self.random_state is not None
        return RoundState(self.rounds, self.margins.reshape(n_outputs, -1), self.random_state)

    def check(
        self, given: Mapping[str, Any], may_change: Collection[str], parties: Sequence[str], table: bytes
    ) -> None:
        """Raise ConfigError for other options, parties or rows than the checkpoint's.

        Of the options `given`, by name, those in `may_change` may differ. `parties` are all in the job's order; `table`
        is the `fingerprint` of the present rows.
        """
        _check_options(self.options, given, may_change)
        if self.part.forest is not None and self.part.forest.sources != tuple(parties):
            raise ConfigError(f"cannot resume with other parties than {', '.join(self.part.forest.sources)}; {ANEW}")
        _check_rows(self.part.party, self.table, table)


class LinearCheckpoint(msgspec.Struct, kw_only=True):
    """One party's file of a regression, also of a coordinator, which has no rows; fields as in `Checkpoint`.

    `states` are those after the last epochs, oldest first, at most two.
    """

    party: str
    model_id: str
    options: dict[str, Any]
    table: bytes
    states: list[EpochState]
    kept: dict[str, Mark] = {}

    def check(self, given: Mapping[str, Any], may_change: Collection[str], table: bytes) -> None:
        """Raise ConfigError for other options or rows than the checkpoint's."""
        _check_options(self.options, given, may_change)
        _check_rows(self.party, self.table, table)


def _check_options(kept: Mapping[str, Any], given: Mapping[str, Any], may_change: Collection[str]) -> None:
    changed = [
        f"{name}={given.get(name)!r} (was {kept.get(name)!r})"
        for name in sorted({*given, *kept} - set(may_change))
        if given.get(name) != kept.get(name)
    ]
    if changed:
        sums = given.get("sums") != kept.get("sums")
        hint = ", or name sums (else they follow from allow_exact_sums, encryption and key_bits)" if sums else ""
        raise ConfigError(f"cannot resume with other options: {', '.join(changed)}; set them back{hint}, or {ANEW}")


def _check_rows(party: str, kept: bytes, table: bytes) -> None:
    if table != kept:
        raise ConfigError(
            f"{party}: cannot resume: the training rows, eval sets or classes differ from the checkpoint's; bring "
            f"them back, or {ANEW}",
            public="it cannot resume: its training rows or eval sets have changed",
        )


def fingerprint(rows: Sequence[tuple[Table, Sequence[Floats | None]]], classes: Sequence[Any] = ()) -> bytes:
    """Return SHA-256 over a party's training rows and eval sets, with labels and weights at the active party."""
    digest = hashlib.sha256(msgspec.msgpack.encode(list(classes)))
    for table, labels in rows:
        digest.update(msgspec.msgpack.encode([table.schema, table.n_rows]))
        for values in chain(table.columns, labels):
            digest.update(b"-" if values is None else np.ascontiguousarray(values).tobytes())
    return digest.digest()


def checkpoint_of(part: ModelPart, given: dict[str, Any], table: bytes, kept: RoundState | None = None) -> Checkpoint:
    """Return a party's checkpoint; `kept` is the active party's state after the last round that all have kept."""
    checkpoint = Checkpoint(part=part, options=given, table=table)
    if kept is not None:
        checkpoint.rounds, checkpoint.random_state = kept.rounds, kept.random_state
        checkpoint.margins = kept.margins.ravel()
    return checkpoint


def load_checkpoint(path: str | os.PathLike[str], party: str | None = None) -> Checkpoint:
    """Read a checkpoint of a party (None: of any); raise ConfigError as `load_part` does."""
    checkpoint = read_file(path, Checkpoint, FORMAT, party)
    forest = checkpoint.part.forest
    try:
        check_part(checkpoint.part)
        if forest is not None:
            n_outputs = forest.objective.n_outputs
            if checkpoint.margins is None or checkpoint.random_state is None or len(checkpoint.margins) % n_outputs:
                raise ValueError("an active party's checkpoint without its margins")
            if not 0 <= checkpoint.rounds <= forest.rounds:
                raise ValueError("fewer trees than rounds")
    except ValueError as error:
        raise ConfigError(f"expected a Treaty checkpoint, got {error} - at {path}") from None
    return checkpoint


def checkpoint_file(folder: str | os.PathLike[str], party: str) -> Path:
    """Return the path of a party's checkpoint."""
    # a party's name may have characters that a file's must not
    return Path(folder) / f"{quote(party, safe=' ')}.checkpoint"


# what a party counts over all jobs on its table: the cost of noise, with its key; hints of the lattice map, which are
# there, too; what sides of splits have revealed; and sums over its columns that statistics have revealed
Counted = Literal["noise", "hints", "sides", "answers"]


def ledger_folder(folder: str | os.PathLike[str], party: str, counted: Counted) -> Path:
    """Return the folder of a party's ledger, which outlives checkpoints."""
    return checkpoint_file(folder, party).with_suffix(f".{counted}")


def marked(part: AnyPart, store: Path | None, party: str) -> AnyPart:
    """Return a part with the marks of the party's ledgers."""
    kept = {str(folder.resolve()): mark_of(folder) for folder in _ledgers(store, party)}
    return msgspec.structs.replace(part, kept={folder: mark for folder, mark in kept.items() if mark is not None})


def check_ledgers(models: Iterable[Path], store: Path | None, party: str) -> None:
    """Raise ConfigError for ledgers in `store` that a party's earlier models (part, checkpoint) show to be outdated."""
    for model in models:
        for folder in _ledgers(store, party):
            was = _marks_of(model).get(str(folder.resolve()))
            now = None if was is None else mark_of(folder)
            if was is None or (now is not None and now.name == was.name and now.changes >= was.changes):
                continue
            fault = "gone" if now is None else "another one" if now.name != was.name else "an older copy"
            raise ConfigError(
                f"{model} was trained with the ledger {folder}, and that is {fault}; bring back the newest copy of the "
                "folder and of the .kept file next to it. A reset would forget what people have paid and what "
                f"answers have leaked: move {model} away",
                public="what its earlier models have cost is no longer counted; it has the details",
            )


def _ledgers(store: Path | None, party: str) -> list[Path]:
    return [] if store is None else [ledger_folder(store, party, counted) for counted in get_args(Counted)]


class _Marked(msgspec.Struct):
    kept: dict[str, Mark] = {}


class _MarkedCheckpoint(msgspec.Struct):
    part: _Marked


def _marks_of(model: Path) -> dict[str, Mark]:
    """Return the marks in a party's model; none if there is no model, or it cannot be read."""
    if not model.exists():
        return {}
    try:
        kind = kind_of(model)
        if kind == FORMAT.kind:
            return read_file(model, _MarkedCheckpoint, FORMAT).part.kept
        others = {form.kind: form for form in (PART, LINEAR_PART, STATISTICS_PART, LINEAR)}
        return read_file(model, _Marked, others.get(kind, PART)).kept
    except ConfigError as error:
        logger.warning("cannot check ledgers against an earlier model: %s", error)
        return {}


@dataclass(slots=True)
class Keeper:
    """Writes a party's checkpoint during training.

    With `resume` training resumes from the file at `path`, if there is one and it is the party's (None: any party's);
    else it starts from the beginning and replaces the file. Writing takes at most a `share` of the time. `store` has
    the party's ledgers, whose marks the file then holds.
    """

    path: Path
    resume: bool = False
    share: float = 0.05
    party: str | None = None
    store: Path | None = None
    _next: float = 0.0
    _kinds: set[str] = field(default_factory=set)
    _current: Callable[[], Checkpoint | LinearCheckpoint] | None = None

    def found(self) -> Checkpoint | None:
        """Return the checkpoint to resume from; None to start from the beginning."""
        return load_checkpoint(self.path, self.party) if self.resume and self.path.exists() else None

    def found_linear(self) -> LinearCheckpoint | None:
        """Return a regression's checkpoint to resume from; None to start from the beginning."""
        found = self.resume and self.path.exists()
        return read_file(self.path, LinearCheckpoint, LINEAR, self.party) if found else None

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last writing."""
        return time.perf_counter() >= self._next

    def keep(self, current: Callable[[], Checkpoint | LinearCheckpoint], began: float | None = None) -> None:
        """Write the file; if training ends early, `current` is called again for its content.

        `began` is when others were asked to keep theirs, by `time.perf_counter`.
        """
        self._current = current
        self.write(began)

    def write(self, began: float | None = None) -> None:
        """Write the current checkpoint, if there is one; the old file is replaced only by a whole new one."""
        if self._current is None:
            return
        started = time.perf_counter() if began is None else began
        # writing reports problems of the folder
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = self._current()
        if isinstance(checkpoint, LinearCheckpoint):
            write_file(self.path, marked(checkpoint, self.store, checkpoint.party), LINEAR, checkpoint.party)
        else:
            party = checkpoint.part.party
            checkpoint = msgspec.structs.replace(checkpoint, part=marked(checkpoint.part, self.store, party))
            write_file(self.path, checkpoint, FORMAT, party)
        ended = time.perf_counter()
        # so that writing takes at most `share` of the time
        self._next = ended + (ended - started) / self.share

    def beside(self, model_id: str, kind: str) -> Path:
        """Return the path, with the suffix `kind`, of another file of an unfinished model."""
        self._kinds.add(kind)
        return self.path.with_name(f"{self.path.stem}-{model_id[:8]}.{kind}")

    def keep_only(self, model_id: str) -> None:
        """Remove the other files of all models but one, whose first round is in a checkpoint."""
        self._remove(f"(?!{re.escape(model_id[:8])})")

    def done(self) -> None:
        """Remove the files, after training has finished and its result is saved."""
        self.path.unlink(missing_ok=True)
        self._remove()

    def _remove(self, which: str = "") -> None:
        if not self._kinds or not self.path.parent.exists():
            return
        name = re.compile(f"{re.escape(self.path.stem)}-{which}[0-9a-f]{{8}}\\.({'|'.join(self._kinds)})")
        for path in self.path.parent.iterdir():
            if name.fullmatch(path.name):
                path.unlink(missing_ok=True)


def checkpoint_of_model(
    keeper: Keeper | None, model_id: str, least: int, what: str, has: Callable[[Checkpoint], int]
) -> Checkpoint:
    """Return the checkpoint of a model that others resume; ConfigError unless it `has` as many rounds, or splits."""
    found = None if keeper is None else keeper.found()
    if found is None or found.part.model_id != model_id or has(found) < least:
        raise ConfigError(
            f"cannot resume: expected a checkpoint of model {model_id[:8]} with {least} {what}, got "
            + ("none" if found is None else f"one of model {found.part.model_id[:8]} with {has(found)}")
            + f" - at {keeper.path if keeper else 'this party, which keeps none'}",
            public="it has no checkpoint of the training to resume",
        )
    return found
