"""A finished model's trees, filled up to complete ones with splits on bins: the form in which a model is shared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.errors import ConfigError
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.slots import SlotSplits


def depth_of(tree: Tree) -> int:
    """Return how many levels of splits a tree has."""
    depth = np.zeros(len(tree.left), np.int64)
    for node in np.flatnonzero(tree.left >= 0).tolist():  # children come after their parents
        depth[tree.left[node] : tree.left[node] + 2] = depth[node] + 1
    return int(depth.max())


def complete_tree(
    tree: Tree, splits: SplitTable, bins: Bins, depth: int
) -> tuple[list[SlotSplits], NDArray[np.float64]]:
    """Fill a tree up to a depth with dummy splits, at which rows go right.

    Returns the splits of all slots of each level, and float64 (2^depth,) the values of the slots below the last level.
    Raises ConfigError when a split is not at a cut of the training's bins.
    """
    levels = [SlotSplits(np.full(1 << k, -1, np.int32), np.zeros((1 << k, 256), np.bool_)) for k in range(depth)]
    values = np.zeros(1 << depth)
    slot, level = np.zeros((2, len(tree.left)), np.int64)
    for node, left in enumerate(tree.left.tolist()):
        at, k = int(slot[node]), int(level[node])
        if left < 0:
            values[((at + 1) << (depth - k)) - 1] = tree.value[node]
            continue
        record = int(tree.record[node])
        levels[k].features[at], levels[k].left_bins[at] = splits.feature[record], _left_bins(splits, record, bins)
        slot[left : left + 2], level[left : left + 2] = (2 * at, 2 * at + 1), k + 1
    return levels, values


def _left_bins(splits: SplitTable, record: int, bins: Bins) -> NDArray[np.bool_]:
    """Return which bins go left at a split, bool (256,), as `record_split` was given them."""
    feature, going, threshold = splits.feature[record], splits.category_left[record], splits.threshold[record]
    n_bins, cuts, of_category = int(bins.n_bins[feature]), bins.cuts[feature], bins.category_bins[feature]
    left = np.zeros(256, np.bool_)
    if going is not None and of_category is not None and len(going) == len(of_category):
        left[of_category] = np.frombuffer(going, np.uint8) != 0
    elif going is None and cuts is not None and (threshold == np.inf or threshold in cuts):
        left[: n_bins if threshold == np.inf else int(np.searchsorted(cuts, threshold)) + 1] = True
    else:
        raise ConfigError("expected splits at cuts of the bins of training, got others; the bins are another model's")
    left[n_bins] = splits.missing_left[record]
    return left
