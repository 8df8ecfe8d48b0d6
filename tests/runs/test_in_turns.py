"""Roles that take turns: one runs at a time, until it waits for a message, in the same order in every run."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import treaty
from tables import assert_same_trees
from treaty.errors import PeerTimeout
from treaty.messaging.messages import Message
from treaty.runs.threads import in_turns, play, star

ROLES = ("lead", "left", "right")


class Note(Message):
    text: str


class Running:
    """Counts who runs, and notes in which order what was done."""

    def __init__(self):
        self.most, self._now, self._lock, self.done = 0, 0, threading.Lock(), []

    def step(self, what):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.002)
        with self._lock:
            self._now -= 1
            self.done.append(what)


def conversation(running):
    """Return roles that send notes to and fro, and work between them."""

    def lead(party):
        for round_ in range(3):
            for peer in ROLES[1:]:
                running.step(f"asks {peer}")
                party.send(peer, Note(f"{round_}"))
            for peer in reversed(ROLES[1:]):
                running.step(f"got {party.receive(peer, Note).text}")

    def other(party):
        for _ in range(3):
            text = party.receive("lead", Note).text
            running.step(f"{party.name} works")
            party.send("lead", Note(f"{party.name} {text}"))
            running.step(f"{party.name} tidies up")

    return {"lead": lead, "left": other, "right": other}


def played(**options):
    running = Running()
    play(conversation(running), star("lead", ROLES), job="turns", protocol="notes", **options)
    return running


def test_one_role_runs_at_a_time_in_the_same_order_in_every_run():
    first = played(one_at_a_time=True)
    assert first.most == 1
    assert first.done[:4] == ["asks left", "asks right", "left works", "left tidies up"]
    assert all(played(one_at_a_time=True).done == first.done for _ in range(5))


def test_without_turns_roles_run_at_the_same_time():
    assert played().most > 1


def test_a_role_that_sends_more_than_a_peer_has_read_gives_its_turn_away(monkeypatch):
    monkeypatch.setattr("treaty.messaging.channel._UNREAD", 150_000)

    def sends(party):
        for _ in range(3):
            party.send("b", Note("x" * 100_000))

    def reads(party):
        return [len(party.receive("a", Note).text) for _ in range(3)]

    links = {"a": ["b"], "b": ["a"]}
    found = play({"a": sends, "b": reads}, links, job="turns", protocol="notes", one_at_a_time=True)
    assert found.results["b"] == [100_000] * 3


def test_roles_that_wait_for_each_other_end_when_the_time_is_up():
    def waits(party):
        party.receive("b" if party.name == "a" else "a", Note, timeout=0.3)

    with pytest.raises(PeerTimeout, match="got nothing"):
        play({"a": waits, "b": waits}, {"a": ["b"], "b": ["a"]}, job="turns", protocol="notes", one_at_a_time=True)


@pytest.mark.parametrize("system", ["secureboost", "federboost-vertical"])
def test_a_fit_in_turns_gives_the_same_trees(system):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(120, 4)), rng.integers(0, 2, 120)
    own = {"allow_exact_sums": True} if system == "secureboost" else {"epsilon": 1e6}
    kind = {"secureboost": treaty.SecureBoost, "federboost-vertical": treaty.FederBoostVertical}[system]
    given = {"n_estimators": 2, "max_depth": 2, "max_bin": 8, "n_jobs": 1, "random_state": 0}
    tables = {"bank": X[:, :2], "shop": X[:, 2:]}
    with in_turns():
        stepped = treaty.GBDTClassifier(kind(**own), **given).fit(tables, y)
    assert_same_trees(stepped, treaty.GBDTClassifier(kind(**own), **given).fit(tables, y))
