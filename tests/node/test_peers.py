"""Peers that come and go, or tell one head of their audit log after another, or whose keys end: what a node notes."""

import datetime
from collections import Counter
from types import SimpleNamespace

import pytest

from node.nodes import organisations
from treaty.node import cards, service
from treaty.node.identity import load_own, sign
from treaty.node.proposals import HeadNote, Hello
from treaty.node.service import NOTED_EVERY, Node
from treaty.node.settings import load_settings
from treaty.node.store import head_statement

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
        node._connected(peer, None, HELLO)
        node._lost(peer, "its connection broke")


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
    shop = load_own(node.folder.parent.parent / "shop" / "keys", "shop")
    heads = [HeadNote(entry, bytes(32), sign(shop, head_statement("shop", entry, bytes(32)))) for entry in range(501)]
    for head in (heads[-1], *heads):
        node._handle("shop", None, head)
    (event,) = noted(node)
    assert event["what"] == "audit log of a peer"
    assert "was cut" in event["why"]
    assert event["head"] == f"0:{bytes(32).hex()}:{heads[0].signature.hex()}"  # which shop cannot deny


def test_a_head_that_its_sender_did_not_sign_is_not_kept(node, clock):
    lab = load_own(node.folder.parent.parent / "lab" / "keys", "lab")
    for signature in (bytes(64), *(sign(lab, head_statement(of, 9, bytes(32))) for of in ("shop", "lab"))):
        node._handle("shop", None, HeadNote(9, bytes(32), signature))
    assert node.store.heads() == {}
    (event,) = noted(node)
    assert "sent a head of its audit log that its key has not signed" in event["why"]


def test_what_a_node_tells_of_its_log_is_signed_with_its_key(node):
    head, card = node.head(), node.jobs.own.card
    assert (head.entry, head.digest) == (node.store.head().seq, node.store.head().digest)
    assert cards.verify(card, head.signature, head_statement("bank", head.entry, head.digest))


@pytest.mark.parametrize(("days", "words"), [(59, "the certificate of bank expires on"), (-1, "expired on"), (61, "")])
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
