"""Kernels that walk rows down trees."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treaty.compute import Flags, Floats, Integers, inner, kernel, new_array

BATCH = 64  # rows that walk down a tree together, so that their cache misses overlap
BYTES = 256  # of packed decisions, for eight rows each, made together


class Nodes(NamedTuple):
    """The nodes of all trees, one tree after another."""

    start: Integers  # first node of each tree
    depth: Integers  # of each tree
    split: NDArray[np.uint32]  # joined record number; 0 in a leaf
    left: NDArray[np.uint32]  # left child, counted over all trees, the right one being the next; a leaf's own number
    leaf: Flags
    value: Floats


class NodeSplits(NamedTuple):
    """The split of each node; entries of leaves are unused, but have to be valid."""

    feature: NDArray[np.uint32]
    threshold: NDArray[Any]
    missing_left: Flags
    category_start: Integers  # the node's part of category_left; empty for a threshold split
    category_stop: Integers
    category_left: NDArray[np.uint8]  # of all nodes; empty without categories


@kernel
def record_bits(
    matrix: Any, records: Any, feature: Any, threshold: Any, missing_left: Any,
    category_start: Any, category_left: Any, first: int, last: int, packed: Any,
) -> None:  # fmt: skip
    """Write into ``packed[:, first:last]`` (records, n_rows / 8) which rows go left, as `numpy.packbits` does.

    ``matrix`` is (n_rows, n_features); the rest is as in `NodeSplits`, by record instead of by node.
    """
    n_rows = matrix.shape[0]
    for block in range(first, last, BYTES):  # these rows stay in the cache while all records are decided
        stop = min(block + BYTES, last)
        for k in range(records.shape[0]):
            split = records[k]
            column = feature[split]
            start = category_start[split]
            unseen = category_start[split + 1] - start - 1  # -1 for a threshold split
            for byte in range(block, stop):
                bits = 0
                for row in range(8 * byte, min(8 * byte + 8, n_rows)):
                    x = matrix[row, column]
                    goes = (x < threshold[split]) | ((x != x) & missing_left[split])
                    if unseen >= 0 and x == x:
                        code = np.int64(x) if 0.0 <= x < unseen else unseen  # any other value must not become an index
                        goes = category_left[start + code] != 0
                    bits |= int(goes) << (7 - row % 8)
                packed[k, byte] = bits


@inner
def _add_values(at: Any, size: Any, batch: int, tree: int, value: Any, margins: Any) -> None:
    """Add to the margins the value of the leaf of `tree` that each row of a batch reached."""
    output = np.uint64(tree % margins.shape[1])
    for row in range(size):
        margins[np.uint64(batch) + row, output] += value[np.uint64(at[row])]


@kernel
def walk_values(matrix: Any, nodes: Nodes, splits: NodeSplits, first: int, last: int, margins: Any) -> None:
    """Walk rows ``first..last`` to their leaves; splits are decided from the matrix.

    ``matrix`` is (n_rows, n_features) in C order. Leaf values are added to ``margins`` (n_rows, n_outputs),
    tree i to output ``i % n_outputs``.

    All rows of a batch take one step together and a row in a leaf stays there: without branches, which no processor
    can predict here, this is forty times faster than walking row by row.
    """
    start, depth, _, left, leaf, value = nodes
    feature, threshold, missing_left, category_start, category_stop, category_left = splits
    flat = matrix.reshape(-1)
    width = np.uint64(matrix.shape[1])
    one = np.uint32(1)
    any_category = category_left.shape[0] > 0
    at = new_array(BATCH, np.uint32)
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
                        code = np.int64(x) if 0.0 <= x < unseen else unseen  # any other value must not become an index
                        goes = category_left[category_start[node] + code] != 0
                    at[row] = left[node] + (one - np.uint32(goes))
            _add_values(at, size, batch, tree, value, margins)


@kernel
def walk_bits(packed: Any, nodes: Nodes, first: int, last: int, margins: Any, leaves: Any) -> None:
    """Walk rows ``first..last`` to their leaves; ``packed[split]`` has a node's decisions, see `record_bits`.

    The rest is as in `walk_values`, but where ``leaves`` (n_rows, n_trees) has rows, it gets leaf numbers within each
    tree, and ``margins`` nothing.
    """
    start, depth, split, left, leaf, value = nodes
    one = np.uint32(1)
    at = new_array(BATCH, np.uint32)
    for batch in range(first, last, BATCH):
        size = np.uint64(min(BATCH, last - batch))
        for tree in range(start.shape[0]):
            at[:] = start[tree]
            for _ in range(depth[tree]):
                for position in range(size):
                    node = np.uint64(at[position])
                    row = np.uint64(batch) + position
                    byte = packed[np.uint64(split[node]), row >> np.uint64(3)]
                    goes = ((byte >> (np.uint64(7) - (row & np.uint64(7)))) & np.uint64(1) != 0) | leaf[node]
                    at[position] = left[node] + (one - np.uint32(goes))
            if leaves.shape[0] > 0:
                for position in range(size):
                    leaf_number = np.int64(at[position]) - start[tree]
                    leaves[np.uint64(batch) + position, np.uint64(tree)] = np.int32(leaf_number)
            else:
                _add_values(at, size, batch, tree, value, margins)
