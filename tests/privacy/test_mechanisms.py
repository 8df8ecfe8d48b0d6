"""One bench for all mechanisms. Keys are fixed; false-alarm rates are what they would be with others."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from treaty.errors import ConfigError
from treaty.privacy import mechanisms
from treaty.privacy.mechanisms import (
    MECHANISMS,
    STEPS,
    keystream,
    largest,
    randomise,
    variance,
)

KINDS = pytest.mark.parametrize("kind", MECHANISMS)
EPSILONS = pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
DRAWS = 60_000


def drawn(kind, t, epsilon, draws=DRAWS, seed=1):
    key = bytes([seed, round(10 * epsilon) % 256, round(100 * (t + 1))]) + bytes(29)
    return randomise(kind, np.full(draws, t), epsilon, keystream(key))


# ---------------------------------------------------------------- moments


@KINDS
@EPSILONS
def test_moments_are_those_of_theory(kind, epsilon):
    for t in (-1.0, -0.3, 0.0, 1.0):
        found = drawn(kind, t, epsilon)
        spread = variance(kind, np.array([t]), epsilon)[0]
        assert abs(found.mean() - t) < 3.0 * math.sqrt(spread / DRAWS)  # false alarm: 0.3 % of keys
        centred = (found - t) ** 2
        rounding = 4.0 * np.abs(found).max() / STEPS  # all that is left of duchi's at t = 0
        off = abs(centred.mean() - spread)
        assert off < 4.5 * centred.std() / math.sqrt(DRAWS) + rounding  # false alarm: 10^-5


@KINDS
def test_outcomes_are_multiples_of_the_grid_and_no_larger_than_said(kind):
    for epsilon in (2.0**-20, 0.01, 0.6, 5.0, 60.0, 2000.0):
        t = np.linspace(-1.0, 1.0, 999)
        found = randomise(kind, t, epsilon, keystream(bytes(32)))
        np.testing.assert_array_equal(found * STEPS, np.rint(found * STEPS))
        assert np.abs(found).max() <= largest(kind, epsilon)
        if epsilon > 100.0 and kind != "duchi":  # which has two outcomes whatever epsilon is
            assert np.abs(found - t).max() < 0.02


def test_variances_are_those_of_the_papers():
    t = np.array([0.0, 0.5, 1.0])
    for epsilon in (0.5, 1.0, 4.0):
        e = math.exp(epsilon)
        half = math.exp(epsilon / 2)
        np.testing.assert_allclose(variance("laplace", t, epsilon), 8 / epsilon**2)
        np.testing.assert_allclose(variance("duchi", t, epsilon), ((e + 1) / (e - 1)) ** 2 - t**2)
        expected = t**2 / (half - 1) + (half + 3) / (3 * (half - 1) ** 2)
        np.testing.assert_allclose(variance("piecewise", t, epsilon), expected)


# ---------------------------------------------------------------- the promise: ratios of chances


def exceeds(kind, epsilon, promised, seed=0):
    """Return whether outcomes show a ratio of chances above e^promised.

    Outcomes are put into 24 bins; of each the lower end of one value's share, and the upper end of another's, are taken
    at a level that makes a false alarm over all of them as rare as one in a million (Clopper and Pearson, union bound).
    """
    values = (-1.0, 0.0, 1.0)
    outcomes = [drawn(kind, t, epsilon, seed=seed) for t in values]
    edges = np.unique(np.quantile(np.concatenate(outcomes), np.linspace(0.0, 1.0, 25))[1:-1])
    counts = [np.bincount(np.searchsorted(edges, o, side="left"), minlength=len(edges) + 1) for o in outcomes]
    level = 1e-6 / (2 * 6 * len(counts[0]))
    for one in counts:
        low = stats.beta.ppf(level, np.maximum(one, 1), DRAWS - one + 1) * (one > 0)
        for other in counts:
            high = stats.beta.ppf(1 - level, other + 1, np.maximum(DRAWS - other, 1))
            if np.any(low > math.exp(promised) * high):
                return True
    return False


@KINDS
@EPSILONS
def test_no_outcome_is_more_than_e_to_the_epsilon_times_as_likely(kind, epsilon):
    assert not exceeds(kind, epsilon, epsilon)


@KINDS
def test_the_bench_finds_noise_that_is_too_small(kind):
    assert exceeds(kind, 1.0, 0.7)


@settings(deadline=None, max_examples=60)
@given(epsilon=st.floats(2.0**-20, 200.0))
def test_the_chances_compared_keep_the_promise_exactly(epsilon):
    bound = Fraction(math.exp(min(epsilon, 700.0))) * (1 + Fraction(1, 2**50))
    # duchi: the share of words above, at t = 1 and t = -1
    words = np.array([0, 2**64 - 1], np.uint64)
    slope = min(math.floor(math.tanh(epsilon / 2.0) / 2.0 * 2.0**43 / (1.0 + 2.0**-50)), 2**42 - 1)
    high, low = 2**62 + STEPS * slope, 2**62 - STEPS * slope
    assert low > 0
    assert Fraction(high, low) <= bound
    sure = randomise("duchi", np.array([1.0, -1.0]), epsilon, lambda count: words.tobytes()[:count])
    assert sure[0] > 0.0 > sure[1]
    # piecewise: within the window and without
    most, width, change = mechanisms._window(epsilon)
    assert width % 2 == 1
    assert 1 <= width < 2 * most + 1
    limit = max(1, math.ceil(change * (1.0 + 2.0**-50) * 2.0**64))
    within, without = Fraction(2**64 - limit, 2**64) / width, Fraction(limit, 2**64) / (2 * most + 1 - width)
    assert within <= bound * without
    # laplace: two whole units of the grid apart, and twice the greatest error of a chance
    halving = math.ceil(2 * STEPS * math.log(2.0) / epsilon * (1.0 + 2.0**-26))
    assert 2 * STEPS * math.log(2.0) / halving + 2.0**-47.9 <= epsilon


def test_piecewise_draws_places_anew_but_not_whether_they_are_near():
    """Were that drawn again too, numbers far away would be rarer than the ratio allows."""
    t, epsilon, source = np.zeros(2_000), 1.0, keystream(bytes(32))
    words, places = source(8 * len(t)), source(8 * len(t))
    given = iter([words, b"\xff" * len(places), places])  # the largest number is in no whole multiple
    found = randomise("piecewise", t, epsilon, lambda count: next(given))
    assert next(given, None) is None
    straight = iter([words, places])
    np.testing.assert_array_equal(found, randomise("piecewise", t, epsilon, lambda count: next(straight)))


def test_laplace_of_a_tiny_epsilon_has_its_size_and_halves_as_it_should():
    for epsilon in (2.0**-14, 2.0**-10):  # numbers of more than 32 bits, and of fewer
        size = np.sort(np.abs(drawn("laplace", 0.0, epsilon)) * epsilon / 2.0)
        assert stats.kstest(size, "expon").pvalue > 1e-6  # false alarm: 10^-6


def test_laplace_is_the_discrete_laplace_distribution():
    epsilon = 3_000_000.0  # so much that noise is a few steps of the grid
    noise = np.rint(randomise("laplace", np.zeros(DRAWS), epsilon, keystream(bytes(32))) * STEPS).astype(int)
    halving = math.ceil(2 * STEPS * math.log(2.0) / epsilon * (1.0 + 2.0**-26))
    fade = 2.0 ** (-1.0 / halving)
    assert halving == 1
    support = np.arange(-8, 9)
    chances = (1 - fade) / (1 + fade) * fade ** np.abs(support)
    counts = np.array([np.count_nonzero(noise == k) for k in support])
    rest = DRAWS - counts.sum()
    expected = DRAWS * np.append(chances, 1 - chances.sum())
    chi2 = ((np.append(counts, rest) - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(chi2, len(support)) > 1e-6  # false alarm: one key in a million
    wide = np.rint(randomise("laplace", np.zeros(DRAWS), 1.0, keystream(bytes(32))) * STEPS)
    assert len(np.unique(wide)) > 0.9 * DRAWS  # no grid coarser than said
    scale = 2 * STEPS
    assert stats.kstest(wide, stats.laplace(scale=scale).cdf).pvalue > 1e-6


# ---------------------------------------------------------------- input


@KINDS
@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, -math.inf, math.nan, 2.0**-21])
def test_an_epsilon_that_is_none_is_refused(kind, epsilon):
    with pytest.raises(ConfigError, match=r"expected a finite epsilon of at least 9\.5e-07, got"):
        randomise(kind, np.zeros(3), epsilon)
    with pytest.raises(ConfigError, match="expected a finite epsilon"):
        variance(kind, np.zeros(3), epsilon)
    with pytest.raises(ConfigError, match="expected a finite epsilon"):
        largest(kind, epsilon)


@KINDS
@pytest.mark.parametrize("t", [[1.0001], [math.nan], [-math.inf], [[0.5]]], ids=str)
def test_values_outside_are_refused(kind, t):
    with pytest.raises(ConfigError, match="expected values from -1 to 1 in one dimension"):
        randomise(kind, np.array(t), 1.0)


@KINDS
def test_no_values_are_no_values_and_the_default_key_is_a_new_one(kind):
    assert randomise(kind, np.zeros(0), 1.0).shape == (0,)
    t = np.zeros(200)
    assert np.any(randomise(kind, t, 1.0) != randomise(kind, t, 1.0))
    same = [randomise(kind, t, 1.0, keystream(bytes(32))) for _ in range(2)]
    np.testing.assert_array_equal(*same)


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(-(2**40), 2**40)] * 3), max_size=20))
def test_values_are_brought_to_steps_of_their_ranges_and_back(rows):
    x, one, other = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    low, high = np.minimum(one, other), np.maximum(one, other)
    steps, sent = np.empty(len(x), np.int32), np.empty(len(x), np.int64)
    mechanisms.clip_to_steps(x, low, high, steps)
    assert np.abs(steps).max(initial=0) <= STEPS
    clipped = np.clip(x, low, high)
    np.testing.assert_array_equal(steps[(clipped == high) & (low < high)], STEPS)
    np.testing.assert_array_equal(steps[(clipped == low) & (low < high)], -STEPS)
    np.testing.assert_array_equal(steps[low == high], 0)
    mechanisms.to_sent(steps / STEPS, low, high, 1.0, sent)
    assert np.all(np.abs(sent - clipped) <= 1 + (high - low) / STEPS)
