"""Where training starts if `base_score` is left out: XGBoost's estimate, in every system that can have one."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import xgboost
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import r2_score

import treaty
from flat import flat
from tables import FAST_KEY, assert_same_trees, cut, real_table
from treaty.models.trees import forest_of
from treaty.trees.objectives import make_objective

XGBOOST = {
    "squared_error": {"objective": "reg:squarederror"},
    "poisson": {"objective": "count:poisson"},
    "tweedie": {"objective": "reg:tweedie"},
    "quantile": {"objective": "reg:quantileerror", "quantile_alpha": 0.8},
    "logistic": {"objective": "binary:logistic"},
}
OPTIONS = {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3, "max_bin": 32, "n_jobs": 1}


def base_of(model):
    return forest_of(list(model.parts_.values())).objective.base_score


def start_of(model):
    return forest_of(list(model.parts_.values())).objective.start


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("objective", XGBOOST)
def test_the_estimate_is_xgboosts(objective, weighted):
    X, y = (load_breast_cancer if objective == "logistic" else load_diabetes)(return_X_y=True)
    weight = np.random.default_rng(0).uniform(0.5, 2.0, len(y)) if weighted else None
    booster = xgboost.train(XGBOOST[objective], xgboost.DMatrix(X, y, weight=weight), num_boost_round=1)
    theirs = json.loads(json.loads(booster.save_config())["learner"]["learner_model_param"]["base_score"])
    if objective == "logistic":
        model = treaty.GBDTClassifier(n_estimators=1).fit(X, y, sample_weight=weight)
    else:
        own = {"quantile_alpha": 0.8} if objective == "quantile" else {}
        model = treaty.GBDTRegressor(n_estimators=1, objective=objective, **own).fit(X, y, sample_weight=weight)
    assert base_of(model) == pytest.approx(np.ravel(theirs)[0], rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
def test_a_regression_without_options_is_as_good_as_xgboosts(scale):
    X, y = load_diabetes(return_X_y=True)
    y = scale * y
    train, test = np.arange(len(y)) % 3 > 0, np.arange(len(y)) % 3 == 0
    theirs = xgboost.XGBRegressor(tree_method="hist", **OPTIONS).fit(X[train], y[train]).predict(X[test])
    model = treaty.GBDTRegressor(min_child_samples=1, **OPTIONS).fit(X[train], y[train])
    assert r2_score(y[test], model.predict(X[test])) > r2_score(y[test], theirs) - 0.03
    assert model.clipped_rows_ == 0


@pytest.mark.parametrize("power", [-40, -14, 30])
@pytest.mark.parametrize("system", ["pooled", "secureboost"])
def test_the_unit_of_a_target_changes_nothing_but_the_unit(system, power):
    """A power of two is exact: the same splits, and leaf values, margins and the start times that power."""
    X, y = real_table("regression")
    options = {**(FAST_KEY if system == "secureboost" else {}), "n_estimators": 5, "min_child_samples": 5}
    plain = flat(treaty.GBDTRegressor, **options).fit(cut(X, 2), y)
    scaled = flat(treaty.GBDTRegressor, **options).fit(cut(X, 2), y * 2.0**power)
    trees, others = (forest_of(list(model.parts_.values())).trees for model in (plain, scaled))
    for tree, other in zip(trees, others, strict=True):
        assert len(tree.left) > 3
        for name in ("source", "record", "left", "cover", "count"):
            np.testing.assert_array_equal(getattr(tree, name), getattr(other, name))
        np.testing.assert_array_equal(tree.value * 2.0**power, other.value)
    np.testing.assert_array_equal(plain.predict(cut(X, 2)) * 2.0**power, scaled.predict(cut(X, 2)))


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e-2])
def test_a_regression_of_small_labels_is_as_good_as_of_large_ones(scale):
    X, y = load_diabetes(return_X_y=True)
    whole, small = (treaty.GBDTRegressor(**OPTIONS).fit(X, factor * y).predict(X) / factor for factor in (1.0, scale))
    assert r2_score(y, small) == pytest.approx(r2_score(y, whole), abs=0.01)


@pytest.mark.parametrize("options", [{"min_split_loss": 0.2}, {"min_split_loss": 20.0}, {"reg_lambda": 50.0}], ids=str)
def test_min_split_loss_and_reg_lambda_are_of_the_target_as_it_came(options):
    X, y = load_diabetes(return_X_y=True)
    y = 1e-3 * y
    own = {"max_bin": 255, "base_score": 0.15, "n_estimators": 1, "max_depth": 2, "learning_rate": 1.0, "n_jobs": 1}
    theirs = xgboost.XGBRegressor(tree_method="hist", **own, **options).fit(X, y).predict(X)
    ours = treaty.GBDTRegressor(min_child_samples=1, **own, **options).fit(X, y).predict(X)
    assert len(np.unique(ours)) == len(np.unique(theirs)) == {0.2: 3, 20.0: 1}.get(options.get("min_split_loss"), 4)
    np.testing.assert_allclose(ours, theirs, rtol=0.02)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression", "poisson", "tweedie", "huber", "quantile"])
def test_federated_models_start_from_the_pooled_estimate(task):
    named = task if task in ("poisson", "tweedie", "huber", "quantile") else None
    X, y = real_table("regression" if named else task)
    kind = treaty.GBDTClassifier if task in ("binary", "multiclass") else treaty.GBDTRegressor
    options = {
        "n_estimators": 2,
        "min_child_samples": 5,
        "max_bin": 32,
        "huber_slope": 50.0 if task == "huber" else None,
    }
    options |= {"objective": named, "fractional_bits": 20}
    weight = np.random.default_rng(0).uniform(0.5, 2.0, len(y))
    if kind is treaty.GBDTClassifier:
        del options["huber_slope"]
    pooled = kind(**options).fit(cut(X, 3), y, sample_weight=weight)
    federated = flat(kind, **FAST_KEY, **options).fit(cut(X, 3), y, sample_weight=weight)
    assert start_of(federated) == start_of(pooled)
    assert 0.5 not in start_of(pooled)
    assert_same_trees(pooled, federated)
    np.testing.assert_array_equal(pooled.predict(cut(X, 3)), federated.predict(cut(X, 3)))


def test_the_active_party_alone_has_the_estimate():
    X, y = real_table("regression")
    model = flat(treaty.GBDTRegressor, **FAST_KEY, n_estimators=1).fit(cut(X, 2), y)
    assert model.parts_["p0"].forest is not None
    assert model.parts_["p1"].forest is None


def test_huber_starts_from_the_median():
    y = 1000.0 + np.arange(9.0)
    assert make_objective("huber", y, None, base_score=None).base_score == 1004.0
    assert make_objective("huber", y, np.where(y > 1006.5, 9.0, 1.0), base_score=None).base_score == 1007.0


def test_randomised_labels_are_debiased_for_the_estimate():
    rng, p = np.random.default_rng(0), 1.0 / (1.0 + np.exp(-1.0))
    y = rng.random(200_000) < 0.1
    noisy = np.where(rng.random(len(y)) < p, y, ~y).astype(np.float64)
    assert make_objective("logistic", noisy, None, base_score=None, epsilon=1.0).base_score == pytest.approx(
        0.1, abs=0.02
    )
    for label in (0.0, 1.0):  # an estimate beyond all probabilities
        base = make_objective("logistic", np.full(9, label), None, base_score=None, epsilon=1.0).base_score
        assert 0.0 < base < 1.0


@pytest.mark.parametrize("label", [0.0, -3.0, 1e-30, 1e300])
def test_any_label_gives_an_estimate(label):
    assert make_objective("squared_error", np.full(3, label), None, base_score=None).base_score == pytest.approx(label)


def test_counts_of_zero_keep_a_start_that_has_a_logarithm():
    assert make_objective("poisson", np.zeros(5), None, base_score=None).base_score == 0.5


def test_noise_keeps_the_start_fixed_and_a_regression_says_so():
    X, y = real_table("regression")
    model = treaty.GBDTRegressor(treaty.FedXGBoostLDP(mechanism="piecewise", epsilon=100.0), n_estimators=1)
    with pytest.warns(UserWarning, match=r"starts from base_score=0\.5.*near the mean of the labels"):
        model.fit(cut(X, 2), y)
    assert base_of(model) == 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert base_of(model.set_params(base_score=150.0).fit(cut(X, 2), y)) == 150.0
    noisy = treaty.GBDTClassifier(treaty.FederBoostHorizontal(epsilon_total=8.0), n_estimators=1)
    assert base_of(noisy.fit({f"p{k}": (X.iloc[k::3], y[k::3] > 150.0) for k in range(3)})) == 0.5


ROWS_APART = {"federboost-horizontal": treaty.FederBoostHorizontal(), "fedxgb": treaty.FedXGB()}


@pytest.mark.parametrize("system", ROWS_APART)
def test_a_regression_whose_rows_are_apart_is_as_good_as_one_of_all_rows(system):
    X, y = load_diabetes(return_X_y=True)
    train, test = np.arange(len(y)) % 3 > 0, np.arange(len(y)) % 3 == 0
    options = {**OPTIONS, "n_estimators": 5, "max_bin": 16}
    pooled = treaty.GBDTRegressor(**options).fit(X[train], y[train])
    own = ROWS_APART[system]
    rows = {f"p{k}": (X[train][k::9], y[train][k::9]) for k in range(9)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = treaty.GBDTRegressor(own, **options).fit(rows)
    assert start_of(model) == start_of(pooled)
    assert r2_score(y[test], model.predict(X[test])) > r2_score(y[test], pooled.predict(X[test])) - 0.05
    far = treaty.GBDTRegressor(own, base_score=0.5, **options).fit(rows)
    assert r2_score(y[test], far.predict(X[test])) < r2_score(y[test], model.predict(X[test])) - 0.1
