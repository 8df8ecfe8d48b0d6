"""Columns prepared for a linear model: missing values filled, categories split into columns, all on one scale.

A numeric column's missing values become its median. A categorical column becomes a column per category, 1 in its rows
and 0 elsewhere; a missing or unknown category is 0 in all of them. Every column then loses its mean and is divided by
its standard deviation, or by a tenth of its farthest value where that is more: no value of the training rows is then
above 10, and none has to be cut off, whether it is of a rare category or of a long tail. A column that is constant
becomes 0, so that its weight stays 0. All numbers are those of the training rows, which the owner keeps to itself.
Against a reference, the first category has no column, so that the weights of the others are determined.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Flags, Floats

LARGEST = 10.0  # value of a training row; with more, single rows of Give Me Some Credit make training diverge
COLUMN_FRACTION = 24


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a table's features become columns of a linear model."""

    n_categories: tuple[int | None, ...]  # of each feature; None for a numeric one
    median: Floats  # (n_features,) replaces missing values; 0 for categorical features
    mean: Floats  # (n_columns,) of the columns, in the features' order
    scale: Floats  # (n_columns,) standard deviation, more where values are far from the mean; 0 for a constant column
    first: int = 0  # number of the first category that has a column: 1 where the one before it is the reference

    @property
    def n_columns(self) -> int:
        """Columns that enter the model."""
        return sum(1 if n is None else max(0, n - self.first) for n in self.n_categories)

    @property
    def at_zero(self) -> Floats:
        """Prepared values (n_columns,) of a row that is 0 in all columns as they came, but for constant columns."""
        return -np.divide(self.mean, self.scale, out=np.zeros_like(self.mean), where=self.scale > 0.0)

    def matrix(self, features: Sequence[NDArray[Any]], n_rows: int) -> Floats:
        """Return the prepared columns (n_rows, n_columns), in multiples of 2^-24.

        Between parties columns are integers of that unit. If only they rounded, weights would differ from a pooled
        training's, the more the closer columns are to being linearly dependent. `features` (n_rows,) are as in a
        `Table`: NaN is missing, categories are codes, a code beyond them an unknown one.
        """
        columns = _spread(features, self.n_categories, self.median, n_rows, self.first)
        columns -= self.mean
        columns *= np.divide(1.0, self.scale, out=np.zeros_like(self.scale), where=self.scale > 0.0)
        return np.rint(columns * 2.0**COLUMN_FRACTION) * 2.0**-COLUMN_FRACTION

    def names(self, features: Sequence[str], categories: Sequence[Sequence[object] | None]) -> list[str]:
        """Return the columns' names: the feature's, or "feature=category"."""
        return [
            name if values is None else f"{name}={value}"
            for name, values in zip(features, categories, strict=True)
            for value in ((None,) if values is None else values[self.first :])
        ]


def prepare(
    features: Sequence[NDArray[Any]],
    n_categories: Sequence[int | None],
    n_rows: int,
    largest: float = LARGEST,
    weight: Floats | None = None,
    first: int = 0,
) -> Preparation:
    """Learn from the training rows how to prepare columns; `n_categories` has None for numeric features.

    No value is further from the mean than `largest` times the scale. With weights medians, means and standard
    deviations are those of as many rows as each weighs.
    """
    known = tuple(n_categories)
    median = np.zeros(len(features))
    for feature, (values, n) in enumerate(zip(features, known, strict=True)):
        present = values[~np.isnan(values)]
        if n is None and len(present):
            of_present = None if weight is None else weight[~np.isnan(values)]
            median[feature] = _median(present.astype(np.float64), of_present)
    columns = _spread(features, known, median, n_rows, first)
    if weight is None:
        mean, scale = columns.mean(axis=0), columns.std(axis=0)
    else:
        mean = np.average(columns, axis=0, weights=weight)
        scale = np.sqrt(np.average((columns - mean) ** 2, axis=0, weights=weight))
    if n_rows:
        constant = np.ptp(columns, axis=0) == 0.0  # whose standard deviation need not come out as 0
        mean, scale = np.where(constant, columns[0], mean), np.where(constant, 0.0, scale)
        counted = columns if weight is None else columns[weight > 0.0]
        farthest = np.maximum(counted.max(axis=0) - mean, mean - counted.min(axis=0))
        scale = np.where(scale > 0.0, np.maximum(scale, farthest / largest), 0.0)
    return Preparation(known, median, mean, scale, first)


def _median(values: Floats, weight: Floats | None) -> float:
    """Return the median of values; with weights, of as many values as each weighs."""
    if weight is None or not weight.any():
        return float(np.median(values))
    order = np.argsort(values)
    up_to = np.cumsum(weight[order])
    at = int(np.searchsorted(up_to, up_to[-1] / 2.0))
    beyond = int(np.searchsorted(up_to, up_to[-1] / 2.0, side="right"))
    return float((values[order[at]] + values[order[min(beyond, len(values) - 1)]]) / 2.0)


def _spread(
    features: Sequence[NDArray[Any]], n_categories: Sequence[int | None], median: Floats, n_rows: int, first: int
) -> Floats:
    """Return columns without missing values, a categorical feature as one per category from `first` on."""
    columns: list[Floats] = []
    for values, n, middle in zip(features, n_categories, median, strict=True):
        if n is None:
            columns.append(np.where(np.isnan(values), middle, values.astype(np.float64)))
        else:
            columns.extend((values == code).astype(np.float64) for code in range(first, n))
    return np.stack(columns, axis=1) if columns else np.empty((n_rows, 0))


# -------------------------------- coordinates in which one party's columns are uncorrelated, found by that party alone
#
# In z, where w = T z and T^T F T is the identity for the party's own block F of the Hessian, gradient steps do not
# depend on how its columns are scaled or correlated. What is left are correlations between parties: of two parties'
# Hessian all eigenvalues then lie between 0 and 2.

DEPENDENT = 1e-9
"""Eigenvalues below this share of the largest count as 0: columns that depend on the others linearly."""


def uncorrelated(hessian: Floats) -> Floats:
    """Return T (n_columns, rank) with T^T F T = I for a Hessian F (n_columns, n_columns); constant: a row of 0."""
    if not len(hessian):
        return np.zeros((0, 0))
    values, vectors = np.linalg.eigh(hessian)
    spanned = values > DEPENDENT * max(float(values[-1]), 0.0)
    local: Floats = vectors[:, spanned] / np.sqrt(values[spanned])
    local[np.diag(hessian) == 0.0] = 0.0  # but for rounding, it is
    return local


TOO_FEW_ROWS = "standard errors need more rows than columns, got {rows} rows and {columns} columns"

FLAT = 1e-9
"""Curvatures below this share of the largest, of a loss along columns that do vary, leave weights undetermined."""


def determined(columns: Floats, hessian: Floats) -> tuple[Floats, Flags, int]:
    """Return T with T^T F T = I for the Hessian F at an optimum, which weights it determines, and the columns' rank.

    `columns` (n_rows, n_columns) alone decide which of them depend on each other. Along others the loss may be flat
    all the same: where classes or counts are separable, the optimum is infinitely far away.
    """
    spanned = uncorrelated(columns.T @ columns / len(columns))
    values, vectors = np.linalg.eigh(spanned.T @ hessian @ spanned)
    flat = values <= FLAT * max(float(values[-1]), 0.0) if len(values) else np.zeros(0, bool)
    local: Floats = spanned @ (vectors[:, ~flat] / np.sqrt(values[~flat]))
    along = np.abs(spanned @ vectors[:, flat]).max(axis=1, initial=0.0)
    moves = along > 1e-6 * np.abs(spanned).max(axis=1, initial=0.0)
    return local, np.any(spanned, axis=1) & ~moves, spanned.shape[1]


def with_sums(known: Flags, sums: Floats) -> Flags:
    """Say which weights are known, and then which weighted sums of them (n_sums, n_columns)."""
    return np.append(known, ~np.any((sums != 0.0) & ~known, axis=1))


def random_rotation(size: int) -> Floats:
    """Return a uniformly random orthogonal matrix (size, size), from the system's generator."""
    drawn = np.frombuffer(secrets.token_bytes(8 * size * size), np.uint64) >> np.uint64(11)
    from scipy.special import ndtri  # type: ignore[import-untyped]  # not at every process's start: 0.15 s

    normal = ndtri((drawn.astype(np.float64) + 0.5) * 2.0**-53).reshape(size, size)
    q, r = np.linalg.qr(normal)
    rotation: Floats = q * np.sign(np.diag(r))
    return rotation
