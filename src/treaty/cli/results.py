"""What a job has left: ``treaty show``, ``treaty report`` and ``treaty ledger``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from treaty.cli.logs import NODE_FILE, NodeFile, Trust, console, say
from treaty.errors import ConfigError


def show(
    path: Annotated[
        Path,
        typer.Argument(help="A part of a model (NAME.part), a report (NAME.report.json), or the id of a node's job."),
    ],
    node: NodeFile = NODE_FILE,
) -> None:
    """Print what a part of a model contains and what its party noted about the training; or a job of the node.

    Of a job: its hash, its state at all parties, what each party would learn, and what this node's policy decides.

    Of a part: options, versions, date, rows, types of the party's columns, losses by round, importances of the party's
    columns, times, which parties it waited for, and what each party learned. Most of this comes from NAME.report.json
    in the same folder.
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
    beside = path.with_suffix(".report.json")
    report = read_json(beside, Report, FORMAT, part.party) if beside.exists() else None
    if report is not None and report.model != part.model_id:
        say(f"report: {beside.name} is of another model")
        report = None
    if report is None:
        _show_columns(column_types(part.schema), importances_of(part))
        _show_losses(losses_of(part), None if forest is None else forest.best_round)
    else:
        _show_report(report)


def _read_part(path: Path) -> Any:
    from treaty.files import kind_of
    from treaty.models import checkpoints, linear, trees

    readers: dict[str, Callable[[Path], Any]] = {
        trees.FORMAT.kind: trees.load_part,
        linear.FORMAT.kind: linear.load_linear_part,
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
    history = None
    if pooled is not None:
        from treaty.estimators.trees import load

        history = load(pooled, trusted=trust or ()).evals_result_
    write_page(path, contents_of_run(folder, reports, viewer, scores, history))
    say(f"{viewer}: wrote {path}")


class _ShowByDefault(TyperGroup):
    """Reads ``treaty ledger PATH`` as ``treaty ledger show PATH``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if known else ["show", *args])


ledger = typer.Typer(
    cls=_ShowByDefault, no_args_is_help=True,
    help="What a party must remember of its releases: print what they have cost so far, or reset it after a loss.",
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
        typer.Argument(help="What is lost or damaged: NAME.noise, NAME.hints, NAME.sides, NAME.queries, or a run log."),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Set aside a ledger that is lost or damaged, so that the next job starts a new one.

    The old files are moved, not deleted. Restore a copy instead if there is one: a new ledger forgets what was spent.
    NAME.noise counts what noisy releases have cost people and holds the key of the noise: after a reset, people may pay
    up to epsilon_total once more for what is released again. NAME.hints counts what answers under the lattice map have
    leaked. NAME.queries counts rows that users had predicted by a hidden model. A run log (NAME.runs)
    counts alignments.
    """
    from treaty.machine.database import set_aside

    if not yes:
        typer.confirm(f"Forget what {path} has counted, so that all of it may be spent once more?", abort=True)
    for moved in set_aside(path):
        say(f"moved to {moved}")
