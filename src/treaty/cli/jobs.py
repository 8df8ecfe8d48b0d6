"""The commands that run a job file, for one party or for all on this machine: train, predict, explain."""

from __future__ import annotations

import logging
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from treaty.cli.logs import PRINTED, LogFile, Trust, Verbose, log_of_all, logged
from treaty.data.sources import write_predictions
from treaty.errors import ConfigError
from treaty.machine.process import keep_to
from treaty.runs.job import Job, id_column, load_job
from treaty.runs.local_checks import check_training
from treaty.runs.party import (
    check_explainable,
    explain_party,
    find_part,
    how_to_resume,
    owners_of_model,
    part_file,
    predict_party,
    train_party,
    written_files,
)
from treaty.runs.processes import FROM_PARENT, job_of_parent, run_all
from treaty.runs.progress import TrainingBar, check_writable, phases_bar
from treaty.runs.report import load_reports, service_report_file
from treaty.runs.serving import serve_party, service_roles

logger = logging.getLogger(__name__)
console = Console(markup=False)


def train(
    job: Annotated[Path, typer.Argument(help="Job file (TOML), see docs/jobs.md.")],
    party: Annotated[
        str | None,
        typer.Option("--as", help="Run only this party, against the others' addresses in the job file."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from where an interrupted training of this job was.")
    ] = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
    trust: Trust = None,
    cores: Annotated[str | None, typer.Option(hidden=True, help="Keep to these cores of the machine: 0,1.")] = None,
) -> None:
    """Train the model a job file describes.

    Without --as every party runs on this machine, each its own process; keys, certificates and ports are made up where
    the job names none. Parties hold different columns of the same rows, or, under federboost-horizontal, different rows
    of the same columns, each with labels. With --as only that party runs: start the others on their own machines with
    the same file. Each party's part of the model (under federboost-horizontal the whole model) is written to the job's
    output folder. While it trains each keeps a checkpoint there: after a crash, start all again and give the active
    party --resume. The model is the same as without the crash.

    Under fedxgb parties have roles: the active one is the server, which alone gets the model; whoever has a table is a
    user; the others have role = "edge" or role = "authority". The job goes on without users that are lost. After the
    loss of an edge server or the server, all are started again, the server with --resume; the model is the same if the
    same users take part in each tree.
    """
    described = _described(job)
    if party is None:
        check_training(described, resume=resume)
        with log_of_all(verbose, log_file, partial(_to_go_on, described, job, None)) as log:
            arguments = {name: log for name in described.parties}
            arguments[described.active] = [*log, *(["--resume"] if resume else [])]
            run_all(described, "train", progress=not verbose, arguments=arguments)
        _print_reports(described)
        return
    _check_party(party, list(described.parties))
    if cores is not None:
        keep_to([int(number) for number in cores.split(",")])
    with logged(verbose, log_file, party, partial(_to_go_on, described, job, party)):
        _train(described, party, resume=resume, bars=not verbose)


def _train(job: Job, party: str, *, resume: bool, bars: bool) -> None:
    """Train as one party, and say what it has and wrote."""
    roles = check_training(job, party, resume=resume)
    with TrainingBar(party, job.settings()[1].most_rounds, shown=bars) as bar:
        part = train_party(job, party, bar, resume=resume, phase=bar.phase)
    if part is None:
        _tell(f"{party}: took part, and has no part of the model ({roles.of[party]})")
    else:
        _tell(f"{party}: {part.summary()}")
    if getattr(part, "choice", ""):
        _tell(f"encryption: {part.encryption}, {part.choice}")
    if getattr(part, "spent", ""):
        _tell(f"{party}: {part.spent}")
    if getattr(part, "unsettled", ""):
        print(f"treaty: {part.unsettled}", file=sys.stderr)
    _tell(f"{party}: wrote {', '.join(map(str, written_files(job, party, part)))}")


def _to_go_on(job: Job, file: Path, party: str | None) -> str:
    """Say how a training that was interrupted goes on, with the command; "" where it begins anew."""
    how = how_to_resume(job, party or job.active)
    if not how or str(file) == FROM_PARENT:  # all parties end with their parent, which says it
        return ""
    flags = [] if party is None else ["--as", party]
    command = shlex.join(["treaty", "train", str(file), *flags, *(["--resume"] if party in (None, job.active) else [])])
    return f"; to go on: {command}" if party is None else f"{how}; here: {command}"


def _tell(text: str) -> None:
    """Print what a command has done; a log file has it, too."""
    console.print(text, soft_wrap=True)
    logger.info("%s", text, extra=PRINTED)


def _print_reports(job: Job) -> None:
    """Print what all parties of a training on this machine noted."""
    reports = load_reports(job)
    for name, report in reports.items():
        sent = sum(totals["bytes"] for totals in report.sent.values()) / 1e6
        rows = f"{report.rows} of its {report.own_rows} rows, " if report.own_rows else ""
        took = f"{rows}{sum(report.seconds.values()):.1f} s, {sent:.1f} MB sent"
        made = part_file(job.output, name) if report.has_part else "took part"
        if report.columns:
            console.print(f"{name}: {report.table()}", soft_wrap=True, highlight=False)
        console.print(f"{name}: {made}  ({took})", soft_wrap=True)
    lead = reports[job.active]
    if lead.choice:
        console.print(f"encryption: {lead.encryption}, {lead.choice}", soft_wrap=True)
    for name, report in reports.items():
        if report.spent and (name == job.active or not job.by_row):
            console.print(f"{name}: {report.spent}", soft_wrap=True)
    console.print("What each party learned is in the .report.json files beside them.")


def predict(
    job: Annotated[Path, typer.Argument(help="The training job's file, with predict_table for each party.")],
    party: Annotated[str | None, typer.Option("--as", help="Run only this party.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where predictions go: CSV or Parquet by its ending. Where rows are split, without --as, each party's "
            "name is put in front: model/out.csv becomes model/north.out.csv."
        ),
    ] = None,
    verbose: Verbose = False,
    log_file: LogFile = None,
    trust: Trust = None,
    margins: Annotated[Path | None, typer.Option(hidden=True, help="Write margins as .npy instead.")] = None,
) -> None:
    """Predict with a trained model.

    All parties take part, the active one gets the result. Under federboost-horizontal each has the whole model and
    predicts its own rows alone; --as north needs no network and writes north.predictions.csv. So does the server under
    fedxgb. Where the job gives users a predict_table, too, their rows come next, by the hidden model: server, edge
    servers and users all run this command, and neither rows nor predictions are shown to others than the user.
    """
    described = _described(job)
    path = output or Path(described.output) / "predictions.csv"
    if party is not None:
        _check_party(party, list(described.parties))
    if party is not None:
        with logged(verbose, log_file, party):
            if described.by_row:
                _predict_own_rows(described, party, path if output else _file_of(path, party), bars=not verbose)
            else:
                _predict(described, party, path, margins, bars=not verbose)
        return
    with log_of_all(verbose, log_file) as log:
        if described.by_row:
            _predict_all_rows(described, path, log)
        else:
            arguments = {name: log for name in described.parties}
            arguments[described.active] = ["--output", str(path.resolve()), *log]
            run_all(described, "predict", arguments=arguments, relay=_tell)


def _predict(job: Job, party: str, path: Path, margins: Path | None, *, bars: bool) -> None:
    """Take part in a prediction of aligned rows; the active party writes it."""
    check_writable([path.parent] if party == job.active else [])
    with phases_bar(party, shown=bars) as phase:
        ids, found = predict_party(job, party, phase)
    if found is None:
        _tell(f"{party}: took part; {job.active} has the predictions")
        return
    if margins is not None:
        np.save(margins, found)
        return
    columns = {} if ids is None else {id_column(job, party): ids}
    part = find_part(job, party)
    _write(party, path, {**columns, **part.predictions(found)})
    caution = part.caution(found)
    if caution is not None:
        print(f"treaty: {caution}", file=sys.stderr)


def _write(party: str, path: Path, columns: dict[str, Any]) -> None:
    """Write a table of results, and say so."""
    write_predictions(path, columns)
    _tell(f"{party}: wrote {path}, {len(next(iter(columns.values())))} rows")


def _file_of(path: Path, party: str) -> Path:
    return path.with_name(f"{party}.{path.name}")


def _predict_all_rows(job: Job, path: Path, log: list[str]) -> None:
    """Predict each party's own rows on this machine: with the model alone where they have it, else by its service."""
    roles = service_roles(job)
    if roles is not None:
        arguments = {name: ["--output", str(_file_of(path, name).resolve()), *log] for name in roles.of}
        run_all(job, "predict", arguments=arguments, service=roles, relay=_tell)
        return
    names = [name for name in owners_of_model(job) if job.parties[name].predict_table]
    if not names:
        raise ConfigError("the job names no rows to predict: add parties.NAME.predict_table")
    for name in names:
        _predict_alone(job, name, _file_of(path, name))


def _predict_own_rows(job: Job, party: str, path: Path, *, bars: bool) -> None:
    """Predict a party's own rows: with the model alone where it has that, else with others, by its service."""
    roles = service_roles(job)
    if roles is None or (party == job.active and job.parties[party].predict_table):
        _predict_alone(job, party, path)
    if roles is None:
        return
    check_writable([path.parent] if party in roles.owners else [])
    with phases_bar(party, shown=bars) as phase:
        found = serve_party(job, party, roles, phase)
    if found is not None:
        _write(party, path, found.columns())
        return
    report = service_report_file(job, party)
    _tell(f"{party}: {roles.of[party]} of a prediction for users; wrote {report}")


def _predict_alone(job: Job, party: str, path: Path) -> None:
    _, margins = predict_party(job, party)
    _write(party, path, find_part(job, party).predictions(margins))


def explain(
    job: Annotated[Path, typer.Argument(help="The training job's file, with predict_table for each party.")],
    party: Annotated[str | None, typer.Option("--as", help="Run only this party.")] = None,
    ending: Annotated[str, typer.Option(help="csv, csv.gz, parquet or arrow.")] = "csv",
    verbose: Verbose = False,
    log_file: LogFile = None,
    trust: Trust = None,
) -> None:
    """Say what each column adds to each row's prediction (exact TreeSHAP, on the margin).

    Every party gets its own columns' values, in NAME.contributions.csv in the job's output folder; the active party the
    bias and each other party's total besides. Not under federboost-horizontal, whose models leave out what this is
    computed from; under fedxgb the server explains its own rows alone. docs/interpretation.md says what this tells
    beyond a prediction.
    """
    described = _described(job)
    if party is None and described.by_row and "explain" not in described.system.cannot:
        (party,) = owners_of_model(described)  # the server
    if party is None:
        check_explainable(described)
        with log_of_all(verbose, log_file) as log:
            arguments = {name: ["--ending", ending, *log] for name in described.parties}
            run_all(described, "explain", arguments=arguments, relay=_tell)
        return
    _check_party(party, list(described.parties))
    with logged(verbose, log_file, party):
        check_writable([Path(described.output)])
        with phases_bar(party, shown=not verbose) as phase:
            found = explain_party(described, party, phase)
        if found:
            _write(party, Path(described.output) / f"{party}.contributions.{ending}", found)


def _described(job: Path) -> Job:
    """Read a job file, or the job of the command that plays all parties and has started this process for one."""
    return job_of_parent() if str(job) == FROM_PARENT else load_job(job)


def _check_party(party: str, parties: list[str]) -> None:
    if party not in parties:
        raise ConfigError(f"expected --as to be one of {', '.join(parties)}, got {party!r}")
