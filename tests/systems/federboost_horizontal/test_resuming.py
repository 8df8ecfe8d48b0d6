"""An interrupted training by row goes on where it was, or says why not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from systems.federboost_horizontal.playing import dealt, options_of, train
from treaty.errors import ConfigError
from treaty.models.checkpoints import Keeper
from treaty.systems.federboost_horizontal import federboost_horizontal as by_row

SAMPLED = {"subsample": 0.7, "colsample_bytree": 0.5, "n_estimators": 5}


class Interrupted(Exception):
    """Training stops in the midst of a round."""


def keepers(folder, names, *, resume=False):
    """Everybody's keeper, which writes after every round."""
    return {name: Keeper(folder / f"{name}.checkpoint", resume=resume, share=1e9) for name in names}


def interrupted(monkeypatch, folder, parts, options, classes, leader, after=2):
    """Train until a round fails."""
    grow, count = by_row.grow_round, itertools.count()

    def stopping(*arguments):
        if next(count) == after:
            raise Interrupted
        return grow(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(by_row, "grow_round", stopping)
        with pytest.raises(Interrupted):
            train(parts, options, classes, leader=leader, keepers=keepers(folder, {*parts, leader}))


def assert_same(resumed, whole):
    for name, part in whole.results.items():
        found = resumed.results[name]
        assert found.forest.objective == part.forest.objective
        assert repr(found.splits) == repr(part.splits)
        for one, other in zip(found.forest.trees, part.forest.trees, strict=True):
            np.testing.assert_array_equal(one.value, other.value)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "leader"), [("multiclass", "p1"), ("multiclass", "server"), ("regression", "p1")])
def test_the_resumed_model_is_that_of_an_uninterrupted_training(monkeypatch, tmp_path, task, leader):
    parts, _, classes = dealt(task, 3)
    options = options_of(random_state=4, **SAMPLED)
    interrupted(monkeypatch, tmp_path, parts, options, classes, leader)
    resumed = train(parts, options, classes, leader=leader, keepers=keepers(tmp_path, {*parts, leader}, resume=True))
    whole = train(parts, options, classes, leader=leader)
    assert_same(resumed, whole)
    steps = {e.step for e in resumed.transcripts["p0"].entries}
    assert "CommonBins" in steps
    assert not steps & {"ProbeRequest", "LabelUnits", "TrainingStart"}


def test_rounds_that_the_leader_has_not_kept_are_dropped_at_all_others(monkeypatch, tmp_path):
    parts, _, classes = dealt("binary", 3, rows=200)
    options = options_of(random_state=4, max_depth=2, **{**SAMPLED, "n_estimators": 3})
    keep, count = Keeper.keep, itertools.count()

    def failing(self, current, began=None):
        if self.path.stem == "p0" and next(count) == 1:
            raise Interrupted
        return keep(self, current, began)

    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "keep", failing)
        with pytest.raises(Interrupted):
            train(parts, options, classes, keepers=keepers(tmp_path, parts))
    again = keepers(tmp_path, parts, resume=True)
    assert [keeper.found().rounds for keeper in again.values()] == [1, 2, 2]
    assert_same(train(parts, options, classes, keepers=again), train(parts, options, classes))


@pytest.mark.slow
def test_checkpoints_of_another_training_are_refused(monkeypatch, tmp_path):
    parts, _, classes = dealt("binary", 3)
    options = options_of(random_state=4, **SAMPLED)
    interrupted(monkeypatch, tmp_path, parts, options, classes, "p0")
    again = keepers(tmp_path, parts, resume=True)
    with pytest.raises(ConfigError, match=r"cannot resume with other options: learning_rate=0\.1"):
        train(parts, options_of(random_state=4, learning_rate=0.1, **SAMPLED), classes, keepers=again)
    with pytest.raises(ConfigError, match="cannot resume as the leader"):
        train(parts, options, classes, leader="p1", keepers=again)
    without = {name: keeper for name, keeper in again.items() if name != "p2"}
    with pytest.raises(ConfigError, match=r"expected a checkpoint of model .* got none"):
        train(parts, options, classes, keepers=without)
