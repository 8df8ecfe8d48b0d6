"""Predictions from own columns alone: what the trees are expected to say of a row whose other columns are unknown.

At a partner's split nobody here knows which way a row goes. Its value there is the mean of what both children say,
weighted by how much of the training data each stands for, as in path-dependent TreeSHAP (`treaty.trees.shap`), which
the active party's part holds: the covers, which are sums of hess. (Sending all rows to the heavier child is much worse:
then an ensemble says little but the more frequent class; docs/serving.md has figures.)

A mean of two subtrees is a sum of two trees with smaller leaf values. So every tree becomes a few trees of own splits
alone, which are walked as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.models.trees import ModelPart
from treaty.serving.walks import forest_of_active
from treaty.trees.ensemble import Tree, Walk, join_splits
from treaty.trees.shap import node_weights


@dataclass(frozen=True, slots=True)
class _ExpectedNode:
    """A leaf of a value, or a split of an own record with what is left and right of it."""

    value: float = 0.0
    record: int = -1
    children: tuple[_ExpectedNode, _ExpectedNode] | None = None

    def times(self, share: float) -> _ExpectedNode:
        """Return the same with its leaf values multiplied."""
        if self.children is None:
            return _ExpectedNode(share * self.value)
        left, right = self.children
        return _ExpectedNode(record=self.record, children=(left.times(share), right.times(share)))


_NOTHING = _ExpectedNode()


def expected_walk(part: ModelPart) -> Walk:
    """Make trees ready for rows of which only the own columns are known.

    Raises
    ------
    ConfigError
        Where the part has no split of its own in use, so that all rows would be predicted alike, or no covers.
    """
    forest = forest_of_active(part)
    own, n_outputs = forest.sources.index(part.party), forest.objective.n_outputs
    if not any(np.any(tree.source == own) for tree in forest.trees):
        raise ConfigError(
            f"no split of {part.party}'s own is in use: without its partners all rows are predicted alike"
        )
    if any(tree.count[0] <= 0 for tree in forest.trees):
        raise ConfigError("the model does not have the covers of its nodes, by which a fallback on own columns goes")
    expected = [_expected(tree, own, node_weights(tree), 0) for tree in forest.trees]
    trees = []
    for start in range(0, len(expected), n_outputs):  # tree i adds to output i % n_outputs
        for side_by_side in zip_longest(*expected[start : start + n_outputs], fillvalue=_NOTHING):
            trees += [_flat(root) for root in side_by_side]
    return Walk(trees, join_splits([part.splits], [len(part.schema.names)]))


def _expected(tree: Tree, own: int, weights: NDArray[np.float64], node: int) -> list[_ExpectedNode]:
    """Return trees of own splits whose values add up to what the subtree below a node is expected to say."""
    left = int(tree.left[node])
    if left < 0:
        return [_ExpectedNode(float(tree.value[node]))]
    below = [_expected(tree, own, weights, child) for child in (left, left + 1)]
    if tree.source[node] == own:
        record = int(tree.record[node])
        return [_ExpectedNode(record=record, children=(l, r)) for l, r in zip_longest(*below, fillvalue=_NOTHING)]
    share = float(weights[left] / (weights[left] + weights[left + 1]))
    parts = [root.times(of) for roots, of in zip(below, (share, 1.0 - share), strict=True) for root in roots]
    splits, leaves = [root for root in parts if root.children], [root for root in parts if not root.children]
    return [*([_ExpectedNode(sum(leaf.value for leaf in leaves))] if leaves else []), *splits]


def _flat(root: _ExpectedNode) -> Tree:
    nodes = list(_by_level(root))
    numbers = np.cumsum([1, *(2 for node in nodes if node.children)])[:-1].tolist()  # of left children, in order
    is_split = np.array([node.children is not None for node in nodes])
    left = np.full(len(nodes), -1, np.int32)
    left[is_split] = numbers
    zeros = np.zeros(len(nodes))
    return Tree(
        source=np.where(is_split, 0, -1).astype(np.int16), record=np.array([node.record for node in nodes], np.int32),
        left=left, value=np.array([node.value for node in nodes]), gain=zeros, cover=zeros,
        count=np.zeros(len(nodes), np.int64),
    )  # fmt: skip


def _by_level(root: _ExpectedNode) -> Iterator[_ExpectedNode]:
    level: Sequence[_ExpectedNode] = [root]
    while level:
        yield from level
        level = [child for node in level if node.children for child in node.children]
