import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.errors import PeerProtocolError
from treaty.messaging.conversation import Conversation
from treaty.messaging.messages import Abort, Array, Envelope, Goodbye, Message, Part, encode, view


class Count(Message):
    n: int


class Other(Message):
    n: int


class Rows(Message):
    values: Array


@pytest.fixture
def clinic():
    return Conversation("clinic", "lab", "breast", "secureboost")


def frame(body=None, **changes):
    body = Count(1) if body is None else body
    fields = {
        "job": "breast",
        "protocol": "secureboost",
        "round": 0,
        "step": type(body).__name__,
        "sender": "lab",
        "receiver": "clinic",
        "seq": 0,
    }
    return encode(Envelope(**(fields | changes), body=body))


def test_written_frames_are_read_in_order_by_the_other_side(clinic):
    lab = Conversation("lab", "clinic", "breast", "secureboost")
    for n in range(3):
        for written in lab.write(Count(n), 0):
            clinic.take_in(written)
            lab.wrote()
    assert [clinic.read([Count], 0).n for _ in range(3)] == [0, 1, 2]
    assert not clinic.unread


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"job": "lung"}, "expected job 'breast', got 'lung' - at the envelope from lab to clinic"),
        ({"protocol": "fedxgb"}, "expected protocol 'secureboost', got 'fedxgb'"),
        ({"sender": "shop"}, "expected sender 'lab', got 'shop'"),
        ({"receiver": "shop"}, "expected receiver 'clinic', got 'shop'"),
        ({"seq": 1}, "expected message number 0, got number 1 - at Count from lab to clinic"),
        ({"seq": -1}, r"Expected `int` >= 0 - at `\$.seq` of the envelope from lab"),
        ({"round": -1}, r"Expected `int` >= 0 - at `\$.round`"),
        ({"job": "x" * 201}, "Expected `str` of length <= 200"),
    ],
    ids=["job", "protocol", "sender", "receiver", "gap", "negative seq", "negative round", "long job"],
)
def test_frame_out_of_place_is_refused_when_it_comes_in(clinic, changes, text):
    with pytest.raises(PeerProtocolError, match=text) as caught:
        clinic.take_in(frame(**changes))
    assert caught.value.peer == "lab"
    assert not clinic.unread


def test_replay_is_refused(clinic):
    clinic.take_in(frame())
    with pytest.raises(PeerProtocolError, match="expected message number 1, got number 0 again - at Count"):
        clinic.take_in(frame())


def test_reordered_messages_are_refused(clinic):
    clinic.take_in(frame())
    with pytest.raises(PeerProtocolError, match="expected message number 1, got number 2 - at Count"):
        clinic.take_in(frame(seq=2))


@pytest.mark.parametrize("planted", [{"round": 1}, {"step": "Other"}], ids=["round", "class"])
def test_message_of_another_round_or_class_is_refused_when_read(clinic, planted):
    clinic.take_in(frame(**planted))
    text = r"expected Count of round 0, got \w+ of round \d - at message number 0 from lab to clinic"
    with pytest.raises(PeerProtocolError, match=text):
        clinic.read([Count], 0)


def test_messages_of_missed_rounds_are_dropped_once_a_later_round_is_current(clinic):
    for seq, round in enumerate([2, 3, 4]):
        clinic.take_in(frame(seq=seq, round=round))
    clinic.missed = 3
    clinic.drop_late(3)  # the third round still runs: its message is no longer late
    assert clinic.read([Count], 3).n == 1
    clinic.drop_late(5)  # the fourth was not missed, so that its message is a mistake and stays
    with pytest.raises(PeerProtocolError, match="got Count of round 4"):
        clinic.read([Count], 5)


def test_message_that_is_refused_or_peeked_at_stays_unread(clinic):
    clinic.take_in(frame())
    for _ in range(2):
        with pytest.raises(PeerProtocolError, match="expected Other of round 0"):
            clinic.read([Other], 0)
    assert clinic.peek([Count], 0).n == clinic.read([Count], 0).n == 1
    assert not clinic.unread


def test_class_is_chosen_by_the_receiver_not_by_the_name_on_the_wire(clinic):
    clinic.take_in(frame(Goodbye(), step="Count"))
    with pytest.raises(PeerProtocolError, match="missing required field `n` - at Count from lab"):
        clinic.read([Count], 0)


def test_planted_envelope_field_is_refused(clinic):
    fields = msgspec.msgpack.decode(frame()) | {"class": "os.system"}
    with pytest.raises(PeerProtocolError, match="unknown field `class` - at the envelope from lab"):
        clinic.take_in(msgspec.msgpack.encode(fields))


def test_goodbye_ends_the_conversation(clinic):
    clinic.take_in(frame(Goodbye()))
    assert clinic.left
    assert not clinic.unread
    with pytest.raises(PeerProtocolError, match="expected nothing after its goodbye, got Count"):
        clinic.take_in(frame(seq=1))


def test_abort_is_taken_whatever_its_number_and_its_reason_is_cleaned(clinic):
    clinic.take_in(frame(Abort("disk\nfull"), seq=9, round=4))
    assert clinic.left
    assert clinic.abort_reason == "disk?full"


def test_abort_of_another_job_is_refused(clinic):
    with pytest.raises(PeerProtocolError, match="expected job"):
        clinic.take_in(frame(Abort("x"), job="lung"))
    assert clinic.abort_reason is None


# ---------------------------------------------------------------- messages in parts


def carry(sender, receiver, message, frame_bytes):
    """Carry a message over; return the bytes of its frames."""
    sizes = []
    for written in sender.write(message, 0, frame_bytes):
        receiver.take_in(written)
        sender.wrote()
        sizes.append(len(written))
    return sizes


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=4), st.integers(50, 4000))
def test_messages_of_any_length_arrive_whole_and_aligned_in_frames_of_a_bound(lengths, frame_bytes):
    read = []
    lab = Conversation("lab", "clinic", "breast", "secureboost")
    clinic = Conversation("clinic", "lab", "breast", "secureboost", read.append)
    sizes = [carry(lab, clinic, Rows(Array.of(np.arange(n))), frame_bytes) for n in lengths]
    assert all(size <= frame_bytes + 200 for of_message in sizes for size in of_message)  # with a part's envelope
    for n, of_message in zip(lengths, sizes, strict=True):
        before = len(read)
        sent = clinic.read([Rows], 0).values
        values = view(sent, np.int64, (n,), peer="lab", what="Rows.values")
        np.testing.assert_array_equal(values, np.arange(n))
        assert read[before:] == of_message  # which the peer may send again
        if n and len(of_message) > 1:
            assert np.shares_memory(values, np.frombuffer(sent.data, np.uint8))  # not copied to be aligned
    assert not clinic.unread


def parts(*contents, nbytes, first=0):
    return [frame(Part(memoryview(content), nbytes), seq=first + k) for k, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([*parts(b"ab", nbytes=9), frame(seq=1)], "expected the rest of a message that comes in parts, got Count"),
        (parts(b"ab", b"cde", nbytes=4), "the parts do not add up to the 4 bytes announced - at Part from lab"),
        ([*parts(b"ab", nbytes=9), *parts(b"cd", nbytes=8, first=1)], "parts do not add up to the 9 bytes"),
        (parts(b"ab", b"", nbytes=9), "parts do not add up to the 9 bytes"),
        (parts(b"", nbytes=0), "parts do not add up to the 0 bytes"),
        (parts(b"ab", b"cd", nbytes=4), "Expected `object`, got `int` - at the envelope from lab"),
        (parts(b"ab", nbytes=9) + parts(b"cd", nbytes=9, first=2), "expected message number 1, got number 2"),
        (parts(frame(seq=1), nbytes=len(frame(seq=1))), "expected message number 0, got number 1"),
        (parts(frame(job="lung"), nbytes=len(frame(job="lung"))), "expected job 'breast', got 'lung'"),
        (parts(b"ab", nbytes=1 << 40), r"too long: \d+ bytes in 549755813888 frames"),
    ],
    ids=["another", "more", "other length", "empty", "nothing", "garbage", "gap", "seq", "job", "announced"],
)
def test_parts_that_make_no_message_are_refused(frames, text):
    def refusal(nbytes, count):
        return f"too long: {nbytes} bytes in {count} frames" if nbytes > 1 << 20 else None

    clinic = Conversation("clinic", "lab", "breast", "secureboost", refusal=refusal)
    *before, last = frames
    for each in before:
        assert clinic.take_in(each) is None
    with pytest.raises(PeerProtocolError, match=text):
        clinic.take_in(last)
    assert not clinic.unread


def test_a_message_within_parts_is_looked_into_once_alone(clinic):
    inner = frame(Part(memoryview(frame(seq=0)), len(frame(seq=0))), seq=0)
    clinic.take_in(parts(inner, nbytes=len(inner))[0])
    with pytest.raises(PeerProtocolError, match="expected Count of round 0, got Part"):
        clinic.read([Count], 0)


def test_who_gave_up_amid_parts_may_say_goodbye(clinic):
    assert clinic.take_in(parts(b"ab", nbytes=9)[0]) is None
    clinic.take_in(frame(Goodbye(), seq=1))
    assert clinic.left
    assert not clinic.unread


def test_an_abort_amid_parts_is_heard(clinic):
    assert clinic.take_in(parts(b"ab", nbytes=9)[0]) is None
    clinic.take_in(frame(Abort("no more"), seq=1))
    assert clinic.abort_reason == "no more"


def test_what_a_peer_left_out_sends_in_parts_is_dropped(clinic):
    lab = Conversation("lab", "clinic", "breast", "secureboost")
    for _ in range(3):
        for written in lab.write(Rows(Array.of(np.arange(100))), 0, 100):
            clinic.take_in(written)
            lab.wrote()
            clinic.drop_unread()
    assert not clinic.unread
