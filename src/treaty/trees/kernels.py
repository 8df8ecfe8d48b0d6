"""The loops over rows and bins: histograms, row partition, split scan.

A histogram slot holds three int64: sum of grad, sum of hess, number of rows. Slots lie one feature after another
(`offsets`), each feature's last slot being its missing values. Integer sums do not depend on the order of additions,
so neither the number of threads nor the party that computes them can change a tree.

Indices are unsigned: numba then leaves out the test for negative ones, which halves the time of the histogram loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treaty.compute import kernel

MIN_GAIN = 1e-6  # XGBoost's kRtEps: a split must gain more than this


@kernel
def gather_pairs(grad: Any, hess: Any, rows: Any, first: int, last: int, pairs: Any) -> None:
    """Copy grad and hess of ``rows[first:last]`` side by side into ``pairs[first:last]``."""
    for i in range(np.uint64(first), np.uint64(last)):
        row = np.uint64(rows[i])
        pairs[i, 0] = grad[row]
        pairs[i, 1] = hess[row]


@kernel
def add_histograms(
    columns: Any, pairs: Any, rows: Any, starts: Any, features: Any, offsets: Any, first: int, last: int, sums: Any
) -> None:
    """Add rows to the histograms `sums`, int64 (n_nodes, slots, 3), for ``features[first:last]``.

    `columns` is uint8 (n_features, n_rows); node k holds ``rows[starts[k]:starts[k + 1]]``, whose grad and hess are in
    the same lines of `pairs`, int64 (m, 2).
    """
    position = np.uint64(first)
    stop = np.uint64(last)
    one = np.uint64(1)
    while position < stop:
        feature = np.uint64(features[position])
        column = columns[feature]
        offset = np.uint64(offsets[feature])
        if position + one < stop:  # two features at a time share the loads of row number and gradient
            feature2 = np.uint64(features[position + one])
            column2 = columns[feature2]
            offset2 = np.uint64(offsets[feature2])
            for node in range(starts.shape[0] - 1):
                slots = sums[node]
                for i in range(np.uint64(starts[node]), np.uint64(starts[node + 1])):
                    row = np.uint64(rows[i])
                    slot = offset + np.uint64(column[row])
                    slot2 = offset2 + np.uint64(column2[row])
                    grad = pairs[i, 0]
                    hess = pairs[i, 1]
                    slots[slot, 0] += grad
                    slots[slot, 1] += hess
                    slots[slot, 2] += 1
                    slots[slot2, 0] += grad
                    slots[slot2, 1] += hess
                    slots[slot2, 2] += 1
            position += one + one
        else:
            for node in range(starts.shape[0] - 1):
                slots = sums[node]
                for i in range(np.uint64(starts[node]), np.uint64(starts[node + 1])):
                    slot = offset + np.uint64(column[np.uint64(rows[i])])
                    slots[slot, 0] += pairs[i, 0]
                    slots[slot, 1] += pairs[i, 1]
                    slots[slot, 2] += 1
            position += one


@kernel
def look_up_left(
    columns: Any, rows: Any, starts: Any, features: Any, left_bins: Any, first: int, last: int, left: Any
) -> None:
    """Write into ``left[first:last]`` whether each row of each node goes left.

    Node k holds ``rows[starts[k]:starts[k + 1]]`` and splits on ``features[k]``; ``left_bins[k]`` is bool (256,).
    """
    node = 0
    while starts[node + 1] <= first and node + 2 < starts.shape[0]:
        node += 1
    i = np.uint64(first)
    while i < np.uint64(last):
        column = columns[np.uint64(features[node])]
        table = left_bins[node]
        stop = min(np.uint64(last), np.uint64(starts[node + 1]))
        while i < stop:
            left[i] = table[np.uint64(column[np.uint64(rows[i])])]
            i += np.uint64(1)
        node += 1


@kernel
def count_left(left: Any, block_starts: Any, block_stops: Any, first: int, last: int, counts: Any) -> None:
    """Count the true values of `left` in each block ``first..last``."""
    for block in range(first, last):
        total = np.int64(0)
        for i in range(np.uint64(block_starts[block]), np.uint64(block_stops[block])):
            total += np.int64(left[i])
        counts[block] = total


@kernel
def scatter_rows(
    rows: Any, left: Any, sources: Any, masks: Any, sizes: Any, lefts: Any, rights: Any, first: int, last: int, out: Any
) -> None:
    """Move blocks of rows to their children, keeping their order.

    Block b reads ``rows[sources[b]:][:sizes[b]]`` and ``left[masks[b]:][:sizes[b]]`` and writes the left ones from
    ``out[lefts[b]]``, the right ones from ``out[rights[b]]`` on.
    """
    for block in range(first, last):
        source = np.uint64(sources[block])
        mask = np.uint64(masks[block])
        to_left = np.uint64(lefts[block])
        to_right = np.uint64(rights[block])
        for i in range(np.uint64(sizes[block])):
            row = rows[source + i]
            goes = np.uint64(left[mask + i])
            out[to_left if goes else to_right] = row
            to_left += goes
            to_right += np.uint64(1) - goes


@kernel
def add_leaf_values(rows: Any, starts: Any, stops: Any, values: Any, first: int, last: int, margins: Any) -> None:
    """Add ``values[k]`` to the margins of ``rows[starts[k]:stops[k]]`` for leaves ``first..last``."""
    for leaf in range(first, last):
        value = values[leaf]
        for i in range(np.uint64(starts[leaf]), np.uint64(stops[leaf])):
            margins[np.uint64(rows[i])] += value


@kernel
def _term(grad: float, hess: float, reg_lambda: float, reg_alpha: float, floor: float) -> float:
    if hess <= 0.0 and floor == 0.0:
        return 0.0
    if reg_alpha > 0.0:
        grad = max(abs(grad) - reg_alpha, 0.0)
    return grad * grad / max(hess + reg_lambda, floor)


@kernel
def scan_splits(
    sums: Any, totals: Any, features: Any, offsets: Any, categorical: Any, units: Any, limits: Any,
    first: int, last: int, found: tuple[Any, Any, Any, Any],
) -> None:  # fmt: skip
    """Find the best split of nodes ``first..last`` among `features` (XGBoost Eq. 7 without the factor 1/2).

    `sums` is int64 (n_nodes, slots, 3), `totals` (n_nodes, 3); `units` are what one step of grad and of hess is worth;
    `limits` are reg_lambda, reg_alpha, min_split_loss, min_child_weight, min_child_samples, hess_floor (`SplitRules`).
    Written to `found` are gains (0: no admissible split), features (-1: none), bins that go left, bool (n_nodes, 256)
    with the missing bin, and the left children's sums (n_nodes, 3).

    Ties: lower feature, then missing right before missing left, then the lowest cut among the former and the highest
    among the latter. A category set is a prefix of the categories sorted by G / (H + reg_lambda), ties by bin
    (Fisher 1958); bins without a row in the node go right.
    """
    gains, best_features, left_bins, left_sums = found
    grad_unit, hess_unit = units[0], units[1]
    reg_lambda, reg_alpha, min_split_loss, min_child_weight = limits[0], limits[1], limits[2], limits[3]
    min_child_samples, floor = np.int64(limits[4]), limits[5]
    least = 0.0 if floor == 0.0 else -np.inf  # a hess above it counts
    order = np.empty(256, np.int64)
    ratio = np.empty(256, np.float64)
    prefix = np.empty((256, 3), np.int64)
    candidate = np.empty(256, np.float64)
    for node in range(first, last):
        total_grad, total_hess, total_count = totals[node, 0], totals[node, 1], totals[node, 2]
        parent = _term(total_grad * grad_unit, total_hess * hess_unit, reg_lambda, reg_alpha, floor)
        best_gain = 0.0
        best_feature = -1
        best_size = 0  # how many sorted bins go left
        best_missing_left = False
        for position in range(features.shape[0]):
            feature = features[position]
            offset = offsets[feature]
            bins = offsets[feature + 1] - offset - 1
            slots = sums[node, offset : offset + bins + 1]
            used = bins
            if categorical[feature]:
                used = _sort_categories(slots, bins, grad_unit, hess_unit, reg_lambda, floor, ratio, order)
            grad, hess, count = np.int64(0), np.int64(0), np.int64(0)
            for k in range(used):
                slot = slots[order[k]] if categorical[feature] else slots[k]
                grad += slot[0]
                hess += slot[1]
                count += slot[2]
                prefix[k, 0], prefix[k, 1], prefix[k, 2] = grad, hess, count
            missing_grad, missing_hess, missing_count = slots[bins, 0], slots[bins, 1], slots[bins, 2]
            for side in range(2):  # 0: missing goes right; 1: missing goes left
                if side == 1 and missing_count == 0:
                    break
                if side == 1:
                    for k in range(used):
                        prefix[k, 0] += missing_grad
                        prefix[k, 1] += missing_hess
                        prefix[k, 2] += missing_count
                # Without branches, so that the two divisions run in vector registers; in a function of its own, whose
                # arrays might overlap, the compiler does not vectorise (three times slower).
                for k in range(used):
                    left_hess = prefix[k, 1] * hess_unit
                    right_hess = (total_hess - prefix[k, 1]) * hess_unit
                    left_grad = abs(prefix[k, 0] * grad_unit)
                    right_grad = abs((total_grad - prefix[k, 0]) * grad_unit)
                    left_grad = max(left_grad - reg_alpha, 0.0)
                    right_grad = max(right_grad - reg_alpha, 0.0)
                    left_term = left_grad * left_grad / max(left_hess + reg_lambda, floor)
                    right_term = right_grad * right_grad / max(right_hess + reg_lambda, floor)
                    left_term = left_term if left_hess > least else 0.0
                    right_term = right_term if right_hess > least else 0.0
                    gain = left_term + right_term - parent
                    allowed = (
                        (left_hess >= min_child_weight)
                        & (right_hess >= min_child_weight)
                        & (prefix[k, 2] >= min_child_samples)
                        & (total_count - prefix[k, 2] >= min_child_samples)
                        & (gain > MIN_GAIN)
                        & (gain >= min_split_loss)
                    )
                    candidate[k] = gain if allowed else 0.0
                if side == 0:
                    for k in range(used):
                        if candidate[k] > best_gain:
                            best_gain, best_feature = candidate[k], feature
                            best_size, best_missing_left = k + 1, False
                else:
                    for k in range(used - 1, -1, -1):
                        if candidate[k] > best_gain:
                            best_gain, best_feature = candidate[k], feature
                            best_size, best_missing_left = k + 1, True
        gains[node] = best_gain
        best_features[node] = best_feature
        left_bins[node, :] = False
        left_sums[node, :] = 0
        if best_feature >= 0:
            offset = offsets[best_feature]
            bins = offsets[best_feature + 1] - offset - 1
            slots = sums[node, offset : offset + bins + 1]
            if categorical[best_feature]:
                _sort_categories(slots, bins, grad_unit, hess_unit, reg_lambda, floor, ratio, order)
            for k in range(best_size):
                left_bins[node, order[k] if categorical[best_feature] else k] = True
            left_bins[node, bins] = best_missing_left
            for k in range(bins + 1):
                if left_bins[node, k]:
                    for part in range(3):
                        left_sums[node, part] += slots[k, part]


@kernel
def _sort_categories(
    slots: Any, bins: int, grad_unit: float, hess_unit: float, reg_lambda: float, floor: float, ratio: Any, order: Any
) -> int:
    """Sort the bins that have rows by G / (H + reg_lambda), ties by bin; return how many there are."""
    used = 0
    for k in range(bins):
        if slots[k, 2] > 0:
            weight = max(slots[k, 1] * hess_unit + reg_lambda, floor)
            value = slots[k, 0] * grad_unit / weight if weight > 0.0 else 0.0
            place = used
            while place > 0 and ratio[place - 1] > value:
                ratio[place] = ratio[place - 1]
                order[place] = order[place - 1]
                place -= 1
            ratio[place] = value
            order[place] = k
            used += 1
    return used
