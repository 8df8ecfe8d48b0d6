"""L-BFGS on inner products: against matrices, over any cut into slices, and its safeguards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.errors import DataError
from treaty.linear.lbfgs import Coordinator, Decision, Slice, two_loops

SEEDS = st.integers(0, 2**32 - 1)


def bfgs_matrix(pairs: list[tuple[np.ndarray, np.ndarray]], n: int) -> np.ndarray:
    """Return the L-BFGS matrix in the open: H <- (I - rho s v^T) H (I - rho v s^T) + rho s s^T, oldest pair first."""
    identity = np.eye(n)
    if not pairs:
        return identity
    s, v = pairs[-1]
    H = (s @ v) / (v @ v) * identity
    for s, v in pairs:
        rho = 1.0 / (v @ s)
        H = (identity - rho * np.outer(s, v)) @ H @ (identity - rho * np.outer(v, s)) + rho * np.outer(s, s)
    return H


def hessian(rng: np.random.Generator, n: int) -> np.ndarray:
    A = rng.normal(size=(n, n))
    return A @ A.T / n + 0.1 * np.eye(n)


@settings(deadline=None)
@given(seed=SEEDS, n=st.integers(1, 12), m=st.integers(0, 6))
def test_two_loops_on_inner_products_are_the_matrix_times_the_gradient(seed, n, m):
    rng = np.random.default_rng(seed)
    A = hessian(rng, n)
    pairs = [(s, A @ s) for s in rng.normal(size=(m, n))]
    g = rng.normal(size=n)
    vectors = np.array([*(s for s, _ in pairs), *(v for _, v in pairs), g])
    step = two_loops(vectors @ vectors.T) @ vectors
    np.testing.assert_allclose(step, bfgs_matrix(pairs, n) @ g, rtol=1e-6, atol=1e-7 * np.abs(step).max())


def descend(A, b, cuts, *, iterations=40, memory=3, period=2, learning_rate=0.4, noise=0.0, l2=0.0):
    """Minimise w^T A w / 2 - b^T w with one slice per cut; return the weights of every iteration and what was kept."""
    rng = np.random.default_rng(1)
    ranges = list(zip([0, *cuts], [*cuts, len(b)], strict=True))
    slices = [Slice(stop - start, memory=memory, period=period, l2=l2) for start, stop in ranges]
    coordinator = Coordinator(memory=memory, learning_rate=learning_rate)
    path, kept = [np.zeros(len(b))], []
    for _ in range(iterations):
        w = path[-1]
        grad = A @ w - b + noise * rng.normal(size=len(b))
        candidates = [own.candidate() for own in slices]
        v = None if candidates[0] is None else A @ np.concatenate(candidates)
        products = [
            own.products(grad[a:z], None if v is None else v[a:z]) for own, (a, z) in zip(slices, ranges, strict=True)
        ]
        decision = coordinator.decide(np.sum(products, axis=0))
        if v is not None:
            kept.append((np.concatenate(candidates), v, decision.keep))
        for own in slices:
            own.step(decision)
        path.append(np.concatenate([own.weights for own in slices]))
    return np.array(path), kept


@pytest.mark.slow
@settings(deadline=None)
@given(seed=SEEDS, n=st.integers(3, 10), cut=st.integers(1, 2), parties=st.integers(2, 3))
def test_slices_walk_the_path_of_the_whole(seed, n, cut, parties):
    rng = np.random.default_rng(seed)
    A, b = hessian(rng, n), rng.normal(size=n)
    whole, _ = descend(A, b, [], iterations=20, noise=0.01)
    cuts = [cut, n][: parties - 1]  # the third party, where there is one, has no column
    sliced, _ = descend(A, b, cuts, iterations=20, noise=0.01)
    np.testing.assert_allclose(sliced, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("memory", "period"), [(3, 2), (5, 4), (1, 1), (2, 3)])
def test_descent_is_that_of_the_matrix_form(memory, period):
    """Pairs are made at k = 2L, 3L, ..., used from k + 1 on, and the newest M of them count."""
    rng = np.random.default_rng(memory)
    n, eta = 6, 0.3
    A, b = hessian(rng, n), rng.normal(size=n)
    path, _ = descend(A, b, [2], iterations=30, memory=memory, period=period, learning_rate=eta)
    w, pairs, mine = np.zeros(n), [], [np.zeros(n)]
    for k in range(1, 31):
        step = eta * bfgs_matrix(pairs[-memory:], n) @ (A @ w - b)
        if k >= 2 * period and k % period == 0:
            s = np.mean(mine[k - period : k], axis=0) - np.mean(mine[k - 2 * period : k - period], axis=0)
            pairs.append((s, A @ s))
        w = w - step
        mine.append(w)
    np.testing.assert_allclose(path, mine, rtol=1e-6, atol=1e-9)
    assert len(pairs) > memory


def test_quasi_newton_finds_the_minimum_that_descent_is_slow_to_find():
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    A, b = Q @ np.diag(np.logspace(-2, 0, 6)) @ Q.T, rng.normal(size=6)
    best = np.linalg.solve(A, b)
    ends = {
        memory: np.linalg.norm(descend(A, b, [3], iterations=120, memory=memory, learning_rate=1.0)[0][-1] - best)
        for memory in (0, 6)
    }
    assert ends[6] < 1e-3 * ends[0]


@settings(deadline=None)
@given(seed=SEEDS, period=st.integers(1, 5))
def test_candidate_is_the_difference_of_mean_iterates(seed, period):
    rng = np.random.default_rng(seed)
    own, iterates = Slice(4, memory=2, period=period), [np.zeros(4)]
    for k in range(1, 4 * period + 1):
        s = own.candidate()
        assert (s is not None) == (k >= 2 * period and k % period == 0)
        if s is not None:
            last, before = iterates[k - period : k], iterates[k - 2 * period : k - period]
            np.testing.assert_allclose(s, np.mean(last, axis=0) - np.mean(before, axis=0), atol=1e-12)
        own.products(rng.normal(size=4), None if s is None else rng.normal(size=4))
        own.step(Decision(np.array([rng.random()]), keep=False))
        iterates.append(own.weights)


def test_without_memory_it_is_gradient_descent():
    A, b = np.diag([1.0, 2.0]), np.array([1.0, -1.0])
    path, kept = descend(A, b, [1], iterations=10, memory=0, learning_rate=0.1)
    w = np.zeros(2)
    for expected in path:
        np.testing.assert_allclose(expected, w, atol=1e-15)
        w = w - 0.1 * (A @ w - b)
    assert not kept


def pair_products(s: np.ndarray, v: np.ndarray, g: np.ndarray) -> np.ndarray:
    vectors = np.array([s, v, g])
    return (vectors @ vectors.T)[np.triu_indices(3)]


@pytest.mark.parametrize(
    ("factor", "kept"), [(1.0, True), (2e-8, True), (0.5e-8, False), (0.0, False), (-1.0, False)], ids=str
)
def test_pairs_of_too_little_curvature_are_left_out(factor, kept):
    s, g = np.array([3.0, -4.0]), np.array([1.0, 2.0])
    coordinator = Coordinator(memory=5, learning_rate=0.1)
    decision = coordinator.decide(pair_products(s, factor * s, g))
    assert decision.keep == kept
    np.testing.assert_allclose(decision.coefficients, [0.1])  # a pair counts from the next iteration on
    assert coordinator.expected == ((6, 15) if kept else (1, 6))


def test_a_pair_without_a_step_is_left_out():
    assert not Coordinator(memory=5, learning_rate=0.1).decide(pair_products(np.zeros(2), np.zeros(2), np.ones(2))).keep


def test_the_oldest_pair_goes_when_memory_is_full():
    rng = np.random.default_rng(0)
    A, b = hessian(rng, 5), rng.normal(size=5)
    coordinator, own = Coordinator(memory=2, learning_rate=0.2), Slice(5, memory=2, period=1)
    for _ in range(8):
        s = own.candidate()
        own.step(coordinator.decide(own.products(A @ own.weights - b, None if s is None else A @ s)))
    assert coordinator.expected == (15, 28)
    assert len(own.products(b, A @ own.candidate())) == 28


def test_steps_are_capped_at_ten_times_the_median_of_twenty():
    coordinator = Coordinator(memory=0, learning_rate=0.5)
    norms = []
    for length in (1.0, 3.0, 2.0, 1e6):
        (coefficient,) = coordinator.decide(np.array([length**2])).coefficients
        norms.append(coefficient * length)
    np.testing.assert_allclose(norms, [0.5, 1.5, 1.0, 10.0])  # the median of 0.5, 1.5, 1.0 is 1.0


def test_steps_more_than_twenty_ago_do_not_count():
    coordinator = Coordinator(memory=0, learning_rate=0.5)
    for squared in [1.0] * 20 + [1e-4] * 11:  # nine long ones and eleven short ones are remembered
        coordinator.decide(np.array([squared]))
    assert coordinator.decide(np.array([1.0])).coefficients[0] == pytest.approx(10 * 0.5e-2)


def test_going_back_forgets_pairs_steps_and_their_lengths():
    s, v, g = np.array([3.0, -4.0]), np.array([2.0, -2.0]), np.array([1.0, 2.0])
    coordinator = Coordinator(memory=5, learning_rate=0.1)
    assert coordinator.decide(1e-6 * pair_products(s, v, g)).keep
    coordinator.end_epoch(0.05, back=False)
    assert coordinator.expected == (6, 15)
    coordinator.end_epoch(0.05, back=True)
    assert coordinator.expected == (1, 6)
    np.testing.assert_allclose(coordinator.decide(np.array([1e6])).coefficients, [0.05])


def test_steps_of_nothing_cap_nothing():
    coordinator = Coordinator(memory=0, learning_rate=0.5)
    coordinator.decide(np.zeros(1))
    assert coordinator.decide(np.ones(1)).coefficients[0] == 0.5


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_products_that_are_not_finite_end_training(wrong):
    with pytest.raises(DataError, match=r"diverged.*lower learning_rate"):
        Coordinator(memory=5, learning_rate=0.1).decide(np.array([wrong]))


def test_penalty_goes_into_gradients_and_pairs_but_not_to_the_intercept():
    plain, penalised = Slice(3, memory=1, period=1), Slice(3, memory=1, period=1, l2=0.5, intercept=True)
    decision = Decision(np.array([0.1]), keep=False)
    for own in (plain, penalised):
        own.products(np.ones(3))
        own.step(decision)
    g, v, factor = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0]), np.array([0.5, 0.5, 0.0])
    with_penalty = plain.products(g + factor * plain.weights, v + factor * plain.candidate())
    np.testing.assert_allclose(penalised.products(g, v), with_penalty, rtol=1e-15)


@pytest.mark.parametrize("small", [0.0, 2.0**-60])
def test_a_pair_near_the_rounding_of_inner_products_is_dropped(small):
    """Of parties' sums, which are multiples of 2^-64: what is left of a pair at the optimum is rounding."""
    coordinator = Coordinator(memory=3, learning_rate=0.1)
    products = [2.0**-58, 2.0**-60, 0.0, small, 0.0, 1e-9]  # s s, s v, s g, v v, v g, g g
    decision = coordinator.decide(np.array(products))
    assert not decision.keep
    assert np.isfinite(coordinator.decide(np.array([1e-9])).coefficients).all()
