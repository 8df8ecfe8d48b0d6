"""``treaty check``: what one party can find out before a job begins."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treaty.cli.disclosures import say_learned
from treaty.cli.logs import Trust
from treaty.cli.node import DEFAULT, NodeFile, check_as_node
from treaty.errors import ConfigError, TreatyError
from treaty.runs.job import Job, load_job, seconds_of
from treaty.runs.local_checks import Finding, check_own, peers_of, probe
from treaty.runs.meeting.connecting import listening
from treaty.runs.report import learned_by

console = Console(markup=False)
AGAIN = 1.0  # seconds between two attempts to reach a peer
LINGER = 3.0  # seconds for which one that waited still listens, for those who have just begun


def check(
    job: Annotated[Path, typer.Argument(help="The job's file.")],
    party: Annotated[
        str | None, typer.Option("--as", help="Check as this party of a job without nodes. Default: as this node.")
    ] = None,
    wait: Annotated[
        str, typer.Option(help="How long to try to reach the others: 90s, 10m, 1h. Default: 0s, of nodes 1m.")
    ] = "",
    with_peers: Annotated[
        bool, typer.Option("--with-peers", help="Have the nodes of all parties check, too; they show nobody anything.")
    ] = False,
    node: NodeFile = DEFAULT,
    trust: Trust = None,
) -> None:
    """Check a party's own tables, labels, folders, disk, key, certificates and clock; then who answers.

    Nothing is trained and no row is sent. With --as this party listens meanwhile, so that others that check at the same
    time reach it: with --wait 10m all may begin within ten minutes. Without it the job is one for nodes: this node's
    policy is asked, too, and its peers are those that the running node is connected with. A line of each check says ok,
    or WRONG and what to do. What each party would learn is printed, too; `treaty disclosures` has by which message.

    Ends with 0 where all is well, 2 where something of this party's own is wrong, 1 where only other parties do not
    answer as they should.
    """
    if party is None and node == DEFAULT and not node.exists():
        names = ", ".join(load_job(job).parties)
        raise ConfigError(
            f"expected --as with the party to check as, one of {names}; or, of a job for nodes, --node with the node's "
            "settings"
        )
    if party is None:
        here, there = check_as_node(job, node, with_peers=with_peers, patience=seconds_of("--wait", wait or "1m"))
        raise typer.Exit(0 if here and there else 1 if here else 2)
    if with_peers:
        raise ConfigError("expected --with-peers without --as: only nodes can check at others' request")
    described = load_job(job)
    if party not in described.parties:
        raise ConfigError(f"expected --as to be one of {', '.join(described.parties)}, got {party!r}")
    patience = seconds_of("--wait", wait or "0s")
    own = check_own(described, party)
    for finding in own:
        _show(finding)
    if not own[0].fine:  # who talks to whom is not known
        raise typer.Exit(2)
    say_learned(learned_by(described, described.roles()))
    with ExitStack() as held:
        own.append(_listen(described, party, held))
        _show(own[-1])
        others = _reach(described, party, time.monotonic() + patience)
        if patience:
            time.sleep(LINGER)
    if not all(finding.fine for finding in own):
        raise typer.Exit(2)
    if not all(finding.fine for finding in others):
        raise typer.Exit(1)


def _listen(job: Job, party: str, held: ExitStack) -> Finding:
    """Listen as in a training, so that others find somebody."""
    try:
        channel = held.enter_context(listening(job, party))
    except TreatyError as error:
        return Finding("listening", False, str(error))
    return Finding("listening", True, f"at {channel.address}")


def _reach(job: Job, party: str, deadline: float) -> list[Finding]:
    """Try to reach every peer until the deadline, once at least."""
    found = []
    for peer in peers_of(job, party):
        finding = probe(job, party, peer)
        while not finding.fine and time.monotonic() < deadline:
            time.sleep(AGAIN)
            finding = probe(job, party, peer)
        _show(finding)
        found.append(finding)
    return found


def _show(finding: Finding) -> None:
    console.print(str(finding), soft_wrap=True, highlight=False)
