"""Split candidates of a node as columns of 0 and 1, and bin sums recovered from the candidates' sums.

A column stands for a candidate with missing values going right: of a number, the rows in bin k or a lower one; of a
category, the rows that have it, for which categories form a candidate is known only once their sums are. Empty bins
have no column. Nor has each feature's last bin with rows: it holds the rest of the node's total.
"""

from __future__ import annotations

import numpy as np

from treaty.machine.arrays import Codes, Flags, Floats, Int32s, Integers


def count_bins(codes: Codes, features: Int32s, offsets: Int32s) -> Int32s:
    """Return the number of a node's rows in each slot, int32 (slots,), from their codes (n_rows, n_features).

    Slots of features outside the tree's column sample `features` stay 0.
    """
    slots = (codes[:, features].astype(np.int64) + offsets[features]).ravel()
    return np.bincount(slots, minlength=int(offsets[-1])).astype(np.int32)


def candidate_slots(counts: Int32s, features: Int32s, offsets: Int32s) -> Int32s:
    """Return the slots with a column of their own, int32 (columns,), ascending."""
    filled = [offsets[f] + np.flatnonzero(counts[offsets[f] : offsets[f + 1]])[:-1] for f in features]
    return np.concatenate([np.empty(0, np.int32), *filled]).astype(np.int32)


def candidate_columns(codes: Codes, slots: Int32s, offsets: Int32s, categorical: Flags) -> Floats:
    """Return the columns of `candidate_slots`, float64 (n_rows, columns) of 0 and 1."""
    feature = np.searchsorted(offsets, slots, side="right") - 1
    bins, of_rows = slots - offsets[feature], codes[:, feature]
    return np.where(categorical[feature], of_rows == bins, of_rows <= bins).astype(np.float64)


def whole_numbers(sums: Floats) -> Integers:
    """Round float64 sums of whole numbers to int64; raise ValueError if one is more than 1/4 from a whole number."""
    rounded = np.rint(sums)
    with np.errstate(invalid="ignore"):
        fine = (np.abs(sums - rounded) <= 0.25) & (np.abs(sums) < 2.0**62)
    if not fine.all():
        raise ValueError("expected sums of whole numbers")
    return rounded.astype(np.int64)


def bin_sums(
    columns: Integers,
    slots: Int32s,
    counts: Int32s,
    totals: Integers,
    features: Int32s,
    offsets: Int32s,
    categorical: Flags,
) -> Integers:
    """Return the sums of all bins of a node, int64 (slots, 3), from those of its candidates.

    `columns` (2, columns) are sums of grad and of hess of the candidates in `slots`, `counts` (slots,) the rows of all
    slots, and `totals` the node's, grad and hess first.
    """
    sums = np.zeros((len(counts), 3), np.int64)
    sums[:, 2] = counts
    starts = np.searchsorted(slots, offsets)
    for f in features.tolist():
        of_candidates = columns[:, starts[f] : starts[f + 1]]
        if not categorical[f]:
            of_candidates = np.diff(of_candidates, axis=1, prepend=0)
        sums[slots[starts[f] : starts[f + 1]], :2] = of_candidates.T
        filled = np.flatnonzero(counts[offsets[f] : offsets[f + 1]])
        if len(filled):
            sums[offsets[f] + filled[-1], :2] = totals[:2] - of_candidates.sum(axis=1)
    return sums


def undivided(totals: Integers, features: Int32s, offsets: Int32s) -> Integers:
    """Return sums of a node without candidates, int64 (slots, 3): all its rows in one bin of each feature."""
    sums = np.zeros((int(offsets[-1]), 3), np.int64)
    sums[offsets[features + 1] - 1] = totals
    return sums
