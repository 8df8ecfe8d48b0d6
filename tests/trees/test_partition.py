from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.machine.shared_work import share
from treaty.trees import growth
from treaty.trees.growth import BLOCK, RowPartition, add_leaf_values, count_left, look_up_left, scatter_rows


class NaivePartition:
    """Two lists of rows a node: those of the sample, and the others."""

    def __init__(self, n_rows, sampled):
        sampled = list(range(n_rows)) if sampled is None else sampled.tolist()
        self.nodes = {0: (sampled, [row for row in range(n_rows) if row not in set(sampled)])}

    def divide(self, nodes, children, left_rows):
        for node, child in zip(nodes, children, strict=True):
            sampled, others = self.nodes[node]
            self.nodes[child] = ([r for r in sampled if r in left_rows], [r for r in others if r in left_rows])
            self.nodes[child + 1] = tuple([r for r in part if r not in left_rows] for part in (sampled, others))


def _check(rows: RowPartition, naive: NaivePartition, nodes):
    nodes = np.array(nodes, np.int32)
    for sampled in (True, False):
        got, starts = rows.rows(nodes, sampled=sampled)
        assert starts.dtype == np.int64
        for k, node in enumerate(nodes.tolist()):
            expected = naive.nodes[node][0] + ([] if sampled else naive.nodes[node][1])
            assert got[starts[k] : starts[k + 1]].tolist() == expected
        assert starts[-1] == len(got)
        every, same, firsts = rows.places(nodes, sampled=sampled)
        assert same.tolist() == starts.tolist()
        for k, first in enumerate(firsts.tolist()):
            np.testing.assert_array_equal(
                every[first : first + starts[k + 1] - starts[k]], got[starts[k] : starts[k + 1]]
            )


@settings(deadline=None, max_examples=80)
@given(
    n_rows=st.integers(0, 80),
    sample=st.sampled_from([None, 0.0, 0.5, 1.0]),
    block=st.sampled_from([1, 3, 16, BLOCK]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_children_hold_the_left_and_right_rows_in_order(n_rows, sample, block, threads, seed):
    rng = np.random.default_rng(seed)
    sampled = None if sample is None else np.flatnonzero(rng.random(n_rows) < sample).astype(np.int32)
    before = growth.BLOCK
    growth.BLOCK = block
    try:
        rows, naive = RowPartition(n_rows, sampled, threads), NaivePartition(n_rows, sampled)
        level, n_nodes = [0], 1
        for _ in range(4):
            _check(rows, naive, level)
            chosen = [node for node in level if rng.random() < 0.8]
            if not chosen:
                break
            children = n_nodes + 2 * np.arange(len(chosen))
            left_rows = set(np.flatnonzero(rng.random(n_rows) < rng.choice([0.0, 0.3, 1.0])).tolist())
            order, _ = rows.rows(np.array(chosen, np.int32), sampled=False)
            mask = np.array([row in left_rows for row in order.tolist()], np.bool_)
            rows.divide(np.array(chosen, np.int32), children.astype(np.int32), mask)
            naive.divide(chosen, children.tolist(), left_rows)
            level = [int(child) + side for child in children for side in (0, 1)]
            n_nodes += len(level)
        _check(rows, naive, level)
        _check(rows, naive, level[::-1])
    finally:
        growth.BLOCK = before


@pytest.mark.parametrize("threads", [1, 2, 5], ids=lambda n: f"{n}-threads")
@pytest.mark.parametrize("n_rows", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7], ids=lambda n: f"{n}-rows")
def test_children_of_nodes_longer_than_a_block_hold_their_rows_in_order(n_rows, threads):
    rng = np.random.default_rng(n_rows)
    sampled = np.flatnonzero(rng.random(n_rows) < 0.9).astype(np.int32)
    others = np.setdiff1d(np.arange(n_rows), sampled)
    goes_left = rng.random(n_rows) < 0.4
    rows = RowPartition(n_rows, sampled, threads)
    order, _ = rows.rows(np.array([0], np.int32), sampled=False)
    rows.divide(np.array([0], np.int32), np.array([1], np.int32), goes_left[order])
    for child, side in ((1, goes_left), (2, ~goes_left)):
        node = np.array([child], np.int32)
        np.testing.assert_array_equal(rows.rows(node, sampled=True)[0], sampled[side[sampled]])
        expected = np.concatenate([sampled[side[sampled]], others[side[others]]])
        np.testing.assert_array_equal(rows.rows(node, sampled=False)[0], expected)


def test_rows_of_no_nodes_are_none():
    got, starts = RowPartition(5).rows(np.zeros(0, np.int32), sampled=True)
    assert got.tolist() == []
    assert starts.tolist() == [0]


@pytest.mark.parametrize("threads", [1, 3], ids=lambda n: f"{n}-threads")
def test_leaf_values_reach_sampled_and_other_rows_once(threads):
    rows = RowPartition(7, np.array([1, 2, 5], np.int32), threads)
    root = np.array([0], np.int32)
    order, _ = rows.rows(root, sampled=False)
    rows.divide(root, np.array([1], np.int32), order >= 4)
    margins = np.arange(7.0)
    rows.add_to(margins, np.array([1, 2], np.int32), np.array([0.5, -0.25]))
    assert margins.tolist() == [-0.25, 0.75, 1.75, 2.75, 4.5, 5.5, 6.5]


@settings(deadline=None, max_examples=80)
@given(
    n_rows=st.integers(1, 80),
    sample=st.sampled_from([None, 0.5]),
    looked_at=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_leaf_values_reach_every_row_whether_or_not_it_was_moved_to_its_leaf(n_rows, sample, looked_at, threads, seed):
    rng = np.random.default_rng(seed)
    sampled = None if sample is None else np.flatnonzero(rng.random(n_rows) < sample).astype(np.int32)
    small, growth._SMALL = growth._SMALL, 1
    try:
        rows, naive, leaves, n_nodes = RowPartition(n_rows, sampled, threads), NaivePartition(n_rows, sampled), [0], 1
        for _ in range(rng.integers(0, 4)):
            chosen = [node for node in leaves if rng.random() < 0.6] or leaves[:1]
            children = n_nodes + 2 * np.arange(len(chosen))
            left_rows = set(np.flatnonzero(rng.random(n_rows) < rng.choice([0.0, 0.3, 1.0])).tolist())
            order, _ = rows.rows(np.array(chosen, np.int32), sampled=False)
            mask = np.array([row in left_rows for row in order.tolist()], np.bool_)
            rows.divide(np.array(chosen, np.int32), children.astype(np.int32), mask)
            naive.divide(chosen, children.tolist(), left_rows)
            leaves = sorted({*leaves, *children.tolist(), *(children + 1).tolist()} - set(chosen))
            n_nodes += 2 * len(chosen)
        if looked_at:  # which moves the rows
            _check(rows, naive, leaves)
        values = rng.normal(size=len(leaves))
        margins = np.zeros(n_rows)
        rows.add_to(margins, np.array(leaves, np.int32), values)
    finally:
        growth._SMALL = small
    expected = np.zeros(n_rows)
    for leaf, value in zip(leaves, values.tolist(), strict=True):
        for part in naive.nodes[leaf]:
            expected[part] = value
    np.testing.assert_array_equal(margins, expected)


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    n_bins=st.lists(st.sampled_from([1, 2, 3, 8, 256]), min_size=1, max_size=5),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_look_up_left_decides_each_row_by_its_node(sizes, n_bins, threads, seed):
    rng = np.random.default_rng(seed)
    n_rows = sum(sizes) + 5
    codes = rng.integers(0, np.array(n_bins), (n_rows, len(n_bins))).astype(np.uint8)
    nodes = np.split(rng.permutation(n_rows)[: sum(sizes)].astype(np.int32), np.cumsum(sizes)[:-1])
    features = rng.integers(0, len(n_bins), len(nodes)).astype(np.int32)
    left_bins = rng.random((len(nodes), 256)) < 0.5
    rows = np.concatenate(nodes)
    starts = np.cumsum([0, *(len(node) for node in nodes)])
    columns = np.ascontiguousarray(codes.T)
    left = np.zeros(len(rows), np.bool_)
    share(lambda a, b: look_up_left(columns, rows, starts, features, left_bins, a, b, left), len(rows), threads)
    expected = [left_bins[k, codes[row, features[k]]] for k, node in enumerate(nodes) for row in node]
    assert left.tolist() == expected


def test_count_left_counts_each_block():
    left = np.array([1, 0, 1, 1, 0, 0, 1], np.bool_)
    counts = np.full(4, -1, np.int64)
    count_left(left, np.array([0, 2, 4, 7]), np.array([2, 4, 7, 7]), 0, 4, counts)
    assert counts.tolist() == [1, 2, 1, 0]


def test_scatter_rows_keeps_the_order_of_both_sides():
    rows = np.array([9, 8, 7, 6, 5], np.int32)
    left = np.array([0, 1, 0, 1, 1], np.bool_)
    out = np.full(5, -1, np.int32)
    one = [np.array([value]) for value in (0, 0, 5, 0, 3)]
    scatter_rows(rows, left, *one, 0, 1, out)
    assert out.tolist() == [8, 6, 5, 9, 7]


def test_add_leaf_values_adds_to_the_rows_of_each_leaf():
    rows = np.array([3, 0, 2, 1], np.int32)
    margins = np.array([10.0, 20.0, 30.0, 40.0])
    add_leaf_values(rows, np.array([0, 3, 1]), np.array([1, 4, 1]), np.array([0.5, -1.0, 99.0]), 0, 3, margins)
    assert margins.tolist() == [10.0, 19.0, 30.0, 40.5]
