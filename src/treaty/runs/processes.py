"""All parties of a job on this machine, each its own process, talking over gRPC with mutual TLS on loopback.

Processes are started afresh, never forked: gRPC and threads do not survive a fork, and a fresh start needs no guard
in the user's script. Each is written its job on standard input, with the key that was made up for it, so that no key is
ever on a disk; and reads on there, to end when the process that started it has ended, however that was.

Estimators with ``transport="grpc"`` come here too: their tables and models are written to a temporary folder, for a job
of parties in such processes.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.reading import write_columns
from treaty.data.table import Table
from treaty.errors import ConfigError, TreatyError
from treaty.machine.process import ended_by_signals, usable_cores
from treaty.messaging.certificates import check_names, make_identity
from treaty.messaging.party import ABORT_NOTICE_TIMEOUT
from treaty.messaging.transcript import joined
from treaty.models.linear import LinearPart
from treaty.runs.job import Job, Member
from treaty.runs.job_files import decoded_job
from treaty.runs.party import find_part, owners_of_model, part_file
from treaty.runs.report import expendable, load_reports
from treaty.runs.threads import Run, Traffic, active_of
from treaty.runs.warm_up import compile_kernels, trees_compiled_beside
from treaty.systems.options import given
from treaty.systems.system import LabelledRows, Roles, System

logger = logging.getLogger(__name__)

# those that parties on one machine listen at
PORTS = range(15_000, 32_000)
# seconds, at most, to dial again: on one machine a connection that broke is a process that ended
RECONNECT = 2.0
# exit code of errors that are not about a party's own options and tables: mostly another's
FAILED_WITH_OTHERS = 1
# seconds of grace before survivors are killed: in a farewell they hear what went wrong
GRACE = ABORT_NOTICE_TIMEOUT + 5.0
# seconds that a terminated process has before it is killed
TERMINATION_GRACE = 5.0
# in place of a job file: the job is on standard input
FROM_PARENT = "-"


class PartyFailure(TreatyError):
    """One or more of the parties' processes ended with an error; the message has the error of each."""


def run_all(
    job: Job,
    verb: str,
    *,
    arguments: Mapping[str, Sequence[str]] | None = None,
    progress: bool = False,
    service: Roles | None = None,
    relay: Callable[[str], None] | None = None,
) -> list[str]:
    """Run ``treaty <verb> JOB --as PARTY`` for every party of the job on this machine.

    Every party must name its table, but for a leader without rows; addresses, keys and certificates are made up where
    they are missing. `arguments` are those of each party's command; with `progress` the active one draws its bar.
    `service` are those who play a prediction for parties without the model. `relay` is given each line that processes
    which end well print, party by party.

    Raises PartyFailure when a process fails, with the error of each. A training continues without `expendable` parties,
    a service without those who have rows: they are warned of and returned. So is everything warned of that processes
    which end well say on standard error.
    """
    of_each = arguments or {}
    if verb == "train":
        with trees_compiled_beside():
            compile_kernels(job.system, job.settings()[0], aligns=job.align.psi if job.align else None)
    completed = _completed(job)
    with ExitStack() as held:
        # where rows are split all parties work at once, and threads that mostly hold the interpreter lock are slower on
        # several cores
        kept_to = _dealt_out(job.parties) if verb == "train" and job.by_row else {}
        # files, not pipes: a process that fills a pipe nobody reads would block
        errors = {name: held.enter_context(tempfile.TemporaryFile()) for name in job.parties}
        printed = {name: held.enter_context(tempfile.TemporaryFile()) for name in job.parties if relay}
        held.enter_context(ended_by_signals())
        started: dict[str, subprocess.Popen[bytes]] = {}
        held.callback(_end_all, started)
        for name in service.of if service else job.parties if verb == "train" else owners_of_model(job):
            started[name] = subprocess.Popen(  # noqa: S603 - our own interpreter and module, no shell
                [
                    sys.executable,
                    "-m",
                    "treaty",
                    verb,
                    FROM_PARENT,
                    "--as",
                    name,
                    *of_each.get(name, ()),
                    *(("--cores", kept_to[name]) if name in kept_to else ()),
                ],
                stdin=subprocess.PIPE,
                stdout=printed.get(name, subprocess.DEVNULL),
                stderr=None if progress and name == job.active and sys.stderr.isatty() else errors[name],
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            )
        for name, process in started.items():
            _send_job(process, _copy_of(completed, name))
        may_fail = service.owners if service else expendable(job) if verb == "train" else []
        failed = _wait(started, may_fail)
        _end_all(started)
        errors_by = {name: _errors_of(errors[name], name) for name in started}
        # parties at fault before those that were only notified
        failed.sort(key=lambda name: started[name].returncode == FAILED_WITH_OTHERS)
        failures = "\n".join(f"{name}: {_end(started[name], errors_by[name])}" for name in failed)
        if set(failed) - set(may_fail):
            raise PartyFailure(failures)
        for name in sorted(set(errors_by) - set(failed)):
            # what a party that ended well warns of
            for line in errors_by[name].splitlines():
                logger.warning("%s: %s", name, line)
        if relay is not None:
            for name in [name for name in started if name not in failed]:
                for line in _lines(printed[name]):
                    relay(line)
        if failed:
            logger.warning("the job went on without %d parties\n%s", len(failed), failures)
        return failed


def _send_job(process: subprocess.Popen[bytes], job: Job) -> None:
    """Write a process its job, one line; the pipe stays open for as long as this process lives."""
    assert process.stdin is not None
    # it has ended already, and says why on standard error
    with suppress(BrokenPipeError):
        process.stdin.write(job.encoded() + b"\n")
        process.stdin.flush()


def job_of_parent() -> Job:
    """Return the job that `run_all` has written to this process, which from now on ends with the one that wrote it."""
    return decoded_job(line_of_parent(), trusted=True)


def line_of_parent() -> bytes:
    """Return the line on standard input, whose writer keeps it open: from now on this process ends with that one."""
    line = bytearray()
    while not line.endswith(b"\n") and (found := os.read(0, 1 << 16)):
        line += found
    threading.Thread(target=_end_with_parent, name="treaty-parent", daemon=True).start()
    return bytes(line)


def _end_with_parent() -> None:
    # nothing more is written: it returns once the other end is closed, at that process's end
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    # to say farewell, and to write a checkpoint
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)


def _end_all(started: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """End what still runs, after a short time in which it may write its checkpoint."""
    running = [process for process in started.values() if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + TERMINATION_GRACE
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for process in started.values():
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


def _dealt_out(parties: Collection[str]) -> dict[str, str]:
    """Return which cores each party's process keeps to: some of its own, or one that is shared."""
    every = usable_cores()
    each = max(1, len(every) // len(parties))
    return {
        name: ",".join(str(every[(k * each + i) % len(every)]) for i in range(each)) for k, name in enumerate(parties)
    }


def _errors_of(errors: IO[bytes], name: str) -> str:
    """Return what a process wrote on standard error, without the command's name and the party's own."""
    return "\n".join(line.removeprefix("treaty: ").removeprefix(f"{name}: ") for line in _lines(errors))


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _end(process: subprocess.Popen[bytes], text: str) -> str:
    """Say how a process failed; a killed one could not say so itself."""
    code = process.returncode
    if code >= 0:
        return text or f"ended with exit code {code}"
    return f"killed by signal {-code}" + (f", after\n{text}" if text else "")


def _wait(started: Mapping[str, subprocess.Popen[bytes]], may_fail: Collection[str]) -> list[str]:
    """Wait for all; once one that may not fail has failed, or all such have ended, the others get `GRACE` seconds.

    Returns those that failed, in order, and of those in `may_fail` also those that did not end.
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


def _completed(job: Job) -> Job:
    """Make up addresses, keys and certificates where the job names none; shorten the time to reconnect."""
    parties = {}
    ports = iter(free_ports(len(job.parties)))
    for name, member in job.parties.items():
        changes: dict[str, Any] = {}
        if member.address is None:
            changes["address"] = f"127.0.0.1:{next(ports)}"
        if member.key is None or member.certificate is None:
            identity = make_identity(name)
            changes["key"], changes["certificate"] = identity.key.decode(), identity.certificate.decode()
        parties[name] = msgspec.structs.replace(member, **changes)
    return msgspec.structs.replace(job, parties=parties, reconnect=min(job.reconnect, RECONNECT))


def _copy_of(job: Job, name: str) -> Job:
    """Return a party's copy of the job, with no key but its own."""
    parties = {
        other: member if other == name else msgspec.structs.replace(member, key=None)
        for other, member in job.parties.items()
    }
    return msgspec.structs.replace(job, parties=parties)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens on.

    They lie below the range that operating systems use for outgoing connections (from 32768 on Linux, 49152 elsewhere):
    otherwise a party that connects early could be given the port that another is about to listen at.
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
    timelines = {party: report.timeline for party, report in reports.items() if report.timeline is not None}
    return Traffic(sent, reports[job.active].seconds, joined(timelines))


# MiB that a party may have unread of each other: all are of one program, whose messages may be large
_SHARE = 4096
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
        Folder of checkpoints, from which an interrupted training is resumed.
    noisy_labels : Path or None
        File of the labels that were randomised once, where the system asks for some.

    Raises
    ------
    ConfigError
        For a name that cannot stand in a certificate; nothing is written then.
    PartyFailure
        When a process fails, with the error of each. ``run.progress`` is called with what was finished first.
    """
    system, roles = run.system, run.roles
    simulated = system.only_simulated(run.options)
    if simulated:
        raise ConfigError(simulated)
    # which those of files are made of
    check_names(roles.of)
    # of systems without resuming, checkpoints are not looked for
    resume = checkpoints is not None and "resume" not in system.cannot
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        job = _written_job(run, Path(name), weighted, checkpoints, noisy_labels)
        owners = roles.having(*system.has_model) if system.split == "columns" else [roles.active]
        try:
            run_all(job, "train", progress=True, arguments={job.active: ["--resume"]} if resume else None)
        except PartyFailure:
            for party in owners:
                # raised where nothing was finished
                with suppress(ConfigError):
                    _report(run, _with_classes(find_part(job, party), run))
            raise
        parts = {party: _with_classes(find_part(job, party), run) for party in owners}
        _report(run, parts[roles.active])
        return parts, traffic_of(job)


def _report(run: Run, part: Any) -> None:
    """Call a fit's progress with what is finished: the trees so far, or epochs' losses by set."""
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
            write_columns(folder / f"{name}.arrow", data.table, _labels_and_weights(run, data, weighted))
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


def _labels_and_weights(run: Run, data: LabelledRows, weighted: bool) -> dict[str, NDArray[Any]]:
    """Return labels and weights, columns of the file of a party with labels."""
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
    # which those of files are made of
    check_names(parts)
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
