"""Rounds of several trees (`num_parallel_tree`): XGBoost's forests on one table, and the same between parties."""

from __future__ import annotations

import numpy as np
import pytest

import treaty
from tables import assert_same_trees, cut, real_table, with_gaps
from treaty.errors import ConfigError

OPTIONS = {"n_estimators": 2, "num_parallel_tree": 3, "subsample": 0.7, "colsample_bytree": 0.6, "random_state": 1}
SMALL = {"max_depth": 2, "max_bin": 16, "min_child_samples": 1, "n_jobs": 1}
OPEN = treaty.SecureBoost(encryption="lattice", allow_exact_sums=True)
ESTIMATORS = {"binary": treaty.GBDTClassifier, "multiclass": treaty.GBDTClassifier, "regression": treaty.GBDTRegressor}


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_predictions_are_those_of_xgboost(task):
    xgboost = pytest.importorskip("xgboost")
    X, y = real_table(task)
    X = X.round(1)
    y = np.unique(y, return_inverse=True)[1] if task != "regression" else y
    # without samples all trees of a round are equal, and XGBoost's draws do not matter
    common = {"n_estimators": 3, "max_depth": 3, "learning_rate": 0.4, "num_parallel_tree": 4, "base_score": 0.5}
    ours = ESTIMATORS[task](**common, min_child_samples=1, max_bin=255, fractional_bits=24, n_jobs=1).fit(X, y)
    kind = xgboost.XGBRegressor if task == "regression" else xgboost.XGBClassifier
    theirs = kind(**common, tree_method="hist", max_bin=4096, nthread=1).fit(X, y)
    booster = ours.to_xgboost()
    assert booster.num_boosted_rounds() == ours.parts_["pooled"].forest.rounds == 3
    if task == "regression":
        np.testing.assert_allclose(ours.predict(X), booster.inplace_predict(X), rtol=1e-5)
        assert np.corrcoef(ours.predict(X), theirs.predict(X))[0, 1] > 0.99
    else:
        found = ours.predict_proba(X)
        exported = booster.predict(xgboost.DMatrix(X))
        np.testing.assert_allclose(found[:, 1] if task == "binary" else found, exported, rtol=1e-4, atol=1e-5)
        assert np.abs(found - theirs.predict_proba(X)).mean() < 0.01


def test_trees_of_a_round_grow_from_the_same_gradients_and_are_averaged():
    X, y = real_table("binary")
    forest = treaty.GBDTClassifier(**{**OPTIONS, "n_estimators": 1}, **SMALL, base_score=0.5).fit(X, y)
    trees = forest.parts_["pooled"].forest.trees
    assert len(trees) == 3
    assert forest.n_iter_ == 1
    assert not trees[0] == trees[1]
    # the first tree is that of plain boosting with the same draws, but for the factor
    alone = treaty.GBDTClassifier(**{**OPTIONS, "num_parallel_tree": 1, "n_estimators": 1}, **SMALL, base_score=0.5)
    (first,) = alone.fit(X, y).parts_["pooled"].forest.trees
    np.testing.assert_array_equal(first.left, trees[0].left)
    np.testing.assert_allclose(trees[0].value, first.value / 3, rtol=1e-12)
    # rows of the root: gradients at margin 0 of all rows add up alike, whatever came before
    weights = [tree.cover[0] / tree.count[0] for tree in trees]
    np.testing.assert_allclose(weights, 0.25)


@pytest.mark.parametrize(("task", "system"), [("binary", OPEN), ("multiclass", OPEN), ("binary", "sealed")])
def test_parties_grow_the_forest_of_one_table(task, system):
    X, y = real_table(task)
    tables = cut(with_gaps(X), 2)
    system = treaty.SecureBoost(sums="sealed") if system == "sealed" else system
    options = {**OPTIONS, **SMALL}
    with pytest.warns(UserWarning, match="joins the tables"):
        pooled = ESTIMATORS[task]("pooled", **options).fit(tables, y, eval_set=(tables, y))
    federated = ESTIMATORS[task](system, **options).fit(tables, y, eval_set=(tables, y))
    assert_same_trees(federated, pooled)
    assert federated.evals_result_ == pooled.evals_result_
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))
    stages = list(pooled.staged_predict_proba(tables))
    assert len(stages) == 2
    np.testing.assert_array_equal(stages[-1], pooled.predict_proba(tables))


def test_early_stopping_drops_whole_rounds_and_training_resumes_between_them(tmp_path):
    X, y = real_table("binary")
    y = np.random.default_rng(0).permutation(y)
    options = {**OPTIONS, **SMALL, "n_estimators": 12}
    held = slice(0, 200)
    model = treaty.GBDTClassifier(**options, early_stopping_rounds=1)
    model.fit(X[200:], y[200:], eval_set=(X[held], y[held]))
    forest = model.parts_["pooled"].forest
    assert forest.rounds < 12
    assert len(forest.trees) == 3 * forest.rounds
    assert len(model.evals_result_["eval_0"]["logloss"]) >= forest.rounds

    class Stop:
        def after_iteration(self, model, epoch, evals_log):
            raise KeyboardInterrupt

    whole = treaty.GBDTClassifier(**{**options, "n_estimators": 3}).fit(X, y)
    broken = treaty.GBDTClassifier(**{**options, "n_estimators": 3}, callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        broken.fit(X, y, checkpoint=tmp_path)
    resumed = treaty.GBDTClassifier(**{**options, "n_estimators": 3}).fit(X, y, checkpoint=tmp_path)
    assert resumed.parts_["pooled"].forest.trees == whole.parts_["pooled"].forest.trees


def test_leaves_by_residuals_are_those_before_the_round():
    X, y = real_table("regression")
    options = {**SMALL, "objective": "quantile", "quantile_alpha": 0.5, "n_estimators": 1, "learning_rate": 1.0}
    one, several = (treaty.GBDTRegressor(**options, num_parallel_tree=k).fit(X, y) for k in (1, 2))
    np.testing.assert_allclose(one.predict(X), several.predict(X), rtol=1e-9)


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (treaty.FedXGBoostLDP(), "every tree of a round would cost its own noise"),
        (treaty.FedXGB(), "users grow one tree for each class in a round"),
    ],
)
def test_systems_that_cannot_say_why(system, words):
    with pytest.raises(ConfigError, match=words):
        treaty.GBDTClassifier(system, num_parallel_tree=2).fit({"a": None, "b": None}, [0, 1])


@pytest.mark.parametrize("value", [0, -1, 1.5, 20_000, None])
def test_numbers_of_trees_that_are_none_are_refused(value):
    with pytest.raises(ConfigError, match="num_parallel_tree"):
        treaty.GBDTClassifier(num_parallel_tree=value).fit([[0.0], [1.0]] * 30, [0, 1] * 30)
