"""Conversations between nodes, with peers that are not who they say, say what they may not, or too much of it."""

import os
import socket
import ssl
import threading
import time
import tracemalloc
from collections import Counter
from contextlib import ExitStack, suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.hostile import Peer, is_hung_up, mutated, rss
from pace import wait_until
from treaty.messaging import tls, units
from treaty.messaging.tls import MOST_YOUNG, LineRefused, Listener, tls_context
from treaty.messaging.units import header
from treaty.node import exchange as exchanges
from treaty.node.cards import fingerprint_of, read_card
from treaty.node.exchange import CALLS_A_MINUTE, MOST_BYTES, MOST_CONVERSATIONS, VERSION, Exchange
from treaty.node.identity import load_own, make_keys, revoke, trust, trusted
from treaty.node.proposals import Back, HeadNote, Heartbeat, Hello, JobStatus, Note, Proposed, Wanted

ID, OTHER = "ab" * 32, "cd" * 32
EVERY = [
    Hello(VERSION, "shop", "1", bytes(16)),
    HeadNote(5, bytes(32), bytes(64)),
    Proposed(b"{}" * 30, bytes(64)),
    Wanted(ID),
    JobStatus(job=ID, state="approved", reason="x", signed={"shop": bytes(64)}, count=3),
    Back("0" * 64, ID),
    Heartbeat(),
]


class Desk:
    """Keeps what a node is notified of."""

    def __init__(self):
        self.notes, self.met_peers, self.gone, self.pause = [], [], [], 0.0

    def notify(self, kind, peer, *what):
        if kind == "connected":
            self.met_peers.append((peer, what[0]))
        elif kind == "note":
            time.sleep(self.pause)
            self.notes.append((peer, what[1]))
        else:
            assert kind == "lost"
            self.gone.append((peer, what[0]))

    def status(self, job):
        return JobStatus(job=job, state="proposed")

    def head(self):
        return HeadNote(0, bytes(32), bytes(64))


class Bank:
    """A node's conversations, which trust "shop" and "lab"."""

    def __init__(self, folder):
        self.folder, self.desk = folder, Desk()
        self.keys = {name: folder / name for name in ("bank", "shop", "lab", "stranger")}
        for name, keys in self.keys.items():
            make_keys(keys, name)
        for name in ("shop", "lab"):
            card = read_card(self.keys[name] / f"{name}.card")
            trust(self.keys["bank"], card, confirmed=fingerprint_of(card))
        self.own, self.socket = load_own(self.keys["bank"], "bank"), folder / "s"
        self.exchange = Exchange(
            self.own, lambda: trusted(self.keys["bank"]), self.desk.notify, self.desk.status, self.desk.head,
            self.socket, {}, "1",
        )  # fmt: skip
        self.exchange.start()
        self.peers = []

    def peer(self, name):
        card = self.keys["bank"] / "bank.card"
        self.peers.append(Peer(self.keys[name], name, card, self.folder / "p", None, self.socket))
        return self.peers[-1]

    def close(self):
        for peer in self.peers:
            peer.close()
        self.exchange.close()


@pytest.fixture
def bank(tmp_path):
    made = Bank(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "CALLS_A_MINUTE", 6000)
        made = Bank(tmp_path_factory.mktemp("bank"))
        yield made
        made.close()


def begun(bank, name="shop"):
    """Open a conversation, and wait until it has begun."""
    talk = bank.peer(name).talk()
    talk.next(HeadNote)
    return talk


def assert_heard(bank, talk):
    """The node hears another peer all the while."""
    talk.say(Wanted(OTHER))
    wait_until(lambda: bank.desk.notes[-1:] == [("lab", Wanted(OTHER))])


def is_ended(line, seconds=5.0):
    """Whether the other end hangs up on a connection."""
    try:
        found = line.header(time.monotonic() + seconds)
    except TimeoutError:
        return False
    except OSError:
        return True
    raise AssertionError(found)


def drip(line):
    with suppress(OSError):  # hung up on meanwhile
        line.send(b"\0")


def raw(bank):
    """Open a connection to where the node's conversations are."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(bank.socket))
    return connection


def client_hello():
    """Return the bytes with which TLS begins."""
    context, out = ssl.create_default_context(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="bank").do_handshake()
    return out.read()


def threads():
    return Counter(thread.name.rstrip("0123456789-") for thread in threading.enumerate())


# who it is


def test_a_trusted_peer_is_met_and_heard(bank):
    talk = begun(bank)
    talk.say(Wanted(ID))
    wait_until(lambda: bank.desk.notes == [("shop", Wanted(ID))])


def test_a_key_that_nobody_trusts_gets_no_further_than_the_handshake(bank):
    talk = bank.peer("stranger").talk()
    talk.wait_over(15.0)
    assert talk.heard == []
    assert bank.desk.met_peers == []


def test_a_certificate_that_a_peer_has_signed_for_itself_is_not_its_card(bank, tmp_path):
    """Another key under a trusted name: the handshake takes none but the pinned certificates."""
    make_keys(tmp_path / "forged", "shop")
    forger = Peer(tmp_path / "forged", "shop", bank.keys["bank"] / "bank.card", tmp_path / "q", None, bank.socket)
    bank.peers.append(forger)
    forger.talk().wait_over(15.0)
    assert bank.desk.met_peers == []


@pytest.mark.parametrize("name", ["lab", "bank", "stranger", "", "shop ", "SHOP"])
def test_a_trusted_peer_cannot_be_another(bank, name):
    talk = bank.peer("shop").talk(Hello(VERSION, name, "1", bytes(16)))
    talk.say(Wanted(ID))
    talk.wait_over(5.0)
    assert bank.desk.met_peers == []
    assert bank.desk.notes == []
    assert not bank.exchange.is_up("shop")


@pytest.mark.parametrize(
    "first", [note for note in EVERY if not isinstance(note, Hello)], ids=lambda n: type(n).__name__
)
def test_nothing_is_heard_before_hello(bank, first):
    talk = bank.peer("shop").talk(first)
    talk.say(EVERY[0], first)
    talk.wait_over(5.0)
    assert bank.desk.notes == []


def test_another_version_is_told_apart(bank):
    talk = bank.peer("shop").talk(Hello(VERSION + 1, "shop", "1", bytes(16)))
    talk.wait_over(5.0)
    assert bank.desk.met_peers == []


def test_a_peer_that_never_says_hello_is_hung_up_on(bank, monkeypatch):
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT", 1.0)
    assert is_ended(bank.peer("shop").line())
    assert bank.exchange._all() == []


def test_a_peer_that_says_nothing_more_is_hung_up_on(bank, monkeypatch):
    silent, beating = begun(bank), begun(bank, "lab")
    monkeypatch.setattr(exchanges, "SILENCE", 1.0)
    ended = threading.Event()
    threading.Thread(target=lambda: [beating.say(Heartbeat()) for _ in iter(lambda: ended.wait(0.2), True)]).start()
    try:
        silent.wait_over(5.0)
        wait_until(lambda: not bank.exchange.is_up("shop"))
        assert bank.exchange.is_up("lab")
    finally:
        ended.set()


@pytest.mark.parametrize("speaks", [True, False])
def test_a_revoked_peer_is_hung_up_on_within_seconds_also_where_it_only_listens(bank, speaks):
    talk, other = begun(bank), begun(bank, "lab")
    revoke(bank.keys["bank"], "shop")
    if speaks:
        talk.say(Wanted(ID))
    talk.wait_over(4.0)
    assert bank.desk.notes == []
    wait_until(lambda: bank.desk.gone == [("shop", "it is not trusted any more, or has another key")])
    assert not other.over.is_set()
    bank.peer("shop").talk().wait_over(15.0)  # its next handshake is refused
    assert len(bank.desk.met_peers) == 2


def test_a_revoked_peer_that_does_not_read_is_hung_up_on_as_well(bank):
    bank.peer("shop").talk(reads=False)
    wait_until(lambda: bank.exchange.is_up("shop"))
    for _ in range(200):
        bank.exchange.send("shop", Proposed(bytes(200_000), bytes(64)))
    revoke(bank.keys["bank"], "shop")
    wait_until(lambda: not bank.exchange.is_up("shop"))


# what it says


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x00",
        b"\x80",
        b"\x91" * 300_000 + b"\x01",
        b"\x82\xa1y" + b"\x91" * 300_000 + b"\x01\xa4type\xa4view",
        msgspec.msgpack.encode({"type": "import", "job": ID}),
        msgspec.msgpack.encode({"type": "beat", "more": 1}),
        msgspec.msgpack.encode({"type": "wanted", "job": ID + "\n"}),
        msgspec.msgpack.encode({"type": "wanted", "job": "../" + ID[3:]}),
        msgspec.msgpack.encode({"type": "wanted", "job": ID.upper()}),
        msgspec.msgpack.encode({"type": "back", "job": ID, "token": "0" * 64 + "\n"}),
        msgspec.msgpack.encode({"type": "back", "job": "port", "token": "0" * 64}),
        msgspec.msgpack.encode({"type": "view", "job": ID, "state": "done"}),
        msgspec.msgpack.encode({"type": "view", "job": ID, "state": "finished\n"}),
        msgspec.msgpack.encode({"type": "view", "job": ID, "state": "queued", "asks": -1}),
        msgspec.msgpack.encode({"type": "view", "job": ID, "state": "queued", "asks": 1 << 41}),
        msgspec.msgpack.encode({"type": "view", "job": ID, "state": "queued", "reason": "x" * 2001}),
        msgspec.msgpack.encode({"type": "view", "job": ID, "state": "queued", "signed": {"a": b"short"}}),
        msgspec.msgpack.encode({"type": "view", "job": ID, "state": "queued", "signed": {"a" * 64: bytes(64)}}),
        msgspec.msgpack.encode(
            {"type": "view", "job": ID, "state": "queued", "signed": {f"{k}": bytes(64) for k in range(1001)}}
        ),
        msgspec.msgpack.encode({"type": "head", "entry": 1, "digest": bytes(31), "signature": bytes(64)}),
        msgspec.msgpack.encode({"type": "proposed", "proposal": bytes((256 << 10) + 1), "signature": bytes(64)}),
        msgspec.msgpack.encode(Heartbeat()) + b"\0",
        b"\x81\xa4type\xa3\xed\xa0\x80",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=range(25),
)
def test_whatever_nodes_do_not_say_ends_the_conversation_and_is_logged(bank, data, caplog):
    talk = begun(bank)
    talk.say(data)
    talk.wait_over(5.0)
    assert bank.desk.notes == []
    wait_until(lambda: "it sent an invalid note" in caplog.text)
    begun(bank)  # it may come again


@pytest.mark.parametrize("size", [MOST_BYTES + 1, 1 << 30, 1 << 40, (1 << 64) - 1])
def test_a_note_beyond_the_limit_is_refused_before_memory_is_taken(bank, size, caplog):
    talk, other = begun(bank), begun(bank, "lab")
    tracemalloc.start()
    talk.line.send(header(units.FRAME, size), bytes(1000))
    talk.wait_over(10.0)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MOST_BYTES
    wait_until(lambda: "it sent an invalid note" in caplog.text)
    assert_heard(bank, other)


@pytest.mark.parametrize("size", [MOST_BYTES, 1 << 30, 1 << 40, (1 << 64) - 1])
def test_a_connection_that_begins_with_a_frame_takes_no_memory(bank, size):
    other, line = begun(bank, "lab"), bank.peer("shop").line()
    tracemalloc.start()
    line.send(header(units.FRAME, size), bytes(1000))
    assert is_ended(line)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MOST_BYTES
    assert_heard(bank, other)


@pytest.mark.parametrize("size", [(4 << 10) + 1, 1 << 40])
def test_an_introduction_beyond_its_limit_is_not_taken_in(bank, size):
    other, line = begun(bank, "lab"), bank.peer("shop").line()
    line.send(header(units.HELLO, size), bytes(1000))
    assert is_ended(line)
    assert [peer for peer, _ in bank.desk.met_peers] == ["lab"]
    assert_heard(bank, other)


@pytest.mark.parametrize("kind", [units.WELCOME, units.REFUSED, units.ASK, units.PING, units.CLOSING, units.ECHO, 255])
def test_a_connection_that_begins_with_another_unit_is_hung_up_on(bank, kind):
    other, line = begun(bank, "lab"), bank.peer("shop").line()
    line.send(header(kind))
    assert is_ended(line)
    assert_heard(bank, other)


@pytest.mark.parametrize("kind", [*sorted(set(range(12)) - {units.FRAME}), 255])
def test_a_unit_that_is_no_note_ends_the_conversation(bank, kind):
    talk, other = begun(bank), begun(bank, "lab")
    talk.line.send(header(kind))
    talk.say(Wanted(ID))
    talk.wait_over(5.0)
    assert bank.desk.notes == []
    assert_heard(bank, other)


@pytest.mark.parametrize("sent", [header(units.FRAME, 1000)[:10], header(units.FRAME, 1000) + bytes(500)])
@pytest.mark.parametrize("drips", [False, True])
def test_a_note_half_sent_is_silence(bank, monkeypatch, sent, drips):
    """Also where more of it comes, byte by byte."""
    talk, beating = begun(bank), begun(bank, "lab")
    monkeypatch.setattr(exchanges, "SILENCE", 1.0)
    talk.line.send(sent)
    began = time.monotonic()
    while not talk.over.wait(0.2):
        assert time.monotonic() - began < 5.0
        beating.say(Heartbeat())
        if drips:
            drip(talk.line)
    wait_until(lambda: not bank.exchange.is_up("shop"))
    assert bank.desk.notes == [("lab", Heartbeat())] * len(bank.desk.notes)
    assert_heard(bank, beating)


@pytest.mark.parametrize("sent", [b"", header(units.HELLO, 100)[:10], header(units.HELLO, 100) + bytes(50)])
def test_an_introduction_that_drips_is_hung_up_on(bank, monkeypatch, sent):
    other = begun(bank, "lab")
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT", 1.0)
    line, began = bank.peer("shop").line(), time.monotonic()
    line.send(sent)
    while not is_ended(line, 0.2):
        assert time.monotonic() - began < 5.0
        drip(line)
    assert_heard(bank, other)


def test_a_handshake_that_drips_is_hung_up_on(bank, monkeypatch):
    other = begun(bank, "lab")
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT", 1.0)
    hello, began = client_hello(), time.monotonic()
    with raw(bank) as connection:
        for number in range(len(hello)):
            with suppress(OSError):
                connection.send(hello[number : number + 1])
            if is_hung_up(connection, 0.2):
                break
            assert time.monotonic() - began < 5.0
    assert number > 1
    assert_heard(bank, other)


def test_connections_that_never_introduce_themselves_leave_room_for_others(bank, monkeypatch):
    before, other = threads(), begun(bank, "lab")
    peer = bank.peer("shop")
    lines = [peer.line() for _ in range(20)]
    with ExitStack() as stack:
        strangers = [stack.enter_context(raw(bank)) for _ in range(3 * MOST_YOUNG)]
        strangers[-1].sendall(client_hello()[:20])
        assert all(is_ended(line) for line in lines)  # the oldest go
        begun(bank)
        more = threads() - before
        assert more["treaty-caller"] <= MOST_YOUNG + 8
        assert_heard(bank, other)
    wait_until(lambda: (threads() - before)["treaty-caller"] <= 2)
    assert len(bank.exchange._all()) == 2


@pytest.mark.parametrize(
    "answer",
    [b"", b"x" * 100, header(units.FRAME, 1 << 40), header(units.WELCOME, 1 << 20), header(units.FRAME, 1) + b"\xc1"],
    ids=["silence", "garbage", "terabyte", "welcome", "no note"],
)
def test_a_node_that_is_dialled_and_answers_what_it_likes_is_hung_up_on(bank, monkeypatch, answer):
    """The next attempt to open a conversation follows, and others are talked with meanwhile."""
    monkeypatch.setattr(exchanges, "HELLO_TIMEOUT", 1.0)
    lab, own, ended = begun(bank, "lab"), load_own(bank.keys["shop"], "shop"), []

    def serve(line, hello):
        assert msgspec.msgpack.decode(hello, type=Note).name == "bank"
        line.send(answer)
        ended.append(is_ended(line))

    context = tls_context(own.identity, [read_card(bank.keys["bank"] / "bank.card").certificate.encode()], listens=True)
    listener = Listener("shop", f"unix:{bank.folder / 'shop.s'}", lambda: context, serve)
    dialling = Exchange(
        bank.own, lambda: trusted(bank.keys["bank"]), bank.desk.notify, bank.desk.status, bank.desk.head,
        bank.folder / "s2", {"shop": bank.folder / "shop.s"}, "1",
    )  # fmt: skip
    dialling.start()
    try:
        wait_until(lambda: len(ended) >= 2)
        assert all(ended)
        assert [peer for peer, _ in bank.desk.met_peers] == ["lab"]
        assert {peer for peer, _ in bank.desk.gone} == {"shop"}
        assert not dialling.is_up("shop")
        assert_heard(bank, lab)
    finally:
        dialling.close()
        listener.close()


# how much it says


def test_a_flood_of_notes_is_slowed_down(bank):
    """What is heard keeps to the rate, and memory to what sockets hold."""
    talk = begun(bank)
    before, began = rss(os.getpid()), time.monotonic()
    for _ in range(20_000):
        talk.say(Heartbeat())
    wait_until(lambda: len(bank.desk.notes) > 300)
    heard, seconds = len(bank.desk.notes), time.monotonic() - began
    assert heard <= 100 + 110 * seconds
    assert rss(os.getpid()) - before < 40
    assert not talk.over.is_set()


def test_long_notes_count_by_their_length(bank):
    """A peer that sends proposals of the largest size has at most two a second looked at."""
    talk, began = begun(bank), time.monotonic()
    long = msgspec.msgpack.encode(Proposed(bytes(256 << 10), bytes(64)))
    for _ in range(40):
        talk.say(long)
    wait_until(lambda: len(bank.desk.notes) >= 5)
    heard, seconds = len(bank.desk.notes), time.monotonic() - began
    assert heard <= 3 + 2 * seconds


def test_a_slow_desk_makes_the_sender_wait(bank):
    bank.desk.pause = 0.2
    talk, began = begun(bank), time.monotonic()
    before = rss(os.getpid())
    note = msgspec.msgpack.encode(JobStatus(job=ID, state="queued", reason="x" * 2000))
    for _ in range(5000):
        talk.say(note)
    wait_until(lambda: len(bank.desk.notes) >= 8)
    heard, seconds = len(bank.desk.notes), time.monotonic() - began
    assert heard <= 1 + seconds / bank.desk.pause
    assert rss(os.getpid()) - before < 40
    bank.desk.pause = 0.0


def test_who_does_not_read_is_hung_up_on(bank, caplog):
    """Answers to it pile up to a limit."""
    bank.peer("shop").talk(reads=False)
    wait_until(lambda: bank.exchange.is_up("shop"))
    for _ in range(3 * exchanges.MOST_UNSENT):
        bank.exchange.send("shop", Proposed(bytes(1000), bytes(64)))
    wait_until(lambda: not bank.exchange.is_up("shop"))
    assert "does not read" in caplog.text


def test_a_peer_has_its_share_of_conversations_and_no_more_threads(bank):
    before = threads()
    talks = [bank.peer("shop").talk() for _ in range(12)]
    other = begun(bank, "lab")
    wait_until(lambda: sum(talk.over.is_set() for talk in talks) >= len(talks) - MOST_CONVERSATIONS)
    wait_until(lambda: len(bank.exchange._all()) <= MOST_CONVERSATIONS + 1)
    assert not other.over.is_set()
    more = threads() - before
    assert more["treaty-caller"] <= MOST_CONVERSATIONS + 1
    assert more["treaty-notes"] <= MOST_CONVERSATIONS + 1


def test_a_peer_that_comes_and_goes_is_refused_after_a_while(bank):
    """Each coming and going is an entry in the audit log."""
    peer = bank.peer("shop")
    for _ in range(CALLS_A_MINUTE + 20):
        talk = peer.talk()
        talk.say(b"\xc1")
        talk.wait_over(5.0)
    assert isinstance(talk.error, LineRefused)
    assert str(talk.error) == "too many conversations were opened"
    assert len(bank.desk.met_peers) <= CALLS_A_MINUTE + 2
    begun(bank, "lab")


def test_proposals_and_questions_count_more(bank):
    """Each may cost an entry in the audit log, or an answer of a quarter of a megabyte."""
    talk, began = begun(bank), time.monotonic()
    for _ in range(200):
        talk.say(Proposed(b"{}", bytes(64)))
    wait_until(lambda: len(bank.desk.notes) >= 12)
    heard, seconds = len(bank.desk.notes), time.monotonic() - began
    assert heard <= 7 + 5 * seconds


def test_views_of_one_job_are_sent_once_however_often_it_changes(bank):
    talk = begun(bank)
    for _ in range(10_000):
        bank.exchange.send_status("shop", ID)
    bank.exchange.send_status("shop", OTHER)  # the last to be sent
    wait_until(lambda: JobStatus(job=OTHER, state="proposed") in talk.heard)
    assert sum(isinstance(note, JobStatus) for note in talk.heard) < 5000


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from(EVERY))
def test_mutated_notes_are_notes_or_refused(seed, note):
    data = mutated(msgspec.msgpack.encode(note), seed)
    try:
        found = msgspec.msgpack.decode(data, type=Note)
    except (ValueError, RecursionError):  # what `_listen` expects
        return
    assert type(found) in (Hello, HeadNote, Proposed, Wanted, JobStatus, Back, Heartbeat)
    for job in (getattr(found, "job", ID), getattr(found, "token", ID)):
        assert len(job) == 64
        assert job.isalnum()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2**32), st.sampled_from(EVERY)), min_size=1, max_size=8))
def test_mutated_conversations_leave_the_node_able_to_talk(standing, sent):
    talk = standing.peer("shop").talk()
    talk.say(*(mutated(msgspec.msgpack.encode(note), seed) if seed % 3 else note for seed, note in sent))
    talk.say(b"\xc1")  # so that it ends
    talk.wait_over(10.0)
    other = standing.peer("lab").talk()
    other.next(HeadNote)
    other.end()
