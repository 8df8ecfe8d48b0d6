"""Labels from communities of rows that were in common nodes, joined with the attacker's own columns (ID2Graph).

Rows are joined by the nodes they were in together; groups in this graph are added to a passive party's own columns,
and all is clustered into two. Baseline: the own columns alone, clustered the same way.

Differs from the paper: communities are found by the spectrum of the graph of rows and nodes, of which scikit-learn has
an implementation, not by the Louvain method; and of a long table a sample of rows is clustered.

References
----------
Takahashi, Liu, Liu, "Eliminating Label Leakage in Tree-Based Vertical Federated Learning", 2023 (arXiv 2307.10318).
Dhillon, "Co-clustering documents and words using bipartite spectral graph partitioning", KDD 2001.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack  # type: ignore[import-untyped]
from sklearn.cluster import KMeans, SpectralCoclustering

from treaty.attacks.row_sets import Partitions, seen_sets
from treaty.attacks.views import Finding, Truth, View, auc_error, standardised
from treaty.machine.arrays import Floats
from treaty.privacy.clustering import attack_auc
from treaty.systems.vertical.encrypted_columns import TreeStart

MOST_ROWS = 5000
COMMUNITIES = 2  # of 2 to 6 those by which most is found on three tables
WEIGHT = 2.0
"""How much farther apart communities are than two rows that differ by a standard deviation in all own columns."""


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Cluster rows by their communities and own columns, at a passive party of encrypted sums."""
    if view.is_active or not view.steps(TreeStart):
        return
    n_rows = len(truth.labels)
    rows = np.random.default_rng(0).permutation(n_rows)[:MOST_ROWS]
    own, labels = standardised(truth.codes(view.party)[0][rows]), truth.labels[rows]
    found = communities(seen_sets(view, n_rows), rows)
    joined = np.concatenate([own, found * WEIGHT * np.sqrt(max(1, own.shape[1]))], axis=1)
    baseline = attack_auc(two_clusters(own), labels.astype(int))
    yield Finding(
        attack="communities of rows (ID2Graph, Takahashi 2023)", party=view.party, target="labels", measure="AUC",
        score=attack_auc(two_clusters(joined), labels.astype(int)), baseline=baseline,
        error=auc_error(labels, baseline),
    )  # fmt: skip


def communities(trees: Partitions, rows: NDArray[np.intp]) -> Floats:
    """Return which community each of the `rows` is in, 0 or 1, float64 (n_rows, communities); none if nothing was seen.

    `trees` are partitions of all rows of the table (`row_sets.seen_sets`).
    """
    partitions = [tree[-1][rows] for tree in trees if tree]  # of each tree the finest, as in the paper
    nodes = [of_partition(partition) for partition in partitions if partition.max(initial=-1) > 0]
    if not nodes:
        return np.zeros((len(rows), 0))
    everything = csr_matrix(np.ones((len(rows), 1)))  # so that rows of unknown nodes are joined to something
    joined = hstack([everything, *nodes]).tocsr()
    found = SpectralCoclustering(min(COMMUNITIES, joined.shape[1]), random_state=0).fit(joined).row_labels_
    return np.asarray(np.eye(found.max() + 1)[found])


def of_partition(partition: NDArray[np.int32]) -> csr_matrix:
    """Return which rows are in which of a partition's nodes, without nodes that are empty."""
    known = np.flatnonzero(partition >= 0)
    numbers, columns = np.unique(partition[known], return_inverse=True)
    return csr_matrix((np.ones(len(known)), (known, columns)), shape=(len(partition), len(numbers)))


def two_clusters(values: Floats) -> Floats:
    """Return how much nearer each row is to one of two clusters' centres than to the other's, float64 (n_rows,)."""
    if not values.any():
        return np.zeros(len(values))
    distances = KMeans(2, n_init=10, random_state=0).fit_transform(values)
    return np.asarray(distances[:, 0] - distances[:, 1])
