"""What an approval bounds, whatever the leading node asks for: epsilon of one job and of all, attempts, rounds."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest

from node.hostile import JOB, content, signed
from node.nodes import columns_of, organisations
from node.shop import Talk
from systems.federboost_horizontal.playing import dealt
from treaty.errors import BudgetSpent, PeerLost
from treaty.messaging.certificates import Signer
from treaty.models.checkpoints import ledger_folder
from treaty.node import worker
from treaty.node.attempts import MOST_TRIES
from treaty.node.identity import load_own, revoke, sign
from treaty.node.proposals import JobStatus, Proposed, id_of, statement
from treaty.node.service import Node
from treaty.node.settings import load_settings
from treaty.node.worker import WorkerEvent
from treaty.privacy.ledger import Ledger, per_person
from treaty.runs.job_files import decoded_job
from treaty.runs.party import _training_inputs
from treaty.runs.rows import TrainingTables
from treaty.runs.threads import RunTerms, play

BOTH = ("bank", "shop")
NOISY = {
    "name": "a job", "active": "bank", "label": "y", "protocol": "federboost-horizontal",
    "parties": {name: {"table": "rows"} for name in BOTH}, "federboost-horizontal": {"epsilon_total": 1.0},
    "boosting": {"n_estimators": 3, "max_depth": 2, "max_bin": 8},
}  # fmt: skip


class Led:
    """The shop's node, without a thread of its own, and the bank's, which says whatever it likes.

    `playing` is called in place of a process, with its order; what it raises is how the attempt ends.
    """

    def __init__(self, folder, monkeypatch, job=JOB, policy="approve = true"):
        made = organisations(folder, BOTH, columns_of(BOTH, 60), policy=policy, listening=["shop"])
        self.own = {name: load_own(one.folder / "keys", name) for name, one in made.items()}
        self.settings, self.talk, self.orders, self.playing = load_settings(made["shop"].settings), Talk(), [], None
        proposal, signature = signed(self.own["bank"], content(job))
        self.job, self.number, self.attempt = id_of(proposal), 0, 0
        monkeypatch.setattr("treaty.node.attempts.Process", self._process)
        self.start()
        self.node.jobs.proposed("bank", self.talk, Proposed(proposal, signature))
        self.node.jobs._approve(self.at, "a person")

    def start(self):
        """Start the node, which has the database and the ledgers of the one before."""
        self.node = Node(self.settings)
        self.node.jobs.load(all_states=True)
        self.node.exchange.is_up = lambda peer: True

    def stop(self):
        self.node._shut()

    @property
    def at(self):
        return self.node.jobs.standings[self.job]

    @property
    def row(self):
        return self.node.store.job(self.job)

    def _process(self, order, errors, on_event):
        self.orders.append(order)
        try:
            self.playing(order, on_event)
        except BaseException as error:
            on_event(worker._failure(error))
        return SimpleNamespace(pid=1, end=lambda: None, wait=lambda seconds: None)

    def hear(self, **fields):
        """Have the node hear what the bank's says of the job."""
        self.number += 1
        signature = sign(self.own["bank"], statement("approve", self.job, "bank"))
        view = JobStatus(job=self.job, count=self.number, state="running", signed={"bank": signature}, **fields)
        self.node.jobs.seen("bank", self.talk, view)
        for _ in range(2):
            self.node._look()

    def attempts(self, number):
        """Have the bank ask for so many attempts; return how many the shop has begun."""
        before = len(self.orders)
        for _ in range(number):
            self.attempt += 1
            self.hear(asks=self.attempt)
            self.hear(runs=self.attempt)
            self.hear(ended=self.attempt)
        return len(self.orders) - before


@pytest.fixture
def led(tmp_path, monkeypatch):
    made = []

    def of(*given, **fields):
        made.append(Led(tmp_path, monkeypatch, *given, **fields))
        return made[-1]

    yield of
    for one in made:
        one.stop()


class GoneAway(Exception):
    """The leader has seen enough of an attempt."""


def play_with_a_leader_that_leaves(order, on_event):
    """Train with a leader that ends each attempt after its first round, and begins the next one anew."""
    parts, _, classes = dealt("binary", 2, rows=200)
    job, rows = decoded_job(order.job.encode()), dict(zip(BOTH, parts.values(), strict=True))
    roles = job.roles()

    def leave(done, part):
        if done == 1:
            raise GoneAway

    def role(name):
        def run(party):
            tables = TrainingTables(rows[name], classes)
            terms = RunTerms(job.system, *job.settings(), roles)
            inputs = terms.inputs(party, 2, progress=leave if name == "bank" else None)
            inputs = _training_inputs(inputs, job, tables, None)
            if name == "bank":  # its own ledger is its own business
                inputs.store = None
            inputs.alone = False
            return job.system.train[roles.of[name]](inputs)

        return run

    play({name: role(name) for name in BOTH}, job.system.links(roles, None), job=job.name, protocol=job.protocol)


@pytest.mark.parametrize("rule", ["most_epsilon", "most_epsilon_total"])
def test_five_attempts_under_a_budget_of_one_spend_at_most_one(led, monkeypatch, rule):
    monkeypatch.setattr("treaty.runs.party.signer", lambda *_: Signer())
    shop = led(NOISY, policy=f"approve = true\n{rule} = 1.0")
    shop.playing = play_with_a_leader_that_leaves
    begun = shop.attempts(5)
    paid = per_person(Ledger(ledger_folder(shop.settings.data["rows"].store, "shop", "noise")).entries())
    assert 0.9 < paid <= 1.0
    assert begun == 1
    assert shop.row.state == "failed"
    assert shop.row.reason == f"shop: {BudgetSpent.public}"
    assert "and epsilon 1 " in [e.event["why"] for e in shop.node.store.audit(job=shop.job) if "why" in e.event][-1]


def test_a_leader_cannot_have_its_attempts_counted_as_other_jobs(led, monkeypatch):
    """The ledger takes the model's id off an entry's name to find its job: one that is no id would stay."""
    monkeypatch.setattr("treaty.runs.party.signer", lambda *_: Signer())
    made = (f"{number}{'z' * 31}" for number in range(9))
    shop = led(NOISY, policy="approve = true\nmost_epsilon = 1.0")
    shop.playing = play_with_a_leader_that_leaves
    token = "treaty.systems.federboost_horizontal.setup.secrets.token_hex"
    monkeypatch.setattr(token, lambda count: next(made))
    shop.attempts(5)
    ledger = ledger_folder(shop.settings.data["rows"].store, "shop", "noise")
    assert not ledger.exists() or per_person(Ledger(ledger).entries()) <= 1.0


def test_a_budget_holds_within_an_attempt_whatever_was_asked_before_it(led, monkeypatch):
    """Another job may spend between the question and the release: the ledger itself refuses."""
    shop = led(NOISY, policy="approve = true\nmost_epsilon_total = 1.0")
    shop.playing = play_with_a_leader_that_leaves
    monkeypatch.setattr("treaty.runs.party.signer", lambda *_: Signer())
    monkeypatch.setattr(shop.node.jobs, "check_budgets", lambda at: None)
    shop.attempts(5)
    assert per_person(Ledger(ledger_folder(shop.settings.data["rows"].store, "shop", "noise")).entries()) <= 1.0
    assert shop.row.reason == f"shop: {BudgetSpent.public}"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_follower_that_is_asked_for_hundreds_of_attempts_takes_part_in_eight(led, restarted):
    shop = led()
    shop.playing = lambda order, on_event: on_event(WorkerEvent(end="again", said="x"))
    begun = shop.attempts(3)
    if restarted:  # its process counts nothing that its database does not
        shop.stop()
        shop.start()
    begun += shop.attempts(500 if not restarted else 20)
    assert begun == MOST_TRIES
    assert (shop.row.state, shop.row.reason) == ("failed", "shop: no progress in 8 attempts")


def test_attempts_that_get_further_are_not_counted_against_a_job(led):
    shop, done = led({**JOB, "boosting": {"n_estimators": 200}}), iter(range(1, 100))
    shop.playing = lambda order, on_event: on_event(WorkerEvent(end="again", said="x", done=next(done)))
    assert shop.attempts(30) == 30
    assert shop.row.state == "waiting"
    assert shop.row.rounds == 30


@pytest.mark.parametrize(("rounds", "most"), [(40, 50), (4, 12)])
def test_attempts_begun_anew_take_no_more_rounds_than_a_job_has_and_a_few(led, monkeypatch, rounds, most):
    """Else each new attempt would have a passive party answer as many trees as the whole job has."""
    shop, answered = led({**JOB, "boosting": {"n_estimators": rounds}}), []

    def train(job, name, progress, **options):
        for done in range(rounds):
            progress(done, None)
            answered.append(done)  # the tree that begins
        raise PeerLost("bank", "bank has gone")

    monkeypatch.setattr(worker, "train_party", train)
    shop.playing = lambda order, on_event: run_worker(order, on_event, monkeypatch)
    shop.attempts(20)
    assert rounds < len(answered) <= most
    assert shop.row.state == "failed"
    assert shop.row.reason.startswith(f"shop: its attempts have taken {most} rounds, but the job has {rounds}")


def run_worker(order, on_event, monkeypatch):
    """Run what a node's process runs, in this one; hand on what it writes."""

    class Ended(Exception):
        pass

    def end(code):
        raise Ended

    out = io.TextIOWrapper(io.BytesIO())
    with monkeypatch.context() as patched, suppress(Ended):
        patched.setattr(worker, "line_of_parent", lambda: msgspec.json.encode(order))
        patched.setattr(worker, "_log_to", lambda file: None)
        patched.setattr(worker.gc, "freeze", lambda: None)
        patched.setattr(worker.os, "_exit", end)
        patched.setattr(sys, "stdout", out)
        worker.main()
    for line in out.buffer.getvalue().splitlines():
        on_event(msgspec.json.decode(line, type=WorkerEvent))


def test_a_process_ends_when_a_partners_card_is_revoked(led):
    shop, ended = led(), []
    shop.playing = lambda order, on_event: None
    shop.attempt += 1
    shop.hear(asks=1)
    shop.hear(runs=1)
    shop.at.process = SimpleNamespace(pid=1, end=lambda: ended.append(1), wait=lambda seconds: None)
    shop.node._look()
    assert ended == []
    revoke(shop.settings.keys, "bank")
    shop.node.jobs._cards = -1e9, {}  # they are read once a second
    shop.node._look()
    assert ended == [1]
    assert shop.at.ending
    shop.node._look()
    assert ended == [1]
