"""Peers that vanish: gathering from many, sending to many, and going on without some."""

import threading
import time

import pytest

from pace import wait_until, within
from transcripts import by_pair, by_type
from treaty.errors import LocalProtocolError, PeerAborted, PeerLost, PeerProtocolError, PeerTimeout
from treaty.messaging.channel import memory_channels
from treaty.messaging.conversation import Conversation
from treaty.messaging.messages import Abort, Message
from treaty.messaging.party import Party, run_role
from treaty.messaging.transcript import Transcript
from treaty.runs.threads import play, star

PATIENCE = 20  # seconds: what must not be waited for in full


class Count(Message):
    n: int


class Other(Message):
    n: int


def cohort(*users, channels=None, timeout=PATIENCE):
    """A server and its users, over memory channels unless others are given."""
    channels = channels or memory_channels(["clinic", *users])
    links = star("clinic", ["clinic", *users])
    return {name: Party(name, "j", "p", channels[name], peers, timeout=timeout) for name, peers in links.items()}


@pytest.fixture
def quick():
    return cohort("a", "b", "c", "d")


def numbers(found):
    return {peer: message.n for peer, message in found.items()}


def test_gather_returns_what_arrived_in_the_order_asked_for(quick):
    for n, user in enumerate("dba"):
        quick[user].send("clinic", Count(n))
    threading.Timer(0.1, quick["c"].send, ["clinic", Count(3)]).start()  # when the others have been taken
    found = quick["clinic"].gather(["c", "a", "d"], Count)
    assert list(found) == ["c", "a", "d"]
    assert numbers(found) == {"c": 3, "a": 2, "d": 0}
    assert quick["clinic"].receive("b", Count).n == 1


def test_gather_takes_one_message_of_each_and_leaves_the_next(quick):
    for n in range(2):
        for user in "ab":
            quick[user].send("clinic", Count(n))
    for n in range(2):
        assert numbers(quick["clinic"].gather("ab", Count)) == {"a": n, "b": n}


def test_gather_of_nobody_is_empty_at_once(quick):
    assert quick["clinic"].gather([], Count) == {}


def test_gather_takes_any_of_the_classes_named(quick):
    quick["a"].send("clinic", Count(1))
    quick["b"].send("clinic", Other(2))
    found = quick["clinic"].gather("ab", Count, Other)
    assert [type(message) for message in found.values()] == [Count, Other]


@pytest.mark.slow
def test_gather_of_hundreds_of_threads_misses_those_that_fail():
    users = [f"u{n:03}" for n in range(300)]

    def server(party):
        heard = []
        for party.round in range(3):
            found = party.gather(party.peers, Count)
            for absent in set(party.peers) - set(found):
                party.leave_out(absent)
            reached = party.send_each(dict.fromkeys(party.peers, Count(party.round)))
            assert reached == list(party.peers)
            heard.append(numbers(found))
        return heard

    def user(number):
        def role(party):
            for party.round in range(3):
                if party.round == 1 and number % 10 == 0:
                    party.channel.close()  # as if it had been killed
                    return
                party.send("clinic", Count(number))
                assert party.receive("clinic", Count).n == party.round

        return role

    roles = {"clinic": server} | {name: user(number) for number, name in enumerate(users)}
    start = time.monotonic()
    heard = play(roles, star("clinic", roles), job="j", protocol="p", timeout=60).results["clinic"]
    assert time.monotonic() - start < within(30)
    everyone = {name: number for number, name in enumerate(users)}
    rest = {name: number for name, number in everyone.items() if number % 10}
    assert heard == [everyone, rest, rest]


@pytest.mark.slow
def test_dead_aborting_leaving_and_silent_peers_are_absent():
    users = ["dead", "aborting", "leaving", "silent", "fine"]
    parties = cohort(*users)
    clinic = parties["clinic"]
    parties["fine"].send("clinic", Count(1))
    threading.Timer(0.1, parties["dead"].channel.close).start()
    threading.Timer(0.1, parties["aborting"].abort, ["disk full"]).start()
    threading.Timer(0.1, parties["leaving"].close).start()
    start = time.monotonic()
    assert numbers(clinic.gather(users, Count, timeout=0.6)) == {"fine": 1}
    assert 0.6 <= time.monotonic() - start < PATIENCE


def test_gather_does_not_wait_for_peers_that_are_gone():
    parties = cohort("dead", "aborting", "leaving", "fine")
    threading.Timer(0.1, parties["dead"].channel.close).start()
    threading.Timer(0.1, parties["aborting"].abort, ["disk full"]).start()
    threading.Timer(0.1, parties["leaving"].close).start()
    threading.Timer(0.3, parties["fine"].send, ["clinic", Count(1)]).start()
    start = time.monotonic()
    assert list(parties["clinic"].gather(["dead", "aborting", "leaving", "fine"], Count)) == ["fine"]
    assert time.monotonic() - start < PATIENCE / 2


def test_message_that_came_counts_whatever_became_of_its_sender(quick):
    for user in "abcd":
        quick[user].send("clinic", Count(1))
    quick["a"].abort("no more")
    quick["b"].channel.close()
    quick["c"].close()
    assert list(quick["clinic"].gather("abcd", Count)) == list("abcd")


def test_timeout_of_zero_takes_what_is_there(quick):
    quick["a"].send("clinic", Count(1))
    assert list(quick["clinic"].gather("abcd", Count, timeout=0)) == ["a"]


def test_messages_of_others_do_not_prolong_the_timeout_of_gather(quick):
    stop = threading.Event()

    def chatter():
        while not stop.wait(0.02):
            quick["b"].send("clinic", Count(1))

    thread = threading.Thread(target=chatter)
    thread.start()
    start = time.monotonic()
    assert quick["clinic"].gather("a", Count, timeout=0.3) == {}
    assert time.monotonic() - start < PATIENCE / 2
    stop.set()
    thread.join()


def test_abort_of_an_absent_peer_stops_everything_but_gather_until_it_is_left_out(quick):
    clinic = quick["clinic"]
    quick["a"].abort("disk full")
    for user in "bc":
        quick[user].send("clinic", Count(1))
    assert list(clinic.gather("abc", Count, timeout=0.1)) == ["b", "c"]
    for call in (
        lambda: clinic.receive("d", Count),
        lambda: clinic.send("d", Count(1)),
        lambda: clinic.send_each(dict.fromkeys("d", Count(1))),
        lambda: clinic.gather("d", Count),
    ):
        with pytest.raises(PeerAborted, match="a stopped the job: disk full"):
            call()
    clinic.leave_out("a")
    quick["d"].send("clinic", Count(2))
    assert clinic.receive("d", Count).n == 2
    clinic.send("d", Count(3))
    assert quick["d"].receive("clinic", Count).n == 3
    clinic.heed()


def test_loss_of_a_peer_that_is_not_gathered_stops_gather_and_takes_nothing(quick):
    clinic = quick["clinic"]
    quick["a"].send("clinic", Count(1))
    threading.Timer(0.1, quick["d"].channel.close).start()
    with pytest.raises(PeerLost, match=r"d is lost: .*; clinic was gathering Count of round 0"):
        clinic.gather("ab", Count)
    clinic.leave_out("d")
    quick["b"].send("clinic", Count(2))
    assert numbers(clinic.gather("ab", Count)) == {"a": 1, "b": 2}


def test_second_abort_is_not_hidden_behind_the_first_of_a_peer_left_out(quick):
    quick["a"].abort("first")
    quick["b"].abort("second")
    assert quick["clinic"].gather("ab", Count) == {}
    quick["clinic"].leave_out("a")
    with pytest.raises(PeerAborted, match="b stopped the job: second"):
        quick["clinic"].receive("c", Count)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda party: party.channel.send("clinic", b"\xc1", 1),
        lambda party: party.send("clinic", Other(1)),
        lambda party: party.channel.send("clinic", *Conversation("a", "clinic", "x", "p").write(Count(1), 0), 1),
    ],
    ids=["garbage", "other class", "other job"],
)
def test_malformed_message_is_an_error_after_which_its_sender_may_be_left_out(quick, spoil):
    clinic = quick["clinic"]
    for user in "bc":
        quick[user].send("clinic", Count(1))
    spoil(quick["a"])
    with pytest.raises(PeerProtocolError, match="from a") as caught:
        clinic.gather("cab", Count)
    clinic.leave_out(caught.value.peer)
    assert list(clinic.gather("cb", Count)) == ["c", "b"]


def test_wrong_class_is_not_forgotten_by_gathering_again(quick):
    quick["a"].send("clinic", Other(1))
    for _ in range(2):
        with pytest.raises(PeerProtocolError, match="expected Count of round 0, got Other of round 0"):
            quick["clinic"].gather("ab", Count, timeout=0.1)


def test_late_message_of_a_missed_round_is_dropped_by_the_next_gather(quick):
    clinic, late = quick["clinic"], quick["a"]
    assert clinic.gather("a", Count, timeout=0.05) == {}
    late.send("clinic", Count(0))  # of round 0, which clinic has given up
    late.round = clinic.round = 1
    late.send("clinic", Count(1))
    assert numbers(clinic.gather("a", Count)) == {"a": 1}


@pytest.mark.slow
def test_late_message_of_a_missed_round_is_dropped_by_receive_too(quick):
    clinic, late = quick["clinic"], quick["a"]
    assert clinic.gather("a", Count, timeout=0.05) == {}
    clinic.round = 1
    threading.Timer(0.1, late.send, ["clinic", Count(0)]).start()
    with pytest.raises(PeerTimeout):
        clinic.receive("a", Count, timeout=0.5)
    late.round = 1
    late.send("clinic", Count(1))
    assert clinic.receive("a", Count).n == 1
    assert by_type(clinic.transcript, "received") == {"Count": by_pair(clinic.transcript, "received")[("a", "clinic")]}
    assert len(clinic.transcript.entries) == 2  # what was dropped has reached the house


def test_peer_that_is_slow_but_in_its_round_is_welcome(quick):
    clinic = quick["clinic"]
    assert clinic.gather("a", Count, timeout=0.05) == {}
    quick["a"].send("clinic", Count(5))
    assert numbers(clinic.gather("a", Count)) == {"a": 5}


def test_message_of_an_earlier_round_is_refused_from_a_peer_that_missed_none(quick):
    clinic = quick["clinic"]
    assert list(clinic.gather("a", Count, timeout=0.05)) == []
    clinic.round = 1
    quick["b"].send("clinic", Count(0))
    with pytest.raises(PeerProtocolError, match="expected Count of round 1, got Count of round 0"):
        clinic.gather("ab", Count, timeout=0.1)


def test_what_was_sent_for_earlier_rounds_is_dropped_where_a_role_says_so(quick):
    """Also of a peer that missed nothing, and what is still on its way; not what is of this round."""
    clinic = quick["clinic"]
    for user in "ab":
        quick[user].send("clinic", Other(0))  # nobody asked for it
    clinic.round = quick["a"].round = 1
    clinic.drop_earlier("a")
    quick["a"].send("clinic", Count(1))
    assert numbers(clinic.gather("a", Count)) == {"a": 1}
    with pytest.raises(PeerProtocolError, match="expected Count of round 1, got Other of round 0"):
        clinic.gather("b", Count)
    clinic.drop_earlier("b")
    threading.Timer(0.1, quick["b"].send, ["clinic", Other(2)]).start()
    assert clinic.gather("b", Count, timeout=0.3) == {}


# ---------------------------------------------------------------- peers that may be lost


def test_loss_of_a_peer_that_may_be_lost_ends_nothing_but_what_is_asked_of_it(quick):
    clinic = quick["clinic"]
    clinic.may_lose("ab")
    quick["a"].channel.close()
    quick["b"].abort("disk full")
    quick["c"].send("clinic", Count(1))
    assert clinic.receive("c", Count).n == 1
    clinic.send("c", Count(2))
    assert clinic.send_each(dict.fromkeys("cd", Count(3))) == ["c", "d"]
    quick["d"].send("clinic", Count(4))
    assert numbers(clinic.gather("cd", Count, timeout=0.1)) == {"d": 4}
    clinic.heed()
    with pytest.raises(PeerLost, match="a is lost"):
        clinic.receive("a", Count)
    with pytest.raises(PeerLost, match="a is lost"):
        clinic.send("a", Count(1))
    for call in (lambda: clinic.receive("b", Count), lambda: clinic.send("b", Count(1))):
        with pytest.raises(PeerAborted, match="b stopped the job: disk full"):
            call()


def test_loss_of_any_other_peer_still_ends_everything(quick):
    clinic = quick["clinic"]
    clinic.may_lose("ab")
    quick["c"].channel.close()
    for call in (lambda: clinic.receive("d", Count), lambda: clinic.gather("ad", Count)):
        with pytest.raises(PeerLost, match="c is lost"):
            call()


def test_what_a_lost_peer_had_sent_can_still_be_gathered(quick):
    clinic = quick["clinic"]
    clinic.may_lose("a")
    quick["a"].send("clinic", Count(1))
    quick["a"].channel.close()
    quick["b"].send("clinic", Count(2))
    assert clinic.receive("b", Count).n == 2
    assert numbers(clinic.gather("a", Count)) == {"a": 1}
    assert clinic.gather("a", Count) == {}


def test_party_left_out_is_no_peer_any_more(quick):
    clinic = quick["clinic"]
    clinic.leave_out("b")
    clinic.leave_out("b")
    assert clinic.peers == ("a", "c", "d")
    text = r"'b' is no peer of clinic \(a, c, d\) any more: it was left out - at Count"
    for call in (
        lambda: clinic.send("b", Count(1)),
        lambda: clinic.send_each(dict.fromkeys("ab", Count(1))),
        lambda: clinic.receive("b", Count),
        lambda: clinic.gather("ab", Count),
    ):
        with pytest.raises(LocalProtocolError, match=text):
            call()
    assert quick["a"].channel.receive(0) is None  # nothing was sent to the others either
    with pytest.raises(LocalProtocolError, match=r"'nobody' is no peer of clinic .* at leave_out"):
        clinic.leave_out("nobody")


@pytest.mark.parametrize(
    "act",
    [
        lambda party: party.send("clinic", Count(1)),
        lambda party: party.send("clinic", Other(1)),
        lambda party: party.channel.send("clinic", b"\xc1", 1),
        lambda party: party.abort("no"),
        lambda party: party.close(),
        lambda party: party.channel.close(),
    ],
    ids=["message", "other message", "garbage", "abort", "goodbye", "loss"],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_a_party_left_out_does_concerns_the_others(quick, act, when):
    clinic = quick["clinic"]
    if when == "after":
        clinic.leave_out("a")
    act(quick["a"])
    if when == "before":
        try:
            clinic.receive("b", Count, timeout=0.01)
        except (PeerTimeout, PeerProtocolError, PeerAborted, PeerLost):
            clinic.leave_out("a")
    quick["b"].send("clinic", Count(1))
    assert clinic.receive("b", Count).n == 1
    clinic.send("b", Count(2))
    assert quick["b"].receive("clinic", Count).n == 2
    clinic.heed()


def test_messages_of_a_party_left_out_are_dropped_and_in_the_transcript():
    channels = memory_channels(["clinic", "a"])
    transcript = Transcript("clinic", record_content=True)
    clinic = Party("clinic", "j", "p", channels["clinic"], ["a"], transcript)
    user = Party("a", "j", "p", channels["a"], ["clinic"])
    user.send("clinic", Count(1))
    clinic.heed()
    clinic.leave_out("a")
    assert not clinic._talks["a"].unread
    user.send("clinic", Count(2))
    user.channel.send("clinic", b"\xc1", 1)
    clinic.heed()
    assert [entry.message(Count).n for entry in transcript.entries] == [1, 2]
    assert not clinic._talks["a"].unread


@pytest.mark.parametrize(
    ("leave", "told"),
    [(lambda p: p.abort("enough"), "clinic stopped the job: enough"), (lambda p: p.close(), "clinic has finished")],
    ids=["abort", "close"],
)
def test_party_left_out_is_told_of_the_end(quick, leave, told):
    quick["clinic"].leave_out("a")
    leave(quick["clinic"])
    for user in "ab":
        with pytest.raises((PeerAborted, PeerLost), match=told):
            quick[user].receive("clinic", Count, timeout=1)


def test_send_each_names_those_reached(quick):
    quick["a"].channel.close()
    quick["b"].close()
    quick["c"].abort("no")
    assert quick["clinic"].send_each(dict.fromkeys("abcd", Count(7))) == ["d"]
    assert quick["d"].receive("clinic", Count).n == 7
    assert by_pair(quick["clinic"].transcript, "sent") == {
        ("clinic", "d"): by_pair(quick["d"].transcript)["clinic", "d"]
    }


def test_send_each_gives_everyone_its_own_message(quick):
    assert quick["clinic"].send_each({"b": Count(2), "a": Other(1)}) == ["b", "a"]
    assert quick["a"].receive("clinic", Other).n == 1
    assert quick["b"].receive("clinic", Count).n == 2


def test_send_each_passes_over_a_peer_that_takes_nothing(quick, monkeypatch):
    clinic = quick["clinic"]
    real = clinic.channel.send

    def send(to, frame, timeout):
        if to == "a":
            raise PeerTimeout("a", "a took no message")
        real(to, frame, timeout)

    monkeypatch.setattr(clinic.channel, "send", send)
    assert clinic.send_each(dict.fromkeys("abc", Count(1))) == ["b", "c"]


def test_send_each_sends_nothing_after_something_malformed(quick):
    quick["d"].channel.send("clinic", b"\xc1", 1)
    with pytest.raises(PeerProtocolError, match="from d"):
        quick["clinic"].send_each(dict.fromkeys("abc", Count(1)))
    assert quick["a"].channel.receive(0) is None


def test_control_messages_cannot_be_sent_to_all(quick):
    with pytest.raises(LocalProtocolError, match="expected a protocol's own message"):
        quick["clinic"].send_each(dict.fromkeys("ab", Abort("x")))


def test_send_to_a_lost_peer_still_raises(quick):
    quick["a"].channel.close()
    assert quick["clinic"].gather("a", Count) == {}
    with pytest.raises(PeerLost, match="a is lost"):
        quick["clinic"].send("a", Count(1))


def test_party_that_has_left_gathers_nothing(quick):
    quick["clinic"].close()
    with pytest.raises(LocalProtocolError, match="expected nothing more after clinic left the job, got Count"):
        quick["clinic"].gather("a", Count)


def test_gathering_and_leaving_out_work_over_both_channels(ends):
    parties = cohort("lab", "shop", channels=ends)
    clinic = parties["clinic"]
    parties["shop"].send("clinic", Count(1))
    threading.Timer(0.2, parties["lab"].channel.close).start()
    start = time.monotonic()
    assert list(clinic.gather(["lab", "shop"], Count)) == ["shop"]
    assert time.monotonic() - start < PATIENCE / 2
    clinic.leave_out("lab")
    assert clinic.send_each(dict.fromkeys(clinic.peers, Count(2))) == ["shop"]
    assert parties["shop"].receive("clinic", Count).n == 2
    parties["shop"].send("clinic", Count(3))
    assert clinic.receive("shop", Count).n == 3
    assert run_role(clinic, lambda: 42) == 42


@pytest.mark.slow
def test_killed_process_is_absent_and_can_be_left_out(tls_end, process, connect):
    clinic, shop = tls_end("clinic", ["lab", "shop"]), tls_end("shop", ["clinic"])
    child = process("lab", clinic, "idle")
    assert set(
        connect([clinic, shop], {"clinic": clinic.address, "lab": child.address, "shop": shop.address}).values()
    ) == {None}
    parties = cohort("lab", "shop", channels={"clinic": clinic, "lab": memory_channels(["lab"])["lab"], "shop": shop})
    parties["shop"].send("clinic", Count(1))
    threading.Timer(0.2, child.kill).start()
    start = time.monotonic()
    assert list(parties["clinic"].gather(["lab", "shop"], Count)) == ["shop"]
    assert time.monotonic() - start < PATIENCE / 2
    assert parties["clinic"].send_each(dict.fromkeys(["lab", "shop"], Count(2))) == ["shop"]
    parties["clinic"].leave_out("lab")
    parties["shop"].send("clinic", Count(3))
    assert parties["clinic"].receive("shop", Count).n == 3


def test_transport_offence_of_a_party_left_out_is_ignored(tls_end, connect):
    clinic, lab = tls_end("clinic", ["lab", "shop"], inbox_limit=20_000), tls_end("lab", ["clinic"])
    shop = tls_end("shop", ["clinic"])
    connect([clinic, lab, shop])
    parties = cohort("lab", "shop", channels={"clinic": clinic, "lab": lab, "shop": shop})
    parties["clinic"].leave_out("lab")
    with pytest.raises(PeerProtocolError):
        lab.send("clinic", bytes(20_000), 5, receipt=True)
    parties["shop"].send("clinic", Count(1))
    assert parties["clinic"].receive("shop", Count).n == 1


def test_a_peer_that_comes_after_the_others_began_takes_part(tls_end):
    clinic, lab = tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])
    address = lab.address
    clinic.connect(0.3, {"lab": address}, may_lose=["lab"])
    party = Party("clinic", "j", "p", clinic, ["lab"], timeout=PATIENCE)
    party.may_lose(["lab"])
    assert party.gather(["lab"], Count, timeout=0) == {}
    assert party.send_each({"lab": Count(1)}, timeout=0.1) == []
    lab.connect(10, {"clinic": clinic.address})
    other = Party("lab", "j", "p", lab, ["clinic"], timeout=PATIENCE)
    other.send("clinic", Count(2))
    wait_until(lambda: clinic._server.received("lab") == 1)
    assert party.gather(["lab"], Count)["lab"].n == 2
    assert party.send_each({"lab": Count(3)}) == ["lab"]
    assert other.receive("clinic", Count).n == 3
