"""Attacks on nodes: labels from the rows that were in a node together, and bins from the sums and sides of its rows.

A passive party of encrypted sums sees which rows are together. The active party, or the leader of tables split by row,
opens sums: exact ones, or noisy ones in FederBoost. Every protocol shows the active party the sides of splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack  # type: ignore[import-untyped]
from sklearn.cluster import KMeans, SpectralCoclustering
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.tree import DecisionTreeClassifier

from treaty.attacks.views import Finding, Truth, View, auc_error, error_of_best, label_finding, standardised
from treaty.machine.arrays import Flags, Floats, Int32s, Integers
from treaty.privacy import leaks
from treaty.privacy.exact_sums import known_bins
from treaty.systems.secureboost.hidden_further import FurtherTree
from treaty.systems.secureboost.hidden_setup import HiddenStart
from treaty.systems.secureboost.hidden_training import HiddenTree
from treaty.systems.vertical.exact_sums import content_of, node_sets_from_transcript
from treaty.systems.vertical.messages import Setup, SplitColumns, TreeStart

_TREES = TreeStart, HiddenTree, FurtherTree  # one of these tells a passive party that a tree begins

Partitions = list[list[np.ndarray[tuple[int], np.dtype[np.int32]]]]


def seen_sets(view: View, n_rows: int) -> Partitions:
    """Return what a passive party knows of which rows are together, as partitions (n_rows,) by tree.

    If nodes are hidden, it knows how its own columns were divided: one partition for each of its splits.
    """
    sets = node_sets_from_transcript(view.transcript, n_rows)
    for entry in view.transcript.entries:
        if entry.step == SplitColumns.__name__ and entry.direction == "sent":
            answer = content_of(entry, SplitColumns)
            bits = np.frombuffer(answer.new.data, np.uint8).reshape(answer.new.shape)
            sets += [[column.astype(np.int32)] for column in np.unpackbits(bits, axis=1, count=n_rows)]
    # sides that were transferred obliviously are in no message
    own = view.recording.sides.get(view.party, [])
    different = {left.tobytes(): left.astype(np.int32) for rows, left in own if len(rows) == n_rows}
    return sets + [[left] for left in different.values()]


def instance_clustering(view: View, truth: Truth) -> Iterator[Finding]:
    """Separate labels by the nodes that rows shared (instance clustering), at a passive party of encrypted sums.

    References: Kang et al., "Hyperparameter Optimization for SecureBoost via Constrained Multi-Objective Federated
    Learning", 2024 (arXiv 2404.04490).
    """
    if view.is_active or not view.steps(*_TREES):
        return
    n_rows = len(truth.labels)
    scores = leaks.cluster_scores(seen_sets(view, n_rows), n_rows)
    yield label_finding("rows that were together (Kang 2024)", view, truth, scores)


MOST_ROWS = 5000
"""The most rows that are clustered."""

# of 2 to 6, the number by which most is found on three tables
COMMUNITIES = 2
WEIGHT = 2.0
"""How much farther apart communities are than two rows that differ by a standard deviation in all own columns."""


def row_communities(view: View, truth: Truth) -> Iterator[Finding]:
    """Cluster rows by communities and own columns (ID2Graph), at a passive party of encrypted sums.

    Rows are joined by the nodes that they shared. The communities of this graph are added to the party's own columns,
    and all is clustered into two. Baseline: the own columns alone, clustered the same way.

    Deviations from the paper: communities are found by the spectrum of the graph of rows and nodes, which scikit-learn
    implements, not by the Louvain method. Of a long table, a sample of rows is clustered.

    References: Takahashi, Liu, Liu, "Eliminating Label Leakage in Tree-Based Vertical Federated Learning", 2023 (arXiv
    2307.10318). Dhillon, "Co-clustering documents and words using bipartite spectral graph partitioning", KDD 2001.
    """
    if view.is_active or not view.steps(*_TREES):
        return
    n_rows = len(truth.labels)
    rows = np.random.default_rng(0).permutation(n_rows)[:MOST_ROWS]
    own, labels = standardised(truth.codes(view.party)[0][rows]), truth.labels[rows]
    found = communities(seen_sets(view, n_rows), rows)
    joined = np.concatenate([own, found * WEIGHT * np.sqrt(max(1, own.shape[1]))], axis=1)
    baseline = leaks.attack_auc(two_clusters(own), labels.astype(int))
    score, error = leaks.attack_auc(two_clusters(joined), labels.astype(int)), auc_error(labels, baseline)
    yield view.finding("communities of rows (ID2Graph, Takahashi 2023)", "labels", "AUC", score, baseline, error)


def communities(trees: Partitions, rows: NDArray[np.intp]) -> Floats:
    """Return which community each of the `rows` is in, 0 or 1, float64 (n_rows, communities); none if nothing was seen.

    `trees` are partitions of all rows of the table.
    """
    # of each tree the finest, as in the paper
    partitions = [tree[-1][rows] for tree in trees if tree]
    nodes = [leaks.of_partition(partition) for partition in partitions if partition.max(initial=-1) > 0]
    if not nodes:
        return np.zeros((len(rows), 0))
    # so that rows of unknown nodes are joined to something
    everything = csr_matrix(np.ones((len(rows), 1)))
    joined = hstack([everything, *nodes]).tocsr()
    found = SpectralCoclustering(min(COMMUNITIES, joined.shape[1]), random_state=0).fit(joined).row_labels_
    return np.asarray(np.eye(found.max() + 1)[found])


def two_clusters(values: Floats) -> Floats:
    """Return how much nearer each row is to one of two clusters' centres than to the other's, float64 (n_rows,)."""
    if not values.any():
        return np.zeros(len(values))
    distances = KMeans(2, n_init=10, random_state=0).fit_transform(values)
    return np.asarray(distances[:, 0] - distances[:, 1])


def set_purity(view: View, truth: Truth) -> Iterator[Finding]:
    """Guess each row's label from the others in its finest set, at a passive party of encrypted sums.

    In a good tree, nearly all rows of a leaf are of one class. So a party that sees which rows are in a leaf, and
    learns the labels of some, knows nearly all. The score is an upper bound of that: the share of rows whose label is
    the commonest of the other rows of their finest set, in the tree where it is highest. Baseline: what the party could
    do with others' labels but without any set, by a tree of as many leaves on its own columns, or by the commonest
    label.

    References: Cheng et al., "SecureBoost", IEEE Intelligent Systems 2021 (arXiv 1901.08755), section 6, which counts a
    row's own label as well; without it a set of one row reveals nothing (`privacy.leaks.held_out_purity`).
    """
    if view.is_active or not view.steps(*_TREES):
        return
    labels = truth.labels.astype(np.int64)
    majority = float(max(labels.mean(), 1.0 - labels.mean()))
    score = baseline = majority
    # 0 stands for rows of which nothing is known
    finest = [tree[-1] + 1 for tree in seen_sets(view, len(labels)) if tree]
    if finest:
        purity = leaks.held_out_purity(np.stack(finest, axis=1), labels, 2)
        score = float(purity.max())
        leaves = len(np.unique(finest[int(purity.argmax())]))
        baseline = max(majority, purity_of_own_columns(truth.codes(view.party)[0], labels, leaves))
    error = error_of_best(float(np.sqrt(baseline * (1.0 - baseline) / max(1, len(labels)))), len(finest))
    yield view.finding("purity of the finest row sets (Cheng 2021)", "labels", "share right", score, baseline, error)


def purity_of_own_columns(codes: NDArray[np.uint8], labels: NDArray[np.int64], leaves: int) -> float:
    """Return the share of rows that trees on own columns (n_rows, n_columns) get right, by cross-validation."""
    if not codes.shape[1] or leaves < 2 or len(labels) < 10:
        return 0.0
    tree = DecisionTreeClassifier(max_leaf_nodes=leaves, random_state=0)
    guess = cross_val_predict(tree, codes, labels, cv=KFold(5, shuffle=True, random_state=0))
    return float(np.mean(guess == labels))


def exact_sums(view: View, truth: Truth) -> Iterator[Finding]:
    """Find each partner's bins from the exact sums that an active party opens (docs/secureboost.md).

    It uses elimination, and sums of one to three rows; sealed sums show nothing. What it finds is certain, so the score
    is a share of all bins, and the baseline is 0.
    """
    if not view.is_active or not view.steps(Setup, HiddenStart):
        return
    recording = view.recording
    for owner in [name for name in truth.owners if name != view.party]:
        codes, _ = truth.codes(owner)
        nodes = recording.nodes.get(owner, [])
        found = known_bins(nodes, recording.offsets[owner], len(codes)) if nodes else np.full(codes.shape, -1)
        score = float(((found >= 0) & (found == codes)).mean())
        yield view.finding("exact sums", f"bins of {owner}", "share known", score, baseline=0.0)


MOST_GROUPED = 1000
"""The most splits that are grouped, those of the largest nodes: the work grows with their square."""

# an empty way counts only if this many rows would be there by chance
_EXPECTED = 8.0

Sides = Sequence[tuple[Int32s, Flags]]
"""For each split the rows whose sides were shown, and which of them go left."""


def nested_sides(view: View, truth: Truth) -> Iterator[Finding]:
    """Find each partner's bins from the sides of its splits, which every protocol shows the active party.

    Cuts of one column are nested: for any two of them, one of the four ways in which rows may fall is empty. This puts
    splits whose nodes share rows into groups, without record numbers, however sums are hidden; a group is a column. A
    row's bin is known for certain once every other bin of the column is on the other side of a split at which the row's
    side was shown. Which column a group is, and which bin lies between two cuts, follows from the numbers of rows; here
    it is taken from the owner's table. A split in the group of another column counts for nothing.

    What it finds is certain, so the score is a share of all bins, and the baseline is 0 (docs/sealed.md).
    """
    if not view.is_active or not view.steps(Setup, HiddenStart):
        return
    for owner in [name for name in truth.owners if name != view.party]:
        codes, offsets = truth.codes(owner)
        sides = sorted(view.recording.sides.get(owner, []), key=lambda split: -len(split[0]))[:MOST_GROUPED]
        score = known_share(sides, codes, np.diff(offsets) - 1)
        yield view.finding("nested sides", f"bins of {owner}", "share known", score, baseline=0.0)


def known_share(sides: Sides, codes: NDArray[np.uint8], n_bins: Integers) -> float:
    """Return the share of bins, rows times columns, that sides show for certain; a column's last code is missing."""
    groups = grouped(sides, len(codes))
    # which columns each split may be of: those of which no bin has rows on both sides
    fits = [
        np.array([not np.intersect1d(of[left], of[~left]).size for of in codes[rows].T], np.bool_)
        for rows, left in sides
    ]
    possible = [np.ones((len(codes), int(of) + 1), np.bool_) for of in n_bins]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        column = int(np.sum([fits[k] for k in members], axis=0).argmax())
        for rows, left in [sides[k] for k in members.tolist() if fits[k][column]]:
            of_rows, missing = codes[rows, column], int(n_bins[column])
            for side in (left, ~left):
                # a row cannot be in a bin of the other side, nor beyond it, as bins are cut in order
                other = np.unique(of_rows[~side])
                possible[column][np.ix_(rows[side], other)] = False
                present, own = other[other < missing], of_rows[side & (of_rows < missing)]
                if len(present) and len(own) and present.max() < own.min():
                    possible[column][rows[side], : present.max() + 1] = False
                elif len(present) and len(own) and present.min() > own.max():
                    possible[column][rows[side], present.min() : missing] = False
    known = 0
    for column, may in enumerate(possible):
        there = np.bincount(codes[:, column], minlength=may.shape[1]) > 0
        known += int((may[:, there].sum(axis=1) == 1).sum()) if there.sum() > 1 else 0
    return known / max(1, codes.size)


def grouped(sides: Sides, n_rows: int) -> Integers:
    """Return each split's group, int64 (k,), the largest nodes first: nested with some of it, crossing none."""
    count = len(sides)
    there, left = np.zeros((2, count, n_rows), np.float32)
    for k, (rows, going) in enumerate(sides):
        there[k, rows], left[k, rows[going]] = 1.0, 1.0
    right = there - left
    # rows that both splits saw, in each of the four ways, and as many as there would be by chance
    ways = np.stack([left @ left.T, left @ right.T, right @ left.T, right @ right.T])
    both = np.maximum(ways.sum(axis=0), 1.0)
    ll, lr, rl, rr = ways
    first, second = np.stack([ll + lr, rl + rr]), np.stack([ll + rl, lr + rr])
    expected = np.stack([first[a] * second[b] / both for a in (0, 1) for b in (0, 1)])
    nested = np.asarray(((ways == 0) & (expected >= _EXPECTED)).any(axis=0))
    crossing = np.asarray((ways > 0).all(axis=0))
    groups, found = np.full(count, -1, np.int64), 0
    for k in range(count):
        score = [
            0 if crossing[k, groups == group].any() else int(nested[k, groups == group].sum()) for group in range(found)
        ]
        groups[k] = int(np.argmax(score)) if max(score, default=0) else found
        found = max(found, int(groups[k]) + 1)
    return groups


MOST_MATCHED = 4000
"""The most rows of a rebuilt table: matching them one to one takes their square of memory."""


def inverted_histograms(view: View, truth: Truth) -> Iterator[Finding]:
    """Rebuild rows from the opened histograms of a binary classifier, at the leader of tables split by row.

    Score: the mean share of right bins of a rebuilt table, its rows matched with true ones to agree best. Baseline: the
    same for a table with every column drawn independently from the rows of each class in each bin. Both get these
    counts. The first histogram shows them, unless it carries noise; then this attacker has more than a real one.
    """
    recording = view.recording
    bins, y = recording.bins, truth.targets.astype(np.int64)
    if not recording.trees or bins is None or view.inputs.n_classes != 2 or len(y) > MOST_MATCHED:
        return
    codes, offsets = truth.all_codes(bins), bins.offsets
    if codes is None:
        return
    slots = codes + offsets[:-1]
    by_class = np.stack([np.bincount(slots[y == k].ravel(), minlength=offsets[-1]) for k in (0, 1)])
    trees = [leaks.OpenedTree(asked, left) for asked, left in recording.trees if 0 in asked]
    if not trees:
        return
    found = leaks.invert(trees, offsets)
    nothing = leaks.RebuiltRows(found.possible[:0], found.labels[:0])
    base, got = (leaks.agreement(*leaks.rebuild(of, by_class, offsets), codes, y) for of in (nothing, found))
    error = float(0.5 / np.sqrt(len(codes)))
    yield view.finding("histogram inversion", "bins of all rows", "share right", got.mean, base.mean, error)
