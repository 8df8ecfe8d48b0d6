"""Statistics of a party's columns besides bins with labels: counts, correlations, inflation of variance, stability.

Columns that are correlated are numeric ones, with mean 0 and sum of squares n, or their ranks; the correlation of two
is then their inner product over n. A missing value counts as the mean of its column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from treaty.data.table import Table
from treaty.machine.arrays import Floats, Integers
from treaty.statistics.bins import EMPTY, ColumnBins

Correlation = Literal["pearson", "spearman", "none"]
"""Of values, of ranks (equal values have their mean rank), or none."""


def with_stability(made: ColumnBins, table: Table, evals: Sequence[Table]) -> ColumnBins:
    """Return a column's bins with its PSI over eval sets, whose tables have the schema of `table`."""
    rows = rows_in(made, table)
    return replace(made, psi=tuple(psi(rows, rows_in(made, other)) for other in evals))


def rows_in(made: ColumnBins, table: Table) -> Integers:
    """Count a table's rows in each bin and, last, those in none, int64 (n_bins + 1,)."""
    n_bins = len(made.n_rows or ())
    return np.bincount(made.assign(table) % (n_bins + 1), minlength=n_bins + 1)


def psi(expected: Integers, actual: Integers) -> float:
    """Return the population stability index of two samples from their rows in the same bins.

    PSI = sum over bins of (a - e) ln(a / e), where a and e are a bin's shares of all rows; a count of 0 counts as 0.5,
    and a bin that is empty in both samples for nothing. Below 0.1 is called stable, above 0.25 changed.
    """
    both = (expected > 0) | (actual > 0)
    e, a = (np.where(of == 0, EMPTY, of)[both] / of.sum() for of in (expected, actual))
    return float((a - e) @ np.log(a / e))


def standardised(table: Table, kind: Correlation) -> tuple[list[int], Floats]:
    """Return the places of numeric columns, and these or their ranks, float64 (n_columns, n_rows), standardised.

    A constant column is all zeros.
    """
    places = [place for place, values in enumerate(table.schema.categories) if values is None]
    found = np.zeros((len(places), table.n_rows))
    for row, place in zip(found, places, strict=True):
        values = table.columns[place].astype(np.float64)
        present = ~np.isnan(values)
        if kind == "spearman" and present.any():
            _, inverse, counts = np.unique(values[present], return_inverse=True, return_counts=True)
            values[present] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
        if np.unique(values[present]).size > 1:
            row[present] = values[present] - values[present].mean()
            row *= np.sqrt(table.n_rows / (row @ row))
    return places, found


def correlations(own: Floats, other: Floats) -> Floats:
    """Return the correlations of standardised columns with others, float64 (n_own, n_other)."""
    found: Floats = own @ other.T / own.shape[1]
    return found


def settled(correlation: Floats) -> Floats:
    """Return a matrix of correlations symmetric, within -1 and 1, with 1 on its diagonal, NaN for constant columns."""
    found = np.clip((correlation + correlation.T) / 2.0, -1.0, 1.0)
    constant = np.diag(correlation) == 0.0
    found[constant], found[:, constant] = np.nan, np.nan
    np.fill_diagonal(found, np.where(constant, np.nan, 1.0))
    return found


def inflation(correlation: Floats) -> Floats:
    """Return variance inflation factors, float64 (n_columns,): the diagonal of the inverse of all correlations.

    NaN for a constant column, infinity for one that is a linear function of others.
    """
    found = np.full(len(correlation), np.nan)
    varying = np.flatnonzero(~np.isnan(np.diag(correlation)))
    if len(varying):
        values, vectors = np.linalg.eigh(correlation[np.ix_(varying, varying)])
        # what is opened of others' columns is rounded to 2^-24: a smaller eigenvalue is 0
        null = values < len(varying) * 2.0**-22
        parts = vectors**2 / np.where(null, np.inf, values)
        dependent = (vectors[:, null] ** 2).sum(axis=1) > 1e-6
        found[varying] = np.where(dependent, np.inf, parts.sum(axis=1))
    return found


def columns_as_columns(bins: Mapping[str, Sequence[ColumnBins]]) -> dict[str, list[Any]]:
    """Return a row for each column of all parties, as columns of a dataframe."""
    every = [of for columns in bins.values() for of in columns]
    names = ("party", "column", "kind", "n_missing", "n_distinct", "iv", "vif")
    n_sets = max((len(of.psi) for of in every), default=0)
    found: dict[str, list[Any]] = {name: [getattr(of, name) for of in every] for name in names}
    return found | {f"psi_eval_{number}": [of.psi[number] for of in every] for number in range(n_sets)}
