"""The two compiled loops of binning: placing cuts, and finding every value's bin.

Both release the interpreter lock, so that threads over columns and over rows run side by side.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.compute import inner, kernel, new_array


@inner
def _cut_between(lower: Any, upper: Any, cuts: NDArray[Any], place: int) -> None:
    cuts[place] = (np.float64(lower) + np.float64(upper)) * 0.5  # rounded to what cuts are
    # + 0 makes a negative zero positive: the order of the two zeros in sorting must not matter
    cuts[place] = (cuts[place] if cuts[place] > lower else upper) + 0.0


@kernel
def tie_aware_cuts(ordered: NDArray[Any], max_bin: int) -> NDArray[Any]:
    """Place the cuts of a numeric feature with present values `ordered` (ascending, at least one), at most q bins.

    No cut falls inside a run of equal values; bin k holds cuts[k-1] <= x < cuts[k]. With at most q = `max_bin`
    distinct values each has a bin. Else a value holding more than n/q rows ("heavy") has its own bin, and one walk
    spreads the others: a bin is opened with target R/K, R such rows and K such bins being left, and closed when it
    holds R/K rows or a heavy value comes. With no bin left a value joins the bin before it. A target is compared as
    held * K >= R, in whole numbers.
    """
    n = ordered.size
    values = new_array(n, ordered.dtype)
    counts = new_array(n, np.int64)
    distinct = 0
    start = 0
    for i in range(1, n + 1):
        if i == n or ordered[i] != ordered[start]:
            values[distinct] = ordered[start]
            counts[distinct] = i - start
            distinct += 1
            start = i

    if distinct <= max_bin:
        every: NDArray[Any] = new_array(distinct - 1, ordered.dtype)
        for k in range(1, distinct):
            _cut_between(values[k - 1], values[k], every, k - 1)
        return every

    rows_left, bins_left = n, max_bin
    for k in range(distinct):
        if counts[k] * max_bin > n:
            rows_left -= counts[k]
            bins_left -= 1

    cuts: NDArray[Any] = new_array(max_bin - 1, ordered.dtype)
    n_cuts = 0
    is_open = False
    held = target_rows = target_bins = 0  # of the open bin; its target is target_rows / target_bins
    for k in range(distinct):
        opens_bin = True
        if counts[k] * max_bin > n:
            is_open = False
        else:
            if is_open or bins_left == 0:
                opens_bin = False
            else:
                is_open, held = True, 0
                target_rows, target_bins = rows_left, bins_left
                bins_left -= 1
            held += counts[k]
            rows_left -= counts[k]
            is_open = is_open and held * target_bins < target_rows
        if opens_bin and k > 0:
            _cut_between(values[k - 1], values[k], cuts, n_cuts)
            n_cuts += 1
    return cuts[:n_cuts].copy()


@kernel
def write_codes(
    values: NDArray[Any],
    padded_cuts: NDArray[Any],
    missing: int,
    codes: NDArray[np.uint8],
    feature: int,
    start: int,
    stop: int,
) -> None:
    """Write the bin, the number of cuts <= the value, of rows start..stop-1 into column `feature` of `codes`.

    `padded_cuts` come from `pad_cuts`; `missing` is the code of NaN; `codes` is uint8 (n_rows, n_features) in C order.
    """
    # All values take one step of the search together: free of branches and of order, the inner loop becomes
    # vector instructions, which made it five times faster than searching value by value.
    below = new_array(stop - start, np.int32)
    below[:] = np.int32(0)
    step = np.int32((padded_cuts.size + 1) >> 1)
    while step > 0:
        for i in range(stop - start):
            probe = padded_cuts[np.uint32(below[i] + step - 1)]  # unsigned: no test for an index from the end
            below[i] += step if probe <= values[start + i] else np.int32(0)
        step >>= 1
    for i in range(stop - start):
        value = values[start + i]
        codes[start + i, feature] = below[i] if value == value else missing


def pad_cuts(cuts: NDArray[Any]) -> NDArray[Any]:
    """Fill ascending cuts with +inf up to a length of 2^s - 1, the least that holds them, for a search in s steps."""
    padded = np.full((1 << len(cuts).bit_length()) - 1, np.inf, dtype=cuts.dtype)
    padded[: len(cuts)] = cuts
    return padded
