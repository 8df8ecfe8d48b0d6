"""Estimators with `transport="grpc"`: tables and models are written for parties in processes of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.reading import write_columns
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.messaging.certificates import check_names
from treaty.models.linear import LinearPart
from treaty.runs.job import Job, Member
from treaty.runs.party import find_part, part_file
from treaty.runs.processes import PartyFailure, run_all, traffic_of
from treaty.runs.threads import Run, Traffic, active_of
from treaty.systems.options import given
from treaty.systems.system import LabelledRows, System

_SHARE = 4096  # MiB that a party may have unread of each other: all are of one program, whose messages may be large
# columns of the tables that an estimator writes for its processes
LABEL, _WEIGHT, _GROUP = "__label__", "__weight__", "__group__"


def train_in_processes(
    run: Run, *, weighted: bool, checkpoints: Path | None, noisy_labels: Path | None
) -> tuple[dict[str, Any], Traffic]:
    """Train with every party in a process of its own; return the parts of those that have some, and the traffic.

    Parameters
    ----------
    weighted : bool
        Whether rows have weights.
    checkpoints : Path or None
        Folder of checkpoints, from which an interrupted training goes on.
    noisy_labels : Path or None
        File of the labels that were randomised once, where the system asks for some.

    Raises
    ------
    ConfigError
        For a name that cannot stand in a certificate; nothing is written then.
    PartyFailure
        When a process fails, with the error of each. What was finished is told to ``run.progress`` first.
    """
    system, roles = run.system, run.roles
    simulated = system.only_simulated(run.options)
    if simulated:
        raise ConfigError(simulated)
    check_names(roles.of)  # which those of files are made of
    # of systems without resuming, checkpoints are not looked for
    resume = checkpoints is not None and "resume" not in system.cannot
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        job = _written_job(run, Path(name), weighted, checkpoints, noisy_labels)
        owners = roles.having(*system.has_model) if system.split == "columns" else [roles.active]
        try:
            run_all(job, "train", progress=True, arguments={job.active: ["--resume"]} if resume else None)
        except PartyFailure:
            for party in owners:
                with suppress(ConfigError):  # raised where nothing was finished
                    _tell(run, _with_classes(find_part(job, party), run))
            raise
        parts = {party: _with_classes(find_part(job, party), run) for party in owners}
        _tell(run, parts[roles.active])
        return parts, traffic_of(job)


def _tell(run: Run, part: Any) -> None:
    """Tell a fit what is finished: the trees so far, or epochs' losses by set."""
    if run.progress is not None and isinstance(part, LinearPart):
        run.progress(len(part.losses), {"train": part.losses, **part.eval_losses})
    elif run.progress is not None:
        run.progress(1, part)


def _written_job(run: Run, folder: Path, weighted: bool, checkpoints: Path | None, noisy_labels: Path | None) -> Job:
    """Write the tables of a fit to a folder; return its job, whose models will lie there too."""
    roles, members = run.roles, {}
    for name, role in roles.of.items():
        evals = []
        for rows in run.evals_of(name):
            path = folder / f"{name}.{rows.name}.arrow"
            labels = _labels(run, rows) if name == roles.active else {}
            write_columns(path, rows.table, labels)
            evals.append(str(path))
        data = run.data.get(name)
        if data is not None:
            write_columns(folder / f"{name}.arrow", data.table, _beside(run, data, weighted))
        members[name] = Member(
            table=None if data is None else str(folder / f"{name}.arrow"),
            eval_tables=evals,
            noisy_labels=None if noisy_labels is None else str(noisy_labels.resolve()),
            role=role if role in run.system.named_roles else None,
            edge=roles.edges.get(name),
        )
    kept = None if checkpoints is None else str(checkpoints.resolve())
    ranks = run.data[roles.active].y.ndim == 2 if roles.active in run.data else False
    return Job(
        name="fit", active=roles.active, label=LABEL, weight=_WEIGHT if weighted else None, parties=members,
        task="classification" if run.classes is not None else "ranking" if ranks else "regression",
        group=_GROUP if ranks else None, classes=max(2, len(run.classes or ())),
        output=str(folder / "model"), checkpoints=kept, store=kept, n_jobs=run.n_jobs,
        inbox_limit=len(members) * _SHARE, **_settings(run.system, (run.options, run.common)),
    )  # fmt: skip


def _beside(run: Run, data: LabelledRows, weighted: bool) -> dict[str, NDArray[Any]]:
    """Return labels and weights to write beside the columns, at a party with labels."""
    if len(data.y) != data.table.n_rows or (run.system.split == "columns" and len(data.y) == 0):
        return {}
    weight = {_WEIGHT: np.ones(len(data.y)) if data.weight is None else data.weight} if weighted else {}
    return {**_labels(run, data), **weight}


def _labels(run: Run, data: LabelledRows) -> dict[str, NDArray[Any]]:
    """Return labels as they came, and groups of a ranking: a checkpoint is of rows with these, not of class numbers."""
    if data.y.ndim == 2:
        return {LABEL: data.y[:, 0], _GROUP: data.y[:, 1]}
    return {LABEL: data.y if run.classes is None else np.array(run.classes)[data.y.astype(np.intp)]}


def _settings(system: System, settings: tuple[Any, Any]) -> dict[str, Any]:
    """Return a job's fields for these options."""
    own, common = settings
    plain = given(own, common)
    return {
        "protocol": type(own).system,
        "own": {name: plain[name] for name in own.get_params()},
        "common": {name: plain[name] for name in common.__struct_fields__},
    }


def _with_classes(part: Any, run: Run) -> Any:
    """Put the labels back where processes saw them written to a file, and so as other types."""
    holder = part.forest if hasattr(part, "forest") else part
    if holder is not None and part.is_active:
        holder.classes = run.classes
    return part


def predict_in_processes(
    system: System,
    parts: Mapping[str, Any],
    tables: Mapping[str, Table],
    settings: tuple[Any, Any],
    n_jobs: int | None,
) -> NDArray[np.float64]:
    """Predict with every owner of the model in a process of its own; return the active party's margins."""
    check_names(parts)  # which those of files are made of
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        for party, part in parts.items():
            write_columns(folder / f"{party}.arrow", tables[party], {})
            part.save(part_file(folder, party))
        members = {party: Member(predict_table=str(folder / f"{party}.arrow")) for party in parts}
        job = Job(
            name="predict", active=active_of(parts), label=LABEL, parties=members, output=str(folder), n_jobs=n_jobs,
            inbox_limit=len(members) * _SHARE, **_settings(system, settings),
        )  # fmt: skip
        margins = folder / "margins.npy"
        run_all(job, "predict", arguments={job.active: ["--margins", str(margins)]})
        return np.asarray(np.load(margins, allow_pickle=False))
