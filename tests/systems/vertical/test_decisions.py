"""Federated prediction: margins, leaves and stages from one round, and parts that do not fit or are not whole."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from systems.vertical.trained_models import at, grow, predict, split_table, take
from treaty.errors import ConfigError, DataError, PeerAborted, PeerLost, PeerProtocolError
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import Array
from treaty.models.trees import leaves, margins, predict_pooled, row_decisions, staged_margins
from treaty.systems.vertical import prediction
from treaty.systems.vertical.prediction import (
    Decisions,
    Finish,
    RecordCount,
    collect,
    predict_active,
    predict_passive,
)
from treaty.trees.ensemble import Walk, join_splits
from trees.plain import leaves_from_values


def shorten(part, records: int) -> None:
    """Lose all but the first records, as a party killed before saving does."""
    for name in part.splits.__slots__:
        del getattr(part.splits, name)[records:]


def predicted(parts, tables):
    """Return the margins of a federated prediction."""
    return predict(at(predict_active, parts, tables), at(predict_passive, parts, tables), list(tables)).results["p0"]


def collected(parts, tables, replace=None, timeout=20.0):
    return predict(at(collect, parts, tables), at(predict_passive, parts, tables), list(tables), replace, timeout)


def test_rounds_whose_splits_a_party_lost_are_left_out(caplog):
    frames, y = split_table("multiclass", 3)
    parts, tables = grow(frames, y, "multiclass", n_estimators=6)
    used = [max([0, *(tree.record[tree.source == 1] + 1)]) for tree in parts["p0"].forest.trees[:9]]  # of three rounds
    shorten(parts["p1"], max(used))
    found = predicted(parts, tables)
    fewer = [grow(frames, y, "multiclass", n_estimators=rounds)[0] for rounds in (3, 4)]
    assert any(np.array_equal(found, predicted(other, tables)) for other in fewer)
    assert "lost later splits" in caplog.text


def test_a_party_that_lost_everything_leaves_the_base_score():
    frames, y = split_table("multiclass", 3)
    parts, tables = grow(frames, y, "multiclass", n_estimators=2)
    for part in parts.values():
        shorten(part, 0)
    assert np.all(predicted(parts, tables) == parts["p0"].forest.objective.base_margins)


def test_parts_of_different_models_are_refused():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary", n_estimators=1)
    other = copy.deepcopy(parts["p1"])
    other.model_id = "another model"
    with pytest.raises(ConfigError, match="model"):
        predicted({**parts, "p1": other}, tables)


def test_an_owner_decides_only_records_it_has():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary", n_estimators=1)
    forest = parts["p0"].forest
    for tree in forest.trees:
        tree.record[tree.source == 1] += len(parts["p1"].splits)  # a tampered tree
    assert np.all(predicted(parts, tables) == forest.objective.base_margins)


def joined(parts, tables):
    splits = join_splits([parts[name].splits for name in tables], [len(table.columns) for table in tables.values()])
    return splits, np.concatenate([table.matrix() for table in tables.values()], axis=1)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_margins_leaves_and_stages_of_one_round_equal_those_from_values(task):
    frames, y = split_table(task, 3, dirty=True)
    parts, tables = grow(frames, y, task)
    played = collected(parts, tables)
    decided, forest = played.results["p0"], parts["p0"].forest
    splits, matrix = joined(parts, tables)
    n_outputs = forest.objective.n_outputs
    stages = list(staged_margins(decided, forest))
    assert len(stages) == 5
    for rounds, stage in enumerate(stages, start=1):
        expected = np.full((len(y), n_outputs), forest.objective.base_margins)
        Walk(forest.trees[: rounds * n_outputs], splits).add_to(expected, matrix)
        np.testing.assert_array_equal(stage, expected)
    np.testing.assert_array_equal(margins(decided, forest.objective), stages[-1])
    ends = leaves(decided)
    assert ends.dtype == np.int32
    np.testing.assert_array_equal(ends, leaves_from_values(forest.trees, splits, matrix))
    asked = [e.peer for e in played.transcripts["p0"].entries if e.step == "DecideRequest"]
    assert sorted(asked) == ["p1", "p2"], "one question per owner, whatever is made of the answers"


def test_decided_lines_are_the_owners_decisions_at_the_records_in_use():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary", n_estimators=3)
    decided = collected(parts, tables).results["p0"]
    for source, name in enumerate(tables):
        lines = decided.packed[decided.base[source] : decided.base[source + 1]]
        whole = parts[name].splits.decide(tables[name].matrix())
        np.testing.assert_array_equal(lines, whole[decided.used[source]])
        for tree, original in zip(decided.trees, parts["p0"].forest.trees, strict=True):
            mine = original.source == source
            np.testing.assert_array_equal(decided.used[source][tree.record[mine]], original.record[mine])
    assert decided.n_rows == len(y)


def test_trees_added_all_at_once_give_the_margins_of_one_round_at_a_time():
    frames, y = split_table("multiclass", 3, dirty=True)
    parts, tables = grow(frames, y, "multiclass")
    forest = parts["p0"].forest

    def add(party, step):
        add_trees = prediction.decided_by_all(party, parts["p0"], tables["p0"], 0, 1)
        total = np.full((len(y), 3), forest.objective.base_margins)
        for first in range(0, len(forest.trees), step):
            add_trees(forest.trees[first : first + step], total)
        for peer in party.peers:
            party.send(peer, Finish())
        return total

    def answer(party):
        rows = prediction.RowSets("p0", [tables[party.name].matrix()])
        while not isinstance(request := party.receive("p0", prediction.DecideRequest, Finish), Finish):
            for decided in rows.decide(request, parts[party.name].splits, 1):
                party.send("p0", decided)

    found = [
        predict(lambda party, step=step: add(party, step), answer, list(tables)).results["p0"]
        for step in (3, 6, len(forest.trees))
    ]
    splits, matrix = joined(parts, tables)
    expected = np.full((len(y), 3), forest.objective.base_margins)
    Walk(forest.trees, splits).add_to(expected, matrix)
    for total in found:
        np.testing.assert_array_equal(total, expected)


def test_no_trees_leave_the_base_margin_and_no_leaves():
    frames, y = split_table("multiclass", 2)
    parts, tables = grow(frames, y, "multiclass")
    forest = parts["p0"].forest
    del forest.trees[:]
    decided = collected(parts, tables).results["p0"]
    assert np.all(margins(decided, forest.objective) == forest.objective.base_margins)
    assert leaves(decided).shape == (len(y), 0)
    assert not list(staged_margins(decided, forest))


def test_a_whole_model_decides_its_rows_itself():
    frames, y = split_table("multiclass", 1)
    parts, tables = grow(frames, y, "multiclass")
    found = row_decisions(parts["p0"], tables["p0"])
    expected = predict_pooled([parts["p0"]], [tables["p0"]])
    np.testing.assert_array_equal(margins(found, parts["p0"].forest.objective), expected)
    np.testing.assert_array_equal(predicted(parts, tables), expected)


# ---------------------------------------------------------------- who is missing


@pytest.fixture(scope="module")
def three():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary")
    return parts, take(tables, slice(0, 40))


def test_an_absent_owner_is_named_with_the_rounds_that_do_without(three):
    parts, tables = three
    first = next(k for k, tree in enumerate(parts["p0"].forest.trees) if np.any(tree.source == 2))
    with pytest.raises(DataError, match=f"none of p2; the first {first} of 5 rounds do without"):
        collected(parts, {name: tables[name] for name in ("p0", "p1")})


def test_rounds_that_do_without_are_counted_by_round():
    frames, y = split_table("multiclass", 2)
    parts, tables = grow(frames, y, "multiclass")
    for number, tree in enumerate(parts["p0"].forest.trees):
        tree.source[tree.source == 1] = 1 if number == 7 else 0
        tree.source[:1] = 1 if number == 7 else tree.source[:1]
    with pytest.raises(DataError, match="none of p1; the first 2 of 5 rounds do without"):
        collected(parts, {"p0": tables["p0"]})


def test_the_others_hear_who_is_absent(three):
    parts, tables = three
    heard = []

    def listening(party):
        try:
            at(predict_passive, parts, tables)(party)
        except PeerAborted as error:
            heard.append(str(error))
            raise

    with pytest.raises(DataError):
        collected(parts, {name: tables[name] for name in ("p0", "p1")}, {"p1": listening})
    assert heard == [
        "p0 stopped the job: expected every owner of splits to take part in the prediction, got none of p2"
    ]


def test_a_party_that_owns_no_split_may_be_absent():
    frames, y = split_table("binary", 2)
    frames["p2"] = frames["p1"].iloc[:, :1] * 0.0
    parts, tables = grow(frames, y, "binary")
    whole = collected(parts, tables).results["p0"]
    without = collected(parts, {name: tables[name] for name in ("p0", "p1")}).results["p0"]
    objective = parts["p0"].forest.objective
    np.testing.assert_array_equal(margins(without, objective), margins(whole, objective))


def test_an_owner_that_leaves_before_it_answers_is_named(three):
    parts, tables = three

    def leaving(party):
        agree(party, {"model": "model", "rows to predict": 40})
        party.send("p0", RecordCount(len(parts["p1"].splits)))

    with pytest.raises(PeerLost, match="p1 has finished its part and left") as caught:
        collected(parts, tables, {"p1": leaving})
    assert caught.value.peer == "p1"


def test_a_warning_names_who_lost_splits(three, caplog):
    parts, tables = copy.deepcopy(three)
    shorten(parts["p2"], 0)
    decided = collected(parts, tables).results["p0"]
    assert f"predicting with {len(decided.trees)} of 5 rounds: p2 lost later splits" in caplog.text


def test_a_part_of_another_party_is_refused(three):
    parts, tables = three
    swapped = {**parts, "p1": parts["p2"]}
    with pytest.raises(DataError, match="expected the model part of p1, got that of p2"):
        collected(swapped, tables)


def test_a_table_without_the_columns_trained_on_is_refused(three):
    parts, tables = three
    with pytest.raises(DataError, match="the 5 columns the model of p1 was trained on"):
        collected(parts, {**tables, "p1": tables["p0"]})


@pytest.mark.parametrize(
    ("held", "answer", "expected"),
    [
        pytest.param(-1, None, "RecordCount", id="negative-count"),
        pytest.param(1 << 40, None, "RecordCount", id="huge-count"),
        pytest.param(99, np.zeros((1, 1), np.uint8), r"Decisions\.left", id="shape"),
        pytest.param(99, np.zeros((1, 1), np.int64), r"Decisions\.left", id="dtype"),
    ],
)
def test_a_malformed_answer_names_its_sender(three, held, answer, expected):
    parts, tables = three

    def malformed(party):
        agree(party, {"model": "model", "rows to predict": 40})
        party.send("p0", RecordCount(held))
        party.receive("p0", prediction.DecideRequest)
        party.send("p0", Decisions(Array.of(answer)))

    with pytest.raises(PeerProtocolError, match=expected) as caught:
        collected(parts, tables, {"p1": malformed})
    assert caught.value.peer == "p1"
