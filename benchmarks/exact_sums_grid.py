"""The table behind `privacy.exact_sums.estimated_share`: shares of bins known from exact sums, on drawn tables.

A table is drawn: eight columns of the active party, and eight of a passive party, whose bins, 2 to 255 in a column,
hold about equally many rows. Columns are independent in a third of the tables, and have a common factor in the others:
what is split by one then leaves bins of another empty. Labels are drawn by a logistic model on all columns, with new
weights for each table. Trees are grown on it, and `privacy.exact_sums.known_bins` works out the passive party's bins
from the sums of the first trees. What is written is the mean share of three to six tables, by rows, depth, trees and
bins. Where that would take more than `MOST_ROWS` rows of nodes, the next shorter table's share stands, which is larger
but by chance.

Half an hour of two cores; `--quick` prints the share of small tables and writes nothing.
"""

from __future__ import annotations

import csv

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from data import arguments
from opened_sums import columns_of, grow, of_first_trees
from treaty.machine.process import cores
from treaty.privacy.exact_sums import GRID, known_bins

ROWS = (100, 300, 1000, 3000, 10_000, 30_000)
DEPTHS = (1, 2, 3, 4, 6, 8)
TREES = (1, 2, 5, 10, 20, 50, 100)
BINS = (2, 3, 4, 8, 16, 32, 64, 255)
FACTORS = (0.0, 0.6, 0.9)  # correlations of a column and the common factor
TABLES, OF_MANY_ROWS = 6, 3  # the second from 30,000 rows on
MOST_ROWS = 9_000_000

Shares = NDArray[np.float64]


def simulated(rows: int, depth: int, number: int) -> Shares:
    """Return the shares of known bins, (trees, bins), NaN where too many rows of nodes were needed."""
    rng = np.random.default_rng([rows, depth, number])
    factor = FACTORS[number % len(FACTORS)]
    normal = factor * rng.normal(size=(rows, 1)) + (1 - factor**2) ** 0.5 * rng.normal(size=(rows, 8 + len(BINS)))
    uniform = ndtr(normal)
    active, passive = uniform[:, :8], np.floor(uniform[:, 8:] * BINS)
    both = np.concatenate([active, (passive + 0.5) / BINS], axis=1) - 0.5
    margins = both @ (rng.exponential(size=both.shape[1]) * rng.choice([-1, 1], both.shape[1]))
    y = (rng.random(rows) < 1 / (1 + np.exp(1 - 2 * margins / margins.std()))).astype(np.int64)
    columns, most = columns_of(passive, 255), int(MOST_ROWS / (1.5 * depth * rows))
    trees = [count for count in TREES if count <= most]
    shares = np.full((len(TREES), len(BINS)), np.nan)
    if not trees:
        return shares
    nodes = grow(columns_of(active, 32), columns, y, {"n_estimators": max(trees), "max_depth": depth})
    for at, count in enumerate(trees):
        found = known_bins(of_first_trees(nodes, count), columns.offsets, rows, cores())
        if not (found == columns.codes)[found >= 0].all():
            raise SystemExit("a bin that was certain is wrong")
        shares[at] = (found >= 0).mean(axis=0)
    return shares


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    last = np.ones((len(DEPTHS), len(TREES), len(BINS)))
    lines = []
    for rows in ROWS[:4] if quick else ROWS:
        tables = TABLES if rows < 30_000 else OF_MANY_ROWS
        for at, depth in enumerate(DEPTHS[:3] if quick else DEPTHS):
            means = np.mean([simulated(rows, depth, number) for number in range(tables)], axis=0)
            last[at] = np.where(np.isnan(means), last[at], means)
            for trees, shares in zip(TREES, last[at], strict=True):
                lines.append([rows, depth, trees, *(f"{share:.4g}" for share in shares)])
                print(*lines[-1], flush=True)
    if not quick:
        with GRID.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["rows", "depth", "trees", *BINS], *lines])


if __name__ == "__main__":
    main()
