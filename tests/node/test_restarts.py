"""A node that was killed at a bad moment and is started again: what it still knows, and what it removes."""

import fcntl
import json
import os
import stat
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from node.hostile import JOB, content, signed
from node.nodes import columns_of, organisations, wait_for
from node.shop import Talk
from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.errors import CryptoError, DataError, LocalProtocolError, PeerTimeout
from treaty.node import attempts, worker
from treaty.node import settings as node_settings
from treaty.node.cards import verify
from treaty.node.identity import load_own, rotate, trust
from treaty.node.jobs import Jobs
from treaty.node.proposals import JobStatus, id_of, statement
from treaty.node.service import Node
from treaty.node.settings import JobFiles, clear_checkpoints, load_settings
from treaty.node.store import JobRow, Store
from treaty.node.worker import WorkerEvent
from treaty.runs.job_files import decoded_job

BOTH = ("bank", "shop")


def test_the_log_of_a_jobs_process_is_its_owners_alone_from_the_start(tmp_path, monkeypatch):
    seen = []

    def begun(*_, stderr, **__):
        seen.append(stat.S_IMODE(os.fstat(stderr.fileno()).st_mode))
        raise OSError("no process here")

    monkeypatch.setattr(attempts.subprocess, "Popen", begun)
    before = os.umask(0)
    try:
        with pytest.raises(OSError, match="no process"):
            attempts.Process(None, tmp_path / "job.log", print)
    finally:
        os.umask(before)
    assert seen == [0o600]


class Bank:
    """The folder of a node that leads, which is not running, and the node once it is started again."""

    def __init__(self, folder):
        self.organisation = organisations(folder, BOTH, columns_of(BOTH, 60), listening=["shop"])["bank"]
        self.settings, self.state, self.node = load_settings(self.organisation.settings), self.organisation.state, None
        proposal, signature = signed(load_own(self.settings.keys, "bank"), content())
        self.job = id_of(proposal)
        self.row = JobRow(self.job, proposal, signature, "bank", "train", total=5)

    def killed(self, **fields):
        """Leave the database as a killed node has left it."""
        with Store(self.state) as store:
            store.add_job(replace(self.row, **fields))

    def started(self):
        """Start the node again, without a thread of its own."""
        self.node = Node(self.settings)
        self.node.jobs.load(all_states=True)
        return self.node

    def heard(self, **fields):
        """Have the node hear what the shop's says of the job; return the state that it is in then."""
        view = JobStatus(job=self.job, count=time.monotonic_ns() % (1 << 40), **{"state": "waiting", **fields})
        self.node.jobs.seen("shop", Talk(), view)
        return self.looked()

    def looked(self):
        self.node._look()
        return self.node.store.job(self.job).state

    def report(self):
        file = JobFiles(self.state, self.job).report("bank")
        file.parent.mkdir(parents=True)
        file.write_text("{}")


@pytest.fixture
def bank(tmp_path):
    made = Bank(tmp_path)
    yield made
    if made.node is not None:
        made.node._shut()


def test_a_job_whose_process_has_ended_well_is_finished_without_anybody(bank):
    bank.killed(state="waiting", attempt=2, kept=2, done=2)
    bank.started()
    assert bank.looked() == "finished"


def test_a_job_whose_part_was_kept_is_finished_once_the_others_have_theirs(bank):
    bank.killed(state="running", attempt=2)
    bank.report()
    at = bank.started().jobs.standings[bank.job]
    assert at.row.kept == 2
    assert bank.looked() == "waiting"  # nothing was heard of the shop yet
    assert bank.heard(runs=2) == "waiting"  # its process still plays
    assert bank.heard(ended=2, kept=2) == "finished"
    assert at.row.attempt == 2


@pytest.mark.parametrize("left", ["", "bank.report.staged.json", "bank.staged"])
def test_a_job_whose_part_is_not_all_in_its_place_is_played_again(bank, left):
    bank.killed(state="running", attempt=2, kept=1)
    if left:
        bank.report()
        (JobFiles(bank.state, bank.job).report("bank").parent / left).write_text("")
    bank.started()
    assert bank.heard(ended=2, kept=2) == "waiting"
    bank.node.exchange.is_up = lambda peer: True
    assert bank.looked() == "queued"
    assert bank.node.jobs.standings[bank.job].asks == 3


def test_an_attempt_begins_without_the_report_of_the_one_before(bank):
    bank.killed(state="waiting", attempt=1)
    bank.report()
    node = bank.started()
    assert JobFiles(bank.state, bank.job).has_part("bank")
    at = node.jobs.standings[bank.job]
    attempts.order_of(at, node.jobs.own, node.jobs.trusted(), bank.settings, {}, Path("."))
    assert not JobFiles(bank.state, bank.job).has_part("bank")


def test_a_process_is_told_the_cluster_of_its_own_data_set(bank):
    bank.killed(state="waiting", attempt=1)
    node = bank.started()
    at, data = node.jobs.standings[bank.job], bank.settings.data
    job, proposal = at.job, at.proposal
    name = job.parties["bank"].table
    settings = msgspec.structs.replace(
        bank.settings, data=data | {name: msgspec.structs.replace(data[name], cluster="ray", cluster_workers=3)}
    )
    for verb in ("train", "predict"):
        if verb == "predict" and job.parties["bank"].predict_table is None:
            continue
        at.proposal = msgspec.structs.replace(proposal, verb=verb)
        order = attempts.order_of(at, node.jobs.own, node.jobs.trusted(), settings, {}, Path("."))
        told = {party: member.cluster for party, member in decoded_job(order.job.encode()).parties.items()}
        assert told == dict.fromkeys(job.parties) | {"bank": "ray" if verb == "train" else None}


def test_what_a_process_has_kept_and_done_is_in_the_database(bank):
    bank.killed(state="running", attempt=1)
    node = bank.started()
    at = node.jobs.standings[bank.job]
    for end, numbers in (("again", (0, 0)), ("again", (3, 0)), ("done", (3, 3))):
        at.runs = 3
        node._happened(bank.job, 3, WorkerEvent(end=end, said="it was killed"))
        row = node.store.job(bank.job)
        assert (row.kept, row.done) == numbers
        assert row.state == "waiting"
        if not numbers[0]:
            bank.report()


@pytest.mark.parametrize("when", ["at the start", "at the job's end"])
def test_checkpoints_go_once_the_process_of_the_killed_node_has_ended(bank, when):
    """Such a process has seconds to end, in which it may write its checkpoint, in a folder that it makes again."""
    bank.killed(state="failed" if when == "at the start" else "waiting")
    folder = JobFiles(bank.state, bank.job).checkpoints
    folder.mkdir(parents=True)
    bank.node = node = Node(bank.settings)
    running = threading.Thread(target=node.run)
    with JobFiles(bank.state, bank.job).lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        running.start()
        wait_for("start", lambda: any(entry.event["what"] == "node started" for entry in node.store.audit()), 10.0)
        if when == "at the job's end":
            wait_for("job", lambda: bank.job in node.jobs.standings, 10.0)
            with node.jobs.lock:
                node.jobs.end(bank.job, "cancelled")
        time.sleep(0.5)
        folder.mkdir(exist_ok=True)
        (folder / "bank.checkpoint").write_text("late")
    try:
        wait_for("end of checkpoints", lambda: not folder.exists(), 10.0)
    finally:
        node.stop()
        running.join(30.0)
        bank.node = None


def test_checkpoints_that_a_process_never_lets_go_of_are_left_with_a_word(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(node_settings, "LOCK_TIMEOUT", 0.2)
    JobFiles(tmp_path, "a1").checkpoints.mkdir(parents=True)
    with JobFiles(tmp_path, "a1").lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        clear_checkpoints(tmp_path, "a1")
        assert "checkpoints of job a1 are left" in caplog.text
    clear_checkpoints(tmp_path, "a1")
    assert not JobFiles(tmp_path, "a1").checkpoints.exists()


def test_the_sockets_of_an_attempt_go_with_it(bank):
    bank.killed(state="running", attempt=1)
    node = bank.started()
    at = node.jobs.standings[bank.job]
    sockets = node.door.open_job(bank.job, ["shop"])
    folder = sockets["shop"].parent
    assert sockets["shop"].exists()
    (folder / "online").touch()  # what a service's process listens at
    at.runs = 1
    node._happened(bank.job, 1, WorkerEvent(end="again", said="x"))
    assert not folder.exists()
    assert node.door.open_job(bank.job, ["shop"])["shop"].exists()  # another attempt


@pytest.mark.parametrize("further", [False, True])
def test_a_job_fails_after_eight_attempts_that_brought_nothing_and_not_after_others(bank, monkeypatch, further):
    begun = []

    def process(order, errors, on_event):
        begun.append(order)
        done = 1 if further and len(begun) == 5 else 0
        on_event(WorkerEvent(end="again", said="it was killed", public="it was cut off", done=done))
        return SimpleNamespace(pid=1, end=lambda: None)

    monkeypatch.setattr("treaty.node.attempts.Process", process)
    bank.killed(state="queued")
    bank.started().exchange.is_up = lambda peer: True
    while bank.job in bank.node.jobs.standings and len(begun) < 30:
        at = bank.node.jobs.standings[bank.job]
        at.not_before = 0.0
        bank.looked()
        bank.heard(ready=at.asks)
    assert len(begun) == (12 if further else 8)  # the fifth begins a new count
    row = bank.node.store.job(bank.job)
    assert row.state == "failed"
    assert row.reason == "bank: no progress in 8 attempts; the last one: it was cut off"


# new keys


def restarted(shop):
    """Return the jobs as the node has them after another start."""
    shop.jobs.verdicts.close()
    own = load_own(shop.settings.keys, "shop")
    shop.jobs = Jobs(shop.settings, own, shop.store, lambda *_: None, lambda _: None, lambda: None)
    shop.jobs.load(all_states=True)
    return shop.jobs


@pytest.mark.parametrize("state", ["approved", "queued", "waiting"])
def test_a_node_with_new_keys_signs_its_approvals_again(shop, state):
    job, proposed = shop.proposed(), shop.proposed()
    shop.jobs._approve(shop.jobs.standings[job], "a person")
    if state != "approved":
        shop.jobs.change(shop.jobs.standings[job], state=state)
    old = shop.jobs.standings[job].approvals["shop"]
    card = rotate(shop.settings.keys, "shop")
    at = restarted(shop).standings[job]
    assert at.approvals["shop"] != old
    assert verify(card, at.approvals["shop"], statement("approve", job, "shop"))
    assert shop.jobs.standings[proposed].approvals == {}  # what nobody has approved stays so
    assert shop.jobs.standings[proposed].row.state == "proposed"
    entries = [event["job"] for event in shop.events() if event["what"] == "approval signed again"]
    assert entries == [job]
    assert restarted(shop).standings[job].approvals == at.approvals
    assert entries == [event["job"] for event in shop.events() if event["what"] == "approval signed again"]


def test_an_approval_under_a_partners_new_keys_counts_in_place_of_the_old_one(shop):
    job = shop.proposed()
    old = shop.approval(job, "bank")
    shop.seen(job, signed={"bank": old})
    card = rotate(shop.made["bank"].folder / "keys", "bank")
    trust(shop.settings.keys, card)
    shop.own["bank"] = load_own(shop.made["bank"].folder / "keys", "bank")
    new = shop.approval(job, "bank")
    assert restarted(shop).standings[job].approvals == {}  # the old one is none any more
    shop.seen(job, signed={"bank": new})
    assert shop.jobs.standings[job].approvals == {"bank": new}
    shop.seen(job, signed={"bank": old})
    assert shop.jobs.standings[job].approvals == {"bank": new}


def test_a_node_that_goes_on_passes_a_partners_new_approval_on(shop):
    job = shop.proposed()
    shop.seen(job, signed={"bank": shop.approval(job, "bank")})
    trust(shop.settings.keys, rotate(shop.made["bank"].folder / "keys", "bank"))
    shop.own["bank"] = load_own(shop.made["bank"].folder / "keys", "bank")
    new = shop.approval(job, "bank")
    shop.jobs._cards = -1e9, {}  # they are read once a second
    shop.seen(job, signed={"bank": new})
    assert shop.jobs.view(job).signed == {"bank": new}
    shop.jobs.verdicts.close()


def test_a_proposal_is_sent_with_a_signature_by_the_keys_of_today(bank):
    bank.killed(state="approved")
    card = rotate(bank.settings.keys, "bank")
    talk = Talk()
    bank.started().jobs.wanted("shop", talk, bank.job)
    assert verify(card, talk.said[0].signature, statement("submit", bank.job, "bank"))


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (RoundVoid("expected 3 users or more to come to the domain of edge0, got 2"), "again"),
        (PeerTimeout("shop", "shop is silent"), "again"),
        (OSError("no space left"), "again"),
        (CryptoError("a sum is wrong"), "wrong"),
        (LocalProtocolError("it has closed its channel"), "wrong"),
        (DataError("a label is missing"), "wrong"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_job_is_tried_again_where_others_or_the_system_may_be_the_reason(error, end):
    found = worker._failure(error)
    assert found.end == end
    assert str(error) == found.said


def test_the_log_of_a_process_that_is_told_to_end_says_so_in_words(monkeypatch, tmp_path, caplog):
    order = worker.WorkerOrder(
        job=decoded_job(json.dumps(JOB).encode()).encoded().decode(), name="bank", verb="train", resume=False,
        log=str(tmp_path / "log"), lock=str(tmp_path / "lock"), result="", online="",
    )  # fmt: skip
    monkeypatch.setattr(worker, "line_of_parent", lambda: msgspec.json.encode(order))
    monkeypatch.setattr(worker, "_play", lambda *_: sys.exit(143))  # as `ended_by_signals` has SIGTERM do
    monkeypatch.setattr(worker, "_log_to", lambda file: None)
    monkeypatch.setattr(worker.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        worker.main()
    assert caplog.messages == ["bank: ended before it was done: its process was terminated"]
