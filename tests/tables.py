"""Small real tables cut by column, for tests of whole protocols."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

FAST_KEY = {
    "protocol": "secureboost",
    "insecure_test_key_bits": 512,
    "allow_insecure": True,
    "allow_exact_sums": True,
    "n_jobs": 1,
}


def real_table(task: str, *, rows: int = 240, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a shuffled sample of one of scikit-learn's built-in data sets."""
    loader = {"binary": load_breast_cancer, "multiclass": load_wine, "regression": load_diabetes}[task]
    X, y = loader(return_X_y=True, as_frame=True)
    index = np.random.default_rng(seed).permutation(len(X))[:rows]
    return X.iloc[index, :12].reset_index(drop=True), y.to_numpy()[index]


def with_gaps(X: pd.DataFrame, share: float = 0.15, seed: int = 1) -> pd.DataFrame:
    """Blank out some cells."""
    return X.mask(np.random.default_rng(seed).random(X.shape) < share)


def with_categories(X: pd.DataFrame, seed: int = 2) -> pd.DataFrame:
    """Turn every third column into a category of its tercile, some of them missing."""
    X = X.copy()
    rng = np.random.default_rng(seed)
    for name in X.columns[::3]:
        terciles = pd.qcut(X[name].rank(method="first"), 6, labels=list("abcdef")).astype(object)
        terciles[rng.random(len(X)) < 0.1] = None
        X[name] = pd.Categorical(terciles, categories=["z", *"fedcba"])
    return X


def cut(X: pd.DataFrame, parties: int) -> dict[str, pd.DataFrame]:
    """Cut the columns among so many parties, unevenly."""
    edges = np.unique(np.concatenate([[0], np.sort(np.linspace(1, X.shape[1], parties).astype(int))]))
    return {f"p{k}": X.iloc[:, a:b] for k, (a, b) in enumerate(pairwise(edges))}


def cut_for_active(X: pd.DataFrame, parties: int) -> dict[str, pd.DataFrame]:
    """Give the first party all columns but three, or but one for each other: small batches hide labels from few."""
    first = X.shape[1] - max(3, parties - 1)
    edges = np.linspace(first, X.shape[1], parties).astype(int)
    return {"p0": X.iloc[:, :first]} | {f"p{k + 1}": X.iloc[:, a:b] for k, (a, b) in enumerate(pairwise(edges))}


def assert_same_trees(left: Any, right: Any) -> None:
    """Compare two fitted estimators tree by tree, bit for bit, in terms of joined columns and thresholds."""
    from treaty.models.trees import forest_of
    from treaty.trees.ensemble import join_splits

    described = []
    for model in (left, right):
        parts = list(model.parts_.values())
        splits = join_splits([part.splits for part in parts], [len(part.schema.names) for part in parts])
        trees = []
        for tree in forest_of(parts).trees:
            inner = tree.left >= 0
            split = splits.base[tree.source[inner]] + tree.record[inner]
            going = [
                splits.category_left[splits.category_start[s] : splits.category_start[s + 1]].tobytes() for s in split
            ]
            trees.append(
                (
                    tree.left.tolist(),
                    tree.value.tolist(),
                    tree.gain.tolist(),
                    tree.cover.tolist(),
                    tree.count.tolist(),
                    splits.feature[split].tolist(),
                    splits.threshold[split].tolist().__repr__(),
                    splits.missing_left[split].tolist(),
                    going,
                )
            )
        described.append(trees)
    assert len(described[0]) == len(described[1])
    assert any(len(tree[0]) > 1 for tree in described[0]), "no tree has a split: the comparison would prove nothing"
    assert described[0] == described[1]
