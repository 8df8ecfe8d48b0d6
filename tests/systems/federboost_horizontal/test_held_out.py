"""Held-out rows of participants: their counts, metrics of these, early stopping, and who may ask for them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

import treaty
from systems.federboost_horizontal.playing import dealt, options_of, train
from systems.federboost_horizontal.test_resuming import assert_same, interrupted, keepers
from tables import real_table
from treaty.data.table import Schema, to_table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.runs.job_files import check_training, read_job
from treaty.systems.horizontal import held_out
from treaty.systems.horizontal.held_out import HeldOutRequest, ScoreCells, divided, metric, of_group
from treaty.systems.horizontal.members import Collector
from treaty.systems.system import LabelledRows
from treaty.trees.objectives import make_objective

NAMES = ["north", "south", "east"]


def shared_out(X, y):
    return {name: (X[k::3], y[k::3]) for k, name in enumerate(NAMES)}


def back_of(rows, share):
    """Return which rows each participant keeps back, found apart from the code that trains."""
    seeds = {name: held_out.own_seed(0, f"{name} keeps back") for name in rows}
    return {name: np.random.default_rng(seeds[name]).random(len(rows[name][1])) < share for name in rows}


def estimator(task, n_estimators=6, **options):
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    own = {name: options.pop(name) for name in list(options) if name.startswith("validation")}
    return kind(treaty.FederBoostHorizontal(**own), n_estimators=n_estimators, max_depth=3, n_jobs=1, **options)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_metrics_are_those_of_the_rows_kept_back_and_trees_those_of_the_others(task):
    X, y = real_table(task, rows=900)
    rows = shared_out(X, y)
    model = estimator(task, validation_fraction=0.3).fit(rows)
    back = back_of(rows, 0.3)
    left = {name: (of[0][~back[name]], of[1][~back[name]]) for name, of in rows.items()}
    other = estimator(task).fit(left)
    np.testing.assert_array_equal(model.predict(X), other.predict(X))
    kept_X = pd.concat([rows[name][0][back[name]] for name in rows])
    kept_y = np.concatenate([rows[name][1][back[name]] for name in rows])
    assert model.held_out_.groups["all"]["rows"] == len(kept_y)
    for n_rounds in (1, 6):
        found = {name: of[n_rounds - 1] for name, of in model.evals_result_["validation"].items()}
        if task == "regression":
            predicted = list(model.staged_predict(kept_X))[n_rounds - 1]
            assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(kept_y, predicted), rel=0.02)
            assert found["mae"] == pytest.approx(metrics.mean_absolute_error(kept_y, predicted), rel=0.02)
            continue
        p = list(model.staged_predict_proba(kept_X))[n_rounds - 1]
        loss = found["logloss" if task == "binary" else "mlogloss"]
        # a row's loss changes by at most as much as its log odds do, and these by half a bin
        assert loss == pytest.approx(metrics.log_loss(kept_y, p), abs=1 / 32)
        wrong = np.mean(model.classes_[p.argmax(axis=1)] != kept_y)
        assert found["error" if task == "binary" else "merror"] == pytest.approx(wrong, abs=1e-12)
        if task == "binary":
            assert found["auc"] == pytest.approx(metrics.roc_auc_score(kept_y, p[:, 1]), abs=0.01)


def test_weights_stay_with_their_rows():
    X, y = real_table("binary", rows=300)
    weight = np.random.default_rng(0).choice([0.25, 1.0, 3.0], len(y))
    rows = {name: (X[k::3], y[k::3], weight[k::3]) for k, name in enumerate(NAMES)}
    left = {name: tuple(part[~back_of(rows, 0.3)[name]] for part in of) for name, of in rows.items()}
    model, other = estimator("binary", validation_fraction=0.3).fit(rows), estimator("binary").fit(left)
    np.testing.assert_array_equal(model.predict_proba(X), other.predict_proba(X))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 255)), min_size=2, max_size=60))
def test_metrics_of_counts_are_those_of_scores_in_the_middle_of_their_bins(rows):
    y, bins = np.array(rows).T
    counts = np.zeros((2, 256), np.int64)
    np.add.at(counts, (y, bins), 1)
    cells = ScoreCells("two classes")
    p = cells.middles[bins]
    assert metric("error", cells, counts) == pytest.approx(np.mean((p > 0.5) != y))
    assert metric("logloss", cells, counts) == pytest.approx(metrics.log_loss(y, p, labels=[0, 1]))
    if len(set(y)) == 2:
        assert metric("auc", cells, counts) == pytest.approx(metrics.roc_auc_score(y, p))
        assert of_group(cells, counts)["true positive rate"] == pytest.approx(metrics.recall_score(y, p > 0.5))
    else:
        assert np.isnan(metric("auc", cells, counts))
        assert "auc" not in of_group(cells, counts)


def test_errors_of_numbers_from_tiny_to_huge_are_counted_in_quarters_of_an_octave():
    y = 2.0 ** np.arange(-50, 50)
    rows = LabelledRows(None, y)
    cells = ScoreCells.of(make_objective("squared_error", y, None), Schema((), (), {}), None)
    counts = cells.count(rows, np.zeros((len(y), 1)))
    # the first and the last bin have all that is beyond
    assert counts.tolist() == [11, *([0, 0, 0, 1] * 79), 0, 0, 10]
    assert metric("mae", cells, counts.reshape(1, -1)) > 0


def test_groups_have_metrics_of_their_own_and_empty_ones_none():
    X, y = real_table("binary", rows=1200)
    frame = pd.DataFrame(X, columns=[f"c{k}" for k in range(X.shape[1])])
    frame["sex"] = pd.Categorical(np.where(np.arange(len(y)) % 3 == 0, "f", "m"), categories=["f", "m", "x"])
    frame.loc[::7, "sex"] = None
    rows = {name: (frame.iloc[k::3], y[k::3]) for k, name in enumerate(NAMES)}
    model = estimator("binary", validation_fraction=0.4, validation_group="sex").fit(rows)
    found = model.held_out_
    back = back_of(rows, 0.4)
    of_all = pd.concat([of[0][back[name]] for name, of in rows.items()])
    sizes = {name: of["rows"] for name, of in found.groups.items()}
    expected = of_all["sex"].astype(object).fillna("missing").value_counts().to_dict()
    assert sizes == {"all": len(of_all), **expected}
    assert sum(n for _, _, n in found.calibration) == len(of_all)
    assert all(0 < score < 1 and 0 <= share <= 1 for score, share, _ in found.calibration)


def test_categories_with_names_of_groups_stay_apart_from_these():
    X, y = real_table("binary", rows=600)
    sex = np.array(["f", "other", "missing", "all"])[np.arange(len(y)) // 3 % 4]
    frame = pd.DataFrame({"c0": np.asarray(X)[:, 0], "sex": pd.Categorical(sex)})
    frame.loc[::7, "sex"] = None
    rows = {name: (frame.iloc[k::3], y[k::3]) for k, name in enumerate(NAMES)}
    found = estimator("binary", validation_fraction=0.4, validation_group="sex").fit(rows).held_out_.groups
    back = back_of(rows, 0.4)
    of_all = pd.concat([of[0][back[name]] for name, of in rows.items()])["sex"]
    expected = {"f": (of_all == "f").sum(), "all": len(of_all), "missing": of_all.isna().sum()}
    expected |= {f"{name} (category)": (of_all == name).sum() for name in ("other", "missing", "all")}
    assert {name: of["rows"] for name, of in found.items()} == expected


@pytest.mark.parametrize(
    ("share", "metric", "words"),
    [
        (1e-9, None, "logloss needs held-out rows, and there are none: raise validation_fraction"),
        (0.05, "auc", "auc needs held-out rows of both classes"),
    ],
)
def test_a_metric_that_no_row_kept_back_gives_does_not_stop_training(share, metric, words):
    """It would be no number, than which no later round is better: a model of one tree."""
    X, y = real_table("binary", rows=300)
    # none of the two rows of one class is kept back
    y = np.isin(np.arange(len(y)), (0, 2))
    model = estimator("binary", validation_fraction=share, early_stopping_rounds=2, eval_metric=metric)
    with pytest.raises(DataError, match=words):
        model.fit(shared_out(X, y))


def test_training_stops_early_by_rows_kept_back():
    X, y = real_table("binary", rows=900)
    model = estimator(
        "binary", 60, validation_fraction=0.3, early_stopping_rounds=3, learning_rate=1.0
    ).fit(shared_out(X, y))  # fmt: skip
    losses = model.evals_result_["validation"]["logloss"]
    assert len(losses) < 60
    assert model.best_iteration_ == int(np.argmin(losses)) == len(losses) - 4
    assert model.held_out_.groups["all"]["logloss"] == losses[model.best_iteration_]


def test_an_eval_set_decides_about_early_stopping_where_there_is_one():
    X, y = real_table("binary", rows=900)
    model = estimator("binary", 40, validation_fraction=0.3, early_stopping_rounds=2, learning_rate=1.0)
    model.fit(shared_out(X[:400], y[:400]), eval_set=(X[400:], y[400:]))
    assert list(model.evals_result_) == ["validation", "eval_0"]
    assert model.best_iteration_ == int(np.argmin(model.evals_result_["eval_0"]["logloss"]))


def test_a_participant_of_one_row_trains_on_it():
    one = LabelledRows(to_table(np.ones((1, 2))), np.ones(1))
    kept, back = divided(one, 0.999, "north")
    assert (kept.table.n_rows, back.table.n_rows) == (1, 0)
    X, y = real_table("binary", rows=300)
    rows = {"north": (X[:1], y[:1]), "south": (X[1:150], y[1:150]), "east": (X[150:], y[150:])}
    assert estimator("binary", validation_fraction=0.9).fit(rows).held_out_.groups["all"]["rows"] > 200


def test_a_resumed_training_counts_the_same_rows(monkeypatch, tmp_path):
    parts, _, classes = dealt("binary", 3)
    options = options_of(validation_fraction=0.3, n_estimators=5)
    interrupted(monkeypatch, tmp_path, parts, options, classes, "p1")
    resumed = train(parts, options, classes, leader="p1", keepers=keepers(tmp_path, parts, resume=True))
    whole = train(parts, options, classes, leader="p1")
    assert_same(resumed, whole)
    assert resumed.results["p1"].forest.history == whole.results["p1"].forest.history
    assert resumed.results["p1"].held_out == whole.results["p1"].held_out


def test_a_leader_may_ask_once_after_a_round_and_only_where_rows_are_kept_back(monkeypatch):
    parts, _, classes = dealt("binary", 3)

    def asks(how):
        def measure(self, forest, new):
            self._flush()
            how(self, forest)
            return dict.fromkeys(("auc", "error", "logloss"), 0.5)

        return measure

    def again(self, forest):
        for _ in range(2):
            self._sums.broadcast(HeldOutRequest(forest.rounds))
            self._sums.total(512, self._own.counts())

    def ahead(self, forest):
        self._sums.broadcast(HeldOutRequest(forest.rounds + 1))
        self._sums.total(512, self._own.counts())

    for how in (again, ahead):
        monkeypatch.setattr(held_out.SummedMetrics, "measure", asks(how))
        with pytest.raises(PeerProtocolError, match="once"):
            train(parts, options_of(validation_fraction=0.3), classes)


def test_a_member_that_keeps_no_rows_back_refuses_to_count(monkeypatch):
    parts, _, classes = dealt("binary", 3)
    send, asked = Collector.broadcast, []

    def meddling(self, message):
        send(self, message)
        if type(message).__name__ == "TreeStep" and not asked:
            asked.append(message)
            send(self, HeldOutRequest(1))

    monkeypatch.setattr(Collector, "broadcast", meddling)
    with pytest.raises(PeerProtocolError, match="this job has no held-out rows"):
        train(parts, options_of(), classes)


@pytest.mark.parametrize(
    ("options", "fitted", "expected"),
    [
        ({"validation_fraction": 0.0}, {}, "validation_fraction"),
        ({"validation_fraction": 1.0}, {}, "validation_fraction"),
        ({"validation_group": "sex"}, {}, "goes with validation_fraction"),
        ({"validation_fraction": 0.2, "epsilon_total": 1.0}, {"early_stopping_rounds": 3}, "at least 5, the rounds"),
        ({"validation_fraction": 0.2, "validation_group": "c0"}, {}, "column of categories"),
        ({"validation_fraction": 0.2, "validation_group": "age"}, {}, "column of categories"),
        ({"validation_fraction": 0.2}, {"eval_metric": "aucpr"}, "auc, error, logloss"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, fitted, expected):
    X, y = real_table("binary", rows=120)
    frame = pd.DataFrame(X, columns=[f"c{k}" for k in range(X.shape[1])])
    rows = {name: (frame.iloc[k::3], y[k::3]) for k, name in enumerate(NAMES)}
    with pytest.raises(ConfigError, match=expected):
        treaty.GBDTClassifier(treaty.FederBoostHorizontal(**options), n_estimators=20, n_jobs=1, **fitted).fit(rows)


def test_a_job_file_may_stop_early_without_eval_tables(tmp_path):
    parties = "".join(f'[parties.{name}]\ntable = "{name}.csv"\n' for name in NAMES)
    file = tmp_path / "job.toml"
    text = """
name = "kept-back"
protocol = "federboost-horizontal"
active = "north"
label = "y"
{parties}
[boosting]
early_stopping_rounds = 5
[federboost-horizontal]
{own}
"""
    file.write_text(text.format(parties=parties, own="validation_fraction = 0.2"))
    assert check_training(read_job(file)).active == "north"
    file.write_text(text.format(parties=parties, own=""))
    with pytest.raises(ConfigError, match="needs rows to watch"):
        check_training(read_job(file))


def test_bins_of_scores_are_sixteenths_of_log_odds_around_even_ones():
    middles = ScoreCells("two classes").middles
    np.testing.assert_allclose(np.log(middles / (1 - middles)), np.arange(-8 + 1 / 32, 8, 1 / 16))
    # a score in the middle of a bin is counted in it
    rows = LabelledRows(to_table(np.zeros((256, 1))), np.zeros(256))
    counts = ScoreCells("two classes").count(rows, middles[:, None])
    assert counts.tolist() == [1] * 256 + [0] * 256
