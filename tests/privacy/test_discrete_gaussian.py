"""Statistical tests fix the key; false-alarm rates are what they would be with others."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from marks import all_but_first_slow
from treaty.errors import ConfigError
from treaty.privacy import discrete_gaussian as module
from treaty.privacy.discrete_gaussian import convolution_gap, discrete_gaussian, noise_share

KEY = bytes(range(32))


def key(*of):
    return hashlib.sha256(repr(of).encode()).digest()


def pmf(sigma, reach):
    """Probabilities of -reach .. reach."""
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-(x**2) / (2.0 * sigma**2))
    return weights / weights.sum()


def likelihood(drawn, sigma):
    """Return how likely counts as far from the exact distribution's are, tails taken together."""
    reach = math.ceil(12 * sigma)
    expected = len(drawn) * pmf(sigma, reach)
    inner = np.flatnonzero(expected >= 10)
    lo, hi = inner[0], inner[-1]
    grouped = np.array([expected[:lo].sum(), *expected[lo : hi + 1], expected[hi + 1 :].sum()])
    places = np.clip(drawn + reach - lo + 1, 0, len(grouped) - 1)
    counts = np.bincount(places, minlength=len(grouped))
    grouped, counts = grouped[1:-1], counts[1:-1]
    rest = len(drawn) - grouped.sum(), len(drawn) - counts.sum()
    if rest[0] >= 5:
        grouped, counts = np.append(grouped, rest[0]), np.append(counts, rest[1])
    else:
        assert rest[1] <= 40  # of 5 or fewer expected: 10^-23
    statistic = ((counts - grouped) ** 2 / grouped).sum()
    return stats.chi2.sf(statistic, len(grouped) - 1)


# ---------------------------------------------------------------- the distribution


@pytest.mark.parametrize("sigma", all_but_first_slow(1.37, 0.5, 0.51, 0.75, 1.0, 2.0, 3.3, 10.0, 57.1))
def test_numbers_have_the_exact_probabilities(sigma):
    drawn = discrete_gaussian(np.full(300_000, sigma), key(sigma))
    assert drawn.dtype == np.int64
    assert likelihood(drawn, sigma) > 1e-6  # false alarm: one key in a million


@settings(deadline=None, max_examples=40)
@given(sigma=st.floats(0.5, 30.0), seed=st.integers(0, 2**32))
def test_numbers_have_the_exact_probabilities_whatever_sigma(sigma, seed):
    assert likelihood(discrete_gaussian(np.full(20_000, sigma), key(seed)), sigma) > 1e-9  # false alarm: 4e-8 a run


@pytest.mark.parametrize("sigma", [2.0**20 + 0.3, 1e9 / 3, 2.0**40 - 0.5, 2.0**40])
def test_large_numbers_are_those_of_a_gaussian_down_to_their_lowest_bits(sigma):
    drawn = discrete_gaussian(np.full(200_000, sigma), key(sigma))
    cells = np.floor(stats.norm.cdf((drawn + 0.5) / sigma) * 100).astype(int)  # a cell's bounds are off by 1 / sigma
    assert stats.chisquare(np.bincount(cells, minlength=100)).pvalue > 1e-6
    assert stats.chisquare(np.bincount(drawn & 255, minlength=256)).pvalue > 1e-6
    assert stats.kstest(drawn / sigma, "norm").pvalue > 1e-6


@settings(deadline=None, max_examples=40)
@given(exponent=st.floats(-1.0, 40.0), seed=st.integers(0, 2**32))
def test_mean_and_variance_are_right_for_every_sigma(exponent, seed):
    sigma, count = 2.0**exponent, 20_000
    drawn = discrete_gaussian(np.full(count, sigma), key(seed)) / sigma
    reach = math.ceil(12 * min(sigma, 30.0))
    x, p = np.arange(-reach, reach + 1) / min(sigma, 30.0), pmf(min(sigma, 30.0), reach)
    second, fourth = (p * x**2).sum(), (p * x**4).sum()  # from sigma 30 on they are a Gaussian's to 10^-16
    assert abs(drawn.mean()) < 7 * math.sqrt(second / count)  # false alarm: 3e-12
    assert abs((drawn**2).mean() - second) < 7.5 * math.sqrt((fourth - second**2) / count)  # less than 10^-10


def test_every_number_has_its_own_sigma():
    sigma = np.tile([0.5, 2.0**33, 1.5, 4.0], 60_000)
    drawn = discrete_gaussian(sigma, KEY)
    for place in (0, 2, 3):
        assert likelihood(drawn[place::4], sigma[place]) > 1e-6
    assert stats.kstest(drawn[1::4] / 2.0**33, "norm").pvalue > 1e-6


def test_numbers_do_not_depend_on_each_other():
    drawn = discrete_gaussian(np.full(200_000, 3.0), KEY) / 3.0
    for lag in (1, 2, 3, 17):
        for power in (1, 2):
            series = drawn**power - (drawn**power).mean()
            products = series[lag:] * series[:-lag]
            assert abs(products.mean()) < 6.5 * products.std() / math.sqrt(len(products))  # false alarm: 10^-10


# ---------------------------------------------------------------- the arithmetic


class Words:
    """Random words of a key, as Python integers."""

    def __init__(self, of):
        self.stream = Cipher(algorithms.AES(of), modes.CTR(bytes(16))).encryptor()

    def below(self, bound):
        while True:
            word = int.from_bytes(self.stream.update(bytes(8)), "little")
            if word < 2**64 // bound * bound:
                return word % bound

    def exp_minus(self, y):
        trial = 1
        while self.below(y.denominator * trial) < y.numerator:
            trial += 1
        return trial % 2 == 1

    def drawn(self, sigma):
        """Draw one number for a sigma that is a fraction s / 2^f, given as (s, f)."""
        s, f = sigma
        while True:
            k = 0
            while self.exp_minus(Fraction(1, 2)):
                k += 1
            if not all(self.exp_minus(Fraction(1, 2)) for _ in range(k * (k - 1))):
                continue
            chosen = self.below(2 * math.ceil(Fraction(s, 2**f)))
            size = math.ceil(Fraction(k * s, 2**f)) + chosen // 2
            a = size * 2**f - k * s  # x = a / s, not in lowest terms: bounds count
            if a >= s or (chosen % 2 and not size):
                continue
            if not all(self.unreduced(a, s) for _ in range(k)):
                continue
            trial = 1
            while self.below(s) < a and self.below(2 * trial * s) < a:
                trial += 1
            if trial % 2:
                return -size if chosen % 2 else size

    def unreduced(self, a, s):
        trial = 1
        while self.below(s * trial) < a:
            trial += 1
        return trial % 2 == 1


@settings(deadline=None, max_examples=30)
@given(exponent=st.floats(-1.0, 40.0), seed=st.integers(0, 2**32))
@example(exponent=40.0, seed=0)
@example(exponent=-1.0, seed=0)
def test_kernels_do_what_unbounded_integers_do(exponent, seed):
    sigma, words = 2.0**exponent, Words(key(seed))
    fractional = 41 - math.frexp(sigma)[1]
    scaled = math.ceil(Fraction(sigma) * 2**fractional)
    expected = [words.drawn((scaled, fractional)) for _ in range(60)]
    assert discrete_gaussian(np.full(60, sigma), key(seed)).tolist() == expected


@settings(deadline=None)
@given(sigma=st.floats(0.5, 2.0**40))
@example(sigma=0.5)
@example(sigma=2.0**40)
@example(sigma=math.nextafter(1.0, 2.0))
@example(sigma=math.nextafter(1.0, 0.0))
def test_sigma_is_rounded_up_and_hardly(sigma):
    scaled, fractional = module._fractions(np.array([sigma]))
    used = Fraction(int(scaled[0]), 2 ** int(fractional[0]))
    assert sigma <= used <= Fraction(sigma) * (1 + Fraction(1, 2**40))


def test_words_of_an_unfinished_number_are_not_lost(monkeypatch):
    sigma = np.tile([0.5, 1.37, 8.0, 2.0**40], 500)
    whole = discrete_gaussian(sigma, KEY)
    for chunk in (1, 7, 64):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        np.testing.assert_array_equal(discrete_gaussian(sigma, KEY), whole)


@pytest.mark.parametrize("bound", [1, 2, 3, 10**6 + 3, 2**42 - 11])
def test_words_beyond_the_last_whole_multiple_are_drawn_again(bound):
    first_beyond = 2**64 // bound * bound
    at = np.zeros(1, np.int64)
    if first_beyond < 2**64:
        words = np.array([first_beyond, 2**64 - 1, 5], np.uint64)
        assert (module._below(words, at, bound), at[0]) == (5 % bound, 3)
        assert module._below(words, at, bound) == bound  # none is left
    at[0] = 0
    assert (module._below(np.array([first_beyond - 1], np.uint64), at, bound), at[0]) == (bound - 1, 1)


def test_chances_are_exponentials():
    words = np.frombuffer(np.random.default_rng(0).bytes(8 << 20), np.uint64)
    for numerator, denominator in ((0, 1), (1, 2), (1, 1), (3, 7), (2**41 - 3, 2**41)):
        y = numerator / denominator
        for chance, right in ((module._exp_minus, math.exp(-y)), (module._exp_minus_square, math.exp(-y * y / 2))):
            at, trials = np.zeros(1, np.int64), 50_000
            true = sum(chance(words, at, numerator, denominator) for _ in range(trials))
            assert at[0] < len(words)
            assert abs(true - trials * right) <= 6.5 * math.sqrt(trials * right * (1 - right))  # false alarm: 10^-10


def test_one_key_gives_the_same_numbers_and_no_key_others():
    sigma = np.full(50, 1e6)
    np.testing.assert_array_equal(discrete_gaussian(sigma, KEY), discrete_gaussian(sigma, KEY))
    drawn = [discrete_gaussian(sigma), discrete_gaussian(sigma), discrete_gaussian(sigma, KEY)]
    assert len({tuple(each) for each in drawn}) == 3


def test_no_numbers_can_be_drawn():
    assert discrete_gaussian(np.empty(0)).shape == (0,)


@pytest.mark.parametrize("wrong", [0.49, 0.0, -1.0, math.nan, math.inf, math.nextafter(2.0**40, math.inf)])
def test_a_sigma_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"expected standard deviations from 0\.5 to 2\^40"):
        discrete_gaussian(np.array([1.0, wrong]))


def test_a_matrix_of_sigmas_is_refused():
    with pytest.raises(ConfigError, match="in one dimension"):
        discrete_gaussian(np.ones((2, 2)))


# ---------------------------------------------------------------- shares


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "honest"), [(math.sqrt(3), 3), (4.5, 7), (3.0, 1)])
def test_shares_add_up_to_the_noise(sigma, honest):
    total = sum(noise_share(np.full(200_000, sigma), honest, key(sigma, each)) for each in range(honest))
    assert likelihood(total, sigma) > 1e-6  # the gap, at most 3e-4 of a probability, does not show here


def test_shares_of_coordinates_have_their_scales():
    scales = np.tile([2.0**31, 40.0, 2.0**21], 30_000)
    total = sum(noise_share(scales, 4, key(each)) for each in range(5)) / scales  # one more than needed
    for place in range(3):
        assert abs(total[place::3].var() / (5 / 4) - 1.0) < 7 * math.sqrt(2 / 30_000)  # false alarm: 3e-12


@pytest.mark.parametrize("honest", [2, 3, 7, 1000])
def test_the_smallest_share_has_a_standard_deviation_of_one(honest):
    least = np.array([math.sqrt(honest)])
    noise_share(least, honest)
    with pytest.raises(ConfigError, match=f"or more for {honest} to share"):
        noise_share(0.999_999 * least, honest)
    convolution_gap(float(least[0]), honest)
    with pytest.raises(ConfigError, match="expected shares of a standard deviation of 1 or more"):
        convolution_gap(0.999_999 * float(least[0]), honest)


@pytest.mark.parametrize("wrong", [math.nan, -5.0])
def test_noise_that_is_no_standard_deviation_is_refused(wrong):
    with pytest.raises(ConfigError, match="to share"):
        noise_share(np.array([9.0, wrong]), 2)
    with pytest.raises(ConfigError, match="expected shares"):
        convolution_gap(0.0 * wrong, 2)


def test_shares_of_nobody_are_refused():
    for call in (lambda: noise_share(np.ones(3), 0), lambda: convolution_gap(1.0, 0)):
        with pytest.raises(ConfigError, match="expected at least one honest participant"):
            call()


def summed(share, honest, reach=60):
    """Exact probabilities of a sum of shares, and the discrete Gaussian's of that variance."""
    each = pmf(share, reach)
    total = each
    for _ in range(honest - 1):
        total = np.convolve(total, each)
    middle = len(total) // 2
    wide = math.ceil(7 * share * math.sqrt(honest))
    return total[middle - wide : middle + wide + 1], pmf(share * math.sqrt(honest), middle)[
        middle - wide : middle + wide + 1
    ]


@pytest.mark.parametrize("share", [1.0, 1.1, 1.3, 1.6])
@pytest.mark.parametrize("honest", [1, 2, 3, 8])
def test_sums_of_shares_are_within_the_gap_of_the_distribution(share, honest):
    total, right = summed(share, honest)
    off = np.abs(np.log(total / right)).max()
    gap = convolution_gap(share * math.sqrt(honest), honest)
    assert off <= gap / 2 + 1e-13
    if honest == 2:
        assert off > gap / 6  # the bound's order is that of the true distance
    if honest == 1:
        assert gap == 0.0


@pytest.mark.parametrize("honest", [2, 5])
@pytest.mark.parametrize("order", [1.5, 2.0, 8.0, 64.0])
def test_divergence_of_shifted_sums_is_within_the_bound(honest, order):
    total, _ = summed(1.0, honest)
    sigma = math.sqrt(honest)
    for shift in (1, 2, 3):
        here, there = np.log(total[shift:]), np.log(total[:-shift])
        terms = order * here + (1 - order) * there
        divergence = (terms.max() + math.log(np.exp(terms - terms.max()).sum())) / (order - 1)
        assert divergence <= order / 2 * (shift / sigma + convolution_gap(sigma, honest)) ** 2 + 1e-9


def test_gap_vanishes_quickly_with_the_share():
    for share, below in ((1.0, 6e-4), (2.0, 8e-17), (3.0, 3e-38), (4.0, 3e-68)):
        assert below / 20 < convolution_gap(share * 10, 100) < below
