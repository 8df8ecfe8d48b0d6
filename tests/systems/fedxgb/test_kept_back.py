"""Held-out rows of users: in no sum of gradients, counted after each round over the tree's cohort."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics

from marks import all_but_first_slow
from systems.fedxgb.playing import crowd_rows, options_of, play_crowd
from systems.fedxgb.test_resume import interrupted, model, rows_of_nine
from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.errors import ConfigError, PeerProtocolError
from treaty.models.trees import predict_pooled
from treaty.systems.fedxgb.messages import RoundStart
from treaty.systems.fedxgb.rows import CrowdMetrics
from treaty.systems.fedxgb.secfind import Crowd
from treaty.systems.horizontal.held_out import HeldOutRequest, chosen, drawn_back

SHOWN = [{"expose": "model"}, {}, {"expose": "paper", "allow_insecure": True}]
IDS = ["model", "nothing", "paper"]


def back_of(parts, share=0.3):
    return {name: drawn_back(len(rows.y), share, name) for name, rows in parts.items()}


def counts_in(crowded):
    """Return the sums of counts that the server opened: all sums after the first of a length that no level has."""
    return [sums for sums in crowded.opened if sums.total.shape == (512,)]


@pytest.mark.parametrize("shown", all_but_first_slow(*SHOWN), ids=IDS)
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_trees_are_those_of_the_other_rows_and_metrics_those_of_the_rows_kept_back(task, shown):
    parts, _, classes = crowd_rows(task, users=9, rows=250)
    back = back_of(parts)
    left = {name: chosen(rows, ~back[name]) for name, rows in parts.items()}
    kept = [chosen(rows, back[name]) for name, rows in parts.items()]
    given = {"subsample": 1.0 if task == "binary" else 0.8, "random_state": 1, "feature_sample": 3, **shown}
    ours = play_crowd(parts, options_of(validation_fraction=0.3, **given), classes, edges=3).model
    other = play_crowd(left, options_of(**given), classes, edges=3).model
    for mine, theirs in zip(ours.forest.trees, other.forest.trees, strict=True):
        np.testing.assert_array_equal(mine.value, theirs.value)
        np.testing.assert_array_equal(mine.left, theirs.left)
    margins = np.concatenate([predict_pooled([ours], [rows.table]) for rows in kept])
    y, predicted = np.concatenate([rows.y for rows in kept]), ours.forest.objective.predictions(margins)
    found, history = ours.held_out.groups["all"], ours.forest.history["validation"]
    assert found["rows"] == len(y)
    assert all(len(values) == 2 and values[-1] == found[name] for name, values in history.items())
    if task == "regression":
        assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(y, predicted), rel=0.02)
    elif task == "multiclass":
        assert found["mlogloss"] == pytest.approx(metrics.log_loss(y, predicted), abs=1 / 32)
        assert found["merror"] == pytest.approx(np.mean(predicted.argmax(axis=1) != y))
    else:
        assert found["logloss"] == pytest.approx(metrics.log_loss(y, predicted), abs=1 / 32)
        assert found["auc"] == pytest.approx(metrics.roc_auc_score(y, predicted), abs=0.02)


@pytest.mark.parametrize("shown", all_but_first_slow(*SHOWN[:2]), ids=IDS[:2])
def test_counts_are_of_the_cohort_that_is_left(shown):
    parts, _, classes = crowd_rows(users=12, rows=240)
    back, lost = back_of(parts), lambda tree, stage: tree == 2 and stage == "prediction"
    options = options_of(validation_fraction=0.3, n_estimators=3, **shown)
    crowded = play_crowd(parts, options, classes, edges=3, leaves={"p4": lost})
    assert not crowded.failures
    found = counts_in(crowded)
    assert [len(sums.cohort) for sums in found] == [12, 8, 12]
    for sums in found:
        np.testing.assert_array_equal(sums.total, crowded.expected(sums))
        assert sums.total.sum() == sum(back[name].sum() for name in sums.cohort)


def test_counts_that_no_domain_can_give_are_left_out(monkeypatch, caplog):
    parts, _, classes = crowd_rows(users=9, rows=180)
    total, void = Crowd.total, iter([True, False, True, False])

    def failing(self, length, own=None):
        if length == 512 and next(void):
            raise RoundVoid("nobody is there")
        return total(self, length, own)

    monkeypatch.setattr(Crowd, "total", failing)
    options = options_of(expose="model", validation_fraction=0.3, n_estimators=4, early_stopping_rounds=10)
    part = play_crowd(parts, options, classes, edges=3).model
    losses = part.forest.history["validation"]["logloss"]
    assert np.isnan(losses[0])
    assert losses[1] == losses[2]
    # the first round, whose metrics are not known, is not the best one
    assert part.forest.best_round == [2, 4][int(losses[3] < losses[1])]
    assert "not counted after round 1" in caplog.text


def asks(monkeypatch, ask):
    def measure(self, forest, new):
        ask(self, forest.rounds)
        return dict.fromkeys(("auc", "error", "logloss"), 0.5)

    monkeypatch.setattr(CrowdMetrics, "measure", measure)


def again(self, rounds):
    self._sums.broadcast(HeldOutRequest(rounds))
    self._sums.total(512)
    self._sums.total(512)


def twice(self, rounds):
    for _ in range(2):
        self._sums.broadcast(HeldOutRequest(rounds))
        self._sums.total(512)


@pytest.mark.parametrize(("ask", "words"), [(again, "expected one sum for each"), (twice, "HeldOutRequest")])
def test_an_edge_server_opens_one_sum_of_counts_a_round(monkeypatch, ask, words):
    parts, _, classes = crowd_rows(users=9, rows=90)
    asks(monkeypatch, ask)
    options = options_of(expose="model", validation_fraction=0.3)
    tolerate = ["server", "edge0", "edge1", "edge2"]
    failures = play_crowd(parts, options, classes, edges=3, patience=5.0, tolerate=tolerate).failures
    refused = [str(failures[name]) for name in tolerate[1:] if isinstance(failures.get(name), PeerProtocolError)]
    assert refused
    assert all(words in text for text in refused)


def test_a_user_counts_rows_after_the_round_that_is_finished_and_only_if_it_keeps_some(monkeypatch):
    parts, _, classes = crowd_rows(users=9, rows=90)
    tolerate = ["server", "edge0", "edge1", "edge2"]

    def ahead(self, rounds):
        self._sums.broadcast(HeldOutRequest(rounds + 1))
        self._sums.total(512)

    with monkeypatch.context() as patched:
        asks(patched, ahead)
        options = options_of(expose="model", validation_fraction=0.3)
        failures = play_crowd(parts, options, classes, edges=3, patience=5.0, tolerate=tolerate).failures
    assert all("expected counts after round" in str(failures[name]) for name in parts)
    send = Crowd.broadcast

    def asking(self, message):
        if isinstance(message, RoundStart):
            send(self, HeldOutRequest(1))
        send(self, message)

    monkeypatch.setattr(Crowd, "broadcast", asking)
    failures = play_crowd(parts, options_of(expose="model"), classes, edges=3, patience=5.0, tolerate=tolerate).failures
    assert any("HeldOutRequest" in str(failures.get(name)) for name in tolerate[1:])


def test_rows_kept_back_do_not_keep_a_user_out_of_sums():
    parts, _, classes = crowd_rows("regression", users=9, rows=180)
    at = int(np.flatnonzero(back_of(parts)["p3"])[0])
    y, column = parts["p3"].y.copy(), parts["p3"].table.columns[0].copy()
    # a target and a missing value as no other user has them
    y[at], column[at] = 1e6, np.nan
    table = replace(parts["p3"].table, columns=[column, *parts["p3"].table.columns[1:]])
    changed = {**parts, "p3": replace(parts["p3"], table=table, y=y)}
    options = options_of(validation_fraction=0.3, expose="model")
    one, other = (play_crowd(rows, options, classes, edges=3) for rows in (parts, changed))
    assert all("p3" in sums.cohort for sums in other.opened)
    np.testing.assert_array_equal(one.model.forest.trees[1].value, other.model.forest.trees[1].value)
    assert other.model.held_out.groups["all"]["mae"] > 100 * one.model.held_out.groups["all"]["mae"]


def test_a_user_may_have_more_rows_than_all_train_on():
    parts, _, classes = crowd_rows(users=9, rows=560)
    for name, of in parts.items():
        few = np.arange(len(of.y)) < (99 if name == "p0" else 6)
        parts[name] = replace(of, table=of.table.rows(few), y=of.y[few])
    options = options_of(validation_fraction=0.9, n_estimators=1)
    crowded = play_crowd(parts, options, classes, edges=3)
    trained = sum((~back).sum() for back in back_of(parts, 0.9).values())
    assert len(parts["p0"].y) > trained
    assert crowded.model.held_out.groups["all"]["rows"] == sum(len(rows.y) for rows in parts.values()) - trained


def test_a_resumed_training_watches_the_same_rows(tmp_path):
    own = {"validation_fraction": 0.3}
    whole = model(**own).fit(rows_of_nine())
    interrupted(tmp_path, **own)
    resumed = model(**own).fit(rows_of_nine(), checkpoint=tmp_path)
    assert resumed.evals_result_ == whole.evals_result_
    assert len(resumed.evals_result_["validation"]["auc"]) == 4
    assert resumed.held_out_ == whole.held_out_


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"validation_group": "sex"}, "goes with validation_fraction"),
        ({"validation_fraction": 0.2, "mode": "paper", "allow_insecure": True}, "keeps no rows back"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        options_of(**given)


def test_groups_are_counted_apart():
    rows = {
        name: (pd.DataFrame(X).rename(columns=str).assign(sex=pd.Categorical(["f", "m", None] * 7)[: len(y)]), y)
        for name, (X, y) in rows_of_nine().items()
    }
    found = model(validation_fraction=0.4, validation_group="sex").fit(rows).held_out_.groups
    back = {name: drawn_back(len(y), 0.4, name) for name, (_, y) in rows.items()}
    of_all = pd.concat([X[back[name]] for name, (X, _) in rows.items()])["sex"].astype(object).fillna("missing")
    assert {name: of["rows"] for name, of in found.items()} == {"all": len(of_all), **of_all.value_counts().to_dict()}
