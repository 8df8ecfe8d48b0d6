"""Multi-output trees: one structure for all classes, a leaf weight for each (SecureBoost+, arXiv 2110.10927).

A split's gain is the sum of its gains for all outputs (XGBoost's ``multi_strategy="multi_output_tree"``). While such a
tree grows, totals and bin sums have two numbers for each of K outputs and a count: grad and hess of the first output,
of the second, and so on, the number of rows last, 2 K + 1 in all. A finished tree is kept as K trees of the same
splits, so that whatever reads a model reads this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treaty.machine.arrays import Flags, Floats, Int32s, Integers
from treaty.machine.kernels import inner, kernel, new_array
from treaty.machine.shared_work import share
from treaty.trees.ensemble import Tree

if TYPE_CHECKING:
    from treaty.trees.splits import SplitRules, Splits

# how the bins of a column are parted: numbers at a cut, one category against the rest, halves of the categories
_CUTS, _SINGLE, _HALVES = range(3)


def of_output(sums: Integers, output: int) -> Integers:
    """Return one output's sums of grad and hess, and the count, (..., 3), of those of all outputs (..., 2 K + 1)."""
    return sums[..., [2 * output, 2 * output + 1, -1]]


def join_outputs(found: Sequence[Integers]) -> Integers:
    """Return sums of all outputs, (..., 2 K + 1), from those of each, (..., 3)."""
    return found[0] if len(found) == 1 else np.concatenate([*(of[..., :2] for of in found), found[0][..., 2:]], axis=-1)


def leaf_values(rules: SplitRules, totals: Integers, is_leaf: Flags, bounds: Floats | None) -> Floats:
    """Return leaf weights times the learning rate, 0 in inner nodes: (n_nodes,), of K > 1 outputs (n_nodes, K)."""
    outputs = [of_output(totals, output) for output in range(totals.shape[1] // 2)]
    values = np.stack([rules.leaf_value(of, bounds) for of in outputs], axis=1)
    value: Floats = np.where(is_leaf[:, None], values, 0.0)
    return value if len(outputs) > 1 else value[:, 0].copy()


def trees_of_outputs(tree: Tree) -> list[Tree]:
    """Return a tree for each output of one whose `value` is (n_nodes, K), which share its gains; else the tree."""
    if tree.value.ndim == 1:
        return [tree]
    gain = tree.gain / tree.value.shape[1]
    return [replace(tree, value=np.ascontiguousarray(value), gain=gain) for value in tree.value.T]


def scan_outputs(
    sums: Integers, totals: Integers, features: Int32s, offsets: Int32s, categorical: Flags, rules: SplitRules,
    allowed: Flags, threads: int, found: Splits,
) -> Splits:  # fmt: skip
    """Return `found` with the best split of each node by its gain for all outputs; arguments as in `splits.scan`.

    `sums` is int64 (n_nodes, slots, 2 K + 1). `allowed`, bool (n_nodes, n_features), has the columns that nodes may
    use, and is (0, 0) where they may use all. Gains are compared as float64: as sums are exact and are added in the
    order of outputs, they are the same wherever they are computed. Categories from `onehot_below` on are parted into
    those above the node's mean of one output and the others, for each output in turn.
    """
    limits = np.array([
        rules.grad_unit, rules.hess_unit, rules.reg_lambda, rules.reg_alpha, rules.min_child_weight, rules.step,
        rules.min_child_samples, rules.onehot_below, rules.fewest_of_category, rules.threshold,
    ])  # fmt: skip
    totals, offsets, categorical = totals.copy(), offsets.copy(), categorical.copy()
    written = found.gain, found.feature, found.left_bins, found.left_totals
    columns = features, offsets, categorical, allowed

    def work(first: int, last: int) -> None:
        scan_nodes(sums, totals, columns, limits, first, last, written)

    share(work, len(totals), threads, least=max(1, (1 << 11) // max(1, sums.shape[1])))
    return found


@inner
def _term(grad: float, hess: float, limits: Any) -> float:
    """Return what an output of a node adds to gains: 0 where its hess is too small for a weight."""
    reg_lambda, reg_alpha, min_child_weight, step = limits[2], limits[3], limits[4], limits[5]
    if hess <= 0.0 or hess < min_child_weight:
        return 0.0
    grad, whole = max(abs(grad) - reg_alpha, 0.0), hess + reg_lambda
    limited: float = step * (2.0 * grad - step * whole) if grad > step * whole else grad * grad / whole
    return limited


@inner
def _gain(left: Any, total: Any, parent: float, limits: Any) -> float:
    """Return the gain of a split for all outputs (XGBoost Eq. 7 without the factor 1/2), -inf if inadmissible.

    `parent` is the sum of the node's own terms.
    """
    last, grad_unit, hess_unit = total.shape[0] - 1, limits[0], limits[1]
    fewest = np.int64(limits[6])
    if left[last] < fewest or total[last] - left[last] < fewest:
        return -np.inf
    gain = 0.0
    for k in range(0, last, 2):
        # each output's two terms first, whose sum has no order: a split gains the same with its sides exchanged
        of_left = _term(left[k] * grad_unit, left[k + 1] * hess_unit, limits)
        gain += of_left + _term((total[k] - left[k]) * grad_unit, (total[k + 1] - left[k + 1]) * hess_unit, limits)
    return gain - parent


@inner
def _half_of(slot: Any, total: Any, at: int, limits: Any) -> int:
    """Return where a category belongs by the output whose grad is `at`, as in `scanning`: 1 above the mean, 2, or 0."""
    if slot[slot.shape[0] - 1] < limits[8]:
        return 0
    whole = total[at + 1] + 2.0 * limits[2] / limits[1]
    return 1 if whole * slot[at] > float(total[at]) * slot[at + 1] else 2


@inner
def _goes_left(slots: Any, code: int, kind: int, candidate: int, total: Any, limits: Any) -> bool:
    """Tell whether a bin goes left at a candidate; of halves, two in turn are of one output."""
    if kind == _HALVES:
        return _half_of(slots[code], total, 2 * (candidate // 2), limits) == 1 + candidate % 2
    return code <= candidate if kind == _CUTS else code == candidate


@inner
def _write_candidates(slots: Any, kind: int, total: Any, limits: Any, prefix: Any) -> int:
    """Write what goes left at each candidate with missing values going right; return how many there are."""
    numbers, bins = total.shape[0], slots.shape[0] - 1
    used: int = numbers - 1 if kind == _HALVES else bins
    for candidate in range(used):
        for part in range(numbers):
            prefix[candidate, part] = prefix[candidate - 1, part] if kind == _CUTS and candidate > 0 else np.int64(0)
        # missing values are one of the categories that are halved
        first, last = (0, bins + 1) if kind == _HALVES else (candidate, candidate + 1)
        for code in range(first, last):
            if _goes_left(slots, code, kind, candidate, total, limits):
                for part in range(numbers):
                    prefix[candidate, part] += slots[code, part]
    return used


@kernel
def scan_nodes(
    sums: Any, totals: Any, columns: tuple[Any, Any, Any, Any], limits: Any, first: int, last: int,
    found: tuple[Any, Any, Any, Any],
) -> None:  # fmt: skip
    """Find the best split of nodes ``first..last``, as `scan_outputs` has them; ties are broken as in `scanning`."""
    features, offsets, categorical, allowed = columns
    numbers = totals.shape[1]
    prefix = new_array((found[2].shape[1] + numbers, numbers), np.int64)
    for node in range(first, last):
        total, best, best_feature, best_kind, best_candidate, best_side = totals[node], limits[9], -1, 0, 0, 0
        parent = 0.0
        for k in range(0, numbers - 1, 2):
            parent += _term(total[k] * limits[0], total[k + 1] * limits[1], limits)
        for position in range(features.shape[0]):
            feature = features[position]
            if allowed.shape[0] > 0 and not allowed[node, feature]:
                continue
            slots = sums[node, offsets[feature] : offsets[feature + 1]]
            bins = slots.shape[0] - 1
            kind = _CUTS
            if categorical[feature]:
                kind = _SINGLE if bins < limits[7] else _HALVES
            used = _write_candidates(slots, kind, total, limits, prefix)
            # 0: missing values go right; 1: they go left
            for side in range(2):
                if side == 1 and (kind == _HALVES or slots[bins, numbers - 1] == 0):
                    break
                for place in range(used):
                    candidate = place if side == 0 else used - 1 - place
                    if side == 1:
                        for part in range(numbers):
                            prefix[candidate, part] += slots[bins, part]
                    gain = _gain(prefix[candidate], total, parent, limits)
                    if gain > best:
                        best, best_feature, best_kind = gain, feature, kind
                        best_candidate, best_side = candidate, side
        found[0][node], found[1][node] = best if best_feature >= 0 else 0.0, best_feature
        left_bins, left_sums = found[2][node], found[3][node]
        left_bins[:], left_sums[:] = False, 0
        if best_feature >= 0:
            slots = sums[node, offsets[best_feature] : offsets[best_feature + 1]]
            for code in range(slots.shape[0]):
                missing = code == slots.shape[0] - 1 and best_kind != _HALVES
                left_bins[code] = (
                    best_side == 1 if missing else _goes_left(slots, code, best_kind, best_candidate, total, limits)
                )
                if left_bins[code]:
                    for part in range(numbers):
                        left_sums[part] += slots[code, part]
