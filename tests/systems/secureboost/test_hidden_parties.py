"""``membership="hidden"`` between three parties and more gives the pooled grower's trees, losses and predictions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

import treaty
from marks import slow
from systems.secureboost.test_faults import SEEN, roles_of
from systems.secureboost.test_hidden_faults import HIDDEN as GIVEN
from systems.secureboost.test_hidden_faults import of_field, of_payload
from systems.secureboost.test_hidden_rows import (
    HIDDEN,
    NUMBERS,
    OPTIONS,
    Interrupted,
    assert_lossless,
    described,
    fit_both,
    stop_at_the_third_round,
    with_evals,
)
from systems.secureboost.test_lattice_faults import numbers
from systems.vertical.playing import play_training, tables_and_labels
from tables import cut, real_table, with_categories, with_gaps
from treaty.errors import PeerError, PeerProtocolError
from treaty.messaging.messages import Array
from treaty.models.checkpoints import Keeper
from treaty.systems.secureboost import hidden_further, hidden_partner, hidden_training


@pytest.mark.parametrize(
    ("parties", "change"), [(3, lambda X: X), (4, with_categories), slow(5, with_gaps)], ids=["3", "4", "5"]
)
def test_trees_and_predictions_equal_the_pooled_growers(parties, change):
    X, y = real_table("binary")
    tables = cut(change(X.iloc[:, :12]), parties)
    federated, pooled = fit_both(tables, y)
    assert_lossless(federated, pooled, tables)
    assert sum(len(part.splits) > 0 for part in federated.parts_.values()) > 2


@pytest.mark.parametrize("owners", ["p0 p1 p2", "p2 p0 p1"])
def test_trees_on_samples_of_rows_and_columns(owners):
    X, y = real_table("binary")
    tables = cut(with_gaps(X.iloc[:, :9]), 3)
    tables = {name: tables[name] for name in owners.split()}
    options = {"subsample": 0.6, "colsample_bytree": 0.2, "random_state": 5, "n_estimators": 5}
    assert_lossless(*fit_both(tables, y, **options), tables)


def test_losses_of_eval_sets_and_early_stopping_are_the_pooled_growers():
    X, y = real_table("binary", rows=300)
    tables = cut(with_gaps(X.iloc[:, :9]), 3)
    options = {"n_estimators": 30, "early_stopping_rounds": 2, "learning_rate": 1.5}
    federated, pooled = (with_evals(protocol, tables, y, **options) for protocol in (HIDDEN, "pooled"))
    assert_lossless(federated, pooled, tables)
    assert federated.evals_result_ == pooled.evals_result_
    assert federated.best_iteration_ == pooled.best_iteration_ < 28


@pytest.mark.parametrize("at_once", [8, slow(2)])
def test_several_classes_and_a_training_that_goes_on(monkeypatch, at_once):
    X, y = real_table("multiclass")
    tables = cut(with_gaps(X.iloc[:, :6]), 3)
    for end in (hidden_training, hidden_partner):
        monkeypatch.setattr(end, "CLASSES_AT_ONCE", at_once)
    federated, pooled = fit_both(tables, y, n_estimators=2, subsample=0.8, random_state=2)
    assert_lossless(federated, pooled, tables)
    more = {**OPTIONS, "n_estimators": 1}
    further = treaty.GBDTClassifier(HIDDEN, n_jobs=1, **more).fit(tables, y, xgb_model=federated)
    assert_lossless(further, treaty.GBDTClassifier("pooled", **more).fit(tables, y, xgb_model=pooled), tables)


def test_trees_of_numbers_on_rows_of_different_weights():
    X, y = real_table("regression", rows=300)
    tables, weight = cut(with_gaps(X.iloc[:, :9]), 3), np.arange(len(y)) % 7 + 1
    pooled = treaty.GBDTRegressor("pooled", **NUMBERS).fit(tables, y, weight)
    federated = treaty.GBDTRegressor(HIDDEN, n_jobs=1, **NUMBERS).fit(tables, y, weight)
    np.testing.assert_equal(described(federated), described(pooled))
    np.testing.assert_array_equal(federated.predict(tables), pooled.predict(tables))


def test_parties_of_one_column_of_constant_ones_and_of_none():
    X, y = real_table("binary")
    odd = pd.DataFrame({"same": np.ones(len(y)), "none": np.full(len(y), np.nan), "few": np.arange(len(y)) % 2})
    one = X.iloc[:, 7:8]
    for tables in (
        {"a": X.iloc[:, :2], "b": odd, "c": one}, {"a": X.iloc[:, :1], "b": one, "c": odd[["same"]], "d": odd},
    ):  # fmt: skip
        assert_lossless(*fit_both(tables, y), tables)
    tables = {"shop": X.iloc[:, :5], "club": X.iloc[:, 5:8], "bank": X.iloc[:, :0]}
    federated = treaty.GBDTClassifier(HIDDEN, n_jobs=1, active="bank", **OPTIONS).fit(tables, y)
    pooled = treaty.GBDTClassifier("pooled", **OPTIONS).fit(X.iloc[:, :8], y)
    np.testing.assert_equal(described(federated), described(pooled))
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(X.iloc[:, :8]))


@pytest.mark.parametrize("stopped", ["p0", "p1", "p2"])
def test_a_training_that_was_stopped_resumes_to_the_same_model(monkeypatch, tmp_path, stopped):
    X, y = real_table("binary", rows=150)
    tables = cut(with_gaps(X.iloc[:, :6]), 3)
    options = {**OPTIONS, "subsample": 0.7, "random_state": 4, "n_jobs": 1, "early_stopping_rounds": 2}
    whole = treaty.GBDTClassifier(HIDDEN, **options).fit(tables, y, eval_set=(tables, y))
    begin, trees = hidden_further._FurtherTrees.begin, itertools.count()

    def beginning(of, sent):
        if stopped == "p2" and next(trees) == 2:
            raise Interrupted
        begin(of, sent)

    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop_at_the_third_round(patch, ["p0", "p1", "p2"].index(stopped))
        patch.setattr(hidden_further._FurtherTrees, "begin", beginning)
        with pytest.raises(Interrupted):
            treaty.GBDTClassifier(HIDDEN, **options).fit(tables, y, checkpoint=tmp_path, eval_set=(tables, y))
    resumed = treaty.GBDTClassifier(HIDDEN, **options).fit(tables, y, checkpoint=tmp_path, eval_set=(tables, y))
    assert_lossless(resumed, whole, tables)
    assert resumed.evals_result_ == whole.evals_result_


def test_each_is_told_whom_it_must_not_collude_with():
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(HIDDEN, n_jobs=1, **OPTIONS).fit(cut(X.iloc[:, :6], 3), y)
    assert any("only by colluding with p0, which is not allowed" in of for of in model.disclosures_["p1"])
    assert "at which levels of trees its own splits are" in model.disclosures_["p2"]


# ---------------------------------------------------------------- wrong messages


def play_faulty(faulty: str, to: str, name: str, change: Any, first: int) -> dict[str, BaseException]:
    """Train while a party changes one message of a name to another, or sends several; return what each raised."""
    tables, y = tables_and_labels(3, rows=60)
    SEEN.clear()
    roles = roles_of(tables, y, GIVEN)
    honest, sent = roles[faulty], itertools.count(1)

    def role(party: Any) -> Any:
        send = party.send

        def sending(peer: str, message: Any) -> None:
            wrong = (peer, type(message).__name__) == (to, name) and next(sent) == first
            for of in change(message) if wrong else [message]:
                send(peer, of)

        party.send = sending
        return honest(party)

    roles[faulty] = role
    with pytest.raises(PeerError):
        play_training(tables, y, replace=roles)
    return dict(SEEN)


def one(change: Any) -> Any:
    return lambda message: [change(message)]


NO_KEY = one(lambda message: replace(message, key=None))
CASES: dict[str, tuple[str, str, str, int, Any, str]] = {
    "no key of the partner": ("p0", "p2", "HiddenStart", 1, NO_KEY, "expected a key of p1"),
    "a key that is none": (
        "p0", "p2", "HiddenStart", 1, one(lambda message: replace(message, key=(bytes(32), b""))), "HiddenStart.key",
    ),
    "a seed of other bytes": ("p0", "p2", "SealedStep", 1, one(of_payload(lambda seed: seed[1:])), "expected arrays"),
    "columns that do not ascend": (
        "p0", "p2", "FurtherTree", 1, one(of_field("columns", lambda columns: columns[::-1])), "FurtherTree.columns",
    ),
    "vectors of another tree": (
        "p0", "p2", "SealedStep", 2, one(of_payload(lambda number: number + 1)), "number of a tree that grows",
    ),
    "vectors of no tree": (
        "p0", "p2", "SealedStep", 2, one(lambda message: replace(message, payload=[])), "number of a tree that grows",
    ),
    "vectors of other words": (
        "p0", "p2", "SealedStep", 2, one(of_payload(lambda words: words[:, 1:], at=1)), "expected arrays",
    ),
    "vectors beyond the last level": (
        "p0", "p2", "SealedStep", 3, lambda message: [message, message], "expected levels of a tree",
    ),
    "numbers of no candidate": (
        "p0", "p2", "OpenedStep", 1, one(of_payload(lambda of: of + np.uint64(1 << 20), at=1)),
        "expected shares of numbers of own candidates",
    ),
    "winners twice": ("p0", "p2", "OpenedStep", 1, lambda message: [message, message], "winners of a level, once"),
    "winners that are none": (
        "p0", "p2", "OpenedStep", 1, one(of_payload(lambda of: of.astype(np.int64), at=1)), "expected arrays",
    ),
    "no key of a further party": ("p2", "p0", "HiddenColumns", 1, NO_KEY, "expected a key of p2"),
    "no key of the first passive party": ("p1", "p0", "HiddenColumns", 1, NO_KEY, "expected a key of p1"),
    "a hint of other rows": (
        "p2", "p0", "SealedStep", 1, one(of_payload(lambda hint: hint[:, 1:])), "rows more of a hint",
    ),
    "answers about another tree": (
        "p2", "p0", "SealedStep", 2, one(of_payload(lambda number: number + 1)), "number of a tree that grows",
    ),
    "answers of other sizes": (
        "p2", "p0", "SealedStep", 2, one(of_payload(lambda of: of[:, 1:], at=2)), "expected arrays",
    ),
    "no answers": (
        "p2", "p0", "SealedStep", 2, one(lambda message: replace(message, payload=[])), "number of a tree that grows",
    ),
    "answers twice": (
        "p2", "p0", "SealedStep", 2, lambda message: [message, message], "expected",
    ),
    "a winner's number that no candidate has": (
        "p2", "p0", "SealedStep", 3,
        one(of_payload(lambda of: of + (1 << 40) if of.dtype == np.int64 else of, at=1)),
        "expected numbers of own candidates",
    ),
    "a layout without slots": (
        "p2", "p0", "HiddenColumns", 1, one(of_field("offsets", lambda of: of * 0)), "expected the slots of columns",
    ),
    "columns of too few owners": (
        "p0", "p1", "HiddenTree", 1, one(lambda message: replace(message, further=[])), "columns of all owners",
    ),
    "columns that no owner has": (
        "p0", "p1", "HiddenTree", 1,
        one(lambda message: replace(message, further=[Array.of(numbers(message.active) + 100)])),
        "HiddenTree.further[0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_messages_end_the_job_and_name_their_sender(case: str) -> None:
    faulty, to, name, first, change, expected = CASES[case]
    seen = play_faulty(faulty, to, name, change, first)
    assert isinstance(seen[to], PeerProtocolError)
    assert expected in str(seen[to])
    assert faulty in str(seen[to])
    assert all(isinstance(error, PeerError) for error in seen.values())
