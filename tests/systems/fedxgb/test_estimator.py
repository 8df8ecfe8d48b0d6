"""Whole fits among users and edge servers: the trees of federboost-horizontal, for a server, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.metrics import roc_auc_score

import treaty
from flat import flat
from marks import all_but_first_slow, slow
from runs.test_resume import Interrupted
from tables import real_table, with_categories, with_gaps
from treaty.errors import ConfigError, DataError
from treaty.models.checkpoints import checkpoint_file, load_checkpoint
from treaty.models.trees import forest_of
from treaty.trees.ensemble import join_splits
from treaty.trees.slots import VALUE_BITS, SlotTree

TREES = 4
OPTIONS = {"n_estimators": TREES, "min_child_samples": 5, "max_bin": 12, "n_jobs": 1}
TASKS = ["binary", "multiclass", "regression"]
ROUNDED = 2.0**-VALUE_BITS


def estimator(task, protocol="fedxgb", **options):
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    if protocol == "fedxgb":
        options = {"expose": "model", **options}
    elif protocol == "federboost-horizontal":
        options = {"bins": "approximate", **options}  # as a crowd's
    return flat(kind, protocol, **{**OPTIONS, "base_score": 150.0 if task == "regression" else 0.5, **options})


def deal_out(X, y, users=9, seed=0):
    """Deal rows out to users, unevenly."""
    shares = np.arange(users, 0, -1.0)
    who = np.random.default_rng(seed).choice(users, len(y), p=shares / shares.sum())
    return {f"user {k}": (X[who == k], y[who == k]) for k in range(users)}


def trees_of(model):
    """Return each tree as (children, splits spelt out, leaf values)."""
    parts = list(model.parts_.values())
    splits = join_splits([part.splits for part in parts], [len(part.schema.names) for part in parts])
    found = []
    for tree in forest_of(parts).trees:
        spelt = []
        for s in (splits.base[tree.source] + tree.record)[tree.left >= 0]:
            going = splits.category_left[splits.category_start[s] : splits.category_start[s + 1]].tolist()
            spelt.append((splits.feature[s], repr(splits.threshold[s]), splits.missing_left[s], going))
        found.append((tree.left.tolist(), spelt, tree.value))
    return found


def same_but_for_rounding(ours, theirs):
    """Compare trees: children and splits bit for bit, leaf values as they are told to users."""
    assert len(ours) == len(theirs)
    assert any(len(left) > 1 for left, _, _ in theirs)
    for (left, splits, value), (other_left, other_splits, other_value) in zip(ours, theirs, strict=True):
        assert left == other_left
        assert splits == other_splits
        np.testing.assert_allclose(value, other_value, rtol=0, atol=10 * ROUNDED)  # of margins that were rounded, too
        np.testing.assert_array_equal(value, np.rint(value / ROUNDED) * ROUNDED)


# ---------------------------------------------------------------- the model


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", all_but_first_slow(*TASKS))
def test_trees_are_those_of_participants_that_sum_under_masks(task, weighted):
    X, y = real_table(task)
    rows = deal_out(with_gaps(with_categories(X)), y)
    if weighted:
        rng = np.random.default_rng(1)
        rows = {name: (*own, rng.gamma(2.0, k + 1.0, len(own[1]))) for k, (name, own) in enumerate(rows.items())}
        rows["user 1"] = rows["user 1"][:2]  # no weights: every row counts once
    drawn = {"colsample_bytree": 0.6, "random_state": 3, "max_depth": 4}
    ours = estimator(task, **drawn).fit(rows)
    theirs = estimator(task, "federboost-horizontal", **drawn).fit(rows)
    same_but_for_rounding(trees_of(ours), trees_of(theirs))


@pytest.mark.parametrize("expose", [None, slow("model")])
@pytest.mark.parametrize("task", ["regression", slow("binary"), slow("multiclass"), slow("poisson")])
def test_training_starts_where_all_users_labels_say(task, expose):
    X, y = real_table("regression" if task == "poisson" else task)
    rows = deal_out(X, y)
    rows["user 1"] = (*rows["user 1"], np.random.default_rng(1).gamma(2.0, 3.0, len(rows["user 1"][1])))
    of_one = [np.ones(len(y)) if len(own) == 2 else own[2] for own in rows.values() for y in (own[1],)]
    whole = pd.concat([own[0] for own in rows.values()]), np.concatenate([own[1] for own in rows.values()])
    given = {"base_score": None, "n_estimators": 2, "objective": "poisson" if task == "poisson" else None}
    kind = "regression" if task == "poisson" else task
    pooled = estimator(kind, "pooled", **given).fit(*whole, sample_weight=np.concatenate(of_one))
    starts = [forest_of(list(pooled.parts_.values())).objective.start]
    ours = estimator(kind, expose=expose, **given).fit(rows)
    theirs = estimator(kind, "federboost-horizontal", **given).fit(rows)
    starts += [model.parts_["pooled"].forest.objective.start for model in (ours, theirs)]
    assert starts[0] == starts[1] == starts[2] != (0.5,) * len(starts[0])
    assert ours.parts_["pooled"].forest.objective == theirs.parts_["pooled"].forest.objective
    same_but_for_rounding(trees_of(ours), trees_of(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("task", all_but_first_slow(*TASKS))
def test_a_hidden_model_is_the_one_that_users_are_told(task):
    X, y = real_table(task)
    rows = deal_out(with_gaps(with_categories(X)), y)
    hidden, shown = (estimator(task, expose=expose, n_estimators=3).fit(rows) for expose in (None, "model"))
    parts = hidden.parts_["pooled"], shown.parts_["pooled"]
    assert parts[0].forest.trees == parts[1].forest.trees
    assert repr(parts[0].splits) == repr(parts[1].splits)
    assert any(len(tree.left) > 1 for tree in parts[0].forest.trees)


def test_groups_of_another_size_change_no_tree_while_nobody_is_lost():
    rows = deal_out(*real_table("binary"), 8)
    trees = [trees_of(estimator("binary", edges=2, group_size=size).fit(rows)) for size in (None, 4)]
    assert repr(trees[0]) == repr(trees[1])


@pytest.mark.slow
def test_lost_users_are_away_from_every_tenth_round_on():
    X, y = real_table("binary")
    X = X.iloc[:, :4]
    rows = deal_out(X, y, 18)
    options = {"n_estimators": 11, "max_depth": 2, "edges": 2, "random_state": 5, "max_bin": 6}
    whole, lost = (estimator("binary", dropout=share, **options).fit(rows) for share in (None, 0.12))
    trees, others = whole.parts_["pooled"].forest.trees, lost.parts_["pooled"].forest.trees
    rounds = next(k for k, (one, other) in enumerate(zip(trees, others, strict=True)) if one != other)
    assert rounds == 9  # the tenth
    assert [tree.count[0] for tree in others[:9]] == [len(y)] * 9
    assert 0.5 * len(y) < others[10].count[0] < len(y)
    assert roc_auc_score(y, lost.predict_proba(X)[:, 1]) > 0.95


@pytest.mark.slow
def test_churn_ends_no_training_and_costs_little_accuracy():
    """A third of a small domain's users is lost in every second tree, each time others: 15 events of them."""
    X, y = make_classification(4_500, 8, n_informative=6, random_state=0)
    train, test = slice(0, 2_700), slice(2_700, None)
    who = np.random.default_rng(0).integers(0, 45, 2_700)
    rows = {f"user {k}": (X[train][who == k], y[train][who == k]) for k in range(45)}
    options = {"n_estimators": 30, "max_bin": 16, "min_child_samples": 20}
    model = estimator("binary", dropout=0.3, dropout_period=2, random_state=1, **options).fit(rows)
    plain = treaty.GBDTClassifier(**options).fit(X[train], y[train])
    assert model.n_iter_ == 30
    accuracies = [np.mean(of.predict(X[test]) == y[test]) for of in (model, plain)]
    assert accuracies[0] >= accuracies[1] - 0.015
    counts = [tree.count[0] for tree in model.parts_["pooled"].forest.trees]
    assert counts[0] == 2_700
    assert min(counts) < 1_800


@pytest.mark.slow
def test_so_many_columns_are_drawn_for_each_tree():
    X, y = real_table("binary")
    model = estimator("binary", feature_sample=2, max_depth=4, random_state=0, n_estimators=8).fit(deal_out(X, y))
    used = [{feature for feature, *_ in splits} for _, splits, _ in trees_of(model)]
    assert max(map(len, used)) == 2
    assert len(set().union(*used)) > 4


# ---------------------------------------------------------------- what a fitted model is good for


@pytest.mark.slow
@pytest.mark.parametrize("task", all_but_first_slow(*TASKS))
def test_a_fitted_model_serves_as_a_pooled_one_does(task, tmp_path):
    X, y = real_table(task)
    X = with_gaps(with_categories(X))
    model = estimator(task).fit(deal_out(X, y), eval_set=(X, y))
    assert list(model.parts_) == list(model.schemas_) == ["pooled"]
    assert model.feature_names_in_.tolist() == X.columns.tolist()
    predict = model.predict if task == "regression" else model.predict_proba
    stages = list((model.staged_predict if task == "regression" else model.staged_predict_proba)(X))
    assert len(stages) == TREES == model.n_iter_
    np.testing.assert_allclose(stages[-1], predict(X), rtol=1e-12)
    (losses,) = model.evals_result_["eval_0"].values()
    assert len(losses) == TREES
    assert losses[-1] < losses[0]
    assert model.feature_importances_.sum() == pytest.approx(1.0)
    margins = model.predict(X) if task == "regression" else model.decision_function(X)
    booster = model.to_xgboost()
    np.testing.assert_allclose(
        booster.predict(xgboost.DMatrix(X, enable_categorical=True), output_margin=True), margins, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(model.predict_contributions(X).sum(axis=-1), margins, atol=1e-9)
    model.save(tmp_path / "model")
    again = treaty.load(tmp_path / "model")
    assert again.get_params() == model.get_params()
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(again.feature_importances_, model.feature_importances_)


@pytest.mark.slow
def test_the_server_stops_early_by_rows_of_its_own():
    X, y = real_table("binary", rows=400)
    rows = deal_out(X.iloc[:250], y[:250])
    model = estimator("binary", n_estimators=60, learning_rate=1.0)
    model.fit(rows, eval_set=(X.iloc[250:], y[250:]), early_stopping_rounds=2)
    assert model.n_iter_ == model.best_iteration_ + 1 < 60
    fewer = clone(model).set_params(n_estimators=model.n_iter_).fit(rows)
    np.testing.assert_array_equal(model.predict_proba(X), fewer.predict_proba(X))


@pytest.mark.slow
def test_fitted_attributes_tell_what_happened():
    X, y = real_table("binary")
    rows = deal_out(X, y, 6)
    model = clone(estimator("binary", edges=2)).fit(rows)
    pairs = {tuple(pair.split(" -> ")) for pair in model.communication_}
    edges = {"edge0", "edge1"}
    talking = {(user, edge) for k, user in enumerate(rows) for edge in [f"edge{k % 2}"]}
    talking |= {("server", edge) for edge in edges} | {(who, "authority") for who in {*rows, *edges, "server"}}
    assert pairs == talking | {pair[::-1] for pair in talking}  # edge servers, with a model that is shown, not at all
    for pair in model.communication_.values():
        assert pair["bytes"] == sum(pair["by_type"].values()) > 0
    assert model.communication_["user 0 -> edge0"]["by_type"]["MaskedInput"] > 0
    assert model.timings_["total"] >= model.timings_["boosting"] > 0
    assert list(model.disclosures_) == ["server", "edge", "user", "authority"]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": "user 1"}, "expected active=None, got 'user 1'"),
        ({"edges": 2, "expose": None}, "expected 3 edge servers or more, got 2"),
        ({"edges": 4}, "expected 12 users or more, 3 in the domain of each of 4 edge servers, got 2 at edge1"),
        ({"group_size": 4}, "expected 12 users or more, 4 in the domain of .*, or a smaller group_size"),
        ({"group_size": 3, "mode": "paper", "allow_insecure": True}, "has no groups; leave group_size out"),
        ({"feature_sample": 13}, "feature_sample of at most 12 columns, got 13"),
        ({"feature_sample": 3, "colsample_bytree": 0.5}, "give one"),
        ({"dropout": "accept"}, "option dropout='accept': expected `float"),
        ({"comparison": "additive"}, 'hidden model, and expose="model"'),
        ({"comparison": "additive", "edges": 2, "expose": None}, "expected 3 edge servers or more, got 2"),
        ({"dropout": 0.3}, "to lose a user, got 0.3 of domains of 3 users or fewer, which rounds down to none"),
        ({"dropout": 0.4}, "can lose 0.4 of their users, got 3 in the largest"),
        ({"dropout": 0.2, "transport": "tls"}, "leave it out with transport='tls'"),
        ({"dropout_period": 2}, "dropout_period says how often dropout loses users"),
        ({"buckets": 4}, "FedXGB has no option 'buckets'"),
        ({"early_stopping_rounds": 2}, "eval_set"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        estimator("binary", **options).fit(deal_out(*real_table("binary")))


@pytest.mark.parametrize("name", ["server", "authority", "edge2"])
def test_no_user_may_be_called_as_a_role(name):
    rows = deal_out(*real_table("binary"))
    rows[name] = rows.pop("user 4")
    with pytest.raises(ConfigError, match=rf"other names than the server, .* got {name}"):
        estimator("binary").fit(rows)


def test_other_protocols_have_no_edge_servers():
    with pytest.raises(ConfigError, match="FederBoostHorizontal has no option 'edges'; edges is an option of FedXGB"):
        estimator("binary", "federboost-horizontal", edges=3).fit(deal_out(*real_table("binary"), 3))


@pytest.mark.slow
def test_labels_come_with_each_users_rows_alone():
    X, y = real_table("binary")
    with pytest.raises(ConfigError, match="leave out y and sample_weight"):
        estimator("binary").fit(deal_out(X, y), y)
    with pytest.raises(DataError, match="predicts one table, got a mapping"):
        estimator("binary").fit(deal_out(X, y)).predict({"user 1": X})


@pytest.mark.slow
def test_a_users_other_columns_are_named():
    rows = deal_out(*real_table("binary"))
    X, y = rows["user 3"]
    rows["user 3"] = X.assign(shoe=1.0), y
    with pytest.raises(DataError, match=r"user 3: .*'shoe'"):
        estimator("binary").fit(rows)


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("expose", all_but_first_slow("model", None))
def test_an_interrupted_training_goes_on_to_the_same_model(expose, monkeypatch, tmp_path):
    X, y = real_table("multiclass" if expose is None else "binary")
    rows = deal_out(with_gaps(with_categories(X)), y)
    finish, count = SlotTree.finish, itertools.count()
    outputs = len(np.unique(y)) if expose is None else 1

    def stopping(self, depth):
        if next(count) == 3 * outputs:
            raise Interrupted
        return finish(self, depth)

    drawn = {"colsample_bytree": 0.6, "subsample": 0.8, "random_state": 3, "expose": expose, "base_score": None}
    model = estimator("binary", **drawn)
    with monkeypatch.context() as patch:
        patch.setattr(SlotTree, "finish", stopping)
        with pytest.raises(Interrupted):
            model.fit(rows, checkpoint=tmp_path)
    assert 1 <= load_checkpoint(checkpoint_file(tmp_path, "server")).rounds <= 3
    assert all(list(tmp_path.glob(f"edge{k}-*.cohorts")) for k in range(3))
    model.fit(rows, checkpoint=tmp_path)
    assert not list(tmp_path.iterdir())
    whole = estimator("binary", **drawn).fit(rows)
    parts = model.parts_["pooled"], whole.parts_["pooled"]
    assert parts[0].forest.trees == parts[1].forest.trees
    assert repr(parts[0].splits) == repr(parts[1].splits)
