from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.machine.shared_work import share
from treaty.trees import histograms
from treaty.trees.histograms import TABLES, Histograms, add_histograms, gather_pairs


def _naive(codes, grad, hess, nodes, features, offsets):
    sums = np.zeros((len(nodes), offsets[-1], 3), np.int64)
    for k, rows in enumerate(nodes):
        for feature in features:
            for part, values in enumerate((grad, hess, np.ones_like(grad))):
                np.add.at(sums[k, :, part], offsets[feature] + codes[rows, feature].astype(np.int64), values[rows])
    return sums


def _offsets(n_bins):
    return np.concatenate([[0], np.cumsum(np.asarray(n_bins) + 1)]).astype(np.int32)


def _codes(rng, n_rows, n_bins):
    return rng.integers(0, np.array(n_bins) + 1, (n_rows, len(n_bins))).astype(np.uint8)


def _source(codes, offsets, threads=1):
    return Histograms(codes, np.ascontiguousarray(codes.T), offsets, threads)


def _check(source, codes, grad, hess, nodes, features, offsets):
    source.start_tree(grad, hess, features)
    rows = np.concatenate([*nodes, np.zeros(0, np.int32)]).astype(np.int32)
    sums = source.sums(rows, np.cumsum([0, *(len(node) for node in nodes)]))
    np.testing.assert_array_equal(sums, _naive(codes, grad, hess, nodes, features, offsets))


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    n_rows=st.integers(0, 300),
    n_bins=st.lists(st.sampled_from([0, 1, 2, 7, 255]), min_size=1, max_size=2 * TABLES + 2),
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=4),
    n_nodes=st.integers(1, 4),
    kept=st.sampled_from([0.5, 0.9, 1.0]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_sums_of_one_tree_after_another_are_exact_however_large_the_gradients(
    n_rows, n_bins, sizes, n_nodes, kept, threads, seed
):
    rng = np.random.default_rng(seed)
    codes, offsets = _codes(rng, n_rows, n_bins), _offsets(n_bins)
    source = _source(codes, offsets, threads)
    for grad_bits, hess_bits in sizes:
        grad = rng.integers(-(2**grad_bits), 2**grad_bits, n_rows, endpoint=True)
        hess = rng.integers(0, 2**hess_bits, n_rows, endpoint=True)
        member = rng.integers(-1, n_nodes, n_rows)
        nodes = [rng.permutation(np.flatnonzero(member == k)).astype(np.int32) for k in range(n_nodes)]
        features = np.flatnonzero(rng.random(len(n_bins)) < kept).astype(np.int32)
        _check(source, codes, grad, hess, nodes, features, offsets)


@pytest.mark.parametrize("hess", [0, 1, 2**14, 2**15 - 1, 2**15, 2**16 - 1, 2**20 - 1], ids=lambda h: f"hess-{h}")
@pytest.mark.parametrize(
    "grad", [-(2**18), -1, 0, 2**16, 2**18 - 1, 2**18, 2**19 - 1, -(2**20)], ids=lambda g: f"grad-{g}"
)
def test_no_field_of_a_word_runs_over_when_all_rows_share_a_bin_and_the_largest_gradient(grad, hess):
    n_rows = 5000
    codes, offsets = np.zeros((n_rows, 2), np.uint8), _offsets([1, 1])
    source = _source(codes, offsets)
    source.start_tree(np.full(n_rows, grad), np.full(n_rows, hess), np.arange(2, dtype=np.int32))
    sums = source.sums(np.arange(n_rows, dtype=np.int32), np.array([0, 1, 2048, n_rows]))
    for k, rows in enumerate((1, 2047, n_rows - 2048)):
        assert sums[k].tolist() == [[rows * grad, rows * hess, rows], [0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("grad", "hess", "packed"),
    [
        pytest.param(2**16, 2**14, True, id="unweighted"),
        pytest.param(2**27 - 1, 2**15 - 1, True, id="as-many-bits-as-there-may-be"),
        pytest.param(2**27, 2**15 - 1, False, id="one-bit-more"),
        pytest.param(2**61, 2**61, False, id="largest"),
        pytest.param(1, -1, False, id="negative-hess"),
    ],
)
def test_only_gradients_that_fit_a_word_are_packed(monkeypatch, grad, hess, packed):
    calls = []
    add_packed = histograms.add_packed
    monkeypatch.setattr(histograms, "add_packed", lambda *args: calls.append(None) or add_packed(*args))
    rng = np.random.default_rng(0)
    codes, offsets = _codes(rng, 40, [3, 5]), _offsets([3, 5])
    grads, hesses = np.ones(40, np.int64), np.ones(40, np.int64)
    grads[17], hesses[5] = grad, hess
    nodes = [np.arange(30, dtype=np.int32), np.arange(30, 40, dtype=np.int32)]
    _check(_source(codes, offsets), codes, grads, hesses, nodes, np.arange(2, dtype=np.int32), offsets)
    assert bool(calls) == packed


@pytest.mark.parametrize("threads", [1, 2, 3], ids=lambda n: f"{n}-threads")
def test_sums_of_many_rows_and_features_are_exact_with_any_number_of_threads(threads):
    rng = np.random.default_rng(threads)
    n_bins = [255, 3, 1, 17, 2, 31, 5] * 4
    codes, offsets = _codes(rng, 20_000, n_bins), _offsets(n_bins)
    grad, hess = rng.integers(-(2**16), 2**16, 20_000), rng.integers(0, 2**14, 20_000)
    nodes = [part.astype(np.int32) for part in np.split(rng.permutation(20_000), [1, 1, 9000, 12_000])]
    features = np.delete(np.arange(len(n_bins), dtype=np.int32), [4, 20])
    _check(_source(codes, offsets, threads), codes, grad, hess, nodes, features, offsets)


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
    np.testing.assert_array_equal(_histograms(*case, threads=threads), _naive(*case))


@pytest.mark.parametrize("n_features", [1, 2, 3, 6, 7], ids=lambda n: f"{n}-features")
def test_histograms_of_many_rows_equal_naive_sums(n_features):
    rng = np.random.default_rng(n_features)
    n_bins = [255, 3, 1, 17, 2, 31, 5][:n_features]
    codes = rng.integers(0, np.array(n_bins) + 1, (20_000, n_features)).astype(np.uint8)
    grad, hess = rng.integers(-(2**16), 2**16, 20_000), rng.integers(0, 2**14, 20_000)
    nodes = [part.astype(np.int32) for part in np.split(rng.permutation(20_000), [1, 1, 9000, 12_000])]
    case = codes, grad, hess, nodes, np.arange(n_features, dtype=np.int32), _offsets(n_bins)
    expected = _naive(*case)
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


@pytest.mark.parametrize("threads", [1, 2, 3], ids=["1-thread", "2-threads", "3-threads"])
@pytest.mark.parametrize("grad_bits", [16, 40], ids=["packed", "too-large-for-words"])
def test_sums_of_nodes_that_lie_anywhere_among_the_rows_are_those_of_their_rows(threads, grad_bits):
    rng = np.random.default_rng(grad_bits)
    codes, offsets = _codes(rng, 30_000, [255, 3, 17]), _offsets([255, 3, 17])
    grad, hess = rng.integers(-(2**grad_bits), 2**grad_bits, 30_000), rng.integers(0, 2**14, 30_000)
    rows = rng.permutation(30_000).astype(np.int32)
    firsts, sizes = np.array([20_000, 100, 400, 400, 5000]), np.array([9000, 300, 0, 4000, 12_000])
    source = _source(codes, offsets, threads)
    source.start_tree(grad, hess, np.arange(3, dtype=np.int32))
    sums = source.sums(rows, np.concatenate([[0], np.cumsum(sizes)]), firsts)
    nodes = [rows[first : first + size] for first, size in zip(firsts, sizes, strict=True)]
    np.testing.assert_array_equal(sums, _naive(codes, grad, hess, nodes, range(3), offsets))
