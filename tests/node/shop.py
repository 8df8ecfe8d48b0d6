"""An organisation's jobs without a node's process, and peers that talk to it."""

import time

import msgspec

from node.hostile import JOB, content, signed
from node.nodes import columns_of, organisations
from treaty.node.identity import load_own, sign
from treaty.node.jobs import Jobs
from treaty.node.proposals import JobStatus, Proposed, id_of, statement
from treaty.node.settings import load_settings
from treaty.node.store import Store

NAMES = ("bank", "shop", "lab")


class Talk:
    """A conversation that keeps what is said in it."""

    def __init__(self):
        self.said, self.incarnation = [], bytes(16)

    def send(self, note):
        self.said.append(note)

    def send_status(self, job):
        self.said.append(("view", job))


class Shop:
    """The jobs of an organisation that approves nothing by itself, and the keys of its peers."""

    def __init__(self, folder, policy="approve = true"):
        self.made = organisations(folder, NAMES, columns_of(NAMES, 60), policy=policy)
        self.own = {name: load_own(one.folder / "keys", name) for name, one in self.made.items()}
        self.settings = load_settings(self.made["shop"].settings)
        self.store, self.talk = Store(self.made["shop"].state), Talk()
        self.jobs = Jobs(self.settings, self.own["shop"], self.store, lambda *_: None, lambda _: None, lambda: None)

    def proposed(self, job=JOB, peer="bank", by=None, **fields):
        """Have a peer propose a job, signed by `by`; return its id."""
        proposal, signature = signed(self.own[by or peer], content(job, **fields))
        self.jobs.proposed(peer, self.talk, Proposed(proposal, signature))
        return id_of(proposal)

    def seen(self, job, peer="bank", state="approved", **fields):
        fields.setdefault("count", time.monotonic_ns() % (1 << 40))
        self.jobs.seen(peer, self.talk, JobStatus(job=job, state=state, **fields))

    def approval(self, job, by, *, of=None, what="approve", who=None):
        return sign(self.own[by], statement(what, of or job, who or by))

    def events(self):
        return [
            event.event if isinstance(event.event, dict) else msgspec.json.decode(event.event)
            for event in self.store.audit()
        ]

    def refusal(self):
        """Return why the last proposal was refused, as its sender is told."""
        view = self.talk.said[-1]
        assert (view.state, view.job in self.jobs.standings) == ("rejected", False)
        assert any(event["what"] == "refused" and event["job"] == view.job for event in self.events())
        assert view.reason.isprintable()
        return view.reason
