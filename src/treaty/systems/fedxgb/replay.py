"""Going on with an interrupted training: finished trees are told again.

All roles start anew, with new keys. The server has the model so far, and takes all rows down its trees once more, by
the messages of training without those of sums, so that users have their margins again. `kept` has what the others keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.slots import SlotSplits


class ToldTrees(NamedTuple):
    """A round's trees as they are told: splits of each level and tree, and leaf values, float64 (trees, slots)."""

    levels: list[list[SlotSplits]]
    values: NDArray[np.float64]


def told(trees: Sequence[Tree], splits: SplitTable, bins: Bins, full_depth: int | None) -> ToldTrees:
    """Return a round's trees as they were told when they grew, of `full_depth` levels or as many as they have."""
    walked = [_by_level(tree) for tree in trees]
    depth = max(1, *(len(levels) - 1 for levels in walked)) if full_depth is None else full_depth
    told_levels = [
        [_splits_of(tree, levels[k] if k < len(levels) else {}, k, splits, bins)
         for tree, levels in zip(trees, walked, strict=True)]
        for k in range(depth)
    ]  # fmt: skip
    values = np.zeros((len(trees), 1 << depth))
    for of_tree, tree, levels in zip(values, trees, walked, strict=True):
        for k, nodes in enumerate(levels):
            for slot, node in nodes.items():
                if tree.left[node] < 0:
                    of_tree[((slot + 1) << (depth - k)) - 1] = tree.value[node]
    return ToldTrees(told_levels, values)


def _by_level(tree: Tree) -> list[dict[int, int]]:
    """Return each level's nodes by slot."""
    levels = [{0: 0}]
    while True:
        below = {
            2 * slot + side: int(tree.left[node]) + side
            for slot, node in levels[-1].items()
            if tree.left[node] >= 0
            for side in (0, 1)
        }
        if not below:
            return levels
        levels.append(below)


def _splits_of(tree: Tree, nodes: dict[int, int], depth: int, splits: SplitTable, bins: Bins) -> SlotSplits:
    found = SlotSplits(np.full(1 << depth, -1, np.int32), np.zeros((1 << depth, 256), np.bool_))
    for slot, node in nodes.items():
        if tree.left[node] >= 0:
            record = int(tree.record[node])
            found.features[slot] = splits.feature[record]
            found.left_bins[slot] = left_bins(splits, record, bins)
    return found


def left_bins(splits: SplitTable, record: int, bins: Bins) -> NDArray[np.bool_]:
    """Return which bins of its feature a recorded split sends left, bool (256,); see `record_split`."""
    feature, going = splits.feature[record], splits.category_left[record]
    n_bins, cuts, of_category = int(bins.n_bins[feature]), bins.cuts[feature], bins.category_bins[feature]
    left = np.zeros(256, np.bool_)
    if going is not None and of_category is not None:
        left[of_category] = np.frombuffer(going, np.uint8).astype(np.bool_)
    elif cuts is None or np.isinf(splits.threshold[record]):
        left[:n_bins] = True
    else:
        left[: int(np.searchsorted(cuts, np.float32(splits.threshold[record]))) + 1] = True
    left[n_bins] = splits.missing_left[record]
    return left
