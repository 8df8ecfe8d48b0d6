"""Alignment equals a plain join, and the attacks on it that fail (PROTOCOLS 10.11)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.alignment.playing import BATCH, joined, plain_join, run
from treaty.crypto.transfer import sodium
from treaty.data.ids import Ids, read_ids
from treaty.data.large import Scratch, records
from treaty.errors import ConfigError, DataError, PeerAborted, PeerError, PeerLost, PeerProtocolError
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import Array, Message, decode_body
from treaty.messaging.party import Party
from treaty.privacy.ledger import RunLog
from treaty.runs.threads import RunRecord, play, star
from treaty.systems.alignment import alignment, common_rows, ecdh, leakage
from treaty.systems.alignment.alignment import Alignment, AlignmentOptions, align_active, align_passive
from treaty.systems.alignment.common_rows import Challenge, Copies, JoinLayout, OrderDigest, SealOpening
from treaty.systems.alignment.ecdh import PAIR, OwnList, bucket, in_both

SMALLEST = 32
OPTIONS = AlignmentOptions(batch=BATCH)


@pytest.fixture(scope="module", autouse=True)
def _small_lists() -> Iterator[None]:
    """Padding to 1024 points would make tests slow and show no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ecdh, "SMALLEST", SMALLEST)
        yield


# ---------------------------------------------------------------- the result

NUMBERS = st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 9)), max_size=12)
TEXTS = st.lists(st.one_of(st.none(), st.text("aAé\u0301 ßIi\u4e2d\U0001f600", max_size=2)), max_size=12)


@pytest.mark.parametrize("values", [NUMBERS, TEXTS], ids=["numbers", "texts"])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_alignment_equals_a_plain_join_with_duplicates(values: Any, data: st.DataObject) -> None:
    columns = {name: [*data.draw(values), shared] for name in "abc" for shared in [7 if values is NUMBERS else "x"]}
    texts = values is TEXTS
    key = (lambda value: value) if not texts else (lambda value: None if not value else f"={value}")
    columns = {name: [None if texts and not value else value for value in column] for name, column in columns.items()}
    assert sorted(joined(columns, on_duplicate="expand", normalise=[])) == plain_join(columns, key)


def test_parties_whose_rules_of_equal_ids_differ_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_one_other_rules(party: Party, terms: dict[str, Any]) -> None:
        agree(party, {name: party.name if name == "rules of equal ids" else value for name, value in terms.items()})

    monkeypatch.setattr(alignment, "agree", at_one_other_rules)
    with pytest.raises(ConfigError, match="rules of equal ids"):
        run({"a": ["x"], "b": ["x"]})


def test_first_rows_are_joined_once() -> None:
    columns = {"a": ["x", "y", "x", None], "b": ["z", "x", "x", "y"]}
    assert sorted(joined(columns, on_duplicate="first")) == [(0, 1), (1, 3)]


@pytest.mark.parametrize("sizes", [(300, 90), (90, 300), (200, 1)], ids=str)
def test_lists_of_several_batches_and_different_sizes_are_joined(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.permutation(2 * max(sizes))[:size].tolist() for size in sizes]
    columns = {"a": [*drawn[0], -1], "b": [-1, *drawn[1]]}
    assert sorted(joined(columns, threads=2)) == plain_join(columns)


def test_order_is_common_to_all_and_new_in_every_run() -> None:
    columns = {"a": list(range(60)), "b": list(range(59, -1, -1)), "c": list(range(30, 90))}
    first, second = joined(columns), joined(columns)
    assert sorted(first) == sorted(second) == [(row, 59 - row, row - 30) for row in range(30, 60)]
    assert first != second
    assert first != sorted(first)


def test_results_name_counts_and_pairs() -> None:
    columns = {"a": [1, 2, 3, 4, None], "b": [1, 2, 3, 9], "c": [3, 4]}
    results = run(columns, on_duplicate="first").results
    active, passive = results["a"], results["b"]
    assert (active.n_common, active.n_null, active.pairwise) == (1, 1, {"b": 3, "c": 2})
    assert (passive.n_common, passive.pairwise, passive.sizes) == (1, {}, {"a": SMALLEST})


def test_only_the_active_party_learns_when_so_agreed() -> None:
    played = run({"a": [1, 2, 3], "b": [2, 3, 4]}, result_to="active")
    assert sorted(played.results["a"].rows.tolist()) == [1, 2]
    assert (played.results["b"].n_common, len(played.results["b"].rows)) == (None, 0)
    told = [entry.step for entry in played.transcripts["b"].entries if entry.direction == "received"]
    assert told == ["Terms", "Verdict", "ListSummary", "BlindedPoints", "BlindedPoints", "AlignmentEnd"]


@pytest.mark.parametrize("theirs", [[2, 3], [8, 9]], ids=["some in common", "none in common"])
def test_passive_party_sees_no_difference_when_nothing_is_common_and_only_the_active_one_learns(
    theirs: list[int], tmp_path: Path
) -> None:
    ended: dict[str, Alignment] = {}
    last: dict[str, type[Exception]] = {}

    def passive(party: Party, name: str) -> None:
        log = RunLog(tmp_path / f"{name}.runs")
        ended[name] = align_passive(party, read_ids(theirs), AlignmentOptions(result_to="active", batch=BATCH, log=log))
        try:
            party.receive("a", alignment.AlignmentEnd)
        except PeerError as error:
            last[name] = type(error)

    def active(party: Party) -> Alignment:
        log = RunLog(tmp_path / "a.runs")
        return align_active(party, read_ids([1, 2, 3]), AlignmentOptions(result_to="active", batch=BATCH, log=log))

    roles: dict[str, Callable[[Party], Any]] = {"a": active}
    for name in "bc":
        roles[name] = lambda party, name=name: passive(party, name)
    try:
        play(roles, star("a", roles), job="test", protocol="alignment", timeout=20)
    except DataError:
        assert theirs == [8, 9]
    assert [(ended[name].n_common, len(ended[name].rows)) for name in "bc"] == [(None, 0)] * 2
    assert last == {"b": PeerLost, "c": PeerLost}  # it left in good order
    for name in "bc":
        assert [(entry.event, entry.common) for entry in RunLog(tmp_path / f"{name}.runs").entries()] == [
            ("started", None), ("finished", None),
        ]  # fmt: skip


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    other: list[tuple[int, int]] = []
    sides = {"a": {"progress": lambda *at: seen.append(at)}, "b": {"progress": lambda *at: other.append(at)}}
    run({"a": list(range(41)), "b": [1]}, per_party=sides)
    for calls in (seen, other):
        assert calls[-1][0] == calls[-1][1] == 44 + SMALLEST
        assert calls == sorted(calls)


# ---------------------------------------------------------------- what is refused


def test_no_common_id_ends_with_counts_only() -> None:
    with pytest.raises(DataError, match=r"got none \(2 ids here, 0 with b\)") as caught:
        run({"a": ["alpha", "beta"], "b": ["gamma"]})
    assert "alpha" not in str(caught.value)


def test_kinds_that_differ_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"integer at a and text at b|text at b and integer at a"):
        run({"a": [1, 2], "b": ["1", "2"]})


@pytest.mark.parametrize("options", [{"result_to": "active"}, {"batch": 8}], ids=str)
def test_options_that_differ_end_the_run(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"the same {next(iter(options))} everywhere"):
        run({"a": [1], "b": [1]}, per_party={"b": options})


def test_log_is_kept_by_all_or_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the same run log everywhere"):
        run({"a": [1], "b": [1]}, per_party={"b": {"log": RunLog(tmp_path / "b.runs")}})


@pytest.mark.parametrize("options", [{"result_to": "passive"}, {"batch": 0}], ids=str)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        run({"a": [1], "b": [1]}, **options)


def test_too_many_joined_rows_are_refused() -> None:
    with pytest.raises(DataError, match="fewer than 134217728 joined rows"):
        run({"a": [1] * 50_000, "b": [1] * 50_000}, on_duplicate="expand")


def crooked(monkeypatch: pytest.MonkeyPatch, who: str, kind: type[Message], change: Callable[[Any], Message]) -> None:
    """Let one party change its messages of one kind."""
    send = Party.send

    def sending(party: Party, to: str, message: Message) -> None:
        send(party, to, change(message) if party.name == who and type(message) is kind else message)

    monkeypatch.setattr(Party, "send", sending)


def array(values: Any, dtype: Any = np.uint8) -> Array:
    return Array.of(np.asarray(values, dtype))


def points_with(bad: bytes, kind: type[Any]) -> Callable[[Any], Message]:
    def change(message: Any) -> Message:
        changed = np.frombuffer(message.points.data, np.uint8).reshape(-1, 32).copy()
        changed[5] = np.frombuffer(bad, np.uint8)
        return kind(array(changed))  # type: ignore[no-any-return]

    return change


BAD_POINTS = {
    "identity": bytes(32),
    "not canonical": bytes([0xED, *[0xFF] * 30, 0x7F]),  # zero, plus the field's prime
    "order two on the curve": bytes([0xEC, *[0xFF] * 30, 0x7F]),
    "off the curve": bytes.fromhex("26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371"),
}


@pytest.mark.parametrize("bad", BAD_POINTS.values(), ids=BAD_POINTS)
@pytest.mark.parametrize(
    ("who", "kind"),
    [("a", ecdh.BlindedPoints), ("b", ecdh.BlindedPoints), ("b", ecdh.RaisedPoints)],
    ids=str,
)
def test_points_that_could_leak_a_key_are_refused(
    monkeypatch: pytest.MonkeyPatch, bad: bytes, who: str, kind: type[Message]
) -> None:
    crooked(monkeypatch, who, kind, points_with(bad, kind))
    message = f"got 1 others of 16 - at {kind.__name__}.points from {who}"
    with pytest.raises(PeerProtocolError, match=message):
        run({"a": [1, 2], "b": [1, 3]})


def test_same_point_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeat(message: Any) -> Message:
        repeated = np.frombuffer(message.points.data, np.uint8).reshape(-1, 32).copy()
        repeated[1:] = repeated[0]
        return ecdh.BlindedPoints(array(repeated))

    crooked(monkeypatch, "b", ecdh.BlindedPoints, repeat)
    with pytest.raises(PeerProtocolError, match="a list of different points"):
        run({"a": [1, 2], "b": [1, 3]})


KEY = alignment.OrderKey(array(np.zeros(32)))
CHANGES: dict[str, tuple[str, type[Message], Callable[[Any], Message], str]] = {
    "size not a bucket": (
        "b", alignment.ListSummary, lambda m: alignment.ListSummary(m.kind, 50, m.commitment), "expected a bucket",
    ),
    "size beyond memory": (
        "b", alignment.ListSummary, lambda m: alignment.ListSummary(m.kind, 1 << 40, m.commitment), "expected a bucket",
    ),
    "no salt": (
        "a", alignment.ListSummary, lambda m: alignment.ListSummary(m.kind, m.size, m.commitment), "expected a salt",
    ),
    "short batch": (
        "b", ecdh.BlindedPoints, lambda m: ecdh.BlindedPoints(array(np.zeros((3, 32)))),
        "BlindedPoints.points",
    ),
    "place out of range": (
        "a", alignment.Matches, lambda m: alignment.Matches(array([5000, 1], np.int32), m.values), "different places",
    ),
    "place twice": (
        "a", alignment.Matches, lambda m: alignment.Matches(array([5, 5], np.int32), m.values), "different places",
    ),
    "more places than the bucket has": (
        "a", alignment.Matches, lambda m: alignment.Matches(array(range(33), np.int32), m.values), "1 to 32 places",
    ),
    "values not made in step 3": (
        "a", alignment.Matches, lambda m: alignment.Matches(m.places, array(np.ones((2, 16)) * [[1], [2]])), "step 3",
    ),
    "nothing common": ("a", alignment.Matches, lambda m: KEY, "expected common ids"),
    "other order": ("a", OrderDigest, lambda m: OrderDigest(array(np.zeros(32))), "same order.*at OrderDigest"),
    "other seal": ("b", Challenge, lambda m: Challenge(m.key, array(np.zeros(32))), "same order.*at SealOpening"),
    "seal not opened": ("b", SealOpening, lambda m: SealOpening(array(np.zeros(32))), "same order.*at SealOpening"),
    "short challenge": ("b", Challenge, lambda m: Challenge(array([1]), m.sealed), "Challenge.key"),
    "no copies": ("b", Copies, lambda m: Copies(array([0, 1], np.int64)), "at least one row"),
    "odd layout": (
        "a", JoinLayout, lambda m: JoinLayout(array([3, 1], np.int64), array([2, 1], np.int64)), "whole blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("who", "kind", "change", "expected"), CHANGES.values(), ids=CHANGES)
def test_malformed_messages_are_the_senders_fault(
    monkeypatch: pytest.MonkeyPatch, who: str, kind: type[Message], change: Callable[[Any], Message], expected: str
) -> None:
    crooked(monkeypatch, who, kind, change)
    with pytest.raises(PeerProtocolError, match=expected) as caught:
        run({"a": [1, 2, 3], "b": [1, 2, 4]}, on_duplicate="expand")
    assert caught.value.peer == who


def exchanged(party: Party, ids: Ids) -> tuple[OwnList, Any, np.ndarray, np.ndarray]:
    """Go through steps 1 to 4 as an active party; return its list, what it met, and both lists double-encrypted."""
    scratch = Scratch()
    met = alignment._introduce(party, ids, bytes(32), OPTIONS, scratch)
    own = OwnList(ids, met.domain, 1, scratch)
    mine, theirs = ecdh.exchange(party, ["b"], own, met.sizes, BATCH, scratch, lambda count: None)
    return own, met, mine["b"][:], theirs["b"][:]


def test_abort_does_not_tell_how_many_ids_there_are() -> None:
    """The active party sends what must be refused and reads what it is told."""
    told: list[str] = []

    def probe(places: int) -> None:
        def cheat(party: Party) -> None:
            ids = read_ids([1, 2])
            exchanged(party, ids)
            values = np.zeros((places, 16))
            party.send("b", alignment.Matches(array(np.arange(places), np.int32), array(values)))
            party.send("b", KEY)
            try:
                party.receive("b", Challenge)
            except PeerAborted as error:
                told.append(str(error))

        roles = {"a": cheat, "b": lambda party: align_passive(party, read_ids(list(range(23))), OPTIONS)}
        with pytest.raises(PeerProtocolError):
            play(roles, star("a", roles), job="test", protocol="alignment", timeout=20)

    for places in (0, 23, 24, 33):  # none, as many as b has ids, more, more than all
        probe(places)
    assert len(told) == 4
    assert not any("23" in text for text in told)
    assert told[1] == told[2]  # or trying would find their number


def test_match_of_a_random_point_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers with points of its own making may hit padding, which no honest list can."""
    made: list[Any] = []

    def remember(message: Any) -> Message:
        made.append(message)
        return message  # type: ignore[no-any-return]

    def raised_again(own: OwnList, received: Array, part: slice, peer: str) -> np.ndarray:
        raised = plain(own, received, part, peer)
        return np.roll(raised, 1, axis=0) if peer == "a" else raised

    plain = OwnList.raised
    monkeypatch.setattr(OwnList, "raised", raised_again)
    crooked(monkeypatch, "b", ecdh.RaisedPoints, remember)
    with pytest.raises(PeerProtocolError, match="no match of a random point"):
        run({"a": list(range(4)), "b": list(range(4))})
    assert made


# ---------------------------------------------------------------- attacks that must fail (10.11)


def sent(played: RunRecord) -> bytes:
    return b"".join(entry.content or b"" for t in played.transcripts.values() for entry in t.entries)


def test_no_raw_or_plainly_hashed_id_is_in_any_message() -> None:
    columns = {"a": [f"customer-{k:06d}" for k in range(40)], "b": [f"customer-{k:06d}" for k in range(20, 60)]}
    wire = sent(run(columns))
    assert len(wire) > 3 * 40 * 32
    hashes = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "sha3_256", "blake2b", "blake2s")
    for text in {value for column in columns.values() for value in column}:
        for form in (text.encode(), b"t" + text.encode(), text.encode("utf-16-le")):
            assert form not in wire
            for name in hashes:
                digest = hashlib.new(name, form).digest()
                assert digest[:8] not in wire
                assert digest.hex()[:16].encode() not in wire


def test_hashed_points_without_a_key_are_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows salt and job can hash candidates, but H(id) itself never travels."""
    seen: list[bytes] = []
    from_uniform = sodium.from_uniform

    def noting(uniform: np.ndarray, threads: int = 1) -> np.ndarray:
        points = from_uniform(uniform, threads)
        seen.extend(point.tobytes() for point in points)
        return points

    monkeypatch.setattr(sodium, "from_uniform", noting)
    wire = sent(run({"a": ["x", "y"], "b": ["x", "z"]}))
    assert len(seen) == 2 * SMALLEST
    assert not any(point[:16] in wire for point in seen)


def test_same_ids_look_different_in_every_run_and_at_every_party() -> None:
    columns = {"a": list(range(30)), "b": list(range(30))}
    lists = []
    for _ in range(2):
        for transcript in run(columns).transcripts.values():
            for entry in transcript.entries:
                if entry.direction == "sent" and entry.step in ("BlindedPoints", "RaisedPoints"):
                    kind = getattr(ecdh, entry.step)
                    sent = decode_body(entry.content or b"", kind, peer="x").points
                    lists.append({sent.data[k : k + 32].tobytes() for k in range(0, sent.data.nbytes, 32)})
    assert sum(map(len, lists)) == len(set().union(*lists)) == 2 * 3 * SMALLEST


@pytest.mark.slow
def test_shuffling_step_3_breaks_matching_and_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of step 3 is the only link between the active party's ids and their double encryptions."""
    rng = np.random.default_rng(0)

    def shuffle(message: Any) -> Message:
        ordered = np.frombuffer(message.points.data, np.uint8).reshape(-1, 32)
        return ecdh.RaisedPoints(array(rng.permutation(ordered)))

    columns = {"a": list(range(1024)), "b": list(range(512, 1536))}  # lists without padding, which would betray it
    assert set(run(columns, result_to="active").results["a"].rows) == set(range(512, 1024))
    crooked(monkeypatch, "b", ecdh.RaisedPoints, shuffle)
    counted = run(columns, result_to="active").results["a"]
    assert counted.n_common == 512  # as many match, but other ones
    assert 200 < len(set(counted.rows) - set(range(512, 1024))) < 312
    with pytest.raises(PeerProtocolError, match="the same ids in the same order"):
        run(columns)


def ranking(ids: Ids, numbers: np.ndarray, key: bytes) -> np.ndarray:
    """The order of some ids under a key."""
    drawn = sodium.digests(ids.data, ids.offsets, numbers, key)
    return np.lexsort((drawn[:, 1], drawn[:, 0]))


class Cheat:
    """An active party that claims to hold one id of b which it does not, knowing by an oracle all but one thing."""

    def __init__(self, challenge_known: bool) -> None:
        self.challenge_known = challenge_known
        self.told = ""

    def __call__(self, party: Party) -> None:
        ids, b_ids = read_ids(SHARED), read_ids(B_IDS)
        own, met, mine, theirs = exchanged(party, ids)
        at, found = in_both(mine["value"], theirs["value"], "b")
        number, place = mine["number"][at].astype(np.int64), theirs["place"][found]
        unmatched = np.setdiff1d(np.arange(own.size), at)[:1]
        free = np.setdiff1d(np.arange(met.sizes["b"]), place)[:1]  # b's list is full: its one unmatched id is here
        key = secrets.token_bytes(32)

        def arranged(key: bytes, shift: int) -> tuple[np.ndarray, np.ndarray]:
            """Places and values in the order under a key, the false match where b has it, or beside that."""
            rank = ranking(ids, number, key)
            where = int(np.flatnonzero(ranking(b_ids, np.arange(len(b_ids)), key) == len(b_ids) - 1)[0])
            where = (where + shift) % (len(at) + 1)
            return (
                np.insert(place[rank], where, free).astype(np.int32),
                np.insert(mine["value"][at][rank], where, mine["value"][unmatched], axis=0),
            )

        places, values = arranged(key, 0)
        told = Scratch().sorted(PAIR, "place", own.size, own.size)
        told.add(records(PAIR, value=values, place=places, number=0))
        alignment._send_matches(party, "b", told, own.size, key, BATCH, Scratch())
        challenge = party.receive("b", Challenge)
        other = challenge.key.data.tobytes()
        guess = arranged(other, 0 if self.challenge_known else 1)[1]
        index = {value.tobytes(): k for k, value in enumerate(values)}
        order = np.array([index[value.tobytes()] for value in guess])
        party.send("b", OrderDigest(ecdh.array_of(common_rows._digest("active", other, [values, values[order]]))))
        try:
            party.receive("b", SealOpening)
        except PeerAborted as error:
            self.told = str(error)


SHARED, B_IDS = list(range(31)), [*range(31), 10**9]


def test_false_match_is_found_out_unless_its_place_in_the_challenged_order_is_guessed() -> None:
    roles = {"a": Cheat(True), "b": lambda party: align_passive(party, read_ids(B_IDS), OPTIONS)}
    assert len(play(roles, star("a", roles), job="test", protocol="alignment").results["b"].rows) == 32
    roles["a"] = cheat = Cheat(False)
    with pytest.raises(PeerProtocolError, match=r"the same ids in the same order.*from a"):
        play(roles, star("a", roles), job="test", protocol="alignment")
    assert "the same ids in the same order" in cheat.told


def test_neither_side_can_send_back_the_others_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """An active party without the values repeats what b sealed; a passive one what the active party showed."""
    seen: dict[str, Any] = {}

    def keep(message: Any) -> Message:
        seen["seal"] = message.sealed
        return message  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        crooked(patch, "b", Challenge, keep)
        crooked(patch, "a", OrderDigest, lambda m: OrderDigest(seen["seal"]))
        with pytest.raises(PeerProtocolError, match="at OrderDigest from a"):
            run({"a": [1, 2, 3], "b": [1, 2, 4]})
    crooked(monkeypatch, "a", OrderDigest, lambda m: seen.setdefault("digest", m))
    crooked(monkeypatch, "b", SealOpening, lambda m: SealOpening(seen["digest"].digest))
    with pytest.raises(PeerProtocolError, match="at SealOpening from b"):
        run({"a": [1, 2, 3], "b": [1, 2, 4]})
    key = bytes(32)
    roles = {common_rows._digest(role, key, [np.zeros((2, 2), np.uint64)]) for role in ("active", "passive")}
    assert len(roles) == 2


def test_passive_party_shows_nothing_of_its_values_before_it_has_checked() -> None:
    entries = run({"a": [1, 2, 3], "b": [1, 2, 4]}).transcripts["b"].entries
    steps = [(entry.direction, entry.step) for entry in entries]
    assert steps[-3:] == [("sent", "Challenge"), ("received", "OrderDigest"), ("sent", "SealOpening")]
    challenge = decode_body(entries[-3].content or b"", Challenge, peer="b")
    again = run({"a": [1, 2, 3], "b": [1, 2, 4]}).transcripts["b"].entries[-3]
    other = decode_body(again.content or b"", Challenge, peer="b")
    assert bytes(challenge.key.data) != bytes(other.key.data)  # drawn anew, so it was not known before the matches
    assert bytes(challenge.sealed.data) != bytes(other.sealed.data)


def test_matches_travel_in_an_order_that_tells_nothing_of_the_active_partys_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = alignment._receive_matches
    numbers: list[np.ndarray] = []

    def noting(party: Party, lead: str, own: OwnList, *args: Any) -> Any:
        numbers.append(own.numbers(slice(0, own.size)))
        return told(party, lead, own, *args)

    monkeypatch.setattr(alignment, "_receive_matches", noting)
    played = run({"a": list(range(50)), "b": list(range(10, 60))})
    entries = [entry for entry in played.transcripts["b"].entries if entry.step == "Matches"]
    matches = [decode_body(entry.content or b"", alignment.Matches, peer="a") for entry in entries]
    places = np.concatenate([np.frombuffer(message.places.data, np.int32) for message in matches])
    assert [len(message.places.data) // 4 for message in matches] == [BATCH, BATCH, 8]
    assert np.all(np.diff(places) > 0)  # by place in b's list, whose order is b's secret
    assert set(numbers[0][places]) == set(played.results["b"].rows)
    assert not np.all(np.diff(played.results["a"].rows) > 0)


@pytest.mark.parametrize("count", [1, 20, 32], ids=str)
def test_size_within_a_bucket_does_not_show(count: int) -> None:
    played = run({"a": [0], "b": list(range(count))})
    sizes = [(e.step, e.nbytes) for e in played.transcripts["b"].entries if e.direction == "sent"]
    few = run({"a": [0], "b": [0]})
    assert sizes == [(e.step, e.nbytes) for e in few.transcripts["b"].entries if e.direction == "sent"]


def test_changed_id_shows_in_the_partners_log(tmp_path: Path) -> None:
    columns = {"a": list(range(50)), "b": list(range(25, 75))}
    first = run(columns, logs=tmp_path).results
    assert first["b"].changed == {"a": None}
    assert run(columns, logs=tmp_path).results["b"].changed == {"a": 0}
    columns["a"][0] = 1_000_000  # one id gone, one new; neither is common
    third = run(columns, logs=tmp_path).results
    assert third["b"].changed["a"] in (1, 2)
    assert third["a"].changed == {"b": 0}
    entries = RunLog(tmp_path / "b.runs").entries()
    assert [entry.event for entry in entries] == ["started", "finished"] * 3
    assert [entry.changed for entry in entries[::2]] == [None, 0, third["b"].changed["a"]]
    assert entries[1].common == 25
    assert b"1000000" not in sent(run(columns, logs=tmp_path))
    run({"a": list(range(1000, 1050)), "b": list(range(1025, 1075))}, logs=tmp_path)  # another table, as for evaluation
    columns["a"][1] = 1_000_001
    assert run(columns, logs=tmp_path).results["b"].changed["a"] in (1, 2)


def test_limit_of_runs_stops_before_any_id_is_used(tmp_path: Path) -> None:
    columns = {"a": [1, 2], "b": [2, 3]}
    run(columns, logs=tmp_path, max_runs=1)
    with pytest.raises(ConfigError, match="has started 1 alignments within 30 days"):
        run(columns, logs=tmp_path, max_runs=1)


# ---------------------------------------------------------------- padding


@given(st.integers(1, 1 << 28))
def test_bucket_is_the_next_eighth_of_a_power_of_two(count: int) -> None:
    size = bucket(count)
    assert size >= max(count, SMALLEST)
    assert bucket(size) == size
    assert size == SMALLEST or size <= 1.125 * count
    assert size / (1 << (size.bit_length() - 1)) in (1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875)


def test_secret_order_is_a_fresh_permutation() -> None:
    ids = read_ids(list(range(1000)))
    first, second = (OwnList(ids, b"domain", 1).numbers(slice(0, 1024)) for _ in range(2))
    assert sorted(first) == list(range(1024))
    assert not np.array_equal(first, second)


def test_disclosures_name_every_party() -> None:
    learned = leakage.disclosures("a", ["b", "c"])
    assert set(learned) == {"a", "b", "c"}
    assert any("row by row" in fact for fact in learned["a"])
    assert len(leakage.disclosures("a", ["b"], "active")["b"]) < len(leakage.disclosures("a", ["b"])["b"])


def test_disclosures_name_numbers_of_rows_where_repeated_ids_are_joined() -> None:
    learned = leakage.disclosures("a", ["b", "c", "d"], on_duplicate="expand")
    rows = {name: [fact for fact in facts if "how many rows" in fact] for name, facts in learned.items()}
    assert rows == {
        "a": ["for each common id: how many rows each of b, c, d has"],
        "b": ["for each common id: how many rows it has elsewhere (a's; c's times d's)"],
        "c": ["for each common id: how many rows it has elsewhere (a's times b's; d's)"],
        "d": ["for each common id: how many rows it has elsewhere (a's times b's times c's)"],
    }
    for options in ({"on_duplicate": "first"}, {"on_duplicate": "expand", "result_to": "active"}):
        told = leakage.disclosures("a", ["b"], **options)  # type: ignore[arg-type]
        assert not any("how many rows" in fact for facts in told.values() for fact in facts)
