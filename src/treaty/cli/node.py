"""The commands of a node: the process itself, and what people ask of it, also while it is down."""

from __future__ import annotations

import getpass
import logging
import signal
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import treaty
from treaty.cli.disclosures import say_learned
from treaty.errors import NOTED, ConfigError
from treaty.node.jobs import trained
from treaty.node.notes import JobStatus
from treaty.node.proposals import Proposal, Verb, check_same, id_of, in_words, proposed, rounds_of, statement
from treaty.node.settings import Settings, load_settings
from treaty.node.store import FINAL, JobRow, Store
from treaty.runs.expectations import told_sizes
from treaty.runs.job import Job
from treaty.runs.local_checks import EXPECTED, Finding

if TYPE_CHECKING:
    from treaty.node.page import JobView
    from treaty.node.service import Node
    from treaty.node.web import Serving

console = Console(markup=False)

NodeFile = Annotated[Path, typer.Option("--node", envvar="TREATY_NODE", help="The node's settings.")]
JobPrefix = Annotated[str, typer.Argument(metavar="JOB", help="The first letters of a job's id.")]
DEFAULT = Path("node.toml")


def node(
    settings: Annotated[Path, typer.Argument(help="The node's settings, NODE.toml, see docs/nodes.md.")] = DEFAULT,
) -> None:
    """Run this organisation's node until it is stopped (Ctrl-C, or SIGTERM).

    It connects with the nodes of its peers, keeps jobs, and plays this organisation's party in those that all parties
    have approved. After a crash start it again: jobs go on from the last tree that all parties have.
    """
    from treaty.node.service import Node

    _log()
    described = load_settings(settings)
    running = Node(described)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: running.stop())
    if described.web is not None:
        running.before_end(_page(running, described.web.listen).stop)
    running.run()


def _page(running: Node, listen: str) -> Serving:
    """Serve the node's page and metrics from a thread."""
    try:
        from treaty.node.web import Serving
    except ImportError:
        raise ConfigError('[web] needs more packages: pip install "treaty-learn[web]"') from None
    from treaty.node.page import describe

    def described(row: JobRow) -> JobView:
        return describe(running.store, running.settings, row, running.jobs.verdicts.there(row.id))

    return Serving(running.store, running.name, described, listen)


def submit(
    job: Annotated[
        Path, typer.Argument(help="Job file (TOML) whose tables are names of data sets, see docs/nodes.md.")
    ],
    node: NodeFile = DEFAULT,
    predict: Annotated[
        str | None, typer.Option(help="Predict with the model of this training, by the first letters of its id.")
    ] = None,
    explain: Annotated[str | None, typer.Option(help="Likewise: what each column adds to each prediction.")] = None,
    serve: Annotated[
        str | None, typer.Option(help="Likewise: stay connected, so that `treaty serve JOB` can predict row by row.")
    ] = None,
) -> None:
    """Propose a job to the nodes of all its parties; the active party does.

    Each of them is shown the same hash, checks the job against its own policies, and approves it by itself or by a
    person. Nothing of it can be changed after that.
    """
    from treaty.node.identity import trusted
    from treaty.node.verdicts import verdict_on

    settings = load_settings(node)
    given: dict[Verb, str | None] = {"predict": predict, "explain": explain, "serve": serve}
    asked = {verb: model for verb, model in given.items() if model is not None}
    if len(asked) > 1:
        raise ConfigError(f"expected one of --predict, --explain and --serve, got {len(asked)} of them")
    verb: Verb = next(iter(asked), "train")
    with Store(Path(settings.folder)) as store:
        content = proposed(job, verb, store.job(str(asked[verb])).id if asked else "")
        described = msgspec.json.decode(content, type=Proposal).described()
        _check_active(described, settings, node)
        if asked:
            check_same(described, trained(store, msgspec.json.decode(content, type=Proposal).model))
        verdict = verdict_on(settings, trusted(settings.keys), described, verb)
        if not verdict.allowed:
            _print_findings(verdict.findings)
            raise ConfigError("this node's own policy does not allow it; nothing was submitted")
        job_id = _propose(store, settings, content)
    _say(f"job {job_id[:12]} is proposed: {in_words(described, verb)}")
    _say(f"hash {job_id}")


def _check_active(job: Job, settings: Settings, node: Path) -> None:
    """Refuse a job that another party's node is to submit, or whose parties this node does not know."""
    if job.active != settings.name:
        raise ConfigError(
            f"expected a job whose active party is {settings.name}, got {job.active}: its node submits it"
        )
    unknown = [party for party in job.parties if party != settings.name and party not in settings.peers]
    if unknown:
        raise ConfigError(f"expected [peers.NAME] of all parties in {node}, got none of {', '.join(unknown)}")


def _propose(store: Store, settings: Settings, content: bytes) -> str:
    """Sign a proposal and leave it for the node; return the job's id."""
    from treaty.node.identity import load_own, sign

    proposal, job_id = msgspec.json.decode(content, type=Proposal), id_of(content)
    job, own = proposal.described(), load_own(settings.keys, settings.name)
    signature = sign(own, statement("submit", job_id, settings.name))
    total = rounds_of(job, proposal.kind)
    row = JobRow(job_id, content, signature, settings.name, proposal.kind, total=total)
    event = {"what": "submitted", "by": getpass.getuser(), "name": job.name, "verb": proposal.kind}
    store.add_job(row, event=event)
    return job_id


def check_as_node(file: Path, node: Path, *, with_peers: bool, patience: float) -> tuple[bool, bool]:
    """Check a job for nodes; return whether all is well here, and at others."""
    from treaty.node.identity import load_own, trusted
    from treaty.node.verdicts import checked, learned, verdict_on

    settings = load_settings(node)
    content = proposed(file, "train", trial=True)
    job = msgspec.json.decode(content, type=Proposal).described()
    cards = {peer: card for peer, card in trusted(settings.keys).items() if peer in settings.peers}
    findings = verdict_on(settings, cards, job, "train").findings
    if all(finding.fine for finding in findings):
        findings += checked(load_own(settings.keys, settings.name), cards, settings, job, "train")
    _print_findings(findings)
    say_learned(learned(job, "train"))
    with Store(Path(settings.folder)) as store:
        up = _print_peers(store, settings, job)
        own = all(finding.fine for finding in findings)
        if not (with_peers and own and up):
            return own, up
        _check_active(job, settings, node)
        passed, told = _tried(store, _propose(store, settings, content), patience)
    if told:
        again = checked(load_own(settings.keys, settings.name), cards, settings, job, "train", told)
        _print_findings(finding for finding in again if finding.what.startswith(EXPECTED))
    return own, passed


def _print_peers(store: Store, settings: Settings, job: Job) -> bool:
    """Say who is connected with this node, under the same version; return whether all parties are."""
    seen, fine = store.peers(), True
    for party in job.parties:
        if party != settings.name:
            state = seen.get(party)
            same = state is not None and state.up and state.said == f"Treaty {treaty.__version__}"
            said = "this node has never run" if state is None else state.said if state.up else f"away: {state.said}"
            _print_findings([Finding(party, same, said)])
            fine &= same
    return fine


def _tried(store: Store, job_id: str, patience: float) -> tuple[bool, dict[str, tuple[int, int]]]:
    """Wait for the end of a trial, and say what each party's node found; return also the sizes that nodes told."""
    deadline = time.monotonic() + patience
    while (row := store.job(job_id)).state not in FINAL and time.monotonic() < deadline:
        time.sleep(0.2)
    if row.state not in FINAL:
        store.command(job_id, "cancel", b"{}")
    told = {}
    for party, encoded in store.views(job_id).items():
        view = msgspec.msgpack.decode(encoded, type=JobStatus)
        if party != row.submitter:
            if (size := told_sizes(view.reason)) is not None:
                told[party] = size
            fine = view.state in ("approved", "finished")
            _print_findings([Finding(party, fine, view.reason or ("could take part" if fine else view.state))])
    if row.state != "finished":
        _say(f"  WRONG  {row.reason or f'not all nodes have answered in {patience:g} s'}")
    return row.state == "finished", told


def jobs(
    node: NodeFile = DEFAULT,
    every: Annotated[bool, typer.Option("--all", help="Also those that have ended more than a day ago.")] = False,
) -> None:
    """List jobs: those that wait for an approval, run, or have ended."""
    from treaty.node.page import title_of

    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        rows = [row for row in store.jobs() if every or row.state not in FINAL or time.time() - row.changed < 86400]
    table = Table("job", "what", "state", "rounds", "since (UTC)", "why", box=None, pad_edge=False)
    for row in rows:
        rounds = f"{row.rounds}/{row.total}" if row.total else ""
        since = datetime.fromtimestamp(row.changed, UTC).strftime("%Y-%m-%d %H:%M:%S")
        what = Text(title_of(row))  # no markup: others have chosen it
        table.add_row(row.id[:12], what, row.state, rounds, since, Text(row.reason))
    if sys.stdout.isatty():
        console.print(table)
    else:  # one line each, for scripts
        Console(width=500).print(table)


def show_job(prefix: str, node: Path) -> None:
    """Print a job as all nodes have it, what each party would learn, and the verdict of this node's policy."""
    from treaty.node.identity import trusted
    from treaty.node.page import describe
    from treaty.node.verdicts import verdict_on

    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        row = store.job(prefix)
        proposal = msgspec.json.decode(row.proposal, type=Proposal)
        verdict = None
        if row.state in ("proposed", "approved"):
            verdict = verdict_on(settings, trusted(settings.keys), proposal.described(), proposal.verb)
        view = describe(store, settings, row, verdict)
    _say(view.title)
    _say(f"hash      {view.hash}")
    _say(f"submitted {proposal.submitted} by {row.submitter}")
    _say(f"state     {row.state}{f': {row.reason}' if row.reason else ''}")
    for party, state in view.states.items():
        _say(f"          {party}: {state}")
    if view.progress is not None:
        _say(f"progress  {view.progress.done} of {view.progress.total} {view.progress.unit}")
    for file in view.models:
        _say(f"file      {file}")
    _say("What each party learns:")
    for sentence in view.disclosures:
        _say(f"  {sentence}")
    if verdict is not None:
        _say("This node's policy:")
        _print_findings(verdict.findings)
    _say("The job:")
    _say(msgspec.json.format(_without_defaults(proposal.job)))


def _without_defaults(job: str) -> str:
    """Return a job's JSON without the fields that say nothing."""
    fields = {name: value for name, value in msgspec.json.decode(job).items() if value not in (None, {}, [])}
    fields["parties"] = {
        party: {name: value for name, value in member.items() if value not in (None, [], 8.0)}
        for party, member in fields["parties"].items()
    }
    return msgspec.json.encode(fields).decode()


def _print_findings(findings: Iterable[Finding]) -> None:
    for finding in findings:
        _say(f"  {finding}")


def approve(job: JobPrefix, node: NodeFile = DEFAULT) -> None:
    """Approve a job for this organisation; its policy must allow it, too. `treaty show JOB` says what it is."""
    _command(job, "approve", node, "", ("proposed",))


def reject(
    job: JobPrefix, node: NodeFile = DEFAULT, reason: Annotated[str, typer.Option(help="Others are told.")] = ""
) -> None:
    """Reject a job that has not begun; it has ended then for all parties."""
    _command(job, "reject", node, reason, ("proposed", "approved"))


def cancel(
    job: JobPrefix, node: NodeFile = DEFAULT, reason: Annotated[str, typer.Option(help="Others are told.")] = ""
) -> None:
    """Cancel a job at all parties, whether it runs or waits."""
    _command(job, "cancel", node, reason, ("proposed", "approved", "queued", "running", "waiting"))


def _command(prefix: str, what: str, node: Path, reason: str, states: tuple[str, ...]) -> None:
    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        row = store.job(prefix)
        if row.state not in states:
            raise ConfigError(f"cannot {what} job {row.id[:12]}: it is {row.state} already")
        store.command(row.id, what, msgspec.json.encode({"by": getpass.getuser(), "reason": reason}))
    _say(f"{what} job {row.id[:12]}: noted for the node")


def logs(
    job: JobPrefix,
    node: NodeFile = DEFAULT,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing until the job has ended.")] = False,
) -> None:
    """Print what this organisation's process of a job has logged."""
    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        row = store.job(job)
        file = Path(settings.folder) / "logs" / f"{row.id}.log"
        at = 0
        while True:
            ended = store.job(row.id).state in FINAL
            if file.exists():
                with file.open("rb") as log:
                    log.seek(at)
                    new = log.read()
                at += len(new)
                sys.stdout.write(new.decode(errors="replace"))
                sys.stdout.flush()
            if ended or not follow:
                return
            time.sleep(0.5)


def models(node: NodeFile = DEFAULT) -> None:
    """List the models that this organisation has a part of, by the training's job."""
    from treaty.node.page import results

    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        rows = [row for row in store.jobs({"finished"}) if row.verb == "train"]
    for row in rows:
        proposal = msgspec.json.decode(row.proposal, type=Proposal)
        parts = [path for path in results(settings, row, proposal) if path.suffix == ".part"]
        ended = datetime.fromtimestamp(row.changed, UTC).strftime("%Y-%m-%d %H:%M")
        part = parts[0] if parts else "no part here"
        _say(f"{row.id[:12]}  {ended}  {in_words(proposal.described(), 'train')}  {part}")


def _log() -> None:
    """Write what the node does on standard error, a line of JSON each; never anything of a table."""

    class Routes(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            line = {"time": when, "level": record.levelname, "from": record.name, "said": record.getMessage()}
            if record.exc_info:
                line["traceback"] = self.formatException(record.exc_info)
            return msgspec.json.encode(line).decode()

    handler = logging.StreamHandler()
    handler.setFormatter(Routes())
    logging.addLevelName(NOTED, "INFO")
    package = logging.getLogger("treaty")
    package.setLevel(logging.INFO)
    package.addHandler(handler)


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
