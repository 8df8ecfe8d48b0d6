"""The best split where totals are shared, too, left sums, and leaf weights, against plain whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.sealed.test_sealed import opened, play, shared
from crypto.sealed.watching import again, assert_refuses_garbage, filled
from treaty.crypto.payload import SumsBounds
from treaty.crypto.transfer.hidden_best import WEIGHT_BITS, SplitTerms, best_of_hidden, left_sums, weights_of
from treaty.crypto.transfer.sealed_sums import Widths
from treaty.crypto.transfer.stock import Transfers, open_transfers
from treaty.errors import CryptoError
from treaty.trees.splits import WHOLE_LIMIT, bound, fraction, whole_weights

Ends = tuple[Transfers, Transfers]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


def sums_shared(sums: np.ndarray) -> list[np.ndarray]:
    """Share grad, hess and count, (..., 3), modulo 2^128."""
    return [of.reshape(*sums.shape, 2) for of in shared([int(x) % (1 << 128) for x in sums.ravel()], 128)]


def plain_best(
    left: np.ndarray, totals: np.ndarray, owners: np.ndarray, terms: SplitTerms
) -> list[tuple[int, int, int, int]]:
    """Return numerator, denominator, number and owner of each node's best, as the plain grower compares them."""
    out = []
    for of_node, whole in zip(left, totals, strict=True):
        best = (*bound(whole, terms.ridge, float(terms.threshold)), 0, 0)
        for number, of_left in enumerate(of_node):
            children = of_left, whole - of_left
            fits = all(child[1] >= terms.least_hess and child[2] >= terms.least_rows for child in children)
            top, below = fraction(whole, of_left, terms.ridge)
            if fits and top * best[1] > best[0] * below:
                best = top, below, number, int(owners[number])
        out.append(best)
    return out


def best(ends: Ends, left: np.ndarray, totals: np.ndarray, owners: np.ndarray, terms: SplitTerms, widths: Widths,
         step: int = 1) -> list[tuple[int, ...]]:  # fmt: skip
    of_left, of_totals = sums_shared(left), sums_shared(totals)
    found = play(*(
        best_of_hidden(ends[k], of_left[k], of_totals[k], owners, terms, widths, k, step) for k in (0, 1)
    ))  # fmt: skip
    parts = (opened([of[:, part] for of in found], bits) for part, bits in enumerate(widths.of_entry))
    return list(zip(*parts, strict=True))


def nodes_of(
    bounds: SumsBounds, nodes: int, candidates: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw sums of candidates' left children, (nodes, candidates, 3), and of nodes; many are equal or at a limit."""
    rows = rng.integers(1, bounds.n_rows + 1, nodes)

    def within(counts: np.ndarray) -> np.ndarray:
        kind = rng.integers(0, 4, counts.shape)
        near = np.where(kind == 0, 0, bounds.hess_bound * counts)
        hess = np.where(kind < 2, near, rng.integers(0, counts * bounds.hess_bound + 1))
        side = np.where(kind == 3, rng.choice([-1, 0, 1], counts.shape) * counts * bounds.grad_bound, 0)
        grad = np.where(kind == 3, side, rng.integers(-counts * bounds.grad_bound, counts * bounds.grad_bound + 1))
        return np.stack([grad, hess, counts], axis=-1)

    count = rng.integers(0, rows[:, None] + 1, (nodes, candidates))
    count = np.where(rng.random(count.shape) < 0.2, rng.choice([0, 1], count.shape) * rows[:, None], count)
    left = within(count)
    # the other child of the first candidate decides on the whole; of others it must be possible, too
    totals = left[:, 0] + within(rows - count[:, 0])
    most = (totals[:, None, 2] - count)[..., None] * np.array([bounds.grad_bound, bounds.hess_bound])
    low = np.stack([totals[:, None, 0] - most[..., 0], totals[:, None, 1] - most[..., 1]], axis=-1)
    high = np.stack([totals[:, None, 0] + most[..., 0], np.broadcast_to(totals[:, None, 1], count.shape)], axis=-1)
    left[..., :2] = np.clip(left[..., :2], low, high)
    return left[:, rng.permutation(np.repeat(np.arange(candidates), 2)[:candidates])], totals


@settings(max_examples=60)
@given(
    st.sampled_from([(3, 2, 1), (40, 4, 3), (50_000, 1 << 16, 17040), (2**26, 1 << 16, 17040)]), st.integers(1, 4),
    st.integers(1, 12), st.sampled_from([1, 3, 1 << 16, 1 << 24]), st.integers(1, 300), st.integers(0, 1 << 32),
)  # fmt: skip
def test_best_is_the_plain_one(
    ends: Ends, limits: tuple[int, int, int], nodes: int, candidates: int, ridge: int, step: int, seed: int
) -> None:
    """With ties, nodes without a split, limits that children miss or just meet, or that nothing can meet."""
    rng, bounds = np.random.default_rng(seed), SumsBounds(*limits)
    left, totals = nodes_of(bounds, nodes, candidates, rng)
    some = left[rng.integers(nodes), rng.integers(candidates)]
    least = [int(rng.choice([0, 1, int(some[part]), int(some[part]) + 1, 1 << 40])) for part in (1, 2)]
    terms = SplitTerms(ridge, *least)
    owners = np.sort(rng.integers(1, 3, candidates).astype(np.uint8))[:: rng.choice([-1, 1])].copy()
    found = best(ends, left, totals, owners, terms, Widths.of(bounds, ridge), step)
    assert found == plain_best(left, totals, owners, terms)


@settings(max_examples=60)
@given(
    st.sampled_from([(3, 2, 1), (40, 4, 3), (50_000, 1 << 16, 17040), (2**26, 1 << 16, 17040)]),
    st.sampled_from([1, 2, 3, 1 << 16, 1 << 24]), st.sampled_from([-1, 0, 1]), st.integers(0, 1 << 32),
)  # fmt: skip
def test_a_split_gains_more_than_the_threshold(
    ends: Ends, limits: tuple[int, int, int], ridge: int, by: int, seed: int
) -> None:
    """Near the gain of one of the splits, and to the unit."""
    rng, bounds = np.random.default_rng(seed), SumsBounds(*limits)
    left, totals = nodes_of(bounds, 3, 5, rng)
    whole = totals[0]
    top, below = fraction(whole, left[0, rng.integers(5)], ridge)
    of_node, of_hess = bound(whole, ridge, 0.0)
    gain = (top * of_hess - of_node * below) // (below * of_hess * (int(whole[1]) + 2 * ridge))
    terms = SplitTerms(ridge, 0, 0, int(float(max(1, gain + by))))
    found = best(ends, left, totals, np.ones(5, np.uint8), terms, Widths.of(bounds, ridge))
    assert found == plain_best(left, totals, np.ones(5, np.uint8), terms)


@pytest.mark.parametrize("threshold", [1 << 74, 1 << 90, 10**40])
@pytest.mark.parametrize("ridge", [1, 3, 1 << 16])
def test_no_split_gains_what_none_can(ends: Ends, ridge: int, threshold: int) -> None:
    """Not by a numerator that wraps around either, at sums that are as large as can be."""
    bounds = SumsBounds(1 << 20, 1 << 16, 17040)
    n, g, h = bounds.n_rows, bounds.grad_bound, bounds.hess_bound
    half = n // 2
    left = np.array([[[g * half, 0, half], [g * half, h * half, half]], [[0, 0, 0], [g * half, h * half, half]]])
    totals = np.array([[0, 0, n], [g * n, h * n, n]])
    found = best(ends, left, totals, np.ones(2, np.uint8), SplitTerms(ridge, 0, 0, threshold), Widths.of(bounds, ridge))
    assert [of[3] for of in found] == [0, 0]


def test_the_first_of_equal_splits_wins_and_one_without_gain_does_not(ends: Ends) -> None:
    left = np.array([[[0, 8, 8], [4, 4, 4], [4, 4, 4], [-4, 4, 4]], [[2, 2, 2], [2, 2, 2], [3, 3, 3], [1, 1, 1]]])
    totals, owners = np.array([[0, 8, 8], [8, 8, 8]]), np.array([1, 1, 2, 2], np.uint8)
    found = best(ends, left, totals, owners, SplitTerms(1, 0, 1), Widths.of(SumsBounds(8, 1, 1), 1))
    # of the second node both children always have the node's own weight, but for the ridge
    assert [of[2:] for of in found] == [(1, 1), (0, 0)]


@pytest.mark.parametrize("least", [(0, 1 << 20), (1 << 50, 1), (0, 11), (0, 17), (0, 100), (21, 1), (100, 1)])
def test_no_split_has_more_than_all_rows_or_hess(ends: Ends, least: tuple[int, int]) -> None:
    bounds = SumsBounds(10, 4, 2)
    left = np.array([[[-4 * k, 2 * k, k] for k in range(11)]])
    found = best(
        ends, left, np.array([[0, 20, 10]]), np.ones(11, np.uint8), SplitTerms(1, *least), Widths.of(bounds, 1)
    )  # fmt: skip
    assert [of[3] for of in found] == [0]


# ---------------------------------------------------------------- left sums


@settings(max_examples=30)
@given(st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 5, 31, 32, 33, 70]), st.integers(0, 1 << 32))
def test_left_sums_are_the_winners(ends: Ends, nodes: int, candidates: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left = rng.integers(-(1 << 62), 1 << 62, (nodes, candidates, 3))
    owners, numbers = rng.integers(0, 3, nodes).astype(np.uint8), rng.integers(0, candidates, nodes)
    shares = sums_shared(left)
    own = [np.where(owners == 1 + k, numbers, -1) for k in (0, 1)]
    found = play(*(left_sums(ends[k], shares[k], owners, own[k], k) for k in (0, 1)))
    expected = np.where(owners[:, None] > 0, left[np.arange(nodes), numbers, :2], 0)
    assert np.array_equal((found[0] + found[1]).view(np.int64), expected)


# ---------------------------------------------------------------- leaf weights


def weights(ends: Ends, sums: np.ndarray, rate: int, ridge: int, widths: Widths) -> list[int]:
    masks = np.random.default_rng(len(sums)).integers(0, 1 << 64, sums.shape, dtype=np.uint64)
    shares = masks, sums.view(np.uint64) - masks
    one, other = play(*(weights_of(ends[k], shares[k], rate, ridge, widths, k) for k in (0, 1)))
    return ((one + other).view(np.int64) - (1 << WEIGHT_BITS - 1)).tolist()


@settings(max_examples=40)
@given(
    st.sampled_from([1, 30, 20_000, 10**6, 10**8]), st.sampled_from([1, 2, 410, 1229, 4096]) | st.integers(1, 4096),
    st.sampled_from([1, 65_536, 6_553_600]), st.integers(0, 1 << 32),
)  # fmt: skip
def test_weights_are_the_plain_ones(ends: Ends, n: int, rate: int, ridge: int, seed: int) -> None:
    rng, bounds = np.random.default_rng(seed), SumsBounds(n, 65_536, 17_040)
    hess = rng.integers(0, n * bounds.hess_bound + 1, 40)
    grad = rng.integers(-n * bounds.grad_bound, n * bounds.grad_bound + 1, 40)
    hess[:6], grad[:3] = 0, 0
    grad[3:6] = [-n * bounds.grad_bound, n * bounds.grad_bound, 1]
    # near a half, on both sides of it, and near the limits
    for k, wanted in enumerate(rng.integers(-WHOLE_LIMIT - 2, WHOLE_LIMIT + 2, 30).tolist() + [-WHOLE_LIMIT] * 4):
        grad[6 + k] = -(2 * wanted - 1) * (int(hess[6 + k]) + ridge) // (2 * rate) + int(rng.integers(-1, 2))
    grad = np.clip(grad, -n * bounds.grad_bound, n * bounds.grad_bound)
    sums = np.stack([grad, hess], axis=1)
    assert weights(ends, sums, rate, ridge, Widths.of(bounds, ridge)) == whole_weights(sums, rate, ridge).tolist()


def test_weights_end_at_their_limits(ends: Ends) -> None:
    sums = np.array([[-(10**9), 0], [10**9, 0], [0, 0], [-WHOLE_LIMIT + 1, 0], [-WHOLE_LIMIT, 0], [WHOLE_LIMIT, 0]])
    found = weights(ends, sums, 1, 1, Widths.of(SumsBounds(10**5, 65_536, 17_040), 1))
    most = WHOLE_LIMIT - 1
    assert found == [most, -WHOLE_LIMIT, 0, most, most, -WHOLE_LIMIT]


def test_sums_whose_weights_take_more_than_64_bits_are_refused(ends: Ends) -> None:
    with pytest.raises(CryptoError, match="weights of leaves take 65 bits, expected at most 64"):
        next(weights_of(ends[0], np.zeros((1, 2), np.uint64), 1, 1, Widths(40, 47, 40), 0))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("role", [0, 1])
def test_messages_of_other_types_and_shapes_are_refused(role: int) -> None:
    ends, bounds = filled(), SumsBounds(10, 4, 2)
    widths, owners = Widths.of(bounds, 1), np.array([2, 2, 1], np.uint8)
    left, totals = nodes_of(bounds, 3, 3, np.random.default_rng(0))
    of_left, of_totals = sums_shared(left), sums_shared(totals)

    def best_split(k: int) -> Any:
        return best_of_hidden(again(ends[k]), of_left[k], of_totals[k], owners, SplitTerms(1, 0, 1), widths, k, 1)

    assert_refuses_garbage(best_split, role, tries=1)
    assert_refuses_garbage(lambda k: left_sums(again(ends[k]), of_left[k], owners, np.zeros(3, np.int64), k), role)
    sums = np.zeros((2, 2), np.uint64)
    assert_refuses_garbage(lambda k: weights_of(again(ends[k]), sums, 4096, 1, widths, k), role, tries=2)
