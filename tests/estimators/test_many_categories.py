"""Columns of many categories: training does not diverge on them, and no category shares a bin in silence."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import xgboost

import treaty

JOINED = "column 'code' has 100 categories, and max_categories is 64: its 37 rarest categories"


def connections(mix: float, profile: float, n_rows: int = 100_000) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a column of 65 services and 12 classes from 57 % of rows to 1 in 10,000, as in logs of connections."""
    rng, classes, services = np.random.default_rng(1), 12, 65
    share = np.r_[0.57, 0.22, 0.19, np.geomspace(0.01, 1e-4, 9)]
    y = rng.choice(classes, n_rows, p=share / share.sum())
    popular = 1.0 / np.arange(1, services + 1) ** 1.5
    profiles = (1 - mix) * rng.dirichlet(np.full(services, profile), classes) + mix * popular / popular.sum()
    service = np.zeros(n_rows, int)
    for label in range(classes):
        of = y == label
        service[of] = rng.choice(services, of.sum(), p=profiles[label])
    X = pd.DataFrame({"service": pd.Categorical([f"s{code:02}" for code in service])})
    return X, np.unique(y, return_inverse=True)[1]


def coded(levels: int = 100, rows: int = 8) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a column of so many categories with as many rows each, and one of numbers."""
    rng = np.random.default_rng(0)
    code = np.repeat(np.arange(levels), rows)
    y = (rng.random(levels) < 0.5)[code] ^ (rng.random(len(code)) < 0.1)
    X = pd.DataFrame({"code": pd.Categorical([f"k{number}" for number in code]), "x": rng.normal(size=len(code))})
    return X, y.astype(int)


@pytest.mark.parametrize(
    ("mix", "depth", "options"), [(0.1, 3, {}), (0.02, 1, {"max_cat_to_onehot": 4, "category_sets": "sorted"})]
)
def test_the_training_loss_falls_on_rare_classes_and_many_categories(mix: float, depth: int, options: dict) -> None:
    X, y = connections(mix, 0.02)
    model = treaty.GBDTClassifier(max_depth=depth, **options).fit(X, y, eval_set=(X, y))
    losses = model.evals_result_["eval_0"]["mlogloss"]
    assert losses[-1] == min(losses) < 0.5


def test_leaf_weights_of_log_odds_are_limited_and_gains_are_not() -> None:
    # two classes mixed in one service, of which one seems impossible there: hess is 0.02 a row, grad nearly 1
    rules = treaty.trees.splits.SplitRules(grad_unit=1.0, hess_unit=1.0, learning_rate=1.0, leaf_limit=10.0)
    totals = np.array([[-500, 2, 500], [3, 2, 500]])
    np.testing.assert_array_equal(rules.leaf_value(totals), [10.0, -1.0])
    unlimited = treaty.trees.splits.SplitRules(grad_unit=1.0, hess_unit=1.0)
    np.testing.assert_array_equal(rules.gain(totals, totals // 2), unlimited.gain(totals, totals // 2))


@pytest.mark.parametrize("below", [None, 4])
def test_one_model_however_sums_travel(below: int | None) -> None:
    X, y = coded(levels=30, rows=20)
    parts = {"p": X[["x"]], "q": X[["code"]]}
    options = {"n_estimators": 3, "max_bin": 64, "n_jobs": 1, "max_cat_to_onehot": below}
    pooled = treaty.GBDTClassifier(**options).fit(X[["x", "code"]], y).predict_proba(X[["x", "code"]])
    for system in (treaty.SecureBoost(sums="open", allow_exact_sums=True), treaty.SecureBoost(sums="sealed")):
        model = treaty.GBDTClassifier(system, **options).fit(parts, y)
        np.testing.assert_array_equal(model.predict_proba(parts), pooled)


def test_halves_find_many_categories_as_xgboost_does_and_pay_less_heed_to_noise() -> None:
    options = {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3}
    for signal in (True, False):
        X, y = coded(levels=250, rows=40)
        rng = np.random.default_rng(3)
        y = y if signal else (rng.random(len(y)) < 1 / (1 + np.exp(-X["x"]))).astype(int).to_numpy()
        test = rng.random(len(y)) < 0.3
        models = {
            sets: treaty.GBDTClassifier(max_bin=255, max_cat_to_onehot=4, category_sets=sets, **options)
            for sets in ("halves", "sorted")
        }
        models["single"] = treaty.GBDTClassifier(max_bin=255, max_cat_to_onehot=256, **options)
        models["xgboost"] = xgboost.XGBClassifier(tree_method="hist", enable_categorical=True, n_jobs=1, **options)
        found = {
            name: float((model.fit(X[~test], y[~test]).predict(X[test]) == y[test]).mean())
            for name, model in models.items()
        }
        assert found["halves"] > found["xgboost"] - 0.01
        assert found["halves"] > (found["single"] + 0.1 if signal else found["sorted"] + 0.01)


def test_fit_warns_of_categories_that_share_a_bin_with_party_and_numbers() -> None:
    X, y = coded()
    with pytest.warns(UserWarning, match=JOINED + r", 37.0 % of its rows, share one bin"):
        model = treaty.GBDTClassifier(n_estimators=2, max_categories=64, n_jobs=1).fit(X, y)
    assert [sentence[:20] for sentence in model.warnings_] == ["column 'code' has 10"]
    with pytest.warns(UserWarning, match="^shop: " + JOINED):
        treaty.GBDTClassifier(
            treaty.SecureBoost(sums="open", allow_exact_sums=True), n_estimators=2, n_jobs=1, max_categories=64,
            parties={"bank": ["x"], "shop": ["code"]},
        ).fit(X, y)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        treaty.GBDTClassifier(n_estimators=2, max_bin=2, n_jobs=1).fit(X, y)


def test_fit_warns_when_the_training_loss_rises() -> None:
    X, y = coded()
    noisy = np.random.default_rng(0).integers(0, 2, len(y))
    with pytest.warns(UserWarning, match=r"the training loss rose from .* after round \d+ to .* after round 16: lower"):
        model = treaty.GBDTClassifier(n_estimators=16, learning_rate=12.0, n_jobs=1).fit(X[["x"]], noisy)
    assert "lower learning_rate" in model.warnings_[0]


def test_no_more_bins_are_advised_where_there_are_no_more() -> None:
    X = pd.DataFrame({"code": pd.Categorical(np.arange(2 * 40_000) % 40_000)})
    y = np.random.default_rng(0).integers(0, 2, len(X))
    with pytest.warns(UserWarning, match=r"its 7234 rarest .* cannot distinguish them\. Group the categories"):
        treaty.GBDTClassifier(n_estimators=1, n_jobs=1).fit(X, y)


def codes_of_many_levels(levels: int = 400, rows: int = 6) -> tuple[pd.DataFrame, np.ndarray]:
    """Return `coded` with missing categories, another column of many categories, and one of numbers."""
    X, y = coded(levels, rows)
    rng = np.random.default_rng(1)
    missing = X["code"].mask(rng.random(len(X)) < 0.1)
    return X.assign(code=missing, other=pd.Categorical(rng.integers(0, 300, len(X)).astype(str))), y


@pytest.mark.parametrize("passive", [[["code"]], [["other"], ["code"]], [["x"], ["other"], ["code"], ["flat"]]])
def test_open_sums_give_the_pooled_model_beyond_255_categories(passive: list[list[str]]) -> None:
    X, y = codes_of_many_levels()
    X = X.assign(flat=1.0)
    active = [name for name in X.columns if not any(name in names for names in passive)]
    columns = {"p0": active, **{f"p{k}": names for k, names in enumerate(passive, start=1)}}
    parts = {party: X[names] for party, names in columns.items()}
    options = {"n_estimators": 3, "max_bin": 16, "min_child_samples": 2, "n_jobs": 1}
    joined = X[[name for names in columns.values() for name in names]]
    pooled = treaty.GBDTClassifier(**options).fit(joined, y)
    model = treaty.GBDTClassifier(treaty.SecureBoost(sums="open", allow_exact_sums=True), **options).fit(parts, y)
    np.testing.assert_array_equal(model.predict_proba(parts), pooled.predict_proba(joined))
    # two thirds of the categories' labels are learned, which no 16 bins could hold
    assert np.mean(pooled.predict(joined) == y) > 0.8
    # an unseen category goes where missing values go
    unseen, lost = joined.assign(code=pd.Categorical(["new"] * len(X))), joined.assign(code=None)
    with pytest.warns(UserWarning, match="categories that training did not have, 'new'"):
        np.testing.assert_array_equal(pooled.predict_proba(unseen), pooled.predict_proba(lost))


def test_rows_of_several_parties_give_the_model_of_one_table_beyond_255_categories() -> None:
    X, y = codes_of_many_levels()
    X["x"] = X["x"].round()  # as many values as bins: by row, quantiles are searched for
    options = {"n_estimators": 3, "max_bin": 16, "min_child_samples": 2, "n_jobs": 1}
    pooled = treaty.GBDTClassifier(**options).fit(X, y).predict_proba(X)
    rows = {f"p{k}": np.arange(len(X)) % 3 == k for k in range(3)}
    by_row = treaty.GBDTClassifier(treaty.FederBoostHorizontal(), **options)
    by_row.fit({party: (X[of], y[of]) for party, of in rows.items()})
    np.testing.assert_allclose(by_row.predict_proba(X), pooled, atol=1e-3)


@pytest.mark.parametrize(
    "system",
    [
        treaty.FederBoostVertical(),
        treaty.FederBoostHorizontal(epsilon_total=1.0),
        treaty.FedXGB(),
        treaty.FedXGBoostLDP(),
    ],
)
def test_systems_whose_noise_or_cost_grows_join_categories_beyond_max_bin(system: object) -> None:
    _, own, common = treaty.GBDTClassifier(system, max_bin=16)._settings()
    assert own.limits_categories
    assert (common.most_categories, common.rules_of(1.0, 1.0).onehot_below > common.most_categories) == (16, True)
    with pytest.raises(treaty.ConfigError, match=r"max_categories of at most 255 under .* grows with the categories"):
        treaty.GBDTClassifier(system, max_categories=256)._settings()


@pytest.mark.parametrize("sums", ["open", "sealed"])
def test_missing_values_alone_may_be_a_half(sums: str) -> None:
    """Where every category has too few rows, they are what is left above the mean."""
    rng, missing = np.random.default_rng(0), np.arange(300) < 140
    code = pd.Categorical(np.where(missing, None, (np.arange(300) % 40).astype(str)))
    X = pd.DataFrame({"x": rng.normal(size=300).round(1), "code": code})
    y = (missing ^ (rng.random(300) < 0.1)).astype(int)
    parts, options = {"p": X[["x"]], "q": X[["code"]]}, {"n_estimators": 1, "max_depth": 1, "n_jobs": 1}
    pooled = treaty.GBDTClassifier(**options).fit(X[["x", "code"]], y)
    splits = pooled.parts_["pooled"].splits
    # the last entry is of unknown categories
    assert (splits.missing_left, splits.category_left) == ([True], [bytes([*[0] * 40, 1])])
    model = treaty.GBDTClassifier(treaty.SecureBoost(sums=sums, allow_exact_sums=True), **options).fit(parts, y)
    np.testing.assert_array_equal(model.predict_proba(parts), pooled.predict_proba(X))
    exported = pooled.to_xgboost().predict(xgboost.DMatrix(X, enable_categorical=True))
    np.testing.assert_allclose(exported, pooled.predict_proba(X)[:, 1], atol=1e-6)


def test_sealed_sums_give_the_pooled_model_beyond_255_categories() -> None:
    X, y = coded(levels=300, rows=24)
    parts = {"p": X[["x"]], "q": X[["code"]]}
    options = {"n_estimators": 1, "max_depth": 2, "max_bin": 4, "n_jobs": 1}
    pooled = treaty.GBDTClassifier(**options).fit(X[["x", "code"]], y)
    model = treaty.GBDTClassifier(treaty.SecureBoost(sums="sealed"), **options).fit(parts, y)
    np.testing.assert_array_equal(model.predict_proba(parts), pooled.predict_proba(X[["x", "code"]]))
    assert np.mean(pooled.predict(X[["x", "code"]]) == y) > 0.8
