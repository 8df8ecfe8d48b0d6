import threading
import time
from pathlib import Path

import numpy as np
import pytest

from treaty.errors import ConfigError, LocalProtocolError, PeerAborted, PeerLost
from treaty.messaging.certificates import make_identity
from treaty.messaging.grpc_channel import GrpcChannel, Peer
from treaty.messaging.grpc_server import Server
from treaty.messaging.messages import Array, Message
from treaty.messaging.party import Party, run_role


class Rows(Message):
    rows: Array


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_message_of_200_mb_takes_its_size_once_at_the_receiver(grpc_end, process):
    clinic = grpc_end("clinic", ["lab"])
    child = process("lab", clinic, "receive")
    clinic.connect(20, {"lab": child.address})
    rows = np.arange(200_000_000, dtype=np.uint8)
    party = Party("clinic", "j", "p", clinic, ["lab"])
    party.send("lab", Rows(Array.of(rows)))
    assert child.stdout.readline() == "connected\n"
    length, first, last, growth = map(int, child.stdout.readline().split())
    assert (length, first, last) == (200_000_000, 0, int(rows[-1]))
    assert 200_000_000 <= growth < 300_000_000


def test_large_messages_cross_in_both_directions_at_once(grpc_end, connect, together):
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
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
def test_connect_waits_for_a_peer_that_starts_later(grpc_end, together):
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    address = lab.address
    lab.close()

    def late():
        time.sleep(1.5)
        identity = lab._identity
        peers = {"clinic": Peer(clinic.address, clinic._identity.certificate)}
        with GrpcChannel("lab", address, key=identity.key, certificate=identity.certificate, peers=peers) as again:
            again.connect(10)
            again.send("clinic", b"here", 5)

    outcome = together(clinic=lambda: clinic.connect(10, {"lab": address}), lab=late)
    assert outcome == {"clinic": None, "lab": None}
    assert bytes(clinic.receive(5).frame) == b"here"


@pytest.mark.slow
def test_connect_names_every_peer_that_was_not_reachable(grpc_end, together):
    clinic = grpc_end("clinic", ["lab", "shop"])
    lab, shop = grpc_end("lab", ["clinic"]), grpc_end("shop", ["clinic"])
    shop.close()
    addresses = {"lab": lab.address, "shop": shop.address, "clinic": clinic.address}
    outcome = together(clinic=lambda: clinic.connect(1, addresses), lab=lambda: lab.connect(1, addresses))
    assert outcome["lab"] is None
    assert isinstance(outcome["clinic"], PeerLost)
    text = "expected all peers within 1 s, clinic is not connected with shop: shop at 127.0.0.1:"
    assert text in str(outcome["clinic"])
    assert "lab" not in str(outcome["clinic"])


@pytest.mark.slow
def test_connect_names_a_peer_that_never_dialled_us(grpc_end):
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    with pytest.raises(PeerLost, match="not connected with lab: lab has not dialled us") as caught:
        clinic.connect(1, {"lab": lab.address})
    assert caught.value.peer == "lab"


def test_all_differences_of_terms_are_told_at_both_sides(grpc_end, connect):
    clinic = grpc_end("clinic", ["lab"], terms={"protocol": "'a'", "name": "'x'", "rounds": "3", "own": "1"})
    lab = grpc_end("lab", ["clinic"], terms={"protocol": "'b'", "name": "'x'", "rounds": "4", "other": "2"})
    outcome = connect([clinic, lab])
    for error in outcome.values():
        assert isinstance(error, ConfigError)
        text = "the jobs differ: protocol = 'a' at clinic, 'b' at lab; rounds = 3 at clinic, 4 at lab; give all"
        assert str(error).startswith(text)
        assert error.public == str(error)


def test_terms_that_are_equal_or_that_one_side_lacks_are_no_difference(grpc_end, connect):
    clinic = grpc_end("clinic", ["lab"], terms={"name": "'x'", "own": "1"})
    assert connect([clinic, grpc_end("lab", ["clinic"], terms={"name": "'x'"})]) == {"clinic": None, "lab": None}


def test_terms_of_one_who_may_be_lost_end_only_its_own_job(grpc_end, together):
    clinic, lab = grpc_end("clinic", ["lab"], terms={"n": "1"}), grpc_end("lab", ["clinic"], terms={"n": "2"})
    outcome = together(
        clinic=lambda: clinic.connect(10, {"lab": lab.address}, ["lab"]),
        lab=lambda: lab.connect(10, {"clinic": clinic.address}),
    )
    assert outcome["clinic"] is None
    assert "n = 1 at clinic, 2 at lab" in str(outcome["lab"])


def test_long_or_unprintable_terms_are_cut_and_cleaned(grpc_end, connect):
    clinic = grpc_end("clinic", ["lab"], terms={"name": "x" * 4000})
    outcome = connect([clinic, grpc_end("lab", ["clinic"], terms={"name": "\x1b[2J\n"})])
    assert all("x" * 147 + "... at clinic, ?[2J? at lab" in str(error) for error in outcome.values())


def test_connect_says_for_whom_it_waits(grpc_end):
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    seen = []
    with pytest.raises(PeerLost):
        clinic.connect(0.1, {"lab": lab.address}, waiting=lambda missing: seen.append(list(missing)))
    assert seen[0] == ["lab"]


def test_connect_without_an_address_is_a_config_error(grpc_end):
    with pytest.raises(ConfigError, match="expected an address of lab, got none - at connect of clinic"):
        grpc_end("clinic", ["lab"]).connect(1)


def test_connect_twice_is_our_own_fault(grpc_end, connect):
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    connect([clinic, lab])
    with pytest.raises(LocalProtocolError, match="expected connect to be called once"):
        clinic.connect(1, {"lab": lab.address})


def test_sending_before_connect_is_our_own_fault(grpc_end):
    with pytest.raises(LocalProtocolError, match=r"expected a connected peer of clinic \(none\), got 'lab'"):
        grpc_end("clinic", ["lab"]).send("lab", b"x", 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"identity": make_identity("shop")}, "expected a certificate for clinic, got one for shop"),
        ({"pins": {"lab": make_identity("shop").certificate}}, "expected a certificate for lab, got one for shop"),
    ],
    ids=["own", "pinned"],
)
def test_certificate_of_another_name_is_refused_before_anything_starts(grpc_end, options, text):
    with pytest.raises(ConfigError, match=text):
        grpc_end("clinic", ["lab"], **options)


@pytest.mark.parametrize("peers", [[], ["clinic"]], ids=["none", "itself"])
def test_peers_must_be_others(grpc_end, peers):
    with pytest.raises(ConfigError, match="expected one or more peers other than clinic"):
        grpc_end("clinic", peers)


def test_many_small_messages_from_several_threads_all_arrive(grpc_end, connect):
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
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


def test_a_message_taken_in_just_before_the_peer_leaves_counts_as_sent(grpc_end, connect, together, monkeypatch):
    leaving = threading.Event()
    real = Server._take

    def slow_to_acknowledge(self, peer, announced, pieces, context):
        answer = real(self, peer, announced, pieces, context)
        leaving.wait(5)
        time.sleep(0.3)  # by now the sender has heard that the peer closes
        return answer

    monkeypatch.setattr(Server, "_take", slow_to_acknowledge)
    clinic, lab = grpc_end("clinic", ["lab"]), grpc_end("lab", ["clinic"])
    connect([clinic, lab])

    def read_and_leave():
        assert bytes(lab.receive(5).frame) == b"last words"
        leaving.set()
        lab.close()

    outcome = together(clinic=lambda: clinic.send("lab", b"last words", 10), lab=read_and_leave)
    assert outcome == {"clinic": None, "lab": None}


@pytest.mark.slow
def test_a_peer_that_comes_after_another_has_gone_is_told(grpc_end, together):
    """Else it would wait for the hub, which has ended meanwhile, until its own patience is over."""
    clinic, lab, shop = grpc_end("clinic", ["lab", "shop"]), grpc_end("lab", ["clinic"]), grpc_end("shop", ["clinic"])
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
