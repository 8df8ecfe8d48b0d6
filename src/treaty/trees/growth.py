"""Grow one tree level by level from node totals alone.

The grower holds no rows and knows no parties: it asks a split finder for the best splits of a whole level, decides
which to keep, tells the finder, and turns totals into leaf weights. Everything a protocol does differently is in its
finder.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.trees.ensemble import Tree
from treaty.trees.splits import Level, SplitRules, Splits


class SplitFinder(Protocol):
    """Finds splits and applies them; holds the rows, or asks those who do."""

    def start_tree(
        self,
        grad: NDArray[np.int64],
        hess: NDArray[np.int64],
        rows: NDArray[np.int32] | None,
        columns: NDArray[np.int32],
    ) -> NDArray[np.int64]:
        """Take a tree's gradients (n_rows,), sampled rows (None: all) and columns; return the root's totals (3,)."""

    def best_splits(self, level: Level) -> Splits:
        """Return the best admissible split of every node of `level`."""

    def divide(self, nodes: NDArray[np.int32], children: NDArray[np.int32], chosen: Splits) -> NDArray[np.int32]:
        """Apply the `chosen` splits of `nodes`; return the owners' record numbers of the splits.

        ``children`` are the numbers of the left children; a right child's number is one higher.
        """

    def finish(self, tree: Tree, margins: NDArray[np.float64]) -> None:
        """Add the finished tree's leaf values to the margins (n_rows,) of the rows."""


def grow_tree(
    finder: SplitFinder,
    grad: NDArray[np.int64],
    hess: NDArray[np.int64],
    margins: NDArray[np.float64],
    rules: SplitRules,
    *,
    rows: NDArray[np.int32] | None,
    columns: NDArray[np.int32],
) -> Tree:
    """Grow one tree and add its leaf values to `margins`.

    Parameters
    ----------
    finder : SplitFinder
    grad, hess : int64 (n_rows,)
        Fixed-point gradients at the current margins.
    margins : float64 (n_rows,)
        Changed in place.
    rules : SplitRules
    rows : int32 or None
        Ascending rows of the tree's sample; None for all.
    columns : int32
        Ascending columns of the tree's sample, counted over all parties.

    Returns
    -------
    Tree
    """
    totals = [finder.start_tree(grad, hess, rows, columns)]
    source, record, left, gain = [-1], [-1], [-1], [0.0]
    level: Level | None = _first_level(totals[0], rules)
    while level is not None:
        splits = finder.best_splits(level)
        kept = np.flatnonzero(splits.feature >= 0)
        if len(kept) == 0:
            break
        nodes, chosen = level.nodes[kept], splits.take(kept)
        children = (len(totals) + 2 * np.arange(len(kept))).astype(np.int32)
        records = finder.divide(nodes, children, chosen)
        for k, node in enumerate(nodes):
            source[node], record[node] = int(chosen.source[k]), int(records[k])
            left[node], gain[node] = int(children[k]), float(chosen.gain[k])
            totals += [chosen.left_totals[k], totals[node] - chosen.left_totals[k]]
        leaves = 2 * len(kept)
        source += [-1] * leaves
        record += [-1] * leaves
        left += [-1] * leaves
        gain += [0.0] * leaves
        level = _next_level(level.depth + 1, totals, children, kept, rules)
    all_totals = np.array(totals)
    tree = Tree(
        source=np.array(source, np.int16),
        record=np.array(record, np.int32),
        left=np.array(left, np.int32),
        value=np.where(np.array(left) < 0, rules.learning_rate * rules.leaf_weight(all_totals), 0.0),
        gain=np.array(gain),
        cover=(all_totals[:, 1] * rules.hess_unit).astype(np.float64),
        count=all_totals[:, 2],
    )
    finder.finish(tree, margins)
    return tree


def _first_level(total: NDArray[np.int64], rules: SplitRules) -> Level | None:
    if rules.max_depth < 1 or total[2] < 2 * rules.min_child_samples:
        return None
    root = np.zeros(1, np.int32)
    return Level(0, root, total[None], root, total[None], root, root - 1)


def _next_level(
    depth: int,
    totals: list[NDArray[np.int64]],
    children: NDArray[np.int32],
    parents: NDArray[np.intp],
    rules: SplitRules,
) -> Level | None:
    """Name the children still to be split, and of each pair the one whose sums are computed (the smaller)."""
    if depth >= rules.max_depth:
        return None
    nodes: list[int] = []
    asked: list[int] = []
    asked_index: list[int] = []
    parent_index: list[int] = []
    for child, parent in zip(children.tolist(), parents.tolist(), strict=True):
        pair = [node for node in (child, child + 1) if totals[node][2] >= 2 * rules.min_child_samples]
        if not pair:
            continue
        smaller = child if totals[child][2] <= totals[child + 1][2] else child + 1
        for node in pair:
            nodes.append(node)
            asked_index.append(len(asked))
            parent_index.append(-1 if node == smaller else parent)
        asked.append(smaller)
    if not nodes:
        return None
    return Level(
        depth,
        np.array(nodes, np.int32),
        np.array([totals[node] for node in nodes]),
        np.array(asked, np.int32),
        np.array([totals[node] for node in asked]),
        np.array(asked_index, np.int32),
        np.array(parent_index, np.int32),
    )
