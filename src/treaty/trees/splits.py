"""From sums to splits: the sums a level needs, what a split candidate holds, and how the best one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.compute import Flags, Floats, Int32s, Integers, share
from treaty.trees.kernels import scan_splits


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """What makes a split admissible and how gradients are scaled; the same at every party.

    One integer step of a grad or hess sum is worth `grad_unit` or `hess_unit`. The next four fields are XGBoost's; a
    split needs a gain (without the factor 1/2) above 1e-6 and at least `min_split_loss`, and `min_child_samples`
    sampled rows in each child. `hess_floor` is for sums of hess that carry noise or are left out (0): it is the least
    divisor of a gain in place of H + reg_lambda, and every H counts. At 0, sums are exact, and a gain's term with H <=
    0 is 0.
    """

    grad_unit: float
    hess_unit: float
    reg_lambda: float = 1.0
    reg_alpha: float = 0.0
    min_split_loss: float = 0.0
    min_child_weight: float = 1.0
    min_child_samples: int = 1
    max_depth: int = 3
    learning_rate: float = 0.3
    hess_floor: float = 0.0

    def leaf_weight(self, totals: Integers) -> Floats:
        """Return -G / (H + reg_lambda) (XGBoost Eq. 5) for node totals (n, 3), 0 where H is too small."""
        grad = totals[:, 0] * self.grad_unit
        hess = totals[:, 1] * self.hess_unit
        grad = np.sign(grad) * np.maximum(np.abs(grad) - self.reg_alpha, 0.0)
        usable = (hess > 0.0) & (hess >= self.min_child_weight)
        weight = np.zeros(len(grad))
        np.divide(-grad, hess + self.reg_lambda, out=weight, where=usable)
        return weight

    def gain(self, totals: Integers, left: Integers) -> Floats:
        """Return the gains (XGBoost Eq. 7 without the factor 1/2) of nodes (n, 3) whose left children are `left`."""
        return self._term(left) + self._term(totals - left) - self._term(totals)

    def _term(self, totals: Integers) -> Floats:
        grad, hess = np.abs(totals[:, 0] * self.grad_unit), totals[:, 1] * self.hess_unit
        grad = np.maximum(grad - self.reg_alpha, 0.0)
        counts = (hess > 0.0) | (self.hess_floor > 0.0)
        whole = np.maximum(hess + self.reg_lambda, self.hess_floor)
        terms = np.zeros(len(grad))
        np.divide(grad * grad, whole, out=terms, where=counts)
        return terms


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one tree level whose splits are wanted."""

    depth: int
    nodes: Int32s  # (n_nodes,) their numbers in the tree
    totals: Integers  # (n_nodes, 3) sum of grad, sum of hess and number of sampled rows of each
    # (n_asked,) nodes whose sums are computed: the smaller child of each pair (itself perhaps not wanted)
    asked: Int32s
    asked_totals: Integers  # (n_asked, 3)
    asked_index: Int32s  # (n_nodes,) position in `asked` of the node itself or of its sibling
    # (n_nodes,) -1 where the node itself is asked; else the position of its parent among the last level's `nodes`,
    # whose sums minus the sibling's are the node's own
    parent_index: Int32s

    def only(self, kept: Flags, kept_before: Flags) -> Level:
        """Return the level without some nodes; siblings are kept or left out together.

        `kept` is bool (n_nodes,); `kept_before` the same of the last level, whose kept nodes `parent_index` then
        counts.
        """
        asked, asked_index = np.unique(self.asked_index[kept], return_inverse=True)
        parent = self.parent_index[kept]
        position = (np.cumsum(kept_before) - 1).astype(np.int32)
        return Level(
            self.depth,
            self.nodes[kept],
            self.totals[kept],
            self.asked[asked],
            self.asked_totals[asked],
            asked_index.astype(np.int32),
            np.where(parent < 0, np.int32(-1), position[parent]) if len(position) else parent,
        )


@dataclass(frozen=True, slots=True)
class Splits:
    """The best admissible split of each node of a level."""

    gain: Floats  # (n_nodes,) 0 where there is none
    source: Int32s  # (n_nodes,) position of the source (a party's columns) that has it
    feature: Int32s  # (n_nodes,) within the source; -1 where there is none
    left_bins: Flags  # (n_nodes, 256) bins of the feature going left, its missing bin included
    left_totals: Integers  # (n_nodes, 3)

    @classmethod
    def none(cls, n_nodes: int, source: int = 0) -> Splits:
        """Return `n_nodes` rows without a split."""
        return cls(
            gain=np.zeros(n_nodes),
            source=np.full(n_nodes, source, np.int32),
            feature=np.full(n_nodes, -1, np.int32),
            left_bins=np.zeros((n_nodes, 256), np.bool_),
            left_totals=np.zeros((n_nodes, 3), np.int64),
        )

    def take(self, index: NDArray[np.intp]) -> Splits:
        """Return the splits at `index`."""
        return Splits(*(getattr(self, name)[index] for name in Splits.__slots__))

    def spread(self, kept: Flags) -> Splits:
        """Return splits of a whole level, of which only the nodes `kept`, bool (n_nodes,), were scanned."""
        whole = Splits.none(len(kept))
        for name in Splits.__slots__:
            getattr(whole, name)[kept] = getattr(self, name)
        return whole


def complete_sums(level: Level, asked: Integers, parents: Integers | None, part: slice | None = None) -> Integers:
    """Return the sums of wanted nodes: an asked node's own, else exactly parent minus sibling.

    `asked` is int64 (n_asked, slots, 3); `parents` is what this function returned for all of the last level (None at
    the root); `part` restricts the nodes.
    """
    wanted = slice(None) if part is None else part
    asked_index, parent_index = level.asked_index[wanted], level.parent_index[wanted]
    if not np.any(parent_index >= 0):
        return asked[asked_index] if len(asked_index) != len(asked) else asked
    assert parents is not None
    sums = np.empty((len(asked_index), *asked.shape[1:]), np.int64)
    for node, (index, parent) in enumerate(zip(asked_index, parent_index, strict=True)):
        if parent < 0:
            sums[node] = asked[index]
        else:
            np.subtract(parents[parent], asked[index], out=sums[node])
    return sums


def scan(
    sums: Integers,
    totals: Integers,
    features: Int32s,
    offsets: Int32s,
    categorical: Flags,
    rules: SplitRules,
    *,
    source: int = 0,
    threads: int = 1,
) -> Splits:
    """Scan one source's sums (n_nodes, slots, 3) for the best split of each node among `features`, ascending.

    `source` is written into the result.
    """
    n_nodes = len(totals)
    found = Splits.none(n_nodes, source)
    units = np.array([rules.grad_unit, rules.hess_unit])
    limits = np.array([
        rules.reg_lambda, rules.reg_alpha, rules.min_split_loss, rules.min_child_weight, rules.min_child_samples,
        rules.hess_floor,
    ])  # fmt: skip

    written = found.gain, found.feature, found.left_bins, found.left_totals

    def work(first: int, last: int) -> None:
        scan_splits(sums, totals, features, offsets, categorical, units, limits, first, last, written)

    share(work, n_nodes, threads, least=max(1, (1 << 15) // max(1, sums.shape[1])))
    return found


def settle(found: Splits, sums: Integers, totals: Integers, offsets: Int32s, rules: SplitRules) -> None:
    """Give splits found on estimated sums the true totals of their left children, in place.

    A split with a child whose true hess is below `min_child_weight` is dropped. `sums` and `totals` are the true ones.
    """
    for node in np.flatnonzero(found.feature >= 0):
        feature = found.feature[node]
        first, stop = offsets[feature], offsets[feature + 1]
        left = sums[node, first:stop][found.left_bins[node, : stop - first]].sum(axis=0)
        found.left_totals[node] = left
        if min(left[1], totals[node, 1] - left[1]) * rules.hess_unit < rules.min_child_weight:
            found.gain[node], found.feature[node] = 0.0, -1


def end_to_end(parts: Sequence[Splits]) -> Splits:
    """Return the splits of the nodes of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    return Splits(*(np.concatenate([getattr(part, name) for part in parts]) for name in Splits.__slots__))


def best_of(candidates: Sequence[Splits]) -> Splits:
    """Return for each node the candidate with the highest gain; the earlier source wins a tie."""
    if len(candidates) == 1:
        return candidates[0]
    winner = np.argmax(np.stack([c.gain for c in candidates]), axis=0)  # the first of equal ones
    nodes = np.arange(len(winner))
    return Splits(*(
        np.stack([getattr(c, name) for c in candidates])[winner, nodes] for name in Splits.__slots__
    ))  # fmt: skip
