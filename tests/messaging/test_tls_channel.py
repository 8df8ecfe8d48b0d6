import contextlib
import socket
import threading
import time
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest

from proxy import HttpProxy
from treaty.errors import ConfigError, LocalProtocolError, PeerAborted, PeerLost
from treaty.messaging import tls
from treaty.messaging.certificates import make_identity
from treaty.messaging.messages import Array, Message
from treaty.messaging.party import Party, run_role
from treaty.messaging.tls import connected
from treaty.messaging.tls_channel import Peer, TlsChannel
from treaty.messaging.tls_server import Server


class Rows(Message):
    rows: Array


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_message_of_200_mb_takes_its_size_once_at_the_receiver(tls_end, process):
    clinic = tls_end("clinic", ["lab"])
    child = process("lab", clinic, "receive")
    clinic.connect(20, {"lab": child.address})
    rows = np.arange(200_000_000, dtype=np.uint8)
    party = Party("clinic", "j", "p", clinic, ["lab"])
    party.send("lab", Rows(Array.of(rows)))
    assert child.stdout.readline() == "connected\n"
    length, first, last, growth = map(int, child.stdout.readline().split())
    assert (length, first, last) == (200_000_000, 0, int(rows[-1]))
    assert 200_000_000 <= growth < 300_000_000


def test_large_messages_cross_in_both_directions_at_once(tls_end, connect, together):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    connect([clinic, lab])
    frame = bytes(30_000_000)

    def exchange(end, other):
        end.send(other, frame, 30)
        assert len(end.receive(30).frame) == len(frame)

    assert together(clinic=lambda: exchange(clinic, "lab"), lab=lambda: exchange(lab, "clinic")) == {
        "clinic": None,
        "lab": None,
    }


@pytest.mark.slow
def test_connect_waits_for_a_peer_that_starts_later(tls_end, together):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    address = lab.address
    lab.close()

    def late():
        time.sleep(1.5)
        identity = lab._identity
        peers = {"clinic": Peer(clinic.address, clinic._identity.certificate)}
        with TlsChannel("lab", address, key=identity.key, certificate=identity.certificate, peers=peers) as again:
            again.connect(10)
            again.send("clinic", b"here", 5)

    outcome = together(clinic=lambda: clinic.connect(10, {"lab": address}), lab=late)
    assert outcome == {"clinic": None, "lab": None}
    assert bytes(clinic.receive(5).frame) == b"here"


@pytest.mark.slow
def test_connect_names_every_peer_that_was_not_reachable(tls_end, together):
    clinic = tls_end("clinic", ["lab", "shop"])
    lab, shop = tls_end("lab", ["clinic"]), tls_end("shop", ["clinic"])
    shop.close()
    addresses = {"lab": lab.address, "shop": shop.address, "clinic": clinic.address}
    outcome = together(clinic=lambda: clinic.connect(1, addresses), lab=lambda: lab.connect(1, addresses))
    assert outcome["lab"] is None
    assert isinstance(outcome["clinic"], PeerLost)
    text = "expected all peers within 1 s, clinic is not connected with shop: shop at 127.0.0.1:"
    assert text in str(outcome["clinic"])
    assert "lab" not in str(outcome["clinic"])


@pytest.mark.slow
def test_connect_names_a_peer_that_never_dialled_us(tls_end):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    with pytest.raises(PeerLost, match="not connected with lab: lab has not dialled us") as caught:
        clinic.connect(1, {"lab": lab.address})
    assert caught.value.peer == "lab"


def test_all_differences_of_terms_are_told_at_both_sides(tls_end, connect):
    clinic = tls_end("clinic", ["lab"], terms={"protocol": "'a'", "name": "'x'", "rounds": "3", "own": "1"})
    lab = tls_end("lab", ["clinic"], terms={"protocol": "'b'", "name": "'x'", "rounds": "4", "other": "2"})
    outcome = connect([clinic, lab])
    for error in outcome.values():
        assert isinstance(error, ConfigError)
        text = "the jobs differ: protocol = 'a' at clinic, 'b' at lab; rounds = 3 at clinic, 4 at lab; give all"
        assert str(error).startswith(text)
        assert error.public == str(error)


def test_terms_that_are_equal_or_that_one_side_lacks_are_no_difference(tls_end, connect):
    clinic = tls_end("clinic", ["lab"], terms={"name": "'x'", "own": "1"})
    assert connect([clinic, tls_end("lab", ["clinic"], terms={"name": "'x'"})]) == {"clinic": None, "lab": None}


def test_terms_of_one_who_may_be_lost_end_only_its_own_job(tls_end, together):
    clinic, lab = tls_end("clinic", ["lab"], terms={"n": "1"}), tls_end("lab", ["clinic"], terms={"n": "2"})
    outcome = together(
        clinic=lambda: clinic.connect(10, {"lab": lab.address}, ["lab"]),
        lab=lambda: lab.connect(10, {"clinic": clinic.address}),
    )
    assert outcome["clinic"] is None
    assert "n = 1 at clinic, 2 at lab" in str(outcome["lab"])


def test_long_or_unprintable_terms_are_cut_and_cleaned(tls_end, connect):
    clinic = tls_end("clinic", ["lab"], terms={"name": "x" * 4000})
    outcome = connect([clinic, tls_end("lab", ["clinic"], terms={"name": "\x1b[2J\n"})])
    assert all("x" * 147 + "... at clinic, ?[2J? at lab" in str(error) for error in outcome.values())


def test_connect_says_for_whom_it_waits(tls_end):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    seen = []
    with pytest.raises(PeerLost):
        clinic.connect(0.1, {"lab": lab.address}, waiting=lambda missing: seen.append(list(missing)))
    assert seen[0] == ["lab"]


def test_connect_without_an_address_is_a_config_error(tls_end):
    with pytest.raises(ConfigError, match="expected an address of lab, got none - at connect of clinic"):
        tls_end("clinic", ["lab"]).connect(1)


def test_connect_twice_is_our_own_fault(tls_end, connect):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    connect([clinic, lab])
    with pytest.raises(LocalProtocolError, match="expected connect to be called once"):
        clinic.connect(1, {"lab": lab.address})


def test_sending_before_connect_is_our_own_fault(tls_end):
    with pytest.raises(LocalProtocolError, match=r"expected a connected peer of clinic \(none\), got 'lab'"):
        tls_end("clinic", ["lab"]).send("lab", b"x", 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"identity": make_identity("shop")}, "expected a certificate for clinic, got one for shop"),
        ({"pins": {"lab": make_identity("shop").certificate}}, "expected a certificate for lab, got one for shop"),
    ],
    ids=["own", "pinned"],
)
def test_certificate_of_another_name_is_refused_before_anything_starts(tls_end, options, text):
    with pytest.raises(ConfigError, match=text):
        tls_end("clinic", ["lab"], **options)


@pytest.mark.parametrize("peers", [[], ["clinic"]], ids=["none", "itself"])
def test_peers_must_be_others(tls_end, peers):
    with pytest.raises(ConfigError, match="expected one or more peers other than clinic"):
        tls_end("clinic", peers)


def test_many_small_messages_from_several_threads_all_arrive(tls_end, connect):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    connect([clinic, lab])

    def send():
        for _ in range(50):
            lab.send("clinic", b"x", 10)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(clinic.receive(10) is not None for _ in range(200))
    for thread in threads:
        thread.join()
    assert clinic.receive(0) is None


def test_a_message_taken_in_just_before_the_peer_leaves_counts_as_sent(tls_end, connect, together, monkeypatch):
    leaving = threading.Event()
    real = Server._receipt

    def slow_to_acknowledge(self, line, sender):
        leaving.wait(5)
        time.sleep(0.3)  # by now the sender has heard that the peer closes
        return real(self, line, sender)

    monkeypatch.setattr(Server, "_receipt", slow_to_acknowledge)
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    connect([clinic, lab])

    def read_and_leave():
        assert bytes(lab.receive(5).frame) == b"last words"
        leaving.set()
        lab.close()

    outcome = together(clinic=lambda: clinic.send("lab", b"last words", 10, receipt=True), lab=read_and_leave)
    assert outcome == {"clinic": None, "lab": None}


def test_what_was_sent_arrives_although_its_sender_closes_at_once(tls_end, connect):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    connect([clinic, lab])
    for number in range(20):
        clinic.send("lab", b"%d" % number + bytes(100_000), 5)
    clinic.close()
    assert [int(bytes(lab.receive(5).frame).rstrip(b"\0")) for _ in range(20)] == list(range(20))
    with pytest.raises(PeerLost, match="it has closed its channel"):
        lab.receive(5)


@pytest.mark.slow
def test_a_peer_that_comes_after_another_has_gone_is_told(tls_end, together):
    """Else it would wait for the hub, which has ended meanwhile, until its own patience is over."""
    clinic, lab, shop = tls_end("clinic", ["lab", "shop"]), tls_end("lab", ["clinic"]), tls_end("shop", ["clinic"])
    where = {end.name: end.address for end in (clinic, lab, shop)}
    said = {}

    def hub():
        party = Party("clinic", "job", "test", clinic, ["lab", "shop"])
        with pytest.raises(PeerLost, match="lab"):
            run_role(party, lambda: clinic.connect(20, where))
        clinic.close()  # as a process that ends

    def fails_at_once():
        lab.connect(20, where)
        lab.close()

    def late():
        time.sleep(3)
        shop.connect(20, where)
        party = Party("shop", "job", "test", shop, ["clinic"])
        with pytest.raises(PeerAborted) as told:
            party.receive("clinic", Rows, timeout=10)
        said["shop"] = str(told.value)

    assert together(clinic=hub, lab=fails_at_once, shop=late) == dict.fromkeys(("clinic", "lab", "shop"))
    assert "lab" in said["shop"]


@pytest.mark.parametrize("user", ["", "treaty:p%40ss@"], ids=["open", "with a password"])
def test_a_party_behind_an_http_proxy_dials_through_it(tls_end, connect, user):
    proxy = HttpProxy(f"Basic {b64encode(b'treaty:p@ss').decode()}" if user else None)
    clinic = tls_end("clinic", ["lab"], proxy=f"http://{user}{proxy.address}")
    lab = tls_end("lab", ["clinic"])
    assert connect([clinic, lab]) == {"clinic": None, "lab": None}
    clinic.send("lab", b"through", 5)
    assert bytes(lab.receive(5).frame) == b"through"
    assert set(proxy.asked) == {lab.address}
    proxy.close()


def test_an_http_proxy_is_asked_for_an_ipv6_address_in_brackets():
    proxy, listener = HttpProxy(), socket.create_server(("::1", 0), family=socket.AF_INET6)
    address = f"[::1]:{listener.getsockname()[1]}"
    connected(address, 5, f"http://{proxy.address}").close()
    assert proxy.asked == [address]
    proxy.close()
    listener.close()


@pytest.mark.parametrize(
    ("address", "proxy"),
    [
        ("a..b:70", None),
        ("a..b:70", "http://127.0.0.1:1"),
        ("c" * 70 + ":70", None),
        ("b:70", "http://127.0.0.1:99999"),
    ],
)
def test_an_address_that_no_host_can_have_is_one_that_is_not_reached(address, proxy):
    with pytest.raises(OSError):  # noqa: PT011 - the system's own texts
        connected(address, 5, proxy)


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ("HTTP/1.1 403 Forbidden\r\n\r\n", "Tunnel connection failed: 403 Forbidden"),
        ("SSH-2.0-x\r\n", "SSH-2.0-x"),
    ],
)
def test_a_proxy_that_does_not_let_through_is_said(tls_end, answers, text):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.recv(1000)
                connection.sendall(answers.encode())
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    clinic = tls_end("clinic", ["lab"], proxy=f"http://127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(PeerLost, match=text):
        clinic.connect(1, {"lab": "127.0.0.1:1"})
    listener.close()


def test_a_connection_that_breaks_before_the_handshake_is_closed(monkeypatch):
    mine, other = socket.socketpair()
    other.close()
    monkeypatch.setattr(tls, "connected", lambda *given: mine)
    with pytest.raises(BrokenPipeError):
        tls.dial("unix:x", None, b"", time.monotonic() + 5, first=b"x")
    assert mine.fileno() == -1
