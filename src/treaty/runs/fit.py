"""What estimators have done for them: training and prediction on one table, in threads, or in processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.compute import cores
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError
from treaty.models.checkpoints import Keeper, checkpoint_file, noise_folder
from treaty.models.interpretation import Contributions, explain_pooled, rows_first
from treaty.models.trees import ModelPart, cut_to_records, predict_pooled
from treaty.privacy.ledger import Ledger
from treaty.runs.crowds import Layout, train_crowd_in_threads
from treaty.runs.progress import TrainingBar, steps_bar
from treaty.runs.threads import (
    Traffic,
    decide_in_threads,
    explain_in_threads,
    predict_in_threads,
    traffic_of,
    train_horizontal_in_threads,
    train_in_threads,
)
from treaty.runs.tree_processes import (
    predict_in_processes,
    train_crowd_in_processes,
    train_horizontal_in_processes,
    train_in_processes,
)
from treaty.systems.pooled import training as pooled
from treaty.systems.pooled.training import Labelled, noisy_labels
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical.decisions import Decided

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
    rounds = 0

    def progress(done: int, part: ModelPart) -> None:
        nonlocal rounds
        kept[part.party], rounds = part, max(rounds, done)
        if part.forest is not None:
            begun.append(time.perf_counter())
            bar(done, part)
        if rounds and len(kept) == len(parties):  # the last party to begin may be behind the others by a round
            finished({name: kept[name] for name in parties})

    with ExitStack() as held:
        keepers = held.enter_context(_keepers(checkpoint, parties))
        bar = held.enter_context(TrainingBar(options.protocol, options.n_estimators, shown=transport == "memory"))
        noisy: Path | None = None
        # randomised labels are kept for this fit, or as long as the checkpoints' folder
        if options.mechanism == "label_rr":
            noisy = (checkpoint or Path(held.enter_context(TemporaryDirectory()))) / "noisy_labels"
            if transport == "memory":
                ledger = Ledger(None if checkpoint is None else noise_folder(checkpoint, active))
                data = replace(data, y=noisy_labels(noisy, data.y, classes, options, ledger, "fit"))
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
            try:
                parts, traffic = train_in_threads(
                    data, tables, evals, active, classes, options, n_jobs, progress, keepers, checkpoint, bar.phase
                )
            except BaseException:
                if len(kept) == len(parties):
                    cut_to_records(list(kept.values()))
                raise
    return Trained(parts, traffic, _seconds(traffic, started, begun))


def train_horizontal(
    shards: Mapping[str, Labelled],
    evals: Sequence[Labelled],
    lead: str,
    classes: list[Any] | None,
    options: TreeOptions,
    *,
    transport: str,
    n_jobs: int | None,
    checkpoint: Path | None,
    finished: Callable[[dict[str, ModelPart]], None],
) -> Trained:
    """Train between participants that hold rows of the same columns, playing all of them on this machine.

    The model is whole and the same at all of them, so what is returned has one part, `ALONE`.

    Parameters
    ----------
    shards : mapping of str to Labelled
        Every participant's rows; labels are class numbers.
    evals : sequence of Labelled
        Watched by the leader.
    lead : str
        A participant, or a party without data.
    transport, n_jobs, checkpoint, finished
        As `train` has them.
    """
    started = time.perf_counter()
    begun: list[float] = []

    def progress(done: int, part: ModelPart) -> None:
        begun.append(time.perf_counter())
        bar(done, part)
        if done and part.party == lead:  # processes tell, after a failure, what each of them has
            finished({ALONE: _whole(part)})

    with ExitStack() as held:
        keepers = held.enter_context(_keepers(checkpoint, dict.fromkeys([*shards, lead])))
        bar = held.enter_context(TrainingBar(options.protocol, options.n_estimators, shown=transport == "memory"))
        if transport == "grpc":
            parts, traffic = train_horizontal_in_processes(
                shards, evals, lead, classes, options, n_jobs, progress, checkpoint
            )
        else:
            parts, traffic = train_horizontal_in_threads(
                shards, evals, lead, classes, options, n_jobs, progress, keepers, checkpoint
            )
    return Trained({ALONE: _whole(parts[lead])}, traffic, _seconds(traffic, started, begun))


def train_crowd(
    shards: Mapping[str, Labelled],
    evals: Sequence[Labelled],
    layout: Layout,
    classes: list[Any] | None,
    schema: Schema,
    options: TreeOptions,
    *,
    transport: str,
    n_jobs: int | None,
    checkpoint: Path | None,
    finished: Callable[[dict[str, ModelPart]], None],
) -> Trained:
    """Train among users, edge servers and a server that gets the model, playing all of them on this machine.

    Parameters
    ----------
    shards : mapping of str to Labelled
        Every user's rows; labels are class numbers.
    evals : sequence of Labelled
        Watched by the server.
    layout : Layout
        Who is who.
    schema : Schema
        All users' columns.
    transport, n_jobs, checkpoint, finished
        As `train` has them; a checkpoint is kept, and cannot be gone on from.

    Raises
    ------
    ConfigError
        When there is a checkpoint, or options do not fit the columns or the transport.
    """
    started = time.perf_counter()
    begun: list[float] = []
    options.column_share(len(schema.names))  # refused before anything is summed
    if transport == "grpc" and options.dropout is not None:
        raise ConfigError("dropout has simulations in threads lose users; leave it out with transport='grpc'")

    def progress(done: int, part: ModelPart) -> None:
        begun.append(time.perf_counter())
        bar(done, part)
        if done:
            finished({ALONE: _whole(part)})

    with ExitStack() as held:
        keeper = held.enter_context(_keepers(checkpoint, [layout.server])).get(layout.server)
        if keeper is not None and keeper.found() is not None:
            raise ConfigError(
                "cannot resume: users of protocol 'fedxgb' do not come back as they were; take the model so far from "
                f"the checkpoint, or remove it to begin anew - at {keeper.path}"
            )
        bar = held.enter_context(TrainingBar(options.protocol, options.n_estimators, shown=transport == "memory"))
        if transport == "grpc":
            part, traffic = train_crowd_in_processes(
                shards, evals, layout, classes, schema, options, n_jobs, progress, checkpoint
            )
        else:
            played = train_crowd_in_threads(
                shards, evals, classes, schema, options, n_jobs, progress, keeper, layout=layout
            )
            part, traffic = played.results[layout.server], traffic_of(played.transcripts.values())
    return Trained({ALONE: _whole(part)}, traffic, _seconds(traffic, started, begun))


def _whole(part: ModelPart) -> ModelPart:
    """Return a participant's part, which is a whole model, as that of a plain table."""
    assert part.forest is not None
    return msgspec.structs.replace(part, party=ALONE, forest=replace(part.forest, sources=(ALONE,)))


@contextmanager
def _keepers(folder: Path | None, parties: Iterable[str]) -> Iterator[dict[str, Keeper]]:
    """Yield what keeps parties' checkpoints, if there is a folder: written after an error, removed at the end."""
    keepers: dict[str, Keeper] = {}
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot keep checkpoints in {folder}: {error.strerror}; expected a folder") from None
        keepers = {name: Keeper(checkpoint_file(folder, name), resume=True) for name in parties}
    try:
        yield keepers
    except BaseException:
        for keeper in keepers.values():
            keeper.write()
        raise
    for keeper in keepers.values():
        keeper.done()


def _seconds(traffic: Traffic, started: float, begun: Sequence[float]) -> dict[str, float]:
    ended = time.perf_counter()
    seconds = traffic.seconds or {"setup": begun[0] - started, "boosting": ended - begun[0]}
    return {**seconds, "total": ended - started}


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
