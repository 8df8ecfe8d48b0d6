import msgspec
import pytest

from treaty.errors import PeerProtocolError
from treaty.messaging.conversation import Conversation
from treaty.messaging.messages import Abort, Envelope, Goodbye, Message, encode_envelope


class Count(Message):
    n: int


class Other(Message):
    n: int


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
    return encode_envelope(Envelope(**(fields | changes), body=body))


def test_written_frames_are_read_in_order_by_the_other_side(clinic):
    lab = Conversation("lab", "clinic", "breast", "secureboost")
    for n in range(3):
        clinic.take_in(lab.write(Count(n), 0))
        lab.wrote()
    assert [clinic.read([Count], 0).n for _ in range(3)] == [0, 1, 2]
    assert not clinic.has_unread


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
    assert not clinic.has_unread


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
    assert not clinic.has_unread


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
    assert not clinic.has_unread
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
