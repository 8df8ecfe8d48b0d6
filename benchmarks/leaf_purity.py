"""How pure the leaves of trees are, as the papers on reduced leakage measure it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.errors import DataError
from treaty.machine.arrays import Floats, Int32s


@dataclass(frozen=True, slots=True)
class LeafPurity:
    """Purity of every tree in three forms, float64 (n_trees,) each."""

    # sum over leaves of (n_leaf / n) max_k theta_k, theta_k the share of class k in the leaf; at least the largest
    # class's share of all rows
    raw: Floats
    # the same with every row counted 1 / (K prior of its class), so that all classes weigh alike; 1 / K when the
    # leaves reveal nothing
    balanced: Floats
    # (raw - majority) / (1 - majority): 0 when the leaves reveal nothing, 1 when every leaf is of one class; 0 also for
    # a table of one class
    adjusted: Floats


def leaf_purity(leaves: Int32s, y: NDArray[np.integer], n_classes: int) -> LeafPurity:
    """Measure how pure the leaves of each tree are.

    `leaves`, int32 (n_rows, n_trees), are numbered from 0 in any way; `y` are class numbers below `n_classes`. A class
    without rows is left out. `raw` is the leaf purity of Cheng et al. ("SecureBoost", IEEE Intelligent Systems 2021,
    arXiv 1901.08755); the other two are ours, as raw purity of a table with a rare class is near 1 for any tree. Raises
    DataError when shapes differ, there is no row, or a leaf or class number is out of range.
    """
    if leaves.ndim != 2 or y.shape != (len(leaves),) or len(y) == 0:
        raise DataError(f"expected leaves (rows, trees) and as many labels, got {leaves.shape} and {y.shape}")
    if y.min() < 0 or y.max() >= n_classes or leaves.min(initial=0) < 0:
        raise DataError(f"expected leaves from 0 and classes from 0 to {n_classes - 1} - at leaf purity")
    per_class = np.bincount(y, minlength=n_classes)
    weight = np.zeros(n_classes)
    np.divide(1.0, per_class, out=weight, where=per_class > 0)
    raw, balanced = np.empty(leaves.shape[1]), np.empty(leaves.shape[1])
    for tree, leaf in enumerate(leaves.T):
        numbers, counts = np.unique(leaf.astype(np.int64) * n_classes + y, return_counts=True)
        # where each leaf's classes begin
        starts = np.flatnonzero(np.diff(numbers // n_classes, prepend=-1))
        raw[tree] = np.maximum.reduceat(counts, starts).sum() / len(y)
        weighted = counts * weight[numbers % n_classes]
        balanced[tree] = np.maximum.reduceat(weighted, starts).sum() / np.count_nonzero(per_class)
    majority = per_class.max() / len(y)
    adjusted = (raw - majority) / (1.0 - majority) if majority < 1.0 else np.zeros_like(raw)
    return LeafPurity(raw, balanced, adjusted)


def shares_from_weights(weights: Floats, hess: Floats, *, base: float = 0.5, reg_lambda: float = 0.0) -> Floats:
    """Return the share of class 1 in each leaf of a first tree, from leaf weights alone.

    `weights` are leaf weights before the learning rate, `hess` the leaves' sums of hessians, `base` the probability a
    that all rows start from. In a leaf of n rows, n theta of them of class 1, G = n (a - theta) and H = n a (1 - a), so
    that w = -G / (H + lambda) gives theta = a + a (1 - a) w (1 + lambda / H). Cheng et al. (Theorem 2) have no lambda,
    and print a - a (1 - a) w.
    """
    return np.asarray(base + base * (1.0 - base) * weights * (1.0 + reg_lambda / hess))
