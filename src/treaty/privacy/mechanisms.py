"""Local differential privacy of numbers: each value gets its own noise, on a grid and not in real numbers.

A value t in [-1, 1] is first rounded to a multiple of 2^-20. So is the result, whose distribution is known in integers:
no outcome is more than e^epsilon times as likely for one value as for another. Noise in real numbers, rounded to
floats, does not have that property: its low bits reveal which sums could have given them (Mironov 2012).

All three mechanisms are unbiased. Noise averages out if a value is drawn again: keep the draw, or its key.

References: Dwork, McSherry, Nissim, Smith, "Calibrating Noise to Sensitivity", TCC 2006: Laplace. Duchi, Jordan,
Wainwright, "Minimax Optimal Procedures for Locally Private Estimation", JASA 2018 (arXiv 1604.02390). Wang et al.,
"Collecting and Analyzing Multidimensional Data with Local Differential Privacy", ICDE 2019 (arXiv 1907.00690),
algorithm 2: piecewise. Mironov, "On Significance of the Least Significant Bits for Differential Privacy", CCS 2012.
"""

from __future__ import annotations

import math
import os
import struct

import numpy as np

from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Int32s, Integers, Words, pieces
from treaty.machine.kernels import kernel
from treaty.privacy.discrete_gaussian import keystream
from treaty.privacy.randomised_response import Randomness, stored, uniform64

# steps of the grid from 0 to 1
GRID_BITS = 20
STEPS = 1 << GRID_BITS
# below it noise is a million times the value, and integers run out
LEAST_EPSILON = 2.0**-20
# of `fitted_lambda`
_OF_VARIANCE = 64.0
# random words at a time: they stay in the cache
_CHUNK = 1 << 15
# the curve 2^-x at x = 1/2, where its chords meet
_ROOT = 0.5**0.5
_TRAILING_ZEROS = np.array([10, *((k & -k).bit_length() - 1 for k in range(1, 1024))], np.uint8)
# covers the error of a few float operations
_ROUNDED = 1.0 + 2.0**-50


# ------------------------------------------------------ the mechanisms, for whole multiples of 2^-20, int32 (n,): steps


def laplace(steps: Int32s, epsilon: float, draw: Randomness) -> Floats:
    """Add discrete Laplace noise: a multiple k 2^-20 comes with a probability in proportion to exp(-|k| / s).

    Noise halves with every L steps, L a whole number, and s = L / ln 2 is at least 2^21 / epsilon. The size is
    V L + U: V from coin tosses, U below L, kept with a probability of 2^(-U/L). That is at least 1/2 and off by less
    than 2^-49 of it, which L makes up for: it is larger than needed by 2^-26 of it.
    """
    halving = math.ceil(2 * STEPS * math.log(2.0) / epsilon * (1.0 + 2.0**-26))
    noisy = np.empty(len(steps))
    done, words = 0, np.empty(0, np.uint64)
    while done < len(steps):
        # a number takes one to two words; what is left over is used for the next numbers
        drawn = uniform64(draw, min(_CHUNK, 3 * (len(steps) - done) // 2 + 64))
        words = np.concatenate([words, drawn]) if len(words) else drawn
        more, used = _add_laplace(steps[done:], halving, words, noisy[done:])
        done, words = done + more, words[used:]
    return noisy


def duchi(steps: Int32s, epsilon: float, draw: Randomness) -> Floats:
    """Return one of two numbers, (e^epsilon + 1) / (e^epsilon - 1) or its negative (Duchi et al. 2018).

    The larger has a probability of 1/2 + t (e^epsilon - 1) / (2 (e^epsilon + 1)), a multiple of 2^-63 that is rounded
    towards 1/2. From epsilon 29 on the rounding shows: the other one has a probability of at least 2^-43.
    """
    # the slope is rounded down, towards a probability of 1/2: no value costs more than epsilon
    slope = min(math.floor(math.tanh(epsilon / 2.0) / 2.0 * 2.0**43 / _ROUNDED), 2**42 - 1)
    either = np.empty(len(steps))
    _one_of_two(steps, uniform64(draw, len(steps)), slope, np.rint(2.0**42 / slope * STEPS) / STEPS, either)
    return either


def piecewise(steps: Int32s, epsilon: float, draw: Randomness) -> Floats:
    """Return a number near the value with a large probability, else another one (Wang et al. 2019, Algorithm 2).

    C = (e^(epsilon/2) + 1) / (e^(epsilon/2) - 1). Of the whole numbers from -M to M, M = C 2^20, those of a window of
    width C - 1 around a multiple of t are e^epsilon times as likely as the others. The drawn number is scaled so that
    it is unbiased for the actual window and probabilities, and rounded to the grid.
    """
    most, width, change = _window(epsilon)
    # of words that leave the window, rounded up
    limit = max(1, math.ceil(change * _ROUNDED * 2.0**64))
    # centre of the window of t = 1
    reach = most - width // 2
    chance = limit * 2.0**-64
    # probability of a number inside the window, less that of one outside
    more = (1.0 - chance) / width - chance / (2 * most + 1 - width)
    found, scale = np.empty(len(steps)), STEPS / (more * width * reach)
    for rows in pieces(len(steps), _CHUNK):
        part = steps[rows]
        # drawn once: whether places are drawn again depends on them
        words, fine = uniform64(draw, len(part)), False
        # repeated at most one time in a hundred
        while not fine:
            places = uniform64(draw, len(part))
            fine = _near_or_far(part, words, places, np.uint64(limit), most, width, scale, found[rows])
    return found


MECHANISMS = {"laplace": laplace, "duchi": duchi, "piecewise": piecewise}


def randomise(mechanism: str, t: Floats, epsilon: float, randomness: Randomness | None = None) -> Floats:
    """Release values t (n,), rounded to the grid, through a mechanism; return multiples of 2^-20.

    `randomness` is by default an AES keystream under a new key. Raises ConfigError unless `epsilon`, per value, is
    finite and at least 2^-20, and all values are in [-1, 1].
    """
    _check_epsilon(epsilon)
    steps = np.empty(t.size, np.int32)
    if t.ndim != 1 or not _to_steps(t, steps):
        raise ConfigError("expected values from -1 to 1 in one dimension - at the noise")
    return MECHANISMS[mechanism](steps, epsilon, randomness or keystream())


def stored_noisy_target(path: str | os.PathLike[str], y: Floats, ends: tuple[float, float], epsilon: float) -> Floats:
    """Return the noisy numbers kept in a file, drawing them when there is no such file yet: `epsilon` for each.

    Numbers y (n,) are clipped to the range from ``ends[0]`` to ``ends[1]``, and released through the mechanism that has
    the least variance half-way from the range's middle: Duchi's below an epsilon of 0.8, else piecewise. They are right
    on average for numbers in the range. Raises ConfigError as `randomised_response.stored_noisy_labels` does.
    """
    middle, half, best = 0.5 * (ends[0] + ends[1]), 0.5 * (ends[1] - ends[0]), best_for_numbers(epsilon)
    t = np.clip((y - middle) / half, -1.0, 1.0)
    # a file keeps whole numbers: steps of the grid
    noisy = stored(
        path, np.rint(t * STEPS).astype(np.int64), 0, epsilon,
        lambda: np.rint(randomise(best, t, epsilon) * STEPS).astype(np.int64), struct.pack("<dd", *ends),
    )  # fmt: skip
    return middle + noisy.astype(np.float64) * (half / STEPS)


def best_for_numbers(epsilon: float) -> str:
    """Return the mechanism with the least variance half-way between the middle of a range and its ends."""
    return min(MECHANISMS, key=lambda kind: float(variance(kind, np.array([0.5]), epsilon)[0]))


def noise_variance(mechanism: str, epsilon: float) -> float:
    """Return the variance of a released label or gradient in units of half its range: at its ends, or for numbers."""
    kind, place = ("duchi" if mechanism == "label_rr" else mechanism), 1.0
    if mechanism == "target":
        kind, place = best_for_numbers(epsilon), 0.5
    return float(variance(kind, np.array([place]), epsilon)[0])


def fitted_lambda(mechanism: str, epsilon: float) -> float:
    """Return the `reg_lambda` that suits gradients, or labels, released through a mechanism at this epsilon.

    A leaf of n rows has the weight -G / (H + lambda), and noise of variance v on a row's gradient adds n v to that of
    G. If leaf weights would be spread by d without noise, and a row's hessian is h, the least error is where lambda is
    v / (h d^2). `_OF_VARIANCE` stands for 1 / (h d^2), in units of half a range
    (docs/explanation/fedxgboost_noise.md).
    """
    return float(f"{1.0 + _OF_VARIANCE * noise_variance(mechanism, epsilon):.3g}")


def variance(mechanism: str, t: Floats, epsilon: float) -> Floats:
    """Return the variance of a mechanism's outcome for each value t (n,) in [-1, 1]."""
    _check_epsilon(epsilon)
    if mechanism == "laplace":
        return np.full(np.shape(t), 8.0 / epsilon**2)
    if mechanism == "duchi":
        return 1.0 / math.tanh(epsilon / 2.0) ** 2 - t**2
    less = math.expm1(min(epsilon, 500.0) / 2.0)
    return t**2 / less + (less + 4.0) / (3.0 * less**2)


def largest(mechanism: str, epsilon: float) -> float:
    """Return the largest outcome; `laplace` exceeds it with a probability below 2^-64."""
    _check_epsilon(epsilon)
    if mechanism == "laplace":
        return 1.0 + 66.0 * math.log(2.0) * 2.0 / epsilon
    return 1.0 + 1.0 / math.tanh(epsilon / (2.0 if mechanism == "duchi" else 4.0))


def _check_epsilon(epsilon: float) -> None:
    if not LEAST_EPSILON <= epsilon < math.inf:
        raise ConfigError(f"expected a finite epsilon of at least {LEAST_EPSILON:.1e}, got {epsilon}")


@kernel
def clip_to_steps(values: Integers, low: Integers, high: Integers, steps: Int32s) -> None:
    """Clip values to their ranges, and write where they lie, from -1 at `low` to 1 at `high`, in multiples of 2^-20."""
    for i in range(len(values)):
        width = high[i] - low[i]
        place = (2.0 * values[i] - low[i] - high[i]) / width if width > 0 else 0.0
        steps[i] = np.int32(np.rint(min(max(place, -1.0), 1.0) * STEPS))


@kernel
def to_sent(places: Floats, low: Integers, high: Integers, scale: float, sent: Integers) -> None:
    """Write the numbers at `places` in ranges, or beyond their ends -1 and 1, times `scale` and rounded."""
    for i in range(len(places)):
        sent[i] = np.int64(np.rint(0.5 * scale * (low[i] + high[i] + places[i] * (high[i] - low[i]))))


@kernel
def _to_steps(t: Floats, steps: Int32s) -> bool:
    """Write whole multiples of 2^-20; return whether all values are from -1 to 1."""
    fine = True
    for i in range(len(t)):
        fine &= abs(t[i]) <= 1.0
        steps[i] = np.int32(np.rint(t[i] * STEPS))
    return fine


@kernel
def _one_of_two(steps: Int32s, words: Words, slope: int, size: float, out: Floats) -> None:
    """Write `size` where a word is below 2^63 times its chance, else its negative."""
    for i in range(len(steps)):
        out[i] = size if words[i] >> np.uint64(1) < np.uint64(2**62 + steps[i] * slope) else -size


@kernel
def _near_or_far(
    steps: Int32s, words: Words, places: Words, limit: np.uint64, most: int, width: int, scale: float, out: Floats
) -> bool:
    """Write `scale` times a number of the window around a value, or of those outside if a word is below `limit`.

    Return False if some of `places` are beyond the last whole multiple of the count of numbers and must be drawn again.
    """
    reach, whole = most - width // 2, np.uint64(0xFFFFFFFFFFFFFFFF)
    near, far = np.uint64(width), np.uint64(2 * most + 1 - width)
    last_near, last_far = whole - (whole - near + np.uint64(1)) % near, whole - (whole - far + np.uint64(1)) % far
    even = True
    # no branch: a third would be mispredicted
    for i in range(len(steps)):
        # of the window
        first = ((steps[i] * reach + STEPS // 2) >> GRID_BITS) - width // 2
        outside = words[i] < limit
        # a remainder of a word beyond the last whole multiple would favour small numbers: draw all again
        even &= places[i] <= (last_far if outside else last_near)
        place = np.int64(places[i] % (far if outside else near))
        beside = place - most
        # numbers outside the window are those below it and, shifted by its width, those above
        beside += width if beside >= first else 0
        out[i] = np.rint((beside if outside else first + place) * scale) * (1.0 / STEPS)
    return even


@kernel
def _add_laplace(steps: Int32s, halving: int, words: Words, out: Floats) -> tuple[int, int]:
    """Write steps with discrete Laplace noise until words run out; return how many, and how many words they took.

    A word has 32 bits for the rest, 21 for the level that decides whether it is kept, ten coins and a sign. Mostly
    chords above the curve 2^-share or tangents below it already decide that.
    """
    modulus, half, one = np.uint64(halving), np.uint64(0xFFFFFFFF), np.uint64(1)
    short = halving <= half
    # products below it are not uniform (Lemire 2019)
    least = (half + one) % modulus
    last = np.uint64(0xFFFFFFFFFFFFFFFF) - (modulus - one)
    inverse, first_fall, second_fall = 1.0 / halving, np.log(2.0) * 2.0**-0.25, np.log(2.0) * 2.0**-0.75
    first_tangent, second_tangent = 2.0**-0.25 + 0.25 * first_fall, 2.0**-0.75 + 0.75 * second_fall
    done = at = 0
    while done < len(out) and at + 4 <= len(words):
        word, used = words[at], at + 1
        if short:
            # Lemire's method: the high half of the product is uniform below the modulus, without a division
            product = (word >> np.uint64(32)) * modulus
            rest, uneven = product >> np.uint64(32), (product & half) < least
        else:
            # 32 bits are too few
            rest, used = words[at + 1] % modulus, at + 2
            uneven = words[at + 1] - rest > last
        share, level = np.float64(rest) * inverse, np.float64((word & half) >> np.uint64(11)) * 2.0**-21
        # tangents below the curve 2^-share, at shares 1/4 and 3/4: under them the number is kept for sure
        below = level + 2.0**-21 <= max(first_tangent - first_fall * share, second_tangent - second_fall * share)
        # chords above it: over them the number is rejected for sure
        above = level >= max(1.0 - (2.0 - 2.0 * _ROOT) * share, 2.0 * _ROOT - 0.5 - (2.0 * _ROOT - 1.0) * share)
        coins, negative = (word >> one) & np.uint64(1023), word & one == one
        # tosses until the first head: the geometric part of the size
        halvings = np.int64(_TRAILING_ZEROS[coins])
        if uneven | (coins == 0) | (rest == 0) | ((not below) & (not above)):
            # further bits of the level
            if (not below) and (not above):
                below = level + np.float64(words[used] >> np.uint64(11)) * 2.0**-74 < np.exp2(-share)
                used += 1
            # all coins fell on one side: toss those of further words
            while coins == 0:
                if used == len(words):
                    return done, at
                coins = words[used] & np.uint64(1023)
                halvings += np.int64(_TRAILING_ZEROS[coins])
                used += 1
            # zero has one sign
            below &= not (uneven | (negative & (rest == 0) & (halvings == 0)))
        value = np.int64(rest) + halvings * halving
        # every try is written, and counts if it is kept: a branch on it would be mispredicted a third of the time
        out[done] = np.float64(steps[done] + (-value if negative else value)) * (1.0 / STEPS)
        done, at = done + (1 if below else 0), used
    return done, at


def _window(epsilon: float) -> tuple[int, int, float]:
    """Return M, the window's width (odd) and the chance to leave it, for which the ratio is e^epsilon."""
    whole = 1.0 / math.tanh(epsilon / 4.0)
    most = round(whole * STEPS)
    width = 2 * round(((whole - 1.0) * STEPS - 1.0) / 2.0) + 1
    width = max(1, width)
    odds = (2 * most + 1 - width) * math.exp(-epsilon)
    return most, width, odds / (width + odds)
