"""Vertical models without a training protocol: the plain grower over several owners, and each one's part and table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treaty.data.table import Schema, Table
from treaty.models.trees import ModelPart
from trees.plain import Codes, random_codes, random_labels, train

BINS = [12, 6, 30, 5, 3, 9]


def vertical_model(
    *,
    edges: Sequence[int] = (2, 3),
    missing: float = 0.15,
    categorical: Sequence[int] = (1, 4),
    objective: str = "logistic",
    n_classes: int = 2,
    n_rows: int = 300,
    **options: Any,
) -> tuple[list[ModelPart], list[Table]]:
    """Train over owners of the columns between `edges`; return their parts, party0's with the forest, and tables."""
    rng = np.random.default_rng(3)
    codes = random_codes(rng, n_rows, BINS, missing=missing, categorical=categorical)
    y = random_labels(rng, codes, objective, n_classes)
    options = {"n_estimators": 4, "max_depth": 4, **options}
    trained = train(codes.cut(*edges), y, objective=objective, n_classes=n_classes, **options)
    tables = [table_of(owner, f"party{i}") for i, owner in enumerate(trained.parts)]
    parts = [
        ModelPart(
            model_id="m",
            party=f"party{i}",
            schema=table.schema,
            splits=owner.splits,
            trees_a_round=trained.forest.objective.n_outputs,
        )
        for i, (owner, table) in enumerate(zip(trained.parts, tables, strict=True))
    ]
    parts[0].forest = trained.forest
    return parts, tables


def table_of(codes: Codes, party: str) -> Table:
    """Call the columns "party column 0" and so on; categories are their own codes."""
    names = tuple(f"{party} column {k}" for k in range(len(codes.n_bins)))
    kinds = tuple(
        tuple(range(bins)) if is_categorical else None
        for bins, is_categorical in zip(codes.n_bins.tolist(), codes.categorical, strict=True)
    )
    return Table(Schema(names, kinds), list(np.ascontiguousarray(codes.matrix.T)), len(codes.matrix))


def contributions_of_xgboost(booster: Any, tables: Sequence[Table]) -> np.ndarray:
    """Return XGBoost's own TreeSHAP (n_rows, n_outputs, n_features + 1) over the tables side by side."""
    import xgboost

    matrix = xgboost.DMatrix(
        np.hstack([table.matrix() for table in tables]),
        feature_names=booster.feature_names,
        feature_types=booster.feature_types,
        enable_categorical=True,
    )
    values = booster.predict(matrix, pred_contribs=True)
    return values if values.ndim == 3 else values[:, None]
