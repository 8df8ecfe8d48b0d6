"""When bytes went from whom to whom: nothing is lost in steps, and what several parties noted is told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from treaty.messaging.transcript import OTHERS, Timeline, Transcript, TranscriptEntry, joined, timeline_of

MESSAGES = st.lists(st.tuples(st.floats(0.0, 5000.0), st.integers(1, 10**9)), min_size=1, max_size=40)


def transcript(party: str, began: float, sent: list[tuple[str, float, int]]) -> Transcript:
    """Return what a party recorded; negative bytes stand for those received."""
    kept = Transcript(party)
    kept.began = began
    for peer, seconds, nbytes in sent:
        direction = "sent" if nbytes > 0 else "received"
        kept._entries.append(TranscriptEntry(direction, peer, "Sums", 1, abs(nbytes), seconds))
    return kept


@given(MESSAGES, st.floats(0.0, 2e9))
def test_every_byte_is_in_the_step_of_its_second(messages, began):
    found = timeline_of([transcript("a", began, [("b", *message) for message in messages])], "sent")
    steps = found.pairs["a -> b"]
    assert len(steps) <= 61
    assert sum(steps) == sum(nbytes for _, nbytes in messages)
    assert steps[0] > 0
    assert steps[-1] > 0
    last = max(began + seconds for seconds, _ in messages)
    assert found.began + (len(steps) - 1) * found.step <= last < found.began + len(steps) * found.step


def test_nothing_sent_has_no_timeline():
    assert timeline_of([Transcript("a")], "sent") is None
    assert timeline_of([transcript("a", 0.0, [("b", 1.0, -5)])], "sent") is None
    assert joined({}) is None


def test_parties_timelines_are_joined_by_the_clock_and_every_pair_is_told_once():
    of_a = transcript("a", 1000.0, [("b", 0.0, 100), ("b", 8.0, -7), ("c", 9.0, -30)])
    of_b = transcript("b", 1004.0, [("a", 4.0, 7), ("a", -4.0, -100)])
    own = {t.party: timeline_of([t], "sent", "received") for t in (of_a, of_b)}
    both = joined(own)
    assert {pair: sum(steps) for pair, steps in both.pairs.items()} == {"a -> b": 100, "b -> a": 7, "c -> a": 30}
    at = {pair: both.began + steps.index(max(steps)) * both.step for pair, steps in both.pairs.items()}
    assert at["a -> b"] == 1000.0
    assert 1007.0 < at["b -> a"] <= 1008.0
    assert joined({"a": own["a"]}).pairs.keys() == own["a"].pairs.keys()


def test_peers_beyond_twenty_are_put_together():
    sent = [(f"user{k}", float(k), 1000 - k) for k in range(25)]
    found = timeline_of([transcript("edge", 0.0, sent)], "sent")
    assert len(found.pairs) == 21
    assert sum(found.pairs[f"edge -> {OTHERS}"]) == sum(1000 - k for k in range(20, 25))
    assert isinstance(found, Timeline)
