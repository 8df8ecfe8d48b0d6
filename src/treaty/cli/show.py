"""``treaty show``: what a part of a model has, and what its party noted about the training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from treaty.cli.node import show_job
from treaty.errors import ConfigError
from treaty.files import kind_of, read_json
from treaty.models.checkpoints import FORMAT as CHECKPOINT
from treaty.models.checkpoints import load_checkpoint
from treaty.models.linear import FORMAT as LINEAR
from treaty.models.linear import load_linear_part
from treaty.models.trees import FORMAT as TREES
from treaty.models.trees import load_part
from treaty.runs.report import FORMAT as REPORT
from treaty.runs.report import Report, column_types, importances_of, losses_of

console = Console(markup=False)


def show(
    path: Annotated[
        Path,
        typer.Argument(help="A part of a model, NAME.part, a report, NAME.report.json, or the id of a node's job."),
    ],
    node: Annotated[Path, typer.Option("--node", envvar="TREATY_NODE", help="The node's settings, for a job.")] = Path(
        "node.toml"
    ),
) -> None:
    """Print what a part of a model has, and what its party noted about the training; or a job of the node.

    Of a job: its hash, how it stands at all parties, what each would learn, and what this node's policy says.

    Options, versions, date, rows, types of own columns, losses by round, importances of own columns, times, who was
    waited for, and what each party learned. The last ones come from NAME.report.json beside the part.
    """
    if not path.exists() and re.fullmatch(r"[0-9a-f]{1,64}", str(path)):
        show_job(str(path), node)
        return
    if path.name.endswith(".report.json"):
        _show_report(read_json(path, Report, REPORT))
        return
    part = _read(path)
    forest = getattr(part, "forest", None)
    _line("part of a model", f"{part.party}, model {part.model_id[:8]}: {part.summary()}")
    beside = path.with_suffix(".report.json")
    report = read_json(beside, Report, REPORT, part.party) if beside.exists() else None
    if report is not None and report.model != part.model_id:
        _line("report", f"{beside.name} is of another model")
        report = None
    if report is None:
        _show_columns(column_types(part.schema), importances_of(part))
        _show_losses(losses_of(part), None if forest is None else forest.best_round)
    else:
        _show_report(report)


def _read(path: Path) -> Any:
    readers = {TREES.kind: load_part, LINEAR.kind: load_linear_part, CHECKPOINT.kind: _of_checkpoint}
    kind = kind_of(path)
    if kind not in readers:
        raise ConfigError(f"expected a part of a model, or a report, got {kind or 'something else'} - at {path}")
    return readers[kind](path)


def _of_checkpoint(path: Path) -> Any:
    return load_checkpoint(path).part


def _show_report(report: Report) -> None:
    _line("training", f"job {report.job}, {report.party} as {report.role}, ended {report.ended}")
    _line("versions", ", ".join(f"{name} {number}" for name, number in report.versions.items()))
    _line("options", ", ".join(f"{name}={value!r}" for name, value in report.options.items()))
    if report.encryption:
        _line("encryption", f"{report.encryption}{', ' if report.choice else ''}{report.choice}")
    if report.rows is not None:
        _line("rows", f"{report.rows}{'' if report.own_rows is None else f' common ones of its {report.own_rows}'}")
    _show_columns(report.columns, report.importances)
    _show_losses(report.losses, report.best_round)
    _line("seconds", _seconds(report.seconds))
    _line("waited for", _seconds(report.waited))
    for fact in (report.spent, report.unsettled):
        if fact:
            _line("note", fact)
    for party, facts in report.learned.items():
        for fact in facts:
            _line(f"{party} learned", fact)


def _show_columns(types: dict[str, str], importances: dict[str, dict[str, float]]) -> None:
    """Print own columns with their types, the most important ones first."""
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
        _line(f"loss of {name}", " ".join(f"{loss:.5f}" for loss in by_round))
    if best is not None:
        _line("best round", str(best))


def _seconds(of: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in of.items())


def _line(what: str, said: str) -> None:
    console.print(f"{what}: {said}", soft_wrap=True, highlight=False)
