"""Faults under the lattice map end the job quickly, with one clear error at every party."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from msgspec.structs import replace

from pace import within
from systems.secureboost.test_faults import SEEN, roles_of, watched
from systems.vertical.playing import OPTIONS, play_training, role_input, tables_and_labels
from tables import real_table
from treaty.crypto.lattice.linear_map import LinearMapServer
from treaty.data.table import to_table
from treaty.errors import CryptoError, PeerError, PeerProtocolError, TreatyError
from treaty.messaging.messages import Array, pack
from treaty.systems.secureboost import secureboost
from treaty.systems.vertical.messages import Hint, NamedRows, Sums, TreeEnd

LATTICE = {**OPTIONS, "encryption": "lattice", "max_bin": 6}


def numbers(array: Array) -> np.ndarray:
    """Copy out what an array holds."""
    return np.frombuffer(array.data, array.dtype).reshape(array.shape).copy()


def with_number(array: Array, place: tuple[int, ...], value: int) -> Array:
    changed = numbers(array)
    changed[place] = value
    return Array.of(changed)


def play_faulty(faulty: str, name: str, change, reveal="column", first=1, tables=None):
    """Train with two passive parties while `faulty` changes its messages called `name`, from the `first` one on.

    `change` returns what is sent in a message's place: one message, or a list of several.

    Returns
    -------
    what the training raised, and what each party did
    """
    usual, y = tables_and_labels()
    tables = tables or usual
    SEEN.clear()
    roles = roles_of(tables, y, {**LATTICE, "reveal": reveal})
    honest, sent = roles[faulty], []

    def role(party):
        send = party.send

        def sending(to, message):
            if type(message).__name__ == name:
                sent.append(to)
                message = change(message) if len(sent) >= first else message
            for one in message if isinstance(message, list) else [message]:
                send(to, one)

        party.send = sending
        return honest(party)

    roles[faulty] = role
    started = time.monotonic()
    with pytest.raises((TreatyError, KeyboardInterrupt)) as caught:
        play_training(tables, y, replace=roles)
    assert time.monotonic() - started < within(10)
    assert set(SEEN) == {"p0", "p1", "p2"}
    return caught.value, dict(SEEN)


def flipped(message: Sums) -> Sums:
    binding, digits = message.payload
    return Sums([binding, with_number(digits, (0, 3, -1), numbers(digits)[0, 3, -1] ^ 0x200)])


def of_digits(change):
    """Change the digits of a hint, and leave alone the binding that comes before them."""
    return lambda m: Hint(pack(change(numbers(m.payload[0])))) if m.payload[0].dtype == "int16" else m


ANSWERS = {
    "corrupted answer": ("Sums", flipped, "do not add up to their node"),
    "answer of noise": (
        "Sums",
        lambda m: Sums(pack([numbers(m.payload[0]), numbers(m.payload[1]) ^ 0x5A5A])),
        "do not add up",
    ),
    "binding of another table": (
        "Sums",
        lambda m: Sums([with_number(m.payload[0], (7,), 1 + numbers(m.payload[0])[7] % 255), m.payload[1]]),
        "belongs to another table or hint",
    ),
    "answer of fewer slots": (
        "Sums",
        lambda m: Sums(pack([numbers(m.payload[0]), numbers(m.payload[1])[:, 1:]])),
        "expected uint16",
    ),
    "answer without binding": ("Sums", lambda m: Sums(m.payload[1:]), "expected 2 arrays"),
    "no binding": ("Hint", lambda m: Hint(pack([np.zeros(31, np.uint8)])), "expected uint8"),
    "hint twice": ("Hint", of_digits(lambda digits: [digits, digits]), "expected 1 arrays"),
    "hint of noughts": ("Hint", of_digits(lambda digits: [0 * digits]), "do not add up to their node"),
    "hint of more rows": (
        "Hint",
        of_digits(lambda digits: [np.repeat(digits, 2, axis=0)]),
        "rows more, and one at least, got 70",
    ),
    "unknown column": (
        "SplitColumns",
        lambda m: replace(m, columns=with_number(m.columns, (0,), 99)),
        "expected numbers of columns sent",
    ),
    "column below 0": (
        "SplitColumns",
        lambda m: replace(m, columns=with_number(m.columns, (0,), -1)),
        "expected numbers of columns sent",
    ),
    "columns too many": (
        "SplitColumns",
        lambda m: replace(m, new=Array.of(np.zeros((m.columns.shape[0] + 1, 30), np.uint8))),
        "at most a new column per split",
    ),
    "columns of fewer rows": (
        "SplitColumns",
        lambda m: replace(m, new=Array.of(np.zeros((1, 29), np.uint8))),
        "at SplitColumns.new",
    ),
    "record below 0": (
        "SplitColumns",
        lambda m: replace(m, records=with_number(m.records, (0,), -1)),
        "record numbers from 0",
    ),
    "records too many": (
        "SplitColumns",
        lambda m: replace(m, records=Array.of(np.zeros(9, np.int32))),
        "expected at most a new column per split",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ANSWERS)
def test_wrong_answers_end_the_job_at_every_party(case):
    name, change, expected = ANSWERS[case]
    error, seen = play_faulty("p1", name, change)
    assert isinstance(error, (PeerProtocolError, CryptoError))
    assert expected in str(error)
    assert "p1" in str(error)
    assert isinstance(seen["p1"], PeerError)
    assert isinstance(seen["p2"], PeerError)


def test_records_beyond_a_levels_splits_are_refused_in_a_second_message():
    def one_apart(message):
        """Send the first of several splits before the message with all of them."""
        if message.records.shape[0] < 2:
            return message
        fields = {name: Array.of(numbers(getattr(message, name))[:1]) for name in ("records", "columns", "new")}
        return [replace(message, **fields), message]

    X, _ = real_table("binary", rows=240)
    parts = {"p0": X.iloc[:, :1], "p1": X.iloc[:, 1:-1], "p2": X.iloc[:, -1:]}  # p1 has several splits of a level
    tables = {name: to_table(part, party=name) for name, part in parts.items()}
    error, _ = play_faulty("p1", "SplitColumns", one_apart, tables=tables)
    assert "expected at most a new column per split - at SplitColumns from p1" in str(error)


def test_nothing_is_computed_for_more_nodes_than_a_level_may_have(monkeypatch):
    begun, begin = [], LinearMapServer.begin

    def watched(server, own, features):
        begun.append(len(own))
        return begin(server, own, features)

    monkeypatch.setattr(LinearMapServer, "begin", watched)
    _, seen = play_faulty(
        "p0",
        "SumsRequest",
        lambda m: replace(m, payload=pack([np.repeat(numbers(array), 2, axis=0) for array in m.payload])),
        "column",
    )
    assert any("1 to 1 nodes of this level" in str(seen[party]) for party in ("p1", "p2")), seen
    assert begun == []


@pytest.mark.parametrize("case", ["corrupted answer", "answer of noise"])
def test_nobody_is_told_which_bin_was_wrong(case):
    name, change, _ = ANSWERS[case]
    error, seen = play_faulty("p1", name, change)
    for told in (error, seen["p1"], seen["p2"]):
        text = re.sub("p[012]", "", str(told))
        assert "do not add up to their node" in text
        assert not re.search(r"\d", text), text


REQUESTS = {
    "rows named where columns are revealed": (
        "column",
        "SplitRequest",
        lambda m: NamedRows(Array.of(np.zeros(240, np.uint8))),
        "TreeEnd or SumsPiece of round 1, got NamedRows",
    ),
    "rows not named where nodes are revealed": (
        "node",
        "NamedRows",
        lambda m: TreeEnd(),
        "expected NamedRows of round 1, got TreeEnd",
    ),
    "a sample of rows": (
        "column",
        "TreeStart",
        lambda m: replace(m, rows=Array.of(np.arange(100, dtype=np.int32))),
        "expected all 240 rows, got 100",
    ),
    "gradients at a tree's start": (
        "column",
        "TreeStart",
        lambda m: replace(m, payload=pack([np.zeros((240, 2), np.uint64)])),
        "expected 0 arrays, got 1",
    ),
    "a word that is no residue": (
        "column",
        "SumsRequest",
        lambda m: replace(m, payload=[with_number(m.payload[0], (0, 0), 2**32 - 1), m.payload[1]]),
        "not below its prime",
    ),
    "a vector of another length": (
        "column",
        "SumsRequest",
        lambda m: replace(m, payload=pack([numbers(m.payload[0])[..., 1:], numbers(m.payload[1])])),
        "expected words of 240 entries, or of fewer in whole blocks of 8192, got",
    ),
    "no vector": ("column", "SumsRequest", lambda m: replace(m, payload=[]), "expected 2 arrays, got 0"),
    "a level without its last piece": (
        "column",
        "SumsRequest",
        lambda m: replace(m, last=False),
        "expected SumsRequest or TreeEnd or SumsPiece of round 1, got SplitRequest",
    ),
    "another cipher": (
        "column",
        "Setup",
        lambda m: replace(m, encryption="ou"),
        "expected encryption 'lattice', got 'ou'",
    ),
    "bounds of another table": (
        "column",
        "Setup",
        lambda m: replace(m, payload=pack([numbers(m.payload[0]) + 1])),
        "expected 241 rows, got 240",
    ),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_wrong_requests_end_the_job_at_every_party(case):
    reveal, name, change, expected = REQUESTS[case]
    _, seen = play_faulty("p0", name, change, reveal)
    assert any(isinstance(seen[party], (PeerProtocolError, CryptoError)) for party in ("p1", "p2")), seen
    assert any(expected in str(seen[party]) for party in ("p1", "p2")), seen
    assert isinstance(seen["p0"], PeerError)


@pytest.mark.parametrize("answers", [1, 2, 5], ids=lambda n: f"answer {n}")
def test_a_passive_party_killed_within_a_tree_ends_the_job_and_finished_trees_stay(answers):
    kept, (tables, y) = {}, tables_and_labels()

    def dying(party):
        send, sent = party.send, []

        def sending(to, message):
            if isinstance(message, Sums):
                sent.append(1)
                if len(sent) == answers:
                    kept["died"] = time.monotonic()
                    raise KeyboardInterrupt
            return send(to, message)

        party.send = sending
        return secureboost.passive(role_input(party, tables, y, LATTICE))

    SEEN.clear()
    roles = roles_of(tables, y, LATTICE) | {"p1": watched("p1", dying)}
    del roles["p0"]  # the one of `play_training`, which watches rounds
    with pytest.raises(KeyboardInterrupt):
        play_training(
            tables, y, replace=roles, progress=lambda done, part: kept.__setitem__("trees", len(part.forest.trees)),
            **{name: LATTICE[name] for name in ("encryption", "max_bin")},
        )  # fmt: skip
    assert time.monotonic() - kept["died"] < within(10)
    assert kept["trees"] == (0 if answers <= 3 else 1)
    assert isinstance(SEEN["p2"], PeerError)
