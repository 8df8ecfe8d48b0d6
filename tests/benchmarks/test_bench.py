"""`benchmarks/bench.py`: verdicts, the page of results, and what is run, skipped and kept."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bench import app
from published import Cell, Figure, Found, look_up, page, read_experiments, read_runs, verdict
from treaty.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
KEPT = BENCHMARKS / "results"


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.csv")), ids=lambda file: file.stem)
def test_every_row_of_kept_results_has_the_columns_of_the_first(file: Path) -> None:
    with file.open(newline="") as rows:
        first, *others = csv.reader(rows)
    assert {len(row) for row in others} == {len(first)}


def test_page_of_results_is_what_the_kept_files_say() -> None:
    experiments = read_experiments(BENCHMARKS / "published.toml")
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page(experiments, KEPT), (
        "bring it up to date: python benchmarks/bench.py table > docs/results.md"
    )


def test_every_published_figure_is_found_and_every_miss_has_its_reason() -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8"), flags=re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    runs = read_runs(KEPT)
    for of in read_experiments(BENCHMARKS / "published.toml"):
        assert of.section in anchors, of.name
        for command in of.run:
            assert (BENCHMARKS / command.split()[0]).exists()
            assert command in runs
        found = [look_up(figure, KEPT) for figure in of.figures]
        for figure, each in zip(of.figures, found, strict=True):
            assert (each.state == "not run") == bool(figure.not_run), (of.name, figure.of)
        assert of.why or all(each.state in ("reached", "reported") for each in found), of.name


# ---------------------------------------------------------------- verdicts

TABLE = """system,data,AUC,epochs
ours,a,0.7775 (0.0052),9
ours,b,0.8,
theirs,a,0.78,12
"""


@pytest.fixture
def results(tmp_path) -> Path:
    (tmp_path / "table.csv").write_text(TABLE)
    return tmp_path


def of_table(column: str = "AUC", **given: object) -> Figure:
    where = {"system": "ours", "data": "a"}
    return Figure(**{"of": "x", "file": "table", "where": where, "column": column, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figure", "found"),
    [
        (of_table(), ("0.7775 (0.0052)", "reported", 0)),
        (of_table(at_least=0.7775), ("0.7775 (0.0052)", "reached", 0)),
        (of_table(at_least=0.78), ("0.7775 (0.0052)", "not reached", 0.0025)),
        (of_table(at_most=0.7), ("0.7775 (0.0052)", "not reached", 0.0775)),
        (of_table("epochs", below=9.0), ("9", "not reached", 0)),
        (of_table("epochs", minus=Cell({"system": "theirs"}), below=0.0), ("-3", "reached", 0)),
        (of_table("epochs", over=Cell({"system": "theirs"}), at_most=0.5), ("0.75", "not reached", 0.25)),
        (of_table(where={"system": "ours"}, take="largest"), ("0.8", "reported", 0)),
        (of_table("epochs", where={}, take="smallest", at_least=9), ("9", "reached", 0)),
        (of_table("data", where={"system": "ours"}, equal="a"), ("b", "not reached", 0)),
        (of_table("data", equal="a"), ("a", "reached", 0)),
        (of_table(where={"system": "nobody's"}), ("", "not run", 0)),
        (of_table(file="absent"), ("", "not run", 0)),
    ],
)
def test_a_figure_is_judged_by_what_it_has_to_keep(results, figure, found) -> None:
    looked = look_up(figure, results)
    assert (looked.ours, looked.state) == found[:2]
    assert looked.short == pytest.approx(found[2])


@pytest.mark.parametrize(
    "figure", [of_table("recall"), of_table(where={"system": "ours"}), of_table("data", at_most=1)]
)
def test_a_figure_that_names_no_number_is_an_error(results, figure) -> None:
    with pytest.raises(DataError, match=r"expected (a column|one row|a number)"):
        look_up(figure, results)


def test_a_verdict_counts_what_was_judged() -> None:
    reached, missed = Found("1", "reached"), Found("1", "not reached", 0.25)
    reported, absent = Found("1", "reported"), Found("", "not run")
    assert verdict([reached, reached, reported]) == "reached: 2 of 2"
    assert verdict([reached, missed]) == "**not reached**: 1 of 2, by at most 0.25"
    assert verdict([reached, absent]) == "reached: 1 of 1; 1 not run"
    assert verdict([absent]) == "not run"
    assert verdict([reported]) == "reported"


# ---------------------------------------------------------------- runs

PUBLISHED = """
[[experiments]]
name = "first"
paper = "P"
shows = "Table 1"
section = "s"
run = ["good.py"]
minutes = 1
data = "d"
seeds = "0"
figures = [{ of = "AUC", published = "0.9", file = "good", column = "AUC", at_least = 0.8 }]

[[experiments]]
name = "second"
paper = "P"
shows = "Table 2"
section = "s"
run = ["bad.py", "good.py"]
minutes = 1
data = "d"
seeds = "0"
figures = [{ of = "AUC", published = "0.9", file = "bad", column = "AUC" }]

[[experiments]]
name = "third"
paper = "P"
shows = "Table 3"
section = "s"
run = ["absent.py"]
minutes = 1
data = "d"
seeds = "0"
figures = [{ of = "AUC", published = "0.9", not_run = "no data" }]
"""
GOOD = """
import pathlib, sys
folder = pathlib.Path(__file__).parent / "results" / ("quick" if "--quick" in sys.argv else "")
folder.mkdir(parents=True, exist_ok=True)
calls = pathlib.Path(__file__).parent / "calls"
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
(folder / "good.csv").write_text("AUC\\n" + ("0.5" if "--quick" in sys.argv else "0.85") + "\\n")
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "published.toml").write_text(PUBLISHED)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text("raise SystemExit('what went wrong')")
    (tmp_path / "absent.py").write_text("raise SystemExit('skipped: no table in $TREATY_DATA')")
    return tmp_path


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text())


def test_run_resumes_and_says_how_everything_ended(folder) -> None:
    done = bench("run", "all", "--folder", folder)
    assert done.exit_code == 1, "a script failed"
    assert "reached: 1 of 1" in done.output
    assert "what went wrong" not in done.output
    assert "what went wrong" in (folder / "logs" / "bad_py.log").read_text()
    assert "skipped: no table" in done.output
    assert "3 scripts: 1 failed, 1 skipped" in done.output
    assert calls(folder) == 1, "two experiments share the script"
    assert [*read_runs(folder / "results")] == ["good.py"]

    again = bench("run", "first", "--folder", folder)
    assert again.exit_code == 0
    assert "up to date" in again.output
    assert calls(folder) == 1

    bench("run", "first", "--again", "--folder", folder)
    assert calls(folder) == 2

    (folder / "good.py").write_text(GOOD + "# changed\n")
    bench("run", "first", "--folder", folder)
    assert calls(folder) == 3, "the script has changed since"

    (folder / "results" / "good.csv").unlink()
    bench("run", "first", "--folder", folder)
    assert calls(folder) == 4, "its results are gone"


def test_quick_results_lie_apart_and_are_not_judged(folder) -> None:
    bench("run", "first", "--folder", folder)
    quick = bench("run", "first", "--quick", "--folder", folder)
    assert quick.exit_code == 0
    assert "not reached" not in quick.output
    assert "quick: too small to be judged" in quick.output
    assert (folder / "results" / "good.csv").read_text() == "AUC\n0.85\n"
    assert (folder / "results" / "quick" / "good.csv").read_text() == "AUC\n0.5\n"
    assert [*read_runs(folder / "results")] == ["good.py"]
    assert [*read_runs(folder / "results" / "quick")] == ["good.py --quick"]


def test_list_and_table_show_verdicts(folder) -> None:
    bench("run", "first", "--folder", folder)
    listed = bench("list", "--folder", folder)
    assert re.search(r"first +Table 1 +1 +reached: 1 of 1", listed.output)
    printed = bench("table", "--folder", folder)
    assert "| P | [Table 1](#table-1) | reached: 1 of 1 |" in printed.output
    assert "| AUC | 0.9 | no data |  | not run |" in printed.output


def test_what_is_not_there_is_said(folder) -> None:
    unknown = bench("run", "frist", "--folder", folder)
    assert isinstance(unknown.exception, ConfigError)
    assert "frist" in str(unknown.exception)
    (folder / "published.toml").write_text(PUBLISHED.replace("minutes", "hours"))
    assert isinstance(bench("list", "--folder", folder).exception, ConfigError)
