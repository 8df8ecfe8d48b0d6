"""All parties of a job on this machine, each its own process, talking over gRPC with mutual TLS on loopback.

Processes are started afresh, never forked: gRPC and threads do not survive a fork, and a fresh start needs no guard
in the user's script.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.compute import usable_cores
from treaty.data.sources import write_columns
from treaty.data.table import Table
from treaty.errors import ConfigError, TreatyError
from treaty.messaging.certificates import check_names, write_identity
from treaty.messaging.party import FAREWELL_TIMEOUT
from treaty.models.linear import LinearPart
from treaty.runs.job import Job, Member
from treaty.runs.party import find_part, owners_of_model, part_file
from treaty.runs.report import expendable, load_reports
from treaty.runs.threads import Run, Traffic, active_of
from treaty.runs.warm_up import compile_kernels
from treaty.systems.options import given
from treaty.systems.system import Labelled, System

logger = logging.getLogger(__name__)

LABEL, _WEIGHT = "__label__", "__weight__"  # columns of the tables that an estimator writes for its processes
PORTS = range(15_000, 32_000)  # those that parties on one machine listen at
FAILED_WITH_OTHERS = 1  # exit code of errors that are not about a party's own options and tables: mostly another's
# seconds of grace before survivors are killed: in a farewell they hear what went wrong
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
        When a process fails, with the error of each. A training goes on without those it can do without (see
        `expendable`), which are warned of, as is everything that processes which end well say on standard error.
    """
    if verb == "train":
        compile_kernels(job.system, job.settings()[0])
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="treaty-"))
        path = Path(folder) / "job.json"
        path.write_bytes(_completed(job, Path(folder)).encoded())
        # where all parties work at once: threads that mostly hold the interpreter lock lose by going from core to core
        kept_to = _dealt_out(job.parties) if verb == "train" and job.by_row else {}
        # files, for whoever writes much into a pipe that nobody reads yet stands still
        errors = {name: held.enter_context(tempfile.TemporaryFile()) for name in job.parties}
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
                stderr=None if progress and name == job.active and sys.stderr.isatty() else errors[name],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            for name in (job.parties if verb == "train" else owners_of_model(job))
        }
        may_fail = expendable(job) if verb == "train" else []
        try:
            with _interrupted_by_sigterm():
                failed = _wait(started, may_fail)
        finally:
            for process in started.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()
        said = {name: _said(errors[name], name) for name in started}
        # who could not use what is its own, or was killed, before those who heard of it from others
        failed.sort(key=lambda name: started[name].returncode == FAILED_WITH_OTHERS)
        told = "\n".join(f"{name}: {_end(started[name], said[name])}" for name in failed)
        if set(failed) - set(may_fail):
            raise PartyFailed(told)
        for name in sorted(set(said) - set(failed)):
            for line in said[name].splitlines():  # what a party that ended well warns of
                logger.warning("%s: %s", name, line)
        if failed:
            logger.warning("the job went on without %d parties\n%s", len(failed), told)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let a request to end this process reach what it has started, unless the program has plans of its own for it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _dealt_out(parties: Collection[str]) -> dict[str, str]:
    """Return the cores of this machine that each party's process is to keep to: some of its own, or one to share."""
    every = usable_cores()
    each = max(1, len(every) // len(parties))
    return {
        name: ",".join(str(every[(k * each + i) % len(every)]) for i in range(each)) for k, name in enumerate(parties)
    }


def _said(errors: IO[bytes], name: str) -> str:
    """Return what a process wrote on standard error, without the command's name and the party's own."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return "\n".join(line.removeprefix("treaty: ").removeprefix(f"{name}: ") for line in lines)


def _end(process: subprocess.Popen[bytes], said: str) -> str:
    """Say how a process failed, which one that was killed could not say itself."""
    code = process.returncode
    if code >= 0:
        return said or f"ended with exit code {code}"
    return f"killed by signal {-code}" + (f", having said\n{said}" if said else "")


def _wait(started: Mapping[str, subprocess.Popen[bytes]], may_fail: Collection[str]) -> list[str]:
    """Wait for all processes, and not for long once one has failed that may not, or all but those have ended.

    Returns who failed, in this order; of those that may also who did not end.
    """
    failed: list[str] = []
    deadline = float("inf")
    needed = [process for name, process in started.items() if name not in may_fail]
    while True:
        for name, process in started.items():
            if process.poll() not in (None, 0) and name not in failed:
                failed.append(name)
                if name not in may_fail:
                    deadline = min(deadline, time.monotonic() + GRACE)
        running = [name for name, process in started.items() if process.poll() is None]
        if all(process.poll() is not None for process in needed):
            deadline = min(deadline, time.monotonic() + GRACE)
        if not running or time.monotonic() > deadline:
            return failed + [name for name in running if name in may_fail and not set(failed) - set(may_fail)]
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


def traffic_of(job: Job) -> Traffic:
    """Return what a training's reports say of its messages and phases."""
    reports = load_reports(job)
    sent = {f"{party} -> {peer}": totals for party, report in reports.items() for peer, totals in report.sent.items()}
    return Traffic(sent, reports[job.active].seconds)


# ---------------------------------------------------------------- for the estimators' transport="grpc"


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
    PartyFailed
        When a process fails, with the error of each. What was finished is told to ``run.progress`` first.
    """
    system, cast = run.system, run.cast
    simulated = system.only_simulated(run.options)
    if simulated:
        raise ConfigError(simulated)
    check_names(cast.roles)  # which those of files are made of
    # of systems without resuming, checkpoints are not looked for
    resume = checkpoints is not None and not system.cannot_resume
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        job = _written_job(run, Path(name), weighted, checkpoints, noisy_labels)
        owners = cast.having(*system.has_model) if system.split == "columns" else [cast.active]
        try:
            run_all(job, "train", progress=True, arguments=["--resume"] if resume else [])
        except PartyFailed:
            for party in owners:
                with suppress(ConfigError):  # raised where nothing was finished
                    _tell(run, _with_classes(find_part(job, party), run))
            raise
        parts = {party: _with_classes(find_part(job, party), run) for party in owners}
        _tell(run, parts[cast.active])
        return parts, traffic_of(job)


def _tell(run: Run, part: Any) -> None:
    """Tell a fit what is finished: the trees so far, or all epochs' losses."""
    if run.progress is not None and isinstance(part, LinearPart):
        run.progress(len(part.losses), part.losses)
    elif run.progress is not None:
        run.progress(1, part)


def _written_job(run: Run, folder: Path, weighted: bool, checkpoints: Path | None, noisy_labels: Path | None) -> Job:
    """Write the tables of a fit to a folder; return its job, whose models will lie there too."""
    cast, members = run.cast, {}
    for name, role in cast.roles.items():
        evals = []
        for rows in run.evals_of(name):
            path = folder / f"{name}.{rows.name}.arrow"
            labels = {LABEL: _labels(run, rows)} if name == cast.active else {}
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
            edge=cast.edges.get(name),
        )
    kept = None if checkpoints is None else str(checkpoints.resolve())
    return Job(
        name="fit", active=cast.active, label=LABEL, weight=_WEIGHT if weighted else None, parties=members,
        task="regression" if run.classes is None else "classification", output=str(folder / "model"),
        checkpoints=kept, store=kept, n_jobs=run.n_jobs, **_settings(run.system, (run.options, run.common)),
    )  # fmt: skip


def _beside(run: Run, data: Labelled, weighted: bool) -> dict[str, NDArray[Any]]:
    """Return labels and weights to write beside the columns, at a party with labels."""
    if len(data.y) != data.table.n_rows or (run.system.split == "columns" and len(data.y) == 0):
        return {}
    weight = {_WEIGHT: np.ones(len(data.y)) if data.weight is None else data.weight} if weighted else {}
    return {LABEL: _labels(run, data), **weight}


def _labels(run: Run, data: Labelled) -> NDArray[Any]:
    """Return labels as they came: a checkpoint is of rows with these, not of class numbers."""
    return data.y if run.classes is None else np.array(run.classes)[data.y.astype(np.intp)]


def _settings(system: System, settings: tuple[Any, Any]) -> dict[str, Any]:
    """Return a job's fields for these options; JSON has no infinity."""
    own, common = settings
    plain = {name: "inf" if value == math.inf else value for name, value in given(own, common).items()}
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
            **_settings(system, settings),
        )  # fmt: skip
        margins = folder / "margins.npy"
        run_all(job, "predict", arguments=["--margins", str(margins)])
        return np.asarray(np.load(margins, allow_pickle=False))
