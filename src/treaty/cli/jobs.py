"""``treaty train``, ``predict`` and ``explain`` run a job file; ``treaty serve`` predicts over HTTP.

Without --as, all parties run on this machine, each in a process that runs the same command with --as.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray

from treaty.cli import logs
from treaty.data.reading import write_predictions
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.machine.process import cores as usable
from treaty.machine.process import keep_to
from treaty.runs import prediction
from treaty.runs.connecting import check_writable
from treaty.runs.job import Job, id_column
from treaty.runs.job_files import check_training, decoded_job, load_job
from treaty.runs.party import how_to_resume, part_file, train_party, written_files
from treaty.runs.processes import FROM_PARENT, line_of_parent, run_all
from treaty.runs.progress import TrainingBar, phases_bar
from treaty.runs.report import load_reports, service_report_file

if TYPE_CHECKING:
    from treaty.serving.service import Keys, Partners, PredictionService

logger = logging.getLogger(__name__)

As = Annotated[
    str | None, typer.Option("--as", help="Run only this party; the others are at their addresses in the job file.")
]
TrainedJob = Annotated[
    Path, typer.Argument(metavar="JOB", help="The job file of the training, with predict_table for each party.")
]


def train(
    job: Annotated[Path, typer.Argument(help="Job file (TOML); see docs/jobs.md.")],
    party: As = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted training of this job.")] = False,
    from_model: Annotated[
        Path | None,
        typer.Option("--from-model", help="Folder of a finished model to continue, instead of the job's from_model."),
    ] = None,
    verbose: logs.Verbose = False,
    log_file: logs.LogFile = None,
    trust: logs.Trust = None,
    cores: Annotated[str | None, typer.Option(hidden=True, help="Use only these cores: 0,1.")] = None,
) -> None:
    """Train the model that a job file describes.

    Without --as, all parties run on this machine, each in its own process; keys, certificates and ports are generated
    if the job names none. With --as, only that party runs: start the others on their own machines with the same file.
    Parties hold different columns of the same rows or, under federboost-horizontal, different rows with the same
    columns and labels.

    Each party writes its part of the model (under federboost-horizontal, the whole model) to the job's output folder,
    and a checkpoint during training. After a crash, restart all parties, the active one with --resume: the model is the
    same.

    Under fedxgb, parties have roles: the active one is the server, which alone gets the model; parties with a table are
    users; others have role = "edge" or "authority". The job continues without users that are lost. If any server is
    lost, restart all parties, the server with --resume; with the same users in each tree, the model is the same.

    Examples
    --------
    treaty train job.toml --as bank
    treaty train job.toml --as bank --resume
    """
    described = _read_job(job, party)
    if from_model is not None:
        described = msgspec.structs.replace(described, from_model=str(from_model.resolve()))
    if party is None:
        check_training(described, resume=resume)
        with logs.log_of_all(verbose, log_file, partial(_resume_hint, described, job, None)) as log:
            arguments = {name: log for name in described.parties}
            arguments[described.active] = [*log, *(["--resume"] if resume else [])]
            run_all(described, "train", progress=not verbose, arguments=arguments)
        _print_reports(described)
        return
    # set by the parent process, which deals out the cores of this machine
    if cores is not None:
        keep_to([int(number) for number in cores.split(",")])
    with logs.logged(verbose, log_file, party, partial(_resume_hint, described, job, party)):
        _train(described, party, resume=resume, bars=not verbose)


def _train(job: Job, party: str, *, resume: bool, bars: bool) -> None:
    """Train as one party, and print what it wrote."""
    roles = check_training(job, party, resume=resume)
    with TrainingBar(party, job.settings()[1].most_rounds, shown=bars) as bar:
        part = train_party(job, party, bar, resume=resume, phase=bar.phase)
    took_part = f"took part, and has no part of the model ({roles.of[party]})"
    _say_and_log(f"{party}: {took_part if part is None else part.summary()}")
    if getattr(part, "choice", ""):
        _say_and_log(f"encryption: {part.encryption}, {part.choice}")
    if getattr(part, "spent", ""):
        _say_and_log(f"{party}: {part.spent}")
    for caution in (getattr(part, "unsettled", ""), getattr(getattr(part, "card", None), "caution", "")):
        if caution:
            logs.warn(caution)
    _say_and_log(f"{party}: wrote {', '.join(map(str, written_files(job, party, part)))}")


def _resume_hint(job: Job, file: Path, party: str | None) -> str:
    """Return how to resume an interrupted training, with the command; "" if it must start from the beginning."""
    how = how_to_resume(job, party or job.active)
    # if all parties end with their parent process, that one prints the hint
    if not how or str(file) == FROM_PARENT:
        return ""
    flags = [*([] if party is None else ["--as", party]), *(["--from-model", job.from_model] if job.from_model else [])]
    command = shlex.join(["treaty", "train", str(file), *flags, *(["--resume"] if party in (None, job.active) else [])])
    return f"; to resume: {command}" if party is None else f"{how}; here: {command}"


def _say_and_log(text: str) -> None:
    """Print what the command has done, and log it."""
    logs.console.print(text, soft_wrap=True)
    logger.info("%s", text, extra=logs.PRINTED)


def _print_reports(job: Job) -> None:
    """Print a summary of the reports of all parties on this machine."""
    reports = load_reports(job)
    for name, report in reports.items():
        sent = sum(totals["bytes"] for totals in report.sent.values()) / 1e6
        rows = f"{report.rows} of its {report.own_rows} rows, " if report.own_rows else ""
        took = f"{rows}{sum(report.seconds.values()):.1f} s, {sent:.1f} MB sent"
        made = part_file(job.output, name) if report.has_part else "took part"
        if report.columns:
            logs.say(f"{name}: {report.table()}")
        logs.console.print(f"{name}: {made}  ({took})", soft_wrap=True)
    lead = reports[job.active]
    if lead.choice:
        logs.console.print(f"encryption: {lead.encryption}, {lead.choice}", soft_wrap=True)
    for name, report in reports.items():
        if report.spent and (name == job.active or not job.by_row):
            logs.console.print(f"{name}: {report.spent}", soft_wrap=True)
    logs.say("What each party learned is in the .report.json files in the same folder.")


def predict(
    job: TrainedJob,
    party: As = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for the predictions: CSV or Parquet, by its ending. If rows are split, without --as, each "
            "party's name is added: model/out.csv becomes model/north.out.csv."
        ),
    ] = None,
    verbose: logs.Verbose = False,
    log_file: logs.LogFile = None,
    trust: logs.Trust = None,
    margins: Annotated[Path | None, typer.Option(hidden=True, help="Write margins as .npy instead.")] = None,
) -> None:
    """Predict with a trained model.

    All parties take part, and the active one gets the result. Under federboost-horizontal, each party has the whole
    model and predicts its own rows alone: --as north needs no network and writes north.predictions.csv. The same holds
    for the server under fedxgb. If the job gives users a predict_table, the hidden model then predicts their rows:
    server, edge servers and users all run this command, and only the user sees its rows and predictions.

    Examples
    --------
    treaty predict job.toml --as bank --output scores.csv
    """
    described = _read_job(job, party)
    path = output or Path(described.output) / "predictions.csv"
    if party is not None:
        with logs.logged(verbose, log_file, party):
            if described.by_row:
                _predict_own_rows(
                    described, party, path if output else path.with_name(f"{party}.{path.name}"), bars=not verbose
                )
            else:
                _predict(described, party, path, margins, bars=not verbose)
        return
    with logs.log_of_all(verbose, log_file) as log:
        if described.by_row:
            _predict_all_rows(described, path, log)
        else:
            arguments = {name: log for name in described.parties}
            arguments[described.active] = ["--output", str(path.resolve()), *log]
            run_all(described, "predict", arguments=arguments, relay=_say_and_log)


def _predict(job: Job, party: str, path: Path, margins: Path | None, *, bars: bool) -> None:
    """Take part in a prediction of aligned rows; the active party writes the result."""
    check_writable([path.parent] if party == job.active else [])
    with phases_bar(party, shown=bars) as phase:
        ids, found = prediction.predict_party(job, party, phase)
    if found is None:
        _say_and_log(f"{party}: took part; {job.active} has the predictions")
        return
    if margins is not None:
        np.save(margins, found)
        return
    columns = {} if ids is None else {id_column(job, party): ids}
    part = prediction.find_part(job, party)
    _write(party, path, {**columns, **part.predictions(found)})
    if (caution := part.caution(found)) is not None:
        logs.warn(caution)


def _write(party: str, path: Path, columns: dict[str, Any]) -> None:
    write_predictions(path, columns)
    _say_and_log(f"{party}: wrote {path}, {len(next(iter(columns.values())))} rows")


def _predict_all_rows(job: Job, path: Path, log: list[str]) -> None:
    """Predict each party's own rows on this machine: with the model if the party has it, or else by the service."""
    roles = prediction.service_roles(job)
    if roles is not None:
        arguments = {
            name: ["--output", str(path.with_name(f"{name}.{path.name}").resolve()), *log] for name in roles.of
        }
        run_all(job, "predict", arguments=arguments, service=roles, relay=_say_and_log)
        return
    names = [name for name in prediction.owners_of_model(job) if job.parties[name].predict_table]
    if not names:
        raise ConfigError("the job names no rows to predict: add parties.NAME.predict_table")
    for name in names:
        _predict_alone(job, name, path.with_name(f"{name}.{path.name}"))


def _predict_own_rows(job: Job, party: str, path: Path, *, bars: bool) -> None:
    """Predict a party's own rows: with the model if the party has it, or else together with others, by the service."""
    roles = prediction.service_roles(job)
    if roles is None or (party == job.active and job.parties[party].predict_table):
        _predict_alone(job, party, path)
    if roles is None:
        return
    check_writable([path.parent] if party in roles.owners else [])
    with phases_bar(party, shown=bars) as phase:
        found = prediction.serve_party(job, party, roles, phase)
    if found is not None:
        _write(party, path, found.columns())
        return
    report = service_report_file(job, party)
    _say_and_log(f"{party}: {roles.of[party]} of a prediction for users; wrote {report}")


def _predict_alone(job: Job, party: str, path: Path) -> None:
    _, margins = prediction.predict_party(job, party)
    _write(party, path, prediction.find_part(job, party).predictions(margins))


def explain(
    job: TrainedJob,
    party: As = None,
    ending: Annotated[str, typer.Option(help="csv, csv.gz, parquet or arrow.")] = "csv",
    verbose: logs.Verbose = False,
    log_file: logs.LogFile = None,
    trust: logs.Trust = None,
) -> None:
    """Compute what each column adds to each row's prediction (exact TreeSHAP, on the margin).

    Each party gets the values of its own columns, in NAME.contributions.csv in the job's output folder. The active
    party also gets the bias and the total of each other party. This does not work under federboost-horizontal, whose
    models lack the data for it; under fedxgb, the server explains its own rows. docs/interpretation.md says what
    parties learn beyond a prediction.

    Examples
    --------
    treaty explain job.toml --as bank --ending parquet
    """
    described = _read_job(job, party)
    if party is None and described.by_row and "explain" not in described.system.cannot:
        # where rows are split, only the server has a model that can be explained
        (party,) = prediction.owners_of_model(described)
    if party is None:
        prediction.check_explainable(described)
        with logs.log_of_all(verbose, log_file) as log:
            arguments = {name: ["--ending", ending, *log] for name in described.parties}
            run_all(described, "explain", arguments=arguments, relay=_say_and_log)
        return
    with logs.logged(verbose, log_file, party):
        check_writable([Path(described.output)])
        with phases_bar(party, shown=not verbose) as phase:
            found = prediction.explain_party(described, party, phase)
        if found:
            _write(party, Path(described.output) / f"{party}.contributions.{ending}", found)


def _read_job(file: Path, party: str | None) -> Job:
    """Read a job file, or the job from the parent process that runs all parties; ConfigError if it lacks the party."""
    parent = str(file) == FROM_PARENT
    job = decoded_job(line_of_parent(), trusted=True) if parent else load_job(file)
    if party is not None and party not in job.parties:
        raise ConfigError(f"expected --as to be one of {', '.join(job.parties)}, got {party!r}")
    return job


def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="The active party's part (NAME.part), the folder of a whole model, or a job of this node: a training "
            "or, if partners are needed, one of `treaty submit --serve`."
        ),
    ] = None,
    listen: Annotated[str, typer.Option(help="Where to listen: HOST:PORT.")] = "127.0.0.1:8000",
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host name to accept besides localhost, such as that of a proxy on this machine."),
    ] = None,
    api_keys: Annotated[Path | None, typer.Option(help="File with the digests of accepted API keys.")] = None,
    new_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make a key for NAME, add its digest to --api-keys, and exit.")
    ] = None,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="Accept requests without keys, from other machines, too.")
    ] = False,
    fallback: Annotated[
        Literal["own"] | None,
        typer.Option(help="own: predict from own columns alone if partners are needed but absent. Less accurate."),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate (PEM): serve HTTPS.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    node: logs.NodeFile = logs.NODE_FILE,
    max_rows: Annotated[int, typer.Option(min=1, help="Maximum rows of a request.")] = 10_000,
    max_bytes: Annotated[int, typer.Option(min=1, help="Maximum bytes of a request.")] = 8 << 20,
    max_requests: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests; others get 503.")] = 64,
    verbose: logs.Verbose = False,
    log_file: logs.LogFile = None,
) -> None:
    """Serve a model's predictions over HTTP: POST /predict, GET /model, /docs, /metrics, /health.

    Without --api-keys, only this machine can send requests. No log contains values of rows. A model with splits of
    other parties cannot predict without them; docs/serving.md lists the options. A signal ends it, with exit code 0.

    Examples
    --------
    treaty serve model/bank.part --listen 0.0.0.0:8443 --api-keys keys.txt --certificate cert.pem --key key.pem
    """
    if new_key is not None:
        _make_key(new_key, api_keys)
        return
    if model is None:
        raise ConfigError("expected a model to serve: treaty serve MODEL")
    if (certificate is None) != (key is None):
        raise ConfigError("expected --certificate and --key together, or neither, got one of them")
    if api_keys is not None and no_keys:
        raise ConfigError("expected --api-keys or --no-keys, got both")
    try:
        from treaty.serving.app import split_address
    except ModuleNotFoundError as error:
        raise ConfigError("treaty serve needs FastAPI: pip install 'treaty-learn[web]'") from error
    from treaty.node.settings import LOCAL, is_loopback
    from treaty.serving.models import load_model
    from treaty.serving.service import PredictionService, RequestLimits, read_keys

    near = is_loopback(split_address(listen)[0])
    if api_keys is None and not no_keys and not near:
        raise ConfigError(
            f"{listen} can be reached from other machines: name --api-keys FILE (--new-key NAME adds a key), or add "
            "--no-keys to serve everybody"
        )
    with logs.logged(verbose, log_file):
        limits = RequestLimits(rows=max_rows, body_bytes=max_bytes, under_way=max_requests)
        of_node = not model.exists() and re.fullmatch(r"[0-9a-f]{1,64}", str(model)) is not None
        path, partners = _model_of_node(model, node) if of_node else (model, None)
        service = PredictionService(
            load_model(path), limits, partners=partners, fallback=fallback == "own", threads=usable()
        )
        keys = None if api_keys is None else read_keys(api_keys)
        service.warm_up()
        if keys is not None and certificate is None and not near:
            logs.warn(
                "keys and rows travel unencrypted: give --certificate and --key, or put a proxy with TLS in front"
            )
        if service.model.needs and not service.falls_back and partners is None:
            logs.warn(f"no prediction can be made without {', '.join(service.model.needs)}; /predict will answer 503")
        hosts = LOCAL.union(name.lower() for name in host or ()) if near else None
        _listen(service, keys, listen, hosts, certificate, key)


def _listen(
    service: PredictionService, keys: Keys | None, address: str, hosts: frozenset[str] | None, certificate: Path | None,
    key: Path | None,
) -> None:  # fmt: skip
    """Answer requests to these `hosts` (None: to any) at an address, until a signal comes."""
    from treaty.serving import app

    with app.listen(address) as socket:

        def announce() -> None:
            of, port = socket.getsockname()[:2]
            at = f"{'http' if certificate is None else 'https'}://{f'[{of}]' if ':' in of else of}:{port}"
            who = "any client" if keys is None else f"{len(keys)} keys"
            logs.say(f"serving {service.model.part.party}'s model {service.model.part.model_id[:8]} at {at} to {who}")
            logs.say(f"columns and examples: {at}/docs")

        app.run(app.make_app(service, keys, hosts), socket, certificate=certificate, key=key, ready=announce)


def _model_of_node(job: Path, node: Path) -> tuple[Path, Partners | None]:
    """Return the part that a node's job has left and, for a service, the function that asks the partners."""
    from treaty.node.proposals import Proposal
    from treaty.node.requests import Partners as Asking
    from treaty.node.requests import UnknownIds
    from treaty.node.settings import find_socket, load_settings
    from treaty.node.store import Store
    from treaty.serving.service import Refused

    settings = load_settings(node)
    state = Path(settings.folder)
    with Store(state, create=False) as store:
        row = store.job(str(job))
    proposal = msgspec.json.decode(row.proposal, type=Proposal)
    part = state / "models" / (proposal.model or row.id) / f"{settings.name}.part"
    if proposal.verb != "serve":
        return part, None
    asking = Asking(
        lambda: find_socket(state, row.id), [name for name in proposal.described().parties if name != row.submitter]
    )

    def partners(ids: Sequence[str], table: Table) -> NDArray[np.float64]:
        try:
            return asking(ids, table)
        except UnknownIds as error:
            raise Refused(422, str(error)) from None

    return part, partners


def _make_key(name: str, file: Path | None) -> None:
    """Print a new key; add its digest to a file, or print the line to add."""
    from treaty.serving.service import add_key, new_key

    if file is None:
        made, line = new_key(name)
        logs.say(f"line for the file of keys: {line}")
    else:
        made = add_key(file, name)
        logs.say(f"added {name} to {file}; restart the server to accept its key")
    logs.say(f"key (shown only now, give it to {name} alone): {made}")
