"""Importances as a viewer may see them, and the model joined from willing parties."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from systems.vertical.models_of_owners import contributions_of_xgboost, vertical_model
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError
from treaty.models.interpretation import (
    Contributions,
    explain_pooled,
    importances,
    joined_booster,
    order_of_first_use,
    rows_first,
)
from treaty.models.trees import load_part, predict_pooled

OTHERS = ["party1", "party2"]
KINDS = {"gain": "total_gain", "cover": "total_cover", "count": "weight"}
ONLY_FIRST = {"edges": (5,), "max_depth": 1, "n_estimators": 1, "categorical": []}


@pytest.fixture(scope="module")
def model():
    return vertical_model(objective="softmax", n_classes=3)


def _flat(found):
    return {f"{party}.{name}": value for party, of_party in found.items() for name, value in of_party.items()}


def _turned(part, table):
    """The same part and table with the columns in the opposite order."""
    last = len(part.schema.names) - 1
    part = copy.deepcopy(part)
    part.splits.feature[:] = [last - feature for feature in part.splits.feature]
    part.schema = Schema(part.schema.names[::-1], part.schema.categories[::-1])
    return part, Table(part.schema, table.columns[::-1], table.n_rows)


@pytest.mark.parametrize("kind", KINDS)
def test_importances_equal_those_of_xgboost_on_the_joined_model(model, kind):
    pytest.importorskip("xgboost")
    parts, _ = model
    theirs = joined_booster(parts, OTHERS).get_score(importance_type=KINDS[kind])
    ours = _flat(importances(parts, "party0", kind, consent=None))
    assert set(ours) == {f"{part.party}.{name}" for part in parts for name in part.schema.names}
    assert {name: value for name, value in ours.items() if value > 0} == pytest.approx(theirs, rel=1e-5)


def test_importances_show_foreign_columns_by_pseudonym(model):
    parts, _ = model
    named = importances(parts, "party1", consent=None)
    seen = importances(parts, "party1")
    assert seen["party1"] == named["party1"]
    for party in ("party0", "party2"):
        assert set(seen[party]) == {f"{party} #{k + 1}" for k in range(len(seen[party]))}
        assert sorted(seen[party].values()) == sorted(value for value in named[party].values() if value > 0)


def test_importances_name_the_columns_of_those_who_consent(model):
    parts, _ = model
    seen = importances(parts, "party0", consent=["party2"])
    named = importances(parts, "party0", consent=None)
    assert seen["party2"] == named["party2"]
    assert seen["party1"] != named["party1"]


def test_pseudonyms_say_nothing_of_positions(model):
    parts, tables = model
    turned = [parts[0], *(_turned(part, table)[0] for part, table in zip(parts[1:], tables[1:], strict=True))]
    assert [part.splits.feature for part in turned] != [part.splits.feature for part in parts]
    assert importances(turned, "party0") == importances(parts, "party0")


def test_pseudonyms_count_columns_by_their_first_split():
    assert order_of_first_use(np.array([5, 2, 5, 0, 2, 9])).tolist() == [0, 1, 0, 2, 1, 3]
    assert order_of_first_use(np.zeros(0, np.int32)).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_normalised_importances_add_up_to_one_over_all_parties(model, kind):
    whole = importances(model[0], "party0", kind)
    scaled = importances(model[0], "party0", kind, normalised=True)
    total = sum(_flat(whole).values())
    assert sum(_flat(scaled).values()) == pytest.approx(1.0)
    assert {name: total * value for name, value in _flat(scaled).items()} == pytest.approx(_flat(whole))


def test_importances_of_trees_without_a_split_are_zero():
    parts, _ = vertical_model(min_split_loss=1e9)
    found = importances(parts, "party0", normalised=True)
    assert set(found["party0"].values()) == {0.0}
    assert found["party1"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"viewer": "stranger"}, "stranger"),
        ({"viewer": "party0", "consent": ["shop"]}, "got shop"),
        ({"viewer": "party0", "consent": "shop"}, "got shop$"),
        ({"viewer": "party0", "kind": "weight"}, "'gain', 'cover' or 'count'"),
    ],
    ids=["viewer", "consent", "consent-as-text", "kind"],
)
def test_importances_refuse_unknown_names(model, options, message):
    with pytest.raises(ConfigError, match=message):
        importances(model[0], **options)


def test_importances_refuse_parts_that_lost_splits(model):
    parts = [model[0][0], copy.deepcopy(model[0][1]), model[0][2]]
    del parts[1].splits.feature[3:]
    with pytest.raises(DataError, match="splits of party1, got 3"):
        importances(parts, "party0")
    with pytest.raises(DataError, match="splits of party1, got 3"):
        joined_booster(parts, OTHERS)


@pytest.mark.parametrize("consent", [["party0", "party2"], ["party2"], []], ids=["two", "one", "none"])
def test_joined_model_needs_the_consent_of_every_owner_of_splits(model, consent):
    with pytest.raises(ConfigError, match=r"part of party1.* thresholds and categories.*'party1', 'party2'"):
        joined_booster(model[0], consent)


def test_joined_model_needs_the_part_of_every_owner_of_splits(model):
    with pytest.raises(ConfigError, match="consent and part of party2, whose"):
        joined_booster(model[0][:2], OTHERS)


def test_joined_model_refuses_a_consent_of_nobody(model):
    with pytest.raises(ConfigError, match="got shop"):
        joined_booster(model[0], ["party1", "party2", "shop"])


def test_joined_model_leaves_out_unwilling_parties_without_a_split():
    pytest.importorskip("xgboost")
    parts, tables = vertical_model(**ONLY_FIRST)
    assert np.all(parts[0].forest.trees[0].source <= 0)
    for booster in (joined_booster(parts, []), joined_booster(parts[:1])):
        assert booster.feature_names == [f"party0.{name}" for name in parts[0].schema.names]
        values = contributions_of_xgboost(booster, tables[:1])
        np.testing.assert_allclose(rows_first(explain_pooled(parts, tables))[:, :5], values[:, 0, :5], atol=1e-6)


def test_joined_model_of_files_in_any_order_predicts_like_the_parts(model, tmp_path):
    xgboost = pytest.importorskip("xgboost")
    parts, tables = model
    for part in parts:
        part.save(tmp_path / part.party)
    booster = joined_booster([load_part(tmp_path / f"party{k}") for k in (2, 0, 1)], OTHERS)
    assert booster.feature_names == [f"{part.party}.{name}" for part in parts for name in part.schema.names]
    matrix = xgboost.DMatrix(
        np.hstack([table.matrix() for table in tables]),
        feature_names=booster.feature_names,
        feature_types=booster.feature_types,
        enable_categorical=True,
    )
    margins = booster.predict(matrix, output_margin=True)
    np.testing.assert_allclose(margins, predict_pooled(parts, tables), rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["other-model", "twice", "no-forest"])
def test_joined_model_refuses_parts_that_are_not_of_one_model(model, wrong):
    parts = [copy.deepcopy(part) for part in model[0]]
    if wrong == "other-model":
        parts[1].model_id = "another"
    elif wrong == "twice":
        parts.append(parts[1])
    else:
        parts[0].forest = None
    with pytest.raises(DataError, match="parts of one model"):
        joined_booster(parts)


@pytest.mark.parametrize("objective", ["logistic", "softmax"])
def test_contributions_join_to_the_layout_of_xgboost(objective):
    pytest.importorskip("xgboost")
    parts, tables = vertical_model(objective=objective, n_classes=3 if objective == "softmax" else 2)
    every = explain_pooled(parts, tables)
    edges = np.cumsum([0, *(len(part.schema.names) for part in parts)])
    values = {part.party: rows_first(every[:, :, a:b]) for part, a, b in zip(parts, edges, edges[1:], strict=False)}
    joined = Contributions(values, every[:, 0, -1]).joined()
    np.testing.assert_array_equal(joined, rows_first(every))
    theirs = contributions_of_xgboost(joined_booster(parts, OTHERS), tables)
    np.testing.assert_allclose(joined, theirs if objective == "softmax" else theirs[:, 0], rtol=0, atol=1e-5)
