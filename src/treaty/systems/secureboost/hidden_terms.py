"""Trees as sums of terms, one for each split of a passive party: what encrypted prediction adds up.

Let c(x) be the leaf value reached from node x when the active party's splits decide as they do and every passive
party's split sends right. Then a row's leaf value in a tree is

    c(root) + sum over passive splits v of  d(v) [row meets v's conditions]
    d(v) = c(left child of v) - c(right child of v) where the active party's splits lead to v, else 0
    v's conditions: left at v, and the side towards v at every passive split above it

so that the active party knows c(root) and all d(v), and passive parties know which conditions are met. Fed-EINI sends
one weight per leaf instead; a tree has one leaf more than it has splits, the active party's among them.

Values are integers in fixed point and sums exact. A plaintext has a field of 64 bits for each output; a term that
gains nothing is not 0 but `NO_GAIN` in every field, so that fields never go below zero, and the sum of n terms is n
times `NO_GAIN` too high whichever terms are kept.

References
----------
Chen X., Zhou S., Guan B., Yang K., Fan H., Wang H., Wang Y., Fed-EINI: An Efficient and Interpretable Inference
Framework for Decision Tree Ensembles in Vertical Federated Learning, IEEE Big Data 2021, arXiv 2105.09540.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.trees.ensemble import Tree

PRECISION_BITS = 40
"""Leaf values are rounded to this many bits below the largest. More would only make the sums easier to take apart."""

FIELD_BITS = 64
"""Room for the sum of one output's terms."""

NO_GAIN = 1 << (PRECISION_BITS + 1)
"""Encodes a gain of 0: gains are differences of two values, so each one plus this is in [0, 2 NO_GAIN]."""

MOST_TERMS = 1 << (FIELD_BITS - PRECISION_BITS - 3)
"""Most terms whose sum is sure to fit a field."""


@dataclass(frozen=True, slots=True)
class TreeTerms:
    """The nodes of some trees, one tree after the other, and the terms of their sum; all numbers are int64."""

    roots: NDArray[np.int64]  # (n_trees,) node number of each root
    levels: list[NDArray[np.int64]]  # inner nodes of each depth, the roots' first
    left: NDArray[np.int64]  # (n_nodes,) left child, the right one being the next; -1 in a leaf
    parent: NDArray[np.int64]  # (n_nodes,) -1 at a root
    source: NDArray[np.int64]  # (n_nodes,) as in `Tree`, -1 in a leaf; likewise `record`
    record: NDArray[np.int64]
    line: NDArray[np.int64]  # (n_nodes,) row of the active party's own decisions; -1 where the split is not its own
    value: NDArray[np.int64]  # (n_nodes,) fixed-point leaf value
    node: NDArray[np.int64]  # (n_terms,) each term's split, in random order: a term's number tells nothing of its place
    tree: NDArray[np.int64]  # (n_terms,) the tree of each term


def fixed_point(trees: Sequence[Tree]) -> int:
    """Return the exponent e with which every leaf value times 2^e is at most 2^PRECISION_BITS in size."""
    largest = max((float(np.abs(tree.value).max()) for tree in trees), default=0.0)
    return PRECISION_BITS - int(np.frexp(largest)[1])


def make_terms(trees: Sequence[Tree], own: int, own_records: NDArray[np.int32], exponent: int) -> TreeTerms:
    """Stack trees and find the terms; leaf values are rounded to multiples of 2^-exponent.

    `own` is the active party's source number, `own_records` (k,) are its records with decisions at hand, ascending.
    """
    sizes = [len(tree.left) for tree in trees]
    roots = np.cumsum([0, *sizes])[:-1]
    tree_of, first = np.repeat(np.arange(len(trees)), sizes), np.repeat(roots, sizes)
    left = np.concatenate([tree.left for tree in trees]).astype(np.int64)
    left = np.where(left < 0, -1, left + first)
    inner = np.flatnonzero(left >= 0)
    parent = np.full(len(left), -1)
    parent[left[inner]] = parent[left[inner] + 1] = inner
    source = np.concatenate([tree.source for tree in trees]).astype(np.int64)
    record = np.concatenate([tree.record for tree in trees]).astype(np.int64)
    levels, nodes = [], roots[left[roots] >= 0]
    while len(nodes):
        levels.append(nodes)
        below = np.concatenate([left[nodes], left[nodes] + 1])
        nodes = below[left[below] >= 0]
    node = np.flatnonzero((source >= 0) & (source != own)).tolist()
    secrets.SystemRandom().shuffle(node)
    value = np.ldexp(np.concatenate([tree.value for tree in trees]), exponent)
    return TreeTerms(
        roots=roots,
        levels=levels,
        left=left,
        parent=parent,
        source=source,
        record=record,
        line=np.where(source == own, np.searchsorted(own_records, record), -1),
        value=np.rint(value).astype(np.int64),
        node=np.array(node, np.int64),
        tree=tree_of[np.array(node, np.int64)],
    )


def values_and_gains(terms: TreeTerms, sides: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return c(root) (n_trees, n_rows) and d(v) (n_terms, n_rows) of some rows.

    `sides` (n_own_records, n_rows) are the active party's decisions, True for left.
    """
    n_rows = sides.shape[1]
    sides = np.concatenate([sides, np.zeros((1, n_rows), np.bool_)])  # line -1: passive parties' splits send right
    value = np.repeat(terms.value[:, None], n_rows, axis=1)
    for nodes in reversed(terms.levels):
        left = terms.left[nodes]
        value[nodes] = np.where(sides[terms.line[nodes]], value[left], value[left + 1])
    reached = np.zeros(value.shape, np.bool_)
    reached[terms.roots] = True
    for nodes in terms.levels:
        left, goes_left, anyway = terms.left[nodes], sides[terms.line[nodes]], terms.line[nodes, None] < 0
        reached[left] = reached[nodes] & (goes_left | anyway)
        reached[left + 1] = reached[nodes] & (~goes_left | anyway)
    left = terms.left[terms.node]
    return value[terms.roots], np.where(reached[terms.node], value[left] - value[left + 1], 0)


def pack_gains(gains: NDArray[np.int64], fields: NDArray[np.int64], n_fields: int) -> NDArray[np.uint64]:
    """Write gains (n_terms, n_rows) into plaintexts, uint64 (n_rows, n_terms, n_fields), term t's in ``fields[t]``."""
    plaintexts = np.full((gains.shape[1], len(gains), n_fields), NO_GAIN, np.uint64)
    plaintexts[:, np.arange(len(gains)), fields] = (gains.T + NO_GAIN).astype(np.uint64)
    return plaintexts


def unpack_sums(
    plaintexts: NDArray[np.uint64], n_rows: int, rows_each: int, n_fields: int, n_terms: int
) -> NDArray[np.int64]:
    """Take sums of `n_terms` gains apart, int64 (n_rows, n_fields); raise ValueError where one cannot be such a sum.

    `plaintexts` are uint64 (ceil(n_rows / rows_each), limbs), with `rows_each` rows in each, the first one highest.
    """
    used = rows_each * n_fields
    rows = plaintexts[:, :used].reshape(-1, rows_each, n_fields)[:, ::-1]
    lacking = len(plaintexts) * rows_each - n_rows  # in the last plaintext, where the highest places stay empty
    full, last = rows[:-1].reshape(-1, n_fields), rows[-1]
    sums = np.concatenate([full, last[lacking:]])
    if plaintexts[:, used:].any() or last[:lacking].any() or (sums > np.uint64(2 * NO_GAIN * n_terms)).any():
        raise ValueError(f"expected sums of {n_terms} terms")
    return sums.astype(np.int64) - NO_GAIN * n_terms


@dataclass(frozen=True, slots=True)
class Conditions:
    """What terms need of passive parties: a row's side at a record. Sorted by source, then term, then record."""

    term: NDArray[np.int64]  # (n_conditions,), and so are the others
    source: NDArray[np.int64]
    record: NDArray[np.int64]
    left: NDArray[np.bool_]  # the side


def find_conditions(terms: TreeTerms) -> Conditions:
    """Return every term's conditions, found on the way from its node to the root."""
    term, node, side = np.arange(len(terms.node)), terms.node, np.ones(len(terms.node), np.bool_)
    found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]] = []
    while not found or len(term):
        passive = terms.line[node] < 0
        found.append((term[passive], node[passive], side[passive]))
        above = terms.parent[node]
        side, term = (terms.left[above] == node)[above >= 0], term[above >= 0]
        node = above[above >= 0]
    terms_, nodes, sides = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort([terms.record[nodes], terms_, terms.source[nodes]])
    return Conditions(terms_[order], terms.source[nodes[order]], terms.record[nodes[order]], sides[order])


@dataclass(frozen=True, slots=True)
class Stop:
    """One passive party's share of the work on the terms."""

    source: int
    passed: NDArray[np.int64]  # terms it gets from the party before it
    fresh: NDArray[np.int64]  # those it is the first to see
    onwards: NDArray[np.bool_]  # (n_passed + n_fresh,) which of all these a later party needs; the others end here


def make_route(conditions: Conditions, n_terms: int) -> list[Stop]:
    """Send every term through the parties it has conditions at, in the order of the sources."""
    stops = np.unique(conditions.source)
    place = np.searchsorted(stops, conditions.source)
    first, last = np.full(n_terms, len(stops)), np.full(n_terms, -1)
    np.minimum.at(first, conditions.term, place)
    np.maximum.at(last, conditions.term, place)
    route: list[Stop] = []
    passed = np.zeros(0, np.int64)
    for number, source in enumerate(stops.tolist()):
        fresh = np.flatnonzero(first == number)
        here = np.concatenate([passed, fresh])
        route.append(Stop(source, passed, fresh, last[here] > number))
        passed = here[last[here] > number]
    return route
