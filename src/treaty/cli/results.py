"""What a job has left: ``treaty show``, ``report``, ``ledger``, ``audit`` and ``audit-gradients``."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from treaty.cli.logs import NODE_FILE, NodeFile, Trust, console, say
from treaty.errors import ConfigError

if TYPE_CHECKING:
    from treaty.attacks.auditing import Standing
    from treaty.attacks.views import Finding


def show(
    path: Annotated[
        Path,
        typer.Argument(help="A part of a model (NAME.part), a report (NAME.report.json), or the id of a node's job."),
    ],
    node: NodeFile = NODE_FILE,
) -> None:
    """Print what a part of a model contains and what its party noted about the training; or a job of the node.

    For a job: its hash, its state at all parties, what each party would learn, and what this node's policy decides.

    For a part: options, versions, date, rows, the party's columns with types and importances, losses by round, times,
    which parties it waited for, and what each party learned. Most of this comes from NAME.report.json in the same
    folder.

    Examples
    --------
    treaty show model/bank.part
    treaty show 3fa9
    """
    from treaty.files import read_json
    from treaty.runs.report import FORMAT, Report, column_types, importances_of, losses_of

    if not path.exists() and re.fullmatch(r"[0-9a-f]{1,64}", str(path)):
        from treaty.cli.node import show_job

        show_job(str(path), node)
        return
    if path.name.endswith(".report.json"):
        _show_report(read_json(path, Report, FORMAT))
        return
    part = _read_part(path)
    forest = getattr(part, "forest", None)
    say(f"part of a model: {part.party}, model {part.model_id[:8]}: {part.summary()}")
    file = path.with_suffix(".report.json")
    report = read_json(file, Report, FORMAT, part.party) if file.exists() else None
    if report is not None and report.model != part.model_id:
        say(f"report: {file.name} is of another model")
        report = None
    if report is None:
        _show_columns(column_types(part.schema), importances_of(part))
        _show_losses(losses_of(part), None if forest is None else forest.best_watched)
    else:
        _show_report(report)


def _read_part(path: Path) -> Any:
    from treaty.files import kind_of
    from treaty.models import checkpoints, linear, statistics, trees

    readers: dict[str, Callable[[Path], Any]] = {
        trees.FORMAT.kind: trees.load_part,
        linear.FORMAT.kind: linear.load_linear_part,
        statistics.FORMAT.kind: statistics.load_statistics_part,
        checkpoints.FORMAT.kind: lambda path: checkpoints.load_checkpoint(path).part,
    }
    kind = kind_of(path)
    if kind not in readers:
        raise ConfigError(f"expected a part of a model or a report, got {kind or 'another kind of file'} - at {path}")
    return readers[kind](path)


def _show_report(report: Any) -> None:
    say(f"training: job {report.job}, {report.party} as {report.role}, ended {report.ended}")
    say(f"versions: {', '.join(f'{name} {number}' for name, number in report.versions.items())}")
    say(f"options: {', '.join(f'{name}={value!r}' for name, value in report.options.items())}")
    if report.encryption:
        say(f"encryption: {report.encryption}{', ' if report.choice else ''}{report.choice}")
    if report.rows is not None:
        say(f"rows: {report.rows}{'' if report.own_rows is None else f' common ones of its {report.own_rows}'}")
    _show_columns(report.columns, report.importances)
    _show_losses(report.losses, report.best_round)
    for group, values in {} if report.held_out is None else report.held_out.groups.items():
        say(f"held-out rows, {group}: {', '.join(f'{name} {value:.6g}' for name, value in values.items())}")
    for what, seconds in (("seconds", report.seconds), ("waited for", report.waited)):
        say(f"{what}: {', '.join(f'{name} {number:.1f} s' for name, number in seconds.items())}")
    for fact in (report.spent, report.unsettled):
        if fact:
            say(f"note: {fact}")
    for party, facts in report.learned.items():
        for fact in facts:
            say(f"{party} learned: {fact}")


def _show_columns(types: dict[str, str], importances: dict[str, dict[str, float]]) -> None:
    """Print the party's columns with their types, the most important ones first."""
    found = list(importances.values())
    names = dict.fromkeys([*types, *(name for of in found for name in of)])
    if not names:
        return
    table = Table("own column", "type", *importances, box=None, pad_edge=False)
    for name in sorted(names, key=lambda name: -abs(found[0].get(name, 0.0)) if found else 0.0):
        table.add_row(name, types.get(name, ""), *(f"{of[name]:.6g}" if name in of else "" for of in found))
    console.print(table)


def _show_losses(losses: dict[str, list[float]], best: int | None) -> None:
    for name, by_round in losses.items():
        say(f"loss of {name}: {' '.join(f'{loss:.5f}' for loss in by_round)}")
    if best is not None:
        say(f"best round: {best}")


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
        Path | None, typer.Option(help="The file to write. Default: NAME.report.html in the folder of the reports.")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="What treaty predict wrote; for scores, ROC and calibration.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="A table with the labels of the same rows.")] = None,
    label: Annotated[str | None, typer.Option(help="The label column of --labels.")] = None,
    pooled: Annotated[
        Path | None,
        typer.Option(help="Folder of a model trained on the pooled table, saved by save(); its curves are added."),
    ] = None,
    trust: Trust = None,
) -> None:
    """Write one HTML file about a finished job. It loads nothing from elsewhere and runs no script.

    The report shows what one party noted: learning curves, importances of its own columns, bytes over time and by pair,
    seconds by phase, what each party learned, what noise has cost, parameters and versions. Where the party lacks
    something, the report says so. Reports of other parties in the same folder add their times and bytes.
    docs/reports.md has examples.

    Examples
    --------
    treaty report model --predictions model/predictions.csv --labels later.csv --label defaulted --output report.html
    """
    from treaty.report.contents import contents_of_run, read_run, read_scores
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
    history = None
    if pooled is not None:
        from treaty.estimators.loading import load

        history = load(pooled, trusted=trust or ()).evals_result_
    write_page(path, contents_of_run(folder, reports, viewer, scores, history))
    say(f"{viewer}: wrote {path}")


class _ShowByDefault(TyperGroup):
    """Takes ``treaty ledger PATH`` as ``treaty ledger show PATH``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if known else ["show", *args])


ledger = typer.Typer(
    cls=_ShowByDefault, no_args_is_help=True,
    help="Print what a party's releases have cost so far, or reset its ledger after a loss.",
)  # fmt: skip


@ledger.command("show")
def show_ledger(
    path: Annotated[Path, typer.Argument(help="The ledger file, or its folder: NAME.noise in the job's store.")],
    delta: Annotated[
        float | None, typer.Option(help="Let an accountant compose the releases at this delta, if that costs less.")
    ] = None,
) -> None:
    """Print what noisy releases about a party's rows have cost so far, per value and per person.

    One line for each job, or model, and mechanism; the last line is the total. `treaty ledger PATH` does the same.

    Examples
    --------
    treaty ledger show store/bank.noise --delta 1e-6
    """
    from treaty.privacy.ledger import cost, read_ledger, summary

    entries = read_ledger(path)
    groups = dict.fromkeys((entry.job, entry.mechanism) for entry in entries)
    for job, mechanism in groups:
        own = [entry for entry in entries if (entry.job, entry.mechanism) == (job, mechanism)]
        say(f"{job}, {mechanism}, {summary(own)}: {cost(own, delta)}")
    say(f"all: {cost(entries, delta)}")


@ledger.command("reset")
def reset_ledger(
    path: Annotated[
        Path,
        typer.Argument(help="The ledger: NAME.noise, NAME.hints, NAME.sides, NAME.queries, or a run log (NAME.runs)."),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Set aside a ledger that is lost or damaged, so that the next job starts a new one.

    The old files are moved, not deleted. If you have a copy, restore it instead: a new ledger forgets what was spent.
    NAME.noise counts what noisy releases have cost people, and holds the key of the noise: after a reset, the same
    releases may cost people up to epsilon_total once more. NAME.hints counts what answers under the lattice map have
    leaked. NAME.queries counts rows that users had predicted by a hidden model. A run log (NAME.runs) counts
    alignments.

    Examples
    --------
    treaty ledger reset store/bank.noise
    """
    from treaty.machine.database import set_aside

    if not yes:
        typer.confirm(f"Forget what {path} has counted, so that all of it can be spent once more?", abort=True)
    for moved in set_aside(path):
        say(f"moved to {moved}")


def audit(
    records: Annotated[
        list[Path] | None,
        typer.Argument(help="Records of one training: the files kept by parties with `record` in their job file."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Instead, train and attack these systems, separated by commas: 'secureboost,secureboost:encryption=ou,"
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
    megabytes: Annotated[
        float, typer.Option(min=1, help="With --compare: most memory that what parties see of a training may take.")
    ] = 2000.0,
    figure: Annotated[Path | None, typer.Option(help="Draw the result to this file: SVG, PNG or PDF.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write all findings to this CSV file.")] = None,
    trust: Trust = None,
) -> None:
    """Attack what each party of a training saw, and compare the results with guessing.

    With records: run every attack that applies to what the parties recorded. A record holds a party's own rows and the
    messages that attacks read; it never leaves its party automatically. Records are read into memory. An attack can be
    scored only if the record of the attacked party is given, too. In a rehearsal, one person has all records.

    With --compare: train several systems on your own table, with all parties in this process. The result shows the
    accuracy of each model on held-back rows, its cost, and what attacks find from each party's view.

    An attack "finds" something if it beats guessing by more than four standard errors, and by 0.02. Otherwise these
    attacks found nothing; another attack might.

    Examples
    --------
    treaty audit seen/bank.record seen/shop.record --table findings.csv
    treaty audit --compare secureboost,federboost-vertical:epsilon=8 --data credit.csv --label default
    """
    if (compare is None) == (not records):
        raise ConfigError("expected either records of a training or --compare SYSTEM,SYSTEM; see treaty audit --help")
    from treaty.attacks.auditing import draw_findings, draw_standings, findings_of_records

    if compare is not None:
        standings = _compared(compare, (data, label, ids), parties, split, trees, rows, megabytes)
        console.print(_grid_of_standings(standings))
        for standing in standings:
            if standing.error:
                say(f"{standing.title}: {standing.error}")
        if figure is not None:
            draw_standings(standings, figure)
        _write_findings(table, [(standing.title, finding) for standing in standings for finding in standing.findings])
        return
    found, in_clear, notes = findings_of_records(records or [])
    console.print(_grid_of_findings(found) if found else "No attack has anything to read in these records.")
    for party, shown in in_clear.items():
        say(f"{party} received in the clear, as stated by its messages: {'; '.join(shown) or 'nothing'}")
    for line in notes:
        say(line)
    if figure is not None:
        draw_findings(found, figure)
    _write_findings(table, [("", finding) for finding in found])


def _compared(
    compare: str, source: Sequence[Any], parties: int, split: str | None, trees: int, rows: int | None, megabytes: float
) -> list[Standing]:
    import numpy as np
    from rich.status import Status
    from sklearn.model_selection import train_test_split

    from treaty.attacks.auditing import compare as play
    from treaty.attacks.auditing import entrant
    from treaty.cli.demo_scenarios import cut_columns, load_data, rows_apart

    entrants = [entrant(title.strip()) for title in compare.split(",") if title.strip()]
    columns, y = load_data(*source)
    if rows is not None and rows < len(y):
        kept = train_test_split(np.arange(len(y)), train_size=rows, stratify=y, random_state=0)[0]
        columns, y = columns.take(kept), y[kept]
    cut = cut_columns(columns.column_names, parties, split)
    train, test = train_test_split(np.arange(len(y)), test_size=1 / 3, stratify=y, random_state=0)
    apart = [train[index] for index in rows_apart(columns.take(train), len(cut))]
    with Status("", console=console) as status:
        return play(
            entrants, columns, y, cut, apart, test, trees=trees, megabytes=megabytes,
            begin=lambda title: status.update(f"{title}: training, then attacks"),
        )  # fmt: skip


def _grid_of_standings(standings: Sequence[Standing]) -> Table:
    grid = Table("system", title="Accuracy, cost, and the attacks that find most", title_justify="left")
    for name in ("AUC", "log-loss", "s", "MB", "messages"):
        grid.add_column(name, justify="right")
    grid.add_column("attack, by whom, on what: score (guess)")
    for standing in standings:
        if standing.error:
            grid.add_row(standing.title, *5 * ["-"], "not run, see below")
            continue
        lines = [
            f"{one.attack}, {one.party}, {one.target}: {one.score:.3f} ({one.baseline:.3f})"
            + ("" if one.finds else f", {one.verdict}")
            for one in [one for one in standing.findings if one.finds] or standing.findings[:1]
        ]
        grid.add_row(
            standing.title, f"{standing.auc:.4f}", f"{standing.log_loss:.4f}", f"{standing.seconds:.1f}",
            f"{standing.megabytes:.2f}", str(standing.messages), "\n".join(lines),
        )  # fmt: skip
    return grid


def _grid_of_findings(found: Sequence[Finding]) -> Table:
    grid = Table("attack", "by", "on", "measure", title="What attacks found", title_justify="left")
    for name in ("score", "guess"):
        grid.add_column(name, justify="right")
    grid.add_column("verdict")
    for one in found:
        grid.add_row(
            one.attack, one.party, one.target, one.measure, f"{one.score:.3f}", f"{one.baseline:.3f}", one.verdict
        )
    return grid


def _write_findings(path: Path | None, found: Sequence[tuple[str, Finding]]) -> None:
    if path is None:
        return
    columns = ["attack", "party", "target", "measure", "score", "baseline", "error", "verdict"]
    headings = {"baseline": "guess", "error": "standard_error"}
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["system", *(headings.get(column, column) for column in columns)])
        lines.writerows([title, *(getattr(one, column) for column in columns)] for title, one in found)


def audit_gradients(
    active: Annotated[Path, typer.Argument(help="Folder of the active party's records (its keep_for_audit).")],
    passive: Annotated[Path, typer.Argument(help="Folder of a passive party's records.")],
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Audit the complete trees in records of a training that was killed.")
    ] = False,
) -> None:
    """Check whether a passive party received the gradients that the labels imply.

    Use it after a training in which both parties had keep_for_audit in their job files. It decrypts what the passive
    party recorded, with the key and secrets that the active party recorded, and compares it, tree by tree, with what
    follows from the labels. Anyone who runs this sees the labels and gradients in the active party's record: leave it
    to an auditor whom both parties trust, or run it together. Records of several trainings are matched by their
    numbers. docs/secureboost.md says what is checked and what is not.

    Exit code: 0 if everything agrees, 1 if something differs, 2 if a record is damaged or missing.

    Examples
    --------
    treaty audit-gradients bank/kept shop/kept
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
