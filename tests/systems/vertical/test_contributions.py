"""Vertical TreeSHAP: equal to the pooled one, and nobody gets more than its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from systems.vertical.models_of_owners import contributions_of_xgboost, vertical_model
from systems.vertical.trained_models import at, predict
from treaty.data.table import Schema, Table
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, decode_body
from treaty.models.interpretation import explain_pooled, importances, joined_booster, pseudonym
from treaty.models.trees import predict_pooled
from treaty.systems.vertical.contributions import (
    ColumnNumbers,
    ColumnsRequest,
    OwnContributions,
    explain_active,
    explain_passive,
)
from treaty.systems.vertical.prediction import collect, predict_passive

CASES = {
    "binary": {},
    "softmax": {"objective": "softmax", "n_classes": 3},
    "regression-deep": {"objective": "squared_error", "max_depth": 7, "missing": 0.4},
    "base-score": {"base_score": 0.1},
    "two-parties": {"edges": (3,)},
    "four-parties": {"edges": (1, 2, 5), "max_depth": 6},
    "party-without-splits": {"edges": (1, 2), "max_depth": 1, "n_estimators": 1},
    "no-split-at-all": {"min_split_loss": 1e9},
}


def explain(parts, tables, replace=None):
    named = {part.party: part for part in parts}
    rows = dict(zip(named, tables, strict=True))
    return predict(at(explain_active, named, rows), at(explain_passive, named, rows), list(rows), replace)


def received(played, party, kind):
    entries = played.transcripts[party].entries
    return [
        decode_body(entry.content, kind, peer=entry.peer)
        for entry in entries
        if entry.direction == "received" and entry.step == kind.__name__
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_own_values_of_all_parties_are_the_pooled_contributions(case):
    parts, tables = vertical_model(**case)
    played = explain(parts, tables)
    kept = played.results["party0"]
    own = [kept.own, *(played.results[part.party] for part in parts[1:])]
    assert [values.shape[2] for values in own] == [len(part.schema.names) for part in parts]
    pooled = explain_pooled(parts, tables)
    np.testing.assert_allclose(np.concatenate(own, axis=2), pooled[:, :, :-1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(kept.bias, pooled[:, 0, -1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(kept.margins, predict_pooled(parts, tables), rtol=0, atol=1e-12)


def test_a_model_without_trees_explains_by_its_bias():
    parts, tables = vertical_model(base_score=0.3)
    parts[0].forest.trees.clear()
    played = explain(parts, tables)
    assert not np.any(played.results["party1"])
    np.testing.assert_allclose(played.results["party0"].margins, parts[0].forest.objective.base_margins[0])


def test_own_values_of_all_parties_equal_those_of_xgboost_on_the_joined_model():
    pytest.importorskip("xgboost")
    parts, tables = vertical_model(objective="softmax", n_classes=3)
    played = explain(parts, tables)
    own = [played.results["party0"].own, played.results["party1"], played.results["party2"]]
    theirs = contributions_of_xgboost(joined_booster(parts, [part.party for part in parts]), tables)[:, :, :-1]
    np.testing.assert_allclose(np.concatenate(own, axis=2).transpose(1, 0, 2), theirs, rtol=0, atol=1e-5)


def test_active_party_keeps_totals_and_columns_by_pseudonym():
    parts, tables = vertical_model()
    played = explain(parts, tables)
    kept = played.results["party0"]
    assert list(kept.others) == ["party1", "party2"]
    for party, values in kept.others.items():
        np.testing.assert_allclose(kept.totals[party], played.results[party].sum(axis=2), rtol=0, atol=1e-12)
        used = played.results[party][:, :, np.any(played.results[party] != 0.0, axis=(0, 1))]
        assert sorted(values.sum(axis=(0, 1))) == pytest.approx(sorted(used.sum(axis=(0, 1))), abs=1e-12)


def test_pseudonyms_of_explanations_are_those_of_importances():
    parts, tables = vertical_model(max_depth=6)
    played = explain(parts, tables)
    named, seen = importances(parts, "party0", "gain", consent=None), importances(parts, "party0", "gain")
    for part in parts[1:]:
        own, theirs = played.results["party0"].others[part.party], played.results[part.party]
        for number in range(own.shape[2]):
            column = part.schema.names[int(np.argmin(np.abs(theirs - own[:, :, [number]]).sum(axis=(0, 1))))]
            assert seen[part.party][pseudonym(part.party, number)] == named[part.party][column]


def test_passive_party_gets_the_values_of_its_used_columns_alone():
    parts, tables = vertical_model(edges=(1, 2))
    played = explain(parts, tables)
    for part in parts[1:]:
        (message,) = received(played, part.party, OwnContributions)
        used = {part.splits.feature[k] for k in range(len(part.splits))}
        assert message.values.shape == (1, len(used), tables[0].n_rows)
        steps = {entry.step for entry in played.transcripts[part.party].entries if entry.direction == "received"}
        assert steps == {"Terms", "Verdict", "DecideRequest", "Finish", "ColumnsRequest", "OwnContributions"}


def test_active_party_sees_neither_names_nor_positions_of_columns():
    parts, tables = vertical_model(edges=(1, 3), categorical=[])
    turned, turned_tables = [parts[0]], [tables[0]]
    for part, table in zip(parts[1:], tables[1:], strict=True):
        other, last = copy.deepcopy(part), len(part.schema.names) - 1
        other.splits.feature[:] = [last - feature for feature in part.splits.feature]
        other.schema = Schema(tuple(f"renamed {k}" for k in range(last + 1)), part.schema.categories)
        turned.append(other)
        turned_tables.append(Table(other.schema, table.columns[::-1], table.n_rows))
    one, two = explain(parts, tables), explain(turned, turned_tables)
    contents = [
        sorted((entry.peer, entry.step, bytes(entry.content)) for entry in played.transcripts["party0"].entries)
        for played in (one, two)
    ]
    assert contents[0] == contents[1]
    np.testing.assert_array_equal(one.results["party2"], two.results["party2"][:, :, ::-1])


def test_rounds_whose_splits_a_party_lost_are_left_out():
    parts, tables = vertical_model(n_estimators=6)
    shorter, _ = vertical_model(n_estimators=2)
    for name in parts[1].splits.__slots__:
        del getattr(parts[1].splits, name)[len(shorter[1].splits) :]
    kept = explain(parts, tables).results["party0"]
    expected = [predict_pooled(vertical_model(n_estimators=rounds)[0], tables) for rounds in (2, 3, 4)]
    assert any(np.allclose(kept.margins, margins, rtol=0, atol=1e-12) for margins in expected)


def _answers_columns(wrong, part, table):
    def role(party):
        at(predict_passive, {"party1": part}, {"party1": table})(party)
        asked = party.receive("party0", ColumnsRequest).records
        party.send("party0", ColumnNumbers(Array.of(wrong(asked.shape[0]))))
        party.receive("party0", OwnContributions)

    return role


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda n: np.zeros(n - 1, np.int32), r"expected int32 .* at ColumnNumbers.numbers from party1"),
        (lambda n: np.zeros(n, np.int64), r"expected int32 .*got int64 .* at ColumnNumbers.numbers from party1"),
        (lambda n: np.full(n, -1, np.int32), "order of first use.* ColumnNumbers.numbers from party1"),
        (lambda n: np.ones(n, np.int32), "order of first use.* ColumnNumbers.numbers from party1"),
        (lambda n: np.arange(0, 2 * n, 2, np.int32), "order of first use.* ColumnNumbers.numbers from party1"),
        (lambda n: np.append(np.zeros(n - 1, np.int32), np.int32(2**31 - 1)), "order of first use"),
    ],
    ids=["short", "type", "negative", "not-from-zero", "with-gaps", "huge"],
)
def test_malformed_columns_are_refused(wrong, message):
    parts, tables = vertical_model()
    role = _answers_columns(wrong, parts[1], tables[1])
    with pytest.raises(PeerProtocolError, match=message) as refused:
        explain(parts, tables, replace={"party1": role})
    assert refused.value.peer == "party1"


def _asks(records, values, part, table):
    """An active party that asks for other records or answers with other values."""

    def role(party):
        found = at(collect, {"party0": part}, {"party0": table})(party)
        used = dict(zip(part.forest.sources, found.used, strict=True))
        for peer in party.peers:
            party.send(peer, ColumnsRequest(Array.of(records(used[peer]))))
        for peer in party.peers:
            n_columns = max(party.receive(peer, ColumnNumbers).numbers.data.cast("i")) + 1
            party.send(peer, OwnContributions(Array.of(values(np.zeros((1, n_columns, table.n_rows))))))

    return role


def _same(array):
    return array


@pytest.mark.parametrize(
    ("records", "values", "message"),
    [
        (lambda r: r + 1000, _same, "expected records below .* ColumnsRequest from party0"),
        (lambda r: r - 1000, _same, "expected records below .* ColumnsRequest from party0"),
        (lambda r: r.astype(np.int64), _same, "expected int32 .* ColumnsRequest.records from party0"),
        (_same, lambda v: v[:, 1:], "expected float64 .* OwnContributions.values from party0"),
        (_same, lambda v: v[:, :, :-1], "expected float64 .* OwnContributions.values from party0"),
        (_same, lambda v: v.astype(np.float32), "expected float64 .* OwnContributions.values from party0"),
        (_same, lambda v: v[:0], "expected float64 .* OwnContributions.values from party0"),
        (_same, lambda v: v * np.nan, "expected finite values.* from party0"),
    ],
    ids=["beyond", "negative", "record-type", "columns", "rows", "value-type", "no-output", "nan"],
)
def test_malformed_messages_of_the_active_party_are_refused(records, values, message):
    parts, tables = vertical_model()
    role = _asks(records, values, parts[0], tables[0])
    with pytest.raises(PeerProtocolError, match=message) as refused:
        explain(parts, tables, replace={"party0": role})
    assert refused.value.peer == "party0"
