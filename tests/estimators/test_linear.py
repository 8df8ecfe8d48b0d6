"""The scikit-learn face of linear models."""

from __future__ import annotations

import inspect
import pickle
import warnings

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression as TheirRegression
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import treaty
from flat import flat
from tables import cut, real_table, with_categories, with_gaps
from treaty.linear.preparation import Calibration
from treaty.models.linear import LinearPart, load_linear_part
from treaty.systems.logistic.options import OF_SCORECARDS, RegressionOptions
from treaty.systems.options import names_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*rows have a margin beyond 4:UserWarning"),
    pytest.mark.filterwarnings("ignore:training ended after max_iter"),
]


@parametrize_with_checks(
    [treaty.LogisticRegression(), treaty.LogisticRegression(treaty.Pooled(loss="logistic", solver="sgd"))]
)
def test_scikit_learn_contract_holds(estimator, check):
    check(estimator)


def test_estimator_defaults_are_the_options_defaults():
    defaults = {name: p.default for name, p in inspect.signature(treaty.LogisticRegression.__init__).parameters.items()}
    shared = set(names_of(RegressionOptions)) - {"family", "pdo", *OF_SCORECARDS}
    assert set(defaults) == {
        "self",
        "protocol",
        "active",
        "transport",
        "n_jobs",
        "parties",
        "verbose",
        "C",
        "class_weight",
        *shared,
    }
    options = RegressionOptions()
    assert all(defaults[name] == getattr(options, name) for name in shared)


def test_it_finds_what_scikit_learn_finds():
    X, y = real_table("binary")
    ours = treaty.LogisticRegression(
        treaty.Pooled(loss="logistic"), l2=0.01, max_iter=600, tol=0.0, learning_rate=0.5
    ).fit(X, y)
    scaled = StandardScaler().fit_transform(X.astype(np.float32).astype(float))
    theirs = TheirRegression(C=1 / (0.01 * len(y)), tol=1e-10, max_iter=1000).fit(scaled, y)
    np.testing.assert_allclose(ours.standardized_coef_, theirs.coef_, atol=2e-4)
    np.testing.assert_allclose(ours.standardized_intercept_, theirs.intercept_, atol=2e-4)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(scaled), atol=1e-4)


def small(rows: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return columns, labels that follow from them but for noise, and the columns of two parties."""
    rng = np.random.default_rng(61)
    X = rng.normal(size=(rows, 10))
    y = (X @ rng.normal(size=10) * 0.4 + rng.logistic(size=rows) > 0).astype(int)
    return X, y, {"p": X[:, :5], "q": X[:, 5:]}


def test_a_small_table_is_trained_to_the_optimum_by_default_and_nothing_is_warned_of():
    X, y, parts = small(800)
    exact = treaty.LogisticRegression(treaty.Pooled(loss="logistic")).fit(X, y)
    theirs = TheirRegression(C=np.inf, solver="newton-cholesky", tol=1e-10).fit(X.astype(np.float32).astype(float), y)
    np.testing.assert_allclose(exact.coef_, theirs.coef_, rtol=1e-4)
    np.testing.assert_allclose(exact.intercept_, theirs.intercept_, rtol=1e-4)
    pooled = treaty.LogisticRegression().fit(X, y)
    A = np.column_stack([X.astype(np.float32), np.ones(800)]) / 2.0
    (part,) = pooled.parts_.values()
    found = np.append(part.per_unit(part.coef), part.at_zero())
    np.testing.assert_allclose(found, np.linalg.lstsq(A, 2.0 * y - 1.0, rcond=None)[0], rtol=1e-4, atol=1e-6)
    apart = treaty.LogisticRegression(treaty.QuasiNewton(coordinator=False)).fit(parts, y)
    np.testing.assert_allclose(apart.predict_proba(parts), pooled.predict_proba(X), atol=1e-6)
    assert "over all rows" in " ".join(apart.disclosures_["q"])


def test_a_small_table_with_weights_and_an_eval_set_is_trained_to_one_optimum():
    X, y, parts = small(500)
    weight = np.random.default_rng(3).integers(0, 4, 500) * 1.0
    given = {"eval_set": (parts, y), "sample_weight": weight}
    system = treaty.QuasiNewton(coordinator=False, show_weights=True, show_eval_margins=True)
    apart = treaty.LogisticRegression(system).fit(parts, y, **given)
    pooled = treaty.LogisticRegression(parties={"p": range(5), "q": range(5, 10)})
    pooled.fit(X, y, weight, eval_set=(X, y))
    np.testing.assert_allclose(apart.predict_proba(parts), pooled.predict_proba(X), atol=1e-6)
    root, ones = np.sqrt(weight), np.ones((500, 1))
    best = np.linalg.lstsq(root[:, None] * np.hstack([X, ones]) / 2.0, root * (2.0 * y - 1.0), rcond=None)[0]
    found = np.concatenate([part.per_unit(part.coef) for part in apart.parts_.values()])
    np.testing.assert_allclose(found, best[:-1], rtol=1e-4, atol=1e-5)
    found, expected = (model.evals_result_["eval_0"]["taylor"] for model in (apart, pooled))
    assert found[-1] == pytest.approx(expected[-1], abs=1e-8)
    early = treaty.LogisticRegression(system, early_stopping_rounds=2).fit(parts, y, **given)
    assert early.n_iter_ <= early.best_iteration_ + 3


def test_a_larger_table_and_the_published_algorithm_are_trained_by_batches():
    assert RegressionOptions().on(10_000).batch_size is None
    assert RegressionOptions().on(10_001).rows_of_batch(10_001) == 1000
    X, y, _ = small(600)
    named = treaty.LogisticRegression(treaty.Pooled(solver="quasi-newton"), random_state=0, max_iter=3, tol=0.0)
    assert named.fit(X, y).parts_["pooled"].batch_size == 600
    batches = treaty.LogisticRegression(batch_size=1000, random_state=0, max_iter=3, tol=0.0).fit(X, y)
    np.testing.assert_array_equal(batches.coef_, named.coef_)


@pytest.mark.slow
def test_training_that_goes_on_at_the_optimum_keeps_the_model():
    """Pairs of differences near the rounding were kept: a coefficient was infinite, and a partner blamed."""
    X, y = load_breast_cancer(return_X_y=True)
    parts = {"p": X[:, :6], "q": X[:, 6:12]}
    given = {"l2": 0.1, "max_iter": 400, "tol": 0.0, "batch_size": 1000}
    with pytest.warns(UserWarning, match="have a margin beyond 4"):
        pooled = treaty.LogisticRegression(**given).fit(X[:, :12], y)
    apart = treaty.LogisticRegression(treaty.QuasiNewton(coordinator=False), **given).fit(parts, y)
    np.testing.assert_allclose(apart.decision_function(parts), pooled.decision_function(X[:, :12]), atol=1e-6)


@pytest.mark.parametrize("solver", [None, "sgd"])
def test_pooled_tables_of_parties_give_the_model_of_the_joined_table(solver):
    X, y = real_table("binary")
    tables = cut(X, 3)
    joined = treaty.LogisticRegression(treaty.Pooled(solver=solver), random_state=1).fit(X, y)
    apart = treaty.LogisticRegression(treaty.Pooled(solver=solver), random_state=1, active="p1").fit(tables, y)
    np.testing.assert_allclose(apart.decision_function(tables), joined.decision_function(X), atol=1e-9)
    assert list(apart.coef_) == ["p0", "p1", "p2"]
    np.testing.assert_allclose(np.concatenate(list(apart.coef_.values()))[None], joined.coef_, atol=1e-9)
    np.testing.assert_allclose(apart.intercept_, joined.intercept_, atol=1e-9)
    assert [part.intercept is not None for part in apart.parts_.values()] == [False, True, False]


def test_log_odds_are_calibrated_margins_of_the_prepared_columns():
    X, y = real_table("binary")
    X = with_gaps(with_categories(X))
    model = treaty.LogisticRegression(random_state=0).fit(X, y)
    (part,) = model.parts_.values()
    columns = treaty.data.table.to_table(X).columns
    prepared = part.preparation.matrix(columns, len(X))
    made = model.calibration_
    log_odds = made.slope * (prepared @ model.standardized_coef_[0] + model.standardized_intercept_[0]) + made.offset
    np.testing.assert_allclose(model.decision_function(X), log_odds, rtol=1e-12, atol=1e-12)
    assert len(part.column_names()) == model.coef_.shape[1] > X.shape[1]
    p = model.predict_proba(X)
    np.testing.assert_allclose(p[:, 1], 1 / (1 + np.exp(-model.decision_function(X))), rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X), (p[:, 1] > 0.5).astype(int))
    assert model.score(X, y) > 0.8


@pytest.mark.parametrize("calibrate", [True, False])
def test_weights_per_unit_give_the_log_odds_of_columns_as_they_came(calibrate):
    X, y = real_table("binary")
    X = X.iloc[:, :8].assign(same=3.0)
    for given in (X, cut(X, 2)):
        model = treaty.LogisticRegression(random_state=0, calibrate=calibrate).fit(given, y)
        units = model.coef_ if given is X else np.concatenate(list(model.coef_.values()))[None]
        found = X.to_numpy() @ units[0] + model.intercept_
        np.testing.assert_allclose(found, model.decision_function(given), atol=1e-5)
        assert units[0, -1] == 0.0


def test_weight_per_unit_of_a_category_is_what_being_of_it_adds():
    X, y = real_table("binary")
    X = with_categories(X)
    model = treaty.LogisticRegression(random_state=0).fit(X, y)
    (part,) = model.parts_.values()
    name, found = X.columns[0], {}
    for k, of in enumerate(part.column_names()):
        if of.startswith(f"{name}="):
            row = X.iloc[:1].assign(**{name: pd.Categorical([of.partition("=")[2]], X[name].cat.categories)})
            found[k] = model.decision_function(row)[0]
    assert len(found) > 1
    (first, base), *others = found.items()
    for k, log_odds in others:
        added = model.coef_[0, k] - model.coef_[0, first]
        assert log_odds - base == pytest.approx(added, abs=1e-5)


def test_probabilities_of_the_taylor_loss_are_unbiased():
    X, y = real_table("binary")
    keep = np.flatnonzero((y == 0) | (np.arange(len(y)) % 4 == 0))  # a rare class
    X, y = X.iloc[keep, :8], y[keep]
    plain = treaty.LogisticRegression(random_state=0, calibrate=False).fit(X, y)
    model = treaty.LogisticRegression(random_state=0).fit(X, y)
    np.testing.assert_array_equal(plain.standardized_coef_, model.standardized_coef_)
    assert plain.calibration_ is None
    assert abs(plain.predict_proba(X)[:, 1].mean() - y.mean()) > 0.03
    assert abs(model.predict_proba(X)[:, 1].mean() - y.mean()) < 0.005
    exact = treaty.LogisticRegression(treaty.Pooled(loss="logistic"), random_state=0).fit(X, y)
    assert exact.calibration_ is None


def test_training_that_is_cut_off_warns():
    X, y = real_table("binary")
    given = {"random_state": 0, "l2": 0.1, "batch_size": 60}
    with pytest.warns(ConvergenceWarning, match="after max_iter=3 epochs without a steady loss.*raise max_iter"):
        treaty.LogisticRegression(max_iter=3, **given).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        treaty.LogisticRegression(max_iter=3, tol=0.0, **given).fit(X, y)
        treaty.LogisticRegression(max_iter=500, tol=1e-3, **given).fit(X, y)


def test_rows_without_weight_do_not_count():
    X, y = real_table("binary")
    weight = np.where(np.arange(len(y)) < 40, 0.0, 2.0)
    turned = np.where(weight == 0.0, 1 - y, y)
    fits = [treaty.LogisticRegression(random_state=0).fit(X, labels, weight).coef_ for labels in (y, turned)]
    np.testing.assert_array_equal(fits[0], fits[1])
    assert not np.allclose(fits[0], treaty.LogisticRegression(random_state=0).fit(X, turned).coef_)


def test_an_active_party_may_bring_labels_alone():
    X, y = real_table("binary")
    tables = {"lab": X, "clinic": None}
    model = treaty.LogisticRegression(active="clinic", random_state=0).fit(tables, y)
    assert model.coef_["clinic"].shape == (0,)
    assert model.standardized_intercept_[0] == model.parts_["clinic"].intercept != 0.0
    np.testing.assert_allclose(
        model.predict_proba({"lab": X}), treaty.LogisticRegression(random_state=0).fit(X, y).predict_proba(X)
    )


@pytest.mark.parametrize("labels", [["no", "yes"], [7, -1], [True, False], [1.0, 2.0]], ids=str)
def test_any_two_labels_come_back(labels):
    X, y = real_table("binary")
    named = np.array(labels)[y]
    model = treaty.LogisticRegression().fit(X, named)
    assert model.classes_.tolist() == sorted(labels)
    assert np.mean(model.predict(X) == named) > 0.9


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow", "numpy"])
def test_any_dataframe_gives_the_same_model(kind):
    X, y = real_table("binary")
    convert = {
        "pandas": lambda X: X.set_index(np.arange(len(X))[::-1]),
        "polars": pl.from_pandas,
        "arrow": pa.Table.from_pandas,
        "numpy": lambda X: X.to_numpy(),
    }[kind]
    expected = treaty.LogisticRegression(random_state=0).fit(X, y).predict_proba(X)
    model = treaty.LogisticRegression(random_state=0).fit(convert(X), y)
    np.testing.assert_array_equal(model.predict_proba(convert(X)), expected)


@pytest.mark.filterwarnings("ignore:.*categories that training did not have")
def test_missing_and_unknown_values_are_predicted():
    X, y = real_table("binary")
    X = with_categories(X)
    model = treaty.LogisticRegression(random_state=0).fit(X, y)
    strange = X.iloc[:5].copy()
    strange[X.columns[0]] = pd.Categorical(["other"] * 5)
    strange[X.columns[1]] = np.nan
    assert np.all(np.isfinite(model.decision_function(strange)))


def test_saved_models_predict_the_same(tmp_path):
    X, y = real_table("binary")
    for name, tables in (("one", with_categories(X)), ("parties", cut(with_categories(X), 3))):
        model = treaty.LogisticRegression(l2=np.float64(0.1), random_state=3).fit(tables, y)
        model.save(tmp_path / name)
        for again in (treaty.load(tmp_path / name), pickle.loads(pickle.dumps(model))):
            assert type(again) is treaty.LogisticRegression
            np.testing.assert_array_equal(again.predict_proba(tables), model.predict_proba(tables))
            assert again.get_params() == model.get_params()
            assert again.loss_history_ == model.loss_history_
            assert again.n_iter_ == model.n_iter_
            assert again.n_features_in_ == X.shape[1]
            np.testing.assert_array_equal(again.classes_, model.classes_)
            assert list(again.feature_names_in_) == list(model.feature_names_in_)


def test_files_that_are_no_linear_part_are_refused(tmp_path):
    X, y = real_table("binary")
    part = treaty.LogisticRegression().fit(X, y).parts_["pooled"]
    made = part.preparation
    broken = [
        {"coef": part.coef[:-1]},
        {"coef": np.full_like(part.coef, np.nan)},
        {"calibration": Calibration(float("inf"), 0.0)},
        {"preparation": type(made)(made.n_categories, made.median[1:], made.mean, made.scale)},
        {"preparation": type(made)((3, *made.n_categories[1:]), made.median, made.mean, made.scale)},
        {"schema": type(part.schema)(part.schema.names[1:], part.schema.categories[1:])},
    ]
    for changes in broken:
        msgspec.structs.replace(part, **changes).save(tmp_path / "part")
        with pytest.raises(treaty.ConfigError, match="expected a linear model of Treaty"):
            load_linear_part(tmp_path / "part")
    treaty.GBDTClassifier(n_estimators=1).fit(X, y).parts_["pooled"].save(tmp_path / "part")
    with pytest.raises(treaty.ConfigError, match="expected a linear part, got a model part"):
        load_linear_part(tmp_path / "part")
    part.save(tmp_path / "part")
    assert isinstance(load_linear_part(tmp_path / "part"), LinearPart)


def test_fitted_attributes_tell_what_happened():
    X, y = real_table("binary")
    model = treaty.LogisticRegression(random_state=0, batch_size=60).fit(X, y)
    assert model.n_iter_ == len(model.loss_history_) <= 30
    assert model.evals_result_ == {"train": {"taylor": model.loss_history_}}
    assert model.loss_history_[-1] < model.loss_history_[0] < np.log(2) + 1e-9
    assert model.communication_ == {}
    assert model.timings_["total"] >= model.timings_["training"] > 0
    assert model.disclosures_ == {"pooled": ["everything: all columns and labels are in one place"]}
    logistic = treaty.LogisticRegression(treaty.Pooled(loss="logistic"), random_state=0, batch_size=60).fit(X, y)
    assert list(logistic.evals_result_["train"]) == ["logistic"]


def test_clone_copies_parameters_and_refitting_forgets():
    X, y = real_table("binary")
    model = treaty.LogisticRegression(random_state=1).fit(X, y)
    again = clone(model).fit(X.iloc[:, :5], y)
    model.fit(X.iloc[:, :5], y)
    np.testing.assert_array_equal(model.predict_proba(X.iloc[:, :5]), again.predict_proba(X.iloc[:, :5]))
    assert model.n_features_in_ == 5


def test_grid_search_works():
    X, y = real_table("binary")
    search = GridSearchCV(
        treaty.LogisticRegression(), {"l2": np.array([0.0, 0.1]), "protocol__solver": ["sgd", None]}, cv=2
    )
    assert search.fit(X, y).best_score_ > 0.85


def test_the_seed_decides_the_batches():
    X, y = real_table("binary")
    fits = [treaty.LogisticRegression(batch_size=50, random_state=seed).fit(X, y).coef_ for seed in (1, 1, 2, None)]
    np.testing.assert_array_equal(fits[0], fits[1])
    assert not np.array_equal(fits[0], fits[2])
    assert not np.array_equal(fits[0], fits[3])


@pytest.mark.parametrize(
    ("solver", "rate", "pairs"), [(None, 0.2, True), ("quasi-newton", 0.2, True), ("sgd", 0.3, False)]
)
def test_gradient_descent_has_no_pairs_and_a_rate_of_its_own(solver, rate, pairs):
    X, y = real_table("binary")

    def coef(**options):
        model = treaty.LogisticRegression(
            treaty.Pooled(solver=solver), batch_size=60, max_iter=4, random_state=0, **options
        )
        return model.fit(X, y).coef_

    np.testing.assert_array_equal(coef(), coef(learning_rate=rate))
    assert not np.array_equal(coef(), coef(learning_rate=0.4))
    assert np.array_equal(coef(), coef(memory=1)) != pairs
    of = treaty.SGD if solver == "sgd" else treaty.QuasiNewton
    assert (of.keeps_pairs, of.first_rate) == (pairs, rate)


def test_the_solver_decides_how_weights_are_found():
    X, y = real_table("binary")
    options = {"batch_size": 60, "random_state": 0, "max_iter": 8, "learning_rate": 0.1}
    newton, none, descent = (
        flat(treaty.LogisticRegression, solver=solver, **options).fit(X, y).coef_
        for solver in ("quasi-newton", None, "sgd")
    )
    np.testing.assert_array_equal(newton, none)
    assert np.abs(newton - descent).max() > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_iter": 0}, "max_iter=0"),
        ({"batch_size": 100, "hessian_batch_size": 150}, "at most batch_size=100 or a multiple of it, got 150"),
        ({"batch_size": "all"}, "batch_size='all'"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"tol": float("nan")}, "tol=nan"),
        ({"l2": float("inf")}, "l2=inf: expected a finite number"),
        ({"protocol": "newton"}, "expected protocol to be one of pooled, quasi-newton, sgd, got 'newton'"),
        ({"solver": "lbfgs"}, "solver='lbfgs': expected one of quasi-newton, sgd"),
        ({"loss": "hinge"}, "loss='hinge': expected one of taylor, logistic"),
        ({"encryption": "ou"}, "Pooled has no option 'encryption'"),
        ({"coordinator": True}, "Pooled has no option 'coordinator'"),
        ({"protocol": "sgd", "solver": "sgd"}, "SGD has no option 'solver'; solver is an option of Pooled"),
        ({"protocol": "quasi-newton", "key_bits": 1024}, "key_bits=1024"),
        ({"transport": "pigeon"}, "transport"),
        ({"transport": "tls"}, "transport"),
        ({"n_jobs": 0}, "n_jobs"),
        ({"random_state": -1}, "random_state"),
        ({"random_state": 2**130}, f"random_state={2**130}: expected"),
        ({"protocol": "sgd", "batch_size": 10**30}, f"batch_size={10**30}: expected"),
        ({"mode": "paper"}, "a pooled regression has no such mode"),
        ({"protocol": "sgd", "encryption": "lattice", "key_bits": 2048}, "has no key: leave key_bits out"),
        ({"protocol": "sgd", "key_bits": 2048, "insecure_test_key_bits": 768}, "got both"),
        ({"active": "bank"}, "active"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError) as caught:
        flat(treaty.LogisticRegression, **options).fit(cut(X, 2), y)
    assert message in str(caught.value)


def test_wrong_data_names_the_party():
    X, y = real_table("binary")
    tables = cut(X, 2)
    model = treaty.LogisticRegression()
    cases = [
        (tables, np.ones(len(y)), ["one class", "p0", "240 rows"]),
        ({**tables, "p1": tables["p1"].iloc[:-3]}, y, ["p0 240", "p1 237"]),
        (tables, np.where(np.arange(len(y)) < 4, np.nan, y), ["p0", "4"]),
        (tables, None, ["y cannot be None", "requires y"]),
        ([], y, ["table"]),
        (tables, np.array(["a", 1], dtype=object)[y], ["p0: expected labels of one kind, got int and str"]),
    ]
    for data, labels, words in cases:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - treaty's errors, and scikit-learn's own
            model.fit(data, labels)
        assert any(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(treaty.DataError, match=r"p0.*negative"):
        model.fit(tables, y, sample_weight=np.full(len(y), -1.0))
    with pytest.raises(NotFittedError):
        treaty.LogisticRegression().predict(X)


def test_prediction_refuses_other_parties_and_misses_needed_ones():
    X, y = real_table("binary")
    tables = cut(X, 2)
    model = treaty.LogisticRegression().fit(tables, y)
    with pytest.raises(treaty.DataError, match="without p1 margins lack its columns"):
        model.predict({"p0": tables["p0"]})
    with pytest.raises(treaty.DataError, match="p0, p1"):
        model.predict({**tables, "p2": tables["p1"]})
    with pytest.raises(treaty.DataError, match="mapping"):
        model.predict(X)


def test_a_party_of_constants_may_be_absent():
    X, y = real_table("binary")
    tables = {"bank": X, "shop": pd.DataFrame({"country": np.ones(len(X))})}
    model = treaty.LogisticRegression(random_state=0).fit(tables, y)
    assert model.coef_["shop"] == [0.0]
    np.testing.assert_array_equal(model.predict_proba({"bank": X}), model.predict_proba(tables))


def test_margins_beyond_the_range_of_the_taylor_loss_are_warned_of():
    X, y = real_table("binary")
    with pytest.warns(UserWarning, match="rows have a margin beyond 4"):
        treaty.LogisticRegression(random_state=0, batch_size=60).fit(X, y)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rows have a margin beyond 4")
        treaty.LogisticRegression(treaty.Pooled(loss="logistic"), random_state=0, batch_size=60).fit(X, y)
        treaty.LogisticRegression(random_state=0, batch_size=60, l2=0.1).fit(X, y)


def test_more_classes_are_scikit_learns_one_against_the_rest(tmp_path):
    X, y = real_table("multiclass")
    X, names = X.iloc[:, :4], np.array(["red", "rose", "white"])[y]
    model = treaty.LogisticRegression(treaty.Pooled(loss="logistic"), l2=0.01, tol=1e-6).fit(X, names)
    scaled = StandardScaler().fit_transform(X.astype(np.float32).astype(float))
    theirs = OneVsRestClassifier(TheirRegression(C=1 / (0.01 * len(y)), tol=1e-10, max_iter=1000)).fit(scaled, names)
    np.testing.assert_allclose(model.standardized_coef_, [one.coef_[0] for one in theirs.estimators_], atol=1e-4)
    np.testing.assert_allclose(
        model.standardized_intercept_, [one.intercept_[0] for one in theirs.estimators_], atol=1e-4
    )
    np.testing.assert_allclose(model.predict_proba(X), theirs.predict_proba(scaled), atol=1e-4)
    np.testing.assert_array_equal(model.predict(X), theirs.predict(scaled))
    assert model.coef_.shape == model.standardized_coef_.shape == (3, 4)
    assert list(model.summary()["class"]) == [name for name in ("red", "rose", "white") for _ in range(5)]
    apart = treaty.LogisticRegression(treaty.Pooled(loss="logistic"), l2=0.01, tol=1e-6).fit(cut(X, 2), names)
    np.testing.assert_allclose(apart.predict_proba(cut(X, 2)), model.predict_proba(X), atol=1e-9)
    np.testing.assert_allclose(np.hstack(list(apart.coef_.values())), model.coef_, atol=1e-9)
    np.testing.assert_allclose(apart.intercept_, model.intercept_, rtol=1e-6)
    apart.save(tmp_path)
    again = treaty.load(tmp_path)
    np.testing.assert_array_equal(again.predict_proba(cut(X, 2)), apart.predict_proba(cut(X, 2)))
    assert again.classes_.tolist() == ["red", "rose", "white"]


def test_more_classes_are_trained_between_parties():
    X, y = real_table("multiclass", rows=178)
    tables = {"p0": X.iloc[:, :4], "p1": X.iloc[:, 4:6]}
    given = {"tol": 1e-6}
    alone = treaty.LogisticRegression(**given).fit(tables, y)
    model = treaty.LogisticRegression(treaty.QuasiNewton(coordinator=False, encryption="lattice"), **given)
    model.fit(tables, y)
    np.testing.assert_allclose(model.predict_proba(tables), alone.predict_proba(tables), atol=1e-5)
    np.testing.assert_array_equal(model.predict(tables), alone.predict(tables))
    assert model.score(tables, y) > 0.8
