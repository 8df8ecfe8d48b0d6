"""Rounds under noise: the leader draws trees, all add up their leaves, and one noisy sum is opened for a round.

1. The leader draws columns and cuts of the round's trees, and sends them with the opened sums of the last round.
2. Every participant computes gradients of its own rows, takes these down the trees, and adds them up by leaf.
3. Participants send the vector of all sums under masks, each with its share of the noise.
4. The leader opens the sum; all make the same leaf values of it (`horizontal.random_trees`).

A participant answers once for each round that the budget was planned for, and never again.
"""

from __future__ import annotations

import numpy as np

from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.models.trees import record_split
from treaty.systems.horizontal.own_rows import OwnRows
from treaty.systems.horizontal.random_trees import LeafNoise, LeafShard, RandomTrees, column_sets, draw_trees
from treaty.systems.horizontal.rows import SumOpener
from treaty.systems.pooled.constraints import constraints_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import RoleInput
from treaty.trees.ensemble import Tree
from treaty.trees.histograms import width_of
from treaty.trees.splits import SplitRules

_NO_SUMS = np.empty((0, 0, 2), np.int64)


@leaks(
    "columns and cuts of the next trees, drawn at random, and the noisy sums of grad and hess in each leaf of the last "
    "ones, from which leaf values are computed",
    "noisy",
    guard="epsilon_total",
)
class RandomStep(Message):
    """The next round's trees under noise, and the opened sums of the last one's leaves; either may be empty.

    `features` int32 (n_trees, 2^depth - 1) and `left_bins`, packed (n_trees, 2^depth - 1, width / 8), as in
    `RandomTrees`; `sums` int64 (n_trees, leaves, 2).
    """

    features: Array
    left_bins: Array
    sums: Array


class LeafSender:
    """The leader's end of `RandomStep`: `sums` of a finished round travel with the trees of the next one."""

    def __init__(self, collector: SumOpener, width: int) -> None:
        self._collector, self.sums = collector, _NO_SUMS
        self._none = RandomTrees(np.empty((0, 0), np.int32), np.empty((0, 0, width), np.bool_))

    def send(self, trees: RandomTrees) -> None:
        """Send all participants the next trees, and the last ones' sums."""
        packed = np.packbits(trees.left_bins, axis=2)
        self._collector.broadcast(RandomStep(Array.of(trees.features), Array.of(packed), Array.of(self.sums)))
        self.sums = _NO_SUMS

    def flush(self) -> None:
        """Send the last round to participants that do not have it."""
        if len(self.sums):
            self.send(self._none)


def random_round(
    inputs: RoleInput,
    collector: SumOpener,
    steps: LeafSender,
    own: OwnRows,
    rules: SplitRules,
    noise: LeafNoise,
    n_rows: int,
) -> list[Tree]:
    """Grow a round's trees as the leader; `n_rows` is about how many rows all participants have."""
    objective, rng, constraints = own.forest.objective, own.draws.rng, rules.constraints
    assert rng is not None
    depth = noise.depth(n_rows, objective, inputs.common.depth)
    groups = np.empty((0, len(own.bins.n_bins)), np.bool_) if constraints is None else constraints.groups
    allowed = [column_sets(columns, groups) for columns in own.draw_columns(inputs.common.colsample_bytree)]
    trees = draw_trees(rng, own.bins, depth, allowed)
    steps.send(trees)
    vector = _given(own, trees, noise)
    opened = collector.total(len(vector), None if inputs.data is None else noise.on(vector, objective))
    steps.sums = opened.reshape(len(trees.features), trees.leaves, 2)
    return _finished(own, trees, steps.sums, noise.rules(rules, objective))


def _given(own: OwnRows, trees: RandomTrees, noise: LeafNoise) -> Integers:
    """Return a participant's vector of leaf sums."""
    assert isinstance(own.shard, LeafShard)
    return own.shard.leaf_sums(trees, noise.limit(own.forest.objective)).ravel()


def _finished(own: OwnRows, trees: RandomTrees, sums: Integers, rules: SplitRules) -> list[Tree]:
    """Record the splits of a round, and return its trees with the values that follow from opened `sums`."""
    assert isinstance(own.shard, LeafShard)
    first, left_bins = len(own.part.splits), trees.left_bins.reshape(-1, trees.left_bins.shape[2])
    for feature, left in zip(trees.features.ravel().tolist(), left_bins, strict=True):
        record_split(own.part.splits, own.bins, feature, left)
    grown = trees.grown(sums, rules, first)
    own.shard.add(grown)
    return grown


class LeafMember:
    """A participant's end: answers no more rounds, of no deeper trees, than the job has."""

    def __init__(self, own: OwnRows, leader: str, common: BoostingOptions, noise: LeafNoise) -> None:
        self._own, self._leader, self._noise, objective = own, leader, noise, own.forest.objective
        self._rules = noise.rules(common.rules(objective, constraints_of(common, own.bins.schema)), objective)
        self._most_rounds, self._most_inner = common.most_rounds, (1 << common.depth) - 1
        self._growing: RandomTrees | None = None

    def take(self, step: RandomStep) -> Integers | None:
        """Finish the last round, and return the vector of the next one, int64, which lacks its noise, or None.

        Raises PeerProtocolError if the step does not fit the trees so far.
        """
        self._finish(view(step.sums, np.int64, (None, None, 2), peer=self._leader, what="RandomStep.sums"))
        features = view(step.features, np.int32, (None, None), peer=self._leader, what="RandomStep.features")
        n_trees, inner = features.shape
        if n_trees == 0:
            return None
        width = width_of(self._own.bins.offsets)
        packed = view(
            step.left_bins, np.uint8, (n_trees, inner, width // 8), peer=self._leader, what="RandomStep.left_bins"
        )
        forest = self._own.forest
        fits = n_trees == forest.trees_a_round and inner <= self._most_inner and (inner + 1).bit_count() == 1
        if not fits or np.any((features < 0) | (features >= len(self._own.bins.n_bins))):
            raise self._wrong("trees that the job permits")
        # the budget is planned for so many sums
        if forest.rounds >= self._most_rounds:
            raise self._wrong(f"{self._most_rounds} rounds at most")
        self._growing = RandomTrees(features.copy(), np.unpackbits(packed, axis=2).view(np.bool_))
        return _given(self._own, self._growing, self._noise)

    def _finish(self, sums: Integers) -> None:
        growing, self._growing = self._growing, None
        expected = (0, 0, 2) if growing is None else (len(growing.features), growing.leaves, 2)
        if sums.shape != expected:
            raise self._wrong(f"sums of shape {expected}")
        if growing is not None:
            self._own.forest.trees.extend(_finished(self._own, growing, sums, self._rules))

    def _wrong(self, expected: str) -> PeerProtocolError:
        return PeerProtocolError(self._leader, f"expected {expected}, got others", at="RandomStep")
