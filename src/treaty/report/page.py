"""A report as one HTML file: it loads nothing and runs no script; a list says which sections are empty, and why.

Figures are inline SVG. matplotlib draws them in placeholder colours, which are then replaced by the page's CSS
variables (`_COLOURS`): one figure serves light, dark and print. Names come from other organisations; matplotlib escapes
them, and math is off.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treaty.errors import ConfigError
from treaty.files import write_whole
from treaty.messaging.transcript import Timeline
from treaty.report.contents import Contents, Curve, Points, Section, Spread
from treaty.report.verdict import figures, verdict

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.axes import Axes


_TITLES: dict[Section, str] = {
    "scores": "Scores", "curves": "Learning curves", "roc": "ROC", "calibration": "Calibration",
    "importances": "Importances by party", "shap": "What columns add (SHAP)", "seconds": "Seconds by phase",
    "timeline": "Messages over time", "messages": "Bytes by pair", "learned": "Who learns what",
    "noise": "Cost of noise (epsilon)", "parameters": "Parameters", "versions": "Versions",
    "alone": "Comparison with own data only",
}  # fmt: skip
# sections of half the page's width, if there is room for two
_HALF = ("curves", "roc", "calibration", "importances", "shap", "seconds", "timeline", "messages")
_MOST_ROWS = 12


_INK, _DIM, _LINE = "#0a0b01", "#0a0b02", "#0a0b03"
# the last one is for all other series, added up
_SERIES = [f"#0a0c0{k}" for k in range(7)]
_COLOURS = {_INK: "--ink", _DIM: "--dim", _LINE: "--line"} | {of: f"--s{k}" for k, of in enumerate(_SERIES)}
# inches: at the width of a phone, the text has the size of small print
_WIDTH, _HEIGHT = 4.2, 3.0
_MOST_BARS, _MOST_PAIRS, _MOST_LINES = 15, 6, 6
_STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "text.usetex": False, "font.family": "sans-serif",
    "font.size": 10, "axes.edgecolor": _DIM, "axes.labelcolor": _INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": _LINE, "xtick.color": _DIM,
    "ytick.color": _DIM, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "text.color": _INK,
    "legend.frameon": False, "legend.fontsize": 9.5,
}  # fmt: skip


def check_drawable() -> None:
    """Raise ConfigError if a package of the extra ``report`` is not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib.backends.backend_svg  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a report needs {error.name}: pip install 'treaty-learn[report]'") from error


@cache
def templates(*packages: str) -> Environment:
    """Return the HTML templates of packages, and of this one, which has the common style; with autoescape on."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader

    loaders = [PackageLoader(package) for package in (*packages, "treaty.report")]
    return Environment(
        loader=ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )


def check_possible(path: str | Path) -> None:
    """Raise ConfigError, before anything is computed, if a report cannot be drawn or written to `path`."""
    check_drawable()
    if Path(path).is_dir():
        raise ConfigError(f"expected the name of a file to write, such as report.html, got a folder - at {path}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}; make it first")


def write_page(path: str | Path, contents: Contents) -> None:
    """Write a report, all at once, to a file that only its owner can read; ConfigError if that cannot be done."""
    check_drawable()
    write_whole(path, [page(contents).encode()])


def page(of: Contents) -> str:
    """Return a report as HTML."""
    return templates().get_template("report.html").render(
        of=of, verdict=verdict(of), main=list(figures(of)), titles=_TITLES, half=_HALF, figures=dict(_figures(of)),
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
        rows={"scores": _score_rows(of), "messages": _message_rows(of.sent), "seconds": _second_rows(of.seconds)},
    )  # fmt: skip


def _figures(of: Contents) -> Iterator[tuple[Section, list[str]]]:
    """Yield the figures of each section that has any."""
    if of.curves:
        yield "curves", curves(of.curves, of.unit, of.best)
    if of.scores is not None and of.scores.roc:
        rates = "false positive rate", "true positive rate"
        yield "roc", [_against_diagonal("Receiver operating characteristic", of.scores.roc, *rates, marker="")]
    if of.scores is not None and of.scores.calibration:
        numbers, shares = ("mean prediction", "mean label"), ("mean predicted probability", "observed share")
        axes = numbers if of.scores.of_numbers else shares
        yield "calibration", [_against_diagonal("Calibration in tenths", of.scores.calibration, *axes, marker="o")]
    if any(amount for columns in of.importances.values() for amount in columns.values()):
        yield "importances", [importances(of.importances)]
    if of.shap:
        yield "shap", [shap(of.shap, of.shap_of)]
    if of.timeline is not None:
        yield "timeline", [timeline(of.timeline)]


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
    rows = [[arrow(pair), *_amounts([totals])] for pair, totals in pairs[:_MOST_ROWS]]
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
    """Return the headings, then a row for each party."""
    phases = dict.fromkeys(phase for by_phase in seconds.values() for phase in by_phase)
    rows = {party: [f"{of[phase]:.2f}" if phase in of else "" for phase in phases] for party, of in seconds.items()}
    return [["", *phases], *([party or "all", *cells] for party, cells in rows.items())] if rows else []


def curves(of: Sequence[Curve], unit: str, best: int | None) -> list[str]:
    """Return a figure for each metric, with a line for each set of rows, on top of those of the pooled model."""
    from matplotlib.ticker import MaxNLocator

    figures = []
    for metric in dict.fromkeys(curve.metric for curve in of):
        lines = [curve for curve in of if curve.metric == metric]
        names = list(dict.fromkeys(line.name for line in lines))

        def draw(
            axes: Axes, lines: Sequence[Curve] = lines, names: Sequence[str] = names, metric: str = metric
        ) -> None:
            for line in sorted(lines, key=lambda line: not line.pooled):
                at = line.at or np.arange(1, len(line.values) + 1)
                axes.plot(at, line.values, label=_label(line, names), **_look(names.index(line.name), line.pooled))
            if best is not None:
                axes.axvline(best, color=_DIM, linestyle=":", label=f"best {unit}, {best}")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel=unit, ylabel=shortened(metric, 30))

        last = ", ".join(f"{line.name}{' pooled' if line.pooled else ''} {line.values[-1]:.4g}" for line in lines)
        figures.append(_drawn(draw, f"{metric} by {unit}; at the end {last}"))
    return figures


def importances(of: Mapping[str, Mapping[str, float]]) -> str:
    """Return the columns of the largest importances, by absolute value, coloured by party."""
    bars = [(party, name, amount) for party, columns in of.items() for name, amount in columns.items() if amount]
    bars = sorted(bars, key=lambda bar: -abs(bar[2]))[:_MOST_BARS]
    parties = [party for party in of if any(party == whose for whose, _, _ in bars)]

    def draw(axes: Axes) -> None:
        for number, party in enumerate(parties):
            own = [(row, amount) for row, (whose, _, amount) in enumerate(bars) if whose == party]
            rows, amounts = zip(*own, strict=True)
            axes.barh(rows, amounts, color=_colour(number), label=shortened(party))
        _name_rows(axes, [name for _, name, _ in bars])

    return _drawn(draw, f"Importances of columns of {', '.join(parties)}", height=1.1 + 0.23 * len(bars))


def shap(spreads: Sequence[Spread], of: str) -> str:
    """Return the spread of contributions by column: whiskers 5 to 95 percent, boxes 25 to 75, a line at the median."""
    shown = sorted(spreads, key=lambda spread: -spread.mean)[:_MOST_BARS]
    kinds = {
        "low": ("rows with a value up to the median", _SERIES[0], -0.19),
        "high": ("rows with a higher one", _SERIES[1], 0.19),
        "every": ("all rows", _DIM, 0.0),
    }

    def draw(axes: Axes) -> None:
        for kind, (label, colour, offset) in kinds.items():
            rows = [(at, getattr(spread, kind)) for at, spread in enumerate(shown) if len(getattr(spread, kind))]
            if rows:
                stats = [dict(zip(("whislo", "q1", "med", "q3", "whishi"), of, strict=True)) for _, of in rows]
                line = {"color": colour, "linewidth": 1.0}
                axes.bxp(
                    stats, positions=[at + offset for at, _ in rows], widths=0.3, orientation="horizontal",
                    showfliers=False, showcaps=False, patch_artist=True, manage_ticks=False,
                    boxprops={"facecolor": colour, "edgecolor": colour, "alpha": 0.55}, whiskerprops=line,
                    medianprops={"color": colour, "linewidth": 2.0},
                )  # fmt: skip
                axes.plot([], [], color=colour, linewidth=6, alpha=0.7, label=label)
        axes.axvline(0.0, color=_DIM, linewidth=0.8)
        axes.set_xlabel(of)
        _name_rows(axes, [spread.name for spread in shown])

    return _drawn(draw, "Contributions of columns to rows' margins", height=1.1 + 0.3 * len(shown))


def timeline(of: Timeline) -> str:
    """Return megabytes per second in each time step, by ordered pair of parties; small pairs are added up."""
    largest = sorted(of.pairs, key=lambda pair: -sum(of.pairs[pair]))
    most = _MOST_PAIRS if len(largest) <= _MOST_PAIRS else _MOST_PAIRS - 1
    n_steps = max(len(steps) for steps in of.pairs.values())
    padded = {pair: np.pad(np.array(steps, float), (0, n_steps - len(steps))) for pair, steps in of.pairs.items()}
    shown = {pair: padded[pair] for pair in largest[:most]}
    if largest[most:]:
        shown[f"{len(largest) - most} other pairs"] = np.sum([padded[pair] for pair in largest[most:]], axis=0)

    def draw(axes: Axes) -> None:
        below, at = np.zeros(n_steps), (np.arange(n_steps) + 0.5) * of.step
        for number, (pair, amounts) in enumerate(shown.items()):
            colour = _SERIES[-1] if number >= most else _colour(number)
            rate = amounts / of.step / 1e6
            axes.bar(at, rate, of.step, below, color=colour, label=shortened(arrow(pair)), linewidth=0)
            below = below + rate
        axes.set(xlabel="seconds since the first message", ylabel="MB per second")
        axes.grid(visible=False, axis="x")

    return _drawn(draw, f"Megabytes sent over time, of {', '.join(shown)}")


def arrow(pair: str) -> str:
    """Return "sender -> receiver" with a typographic arrow that cannot start a line."""
    return pair.replace(" -> ", "\u00a0→ ")


def shortened(name: str, most: int = 36) -> str:
    """Return a name on one line, of printable characters; a long one is cut in the middle."""
    line = "".join(c if c.isprintable() or c == "\u00a0" else " " for c in name).strip() or "(no name)"
    return line if len(line) <= most else f"{line[: most - most // 3 - 1]}…{line[-(most // 3) :]}"


def _label(line: Curve | Points, names: Sequence[str]) -> str:
    if line.pooled:
        return "pooled" if len(names) == 1 else shortened(f"{line.name}, pooled")
    return shortened(line.name)


def _look(number: int, pooled: bool) -> dict[str, Any]:
    """Return a line's style: the pooled model's is broad and pale, so that an equal one is visible on it."""
    width = {"linewidth": 5.0, "alpha": 0.35} if pooled else {"linewidth": 1.6}
    return {"color": _colour(number), "solid_capstyle": "round", **width}


def _colour(number: int) -> str:
    return _SERIES[min(number, len(_SERIES) - 1)]


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_yticks(range(len(names)), ["\n".join(textwrap.wrap(shortened(name), 20)) or "" for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(names) - 0.4, -0.6)
    # beside long names there is no room for more, or longer, numbers
    axes.locator_params(axis="x", nbins=5, min_n_ticks=3)
    if max(map(abs, axes.get_xlim())) >= 1e4:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _against_diagonal(what: str, lines: Sequence[Points], x: str, y: str, *, marker: str) -> str:
    shown = list(lines)[: 2 * _MOST_LINES]
    names = list(dict.fromkeys(line.name for line in shown))
    ends = [pick(pick(*line.x, *line.y) for line in shown) for pick in (min, max)]

    def draw(axes: Axes) -> None:
        axes.plot(ends, ends, color=_DIM, linestyle=":", linewidth=1.0)
        for line in sorted(shown, key=lambda line: not line.pooled):
            style = _look(names.index(line.name), line.pooled) | {"marker": marker, "markersize": 4}
            axes.plot(line.x, line.y, label=_label(line, names), **style)
        axes.set(xlabel=x, ylabel=y)

    return _drawn(draw, f"{what} of {', '.join(names)}: {y} by {x}")


def _drawn(draw: Callable[[Axes], None], described: str, *, height: float = _HEIGHT) -> str:
    """Return a figure as SVG; the text describes it to screen readers."""
    import matplotlib
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": described}), warnings.catch_warnings():
        # the browser draws the letters: fonts that matplotlib lacks do not matter
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = 2 if max(map(len, labels)) <= 24 else 1
            height += 0.18 * -(-len(labels) // columns)
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        figure.set_size_inches(_WIDTH, height)
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return _inline(text.getvalue(), described)


def _inline(svg: str, described: str) -> str:
    """Return an SVG file as an element: no prolog, no URLs, the page's colours, no unused ids."""
    box = re.search(r'viewBox="([\d. ]+)"', svg)
    assert box is not None
    body = re.sub(r"<metadata>.*?</metadata>|<style type=.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    body = re.sub(r".*?<svg[^>]*>", "", body, count=1, flags=re.DOTALL).rpartition("</svg>")[0]
    body = body.replace("xlink:href", "href")
    used = {name for pair in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', body) for name in pair}
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)
    for number, variable in _COLOURS.items():
        body = body.replace(number, f"var({variable})")
    return f'<svg role="img" viewBox="{box[1]}" aria-label="{html.escape(described)}">{body}</svg>'
