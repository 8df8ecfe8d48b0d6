"""Leaf purity: how close each leaf is to one class, so that knowing a leaf's rows reveals their labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.errors import DataError
from treaty.machine.arrays import Flags, Floats, Int32s, Integers


@dataclass(frozen=True, slots=True)
class LeafPurity:
    """Purity of every tree in three forms, float64 (n_trees,) each."""

    # sum over leaves of (n_leaf / n) max_k theta_k, theta_k the share of class k in the leaf; never below the largest
    # class's share of all rows, however little the leaves say
    raw: Floats
    # the same with every row counted 1 / (K prior of its class), so that all classes weigh alike: 1 / K when the
    # leaves say nothing
    balanced: Floats
    # (raw - majority) / (1 - majority): 0 when the leaves say nothing, 1 when every leaf is of one class; 0 as well for
    # a table of one class, of which nothing is left to learn
    adjusted: Floats


def leaf_purity(leaves: Int32s, y: NDArray[np.integer], n_classes: int) -> LeafPurity:
    """Measure how pure the leaves of each tree are.

    `leaves`, int32 (n_rows, n_trees), are numbered from 0 in any way; `y` are class numbers below `n_classes`. A class
    without rows is left out. `raw` is leaf purity as Cheng et al. define it ("SecureBoost", IEEE Intelligent
    Systems 2021, arXiv 1901.08755); the other two are ours, as raw purity of a table with a rare class is near 1
    whatever the tree. Raises DataError when shapes differ, there is no row, or a leaf or class number is out of range.
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
        starts = np.flatnonzero(np.diff(numbers // n_classes, prepend=-1))  # of each leaf's classes
        raw[tree] = np.maximum.reduceat(counts, starts).sum() / len(y)
        weighted = counts * weight[numbers % n_classes]
        balanced[tree] = np.maximum.reduceat(weighted, starts).sum() / np.count_nonzero(per_class)
    majority = per_class.max() / len(y)
    adjusted = (raw - majority) / (1.0 - majority) if majority < 1.0 else np.zeros_like(raw)
    return LeafPurity(raw, balanced, adjusted)


def held_out_purity(leaves: Int32s, y: NDArray[np.integer], n_classes: int) -> Floats:
    """Return the share of rows whose class is the commonest of the *other* rows of their leaf, float64 (n_trees,).

    Arguments are those of `leaf_purity`, whose `raw` counts a row's own label, too, so that a leaf of one row is pure
    and a leaf of few rows nearly so. Here such leaves say nothing: a row without others in its leaf, or whose others
    have several commonest classes, counts as right if it is of the commonest class of all.
    """
    right = np.empty(leaves.shape[1])
    majority = int(np.bincount(y, minlength=n_classes).argmax())
    each = np.arange(len(y))
    for tree, leaf in enumerate(leaves.T):
        counts = np.zeros((int(leaf.max(initial=0)) + 1, n_classes))
        np.add.at(counts, (leaf, y), 1.0)
        others = counts[leaf]
        others[each, y] -= 1.0
        most = others.max(axis=1, keepdims=True)
        alone = (others == most).sum(axis=1) == 1
        right[tree] = np.mean(np.where(alone, others.argmax(axis=1), majority) == y)
    return right


def shares_from_weights(weights: Floats, hess: Floats, *, base: float = 0.5, reg_lambda: float = 0.0) -> Floats:
    """Return the share of class 1 in each leaf of a first tree, from leaf weights alone.

    `weights` are leaf weights before the learning rate, `hess` the leaves' sums of hessians, `base` the probability a
    that all rows start from. In a leaf of n rows, n theta of them of class 1, G = n (a - theta) and H = n a (1 - a), so
    that w = -G / (H + lambda) gives theta = a + a (1 - a) w (1 + lambda / H). Cheng et al. (Theorem 2) have no lambda,
    and print a - a (1 - a) w.
    """
    shares: Floats = base + base * (1.0 - base) * weights * (1.0 + reg_lambda / hess)
    return shares


# ------------------------------------------- the purity guard: which tree nodes would reveal labels to a passive party


def mixed_nodes(y: Floats, n_classes: int, limit: float) -> Callable[[Int32s, Integers], Flags]:
    """Return ``mixed(rows, starts)``, which marks nodes whose classes are mixed about as in the whole table.

    `y` are class numbers below `n_classes`; `limit` is the largest allowed difference of a class's share in the node
    from its share in the table, 0 to 1. Node k is ``rows[starts[k]:starts[k + 1]]``; an empty node counts as mixed.
    Kang et al. 2024 (arXiv 2404.04490), section 5, propose a purity threshold; measured here against the prior.
    """
    classes = y.astype(np.int64)
    prior = np.bincount(classes, minlength=n_classes) / max(len(classes), 1)

    def mixed(rows: Int32s, starts: Integers) -> Flags:
        sizes = np.diff(starts)
        node = np.repeat(np.arange(len(sizes)), sizes)
        counts = np.bincount(node * n_classes + classes[rows], minlength=len(sizes) * n_classes)
        shares = counts.reshape(-1, n_classes) / np.maximum(sizes, 1)[:, None]
        return np.asarray((np.abs(shares - prior).max(axis=1) <= limit) | (sizes == 0))

    return mixed
