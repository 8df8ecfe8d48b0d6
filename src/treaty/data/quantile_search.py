"""The joint quantile search of systems split by row, as arithmetic: no message is sent here and nothing is hidden.

Participants hold rows of the same features. A leader learns, round by round, how many rows of all participants
together lie below its probes, and ends with the cuts that `fit_bins` would choose on the pooled table.

Deviations from the paper (Tian et al., FederBoost, section on distributed bucket construction):

* All quantiles of all features are searched together, one round for all of their probes.
* The search runs over float32 numbers in their order, each a whole number (`keys_of`), not over real numbers of a
  domain. So no domain has to be declared, nothing has to be scaled, and the finest step is from one float32 to the
  next. For `wide` features it runs over float64 numbers.
* A probe is not the middle of its interval but the roundest key in it (most trailing zero bits). Intervals still halve,
  so a float32 is reached in 32 rounds, a float64 in 64, and 0, powers of two and whole numbers much earlier. Where the
  last probe cut off an upper part without rows, the rows probably share the value it begins with: the key after that
  value is opened, too. (Opening it with every probe saves a round or two, and shows single rows three to five times as
  often.)
* Cuts are tie-aware, as everywhere in Treaty: targets are placed again in every round on what is known by then, so a
  heavy value found early (a column that is 94 % zeros) leaves the other bins to the other values.

The leader learns the number of rows below each probe. No interval of fewer than `least_rows` rows is probed, but a
probe may cut a few rows off a large one; `smallest_interval` returns the fewest.

**Exact.** With no tolerance and no least number of rows, bins hold the rows that they hold on the pooled table. A cut
there is the middle between two neighbouring values. So once a feature's bins are settled, the search goes on in the
intervals at both sides of each cut until it has these values themselves. The leader learns them, and how many rows have
each; of a feature with no more values than bins, it learns all of them.

A feature's opened points are keys in ascending order with the number of rows below each. Two neighbours k and k' bound
an interval of the keys k..k'-1. An interval of one key is a value; a wider one may hold several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import MOST_BINS
from treaty.errors import ConfigError, LocalProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers, folder_of, forget, new
from treaty.machine.kernels import inner, kernel
from treaty.machine.process import concurrently

# keys, within a thousandth of the number: treated as one value when other bins' targets are set
_NARROW = 1 << 12
# stands for more than an int64 holds: half of all float64 numbers
_WIDEST = (1 << 63) - 1
# a bin is at most an eighth of an even share off its target, whatever the tolerance
_SHARE = 8


@inner
def _width(keys: Integers, i: int) -> int:
    width = keys[i + 1] - keys[i]
    return width if width > 0 else _WIDEST


@kernel
def _place(
    keys: Integers, counts: Integers, max_bin: int, least_rows: int, tolerance: float, wanted: Flags, opens: Flags
) -> None:
    last = keys.size - 1
    n = counts[last]
    filled = 0
    for i in range(last):
        filled += counts[i + 1] > counts[i]
    # few intervals have rows: the distinct values may be as few, and each then has a bin of its own
    if filled <= max_bin:
        for i in range(last):
            rows = counts[i + 1] - counts[i]
            opens[i] = rows > 0
            wanted[i] = rows >= least_rows and _width(keys, i) > 1
        return

    # first pass: heavy intervals get bins of their own; what they hold is no row of the walk below
    rows_left, bins_left = np.float64(n), max_bin
    for i in range(last):
        rows, width = counts[i + 1] - counts[i], _width(keys, i)
        # heavy, or may hold a heavy value
        if rows * max_bin > n:
            wanted[i] = rows >= least_rows and width > 1
            if not wanted[i] or width <= _NARROW:
                rows_left -= rows
                bins_left -= 1

    # second pass: one walk over the light intervals, as `tie_aware_cuts` walks over values
    slack = min(tolerance * n, rows_left / (_SHARE * bins_left))
    is_open = False
    # of the open bin, as numbers of rows below
    start = target = 0.0
    # rows by which the last bin, closed within the slack, misses its target; negative: exceeds it
    lacking = 0.0
    for i in range(last):
        low, high = counts[i], counts[i + 1]
        if low == high:
            continue
        rows, width = high - low, _width(keys, i)
        divisible = rows >= least_rows and width > 1
        if rows * max_bin > n and (not divisible or width <= _NARROW):
            is_open, opens[i], lacking = False, True, 0.0
            continue
        if not is_open and bins_left > 0:
            is_open, opens[i] = True, True
            start, target = np.float64(low), low + lacking + (rows_left - lacking) / bins_left
            bins_left -= 1
        # an interval of one row, or of one key, cannot be cut any further: it stands for a value
        is_value = rows == 1 or width == 1
        # the target lies in this interval, or at its end
        while is_open and target <= high:
            ends_before = not is_value and low > start and target - low < high - target
            off = target - low if ends_before else high - target
            # neither end is near enough: ask for the interval to be divided in the next round
            if divisible and off > slack:
                wanted[i] = True
                # for this round, continue as if the interval could be cut exactly there
                start = target
                is_open = width > _NARROW
                lacking = 0.0
            # the lower end is nearer: the bin ended there, and the next one begins with this interval
            elif ends_before:
                opens[i] = bins_left > 0
                start = np.float64(low)
                lacking = target - low if off <= slack else 0.0
            else:
                is_open = False
                # a bin closed within the slack moves no other target, or each found end would move all later ones
                lacking = target - high if off <= slack else 0.0
            if bins_left == 0:
                is_open = False
            if is_open:
                # the next bin's target, from what is left for the bins that are left
                begin = start + lacking
                target = begin + (rows_left - (begin - low)) / bins_left
                bins_left -= 1
        rows_left -= rows


@kernel
def place_cuts(
    keys: Integers,
    counts: Integers,
    offsets: Integers,
    max_bin: int,
    least_rows: int,
    tolerance: float,
    wanted: Flags,
    opens: Flags,
) -> None:
    """Place every feature's bins by the rule of `tie_aware_cuts`, its intervals standing for values.

    `keys` and `counts`, int64 (n_points,), are the opened points and the rows below them; those of feature f,
    offsets[f]..offsets[f+1]-1, begin and end with the ends of its domain, 0 and n rows below. Intervals of fewer than
    `least_rows` (at least 2) rows are not divided; a bin may end `tolerance`, a share of a feature's rows, away from
    its target. `wanted` and `opens`, False before, are set where the interval after the point must be divided, and
    where it is the first of a bin; only when nothing is wanted are these all bins.

    Wanted are an interval that may hold a heavy value (more than n/q rows); every divisible one while no more than q
    intervals have rows, as there may be as few distinct values; and one with a target inside and no end near enough.
    There the walk continues from the target (or from the end of an interval so narrow that it probably holds one
    value), so that all targets are searched in one round. With tolerance 0 and least_rows 2, if no interval is wanted,
    the bins are those of the values: a walk over the values would stop at the intervals' ends, and only there.
    """
    for feature in range(offsets.size - 1):
        a, b = offsets[feature], offsets[feature + 1]
        _place(keys[a:b], counts[a:b], max_bin, least_rows, tolerance, wanted[a:b], opens[a:b])


@kernel
def insert_points(
    keys: Integers,
    counts: Integers,
    offsets: Integers,
    new_keys: NDArray[np.uint32 | np.int64],
    new_counts: Integers,
    new_offsets: Int32s,
    all_keys: Integers,
    all_counts: Integers,
) -> None:
    """Merge opened points into `all_keys` and `all_counts`, where feature f begins at offsets[f] + new_offsets[f].

    `new_keys` ascend within a feature, strictly between its first and last key, and are not among `keys`.
    """
    for feature in range(offsets.size - 1):
        new, end = new_offsets[feature], new_offsets[feature + 1]
        place = offsets[feature] + new
        for i in range(offsets[feature], offsets[feature + 1]):
            while new < end and np.int64(new_keys[new]) < keys[i]:
                all_keys[place] = new_keys[new]
                # noise may put counts out of order: clamp them between both neighbours
                all_counts[place] = min(max(new_counts[new], all_counts[place - 1]), counts[i])
                new += 1
                place += 1
            all_keys[place] = keys[i]
            all_counts[place] = counts[i]
            place += 1


# key of both float32 zeros; that of float64 zeros is 0
_ZERO = np.uint32(1 << 31)
_LEAST = np.int64(-(1 << 63))


def keys_of(values: NDArray[Any]) -> NDArray[Any]:
    """Map floats (no NaN) to int64 keys (of float32 uint32): in order, neighbours differ by 1, both zeros are equal."""
    if values.dtype == np.float64:
        wide = values.view(np.int64)
        return np.where(wide < 0, _LEAST - wide, wide)
    bits = values.view(np.uint32)
    return np.where(bits < _ZERO, bits | _ZERO, np.bitwise_invert(bits) + np.uint32(1))


def floats_of(keys: NDArray[Any], *, wide: bool = False) -> NDArray[Any]:
    """Return the values, float32 or `wide` float64, of keys: the inverse of `keys_of`, with a positive zero."""
    if wide:
        return np.where(keys < 0, _LEAST - keys, keys).view(np.float64)
    keys = np.asarray(keys).astype(np.uint32)
    return np.where(keys >= _ZERO, keys ^ _ZERO, np.bitwise_invert(keys) + np.uint32(1)).view(np.float32)


# as `least_rows`: divide no interval
_NO_INTERVAL = np.iinfo(np.int64).max


class Probes(NamedTuple):
    """Points of one round: those of feature f are ``keys[offsets[f]:offsets[f + 1]]``, ascending."""

    keys: NDArray[np.uint32 | np.int64]
    offsets: Int32s


def sorted_keys(columns: Sequence[NDArray[Any]], threads: int = 1) -> list[NDArray[Any]]:
    """Return each column's keys, ascending, without missing values, for `count_below`; on disk if the column is."""

    def sort(column: NDArray[Any]) -> NDArray[Any]:
        ordered = np.sort(keys_of(column[~np.isnan(column)]))
        folder = folder_of(column)
        if folder is None:
            return ordered
        stored = new(ordered.shape, ordered.dtype, folder)
        stored[:] = ordered
        forget(stored)
        forget(column)
        return stored

    return concurrently(sort, columns, threads)


def count_below(ordered: Sequence[NDArray[Any]], probes: Probes, threads: int = 1) -> Integers:
    """Return how many of a participant's rows are below each probe, int64 (n_probes,)."""
    below = np.zeros(len(probes.keys), dtype=np.int64)

    def count(feature: int) -> None:
        own = slice(probes.offsets[feature], probes.offsets[feature + 1])
        below[own] = np.searchsorted(ordered[feature], probes.keys[own].astype(ordered[feature].dtype))

    concurrently(count, np.flatnonzero(np.diff(probes.offsets)).tolist(), threads)
    return below


class QuantileSearch:
    """The leader's side: chooses probes, takes their counts, ends with cuts.

    Call ``present``, then ``probes`` and ``take`` in turn until ``probes`` returns None, then ``cuts``. No interval of
    fewer than `least_rows` rows is probed. A bin may end `tolerance`, a share of a feature's rows (or an eighth of a
    bin, if that is less), away from its target; with 0, least_rows = 1 and enough rounds, the bins hold the same rows
    as those of `fit_bins`. With `exact` both are so, and cuts are those of `fit_bins`, too. `wide`,
    bool (n_features,), marks features that are float64. The search ends after `most_rounds`. Raises ConfigError for a
    parameter out of range.
    """

    def __init__(
        self,
        n_features: int,
        max_bin: int,
        *,
        least_rows: int,
        tolerance: float = 0.002,
        exact: bool = False,
        most_rounds: int = 34,
        wide: Flags | None = None,
    ) -> None:
        if not 2 <= max_bin <= MOST_BINS:
            raise ConfigError(f"expected max_bin between 2 and {MOST_BINS}, got {max_bin!r}")
        if least_rows < 1 or not 0 <= tolerance < 1 or most_rounds < 0:
            raise ConfigError(
                "expected least_rows >= 1, 0 <= tolerance < 1 and most_rounds >= 0, "
                f"got {least_rows!r}, {tolerance!r} and {most_rounds!r}"
            )
        self._max_bin, self._exact = max_bin, exact
        self._least_rows, self._tolerance = (1, 0.0) if exact else (least_rows, tolerance)
        self._rounds_left = most_rounds
        self._wide = np.zeros(n_features, np.bool_) if wide is None else wide
        # of every feature the first key, and the one after its last
        ends = np.array([-np.inf, np.inf])
        keys = np.where(self._wide[:, None], keys_of(ends), keys_of(ends.astype(np.float32)).astype(np.int64))
        keys[:, 1] += 1
        self._keys = keys.ravel()
        self._counts = np.zeros(2 * n_features, dtype=np.int64)
        self._offsets = np.arange(0, 2 * n_features + 1, 2, dtype=np.int64)
        self._knows_present = False
        self._asked: Probes | None = None

    def present(self, counts: Integers) -> None:
        """Take how many rows of all participants have a value of each feature (n_features,); negative counts are 0."""
        if self._knows_present or counts.shape != (len(self._offsets) - 1,):
            raise LocalProtocolError(f"expected one count per feature, once, got shape {counts.shape} - at present")
        self._counts[self._offsets[1:] - 1] = np.maximum(counts, 0)
        self._knows_present = True

    def probes(self) -> Probes | None:
        """Return the next probes, each strictly between opened points, or None at the end."""
        if not self._knows_present or self._asked is not None:
            raise LocalProtocolError("expected the counts asked for before new probes are - at probes")
        if self._rounds_left == 0:
            return None
        # one row is one value
        wanted, opens = self._place(max(self._least_rows, 2))
        if self._exact:
            wanted |= self._beside_cuts(wanted, opens)
        start = np.flatnonzero(wanted)
        if len(start) == 0:
            return None
        low, high = self._keys[start], self._keys[start + 1]
        roundest = _roundest(low, high)
        pair = np.stack([low + 1, roundest], axis=1)
        empty_above = np.append(self._counts, 0)[start + 2] == self._counts[start + 1]
        kept = np.ones_like(pair, dtype=np.bool_)
        # even: not opened for this reason before
        kept[:, 0] = empty_above & (low % 2 == 0) & (low + 1 < roundest)
        before = np.concatenate([[0], np.cumsum(kept.sum(axis=1))])
        offsets = before[np.searchsorted(start, self._offsets)].astype(np.int32)
        self._asked = Probes(pair[kept].astype(np.int64 if self._wide.any() else np.uint32), offsets)
        return self._asked

    def take(self, counts: Integers) -> None:
        """Take how many rows of all participants lie below each of the last probes, int64 (n_probes,)."""
        if self._asked is None or counts.shape != self._asked.keys.shape:
            raise LocalProtocolError(f"expected one count per probe asked, got shape {counts.shape} - at take")
        length = len(self._keys) + len(counts)
        keys, below = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
        asked = self._asked
        insert_points(self._keys, self._counts, self._offsets, asked.keys, counts, asked.offsets, keys, below)
        self._keys, self._counts = keys, below
        self._offsets = self._offsets + self._asked.offsets
        self._asked = None
        self._rounds_left -= 1

    def cuts(self) -> list[NDArray[Any]]:
        """Return the cuts of every feature on what is known, ascending, fewer than `max_bin`; x < cut goes left.

        A cut lies at the opened point where two bins touch. If no row lies between two opened points, it is in the
        middle.
        """
        _, opens = self._place(_NO_INTERVAL)
        cuts = []
        for a, b, wide in zip(self._offsets[:-1], self._offsets[1:], self._wide.tolist(), strict=True):
            keys, counts = self._keys[a:b], self._counts[a:b]
            first = np.flatnonzero(opens[a:b])[1:]
            # of the points with this count below, the lowest ends the interval before
            end = np.searchsorted(counts, counts[first])
            cuts.append(_between(floats_of(keys[end] - 1, wide=wide), floats_of(keys[first], wide=wide)))
        return cuts

    def smallest_interval(self) -> Integers:
        """Return every feature's fewest rows (above 0) between neighbouring opened points."""
        # at most 0 from one feature to the next
        rows = np.diff(self._counts, append=0)
        fewest = np.minimum.reduceat(np.where(rows > 0, rows, _NO_INTERVAL), self._offsets[:-1])
        return np.where(fewest == _NO_INTERVAL, 0, fewest)

    def _beside_cuts(self, wanted: Flags, opens: Flags) -> Flags:
        """Mark the intervals of several keys on both sides of each cut, of features that want no other."""
        filled = np.flatnonzero(np.diff(self._counts, append=0) > 0)
        feature = np.searchsorted(self._offsets, filled, side="right")
        # a feature's first bin has no cut before it
        cut = np.flatnonzero(opens[filled[1:]] & (feature[1:] == feature[:-1]))
        beside = np.zeros(len(wanted), np.bool_)
        beside[filled[cut]] = beside[filled[cut + 1]] = True
        settled = ~np.logical_or.reduceat(wanted, self._offsets[:-1])
        several_keys = np.append(self._keys[1:], 0) != self._keys + 1
        sought: Flags = beside & np.repeat(settled, np.diff(self._offsets)) & several_keys
        return sought

    def _place(self, least_rows: int) -> tuple[Flags, Flags]:
        wanted, opens = np.zeros((2, len(self._keys)), dtype=np.bool_)
        place_cuts(self._keys, self._counts, self._offsets, self._max_bin, least_rows, self._tolerance, wanted, opens)
        return wanted, opens


def _roundest(low: Integers, high: Integers) -> Integers:
    """Return the key with the most trailing zero bits among low + 1 .. high - 1, of which there is one."""
    different = low ^ (high - 1)
    # the highest bit in which both differ
    differing = np.frexp(different.astype(np.float64))[1].astype(np.int64) - 1
    # float64 may have rounded up to the next power of two
    differing -= (different >> np.clip(differing, 0, 63)) == 0
    differing = np.where(different < 0, 63, differing)
    return (high - 1) >> differing << differing


def _between(lower: NDArray[Any], upper: NDArray[Any]) -> NDArray[Any]:
    """Return the middle as `fit_bins` does: above `lower`, at most `upper`, never a negative zero."""
    # the sum of two infinities is invalid
    with np.errstate(invalid="ignore"):
        middle = ((lower.astype(np.float64) + upper) * 0.5).astype(lower.dtype) + np.float32(0)
    return np.where(middle > lower, middle, upper)
