"""Products of ciphertexts over the bins of every column in every node of a level, along the groups of columns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.compute import concurrently
from treaty.crypto.joint_sums import LEAST_GAIN, Cells, Group, Index, Labels, sort_cells
from treaty.crypto.montgomery import Modulus

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Items:
    """Packed ciphertexts of several nodes, node after node.

    Parameters
    ----------
    source : ndarray of uint64, shape (any, words)
        Where the ciphertexts are; never copied.
    index : ndarray of int32, shape (items,)
        Row of `source` of each item.
    keys : ndarray of int32, shape (items,)
        What the groups' labels are indexed by: table rows, or cells of the group around.
    starts : ndarray of int64, shape (nodes + 1,)
        Items of node i: starts[i]..starts[i + 1] - 1.
    nodes : ndarray of int64, shape (nodes,)
        The nodes' numbers in the level.
    """

    source: Words
    index: Labels
    keys: Labels
    starts: Index
    nodes: Index

    def entering(self, group: Group) -> Items:
        """Items that take part in a group, with their cells in it as keys."""
        keys = group.labels[self.keys]
        taking = keys >= 0
        starts = np.concatenate([[0], np.cumsum(taking)])[self.starts]
        return Items(self.source, self.index[taking], keys[taking], starts, self.nodes)

    def of_nodes(self, chosen: NDArray[np.bool_]) -> Items:
        """Items of some of the nodes."""
        lengths = np.diff(self.starts)
        kept = np.repeat(chosen, lengths)
        starts = np.concatenate([[0], np.cumsum(lengths[chosen])])
        return Items(self.source, self.index[kept], self.keys[kept], starts, self.nodes[chosen])


def bin_products(
    modulus: Modulus, groups: list[Group], offsets: Index, rows: Items, threads: int
) -> tuple[Index, Words]:
    """Multiply the ciphertexts in every bin of every node, but for empty and left-out bins.

    Parameters
    ----------
    modulus : Modulus
        n.
    groups : list of Group
        Top groups of `joint_sums.plan_groups`.
    offsets : ndarray of int64, shape (features + 1,)
        First slot of each feature, and the number of slots.
    rows : Items
        The asked rows; keys are table rows.
    threads : int
        Threads to use.

    Returns
    -------
    places : ndarray of int64, shape (products,)
        node * slots + slot of each product, ascending.
    products : ndarray of uint64, shape (products, words)
        Packed Montgomery forms.
    """
    found: list[tuple[Index, Words]] = [(np.empty(0, np.int64), np.empty((0, modulus.words), np.uint64))]
    inner = max(1, threads // max(1, len(groups)))  # threads within a group, when there are few groups

    def visit(group: Group, items: Items) -> None:
        items = items.entering(group)
        cells = sort_cells(items.keys, items.starts, group.cells)
        if group.parts:
            joint = LEAST_GAIN * _gains(group, items, cells) > np.diff(items.starts)
            if not joint.all():  # in these nodes the parts are cheaper one by one
                for part in group.parts:
                    visit(part, items.of_nodes(~joint))
                items = items.of_nodes(joint)
                cells = sort_cells(items.keys, items.starts, group.cells)
        products = _products(modulus, items, cells, inner)
        if not group.parts:
            node = np.repeat(items.nodes, np.diff(cells.node_starts))
            found.append((node * offsets[-1] + offsets[group.feature] + cells.labels, products))
        own = np.arange(len(products), dtype=np.int32)
        for part in group.parts:
            visit(part, Items(products, own, cells.labels, cells.node_starts, items.nodes))

    concurrently(lambda group: visit(group, rows), groups, threads)
    places = np.concatenate([place for place, _ in found])
    order = np.argsort(places)
    return places[order], np.concatenate([products for _, products in found])[order]


def _gains(group: Group, items: Items, cells: Cells) -> Index:
    """Products that each node saves by going through the cells of a joint group."""
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
    """Product of each cell's items; cells are shared out so that every thread has about as many factors."""
    out = np.empty((len(cells.labels), modulus.words), np.uint64)
    index = items.index[cells.items]
    cuts = np.searchsorted(cells.starts, np.linspace(0, len(index), threads + 1))
    cuts[0], cuts[-1] = 0, len(out)
    shares = [slice(a, b) for a, b in pairwise(cuts) if a < b]

    def some(share: slice) -> None:
        modulus.segment_products(items.source, index, cells.starts[share.start : share.stop + 1], out[share])

    concurrently(some, shares, threads)
    return out
