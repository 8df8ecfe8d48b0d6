"""Binning: every feature as small whole numbers, once, before training.

A numeric value x lies in bin k where cuts[k-1] <= x < cuts[k], so a split at a cut sends x < cut left, in training and
in prediction alike. Cuts are quantiles that never separate equal values (`tie_aware_cuts`); a category that occurs has
a bin of its own, whatever `max_bin` is, unless `max_categories` joins the rarest. Code `n_bins[f]` means missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.sparse import SparseColumns
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import Codes, Int32s, Integers, forget, new
from treaty.machine.kernels import inner, kernel, new_array
from treaty.machine.process import concurrently, cores

MOST_BINS = 255  # of a number: codes are uint8, and one code is left for "missing"
MOST_CATEGORIES = 32_767
"""Bins of a categorical column; a table in which a column has more than `MOST_BINS` has codes of uint16."""
# the block of codes that is written stays in the processor's cache
_ROWS_AT_ONCE = 8192
# cells below which starting threads takes longer than the work
_SMALL = 1 << 16

# -------------------------------------- the two compiled loops of binning: placing cuts, and finding every value's bin
#
# Both release the interpreter lock, so that threads over columns and over rows run at the same time.


@inner
def _cut_between(lower: Any, upper: Any, cuts: NDArray[Any], place: int) -> None:
    # rounded to what cuts are
    cuts[place] = (np.float64(lower) + np.float64(upper)) * 0.5
    # + 0 makes a negative zero positive: the order of the two zeros in sorting must not matter
    cuts[place] = (cuts[place] if cuts[place] > lower else upper) + 0.0


@kernel
def tie_aware_cuts(ordered: NDArray[Any], max_bin: int) -> NDArray[Any]:
    """Place the cuts of a numeric feature with present values `ordered` (ascending, at least one), at most q bins.

    With at most q = `max_bin` distinct values each has a bin. Otherwise a value with more than n/q rows ("heavy") has
    its own bin, and one walk spreads the others: a bin is opened with target R/K, R such rows and K such bins being
    left, and closed when it holds R/K rows or a heavy value comes. With no bin left a value joins the bin before it.
    """
    n = ordered.size
    values = new_array(n, ordered.dtype)
    counts = new_array(n, np.int64)
    distinct = 0
    start = 0
    for i in range(1, n + 1):
        if i == n or ordered[i] != ordered[start]:
            values[distinct] = ordered[start]
            counts[distinct] = i - start
            distinct += 1
            start = i

    # few distinct values: a cut between any two neighbours, never inside a run of equal ones
    if distinct <= max_bin:
        every: NDArray[Any] = new_array(distinct - 1, ordered.dtype)
        for k in range(1, distinct):
            _cut_between(values[k - 1], values[k], every, k - 1)
        return every

    rows_left, bins_left = n, max_bin
    for k in range(distinct):
        # a heavy value has a bin of its own; neither counts in the walk below
        if counts[k] * max_bin > n:
            rows_left -= counts[k]
            bins_left -= 1

    cuts: NDArray[Any] = new_array(max_bin - 1, ordered.dtype)
    n_cuts = 0
    is_open = False
    # of the open bin; its target is target_rows / target_bins, compared in whole numbers
    held = target_rows = target_bins = 0
    for k in range(distinct):
        # the walk: each value opens a bin, or joins the open one
        opens_bin = True
        if counts[k] * max_bin > n:
            is_open = False
        else:
            if is_open or bins_left == 0:
                opens_bin = False
            else:
                is_open, held = True, 0
                target_rows, target_bins = rows_left, bins_left
                bins_left -= 1
            held += counts[k]
            rows_left -= counts[k]
            # the bin closes once it holds its share of the rows
            is_open = is_open and held * target_bins < target_rows
        if opens_bin and k > 0:
            _cut_between(values[k - 1], values[k], cuts, n_cuts)
            n_cuts += 1
    return cuts[:n_cuts].copy()


@kernel
def write_codes(
    values: NDArray[Any], padded_cuts: NDArray[Any], missing: int, codes: Codes, feature: int, start: int, stop: int
) -> None:
    """Write the bin, the number of cuts <= the value, of rows start..stop-1 into column `feature` of `codes`."""
    # All values take one step of the search together: free of branches and of order, the inner loop becomes
    # vector instructions, which made it five times faster than searching value by value.
    below = new_array(stop - start, np.int32)
    below[:] = np.int32(0)
    step = np.int32((padded_cuts.size + 1) >> 1)
    while step > 0:
        for i in range(stop - start):
            # unsigned: no test for an index from the end
            probe = padded_cuts[np.uint32(below[i] + step - 1)]
            below[i] += step if probe <= values[start + i] else np.int32(0)
        step >>= 1
    for i in range(stop - start):
        value = values[start + i]
        codes[start + i, feature] = below[i] if value == value else missing


def pad_cuts(cuts: NDArray[Any]) -> NDArray[Any]:
    """Extend ascending cuts with +inf to the least length 2^s - 1, for a search in s steps."""
    padded = np.full((1 << len(cuts).bit_length()) - 1, np.inf, dtype=cuts.dtype)
    padded[: len(cuts)] = cuts
    return padded


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """One party's bins, fitted once on its training rows."""

    schema: Schema
    # numeric feature: ascending cuts, n_bins = len(cuts) + 1 (both 0 where every row was missing); else None
    cuts: tuple[NDArray[Any] | None, ...]
    # categorical feature with K categories: (K + 1,), the bin of each code 0..K-1 and, last, of the code K that
    # unseen categories have; n_bins[f] where that is "missing". Numeric feature: None
    category_bins: tuple[NDArray[np.int16] | None, ...]
    # whether a categorical feature's last bin is "other", of rare and unseen categories
    has_other: tuple[bool, ...]
    # (n_features,) bins of present values, at most 255 of a number; code n_bins[f] means missing
    n_bins: Int32s

    @property
    def offsets(self) -> Int32s:
        """First slot of each feature in a flat histogram, int32 (n_features + 1,); its last slot is "missing"."""
        offsets = np.zeros(len(self.n_bins) + 1, dtype=np.int32)
        np.cumsum(self.n_bins + 1, out=offsets[1:])
        return offsets

    @property
    def code_type(self) -> type[np.uint8] | type[np.uint16]:
        """The type of codes: uint8 wherever it suffices."""
        return np.uint8 if self.n_bins.max(initial=0) <= MOST_BINS else np.uint16

    def transform(self, table: Table, threads: int | None = None) -> Codes:
        """Return the bin of every value, `code_type` (n_rows, n_features) in C order; n_bins[f] where missing.

        Those of a table on disk lie on disk, too. They, and those of a sparse table, are made column by column: the
        transpose of an array in C order. Raises DataError for a table of another schema. The number of threads (None:
        all cores) does not change the result.
        """
        if table.schema is not self.schema and table.schema != self.schema:
            raise DataError("expected a table made with the schema of training, got another one - at binning")
        lookups = [self._lookup(feature) for feature in range(len(self.n_bins))]
        if table.folder is not None or isinstance(table.columns, SparseColumns):
            return self._transform_by_column(table, lookups, threads)
        codes: Codes = np.empty((table.n_rows, len(self.n_bins)), dtype=self.code_type)

        def write_block(start: int) -> None:
            stop = min(start + _ROWS_AT_ONCE, table.n_rows)
            for feature, (column, lookup) in enumerate(zip(table.columns, lookups, strict=True)):
                self._write(feature, column, lookup, codes, feature, start, stop)

        threads = 1 if codes.size < _SMALL else cores(threads)
        concurrently(write_block, range(0, table.n_rows, _ROWS_AT_ONCE), threads)
        return codes

    def _transform_by_column(self, table: Table, lookups: list[NDArray[Any]], threads: int | None) -> Codes:
        shape, kind = (len(self.n_bins), table.n_rows), self.code_type
        by_column: Codes = np.empty(shape, kind) if table.folder is None else new(shape, kind, table.folder)

        def write_column(feature: int) -> None:
            column, codes = table.columns[feature], by_column[feature].reshape(-1, 1)
            for start in range(0, table.n_rows, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, table.n_rows)
                self._write(feature, column, lookups[feature], codes, 0, start, stop)
            forget(column)
            forget(by_column)

        concurrently(write_column, range(len(self.n_bins)), cores(threads))
        return by_column.T

    def _write(
        self, feature: int, column: NDArray[Any], lookup: NDArray[Any], codes: Codes, place: int,
        start: int, stop: int,
    ) -> None:  # fmt: skip
        """Write a feature's bins of rows ``start..stop - 1`` to column `place` of `codes`."""
        if self.cuts[feature] is not None:
            write_codes(column, lookup, int(self.n_bins[feature]), codes, place, start, stop)
        else:
            known = np.where(np.isnan(column[start:stop]), np.float32(len(lookup) - 1), column[start:stop])
            codes[start:stop, place] = lookup[known.astype(np.intp)]

    def _lookup(self, feature: int) -> NDArray[Any]:
        """Return the table to search: padded cuts, or the bin of each category code with "missing" at the end."""
        cuts, of_category = self.cuts[feature], self.category_bins[feature]
        if cuts is not None:
            return pad_cuts(cuts)
        assert of_category is not None
        return np.append(of_category, self.n_bins[feature]).astype(self.code_type)


def fit_bins(
    table: Table, max_bin: int | list[int] = 32, threads: int | None = None, *,
    max_categories: int = MOST_CATEGORIES,
) -> Bins:  # fmt: skip
    """Choose the bins of every feature from the training rows; raise ConfigError unless `max_bin` is in 2..255.

    `max_bin` may differ by feature (n_features,).

    A numeric feature gets tie-aware quantiles, a categorical one a bin per category that occurs, in code order. If
    there are more than `max_categories`, so many less one of the most frequent (among equals the lower code) keep
    theirs and the others share a last bin "other". The bin of missing values does not count.
    """
    most = max_bin if isinstance(max_bin, list) else [max_bin] * max(1, len(table.columns))
    for q in most:
        if isinstance(q, bool) or not isinstance(q, (int, np.integer)) or not 2 <= q <= MOST_BINS:
            raise ConfigError(f"expected max_bin between 2 and {MOST_BINS}, got {q!r}")

    def fit_one(feature: int) -> tuple[NDArray[Any] | None, NDArray[np.int16] | None, bool, int]:
        values, categories = table.columns[feature], table.schema.categories[feature]
        if categories is None:
            # NaN comes last
            ordered = np.sort(values)
            n_present = int(np.searchsorted(ordered, np.float32(np.nan)))
            cuts = tie_aware_cuts(ordered[:n_present], int(most[feature])) if n_present else np.empty(0, values.dtype)
            forget(values)
            return cuts, None, False, len(cuts) + bool(n_present)
        counts = np.bincount(values[~np.isnan(values)].astype(np.intp), minlength=len(categories) + 1)
        forget(values)
        return None, *category_bins_of(counts, max_categories)

    few = table.n_rows * len(table.columns) < _SMALL
    fitted = concurrently(fit_one, range(len(table.columns)), 1 if few else cores(threads))
    return Bins(
        table.schema,
        tuple(cuts for cuts, *_ in fitted),
        tuple(of_category for _, of_category, *_ in fitted),
        tuple(has_other for *_, has_other, _ in fitted),
        np.array([n_bins for *_, n_bins in fitted], dtype=np.int32),
    )


def category_bins_of(counts: Integers, max_categories: int) -> tuple[NDArray[np.int16], bool, int]:
    """Choose the bins of a categorical feature from the rows of each category and, last, of unknown ones (K + 1,).

    Return the bin of each, whether the last bin is "other", and the number of bins.
    """
    of_known = counts[:-1]
    kept = np.flatnonzero(of_known)
    has_other = bool(counts[-1] > 0) or len(kept) > max_categories
    if len(kept) + has_other > max_categories:
        # stable: among equals the lower code first
        by_frequency = np.argsort(-of_known, kind="stable")
        kept = np.sort(by_frequency[: max_categories - 1])
    n_bins = len(kept) + has_other
    # "other", or the code for missing
    elsewhere = n_bins - 1 if has_other else n_bins
    category_bins = np.full(len(counts), elsewhere, dtype=np.int16)
    category_bins[kept] = np.arange(len(kept), dtype=np.int16)
    return category_bins, has_other, n_bins


def joined_categories(table: Table, max_categories: int) -> list[str]:
    """Return a sentence for every categorical column whose categories `fit_bins` joins."""
    found: list[str] = []
    if not table.schema.categorical.any():
        return found
    for name, values, categories in zip(table.schema.names, table.columns, table.schema.categories, strict=True):
        if categories is None or len(categories) <= max_categories:
            continue
        counts = np.bincount(values[~np.isnan(values)].astype(np.intp), minlength=len(categories) + 1)
        of_category, has_other, n_bins = category_bins_of(counts, max_categories)
        joined = (of_category == n_bins - 1) & (counts > 0) if has_other else np.zeros(len(counts), np.bool_)
        if np.count_nonzero(joined) > 1:
            share = 100 * counts[joined].sum() / counts.sum()
            more = "Raise max_categories, or group" if max_categories < MOST_CATEGORIES else "Group"
            found.append(
                f"column {name!r} has {np.count_nonzero(counts[:-1])} categories, and max_categories is "
                f"{max_categories}: its {np.count_nonzero(joined)} rarest categories, {share:.1f} % of its rows, share "
                f"one bin, so the model cannot distinguish them. {more} the categories beforehand"
            )
    return found
