"""What sums over owners of rows are expected to take: numbers that each sends, and rounds; the same in all systems."""

from __future__ import annotations

from dataclasses import dataclass

from treaty.systems.expected import Shape, Trees
from treaty.systems.pooled.options import BoostingOptions

_PROBES = 8
"""Of the search for bins, by column and bin: numbers in all rounds together."""
_SEARCHES = 14
"""Sums before the first tree."""
_OPENING = 1000
"""Numbers of the first sums, whatever the columns."""
STEP_BYTES = 400
"""What the leader tells of a level, beside its splits."""


@dataclass(frozen=True, slots=True)
class SumsOfRows:
    """Of one owner of rows: numbers that it adds to all sums, and how many sums there are; bytes that it is told."""

    numbers: float
    sums: int
    told: float


def sums_of_rows(common: BoostingOptions, shape: Shape, trees: Trees) -> SumsOfRows:
    """Return what sums of histograms take, and the search for bins before them."""
    columns, slots = max(shape.columns.values()), max(shape.slots.values())
    probes = _PROBES * common.most_bins * columns
    told = 4.0 * (probes + slots) + trees.count * (trees.depth * STEP_BYTES + trees.splits * 120)
    return SumsOfRows(
        probes + _OPENING + trees.count * trees.asked * 3.0 * slots, _SEARCHES + trees.count * trees.depth, told
    )
