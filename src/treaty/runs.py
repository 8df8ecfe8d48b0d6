"""What estimators have done for them: training and prediction on one table, in threads, or in processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.checkpoints import Keeper, checkpoint_file
from treaty.compute import cores
from treaty.data.table import Schema, Table
from treaty.errors import DataError
from treaty.interpretation import Contributions, explain_pooled, rows_first
from treaty.models import ModelPart, predict_pooled
from treaty.options import TreeOptions
from treaty.processes import predict_in_processes, train_in_processes
from treaty.progress import TrainingBar, steps_bar
from treaty.protocols import pooled
from treaty.protocols.decisions import Decided
from treaty.protocols.pooled import Labelled, noisy_labels
from treaty.simulation import Traffic, decide_in_threads, explain_in_threads, predict_in_threads, train_in_threads

ALONE = "pooled"  # the party of a plain table


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training left.

    Attributes
    ----------
    parts : dict
        Of each party.
    traffic : Traffic
    seconds : dict
        Per phase, and in total.
    """

    parts: dict[str, ModelPart]
    traffic: Traffic
    seconds: dict[str, float]


def train(
    tables: Mapping[str, Table],
    data: Labelled,
    evals: Sequence[tuple[str, Mapping[str, Table], NDArray[np.float64]]],
    active: str,
    classes: list[Any] | None,
    options: TreeOptions,
    *,
    transport: str,
    n_jobs: int | None,
    checkpoint: Path | None,
    finished: Callable[[dict[str, ModelPart]], None],
) -> Trained:
    """Train as the options say, playing every party on this machine.

    Parameters
    ----------
    data : Labelled
        The active party's table, with labels and weights.
    evals : sequence of (name, tables, labels)
    transport : {"memory", "grpc"}
    checkpoint : Path or None
        Folder for checkpoints, and for noisy labels.
    finished : callable
        Given all parties' parts after every round, so that what is finished survives an error.
    """
    started = time.perf_counter()
    begun: list[float] = []
    parties = [ALONE] if options.protocol == "pooled" else list(tables)
    kept: dict[str, ModelPart] = {}

    def progress(done: int, part: ModelPart) -> None:
        kept[part.party] = part
        if part.forest is not None:
            begun.append(time.perf_counter())
            bar(done, part)
        if done and len(kept) == len(parties):
            finished({name: kept[name] for name in parties})

    keepers: dict[str, Keeper] = {}
    with ExitStack() as held:
        if checkpoint is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)
            keepers = {name: Keeper(checkpoint_file(checkpoint, name), resume=True) for name in parties}
        bar = held.enter_context(TrainingBar(options.protocol, options.n_estimators, shown=transport == "memory"))
        noisy: Path | None = None
        # randomised labels are kept for this fit, or as long as the checkpoints' folder
        if options.mechanism == "label_rr":
            noisy = (checkpoint or Path(held.enter_context(TemporaryDirectory()))) / "noisy_labels"
            if transport == "memory":
                data = replace(data, y=noisy_labels(noisy, data.y, classes, options))
        try:
            if options.protocol == "pooled":
                joined = replace(data, table=join(tables))
                watched = [Labelled(join(rows), y, None, name) for name, rows, y in evals]
                part = pooled.train(
                    joined, options, classes=classes, eval_sets=watched, threads=cores(n_jobs), progress=progress,
                    keeper=keepers.get(ALONE),
                )  # fmt: skip
                parts, traffic = {ALONE: part}, Traffic()
            elif transport == "grpc":
                parts, traffic = train_in_processes(
                    data, tables, evals, active, classes, options, n_jobs, progress, checkpoint, noisy
                )
            else:
                parts, traffic = train_in_threads(
                    data, tables, evals, active, classes, options, n_jobs, progress, keepers, checkpoint, bar.phase
                )
        except BaseException:
            for keeper in keepers.values():
                keeper.write()
            raise
    for keeper in keepers.values():
        keeper.done()
    ended = time.perf_counter()
    seconds = traffic.seconds or {"setup": begun[0] - started, "boosting": ended - begun[0]}
    return Trained(parts, traffic, {**seconds, "total": ended - started})


def predict(
    parts: Mapping[str, ModelPart],
    tables: Mapping[str, Table],
    options: TreeOptions,
    *,
    transport: str,
    n_jobs: int | None,
) -> NDArray[np.float64]:
    """Return margins (n_rows, n_outputs)."""
    threads = cores(n_jobs)
    if len(parts) == 1:
        return predict_pooled(list(parts.values()), [join(tables)], threads)
    if transport == "grpc":
        return predict_in_processes(parts, tables, options, n_jobs)
    with steps_bar("predicting") as steps:
        return predict_in_threads(parts, tables, options, n_jobs, steps)


def decided(parts: Mapping[str, ModelPart], tables: Mapping[str, Table], n_jobs: int | None) -> Decided:
    """Return all owners' decisions, from which the active party has leaves and margins of every stage."""
    if len(parts) == 1:
        (part,) = parts.values()
        return pooled.decided(part, join(tables), cores(n_jobs))
    return decide_in_threads(parts, tables, n_jobs)


def explained(
    parts: Mapping[str, ModelPart], tables: Mapping[str, Table], n_jobs: int | None
) -> NDArray[np.float64] | Contributions:
    """Return contributions: of a pooled model one array with the bias last, of a vertical one apart by party."""
    if len(parts) == 1:
        return rows_first(explain_pooled(list(parts.values()), [join(tables)], cores(n_jobs)))
    return explain_in_threads(parts, tables, n_jobs)


def join(tables: Mapping[str, Table]) -> Table:
    """Put tables side by side, the party's name in front of each column's where there are several."""
    if len(tables) == 1:
        return next(iter(tables.values()))
    names = tuple(f"{party}.{name}" for party, table in tables.items() for name in table.schema.names)
    if len(set(names)) < len(names):
        raise DataError("two columns are called the same once the party is put in front; rename a party")
    return Table(
        schema=Schema(
            names,
            tuple(kind for table in tables.values() for kind in table.schema.categories),
        ),
        columns=[column for table in tables.values() for column in table.columns],
        n_rows=next(iter(tables.values())).n_rows,
    )
