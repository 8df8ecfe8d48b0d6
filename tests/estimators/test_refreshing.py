"""New leaf weights for a finished model from other rows (`process_type`): XGBoost's, and the same between parties."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

import treaty
from runs.job_files import train_in_threads
from runs.small_jobs import write_job
from tables import FAST_KEY, assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.cli import jobs
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.models.trees import forest_of, load_part
from treaty.runs import processes
from treaty.runs.job_files import check_training, load_job
from treaty.runs.party import part_file
from treaty.runs.rows import earlier_part

SMALL = {"n_estimators": 3, "max_bin": 16, "min_child_samples": 5, "n_jobs": 1}
OPEN = treaty.SecureBoost(**{name: of for name, of in FAST_KEY.items() if name not in ("protocol", "n_jobs")})
SYSTEMS = {
    "open": OPEN,
    "lattice": treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
    "default": treaty.SecureBoost(),
    "auto": treaty.SecureBoost(sums="open", allow_exact_sums=True),
    "smm": treaty.FedXGBoostSMM(),
}
LOSSES = {
    "binary": (treaty.GBDTClassifier, {}),
    "multiclass": (treaty.GBDTClassifier, {"num_parallel_tree": 2}),
    "multi_output": (treaty.GBDTClassifier, {"multi_strategy": "multi_output_tree"}),
    "regression": (treaty.GBDTRegressor, {"reg_alpha": 0.2}),
    "median": (treaty.GBDTRegressor, {"objective": "absolute_error"}),
}


def of_loss(name, rows=178):
    kind, options = LOSSES[name]
    task = {"multi_output": "multiclass", "median": "regression"}.get(name, name)
    X, y = real_table(task, rows=rows)
    return kind, {**SMALL, **options}, with_categories(with_gaps(X)), y


@pytest.mark.parametrize("loss", LOSSES)
def test_refreshed_on_its_own_rows_a_model_is_what_it_was(loss):
    kind, options, X, y = of_loss(loss)
    weight = np.random.default_rng(0).exponential(size=len(y))
    first = kind(**options).fit(X, y, weight, eval_set=(X, y))
    again = kind(**options, process_type="update").fit(X, y, weight, eval_set=(X, y), xgb_model=first)
    ours, theirs = (forest_of(list(of.parts_.values())) for of in (again, first))
    assert ours.rounds == theirs.rounds == 3
    assert again.evals_result_ == first.evals_result_
    for mine, other in zip(ours.trees, theirs.trees, strict=True):
        np.testing.assert_array_equal(mine.value, other.value)
        np.testing.assert_array_equal(mine.count, other.count)
        np.testing.assert_array_equal(mine.record, other.record)
        if loss != "multi_output":  # gains and covers are those of each class, and no more shared
            np.testing.assert_allclose(mine.gain, other.gain, rtol=1e-9)
            np.testing.assert_array_equal(mine.cover, other.cover)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_leaves_are_those_of_xgboosts_refresh(task):
    xgboost = pytest.importorskip("xgboost")
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    X, y = real_table(task)
    X = with_gaps(X.round(1))
    old, new = slice(0, 80), slice(80, None)
    options = {"n_estimators": 4, "max_depth": 4, "base_score": 0.5, "fractional_bits": 24, "min_child_samples": 2}
    first = kind(**options).fit(X[old], y[old])
    ours = kind(**options, process_type="update").fit(X[new], y[new], xgb_model=first)
    objective = {"binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror"}[task]
    parameters = {
        "process_type": "update", "updater": "refresh", "refresh_leaf": True, "objective": objective, "eta": 0.3,
        "base_score": 0.5, "num_class": 3 if task == "multiclass" else None, "max_depth": 4, "verbosity": 0,
    }  # fmt: skip
    parameters = {name: of for name, of in parameters.items() if of is not None}
    theirs = xgboost.train(parameters, xgboost.DMatrix(X[new], y[new]), 4, xgb_model=first.to_xgboost())
    margins = theirs.predict(xgboost.DMatrix(X), output_margin=True)
    found = ours.predict(X) if task == "regression" else ours.decision_function(X)
    assert np.abs(margins - first.to_xgboost().predict(xgboost.DMatrix(X), output_margin=True)).max() > 0.05
    np.testing.assert_allclose(found, margins, rtol=1e-4, atol=1e-4)
    gains = [of.trees_to_dataframe().query("Feature != 'Leaf'")["Gain"] for of in (ours.to_xgboost(), theirs)]
    np.testing.assert_allclose(*gains, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("system", "parties", "loss"),
    [
        ("open", 3, "multiclass"),
        ("lattice", 2, "multi_output"),
        ("default", 2, "binary"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            ("auto", 5, "regression"), ("smm", 3, "binary"), ("open", 2, "median"), ("default", 5, "regression"),
        ]),
    ],
)  # fmt: skip
def test_parties_refresh_to_the_leaves_of_one_table(system, parties, loss):
    kind, options, X, y = of_loss(loss)
    options["n_estimators"] = 2
    old, new = cut(X[:90], parties), cut(X[90:].reset_index(drop=True), parties)
    grown = kind(SYSTEMS["lattice" if loss == "multi_output" else "open"], **options).fit(old, y[:90])
    options["process_type"] = "update"
    federated = kind(SYSTEMS[system], **options).fit(new, y[90:], eval_set=(old, y[:90]), xgb_model=grown)
    whole = kind("pooled", **{**options, "process_type": "default"}).fit(old, y[:90])
    pooled = kind("pooled", **options).fit(new, y[90:], eval_set=(old, y[:90]), xgb_model=whole)
    assert_same_trees(federated, pooled)
    assert federated.evals_result_ == pooled.evals_result_
    np.testing.assert_array_equal(federated.predict(new), pooled.predict(new))
    ours, earlier = (forest_of(list(of.parts_.values())).trees for of in (federated, grown))
    assert any(not np.array_equal(mine.value, other.value) for mine, other in zip(ours, earlier, strict=True))
    # no sums were opened, and all rows' sides at the model's splits
    passive = federated.parts_["p1"]
    assert passive.exact_sums == {"p1": 0.0}
    assert passive.sides["p1"] > 0.0 or not len(passive.splits)
    sent = federated.communication_["p0 -> p1"]["by_type"]
    assert not {"TreeStart", "SumsRequest", "SealedSumsRequest", "SplitRequest"} & set(sent)


def test_a_leaf_without_rows_has_no_weight():
    X, y = real_table("regression", rows=120)
    for objective in (None, "absolute_error"):
        options = {**SMALL, "objective": objective}
        first = treaty.GBDTRegressor(**options).fit(X, y)
        low = X["bmi"] < X["bmi"].median()
        few = treaty.GBDTRegressor(**options, process_type="update").fit(X[low], y[low], xgb_model=first)
        trees = few.parts_["pooled"].forest.trees
        empty = [tree.value[(tree.left < 0) & (tree.count == 0)] for tree in trees]
        assert sum(map(len, empty)) > 0
        assert all(not values.any() for values in empty)
        assert np.isfinite(few.predict(X)).all()


def test_options_and_models_that_cannot_be_refreshed_are_refused():
    X, y = real_table("binary", rows=100)
    first = treaty.GBDTClassifier(**SMALL).fit(X, y)
    for more, text in (
        ({"subsample": 0.5}, "takes all rows for every leaf"),
        ({"goss": True}, "takes all rows for every leaf"),
        ({"monotone_constraints": {"mean radius": 1}}, "need not be monotone on other rows"),
        ({"process_type": "refresh"}, "process_type"),
    ):
        with pytest.raises(ConfigError, match=text):
            treaty.GBDTClassifier(**{**SMALL, "process_type": "update", **more}).fit(X, y, xgb_model=first)
    with pytest.raises(ConfigError, match="refreshes the leaves of a finished model: name it by fit"):
        treaty.GBDTClassifier(**SMALL, process_type="update").fit(X, y)
    with pytest.raises(ConfigError, match="participants know only the margins"):
        treaty.GBDTClassifier("federboost-horizontal", process_type="update").fit({}, xgb_model=first)


def test_a_job_refreshes_the_parts_in_a_folder(tmp_path, monkeypatch):
    write_job(tmp_path, "secureboost")
    text = (tmp_path / "job.toml").read_text()
    first = load_job(tmp_path / "job.toml")
    assert train_in_threads(monkeypatch, dict.fromkeys(first.parties, first)) == {}
    rounds = first.common["n_estimators"]

    def job(n_estimators, *more):
        changed = text.replace(
            f"n_estimators = {rounds}", f'n_estimators = {n_estimators}\nprocess_type = "update"'
        )  # fmt: skip
        (tmp_path / "job.toml").write_text("\n".join(['output = "more"', *more, changed]))
        return load_job(tmp_path / "job.toml")

    again = job(rounds, 'from_model = "model"')
    assert train_in_threads(monkeypatch, dict.fromkeys(again.parties, again)) == {}
    ours, theirs = (load_part(part_file(tmp_path / folder, "a"), "a").forest for folder in ("more", "model"))
    for mine, other in zip(ours.trees, theirs.trees, strict=True):
        np.testing.assert_array_equal(mine.value, other.value)
    more = job(rounds + 1, 'from_model = "model"')
    assert (
        f"n_estimators = {rounds}, all rounds" in train_in_threads(monkeypatch, dict.fromkeys(more.parties, more))["a"]
    )
    with pytest.raises(ConfigError, match="or from_model in a job file"):
        check_training(job(rounds))


def test_the_command_line_names_the_model(tmp_path, monkeypatch):
    write_job(tmp_path, "secureboost")
    seen = []
    monkeypatch.setattr(jobs, "run_all", lambda job, *_, **__: seen.append(job.from_model))
    monkeypatch.setattr(jobs, "_print_reports", lambda job: None)
    monkeypatch.chdir(tmp_path)
    for flags, folder in (([], None), (["--from-model", "older"], str(tmp_path / "older"))):
        outcome = CliRunner().invoke(app, ["train", "job.toml", *flags])
        assert outcome.exit_code == 0, outcome.output
        assert seen.pop() == folder


def test_a_forest_that_went_on_between_parties_is_explained():
    X, y = real_table("multiclass", rows=90)
    tables, options = cut(X, 2), {**SMALL, "n_estimators": 1, "num_parallel_tree": 2}
    first = treaty.GBDTClassifier(OPEN, **options).fit(tables, y)
    more = treaty.GBDTClassifier(OPEN, **options).fit(tables, y, xgb_model=first)
    added = more.predict_contributions(tables).joined()
    np.testing.assert_allclose(added.sum(axis=2), more.decision_function(tables), atol=1e-10)


@pytest.mark.parametrize("transport", [pytest.param("tls", marks=pytest.mark.slow), "files"])
def test_processes_take_the_parts_of_the_finished_model(transport, monkeypatch):
    kind, options, X, y = of_loss("binary", rows=100)
    tables, options = cut(X, 2), {**options, "n_estimators": 1}
    first = kind(OPEN, **options).fit(tables, y)
    found = {}
    if transport == "files":  # what processes are given, without them

        def run_all(job, *_, **__):
            found.update({name: earlier_part(job, name) for name in job.parties})
            raise ConfigError("enough")

        monkeypatch.setattr(processes, "run_all", run_all)
        with pytest.raises(ConfigError, match="enough"):
            kind(OPEN, **options, transport="tls").fit(tables, y, xgb_model=first)
        assert {name: part.model_id for name, part in found.items()} == dict.fromkeys(
            tables, first.parts_["p0"].model_id
        )
        return
    more = kind(OPEN, **options, transport="tls").fit(tables, y, xgb_model=first)
    assert_same_trees(more, kind(OPEN, **options).fit(tables, y, xgb_model=first))
