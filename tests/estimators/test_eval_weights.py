"""Weights of the rows of eval sets, and the least improvement that early stopping counts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.metrics import log_loss

import treaty
from runs.job_files import train_in_threads
from runs.small_jobs import write_job
from tables import FAST_KEY, cut, real_table
from treaty.data.table import to_table
from treaty.models.trees import load_part, predict_pooled
from treaty.runs.job_files import check_training, load_job
from treaty.runs.party import part_file

RNG = np.random.default_rng(50)
X, Y = real_table("binary", rows=400)
TRAIN, Y_TRAIN, VALID, Y_VALID = X[:200], Y[:200], X[200:], Y[200:]
WEIGHT = RNG.uniform(0.0, 9.0, 200).round(1)


def losses(model, metric="logloss", name="eval_0"):
    return model.evals_result_[name][metric]


@pytest.mark.parametrize("metric", ["logloss", "auc", "error"])
def test_metrics_of_weighted_rows_are_those_of_xgboost(metric):
    model = treaty.GBDTClassifier(n_estimators=4, n_jobs=1, eval_metric=metric)
    model.fit(TRAIN, Y_TRAIN, eval_set=[(VALID, Y_VALID)], sample_weight_eval_set=[WEIGHT])
    booster = model.to_xgboost()
    booster.set_param("eval_metric", metric)
    theirs = booster.eval(xgboost.DMatrix(VALID, Y_VALID, weight=WEIGHT), "v").split(":")[1]
    assert losses(model, metric)[-1] == pytest.approx(float(theirs), abs=1e-5)
    unweighted = treaty.GBDTClassifier(n_estimators=4, n_jobs=1, eval_metric=metric)
    unweighted.fit(TRAIN, Y_TRAIN, eval_set=[(VALID, Y_VALID)])
    assert losses(unweighted, metric) != losses(model, metric)


@pytest.mark.parametrize(
    "protocol",
    [
        {"n_jobs": 1},
        FAST_KEY,
        {"protocol": "federboost-vertical", "n_jobs": 1},
        {"protocol": "federboost-horizontal", "n_jobs": 1},
    ],
    ids=["pooled", "secureboost", "federboost-vertical", "federboost-horizontal"],
)
def test_every_way_of_splitting_a_table_weighs_eval_rows(protocol):
    protocol = dict(protocol)
    system, fast = protocol.pop("protocol", "pooled"), {"n_estimators": 3, "n_jobs": protocol.pop("n_jobs", 1)}
    own = treaty.SecureBoost(**protocol) if protocol else system
    if system == "federboost-horizontal":
        given, watched, y = {f"p{k}": (TRAIN[k::3], Y_TRAIN[k::3]) for k in range(3)}, VALID, None
    else:
        parties = 1 if system == "pooled" else 3
        given, watched, y = cut(TRAIN, parties), cut(VALID, parties), Y_TRAIN
    model = treaty.GBDTClassifier(own, **fast).fit(given, y, eval_set=[(watched, Y_VALID, WEIGHT), (watched, Y_VALID)])
    p = model.predict_proba(watched)
    assert losses(model)[-1] == pytest.approx(log_loss(Y_VALID, p, sample_weight=WEIGHT), rel=1e-9)
    assert losses(model, name="eval_1")[-1] == pytest.approx(log_loss(Y_VALID, p), rel=1e-9)


@pytest.mark.slow
def test_parties_in_processes_weigh_eval_rows():
    how = [{"transport": of} for of in ("memory", "tls")]
    found = [
        treaty.GBDTClassifier(
            treaty.FederBoostVertical(epsilon=float("inf"), mode="paper"), n_estimators=2, n_jobs=1, **of
        ).fit(cut(TRAIN, 2), Y_TRAIN, eval_set=[(cut(VALID, 2), Y_VALID, WEIGHT), (cut(VALID, 2), Y_VALID)])
        for of in how
    ]
    assert found[0].evals_result_ == found[1].evals_result_


def test_a_job_names_the_column_of_weights_in_its_eval_tables(tmp_path, monkeypatch):
    write_job(tmp_path, "secureboost")
    text = (tmp_path / "job.toml").read_text().replace('label = "y"', 'label = "y"\neval_weight = "w"')
    for name in "abc":
        text = text.replace(f'table = "{name}.csv"', f'table = "{name}.csv"\neval_tables = ["{name}.eval.csv"]')
        table = pd.read_csv(tmp_path / f"{name}.csv")
        (table.assign(w=1.0 + np.arange(len(table))) if name == "a" else table).to_csv(
            tmp_path / f"{name}.eval.csv", index=False
        )
    (tmp_path / "job.toml").write_text(text)
    job = load_job(tmp_path / "job.toml")
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    parts = {name: load_part(part_file(job.output, name)) for name in "abc"}
    tables = {name: to_table(pd.read_csv(tmp_path / f"{name}.csv")[list(parts[name].schema.names)]) for name in "abc"}
    margins = predict_pooled(list(parts.values()), list(tables.values()))[:, 0]
    y = pd.read_csv(tmp_path / "a.csv")["y"]
    expected = log_loss(y, 1 / (1 + np.exp(-margins)), sample_weight=1.0 + np.arange(len(y)))
    assert parts["a"].forest.history["eval_0"]["logloss"][-1] == pytest.approx(expected, rel=1e-6)
    assert "w" not in parts["a"].schema.names

    plain = "".join(line for line in text.splitlines(True) if "eval_tables" not in line)
    (tmp_path / "job.toml").write_text(plain)
    with pytest.raises(treaty.ConfigError, match=r"eval_weight needs rows to watch: name parties\.a\.eval_tables"):
        check_training(load_job(tmp_path / "job.toml"))
    (tmp_path / "job.toml").write_text(text.replace("a.eval.csv", "a.csv"))
    job = load_job(tmp_path / "job.toml")
    assert "expected a column 'w'" in train_in_threads(monkeypatch, dict.fromkeys(job.parties, job))["a"]


def test_early_stopping_goes_by_weighted_rows():
    first = np.arange(200) < 100
    model = {}
    for name, weight in {"first": first, "others": ~first}.items():
        model[name] = treaty.GBDTClassifier(n_estimators=80, learning_rate=1.0, early_stopping_rounds=3, n_jobs=1).fit(
            TRAIN, Y_TRAIN, eval_set=(VALID, Y_VALID), sample_weight_eval_set=[weight.astype(float)]
        )
        alone = treaty.GBDTClassifier(n_estimators=80, learning_rate=1.0, early_stopping_rounds=3, n_jobs=1).fit(
            TRAIN, Y_TRAIN, eval_set=(VALID[weight], Y_VALID[weight])
        )
        assert model[name].best_iteration_ == alone.best_iteration_
        assert losses(model[name]) == pytest.approx(losses(alone))
    assert model["first"].best_iteration_ != model["others"].best_iteration_


def test_weights_of_classes_are_of_training_rows_alone():
    model = treaty.GBDTClassifier(n_estimators=3, class_weight={0: 9.0, 1: 1.0}, n_jobs=1)
    model.fit(TRAIN, Y_TRAIN, eval_set=(VALID, Y_VALID))
    assert losses(model)[-1] == pytest.approx(log_loss(Y_VALID, model.predict_proba(VALID)), rel=1e-9)


def test_weights_of_a_rankings_eval_set_are_one_for_all_rows_of_a_group():
    group = np.arange(200) // 20
    ranker = treaty.GBDTRanker(n_estimators=3, n_jobs=1)
    watched = {"eval_set": [(VALID, Y_VALID)], "eval_qid": [group]}
    ranker.fit(TRAIN, Y_TRAIN, qid=group, **watched, sample_weight_eval_set=[group + 1.0])
    assert losses(ranker, "ndcg@32")[-1] == pytest.approx(
        ranker.score(VALID, Y_VALID, group + 1.0, qid=group), abs=1e-12
    )
    with pytest.raises(treaty.DataError, match="group"):
        ranker.fit(TRAIN, Y_TRAIN, qid=group, **watched, sample_weight_eval_set=[WEIGHT + 1.0])


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        ([WEIGHT[:10]], treaty.DataError, "eval_0: .*200 rows|eval_0"),
        ([-WEIGHT], treaty.DataError, "eval_0: expected sample weights >= 0"),
        ([np.full(200, np.nan)], treaty.DataError, "eval_0"),
        ([np.zeros(200)], treaty.DataError, "eval_0: expected a sample weight above 0, got only zeros"),
        (["heavy"] * 2, treaty.ConfigError, "an entry for each of 1 eval sets, got 2 of them"),
        (WEIGHT, treaty.ConfigError, "sample_weight_eval_set as a list .* got ndarray"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights, error, text):
    with pytest.raises(error, match=text):
        treaty.GBDTClassifier(n_jobs=1).fit(TRAIN, Y_TRAIN, eval_set=[(VALID, Y_VALID)], sample_weight_eval_set=weights)


def test_weights_given_twice_and_those_of_a_linear_model_are_refused():
    with pytest.raises(treaty.ConfigError, match=r"weights of eval_0 in eval_set or in .*, got both"):
        treaty.GBDTClassifier(n_jobs=1).fit(
            TRAIN, Y_TRAIN, eval_set=(VALID, Y_VALID, WEIGHT), sample_weight_eval_set=[WEIGHT]
        )
    with pytest.raises(treaty.ConfigError, match="a linear model's eval sets all weigh the same"):
        treaty.LogisticRegression().fit(TRAIN, Y_TRAIN, eval_set=(VALID, Y_VALID, WEIGHT))


# ---------------------------------------------------------------- the least improvement


@pytest.mark.parametrize("metric", ["logloss", "auc"])
@pytest.mark.parametrize("min_delta", [0.0, 0.002, 0.02, 0.5])
def test_the_best_round_is_that_of_xgboosts_callback(metric, min_delta):
    options = {"n_estimators": 60, "learning_rate": 0.5, "eval_metric": metric, "n_jobs": 1}
    values = losses(treaty.GBDTClassifier(**options).fit(TRAIN, Y_TRAIN, eval_set=(VALID, Y_VALID)), metric)
    stop = {"early_stopping_rounds": 4, "early_stopping_min_delta": min_delta}
    model = treaty.GBDTClassifier(**options, **stop).fit(TRAIN, Y_TRAIN, eval_set=(VALID, Y_VALID))

    class Model:  # what the callback asks of a booster
        def num_boosted_rounds(self):
            return 0

        def set_attr(self, **given):
            self.best = given

    theirs, booster = xgboost.callback.EarlyStopping(rounds=4, min_delta=min_delta, save_best=False), Model()
    theirs.before_training(booster)
    rounds = next(
        k for k in range(1, 61) if theirs.after_iteration(booster, k - 1, {"v": {metric: values[:k]}}) or k == 60
    )
    assert model.best_iteration_ == int(booster.best["best_iteration"])
    assert len(losses(model, metric)) == rounds
    assert model.n_iter_ == model.best_iteration_ + 1
    assert model.best_score_ == values[model.best_iteration_]


def test_a_least_improvement_without_early_stopping_is_refused():
    with pytest.raises(treaty.ConfigError, match="early_stopping_min_delta needs early_stopping_rounds"):
        treaty.GBDTClassifier(early_stopping_min_delta=0.1).fit(TRAIN, Y_TRAIN, eval_set=(VALID, Y_VALID))
    with pytest.raises(treaty.ConfigError, match="option early_stopping_min_delta=-1"):
        treaty.GBDTClassifier(early_stopping_min_delta=-1).fit(TRAIN, Y_TRAIN)
