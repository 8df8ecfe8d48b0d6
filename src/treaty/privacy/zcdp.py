"""What Gaussian noise on opened sums costs a row, by zero-concentrated differential privacy (zCDP).

A release is one vector opened with discrete Gaussian noise. The noise of every coordinate is `sigma` units of that
coordinate, a unit being the most by which one row changes it: the bound on |g| for a sum of gradients and that on h
for one of hessians, times the scale of their fixed point, and 1 for a count. No unit is below 1, in integers. A row
that changes c coordinates then has an L2 sensitivity of at most sqrt(c) units, and a release costs it::

    rho = c (1 / sigma + tau)^2 / 2        tau: `convolution_gap`, for noise that is a sum of shares

rho adds up over releases, also where later ones depend on earlier ones. All nodes of a level are one release, because
a row is in one of them.

**Unit of protection:** one row added or removed. Of a row whose values are replaced by others, every difference can be
twice as large: four times the rho. Of a person with m rows: m^2 times. What is opened without noise (number of rows,
public bins) is not covered, nor is what participants see of their own rows and noise.

References
----------
Bun, Steinke, "Concentrated Differential Privacy", TCC 2016 (arXiv 1605.02065): zCDP, its composition. Canonne, Kamath,
Steinke, NeurIPS 2020 (arXiv 2004.00010): theorem 4 on the discrete Gaussian, proposition 12 on epsilon and delta.
Kairouz, Liu, Steinke, ICML 2021 (arXiv 2102.06387): sums of shares. Maddock et al., "Federated Boosted Decision Trees
with Differential Privacy", CCS 2022: releases of a training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treaty.errors import ConfigError
from treaty.privacy.discrete_gaussian import LEAST_SHARE, convolution_gap

_ORDERS = 1.0 + np.exp2(np.arange(-6.0, 24.0, 1 / 64))  # fixed, so that epsilon grows with rho
_MOST_PURE = 700.0  # exp of more overflows
_PURE_ORDERS = _ORDERS[::8]  # fewer: each is computed separately, and neighbours differ little
_LEAST_RHO, _MOST_RHO = 2.0**-100, 2.0**40
_HALVINGS = 48


@dataclass(frozen=True, slots=True)
class Releases:
    """Vectors opened with the same noise; raises ConfigError for a number out of range or a share's sigma below 1."""

    count: int  # vectors, 1 or more
    coordinates: int  # of each vector, those that one row changes, 1 or more, as `level_coordinates`
    sigma: float  # standard deviation of the noise in the sum, in units
    honest: int = 1  # shares the noise is the sum of: the number that `noise_share` is given as well

    def __post_init__(self) -> None:
        if self.count < 1 or self.coordinates < 1:
            raise ConfigError(
                f"expected releases, and coordinates that a row changes, got {self.count} and {self.coordinates}"
            )
        if not 0.0 < self.sigma < math.inf:
            raise ConfigError(f"expected a finite standard deviation above 0, got {self.sigma}")
        convolution_gap(self.sigma, self.honest)

    @property
    def rho(self) -> float:
        """Cost of all of them to a row, in zCDP."""
        return self.count * self.coordinates * (1.0 / self.sigma + convolution_gap(self.sigma, self.honest)) ** 2 / 2.0


@dataclass(frozen=True, slots=True)
class NoiseBudget:
    """What a training costs a row: (epsilon, delta)-differential privacy of one row added or removed."""

    releases: tuple[Releases, ...]
    delta: float
    epsilon: float

    @property
    def rho(self) -> float:
        """Cost in zCDP."""
        return math.fsum(each.rho for each in self.releases)

    @property
    def count(self) -> int:
        """Vectors opened."""
        return sum(each.count for each in self.releases)

    def __str__(self) -> str:
        return (
            f"epsilon = {_rounded_up(self.epsilon)} at delta = {self.delta:g} per row added or removed "
            f"over {self.count} releases"
        )


def budget(releases: Sequence[Releases], delta: float) -> NoiseBudget:
    """Add up what all releases of a training (quantile search and trees) cost a row."""
    return NoiseBudget(tuple(releases), delta, epsilon_of(math.fsum(each.rho for each in releases), delta))


def epsilon_of(rho: float, delta: float) -> float:
    """Return an epsilon for which rho-zCDP is (epsilon, delta)-DP, at most 0.01 % above the smallest one known.

    Raises ConfigError when a number is out of range, or dp-accounting is not installed; so do the functions below.
    """
    if not 0.0 <= rho < math.inf:
        raise ConfigError(f"expected a finite rho of 0 or more, got {rho}")
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"expected a delta above 0 and below 1, got {delta}")
    try:
        from dp_accounting import ZCDpEvent, rdp  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("accounting for noise needs dp-accounting: pip install 'treaty-learn[dp]'") from error
    accountant = rdp.RdpAccountant(_ORDERS)
    accountant.compose(ZCDpEvent(rho))
    return float(accountant.get_epsilon(delta))


def renyi_epsilon(epsilons: Sequence[float], rho: float, delta: float) -> float:
    """Return an epsilon of pure `epsilons` and of rho-zCDP together, for one value or row replaced.

    The worst mechanism of a pure epsilon, above 0 and finite, is randomised response with two outcomes.
    """
    if not 0.0 <= rho < math.inf or not all(0.0 < epsilon < math.inf for epsilon in epsilons):
        raise ConfigError("expected finite epsilons above 0 and a finite rho of 0 or more")
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"expected a delta above 0 and below 1, got {delta}")
    try:
        from dp_accounting import NeighboringRelation, RandomizedResponseDpEvent, ZCDpEvent, rdp
    except ImportError as error:
        raise ConfigError("accounting at a delta needs dp-accounting: pip install 'treaty-learn[dp]'") from error
    if any(epsilon > _MOST_PURE for epsilon in epsilons):
        return math.inf  # floats cannot distinguish its chances
    accountant = rdp.RdpAccountant(_PURE_ORDERS, NeighboringRelation.REPLACE_ONE)
    for epsilon, count in Counter(epsilons).items():
        accountant.compose(RandomizedResponseDpEvent(2.0 / (math.exp(epsilon) + 1.0), 2), count)
    accountant.compose(ZCDpEvent(rho))
    return float(accountant.get_epsilon(delta))


def rho_for(epsilon: float, delta: float) -> float:
    """Return the largest rho that costs at most `epsilon`: the inverse of `epsilon_of`, never above it.

    Divide it among the phases of a training and give each part to `noise_for`.
    """
    if not 0.0 < epsilon < math.inf:
        raise ConfigError(f"expected a finite epsilon above 0, got {epsilon}")
    low, high = _LEAST_RHO, _MOST_RHO
    if epsilon_of(low, delta) > epsilon:
        raise ConfigError(f"epsilon {epsilon} at delta {delta} is out of reach: choose larger ones")
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon_of(middle, delta) <= epsilon else (low, middle)
    return low


def noise_for(rho: float, *, count: int, coordinates: int, honest: int = 1) -> Releases:
    """Return releases (see `Releases`) with the least noise that costs at most `rho` and can be drawn in shares."""
    if not 0.0 < rho < math.inf:
        raise ConfigError(f"expected a finite rho above 0, got {rho}")
    low = high = LEAST_SHARE * math.sqrt(max(honest, 1))
    while Releases(count, coordinates, high, honest).rho > rho:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        enough = Releases(count, coordinates, middle, honest).rho <= rho
        low, high = (low, middle) if enough else (middle, high)
    return Releases(count, coordinates, high, honest)


def level_coordinates(n_features: int) -> int:
    """Return how many sums of one level a row changes: (g, h, 1) in one slot of every feature, and in one total."""
    return 3 * (n_features + 1)


def _rounded_up(value: float) -> str:
    """Write a number with three digits, rounded up (except for errors of floats)."""
    if value <= 0.0:
        return "0"
    places = 2 - math.floor(math.log10(value))
    return f"{math.ceil(round(value * 10.0**places, 6)) / 10.0**places:g}"
