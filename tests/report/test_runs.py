"""``treaty report``: what parties of a job have noted, in the view of one, and what is refused."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import treaty
from runs.small_jobs import SYSTEMS, played, write_job
from treaty.cli.main import app
from treaty.data.reading import write_predictions
from treaty.errors import ConfigError, DataError
from treaty.files import read_json, write_json
from treaty.report.contents import contents_of_run, read_run, read_scores
from treaty.report.page import _TITLES, page
from treaty.report.verdict import verdict
from treaty.runs.job_files import load_job
from treaty.runs.local_checks import check_own
from treaty.runs.report import FORMAT, Report, report_file


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def played_job(folder: Path, system: str):
    """Return a finished job with an eval set where the system has columns."""
    write_job(folder, system)
    text = (folder / "job.toml").read_text()
    if SYSTEMS[system][0].get("n_estimators") and "eval_tables" not in text:
        names = "a" if system == "federboost-horizontal" else [n for n in SYSTEMS[system][1] if f'"{n}.csv"' in text]
        for name in names:
            text = text.replace(f'table = "{name}.csv"', f'table = "{name}.csv"\neval_tables = ["{name}.csv"]')
        (folder / "job.toml").write_text(text)
    job = load_job(folder / "job.toml")
    assert played(dict.fromkeys(job.parties, job)) == {}
    return job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return played_job(tmp_path_factory.mktemp("job"), "secureboost")


def columns_of(job, name: str) -> list[str]:
    return [column for column in pd.read_csv(job.parties[name].table, nrows=1).columns if column != "y"]


def test_the_folder_of_a_job_is_shown_as_the_active_party_sees_it(job, tmp_path):
    out = tmp_path / "out.html"
    assert f"a: wrote {out}" in run(job.output, "--output", str(out))
    text = out.read_text()
    foreign = [name for other in "bc" for name in columns_of(job, other)]
    assert [name for name in foreign if name in text] == []
    assert any(name in text for name in columns_of(job, "a"))
    assert "all of b" in text
    for said in ("no predictions with labels", "stores no rows", "no epsilon", "SumsRequest", treaty.__version__):
        assert said in text
    for pair in ("a\u00a0→ b", "b\u00a0→ a", "c\u00a0→ a"):
        assert pair in text


def test_bytes_are_those_that_all_noted_and_each_pair_is_told_once(job):
    folder, reports, viewer = read_run(Path(job.output))
    shown = contents_of_run(folder, reports, viewer)
    noted = {f"{name} -> {peer}": of["bytes"] for name, own in reports.items() for peer, of in own.sent.items()}
    assert {pair: totals["bytes"] for pair, totals in shown.sent.items()} == noted
    assert {pair: sum(steps) for pair, steps in shown.timeline.pairs.items()} == noted


def test_gains_by_party_add_up_to_the_trees(job):
    folder, reports, viewer = read_run(Path(job.output))
    shown = contents_of_run(folder, reports, viewer)
    forest = treaty.models.trees.load_part(folder / "a.part", "a").forest
    whole = sum(float(tree.gain[tree.left >= 0].sum()) for tree in forest.trees)
    assert whole > 0.0
    assert sum(amount for of in shown.importances.values() for amount in of.values()) == pytest.approx(whole)
    assert [curve.metric for curve in shown.curves] == ["loss"] * 3
    assert shown.curves[1].values == reports["a"].losses["eval_0"]


def test_training_rows_have_a_learning_curve(job):
    _, reports, viewer = read_run(Path(job.output))
    curve = contents_of_run(Path(job.output), reports, viewer).curves[0]
    # the eval set has the same rows
    assert (curve.name, list(curve.at)) == ("training rows", [1, 2])
    assert curve.values == pytest.approx(reports["a"].losses["eval_0"])
    assert reports["b"].train_losses == {}


def test_the_active_partys_own_columns_are_trained_on_for_comparison(job, tmp_path):
    _, reports, viewer = read_run(Path(job.output))
    X = pd.read_csv(job.parties["a"].table)
    y = X.pop("y")
    options = {name: value for name, value in job.common.items() if name in treaty.GBDTClassifier().get_params()}
    alone = treaty.GBDTClassifier(**options, max_bin=job.settings()[1].max_bin).fit(X, y, eval_set=(X, y))
    (metric,) = alone.evals_result_["eval_0"]
    expected = alone.evals_result_["eval_0"][metric]
    assert reports["a"].alone == {"eval_0": expected}
    assert all(of.alone == {} for name, of in reports.items() if name != "a")
    shown = contents_of_run(Path(job.output), reports, viewer)
    ours = reports["a"].losses["eval_0"][-1]
    said = [sentence for _, sentence in verdict(shown)]
    assert f"loss is {ours:.4g} with it and {expected[-1]:.4g} without" in said[-1]
    assert "have no labels" not in page(shown)
    assert contents_of_run(Path(job.output), reports, "b").absent["alone"] == "b has no labels to train on."


def test_a_job_ends_well_without_the_comparison(tmp_path, monkeypatch, caplog):
    def fails(inputs):
        raise DataError("its columns are odd")

    monkeypatch.setattr("treaty.runs.party.train", fails)
    job = played_job(tmp_path, "secureboost")
    _, reports, viewer = read_run(Path(job.output))
    assert "a: no model of its own columns alone to compare with: its columns are odd" in caplog.text
    assert "Needs a job of trees" in contents_of_run(Path(job.output), reports, viewer).absent["alone"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "secureboost", "membership": "hidden"}, "hides the decisions of trees"),
        ({"protocol": "secureboost", "inference": "shared"}, "hides the decisions of trees"),
        ({"protocol": "quasi-newton"}, "a column adds its weight times"),
        ({"protocol": "secureboost"}, "treaty explain"),
    ],
)
def test_contributions_are_only_promised_if_they_can_be_computed(job, options, said):
    _, reports, viewer = read_run(Path(job.output))
    reports[viewer] = msgspec.structs.replace(reports[viewer], options=options)
    reason = contents_of_run(Path(job.output), reports, viewer).absent["shap"]
    assert said in reason
    assert ("treaty explain" in reason) == (said == "treaty explain")


def test_another_partys_view_has_its_columns_and_no_losses(job, tmp_path):
    for arguments in ([job.output, "--as", "b"], [str(Path(job.output) / "b.report.json")]):
        out = tmp_path / "b.html"
        run(*arguments, "--output", str(out))
        text = out.read_text()
        assert [name for name in columns_of(job, "a") + columns_of(job, "c") if name in text] == []
        assert "b has no losses" in text
        assert "Number of splits on a column" in text


def test_one_partys_report_alone_has_both_directions(job, tmp_path):
    shutil.copy(Path(job.output) / "b.report.json", tmp_path)
    said = run(str(tmp_path))
    assert "b: wrote" in said
    text = (tmp_path / "b.report.html").read_text()
    assert "not noted" in text  # how many messages the other sent
    assert "a\u00a0→ b" in text
    _, reports, viewer = read_run(tmp_path)
    shown = contents_of_run(tmp_path, reports, viewer)
    assert {pair: sum(steps) for pair, steps in shown.timeline.pairs.items()} == {
        pair: totals["bytes"] for pair, totals in shown.sent.items()
    }


def test_a_report_of_an_earlier_treaty_says_that_it_has_no_times(job, tmp_path):
    old = read_json(Path(job.output) / "b.report.json", Report, FORMAT, "b")
    write_json(tmp_path / "b.report.json", msgspec.structs.replace(old, timeline=None, received={}), FORMAT, "b")
    _, reports, viewer = read_run(tmp_path)
    assert "noted no times of messages" in page(contents_of_run(tmp_path, reports, viewer))


def test_pooled_curves_stand_beside(job, tmp_path):
    X = pd.read_csv(job.parties["a"].table)
    pooled = treaty.GBDTClassifier(n_estimators=2).fit(
        X.drop(columns="y"), X["y"], eval_set=(X.drop(columns="y"), X["y"])
    )
    pooled.save(tmp_path / "pooled")
    out = tmp_path / "out.html"
    run(job.output, "--output", str(out), "--pooled", str(tmp_path / "pooled"))
    assert ">eval_0, pooled</text>" in out.read_text()
    without = tmp_path / "without.html"
    run(job.output, "--output", str(without))
    assert "pooled</text>" not in without.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "secureboost"])
def test_every_systems_job_has_a_report_for_every_party(system, tmp_path):
    job = played_job(tmp_path, system)
    for name in job.parties:
        out = tmp_path / f"{name}.html"
        run(job.output, "--as", name, "--output", str(out))
        text = out.read_text()
        shown = re.findall(r'<section id="(\w+)"', text)
        listed = re.findall(r"<li>([^:<]+): ", text.partition('id="missing"')[2])
        assert len({*shown, *listed} - {"missing"}) == len(shown) - 1 + len(listed)
        assert len(shown) - 1 + len(set(listed) - {_TITLES["alone"]}) == 13
        own = read_json(Path(job.output) / f"{name}.report.json", Report, FORMAT, name)
        said = html.unescape(text)
        assert all(fact in said for facts in own.learned.values() for fact in facts)
        assert own.spent in said
    run(str(tmp_path / "job.toml"), "--output", str(tmp_path / "lead.html"))


# ---------------------------------------------------------------- predictions with labels


def written(folder: Path, *, ids: bool) -> tuple[Path, Path, np.ndarray, np.ndarray]:
    """Write predictions as ``treaty predict`` does, and labels, in another order where there are ids."""
    rng = np.random.default_rng(0)
    y, p = rng.integers(0, 2, 50), rng.random(50)
    key = {"person": np.array([f"p{k}" for k in range(50)])} if ids else {}
    columns = {**key, "prediction": (p > 0.5).astype(int), "probability_0": 1 - p, "probability_1": p}
    write_predictions(folder / "p.csv", columns)
    at = rng.permutation(50) if ids else np.arange(50)
    pd.DataFrame({**{name: of[at] for name, of in key.items()}, "y": y[at]}).to_csv(folder / "y.csv", index=False)
    return folder / "p.csv", folder / "y.csv", y, p


@pytest.mark.parametrize("ids", [False, True], ids=["by order", "by id"])
def test_predictions_and_labels_of_the_same_rows_are_scored(tmp_path, ids):
    predictions, labels, y, p = written(tmp_path, ids=ids)
    scores = read_scores(predictions, labels, "y")
    assert scores.values["this model"]["AUC"] == pytest.approx(roc_auc_score(y, p))


def test_a_job_with_predictions_has_a_roc(job, tmp_path):
    predictions, labels, *_ = written(tmp_path, ids=False)
    out = tmp_path / "out.html"
    run(job.output, "--output", str(out), "--predictions", str(predictions), "--labels", str(labels), "--label", "y")
    sections = dict(re.findall(r'<section id="(\w+)"(.*?)</section>', out.read_text(), re.DOTALL))
    assert "<svg" in sections["roc"]
    assert "<svg" in sections["calibration"]


def test_numbers_are_scored_without_a_roc(tmp_path):
    write_predictions(tmp_path / "p.csv", {"prediction": np.array([1.0, 2.0, 3.0])})
    pd.DataFrame({"y": [1.0, 2.0, 5.0]}).to_csv(tmp_path / "y.csv", index=False)
    scores = read_scores(tmp_path / "p.csv", tmp_path / "y.csv", "y")
    assert scores.values["this model"]["mean absolute error"] == pytest.approx(2 / 3)
    assert scores.of_numbers


def test_rows_that_do_not_go_together_are_refused(tmp_path):
    predictions, labels, *_ = written(tmp_path, ids=True)
    table = pd.read_csv(labels)
    table.iloc[1:].to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(DataError, match="every predicted row once in column 'person'"):
        read_scores(predictions, tmp_path / "short.csv", "y")
    table.assign(y=7).to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(DataError, match="labels of 0, 1, got others"):
        read_scores(predictions, tmp_path / "other.csv", "y")
    table[["y"]].iloc[1:].to_csv(tmp_path / "few.csv", index=False)
    with pytest.raises(DataError, match="labels of 50 predicted rows, got 49"):
        read_scores(predictions, tmp_path / "few.csv", "y")
    with pytest.raises(ConfigError, match="expected --label to be one of person, y"):
        read_scores(predictions, labels, "z")
    with pytest.raises(ConfigError, match="no column 'prediction'"):
        read_scores(labels, labels, "y")


# ---------------------------------------------------------------- refused


def test_what_is_no_run_is_refused(job, tmp_path):
    with pytest.raises(ConfigError, match="got nothing"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"with a NAME\.report\.json of each party, got none"):
        read_run(tmp_path)
    (tmp_path / "x.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match="got another file"):
        read_run(tmp_path / "x.csv")
    (tmp_path / "b.report.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected a report of Treaty, got a file of another kind"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="expected a report of a, b, c, got --as d"):
        read_run(Path(job.output), "d")


def test_several_parties_without_the_labels_have_to_be_told_apart(job, tmp_path):
    for name in "bc":
        shutil.copy(Path(job.output) / f"{name}.report.json", tmp_path)
    with pytest.raises(ConfigError, match="several parties have reports"):
        read_run(tmp_path)
    assert read_run(tmp_path, "c")[2] == "c"


def test_the_command_refuses_before_it_draws(job, tmp_path):
    for arguments, said in (
        ([job.output, "--output", str(tmp_path)], "got a folder"),
        ([job.output, "--output", str(tmp_path / "x.html"), "--label", "y"], "go together"),
    ):
        with pytest.raises(ConfigError, match=said):
            CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_writes_a_report_beside_the_pooled_table(tmp_path):
    out = tmp_path / "demo.html"
    arguments = ["demo", "--trees", "2", "--transport", "memory", "--report", str(out)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "wrote" in done.stdout
    text = out.read_text()
    assert "this model, pooled</text>" in text
    assert text.count("<svg") == 6
    with pytest.raises(ConfigError, match="there is no folder"):
        CliRunner().invoke(app, ["demo", "--report", str(tmp_path / "no" / "x.html")], catch_exceptions=False)


def test_categories_that_share_a_bin_are_in_the_check_the_log_and_the_report(tmp_path, caplog):
    write_job(tmp_path, "secureboost")
    table = pd.read_csv(tmp_path / "b.csv")
    table["code"] = [f"k{row % 90}x" for row in range(len(table))]
    table.to_csv(tmp_path / "b.csv", index=False)
    job = load_job(tmp_path / "job.toml")
    job.common["max_categories"] = 64
    expected = "column 'code' has 90 categories, and max_categories is 64: its 27 rarest"
    (finding,) = [of.said for of in check_own(job, "b") if of.what == "table"]
    assert expected in finding
    assert played(dict.fromkeys(job.parties, job)) == {}
    assert f"b: {expected}" in caplog.text
    kept = read_json(report_file(job, "b"), Report, FORMAT, "b")
    assert [expected in sentence for sentence in kept.joined] == [True]
    assert any(expected in note for note in contents_of_run(*read_run(Path(job.output), "b")).notes)
