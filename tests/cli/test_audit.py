"""`treaty audit`: attacks on records, and systems compared on a table of one's own."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runs.test_records import OU, job_of, recorded
from tables import real_table
from treaty.cli.main import app
from treaty.errors import ConfigError

FAST = ":".join(f"{name}={str(value).lower()}" for name, value in OU.items())


def said(*words: object) -> str:
    result = CliRunner().invoke(app, ["audit", *map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


def test_systems_are_compared_on_a_table_of_ones_own(tmp_path: Path) -> None:
    X, y = real_table("binary")
    X.assign(sick=y).to_csv(tmp_path / "own.csv", index=False)
    systems = f"secureboost:{FAST},federboost-vertical:epsilon=40,federboost-horizontal,fedxgb,fedxgb:edges=9"
    figure, table = tmp_path / "compared.svg", tmp_path / "compared.csv"
    output = said(
        "--compare", systems, "--data", tmp_path / "own.csv", "--label", "sick", "--trees", 2, "--rows", 200,
        "--figure", figure, "--table", table,
    )  # fmt: skip
    assert "fedxgb:edges=9: expected 27 users or more" in output  # one that is refused does not end the rest
    assert figure.read_text().count("<svg") == 1
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert {line["system"] for line in lines} == set(systems.split(",")) - {"fedxgb:edges=9"}
    assert {line["verdict"] for line in lines} == {"finds", "no better than a guess"}
    inverted = [line["party"] for line in lines if line["attack"] == "histogram inversion"]
    assert inverted == ["participant1", "server"]


def test_records_of_a_job_are_attacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = recorded(monkeypatch, job_of(tmp_path, OU), tmp_path, ["bank", "shop"])
    output = said(*files, "--table", tmp_path / "found.csv", "--figure", tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()
    with pytest.raises(ConfigError, match=r"found\.txt cannot be written"):
        said(*files, "--figure", tmp_path / "found.txt")
    assert "exact sums" in output
    assert "exact sums,bank,bins of shop" in (tmp_path / "found.csv").read_text()
    assert "shop: what others found of its columns cannot be scored" in said(files[0])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "expected either records of a training or --compare"),
        (["some.record", "--compare", "secureboost"], "expected either records of a training or --compare"),
        (["--compare", "pooled"], "protocol 'pooled' sends nothing that could be attacked"),
        (["--compare", "nosuch"], "expected protocol to be one of"),
        (["--compare", "secureboost:epsilon"], "expected option=value after secureboost:, got 'epsilon'"),
        (["--compare", "secureboost:colour=red"], "colour"),
        (["nosuch.record"], "nosuch.record"),
    ],
    ids=lambda of: " ".join(of) if isinstance(of, list) else "",
)
def test_what_cannot_be_audited_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        said(*words)
