from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.compute import share
from treaty.trees.kernels import add_histograms, add_leaf_values, count_left, gather_pairs, look_up_left, scatter_rows


def _offsets(n_bins):
    return np.concatenate([[0], np.cumsum(np.asarray(n_bins) + 1)]).astype(np.int32)


def _naive_histograms(codes, grad, hess, nodes, features, offsets):
    sums = np.zeros((len(nodes), offsets[-1], 3), np.int64)
    for k, rows in enumerate(nodes):
        for feature in features:
            slots = offsets[feature] + codes[rows, feature].astype(np.int64)
            for part, values in enumerate((grad[rows], hess[rows], np.ones(len(rows), np.int64))):
                np.add.at(sums[k, :, part], slots, values)
    return sums


def _histograms(codes, grad, hess, nodes, features, offsets, threads=1):
    rows = np.concatenate([*nodes, np.zeros(0, np.int32)]).astype(np.int32)
    starts = np.cumsum([0, *(len(node) for node in nodes)])
    columns = np.ascontiguousarray(codes.T)
    pairs = np.full((len(rows), 2), 99, np.int64)
    sums = np.zeros((len(nodes), int(offsets[-1]), 3), np.int64)
    share(lambda a, b: gather_pairs(grad, hess, rows, a, b, pairs), len(rows), threads)

    def work(first, last):
        add_histograms(columns, pairs, rows, starts, features, offsets, first, last, sums)

    share(work, len(features), threads)
    return sums


@st.composite
def binned_nodes(draw):
    """A binned table, gradients, disjoint nodes (some empty, some rows in none) and a column sample."""
    n_rows = draw(st.integers(0, 60))
    n_bins = draw(st.lists(st.sampled_from([0, 1, 2, 7, 255]), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = rng.integers(0, np.array(n_bins) + 1, (n_rows, len(n_bins))).astype(np.uint8)
    grad = rng.integers(-(2**40), 2**40, n_rows)
    hess = rng.integers(0, 2**40, n_rows)
    n_nodes = draw(st.integers(1, 5))
    member = rng.integers(-1, n_nodes, n_rows)
    if draw(st.booleans()):
        member[member == n_nodes - 1] = -1
    nodes = [rng.permutation(np.flatnonzero(member == k)).astype(np.int32) for k in range(n_nodes)]
    features = np.flatnonzero(rng.random(len(n_bins)) < draw(st.sampled_from([0.5, 1.0]))).astype(np.int32)
    return codes, grad, hess, nodes, features, _offsets(n_bins)


@settings(deadline=None, max_examples=150)
@given(case=binned_nodes(), threads=st.integers(1, 4))
def test_histograms_equal_naive_sums_with_any_number_of_threads(case, threads):
    np.testing.assert_array_equal(_histograms(*case, threads=threads), _naive_histograms(*case))


@pytest.mark.parametrize("n_features", [1, 2, 3, 6, 7], ids=lambda n: f"{n}-features")
def test_histograms_of_many_rows_equal_naive_sums(n_features):
    rng = np.random.default_rng(n_features)
    n_bins = [255, 3, 1, 17, 2, 31, 5][:n_features]
    codes = rng.integers(0, np.array(n_bins) + 1, (20_000, n_features)).astype(np.uint8)
    grad, hess = rng.integers(-(2**16), 2**16, 20_000), rng.integers(0, 2**14, 20_000)
    nodes = [part.astype(np.int32) for part in np.split(rng.permutation(20_000), [1, 1, 9000, 12_000])]
    case = codes, grad, hess, nodes, np.arange(n_features, dtype=np.int32), _offsets(n_bins)
    expected = _naive_histograms(*case)
    for threads in (1, 2, 3):
        np.testing.assert_array_equal(_histograms(*case, threads=threads), expected)


def test_histograms_are_added_to_what_is_there():
    codes = np.array([[0], [1]], np.uint8)
    sums = np.full((1, 3, 3), 10, np.int64)
    pairs = np.array([[5, 2], [-7, 3]], np.int64)
    rows, starts, features = np.array([0, 1], np.int32), np.array([0, 2]), np.array([0], np.int32)
    add_histograms(np.ascontiguousarray(codes.T), pairs, rows, starts, features, _offsets([2]), 0, 1, sums)
    assert sums.tolist() == [[[15, 12, 11], [3, 13, 11], [10, 10, 10]]]


@settings(deadline=None, max_examples=60)
@given(case=binned_nodes(), share_left=st.floats(0, 1))
def test_histogram_subtraction_equals_direct_sums_of_the_sibling(case, share_left):
    codes, grad, hess, nodes, features, offsets = case
    parent = nodes[0]
    cut = round(share_left * len(parent))
    whole, left, right = _histograms(codes, grad, hess, [parent, parent[:cut], parent[cut:]], features, offsets)
    np.testing.assert_array_equal(whole - left, right)


@settings(deadline=None, max_examples=100)
@given(case=binned_nodes(), threads=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_look_up_left_decides_each_row_by_its_node(case, threads, seed):
    codes, _, _, nodes, _, offsets = case
    rng = np.random.default_rng(seed)
    features = rng.integers(0, len(offsets) - 1, len(nodes)).astype(np.int32)
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
