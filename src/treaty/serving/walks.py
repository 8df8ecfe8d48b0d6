"""Trees made ready once, to be walked by rows that come one at a time.

`treaty.models.trees.predict_pooled` puts the trees side by side in every call, which for a hundred trees takes thirty
times as long as walking one row down them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from treaty.compute import share
from treaty.models.trees import ModelPart
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import SplitTable, Tree, _stack, join_splits
from treaty.trees.walking import NodeSplits, walk_values


class Walk:
    """Trees whose splits are all known, ready to be walked: margins are those of `margins_from_values`, bit for bit."""

    def __init__(self, trees: Sequence[Tree], splits: SplitTable, n_features: int) -> None:
        joined = join_splits([splits], [n_features])
        self._nodes = _stack(trees, joined.base)
        n_nodes = len(self._nodes.left)
        feature, threshold = np.zeros(n_nodes, np.uint32), np.zeros(n_nodes, np.float32)
        missing_left = np.zeros(n_nodes, np.bool_)
        start, stop = np.zeros((2, n_nodes), np.int64)
        inner = ~self._nodes.leaf
        split = self._nodes.split[inner]
        feature[inner], threshold[inner] = joined.feature[split], joined.threshold[split]
        missing_left[inner] = joined.missing_left[split]
        start[inner], stop[inner] = joined.category_start[split], joined.category_start[split + 1]
        self._splits = NodeSplits(feature, threshold, missing_left, start, stop, joined.category_left)

    def add_to(self, margins: NDArray[np.float64], matrix: NDArray[np.float32], threads: int = 1) -> None:
        """Add leaf values to margins (n_rows, n_outputs); `matrix` is float32 (n_rows, n_features) in C order."""
        nodes, splits = self._nodes, self._splits
        share(lambda a, b: walk_values(matrix, nodes, splits, a, b, margins), len(matrix), threads, least=256)


def absent_owners(part: ModelPart) -> tuple[str, ...]:
    """Return the other parties whose splits a part's trees use."""
    forest = forest_of_active(part)
    used = {int(source) for tree in forest.trees for source in np.unique(tree.source) if source >= 0}
    return tuple(name for source, name in enumerate(forest.sources) if source in used and name != part.party)


def whole_walk(part: ModelPart) -> Walk:
    """Make a part's trees ready, whose splits in use are all its own."""
    trees = [_of_one_owner(tree) for tree in forest_of_active(part).trees]
    return Walk(trees, part.splits, len(part.schema.names))


def _of_one_owner(tree: Tree) -> Tree:
    """Return a tree whose splits all have the same owner, as one with this owner alone."""
    return replace(tree, source=np.where(tree.source < 0, -1, 0).astype(np.int16))


def forest_of_active(part: ModelPart) -> Forest:
    """Return the forest that an active party's part has."""
    assert part.forest is not None, "the active party's part holds the trees"
    return part.forest
