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
    matrix: Any, start: Any, split: Any, left: Any, value: Any, feature: Any, threshold: Any, missing_left: Any,
    category_start: Any, category_left: Any, first: int, last: int, margins: Any,
) -> None:  # fmt: skip
    """Add the leaf values of rows ``first..last`` to their margins; splits are decided from the matrix."""
    outputs = margins.shape[1]
    for batch in range(first, last, BATCH):
        stop = min(batch + BATCH, last)
        for tree in range(start.shape[0]):
            for row in range(batch, stop):
                node = start[tree]
                at = split[node]
                while at >= 0:
                    x = matrix[row, feature[at]]
                    goes = _goes_left(x, at, threshold, missing_left, category_start, category_left)
                    node = left[node] + (0 if goes else 1)
                    at = split[node]
                margins[row, tree % outputs] += value[node]


@kernel
def walk_bits(bits: Any, start: Any, split: Any, left: Any, value: Any, first: int, last: int, margins: Any) -> None:
    """Add the leaf values of rows ``first..last`` to their margins; splits are decided by `bits` (rows, records)."""
    outputs = margins.shape[1]
    for batch in range(first, last, BATCH):
        stop = min(batch + BATCH, last)
        for tree in range(start.shape[0]):
            for row in range(batch, stop):
                node = start[tree]
                while split[node] >= 0:
                    node = left[node] + (0 if bits[row, split[node]] else 1)
                margins[row, tree % outputs] += value[node]
