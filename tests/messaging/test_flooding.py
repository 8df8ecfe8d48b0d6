"""Peers and strangers who want a party's memory, calls or connections for themselves."""

import contextlib
import resource
import socket
import threading
import time
import tracemalloc

import numpy as np
import pytest

from pace import wait_until
from transcripts import by_type
from treaty.errors import ConfigError, PeerProtocolError, TreatyError
from treaty.messaging import tls_channel
from treaty.messaging.channel import OVERHEAD, Credit
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party

LIMIT = 1 << 20


class Count(Message):
    n: int


class Rows(Message):
    rows: Array


@pytest.fixture
def parties(tls_end, connect):
    """Clinic, with room for a megabyte, and lab and shop, which talk to it."""
    ends = [tls_end("clinic", ["lab", "shop"], inbox_limit=LIMIT), tls_end("lab", ["clinic"])]
    ends.append(tls_end("shop", ["clinic"]))
    assert set(connect(ends).values()) == {None}
    peers = {"clinic": ["lab", "shop"], "lab": ["clinic"], "shop": ["clinic"]}
    return {end.name: Party(end.name, "j", "p", end, peers[end.name], timeout=30) for end in ends}


def sending(party, messages):
    """Send messages to clinic from a thread of its own; return the thread and the list of those that were taken."""
    taken = []

    def run():
        with contextlib.suppress(TreatyError):  # when the test is over
            for message in messages:
                party.send("clinic", message)
                taken.append(message)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, taken


def stalled(taken, least):
    """Wait until so many messages, and then no more, are taken; return how many were."""
    wait_until(lambda: len(taken) >= least)
    before = -1
    while len(taken) != before:
        before = len(taken)
        time.sleep(0.5)
    return before


@pytest.fixture
def small_window(monkeypatch):
    monkeypatch.setattr(tls_channel, "WINDOW", LIMIT)


MOST_SENT = LIMIT // 2 + LIMIT + (16 << 20)
"""Bytes that may have left: a share, a window, and what sockets hold."""


@pytest.mark.usefixtures("small_window")
def test_messages_that_the_role_does_not_read_wait_at_their_sender(parties):
    rows, count = np.arange(500_000, dtype=np.uint8), 100
    tracemalloc.start()
    thread, taken = sending(parties["lab"], (Rows(Array.of(np.roll(rows, k))) for k in range(count)))
    listening = threading.Thread(target=parties["clinic"].receive, args=("shop", Count), daemon=True)
    listening.start()  # takes in what comes, and reads nothing of lab's
    before = stalled(taken, 1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert before * 500_000 < MOST_SENT
    assert held - before * 500_000 < 4 * LIMIT  # without what the test keeps
    parties["shop"].send("clinic", Count(1))  # whose share is its own
    listening.join(5)
    assert not listening.is_alive()
    for k in range(count):
        got = view(parties["clinic"].receive("lab", Rows).rows, np.uint8, rows.shape, peer="lab", what="Rows.rows")
        np.testing.assert_array_equal(got, np.roll(rows, k))
    thread.join(5)
    assert len(taken) == count


def test_empty_messages_count_with_what_is_kept_of_each(parties):
    """A receiver takes in as many as have room, and lets the others wait in their socket."""
    thread, taken = sending(parties["lab"], [Count(k) for k in range(1000)])
    listening = threading.Thread(target=parties["clinic"].receive, args=("shop", Count), daemon=True)
    listening.start()
    stalled(taken, 1)
    assert parties["clinic"].channel._server.received("lab") <= LIMIT // 2 // OVERHEAD
    parties["shop"].send("clinic", Count(1))
    listening.join(5)
    assert [parties["clinic"].receive("lab", Count).n for _ in range(1000)] == list(range(1000))
    thread.join(5)


def test_what_a_party_left_out_sends_is_not_made_room_for(parties):
    parties["clinic"].leave_out("lab")
    _, taken = sending(parties["lab"], [Count(k) for k in range(1000)])
    parties["shop"].send("clinic", Count(1))
    assert parties["clinic"].receive("shop", Count).n == 1
    received = parties["clinic"].channel._server.received
    wait_until(lambda: received("lab") >= LIMIT // 2 // (OVERHEAD + 200))
    parties["shop"].send("clinic", Count(2))
    assert parties["clinic"].receive("shop", Count).n == 2  # takes in, and drops, what lab has sent
    stalled(taken, 1)
    assert received("lab") <= LIMIT // 2 // OVERHEAD


# ---------------------------------------------------------------- shares


def test_all_shares_together_are_the_limit():
    credit = Credit("clinic", 1 << 20, [f"p{k}" for k in range(7)])
    assert sum(credit.largest(f"p{k}") + OVERHEAD for k in range(7)) <= 1 << 20
    credit.divide(may_lose=[f"p{k}" for k in range(5)])
    assert [credit.largest(f"p{k}") + OVERHEAD for k in range(7)] == 5 * [(1 << 19) // 5] + 2 * [1 << 18]


def test_the_limit_named_for_a_larger_message_is_the_least_that_takes_it():
    peers = [f"p{k}" for k in range(7)]
    credit = Credit("clinic", 1 << 20, peers)
    credit.divide(may_lose=peers[:5])
    for peer in ("p0", "p6"):
        named = credit.limit_for(peer, 3 << 20)
        for limit, takes in ((named + 8, True), (named - (1 << 10), False)):
            other = Credit("clinic", limit, peers)
            other.divide(may_lose=peers[:5])
            assert (other.largest(peer) >= 3 << 20) == takes


def test_a_limit_too_low_for_so_many_peers_is_refused():
    with pytest.raises(ConfigError, match=r"inbox_limit that leaves each of 200 peers 8192 bytes.*5242 for one"):
        Credit("clinic", 1 << 20, [f"p{k}" for k in range(200)])


def test_nobody_waits_at_a_closed_inbox():
    credit = Credit("clinic", 1 << 20, ["lab"])
    assert credit.take("lab", (1 << 20) - OVERHEAD, lambda: True)
    waiting = threading.Thread(target=credit.take, args=("lab", 1, lambda: True), daemon=True)
    waiting.start()
    credit.close()
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_sender_that_has_gone_does_not_wait():
    credit = Credit("clinic", 1 << 20, ["lab"])
    assert credit.take("lab", (1 << 20) - OVERHEAD, lambda: True)
    assert not credit.take("lab", 1, lambda: False)
    credit.give_back("lab", (1 << 20) - OVERHEAD)
    assert credit.take("lab", (1 << 20) - OVERHEAD, lambda: True)


# ---------------------------------------------------------------- connections


@pytest.fixture
def many_files():
    """Let this process open 4,000 files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 4000:
        pytest.skip("the system allows this process too few open files for so many connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4000), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
def test_a_job_with_1024_files_survives_1200_idle_connections_of_strangers(tls_end, process, many_files):
    clinic = tls_end("clinic", ["lab"])
    child = process("lab", clinic, "open_files", descriptors=1024)
    clinic.connect(20, {"lab": child.address})
    party = Party("clinic", "j", "p", clinic, ["lab"], timeout=30)
    host, _, port = child.address.rpartition(":")
    with contextlib.ExitStack() as kept:
        for _ in range(1200):
            connection = kept.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
        for _ in range(2):
            time.sleep(1.0)  # for the strangers' connections to be taken
            party.send("lab", Rows(Array.of(np.arange(200_000))))
            party.receive("lab", Rows)


# ---------------------------------------------------------------- messages in parts


@pytest.mark.usefixtures("small_window")
def test_a_message_in_parts_takes_its_size_of_the_share_until_it_is_read(parties, monkeypatch):
    rows, count = np.arange(LIMIT // 4, dtype=np.uint8), 100  # half a share: three of them never fit
    monkeypatch.setattr("treaty.messaging.tls_channel.FRAME_BYTES", 10_000)
    for party in parties.values():
        party.channel.frame_bytes = 10_000
    thread, taken = sending(parties["lab"], (Rows(Array.of(np.roll(rows, k))) for k in range(count)))
    listening = threading.Thread(target=parties["clinic"].receive, args=("shop", Count), daemon=True)
    listening.start()
    assert stalled(taken, 1) * rows.nbytes < MOST_SENT
    received = parties["clinic"].channel._server.received("lab")
    assert received * 10_000 < LIMIT // 2
    parties["shop"].send("clinic", Count(1))
    listening.join(5)
    for k in range(count):
        got = view(parties["clinic"].receive("lab", Rows).rows, np.uint8, rows.shape, peer="lab", what="Rows.rows")
        np.testing.assert_array_equal(got, np.roll(rows, k))
    thread.join(5)
    assert len(taken) == count
    for name, direction in (("lab", "sent"), ("clinic", "received")):
        messages, nbytes = by_type(parties[name].transcript, direction)["Rows"]
        assert messages == count
        assert count * rows.nbytes < nbytes < count * 1.05 * rows.nbytes


def test_a_message_in_parts_that_never_fits_is_refused_with_the_limit_it_needs(parties, monkeypatch):
    monkeypatch.setattr("treaty.messaging.tls_channel.FRAME_BYTES", 10_000)
    sending(parties["lab"], [Rows(Array.of(np.zeros(LIMIT, np.uint8)))])
    with pytest.raises(PeerProtocolError, match=r"the share of lab in the inbox_limit of clinic.*raise inbox_limit"):
        parties["clinic"].receive("lab", Rows)


# ---------------------------------------------------------------- faults of the account itself


def test_empty_frames_are_taken_while_what_is_kept_of_each_has_room(monkeypatch):
    credit = Credit("clinic", 10 * OVERHEAD, ["lab"])
    monkeypatch.setattr(credit._changed, "wait", lambda seconds: None)
    assert [credit.take("lab", 0, lambda: False) for _ in range(11)] == [*10 * [True], False]
    credit.give_back("lab", 0)
    assert credit.take("lab", 0, lambda: False)
    assert not credit.take("lab", 0, lambda: False)
