"""Peers and strangers who want a party's memory, calls or connections for themselves."""

import contextlib
import resource
import socket
import threading
import time
import tracemalloc

import grpc
import numpy as np
import pytest

from pace import wait_until
from transcripts import by_type
from treaty.errors import ConfigError, PeerLost, PeerProtocolError, TreatyError
from treaty.messaging.channel import OVERHEAD, Credit
from treaty.messaging.grpc_wire import CALLS, DELIVER, VERSION, WATCH, Introduction, encode
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party

LIMIT = 1 << 20


class Count(Message):
    n: int


class Rows(Message):
    rows: Array


@pytest.fixture
def parties(grpc_end, connect):
    """Clinic, with room for a megabyte, and lab and shop, which talk to it."""
    ends = [grpc_end("clinic", ["lab", "shop"], inbox_limit=LIMIT), grpc_end("lab", ["clinic"])]
    ends.append(grpc_end("shop", ["clinic"]))
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


@pytest.mark.slow
def test_messages_that_the_role_does_not_read_wait_at_their_sender(parties):
    rows = np.arange(50_000, dtype=np.uint8)
    tracemalloc.start()
    thread, taken = sending(parties["lab"], [Rows(Array.of(np.roll(rows, k))) for k in range(200)])
    listening = threading.Thread(target=parties["clinic"].receive, args=("shop", Count), daemon=True)
    listening.start()  # takes in what comes, and reads nothing of lab's
    before = stalled(taken, LIMIT // 2 // (50_000 + OVERHEAD))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert before == LIMIT // 2 // (50_000 + OVERHEAD)
    assert held - 200 * 50_000 < LIMIT  # without what the sender keeps: 200 messages
    parties["shop"].send("clinic", Count(1))  # whose share is its own
    listening.join(5)
    assert not listening.is_alive()
    for k in range(200):
        got = view(parties["clinic"].receive("lab", Rows).rows, np.uint8, (50_000,), peer="lab", what="Rows.rows")
        np.testing.assert_array_equal(got, np.roll(rows, k))
    thread.join(5)
    assert len(taken) == 200


def test_empty_messages_count_with_what_is_kept_of_each(parties):
    thread, taken = sending(parties["lab"], [Count(k) for k in range(1000)])
    listening = threading.Thread(target=parties["clinic"].receive, args=("shop", Count), daemon=True)
    listening.start()
    assert stalled(taken, 1) <= LIMIT // 2 // OVERHEAD
    parties["shop"].send("clinic", Count(1))
    listening.join(5)
    assert [parties["clinic"].receive("lab", Count).n for _ in range(1000)] == list(range(1000))
    thread.join(5)


def test_what_a_party_left_out_sends_is_not_made_room_for(parties):
    parties["clinic"].leave_out("lab")
    _, taken = sending(parties["lab"], [Count(k) for k in range(1000)])
    parties["shop"].send("clinic", Count(1))
    assert parties["clinic"].receive("shop", Count).n == 1
    wait_until(lambda: len(taken) >= LIMIT // 2 // (OVERHEAD + 200))
    parties["shop"].send("clinic", Count(2))
    assert parties["clinic"].receive("shop", Count).n == 2  # takes in, and drops, what lab has sent
    assert stalled(taken, 1) <= LIMIT // 2 // OVERHEAD


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


# ---------------------------------------------------------------- calls and connections


@pytest.fixture
def flooded(grpc_end, identities):
    """Clinic, and a way for lab to open calls as it likes on as many connections as it likes."""
    clinic, opened = grpc_end("clinic", ["lab", "shop"]), []
    credentials = grpc.ssl_channel_credentials(
        root_certificates=identities["clinic"].certificate,
        private_key=identities["lab"].key,
        certificate_chain=identities["lab"].certificate,
    )

    def dial():
        options = [("grpc.ssl_target_name_override", "clinic"), ("grpc.use_local_subchannel_pool", 1)]
        opened.append(grpc.secure_channel(clinic.address, credentials, options))
        return opened[-1]

    yield clinic, dial
    for channel in opened:
        channel.close()


def assert_shop_is_served(clinic, grpc_end, together):
    shop = grpc_end("shop", ["clinic"])
    addresses = {"lab": "127.0.0.1:1", "shop": shop.address}
    outcome = together(
        clinic=lambda: clinic.connect(1, addresses, may_lose=["lab"]),
        shop=lambda: shop.connect(5, {"clinic": clinic.address}),
    )
    assert outcome == {"clinic": None, "shop": None}
    with pytest.raises(PeerLost, match="lab did not come"):
        clinic.receive(5)
    shop.send("clinic", b"from the shop", 5)
    assert bytes(clinic.receive(5).frame) == b"from the shop"


def test_a_peer_that_watches_many_times_shuts_nobody_out(flooded, grpc_end, together):
    clinic, dial = flooded
    lab = encode(Introduction(VERSION, "lab", bytes(16)))
    watches = [dial().unary_stream(WATCH)(lab, timeout=20) for _ in range(4) for _ in range(10)]
    for watch in watches:
        with contextlib.suppress(grpc.RpcError):
            next(watch, None)
    assert_shop_is_served(clinic, grpc_end, together)
    assert clinic._server._senders["lab"].calls <= CALLS


def test_a_peer_that_opens_deliveries_and_sends_nothing_shuts_nobody_out(flooded, grpc_end, together):
    clinic, dial = flooded
    end = threading.Event()

    def nothing():
        end.wait(20)
        yield b""

    calls = [dial().stream_unary(DELIVER).future(nothing(), timeout=20) for _ in range(40)]
    assert_shop_is_served(clinic, grpc_end, together)
    end.set()
    codes = [call.code() for call in calls]
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= len(calls) - CALLS


def test_offences_of_a_peer_are_reported_once(flooded):
    clinic, dial = flooded
    channel = dial()
    for _ in range(50):
        with pytest.raises(grpc.RpcError):
            list(channel.unary_stream(WATCH)(encode(Introduction(VERSION, "shop", bytes(16))), timeout=5))
    assert len(clinic._inbox._items) == 1


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
def test_a_job_with_1024_files_survives_1200_idle_connections_of_strangers(grpc_end, process, many_files):
    clinic = grpc_end("clinic", ["lab"])
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


def test_a_message_in_parts_takes_its_size_of_the_share_until_it_is_read(parties, monkeypatch):
    monkeypatch.setattr("treaty.messaging.grpc_channel.FRAME_BYTES", 10_000)
    rows = np.arange(LIMIT // 4, dtype=np.uint8)  # half a share: three of them never fit
    thread, taken = sending(parties["lab"], [Rows(Array.of(np.roll(rows, k))) for k in range(3)])
    listening = threading.Thread(target=parties["clinic"].receive, args=("shop", Count), daemon=True)
    listening.start()
    assert stalled(taken, 1) == 1
    parties["shop"].send("clinic", Count(1))
    listening.join(5)
    for k in range(3):
        got = view(parties["clinic"].receive("lab", Rows).rows, np.uint8, rows.shape, peer="lab", what="Rows.rows")
        np.testing.assert_array_equal(got, np.roll(rows, k))
    thread.join(5)
    assert len(taken) == 3
    for name, direction in (("lab", "sent"), ("clinic", "received")):
        messages, nbytes = by_type(parties[name].transcript, direction)["Rows"]
        assert messages == 3
        assert 3 * rows.nbytes < nbytes < 3 * 1.05 * rows.nbytes


def test_a_message_in_parts_that_never_fits_is_refused_with_the_limit_it_needs(parties, monkeypatch):
    monkeypatch.setattr("treaty.messaging.grpc_channel.FRAME_BYTES", 10_000)
    _, taken = sending(parties["lab"], [Rows(Array.of(np.zeros(LIMIT, np.uint8)))])
    with pytest.raises(PeerProtocolError, match=r"the share of lab in the inbox_limit of clinic.*raise inbox_limit"):
        parties["clinic"].receive("lab", Rows)
    assert not taken


# ---------------------------------------------------------------- faults of the account itself


def test_empty_frames_are_taken_while_what_is_kept_of_each_has_room(monkeypatch):
    credit = Credit("clinic", 10 * OVERHEAD, ["lab"])
    monkeypatch.setattr(credit._changed, "wait", lambda seconds: None)
    assert [credit.take("lab", 0, lambda: False) for _ in range(11)] == [*10 * [True], False]
    credit.give_back("lab", 0)
    assert credit.take("lab", 0, lambda: False)
    assert not credit.take("lab", 0, lambda: False)
