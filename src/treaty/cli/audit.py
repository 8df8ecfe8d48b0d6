"""``treaty audit``: what could a party have learned of a training, tried out."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

from treaty.cli.logs import Trust
from treaty.errors import ConfigError

if TYPE_CHECKING:
    from treaty.attacks.comparing import Standing
    from treaty.attacks.views import Finding

console = Console(markup=False)


def audit(
    records: Annotated[
        list[Path] | None,
        typer.Argument(help="Records of one training: the files that parties with record in their job file have kept."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Systems to train and attack instead, with commas between: 'secureboost,secureboost:encryption=ou,"
            "federboost-vertical:epsilon=8,federboost-horizontal'."
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="With --compare: breast (built in), or a CSV or Parquet file.")] = "breast",
    label: Annotated[str | None, typer.Option(help="With --compare: the file's label column.")] = None,
    ids: Annotated[
        str | None,
        typer.Option("--id", help="With --compare: a file's column, or several with commas, that is no feature: ids."),
    ] = None,
    parties: Annotated[int, typer.Option(min=2, max=10, help="With --compare: among how many.")] = 3,
    split: Annotated[
        str | None, typer.Option(help="With --compare: how columns are cut, 'age,income/visits'; not with --parties.")
    ] = None,
    trees: Annotated[int, typer.Option(min=1, help="With --compare: boosting rounds.")] = 20,
    rows: Annotated[int | None, typer.Option(min=60, help="With --compare: of so many rows, drawn by chance.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the result to this file: SVG, PNG or PDF.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write all findings to this CSV file.")] = None,
    trust: Trust = None,
) -> None:
    """Attack what each party of a training saw, and say what it found beside a guess.

    With records: every attack that applies to what their parties recorded. A record holds a party's own rows and all
    that it sent and received; it never leaves its party by itself. An attack is scored where the record of the party
    that is attacked is there too: people who rehearse a job have all of them.

    With --compare: the same job by several systems, on a table of your own, all parties in this process: how good each
    model is on rows held back, what it takes, and what attacks find from each party's view.

    An attack that "finds" is above its guess by more than four standard errors, and by 0.02. One that does not proves
    nothing: it says what these attacks find, not what nobody can.
    """
    if (compare is None) == (not records):
        raise ConfigError("expected either records of a training or --compare SYSTEM,SYSTEM; treaty audit --help")
    if compare is not None:
        standings = _compared(compare, data, label, ids, parties, split, trees, rows)
        console.print(_grid_of_standings(standings))
        for standing in standings:
            if standing.error:
                console.print(f"{standing.title}: {standing.error}", soft_wrap=True, highlight=False)
        if figure is not None:
            from treaty.attacks.comparing import draw_standings

            draw_standings(standings, figure)
        _write(table, [(standing.title, finding) for standing in standings for finding in standing.findings])
        return
    from treaty.attacks.auditing import findings_of_records

    found, unscored = findings_of_records(records or [])
    console.print(_grid_of_findings(found))
    for line in unscored:
        console.print(line, soft_wrap=True, highlight=False)
    if figure is not None:
        from treaty.attacks.comparing import draw_findings

        draw_findings(found, figure)
    _write(table, [("", finding) for finding in found])


def _compared(
    compare: str,
    data: str,
    label: str | None,
    ids: str | None,
    parties: int,
    split: str | None,
    trees: int,
    rows: int | None,
) -> list[Standing]:
    import numpy as np
    from rich.status import Status
    from sklearn.model_selection import train_test_split

    from treaty.attacks.comparing import compare as play
    from treaty.attacks.comparing import entrant
    from treaty.cli.demo_data import cut_columns, load_data, rows_apart

    entrants = [entrant(title.strip()) for title in compare.split(",") if title.strip()]
    columns, y = load_data(data, label, ids)
    if rows is not None and rows < len(y):
        kept = train_test_split(np.arange(len(y)), train_size=rows, stratify=y, random_state=0)[0]
        columns, y = columns.take(kept), y[kept]
    cut = cut_columns(console, columns.column_names, parties, split)
    train, test = train_test_split(np.arange(len(y)), test_size=1 / 3, stratify=y, random_state=0)
    apart = [train[index] for index in rows_apart(columns.take(train), len(cut))]
    with Status("", console=console) as status:
        return play(
            entrants, columns, y, cut, apart, test, trees=trees,
            begin=lambda title: status.update(f"{title}: training, then attacks"),
        )  # fmt: skip


def _grid_of_standings(standings: Sequence[Standing]) -> Grid:
    grid = Grid("system", title="Accuracy, cost, and the attacks that find most", title_justify="left")
    for name in ("AUC", "log-loss", "s", "MB", "messages"):
        grid.add_column(name, justify="right")
    grid.add_column("attack, by whom, on what: score (guess)")
    for standing in standings:
        if standing.error:
            grid.add_row(standing.title, *5 * ["-"], "not played, see below")
            continue
        finding = [one for one in standing.findings if one.finds] or standing.findings[:1]
        said = "\n".join(_in_words(one) for one in finding)
        grid.add_row(
            standing.title, f"{standing.auc:.4f}", f"{standing.log_loss:.4f}", f"{standing.seconds:.1f}",
            f"{standing.megabytes:.2f}", str(standing.messages), said,
        )  # fmt: skip
    return grid


def _in_words(finding: Finding) -> str:
    said = f"{finding.attack}, {finding.party}, {finding.target}: {finding.score:.3f} ({finding.baseline:.3f})"
    return said if finding.finds else f"{said}, {finding.verdict}"


def _grid_of_findings(found: Sequence[Finding]) -> Grid:
    grid = Grid("attack", "by", "on", "measure", title="What attacks found", title_justify="left")
    for name in ("score", "guess"):
        grid.add_column(name, justify="right")
    grid.add_column("verdict")
    for one in found:
        grid.add_row(
            one.attack, one.party, one.target, one.measure, f"{one.score:.3f}", f"{one.baseline:.3f}", one.verdict
        )
    return grid


def _write(path: Path | None, found: Sequence[tuple[str, Finding]]) -> None:
    if path is None:
        return
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(
            ["system", "attack", "party", "target", "measure", "score", "guess", "standard_error", "verdict"]
        )
        for title, one in found:
            lines.writerow(
                [title, one.attack, one.party, one.target, one.measure, one.score, one.baseline, one.error, one.verdict]
            )
