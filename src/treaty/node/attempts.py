"""How nodes agree to begin an attempt at a job, and what follows when one ends: pure decisions, without any I/O.

The active party's node leads. It asks for attempt k; every other node that has a place free and reaches its peers says
that it is ready, and holds the place; then the active party's node runs k, and the others follow. Whoever's process
ends early says so, whereupon the others end theirs, and the active party's node asks for k + 1, after a pause that
doubles where attempts bring nothing. Each process goes on from the last tree that all have (`--resume`).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from treaty.node.notes import JobStatus
from treaty.node.proposals import Proposal, name_of
from treaty.node.store import FINAL, JobRow
from treaty.runs.job import Job
from treaty.systems.system import Roles

ASKED_FOR = 30.0
"""Seconds that others have to say that they are ready."""
MOST_TRIES = 8
"""Attempts in a row that bring no further round, after which a job has failed at each node that took part in them."""
LONGEST_PAUSE = 60.0
"""Seconds, at most, between two attempts."""


@dataclass
class OpenJob:
    """A job at this node: what is kept of it (`row`), and what lasts only as long as the node's process.

    `asks`, `ready`, `runs`, `ended`, `kept` and `done` are numbers of attempts, as in `notes.View`. Times are monotonic
    seconds.
    """

    name: str  # this party's
    row: JobRow
    proposal: Proposal
    job: Job
    roles: Roles
    asks: int = 0
    ready: int = 0
    runs: int = 0
    ended: int = 0
    approvals: dict[str, bytes] = field(default_factory=dict)
    views: dict[str, JobStatus] = field(default_factory=dict)
    process: Any = None
    ending: bool = False  # its process was told to end
    approver: str = ""  # who has approved it here, before the policy's verdict was there
    asked_at: float = 0.0
    not_before: float = 0.0

    @property
    def kept(self) -> int:
        """The last attempt that left this party's part in its place, which others may lack."""
        return self.row.kept

    @property
    def done(self) -> int:
        """The last attempt that ended well here."""
        return self.row.done

    @property
    def played_as(self) -> str:
        """What its processes, and ledgers, call the job."""
        return name_of(self.job, self.row.id)

    @property
    def active(self) -> str:
        """The party whose node leads."""
        return self.job.active

    @property
    def leads(self) -> bool:
        return self.name == self.active

    @cached_property
    def others(self) -> list[str]:
        return [party for party in self.job.parties if party != self.name]

    @cached_property
    def needed(self) -> list[str]:
        """The other parties without which an attempt cannot begin."""
        absent = self.job.system.may_be_absent(self.roles, self._options)
        return [party for party in self.others if party in self.roles.of and party not in absent]

    @cached_property
    def peers(self) -> list[str]:
        """The parties that this one talks to in an attempt; none where it takes no part."""
        return self.job.system.links(self.roles, self._options).get(self.name, [])

    @cached_property
    def linked(self) -> list[str]:
        """The parties that this one talks to, and cannot do without."""
        return [peer for peer in self.peers if peer in self.needed]

    @cached_property
    def spared(self) -> list[str]:
        """The parties without which an attempt goes on."""
        return self.job.system.may_lose(self.roles, self._options)

    @cached_property
    def _options(self) -> Any:
        return self.job.settings()[0]

    @property
    def holds_place(self) -> bool:
        """Whether it takes one of the places for jobs that run at a time; services, which last, do not."""
        return not self.lasts and bool(self.asks or self.ready or self.process is not None)

    @property
    def lasts(self) -> bool:
        """Whether it is a service, which goes on until it is cancelled."""
        return self.proposal.verb == "serve"


Decision = Literal[
    "", "ask", "give up asking", "be ready", "not ready", "run", "stop", "went on without us", "finished"
]


def decide(at: OpenJob, up: Collection[str], *, place: bool, now: float) -> Decision:
    """Say what a node is to do about a job that is approved by all and has not ended.

    `up` are the peers that are connected, `place` says whether this node may take on another job, `now` is monotonic.
    """
    if at.process is not None:
        return "stop" if not at.ending and _others_stopped(at) else ""
    if not at.leads:
        return _follow(at, up, place=place)
    if at.done:
        return "finished"
    if (
        at.kept and at.kept == at.row.attempt
    ):  # its process ended, or its node, after all others had written their parts
        of_others = [at.views.get(party) for party in at.needed if party not in at.spared]
        if all(view is not None and view.kept == at.kept for view in of_others):
            return "finished"
        if any(view is None or view.runs == at.kept for view in of_others):
            return ""  # who still plays puts its part in its place as soon as it hears, or hears nothing any more
    if at.asks:
        if all(view.ready == at.asks for view in _views(at, at.needed)):
            return "run"
        return "give up asking" if now - at.asked_at > ASKED_FOR else ""
    reached = all(party in up for party in at.needed)
    return "ask" if now >= at.not_before and place and reached else ""


def follow_up(at: OpenJob, decision: Decision, now: float) -> dict[str, Any]:
    """Do what a decision means for an attempt's numbers; return what changes in the database."""
    match decision:
        case "ask":
            at.asks, at.asked_at = at.row.attempt + 1, now
            return {"attempt": at.asks, "state": "queued"}
        case "give up asking":
            lacking = [p for p in at.needed if (v := at.views.get(p)) is None or v.ready != at.asks]
            at.ended, at.asks = at.asks, 0
            at.not_before = now + random.uniform(1.0, 5.0)  # noqa: S311 - so that two jobs do not wait for each other
            return {"reason": f"waiting for {', '.join(lacking)} to have a place free"}
        case "be ready":
            at.ready = at.views[at.active].asks
            return {"attempt": at.ready, "state": "queued"}
        case "not ready":
            at.ended, at.ready = at.ready, 0
            return {"state": "queued"}
        case "run":
            at.runs, at.asks, at.ready, at.ending = at.row.attempt, 0, 0, False
            counts = {"tries": at.row.tries + 1, "answered": at.row.answered + 1}
            return {"state": "running", "reason": "", **counts}
    return {}


def over(at: OpenJob, *, done: bool, kept: bool) -> dict[str, Any]:
    """Note that this node's process of an attempt has ended; return what changes in the database."""
    at.process, at.ended, at.runs = None, at.runs, 0
    return {"kept": at.ended if kept else 0, "done": at.ended if done else 0}


def _follow(at: OpenJob, up: Collection[str], *, place: bool) -> Decision:
    lead = at.views.get(at.active)
    if lead is None:
        return ""
    if lead.state == "finished" and at.row.state in ("queued", "running", "waiting"):
        return "finished" if at.kept else "went on without us"
    if at.ready:
        if lead.runs == at.ready:
            return "run"
        return "not ready" if lead.asks != at.ready else ""
    plays = at.name in at.roles.of  # helpers of a training take no part in a prediction
    if plays and lead.asks > max(at.ended, at.row.attempt) and place and all(peer in up for peer in at.linked):
        return "be ready"
    return ""


def _others_stopped(at: OpenJob) -> bool:
    """Whether the attempt that this node's process plays has ended early elsewhere, so that it cannot succeed."""
    if not at.leads:
        lead = at.views.get(at.active)
        return (
            lead is not None
            and lead.state != "finished"
            and lead.runs != at.runs
            and at.runs > max(lead.kept, lead.done)
        )
    views = _views(at, [party for party in at.needed if party not in at.spared])
    return any(view.ended >= at.runs > max(view.kept, view.done) for view in views)


def _views(at: OpenJob, parties: list[str]) -> list[JobStatus]:
    return [at.views.get(party) or JobStatus(job=at.row.id, state="proposed") for party in parties]


def counted(at: OpenJob, done: int, answered: int) -> dict[str, int]:
    """Return what changes in the database with the rounds that an attempt has done, and this party has answered."""
    changes = {"answered": answered} if answered > at.row.answered else {}
    return changes | ({"rounds": done, "tries": 1} if done > at.row.rounds else {})


def most_answered(total: int) -> int:
    """Return how many rounds a party takes part in, over all attempts at a job of so many: some have to be repeated."""
    return total + max(MOST_TRIES, total // 4)


def worn_out(at: OpenJob) -> str:
    """Return why this node takes part in no further attempt, whoever asks for it; "" where it does."""
    row, most = at.row, most_answered(at.row.total)
    if row.tries >= MOST_TRIES and not at.lasts:
        return f"no progress in {row.tries} attempts"
    repeated = row.total > 0 and row.answered >= most
    return f"its attempts have taken {most} rounds, of the {row.total} that the job has" if repeated else ""


def pause_after(at: OpenJob) -> float:
    """Return the seconds to wait after an attempt that ended early."""
    return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(at.row.tries, 10)) * random.uniform(0.8, 1.2)  # noqa: S311 - no secret


def stopped_by(at: OpenJob) -> tuple[str, str] | None:
    """Return the final state that another party's node has brought a job to, and why; None where none has."""
    for party in at.others:
        view = at.views.get(party)
        if view is None or view.state not in FINAL or view.state == "finished" or party in at.spared:
            continue
        # who has approved a job and says that it has rejected it has cancelled it
        state = "cancelled" if view.state == "rejected" and at.row.state == "running" else view.state
        return state, view.reason if view.reason.startswith(f"{party}: ") else f"{party}: {view.reason}"
    return None


def all_approved(at: OpenJob) -> bool:
    """Whether every party's approval is at hand."""
    return all(party in at.approvals for party in at.job.parties)
