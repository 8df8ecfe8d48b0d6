"""Exact sums: bins of a partner's rows that an honest active party can deduce from the sums it opens.

Under every cipher of SecureBoost and FedXGBoost-SMM the active party gets, for each node, column and bin, the exact sum
of grad, sum of hess and number of rows. It knows the rows of each node and their gradients, and nearly every row has
gradients of its own after a few trees. So for each column it asks which rows can be in a bin:

* no row of a node is in a bin that has no rows there, apart from rows already known (elimination);
* if as many rows may be in a bin as it has rows, all of them are in it;
* if a bin lacks one, two or three rows (three among at most `MOST` gradients), these are among the rows that belong to
  as many whose gradients add up to what it lacks. If all but one to three of the rows that may be in it are in it, the
  others are among those that belong to as many whose gradients add up to the excess.

Sums of the nodes not asked about, parent minus sibling, are used, too. This is repeated until nothing changes. What is
found is certain, as the true rows of a bin always fit. It is a lower bound of what can be found: chosen splits, leaf
values, bins that lack four rows or more, and relations between columns are not used.

An active party that encrypts chosen numbers instead of gradients (powers of a base, for example) reads from the sums
which rows are in a bin. No cipher prevents that, as the active party is meant to learn the sums. So it commits to the
gradients of every tree when it sends them (`commit`); in a dispute an auditor, who may see labels and the key, has them
opened (`systems.vertical.audit_replay`). Passive parties learn nothing from a commitment.

References: Weng et al., "Practical Privacy Attacks on Vertical Federated Learning", 2020 (arXiv 2011.09290): an active
party that sends numbers of its own choice in place of gradients reads every bin (the reverse sum attack). In
`known_bins` it follows the protocol.
"""

from __future__ import annotations

import csv
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Flags, Floats, Int32s, Integers
from treaty.machine.kernels import kernel
from treaty.machine.process import concurrently

MOST = 600
"""Most different gradients among which triples are tried: among more, too many fit by chance."""


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """What the active party knows of a node: its `rows`, int32 (n,), and the `sums`, int64 (slots, 3), of a partner.

    `grad` and `hess`, int64 (n_rows,), are the tree's, of all rows. A column whose slots hold no rows was not drawn for
    the tree; a slot with a negative number of rows was not sent.
    """

    rows: Int32s
    grad: Integers
    hess: Integers
    sums: Integers


def known_bins(nodes: Sequence[OpenedNode], offsets: Int32s, n_rows: int, threads: int = 1) -> Integers:
    """Return the bin of each row in each column, int64 (n_rows, n_columns), -1 where it is not known for certain.

    `offsets`, int32 (n_columns + 1,), are the first slots of the columns.
    """
    if not nodes:
        return np.full((n_rows, len(offsets) - 1), -1)
    shift = _shift(nodes)
    # rows of a node by ascending key, so that sums can be searched for by bisection
    of_rows = [_keys(node.grad[node.rows], node.hess[node.rows], shift) for node in nodes]
    orders = [np.argsort(keys) for keys in of_rows]
    rows = np.concatenate([node.rows[order] for node, order in zip(nodes, orders, strict=True)])
    keys = np.concatenate([own[order] for own, order in zip(of_rows, orders, strict=True)])
    starts = np.cumsum([0, *(len(node.rows) for node in nodes)])
    totals = np.stack([_keys(node.sums[:, 0], node.sums[:, 1], shift) for node in nodes])
    counts = np.stack([node.sums[:, 2] for node in nodes])

    def of_column(slots: tuple[np.int32, np.int32]) -> Integers:
        first, stop = slots
        asked = np.asarray(counts[:, first:stop].any(axis=1))
        return _deduce(starts, rows, keys, totals[:, first:stop].copy(), counts[:, first:stop].copy(), asked, n_rows)

    return np.stack(concurrently(of_column, pairwise(offsets), threads), axis=1)


def _shift(nodes: Sequence[OpenedNode]) -> int:
    """Return by how many bits keys have grad above hess; 0, for grad alone, if three rows of both do not fit."""
    trees = {id(node.grad): node for node in nodes}.values()
    most_grad = 3 * max(int(np.abs(node.grad).max(initial=0)) for node in trees)
    bits = (3 * max(int(np.abs(node.hess).max(initial=0)) for node in trees)).bit_length() + 1
    return bits if most_grad.bit_length() + bits < 63 else 0


def _keys(grad: Integers, hess: Integers, shift: int) -> Integers:
    """Combine grad and hess into one number that adds up as they do, modulo 2^64 for many rows."""
    return (grad << shift) + hess if shift else grad.copy()


@kernel
def _deduce(
    starts: Integers, rows: Int32s, keys: Integers, totals: Integers, counts: Integers, asked: Flags, n_rows: int
) -> Integers:
    """Return each row's bin in a column (n_rows,), -1 where it is not known.

    Node k has ``rows[starts[k]:starts[k + 1]]`` by ascending key; `totals` and `counts` (nodes, bins) are its bins'
    sums of keys and numbers of rows, where it is `asked`.
    """
    n_nodes, n_bins = counts.shape
    # of each row: the bins it may be in, how many these are, the only one, and the visit that changed them last
    possible, left = np.ones((n_rows, n_bins), np.bool_), np.full(n_rows, n_bins)
    known, changed = np.full(n_rows, -1), np.zeros(n_rows, np.int64)
    # `time` counts visits; a node is looked at again only if one of its rows has changed since its last visit
    visited = np.full(n_nodes, -1)
    # bins of nodes that yield nothing more
    settled = counts < 0
    longest = 0
    for node in range(n_nodes):
        longest = max(longest, starts[node + 1] - starts[node])
    unknown, own = np.empty(longest, np.int64), np.empty((2, longest), np.int64)
    time, last_change = 0, 0
    # until every node has been visited since the last change
    while last_change >= time - n_nodes:
        node = time % n_nodes
        time += 1
        first, stop = starts[node], starts[node + 1]
        if not asked[node] or not _is_fresh(rows, first, stop, changed, visited[node]):
            continue
        # what changes now is new to this node, too
        visited[node] = time - 1
        # what the node's bins lack once the rows already known are taken out
        total, count = totals[node].copy(), counts[node].copy()
        n_unknown = n_untouched = 0
        for at in range(first, stop):
            row = rows[at]
            if known[row] >= 0:
                total[known[row]] -= keys[at]
                count[known[row]] -= 1
            else:
                unknown[n_unknown] = at
                n_unknown += 1
                n_untouched += left[row] == n_bins
        # or every bin lacks too many of too many rows
        if np.any(~settled[node] & ((count <= 3) | (n_untouched <= count + 3))):
            found = _visit(
                rows, keys, unknown[:n_unknown], own, total, count, settled[node], possible, left, known, changed, time
            )
            last_change = time if found else last_change
    return known


@kernel
def _is_fresh(rows: Int32s, first: int, stop: int, changed: Integers, visited: int) -> bool:
    """Whether one of a node's rows has changed since its last visit: else it would yield the same as before."""
    for at in range(first, stop):
        if changed[rows[at]] > visited:
            return True
    return visited < 0


@kernel
def _visit(
    rows: Int32s, keys: Integers, unknown: Integers, own: Integers, total: Integers, count: Integers, settled: Flags,
    possible: Flags, left: Integers, known: Integers, changed: Integers, time: int,
) -> bool:  # fmt: skip
    """Deduce bins of a node's unknown rows; return whether anything changed.

    `total` and `count` are what the bins lack. `own` is scratch space for rows and keys; the rest as in `_deduce`.
    """
    n_bins, any_change = len(count), False
    # how many rows may still be in each bin
    candidates = np.zeros(n_bins, np.int32)
    for k in range(len(unknown)):
        for number in range(n_bins):
            candidates[number] += possible[rows[unknown[k]], number]
    for number in range(n_bins):
        if settled[number] or (count[number] > 3 and candidates[number] - count[number] > 3):
            continue
        # `rest` is by how much the keys of all rows that may be in the bin exceed its sum
        n_may, rest = 0, -total[number]
        for k in range(len(unknown)):
            at = unknown[k]
            if possible[rows[at], number]:
                own[0, n_may], own[1, n_may] = rows[at], keys[at]
                rest += keys[at]
                n_may += 1
        # of `n_may` rows, `lacking` are in the bin and `over` are not: search for the fewer of both
        lacking, over = count[number], n_may - count[number]
        settled[number] = lacking == 0 or over == 0
        if over == 0:
            fits = np.zeros(n_may, np.bool_)
        elif lacking <= over:
            fits = _fitting(own[1, :n_may], total[number], lacking)
        else:
            fits = _fitting(own[1, :n_may], rest, over)
        for k in range(n_may):
            row = own[0, k]
            if fits[k] or known[row] >= 0:
                continue
            # a row that fits in no combination is not in the bin; or it is, if those outside were searched for
            if over > 0 and lacking <= over:
                possible[row, number] = False
                left[row] -= 1
            else:
                possible[row] = False
                possible[row, number] = True
                left[row] = 1
            changed[row] = time
            any_change = True
            if left[row] == 1:
                for bin in range(n_bins):
                    if possible[row, bin]:
                        known[row] = bin
    return any_change


@kernel
def _fitting(own: Integers, total: int, count: int) -> Flags:
    """Mark the keys, ascending, that belong to some `count` of these that add up to `total`; all where that is hard."""
    n = len(own)
    fits = np.zeros(n, np.bool_)
    if count == 0:
        return fits
    # equal keys are one value that several rows have
    values, first_of = np.empty(n, np.int64), np.empty(n + 1, np.int64)
    n_values = 0
    for k in range(n):
        if k == 0 or own[k] != own[k - 1]:
            values[n_values], first_of[n_values] = own[k], k
            n_values += 1
    first_of[n_values] = n
    if count > 3 or (count == 3 and n_values > MOST):
        fits[:] = True
        return fits
    fit = np.zeros(n_values, np.bool_)
    if count == 1:
        at = np.searchsorted(values[:n_values], total)
        if at < n_values and values[at] == total:
            fit[at] = True
    elif count == 2:
        _pairs(values, first_of, 0, n_values - 1, total, 0, fit)
    else:
        # three rows: fix one value, search for pairs among it and those above
        for k in range(n_values):
            if _pairs(values, first_of, k, n_values - 1, total - values[k], 1, fit):
                fit[k] = True
    for k in range(n_values):
        if fit[k]:
            fits[first_of[k] : first_of[k + 1]] = True
    return fits


@kernel
def _pairs(values: Integers, first_of: Integers, low: int, high: int, total: int, taken: int, fit: Flags) -> bool:
    """Mark values from `low` to `high` of which two add up to `total`; of the first, `taken` rows are spoken for."""
    found, least = False, low
    while low <= high:
        both = values[low] + values[high]
        if both < total:
            low += 1
        elif both > total:
            high -= 1
        else:
            needs = 2 if low == high else 1
            of_low = first_of[low + 1] - first_of[low] - (taken if low == least else 0)
            if of_low >= needs:
                fit[low] = fit[high] = True
                found = True
            low += 1
            high -= 1
    return found


# columns: rows, depth, trees, and the share of bins known of a column with so many bins
GRID = Path(__file__).with_name("exact_sums_grid.csv")

LONGER = 1.4
# A split between a column's fullest bin and its others shows at once who is in it, and is the more likely the rarer the
# others are: so much of its share counts as known, and of how far it is above one half. Fitted to real tables.
FULLEST, RARE = 0.3, 0.7


def estimated_share(counts: Sequence[NDArray[np.number]], depth: int, trees: float) -> float:
    """Estimate the share of bins, rows times columns, that an active party can deduce from exact sums.

    `counts` are the rows in each bin of each column; `trees` those that a column is drawn for, on average.
    """
    # in a column of one bin there is nothing to deduce
    counts = [of_column for of_column in counts if np.count_nonzero(of_column) > 1]
    if not counts:
        return 0.0
    rows, depths, most_trees, bins, shares = _grid()
    n_rows = sum(counts[0].tolist()) / LONGER / 2 ** max(0, depth - int(depths[-1]))
    of_depths = _between(np.log(rows), shares, np.log(n_rows))
    of_bins = _between(np.log(most_trees), _between(depths, of_depths, depth), np.log(trees))
    # how many equally full bins have the entropy of a column's
    occupied = [of_column[of_column > 0] / max(1, of_column.sum()) for of_column in counts]
    equal_bins = [np.exp(-(full * np.log(full)).sum()) for full in occupied]
    found = np.interp(np.log(equal_bins), np.log(bins), of_bins)
    fullest = np.array([of_column.max() / of_column.sum() for of_column in counts])
    split = np.maximum(FULLEST * fullest, RARE * (2 * fullest - 1)) if depth > 1 else np.zeros(len(counts))
    share = float(np.maximum(found * max(1.0, trees / most_trees[-1]), split).mean())
    return min(1.0, share * min(1.0, trees))


def _between(places: Floats, values: Floats, place: float) -> Floats:
    """Interpolate `values`, whose first axis is at `places`, at a place; they are constant beyond the ends."""
    after = int(np.clip(np.searchsorted(places, place), 1, len(places) - 1))
    part = np.clip((place - places[after - 1]) / (places[after] - places[after - 1]), 0.0, 1.0)
    return np.asarray((1.0 - part) * values[after - 1] + part * values[after])


@cache
def _grid() -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return the grid's rows, depths, trees, bins, and the shares by all four."""
    with GRID.open(newline="") as file:
        head, *lines = csv.reader(file)
    places = np.array([[float(field) for field in line] for line in lines])
    bins = np.array([1.0, *map(float, head[3:])])
    rows, depths, trees = (np.unique(column) for column in places[:, :3].T)
    # all rows of a column of one bin are known
    shares = np.ones((len(rows), len(depths), len(trees), len(bins)))
    shares[..., 1:] = places[np.lexsort(places[:, 2::-1].T), 3:].reshape(*shares.shape[:3], -1)
    return rows, depths, trees, bins, np.maximum.accumulate(shares, axis=2)


NONCE_BYTES = COMMITMENT_BYTES = 32
# separates this hash from all others
_LABEL = b"treaty gradients of a tree 1"


def commit(grad: Integers, hess: Integers, tree: int) -> tuple[bytes, bytes]:
    """Commit to a tree's grad and hess (n_sampled,) in the order of encryption; return commitment and nonce.

    The commitment, for the passive parties, is SHA-256 of nonce, the tree's number within its model, gradients and
    hessians. It is binding, and hides the gradients as long as the nonce is secret. The nonce, from the operating
    system's generator, is the opening, for the auditor alone.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    return _hash(nonce, grad, hess, tree), nonce


def check_opening(commitment: bytes, nonce: bytes, grad: Integers, hess: Integers, tree: int) -> bool:
    """Whether `nonce` opens `commitment` to these gradients; arguments as in `commit`."""
    return len(nonce) == NONCE_BYTES and grad.shape == hess.shape and _hash(nonce, grad, hess, tree) == commitment


def _hash(nonce: bytes, grad: Integers, hess: Integers, tree: int) -> bytes:
    assert grad.dtype == hess.dtype == np.int64
    message = hashlib.sha256(_LABEL + nonce + tree.to_bytes(8, "little"))
    message.update(grad.astype("<i8", copy=False).tobytes())
    message.update(hess.astype("<i8", copy=False).tobytes())
    return message.digest()
