"""``treaty audit-log``: what a node did and why, and whether its log is still what was written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from treaty.errors import ConfigError
from treaty.node.audit_log import AuditEntry, AuditHead, head_statement
from treaty.node.cards import verify as verify_signature
from treaty.node.identity import has_signed, load_own, sign, trusted
from treaty.node.settings import load_settings
from treaty.node.store import Store

audit_log = typer.Typer(help="What this node did and why, and whether the log of it is whole.", no_args_is_help=True)
console = Console(markup=False)

Node = Annotated[Path, typer.Option("--node", envvar="TREATY_NODE", help="The node's settings.")]


@audit_log.command()
def show(
    job: Annotated[str, typer.Option(help="Only entries about the job whose id begins like that.")] = "",
    newest: Annotated[int, typer.Option("-n", min=1, help="How many of the newest entries.")] = 50,
    node: Node = Path("node.toml"),
) -> None:
    """Print the newest entries of the node's audit log, the newest one last.

    As they stand there: `treaty audit-log verify` finds those that were changed.
    """
    with Store(load_settings(node).folder, create=False) as store:
        entries = [entry for entry in store.audit() if str(entry.event.get("job", "")).startswith(job)]
    for entry in entries[-newest:]:
        for line in _lines(entry):
            _print(line)


@audit_log.command()
def verify(
    head: Annotated[
        str, typer.Option(metavar="SEQ:HEX[:SIGNATURE]", help="A head of this log that a peer, say, has noted.")
    ] = "",
    node: Node = Path("node.toml"),
) -> None:
    """Tell whether the audit log is what was written: ends with 0 where it is, with 1 where it is not.

    Every entry is bound to all before it, so a change is found, and an entry that is missing or was moved among
    others. Whoever can write the file can also write all of it anew, or take the newest entries away: only heads that
    others have noted show that. This prints the log's head, signed with the node's key, for others to note, and the
    heads that peers have told this node, with their signatures, for them to ask for. A signature shows whose head it
    is, not that there was no other log.
    """
    settings, told = load_settings(node), _read_head(head) if head else None
    keys, cards = load_own(settings.keys, settings.name), trusted(settings.keys)
    with Store(settings.folder, create=False) as store:
        faults, own, heads = store.verify_audit(), store.head(), store.heads()
        held = told is None or store.holds(told)
    own = replace(own, signature=sign(keys, _statement(settings.name, own)))
    said = "that was noted"
    if told is not None and told.signature:
        if has_signed(settings.keys, settings.name, told.signature, _statement(settings.name, told)):
            said = "that this node has signed"
        else:
            faults.append(f"the head given, of entry {told.seq}, is not signed with a key of this node")
    if told is not None and not held:
        faults.append(f"entry {told.seq} is not the one {said}: entries were removed, or written anew")
    for fault in faults:
        _print(f"WRONG  {fault}")
    if not faults:
        _print("ok     the log is whole" + (f", and holds the entry {told.seq} {said}" if told else ""))
    _print(f"head   {own}")
    for party, theirs in heads.items():
        card = cards.get(party)
        known = card is not None and verify_signature(card, theirs.signature, _statement(party, theirs))
        _print(f"told   the log of {party} had the head {theirs}{'' if known else ' (signed with no key trusted now)'}")
    if faults:
        raise typer.Exit(1)


def _read_head(text: str) -> AuditHead:
    seq, *digests = text.strip().split(":")
    try:
        told = AuditHead(int(seq), *map(bytes.fromhex, digests))
    except (ValueError, TypeError):
        told = AuditHead(0, b"")
    if len(told.digest) != 32 or len(told.signature) not in (0, 64) or told.seq < 0:
        raise ConfigError(
            f"expected a number, a colon and 64 hexadecimal digits, and of a signed head a colon and 128 more, got "
            f"{text!r} - at --head"
        )
    return told


def _statement(owner: str, head: AuditHead) -> bytes:
    return head_statement(owner, head.seq, head.digest)


def _lines(entry: AuditEntry) -> list[str]:
    """Return an entry as a line, and one more for each sentence of lists."""
    event = {name: said for name, said in entry.event.items() if name != "what"}
    sentences = [each for said in event.values() if isinstance(said, list) for each in said]
    words = [f"{name} {_short(name, said)}" for name, said in event.items() if not isinstance(said, list)]
    first = f"{entry.seq:>6} {entry.time[:19]}Z {', '.join([_word(entry.event.get('what', '')), *words])}"
    return [first, *(f"       - {_word(sentence)}" for sentence in sentences)]


def _short(name: str, said: Any) -> str:
    return _word(said)[:12] if name == "job" else _word(said)


def _word(said: Any) -> str:
    return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def _print(line: str) -> None:
    """Print a line, in which a peer's words cannot move the cursor or colour the screen."""
    plain = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
    console.print(plain, soft_wrap=True, highlight=False)
