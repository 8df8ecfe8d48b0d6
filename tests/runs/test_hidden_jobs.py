"""Jobs with hidden rows between processes: what commands say of them, and a party that dies and begins again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import treaty
from html_pages import Parsed
from runs.job_files import finish, start, wait_for_rounds
from runs.small_jobs import model, write_job
from treaty.attacks.auditing import findings_of_records
from treaty.cli.main import app
from treaty.runs.job_files import load_job
from treaty.runs.prediction import check_explainable
from treaty.runs.processes import PartyFailure, run_all

TREES = {
    "n_estimators": 4,
    "max_depth": 4,
    "min_child_samples": 3,
    "learning_rate": 0.3,
    "max_bin": 8,
    "objective": "logistic_pieces",
}
GIVEN = {"membership": "hidden", **TREES}, {"a": "", "b": ""}


KNOWN = {name: value for name, value in TREES.items() if name != "objective"}
SHARED = {**KNOWN, "inference": "shared"}, {"a": "", "b": "", "c": ""}


def write(folder: Path, given: tuple[dict[str, object], dict[str, str]] = GIVEN) -> Path:
    write_job(folder, "secureboost", given)
    job = folder / "job.toml"
    text = job.read_text().replace("allow_exact_sums = true\n", "").replace("reconnect = 75", "reconnect = 5")
    for name in given[1]:
        table = f'table = "{name}.csv"'
        text = text.replace(table, f'{table}\npredict_table = "{name}.new.csv"\nrecord = "seen"')
        # rows that were not trained on
        (pd.read_csv(folder / f"{name}.csv") * 1.01 + 0.01).to_csv(folder / f"{name}.new.csv", index=False)
    job.write_text(text)
    return job


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = write(tmp_path_factory.mktemp("hidden"))
    run_all(load_job(job), "train")
    return job


def said(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


def assert_predicts_as_pooled(job: Path, names: str, **options: object) -> None:
    run_all(load_job(job), "predict")
    tables = []
    for file in ("csv", "new.csv"):
        first, *others = (pd.read_csv(job.parent / f"{name}.{file}") for name in names)
        tables.append((pd.concat([first.drop(columns="y"), *others], axis=1), first["y"]))
    pooled, x = treaty.GBDTClassifier("pooled", **options).fit(*tables[0]), tables[1][0]
    found = pd.read_csv(job.parent / "model" / "predictions.csv")
    columns = [name for name in found if found[name].dtype == float]
    np.testing.assert_allclose(found[columns[-1]], pooled.predict_proba(x)[:, 1], rtol=1e-6)


def test_predictions_are_those_of_the_pooled_model(trained: Path) -> None:
    assert_predicts_as_pooled(trained, "ab", **TREES)


def test_predictions_of_training_rows_are_refused_or_rounded(trained: Path) -> None:
    job = trained.with_name("same.toml")
    job.write_text(trained.read_text().replace(".new.csv", ".csv"))
    with pytest.raises(PartyFailure, match="b: 180 of 180 rows to predict were trained on with hidden rows"):
        run_all(load_job(job), "predict")
    job.write_text(job.read_text().replace('"hidden"', '"hidden"\ntraining_rows = "rounded"'))
    run_all(load_job(job), "predict")
    found = pd.read_csv(trained.parent / "model" / "predictions.csv")
    columns = [name for name in found if found[name].dtype == float]
    assert 1 < found[columns[-1]].nunique() < 9


def test_predictions_on_shares_of_three_parties_are_those_of_the_pooled_model(tmp_path: Path) -> None:
    """Passive parties sign what they make pads from; rows were known in training."""
    job = write(tmp_path, SHARED)
    text = job.read_text()
    job.write_text(text.replace('inference = "shared"\n', ""))
    run_all(load_job(job), "train")
    job.write_text(text)
    assert_predicts_as_pooled(job, "abc", **KNOWN)
    with pytest.raises(treaty.ConfigError, match='inference="shared" hides the decisions that contributions'):
        check_explainable(load_job(job))


def test_show_and_report_count_splits_and_say_what_was_learned(trained: Path) -> None:
    for name in "ab":
        shown = said("show", trained.parent / "model" / f"{name}.part")
        assert "gain" not in shown.split("own column")[1].splitlines()[0]
        assert f"{name} learned: in training, no sum, no row of a node" in shown
        said("report", trained.parent / "model", "--as", name)
        page = (trained.parent / "model" / f"{name}.report.html").read_text()
        assert f"Number of splits on a column; {name} does not know their gains" in page
        assert "importances" in Parsed(page).sections
    assert "encryption: lattice, rows of nodes are hidden, estimated about" in said(
        "show", trained.parent / "model" / "a.part"
    )


def test_no_attack_finds_a_bin_in_the_records(trained: Path) -> None:
    found, _, _ = findings_of_records([trained.parent / "seen"])
    assert {(one.attack, one.score) for one in found if one.party == "a"} == {
        ("exact sums", 0.0),
        ("nested sides", 0.0),
    }
    assert {one.target for one in found if one.party == "b"} == {"labels"}
    output = said("audit", trained.parent / "seen")
    assert "a received in the clear, as stated by its messages: the owner of each node's split" in output
    assert "no statement covers" not in output


def test_contributions_are_refused_with_and_without_the_option(trained: Path) -> None:
    with pytest.raises(PartyFailure, match="hidden rows have no decisions that contributions could be made of"):
        run_all(load_job(trained), "explain")
    # a job that names the model's folder, and leaves the option out at both parties
    opened = trained.with_name("opened.toml")
    opened.write_text(trained.read_text().replace('membership = "hidden"\n', ""))
    for verb in ("explain", "predict"):
        with pytest.raises(PartyFailure, match='trained with hidden rows: expected membership="hidden"'):
            run_all(load_job(opened), verb)


def assert_resumes(job: Path, whole: Path, names: str, dies: tuple[str, tuple[str, int, str]]) -> None:
    """Fail unless a party that dies is named by the active one, and the same model comes of the job begun again."""
    kept, (dying, when) = job.parent / "model" / "a.checkpoint", dies
    processes = {name: start(job, name, **({"dies": when} if name == dying else {})) for name in names}
    wait_for_rounds(processes, kept, 1)
    ended = finish(processes, 60)
    assert ended["a"][0] not in (0, None)
    assert dying in ended["a"][1].splitlines()[-1]
    assert kept.exists()
    again = finish({name: start(job, name, resume=True) for name in names}, 60)
    assert {code for code, _ in again.values()} == {0}, again
    ours, theirs = model(load_job(job)), model(load_job(whole))
    np.testing.assert_equal(ours, theirs)
    assert not kept.exists()


def test_a_party_that_dies_is_named_and_the_job_resumes(trained: Path, tmp_path: Path) -> None:
    assert_resumes(write(tmp_path), trained, "ab", ("b", ("WeightShares", 3, "")))


def test_three_parties_sign_keys_predict_and_resume_after_the_last_one_died(tmp_path: Path) -> None:
    given = GIVEN[0], {"a": "", "b": "", "c": ""}
    whole, job = (tmp_path / name for name in ("whole", "job"))
    for folder in (whole, job):
        folder.mkdir()
    trained = write(whole, given)
    run_all(load_job(trained), "train")
    assert_predicts_as_pooled(trained, "abc", **TREES)
    # an answer of each level, and one where it has splits
    assert_resumes(write(job, given), trained, "abc", ("c", ("SealedStep", 2 + 2 * 2 * TREES["max_depth"], "")))
