"""Indexes of dataframes: rows go by position, and whoever says otherwise is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer

import treaty
from treaty.estimators.inputs import check_row_labels

ANOTHER_ORDER = "same labels in another order"
PARTIES_OF_COLUMNS = [
    treaty.GBDTClassifier("pooled", n_estimators=1),
    treaty.GBDTClassifier("secureboost", n_estimators=1),
    treaty.GBDTClassifier("fedxgboost-smm", n_estimators=1),
    treaty.GBDTClassifier("fedxgboost-ldp", n_estimators=1),
    treaty.GBDTClassifier("federboost-vertical", n_estimators=1),
    treaty.GBDTRegressor("secureboost", n_estimators=1),
    treaty.LogisticRegression("pooled"),
    treaty.LogisticRegression("quasi-newton"),
    treaty.LogisticRegression("sgd"),
    treaty.LinearRegression("quasi-newton"),
    treaty.PoissonRegressor("pooled"),
]


def parties() -> tuple[dict[str, pd.DataFrame], pd.Series]:
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    index = pd.Index([f"patient {k}" for k in range(len(X))])
    return {"bank": X.iloc[:, :4].set_index(index), "shop": X.iloc[:, 4:8].set_index(index)}, y.set_axis(index)


def shuffled(table: Any) -> Any:
    return table.sample(frac=1, random_state=0)


@pytest.mark.parametrize("model", PARTIES_OF_COLUMNS, ids=lambda model: f"{type(model).__name__}-{model.protocol}")
def test_parties_whose_indexes_have_another_order_are_refused(model):
    X, y = parties()
    with pytest.raises(treaty.DataError, match=f"indexes of bank and shop have the {ANOTHER_ORDER}.*reset_index"):
        model.fit({**X, "shop": shuffled(X["shop"])}, y)
    with pytest.raises(treaty.DataError, match=f"bank and y have the {ANOTHER_ORDER}"):
        model.fit(X, shuffled(y))
    with pytest.raises(treaty.DataError, match=f"bank and sample_weight have the {ANOTHER_ORDER}"):
        model.fit(X, y.to_numpy(), sample_weight=shuffled(y + 1.0))


def test_eval_sets_and_tables_to_predict_are_refused_in_another_order():
    X, y = parties()
    model = treaty.GBDTClassifier(n_estimators=2)
    for bad in (({**X, "shop": shuffled(X["shop"])}, y), (X, shuffled(y))):
        with pytest.raises(treaty.DataError, match=ANOTHER_ORDER):
            model.fit(X, y, eval_set=[(X, y), bad])
    model.fit(X, y)
    for predict in (model.predict, model.predict_proba, model.predict_contributions):
        with pytest.raises(treaty.DataError, match=ANOTHER_ORDER):
            predict({**X, "shop": shuffled(X["shop"])})


def test_groups_of_a_ranking_are_refused_in_another_order():
    X, y = parties()
    groups = pd.Series(np.arange(len(y)) // 50, y.index)
    with pytest.raises(treaty.DataError, match=f"bank and qid have the {ANOTHER_ORDER}"):
        treaty.GBDTRanker(n_estimators=1).fit(X, y, qid=shuffled(groups))


def test_an_index_that_nobody_gave_is_compared_for_its_order_alone():
    X, y = parties()
    plain = {name: table.reset_index(drop=True) for name, table in X.items()}
    with pytest.raises(treaty.DataError, match=ANOTHER_ORDER):  # a shuffled table beside one as it was read
        treaty.GBDTClassifier(n_estimators=1).fit({**plain, "shop": shuffled(plain["shop"])}, y)
    with pytest.raises(treaty.DataError, match="bank and shop have different labels"):
        treaty.GBDTClassifier(n_estimators=1).fit({**X, "shop": X["shop"].set_index("customer " + y.index)}, y)
    treaty.GBDTClassifier(n_estimators=1).fit({**X, "shop": plain["shop"]}, y.to_numpy())
    treaty.GBDTClassifier(n_estimators=1).fit(plain, y)
    treaty.GBDTClassifier(n_estimators=1).fit({name: table.to_numpy() for name, table in X.items()}, shuffled(y))


ONE_TABLE = [
    treaty.GBDTClassifier(n_estimators=1, n_jobs=1),
    treaty.GBDTClassifier("secureboost", n_estimators=1, parties={"bank": ["mean radius"], "shop": ["mean area"]}),
    treaty.LogisticRegression(n_jobs=1),
]


@pytest.mark.parametrize("model", ONE_TABLE, ids=["pooled", "parties", "linear"])
@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
def test_one_table_and_what_goes_with_it_are_in_one_order(model, named):
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    index = pd.Index([f"patient {k}" for k in range(len(X))] if named else range(len(X)))
    X, y = X[["mean radius", "mean area"]].set_axis(index), y.set_axis(index)
    with pytest.raises(treaty.DataError, match=f"indexes of .* and y have the {ANOTHER_ORDER}|y and .*{ANOTHER_ORDER}"):
        model.fit(X, shuffled(y))
    with pytest.raises(treaty.DataError, match=ANOTHER_ORDER):
        model.fit(X, y, sample_weight=shuffled(y + 1.0))
    with pytest.raises(treaty.DataError, match=ANOTHER_ORDER):
        model.fit(X, y, eval_set=(X, shuffled(y)))


def test_groups_and_holders_of_rows_are_in_one_order():
    X, y = parties()
    groups = pd.Series(np.arange(len(y)) // 50, y.index)
    with pytest.raises(treaty.DataError, match=f"X and qid have the {ANOTHER_ORDER}"):
        treaty.GBDTRanker(n_estimators=1).fit(X["bank"], y, qid=shuffled(groups))
    rows = {"north": (X["bank"], y), "south": (X["bank"], shuffled(y))}
    with pytest.raises(treaty.DataError, match=f"south's X and south's y have the {ANOTHER_ORDER}"):
        treaty.GBDTClassifier("federboost-horizontal", n_estimators=1).fit(rows)


def test_one_tables_repeated_and_own_labels_are_no_order():
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    model, X = treaty.GBDTClassifier(n_estimators=1, n_jobs=1), X[["mean radius"]]
    plain = model.fit(X, y).predict_proba(X)
    for index in (np.arange(len(X)) % 7, [f"r{k}" for k in range(len(X))]):
        np.testing.assert_array_equal(model.fit(X.set_axis(index), y).predict_proba(X), plain)


def test_any_index_is_compared():
    dates = pd.date_range("2026-01-01", periods=6)
    levels = pd.MultiIndex.from_product([["a", "b"], [1, 2, 3]])
    for index in (dates, levels, pd.Index([7, 7, 8, 9, None, 1.5]), pd.RangeIndex(3, 9), pd.RangeIndex(5, -1, -1)):
        table = pd.DataFrame({"a": range(6)}, index)
        check_row_labels([("a", table), ("b", table.copy()), ("c", table["a"]), ("d", np.zeros(6)), ("e", None)])
        with pytest.raises(treaty.DataError, match=f"a and b have the {ANOTHER_ORDER}"):
            check_row_labels([("a", table), ("b", table.iloc[::-1])])
    check_row_labels([("a", table), ("b", pd.DataFrame([[1, 2]], columns=["a", "a"]))])  # another error says more


def test_scores_and_reports_are_of_rows_in_one_order(tmp_path):
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    X, y = X.iloc[:, :3].set_axis(X.index + 7), y.set_axis(y.index + 7)
    weights, groups = pd.Series(1.0, y.index), pd.Series(np.arange(len(y)) // 50, y.index)
    models = [
        treaty.GBDTClassifier(n_estimators=1), treaty.GBDTRegressor(n_estimators=1),
        treaty.LogisticRegression(treaty.Pooled(loss="logistic")), treaty.LinearRegression(), treaty.PoissonRegressor(),
    ]  # fmt: skip
    for model in models:
        model.set_params(n_jobs=1).fit(X, y)
        for labels, beside in ((shuffled(y), None), (y, shuffled(weights))):
            with pytest.raises(treaty.DataError, match=ANOTHER_ORDER):
                model.score(X, labels, beside)
        assert model.score(X, y.to_numpy(), weights) == model.score(X, y)
    with pytest.raises(treaty.DataError, match=ANOTHER_ORDER):
        models[0].report(tmp_path / "report.html", X, shuffled(y))
    ranker = treaty.GBDTRanker(n_estimators=1, n_jobs=1).fit(X, y, qid=groups)
    with pytest.raises(treaty.DataError, match=f"X and qid have the {ANOTHER_ORDER}"):
        ranker.score(X, y, qid=shuffled(groups))
