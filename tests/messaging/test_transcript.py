import threading

import pytest

from transcripts import by_pair, by_type
from treaty.errors import ConfigError
from treaty.messaging.messages import Message, encode
from treaty.messaging.transcript import Room, Transcript


class Count(Message):
    n: int


def filled(**options):
    transcript = Transcript("clinic", **options)
    transcript.record("sent", "lab", "Count", 0, 100, encode(Count(1)))
    transcript.record("sent", "lab", "Sums", 0, 50)
    transcript.record("sent", "shop", "Count", 1, 10)
    transcript.record("received", "lab", "Count", 1, 7, encode(Count(5)))
    return transcript


def test_by_pair_totals_messages_and_bytes_of_ordered_pairs():
    assert by_pair(filled()) == {
        ("clinic", "lab"): (2, 150),
        ("clinic", "shop"): (1, 10),
        ("lab", "clinic"): (1, 7),
    }
    assert by_pair(filled(), "received") == {("lab", "clinic"): (1, 7)}


def test_by_type_totals_messages_and_bytes_of_each_class():
    assert by_type(filled()) == {"Count": (3, 117), "Sums": (1, 50)}
    assert by_type(filled(), "sent") == {"Count": (2, 110), "Sums": (1, 50)}


def test_content_is_kept_only_on_request():
    assert all(entry.content is None for entry in filled().entries)
    assert filled().entries[0].message(Count) is None
    kept = filled(record_content=True).entries
    assert kept[3].message(Count).n == 5
    assert kept[1].content is None


def test_times_are_monotonic_from_the_start():
    seconds = [entry.seconds for entry in filled().entries]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] <= seconds[-1] < 10


def test_entries_are_immutable():
    with pytest.raises(AttributeError):
        filled().entries[0].nbytes = 0


def test_recording_from_several_threads_loses_nothing():
    transcript = Transcript("clinic")

    def write():
        for _ in range(500):
            transcript.record("sent", "lab", "Count", 0, 1)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert by_type(transcript) == {"Count": (4000, 4000)}


def test_contents_are_kept_up_to_a_bound_and_then_none():
    transcript = Transcript("clinic")
    transcript.record("sent", "lab", "Count", 0, 10, b"before")
    transcript.keep_contents(Room(10))
    transcript.record("sent", "lab", "Count", 0, 10, bytes(6))
    assert [entry.content for entry in transcript.entries] == [None, bytes(6)]
    transcript.record("sent", "lab", "Count", 0, 10, bytes(6))
    assert [entry.content for entry in transcript.entries] == [None] * 3
    assert not transcript.record_content
    assert by_pair(transcript) == {("clinic", "lab"): (3, 30)}


def test_transcripts_share_a_room_and_keep_contents_of_some_kinds_alone():
    room, kinds = Room(10), {"Count"}
    one, other = Transcript("clinic"), Transcript("lab")
    for transcript in (one, other):
        transcript.keep_contents(room, kinds)
        transcript.record("sent", "office", "Sums", 0, 10, bytes(20))
        transcript.record("sent", "office", "Count", 0, 10, bytes(6))
    assert [entry.content for entry in one.entries] == [None, bytes(6)]
    assert [entry.content for entry in other.entries] == [None] * 2
    one.record("received", "office", "Count", 0, 10, bytes(1))  # it finds that nothing is left
    assert [entry.content for entry in one.entries] == [None] * 3


def test_a_room_with_an_error_raises_it_once():
    room = Room(10, "no more")
    assert room.take(10)
    with pytest.raises(ConfigError, match="no more"):
        room.take(1)
    assert not room.take(1)
