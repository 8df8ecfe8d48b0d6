"""What a party's log of alignments keeps, shows and refuses."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from flips import damaged, flipped
from pace import within
from treaty.data import run_log
from treaty.data.run_log import RunLog, count_changed, decode, encode
from treaty.errors import ConfigError, DataError
from treaty.machine.database import set_aside

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


def test_only_its_owner_may_read_a_log_also_one_made_more_open(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        log = RunLog(tmp_path / "bank.jsonl")
        noted(log)
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
        log.path.chmod(0o644)
        noted(log)
        assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_changed_commitment_is_counted_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(tmp_path / "bank.jsonl")
    changed = NODES.copy()
    changed[[3, 77]] ^= 1
    noted(log)
    with caplog.at_level(logging.WARNING):
        assert noted(log) == 0
        assert not caplog.records
        assert noted(log, changed) == 2
    assert "shop has other ids than ever before: 2 or more differ" in caplog.text
    assert noted(log, changed) == 0
    assert noted(log, NODES, peer="other") is None


def test_change_is_counted_from_the_nearest_earlier_set_whatever_came_between(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "bank.jsonl")
    other, changed = NODES ^ 1, NODES.copy()
    changed[9] ^= 1
    log.start("job", "shop", 1024, 2048, NODES[:0], NODES[:0])  # without a commitment: nothing to compare with
    assert noted(log) is None
    assert noted(log, other, peer="club") is None
    assert [noted(log, other), noted(log, changed), noted(log, other), noted(log)] == [256, 1, 0, 0]
    assert noted(log, changed, peer="club") == 255  # of its own earlier set alone: `changed` is in one node as that is


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


@pytest.mark.parametrize("left", [1, 5, 700], ids=str)
def test_line_that_a_crash_cut_off_is_set_aside(tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "bank.jsonl"
    log = RunLog(path)
    noted(log)
    whole = path.read_bytes()
    torn = whole[:left] if left < 700 else b"\0" * left  # some file systems leave zeros
    path.write_bytes(whole + torn)
    with caplog.at_level(logging.WARNING):
        assert noted(RunLog(path)) == 0
    assert f"its {left} bytes are in" in caplog.text
    assert path.with_name("bank.jsonl.torn").read_bytes() == torn + b"\n"
    assert path.read_bytes().startswith(whole)
    assert len(RunLog(path).entries()) == 2


def test_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "bank.jsonl"
    log = RunLog(path)
    noted(log)
    path.write_bytes(path.read_bytes()[:-1])
    assert noted(log) == 0
    assert len(RunLog(path).entries()) == 2
    assert not path.with_name("bank.jsonl.torn").exists()


def test_last_line_that_is_cut_off_but_follows_another_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bank.jsonl"
    log = RunLog(path)
    noted(log)
    noted(log)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[1][:-1])
    with pytest.raises(DataError, match="the run log has 1 lines of 2, or is missing"):
        RunLog(path)


WRITER = """
import sys, numpy as np
from treaty.data.run_log import RunLog
from treaty.errors import ConfigError
log = RunLog(sys.argv[1], max_runs=12)
nodes = np.zeros((256, 32), np.uint8)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    try:
        log.start("job", "shop", 1024, 2048, nodes, nodes)
        print("started", flush=True)
    except ConfigError:
        print("refused", flush=True)
"""


def test_processes_and_threads_that_share_a_log_keep_its_chain_and_limit(tmp_path: Path) -> None:
    path = tmp_path / "bank.jsonl"
    others = [
        subprocess.Popen([sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"  # so that they start together
    threads = [threading.Thread(target=RunLog(path).finish, args=("job", "shop", 1024, 2048, k)) for k in range(4)]
    for other in others:
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.flush()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = [word for other in others for word in other.communicate(timeout=within(60))[0].split()]
    assert [said.count(word) for word in ("started", "refused")] == [12, 8]
    entries = RunLog(path).entries()
    assert [sum(entry.event == event for entry in entries) for event in ("started", "finished")] == [12, 4]


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
    RunLog(tmp_path / "bank.jsonl")
    (tmp_path / "bank.jsonl.key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="expected a run log key of Treaty, got something else"):
        RunLog(tmp_path / "bank.jsonl")
    with pytest.raises(ConfigError, match="at least 1"):
        RunLog(tmp_path / "shop.jsonl", max_runs=0)


def test_commitments_survive_writing() -> None:
    assert np.array_equal(decode(encode(NODES)), NODES)
    assert count_changed(NODES, NODES) == 0
    assert count_changed(NODES[:0], NODES) == 256


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """Return a log of four lines."""
    path = tmp_path / "bank.jsonl"
    log = RunLog(path)
    for _ in range(2):
        noted(log)
        log.finish("job", "shop", 1024, 2048, 17)
    return path


@pytest.mark.parametrize("flips", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ending", ["", ".key", ".kept"])
def test_no_flipped_bit_is_read_as_something_else(used: Path, ending: str, flips: int) -> None:
    for bit in flipped(used.with_name(used.name + ending), flips):
        with pytest.raises((ConfigError, DataError)):
            pytest.fail(f"{bit}: {RunLog(used).entries()}")
        assert not used.with_name("bank.jsonl.torn").exists()
    assert len(RunLog(used).entries()) == 4


@pytest.mark.parametrize("ending", ["", ".key", ".kept"])
def test_what_is_cut_off_emptied_deleted_or_overwritten_is_refused(used: Path, ending: str) -> None:
    all_but_its_end = f"bank.jsonl: cut to {used.stat().st_size - 1} bytes"
    for what in damaged(used.with_name(used.name + ending)):
        if what == all_but_its_end:
            assert len(RunLog(used).entries()) == 4
            continue
        with pytest.raises((ConfigError, DataError), match=r"bank\.jsonl"):
            pytest.fail(f"{what}: {RunLog(used).entries()}")
    assert len(RunLog(used).entries()) == 4


def test_deleted_log_and_older_copy_are_refused_with_what_to_do(used: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copy(used, copy)
    noted(RunLog(used))
    shutil.copy(copy, used)
    with pytest.raises(DataError, match=r"the run log has 4 lines of 5, or is missing - at .*bank\.jsonl; bring back"):
        RunLog(used)
    used.unlink()
    with pytest.raises(DataError, match="To begin anew is to forget how often partners aligned") as caught:
        RunLog(used)
    assert caught.value.public == "its run log cannot be used; it has the details"
    assert {path.name.split(".until")[0] for path in set_aside(used)} == {"bank.jsonl.kept", "bank.jsonl.key"}
    assert RunLog(used).entries() == []


def test_line_that_a_crash_left_unvouched_counts(used: Path) -> None:
    kept = used.with_name("bank.jsonl.kept").read_bytes()
    noted(RunLog(used))
    used.with_name("bank.jsonl.kept").write_bytes(kept)  # the crash came before it was written
    assert len(RunLog(used).entries()) == 5
    noted(RunLog(used))
    assert len(RunLog(used).entries()) == 6
