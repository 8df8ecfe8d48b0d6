"""What leaves and nodes tell about labels: leaf purity, a guard against pure nodes, and the clustering attack.

Trees put rows of similar labels together. So a leaf that is close to one class reveals the labels of its rows
(`leaf_purity`), and a passive party that is asked about sets of rows can guess labels: rows that share node after node
mostly have the same label. `cluster_scores` needs no label for that, `known_label_scores` uses a few rows' labels that
the attacker has from elsewhere. `mixed_nodes` marks the nodes that would not reveal labels in this way.

References
----------
Kang et al., "Hyperparameter Optimization for SecureBoost via Constrained Multi-Objective Federated Learning", 2024
(arXiv 2404.04490): the instance clustering attack. Takahashi, Liu, Liu, "Eliminating Label Leakage in Tree-Based
Vertical Federated Learning", 2023 (arXiv 2307.10318): ID2Graph, communities in the graph of rows joined by common
nodes. Hill, "Reciprocal Averaging: An Eigenvector Method of Ordination", Journal of Ecology 1973: the relaxation of
that graph's best cut into two, found here without building it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

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
        # of each leaf's classes
        starts = np.flatnonzero(np.diff(numbers // n_classes, prepend=-1))
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


NodeSets = Sequence[Sequence[Int32s]]
"""For each tree, partitions of the rows: node number of each row, -1 where the attacker does not know it."""

ROUNDS = 500
CLOSE_ENOUGH = 1e-6  # of the scores' standard deviation, in one round


def cluster_scores(trees: NodeSets, n_rows: int) -> Floats:
    """Score rows by reciprocal averaging over the nodes they shared: the attack without any label.

    Every node's score is the mean of its rows', every row's the mean of its nodes'; repeated, with the mean taken out,
    this converges to the direction that separates the rows best. `trees` is what the attacker saw
    (`node_sets_from_transcript` of `treaty.systems.vertical.exact_sums` reads it). Scores have mean 0 and standard
    deviation 1 and are high for the smaller group, mostly the rarer class; all are 0 if nothing was seen.
    """
    seen = _Nodes.of(trees, n_rows)
    # any start will do, the end is the same
    scores = np.random.default_rng(0).normal(size=n_rows)
    for _ in range(ROUNDS):
        before, scores = scores, seen.centred(seen.rows_from_nodes(seen.nodes_from_rows(scores)))
        if np.abs(scores - before).max(initial=0.0) < CLOSE_ENOUGH:
            break
    return scores * (1.0 if np.mean(scores**3) >= 0.0 else -1.0)


def known_label_scores(trees: NodeSets, n_rows: int, known: NDArray[np.intp], labels: NDArray[np.integer]) -> Floats:
    """Score rows by the labels, 0 or 1, of the `known` rows in the nodes they were in (naive Bayes).

    A score is the mean over a row's nodes of the log odds of label 1 in each, with one row of either label added.
    """
    seen = _Nodes.of(trees, n_rows)
    nodes, ones = seen.node[known].ravel(), np.repeat(labels, seen.node.shape[1])
    n = len(seen.size)
    odds = (np.bincount(nodes[ones == 1], minlength=n) + 1.0) / (np.bincount(nodes[ones == 0], minlength=n) + 1.0)
    return seen.rows_from_nodes(np.log(odds))


def attack_auc(scores: Floats, y: NDArray[np.integer] | NDArray[np.floating]) -> float:
    """Return how well scores separate the labels 0 and 1, in either direction: max(AUC, 1 - AUC)."""
    auc = float(roc_auc_score(y, scores))
    return max(auc, 1.0 - auc)


@dataclass(frozen=True, slots=True)
class _Nodes:
    """All nodes of all partitions under one numbering; the last means "not known" and is left out of all means."""

    node: NDArray[np.intp]  # (n_rows, n_partitions)
    size: Floats  # (n_nodes + 1,)
    seen: Floats  # (n_rows,): nodes each row was seen in

    @classmethod
    def of(cls, trees: NodeSets, n_rows: int) -> _Nodes:
        partitions = [partition for tree in trees for partition in tree]
        counts = [int(partition.max(initial=-1)) + 1 for partition in partitions]
        first = np.cumsum([0, *counts])
        node = np.full((n_rows, len(partitions)), first[-1], np.intp)
        for k, partition in enumerate(partitions):
            node[:, k] = np.where(partition >= 0, first[k] + partition, first[-1])
        size = np.bincount(node.ravel(), minlength=int(first[-1]) + 1).astype(np.float64)
        return cls(node, np.maximum(size, 1.0), np.count_nonzero(node < first[-1], axis=1).astype(np.float64))

    def nodes_from_rows(self, scores: Floats) -> Floats:
        """Return the mean score of each node's rows."""
        totals = np.bincount(self.node.ravel(), np.repeat(scores, self.node.shape[1]), len(self.size))
        means: Floats = totals / self.size
        return means

    def rows_from_nodes(self, scores: Floats) -> Floats:
        """Return the mean score of each row's nodes."""
        known = scores.copy()
        known[-1] = 0.0
        total: Floats = known[self.node].sum(axis=1) / np.maximum(self.seen, 1.0)
        return total

    def centred(self, scores: Floats) -> Floats:
        """Remove the mean (that all rows are alike is the trivial solution) and scale to standard deviation 1."""
        seen = self.seen > 0.0
        scores = np.where(seen, scores - scores.sum(where=seen) / max(np.count_nonzero(seen), 1), 0.0)
        spread = float(scores.std())
        return scores / spread if spread > 0.0 else scores
