"""All parties of a job on this machine, each in its own process, connected by mutual TLS on loopback.

Processes are started, never forked: threads do not survive a fork, and the user's script needs no guard. Each
gets its job on standard input, with the key that was generated for it, so that no key is ever written to a disk. It
keeps reading there, and ends when the process that started it ends, for whatever reason.

Estimators with ``transport="tls"`` write their tables to a temporary folder, and run a job of such processes there.
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
from dataclasses import replace
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
from treaty.models.trees import ModelPart
from treaty.runs.job import FITTED, Job, Member
from treaty.runs.party import part_file
from treaty.runs.prediction import find_part, owners_of_model
from treaty.runs.report import expendable, load_reports
from treaty.runs.threads import Run, Traffic, active_of
from treaty.runs.warm_up import compile_kernels, trees_compiled_beside
from treaty.systems.options import given
from treaty.systems.system import LabelledRows, Roles

logger = logging.getLogger(__name__)

# where parties on one machine listen
PORTS = range(15_000, 32_000)
# most seconds to restore a connection: on one machine, a broken connection means that a process has ended
RECONNECT = 2.0
# exit code of errors that are not about a party's own options and tables, but mostly about another party
FAILED_WITH_OTHERS = 1
# seconds before survivors are killed: meanwhile they receive the notice of what went wrong
GRACE = ABORT_NOTICE_TIMEOUT + 5.0
# seconds between terminating and killing a process
TERMINATION_GRACE = 5.0
# in place of the name of a job file: the job is on standard input
FROM_PARENT = "-"


class PartyFailure(TreatyError):
    """One or more of the parties' processes failed; the message has the error of each."""


def run_all(
    job: Job,
    verb: str,
    *,
    arguments: Mapping[str, Sequence[str]] | None = None,
    progress: bool = False,
    service: Roles | None = None,
    relay: Callable[[str], None] | None = None,
) -> list[str]:
    """Run ``treaty <verb> JOB --as PARTY`` for every party of the job on this machine, with its further `arguments`.

    Every party must name its table, except a leader without rows. Missing addresses, keys and certificates are
    generated. What successful processes print on standard error becomes warnings; `relay` is called with each line that
    they print, party by party. With `progress` the active party draws its progress bar. `service` says who takes part
    in a prediction for parties without the model, if that is run.

    Return the parties that failed without ending the job, of which there is a warning, too: a training continues
    without `expendable` parties, a service without parties that have rows. If another process fails, raise PartyFailure
    with the error of each.
    """
    if verb == "train":
        with trees_compiled_beside():
            compile_kernels(job.system, job.settings()[0], aligns=job.align.psi if job.align else None)
    completed = _completed(job)
    with ExitStack() as held:
        # files, not pipes: a process that fills a pipe without a reader would block
        errors = {name: held.enter_context(tempfile.TemporaryFile()) for name in job.parties}
        printed = {name: held.enter_context(tempfile.TemporaryFile()) for name in job.parties if relay}
        held.enter_context(ended_by_signals())
        started: dict[str, subprocess.Popen[bytes]] = {}
        held.callback(_end_all, started)
        # if rows are split, all parties compute at once, and threads that mostly hold the interpreter lock are slower
        # on several cores
        kept_to = _cores_of_each(job.parties) if verb == "train" and job.by_row else {}
        for name in service.of if service else job.parties if verb == "train" else owners_of_model(job):
            further = [*(arguments or {}).get(name, ()), *(("--cores", kept_to[name]) if name in kept_to else ())]
            started[name] = subprocess.Popen(  # noqa: S603 - our own interpreter and module, no shell
                [sys.executable, "-m", "treaty", verb, FROM_PARENT, "--as", name, *further],
                stdin=subprocess.PIPE,
                stdout=printed.get(name, subprocess.DEVNULL),
                stderr=None if progress and name == job.active and sys.stderr.isatty() else errors[name],
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            )
        for name, process in started.items():
            _send_job(process, name, completed)
        may_fail = service.owners if service else expendable(job) if verb == "train" else []
        failed = _wait(started, may_fail)
        _end_all(started)
        errors_by = {
            name: "\n".join(line.removeprefix("treaty: ").removeprefix(f"{name}: ") for line in _lines(errors[name]))
            for name in started
        }
        # parties at fault before those that were only notified
        failed.sort(key=lambda name: started[name].returncode == FAILED_WITH_OTHERS)
        failures = "\n".join(f"{name}: {_end(started[name], errors_by[name])}" for name in failed)
        if set(failed) - set(may_fail):
            raise PartyFailure(failures)
        for name in sorted(set(errors_by) - set(failed)):
            for line in errors_by[name].splitlines():
                logger.warning("%s: %s", name, line)
        if relay is not None:
            for name in [name for name in started if name not in failed]:
                for line in _lines(printed[name]):
                    relay(line)
        if failed:
            logger.warning("the job continued without %d parties\n%s", len(failed), failures)
        return failed


def _send_job(process: subprocess.Popen[bytes], name: str, job: Job) -> None:
    """Write a party's job, with no key but its own, as one line; the pipe stays open as long as this process lives."""
    assert process.stdin is not None
    parties = {
        other: member if other == name else msgspec.structs.replace(member, key=None)
        for other, member in job.parties.items()
    }
    # a process that has ended already has printed the reason
    with suppress(BrokenPipeError):
        process.stdin.write(msgspec.structs.replace(job, parties=parties).encoded() + b"\n")
        process.stdin.flush()


def line_of_parent() -> bytes:
    """Return the line that the parent process has written; from now on this process ends when the parent ends."""
    line = bytearray()
    while not line.endswith(b"\n") and (found := os.read(0, 1 << 16)):
        line += found

    def end_with_parent() -> None:
        # nothing more is written: this returns when the pipe's other end is closed, as the parent ends
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        # time to notify the peers, and to write a checkpoint
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="treaty-parent", daemon=True).start()
    return bytes(line)


def _end_all(started: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """End the processes that still run, after a short time in which they may write their checkpoints."""
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


def _cores_of_each(parties: Collection[str]) -> dict[str, str]:
    """Return the cores that each party's process keeps to: some of its own, or one that is shared."""
    every = usable_cores()
    each = max(1, len(every) // len(parties))
    return {
        name: ",".join(str(every[(k * each + i) % len(every)]) for i in range(each)) for k, name in enumerate(parties)
    }


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _end(process: subprocess.Popen[bytes], text: str) -> str:
    """Describe how a process failed, by what it printed unless it was killed."""
    code = process.returncode
    if code >= 0:
        return text or f"ended with exit code {code}"
    return f"killed by signal {-code}" + (f", after\n{text}" if text else "")


def _wait(started: Mapping[str, subprocess.Popen[bytes]], may_fail: Collection[str]) -> list[str]:
    """Wait for all processes; return those that failed, in order, and those in `may_fail` that did not end.

    Once a process that may not fail has failed, or all such have ended, the others get `GRACE` seconds.
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
    """Generate addresses, keys and certificates that the job does not name; shorten the time to reconnect."""
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


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that are not in use.

    They are below the range that operating systems use for outgoing connections (from 32768 on Linux, 49152 elsewhere).
    Otherwise a party that connects early could get the port where another is about to listen.
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
    """Return the messages and phases of a training, by its reports."""
    reports = load_reports(job)
    sent = {f"{party} -> {peer}": totals for party, report in reports.items() for peer, totals in report.sent.items()}
    timelines = {party: report.timeline for party, report in reports.items() if report.timeline is not None}
    return Traffic(sent, reports[job.active].seconds, joined(timelines))


# MiB of unread messages that a party accepts from each peer: all are of one program, whose messages may be large
_SHARE = 4096
# columns of the tables that an estimator writes for its processes
_WEIGHT, _GROUP, _MARGIN = "__weight__", "__group__", "__margin__"


def train_in_processes(
    run: Run, *, weighted: bool, checkpoints: Path | None, noisy_labels: Path | None
) -> tuple[dict[str, Any], Traffic]:
    """Train with every party in a process of its own; return the parts of the model, and the traffic.

    An interrupted training is resumed from the folder `checkpoints`. `noisy_labels` is the file of labels that are
    randomised once, if the system does that. Raises ConfigError for a name that cannot stand in a certificate, and
    PartyFailure if a process fails; before that, ``run.progress`` gets what was finished.
    """
    system, roles = run.system, run.roles
    simulated = system.only_simulated(run.options)
    if simulated:
        raise ConfigError(simulated)
    # names of files are made of them
    check_names(roles.of)
    resume = checkpoints is not None and "resume" not in system.cannot
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        job = _written_job(run, Path(name), weighted, checkpoints, noisy_labels)
        owners = roles.having(*system.has_model) if system.split == "columns" else [roles.active]
        try:
            run_all(job, "train", progress=True, arguments={job.active: ["--resume"]} if resume else None)
        except PartyFailure:
            for party in owners:
                # nothing was finished
                with suppress(ConfigError):
                    _report(run, _with_classes(find_part(job, party), run))
            raise
        parts = {party: _with_classes(find_part(job, party), run) for party in owners}
        _report(run, parts[roles.active])
        return parts, traffic_of(job)


def _report(run: Run, part: Any) -> None:
    """Call a fit's progress with its finished trees, or its epochs' losses by set."""
    if run.progress is not None and isinstance(part, LinearPart):
        run.progress(len(part.losses), {"train": part.losses, **part.eval_losses})
    elif run.progress is not None and isinstance(part, ModelPart):
        run.progress(1, part)


def _written_job(run: Run, folder: Path, weighted: bool, checkpoints: Path | None, noisy_labels: Path | None) -> Job:
    """Write the tables of a fit to a folder; return its job, whose models will be there, too."""
    roles, members = run.roles, {}
    watched_weighted = any(of.weight is not None for of in run.eval_sets)
    for name, role in roles.of.items():
        evals = []
        for rows in run.evals_of(name):
            path = folder / f"{name}.{rows.name}.arrow"
            labels = _labels(run, rows) if name == roles.active else {}
            if labels and watched_weighted:
                labels[_WEIGHT] = np.ones(len(rows.y)) if rows.weight is None else rows.weight
            write_columns(path, rows.table, labels)
            evals.append(str(path))
        data = run.data.get(name)
        if data is not None:
            labelled = len(data.y) == data.table.n_rows and (run.system.split == "rows" or len(data.y) > 0)
            more = _labels(run, data) if labelled else {}
            if labelled and weighted:
                more[_WEIGHT] = np.ones(len(data.y)) if data.weight is None else data.weight
            write_columns(folder / f"{name}.arrow", data.table, more)
        members[name] = Member(
            table=None if data is None else str(folder / f"{name}.arrow"),
            eval_tables=evals,
            noisy_labels=None if noisy_labels is None else str(noisy_labels.resolve()),
            role=role if role in run.system.named_roles else None,
            edge=roles.edges.get(name),
            monotone_constraints=dict(run.directions.get(name, {})),
        )
    (folder / "earlier").mkdir()
    for name, part in run.earlier.items():
        part.save(part_file(folder / "earlier", name))
    kept = None if checkpoints is None else str(checkpoints.resolve())
    starts = run.data[roles.active].base_margin if roles.active in run.data else None
    ranks = run.data[roles.active].y.ndim == 2 if roles.active in run.data else False
    return Job(
        name="fit", active=roles.active, label=FITTED, weight=_WEIGHT if weighted else None, parties=members,
        eval_weight=_WEIGHT if watched_weighted else None,
        base_margin=None if starts is None else [f"{_MARGIN}{k}" for k in range(starts.shape[1])],
        task="classification" if run.classes is not None else "ranking" if ranks else "regression",
        from_model=str(folder / "earlier") if run.earlier else None,
        group=_GROUP if ranks else None, classes=max(2, len(run.classes or ())),
        output=str(folder / "model"), checkpoints=kept, store=kept, n_jobs=run.n_jobs,
        inbox_limit=len(members) * _SHARE, **_settings(run.options, run.common),
    )  # fmt: skip


def _labels(run: Run, data: LabelledRows) -> dict[str, NDArray[Any]]:
    """Return labels as the user gave them, groups and margins: a checkpoint belongs to rows with just these."""
    starts = {} if data.base_margin is None else {f"{_MARGIN}{k}": of for k, of in enumerate(data.base_margin.T)}
    if data.y.ndim == 2:
        return {FITTED: data.y[:, 0], _GROUP: data.y[:, 1], **starts}
    return {FITTED: data.y if run.classes is None else np.array(run.classes)[data.y.astype(np.intp)], **starts}


def _settings(own: Any, common: Any) -> dict[str, Any]:
    """Return a job's fields for these options."""
    plain = given(own, common)
    return {
        "protocol": type(own).system,
        "own": {name: plain[name] for name in own.get_params()},
        "common": {name: plain[name] for name in common.__struct_fields__},
    }


def _with_classes(part: Any, run: Run) -> Any:
    """Restore the labels of the classes, whose types may have changed when they were written to a file."""
    holder = part.forest if hasattr(part, "forest") else part
    if holder is not None and part.is_active:
        holder.classes = run.classes
    return part


def predict_in_processes(
    parts: Mapping[str, Any], tables: Mapping[str, Table], settings: tuple[Any, Any], n_jobs: int | None
) -> NDArray[np.float64]:
    """Predict with every owner of the model in a process of its own; return the active party's margins."""
    # names of files are made of them
    check_names(parts)
    with tempfile.TemporaryDirectory(prefix="treaty-") as name:
        folder = Path(name)
        for party, part in parts.items():
            write_columns(folder / f"{party}.arrow", tables[party], {})
            # the estimator adds rows' own margins
            forest = None if getattr(part, "forest", None) is None else replace(part.forest, base_margin=False)
            part = part if forest is None else msgspec.structs.replace(part, forest=forest)
            part.save(part_file(folder, party))
        members = {party: Member(predict_table=str(folder / f"{party}.arrow")) for party in parts}
        job = Job(
            name="predict", active=active_of(parts), label=FITTED, parties=members, output=str(folder), n_jobs=n_jobs,
            inbox_limit=len(members) * _SHARE, **_settings(*settings),
        )  # fmt: skip
        margins = folder / "margins.npy"
        run_all(job, "predict", arguments={job.active: ["--margins", str(margins)]})
        return np.asarray(np.load(margins, allow_pickle=False))
