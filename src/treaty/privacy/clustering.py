"""Instance clustering: guess labels from which rows shared the nodes of trees.

A passive party is asked about sets of rows and so learns, tree after tree, which rows are together. Trees put rows of
similar labels together, so rows that keep meeting mostly have the same label. `cluster_scores` needs no label at all,
`known_label_scores` uses a few rows' labels that the attacker has from elsewhere.

References
----------
Kang et al., "Hyperparameter Optimization for SecureBoost via Constrained Multi-Objective Federated Learning", 2024
(arXiv 2404.04490): the instance clustering attack. Takahashi, Liu, Liu, "Eliminating Label Leakage in Tree-Based
Vertical Federated Learning", 2023 (arXiv 2307.10318): ID2Graph, communities in the graph of rows joined by common
nodes. Hill, "Reciprocal Averaging: An Eigenvector Method of Ordination", Journal of Ecology 1973: the relaxation of
that graph's best cut into two, found here without building it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from treaty.machine.arrays import Floats, Int32s

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
    scores = np.random.default_rng(0).normal(size=n_rows)  # any start will do, the end is the same
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
