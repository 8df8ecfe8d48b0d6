"""``treaty node``, and the commands to submit, check, approve and list jobs, which also work while the node is down."""

from __future__ import annotations

import getpass
import logging
import signal
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import treaty
from treaty.cli.logs import NODE_FILE, NodeFile, console, say, say_learned
from treaty.errors import NOTED, ConfigError
from treaty.node.jobs import trained
from treaty.node.proposals import JobStatus, Proposal, Verb, check_same, id_of, in_words, proposed, rounds_of, statement
from treaty.node.settings import Settings, load_settings
from treaty.node.store import FINAL, JobRow, Store
from treaty.runs.job import Job, Member
from treaty.runs.link_checks import over_links, probe
from treaty.runs.local_checks import EXPECTED, CheckFinding, Size, stated_sizes

# the first line of a connection to a node; see `node.door`
TO_NODE = b"TREATY/1 node\n"

JobPrefix = Annotated[str, typer.Argument(metavar="JOB", help="The first letters of a job's id.")]
Reason = Annotated[str, typer.Option(help="Sent to the other parties.")]


def node(
    settings: Annotated[Path, typer.Argument(help="The node's settings, NODE.toml; see docs/nodes.md.")] = NODE_FILE,
) -> None:
    """Run this organisation's node until it is stopped (Ctrl-C or SIGTERM).

    The node connects to the nodes of its peers, stores jobs, and runs this organisation's party in the jobs that all
    parties have approved. After a crash, start it again: jobs resume from the last tree that all parties have.

    Examples
    --------
    treaty node /etc/treaty/node.toml
    """
    from treaty.node.service import Node

    _log()
    described = load_settings(settings)
    running = Node(described)
    # the node ends its processes and closes its database before it exits
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: running.stop())
    if described.web is not None:
        try:
            from treaty.node.web import Serving
        except ImportError:
            raise ConfigError('[web] needs more packages: pip install "treaty-learn[web]"') from None
        from treaty.node.job_views import JobView, describe
        from treaty.node.usage import usage_of

        def view(row: JobRow) -> JobView:
            return describe(running.store, described, row, running.jobs.verdicts.there(row.id))

        page = Serving(
            running.store, running.name, view, described.web.listen,
            usage=partial(usage_of, described, running.store), node=str(settings.resolve()),
        )  # fmt: skip
        running.held.callback(page.stop)
    running.run()


def submit(
    job: Annotated[
        Path, typer.Argument(help="Job file (TOML) whose tables are names of data sets; see docs/nodes.md.")
    ],
    node: NodeFile = NODE_FILE,
    predict: Annotated[
        str | None, typer.Option(help="Predict with the model of this training (the first letters of its id).")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="Likewise, compute what each column adds to each prediction.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(help="Likewise, stay connected, so that `treaty serve JOB` can predict row by row.")
    ] = None,
    from_model: Annotated[
        str | None,
        typer.Option("--from-model", help="Train on from the model of this training."),
    ] = None,
) -> None:
    """Propose a job to the nodes of all its parties. The active party submits it.

    All nodes see the same hash. Each checks the job against its own policies; then its policy, or a person, approves
    it. After that, the job cannot be changed.

    Examples
    --------
    treaty submit job.toml
    treaty submit job.toml --predict 3fa9
    """
    from treaty.node.identity import trusted
    from treaty.node.job_views import verdict_on

    settings = load_settings(node)
    given: dict[Verb, str | None] = {"predict": predict, "explain": explain, "serve": serve}
    asked = {verb: model for verb, model in given.items() if model is not None}
    if len(asked) + (from_model is not None) > 1:
        raise ConfigError("expected one of --predict, --explain, --serve and --from-model, got several")
    verb: Verb = next(iter(asked), "train")
    with Store(Path(settings.folder)) as store:
        earlier = store.job(from_model).id if from_model is not None else ""
        content = proposed(job, verb, store.job(str(asked[verb])).id if asked else "", earlier)
        proposal = msgspec.json.decode(content, type=Proposal)
        described = proposal.described()
        _check_active(described, settings, node)
        if named := proposal.model or proposal.from_model:
            check_same(described, trained(store, named))
        verdict = verdict_on(settings, trusted(settings.keys), described, verb)
        if not verdict.allowed:
            _print_findings(verdict.findings)
            raise ConfigError("this node's own policy does not allow it; nothing was submitted")
        job_id = _propose(store, settings, content)
    say(f"job {job_id[:12]} is proposed: {in_words(described, verb)}")
    say(f"hash {job_id}")


def _check_active(job: Job, settings: Settings, node: Path) -> None:
    """Refuse a job whose active party is another one, or whose parties this node does not know."""
    if job.active != settings.name:
        raise ConfigError(
            f"expected a job whose active party is {settings.name}, got {job.active}: its node submits it"
        )
    unknown = [party for party in job.parties if party != settings.name and party not in settings.peers]
    if unknown:
        raise ConfigError(f"expected [peers.NAME] of all parties in {node}, got none of {', '.join(unknown)}")


def _propose(store: Store, settings: Settings, content: bytes) -> str:
    """Sign a proposal and store it for the node; return the job's id."""
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
    """Check a job for nodes; return whether all is well here, and at the other parties."""
    from treaty.node.identity import load_own, trusted
    from treaty.node.job_views import checked, learned, verdict_on

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
        fine = all(finding.fine for finding in findings)
        if not (with_peers and fine and up):
            return fine, up
        _check_active(job, settings, node)
        passed, sizes = _tried(store, _propose(store, settings, content), patience)
    own = load_own(settings.keys, settings.name)
    if sizes:
        findings = checked(own, cards, settings, job, "train", sizes)
        _print_findings(finding for finding in findings if finding.what.startswith(EXPECTED))
    # peers without an address here measure the link from their side
    parties = {
        peer: Member(address=settings.dialled[peer], certificate=card.certificate)
        for peer, card in cards.items()
        if peer in settings.dialled and peer in job.parties
    }
    me = Member(key=own.identity.key.decode(), certificate=own.card.certificate, proxy=settings.proxy)
    answers = {peer: probe({**parties, settings.name: me}, settings.name, peer, TO_NODE) for peer in parties}
    links = {peer: link for peer, (_, link) in answers.items() if link is not None}
    _print_findings([*(finding for finding, _ in answers.values()), *over_links(job, findings, links)])
    return True, passed and links.keys() == parties.keys()


def _print_peers(store: Store, settings: Settings, job: Job) -> bool:
    """Print which parties are connected under the same version; return whether all are."""
    seen, fine = store.peers(), True
    for party in job.parties:
        if party != settings.name:
            state = seen.get(party)
            same = state is not None and state.up and state.said == f"Treaty {treaty.__version__}"
            said = "this node has never run" if state is None else state.said if state.up else f"away: {state.said}"
            _print_findings([CheckFinding(party, same, said)])
            fine &= same
    return fine


def _tried(store: Store, job_id: str, patience: float) -> tuple[bool, dict[str, Size]]:
    """Wait for a trial to end and print what each party's node found; also return the table sizes that nodes sent."""
    deadline = time.monotonic() + patience
    while (row := store.job(job_id)).state not in FINAL and time.monotonic() < deadline:
        time.sleep(0.2)
    # an unanswered trial must not stay open at the other nodes
    if row.state not in FINAL:
        store.command(job_id, "cancel", b"{}")
    sizes = {}
    for party, encoded in store.views(job_id).items():
        view = msgspec.msgpack.decode(encoded, type=JobStatus)
        if party != row.submitter:
            if (size := stated_sizes(view.reason)) is not None:
                sizes[party] = size
            fine = view.state in ("approved", "finished")
            _print_findings([CheckFinding(party, fine, view.reason or ("could take part" if fine else view.state))])
    if row.state != "finished":
        say(f"  WRONG  {row.reason or f'not all nodes have answered in {patience:g} s'}")
    return row.state == "finished", sizes


def jobs(
    node: NodeFile = NODE_FILE,
    every: Annotated[bool, typer.Option("--all", help="Include jobs that ended more than a day ago.")] = False,
) -> None:
    """List the jobs that wait for an approval, run, or have ended.

    Examples
    --------
    treaty jobs --all
    """
    from treaty.node.job_views import title_of

    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        rows = [row for row in store.jobs() if every or row.state not in FINAL or time.time() - row.changed < 86400]
    table = Table("job", "what", "state", "rounds", "since (UTC)", "why", box=None, pad_edge=False)
    for row in rows:
        rounds = f"{row.rounds}/{row.total}" if row.total else ""
        since = datetime.fromtimestamp(row.changed, UTC).strftime("%Y-%m-%d %H:%M:%S")
        # as text, without markup: other organisations have chosen it
        what = Text(title_of(row))
        table.add_row(row.id[:12], what, row.state, rounds, since, Text(row.reason))
    if sys.stdout.isatty():
        console.print(table)
    else:
        # one line each, for scripts
        Console(width=500).print(table)


def show_job(prefix: str, node: Path) -> None:
    """Print a job, its state at all nodes, what each party would learn, and the verdict of this node's policy."""
    from treaty.node.identity import trusted
    from treaty.node.job_views import describe, verdict_on

    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        row = store.job(prefix)
        proposal = msgspec.json.decode(row.proposal, type=Proposal)
        verdict = None
        if row.state in ("proposed", "approved"):
            verdict = verdict_on(settings, trusted(settings.keys), proposal.described(), proposal.verb)
        view = describe(store, settings, row, verdict)
    say(view.title)
    say(f"hash      {view.hash}")
    say(f"submitted {proposal.submitted} by {row.submitter}")
    say(f"state     {row.state}{f': {row.reason}' if row.reason else ''}")
    for party, state in view.states.items():
        say(f"          {party}: {state}")
    if view.progress is not None:
        say(f"progress  {view.progress.done} of {view.progress.total} {view.progress.unit}")
    for file in view.models:
        say(f"file      {file}")
    say("What each party learns:")
    for sentence in view.disclosures:
        say(f"  {sentence}")
    if verdict is not None:
        say("This node's policy:")
        _print_findings(verdict.findings)
    say("The job:")
    # without empty and default fields
    fields = {name: value for name, value in msgspec.json.decode(proposal.job).items() if value not in (None, {}, [])}
    fields["parties"] = {
        party: {name: value for name, value in member.items() if value not in (None, [], 8.0)}
        for party, member in fields["parties"].items()
    }
    say(msgspec.json.format(msgspec.json.encode(fields).decode()))


def _print_findings(findings: Iterable[CheckFinding]) -> None:
    for finding in findings:
        say(f"  {finding}")


def approve(job: JobPrefix, node: NodeFile = NODE_FILE) -> None:
    """Approve a job for this organisation. Its policy must allow the job, too; `treaty show JOB` prints the job.

    Examples
    --------
    treaty approve 3fa9
    """
    _command(job, "approve", node, "", ("proposed",))


def reject(job: JobPrefix, node: NodeFile = NODE_FILE, reason: Reason = "") -> None:
    """Reject a job that has not started; it then ends for all parties.

    Examples
    --------
    treaty reject 3fa9 --reason "no contract yet"
    """
    _command(job, "reject", node, reason, ("proposed", "approved"))


def cancel(job: JobPrefix, node: NodeFile = NODE_FILE, reason: Reason = "") -> None:
    """Cancel a running or waiting job at all parties.

    Examples
    --------
    treaty cancel 3fa9 --reason "wrong table"
    """
    _command(job, "cancel", node, reason, ("proposed", "approved", "queued", "running", "waiting"))


def _command(prefix: str, what: str, node: Path, reason: str, states: tuple[str, ...]) -> None:
    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        row = store.job(prefix)
        if row.state not in states:
            raise ConfigError(f"cannot {what} job {row.id[:12]}: it is {row.state} already")
        store.command(row.id, what, msgspec.json.encode({"by": getpass.getuser(), "reason": reason}))
    say(f"{what} job {row.id[:12]}: noted for the node")


def _log() -> None:
    """Log on standard error, one line of JSON per event; nothing from a table is logged."""

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
