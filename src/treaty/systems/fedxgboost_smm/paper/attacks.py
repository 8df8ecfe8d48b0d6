"""What messages of FedXGBoost-SMM as published give away: every attack that makes its paper mode insecure.

Who sent null vectors U (n, r) of a matrix of its own gets W = D - Z (Z^T D) for the other's matrix D (n, c), Z being
some of U's columns. D is a passive party's candidates, of 0 and 1, in version 1, and gradients in version 2. In version
2 the passive party is the one who attacks, in version 1 both may: the active one with W, the passive one with U.

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
class Answered:
    """One node's exchange, as the party that sent null vectors has it.

    Attributes
    ----------
    rows : int (n,)
        The node's rows.
    vectors : float64 (n, r)
        All vectors that were sent.
    masked : float64 (n, c)
        W, what came back.
    """

    rows: NDArray[np.intp]
    vectors: Matrix
    masked: Matrix

    @property
    def used(self) -> Matrix:
        """The vectors that the answer was made with, float64 (n, r'): a secret, as the paper has it."""
        return self.vectors[:, vectors_used(self)]


def vectors_used(answered: Answered) -> NDArray[np.bool_]:
    """Return which vectors are in Z, bool (r,): just these are orthogonal to W."""
    seen = np.abs(answered.vectors.T @ answered.masked).max(axis=1, initial=0.0)
    used: NDArray[np.bool_] = seen <= _ZERO * np.abs(answered.masked).max(initial=0.0) * np.sqrt(len(answered.masked))
    return used


def shown_as_they_are(answered: Answered) -> NDArray[np.bool_]:
    """Return which rows of W are the other party's own, bool (n,): those that no vector has."""
    shown: NDArray[np.bool_] = np.einsum("ij,ij->i", answered.vectors, answered.vectors) <= 1e-20
    return shown


def rounded(answered: Answered, values: tuple[float, float] = (0.0, 1.0), steps: int = 1) -> Matrix:
    """Guess a matrix of two known values by rounding W, float64 (n, c).

    W is the matrix but for its projection on Z. Of the rounded matrix that projection is known, and put back it
    leaves less to round away: a step of iterative decoding.

    Parameters
    ----------
    answered : Answered
    values : tuple of float
        The lower and the higher value: 0 and 1 of candidates, the two gradients of a first tree.
    steps : int
        0 rounds W alone.
    """
    low, high = values
    used = answered.used

    def nearest(matrix: Matrix) -> Matrix:
        return np.where(matrix > (low + high) / 2, high, low)

    guess = nearest(answered.masked)
    for _ in range(steps):
        guess = nearest(answered.masked + used @ (used.T @ guess))
    return guess


def solved(answers: Sequence[Answered], n_rows: int) -> tuple[Matrix, NDArray[np.bool_]]:
    """Solve for a matrix that stayed the same over several answers: candidates over trees, gradients over levels.

    Each answer says (I - Z Z^T) D = W for its rows. The equations are added up, which leaves n_rows unknowns; with
    random Z of a share s of the rows, 1 / (1 - s) answers settle them.

    Parameters
    ----------
    answers : sequence of Answered
        About the same columns.
    n_rows : int
        Of the table.

    Returns
    -------
    values : float64 (n_rows, c)
    known : bool (n_rows,)
        Which rows the equations settle.
    """
    columns = answers[0].masked.shape[1]
    left, right = np.zeros((n_rows, n_rows)), np.zeros((n_rows, columns))
    for answered in answers:
        used = answered.used
        left[np.ix_(answered.rows, answered.rows)] -= used @ used.T
        left[answered.rows, answered.rows] += 1.0
        right[answered.rows] += answered.masked
    probe = np.random.default_rng(0).normal(size=(n_rows, 1))  # found again where the equations settle a row
    both = np.concatenate([right, left @ probe], axis=1)
    left[np.diag_indices(n_rows)] += 1e-13
    found = np.linalg.solve(left, both)
    return found[:, :-1], np.abs(found[:, -1] - probe[:, 0]) <= _KNOWN


def from_totals(answered: Answered, totals: NDArray[np.float64]) -> Matrix:
    """Solve for gradients of a node whose totals are told, where one null vector was sent, float64 (n, c).

    Of n rows a passive party may have sent n - 1 columns' one null vector: nothing tells the active one how many
    columns there are. W then lacks one number a column, and the totals give it.
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
    """Look for a column of two values in a space of few dimensions, float64 (n,).

    On the first tree gradients have two values, one for each class, and are orthogonal to the null vectors that a
    passive party gets. Where these leave few other columns (`left_over`), those of two values are among the ones whose
    skewness or kurtosis is furthest from a normal number's, which fixed-point iterations from random starts find (one
    value in five is the other: no kurtosis, but skewness; half of them: the other way round). And of them alone
    kurtosis is 1 plus the square of skewness.

    Parameters
    ----------
    basis : float64 (n, dimensions)
        Orthonormal.
    tries, steps : int
        Starts of either iteration, and steps from each.
    seed : int

    Returns
    -------
    float64 (n,)
        Of mean 0 and variance 1, up to its sign.
    """
    rng, n_rows = np.random.default_rng(seed), len(basis)
    of_constant = np.linalg.qr(basis.sum(axis=0)[:, None], mode="complete")[0]
    basis = basis @ of_constant[:, 1:] * np.sqrt(n_rows)  # the constant column, which first hessians are, is not it
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
