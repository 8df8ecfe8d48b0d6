"""Rows of each user are counted over runs, at every edge server that has shares, and more than agreed are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from treaty.crypto.sharing.shamir_routing import share_integers
from treaty.errors import ConfigError, DataError, PeerError, PeerLost, PeerProtocolError
from treaty.machine.database import kept_file, set_aside
from treaty.messaging.messages import Array, decode_body, encode
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.runs.prediction import predict_hidden
from treaty.systems.fedxgb import prediction as secpred
from treaty.systems.fedxgb.messages import DealerTerms, PredictionTerms, QueriesLeft, RowCounts, RowsTaken, ValueShares
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.pieces import RowShares
from treaty.systems.fedxgb.prediction import QueryRecord, queries_folder
from treaty.systems.fedxgb.shares import setting_of

EDGES = ["edge0", "edge1", "edge2"]
SIZES = {"ann": 9, "ben": 1, "cat": 4}  # as `shards` deals 14 rows out


def one_row_less(part: ModelPart, new) -> dict:
    return {name: table for name, table in shards(part, new.iloc[:14]).items() if name != "ann"}


def asked(store, model: str = "m") -> list[dict[str, int]]:
    return [QueryRecord(queries_folder(store, edge)).asked(model) for edge in EDGES]


# ---------------------------------------------------------------- the count


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), max_size=8), st.integers(1, 30))
def test_counts_add_up_and_rows_of_users_that_exceed_the_most_are_not_counted(runs, most):
    record, total = QueryRecord(None), dict.fromkeys("abc", 0)
    for rows in runs:
        fit = [user for user, more in rows.items() if total[user] + more <= most]
        assert record.count("m", rows, most) == fit
        total |= {user: total[user] + rows[user] for user in fit}
        assert {user: record.asked("m").get(user, 0) for user in total} == total
    assert record.asked("another model") == {}


# ---------------------------------------------------------------- over runs


@pytest.mark.parametrize("comparison", ["shamir", "additive"])
def test_rows_are_counted_over_runs_until_none_are_left(tmp_path, comparison):
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    own = {"store": tmp_path, "max_queries": 20, "comparison": comparison}
    for _ in range(2):
        assert_plain(part, tables, predict(part, tables, **own))
    twice = {name: 2 * rows for name, rows in SIZES.items()}
    assert asked(tmp_path) == [twice, twice, twice if comparison == "shamir" else {}]  # the dealer counts nothing
    with pytest.raises(DataError, match=r"ann: expected at most 2 rows to predict, got 9: 20 rows .* its own 18 have"):
        predict(part, tables, **own)
    others = {name: tables[name] for name in ("ben", "cat")}
    assert_plain(part, others, predict(part, others, **own))
    assert asked(tmp_path)[0] == {"ann": 18, "ben": 4, "cat": 16}  # the others were answered in the third run, too


def test_without_a_store_a_call_knows_nothing_of_earlier_ones():
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    for _ in range(2):
        assert_plain(part, tables, predict(part, tables, max_queries=9))


def test_another_model_is_counted_apart(tmp_path):
    part, new = trained("binary")
    other = ModelPart(**{name: getattr(part, name) for name in part.__struct_fields__} | {"model_id": "other"})
    tables = shards(part, new.iloc[:14])
    for model in (part, other):
        assert_plain(model, tables, predict(model, tables, store=tmp_path, max_queries=9))
    with pytest.raises(DataError, match="at most 0 rows"):
        predict(other, tables, store=tmp_path, max_queries=9)


def test_the_smallest_number_left_at_an_edge_server_counts():
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    records = {name: QueryRecord(None) for name in EDGES}
    records["edge1"].count("m", {"ann": 5}, 10)
    with pytest.raises(DataError, match="ann: expected at most 5 rows to predict, got 9"):
        play_prediction(part, tables, records=records, max_queries=10)


def lying(part: ModelPart, rows: int) -> Callable[[Party], None]:
    """Return a user that shares so many rows, whatever it is told is left to it."""
    shared = share_integers(setting_of(layout(part).bits, 3), np.zeros((rows, layout(part).columns), np.int64))

    def run(party: Party) -> None:
        for edge, own in zip(EDGES, shared, strict=True):
            party.send(edge, RowShares(Array.of(np.ascontiguousarray(own)), len(own)))
        party.receive("edge0", PredictionTerms)
        for edge in EDGES:
            party.receive(edge, QueriesLeft)
            assert not party.receive(edge, RowsTaken).taken
        with pytest.raises(PeerLost, match="left"):  # nothing more is said to it
            party.receive("edge0", ValueShares)

    return run


@pytest.mark.parametrize("at", [EDGES, ["edge2"]], ids=["everywhere", "at one edge server"])
def test_who_asks_for_more_than_is_left_gets_nothing_and_is_not_counted_and_others_get_theirs(at):
    part, new = trained("binary")
    tables = one_row_less(part, new)
    tables["ann"] = tables["ben"]
    records = {name: QueryRecord(None) for name in EDGES}
    for edge in at:
        records[edge].count("m", {"ann": 7}, 10)
    played = play_prediction(part, tables, roles={"ann": lying(part, 4)}, records=records, max_queries=10, patience=5.0)
    del tables["ann"]
    assert_plain(part, tables, played.results)
    assert "ValueShares" not in by_type(played.transcripts["ann"], "received")
    assert [records[edge].asked("m").get("ann", 0) for edge in EDGES] == [7, 7, 7]  # the largest number at any of them
    assert all(records[edge].asked("m")["cat"] == 4 for edge in EDGES)


def test_a_user_that_asks_in_two_runs_at_once_ends_nobody_elses_prediction():
    """The other run counts its rows once this one has been told how many are left."""
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])

    class Busy(QueryRecord):
        def asked(self, model_id: str) -> dict[str, int]:
            found = super().asked(model_id)
            self.count(model_id, {"ann": 95}, 100)
            return found

    records = {name: Busy(None) if name == "edge1" else QueryRecord(None) for name in EDGES}
    told = {}

    def ann(party: Party) -> None:
        with pytest.raises(PeerError, match="continues without ann") as told["ann"]:
            secpred.user(role_of(party, rows=tables["ann"], max_queries=100))

    played = play_prediction(part, tables, roles={"ann": ann}, records=records, max_queries=100)
    assert "ann" in told
    others = {name: tables[name] for name in ("ben", "cat")}
    assert_plain(part, others, played.results)
    counted = {name: QueryRecord.asked(record, "m") for name, record in records.items()}
    assert [of.get("ann", 0) for of in counted.values()] == [0, 95, 0]
    assert all(of["cat"] == 4 for of in counted.values())


def test_rows_count_before_they_are_answered():
    """An edge server that fails amid the computation does not give them back; others may not have got that far."""
    part, new = trained("binary")
    records = {name: QueryRecord(None) for name in EDGES}

    def no_trees(*of: object) -> None:
        raise PeerProtocolError("server", "no trees")

    with patch.object(secpred, "_some_trees", no_trees), pytest.raises(PeerProtocolError, match="no trees"):
        play_prediction(part, shards(part, new.iloc[:14]), records=records)
    assert SIZES in [record.asked("m") for record in records.values()]


# ---------------------------------------------------------------- a count that is lost


def test_a_count_that_is_gone_or_older_is_refused_before_anything_is_predicted(tmp_path):
    part, new = trained("binary")
    tables, own = shards(part, new.iloc[:14]), {"store": tmp_path, "max_queries": 100, "comparison": "shamir"}
    predict(part, tables, **own)
    folder = queries_folder(tmp_path, "edge1")
    shutil.copytree(folder, tmp_path / "older")
    predict(part, tables, **own)
    newer = folder.rename(tmp_path / "newer")
    with pytest.raises(ConfigError, match=r"record of queries: .*treaty ledger reset .*edge1.queries"):
        predict(part, tables, **own)
    shutil.rmtree(folder)
    (tmp_path / "older").rename(folder)
    with pytest.raises(ConfigError, match="the record of queries is an older copy: 1 of 2 changes"):
        predict(part, tables, **own)
    shutil.rmtree(folder)
    newer.rename(folder)
    predict(part, tables, **own)
    assert asked(tmp_path) == [{name: 3 * rows for name, rows in SIZES.items()}] * 3


def test_a_count_begun_anew_at_one_edge_server_leaves_the_others(tmp_path):
    part, new = trained("binary")
    tables, own = shards(part, new.iloc[:14]), {"store": tmp_path, "max_queries": 9}
    predict(part, tables, **own)
    moved = set_aside(queries_folder(tmp_path, "edge1"))
    assert {path.name.partition(".until")[0] for path in moved} == {"edge1.queries", "edge1.queries.kept"}
    assert not kept_file(queries_folder(tmp_path, "edge1")).exists()
    with pytest.raises(DataError, match="at most 0 rows"):
        predict(part, tables, **own)


@pytest.mark.parametrize("older", [False, True], ids=["gone", "an older copy"])
def test_a_count_that_was_reset_together_with_what_says_so_is_set_right_by_the_others(tmp_path, caplog, older):
    part, new = trained("binary")
    tables, own = shards(part, new.iloc[:14]), {"store": tmp_path, "max_queries": 100, "comparison": "shamir"}
    folder = queries_folder(tmp_path, "edge1")
    if older:
        predict(part, tables, **own)
        shutil.copytree(folder, tmp_path / "older")
        shutil.copy(kept_file(folder), tmp_path / "older.kept")
    predict(part, tables, **own)
    shutil.rmtree(folder)
    kept_file(folder).unlink()
    if older:
        (tmp_path / "older").rename(folder)
        (tmp_path / "older.kept").rename(kept_file(folder))
    caplog.clear()
    assert_plain(part, tables, predict(part, tables, **own))
    assert len([line for line in caplog.messages if "edge1 has counted" in line and "older copy" in line]) == 3
    assert asked(tmp_path) == [{name: (2 + older) * rows for name, rows in SIZES.items()}] * 3


def test_another_edge_servers_count_raises_the_own_one_to_the_limit_at_most():
    part, new = trained("binary")
    tables, records = shards(part, new.iloc[:14]), {name: QueryRecord(None) for name in EDGES}
    records["edge2"].count("m", {"ben": 10**6}, 10**6)
    with pytest.raises(DataError, match="ben: expected at most 0 rows"):
        play_prediction(part, tables, records=records, max_queries=50)
    del tables["ben"]
    assert_plain(part, tables, play_prediction(part, tables, records=records, max_queries=50).results)


@pytest.mark.parametrize("count", [-1, 1 << 41])
def test_counts_that_are_none_are_refused(count):
    with pytest.raises(PeerProtocolError, match="asked"):
        decode_body(encode(RowCounts({}, {"ann": count})), RowCounts, peer="edge1")


@pytest.mark.parametrize(
    "change", [{"n_bins": [256]}, {"n_bins": [-1]}, {"outputs": 0}, {"outputs": 1 << 11}, {"max_queries": 0}], ids=str
)
def test_terms_of_a_dealer_that_cannot_be_are_refused(change):
    right = {"model_id": "m", "n_bins": [3], "categorical": [True], "outputs": 1, "max_queries": 5}
    sent = DealerTerms(**right, comparison="additive")
    assert decode_body(encode(sent), DealerTerms, peer="server").n_bins == [3]
    wrong = DealerTerms(**{**right, **change}, comparison="additive")
    with pytest.raises(PeerProtocolError, match=next(iter(change))):
        decode_body(encode(wrong), DealerTerms, peer="server")


# ---------------------------------------------------------------- what edge servers consent to


def test_an_edge_server_refuses_another_limit_than_its_own():
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])

    def stricter(party: Party) -> None:
        secpred.edge(role_of(party, max_queries=5), QueryRecord(None))

    with pytest.raises(ConfigError, match="max_queries=5, to which edge1 consents, got 1000 of the server"):
        play_prediction(part, tables, roles={"edge1": stricter})


@pytest.mark.parametrize("bound", [{"n_estimators": 2}, {"max_depth": 2}])
def test_a_model_of_more_or_deeper_trees_than_the_options_is_refused_by_server_and_edge_servers(bound):
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    with pytest.raises(ConfigError, match=r"got one of 3 rounds and depth 3: it is another job's"):
        predict_hidden(part, tables, FedXGB(), n_jobs=1, **bound)

    def generous(party: Party) -> None:
        secpred.server(role_of(party, part=part))

    with pytest.raises(PeerProtocolError, match=r"as the options say, got 3 of depth 3 - at ModelSize from server"):
        play_prediction(part, tables, roles={"server": generous}, **bound)


def test_trees_of_several_outputs_are_bounded_by_rounds():
    part, new = trained("multiclass")
    tables = shards(part, new.iloc[:14])
    assert len(part.forest.trees) == 9
    assert_plain(part, tables, predict_hidden(part, tables, FedXGB(), n_jobs=1, n_estimators=3))


def test_terms_with_other_outputs_than_classes_are_refused():
    part, new = trained("binary")
    other, _ = trained("multiclass")
    part.forest.classes, classes = other.forest.classes, part.forest.classes
    try:
        with pytest.raises(PeerProtocolError, match="an output for each of the classes, got 1"):
            play_prediction(part, shards(part, new.iloc[:14]))
    finally:
        part.forest.classes = classes


def test_predictions_carry_classes_and_links_of_the_model():
    for task, columns in (("binary", 3), ("multiclass", 4), ("regression", 1)):
        part, new = trained(task)
        tables = shards(part, new.iloc[:14])
        found = play_prediction(part, tables).results
        for name in tables:
            expected = part.predictions(found[name].margins)
            assert len(expected) == columns
            assert all(np.array_equal(found[name].columns()[column], of) for column, of in expected.items())


def test_bounds_of_targets_and_weights_are_not_in_the_terms():
    part, new = trained("regression")
    played = play_prediction(part, shards(part, new.iloc[:14]), record_content=True)
    (told,) = [e.message(PredictionTerms) for e in played.transcripts["ann"].entries if e.step == "PredictionTerms"]
    assert (told.objective.grad_clip, told.objective.weight_bound) == (1.0, 1.0)
    assert part.forest.objective.grad_clip > 1.0
    assert np.frombuffer(decode_body(part.bins, secpred.CommonBins, peer="x").clips.data) > 1.0
    assert told.bins.clips.shape == (0,)


def test_systems_and_options_without_such_a_prediction_are_refused():
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])
    with pytest.raises(ConfigError, match='expose="model" shows users the model'):
        predict(part, tables, expose="model")
    with pytest.raises(ConfigError, match=r"max_queries is about rows .* expose=\"model\""):
        predict(part, tables, expose="model", max_queries=3)


def test_a_user_whose_rows_come_to_one_edge_server_alone_is_told_that_others_go_on_without_it():
    part, new = trained("binary")
    tables = shards(part, new.iloc[:14])

    def half(party: Party) -> None:
        send = party.send
        party.send = lambda to, message: send(to, message) if to == "edge0" else None
        with pytest.raises(PeerError, match="edge0 continues without ann: expected its rows at all edge servers"):
            secpred.user(role_of(party, rows=tables["ann"]))

    records = {name: QueryRecord(None) for name in EDGES}
    played = play_prediction(part, tables, roles={"ann": half}, records=records, patience=1.0)
    assert_plain(part, {name: tables[name] for name in ("ben", "cat")}, played.results)
    assert all(record.asked("m") == {"ben": 1, "cat": 4} for record in records.values())
