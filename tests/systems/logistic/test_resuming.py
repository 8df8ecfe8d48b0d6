"""A logistic regression that was interrupted goes on, and ends as if it had not been."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import treaty
from marks import slow
from systems.logistic.playing import PAPER, linear_tables, play_logistic, weights_of
from tables import cut_for_active, real_table
from treaty.errors import ConfigError
from treaty.files import read_file, write_file
from treaty.linear.training import Schedule
from treaty.models.checkpoints import LINEAR, LinearCheckpoint, checkpoint_file

FORMS = {
    "lattice": {"encryption": "lattice"},
    "lattice-two": {"encryption": "lattice", "coordinator": False},
    "ou": {"encryption": "ou"},
    "ou-two": {"encryption": "ou", "coordinator": False},
}
GIVEN = {"max_iter": 5, "period": 1, "memory": 2}


class PowerCut(Exception):
    """What ends a training in these tests."""


def interrupted(tables, y, folder: Path, after: int = 3, **changes) -> None:
    """Train until the active party fails at the end of epoch `after`, before it tells anybody."""
    end_epoch = Schedule.end_epoch

    def fails(schedule, loss):
        if len(schedule.losses) + 1 == after:
            raise PowerCut
        return end_epoch(schedule, loss)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Schedule, "end_epoch", fails)
        with pytest.raises(PowerCut):
            play_logistic(tables, y, checkpoints=folder, **changes)


def kept(folder: Path, name: str) -> LinearCheckpoint:
    return read_file(checkpoint_file(folder, name), LinearCheckpoint, LINEAR)


def edited(folder: Path, name: str, **changes) -> None:
    """Change what a party has kept."""
    write_file(checkpoint_file(folder, name), msgspec.structs.replace(kept(folder, name), **changes), LINEAR, name)


def same(found, expected, tables) -> None:
    np.testing.assert_array_equal(weights_of(found, tables), weights_of(expected, tables))
    assert found.results["p0"].losses == expected.results["p0"].losses
    assert found.results["p0"].calibration == expected.results["p0"].calibration


@pytest.mark.parametrize(
    ("form", "behind"), [("lattice", "p0"), slow("lattice", "p1"), *(slow(form, None) for form in FORMS)]
)
def test_a_resumed_training_ends_as_an_undisturbed_one(form, behind, tmp_path):
    """Also where one party was cut off before it wrote its last epoch."""
    tables, y = linear_tables(2, rows=260)
    given = {**GIVEN, **FORMS[form]}
    whole = play_logistic(tables, y, **given)
    interrupted(tables, y, tmp_path, **given)
    if behind is not None:
        edited(tmp_path, behind, states=kept(tmp_path, behind).states[:1])
    common = set.intersection(*({state.epochs for state in kept(tmp_path, name).states} for name in tables))
    assert common
    resumed = play_logistic(tables, y, checkpoints=tmp_path, **given)
    same(resumed, whole, tables)
    epochs = [e for e in resumed.transcripts["p1"].entries if e.step == "EpochEnd"]
    assert len(epochs) == 5 - max(common), "it began anew: the test proves nothing"


@pytest.mark.slow
def test_an_epoch_that_was_undone_is_resumed_alike(tmp_path):
    tables, y = linear_tables(2, rows=260)
    given = {"encryption": "lattice", "protocol": "sgd", "learning_rate": 2.5, "max_iter": 6}
    whole = play_logistic(tables, y, **given)
    losses = whole.results["p0"].losses
    assert losses[1] > 1.1 * losses[0]
    for after in (2, 3, 4):
        interrupted(tables, y, tmp_path / str(after), after=after, **given)
        same(play_logistic(tables, y, checkpoints=tmp_path / str(after), **given), whole, tables)


def test_what_does_not_belong_to_the_interrupted_training_is_refused(tmp_path):
    tables, y = linear_tables(2, rows=260)
    given = {**GIVEN, "encryption": "lattice"}
    interrupted(tables, y, tmp_path, **given)
    with pytest.raises(ConfigError, match=r"cannot resume with other options: l2=0\.1 \(was 0\.0\)"):
        play_logistic(tables, y, checkpoints=tmp_path, **given, l2=0.1)
    with pytest.raises(ConfigError, match="p0: cannot resume: the training rows, eval sets or classes differ"):
        play_logistic(tables, 1.0 - y, checkpoints=tmp_path, **given)
    other = dict(zip(tables, linear_tables(3, rows=260)[0].values(), strict=False))
    with pytest.raises(ConfigError, match="p1: cannot resume: the training rows"):
        play_logistic({**tables, "p1": other["p1"]}, y, checkpoints=tmp_path, **given)
    edited(tmp_path, "p1", model_id="another")
    with pytest.raises(ConfigError, match=r"p1: cannot resume: expected a checkpoint of .* got one of another"):
        play_logistic(tables, y, checkpoints=tmp_path, **given)
    checkpoint_file(tmp_path, "p1").unlink()
    with pytest.raises(ConfigError, match=r"p1: cannot resume: expected a checkpoint of .* got none"):
        play_logistic(tables, y, checkpoints=tmp_path, **given)
    checkpoint_file(tmp_path, "p0").unlink()
    same(play_logistic(tables, y, checkpoints=tmp_path, **given), play_logistic(tables, y, **given), tables)


def test_more_epochs_may_be_asked_for_and_paper_mode_keeps_nothing(tmp_path):
    tables, y = linear_tables(2, rows=260)
    given = {**GIVEN, "encryption": "lattice"}
    interrupted(tables, y, tmp_path, **given)
    longer = {**given, "max_iter": 7}
    same(play_logistic(tables, y, checkpoints=tmp_path, **longer), play_logistic(tables, y, **longer), tables)
    interrupted(tables, y, tmp_path / "paper", **given | {"encryption": "ou", **PAPER, "max_iter": 3})
    assert not (tmp_path / "paper").exists()


@pytest.mark.parametrize("transport", ["memory", pytest.param("tls", marks=pytest.mark.slow)])
def test_fit_goes_on_from_its_folder_and_leaves_no_checkpoint(transport, tmp_path, monkeypatch):
    """Whatever transport it was interrupted under."""
    X, y = real_table("binary", rows=260)
    tables = cut_for_active(X, 2)
    given = {"batch_size": 120, "max_iter": 4, "tol": 0.0, "period": 1, "random_state": 1, "transport": transport}
    whole = treaty.LogisticRegression("quasi-newton", **given).fit(tables, y)

    def failing(*arguments, **options):
        raise PowerCut

    with monkeypatch.context() as patched:
        patched.setattr("treaty.systems.logistic.prediction.fit_calibration", failing)  # when all epochs are done
        with pytest.raises(PowerCut):
            treaty.LogisticRegression("quasi-newton", **given | {"transport": "memory"}).fit(
                tables, y, checkpoint=tmp_path
            )
    assert [state.epochs for state in kept(tmp_path, "coordinator").states] == [2, 3]
    resumed = treaty.LogisticRegression("quasi-newton", **given).fit(tables, y, checkpoint=tmp_path)
    assert resumed.loss_history_ == whole.loss_history_
    for name in tables:
        np.testing.assert_array_equal(resumed.coef_[name], whole.coef_[name])
    assert not list(tmp_path.glob("*.checkpoint"))


def test_fewer_epochs_than_are_trained_are_refused(tmp_path):
    tables, y = linear_tables(2, rows=260)
    given = {**GIVEN, "encryption": "lattice"}
    interrupted(tables, y, tmp_path, after=4, **given)
    with pytest.raises(ConfigError, match="cannot resume with max_iter=3: 3 epochs are trained already"):
        play_logistic(tables, y, checkpoints=tmp_path, **given | {"max_iter": 3})


def test_a_training_on_the_whole_table_does_not_delete_an_interrupted_one(tmp_path):
    tables, y = linear_tables(2, rows=260)
    given = {**GIVEN, "encryption": "lattice"}
    interrupted(tables, y, tmp_path, **given)
    with pytest.raises(ConfigError, match="cannot resume with other options"):
        play_logistic(tables, y, checkpoints=tmp_path, **given, standard_errors=True)
    same(play_logistic(tables, y, checkpoints=tmp_path, **given), play_logistic(tables, y, **given), tables)
