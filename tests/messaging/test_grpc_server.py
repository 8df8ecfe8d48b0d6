"""What the listening end lets in, with callers that do not behave."""

import contextlib
import socket
import ssl
import threading
import time

import grpc
import pytest

from treaty.errors import ConfigError, LocalProtocolError, PeerProtocolError
from treaty.messaging.grpc_wire import DELIVER, VERSION, WATCH, Announcement, Introduction, encode


@pytest.fixture
def clinic(grpc_end):
    return grpc_end("clinic", ["lab", "shop"], max_message_bytes=5_000_000)


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


def deliver(channel, pieces, sender="lab", number=0, size=3, version=VERSION, incarnation=bytes(16)):
    head = encode(Announcement(Introduction(version, sender, incarnation), number, size))
    return channel.stream_unary(DELIVER)(iter([head, *pieces]), timeout=10)


def refused(code, text):
    return pytest.raises(grpc.RpcError, check=lambda error: error.code() is code and text in error.details())


def test_delivery_lies_in_the_inbox_when_it_is_answered(clinic, dial):
    assert deliver(dial("lab"), [b"a", b"bc"]) == b""
    arrival = clinic.receive(0)
    assert (arrival.sender, bytes(arrival.frame)) == ("lab", b"abc")


def test_exact_duplicate_of_a_delivery_is_answered_and_dropped(clinic, dial):
    for number in (0, 0, 1, 0, 1):
        deliver(dial("lab"), [b"%dxx" % number], number=number)
    assert [bytes(clinic.receive(0).frame) for _ in range(2)] == [b"0xx", b"1xx"]
    assert clinic.receive(0) is None


def test_valid_certificate_of_another_party_does_not_give_its_name(clinic, dial):
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

    with refused(grpc.StatusCode.OUT_OF_RANGE, f"got {1 << 60} bytes announced by lab"):
        dial("lab").stream_unary(DELIVER)(pieces(), timeout=4)
    asked.set()
    with pytest.raises(PeerProtocolError, match=r"expected at most 5000000 bytes \(max_message_bytes of clinic\)"):
        clinic.receive(5)


def test_oversized_message_is_an_error_at_both_sides(clinic, grpc_end, connect):
    lab, shop = grpc_end("lab", ["clinic"]), grpc_end("shop", ["clinic"])
    connect([clinic, lab, shop])
    lab.send("clinic", bytes(5_000_000), 5)
    with pytest.raises(LocalProtocolError, match=r"clinic refused a message: expected at most 5000000 bytes.*unread"):
        lab.send("clinic", bytes(1), 5)
    assert len(clinic.receive(5).frame) == 5_000_000
    with pytest.raises(PeerProtocolError, match="got 1 bytes announced by lab while 5000000 bytes"):
        clinic.receive(5)
    lab.send("clinic", bytes(1), 5)  # what was read counts no more


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([b"ab"], grpc.StatusCode.DATA_LOSS),
        ([b"ab", b"cd"], grpc.StatusCode.INVALID_ARGUMENT),
        ([], grpc.StatusCode.DATA_LOSS),
    ],
    ids=["short", "long", "none"],
)
def test_delivery_of_another_length_than_announced_is_refused(clinic, dial, pieces, code):
    with refused(code, "expected 3 bytes, got"):
        deliver(dial("lab"), pieces)
    assert clinic.receive(0) is None
    deliver(dial("lab"), [b"abc"])
    assert bytes(clinic.receive(0).frame) == b"abc"


@pytest.mark.parametrize("first", [[], [b""], [b"\x91" * 5000], [b"\x80\x04\x95."]], ids=str)
def test_malformed_announcement_is_refused(clinic, dial, first):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "expected Announcement"):
        dial("lab").stream_unary(DELIVER)(iter(first), timeout=5)
    assert clinic.receive(0) is None


def test_other_release_is_refused(clinic, dial):
    with refused(grpc.StatusCode.FAILED_PRECONDITION, f"expected transport version {VERSION}, got 99"):
        deliver(dial("lab"), [b"abc"], version=99)


def test_restarted_sender_is_refused(clinic, dial):
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


def test_closing_does_not_wait_for_a_delivery_that_never_ends(clinic, dial):
    stop = threading.Event()

    def pieces():
        yield encode(Announcement(Introduction(VERSION, "lab", bytes(16)), 0, 10))
        stop.wait(20)

    call = dial("lab").stream_unary(DELIVER).future(pieces())
    time.sleep(0.3)
    start = time.monotonic()
    clinic.close()
    assert time.monotonic() - start < 3
    stop.set()
    assert isinstance(call.exception(), grpc.RpcError)
