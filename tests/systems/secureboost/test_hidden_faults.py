"""Under ``membership="hidden"`` a wrong message, or a step of garbage, ends the job with an error at both parties."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from crypto.sealed.test_sealed import play
from crypto.sealed.watching import assert_refuses_garbage
from pace import within
from systems.secureboost.test_faults import SEEN, roles_of
from systems.secureboost.test_lattice_faults import numbers
from systems.vertical.playing import play_training, role_input, tables_and_labels
from treaty.crypto.transfer.stock import OpenedArrays, Steps, take
from treaty.data.table import to_table
from treaty.errors import ConfigError, CryptoError, PeerError, PeerProtocolError, TreatyError
from treaty.messaging.messages import Array, pack
from treaty.systems.observers import Observer
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.hidden_evaluation import check_rows
from treaty.systems.secureboost.hidden_forest import HiddenForest, read_forest
from treaty.systems.secureboost.hidden_setup import HiddenStart, joint_seed
from treaty.systems.secureboost.hidden_training import HiddenTree
from treaty.systems.system import LabelledRows
from treaty.systems.vertical import messages
from treaty.systems.vertical.sealed import compute

HIDDEN = {
    "membership": "hidden", "sums": "sealed", "encryption": "lattice", "objective": "logistic_pieces",
    "n_estimators": 2, "max_depth": 2, "max_bin": 6, "min_child_samples": 5, "max_cat_to_onehot": 300,
}  # fmt: skip


NONE = Array.of(np.zeros(0, np.int32))


def play_faulty(faulty: str, name: str, change: Any, first: int) -> dict[str, BaseException]:
    """Train while a party changes its messages of a name, from the `first` one on; return what each party raised."""
    tables, y = tables_and_labels(2, rows=60)
    SEEN.clear()
    roles = roles_of(tables, y, HIDDEN)
    honest, sent = roles[faulty], []

    def role(party: Any) -> Any:
        send = party.send

        def sending(to: str, message: Any) -> None:
            if type(message).__name__ == name:
                sent.append(to)
                message = change(message) if len(sent) >= first else message
            send(to, message)

        party.send = sending
        return honest(party)

    roles[faulty] = role
    with pytest.raises(PeerError):
        play_training(tables, y, replace=roles)
    return dict(SEEN)


def of_payload(change: Any, at: int = 0) -> Any:
    def changed(message: Any) -> Any:
        arrays = [numbers(array) for array in message.payload]
        return replace(message, payload=pack([change(array) if k == at else array for k, array in enumerate(arrays)]))

    return changed


def of_field(name: str, change: Any) -> Any:
    return lambda message: replace(message, **{name: Array.of(change(numbers(getattr(message, name))))})


CASES = {
    "weights beyond their bits": (
        "WeightShares", 1, of_field("shares", lambda shares: shares + np.uint64(1 << 15)), "weights of 15 bits",
    ),
    "weights far below": (
        "WeightShares", 2, of_field("shares", lambda shares: shares - np.uint64(1 << 15)), "weights of 15 bits",
    ),
    "too few weights": ("WeightShares", 1, of_field("shares", lambda shares: shares[1:]), "expected uint64 (4,)"),
    "weights of another type": (
        "WeightShares", 1, of_field("shares", lambda shares: shares.astype(np.int64)), "expected uint64 (4,)",
    ),
    "columns of no slots": (
        "HiddenColumns", 1, of_field("offsets", lambda offsets: offsets * 0), "expected the slots of columns",
    ),
    "columns that do not begin at 0": (
        "HiddenColumns", 1, of_field("offsets", lambda offsets: offsets + 1), "expected the slots of columns",
    ),
    "a column too large": (
        "HiddenColumns", 1, of_field("offsets", lambda offsets: offsets * 2**16), "expected the slots of columns",
    ),
    "offsets of another type": (
        "HiddenColumns", 1, of_field("offsets", lambda offsets: offsets.astype(np.int64)), "HiddenColumns.offsets",
    ),
    "kinds of fewer columns": (
        "HiddenColumns", 1, of_field("missing", lambda missing: missing[1:]), "HiddenColumns.missing",
    ),
    "owners that are none": (
        "OpenedStep", 1, of_payload(lambda owners: owners + np.uint64(3)), "expected shares of whose splits are best",
    ),
    "owners of another type": (
        "OpenedStep", 1, of_payload(lambda owners: owners.astype(np.int64)), "expected arrays",
    ),
    "numbers of no candidate": (
        "OpenedStep", 2, of_payload(lambda shares: shares + np.uint64(1 << 20)), "expected shares",
    ),
    "columns of a tree that do not ascend": (
        "HiddenTree", 1, of_field("passive", lambda columns: columns[::-1]), "HiddenTree.passive",
    ),
    "columns of a tree that are none": (
        "HiddenTree", 2, of_field("active", lambda columns: columns + 100), "HiddenTree.active",
    ),
    "a tree without columns": (
        "HiddenTree", 1, lambda message: replace(message, active=NONE, passive=NONE), "expected a column at least",
    ),
    "rows of a tree of fewer bytes": (
        "HiddenTree", 2, lambda message: replace(message, rows=Array.of(np.zeros(7, np.uint8))), "HiddenTree.rows",
    ),
    "a first step of other bytes": (
        "SealedStep", 1, of_payload(lambda digest: digest[1:]), "expected arrays",
    ),
    "a share that was not committed to": (
        "SealedStep", 2, of_payload(lambda share: share ^ np.uint8(1)), "expected the share that was committed to",
    ),
    "a hint of nothing": (
        "SealedStep", 3, lambda message: replace(message, payload=[]), "rows more of a hint",
    ),
    "a step of nothing": (
        "SealedStep", 20, lambda message: replace(message, payload=[]), "at a step",
    ),
    "a step of other types": (
        "SealedStep", 30, of_payload(lambda array: array.astype(np.float64)), "at a step",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("faulty", "case"), [
    (faulty, case) for faulty in ("p0", "p1") for case in CASES
    if CASES[case][0] != ("WeightShares" if faulty == "p0" else "HiddenTree")  # what the other party sends alone
])  # fmt: skip
def test_wrong_messages_end_the_job_at_both_parties(faulty: str, case: str) -> None:
    name, first, change, expected = CASES[case]
    seen, honest = play_faulty(faulty, name, change, first), "p1" if faulty == "p0" else "p0"
    assert isinstance(seen[honest], PeerProtocolError)
    assert expected in str(seen[honest])
    assert f"from {faulty}" in str(seen[honest])
    assert isinstance(seen[faulty], PeerError)


FOREST = {
    "no level": (np.zeros((1, 0), np.int32), 0, "expected 1 to 6 levels"),
    "seven levels": (np.zeros((1, 127), np.int32), 7, "expected 1 to 6 levels"),
    "another depth": (np.zeros((1, 7), np.int32), 2, "HiddenForest.records"),
    "no tree": (np.zeros((0, 3), np.int32), 2, "of one tree at least"),
    "more trees than memory": (np.zeros(((1 << 20) + 1, 1), np.int32), 1, "of one tree at least and 1048576 at most"),
    "records that are not held": (np.array([[0, 4, 5]], np.int32), 2, "expected records below 5"),
    "records below none": (np.array([[0, -2, 4]], np.int32), 2, "expected records below 5"),
    "another type": (np.zeros((1, 3), np.int64), 2, "HiddenForest.records"),
}


@pytest.mark.parametrize("case", FOREST)
def test_places_of_splits_that_are_none_are_refused(case: str) -> None:
    records, levels, expected = FOREST[case]
    with pytest.raises(PeerProtocolError, match=expected):
        read_forest(HiddenForest(Array.of(records), Array.of(np.zeros(levels, np.bool_))), "p0", 5)


def test_records_are_own_ones_or_lines_of_further_parties() -> None:
    """Others would be read beyond their table."""
    message = HiddenForest(Array.of(np.array([[0, 4, 7]], np.int32)), Array.of(np.zeros(2, np.bool_)))
    for lines in (0, 2):
        with pytest.raises(PeerProtocolError, match=f"expected records below {5 + lines}"):
            read_forest(message, "p0", 5, lines=lines)
    assert read_forest(message, "p0", 5, lines=3).held == 5


def test_a_new_training_has_no_splits_of_earlier_rounds() -> None:
    tables, y = tables_and_labels(2, rows=60)
    SEEN.clear()
    roles = roles_of(tables, y, HIDDEN)
    honest, forest = roles["p0"], HiddenForest(Array.of(np.full((1, 3), 8, np.int32)), Array.of(np.ones(2, np.bool_)))

    def role(party: Any) -> Any:
        send = party.send

        def sending(to: str, message: Any) -> None:
            if isinstance(message, HiddenStart):
                message = replace(message, rounds=1, records=9)
            send(to, forest if isinstance(message, HiddenTree) else message)

        party.send = sending
        return honest(party)

    with pytest.raises(PeerError):
        play_training(tables, y, replace={**roles, "p0": role})
    assert "expected records below 0" in str(SEEN["p1"])


@pytest.mark.parametrize(("sets", "rows"), [(1, 60), (3, 100)])
def test_the_passive_party_refuses_eval_sets_that_show_rows(sets: int, rows: int) -> None:
    """As the active party does, which could leave it out."""
    tables, _ = tables_and_labels(2, rows=rows)
    eval_sets = [LabelledRows(tables["p1"], np.zeros(0))] * sets
    party: Any = SimpleNamespace(name="p1")
    with pytest.raises(ConfigError, match="takes at most 2 eval sets"):
        secureboost.passive(role_input(party, tables, np.zeros(rows), HIDDEN, eval_sets=eval_sets))


@pytest.mark.parametrize(("repeated", "fits"), [(1, True), (2, True), (3, False), (200, False)])
def test_eval_sets_of_few_persons_are_refused(repeated: int, fits: bool) -> None:
    """With ``on_duplicate="expand"`` the active party can have one person's row as often as it likes."""
    tables, _ = tables_and_labels(2, rows=200)
    ids = [f"text {max(0, k - repeated + 1)}" for k in range(200)]
    rows = LabelledRows(tables["p1"], np.zeros(0), ids=lambda: ids)
    party: Any = SimpleNamespace(name="p1")
    inputs = role_input(party, tables, np.zeros(200), HIDDEN, eval_sets=[rows])
    if fits:
        assert check_rows(inputs) == 1
        return
    with pytest.raises(ConfigError, match="at least 100 rows for each row of an id"):
        secureboost.passive(inputs)


MANY = list(range(200))


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        (MANY, MANY[::-1], True),
        (MANY, MANY[1:], False),
        (MANY[:150], MANY[49:199], False),
        (MANY[:150], MANY[49:150], False),
        (MANY[:149], MANY[49:], True),
        (MANY * 99, MANY * 99 + [200] * 99, False),
    ],
)
def test_eval_sets_that_differ_by_few_rows_are_refused(first: list[int], second: list[int], fits: bool) -> None:
    """The difference of their losses is that of these rows."""
    tables, _ = tables_and_labels(2, rows=200)
    long = to_table(np.zeros((max(len(first), len(second)), 1)), party="p1")
    sets = [LabelledRows(long, np.zeros(0), ids=lambda of=of: [f"text {k}" for k in of]) for of in (first, second)]
    party: Any = SimpleNamespace(name="p1")
    inputs = role_input(party, tables, np.zeros(200), HIDDEN, eval_sets=sets)
    if fits:
        assert check_rows(inputs) == 1
        return
    with pytest.raises(ConfigError, match="eval sets that differ by 100 rows at least"):
        secureboost.passive(inputs)


# ---------------------------------------------------------------- steps, and the seed that both draw


class Peer:
    """A party's end of messages to one peer, who sends what it is given."""

    def __init__(self, *answers: Any) -> None:
        self.peers, self.sent, self._answers = ("other",), list[Any](), iter(answers)

    def send(self, _: str, message: Any) -> None:
        self.sent.append(message)

    def receive(self, _: str, kind: type) -> Any:
        answer = next(self._answers)
        assert type(answer) is kind  # what a party checks by its order of messages
        return answer


def steps_of(*sent: Any) -> Steps[Any]:
    came = []
    for each in sent:
        came += take((yield each), (np.uint64, (2,)))
    return came


def test_openings_have_messages_of_their_own() -> None:
    two = np.array([1, 2], np.uint64)
    party = Peer(messages.SealedStep(pack([two])), messages.OpenedStep(pack([two + two])))
    first, second = compute(party, steps_of([two], OpenedArrays([two])))
    assert (first.tolist(), second.tolist()) == ([1, 2], [2, 4])
    assert [type(message) for message in party.sent] == [messages.SealedStep, messages.OpenedStep]


@pytest.mark.parametrize("arrays", [[], [np.zeros(2)], [np.zeros((2, 1), np.uint64)], [np.zeros(2, np.uint64)] * 2])
@pytest.mark.parametrize("opening", [False, True])
def test_a_step_of_garbage_is_an_error_of_the_peers(arrays: list[np.ndarray], opening: bool) -> None:
    kind = messages.OpenedStep if opening else messages.SealedStep
    sent = [np.zeros(2, np.uint64)]
    with pytest.raises(PeerProtocolError, match=r"expected arrays .* at a step from other"):
        compute(Peer(kind(pack(arrays))), steps_of(OpenedArrays(sent) if opening else sent))


def test_a_step_of_an_unknown_type_is_refused() -> None:
    array = replace(Array.of(np.zeros(2, np.uint64)), dtype="complex64")
    with pytest.raises(PeerProtocolError, match="expected an element type"):
        compute(Peer(messages.SealedStep([array])), steps_of([np.zeros(2, np.uint64)]))


def seed_with(commitment: Any, share: Any) -> Any:
    """Play a peer that answers with what it makes of the other's message, at either step."""
    steps = joint_seed()
    (came,) = next(steps)
    (own,) = steps.send([commitment(came)])
    with pytest.raises(StopIteration) as stopped:
        steps.send([share(own)])
    return stopped.value.value


def test_a_seed_is_one_at_both_ends_and_never_again() -> None:
    found = [play(joint_seed(), joint_seed()) for _ in range(3)]
    assert all(one == other and len(one) == 32 for one, other in found)
    assert len({one for one, _ in found}) == 3


def test_a_share_that_was_not_committed_to_is_refused() -> None:
    """Nor is one that is the other's own, which would take its part out of the seed."""
    with pytest.raises(CryptoError, match="committed to"):
        seed_with(lambda came: came ^ np.uint8(1), lambda own: own)
    with pytest.raises(CryptoError, match="committed to"):
        seed_with(lambda came: np.zeros(32, np.uint8), lambda own: own ^ np.uint8(1))
    with pytest.raises(CryptoError, match="another share than the own one"):
        seed_with(lambda came: came, lambda own: own)


@pytest.mark.parametrize("role", [0, 1])
def test_a_seed_of_garbage_is_refused(role: int) -> None:
    assert_refuses_garbage(lambda k: joint_seed(), role)


# ---------------------------------------------------------------- parties that end, or say nothing more


@pytest.mark.parametrize("faulty", ["p0", "p1"])
@pytest.mark.parametrize("hangs", [False, True], ids=["ends", "hangs"])
def test_a_party_that_ends_or_hangs_in_the_second_tree_is_named_by_the_other(faulty: str, hangs: bool) -> None:
    tables, y = tables_and_labels(2, rows=60)
    SEEN.clear()
    roles, over, finished, stopped = roles_of(tables, y, HIDDEN), threading.Event(), list[Any](), list[float]()
    honest, other = roles[faulty], "p1" if faulty == "p0" else "p0"

    def role(party: Any) -> Any:
        send = party.send

        def sending(to: str, message: Any) -> None:
            if party.round == 2 and isinstance(message, messages.OpenedStep):
                stopped.append(time.monotonic())
                if not hangs:
                    raise KeyboardInterrupt
                over.wait(within(30))
            send(to, message)

        party.send = sending
        return honest(party)

    def watching(party: Any) -> Any:
        program = secureboost.active if party.name == "p0" else secureboost.passive
        try:
            return program(role_input(party, tables, y, HIDDEN, progress=lambda done, part: finished.append(done)))
        except BaseException as error:
            SEEN[other] = error
            raise
        finally:
            stopped.append(time.monotonic())
            over.set()

    with pytest.raises((KeyboardInterrupt, TreatyError)):
        play_training(tables, y, replace={**roles, faulty: role, other: watching}, timeout=2.0)
    assert isinstance(SEEN[other], TreatyError)
    assert faulty in str(SEEN[other])
    assert stopped[1] - stopped[0] < within(10)
    # what was finished is there
    assert finished[-1] == 1


def test_progress_is_told_while_hints_are_exchanged() -> None:
    told: dict[str, list[tuple[str, int, int]]] = {"p0": [], "p1": []}
    tables, y = tables_and_labels(2, rows=60)

    class Watching(Observer):
        def __init__(self, name: str) -> None:
            self._name = name

        def set_up(self, title: str, done: int, total: int) -> None:
            told[self._name].append((title, done, total))

    def role(party: Any) -> Any:
        inputs = role_input(party, tables, y, HIDDEN)
        inputs.observers.add(Watching(party.name))
        return (secureboost.active if party.name == "p0" else secureboost.passive)(inputs)

    play_training(tables, y, replace=dict.fromkeys(tables, role))
    for of in told.values():
        titles, done, totals = zip(*of, strict=True)
        assert {*titles} == {"hints"}
        assert list(done) == sorted(done)
        assert done[-1] == totals[0] > 0
        assert len({*totals}) == 1
    assert told["p0"] == told["p1"]
