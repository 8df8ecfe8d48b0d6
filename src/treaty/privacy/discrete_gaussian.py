"""Discrete Gaussian noise: sampled exactly, and in shares that participants of a sum add before anybody sees it.

N_Z(0, sigma^2) gives the integer x with a probability proportional to exp(-x^2 / (2 sigma^2)). Nothing here is rounded
from real numbers, so the low bits of a noisy sum reveal nothing (Mironov's attack on floating-point noise).

**Exact:** given uniform random bits, every number drawn has exactly this distribution. Only integers are compared, with
uniform integers that are exactly uniform. The standard deviation is a fraction s / 2^f of 41 significant bits, the next
one at or above what was asked for: noise is larger by a factor of at most 1 + 2^-40, never smaller.

**Not exact:** bits are an AES-256-CTR keystream under a key of the operating system (distinguishing them from uniform
ones is breaking AES, whatever the statistical distance); and the time taken, which depends on what is drawn, is not
hidden.

How a number is drawn: its size is i = (k + x) sigma, k whole and 0 <= x < 1. k comes with exp(-k^2 / 2), a sign and i
uniformly among the integers of the k-th step, and x is a fraction a / s. The number is kept with exp(-x (2k + x) / 2),
in all exp(-(k + x)^2 / 2). Every factor is a product of exp(-1/2), exp(-x) and exp(-x^2 / 2), and a chance of exp(-y),
y <= 1, is whether the first failure of trials with chances y, y/2, y/3 ... has an odd number.

References
----------
Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020 (arXiv 2004.00010), algorithms
1 and 3: chances of exp(-y). Karney, "Sampling exactly from the normal distribution", ACM TOMS 42 (2016), algorithm D:
steps of one sigma. Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism", ICML 2021 (arXiv 2102.06387):
sums of shares.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Integers
from treaty.machine.kernels import kernel

LEAST_SIGMA, MOST_SIGMA = 0.5, 2.0**40
LEAST_SHARE = 1.0
"""Least standard deviation of one participant's share: below it, a sum of shares is too far from the distribution."""

_PRECISION = 41  # significant bits of a standard deviation
_CHUNK = 1 << 15  # random words at a time: they stay in the cache
_WORDS = 32  # random words at a time for each of the last numbers: one to two times the mean need


def discrete_gaussian(sigma: Floats, key: bytes | None = None) -> Integers:
    """Draw independent numbers from N_Z(0, sigma^2), int64 (length,); beyond 10 sigma with a chance below 2^-71.

    Each `sigma` is from 0.5 to 2^40, rounded up to 41 significant bits; others raise ConfigError. Only tests give a
    key, of 32 bytes; by default it is from the operating system's generator.
    """
    if sigma.ndim != 1 or not np.all((sigma >= LEAST_SIGMA) & (sigma <= MOST_SIGMA)):
        raise ConfigError("expected standard deviations from 0.5 to 2^40 in one dimension - at the noise")
    scaled, fractional = _fractions(sigma)
    stream = Cipher(algorithms.AES(secrets.token_bytes(32) if key is None else key), modes.CTR(bytes(16))).encryptor()
    out = np.empty(len(sigma), np.int64)
    done, words = 0, np.empty(0, np.uint64)
    while done < len(out):
        fresh = np.frombuffer(stream.update(bytes(8 * min(_CHUNK, _WORDS * (len(out) - done)))), np.dtype("<u8"))
        words = np.concatenate([words, fresh])
        drawn, used = _fill(out[done:], scaled[done:], fractional[done:], words)
        done, words = done + drawn, words[used:]
    return out


def noise_share(sigma: Floats, honest: int, key: bytes | None = None) -> Integers:
    """Draw one participant's share of the noise on a sum, int64 (length,): N_Z(0, sigma^2 / honest) per coordinate.

    `sigma` is the least standard deviation of the sum's noise, in the units of each coordinate's integers. `honest` is
    the smallest number of shares in the sum that are unknown to those who see it: all n when nobody drops out and no
    participant sees the sum; n - 1 when one participant sees it, who knows its own share; in both cases less as many as
    may drop out or collude. Further shares only add noise. A sum of `honest` shares is beyond 10 sigma with a chance
    below 2^-71: leave room for that in the integers. It is not quite a discrete Gaussian: accounts must add
    `convolution_gap`.

    Raises ConfigError when `honest` is below 1, or sigma / sqrt(honest) below 1 or above 2^40 somewhere.
    """
    _check_honest(honest)
    each = sigma * ((1.0 + 2.0**-50) / math.sqrt(honest))  # the factor covers the error of the floats
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
    differ by d the Rényi divergence of order a is at most a (|d| / sigma + tau)^2 / 2 (Kairouz, Liu, Steinke 2021,
    theorem on sums of discrete Gaussians, which needs shares of 1/2 or more). At shares of standard deviation 1, 2, 3
    and 4 tau is below 6e-4, 8e-17, 3e-38 and 3e-68 with up to 100 shares. Raises ConfigError when `honest` is below 1
    or a share's standard deviation below 1.
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


# ---------------------------------------------------------------- kernels: words are read one after the other


@kernel
def _below(words: NDArray[np.uint64], at: Integers, bound: int) -> int:
    """Return an exactly uniform number below `bound`; `bound` itself when words run out."""
    modulus = np.uint64(bound)
    last = np.uint64(0xFFFFFFFFFFFFFFFF) - (modulus - np.uint64(1))
    while at[0] < len(words):
        word = words[at[0]]
        at[0] += 1
        rest = word % modulus
        if word - rest <= last:  # within a whole multiple of bound
            return int(np.int64(rest))  # int() of a uint64 stays unsigned in numba
    return bound


@kernel
def _exp_minus(words: NDArray[np.uint64], at: Integers, numerator: int, denominator: int) -> bool:
    """Return true with a chance of exp(-numerator / denominator), a fraction in [0, 1]."""
    trial = 1
    while _below(words, at, denominator * trial) < numerator:
        trial += 1
    return trial % 2 == 1


@kernel
def _exp_minus_square(words: NDArray[np.uint64], at: Integers, numerator: int, denominator: int) -> bool:
    """Return true with a chance of exp(-x^2 / 2), x = numerator / denominator in [0, 1)."""
    trial = 1
    while _below(words, at, denominator) < numerator and _below(words, at, 2 * trial * denominator) < numerator:
        trial += 1
    return trial % 2 == 1


@kernel
def _attempt(words: NDArray[np.uint64], at: Integers, scaled: int, fractional: int) -> tuple[bool, int]:
    """Propose a number; return whether to keep it, and the number."""
    k = 0
    while _exp_minus(words, at, 1, 2):
        k += 1
        if at[0] == len(words):
            return False, 0
    for _ in range(k * (k - 1)):
        if not _exp_minus(words, at, 1, 2):
            return False, 0
    one = 1 << fractional
    first = (k * scaled + one - 1) >> fractional  # least integer of the k-th step
    width = (scaled + one - 1) >> fractional
    drawn = _below(words, at, 2 * width)
    size = first + (drawn >> 1)
    x = (size << fractional) - k * scaled
    negative = drawn & 1 == 1
    if x >= scaled or (negative and size == 0):
        return False, 0
    for _ in range(k):
        if not _exp_minus(words, at, x, scaled):
            return False, 0
    return _exp_minus_square(words, at, x, scaled), -size if negative else size


@kernel
def _fill(out: Integers, scaled: Integers, fractional: Integers, words: NDArray[np.uint64]) -> tuple[int, int]:
    """Draw numbers until words run out; return how many, and how many words they took.

    A number is drawn only when words are left after it. The words of a number that was not finished must be given
    again, with more behind them: discarding them would bias the noise against numbers that need many words.
    """
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
