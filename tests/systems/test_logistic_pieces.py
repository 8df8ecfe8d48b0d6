"""The logistic loss in pieces in every system: pooled trees bit for bit, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.metrics import roc_auc_score

import treaty
from marks import slow
from systems.federboost_horizontal.test_estimator import check_fit, seen, share_out  # noqa: F401
from systems.fedxgb.test_estimator import deal_out, estimator, same_but_for_rounding, trees_of
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.errors import ConfigError
from treaty.models.trees import forest_of

KEY = {"insecure_test_key_bits": 512, "allow_insecure": True, "allow_exact_sums": True}
SYSTEMS = {
    "open": treaty.SecureBoost(**KEY),
    "sealed": treaty.SecureBoost(sums="sealed"),
    "lattice": treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
    "noisy labels": treaty.SecureBoost(mechanism="label_rr", epsilon=2.0, **KEY),
    "smm": treaty.FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    "federboost": treaty.FederBoostVertical(mode="paper", epsilon=math.inf),
}
PIECES = {"objective": "logistic_pieces"}
OPTIONS = {"n_estimators": 3, "max_depth": 3, "max_bin": 8, "min_child_samples": 5, "n_jobs": 1, **PIECES}


def table():
    X, y = real_table("binary")
    return with_categories(with_gaps(X)), y


def assert_whole(model) -> None:
    forest = forest_of(list(model.parts_.values()))
    values = np.concatenate([forest.objective.base_margins, *(tree.value for tree in forest.trees)])
    assert np.any(values)
    np.testing.assert_array_equal(4096 * values, np.rint(4096 * values))


@pytest.mark.parametrize("system", ["open", "sealed", *map(slow, ("lattice", "smm", "federboost"))])
@pytest.mark.parametrize("further", [{}, slow({"subsample": 0.7, "learning_rate": 0.37, "random_state": 1})], ids=str)
def test_trees_between_owners_of_columns_are_the_pooled_ones(system, further):
    X, y = table()
    tables, options = cut(X, 2), {**OPTIONS, "max_cat_to_onehot": 32, **further}
    model = treaty.GBDTClassifier(SYSTEMS[system], **options).fit(tables, y, eval_set=(tables, y))
    pooled = treaty.GBDTClassifier(**options).fit(tables, y, eval_set=(tables, y))
    assert_same_trees(model, pooled)
    assert_whole(pooled)
    assert model.evals_result_ == pooled.evals_result_
    np.testing.assert_array_equal(model.predict_proba(tables), pooled.predict_proba(tables))
    margins = pooled.decision_function(tables)
    np.testing.assert_array_equal(pooled.predict_proba(tables)[:, 1], 1.0 / (1.0 + np.exp(-margins)))


@pytest.mark.slow
def test_weights_and_refreshed_leaves_give_the_pooled_trees():
    X, y = table()
    tables, weight = cut(X, 3), np.random.default_rng(5).exponential(size=len(y)) * 3
    models = [treaty.GBDTClassifier(system, **OPTIONS).fit(tables, y, weight) for system in (SYSTEMS["open"], "pooled")]
    assert_same_trees(*models)
    again = [model.set_params(process_type="update").fit(tables, y, xgb_model=model) for model in models]
    assert_same_trees(*again)
    assert_whole(again[0])


@pytest.mark.parametrize("system", ["open", "sealed", *map(slow, ("lattice", "smm", "federboost"))])
def test_several_classes_are_each_against_the_rest(system, tmp_path):
    X, y = load_wine(return_X_y=True, as_frame=True)
    tables = cut(X, 2)
    model = treaty.GBDTClassifier(SYSTEMS[system], **OPTIONS).fit(tables, y, eval_set=(tables, y))
    pooled = treaty.GBDTClassifier(**OPTIONS).fit(tables, y, eval_set=(tables, y))
    assert_same_trees(model, pooled)
    assert_whole(pooled)
    assert model.evals_result_ == pooled.evals_result_
    assert pooled.score(tables, y) > 0.97
    pooled.save(tmp_path / "model")
    np.testing.assert_array_equal(treaty.load(tmp_path / "model").predict_proba(tables), model.predict_proba(tables))
    with pytest.raises(ConfigError, match="XGBoost has no loss of several classes"):
        pooled.to_xgboost()


def test_trees_between_owners_of_rows_are_the_pooled_ones(seen):  # noqa: F811
    assert_whole(check_fit(seen, share_out(*table()), **PIECES))


@pytest.mark.slow
def test_trees_among_users_are_those_between_owners_of_rows():
    rows = deal_out(*table())
    ours, theirs = (estimator("binary", system, **PIECES).fit(rows) for system in ("fedxgb", "federboost-horizontal"))
    assert_whole(ours)
    same_but_for_rounding(trees_of(ours), trees_of(theirs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "system",
    [SYSTEMS["noisy labels"], treaty.FedXGBoostLDP(epsilon=50.0),
     treaty.FedXGBoostLDP(mechanism="piecewise", epsilon=1000.0)],
    ids=["secureboost", "labels", "gradients"],
)  # fmt: skip
def test_trees_with_noise_are_of_whole_leaf_values(system, tmp_path):
    X, y = table()
    model = treaty.GBDTClassifier(system, **OPTIONS).fit(cut(X, 2), y)
    assert_whole(model)
    assert roc_auc_score(y, model.predict_proba(cut(X, 2))[:, 1]) > 0.8


def test_it_ranks_rows_as_the_logistic_loss_does():
    X, y = load_breast_cancer(return_X_y=True)
    train, test = np.arange(len(y)) % 2 > 0, np.arange(len(y)) % 2 == 0
    found = [
        treaty.GBDTClassifier(n_estimators=30, n_jobs=1, objective=name).fit(X[train], y[train]).predict_proba(X[test])
        for name in (None, "logistic_pieces")
    ]
    logistic, pieces = (roc_auc_score(y[test], p[:, 1]) for p in found)
    assert pieces == pytest.approx(logistic, abs=0.003)


def test_a_saved_model_predicts_and_explains_the_same(tmp_path):
    X, y = table()
    model = treaty.GBDTClassifier(**OPTIONS).fit(X, y)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.parts_["pooled"].forest.objective == model.parts_["pooled"].forest.objective
    contributions = again.predict_contributions(X)
    np.testing.assert_allclose(contributions.sum(axis=1), model.decision_function(X), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_processes_give_the_pooled_trees():
    X, y = table()
    tables = cut(X, 2)
    model = treaty.GBDTClassifier(SYSTEMS["sealed"], transport="tls", **OPTIONS).fit(tables, y)
    assert_same_trees(model, treaty.GBDTClassifier(**OPTIONS).fit(tables, y))


def test_it_is_refused_by_name_where_it_does_not_fit(tmp_path: Path):
    X, y = real_table("binary", rows=60)
    with pytest.raises(ConfigError, match="objective='logistic_pieces' needs classes: use GBDTClassifier"):
        treaty.GBDTRegressor(**PIECES).fit(X, y)
    with pytest.raises(ConfigError, match="no base_margin with objective='logistic_pieces': all its margins are multi"):
        treaty.GBDTClassifier(**PIECES).fit(X, y, base_margin=np.zeros(len(y)))
    with pytest.raises(ConfigError, match=r"epsilon_total needs .* got objective='logistic_pieces'"):
        treaty.GBDTClassifier(treaty.FederBoostHorizontal(epsilon_total=5.0), **PIECES).fit(share_out(X, y))
    earlier = treaty.GBDTClassifier(n_estimators=1).fit(X, y)
    with pytest.raises(ConfigError, match="cannot continue a model with another loss"):
        treaty.GBDTClassifier(n_estimators=2, **PIECES).fit(X, y, xgb_model=earlier)
