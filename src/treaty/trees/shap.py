"""Exact path-dependent TreeSHAP from decisions alone: the child that a row takes at each record, never its values.

Lundberg et al., "From local explanations to global understanding with explainable AI for trees", Nature Machine
Intelligence 2020, Algorithm 2 (as XGBoost's ``pred_contribs``), with its permutation weights as an integral. On the
path to a leaf, each feature has a fraction z of the weight that follows the path (the product of its splits' shares)
and a bit o (the row takes all of them). With the leaf's value v, feature e gets::

    v (o_e - z_e) sum_S |S|! (m - |S| - 1)! / m! prod_{j in S} o_j prod_{j not in S} z_j
        = v (o_e - z_e) integral_0^1 prod_{j != e} ((1 - t) z_j + t o_j) dt

because the integral of t^s (1 - t)^(m - 1 - s) is s! (m - 1 - s)! / m!. Over S and j run the m - 1 other features of
the path; the integrand has degree m - 1, so Gauss-Legendre with ceil(m / 2) points is exact. At one point t the
products need one multiplication per edge on the way down and their sums over leaves one addition on the way up (as in
Yu et al., "Linear TreeSHAP", NeurIPS 2022), and no step subtracts numbers of equal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from treaty.machine.arrays import Bytes, Flags, Floats, Int32s, Integers
from treaty.machine.kernels import inner, kernel
from treaty.machine.shared_work import share
from treaty.trees.ensemble import Tree

# rows that go through a tree together; with fewer, loops are too short for vector instructions
ROWS = 128
# a node whose hessians sum to zero weighs 2^-80 of its rows
EMPTY = -80


def contributions(
    trees: Sequence[Tree], base: Integers, packed: Bytes, features: Int32s, *, n_rows: int, n_features: int,
    n_outputs: int, base_margins: Floats, threads: int = 1,
) -> Floats:  # fmt: skip
    """Return what each feature adds to each row's margin, float64 (n_outputs, n_rows, n_features + 1).

    `packed` and `base` are as in `ensemble.BitWalk`, `base_margins`, (n_outputs,), are those of the loss;
    `features`, int32 (n_records,), is the feature below `n_features` that each line of `packed` splits on. The last
    column is the bias, the mean margin by the trees' weights; the columns of a row add up to its margin (to 1e-12 of
    the leaves' sizes). The result is a view whose rows lie next to each other in memory.

    A child's share of its parent is that of `node_weights`: the cover's, as in XGBoost, but at most 1 (noisy sums may
    exceed it). XGBoost adds in float32; this is float64.
    """
    plan = _plan(trees, base, features)
    n_batches = -(-n_rows // ROWS)
    phi = np.zeros((n_outputs, n_features + 1, n_batches * ROWS))
    numbers = np.arange(len(trees)) % n_outputs
    phi[:, -1] = (base_margins + np.bincount(numbers, plan.expected, n_outputs))[:, None]
    share(lambda first, last: attribute_rows(packed, plan, first, last, phi), n_batches, threads, least=4)
    return phi[:, :, :n_rows].transpose(0, 2, 1)


def node_weights(tree: Tree) -> Floats:
    """Return the weight of each node (n_nodes,), above zero: its cover, or a tiny number if that is not above zero."""
    # in proportion to the rows, so that shares are defined in a subtree without hessians, where XGBoost fails
    return np.where(tree.cover > 0.0, tree.cover, np.ldexp(np.maximum(tree.count, 1).astype(np.float64), EMPTY))


class _Plan(NamedTuple):
    """The edges of all trees, parents before their subtrees and left before right: everything that rows share."""

    # (n_trees + 1,) first edge of each tree
    start: Integers
    # (n_trees,)
    expected: Floats
    # (n_edges,), as the next six: depth of the edge's lower end, and of the nearest edge above with the same feature (0
    # for none); line and feature of the split above
    depth: Integers
    seen: Integers
    line: Integers
    feature: Integers
    is_left: Flags
    leaf: Flags
    value: Floats
    # (n_edges, n_points, 3): the product over features is multiplied by a + b o_seen + c o
    factor: Floats
    # (n_edges, n_points, 2): leaves below count for the feature a o_seen + b o
    weight: Floats


def _plan(trees: Sequence[Tree], base: Integers, features: Int32s) -> _Plan:
    first = np.cumsum([0, *(len(tree.left) for tree in trees)])
    # a tree has one edge fewer than nodes
    start = first - np.arange(len(first))
    n_edges = int(start[-1])
    lines = [np.where(tree.source < 0, 0, base[np.maximum(tree.source, 0)] + tree.record) for tree in trees]
    places, flags, reals = np.zeros((4, n_edges), np.int64), np.zeros((2, n_edges), np.bool_), np.zeros((3, n_edges))
    expected = np.zeros(len(trees))
    most = list_edges(
        first,
        np.concatenate([tree.left for tree in trees] or [np.zeros(0, np.int32)]),
        np.concatenate(lines or [np.zeros(0, np.int64)]),
        np.concatenate([tree.value for tree in trees] or [np.zeros(0)]),
        np.concatenate([node_weights(tree) for tree in trees] or [np.zeros(0)]),
        features, places, flags, reals, expected,
    )  # fmt: skip
    depth, seen, line, feature = places
    is_left, leaf = flags
    value, fraction, fraction_seen = reals
    factor, weight = _at_points(fraction, fraction_seen, seen > 0, max(1, -(-most // 2)))
    return _Plan(start, expected, depth, seen, line, feature, is_left, leaf, value, factor, weight)


def _at_points(z: Floats, z_seen: Floats, repeated: Flags, n_points: int) -> tuple[Floats, Floats]:
    """Return `factor` and `weight` of `_Plan` at the points of Gauss-Legendre."""
    # A feature that occurs again replaces its factor f_seen by f. The edge above credits it once more for the leaves
    # below; its weight corrects that. Where o_seen = 0 both counts are the same.
    points, sizes = np.polynomial.legendre.leggauss(n_points)
    t, size = (points + 1.0) / 2.0, sizes / 2.0
    z, z_seen = z[:, None], z_seen[:, None]
    off, on, stays = z * (1.0 - t), z * (1.0 - t) + t, np.broadcast_to(z / z_seen, (len(z), n_points))
    # 1 for a feature not seen above: z_seen = 1
    on_seen = z_seen * (1.0 - t) + t
    factor = np.stack([stays, off / on_seen - stays, (on - off) / on_seen], axis=-1)
    count_off, count_on = -size / (1.0 - t), size * (1.0 - z) / on
    count_seen = np.where(repeated[:, None], size * (1.0 - z_seen) / on_seen, 0.0)
    return factor, np.stack([count_off - count_seen, count_on - count_off], axis=-1)


@kernel
def list_edges(
    first: Any, left: Any, lines: Any, values: Any, weights: Any, features: Any,
    places: Any, flags: Any, reals: Any, expected: Any,
) -> int:  # fmt: skip
    """Fill the arrays of `_Plan` from the trees' nodes; return the most features on one path.

    ``first`` is int64 (n_trees + 1,), ``left`` counts within the tree. Written are the lines of ``places`` (depth,
    seen, line, feature), ``flags`` (is_left, leaf) and ``reals``: value, and z of the edge's feature down to it and
    down to the edge `seen` above.
    """
    depth, seen, line, feature = places[0], places[1], places[2], places[3]
    is_left, leaf = flags[0], flags[1]
    value, fraction, fraction_seen = reals[0], reals[1], reals[2]
    deepest = 0
    for tree in range(expected.shape[0]):
        deepest = max(deepest, first[tree + 1] - first[tree])
    # the edge at each depth of the path, and its share of the root's weight
    on_path, reach = np.empty(deepest + 1, np.int64), np.empty(deepest + 1)
    distinct = np.zeros(deepest + 1, np.int64)
    # nodes still to be listed
    waiting, at_depth = np.empty(deepest + 1, np.int64), np.empty(deepest + 1, np.int64)
    most, edge = 0, 0
    for tree in range(expected.shape[0]):
        root = first[tree]
        if left[root] < 0:
            expected[tree] = values[root]
            continue
        reach[0] = 1.0
        parents = np.empty(first[tree + 1] - root, np.int64)
        waiting[0], waiting[1], at_depth[0], at_depth[1] = left[root] + 1, left[root], 1, 1
        parents[left[root]] = parents[left[root] + 1] = 0
        n_waiting = 2
        while n_waiting > 0:
            n_waiting -= 1
            node, d = waiting[n_waiting], at_depth[n_waiting]
            parent = root + parents[node]
            split = lines[parent]
            depth[edge], line[edge], feature[edge] = d, split, features[split]
            is_left[edge] = node == left[parent]
            value[edge] = values[root + node]
            part = min(1.0, weights[root + node] / weights[parent])
            above = d - 1
            while above > 0 and feature[on_path[above]] != features[split]:
                above -= 1
            seen[edge] = above
            fraction_seen[edge] = fraction[on_path[above]] if above > 0 else 1.0
            fraction[edge] = fraction_seen[edge] * part
            on_path[d], reach[d] = edge, reach[d - 1] * part
            distinct[d] = distinct[d - 1] + (above == 0)
            most = max(most, distinct[d])
            child = left[root + node]
            leaf[edge] = child < 0
            if child < 0:
                expected[tree] += reach[d] * values[root + node]
            else:
                parents[child] = parents[child + 1] = node
                waiting[n_waiting], waiting[n_waiting + 1] = child + 1, child
                at_depth[n_waiting] = at_depth[n_waiting + 1] = d + 1
                n_waiting += 2
            edge += 1
    return most


@kernel
def attribute_rows(packed: Any, plan: _Plan, first: int, last: int, phi: Any) -> None:
    """Add to ``phi`` (n_outputs, n_features + 1, n_batches * ROWS) the contributions of batches ``first..last``.

    All rows of a batch visit all edges of a tree in the same order, whatever their decisions.
    """
    start, _, depth, seen, line, feature, is_left, leaf, value, factor, weight = plan
    n_points = factor.shape[1]
    deepest = 0
    for edge in range(depth.shape[0]):
        deepest = max(deepest, depth[edge])
    # over the features of the path to each depth; and the sum of value * product over the leaves seen so far
    product, below = np.ones((deepest + 1, n_points, ROWS)), np.zeros((deepest + 1, n_points, ROWS))
    # o of the feature of each edge of the path, and 1 for left
    follows, goes = np.ones((deepest + 1, ROWS)), np.empty((deepest + 1, ROWS))
    opened = np.empty(deepest + 1, np.int64)
    for batch in range(first, last):
        rows = slice(batch * ROWS, (batch + 1) * ROWS)
        for tree in range(start.shape[0] - 1):
            of_output = phi[tree % phi.shape[0]]
            level, stop = 0, start[tree + 1]
            for edge in range(start[tree], stop + 1):
                d = depth[edge] if edge < stop else 1
                # no further leaves lie below the open edges
                while level >= d:
                    _give(
                        below[level], below[level - 1], follows[seen[opened[level]]], follows[level],
                        weight[opened[level]], of_output[feature[opened[level]], rows],
                    )  # fmt: skip
                    level -= 1
                if edge == stop:
                    break
                again = seen[edge]
                if is_left[edge]:
                    _unpack(packed[line[edge]], batch, goes[d])
                    for r in range(ROWS):
                        follows[d, r] = follows[again, r] * goes[d, r]
                else:
                    for r in range(ROWS):
                        follows[d, r] = follows[again, r] * (1.0 - goes[d, r])
                if leaf[edge]:
                    _give_leaf(
                        value[edge], product[d - 1], below[d - 1], follows[again], follows[d], factor[edge],
                        weight[edge], of_output[feature[edge], rows],
                    )  # fmt: skip
                    level = d - 1
                else:
                    _descend(product[d - 1], follows[again], follows[d], factor[edge], product[d])
                    below[d] = 0.0
                    opened[d], level = edge, d


@inner
def _unpack(bits: Any, batch: int, goes: Any) -> None:
    """Write the bits of a batch's rows as 0.0 and 1.0; rows past the end get 0."""
    for j in range(ROWS // 8):
        at = batch * (ROWS // 8) + j
        byte = np.int64(bits[at]) if at < bits.shape[0] else 0
        for k in range(8):
            goes[8 * j + k] = (byte >> (7 - k)) & 1


@inner
def _descend(above: Any, o_seen: Any, o: Any, factor: Any, product: Any) -> None:
    for q in range(factor.shape[0]):
        a, b, c = factor[q, 0], factor[q, 1], factor[q, 2]
        for r in range(ROWS):
            product[q, r] = above[q, r] * (a + b * o_seen[r] + c * o[r])


@inner
def _give(below: Any, above: Any, o_seen: Any, o: Any, weight: Any, phi: Any) -> None:
    """Credit an edge's feature for all leaves below, and pass their sum on."""
    for q in range(weight.shape[0]):
        a, b = weight[q, 0], weight[q, 1]
        for r in range(ROWS):
            total = below[q, r]
            phi[r] += total * (a * o_seen[r] + b * o[r])
            above[q, r] += total


@inner
def _give_leaf(value: float, product: Any, above: Any, o_seen: Any, o: Any, factor: Any, weight: Any, phi: Any) -> None:
    """Do `_descend` and `_give` at once."""
    for q in range(weight.shape[0]):
        a, b, c = value * factor[q, 0], value * factor[q, 1], value * factor[q, 2]
        d, e = weight[q, 0], weight[q, 1]
        for r in range(ROWS):
            total = product[q, r] * (a + b * o_seen[r] + c * o[r])
            phi[r] += total * (d * o_seen[r] + e * o[r])
            above[q, r] += total
