"""Boosted trees on splits that are drawn at random: only the sums of their leaves are opened, and carry noise.

A column and a cut that are drawn without looking at rows cost no privacy, so that the whole budget goes to the sums of
grad and hess in the leaves (Maddock et al., "Federated Boosted Decision Trees with Differential Privacy", CCS 2022,
arXiv 2210.02910; Peinemann et al., "S-BDT", arXiv 2309.12041). Nothing here sends a message.

**What one row changes.** A row is in one leaf of each tree. Sums are measured in units (`units`): the most that a row's
grad can be, and the most that its hess can be, divided by a share s. Over one tree of each output, one row then moves
the vector of all sums by an L2 norm of at most `row_norm`:

* Two classes: |g| = q and h = q (1 - q) for some q in [0, 1]. With s = 0.8, q^2 + (3.2 h)^2 <= 1, as 3.2^2 is below the
  least value of (1 + q) / (q^2 (1 - q)), 11.09. The sums of hess cost nothing.
* Several classes with probabilities p, a = 1 - p_y: f(x) = x^2 + (2 x (1 - x))^2 is at most 1 and at most x, so that
  f(a) and f(p_j) of all others add up to at most 1 + a <= 2 (s = 0.5). So all classes' trees share one budget.
* Numbers: |g| is clipped to half of the declared range, and the hess of a row is at most its weight (s = 0.4).

Rounding to integers adds at most one unit of the fixed point to each number. A round of b trees of each output is one
release with the norm sqrt(b) `row_norm`, and rounds add up by zero-concentrated differential privacy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treaty.data.binning import Bins
from treaty.machine.arrays import Codes, Flags, Floats, Int32s, Integers
from treaty.machine.kernels import kernel
from treaty.privacy.discrete_gaussian import Releases, noise_for, noise_share
from treaty.trees.constraints import Directions
from treaty.trees.ensemble import Tree
from treaty.trees.histograms import width_of
from treaty.trees.objectives import Objective
from treaty.trees.slots import RowShard
from treaty.trees.splits import SplitRules

logger = logging.getLogger(__name__)

NOISY_TREES = (50, 3, 0.6)
"""`n_estimators`, `max_depth` and `learning_rate` under noise on leaves, with `NOISY_PARALLEL` trees a round."""
NOISY_PARALLEL = 10
MOST_DEPTH = 8
# shares of the noise: hess of two classes, of several, of numbers (see above)
_TWO_CLASSES, _CLASSES, _NUMBERS = 0.8, 0.5, 0.4
# sum of hess over the noise that all trees together leave in a grad, for trees of no depth; four times for each level
_CLEAR = 16.0


@dataclass(frozen=True, slots=True)
class RandomTrees:
    """Complete trees in heap order: the children of node i are 2 i + 1, left, and 2 i + 2.

    `features` is int32 (n_trees, 2^depth - 1); `left_bins`, bool (n_trees, 2^depth - 1, width), says which bins go
    left. Tree t adds to output ``t % n_outputs``.
    """

    features: Int32s
    left_bins: Flags

    @property
    def leaves(self) -> int:
        """Leaves of each tree."""
        return int(self.features.shape[1]) + 1

    def sums(self, columns: Codes, grad: Integers, hess: Integers) -> tuple[Integers, Int32s]:
        """Return the sums of grad and hess by leaf, int64 (n_trees, leaves, 2), and each row's leaf (n_trees, n_rows).

        `columns` are the bins of all rows, (n_features, n_rows); `grad` and `hess` int64 (n_outputs, n_rows).
        """
        n_trees = len(self.features)
        sums = np.zeros((n_trees, self.leaves, 2), np.int64)
        leaves = np.zeros((n_trees, columns.shape[1]), np.int32)
        _sum_leaves(columns, self.features, self.left_bins, grad, hess, leaves, sums)
        return sums, leaves

    def grown(self, sums: Integers, rules: SplitRules, first_record: int) -> list[Tree]:
        """Return the trees with leaf values from noisy sums, int64 (n_trees, leaves, 2); covers are noisy, too.

        `first_record` is the record number of the first split; others follow by tree and node.
        """
        n_trees, inner = self.features.shape
        totals = np.zeros((n_trees, 2 * inner + 1, 3), np.int64)
        totals[:, inner:, 0] = sums[..., 0]
        # noise may make a sum of hess negative
        totals[:, inner:, 1] = np.maximum(sums[..., 1], 0)
        for node in reversed(range(inner)):
            totals[:, node] = totals[:, 2 * node + 1] + totals[:, 2 * node + 2]
        value = np.zeros(totals.shape[:2])
        value[:, inner:] = rules.leaf_value(totals[:, inner:].reshape(-1, 3)).reshape(n_trees, -1)
        gain = np.zeros(value.shape)
        heap = np.arange(2 * inner + 1)
        for node in range(inner):
            gain[:, node] = np.maximum(rules.gain(totals[:, node], totals[:, 2 * node + 1]), 0.0)
        if rules.constraints is not None and rules.constraints.monotone:
            self._order(value, rules.constraints.directions)
        is_leaf = heap >= inner
        return [
            Tree(
                source=np.where(is_leaf, -1, 0).astype(np.int16),
                record=np.where(is_leaf, -1, first_record + tree * inner + heap).astype(np.int32),
                left=np.where(is_leaf, -1, 2 * heap + 1).astype(np.int32),
                value=value[tree],
                gain=gain[tree],
                cover=totals[tree, :, 1] * rules.hess_unit,
                count=np.zeros(len(heap), np.int64),
            )
            for tree in range(n_trees)
        ]

    def _order(self, value: Floats, directions: Directions) -> None:
        """Bring leaf values in the order of constrained columns, in place: both sides of a split meet in the middle."""
        inner = self.features.shape[1]
        for tree, node in np.ndindex(*self.features.shape):
            # from the lowest splits up: what moves one side by one bound keeps the order within it
            node = inner - 1 - node
            direction = directions[self.features[tree, node]]
            if not direction:
                continue
            below = np.array([node])
            while below[0] < inner:
                below = np.concatenate([2 * below + 1, 2 * below + 2])
            left, right = (value[tree, of] * direction for of in np.split(np.sort(below), 2))
            middle = (left.mean() + right.mean()) / 2.0
            if left.max() > right.min():
                ordered = np.concatenate([np.minimum(left, middle), np.maximum(right, middle)])
                value[tree, np.sort(below)] = ordered * direction


@kernel
def _sum_leaves(
    columns: Codes, features: Int32s, left_bins: Flags, grad: Integers, hess: Integers, leaves: Int32s, sums: Integers
) -> None:
    """Take every row down each tree; write its leaf, and add its derivatives to the leaf's sums."""
    inner = features.shape[1]
    for tree in range(features.shape[0]):
        output = tree % grad.shape[0]
        for row in range(columns.shape[1]):
            node = 0
            while node < inner:
                goes_left = left_bins[tree, node, columns[features[tree, node], row]]
                node = 2 * node + (1 if goes_left else 2)
            leaves[tree, row] = node - inner
            sums[tree, node - inner, 0] += grad[output, row]
            sums[tree, node - inner, 1] += hess[output, row]


def draw_trees(rng: np.random.Generator, bins: Bins, depth: int, allowed: Sequence[Sequence[Int32s]]) -> RandomTrees:
    """Draw a tree for each of `allowed`, which has the sets of columns that one tree may use.

    A set comes up by its number of columns. Of a column with numbers a cut is drawn, of one with categories how many go
    left and which; missing values go to a side that is drawn. Columns without any value are never drawn; a tree without
    any other keeps all rows together.
    """
    inner = (1 << depth) - 1 if np.any(bins.n_bins > 0) else 0
    features = np.zeros((len(allowed), inner), np.int32)
    left_bins = np.ones((len(allowed), inner, width_of(bins.offsets)), np.bool_)
    for tree, sets in enumerate(allowed):
        usable = [columns[bins.n_bins[columns] > 0] for columns in sets]
        sizes = np.array([len(columns) for columns in usable])
        if not inner or not sizes.sum():
            continue
        features[tree] = rng.choice(usable[rng.choice(len(usable), p=sizes / sizes.sum())], inner)
        for node, feature in enumerate(features[tree]):
            n_bins = int(bins.n_bins[feature])
            # a single bin can be parted from missing values alone
            size = int(rng.integers(1, max(n_bins - 1, 1) + 1))
            of_bins = np.arange(n_bins) if bins.category_bins[feature] is None else rng.permutation(n_bins)
            left_bins[tree, node, :n_bins] = of_bins < size
            left_bins[tree, node, n_bins] = n_bins > 1 and rng.random() < 0.5
    return RandomTrees(features, left_bins)


def column_sets(columns: Int32s, groups: Flags) -> list[Int32s]:
    """Return the sets of columns that a tree may use: one of the interaction constraints' groups, or a column alone.

    `columns` are those drawn for the tree, `groups` bool (n_groups, n_columns), of which there may be none.
    """
    if not len(groups):
        return [columns]
    alone = columns[~groups[:, columns].any(axis=0)]
    return [*(columns[group[columns]] for group in groups), *alone[:, None]]


# ---------------------------------------------------------------- noise


def row_norm(n_outputs: int, *, classes: bool, fractional_bits: int) -> float:
    """Return the most by which one row changes the sums of a tree of each output, as an L2 norm in `units`."""
    if not classes:
        return math.hypot(1.0, _NUMBERS)
    rounding = 2.0 ** (1 - fractional_bits)
    return 1.0 + rounding if n_outputs == 1 else math.sqrt(2.0) + math.sqrt(n_outputs) * rounding


@dataclass(frozen=True, slots=True)
class LeafNoise:
    """Noise on the leaf sums of a training: `sigma` in `units`, and of how many members' shares it is made.

    `rounds` of `parallel` trees of each output are planned, at the learning rate `rate`; gradients of numbers are
    clipped to `half_range`.
    """

    sigma: float
    honest: int
    rounds: int
    parallel: int
    rate: float
    half_range: float | None = None

    def releases(self, rho: float, outputs: int, norm: float, steps: float, rows: int | None = None) -> Releases:
        """Return the releases of all rounds, with the least noise that costs at most `rho`, in `steps` to a unit.

        `norm` is of one row; a whole user changes a sum by what `rows` of them do at most, None where rows are
        protected.
        """
        # a row is in one leaf of each tree of a round, a user's sums, scaled down, may be in all
        coordinates = 2 * self.parallel * outputs * (1 if rows is None else 1 << MOST_DEPTH)
        norm = math.sqrt(self.parallel) * norm * steps * (rows or 1)
        return noise_for(rho, count=self.rounds, coordinates=coordinates, norm=norm, honest=self.honest)

    @property
    def left(self) -> float:
        """Standard deviation, in units, of what all trees' noise adds to a grad if their steps add up to one step."""
        return self.sigma / math.sqrt(self.rounds * self.parallel)

    def limit(self, objective: Objective) -> int:
        """Return the largest grad of a row, as an integer; larger ones are clipped."""
        if self.half_range is None:
            return objective.grad_bound
        return min(objective.grad_bound, math.ceil(objective.grad_bound * self.half_range / objective.grad_clip))

    def units(self, objective: Objective) -> Floats:
        """Return the units of sums of grad and of hess, in steps of the fixed point."""
        classes = objective.takes == "classes"
        share = (_TWO_CLASSES if objective.n_outputs == 1 else _CLASSES) if classes else _NUMBERS
        return np.array([self.limit(objective), objective.hess_bound / share])

    def deviations(self, length: int, objective: Objective) -> Floats:
        """Return the standard deviations of the noise on a vector of leaf sums, float64 (length,)."""
        return np.tile(self.units(objective) * self.sigma, length // 2)

    def on(self, sums: Integers, objective: Objective) -> Integers:
        """Return a vector of leaf sums with the own share of noise."""
        return sums + noise_share(self.deviations(len(sums), objective), self.honest)

    def rules(self, rules: SplitRules, objective: Objective) -> SplitRules:
        """Return rules whose denominators grow by the noise that all trees together leave in a grad.

        A row's margin then carries noise of a standard deviation below one unit.
        """
        steps = self.rounds * self.rate
        return replace(rules, reg_lambda=rules.reg_lambda + steps * self.left * objective.weight_bound)

    def depth(self, n_rows: int, objective: Objective, most: int) -> int:
        """Return how deep trees are, 1 to `most`: as long as leaves stand out from the noise, by the number of rows."""
        clear = n_rows * objective.largest_hess / (_CLEAR * self.left)
        return min(most, max(1, math.floor(math.log2(max(clear, 1.0)) / 2.0)))


class LeafShard(RowShard):
    """A party's rows while random trees grow: leaf sums of a round, and margins, float64 (n_outputs, n_rows)."""

    _leaves: Int32s

    def leaf_sums(self, trees: RandomTrees, limit: int) -> Integers:
        """Compute gradients, at most `limit`, and return the sums of the round's leaves, int64 (n_trees, leaves, 2)."""
        # how many are clipped would be in the model, without noise
        grad, hess, _ = self._objective.gradients(self.margins.T, self._y, self._weight, self._threads)
        within = np.clip(grad, -limit, limit), np.minimum(hess, self._objective.hess_bound)
        sums, self._leaves = trees.sums(self._columns, *within)
        return sums

    def add(self, grown: Sequence[Tree]) -> None:
        """Add the values of the leaves that rows are in to their margins."""
        for number, (tree, leaves) in enumerate(zip(grown, self._leaves, strict=True)):
            self.margins[number % len(self.margins)] += tree.value[len(tree.left) // 2 + leaves]
