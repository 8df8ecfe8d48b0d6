"""Rows that a model with hidden rows was trained on: parties recognise them, and refuse or round their margins."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace as changed

import treaty
from systems.federboost_vertical.test_attack import predicted_in_threads, train_in_threads
from systems.vertical.trained_models import at, predict
from tables import cut, real_table
from treaty.data.table import to_table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.models.trees import predict_pooled
from treaty.privacy.randomised_response import KnownRows
from treaty.runs import prediction as running
from treaty.runs.job import Align, Job, Member
from treaty.systems.secureboost import shared_prediction
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.shared_prediction import follow, online_active, predict_active
from treaty.systems.vertical import prediction
from treaty.systems.vertical.prediction import Asked

HIDDEN = treaty.SecureBoost(membership="hidden")
ROUNDED = treaty.SecureBoost(membership="hidden", training_rows="rounded")
OPTIONS = {"n_estimators": 3, "max_depth": 3, "max_bin": 8, "objective": "logistic_pieces", "n_jobs": 1}
TRAINED = 150
FOLLOW = partial(follow, rows="rows to predict")


def tables_of(frames, rows):
    return {name: to_table(frame.iloc[rows], party=name) for name, frame in frames.items()}


@pytest.fixture(scope="module")
def frames():
    X, _ = real_table("binary", rows=200)
    return {"p0": X.iloc[:, :4], "p1": X.iloc[:, 4:9]}


@pytest.fixture(scope="module")
def parts(frames):
    y = real_table("binary", rows=200)[1]
    rows = {name: frame.iloc[:TRAINED] for name, frame in frames.items()}
    return treaty.GBDTClassifier(HIDDEN, **OPTIONS).fit(rows, y[:TRAINED]).parts_


def play(parts, tables, active=predict_active, passive=FOLLOW, trusting=None, options=HIDDEN, **fields):
    """Predict between organisations; `trusting` does not know what rows were trained on."""
    parts = {name: changed(part, hides_rows=name != trusting) for name, part in parts.items()}
    fields = {"apart": True, "options": options, "common": {"objective": "logistic_pieces"}, **fields}
    roles = at(active, parts, tables, **fields), at(passive, parts, tables, **fields)
    return predict(*roles, list(tables)).results["p0"]


@pytest.mark.parametrize("trusting", [None, "p0"])
def test_the_passive_party_refuses_a_row_that_was_trained_on(parts, frames, trusting):
    """It is the passive party's sides that would be shown: it does not rely on the other."""
    new = tables_of(frames, slice(TRAINED, None))
    found = play(parts, new, trusting=trusting)
    np.testing.assert_array_equal(found, predict_pooled(list(parts.values()), list(new.values())))
    with pytest.raises(DataError, match="rows to predict were trained on with hidden rows"):
        play(parts, tables_of(frames, slice(TRAINED - 1, None)), trusting=trusting)


@pytest.mark.parametrize("knows", ["p1", "p2"])
def test_the_partner_and_further_parties_refuse_alike(knows):
    X, y = real_table("binary", rows=200)
    frames = {f"p{k}": X.iloc[:, 4 * k : 4 * k + 4] for k in range(3)}
    rows = {name: frame.iloc[:TRAINED] for name, frame in frames.items()}
    parts = treaty.GBDTClassifier(HIDDEN, **OPTIONS).fit(rows, y[:TRAINED]).parts_
    assert all(part.trained is not None for part in parts.values())
    only = {name: changed(part, hides_rows=name == knows) for name, part in parts.items()}
    fields = {"apart": True, "options": HIDDEN, "common": {"objective": "logistic_pieces"}}

    def predicted(rows):
        tables = tables_of(frames, rows)
        roles = at(predict_active, only, tables, **fields), at(FOLLOW, only, tables, **fields)
        return predict(*roles, list(tables)).results["p0"]

    assert len(predicted(slice(TRAINED, None))) == 200 - TRAINED
    with pytest.raises(DataError, match=f"{knows}: 1 of 51 rows to predict were trained on with hidden rows"):
        predicted(slice(TRAINED - 1, None))


def test_the_option_of_a_prediction_does_not_matter(parts, frames):
    """A model with hidden rows is predicted under inference="shared", too."""
    with pytest.raises(DataError, match="rows to predict were trained on with hidden rows"):
        play(parts, tables_of(frames, slice(TRAINED - 1, None)), options=SecureBoost(inference="shared"), trusting="p0")


def test_a_service_is_asked_for_no_row_that_was_trained_on(parts, frames, monkeypatch):
    # the rows of a service have ids, by which the active party knows them
    monkeypatch.setattr(shared_prediction, "known_by_ids", lambda inputs: True)
    everything, told = tables_of(frames, slice(None)), []

    def asking(rows):
        def active(inputs):
            own = {"p0": tables_of(frames, rows)["p0"]}
            inputs.requests = iter([Asked(np.array(rows, np.int32), own["p0"], told.append)])
            return online_active(inputs)

        return active

    passive = partial(follow, rows="rows")
    play(parts, everything, asking([TRAINED, TRAINED + 3]), passive)
    assert len(told) == 1
    with pytest.raises(PeerProtocolError, match="expected no rows that the model was trained on"):
        play(parts, everything, asking([TRAINED, 3]), passive)
    assert len(told) == 1


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_rounded_margins_are_middles_of_steps(frames, task, monkeypatch):
    X, y = real_table(task, rows=200)
    frames = cut(X.iloc[:, :8], 2)
    numbers = task == "regression"
    kind = treaty.GBDTRegressor if numbers else treaty.GBDTClassifier
    options = {**OPTIONS, "n_estimators": 8, "objective": "squared_error_steps" if numbers else "logistic_pieces"}
    parts = kind(HIDDEN, **options).fit(frames, y).parts_
    tables = tables_of(frames, slice(None))
    monkeypatch.setattr("treaty.systems.secureboost.hidden_evaluation._ROWS_AT_ONCE", 77)
    fields = {"n_classes": 3 if task == "multiclass" else 2, "common": {"objective": options["objective"]}}
    found = play(parts, tables, options=ROUNDED, **fields)
    objective = parts["p0"].forest.objective
    step = objective.grad_clip / 8 if numbers else 1.0
    exact = predict_pooled(list(parts.values()), list(tables.values())) - objective.base_margins
    np.testing.assert_array_equal(found - objective.base_margins, (np.floor(exact / step) + 0.5) * step)
    assert 2 < len(np.unique(exact / step // 1)) < len(np.unique(exact)) / 2
    with pytest.raises(ConfigError, match="expected the same training_rows everywhere"):
        play(parts, tables, passive=lambda inputs: FOLLOW(replace(inputs, options=ROUNDED)), **fields)


def test_a_share_of_a_rounded_margin_has_no_low_bits(parts, frames, monkeypatch):
    """Or the active party could add up what was dropped."""
    sent, honest = [], shared_prediction.rounded

    def watching(transfers, shares, nbytes, dropped, role):
        found = yield from honest(transfers, shares, nbytes, dropped, role)
        sent.append((role, found))
        return found

    monkeypatch.setattr(shared_prediction, "rounded", watching)
    play(parts, tables_of(frames, slice(None)), options=ROUNDED)
    assert sorted(role for role, _ in sent) == [0, 1]
    for role, shares in sent:
        assert not np.any((shares - np.uint64((1 - role) << 11)) & np.uint64((1 << 12) - 1))


def test_one_process_that_plays_all_parties_predicts_and_warns(parts, frames, caplog):
    tables = tables_of(frames, slice(None))
    assert len(play(parts, tables, apart=False)) == 200
    assert f"p1: {TRAINED} rows were trained on" in caplog.text


def test_a_model_that_goes_on_knows_the_rows_of_both_trainings(frames):
    y = real_table("binary", rows=200)[1]
    model, halves = None, [slice(0, 100), slice(100, TRAINED)]
    for k, rows in enumerate(halves):
        some = {name: frame.iloc[rows] for name, frame in frames.items()}
        options = {**OPTIONS, "n_estimators": 2 + k}
        model = treaty.GBDTClassifier(HIDDEN, **options).fit(some, y[rows], xgb_model=model)
    for name, part in model.parts_.items():
        matrix = tables_of(frames, slice(None))[name].matrix()
        np.testing.assert_array_equal(part.trained.with_equal_values(matrix), np.arange(200) < TRAINED)


def test_a_part_without_its_rows_predicts_nothing(parts, frames):
    old = {name: changed(part, trained=None) for name, part in parts.items()}
    with pytest.raises(ConfigError, match="does not know the rows that it was trained on: train it again"):
        play(old, tables_of(frames, slice(TRAINED, None)))


def test_rows_are_known_by_ids_if_all_of_them_have_some():
    known = KnownRows.of(np.zeros((2, 1), np.float32), ["text a", "text b"])
    both = known.joined(np.ones((2, 1), np.float32), ["text b", "text c"])
    assert (both.places(["text a", "text b", "text c", "text d"]) >= 0).tolist() == [True, True, True, False]
    assert both.with_equal_values(np.array([[0], [1], [2]], np.float32)).tolist() == [True, True, False]
    some = known.joined(np.ones((2, 1), np.float32), None)
    assert not some.recognise("")
    assert some.with_equal_values(np.array([[0], [1], [2]], np.float32)).tolist() == [True, True, False]


# ---------------------------------------------------------------- jobs


@pytest.fixture
def job(tmp_path) -> Job:
    """Return a job of two parties with ids; rows to predict have the values of those trained on, and some their ids."""
    X, y = real_table("binary", rows=120)
    members = {}
    for name, part in {"bank": X.iloc[:, :4].assign(y=y), "shop": X.iloc[:, 4:9]}.items():
        who = [f"person {k}" for k in range(120)]
        part.assign(id=who).iloc[:100].to_csv(tmp_path / f"{name}.csv", index=False)
        new = [f"stranger {k}" for k in range(30)]
        part.iloc[:30].assign(id=new).to_csv(tmp_path / f"{name}.new.csv", index=False)
        some = part.assign(id=who).iloc[90:]
        some.to_csv(tmp_path / f"{name}.some.csv", index=False)
        some.rename(columns={"id": "mail"}).to_csv(tmp_path / f"{name}.renamed.csv", index=False)
        some.assign(id=range(90, 120)).to_csv(tmp_path / f"{name}.numbers.csv", index=False)
        members[name] = Member(
            table=str(tmp_path / f"{name}.csv"), predict_table=str(tmp_path / f"{name}.new.csv"), drop=["id"]
        )
    return Job(
        name="test", active="bank", label="y", parties=members, align=Align(on="id"), protocol="secureboost",
        own={"membership": "hidden"}, n_jobs=1, output=str(tmp_path / "model"), store=str(tmp_path / "store"),
        common={name: value for name, value in OPTIONS.items() if name != "n_jobs"},
    )  # fmt: skip


def predicting(job: Job, tmp_path, file: str) -> Job:
    members = {
        name: changed(member, predict_table=str(tmp_path / f"{name}.{file}.csv"))
        for name, member in job.parties.items()
    }
    return changed(job, parties=members)


def test_jobs_recognise_persons_by_the_ids_they_are_aligned_by(job, monkeypatch, tmp_path):
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    ids, margins = predicted_in_threads(monkeypatch, job)
    assert (len(ids), len(margins)) == (30, 30), "the same values, of others"
    some = predicting(job, tmp_path, "some")
    with pytest.raises(DataError, match="bank: 10 of 30 rows to predict were trained on"):
        predicted_in_threads(monkeypatch, some)
    rounded = changed(some, own={**job.own, "training_rows": "rounded"})
    _, margins = predicted_in_threads(monkeypatch, rounded)
    base = running.find_part(job, "bank").forest.objective.base_margins
    np.testing.assert_array_equal((margins - base) % 1.0, 0.5)
    # the model says how far, and no objective of the prediction
    common = {**job.common, "objective": "squared_error_steps"}
    _, margins = predicted_in_threads(monkeypatch, changed(rounded, task="regression", common=common))
    np.testing.assert_array_equal((margins - base) % 1.0, 0.5)


@pytest.mark.parametrize(
    ("file", "align"),
    [("renamed", Align(on="mail")), ("numbers", Align(on="id")), ("some", Align(on="id", normalise=()))],
)
def test_persons_under_other_ids_are_recognised_by_their_values(job, monkeypatch, tmp_path, file, align):
    """A job that aligns by another column, or reads ids in another way, would know nobody by the ids of training."""
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    with pytest.raises(Exception, match="rows to predict were trained on with hidden rows"):
        predicted_in_threads(monkeypatch, changed(predicting(job, tmp_path, file), align=align))


def test_a_model_that_goes_on_under_other_ids_knows_rows_by_their_values():
    known = KnownRows.of(np.zeros((2, 1), np.float32), ["text a", "text b"], "one")
    assert known.recognise("one")
    assert not known.recognise("another")
    assert not known.joined(np.ones((2, 1), np.float32), ["text c"], "another").recognise("one")
    assert known.joined(np.ones((2, 1), np.float32), ["text c"], "one").recognise("one")


def test_the_passive_party_refuses_what_the_active_party_asks_in_a_job(job, monkeypatch, tmp_path):
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    honest = prediction.withheld_rows

    def cheating(inputs):
        return np.zeros(inputs.rows.table.n_rows, np.bool_) if inputs.party.name == "bank" else honest(inputs)

    monkeypatch.setattr(prediction, "withheld_rows", cheating)
    with pytest.raises(Exception, match="shop stopped the job: rows to predict were trained on with hidden rows"):
        predicted_in_threads(monkeypatch, predicting(job, tmp_path, "some"))


@pytest.fixture
def offered(job, monkeypatch):
    """A trained model's services, which end once they know whom they may predict; these ids, filled in by then."""
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    found = {}

    def ready(numbers):
        found.update(numbers)
        return iter([])

    def serving(job, name):
        return pa.array([]), running.serve_online(job, name, ready)

    monkeypatch.setattr(running, "predict_party", serving)
    return found


def test_a_service_offers_no_row_that_was_trained_on(job, offered, monkeypatch, tmp_path):
    predicted_in_threads(monkeypatch, predicting(job, tmp_path, "some"))
    assert sorted(offered) == sorted(f"text person {k}" for k in range(100, 120))


def test_a_service_does_not_start_with_training_rows_known_by_values_alone(job, offered, monkeypatch, tmp_path):
    """The active party cannot leave these out, and the first request for one would end the service."""
    renamed = changed(predicting(job, tmp_path, "renamed"), align=Align(on="mail"))
    with pytest.raises(Exception, match="shop stopped the job: rows to predict were trained on with hidden rows"):
        predicted_in_threads(monkeypatch, renamed)
