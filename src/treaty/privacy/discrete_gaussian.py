"""Discrete Gaussian noise, sampled exactly and in shares that are summed before they are seen; and its cost.

N_Z(0, sigma^2) gives the integer x with a probability proportional to exp(-x^2 / (2 sigma^2)). Nothing here is rounded
from real numbers, so the low bits of a noisy sum reveal nothing (Mironov's attack on floating-point noise).

**Exact:** given uniform random bits, every number drawn has exactly this distribution. Only integers are compared, with
exactly uniform integers. The standard deviation is a fraction s / 2^f of 41 significant bits, the next one at or above
the given one: noise is larger by a factor of at most 1 + 2^-40, never smaller.

**Not exact:** bits are an AES-256-CTR keystream under a key of the operating system (distinguishing them from uniform
ones is breaking AES); and the time taken, which depends on the numbers drawn, is not hidden.

How a number is drawn: its size is i = (k + x) sigma, k whole and 0 <= x < 1. k comes with exp(-k^2 / 2), a sign and i
uniformly among the integers of the k-th step, and x is a fraction a / s. The number is kept with exp(-x (2k + x) / 2),
in all exp(-(k + x)^2 / 2). Every factor is a product of exp(-1/2), exp(-x) and exp(-x^2 / 2), and a chance of exp(-y),
y <= 1, is whether the first failure of trials with chances y, y/2, y/3 ... has an odd number.

**Cost**, by zero-concentrated differential privacy (zCDP). A release is one vector opened with this noise. The noise of
every coordinate is `sigma` units of that coordinate, a unit being the most by which one row changes it: the bound on
|g| for a sum of gradients and that on h for one of hessians, times the scale of their fixed point, and 1 for a count.
No unit is below 1, in integers. A row that changes c coordinates then has an L2 norm of at most sqrt(c) units, or less
where that is known, and a release costs it::

    rho = (norm / sigma + sqrt(c) tau)^2 / 2        tau: `convolution_gap`, for noise that is a sum of shares

rho adds up over releases, also where later ones depend on earlier ones. All leaves of a tree are one release, because
a row is in one of them. The unit of protection is one row added or removed. If a row's values are replaced by others,
every difference can be twice as large: four times the rho. A person with m rows: m^2 times. Values opened without noise
(number of rows, public bins) are not covered, nor what participants see of their own rows and noise.

References: Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020 (arXiv 2004.00010),
algorithms 1 and 3: chances of exp(-y); theorem 4 on the distribution, proposition 12 on epsilon and delta. Karney,
"Sampling exactly from the normal distribution", ACM TOMS 42 (2016), algorithm D: steps of one sigma. Kairouz, Liu,
Steinke, "The Distributed Discrete Gaussian Mechanism", ICML 2021 (arXiv 2102.06387): sums of shares. Bun, Steinke,
"Concentrated Differential Privacy", TCC 2016 (arXiv 1605.02065): zCDP and its composition. Maddock et al., "Federated
Boosted Decision Trees with Differential Privacy", CCS 2022: releases of a training.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Integers, Words
from treaty.machine.kernels import kernel

LEAST_SIGMA, MOST_SIGMA = 0.5, 2.0**40
# least standard deviation of one participant's share: below it, a sum of shares is too far from the distribution
LEAST_SHARE = 1.0
# significant bits of a standard deviation
_PRECISION = 41
# random words at a time, which stay in the cache, and for each of the last numbers: one to two times the mean need
_CHUNK, _WORDS = 1 << 15, 32
_ZEROS = memoryview(bytes(8 * _CHUNK))


def keystream(key: bytes | None = None, stream: int = 0) -> Callable[[int], bytes]:
    """Return a source of random bytes: AES-256-CTR under `key`, by default one from the operating system's generator.

    Streams of different numbers, from 0 to 2^64 - 1, share no byte below 2^68.
    """
    start = modes.CTR(stream.to_bytes(8, "big") + bytes(8))
    cipher = Cipher(algorithms.AES(secrets.token_bytes(32) if key is None else key), start).encryptor()
    # encrypting zeros gives the keystream itself
    return lambda count: cipher.update(_ZEROS[:count] if count <= len(_ZEROS) else bytes(count))


def discrete_gaussian(sigma: Floats, key: bytes | None = None) -> Integers:
    """Draw independent numbers from N_Z(0, sigma^2), int64 (length,); beyond 10 sigma with a probability below 2^-71.

    Each `sigma` is from 0.5 to 2^40, rounded up to 41 significant bits; others raise ConfigError. The key,
    of 32 bytes, is by default from the operating system's generator.
    """
    if sigma.ndim != 1 or not np.all((sigma >= LEAST_SIGMA) & (sigma <= MOST_SIGMA)):
        raise ConfigError("expected standard deviations from 0.5 to 2^40 in one dimension - at the noise")
    scaled, fractional = _fractions(sigma)
    draw, out = keystream(key), np.empty(len(sigma), np.int64)
    done, words = 0, np.empty(0, np.uint64)
    while done < len(out):
        fresh = np.frombuffer(draw(8 * min(_CHUNK, _WORDS * (len(out) - done))), np.dtype("<u8"))
        words = np.concatenate([words, fresh])
        drawn, used = _fill(out[done:], scaled[done:], fractional[done:], words)
        done, words = done + drawn, words[used:]
    return out


def noise_share(sigma: Floats, honest: int, key: bytes | None = None) -> Integers:
    """Draw one participant's share of the noise on a sum, int64 (length,): N_Z(0, sigma^2 / honest) per coordinate.

    `sigma` is the least standard deviation of the sum's noise, in the units of each coordinate's integers. `honest` is
    the smallest number of shares in the sum that are unknown to those who see it: all n when nobody drops out and no
    participant sees the sum; n - 1 when a participant sees it, who knows its own share; in both cases less as many as
    may drop out or collude. Further shares only add noise. A sum of `honest` shares is beyond 10 sigma with a
    probability below 2^-71: leave room for that in the integers. It is not quite a discrete Gaussian: accounts must add
    `convolution_gap`.

    Raises ConfigError when `honest` is below 1, or sigma / sqrt(honest) below 1 or above 2^40 somewhere.
    """
    _check_honest(honest)
    # the factor covers the error of the floats
    each = sigma * ((1.0 + 2.0**-50) / math.sqrt(honest))
    if not np.all(each >= LEAST_SHARE):
        raise ConfigError(
            f"expected noise of a standard deviation of {math.sqrt(honest):g} or more for {honest} to share, got "
            f"{np.min(sigma):g}; scale the values up or add more noise"
        )
    return discrete_gaussian(each, key)


def convolution_gap(sigma: float, honest: int) -> float:
    """Bound how far a sum of `honest` shares is from a discrete Gaussian of variance sigma^2.

    `sigma` is the least over coordinates. Returns tau = 10 sum_{k=1}^{honest-1} exp(-2 pi^2 (sigma^2 / honest) k / (k
    + 1)), rounded up. Probabilities of any outcome differ by a factor of at most exp(tau / 2), and between sums that
    differ by d the Rényi divergence of order a is at most a (|d| / sigma + tau)^2 / 2 (Kairouz, Liu, Steinke 2021, for
    shares of 1/2 or more). With up to 100 shares of standard deviation 1, 2, 3 and 4, tau is below 6e-4, 8e-17, 3e-38
    and 3e-68. Raises ConfigError when `honest` is below 1 or a share's standard deviation below 1.
    """
    _check_honest(honest)
    share = sigma**2 / honest
    if not share * (1.0 + 2.0**-40) >= LEAST_SHARE**2:
        raise ConfigError(f"expected shares of a standard deviation of 1 or more, got {math.sqrt(max(share, 0.0)):g}")
    terms = (math.exp(-2.0 * math.pi**2 * share * k / (k + 1)) for k in range(1, honest))
    return 10.0 * math.fsum(terms) * (1.0 + 1e-9)


def _fractions(sigma: Floats) -> tuple[Integers, Integers]:
    """Return s and f of the least s / 2^f >= sigma with s of 41 bits; every step is exact in float64."""
    fractional = _PRECISION - np.frexp(sigma)[1]
    return np.ceil(np.ldexp(sigma, fractional)).astype(np.int64), fractional.astype(np.int64)


def _check_honest(honest: int) -> None:
    if honest < 1:
        raise ConfigError(f"expected at least one honest participant whose noise is in a sum, got {honest}")


@kernel
def _below(words: Words, at: Integers, bound: int) -> int:
    """Return an exactly uniform number below `bound`; `bound` itself when words run out."""
    modulus = np.uint64(bound)
    last = np.uint64(0xFFFFFFFFFFFFFFFF) - (modulus - np.uint64(1))
    while at[0] < len(words):
        word = words[at[0]]
        at[0] += 1
        rest = word % modulus
        # within a whole multiple of bound; int() of a uint64 stays unsigned in numba
        if word - rest <= last:
            return int(np.int64(rest))
    return bound


@kernel
def _exp_minus(words: Words, at: Integers, numerator: int, denominator: int) -> bool:
    """Return true with a probability of exp(-numerator / denominator), a fraction in [0, 1]."""
    trial = 1
    while _below(words, at, denominator * trial) < numerator:
        trial += 1
    return trial % 2 == 1


@kernel
def _exp_minus_square(words: Words, at: Integers, numerator: int, denominator: int) -> bool:
    """Return true with a probability of exp(-x^2 / 2), x = numerator / denominator in [0, 1)."""
    trial = 1
    while _below(words, at, denominator) < numerator and _below(words, at, 2 * trial * denominator) < numerator:
        trial += 1
    return trial % 2 == 1


@kernel
def _attempt(words: Words, at: Integers, scaled: int, fractional: int) -> tuple[bool, int]:
    """Propose a number; return whether to keep it, and the number."""
    k = 0
    # k successes in a row come with exp(-k / 2); with the next loop's exp(-k (k - 1) / 2) that is exp(-k^2 / 2)
    while _exp_minus(words, at, 1, 2):
        k += 1
        if at[0] == len(words):
            return False, 0
    for _ in range(k * (k - 1)):
        if not _exp_minus(words, at, 1, 2):
            return False, 0
    one = 1 << fractional
    # least integer of the k-th step
    first = (k * scaled + one - 1) >> fractional
    width = (scaled + one - 1) >> fractional
    # one draw for the place in the step and, in its lowest bit, the sign
    drawn = _below(words, at, 2 * width)
    size = first + (drawn >> 1)
    x = (size << fractional) - k * scaled
    negative = drawn & 1 == 1
    # beyond the step, or a second zero: propose again
    if x >= scaled or (negative and size == 0):
        return False, 0
    # together exp(-k x) exp(-x^2 / 2) = exp(-x (2 k + x) / 2)
    for _ in range(k):
        if not _exp_minus(words, at, x, scaled):
            return False, 0
    return _exp_minus_square(words, at, x, scaled), -size if negative else size


@kernel
def _fill(out: Integers, scaled: Integers, fractional: Integers, words: Words) -> tuple[int, int]:
    """Draw numbers until words run out; return how many, and how many words they took.

    The words of a number that was not finished must be given again, followed by more.
    """
    # a number is drawn only when words are left after it: discarding the words of an unfinished one would bias the
    # noise against numbers that need many words
    at = np.zeros(1, np.int64)
    used = 0
    for i in range(len(out)):
        kept = False
        while not kept and at[0] < len(words):
            kept, out[i] = _attempt(words, at, scaled[i], fractional[i])
        if at[0] == len(words):
            return i, used
        used = at[0]
    return len(out), used


# fixed, so that epsilon grows with rho
_ORDERS = 1.0 + np.exp2(np.arange(-6.0, 24.0, 1 / 64))
# exp of more overflows
_MOST_PURE = 700.0
# fewer, as each is computed separately and neighbours differ little
_PURE_ORDERS = _ORDERS[::8]
_LEAST_RHO, _MOST_RHO = 2.0**-100, 2.0**40
_HALVINGS = 48


@dataclass(frozen=True, slots=True)
class Releases:
    """Vectors opened with the same noise; raises ConfigError for a number out of range or a share's sigma below 1."""

    # vectors, 1 or more
    count: int
    # coordinates of a vector that one row changes, 1 or more
    coordinates: int
    # standard deviation of the noise in the sum, in units
    sigma: float
    # as in `noise_share`
    honest: int = 1
    # L2 norm of what one row changes, in units; 0 stands for 1 unit in each coordinate
    norm: float = 0.0

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
        root = math.sqrt(self.coordinates)
        moved = (self.norm or root) / self.sigma + root * convolution_gap(self.sigma, self.honest)
        return self.count * moved**2 / 2.0


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
    accounting = _accounting(rho, delta)
    accountant = accounting.rdp.RdpAccountant(_ORDERS)
    accountant.compose(accounting.ZCDpEvent(rho))
    return float(accountant.get_epsilon(delta))


def _accounting(rho: float, delta: float) -> Any:
    """Return dp-accounting, after checking rho and delta."""
    if not 0.0 <= rho < math.inf:
        raise ConfigError(f"expected a finite rho of 0 or more, got {rho}")
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"expected a delta above 0 and below 1, got {delta}")
    try:
        import dp_accounting  # type: ignore[import-untyped]
        from dp_accounting import rdp  # noqa: F401 - a module of its own
    except ImportError as error:
        raise ConfigError("accounting for noise needs dp-accounting: pip install 'treaty-learn[dp]'") from error
    return dp_accounting


def renyi_epsilon(epsilons: Sequence[float], rho: float, delta: float) -> float:
    """Return an epsilon of pure `epsilons` and of rho-zCDP together, for one value or row replaced.

    The worst mechanism of a pure epsilon, above 0 and finite, is randomised response with two outcomes.
    """
    if not all(0.0 < epsilon < math.inf for epsilon in epsilons):
        raise ConfigError("expected finite epsilons above 0")
    accounting = _accounting(rho, delta)
    # floats cannot distinguish such probabilities
    if any(epsilon > _MOST_PURE for epsilon in epsilons):
        return math.inf
    accountant = accounting.rdp.RdpAccountant(_PURE_ORDERS, accounting.NeighboringRelation.REPLACE_ONE)
    for epsilon, count in Counter(epsilons).items():
        accountant.compose(accounting.RandomizedResponseDpEvent(2.0 / (math.exp(epsilon) + 1.0), 2), count)
    accountant.compose(accounting.ZCDpEvent(rho))
    return float(accountant.get_epsilon(delta))


@cache
def rho_for(epsilon: float, delta: float) -> float:
    """Return the largest rho that costs at most `epsilon`, the inverse of `epsilon_of`, rounded down."""
    if not 0.0 < epsilon < math.inf:
        raise ConfigError(f"expected a finite epsilon above 0, got {epsilon}")
    low, high = _LEAST_RHO, _MOST_RHO
    if epsilon_of(low, delta) > epsilon:
        raise ConfigError(f"epsilon {epsilon} at delta {delta} is out of reach: choose larger ones")
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon_of(middle, delta) <= epsilon else (low, middle)
    return low


def noise_for(rho: float, *, count: int, coordinates: int, honest: int = 1, norm: float = 0.0) -> Releases:
    """Return releases (see `Releases`) with the least noise that costs at most `rho` and can be drawn in shares."""
    if not 0.0 < rho < math.inf:
        raise ConfigError(f"expected a finite rho above 0, got {rho}")
    low = high = LEAST_SHARE * math.sqrt(max(honest, 1))
    while Releases(count, coordinates, high, honest, norm).rho > rho:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        enough = Releases(count, coordinates, middle, honest, norm).rho <= rho
        low, high = (low, middle) if enough else (middle, high)
    return Releases(count, coordinates, high, honest, norm)


def _rounded_up(value: float) -> str:
    """Write a number with three digits, rounded up (except for errors of floats)."""
    if value <= 0.0:
        return "0"
    places = 2 - math.floor(math.log10(value))
    return f"{math.ceil(round(value * 10.0**places, 6)) / 10.0**places:g}"
