"""The rules of growth (docs/growth.md) word for word, slowly: the best split of one node, and one whole tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.trees.splits import SplitRules

Slot = tuple[int, int, int]  # sum of grad, sum of hess, number of rows


@dataclass(frozen=True)
class Choice:
    """A split: the feature and which of its bins go left (the last bin is missing)."""

    gain: float
    feature: int
    left: frozenset[int]
    left_totals: Slot


def add(slots: Sequence[Slot]) -> Slot:
    return tuple(sum(slot[part] for slot in slots) for part in range(3))


def node_slots(codes: NDArray, n_bins: NDArray, grad: NDArray, hess: NDArray, rows: Sequence[int]) -> list[list[Slot]]:
    """Sums of `rows` for every bin of every feature, the missing bin last."""
    slots = [[(0, 0, 0)] * (int(bins) + 1) for bins in n_bins]
    for row in rows:
        for feature, of_feature in enumerate(slots):
            bin_ = int(codes[row, feature])
            of_feature[bin_] = add([of_feature[bin_], (int(grad[row]), int(hess[row]), 1)])
    return slots


def score(slot: Slot, rules: SplitRules) -> float:
    """G²/(H+λ), λ in steps of hess where exact, G shrunk by α, or what a limited weight gains; 0 where H ≤ 0."""
    grad, hess = slot[0] * rules.grad_unit, slot[1] * rules.hess_unit
    if hess <= 0.0:
        return 0.0
    shrunk = max(abs(grad) - rules.reg_alpha, 0.0)
    limit = rules.max_delta_step or np.inf
    if shrunk > limit * (hess + rules.gain_lambda):
        return limit * (2.0 * shrunk - limit * (hess + rules.gain_lambda))
    return shrunk * shrunk / (hess + rules.gain_lambda)


def gain_of(total: Slot, left: Slot, rules: SplitRules) -> float:
    right = tuple(t - s for t, s in zip(total, left, strict=True))
    return score(left, rules) + score(right, rules) - score(total, rules)


def admissible(total: Slot, left: Slot, rules: SplitRules) -> bool:
    right = tuple(t - s for t, s in zip(total, left, strict=True))
    gain = gain_of(total, left, rules)
    return (
        gain > 1e-6
        and gain >= rules.min_split_loss
        and min(left[1], right[1]) * rules.hess_unit >= rules.min_child_weight
        and min(left[2], right[2]) >= rules.min_child_samples
    )


def left_sets(slots: Sequence[Slot], categorical: bool, rules: SplitRules) -> Iterator[list[int]]:
    """Yield the candidates of a feature, the preferred among equal ones first."""
    missing = len(slots) - 1
    order = list(range(missing))
    if categorical:

        def ratio(bin_: int) -> float:
            hess = slots[bin_][1] * rules.hess_unit
            weight = hess + rules.gain_lambda
            counts = hess >= rules.min_child_weight and weight > 0.0
            return slots[bin_][0] * rules.grad_unit / weight if counts else 0.0

        order = sorted((b for b in order if slots[b][2] > 0), key=lambda b: (ratio(b), b))
    prefixes = [order[: k + 1] for k in range(len(order))]  # the last: all present left, missing right
    yield from prefixes
    if slots[missing][2] > 0:
        for prefix in reversed(prefixes):
            yield [*prefix, missing]


def best_split(
    slots: Sequence[Sequence[Slot]],
    total: Slot,
    features: Sequence[int],
    categorical: Sequence[bool],
    rules: SplitRules,
) -> Choice | None:
    best: Choice | None = None
    for feature in features:
        for left in left_sets(slots[feature], bool(categorical[feature]), rules):
            left_totals = add([slots[feature][b] for b in left])
            gain = gain_of(total, left_totals, rules)
            if admissible(total, left_totals, rules) and (best is None or gain > best.gain):
                best = Choice(gain, int(feature), frozenset(left), left_totals)
    return best


@dataclass(frozen=True)
class SlowNode:
    """A node of a slowly grown tree; `split` is None in a leaf."""

    rows: tuple[int, ...]
    total: Slot
    split: Choice | None
    value: float


def slow_tree(
    codes: NDArray,
    n_bins: NDArray,
    categorical: Sequence[bool],
    grad: NDArray,
    hess: NDArray,
    rules: SplitRules,
    rows: Sequence[int],
    columns: Sequence[int],
) -> list[SlowNode]:
    """Grow one tree breadth first, adding up every node from its rows; children are numbered as `Tree` does."""
    nodes: list[SlowNode] = []
    waiting: list[tuple[tuple[int, ...], int]] = [(tuple(rows), 0)]
    while waiting:
        members, depth = waiting.pop(0)
        slots = node_slots(codes, n_bins, grad, hess, members)
        total = (int(grad[list(members)].sum()), int(hess[list(members)].sum()), len(members))
        split = best_split(slots, total, columns, categorical, rules) if depth < rules.max_depth else None
        value = 0.0
        if split is None:
            h = total[1] * rules.hess_unit
            g = total[0] * rules.grad_unit
            g = float(np.sign(g)) * max(abs(g) - rules.reg_alpha, 0.0)
            usable = h > 0.0 and h >= rules.min_child_weight
            limit = rules.max_delta_step or np.inf
            value = rules.learning_rate * min(max(-g / (h + rules.reg_lambda), -limit), limit) if usable else 0.0
        else:
            for side in (True, False):
                child = tuple(row for row in members if (codes[row, split.feature] in split.left) == side)
                waiting.append((child, depth + 1))
        nodes.append(SlowNode(members, total, split, value))
    return nodes
