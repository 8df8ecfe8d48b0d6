"""``treaty audit`` and ``treaty audit-gradients``: attack what parties saw; verify the gradients they received."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as Grid

from treaty.cli.logs import Trust, console, say
from treaty.errors import ConfigError

if TYPE_CHECKING:
    from treaty.attacks.auditing import Standing
    from treaty.attacks.views import Finding


def audit(
    records: Annotated[
        list[Path] | None,
        typer.Argument(help="Records of one training: the files kept by parties with `record` in their job file."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Train and attack these systems instead, separated by commas: 'secureboost,secureboost:encryption=ou,"
            "federboost-vertical:epsilon=8,federboost-horizontal'."
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="With --compare: breast (built in), or a CSV or Parquet file.")] = "breast",
    label: Annotated[str | None, typer.Option(help="With --compare: the file's label column.")] = None,
    ids: Annotated[
        str | None,
        typer.Option(
            "--id", help="With --compare: id columns of the file, separated by commas; they are not features."
        ),
    ] = None,
    parties: Annotated[int, typer.Option(min=2, max=10, help="With --compare: number of parties.")] = 3,
    split: Annotated[
        str | None,
        typer.Option(help="With --compare: how columns are split, 'age,income/visits'; instead of --parties."),
    ] = None,
    trees: Annotated[int, typer.Option(min=1, help="With --compare: boosting rounds.")] = 20,
    rows: Annotated[
        int | None, typer.Option(min=60, help="With --compare: use a random sample of this many rows.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the result to this file: SVG, PNG or PDF.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write all findings to this CSV file.")] = None,
    trust: Trust = None,
) -> None:
    """Attack what each party of a training saw, and compare what the attacks find with guessing.

    With records: run every attack that applies to what the parties recorded. A record holds a party's own rows and all
    messages that it sent and received; it never leaves its party automatically. An attack can be scored only if the
    record of the attacked party is given, too. People who rehearse a job have all records.

    With --compare: run the same job under several systems, on your own table, with all parties in this process. The
    result shows the accuracy of each model on held-back rows, its cost, and what attacks find from each party's view.

    An attack "finds" if it beats its guess by more than four standard errors, and by 0.02. If it does not, that is no
    proof: it shows what these attacks find, not what any attack can find.
    """
    if (compare is None) == (not records):
        raise ConfigError("expected either records of a training or --compare SYSTEM,SYSTEM; see treaty audit --help")
    if compare is not None:
        standings = _compared(compare, data, label, ids, parties, split, trees, rows)
        console.print(_grid_of_standings(standings))
        for standing in standings:
            if standing.error:
                say(f"{standing.title}: {standing.error}")
        if figure is not None:
            from treaty.attacks.auditing import draw_standings

            draw_standings(standings, figure)
        _write(table, [(standing.title, finding) for standing in standings for finding in standing.findings])
        return
    from treaty.attacks.auditing import findings_of_records

    found, in_clear, notes = findings_of_records(records or [])
    console.print(_grid_of_findings(found))
    for party, shown in in_clear.items():
        say(f"{party} received in the clear, as stated by its messages: {'; '.join(shown) or 'nothing'}")
    for line in notes:
        say(line)
    if figure is not None:
        from treaty.attacks.auditing import draw_findings

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

    from treaty.attacks.auditing import compare as play
    from treaty.attacks.auditing import entrant
    from treaty.cli.demo_scenarios import cut_columns, load_data, rows_apart

    entrants = [entrant(title.strip()) for title in compare.split(",") if title.strip()]
    columns, y = load_data(data, label, ids)
    if rows is not None and rows < len(y):
        kept = train_test_split(np.arange(len(y)), train_size=rows, stratify=y, random_state=0)[0]
        columns, y = columns.take(kept), y[kept]
    cut = cut_columns(columns.column_names, parties, split)
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


def audit_gradients(
    active: Annotated[Path, typer.Argument(help="Folder of the active party's records (its keep_for_audit).")],
    passive: Annotated[Path, typer.Argument(help="Folder of a passive party's records.")],
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Audit the complete trees in records of a training that was killed.")
    ] = False,
) -> None:
    """Check whether a passive party received the gradients that the labels imply.

    Use it after a training in which both parties had keep_for_audit in their job files. It opens all that the passive
    party recorded with the key and secrets that the active party recorded, and compares it, tree by tree, with what
    follows from the labels. Whoever runs this sees the labels and gradients in the active party's record: run it by an
    auditor whom both parties trust, or together. Records of several trainings are matched by their numbers.
    docs/secureboost.md says what is checked and what is not.

    Exit code: 0 if everything agrees, 1 if something differs, 2 if a record is damaged or missing.
    """
    from treaty.machine.process import cores
    from treaty.runs.progress import steps_bar
    from treaty.systems.vertical.audit_replay import audit as replay

    with steps_bar("auditing trees") as bar:
        verdicts = replay(active, passive, unfinished=unfinished, threads=cores(), progress=bar)
    for found in verdicts:
        what = f"{found.active} -> {found.passive}, job {found.job!r}, model {found.model_id[:8]}"
        for note in found.notes:
            say(f"{what}: {note}")
        for finding in found.findings:
            say(f"{what}: {finding}")
        compared = f"{found.trees} trees compared, {found.vectors} vectors opened"
        same = "all hold the gradients that the labels imply" if found.trees else "nothing could be compared"
        result = f"{len(found.findings)} differences" if found.findings else same
        say(f"{what}: {compared}: {result}")
        signed = f"signed under the certificate {found.signed_by}" if found.signed_by else "nothing was signed"
        say(f"{what}: {signed}")
    if any(found.findings or not found.trees for found in verdicts):
        raise typer.Exit(1)
