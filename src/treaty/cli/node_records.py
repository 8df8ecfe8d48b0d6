"""What a node keeps: ``treaty models``, ``logs``, ``forget`` and ``audit-log``."""

from __future__ import annotations

import getpass
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from treaty.cli.logs import NODE_FILE, NodeFile, say
from treaty.cli.node import JobPrefix
from treaty.errors import ConfigError
from treaty.node.cards import verify as verify_signature
from treaty.node.identity import has_signed, load_own, sign, trusted
from treaty.node.job_views import forget_job, kept_for, left_of, results
from treaty.node.proposals import Proposal, in_words
from treaty.node.settings import JobFiles, load_settings
from treaty.node.store import FINAL, AuditEntry, AuditHead, JobRow, Store, head_statement


def models(node: NodeFile = NODE_FILE) -> None:
    """List the models of which this organisation has a part, by the id of their training.

    Examples
    --------
    treaty models
    """
    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        rows = [row for row in store.jobs({"finished"}) if row.verb == "train"]
    for row in rows:
        proposal = msgspec.json.decode(row.proposal, type=Proposal)
        parts = [path for path in results(settings, row, proposal) if path.suffix == ".part"]
        ended = datetime.fromtimestamp(row.changed, UTC).strftime("%Y-%m-%d %H:%M")
        part = parts[0] if parts else "no part here"
        say(f"{row.id[:12]}  {ended}  {in_words(proposal.described(), 'train')}  {part}")


def logs(
    job: JobPrefix,
    node: NodeFile = NODE_FILE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
) -> None:
    """Print the log of this organisation's process of a job.

    Examples
    --------
    treaty logs 3fa9 --follow
    """
    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        row = store.job(job)
        file = JobFiles(settings.folder, row.id).log
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


def forget(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="The first letters of a job's id.")] = None,
    older: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0.0, help="All jobs that ended more than this many days ago.")
    ] = None,
    node: NodeFile = NODE_FILE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what an ended job has left on this node: its model, report, checkpoints, query results and log.

    For a prediction, its file of predictions is removed. Ledgers and the audit log stay; the audit log records what was
    removed, and who removed it. Nothing is removed at other parties. A model stays if a prediction or service that has
    not ended needs it. A model that was forgotten cannot be used for predictions any more.

    Examples
    --------
    treaty forget 3fa9
    treaty forget --older 90 --yes
    """
    if (job is None) == (older is None):
        raise ConfigError(f"expected JOB or --older DAYS, got {'neither' if job is None else 'both'}")
    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        before = time.time() - 86400.0 * (older or 0.0)
        rows = [store.job(job)] if job is not None else [row for row in store.jobs(FINAL) if row.changed < before]
        going: dict[JobRow, list[Path]] = {}
        for row in rows:
            why, left = kept_for(store, row), left_of(settings, store, row)
            if why and job is not None:
                raise ConfigError(why)
            if why:
                say(f"kept: {why}")
            elif left:
                going[row] = left
        if not going:
            say("nothing is left to remove")
            return
        for path in [path for left in going.values() for path in left]:
            say(f"  {path}")
        if not yes:
            typer.confirm("Remove all this for good?", abort=True)
        for row in going:
            removed = forget_job(settings, store, row, getpass.getuser())
            say(f"job {row.id[:12]} is forgotten: {len(removed)} files or folders removed")


audit_log = typer.Typer(help="Show or verify the log of what this node did and why.", no_args_is_help=True)


@audit_log.command()
def show(
    job: Annotated[str, typer.Option(help="Only entries about the job whose id begins with this.")] = "",
    newest: Annotated[int, typer.Option("-n", min=1, help="How many of the newest entries.")] = 50,
    node: NodeFile = NODE_FILE,
) -> None:
    """Print the newest entries of the node's audit log, the newest one last.

    Entries are not verified here; `treaty audit-log verify` finds those that were changed.

    Examples
    --------
    treaty audit-log show --job 3fa9
    """
    with Store(load_settings(node).folder, create=False) as store:
        entries = [entry for entry in store.audit() if str(entry.event.get("job", "")).startswith(job)]
    for entry in entries[-newest:]:
        for line in _lines(entry):
            _say_escaped(line)


@audit_log.command()
def verify(
    head: Annotated[
        str, typer.Option(metavar="SEQ:HEX[:SIGNATURE]", help="A head of this log, for example as a peer noted it.")
    ] = "",
    node: NodeFile = NODE_FILE,
) -> None:
    """Verify that the audit log was not changed. Exit code: 0 if it is whole, 1 if not.

    Each entry is bound to all entries before it, so a changed, missing or moved entry is found. But a person who can
    write the file can also rewrite all of it, or remove the newest entries; only heads that others have noted reveal
    that. This command prints the log's head, signed with the node's key, for others to note. It also prints the heads
    that peers have sent to this node, with their signatures. A signature proves whose head it is, not that there was no
    other log.

    Examples
    --------
    treaty audit-log verify
    """
    settings, noted = load_settings(node), _read_head(head) if head else None
    keys, cards = load_own(settings.keys, settings.name), trusted(settings.keys)
    with Store(settings.folder, create=False) as store:
        faults, own, heads = store.verify_audit(), store.head(), store.heads()
        held = noted is None or store.holds(noted)
    own = replace(own, signature=sign(keys, head_statement(settings.name, own.seq, own.digest)))
    known_as = "that was noted"
    if noted is not None and noted.signature:
        statement = head_statement(settings.name, noted.seq, noted.digest)
        if has_signed(settings.keys, settings.name, noted.signature, statement):
            known_as = "that this node has signed"
        else:
            faults.append(f"the head given, of entry {noted.seq}, is not signed with a key of this node")
    if noted is not None and not held:
        faults.append(f"entry {noted.seq} is not the one {known_as}: entries were removed or rewritten")
    for fault in faults:
        _say_escaped(f"WRONG  {fault}")
    if not faults:
        _say_escaped("ok     the log is whole" + (f", and holds the entry {noted.seq} {known_as}" if noted else ""))
    _say_escaped(f"head   {own}")
    for party, theirs in heads.items():
        card = cards.get(party)
        statement = head_statement(party, theirs.seq, theirs.digest)
        known = card is not None and verify_signature(card, theirs.signature, statement)
        unknown = "" if known else " (signed with no key trusted now)"
        _say_escaped(f"noted  the log of {party} had the head {theirs}{unknown}")
    if faults:
        raise typer.Exit(1)


def _read_head(text: str) -> AuditHead:
    seq, *digests = text.strip().split(":")
    try:
        head = AuditHead(int(seq), *map(bytes.fromhex, digests))
    except (ValueError, TypeError):
        head = AuditHead(0, b"")
    if len(head.digest) != 32 or len(head.signature) not in (0, 64) or head.seq < 0:
        raise ConfigError(
            "expected a number, a colon and 64 hexadecimal digits, and for a signed head a colon and 128 more, got "
            f"{text!r} - at --head"
        )
    return head


def _lines(entry: AuditEntry) -> list[str]:
    """Return an entry as one line, and one more for each sentence of its lists."""

    def word(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    event = {name: value for name, value in entry.event.items() if name != "what"}
    sentences = [each for value in event.values() if isinstance(value, list) for each in value]
    words = [
        f"{name} {word(value)[: 12 if name == 'job' else None]}"
        for name, value in event.items()
        if not isinstance(value, list)
    ]
    first = f"{entry.seq:>6} {entry.time[:19]}Z {', '.join([word(entry.event.get('what', '')), *words])}"
    return [first, *(f"       - {word(sentence)}" for sentence in sentences)]


def _say_escaped(line: str) -> None:
    """Print a line; control characters from a peer cannot move the cursor or colour the screen."""
    say("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line))
