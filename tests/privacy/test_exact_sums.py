"""Bins worked out from exact sums: known truth, certainty, and what a federated job's active party really opens."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from treaty.privacy.exact_sums import OpenedNode, known_bins

Ints = NDArray[np.int64]


def opened(
    codes: Ints,
    sizes: list[int],
    rows: Ints,
    grad: Ints,
    hess: Ints,
) -> OpenedNode:
    """Add up the columns' bins over some rows."""
    offsets = np.cumsum([0, *sizes])
    sums = np.zeros((offsets[-1], 3), np.int64)
    for first, column in zip(offsets[:-1], codes.T, strict=True):
        np.add.at(sums, first + column[rows], np.stack([grad, hess, np.ones_like(grad)], axis=1)[rows])
    return OpenedNode(rows.astype(np.int32), grad, hess, sums)


def offsets_of(sizes: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *sizes]).astype(np.int32)


def drawn(n_rows: int, seed: int = 0, bound: int = 1 << 20) -> tuple[Ints, Ints]:
    """Draw gradients and hessians of which no few add up to what others do, but by chance."""
    rng = np.random.default_rng(seed)
    return rng.integers(-bound, bound, n_rows), rng.integers(1, bound, n_rows)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_of_a_bin_with_one_to_three_rows_are_found(count: int) -> None:
    grad, hess = drawn(12)
    codes = np.zeros((12, 1), np.int64)
    codes[4 : 4 + count] = 1
    found = known_bins([opened(codes, [2], np.arange(12), grad, hess)], offsets_of([2]), 12)
    np.testing.assert_array_equal(found, codes)


def test_of_a_bin_with_all_but_a_few_rows_these_few_are_found() -> None:
    grad, hess = drawn(40)
    codes = np.zeros((40, 1), np.int64)
    codes[[3, 9, 20, 31], 0] = [1, 1, 2, 2]
    nodes = [opened(codes, [3], np.arange(40), grad, hess)]
    np.testing.assert_array_equal(known_bins(nodes, offsets_of([3]), 40), codes)


def test_empty_bins_leave_one_bin_to_a_row() -> None:
    codes = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])[:, None]
    same = np.ones(12, np.int64)  # gradients that tell no row
    halves = [np.arange(4), np.arange(4, 8), np.arange(6, 12)]
    found = known_bins([opened(codes, [3], rows, same, same) for rows in halves], offsets_of([3]), 12)
    np.testing.assert_array_equal(found[:8], codes[:8])  # rows 0 to 7 are in nodes of one bin
    assert (found[8:] == -1).all() or (found == codes)[found >= 0].all()


def test_rows_that_cannot_be_told_apart_stay_unknown() -> None:
    grad, hess = drawn(10)
    grad[7], hess[7] = grad[2], hess[2]
    codes = np.zeros((10, 1), np.int64)
    codes[2] = 1
    found = known_bins([opened(codes, [2], np.arange(10), grad, hess)], offsets_of([2]), 10)
    assert (found[[2, 7]] == -1).all()
    assert (np.delete(found, [2, 7]) == 0).all()


def test_two_rows_of_one_gradient_in_a_bin_are_found() -> None:
    grad, hess = drawn(30)
    grad[5], hess[5] = grad[4], hess[4]
    codes = np.zeros((30, 1), np.int64)
    codes[[4, 5, 11]] = 1
    found = known_bins([opened(codes, [2], np.arange(30), grad, hess)], offsets_of([2]), 30)
    np.testing.assert_array_equal(found, codes)


def test_siblings_by_subtraction_tell_more() -> None:
    rng = np.random.default_rng(3)
    codes, (grad, hess) = rng.integers(0, 4, (60, 1)), drawn(60)
    small, large = np.arange(48), np.arange(48, 60)
    alone = known_bins([opened(codes, [4], small, grad, hess)], offsets_of([4]), 60)
    both = known_bins([opened(codes, [4], rows, grad, hess) for rows in (small, large)], offsets_of([4]), 60)
    assert (both >= 0).sum() > (alone >= 0).sum()
    assert (both == codes)[both >= 0].all()


def test_columns_not_drawn_for_a_tree_tell_nothing() -> None:
    grad, hess = drawn(6)
    codes = np.array([[0, 0], [0, 0], [0, 0], [0, 1], [1, 1], [1, 1]])
    node = opened(codes, [2, 2], np.arange(6), grad, hess)
    node.sums[2:] = 0
    found = known_bins([node], offsets_of([2, 2]), 6)
    np.testing.assert_array_equal(found[:, 0], codes[:, 0])
    assert (found[:, 1] == -1).all()
    assert known_bins([], offsets_of([2, 2]), 6).tolist() == [[-1, -1]] * 6


@pytest.mark.parametrize("bound", [3, 1 << 10, 1 << 20, 1 << 38])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_is_certain(bound: int, seed: int) -> None:
    """Of small gradients many rows add up alike, and large ones do not fit a word with hess: neither misleads."""
    rng = np.random.default_rng(seed)
    codes, (grad, hess) = np.stack([rng.integers(0, size, 80) for size in (2, 5, 16)], axis=1), drawn(80, seed, bound)
    nodes = [opened(codes, [2, 5, 16], rng.choice(80, size, replace=False), grad, hess) for size in (60, 30, 20, 10, 5)]
    found = known_bins(nodes, offsets_of([2, 5, 16]), 80)
    assert (found == codes)[found >= 0].all()
    assert bound == 3 or (found >= 0).any()


@pytest.mark.parametrize("seed", range(20))
def test_no_bin_is_called_known_that_another_table_with_the_same_sums_has_otherwise(seed: int) -> None:
    """All tables of a few rows are tried; what is found is the same in each that has the opened sums."""
    rng = np.random.default_rng(seed)
    n_rows, bins = 7, 2
    grad, hess = rng.integers(-2, 3, n_rows), np.ones(n_rows, np.int64)
    codes, rows = rng.integers(0, bins, (n_rows, 1)), np.arange(n_rows)
    nodes = [opened(codes, [bins], part, grad, hess) for part in (rows, rng.choice(n_rows, 4, replace=False))]
    found = known_bins(nodes, offsets_of([bins]), n_rows)[:, 0]
    for count in range(n_rows + 1):
        for ones in combinations(range(n_rows), count):
            other = np.isin(rows, ones).astype(np.int64)[:, None]
            if all(np.array_equal(opened(other, [bins], n.rows, grad, hess).sums, n.sums) for n in nodes):
                assert (other[:, 0] == found)[found >= 0].all()
