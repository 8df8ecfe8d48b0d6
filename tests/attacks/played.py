"""Trainings on scikit-learn's built-in tables whose parties' views attacks are tried on."""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas as pd
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits

from treaty.attacks.views import Finding, Truth, View, recorded_views

OU = {
    "encryption": "ou",
    "insecure_test_key_bits": 512,
    "allow_insecure": True,
    "allow_exact_sums": True,
}
"""SecureBoost's options under which passive parties see which rows are in which nodes."""


@cache
def cancer() -> tuple[dict[str, pd.DataFrame], pd.Series]:
    """Return breast cancer, whose good columns the bank has, with the labels; the shop's tell next to nothing."""
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    good = ["mean radius", "mean concavity", "worst texture", "worst area"]
    poor = ["texture error", "smoothness error", "symmetry error", "fractal dimension error"]
    return {"bank": X[good], "shop": X[poor]}, y


@cache
def digits() -> tuple[dict[str, pd.DataFrame], pd.Series]:
    """Return pictures of digits cut in halves, and whether the digit is 5 or more."""
    X, y = load_digits(return_X_y=True, as_frame=True)
    return {"bank": X.iloc[:, :32], "shop": X.iloc[:, 32:]}, (y >= 5).astype(int)


def views_of(model: Any, X: Any, y: Any) -> tuple[dict[str, View], Truth]:
    """Train a copy of a model; return what each party saw, and what attacks are after."""
    copy = clone(model)
    with recorded_views() as views:
        copy.fit(*((X,) if y is None else (X, y)))
    return views, Truth(views, by_row=copy._chosen()[0].split == "rows")


def findings_of(attack: Any, model: Any, X: Any, y: Any) -> list[Finding]:
    """Train a copy of a model and try one attack on every party's view."""
    views, truth = views_of(model, X, y)
    return [finding for view in views.values() for finding in attack(view, truth)]
