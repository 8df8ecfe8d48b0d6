"""Peers that come and go, or tell one head of their audit log after another, or whose keys end: what a node notes."""

import datetime
from collections import Counter
from types import SimpleNamespace

import pytest

from node.nodes import organisations
from treaty.node import service
from treaty.node.keys import cards
from treaty.node.network.notes import Head, Hello
from treaty.node.rules.settings import load_settings
from treaty.node.service import NOTED_EVERY, Node

HELLO = Hello(1, "shop", "0.1", bytes(16))


@pytest.fixture
def node(tmp_path):
    bank = organisations(tmp_path, ("bank", "shop", "lab"), {}, listening=["shop", "lab"])["bank"]
    made = Node(load_settings(bank.settings))
    yield made
    made._shut()


@pytest.fixture
def clock(monkeypatch):
    """Yield a clock that stands still until it is set."""
    made = SimpleNamespace(now=10.0)
    monkeypatch.setattr(service.time, "monotonic", lambda: made.now)
    return made


def noted(node, peer="shop"):
    return [entry.event for entry in node.store.audit() if entry.event.get("who") == peer]


def flap(node, times, peer="shop"):
    for _ in range(times):
        node._met(peer, None, HELLO)
        node._left(peer, "its connection broke")


def test_a_link_that_comes_and_goes_is_noted_once_an_hour_with_a_count(node, clock, caplog):
    caplog.set_level("INFO", "treaty")
    flap(node, 500)
    assert [event["what"] for event in noted(node)] == ["peer up", "peer down"]
    assert "times" not in noted(node)[0]
    assert caplog.text.count("shop is away") == 500  # the node's own log has all
    clock.now += NOTED_EVERY
    flap(node, 3)
    assert Counter(event["what"] for event in noted(node)) == {"peer up": 2, "peer down": 2}
    assert [event["times"] for event in noted(node)[2:]] == [500, 500]
    assert noted(node)[3]["why"] == "its connection broke"
    assert node.store.verify_audit() == []


def test_one_peers_coming_and_going_hides_no_others(node, clock):
    flap(node, 5)
    flap(node, 1, "lab")
    assert len(noted(node, "lab")) == 2


def test_heads_that_do_not_fit_are_noted_once_an_hour(node, clock):
    node._heard("shop", None, Head(1000, bytes(32)))
    for entry in range(500):
        node._heard("shop", None, Head(entry, bytes(32)))
    (event,) = noted(node)
    assert event["what"] == "audit log of a peer"
    assert "was cut" in event["why"]


@pytest.mark.parametrize(("days", "words"), [(59, "the certificate of bank ends on"), (-1, "ended on"), (61, "")])
def test_a_certificate_that_ends_soon_is_warned_of_once_a_day(node, monkeypatch, caplog, days, words):
    now = datetime.datetime.now(datetime.UTC)
    monkeypatch.setattr(cards, "ends", lambda card: now + datetime.timedelta(days))
    for _ in range(3):
        node._look()
    assert sum("the certificate of bank" in line for line in caplog.messages) == bool(words)
    assert words in caplog.text
    if words:
        node._warned_on -= datetime.timedelta(1)
        node._look()
        assert sum("the certificate of bank" in line for line in caplog.messages) == 2
