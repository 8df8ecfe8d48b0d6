"""A fit interrupted at any tree goes on with new keys and gives the identical model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import treaty
from flat import flat
from tables import FAST_KEY, cut, real_table, with_categories, with_gaps
from treaty.errors import ConfigError
from treaty.models.checkpoints import Keeper, checkpoint_file, load_checkpoint
from treaty.systems.vertical import column_owner, encrypted_columns
from treaty.systems.vertical.column_owner import SplitOwner

TREES = 5


class Interrupted(Exception):
    """What the tests stop a party with."""


def fit(tables, y, folder=None, estimator=treaty.GBDTClassifier, protocol=FAST_KEY, **options):
    model = flat(estimator, **{**protocol, "n_estimators": TREES, "min_child_samples": 5, **options})
    return model.fit(tables, y, eval_set=(tables, y), checkpoint=folder)


def same(one, other):
    assert list(one.parts_) == list(other.parts_)
    for ours, theirs in zip(one.parts_.values(), other.parts_.values(), strict=True):
        assert repr(ours.splits) == repr(theirs.splits)  # NaN is not equal to itself
    forests = [next(p.forest for p in model.parts_.values() if p.forest is not None) for model in (one, other)]
    assert forests[0].trees == forests[1].trees
    assert forests[0].history == forests[1].history


def stop_active(monkeypatch, tree):
    """Stop the active party when it starts a tree."""
    start_tree, count = encrypted_columns.EncryptedGradients.start_tree, itertools.count()

    def stopping(self, peer, grad, *others):
        if self._tree is not grad and next(count) == tree:
            raise Interrupted
        return start_tree(self, peer, grad, *others)

    monkeypatch.setattr(encrypted_columns.EncryptedGradients, "start_tree", stopping)


def stop_passive(monkeypatch, tree):
    """Stop a passive party in the midst of a tree, once it has recorded a split."""
    record, seen = SplitOwner.record, []
    checked_sample = column_owner.checked_sample

    def counting(*arguments):
        seen.append(1)
        return checked_sample(*arguments)

    def stopping(*arguments):
        answer = record(*arguments)
        if len(seen) == tree + 1:
            raise Interrupted
        return answer

    monkeypatch.setattr(column_owner, "checked_sample", counting)
    monkeypatch.setattr(SplitOwner, "record", stopping)


CASES = {
    "binary": ("binary", {"subsample": 0.7, "colsample_bytree": 0.6, "random_state": 4}),
    "classes": ("multiclass", {"goss": True, "top_rate": 0.3, "other_rate": 0.3, "random_state": 1}),
    "regression": ("regression", {"base_score": 150.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tree"), [*(("binary", tree) for tree in range(TREES)), ("classes", 2), ("regression", 3)]
)
@pytest.mark.parametrize("stop", [stop_active, stop_passive], ids=["active", "passive"])
def test_a_fit_stopped_at_any_tree_at_either_side_goes_on_to_the_same_model(monkeypatch, tmp_path, case, stop, tree):
    task, options = CASES[case]
    X, y = real_table(task, rows=150)
    tables = cut(with_gaps(with_categories(X)), 2)
    estimator = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    whole = fit(tables, y, estimator=estimator, **options)
    tree *= 3 if task == "multiclass" else 1  # trees per round
    with monkeypatch.context() as patch:
        stop(patch, tree)
        with pytest.raises(Interrupted):
            fit(tables, y, tmp_path, estimator=estimator, **options)
    kept = checkpoint_file(tmp_path, "p0")
    assert kept.exists() == (tree > 0)
    resumed = fit(tables, y, tmp_path, estimator=estimator, **options)
    same(resumed, whole)
    # What splits have told about rows outlives the checkpoint: later jobs on the same rows count from there.
    assert {path.name for path in tmp_path.iterdir()} <= {"p1.sides", "p1.sides.kept"}
    assert not kept.exists()


@pytest.mark.slow
@pytest.mark.parametrize("reveal", ["column", "node"])
@pytest.mark.parametrize("stop", [stop_active, stop_passive], ids=["active", "passive"])
def test_a_fit_under_the_lattice_map_goes_on_to_the_same_model(monkeypatch, tmp_path, stop, reveal):
    X, y = real_table("binary", rows=150)
    tables = cut(with_gaps(with_categories(X)), 3)
    options = {**CASES["binary"][1], "encryption": "lattice", "reveal": reveal, "max_bin": 6}
    whole = fit(tables, y, **options)
    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop(patch, 3)
        with pytest.raises(Interrupted):
            fit(tables, y, tmp_path, **options)
    assert 1 <= load_checkpoint(checkpoint_file(tmp_path, "p0")).rounds <= 3
    same(fit(tables, y, tmp_path, **options), whole)
    same(whole, fit(tables, y, **{**options, "encryption": "ou", "reveal": None}))


def test_no_finished_round_is_grown_again(monkeypatch, tmp_path):
    X, y = real_table("binary")
    tables = cut(X, 3)
    monkeypatch.setattr(Keeper, "due", True)  # however little time has passed
    with monkeypatch.context() as patch:
        stop_active(patch, 3)
        with pytest.raises(Interrupted):
            fit(tables, y, tmp_path)
    assert load_checkpoint(checkpoint_file(tmp_path, "p0")).rounds == 3
    grown = []
    start_tree = encrypted_columns.PassiveColumns.start_tree
    monkeypatch.setattr(
        encrypted_columns.PassiveColumns, "start_tree", lambda self, *a: (grown.append(self.peer), start_tree(self, *a))
    )
    resumed = fit(tables, y, tmp_path)
    assert grown == ["p1", "p2"] * (TREES - 3)
    assert resumed.n_iter_ == TREES


@pytest.mark.slow
def test_a_finished_number_of_rounds_may_be_raised(monkeypatch, tmp_path):
    X, y = real_table("binary")
    tables = cut(X, 2)
    with monkeypatch.context() as patch:
        stop_passive(patch, 2)
        with pytest.raises(Interrupted):
            fit(tables, y, tmp_path)
    same(fit(tables, y, tmp_path, n_estimators=8), fit(tables, y, n_estimators=8))


@pytest.mark.slow
def test_fewer_rounds_than_are_finished_give_the_shorter_model(monkeypatch, tmp_path):
    X, y = real_table("binary")
    tables = cut(X, 2)
    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop_passive(patch, 4)
        with pytest.raises(Interrupted):
            fit(tables, y, tmp_path)
    same(fit(tables, y, tmp_path, n_estimators=2), fit(tables, y, n_estimators=2))


def test_pooled_training_resumes_too(monkeypatch, tmp_path):
    X, y = real_table("binary")
    whole = fit(X, y, protocol={"protocol": "pooled"})

    def stopping(parts):
        if next(iter(parts.values())).forest.rounds == 3:
            raise Interrupted

    with monkeypatch.context() as patch:
        from treaty.estimators import boosted as estimator_base

        train = estimator_base.train
        patch.setattr(estimator_base, "train", lambda *a, **k: train(*a, **{**k, "finished": stopping}))
        with pytest.raises(Interrupted):
            fit(X, y, tmp_path, protocol={"protocol": "pooled"})
    assert 1 <= load_checkpoint(checkpoint_file(tmp_path, "pooled")).rounds <= 3
    same(fit(X, y, tmp_path, protocol={"protocol": "pooled"}), whole)


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    """Return the tables, labels and folder of a fit stopped in its third tree."""
    X, y = real_table("binary")
    tables = cut(X, 2)
    with monkeypatch.context() as patch:
        stop_passive(patch, 2)
        with pytest.raises(Interrupted):
            fit(tables, y, tmp_path)
    return tables, y, tmp_path


@pytest.mark.slow
def test_processes_go_on_from_what_threads_left(stopped):
    tables, y, folder = stopped
    begun = load_checkpoint(checkpoint_file(folder, "p0")).part.model_id
    resumed = fit(tables, y, folder, transport="tls")
    same(resumed, fit(tables, y))
    assert resumed.parts_["p0"].model_id == begun


def test_other_options_are_refused_by_name(stopped):
    with pytest.raises(ConfigError, match=r"max_depth=4 \(was 3\)"):
        fit(*stopped, max_depth=4)


def test_other_labels_or_columns_are_refused(stopped):
    tables, y, folder = stopped
    with pytest.raises(ConfigError, match="p0: cannot resume: the training rows, eval sets or classes differ"):
        fit(tables, 1 - y, folder)
    changed = {**tables, "p1": tables["p1"] + 1.0}
    with pytest.raises(ConfigError, match="p1: cannot resume: the training rows, eval sets or classes differ"):
        fit(changed, y, folder)


def test_other_classes_or_eval_sets_are_refused(stopped):
    tables, y, folder = stopped
    with pytest.raises(ConfigError, match="p0: cannot resume: the training rows, eval sets or classes"):
        fit(tables, np.where(y == 1, "yes", "no"), folder)
    model = flat(treaty.GBDTClassifier, **FAST_KEY, n_estimators=TREES, min_child_samples=5)
    for evals in (None, [(tables, y), (tables, y)], (tables, 1 - y)):
        with pytest.raises(ConfigError, match="p0: cannot resume: the training rows, eval sets or classes"):
            model.fit(tables, y, eval_set=evals, checkpoint=folder)
    other = {**tables, "p1": tables["p1"] * 2}
    with pytest.raises(ConfigError, match="p1: cannot resume: the training rows, eval sets or classes"):
        model.fit(tables, y, eval_set=(other, y), checkpoint=folder)


def test_other_parties_are_refused(stopped):
    tables, y, folder = stopped
    with pytest.raises(ConfigError, match="cannot resume with other parties than p0, p1"):
        fit({"p0": tables["p0"], "p2": tables["p1"]}, y, folder)


def test_a_checkpoint_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    X, y = real_table("binary")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cannot keep checkpoints in .*; expected a folder"):
            fit(cut(X, 2), y, folder)


def test_a_party_that_lost_its_checkpoint_is_named(stopped):
    tables, y, folder = stopped
    checkpoint_file(folder, "p1").unlink()
    with pytest.raises(ConfigError, match=r"expected a checkpoint of model .{8} with \d+ splits, got none"):
        fit(tables, y, folder)


@pytest.mark.slow
def test_a_checkpoint_of_another_fit_is_refused(stopped, monkeypatch, tmp_path_factory):
    tables, y, folder = stopped
    other = tmp_path_factory.mktemp("other")
    with monkeypatch.context() as patch:
        stop_passive(patch, 2)
        with pytest.raises(Interrupted):
            fit(tables, y, other)
    checkpoint_file(other, "p1").replace(checkpoint_file(folder, "p1"))
    with pytest.raises(ConfigError, match="got one of model"):
        fit(tables, y, folder)


@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["empty", "garbage", "truncated"])
def test_a_damaged_checkpoint_is_refused(stopped, damage):
    tables, y, folder = stopped
    path = checkpoint_file(folder, "p0")
    path.write_bytes(path.read_bytes()[:-7] if damage is None else damage)
    with pytest.raises(ConfigError, match=r"p0\.checkpoint"):
        fit(tables, y, folder)


def test_a_checkpoint_is_readable_by_its_owner_alone_and_holds_no_key(stopped):
    *_, folder = stopped
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0
    passive = load_checkpoint(checkpoint_file(folder, "p1"))
    assert passive.margins is None
    assert passive.random_state is None
    assert passive.part.forest is None


@pytest.mark.slow
def test_interrupted_fit_leaves_what_is_finished_and_it_predicts(monkeypatch):
    X, y = real_table("binary")
    tables = cut(X, 2)
    model = flat(treaty.GBDTClassifier, **FAST_KEY, n_estimators=TREES)
    with monkeypatch.context() as patch:
        stop_passive(patch, 3)
        with pytest.raises(Interrupted):
            model.fit(tables, y)
    shorter = flat(treaty.GBDTClassifier, **FAST_KEY, n_estimators=3).fit(tables, y)
    np.testing.assert_array_equal(model.predict_proba(tables), shorter.predict_proba(tables))
