"""The report as one HTML file: nothing is loaded, no script runs, and what the run lacks is said in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from treaty.errors import ConfigError
from treaty.files import write_whole
from treaty.report import figures
from treaty.report.contents import STYLE, Contents, Html, ModelScores, Section, tag

_STYLE = """
:root{--s0:#1c5fb0;--s1:#c2571a;--s2:#17805a;--s3:#8a4fb5;--s4:#937000;--s5:#b03060;--s6:#7d8796}
@media screen and (prefers-color-scheme:dark){:root{--s0:#82b4f5;--s1:#f0a06a;--s2:#6fcf97;--s3:#c9a0f0;--s4:#e0c35a;
--s5:#f08ab0;--s6:#8e99a8}}
nav{display:flex;flex-wrap:wrap;gap:.1rem .9rem;margin:.8rem 0;font-size:.875rem}
section{scroll-margin-top:1rem;min-width:0}
@media screen and (min-width:52rem){main{display:grid;grid-template-columns:1fr 1fr;gap:0 1.2rem}
section,main>article{grid-column:span 2}section.half{grid-column:span 1}}
figure+figure{margin-top:.8rem}
figure{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem;margin:0}
svg{display:block;width:100%;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.4rem .8rem;
margin:0 0 .8rem}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem 0 .3rem .9rem;border-top:1px solid var(--line);vertical-align:top;
overflow-wrap:break-word}
th:first-child{padding-left:0;min-width:6rem;max-width:20rem}
thead th{border:0;color:var(--dim);font-weight:600}
th{font-weight:500}
.number{text-align:right}
td.number{white-space:nowrap}
td:last-child:not(.number){overflow-wrap:anywhere;min-width:4.5rem}
figure+.wide{margin-top:.8rem}
dl{columns:20rem;column-gap:2.4rem;margin:0;font-size:.9rem}
dl div{display:flex;gap:1rem;justify-content:space-between;break-inside:avoid}
dt{color:var(--dim)}
dd{margin:0;text-align:right}
@media screen and (max-width:30rem){table{font-size:.82rem}th,td{padding-left:.5rem}th:first-child{min-width:5rem}
td:last-child:not(.number){min-width:3rem}}
@media print{body{max-width:none;padding:0;background:none;font-size:10pt}nav{display:none}
figure,article,tr,section.half{break-inside:avoid}h2{break-after:avoid;margin-top:1rem}
section.half{display:inline-block;width:49%;margin-right:.5%;vertical-align:top}
figure,.wide,article{border-color:#bbb;background:none}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Were something loaded after all, the browser would refuse it."""

_TITLES: dict[Section, str] = {
    "scores": "Scores", "curves": "Learning curves", "roc": "ROC", "calibration": "Calibration",
    "importances": "Importances by party", "shap": "What columns add (SHAP)", "seconds": "Seconds by phase",
    "timeline": "Messages over time", "messages": "Bytes by pair", "learned": "Who learns what",
    "noise": "Cost of noise (epsilon)", "parameters": "Parameters", "versions": "Versions",
}  # fmt: skip
_HALF = ("curves", "roc", "calibration", "importances", "shap", "seconds", "timeline", "messages")
"""Sections of which two stand side by side where there is room."""
_MOST_ROWS = 30


def check_possible(path: str | Path) -> None:
    """Raise ConfigError, before anything is computed, if a report cannot be drawn, or not be written there."""
    figures.check_drawable()
    if Path(path).is_dir():
        raise ConfigError(f"expected the name of a file to write, such as report.html, got a folder - at {path}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}; make it first")


def write_page(path: str | Path, contents: Contents) -> None:
    """Write a report to a file, readable by its owner alone; an older file is replaced only by a whole new one.

    Raises
    ------
    ConfigError
        If it cannot be written, or matplotlib is not installed.
    """
    figures.check_drawable()
    write_whole(path, [page(contents).encode()])


def page(of: Contents) -> str:
    """Return a report as HTML."""
    shown = {section: _section(section, of) for section in _TITLES}
    links = [tag("a", _TITLES[section], href=f"#{section}") for section in shown]
    head = tag(
        "header",
        tag("h1", of.title),
        tag("p", " · ".join(of.facts), look="dim"),
        tag("p", of.whose, look="dim"),
        tag("nav", *links, **{"aria-label": "Sections"}),
    )
    notes = [tag("article", *(tag("p", note) for note in of.notes))] if of.notes else []
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    foot = tag("footer", f"Made by Treaty {of.versions.get('treaty-learn', '')} on {now}. This file loads nothing.")
    meta = Html(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><meta name="referrer" content="no-referrer">'
    )
    style = Html(f"<style>{STYLE}{_STYLE}</style>")
    body = tag("body", head, tag("main", *notes, *shown.values()), foot)
    return f"<!doctype html>{tag('html', tag('head', meta, tag('title', of.title), style), body, lang='en')}\n"


def _section(section: Section, of: Contents) -> Html:
    inside = list(_SHOWN[section](of))
    reason = of.absent.get(section, "")
    if not inside or reason:
        inside.append(tag("p", reason or "The run has none.", look="none"))
    look = "half" if section in _HALF else None
    return tag("section", tag("h2", _TITLES[section]), *inside, id=section, look=look)


def _scores(of: Contents) -> Iterator[Html]:
    if of.scores is not None:
        models = of.scores.values
        metrics = dict.fromkeys(metric for values in models.values() for metric in values)
        rows = [
            [metric, *(f"{values[metric]:.4f}" if metric in values else "" for values in models.values())]
            for metric in metrics
        ]
        yield _table([of.scores.of, *models], rows)


def _curves(of: Contents) -> Iterator[Html]:
    if of.curves:
        yield from figures.curves(of.curves, of.unit, of.best)


def _roc(of: Contents) -> Iterator[Html]:
    if of.scores is not None and of.scores.roc:
        yield figures.roc(of.scores.roc)


def _calibration(of: Contents) -> Iterator[Html]:
    if of.scores is not None and of.scores.calibration:
        scores: ModelScores = of.scores
        yield figures.calibration(scores.calibration, of_numbers=scores.of_numbers)


def _importances(of: Contents) -> Iterator[Html]:
    if any(amount for columns in of.importances.values() for amount in columns.values()):
        yield tag("p", of.importance_kind)
        yield figures.importances(of.importances)


def _shap(of: Contents) -> Iterator[Html]:
    if of.shap:
        yield tag(
            "p",
            "Exact TreeSHAP: boxes hold the middle half of the rows, whiskers nine tenths. No single row is shown.",
        )
        yield figures.shap(of.shap, of.shap_of)


def _messages(of: Contents) -> Iterator[Html]:
    if of.sent:
        pairs = sorted(of.sent.items(), key=lambda pair: -pair[1]["bytes"])
        rows = [[figures.arrow(pair), *_amounts([totals])] for pair, totals in pairs[:_MOST_ROWS]]
        if pairs[_MOST_ROWS:]:
            rest = [totals for _, totals in pairs[_MOST_ROWS:]]
            rows.append([f"{len(rest)} other pairs", *_amounts(rest)])
        rows.append(["all pairs", *_amounts([totals for _, totals in pairs])])
        yield _table(["from → to", "MB", "messages", "mostly"], rows, numbers=2)


def _amounts(totals: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return megabytes, messages where all are known, and the message type with the most bytes."""
    types: dict[str, int] = {}
    for each in totals:
        for name, nbytes in each.get("by_type", {}).items():
            types[name] = types.get(name, 0) + nbytes
    counted = all("messages" in each for each in totals)
    messages = f"{sum(each['messages'] for each in totals):,}" if counted else "not noted"
    size = f"{sum(each['bytes'] for each in totals) / 1e6:,.3f}"
    return [size, messages, max(types, key=lambda name: types[name]) if types else ""]


def _timeline(of: Contents) -> Iterator[Html]:
    if of.timeline is not None:
        yield figures.timeline(of.timeline)


def _seconds(of: Contents) -> Iterator[Html]:
    if of.seconds:
        yield figures.seconds(dict(list(of.seconds.items())[:_MOST_ROWS]))
        phases = dict.fromkeys(phase for by_phase in of.seconds.values() for phase in by_phase)
        if len(of.seconds) <= 3:
            rows = [[phase, *(_second(own, phase) for own in of.seconds.values())] for phase in phases]
            yield _table(["", *(party or "seconds" for party in of.seconds)], rows)
        else:
            rows = [[party, *(_second(own, phase) for phase in phases)] for party, own in of.seconds.items()]
            yield _table(["", *phases], rows)


def _second(own: Mapping[str, float], phase: str) -> str:
    return f"{own[phase]:.2f}" if phase in own else ""


def _learned(of: Contents) -> Iterator[Html]:
    for party, facts in of.learned.items():
        said = [tag("li", fact) for fact in facts] or [tag("li", "nothing beyond its own data")]
        yield tag("article", tag("h3", party), tag("ul", *said))


def _noise(of: Contents) -> Iterator[Html]:
    for sentence in of.noise:
        yield tag("p", sentence)


def _named(of: Mapping[str, Any]) -> Iterator[Html]:
    if of:
        each = [tag("div", tag("dt", name), tag("dd", str(value))) for name, value in of.items()]
        yield tag("article", tag("dl", *each))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int | None = None) -> Html:
    """Return a table whose first column names the row; `numbers` columns after it, or all, are set as numbers."""
    ends = len(headings) if numbers is None else numbers + 1
    looks = ["number" if 0 < at < ends else None for at in range(len(headings))]
    head = tag("tr", *(tag("th", text, look=look, scope="col") for text, look in zip(headings, looks, strict=True)))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", text, look=look) for text, look in zip(row[1:], looks[1:], strict=True)),
        )
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), look="wide")


_SHOWN: dict[Section, Callable[[Contents], Iterator[Html]]] = {
    "scores": _scores, "curves": _curves, "roc": _roc, "calibration": _calibration, "importances": _importances,
    "shap": _shap, "messages": _messages, "timeline": _timeline, "seconds": _seconds, "learned": _learned,
    "noise": _noise, "parameters": lambda of: _named(of.parameters), "versions": lambda of: _named(of.versions),
}  # fmt: skip
