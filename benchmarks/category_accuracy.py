"""Accuracy on columns of many categories, beside XGBoost, LightGBM and scikit-learn with the same trees.

    python benchmarks/category_accuracy.py [--sealed] [--trees 20 --depth 3 --rate 0.3]

Tables are made here. In three of them each of 50, 300 or 2,000 categories has a label of its own, which a tenth of the
rows contradict. "postal" has 900 postal codes along a line, on which the log-odds are a smooth curve. "diagnoses" has
three columns of 700 codes, the commonest 1,350 times as frequent as the rarest, and five columns of numbers. Three
tenths of the rows are tested. Docs: docs/explanation/growth_measurements.md.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import xgboost
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

import treaty

Columns = dict[str, Any]


def coded(levels: int, rows: int, rng: np.random.Generator) -> tuple[Columns, np.ndarray]:
    """Return a column of so many categories with as many rows each, one without meaning, and labels."""
    effect, code = rng.random(levels) < 0.5, np.repeat(np.arange(levels), rows)
    y = effect[code] ^ (rng.random(len(code)) < 0.1)
    return {"code": pd.Categorical([f"k{number}" for number in code]), "x": rng.normal(size=len(code))}, y


def postal(rng: np.random.Generator, rows: int = 20_000, codes: int = 900) -> tuple[Columns, np.ndarray]:
    place, code = np.sort(rng.random(codes)), rng.choice(codes, rows, p=rng.dirichlet(np.ones(codes)))
    x1, x2 = rng.normal(size=(2, rows))
    odds = 1.5 * np.sin(9 * place[code]) + 0.8 * np.cos(23 * place[code]) + 0.7 * x1 + 0.3 * x2
    columns = {"postal_code": pd.Categorical([f"{10_000 + 7 * number}" for number in code]), "x1": x1, "x2": x2}
    return columns, odds + rng.logistic(size=rows) > 0


def diagnoses(rng: np.random.Generator, rows: int = 40_000, codes: int = 700) -> tuple[Columns, np.ndarray]:
    share = 1 / np.arange(1, codes + 1) ** 1.1
    effect = 0.7 * rng.normal(size=codes)
    drawn = [rng.choice(codes, rows, p=share / share.sum()) for _ in range(3)]
    numbers, age = rng.poisson(3, (rows, 4)), rng.integers(0, 10, rows)
    odds = effect[drawn[0]] + 0.5 * effect[drawn[1]] + 0.3 * effect[drawn[2]]
    odds += 0.25 * numbers[:, 0] + 0.1 * numbers[:, 1] + 0.08 * age - 2.2
    columns = {f"diagnosis_{k}": pd.Categorical([f"{code:03}" for code in of]) for k, of in enumerate(drawn)}
    columns |= {f"number_{k}": numbers[:, k] for k in range(4)} | {"age": age}
    return columns, odds + rng.logistic(size=rows) > 0


def tables() -> Iterator[tuple[str, pd.DataFrame, np.ndarray, np.ndarray]]:
    """Yield the tables' names, columns, labels, and which rows are tested."""
    rng = np.random.default_rng(27)
    makers = {f"{levels} levels": (levels, rows) for levels, rows in ((50, 40), (300, 40), (2000, 20))}
    made = [(name, coded(*sizes, rng)) for name, sizes in makers.items()]
    for name, (columns, y) in [*made, ("postal", postal(rng)), ("diagnoses", diagnoses(rng))]:
        yield name, pd.DataFrame(columns), y.astype(int), rng.random(len(y)) < 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sealed", action="store_true", help="SecureBoost under sealed sums, too, which takes minutes")
    parser.add_argument("--trees", type=int, default=20)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.3)
    given = parser.parse_args()
    plan = {"n_estimators": given.trees, "max_depth": given.depth, "learning_rate": given.rate}
    warnings.simplefilter("ignore")
    print("| table | library | accuracy | AUC | seconds |\n|---|---|---|---|---|")
    for name, X, y, test in tables():
        columns = {True: list(X.select_dtypes("category")), False: list(X.select_dtypes("number"))}
        # by column: numbers at the party with the labels, categories at the other
        parties: Any = {"bank": columns[False], "shop": columns[True]}
        models: dict[str, Any] = {
            "XGBoost": xgboost.XGBClassifier(**plan, enable_categorical=True, tree_method="hist"),
            "LightGBM": lightgbm.LGBMClassifier(**plan, verbose=-1),
            "scikit-learn": HistGradientBoostingClassifier(
                max_iter=given.trees, max_depth=given.depth, learning_rate=given.rate,
                categorical_features="from_dtype" if max(X[c].nunique() for c in columns[True]) < 255 else None,
            ),
            "pooled": treaty.GBDTClassifier(**plan),
            "SecureBoost, open": treaty.GBDTClassifier(
                treaty.SecureBoost(allow_exact_sums=True), **plan, parties=parties
            ),
            "FederBoost by row": treaty.GBDTClassifier(treaty.FederBoostHorizontal(), **plan),
        }  # fmt: skip
        if given.sealed:
            models["SecureBoost, sealed"] = treaty.GBDTClassifier(treaty.SecureBoost(), **plan, parties=parties)
        for library, model in models.items():
            train, began = ~test, time.perf_counter()
            if library == "scikit-learn" and model.categorical_features is None:
                # it has no more than 255 categories: their numbers are taken as numbers
                as_codes = X.assign(**{c: X[c].cat.codes for c in columns[True]})
                p = model.fit(as_codes[train], y[train]).predict_proba(as_codes[test])[:, 1]
            elif library == "FederBoost by row":
                thirds = {f"p{k}": train & (np.arange(len(X)) % 3 == k) for k in range(3)}
                model.fit({party: (X[rows], y[rows]) for party, rows in thirds.items()})
                p = model.predict_proba(X[test])[:, 1]
            else:
                p = model.fit(X[train], y[train]).predict_proba(X[test])[:, 1]
            taken = time.perf_counter() - began
            accuracy, auc = np.mean((p > 0.5) == y[test]), roc_auc_score(y[test], p)
            print(f"| {name} | {library} | {accuracy:.4f} | {auc:.4f} | {taken:.1f} |", flush=True)


if __name__ == "__main__":
    main()
