"""Rows that start from margins of their own, in training, in eval sets and in predictions."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.metrics import log_loss

import treaty
from runs.job_files import train_in_threads
from runs.small_jobs import write_job
from tables import FAST_KEY, assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.models.trees import load_part
from treaty.runs.job_files import check_training, load_job
from treaty.runs.party import part_file

RNG = np.random.default_rng(3)
X, Y = real_table("binary", rows=240)
MARGIN = RNG.normal(size=len(Y))
KINDS = {
    "two classes": (treaty.GBDTClassifier, {}, "binary", 1, "binary:logistic"),
    "three classes": (treaty.GBDTClassifier, {}, "multiclass", 3, "multi:softprob"),
    "squared error": (treaty.GBDTRegressor, {}, "regression", 1, "reg:squarederror"),
    "poisson": (treaty.GBDTRegressor, {"objective": "poisson"}, "regression", 1, "count:poisson"),
    "gamma": (treaty.GBDTRegressor, {"objective": "gamma"}, "regression", 1, "reg:gamma"),
    "tweedie": (treaty.GBDTRegressor, {"objective": "tweedie"}, "regression", 1, "reg:tweedie"),
    "median": (treaty.GBDTRegressor, {"objective": "absolute_error"}, "regression", 1, "reg:absoluteerror"),
}


def of_kind(name):
    """Return an estimator, a table, labels, margins, and XGBoost's objective."""
    kind, options, task, outputs, theirs = KINDS[name]
    table, y = real_table(task, rows=170)
    margin = np.random.default_rng(1).normal(size=(len(y), outputs))
    if task == "regression":
        margin = margin * 20 + 150 if name in ("squared error", "median") else margin * 0.3 + 5.0
    return kind, options, table, y, margin if outputs > 1 else margin[:, 0], theirs


def raw(model, table, margin):
    """Return margins of rows, however the estimator shows them."""
    if isinstance(model, treaty.GBDTClassifier):
        return model.decision_function(table, base_margin=margin)
    found = model.predict(table, base_margin=margin)
    return np.log(found) if model.objective in ("poisson", "gamma", "tweedie") else found


@pytest.mark.parametrize("name", KINDS)
def test_predictions_and_metrics_are_those_of_xgboost(name):
    kind, options, table, y, margin, theirs = of_kind(name)
    # one bin for each value at both, so that both have the same cuts to choose from
    table = table.round(0)
    plain = {"n_estimators": 4, "max_depth": 3, "learning_rate": 0.3, "min_child_weight": 1.0}
    model = kind(**options, **plain, min_child_samples=1, fractional_bits=30, n_jobs=1)
    model.fit(table, y, base_margin=margin, eval_set=(table, y), base_margin_eval_set=[margin])
    rows = xgboost.DMatrix(table, y, base_margin=margin)
    parameters = {"objective": theirs, "tree_method": "hist", "max_bin": 255, "nthread": 1, **plain}
    if np.ndim(margin) == 2:
        parameters["num_class"] = 3
    del parameters["n_estimators"]
    booster = xgboost.train(parameters, rows, num_boost_round=4)
    expected = booster.predict(rows, output_margin=True)
    np.testing.assert_allclose(raw(model, table, margin), expected, rtol=2e-3, atol=2e-3)
    # the exported booster has our trees
    exported = model.to_xgboost().predict(rows, output_margin=True)
    np.testing.assert_allclose(raw(model, table, margin), exported, rtol=1e-5, atol=1e-5)


def test_the_first_gradients_are_of_the_margins():
    """A model that starts from another model's margins corrects it: its trees are the next rounds of the other."""
    first = treaty.GBDTClassifier(n_estimators=4, n_jobs=1).fit(X, Y)
    both = treaty.GBDTClassifier(n_estimators=7, n_jobs=1).fit(X, Y)
    second = treaty.GBDTClassifier(n_estimators=3, n_jobs=1).fit(X, Y, base_margin=first.decision_function(X))
    np.testing.assert_allclose(
        second.decision_function(X, base_margin=first.decision_function(X)), both.decision_function(X), atol=1e-12
    )


SEALED = treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, sums="sealed")


@pytest.mark.parametrize(
    "system",
    [
        FAST_KEY,
        {"protocol": treaty.FederBoostVertical(epsilon=float("inf"), mode="paper"), "n_jobs": 1},
        pytest.param({"protocol": SEALED, "n_jobs": 1}, marks=pytest.mark.slow),
    ],
    ids=["open", "buckets", "sealed"],
)
@pytest.mark.parametrize("parties", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parties_grow_the_pooled_trees(system, parties):
    system = dict(system)
    kind, options, table, y, margin, _ = of_kind("three classes")
    tables = cut(with_categories(with_gaps(table)), parties)
    options = {**options, "n_estimators": 2, "max_bin": 16, "min_child_samples": 5, "n_jobs": 1}
    given = {"base_margin": margin, "eval_set": [(tables, y)], "base_margin_eval_set": [margin]}
    protocol, own = system.pop("protocol"), {name: of for name, of in system.items() if name != "n_jobs"}
    protocol = treaty.SecureBoost(**own) if protocol == "secureboost" else protocol
    pooled = kind(**options).fit(tables, y, **given)
    federated = kind(protocol, **options).fit(tables, y, **given)
    assert_same_trees(federated, pooled)
    assert federated.evals_result_ == pooled.evals_result_
    np.testing.assert_allclose(raw(federated, tables, margin), raw(pooled, tables, margin), atol=1e-12)
    stages = list(federated.staged_predict_proba(tables, base_margin=margin))
    np.testing.assert_allclose(stages[-1], federated.predict_proba(tables, base_margin=margin), atol=1e-12)
    assert federated.evals_result_["eval_0"]["mlogloss"] == pytest.approx([log_loss(y, p) for p in stages])


@pytest.mark.slow
def test_parties_in_processes_start_from_the_same_margins():
    own = {name: of for name, of in FAST_KEY.items() if name not in ("protocol", "n_jobs")}
    found = [
        treaty.GBDTClassifier(treaty.SecureBoost(**own), n_estimators=2, n_jobs=1, transport=transport).fit(
            cut(X, 2), Y, base_margin=MARGIN
        )
        for transport in ("memory", "tls")
    ]
    ours, theirs = (model.decision_function(cut(X, 2), base_margin=MARGIN) for model in found)
    np.testing.assert_array_equal(ours, theirs)


def test_weights_of_zero_take_their_margins_along():
    weight = (np.arange(len(Y)) % 3 > 0).astype(float)
    kept = weight > 0
    ours = treaty.GBDTClassifier(n_estimators=3, n_jobs=1).fit(X, Y, weight, base_margin=MARGIN)
    alone = treaty.GBDTClassifier(n_estimators=3, n_jobs=1).fit(X[kept], Y[kept], base_margin=MARGIN[kept])
    np.testing.assert_array_equal(
        ours.decision_function(X, base_margin=MARGIN), alone.decision_function(X, base_margin=MARGIN)
    )


def test_checkpoints_and_files_keep_that_rows_have_margins(tmp_path):
    model = treaty.GBDTClassifier(n_estimators=3, n_jobs=1)

    class Stop(Exception):
        pass

    class Stopping:
        def after_iteration(self, model, epoch, evals_log):
            if epoch == 1:
                raise Stop

    with pytest.raises(Stop):
        treaty.GBDTClassifier(n_estimators=3, n_jobs=1, callbacks=[Stopping()]).fit(
            X, Y, base_margin=MARGIN, checkpoint=tmp_path / "kept"
        )
    with pytest.raises(treaty.ConfigError, match="rows, eval sets or classes differ from the checkpoint's"):
        treaty.GBDTClassifier(n_estimators=3, n_jobs=1).fit(X, Y, base_margin=-MARGIN, checkpoint=tmp_path / "kept")
    model.fit(X, Y, base_margin=MARGIN, checkpoint=tmp_path / "kept")
    once = treaty.GBDTClassifier(n_estimators=3, n_jobs=1).fit(X, Y, base_margin=MARGIN)
    assert_same_trees(model, once)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    np.testing.assert_array_equal(
        again.predict_proba(X, base_margin=MARGIN), model.predict_proba(X, base_margin=MARGIN)
    )
    with pytest.raises(treaty.ConfigError, match="give base_margin of the rows to predict"):
        again.predict(X)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"base_margin": MARGIN[:5]}, treaty.DataError, r"expected base_margin of shape \(240, 1\), got \(5,\)"),
        ({"base_margin": np.ones((240, 2))}, treaty.DataError, r"shape \(240, 1\), got \(240, 2\)"),
        ({"base_margin": np.full(240, np.inf)}, treaty.DataError, "finite numbers as base_margin, got 240 others"),
        ({"base_margin": ["x"] * 240}, treaty.DataError, "expected numbers as base_margin, got others"),
        ({"base_margin": MARGIN, "eval_set": [(X, Y)]}, treaty.ConfigError, "base_margin_eval_set of all eval sets"),
        ({"eval_set": [(X, Y)], "base_margin_eval_set": [MARGIN]}, treaty.ConfigError, "or neither"),
        ({"init_score": MARGIN}, treaty.ConfigError, "it is called 'base_margin' here"),
    ],
)
def test_margins_that_cannot_be_used_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        treaty.GBDTClassifier(n_jobs=1).fit(X, Y, **given)


def test_margins_in_another_order_than_the_rows_are_refused():
    shuffled = pd.Series(MARGIN, index=range(240, 0, -1))
    with pytest.raises(treaty.DataError, match="indexes of X and base_margin have the same labels in another order"):
        treaty.GBDTClassifier(n_jobs=1).fit(X.set_axis(range(1, 241)), Y, base_margin=shuffled)


@pytest.mark.parametrize(
    ("protocol", "why"),
    [
        (treaty.FedXGBoostLDP(), "noise hides labels, and not margins"),
        ("federboost-horizontal", "participants compute gradients of their rows from the model alone"),
        ("fedxgb", "participants compute gradients of their rows from the model alone"),
    ],
    ids=["ldp", "federboost-horizontal", "fedxgb"],
)
def test_systems_that_cannot_start_from_margins_say_why(protocol, why):
    with pytest.raises(treaty.ConfigError, match=f"expected no base_margin with protocol '.*': {why}"):
        treaty.GBDTClassifier(protocol).fit(cut(X, 2), Y, base_margin=MARGIN)


def test_a_start_for_all_rows_and_one_for_each_are_refused_together():
    with pytest.raises(treaty.ConfigError, match="base_score or base_margin, got both"):
        treaty.GBDTClassifier(base_score=0.5).fit(X, Y, base_margin=MARGIN)
    model = treaty.GBDTClassifier(n_estimators=1, n_jobs=1).fit(X, Y)
    with pytest.raises(treaty.ConfigError, match="the model was trained without base_margin: leave it out"):
        model.predict(X, base_margin=MARGIN)


def test_a_job_names_the_column_of_margins(tmp_path, monkeypatch):
    write_job(tmp_path, "secureboost")
    table = pd.read_csv(tmp_path / "a.csv")
    margin = np.random.default_rng(0).normal(size=len(table))
    table.assign(m=margin).to_csv(tmp_path / "a.csv", index=False)
    text = (tmp_path / "job.toml").read_text()
    (tmp_path / "job.toml").write_text(text.replace('label = "y"', 'label = "y"\nbase_margin = "m"'))
    job = load_job(tmp_path / "job.toml")
    assert job.varied
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    part = load_part(part_file(job.output, "a"))
    assert part.forest.base_margin
    assert part.forest.objective.base_score == 0.5
    assert "m" not in part.schema.names
    tables = {name: pd.read_csv(tmp_path / f"{name}.csv") for name in "abc"}
    tables["a"] = tables["a"][list(part.schema.names)]
    common = {**job.common, "max_bin": job.settings()[1].max_bin}
    pooled = treaty.GBDTClassifier(n_jobs=1, **common).fit(tables, table["y"], base_margin=margin)
    np.testing.assert_array_equal(
        np.concatenate([tree.value for tree in part.forest.trees]),
        np.concatenate([tree.value for tree in pooled.parts_["pooled"].forest.trees]),
    )
    for wrong, said in (
        ('base_margin = ["m", "m"]', "expected 1 columns as base_margin, got 2"),
        ('base_margin = "n"', "expected a column 'n'"),
    ):
        (tmp_path / "job.toml").write_text(text.replace('label = "y"', f'label = "y"\n{wrong}'))
        job = load_job(tmp_path / "job.toml")
        if "columns" in said:
            with pytest.raises(treaty.ConfigError, match=said):
                check_training(job)
        else:
            assert said in train_in_threads(monkeypatch, dict.fromkeys(job.parties, job))["a"]
