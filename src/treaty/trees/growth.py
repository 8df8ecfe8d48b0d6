"""One tree while it grows: its nodes (`Growth`), and which rows are in them (`RowPartition`).

`Growth` uses totals alone; it holds no rows and knows no parties. Its caller finds the best splits of a whole level,
gives them to `take`, and divides the rows of the nodes that `take` returns. Totals become leaf weights.

With `SplitRules.max_leaves`, leaves are divided in the order of their gains, as XGBoost does with
``grow_policy="lossguide"``; a "level" then has the children of the leaves divided last. As many leaves as certainly
come next are divided at a time, since each level takes a round of messages between parties.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Flags, Floats, Int32s, Integers
from treaty.machine.kernels import kernel, new_array
from treaty.machine.shared_work import share
from treaty.trees.constraints import Directions, NodeConstraints, limits_below
from treaty.trees.ensemble import Tree
from treaty.trees.outputs import leaf_values
from treaty.trees.splits import Level, SplitRules, Splits, end_to_end


class Growth:
    """One tree while it grows, without its rows: the nodes to split next, and the totals of all others.

    `totals` (3,) are the root's sum of grad, sum of hess and number of sampled rows; with K outputs (2 K + 1,), see
    `trees.outputs`. `level` holds the nodes to split next; None when the tree is complete. `depths` are those of nodes.
    """

    def __init__(self, totals: Integers, rules: SplitRules) -> None:
        self._rules = rules
        self._totals = [totals[None]]
        limits = None if rules.constraints is None else rules.constraints.root()
        # of all nodes, where there are constraints
        self._limits = [] if limits is None else [limits]
        self._n_nodes = 1
        # nodes of a level, their left children, records and splits
        self._divided: list[tuple[Int32s, Int32s, Int32s, Splits]] = []
        self.depths = np.zeros(1, np.int64)
        # by best gain: leaves that are not divided yet, their positions among the kept sums, and their splits
        self._waiting = np.empty(0, np.int32), np.empty(0, np.int32), Splits.none(0, numbers=len(totals))
        self.level: Level | None = None
        if rules.max_depth >= 1 and totals[-1] >= 2 * rules.min_child_samples:
            asked = (root := np.zeros(1, np.int32)), totals[None]
            self.level = Level(0, *asked, *asked, root, root - 1, rules.max_depth == 1, limits=limits)
            if rules.max_leaves:
                self.level = replace(self.level, last=False, places=root)

    def take(self, splits: Splits) -> tuple[Int32s, Int32s, Splits] | None:
        """Take the level's best splits; return nodes to divide, their left children and splits, or None for none.

        Call `divided` before the next level.
        """
        assert self.level is not None
        kept = np.flatnonzero(splits.feature >= 0)
        level, self.level = self.level, None
        nodes, chosen, totals = level.nodes, splits, level.totals
        places = kept.astype(np.int32) if level.places is None else level.places[kept]
        if len(kept) < len(nodes):
            nodes, chosen, totals = nodes[kept], splits.take(kept), totals[kept]
        if self._rules.max_leaves:
            nodes, places, chosen = self._best(nodes, places, chosen)
            totals = np.concatenate(self._totals)[nodes]
        if len(nodes) == 0:
            return None
        children = (self._n_nodes + 2 * np.arange(len(nodes))).astype(np.int32)
        of_pairs = np.empty((len(nodes), 2, totals.shape[1]), np.int64)
        of_pairs[:, 0] = chosen.left_totals
        np.subtract(totals, chosen.left_totals, out=of_pairs[:, 1])
        self._totals.append(of_pairs.reshape(-1, totals.shape[1]))
        growing = self.depths[nodes] + 1 < self._rules.max_depth
        self.depths = np.append(self.depths, np.repeat(self.depths[nodes] + 1, 2))
        self._n_nodes += 2 * len(nodes)
        limits = None if not self._limits else limits_below(self._rules, self._limits, nodes, chosen, of_pairs)
        self._limits += [] if limits is None else [limits]
        self.level = _next_level(level.depth + 1, of_pairs, children, places, growing, self._rules, limits)
        if self._rules.max_leaves and self.level is not None:
            # sums go where none of a leaf that waits are; a tree of n leaves has 2n - 1 nodes
            taken, n_new = self._waiting[1], len(self.level.nodes)
            free = np.setdiff1d(np.arange(len(taken) + n_new, dtype=np.int32), taken)[:n_new]
            full = self._n_nodes == 2 * self._rules.max_leaves - 1
            self.level = None if full else replace(self.level, last=False, places=free)
        self._taken = nodes, children, chosen
        return self._taken

    def _best(self, nodes: Int32s, places: Int32s, splits: Splits) -> tuple[Int32s, Int32s, Splits]:
        """Add leaves to those that wait; return those that certainly are divided next, in the order of their numbers.

        The best leaf is. Another one is if it has its turn even after all better ones were divided as far as they may.
        """
        nodes, places = np.append(self._waiting[0], nodes), np.append(self._waiting[1], places)
        splits = end_to_end([self._waiting[2], splits])
        # of equal gains the lower number, as in XGBoost
        order = np.lexsort((nodes, -splits.gain))
        left = splits.left_totals[order]
        right = np.concatenate(self._totals)[nodes[order]] - left
        levels = np.minimum(self._rules.max_depth - self.depths[nodes[order]] - 1, 40)
        most = np.ones(len(order), np.int64)
        for child in (left, right):
            by_rows = child[:, -1] // self._rules.min_child_samples - 1
            most += np.maximum(np.minimum((np.int64(1) << levels) - 1, by_rows), 0)
        left_to_do = self._rules.max_leaves - (self._n_nodes + 1) // 2
        chosen, others = np.split(order, [int(np.count_nonzero(np.cumsum(most) - most < left_to_do))])
        self._waiting = nodes[others], places[others], splits.take(others)
        chosen = chosen[np.argsort(nodes[chosen])]
        return nodes[chosen], places[chosen], splits.take(chosen)

    def divided(self, records: Int32s) -> None:
        """Record the owners' record numbers of the splits that `take` returned."""
        nodes, children, chosen = self._taken
        self._divided.append((nodes, children, records, chosen))

    @property
    def directions(self) -> Directions:
        """The directions of all nodes' splits (`Splits.direction`), int8; 0 in leaves."""
        found = np.zeros(self._n_nodes, np.int8)
        for nodes, _, _, chosen in self._divided:
            found[nodes] = chosen.direction
        return found

    def tree(self) -> Tree:
        """Return the tree as far as it is grown; with K outputs its `value` is (n_nodes, K) until it joins a round."""
        totals = np.concatenate(self._totals)
        bounds = np.concatenate([limits.bounds for limits in self._limits]) if self._limits else None
        source, gain = np.full(len(totals), -1, np.int16), np.zeros(len(totals))
        record, left = np.full(len(totals), -1, np.int32), np.full(len(totals), -1, np.int32)
        for nodes, children, records, chosen in self._divided:
            source[nodes], record[nodes], left[nodes], gain[nodes] = chosen.source, records, children, chosen.gain
        return Tree(
            source=source, record=record, left=left, value=leaf_values(self._rules, totals, left < 0, bounds),
            gain=gain, cover=(totals[:, 1:-1:2].sum(axis=1) * self._rules.hess_unit).astype(np.float64),
            count=totals[:, -1],
        )  # fmt: skip


def _next_level(
    depth: int, totals: Integers, children: Int32s, parents: Int32s, growing: Flags, rules: SplitRules,
    limits: NodeConstraints | None,
) -> Level | None:  # fmt: skip
    """List the children still to be split, and of each pair the smaller one, whose sums are computed.

    ``totals`` are (n_pairs, 2, 3), ``children`` the left ones' numbers, ``parents`` positions among the kept sums;
    ``growing`` says which pairs are not too deep, bool (n_pairs,). ``limits`` are those of all children in turn.
    """
    counts = totals[:, :, -1]
    wanted = (counts >= 2 * rules.min_child_samples) & growing[:, None]
    asked = wanted.any(axis=1)
    if not asked.any():
        return None
    smaller = (counts[:, 0] > counts[:, 1]).astype(np.int32)
    sides = np.arange(2, dtype=np.int32)
    asked_index = np.repeat(np.cumsum(asked, dtype=np.int32)[:, None] - 1, 2, axis=1)
    parent_index = np.where(sides == smaller[:, None], -1, parents[:, None]).astype(np.int32)
    return Level(
        depth, (children[:, None] + sides)[wanted], totals[wanted], (children + smaller)[asked],
        totals[np.arange(len(totals)), smaller][asked], asked_index[wanted], parent_index[wanted],
        depth + 1 >= rules.max_depth, limits=None if limits is None else limits.take(wanted.ravel()),
    )  # fmt: skip


# ------------------------------------------------------ which rows are in which node, held by a party that may know it

Places = tuple[Int32s, Integers, Integers]  # what `RowPartition.places` returns


class RowsOfNodes(Protocol):
    """Which rows are in which nodes of one tree, a `RowPartition`, or of several that grow together."""

    def rows(self, nodes: Int32s, *, sampled: bool) -> tuple[Int32s, Integers]: ...
    def parts(self, nodes: Int32s) -> Iterator[tuple[slice, Places]]: ...
    def divide(self, nodes: Int32s, children: Int32s, left: Flags) -> None: ...


# rows moved by one thread at a time, and rows that are moved before a second thread starts
BLOCK = _SMALL = 1 << 14


class RowPartition:
    """Rows grouped by tree node, each node's sampled rows before its others.

    All `n_rows` travel down the tree; only the `sampled` ones (int32, ascending; None: all) count in sums.
    """

    def __init__(self, n_rows: int, sampled: Int32s | None = None, threads: int = 1) -> None:
        self._threads = threads
        if sampled is None:
            self._rows = np.arange(n_rows, dtype=np.int32)
        else:
            others = np.ones(n_rows, np.bool_)
            others[sampled] = False
            self._rows = np.concatenate([sampled, np.flatnonzero(others).astype(np.int32)])
        self._spare = np.empty_like(self._rows)
        # of each node: start of its sampled rows, start of the others, end
        self._bounds = np.array([[0, n_rows if sampled is None else len(sampled), n_rows]])
        # a division whose rows are not moved yet: those of the last level never need to be
        self._waiting: tuple[Int32s, Int32s, Flags] | None = None

    def rows(self, nodes: Int32s, *, sampled: bool) -> tuple[Int32s, Integers]:
        """Return rows of `nodes`, sampled or all, and starts: node k holds ``rows[starts[k]:starts[k + 1]]``.

        The rows may be a view, valid until the division after next.
        """
        rows, starts, firsts = self.places(nodes, sampled=sampled)
        lasts = firsts + np.diff(starts)
        if len(nodes) == 0:
            return rows[:0], starts
        if (firsts[1:] == lasts[:-1]).all():
            return rows[firsts[0] : lasts[-1]], starts
        return np.concatenate([rows[a:b] for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]), starts

    def parts(self, nodes: Int32s) -> Iterator[tuple[slice, Places]]:
        """Yield the sampled rows of nodes, and whose gradients they count for: here those of all outputs."""
        yield slice(None), self.places(nodes, sampled=True)

    def places(self, nodes: Int32s, *, sampled: bool) -> Places:
        """Return the same as `rows` without a copy: rows of all nodes, `starts`, and where each node's rows begin.

        Node k holds ``starts[k + 1] - starts[k]`` of the rows from ``firsts[k]`` on.
        """
        self._move()
        firsts = self._bounds[nodes, 0]
        return self._rows, _one_after_another(self._bounds[nodes, 1 if sampled else 2] - firsts), firsts

    def left_totals(
        self, grad: Integers, hess: Integers, nodes: Int32s, left: Flags, wanted: NDArray[np.intp]
    ) -> Integers:
        """Return the totals int64 (n_wanted, 3) of left children of ``nodes[wanted]``; `left` is as for `divide`."""
        members, starts = self.rows(nodes, sampled=False)
        sampled = np.diff(self.rows(nodes, sampled=True)[1])
        totals = np.zeros((len(wanted), 3), np.int64)
        _add_left(grad, hess, members, starts, sampled, left, wanted, totals)
        return totals

    def divide(self, nodes: Int32s, children: Int32s, left: Flags) -> None:
        """Move the rows of `nodes` to their children.

        `children` are the left ones, ascending; a right one is one higher. `left` says of each of ``rows(nodes,
        sampled=False)`` whether it goes left; it is kept and must not be changed.
        """
        self._move()
        self._waiting = nodes, children, left

    def _move(self) -> None:
        """Move the rows of a pending division."""
        if self._waiting is None:
            return
        (nodes, children, left), self._waiting = self._waiting, None
        bounds = np.zeros((int(children[-1]) + 2, 3), np.int64)
        bounds[: len(self._bounds)] = self._bounds
        blocks = np.empty((4, 2 * len(nodes) + len(left) // BLOCK), np.int64)
        blocks = blocks[:, : _cut_blocks(bounds, nodes, BLOCK, blocks)]
        _, sources, masks, sizes = blocks
        counts = np.empty(len(sizes), np.int64)
        share(lambda a, b: count_left(left, masks, masks + sizes, a, b, counts), len(counts), self._threads, 64)
        moves = sources, masks, sizes, *_place_blocks(blocks, counts, nodes, children, bounds)
        rows, out, least = self._rows, self._spare, 1 + _SMALL * len(counts) // (len(left) + 1)
        share(lambda a, b: scatter_rows(rows, left, *moves, a, b, out), len(counts), self._threads, least)
        # copy the rows of nodes that were not divided, then swap the two arrays
        at = 0
        for first, last in sorted(self._bounds[nodes][:, [0, 2]].tolist()):
            if at < first:
                out[at:first] = rows[at:first]
            at = last
        out[at:] = rows[at:]
        self._rows, self._spare, self._bounds = out, rows, bounds

    def add_to(self, margins: Floats, leaves: Int32s, values: Floats) -> None:
        """Add each leaf's value to the margins (n_rows,) of its rows."""
        rows, threads = self._rows, self._threads
        if self._waiting is not None:
            # rows of a pending division get their values by side, without being moved
            nodes, children, left = self._waiting
            of_node = np.zeros(max(int(leaves.max()), int(children.max()) + 1) + 1)
            of_node[leaves] = values
            sides = np.stack([of_node[children + 1], of_node[children]], axis=1)
            where = self._bounds[nodes, 0], _one_after_another(self._bounds[nodes, 2] - self._bounds[nodes, 0])
            share(lambda a, b: _add_by_side(rows, *where, left, sides, a, b, margins), len(left), threads, _SMALL)
            others = np.ones(len(of_node), np.bool_)
            others[children] = others[children + 1] = False
            values, leaves = values[others[leaves]], leaves[others[leaves]]
        starts, stops = self._bounds[leaves, 0], self._bounds[leaves, 2]
        least = 1 + _SMALL * len(leaves) // (len(rows) + 1)
        share(lambda a, b: add_leaf_values(rows, starts, stops, values, a, b, margins), len(leaves), threads, least)


def _one_after_another(sizes: Integers) -> Integers:
    """Return the start of each stretch of these sizes, one after another, and the end of the last."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    sizes.cumsum(out=starts[1:])
    return starts


@kernel
def _add_by_side(
    rows: Any, firsts: Any, masks: Any, left: Any, sides: Any, first: int, last: int, margins: Any
) -> None:
    """Add to the margins of rows ``first..last`` of divided nodes the value of the child each goes to.

    Node k holds ``left[masks[k]:masks[k + 1]]`` and as many of `rows` from ``firsts[k]`` on; ``sides[k]`` are the
    values of its right and its left child.
    """
    node = 0
    i = np.uint64(first)
    while i < np.uint64(last):
        while np.uint64(masks[node + 1]) <= i:
            node += 1
        row = np.uint64(firsts[node] - masks[node])
        values = sides[node]
        for k in range(i, np.uint64(min(last, masks[node + 1]))):
            margins[np.uint64(rows[row + k])] += values[np.uint64(left[k])]
        i = np.uint64(masks[node + 1])


@kernel
def _cut_blocks(bounds: Any, nodes: Any, size: int, blocks: Any) -> int:
    """Cut the sampled rows of each node, then its others, into blocks of at most `size` rows; return how many.

    ``blocks`` is int64 (4, n): the block's stretch of the 2 * n_nodes ones, its start among all rows and among those of
    `nodes`, and its number of rows.
    """
    n_blocks = mask = 0
    for stretch in range(2 * nodes.shape[0]):
        node, others = nodes[stretch // 2], stretch % 2
        for first in range(bounds[node, others], bounds[node, others + 1], size):
            rows = min(size, bounds[node, others + 1] - first)
            blocks[0, n_blocks], blocks[1, n_blocks] = stretch, first
            blocks[2, n_blocks], blocks[3, n_blocks] = mask, rows
            n_blocks += 1
            mask += rows
    return n_blocks


@kernel
def _place_blocks(blocks: Any, counts: Any, nodes: Any, children: Any, bounds: Any) -> tuple[Any, Any]:
    """Return where each block's left rows go, and its right ones; write the children's `bounds`."""
    # a node's new order: left sampled, left others, right sampled, right others
    n_blocks = counts.shape[0]
    lefts, rights = new_array(n_blocks, np.int64), new_array(n_blocks, np.int64)
    goes_left = new_array(2 * nodes.shape[0], np.int64)
    goes_left[:] = 0
    for block in range(n_blocks):
        goes_left[blocks[0, block]] += counts[block]
    block = 0
    for k in range(nodes.shape[0]):
        node = nodes[k]
        first, middle, last = bounds[node, 0], bounds[node, 1], bounds[node, 2]
        right = first + goes_left[2 * k] + goes_left[2 * k + 1]
        right_middle = right + (middle - first) - goes_left[2 * k]
        left_child, right_child = bounds[children[k]], bounds[children[k] + 1]
        left_child[0], left_child[1], left_child[2] = first, first + goes_left[2 * k], right
        right_child[0], right_child[1], right_child[2] = right, right_middle, last
        to_left, to_right = first, right
        while block < n_blocks and blocks[0, block] // 2 == k:
            lefts[block], rights[block] = to_left, to_right
            to_left += counts[block]
            to_right += blocks[3, block] - counts[block]
            block += 1
    return lefts, rights


@kernel
def look_up_left(
    columns: Any, rows: Any, starts: Any, features: Any, left_bins: Any, first: int, last: int, left: Any
) -> None:
    """Write into ``left[first:last]`` whether each row of each node goes left.

    Node k holds ``rows[starts[k]:starts[k + 1]]`` and splits on ``features[k]``; ``left_bins[k]`` is bool (width,).
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
def _add_left(grad: Any, hess: Any, rows: Any, starts: Any, sampled: Any, left: Any, wanted: Any, totals: Any) -> None:
    # a node's sampled rows come first: ``rows[starts[k]:starts[k] + sampled[k]]``. Sums are by factors of 0 and 1: half
    # of all branches on `left` would be mispredicted
    for position in range(wanted.shape[0]):
        node = wanted[position]
        total_grad, total_hess, count = np.int64(0), np.int64(0), np.int64(0)
        for i in range(np.uint64(starts[node]), np.uint64(starts[node] + sampled[node])):
            row, goes = np.uint64(rows[i]), np.int64(left[i])
            total_grad += grad[row] * goes
            total_hess += hess[row] * goes
            count += goes
        totals[position, 0], totals[position, 1], totals[position, 2] = total_grad, total_hess, count
