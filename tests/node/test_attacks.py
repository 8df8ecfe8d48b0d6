"""What a trusted peer, or anybody, may try with a node: proposals, approvals, views, texts, floods. It stays up."""

import os
import time
from types import SimpleNamespace

import msgspec
import pytest

from node.hostile import JOB, Peer, content, dialled, is_hung_up, mutated, rss, signed, without_side_effects
from node.nodes import columns_of, organisations, wait_for
from node.shop import Shop
from pace import within
from treaty.node.attempts import tables_of
from treaty.node.identity import sign
from treaty.node.job_views import verdict_on
from treaty.node.policy import DataSet, Policy
from treaty.node.proposals import Back, HeadNote, Hello, JobStatus, Proposed, Wanted, data_sets, id_of, statement
from treaty.node.service import Node
from treaty.node.settings import load_settings

NAMES = ("bank", "shop", "lab")
TEXTS = [
    "[/]",
    "[bold]x[/bold]",
    "[link=file:///etc/passwd]x[/link]",
    "<script>alert(1)</script>",
    "'; DROP TABLE jobs; --",
]


# proposals


def test_a_fair_proposal_is_kept(shop):
    job = shop.proposed()
    assert shop.jobs.standings[job].row.submitter == "bank"
    assert shop.talk.said == []


def test_a_known_proposal_is_no_second_job_also_after_it_has_ended(shop):
    proposal, signature = signed(shop.own["bank"], content())
    for _ in range(3):
        shop.jobs.proposed("bank", shop.talk, Proposed(proposal, signature))
    shop.jobs.end(id_of(proposal), "rejected", "no")
    shop.jobs.proposed("bank", shop.talk, Proposed(proposal, signature))
    assert shop.jobs.standings == {}
    assert len(shop.store.jobs()) == 1


@pytest.mark.parametrize("days", [-31, 2])
def test_an_old_proposal_or_one_from_the_future_is_refused(shop, days):
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86400 * days))
    shop.proposed(submitted=when)
    shop.refusal()
    assert "of the last 30 days" in shop.events()[-1]["why"]


@pytest.mark.parametrize("by", ["lab", "shop"])
def test_a_proposal_that_another_has_signed_is_refused(shop, by):
    shop.proposed(by=by)
    assert "signed by bank" in shop.refusal()


def test_a_signature_of_something_else_is_none(shop):
    proposal = content()
    for what, job, who in [
        ("approve", id_of(proposal), "bank"),
        ("submit", "0" * 64, "bank"),
        ("submit", id_of(proposal), "lab"),
    ]:
        signature = sign(shop.own["bank"], statement(what, job, who))
        shop.jobs.proposed("bank", shop.talk, Proposed(proposal, signature))
        assert "signed by bank" in shop.refusal()


def test_a_peer_proposes_its_own_jobs_alone(shop):
    """Also not one that another has signed: a copy of what lab proposed to somebody else."""
    for by, refused in (("bank", "bank may only propose jobs whose active party it is"), ("lab", "signed by bank")):
        shop.proposed({**JOB, "active": "lab", "parties": {**JOB["parties"], "lab": {"table": "rows"}}}, by=by)
        assert refused in shop.refusal()
    shop.proposed({**JOB, "active": "shop"})
    assert "bank may only propose jobs whose active party it is" in shop.refusal()


def test_a_job_without_this_party_is_refused(shop):
    shop.proposed({**JOB, "parties": {"bank": {"table": "rows"}, "lab": {"table": "rows"}}})
    assert "shop takes no part in the job" in shop.refusal()


@pytest.mark.parametrize("active", ["nobody", "", "../bank", "bank\n"])
def test_an_active_party_that_takes_no_part_is_refused(shop, active):
    shop.proposed({**JOB, "active": active})
    shop.refusal()


def test_a_peer_has_its_share_of_jobs_and_others_have_theirs(tmp_path):
    shop = Shop(tmp_path)
    limited = msgspec.structs.replace(shop.settings, limits=msgspec.structs.replace(shop.settings.limits, max_queued=3))
    shop.jobs.settings = limited
    for _ in range(3):
        assert shop.proposed() in shop.jobs.standings
    shop.proposed()
    assert "bank has 3 jobs" in shop.refusal()
    parties = {"lab": {"table": "rows"}, "shop": {"table": "rows"}}
    assert shop.proposed({**JOB, "active": "lab", "parties": parties}, "lab") in shop.jobs.standings
    shop.jobs.verdicts.close()
    shop.store.close()


def test_a_peer_has_a_few_trials_a_day_and_jobs_besides(shop):
    """Each has the table read, and tells something of it."""
    limits = msgspec.structs.replace(shop.settings.limits, max_checks=2)
    shop.jobs.settings = msgspec.structs.replace(shop.settings, limits=limits)
    for _ in range(2):
        shop.jobs.end(shop.proposed(trial=True), "rejected")
    shop.proposed(trial=True)
    assert "has checked its tables 2 times for bank within a day" in shop.refusal()
    assert shop.proposed() in shop.jobs.standings
    parties = {"lab": {"table": "rows"}, "shop": {"table": "rows"}}
    lab = {**JOB, "active": "lab", "parties": parties}
    assert shop.proposed(lab, "lab", trial=True) in shop.jobs.standings


def test_a_trial_tells_a_peer_of_rules_and_that_tables_will_not_do_and_nothing_else(shop):
    """Which check of a table failed, of its labels or its ids say, is told to its owner alone."""

    def judged(**fields):
        job = shop.proposed(trial=True, **fields)
        reason = ""

        def ended():
            nonlocal reason
            if job in shop.jobs.standings:
                shop.jobs.bring_on(shop.jobs.standings[job])
            reason = shop.store.job(job).reason
            return shop.store.job(job).state == "rejected"

        wait_for("verdict", ended, 20.0)
        return reason, [event.get("why") for event in shop.events() if event.get("job") == job][-1]

    (shop.made["shop"].folder / "rows.csv").write_text("id,shop_0\n1,one\n1,2\n")
    told, noted = judged()
    assert told == "shop: would not take part: its tables cannot be used"
    assert noted.startswith("table: ")
    assert "shop_0" in noted or "id" in noted
    told, noted = judged(job={**JOB, "protocol": "fedxgboost-smm", "fedxgboost-smm": {"allow_exact_sums": True}})
    assert told == "shop: would not take part: by its policy: consents"
    assert "allow_exact_sums" in noted


def test_a_query_is_not_run_for_a_peer_that_its_policy_does_not_name(shop, monkeypatch):
    """A table is neither read; running queries is what anybody could make a database busy with."""
    fetched = []
    monkeypatch.setattr(DataSet, "fetch", lambda data_set, to=None: fetched.append(data_set.name))
    rows = msgspec.structs.replace(shop.settings.data["rows"], policy=Policy(peers=["lab"]))
    settings = msgspec.structs.replace(shop.settings, data={"rows": rows})
    job = shop.jobs.standings[shop.proposed()].job
    assert not verdict_on(settings, ["bank", "lab"], job, "train").allowed
    assert fetched == []


def test_a_peer_is_dialled_back_for_its_own_jobs_alone(shop):
    dialled_back = []
    door = SimpleNamespace(dial_back=lambda *asked: dialled_back.append(asked[0]))
    node, back = SimpleNamespace(jobs=shop.jobs, door=door), Back("0" * 64, shop.proposed())
    for peer in ("lab", "bank"):
        Node._handle(node, peer, shop.talk, back)  # type: ignore[arg-type]
    assert dialled_back == ["bank"]


def test_a_peers_proposal_imports_nothing(shop):
    with without_side_effects() as imported:
        shop.proposed({**JOB, "protocol": "antigravity:fly"})
    assert imported == []
    shop.refusal()


@pytest.mark.parametrize(
    "job",
    [
        {**JOB, "timeout": "9" * 5000 + "d"},
        {**JOB, "timeout": "9" * 900 + "d"},
        {**JOB, "protocol": ".:x"},
        {**JOB, "classes": 2**70},
        {**JOB, "boosting": {"n_estimators": 2**70}},
        {**JOB, "group": "y", "task": "ranking", "label": ""},
        "[" * 100_000,
        "\x00",
        "{}",
    ],
    ids=range(9),
)
def test_no_proposal_raises_anything_in_the_node(shop, job):
    shop.proposed(job)
    assert len(shop.talk.said) + len(shop.jobs.standings) == 1


# approvals and views


def test_an_approval_counts_for_its_job_and_party_alone(shop):
    job, other = shop.proposed(), shop.proposed()
    at = shop.jobs.standings[job]
    wrong = [
        {"bank": shop.approval(job, "bank", of=other)},
        {"bank": shop.approval(job, "bank", what="submit")},
        {"bank": shop.approval(job, "bank", what="reject")},
        {"bank": shop.approval(job, "bank", who="shop")},
        {"bank": shop.approval(job, "lab", who="bank")},
        {"shop": shop.approval(job, "bank", who="shop")},
        {"shop": shop.approval(job, "bank")},
        {"lab": shop.approval(job, "lab")},
        {"bank": bytes(64)},
        {"bank": b"\xff" * 64},
        {"": bytes(64), "../x": bytes(64)},
    ]
    for signed_by in wrong:
        shop.seen(job, signed=signed_by)
        assert at.approvals == {}
    shop.seen(job, signed={"bank": shop.approval(job, "bank")})
    assert list(at.approvals) == ["bank"]


def test_a_good_approval_is_not_replaced(shop):
    job = shop.proposed()
    good = shop.approval(job, "bank")
    shop.seen(job, signed={"bank": good})
    shop.seen(job, signed={"bank": bytes(64)})
    assert shop.jobs.standings[job].approvals["bank"] == good


def test_a_lead_that_runs_what_not_all_have_approved_runs_alone(shop):
    """Whatever it says of attempts, and of approvals, this party's process begins with its own approval alone."""
    job = shop.proposed()
    at = shop.jobs.standings[job]
    for state in ("approved", "queued", "running", "waiting", "finished"):
        shop.seen(job, state=state, asks=1, ready=1, runs=1, done=1, signed={"bank": shop.approval(job, "bank")})
        assert not shop.jobs.bring_on(at)
        assert at.row.state == "proposed"
    shop.jobs._approve(at, "a person")
    assert shop.jobs.bring_on(at) is True


def test_a_third_party_must_approve_as_well(shop):
    job = shop.proposed({**JOB, "parties": {**JOB["parties"], "lab": {"table": "rows"}}})
    at = shop.jobs.standings[job]
    shop.jobs._approve(at, "a person")
    shop.seen(job, state="running", runs=1, signed={"bank": shop.approval(job, "bank"), "lab": bytes(64)})
    assert not shop.jobs.bring_on(at)
    assert at.row.state == "approved"
    shop.seen(job, state="running", runs=1, signed={"lab": shop.approval(job, "lab")})  # by bank: signatures count
    assert shop.jobs.bring_on(at)


@pytest.mark.parametrize("state", ["rejected", "cancelled", "failed", "finished", "queued"])
def test_a_view_of_a_job_that_a_peer_is_no_party_of_changes_nothing(shop, state):
    job = shop.proposed()
    shop.seen(job, "lab", state=state, reason="mine", signed={"bank": shop.approval(job, "bank")})
    shop.jobs.bring_on(shop.jobs.standings[job])
    assert shop.store.job(job).state == "proposed"
    assert shop.store.views(job) == {}
    assert shop.jobs.standings[job].approvals == {}
    shop.jobs.end(job, "rejected")
    shop.seen(job, "lab", state=state)
    assert shop.store.views(job) == {}
    assert shop.talk.said == []


def test_an_older_view_does_not_undo_a_newer_one(shop):
    job = shop.proposed()
    shop.seen(job, state="queued", asks=2, count=9)
    shop.seen(job, state="rejected", count=8)
    assert shop.jobs.standings[job].views["bank"].state == "queued"


@pytest.mark.parametrize("here", ["approved", "queued", "running", "waiting"])
@pytest.mark.parametrize("said", ["rejected", "cancelled", "failed", "finished"])
def test_a_party_may_end_a_job_in_any_state_and_never_the_node(shop, here, said):
    job = shop.proposed()
    at = shop.jobs.standings[job]
    shop.jobs.change(at, state="approved")
    if here != "approved":
        shop.jobs.change(at, state=here)
    shop.seen(job, state=said, reason="\x1b[2Jx")
    shop.jobs.bring_on(at)
    row = shop.store.job(job)
    # a job that waits for others' approvals and has finished went on without this party
    kept = here if said == "finished" and here != "approved" else said
    assert row.state == kept or row.state in ("failed", "cancelled")
    assert row.reason.isprintable()


def test_views_of_unknown_jobs_leave_nothing_behind(shop):
    for number in range(500):
        shop.seen(f"{number:064x}", reason="x" * 2000)
    assert shop.store.jobs() == []
    assert shop.jobs.standings == {}
    assert len(shop.jobs._newest) == 0
    assert all(isinstance(note, Wanted) for note in shop.talk.said)


# texts


def test_texts_of_a_peer_are_shown_as_they_are_and_do_nothing(shop):
    for text in TEXTS:
        parties = {**JOB["parties"], "shop": {"table": "rows", "columns": [text]}}
        named = shop.proposed({**JOB, "name": text, "label": text, "parties": parties})
        ended = shop.proposed()
        shop.seen(ended, state="cancelled", reason=text)
        shop.jobs.bring_on(shop.jobs.standings[ended])
    listed = shop.made["shop"].treaty("jobs")
    assert [listed.count(text) for text in TEXTS] == [2] * len(TEXTS)
    for job in (named, ended):
        assert TEXTS[-1] in shop.made["shop"].treaty("show", job)
    assert "\x1b" not in listed
    assert len(shop.store.jobs()) == 2 * len(TEXTS)


def test_a_database_takes_texts_as_texts(shop):
    for text in TEXTS:
        job = shop.proposed({**JOB, "name": text})
        assert shop.store.audit(job=job)[0].event["name"] == text
    with pytest.raises(ValueError, match="no such job"):
        shop.store.job("' OR 1=1 --")
    with pytest.raises(ValueError, match="no such job"):
        shop.store.job("%")


# a node that runs


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Yield a node that runs, shop's, and what attacks it: bank and lab, which it trusts, and a stranger."""
    folder = tmp_path_factory.mktemp("live")
    made = organisations(folder, NAMES, columns_of(NAMES, 60), policy="approve = true", listening=["shop"])
    shop = made["shop"]
    shop.settings.write_text(shop.settings.read_text() + "[limits]\nmax_queued = 10\n")
    shop.start()
    wait_for("node", lambda: "is up" in shop.log())
    yield Live(made, folder)
    assert shop.process is not None
    assert shop.process.poll() is None, shop.log()[-3000:]
    assert shop.stop() == 0


class Live:
    def __init__(self, made, folder):
        self.made, self.shop, self.folder = made, made["shop"], folder
        self.address = f"127.0.0.1:{self.shop.port}"
        self.number = 0

    def peer(self, name):
        self.number += 1
        keys = self.made[name].folder / "keys"
        card = self.shop.folder / "keys" / "shop.card"
        return Peer(keys, name, card, self.folder / f"p{self.number}", self.address)

    def memory(self):
        return rss(self.shop.process.pid)

    def is_well(self):
        """A peer is met and answered within seconds."""
        peer = self.peer("lab")
        talk = peer.talk()
        talk.next(HeadNote, 10.0)
        peer.close()


def test_refusals_of_a_running_node_are_in_its_audit_log(live):
    peer = live.peer("bank")
    talk = peer.talk()
    proposal, signature = signed(peer.own, content({**JOB, "protocol": "os:system"}))
    talk.say(Proposed(proposal, signature))
    view = talk.next(JobStatus)
    assert (view.state, view.job) == ("rejected", id_of(proposal))
    said = live.shop.treaty("audit-log", "show")
    assert "refused" in said
    assert view.job[:12] in said
    peer.close()


def test_a_stolen_job_id_opens_no_door_and_no_conversation(live):
    peer, lab = live.peer("bank"), live.peer("lab")
    talk, other = peer.talk(), lab.talk()
    proposal, signature = signed(peer.own, content())
    job = id_of(proposal)
    talk.say(Proposed(proposal, signature))
    assert talk.next(JobStatus).job == job
    with dialled(live.address, f"TREATY/1 job {job}\n".encode()) as stranger:
        assert is_hung_up(stranger)  # it does not run
    other.next(HeadNote)
    other.say(Wanted(job), JobStatus(job=job, state="cancelled", count=1), Back("0" * 64, job))
    time.sleep(1.5)
    assert not any(isinstance(note, Proposed | JobStatus) for note in other.heard)
    assert live.shop.job(job).state == "proposed"
    talk.say(JobStatus(job=job, state="cancelled", reason="enough", count=1))
    wait_for("end", lambda: live.shop.job(job).state == "cancelled", 10.0)
    for each in (peer, lab):
        each.close()


def test_a_flood_of_every_kind_leaves_memory_and_others_alone(live):
    live.is_well()
    before = live.memory()
    peer = live.peer("bank")
    proposals = [Proposed(*signed(peer.own, content({**JOB, "label": f"y{number}"}))) for number in range(150)]
    talks = [peer.talk(reads=number % 2 == 0) for number in range(4)]
    for number in range(3000):
        for talk in talks:
            talk.say(JobStatus(job=f"{number:064x}", state="queued", reason="x" * 2000, count=number))
    talks[0].say(*proposals)
    half_open = [dialled(live.address) for _ in range(300)]
    hanging = [dialled(live.address, b"TREATY/1 node\n") for _ in range(300)]
    garbage = [dialled(live.address, os.urandom(1000)) for _ in range(100)]
    began = time.monotonic()
    live.is_well()
    assert time.monotonic() - began < within(10.0)
    time.sleep(5.0)
    assert live.memory() - before < 80
    for connection in [*half_open, *hanging, *garbage]:
        connection.close()
    peer.close()
    live.is_well()


def test_a_peers_queue_is_limited_in_a_running_node(live):
    peer = live.peer("bank")
    talk = peer.talk()
    most = load_settings(live.shop.settings).limits.max_queued
    for _ in range(most + 1):
        talk.say(Proposed(*signed(peer.own, content())))
    wait_for(
        "refusals",
        lambda: any(isinstance(n, JobStatus) and "no more are accepted" in n.reason for n in talk.heard),
        60.0,
    )
    assert sum(row.state == "proposed" for row in live.shop.jobs()) <= most
    peer.close()


def test_notes_at_random_leave_the_node_up(live):
    """A few seconds of it; benchmarks/node_fuzz.py has as many minutes as are wanted."""
    peer = live.peer("bank")
    fair, signature = signed(peer.own, content())
    talk, job = peer.talk(), id_of(fair)
    talk.say(Proposed(fair, signature))  # the first proposal that can be read loads some 100 MB of libraries

    def answered():
        refused = any(isinstance(note, JobStatus) and note.job == job for note in talk.heard)
        return refused or any(row.id == job for row in live.shop.jobs())

    wait_for("answer", answered, 20.0)
    before, deadline, seed = live.memory(), time.monotonic() + 5.0, 0
    while time.monotonic() < deadline:
        proposal = Proposed(*signed(peer.own, mutated(content(), seed)))
        kinds = [
            proposal,
            JobStatus(job=id_of(b"x"), state="failed"),
            Back("0" * 64, id_of(b"x")),
            Hello(1, "bank", "1", bytes(16)),
        ]
        talk = peer.talk()
        for number in range(20):
            seed += 1
            note = kinds[seed % len(kinds)]
            talk.say(mutated(msgspec.msgpack.encode(note), seed) if number == 19 else note)
        talk.end()
        with dialled(live.address, mutated(b"TREATY/1 node\n", seed)):
            talk.over.wait(1.0)
    peer.close()
    live.is_well()
    assert live.memory() - before < 40


def test_a_model_is_used_with_those_it_was_trained_with_alone(shop):
    """Under other options, or with another partner, a part of it would tell more than its parties have agreed on."""
    training = shop.proposed()
    shop.jobs.change(shop.jobs.standings[training], state="approved")
    predicting = {**JOB, "parties": {name: {"predict_table": "rows"} for name in JOB["parties"]}}
    shop.proposed(predicting, verb="predict", model=training)
    assert "finished training" in shop.refusal()  # not yet
    shop.jobs.change(shop.jobs.standings[training], state="queued")
    shop.jobs.end(training, "finished")
    assert shop.proposed(predicting, verb="predict", model=training) in shop.jobs.standings
    for other in (
        {"boosting": {"n_estimators": 7}},
        {"parties": {**predicting["parties"], "lab": {"predict_table": "rows"}}},
    ):
        shop.proposed({**predicting, **other}, verb="predict", model=training)
        assert "must equal the training's" in shop.refusal()


def test_a_training_names_no_model_and_a_prediction_names_one(shop):
    """Else a training would be kept in place of the model that it names."""
    for verb, model in (("train", "a" * 64), ("predict", "")):
        shop.proposed(verb=verb, model=model)
        assert "id of a training" in shop.events()[-1]["why"]


def test_a_job_reads_the_data_sets_alone_whose_policies_were_asked(shop):
    """A prediction may name a table to train on, a training one to predict: neither is read, nor its query run."""
    both = {name: {"table": "rows", "predict_table": "other"} for name in ("bank", "shop")}
    job = shop.jobs.standings[shop.proposed({**JOB, "parties": both})].job
    assert list(data_sets(job, "shop", "train")) == ["rows"]
    assert list(tables_of(job, "train", shop.settings)) == ["rows"]
    assert data_sets(job, "shop", "predict") == ["other"]


@pytest.mark.parametrize("command", ["reject", "cancel"])
@pytest.mark.parametrize("here", ["proposed", "approved", "queued", "running", "waiting"])
def test_a_persons_no_ends_a_job_whatever_it_has_become_meanwhile(shop, command, here):
    job = shop.proposed()
    at = shop.jobs.standings[job]
    for state in {"proposed": [], "approved": ["approved"]}.get(here, ["approved", here]):
        shop.jobs.change(at, state=state)
    shop.jobs.obey(job, command, {"by": "ann", "reason": "no"})
    assert shop.store.job(job).state in ("rejected", "cancelled")
    assert shop.store.job(job).reason == "no"
