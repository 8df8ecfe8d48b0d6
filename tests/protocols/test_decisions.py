"""Federated prediction when parts do not fit, or are not whole."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import treaty
from tables import FAST_KEY, cut, real_table
from treaty.models import forest_of


def fitted(rounds: int = 6, task: str = "multiclass"):
    X, y = real_table(task)
    tables = cut(X, 3)
    options = {"n_estimators": rounds, "min_child_samples": 2}
    return treaty.GBDTClassifier(**options, **FAST_KEY).fit(tables, y), tables, y, options


def shorten(part, records: int) -> None:
    """Lose all but the first records, as a party killed before saving does."""
    for name in part.splits.__slots__:
        del getattr(part.splits, name)[records:]


def test_rounds_whose_splits_a_party_lost_are_left_out(caplog):
    model, tables, y, options = fitted()
    trees = forest_of(list(model.parts_.values())).trees
    used = [max([0, *(tree.record[tree.source == 1] + 1)]) for tree in trees[:9]]  # of the first three rounds
    shorten(model.parts_["p1"], max(used))
    shorter = treaty.GBDTClassifier(**{**options, "n_estimators": 3}).fit(tables, y)
    longer = treaty.GBDTClassifier(**{**options, "n_estimators": 4}).fit(tables, y)
    predicted = model.predict_proba(tables)
    same = [np.array_equal(predicted, other.predict_proba(tables)) for other in (shorter, longer)]
    assert any(same)
    assert "lost later splits" in caplog.text


def test_a_party_that_lost_everything_leaves_the_base_score():
    model, tables, _, _ = fitted(2)
    for name in ("p0", "p1", "p2"):
        shorten(model.parts_[name], 0)
    np.testing.assert_allclose(model.predict_proba(tables), 1 / 3)


def test_parts_of_different_models_are_refused():
    model, tables, _, _ = fitted(1, "binary")
    other, _, _, _ = fitted(1, "binary")
    mixed = copy.copy(model)
    mixed.parts_ = {**model.parts_, "p1": other.parts_["p1"]}
    with pytest.raises(treaty.TreatyError, match="model"):
        mixed.predict(tables)


def test_an_owner_decides_only_records_it_has():
    model, tables, _, _ = fitted(1, "binary")
    forest = model.parts_["p0"].forest
    owned = len(model.parts_["p1"].splits)
    for tree in forest.trees:
        tree.record[tree.source == 1] += owned  # a tampered tree
    np.testing.assert_allclose(model.predict_proba(tables), 0.5)
