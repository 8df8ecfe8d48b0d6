"""What is known of columns before a model: bins with a binary label, correlations, inflation of variance, stability.

Bins have a weight of evidence (WOE), columns an information value (IV). Label 1 is "bad", the event; 0 is "good". With
g_k goods and b_k bads in bin k, of G and B in all rows,

    WOE_k = ln((g_k / G) / (b_k / B)),     IV = sum over k of (g_k / G - b_k / B) WOE_k,

so that a high WOE means few bads. A count of 0 counts as 0.5 in both formulas; G and B stay as they are.

Bins are made without labels first (`bins_of_columns`), of at least `min_bin_rows` rows each, so that counts of labels
in them are about no single row. Then neighbours are merged until WOE is monotone (`with_labels`), as in optbinning.

Columns that are correlated are numeric ones, with mean 0 and sum of squares n, or their ranks; the correlation of two
is then their inner product over n. A missing value counts as the mean of its column.

References: Siddiqi, "Credit Risk Scorecards", Wiley 2006, chapter 6. Navas-Palencia, "Optimal binning: mathematical
programming formulation", 2020 (arXiv 2001.08025); merging here is greedy: neighbours that break the order are pooled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treaty.data.binning import fit_bins
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import DataError
from treaty.machine.arrays import Floats, Integers

Monotone = Literal["auto", "increasing", "decreasing", "none"]
"""Order of WOE over a numeric column's bins; "auto" takes the one with the higher IV, "none" merges no bins."""

Correlation = Literal["pearson", "spearman", "none"]
"""Of values, of ranks (equal values have their mean rank), or none."""

EMPTY = 0.5
"""What a count of 0 counts as."""


@dataclass(frozen=True, kw_only=True)
class ColumnBins:
    """A column's bins, how many goods and bads are in each, and what else is known of the column.

    Attributes
    ----------
    party, column : str
        The owner, and the column's name in its table.
    kind : {"numeric", "categorical"}
        Whether values are numbers or categories.
    cuts : tuple of float or None
        Of a numeric column: ascending; bin k holds cuts[k - 1] <= x < cuts[k]. None where they are not known: in
        another party's column.
    groups : tuple of tuples of categories, or None
        Of a categorical column: each bin's categories. None as for `cuts`.
    missing, other : int or None
        The bin of missing values, and of categories in no group. It may be one that holds other values, too. None:
        there were none; such a row has WOE 0, a category in no group counts as missing.
    alone : bool
        Whether `missing` is a bin of missing values alone; it is then the last.
    n_rows : tuple of int or None
        Rows in each bin. None where they are not known.
    n_bads : tuple of int or None
        Rows with label 1 in each bin. None where they are not known.
    totals : (int, int)
        Goods and bads in all rows; (0, 0) where `n_bads` is None.
    iv, vif : float
        Information value, and variance inflation factor among all numeric columns; NaN where it is not known.
    n_missing, n_distinct : int
        Rows without a value, and different values in the others.
    psi : tuple of float
        Population stability index of each eval set, against the training rows.

    See Also
    --------
    treaty.ColumnStatistics : Makes them, in its attribute `column_bins_`.

    Examples
    --------
    >>> from treaty.statistics import ColumnBins
    >>> bins = ColumnBins(
    ...     party="bank", column="age", kind="numeric", cuts=(30.0,),
    ...     n_rows=(100, 100), n_bads=(50, 25), totals=(125, 75),
    ... )
    >>> bins.labels
    ['[-inf, 30)', '[30, inf)']
    >>> bins.woe.round(2)
    array([-0.51,  0.59])
    """

    party: str
    column: str
    kind: Literal["numeric", "categorical"]
    cuts: tuple[float, ...] | None = None
    groups: tuple[tuple[Category, ...], ...] | None = None
    missing: int | None = None
    other: int | None = None
    alone: bool = False
    n_rows: tuple[int, ...] | None = None
    n_bads: tuple[int, ...] | None = None
    totals: tuple[int, int] = (0, 0)
    iv: float = math.nan
    vif: float = math.nan
    n_missing: int = 0
    n_distinct: int = 0
    psi: tuple[float, ...] = ()

    @property
    def woe(self) -> Floats:
        """WOE of each bin, float64 (n_bins,); DataError where counts of labels are not known."""
        if self.n_rows is None or self.n_bads is None:
            raise DataError(
                f"{self.party}: the labels in the bins of column {self.column!r} are not known here, so it has no WOE; "
                "fit with reveal='passive', which shows each party the labels in the bins of its own columns"
            )
        bads = np.array(self.n_bads)
        return woe_of(np.array(self.n_rows) - bads, bads, self.totals)

    def assign(self, table: Table) -> Integers:
        """Return the bin of each row of the owner's table, int64 (n_rows,); -1 for none (`missing`, `other`)."""
        if self.column not in table.schema.names or (self.cuts is None and self.groups is None):
            raise DataError(
                f"{self.party}: expected a table with column {self.column!r}, whose cuts or categories are known here"
            )
        place = table.schema.names.index(self.column)
        values, categories = table.columns[place], table.schema.categories[place]
        absent = np.isnan(values)
        if (categories is None) != (self.cuts is not None):
            raise DataError(f"{self.party}: expected column {self.column!r} to be {self.kind}, got another kind")
        none = -1 if self.missing is None else self.missing
        if self.cuts is not None:
            # columns of large whole numbers are kept as differences from an origin
            whole = values.astype(np.float64) + table.schema.origins.get(self.column, 0)
            return np.where(absent, none, np.searchsorted(self.cuts, whole, "right"))
        bin_of = {category: k for k, group in enumerate(self.groups or ()) for category in group}
        unknown = none if self.other is None else self.other
        # the last code but one is of categories that the table's schema does not know, the last of missing values
        lookup = np.array([*(bin_of.get(category, unknown) for category in categories or ()), unknown, none])
        return lookup[np.where(absent, len(lookup) - 1, values).astype(np.intp)]

    def transform(self, table: Table) -> Floats:
        """Return the WOE of each row's bin, float64 (n_rows,); 0 where it has none."""
        return np.append(self.woe, 0.0)[self.assign(table)]

    @property
    def labels(self) -> list[str]:
        """Describe each bin's values: "[2, 5)", "a, b", "missing", or its number where cuts are not known."""
        return self.described("[{:.6g}, {:.6g})", ", ")

    def described(self, interval: str, separator: str) -> list[str]:
        """Return `labels` with another format of both ends of an interval, and another text between values."""
        if self.cuts is not None:
            shown = [interval.format(low, high) for low, high in pairwise([-np.inf, *self.cuts, np.inf])]
        elif self.groups is not None:
            shown = [separator.join(map(str, group)) or "other" for group in self.groups]
        else:
            shown = [f"bin {k}" for k in range(len(self.n_rows or ()))]
        if self.missing is None:
            return shown
        if self.alone:
            return [*shown[: self.missing], "missing"]
        return [f"{text}{separator}missing" if k == self.missing else text for k, text in enumerate(shown)]


def woe_of(goods: NDArray[Any], bads: NDArray[Any], totals: tuple[int, int]) -> Floats:
    """Return the WOE of bins with these goods and bads."""
    g, b = (np.where(counts == 0, EMPTY, counts) / total for counts, total in zip((goods, bads), totals, strict=True))
    return np.asarray(np.log(g / b))


def iv_of(goods: NDArray[Any], bads: NDArray[Any], totals: tuple[int, int]) -> float:
    """Return the IV of a column whose bins have these goods and bads; empty bins count for nothing."""
    goods, bads = (counts[goods + bads > 0] for counts in (goods, bads))
    g, b = (np.where(counts == 0, EMPTY, counts) / total for counts, total in zip((goods, bads), totals, strict=True))
    return float((g - b) @ np.log(g / b))


def bins_of_columns(table: Table, party: str, *, max_bin: int = 20, min_bin_rows: int = 20) -> list[ColumnBins]:
    """Cut a party's columns into bins, without labels.

    A numeric column has at most `max_bin` quantiles that do not separate equal values, and a bin of missing values; a
    categorical one a bin for each frequent category and one of all others. A bin of fewer than `min_bin_rows` rows is
    merged with its neighbour, missing values and other categories with the fullest or the rarest bin.
    """
    fitted, found = fit_bins(table, max_bin), []
    for name, values, categories, cuts in zip(
        table.schema.names, table.columns, table.schema.categories, fitted.cuts, strict=True
    ):
        distinct = np.unique(values[~np.isnan(values)]).size
        made = ColumnBins(
            party=party, column=name, kind="numeric" if categories is None else "categorical",
            n_missing=int(np.isnan(values).sum()), n_distinct=distinct,
        )  # fmt: skip
        if categories is None:
            assert cuts is not None
            ends = cuts.astype(np.float64) + table.schema.origins.get(name, 0)
            made = replace(made, cuts=tuple(ends.tolist()))
            counts = np.bincount(made.assign(table)[~np.isnan(values)], minlength=len(ends) + 1)
            starts = _full_enough(counts, min_bin_rows)
            made = replace(made, cuts=tuple(float(ends[start - 1]) for start in starts[1:]))
            counts = np.add.reduceat(counts, starts)
        else:
            counts = np.bincount(values[~np.isnan(values)].astype(np.intp), minlength=len(categories) + 1)
            made, counts = _groups(made, counts, categories, max_bin, min_bin_rows)
        found.append(_with_missing(made, counts, min_bin_rows))
    return found


def _full_enough(counts: Integers, least: int) -> list[int]:
    """Return the first of each run of bins that are merged, so that each has `least` rows if all together have."""
    starts, held = [0], 0
    for k, count in enumerate(counts.tolist()):
        if held >= least:
            starts.append(k)
            held = 0
        held += count
    # what is left at the end joins the run before it
    return starts[:-1] if held < least and len(starts) > 1 else starts


def _groups(
    made: ColumnBins, counts: Integers, categories: Sequence[Category], max_bin: int, least: int
) -> tuple[ColumnBins, Integers]:
    """Give frequent categories groups of their own; `counts` are the rows of each and, last, of unknown ones."""
    # stable: among equally frequent ones the lower code is kept
    by_frequency = [int(code) for code in np.argsort(-counts[:-1], kind="stable") if counts[code]]
    kept = [code for code in by_frequency if counts[code] >= least]
    if len(by_frequency) > max_bin or counts[-1]:
        kept = kept[: max_bin - 1]
    rest = [code for code in by_frequency if code not in kept]
    while kept and 0 < counts[rest].sum() + counts[-1] < least:
        rest.append(kept.pop())
    groups: list[tuple[Category, ...]] = [(categories[code],) for code in sorted(kept)]
    rows = [counts[code] for code in sorted(kept)]
    if rest or counts[-1]:
        made = replace(made, other=len(groups))
        groups.append(tuple(categories[code] for code in sorted(rest)))
        rows.append(counts[rest].sum() + counts[-1])
    return replace(made, groups=tuple(groups)), np.array(rows, np.int64)


def _with_missing(made: ColumnBins, counts: Integers, least: int) -> ColumnBins:
    """Add a bin of missing values, or add these to the fullest one, where they are few."""
    absent, counts = made.n_missing, counts[:0] if counts.sum() == 0 else counts
    missing, alone = None, absent >= least or not len(counts)
    if absent and alone:
        missing, counts = len(counts), np.append(counts, absent)
    elif absent:
        missing = int(counts.argmax())
        counts[missing] += absent
    return replace(made, missing=missing, alone=bool(absent and alone), n_rows=tuple(counts.tolist()))


def with_labels(made: ColumnBins, n_bads: Integers, totals: tuple[int, int], monotone: Monotone) -> ColumnBins:
    """Return the bins with the bads counted in each, int64 (n_bins,), neighbours merged until WOE is monotone.

    `totals` are goods and bads of all rows. Bins of categories, and one of missing values alone, are never merged.
    """
    assert made.n_rows is not None
    rows, bads, missing = np.array(made.n_rows), np.asarray(n_bads, np.int64), made.missing
    ordered = len(rows) - made.alone
    if made.kind == "numeric" and monotone != "none" and ordered > 1:
        signs = {"increasing": [1.0], "decreasing": [-1.0]}.get(monotone, [1.0, -1.0])
        goods, of_values = rows[:ordered] - bads[:ordered], bads[:ordered]
        ways = [[*_monotone(goods, of_values, totals, sign), *range(ordered, len(rows))] for sign in signs]
        good, bad = rows - bads, bads
        starts = max(ways, key=lambda way: iv_of(np.add.reduceat(good, way), np.add.reduceat(bad, way), totals))
        rows, bads = np.add.reduceat(rows, starts), np.add.reduceat(bads, starts)
        cuts = None if made.cuts is None else tuple(made.cuts[start - 1] for start in starts[1:] if start < ordered)
        missing = None if missing is None else int(np.searchsorted(starts, missing, "right")) - 1
        made = replace(made, cuts=cuts, missing=missing)
    return replace(
        made, n_rows=tuple(rows.tolist()), n_bads=tuple(bads.tolist()), totals=totals,
        iv=iv_of(rows - bads, bads, totals),
    )  # fmt: skip


def _monotone(goods: Integers, bads: Integers, totals: tuple[int, int], sign: float) -> list[int]:
    """Return the first of each run of bins that are merged; WOE times `sign` then ascends from run to run."""
    runs: list[tuple[int, int, int]] = []
    for k, (good, bad) in enumerate(zip(goods.tolist(), bads.tolist(), strict=True)):
        runs.append((k, good, bad))
        # the last two of all runs are pooled as long as they break the order, as in isotonic regression
        while len(runs) > 1:
            last = np.array(runs[-2:])
            if sign * np.diff(woe_of(last[:, 1], last[:, 2], totals))[0] > 0.0:
                break
            _, good, bad = runs.pop()
            first, before, bads_before = runs.pop()
            runs.append((first, before + good, bads_before + bad))
    return [first for first, _, _ in runs]


def woe_bins(
    tables: Mapping[str, Table], y: ArrayLike, *, max_bin: int = 20, min_bin_rows: int = 20, monotone: Monotone = "auto"
) -> dict[str, list[ColumnBins]]:
    """Return the bins of all columns, by party, with WOE and IV, computed in one place.

    `y` (n_rows,) are labels 0 (good) and 1 (bad); DataError unless both occur, and no others. Other arguments are as in
    `bins_of_columns` and `with_labels`.

    >>> import pandas as pd
    >>> from treaty.data.table import to_table
    >>> table = to_table(pd.DataFrame({"age": [20.0, 30.0, 40.0, 50.0] * 10}), party="bank")
    >>> woe_bins({"bank": table}, [1, 1, 0, 0] * 10, min_bin_rows=5)["bank"][0].labels
    ['[-inf, 35)', '[35, inf)']
    """
    labels = np.asarray(y, np.float64)
    totals = int((labels == 0).sum()), int((labels == 1).sum())
    if min(totals) == 0 or sum(totals) != len(labels):
        raise DataError(
            f"expected labels 0 (good) and 1 (bad), both in some rows, got {totals[0]} zeros and {totals[1]} ones in "
            f"{len(labels)} rows"
        )
    found = {}
    for party, table in tables.items():
        made = bins_of_columns(table, party, max_bin=max_bin, min_bin_rows=min_bin_rows)
        found[party] = [with_labels(of, bads_in(of, table, labels), totals, monotone) for of in made]
    return found


def bads_in(made: ColumnBins, table: Table, labels: Floats) -> Integers:
    """Count the rows with label 1 in each bin, int64 (n_bins,)."""
    return np.bincount(made.assign(table)[labels == 1], minlength=len(made.n_rows or ()))


def bins_as_columns(bins: Mapping[str, Sequence[ColumnBins]]) -> dict[str, list[Any]]:
    """Return a row for each bin of all columns, as columns of a dataframe or file."""
    found: dict[str, list[Any]] = {
        name: [] for name in ("party", "column", "bin", "rows", "goods", "bads", "bad_rate", "woe", "iv")
    }
    for of in (of for columns in bins.values() for of in columns if of.n_rows is not None and of.n_bads is not None):
        rows, bads = np.array(of.n_rows), np.array(of.n_bads)
        for name, values in {
            "party": [of.party] * len(rows), "column": [of.column] * len(rows), "bin": of.labels,
            "rows": rows.tolist(), "goods": (rows - bads).tolist(), "bads": bads.tolist(),
            "bad_rate": (bads / np.maximum(rows, 1)).tolist(), "woe": of.woe.tolist(), "iv": [of.iv] * len(rows),
        }.items():  # fmt: skip
            found[name] += values
    return found


# ---------------------------------------------------------------- stability, correlations, inflation of variance


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
