"""Bins from noisy counts: a search of few rounds, in each of which a row is counted once in every column.

`quantile_search` halves intervals, and a row changes nearly every count in some thirty rounds: under noise that is the
dearest part of a training. Here the numbers of a column are divided into cells, first one for each power of two, and
cells with many rows are divided into `PIECES` in each later round. The counts are of rows between neighbouring probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.quantile_search import Probes, floats_of, keys_of
from treaty.machine.arrays import Flags, Floats, Integers

ROUNDS = 4
PIECES = 16
# probes of a column in a round: one for each power of two of float64 numbers at most
MOST_PROBES = 1 << 13
# deviations of a count's noise that rows of a bin must exceed, and those of a piece of a cell
_CLEAR, _PIECE = 3.0, 2.0


def between(below: Integers, offsets: NDArray[np.int32]) -> Integers:
    """Return how many rows lie between each probe and the one before of the same feature, from rows below probes."""
    counts = np.diff(below, prepend=0)
    first = offsets[:-1][np.diff(offsets) > 0]
    counts[first] = below[first]
    return counts


@dataclass(frozen=True, slots=True)
class SearchNoise:
    """The noise on a party's part of the opening and of counts between probes; `sigma` is that of a sum of these."""

    on_opening: Callable[[Integers], Integers]
    on_counts: Callable[[Integers], Integers]
    sigma: float


class NoisyQuantiles:
    """The leader's side: call ``present``, then ``probes`` and ``take`` until ``probes`` returns None, then ``cuts``.

    `sigma` is the standard deviation of the noise of a count; `wide`, bool (n_features,), marks features that are
    float64. No feature has more than `max_bin` bins, and none of a bin's counts is hidden by noise.
    """

    def __init__(self, max_bin: int, *, sigma: float, wide: Flags) -> None:
        self._max_bin, self._sigma, self._least, self._wide = max_bin, sigma, _CLEAR * sigma, wide
        # of each feature's cells their first key, the first one after it, and rows; at first one cell has all numbers
        self._cells: list[tuple[Integers, Integers, Floats]] = []
        self._divided: list[list[Integers]] = []
        self._round = 0

    def present(self, counts: Integers) -> None:
        """Take about how many rows have a value of each feature, int64 (n_features,)."""
        # of float64 numbers, too, those that float32 has: noise alone would fill cells at the ends of theirs
        ends = np.array([-(2.0**128), 2.0**128])
        for count, wide in zip(counts.tolist(), self._wide.tolist(), strict=True):
            low, high = keys_of(ends if wide else np.array([-np.inf, np.inf], np.float32)).astype(np.int64)
            self._cells.append((np.array([low]), np.array([high]), np.array([max(float(count), 0.0)])))

    def probes(self) -> Probes | None:
        """Return the ends of the pieces of all cells that are divided next, or None at the end."""
        self._divided = [self._pieces(feature) for feature in range(len(self._cells))]
        if self._round == ROUNDS or not any(self._divided):
            return None
        keys = [np.unique(np.concatenate([np.empty(0, np.int64), *of])) for of in self._divided]
        offsets = np.cumsum([0, *(len(of) for of in keys)]).astype(np.int32)
        return Probes(np.concatenate(keys).astype(np.int64 if self._wide.any() else np.uint32), offsets)

    def _pieces(self, feature: int) -> list[Integers]:
        """Return the ends of the pieces of each cell of a feature that is divided, ascending."""
        starts, stops, rows = self._cells[feature]
        heavy = np.flatnonzero(rows > max(rows.sum() / (2 * self._max_bin), self._least))
        if self._round == 0:
            # a cell for each power of two
            step = 1 << (52 if self._wide[feature] else 23)
            return [np.arange(int(starts[0]), int(stops[0]) + 1, step) for _ in heavy]
        return [
            np.arange(low, high + 1, max(1, (high - low) // PIECES))
            for low, high in zip(starts[heavy].tolist(), stops[heavy].tolist(), strict=True)
            if high - low > 1
        ]

    def take(self, counts: Integers) -> None:
        """Take the noisy counts of rows between neighbouring probes, as `between` lays them out."""
        at = 0
        for feature, divided in enumerate(self._divided):
            keys = np.unique(np.concatenate([np.empty(0, np.int64), *divided]))
            of_feature, at = counts[at : at + len(keys)], at + len(keys)
            for ends in divided:
                self._divide(feature, ends, of_feature[np.searchsorted(keys, ends[1:])].astype(np.float64))
        self._round += 1

    def _divide(self, feature: int, ends: Integers, found: Floats) -> None:
        starts, stops, rows = self._cells[feature]
        cell = int(np.searchsorted(starts, ends[0]))
        # of hundreds of empty cells hardly one is to be kept, with rows that are noise alone
        clear = _PIECE if self._round else math.sqrt(2.0 * math.log(len(found)))
        kept = np.flatnonzero(found > clear * self._sigma)
        if len(kept):
            before, after = slice(cell), slice(cell + 1, None)
            share = found[kept] * (rows[cell] / found[kept].sum())
            self._cells[feature] = (
                np.concatenate([starts[before], ends[kept], starts[after]]),
                np.concatenate([stops[before], ends[kept + 1], stops[after]]),
                np.concatenate([rows[before], share, rows[after]]),
            )

    def smallest_interval(self) -> Integers:
        """Return no interval: noise hides which have few rows."""
        return np.empty(0, np.int64)

    def cuts(self) -> list[NDArray[Any]]:
        """Return the cuts of every feature, ascending, fewer than `max_bin`; x < cut goes left."""
        cuts = []
        for (starts, _, rows), wide in zip(self._cells, self._wide.tolist(), strict=True):
            target, filled, found = max(rows.sum() / self._max_bin, self._least), 0.0, []
            for start, count in zip(starts[1:].tolist(), np.stack([rows[:-1], rows[1:]], axis=1), strict=True):
                filled += count[0]
                # a bin is full, or a cell follows that fills one alone
                if filled >= target or (filled > self._least and count[1] >= target):
                    found.append(start)
                    filled = 0.0
            thinned = np.unique(np.linspace(0, len(found) - 1, min(len(found), self._max_bin - 1)).round().astype(int))
            keys = np.array(found, np.int64)[thinned] if found else np.empty(0, np.int64)
            cuts.append(floats_of(keys, wide=wide))
        return cuts
