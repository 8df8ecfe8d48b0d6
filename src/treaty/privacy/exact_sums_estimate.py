"""Before training: what share of a partner's bins exact sums will give away.

Whether `exact_sums.known_bins` finds a row's bin depends on how many rows share it in a node, and on how often it is
asked. The attack was run on drawn tables of 100 to 30,000 rows whose columns have 2 to 255 bins of equally many rows
(`benchmarks/exact_sums_grid.py`, which wrote `exact_sums_grid.csv`). A column of unequal bins counts as one of
exp(entropy) equal ones, and one of a single bin as none; between the simulated sizes the share is interpolated. Beyond
them a deeper tree counts as one on fewer rows, further trees find as much as the first ones, and a longer table counts
as the longest. All tables count as `LONGER` times shorter than they are, so that the estimate errs upwards:
`benchmarks/secureboost_exact_sums.py` compares it with real tables.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treaty.compute import Floats

GRID = Path(__file__).with_name("exact_sums_grid.csv")
"""Columns: rows, depth, trees, and the share of bins known of a column with so many bins."""

LONGER = 1.4
FULLEST, RARE = 0.3, 0.7
"""A split between a column's fullest bin and its others shows at once who is in it, the more of use the rarer others
are: at least so much of its share counts as known, and of how far it is above one half. Fitted to real tables."""


def estimated_share(counts: Sequence[NDArray[np.number]], depth: int, trees: float) -> float:
    """Return the share of bins, rows times columns, that an active party will probably work out from exact sums.

    `counts` are the rows in each bin of each column; `trees` those that a column is drawn for, on average.
    """
    counts = [of_column for of_column in counts if np.count_nonzero(of_column) > 1]  # else there is nothing to tell
    if not counts:
        return 0.0
    rows, depths, most_trees, bins, shares = _grid()
    n_rows = sum(counts[0].tolist()) / LONGER / 2 ** max(0, depth - int(depths[-1]))
    of_depths = _between(np.log(rows), shares, np.log(n_rows))
    of_bins = _between(np.log(most_trees), _between(depths, of_depths, depth), np.log(trees))
    found = np.interp(np.log([_equal_bins(of_column) for of_column in counts]), np.log(bins), of_bins)
    fullest = np.array([of_column.max() / of_column.sum() for of_column in counts])
    split = np.maximum(FULLEST * fullest, RARE * (2 * fullest - 1)) if depth > 1 else np.zeros(len(counts))
    share = float(np.maximum(found * max(1.0, trees / most_trees[-1]), split).mean())
    return min(1.0, share * min(1.0, trees))


def _equal_bins(counts: NDArray[np.number]) -> float:
    """Return how many equally full bins have the entropy of these."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _between(places: Floats, values: Floats, place: float) -> Floats:
    """Interpolate `values`, of which the first axis is at `places`, at a place; beyond the ends they stay the same."""
    after = int(np.clip(np.searchsorted(places, place), 1, len(places) - 1))
    part = np.clip((place - places[after - 1]) / (places[after] - places[after - 1]), 0.0, 1.0)
    return np.asarray((1.0 - part) * values[after - 1] + part * values[after])


@cache
def _grid() -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return the grid's rows, depths, trees, bins, and the shares by all four."""
    with GRID.open(newline="") as file:
        head, *lines = csv.reader(file)
    places = np.array([[float(field) for field in line] for line in lines])
    bins = np.array([1.0, *map(float, head[3:])])
    rows, depths, trees = (np.unique(column) for column in places[:, :3].T)
    shares = np.ones((len(rows), len(depths), len(trees), len(bins)))  # all rows of a column of one bin are known
    shares[..., 1:] = places[np.lexsort(places[:, 2::-1].T), 3:].reshape(*shares.shape[:3], -1)
    return rows, depths, trees, bins, np.maximum.accumulate(shares, axis=2)
