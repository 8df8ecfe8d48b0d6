"""``membership="hidden"`` gives the pooled grower's trees, and refuses what it cannot share."""

from __future__ import annotations

import numpy as np
import pytest

import treaty
from tables import cut, real_table, with_categories, with_gaps
from treaty.models.trees import forest_of

OPTIONS = {
    "n_estimators": 3, "max_depth": 3, "min_child_samples": 1, "max_bin": 16, "objective": "logistic_pieces",
    "max_cat_to_onehot": 300,
}  # fmt: skip


def fit_both(tables: dict, y: np.ndarray, **options):
    options = {**OPTIONS, **options}
    pooled = treaty.GBDTClassifier("pooled", **options).fit(tables, y)
    federated = treaty.GBDTClassifier(treaty.SecureBoost(membership="hidden"), n_jobs=1, **options)
    return federated.fit(tables, y), pooled


def assert_equal_splits(federated, pooled, tables: dict) -> None:
    """Compare structure, splits and leaf values; what nobody knows under hidden rows is left out."""
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))
    for ours, theirs in zip(*(forest_of(list(of.parts_.values())).trees for of in (federated, pooled)), strict=True):
        np.testing.assert_array_equal(ours.left, theirs.left)
        np.testing.assert_array_equal(ours.value, theirs.value)


@pytest.mark.parametrize("change", [lambda X: X, with_gaps, with_categories])
def test_trees_equal_the_pooled_growers(change):
    X, y = real_table("binary")
    tables = cut(change(X), 2)
    assert_equal_splits(*fit_both(tables, y), tables)
