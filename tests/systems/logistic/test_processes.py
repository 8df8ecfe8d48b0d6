"""`LogisticRegression` between parties, in threads and in processes, and job files of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import treaty
from flat import flat, option_lines
from runs.job_files import started_to_die
from tables import cut_for_active, real_table
from treaty.cli import jobs as cli
from treaty.cli.main import app
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.files import read_file
from treaty.models.checkpoints import LINEAR, LinearCheckpoint
from treaty.models.linear import LinearPart, preparation_of
from treaty.node.identity import make_keys
from treaty.runs.job import Job
from treaty.runs.job_files import check_training, load_job
from treaty.runs.prediction import find_part, predict_party
from treaty.runs.processes import PartyFailure, run_all
from treaty.runs.report import load_reports
from treaty.systems.logistic.batches import FORMAT, _Kept

GIVEN = {"batch_size": 120, "max_iter": 2, "period": 1, "tol": 0.0, "random_state": 3}


@pytest.fixture(scope="module")
def split():
    X, y = real_table("binary", rows=260)
    return cut_for_active(X, 3), np.where(y == 1, "benign", "malignant")


@pytest.fixture(scope="module")
def pooled(split):
    return treaty.LogisticRegression("pooled", **GIVEN).fit(*split)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*rows have a margin beyond 4:UserWarning")
@pytest.mark.parametrize("protocol", ["quasi-newton", "sgd"])
def test_fit_between_threads_gives_the_pooled_model(split, protocol, tmp_path):
    X, y = split
    given = GIVEN | ({"learning_rate": 0.15} if protocol == "sgd" else {})  # margins of few rows grow large at 0.3
    alone = treaty.LogisticRegression(treaty.Pooled(solver=protocol), **given).fit(X, y)
    model = treaty.LogisticRegression(protocol, **given).fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X), alone.predict_proba(X), atol=1e-6)
    np.testing.assert_allclose(model.loss_history_, alone.loss_history_, atol=1e-6)
    assert (model.predict(X) == alone.predict(X)).all()
    assert set(model.parts_) == {"p0", "p1", "p2"}
    assert model.parts_["p1"].intercept is None
    assert {part.encryption for part in model.parts_.values()} == {"lattice"}
    assert set(model.disclosures_) == {"p0", "p1", "p2", "coordinator"}
    assert all("alone in " in " ".join(model.disclosures_[name]) for name in ("p0", "p1", "p2"))
    assert "p1 -> coordinator" in model.communication_
    assert model.timings_["training"] > 0
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(treaty.load(tmp_path / "model").predict_proba(X), model.predict_proba(X))


def test_weights_of_rows_and_paper_mode_are_refused_without_consent(split):
    X, y = split
    with pytest.raises(ConfigError, match="set show_weights=True in SGD at every party"):
        treaty.LogisticRegression("sgd", **GIVEN).fit(X, y, sample_weight=np.ones(260))
    with pytest.raises(ConfigError, match="allow_insecure"):
        treaty.LogisticRegression(treaty.SGD(mode="paper"), **GIVEN).fit(X, y)


@pytest.mark.slow
def test_disclosures_name_what_is_worse_in_paper_mode_and_without_a_coordinator(split):
    X, y = split
    fast = {**GIVEN, "insecure_test_key_bits": 768, "allow_insecure": True, "max_iter": 1}
    paper = flat(treaty.LogisticRegression, "quasi-newton", mode="paper", **fast).fit(X, y)
    assert "every gradient" in " ".join(paper.disclosures_["coordinator"])
    assert paper.parts_["p0"].encryption == "paillier"
    two = flat(treaty.LogisticRegression, "quasi-newton", coordinator=False, **fast).fit(X, y)
    assert two.parts_["p0"].encryption == "ou"
    assert set(two.disclosures_) == {"p0", "p1", "p2"}
    assert "inner products" in " ".join(two.disclosures_["p0"])
    for model in (paper, two):
        assert all("768 bits" in " ".join(model.disclosures_[name]) for name in ("p0", "p1", "p2"))


@pytest.mark.slow
def test_fit_between_processes_gives_the_pooled_model(split, pooled):
    X, y = split
    model = treaty.LogisticRegression(
        treaty.QuasiNewton(coordinator=False, encryption="lattice"), transport="tls", **GIVEN
    ).fit(X, y)
    model.transport = "memory"
    np.testing.assert_allclose(model.predict_proba(X), pooled.predict_proba(X), atol=1e-6)
    assert list(model.classes_) == ["benign", "malignant"]
    assert model.n_iter_ == 2


def test_the_coordinator_that_fit_plays_has_a_name_that_a_certificate_may_bear(split):
    X, y = split
    taken = dict(zip(("coordinator", "coordinator-2", "p2"), X.values(), strict=True))
    model = treaty.LogisticRegression("sgd", **{**GIVEN, "max_iter": 1}).fit(taken, y)
    assert set(model.disclosures_) - set(taken) == {"coordinator-3"}


def job_file(folder: Path, split, **options) -> Path:
    """A job of three parties with data, ids in different orders, and a coordinator."""
    X, y = split
    rng = np.random.default_rng(0)
    protocol, given = option_lines(**{"protocol": "quasi-newton", **GIVEN, **options})
    lines = ['name = "logistic"', protocol, 'active = "p0"', 'label = "kind"', "[align]", 'on = "id"', *given]
    for name, part in X.items():
        table = part.assign(id=[f"person {k}" for k in range(len(part))])
        if name == "p0":
            table["kind"] = y
        table.iloc[rng.permutation(len(table))].to_csv(folder / f"{name}.csv", index=False)
        lines += [f"[parties.{name}]", f'table = "{name}.csv"', f'predict_table = "{name}.csv"']
    lines += ["[parties.lead]", 'role = "coordinator"']
    path = folder / "job.toml"
    path.write_text("\n".join(lines).replace("'", '"') + "\n")
    return path


@pytest.fixture(scope="module")
def trained(split, tmp_path_factory) -> Path:
    """Return the job of a finished training of four processes."""
    path = job_file(tmp_path_factory.mktemp("trained"), split)
    run_all(load_job(path), "train")
    return path


@pytest.fixture(scope="module")
def longer(split, tmp_path_factory) -> Job:
    """Return the job of a finished training of eight epochs."""
    job = load_job(job_file(tmp_path_factory.mktemp("longer"), split, max_iter=8))
    run_all(job, "train")
    return job


def test_a_job_file_is_trained_in_processes(trained):
    job, folder = load_job(trained), trained.parent
    assert job.roles().of == {"p0": "active", "p1": "passive", "p2": "passive", "lead": "coordinator"}
    weights = np.concatenate([find_part(job, name).coef for name in job.roles().owners])
    assert len(weights) == 12
    assert (folder / "p0.batches").exists(), "the partition is kept beside the table"
    assert (folder / "model" / "lead.report.json").exists()
    assert not (folder / "model" / "lead.part").exists()


@pytest.mark.slow
def test_the_model_of_a_job_file_predicts_in_processes(trained, split, pooled, tmp_path):
    job = load_job(trained)
    run_all(job, "predict", arguments={job.active: ["--output", str(tmp_path / "out.csv")]})
    found = pd.read_csv(tmp_path / "out.csv")
    assert set(found.columns) == {"id", "prediction", "probability_benign", "probability_malignant"}
    assert found.set_index("id").loc["person 0", "prediction"] in ("benign", "malignant")
    agreement = found.set_index("id")["prediction"].reindex([f"person {k}" for k in range(260)]).to_numpy()
    assert (agreement == pooled.predict(split[0])).mean() > 0.95  # rows came in another order: other batches


@pytest.mark.slow
def test_an_aligned_job_run_again_has_the_same_rows_in_the_same_batches(split, tmp_path):
    tables = {"p0": split[0]["p0"], "p1": split[0]["p1"].join(split[0]["p2"])}
    path = job_file(tmp_path, (tables, split[1]), coordinator=False, encryption="lattice", max_iter=1)
    text = path.read_text().replace("random_state = 3\n", "")
    path.write_text(text.removesuffix('[parties.lead]\nrole = "coordinator"\n'))
    kept, weights = [], []
    for seed in range(2):
        run_all(load_job(path), "train")
        kept.append([read_file(tmp_path / f"p{k}.batches", _Kept, FORMAT).entries for k in range(2)])
        weights.append(np.concatenate([find_part(load_job(path), f"p{k}").coef for k in range(2)]))
        table = pd.read_csv(tmp_path / "p0.csv").assign(more=1.0)  # a column more, rows in another order
        table.sample(frac=1.0, random_state=seed).to_csv(tmp_path / "p0.csv", index=False)
    assert [len(entries) for entries in kept[1]] == [1, 1]
    assert kept[0] == kept[1]
    np.testing.assert_allclose(np.delete(weights[1], len(split[0]["p0"].columns)), weights[0], atol=1e-9)


@pytest.mark.slow
def test_a_job_with_weights_that_is_cut_off_says_what_was_told_and_that_it_was_cut_off(split, tmp_path, caplog):
    path = job_file(tmp_path, split, show_weights=True, tol=1e-5, coordinator=False, encryption="lattice")
    text = path.read_text().replace("[align]", 'weight = "mean radius"\n[align]')
    path.write_text(text.removesuffix('[parties.lead]\nrole = "coordinator"\n'))
    done = CliRunner().invoke(app, ["train", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    job = load_job(path)
    reports, part = load_reports(job), find_part(job, "p0")
    assert "the weights of all rows" in " ".join(reports["p1"].learned["p2"])
    assert "mean radius" not in part.column_names()
    said = "training ended after max_iter=2 epochs without a steady loss"
    assert said in reports["p0"].unsettled
    assert sum(said in line for line in caplog.messages) == 1, "said once, by the party that has the losses"
    assert part.calibration is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "kind", "number"),
    [("p0", "EpochEnd", 10), ("p1", "InnerProducts", 9), ("lead", "StepCoefficients", 25)],
)
def test_a_killed_training_resumes_to_the_identical_model(split, longer, tmp_path, monkeypatch, victim, kind, number):
    cut = load_job(job_file(tmp_path, split, max_iter=8))
    with monkeypatch.context() as patched:
        started_to_die(patched, victim, (kind, number, ""))
        with pytest.raises(PartyFailure):
            run_all(cut, "train")
    kept = read_file(tmp_path / "model" / "p2.checkpoint", LinearCheckpoint, LINEAR)
    assert 1 <= kept.states[-1].epochs < 8
    run_all(cut, "train", arguments={"p0": ["--resume"]})
    for name in ("p0", "p1", "p2"):
        np.testing.assert_array_equal(find_part(cut, name).coef, find_part(longer, name).coef)
    assert find_part(cut, "p0").model_id == kept.model_id
    assert not list((tmp_path / "model").glob("*.checkpoint"))


def test_jobs_whose_roles_do_not_fit_are_refused(split, tmp_path):
    path = job_file(tmp_path, split)
    text = path.read_text()
    for wrong, words in [
        (text.replace('role = "coordinator"', 'role = "coordinator"\ntable = "p1.csv"'), "to have no table"),
        (text + '[parties.two]\nrole = "coordinator"\n', "at one party"),
        (text.replace("[quasi-newton]", "[quasi-newton]\ncoordinator = false"), "at one party"),
        (text.replace('"quasi-newton"', '"secureboost"').replace("batch_size = 120", ""), "no role and edge|option"),
    ]:
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=words):
            check_training(load_job(path))
    path.write_text(text)
    job = load_job(path)
    with pytest.raises(ConfigError, match="lead, the coordinator, has no part of the model"):
        predict_party(job, "lead")


def test_a_coordinator_with_the_key_of_a_data_party_is_refused(split, tmp_path):
    job = load_job(job_file(tmp_path, split))
    for name in job.parties:
        make_keys(tmp_path, name)
    named = {
        name: msgspec.structs.replace(member, certificate=str(tmp_path / f"{name}.cert.pem"))
        for name, member in job.parties.items()
    }
    check_training(msgspec.structs.replace(job, parties=named))
    named["lead"] = msgspec.structs.replace(named["lead"], certificate=named["p2"].certificate)
    with pytest.raises(ConfigError, match="same key as p2"):
        check_training(msgspec.structs.replace(job, parties=named))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[align]", 'task = "regression"\n[align]'), 'task = "regression"'),
        (('table = "p1.csv"', 'table = "p1.csv"\neval_tables = ["p1.csv"]'), "set show_eval_margins=True"),
        (('table = "p0.csv"', 'table = "p0.csv"\nnoisy_labels = "p0.noisy"'), r"parties\.p0\.noisy_labels"),
        (('role = "coordinator"', 'role = "coordinator"\n[parties.two]\nrole = "dealer"'), 'role = "dealer"'),
    ],
    ids=["task", "eval_tables", "noisy_labels", "dealer"],
)
def test_what_a_job_does_not_have_is_refused_before_anybody_connects(split, tmp_path, change, words):
    path = job_file(tmp_path, split)
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(ConfigError, match=words):
        check_training(load_job(path))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train", "--as", "nobody"], "expected --as to be one of p0, p1, p2, lead, got 'nobody'"),
        (["predict", "--as", "nobody"], "expected --as to be one of p0, p1, p2, lead, got 'nobody'"),
        (["explain"], "contributions .* exist for trees only"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_commands_that_do_not_fit_a_job_of_logistic_regression_say_so(split, tmp_path, command, words):
    path = job_file(tmp_path, split)
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, [command[0], str(path), *command[1:]], catch_exceptions=False)


@pytest.mark.slow
def test_labels_that_are_not_of_two_classes_name_party_column_and_count(split, tmp_path):
    X, _ = split
    y = np.array(["a", "b", "c"])[np.arange(260) % 3]
    with pytest.raises(PartyFailure, match=r"^p0: expected labels of two classes in column 'kind', got 3 "):
        run_all(load_job(job_file(tmp_path, (X, y))), "train")


def test_predict_warns_of_margins_beyond_the_range_of_the_taylor_loss(split, tmp_path, monkeypatch):
    job_file(tmp_path, split)
    part = LinearPart(
        model_id="", party="p0", schema=Schema((), ()), preparation=preparation_of(Table(Schema((), ()), [], 1)),
        coef=np.zeros(0), intercept=0.0, classes=["benign", "malignant"],
    )  # fmt: skip
    monkeypatch.setattr(cli.prediction, "find_part", lambda job, name: part)
    for scale in (3.9, 4.1):
        found = scale * np.array([-1.0, 0.5, 1.0])
        monkeypatch.setattr(cli.prediction, "predict_party", lambda job, name, steps, found=found: (range(3), found))
        path = tmp_path / "job.toml"
        command = ["predict", str(path), "--as", "p0", "--output", str(tmp_path / "out.csv")]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0
        assert ("66.7% of rows have a margin beyond 4" in done.stderr) == (scale > 4)


@pytest.mark.slow
def test_a_job_of_numbers_writes_each_party_its_standard_errors(tmp_path):
    """Of counts; of the linear family, between processes, see `test_glm`."""
    X, y = real_table("regression", rows=300)
    tables = {"p0": X.iloc[:, [0, 2]], "p1": X.iloc[:, [3, 8]]}
    y = np.floor(y / 40.0)
    given = {"family": "poisson", "standard_errors": True, "tol": 1e-6, "max_iter": 30, "coordinator": False}
    path = job_file(tmp_path, (tables, y), **given, period=4, batch_size=1000)
    text = path.read_text().replace("[align]", 'task = "regression"\n[align]', 1)
    path.write_text(text.removesuffix('[parties.lead]\nrole = "coordinator"\n'))
    run_all(load_job(path), "train")
    alone = treaty.PoissonRegressor(standard_errors=True, tol=1e-6).fit(tables, y)
    for name in tables:
        found = pd.read_csv(tmp_path / "model" / f"{name}.weights.csv")
        assert list(found["column"]) == [*tables[name].columns, *(["intercept"] if name == "p0" else [])]
        np.testing.assert_allclose(found["standard_error"], alone.standard_errors_[name], rtol=1e-5)
        np.testing.assert_allclose(found["coef"][: len(tables[name].columns)], alone.coef_[name], rtol=1e-4)
        np.testing.assert_allclose(found["p_value"], alone.p_values_[name], rtol=1e-2, atol=1e-12)
    run_all(load_job(path), "predict", arguments={"p0": ["--output", str(tmp_path / "out.csv")]})
    predicted = pd.read_csv(tmp_path / "out.csv").set_index("id")["prediction"]
    expected = alone.predict(tables)
    np.testing.assert_allclose(predicted.reindex([f"person {k}" for k in range(300)]), expected, rtol=1e-4)


@pytest.mark.slow
def test_a_job_of_several_classes_predicts_them_all(tmp_path):
    X, y = real_table("multiclass", rows=178)
    tables = {"p0": X.iloc[:, :4], "p1": X.iloc[:, 4:6]}
    path = job_file(tmp_path, (tables, np.array(["a", "b", "c"])[y]), max_iter=30, batch_size=1000)
    path.write_text(path.read_text().replace("[align]", "classes = 3\n[align]", 1))
    run_all(load_job(path), "train")
    run_all(load_job(path), "predict", arguments={"p0": ["--output", str(tmp_path / "out.csv")]})
    found = pd.read_csv(tmp_path / "out.csv")
    assert set(found.columns) == {"id", "prediction", "probability_a", "probability_b", "probability_c"}
    found = found.set_index("id").reindex([f"person {k}" for k in range(178)])
    alone = treaty.LogisticRegression().fit(tables, np.array(["a", "b", "c"])[y])
    np.testing.assert_allclose(found.filter(like="probability").to_numpy(), alone.predict_proba(tables), atol=1e-3)
    path.write_text(path.read_text().replace("classes = 3", "classes = 4"))
    with pytest.raises(PartyFailure, match=r"p0: expected labels of 4 classes in column 'kind', got 3 different"):
        run_all(load_job(path), "train")
