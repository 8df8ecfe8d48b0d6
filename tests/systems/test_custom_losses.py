"""A loss that a user brings: trained on as Treaty's own are, and its faults named."""

from __future__ import annotations

import math
import os
import sys

import numpy as np
import pandas as pd
import pytest

import treaty
from marks import slow
from systems.federboost_horizontal.test_estimator import check_fit, seen  # noqa: F401
from systems.fedxgb.test_estimator import estimator, same_but_for_rounding, trees_of
from tables import assert_same_trees, cut, real_table
from treaty.errors import ConfigError
from treaty.trees.losses import power_of_two

KEY = {"insecure_test_key_bits": 512, "allow_insecure": True, "allow_exact_sums": True}
OPTIONS = {"n_estimators": 3, "min_child_samples": 1, "max_bin": 16, "base_score": 100.0, "n_jobs": 1}


class Squared(treaty.CustomLoss):
    """Half the squared error, as Treaty has it."""

    link = "identity"

    def bounds(self, y):
        return 2.0 * float(np.max(np.abs(y - 100.0))), 1.0

    def gradients(self, margins, y):
        return margins - y, np.ones_like(y)

    def loss(self, margins, y):
        return 0.5 * (margins - y) ** 2


class Gamma(Squared):
    """Gamma deviance's derivatives, which Treaty does not have; the mean is exp(margin)."""

    link = "log"

    def bounds(self, y):
        return 16.0, 16.0

    def gradients(self, margins, y):
        return 1.0 - y * np.exp(-margins), y * np.exp(-margins)

    def loss(self, margins, y):
        return y * np.exp(-margins) + margins


class Spread(Gamma):
    """Bounds that follow from labels."""

    def bounds(self, y):
        return float(np.max(y)) / 8.0, float(np.max(y)) / 4.0


class Tiny(Squared):
    """So small that reg_lambda in units of its hessians leaves int64."""

    def bounds(self, y):
        return 2.0**-50 * super().bounds(y)[0], 2.0**-50

    def gradients(self, margins, y):
        return 2.0**-50 * (margins - y), np.full_like(y, 2.0**-50)


class Logit(Squared):
    link = "logistic"

    def bounds(self, y):
        return 1.0, 1.0

    def gradients(self, margins, y):
        p = 1.0 / (1.0 + np.exp(-margins))
        return p - y, p * (1.0 - p)


class Wrong(Squared):
    def gradients(self, margins, y):
        return margins - y, np.full_like(y, np.nan)


class Negative(Squared):
    def gradients(self, margins, y):
        return margins - y, -np.ones_like(y)


class InPlace(Squared):
    def gradients(self, margins, y):
        margins -= y
        return margins, np.ones_like(y)


class InPlaceOnLabels(Squared):
    def gradients(self, margins, y):
        y -= margins
        return -y, np.ones_like(y)

    def bounds(self, y):
        y -= 100.0
        return 2.0 * float(np.max(np.abs(y))), 1.0

    def loss(self, margins, y):
        margins -= y
        return 0.5 * margins**2


class ArrayOfBoth(Squared):
    def gradients(self, margins, y):
        return np.stack([margins - y, np.ones_like(y)])


class OneColumn(Squared):
    def gradients(self, margins, y):
        return (margins - y)[:, None], np.ones_like(y)


class Text(Squared):
    def gradients(self, margins, y):
        return ["a"] * len(y), np.ones_like(y)


class Raising(Squared):
    def gradients(self, margins, y):
        raise ZeroDivisionError("boom")


class NoLicence(Squared):
    def __init__(self):
        raise RuntimeError("no licence")


class LossOfAll(Squared):
    def loss(self, margins, y):
        return 3.0


class LossOfNan(Squared):
    def loss(self, margins, y):
        return np.full_like(y, np.nan)


class LossOfPairs(Squared):
    def loss(self, margins, y):
        return np.square(margins[:, None] - y)


class LossMissing(Squared):
    def loss(self, margins, y):
        return None


class OneBound(Squared):
    def bounds(self, y):
        return 1.0


class TextBounds(Squared):
    def bounds(self, y):
        return "ab"


class VastBound(Squared):
    def bounds(self, y):
        return 1.5e308, 1.0


class Narrow(Squared):
    def bounds(self, y):
        return 4.0, 1.0


class Unbounded(Squared):
    def bounds(self, y):
        return 0.0, math.inf


class Linkless(Squared):
    link = "probit"


class Bare:
    link = "identity"


@pytest.fixture
def table():
    X, y = real_table("regression", rows=160)
    return cut(X, 2), y


def test_a_loss_that_treaty_has_gives_the_same_trees(table):
    tables, y = table
    own = treaty.GBDTRegressor(**OPTIONS).fit(tables, y)
    brought = treaty.GBDTRegressor(objective=Squared, **OPTIONS).fit(tables, y)
    assert_same_trees(brought, own)
    assert brought.clipped_rows_ == 0
    y = (y > 100).astype(float)
    options = {**OPTIONS, "base_score": 0.3}
    classes = treaty.GBDTClassifier(**options).fit(tables, y)
    brought = treaty.GBDTRegressor(objective=Logit, **options).fit(tables, y)
    np.testing.assert_allclose(brought.predict(tables), classes.predict_proba(tables)[:, 1], rtol=1e-12)


@pytest.mark.parametrize("transport", ["memory", slow("tls")])
@pytest.mark.parametrize("loss", [Squared, Gamma])
def test_trees_between_owners_of_columns_are_the_pooled_ones(table, loss, transport, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the parties' processes import the class from here
    tables, y = table
    weight = np.random.default_rng(0).gamma(2.0, 1.0, len(y))
    options = {**OPTIONS, "objective": loss}
    pooled = treaty.GBDTRegressor(**options).fit(tables, y, sample_weight=weight, eval_set=(tables, y))
    federated = treaty.GBDTRegressor(treaty.SecureBoost(**KEY), transport=transport, **options)
    federated.fit(tables, y, sample_weight=weight, eval_set=(tables, y))
    assert_same_trees(federated, pooled)
    assert federated.evals_result_ == pooled.evals_result_
    losses = pooled.evals_result_["eval_0"]["custom"]
    assert losses[-1] < losses[0]


def test_the_class_may_be_named_and_a_saved_model_does_without_it(table, tmp_path, monkeypatch):
    tables, y = table
    name = f"{__name__}:Gamma"
    named = treaty.GBDTRegressor(objective=name, **OPTIONS).fit(tables, y)
    model = treaty.GBDTRegressor(objective=Gamma, **OPTIONS).fit(tables, y)
    assert_same_trees(named, model)
    model.save(tmp_path / "model")
    monkeypatch.delattr(sys.modules[__name__], "Gamma")
    again = treaty.load(tmp_path / "model", trusted=[name])
    np.testing.assert_array_equal(again.predict(tables), model.predict(tables))
    assert again.objective == name
    np.testing.assert_allclose(np.log(model.predict(tables)), np.log(100.0), atol=3.0)


def test_what_is_beyond_the_bounds_is_clipped_and_counted(table):
    tables, y = table
    assert treaty.GBDTRegressor(objective=Narrow, **OPTIONS).fit(tables, y).clipped_rows_ > 100


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (Wrong, "Wrong.gradients to return two arrays of 160 finite numbers, .* 160 not finite"),
        (OneColumn, r"OneColumn.gradients to return .*, got ndarray \(160, 1\), ndarray \(160,\)"),
        (Text, "Text.gradients to return two arrays of 160 finite numbers, got list, ndarray"),
        (Raising, "Raising.gradients raised ZeroDivisionError: boom"),
        (NoLicence, "cannot make the loss .*NoLicence': no licence"),
        (LossOfAll, r"LossOfAll.loss to return an array of 160 finite numbers, got float \(\)"),
        (LossOfNan, r"LossOfNan.loss to return an array of 160 finite numbers, .* 160 not finite"),
        (LossOfPairs, r"LossOfPairs.loss to return an array of 160 finite numbers, got ndarray \(160, 160\)"),
        (LossMissing, "LossMissing.loss to return an array of 160 finite numbers, got NoneType"),
        (OneBound, "OneBound.bounds to return two numbers above 0, got 1.0"),
        (TextBounds, "TextBounds.bounds to return two numbers above 0"),
        (VastBound, "scale the labels down"),
        (Negative, "expected no hessian below 0 of .*Negative.gradients, got 160"),
        (Unbounded, "Unbounded.bounds to return two numbers above 0"),
        (Linkless, "to have a link of identity, log, logistic, got 'probit'"),
        (Bare, "it is no subclass of treaty.CustomLoss"),
        (
            "nowhere:Loss",
            "cannot make the loss 'nowhere:Loss': No module named 'nowhere'; expected package",
        ),
        (f"{__name__}:Missing", "cannot make the loss"),
    ],
    ids=str,
)
def test_faults_of_a_loss_are_named(table, loss, said):
    with pytest.raises(ConfigError, match=said):
        treaty.GBDTRegressor(objective=loss, **OPTIONS).fit(*table, eval_set=table)


@pytest.mark.parametrize("loss", [InPlace, InPlaceOnLabels, ArrayOfBoth])
def test_a_loss_may_change_what_it_is_given_and_return_one_array(table, loss):
    tables, y = table
    labels = y.copy()
    plain = treaty.GBDTRegressor(objective=Squared, **OPTIONS).fit(tables, y, eval_set=(tables, y))
    model = treaty.GBDTRegressor(objective=loss, **OPTIONS).fit(tables, y, eval_set=(tables, y))
    np.testing.assert_array_equal(y, labels)
    assert_same_trees(model, plain)
    assert model.evals_result_ == plain.evals_result_


@pytest.mark.parametrize("reg_lambda", [1.0, 2.0**-50])
def test_small_derivatives_are_trained_on_with_any_reg_lambda(table, reg_lambda):
    X, y = table
    options = {**OPTIONS, "min_split_loss": 0.0}
    given = {"reg_lambda": reg_lambda, "min_child_weight": 2.0**-70}  # above 0, as exact comparisons of gains need it
    model = treaty.GBDTRegressor("pooled", objective=Tiny, **{**options, **given}).fit(X, y)
    given = {name: value * 2.0**50 for name, value in given.items()}
    like = treaty.GBDTRegressor("pooled", objective=Squared, **{**options, **given}).fit(X, y)
    np.testing.assert_allclose(model.predict(X), like.predict(X), rtol=1e-9)


def test_a_base_score_that_the_link_does_not_give_is_refused(table):
    with pytest.raises(ConfigError, match="expected a base_score that the link 'log' of"):
        treaty.GBDTRegressor(objective=Gamma, **{**OPTIONS, "base_score": -1.0}).fit(*table)


def by_label(holders: int):
    """Return rows whose labels, and so their bounds, differ much between holders."""
    X, y = real_table("regression", rows=240)
    parts = np.array_split(np.argsort(y, kind="stable"), holders)
    return {f"user{k}": (X.iloc[of], y[of]) for k, of in enumerate(parts)}


@pytest.mark.parametrize("base_score", [100.0, None])
@pytest.mark.parametrize("loss", [Squared, Spread])
def test_trees_between_owners_of_rows_are_the_pooled_ones(seen, loss, base_score):  # noqa: F811
    rows = by_label(3)
    own = [power_of_two(loss().bounds(y)[1]) for _, y in rows.values()]
    assert loss is Squared or len(set(own)) == 3, "all have the same bounds: the test proves nothing"
    name = f"{loss.__module__}:{loss.__name__}"
    model = check_fit(seen, rows, "regression", objective=name, base_score=base_score)
    assert model.parts_["pooled"].forest.objective.hess_clip == max(own)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Squared, Spread])
def test_trees_among_users_are_those_between_owners_of_rows(loss):
    rows = by_label(9)
    ours, theirs = (
        estimator("regression", system, objective=loss, base_score=100.0).fit(rows)
        for system in ("fedxgb", "federboost-horizontal")
    )
    same_but_for_rounding(trees_of(ours), trees_of(theirs))


@pytest.mark.slow
def test_processes_of_owners_of_rows_import_the_class(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    rows = by_label(3)
    apart, threads = (
        treaty.GBDTRegressor("federboost-horizontal", objective=Spread, transport=transport, **OPTIONS).fit(rows)
        for transport in ("tls", "memory")
    )
    assert_same_trees(apart, threads)


def test_a_hidden_model_of_a_loss_of_ones_own_predicts():
    rows = by_label(9)
    options = {**OPTIONS, "objective": Spread, "n_estimators": 2}
    hidden, known = (
        treaty.GBDTRegressor(treaty.FedXGB(expose=expose), **options).fit(rows) for expose in ("nothing", "model")
    )
    X = pd.concat([of for of, _ in rows.values()])
    np.testing.assert_array_equal(hidden.predict(X), known.predict(X))


def test_bins_are_searched_for_anew_as_a_class_may_have_other_bounds(tmp_path):
    rows = by_label(3)
    for _ in range(2):
        model = treaty.GBDTRegressor("federboost-horizontal", objective=Spread, **OPTIONS)
        model.fit(rows, checkpoint=tmp_path)
        assert "ProbeRequest" in model.communication_["user0 -> user1"]["by_type"]
    assert not list(tmp_path.rglob("*.bins")), "bins that nothing reads take the place of others"


def test_a_loss_of_ones_own_has_no_name_in_xgboost_but_its_link_has(table):
    xgboost = pytest.importorskip("xgboost")
    tables, y = table
    for loss in (Squared, Gamma):
        model = treaty.GBDTRegressor(objective=loss, **OPTIONS).fit(tables, y)
        joined = np.concatenate([of.to_numpy() for of in tables.values()], axis=1)
        booster = model.to_xgboost()
        found = booster.predict(xgboost.DMatrix(joined, feature_names=booster.feature_names))
        np.testing.assert_allclose(found, model.predict(tables), rtol=1e-5)
