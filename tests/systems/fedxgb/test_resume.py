"""Trainings that go on after an interruption: on the rows of the first run alone, beside all that was opened in it."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

import treaty
from marks import all_but_first_slow
from runs.test_resume import Interrupted
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.messages import decode_body, encode
from treaty.systems.fedxgb import conversation, secboost
from treaty.systems.fedxgb.cohorts import seed_of_rows
from treaty.systems.fedxgb.messages import Task, TrainingEnd
from treaty.systems.fedxgb.secfind import Crowd
from treaty.systems.fedxgb.secpred import SharedRows, row_key
from treaty.trees.slots import SlotTree

TREES = 4


def rows_of_nine() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    X, y = load_breast_cancer(return_X_y=True)
    return {f"user {k}": (X[k:180:9, :4], y[k:180:9]) for k in range(9)}


def model(**own: object) -> treaty.GBDTClassifier:
    own = {"edges": 3, "expose": "model", **own}
    return treaty.GBDTClassifier(
        treaty.FedXGB(**own), n_estimators=TREES, n_jobs=1, min_child_samples=2, max_bin=8, base_score=0.5
    )


def interrupted(folder: Path, after: int = 3, rows: dict | None = None, **own: object) -> None:
    """Train until so many trees are finished."""
    finish, count = SlotTree.finish, itertools.count()

    def stopping(self, depth):
        if next(count) == after:
            raise Interrupted
        return finish(self, depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotTree, "finish", stopping)
        with pytest.raises(Interrupted):
            model(**own).fit(rows or rows_of_nine(), checkpoint=folder)


def trees_of(fitted: treaty.GBDTClassifier) -> list[object]:
    return fitted.parts_["pooled"].forest.trees


def kinds_in(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("expose", all_but_first_slow("model", None))
@pytest.mark.parametrize("change", ["more rows", "other labels", "weights"])
def test_rows_other_than_those_of_the_first_run_are_refused(change, expose, tmp_path):
    """Packed sums have room for the first run's rows: those of more rows would be silently wrong."""
    interrupted(tmp_path, expose=expose)
    rows = rows_of_nine()
    X, y = rows["user 3"]
    rows["user 3"] = {
        "more rows": (np.tile(X, (5, 1)), np.tile(y, 5)),
        "other labels": (X, 1 - y),
        "weights": (X, y, np.full(len(y), 2.0)),
    }[change]
    with pytest.raises(ConfigError, match=r"user 3: cannot resume: .* rows, labels or weights differ"):
        model(expose=expose).fit(rows, checkpoint=tmp_path)


def test_who_was_not_there_in_the_first_run_is_told_so(tmp_path):
    interrupted(tmp_path)
    for path in tmp_path.glob("user 3-*.digest"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"user 3: cannot resume: it has no record of its rows of the first run"):
        model().fit(rows_of_nine(), checkpoint=tmp_path)


@pytest.mark.parametrize("comparison", all_but_first_slow("shamir", "additive"))
def test_holders_of_shares_take_the_rows_of_the_first_run_alone_down_finished_trees(
    comparison, tmp_path, monkeypatch, caplog
):
    """A user that checks nothing, and brings invented rows to be told their way down all finished trees again."""
    own = {"expose": "nothing", "comparison": comparison}
    interrupted(tmp_path, after=1, **own)
    rows, invented = rows_of_nine(), 40
    X, y = rows["user 3"]
    rows["user 3"] = np.tile(X, (2, 1))[:invented] + 1.0, np.tile(y, 2)[:invented]
    check, told = seed_of_rows, []
    monkeypatch.setattr(
        conversation,
        "seed_of_rows",
        lambda *given, **more: b"s" * 32 if given[1] == "user 3" else check(*given, **more),
    )
    left = SharedRows.left

    def noted(self, *given):
        sides = left(self, *given)
        told.append(sides.shape[1])
        return sides

    monkeypatch.setattr(SharedRows, "left", noted)
    caplog.set_level(logging.WARNING)
    with pytest.raises(PeerProtocolError, match="expected user 3 among the users whose rows"):
        model(**own).fit(rows, checkpoint=tmp_path)
    assert "continues without user 3: its rows are not those that it shared in the first run" in caplog.text
    assert invented not in told


def test_shares_of_the_same_rows_are_the_same_under_a_seed_and_those_of_others_have_another_key():
    seed, rows = b"s" * 32, np.arange(12).reshape(4, 3)
    key = row_key(seed, rows, ["a", "b", "c"])
    assert key == row_key(seed, rows.copy(), ["a", "b", "c"])
    assert len(key) == 32
    others = [(b"t" * 32, rows, ["a", "b", "c"]), (seed, rows + 1, ["a", "b", "c"]), (seed, rows, ["a", "b"])]
    others.append((seed, rows.reshape(3, 4), ["a", "b", "c"]))
    assert len({key, *(row_key(*other) for other in others)}) == 5


def test_the_last_cohort_goes_on(tmp_path):
    """With fewer places than users, who were drawn by lot as the first tree began."""
    X, y = load_breast_cancer(return_X_y=True)
    rows = {f"user {k}": (X[k::12][: 15 + k, :4], y[k::12][: 15 + k]) for k in range(12)}
    own = {"edges": 2, "max_users": 3}
    interrupted(tmp_path, rows=rows, **own)
    trees = trees_of(model(**own).fit(rows, checkpoint=tmp_path))
    assert len({tree.count[0] for tree in trees}) == 1
    assert trees[0].count[0] < sum(len(y) for _, y in rows.values())


# ---------------------------------------------------------------- files


def test_a_training_goes_on_where_the_server_failed_after_it_had_said_that_it_was_over(tmp_path, monkeypatch):
    """Its model was not saved, so everybody's files have to be there still."""
    tell, end = Crowd.broadcast, secboost.edge

    def failing(self, message):
        tell(self, message)
        if isinstance(message, TrainingEnd):
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Crowd, "broadcast", failing)
        with pytest.raises(Interrupted):
            model().fit(rows_of_nine(), checkpoint=tmp_path)
    assert kinds_in(tmp_path) == [".checkpoint", *[".cohorts"] * 3, *[".digest"] * 9]
    assert trees_of(model().fit(rows_of_nine(), checkpoint=tmp_path)) == trees_of(model().fit(rows_of_nine()))
    assert not list(tmp_path.iterdir())
    assert end is secboost.edge


def test_a_training_begun_anew_by_mistake_leaves_what_an_earlier_one_needs_until_it_has_a_tree(tmp_path):
    interrupted(tmp_path)
    (tmp_path / "server.checkpoint").rename(tmp_path / "away")  # as if --resume were forgotten
    interrupted(tmp_path, after=0)
    (tmp_path / "away").rename(tmp_path / "server.checkpoint")
    assert len(list(tmp_path.glob("edge0-*.cohorts"))) == 2
    assert trees_of(model().fit(rows_of_nine(), checkpoint=tmp_path)) == trees_of(model().fit(rows_of_nine()))
    assert not list(tmp_path.iterdir())


def test_files_of_an_earlier_training_are_removed_once_another_has_trees(tmp_path):
    interrupted(tmp_path)
    (tmp_path / "server.checkpoint").unlink()
    interrupted(tmp_path, after=2)
    assert kinds_in(tmp_path) == [".checkpoint", *[".cohorts"] * 3, *[".digest"] * 9]


def test_cohorts_that_are_gone_are_named_with_what_beginning_anew_costs(tmp_path):
    interrupted(tmp_path)
    for path in tmp_path.glob("edge1-*.cohorts"):
        path.unlink()
    words = r"cannot resume: expected the cohorts .* got none - at .*edge1-[0-9a-f]{8}\.cohorts; .* the same rows"
    with pytest.raises(ConfigError, match=words):
        model().fit(rows_of_nine(), checkpoint=tmp_path)


@pytest.mark.parametrize("model_id", ["../../../x", "0" * 31, "g" * 32, ""])
def test_an_id_that_is_no_id_is_refused_before_it_is_part_of_a_files_name(model_id):
    task = Task(model_id, ["a"], [None], None, b"", keys())
    with pytest.raises(PeerProtocolError, match="model_id"):
        decode_body(encode(task), Task, peer="server")


def keys():
    from treaty.systems.fedxgb.messages import CertifiedKeys

    return CertifiedKeys(b"", b"", b"", b"")
