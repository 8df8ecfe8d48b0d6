"""Models with splits, or weights, of partners: with them, without them, and from own columns alone."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fastapi.testclient import TestClient

import treaty
from serving.models import active_part, rows_of, shared
from tables import cut_for_active, real_table
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, PeerLost
from treaty.models.trees import ModelPart, predict_pooled
from treaty.serving.app import make_app
from treaty.serving.models import ServedModel, load_model
from treaty.serving.service import PredictionService
from treaty.trees.shap import node_weights


def client(task: str = "binary", **named: Any) -> TestClient:
    return TestClient(make_app(PredictionService(ServedModel(active_part(task)), **named)))


def matrix_of(table: pd.DataFrame, part: Any) -> np.ndarray:
    return to_table(table, schema=part.schema).matrix()


def test_without_partners_who_is_needed_is_named():
    answer = client().post("/predict", json={"rows": rows_of(shared()[1]["bank"].iloc[:1])})
    assert answer.status_code == 503
    assert "this model needs shop" in answer.json()["error"]
    assert "--fallback own" in answer.json()["error"]
    assert client().get("/model").json()["needs"] == ["shop"]


def test_partners_are_asked_with_ids_and_own_columns():
    estimator, tables = shared()
    asked = []

    def partners(ids: Any, table: Table) -> np.ndarray:
        asked.append(ids)
        places = [int(each) for each in ids]
        shop = to_table(tables["shop"].iloc[places], schema=estimator.parts_["shop"].schema)
        return predict_pooled(list(estimator.parts_.values()), [table, shop])

    answer = client(partners=partners).post(
        "/predict", json={"rows": rows_of(tables["bank"].iloc[3:9]), "ids": [str(place) for place in range(3, 9)]}
    )
    assert answer.json()["fallback"] is False
    found = [row["probability_1"] for row in answer.json()["predictions"]]
    expected = estimator.predict_proba({name: table.iloc[3:9] for name, table in tables.items()})[:, 1]
    assert found == expected.tolist()
    assert asked == [[str(place) for place in range(3, 9)]]
    answer = client(partners=partners).post("/predict", json={"rows": rows_of(tables["bank"].iloc[:1])})
    assert answer.status_code == 422
    shape = '{"rows": [{"column": value, ...}, ...], "ids": ["id", ...]}'
    assert answer.json()["error"] == f'expected a field "ids", got none: a request is {shape}'
    assert f"-d '{shape}'" in unescape(client(partners=partners).get("/docs").text)
    assert '"ids"' not in unescape(client(fallback=True).get("/docs").text)


def test_partners_that_fail_are_said_to_the_caller_and_why_to_the_log(caplog):
    def lost(ids: Any, table: Any) -> np.ndarray:
        raise PeerLost("shop", "shop at 10.1.2.3 is gone")

    body = {"rows": rows_of(shared()[1]["bank"].iloc[:2]), "ids": ["1", "2"]}
    answer = client(partners=lost).post("/predict", json=body)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "10"
    assert "10.1.2.3" not in answer.text
    assert "shop at 10.1.2.3 is gone" in caplog.text
    answer = client(partners=lost, fallback=True).post("/predict", json=body)
    assert answer.json()["fallback"] is True

    answer = client(partners=lambda ids, table: np.zeros((1, 1))).post("/predict", json=body)
    assert answer.status_code == 503
    assert "expected margins of 2 rows from partners, got 1" in caplog.text


def expected_margins(part: ModelPart, matrix: np.ndarray) -> np.ndarray:
    """Return margins by the definition: at a partner's split the mean of both sides, by their covers."""
    forest = part.forest
    assert forest is not None
    own = forest.sources.index(part.party)
    goes_left = np.unpackbits(part.splits.decide(matrix), axis=1, count=len(matrix)).astype(bool)
    margins = np.full((len(matrix), forest.objective.n_outputs), forest.objective.base_margins)
    for number, tree in enumerate(forest.trees):
        weights, values = node_weights(tree), np.zeros((len(tree.left), len(matrix)))
        for node in reversed(range(len(tree.left))):
            left = tree.left[node]
            if left < 0:
                values[node] = tree.value[node]
            elif tree.source[node] == own:
                values[node] = np.where(goes_left[tree.record[node]], values[left], values[left + 1])
            else:
                values[node] = np.average(values[left : left + 2], axis=0, weights=weights[left : left + 2])
        margins[:, number % forest.objective.n_outputs] += values[0]
    return margins


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_a_fallback_says_what_trees_are_expected_to_say_without_the_partners(task):
    part, (_, tables) = active_part(task), shared(task)
    sources = {int(s) for tree in part.forest.trees for s in np.unique(tree.source)}
    assert sources == {-1, 0, 1}, "both must have splits"
    answer = client(task, fallback=True).post("/predict", json={"rows": rows_of(tables["bank"])})
    assert answer.json()["fallback"] is True
    matrix = matrix_of(tables["bank"], part)
    margins = ServedModel(part).fallback()(matrix, 2)
    np.testing.assert_allclose(margins, expected_margins(part, matrix), rtol=1e-12, atol=1e-12)
    found = pd.DataFrame(answer.json()["predictions"])
    assert found.to_dict("list") == {name: of.tolist() for name, of in part.predictions(margins).items()}


def test_rows_of_a_fallback_are_counted():
    asked = client(fallback=True)
    asked.post("/predict", json={"rows": rows_of(shared()[1]["bank"].iloc[:4])})
    assert "treaty_serve_fallback_rows_total 4.0" in asked.get("/metrics").text
    assert "leave out the columns of shop" in asked.get("/docs").text


def test_a_fallback_with_all_splits_own_is_the_prediction():
    X = pd.concat(shared()[1].values(), axis=1)
    part = treaty.GBDTClassifier("pooled", n_estimators=6).fit(X, real_table("binary", rows=180)[1]).parts_["pooled"]
    served, matrix = ServedModel(part), matrix_of(X, part)
    np.testing.assert_array_equal(served.fallback()(matrix, 1), served.margins(matrix))


def test_what_cannot_be_fallen_back_on_is_refused():
    part = active_part()
    trees = [replace(tree, source=np.where(tree.source < 0, -1, 1).astype(np.int16)) for tree in part.forest.trees]
    others = ModelPart(
        model_id=part.model_id, party=part.party, schema=part.schema, splits=part.splits,
        forest=replace(part.forest, trees=trees),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="no split is on columns of bank"):
        PredictionService(ServedModel(others), fallback=True)
    trees = [replace(tree, count=np.zeros_like(tree.count)) for tree in part.forest.trees]
    others.forest = replace(part.forest, trees=trees)
    with pytest.raises(ConfigError, match="needs the covers of nodes"):
        PredictionService(ServedModel(others), fallback=True)


@pytest.fixture(scope="module")
def logistic():
    X, y = real_table("binary", rows=240)
    tables = cut_for_active(X, 2)
    return treaty.LogisticRegression(treaty.QuasiNewton(), max_iter=3, batch_size=120).fit(tables, y), tables


@pytest.mark.filterwarnings("ignore:training ended", "ignore:.*beyond 4")
def test_a_linear_part_needs_the_other_weights_and_falls_back_on_their_mean(logistic, tmp_path):
    estimator, tables = logistic
    served = ServedModel(estimator.parts_["p0"])
    assert served.needs == ("p1",)
    matrix = matrix_of(tables["p0"], served.part)
    given = served.part.margins(to_table(tables["p0"], schema=served.part.schema))
    np.testing.assert_array_equal(served.fallback()(matrix, 1), given)
    others = estimator.parts_["p1"].margins(to_table(tables["p1"], schema=estimator.parts_["p1"].schema))
    assert abs(others.mean()) < 1e-6
    estimator.save(tmp_path / "model")
    assert load_model(tmp_path / "model" / "p0.part").needs == ("p1",)


def test_parts_that_cannot_be_served_are_refused(tmp_path):
    estimator, _ = shared()
    estimator.save(tmp_path / "model")
    with pytest.raises(ConfigError, match="got that of shop, a passive one"):
        load_model(tmp_path / "model" / "shop.part")
    with pytest.raises(ConfigError, match="got 2 of them: name the active party's file"):
        load_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="got another kind of file"):
        load_model(tmp_path / "model" / "model.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="with one part of a model, got none"):
        load_model(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot read"):
        load_model(tmp_path / "none.part")
