"""FederBoost on rows: what is grown, what is seen, and what becomes of it when participants are lost."""

from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from marks import slow
from systems.federboost_horizontal.playing import bins_told, dealt, member, options_of, pooled_on, train
from systems.horizontal.uniform import looks_uniform
from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.data.binning import fit_bins
from treaty.data.quantile_search import sorted_keys
from treaty.errors import ConfigError, PeerAborted, PeerProtocolError, TreatyError
from treaty.messaging.messages import Array, decode_body
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, predict_pooled
from treaty.systems.federboost_horizontal.trees import TreeMember, TreeStep
from treaty.systems.horizontal import members as masked_members
from treaty.systems.horizontal.masked_sums import MaskedInput, MaskShares, SealedShares
from treaty.systems.horizontal.members import Collector, SurvivorSignature
from treaty.systems.horizontal.own_rows import Draws, OwnRows
from treaty.systems.horizontal.quantiles import (
    ProbeRequest,
    shown_by_search,
)
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import SplitTable
from treaty.trees.objectives import make_objective
from treaty.trees.slots import LevelSplits, RowShard

TASKS = pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])


def margins(part, rows):
    return predict_pooled([part], [rows.table])


@TASKS
@pytest.mark.parametrize(("members", "leader"), [(3, "p0"), slow(5, "p3"), slow(3, "server")])
def test_trees_are_the_plain_growers_on_the_same_bins(task, members, leader):
    parts, whole, classes = dealt(task, members)
    options = options_of()
    played = train(parts, options, classes, leader=leader, record_content=True)
    other = next(name for name in parts if name != leader)
    bins, agreed = bins_told(played, other, whole.table.schema)
    model = played.results[leader]
    forest, splits = pooled_on(bins, whole, options, classes)
    (clip,) = np.frombuffer(agreed.clips.data)
    assert (forest.objective.grad_clip, 1.0) == (clip, agreed.weight_bound)
    assert repr(model.splits) == repr(splits)
    for grown, plain in zip(model.forest.trees, forest.trees, strict=True):
        for name in ("left", "record", "value"):
            np.testing.assert_array_equal(getattr(grown, name), getattr(plain, name))
        np.testing.assert_allclose(grown.gain, plain.gain, rtol=0.006)  # of three digits
        assert not grown.cover.any()
        assert not grown.count.any()
    for part in played.results.values():
        np.testing.assert_array_equal(margins(part, whole), margins(model, whole))
        assert repr(part.splits) == repr(splits)


def test_columns_are_sampled_alike_and_rows_by_each_for_itself():
    parts, whole, classes = dealt("binary", 3)
    options = options_of(colsample_bytree=0.4, random_state=5)
    played = train(parts, options, classes, record_content=True)
    bins, _ = bins_told(played, "p1", whole.table.schema)
    forest, _ = pooled_on(bins, whole, options, classes)
    for grown, plain in zip(played.results["p0"].forest.trees, forest.trees, strict=True):
        np.testing.assert_array_equal(grown.value, plain.value)
    sampled = options_of(subsample=0.5, random_state=5)
    first, second = (train(parts, sampled, classes).results["p2"] for _ in range(2))
    np.testing.assert_array_equal(margins(first, whole), margins(second, whole))
    assert not np.array_equal(margins(first, whole), margins(train(parts, options_of(), classes).results["p2"], whole))


def test_weights_count_as_pooled():
    parts, whole, classes = dealt("binary", 3)
    rng = np.random.default_rng(3)
    parts = {name: replace(rows, weight=rng.random(len(rows.y)) * 3) for name, rows in parts.items()}
    whole = replace(whole, weight=np.concatenate([rows.weight for rows in parts.values()]))
    options = options_of()
    played = train(parts, options, classes, record_content=True)
    bins, agreed = bins_told(played, "p1", whole.table.schema)
    forest, _ = pooled_on(bins, whole, options, classes)
    assert forest.objective.weight_bound == agreed.weight_bound == 4.0
    for grown, plain in zip(played.results["p0"].forest.trees, forest.trees, strict=True):
        np.testing.assert_array_equal(grown.value, plain.value)


def test_one_sum_per_level_and_vectors_of_public_length():
    parts, _, classes = dealt("multiclass", 3)
    options = options_of(max_depth=2)
    played = train(parts, options, classes, record_content=True)
    received = [e for e in played.transcripts["p0"].entries if e.direction == "received" and e.step == "MaskedInput"]
    searched = sum(
        e.step == "ProbeRequest" and e.direction == "sent" and e.peer == "p1" for e in played.transcripts["p0"].entries
    )
    assert (
        sum(e.peer == "p1" for e in received) == 3 + searched + options.common.n_estimators * options.common.max_depth
    )
    sizes = {name: [e.nbytes for e in received if e.peer == name] for name in ("p1", "p2")}
    assert sizes["p1"] == sizes["p2"]


# ---------------------------------------------------------------- what is seen


def masked_vectors(played, leader="p0"):
    return [
        np.frombuffer(decode_body(e.content, MaskedInput, peer=e.peer).values.data, np.uint64)
        for e in played.transcripts[leader].entries
        if e.direction == "received" and e.step == "MaskedInput"
    ]


def test_what_the_leader_receives_is_uniform_and_a_planted_leak_is_not(monkeypatch):
    parts, _, classes = dealt("binary", 3)
    options = options_of()
    assert looks_uniform(masked_vectors(train(parts, options, classes, record_content=True)))
    monkeypatch.setattr(masked_members, "pairwise_input", lambda this_round, seeds, values: values.view(np.uint64))
    leaking = masked_vectors(train({n: parts[n] for n in parts}, options, classes, record_content=True, leader="p0"))
    assert not looks_uniform(leaking)


def test_no_vector_is_masked_as_another_is():
    """The same rows and sums in two trainings, and in two places of one, never share a mask."""
    parts, _, classes = dealt("binary", 3)
    options = options_of()
    first, second = (masked_vectors(train(parts, options, classes, record_content=True)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert looks_uniform([one - other]) or len(one) < 100
        assert not np.any(one == other)


def test_participants_see_the_model_and_no_sums():
    parts, _, classes = dealt("binary", 3)
    played = train(parts, options_of(), classes)
    received = {e.step for e in played.transcripts["p1"].entries if e.direction == "received"}
    assert received == {
        "Terms",
        "Verdict",
        "ModelBegin",
        "Roster",
        "MaskKeyPairs",
        "Count",
        "LabelUnits",
        "TrainingStart",
        "ProbeRequest",
        "CommonBins",
        "TreeStep",
        "ModelEnd",
    }
    assert {e.peer for e in played.transcripts["p1"].entries} == {"p0"}


def test_no_interval_of_few_rows_is_probed():
    parts, whole, classes = dealt("binary", 3)
    least = 25
    played = train(parts, options_of(min_child_samples=least, bins="approximate"), classes, record_content=True)
    asked = [
        decode_body(e.content, ProbeRequest, peer="p0")
        for e in played.transcripts["p1"].entries
        if e.direction == "received" and e.step == "ProbeRequest"
    ]
    ordered = sorted_keys(whole.table.columns)
    opened = [{0: 0, 1 << 32: len(keys)} for keys in ordered]  # by feature: keys, rows below
    for message in asked:
        keys, offsets = (np.frombuffer(a.data, a.dtype) for a in (message.keys, message.offsets))
        for f, known in enumerate(opened):
            points = sorted(known)
            for key in keys[offsets[f] : offsets[f + 1]].tolist():
                at = np.searchsorted(points, key)
                assert known[points[at]] - known[points[at - 1]] >= least
            known |= {k: int(np.searchsorted(ordered[f], k)) for k in keys[offsets[f] : offsets[f + 1]].tolist()}
    assert len(asked) > 5
    fewest = min(b - a for known in opened for a, b in pairwise(sorted(known.values())) if b > a)
    assert shown_by_search(fewest) == played.results["p0"].spent  # it limits, it does not prevent


# ---------------------------------------------------------------- a leader that departs from the protocol


def test_every_message_to_all_counts_in_masks(monkeypatch):
    """A leader that tells one participant another split, or other probes, opens nothing."""
    parts, _, classes = dealt("binary", 3)
    for kind, field in ((TreeStep, "left_bins"), (ProbeRequest, "keys")):

        def lie(self, messages, kind=kind, field=field, send=Collector.send):
            message = messages.get("p1")
            array = getattr(message, field, None)
            if isinstance(message, kind) and array.data.nbytes:
                other = np.array(np.frombuffer(array.data, array.dtype).reshape(array.shape))
                other.reshape(-1)[0] ^= 1
                messages = {**messages, "p1": msgspec.structs.replace(message, **{field: Array.of(other)})}
            send(self, messages)

        opened = []
        total = Collector.total

        def note(self, length, own=None, total=total, opened=opened):
            opened.append(total(self, length, own))
            return opened[-1]

        with monkeypatch.context() as patched:
            patched.setattr(Collector, "send", lie)
            patched.setattr(Collector, "total", note)
            with contextlib.suppress(Exception):
                train(parts, options_of(n_estimators=1), classes)
        assert any(len(sums) > 5 and looks_uniform([sums]) for sums in opened)


# ---------------------------------------------------------------- too few, and noise


def test_two_participants_are_refused_unless_it_is_asked_for():
    parts, _, classes = dealt("binary", 2)
    with pytest.raises(ConfigError, match="expected 3 participants"):
        train(parts, options_of(), classes)
    played = train(parts, options_of(mode="paper"), classes)
    assert len(played.results["p1"].forest.trees) == 3
    noisy = train(parts, options_of(epsilon_total=4.0), classes)
    assert "epsilon = 4" in noisy.results["p1"].spent


def test_noise_is_in_every_sum(monkeypatch):
    """With all masks taken away, two members with equal rows never give the same numbers."""
    parts, _, classes = dealt("binary", 3)
    parts = dict.fromkeys(parts, parts["p0"])
    monkeypatch.setattr(masked_members, "pairwise_input", lambda this_round, seeds, values: values.view(np.uint64))
    for options, alike in ((options_of(), True), (options_of(epsilon_total=1.0), False)):
        played = train(parts, options, classes, record_content=True, leader="server")
        vectors = {
            name: [decode_body(e.content, MaskedInput, peer=name).values.data.tobytes() for e in entries]
            for name, entries in sent_masked(played, parts).items()
        }
        for one, other in zip(vectors["p0"], vectors["p1"], strict=True):
            assert (one == other) is alike


def sent_masked(played, parts):
    return {
        name: [e for e in played.transcripts[name].entries if e.direction == "sent" and e.step == "MaskedInput"]
        for name in parts
    }


# ---------------------------------------------------------------- faults


class Gone(Exception):
    """A participant's program dies."""


def dying(parts, options, classes, name, when):
    """A participant that dies at the `when`-th message it would send."""

    def role(party: Party) -> object:
        sent, send = 0, party.send

        def count(to, message):
            nonlocal sent
            sent += 1
            if sent > when:
                party.channel.close()
                raise Gone
            send(to, message)

        party.send = count
        return member(party, parts, options, classes)

    return role


def survivors_of(parts, options, classes, when, **chosen):
    """Play with p2 dying; return what the others end with."""
    ended = {}

    def kept(name):
        def role(party: Party) -> object:
            ended[name] = member(party, parts, options, classes)
            return ended[name]

        return role

    roles = {name: kept(name) for name in parts if name not in ("p0", "p2")}
    roles["p2"] = dying(parts, options, classes, "p2", when)
    with pytest.raises(Gone):
        train(parts, options, classes, roles=roles, **chosen)
    return ended


def test_a_lost_participant_ends_the_training_by_default():
    parts, _, classes = dealt("binary", 4)
    with pytest.raises((TreatyError, Gone)):
        train(parts, options_of(), classes, roles={"p2": dying(parts, options_of(), classes, "p2", 12)})


# 6 messages begin a training; a sum takes 4 of a participant (shares, vector, signature, shares of others): the first,
# the two that say where training starts, one of the search for bins, two of the first tree and a later one
@pytest.mark.slow
@pytest.mark.parametrize("when", [7, 12, 48, 150, *map(slow, [6, 8, 9, 10, 14, 16, 49, 149, 151, 152, 155, 158, 188])])
def test_with_consent_training_goes_on_without_the_lost(when):
    parts, whole, classes = dealt("binary", 5)
    options = options_of(dropout="accept", bins="approximate")
    ended = survivors_of(parts, options, classes, when)
    assert ended.keys() == {"p1", "p3", "p4"}
    first = ended["p1"]
    assert len(first.forest.trees) == 3
    for part in ended.values():
        np.testing.assert_array_equal(margins(part, whole), margins(first, whole))
        assert repr(part.splits) == repr(first.splits)


@pytest.mark.slow
def test_with_consent_training_goes_on_without_one_that_falls_silent():
    """The others wait for the leader all of the job's timeout, the leader a part of it for any of them."""
    parts, _, classes = dealt("binary", 5)
    options, over, ended = options_of(dropout="accept", bins="approximate"), threading.Event(), []

    def silent(party: Party) -> object:
        send, sent = party.send, itertools.count()

        def stop_at(to, message):
            if next(sent) == 152:  # as a tree is summed
                over.wait(30)
                raise Gone
            send(to, message)

        party.send = stop_at
        return member(party, parts, options, classes)

    def kept(party: Party) -> object:
        found = member(party, parts, options, classes)
        ended.append(found)
        over.set()
        return found

    with pytest.raises(Gone):
        train(parts, options, classes, roles={"p1": kept, "p2": silent}, timeout=8.0)
    assert len(ended[0].forest.trees) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spoiled"),
    [
        (SealedShares, lambda m: SealedShares(dict(list(m.sealed.items())[1:]))),
        (MaskedInput, lambda m: MaskedInput(Array.of(np.zeros(1, np.uint64)))),
        (SurvivorSignature, lambda m: SealedShares({})),
        (MaskShares, lambda m: MaskShares({}, {})),
        (MaskShares, lambda m: MaskShares(dict.fromkeys(m.survivors, b""), m.lost)),
    ],
    ids=["shares for others", "vector of another length", "another message", "no shares", "short shares"],
)
def test_with_consent_training_goes_on_without_one_that_sends_what_no_member_does(kind, spoiled):
    parts, whole, classes = dealt("binary", 5)
    options, ended = options_of(dropout="accept", max_bin=8, n_estimators=2), {}

    def spoiling(party: Party) -> object:
        send = party.send
        party.send = lambda to, message: send(to, spoiled(message) if isinstance(message, kind) else message)
        return member(party, parts, options, classes)

    def kept(party: Party) -> object:
        ended[party.name] = member(party, parts, options, classes)
        return ended[party.name]

    roles = {"p1": kept, "p2": spoiling, "p3": kept, "p4": kept}
    with contextlib.suppress(TreatyError):
        train(parts, options, classes, roles=roles)
    assert ended.keys() == {"p1", "p3", "p4"}
    left = {name: rows for name, rows in parts.items() if name != "p2"}
    np.testing.assert_array_equal(
        margins(ended["p1"], whole), margins(train(left, options, classes).results["p1"], whole)
    )


@pytest.mark.slow
@pytest.mark.parametrize("when", [6, 12, 16], ids=["the first sum", "sums of labels", "bounds"])
def test_rounds_after_a_loss_are_those_of_the_remaining_rows(when):
    parts, whole, classes = dealt("regression", 5)
    options = options_of(dropout="accept", max_bin=8)
    left = {name: rows for name, rows in parts.items() if name != "p2"}
    ended = survivors_of(parts, options, classes, when)
    alone = train(left, options, classes).results["p1"]
    assert ended["p1"].forest.objective == alone.forest.objective
    np.testing.assert_array_equal(margins(ended["p1"], whole), margins(alone, whole))


def test_too_few_survivors_end_the_training():
    parts, _, classes = dealt("binary", 4)
    options = options_of(dropout="accept")
    roles = {name: dying(parts, options, classes, name, 20) for name in ("p2", "p3")}
    with pytest.raises((RoundVoid, Gone, PeerAborted)):
        train(parts, options, classes, roles=roles)


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": np.array([5], np.int32)},
        {"children": np.array([7], np.int32)},
        {"features": np.array([99], np.int32)},
        {"left_bins": np.zeros((1, 31), np.uint8)},
        {"values": np.zeros(9)},
        {"values": np.array([0.0, 1e31, 0.0]), "gains": np.zeros(3)},
        {"values": np.zeros(3), "gains": np.array([np.nan, 0.0, 0.0])},
        {"asked_nodes": np.array([40], np.int32)},
        {"asked_outputs": np.array([3], np.int32)},
        {"asked_nodes": np.array([0], np.int32)},
        {"columns": np.arange(1, dtype=np.int32), "last_columns": np.array([1], np.int32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_steps_that_do_not_fit_are_refused(change):
    _, whole, _ = dealt("binary", 3)
    objective, bins = make_objective("logistic", whole.y, None), fit_bins(whole.table, 8)
    shard = RowShard(bins.transform(whole.table), bins.offsets, whole.y, None, objective)
    part = ModelPart(
        model_id="m", party="p1", schema=whole.table.schema, splits=SplitTable(), forest=Forest(objective, ("p1",))
    )
    own = OwnRows(part, bins, shard, Draws(None, 0))
    trees = TreeMember(own, "p0", options_of(n_estimators=3, max_depth=2).common, frozenset)
    n = len(bins.n_bins)
    empty = {
        **{k: np.empty(0, np.int32) for k in TreeStep.__struct_fields__},
        "left_bins": np.empty((0, 32), np.uint8),
        "values": np.empty(0),
        "gains": np.empty(0),
    }

    def step(**parts):
        return TreeStep(**{name: Array.of(values) for name, values in {**empty, **parts}.items()})

    zero = np.zeros(1, np.int32)
    begin = {"columns": np.arange(n, dtype=np.int32), "last_columns": np.array([n], np.int32)}
    assert trees.take(step(**begin, asked_outputs=zero, asked_nodes=zero)).shape == (3 * bins.offsets[-1] + 3,)
    good = {
        "outputs": zero, "nodes": zero, "children": zero + 1, "features": zero,
        "left_bins": np.full((1, 32), 240, np.uint8), "asked_outputs": zero, "asked_nodes": zero + 1,
    }  # fmt: skip
    with pytest.raises(PeerProtocolError, match="TreeStep"):
        trees.take(step(**{**good, **change}))


def test_no_sums_of_a_tree_that_has_its_most_leaves():
    _, whole, _ = dealt("binary", 3)
    objective, bins = make_objective("logistic", whole.y, None), fit_bins(whole.table, 8)
    shard = RowShard(bins.transform(whole.table), bins.offsets, whole.y, None, objective)
    part = ModelPart(
        model_id="m", party="p1", schema=whole.table.schema, splits=SplitTable(), forest=Forest(objective, ("p1",))
    )
    common = options_of(n_estimators=3, max_depth=0, max_leaves=2).common
    trees = TreeMember(OwnRows(part, bins, shard, Draws(None, 0)), "p0", common, frozenset)
    # of a tree of two leaves only the root is summed
    trees._depths, trees._summed = [[0]], set()
    shard.start_round([np.arange(len(bins.n_bins), dtype=np.int32)], [None])
    one, left = np.zeros(1, np.int32), np.zeros((1, 256), np.bool_)
    left[:, :4] = True
    shard.divide(0, LevelSplits(one, one + 1, one, left))
    trees._depths[0] += [1, 1]
    asked = {name: Array.of(np.empty(0, np.int32)) for name in TreeStep.__struct_fields__}
    step = TreeStep(**{
        **asked, "left_bins": Array.of(np.empty((0, 32), np.uint8)), "values": Array.of(np.empty(0)),
        "gains": Array.of(np.empty(0)), "asked_outputs": Array.of(one), "asked_nodes": Array.of(one + 1),
    })  # fmt: skip
    with pytest.raises(PeerProtocolError, match="sums of a tree that has its most leaves"):
        trees.take(step)
