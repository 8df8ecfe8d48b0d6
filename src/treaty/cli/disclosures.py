"""``treaty disclosures``: who would learn what in a job, and by which message, before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from treaty.cli.logs import Trust
from treaty.errors import ConfigError

console = Console(markup=False)


def disclosures(
    job: Annotated[str, typer.Argument(help="The job's file, or the name of a protocol: secureboost.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of a protocol: an option of it, or of all, as NAME=VALUE; as often as needed."),
    ] = None,
    party: Annotated[
        list[str] | None,
        typer.Option(help="Of a protocol: a party with rows, the active one first; as often as needed."),
    ] = None,
    model: Annotated[
        Literal["trees", "logistic"] | None, typer.Option(help="Which of two protocols of the same name.")
    ] = None,
    align: Annotated[bool, typer.Option("--align", help="Of a protocol: rows are aligned first.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a file.")] = False,
    trust: Trust = None,
) -> None:
    """Print what each party would learn in a job, and the messages that it would learn it from.

    First sentences by party, or role, about all that it learns beyond its own data; then a table of the messages that
    are sent under the job's options: from which role to which, what the receiver learns from it, in which form
    (nothing, encrypted, masked, noisy, aggregated, exact; control: about the job, not about rows), which option lessens
    it, and where that is said. Nothing is trained, and no table is read.
    """
    from treaty.runs import disclosed
    from treaty.runs.job import load_job

    if Path(job).suffix or Path(job).exists():
        if setting or party or model or align:
            raise ConfigError(
                "expected --set, --party, --model and --align with a protocol's name alone: a job has them"
            )
        found = disclosed.of_job(load_job(job))
    else:
        given = dict(map(_named, setting or []))
        found = disclosed.disclosures(job, parties=party, model=model, align={} if align else None, **given)
    if markdown:
        print(found.markdown())
        return
    say_learned(found.learned)
    for what, lines in found.messages.items():
        console.print(f"\nMessages: {what}", highlight=False)
        table = Table("form", "message", "what the receiver learns", box=None, pad_edge=False)
        for line in lines:
            lessened = f" (lessened by {line.leakage.guard})" if line.leakage.guard else ""
            message = f"{line.message.__name__}\n{line.way}"
            table.add_row(line.leakage.form, message, f"{line.leakage.tells}{lessened}\n{line.reference}")
        console.print(table)


def say_learned(learned: Mapping[str, Sequence[str]]) -> None:
    """Print what each party, or role, learns, a sentence a line."""
    console.print("What each party learns:", soft_wrap=True, highlight=False)
    for who, sentences in learned.items():
        for sentence in sentences:
            console.print(f"  {who}: {sentence}", soft_wrap=True, highlight=False)


def _named(setting: str) -> tuple[str, Any]:
    """Split ``name=value``; a value is JSON, or text."""
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"expected --set NAME=VALUE, got {setting!r}")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        words = {"True": True, "False": False}
        return name, words.get(value, value)
