"""Costs are compared with formulas of their own, and with exact divergences where there are some."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from treaty.errors import ConfigError
from treaty.privacy.discrete_gaussian import (
    NoiseBudget,
    Releases,
    budget,
    convolution_gap,
    epsilon_of,
    noise_for,
    rho_for,
)

RHOS, DELTAS = st.floats(-6.0, 2.0).map(lambda x: 10.0**x), st.floats(-12.0, -3.0).map(lambda x: 10.0**x)


def tight_epsilon(rho, delta):
    """Canonne, Kamath, Steinke, proposition 12, minimised by another program."""

    def at(log_excess):
        excess = math.exp(log_excess)
        order = 1.0 + excess
        return rho * order + math.log1p(-1.0 / order) - math.log(delta * order) / excess

    best = math.log(math.sqrt(math.log(1 / delta) / rho))
    return max(0.0, optimize.minimize_scalar(at, bounds=(best - 4, best + 4), method="bounded").fun)


def gaussian_delta(rho, epsilon):
    """Exact for a Gaussian of that cost: Balle, Wang, ICML 2018, theorem 8."""
    mu = math.sqrt(2 * rho)
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))


@settings(deadline=None, max_examples=60)
@given(rho=RHOS, delta=DELTAS)
def test_epsilon_is_that_of_the_tight_conversion(rho, delta):
    expected = tight_epsilon(rho, delta)
    assert expected * (1 - 1e-6) - 1e-9 <= epsilon_of(rho, delta) <= expected * (1 + 1e-4) + 1e-7


@settings(deadline=None, max_examples=60)
@given(rho=RHOS, delta=DELTAS)
def test_epsilon_is_between_the_exact_one_and_that_of_bun_and_steinke(rho, delta):
    epsilon = epsilon_of(rho, delta)
    assert gaussian_delta(rho, epsilon) <= delta
    assert epsilon <= (rho + 2 * math.sqrt(rho * math.log(1 / delta))) * (1 + 1e-4)


def test_epsilon_of_a_known_case():
    assert epsilon_of((1 / 4) ** 2 / 2, 1e-3) == pytest.approx(0.6880024554878086, rel=1e-5)  # OpenDP's own test
    assert epsilon_of(0.0, 1e-9) == 0.0


@settings(deadline=None, max_examples=40)
@given(rhos=st.tuples(RHOS, RHOS).map(sorted), delta=DELTAS)
def test_epsilon_grows_with_rho(rhos, delta):
    assert epsilon_of(rhos[0], delta) <= epsilon_of(rhos[1], delta)


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(epsilon=st.floats(0.01, 50.0), delta=DELTAS)
def test_rho_is_the_largest_within_epsilon(epsilon, delta):
    rho = rho_for(epsilon, delta)
    assert epsilon_of(rho, delta) <= epsilon < epsilon_of(rho * (1 + 1e-9), delta)
    assert rho < rho_for(1.01 * epsilon, delta)


@pytest.mark.parametrize("wrong", [0.0, 1.0, -1e-6, math.nan])
def test_a_delta_out_of_range_is_refused(wrong):
    for call in (lambda: epsilon_of(1.0, wrong), lambda: rho_for(1.0, wrong), lambda: budget([], wrong)):
        with pytest.raises(ConfigError, match="expected a delta above 0 and below 1"):
            call()


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
def test_costs_that_are_none_are_refused(wrong):
    with pytest.raises(ConfigError, match="expected a finite rho of 0 or more"):
        epsilon_of(wrong, 1e-6)
    with pytest.raises(ConfigError, match="expected a finite epsilon above 0"):
        rho_for(wrong, 1e-6)
    with pytest.raises(ConfigError, match="expected a finite rho above 0"):
        noise_for(wrong, count=1, coordinates=1)


def test_without_the_accountant_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'treaty-learn\[dp\]'"):
        epsilon_of(1.0, 1e-6)


# ---------------------------------------------------------------- releases


def test_a_release_costs_its_squared_sensitivity_over_twice_the_variance():
    one = Releases(count=1, coordinates=93, sigma=50.0)
    assert one.rho == pytest.approx(93 / (2 * 50.0**2), rel=1e-12)
    assert Releases(80, 93, 50.0).rho == pytest.approx(80 * one.rho, rel=1e-12)
    assert Releases(80, 93, 50.0, honest=4).rho == pytest.approx(80 * one.rho, rel=1e-12)  # shares of 25: no gap
    assert Releases(80, 93, 2.0, honest=4).rho > 80 * 93 / 8 * (1 + 1e-3)  # shares of 1: a gap


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"count": 0}, "expected releases"),
        ({"coordinates": 0}, "expected releases"),
        ({"sigma": 0.0}, "expected a finite standard deviation"),
        ({"sigma": math.nan}, "expected a finite standard deviation"),
        ({"sigma": math.inf}, "expected a finite standard deviation"),
        ({"honest": 0}, "expected at least one honest participant"),
        ({"honest": 26}, "expected shares of a standard deviation of 1 or more"),
    ],
)
def test_releases_out_of_range_are_refused(wrong, text):
    with pytest.raises(ConfigError, match=text):
        Releases(**{"count": 1, "coordinates": 1, "sigma": 5.0} | wrong)


@pytest.mark.parametrize(("sigma", "honest"), [(1.0, 1), (2.0, 1), (2.0, 4), (3.0, 2)])
@pytest.mark.parametrize("count", [1, 4])
def test_noise_protects_by_as_much_as_is_said(sigma, honest, count):
    """Exact delta of counts opened `count` times, each by one row larger or not."""
    x = np.arange(-60, 61)
    each = np.exp(-(x**2) * honest / (2 * sigma**2))
    each /= each.sum()
    total = each
    for _ in range(honest - 1):
        total = np.convolve(total, each)
    total = total[len(total) // 2 - 8 * math.ceil(sigma) :][: 16 * math.ceil(sigma) + 1]  # all but 10^-15
    here, there = np.append(total, 0.0), np.insert(total, 0, 0.0)
    mine, other = np.ones(1), np.ones(1)
    for _ in range(count):
        mine, other = np.outer(mine, here).ravel(), np.outer(other, there).ravel()
    spent = budget([Releases(count, 1, sigma, honest)], 1e-4)
    assert 0.0 < np.maximum(mine - math.exp(spent.epsilon) * other, 0.0).sum() <= 1e-4


@settings(deadline=None, max_examples=60)
@given(
    rho=st.floats(-4.0, 3.0).map(lambda x: 10.0**x),
    count=st.integers(1, 2000),
    coordinates=st.integers(1, 10_000),
    honest=st.integers(1, 40),
)
def test_noise_is_the_least_within_rho(rho, count, coordinates, honest):
    found = noise_for(rho, count=count, coordinates=coordinates, honest=honest)
    assert (found.count, found.coordinates, found.honest) == (count, coordinates, honest)
    assert found.rho <= rho
    if found.sigma > math.sqrt(honest) * (1 + 1e-9):
        assert Releases(count, coordinates, found.sigma * (1 - 1e-9), honest).rho > rho
    less = noise_for(rho / 1.1, count=count, coordinates=coordinates, honest=honest)
    assert less.sigma >= found.sigma


def test_a_smaller_norm_costs_less_and_changed_coordinates_still_count_for_shares():
    wide, narrow = Releases(10, 40, 8.0), Releases(10, 40, 8.0, norm=1.0)
    assert wide.rho == pytest.approx(10 * 40 / 128)
    assert Releases(10, 40, 8.0, norm=math.sqrt(40)).rho == pytest.approx(wide.rho)
    assert narrow.rho == pytest.approx(10 / 128)
    gap = convolution_gap(8.0, 30)
    assert Releases(10, 40, 8.0, 30, norm=1.0).rho == pytest.approx(5 * (1 / 8 + math.sqrt(40) * gap) ** 2, rel=1e-12)
    found = noise_for(0.01, count=10, coordinates=40, norm=1.5)
    assert found.norm == 1.5
    assert found.sigma == pytest.approx(1.5 * math.sqrt(10 / 0.02), rel=1e-6)


# ---------------------------------------------------------------- a training


def test_costs_of_phases_add_up():
    phases = [Releases(20, 30 * 31, 500.0, 3), Releases(80, 93, 200.0, 3, norm=3.5)]
    total = budget(phases, 1e-6)
    assert total.count == 100
    assert total.rho == pytest.approx(sum(each.rho for each in phases))
    assert total.epsilon == epsilon_of(total.rho, 1e-6)
    assert budget([], 1e-6).epsilon == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 3.9, 20.0])
def test_a_training_planned_for_epsilon_costs_no_more(epsilon):
    rho = rho_for(epsilon, 1e-6)
    parts = (
        noise_for(0.2 * rho, count=20, coordinates=930, honest=4),
        noise_for(0.8 * rho * (1 - 1e-12), count=80, coordinates=93, honest=4),
    )
    assert 0.999 * epsilon < budget(parts, 1e-6).epsilon <= epsilon


def test_the_cost_is_said_in_words():
    said = str(NoiseBudget((Releases(30, 93, 50.0), Releases(50, 93, 50.0)), 1e-6, 3.8999))
    assert said == "epsilon = 3.9 at delta = 1e-06 per row added or removed over 80 releases"


@settings(deadline=None)
@given(epsilon=st.floats(1e-9, 1e6))
def test_the_epsilon_said_is_never_too_small(epsilon):
    said = float(str(NoiseBudget((), 1e-6, epsilon)).split()[2])
    assert epsilon * (1 - 1e-8) <= said <= epsilon * 1.0101


def test_no_cost_is_said_as_none():
    assert str(budget([], 1e-6)).startswith("epsilon = 0 at")
