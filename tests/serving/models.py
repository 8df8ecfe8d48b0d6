"""Small models for tests of the server."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd

import treaty
from tables import real_table
from treaty.models.trees import ModelPart
from treaty.serving.models import ServedModel

GOOD = {"age": 41, "income": 1.5, "member": True, "region": "north"}


@cache
def whole() -> ServedModel:
    """Return a model of two numeric columns, one of truth values and one of categories."""
    rng = np.random.default_rng(1)
    X = pd.DataFrame(
        {
            "age": rng.integers(18, 90, 300),
            "income": rng.normal(size=300),
            "member": rng.random(300) < 0.5,
            "region": pd.Categorical(rng.choice(["north", "south"], 300), categories=["south", "north"]),
        }
    )
    y = np.where(X["income"] + (X["region"] == "north") + rng.normal(size=300) > 0.5, "yes", "no")
    return ServedModel(treaty.GBDTClassifier("pooled", n_estimators=5).fit(X, y).parts_["pooled"])


@cache
def shared(task: str = "binary") -> tuple[Any, dict[str, pd.DataFrame]]:
    """Return an estimator of a bank and a shop, both with splits in use, and their tables."""
    X, y = real_table(task, rows=180)
    tables = {"bank": X.iloc[:, :6], "shop": X.iloc[:, 6:]}
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    system = treaty.SecureBoost(allow_exact_sums=True, encryption="lattice")
    return kind(system, n_estimators=6, max_depth=4).fit(tables, y), tables


def active_part(task: str = "binary") -> ModelPart:
    part = shared(task)[0].parts_["bank"]
    assert isinstance(part, ModelPart)
    return part


def rows_of(X: pd.DataFrame) -> list[dict[str, Any]]:
    return X.astype(object).to_dict("records")
