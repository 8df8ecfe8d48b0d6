"""What a party's log of alignments keeps, shows and refuses."""

from __future__ import annotations

import logging
import stat
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from treaty.data import run_log
from treaty.data.run_log import RunLog, count_changed, decode, encode
from treaty.errors import ConfigError, DataError

NODES = np.random.default_rng(0).integers(0, 256, (256, 32), np.uint8)


def noted(log: RunLog, theirs: np.ndarray = NODES, peer: str = "shop") -> int | None:
    return log.start("job", peer, 1024, 2048, NODES, theirs)


def test_first_run_has_nothing_to_compare_with(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "logs" / "bank.jsonl")
    assert noted(log) is None
    log.finish("job", "shop", 1024, 2048, 17)
    started, finished = log.entries()
    assert (started.event, started.peer_size, finished.event, finished.common) == ("started", 2048, "finished", 17)
    assert np.array_equal(decode(started.peer_commitment), NODES)
    assert (datetime.now(UTC) - started.time).total_seconds() < 60


def test_changed_commitment_is_counted_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(tmp_path / "bank.jsonl")
    changed = NODES.copy()
    changed[[3, 77]] ^= 1
    noted(log)
    with caplog.at_level(logging.WARNING):
        assert noted(log) == 0
        assert not caplog.records
        assert noted(log, changed) == 2
    assert "shop changed its ids" in caplog.text
    assert noted(log, changed) == 0
    assert noted(log, NODES, peer="other") is None


def test_log_goes_on_after_reopening_with_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "bank.jsonl"
    first = RunLog(path)
    noted(first)
    second = RunLog(path)
    assert second.key == first.key
    assert noted(second) == 0
    assert len(second.entries()) == 2
    assert stat.S_IMODE(path.with_name("bank.jsonl.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "tamper",
    [
        lambda lines: [lines[0].replace(b'"shop"', b'"show"'), *lines[1:]],
        lambda lines: lines[1:],
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: [*lines[:2], b"{}\n"],
    ],
    ids=["changed", "first gone", "one gone", "swapped", "malformed"],
)
def test_changed_lines_show(tmp_path: Path, tamper: object) -> None:
    path = tmp_path / "bank.jsonl"
    log = RunLog(path)
    for _ in range(3):
        noted(log)
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"run log"):
        RunLog(path)


def test_limit_of_runs_is_per_partner_and_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path / "bank.jsonl", max_runs=2)
    noted(log)
    noted(log)
    with pytest.raises(ConfigError, match="shop has started 2 alignments within 30 days") as caught:
        noted(log)
    assert "limit of 2" in (caught.value.public or "")
    assert len(log.entries()) == 2
    noted(log, peer="other")
    monkeypatch.setattr(run_log, "WINDOW", run_log.timedelta(0))
    noted(log)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use the run log"):
        RunLog(tmp_path / "file" / "bank.jsonl")
    (tmp_path / "bank.jsonl.key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="expected a key of 32 bytes"):
        RunLog(tmp_path / "bank.jsonl")
    with pytest.raises(ConfigError, match="at least 1"):
        RunLog(tmp_path / "shop.jsonl", max_runs=0)


def test_commitments_survive_writing() -> None:
    assert np.array_equal(decode(encode(NODES)), NODES)
    assert count_changed(NODES, NODES) == 0
    assert count_changed(NODES[:0], NODES) == 256
