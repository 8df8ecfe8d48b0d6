"""The kernels that scan a node's bin sums for its best split, and the exact comparison where float64 is too coarse.

The kernels share this module, as the disk cache of kernels does not see changes in another file. `splits` calls them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treaty.machine.kernels import inlined, inner, kernel, new_array

DIGITS = 8
"""Of a numerator, of 32 bits each; it is below 2^254 for sums of 62 bits."""

# how the bins of a column are parted: numbers at a cut, one category against the rest, halves, or a sorted prefix
_CUTS, _SINGLE, _HALVES, _SORTED = range(4)

# categories that are sorted by insertion, before such runs are merged
_RUN = 32

# A gain is off by a few parts in 2^53 of its terms, each of which is at most the gain and the parent's term.
SLACK = 2.0**-46


@inner
def _term(grad: float, hess: float, reg_lambda: float, reg_alpha: float, floor: float, step: float) -> float:
    if hess <= 0.0 and floor == 0.0:
        return 0.0
    grad, whole = max(abs(grad) - reg_alpha, 0.0), max(hess + reg_lambda, floor)
    if grad > step * whole:
        return step * (2.0 * grad - step * whole)
    return grad * grad / whole


@kernel
def subtract_siblings(
    asked: Any, parents: Any, asked_index: Any, parent_index: Any, first: int, last: int, sums: Any
) -> None:
    """Write the `sums` (n_nodes, n) of nodes ``first..last``: those asked for, or the parent's minus the sibling's."""
    for node in range(first, last):
        own, parent, mine = asked[asked_index[node]], parent_index[node], sums[node]
        if parent < 0:
            for k in range(np.uint64(mine.shape[0])):
                mine[k] = own[k]
        else:
            whole = parents[parent]
            for k in range(np.uint64(mine.shape[0])):
                mine[k] = whole[k] - own[k]


@inner
def _kind(is_categorical: bool, bins: int, limits: Any) -> int:
    """Return how a column's bins are parted."""
    onehot_below, by_halves = limits[6], limits[7] > 0.0
    if not is_categorical:
        return _CUTS
    if bins < onehot_below:
        return _SINGLE
    return _HALVES if by_halves else _SORTED


@inner
def _write_candidates(
    slots: Any, totals: Any, kind: int, units: Any, limits: Any, ridge: int, ratio: Any, order: Any, prefix: Any
) -> int:
    """Write what goes left at each candidate with missing values going right; return how many there are."""
    if kind == _HALVES:
        _write_halves(slots, totals, ridge, units, limits, prefix)
        return 2
    used = _sort_categories(slots, units, limits, ratio, order) if kind == _SORTED else slots.shape[0] - 1
    _write_prefixes(slots, used, order[0], kind, prefix)
    return used


@inlined
def _write_prefixes(slots: Any, used: int, order: Any, kind: int, prefix: Any) -> None:
    """Write what goes left at each cut: the sums of the bins up to it, in their order, or of that category alone."""
    grad, hess, count = np.int64(0), np.int64(0), np.int64(0)
    for k in range(used):
        slot = slots[order[k]] if kind == _SORTED else slots[k]
        if kind == _SINGLE:
            grad, hess, count = np.int64(0), np.int64(0), np.int64(0)
        grad += slot[0]
        hess += slot[1]
        count += slot[2]
        prefix[k, 0], prefix[k, 1], prefix[k, 2] = grad, hess, count


@inner
def _half_of(slot: Any, totals: Any, ridge: int, units: Any, limits: Any) -> int:
    """Return where a category belongs: 1 above the node's mean, 2 at most there, 0 with the rest, as of too few rows.

    It is above where G_k / H_k > G / (H + 2 lambda): then it adds to the V of a set (see below).
    """
    if slot[2] < limits[8]:
        return 0
    whole = totals[1] + 2.0 * (ridge if ridge > 0 else limits[0] / units[1])
    first, second = whole * slot[0], float(totals[0]) * slot[1]
    if ridge == 0 or abs(first - second) > 2.0**-50 * (abs(first) + abs(second)):
        return 1 if first > second else 2
    # as close as float64 may be off: both products have one sign, or are zero
    ours, theirs = new_array(4, np.uint64), new_array(4, np.uint64)
    _multiply_words(totals[1] + 2 * ridge, abs(slot[0]), ours)
    _multiply_words(abs(totals[0]), abs(slot[1]), theirs)
    return 1 if (_less(theirs, ours) if first > 0.0 else _less(ours, theirs)) else 2


@inner
def _write_halves(slots: Any, totals: Any, ridge: int, units: Any, limits: Any, prefix: Any) -> None:
    """Write the sums of the categories above the node's mean, and of those that are not; missing values are one."""
    for half in range(2):
        for part in range(3):
            prefix[half, part] = np.int64(0)
    for k in range(slots.shape[0]):
        half = _half_of(slots[k], totals, ridge, units, limits)
        if half > 0:
            for part in range(3):
                prefix[half - 1, part] += slots[k, part]


@inlined
def _limit_gains(prefix: Any, used: int, total: Any, parent: float, units: Any, limits: Any, candidate: Any) -> None:
    """Replace the gains of admissible cuts by those of weights with a limit."""
    (total_grad, total_hess), grad_unit, hess_unit = total, units[0], units[1]
    reg_lambda, reg_alpha, floor, step = limits[0], limits[1], limits[4], limits[5]
    for k in range(used):
        left_grad, left_hess = prefix[k, 0] * grad_unit, prefix[k, 1] * hess_unit
        right_grad, right_hess = (total_grad - prefix[k, 0]) * grad_unit, (total_hess - prefix[k, 1]) * hess_unit
        left_term = _term(left_grad, left_hess, reg_lambda, reg_alpha, floor, step)
        right_term = _term(right_grad, right_hess, reg_lambda, reg_alpha, floor, step)
        candidate[k] = left_term + right_term - parent if candidate[k] > -np.inf else -np.inf


@inner
def _bounded(grad: float, hess: float, limits: Any, bounds: Any) -> tuple[float, float]:
    """Return a node's weight within its bounds, and its term of a gain with that weight."""
    reg_lambda, reg_alpha, floor, step = limits[0], limits[1], limits[4], limits[5]
    if hess <= 0.0 and floor == 0.0:
        return min(max(0.0, bounds[0]), bounds[1]), 0.0
    whole = max(hess + reg_lambda, floor)
    size = min(max(abs(grad) - reg_alpha, 0.0) / whole, step)
    weight = min(max(-size if grad > 0.0 else size, bounds[0]), bounds[1])
    return weight, -(2.0 * (grad * weight + reg_alpha * abs(weight)) + whole * weight * weight)


@inlined
def _bound_gains(prefix: Any, used: int, total: Any, units: Any, limits: Any, within: Any, candidate: Any) -> None:
    """Replace gains by those of weights within bounds; `within` has these, a direction, and the cut that needs none.

    Last in it is whether there are no bounds, so that gains stay as they are.
    """
    # that cut parts present values from missing ones, which have no order
    (bounds, direction, free, unbounded), grad_unit, hess_unit = within, units[0], units[1]
    _, parent = _bounded(total[0] * grad_unit, total[1] * hess_unit, limits, bounds)
    for k in range(used):
        rest_grad, rest_hess = total[0] - prefix[k, 0], total[1] - prefix[k, 1]
        left, left_term = _bounded(prefix[k, 0] * grad_unit, prefix[k, 1] * hess_unit, limits, bounds)
        right, right_term = _bounded(rest_grad * grad_unit, rest_hess * hess_unit, limits, bounds)
        # weights as close as float64 may be off gain less than any split has to
        fits = candidate[k] > -np.inf and (k == free or direction * (right - left) >= 0.0)
        gain = candidate[k] if unbounded else left_term + right_term - parent
        candidate[k] = gain if fits else -np.inf


@inner
def _gains_more(split: Any, best: Any, is_found: bool, totals: Any, least: Any, ridge: Any, digits: Any) -> bool:
    """Tell in whole numbers whether a split, its left sums of grad and hess, gains more than the best one so far.

    The best one is that of `best` if there is one (`is_found`), else the fraction `least` that splits have to pass.
    """
    top, below, best_top, best_below = digits[0], digits[1, :4], digits[2], digits[3, :4]
    if is_found and split[0] == best[0] and split[1] == best[1]:
        return False
    _write_fraction(split[0], split[1], totals, ridge, top, below)
    if is_found:
        _write_fraction(best[0], best[1], totals, ridge, best_top, best_below)
    else:
        _copy(least[0], best_top)
        _copy(least[1], best_below)
    return _passes(top, below, best_top, best_below)


@kernel
def scan_splits(
    sums: Any, totals: Any, features: Any, offsets: Any, categorical: Any, units: Any, limits: Any,
    exact: tuple[Any, Any, Any, Any], constraints: tuple[Any, Any, Any], first: int, last: int,
    found: tuple[Any, Any, Any, Any],
) -> None:  # fmt: skip
    """Find the best split of nodes ``first..last`` among `features` (XGBoost Eq. 7 without the factor 1/2).

    `sums` is int64 (n_nodes, slots, 3), `totals` (n_nodes, 3); `units` are what one step of grad and of hess is worth;
    `limits` are reg_lambda, reg_alpha, min_child_weight, min_child_samples, hess_floor, step, onehot_below, whether
    sets of categories are halves, and the fewest rows of a category in one (`SplitRules`). `exact` are the ridge (0:
    gains are compared as floats), the gain that splits of each node have to be above, and in digits the numerators and
    denominators that they have to pass (see below). `constraints` are those of `limits_of_source`.
    Written to `found` are gains (0: no admissible split), features (-1: none), bins that go left, bool (n_nodes, width)
    with the missing bin, and the left children's sums (n_nodes, 3).

    Ties: lower feature, then missing right before missing left, then the lowest cut among the former and the highest
    among the latter. A category set is a prefix of the categories in the order of `_sort_categories` (Fisher 1958), and
    bins without a row in the node go right; or a half of them, above the node's mean before below; or one category, in
    the order of bins.
    """
    grad_unit, hess_unit = units[0], units[1]
    reg_lambda, reg_alpha, min_child_weight, min_child_samples = limits[0], limits[1], limits[2], np.int64(limits[3])
    floor, step = limits[4], limits[5]
    ridge, to_gain, bound_top, bound_below = exact
    directions, bounds, allowed = constraints
    bounded, chosen_columns = bounds.shape[0] > 0, allowed.shape[0] > 0
    # a hess above it counts
    least = 0.0 if floor == 0.0 else -np.inf
    width = found[2].shape[1]
    order, ratio = new_array((2, width), np.int64), new_array((2, width), np.float64)
    prefix, candidate = new_array((width, 3), np.int64), new_array(width, np.float64)
    digits = new_array((4, DIGITS), np.uint64)
    for node in range(first, last):
        total_grad, total_hess, total_count = totals[node, 0], totals[node, 1], totals[node, 2]
        parent = _term(total_grad * grad_unit, total_hess * hess_unit, reg_lambda, reg_alpha, floor, step)
        threshold, best_gain, best_feature = to_gain[node], to_gain[node], -1
        # of the best split: its left sums, how many sorted bins go left, and whether missing values do
        best_grad, best_hess, best_size, best_missing_left = np.int64(0), np.int64(0), 0, False
        for position in range(features.shape[0]):
            feature = features[position]
            if chosen_columns and not allowed[node, feature]:
                continue
            slots = sums[node, offsets[feature] : offsets[feature + 1]]
            bins = slots.shape[0] - 1
            kind = _kind(categorical[feature], bins, limits)
            used = _write_candidates(slots, totals[node], kind, units, limits, ridge, ratio, order, prefix)
            # 0: missing values go right; 1: they go left
            for side in range(2):
                if side == 1 and (kind == _HALVES or slots[bins, 2] == 0):
                    break
                if side == 1:
                    for k in range(used):
                        for part in range(3):
                            prefix[k, part] += slots[bins, part]
                # Without branches, so that the two divisions run in vector registers; in a function of its own, whose
                # arrays might overlap, the compiler does not vectorise (three times slower; inlined a tenth).
                for k in range(used):
                    left_hess = prefix[k, 1] * hess_unit
                    right_hess = (total_hess - prefix[k, 1]) * hess_unit
                    left_grad = max(abs(prefix[k, 0] * grad_unit) - reg_alpha, 0.0)
                    right_grad = max(abs((total_grad - prefix[k, 0]) * grad_unit) - reg_alpha, 0.0)
                    left_term = left_grad * left_grad / max(left_hess + reg_lambda, floor)
                    right_term = right_grad * right_grad / max(right_hess + reg_lambda, floor)
                    left_term = left_term if left_hess > least else 0.0
                    right_term = right_term if right_hess > least else 0.0
                    hess_enough = (left_hess >= min_child_weight) & (right_hess >= min_child_weight)
                    rows_enough = prefix[k, 2] >= min_child_samples
                    rows_enough &= total_count - prefix[k, 2] >= min_child_samples
                    candidate[k] = left_term + right_term - parent if hess_enough & rows_enough else -np.inf
                # in a loop of its own, as branches keep the one above out of vector registers
                if bounded:
                    within = bounds[node], directions[feature], -1 if side else used - 1, ridge > 0
                    _bound_gains(prefix, used, (total_grad, total_hess), units, limits, within, candidate)
                elif step < np.inf:
                    _limit_gains(prefix, used, (total_grad, total_hess), parent, units, limits, candidate)
                slack = SLACK * (best_gain + 2.0 * parent + threshold) if ridge > 0 else 0.0
                for place in range(used):
                    k = place if side == 0 else used - 1 - place
                    if not candidate[k] > best_gain - slack:
                        continue
                    # too close for float64: compared in whole numbers
                    if candidate[k] <= best_gain + slack and ridge > 0:
                        left, best = (prefix[k, 0], prefix[k, 1]), (best_grad, best_hess)
                        to_pass, is_found = (bound_top[node], bound_below[node]), best_feature >= 0
                        if not _gains_more(left, best, is_found, totals[node], to_pass, ridge, digits):
                            continue
                    best_gain, best_feature = candidate[k], feature
                    best_grad, best_hess = prefix[k, 0], prefix[k, 1]
                    best_size, best_missing_left = k + 1, side == 1
                    slack = SLACK * (best_gain + 2.0 * parent + threshold) if ridge > 0 else 0.0
        found[0][node], found[1][node] = best_gain if best_feature >= 0 else 0.0, best_feature
        left_bins, left_sums = found[2][node], found[3][node]
        left_bins[:], left_sums[:] = False, 0
        if best_feature >= 0:
            slots = sums[node, offsets[best_feature] : offsets[best_feature + 1]]
            kind = _kind(categorical[best_feature], slots.shape[0] - 1, limits)
            if kind == _SORTED:
                _sort_categories(slots, units, limits, ratio, order)
            of_halves = totals[node], ridge, units, limits
            _write_left(slots, kind, best_size, best_missing_left, of_halves, order[0], left_bins, left_sums)


@inner
def _write_left(
    slots: Any, kind: int, size: int, missing_left: bool, of_halves: Any, order: Any, left_bins: Any, left_sums: Any
) -> None:
    """Mark the bins that go left, and add up their sums.

    They are the first `size` in their order, that category alone, or the categories of half `size`.
    """
    missing = slots.shape[0] - 1
    if kind == _HALVES:
        totals, ridge, units, limits = of_halves
        for k in range(missing + 1):
            left_bins[k] = _half_of(slots[k], totals, ridge, units, limits) == size
    else:
        for k in range(size - 1 if kind == _SINGLE else 0, size):
            left_bins[order[k] if kind == _SORTED else k] = True
        left_bins[missing] = missing_left
    for k in range(missing + 1):
        if left_bins[k]:
            for part in range(3):
                left_sums[part] += slots[k, part]


@inner
def _sort_categories(slots: Any, units: Any, limits: Any, ratio: Any, order: Any) -> int:
    """Sort the bins that have rows by G / (H + reg_lambda), ties by bin; return how many there are.

    A bin with an H below min_child_weight is sorted as if its G were 0: of few rows, G is mostly chance.
    `ratio` and `order`, (2, width), have the sorted ratios and bins in their first row; the second is working space.
    """
    used, grad_unit, hess_unit = 0, units[0], units[1]
    reg_lambda, least, floor = limits[0], limits[2], limits[4]
    for k in range(slots.shape[0] - 1):
        if slots[k, 2] > 0:
            weight = max(slots[k, 1] * hess_unit + reg_lambda, floor)
            value = slots[k, 0] * grad_unit / weight if slots[k, 1] * hess_unit >= least and weight > 0.0 else 0.0
            place, first = used, used - used % _RUN
            while place > first and ratio[0, place - 1] > value:
                ratio[0, place] = ratio[0, place - 1]
                order[0, place] = order[0, place - 1]
                place -= 1
            ratio[0, place] = value
            order[0, place] = k
            used += 1
    # sorted runs are merged in pairs; of equal ratios the one from the first run comes first, whose bin is lower
    run = _RUN
    while run < used:
        for first in range(0, used - run, 2 * run):
            for k in range(first, first + run):
                ratio[1, k], order[1, k] = ratio[0, k], order[0, k]
            left, right, end = first, first + run, min(first + 2 * run, used)
            for place in range(first, end):
                if left == first + run:
                    break
                row, k = (0, right) if right < end and ratio[0, right] < ratio[1, left] else (1, left)
                ratio[0, place], order[0, place] = ratio[row, k], order[row, k]
                left, right = left + row, right + 1 - row
        run *= 2
    return used


# ---------------------------------------------------------------- whole numbers of many digits, the lowest first


@inner
def _write_fraction(left_grad: Any, left_hess: Any, totals: Any, ridge: Any, top: Any, below: Any) -> None:
    """Write V^2, (8,), and a (T - a), (4,), of a split to `top` and `below`."""
    whole, a = totals[1] + 2 * ridge, left_hess + ridge
    first, second, v = new_array(4, np.uint64), new_array(4, np.uint64), new_array(4, np.uint64)
    _multiply_words(whole, abs(left_grad), first)
    _multiply_words(abs(totals[0]), a, second)
    if (left_grad < 0) == (totals[0] < 0):
        if _less(first, second):
            _subtract(second, first, v)
        else:
            _subtract(first, second, v)
    else:
        carry = np.uint64(0)
        for k in range(4):
            total = first[k] + second[k] + carry
            v[k] = total & np.uint64(0xFFFFFFFF)
            carry = total >> np.uint64(32)
    _multiply(v, v, top)
    _multiply_words(a, whole - a, below)


@inner
def _multiply(a: Any, b: Any, out: Any) -> None:
    """Write a b to `out`, which has as many digits as both together."""
    out[:] = np.uint64(0)
    for i in range(a.shape[0]):
        carry = np.uint64(0)
        for j in range(b.shape[0]):
            total = a[i] * b[j] + out[i + j] + carry
            out[i + j] = total & np.uint64(0xFFFFFFFF)
            carry = total >> np.uint64(32)
        out[i + b.shape[0]] = carry


@inner
def _passes(top: Any, below: Any, other_top: Any, other_below: Any) -> bool:
    """Tell whether a fraction is larger than another one."""
    ours, theirs = new_array(12, np.uint64), new_array(12, np.uint64)
    _multiply(top, other_below, ours)
    _multiply(other_top, below, theirs)
    return _less(theirs, ours)


@inner
def _multiply_words(a: int, b: int, out: Any) -> None:
    low = np.uint64(0xFFFFFFFF)
    first, second = new_array(2, np.uint64), new_array(2, np.uint64)
    first[0], first[1] = np.uint64(a) & low, np.uint64(a) >> np.uint64(32)
    second[0], second[1] = np.uint64(b) & low, np.uint64(b) >> np.uint64(32)
    _multiply(first, second, out)


@inner
def _subtract(a: Any, b: Any, out: Any) -> None:
    borrow = np.uint64(0)
    for k in range(a.shape[0]):
        taken = b[k] + borrow
        borrow = np.uint64(1) if a[k] < taken else np.uint64(0)
        out[k] = (a[k] + (borrow << np.uint64(32)) - taken) & np.uint64(0xFFFFFFFF)


@inner
def _copy(a: Any, out: Any) -> None:  # a slice assigned to a slice would take seconds to compile
    for k in range(a.shape[0]):
        out[k] = a[k]


@inner
def _less(a: Any, b: Any) -> bool:
    for k in range(a.shape[0] - 1, -1, -1):
        if a[k] != b[k]:
            return bool(a[k] < b[k])
    return False
