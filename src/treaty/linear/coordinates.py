"""Coordinates in which one party's columns are uncorrelated, found by that party alone.

In z, where w = T z and T^T F T is the identity for the party's own block F of the Hessian, gradient steps do not depend
on how its columns are scaled or correlated. What is left are correlations between parties: of two parties' Hessian all
eigenvalues then lie between 0 and 2.
"""

from __future__ import annotations

import secrets

import numpy as np

from treaty.compute import Flags, Floats

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
