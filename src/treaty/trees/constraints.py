"""Monotone and interaction constraints: what they leave to the nodes of a tree, by XGBoost's rules.

A monotone constraint bounds weights. Where a node is split on a column with a direction, no weight below its left child
may pass the middle of the two children's weights, nor any below the right one; the same bounds hold for all that is
below. So predictions rise (or fall) with the column whatever is split later. A split whose children's weights go
against the column's direction is inadmissible, and gains are those of weights within the node's bounds.

Interaction constraints are groups of columns. Below the root a node may be split on the columns of every group that
contains all columns used above it; a column of no group stays alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Flags, Floats, Int32s, Integers

if TYPE_CHECKING:
    from treaty.trees.splits import SplitRules, Splits

Directions = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class NodeConstraints:
    """What constraints leave to some nodes: of weights a lower and an upper bound, and which columns may split them.

    `bounds` is float64 (n_nodes, 2), before the learning rate. `within`, bool (n_nodes, n_groups), says which groups
    have all columns used above; `allowed` is bool (n_nodes, n_columns), or (n_nodes, 0) without groups.
    """

    bounds: Floats
    within: Flags
    allowed: Flags

    @classmethod
    def joined(cls, parts: Sequence[NodeConstraints]) -> NodeConstraints:
        """Return the limits of the nodes of all parts, one part after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in NodeConstraints.__slots__))

    def take(self, index: NDArray[np.integer] | Flags | slice) -> NodeConstraints:
        """Return the limits of some of the nodes."""
        return NodeConstraints(self.bounds[index], self.within[index], self.allowed[index])


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """Constraints on the columns of all sources, one source after the other.

    `directions`, int8 (n_columns,), are 1 where weights may only rise with the column, -1 where they may only fall, 0
    elsewhere. `groups` is bool (n_groups, n_columns); `first` has each source's first column, and their number.
    """

    directions: Directions
    groups: Flags
    first: Integers

    @classmethod
    def over(cls, sources: Sequence[tuple[Directions, Flags]]) -> Constraints | None:
        """Join directions (n,) and groups (n_groups, n) of each source's columns; None if nothing is constrained."""
        directions = np.concatenate([of for of, _ in sources])
        groups = np.concatenate([of for _, of in sources], axis=1)
        if not directions.any() and not len(groups):
            return None
        return cls(directions, groups, np.cumsum([0, *(len(of) for of, _ in sources)]))

    @property
    def monotone(self) -> bool:
        """Whether any column has a direction."""
        return bool(self.directions.any())

    def joined(self) -> Constraints:
        """Return the same constraints where all columns are one source's."""
        return Constraints(self.directions, self.groups, np.array([0, len(self.directions)]))

    def root(self) -> NodeConstraints:
        """Return the limits of a tree's root: none."""
        every = (1, self.groups.shape[1] if len(self.groups) else 0)
        return NodeConstraints(
            np.array([[-np.inf, np.inf]]), np.ones((1, len(self.groups)), np.bool_), np.ones(every, np.bool_)
        )

    def below(
        self, limits: NodeConstraints, source: Int32s, feature: Int32s, direction: Directions, weights: Floats
    ) -> NodeConstraints:
        """Return the limits of the children of split nodes, left and right in turn: (2 k,) nodes.

        `source`, `feature` and `direction` (k,) are those of splits, `weights` (k, 2) the two children's within
        `limits`.
        """
        columns = self.first[source] + feature
        bounds, middle = np.repeat(limits.bounds[:, None], 2, axis=1), weights.mean(axis=1)
        rising, falling = direction > 0, direction < 0
        bounds[rising, 0, 1] = bounds[rising, 1, 0] = middle[rising]
        bounds[falling, 0, 0] = bounds[falling, 1, 1] = middle[falling]
        within, allowed = limits.within & self.groups[:, columns].T, limits.allowed
        if len(self.groups):
            allowed = within.astype(np.float32) @ self.groups.astype(np.float32) > 0.0
            # a column of no group may be split again, alone
            allowed[np.arange(len(columns)), columns] = True
        return NodeConstraints(bounds.reshape(-1, 2), np.repeat(within, 2, axis=0), np.repeat(allowed, 2, axis=0))


def limits_of_source(
    rules: SplitRules, limits: NodeConstraints | None, source: int
) -> tuple[Directions, Floats, Flags]:
    """Return what a scan of one source's sums needs: directions, the nodes' bounds, and which columns they may use.

    Bounds are (0, 2) where no column has a direction, and the columns (0, 0) where there are no groups.
    """
    constraints, bounds, allowed = rules.constraints, np.empty((0, 2)), np.empty((0, 0), np.bool_)
    if limits is None or constraints is None:
        return np.empty(0, np.int8), bounds, allowed
    own = slice(constraints.first[source], constraints.first[source + 1])
    if constraints.monotone:
        bounds = limits.bounds
    if len(constraints.groups):
        allowed = np.ascontiguousarray(limits.allowed[:, own])
    return constraints.directions[own], bounds, allowed


def limits_below(
    rules: SplitRules, limits: Sequence[NodeConstraints], nodes: Int32s, chosen: Splits, of_pairs: Integers
) -> NodeConstraints:
    """Return the limits of the children of divided `nodes`, from the children's totals (k, 2, 3).

    `limits` are those of all nodes of the tree so far, in the order of their numbers.
    """
    assert rules.constraints is not None
    own = NodeConstraints.joined(limits).take(nodes)
    # only trees of one output have weights that are bounded
    weights = rules.weight(of_pairs[..., [0, 1, -1]].reshape(-1, 3), np.repeat(own.bounds, 2, axis=0)).reshape(-1, 2)
    return rules.constraints.below(own, chosen.source, chosen.feature, chosen.direction, weights)


def note_directions(
    found: Splits, totals: Integers, offsets: Int32s, rules: SplitRules, directions: Directions, bounds: Floats
) -> None:
    """Write the directions of splits, those of their columns, in place; `bounds` are the nodes'."""
    has = found.feature >= 0
    found.direction[has] = directions[found.feature[has]]
    for node in np.flatnonzero(found.direction):
        bins = offsets[found.feature[node] + 1] - offsets[found.feature[node]] - 1
        if found.left_bins[node, :bins].all():
            # missing values alone go right, which have no order: XGBoost tries both, and the weights decide
            left = found.left_totals[node]
            sides = rules.weight(np.stack([left, totals[node] - left]), bounds[[node, node]])
            found.direction[node] = np.sign(sides[1] - sides[0]) or found.direction[node]
