"""What the listening end lets in, with callers that do not behave."""

import contextlib
import os
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from pace import wait_until, within
from proxy import Proxy
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging import tls, units
from treaty.messaging.channel import OVERHEAD
from treaty.messaging.tls import LineRefused, dial, measured, tls_context
from treaty.messaging.units import (
    ASK,
    ECHO,
    FRAME,
    HELLO,
    LOAD,
    LOAD_BYTES,
    PING,
    PONG,
    RECEIPT,
    VERSION,
    WELCOME,
    Introduction,
    encode,
    header,
)


@pytest.fixture
def clinic(tls_end):
    return tls_end("clinic", ["lab", "shop"], inbox_limit=2 * (5_000_000 + OVERHEAD))


class Caller:
    """A party's own certificate, and hand-made units."""

    def __init__(self, clinic, identities, name):
        context = tls_context(identities[name], [identities["clinic"].certificate], listens=False)
        certificate = x509.load_pem_x509_certificate(identities["clinic"].certificate).public_bytes(Encoding.DER)
        self.line = dial(clinic.address, context, certificate, time.monotonic() + 10)

    def introduce(self, sender, *, version=VERSION, incarnation=bytes(16), job="", purpose="frames"):
        """Return how many frames of ours have come."""
        content = encode(Introduction(version, sender, incarnation, job, purpose))
        return self.introduce_with(content)

    def introduce_with(self, content):
        self.line.send(header(HELLO, len(content)), content)
        found = self.next()
        assert found.kind == WELCOME
        self.line.content(found)
        return found.received

    def frame(self, number, content, size=None, received=0):
        self.line.send(header(FRAME, len(content) if size is None else size, number, received), content)

    def next(self):
        return self.line.header(time.monotonic() + 10)

    def receipt(self):
        self.line.send(header(ASK))
        found = self.next()
        assert found.kind == RECEIPT
        return found.received


@pytest.fixture
def call(clinic, identities):
    with contextlib.ExitStack() as stack:

        def call(name):
            made = Caller(clinic, identities, name)
            stack.callback(made.line.close)
            return made

        yield call


def test_a_frame_lies_in_the_inbox_when_its_receipt_comes(clinic, call):
    lab = call("lab")
    assert lab.introduce("lab") == 0
    lab.frame(0, b"abc")
    assert lab.receipt() == 1
    arrival = clinic.receive(0)
    assert (arrival.sender, bytes(arrival.frame)) == ("lab", b"abc")


def test_another_connection_of_the_same_process_hears_what_has_come_and_ends_the_earlier(clinic, call):
    first = call("lab")
    first.introduce("lab")
    for number in range(3):
        first.frame(number, b"%d" % number)
    first.receipt()
    second = call("lab")
    assert second.introduce("lab") == 3
    with pytest.raises(ConnectionError):
        first.next()
    second.frame(3, b"3")
    assert second.receipt() == 4
    assert [bytes(clinic.receive(0).frame) for _ in range(4)] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("number", [0, 2, 5, 2**64 - 1])
def test_a_frame_repeated_or_left_out_is_an_offence(clinic, call, number):
    lab = call("lab")
    lab.introduce("lab")
    lab.frame(0, b"abc")
    lab.frame(number, b"def")
    with pytest.raises(LineRefused, match=f"expected frame number 1, got unit {FRAME} with number {number}"):
        lab.next()
    assert bytes(clinic.receive(0).frame) == b"abc"
    with pytest.raises(PeerProtocolError, match="expected frame number 1"):
        clinic.receive(5)
    assert clinic.receive(0) is None


def test_a_frame_that_breaks_off_leaves_nothing(clinic, call):
    lab = call("lab")
    lab.introduce("lab")
    lab.frame(0, b"half", size=4_000_000)
    wait_until(lambda: clinic._credit._unread["lab"])
    lab.line.close()
    wait_until(lambda: not clinic._credit._unread["lab"])
    assert clinic.receive(0) is None
    again = call("lab")
    assert again.introduce("lab") == 0
    again.frame(0, bytes(4_000_000))
    assert again.receipt() == 1


def test_valid_certificate_of_another_party_does_not_give_its_name(clinic, call):
    for purpose in ("frames", "watch"):
        with pytest.raises(LineRefused, match="got 'lab' under the certificate of shop"):
            call("shop").introduce("lab", purpose=purpose)
    with pytest.raises(PeerProtocolError, match="expected shop to call itself so, got 'lab'") as caught:
        clinic.receive(5)
    assert caught.value.peer == "shop"
    assert clinic.receive(0) is None  # one report is enough


@pytest.mark.parametrize("size", [5_000_001, 1 << 40, 2**64 - 1], ids=["a byte", "a terabyte", "the most"])
def test_an_oversized_frame_is_refused_before_it_is_sent(clinic, call, size):
    lab = call("lab")
    lab.introduce("lab")
    lab.frame(0, b"", size=size)
    with pytest.raises(LineRefused, match=f"got a message of {size} bytes announced by lab"):
        lab.next()
    with pytest.raises(PeerProtocolError, match=r"expected at most 5000000 bytes, the share of lab .* of clinic"):
        clinic.receive(5)
    assert clinic.receive(0) is None


def test_oversized_message_is_an_error_at_both_sides(clinic, tls_end, connect):
    lab, shop = tls_end("lab", ["clinic"]), tls_end("shop", ["clinic"])
    connect([clinic, lab, shop])
    with pytest.raises(PeerProtocolError, match="clinic refused a message: expected at most 5000000 bytes"):
        lab.send("clinic", bytes(5_000_001), 5, receipt=True)
    with pytest.raises(PeerProtocolError, match="got a message of 5000001 bytes announced by lab"):
        clinic.receive(5)
    with pytest.raises(PeerProtocolError, match="clinic refused a message"):
        lab.receive(5)


def test_the_pieces_in_which_a_frame_comes_do_not_matter(clinic, call):
    lab = call("lab")
    lab.introduce("lab")
    unit = header(FRAME, 3, 0) + b"abc"
    for at in range(len(unit)):
        lab.line._encrypt(unit[at : at + 1])
        lab.line._transmit(None)
    assert lab.receipt() == 1
    assert bytes(clinic.receive(0).frame) == b"abc"


@pytest.mark.parametrize(
    "content", [b"", b"\x91" * 4000, b"\x80\x04\x95.", encode(Introduction(VERSION, "lab", bytes(16)))[:-1]], ids=str
)
def test_malformed_introduction_is_refused(clinic, call, content):
    with pytest.raises(LineRefused, match="expected Introduction"):
        call("lab").introduce_with(content)
    assert clinic.receive(0) is None
    assert call("lab").introduce("lab") == 0


@pytest.mark.parametrize(
    "unit",
    [header(PING), header(FRAME, 3) + b"abc", header(77), header(HELLO, 1 << 40), bytes(100)],
    ids=["ping", "frame", "unknown", "a terabyte", "zeros"],
)
def test_whatever_comes_before_an_introduction_ends_the_connection(clinic, call, unit):
    lab = call("lab")
    lab.line.send(unit)
    with pytest.raises(OSError, match=r"hung up|reset|LineRefused|expected"):
        lab.next()
    assert clinic.receive(0) is None


@pytest.mark.parametrize(
    "unit", [header(PONG), header(WELCOME, 1) + b"x", header(77), header(RECEIPT, 0, 0, 1 << 60)], ids=str
)
def test_units_that_no_sender_of_frames_sends_end_the_connection(clinic, call, unit):
    lab = call("lab")
    lab.introduce("lab")
    lab.line.send(unit)
    with pytest.raises(OSError):  # noqa: PT011 - refused, or hung up on
        lab.next()
    assert call("lab").introduce("lab") == 0


def test_other_release_is_refused(clinic, call):
    with pytest.raises(LineRefused, match=f"expected transport version {VERSION}, got 99"):
        call("lab").introduce("lab", version=99)


@pytest.mark.parametrize("purpose", ["frames", "watch"])
def test_a_connection_that_was_led_to_another_job_is_refused(call, purpose):
    """A door knows a connection's job by a line in clear, which somebody on the way may change."""
    with pytest.raises(LineRefused, match="got one for another: its first line was changed on the way"):
        call("lab").introduce("lab", job="another job", purpose=purpose)
    assert call("lab").introduce("lab") == 0  # nothing of it is held against lab


def test_parties_of_one_job_meet_and_of_two_do_not(tls_end, connect):
    ends = [tls_end(*names, job="churn 1") for names in (("shop", ["lab"]), ("lab", ["shop"]))]
    assert connect(ends) == {"shop": None, "lab": None}
    ends = [tls_end("shop", ["lab"], job="churn 1"), tls_end("lab", ["shop"], job="risk 2")]
    assert "first line was changed on the way" in str(connect(ends)["lab"])


def test_restarted_sender_is_refused(call):
    call("lab").introduce("lab")
    with pytest.raises(LineRefused, match="already talked to another process of lab"):
        call("lab").introduce("lab", incarnation=b"x" * 16)


def test_a_lie_about_receipts_harms_no_one_else(clinic, tls_end, together, call):
    """A peer says that it has frames that were never sent."""
    shop = tls_end("shop", ["clinic"])
    addresses = {"lab": "127.0.0.1:1", "shop": shop.address}
    outcome = together(
        clinic=lambda: clinic.connect(1, addresses, may_lose=["lab"]),
        shop=lambda: shop.connect(10, {"clinic": clinic.address}),
    )
    assert outcome == {"clinic": None, "shop": None}
    lab = call("lab")
    lab.introduce("lab")
    lab.frame(0, b"abc", received=1 << 60)
    assert lab.receipt() == 1
    clinic.send("shop", b"def", 5, receipt=True)
    assert bytes(shop.receive(0).frame) == b"def"


# ---------------------------------------------------------------- strangers


def plain_tcp(host, port):
    with socket.create_connection((host, port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 50)


def half_open_tcp(host, port):
    return socket.create_connection((host, port), 5)


def tls_without_certificate(host, port, **options):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for name, value in options.items():
        setattr(context, name, value)
    with (
        socket.create_connection((host, port), 5) as raw,
        context.wrap_socket(raw, server_hostname="clinic") as connection,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000)
        connection.settimeout(5)
        while connection.recv(100):
            pass


def test_strangers_at_the_port_do_not_disturb_the_job(clinic, tls_end, connect):
    lab, shop = tls_end("lab", ["clinic"]), tls_end("shop", ["clinic"])
    assert set(connect([clinic, lab, shop]).values()) == {None}
    host, _, port = clinic.address.rpartition(":")
    kept = [half_open_tcp(host, int(port)) for _ in range(10)]
    for _ in range(5):
        plain_tcp(host, int(port))
        with contextlib.suppress(OSError):  # hung up on, with or without a word
            tls_without_certificate(host, int(port))
    lab.send("clinic", b"abc", 5)
    shop.send("clinic", b"def", 5)
    assert {bytes(clinic.receive(5).frame) for _ in range(2)} == {b"abc", b"def"}
    assert clinic.receive(0.5) is None
    for connection in kept:
        connection.close()


def test_an_older_tls_is_refused_even_of_a_peer(clinic, identities):
    context = tls_context(identities["lab"], [identities["clinic"].certificate], listens=False)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        dial(clinic.address, context, b"", time.monotonic() + 5)


def test_a_certificate_that_openssl_admits_and_nobody_has_pinned_is_refused(clinic, identities):
    """As one that the pinned certificate has signed, where it is dialled and where it dials."""
    context = tls_context(identities["lab"], [identities["clinic"].certificate], listens=False)
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        dial(clinic.address, context, b"another", time.monotonic() + 5)
    assert str(caught.value) == "the certificate presented is not the one pinned"
    clinic._server._owner.clear()
    der = x509.load_pem_x509_certificate(identities["clinic"].certificate).public_bytes(Encoding.DER)
    line = dial(clinic.address, context, der, time.monotonic() + 5)
    line.send(header(HELLO))
    with pytest.raises(LineRefused, match="the certificate presented is not pinned here"):
        line.header(time.monotonic() + 5)
    line.close()


def test_a_caller_for_whom_there_is_no_thread_is_hung_up_on(clinic, call, monkeypatch):
    start, failed = threading.Thread.start, []

    def no_more(thread):
        if thread.name == "treaty-caller" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(OSError):  # noqa: PT011 - hung up on
        call("lab")
    assert failed
    assert not clinic._server._listener._young
    assert call("lab").introduce("lab") == 0


def test_more_strangers_than_there_is_room_for_push_out_the_oldest_of_them(clinic, tls_end, connect, monkeypatch):
    monkeypatch.setattr(tls, "MOST_YOUNG", 20)
    host, _, port = clinic.address.rpartition(":")
    before = threading.active_count()
    with contextlib.ExitStack() as kept:
        strangers = [kept.enter_context(half_open_tcp(host, int(port))) for _ in range(100)]
        strangers[0].settimeout(within(5))
        assert strangers[0].recv(1) == b""
        wait_until(lambda: threading.active_count() <= before + 25)
        lab, shop = tls_end("lab", ["clinic"]), tls_end("shop", ["clinic"])
        assert set(connect([clinic, lab, shop]).values()) == {None}


def test_a_stranger_that_drips_is_hung_up_on(clinic, monkeypatch):
    """One byte now and then keeps no connection beyond the time for the handshake."""
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT", 1.0)
    host, _, port = clinic.address.rpartition(":")
    began = time.monotonic()
    with half_open_tcp(host, int(port)) as stranger, contextlib.suppress(ConnectionError):
        for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200):
            stranger.sendall(bytes([byte]))
            time.sleep(0.1)
    assert time.monotonic() - began < within(10)  # not 20


def test_address_in_use_is_a_config_error(clinic, identities):
    from treaty.messaging.tls_channel import Peer, TlsChannel

    key, certificate = identities["lab"]
    peers = {"clinic": Peer(None, identities["clinic"].certificate)}
    with pytest.raises(ConfigError, match=f"lab cannot listen at {clinic.address}"):
        TlsChannel("lab", clinic.address, key=key, certificate=certificate, peers=peers)


def test_an_address_is_free_again_once_its_channel_is_closed(tls_end, identities):
    from treaty.messaging.tls_channel import Peer, TlsChannel

    peers = {"clinic": Peer(None, identities["clinic"].certificate)}
    key, certificate = identities["lab"]
    address = "127.0.0.1:0"
    for _ in range(5):
        with TlsChannel("lab", address, key=key, certificate=certificate, peers=peers) as lab:
            address = lab.address


def test_closing_does_not_wait_for_a_frame_that_never_ends(clinic, call):
    lab = call("lab")
    lab.introduce("lab")
    lab.frame(0, b"ab", size=10)
    wait_until(lambda: clinic._credit._unread["lab"])
    start = time.monotonic()
    clinic.close()
    assert time.monotonic() - start < within(5)
    assert lab.next() == units.Header(RECEIPT, 0, 0, 0)
    with pytest.raises(OSError):  # noqa: PT011 - hung up on
        lab.next()


def test_a_slow_frame_gets_signs_of_life(clinic, call, monkeypatch):
    monkeypatch.setattr("treaty.messaging.tls_server._SIGN_OF_LIFE", 0.1)
    lab = call("lab")
    lab.introduce("lab")
    lab.frame(0, b"ab", size=3)
    assert [lab.next() for _ in range(3)] == 3 * [units.Header(RECEIPT, 0, 0, 0)]
    lab.line.send(b"c")
    assert bytes(clinic.receive(5).frame) == b"abc"


def test_a_watch_answers_pings_and_hears_that_the_end_closes(clinic, call):
    lab = call("lab")
    lab.introduce("lab", purpose="watch")
    for _ in range(3):
        lab.line.send(header(PING))
        assert lab.next().kind == PONG
    threading.Thread(target=clinic.close).start()
    assert lab.next().kind == units.CLOSING


def test_units_that_come_in_one_record_are_read_without_waiting_for_more(clinic, call):
    """Of the last record of a long content, the rest lies decrypted in OpenSSL, and nothing in the socket."""
    lab = call("lab")
    lab.introduce("lab")
    lab.line._encrypt(header(FRAME, 70_000, 0) + bytes(70_000) + header(ASK))
    lab.line._transmit(None)
    assert lab.next() == units.Header(RECEIPT, 0, 0, 1)


def test_both_ends_of_a_connection_read_and_send_at_once(identities):
    ends, count = [], 3000
    context = tls_context(identities["clinic"], [identities["lab"].certificate], listens=True)
    done, certificate = threading.Event(), x509.load_pem_x509_certificate(identities["clinic"].certificate)

    def sends(line):
        for number in range(count):
            line.send(header(FRAME, 5000 + number % 7, number), bytes(5000 + number % 7), time.monotonic() + 30)

    def reads(line):
        for number in range(count):
            found = line.header(time.monotonic() + 30)
            assert found == (FRAME, 5000 + number % 7, number, 0)
            line.content(found, time.monotonic() + 30)

    def serve(line, _):
        ends.append(line)
        done.wait(within(60))

    listener = tls.Listener("clinic", "127.0.0.1:0", lambda: context, serve)
    mine = tls_context(identities["lab"], [identities["clinic"].certificate], listens=False)
    line = dial(listener.address, mine, certificate.public_bytes(Encoding.DER), time.monotonic() + 10)
    line.send(header(HELLO))
    wait_until(lambda: ends)
    ends.append(line)
    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(what, end) for what in (sends, reads) for end in ends]:
            result.result()
    done.set()
    line.close()
    listener.close()


def test_a_link_is_measured_before_its_caller_is_introduced(clinic, call):
    lab = call("lab")
    round_trip, byte = measured(lab.line, time.monotonic() + within(30))
    assert round_trip > 0.0
    assert byte < 1.0
    assert clinic._server.callers == set()
    assert lab.introduce("lab") == 0
    lab.frame(0, b"abc")
    assert lab.receipt() == 1


def test_a_slow_link_is_measured_as_slow(clinic, identities):
    relay = Proxy(clinic.address)
    relay.bytes_per_second = 2e6
    context = tls_context(identities["lab"], [identities["clinic"].certificate], listens=False)
    certificate = x509.load_pem_x509_certificate(identities["clinic"].certificate).public_bytes(Encoding.DER)
    with contextlib.closing(relay):
        line = dial(relay.address, context, certificate, time.monotonic() + 10)
        with contextlib.closing(line):
            assert measured(line, time.monotonic() + within(30))[1] >= 0.8 / relay.bytes_per_second


class ClockedLine:
    """Answers loads after given seconds of its own clock, by echoes of a kind, and of a size that is `more`."""

    def __init__(self, seconds, kind=ECHO, more=0):
        self.now, self.sent, self._seconds, self._kind, self._more = 0.0, [], seconds, kind, more

    def send(self, head, content, deadline):
        assert head == header(LOAD, len(content))
        self.sent.append(len(content))

    def header(self, deadline):
        self.now += self._seconds[len(self.sent) - 1]
        return units.Header(self._kind, self.sent[-1] + self._more, 0, 0)

    def content(self, found, deadline):
        self.now += 0.01


@pytest.mark.parametrize(
    ("seconds", "loads", "best"),
    [
        ([0.49, 0.19, 0.39, 0.59, 0.49, 3.19, 9, 9, 9], 3, (0.5 - 0.2) / (2 << 16)),
        ([0.19, 0.29, 0.39, 0.59, 0.49, 0.89, 1.00, 9, 9], 4, (1.01 - 0.2) / (2 << 20)),
        ([0.19, 0.29, 0.39, 0.59, 0.49, 0.89, 0.79, 0.59, 0.69], 6, (0.6 - 0.2) / (2 << 20)),
        ([0.19, 0.29, 0.39, 0.09, 0.49, 0.89, 0.79, 0.59, 0.69], 6, 0.0),  # back before nothing was
    ],
)
def test_measuring_takes_the_best_of_loads_and_ends_after_one_of_a_second(monkeypatch, seconds, loads, best):
    line = ClockedLine(seconds)
    monkeypatch.setattr(tls.time, "perf_counter", lambda: line.now)
    empty, byte = measured(line, 0.0)
    assert line.sent == [0, 0, 0, 1 << 14, 1 << 16, 1 << 18, *[LOAD_BYTES] * 3][: 3 + loads]
    assert empty == pytest.approx(0.2)
    assert byte == pytest.approx(best)


@pytest.mark.parametrize(("kind", "more"), [(FRAME, 0), (ECHO, 1), (ECHO, -1)])
def test_measuring_refuses_another_answer_than_an_echo(kind, more):
    with pytest.raises(ConnectionError, match="expected an echo of"):
        measured(ClockedLine([0.0] * 9, kind, more), 0.0)


def test_loads_are_limited_in_size_and_number(call):
    lab = call("lab")
    for _ in range(tls._MOST_LOADS):
        lab.line.send(header(LOAD, 10), bytes(10))
        found = lab.next()
        assert (found.kind, bytes(lab.line.content(found))) == (ECHO, bytes(10))
    lab.line.send(header(LOAD, 10), bytes(10))
    with pytest.raises(ConnectionError):
        lab.next()
    lab = call("lab")
    lab.line.send(header(LOAD, LOAD_BYTES + 1))
    with pytest.raises(ConnectionError):
        lab.next()
