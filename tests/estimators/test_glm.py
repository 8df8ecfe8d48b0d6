"""The scikit-learn face of regressions of numbers, and standard errors of all linear models."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.linear_model import LinearRegression as TheirRegression
from sklearn.linear_model import PoissonRegressor as TheirPoisson
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import treaty
from tables import cut, cut_for_active, real_table, with_categories, with_gaps
from treaty.systems.logistic.options import OF_SCORECARDS, RegressionOptions
from treaty.systems.options import names_of

OF_LOGISTIC = {
    "family", "batch_size", "memory", "period", "hessian_batch_size", "calibrate", "early_stopping_rounds",
    "random_state",
}  # fmt: skip
"""Common options that a regression on the whole table has no use for."""


@parametrize_with_checks([treaty.LinearRegression(), treaty.PoissonRegressor()])
def test_scikit_learn_contract_holds(estimator, check):
    check(estimator)


def test_estimator_defaults_are_the_options_defaults():
    defaults = {name: p.default for name, p in inspect.signature(treaty.LinearRegression.__init__).parameters.items()}
    shared = set(names_of(RegressionOptions)) - OF_LOGISTIC - {"pdo", *OF_SCORECARDS}
    assert set(defaults) == {"self", "protocol", "active", "transport", "n_jobs", "parties", "verbose", *shared}
    options = RegressionOptions()
    assert all(defaults[name] == getattr(options, name) for name in shared)


def scaled(X: pd.DataFrame) -> np.ndarray:
    return StandardScaler().fit_transform(X.astype(np.float32).astype(float))


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"batch_size": 1000}, 30),
        ({}, 100),
        ({"family": "poisson"}, 100),
        ({"standard_errors": True}, 100),
        ({"family": "linear", "max_iter": 7}, 7),
    ],
)
def test_most_steps_left_open_are_more_on_the_whole_table(given, most):
    """Counts of long-tailed columns between two parties took 42 and 57 steps: 30 left weights 64 % off."""
    assert RegressionOptions(**given).most_rounds == most


def test_it_finds_what_scikit_learn_finds():
    X, y = real_table("regression")
    ours = treaty.LinearRegression().fit(X, y)
    theirs = TheirRegression().fit(scaled(X), y)
    np.testing.assert_allclose(ours.standardized_coef_, theirs.coef_, rtol=1e-5)
    np.testing.assert_allclose(ours.standardized_intercept_, theirs.intercept_, rtol=1e-7)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(scaled(X)), rtol=1e-6)
    assert ours.score(X, y) == pytest.approx(theirs.score(scaled(X), y), rel=1e-6)


def test_weights_of_rows_are_those_of_scikit_learn():
    X, y = real_table("regression")
    weight = np.arange(len(y)) % 4 + 0.5
    ours = treaty.LinearRegression().fit(X, y, weight)
    theirs = TheirRegression().fit(scaled(X), y, weight)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(scaled(X)), rtol=1e-6)


def test_counts_have_scikit_learns_weights_and_fishers_errors(tmp_path):
    X, y = real_table("regression")
    y = np.floor(y / 40.0)
    model = treaty.PoissonRegressor(standard_errors=True).fit(X.iloc[:, :4], y)
    A = np.column_stack([scaled(X.iloc[:, :4]), np.ones(len(y))])
    theirs = TheirPoisson(alpha=0.0, tol=1e-12, solver="newton-cholesky").fit(A[:, :-1], y)
    np.testing.assert_allclose(model.standardized_coef_, theirs.coef_, atol=1e-6)
    np.testing.assert_allclose(model.standardized_intercept_, theirs.intercept_, rtol=1e-6)
    np.testing.assert_allclose(model.predict(X.iloc[:, :4]), theirs.predict(A[:, :-1]), rtol=1e-6)
    assert model.score(X.iloc[:, :4], y) == pytest.approx(theirs.score(A[:, :-1], y), rel=1e-6)
    information = A.T @ (A * theirs.predict(A[:, :-1])[:, None])
    np.testing.assert_allclose(model.standardized_errors_, np.sqrt(np.diag(np.linalg.inv(information))), rtol=1e-5)
    model.save(tmp_path)
    assert type(treaty.load(tmp_path)) is treaty.PoissonRegressor
    np.testing.assert_array_equal(treaty.load(tmp_path).predict(X.iloc[:, :4]), model.predict(X.iloc[:, :4]))
    penalised = treaty.PoissonRegressor(l2=0.3).fit(X.iloc[:, :4], y)
    theirs = TheirPoisson(alpha=0.3 * y.mean(), tol=1e-12, solver="newton-cholesky").fit(A[:, :-1], y)
    np.testing.assert_allclose(penalised.standardized_coef_, theirs.coef_, atol=1e-6)
    with pytest.raises(treaty.DataError, match="expected counts, 0 or more and not all 0, got 240 negative ones"):
        treaty.PoissonRegressor().fit(X, -y - 1)


def closed_form(X: np.ndarray, y: np.ndarray, family: str) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and standard errors by textbook formulas, the intercept's last."""
    A = np.column_stack([X, np.ones(len(X))])
    if family == "linear":
        w = np.linalg.solve(A.T @ A, A.T @ y)
        return w, np.sqrt(np.diag(np.linalg.inv(A.T @ A)) * np.sum((y - A @ w) ** 2) / (len(y) - A.shape[1]))
    w = np.zeros(A.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-A @ w))
        information = A.T @ (A * (p * (1 - p))[:, None])
        w = w + np.linalg.solve(information, A.T @ (y - p))
    return w, np.sqrt(np.diag(np.linalg.inv(information)))


def whole(values: dict[str, np.ndarray], active: str = "p0") -> np.ndarray:
    """Put the parties' numbers side by side, the active party's intercept last."""
    own = [of[:-1] if name == active else of for name, of in values.items()]
    return np.concatenate([*own, values[active][-1:]])


@pytest.mark.parametrize("family", ["linear", "logistic"])
def test_standard_errors_on_one_table_are_those_of_the_textbook(family):
    X, y = real_table("regression" if family == "linear" else "binary")
    X = X.iloc[:, :3]
    if family == "linear":
        model = treaty.LinearRegression(standard_errors=True)
    else:
        model = treaty.LogisticRegression(treaty.Pooled(loss="logistic"), standard_errors=True)
    model.fit(X, y)
    weights, errors = closed_form(scaled(X), y, family)
    np.testing.assert_allclose(np.append(model.standardized_coef_, model.standardized_intercept_), weights, rtol=1e-4)
    np.testing.assert_allclose(model.standardized_errors_, errors, rtol=1e-4)
    weights, errors = closed_form(X.to_numpy(float), y, family)
    np.testing.assert_allclose(np.append(model.coef_, model.intercept_), weights, rtol=1e-4)
    np.testing.assert_allclose(model.standard_errors_, errors, rtol=1e-4)
    reach = model.confidence_intervals_ - weights[:, np.newaxis]
    np.testing.assert_allclose(
        reach[:, 1] / errors, stats.t.ppf(0.975, len(y) - 4) if family == "linear" else 1.95996, rtol=1e-3
    )
    np.testing.assert_allclose(reach[:, 0], -reach[:, 1], rtol=1e-2)
    assert model.p_values_.shape == (4,)
    assert ((model.p_values_ < 0.05) == (np.abs(weights) > 1.97 * errors)).all()
    apart = clone(model).fit(cut(X, 2), y)
    np.testing.assert_allclose(whole(apart.standard_errors_)[:-1], errors[:-1], rtol=1e-4)
    np.testing.assert_allclose(whole(apart.p_values_)[:-1], model.p_values_[:-1], rtol=1e-6)


def far_from_the_mean() -> tuple[pd.DataFrame, np.ndarray]:
    """Return columns that are 1 in 5 of 10,000 rows, and of a long tail, and what they add to beside noise."""
    rng = np.random.default_rng(7)
    rare, income = np.zeros(10_000), np.exp(rng.normal(3.0, 2.0, 10_000)).round(1)
    rare[rng.choice(10_000, 5, replace=False)] = 1.0
    X = pd.DataFrame({"age": rng.normal(size=10_000), "rare": rare, "income": income}).astype(np.float32)
    return X, 0.3 + 0.5 * X["age"].to_numpy(float) + rare + 5e-4 * income + rng.normal(size=10_000)


def in_units(model: treaty.LinearRegression) -> tuple[np.ndarray, np.ndarray]:
    """Return weights in units of the columns as they came, the intercept's last, and their standard errors."""
    return np.append(model.coef_, model.intercept_), getattr(model, "standard_errors_", np.zeros(0))


@pytest.mark.parametrize("family", ["linear", "logistic", "poisson"])
def test_rare_and_far_values_count_as_they_are(family):
    X, y = far_from_the_mean()
    A, rng = X.to_numpy(float), np.random.default_rng(1)
    if family == "linear":
        model, target = treaty.LinearRegression(standard_errors=True), y
    elif family == "logistic":
        model = treaty.LogisticRegression(treaty.Pooled(loss="logistic"), standard_errors=True, tol=1e-7)
        target = (rng.random(len(y)) < 1.0 / (1.0 + np.exp(1.0 - y))).astype(int)
    else:
        model = treaty.PoissonRegressor(standard_errors=True, tol=1e-7)
        target = rng.poisson(np.exp(np.minimum(y, 3.0) / 2.0))
    weights, errors = in_units(model.fit(X, target))
    if family == "poisson":
        theirs = TheirPoisson(alpha=0.0, tol=1e-12, solver="newton-cholesky").fit(A / A.std(axis=0), target)
        expected = np.append(theirs.coef_ / A.std(axis=0), theirs.intercept_)
        D = np.column_stack([A, np.ones(len(A))])
        of_errors = np.sqrt(np.diag(np.linalg.inv(D.T @ (D * np.exp(D @ expected)[:, None]))))
    else:
        expected, of_errors = closed_form(A, target, family)
    np.testing.assert_allclose(weights, expected, rtol=1e-4)
    np.testing.assert_allclose(errors, of_errors, rtol=1e-4)


def test_rare_and_far_values_count_as_they_are_with_weights():
    X, y = far_from_the_mean()
    weight = np.random.default_rng(2).integers(0, 5, len(y)) * 0.5
    theirs = TheirRegression().fit(X.astype(float), y, weight)
    weights, _ = in_units(treaty.LinearRegression().fit(X, y, weight))
    np.testing.assert_allclose(weights, np.append(theirs.coef_, theirs.intercept_), rtol=1e-4)


@pytest.mark.parametrize("encryption", ["lattice", "ou"])
def test_rare_and_far_values_count_as_they_are_between_parties(encryption):
    X, y = far_from_the_mean()
    kept = np.append(np.flatnonzero(X["rare"] == 1.0), np.flatnonzero(X["income"] == X["income"].max()))
    rows = np.unique(np.append(kept, np.arange(700)))  # an encryption a row
    X, y = X.iloc[rows], y[rows]
    system = treaty.QuasiNewton(coordinator=False, encryption=encryption)
    model = treaty.LinearRegression(system, standard_errors=True, parties={"p0": ["age"], "p1": ["rare", "income"]})
    model.fit(X, y)
    weights, errors = closed_form(X.to_numpy(float), y, "linear")
    np.testing.assert_allclose(model.coef_["p1"], weights[1:3], rtol=1e-4)
    np.testing.assert_allclose(model.intercept_, weights[-1], rtol=1e-4)
    np.testing.assert_allclose(model.standard_errors_["p1"], errors[1:3], rtol=1e-4)


def test_fit_between_threads_gives_the_pooled_model(tmp_path):
    X, y = real_table("regression", rows=340)
    tables = cut_for_active(X, 2)
    given = {"standard_errors": True, "tol": 1e-6}
    alone = treaty.LinearRegression(**given).fit(tables, y)
    model = treaty.LinearRegression(treaty.QuasiNewton(coordinator=False, encryption="lattice"), **given).fit(tables, y)
    np.testing.assert_allclose(model.predict(tables), alone.predict(tables), rtol=1e-5)
    np.testing.assert_allclose(whole(model.standard_errors_), whole(alone.standard_errors_), rtol=1e-6)
    np.testing.assert_allclose(whole(model.p_values_), whole(alone.p_values_), rtol=1e-3)
    assert model.n_iter_ == len(model.loss_history_) < 25
    assert "how far" in " ".join(model.disclosures_["p0"])
    model.save(tmp_path / "model")
    for again in (treaty.load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
        assert type(again) is treaty.LinearRegression
        np.testing.assert_array_equal(again.predict(tables), model.predict(tables))
        np.testing.assert_array_equal(again.p_values_["p1"], model.p_values_["p1"])
        assert again.get_params()["standard_errors"] is True
        assert again.n_iter_ == model.n_iter_


@pytest.mark.slow
def test_fit_between_processes_gives_the_pooled_model():
    X, y = real_table("regression", rows=340)
    tables = cut_for_active(X, 2)
    given = {"standard_errors": True, "tol": 1e-6}
    alone = treaty.LinearRegression(**given).fit(tables, y)
    model = treaty.LinearRegression("quasi-newton", transport="tls", **given).fit(tables, y)
    np.testing.assert_allclose(whole(model.standard_errors_), whole(alone.standard_errors_), rtol=1e-6)
    np.testing.assert_allclose(model.predict(tables), alone.predict(tables), rtol=1e-5)


def test_counts_between_parties_take_few_steps_and_show_each(capsys, caplog):
    """Old pairs of a loss that is no quadratic led steps astray: 27 were taken. A step encrypts every row."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(400, 8))
    X[:, 4:] = 0.7 * X[:, 4:] + 0.5 * X[:, :4]
    y = rng.poisson(np.exp(X @ rng.normal(size=8) * 0.3 - 0.5)).astype(float)
    tables = {"p0": X[:, :4], "p1": X[:, 4:]}
    system = treaty.QuasiNewton(coordinator=False, insecure_test_key_bits=1024, allow_insecure=True)
    with caplog.at_level("INFO", "treaty.runs.progress"):
        model = treaty.PoissonRegressor(system, standard_errors=True, verbose=1).fit(tables, y)
    alone = treaty.PoissonRegressor(standard_errors=True).fit(tables, y)
    assert model.n_iter_ <= 24
    np.testing.assert_allclose(model.predict(tables), alone.predict(tables), rtol=1e-4)
    np.testing.assert_allclose(whole(model.standard_errors_), whole(alone.standard_errors_), rtol=1e-4)
    assert [line.partition("]")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"[{k}" for k in range(model.n_iter_)
    ]
    assert "multiplying for standard errors, 4 of 4" in caplog.text


def of_towns(rows: int = 400) -> tuple[pd.DataFrame, np.ndarray]:
    """Return columns far from 0, one of categories, and a number that follows from them."""
    rng = np.random.default_rng(4)
    X = pd.DataFrame(
        {"age": rng.normal(50, 10, rows), "income": np.exp(rng.normal(10, 1, rows)).round()}, dtype=np.float32
    )
    X["town"] = pd.Categorical(rng.choice(["a", "b", "c"], rows))
    y = 2.0 + 0.3 * X["age"] + 1e-4 * X["income"] + 3.0 * (X["town"] == "b") + rng.normal(size=rows)
    return X, y.to_numpy(float)


def test_categories_are_set_against_the_first_between_parties_as_on_one_table():
    X, y = of_towns()
    dummies = np.column_stack([X["town"] == "b", X["town"] == "c"])
    weights, errors = closed_form(np.column_stack([X["age"], X["income"], dummies]).astype(float), y, "linear")
    given = {"standard_errors": True, "reference": "first"}
    model = treaty.LinearRegression(**given).fit(X, y)
    table = model.summary()
    assert list(table["column"]) == ["age", "income", "town=b", "town=c", "intercept"]
    np.testing.assert_allclose(table["coef"], weights, rtol=1e-4)
    np.testing.assert_allclose(table["standard_error"], errors, rtol=1e-4)
    apart = treaty.LinearRegression(
        treaty.QuasiNewton(coordinator=False), **given, parties={"p": ["age"], "q": ["income", "town"]}
    )
    apart.fit(X, y)
    of_all = apart.summary()
    assert list(of_all["party"]) == ["p", "p", "q", "q", "q"]
    kept = [0, 2, 3, 4]
    np.testing.assert_allclose(of_all["coef"][kept], weights[:4], rtol=1e-4)
    np.testing.assert_allclose(of_all["standard_error"][kept], errors[:4], rtol=1e-4)
    assert apart.intercept_ == pytest.approx(weights[-1], rel=1e-4)
    # where the others' columns are at their means: a regression on columns less these
    centred = np.column_stack([X["age"], X["income"] - X["income"].mean(), dummies - dummies.mean(axis=0)]).astype(
        float
    )
    weights, errors = closed_form(centred, y, "linear")
    assert of_all["coef"][1] == pytest.approx(weights[-1], rel=1e-4)
    assert of_all["standard_error"][1] == pytest.approx(errors[-1], rel=1e-4)
    np.testing.assert_allclose(apart.predict(X), model.predict(X), rtol=1e-6)
    narrow = of_all["upper"] - of_all["lower"] > (other := apart.summary(alpha=0.1))["upper"] - other["lower"]
    assert narrow.all()


def test_rows_with_missing_values_are_counted_and_refused_or_left_out_by_name():
    X, y = of_towns()
    X.loc[[3, 8], "age"] = np.nan
    X.loc[8, "town"] = np.nan
    with pytest.raises(treaty.DataError, match="2 of 400 rows have missing values, 2 in column 'age': leave these"):
        treaty.LinearRegression(standard_errors=True).fit(X, y)
    split, full = {"p": ["income"], "q": ["age", "town"]}, X.notna().all(axis=1).to_numpy()
    for given in ({}, {"protocol": treaty.QuasiNewton(coordinator=False), "parties": split}):
        if given:
            with pytest.raises(treaty.DataError, match=r"^q: 2 of 400 rows have missing values"):
                treaty.LinearRegression(**given, missing="raise").fit(X, y)
        model = treaty.LinearRegression(**given, standard_errors=True, missing="drop").fit(X, y)
        assert model.n_dropped_ == 2
        alone = treaty.LinearRegression(standard_errors=True).fit(X[full], y[full])
        np.testing.assert_allclose(model.predict(X[full]), alone.predict(X[full]), rtol=1e-6)
    treaty.LinearRegression().fit(X, y)


def test_missing_values_and_categories_are_predicted():
    X, y = real_table("regression")
    X = with_gaps(with_categories(X))
    model = treaty.LinearRegression(standard_errors=True, missing="median").fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    (part,) = model.parts_.values()
    table = part.table()
    found = ["column", "coef", "standard_error", "t", "p_value", "lower", "upper", "standardized_coef"]
    assert list(table) == list(model.summary().columns) == found
    assert table["column"][-1] == "intercept"
    assert {len(values) for values in table.values()} == {len(model.coef_) + 1}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: treaty.LinearRegression(l2=1.0, standard_errors=True), "expected l2=0 with standard_errors"),
        (lambda: treaty.LinearRegression(treaty.Pooled(solver="sgd")), "leave solver out"),
        (lambda: treaty.LinearRegression(treaty.Pooled(loss="logistic")), "leave loss out"),
        (lambda: treaty.LinearRegression(batch_size=100), "has no parameter 'batch_size'"),
        (lambda: treaty.LinearRegression("secureboost"), "a system of GBDTClassifier and GBDTRegressor"),
        (
            lambda: treaty.LinearRegression(treaty.SGD(mode="paper", allow_insecure=True)),
            "no standard errors, and no other regression",
        ),
    ],
)
def test_wrong_options_are_named(model, words):
    X, y = real_table("regression", rows=340)
    with pytest.raises(treaty.ConfigError, match=words):
        model().fit(cut_for_active(X, 2), y)


def test_weights_of_rows_have_no_standard_errors():
    X, y = real_table("regression")
    with pytest.raises(treaty.ConfigError, match="sample_weight"):
        treaty.LinearRegression(standard_errors=True).fit(X, y, np.ones(len(y)))


def test_wrong_targets_name_the_party():
    X, y = real_table("regression", rows=340)
    model, tables = treaty.LinearRegression(), cut_for_active(X, 2)
    for target, words in [
        (np.where(np.arange(340) == 3, np.nan, y), "p0: expected a label in every row, got 1"),
        (np.array(["a"] * 340), "p0: expected numbers as target"),
        (np.full(340, 2.5), "p0: expected a target that varies"),
        (y[:-1], "p0: expected 340 labels"),
    ]:
        with pytest.raises(treaty.DataError, match=words):
            model.fit(tables, target)


@pytest.mark.parametrize("alpha", [5, 95, 0.0, 1.0, float("nan"), "0.05"])
def test_a_share_of_errors_that_is_none_is_refused(alpha):
    """Limits were NaN."""
    X = np.random.default_rng(0).normal(size=(50, 2))
    model = treaty.LinearRegression(standard_errors=True, n_jobs=1).fit(X, X @ [1.0, 2.0] + X[:, 0] ** 2)
    with pytest.raises(treaty.ConfigError, match="expected alpha between 0 and 1"):
        model.summary(alpha)
    assert "lower" in model.summary(0.1)
