"""How nodes agree to start an attempt at a job, and what follows when it ends: pure decisions, without I/O.

The active party's node leads. It asks for attempt k. Every other node with a free slot that reaches its peers answers
that it is ready, and reserves the slot. Then the active party's node runs k, and the others follow. If a process ends
early, its node reports that, and the others end theirs. The active party's node then asks for k + 1, after a pause that
doubles while attempts make no progress. Each process resumes from the last tree that all have (`--resume`).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from treaty.node.proposals import JobStatus, Proposal
from treaty.node.store import FINAL, JobRow
from treaty.runs.job import Job
from treaty.systems.system import Roles

ASKED_FOR = 30.0
"""Seconds for the others to answer that they are ready."""
MOST_TRIES = 8
"""Attempts in a row without a new round, after which the job fails at each node that took part."""
LONGEST_PAUSE = 60.0
"""Maximum seconds between two attempts."""


@dataclass
class OpenJob:
    """A job that has not ended at this node: what is stored (`row`), and the state of the node's process.

    `asks`, `ready`, `runs` and `ended` are numbers of attempts, as in `JobStatus`. Times are monotonic seconds.
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
    ending: bool = False  # its process was asked to end
    approver: str = ""  # who approved it here before the policy's verdict was known
    asked_at: float = 0.0
    not_before: float = 0.0

    @property
    def leads(self) -> bool:
        return self.name == self.job.active

    @cached_property
    def others(self) -> list[str]:
        return [party for party in self.job.parties if party != self.name]

    @cached_property
    def needed(self) -> list[str]:
        """The other parties that an attempt needs to start."""
        absent = self.job.system.may_be_absent(self.roles, self._options)
        return [party for party in self.others if party in self.roles.of and party not in absent]

    @cached_property
    def peers(self) -> list[str]:
        """The parties with which this one exchanges messages in an attempt; none if it takes no part."""
        return self.job.system.links(self.roles, self._options).get(self.name, [])

    @cached_property
    def linked(self) -> list[str]:
        """The peers that this party needs."""
        return [peer for peer in self.peers if peer in self.needed]

    @cached_property
    def spared(self) -> list[str]:
        """The parties whose loss does not end an attempt."""
        return self.job.system.may_lose(self.roles, self._options)

    @cached_property
    def _options(self) -> Any:
        return self.job.settings()[0]

    @property
    def holds_place(self) -> bool:
        """Whether it uses one of the slots for running jobs; services do not."""
        return not self.lasts and bool(self.asks or self.ready or self.process is not None)

    @property
    def lasts(self) -> bool:
        """Whether it is a service, which runs until it is cancelled."""
        return self.proposal.verb == "serve"


Decision = Literal[
    "", "ask", "give up asking", "be ready", "not ready", "run", "stop", "went on without us", "finished"
]


def decide(at: OpenJob, up: Collection[str], *, place: bool, now: float) -> Decision:
    """Return what the node does next about a job that all have approved and that has not ended.

    `up` are the connected peers, `place` is whether this node may start another job, `now` is monotonic.
    """
    # While this node's process runs, the only decision is whether to end it.
    if at.process is not None:
        return "stop" if not at.ending and _others_stopped(at) else ""
    if not at.leads:
        return _follow(at, up, place=place)
    if at.row.done:
        return "finished"
    kept = at.row.kept
    # The process, or the node, ended after all others had written their parts.
    if kept and kept == at.row.attempt:
        of_others = [at.views.get(party) for party in at.needed if party not in at.spared]
        if all(view is not None and view.kept == kept for view in of_others):
            return "finished"
        if any(view is None or view.runs == kept for view in of_others):
            # A party that still runs stores its part once it hears the others, or loses them.
            return ""
    # Asked for an attempt: run it once all needed parties are ready, or give up after a while.
    if at.asks:
        if all(view.ready == at.asks for view in _views(at, at.needed)):
            return "run"
        return "give up asking" if now - at.asked_at > ASKED_FOR else ""
    reached = all(party in up for party in at.needed)
    return "ask" if now >= at.not_before and place and reached else ""


def follow_up(at: OpenJob, decision: Decision, now: float) -> dict[str, Any]:
    """Apply a decision to the attempt's numbers; return what changes in the database."""
    match decision:
        case "ask":
            at.asks, at.asked_at = at.row.attempt + 1, now
            return {"attempt": at.asks, "state": "queued"}
        case "give up asking":
            lacking = [p for p in at.needed if (v := at.views.get(p)) is None or v.ready != at.asks]
            at.ended, at.asks = at.asks, 0
            # A random pause, so that two jobs do not block each other again and again.
            at.not_before = now + random.uniform(1.0, 5.0)  # noqa: S311
            return {"reason": f"waiting for {', '.join(lacking)} to have a free slot"}
        case "be ready":
            at.ready = at.views[at.job.active].asks
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
    """Record that this node's process of an attempt has ended; return what changes in the database."""
    at.process, at.ended, at.runs = None, at.runs, 0
    return {"kept": at.ended if kept else 0, "done": at.ended if done else 0}


def _follow(at: OpenJob, up: Collection[str], *, place: bool) -> Decision:
    lead = at.views.get(at.job.active)
    if lead is None:
        return ""
    if lead.state == "finished" and at.row.state in ("queued", "running", "waiting"):
        return "finished" if at.row.kept else "went on without us"
    # A slot is reserved: follow the lead once it runs, or free the slot if it asks for another attempt.
    if at.ready:
        if lead.runs == at.ready:
            return "run"
        return "not ready" if lead.asks != at.ready else ""
    # Helpers of a training take no part in a prediction.
    plays = at.name in at.roles.of
    if plays and lead.asks > max(at.ended, at.row.attempt) and place and all(peer in up for peer in at.linked):
        return "be ready"
    return ""


def _others_stopped(at: OpenJob) -> bool:
    """Return whether the attempt that runs here has ended early at another party, so that it cannot succeed."""
    # A process that ended early at the lead ends all others. At the lead, any needed party counts.
    if not at.leads:
        lead = at.views.get(at.job.active)
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
    """Return what changes in the database when an attempt has finished, and this party answered, so many rounds."""
    changes = {"answered": answered} if answered > at.row.answered else {}
    return changes | ({"rounds": done, "tries": 1} if done > at.row.rounds else {})


def most_answered(total: int) -> int:
    """Return the maximum rounds, over all attempts, of a job of `total` rounds: some rounds have to be repeated."""
    return total + max(MOST_TRIES, total // 4)


def worn_out(at: OpenJob) -> str:
    """Return why this node takes part in no further attempt; "" if it does."""
    row, most = at.row, most_answered(at.row.total)
    if row.tries >= MOST_TRIES and not at.lasts:
        return f"no progress in {row.tries} attempts"
    repeated = row.total > 0 and row.answered >= most
    return f"its attempts have taken {most} rounds, but the job has {row.total}" if repeated else ""


def pause_after(at: OpenJob) -> float:
    """Return the seconds to wait after an attempt that ended early."""
    return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(at.row.tries, 10)) * random.uniform(0.8, 1.2)  # noqa: S311 - no secret


def stopped_by(at: OpenJob) -> tuple[str, str] | None:
    """Return the final state that another party's node has reported, and why; None if there is none."""
    for party in at.others:
        view = at.views.get(party)
        if view is None or view.state not in FINAL or view.state == "finished" or party in at.spared:
            continue
        # A party that rejects a job after approving it cancels it.
        state = "cancelled" if view.state == "rejected" and at.row.state == "running" else view.state
        return state, view.reason if view.reason.startswith(f"{party}: ") else f"{party}: {view.reason}"
    return None


def all_approved(at: OpenJob) -> bool:
    """Return whether every party's approval is known."""
    return all(party in at.approvals for party in at.job.parties)
