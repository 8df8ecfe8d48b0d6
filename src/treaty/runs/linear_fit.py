"""What `LogisticRegression` has done for it: training and prediction on one table, in threads, or in processes.

A federated protocol is to leave what `train_pooled` leaves: of each party a `LinearPart` with the schema and
preparation of its own table and the weights of its own prepared columns; at the active party intercept, classes and
losses, too. On the same seed of batches its weights are those of `treaty.linear.training.train` up to the rounding of
encrypted numbers (which epochs long after the loss has settled may amplify, see docs/logistic.md). Rules shared with
it: `preparation_of` each party's own table; labels -1 and +1; the active party's matrix is its prepared columns, then a
column of ones (`intercept=True`); a `Slice` at each owner, one `Coordinator`, and the active party's `Schedule`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.linear.batches import batch_seed
from treaty.linear.losses import LOSSES, warn_beyond_taylor
from treaty.linear.training import Optimiser, train
from treaty.models.linear import LinearPart, preparation_of
from treaty.runs.fit import ALONE
from treaty.runs.linear_processes import predict_linear_in_processes, train_linear_in_processes
from treaty.runs.linear_threads import (
    coordinator_name,
    predict_linear_in_threads,
    train_linear_in_threads,
)
from treaty.runs.threads import Traffic
from treaty.systems.linear_options import LinearOptions
from treaty.systems.logistic.disclosures import linear_disclosures
from treaty.systems.logistic.setup import check_roles
from treaty.systems.pooled.training import Labelled

Epochs = Callable[[list[float]], None]
"""Called with the losses of all epochs so far, after each."""


@dataclass(frozen=True, slots=True)
class TrainedLinear:
    """What a training left.

    Attributes
    ----------
    parts : dict
        Of each party.
    traffic : Traffic
    seconds : dict
        Per phase ("setup", "training"), and in total.
    learned : dict
        What each party learned, in words.
    """

    parts: dict[str, LinearPart]
    traffic: Traffic
    seconds: dict[str, float]
    learned: dict[str, list[str]]


def train_linear(
    tables: Mapping[str, Table],
    data: Labelled,
    active: str,
    classes: list[Any],
    options: LinearOptions,
    *,
    transport: str,
    n_jobs: int | None,
    checkpoint: Path | None,
    progress: Epochs,
) -> TrainedLinear:
    """Train as the options say, playing every party on this machine.

    Parameters
    ----------
    tables : mapping of str to Table
        Of every party, rows in common order; the active one's may have no column.
    data : Labelled
        The active party's table, with labels 0 and 1 (numbers of classes), and weights.
    active : str
    classes : list
        Labels by class number; two.
    transport : {"memory", "grpc"}
    checkpoint : Path or None
        Folder of what is kept from one fit to the next; "pooled" keeps nothing.
    progress : callable
    """
    started = time.perf_counter()
    if options.protocol != "pooled":
        return _train_between_parties(
            tables, data, active, classes, options, transport, n_jobs, checkpoint, progress, started
        )
    parts, begun = train_pooled(tables, data, active, classes, options, progress)
    ended = time.perf_counter()
    seconds = {"setup": begun - started, "training": ended - begun, "total": ended - started}
    return TrainedLinear(parts, Traffic(), seconds, {ALONE: ["everything: all columns and labels are in one place"]})


def _train_between_parties(
    tables: Mapping[str, Table],
    data: Labelled,
    active: str,
    classes: list[Any],
    options: LinearOptions,
    transport: str,
    n_jobs: int | None,
    checkpoint: Path | None,
    progress: Epochs,
    started: float,
) -> TrainedLinear:
    """Play all parties, in threads or in processes."""
    begun = [started]

    def watch(losses: list[float]) -> None:
        if not losses:
            begun.append(time.perf_counter())
        progress(losses)

    lead = coordinator_name(tables, options)
    check_roles(options, active, list(tables), lead)  # refused before anything is played
    play = train_linear_in_processes if transport == "grpc" else train_linear_in_threads
    parts, traffic = play(tables, data, active, classes, options, n_jobs, watch, checkpoint)
    ended = time.perf_counter()
    seconds = traffic.seconds or {"setup": begun[-1] - started, "training": ended - begun[-1]}
    hosts = [name for name in tables if name != active]
    learned = linear_disclosures(active, hosts, lead, options, parts[active].encryption, parts[active].alone)
    return TrainedLinear(parts, traffic, {**seconds, "total": ended - started}, learned)


def train_pooled(
    tables: Mapping[str, Table],
    data: Labelled,
    active: str,
    classes: list[Any],
    options: LinearOptions,
    progress: Epochs,
) -> tuple[dict[str, LinearPart], float]:
    """Train on all columns in one place; return the parts, and when training began after preparation."""
    prepared = {name: preparation_of(table) for name, table in tables.items()}
    n_rows = data.table.n_rows
    X = np.hstack(
        [*(prepared[name].matrix(table.columns, n_rows) for name, table in tables.items()), np.ones((n_rows, 1))]
    )
    begun = time.perf_counter()
    fitted = train(
        X,
        2.0 * data.y - 1.0,
        Optimiser(
            memory=options.pairs,
            period=options.period,
            batch_size=options.batch_size,
            seed=batch_seed(options.random_state),
            learning_rate=options.first_rate,
            tol=options.tol,
            max_iter=options.max_iter,
            l2=options.l2,
        ),
        loss=LOSSES[options.loss or "taylor"],
        weight=data.weight,
        on_epoch=lambda so_far: progress(so_far.losses),
    )
    if options.loss != "logistic":
        warn_beyond_taylor(X @ fitted.weights)
    model_id = secrets.token_hex(16)
    ends = np.cumsum([made.n_columns for made in prepared.values()])
    parts = {}
    for (name, made), coef in zip(prepared.items(), np.split(fitted.weights[:-1], ends[:-1]), strict=True):
        parts[name] = LinearPart(
            model_id=model_id,
            party=name,
            schema=tables[name].schema,
            preparation=made,
            coef=coef,
            intercept=float(fitted.weights[-1]) if name == active else None,
            classes=classes if name == active else None,
            loss=options.loss or "taylor",
            losses=fitted.losses if name == active else [],
        )
    return parts, begun


def predict_linear(
    parts: Mapping[str, LinearPart],
    tables: Mapping[str, Table],
    options: LinearOptions,
    *,
    transport: str,
    n_jobs: int | None,
) -> NDArray[np.float64]:
    """Return margins (n_rows,): log-odds of the second class."""
    if options.protocol != "pooled":
        if transport == "grpc":
            return predict_linear_in_processes(parts, tables, options, n_jobs)
        return predict_linear_in_threads(parts, tables)
    margins: NDArray[np.float64] = np.sum([part.margins(tables[name]) for name, part in parts.items()], axis=0)
    return margins
