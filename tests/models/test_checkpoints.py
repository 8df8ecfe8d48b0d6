"""How often a checkpoint is written, and what files of earlier trainings say of ledgers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import treaty
from tables import real_table
from treaty.errors import ConfigError
from treaty.machine.database import Mark
from treaty.models import checkpoints
from treaty.models.checkpoints import Keeper, LinearCheckpoint, check_ledgers, checkpoint_of


@pytest.mark.parametrize("share", [0.05, 0.25])
def test_writing_takes_no_more_than_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float
) -> None:
    """Rounds of a second each, after which a file that takes half a second is written whenever it is due."""
    clock, writing = SimpleNamespace(now=100.0), 0.0

    def write_file(*_: Any) -> None:
        clock.now += 0.5

    monkeypatch.setattr(checkpoints, "write_file", write_file)
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    keeper = Keeper(tmp_path / "a.checkpoint", share=share)
    kept = LinearCheckpoint(party="a", model_id="0" * 32, options={}, table=b"", states=[])
    for _ in range(400):
        clock.now += 1.0
        if keeper.due:
            began = clock.now
            clock.now += 0.25  # others keep theirs, which counts as well
            keeper.keep(lambda: kept, began)
            writing += clock.now - began
    assert 0.8 * share < writing / (clock.now - writing - 100.0) <= share * 1.02 + 0.75 / 400


@pytest.mark.parametrize("kind", ["trees", "linear", "statistics", "checkpoint", "linear checkpoint"])
def test_every_kind_of_file_says_which_ledgers_it_was_trained_with(tmp_path: Path, kind: str) -> None:
    X, y = real_table("binary", rows=200)
    model: Any = {"linear": treaty.LogisticRegression(l2=0.1), "statistics": treaty.ColumnStatistics()}.get(
        kind, treaty.GBDTClassifier(n_estimators=1)
    )
    part, ledger = model.fit(X, y).parts_["pooled"], tmp_path / "a.noise"
    part.kept = {str(ledger.resolve()): Mark("0" * 32, 3)}
    if kind == "linear checkpoint":
        part = LinearCheckpoint(party="a", model_id="0" * 32, options={}, table=b"", states=[], kept=part.kept)
    if kind.endswith("checkpoint"):
        kept = part if kind == "linear checkpoint" else checkpoint_of(part, {}, b"")
        form = checkpoints.LINEAR if kind == "linear checkpoint" else checkpoints.FORMAT
        checkpoints.write_file(tmp_path / "file", kept, form, "a")
    else:
        part.save(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"file was trained with the ledger .*a\.noise, and that is gone"):
        check_ledgers([tmp_path / "file"], tmp_path, "a")
