"""Prediction on shares: the plain model's margins, whoever else vanishes or lies, and nothing told besides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import numpy as np
import pytest

from systems.fedxgb.playing import crowd_rows, options_of, play_crowd, uniform
from systems.fedxgb.secpred.hidden_models import assert_plain, layout, play_prediction, predict, shards, trained
from transcripts import by_type
from treaty.crypto.sharing.shamir_routing import open_integers, share_integers
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, DataError, PeerError, PeerLost, PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, load_part
from treaty.systems.fedxgb import prediction as secpred
from treaty.systems.fedxgb.messages import LeafShares, PredictionTerms, QueriesLeft, RowsTaken, SplitShares, ValueShares
from treaty.systems.fedxgb.pieces import RowShares
from treaty.systems.fedxgb.secpred import HiddenModel
from treaty.systems.fedxgb.shares import SharedNumbers, setting_of
from treaty.trees.slots import VALUE_BITS

# ---------------------------------------------------------------- right


@pytest.mark.parametrize(("task", "edges"), [("binary", 3), ("multiclass", 3), ("regression", 5)])
def test_margins_are_the_plain_models_bit_for_bit(task, edges):
    part, new = trained(task)
    tables = shards(part, new)
    assert_plain(part, tables, predict(part, tables, edges=edges))


def test_new_rows_have_gaps_and_categories_that_the_model_splits_on():
    for task in ("binary", "multiclass", "regression"):
        part, new = trained(task)
        used = set(part.splits.feature)
        assert any(part.splits.category_left), task
        assert any(new.iloc[:, f].isna().any() for f in used), task
    part, new = trained("multiclass")
    assert any(going is not None and part.splits.feature[r] == 0 for r, going in enumerate(part.splits.category_left))
    assert (new.iloc[:, 0] == "z").any()


@pytest.mark.slow
def test_small_pieces_of_rows_and_trees_give_the_same():
    part, new = trained("multiclass")
    tables = shards(part, new.iloc[:20])
    with patch.object(secpred, "_AT_ONCE", 20), patch.object(secpred, "_NUMBERS", 400):
        played = play_prediction(part, tables)
    asked = by_type(played.transcripts["server"], "received")["TreesRequest"][0]
    assert asked == 3 * 5  # by three edge servers, for two of nine trees at once: less than a round
    assert_plain(part, tables, played.results)


def test_trees_without_splits_and_of_different_depths_are_summed():
    part, new = trained("binary", 8, 4)
    assert part.forest is not None
    stump = part.forest.trees[0]
    lone = type(stump)(*(getattr(stump, name)[:1].copy() for name in type(stump).__slots__))
    lone.left[:], lone.source[:], lone.record[:], lone.value[:] = -1, -1, -1, 0.375
    forest = type(part.forest)(part.forest.objective, part.forest.sources, trees=[lone, *part.forest.trees])
    mixed = ModelPart(
        model_id="m", party="pooled", schema=part.schema, splits=part.splits, forest=forest, bins=part.bins
    )
    tables = shards(part, new.iloc[:15])
    assert len({len(tree.left) for tree in forest.trees}) > 2
    assert_plain(mixed, tables, play_prediction(mixed, tables).results)
    forest.trees[1:] = []
    assert_plain(mixed, tables, play_prediction(mixed, tables).results)


@pytest.mark.slow
def test_a_crowds_model_is_kept_with_its_bins_and_predicts(tmp_path):
    parts, _, classes = crowd_rows("multiclass", 6)
    part = play_crowd(parts, options_of(expose="model"), classes).model
    part.save(tmp_path / "model")
    kept = load_part(tmp_path / "model")
    tables = {name: shard.table for name, shard in parts.items()}
    assert_plain(part, tables, predict(kept, tables))


def test_a_user_without_rows_gets_none():
    part, new = trained("binary")
    some = to_table(new.iloc[:5], schema=part.schema)
    tables = {"ann": Table(part.schema, [c[:0] for c in some.columns], 0), "ben": some}
    assert_plain(part, tables, predict(part, tables))


# ---------------------------------------------------------------- users that vanish or lie


def nobody(party: Party) -> None:
    """Leave at once."""


def says(*messages: Callable[[int], Message | None]) -> Callable[[Party], None]:
    """Return a user that sends each edge server what is made for it by number, and waits for an answer."""

    def run(party: Party) -> None:
        for number, edge in enumerate(party.peers):
            for message in messages:
                made = message(number)
                if made is not None:
                    party.send(edge, made)
        with suppress(PeerError):
            for kind in (QueriesLeft, RowsTaken, ValueShares):
                party.receive(party.peers[-1], kind)

    return run


def rows_of(part: ModelPart, count: int, *, code: int = 0) -> list[Array]:
    """Return shares of rows all of whose numbers are the same, one for each of three edge servers."""
    columns = wide(part)
    shares = share_integers(setting_of(layout(part).bits, 3), np.full((count, columns), code))
    return [Array.of(np.ascontiguousarray(of)) for of in shares]


def wide(part: ModelPart) -> int:
    return layout(part).columns


LIES: dict[str, Callable[[ModelPart], Callable[[Party], None]]] = {
    "leaves at once": lambda part: nobody,
    "shares with one edge server alone": lambda part: says(
        lambda k: RowShares(rows_of(part, 3)[0], 3) if k == 0 else None
    ),
    "other shape": lambda part: says(lambda k: RowShares(Array.of(np.zeros((3, wide(part) + 1, 2), np.uint64)), 3)),
    "numbers beyond the field": lambda part: says(
        lambda k: RowShares(Array.of(np.full((3, wide(part), 2), 2**64 - 1, np.uint64)), 3)
    ),
    "other message": lambda part: says(lambda k: SharedNumbers(Array.of(np.zeros(3, np.uint64)))),
    "more rows here than there": lambda part: says(lambda k: RowShares(rows_of(part, 3 + k)[k], 3 + k)),
    "two messages": lambda part: says(
        lambda k: RowShares(rows_of(part, 3)[k], 3), lambda k: RowShares(rows_of(part, 3)[k], 3)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LIES)
def test_others_get_theirs_when_a_user(how):
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    played = play_prediction(part, tables, roles={"ben": LIES[how](part)}, patience=2.5)
    del tables["ben"]
    assert_plain(part, tables, played.results)


@pytest.mark.parametrize("how", ["no bins", "of no polynomial"])
def test_others_get_theirs_when_a_user_shares_numbers_that_are(how):
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    rows = rows_of(part, 2, code=10**9)
    if how == "of no polynomial":
        rng = np.random.default_rng(1)
        rows = [Array.of(rng.integers(0, 2**62, (2, wide(part), 2), np.uint64)) for _ in range(3)]

    def lies(party: Party) -> None:
        for edge, own in zip(party.peers, rows, strict=True):
            party.send(edge, RowShares(own, 2))
        for edge in party.peers:
            party.receive(edge, PredictionTerms, QueriesLeft)

    played = play_prediction(part, tables, roles={"ben": lies})
    del tables["ben"]
    assert_plain(part, tables, played.results)


def test_more_rows_than_allowed_are_refused_by_the_user_and_by_edge_servers():
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    with pytest.raises(DataError, match="ann: expected at most 8 rows to predict, got 9: 8 rows of a user"):
        predict(part, tables, max_queries=8)
    honest = {name: tables[name] for name in ("ben", "cat")}
    tables["ann"] = tables["ben"]
    greedy = says(lambda k: RowShares(rows_of(part, 9)[k], 9))
    played = play_prediction(part, tables, roles={"ann": greedy}, max_queries=8, patience=2.0)
    assert "ValueShares" not in by_type(played.transcripts["ann"], "received")
    assert_plain(part, honest, played.results)


# ---------------------------------------------------------------- edge servers


def test_a_lost_edge_server_ends_the_prediction():
    part, new = trained("binary")

    def dies(party: Party) -> None:
        party.receive("server", PredictionTerms)
        party.channel.close()

    with pytest.raises(PeerLost, match="edge1"):
        play_prediction(part, shards(part, new), roles={"edge1": dies})


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
        play_prediction(part, shards(part, new))


# ---------------------------------------------------------------- what is told


def test_everybody_receives_only_what_the_text_says():
    part, new = trained("multiclass")
    tables = shards(part, new)
    played = play_prediction(part, tables, record_content=True)

    def steps(name):
        return set(by_type(played.transcripts[name], "received"))

    assert steps("server") == {"TreesRequest"}
    assert all(steps(name) <= {"PredictionTerms", "QueriesLeft", "RowsTaken", "ValueShares"} for name in tables)
    for k in range(3):
        assert steps(f"edge{k}") == {
            "PredictionTerms",
            "ModelSize",
            "SplitShares",
            "LeafShares",
            "RowShares",
            "RowCounts",
            "SharedNumbers",
        }
    for name, table in tables.items():
        told = [e for e in played.transcripts[name].entries if e.step == "ValueShares" and e.direction == "received"]
        shares = np.stack([
            view(e.message(ValueShares).shares, np.uint64, (3, table.n_rows, 2), peer=e.peer, what="")
            for e in sorted(told, key=lambda e: e.peer)
        ])  # fmt: skip
        opened = open_integers(setting_of(layout(part).bits, 3), shares)  # sums over trees, one number a row and output
        assert np.array_equal(
            opened.T / 2.0**VALUE_BITS + part.forest.objective.base_margins, played.results[name].margins
        )


def test_users_are_told_the_same_of_two_models_on_the_same_bins():
    """No threshold, category or leaf value of the model, but bins and sums of leaf values."""
    part, new = trained("binary")
    other, _ = trained("binary", 2, 2)
    told = []
    for model in (part, other):
        transcripts = play_prediction(model, shards(part, new), record_content=True).transcripts
        told.append(
            [e.content for e in transcripts["ann"].entries if e.direction == "received" and e.step == "PredictionTerms"]
        )
    assert told[0] == told[1]
    assert len(told[0]) == 1


def test_one_edge_servers_view_is_uniform():
    part, new = trained("binary", 6)
    played = play_prediction(part, shards(part, new), record_content=True)
    entries = [e for e in played.transcripts["edge1"].entries if e.direction == "received"]
    fields = {
        "RowShares": (RowShares, "shares"),
        "SplitShares": (SplitShares, "weights"),
        "LeafShares": (LeafShares, "values"),
    }
    for step, (kind, name) in fields.items():
        arrays = [getattr(e.message(kind), name) for e in entries if e.step == step]
        low = [view(a, np.uint64, a.shape, peer="x", what="")[..., 0] for a in arrays]
        assert uniform(*low), step
        assert sum(array.size for array in low) > 40, step


def test_bounds_of_targets_are_not_passed_on():
    part, new = trained("regression")
    played = play_prediction(part, shards(part, new), record_content=True)
    (told,) = [e.message(PredictionTerms) for e in played.transcripts["ann"].entries if e.step == "PredictionTerms"]
    assert (told.bins.clips.shape, told.bins.weight_bound) == ((0,), 0.0)
    assert np.frombuffer(secpred.decode_body(part.bins, secpred.CommonBins, peer="x").clips.data) > 1.0


# ---------------------------------------------------------------- refused


def test_models_that_cannot_be_shared_are_refused():
    part, new = trained("binary")
    tables = shards(part, new)

    def changed(**fields):
        own = {name: getattr(part, name) for name in part.__struct_fields__}
        return ModelPart(**{**own, **fields})

    with pytest.raises(ConfigError, match="with its bins"):
        predict(changed(bins=b""), tables)
    with pytest.raises(ConfigError, match="some trees"):
        predict(changed(forest=type(part.forest)(part.forest.objective, part.forest.sources)), tables)
    moved = type(part.splits)(
        part.splits.feature, [t + 1e-3 for t in part.splits.threshold], part.splits.missing_left,
        part.splits.category_left,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="cuts of the bins of training"):
        predict(changed(splits=moved), tables)


def test_too_large_values_are_refused():
    part, new = trained("binary", 1)
    assert part.forest is not None
    tree = part.forest.trees[0]
    huge = type(tree)(**{n: getattr(tree, n) * (2.0**40 if n == "value" else 1) for n in type(tree).__slots__})
    forest = type(part.forest)(part.forest.objective, part.forest.sources, trees=[huge])
    part = ModelPart(
        model_id="m", party="pooled", schema=part.schema, splits=part.splits, forest=forest, bins=part.bins
    )
    with pytest.raises(ConfigError, match="scale the target down"):
        predict(part, shards(part, new))


def test_wrong_crowds_and_tables_are_refused():
    part, new = trained("binary")
    tables = shards(part, new)
    with pytest.raises(ConfigError, match="3 edge servers or more, got 2"):
        predict(part, tables, edges=2)
    with pytest.raises(ConfigError, match=r"other names than the server, .* got edge1"):
        predict(part, {"edge1": tables["ann"]})
    with pytest.raises(DataError, match="another one"):
        predict(part, {"ann": to_table(new.iloc[:, :3])})
