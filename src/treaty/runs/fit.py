"""Training and prediction for estimators: in one place, in threads, or in processes of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.machine.process import cores
from treaty.models.checkpoints import Keeper, check_ledgers, checkpoint_file, ledger_folder
from treaty.models.interpretation import Contributions, explain_pooled, rows_first
from treaty.models.linear import pooled_margins
from treaty.models.trees import ModelPart, RowDecisions, cut_to_records, predict_pooled, row_decisions
from treaty.privacy.ledger import Ledger
from treaty.runs.party import TrainingClock
from treaty.runs.processes import predict_in_processes, train_in_processes
from treaty.runs.progress import TrainingBar, steps_bar
from treaty.runs.threads import Run, Traffic, active_of, predict_in_threads, traffic_of, train_in_threads
from treaty.systems.observers import play_role
from treaty.systems.pooled.system import ALONE, noisy_labels, side_by_side
from treaty.systems.system import LabelledRows, System
from treaty.systems.vertical.prediction import collect, predict_passive


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """A finished training: parts, traffic, seconds by phase and in total, and what each party or role learned."""

    # by party; if rows are split, or there is one table, the whole model is the part of `ALONE`
    parts: dict[str, Any]
    traffic: Traffic
    seconds: dict[str, float]
    # beyond its own data, in sentences
    learned: dict[str, list[str]]


def train(
    run: Run,
    *,
    transport: str,
    checkpoint: Path | None,
    weighted: bool = False,
    finished: Callable[[dict[str, Any]], None] = lambda parts: None,
    watch: Callable[[int, Any], None] = lambda done, part: None,
) -> TrainingOutcome:
    """Train with every party on this machine, by `transport` "memory" or "tls".

    `checkpoint` is the folder for checkpoints, and for files that later fits on the same rows need. `weighted` says
    whether rows have weights. `finished` is called with all parties' parts after every round, so that finished rounds
    survive an error; `watch` after every round or epoch with their number and the active party's part, or epochs'
    losses by set. For boosted trees `watch` may raise `NoMoreTrees`, which ends the training. Under "tls" it is called
    once, at the end.
    """
    started = time.perf_counter()
    system, roles = run.system, run.roles
    progress = _Progress(run, finished, watch)
    with ExitStack() as held:
        keeping = roles.having(*system.has_model, *system.named_roles, *system.until_kept)
        keepers = held.enter_context(_keepers(checkpoint, system, keeping, roles.active))
        bar = held.enter_context(TrainingBar(system.name, run.common.most_rounds, shown=transport == "memory"))
        progress.bar = bar
        run = replace(run, progress=progress, phase=bar.phase, store=checkpoint)
        noisy: Path | None = None
        if run.options.label_epsilon is not None:
            # kept as long as the folder of checkpoints, or else for this fit
            noisy = (checkpoint or Path(held.enter_context(TemporaryDirectory()))) / "noisy_labels"
            if transport == "memory":
                own = run.data[roles.active]
                ledger = Ledger(None if checkpoint is None else ledger_folder(checkpoint, roles.active, "noise"))
                own = replace(own, y=noisy_labels(noisy, own.y, run.classes, run.options, ledger, "fit"))
                run = replace(run, data={**run.data, roles.active: own})
        if system.split == "none":
            parts, traffic = _train_alone(run, keepers), Traffic()
        elif transport == "tls":
            parts, traffic = train_in_processes(run, weighted=weighted, checkpoints=checkpoint, noisy_labels=noisy)
        else:
            try:
                played = train_in_threads(run, keepers)
            except BaseException:
                progress.cut()
                raise
            owners = roles.having(*system.has_model)
            parts, traffic = {name: played.results[name] for name in owners}, traffic_of(played.transcripts.values())
    part = parts[roles.active] if roles.active in parts else next(iter(parts.values()))
    if system.split == "rows":
        parts = {ALONE: whole(part)}
    learned = system.disclosures(roles, run.options, run.common, part)
    seconds = traffic.seconds or progress.clock.seconds(system)
    return TrainingOutcome(parts, traffic, {**seconds, "total": time.perf_counter() - started}, learned)


class _Progress:
    """The progress of a fit: keeps finished rounds, and notes when training began."""

    bar: TrainingBar

    def __init__(self, run: Run, finished: Callable[[dict[str, Any]], None], watch: Callable[[int, Any], None]) -> None:
        self.clock = TrainingClock()
        self._run, self._finished, self._watch = run, finished, watch
        self._kept: dict[str, ModelPart] = {}
        self._owners = run.roles.owners if run.system.split == "columns" else [ALONE]
        self._rounds = 0

    def __call__(self, done: int, part: Any) -> None:
        """Take a party's state after so many rounds: its part, epochs' losses by set, or None."""
        if part is None:
            return
        if isinstance(part, ModelPart):
            by_row = self._run.system.split == "rows"
            if by_row and part.party != self._run.roles.active:
                return
            self._kept[ALONE if by_row else part.party], self._rounds = part, max(self._rounds, done)
            # the last party to begin may be behind the others by a round
            if self._rounds and len(self._kept) == len(self._owners):
                self._finished({name: whole(part) if by_row else self._kept[name] for name in self._owners})
            if not part.is_active:
                return
        self.clock.round_finished(done, part)
        self.bar(done, part)
        self._watch(done, part)

    def cut(self) -> None:
        """Drop rounds that not every owner has recorded."""
        if self._run.system.split == "columns" and len(self._kept) == len(self._owners):
            cut_to_records(list(self._kept.values()))


def _train_alone(run: Run, keepers: Mapping[str, Keeper]) -> dict[str, Any]:
    """Train in one place; eval sets of several tables are put side by side."""
    assert run.system.alone is not None
    evals = [of.rows(side_by_side(of.tables), number) for number, of in enumerate(run.eval_sets)]
    # without peers, there is no connected party
    none: Any = None
    inputs = replace(
        run.inputs(none, cores(run.n_jobs), progress=run.progress), data=run.data[run.roles.active],
        classes=run.classes, eval_sets=evals, keeper=keepers.get(ALONE), part=run.earlier.get(ALONE),
    )  # fmt: skip
    tables = {name: data.table for name, data in run.data.items()}
    parts: dict[str, Any] = play_role(partial(run.system.alone, tables), inputs)
    return parts


def whole(part: ModelPart) -> ModelPart:
    """Return a participant's part, which is a whole model, as the part of a plain table."""
    return msgspec.structs.replace(part, party=ALONE, forest=replace(part.grown, sources=(ALONE,)))


@contextmanager
def _keepers(folder: Path | None, system: System, owners: Iterable[str], active: str) -> Iterator[dict[str, Keeper]]:
    """Yield the keepers of parties' checkpoints, if there is a folder: written after an error, removed at the end."""
    keepers: dict[str, Keeper] = {}
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot keep checkpoints in {folder}: {error.strerror}; expected a folder") from None
        names = [ALONE] if system.split == "none" else dict.fromkeys([*owners, active])
        again = "resume" not in system.cannot
        for name in names:
            kept = checkpoint_file(folder, name)
            check_ledgers([kept], folder, name)
            keepers[name] = Keeper(kept, resume=again, party=name, store=folder)
        left = checkpoint_file(folder, active)
        if "resume" in system.cannot and left.exists():
            raise ConfigError(
                f"{system.cannot['resume']}; take the model so far from the checkpoint, or remove it to start again - "
                f"at {left}"
            )
    try:
        yield keepers
    except BaseException:
        for keeper in keepers.values():
            keeper.write()
        raise
    for keeper in keepers.values():
        keeper.done()


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model, as estimators use it for predictions."""

    system: System
    # the system's own options, and those of boosting or regression
    settings: tuple[Any, Any]
    # by party: a `ModelPart` or `LinearPart`
    parts: Mapping[str, Any]
    n_jobs: int | None

    @property
    def in_one_place(self) -> bool:
        """Whether one party predicts alone."""
        return self.system.split != "columns"

    def margins(self, tables: Mapping[str, Table], transport: str) -> NDArray[np.float64]:
        """Return margins: (n_rows, n_outputs) of trees, (n_rows,) of a regression."""
        if self.in_one_place and self.system.common.table == "regression":
            return pooled_margins(self.parts, tables)
        if self.in_one_place:
            return predict_pooled(list(self.parts.values()), [side_by_side(tables)], cores(self.n_jobs))
        if transport == "tls":
            return predict_in_processes(self.parts, tables, self.settings, self.n_jobs)
        with steps_bar("predicting") as steps:
            found = predict_in_threads(
                self.system, self.system.predict, self.parts, tables, self.settings, self.n_jobs,
                lambda title, done, total: steps(done, total),
            )  # fmt: skip
        return np.asarray(found[active_of(self.parts)])

    def decisions(self, tables: Mapping[str, Table]) -> RowDecisions:
        """Return all owners' decisions, which give the active party leaves and margins of every stage."""
        if self.in_one_place:
            (part,) = self.parts.values()
            return row_decisions(part, side_by_side(tables), cores(self.n_jobs))
        programs = {"active": collect, "passive": predict_passive}
        played = predict_in_threads(self.system, programs, self.parts, tables, self.settings, self.n_jobs)
        found: RowDecisions = played[active_of(self.parts)]
        return found

    def contributions(self, tables: Mapping[str, Table]) -> NDArray[np.float64] | Contributions:
        """Return contributions: of a pooled model one array with the bias last, of a vertical model by party."""
        if self.in_one_place:
            parts = list(self.parts.values())
            return rows_first(explain_pooled(parts, [side_by_side(tables)], cores(self.n_jobs)))
        lead = active_of(self.parts)
        found = predict_in_threads(self.system, self.system.explain, self.parts, tables, self.settings, self.n_jobs)
        own = {name: found[lead].own if name == lead else found[name] for name in self.parts}
        return Contributions({name: rows_first(values) for name, values in own.items()}, found[lead].bias)


def no_rows(schema: Schema, n_classes: int) -> LabelledRows:
    """Return rows that only define the columns and classes: one of each class, all values missing."""
    missing = np.full(max(1, n_classes), np.nan, np.float32)
    table = Table(schema, [missing] * len(schema.names), len(missing))
    return LabelledRows(table, np.arange(len(missing), dtype=np.float64))
