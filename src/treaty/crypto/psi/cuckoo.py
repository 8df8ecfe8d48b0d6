"""Cuckoo hashing: every item in one of its three bins, no bin with two items.

The bins are three tables, and an item's place in each is its own hash, so that its three bins differ. Without a stash
1.27 bins an item fail with a probability of 2^-40 at most (Pinkas, Schneider, Zohner, "Scalable Private Set
Intersection Based on OT Extension", ACM TOPS 2018, by experiments from 2^10 items on); there are 1.3 here. What fails
in the shortest lists, of 1024, are four items with the same three bins: 77 n^-5 = 2^-43.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Int32s
from treaty.machine.kernels import kernel

TABLES = 3
MOST = 1 << 25
"""Items: of more a table would take half a gigabyte, and hashes of 40 bits would not reach all bins."""

_STEPS = 5000  # items that one insertion may push out: some tens are usual


def bins_for(items: int, multiple: int) -> int:
    """Return the bins for so many items: all three tables' together, each a multiple of `multiple`."""
    return TABLES * multiple * -(-13 * items // (10 * TABLES * multiple))


def places(digests: NDArray[np.uint64], bins: int) -> Int32s:
    """Return the three bins of every item, int32 (n, 3), by its uniform digest, uint64 (n, 2)."""
    out = np.empty((len(digests), TABLES), np.int32)
    _places(digests, bins // TABLES, out)
    return out


def placed(digests: NDArray[np.uint64], bins: int) -> Int32s | None:
    """Return the number of the item in each bin, -1 where there is none, int32 (bins,); None where items do not fit."""
    table = np.full(bins, -1, np.int32)
    return table if _insert(digests, bins // TABLES, secrets.randbits(62) | 1, table) else None


def taken(digests: NDArray[np.uint64], numbers: Int32s) -> NDArray[np.uint64]:
    """Return the digests of bins' items by their numbers, uint64 (n, 2); of an empty bin, -1, the first item's."""
    out = np.empty((len(numbers), 2), np.uint64)
    _take(digests, numbers, out)
    return out


@kernel
def _take(digests: NDArray[np.uint64], numbers: Int32s, out: NDArray[np.uint64]) -> None:
    for k in range(len(numbers)):
        number = max(numbers[k], 0)
        out[k, 0], out[k, 1] = digests[number, 0], digests[number, 1]


@kernel
def _place(low: Any, high: Any, which: Any, length: int) -> Any:
    """Return an item's bin in one table: 40 bits of its digest, scaled to the table's length and its first bin."""
    if which == 0:
        part = low
    elif which == 1:
        part = (low >> np.uint64(40)) | (high << np.uint64(24))
    else:
        part = high >> np.uint64(16)
    scaled = (part & np.uint64((1 << 40) - 1)) * np.uint64(length) >> np.uint64(40)
    return np.int64(scaled) + which * length


@kernel
def _places(digests: NDArray[np.uint64], length: int, out: Int32s) -> None:
    for row in range(out.shape[0]):
        for which in range(3):
            out[row, which] = _place(digests[row, 0], digests[row, 1], which, length)


@kernel
def _insert(digests: NDArray[np.uint64], length: int, seed: int, table: Int32s) -> bool:
    """Insert all items by a random walk: an item without a free bin pushes out that of one of its other two bins."""
    state = np.uint64(seed)
    for number in range(digests.shape[0]):
        item, came_from = np.int64(number), np.int64(-1)
        for _ in range(_STEPS):
            low, high = digests[item, 0], digests[item, 1]
            at = -1
            for table_number in range(3):
                place = _place(low, high, table_number, length)
                if table[place] < 0:
                    at = place
                    break
            if at >= 0:
                table[at] = item
                item = np.int64(-1)
                break
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            which = np.int64(state >> np.uint64(33)) % 3
            at = _place(low, high, which, length)
            if at == came_from:
                at = _place(low, high, (which + 1) % 3, length)
            item, table[at], came_from = table[at], item, at
        if item >= 0:
            return False
    return True
