"""Alignment by KKRT gives what alignment by ECDH gives, tells no more, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.alignment import playing
from systems.alignment.playing import Columns, plain_join
from systems.alignment.playing import joined as rows_joined
from systems.alignment.playing import run as play_alignment
from treaty.crypto.transfer import oprf, sodium
from treaty.data.ids import read_ids
from treaty.data.large import Scratch
from treaty.errors import ConfigError, CryptoError, DataError, PeerProtocolError
from treaty.messaging.messages import Array, Message, decode_body
from treaty.messaging.party import Party
from treaty.privacy.ledger import RunLog
from treaty.runs.threads import RunRecord
from treaty.systems.alignment import alignment, ecdh, kkrt
from treaty.systems.alignment.ecdh import bucket
from treaty.systems.alignment.kkrt import MaskedCodes, OprfChoices, OprfOffer, OprfValues, SecretOrder

SMALLEST = 32


@pytest.fixture(scope="module", autouse=True)
def _small_lists() -> Iterator[None]:
    """Short lists, of which each still takes several messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ecdh, "SMALLEST", SMALLEST)
        patch.setattr(kkrt, "BINS", 512)
        patch.setattr(kkrt, "VALUES", 24)
        yield


def run(columns: Columns, **options: Any) -> RunRecord:
    return play_alignment(columns, **{"psi": "kkrt", **options})


def joined(columns: Columns, **options: Any) -> list[tuple[Any, ...]]:
    return rows_joined(columns, **{"psi": "kkrt", **options})


# ---------------------------------------------------------------- the result

NUMBERS = st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 9)), max_size=40)
TEXTS = st.lists(
    st.one_of(st.none(), st.text("aA\u00e9\u0301 \u00dfIi\u4e2d\U0001f600", min_size=1, max_size=2)), max_size=40
)


@pytest.mark.parametrize("values", [NUMBERS, TEXTS], ids=["numbers", "texts"])
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_alignment_equals_a_plain_join_with_duplicates(values: Any, data: st.DataObject) -> None:
    shared = 7 if values is NUMBERS else "x"
    columns = {name: [*data.draw(values), shared] for name in "abc"}
    assert sorted(joined(columns, on_duplicate="expand", normalise=[])) == plain_join(columns)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 900), st.integers(1, 900))
def test_long_and_short_lists_are_joined(seed: int, first: int, second: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = [rng.permutation(first + second)[:size].tolist() for size in (first, second)]
    columns = {"a": [*drawn[0], -1], "b": [-1, *drawn[1]]}
    assert sorted(joined(columns, threads=2)) == plain_join(columns)


def test_first_rows_are_joined_once() -> None:
    columns = {"a": ["x", "y", "x", None], "b": ["z", "x", "x", "y"]}
    assert sorted(joined(columns, on_duplicate="first")) == [(0, 1), (1, 3)]


def test_order_is_common_to_all_and_new_in_every_run() -> None:
    columns = {"a": list(range(60)), "b": list(range(59, -1, -1)), "c": list(range(30, 90))}
    first, second = joined(columns), joined(columns)
    assert sorted(first) == sorted(second) == [(row, 59 - row, row - 30) for row in range(30, 60)]
    assert first != second
    assert first != sorted(first)


def test_results_logs_and_progress_are_those_of_ecdh(tmp_path: Path) -> None:
    columns = {"a": [1, 2, 3, 4, None], "b": [1, 2, 3, 9], "c": [3, 4]}
    found = {}
    for psi in ("ecdh", "kkrt"):
        seen: dict[str, list[tuple[int, int]]] = {name: [] for name in columns}
        sides = {name: {"progress": lambda *at, of=of: of.append(at)} for name, of in seen.items()}
        results = run(columns, psi=psi, on_duplicate="first", logs=tmp_path / psi, per_party=sides).results
        for calls in seen.values():
            assert calls == sorted(calls)
            assert calls[-1][0] == calls[-1][1]
        entries = [RunLog(tmp_path / psi / f"{name}.runs").entries() for name in columns]
        found[psi] = (
            [
                (r.n_common, r.n_ids, r.n_null, r.n_repeated, r.sizes, r.pairwise, r.changed)
                for r in (results[name] for name in columns)
            ],
            [[(e.event, e.peer, e.common, e.changed) for e in of] for of in entries],
            [calls[-1] for calls in seen.values()],
        )
        assert results["a"].pairwise == {"b": 3, "c": 2}
    assert found["ecdh"] == found["kkrt"]


def test_only_the_active_party_learns_when_so_agreed() -> None:
    played = run({"a": [1, 2, 3], "b": [2, 3, 4]}, result_to="active")
    assert sorted(played.results["a"].rows.tolist()) == [1, 2]
    assert (played.results["b"].n_common, len(played.results["b"].rows)) == (None, 0)
    told = [entry.step for entry in played.transcripts["b"].entries if entry.direction == "received"]
    before = ["Terms", "Verdict", "ListSummary", "OprfOffer"]
    assert told == [*before, *3 * ["MaskedCodes"], *4 * ["OprfUsed"], "AlignmentEnd"]


def test_no_common_id_ends_with_counts_only() -> None:
    with pytest.raises(DataError, match=r"got none \(2 ids here, 0 with b\)"):
        run({"a": ["alpha", "beta"], "b": ["gamma"]})


# ---------------------------------------------------------------- the choice


def steps(played: RunRecord, name: str) -> set[str]:
    return {entry.step for entry in played.transcripts[name].entries}


def test_auto_takes_kkrt_for_long_lists_and_ecdh_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "LONG", 64)
    columns = {"a": list(range(20)), "b": list(range(10, 30)), "c": list(range(15, 80))}
    played = run(columns, psi="auto")
    assert set(zip(*(played.results[name].rows.tolist() for name in columns), strict=True)) == set(plain_join(columns))
    assert "BlindedPoints" in steps(played, "b") and "OprfValues" not in steps(played, "b")  # noqa: PT018
    assert "OprfValues" in steps(played, "c") and "BlindedPoints" not in steps(played, "c")  # noqa: PT018


def test_auto_leaves_the_longest_lists_of_active_parties_to_ecdh() -> None:
    assert alignment._takes_kkrt("auto", oprf.MOST, 1024)
    assert alignment._takes_kkrt("auto", 1024, 1 << 28)
    assert not alignment._takes_kkrt("auto", 2 * oprf.MOST, 1024)
    assert not alignment._takes_kkrt("auto", 1024, alignment.LONG // 2)
    assert [alignment._takes_kkrt("auto", 1024, bucket(count)) for count in (7680, 7681)] == [False, True]


def test_kkrt_with_more_ids_than_it_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oprf, "MOST", 64)
    with pytest.raises(DataError, match='at most 64 ids of the active party with psi "kkrt", got 65'):
        run({"a": list(range(65)), "b": [1]})
    assert joined({"a": [1], "b": list(range(65))}) == [(0, 1)]


def test_parties_that_differ_in_psi_are_told_so() -> None:
    with pytest.raises(ConfigError, match="the same psi everywhere"):
        run({"a": [1], "b": [1]}, per_party={"b": {"psi": "ecdh"}})
    with pytest.raises(ConfigError, match="expected psi of auto, ecdh, kkrt, got 'rsa'"):
        run({"a": [1], "b": [1]}, psi="rsa")


# ---------------------------------------------------------------- a table that fails


def test_ids_that_do_not_fit_into_the_table_end_the_run_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oprf, "placed", lambda digests, bins: None)
    with pytest.raises(CryptoError, match=r"32 ids do not fit into a cuckoo table.*start the job again"):
        run({"a": list(range(20)), "b": list(range(20))})


# ---------------------------------------------------------------- what travels


def sent(played: RunRecord, who: str, kind: type[Message]) -> list[Any]:
    entries = [e for e in played.transcripts[who].entries if e.direction == "sent" and e.step == kind.__name__]
    return [decode_body(entry.content or b"", kind, peer=who) for entry in entries]


def words(arrays: list[Array]) -> np.ndarray:
    return np.concatenate([np.frombuffer(array.data, np.uint64).reshape(array.shape) for array in arrays])


@pytest.mark.parametrize("count", [1, 20, 32], ids=str)
def test_sizes_within_a_bucket_do_not_show(count: int) -> None:
    for columns in ({"a": [0], "b": list(range(count))}, {"a": list(range(count)), "b": [0]}):
        told = []
        for played in (run(columns), run({"a": [0], "b": [0]})):
            entries = played.transcripts["b"].entries
            told.append(
                {way: [(e.step, e.nbytes) for e in entries if e.direction == way] for way in ("sent", "received")}
            )
        assert told[0] == told[1]


def test_work_within_a_bucket_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is hashed and put into bins as ids are, or time would tell how much there is."""
    hashed: list[int] = []
    digests, placed = sodium.digests, oprf.placed

    def hashing_some(data: Any, offsets: Any, rows: np.ndarray, key: bytes, threads: int) -> np.ndarray:
        hashed.append(len(rows))
        return digests(data, offsets, rows, key, threads)

    def placing(items: np.ndarray, bins: int) -> Any:
        hashed.append(-len(items))
        return placed(items, bins)

    monkeypatch.setattr(sodium, "digests", hashing_some)
    monkeypatch.setattr(oprf, "placed", placing)
    for columns in ({"a": [0], "b": list(range(32))}, {"a": list(range(32)), "b": [0]}):
        hashed.clear()
        run(columns, result_to="active")
        assert sorted(hashed[:3]) == [-32, 32, 32]  # then those of the common order


def test_nothing_sent_is_sent_again_in_another_run_and_no_id_travels() -> None:
    columns = {"a": [f"customer-{k:06d}" for k in range(40)], "b": [f"customer-{k:06d}" for k in range(20, 60)]}
    seen = []
    for _ in range(2):
        played = run(columns)
        seen += [
            words([m.values for m in sent(played, "b", OprfValues)]),
            words([m.rows for m in sent(played, "a", MaskedCodes)]),
        ]
        wire = b"".join(entry.content or b"" for t in played.transcripts.values() for entry in t.entries)
        assert not any(text.encode() in wire for column in columns.values() for text in column)
    values = np.concatenate([part.reshape(-1) for part in seen])
    assert len(np.unique(values)) == len(values)
    assert [len(part) for part in seen] == [3 * 40, 1536] * 2


def test_code_words_of_empty_bins_are_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the code word of an id, the active party would learn that id's values in bins that are not its own."""
    used: list[np.ndarray] = []
    extend = oprf.OprfReceiver.extend

    def extending(self: oprf.OprfReceiver, codes: np.ndarray, first: int, threads: int = 1) -> Any:
        used.append(codes.copy())
        return extend(self, codes, first, threads)

    monkeypatch.setattr(oprf.OprfReceiver, "extend", extending)
    for _ in range(2):
        run({"a": list(range(20)), "b": [1, 2]})
    codes = np.concatenate(used)
    assert len(codes) == 2 * 1536  # of which 32 of a run are ids and padding, hashed under its own key
    assert len(np.unique(codes.reshape(-1))) == codes.size


def test_matches_tell_nothing_of_the_bin_in_which_the_active_party_found_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that it shows is the same whichever of the three values it opened."""
    opened: list[np.ndarray] = []
    matching = kkrt._matching

    def noting(own: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        found = matching(own, theirs)
        opened.append(found)
        return found

    monkeypatch.setattr(kkrt, "_matching", noting)
    listed: list[SecretOrder] = []
    init = SecretOrder.__init__
    monkeypatch.setattr(SecretOrder, "__init__", lambda self, *args: (listed.append(self), init(self, *args))[1])
    played = run({"a": list(range(40)), "b": list(range(30))}, result_to="active")
    found = np.concatenate(opened)
    places = np.sort(found["place"])
    assert len(found) == 30
    own = kkrt.SecretOrder.values
    expected = own(listed[0], found["place"])
    assert np.array_equal(found["value"], expected)
    assert len(set(places)) == 30
    assert set(played.results["a"].rows) == set(range(30))


def test_values_travel_in_an_order_that_tells_nothing() -> None:
    values = words([m.values for m in sent(run({"a": list(range(40)), "b": list(range(40))}), "b", OprfValues)])
    assert np.all(values[1:, 0] >= values[:-1, 0])  # pseudorandom, and sorted


# ---------------------------------------------------------------- hostile messages


def array(values: Any, dtype: Any = np.uint8) -> Array:
    return Array.of(np.asarray(values, dtype))


def words_of(message: OprfValues) -> np.ndarray:
    return np.frombuffer(message.values.data, np.uint64).reshape(message.values.shape).copy()


NO_POINT = np.frombuffer(bytes([0xEC, *[0xFF] * 30, 0x7F]), np.uint8)
CHANGES: dict[str, tuple[str, type[Message], Callable[[Any], Message], str]] = {
    "offer that is no point": (
        "a", OprfOffer, lambda m: OprfOffer(m.key, array(NO_POINT)), "expected points of ristretto255.*OprfOffer.point",
    ),
    "offer of the identity": ("a", OprfOffer, lambda m: OprfOffer(m.key, array(np.zeros(32))), "OprfOffer.point"),
    "short key": ("a", OprfOffer, lambda m: OprfOffer(array([1]), m.point), "OprfOffer.key"),
    "few answers": ("b", OprfChoices, lambda m: OprfChoices(array(np.zeros((3, 32)))), "OprfChoices.points"),
    "answers that are no points": (
        "b", OprfChoices, lambda m: OprfChoices(array(np.tile(NO_POINT, (512, 1)))), "got 512 others of 512",
    ),
    "few bins": ("a", MaskedCodes, lambda m: MaskedCodes(array(np.zeros((3, 8)), np.uint64)), "MaskedCodes.rows"),
    "bins of another type": ("a", MaskedCodes, lambda m: MaskedCodes(array(np.zeros((512, 8)))), "MaskedCodes.rows"),
    "few values": ("b", OprfValues, lambda m: OprfValues(array(np.zeros((3, 3)), np.uint64)), "OprfValues.values"),
    "values that are not sorted": (
        "b", OprfValues, lambda m: OprfValues(array(words_of(m)[::-1], np.uint64)), "expected sorted values",
    ),
    "tokens that were not told": (
        "a", alignment.Matches, lambda m: alignment.Matches(m.places, array(np.ones((2, 16)))),
        "expected tokens of step 4",
    ),
    "place twice": (
        "a", alignment.Matches, lambda m: alignment.Matches(array([5, 5], np.int32), m.values), "different places",
    ),
    "place out of range": (
        "a", alignment.Matches, lambda m: alignment.Matches(array([5000, 1], np.int32), m.values), "different places",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("who", "kind", "change", "expected"), CHANGES.values(), ids=CHANGES)
def test_messages_that_do_not_fit_are_the_senders_fault(
    monkeypatch: pytest.MonkeyPatch, who: str, kind: type[Message], change: Callable[[Any], Message], expected: str
) -> None:
    send = Party.send

    def sending(party: Party, to: str, message: Message) -> None:
        send(party, to, change(message) if party.name == who and type(message) is kind else message)

    monkeypatch.setattr(Party, "send", sending)
    with pytest.raises(PeerProtocolError, match=expected) as caught:
        run({"a": [1, 2, 3], "b": [1, 2, 4]})
    assert caught.value.peer == who


@pytest.mark.parametrize("result_to", ["both", "active"])
@pytest.mark.parametrize("change", ["place", "twice"])
def test_values_that_no_honest_list_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: str, result_to: str
) -> None:
    """A passive party that writes places beyond its list, or one id in two places.

    It shows only where the active party has the id: a passive party that is to learn nothing sees the run end well.
    """

    def crooked(end: oprf.OprfSender, rows: Any, first: int, bins: Any, codes: Any, threads: int = 1) -> np.ndarray:
        values = plain(end, rows, first, bins, codes, threads)
        if change == "place":
            values[:, 1] ^= np.uint64(1 << 63)
        return values

    def noting(party: Party, *args: Any) -> Any:
        ended.append(align_passive(party, *args))
        return ended[0]

    ended: list[Any] = []
    align_passive = playing.align_passive
    monkeypatch.setattr(playing, "align_passive", noting)
    plain = oprf.OprfSender.values
    monkeypatch.setattr(oprf.OprfSender, "values", crooked)
    if change == "twice":
        monkeypatch.setattr(kkrt, "_digests", repeated(kkrt._digests))
    expected = "expected values of different ids, at places below 32 - at OprfValues.values from b"
    with pytest.raises(PeerProtocolError, match=expected):
        run({"a": list(range(20)), "b": list(range(20))}, result_to=result_to)
    assert len(ended) == (result_to == "active")


def test_one_id_sent_again_and_again_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    matching, found = kkrt._matching, kkrt._found
    kept: list[int] = []

    def counting(*args: Any) -> Any:
        pairs, fine = found(*args)
        kept.append(len(pairs))
        return pairs, fine

    monkeypatch.setattr(kkrt, "_matching", lambda *args: np.repeat(matching(*args), 1000))
    monkeypatch.setattr(kkrt, "_found", counting)
    with pytest.raises(PeerProtocolError, match="expected values of different ids"):
        run({"a": list(range(20)), "b": list(range(20))})
    assert kept == [20]


def repeated(digests: Any) -> Any:
    """At the passive party, whose ids are hashed after the active one's, all ids get the digest of the first."""
    calls: list[int] = []

    def some(ids: Any, part: slice, key: bytes, threads: int) -> np.ndarray:
        calls.append(1)
        found = digests(ids, part, key, threads)
        return found if len(calls) == 1 else np.repeat(found[:1], len(found), axis=0)

    return some


def test_values_that_agree_in_64_bits_alone_are_no_match() -> None:
    own = np.zeros(3, kkrt._OWN)
    own["tag"], own["number"] = [5, 5, 9], [0, 1, 2]
    own["rest"] = [[1, 7], [2, 7], [3, 7]]
    theirs = np.array([[4, 0, 0], [5, 2 | 6 << 32, 8], [5, 4, 4], [9, 4, 0]], np.uint64)
    found = kkrt._matching(own, theirs)
    assert [part.tolist() for part in (found["number"], found["place"], found["value"])] == [[1], [6], [[15, 6]]]


def test_all_values_are_compared_however_they_fall_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    for values, in_memory in ((1, 1 << 20), (7, 8), (1000, 40)):
        monkeypatch.setattr(kkrt, "VALUES", values)
        columns = {"a": list(range(50)), "b": list(range(25, 75))}
        assert sorted(joined(columns, in_memory=in_memory)) == plain_join(columns)


def test_few_messages_are_on_the_way_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kkrt, "AHEAD", 2)
    played = run({"a": list(range(4000)), "b": [5, *range(4000, 4500)]})
    assert played.results["a"].rows.tolist() == [5]
    for name, kind, most in (("a", MaskedCodes, 12), ("b", OprfValues, 64)):
        steps = [(e.direction, e.step) for e in played.transcripts[name].entries]
        change = [(step == ("sent", kind.__name__)) - (step == ("received", "OprfUsed")) for step in steps]
        assert change.count(1) == change.count(-1) == most
        assert max(np.cumsum(change)) <= 2


def test_secret_order_is_a_fresh_permutation_with_fresh_tokens() -> None:
    ids = read_ids(list(range(1000)))
    first, second = (SecretOrder(ids, bytes(32), 1, Scratch()) for _ in range(2))
    size, places = first.size, np.arange(first.size, dtype=np.int32)
    assert sorted(first.numbers(slice(0, size))) == list(range(size))
    assert not np.array_equal(first.numbers(slice(0, size)), second.numbers(slice(0, size)))
    tokens = np.concatenate([first.values(places)[:, 0], second.values(places)[:, 0]])
    assert len(np.unique(tokens)) == 2 * size
