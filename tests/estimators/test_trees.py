"""The scikit-learn face."""

from __future__ import annotations

import inspect
import pickle
import re
import tempfile

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import xgboost
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

import treaty
from flat import flat
from marks import all_but_first_slow
from tables import FAST_KEY, cut, real_table, with_categories, with_gaps
from treaty.errors import DataError
from treaty.systems.options import names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical.column_owner import SplitOwner


@parametrize_with_checks([treaty.GBDTClassifier(), treaty.GBDTRegressor()])
def test_scikit_learn_contract_holds(estimator, check):
    check(estimator)


class RankerOfOneGroup(treaty.GBDTRanker):
    """A ranker as scikit-learn calls it, without groups."""

    def fit(self, X, y=None):
        return super().fit(X, y, qid=np.zeros(0 if y is None else len(y)))

    def score(self, X, y):
        return super().score(X, y, qid=np.zeros(len(y)))


@parametrize_with_checks([RankerOfOneGroup()])
def test_scikit_learn_contract_holds_for_rankings(estimator, check):
    check(estimator)


def test_best_iteration_without_early_stopping_says_what_it_needs():
    model = treaty.GBDTRegressor(n_estimators=2).fit(*real_table("regression"))
    with pytest.raises(AttributeError, match="best_iteration needs a fit with early_stopping_rounds"):
        model.best_iteration  # noqa: B018
    assert not hasattr(model, "best_score")


def test_one_table_for_several_parties_is_refused_with_both_ways_to_hand_it_over():
    X, y = real_table("binary")
    with pytest.raises(DataError, match=r"expects a mapping of party to table, got \w+: .*parties={party: columns}"):
        treaty.GBDTClassifier("secureboost").fit(X, y)


@pytest.mark.slow
@parametrize_with_checks([treaty.GBDTClassifier(min_child_samples=1)])
def test_scikit_learn_contract_holds_with_leaves_of_one_row(estimator, check):
    check(estimator)


OF_ESTIMATORS = {
    "self", "protocol", "active", "transport", "n_jobs", "parties", "scale_pos_weight", "class_weight",
    "callbacks", "verbose",
}  # fmt: skip
"""Parameters that are no common options of a job file."""


def test_estimator_defaults_are_the_options_defaults():
    for estimator in (treaty.GBDTClassifier, treaty.GBDTRegressor):
        defaults = {name: p.default for name, p in inspect.signature(estimator.__init__).parameters.items()}
        assert set(defaults) == {*OF_ESTIMATORS, *names_of(BoostingOptions)}
        options = BoostingOptions()
        assert all(defaults[name] == getattr(options, name) for name in names_of(BoostingOptions))


def test_grid_search_over_the_pooled_protocol_works():
    X, y = real_table("binary")
    search = GridSearchCV(
        treaty.GBDTClassifier(), {"max_depth": np.array([1, 3]), "protocol": ["pooled", treaty.Pooled()]}, cv=2
    )
    search.fit(X, y)
    assert search.best_score_ > 0.85


def test_clone_copies_parameters_and_refitting_forgets():
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(n_estimators=2, random_state=1).fit(X, y)
    again = clone(model).fit(X.iloc[:, :5], y)
    np.testing.assert_array_equal(
        model.fit(X.iloc[:, :5], y).predict_proba(X.iloc[:, :5]), again.predict_proba(X.iloc[:, :5])
    )
    assert model.n_features_in_ == 5


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow", "numpy"])
def test_any_dataframe_gives_the_same_model(kind):
    X, y = real_table("binary")
    convert = {
        "pandas": lambda X: X.sample(frac=1, random_state=0).sort_index().set_index(np.arange(len(X))[::-1]),
        "polars": pl.from_pandas,
        "arrow": pa.Table.from_pandas,
        "numpy": lambda X: X.to_numpy(),
    }[kind]
    expected = treaty.GBDTClassifier(n_estimators=3).fit(X, y).predict_proba(X)
    np.testing.assert_array_equal(
        treaty.GBDTClassifier(n_estimators=3).fit(convert(X), y).predict_proba(convert(X)), expected
    )


@pytest.mark.parametrize("labels", [["no", "yes"], [7, -1], [True, False], [1.0, 2.0]], ids=str)
def test_any_two_labels_come_back(labels):
    X, y = real_table("binary")
    named = np.array(labels)[y]
    model = treaty.GBDTClassifier(n_estimators=5).fit(X, named)
    assert model.classes_.tolist() == sorted(labels)
    assert np.mean(model.predict(X) == named) > 0.9


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("estimator", [treaty.GBDTClassifier(n_estimators=2), treaty.LogisticRegression()], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), [("boolean", "b"), ("Int64", "i"), ("int64[pyarrow]", "i")])
def test_nullable_labels_keep_their_kind(estimator, dtype, kind):
    X, y = real_table("binary")
    model = estimator.fit(X, pd.Series(y).astype(dtype))
    assert model.classes_.dtype.kind == kind
    assert model.predict(X).dtype.kind == kind


def test_nan_beside_text_is_a_missing_label():
    X, y = real_table("binary")
    with pytest.raises(treaty.DataError, match="got 1 of 240 rows without"):
        treaty.GBDTClassifier().fit(X, [np.nan, *map(str, y[1:])])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
@pytest.mark.parametrize("change", [lambda X: X, with_gaps, with_categories], ids=["plain", "missing", "categories"])
@pytest.mark.parametrize("protocol", ["pooled", "secureboost"])
def test_to_xgboost_predicts_the_same(task, change, protocol):
    X, y = real_table(task)
    X = change(X)
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    if protocol == "pooled":
        tables, options, joined = X, {}, X
    else:
        tables, options = cut(X, 3), FAST_KEY
        joined = pd.concat({k: v for k, v in tables.items()}, axis=1)
        joined.columns = [f"{party}.{name}" for party, name in joined.columns]
    model = flat(kind, **{"n_estimators": 4, "min_child_samples": 2, "base_score": 0.4, **options}).fit(tables, y)
    booster = model.to_xgboost(consent=[] if protocol == "pooled" else ["p1", "p2"])
    assert isinstance(booster, xgboost.Booster)
    got = booster.predict(xgboost.DMatrix(joined, enable_categorical=True))
    want = model.predict(tables) if task == "regression" else model.predict_proba(tables)
    np.testing.assert_allclose(got, want[:, 1] if task == "binary" else want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("protocol", ["pooled", "secureboost"])
@pytest.mark.parametrize("task", ["multiclass", "regression"])
def test_saved_models_predict_the_same(tmp_path, protocol, task):
    X, y = real_table(task)
    tables = cut(with_categories(X), 2)
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    model = flat(kind, **{"n_estimators": 3, **(FAST_KEY if protocol != "pooled" else {})}).fit(tables, y)
    model.save(tmp_path / "model")
    for again in (treaty.load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(again.predict(tables), model.predict(tables))
        assert again.get_params() == model.get_params()
        np.testing.assert_array_equal(again.feature_importances_, model.feature_importances_)


def test_fitted_attributes_tell_what_happened():
    X, y = real_table("binary", rows=300)
    tables = cut(X, 3)
    model = flat(treaty.GBDTClassifier, n_estimators=4, **FAST_KEY).fit(tables, y, eval_set=(tables, y))
    assert len(model.evals_result_["eval_0"]["logloss"]) == model.n_iter_ == 4
    assert model.evals_result_["eval_0"]["logloss"][-1] < model.evals_result_["eval_0"]["logloss"][0]
    assert model.feature_importances_.shape == (X.shape[1],)
    assert model.feature_importances_.sum() == pytest.approx(1.0)
    assert set(model.communication_) == {"p0 -> p1", "p0 -> p2", "p1 -> p0", "p2 -> p0"}
    for pair in model.communication_.values():
        assert pair["bytes"] == sum(pair["by_type"].values()) > 0
    assert model.timings_["total"] >= model.timings_["boosting"] > 0
    assert set(model.disclosures_) == {"p0", "p1", "p2"}


def test_fewer_rows_per_leaf_in_safe_mode_are_disclosed():
    X, y = real_table("binary")
    said = flat(treaty.GBDTClassifier, n_estimators=1, min_child_samples=1, **FAST_KEY).fit(cut(X, 2), y).disclosures_
    unsaid = flat(treaty.GBDTClassifier, n_estimators=1, **FAST_KEY).fit(cut(X, 2), y).disclosures_
    assert any("min_child_samples" in fact for fact in said["p0"])
    assert not any("min_child_samples" in fact for fact in unsaid["p0"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 0}, "max_depth=0"),
        ({"max_bin": 256}, "max_bin=256"),
        ({"subsample": 0.0}, "subsample"),
        ({"learning_rate": "fast"}, "learning_rate='fast'"),
        ({"protocol": "secure-boost"}, "got 'secure-boost'"),
        ({"encryption": "ou"}, "Pooled has no option 'encryption'; encryption is an option of SecureBoost"),
        ({"protocol": "secureboost", "encryption": "rot13"}, "encryption='rot13'"),
        ({"protocol": "secureboost", "key_bits": 1024}, "key_bits=1024"),
        ({"transport": "pigeon"}, "transport"),
        ({"early_stopping_rounds": 3}, "eval_set"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"random_state": -1}, "random_state"),
        ({"n_jobs": 0}, "n_jobs"),
        ({"base_score": 1.5}, "base_score"),
        ({"fractional_bits": 40, "n_estimators": 1}, None),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    X, y = real_table("binary")
    data = cut(X, 2) if options.get("protocol") == "secureboost" else X
    if message is None:
        flat(treaty.GBDTClassifier, **options).fit(data, y)
        return
    with pytest.raises(treaty.ConfigError) as caught:
        flat(treaty.GBDTClassifier, **options).fit(data, y)
    assert message in str(caught.value)


def test_wrong_data_names_the_party_and_the_column():
    X, y = real_table("binary")
    tables = cut(X, 2)
    model = flat(treaty.GBDTClassifier, n_estimators=1, **FAST_KEY)
    cases = [
        ({**tables, "p1": tables["p1"].iloc[:-3]}, y, ["p0 240", "p1 237"]),
        ({**tables, "p1": tables["p1"].assign(name="x")}, y, ["p1", "name"]),
        ({**tables, "p1": pd.concat([tables["p1"]] * 2, axis=1)}, y, ["p1", tables["p1"].columns[0]]),
        (tables, np.where(np.arange(len(y)) < 4, np.nan, y), ["p0", "4"]),
        (tables, np.ones(len(y)), ["class", "p0"]),
        ({**tables, "p1": tables["p1"].assign(name=[[1, 2]] * len(y))}, y, ["p1", "name", "'list'"]),
        (tables, [[1]] * (len(y) - 1) + [[1, 2]], ["p0", "lists of several lengths"]),
        (X, y, ["mapping"]),
    ]
    for data, labels, words in cases:
        with pytest.raises(treaty.DataError) as caught:
            model.fit(data, labels)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_prediction_refuses_other_parties_and_columns():
    X, y = real_table("binary")
    tables = cut(X, 2)
    model = flat(treaty.GBDTClassifier, n_estimators=1, **FAST_KEY).fit(tables, y)
    with pytest.raises(treaty.DataError, match="p0, p1"):
        model.predict({"p0": tables["p0"]})
    with pytest.raises(treaty.DataError, match="p1"):
        model.predict({**tables, "p1": tables["p1"].iloc[:, 1:]})


def test_predictions_are_silent_and_training_draws_nothing_without_a_terminal(capfd):
    X, y = real_table("binary")
    flat(treaty.GBDTClassifier, n_estimators=2, **FAST_KEY).fit(cut(X, 2), y).predict(cut(X, 2))
    assert capfd.readouterr() == ("", "")


def test_an_oversized_fixed_point_is_refused_before_training():
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match="fractional_bits"):
        treaty.GBDTClassifier(fractional_bits=40).fit(X, y, sample_weight=np.full(len(y), 2.0**20))


def test_early_stopping_may_be_given_to_fit():
    X, y = real_table("binary", rows=400)
    train, valid = (X.iloc[:200], y[:200]), (X.iloc[200:], y[200:])
    stopped = treaty.GBDTClassifier(n_estimators=60, learning_rate=1.0).fit(
        *train, eval_set=valid, early_stopping_rounds=2
    )
    again = treaty.GBDTClassifier(n_estimators=60, learning_rate=1.0, early_stopping_rounds=2).fit(
        *train, eval_set=[valid]
    )
    assert stopped.n_iter_ == stopped.best_iteration_ + 1 == again.n_iter_ < 60


def test_column_names_xgboost_forbids_are_named():
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(n_estimators=1).fit(X.rename(columns={"mean radius": "radius [mm]"}), y)
    with pytest.raises(treaty.ConfigError, match="radius"):
        model.to_xgboost()


def test_party_names_may_hold_what_file_names_may_not(tmp_path):
    X, y = real_table("binary")
    tables = {"Bank / north: 1": X.iloc[:, :5], "../shop": X.iloc[:, 5:]}
    model = flat(treaty.GBDTClassifier, n_estimators=2, **FAST_KEY).fit(tables, y)
    model.save(tmp_path / "model")
    assert len(list((tmp_path / "model").iterdir())) == 3
    np.testing.assert_array_equal(treaty.load(tmp_path / "model").predict(tables), model.predict(tables))


@pytest.mark.parametrize("name", ["../outside", "a b/../c"])
@pytest.mark.parametrize("protocol", ["secureboost", "federboost-horizontal", "fedxgb", "quasi-newton"])
def test_names_that_processes_cannot_have_are_refused_before_anything_is_written(monkeypatch, tmp_path, protocol, name):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    X, y = real_table("binary")
    tables, labels = {name: X.iloc[:, :6], "b": X.iloc[:, 6:]}, (y,)
    if protocol in ("federboost-horizontal", "fedxgb"):
        parts = np.array_split(np.arange(len(y)), 9)
        tables, labels = {name if k == 0 else f"u{k}": (X.iloc[rows], y[rows]) for k, rows in enumerate(parts)}, ()
    kind, options = treaty.GBDTClassifier, {"expose": "model"} if protocol == "fedxgb" else {}
    if protocol == "quasi-newton":
        kind, options = treaty.LogisticRegression, {"batch_size": 120}
    with pytest.raises(treaty.ConfigError, match=f"letters, digits, .* got '{re.escape(name)}'"):
        flat(kind, protocol, transport="tls", **options).fit(tables, *labels)
    assert list(tmp_path.iterdir()) == []


def test_predicting_by_processes_writes_nothing_under_names_they_cannot_have(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    X, y = real_table("binary")
    tables = {"../outside": X.iloc[:, :6], "b": X.iloc[:, 6:]}
    model = flat(treaty.GBDTClassifier, n_estimators=1, **FAST_KEY).fit(tables, y)
    with pytest.raises(treaty.ConfigError, match="letters, digits"):
        model.set_params(transport="tls").predict(tables)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_logistic_regression_keeps_what_it_keeps_in_the_folder(tmp_path):
    X, y = real_table("binary")
    tables = {"../outside": X.iloc[:, :2], "b": X.iloc[:, 2:4]}
    protocol = treaty.QuasiNewton(insecure_test_key_bits=768, allow_insecure=True)
    model = treaty.LogisticRegression(protocol, max_iter=1, batch_size=240)
    model.fit(tables, y, checkpoint=tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_finished_trees_survive_a_party_that_fails_later(monkeypatch):
    X, y = real_table("binary")
    tables = cut(X, 2)
    calls = []

    def failing(*arguments):
        calls.append(1)
        if len(calls) > 6:  # in the third tree
            raise RuntimeError("out of paper")
        return record(*arguments)

    record = SplitOwner.record
    monkeypatch.setattr(SplitOwner, "record", failing)
    model = flat(treaty.GBDTClassifier, n_estimators=30, min_child_samples=1, max_bin=32, **FAST_KEY)
    with pytest.raises(RuntimeError, match="out of paper"):
        model.fit(tables, y)
    trees = len(model.parts_["p0"].forest.trees)
    assert 1 <= trees < 30
    monkeypatch.undo()
    finished = treaty.GBDTClassifier(n_estimators=trees, min_child_samples=1, max_bin=32).fit(tables, y)
    np.testing.assert_array_equal(model.predict_proba(tables), finished.predict_proba(tables))


def test_small_weights_weigh_as_much_as_large_ones():
    X, y = real_table("binary", rows=400)
    options = {"min_child_weight": 0.0, "reg_lambda": 0.0, "n_estimators": 5}
    weight = np.random.default_rng(0).random(len(y)) + 0.5
    large = treaty.GBDTClassifier(min_split_loss=0.125, **options).fit(X, y, sample_weight=weight / 2)
    small = treaty.GBDTClassifier(min_split_loss=0.125 / 2**10, **options).fit(X, y, sample_weight=weight / 2**11)
    np.testing.assert_array_equal(small.predict_proba(X), large.predict_proba(X))


def test_numpy_parameters_can_be_saved(tmp_path):
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(max_depth=np.int64(2), learning_rate=np.float64(0.5), n_estimators=2).fit(X, y)
    model.save(tmp_path / "model")
    assert treaty.load(tmp_path / "model").max_depth == 2


def test_a_refit_leaves_nothing_of_the_earlier_fit():
    X, y = real_table("binary", rows=300)
    model = treaty.GBDTClassifier(n_estimators=40, learning_rate=1.0)
    model.fit(X, y, eval_set=(X, 1 - y), early_stopping_rounds=1)
    assert hasattr(model, "best_iteration_")
    model.fit(X.to_numpy(), y)
    assert not hasattr(model, "best_iteration_")
    assert not hasattr(model, "feature_names_in_")
    with pytest.raises(treaty.DataError):
        model.fit(X, np.zeros(len(y)))
    with pytest.raises(NotFittedError):
        model.predict(X)


@pytest.mark.parametrize(
    "empty", [None, pd.DataFrame(), pl.DataFrame(), pa.table({})], ids=["none", "pandas", "polars", "arrow"]
)
def test_an_active_party_may_bring_labels_alone(empty):
    X, y = real_table("binary")
    full, bare = {"bank": X.iloc[:, :0], "shop": X}, {"bank": empty, "shop": X}
    expected = flat(treaty.GBDTClassifier, n_estimators=2, **FAST_KEY).fit(full, y).predict_proba(full)
    model = flat(treaty.GBDTClassifier, n_estimators=2, **FAST_KEY).fit(bare, y)
    np.testing.assert_array_equal(model.predict_proba(bare), expected)


@pytest.mark.parametrize("eval_set", [[1, 2], (1,), (), "xy"], ids=repr)
def test_a_malformed_eval_set_is_refused(eval_set):
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match="eval_set"):
        treaty.GBDTClassifier().fit(X, y, eval_set=eval_set)


def test_predicting_a_plain_table_with_a_model_of_parties_is_refused():
    X, y = real_table("binary")
    with pytest.raises(treaty.DataError, match="p0, p1"):
        treaty.GBDTClassifier(n_estimators=1).fit(cut(X, 2), y).predict(X)


@pytest.mark.parametrize("convert", [lambda X: X, lambda X: X.to_numpy()], ids=["names", "no names"])
def test_a_loaded_model_knows_its_columns(tmp_path, convert):
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(n_estimators=2).fit(convert(X), y)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(convert(X)), model.predict_proba(convert(X)))
    assert again.n_features_in_ == X.shape[1]
    with pytest.raises(ValueError, match="feature"):
        again.predict(convert(X.iloc[:, :3]))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1]"], ids=repr)
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    X, y = real_table("binary")
    treaty.GBDTClassifier(n_estimators=1).fit(X, y).save(tmp_path / "model")
    (tmp_path / "model" / "pooled.part").write_bytes(content)
    with pytest.raises(treaty.ConfigError, match=r"pooled\.part"):
        treaty.load(tmp_path / "model")
    (tmp_path / "model" / "model.json").write_bytes(content)
    with pytest.raises(treaty.ConfigError, match=r"model\.json"):
        treaty.load(tmp_path / "model")
    with pytest.raises(treaty.ConfigError, match="nowhere"):
        treaty.load(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_leaves_and_stages_of_a_federated_model_are_the_pooled_ones(task):
    X, y = real_table(task)
    tables = cut(with_gaps(with_categories(X)), 3)
    estimator = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    federated = flat(estimator, **FAST_KEY, n_estimators=4).fit(tables, y)
    pooled = estimator(n_estimators=4, max_bin=64).fit(tables, y)
    leaves = federated.predict_leaf(tables)
    assert leaves.dtype == np.int32
    assert leaves.shape == (len(y), len(federated.parts_["p0"].forest.trees))
    np.testing.assert_array_equal(leaves, pooled.predict_leaf(tables))
    values = [tree.value[leaf] for tree, leaf in zip(federated.parts_["p0"].forest.trees, leaves.T, strict=True)]
    assert np.count_nonzero(values) > 0
    stages = [list(model.staged_predict(tables)) for model in (federated, pooled)]
    np.testing.assert_array_equal(*stages)
    assert len(stages[0]) == 4
    np.testing.assert_array_equal(stages[0][-1], federated.predict(tables))
    if task != "regression":
        shorter = estimator(n_estimators=2, max_bin=64).fit(tables, y)
        np.testing.assert_array_equal(list(federated.staged_predict_proba(tables))[1], shorter.predict_proba(tables))


def test_margins_are_the_log_odds_of_the_probabilities():
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(n_estimators=4).fit(X, y)
    p = model.predict_proba(X)[:, 1]
    np.testing.assert_allclose(model.decision_function(X), np.log(p / (1 - p)), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("transport", all_but_first_slow("memory", "tls"))
def test_shared_inference_predicts_the_same(transport):
    X, y = real_table("binary")
    tables = cut(with_gaps(X), 3)
    plain = flat(treaty.GBDTClassifier, **FAST_KEY, n_estimators=3).fit(tables, y)
    hidden = flat(treaty.GBDTClassifier, **FAST_KEY, n_estimators=3, inference="shared", transport=transport).fit(
        tables, y
    )
    rows = {name: table.iloc[:40] for name, table in tables.items()}
    np.testing.assert_allclose(hidden.predict_proba(rows), plain.predict_proba(rows), rtol=1e-6)
    with pytest.raises(treaty.ConfigError, match="hide which leaf"):
        hidden.predict_leaf(rows)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_contributions_of_a_federated_model_are_xgboosts_of_the_joined_one(task):
    X, y = real_table(task)
    tables = cut(with_gaps(X), 3)
    estimator = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    federated = flat(estimator, **FAST_KEY, n_estimators=4).fit(tables, y)
    found = federated.predict_contributions(tables)
    assert list(found.values) == list(tables)
    joined = found.joined()
    booster = federated.to_xgboost(consent=["p1", "p2"])
    rows = xgboost.DMatrix(pd.concat(list(tables.values()), axis=1).to_numpy(), feature_names=booster.feature_names)
    np.testing.assert_allclose(joined, booster.predict(rows, pred_contribs=True), atol=1e-4)
    pooled = estimator(n_estimators=4, max_bin=64).fit(tables, y)
    np.testing.assert_allclose(joined, pooled.predict_contributions(tables), atol=1e-12)
    if task == "binary":
        np.testing.assert_allclose(joined.sum(axis=1), federated.decision_function(tables), atol=1e-9)


def test_importances_name_foreign_columns_only_with_their_owners_consent():
    X, y = real_table("binary")
    tables = cut(X, 3)
    model = flat(treaty.GBDTClassifier, **FAST_KEY, n_estimators=4).fit(tables, y)
    for kind in ("gain", "cover", "count"):
        unnamed, named = model.importances(kind), model.importances(kind, consent=None)
        assert list(named["p0"]) == list(unnamed["p0"]) == list(tables["p0"].columns)
        for party in ("p1", "p2"):
            assert list(named[party]) == list(tables[party].columns)
            assert not set(unnamed[party]) & set(X.columns)
            assert sorted(unnamed[party].values()) == sorted(value for value in named[party].values() if value)
    assert sum(model.importances("count", consent=None, normalised=True)["p1"].values()) <= 1.0
    splits = sum(np.count_nonzero(tree.left >= 0) for tree in model.parts_["p0"].forest.trees)
    assert sum(sum(of.values()) for of in model.importances("count").values()) == splits


def test_an_unwilling_party_is_not_exported():
    X, y = real_table("binary")
    model = flat(treaty.GBDTClassifier, **FAST_KEY, n_estimators=4).fit(cut(X, 3), y)
    for agreed, lacking in (((), "p1, p2"), (["p1"], "p2"), (None, "p1, p2")):
        with pytest.raises(treaty.ConfigError, match=rf"of {lacking}, whose .* consent=\['p1', 'p2'\]"):
            model.to_xgboost(consent=agreed)
    booster = model.to_xgboost(consent=["p1", "p2"])
    assert len(booster.get_dump()) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"goss": True, "purity_guard": 0.2}, "goss and purity_guard contradict"),
        ({"goss": True, "subsample": 0.5}, "leave subsample at 1"),
        ({"goss": True, "top_rate": 0.8, "other_rate": 0.4}, "top_rate . other_rate of at most 1"),
        ({"mechanism": "label_rr"}, "mechanism and epsilon go together"),
        ({"epsilon": 1.0}, "mechanism and epsilon go together"),
        ({"rerandomise": False}, "needs mode='paper' and allow_insecure=True"),
        (
            {"rerandomise": False, "mode": "paper", "allow_insecure": False, "insecure_test_key_bits": None},
            "needs mode='paper' and allow_insecure=True",
        ),
        ({"allow_insecure": False}, "insecure_test_key_bits=512: expected allow_insecure=True with it"),
        ({"purity_guard": 1.5}, "purity_guard=1.5"),
        ({"encryption": "rsa"}, "encryption='rsa'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_options_that_do_not_go_together_are_refused(options, said):
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match=said):
        flat(treaty.GBDTClassifier, **{**FAST_KEY, **options}).fit(cut(X, 2), y)


def test_labels_of_several_kinds_are_refused():
    X, y = real_table("binary", rows=60)
    mixed, text = np.array(["a", 1], object)[y], np.array(["a", "b"], object)[y]
    model = treaty.GBDTClassifier(n_estimators=1)
    for labels, watched in ((mixed, y), (y, mixed)):
        with pytest.raises(treaty.DataError, match="pooled: expected labels of one kind, got int and str"):
            model.fit(X, labels, eval_set=(X, watched))
    model.fit(X, y, eval_set=(X, np.array([0, np.int64(1)], object)[y]))
    model.fit(X, y, eval_set=(X, np.array([0.0, True], object)[y]))
    with pytest.raises(treaty.DataError, match="pooled: expected the labels seen in training, got others"):
        model.fit(X, text, eval_set=(X, y))
    rows = {name: (X[k::3], mixed[k::3]) for k, name in enumerate("abc")}
    with pytest.raises(treaty.DataError, match="a: expected labels of one kind, got int and str"):
        treaty.GBDTClassifier("federboost-horizontal").fit(rows)


def test_label_rr_on_a_regression_is_refused():
    X, y = real_table("regression")
    with pytest.raises(treaty.ConfigError, match="randomises classes"):
        flat(treaty.GBDTRegressor, **FAST_KEY, mechanism="label_rr", epsilon=1.0).fit(cut(X, 2), y)


def test_paillier_gives_the_trees_of_okamoto_uchiyama():
    X, y = real_table("binary", rows=120)
    tables = cut(X, 2)
    options = {**FAST_KEY, "n_estimators": 2}
    one = flat(treaty.GBDTClassifier, **options, encryption="ou").fit(tables, y)
    other = flat(treaty.GBDTClassifier, **options, encryption="paillier").fit(tables, y)
    assert one.parts_["p0"].forest.trees == other.parts_["p0"].forest.trees
    assert one.communication_["p0 -> p1"]["bytes"] != other.communication_["p0 -> p1"]["bytes"]


def test_an_owner_of_no_split_may_be_absent_at_prediction():
    X, y = real_table("binary")
    tables = {"bank": X, "shop": pd.DataFrame({"constant": np.ones(len(X))})}
    model = flat(treaty.GBDTClassifier, **FAST_KEY, n_estimators=3).fit(tables, y)
    np.testing.assert_array_equal(model.predict({"bank": X}), model.predict(tables))
    with pytest.raises(treaty.DataError, match="without bank no party can decide rows at its splits"):
        model.predict({"shop": tables["shop"]})
