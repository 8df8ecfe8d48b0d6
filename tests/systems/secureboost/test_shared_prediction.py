"""Prediction on shares: the same margins, and nothing of anybody's decisions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec.structs import replace

from crypto.sealed.watching import uniform
from marks import all_but_first_slow
from systems.vertical.trained_models import at, grow, predict, split_table, take
from treaty.data.table import Table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.machine import arrays
from treaty.messaging.certificates import Signer, make_identity
from treaty.messaging.exchanges import Terms, Verdict
from treaty.messaging.messages import Array, decode_body
from treaty.models.trees import leaves
from treaty.runs.threads import RunRecord
from treaty.systems.observers import Observers, ProgressCalls
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost import hidden_forest, shared_prediction
from treaty.systems.secureboost.hidden_forest import PRECISION_BITS, HiddenForest, leaf_weights, unit_of
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.shared_prediction import (
    FurtherLines,
    MarginShares,
    MaskedSides,
    SharingKey,
    SidesRequest,
    _bytes_of,
    follow,
    online_active,
    predict_active,
)
from treaty.systems.vertical.messages import OpenedStep, SealedStep
from treaty.systems.vertical.prediction import (
    Asked,
    Decisions,
    Finish,
    OnlineRows,
    RecordCount,
    collect,
    predict_passive,
)
from treaty.systems.vertical.prediction import predict_active as predict_plain
from treaty.systems.vertical.sealed import MovingKey
from treaty.trees.ensemble import SplitTable, Tree, Walk, join_splits
from trees.plain import leaves_from_values

FOLLOW = partial(follow, rows="rows to predict")


def play_shared(parts, tables, replaced=None, **fields) -> RunRecord:
    active = at(predict_active, parts, tables, **fields)
    return predict(active, at(FOLLOW, parts, tables, **fields), list(tables), replaced)


def play_plain(parts, tables, active=predict_plain) -> RunRecord:
    return predict(at(active, parts, tables), at(predict_passive, parts, tables), list(tables))


ONLINE = online_active, partial(follow, rows="rows")


def play_online(parts, tables, requests, roles=ONLINE, **fields) -> tuple[RunRecord, list[np.ndarray]]:
    """Return what was played, and the margins of each request for some rows; None is a time without a request."""
    told: list[np.ndarray] = []

    def asked():
        for rows in requests:
            own = tables["p0"]
            yield (
                None
                if rows is None
                else Asked(
                    np.array(rows, np.int32), Table(own.schema, [c[rows] for c in own.columns], len(rows)), told.append
                )
            )

    active = at(lambda inputs: roles[0](replace_requests(inputs, asked())), parts, tables, **fields)
    return predict(active, at(roles[1], parts, tables, **fields), list(tables)), told


def replace_requests(inputs, requests):
    inputs.requests = requests
    return inputs


def pooled(parts, tables):
    """Return the plain margins, and the sums of leaf values rounded one by one: what shares add up to."""
    forest = parts["p0"].forest
    splits = join_splits([parts[name].splits for name in tables], [len(table.columns) for table in tables.values()])
    matrix = np.concatenate([table.matrix() for table in tables.values()], axis=1)
    n_outputs, base = forest.objective.n_outputs, forest.objective.base_margins
    plain = np.full((len(matrix), n_outputs), base)
    Walk(forest.trees, splits).add_to(plain, matrix)
    largest = max(np.abs(tree.value).max() for tree in forest.trees)
    unit = 2.0 ** (np.frexp(largest)[1] - PRECISION_BITS)
    exact = np.zeros(plain.shape)
    for number, ends in enumerate(leaves_from_values(forest.trees, splits, matrix).T):
        exact[:, number % n_outputs] += np.rint(forest.trees[number].value / unit)[ends]
    return plain, base + exact * unit, unit


# ---------------------------------------------------------------- margins


@pytest.mark.parametrize("dirty", all_but_first_slow(True, False), ids=["categories-and-missing", "numbers"])
@pytest.mark.parametrize("parties", [2, 3, 4])
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_margins_are_the_sums_of_rounded_leaf_values(task, parties, dirty):
    frames, y = split_table(task, parties, dirty=dirty)
    parts, tables = grow(frames, y, task)
    some = take(tables, slice(0, 61))
    plain, exact, unit = pooled(parts, some)
    found = play_shared(parts, some).results["p0"]
    np.testing.assert_array_equal(found, exact)
    assert 0 < np.abs(found - plain).max() <= unit * len(parts["p0"].forest.trees)


@pytest.mark.parametrize("options", [
    {"max_cat_to_onehot": 4, "category_sets": "sorted"}, {"num_parallel_tree": 2, "subsample": 0.7}, {"max_depth": 1},
    {"max_depth": 6, "n_estimators": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("task", ["multiclass", "binary"])
def test_other_trees_have_their_margins(task, options):
    frames, y = split_table(task, 3, dirty=True)
    parts, tables = grow(frames, y, task, **options)
    some = take(tables, slice(0, 40))
    np.testing.assert_array_equal(play_shared(parts, some).results["p0"], pooled(parts, some)[1])


@pytest.mark.parametrize("parties", [2, 3])
def test_margins_of_whole_units_are_the_plain_ones(parties):
    frames, y = split_table("binary", parties, dirty=True)
    parts, tables = grow(frames, y, "binary", objective="logistic_pieces", n_estimators=8)
    np.testing.assert_array_equal(play_shared(parts, tables).results["p0"], pooled(parts, tables)[0])


def test_pieces_of_rows_and_messages_do_not_change_the_margins(monkeypatch):
    frames, y = split_table("multiclass", 3)
    parts, tables = grow(frames, y, "multiclass", n_estimators=3)
    some = take(tables, slice(0, 75))
    whole = play_shared(parts, some)
    monkeypatch.setattr(hidden_forest, "_WALKED_AT_ONCE", 1)  # eight rows each
    monkeypatch.setattr(arrays, "PIECE_BYTES", 8)
    told: list[tuple[str, int, int]] = []
    watching = Observers([ProgressCalls(phase=lambda *of: told.append(of))])
    active = {"p0": at(predict_active, parts, some, threads=2, observers=watching)}
    cut = play_shared(parts, some, active, threads=2)
    assert told == [("predicting", min(8 * k, 75), 75) for k in range(1, 11)]
    np.testing.assert_array_equal(cut.results["p0"], whole.results["p0"])
    assert len(received(cut, "p0", "MaskedSides")) > len(received(whole, "p0", "MaskedSides")) == 1


@pytest.mark.parametrize(("walked", "block"), [(1, 8), (1, 24), (1 << 20, 16), (48 * 3, 32)])
def test_sides_of_further_parties_are_in_memory_a_block_of_rows_at_a_time(monkeypatch, walked, block):
    """Whether blocks are longer than the rows that are walked at once, or shorter."""
    frames, y = split_table("binary", 4)
    parts, tables = grow(frames, y, "binary", n_estimators=3)
    some, made = take(tables, slice(0, 75)), []
    monkeypatch.setattr(hidden_forest, "_WALKED_AT_ONCE", walked)
    monkeypatch.setattr(hidden_forest, "_ROWS_OF_LINES", block)
    honest = MovingKey.mask

    def watching(self, other, shape, *, sending):
        made.append(shape[1])
        return honest(self, other, shape, sending=sending)

    monkeypatch.setattr(MovingKey, "mask", watching)
    np.testing.assert_array_equal(play_shared(parts, some).results["p0"], pooled(parts, some)[1])
    assert made == [1] * (2 * 2 * -(-75 // block))


@pytest.mark.parametrize("walked", [1, 48 * 3, 1 << 20])
def test_sides_in_memory_are_bounded_however_many_lines_there_are(monkeypatch, walked):
    """A few bytes say how many lines a party shares."""
    frames, y = split_table("binary", 4)
    parts, tables = grow(frames, y, "binary", n_estimators=8)
    some, made = take(tables, slice(0, 75)), []
    monkeypatch.setattr(hidden_forest, "_WALKED_AT_ONCE", walked)
    monkeypatch.setattr(hidden_forest, "_SIDES_OF_LINES", 200)
    honest = shared_prediction._pads

    def watching(key, other, lines, n_rows, *, sending):
        made.append((lines, n_rows))
        return honest(key, other, lines, n_rows, sending=sending)

    monkeypatch.setattr(shared_prediction, "_pads", watching)
    np.testing.assert_array_equal(play_shared(parts, some).results["p0"], pooled(parts, some)[1])
    assert len({lines for lines, _ in made}) == 2, "of two parties"
    assert all(n_rows <= 8 or lines * n_rows <= 200 for lines, n_rows in made)
    assert sum(n_rows for _, n_rows in made) == 2 * 2 * 75


def test_an_active_party_without_columns_predicts():
    frames, y = split_table("binary", 3)
    frames = {"p0": frames["p0"].iloc[:, :0], "p1": frames["p1"].iloc[:, :1], "p2": frames["p2"]}
    parts, tables = grow(frames, y, "binary")
    some = take(tables, slice(0, 40))
    np.testing.assert_array_equal(play_shared(parts, some).results["p0"], pooled(parts, some)[1])


@pytest.mark.parametrize("without", ["p1", "p2"])
def test_a_party_without_splits_predicts_as_the_partner_and_is_asked_nothing_as_another(without):
    frames, y = split_table("binary", 3)
    frames[without] = frames[without].iloc[:, :1] * 0.0
    parts, tables = grow(frames, y, "binary")
    some = take(tables, slice(0, 20))
    played = play_shared(parts, some)
    np.testing.assert_array_equal(played.results["p0"], pooled(parts, some)[1])
    assert [e.step for e in played.transcripts["p2"].entries if e.direction == "received"] == [
        "Terms", "Verdict", *["SidesRequest"] * (without == "p1"), "Finish",
    ]  # fmt: skip


def test_own_splits_alone_need_nobody():
    frames, y = split_table("binary", 3)
    frames |= {name: frames[name].iloc[:, :1] * 0.0 for name in ("p1", "p2")}
    parts, tables = grow(frames, y, "binary", max_depth=8)
    played = play_shared(parts, tables)
    np.testing.assert_array_equal(played.results["p0"], play_plain(parts, tables).results["p0"])
    assert {entry.step for entry in played.transcripts["p0"].entries} == {"Terms", "Verdict", "SharingKey", "Finish"}
    alone = {"p0": tables["p0"]}
    np.testing.assert_array_equal(play_shared(parts, alone).results["p0"], played.results["p0"])


def test_deeper_trees_are_refused():
    frames, y = split_table("regression", 2)
    parts, tables = grow(frames, y, "regression", max_depth=7)
    with pytest.raises(DataError, match=r'at most 6 levels of splits, got 7: .*inference="plain" takes deeper ones'):
        play_shared(parts, tables)


@pytest.mark.parametrize("options", [{"max_depth": 7}, {"max_leaves": 9}])
def test_options_for_deeper_trees_are_refused(options):
    own = SecureBoost(inference="shared")
    with pytest.raises(ConfigError, match=r'inference="shared" needs max_depth of at most 6, got [78]'):
        own.check(BoostingOptions(**options).checked(own))
    own.check(BoostingOptions(max_leaves=9, max_depth=6).checked(own))


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_rows_asked_for_one_by_one_have_the_margins_of_a_batch(task, parties):
    frames, y = split_table(task, parties, dirty=True)
    parts, tables = grow(frames, y, task)
    whole = play_shared(parts, tables).results["p0"]
    rows = [[7], None, [0, 150, 7, 7], list(range(100))]
    _, told = play_online(parts, tables, rows)
    for some, found in zip([of for of in rows if of is not None], told, strict=True):
        np.testing.assert_array_equal(found, whole[some])


def test_a_service_of_a_model_without_the_partys_splits_answers():
    frames, y = split_table("binary", 3)
    frames |= {name: frames[name].iloc[:, :1] * 0.0 for name in ("p1", "p2")}
    parts, tables = grow(frames, y, "binary")
    _, (found,) = play_online(parts, tables, [[3, 4]])
    np.testing.assert_array_equal(found, play_plain(parts, tables).results["p0"][[3, 4]])


# ---------------------------------------------------------------- what is learnt

KINDS = {
    kind.__name__: kind
    for kind in (Terms, Verdict, SharingKey, HiddenForest, FurtherLines, SidesRequest, MaskedSides, SealedStep,
                 OpenedStep, MarginShares, RecordCount, Decisions, OnlineRows, Finish)
}  # fmt: skip


def received(played, name, step):
    return [
        decode_body(entry.content, KINDS[step], peer=entry.peer)
        for entry in played.transcripts[name].entries
        if entry.direction == "received" and entry.step == step
    ]


def shown_decisions(played, receiver, parts, tables):
    """Return others' records whose decisions, packed or not, either side, stand in a message that a party received."""
    entries = [e for e in played.transcripts[receiver].entries if e.direction == "received"]
    assert {e.step for e in entries} <= set(KINDS), "a message the declared types do not know"
    contents = [bytes(entry.content) for entry in entries]
    found = set()
    for name in set(tables) - {receiver}:
        bits = parts[name].splits.decide(tables[name].matrix())
        for record, packed in enumerate(bits):
            sides = np.unpackbits(packed, count=tables[name].n_rows)
            forms = [packed[:-1], ~packed[:-1], np.packbits(sides, bitorder="little")[:-1], sides, 1 - sides]
            if any(form.tobytes() in content for form in forms for content in contents):
                found.add((name, record))
    return found


def no_pads(self, other, shape, *, sending):
    return np.zeros(shape, np.uint64)


def one_pad(self, other, shape, *, sending):
    self._drawn[other] = 0
    return HONEST(self, other, shape, sending=sending)


HONEST = MovingKey.mask


@pytest.mark.parametrize("pads", [HONEST, no_pads], ids=["pads", "planted-no-pads"])
def test_decisions_stand_in_no_message(monkeypatch, pads):
    monkeypatch.setattr(MovingKey, "mask", pads)
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary")
    owned = {(name, record) for name in ("p1", "p2") for record in range(len(parts[name].splits))}
    played = play_shared(parts, tables)
    of_third = {of for of in owned if of[0] == "p2"}
    assert of_third
    assert shown_decisions(played, "p0", parts, tables) == (of_third if pads is no_pads else set())
    assert not shown_decisions(played, "p1", parts, tables)
    assert not shown_decisions(played, "p2", parts, tables)
    plain = play_plain(parts, tables)
    assert shown_decisions(plain, "p0", parts, tables) == owned, "the search finds what plain prediction shows"


@pytest.mark.parametrize("pads", [HONEST, no_pads, one_pad], ids=["pads", "planted-no-pads", "planted-one-pad"])
def test_masked_sides_are_uniform_and_no_pad_serves_twice(monkeypatch, pads):
    """The same rows are asked for again and again, of two parties besides the partner."""
    monkeypatch.setattr(MovingKey, "mask", pads)
    frames, y = split_table("binary", 4, rows=300)
    parts, tables = grow(frames, y, "binary", n_estimators=8)
    # a service that forgets what it received would leave nothing to look at
    monkeypatch.setattr("treaty.messaging.transcript.Transcript.clear", lambda self: None)
    played, told = play_online(parts, tables, [list(range(256))] * 4)
    for found in told:
        np.testing.assert_array_equal(found, told[0])
    of_pads = []
    for name in ("p2", "p3"):
        masked = [
            np.frombuffer(decode_body(e.content, MaskedSides, peer=name).left.data, np.uint8)
            for e in played.transcripts["p0"].entries
            if e.step == "MaskedSides" and e.peer == name
        ]
        assert len(masked) == 4
        (request,) = received(played, name, "SidesRequest")
        records = np.frombuffer(request.records.data, np.int32)
        right = ~parts[name].splits.decide(tables[name].matrix()[:256], records)
        of_pads += [one.reshape(right.shape) ^ right for one in masked]
    fine = uniform(*of_pads)
    for number, (one, other) in enumerate(itertools.combinations(of_pads, 2)):
        lines = min(len(one), len(other))
        assert lines > 4, f"pair {number} is too small to be compared"
        fine = fine and uniform(one[:lines] ^ other[:lines])
    assert fine == (pads is HONEST)


def test_a_party_is_asked_about_its_own_records_alone():
    frames, y = split_table("binary", 4)
    parts, tables = grow(frames, y, "binary")
    played = play_shared(parts, take(tables, slice(0, 8)))
    trees, counts = parts["p0"].forest.trees, {}
    for number, name in ((2, "p2"), (3, "p3")):
        (request,) = received(played, name, "SidesRequest")
        named = np.frombuffer(request.records.data, np.int32).tolist()
        assert named == sorted({int(r) for tree in trees for r in tree.record[tree.source == number]})
        counts[name] = len(named)
    (told,) = received(played, "p1", "FurtherLines")
    assert {name: lines for name, (lines, _) in told.further.items()} == counts


def leaves_within_reach(tree, sides, row, node=0):
    """Return the leaves a row can end in, as far as the active party's own decisions tell."""
    if tree.left[node] < 0:
        return [node]
    children = [tree.left[node], tree.left[node] + 1]
    if tree.source[node] == 0:
        children = [children[0] if sides[tree.record[node], row] else children[1]]
    return [leaf for child in children for leaf in leaves_within_reach(tree, sides, row, child)]


def test_the_margin_of_a_few_trees_gives_their_leaves_away():
    """What the documentation warns of: the active party tries all leaves within reach."""
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary", n_estimators=3, base_score=0.5)  # a first margin of 0
    some = take(tables, slice(0, 30))
    margins = play_shared(parts, some).results["p0"][:, 0]
    trees, unit = parts["p0"].forest.trees, pooled(parts, some)[2]
    sides = np.unpackbits(parts["p0"].splits.decide(some["p0"].matrix()), axis=1, count=30)
    ends = leaves(play_plain(parts, some, collect).results["p0"])
    right = 0
    for row, margin in enumerate(margins):
        within = [leaves_within_reach(tree, sides, row) for tree in trees]
        found = [
            chosen
            for chosen in itertools.product(*within)
            if sum(np.rint(tree.value[leaf] / unit) for tree, leaf in zip(trees, chosen, strict=True)) == margin / unit
        ]
        right += found == [tuple(ends[row])]
    assert right == 30


# ---------------------------------------------------------------- what goes wrong


def test_an_absent_owner_is_named():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary")
    with pytest.raises(DataError, match=r"none of p2; the first \d of 5 rounds do without"):
        play_shared(parts, {name: tables[name] for name in ("p0", "p1")})


def test_plain_and_shared_prediction_do_not_mix():
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary")
    plain = {"p1": at(predict_passive, parts, tables)}
    with pytest.raises(ConfigError, match="expected the same inference everywhere, got 'shared' at p0 and nothing"):
        play_shared(parts, tables, plain)


@pytest.mark.parametrize("loses", ["p1", "p2"])
def test_rounds_whose_splits_a_party_lost_are_left_out(caplog, loses):
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary")
    trees, number = parts["p0"].forest.trees, int(loses[1])
    held = 1 + max(int(tree.record[tree.source == number].max(initial=-1)) for tree in trees[:3])
    for name in SplitTable.__slots__:
        del getattr(parts[loses].splits, name)[held:]
    some = take(tables, slice(0, 30))
    found = play_shared(parts, some).results["p0"]
    assert f"{loses} lost later splits" in caplog.text
    kept = next(k for k, tree in enumerate(trees) if np.any((tree.source == number) & (tree.record >= held)))
    del trees[kept:]
    np.testing.assert_array_equal(found, pooled(parts, some)[1])


def tampering(role, step, change):
    """Return the role with one kind of message changed before it is sent."""

    def tampered(party):
        send = party.send
        party.send = lambda to, m: send(to, change(m) if type(m).__name__ == step else m)
        return role(party)

    return tampered


def of_array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
    def changed(message):
        array = getattr(message, name)
        numbers = np.frombuffer(array.data, array.dtype).reshape(array.shape)
        return replace(message, **{name: Array.of(np.ascontiguousarray(change(numbers)))})

    return changed


def of_payload(message):
    return replace(message, payload=message.payload[:-1])


KEY = (bytes(32), b"")
FAULTS = {
    "forest: records beyond": ("p0", "HiddenForest", of_array("records", lambda a: a + 9999), "expected records below"),
    "forest: no tree": ("p0", "HiddenForest", of_array("records", lambda a: a[:0]), "one tree at least"),
    "forest: another depth": ("p0", "HiddenForest", of_array("records", lambda a: a[:, :2]), "HiddenForest.records"),
    "forest: another type": ("p0", "HiddenForest", of_array("records", lambda a: a.astype("i8")), "HiddenForest"),
    "forest: levels": ("p0", "HiddenForest", of_array("active", lambda a: a[:0]), "expected 1 to 6 levels"),
    "forest: outputs": ("p0", "HiddenForest", lambda m: replace(m, outputs=2), "trees of at most 1 outputs"),
    "forest: no outputs": ("p0", "HiddenForest", lambda m: replace(m, outputs=0), "outputs"),
    "forest: bytes": ("p0", "HiddenForest", lambda m: replace(m, nbytes=9), "nbytes"),
    "lines: itself": ("p0", "FurtherLines", lambda m: replace(m, further={"p1": (9, KEY)}), "other passive parties"),
    "lines: nobody": ("p0", "FurtherLines", lambda m: replace(m, further={"x": (9, KEY)}), "other passive parties"),
    "lines: key": ("p0", "FurtherLines", lambda m: replace(m, further={"p2": (20, KEY)}), "key of large order"),
    "lines: too many": (
        "p0", "FurtherLines", lambda m: replace(m, further={"p2": (2**31 - 1, m.further["p2"][1])}), "no more lines",
    ),
    "request: beyond": ("p0", "SidesRequest", of_array("records", lambda a: a + 9999), "ascending numbers below"),
    "request: order": ("p0", "SidesRequest", of_array("records", lambda a: a[::-1]), "ascending numbers below"),
    "request: type": ("p0", "SidesRequest", of_array("records", lambda a: a.astype("f4")), "SidesRequest.records"),
    "request: key": ("p0", "SidesRequest", lambda m: replace(m, key=KEY), "key of large order"),
    "request: short key": ("p0", "SidesRequest", lambda m: replace(m, key=(b"", b"")), "SidesRequest"),
    "step of the active": ("p0", "SealedStep", of_payload, "a step"),
    "step of the partner": ("p1", "SealedStep", of_payload, "a step"),
    "margins: type": ("p1", "MarginShares", of_array("shares", lambda a: a.astype("u4")), "MarginShares.shares"),
    "margins: rows": ("p1", "MarginShares", of_array("shares", lambda a: a[1:]), "MarginShares.shares"),
    "margins: outputs": ("p1", "MarginShares", of_array("shares", lambda a: np.c_[a, a]), "MarginShares.shares"),
    "key of the partner": ("p1", "SharingKey", lambda m: replace(m, key=(b"short", b"")), "SharingKey"),
    "key of another": ("p2", "SharingKey", lambda m: replace(m, key=(b"short", b"")), "SharingKey"),
    "sides: lines": ("p2", "MaskedSides", of_array("left", lambda a: a[1:]), "MaskedSides.left"),
    "sides: rows": ("p2", "MaskedSides", of_array("left", lambda a: a[:, 1:]), "MaskedSides.left"),
    "sides: type": ("p2", "MaskedSides", of_array("left", lambda a: a.astype("f8")), "MaskedSides.left"),
}  # fmt: skip


@pytest.fixture(scope="module")
def three():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary", n_estimators=3)
    return parts, take(tables, slice(0, 24))


@pytest.mark.parametrize("case", FAULTS)
def test_a_malformed_message_names_its_sender(three, case):
    parts, tables = three
    faulty, step, change, expected = FAULTS[case]
    honest = at(predict_active if faulty == "p0" else FOLLOW, parts, tables)
    with pytest.raises(PeerProtocolError, match=expected) as caught:
        play_shared(parts, tables, {faulty: tampering(honest, step, change)})
    assert caught.value.peer == faulty


@pytest.mark.parametrize("forged", ["FurtherLines", "SidesRequest"])
def test_an_active_party_that_swaps_a_key_is_refused(three, forged):
    """Either end of a pair of passive parties checks that the other's key is signed with its certificate."""
    parts, tables = three
    identities = {name: make_identity(name) for name in ("p1", "p2")}
    pinned = {name: of.certificate for name, of in identities.items()}
    passive = {name: at(FOLLOW, parts, tables, vouching=Signer(of, pinned)) for name, of in identities.items()}
    np.testing.assert_array_equal(play_shared(parts, tables, passive).results["p0"], pooled(parts, tables)[1])
    own = X25519PrivateKey.generate().public_key().public_bytes_raw()

    def swapped(message):
        if forged == "SidesRequest":
            return replace(message, key=(own, message.key[1]))
        lines, (_, signature) = message.further["p2"]
        return replace(message, further={"p2": (lines, (own, signature))})

    active = tampering(at(predict_active, parts, tables), forged, swapped)
    with pytest.raises(PeerProtocolError, match=r"expected a key signed by p. with the key of its certificate"):
        play_shared(parts, tables, {**passive, "p0": active})


# ---------------------------------------------------------------- arithmetic


def leaf(*values):
    dtypes = (np.int16, np.int32, np.int32, np.float64, np.float64, np.float64, np.int64)
    return [Tree(*(np.array([x], of) for x, of in zip((-1, -1, -1, value, 0, 0, 0), dtypes, strict=True)))
            for value in values]  # fmt: skip


@pytest.mark.parametrize("value", [1e-300, 3e-7, 0.3, 1.0, 2.0, 7e5], ids=str)
def test_the_largest_leaf_value_takes_the_precision_bits(value):
    trees = leaf(value / 3, -value)
    weights = leaf_weights(trees, 1, unit_of(trees, 0.0))
    assert 2 ** (PRECISION_BITS - 1) <= -weights[1, 0] <= 2**PRECISION_BITS
    assert unit_of(trees, 0.25) == 0.25
    assert unit_of(leaf(0.0), 0.0) == 2.0**-PRECISION_BITS


@pytest.mark.parametrize("trees", [1, 2, 63, 64, 127, 128, 10_000])
def test_shares_hold_any_sum(trees):
    largest = np.full((trees, 2), 1 << PRECISION_BITS)
    nbytes = _bytes_of(largest, 1, whole=False)
    assert (trees << PRECISION_BITS) < 1 << 8 * nbytes - 1
    assert (trees << PRECISION_BITS) >= 1 << 8 * (nbytes - 1) - 1, "no byte more than needed"
    # by the number of trees alone: weights are not told
    assert nbytes == _bytes_of(largest * 0, 1, whole=False)
    assert _bytes_of(np.full((trees, 2), -(1 << 14)), 1, whole=True) == (3 if trees < 512 else 4)
