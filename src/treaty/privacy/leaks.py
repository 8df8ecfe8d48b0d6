"""What nodes reveal about labels, and opened histograms about rows: measures, a guard and two attacks.

Trees put rows of similar labels together. So a leaf that is close to one class reveals the labels of its rows
(`held_out_purity`), and a passive party that is asked about sets of rows can guess labels: rows that share node after
node mostly have the same label. `cluster_scores` needs no label for that, `known_label_scores` uses a few rows' labels
that the attacker has from elsewhere. `mixed_nodes` marks the nodes that do not reveal labels in this way. Histogram
inversion (`invert`, `rebuild`) puts training rows together from opened histograms.

References: Kang et al., "Hyperparameter Optimization for SecureBoost via Constrained Multi-Objective Federated
Learning", 2024 (arXiv 2404.04490): the instance clustering attack. Takahashi, Liu, Liu, "Eliminating Label Leakage in
Tree-Based Vertical Federated Learning", 2023 (arXiv 2307.10318): ID2Graph, communities in the graph of rows joined by
common nodes. Hill, "Reciprocal Averaging: An Eigenvector Method of Ordination", Journal of Ecology 1973: the relaxation
of that graph's best cut into two, found here without building it. Di Gennaro et al., "TimberStrike", 2025 (arXiv
2506.07605): rows of horizontal jobs rebuilt from split values and node sums of many trees; here the attacker has all
bins' sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from scipy.sparse import csr_matrix, hstack  # type: ignore[import-untyped]
from sklearn.metrics import roc_auc_score

from treaty.machine.arrays import Flags, Floats, Int32s, Integers


def held_out_purity(leaves: Int32s, y: NDArray[np.integer], n_classes: int) -> Floats:
    """Return the share of rows whose class is the commonest of the *other* rows of their leaf, float64 (n_trees,).

    `leaves`, int32 (n_rows, n_trees), are numbered from 0 in any way; `y` are class numbers below `n_classes`. A row's
    own label does not count, or leaves of few rows would be pure. A row without others in its leaf, or whose others
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


def mixed_nodes(y: Floats, n_classes: int, limit: float) -> Callable[[Int32s, Integers], Flags]:
    """Return ``mixed(rows, starts)``, which marks nodes whose classes are mixed about as in the whole table.

    `y` are class numbers below `n_classes`; `limit`, 0 to 1, is the largest allowed difference of a class's share in
    the node from its share in the table. Node k is ``rows[starts[k]:starts[k + 1]]``; an empty node counts as mixed.
    Kang et al. 2024 (arXiv 2404.04490), section 5, propose a purity threshold; here purity is relative to the prior.
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
# change of the scores in one round, in standard deviations, at which they have converged
CLOSE_ENOUGH = 1e-6


def cluster_scores(trees: NodeSets, n_rows: int) -> Floats:
    """Score rows by reciprocal averaging over the nodes they shared: the attack without any label.

    Every node's score is the mean of its rows', every row's the mean of its nodes'. Repeated with the mean removed,
    this converges to the direction that separates the rows best. `trees` are the sets that the attacker saw
    (`node_sets_from_transcript` of `treaty.systems.vertical.exact_sums`). Scores have mean 0 and standard deviation 1
    and are high for the smaller group, mostly the rarer class; all are 0 if nothing was seen.
    """
    nodes_of_row = _all_nodes(trees, n_rows)
    rows_of_node, seen = nodes_of_row.T.tocsr(), nodes_of_row.getnnz(axis=1) > 0
    # any start leads to the same end
    scores = np.random.default_rng(0).normal(size=n_rows)
    for _ in range(ROUNDS):
        before, scores = scores, _means(nodes_of_row, _means(rows_of_node, scores))
        # equal scores are the trivial solution
        scores = np.where(seen, scores - scores.sum(where=seen) / max(np.count_nonzero(seen), 1), 0.0)
        scores /= float(scores.std()) or 1.0
        if np.abs(scores - before).max(initial=0.0) < CLOSE_ENOUGH:
            break
    return scores * (1.0 if np.mean(scores**3) >= 0.0 else -1.0)


def known_label_scores(trees: NodeSets, n_rows: int, known: NDArray[np.intp], labels: NDArray[np.integer]) -> Floats:
    """Score rows by the labels, 0 or 1, of the `known` rows in the nodes they were in (naive Bayes).

    A score is the mean over a row's nodes of the log odds of label 1 in each, with one row of either label added.
    """
    nodes_of_row = _all_nodes(trees, n_rows)
    none, one = (nodes_of_row[known[labels == label]].getnnz(axis=0) + 1.0 for label in (0, 1))
    return _means(nodes_of_row, np.log(one / none))


def attack_auc(scores: Floats, y: NDArray[np.integer] | NDArray[np.floating]) -> float:
    """Return how well scores separate the labels 0 and 1, in either direction: max(AUC, 1 - AUC)."""
    auc = float(roc_auc_score(y, scores))
    return max(auc, 1.0 - auc)


def of_partition(partition: NDArray[np.int32]) -> csr_matrix:
    """Return which rows are in which of a partition's nodes, without empty nodes."""
    known = np.flatnonzero(partition >= 0)
    numbers, columns = np.unique(partition[known], return_inverse=True)
    return csr_matrix((np.ones(len(known)), (known, columns)), shape=(len(partition), len(numbers)))


def _all_nodes(trees: NodeSets, n_rows: int) -> csr_matrix:
    """Return which rows are in which nodes of all partitions."""
    found = [of_partition(partition) for tree in trees for partition in tree]
    return hstack([csr_matrix((n_rows, 0)), *found], format="csr")


def _means(members: csr_matrix, values: Floats) -> Floats:
    """Return the mean value over the members of each row, 0 where there are none."""
    return np.asarray(members @ values / np.maximum(members.getnnz(axis=1), 1))


# --------------------------------------------------- histogram inversion: rebuild training rows from opened histograms
#
# The party that chooses splits sees at every node, for each feature and bin, the sums of grad and hess and the number
# of rows. For one feature that is a row count per bin. What joins the features is that sums are exact: from the second
# tree on gradients differ from row to row, a bin of one row shows its (grad, hess), and in another feature's histogram
# of the same node the bin with the same pair holds the same row. Bins of two and three rows are split into pairs that
# are known from bins of one. So a row gets its bins feature by feature, its label from the sign of its gradient, and
# the findings of several nodes and trees are combined. Leaf values, which show how a row's gradient changes from tree
# to tree, are not used, nor are sums that are nearly equal: the result is a lower bound of what can be found.

Masks = Flags
"""Bins that rows may have, (n, slots): a feature is known where one of its slots is left."""


@dataclass(frozen=True, slots=True)
class OpenedTree:
    """The sums opened while a tree of a binary classifier grew, with up to 28 fractional bits.

    Splits are not needed: bins off a node's path hold no rows. `asked` maps a node to its slots' sums of grad and hess
    and number of rows, int64 (slots, 3); siblings may be left out. `left` is each node's left child, -1 at leaves.
    """

    asked: Mapping[int, Integers]
    left: Int32s

    def nodes(self) -> dict[int, Integers]:
        """Return the sums of the asked nodes and their siblings, parents first."""
        sums = {0: self.asked[0]}
        for parent in np.flatnonzero(self.left >= 0).tolist():
            left = int(self.left[parent])
            for node, sibling in ((left, left + 1), (left + 1, left)):
                if node in self.asked:
                    sums[node], sums[sibling] = self.asked[node], sums[parent] - self.asked[node]
        return sums


@dataclass(frozen=True, slots=True)
class RebuiltRows:
    """Rows that an attack put together; some may be wrong, and some the same row.

    `possible` is bool (n_found, slots), `labels` int64 (n_found,) of 0 and 1.
    """

    possible: Masks
    labels: Integers

    def known(self, offsets: Int32s) -> Integers:
        """Return the number of known features of each row."""
        bins = np.add.reduceat(self.possible, offsets[:-1], axis=1, dtype=np.int64)
        return np.asarray((bins == 1).sum(axis=1))


@dataclass(frozen=True, slots=True)
class TableAgreement:
    """How well a rebuilt table agrees with the true one, rows matched one to one to agree best.

    `mean` is the share of right bins, `mostly` that of rows with at least 90 % right bins, `labels` that of right
    labels.
    """

    mean: float
    mostly: float
    labels: float


def invert(trees: Sequence[OpenedTree], offsets: Int32s) -> RebuiltRows:
    """Put rows together from at least one tree's opened histograms, most known features first."""
    # a tree may leave columns out
    counts = np.max([tree.asked[0][:, 2] for tree in trees], axis=0)
    # noise may have made the count anything
    n_rows = max(1, int(counts[: offsets[1]].sum()))
    # of two rows sharing a slot
    surprise = -np.log(np.maximum(counts, 1) / n_rows)
    found = _rows_of_tree(trees[0], offsets)
    for tree in trees[1:]:
        found = _join(found, _rows_of_tree(tree, offsets), surprise, 2.0 * np.log(n_rows), offsets)
    order = np.argsort(-found.known(offsets), kind="stable")
    return RebuiltRows(found.possible[order], found.labels[order])


def rebuild(found: RebuiltRows, by_class: Integers, offsets: Int32s, seed: int = 0) -> tuple[Integers, Integers]:
    """Make a whole table, codes (n_rows, n_features) and labels (n_rows,): found rows, and guesses for everything else.

    Guesses are drawn so that every column's counts by class are right. With no rows found, this is the baseline:
    columns shuffled one by one. `found` are most reliable first; rows beyond the number of their class are left out.
    `by_class` (2, slots) are the rows of each class in each slot, which the first tree's root reveals, as there all
    gradients of a class are the same.
    """
    rng = np.random.default_rng(seed)
    tables, sizes = [], by_class[:, : offsets[1]].sum(axis=1)
    for label, (size, counts) in enumerate(zip(sizes.tolist(), by_class, strict=True)):
        # rows without a finding may be anything: all bins are allowed
        masks = np.ones((size, len(counts)), np.bool_)
        own = found.possible[found.labels == label][:size]
        masks[: len(own)] = own
        codes = np.empty((size, len(offsets) - 1), np.int64)
        for feature, (first, stop) in enumerate(pairwise(offsets)):
            codes[:, feature] = _draw(masks[:, first:stop], counts[first:stop].copy(), rng)
        tables.append(codes)
    return np.concatenate(tables), np.repeat([0, 1], sizes)


def agreement(
    codes: Integers, labels: Integers, true_codes: NDArray[np.integer], y: NDArray[np.integer]
) -> TableAgreement:
    """Compare a rebuilt table, codes (n_rows, n_features) and labels (n_rows,), with the true one."""
    alike = np.zeros((len(codes), len(true_codes)), np.float32)
    for ours, theirs in zip(codes.T, true_codes.T, strict=True):
        alike += ours[:, None] == theirs
    alike /= codes.shape[1]
    # the row order is arbitrary, so match the rows that agree best (the Hungarian method)
    rows, matched = linear_sum_assignment(alike, maximize=True)
    right, labels_right = alike[rows, matched], labels[rows] == y[matched]
    return TableAgreement(float(right.mean()), float((right >= 0.9).mean()), float(labels_right.mean()))


def _keys(sums: Integers) -> Integers:
    """Combine grad and hess into one number that adds up as they do; sums of a few rows' hess are below 2^32."""
    return (sums[..., 0] << 32) + sums[..., 1]


def _taken_apart(sums: Integers, known: Integers) -> tuple[NDArray[np.int8], Flags]:
    """Return how often (2 for more) each slot holds each known key (n_known, slots), and which slots are settled.

    A slot of up to three rows is settled when it is a sum of known keys in one way alone.
    """
    keys, counts = _keys(sums), sums[:, 2]
    held, settled = np.zeros((len(known), len(keys)), np.int8), counts == 0
    # sums of two known keys, each pair once: what is left of a slot of three rows when one is taken out
    first, second = np.triu_indices(len(known))
    rests = {1: np.zeros(1, np.int64), 2: known, 3: np.sort(known[first] + known[second])}
    for rows, rest in rests.items():
        slots = np.flatnonzero(counts == rows)
        wanted = keys[slots] - known[:, None]
        # in how many ways the rest of each slot is made of known keys
        ways = np.searchsorted(rest, wanted, "right") - np.searchsorted(rest, wanted, "left")
        # {a, b, c} is found three times: from a, from b and from c
        parts = (ways > 0).sum(axis=0)
        twice = np.isin(wanted - known[:, None], rests[rows - 1]) if rows > 1 else np.zeros_like(ways, np.bool_)
        once = (parts >= 1) & (parts <= rows) & (ways.sum(axis=0) == parts)
        # {a, a, b} and {c, c, c} have three parts as well
        once &= (twice & (ways > 0)).sum(axis=0) == (parts < rows)
        held[:, slots[once]] = np.where(twice, 2, 1)[:, once] * (ways > 0)[:, once]
        settled[slots[once]] = True
    return held, settled


def _rows_of_tree(tree: OpenedTree, offsets: Int32s) -> RebuiltRows:
    """Combine what all nodes of one tree show of rows with the same key."""
    nodes = tree.nodes()
    known = np.unique(np.concatenate([_keys(sums[sums[:, 2] == 1]) for sums in nodes.values()]))
    # a gradient rounded to 0 has no label
    known = known[known >> 32 != 0]
    widths = np.diff(offsets)
    # node -> key -> rows found in it and below
    rows: dict[int, dict[int, list[Masks]]] = {}
    # children before parents
    for node in sorted(nodes, reverse=True):
        below: dict[int, list[Masks]] = {}
        for child in (tree.left[node], tree.left[node] + 1) if tree.left[node] >= 0 else ():
            for key, masks in rows.pop(int(child), {}).items():
                below.setdefault(key, []).extend(masks)
        # which known keys are in which bins of this node
        held, settled = _taken_apart(nodes[node], known)
        often = np.add.reduceat(held, offsets[:-1], axis=1, dtype=np.int64)
        unasked = np.add.reduceat(nodes[node][:, 2], offsets[:-1]) == 0
        possible = np.where(np.repeat(often > 0, widths, axis=1), held > 0, ~settled | np.repeat(unasked, widths))
        # else two rows were taken for one
        whole = np.logical_or.reduceat(possible, offsets[:-1], axis=1).all(axis=1)
        for key in np.flatnonzero((often.max(axis=1, initial=0) == 1) & whole).tolist():
            # a child's sums reveal all that its parent's reveal
            below.setdefault(key, [possible[key]])
        rows[node] = below
    found = [mask for of_key in rows[0].values() for mask in of_key]
    labels = [known[key] < 0 for key, of_key in rows[0].items() for _ in of_key]
    return RebuiltRows(np.array(found, np.bool_).reshape(-1, int(offsets[-1])), np.array(labels, np.int64))


def _join(a: RebuiltRows, b: RebuiltRows, surprise: Floats, enough: float, offsets: Int32s) -> RebuiltRows:
    """Unite rows of two trees that nothing contradicts and that share more than chance explains."""
    if not len(a.labels) or not len(b.labels):
        return a if len(a.labels) else b
    evidence = np.zeros((len(a.labels), len(b.labels)))
    for first, stop in pairwise(offsets):
        of_a, of_b = a.possible[:, first:stop], b.possible[:, first:stop]
        # rows that have no bin in common in a column cannot be one
        evidence[~(of_a.astype(np.float32) @ of_b.T.astype(np.float32) > 0)] = -np.inf
        # a bin that is certain for both counts by how surprising it is that two rows share it
        sure_a, sure_b = (of & (of.sum(axis=1) == 1)[:, None] for of in (of_a, of_b))
        evidence += (sure_a * surprise[first:stop]) @ sure_b.T.astype(np.float64)
    evidence[a.labels[:, None] != b.labels] = -np.inf
    best_b, best_a = evidence.argmax(axis=1), evidence.argmax(axis=0)
    # only mutual best matches with enough evidence are united
    rows = np.flatnonzero((best_a[best_b] == np.arange(len(best_b))) & (evidence.max(axis=1) >= enough))
    possible = a.possible.copy()
    possible[rows] &= b.possible[best_b[rows]]
    rest = np.setdiff1d(np.arange(len(b.labels)), best_b[rows])
    return RebuiltRows(np.concatenate([possible, b.possible[rest]]), np.concatenate([a.labels, b.labels[rest]]))


def _draw(masks: Masks, left: Integers, rng: np.random.Generator) -> Integers:
    """Draw a bin for every row among those its mask (n_rows, bins) allows, the scarcest choices first."""
    codes, all_of_them = np.empty(len(masks), np.int64), left.copy()
    for row in np.argsort(masks.sum(axis=1) + rng.random(len(masks))):
        chances = next(c for c in (masks[row] * left, masks[row] * all_of_them, masks[row]) if c.any())
        codes[row] = np.searchsorted(np.cumsum(chances), rng.random() * chances.sum(), "right")
        left[codes[row]] = max(0, left[codes[row]] - 1)
    return codes
