"""How often a checkpoint is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treaty.models import checkpoints
from treaty.models.checkpoints import Keeper, LinearCheckpoint


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
