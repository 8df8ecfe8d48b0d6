"""What commands say while they work and at the end: bars, logs, files, reports."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from runs.small_jobs import SYSTEMS, played, write_job
from treaty.cli.logs import logged
from treaty.cli.main import app
from treaty.files import read_json, write_json
from treaty.runs.job import Job, Member
from treaty.runs.job_files import load_job
from treaty.runs.party import part_file
from treaty.runs.report import FORMAT, Report
from treaty.runs.table_files import read_rows

TREATY = [sys.executable, "-m", "treaty"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def report_of(job, name: str) -> Report:
    return read_json(part_file(job.output, name).with_suffix(".report.json"), Report, FORMAT, name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a finished job with an eval set, whose columns are not aligned."""
    folder = tmp_path_factory.mktemp("trained")
    job = write_job(folder, "secureboost")
    text = (folder / "job.toml").read_text()
    for name in "abc":
        text = text.replace(f'table = "{name}.csv"', f'table = "{name}.csv"\neval_tables = ["{name}.csv"]')
    (folder / "job.toml").write_text(text)
    job = load_job(folder / "job.toml")
    assert played(dict.fromkeys(job.parties, job)) == {}
    return job


def test_a_report_says_with_what_and_on_what_a_model_was_trained(trained):
    active, passive = report_of(trained, "a"), report_of(trained, "b")
    assert active.options["protocol"] == "secureboost"
    assert active.options["n_estimators"] == 2
    assert {"treaty-learn", "python", "numpy"} <= set(active.versions)
    assert re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d", active.ended)
    assert active.rows == passive.rows == 180
    assert set(active.columns.values()) == {"numeric"}
    assert [len(losses) for losses in active.losses.values()] == [2]
    assert passive.losses == {}  # which labels would follow from
    assert set(active.importances["gain"]) == set(active.columns)
    assert sum(active.importances["gain"].values()) > 0
    assert set(passive.importances) == {"count"}
    assert set(active.waited) == {"b", "c"}
    assert passive.waited["a"] > 0
    assert active.model == passive.model != ""


def test_show_prints_what_a_party_has_and_noted(trained):
    for name in ("a", "b"):
        said = run("show", str(part_file(trained.output, name)))
        assert "n_estimators=2" in said
        assert "rows: 180" in said
        assert "waited for" in said
        assert "numeric" in said
        assert ("loss of eval_0" in said) == (name == "a")
        assert all(column in said for column in report_of(trained, name).columns)


def test_show_prints_a_part_alone_and_a_report_of_another_model_is_not_taken_for_its_own(trained, tmp_path):
    part, report = part_file(trained.output, "a"), part_file(trained.output, "a").with_suffix(".report.json")
    (tmp_path / "a.part").write_bytes(part.read_bytes())
    said = run("show", str(tmp_path / "a.part"))
    assert "loss of eval_0" in said
    assert "numeric" in said
    other = msgspec.structs.replace(read_json(report, Report, FORMAT), model="another")
    write_json(tmp_path / "a.report.json", other, FORMAT, "a")
    said = run("show", str(tmp_path / "a.part"))
    assert "a.report.json is of another model" in said
    assert "n_estimators=2" not in said


def test_show_refuses_what_is_no_part(tmp_path):
    (tmp_path / "a.part").write_text("something")
    done = CliRunner().invoke(app, ["show", str(tmp_path / "a.part")])
    assert "expected a part of a model" in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["federboost-horizontal", "fedxgb", "quasi-newton", "fedxgboost-smm"])
def test_every_role_of_every_kind_of_system_writes_a_report(tmp_path, system):
    job = write_job(tmp_path, system)
    assert played(dict.fromkeys(job.parties, job)) == {}
    for name in SYSTEMS[system][1]:
        assert report_of(job, name).role
        run("show", str(part_file(job.output, name).with_suffix(".report.json")))


def test_training_again_keeps_the_earlier_model_under_its_date(tmp_path, caplog):
    job = write_job(tmp_path, "federboost-vertical")
    first = {}
    for _ in range(2):
        assert played(dict.fromkeys(job.parties, job)) == {}
        first = first or {name: part_file(job.output, name).read_bytes() for name in job.parties}
    for name, content in first.items():
        (dated,) = part_file(job.output, name).parent.glob(f"{name}.20*.part")
        assert dated.read_bytes() == content != part_file(job.output, name).read_bytes()
        said = run("show", str(dated))  # with its own report
        assert f"job {job.name}" in said
        assert f"{name}: an earlier training's files are kept: {dated}" in caplog.text


@pytest.mark.slow
def test_every_party_says_its_progress_in_lines_and_what_it_wrote(tmp_path):
    job = write_job(tmp_path, "secureboost")
    for name in job.parties:
        text = (tmp_path / "job.toml").read_text()
        (tmp_path / "job.toml").write_text(
            text.replace(f'table = "{name}.csv"', f'table = "{name}.csv"\npredict_table = "{name}.csv"')
        )
    said = {}
    for verb in ("train", "predict"):
        log = ["--log-file", str(tmp_path / "log"), *(["-v"] if verb == "train" else [])]
        parties = {
            name: subprocess.Popen(
                [*TREATY, verb, str(tmp_path / "job.toml"), "--as", name, *log],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for name in job.parties
        }  # fmt: skip
        said[verb] = {name: process.communicate(timeout=300) for name, process in parties.items()}
        assert {process.returncode for process in parties.values()} == {0}, said[verb]
    for name, (out, err) in said["train"].items():
        assert f"{name}: wrote {part_file(job.output, name)}, " in out
        assert re.search(rf"^20\S+Z {name}: 2 of 2 rounds", err, re.MULTILINE)
        assert "wrote" not in err  # what is printed is not said twice
    assert f"a: wrote {tmp_path}/model/predictions.csv, 180 rows" in said["predict"]["a"][0]
    assert "b: took part; a has the predictions" in said["predict"]["b"][0]
    assert all(err == "" for _, err in said["predict"].values())
    logged = (tmp_path / "log").read_text()
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
    assert f"a: wrote {tmp_path}/model/predictions.csv, 180 rows" in logged
    assert all(f"{name}: 2 of 2 rounds" in logged for name in job.parties)


@pytest.mark.slow
def test_with_all_parties_here_one_log_has_the_lines_of_all(tmp_path):
    write_job(tmp_path, "federboost-vertical")
    command = [*TREATY, "train", str(tmp_path / "job.toml"), "-v"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(re.search(rf"^20\S+Z {name}: 2 of 2 rounds", done.stderr, re.MULTILINE) for name in "abc")


def test_a_log_that_cannot_be_written_is_an_error_before_anything_begins(tmp_path):
    write_job(tmp_path, "secureboost")
    done = CliRunner().invoke(
        app, ["train", str(tmp_path / "job.toml"), "--as", "a", "--log-file", str(tmp_path / "no" / "log")]
    )
    assert "cannot write the log" in str(done.exception)


def test_what_a_table_has_is_said_without_being_asked(tmp_path, capsys):
    """In one line, on standard output; with -v as a line with its time."""
    kinds = pd.DataFrame({f"kind{k}": ["a", "b"] * 600 for k in range(7)})
    kinds.assign(age=np.arange(1200.0), empty=np.nan, y=[0, 1] * 600).to_csv(tmp_path / "t.csv", index=False)
    job = Job(
        name="t", active="a", label="y", parties={"a": Member(table=str(tmp_path / "t.csv"))},
        protocol="federboost-horizontal",
    )  # fmt: skip
    said = "a: t.csv: 1,200 rows, 2 numeric, 7 categorical columns (kind0, kind1, kind2, kind3, kind4 and 2 more)\n"
    for verbose in (False, True):
        with logged(verbose, None):
            read_rows(job.table_rules("a"), str(tmp_path / "t.csv"))
        out, err = capsys.readouterr()
        assert out == ("" if verbose else said)
        assert (f"Z {said}" in err) == verbose
        assert "a: 'empty' has no value in any row of t.csv and cannot help" in err
    with logged(False, None):  # rows to predict
        read_rows(
            job.table_rules("a"),
            str(tmp_path / "t.csv"),
            read_rows(job.table_rules("a"), str(tmp_path / "t.csv")).features.schema,
        )
    assert capsys.readouterr().out == said


def test_all_parties_tables_are_said_where_they_train_here(trained):
    said = [report_of(trained, name).table() for name in "ab"]
    assert said == ["180 rows, 6 numeric columns", "180 rows, 3 numeric columns"]
