"""Products of ciphertexts over the bins of every column in every node of a level, and in which order they are made.

Multiplying ciphertexts costs far more than any bookkeeping, so columns share their work. The rows are first multiplied
together per *joint* cell of two columns, then the cells are collapsed to the one column's bins and to the other's:
m + 2 c products for m rows in c cells, not 2 m. Groups nest: two groups form a larger one while that saves a fair share
of products on the table, and a node uses a group only if that saves products there. Rows in the left-out bin of every
column of a group take no part. Columns join within *blocks* of neighbours, so that thousands of them are planned in
seconds and a level's products can be made block by block.

`level_pieces` cuts a level into parts whose products are held at one time; `bin_products` makes those of one part. For
a joint group each thread also holds the products of the cells, fewer in all than the part has rows. The plan is the
passive party's own plaintext; no secret is involved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.montgomery import Modulus
from treaty.machine.arrays import Codes, Flags, Integers, Words, pieces
from treaty.machine.kernels import kernel
from treaty.machine.process import concurrently

Labels = NDArray[np.int32]

_MOST_CELLS = 1 << 22  # joint cells are numbered in a table of this size
_PLANNING_STEPS = 1 << 28  # rows looked at while planning: about a second
_LEAST_SAMPLE = 4096
_BLOCK_COLUMNS = 64
LEAST_GAIN = 4  # a group must save more than a fourth of its items' products; its cells take memory, too


@dataclass(frozen=True, slots=True)
class Group:
    """One column, or two groups whose pairs of cells are the cells.

    Labels give the cell of each cell of the enclosing group, or of each table row at the top; -1 takes no part.
    """

    cells: int
    labels: NDArray[np.signedinteger]
    feature: int  # the column (its cells are its bins), or -1
    parts: tuple[Group, ...]  # the two groups inside, or none


class SortedCells(NamedTuple):
    """Items of several nodes sorted by node and cell: cell k, of label labels[k], holds items[starts[k]:starts[k + 1]].

    No cell is empty; node i has the cells node_starts[i]..node_starts[i + 1] - 1.
    """

    items: Labels
    starts: Integers
    labels: Labels
    node_starts: Integers


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring columns and their top groups, which contain each of them once."""

    columns: slice
    groups: list[Group]


def plan_blocks(codes: Codes, left_out: Integers, bins: Integers, threads: int) -> list[Block]:
    """Group the columns of a table of bin codes (rows, columns) in blocks of neighbours.

    `left_out` (columns,) is the bin of each column whose sum is not needed, `bins` (columns,) the number of its bins.
    """
    rows, columns = codes.shape
    # thousands of columns are judged on fewer rows, so that planning takes about a second
    looks = max(1, columns * min(columns, _BLOCK_COLUMNS))
    step = max(1, rows // max(_LEAST_SAMPLE, _PLANNING_STEPS // looks))

    def plan(part: slice) -> Block:
        labels = np.ascontiguousarray(codes[:, part].T).astype(np.int32)
        labels[labels == left_out[part, np.newaxis]] = -1
        return Block(part, _plan_groups(labels, bins[part], part.start, step))

    return concurrently(plan, pieces(columns, _BLOCK_COLUMNS), threads)


def _plan_groups(labels: Labels, bins: Integers, first: int, step: int) -> list[Group]:
    """Join greedily, always the two groups whose joining saves most products, judged on every `step`-th row."""
    sizes = [int(b) for b in bins]
    groups = [Group(b, labels[f].astype(_label_type(b)), first + f, ()) for f, b in enumerate(sizes)]
    if len(groups) < 2 or labels.shape[1] == 0:
        return groups
    stamps, sample = np.zeros(_MOST_CELLS, np.int32), [x[::step].copy() for x in labels]
    gains = np.zeros((len(groups), len(groups)), np.int64)
    pairs = [(i, j) for j in range(len(groups)) for i in range(j)]
    while True:
        for i, j in pairs:
            gains[i, j] = _gain(groups[i], groups[j], sample[i], sample[j], stamps)
        i, j = (int(x) for x in np.unravel_index(np.argmax(gains), gains.shape))
        if gains[i, j] <= 0:
            return groups
        # the joined group takes the place of one, and its gains with all others are new
        groups[i] = _join(groups[i], groups[j])
        sample[i] = groups[i].labels[::step].astype(np.int32)
        del groups[j], sample[j]
        gains = np.delete(np.delete(gains, j, 0), j, 1)
        pairs = [(min(i, k), max(i, k)) for k in range(len(groups)) if k != i]


def keep_features(groups: Iterable[Group], features: set[int]) -> list[Group]:
    """Return the groups without the columns that are not in `features`."""
    kept = []
    for group in groups:
        parts = tuple(keep_features(group.parts, features))
        if parts or group.feature in features:
            kept.append(Group(group.cells, group.labels, group.feature, parts))
    return kept


def _gain(a: Group, b: Group, sample_a: Labels, sample_b: Labels, stamps: Labels) -> int:
    if (a.cells + 1) * (b.cells + 1) > len(stamps):
        return 0
    either, both, joint, joint_a, joint_b = _count_joint(sample_a, sample_b, b.cells, stamps)
    # products saved: m rows of both go through c cells, which are collapsed twice
    gain = both + joint - joint_a - joint_b
    return gain if LEAST_GAIN * gain > either else 0


def _join(a: Group, b: Group) -> Group:
    # -1 in either group is a cell of its own, of rows that take part in one group only; in both it is none
    pairs = (a.labels.astype(np.int32) + 1) * (b.cells + 1) + (b.labels + 1)
    found = np.bincount(pairs) > 0
    found[0] = False
    labels, used = np.cumsum(found, dtype=np.int32)[pairs] - 1, np.divmod(np.flatnonzero(found), b.cells + 1)
    parts = tuple(
        Group(g.cells, (x - 1).astype(_label_type(g.cells)), g.feature, g.parts)
        for g, x in zip((a, b), used, strict=True)
    )
    return Group(len(used[0]), labels.astype(_label_type(len(used[0]))), -1, parts)


def _label_type(cells: int) -> np.dtype[np.signedinteger]:
    """Return the shortest type: with thousands of columns, labels are most of what a server keeps."""
    return np.min_scalar_type(-cells - 1)


@kernel
def _count_joint(a: Labels, b: Labels, b_cells: int, stamps: Labels) -> tuple[int, int, int, int, int]:
    """Count rows in either group, in both, joint cells, those within a, those within b; `stamps` stays zero."""
    either, both, joint, in_a, in_b = 0, 0, 0, 0, 0
    for i in range(a.size):
        if a[i] < 0 and b[i] < 0:
            continue
        either += 1
        both += a[i] >= 0 and b[i] >= 0
        cell = (a[i] + 1) * (b_cells + 1) + b[i] + 1
        if stamps[cell] == 0:
            stamps[cell] = 1
            joint += 1
            in_a += a[i] >= 0
            in_b += b[i] >= 0
    for i in range(a.size):
        stamps[(a[i] + 1) * (b_cells + 1) + b[i] + 1] = 0
    return either, both, joint, in_a, in_b


@kernel
def sort_cells(labels: Labels, node_starts: Integers, cells: int) -> SortedCells:
    """Sort the items of several nodes by cell, within a node in order of first appearance.

    `labels` (items,) give the cell, below `cells`, of each item, node after node; -1 takes no part. Node i has the
    items node_starts[i]..node_starts[i + 1] - 1.
    """
    nodes, taking = node_starts.size - 1, 0
    for label in labels:
        taking += label >= 0
    items, starts = np.empty(taking, np.int32), np.empty(taking + 1, np.int64)
    used, cell_starts = np.empty(taking, np.int32), np.zeros(nodes + 1, np.int64)
    position, count, done = np.zeros(cells, np.int64), 0, 0
    # counting sort, node by node; only cells that occur are visited, so that small nodes cost little
    for node in range(nodes):
        first = count
        for i in range(node_starts[node], node_starts[node + 1]):
            if labels[i] >= 0:
                if position[labels[i]] == 0:
                    used[count] = labels[i]
                    count += 1
                position[labels[i]] += 1
        for k in range(first, count):
            starts[k] = done
            done += position[used[k]]
            position[used[k]] = starts[k]
        for i in range(node_starts[node], node_starts[node + 1]):
            if labels[i] >= 0:
                items[position[labels[i]]] = i
                position[labels[i]] += 1
        for k in range(first, count):
            position[used[k]] = 0
        cell_starts[node + 1] = count
    starts[count] = done
    return SortedCells(items, starts[: count + 1].copy(), used[:count].copy(), cell_starts)


@dataclass(frozen=True, slots=True)
class Items:
    """Packed ciphertexts of several nodes, node after node: item i is row index[i] of `source`, which is never copied.

    `keys` are what the groups' labels are indexed by: table rows, or cells of the enclosing group. Node nodes[i] of the
    level has the items starts[i]..starts[i + 1] - 1.
    """

    source: Words
    index: Labels
    keys: Labels
    starts: Integers
    nodes: Integers

    def of_nodes(self, chosen: Flags) -> Items:
        """Return the items of some nodes."""
        lengths = np.diff(self.starts)
        kept = np.repeat(chosen, lengths)
        starts = np.concatenate([[0], np.cumsum(lengths[chosen])])
        return Items(self.source, self.index[kept], self.keys[kept], starts, self.nodes[chosen])

    def of_range(self, first: int, stop: int) -> Items:
        """Return the items of nodes first..stop - 1; nothing is copied."""
        held = slice(self.starts[first], self.starts[stop])
        starts = self.starts[first : stop + 1] - self.starts[first]
        return Items(self.source, self.index[held], self.keys[held], starts, self.nodes[first:stop])


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a level whose products are held at one time: nodes first..stop - 1 in the columns of some blocks."""

    first: int
    stop: int
    blocks: slice


def level_pieces(blocks: list[Block], bins: Integers, sizes: Integers, most: int) -> list[Piece]:
    """Cut a level into pieces of at most `most` products, or of one node and block that have more, in order.

    A piece has several nodes and all blocks, or one node and neighbouring blocks. `bins` (features,) are the slots of
    each feature and `sizes` (nodes,) the rows of each node.
    """
    # a feature has at most as many products in a node as slots, and as rows
    bounds = np.zeros((len(blocks), len(sizes)), np.int64)
    for k, block in enumerate(blocks):
        bounds[k] = np.minimum(bins[block.columns], sizes[:, np.newaxis]).sum(axis=1)
    per_node = bounds.sum(axis=0)
    found, node = [], 0
    while node < len(sizes):
        if per_node[node] > most:
            found += [Piece(node, node + 1, part) for part in _runs(bounds[:, node].tolist(), most)]
            node += 1
            continue
        # as many nodes as fit, with all blocks
        reach = np.cumsum(per_node[node:])
        stop = node + int(np.searchsorted(reach, most, side="right"))
        found.append(Piece(node, stop, slice(0, len(blocks))))
        node = stop
    return found


def _runs(weights: list[int], most: int) -> list[slice]:
    """Cut a list into runs with a total of at most `most`, or of one element."""
    runs, first, total = [], 0, 0
    for k, weight in enumerate(weights):
        if k > first and total + weight > most:
            runs.append(slice(first, k))
            first, total = k, 0
        total += weight
    return [*runs, slice(first, len(weights))]


def bin_products(
    modulus: Modulus, groups: list[Group], offsets: Integers, rows: Items, threads: int
) -> tuple[Integers, Words]:
    """Multiply the ciphertexts in every bin of every node, except for empty and left-out bins.

    `groups` are top groups of one or more blocks; the keys of `rows` are table rows. Return the places node * slots +
    slot, ascending, and the products, packed Montgomery forms (products, words).
    """
    inner = max(1, threads // max(1, len(groups)))  # threads within a group, when there are few groups

    found = [(np.empty(0, np.int64), np.empty((0, modulus.words), np.uint64))]
    for part in concurrently(lambda group: _group_products(modulus, group, offsets, rows, inner), groups, threads):
        found += part
    places = np.concatenate([place for place, _ in found])
    order = np.argsort(places)
    return places[order], np.concatenate([products for _, products in found])[order]


def _group_products(
    modulus: Modulus, group: Group, offsets: Integers, items: Items, threads: int
) -> list[tuple[Integers, Words]]:
    """Return places and products of every column of a group."""
    # not a closure of `bin_products`: one that calls itself keeps its arrays until the next garbage collection
    keys = group.labels[items.keys].astype(np.int32, copy=False)
    taking = keys >= 0
    starts = np.concatenate([[0], np.cumsum(taking)])[items.starts]
    items = Items(items.source, items.index[taking], keys[taking], starts, items.nodes)
    cells = sort_cells(items.keys, items.starts, group.cells)
    found = []
    if group.parts:
        joint = LEAST_GAIN * _gains(group, items, cells) > np.diff(items.starts)
        if not joint.all():  # in these nodes the parts are cheaper one by one
            for part in group.parts:
                found += _group_products(modulus, part, offsets, items.of_nodes(~joint), threads)
            items = items.of_nodes(joint)
            cells = sort_cells(items.keys, items.starts, group.cells)
    products = _products(modulus, items, cells, threads)
    # the cells of a single column are its bins
    if not group.parts:
        node = np.repeat(items.nodes, np.diff(cells.node_starts))
        return [(node * offsets[-1] + offsets[group.feature] + cells.labels, products)]
    # the products of joint cells are the items of both parts
    own = np.arange(len(products), dtype=np.int32)
    joined = Items(products, own, cells.labels, cells.node_starts, items.nodes)
    for part in group.parts:
        found += _group_products(modulus, part, offsets, joined, threads)
    return found


def _gains(group: Group, items: Items, cells: SortedCells) -> Integers:
    """Count the products that each node saves by going through the cells of a joint group."""
    gains: Integers = np.diff(cells.node_starts) - np.diff(items.starts)
    for part in group.parts:
        gains += _per_node(part.labels[items.keys] >= 0, items.starts)
        gains -= _per_node(part.labels[cells.labels] >= 0, cells.node_starts)
    return gains


def _per_node(mask: Flags, starts: Integers) -> Integers:
    return np.diff(np.concatenate([[0], np.cumsum(mask)])[starts])


def _products(modulus: Modulus, items: Items, cells: SortedCells, threads: int) -> Words:
    out = np.empty((len(cells.labels), modulus.words), np.uint64)
    index = items.index[cells.items]
    # cuts between cells, so that every thread multiplies about as many ciphertexts
    cuts = np.searchsorted(cells.starts, np.linspace(0, len(index), threads + 1))
    cuts[0], cuts[-1] = 0, len(out)
    shares = [slice(a, b) for a, b in pairwise(cuts) if a < b]

    def some(share: slice) -> None:
        modulus.segment_products(items.source, index, cells.starts[share.start : share.stop + 1], out[share])

    concurrently(some, shares, threads)
    return out
