"""What is told of rows goes in pieces: results are the same, no message grows with the table, faults cost one user."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from systems.fedxgb.playing import crowd_rows, laid_out, options_of, play_crowd, user_program
from systems.fedxgb.secpred.hidden_models import assert_plain, layout, play_prediction, role_of, shards, trained
from treaty.errors import PeerError, PeerLost
from treaty.messaging.exchanges import take_rows
from treaty.messaging.messages import MOST_ROWS, Array, Message
from treaty.messaging.party import Party
from treaty.messaging.transcript import Transcript
from treaty.models.trees import predict_pooled
from treaty.runs.threads import play
from treaty.systems.fedxgb import prediction as secpred
from treaty.systems.fedxgb.domain import gather_sound
from treaty.systems.fedxgb.messages import Attendance, PredictionTerms, QueriesLeft, RowsTaken, ValueShares
from treaty.systems.fedxgb.pieces import (
    ComparedShares,
    PieceForm,
    RowPiece,
    RowShares,
    gather_rest,
    pieces_of,
    send_pieces_or_leave_out,
    send_shares,
)
from treaty.systems.fedxgb.shares import DealtCorrections

WAYS: dict[str, dict[str, Any]] = {
    "shamir": {"comparison": "shamir"},
    "additive": {},
    "paper": {"expose": "paper", "allow_insecure": True},
}
OF_ROWS = {
    "shamir": {"RowShares", "SideShares", "ValueShares", "SharedNumbers"},
    "additive": {"RowShares", "SideShares", "ValueShares", "SharedNumbers"},
    "paper": {"ComparedShares", "Sides", "SharedNumbers"},
}
FEW = 16  # bytes of a piece, but eight rows at least
EDGES = ["edge0", "edge1", "edge2"]


@pytest.fixture
def in_pieces(monkeypatch) -> None:
    monkeypatch.setattr("treaty.machine.arrays.PIECE_BYTES", FEW)


def longest(transcripts: dict[str, Transcript]) -> dict[str, tuple[int, int]]:
    """Return of each class of messages how many were sent, and the bytes of the longest."""
    found: dict[str, tuple[int, int]] = {}
    for transcript in transcripts.values():
        for entry in transcript.entries:
            if entry.direction == "sent":
                count, most = found.get(entry.step, (0, 0))
                found[entry.step] = count + 1, max(most, entry.nbytes)
    return found


def assert_cut(cut: dict[str, Transcript], whole: dict[str, Transcript], kinds: set[str], of_a_row: int) -> None:
    """Check that messages of these classes hold eight rows, or `FEW` bytes, besides an envelope."""
    few, many = longest(cut), longest(whole)
    for kind in kinds:
        assert few[kind][0] > many[kind][0], kind
        assert few[kind][1] <= 8 * max(FEW, of_a_row) + 400, kind


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("way", WAYS)
def test_a_training_in_pieces_is_the_same_and_no_message_grows_with_rows(way, monkeypatch):
    parts, _, classes = crowd_rows("multiclass" if way == "additive" else "binary", users=9, rows=300)
    options = options_of(n_estimators=1, random_state=3, **WAYS[way])
    whole = play_crowd(parts, options, classes, edges=3)
    monkeypatch.setattr("treaty.machine.arrays.PIECE_BYTES", FEW)
    cut = play_crowd(parts, options, classes, edges=3)
    assert not cut.failures
    assert cut.model.forest.trees == whole.model.forest.trees
    assert all(np.array_equal(cut.results[name], whole.results[name]) for name in parts)
    of_a_row = 16 * 2 * len(parts["p0"].table.columns)
    assert_cut(cut.transcripts, whole.transcripts, OF_ROWS[way], of_a_row)


@pytest.mark.parametrize("comparison", ["shamir", "additive"])
def test_a_prediction_in_pieces_is_the_same_and_no_message_grows_with_rows(comparison, monkeypatch):
    part, new = trained("binary", 1)
    tables = shards(part, new)
    whole = play_prediction(part, tables, comparison=comparison)
    monkeypatch.setattr("treaty.machine.arrays.PIECE_BYTES", FEW)
    cut = play_prediction(part, tables, comparison=comparison)
    assert_plain(part, tables, cut.results)
    of_a_row = 16 * layout(part).columns
    assert_cut(cut.transcripts, whole.transcripts, {"RowShares", "ValueShares", "SharedNumbers"}, of_a_row)


def test_deep_trees_are_dealt_for_fewer_rows_at_once(monkeypatch):
    """So that what the dealer sends does not grow with rows times slots."""
    parts, _, classes = crowd_rows("binary", users=9, rows=300)
    options = options_of(n_estimators=1, max_depth=3)
    whole = play_crowd(parts, options, classes, edges=3)
    monkeypatch.setattr("treaty.systems.fedxgb.secpred._SLOTS_AT_ONCE", 200)
    cut = play_crowd(parts, options, classes, edges=3)
    assert all(np.array_equal(cut.results[name], whole.results[name]) for name in parts)
    kind = DealtCorrections.__name__
    assert longest(cut.transcripts)[kind][1] < 200 * 3 * 8 + 2000 < longest(whole.transcripts)[kind][1]


# ---------------------------------------------------------------- users that vanish or lie


def with_rows(message: RowPiece, change: Callable[[np.ndarray], np.ndarray]) -> RowPiece:
    """Return a piece with other rows, changed as if they were along the first axis."""
    axis = isinstance(message, ComparedShares)
    shares = np.frombuffer(message.shares.data, np.uint64).reshape(message.shares.shape)
    other = np.moveaxis(change(np.moveaxis(shares, axis, 0)), 0, axis)
    return msgspec.structs.replace(message, shares=Array.of(np.ascontiguousarray(other)))


def dies(party: Party, message: RowPiece) -> None:
    party.channel.close()
    raise PeerLost(party.name, "it is gone")


def stalls(party: Party, message: RowPiece) -> None:
    time.sleep(2 * BRIEF)
    raise PeerLost(party.name, "it is gone")


BRIEF = 2.0  # seconds of patience
FAULTS: dict[str, Callable[[Party, RowPiece], Message | None]] = {
    "has a row less": lambda party, message: with_rows(message, lambda rows: rows[:-1]),
    "has no row": lambda party, message: with_rows(message, lambda rows: rows[:0]),
    "has more rows": lambda party, message: with_rows(message, lambda rows: np.concatenate([rows, rows])),
    "says another number": lambda party, message: msgspec.structs.replace(message, n_rows=message.n_rows + 8),
    "is another message": lambda party, message: Attendance(),
    "is beyond the field": lambda party, message: with_rows(message, lambda rows: np.full_like(rows, 2**64 - 1)),
    "never comes": stalls,
    "is missing as it dies": dies,
}


def spoiling(
    program: Callable[[Party], object], change: Callable[[Party, RowPiece], Message | None], number: int = 2
) -> Callable[[Party], object]:
    """Return a program that changes one piece of its rows, for the first edge server."""

    def run(party: Party) -> object:
        send, sent = party.send, count(1)

        def spoiled(to: str, message: Message) -> None:
            if to == EDGES[0] and isinstance(message, RowPiece) and next(sent) == number:
                message = change(party, message)
            send(to, message)

        party.send = spoiled
        return program(party)

    return run


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("fault", FAULTS)
def test_others_get_their_predictions_when_a_users_second_piece(fault):
    part, new = trained("binary", 1, 1)
    tables = shards(part, new)

    def lies(party: Party) -> None:
        with suppress(PeerError):
            spoiling(honest, FAULTS[fault])(party)

    def honest(party: Party) -> object:
        return secpred.user(role_of(party, rows=tables["cat"]))

    played = play_prediction(part, tables, roles={"cat": lies}, patience=BRIEF if fault == "never comes" else 10.0)
    assert played.results.pop("cat") is None
    assert_plain(part, {name: tables[name] for name in ("ann", "ben")}, played.results)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("fault", ["has a row less", "is missing as it dies"])
@pytest.mark.parametrize("way", WAYS)
def test_a_training_goes_on_without_a_user_whose_second_piece(way, fault):
    parts, _, classes = crowd_rows(users=12, rows=240)
    options, layout = options_of(n_estimators=1, **WAYS[way]), laid_out(list(parts), 3)
    # of the first edge server's domain, which has shares of its rows in every form, as the second one has
    program = spoiling(user_program(parts, options, classes, layout, "p3"), FAULTS[fault])
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p3": program})
    assert set(crowded.failures) == {"p3"}
    for name in set(parts) - {"p3"}:
        assert np.array_equal(crowded.results[name].T, predict_pooled([crowded.model], [parts[name].table]))


def test_who_announces_more_rows_than_are_allowed_is_left_out_before_they_come():
    part, new = trained("binary", 1, 1)
    tables = shards(part, new)

    def announces(party: Party) -> None:
        for edge in EDGES:
            party.send(edge, RowShares(Array.of(np.zeros((1, layout(part).columns, 2), np.uint64)), MOST_ROWS))
        with suppress(PeerError):
            for kind in (PredictionTerms, QueriesLeft, RowsTaken):
                party.receive(EDGES[0], kind)

    began = time.monotonic()
    played = play_prediction(part, tables, roles={"cat": announces}, patience=10.0)
    assert time.monotonic() - began < 10.0  # the patience that others have with it
    del tables["cat"]
    assert_plain(part, tables, played.results)


SHAPE = (None, 1000)
MANY = np.arange(80 * 1000, dtype=np.uint64).reshape(80, 1000)  # ten pieces
FORM = PieceForm(SHAPE, lambda shares, what: None, lambda name, n_rows: True)


@pytest.fixture
def narrow(in_pieces, monkeypatch) -> None:
    """No more than a piece waits to be read."""
    monkeypatch.setattr("treaty.messaging.channel._UNREAD", 1)


def between(edge: Callable[[Party], object], users: dict[str, Callable[[Party], object]]) -> dict[str, Any]:
    """Return what an edge server and users return."""

    def tolerant(party: Party) -> object:
        party.may_lose(list(users))
        return edge(party)

    links = {"edge": list(users), **{name: ["edge"] for name in users}}
    return play({"edge": tolerant, **users}, links, job="job", protocol="fedxgb", timeout=20.0).results


@pytest.mark.usefixtures("narrow")
def test_a_silent_user_holds_up_nobodys_pieces_and_no_longer_than_allowed():
    def sends(party: Party) -> None:
        send_shares(party, RowShares, {"edge": MANY}, axis=0)

    def stops(party: Party) -> None:
        party.send("edge", RowShares(Array.of(MANY[:8]), len(MANY)))
        with suppress(PeerError):
            party.receive("edge", ValueShares)

    def gathers(party: Party) -> tuple[dict[str, list], float]:
        began = time.monotonic()
        first = gather_sound(party, ["u0", "u1", "u2"], RowShares, timeout=2.5)
        came = gather_rest(party, RowShares, first, FORM, 2.5)
        return came, time.monotonic() - began

    came, seconds = between(gathers, {"u0": stops, "u1": sends, "u2": sends})["edge"]
    assert set(came) == {"u1", "u2"}
    assert all(np.array_equal(np.concatenate(pieces), MANY) for pieces in came.values())
    assert all(len(pieces) == 10 for pieces in came.values())
    assert 2.0 < seconds < 15.0  # it would be silent for longer


@pytest.mark.usefixtures("narrow")
def test_who_takes_a_piece_and_not_the_next_is_left_out_and_others_get_theirs():
    def reads(party: Party) -> np.ndarray:
        pieces = take_rows(party, "edge", 80, 64 * 1000, ValueShares)
        return np.concatenate([np.frombuffer(of.shares.data, np.uint64).reshape(-1, 1000) for _, of in pieces])

    def stops(party: Party) -> None:
        party.receive("edge", ValueShares)
        time.sleep(2 * BRIEF)

    def sends(party: Party) -> tuple[str, ...]:
        whole = np.concatenate([MANY, MANY]).reshape(1, 160, 1000)
        parts = {"u0": slice(0, 80), "u1": slice(80, 160)}
        send_pieces_or_leave_out(party, {u: pieces_of(ValueShares, whole, of) for u, of in parts.items()}, BRIEF)
        return party.peers

    played = between(sends, {"u0": stops, "u1": reads})
    assert played["edge"] == ("u1",)
    assert np.array_equal(played["u1"], MANY)
