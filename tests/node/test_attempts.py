"""How nodes agree on attempts: any order of messages, ends and restarts leads to an end that all parties share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from treaty.node.attempts import OpenJob, decide, follow_up, over, pause_after
from treaty.node.proposals import JobStatus
from treaty.node.store import JobRow
from treaty.runs.job import Job
from treaty.systems.system import Roles

JOB = "a" * 64
COLUMNS = ("state", "attempt", "kept", "done", "tries", "answered")
NAMES = ["bank", "shop", "post"]
ROUNDS = 4


class World:
    """Nodes, their clocks and their processes, which get one round further whenever all of an attempt play."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.active = names, names[0]
        self.nodes = {name: self._standing(name, JobRow(JOB, b"", b"", names[0], "train", "queued")) for name in names}
        self.now = 0.0
        self.rounds = 0
        self.kept: set[str] = set()  # whose processes have only to end
        self.attempts = 0
        self.finished: set[str] = set()
        self.under_way: list[tuple[str, str, JobStatus]] = []

    def _standing(self, name: str, row: JobRow) -> OpenJob:
        system = SimpleNamespace(
            may_be_absent=lambda roles, own: [],
            may_lose=lambda roles, own: [],
            links=lambda roles, own: {name: [o for o in self.names if o != name] for name in self.names},
        )
        job: Any = SimpleNamespace(
            active=self.active, parties=dict.fromkeys(self.names), system=system, settings=lambda: (None, None)
        )
        proposal: Any = SimpleNamespace(verb="train")
        roles = {name: "active" if name == self.active else "passive" for name in self.names}
        return OpenJob(name, row, proposal, cast(Job, job), Roles(self.active, roles, self.names), ended=row.attempt)

    def change(self, name: str, changes: dict[str, Any]) -> None:
        at = self.nodes[name]
        at.row = replace(at.row, **{field: value for field, value in changes.items() if field in COLUMNS})
        self.tell(name)

    def tell(self, name: str) -> None:
        at = self.nodes[name]
        view = JobStatus(
            job=JOB, state="finished" if name in self.finished else at.row.state, asks=at.asks, ready=at.ready,
            runs=at.runs, ended=at.ended, kept=at.row.kept, done=at.row.done,
        )  # fmt: skip
        self.under_way += [(name, other, view) for other in self.names if other != name]

    def deliver(self) -> None:
        if self.under_way:
            sender, to, view = self.under_way.pop(0)
            self.nodes[to].views[sender] = view

    def look(self, name: str) -> None:
        """Let a node decide, as its own thread does."""
        at = self.nodes[name]
        if name in self.finished:
            return
        decision = decide(at, set(self.names), place=True, now=self.now)
        if decision == "run":
            at.process = object()
            self.attempts = max(self.attempts, at.row.attempt)
            self.kept.discard(name)
        elif decision == "stop":
            assert name not in self.kept, "what had only to end was stopped"
            at.ending = True
            self.end(name, done=False)
            return
        elif decision == "finished":
            self.finished.add(name)
            self.tell(name)
            return
        assert decision != "left out"
        changes = follow_up(at, decision, self.now)
        if changes:
            self.change(name, changes)

    def play(self) -> None:
        """Let processes get a round further, or end well, if all play the same attempt."""
        playing = {at.runs if at.process is not None else 0 for at in self.nodes.values()}
        if len(playing) == 1 and playing != {0}:
            self.rounds += 1
            if self.rounds >= ROUNDS:
                self.kept = set(self.names)

    def leave(self, name: str) -> None:
        """Let a process end that has nothing left to do."""
        if name in self.kept:
            self.end(name, done=True)

    def end(self, name: str, *, done: bool) -> None:
        at = self.nodes[name]
        if at.process is None:
            return
        numbers = over(at, done=done, kept=name in self.kept)
        self.kept.discard(name)
        if not done:
            at.not_before = self.now + pause_after(at)
        self.change(name, {**numbers, "state": "waiting"})

    def restart(self, name: str) -> None:
        """Kill a node with its process, and start it from what its database and its folder have."""
        at = self.nodes[name]
        kept = at.row.attempt if name in self.kept else at.row.kept
        self.kept.discard(name)
        if name not in self.finished:
            self.nodes[name] = self._standing(name, replace(at.row, state="waiting", kept=kept))
        self.under_way = [one for one in self.under_way if one[1] != name]
        for other in self.names:
            self.tell(other)

    def take(self, what: str, name: str) -> None:
        match what:
            case "look":
                self.look(name)
            case "deliver":
                self.deliver()
            case "play":
                self.play()
            case "leave":
                self.leave(name)
            case "kill":
                self.end(name, done=False)
            case "restart":
                self.restart(name)
            case "wait":
                self.now += 1.0

    def go_on(self, *, leave: bool) -> None:
        """Let all nodes look, with whatever is under way delivered, and processes play, and end if they `leave`."""
        self.now += 5.0
        while self.under_way:
            self.deliver()
        for name in self.names:
            self.look(name)
        self.play()
        for name in reversed(self.names if leave else []):  # the active party last: others hear of it meanwhile
            self.leave(name)
            while self.under_way:
                self.deliver()
            for other in self.names:
                self.look(other)


def begun(names: list[str]) -> World:
    world = World(names)
    for name in names:
        world.tell(name)
    return world


steps = st.lists(
    st.tuples(st.sampled_from(["look", "deliver", "play", "leave", "kill", "restart", "wait"]), st.sampled_from(NAMES)),
    max_size=60,
)


@given(steps, st.integers(2, 3))
def test_whatever_happens_all_nodes_finish_once_it_stops(taken, parties):
    world = begun(NAMES[:parties])
    for what, name in taken:
        if name in world.names:
            world.take(what, name)
    for _ in range(400):  # nothing fails any more
        world.go_on(leave=True)
    assert world.finished == set(world.names)


@given(steps, st.integers(2, 3))
def test_what_all_have_kept_is_not_trained_again(taken, parties):
    world = begun(NAMES[:parties])
    while not world.kept:
        world.go_on(leave=False)
    for what, name in taken:
        if name in world.names:
            world.take(what, name)
    for _ in range(40):
        world.go_on(leave=True)
    assert world.finished == set(world.names)
    assert world.attempts == 1


@given(steps)
def test_no_two_nodes_play_different_attempts_to_the_end(taken):
    world = begun(NAMES)
    for what, name in taken:
        if what == "restart":
            world.restart(name)
        elif what == "deliver":
            world.deliver()
        else:
            world.look(name)
        running = {at.runs for at in world.nodes.values() if at.process is not None}
        lead = world.nodes[world.active]
        assert all(number <= lead.row.attempt for number in running)


def seen_by(name, state, **views):
    """Return what a node decides whose own part is in its place after attempt 2, given what others say of theirs."""
    world = begun(NAMES)
    at = world.nodes[name]
    at.row, at.ended = replace(at.row, state="waiting", attempt=2, kept=2), 2
    at.views = {party: JobStatus(job=JOB, state=state, **said) for party, said in views.items()}
    return decide(at, set(NAMES), place=True, now=1.0)


def test_a_job_is_finished_once_every_party_has_its_part_and_not_before():
    kept = {"ended": 2, "kept": 2}
    assert seen_by("bank", "waiting", shop=kept, post=kept) == "finished"
    for lacking in ({"ended": 2}, {"ended": 2, "kept": 1}):
        assert seen_by("bank", "waiting", shop=kept, post=lacking) == "ask"
        assert seen_by("bank", "waiting", shop=lacking, post=kept) == "ask"
    for unknown in ({}, {"post": {"runs": 2}}):  # it may still put its part in its place
        assert seen_by("bank", "waiting", shop=kept, **unknown) == ""


def test_a_follower_has_finished_when_the_leader_says_so_and_no_other():
    kept = {"ended": 2, "kept": 2}
    assert seen_by("shop", "finished", bank=kept) == "finished"
    assert seen_by("shop", "waiting", bank=kept, post=kept) == ""
    assert seen_by("shop", "finished", post=kept) == ""
