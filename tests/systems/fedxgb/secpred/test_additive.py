"""Rows on additive shares of two edge servers with a third one's numbers: as on Shamir shares, and as well hidden."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from crypto.sharing.dealer_attacks import leaf_values_found
from systems.fedxgb.playing import (
    crowd_rows,
    dying,
    laid_out,
    once,
    options_of,
    play_crowd,
    spoiling,
    uniform,
    user_program,
)
from systems.fedxgb.secpred.hidden_models import (
    assert_plain,
    layout,
    play_prediction,
    predict,
    role_of,
    shards,
    trained,
)
from transcripts import by_type
from treaty.crypto.keystream import FreshShares
from treaty.crypto.sharing.additive_routing import open_integers
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, CryptoError, PeerAborted, PeerError, PeerLost, PeerProtocolError
from treaty.messaging.messages import Array, decode_body, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, predict_pooled
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.fedxgb import prediction as secpred
from treaty.systems.fedxgb import secpred as crowd_routing
from treaty.systems.fedxgb.messages import (
    Attendance,
    LeafShares,
    PredictionTerms,
    QueriesLeft,
    RowOwners,
    SideShares,
    SplitShares,
    ValueShares,
)
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.pieces import RowShares
from treaty.systems.fedxgb.prediction import QueryRecord
from treaty.systems.fedxgb.roles import check_edges
from treaty.systems.fedxgb.secpred import HiddenModel
from treaty.systems.fedxgb.shares import (
    AdditiveRouting,
    Dealer,
    DealtCorrections,
    SharedNumbers,
    WantedLeaves,
    WantedLevel,
    WantedRows,
)
from treaty.systems.options import converted
from treaty.trees.slots import VALUE_BITS

pytestmark = pytest.mark.slow

ADDITIVE = {"comparison": "additive"}
EDGES = ["edge0", "edge1", "edge2"]


def numbers(array: Array) -> np.ndarray:
    return view(array, np.uint64, array.shape, peer="x", what="")


def bits(array: Array) -> np.ndarray:
    return view(array, np.uint8, array.shape, peer="x", what="")


def received(played, name, kind):
    entries = [e for e in played.transcripts[name].entries if e.direction == "received" and e.step == kind.__name__]
    return [(e.peer, e.message(kind)) for e in entries]


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_margins_are_the_plain_models_and_those_of_shamir_shares(task):
    part, new = trained(task)
    tables = shards(part, new)
    found = predict(part, tables, **ADDITIVE)
    assert_plain(part, tables, found)
    shamir = predict(part, tables, comparison="shamir")
    assert all(np.array_equal(found[name], shamir[name]) for name in tables)


def test_small_pieces_of_rows_and_trees_give_the_same():
    part, new = trained("multiclass")
    tables = shards(part, new.iloc[:20])
    with patch.object(secpred, "_AT_ONCE", 20), patch.object(secpred, "_NUMBERS", 400):
        played = play_prediction(part, tables, **ADDITIVE)
    assert by_type(played.transcripts["server"], "received")["TreesRequest"][0] == 2 * 5
    assert_plain(part, tables, played.results)


def test_a_tree_without_splits_and_a_user_without_rows_are_nothing_special():
    part, new = trained("binary", 1)
    stump = part.forest.trees[0]
    lone = type(stump)(*(getattr(stump, name)[:1].copy() for name in type(stump).__slots__))
    lone.left[:], lone.source[:], lone.record[:], lone.value[:] = -1, -1, -1, 0.375
    some = to_table(new.iloc[:5], schema=part.schema)
    tables = {"ann": Table(part.schema, [c[:0] for c in some.columns], 0), "ben": some}
    for trees in ([lone], [lone, stump]):
        forest = type(part.forest)(part.forest.objective, part.forest.sources, trees=trees)
        mixed = ModelPart(
            model_id="m", party="pooled", schema=part.schema, splits=part.splits, forest=forest, bins=part.bins
        )
        assert_plain(mixed, tables, play_prediction(mixed, tables, **ADDITIVE).results)


@pytest.mark.parametrize(("task", "edges"), [("binary", 3), ("multiclass", 4), ("regression", 7)])
def test_training_gives_the_trees_and_margins_of_shamir_shares(task, edges):
    """Of all edge servers, and of committees of three."""
    parts, _, classes = crowd_rows(task, users=3 * edges)
    found = []
    for own in (ADDITIVE, {"comparison": "shamir"}, {"comparison": "shamir", "committee": 3}):
        crowded = play_crowd(parts, options_of(random_state=3, colsample_bytree=0.5, **own), classes, edges=edges)
        assert not crowded.failures
        for name, rows in parts.items():
            assert np.array_equal(crowded.results[name].T, predict_pooled([crowded.model], [rows.table]))
        trees = [[getattr(tree, field).tolist() for field in tree.__slots__] for tree in crowded.model.forest.trees]
        found.append((repr(trees), [crowded.results[name].tolist() for name in parts]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["p0", "p2"])
def test_who_drops_out_as_its_rows_go_down_is_there_in_the_next_tree(name):
    parts, _, classes = crowd_rows(users=9)
    options = options_of(min_child_samples=1, **ADDITIVE)
    for time in (1, 3):  # the first level, and the values
        crowded = play_crowd(parts, options, classes, edges=3, leaves={name: once(1, "prediction", time)})
        assert not crowded.failures
        assert all(set(sums.cohort) == set(parts) for sums in crowded.of_tree(2))
        for user, rows in parts.items():
            assert np.array_equal(crowded.results[user].T, predict_pooled([crowded.model], [rows.table]))


# ---------------------------------------------------------------- hidden


@pytest.fixture(scope="module")
def prediction():
    part, new = trained("multiclass", 4)
    tables = shards(part, new)
    return part, tables, play_prediction(part, tables, record_content=True, **ADDITIVE)


def test_everybody_receives_only_what_the_text_says(prediction):
    part, tables, played = prediction

    def steps(name):
        return set(by_type(played.transcripts[name], "received"))

    terms = {"PredictionTerms", "ModelSize"}
    computing = terms | {"SplitShares", "LeafShares", "RowShares", "RowCounts", "SharedNumbers", "DealtCorrections"}
    assert steps("server") == {"TreesRequest"}
    assert steps("edge0") == steps("edge1") == computing
    assert steps("edge2") == {"DealerTerms", "ModelSize"} | {"WantedRows", "WantedLevel", "WantedLeaves", "DealingEnd"}
    for name, table in tables.items():
        assert steps(name) <= {"PredictionTerms", "QueriesLeft", "RowsTaken", "ValueShares"}
        told = dict(received(played, name, ValueShares))
        assert set(told) == {"edge0", "edge1"}
        opened = open_integers(np.stack([numbers(told[edge].shares) for edge in ("edge0", "edge1")]))
        assert opened.shape == (3, table.n_rows)  # sums over trees, one number a row and output
        assert np.array_equal(
            opened.T / 2.0**VALUE_BITS + part.forest.objective.base_margins, played.results[name].margins
        )


def test_the_dealer_is_told_numbers_of_rows_and_slots_alone(prediction):
    part, tables, played = prediction
    rows, trees = sum(table.n_rows for table in tables.values()), len(part.forest.trees)
    contents = b"".join(bytes(e.content) for e in played.transcripts["edge2"].entries if e.direction == "received")
    assert not any(name.encode() in contents for name in part.schema.names)
    assert [asked.rows for _, asked in received(played, "edge2", WantedRows)] == [rows]
    levels = [(a.start, a.rows, a.trees, a.slots) for _, a in received(played, "edge2", WantedLevel)]
    assert levels == [(0, rows, trees, 1 << level) for level in range(3)]
    leaves = [(asked.rows, asked.leaves) for _, asked in received(played, "edge2", WantedLeaves)]
    assert leaves == [(rows, 8 * trees // 3)] * 3


@pytest.mark.parametrize("edge", ["edge0", "edge1"])
def test_one_servers_view_is_uniform(prediction, edge):
    """Chi-squared on its shares, what the other one sends it and what it is dealt: false alarms once in a million."""
    _, _, played = prediction
    fields = {RowShares: "shares", SplitShares: "weights", LeafShares: "values", SharedNumbers: "numbers"}
    if edge == "edge1":
        fields[DealtCorrections] = "corrections"
    for kind, field in fields.items():
        arrays = [numbers(getattr(message, field)) for _, message in received(played, edge, kind)]
        assert sum(array.size for array in arrays) > 40, kind
        assert uniform(*arrays), kind


def test_either_share_of_a_users_rows_says_nothing_and_both_say_all(prediction):
    """What the text says of servers that collude; and that one share is no other's complement in a fixed way."""
    part, tables, played = prediction
    bins = secpred.unpack_bins(decode_body(part.bins, secpred.CommonBins, peer="x"), part.schema, (255, 255), "x")
    for name, table in tables.items():
        own = [numbers(dict(received(played, edge, RowShares))[name].shares) for edge in ("edge0", "edge1")]
        encoded = layout(part).encode_rows(bins.transform(table, 1))
        assert np.array_equal(open_integers(np.stack(own)), encoded)
        assert len(np.unique(own[0])) == own[0].size


@pytest.mark.parametrize("edges", [3, 4])
def test_in_training_two_edge_servers_have_shares_of_a_users_rows_and_a_third_deals(edges):
    parts, _, classes = crowd_rows(users=3 * edges)
    crowded = play_crowd(parts, options_of(**ADDITIVE), classes, edges=edges, record_content=True)
    shared = {"RowShares", "SplitShares", "LeafShares", "SharedNumbers", "DealtCorrections"}
    wanted = {"WantedRows", "WantedLevel", "WantedLeaves", "DealingEnd"}
    for k in range(edges):
        own, after, dealer = (f"edge{(k + step) % edges}" for step in range(3))
        assert crowded.steps(own) >= shared | wanted
        assert {peer for peer, _ in received(crowded, dealer, WantedRows)} == {own}
        for user in list(parts)[k::edges]:
            assert {peer for peer, _ in received(crowded, user, SideShares)} == {own, after}
            assert {name for name in crowded.transcripts if user in dict(received(crowded, name, RowShares))} == {
                own, after,
            }  # fmt: skip
    for kind, field in ((RowShares, "shares"), (SplitShares, "weights"), (SharedNumbers, "numbers")):
        assert uniform(*(numbers(getattr(message, field)) for message in crowded.received("edge1", kind))), kind
    sides = [bits(message.shares) for user in parts for message in crowded.received(user, SideShares)]
    assert set(np.concatenate(sides, axis=None).tolist()) == {0, 1}


# ---------------------------------------------------------------- the dealer and users together


AS_COMPUTED = {name: lambda fresh, message, shares: shares for name in ("numbers", "bits")}  # for `FreshShares`


def leaf_values_of(heard, own, leaf, told):
    """Return leaf values as the dealer and users find them who have the rows `own`, and the true ones.

    `heard` are all messages from the dealer and the server to both edge servers; the dealer has its own of them.
    """
    dealt = [of[DealtCorrections][-1] for of in heard]
    true = open_integers(np.stack([numbers(of[LeafShares][-1].values) for of in heard]))[0]
    corrections = numbers(dealt[1].corrections)
    keys = dealt[0].key, dealt[1].key
    return leaf_values_found(own, leaf, (keys, corrections), told, len(true), len(corrections)), true


@pytest.mark.parametrize("anew", [False, True], ids=["as computed", "anew"])
def test_in_training_dealer_and_users_find_leaf_values_only_in_shares_as_computed(anew):
    parts, _, classes = crowd_rows(users=9)
    with nullcontext() if anew else patch.multiple(FreshShares, **AS_COMPUTED):
        crowded = play_crowd(parts, options_of(n_estimators=1, **ADDITIVE), classes, edges=3, record_content=True)
    for name, rows in parts.items():
        assert np.array_equal(crowded.results[name].T, predict_pooled([crowded.model], [rows.table]))
    (everybody,) = {tuple(of.users) for of in crowded.received("edge0", RowOwners)}
    together = [name for name in everybody if name in ("p0", "p3", "p6")][:2]  # of the first edge server's domain
    told, leaf = [np.zeros(0, np.uint64)] * 2, np.zeros(0, np.intp)
    for name in together:
        by_edge = [[m for peer, m in received(crowded, name, SideShares) if peer == edge] for edge in EDGES[:2]]
        upper, lower = (bits(a.shares)[0] ^ bits(b.shares)[0] for a, b in zip(*by_edge, strict=True))
        leaf = np.append(leaf, 3 - 2 * upper.astype(np.intp) - lower)
        values = dict(received(crowded, name, ValueShares))
        told = [np.append(of, numbers(values[edge].shares)) for of, edge in zip(told, EDGES, strict=False)]
    # both edge servers play that domain's committee first, and the third one deals for no other of theirs
    heard = [
        {
            DealtCorrections: [m for peer, m in received(crowded, edge, DealtCorrections) if peer == "edge2"],
            LeafShares: crowded.received(edge, LeafShares)[:1],
        }
        for edge in EDGES[:2]
    ]
    found, true = leaf_values_of(heard, np.arange(len(leaf)), leaf, told)
    assert np.array_equal(found, true) == (not anew)
    assert np.any(found == true) == (not anew)


@pytest.mark.parametrize("anew", [False, True], ids=["as computed", "anew"])
def test_in_prediction_dealer_and_a_user_find_leaf_values_only_in_shares_as_computed(anew):
    """Even a user who knows which leaves its rows reach, as in training."""
    part, new = trained("binary", 1)
    tables, paths, values = shards(part, new), {}, AdditiveRouting.leaves

    def noted(routing, *of):
        paths[routing._own] = of[0]
        return values(routing, *of)

    with (
        patch.object(AdditiveRouting, "leaves", noted),
        nullcontext() if anew else patch.multiple(FreshShares, **AS_COMPUTED),
    ):
        played = play_prediction(part, tables, record_content=True, **ADDITIVE)
    assert_plain(part, tables, played.results)
    own = np.arange(10, 60)
    leaf = open_integers(np.stack([paths[0], paths[1]])).argmax(axis=0)[own]
    sent = dict(received(played, "cat", ValueShares))
    told = [numbers(sent[edge].shares)[0] for edge in EDGES[:2]]
    heard = [
        {kind: [m for _, m in received(played, edge, kind)] for kind in (DealtCorrections, LeafShares)}
        for edge in EDGES[:2]
    ]
    found, true = leaf_values_of(heard, own, leaf, told)
    assert np.array_equal(found, true) == (not anew)
    assert np.any(found == true) == (not anew)


def test_sides_go_to_users_in_other_shares_than_those_computed():
    """Other bits at each level, the same at both servers; with those computed, the dealer and a user try splits."""
    noted, fresh = {0: {}, 1: {}}, FreshShares.bits

    def bits_of(self, message, shares):
        found = fresh(self, message, shares)
        noted[self._own][self._seed, message] = shares ^ found, found
        return found

    parts, _, classes = crowd_rows(users=9)
    with patch.object(FreshShares, "bits", bits_of):
        crowded = play_crowd(parts, options_of(**ADDITIVE), classes, edges=3, record_content=True)
    assert noted[0].keys() == noted[1].keys()
    assert len(noted[0]) == 3 * 2 * 2  # committees, trees, levels
    changed = [mask for mask, _ in noted[0].values()]
    assert all(np.array_equal(mask, noted[1][key][0]) for key, (mask, _) in noted[0].items())
    assert len({mask.tobytes() for mask in changed}) == len(changed)
    assert all(abs(mask.mean() - 0.5) < 6 * 0.5 / np.sqrt(mask.size) for mask in changed)
    told = {bits(m.shares).tobytes() for user in parts for m in crowded.received(user, SideShares)}
    sizes = [np.cumsum([0, *(len(parts[user].y) for user in of)]) for of in committee_users(crowded)]
    cut = {
        found[:, a:b].tobytes()
        for of in noted.values() for _, found in of.values() for ends in sizes if found.shape[1] == ends[-1]
        for a, b in itertools.pairwise(ends.tolist())
    }  # fmt: skip
    assert told <= cut


def committee_users(crowded):
    """Return each domain's users in the order in which their committee keeps them."""
    everybody = crowded.received("edge0", RowOwners)[0].users
    return [[name for name in everybody if int(name[1:]) % 3 == k] for k in range(3)]


def test_every_share_for_users_has_a_keystream_of_its_own():
    """Pieces, levels, trees and calls: no number is used twice under a seed, of which each run has a new one."""
    used, fresh = [], FreshShares._stream

    def noted(self, message):
        used.append((self._seed, self._own, message))
        return fresh(self, message)

    with (
        patch.object(FreshShares, "_stream", noted),
        patch.object(crowd_routing, "_AT_ONCE", 50),
    ):
        parts, _, classes = crowd_rows("multiclass", users=9)
        play_crowd(parts, options_of(**ADDITIVE), classes, edges=3)
        part, new = trained("multiclass")
        for _ in range(2):
            with patch.object(secpred, "_AT_ONCE", 20), patch.object(secpred, "_NUMBERS", 400):
                play_prediction(part, shards(part, new.iloc[:20]), **ADDITIVE)
    assert len(set(used)) == len(used) > 2 * 2 * 5
    by_server = [sorted((seed, message) for seed, own, message in used if own == k) for k in range(2)]
    assert by_server[0] == by_server[1]
    assert len({seed for seed, _, _ in used}) == 3 + 2  # committees of the training, predictions


# ---------------------------------------------------------------- users that vanish or lie


GARBAGE = {
    "another message": lambda message: Attendance(),
    "shares of two words": lambda message: RowShares(
        Array.of(np.zeros((*message.shares.shape, 2), np.uint64)), message.n_rows
    ),
    "other type": lambda message: RowShares(Array.of(np.zeros(message.shares.shape, np.int64)), message.n_rows),
    "columns missing": lambda message: RowShares(Array.of(np.zeros((3, 1), np.uint64)), 3),
    "nothing": lambda message: None,
}


@pytest.mark.parametrize("fault", GARBAGE)
@pytest.mark.parametrize("edge", ["edge0", "edge1"])
def test_others_get_theirs_when_a_user_sends_one_server(fault, edge):
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])

    def lies(party: Party) -> None:
        send = party.send

        def spoiled(to, message):
            message = GARBAGE[fault](message) if to == edge else message
            if message is not None:
                send(to, message)

        party.send = spoiled
        with pytest.raises(PeerError, match=r"left|continues without ben"):
            secpred.user(role_of(party, rows=tables["ben"], **ADDITIVE))

    played = play_prediction(part, tables, roles={"ben": lies}, patience=2.5, **ADDITIVE)
    del tables["ben"]
    assert_plain(part, tables, played.results)


def test_numbers_that_are_no_bins_spoil_their_own_rows_alone():
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    rng = np.random.default_rng(1)

    def lies(party: Party) -> None:
        for edge in ("edge0", "edge1"):
            party.send(edge, RowShares(Array.of(rng.integers(0, 2**64, (2, layout(part).columns), np.uint64)), 2))
        for edge in ("edge0", "edge1"):
            party.receive(edge, PredictionTerms, QueriesLeft)

    played = play_prediction(part, tables, roles={"ben": lies}, **ADDITIVE)
    del tables["ben"]
    assert_plain(part, tables, played.results)


@pytest.mark.parametrize("name", ["p1", "p2"], ids=["of a server that computes", "of the dealer"])
def test_training_goes_on_without_a_user_that_shares_no_rows_or_dies(name):
    parts, _, classes = crowd_rows(users=9)
    crowd = laid_out(list(parts), 3)
    options = options_of(**ADDITIVE)
    wrong = spoiling(
        user_program(parts, options, classes, crowd, name), RowShares, lambda party, message: Attendance(), tree=None
    )
    dies = dying(lambda leaves: user_program(parts, options, classes, crowd, name, leaves), once(1, "prediction"))
    for program in (wrong, dies):
        crowded = play_crowd(parts, options, classes, layout=crowd, roles={name: program})
        assert set(crowded.failures) <= {name}
        assert not any(name in sums.cohort for sums in crowded.of_tree(2))
        for user in set(parts) - {name}:
            assert np.array_equal(crowded.results[user].T, predict_pooled([crowded.model], [parts[user].table]))


# ---------------------------------------------------------------- edge servers and server


@pytest.mark.parametrize(
    ("edge", "kind"),
    [
        ("edge0", SharedNumbers), ("edge1", SharedNumbers), ("edge0", DealtCorrections), ("edge1", DealtCorrections),
        ("edge2", DealtCorrections),
        ("edge2", WantedRows), ("edge2", WantedLevel), ("edge2", WantedLeaves),
    ],
    ids=lambda what: what if isinstance(what, str) else what.__name__,
)  # fmt: skip
def test_a_lost_edge_server_ends_the_prediction_for_all(edge, kind):
    """It gets a message and says no more; the dealer also when one of the two has its numbers and the other has not."""
    part, new = trained("binary")

    def dies(party: Party) -> None:
        send, receive = party.send, party.receive

        def last(message):
            if isinstance(message, kind):
                raise SystemError

        def says(to, message):
            send(to, message)
            last(message if edge == "edge2" else None)

        def hears(frm, *kinds, **how):
            heard = receive(frm, *kinds, **how)
            last(heard)
            return heard

        party.send, party.receive = says, hears
        try:
            secpred.edge(role_of(party, **ADDITIVE), QueryRecord(None))
        except SystemError:
            party.channel.close()

    with pytest.raises(PeerLost, match=edge):
        play_prediction(part, shards(part, new.iloc[:14]), roles={edge: dies}, **ADDITIVE)


@pytest.mark.parametrize("wanted", [WantedRows, WantedLevel, WantedLeaves])
def test_a_dealer_that_dies_in_training_ends_it_for_all(wanted):
    parts, _, classes = crowd_rows(users=9)
    serve = Dealer.serve

    def until(dealer):
        receive = dealer._party.receive

        def dies(frm, *kinds, **how):
            said = receive(frm, *kinds, **how)
            if isinstance(said, wanted):
                dealer._party.channel.close()
            return said

        if dealer._party.name == "edge2":
            dealer._party.receive = dies
        serve(dealer)

    with patch.object(Dealer, "serve", until):
        crowded = play_crowd(parts, options_of(**ADDITIVE), classes, edges=3, tolerate=["server", *EDGES])
    assert set(crowded.failures) == {*parts, "server", *EDGES}
    assert all(isinstance(crowded.failures[name], PeerLost | PeerAborted) for name in (*parts, "edge0", "edge1"))
    assert any("edge2 is lost" in str(error) for error in crowded.failures.values())


@pytest.mark.parametrize(
    ("edge", "change", "words"),
    [
        ("edge2", {"corrections": Array.of(np.zeros(3, np.uint64))}, "DealtCorrections.corrections from edge2"),
        ("edge2", {"corrections": Array.of(np.zeros(0, np.float64))}, "DealtCorrections.corrections from edge2"),
        ("edge2", {"key": b"short"}, "from edge2"),
        ("edge0", {"start": 50}, "at most 60 rows, got 110 - at WantedLevel.rows from edge0"),
        ("edge0", {"slots": 0}, "from edge0"),
        ("edge0", {"rows": -1}, "from edge0"),
        ("edge0", {"trees": 1 << 40}, "from edge0"),
        ("edge0", {"slots": 2}, "DealtCorrections.corrections from edge2"),
        ("edge1", {"numbers": Array.of(np.zeros(3, np.uint64))}, "SharedNumbers.numbers from edge1"),
        ("edge1", {"numbers": Array.of(np.zeros(3, np.int32))}, "SharedNumbers.numbers from edge1"),
    ],
    ids=lambda what: "" if isinstance(what, str) else next(iter(what)),
)
def test_what_edge_servers_send_each_other_is_checked(edge, change, words):
    part, new = trained("binary")
    kind = {"edge0": WantedLevel, "edge1": SharedNumbers, "edge2": DealtCorrections}[edge]

    def wrong(party: Party) -> None:
        send = party.send
        party.send = lambda to, message: send(
            to, msgspec.structs.replace(message, **change) if isinstance(message, kind) else message
        )
        secpred.edge(role_of(party, **ADDITIVE), QueryRecord(None))

    with pytest.raises((PeerProtocolError, CryptoError), match=words):
        play_prediction(part, shards(part, new), roles={edge: wrong}, **ADDITIVE)


@pytest.mark.parametrize("wrong", ["more trees than said", "leaves of fewer trees", "fewer leaves"])
def test_what_the_server_sends_is_checked(wrong):
    part, new = trained("binary")
    split, finish = HiddenModel.split, HiddenModel.finish
    more = 2 if wrong == "more trees than said" else 1

    def other_finish(model, values):
        values = values[:1] if wrong == "leaves of fewer trees" else values
        finish(model, np.tile(values[:, :2] if wrong == "fewer leaves" else values, (more, 1)))

    with (
        patch.object(HiddenModel, "split", lambda model, chosen: split(model, list(chosen) * more)),
        patch.object(HiddenModel, "finish", other_finish),
        pytest.raises(PeerProtocolError, match="from server"),
    ):
        play_prediction(part, shards(part, new), **ADDITIVE)


def test_who_is_told_another_comparison_than_its_own_does_not_share_rows():
    part, new = trained("binary")
    tables = shards(part, new)
    with pytest.raises(ConfigError, match='to which ann consents, got "additive"'):
        play_prediction(
            part,
            tables,
            roles={"ann": lambda party: secpred.user(role_of(party, rows=tables["ann"]))},
            **ADDITIVE,
        )
    with pytest.raises(ConfigError, match='comparison="additive", to which edge1 consents, got "shamir"'):
        play_prediction(
            part,
            tables,
            roles={"edge1": lambda party: secpred.edge(role_of(party, **ADDITIVE), QueryRecord(None))},
        )


# ---------------------------------------------------------------- refused


def test_additive_shares_are_for_a_hidden_model_and_three_edge_servers():
    part, new = trained("binary")
    tables = shards(part, new)
    with pytest.raises(ConfigError, match="two that compare and a dealer, got 5"):
        play_prediction(part, tables, edges=5, **ADDITIVE)
    with pytest.raises(ConfigError, match="3 edge servers or more, got 2"):
        predict(part, tables, edges=2, **ADDITIVE)
    assert_plain(part, tables, predict(part, tables, edges=5, **ADDITIVE))  # by the first three
    for expose in ("model", "paper"):
        with pytest.raises(ConfigError, match=f'hidden model, and expose="{expose}"'):
            options_of(expose=expose, allow_insecure=True, **ADDITIVE)
    with pytest.raises(ConfigError, match="has no option 'comparison'"):
        converted(ADDITIVE, FederBoostHorizontal, "FederBoostHorizontal")
    with pytest.raises(ConfigError, match="expected one of shamir, additive"):
        converted({"comparison": "garbled"}, FedXGB, "FedXGB")
    with pytest.raises(ConfigError, match="two edge servers and a dealer, got committee=5: leave it out"):
        options_of(committee=5)
    with pytest.raises(ConfigError, match='hidden model, and expose="model"'):
        options_of(expose="model", comparison="shamir", committee=5)
    with pytest.raises(ConfigError, match="expected 5 edge servers or more, got 4"):
        check_edges(FedXGB(comparison="shamir", committee=5), 4)
    assert FedXGB().compares == "additive"
