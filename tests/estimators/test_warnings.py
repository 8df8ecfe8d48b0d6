"""What a fit says in words: of parties' tables put in one place, of one party alone, and of models without splits."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

import treaty
from tables import FAST_KEY, cut, real_table
from treaty.systems import SYSTEMS


@pytest.mark.parametrize("kind", [treaty.GBDTClassifier, treaty.LogisticRegression, treaty.LinearRegression])
def test_parties_tables_in_one_place_are_warned_of(kind):
    X, y = real_table("binary")
    steady = {"tol": 1.0} if kind is treaty.LogisticRegression else {}
    with pytest.warns(UserWarning, match="joins the tables of p0, p1 in one place") as caught:
        kind(**steady).fit(cut(X, 2), y)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = kind(**steady).fit({"bank": X}, y)  # one party has nobody to keep its table from
        kind(**steady).fit(X, y)
        model.predict({"bank": X})


@pytest.mark.parametrize("name", SYSTEMS["trees"])
def test_one_party_alone_trains_or_is_told_where(name):
    X, y = real_table("binary")
    by_row = name in ("federboost-horizontal", "fedxgb")
    model = treaty.GBDTClassifier(name, n_estimators=1)
    if name == "pooled":
        assert model.fit({"bank": X}, y).predict({"bank": X}).shape == (len(X),)
        return
    with pytest.raises(treaty.ConfigError, match=r"got .*(bank|1).*one (party|participant|user)'s table is trained on"):
        model.fit({"bank": (X, y)}) if by_row else model.fit({"bank": X}, y)


@pytest.mark.parametrize("name", ["quasi-newton", "sgd"])
@pytest.mark.parametrize("kind", [treaty.LogisticRegression, treaty.LinearRegression, treaty.PoissonRegressor])
def test_one_party_alone_has_no_regression_between_parties(kind, name):
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match="got bank: one party's table is trained on under protocol 'pooled'"):
        kind(name).fit({"bank": X}, y)


CONSTANT = pd.DataFrame({"a": np.zeros(240), "b": np.full(240, np.nan)})


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({"rows": 39}, {}, "min_child_samples=20 rows need 40 rows, and there are 39"),
        ({}, {"subsample": 0.1}, "need 40 rows, and a tree draws 24 of 240"),
        ({"X": CONSTANT}, {}, "every column is constant"),
        ({"X": CONSTANT.assign(a=np.arange(240) < 19)}, {}, "no column has a cut with min_child_samples=20 rows on"),
        (
            {},
            {"min_child_weight": 100.0},
            "min_child_weight=100 need hessians of twice that, and the hessians of all",
        ),
        ({}, {"min_split_loss": 1e6}, "no split gains more than min_split_loss=1e\\+06"),
        ({}, {"reg_alpha": 1e6}, "no split gains anything under"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_model_without_a_split_says_why(changed, options, reason):
    X, y = real_table("binary", rows=changed.get("rows", 240))
    X = changed.get("X", X)
    for given, system in ((X, {}), ({"bank": X.iloc[:, :1], "shop": X.iloc[:, 1:]}, FAST_KEY)):
        with pytest.warns(UserWarning, match=f"no tree has a split.*{reason}"):
            model_of(system, n_estimators=1, **options).fit(given, y)


def model_of(system: dict, **options: object) -> treaty.GBDTClassifier:
    own = {name: value for name, value in system.items() if name not in ("protocol", "n_jobs")}
    return treaty.GBDTClassifier(treaty.SecureBoost(**own) if own else "pooled", n_jobs=1, **options)


def test_equal_labels_are_named():
    X, y = load_diabetes(return_X_y=True)
    with pytest.warns(UserWarning, match="no tree has a split.*all labels are equal"):
        treaty.GBDTRegressor(n_estimators=1, base_score=3.0).fit(X, np.full(len(y), 3.0))


def test_participants_rows_count_together():
    X, y = load_breast_cancer(return_X_y=True)
    shares = {f"p{k}": (X[k : 36 + k : 3], y[k : 36 + k : 3]) for k in range(3)}
    with pytest.warns(UserWarning, match="need 40 rows, and there are 36"):
        treaty.GBDTClassifier("federboost-horizontal", n_estimators=1).fit(shares)


def test_models_with_splits_are_silent():
    X, y = real_table("binary")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        treaty.GBDTClassifier(n_estimators=1).fit(X, y)
