"""Contributions with names: as a dataframe, and as shap's explanation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import xgboost

import treaty
from tables import cut, real_table, with_categories, with_gaps

FAST = treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True)


@pytest.mark.parametrize(("convert", "kind"), [(lambda X: X, pd.DataFrame), (pl.from_pandas, pl.DataFrame)])
def test_a_frame_of_contributions_has_the_columns_of_the_table(convert, kind):
    X, y = real_table("binary")
    X = convert(with_gaps(X))
    model = treaty.GBDTClassifier(n_estimators=3).fit(X, y)
    frame = model.contributions_frame(X)
    assert isinstance(frame, kind)
    assert list(frame.columns) == [*X.columns, "bias"]
    np.testing.assert_array_equal(frame.to_numpy(), model.predict_contributions(X))


def test_a_frame_of_an_arrays_contributions_is_arrows():
    X, y = real_table("regression")
    model = treaty.GBDTRegressor(n_estimators=2, base_score=150.0).fit(X.to_numpy(), y)
    frame = model.contributions_frame(X.to_numpy())
    assert isinstance(frame, pa.Table)
    assert frame.column_names == [*(f"f{k}" for k in range(X.shape[1])), "bias"]


def test_contributions_of_one_table_of_parties_are_in_the_tables_order():
    X, y = real_table("binary")
    parties = {"bank": list(X.columns[1::2]), "shop": list(X.columns[::2])}
    model = treaty.GBDTClassifier(FAST, n_estimators=3, parties=parties).fit(X, y)
    frame = model.contributions_frame(X)
    apart = model.predict_contributions(X)
    assert list(frame.columns) == [*X.columns, "bias"]
    for party, columns in parties.items():
        np.testing.assert_array_equal(frame[columns].to_numpy(), apart.values[party])


def test_contributions_to_several_classes_have_a_column_for_each():
    X, y = real_table("multiclass", rows=100)
    model = treaty.GBDTClassifier(n_estimators=2, n_jobs=1).fit(X, y)
    frame, values = model.contributions_frame(X), model.predict_contributions(X)
    names = [*X.columns, "bias"]
    assert list(frame.columns) == [f"{name}: {label}" for name in names for label in model.classes_]
    for number, label in enumerate(model.classes_):
        of_class = frame[[f"{name}: {label}" for name in names]].to_numpy()
        np.testing.assert_array_equal(of_class, values[:, number])
        np.testing.assert_allclose(of_class.sum(axis=1), model.decision_function(X)[:, number], rtol=1e-9)


def test_explaining_without_shap_says_what_to_install(without):
    X, y = real_table("binary")
    model = treaty.GBDTClassifier(n_estimators=1).fit(X, y)
    without("shap")
    with pytest.raises(treaty.ConfigError, match=r"explain\(\) needs shap: pip install 'treaty-learn\[shap\]'"):
        model.explain(X)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
@pytest.mark.parametrize("protocol", ["pooled", FAST], ids=str)
def test_an_explanation_of_shap_has_values_names_and_categories(task, protocol):
    shap = pytest.importorskip("shap", reason="shap is not installed: pip install 'treaty-learn[shap]'")
    X, y = real_table(task)
    X = with_categories(X)
    given = X if protocol == "pooled" else cut(X, 2)
    model = treaty.GBDTClassifier(protocol, n_estimators=3).fit(given, y)
    found = model.explain(given)
    assert isinstance(found, shap.Explanation)
    contributions = model.predict_contributions(given)
    joined = contributions if isinstance(contributions, np.ndarray) else contributions.joined()
    values = joined[..., :-1] if task == "binary" else joined[..., :-1].transpose(0, 2, 1)
    np.testing.assert_array_equal(found.values, values)
    np.testing.assert_array_equal(found.base_values, joined[..., -1])
    assert [name.rpartition(".")[2] for name in found.feature_names] == list(X.columns)
    first = X.iloc[:, 0].astype(object)
    shown = found.display_data[:, 0]
    assert [value if isinstance(value, str) else None for value in first] == list(shown)
    np.testing.assert_allclose(found.data[:, 1].astype(float), X.iloc[:, 1], rtol=1e-6)


def test_shap_draws_a_beeswarm_of_parties_columns(monkeypatch):
    shap = pytest.importorskip("shap", reason="shap is not installed: pip install 'treaty-learn[shap]'")
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    X, y = real_table("binary")
    parties = {"bank": list(X.columns[1::2]), "shop": list(X.columns[::2])}
    model = treaty.GBDTClassifier(FAST, n_estimators=3, parties=parties).fit(X, y)
    axes = shap.plots.beeswarm(model.explain(X), show=False)
    drawn = {label.get_text() for label in axes.get_yticklabels()}
    assert X.columns[int(np.argmax(model.feature_importances_))] in drawn


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_shaps_tree_explainer_takes_exported_boosters_with_categories(task):
    shap = pytest.importorskip("shap", reason="shap is not installed: pip install 'treaty-learn[shap]'")
    X, y = real_table(task)
    X = with_categories(X)
    model = treaty.GBDTClassifier(n_estimators=3).fit(X, y)
    theirs = shap.TreeExplainer(model.to_xgboost())(xgboost.DMatrix(X, enable_categorical=True))
    np.testing.assert_allclose(theirs.values, model.explain(X).values, atol=1e-5)
