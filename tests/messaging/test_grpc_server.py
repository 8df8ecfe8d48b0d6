"""What the listening end lets in, with callers that do not behave."""

import contextlib
import functools
import socket
import ssl
import threading
import time
import weakref

import grpc
import numpy as np
import pytest

from pace import wait_until, within
from treaty.errors import ConfigError, LocalProtocolError, PeerProtocolError
from treaty.messaging.channel import OVERHEAD
from treaty.messaging.grpc_wire import (
    CHUNK,
    DELIVER,
    POST,
    VERSION,
    WATCH,
    Announcement,
    DaemonThreads,
    Introduction,
    Parcel,
    encode,
)


@pytest.fixture
def clinic(grpc_end):
    return grpc_end("clinic", ["lab", "shop"], inbox_limit=2 * (5_000_000 + OVERHEAD))


@pytest.fixture
def dial(clinic, identities):
    """Dial clinic with a party's own certificate and hand-made talk."""
    opened = []

    def dial(name):
        credentials = grpc.ssl_channel_credentials(
            root_certificates=identities["clinic"].certificate,
            private_key=identities[name].key,
            certificate_chain=identities[name].certificate,
        )
        options = [("grpc.ssl_target_name_override", "clinic"), ("grpc.enable_http_proxy", 0)]
        opened.append(grpc.secure_channel(clinic.address, credentials, options))
        return opened[-1]

    yield dial
    for channel in opened:
        channel.close()


def hand_over(method, channel, pieces, sender="lab", number=0, size=3, version=VERSION, incarnation=bytes(16), wait=10):
    announcement = Announcement(Introduction(version, sender, incarnation), number, size)
    if method == POST:
        parcel = Parcel(announcement, memoryview(b"".join(pieces)))
        return channel.unary_unary(POST)(encode(parcel), timeout=wait)
    return channel.stream_unary(DELIVER)(iter([encode(announcement), *pieces]), timeout=wait)


@pytest.fixture(params=[DELIVER, POST], ids=["stream", "post"])
def deliver(request):
    """Either way to hand a frame over: what is let in is the same."""
    return functools.partial(hand_over, request.param)


def refused(code, text):
    return pytest.raises(grpc.RpcError, check=lambda error: error.code() is code and text in error.details())


def test_delivery_lies_in_the_inbox_when_it_is_answered(clinic, dial, deliver):
    assert deliver(dial("lab"), [b"a", b"bc"]) == b""
    arrival = clinic.receive(0)
    assert (arrival.sender, bytes(arrival.frame)) == ("lab", b"abc")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1001, CHUNK])
def test_frame_is_read_only_and_ends_at_a_multiple_of_8_bytes(clinic, dial, deliver, size):
    sent = bytes(range(256)) * (CHUNK // 256)
    deliver(dial("lab"), [sent[:size]], size=size)
    frame = clinic.receive(0).frame
    assert bytes(frame) == sent[:size]
    assert frame.readonly
    assert (np.frombuffer(frame, np.uint8).ctypes.data + size) % 8 == 0


def test_exact_duplicate_of_a_delivery_is_answered_and_dropped(clinic, dial, deliver):
    for number in (0, 0, 1, 0, 1):
        assert deliver(dial("lab"), [b"%dxx" % number], number=number) == b""
    assert [bytes(clinic.receive(0).frame) for _ in range(2)] == [b"0xx", b"1xx"]
    assert clinic.receive(0) is None


@pytest.mark.parametrize("ways", [(DELIVER, POST), (POST, DELIVER)], ids=["stream first", "post first"])
def test_deliveries_of_either_kind_share_one_count(clinic, dial, ways):
    for method in ways:
        hand_over(method, dial("lab"), [b"abc"])
    assert bytes(clinic.receive(0).frame) == b"abc"
    assert clinic.receive(0) is None


@pytest.mark.slow
def test_delivery_that_the_sender_has_given_up_is_not_taken_in(clinic, dial, deliver, calls):
    channel = dial("lab")
    deliver(channel, [b"abc"])
    clinic.receive(0)
    with clinic._server._senders["lab"].turn:
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED, ""):
            deliver(channel, [b"def"], number=1, wait=0.3)
        wait_until(lambda: not any(call.is_active() for call in calls))  # clinic knows
    assert clinic.receive(0.5) is None
    deliver(channel, [b"def"], number=1)
    assert bytes(clinic.receive(0).frame) == b"def"


def test_valid_certificate_of_another_party_does_not_give_its_name(clinic, dial, deliver):
    with refused(grpc.StatusCode.UNAUTHENTICATED, "got 'lab' under the certificate of shop"):
        deliver(dial("shop"), [b"abc"], sender="lab")
    with pytest.raises(PeerProtocolError, match="expected shop to call itself so, got 'lab'") as caught:
        clinic.receive(5)
    assert caught.value.peer == "shop"
    assert clinic.receive(0) is None
    with refused(grpc.StatusCode.UNAUTHENTICATED, "certificate of shop"):
        list(dial("shop").unary_stream(WATCH)(encode(Introduction(VERSION, "lab", bytes(16))), timeout=5))


def test_oversized_message_is_refused_before_it_is_sent(clinic, dial):
    asked = threading.Event()

    def pieces():
        yield encode(Announcement(Introduction(VERSION, "lab", bytes(16)), 0, 1 << 60))
        asked.wait(5)  # the refusal comes without any content

    with refused(grpc.StatusCode.OUT_OF_RANGE, f"got a message of {1 << 60} bytes announced by lab"):
        dial("lab").stream_unary(DELIVER)(pieces(), timeout=4)
    asked.set()
    with pytest.raises(
        PeerProtocolError, match="expected at most 5000000 bytes, the share of lab in the inbox_limit of clinic"
    ):
        clinic.receive(5)


def test_oversized_announcement_is_refused_whatever_comes_with_it(clinic, dial, deliver):
    with refused(grpc.StatusCode.OUT_OF_RANGE, "got a message of 5000001 bytes announced by lab"):
        deliver(dial("lab"), [b"abc"], size=5_000_001)
    with pytest.raises(PeerProtocolError, match=r"at most 5000000 bytes, .* of 5000001 bytes .* to 10 MiB") as caught:
        clinic.receive(5)
    assert caught.value.peer == "lab"
    assert clinic.receive(0) is None


def test_oversized_message_is_an_error_at_both_sides(clinic, grpc_end, connect):
    lab, shop = grpc_end("lab", ["clinic"]), grpc_end("shop", ["clinic"])
    connect([clinic, lab, shop])
    with pytest.raises(LocalProtocolError, match="clinic refused a message: expected at most 5000000 bytes"):
        lab.send("clinic", bytes(5_000_001), 5)
    with pytest.raises(PeerProtocolError, match="got a message of 5000001 bytes announced by lab"):
        clinic.receive(5)


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([b"ab"], grpc.StatusCode.DATA_LOSS),
        ([b"ab", b"cd"], grpc.StatusCode.INVALID_ARGUMENT),
        ([], grpc.StatusCode.DATA_LOSS),
    ],
    ids=["short", "long", "none"],
)
def test_delivery_of_another_length_than_announced_is_refused(clinic, dial, deliver, pieces, code):
    with refused(code, "expected 3 bytes, got"):
        deliver(dial("lab"), pieces)
    assert clinic.receive(0) is None
    deliver(dial("lab"), [b"abc"])
    assert bytes(clinic.receive(0).frame) == b"abc"


def test_what_frames_that_fail_were_given_of_the_inbox_comes_back(clinic, dial):
    """Those of another length than announced, and those whose sender gives up halfway."""
    whole, full = 5_000_000, 20 * [bytes(250_000)]
    for pieces in ([b"ab"], [b"ab", *full]):
        with pytest.raises(grpc.RpcError):
            hand_over(DELIVER, dial("lab"), pieces, size=whole)
        assert clinic._credit._unread == {"lab": 0, "shop": 0}
    announcement, begun, end = Announcement(Introduction(VERSION, "lab", bytes(16)), 0, whole), [], threading.Event()

    def halfway():
        yield encode(announcement)
        yield b"ab"
        begun.append(1)
        end.wait(20)

    call = dial("lab").stream_unary(DELIVER).future(halfway())
    wait_until(lambda: begun and clinic._credit._unread["lab"])
    call.cancel()
    wait_until(lambda: not clinic._credit._unread["lab"])
    end.set()
    assert hand_over(DELIVER, dial("lab"), full, size=whole) == b""


@pytest.mark.parametrize("first", [[], [b""], [b"\x91" * 5000], [b"\x80\x04\x95."]], ids=str)
def test_malformed_announcement_is_refused(clinic, dial, first):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "expected Announcement"):
        dial("lab").stream_unary(DELIVER)(iter(first), timeout=5)
    assert clinic.receive(0) is None


WELCOME = encode(Parcel(Announcement(Introduction(VERSION, "lab", bytes(16)), 0, 3), memoryview(b"abc")))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 5000,
        b"\x80\x04\x95.",
        WELCOME[:-1],
        WELCOME + b"d",
        WELCOME.replace(b"\xc4\x03abc", b"\xa3abc"),
        WELCOME.replace(b"\xc4\x03abc", b"\x93\x01\x02\x03"),
        WELCOME.replace(b"\x82\xac", b"\x83\xa1x\xc0\xac"),
        encode(Announcement(Introduction(VERSION, "lab", bytes(16)), 0, 3)),
    ],
    ids=["empty", "nested", "pickle", "cut off", "trailing", "text", "list", "another field", "no frame"],
)
def test_malformed_parcel_is_refused(clinic, dial, data):
    post = dial("lab").unary_unary(POST)
    assert data != WELCOME
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "expected Parcel"):
        post(data, timeout=5)
    assert clinic.receive(0) is None
    post(WELCOME, timeout=5)
    assert bytes(clinic.receive(0).frame) == b"abc"


def test_other_release_is_refused(clinic, dial, deliver):
    with refused(grpc.StatusCode.FAILED_PRECONDITION, f"expected transport version {VERSION}, got 99"):
        deliver(dial("lab"), [b"abc"], version=99)


def test_a_connection_that_was_led_to_another_job_is_refused(clinic, dial, grpc_end, connect, deliver):
    """A door knows a connection's job by a line in clear, which somebody on the way may change."""
    other = Introduction(VERSION, "lab", bytes(16), "another job")
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "got one for another: its first line was changed on the way"):
        list(dial("lab").unary_stream(WATCH)(encode(other), timeout=5))
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "expected a connection for this job"):
        dial("lab").unary_unary(POST)(encode(Parcel(Announcement(other, 0, 3), memoryview(b"abc"))), timeout=5)
    deliver(dial("lab"), [b"abc"])  # nothing of it is held against lab
    ends = [grpc_end(*names, job="churn 1") for names in (("shop", ["lab"]), ("lab", ["shop"]))]
    assert connect(ends) == {"shop": None, "lab": None}
    ends = [grpc_end("shop", ["lab"], job="churn 1"), grpc_end("lab", ["shop"], job="risk 2")]
    assert "first line was changed on the way" in str(connect(ends)["lab"])


def test_restarted_sender_is_refused(clinic, dial, deliver):
    deliver(dial("lab"), [b"abc"])
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "already talked to another process of lab"):
        deliver(dial("lab"), [b"abc"], incarnation=b"x" * 16)


def plain_tcp(host, port):
    with socket.create_connection((host, port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 50)


def half_open_tcp(host, port):
    return socket.create_connection((host, port), 5)


def tls_without_certificate(host, port):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection((host, port), 5) as raw,
        context.wrap_socket(raw, server_hostname="clinic") as connection,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000)
        connection.settimeout(5)
        while connection.recv(100):
            pass


@pytest.mark.slow
def test_strangers_at_the_port_do_not_disturb_the_job(clinic, grpc_end, connect):
    lab, shop = grpc_end("lab", ["clinic"]), grpc_end("shop", ["clinic"])
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


def test_address_in_use_is_a_config_error(clinic, identities):
    from treaty.messaging.grpc_channel import GrpcChannel, Peer

    key, certificate = identities["lab"]
    peers = {"clinic": Peer(None, identities["clinic"].certificate)}
    with pytest.raises(ConfigError, match=f"lab cannot listen at {clinic.address}"):
        GrpcChannel("lab", clinic.address, key=key, certificate=certificate, peers=peers)


@pytest.mark.slow
def test_closing_does_not_wait_for_a_delivery_that_never_ends(clinic, dial, calls):
    stop = threading.Event()

    def pieces():
        yield encode(Announcement(Introduction(VERSION, "lab", bytes(16)), 0, 10))
        stop.wait(20)

    call = dial("lab").stream_unary(DELIVER).future(pieces())
    wait_until(lambda: calls)
    start = time.monotonic()
    clinic.close()
    assert time.monotonic() - start < within(10)  # not 20
    stop.set()
    assert isinstance(call.exception(), grpc.RpcError)


# ---------------------------------------------------------------- threads


def soon(condition):
    """Whether it becomes true within 5 seconds."""
    end = time.monotonic() + within(5)
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def daemons():
    made = DaemonThreads()
    yield made
    made.shutdown()


def test_calls_one_after_another_share_threads(daemons):
    used = {daemons.submit(threading.current_thread).result(5) for _ in range(200)}
    assert len(used) < 20  # one, but for calls that come before the last thread has sat down
    assert all(thread.daemon for thread in used)


def test_calls_that_lie_open_delay_no_other(daemons):
    end = threading.Event()
    for _ in range(3):  # the second and third time there are idle threads, though not enough
        lying = [daemons.submit(end.wait, 20) for _ in range(10)]
        assert daemons.submit(int, "7").result(5) == 7
        assert not any(future.done() for future in lying[:5])
        lying.append(daemons.submit(end.wait, 20))
    end.set()
    assert all(future.result(5) for future in lying)


def test_call_that_fails_tells_and_leaves_its_thread_fit_for_the_next(daemons):
    with pytest.raises(ValueError, match="invalid literal"):
        daemons.submit(int, "x").result(5)
    with pytest.raises(SystemExit):
        daemons.submit(exit).result(5)
    assert daemons.submit(int, "7").result(5) == 7


def test_idle_thread_keeps_nothing_of_its_last_call(daemons):
    class Frame:
        pass

    frame = Frame()
    alive = weakref.ref(frame)
    daemons.submit(id, frame).result(5)
    del frame
    assert soon(lambda: alive() is None)


def test_threads_end_at_shutdown_or_when_their_call_does():
    daemons, end = DaemonThreads(), threading.Event()
    both = threading.Barrier(3)

    def first():
        both.wait(5)
        return threading.current_thread()

    idle = [daemons.submit(first) for _ in range(2)]
    both.wait(5)
    threads = [future.result(5) for future in idle]
    assert soon(lambda: daemons._idle._value == 2)
    daemons.submit(end.wait, 20)
    daemons.shutdown()
    assert soon(lambda: sum(thread.is_alive() for thread in threads) == 1)
    end.set()
    assert soon(lambda: not any(thread.is_alive() for thread in threads))


def test_closed_channel_leaves_no_thread(grpc_end, connect):
    before = set(threading.enumerate())
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    connect([clinic, lab])
    lab.send("clinic", b"abc", 5)
    clinic.close()
    lab.close()
    assert soon(lambda: not set(threading.enumerate()) - before)
