"""What was published, repeated, and how far it was reached.

`python benchmarks/bench.py list` names all, `run NAME` or `run all` repeats them, `table` prints docs/results.md.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import treaty
from published import Experiment, Run, bar_of, look_up, page, read_experiments, read_runs, verdict
from treaty.errors import ConfigError, TreatyError
from treaty.machine.process import ended_by_signals

app = typer.Typer(
    help="""Repeat what papers published of the systems here, and see how far it is reached.

    Every published table or figure is an entry of benchmarks/published.toml: a script, data, seeds, the published
    numbers and what ours have to keep. `list` shows them with their verdicts, `run` repeats some or all, `table` prints
    the page docs/results.md.""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

HERE = Path(__file__).resolve().parent

Folder = Annotated[Path, typer.Option("--folder", help="The folder of published.toml, scripts and results.")]


@app.command(name="list")
def show_list(folder: Folder = HERE) -> None:
    """List what can be repeated: name, table or figure, minutes of a full run, and the verdict of kept results."""
    table = Table("name", "shows", "minutes", "kept results", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for of in read_experiments(folder / "published.toml"):
        kept = verdict([look_up(figure, folder / "results") for figure in of.figures]).replace("**", "")
        table.add_row(of.name, of.shows, f"{of.minutes:g}", kept)
    console.print(table)


@app.command()
def table(folder: Folder = HERE) -> None:
    """Print docs/results.md, from the results at hand: ours beside the published numbers, with verdicts.

    `python benchmarks/bench.py table > docs/results.md` brings the page up to date after a full run.
    """
    typer.echo(page(read_experiments(folder / "published.toml"), folder / "results"), nl=False)


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(help="Names that `list` shows, or all.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rows, trees and repetitions: all in 10 minutes on two cores.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Run also what has results of this version already.")] = False,
    folder: Folder = HERE,
) -> None:
    """Repeat published tables and figures, and print ours beside them.

    Scripts run one after the other, and what they print is kept in benchmarks/logs. A script that was run to its end
    with this version of Treaty and has not changed since is not run again, so a run that was interrupted goes on where
    it was; --again runs it. Results of quick runs lie apart, in benchmarks/results/quick, and are no evidence of what
    the full ones show: they tell that everything runs. A script that fails does not keep the others from running.

    Data is looked for in $TREATY_DATA, then beside the checkout in shared/data; what lacks it is skipped. Ends with 0
    where no script failed, with 1 where one did. Whether a published figure is reached does not change that.
    """
    known = {of.name: of for of in read_experiments(folder / "published.toml")}
    unknown = sorted(set(names) - {"all", *known})
    if unknown:
        raise ConfigError(f"expected names that `list` shows, or all, got {', '.join(unknown)}")
    chosen = [of for name, of in known.items() if name in names or "all" in names]
    results = folder / "results" / "quick" if quick else folder / "results"
    done: dict[str, str] = {}  # by command: how it ended
    for place, of in enumerate(chosen, 1):
        console.print(f"[bold]{of.name}[/] ({place} of {len(chosen)}): {escape(of.paper)}, {escape(of.shows)}")
        for command in of.commands(quick=quick):
            if command in done:
                console.print(f"  {escape(command)}: {done[command]}, above")
            elif not again and _up_to_date(command, of, folder, results):
                done[command] = "up to date"
                console.print(f"  {escape(command)}: up to date (--again runs it all the same)")
            else:
                done[command] = _play(command, folder, results)
        _print_figures(of, results, quick=quick)
    failed = [command for command, ended in done.items() if ended.startswith("failed")]
    skipped = [command for command, ended in done.items() if ended.startswith("skipped")]
    console.print(f"{len(done)} scripts: {len(failed)} failed, {len(skipped)} skipped")
    if failed:
        raise typer.Exit(1)


def _print_figures(of: Experiment, results: Path, *, quick: bool) -> None:
    found = [look_up(figure, results) for figure in of.figures]
    for figure, each in zip(of.figures, found, strict=True):
        if quick and not each.ours:
            continue  # a quick run has fewer data sets
        beside = [f"published {figure.published}"] if figure.published else []
        beside += [f"to keep {bar_of(figure)}"] if bar_of(figure) else []
        ours = each.ours or figure.not_run or "not run"
        state = f"{each.state}: " if each.state in ("reached", "not reached") and not quick else ""
        line = f"  {state}{figure.of}: {ours}" + (f" ({', '.join(beside)})" if beside else "")
        console.print(escape(line), soft_wrap=True, highlight=False)
    said = "quick: too small to be judged" if quick else verdict(found).replace("**", "")
    console.print(f"  [bold]{said}[/]", highlight=False)


# ---------------------------------------------------------------- scripts


def _up_to_date(command: str, of: Experiment, at: Path, results: Path) -> bool:
    noted = read_runs(results).get(command)
    there = all((results / f"{file}.csv").exists() for file in of.files)
    return there and noted is not None and (noted.treaty, noted.source) == (treaty.__version__, digest(command, at))


def digest(command: str, at: Path) -> str:
    """Return a digest of a command's script, of what scripts share, and of the package: what results follow from."""
    package = sorted(Path(treaty.__file__).parent.rglob("*.py"))
    found = hashlib.sha256()
    shared = [path for path in [at / "data.py"] if path.is_file()]
    for path in (at / command.split()[0], *shared, *package):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _play(command: str, at: Path, results: Path) -> str:
    """Run a script to its end, with its output in a file; note the run where it was one, and say how it ended."""
    log = at / "logs" / f"{re.sub('[^a-z0-9]+', '_', command.lower()).strip('_')}.log"
    log.parent.mkdir(exist_ok=True)
    script, *arguments = shlex.split(command)
    start = time.monotonic()
    with log.open("wb") as output, console.status(f"  {escape(command)}") as status:
        process = subprocess.Popen(
            [sys.executable, str(at / script), *arguments], cwd=at.parent, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            while process.poll() is None:
                time.sleep(0.2)
                status.update(f"  {escape(command)}: {time.monotonic() - start:.0f} s  {escape(_last_line(log))}")
        finally:
            if process.poll() is None:  # interrupted: the script's own processes end with it
                os.killpg(process.pid, signal.SIGTERM)
    took = time.monotonic() - start
    ended = "done" if process.returncode == 0 else f"failed with {process.returncode}"
    if process.returncode and (said := _last_line(log)).startswith("skipped:"):
        ended = said
    if ended == "done":
        _note(command, took, at, results)
    where = "" if ended == "done" else f"; {log}"
    console.print(f"  {escape(command)}: {took:.0f} s, {escape(ended + where)}", soft_wrap=True, highlight=False)
    return ended


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-2000:].decode(errors="replace").split("\n")
    return next((line.strip()[:100] for line in reversed(lines) if line.strip()), "")


def _note(command: str, took: float, at: Path, results: Path) -> None:
    now = Run(
        command, datetime.date.today().isoformat(), f"{took:.0f}", treaty.__version__, versions(), digest(command, at),
        "benchmarks/bench.py",
    )  # fmt: skip
    runs = {**read_runs(results), command: now}
    results.mkdir(parents=True, exist_ok=True)
    with (results / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, Run.__struct_fields__, lineterminator="\n")
        writer.writeheader()
        writer.writerows(msgspec.to_builtins(runs[name]) for name in sorted(runs))


def versions() -> str:
    """Return the versions of the packages that numbers depend on, of those that are installed."""
    packages = {distribution.name: distribution.version for distribution in metadata.distributions()}
    wanted = ("numpy", "numba", "scikit-learn", "xgboost", "xgboost-cpu", "lightgbm")
    return ", ".join(f"{name} {packages[name]}" for name in wanted if name in packages)


if __name__ == "__main__":
    try:
        with ended_by_signals():
            app()
    except TreatyError as error:
        sys.exit(str(error))
