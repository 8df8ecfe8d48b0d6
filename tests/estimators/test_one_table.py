"""Parties that hold columns of one table: `parties=` makes scikit-learn's tools work on them."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.inspection import permutation_importance
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import treaty
from tables import real_table

FAST = treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True)


def by_turns(X):
    """Return columns by party, no party's beside each other."""
    return {"bank": list(X.columns[1::2]), "shop": list(X.columns[::2])}


def model_of(X, **params):
    return treaty.GBDTClassifier(FAST, n_estimators=3, parties=by_turns(X), **params)


def test_one_table_gives_the_model_of_the_parties_tables():
    X, y = real_table("binary")
    parties = by_turns(X)
    tables = {name: X[columns] for name, columns in parties.items()}
    apart = treaty.GBDTClassifier(FAST, n_estimators=3).fit(tables, y)
    together = model_of(X).fit(X, y, eval_set=(X, y))
    np.testing.assert_array_equal(together.predict_proba(X), apart.predict_proba(tables))
    assert list(together.parts_) == ["bank", "shop"]
    assert list(together.feature_names_in_) == list(X.columns)
    assert together.importances(consent=None) == apart.importances(consent=None)
    by_name = dict(zip(X.columns, together.feature_importances_, strict=True))
    assert by_name == pytest.approx(
        {name: gain for of in apart.importances(consent=None, normalised=True).values() for name, gain in of.items()}
    )


@pytest.mark.parametrize("convert", [lambda X: X.to_numpy(), lambda X: X.to_numpy().tolist(), pl.from_pandas])
def test_arrays_go_by_position_and_frames_of_any_kind_by_name(convert):
    X, y = real_table("binary")
    expected = model_of(X).fit(X, y).predict_proba(X)
    given = convert(X)
    positions = {"bank": np.arange(1, X.shape[1], 2), "shop": range(0, X.shape[1], 2)}
    parties = by_turns(X) if isinstance(given, pl.DataFrame) else positions
    model = model_of(X).set_params(parties=parties).fit(given, y)
    np.testing.assert_array_equal(model.predict_proba(given), expected)


@pytest.mark.parametrize(
    ("estimator", "task"),
    [
        (treaty.GBDTRegressor(FAST, n_estimators=2), "regression"),
        (treaty.LogisticRegression("quasi-newton", max_iter=2, tol=1.0), "binary"),
        (treaty.LinearRegression("quasi-newton"), "regression"),
        (treaty.PoissonRegressor(treaty.QuasiNewton(insecure_test_key_bits=1024, allow_insecure=True)), "regression"),
    ],
    ids=lambda given: type(given).__name__ if not isinstance(given, str) else given,
)
def test_every_estimator_of_columns_takes_one_table(estimator, task):
    X, y = real_table(task)
    X, y = X.iloc[:, :4], np.abs(np.round(y)) if task == "regression" else y
    parties = by_turns(X)
    apart = clone(estimator).fit({name: X[columns] for name, columns in parties.items()}, y)
    one = clone(estimator).set_params(parties=parties).fit(X, y)
    np.testing.assert_allclose(
        one.predict(X), apart.predict({name: X[columns] for name, columns in parties.items()}), rtol=1e-6
    )


def test_columns_named_by_numbers_are_at_home_wherever_they_stand(tmp_path):
    """scikit-learn remembers no names but text, and importances went to the columns at these positions."""
    X, y = real_table("binary")
    X = X.iloc[:, :4]
    expected = model_of(X).fit(X, y)
    for labels in ([2, 1, 0, 3], [11, 12, 13, 14]):
        numbered = X.set_axis(labels, axis=1)
        parties = {"bank": iter([labels[1], labels[3]]), "shop": (label for label in (labels[0], labels[2]))}
        found = treaty.GBDTClassifier(FAST, n_estimators=3, parties=parties).fit(numbered, y)
        np.testing.assert_array_equal(found.predict_proba(numbered), expected.predict_proba(X))
        np.testing.assert_array_equal(found.feature_importances_, expected.feature_importances_)
        found.set_params(parties={"bank": labels[:2], "shop": labels[2:]})
        np.testing.assert_array_equal(found.predict_proba(numbered), expected.predict_proba(X))


def test_class_weights_are_saved_with_their_labels(tmp_path):
    X, y = real_table("binary")
    weights = {np.int64(0): 1.0, np.int64(1): 5.0}
    model = treaty.GBDTClassifier(n_estimators=2, class_weight=weights).fit(X, y)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    assert again.class_weight == weights
    np.testing.assert_array_equal(clone(again).fit(X, y).predict_proba(X), model.predict_proba(X))


def test_several_eval_sets_may_be_a_tuple_and_a_pair_a_list():
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(n_estimators=2)
    for given in (((X, y), (X, y)), [(X, y), (X, y)], [[X, y], [X, y]]):
        assert list(model.fit(X, y, eval_set=given).evals_result_) == ["eval_0", "eval_1"]


def test_a_ranker_takes_one_table():
    X, y = real_table("binary")
    group = np.arange(len(y)) // 8
    model = treaty.GBDTRanker(FAST, n_estimators=2, parties=by_turns(X)).fit(X, y, qid=group)
    assert model.predict(X).shape == (len(y),)


def test_scikit_learns_tools_work_on_parties():
    X, y = real_table("binary")
    model = model_of(X)
    assert cross_val_score(model, X, y, cv=2, scoring="roc_auc").mean() > 0.9
    search = GridSearchCV(model, {"max_depth": [1, 2], "protocol__rl_trees": [0]}, cv=2).fit(X, y)
    assert search.best_estimator_.parties == by_turns(X)
    calibrated = CalibratedClassifierCV(model, cv=2).fit(X, y)
    assert calibrated.predict_proba(X).shape == (len(y), 2)
    pipeline = make_pipeline(StandardScaler().set_output(transform="pandas"), model).fit(X, y)
    assert pipeline.score(X, y) > 0.9
    fitted = model.fit(X, y)
    found = permutation_importance(fitted, X, y, n_repeats=2, random_state=0).importances_mean
    assert found[np.argmax(fitted.feature_importances_)] > 0.0


def test_the_active_party_may_have_labels_alone():
    X, y = real_table("binary")
    model = model_of(X).set_params(parties={"bank": [], "shop": list(X.columns)}).fit(X, y)
    assert model.score(X, y) > 0.9
    assert list(model.parts_) == ["bank", "shop"]


def test_a_saved_model_still_takes_one_table(tmp_path):
    X, y = real_table("binary")
    model = model_of(X).fit(X, y)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    np.testing.assert_array_equal(again.feature_importances_, model.feature_importances_)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda parties: {**parties, "shop": parties["shop"][:-1]},
            "of no party: 'mean fractal dimension'|of no party",
        ),
        (lambda parties: {**parties, "shop": [*parties["shop"], parties["bank"][0]]}, "of two parties"),
        (lambda parties: {**parties, "shop": [*parties["shop"][:-1], "mean radios"]}, "no column 'mean radios'"),
        (lambda parties: {**parties, "shop": "mean radius"}, "expected a list of columns for shop"),
        (lambda parties: [*parties], "expected parties="),
    ],
)
def test_columns_that_are_not_of_one_party_each_are_refused(change, said):
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match=said):
        model_of(X).set_params(parties=change(by_turns(X))).fit(X, y)


def test_names_for_an_array_and_tables_beside_parties_are_refused():
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match="columns of an array are named by position"):
        model_of(X).fit(X.to_numpy(), y)
    with pytest.raises(treaty.ConfigError, match="a mapping of tables as well"):
        model_of(X).fit({name: X[columns] for name, columns in by_turns(X).items()}, y)


@pytest.mark.parametrize("protocol", ["federboost-horizontal", "fedxgb"])
def test_participants_with_rows_are_told_that_parties_are_of_columns(protocol):
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match="give fit a mapping of participant to"):
        treaty.GBDTClassifier(protocol, parties=by_turns(X)).fit(X, y)
