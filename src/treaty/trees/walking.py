"""Kernels that walk rows down trees."""

from __future__ import annotations

from typing import Any

import numpy as np

from treaty.compute import kernel

BATCH = 64  # rows that walk down a tree together, so that their cache misses overlap


@kernel
def _goes_left(
    value: float, split: int, threshold: Any, missing_left: Any, category_start: Any, category_left: Any
) -> bool:
    if np.isnan(value):
        return missing_left[split]  # type: ignore[no-any-return]
    first = category_start[split]
    last = category_start[split + 1]
    if first == last:
        return value < threshold[split]  # type: ignore[no-any-return]
    unseen = last - first - 1
    code = np.int64(value) if 0.0 <= value < unseen else unseen  # no other value may become an index
    return category_left[first + code] != 0  # type: ignore[no-any-return]


@kernel
def record_bits(
    matrix: Any, records: Any, feature: Any, threshold: Any, missing_left: Any,
    category_start: Any, category_left: Any, first: int, last: int, bits: Any,
) -> None:  # fmt: skip
    """Write into ``bits[first:last]`` (rows, records) whether each row goes left at each record."""
    for row in range(first, last):
        for k in range(records.shape[0]):
            split = records[k]
            value = matrix[row, feature[split]]
            bits[row, k] = _goes_left(value, split, threshold, missing_left, category_start, category_left)


@kernel
def walk_values(
    matrix: Any, start: Any, depth: Any, left: Any, leaf: Any, value: Any, feature: Any, threshold: Any,
    missing_left: Any, category_start: Any, category_stop: Any, category_left: Any, first: int, last: int, margins: Any,
) -> None:  # fmt: skip
    """Add the leaf values of rows ``first..last`` to their margins; splits are decided from the matrix.

    Parameters
    ----------
    matrix : float32 (n_rows, n_features), C order
    start, depth : int64 (n_trees,)
        Root and depth of each tree.
    left : uint32 (n_nodes,)
        Left child, the right one being the next; a leaf's own number.
    leaf : bool (n_nodes,)
    value : float64 (n_nodes,)
    feature, threshold, missing_left : uint32, float32, bool (n_nodes,)
        The node's split; anything valid in a leaf.
    category_start, category_stop : int64 (n_nodes,)
        The node's part of `category_left`, empty without categories.
    category_left : uint8
    margins : float64 (n_rows, n_outputs)

    Notes
    -----
    All rows of a batch take one step together and a row in a leaf stays there: without branches, which no processor
    can foresee here, this is forty times faster than walking row by row.
    """
    flat = matrix.reshape(-1)
    width = np.uint64(matrix.shape[1])
    one = np.uint32(1)
    any_category = category_left.shape[0] > 0
    at = np.empty(BATCH, np.uint32)
    for batch in range(first, last, BATCH):
        size = np.uint64(min(BATCH, last - batch))
        origin = np.uint64(batch) * width
        for tree in range(start.shape[0]):
            at[:] = start[tree]
            for _ in range(depth[tree]):
                for row in range(size):
                    node = np.uint64(at[row])
                    x = flat[origin + row * width + np.uint64(feature[node])]
                    goes = (x < threshold[node]) | ((x != x) & missing_left[node]) | leaf[node]
                    if any_category and category_start[node] < category_stop[node] and x == x:
                        unseen = category_stop[node] - category_start[node] - 1
                        code = np.int64(x) if 0.0 <= x < unseen else unseen  # no other value may become an index
                        goes = category_left[category_start[node] + code] != 0
                    at[row] = left[node] + (one - np.uint32(goes))
            output = np.uint64(tree % margins.shape[1])
            for row in range(size):
                margins[np.uint64(batch) + row, output] += value[np.uint64(at[row])]


@kernel
def walk_bits(
    bits: Any, start: Any, depth: Any, left: Any, leaf: Any, value: Any, split: Any, first: int, last: int, margins: Any
) -> None:
    """Add the leaf values of rows ``first..last`` to their margins; splits are decided by `bits` (rows, records).

    ``split`` is uint32 (n_nodes,), the node's column of `bits` (any in a leaf); the rest is as in `walk_values`.
    """
    one = np.uint32(1)
    at = np.empty(BATCH, np.uint32)
    for batch in range(first, last, BATCH):
        size = np.uint64(min(BATCH, last - batch))
        for tree in range(start.shape[0]):
            at[:] = start[tree]
            for _ in range(depth[tree]):
                for row in range(size):
                    node = np.uint64(at[row])
                    goes = (bits[np.uint64(batch) + row, np.uint64(split[node])] != 0) | leaf[node]
                    at[row] = left[node] + (one - np.uint32(goes))
            output = np.uint64(tree % margins.shape[1])
            for row in range(size):
                margins[np.uint64(batch) + row, output] += value[np.uint64(at[row])]
