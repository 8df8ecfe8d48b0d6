"""Candidates for splits of a passive party's columns, and their sums as shares; the same at both ends.

Candidates are in the order in which the plain grower breaks ties (`trees.scanning.scan_splits`): column by column,
missing values right before left, cuts ascending among the former and descending among the latter. Of a numeric column
the bins up to a cut go left, of a categorical one a single category, against the rest.
"""

from __future__ import annotations

import numpy as np

from treaty.compute import Flags, Int32s
from treaty.crypto.wide import Wide, add, prefix_sums


class Candidates:
    """Candidates of a tree's columns.

    `offsets`, int32 (features + 1,), has the first slot of each of the party's features, whose last slot is missing
    values; `categorical` and `missing`, bool (features,), say which are categories, and have missing values at all.
    `columns`, ascending, are the tree's.
    """

    def __init__(self, offsets: Int32s, categorical: Flags, missing: Flags, columns: Int32s) -> None:
        self._columns, self._categorical, self._missing = columns, categorical, missing
        self._bins = (np.diff(offsets) - 1)[columns]
        self._numbers = [_numbers(int(bins), *has) for bins, *has in zip(
            self._bins, categorical[columns], missing[columns], strict=True)]  # fmt: skip
        self._first = np.cumsum([0, *map(len, self._numbers)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def sums(self, slots: Wide) -> Wide:
        """Return shares of left children's sums, (nodes, candidates, 3, 2), from those of slots, (nodes, slots, 3, 2).

        Slots are those of the tree's columns alone.
        """
        found, first = [np.zeros((len(slots), 0, *slots.shape[2:]), np.uint64)], 0
        for column, bins, numbers in zip(self._columns, self._bins, self._numbers, strict=True):
            present = slots[:, first : first + bins]
            if not self._categorical[column]:
                present = prefix_sums(present.swapaxes(1, 2)).swapaxes(1, 2)
            with_missing = add(present, slots[:, first + bins : first + bins + 1])
            right = np.array([k for k, side in numbers if not side], np.intp)
            left = np.array([k for k, side in numbers if side], np.intp)
            found += [present[:, right], with_missing[:, left]]
            first += int(bins) + 1
        return np.concatenate(found, axis=1)

    def splits(self, numbers: Int32s) -> tuple[Int32s, Flags]:
        """Return columns, int32 (k,), and bins that go left, bool (k, 256), of candidates."""
        place = np.searchsorted(self._first, numbers, side="right") - 1
        left_bins = np.zeros((len(numbers), 256), np.bool_)
        for row, (at, number) in enumerate(zip(place, numbers, strict=True)):
            k, side = self._numbers[at][number - self._first[at]]
            bins = int(self._bins[at])
            left_bins[row, (k if self._categorical[self._columns[at]] else 0) : k + 1] = True
            left_bins[row, bins] = side
        return self._columns[place].astype(np.int32), left_bins


def _numbers(bins: int, categorical: bool, missing: bool) -> list[tuple[int, bool]]:
    """Return a column's candidates: the last bin, or the category, that goes left, and whether missing values do."""
    last = bins if categorical or missing else bins - 1  # else nothing would go right
    right = [(k, False) for k in range(last)]
    left = [(k, True) for k in reversed(range(bins if categorical else bins - 1))]
    return right + left if missing else right
