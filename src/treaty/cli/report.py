"""``treaty report``: a finished job as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from treaty.cli.logs import Trust
from treaty.errors import ConfigError

console = Console(markup=False)


def report(
    run: Annotated[
        Path,
        typer.Argument(help="Output folder of a finished job, a report in it (NAME.report.json), or the job file."),
    ],
    party: Annotated[
        str | None,
        typer.Option("--as", help="Whose view. Default: the only party there, else the one with the labels."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The file to write. Default: NAME.report.html beside the party's report.")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="What treaty predict wrote, for scores, ROC and calibration.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="A table with the labels of the same rows.")] = None,
    label: Annotated[str | None, typer.Option(help="Which column of --labels is the label.")] = None,
    pooled: Annotated[
        Path | None,
        typer.Option(help="Folder of a model that save() wrote, trained on one table: its curves stand beside."),
    ] = None,
    trust: Trust = None,
) -> None:
    """Write one HTML file about a finished job, for any browser: it loads nothing and runs no script.

    It shows what one party has noted: learning curves, importances of its columns (other parties' stay hidden), bytes
    over time and by pair, seconds by phase, who learned what, what noise has cost, parameters and versions. What the
    party does not have is said. Reports of other parties in the same folder add their times and bytes. docs/reports.md.
    """
    from treaty.report.of_run import contents_of_run, read_run, read_scores
    from treaty.report.page import check_possible, write_page

    folder, reports, viewer = read_run(run, party)
    path = output or folder / f"{viewer}.report.html"
    check_possible(path)
    given = [option is not None for option in (predictions, labels, label)]
    if any(given) and not all(given):
        raise ConfigError("--predictions, --labels and --label go together: give all three, or none")
    scores = None
    if predictions is not None and labels is not None and label is not None:
        scores = read_scores(predictions, labels, label)
    history = None if pooled is None else _history(pooled, trust)
    write_page(path, contents_of_run(folder, reports, viewer, scores, history))
    console.print(f"{viewer}: wrote {path}", soft_wrap=True, highlight=False)


def _history(folder: Path, trusted: list[str] | None) -> Any:
    """Return the losses by eval set and metric of a saved model on one table."""
    from treaty.estimators.trees import load

    return load(folder, trusted=trusted or ()).evals_result_
