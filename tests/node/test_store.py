"""The node's database: what changes is kept whole, among threads, processes and kills, and damage is refused."""

from __future__ import annotations

import multiprocessing
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from flips import damaged, flipped
from treaty.errors import ConfigError, LocalProtocolError
from treaty.node.store import FILE, FINAL, TRANSITIONS, VERSION, AuditHead, JobRow, Store

JOB = JobRow("a1b2c3", b"proposal", b"signature", "bank", "train", total=60)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "state") as store:
        yield store


def test_a_job_is_kept_once_and_found_by_its_first_letters(store):
    assert store.add_job(JOB, event={"what": "received", "who": "bank"})
    assert not store.add_job(JobRow("a1b2c3", b"another", b"", "clinic", "train"), event={"what": "received"})
    store.add_job(JobRow("a1b2", b"", b"", "bank", "predict"))
    assert [job.id for job in store.jobs()] == ["a1b2c3", "a1b2"]
    assert store.job("a1b2c").proposal == b"proposal"
    assert store.job("a1b2").verb == "predict"  # the whole id of one, though another begins with it
    assert store.job("a1b2c3").created == pytest.approx(time.time(), abs=60)
    assert [entry.event for entry in store.audit()] == [{"what": "received", "job": "a1b2c3", "who": "bank"}]


@pytest.mark.parametrize(("prefix", "said"), [("", "no such"), ("f", "no such"), ("%", "no such"), ("a", "a1b2")])
def test_a_prefix_of_no_job_or_of_several_is_refused(store, prefix, said):
    store.add_job(JOB)
    store.add_job(JobRow("a1b2", b"", b"", "bank", "train"))
    with pytest.raises(ConfigError, match=said):
        store.job(prefix)


def test_a_change_and_its_entry_are_kept_together_or_not_at_all(store):
    store.add_job(JOB)
    changed = store.change("a1b2c3", state="approved", event={"what": "approved", "who": "anna"})
    assert (changed.state, store.job("a1b2c3")) == ("approved", changed)
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.change("a1b2c3", state="queued", event={"what": "queued", "epsilon": float("nan")})
    assert store.job("a1b2c3") == changed
    assert [entry.event["what"] for entry in store.audit()] == ["approved"]
    assert store.change("a1b2c3", rounds=7, attempt=2, reason="clinic is down").total == 60
    assert [job.rounds for job in store.jobs({"approved"})] == [7]
    assert store.jobs(FINAL) == []


@pytest.mark.parametrize("old", TRANSITIONS)
@pytest.mark.parametrize("new", [*TRANSITIONS, "unheard-of"])
def test_only_states_that_may_follow_are_taken(store, old, new):
    store.add_job(JobRow("a1", b"", b"", "bank", "train", state=old))
    if old not in FINAL and new in {old, *TRANSITIONS[old]}:
        assert store.change("a1", state=new, event={"what": new}).state == new
        return
    with pytest.raises(LocalProtocolError, match=f"'{old}' cannot take '{new}' - at job a1"):
        store.change("a1", state=new, event={"what": new})
    assert (store.job("a1").state, store.audit()) == (old, [])


def test_nothing_of_a_job_in_a_final_state_changes(store):
    store.add_job(JobRow("a1", b"", b"", "bank", "train", state="finished"))
    with pytest.raises(LocalProtocolError, match="'finished' cannot take a change"):
        store.change("a1", rounds=8)


def test_jobs_that_are_not_here_have_no_changes_and_no_views(store):
    for act in (lambda: store.change("a1", rounds=8), lambda: store.put_view("a1", "bank", b"")):
        with pytest.raises(LocalProtocolError, match="expected the id of a job, got 'a1'"):
            act()
    with pytest.raises(LocalProtocolError, match="expected a job's state, got 'odd'"):
        store.add_job(JobRow("a1", b"", b"", "bank", "train", state="odd"))


def test_the_newest_view_of_each_party_is_kept(store):
    store.add_job(JOB)
    for party, view in (("clinic", b"1"), ("bank", b"2"), ("clinic", b"3")):
        store.put_view(JOB.id, party, view)
    assert store.views(JOB.id) == {"bank": b"2", "clinic": b"3"}
    assert store.views("another") == {}


def test_commands_are_taken_once_in_order_and_again_where_handling_was_cut_off(store, tmp_path):
    with Store(tmp_path / "state", create=False) as other:
        other.command("a1", "approve", b"signed \xff")
        other.command("", "reload")
    commands = store.take_commands()
    assert [(command.job, command.command, command.argument) for command in [next(commands)]] == [
        ("a1", "approve", b"signed \xff")
    ]
    commands.close()  # as an error in the loop's body does
    assert [command.command for command in store.take_commands()] == ["approve", "reload"]
    assert list(store.take_commands()) == []


def test_changes_by_other_processes_are_noticed_and_own_ones_are_not(store, tmp_path):
    assert not store.changed()
    store.add_job(JOB)
    assert not store.changed()
    with Store(tmp_path / "state", create=False) as other:
        assert not store.changed()  # opening it changes nothing
        other.command("a1", "approve")
        assert store.changed()
        assert not store.changed()


def test_since_when_a_peer_is_up_or_down(store):
    assert store.set_peer("clinic", False, "nobody answers")
    since = store.peers()["clinic"].since
    assert not store.set_peer("clinic", False, "its certificate is another one")
    assert store.peers()["clinic"] == type(store.peers()["clinic"])(False, since, "its certificate is another one")
    assert store.set_peer("clinic", True)
    assert store.peers()["clinic"].up
    assert store.peers()["clinic"].since >= since


def test_a_peer_whose_audit_log_was_cut_or_written_anew_is_noticed(store):
    assert store.note_head("clinic", 3, b"three", b"s3") == ""
    assert store.note_head("clinic", 3, b"three", b"s3") == ""
    assert store.note_head("clinic", 9, b"nine", b"s9") == ""
    assert "had 9 entries and now has 8" in store.note_head("clinic", 8, b"eight", b"s8")
    assert "has another entry 9" in store.note_head("clinic", 9, b"new", b"s")
    assert store.heads() == {"clinic": AuditHead(9, b"nine", b"s9")}


def test_file_and_folder_are_the_owners_alone(store, tmp_path):
    store.note({"what": "started"})
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "state", *store.path.parent.iterdir()]
    }
    assert modes == {"state": 0o700, FILE: 0o600, f"{FILE}-wal": 0o600, f"{FILE}-shm": 0o600}
    with sqlite3.connect(store.path) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()


def test_a_command_makes_no_database(tmp_path):
    with pytest.raises(ConfigError, match="expected a node's database, got none"):
        Store(tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_version_is_refused(store, tmp_path):
    store.connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(ConfigError, match=f"version {VERSION}, got {VERSION + 1}.*newer one"):
        Store(tmp_path / "state")


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 300, b"SQLite format 3\0" + bytes(84)], ids=["text", "head"]
)
def test_another_file_is_refused_with_what_to_do(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged|version") as said:
        Store(tmp_path)
    if "damaged" in str(said.value):
        assert "bring back the newest copy" in str(said.value)
        assert "Leave the folder stores as it is" in str(said.value)


def test_other_tables_are_refused(store, tmp_path):
    store.connection.execute("DROP TABLE heads")
    with pytest.raises(ConfigError, match="damaged: other tables"):
        Store(tmp_path / "state")


@pytest.mark.parametrize("faults", [lambda file: flipped(file, 100), damaged], ids=["flipped", "damaged"])
def test_no_damage_is_met_by_another_error_than_a_plain_one(tmp_path, faults):
    with Store(tmp_path) as store:
        for number in range(30):
            store.add_job(JobRow(f"a{number}", b"p" * 300, b"", "bank", "train"), event={"what": "received"})
            store.put_view(f"a{number}", "clinic", b"v" * 100)
    refused = 0
    for _ in faults(tmp_path / FILE):
        for beside in ("-wal", "-shm"):
            (tmp_path / (FILE + beside)).unlink(missing_ok=True)
        try:
            with Store(tmp_path) as store:
                store.jobs()
                store.views("a1")
                refused += bool(store.verify_audit())
        except ConfigError:
            refused += 1
    assert refused > 5  # most bytes are proposals and views, or read by nobody


def _work(folder, name, times):
    """Add jobs and change them, beside others who do the same."""
    with Store(folder) as store:
        for number in range(times):
            job = f"{name}-{number}"
            store.add_job(JobRow(job, b"", b"", name, "train"), event={"what": "submitted", "who": name})
            store.change(job, state="approved", event={"what": "approved"})
            store.command(job, "cancel")
            assert store.job(job).state == "approved"
        return store.verify_audit()


def test_processes_and_threads_change_it_at_once(tmp_path):
    folder, found = tmp_path / "state", []
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        others = [pool.submit(_work, folder, f"process {k}", 100) for k in range(3)]
        with Store(folder) as store:
            threads = [threading.Thread(target=lambda k=k: found.append(_in_thread(store, f"t{k}"))) for k in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [other.result() for other in others] == [[], [], []]
            assert found == [True] * 3
            assert store.verify_audit() == []
            assert store.head().seq == 2 * 3 * 100 + 3 * 15
            assert len(list(store.take_commands())) == 3 * 100
            assert store.changed()


def _in_thread(store, name):
    for number in range(15):
        store.note({"what": "peer up", "who": name, "number": number})
    return store.verify_audit() == []


def test_who_has_begun_to_change_it_holds_it(store, tmp_path):
    with Store(tmp_path / "state") as other:
        waiting = threading.Thread(target=other.note, args=[{"what": "second"}])
        with store.transaction() as db:
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive()
            assert db.execute("SELECT COUNT(*) FROM audit").fetchone() == (0,)
        waiting.join()
    assert [entry.event["what"] for entry in store.audit()] == ["second"]


KILLED = """
import sys
from pathlib import Path
from treaty.node.store import JobRow, Store
store = Store(Path(sys.argv[1]))
store.add_job(JobRow("a1", b"", b"", "bank", "train", state="running"))
begin = store.job("a1").rounds
for rounds in range(begin + 1, 100000):
    store.change("a1", rounds=rounds, event={"what": "round", "rounds": rounds})
    print(rounds, flush=True)
"""


def test_after_a_kill_there_are_both_a_change_and_its_entry_or_neither(tmp_path):
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(5)]
        process.send_signal(signal.SIGKILL)
        said += [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        with Store(tmp_path) as store:
            rounds = store.job("a1").rounds
            assert rounds in {said[-1], said[-1] + 1}  # what was said to be done is there
            assert store.audit()[-1].event == {"what": "round", "job": "a1", "rounds": rounds}
            assert store.head().seq == rounds
            assert store.verify_audit() == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use the node's database: .*Not a directory"):
        Store(tmp_path / "file" / "state")


def test_a_damaged_text_is_not_quoted(store):
    store.add_job(JOB)
    store.connection.execute("UPDATE jobs SET reason = CAST(x'736563726574ff' AS TEXT)")
    with pytest.raises(ConfigError, match="damaged: a text is not UTF-8") as said:
        store.jobs()
    assert "secret" not in str(said.value)
