import math
import threading
import time

import pytest

from treaty.errors import ConfigError, LocalProtocolError, PeerAborted, PeerLost, PeerTimeout
from treaty.messaging import channel
from treaty.messaging.channel import LinkSpeed, memory_channels
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.runs.threads import play

SLOW = LinkSpeed(bits_per_second=1e6, delay=0.1)
PATIENCE = 20  # seconds; no upper bound of a time is claimed beyond this


class Count(Message):
    n: int


def test_every_party_gets_its_own_end():
    channels = memory_channels(["clinic", "lab"])
    assert {name: channel.name for name, channel in channels.items()} == {"clinic": "clinic", "lab": "lab"}


def test_names_must_differ():
    with pytest.raises(LocalProtocolError, match="expected different party names"):
        memory_channels(["clinic", "clinic"])


def test_a_party_that_has_gone_is_not_told_of_later_departures():
    channels = memory_channels(["clinic", "lab"])
    channels["lab"].close()
    channels["clinic"].close()


@pytest.mark.parametrize(("rate", "delay"), [(0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (1e6, -0.1), (1e6, math.nan)])
def test_link_refuses_rates_and_delays_that_mean_nothing(rate, delay):
    with pytest.raises(ConfigError, match="expected bits_per_second above 0 and delay of 0 or more"):
        LinkSpeed(rate, delay)


@pytest.mark.parametrize("nbytes", [0, 1000, 50_000])
def test_frame_arrives_after_its_time_on_the_line_plus_the_delay(nbytes):
    channels = memory_channels(["clinic", "lab"], SLOW)
    start = time.monotonic()
    channels["lab"].send("clinic", bytes(nbytes), 5)
    assert len(channels["clinic"].receive(PATIENCE).frame) == nbytes
    assert 8 * nbytes / 1e6 + 0.1 <= time.monotonic() - start < PATIENCE


def test_second_frame_is_due_when_both_have_left_plus_the_delay_and_the_sender_does_not_wait():
    channels = memory_channels(["clinic", "lab", "shop"], LinkSpeed(1e6, 100.0))
    start = time.monotonic()
    channels["lab"].send("shop", bytes(3_000_000), 5)
    channels["lab"].send("clinic", bytes(1_000_000), 5)
    end = time.monotonic()
    due = channels["clinic"]._own._items[0][0]
    took = 8 * 4e6 / 1e6 * 1500 / 1448 + 100  # packets have headers
    assert start + took <= due + 1e-6
    assert due <= end + took + 1e-6
    assert end - start < PATIENCE
    assert channels["clinic"].receive(0.01) is None


def test_request_and_answer_take_two_delays():
    channels = memory_channels(["clinic", "lab"], LinkSpeed(math.inf, 0.15))
    start = time.monotonic()
    channels["clinic"].send("lab", b"?", 5)
    channels["lab"].send("clinic", channels["lab"].receive(PATIENCE).frame, 5)
    channels["clinic"].receive(PATIENCE)
    assert 0.3 <= time.monotonic() - start < PATIENCE


@pytest.mark.slow
def test_frames_to_several_peers_share_the_uplink():
    channels = memory_channels(["clinic", "lab", "shop"], SLOW)
    start = time.monotonic()
    for peer in ("lab", "shop", "lab"):
        channels["clinic"].send(peer, bytes(25_000), 5)  # 0.2 s each
    arrived = {}

    def take(peer):
        channels[peer].receive(PATIENCE)
        arrived[peer] = time.monotonic() - start

    for peer in ("shop", "lab"):
        take(peer)
    assert arrived["shop"] >= 0.5  # behind the first to lab: 2 * 0.2 + 0.1
    take("lab")
    assert 0.7 <= arrived["lab"] < PATIENCE


def test_uplinks_of_two_senders_are_apart():
    channels = memory_channels(["clinic", "lab", "shop"], LinkSpeed(1e6, 0.0))
    channels["lab"].send("clinic", bytes(4_000_000), 5)  # 32 s, which the other sender does not wait for
    channels["shop"].send("clinic", b"small", 5)
    first = channels["clinic"].receive(PATIENCE)
    assert first is not None
    assert bytes(first.frame) == b"small"


def test_line_that_was_idle_has_saved_nothing_up():
    channels = memory_channels(["clinic", "lab"], LinkSpeed(1e6, 0.0))
    channels["lab"].send("clinic", b"before", 5)
    channels["clinic"].receive(PATIENCE)
    time.sleep(0.3)
    start = time.monotonic()
    channels["lab"].send("clinic", bytes(25_000), 5)
    channels["clinic"].receive(PATIENCE)
    assert 0.2 <= time.monotonic() - start


def test_frames_of_a_sender_keep_their_order_over_a_link():
    channels = memory_channels(["clinic", "lab"], LinkSpeed(1e8, 0.01))
    sizes = [5000 if n % 3 else 1 for n in range(60)]
    for n, size in enumerate(sizes):
        channels["lab"].send("clinic", bytes([n]) * size, 5)
    arrived = [bytes(channels["clinic"].receive(PATIENCE).frame) for _ in sizes]
    assert arrived == [bytes([n]) * size for n, size in enumerate(sizes)]


def test_departure_travels_behind_the_last_frame():
    channels = memory_channels(["clinic", "lab"], SLOW)
    start = time.monotonic()
    channels["lab"].send("clinic", bytes(25_000), 5)
    channels["lab"].close()
    assert len(channels["clinic"].receive(PATIENCE).frame) == 25_000
    with pytest.raises(PeerLost, match="lab is lost: it has closed its channel"):
        channels["clinic"].receive(PATIENCE)
    assert 0.3 <= time.monotonic() - start < PATIENCE
    with pytest.raises(PeerLost, match="lab is lost"):
        channels["clinic"].send("lab", b"x", 5)


def test_what_is_sent_to_a_party_before_its_departure_is_heard_of_vanishes():
    channels = memory_channels(["clinic", "lab"], LinkSpeed(1e6, 100.0))
    channels["lab"].close()
    channels["clinic"].send("lab", b"to nobody", 5)
    assert channels["clinic"].receive(0.01) is None


def test_abort_explains_a_departure_over_a_link_too():
    channels = memory_channels(["clinic", "lab"], SLOW)
    clinic, lab = (Party(a, "j", "p", channels[a], [b], timeout=5) for a, b in [("clinic", "lab"), ("lab", "clinic")])
    lab.abort("disk full")
    channels["lab"].close()
    with pytest.raises(PeerAborted, match="disk full"):
        clinic.receive("lab", Count)
    with pytest.raises(PeerAborted, match="disk full"):
        clinic.send("lab", Count(1))


def test_threads_that_send_at_once_queue_at_one_uplink():
    channels = memory_channels(["clinic", "lab"], LinkSpeed(1e6, 0.0))
    start = time.monotonic()
    threads = [threading.Thread(target=channels["lab"].send, args=("clinic", bytes(5000), 5)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert all(channels["clinic"].receive(PATIENCE) for _ in threads)
    assert 8 * 0.04 <= time.monotonic() - start


def test_play_passes_its_link_on():
    def ask(party):
        party.send("lab", Count(1))
        return party.receive("lab", Count).n

    roles = {"clinic": ask, "lab": lambda party: party.send("clinic", party.receive("clinic", Count))}
    links = {"clinic": ["lab"], "lab": ["clinic"]}
    start = time.monotonic()
    assert play(roles, links, job="j", protocol="p", link=LinkSpeed(1e6, 0.1)).results["clinic"] == 1
    assert 0.2 <= time.monotonic() - start < PATIENCE


def test_a_sender_waits_until_what_it_sent_is_read(monkeypatch):
    monkeypatch.setattr(channel, "_UNREAD", 100)
    monkeypatch.setattr(channel, "_SMALL", 5)
    ends = memory_channels("ab")
    ends["a"].send("b", bytes(500), 1.0)  # a single message of any size
    ends["a"].send("b", bytes(5), 0.0)  # a last word
    with pytest.raises(PeerTimeout, match="b has not read what a sent it"):
        ends["a"].send("b", bytes(10), 0.05)
    ends["b"].send("a", bytes(90), 0.05)  # the other way is another matter
    reader = threading.Timer(0.1, lambda: ends["b"].mark_read("a", 505))
    reader.start()
    ends["a"].send("b", bytes(60), math.inf)
    ends["a"].send("b", bytes(40), 0.05)
    assert [len(ends["b"].receive(1.0).frame) for _ in range(4)] == [500, 5, 60, 40]


def test_a_receiver_hears_one_peer_while_another_waits_for_room(monkeypatch):
    monkeypatch.setattr(channel, "_UNREAD", 100)
    monkeypatch.setattr(channel, "_SMALL", 5)
    ends = memory_channels("xyb")
    ends["x"].send("b", bytes(90), 1.0)
    assert ends["b"].receive(1.0).sender == "x"  # taken in, not read
    blocked = threading.Thread(target=lambda: ends["x"].send("b", bytes(90), PATIENCE))
    blocked.start()
    time.sleep(0.2)  # it waits first
    heard = []
    receiver = threading.Thread(target=lambda: heard.append(ends["b"].receive(PATIENCE).sender))
    receiver.start()
    time.sleep(0.2)
    ends["y"].send("b", bytes(10), 1.0)
    receiver.join(PATIENCE / 2)
    assert heard == ["y"]
    ends["b"].mark_read("x", 90)
    blocked.join(PATIENCE)
    assert not blocked.is_alive()


def test_who_waits_for_a_reader_goes_on_when_it_leaves(monkeypatch):
    monkeypatch.setattr(channel, "_UNREAD", 100)
    monkeypatch.setattr(channel, "_SMALL", 5)
    ends = memory_channels("ab")
    ends["a"].send("b", bytes(500), 1.0)
    threading.Timer(0.1, ends["b"].close).start()
    ends["a"].send("b", bytes(60), 10.0)
    with pytest.raises(PeerLost):
        ends["a"].send("b", bytes(60), 10.0)


def test_what_a_party_said_last_is_read_where_a_channel_goes_on():
    ends = memory_channels("ab")
    parties = {name: Party(name, "j", "p", ends[name], [other]) for name, other in ("ab", "ba")}
    parties["a"].close()
    parties["b"].heed()
    assert not any(ends["b"]._own._unread.values())
