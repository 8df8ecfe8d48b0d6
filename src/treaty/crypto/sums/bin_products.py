"""Products of ciphertexts over the bins of every column in every node of a level, along the groups of columns.

`level_pieces` cuts a level into parts whose products are held at one time; `bin_products` makes those of one part. Of a
joint group each thread also holds the products of the cells, fewer in all than the part has rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.sums.joint_sums import LEAST_GAIN, Block, Cells, Group, Index, Labels, sort_cells
from treaty.parallel import concurrently

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Items:
    """Packed ciphertexts of several nodes, node after node: item i is row index[i] of `source`, which is never copied.

    `keys` are what the groups' labels are indexed by: table rows, or cells of the enclosing group. Node nodes[i] of the
    level has the items starts[i]..starts[i + 1] - 1.
    """

    source: Words
    index: Labels
    keys: Labels
    starts: Index
    nodes: Index

    def entering(self, group: Group) -> Items:
        """Return the items that take part in a group, with their cells in it as keys."""
        keys = group.labels[self.keys].astype(np.int32, copy=False)
        taking = keys >= 0
        starts = np.concatenate([[0], np.cumsum(taking)])[self.starts]
        return Items(self.source, self.index[taking], keys[taking], starts, self.nodes)

    def of_nodes(self, chosen: NDArray[np.bool_]) -> Items:
        lengths = np.diff(self.starts)
        kept = np.repeat(chosen, lengths)
        starts = np.concatenate([[0], np.cumsum(lengths[chosen])])
        return Items(self.source, self.index[kept], self.keys[kept], starts, self.nodes[chosen])

    def of_range(self, first: int, stop: int) -> Items:
        """Return the items of nodes first..stop - 1 in the order of the items; nothing is copied."""
        held = slice(self.starts[first], self.starts[stop])
        starts = self.starts[first : stop + 1] - self.starts[first]
        return Items(self.source, self.index[held], self.keys[held], starts, self.nodes[first:stop])


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a level whose products are held at one time: nodes first..stop - 1 in the columns of some blocks."""

    first: int
    stop: int
    blocks: slice


def level_pieces(blocks: list[Block], bins: Index, sizes: Index, most: int) -> list[Piece]:
    """Cut a level into pieces of at most `most` products, or of one node and block that have more, in order.

    A piece has several nodes and all blocks, or one node and neighbouring blocks. `bins` (features,) are slots of each
    feature and `sizes` (nodes,) rows of each node, which bound a feature's products there.
    """
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
    modulus: Modulus, groups: list[Group], offsets: Index, rows: Items, threads: int
) -> tuple[Index, Words]:
    """Multiply the ciphertexts in every bin of every node, except for empty and left-out bins.

    `groups` are top groups of one or more blocks of `joint_sums.plan_blocks`; the keys of `rows` are table rows.
    Returned are the places node * slots + slot, ascending, and the products, packed Montgomery forms (products, words).
    """
    inner = max(1, threads // max(1, len(groups)))  # threads within a group, when there are few groups

    def visit(group: Group) -> list[tuple[Index, Words]]:
        return _group_products(modulus, group, offsets, rows, inner)

    found = [(np.empty(0, np.int64), np.empty((0, modulus.words), np.uint64))]
    for part in concurrently(visit, groups, threads):
        found += part
    places = np.concatenate([place for place, _ in found])
    order = np.argsort(places)
    return places[order], np.concatenate([products for _, products in found])[order]


def _group_products(
    modulus: Modulus, group: Group, offsets: Index, items: Items, threads: int
) -> list[tuple[Index, Words]]:
    """Return places and products of every column of a group.

    Not a closure of `bin_products`: one that calls itself keeps its arrays until the next garbage collection.
    """
    items = items.entering(group)
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
    if not group.parts:
        node = np.repeat(items.nodes, np.diff(cells.node_starts))
        return [(node * offsets[-1] + offsets[group.feature] + cells.labels, products)]
    own = np.arange(len(products), dtype=np.int32)
    joined = Items(products, own, cells.labels, cells.node_starts, items.nodes)
    for part in group.parts:
        found += _group_products(modulus, part, offsets, joined, threads)
    return found


def _gains(group: Group, items: Items, cells: Cells) -> Index:
    """Count the products that each node saves by going through the cells of a joint group."""
    gains: Index = np.diff(cells.node_starts) - np.diff(items.starts)
    for part in group.parts:
        gains += _per_node(part.labels[items.keys] >= 0, items.starts)
        gains -= _per_node(part.labels[cells.labels] >= 0, cells.node_starts)
    return gains


def _per_node(mask: NDArray[np.bool_], starts: Index) -> Index:
    total = np.concatenate([[0], np.cumsum(mask)])
    counts: Index = total[starts[1:]] - total[starts[:-1]]
    return counts


def _products(modulus: Modulus, items: Items, cells: Cells, threads: int) -> Words:
    """Multiply each cell's items; cells are distributed so that every thread has about as many factors."""
    out = np.empty((len(cells.labels), modulus.words), np.uint64)
    index = items.index[cells.items]
    cuts = np.searchsorted(cells.starts, np.linspace(0, len(index), threads + 1))
    cuts[0], cuts[-1] = 0, len(out)
    shares = [slice(a, b) for a, b in pairwise(cuts) if a < b]

    def some(share: slice) -> None:
        modulus.segment_products(items.source, index, cells.starts[share.start : share.stop + 1], out[share])

    concurrently(some, shares, threads)
    return out
