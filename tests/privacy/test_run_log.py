"""What a party's log of alignments keeps, shows and refuses."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
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
from treaty.errors import ConfigError
from treaty.machine.database import set_aside
from treaty.privacy import ledger
from treaty.privacy.ledger import RUNS_FILE, RunLog, count_changed

NODES = np.random.default_rng(0).integers(0, 256, (256, 32), np.uint8)


def noted(log: RunLog, theirs: np.ndarray = NODES, peer: str = "shop") -> int | None:
    return log.start("job", peer, 1024, 2048, NODES, theirs)


def test_first_run_has_nothing_to_compare_with(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "logs" / "bank.runs")
    assert noted(log) is None
    log.finish("job", "shop", 1024, 2048, 17)
    started, finished = log.entries()
    assert (started.event, started.peer_size, finished.event, finished.common) == ("started", 2048, "finished", 17)
    assert started.peer_commitment == NODES.tobytes()
    assert (datetime.now(UTC) - datetime.fromisoformat(started.time)).total_seconds() < 60


def test_only_its_owner_may_read_a_log(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        log = RunLog(tmp_path / "bank.runs")
        noted(log)
    finally:
        os.umask(before)
    assert stat.S_IMODE(log.folder.stat().st_mode) == 0o700
    files = [*log.folder.iterdir(), log.folder.with_name("bank.runs.kept")]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_changed_commitment_is_counted_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(tmp_path / "bank.runs")
    changed = NODES.copy()
    changed[[3, 77]] ^= 1
    noted(log)
    with caplog.at_level(logging.WARNING):
        assert noted(log) == 0
        assert not caplog.records
        assert noted(log, changed) == 2
    assert "shop uses other ids than in earlier runs: at least 2 differ" in caplog.text
    assert noted(log, changed) == 0
    assert noted(log, NODES, peer="other") is None


def test_change_is_counted_from_the_nearest_earlier_set_whatever_came_between(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "bank.runs")
    other, changed = NODES ^ 1, NODES.copy()
    changed[9] ^= 1
    log.start("job", "shop", 1024, 2048, NODES[:0], NODES[:0])  # without a commitment: nothing to compare with
    assert noted(log) is None
    assert noted(log, other, peer="club") is None
    assert [noted(log, other), noted(log, changed), noted(log, other), noted(log)] == [256, 1, 0, 0]
    assert noted(log, changed, peer="club") == 255  # of its own earlier set alone: `changed` is in one node as that is


def test_log_goes_on_after_reopening_with_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "bank.runs"
    first = RunLog(path)
    noted(first)
    second = RunLog(path)
    assert second.key == first.key
    assert noted(second) == 0
    assert len(second.entries()) == 2


@pytest.mark.parametrize(
    "tamper",
    [
        "UPDATE runs SET peer = 'show' WHERE number = 1",
        "UPDATE runs SET changed = 3 WHERE number = 2",
        "DELETE FROM runs WHERE number = 1",
        "DELETE FROM runs WHERE number = 2",
        "DELETE FROM runs WHERE number = 3",
        "DELETE FROM runs",
        "UPDATE runs SET number = 14 - number",
        "INSERT INTO runs SELECT NULL, time, event, job, peer, own_size, peer_size, x'', x'', 0, 0 FROM runs",
        "UPDATE key SET key = zeroblob(32)",
        "DROP TABLE key",
    ],
)
def test_changed_entries_show(tmp_path: Path, tamper: str) -> None:
    path = tmp_path / "bank.runs"
    log = RunLog(path)
    for _ in range(3):
        noted(log)
    db = sqlite3.connect(path / RUNS_FILE)
    db.execute(tamper)
    db.commit()
    db.close()
    with pytest.raises(ConfigError, match=r"the run log is damaged: .*bank\.runs; bring back the newest copy"):
        RunLog(path)


CRASHING = """
import os, sys, numpy as np
from treaty.privacy.ledger import RunLog
log = RunLog(sys.argv[1])
nodes = np.zeros((256, 32), np.uint8)
log.start("job", "shop", 1024, 2048, nodes, nodes)
with log._db.transaction() as db:
    db.execute("INSERT INTO runs SELECT NULL, time, event, job, peer, own_size, peer_size, x'', x'', 0, 0 FROM runs")
    os._exit(9)
"""


def test_an_entry_that_a_crash_cut_off_is_not_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "bank.runs"
    assert subprocess.run([sys.executable, "-c", CRASHING, path], check=False).returncode == 9
    log = RunLog(path)
    assert len(log.entries()) == 1
    assert noted(log, np.zeros_like(NODES)) == 0


@pytest.mark.parametrize("there", ["bank.runs", "bank.jsonl"])
def test_a_log_of_an_earlier_version_is_refused_and_stays(tmp_path: Path, there: str) -> None:
    earlier = tmp_path / there
    earlier.write_text('{"time":"2026-01-01T00:00:00Z"}\n')
    earlier.with_name(f"{there}.kept").write_bytes(b"kept")
    with pytest.raises(
        ConfigError, match=f"an earlier Treaty wrote the run log .*treaty ledger reset .*{there}"
    ) as caught:
        RunLog(tmp_path / "bank.runs")
    assert caught.value.public == "its run log cannot be used; it has the details"
    assert earlier.read_text().startswith("{")
    set_aside(earlier)
    assert RunLog(tmp_path / "bank.runs").entries() == []


WRITER = """
import sys, numpy as np
from treaty.privacy.ledger import RunLog
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
    path = tmp_path / "bank.runs"
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
    log = RunLog(tmp_path / "bank.runs", max_runs=2)
    noted(log)
    noted(log)
    with pytest.raises(ConfigError, match="shop has started 2 alignments within 30 days") as caught:
        noted(log)
    assert "limit of 2" in (caught.value.public or "")
    assert len(log.entries()) == 2
    noted(log, peer="other")
    monkeypatch.setattr(ledger, "WINDOW", ledger.timedelta(0))
    noted(log)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use the run log"):
        RunLog(tmp_path / "file" / "bank.runs")
    with pytest.raises(ConfigError, match="at least 1"):
        RunLog(tmp_path / "shop.runs", max_runs=0)


def test_nodes_that_differ_are_counted() -> None:
    assert count_changed(NODES, NODES) == 0
    assert count_changed(NODES[:0], NODES) == 256


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """Return a log of four entries."""
    path = tmp_path / "bank.runs"
    log = RunLog(path)
    for _ in range(2):
        noted(log)
        log.finish("job", "shop", 1024, 2048, 17)
    return path


def _files(used: Path) -> list[Path]:
    return [used / RUNS_FILE, used.with_name("bank.runs.kept")]


@pytest.mark.parametrize("flips", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", [0, 1], ids=["log", "kept"])
def test_no_flipped_bit_is_read_as_something_else(used: Path, which: int, flips: int) -> None:
    before = RunLog(used).entries()
    for bit in flipped(_files(used)[which], flips):
        try:
            assert RunLog(used).entries() == before, bit  # of bits that SQLite does not use
        except ConfigError:
            continue
    assert RunLog(used).entries() == before


@pytest.mark.parametrize("which", [0, 1], ids=["log", "kept"])
def test_what_is_cut_off_emptied_deleted_or_overwritten_is_refused(used: Path, which: int) -> None:
    before = RunLog(used).entries()
    for what in damaged(_files(used)[which]):
        try:
            assert RunLog(used).entries() == before, what  # the file's last bytes are not used
            assert "cut to" in what
        except ConfigError:
            continue
    assert len(RunLog(used).entries()) == 4


def test_deleted_log_and_older_copy_are_refused_with_what_to_do(used: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copy(used / RUNS_FILE, copy)
    noted(RunLog(used))
    shutil.copy(copy, used / RUNS_FILE)
    with pytest.raises(
        ConfigError, match=r"the run log is an older copy: 5 of 6 changes - at .*bank\.runs; bring back"
    ):
        RunLog(used)
    shutil.rmtree(used)
    with pytest.raises(ConfigError, match="A reset would forget how often partners aligned") as caught:
        RunLog(used)
    assert caught.value.public == "its run log cannot be used; it has the details"
    assert "bank.runs.kept" in {path.name.split(".until")[0] for path in set_aside(used)}
    assert RunLog(used).entries() == []


def test_an_entry_that_a_crash_left_unvouched_counts(used: Path) -> None:
    kept = used.with_name("bank.runs.kept").read_bytes()
    noted(RunLog(used))
    used.with_name("bank.runs.kept").write_bytes(kept)  # the crash came before it was written
    assert len(RunLog(used).entries()) == 5
    noted(RunLog(used))
    assert len(RunLog(used).entries()) == 6
