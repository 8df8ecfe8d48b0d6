"""Rankings between owners of columns: the pooled trees bit for bit, XGBoost's trees, and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
import xgboost

import treaty
from marks import slow
from runs.job_files import train_in_threads
from tables import assert_same_trees, cut, with_categories, with_gaps
from treaty.errors import ConfigError, DataError
from treaty.runs.job import Job, Member
from treaty.runs.job_files import load_job
from treaty.runs.prediction import find_part

OF_SYSTEMS = {
    "secureboost": treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True),
    "secureboost-lattice": treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
    "smm-dealer": treaty.FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    "federboost": treaty.FederBoostVertical(mode="paper", epsilon=math.inf),
}
OPTIONS = {"n_estimators": 3, "max_depth": 3, "min_child_samples": 1, "min_child_weight": 0.1, "max_bin": 16}


def queries(n_groups=12, seed=0, n_columns=6):
    """A table of integer codes, relevance that depends on it, and groups of rows in no order."""
    rng = np.random.default_rng(seed)
    qid = np.repeat(np.arange(n_groups), rng.integers(2, 40, n_groups))
    rng.shuffle(qid)
    X = pd.DataFrame(rng.integers(0, 12, (len(qid), n_columns)).astype(float), columns=list("abcdef")[:n_columns])
    score = X["a"] - 0.7 * X["b"] + (X["d"] > 6) * 4 + rng.normal(0, 2, len(qid))
    return X, np.clip(np.floor(score / 3 + 1), 0, 4), np.array([f"q{k}" for k in qid])


def ranker(protocol="pooled", **options):
    return treaty.GBDTRanker(protocol, n_jobs=1, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("system", "parties"), [("secureboost", 2), slow("secureboost", 3), *(slow(name, 2) for name in [*OF_SYSTEMS][1:])]
)
@pytest.mark.parametrize("objective", [None, "pairwise"])
def test_trees_between_owners_of_columns_are_the_pooled_ones(system, objective, parties):
    X, y, qid = queries()
    tables = cut(with_categories(with_gaps(X)), parties)
    options = {"qid": qid, "eval_set": (tables, y), "eval_qid": [qid]}
    pooled = ranker(objective=objective).fit(tables, y, **options)
    federated = ranker(OF_SYSTEMS[system], objective=objective).fit(tables, y, **options)
    assert_same_trees(federated, pooled)
    np.testing.assert_array_equal(federated.predict(tables), pooled.predict(tables))
    assert federated.evals_result_ == pooled.evals_result_
    ndcg = federated.evals_result_["eval_0"]["ndcg@32"]
    assert ndcg[-1] > ndcg[0] > 0.5


@pytest.mark.slow
def test_weights_and_samples_give_the_pooled_trees():
    X, y, qid = queries(30)
    weight = np.random.default_rng(1).gamma(2.0, 1.0, 30)[[int(q[1:]) for q in qid]]
    for options in ({"subsample": 0.6, "random_state": 1}, {"goss": True, "random_state": 2}):
        pooled, federated = (
            ranker(system, **options).fit(cut(X, 3), y, sample_weight=weight, qid=qid)
            for system in ("pooled", OF_SYSTEMS["secureboost"])
        )
        assert_same_trees(federated, pooled)


@pytest.mark.slow
def test_processes_give_the_pooled_trees():
    X, y, qid = queries()
    tables = cut(X, 2)
    options = {"qid": qid, "eval_set": (tables, y), "eval_qid": [qid]}
    model = ranker(OF_SYSTEMS["secureboost"], transport="tls").fit(tables, y, **options)
    pooled = ranker().fit(tables, y, **options)
    assert_same_trees(model, pooled)
    assert model.evals_result_ == pooled.evals_result_


@pytest.mark.parametrize("depth", [2, 5])
@pytest.mark.parametrize("objective", ["ndcg", "pairwise"])
def test_trees_and_metric_are_xgboosts(objective, depth):
    X, y, qid = queries(60, seed=3)
    numbers = np.array([int(q[1:]) for q in qid])
    order = np.argsort(numbers, kind="stable")  # XGBoost wants groups one after another
    X, y, numbers = X.iloc[order].reset_index(drop=True), y[order].to_numpy(), numbers[order]
    options = {"max_depth": depth, "n_estimators": 6, "fractional_bits": 36, "min_child_weight": 0.3}
    model = ranker(objective=objective, **options).fit(X, y, qid=numbers, eval_set=(X, y), eval_qid=[numbers])
    data = xgboost.DMatrix(X, y, qid=numbers)
    found: dict = {}
    parameters = {
        "objective": f"rank:{objective}", "tree_method": "hist", "max_depth": depth, "max_bin": 32,
        "min_child_weight": 0.3, "nthread": 1,
    }  # fmt: skip
    booster = xgboost.train(parameters, data, 6, evals=[(data, "train")], evals_result=found, verbose_eval=False)
    theirs = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]["trees"]
    forest = model.parts_["pooled"].forest
    assert sum(len(tree.left) for tree in forest.trees) > 40
    for ours, other in zip(forest.trees, theirs, strict=True):
        assert len(ours.left) == len(other["left_children"])
    np.testing.assert_allclose(model.predict(X), booster.predict(data), atol=2e-5)
    np.testing.assert_allclose(model.evals_result_["eval_0"]["ndcg@32"], found["train"]["ndcg@32"], atol=1e-6)
    np.testing.assert_allclose(model.to_xgboost().predict(xgboost.DMatrix(X)), model.predict(X), atol=1e-5)
    assert json.loads(model.to_xgboost().save_config())["learner"]["objective"]["name"] == f"rank:{objective}"


def test_early_stopping_keeps_the_best_ndcg():
    X, y, qid = queries(40)
    train, valid = np.arange(len(y)) % 2 == 0, np.arange(len(y)) % 2 == 1
    model = ranker(n_estimators=60, learning_rate=1.0, early_stopping_rounds=3)
    model.fit(X[train], y[train], qid=qid[train], eval_set=(X[valid], y[valid]), eval_qid=[qid[valid]])
    ndcg = model.evals_result_["eval_0"]["ndcg@32"]
    assert model.best_iteration_ == int(np.argmax(ndcg)) < 59


def test_saved_rankers_predict_the_same(tmp_path):
    X, y, qid = queries()
    model = ranker(objective="pairwise").fit(X, y, qid=qid)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    assert isinstance(again, treaty.GBDTRanker)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def job_of(folder, tables, y, qid, **fields):
    bank = tables["p0"].assign(relevance=y, query=qid)
    bank.to_parquet(folder / "p0.parquet")
    tables["p1"].to_parquet(folder / "p1.parquet")
    return Job(
        name="rank", active="p0", label="relevance", task="ranking", group="query", protocol="secureboost",
        parties={name: Member(table=str(folder / f"{name}.parquet")) for name in tables},
        own={"insecure_test_key_bits": 512, "allow_insecure": True, "allow_exact_sums": True},
        common={**OPTIONS, "objective": "ndcg"}, output=str(folder / "model"), **fields,
    )  # fmt: skip


def test_a_job_ranks_by_the_column_it_names(tmp_path, monkeypatch):
    X, y, qid = queries()
    tables = cut(X, 2)
    job = job_of(tmp_path, tables, y, qid)
    assert train_in_threads(monkeypatch, dict.fromkeys(tables, job)) == {}
    part, pooled = find_part(job, "p0"), ranker().fit(tables, y, qid=qid).parts_["pooled"]
    assert "query" not in part.schema.names
    assert any(len(tree.left) > 1 for tree in pooled.forest.trees)
    for ours, theirs in zip(part.forest.trees, pooled.forest.trees, strict=True):
        np.testing.assert_array_equal(ours.value, theirs.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['task = "ranking"'], 'expected group, a column, with task = "ranking" .* and no group'),
        (['group = "query"'], "got task = \"classification\" and group = 'query'"),
    ],
    ids=["no-group", "no-ranking"],
)
def test_a_job_that_ranks_names_its_groups(tmp_path, lines, said):
    path = tmp_path / "job.toml"
    path.write_text("\n".join(['name = "j"', 'active = "a"', 'label = "y"', *lines, "[parties.a]", "[parties.b]"]))
    with pytest.raises(ConfigError, match=said):
        load_job(path)


def test_what_does_not_rank_is_refused():
    X, y, qid = queries()
    for missing in ({}, {"qid": qid, "eval_set": (X, y)}):
        with pytest.raises(ConfigError, match=r"expected fit\(X, y, qid=\.\.\.\)"):
            ranker().fit(X, y, **missing)
    with pytest.raises(DataError, match=f"groups: expected {len(y)} labels"):
        ranker().fit(X, y, qid=qid[1:])
    with pytest.raises(DataError, match="expected relevance as whole numbers"):
        ranker().fit(X, y - 1, qid=qid)
    with pytest.raises(ConfigError, match="objective='poisson' does not rank rows within groups"):
        ranker(objective="poisson").fit(X, y, qid=qid)
    with pytest.raises(ConfigError, match="objective='ndcg' ranks rows within groups: use GBDTRanker"):
        treaty.GBDTRegressor(objective="ndcg").fit(X, y)


@pytest.mark.parametrize("protocol", ["federboost-horizontal", "fedxgb", "fedxgboost-ldp"])
def test_systems_without_whole_groups_are_refused(protocol):
    X, y, qid = queries()
    with pytest.raises(ConfigError, match=r"objective='ndcg' (ranks rows within groups, and|computes gradients from)"):
        ranker(protocol).fit({"a": X, "b": X}, y, qid=qid)
