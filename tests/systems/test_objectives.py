"""Losses of numbers in every system: trees are the pooled ones bit for bit, or the loss is refused by name."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

import treaty
from marks import all_but_first_slow, slow
from systems.federboost_horizontal.test_estimator import check_fit, seen, share_out  # noqa: F401
from systems.fedxgb.test_estimator import deal_out, estimator, same_but_for_rounding, trees_of
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.errors import ConfigError, DataError

OF_SYSTEMS = {
    "secureboost": treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True),
    "secureboost-lattice": treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
    "smm-dealer": treaty.FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    "smm-paper-1": treaty.FedXGBoostSMM(mode="paper", allow_insecure=True, version=1),
    "smm-paper-2": treaty.FedXGBoostSMM(mode="paper", allow_insecure=True, version=2),
    "federboost": treaty.FederBoostVertical(mode="paper", epsilon=math.inf),
}
OPTIONS = {"n_estimators": 3, "max_depth": 3, "min_child_samples": 1, "max_bin": 16}
LOSSES = {
    "poisson": {"objective": "poisson", "base_score": 7.0},
    "tweedie": {"objective": "tweedie", "base_score": 7.0, "tweedie_variance_power": 1.3},
    "gamma": {"objective": "gamma", "base_score": 7.0},
    "huber": {"objective": "huber", "base_score": 7.0, "huber_slope": 2.0},
    "quantile": {"objective": "quantile", "base_score": 7.0, "quantile_alpha": 0.8},
    "steps": {"objective": "squared_error_steps", "base_score": 7.0},
    "limited": {"max_delta_step": 0.5, "base_score": 7.0},
}


def counts():
    X, y = real_table("regression", rows=160)
    return with_categories(with_gaps(X)), np.floor(y / 20.0)


def both(system, tables, y, weight=None, **options):
    options = {**OPTIONS, **options}
    pooled = treaty.GBDTRegressor(**options).fit(tables, y, sample_weight=weight, eval_set=(tables, y))
    federated = treaty.GBDTRegressor(OF_SYSTEMS[system], n_jobs=1, **options)
    return federated.fit(tables, y, sample_weight=weight, eval_set=(tables, y)), pooled


CASES = [
    *(("secureboost", loss, 2) for loss in LOSSES),
    slow("secureboost", "quantile", 3),
    *(slow(system, loss, 2) for system in [*OF_SYSTEMS][1:] for loss in LOSSES),
]


@pytest.mark.parametrize(("system", "loss", "parties"), CASES)
def test_trees_between_owners_of_columns_are_the_pooled_ones(system, loss, parties):
    X, y = counts()
    tables = cut(X, parties)
    # more rows than candidates; the system joins categories beyond max_bin, and pooled training does so by name
    roomy = {"max_bin": 3, "max_categories": 3, "min_child_samples": 20} if system == "smm-paper-2" else {}
    federated, pooled = both(system, tables, y, **roomy, **LOSSES[loss])
    assert_same_trees(federated, pooled)
    np.testing.assert_array_equal(federated.predict(tables), pooled.predict(tables))
    assert federated.evals_result_ == pooled.evals_result_


@pytest.mark.parametrize("step", [5.0, 10.0])
def test_a_poisson_loss_of_large_steps_trains_to_the_pooled_trees(step):
    X, y = counts()
    federated, pooled = both(
        "secureboost", cut(X, 2), y, objective="poisson", base_score=7.0, max_delta_step=step, min_child_weight=0.0
    )
    assert_same_trees(federated, pooled)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_and_samples_give_the_pooled_trees(loss):
    X, y = counts()
    weight = np.random.default_rng(5).exponential(size=len(y)) * 3
    weight[:10] = 0.0
    for options in ({"subsample": 0.6}, {"goss": True, "colsample_bytree": 0.7}):
        federated, pooled = both("secureboost", cut(X, 3), y, weight, random_state=1, **options, **LOSSES[loss])
        assert_same_trees(federated, pooled)


@pytest.mark.parametrize("loss", all_but_first_slow("gamma", "poisson", "tweedie", "huber", "limited"))
def test_trees_between_owners_of_rows_are_the_pooled_ones(seen, loss):  # noqa: F811
    check_fit(seen, share_out(*counts()), "regression", **LOSSES[loss])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["poisson", "tweedie", "gamma", "huber", "limited"])
def test_trees_among_users_are_those_between_owners_of_rows(loss):
    rows = deal_out(*counts())
    ours, theirs = (
        estimator("regression", system, **LOSSES[loss]).fit(rows) for system in ("fedxgb", "federboost-horizontal")
    )
    same_but_for_rounding(trees_of(ours), trees_of(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["poisson", "tweedie", "gamma", "huber"])
def test_trees_on_gradients_with_little_noise_predict_better_than_the_mean(loss):
    X, y = counts()
    system = treaty.FedXGBoostLDP(mechanism="piecewise", epsilon=1000.0)
    model = treaty.GBDTRegressor(system, **OPTIONS, **LOSSES[loss]).fit(cut(X, 2), y)
    assert np.mean((model.predict(cut(X, 2)) - y) ** 2) < 0.8 * np.var(y)


@pytest.mark.parametrize("protocol", ["federboost-horizontal", "fedxgb", "fedxgboost-ldp"])
def test_quantiles_are_refused_where_sums_do_not_tell_them(protocol):
    X, y = counts()
    tables = share_out(X, y) if protocol != "fedxgboost-ldp" else cut(X, 2)
    labels = () if protocol != "fedxgboost-ldp" else (y,)
    with pytest.raises(ConfigError, match=r"objective='quantile' (has|computes) leaf values"):
        treaty.GBDTRegressor(protocol, objective="quantile").fit(tables, *labels)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "poison"}, "expected objective to be one of squared_error, poisson, tweedie, gamma, huber"),
        ({"quantile_alpha": 0.9}, "quantile_alpha needs objective='quantile', got objective=None"),
        ({"objective": "huber", "tweedie_variance_power": 1.2}, "tweedie_variance_power needs objective='tweedie'"),
        ({"objective": "tweedie", "tweedie_variance_power": 2.0}, "tweedie_variance_power=2.0"),
        ({"objective": "quantile", "quantile_alpha": 1.0}, "quantile_alpha=1.0"),
        ({"objective": "huber", "huber_slope": 0.0}, "huber_slope=0.0"),
        ({"max_delta_step": -1.0}, "max_delta_step=-1.0"),
        ({"objective": "poisson", "base_score": 0.0}, "expected base_score above 0"),
    ],
    ids=str,
)
def test_wrong_options_of_objectives_are_named(options, said):
    X, y = real_table("regression", rows=40)
    with pytest.raises(ConfigError, match=said):
        treaty.GBDTRegressor(**options).fit(X, y)


def test_objectives_of_numbers_are_not_for_classes():
    X, y = real_table("binary", rows=40)
    with pytest.raises(ConfigError, match="objective='poisson' needs numbers, and the labels are classes"):
        treaty.GBDTClassifier(objective="poisson").fit(X, y)


def test_wrong_labels_of_an_objective_are_named():
    X, y = real_table("regression", rows=40)
    model, wrong = treaty.GBDTRegressor(objective="poisson", base_score=100.0), np.where(np.arange(40) < 3, -1.0, y)
    for training, watched in ((wrong, y), (y, wrong)):
        with pytest.raises(DataError, match="pooled: expected no label below 0 for objective='poisson', got 3 of 40"):
            model.fit(X, training, eval_set=(X, watched))
    rows = {name: (X[k::3], (wrong if name == "b" else y)[k::3]) for k, name in enumerate("abc")}
    with pytest.raises(DataError, match="b: expected no label below 0"):
        treaty.GBDTRegressor("federboost-horizontal", objective="poisson", base_score=100.0).fit(rows)


@pytest.mark.parametrize("loss", ["poisson", "gamma", slow("tweedie"), slow("huber"), slow("quantile")])
def test_saved_models_predict_the_same(loss, tmp_path):
    X, y = counts()
    model = treaty.GBDTRegressor(**OPTIONS, **LOSSES[loss]).fit(X, y)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert again.parts_["pooled"].forest.objective == model.parts_["pooled"].forest.objective


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["tweedie", "quantile"])  # options of their own, leaf values from labels
def test_processes_give_the_pooled_trees(loss):
    X, y = counts()
    tables, options = cut(X, 2), {**OPTIONS, **LOSSES[loss]}
    model = treaty.GBDTRegressor(OF_SYSTEMS["secureboost"], transport="tls", **options).fit(tables, y)
    assert_same_trees(model, treaty.GBDTRegressor(**options).fit(tables, y))


def test_poisson_learns_rates_and_quantiles_cover_their_share():
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.uniform(0, 1, (4000, 3)), columns=list("abc"))
    rate = np.exp(1.5 * X["a"] - X["b"]).to_numpy()
    options = {"n_estimators": 40, "max_bin": 32}
    model = treaty.GBDTRegressor(objective="poisson", base_score=1.2, **options).fit(X, rng.poisson(rate))
    assert np.corrcoef(np.log(model.predict(X)), np.log(rate))[0, 1] > 0.95
    y = rng.gamma(2.0, rate)
    for alpha in (0.1, 0.5, 0.9):
        model = treaty.GBDTRegressor(objective="quantile", quantile_alpha=alpha, base_score=1.0, **options).fit(X, y)
        assert np.mean(y <= model.predict(X)) == pytest.approx(alpha, abs=0.03)
