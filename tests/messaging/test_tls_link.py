"""How the dialling end notices death, survives broken connections and explains refusals."""

import contextlib
import errno
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from pace import wait_until, within
from proxy import Proxy
from treaty.errors import LocalProtocolError, PeerLost, PeerProtocolError, PeerTimeout
from treaty.messaging import tls, tls_channel, tls_link, units
from treaty.messaging.certificates import fingerprint, make_identity
from treaty.messaging.channel import OVERHEAD
from treaty.messaging.messages import Array, Message
from treaty.messaging.party import Party


class Rows(Message):
    rows: Array


TOGETHER = tls._READ
either_way = pytest.mark.parametrize("size", [TOGETHER, 10_000_000], ids=["together", "apart"])
"""The largest frame that leaves with its header, and one longer than what sockets hold."""


@pytest.fixture
def clinic(tls_end):
    return tls_end("clinic", ["lab", "shop"])


@pytest.fixture
def shop(tls_end):
    return tls_end("shop", ["clinic"])


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
    if size == 1000 and outcome["sender"] is None:  # it was on its way
        del outcome["sender"]
    for error in outcome.values():
        assert isinstance(error, PeerLost), error
        assert error.peer == "lab"


@pytest.mark.slow
def test_process_that_holds_pythons_lock_for_less_than_the_time_to_reconnect_is_not_taken_for_dead(
    tls_end, shop, process, together
):
    clinic = tls_end("clinic", ["lab", "shop"], reconnect=15.0)
    clinic_party = Party("clinic", "j", "p", clinic, ["lab", "shop"], timeout=30)
    child = process("lab", clinic, "hold_lock")  # for 5 s
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
def proxied(tls_end, connect):
    """Clinic and lab, clinic dialling lab through a proxy."""
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    proxy = Proxy(lab.address)
    assert set(connect([clinic, lab], {"lab": proxy.address, "clinic": clinic.address}).values()) == {None}
    yield clinic, lab, proxy
    proxy.close()


@pytest.fixture
def patient(tls_end, connect):
    """Clinic and lab, clinic dialling lab through a proxy, with a minute and more for a connection to come back."""
    clinic, lab = (tls_end(a, [b], reconnect=75.0) for a, b in (("clinic", "lab"), ("lab", "clinic")))
    proxy = Proxy(lab.address)
    assert set(connect([clinic, lab], {"lab": proxy.address, "clinic": clinic.address}).values()) == {None}
    yield clinic, lab, proxy
    proxy.close()


@pytest.mark.parametrize("size", [0, 1, TOGETHER - 1, TOGETHER, TOGETHER + 1, 3_000_001])
def test_frames_of_any_length_arrive_as_they_were_sent(tls_end, connect, size):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    connect([clinic, lab])
    frame = np.random.default_rng(0).bytes(size)
    for _ in range(2):
        clinic.send("lab", frame, 5)
        assert bytes(lab.receive(5).frame) == frame


@either_way
def test_a_frame_that_came_and_whose_receipt_is_lost_is_not_sent_again(monkeypatch, tls_end, connect, size):
    """The receiver says on the new connection what it has."""
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    proxy = Proxy(lab.address)
    connect([clinic, lab], {"lab": proxy.address, "clinic": clinic.address})
    written = watched(monkeypatch, clinic)
    wait_until(lambda: clinic._links["lab"]._line is not None)
    clinic.send("lab", b"a" * size, 10)
    assert bytes(lab.receive(10).frame) == b"a" * size
    assert clinic._links["lab"]._first == 0  # kept: nobody has said that it came
    proxy.cut()
    clinic.send("lab", b"b" * size, 10, receipt=True)
    assert clinic._links["lab"]._first == 2
    assert bytes(lab.receive(0).frame) == b"b" * size
    assert lab.receive(0.2) is None
    assert written.count(0) == 1
    assert set(written) == {0, 1}
    proxy.close()


def test_a_peer_that_leaves_once_it_has_the_last_frame_has_got_it(monkeypatch, tls_end, connect):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    connect([clinic, lab], {"lab": lab.address, "clinic": clinic.address})
    link, write = clinic._links["lab"], tls_link.PeerLink._write_next

    def left(of, deadline):
        write(of, deadline)
        assert of is link
        assert bytes(lab.receive(10).frame) == b"the last"
        lab.close()
        wait_until(lambda: link.lost is not None)

    wait_until(lambda: link._line is not None)
    monkeypatch.setattr(tls_link.PeerLink, "_write_next", left)
    clinic.send("lab", b"the last", 10)


def watched(monkeypatch, end):
    """Return the list of numbers of the frames that a party sends, as it grows."""
    written, send = [], tls.Line.send

    def noted(line, unit, content=b"", deadline=None):
        kind, _, number, _ = units._HEADER.unpack(unit)
        if kind == units.FRAME and line is end._links["lab"]._line:
            written.append(number)
        send(line, unit, content, deadline)

    monkeypatch.setattr(tls.Line, "send", noted)
    return written


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


def test_a_peer_that_is_heard_but_takes_no_connection_is_given_up_after_the_time_to_reconnect(proxied):
    clinic, _, proxy = proxied
    wait_until(lambda: clinic._links["lab"]._line is not None)
    proxy.refuse()  # the watch goes on
    clinic._links["lab"]._line.break_off()
    with pytest.raises(PeerLost, match=r"takes no connection for frames \(.*127\.0\.0\.1") as caught:
        clinic.receive(10)
    assert caught.value.public.endswith("takes no connection for frames")


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
SIZES = [10, TOGETHER, 20, TOGETHER + 1, 3_000_000, 30]


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
    wait_until(lambda: clinic._links["lab"]._line is None)
    began = time.monotonic()
    with pytest.raises(PeerTimeout, match="lab took no message for 1 s: its connection broke and has not come") as sent:
        party.send("lab", Rows(Array.of(np.arange(3))))
    assert time.monotonic() - began < within(10)
    assert proxy.address in str(sent.value)
    assert "certificate" not in str(sent.value)  # it had just worked
    assert sent.value.public == "lab took no message for 1 s: its connection broke and has not come back"
    with pytest.raises(PeerTimeout, match="got nothing; lab is not reachable just now"):
        party.receive("lab", Rows, timeout=0.2)


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
def test_parties_wait_behind_a_forwarder_that_accepts_before_its_party_does(tls_end, together):
    """Longer than a connection that is refused for its certificate is tried."""
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    forwarder = Proxy(lab.address)
    threading.Thread(target=forwarder.fail, args=("hang up", tls_channel.REFUSAL_PATIENCE + 3.0), daemon=True).start()
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
    clinic.send("lab", bytes(4_000_000), 30, receipt=True)
    assert time.monotonic() - start > 3  # keepalive: 1 s + 1 s
    assert len(lab.receive(0).frame) == 4_000_000
    assert proxy.carried < 7_000_000  # sent once
    assert clinic.receive(0) is None


def test_restarted_process_is_not_taken_for_the_one_before(proxied, tls_end):
    clinic, _, proxy = proxied
    other = tls_end("lab", ["clinic"])
    host, _, port = other.address.rpartition(":")
    proxy.target = (host, int(port))
    proxy.cut()
    with pytest.raises(PeerLost, match="lab is lost: it was restarted, another process answers now"):
        clinic.receive(5)


@pytest.fixture
def full(monkeypatch, tls_end, connect):
    """Clinic and lab, whose role reads nothing: its share of the inbox is one frame of a megabyte."""
    monkeypatch.setattr(tls_channel, "WINDOW", 1 << 20)
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"], inbox_limit=(1 << 20) + OVERHEAD)
    assert set(connect([clinic, lab]).values()) == {None}
    return clinic, lab


def until_full(clinic):
    """Send frames of a megabyte until one takes too long; return how many left."""
    for sent in range(1000):
        try:
            clinic.send("lab", b"%06d" % sent + bytes((1 << 20) - 6), 0.5)
        except PeerTimeout as error:
            assert "took no message for 0.5 s, though its connection is alive" in str(error)  # noqa: PT017
            return sent
    raise AssertionError("lab takes everything")


def test_a_peer_that_takes_nothing_is_given_up_after_the_timeout_and_gets_what_had_left(full):
    clinic, lab = full
    sent = until_full(clinic)
    assert 1 <= sent <= 30  # a window, and what sockets hold
    for k in range(sent):
        arrival = lab.receive(10)
        assert bytes(arrival.frame[:6]) == b"%06d" % k
        lab.mark_read("clinic", len(arrival.frame))
    clinic.send("lab", b"next", 10, receipt=True)
    assert bytes(lab.receive(0).frame) == b"next"
    assert lab.receive(0.2) is None


def test_a_frame_taken_back_half_sent_is_void_and_those_before_it_come_once(full):
    """In this order: the last frame kept stands half in the socket when its sender gives it up."""
    clinic, lab = full
    link = clinic._links["lab"]
    sent = 0
    while link._unwritten == link._next or sent < 2:  # until a frame hangs in the socket
        sender = threading.Thread(target=lambda: clinic.send("lab", bytes(1 << 20), 30), daemon=True)
        sender.start()
        sender.join(0.3)
        sent += 1
        if sender.is_alive():
            break
    assert sender.is_alive()
    link._line.break_off()
    while sender.is_alive():
        if (arrival := lab.receive(0.1)) is not None:
            lab.mark_read("clinic", len(arrival.frame))
            sent -= 1
    while sent:
        arrival = lab.receive(10)
        lab.mark_read("clinic", len(arrival.frame))
        sent -= 1
    assert lab.receive(0.2) is None


def test_peers_that_have_stopped_are_not_waited_for_one_after_another(tls_end, connect, monkeypatch):
    clinic = tls_end("clinic", ["lab", "shop"])
    assert set(connect([clinic, tls_end("lab", ["clinic"]), tls_end("shop", ["clinic"])]).values()) == {None}
    both, close = threading.Barrier(2), tls_link.PeerLink.close
    with monkeypatch.context() as patch:
        patch.setattr(tls_link.PeerLink, "close", lambda link: (both.wait(within(10)), close(link)))
        clinic.close()


def test_closing_ends_a_delivery_under_way(full, together):
    clinic, _ = full
    until_full(clinic)
    ended = []

    def send():
        with pytest.raises(LocalProtocolError, match="got one that clinic has closed"):
            clinic.send("lab", bytes(1 << 20), 60)
        ended.append(time.monotonic())

    def close():
        time.sleep(0.5)
        ended.append(time.monotonic())
        clinic.close()

    assert together(sender=send, closer=close) == {"sender": None, "closer": None}
    closed, gone = sorted(ended)
    assert gone - closed < within(10)  # not 60


def test_closing_just_before_a_delivery_is_told_as_such(proxied, monkeypatch):
    clinic, _, _ = proxied
    real = tls_link.PeerLink._write

    def closed_first(link, *within):
        if threading.current_thread() is threading.main_thread():
            clinic.close()
        return real(link, *within)

    monkeypatch.setattr(tls_link.PeerLink, "_write", closed_first)
    with pytest.raises(LocalProtocolError, match="got one that clinic has closed"):
        clinic.send("lab", b"x", 5)


def test_a_closed_channel_leaves_no_thread(tls_end, connect):
    before = set(threading.enumerate())
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    connect([clinic, lab])
    lab.send("clinic", b"x", 5)
    for end in (clinic, lab):
        end.close()
    wait_until(lambda: not set(threading.enumerate()) - before)


@pytest.fixture
def interruptible():
    """Have interrupts raise KeyboardInterrupt, which processes of a distributed test run ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_in_a_delivery_does_not_keep_later_ones_from_arriving(full):
    clinic, lab = full
    sent = until_full(clinic)
    interrupt = signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    threading.Timer(0.3, *interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        clinic.send("lab", bytes(1 << 20), 30)
    for _ in range(sent):
        lab.mark_read("clinic", len(lab.receive(10).frame))
    clinic.send("lab", b"next", 10)
    assert bytes(lab.receive(10).frame) == b"next"


@pytest.mark.slow
def test_certificate_other_than_the_pinned_one_is_an_error_at_both_sides(tls_end, connect, identities):
    impostor = make_identity("lab")
    clinic = tls_end("clinic", ["lab"])
    lab = tls_end("lab", ["clinic"], identity=impostor)
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
def test_peer_that_does_not_speak_tls_is_named(tls_end, monkeypatch):
    monkeypatch.setattr(tls_channel, "REFUSAL_PATIENCE", 1.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    clinic = tls_end("clinic", ["lab"])
    with pytest.raises(PeerProtocolError, match="TLS handshake"):
        clinic.connect(20, {"lab": f"127.0.0.1:{listener.getsockname()[1]}"})
    listener.close()


@pytest.mark.parametrize(
    ("error", "plain"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused"),
        (TimeoutError("no answer in time"), "no answer in time"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ConnectionError("the other end hung up"), "the other end hung up"),
        (OSError(), "OSError"),
    ],
)
def test_why_nobody_was_reached_is_said_plainly(error, plain):
    assert tls.reason_of(error) == plain
