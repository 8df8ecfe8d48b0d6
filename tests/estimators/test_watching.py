"""Metrics by XGBoost's names, lines and callbacks after every round, and weights of classes."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost
from sklearn.linear_model import LogisticRegression as TheirRegression
from sklearn.metrics import average_precision_score
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight

import treaty
from tables import real_table, with_gaps

FAST = treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True)


def halves(task):
    X, y = real_table(task)
    return X.iloc[::2], y[::2], X.iloc[1::2], y[1::2]


@pytest.mark.parametrize(
    ("task", "metrics"),
    [
        ("binary", ["logloss", "error", "auc"]),
        ("multiclass", ["mlogloss", "merror", "auc"]),
        ("regression", ["rmse", "mae", "mape", "rmsle"]),
    ],
)
def test_metrics_are_those_of_xgboost(task, metrics):
    X, y, X_valid, y_valid = halves(task)
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    model = kind(n_estimators=4, eval_metric=metrics).fit(X, y, eval_set=[(X, y), (X_valid, y_valid)])
    assert list(model.evals_result_) == ["eval_0", "eval_1"]
    assert list(model.evals_result_["eval_1"]) == metrics
    booster = model.to_xgboost()
    booster.set_param([("eval_metric", name) for name in metrics])
    watched = xgboost.DMatrix(X_valid, y_valid)
    last = dict(part.split(":") for part in booster.eval(watched, "v").split("\t")[1:])
    for name in metrics:
        assert model.evals_result_["eval_1"][name][-1] == pytest.approx(float(last[f"v-{name}"]), rel=1e-4, abs=1e-6)


def test_aucpr_is_the_average_precision():
    X, y, X_valid, y_valid = halves("binary")
    model = treaty.GBDTClassifier(n_estimators=3, eval_metric="aucpr").fit(X, y, eval_set=(X_valid, y_valid))
    expected = average_precision_score(y_valid, model.predict_proba(X_valid)[:, 1])
    assert model.evals_result()["eval_0"]["aucpr"][-1] == pytest.approx(expected)


def test_early_stopping_goes_by_the_last_metric():
    X, y, X_valid, y_valid = halves("binary")
    model = treaty.GBDTClassifier(n_estimators=40, learning_rate=1.0, eval_metric="logloss,auc")
    model.fit(X, y, eval_set=(X_valid, y_valid), early_stopping_rounds=4)
    values = model.evals_result_["eval_0"]["auc"]
    assert model.best_iteration == int(np.argmax(values)) < len(values) - 1
    assert model.best_score == max(values)
    assert model.n_iter_ == model.best_iteration + 1
    np.testing.assert_array_equal(model.apply(X), model.predict_leaf(X))
    assert not hasattr(treaty.GBDTClassifier(n_estimators=1).fit(X, y), "best_iteration")


@pytest.mark.parametrize(
    ("task", "metric"), [("binary", "rmse"), ("regression", "auc"), ("binary", "f1"), ("multiclass", "logloss")]
)
def test_a_metric_that_labels_do_not_have_is_refused(task, metric):
    X, y, X_valid, y_valid = halves(task)
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    with pytest.raises(treaty.ConfigError, match=f"expected eval_metric of .*, got '{metric}'"):
        kind(n_estimators=1, eval_metric=metric).fit(X, y, eval_set=(X_valid, y_valid))


def test_an_eval_set_of_one_class_has_no_auc():
    X, y, X_valid, y_valid = halves("binary")
    one = y_valid == 1
    with pytest.raises(treaty.DataError, match="needs rows of every class"):
        treaty.GBDTClassifier(n_estimators=1, eval_metric="auc").fit(X, y, eval_set=(X_valid[one], y_valid[one]))


def ranking():
    """Return rows of groups with a relevance of 0 to 3, in two halves."""
    X, y = real_table("regression")
    relevance, qid = np.digitize(y, np.quantile(y, [0.5, 0.7, 0.9])), np.arange(len(y)) % 12 // 2
    return X[::2], relevance[::2], qid[::2], X[1::2], relevance[1::2], qid[1::2]


@pytest.mark.parametrize("binary", [False, True])
def test_metrics_of_rankings_and_thresholds_are_those_of_xgboost(binary):
    X, y, qid, X_valid, y_valid, qid_valid = ranking()
    names = ["ndcg", "ndcg@5", "ndcg@1"]
    if binary:
        names, y, y_valid = ["map", "map@3", "map@40", "ndcg@32"], np.minimum(y, 1), np.minimum(y_valid, 1)
        y_valid[qid_valid == 2] = 0  # a group without relevance
    model = treaty.GBDTRanker(n_estimators=5, eval_metric=names)
    model.fit(X, y, qid=qid, eval_set=(X_valid, y_valid), eval_qid=[qid_valid])
    order = np.argsort(qid_valid, kind="stable")
    watched = xgboost.DMatrix(X_valid.iloc[order], y_valid[order], qid=qid_valid[order])
    booster = model.to_xgboost()
    booster.set_param([("eval_metric", name) for name in names])
    theirs = dict(part.split(":") for part in booster.eval(watched, "v").split("\t")[1:])
    for name in names:
        assert model.evals_result_["eval_0"][name][-1] == pytest.approx(float(theirs[f"v-{name}"]), rel=1e-4), name


def test_early_stopping_maximises_a_metric_of_the_first_rows():
    X, y, qid, X_valid, y_valid, qid_valid = ranking()
    model = treaty.GBDTRanker(n_estimators=30, eval_metric="ndcg@5", early_stopping_rounds=4)
    model.fit(X, y, qid=qid, eval_set=(X_valid, y_valid), eval_qid=[qid_valid])
    values = model.evals_result_["eval_0"]["ndcg@5"]
    assert model.best_iteration == int(np.argmax(values)) < len(values) - 1


def test_the_error_above_a_threshold_is_that_of_xgboost():
    X, y, X_valid, y_valid = halves("binary")
    names = ["error@0.3", "error", "error@0.9"]
    model = treaty.GBDTClassifier(n_estimators=2, eval_metric=names).fit(X, y, eval_set=(X_valid, y_valid))
    booster = model.to_xgboost()
    booster.set_param([("eval_metric", name) for name in names])
    theirs = dict(part.split(":") for part in booster.eval(xgboost.DMatrix(X_valid, y_valid), "v").split("\t")[1:])
    for name in names:
        assert model.evals_result_["eval_0"][name][-1] == pytest.approx(float(theirs[f"v-{name}"]), abs=1e-6)


@pytest.mark.parametrize(
    "name",
    ["ndcg-nloglik", "error@", "error@2", "error@x", "ndcg@0", "ndcg@2.5", "map@-1", "auc@1"],
)
def test_metrics_that_are_not_there_are_refused_with_those_that_are(name):
    X, y = real_table("regression")
    with pytest.raises(treaty.ConfigError) as refused:
        treaty.GBDTRegressor(eval_metric=["rmse", name]).fit(X, y)
    for known in ("error@t", "ndcg@k", "map@k", "mape", "rmsle", "poisson-deviance", "quantile", f"got {name!r}"):
        assert known in str(refused.value)


def test_logarithms_of_labels_and_predictions_that_have_none_are_refused():
    X, y, X_valid, y_valid = halves("regression")
    model = treaty.GBDTRegressor(n_estimators=2, eval_metric="rmsle")
    with pytest.raises(treaty.DataError, match=r"'rmsle' expects labels above -1, .* got 1 others of 120 .* 'rmse'"):
        model.fit(X, y, eval_set=(X_valid, np.r_[-1.0, y_valid[1:]]))
    assert not hasattr(model, "parts_")  # nothing was trained
    with pytest.raises(treaty.DataError, match=r"rows of the eval set are predicted as -1 or less: take 'rmse'"):
        model.fit(X, y - 1e4, eval_set=(X_valid, y_valid))


def test_the_mean_average_precision_expects_relevance_of_0_or_1():
    X, y, qid, X_valid, y_valid, qid_valid = ranking()
    with pytest.raises(treaty.DataError, match=r"'map@3' expects relevance of 0 or 1, got \d+ others .* take 'ndcg'"):
        treaty.GBDTRanker(eval_metric="map@3").fit(X, y, qid=qid, eval_set=(X_valid, y_valid), eval_qid=[qid_valid])
    with pytest.raises(treaty.ConfigError, match=r"expected eval_metric of logloss, .* for these labels, got 'map'"):
        treaty.GBDTClassifier(eval_metric="map").fit(X, y > 1, eval_set=(X_valid, y_valid > 1))


def test_metrics_send_nothing_more():
    X, y, X_valid, y_valid = halves("binary")
    parties = {"bank": list(X.columns[:5]), "shop": list(X.columns[5:])}

    def sent(metric):
        model = treaty.GBDTClassifier(FAST, n_estimators=2, parties=parties, eval_metric=metric)
        model.fit(X, y, eval_set=(X_valid, y_valid))
        return {pair: (of["messages"], set(of["by_type"])) for pair, of in model.communication_.items()}, model

    (plain, _), (several, model) = sent(None), sent(["auc", "error", "logloss"])
    assert plain == several
    assert list(model.evals_result_["eval_0"]) == ["auc", "error", "logloss"]


def test_verbose_prints_xgboosts_lines(capsys):
    X, y, X_valid, y_valid = halves("binary")
    model = treaty.GBDTClassifier(n_estimators=5, eval_metric=["logloss", "error"], verbose=True)
    model.fit(X, y, eval_set=(X_valid, y_valid))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"[{k}]" for k in range(5)]
    loss = model.evals_result_["eval_0"]["logloss"][0]
    assert lines[0].split("\t")[1] == f"eval_0-logloss:{loss:.5f}"
    model.fit(X, y, eval_set=(X_valid, y_valid), verbose=2)
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == ["[0]", "[2]", "[4]"]
    model.fit(X, y, eval_set=(X_valid, y_valid), verbose=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(treaty.ConfigError, match="expected verbose"):
        model.fit(X, y, verbose="yes")


@pytest.mark.slow
def test_processes_give_the_same_metrics_and_print_them_at_the_end(capsys):
    X, y, X_valid, y_valid = halves("binary")
    parties = {"bank": list(X.columns[:5]), "shop": list(X.columns[5:])}
    model = treaty.GBDTClassifier(FAST, n_estimators=3, parties=parties, eval_metric=["auc", "logloss"], verbose=True)
    threads = model.fit(X, y, eval_set=(X_valid, y_valid)).evals_result_
    printed = capsys.readouterr().out
    model.set_params(transport="tls").fit(X, y, eval_set=(X_valid, y_valid))
    assert model.evals_result_ == threads
    assert capsys.readouterr().out == printed


class StopAfter:
    """Ask to stop after some rounds, and remember what was told."""

    def __init__(self, rounds):
        self.rounds, self.told = rounds, []

    def before_training(self, model):
        self.told.append("before")

    def after_iteration(self, model, epoch, evals_log):
        self.told.append((epoch, len(evals_log["eval_0"]["logloss"])))
        return epoch + 1 == self.rounds

    def after_training(self, model):
        self.told.append(model.n_iter_)


@pytest.mark.parametrize("protocol", ["pooled", FAST, "federboost-vertical"], ids=str)
def test_callbacks_are_called_after_every_round_and_may_end_training(protocol):
    X, y, X_valid, y_valid = halves("binary")
    callback = StopAfter(3)
    parties = {"bank": list(X.columns[:5]), "shop": list(X.columns[5:])}
    model = treaty.GBDTClassifier(protocol, n_estimators=20, callbacks=[callback], parties=parties)
    model.fit(X, y, eval_set=(X_valid, y_valid))
    assert callback.told == ["before", (0, 1), (1, 2), (2, 3), 3]
    fewer = treaty.GBDTClassifier(protocol, n_estimators=3, parties=parties).fit(X, y)
    if protocol != "federboost-vertical":  # whose buckets are noisy
        np.testing.assert_array_equal(model.predict_proba(X), fewer.predict_proba(X))


def test_callbacks_that_cannot_be_called_are_refused():
    X, y, _, _ = halves("binary")
    with pytest.raises(treaty.ConfigError, match="after_iteration"):
        treaty.GBDTClassifier(callbacks=[print]).fit(X, y)
    with pytest.raises(treaty.ConfigError, match="need transport='memory'"):
        treaty.GBDTClassifier("secureboost", callbacks=[StopAfter(1)], transport="tls").fit({"a": X}, y)


@pytest.mark.parametrize(
    "given", [{"scale_pos_weight": 3.0}, {"class_weight": {0: 1.0, 1: 3.0}}, {"class_weight": "balanced"}], ids=str
)
@pytest.mark.parametrize("protocol", ["pooled", FAST], ids=str)
def test_weights_of_classes_are_those_of_their_rows(given, protocol):
    X, y, _, _ = halves("binary")
    weight = compute_sample_weight(given.get("class_weight", {0: 1.0, 1: 3.0}), y)
    own = np.linspace(0.5, 1.5, len(y))
    parties = {"bank": list(X.columns[:5]), "shop": list(X.columns[5:])}
    model = treaty.GBDTClassifier(protocol, n_estimators=3, parties=parties)
    expected = model.fit(X, y, sample_weight=own * weight).predict_proba(X)
    model.set_params(**given)
    np.testing.assert_array_equal(model.fit(X, y, sample_weight=own).predict_proba(X), expected)
    if protocol is FAST:
        bound = 2.0 ** np.ceil(np.log2((own * weight).max()))
        told = f"that the largest weight of a row is above half of {bound:g} and at most {bound:g}"
        assert (told in model.disclosures_["shop"]) == (bound > 1.0)


@pytest.mark.parametrize("min_child_samples", [1, 20])
def test_whole_weights_on_one_table_are_rows_repeated(min_child_samples):
    X, y = real_table("binary")
    weight = np.random.default_rng(0).integers(0, 3, len(y))
    repeated = np.repeat(np.arange(len(y)), weight)
    options = {"n_estimators": 4, "min_child_samples": min_child_samples, "min_child_weight": 0.5, "max_bin": 255}
    weighed = treaty.GBDTClassifier(**options).fit(X, y, sample_weight=weight)
    if min_child_samples == 1:  # which counts rows
        expected = treaty.GBDTClassifier(**options).fit(X.iloc[repeated], y[repeated])
        np.testing.assert_array_equal(weighed.predict_proba(X), expected.predict_proba(X))
    kept = weight > 0
    without = treaty.GBDTClassifier(**options).fit(X[kept], y[kept], sample_weight=weight[kept])
    np.testing.assert_array_equal(weighed.predict_proba(X), without.predict_proba(X))


@pytest.mark.filterwarnings("ignore:.*rows have a margin beyond 4", "ignore:training ended after max_iter")
@pytest.mark.parametrize("kind", [treaty.LogisticRegression, treaty.LinearRegression, treaty.PoissonRegressor])
def test_whole_weights_of_a_linear_model_on_one_table_are_rows_repeated(kind):
    X, y = real_table("binary")
    X = with_gaps(X)
    weight = np.random.default_rng(0).integers(0, 3, len(y))
    repeated = np.repeat(np.arange(len(y)), weight)
    options = {"batch_size": 1000} if kind is treaty.LogisticRegression else {}
    model = kind(max_iter=100, **options).fit(X, y, sample_weight=weight)
    expected = kind(max_iter=100, **options).fit(X.iloc[repeated], y[repeated])
    np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-5, atol=1e-7)
    predict = "predict_proba" if kind is treaty.LogisticRegression else "predict"
    np.testing.assert_allclose(getattr(model, predict)(X), getattr(expected, predict)(X), rtol=1e-5)


def test_participants_weigh_their_own_rows():
    X, y, _, _ = halves("binary")
    weight = np.where(y == 1, 3.0, 1.0)
    rows = {"east": slice(None, 40), "west": slice(40, 80), "north": slice(80, None)}
    options = {"n_estimators": 2, "random_state": 0}
    given = treaty.GBDTClassifier("federboost-horizontal", **options).fit(
        {name: (X.iloc[of], y[of], weight[of]) for name, of in rows.items()}
    )
    named = treaty.GBDTClassifier("federboost-horizontal", scale_pos_weight=3.0, **options)
    named.fit({name: (X.iloc[of], y[of]) for name, of in rows.items()})
    np.testing.assert_array_equal(named.predict_proba(X), given.predict_proba(X))
    with pytest.raises(treaty.ConfigError, match="needs the counts of all labels"):
        treaty.GBDTClassifier("federboost-horizontal", class_weight="balanced").fit(
            {name: (X.iloc[of], y[of]) for name, of in rows.items()}
        )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (treaty.GBDTClassifier(scale_pos_weight=2.0, class_weight="balanced"), "got both"),
        (treaty.GBDTClassifier(scale_pos_weight=-1.0), "above 0"),
        (treaty.GBDTClassifier(class_weight={7: 2.0}), "class_weight="),
        (treaty.GBDTRegressor(scale_pos_weight=2.0), "not for GBDTRegressor"),
        (
            treaty.GBDTClassifier(treaty.FedXGBoostLDP(mechanism="duchi"), class_weight="balanced"),
            "needs the counts of all labels",
        ),
        (treaty.GBDTClassifier(treaty.SecureBoost(mechanism="label_rr", epsilon=1.0), scale_pos_weight=2.0), "noise"),
        (treaty.LogisticRegression("quasi-newton", class_weight="balanced"), "would read labels"),
        (treaty.LogisticRegression(C=1.0, l2=0.1), "C above 0 with l2=0"),
        (treaty.LogisticRegression(C=0.0), "C above 0"),
    ],
    ids=lambda given: "" if isinstance(given, str) else repr(given),
)
def test_weights_that_cannot_be_meant_or_would_tell_labels_are_refused(model, said):
    X, y, _, _ = halves("binary")
    tables = {"a": X.iloc[:, :6], "b": X.iloc[:, 6:]}
    with pytest.raises(treaty.ConfigError, match=said):
        model.fit(X if model.protocol == "pooled" else tables, y)


@pytest.mark.parametrize("class_weight", [None, "balanced", {0: 1.0, 1: 4.0}], ids=str)
def test_c_and_class_weight_of_a_logistic_regression_are_scikit_learns(class_weight):
    X, y = real_table("binary")
    ours = treaty.LogisticRegression(
        treaty.Pooled(loss="logistic"), C=0.5, class_weight=class_weight, max_iter=600, tol=0.0, learning_rate=0.5
    ).fit(X, y)
    weight = np.ones(len(y)) if class_weight is None else compute_sample_weight(class_weight, y)
    columns = X.astype(np.float32).astype(float)
    scaled = StandardScaler().fit(columns, sample_weight=weight).transform(columns)
    scaled /= np.maximum(1.0, np.abs(scaled).max(axis=0) / 10.0)  # a long tail is divided by more than its deviation
    theirs = TheirRegression(C=0.5, tol=1e-10, max_iter=1000).fit(scaled, y, sample_weight=weight)
    np.testing.assert_allclose(ours.standardized_coef_, theirs.coef_, atol=2e-4)


def test_a_linear_model_prints_its_losses(capsys):
    X, y = real_table("regression")
    treaty.LinearRegression(verbose=True).fit(X, y)
    assert capsys.readouterr().out.startswith("[0]\ttrain-loss:")


def test_columns_of_parties_are_named_with_their_party():
    X, y, _, _ = halves("binary")
    model = treaty.GBDTClassifier("federboost-vertical", n_estimators=1).fit(
        {"a": X.iloc[:, :1], "b": X.iloc[:, 1:2]}, y
    )
    assert model.feature_names_in_.tolist() == ["a.mean radius", "b.mean texture"]
