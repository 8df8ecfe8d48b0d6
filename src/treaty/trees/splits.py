"""From sums to splits: what a level asks, what a candidate holds, and how the best one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.compute import share
from treaty.trees.kernels import scan_splits


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """What makes a split admissible and how gradients are scaled; the same at every party.

    Parameters
    ----------
    grad_unit, hess_unit : float
        What one integer step of a grad or hess sum is worth (fixed point).
    reg_lambda, reg_alpha, min_split_loss, min_child_weight : float
        As in XGBoost; a split needs a gain (without the factor 1/2) above 1e-6 and at least `min_split_loss`.
    min_child_samples : int
        Fewest rows of the tree's sample in a child.
    max_depth : int
    learning_rate : float
    hess_floor : float
        Where sums of hess carry noise or are left out (0): the least that a gain is divided by, in place of
        H + reg_lambda, and every H counts. 0 where they are exact: a gain's term with H <= 0 is 0 then.
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

    def leaf_weight(self, totals: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return -G / (H + reg_lambda) (XGBoost Eq. 5) for node totals (n, 3), 0 where H is too small."""
        grad = totals[:, 0] * self.grad_unit
        hess = totals[:, 1] * self.hess_unit
        grad = np.sign(grad) * np.maximum(np.abs(grad) - self.reg_alpha, 0.0)
        usable = (hess > 0.0) & (hess >= self.min_child_weight)
        weight = np.zeros(len(grad))
        np.divide(-grad, hess + self.reg_lambda, out=weight, where=usable)
        return weight

    def gain(self, totals: NDArray[np.int64], left: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the gains (XGBoost Eq. 7 without the factor 1/2) of nodes (n, 3) whose left children are `left`."""
        return self._term(left) + self._term(totals - left) - self._term(totals)

    def _term(self, totals: NDArray[np.int64]) -> NDArray[np.float64]:
        grad, hess = np.abs(totals[:, 0] * self.grad_unit), totals[:, 1] * self.hess_unit
        grad = np.maximum(grad - self.reg_alpha, 0.0)
        counts = (hess > 0.0) | (self.hess_floor > 0.0)
        whole = np.maximum(hess + self.reg_lambda, self.hess_floor)
        terms = np.zeros(len(grad))
        np.divide(grad * grad, whole, out=terms, where=counts)
        return terms


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one tree level whose splits are wanted.

    Attributes
    ----------
    depth : int
    nodes : int32 (n_nodes,)
        Their numbers in the tree.
    totals : int64 (n_nodes, 3)
        Sum of grad, sum of hess and number of sampled rows of each.
    asked : int32 (n_asked,)
        Node numbers whose sums are to be computed: the smaller child of each pair (itself perhaps not wanted).
    asked_totals : int64 (n_asked, 3)
    asked_index : int32 (n_nodes,)
        Position in `asked` of the node itself or of its sibling.
    parent_index : int32 (n_nodes,)
        -1 where the node itself is asked; else the position of its parent among the last level's `nodes`, whose sums
        minus the sibling's are the node's own.
    """

    depth: int
    nodes: NDArray[np.int32]
    totals: NDArray[np.int64]
    asked: NDArray[np.int32]
    asked_totals: NDArray[np.int64]
    asked_index: NDArray[np.int32]
    parent_index: NDArray[np.int32]

    def only(self, kept: NDArray[np.bool_], kept_before: NDArray[np.bool_]) -> Level:
        """Return the level without some nodes; siblings are kept or left out together.

        Parameters
        ----------
        kept : bool (n_nodes,)
        kept_before : bool
            The same of the last level, whose kept nodes `parent_index` then counts.
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
    """The best admissible split of each node of a level.

    Attributes
    ----------
    gain : float64 (n_nodes,)
        0 where there is none.
    source : int32 (n_nodes,)
        Position of the source (a party's columns) that has it.
    feature : int32 (n_nodes,)
        Feature within the source; -1 where there is none.
    left_bins : bool (n_nodes, 256)
        Bins of the feature going left, its missing bin included.
    left_totals : int64 (n_nodes, 3)
    """

    gain: NDArray[np.float64]
    source: NDArray[np.int32]
    feature: NDArray[np.int32]
    left_bins: NDArray[np.bool_]
    left_totals: NDArray[np.int64]

    @classmethod
    def none(cls, n_nodes: int, source: int = 0) -> Splits:
        """Return `n_nodes` times no split."""
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

    def spread(self, kept: NDArray[np.bool_]) -> Splits:
        """Return splits of the nodes of a level of which `kept` (n_nodes,) were looked at; the others have none."""
        whole = Splits.none(len(kept))
        for name in Splits.__slots__:
            getattr(whole, name)[kept] = getattr(self, name)
        return whole


def complete_sums(
    level: Level, asked: NDArray[np.int64], parents: NDArray[np.int64] | None, part: slice | None = None
) -> NDArray[np.int64]:
    """Return the sums of wanted nodes from those of the asked ones: siblings are parent minus sibling, exactly.

    Parameters
    ----------
    asked : int64 (n_asked, slots, 3)
    parents : int64 (nodes of the last level, slots, 3) or None
        What this function returned for all of the last level; None at the root.
    part : slice or None
        Of the level's nodes, those whose sums are wanted now; None for all.
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
    sums: NDArray[np.int64],
    totals: NDArray[np.int64],
    features: NDArray[np.int32],
    offsets: NDArray[np.int32],
    categorical: NDArray[np.bool_],
    rules: SplitRules,
    *,
    source: int = 0,
    threads: int = 1,
) -> Splits:
    """Scan the sums of one source for the best split of each node.

    Parameters
    ----------
    sums : int64 (n_nodes, slots, 3)
    totals : int64 (n_nodes, 3)
    features : int32
        The features in the tree's column sample, ascending.
    offsets : int32 (n_features + 1,)
        First slot of each feature; its last slot is missing values.
    categorical : bool (n_features,)
    source : int
        Written into the result.

    Returns
    -------
    Splits
    """
    n_nodes = len(totals)
    found = Splits.none(n_nodes, source)
    units = np.array([rules.grad_unit, rules.hess_unit])
    limits = np.array([
        rules.reg_lambda, rules.reg_alpha, rules.min_split_loss, rules.min_child_weight, rules.min_child_samples,
        rules.hess_floor,
    ])  # fmt: skip

    def work(first: int, last: int) -> None:
        scan_splits(
            sums, totals, features, offsets, categorical, units, limits, first, last,
            found.gain, found.feature, found.left_bins, found.left_totals,
        )  # fmt: skip

    share(work, n_nodes, threads, least=max(1, (1 << 15) // max(1, sums.shape[1])))
    return found


def settle(
    found: Splits, sums: NDArray[np.int64], totals: NDArray[np.int64], offsets: NDArray[np.int32], rules: SplitRules
) -> None:
    """Give splits that were found on estimated sums the true totals of their left children, in place.

    A split with a child whose true hess is below `min_child_weight` is none.

    Parameters
    ----------
    found : Splits
    sums : int64 (n_nodes, slots, 3)
        The true ones.
    totals : int64 (n_nodes, 3)
    offsets : int32 (n_features + 1,)
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
