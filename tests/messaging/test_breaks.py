"""Connections that break, again and again or without a word, and peers that are slow: frames arrive once, in order."""

import threading
import time

import pytest

from pace import wait_until, within
from proxy import Proxy
from treaty.errors import PeerLost, PeerProtocolError, PeerTimeout
from treaty.messaging import tls, tls_link, units
from treaty.messaging.channel import OVERHEAD


@pytest.fixture
def both(tls_end, connect):
    """Clinic and lab, each dialling the other through a proxy: (clinic, lab, proxy to clinic, proxy to lab)."""
    clinic, lab = (tls_end(a, [b], reconnect=75.0) for a, b in (("clinic", "lab"), ("lab", "clinic")))
    proxies = Proxy(clinic.address), Proxy(lab.address)
    addresses = {end.name: proxy.address for end, proxy in zip((clinic, lab), proxies, strict=True)}
    assert set(connect([clinic, lab], addresses).values()) == {None}
    yield clinic, lab, *proxies
    for proxy in proxies:
        proxy.close()


def frames(end, peer, count, seconds=30):
    """Receive so many frames, and return their first bytes."""
    found = []
    for _ in range(count):
        arrival = end.receive(seconds)
        assert arrival is not None, f"{len(found)} of {count} came"
        found.append(bytes(arrival.frame[:8]))
        end.mark_read(peer, len(arrival.frame))
    assert end.receive(0.2) is None
    return found


def numbered(count):
    return [b"%08d" % k for k in range(count)]


@pytest.fixture
def full(tls_end, connect):
    """Clinic, and lab, which it dials through a proxy, and whose role reads nothing: a frame of a megabyte fills it."""
    clinic = tls_end("clinic", ["lab"], reconnect=75.0)
    lab = tls_end("lab", ["clinic"], reconnect=75.0, inbox_limit=(1 << 20) + OVERHEAD)
    proxy = Proxy(lab.address)
    assert set(connect([clinic, lab], {"lab": proxy.address, "clinic": clinic.address}).values()) == {None}
    yield clinic, lab, proxy
    proxy.close()


def until_full(clinic):
    """Send frames of a megabyte until one takes too long; return how many left, and the error."""
    for sent in range(60):
        try:
            clinic.send("lab", b"%08d" % sent + bytes((1 << 20) - 8), 0.5)
        except PeerTimeout as error:
            return sent, error
    raise AssertionError("lab takes everything")


def test_a_peer_that_takes_nothing_is_told_as_one_that_is_alive(full):
    clinic, _, _ = full
    _, error = until_full(clinic)
    assert str(error) == "lab took no message for 0.5 s, though its connection is alive"


@pytest.fixture
def resending(full):
    """`full`, sending slowly again what had left, and how many frames that are."""
    clinic, lab, proxy = full
    sent, _ = until_full(clinic)
    proxy.bytes_per_second = 300_000
    proxy.cut()
    wait_until(lambda: clinic._links["lab"]._line is not None and clinic._links["lab"]._writing.locked())
    return clinic, lab, proxy, sent


def test_a_connection_that_breaks_while_frames_are_sent_again_is_dialled_again(resending):
    clinic, lab, proxy, sent = resending
    link = clinic._links["lab"]
    for _ in range(3):
        time.sleep(0.3)
        wait_until(lambda: link._line is not None and link._writing.locked())
        line = link._line
        proxy.cut()
        wait_until(lambda line=line: link._line not in (line, None))
    wait_until(lambda: [thread.name for thread in threading.enumerate()].count("treaty-resend") <= 1, 5)
    proxy.bytes_per_second = None
    assert frames(lab, "clinic", sent) == numbered(sent)


def test_a_delivery_behind_frames_that_are_sent_again_ends_in_time(resending):
    clinic, lab, proxy, sent = resending
    began = time.monotonic()
    with pytest.raises(PeerTimeout, match="though its connection is alive"):
        clinic.send("lab", b"late", 0.5)
    assert 0.4 < time.monotonic() - began < within(3)
    proxy.bytes_per_second = None
    assert frames(lab, "clinic", sent) == numbered(sent)


@pytest.mark.slow
def test_a_peer_that_reads_late_and_slowly_gets_each_frame_once_on_one_connection(full):
    clinic, lab, proxy = full
    wait_until(lambda: clinic._links["lab"]._line is not None)
    line = clinic._links["lab"]._line
    sender = threading.Thread(
        target=lambda: [clinic.send("lab", k + bytes((1 << 20) - 8), 60) for k in numbered(20)], daemon=True
    )
    sender.start()
    time.sleep(5.0)
    found = []
    for _ in range(20):
        time.sleep(0.05)
        arrival = lab.receive(10)
        found.append(bytes(arrival.frame[:8]))
        lab.mark_read("clinic", len(arrival.frame))
    assert found == numbered(20)
    sender.join(10)
    assert clinic._links["lab"]._line is line
    assert proxy.carried < 22 << 20


def test_a_peer_whose_inbox_is_full_and_that_says_so_is_not_asked_for_receipts(full, monkeypatch):
    """There may be no room for the question in its socket."""
    clinic, lab, _ = full
    clinic.send("lab", bytes(1 << 20), 10, receipt=True)
    asked, send = [], tls.Line.send

    def counted(line, unit, content=b"", deadline=None):
        if unit[0] == units.ASK:
            asked.append(line)
        send(line, unit, content, deadline)

    monkeypatch.setattr(tls.Line, "send", counted)
    clinic.send("lab", bytes(1 << 20), 10)
    time.sleep(4.5)
    assert len(asked) <= 1
    lab.mark_read("clinic", 1 << 20)


@pytest.mark.parametrize("answered", [False, True], ids=["one way", "both ways"])
def test_receipts_are_asked_for_where_none_come_with_frames(both, monkeypatch, answered):
    clinic, lab, *_ = both
    monkeypatch.setattr(tls_link, "_MOST_FRAMES", 10)
    asked, send, lines = [], tls.Line.send, [clinic._links["lab"]._line, lab._links["clinic"]._line]

    def counted(line, unit, content=b"", deadline=None):
        if unit[0] == units.ASK and line in lines:
            asked.append(line)
        send(line, unit, content, deadline)

    monkeypatch.setattr(tls.Line, "send", counted)
    for _ in range(55):
        clinic.send("lab", b"a", 10)
        lab.receive(10)
        lab.mark_read("clinic", 1)
        if answered:
            lab.send("clinic", b"b", 10)
            clinic.receive(10)
            clinic.mark_read("lab", 1)
    assert (asked == []) if answered else (1 <= len(asked) <= 5)


@pytest.mark.slow
def test_frames_cross_connections_that_are_reset_twice_a_second(both):
    clinic, lab, *proxies = both
    until, count, failed = time.monotonic() + 15, 2000, []

    def send(end, other):
        try:
            for k, number in enumerate(numbered(count)):
                end.send(other, number + bytes(k % 11 * 20_000), 60)
                time.sleep(0.005)
        except Exception as error:
            failed.append(error)

    for ends in ((clinic, "lab"), (lab, "clinic")):
        threading.Thread(target=send, args=ends, daemon=True).start()
    resets = threading.Thread(target=lambda: reset_until(until, proxies), daemon=True)
    resets.start()
    assert frames(lab, "clinic", count) == numbered(count)
    assert frames(clinic, "lab", count) == numbered(count)
    assert not failed


def reset_until(end, proxies):
    while time.monotonic() < end:
        time.sleep(0.5)
        for proxy in proxies:
            proxy.cut(reset=True)


@pytest.mark.parametrize("size", [10, 20_000_000], ids=["written", "being written"])
def test_a_connection_that_leads_nowhere_is_dialled_again(both, monkeypatch, size):
    """A forwarder has lost it, and keeps it open; the watch stands."""
    monkeypatch.setattr(tls_link, "RECEIPT_TIMEOUT", 2.5)
    clinic, lab, _, proxy = both
    wait_until(lambda: clinic._links["lab"]._line is not None)
    line = clinic._links["lab"]._line
    lost = proxy.swallowed if size < 1000 else proxy.stalled
    lost.update(proxy.ends(line._socket.getsockname()[1]))
    sender = threading.Thread(
        target=lambda: [clinic.send("lab", k + bytes(size), 60) for k in numbered(3)], daemon=True
    )
    sender.start()
    wait_until(lambda: clinic._links["lab"]._line is not line, 20)
    assert clinic.is_up("lab")
    assert frames(lab, "clinic", 3) == numbered(3)


def test_with_a_watch_that_leads_nowhere_the_frames_are_dialled_again_too(both):
    """Long before a receipt is missed."""
    clinic, lab, _, proxy = both
    wait_until(lambda: clinic._links["lab"]._line is not None)
    line, began = clinic._links["lab"]._line, time.monotonic()
    proxy.swallowed.update(proxy.open)
    clinic.send("lab", numbered(1)[0], 30)
    assert frames(lab, "clinic", 1) == numbered(1)
    assert clinic._links["lab"]._line is not line
    assert time.monotonic() - began < within(10)


def test_a_frame_that_was_taken_back_and_came_all_the_same_costs_no_other(both, monkeypatch):
    clinic, lab, _, proxy = both
    link, send = clinic._links["lab"], tls.Line.send
    clinic.send("lab", b"%08d" % 0, 5, receipt=True)
    proxy.refuse()  # the connections that are open go on
    monkeypatch.setattr(tls_link, "_MOST_FRAMES", 0)

    def breaks(line, unit, content=b"", deadline=None):
        if line is link._line and unit[0] == units.ASK:
            wait_until(lambda: clinic._links["lab"]._arrived() >= 0 and lab._server.received("clinic") == 2)
            raise TimeoutError("no answer in time")
        send(line, unit, content, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(tls.Line, "send", breaks)
        with pytest.raises(PeerTimeout):
            clinic.send("lab", b"%08d" % 1, 5)
    lab.send("clinic", b"which brings a receipt", 5)
    later = threading.Thread(target=lambda: clinic.send("lab", b"%08d" % 2, 20, receipt=True), daemon=True)
    later.start()
    wait_until(lambda: link._frames)
    lab.send("clinic", b"and another", 5)
    assert clinic.receive(5) is not None
    assert clinic.receive(5) is not None
    proxy.take_again()
    assert frames(lab, "clinic", 3) == numbered(3)
    later.join(5)
    assert not later.is_alive()


def test_a_receipt_for_a_frame_that_was_not_sent_yet_is_no_fault_of_ours(both, monkeypatch):
    clinic, _, _, _ = both
    link = clinic._links["lab"]
    write = link._write_next

    def lied_to(deadline):
        link.receipted(1 << 60)
        write(deadline)

    wait_until(lambda: link._line is not None)
    monkeypatch.setattr(link, "_write_next", lied_to)
    clinic.send("lab", b"x", 5)
    assert (link._first, link._unwritten, link._next) == (1, 1, 1)


@pytest.mark.parametrize("received", [0, 2, 1 << 60])
def test_a_peer_that_forgets_frames_or_claims_more_than_there_are_is_named(both, received):
    clinic, lab, _, proxy = both
    clinic.send("lab", b"x", 5, receipt=True)
    lab._server._senders["clinic"].received = received
    proxy.cut()
    with pytest.raises(PeerProtocolError, match=f"expected a receipt of 1 to 1 frames, got {received} - from lab"):
        clinic.receive(10)


def test_a_peer_that_starts_after_the_time_to_reconnect_is_not_taken_for_one_that_refuses_frames(tls_end):
    """The watch finds it while an attempt for frames still fails."""
    clinic, lab = tls_end("clinic", ["lab"], reconnect=0.5), tls_end("lab", ["clinic"])
    clinic._links["lab"] = link = clinic._dial("lab", lab.address)
    dial, began = link._dial, time.monotonic()

    def late(purpose, patience):
        if purpose == "watch":
            time.sleep(1.5)
        elif time.monotonic() - began < 1.0:
            time.sleep(0.1)
            return None
        elif not link.connected:
            wait_until(lambda: link.up.is_set())
            return None
        return dial(purpose, patience)

    link._dial = late
    link.start()
    wait_until(lambda: link._line is not None)
    assert link.lost is None


def test_a_peer_that_is_not_there_is_not_dialled_all_the_time(tls_end, monkeypatch):
    attempts = []

    def refused(*how):
        attempts.append(how)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(tls_link, "dial", refused)
    with pytest.raises(PeerLost):
        tls_end("clinic", ["lab"]).connect(1.5, {"lab": "127.0.0.1:1"})
    assert 4 <= len(attempts) <= 30


def test_the_watch_of_a_silent_peer_stands_while_it_answers(tls_end, connect):
    clinic, lab = (tls_end(a, [b], keepalive_time=0.1) for a, b in (("clinic", "lab"), ("lab", "clinic")))
    connect([clinic, lab])
    watched = clinic._links["lab"]._watched
    time.sleep(2.5)
    assert clinic._links["lab"]._watched is watched
    assert clinic.is_up("lab")


def test_a_receipt_that_is_waited_for_is_asked_for(both):
    clinic, lab, _, _ = both
    for number in numbered(5):
        began = time.monotonic()
        clinic.send("lab", number, 10, receipt=True)
        assert time.monotonic() - began < within(1)
    assert frames(lab, "clinic", 5) == numbered(5)
