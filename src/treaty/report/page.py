"""A report as one HTML file: it loads nothing and runs no script; each empty section says why it is empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treaty.errors import ConfigError
from treaty.files import write_whole
from treaty.report import figures
from treaty.report.contents import Contents, Section

if TYPE_CHECKING:
    from jinja2 import Environment

_TITLES: dict[Section, str] = {
    "scores": "Scores", "curves": "Learning curves", "roc": "ROC", "calibration": "Calibration",
    "importances": "Importances by party", "shap": "What columns add (SHAP)", "seconds": "Seconds by phase",
    "timeline": "Messages over time", "messages": "Bytes by pair", "learned": "Who learns what",
    "noise": "Cost of noise (epsilon)", "parameters": "Parameters", "versions": "Versions",
}  # fmt: skip
_HALF = ("curves", "roc", "calibration", "importances", "shap", "seconds", "timeline", "messages")
"""Sections of half the page's width, where there is room for two."""
_MOST_ROWS = 30


@cache
def templates(*packages: str) -> Environment:
    """Return the HTML templates of packages, with autoescape on, and of this one, which has the common style."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader

    loaders = [PackageLoader(package) for package in (*packages, "treaty.report")]
    return Environment(
        loader=ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )


def check_possible(path: str | Path) -> None:
    """Raise ConfigError, before anything is computed, if a report cannot be drawn or written to `path`."""
    figures.check_drawable()
    if Path(path).is_dir():
        raise ConfigError(f"expected the name of a file to write, such as report.html, got a folder - at {path}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}; make it first")


def write_page(path: str | Path, contents: Contents) -> None:
    """Write a report to a file that only its owner can read, all at once.

    Raises
    ------
    ConfigError
        If it cannot be written, or a package of the extra ``report`` is not installed.
    """
    figures.check_drawable()
    write_whole(path, [page(contents).encode()])


def page(of: Contents) -> str:
    """Return a report as HTML."""
    return templates().get_template("report.html").render(
        of=of, titles=_TITLES, half=_HALF, figures=dict(_figures(of)), now=f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
        rows={"scores": _score_rows(of), "messages": _message_rows(of.sent), "seconds": _second_rows(of.seconds)},
    )  # fmt: skip


def _figures(of: Contents) -> Iterator[tuple[Section, list[str]]]:
    """Yield the figures of each section that has any."""
    if of.curves:
        yield "curves", figures.curves(of.curves, of.unit, of.best)
    if of.scores is not None and of.scores.roc:
        yield "roc", [figures.roc(of.scores.roc)]
    if of.scores is not None and of.scores.calibration:
        yield "calibration", [figures.calibration(of.scores.calibration, of_numbers=of.scores.of_numbers)]
    if any(amount for columns in of.importances.values() for amount in columns.values()):
        yield "importances", [figures.importances(of.importances)]
    if of.shap:
        yield "shap", [figures.shap(of.shap, of.shap_of)]
    if of.seconds:
        yield "seconds", [figures.seconds(dict(list(of.seconds.items())[:_MOST_ROWS]))]
    if of.timeline is not None:
        yield "timeline", [figures.timeline(of.timeline)]


def _score_rows(of: Contents) -> list[list[str]]:
    """Return a row for each metric, with a column for each model."""
    models = [] if of.scores is None else list(of.scores.values.values())
    metrics = dict.fromkeys(metric for values in models for metric in values)
    return [[metric, *(f"{each[metric]:.4f}" if metric in each else "" for each in models)] for metric in metrics]


def _message_rows(sent: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each pair of parties, the largest first, then one for the rest and one for all."""
    if not sent:
        return []
    pairs = sorted(sent.items(), key=lambda pair: -pair[1]["bytes"])
    rows = [[figures.arrow(pair), *_amounts([totals])] for pair, totals in pairs[:_MOST_ROWS]]
    if rest := [totals for _, totals in pairs[_MOST_ROWS:]]:
        rows.append([f"{len(rest)} other pairs", *_amounts(rest)])
    return [*rows, ["all pairs", *_amounts([totals for _, totals in pairs])]]


def _amounts(totals: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return megabytes, the number of messages if all are known, and the message type with the most bytes."""
    types: dict[str, int] = {}
    for each in totals:
        for name, nbytes in each.get("by_type", {}).items():
            types[name] = types.get(name, 0) + nbytes
    counted = all("messages" in each for each in totals)
    messages = f"{sum(each['messages'] for each in totals):,}" if counted else "not noted"
    size = f"{sum(each['bytes'] for each in totals) / 1e6:,.3f}"
    return [size, messages, max(types, key=lambda name: types[name]) if types else ""]


def _second_rows(seconds: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return the headings, then a row for each phase, or, of more than three parties, for each party."""
    if not seconds:
        return []
    phases = dict.fromkeys(phase for by_phase in seconds.values() for phase in by_phase)

    def cell(party: str, phase: str) -> str:
        return f"{seconds[party][phase]:.2f}" if phase in seconds[party] else ""

    if len(seconds) > 3:
        return [["", *phases], *([party, *(cell(party, phase) for phase in phases)] for party in seconds)]
    names = [party or "seconds" for party in seconds]
    return [["", *names], *([phase, *(cell(party, phase) for party in seconds)] for phase in phases)]
