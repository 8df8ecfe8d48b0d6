"""The ``treaty`` command.

Exit codes: 0 done; 1 the job ended with an error, said on standard error, which may be any party's where all run here;
2 the command line, the job file or, with --as, this party's own table is wrong.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import typer
from rich.console import Console

import treaty
from treaty.compute import keep_to
from treaty.data.sources import write_predictions
from treaty.database import set_aside
from treaty.errors import ConfigError, DataError, TreatyError
from treaty.messaging.certificates import fingerprint, load_certificate, write_identity
from treaty.privacy.ledger import cost, read_ledger, summary
from treaty.runs.endings import check_writable
from treaty.runs.job import Job, id_column, load_job
from treaty.runs.party import (
    check_explainable,
    check_training,
    explain_party,
    find_part,
    owners_of_model,
    part_file,
    predict_party,
    train_party,
)
from treaty.runs.processes import FROM_PARENT, ended_by_signals, job_of_parent, run_all
from treaty.runs.progress import TrainingBar, steps_bar
from treaty.runs.report import load_reports, service_report_file
from treaty.runs.serving import serve_party, service_cast

app = typer.Typer(
    help="Train one model across organisations that may not pool their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()
BY_SIGNAL = (129, 130, 143)  # exit codes after SIGHUP, SIGINT and SIGTERM


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"treaty {treaty.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train one model across organisations that may not pool their data."""


@app.command()
def demo(
    protocol: Annotated[
        str | None,
        typer.Option(
            help="With --model trees: secureboost, federboost-vertical, fedxgboost-smm or fedxgboost-ldp, split by "
            "column; federboost-horizontal, split by row; fedxgb, among users of a few rows; or pooled, on one table "
            "(default secureboost). With --model logistic: quasi-newton, sgd or pooled (default quasi-newton)."
        ),
    ] = None,
    model: Annotated[
        Literal["trees", "logistic"], typer.Option(help="Boosted trees, or logistic regression, split by column.")
    ] = "trees",
    parties: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=10,
            help="How many organisations the table is cut among. Default 3 (2 with --model logistic). With fedxgb: the "
            "number of edge servers; each has four users.",
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="breast (scikit-learn's, built in), or a CSV or Parquet file.")] = "breast",
    label: Annotated[str | None, typer.Option(help="Label column of a file.")] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="How columns are cut: 'age,income/visits,spend' gives the first party two; in place of --parties."
        ),
    ] = None,
    transport: Annotated[
        Literal["grpc", "memory"] | None,
        typer.Option(help="grpc: one process each, mutual TLS; memory: threads. By default memory for fedxgb alone."),
    ] = None,
    trees: Annotated[int | None, typer.Option(min=1, help="Boosting rounds. Default 20.")] = None,
    encryption: Annotated[
        str,
        typer.Option(
            help="With secureboost, quasi-newton and sgd: auto, lattice, ou (Okamoto-Uchiyama, 3072 bit) or paillier. "
            "With fedxgboost-smm its backend: lattice, dealer or ou."
        ),
    ] = "auto",
) -> None:
    """Train and predict between organisations on this machine and compare with XGBoost on the pooled table.

    The first party has the labels. With the built-in data a clinic (labels, some measurements), a laboratory and an
    imaging centre hold different columns of the same patients. Each lacks some of them and has them in an order of its
    own, so they first find those they share without showing each other their lists. Under federboost-horizontal three
    hospitals have patients of their own, with all measurements and labels; each is compared with what it gets alone.
    Under fedxgb people's rows stay on devices of their own; a server gets the model, and the devices nothing of it.
    With --model logistic a clinic and a laboratory fit a logistic regression together, beside scikit-learn's.
    """
    from treaty.cli.demos import run_demo

    run_demo(
        console, model=model, protocol=protocol, parties=parties, data=data, label=label, split=split,
        transport=transport, trees=trees, encryption=encryption,
    )  # fmt: skip


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="Job file (TOML), see docs/jobs.md.")],
    party: Annotated[
        str | None,
        typer.Option("--as", help="Run only this party, against the others' addresses in the job file."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from where an interrupted training of this job was.")
    ] = False,
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
    loss of an edge server or the server, all are started again, the server with --resume.
    """
    described = _described(job)
    if party is not None:
        _check_party(party, list(described.parties))
    cast = check_training(described, party, resume=resume)
    if party is None:
        run_all(described, "train", progress=True, arguments={described.active: ["--resume"]} if resume else None)
        _print_reports(described)
        return
    if cores is not None:
        keep_to([int(number) for number in cores.split(",")])
    rounds = described.settings()[1].most_rounds
    with TrainingBar(party, rounds, shown=party == described.active) as bar:
        part = train_party(described, party, bar, resume=resume, phase=bar.phase)
    if part is None:
        console.print(f"{party}: took part, and has no part of the model ({cast.roles[party]})")
        return
    console.print(f"{party}: {part.summary()} in {part_file(described.output, party)}", soft_wrap=True)
    if getattr(part, "choice", ""):
        console.print(f"encryption: {part.encryption}, {part.choice}", soft_wrap=True)
    if getattr(part, "spent", ""):
        console.print(f"{party}: {part.spent}", soft_wrap=True)
    if getattr(part, "unsettled", ""):
        print(f"treaty: {part.unsettled}", file=sys.stderr)


def _print_reports(job: Job) -> None:
    """Print what all parties of a training on this machine noted."""
    reports = load_reports(job)
    for name, report in reports.items():
        sent = sum(totals["bytes"] for totals in report.sent.values()) / 1e6
        took = f"{sum(report.seconds.values()):.1f} s, {sent:.1f} MB sent"
        made = part_file(job.output, name) if report.has_part else "took part"
        console.print(f"{name}: {made}  ({took})", soft_wrap=True)
    lead = reports[job.active]
    if lead.choice:
        console.print(f"encryption: {lead.encryption}, {lead.choice}", soft_wrap=True)
    for name, report in reports.items():
        if report.spent and (name == job.active or not job.by_row):
            console.print(f"{name}: {report.spent}", soft_wrap=True)
    console.print("What each party learned is in the .report.json files beside them.")


@app.command()
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
    margins: Annotated[Path | None, typer.Option(hidden=True, help="Write margins as .npy instead.")] = None,
) -> None:
    """Predict with a trained model.

    All parties take part, the active one gets the result. Under federboost-horizontal each has the whole model and
    predicts its own rows alone; --as north needs no network and writes north.predictions.csv. So does the server under
    fedxgb. There users whom the job gives a predict_table get their rows predicted by the hidden model: server, edge
    servers and users all run this command, and neither rows nor predictions are shown to others than the user.
    """
    described = _described(job)
    path = output or Path(described.output) / "predictions.csv"
    if party is not None:
        _check_party(party, list(described.parties))
    if described.by_row:
        _predict_rows(described, party, path, named=output is not None)
        return
    if party is None:
        run_all(described, "predict", arguments={described.active: ["--output", str(path.resolve())]})
        console.print(f"predictions: {path}", soft_wrap=True)
        return
    check_writable([path.parent] if party == described.active else [])
    with steps_bar("predicting", shown=party == described.active) as steps:
        ids, found = predict_party(described, party, steps)
    if found is None:
        return
    if margins is not None:
        np.save(margins, found)
        return
    columns = {} if ids is None else {id_column(described, party): ids}
    part = find_part(described, party)
    write_predictions(path, {**columns, **part.predictions(found)})
    caution = part.caution(found)
    if caution is not None:
        print(f"treaty: {caution}", file=sys.stderr)


def _predict_rows(job: Job, party: str | None, path: Path, *, named: bool) -> None:
    """Predict each party's own rows, or one's: where it has the model alone, else with others by its service."""
    cast = service_cast(job)

    def file_of(name: str) -> Path:
        return path if party and named else path.with_name(f"{name}.{path.name}")

    def write(name: str, columns: dict[str, Any]) -> None:
        write_predictions(file_of(name), columns)
        console.print(f"{name}: {file_of(name)}", soft_wrap=True)

    if cast is not None and party is None:
        arguments = {name: ["--output", str(file_of(name).resolve())] for name in cast.roles}
        failed = run_all(job, "predict", arguments=arguments, service=cast)
        for name in [name for name in cast.roles if job.parties[name].predict_table and name not in failed]:
            console.print(f"{name}: {file_of(name)}", soft_wrap=True)
        return
    if cast is None:
        names = [party] if party else [name for name in owners_of_model(job) if job.parties[name].predict_table]
        if not names:
            raise ConfigError("the job names no rows to predict: add parties.NAME.predict_table")
    else:
        names = [job.active] if party == job.active and job.parties[party].predict_table else []
    for name in names:
        _, margins = predict_party(job, name)
        write(name, find_part(job, name).predictions(margins))
    if cast is None or party is None:
        return
    check_writable([file_of(party).parent] if party in cast.owners else [])
    found = serve_party(job, party, cast)
    if found is not None:
        write(party, found.columns())
        return
    report = service_report_file(job, party)
    console.print(f"{party}: {cast.roles[party]} of a prediction for users; its report is {report}", soft_wrap=True)


@app.command()
def explain(
    job: Annotated[Path, typer.Argument(help="The training job's file, with predict_table for each party.")],
    party: Annotated[str | None, typer.Option("--as", help="Run only this party.")] = None,
    ending: Annotated[str, typer.Option(help="csv, csv.gz, parquet or arrow.")] = "csv",
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
        run_all(described, "explain", arguments={name: ["--ending", ending] for name in described.parties})
        for name in owners_of_model(described):
            console.print(f"{name}: {Path(described.output) / f'{name}.contributions.{ending}'}", soft_wrap=True)
        return
    _check_party(party, list(described.parties))
    check_writable([Path(described.output)])
    found = explain_party(described, party)
    if found:
        write_predictions(Path(described.output) / f"{party}.contributions.{ending}", found)


@app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="The ledger's file, or its folder: NAME.noise in a job's store.")],
    delta: Annotated[
        float | None, typer.Option(help="Have an accountant add releases up at this delta, where that is less.")
    ] = None,
) -> None:
    """Print what noisy releases about a party's rows have cost so far, per value and per person.

    One line for each job, or model, and mechanism; the last line is for everything together.
    """
    entries = read_ledger(path)
    groups = dict.fromkeys((entry.job, entry.mechanism) for entry in entries)
    for job, mechanism in groups:
        own = [entry for entry in entries if (entry.job, entry.mechanism) == (job, mechanism)]
        console.print(f"{job}, {mechanism}, {summary(own)}: {cost(own, delta)}", soft_wrap=True, highlight=False)
    console.print(f"all: {cost(entries, delta)}", soft_wrap=True, highlight=False)


@app.command()
def begin_anew(
    path: Annotated[
        Path, typer.Argument(help="What is lost or damaged: NAME.noise, NAME.hints, NAME.queries, or a run log.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Set aside what a party must remember and has lost, so that its next job begins it anew.

    NAME.noise counts what noisy releases have cost people, and has the key of the noise: begun anew, people pay again
    for what is released again, up to epsilon_total once more. NAME.hints counts what answers under the lattice map
    have leaked. NAME.queries counts rows that users had predicted by a hidden model. A run log (NAME.jsonl, NAME.runs)
    counts alignments. Bring back a copy if there is one; what is damaged
    is moved, not deleted.
    """
    if not yes:
        typer.confirm(f"Forget what {path} has counted, so that all of it may be spent once more?", abort=True)
    for moved in set_aside(path):
        console.print(f"moved to {moved}", soft_wrap=True, highlight=False)


@app.command()
def audit_gradients(
    active: Annotated[Path, typer.Argument(help="Folder of the active party's records: its keep_for_audit.")],
    passive: Annotated[Path, typer.Argument(help="Folder of a passive party's records.")],
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Audit what is whole of records that a killed training left.")
    ] = False,
) -> None:
    """Tell whether a passive party received the gradients that the labels imply.

    For after a training whose parties had keep_for_audit in their job files. Opens all that the passive party recorded
    with the key and secrets that the active party recorded, and compares it with what follows from the labels, tree by
    tree. Whoever runs this sees labels and gradients in the active party's record: an auditor whom both trust, or the
    two together. Records of several trainings are put together by their numbers. docs/secureboost.md says what is
    checked and what is not.

    Ends with 0 where all is the same, 1 where something differs, 2 where a record is damaged or missing.
    """
    from treaty.compute import cores as all_cores
    from treaty.systems.vertical.audit.replay import audit

    with steps_bar("auditing trees") as bar:
        verdicts = audit(active, passive, unfinished=unfinished, threads=all_cores(), progress=bar)
    for found in verdicts:
        what = f"{found.active} -> {found.passive}, job {found.job!r}, model {found.model_id[:8]}"
        for note in found.notes:
            console.print(f"{what}: {note}", soft_wrap=True, highlight=False)
        for finding in found.findings:
            console.print(f"{what}: {finding}", soft_wrap=True, highlight=False)
        compared = f"{found.trees} trees compared, {found.vectors} vectors opened"
        same = "all hold the gradients that the labels imply" if found.trees else "nothing could be compared"
        result = f"{len(found.findings)} differences" if found.findings else same
        console.print(f"{what}: {compared}: {result}", soft_wrap=True, highlight=False)
        signed = f"signed under the certificate {found.signed_by}" if found.signed_by else "nothing was signed"
        console.print(f"{what}: {signed}", soft_wrap=True, highlight=False)
    if any(found.findings or not found.trees for found in verdicts):
        raise typer.Exit(1)


@app.command()
def keys(
    name: Annotated[str, typer.Argument(help="The party's name, as in job files.")],
    folder: Annotated[Path, typer.Option(help="Where to write the two files.")] = Path("."),
) -> None:
    """Make a party's private key and certificate.

    Keep NAME.key.pem to yourself; give NAME.cert.pem to the other organisations and compare the fingerprint with them
    over another channel.
    """
    write_identity(folder, name)
    certificate = folder / f"{name}.cert.pem"
    console.print(f"key          {folder / (name + '.key.pem')}  (private: never send it)", soft_wrap=True)
    console.print(f"certificate  {certificate}  (give it to your partners)", soft_wrap=True)
    console.print(f"fingerprint  {fingerprint(load_certificate(certificate))}", soft_wrap=True)


def _described(job: Path) -> Job:
    """Read a job file, or the job of the command that plays all parties and has started this process for one."""
    return job_of_parent() if str(job) == FROM_PARENT else load_job(job)


def _check_party(party: str, parties: list[str]) -> None:
    if party not in parties:
        raise ConfigError(f"expected --as to be one of {', '.join(parties)}, got {party!r}")


def main() -> NoReturn:
    """Run the command line; errors Treaty raises on purpose are one message, not a traceback."""
    try:
        with ended_by_signals():
            app(standalone_mode=True)
    except (ConfigError, DataError) as error:
        print(f"treaty: {error}", file=sys.stderr)
        sys.exit(2)
    except TreatyError as error:
        print(f"treaty: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code in BY_SIGNAL:
            # at once: a call of gRPC that was cut off half-way can keep the interpreter from ending
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code)
        raise
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"treaty: a file or the system failed: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
