"""Attacks on which rows were in a node together: labels from what a passive party of encrypted sums sees.

Each function takes the view of one party and the truth, and yields what it finds; nothing where it does not apply.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack  # type: ignore[import-untyped]
from sklearn.cluster import KMeans, SpectralCoclustering
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.tree import DecisionTreeClassifier

from treaty.attacks.views import Finding, Truth, View, auc_error, error_of_best, label_finding, standardised
from treaty.machine.arrays import Floats
from treaty.privacy.label_leaks import attack_auc, cluster_scores, held_out_purity
from treaty.systems.vertical.exact_sums import node_sets_from_transcript
from treaty.systems.vertical.messages import SplitColumns, TreeStart

Partitions = list[list[np.ndarray[tuple[int], np.dtype[np.int32]]]]


def seen_sets(view: View, n_rows: int) -> Partitions:
    """Return what a passive party knows of which rows are together, as partitions (n_rows,) by tree.

    Where nodes are hidden that is how its own columns were divided: one partition for each split of its own.
    """
    sets = node_sets_from_transcript(view.recorded.transcript, n_rows)
    answers = [
        entry.message(SplitColumns)
        for entry in view.recorded.transcript.entries
        if entry.step == SplitColumns.__name__ and entry.direction == "sent"
    ]
    for answer in answers:
        assert answer is not None, "contents are recorded"
        bits = np.frombuffer(answer.new.data, np.uint8).reshape(answer.new.shape)
        sets += [[column.astype(np.int32)] for column in np.unpackbits(bits, axis=1, count=n_rows)]
    # of transferred sides, which no message shows
    own = view.recorded.recording.sides.get(view.party, [])
    different = {left.tobytes(): left.astype(np.int32) for rows, left in own if len(rows) == n_rows}
    return sets + [[left] for left in different.values()]


def instance_clustering(view: View, truth: Truth) -> Iterator[Finding]:
    """Separate rows by the nodes they shared, at a passive party of encrypted sums.

    Labels from which rows were together in nodes (instance clustering).

    References
    ----------
    Kang et al., "Hyperparameter Optimization for SecureBoost via Constrained Multi-Objective Federated Learning", 2024
    (arXiv 2404.04490).
    """
    if view.is_active or not view.steps(TreeStart):
        return
    n_rows = len(truth.labels)
    scores = cluster_scores(seen_sets(view, n_rows), n_rows)
    yield label_finding("rows that were together (Kang 2024)", view, truth, scores)


MOST_ROWS = 5000
# of 2 to 6 those by which most is found on three tables
COMMUNITIES = 2
WEIGHT = 2.0
"""How much farther apart communities are than two rows that differ by a standard deviation in all own columns."""


def row_communities(view: View, truth: Truth) -> Iterator[Finding]:
    """Cluster rows by their communities and own columns, at a passive party of encrypted sums.

    Labels from communities of rows that were in common nodes, joined with the attacker's own columns (ID2Graph).

    Rows are joined by the nodes they were in together; groups in this graph are added to a passive party's own columns,
    and all is clustered into two. Baseline: the own columns alone, clustered the same way.

    Differs from the paper: communities are found by the spectrum of the graph of rows and nodes, of which scikit-learn
    has an implementation, not by the Louvain method; and of a long table a sample of rows is clustered.

    References
    ----------
    Takahashi, Liu, Liu, "Eliminating Label Leakage in Tree-Based Vertical Federated Learning", 2023 (arXiv 2307.10318).
    Dhillon, "Co-clustering documents and words using bipartite spectral graph partitioning", KDD 2001.
    """
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
    # of each tree the finest, as in the paper
    partitions = [tree[-1][rows] for tree in trees if tree]
    nodes = [of_partition(partition) for partition in partitions if partition.max(initial=-1) > 0]
    if not nodes:
        return np.zeros((len(rows), 0))
    # so that rows of unknown nodes are joined to something
    everything = csr_matrix(np.ones((len(rows), 1)))
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


def set_purity(view: View, truth: Truth) -> Iterator[Finding]:
    """Guess each row's label by the others in its finest set, at a passive party of encrypted sums.

    Labels from the purity of the sets of rows that a passive party sees.

    The better a tree, the nearer its leaves are to one class: a party that sees which rows are in a leaf, and learns
    the labels of some, knows those of nearly all. The score is an upper bound of that, the share of rows whose label is
    the commonest of the other rows of their finest set, in the tree where it is highest. Baseline: what the party could
    do with others' labels without being shown any set, by a tree of as many leaves on its own columns, or by the
    commonest label.

    References
    ----------
    Cheng et al., "SecureBoost", IEEE Intelligent Systems 2021 (arXiv 1901.08755), section 6, which counts a row's own
    label as well; without it a set of one row reveals nothing (`privacy.purity.held_out_purity`).
    """
    if view.is_active or not view.steps(TreeStart):
        return
    labels = truth.labels.astype(np.int64)
    majority = float(max(labels.mean(), 1.0 - labels.mean()))
    score = baseline = majority
    # 0: rows of which nothing is known
    finest = [tree[-1] + 1 for tree in seen_sets(view, len(labels)) if tree]
    if finest:
        purity = held_out_purity(np.stack(finest, axis=1), labels, 2)
        score = float(purity.max())
        leaves = len(np.unique(finest[int(purity.argmax())]))
        baseline = max(majority, purity_of_own_columns(truth.codes(view.party)[0], labels, leaves))
    error = float(np.sqrt(baseline * (1.0 - baseline) / max(1, len(labels))))
    yield Finding(
        attack="purity of the finest row sets (Cheng 2021)", party=view.party, target="labels", measure="share right",
        score=score, baseline=baseline, error=error_of_best(error, len(finest)),
    )  # fmt: skip


def purity_of_own_columns(codes: NDArray[np.uint8], labels: NDArray[np.int64], leaves: int) -> float:
    """Return the share of rows that trees of own columns (n_rows, n_columns) get right, grown on four fifths of all."""
    if not codes.shape[1] or leaves < 2 or len(labels) < 10:
        return 0.0
    tree = DecisionTreeClassifier(max_leaf_nodes=leaves, random_state=0)
    guess = cross_val_predict(tree, codes, labels, cv=KFold(5, shuffle=True, random_state=0))
    return float(np.mean(guess == labels))
