"""Which rows are in which node: held by the party that may know it."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.compute import share
from treaty.trees.kernels import add_leaf_values, count_left, scatter_rows

BLOCK = 1 << 14  # rows moved by one thread at a time


class RowPartition:
    """Rows grouped by tree node, each node's sampled rows before its others.

    Parameters
    ----------
    n_rows : int
        Rows of the table; all of them travel down the tree.
    sampled : int32 (m,) or None
        Ascending row numbers of the tree's sample, which alone count in sums; None for all.
    threads : int
    """

    def __init__(self, n_rows: int, sampled: NDArray[np.int32] | None = None, threads: int = 1) -> None:
        self._threads = threads
        if sampled is None:
            self._rows = np.arange(n_rows, dtype=np.int32)
            self._middle = [n_rows]
        else:
            others = np.ones(n_rows, np.bool_)
            others[sampled] = False
            self._rows = np.concatenate([sampled, np.flatnonzero(others).astype(np.int32)])
            self._middle = [len(sampled)]
        self._spare = np.empty_like(self._rows)
        self._start = [0]
        self._stop = [n_rows]

    def rows(self, nodes: NDArray[np.int32], *, sampled: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the rows of `nodes`, node after node, and where each node starts.

        Parameters
        ----------
        sampled : bool
            Only the rows of the tree's sample, or all.

        Returns
        -------
        rows : int32 (m,)
            Perhaps a view, good until the division after next.
        starts : int64 (n_nodes + 1,)
            Node k holds ``rows[starts[k]:starts[k + 1]]``.
        """
        ends = self._middle if sampled else self._stop
        ranges = [(self._start[node], ends[node]) for node in nodes.tolist()]
        starts = np.array([0, *accumulate(last - first for first, last in ranges)], np.int64)
        if not ranges:
            return self._rows[:0], starts
        if all(here[1] == following[0] for here, following in pairwise(ranges)):
            return self._rows[ranges[0][0] : ranges[-1][1]], starts
        return np.concatenate([self._rows[first:last] for first, last in ranges]), starts

    def divide(self, nodes: NDArray[np.int32], children: NDArray[np.int32], left: NDArray[np.bool_]) -> None:
        """Move the rows of `nodes` to their children.

        Parameters
        ----------
        nodes : int32 (k,)
        children : int32 (k,)
            Number of the left child; the right child's is one higher. Children are numbered upwards.
        left : bool (m,)
            Whether each of ``rows(nodes, sampled=False)`` goes left.
        """
        segments = []  # sampled rows and others are two segments of a node
        at = 0
        for node in nodes:
            for first, last in ((self._start[node], self._middle[node]), (self._middle[node], self._stop[node])):
                segments.append((first, at, last - first))
                at += last - first
        sizes = np.array([size for _, _, size in segments], np.int64)
        blocks = np.maximum(-(-sizes // BLOCK), 1)
        of_block = np.repeat(np.arange(len(segments)), blocks)
        within = (np.arange(len(of_block)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * BLOCK
        block_sizes = np.minimum(sizes[of_block] - within, BLOCK)
        sources = np.array([first for first, _, _ in segments], np.int64)[of_block] + within
        masks = np.array([mask for _, mask, _ in segments], np.int64)[of_block] + within
        counts = np.empty(len(of_block), np.int64)

        share(lambda a, b: count_left(left, masks, masks + block_sizes, a, b, counts), len(counts), self._threads, 32)

        # A node's new order: left sampled, left others, right sampled, right others.
        per_segment = np.bincount(of_block, weights=counts, minlength=len(segments)).astype(np.int64)
        left_sampled, left_others = per_segment[0::2], per_segment[1::2]
        node_starts = sources[np.cumsum(blocks) - blocks][0::2]
        right_starts = node_starts + left_sampled + left_others
        right_sampled = sizes[0::2] - left_sampled
        stops = node_starts + sizes[0::2] + sizes[1::2]
        left_base = np.stack([node_starts, node_starts + left_sampled], 1).ravel()
        right_base = np.stack([right_starts, right_starts + right_sampled], 1).ravel()
        before = np.cumsum(counts) - counts
        earlier = before - before[np.cumsum(blocks) - blocks][of_block]
        lefts = left_base[of_block] + earlier
        rights = right_base[of_block] + within - earlier

        out = self._spare
        share(
            lambda a, b: scatter_rows(self._rows, left, sources, masks, block_sizes, lefts, rights, a, b, out),
            len(counts),
            self._threads,
        )
        for k, child in enumerate(children):
            while len(self._start) < child + 2:
                self._start.append(0)
                self._middle.append(0)
                self._stop.append(0)
            self._start[child], self._middle[child] = int(node_starts[k]), int(node_starts[k] + left_sampled[k])
            self._stop[child] = self._start[child + 1] = int(right_starts[k])
            self._middle[child + 1], self._stop[child + 1] = int(right_starts[k] + right_sampled[k]), int(stops[k])

        # What was not divided moves along, then the two arrays change places.
        at = 0
        for first, last in sorted(zip(node_starts.tolist(), stops.tolist(), strict=True)):
            out[at:first] = self._rows[at:first]
            at = last
        out[at:] = self._rows[at:]
        self._rows, self._spare = out, self._rows

    def add_to(self, margins: NDArray[np.float64], leaves: NDArray[np.int32], values: NDArray[np.float64]) -> None:
        """Add each leaf's value to the margins (n_rows,) of its rows."""
        starts = np.array([self._start[leaf] for leaf in leaves], np.int64)
        stops = np.array([self._stop[leaf] for leaf in leaves], np.int64)
        share(
            lambda a, b: add_leaf_values(self._rows, starts, stops, values, a, b, margins), len(leaves), self._threads
        )
