"""Sets of categories: test accuracy of the pooled grower by which sets it tries, beside XGBoost and LightGBM.

`category_sets.csv`: tables of one column of categories and one to three of numbers, with an effect of categories and
without; flights by their plane; Adult's raw columns. 20 trees of depth 3 at a rate of 0.3, 255 bins, 70 % of the rows
train. "halves" and "sorted" are `category_sets` with `max_cat_to_onehot=4`; "single" is one category against the rest.
Two minutes; `--quick`: two tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import lightgbm
import numpy as np
import pandas as pd
import xgboost
from sklearn.metrics import roc_auc_score

from data import arguments, find, report
from treaty import GBDTClassifier

COMMON = {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3, "n_jobs": 1}
NAMES = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain "
    "capital-loss hours-per-week native-country income"
).split()


def tables() -> Iterator[tuple[str, pd.DataFrame, pd.Series]]:
    """Yield titles, columns and labels."""
    rng = np.random.default_rng(27)
    for levels, rows in ((50, 40), (250, 40)):
        code = np.repeat(np.arange(levels), rows)
        y = (rng.random(levels) < 0.5)[code] ^ (rng.random(len(code)) < 0.1)
        yield f"{levels} categories, two kinds", pd.DataFrame({"c": code, "x": rng.normal(size=len(code))}), y
    for effect in (1.0, 0.0):
        code, x = rng.integers(0, 250, 12_000), rng.normal(size=(12_000, 3))
        score = effect * rng.normal(size=250)[code] + 0.7 * x[:, 0] + 0.3 * x[:, 1]
        y = rng.random(12_000) < 1 / (1 + np.exp(-score))
        title = "250 categories, normal effect" if effect else "250 categories, no effect"
        yield title, pd.DataFrame({"c": code, "x": x[:, 0], "x1": x[:, 1], "x2": x[:, 2]}), y
    if (path := find("flights.parquet")) is not None:
        flights = pd.read_parquet(path).sample(25_000, random_state=0).reset_index(drop=True)
        most = flights["tailnum"].value_counts().index[:250]
        flights["tailnum"] = flights["tailnum"].where(flights["tailnum"].isin(most))
        names = ["carrier", "origin", "dest", "tailnum", "sched_dep_min", "month", "distance", "humid", "visib", "temp"]
        yield "flights", flights[names], flights["arr_late15"] == 1
    if (path := find("adult.data.gz")) is not None:
        adult = pd.read_csv(path, names=NAMES, skipinitialspace=True)
        yield "Adult, raw", adult.drop(columns="income"), adult["income"] == ">50K"


def main() -> None:
    options, rows = arguments(__doc__).parse_args(), []
    for number, (title, X, y) in enumerate(tables()):
        if options.quick and number not in (1, 3):
            continue
        X = X.assign(**{
            name: pd.Categorical(X[name].astype("string"))
            for name in X
            if name == "c" or X[name].dtype.kind not in "if"
        })  # fmt: skip
        y, test = np.asarray(y, int), np.random.default_rng(0).random(len(X)) < 0.3
        sets = {"max_bin": 255, "max_cat_to_onehot": 4}
        models = {
            "halves": GBDTClassifier(**sets, **COMMON),
            "sorted": GBDTClassifier(category_sets="sorted", **sets, **COMMON),
            "single": GBDTClassifier(max_bin=255, **COMMON),
            "XGBoost": xgboost.XGBClassifier(tree_method="hist", enable_categorical=True, **COMMON),
            "LightGBM": lightgbm.LGBMClassifier(verbose=-1, **COMMON),
        }
        for name, model in models.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = model.fit(X[~test], y[~test]).predict_proba(X[test])[:, 1]
            accuracy = float(((found > 0.5) == y[test]).mean())
            rows.append(
                {"table": title, "model": name, "accuracy": accuracy, "AUC": float(roc_auc_score(y[test], found))}
            )
    report("category_sets", rows, quick=options.quick)


if __name__ == "__main__":
    main()
