import errno
import threading
import time

import numpy as np
import pytest

from pace import within
from transcripts import by_pair, by_type
from treaty.errors import (
    CryptoError,
    DataError,
    LocalProtocolError,
    PeerAborted,
    PeerLost,
    PeerProtocolError,
    PeerTimeout,
)
from treaty.messaging.channel import memory_channels
from treaty.messaging.conversation import Conversation
from treaty.messaging.messages import Abort, Array, Goodbye, Message, view
from treaty.messaging.party import Party, run_role
from treaty.messaging.transcript import Transcript

STAR = {"clinic": ["lab", "shop"], "lab": ["clinic"], "shop": ["clinic"]}


class Count(Message):
    n: int


class Rows(Message):
    rows: Array


def star(ends, **options):
    return {n: Party(n, "breast", "secureboost", ends[n], STAR[n], **({"timeout": 20} | options)) for n in STAR}


@pytest.fixture
def parties(ends):
    """Three parties over memory channels, then over TLS."""
    return star(ends)


@pytest.fixture
def quick():
    """Three parties over memory channels alone."""
    return star(memory_channels(STAR))


def test_messages_arrive_as_their_types(parties):
    parties["clinic"].send("lab", Rows(Array.of(np.arange(5))))
    rows = parties["lab"].receive("clinic", Rows).rows
    np.testing.assert_array_equal(view(rows, np.int64, (5,), peer="clinic", what="Rows.rows"), np.arange(5))


def test_messages_of_one_peer_wait_while_another_is_read(parties):
    parties["lab"].send("clinic", Count(1))
    parties["shop"].send("clinic", Count(2))
    assert parties["clinic"].receive("shop", Count).n == 2
    assert parties["clinic"].receive("lab", Count).n == 1


def test_message_of_a_later_round_waits_for_that_round(quick):
    quick["lab"].round = 1
    quick["lab"].send("clinic", Count(1))
    quick["clinic"].round = 1
    assert quick["clinic"].receive("lab", Count).n == 1


def test_message_of_another_round_is_refused(quick):
    quick["lab"].round = 2
    quick["lab"].send("clinic", Count(1))
    with pytest.raises(PeerProtocolError, match="expected Count of round 0, got Count of round 2"):
        quick["clinic"].receive("lab", Count)


def test_message_of_another_class_is_refused(quick):
    quick["lab"].send("clinic", Count(1))
    with pytest.raises(PeerProtocolError, match="expected Rows of round 0, got Count of round 0"):
        quick["clinic"].receive("lab", Rows)


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x80", b"cos\nsystem\n(S'true'\ntR."], ids=["empty", "reserved", "map", "pickle"]
)
def test_garbage_from_a_peer_is_refused_even_when_waiting_for_another(quick, frame):
    quick["lab"].channel.send("clinic", frame, 1)
    with pytest.raises(PeerProtocolError, match="from lab") as caught:
        quick["clinic"].receive("shop", Count)
    assert caught.value.peer == "lab"


def test_replayed_frame_is_refused(quick):
    (frame,) = Conversation("lab", "clinic", "breast", "secureboost").write(Count(1), 0)
    quick["lab"].channel.send("clinic", frame, 1)
    assert quick["clinic"].receive("lab", Count).n == 1
    quick["lab"].channel.send("clinic", frame, 1)
    with pytest.raises(PeerProtocolError, match="expected message number 1, got number 0 again"):
        quick["clinic"].receive("lab", Count)


def test_frame_of_a_party_outside_the_job_is_refused():
    channels = memory_channels(STAR)
    clinic = Party("clinic", "breast", "secureboost", channels["clinic"], ["lab"], timeout=5)
    shop = Party("shop", "breast", "secureboost", channels["shop"], ["clinic"])
    shop.send("clinic", Count(1))
    with pytest.raises(PeerProtocolError, match="expected messages of lab alone, got one from shop"):
        clinic.receive("lab", Count)


def test_loss_of_a_party_outside_the_job_is_ignored():
    channels = memory_channels(STAR)
    clinic = Party("clinic", "breast", "secureboost", channels["clinic"], ["lab"], timeout=0.1)
    channels["shop"].close()
    with pytest.raises(PeerTimeout):
        clinic.receive("lab", Count)


def test_other_job_is_an_error_at_both_sides(together):
    channels = memory_channels(["clinic", "lab"])
    clinic = Party("clinic", "breast", "secureboost", channels["clinic"], ["lab"], timeout=5)
    lab = Party("lab", "lung", "secureboost", channels["lab"], ["clinic"], timeout=5)
    outcome = together(
        clinic=lambda: run_role(clinic, lambda: clinic.send("lab", Count(1)) or clinic.receive("lab", Count)),
        lab=lambda: run_role(lab, lambda: lab.receive("clinic", Count)),
    )
    assert "expected job 'lung', got 'breast'" in str(outcome["lab"])
    assert "expected job 'breast', got 'lung'" in str(outcome["clinic"])


def test_timeout_says_who_waited_for_what_from_whom_and_how_long(quick):
    quick["clinic"].round = 4
    text = "clinic was waiting for Count of round 4 from lab for 0.2 s and got nothing; lab is connected but silent"
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=text) as caught:
        quick["clinic"].receive("lab", Count, timeout=0.2)
    assert caught.value.peer == "lab"
    assert 0.19 < time.monotonic() - start < within(10)


def test_messages_of_others_do_not_prolong_the_timeout(quick):
    stop = threading.Event()

    def chatter():
        while not stop.wait(0.02):
            quick["shop"].send("clinic", Count(1))

    thread = threading.Thread(target=chatter)
    thread.start()
    start = time.monotonic()
    with pytest.raises(PeerTimeout):
        quick["clinic"].receive("lab", Count, timeout=0.3)
    assert time.monotonic() - start < within(10)
    stop.set()
    thread.join()


def test_abort_reaches_a_party_waiting_for_someone_else_at_once(parties):
    threading.Timer(0.2, parties["lab"].abort, ["disk full"]).start()
    start = time.monotonic()
    with pytest.raises(PeerAborted, match="lab stopped the job: disk full") as caught:
        parties["clinic"].receive("shop", Count)
    assert caught.value.peer == "lab"
    assert time.monotonic() - start < within(10)


def test_abort_wins_over_messages_that_wait(quick):
    quick["lab"].send("clinic", Count(1))
    quick["shop"].abort("no")
    for _ in range(2):
        with pytest.raises(PeerAborted, match="shop stopped the job: no"):
            quick["clinic"].receive("lab", Count)


def test_abort_is_noticed_when_sending(quick):
    quick["lab"].abort("disk full")
    with pytest.raises(PeerAborted, match="disk full"):
        quick["clinic"].send("shop", Count(1))


def test_abort_explains_why_its_sender_is_gone(parties):
    parties["lab"].abort("disk full")
    parties["lab"].channel.close()
    with pytest.raises(PeerAborted, match="disk full"):
        parties["clinic"].receive("lab", Count)
    with pytest.raises(PeerAborted, match="disk full"):
        parties["clinic"].send("lab", Count(1))


def test_abort_is_sent_once_and_not_to_peers_that_are_gone(quick):
    quick["shop"].channel.close()
    quick["clinic"].abort("first")
    quick["clinic"].abort("second")
    quick["clinic"].close()
    with pytest.raises(PeerAborted, match="clinic stopped the job: first"):
        quick["lab"].receive("clinic", Count)


def test_lost_peer_is_noticed_when_waiting_for_another(parties):
    threading.Timer(0.2, parties["lab"].channel.close).start()
    text = r"lab is lost: .*; clinic was waiting for Count of round 0 from shop"
    for _ in range(2):
        with pytest.raises(PeerLost, match=text) as caught:
            parties["clinic"].receive("shop", Count)
        assert caught.value.peer == "lab"


def test_goodbye_is_not_a_death(parties):
    parties["lab"].send("clinic", Count(1))
    parties["lab"].close()
    parties["lab"].channel.close()
    time.sleep(0.3)
    parties["shop"].send("clinic", Count(2))
    assert parties["clinic"].receive("shop", Count).n == 2
    assert parties["clinic"].receive("lab", Count).n == 1
    with pytest.raises(PeerTimeout):
        parties["clinic"].receive("shop", Count, timeout=0.1)


def test_waiting_for_or_sending_to_a_peer_that_has_left_raises_at_once(quick):
    quick["lab"].close()
    text = "lab has finished its part and left; clinic was waiting for Count of round 0 from lab"
    with pytest.raises(PeerLost, match=text):
        quick["clinic"].receive("lab", Count)
    with pytest.raises(PeerLost, match="left; clinic was sending Count of round 0"):
        quick["clinic"].send("lab", Count(1))


def test_party_that_has_left_refuses_use(quick):
    quick["lab"].close()
    with pytest.raises(LocalProtocolError, match="expected nothing more after lab left the job, got Count"):
        quick["lab"].send("clinic", Count(1))
    with pytest.raises(LocalProtocolError, match="after lab left"):
        quick["lab"].receive("clinic", Count)


def test_unknown_peer_is_our_own_fault(quick):
    with pytest.raises(LocalProtocolError, match=r"'shop' is no peer of lab \(clinic\) - at Count"):
        quick["lab"].send("shop", Count(1))
    with pytest.raises(LocalProtocolError, match="'lab' is no peer of lab"):
        quick["lab"].receive("lab", Count)


@pytest.mark.parametrize("message", [Abort("x"), Goodbye()], ids=["Abort", "Goodbye"])
def test_control_messages_cannot_be_sent_as_a_protocols_own(quick, message):
    with pytest.raises(LocalProtocolError, match="expected a protocol's own message"):
        quick["lab"].send("clinic", message)


def test_party_must_fit_its_channel_and_peers():
    channels = memory_channels(["clinic", "lab"])
    with pytest.raises(LocalProtocolError, match="expected the channel of lab, got that of clinic"):
        Party("lab", "j", "p", channels["clinic"], ["clinic"])
    for peers in (["clinic"], ["lab", "lab"]):
        with pytest.raises(LocalProtocolError, match="expected different peers"):
            Party("clinic", "j", "p", channels["clinic"], peers)


def test_run_role_returns_the_result_and_says_goodbye(quick):
    assert run_role(quick["lab"], lambda: 42) == 42
    quick["lab"].channel.close()
    with pytest.raises(PeerTimeout):
        quick["clinic"].receive("shop", Count, timeout=0.1)


def failing(error):
    def role():
        raise error

    return role


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CryptoError("a ciphertext is out of range"), "lab stopped the job: a ciphertext is out of range"),
        (DataError("column age of 17 rows"), "lab stopped the job: its table, labels or weights cannot be used"),
        (DataError("column age of 17 rows", public="too few rows"), "lab stopped the job: too few rows"),
        (KeyError("patient 17"), r"lab stopped the job: internal error \(KeyError\)$"),
        (KeyboardInterrupt(), "lab stopped the job: it was interrupted by its user$"),
        (SystemExit(143), "lab stopped the job: its process was asked to end$"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/home/17/x"),
            r"lab stopped the job: a file of its own, or its system, failed \(ENOSPC\)$",
        ),
    ],
    ids=["treaty error", "private error", "error with a public text", "other error", "interrupt", "signal", "file"],
)
def test_run_role_tells_peers_of_a_failure_and_raises_it(quick, error, told):
    with pytest.raises(type(error)) as caught:
        run_role(quick["lab"], failing(error))
    assert caught.value is error
    with pytest.raises(PeerAborted, match=told) as seen:
        quick["clinic"].receive("shop", Count)
    assert "17" not in str(seen.value)


def test_failure_of_one_party_ends_the_whole_star(parties, together):
    outcome = together(
        lab=lambda: run_role(parties["lab"], failing(CryptoError("no key"))),
        clinic=lambda: run_role(parties["clinic"], lambda: parties["clinic"].receive("shop", Count)),
        shop=lambda: run_role(parties["shop"], lambda: parties["shop"].receive("clinic", Count)),
    )
    assert str(outcome["clinic"]) == "lab stopped the job: no key"
    assert str(outcome["shop"]) == "clinic stopped the job: lab stopped the job: no key"


def test_transcripts_of_both_sides_agree_and_memory_counts_as_tls_does(parties):
    clinic, lab = parties["clinic"], parties["lab"]
    clinic.round = lab.round = 2
    clinic.send("lab", Rows(Array.of(np.zeros(1000, np.uint8))))
    lab.receive("clinic", Rows)
    clinic.close()
    assert by_pair(clinic.transcript) == by_pair(lab.transcript) == {("clinic", "lab"): (1, 1124)}
    (entry,) = lab.transcript.entries
    assert (entry.direction, entry.peer, entry.step, entry.round) == ("received", "clinic", "Rows", 2)


def test_transcript_keeps_contents_on_request():
    channels = memory_channels(STAR)
    transcripts = {name: Transcript(name, record_content=True) for name in ("clinic", "lab")}
    clinic, lab = (Party(n, "j", "p", channels[n], STAR[n], transcript=transcripts[n]) for n in ("clinic", "lab"))
    clinic.send("lab", Count(5))
    lab.receive("clinic", Count)
    assert [t.entries[0].message(Count).n for t in transcripts.values()] == [5, 5]


def test_abort_is_part_of_the_transcript_and_goodbye_is_not(quick):
    quick["lab"].close()
    quick["shop"].abort("no")
    with pytest.raises(PeerAborted):
        quick["clinic"].receive("lab", Count)
    assert list(by_type(quick["clinic"].transcript)) == ["Abort"]
    assert list(by_type(quick["shop"].transcript)) == ["Abort"]
    assert by_type(quick["lab"].transcript) == {}


def test_several_threads_may_send(parties):
    def send():
        for n in range(25):
            parties["lab"].send("clinic", Count(n))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    got = sorted(parties["clinic"].receive("lab", Count).n for _ in range(100))
    for thread in threads:
        thread.join()
    assert got == sorted(list(range(25)) * 4)


def test_a_stop_heard_while_still_connecting_explains_the_lost_peer(parties):
    clinic, lab = parties["clinic"], parties["lab"]
    lab.abort("no table")
    lab.channel.close()

    def wait():
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            clinic.heed()
            time.sleep(0.01)

    with pytest.raises(PeerAborted, match="lab stopped the job: no table"):
        wait()


def test_round_of_a_peer_that_counts_is_followed(quick):
    lab, clinic = quick["lab"], quick["clinic"]
    for clinic.round in (0, 3):
        clinic.send("lab", Count(clinic.round))
    assert lab.receive("clinic", Count, follow=True).n == 0
    assert lab.round == 0
    assert lab.receive("clinic", Count, follow=True).n == 3
    assert lab.round == 3
    lab.send("clinic", Count(7))
    assert clinic.receive("lab", Count).n == 7  # of the round that it followed to


def test_later_round_is_refused_where_it_is_not_followed_and_an_earlier_one_always(quick):
    lab, clinic = quick["lab"], quick["clinic"]
    clinic.round = 1
    clinic.send("lab", Count(1))
    with pytest.raises(PeerProtocolError, match="expected Count of round 0, got Count of round 1"):
        lab.receive("clinic", Count)
    lab.round = 2
    with pytest.raises(PeerProtocolError, match="expected Count of round 2, got Count of round 1"):
        lab.receive("clinic", Count, follow=True)
    assert lab.round == 2


# ---------------------------------------------------------------- a peer set aside


def test_a_peer_set_aside_is_talked_to_by_name_alone(quick):
    clinic = quick["clinic"]
    clinic.set_aside("shop")
    clinic.set_aside("shop")
    assert clinic.peers == ("lab",)
    clinic.send("shop", Count(1))
    quick["shop"].send("clinic", Count(2))
    assert quick["shop"].receive("clinic", Count).n == 1
    assert clinic.receive("shop", Count).n == 2
    with pytest.raises(LocalProtocolError, match=r"'nobody' is no peer of clinic \(lab, shop\) - at set_aside"):
        clinic.set_aside("nobody")


def test_the_loss_or_abort_of_a_peer_set_aside_ends_the_job(quick):
    clinic = quick["clinic"]
    clinic.set_aside("shop")
    quick["shop"].abort("its seeds are gone")
    with pytest.raises(PeerAborted, match="shop stopped the job: its seeds are gone"):
        clinic.receive("lab", Count)
    lost = star(memory_channels(STAR))
    lost["clinic"].set_aside("shop")
    lost["shop"].channel.close()
    with pytest.raises(PeerLost, match="shop"):
        lost["clinic"].receive("lab", Count)


def test_a_peer_set_aside_hears_of_an_abort_and_may_be_left_out(quick):
    clinic = quick["clinic"]
    clinic.set_aside("shop")
    clinic.abort("enough")
    with pytest.raises(PeerAborted, match="clinic stopped the job: enough"):
        quick["shop"].receive("clinic", Count)
    other = star(memory_channels(STAR))
    other["clinic"].set_aside("shop")
    other["clinic"].leave_out("shop")
    other["shop"].abort("nobody minds")
    other["lab"].send("clinic", Count(3))
    assert other["clinic"].receive("lab", Count).n == 3
    with pytest.raises(LocalProtocolError, match="left out - at set_aside"):
        other["clinic"].set_aside("shop")
