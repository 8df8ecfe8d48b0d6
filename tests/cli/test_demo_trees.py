"""``treaty demo`` of trees."""

from __future__ import annotations

import subprocess

import pytest
from typer.testing import CliRunner

from runs.job_files import TREATY, one_line
from tables import real_table, with_categories
from treaty.cli.main import app
from treaty.errors import ConfigError

SHOWN = ("AUC", "XGBoost", "bit for bit the same", "clinic -> laboratory", "learned", "imaging", "Next", "--data FILE")


@pytest.mark.slow
def test_the_command_alone_seals_sums_and_prints_a_screen():
    done = subprocess.run([*TREATY, "demo", "--trees", "2"], capture_output=True, text=True, check=True)
    assert all(word in done.stdout for word in (*SHOWN, "sealed sums", "SealedStep", "treaty demo --open"))
    assert "sums are open" not in done.stdout
    assert len(done.stdout.splitlines()) <= 40
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_sums_are_open_where_this_is_asked_for():
    done = CliRunner().invoke(app, ["demo", "--trees", "2", "--open"], catch_exceptions=False)
    assert done.exit_code == 0
    assert all(word in done.stdout for word in (*SHOWN, "sums are open"))
    assert all(word not in done.stdout for word in ("SealedStep", "sealed sums", "treaty demo --open"))


def test_a_column_of_ids_is_no_feature(tmp_path):
    X, y = real_table("binary")
    X.iloc[:, :3].assign(y=y, who=range(len(y))).to_csv(tmp_path / "t.csv", index=False)
    file = ["--data", str(tmp_path / "t.csv"), "--label", "y"]
    done = CliRunner().invoke(app, ["demo", "--protocol", "pooled", "--trees", "1", *file, "--id", "who"])
    assert done.exit_code == 0, done.output
    assert "who" not in done.output
    assert (
        CliRunner().invoke(app, ["demo", "--protocol", "pooled", "--trees", "1", *file, "--id", "who, who"]).exit_code
        == 0
    )
    for wrong, words in [(["--id", "whom"], "got whom"), (["--id", "y"], "got y")]:
        with pytest.raises(ConfigError, match=words):
            CliRunner().invoke(app, ["demo", *file, *wrong], catch_exceptions=False)
    with pytest.raises(ConfigError, match="no ids"):
        CliRunner().invoke(app, ["demo", "--id", "who"], catch_exceptions=False)


@pytest.mark.slow
def test_a_file_is_cut_as_told(tmp_path):
    X, y = real_table("binary")
    with_categories(X).iloc[:, :4].assign(y=y).to_csv(tmp_path / "t.csv", index=False)
    names = list(X.columns[:4])
    command = [
        *TREATY,
        "demo",
        "--data",
        str(tmp_path / "t.csv"),
        "--label",
        "y",
        "--trees",
        "1",
        "--protocol",
        "pooled",
    ]
    done = subprocess.run(
        [*command, "--split", f"{names[1]}/{names[0]},{names[2]}"], capture_output=True, text=True, check=True
    )
    assert "clinic" in done.stdout
    wrong = subprocess.run([*command, "--split", "a/b"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "unknown a" in one_line(wrong.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        ("federboost-horizontal", ["north alone", "east alone", "south -> north", "search for bin edges separated"]),
        ("federboost-vertical", ["epsilon 4 per value and 40 per person", "noise of imaging", "clinic -> laboratory"]),
    ],
)
def test_each_protocol_prints_scores_bytes_and_what_was_learned(protocol, words):
    command = ["demo", "--protocol", protocol, "--trees", "2", "--transport", "memory"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    assert all(word in done.stdout for word in ("AUC", "XGBoost", "nothing pooled", "What each party learned", *words))
    assert "DIFFERENT" not in done.stdout


@pytest.mark.slow
def test_fedxgb_prints_what_each_role_learned_and_needs_three_edge_servers():
    done = CliRunner().invoke(app, ["demo", "--protocol", "fedxgb", "--trees", "2"], catch_exceptions=False)
    assert done.exit_code == 0
    words = ["AUC", "XGBoost", "nothing pooled", "12 user -> 3 edge", "3 edge -> 3 edge", "What each party learned"]
    assert all(word in done.stdout for word in words)
    with pytest.raises(ConfigError, match="expected 3 edge servers or more, got 2"):
        CliRunner().invoke(app, ["demo", "--protocol", "fedxgb", "--parties", "2"], catch_exceptions=False)


def test_two_participants_are_refused_but_in_paper_mode():
    command = ["demo", "--protocol", "federboost-horizontal", "--parties", "2"]
    with pytest.raises(ConfigError, match="expected 3 participants"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_without_xgboost_and_pandas_the_demo_says_which_row_is_missing(without):
    without("xgboost", "pandas")
    done = CliRunner().invoke(app, ["demo", "--protocol", "pooled", "--trees", "1"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "XGBoost, not installed: pip install" in done.stdout
    assert "'treaty-learn[xgboost]'" in done.stdout


@pytest.mark.parametrize("protocol", ["pooled", "secureboost", "federboost-horizontal"])
def test_a_numeric_label_is_regressed(tmp_path, protocol):
    X, _ = real_table("binary")
    X.iloc[:300, :6].rename(columns={X.columns[1]: "[bold]"}).to_csv(tmp_path / "t.csv", index=False)
    file = ["--data", str(tmp_path / "t.csv"), "--label", str(X.columns[0])]
    done = CliRunner().invoke(app, ["demo", "--protocol", protocol, "--trees", "2", *file], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    heading, *scores = [line for line in done.output.splitlines() if "R2" in line or "Treaty, " in line]
    assert heading.split()[-2:] == ["R2", "RMSE"]
    shown = [line for line in scores if "clinic alone" not in line]
    # two of the columns predict little
    assert len(scores) - len(shown) == (protocol == "secureboost")
    assert all(0.2 < float(line.split()[-2]) < 1.0 for line in shown)
    assert "AUC" not in done.output
    assert protocol == "federboost-horizontal" or "[bold]" in done.output  # a column's name, no markup


@pytest.mark.slow
def test_xgboost_is_shown_beside_ours_without_pandas(without):
    without("pandas")
    done = CliRunner().invoke(app, ["demo", "--protocol", "pooled", "--trees", "1"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "XGBoost, pooled table" in done.stdout
