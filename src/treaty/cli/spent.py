"""``treaty ledger`` and ``treaty begin-anew``: what a party has to remember of its releases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treaty.machine.database import set_aside
from treaty.privacy.ledger import cost, read_ledger, summary

console = Console(markup=False)


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


def begin_anew(
    path: Annotated[
        Path,
        typer.Argument(help="What is lost or damaged: NAME.noise, NAME.hints, NAME.sides, NAME.queries, or a run log."),
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
