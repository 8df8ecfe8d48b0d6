"""The contract of `Channel`, for every implementation, and the inbox they share."""

import threading
import time

import pytest

from pace import within
from treaty.errors import LocalProtocolError, PeerLost
from treaty.messaging.channel import Arrival, Inbox


def test_frames_arrive_in_order_under_the_name_of_their_sender(ends):
    for n in range(20):
        ends["lab"].send("clinic", b"lab %d" % n, 5)
    arrivals = [ends["clinic"].receive(5) for _ in range(20)]
    assert [bytes(a.frame) for a in arrivals] == [b"lab %d" % n for n in range(20)]
    assert {a.sender for a in arrivals} == {"lab"}


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_frames_of_any_size_arrive_unchanged(ends, size):
    frame = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    ends["clinic"].send("shop", frame[:size], 5)
    assert bytes(ends["shop"].receive(5).frame) == frame[:size]


def test_receive_without_arrival_returns_none_after_its_timeout(ends):
    start = time.monotonic()
    assert ends["lab"].receive(0.1) is None
    assert 0.09 < time.monotonic() - start < within(10)


def test_received_frames_are_read_only(ends):
    ends["clinic"].send("lab", b"abc", 5)
    assert memoryview(ends["lab"].receive(5).frame).readonly


def test_closing_is_noticed_once_by_every_peer_after_the_frames_sent_before(ends):
    ends["clinic"].send("lab", b"last words", 5)
    ends["clinic"].close()
    assert bytes(ends["lab"].receive(5).frame) == b"last words"
    for name in ("lab", "shop"):
        with pytest.raises(PeerLost, match="clinic is lost: it has closed its channel") as caught:
            ends[name].receive(5)
        assert caught.value.peer == "clinic"
        assert ends[name].receive(0.1) is None


def test_sending_to_a_closed_peer_raises_peer_lost(ends):
    ends["lab"].close()
    with pytest.raises(PeerLost, match="lab is lost"):
        ends["clinic"].receive(5)
    with pytest.raises(PeerLost, match="lab is lost"):
        ends["clinic"].send("lab", b"x", 5)
    ends["clinic"].send("shop", b"still here", 5)


@pytest.mark.parametrize("to", ["nobody", "clinic"])
def test_sending_to_no_peer_is_our_own_fault(ends, to):
    with pytest.raises(LocalProtocolError, match=to):
        ends["clinic"].send(to, b"x", 5)


def test_closed_channel_refuses_use_and_closes_twice(ends):
    ends["clinic"].close()
    ends["clinic"].close()
    with pytest.raises(LocalProtocolError, match="clinic has closed"):
        ends["clinic"].receive(1)
    with pytest.raises(LocalProtocolError, match="clinic has closed"):
        ends["clinic"].send("lab", b"x", 1)


def test_closing_wakes_a_thread_that_waits(ends, together):
    threading.Timer(0.2, ends["clinic"].close).start()
    start = time.monotonic()
    outcome = together(clinic=lambda: ends["clinic"].receive(30))
    assert isinstance(outcome["clinic"], LocalProtocolError)
    assert time.monotonic() - start < within(10)  # not 30


def test_inbox_gives_items_when_due_and_equal_ones_in_order():
    inbox = Inbox("clinic")
    start = time.monotonic()
    for name, after in [("c", 0.2), ("a", 0.1), ("b", 0.1), ("now", -1.0)]:
        inbox.put(Arrival(name, b""), start + after)
    assert inbox.get(0).sender == "now"
    assert inbox.get(0) is None
    for name, after in [("a", 0.1), ("b", 0.1), ("c", 0.2)]:
        assert inbox.get(5).sender == name
        assert time.monotonic() >= start + after


def test_inbox_wakes_for_an_item_due_before_the_one_it_waits_for():
    inbox = Inbox("clinic")
    start = time.monotonic()
    inbox.put(Arrival("late", b""), start + 30)
    threading.Timer(0.1, inbox.put, [Arrival("soon", b""), start + 0.3]).start()
    assert inbox.get(20).sender == "soon"
    assert 0.3 <= time.monotonic() - start < within(10)


def test_inbox_waits_no_longer_than_its_timeout_for_what_is_not_due():
    inbox = Inbox("clinic")
    inbox.put(Arrival("late", b""), time.monotonic() + 30)
    start = time.monotonic()
    assert inbox.get(0.1) is None
    assert 0.1 <= time.monotonic() - start < within(10)


def test_waiting_for_what_is_not_due_takes_no_processor_time():
    inbox = Inbox("clinic")
    inbox.put(Arrival("late", b""), time.monotonic() + 0.5)
    before = time.thread_time()
    assert inbox.get(5).sender == "late"
    assert time.thread_time() - before < 0.1


def test_inbox_drops_what_comes_after_closing():
    inbox = Inbox("clinic")
    inbox.put(Arrival("lab", b"x"))
    inbox.close()
    inbox.put(Arrival("lab", b"y"))
    with pytest.raises(LocalProtocolError, match="clinic has closed"):
        inbox.get(0)
