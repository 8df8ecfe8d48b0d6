"""How the dialling end notices death, survives broken connections and explains refusals."""

import _thread
import contextlib
import gc
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from pace import wait_until, within
from proxy import Proxy
from treaty.errors import LocalProtocolError, PeerLost, PeerProtocolError, PeerTimeout
from treaty.messaging import grpc_channel, grpc_link
from treaty.messaging.certificates import fingerprint, make_identity
from treaty.messaging.grpc_server import Server
from treaty.messaging.grpc_wire import CHUNK, grpc
from treaty.messaging.messages import Array, Message
from treaty.messaging.party import Party


class Rows(Message):
    rows: Array


either_way = pytest.mark.parametrize("size", [CHUNK, CHUNK + 1], ids=["post", "stream"])
"""The largest frame that goes in one piece, and the smallest that does not."""


@pytest.fixture
def clinic(grpc_end):
    return grpc_end("clinic", ["lab", "shop"])


@pytest.fixture
def shop(grpc_end):
    return grpc_end("shop", ["clinic"])


@pytest.fixture
def clinic_party(clinic):
    return Party("clinic", "j", "p", clinic, ["lab", "shop"], timeout=30)


def connect_clinic_and_shop(clinic, shop, together, lab_address):
    outcome = together(
        clinic=lambda: clinic.connect(20, {"lab": lab_address, "shop": shop.address}),
        shop=lambda: shop.connect(20, {"clinic": clinic.address}),
    )
    assert outcome == {"clinic": None, "shop": None}


@pytest.mark.slow
def test_killed_process_is_noticed_within_5_seconds_while_waiting_for_another(
    clinic, shop, clinic_party, process, together
):
    child = process("lab", clinic, "idle")
    connect_clinic_and_shop(clinic, shop, together, child.address)
    assert child.stdout.readline().strip() == "connected"
    child.send_signal(signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerLost, match="lab is lost: its connection broke") as caught:
        clinic_party.receive("shop", Rows)
    assert caught.value.peer == "lab"
    assert time.monotonic() - start < within(10)
    with pytest.raises(PeerLost, match="lab is lost") as again:
        clinic.send("lab", b"x", 5)
    assert child.address in str(again.value)  # for us
    assert again.value.public == "lab is lost: its connection broke"  # for the others, who are told why we stop


@pytest.mark.slow
@pytest.mark.parametrize("size", [1000, 50_000_000])
def test_stopped_process_is_noticed_by_keepalive_even_in_the_middle_of_a_send(
    clinic, shop, clinic_party, process, together, size
):
    child = process("lab", clinic, "idle")
    connect_clinic_and_shop(clinic, shop, together, child.address)
    child.stdout.readline()
    clinic.send("lab", b"over the connection for frames", 5)  # else it would not be there yet
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)  # or it might still take a small frame
    start = time.monotonic()
    outcome = together(
        sender=lambda: clinic.send("lab", bytes(size), 60),
        receiver=lambda: clinic_party.receive("shop", Rows),
    )
    assert time.monotonic() - start < within(8)  # keepalive 1 s + 1 s, reconnect 1 s
    for error in outcome.values():
        assert isinstance(error, PeerLost), error
        assert error.peer == "lab"


@pytest.mark.slow
def test_process_that_holds_pythons_lock_is_not_taken_for_dead(clinic, shop, clinic_party, process, together):
    child = process("lab", clinic, "hold_lock")  # for 5 s, of which any 3 s would do
    connect_clinic_and_shop(clinic, shop, together, child.address)
    clinic_party.send("lab", Rows(Array.of(np.arange(3))))
    start = time.monotonic()
    clinic_party.receive("lab", Rows)
    assert time.monotonic() - start > 4
    with pytest.raises(PeerTimeout):
        clinic_party.receive("shop", Rows, timeout=0.2)


@pytest.mark.slow
def test_process_that_ends_after_its_goodbye_is_not_a_death(clinic, shop, clinic_party, process, together):
    child = process("lab", clinic, "goodbye")
    connect_clinic_and_shop(clinic, shop, together, child.address)
    assert child.wait(within(20)) == 0, child.stderr.read()  # it never closes its channel, and ends all the same
    clinic_party.receive("lab", Rows)
    with pytest.raises(PeerTimeout):
        clinic_party.receive("shop", Rows, timeout=2.5)


@pytest.fixture
def proxied(grpc_end, connect):
    """Clinic and lab, clinic dialling lab through a proxy."""
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    proxy = Proxy(lab.address)
    assert set(connect([clinic, lab], {"lab": proxy.address, "clinic": clinic.address}).values()) == {None}
    yield clinic, lab, proxy
    proxy.close()


@pytest.fixture
def patient(grpc_end, connect):
    """Clinic and lab, clinic dialling lab through a proxy, with a minute and more for a connection to come back."""
    clinic, lab = (grpc_end(a, [b], reconnect=75.0) for a, b in (("clinic", "lab"), ("lab", "clinic")))
    proxy = Proxy(lab.address)
    assert set(connect([clinic, lab], {"lab": proxy.address, "clinic": clinic.address}).values()) == {None}
    yield clinic, lab, proxy
    proxy.close()


def test_small_frames_are_posted_and_larger_ones_streamed(monkeypatch, grpc_end, connect):
    ways = []

    def spied(name, real):
        def spy(*call):
            ways.append(name)
            return real(*call)

        return spy

    for name in ("_post", "_deliver"):
        monkeypatch.setattr(Server, name, spied(name, getattr(Server, name)))
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    connect([clinic, lab])
    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1):
        frame = np.arange(size).astype(np.uint8).tobytes()
        clinic.send("lab", frame, 5)
        assert bytes(lab.receive(0).frame) == frame
    assert ways == ["_post"] * 4 + ["_deliver"]


@pytest.mark.slow
@either_way
def test_message_whose_answer_is_lost_is_resent_and_dropped_by_its_number(monkeypatch, grpc_end, connect, size):
    real, numbers = Server._take, []

    def losing_the_answer(server, peer, announced, pieces, context):
        answer = real(server, peer, announced, pieces, context)
        numbers.append(announced.number)
        if numbers == [0]:
            proxy.cut()
        return answer

    monkeypatch.setattr(Server, "_take", losing_the_answer)
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    proxy = Proxy(lab.address)
    connect([clinic, lab], {"lab": proxy.address, "clinic": clinic.address})
    clinic.send("lab", b"a" * size, 10)
    clinic.send("lab", b"b" * size, 10)
    assert [bytes(lab.receive(0).frame) for _ in range(2)] == [b"a" * size, b"b" * size]
    assert lab.receive(0.2) is None
    assert numbers == [0, 0, 1]
    proxy.close()


@pytest.mark.slow
def test_message_cut_off_half_way_is_resent_and_arrives_once(proxied):
    clinic, lab, proxy = proxied
    proxy.cut_after = proxy.carried + 10_000_000
    frame = bytes(range(256)) * 80_000
    clinic.send("lab", frame, 30)
    clinic.send("lab", b"next", 30)
    assert bytes(lab.receive(5).frame) == frame
    assert bytes(lab.receive(5).frame) == b"next"
    assert lab.receive(0.2) is None
    assert clinic.receive(1.5) is None  # nobody was declared lost


@pytest.mark.slow
def test_broken_idle_connection_is_dialled_again(proxied):
    clinic, lab, proxy = proxied
    proxy.cut()
    assert clinic.receive(2) is None
    clinic.send("lab", b"abc", 5)
    assert bytes(lab.receive(5).frame) == b"abc"


@pytest.mark.slow
def test_dead_network_is_noticed_by_keepalive(proxied):
    clinic, _, proxy = proxied
    proxy.flowing.clear()
    start = time.monotonic()
    with pytest.raises(PeerLost, match="lab is lost: its connection broke"):
        clinic.receive(20)
    assert time.monotonic() - start < within(8)
    proxy.flowing.set()


@pytest.mark.slow
def test_others_are_told_of_a_lost_peer_without_its_address(proxied):
    clinic, _, proxy = proxied
    proxy.close()
    with pytest.raises(PeerLost, match=f"lab at {proxy.address} was not reachable") as caught:
        clinic.receive(20)
    assert caught.value.public == "lab is lost: its connection broke"


def test_a_peer_that_is_heard_but_takes_no_connection_is_given_up_after_the_time_to_reconnect(monkeypatch, request):
    monkeypatch.setattr(grpc_link.PeerLink, "start", lambda link: link._watcher.start())  # frames have to dial again
    clinic, _, proxy = request.getfixturevalue("proxied")
    monkeypatch.setattr(grpc_link, "RESEND_LIMIT", 1)
    proxy.refuse()  # the watch goes on
    with pytest.raises(PeerLost, match=r"deliveries failed \(.*127\.0\.0\.1") as caught:
        clinic.send("lab", b"x", 10)
    assert caught.value.public.endswith("deliveries failed")
    assert clinic.is_up("lab")


def outage(proxied, how, seconds, sizes):
    """Send messages in both directions while the connection fails; return what arrived at both."""
    clinic, lab, proxy = proxied
    failing = threading.Thread(target=proxy.fail, args=(how, seconds))
    for size in sizes[:1]:
        clinic.send("lab", b"%d" % size + bytes(size), 30)
    failing.start()
    for size in sizes[1:]:
        clinic.send("lab", b"%d" % size + bytes(size), 30 + seconds)
        lab.send("clinic", b"%d" % size, 30 + seconds)
    failing.join()
    clinic.send("lab", b"last", 30)
    taken = [bytes(lab.receive(5).frame) for _ in range(len(sizes) + 1)]
    assert taken == [*(b"%d" % size + bytes(size) for size in sizes), b"last"]
    assert [bytes(clinic.receive(5).frame) for _ in sizes[1:]] == [b"%d" % size for size in sizes[1:]]
    assert lab.receive(0.1) is None
    assert clinic.receive(0.1) is None


HOWS = ["refuse", "reset", "hang up", "freeze", "drain"]
SIZES = [10, CHUNK, 20, CHUNK + 1, 3_000_000, 30]


@pytest.mark.parametrize("how", [HOWS[0], *(pytest.param(how, marks=pytest.mark.slow) for how in HOWS[1:])])
def test_messages_arrive_once_and_in_order_across_an_outage_of_3_seconds(patient, how):
    outage(patient, how, 3.0, SIZES)


@pytest.mark.slow
def test_messages_arrive_once_and_in_order_across_an_outage_longer_than_all_limits_but_reconnect(patient):
    """Between which a connection is given up and attempts to connect are furthest apart."""
    outage(patient, "reset", 12.0, SIZES)


def test_a_refused_connection_is_not_told_as_one_that_is_alive(patient):
    clinic, _, proxy = patient
    party = Party("clinic", "j", "p", clinic, ["lab"], timeout=1.0)
    party.send("lab", Rows(Array.of(np.arange(3))))
    proxy.refuse()
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(PeerTimeout, match="lab took no message for 1 s: its connection broke and has not come") as sent:
        party.send("lab", Rows(Array.of(np.arange(3))))
    assert time.monotonic() - began < within(10)
    assert proxy.address in str(sent.value)
    assert "certificate" not in str(sent.value)  # it had just worked
    assert sent.value.public == "lab took no message for 1 s: its connection broke and has not come back"
    with pytest.raises(PeerTimeout, match="got nothing; lab is not reachable just now"):
        party.receive("lab", Rows, timeout=0.2)


def test_a_frame_that_is_refused_at_once_again_and_again_is_resent_until_its_deadline_alone(patient, monkeypatch):
    """As gRPC answers for a connection that stands no more: before it looks at the time that an attempt has."""
    link, clock, attempts = patient[0]._links["lab"], time.monotonic(), []

    def refuse(link, announcement, frame, timeout):
        attempts.append(timeout)
        assert len(attempts) < 100
        return grpc.StatusCode.UNAVAILABLE, "connection refused"

    monkeypatch.setattr(grpc_link.PeerLink, "_hand_over", refuse)
    monkeypatch.setattr(grpc_link.PeerLink, "_hopeless", lambda *_: False)  # the watch has not given the peer up
    monkeypatch.setattr(grpc_link, "time", SimpleNamespace(monotonic=lambda: clock + 0.25 * len(attempts)))
    monkeypatch.setattr(grpc_link, "RETRY_PAUSE", 0.0)
    with pytest.raises(PeerTimeout, match="lab took no message for 2 s: its connection broke and has not come back"):
        link.deliver(b"x", 2.0)
    assert len(attempts) == 8


@pytest.mark.slow
def test_a_connection_that_a_forwarder_hangs_up_on_is_not_blamed_on_certificates_that_worked(proxied):
    clinic, _, proxy = proxied
    proxy.hangs_up = True
    proxy.cut()
    with pytest.raises(PeerLost, match="lab is lost: its connection broke") as caught:
        clinic.receive(20)
    assert f"lab at {proxy.address} was not reachable" in str(caught.value)
    assert "certificate" not in str(caught.value)


@pytest.mark.slow
def test_parties_wait_behind_a_forwarder_that_accepts_before_its_party_does(grpc_end, together):
    """Longer than a connection that is refused for its certificate is tried."""
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    forwarder = Proxy(lab.address)
    threading.Thread(target=forwarder.fail, args=("hang up", grpc_channel.REFUSAL_PATIENCE + 3.0), daemon=True).start()
    time.sleep(0.2)
    outcome = together(
        clinic=lambda: clinic.connect(30, {"lab": forwarder.address}),
        lab=lambda: lab.connect(30, {"clinic": clinic.address}),
    )
    forwarder.close()
    assert outcome == {"clinic": None, "lab": None}


@pytest.mark.slow
def test_slow_link_is_not_taken_for_a_dead_one(proxied):
    clinic, lab, proxy = proxied
    proxy.bytes_per_second = 1_000_000
    start = time.monotonic()
    clinic.send("lab", bytes(4_000_000), 30)
    assert time.monotonic() - start > 3  # keepalive: 1 s + 1 s
    assert len(lab.receive(0).frame) == 4_000_000
    assert proxy.carried < 7_000_000  # sent once
    assert clinic.receive(0) is None


def test_restarted_process_is_not_taken_for_the_one_before(proxied, grpc_end):
    clinic, _, proxy = proxied
    other = grpc_end("lab", ["clinic"])
    host, _, port = other.address.rpartition(":")
    proxy.target = (host, int(port))
    proxy.cut()
    with pytest.raises(PeerLost, match="lab is lost: it was restarted, another process answers now"):
        clinic.receive(5)


@pytest.mark.slow
@either_way
def test_peer_that_takes_nothing_is_given_up_after_the_timeout(proxied, calls, size):
    clinic, lab, _ = proxied
    with lab._server._senders["clinic"].turn:
        start = time.monotonic()
        with pytest.raises(PeerTimeout, match=r"lab took no message for 0\.5 s, though its connection is alive"):
            clinic.send("lab", bytes(size), 0.5)
        assert time.monotonic() - start < within(10)
        wait_until(lambda: not any(call.is_active() for call in calls))  # lab knows
    assert lab.receive(0.5) is None
    clinic.send("lab", b"next", 5)
    assert bytes(lab.receive(0).frame) == b"next"


def test_peers_that_have_stopped_are_not_waited_for_one_after_another(grpc_end, connect, monkeypatch):
    clinic = grpc_end("clinic", ["lab", "shop"])
    assert set(connect([clinic, grpc_end("lab", ["clinic"]), grpc_end("shop", ["clinic"])]).values()) == {None}
    both, close = threading.Barrier(2), grpc_link.PeerLink.close
    with monkeypatch.context() as patch:
        patch.setattr(grpc_link.PeerLink, "close", lambda link: (both.wait(within(10)), close(link)))
        clinic.close()


@pytest.mark.slow
@either_way
def test_closing_ends_a_delivery_under_way(proxied, together, size):
    clinic, lab, _ = proxied
    ended = []

    def send():
        with pytest.raises(LocalProtocolError, match="got one that clinic has closed"):
            clinic.send("lab", bytes(size), 30)
        ended.append(time.monotonic())

    def close():
        time.sleep(0.5)
        ended.append(time.monotonic())
        clinic.close()

    with lab._server._senders["clinic"].turn:
        assert together(sender=send, closer=close) == {"sender": None, "closer": None}
    closed, gone = ended
    assert gone - closed < within(10)  # not 30


@either_way
def test_closing_just_before_a_delivery_is_told_as_such(proxied, monkeypatch, size):
    clinic, _, _ = proxied
    real = grpc_link.PeerLink._hand_over

    def closed_first(link, *delivery):
        clinic.close()
        return real(link, *delivery)

    monkeypatch.setattr(grpc_link.PeerLink, "_hand_over", closed_first)
    with pytest.raises(LocalProtocolError, match="got one that clinic has closed"):
        clinic.send("lab", bytes(size), 5)


def test_closing_just_before_a_watch_is_opened_ends_it(proxied):
    clinic, _, _ = proxied
    link = clinic._links["lab"]
    link._channels[0].close()
    link._watcher.join(5)
    assert not link._watcher.is_alive()
    assert link.lost is None


@pytest.mark.slow
@either_way
def test_no_failed_call_is_left_for_the_end_of_the_process(proxied, size):
    """Where the thread that serves a call has been stopped with the call's lock held, its end waits forever."""
    clinic, lab, proxy = proxied
    gc.collect()
    gc.disable()
    try:
        proxy.cut()
        clinic.send("lab", bytes(size), 5)
        with lab._server._senders["clinic"].turn, pytest.raises(PeerTimeout):
            clinic.send("lab", bytes(size), 0.3)
        lab.close()
        clinic._links["lab"]._watcher.join(10)
        with pytest.raises(PeerLost):
            clinic.send("lab", bytes(size), 5)
        clinic.close()
        left = [found for found in gc.get_objects() if issubclass(type(found), grpc.Call)]
        assert not left, left
    finally:
        gc.enable()


@pytest.fixture
def interruptible():
    """Have interrupts raise KeyboardInterrupt, which processes of a distributed test run ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("size", [CHUNK, 200 * CHUNK], ids=["post", "stream"])
@pytest.mark.usefixtures("interruptible")
def test_interrupt_in_a_delivery_does_not_keep_later_ones_from_arriving(proxied, size):
    clinic, lab, _ = proxied
    clinic.send("lab", b"first", 5)
    lab.receive(0)
    before = set(threading.enumerate())
    with lab._server._senders["clinic"].turn:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            clinic.send("lab", bytes(size), 30)
    clinic.send("lab", b"next", 5)
    arrived = lab.receive(0)
    if len(arrived.frame) == size:  # that it goes on is not promised
        arrived = lab.receive(0)
    assert bytes(arrived.frame) == b"next"
    end = time.monotonic() + within(10)
    while any(thread.name != "treaty-grpc-call" for thread in set(threading.enumerate()) - before):
        assert time.monotonic() < end, "grpc still feeds the delivery"
        time.sleep(0.05)


@pytest.mark.slow
def test_certificate_other_than_the_pinned_one_is_an_error_at_both_sides(grpc_end, connect, identities):
    impostor = make_identity("lab")
    clinic = grpc_end("clinic", ["lab"])
    lab = grpc_end("lab", ["clinic"], identity=impostor)
    start = time.monotonic()
    outcome = connect([clinic, lab], timeout=30)
    assert time.monotonic() - start < within(10)
    assert isinstance(outcome["clinic"], PeerProtocolError)
    assert isinstance(outcome["lab"], PeerProtocolError)
    at_clinic, at_lab = str(outcome["clinic"]), str(outcome["lab"])
    assert f"TLS handshake with lab at {lab.address} failed" in at_clinic
    assert "did not present the certificate pinned for lab" in at_clinic
    assert f"pinned for lab is {fingerprint(identities['lab'].certificate)}" in at_clinic
    assert "TLS handshake failed: clinic at" in at_lab
    assert "pins another certificate for lab" in at_lab
    assert f"lab has {fingerprint(impostor.certificate)}" in at_lab
    assert outcome["clinic"].public == "its connection with lab was refused; it has the details"  # without its address


@pytest.mark.slow
def test_peer_that_does_not_speak_tls_is_named(grpc_end, monkeypatch):
    monkeypatch.setattr(grpc_channel, "REFUSAL_PATIENCE", 1.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    clinic = grpc_end("clinic", ["lab"])
    with pytest.raises(PeerProtocolError, match="TLS handshake"):
        clinic.connect(20, {"lab": f"127.0.0.1:{listener.getsockname()[1]}"})
    listener.close()


@pytest.mark.parametrize(
    ("details", "plain"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:7000: Failed to connect to remote "
            "host: Connection refused",
            "Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: tried too often.",
            "UNAVAILABLE: tried too often",
        ),
        ("DNS resolution failed for shop.example:7000.", "DNS resolution failed for shop.example:7000"),
        ("", ""),
    ],
)
def test_why_nobody_was_reached_is_said_without_what_grpc_tried(details, plain):
    assert grpc_link._plainly(details) == plain
