"""The two compiled loops of the joint quantile search: placing cuts on what is known, and adding what was opened.

A feature's opened points are keys in ascending order with the number of rows below each; two neighbours k and k'
bound an interval of the keys k..k'-1. An interval of one key is a value; a wider one may hold several.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.machine.kernels import inner, kernel

_NARROW = 1 << 12  # keys, within a thousandth of the number: treated as one value when other bins' targets are set
_WIDEST = (1 << 63) - 1  # stands for more than an int64 holds: half of all float64 numbers
_SHARE = 8  # a bin is at most an eighth of an even share off its target, whatever the tolerance


@inner
def _width(keys: NDArray[np.int64], i: int) -> int:
    width = keys[i + 1] - keys[i]
    return width if width > 0 else _WIDEST


@kernel
def _place(
    keys: NDArray[np.int64],
    counts: NDArray[np.int64],
    max_bin: int,
    least_rows: int,
    tolerance: float,
    wanted: NDArray[np.bool_],
    opens: NDArray[np.bool_],
) -> None:
    last = keys.size - 1
    n = counts[last]
    filled = 0
    for i in range(last):
        filled += counts[i + 1] > counts[i]
    if filled <= max_bin:
        for i in range(last):
            rows = counts[i + 1] - counts[i]
            opens[i] = rows > 0
            wanted[i] = rows >= least_rows and _width(keys, i) > 1
        return

    rows_left, bins_left = np.float64(n), max_bin
    for i in range(last):
        rows, width = counts[i + 1] - counts[i], _width(keys, i)
        if rows * max_bin > n:  # heavy, or may hold a heavy value
            wanted[i] = rows >= least_rows and width > 1
            if not wanted[i] or width <= _NARROW:
                rows_left -= rows
                bins_left -= 1

    slack = min(tolerance * n, rows_left / (_SHARE * bins_left))
    is_open = False
    start = target = 0.0  # of the open bin, as numbers of rows below
    lacking = 0.0  # rows by which the last bin, closed within the slack, misses its target; negative: exceeds it
    for i in range(last):
        low, high = counts[i], counts[i + 1]
        if low == high:
            continue
        rows, width = high - low, _width(keys, i)
        divisible = rows >= least_rows and width > 1
        if rows * max_bin > n and (not divisible or width <= _NARROW):
            is_open, opens[i], lacking = False, True, 0.0
            continue
        if not is_open and bins_left > 0:
            is_open, opens[i] = True, True
            start, target = np.float64(low), low + lacking + (rows_left - lacking) / bins_left
            bins_left -= 1
        is_value = rows == 1 or width == 1
        while is_open and target <= high:
            ends_before = not is_value and low > start and target - low < high - target
            off = target - low if ends_before else high - target
            if divisible and off > slack:
                wanted[i] = True
                start = target  # for this round, as if the interval could be cut exactly there
                is_open = width > _NARROW
                lacking = 0.0
            elif ends_before:
                opens[i] = bins_left > 0
                start = np.float64(low)
                lacking = target - low if off <= slack else 0.0
            else:
                is_open = False
                # a bin closed within the slack moves no other target, else each found end would move all later ones
                lacking = target - high if off <= slack else 0.0
            if bins_left == 0:
                is_open = False
            if is_open:
                begin = start + lacking
                target = begin + (rows_left - (begin - low)) / bins_left
                bins_left -= 1
        rows_left -= rows


@kernel
def place_cuts(
    keys: NDArray[np.int64],
    counts: NDArray[np.int64],
    offsets: NDArray[np.int64],
    max_bin: int,
    least_rows: int,
    tolerance: float,
    wanted: NDArray[np.bool_],
    opens: NDArray[np.bool_],
) -> None:
    """Place every feature's bins by the rule of `tie_aware_cuts`, its intervals standing for values.

    `keys` and `counts`, int64 (n_points,), are the opened points and the rows below them; those of feature f,
    offsets[f]..offsets[f+1]-1, begin and end with the ends of its domain, 0 and n rows below. Intervals of fewer than
    `least_rows` (at least 2) rows are not divided; a bin may end `tolerance`, a share of a feature's rows, away from
    its target. Written, False throughout before: `wanted`, where the interval after the point must be divided, and
    `opens`, where it is the first of a bin; only when nothing is wanted are these all bins.

    Wanted are: an interval that may hold a heavy value (more than n/q rows); every divisible one while no more than q
    intervals have rows, as the distinct values may be as few; and one with a target inside, none of whose ends is near
    enough. There the walk continues from the target (or from the end, of an interval so narrow that it probably holds
    one value), so that all targets are sought in one round. With tolerance 0 and least_rows 2, bins of intervals of
    which none is wanted are the bins of the values: a walk over the values would also stop at their ends, and only
    there.
    """
    for feature in range(offsets.size - 1):
        a, b = offsets[feature], offsets[feature + 1]
        _place(keys[a:b], counts[a:b], max_bin, least_rows, tolerance, wanted[a:b], opens[a:b])


@kernel
def insert_points(
    keys: NDArray[np.int64],
    counts: NDArray[np.int64],
    offsets: NDArray[np.int64],
    new_keys: NDArray[np.uint32 | np.int64],
    new_counts: NDArray[np.int64],
    new_offsets: NDArray[np.int32],
    all_keys: NDArray[np.int64],
    all_counts: NDArray[np.int64],
) -> None:
    """Merge newly opened points, moving counts that noise has put out of order to the nearest that is in order.

    `keys`, `counts` and `offsets` are as in `place_cuts`; counts ascend within a feature. `new_keys` are per feature
    ascending, strictly between its first and last key and not opened before. In `all_keys` and `all_counts`, written,
    feature f begins at offsets[f] + new_offsets[f].
    """
    for feature in range(offsets.size - 1):
        new, end = new_offsets[feature], new_offsets[feature + 1]
        place = offsets[feature] + new
        for i in range(offsets[feature], offsets[feature + 1]):
            while new < end and np.int64(new_keys[new]) < keys[i]:
                all_keys[place] = new_keys[new]
                all_counts[place] = min(max(new_counts[new], all_counts[place - 1]), counts[i])
                new += 1
                place += 1
            all_keys[place] = keys[i]
            all_counts[place] = counts[i]
            place += 1


# ----------------- floats as whole numbers in the same order, so that a search can halve the range between two of them

_ZERO = np.uint32(1 << 31)  # key of both float32 zeros; that of float64 zeros is 0
_LEAST = np.int64(-(1 << 63))


def keys_of(values: NDArray[Any]) -> NDArray[Any]:
    """Map floats (no NaN) to keys: in order, neighbours differing by 1, both zeros the same.

    Those of float64 are int64, those of float32 uint32.
    """
    if values.dtype == np.float64:
        wide = values.view(np.int64)
        return np.where(wide < 0, _LEAST - wide, wide)
    bits = values.view(np.uint32)
    return np.where(bits < _ZERO, bits | _ZERO, np.bitwise_invert(bits) + np.uint32(1))


def floats_of(keys: NDArray[Any], *, wide: bool = False) -> NDArray[Any]:
    """Return the values, float64 or float32, with these keys: the inverse of `keys_of`, with a positive zero."""
    if wide:
        return np.where(keys < 0, _LEAST - keys, keys).view(np.float64)
    keys = np.asarray(keys).astype(np.uint32)
    return np.where(keys >= _ZERO, keys ^ _ZERO, np.bitwise_invert(keys) + np.uint32(1)).view(np.float32)
