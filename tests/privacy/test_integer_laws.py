"""What every release costs, from the law by which integers are drawn: no more than epsilon, and hardly less.

Laws are read off the sampling code itself: of a word that decides between two outcomes the threshold is searched for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from treaty.privacy import mechanisms
from treaty.privacy.ledger import Ledger
from treaty.privacy.mechanisms import MECHANISMS, STEPS, best_for_numbers, fitted_lambda, variance
from treaty.privacy.randomised_response import randomise_buckets, randomise_labels
from treaty.systems.fedxgboost_ldp import noise as noisy_gradients
from treaty.systems.fedxgboost_ldp.noise import NoisyGradients
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.trees.boosting import TreeSample
from treaty.trees.number_losses import Gamma, Poisson, PseudoHuber, SquaredError, Tweedie
from treaty.trees.objectives import Logistic, Softmax

WHOLE = 2**64
EPSILONS = pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 3.0, 8.0])


def words(*values: int) -> Callable[[int], bytes]:
    """Return a source that gives these words, call after call, each as often as a call asks for."""
    left = list(values)
    return lambda count: np.full(count // 8, left.pop(0), np.uint64).tobytes()


def below(holds: Callable[[int], bool]) -> int:
    """Return how many words come before the first one for which nothing `holds`: a threshold."""
    low, high = 0, WHOLE
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if holds(middle) else (low, middle)
    return low


def share_of_larger(steps: int, epsilon: float) -> Fraction:
    """Return the probability of the larger outcome of Duchi's mechanism."""
    place = np.array([steps], np.int32)
    return Fraction(below(lambda word: mechanisms.duchi(place, epsilon, words(word))[0] > 0.0), WHOLE)


def worst(kind: str, epsilon: float) -> float:
    """Return the largest logarithm of a ratio of probabilities of one outcome, over values -1 and 1."""
    if kind == "laplace":
        halving = math.ceil(2 * STEPS * math.log(2.0) / epsilon * (1.0 + 2.0**-26))
        return 2 * STEPS * math.log(2.0) / halving
    if kind == "duchi":
        more, less = (share_of_larger(steps, epsilon) for steps in (STEPS, -STEPS))
        return max(_log(more / less), _log((1 - less) / (1 - more)))
    most, width, _ = mechanisms._window(epsilon)
    end = np.array([STEPS], np.int32)
    # the window of 1 ends at the largest number: place 0 is near its middle, or the least number of all
    far = Fraction(below(lambda word: mechanisms.piecewise(end, epsilon, words(word, 0))[0] < 0.0), WHOLE)
    return _log((1 - far) / width / (far / (2 * most + 1 - width)))


def _log(ratio: Fraction) -> float:
    return math.log(float(ratio))


@pytest.mark.parametrize("kind", MECHANISMS)
@EPSILONS
def test_a_value_at_either_end_costs_epsilon_and_no_less(kind, epsilon):
    assert 0.99 * epsilon < worst(kind, epsilon) <= epsilon * (1.0 + 1e-12)


@pytest.mark.parametrize("size", [2, 3, 10])
@EPSILONS
def test_labels_and_buckets_cost_epsilon_and_no_less(size, epsilon):
    def changes(word: int) -> bool:
        return bool(randomise_labels(np.zeros(1, np.int64), size, epsilon, words(word, 0))[0])

    def moves(word: int) -> bool:
        return bool(randomise_buckets(np.zeros(1, np.uint8), size, epsilon, np.array([[word, 0]], np.uint64))[0])

    for leaves in (changes, moves):
        away = Fraction(below(leaves), WHOLE)
        assert 0.99 * epsilon < _log((1 - away) / (away / (size - 1))) <= epsilon * (1.0 + 1e-12)


# ---------------------------------------------------------------- ranges: what is released lies at the ends


def released(objective, y, margins, monkeypatch, weight=None, n_trees=1) -> list[np.ndarray]:
    """Return what mechanisms are given for the gradients of labels, from -1 to 1: one array for each call."""
    seen: list[np.ndarray] = []

    def watched(steps, epsilon, draw):
        seen.append(steps / STEPS)
        return steps / STEPS

    monkeypatch.setitem(MECHANISMS, "duchi", watched)
    own = FedXGBoostLDP(mechanism="duchi")
    noise = NoisyGradients(Ledger(None), own, objective, len(y), weighted=weight is not None, model_id="m", job="j")
    grad, hess, _ = objective.gradients(margins, y, weight)
    for k in range(n_trees):
        noise.of(TreeSample(grad[k], hess[k], None, np.empty(0, np.int32)), margins.T)
    return seen


@pytest.mark.parametrize("margin", [-30.0, -3.0, 0.0, 0.7, 30.0])
def test_gradients_of_two_classes_are_at_the_ends_of_their_range_whatever_the_margin(monkeypatch, margin):
    y = np.array([0.0, 1.0, 1.0, 0.0])
    (places,) = released(Logistic(), y, np.full((4, 1), margin), monkeypatch)
    np.testing.assert_allclose(places, 1.0 - 2.0 * y, atol=2.0**-14)


def test_gradients_of_several_classes_are_at_the_ends_of_their_range(monkeypatch):
    rng = np.random.default_rng(0)
    y, margins = rng.integers(0, 4, 60).astype(float), rng.normal(0.0, 3.0, (60, 4))
    for k, places in enumerate(released(Softmax(4), y, margins, monkeypatch, n_trees=4)):
        np.testing.assert_allclose(places, np.where(y == k, -1.0, 1.0), atol=2.0**-14)


def test_the_planted_range_of_twice_the_width_is_found(monkeypatch):
    """The range [-1, 1], as before: p - 1 and p are half as far apart, and cost half of epsilon."""
    monkeypatch.setattr(Logistic, "label_ends", None)
    y = np.array([0.0, 1.0])
    (places,) = released(Logistic(), y, np.zeros((2, 1)), monkeypatch)
    np.testing.assert_allclose(places, [0.5, -0.5])
    high, low = (share_of_larger(int(place * STEPS), 1.0) for place in (0.5, -0.5))
    assert _log(high / low) < 0.5


NUMBERS = {
    "squared_error": (SquaredError(base_score=3.0), st.floats(-50.0, 50.0)),
    "poisson": (Poisson(base_score=2.0), st.integers(0, 30).map(float)),
    "tweedie": (Tweedie(base_score=2.0), st.floats(0.0, 30.0)),
    "gamma": (Gamma(base_score=2.0), st.floats(0.01, 30.0)),
    "huber": (PseudoHuber(huber_slope=2.0), st.floats(-50.0, 50.0)),
}


@pytest.mark.parametrize("name", NUMBERS)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_the_range_holds_every_gradient_and_hessian_and_no_label_decides_it(name, data):
    objective, labels = NUMBERS[name]
    y = np.array(data.draw(st.lists(labels, min_size=2, max_size=6)))
    margins = np.array(data.draw(st.lists(st.floats(-4.0, 4.0), min_size=len(y), max_size=len(y))))[:, None]
    loss = objective.bounded(y)
    weighted = data.draw(st.booleans())
    weight = np.array(data.draw(st.lists(st.floats(0.0, 4.0), min_size=len(y), max_size=len(y)))) if weighted else None
    if weighted:
        loss = replace(loss, weight_bound=4.0)
    grad, hess, _ = loss.gradients(margins, y, weight)
    of_grad, of_hess = loss.ranges(margins, weighted)
    slack = 3 if weighted else 0  # whole weights multiply what is rounded; noise clips it
    assert np.all((of_grad[0] - slack <= grad) & (grad <= of_grad[1] + slack))
    assert np.all((of_hess[0] - slack <= hess) & (hess <= of_hess[1] + slack))
    if loss.label_ends is not None:
        assert np.all(of_grad[1] - of_grad[0] <= 2 * loss.grad_bound)
        assert np.all((loss.label_ends[0] <= y) & (y <= loss.label_ends[1]))


def test_a_regressions_range_is_half_of_that_of_all_gradients():
    loss = SquaredError(base_score=10.0).bounded(np.array([0.0, 25.0]))
    (grad, _) = loss.ranges(np.array([[10.0], [14.0]]), weighted=False)
    np.testing.assert_allclose((grad[1] - grad[0]) * loss.grad_unit, 32.0)
    np.testing.assert_allclose(grad.mean(axis=0)[0] * loss.grad_unit, [0.0, 4.0])


def test_weighted_gradients_may_be_anything_between_0_and_the_heaviest(monkeypatch):
    y, weight = np.array([0.0, 1.0, 1.0, 0.0]), np.array([4.0, 4.0, 1.0, 0.0])
    loss = Logistic(weight_bound=4.0)
    grad, hess = released(loss, y, np.zeros((4, 1)), monkeypatch, weight=weight)
    np.testing.assert_allclose(grad, [1.0, -1.0, -0.25, 0.0], atol=1e-4)
    np.testing.assert_allclose(hess, [1.0, 1.0, -0.5, -1.0], atol=1e-4)


def test_what_is_sent_is_the_middle_of_the_range_and_noise_in_proportion_to_its_width():
    """c + M (1 - 2 y) / 2 with c = p - 1/2: two values, whose mean is the gradient."""
    n, epsilon, margin = 40_000, 1.0, 1.2
    p, loss = 1.0 / (1.0 + math.exp(-margin)), Logistic()
    y, margins = (np.arange(n) % 2).astype(float), np.full((n, 1), margin)
    own = FedXGBoostLDP(mechanism="duchi", epsilon=epsilon)
    noise = NoisyGradients(Ledger(None), own, loss, n, weighted=False, model_id="m", job="j")
    grad, hess, _ = loss.gradients(margins, y, None)
    sent = noise.of(TreeSample(grad[0], hess[0], None, np.empty(0, np.int32)), margins.T)[0].grad * noise.units[0]
    size = 0.5 / math.tanh(epsilon / 2.0)
    np.testing.assert_allclose(np.unique(sent), [p - 0.5 - size, p - 0.5 + size], atol=3e-4)
    for label in (0.0, 1.0):
        of = sent[y == label]
        assert abs(of.mean() - (p - label)) < 6.5 * of.std() / math.sqrt(len(of))  # false alarm: 10^-10


def test_noise_that_is_left_out_or_comes_from_a_constant_key_is_found(monkeypatch):
    """The planted faults of a release: none of it is random, or the same in every ledger."""
    n, loss = 4_000, Logistic()
    y, margins = np.zeros(n), np.zeros((n, 1))
    grad, hess, _ = loss.gradients(margins, y, None)

    def sent() -> np.ndarray:
        own = FedXGBoostLDP(mechanism="duchi", epsilon=1.0)
        noise = NoisyGradients(Ledger(None), own, loss, n, weighted=False, model_id="m", job="j")
        return noise.of(TreeSample(grad[0], hess[0], None, np.empty(0, np.int32)), margins.T)[0].grad

    def found(one: np.ndarray, other: np.ndarray) -> str:
        flips = np.mean(one > 0.0)
        alike = np.mean(one == other)
        p = math.e / (1.0 + math.e)
        if abs(flips - p) > 6.5 * 0.5 / math.sqrt(n):
            return "noise is missing"
        return "noise repeats" if abs(alike - (p * p + (1 - p) ** 2)) > 6.5 * 0.5 / math.sqrt(n) else ""

    assert found(sent(), sent()) == ""
    with monkeypatch.context() as patch:
        patch.setitem(MECHANISMS, "duchi", lambda steps, epsilon, draw: steps / STEPS)
        assert found(sent(), sent()) == "noise is missing"
    with monkeypatch.context() as patch:
        patch.setattr(noisy_gradients, "keystream", lambda key, stream: mechanisms.keystream(bytes(32), stream))
        assert found(sent(), sent()) == "noise repeats"


# ---------------------------------------------------------------- what follows from the noise


def test_numbers_are_released_through_the_mechanism_with_the_least_variance():
    assert [best_for_numbers(epsilon) for epsilon in (0.1, 0.7, 0.9, 4.0, 2000.0)] == [
        "duchi", "duchi", "piecewise", "piecewise", "piecewise",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["label_rr", "target", *MECHANISMS])
def test_the_fitted_penalty_grows_with_the_noise_and_ends_at_one(kind):
    found = [fitted_lambda(kind, epsilon) for epsilon in (0.1, 0.5, 1.0, 4.0, 60.0)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1.0, abs=0.2)
    # a label that is drawn once has the noise of a gradient with two values
    assert fitted_lambda("label_rr", 1.0) == fitted_lambda("duchi", 1.0)
    assert fitted_lambda("label_rr", 1.0) - 1.0 == pytest.approx(
        4 * mechanisms._OF_VARIANCE * math.e / (math.e - 1) ** 2, rel=0.01
    )
    assert float(variance("duchi", np.array([1.0]), 1.0)[0]) == pytest.approx(4 * math.e / (math.e - 1) ** 2)
