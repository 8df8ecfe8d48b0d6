"""All parties of a job on this machine, each its own process, talking over gRPC with mutual TLS on loopback.

Processes are started afresh, never forked: gRPC and threads do not survive a fork, and a fresh start needs no guard
in the user's script.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.compiling import compile_kernels
from treaty.compute import usable_cores
from treaty.crowd_jobs import crowd_of
from treaty.crowds import Layout
from treaty.data.sources import write_columns
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, TreatyError
from treaty.job_file import Job, Member
from treaty.jobs import find_part, load_reports, part_file
from treaty.linear_simulation import compile_linear_kernels
from treaty.messaging.certificates import write_identity
from treaty.messaging.party import FAREWELL_TIMEOUT
from treaty.models import ModelPart
from treaty.options import TreeOptions
from treaty.protocols.pooled import Labelled, Progress
from treaty.protocols.smm_dealer import DEALER
from treaty.simulation import Traffic, active_of

logger = logging.getLogger(__name__)

PORTS = range(15_000, 32_000)  # those that parties on one machine listen at
FAILED_WITH_OTHERS = 1  # exit code of errors that are not about a party's own options and tables: mostly another's
# seconds the others get to end by themselves after one party failed: a farewell, at whose end what went wrong is said
GRACE = FAREWELL_TIMEOUT + 5.0


class PartyFailed(TreatyError):
    """One or more of the parties' processes ended with an error; the message holds what each said."""


def run_all(
    job: Job, verb: str, *, arguments: Sequence[str] = (), to_all: bool = False, progress: bool = False
) -> None:
    """Run ``treaty <verb> JOB --as PARTY`` for every party of the job on this machine.

    Parameters
    ----------
    job : Job
        Every party must name its table, but a leader without rows; addresses, keys and certificates are made up where
        they are missing.
    verb : {"train", "predict", "explain"}
    arguments : sequence of str
        Passed on to the active party's command.
    to_all : bool
        Pass them on to every party's.
    progress : bool
        Let the active party draw its progress bar.

    Raises
    ------
    PartyFailed
        When a process fails, with the error of each. A crowd goes on without users that fail, which are warned of, as
        is everything that processes which end well say on standard error.
    """
    if verb == "train" and job.linear:
        compile_linear_kernels(job.linear_options())
    elif verb == "train":
        compile_kernels(job.tree_options().protocol)
    with tempfile.TemporaryDirectory(prefix="treaty-") as folder:
        path = Path(folder) / "job.json"
        path.write_bytes(msgspec.json.encode(_completed(job, Path(folder))))
        # where all parties work at once: threads that mostly hold the interpreter lock lose by going from core to core
        kept_to = _dealt_out(job.parties) if verb == "train" and job.horizontal else {}
        started = {
            name: subprocess.Popen(  # noqa: S603 - our own interpreter and module, no shell
                [
                    sys.executable,
                    "-m",
                    "treaty",
                    verb,
                    str(path),
                    "--as",
                    name,
                    *(arguments if to_all or name == job.active else ()),
                    *(("--cores", kept_to[name]) if name in kept_to else ()),
                ],
                stdout=subprocess.DEVNULL,
                stderr=None if progress and name == job.active and sys.stderr.isatty() else subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            for name in (job.parties if verb == "train" else job.owners)
        }
        may_fail = crowd_of(job).users if job.crowd else ()
        try:
            failed = _wait(started, may_fail)
        finally:
            for process in started.values():
                if process.poll() is None:
                    process.kill()
        said = {
            name: (process.communicate()[1] or b"").decode(errors="replace").strip().removeprefix("treaty: ")
            for name, process in started.items()
        }
        # who could not use what is its own, or was killed, before those who heard of it from others
        failed.sort(key=lambda name: started[name].returncode == FAILED_WITH_OTHERS)
        told = "\n".join(f"{name}: {said[name] or _how_it_ended(started[name])}" for name in failed)
        if set(failed) - set(may_fail):
            raise PartyFailed(told)
        for name in sorted(set(said) - set(failed)):
            for line in said[name].splitlines():  # what a party that ended well warns of
                logger.warning("%s: %s", name, line.removeprefix("treaty: ").removeprefix(f"{name}: "))
        if failed:
            logger.warning("the crowd went on without %d users\n%s", len(failed), told)


def _dealt_out(parties: Collection[str]) -> dict[str, str]:
    """Return the cores of this machine that each party's process is to keep to: some of its own, or one to share."""
    every = usable_cores()
    each = max(1, len(every) // len(parties))
    return {
        name: ",".join(str(every[(k * each + i) % len(every)]) for i in range(each)) for k, name in enumerate(parties)
    }


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _wait(started: Mapping[str, subprocess.Popen[bytes]], may_fail: Collection[str]) -> list[str]:
    """Wait for all processes, and not for long once one has failed that may not; return who failed, in this order."""
    failed: list[str] = []
    deadline = float("inf")
    while True:
        for name, process in started.items():
            if process.poll() not in (None, 0) and name not in failed:
                failed.append(name)
                if name not in may_fail:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if all(process.poll() is not None for process in started.values()) or time.monotonic() > deadline:
            return failed
        time.sleep(0.02)


def _completed(job: Job, folder: Path) -> Job:
    """Make up addresses, keys and certificates where the job names none."""
    parties = {}
    ports = iter(free_ports(len(job.parties)))
    for name, member in job.parties.items():
        changes: dict[str, Any] = {}
        if member.address is None:
            changes["address"] = f"127.0.0.1:{next(ports)}"
        if member.key is None or member.certificate is None:
            write_identity(folder, name)
            changes["key"], changes["certificate"] = str(folder / f"{name}.key.pem"), str(folder / f"{name}.cert.pem")
        parties[name] = msgspec.structs.replace(member, **changes)
    return msgspec.structs.replace(job, parties=parties)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens on.

    They lie below the ports that systems lend to outgoing connections (from 32768 on Linux, 49152 elsewhere): parties
    try to reach each other before all listen, and such a try would now and then be lent the very port that a party
    was about to listen at.
    """
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            probe = held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", secrets.choice(PORTS)))
                ports.append(probe.getsockname()[1])
    return ports


# ---------------------------------------------------------------- for the estimators' transport="grpc"

_LABEL, _WEIGHT = "__label__", "__weight__"


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
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        parties = {}
        for party, table in tables.items():
            labels = {_LABEL: data.y, **({} if data.weight is None else {_WEIGHT: data.weight})}
            write_columns(folder / f"{party}.arrow", table, labels if party == active else {})
            for set_name, rows, y in evals:
                write_columns(folder / f"{party}.{set_name}.arrow", rows[party], {_LABEL: y} if party == active else {})
            parties[party] = Member(
                table=str(folder / f"{party}.arrow"),
                eval_tables=[str(folder / f"{party}.{set_name}.arrow") for set_name, _, _ in evals],
                noisy_labels=None if noisy_labels is None else str(noisy_labels.resolve()),
            )
        if options.has_dealer:
            parties[DEALER] = Member(role="dealer")
        kept = None if checkpoints is None else str(checkpoints.resolve())
        job = Job(
            name="fit", active=active, label=_LABEL, weight=None if data.weight is None else _WEIGHT,
            parties=parties, options=_given(options), task="regression" if classes is None else "classification",
            output=str(folder / "model"), checkpoints=kept, store=kept,
            n_jobs=n_jobs,
        )  # fmt: skip
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
        Called after a failure with 1 and what each party has finished.
    checkpoints : Path or None
        Folder of checkpoints, from which an interrupted training goes on.

    Returns
    -------
    parts : dict of str to ModelPart
        The whole model, at every party; the leader's first where it brings no rows.
    traffic : Traffic

    Raises
    ------
    PartyFailed
        When a process fails, with the error of each.
    """
    weighted = any(rows.weight is not None for rows in data.values())
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)

        watched = [_written(rows, folder / f"eval_{k}.arrow", weights=False) for k, rows in enumerate(evals)]
        parties = {} if active in data else {active: Member(eval_tables=watched)}
        for party, rows in data.items():
            table = _written(rows, folder / f"{party}.arrow", weights=weighted)
            parties[party] = Member(table=table, eval_tables=watched if party == active else [])
        kept = None if checkpoints is None else str(checkpoints.resolve())
        job = Job(
            name="fit", active=active, label=_LABEL, weight=_WEIGHT if weighted else None,
            parties=parties, options=_given(options), task="regression" if classes is None else "classification",
            output=str(folder / "model"), checkpoints=kept, store=kept,
            n_jobs=n_jobs,
        )  # fmt: skip
        return _run_training(job, classes, progress, resume=checkpoints is not None)


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
    PartyFailed
        When a process other than a user's fails, with the error of each.
    """
    weighted = any(rows.weight is not None for rows in shards.values())
    none = np.full(1 if classes is None else len(classes), np.nan, np.float32)
    examples = Table(schema, [none] * len(schema.names), len(none))  # tell the columns, and one row of each class
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        write_columns(folder / "examples.arrow", examples, {_LABEL: np.arange(len(none), dtype=np.float64)})
        parties = {
            layout.server: Member(
                role="server",
                table=str(folder / "examples.arrow"),
                eval_tables=[_written(rows, folder / f"eval_{k}.arrow", weights=False) for k, rows in enumerate(evals)],
            ),
            layout.authority: Member(role="authority"),
            **{edge: Member(role="edge") for edge in layout.edges},
        }
        for edge, users in layout.domains.items():
            for user in users:
                table = _written(shards[user], folder / f"{user}.arrow", weights=weighted)
                parties[user] = Member(role="user", edge=edge, table=table)
        job = Job(
            name="fit", active=layout.server, label=_LABEL, weight=_WEIGHT if weighted else None,
            parties=parties, options=_given(options), task="regression" if classes is None else "classification",
            output=str(folder / "model"), checkpoints=None if checkpoints is None else str(checkpoints.resolve()),
            n_jobs=n_jobs,
        )  # fmt: skip
        parts, traffic = _run_training(job, classes, progress, resume=False, owners=[layout.server])
        return parts[layout.server], traffic


def _written(rows: Labelled, path: Path, *, weights: bool) -> str:
    weight = {_WEIGHT: np.ones(len(rows.y)) if rows.weight is None else rows.weight} if weights else {}
    write_columns(path, rows.table, {_LABEL: rows.y, **weight})
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
    reports = load_reports(job)
    sent = {f"{party} -> {peer}": totals for party, report in reports.items() for peer, totals in report.sent.items()}
    return parts, Traffic(sent, reports[job.active].seconds)


def _given(options: TreeOptions) -> dict[str, Any]:
    given = {field: getattr(options, field) for field in options.__struct_fields__}
    return {field: "inf" if value == math.inf else value for field, value in given.items()}


def with_classes(part: ModelPart, classes: list[Any] | None) -> ModelPart:
    """Put the labels back that the parties' processes saw as numbers."""
    if part.forest is not None:
        part.forest.classes = classes
    return part


def predict_in_processes(
    parts: Mapping[str, ModelPart], tables: Mapping[str, Table], options: TreeOptions, n_jobs: int | None
) -> NDArray[np.float64]:
    """Predict with every party in a process of its own; return the margins (n_rows, n_outputs)."""
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        for party, part in parts.items():
            write_columns(folder / f"{party}.arrow", tables[party], {})
            part.save(part_file(folder, party))
        members = {party: Member(predict_table=str(folder / f"{party}.arrow")) for party in parts}
        job = Job(
            name="predict", active=active_of(parts), label=_LABEL, parties=members, output=str(folder), n_jobs=n_jobs,
            options=_given(options),
        )  # fmt: skip
        margins = folder / "margins.npy"
        run_all(job, "predict", arguments=["--margins", str(margins)])
        return np.asarray(np.load(margins, allow_pickle=False))
