"""Estimators of trees with every party in a process of its own, for `transport="grpc"`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.sources import write_columns
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.messaging.certificates import check_names
from treaty.models.trees import ModelPart
from treaty.runs.crowds import Layout
from treaty.runs.job import Job, Member
from treaty.runs.party import find_part
from treaty.runs.processes import LABEL, PartyFailed, predict_margins, run_all, traffic_of
from treaty.runs.threads import Traffic, active_of
from treaty.systems.fedxgboost_smm.dealer import DEALER
from treaty.systems.pooled.training import Labelled, Progress
from treaty.systems.tree_options import TreeOptions

_WEIGHT = "__weight__"


def train_in_processes(
    data: Labelled,
    tables: Mapping[str, Table],
    evals: Sequence[tuple[str, Mapping[str, Table], NDArray[np.float64]]],
    active: str,
    classes: list[Any] | None,
    options: TreeOptions,
    n_jobs: int | None,
    progress: Progress,
    checkpoints: Path | None = None,
    noisy_labels: Path | None = None,
) -> tuple[dict[str, ModelPart], Traffic]:
    """Train with every party in a process of its own; return their parts and the traffic."""
    check_names(tables)  # which those of files are made of
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        parties = {}
        for party, table in tables.items():
            labels = {LABEL: _labels(data.y, classes), **({} if data.weight is None else {_WEIGHT: data.weight})}
            write_columns(folder / f"{party}.arrow", table, labels if party == active else {})
            for set_name, rows, y in evals:
                watched = {LABEL: _labels(y, classes)} if party == active else {}
                write_columns(folder / f"{party}.{set_name}.arrow", rows[party], watched)
            parties[party] = Member(
                table=str(folder / f"{party}.arrow"),
                eval_tables=[str(folder / f"{party}.{set_name}.arrow") for set_name, _, _ in evals],
                noisy_labels=None if noisy_labels is None else str(noisy_labels.resolve()),
            )
        if options.has_dealer:
            parties[DEALER] = Member(role="dealer")
        job = _fit(folder, active, parties, data.weight is not None, classes, options, n_jobs, checkpoints)
        return _run_training(job, classes, progress, resume=checkpoints is not None)


def train_horizontal_in_processes(
    data: Mapping[str, Labelled],
    evals: Sequence[Labelled],
    active: str,
    classes: list[Any] | None,
    options: TreeOptions,
    n_jobs: int | None,
    progress: Progress,
    checkpoints: Path | None = None,
) -> tuple[dict[str, ModelPart], Traffic]:
    """Train between holders of rows, every party in a process of its own.

    Parameters
    ----------
    data : mapping of str to Labelled
        Participants' rows, in the job's order; labels are numbers of `classes`. Weights at all of them or at none.
    evals : sequence of Labelled
        Whole tables, watched by the leader.
    active : str
        The leader; one that is not in `data` brings no rows.
    classes : list or None
        Labels by class number, each of them in the rows of some participant; None for regression.
    options, n_jobs
        See `Job`.
    progress : callable
        Called after a failure with 1 and the model as far as the leader has it.
    checkpoints : Path or None
        Folder of checkpoints, from which an interrupted training goes on.

    Returns
    -------
    parts : dict of str to ModelPart
        The whole model, as the leader has it.
    traffic : Traffic

    Raises
    ------
    ConfigError
        For a name that cannot stand in a certificate; nothing is written then.
    PartyFailed
        When a process fails, with the error of each.
    """
    check_names([*data, active])
    weighted = any(rows.weight is not None for rows in data.values())
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        watched = [
            _written(rows, folder / f"{active}.eval_{k}.arrow", classes, weights=False) for k, rows in enumerate(evals)
        ]
        parties = {} if active in data else {active: Member(eval_tables=watched)}
        for party, rows in data.items():
            table = _written(rows, folder / f"{party}.arrow", classes, weights=weighted)
            parties[party] = Member(table=table, eval_tables=watched if party == active else [])
        job = _fit(folder, active, parties, weighted, classes, options, n_jobs, checkpoints)
        return _run_training(job, classes, progress, resume=checkpoints is not None, owners=[active])


def train_crowd_in_processes(
    shards: Mapping[str, Labelled],
    evals: Sequence[Labelled],
    layout: Layout,
    classes: list[Any] | None,
    schema: Schema,
    options: TreeOptions,
    n_jobs: int | None,
    progress: Progress,
    checkpoints: Path | None = None,
) -> tuple[ModelPart, Traffic]:
    """Train in a crowd, every role in a process of its own.

    Parameters
    ----------
    shards : mapping of str to Labelled
        Users' rows; labels are numbers of `classes`. Weights at all of them or at none.
    evals : sequence of Labelled
        Whole tables, watched by the server.
    layout : Layout
        Who is who.
    classes : list or None
        Labels by class number; None for regression.
    schema : Schema
        All users' columns.
    options, n_jobs
        See `Job`.
    progress : callable
        Called after a failure with 1 and the model as far as the server has it.
    checkpoints : Path or None
        Where the server keeps the model so far.

    Returns
    -------
    part : ModelPart
        The whole model, which the server has.
    traffic : Traffic

    Raises
    ------
    ConfigError
        For a name that cannot stand in a certificate; nothing is written then.
    PartyFailed
        When a process other than a user's fails, with the error of each.
    """
    check_names(shards)
    weighted = any(rows.weight is not None for rows in shards.values())
    none = np.full(1 if classes is None else len(classes), np.nan, np.float32)
    examples = Table(schema, [none] * len(schema.names), len(none))  # tell the columns, and one row of each class
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        own = folder / f"{layout.server}.arrow"
        write_columns(own, examples, {LABEL: np.arange(len(none), dtype=np.float64)})
        parties = {
            layout.server: Member(
                role="server",
                table=str(own),
                eval_tables=[
                    _written(rows, own.with_suffix(f".eval_{k}.arrow"), None, weights=False)
                    for k, rows in enumerate(evals)
                ],
            ),
            layout.authority: Member(role="authority"),
            **{edge: Member(role="edge") for edge in layout.edges},
        }
        for edge, users in layout.domains.items():
            for user in users:
                table = _written(shards[user], folder / f"{user}.arrow", None, weights=weighted)
                parties[user] = Member(role="user", edge=edge, table=table)
        job = _fit(folder, layout.server, parties, weighted, classes, options, n_jobs, checkpoints)
        parts, traffic = _run_training(job, classes, progress, resume=False, owners=[layout.server])
        return parts[layout.server], traffic


def _fit(
    folder: Path,
    active: str,
    parties: dict[str, Member],
    weighted: bool,
    classes: list[Any] | None,
    options: TreeOptions,
    n_jobs: int | None,
    checkpoints: Path | None,
) -> Job:
    """Write the job of a fit, whose tables lie in the folder and whose models will."""
    kept = None if checkpoints is None else str(checkpoints.resolve())
    return Job(
        name="fit", active=active, label=LABEL, weight=_WEIGHT if weighted else None, parties=parties,
        options=_given(options), task="regression" if classes is None else "classification",
        output=str(folder / "model"), checkpoints=kept, store=kept, n_jobs=n_jobs,
    )  # fmt: skip


def _labels(y: NDArray[np.float64], classes: list[Any] | None) -> NDArray[Any]:
    """Return labels as they came: a checkpoint is of rows with these, not of class numbers."""
    return y if classes is None else np.array(classes)[y.astype(np.intp)]


def _written(rows: Labelled, path: Path, classes: list[Any] | None, *, weights: bool) -> str:
    weight = {_WEIGHT: np.ones(len(rows.y)) if rows.weight is None else rows.weight} if weights else {}
    write_columns(path, rows.table, {LABEL: _labels(rows.y, classes), **weight})
    return str(path)


def _run_training(
    job: Job,
    classes: list[Any] | None,
    progress: Progress,
    *,
    resume: bool,
    owners: Collection[str] | None = None,
) -> tuple[dict[str, ModelPart], Traffic]:
    """Run a job that an estimator has written; return what those parties have made that have a model, None for all."""
    owners = job.owners if owners is None else owners
    try:
        run_all(job, "train", progress=True, arguments=["--resume"] if resume else [])
    except PartyFailed:
        for party in owners:  # what was finished survives
            with suppress(ConfigError):  # raised where nothing was
                progress(1, with_classes(find_part(job, party), classes))
        raise
    parts = {party: with_classes(find_part(job, party), classes) for party in owners}
    return parts, traffic_of(job)


def _given(options: TreeOptions) -> dict[str, Any]:
    given = {field: getattr(options, field) for field in options.__struct_fields__}
    return {field: "inf" if value == math.inf else value for field, value in given.items()}


def with_classes(part: ModelPart, classes: list[Any] | None) -> ModelPart:
    """Put the labels back that a crowd's processes saw as numbers."""
    if part.forest is not None:
        part.forest.classes = classes
    return part


def predict_in_processes(
    parts: Mapping[str, ModelPart], tables: Mapping[str, Table], options: TreeOptions, n_jobs: int | None
) -> NDArray[np.float64]:
    """Predict with every party in a process of its own; return the margins (n_rows, n_outputs)."""
    return predict_margins(parts, tables, active_of(parts), _given(options), n_jobs)
