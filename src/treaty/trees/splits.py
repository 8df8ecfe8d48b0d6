"""From sums to splits: the sums a level needs, split candidates, and the choice of the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Flags, Floats, Int32s, Integers
from treaty.machine.shared_work import share
from treaty.trees.constraints import Constraints, Directions, NodeConstraints, limits_of_source, note_directions
from treaty.trees.histograms import width_of
from treaty.trees.outputs import scan_outputs
from treaty.trees.scanning import DIGITS, SLACK, scan_splits, subtract_siblings

# numbers that are subtracted before a second thread starts
_SMALL = 1 << 17
# XGBoost's kRtEps: a split must gain more than this, with labels that are not small
MIN_GAIN = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """The rules for admissible splits, and the scale of gradients; the same at every party.

    One integer step of a grad or hess sum is worth `grad_unit` or `hess_unit`. The next five fields are XGBoost's; a
    split needs a gain (without the factor 1/2) above `min_gain` and at least `min_split_loss`, and `min_child_samples`
    sampled rows in each child. A column of fewer than `onehot_below` categories is split one of them against the rest,
    others by sets: prefixes of the sorted categories, or (`halves`) those above the node's mean or those below, of
    categories with `fewest_of_category` rows in the node. With a `max_delta_step` above 0, leaf weights before the
    learning rate are at most that far from 0, and gains are those of such weights; `leaf_limit` bounds leaf weights
    alone; leaf values are whole multiples of `leaf_unit`, unless it is 0. `hess_floor` is for sums of hess that carry
    noise or are left out (0): it is the least divisor of a gain in place of H + reg_lambda, and every H counts. At 0,
    sums are exact, and a gain's term with H <= 0 is 0. With `max_leaves` above 0, trees grow by best gain to so many
    leaves. `constraints` are on the columns of all sources.
    """

    grad_unit: float
    hess_unit: float
    reg_lambda: float = 1.0
    reg_alpha: float = 0.0
    min_split_loss: float = 0.0
    min_child_weight: float = 1.0
    max_delta_step: float = 0.0
    leaf_limit: float = math.inf
    leaf_unit: float = 0.0
    min_child_samples: int = 1
    max_depth: int = 3
    max_leaves: int = 0
    learning_rate: float = 0.3
    hess_floor: float = 0.0
    min_gain: float = MIN_GAIN
    onehot_below: int = 0
    halves: bool = False
    constraints: Constraints | None = None

    @property
    def full_depth(self) -> int:
        """Levels of a complete tree of the most leaves, for estimates."""
        return min(self.max_depth, (self.max_leaves - 1).bit_length()) if self.max_leaves else self.max_depth

    @property
    def most_asked(self) -> int:
        """Most nodes of a tree whose sums are computed: the root, and one of each two siblings."""
        return self.max_leaves - 1 if self.max_leaves else 1 << self.max_depth - 1

    @property
    def ridge(self) -> int:
        """`reg_lambda` in units of hess."""
        return round(self.reg_lambda / self.hess_unit)

    @property
    def exact(self) -> bool:
        """Whether gains are compared exactly (`trees.scanning`): they are fractions of sums, and children have hess."""
        # not where sums of hess and ridges might leave int64, as units or hess bounds are tiny relative to reg_lambda
        plain = self.reg_alpha == 0.0 and self.max_delta_step == 0.0 and self.hess_floor == 0.0
        # gains of weights within bounds are no fractions of sums either; a tree's root has no bounds
        plain &= self.constraints is None or not self.constraints.monotone or self.max_depth == 1
        return plain and 0 < self.ridge <= 1 << 60 and self.min_child_weight > 0.0

    @property
    def gain_lambda(self) -> float:
        """`reg_lambda` in gains: in whole units of hess where they are compared exactly."""
        return self.ridge * self.hess_unit if self.exact else self.reg_lambda

    @property
    def least_hess(self) -> int:
        """`min_child_weight` in units of hess, rounded up."""
        return math.ceil(self.min_child_weight / self.hess_unit)

    @property
    def fewest_of_category(self) -> int:
        """Half of `min_child_samples`: a category with fewer rows in the node goes with the rest."""
        return (self.min_child_samples + 1) // 2

    @property
    def threshold(self) -> float:
        """The gain that a split has to exceed."""
        least = math.nextafter(self.min_split_loss, 0.0) if self.min_split_loss > 0.0 else 0.0
        return max(self.min_gain, least, 0.0)

    @property
    def threshold_in_units(self) -> float:
        """`threshold` in units of squared grad over hess; whole, where leaf values are."""
        units = self.threshold * self.hess_unit / (self.grad_unit * self.grad_unit)
        return float(round(units)) if self.leaf_unit else units

    def weight(self, totals: Integers, bounds: Floats | None = None) -> Floats:
        """Return -G / (H + reg_lambda) (XGBoost Eq. 5) for node totals (n, 3), 0 where H is too small.

        Constraints leave it within `bounds`, float64 (n, 2).
        """
        grad, hess = totals[:, 0] * self.grad_unit, totals[:, 1] * self.hess_unit
        grad = np.sign(grad) * np.maximum(np.abs(grad) - self.reg_alpha, 0.0)
        usable = (hess > 0.0) & (hess >= self.min_child_weight)
        weight = np.zeros(len(grad))
        np.divide(-grad, hess + self.reg_lambda, out=weight, where=usable)
        weight = np.clip(weight, -self.step, self.step)
        return weight if bounds is None else np.clip(weight, bounds[:, 0], bounds[:, 1])

    def leaf_value(self, totals: Integers, bounds: Floats | None = None) -> Floats:
        """Return the learning rate times the `weight`, within `leaf_limit` of 0, of leaves; in whole `leaf_unit`s."""
        if self.leaf_unit and self.exact:
            return np.asarray(whole_weights(totals, self.whole_rate, self.ridge) * self.leaf_unit)
        value = self.learning_rate * np.clip(self.weight(totals, bounds), -self.leaf_limit, self.leaf_limit)
        return np.rint(value / self.leaf_unit) * self.leaf_unit if self.leaf_unit else value

    @property
    def whole_rate(self) -> int:
        """The learning rate in units of `leaf_unit`, if a sum of grad and one of hess are in the same units."""
        return max(1, round(self.learning_rate * self.grad_unit / self.hess_unit / self.leaf_unit))

    @property
    def step(self) -> float:
        """`max_delta_step`; infinite where there is none."""
        return self.max_delta_step or np.inf

    def gain(self, totals: Integers, left: Integers) -> Floats:
        """Return the gains (XGBoost Eq. 7 without the factor 1/2) of nodes (n, 3) whose left children are `left`."""
        return self.term(left) + self.term(totals - left) - self.term(totals)

    def slack(self, gain: Floats, totals: Integers) -> Floats:
        """Return how far gains (n,) of nodes (n, 3) may be off."""
        return SLACK * (gain + 2.0 * self.term(totals) + self.threshold)

    def term(self, totals: Integers) -> Floats:
        """Return what nodes with these totals (n, 3) add to a gain."""
        grad, hess = np.abs(totals[:, 0] * self.grad_unit), totals[:, 1] * self.hess_unit
        grad = np.maximum(grad - self.reg_alpha, 0.0)
        counts = (hess > 0.0) | (self.hess_floor > 0.0)
        whole = np.maximum(hess + self.gain_lambda, self.hess_floor)
        terms = np.zeros(len(grad))
        np.divide(grad * grad, whole, out=terms, where=counts)
        if self.max_delta_step:
            limited = counts & (grad > self.step * whole)
            terms[limited] = self.step * (2.0 * grad[limited] - self.step * whole[limited])
        return terms


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes whose splits are wanted next: a tree level, or by best gain the children of the leaves divided last."""

    # of the level; by best gain, how often nodes were divided before
    depth: int
    # (n_nodes,) their numbers in the tree
    nodes: Int32s
    # (n_nodes, 3) sum of grad, sum of hess and number of sampled rows of each; of many outputs as in `trees.outputs`
    totals: Integers
    # (n_asked,) nodes whose sums are computed, and their totals: the smaller child of each pair (perhaps not wanted)
    asked: Int32s
    asked_totals: Integers
    # (n_nodes,) position in `asked` of the node itself or of its sibling
    asked_index: Int32s
    # (n_nodes,) -1 where the node itself is asked; else the position of its parent among the kept sums, those of the
    # last level's `nodes`; the parent's minus the sibling's are the node's own
    parent_index: Int32s
    # whether no node below this level will be split
    last: bool = False
    # by best gain, where sums of earlier nodes are kept, too: (n_nodes,) the places of the nodes' own among them
    places: Int32s | None = None
    # (n_nodes,) None without constraints
    limits: NodeConstraints | None = None

    def only(self, kept: Flags, kept_before: Flags) -> Level:
        """Return the level without some nodes; siblings are kept or left out together.

        `kept` is bool (n_nodes,); `kept_before`, for the last level, has the nodes that `parent_index` then counts.
        """
        asked, asked_index = np.unique(self.asked_index[kept], return_inverse=True)
        parent = self.parent_index[kept]
        position = (np.cumsum(kept_before) - 1).astype(np.int32)
        return Level(
            self.depth, self.nodes[kept], self.totals[kept], self.asked[asked], self.asked_totals[asked],
            asked_index.astype(np.int32),
            np.where(parent < 0, np.int32(-1), position[parent]) if len(position) and self.places is None else parent,
            self.last, None if self.places is None else self.places[kept],
            None if self.limits is None else self.limits.take(kept),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Splits:
    """The best admissible split of each node of a level."""

    # (n_nodes,) 0 where there is none
    gain: Floats
    # (n_nodes,) position of the source (a party's columns) that has it
    source: Int32s
    # (n_nodes,) within the source; -1 where there is none
    feature: Int32s
    # (n_nodes, width) bins of the feature going left, its missing bin included (`histograms.width_of`)
    left_bins: Flags
    # (n_nodes, 3)
    left_totals: Integers
    # (n_nodes,) 1 if the left child's weights bound the right one's from below, -1 if from above, 0 without constraint
    direction: Directions

    @classmethod
    def none(cls, n_nodes: int, source: int = 0, width: int = 256, numbers: int = 3) -> Splits:
        """Return `n_nodes` rows without a split; `numbers` as totals have."""
        return cls(
            gain=np.zeros(n_nodes), source=np.full(n_nodes, source, np.int32), feature=np.full(n_nodes, -1, np.int32),
            left_bins=np.zeros((n_nodes, width), np.bool_), left_totals=np.zeros((n_nodes, numbers), np.int64),
            direction=np.zeros(n_nodes, np.int8),
        )  # fmt: skip

    def take(self, index: NDArray[np.intp]) -> Splits:
        return Splits(*(getattr(self, name)[index] for name in Splits.__slots__))

    def spread(self, kept: Flags) -> Splits:
        """Return splits of a whole level, of which only the nodes `kept`, bool (n_nodes,), were scanned."""
        whole = Splits.none(len(kept), width=self.left_bins.shape[1], numbers=self.left_totals.shape[1])
        for name in Splits.__slots__:
            getattr(whole, name)[kept] = getattr(self, name)
        return whole


def complete_sums(
    level: Level, asked: Integers, parents: Integers | None, part: slice | None = None, threads: int = 1
) -> Integers:
    """Return the sums of wanted nodes: an asked node's own, else exactly parent minus sibling.

    `asked` is int64 (n_asked, slots, 3); `parents` are the sums that `kept_sums` kept (None at the root); `part`
    restricts the nodes.
    """
    wanted = slice(None) if part is None else part
    asked_index, parent_index = level.asked_index[wanted], level.parent_index[wanted]
    if parents is None:
        return asked[asked_index] if len(asked_index) != len(asked) else asked
    sums = np.empty((len(asked_index), *asked.shape[1:]), np.int64)
    own, whole, out = (array.reshape(len(array), -1) for array in (asked, parents, sums))
    least = 1 + _SMALL // (sums[0].size + 1)
    share(lambda a, b: subtract_siblings(own, whole, asked_index, parent_index, a, b, out), len(sums), threads, least)
    return sums


def kept_sums(level: Level, kept: Integers | None, sums: Integers) -> Integers:
    """Return the sums that later levels follow from, once those of a level are known; `kept` may be changed."""
    if level.places is None:
        return sums
    least = int(level.places.max()) + 1
    if kept is None or len(kept) < least:
        larger = np.empty((2 * least, *sums.shape[1:]), np.int64)
        larger[: 0 if kept is None else len(kept)] = 0 if kept is None else kept
        kept = larger
    kept[level.places] = sums
    return kept


@lru_cache(maxsize=64)
def _numbers_of(rules: SplitRules) -> tuple[Floats, Floats, int, float]:
    """Return `scan_splits`'s units, limits, ridge (0: gains are compared as floats) and threshold in fixed point."""
    units = np.array([rules.grad_unit, rules.hess_unit])
    limits = np.array([
        rules.gain_lambda, rules.reg_alpha, rules.min_child_weight, rules.min_child_samples, rules.hess_floor,
        rules.step, rules.onehot_below, rules.halves, rules.fewest_of_category,
    ])  # fmt: skip
    return units, limits, rules.ridge if rules.exact else 0, rules.threshold_in_units


def scan(
    sums: Integers, totals: Integers, features: Int32s, offsets: Int32s, categorical: Flags, rules: SplitRules, *,
    limits: NodeConstraints | None = None, source: int = 0, threads: int = 1,
) -> Splits:  # fmt: skip
    """Scan one source's sums (n_nodes, slots, 3) for the best split of each node among `features`, ascending.

    `limits` are the nodes' where rules have constraints; `source` is written into the result.
    """
    n_nodes = len(totals)
    found = Splits.none(n_nodes, source, width_of(offsets), totals.shape[1])
    constrained = limits_of_source(rules, limits, source)
    if totals.shape[1] > 3:
        return scan_outputs(sums, totals, features, offsets, categorical, rules, constrained[2], threads, found)
    units, numbers, ridge, threshold = _numbers_of(rules)
    if ridge > 0:
        least, top, below = bounds(totals, ridge, threshold)
        least *= units[0] * units[0] / units[1]
    else:
        least, top = np.full(n_nodes, rules.threshold), np.zeros((n_nodes, DIGITS), np.uint64)
        below = np.zeros((n_nodes, 4), np.uint64)
    to_pass = ridge, least, top, below
    # read-only arrays, as of a message, are another type to numba
    totals, offsets, categorical = totals.copy(), offsets.copy(), categorical.copy()
    written = found.gain, found.feature, found.left_bins, found.left_totals

    def work(first: int, last: int) -> None:
        scan_splits(
            sums, totals, features, offsets, categorical, units, numbers, to_pass, constrained, first, last, written
        )  # fmt: skip

    share(work, n_nodes, threads, least=max(1, (1 << 13) // max(1, sums.shape[1])))
    if len(constrained[1]):
        note_directions(found, totals, offsets, rules, *constrained[:2])
    return found


def end_to_end(parts: Sequence[Splits]) -> Splits:
    """Return the splits of the nodes of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    parts = _of_one_width(parts)
    return Splits(*(np.concatenate([getattr(part, name) for part in parts]) for name in Splits.__slots__))


def _of_one_width(parts: Sequence[Splits]) -> list[Splits]:
    """Return splits with lists of bins of the same length: those of the widest."""
    short = [max(part.left_bins.shape[1] for part in parts) - part.left_bins.shape[1] for part in parts]
    pairs = zip(parts, short, strict=True)
    return [replace(of, left_bins=np.pad(of.left_bins, ((0, 0), (0, n)))) if n else of for of, n in pairs]


def best_of(candidates: Sequence[Splits], totals: Integers | None = None, rules: SplitRules | None = None) -> Splits:
    """Return for each node the candidate with the highest gain; the earlier source wins a tie.

    With the nodes' totals, (n_nodes, 3), and rules under which gains are exact, so is the comparison, for one output.
    """
    if len(candidates) == 1:
        return candidates[0]
    gains = np.stack([c.gain for c in candidates])
    # the first of equal ones
    winner = np.argmax(gains, axis=0)
    if totals is not None and rules is not None and rules.exact and totals.shape[1] == 3:
        best = gains.max(axis=0)
        # else an owner sent the gain alone
        known = np.stack([c.left_totals[:, 2] > 0 for c in candidates])
        near = known & (gains > 0.0) & (gains >= best - rules.slack(best, totals))
        near &= known[winner, np.arange(len(winner))]
        for node in np.flatnonzero(near.sum(axis=0) > 1):
            of = [
                (k, fraction(totals[node], candidates[k].left_totals[node], rules.ridge))
                for k in np.flatnonzero(near[:, node]).tolist()
            ]
            first, (top, below) = of[0]
            for k, (other_top, other_below) in of[1:]:
                if other_top * below > top * other_below:
                    first, top, below = k, other_top, other_below
            winner[node] = first
    nodes, candidates = np.arange(len(winner)), _of_one_width(candidates)
    return Splits(*(
        np.stack([getattr(c, name) for c in candidates])[winner, nodes] for name in Splits.__slots__
    ))  # fmt: skip


# --------------------- which of two splits of a node gains more, decided in whole numbers where float64 is too coarse
#
# In units of the fixed point, with G and H of a node, ridge = reg_lambda, a = H_L + ridge, T = H + 2 ridge and
# V = T G_L - G a, a split gains (XGBoost Eq. 7 without the factor 1/2)
#
#     V^2 / (T a (T - a)) - G^2 ridge / (T (H + ridge)),
#
# so the best split of a node has the largest fraction V^2 / (a (T - a)), and one is admissible where that passes
#
#     (T (H + ridge) threshold + G^2 ridge) / (H + ridge),    rounded down above the line.
#
# Kernels do the same in digits of 32 bits (`scanning`).

_MOST = (1 << 32 * DIGITS) - 1  # no numerator is as large


WHOLE_LIMIT = 1 << 14  # of leaf values in whole units: those of 2^-12 are from -4 to below 4


def whole_weights(totals: Integers, rate: int, ridge: int) -> Integers:
    """Return leaf values in whole units, int64 (n,): -G rate / (H + ridge), to the nearest number, halves up.

    They are brought within -`WHOLE_LIMIT` and one less than that. The rate is in the same units. Exact, so that a
    protocol on shares computes the same.
    """
    divisor = np.maximum(totals[:, 1] + ridge, 1)
    rounded = ((2 * WHOLE_LIMIT + 1) * divisor - 2 * rate * totals[:, 0]) // (2 * divisor)
    weights: Integers = np.clip(rounded, 0, 2 * WHOLE_LIMIT - 1) - WHOLE_LIMIT
    return weights


def fraction(totals: Integers, left: Integers, ridge: int) -> tuple[int, int]:
    """Return V^2 and a (T - a) of a split, from the sums of grad, hess and rows of its node and its left child."""
    grad, a = int(totals[0]), int(left[1]) + ridge
    whole = int(totals[1]) + 2 * ridge
    return (whole * int(left[0]) - grad * a) ** 2, a * (whole - a)


def bound(totals: Integers, ridge: int, threshold: float) -> tuple[int, int]:
    """Return the fraction that a node's splits have to pass; `threshold` is a gain in units of the fixed point.

    Totals with a negative hess, which a party that cheats can bring about, count as without.
    """
    _, top, below = _bound(int(totals[0]), max(int(totals[1]), 0), ridge, *threshold.as_integer_ratio())
    return top, below


def bounds(totals: Integers, ridge: int, threshold: float) -> tuple[Floats, Any, Any]:
    """Return `bound` of nodes (n, 3): the gains it stands for, numerators and denominators in digits.

    Gains, float64 (n,), are in units of the fixed point. Where units are coarse, rounding down takes more off them than
    float64 could.
    """
    if threshold == 0.0:  # mostly
        tops = [min(grad * grad * ridge, _MOST) for grad in totals[:, 0].tolist()]
        belows = [hess + ridge for hess in np.maximum(totals[:, 1], 0).tolist()]
        return np.zeros(len(totals)), _digits(tops, DIGITS), _digits(belows, 4)
    found = [_bound(grad, max(hess, 0), ridge, *threshold.as_integer_ratio()) for grad, hess, _ in totals.tolist()]
    gains = np.array([gain for gain, _, _ in found])
    return gains, _digits([top for _, top, _ in found], DIGITS), _digits([below for _, _, below in found], 4)


def _bound(grad: int, hess: int, ridge: int, above: int, below: int) -> tuple[float, int, int]:
    """Return a node's least gain, and the fraction, where the threshold is ``above / below``."""
    whole, parent = (hess + 2 * ridge) * (hess + ridge), grad * grad * ridge
    top = min(whole * above // below + parent, _MOST)
    return (top - parent) / whole, top, hess + ridge


def _digits(numbers: Sequence[int], digits: int) -> Any:
    """Return whole numbers in digits, uint64 (n, digits)."""
    raw = b"".join([number.to_bytes(4 * digits, "little") for number in numbers])
    return np.frombuffer(raw, "<u4").astype(np.uint64).reshape(-1, digits)
