"""Attacks on the messages of FedXGBoost-SMM as published, which make paper mode insecure.

A party that sent null vectors U (n, r) of a matrix of its own gets W = D - Z (Z^T D) for the other's matrix D (n, c),
where Z is some of U's columns. In version 1, D is a passive party's candidates (0 and 1); the active party attacks W,
the passive party U. In version 2, D is the gradients, and the passive party attacks W.

References
----------
Le et al., "FedXGBoost", 2021 (arXiv 2106.10662); Karr et al., Journal of Official Statistics 25(1), 2009.
Zadik, Song, Wein, Bruna, "Lattice-Based Methods Surpass Sum-of-Squares in Clustering", COLT 2022, on vectors of two
values in subspaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_ZERO = 1e-9  # of a product with W, relative to W
_KNOWN = 1e-6  # error with which a row counts as found


@dataclass(frozen=True, slots=True, eq=False)
class NodeExchange:
    """One node's exchange, as seen by the party that sent null vectors."""

    rows: NDArray[np.intp]  # (n,) the node's rows
    vectors: Matrix  # (n, r) all vectors that were sent
    masked: Matrix  # (n, c) the answer W

    @property
    def used(self) -> Matrix:
        """Z, the vectors that the answer was made with, float64 (n, r'): secret according to the paper."""
        return self.vectors[:, vectors_used(self)]


def vectors_used(answered: NodeExchange) -> NDArray[np.bool_]:
    """Return which vectors are in Z, bool (r,): those orthogonal to W."""
    seen = np.abs(answered.vectors.T @ answered.masked).max(axis=1, initial=0.0)
    used: NDArray[np.bool_] = seen <= _ZERO * np.abs(answered.masked).max(initial=0.0) * np.sqrt(len(answered.masked))
    return used


def shown_as_they_are(answered: NodeExchange) -> NDArray[np.bool_]:
    """Return which rows of W are the other party's own, bool (n,): those that are zero in all vectors."""
    shown: NDArray[np.bool_] = np.einsum("ij,ij->i", answered.vectors, answered.vectors) <= 1e-20
    return shown


def rounded(answered: NodeExchange, values: tuple[float, float] = (0.0, 1.0), steps: int = 1) -> Matrix:
    """Guess a matrix of two known values by rounding W, float64 (n, c).

    `values` are 0 and 1 for candidates, the two gradients for a first tree. W lacks the matrix's projection on Z: each
    step of iterative decoding adds that of the rounded matrix and rounds again; 0 steps round W alone.
    """
    low, high = values
    used = answered.used

    def nearest(matrix: Matrix) -> Matrix:
        return np.where(matrix > (low + high) / 2, high, low)

    guess = nearest(answered.masked)
    for _ in range(steps):
        guess = nearest(answered.masked + used @ (used.T @ guess))
    return guess


def solved(answers: Sequence[NodeExchange], n_rows: int) -> tuple[Matrix, NDArray[np.bool_]]:
    """Solve for a matrix that stayed the same over several answers: candidates over trees, gradients over levels.

    Each answer says (I - Z Z^T) D = W for its rows. The sum of the equations has n_rows unknowns; with random Z of a
    share s of the rows, 1 / (1 - s) answers determine them. Returns float64 (n_rows, c) and which rows are determined.
    """
    columns = answers[0].masked.shape[1]
    left, right = np.zeros((n_rows, n_rows)), np.zeros((n_rows, columns))
    for answered in answers:
        used = answered.used
        left[np.ix_(answered.rows, answered.rows)] -= used @ used.T
        left[answered.rows, answered.rows] += 1.0
        right[answered.rows] += answered.masked
    probe = np.random.default_rng(0).normal(size=(n_rows, 1))  # found again where a row is determined
    both = np.concatenate([right, left @ probe], axis=1)
    left[np.diag_indices(n_rows)] += 1e-13
    found = np.linalg.solve(left, both)
    return found[:, :-1], np.abs(found[:, -1] - probe[:, 0]) <= _KNOWN


def from_totals(answered: NodeExchange, totals: NDArray[np.float64]) -> Matrix:
    """Solve for the gradients of a node, float64 (n, c), where one null vector was sent and the totals are known.

    A passive party may pretend to have n - 1 columns, which have one null vector; the active party cannot tell. W then
    lacks one number per column, which follows from the totals.
    """
    (vector,) = answered.used.T
    missing = (totals - answered.masked.sum(axis=0)) / vector.sum()
    found: Matrix = answered.masked + vector[:, None] * missing
    return found


def left_over(vectors: Matrix, seed: int = 0) -> Matrix:
    """Return an orthonormal basis of the columns that null vectors are orthogonal to, float64 (n, n - r)."""
    rng, (n_rows, sent) = np.random.default_rng(seed), vectors.shape
    basis: Matrix = rng.normal(size=(n_rows, n_rows - sent))
    for _ in range(2):
        basis = np.linalg.qr(basis - vectors @ (vectors.T @ basis)).Q
    return basis


def two_valued(basis: Matrix, tries: int = 60, steps: int = 200, seed: int = 0) -> NDArray[np.float64]:
    """Find a column of two values, float64 (n,) up to its sign, in the span of an orthonormal `basis` (n, dimensions).

    In the first tree gradients have two values, one per class, and are orthogonal to the null vectors that a passive
    party gets. Where few other columns are (`left_over`), two-valued ones are among those whose skewness or kurtosis is
    furthest from a normal number's; fixed-point iterations from `tries` random starts find these. (With one row in five
    of the other value there is skewness but no kurtosis, with half of them the reverse.) Two-valued columns alone have
    a kurtosis of 1 plus the square of skewness.
    """
    rng, n_rows = np.random.default_rng(seed), len(basis)
    of_constant = np.linalg.qr(basis.sum(axis=0)[:, None], mode="complete")[0]
    basis = basis @ of_constant[:, 1:] * np.sqrt(n_rows)  # leaves out the constant column: first hessians
    found = np.concatenate(
        [basis @ _turned(basis, rng.normal(size=(basis.shape[1], tries)), power, steps) for power in (2, 3)], axis=1
    )
    more = (found**4).mean(axis=0) - (found**3).mean(axis=0) ** 2
    best: NDArray[np.float64] = found[:, np.argmin(more)]
    return best


def _turned(basis: Matrix, directions: Matrix, power: int, steps: int) -> Matrix:
    """Turn directions, a column each, towards skewness (power 2) or kurtosis (3) by fixed-point iteration."""
    for _ in range(steps):
        directions = directions / np.linalg.norm(directions, axis=0)
        columns = basis @ directions
        moved = basis.T @ (columns * columns if power == 2 else columns * columns * columns) / len(basis)
        directions = moved if power == 2 else moved - 3.0 * directions
    turned: Matrix = directions / np.linalg.norm(directions, axis=0)
    return turned
