"""Published tables and figures beside ours: the table `benchmarks/published.toml`, its verdicts, and `docs/results.md`.

Nothing is measured here. Every figure names the cell of a CSV file, which a script of `benchmarks/` has written, and
what the number has to keep.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from treaty.errors import ConfigError, DataError

State = Literal["reached", "not reached", "reported", "not run"]
Row = dict[str, str]


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cell of the figure's file: `column`, or the figure's own where that is empty, of the row that has `where`."""

    where: dict[str, str]
    column: str = ""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number of ours, and the published one beside it.

    Attributes
    ----------
    of : str
        What is counted or measured.
    published : str
        The paper's number or claim.
    file : str
        Name of the CSV file, without its ending; empty where `not_run` says why there is none.
    where : dict of str to str
        Values of other columns in the row, which has to be the only one unless `take` says which.
    column : str
    take : {"", "smallest", "largest"}
        Of several rows, the one with the smallest or largest number.
    minus, over : Cell or None
        What is subtracted from the number, or what it is divided by.
    of_number : float or None
        A number that is divided by the cell: how many times as fast something is as another's published seconds.
    at_least, at_most, below : float or None
        What the number has to keep; it may be several.
    equal : str or None
        What the cell has to say.
    not_run : str
        Why there is no number of ours.
    """

    of: str
    published: str = ""
    file: str = ""
    where: dict[str, str] = {}
    column: str = ""
    take: Literal["", "smallest", "largest"] = ""
    minus: Cell | None = None
    over: Cell | None = None
    of_number: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    equal: str | None = None
    not_run: str = ""


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published table or figure.

    Attributes
    ----------
    name : str
        As `bench.py run` takes it.
    paper, shows : str
        The paper, and which of its tables, figures or claims.
    section : str
        Anchor in `docs/experiments.md`.
    run : list of str
        Scripts of `benchmarks/` with their arguments; none for what is not repeated, with the reason in `why`.
    quick : list of str or None
        The same for a short run; None is every one of `run` with ``--quick``.
    minutes : float
        How long a full run takes on two cores, about.
    data, seeds : str
    why : str
        Why a figure is not reached, or not run.
    figures : list of Figure
    pictures : list of str
        Names of PNG files in results/, without their endings, that the page shows.
    """

    name: str
    paper: str
    shows: str
    section: str
    run: list[str]
    minutes: float
    data: str
    seeds: str
    figures: list[Figure]
    quick: list[str] | None = None
    why: str = ""
    pictures: list[str] = []

    def commands(self, *, quick: bool) -> list[str]:
        """Return what is run: a script and its arguments each."""
        short = [f"{command} --quick" for command in self.run] if self.quick is None else self.quick
        return short if quick else self.run

    @property
    def files(self) -> list[str]:
        """Names of the CSV files that the figures are read from."""
        return list(dict.fromkeys(figure.file for figure in self.figures if figure.file))


class Run(msgspec.Struct, frozen=True):
    """When and with what a command of `benchmarks/` was last run to its end: a line of `runs.csv`.

    Attributes
    ----------
    command : str
    date : str
        Year, month and day.
    seconds : str
        Empty where it was not noted.
    treaty : str
        Treaty's version.
    versions : str
        Of the packages that numbers depend on.
    source : str
        Digest of the script, from which one sees whether it has changed since.
    noted : str
        By what: "benchmarks/bench.py", or the commit that brought the results.
    """

    command: str
    date: str
    seconds: str
    treaty: str
    versions: str
    source: str
    noted: str


class Found(msgspec.Struct, frozen=True):
    """A figure as it was found: what to show, and by how much it falls short where it is not reached."""

    ours: str
    state: State
    short: float = 0.0


def read_experiments(path: Path) -> list[Experiment]:
    """Return all experiments of the table; ConfigError where it is not as it should be."""
    try:
        table = msgspec.toml.decode(path.read_bytes(), type=dict[str, list[Experiment]])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return table["experiments"]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV file; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_runs(results: Path) -> dict[str, Run]:
    """Return what is noted of the runs whose results lie in this folder, by command."""
    return {row["command"]: msgspec.convert(row, Run) for row in read_rows(results / "runs.csv")}


# ---------------------------------------------------------------- verdicts


def look_up(figure: Figure, results: Path) -> Found:
    """Read a figure from the results in a folder and judge it.

    DataError where a file is there and the cell is not, or is not the only one.
    """
    rows = read_rows(results / f"{figure.file}.csv") if figure.file else []
    chosen, where = _rows_at(figure.where, rows), f"{figure.file}.csv, {figure.where}"
    if not chosen:
        return Found("", "not run")
    if figure.column not in chosen[0]:
        raise DataError(f"expected a column {figure.column!r} - at {where}")
    if figure.equal is not None:
        others = [row[figure.column] for row in chosen if row[figure.column] != figure.equal]
        return Found(others[0] if others else figure.equal, "not reached" if others else "reached")
    text = _only(figure, chosen, where)
    for other, combine in ((figure.minus, float.__sub__), (figure.over, float.__truediv__)):
        if other is not None:
            against = _rows_at(other.where, rows)
            if not against:
                return Found("", "not run")
            if len(against) > 1:
                raise DataError(f"expected one row, got {len(against)} - at {figure.file}.csv, {other.where}")
            text = f"{combine(number(text), number(against[0][other.column or figure.column])):.4g}"
    if figure.of_number is not None:
        text = f"{figure.of_number / number(text):.4g}"
    value = number(text)
    gaps = [
        *([figure.at_least - value] if figure.at_least is not None else []),
        *([value - figure.at_most] if figure.at_most is not None else []),
        *([value - figure.below] if figure.below is not None else []),
    ]
    if not gaps:
        return Found(text, "reported")
    missed = max(gaps) > 0 or value == figure.below
    return Found(text, "not reached" if missed else "reached", max(0.0, *gaps) if missed else 0.0)


def number(cell: str) -> float:
    """Return the number that a cell begins with: "0.7775 (0.0052)" is 0.7775."""
    found = re.match(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", cell)
    if found is None:
        raise DataError(f"expected a number, got {cell!r}")
    return float(found[0])


def _rows_at(where: dict[str, str], rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if all(row.get(column) == value for column, value in where.items())]


def _only(figure: Figure, rows: Sequence[Row], where: str) -> str:
    """Return the figure's cell: of the only row, or of that with the smallest or largest number."""
    cells = [row[figure.column] for row in rows if row[figure.column]]
    if figure.take:
        return (min if figure.take == "smallest" else max)(cells, key=number)
    if len(cells) != 1:
        raise DataError(f"expected one row with {figure.column!r}, got {len(cells)} - at {where}")
    return cells[0]


def bar_of(figure: Figure) -> str:
    """Say what a figure has to keep; empty where it is only reported."""
    if figure.equal is not None:
        return figure.equal
    low, high = figure.at_least, figure.at_most
    if low is not None and high is not None:
        return f"±{high:g}" if low == -high else f"{low:g} to {high:g}"
    said = {"at least": low, "at most": high, "below": figure.below}
    return ", ".join(f"{words} {bar:g}" for words, bar in said.items() if bar is not None)


def verdict(found: Sequence[Found]) -> str:
    """Say of an experiment's figures together whether they are reached."""
    states = [each.state for each in found]
    judged, missed = [s for s in states if s in ("reached", "not reached")], states.count("not reached")
    furthest = max((each.short for each in found), default=0.0)
    if missed:
        said = f"**not reached**: {missed} of {len(judged)}" + (f", by at most {furthest:.2g}" if furthest else "")
    elif judged:
        said = f"reached: {len(judged)} of {len(judged)}"
    else:
        said = "reported" if "reported" in states else "not run"
    left = states.count("not run")
    return said + (f"; {left} not run" if left and said != "not run" else "")


# ---------------------------------------------------------------- the page

HEAD = """# Results: published numbers and ours

This page lists every table and figure that the papers published, with our numbers and a verdict. [Published
experiments, repeated](experiments.md) describes how each was repeated. The [league table](#league-table) compares all
systems on the same job. `python benchmarks/bench.py table` makes this page from `benchmarks/published.toml` and
`benchmarks/results/`.

| verdict | meaning |
|---|---|
| reached, not reached | compares ours with the bar that the repetition had to keep |
| reported | no bar, mostly times: the papers' machines differ. In tables of figures, the cell is empty |
| not run | data or numbers are not at hand |

[Runs](#runs) has scripts, dates, versions and machines."""

RUNS = """## Runs

`python benchmarks/bench.py run NAME` repeats an experiment on two cores. Splits are stratified; those of seeds 0 to 9
are kept in `results/splits_*.npy`. Where `bench.py` did not note a run, date and versions come from the commit that
brought the results."""

LEAGUE = """## League table

The same job by every system and cipher: 20 trees of depth 3, rate 0.3, 32 bins, two thirds of the rows for training.
All parties are threads of one process on two cores (`benchmarks/league.py`).

| column | meaning |
|---|---|
| s | the quickest of two or more fits, with set-up and keys; "once": one fit, of more than a minute |
| added MB | growth of the process's memory, all parties together |
| MB | sent by all parties |
| rounds | round trips that wait for one another |
| busy | cores that other processes used meanwhile; seconds are then upper bounds |

Do not compare AUC and log loss of jobs with fewer rows. Linear models draw batches at random, so their AUC differs by
up to a hundredth between runs. Quasi-Newton under Paillier with a coordinator did not end in ten minutes on the
larger table."""

PEERS = """### Other programs

These lines are other jobs in other settings; do not compare them with the table above. Seconds and MB are for a tree
or an epoch, unless stated. "Here" means measured in this project with the program's own release, on Default of Credit
Card Clients: both parties on one core of an AMD EPYC, the other core busy, 20,000 rows; trees with depth 3, rate 0.3
and 32 bins; regressions with untuned rates. By row, each party has half of the rows."""

# tables of figures have a part for each
TABLES = ("Default of Credit Card Clients", "Give Me Some Credit")


def page(experiments: Sequence[Experiment], results: Path) -> str:
    """Return the page of results as Markdown."""
    runs = read_runs(results)
    found = {of.name: [look_up(figure, results) for figure in of.figures] for of in experiments}
    lines = [HEAD, "", "| paper | table or figure | verdict |", "|---|---|---|"]
    lines += [_line([_short(of), f"[{of.shows}](#{_anchor(of)})", verdict(found[of.name])]) for of in experiments]
    for place, of in enumerate(experiments):
        if place == 0 or experiments[place - 1].paper != of.paper:
            lines += ["", f"## {of.paper}"]
        lines += ["", *_section(of, found[of.name])]
    return "\n".join([*lines, "", *_league(results), "", *_runs(experiments, results, runs)]) + "\n"


def _short(of: Experiment) -> str:
    """Return the system's name, without the paper's authors."""
    return of.paper.partition(" (")[0]


def _anchor(of: Experiment) -> str:
    """Return the anchor of an experiment's heading, as viewers of repositories make it."""
    return re.sub(r"[^\w\- ]", "", of.shows.lower()).replace(" ", "-")


def _league(results: Path) -> list[str]:
    """Return the league table, a table for each data set, and what other programs took."""
    splits, lines = ("none", "columns", "rows", "users"), [LEAGUE]
    rows = sorted(read_rows(results / "league.csv"), key=lambda row: splits.index(row["split by"]))
    heads = ["system", "AUC", "log loss", "s", "added MB", "MB", "rounds", "busy"]
    for data in sorted({row["data"] for row in rows}):
        lines += ["", f"**{data}**", "", _line(heads), "|---" * 8 + "|"]
        lines += [_line(_league_cells(row)) for row in rows if row["data"] == data]
    learned: dict[str, dict[str, None]] = {}  # what is learned: by which systems
    for row in rows:
        learned.setdefault(row["what each party learns"], {})[row["system"]] = None
    learned.pop("everything is in one place", None)
    lines += ["", "**What each party learns**", "", "| systems | what parties learn |", "|---|---|"]
    lines += [_line(["; ".join(systems), what]) for what, systems in learned.items()]
    for field in ("machine", "date", "versions"):
        lines += [f"\n{field.title()}: {'; '.join(dict.fromkeys(row[field] for row in rows))}."] if rows else []
    peers = read_rows(results.parent / "peers.csv")
    if peers:
        lines += ["", PEERS, "", _line(peers[0]), "|---" * len(peers[0]) + "|", *(_line(row.values()) for row in peers)]
    return lines


def _league_cells(row: Row) -> list[str]:
    few = "" if row["train rows"] == row["of"] else f", {int(row['train rows']):,} of {int(row['of']):,} rows"
    once = " (once)" if row["slowest s"] == "" else ""
    return [
        row["system"] + few,
        row["AUC"],
        row["log loss"],
        row["s"] + once,
        row["added MB"],
        row["MB"],
        row["rounds"],
        row["others' cores"],
    ]


def _section(of: Experiment, found: Sequence[Found]) -> list[str]:
    lines = [f"### {of.shows}", "", f"`{of.name}`: [how it was repeated](experiments.md#{of.section})", ""]
    lines += ["| | published | ours | bar | verdict |", "|---|---|---|---|---|"]
    parts: dict[str, list[str]] = {}
    for figure, each in zip(of.figures, found, strict=True):
        data = next((name for name in TABLES if figure.of.startswith((f"{name}:", f"{name},"))), "")
        state = "" if each.state == "reported" else each.state + (f" by {each.short:.2g}" if each.short else "")
        what, ours = figure.of[len(data) :].lstrip(":, "), each.ours or figure.not_run
        parts.setdefault(data, []).append(_line([what, figure.published, ours, bar_of(figure), state]))
    for data, rows in parts.items():
        lines += [f"| **{data}** | | | | |"] if data else []
        lines += rows
    if of.why:
        lines += ["", of.why]
    for picture in of.pictures:
        lines += ["", f"![{of.shows}, ours](../benchmarks/results/{picture}.png)"]
    return lines


def _runs(experiments: Sequence[Experiment], results: Path, runs: dict[str, Run]) -> list[str]:
    """Return what was run: of each experiment scripts, data and seeds, and of each script its last run."""
    ran = list(dict.fromkeys(runs[command] for of in experiments for command in of.run if command in runs))
    versions = list(dict.fromkeys(f"Treaty {run.treaty}, {run.versions}" for run in ran))
    machines = list(dict.fromkeys(machine for of in experiments for machine in _machines(of, results)))
    lines = [RUNS, "", "| experiment | scripts of `benchmarks/` | minutes | data | seeds | machine |", "|---" * 6 + "|"]
    for of in experiments:
        if of.run:
            scripts = ", ".join(f"`{command}`" for command in of.run)
            on = ", ".join(chr(ord("A") + machines.index(machine)) for machine in _machines(of, results))
            lines.append(_line([of.name, scripts, f"{of.minutes:g}", of.data, of.seeds, on]))
    lines += ["", "| run | date | s | versions | noted by |", "|---" * 5 + "|"]
    for run in ran:
        took = f"{float(run.seconds):.0f}" if run.seconds else ""
        kind = versions.index(f"Treaty {run.treaty}, {run.versions}") + 1
        lines.append(_line([run.command, run.date, took, str(kind), run.noted]))
    lines += ["", "| machine, versions | |", "|---|---|"]
    lines += [_line([chr(ord("A") + place), machine]) for place, machine in enumerate(machines)]
    return [*lines, *(_line([str(number), each]) for number, each in enumerate(versions, 1))]


def _machines(of: Experiment, results: Path) -> list[str]:
    rows = [row for file in of.files for row in read_rows(results / f"{file}.csv")]
    return list(dict.fromkeys(row["machine"] for row in rows if row.get("machine")))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
