"""``treaty forget``: what ended jobs have left on this node is removed."""

from __future__ import annotations

import getpass
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treaty.cli.node import DEFAULT, NodeFile
from treaty.errors import ConfigError
from treaty.node import forgetting
from treaty.node.settings import load_settings
from treaty.node.store import FINAL, JobRow, Store

console = Console(markup=False)


def forget(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="The first letters of a job's id.")] = None,
    older: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0.0, help="All jobs that ended longer than so many days ago.")
    ] = None,
    node: NodeFile = DEFAULT,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what an ended job has left on this node: its model and report, checkpoints, rows of queries, and log.

    Of a prediction: its file of predictions. Ledgers and the audit log stay, and the latter says what was removed and
    by whom. Nothing is removed at other parties. A model that a prediction or service needs which has not ended is
    kept; one that is forgotten cannot be predicted with any more.
    """
    if (job is None) == (older is None):
        raise ConfigError(f"expected JOB or --older DAYS, got {'neither' if job is None else 'both'}")
    settings = load_settings(node)
    with Store(Path(settings.folder), create=False) as store:
        before = time.time() - 86400.0 * (older or 0.0)
        rows = [store.job(job)] if job is not None else [row for row in store.jobs(FINAL) if row.changed < before]
        going: dict[JobRow, list[Path]] = {}
        for row in rows:
            why, left = forgetting.kept_for(store, row), forgetting.left_of(settings, store, row)
            if why and job is not None:
                raise ConfigError(why)
            if why:
                _say(f"kept: {why}")
            elif left:
                going[row] = left
        if not going:
            _say("nothing is left to remove")
            return
        for path in [path for left in going.values() for path in left]:
            _say(f"  {path}")
        if not yes:
            typer.confirm("Remove all this for good?", abort=True)
        for row in going:
            removed = forgetting.forget(settings, store, row, getpass.getuser())
            _say(f"job {row.id[:12]} is forgotten: {len(removed)} files or folders removed")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
