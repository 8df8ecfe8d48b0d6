"""The product of two parties' matrices by null vectors, as published. It does not hide what it is meant to hide.

Party A holds D_A (n, a), party B holds D_B (n, b), rows correspond. A draws orthonormal columns U with D_A^T U = 0 and
sends them; B picks some of them, Z, and answers W = (I - Z Z^T) D_B; A has D_A^T W = D_A^T D_B. All in float64; Z Z^T,
an n x n matrix, is never formed. What W gives away of D_B, and U of D_A, is in `attacks`.

References
----------
Karr, Lin, Reiter, Sanil, "Privacy-Preserving Analysis of Vertically Partitioned Data Using Secure Matrix Products",
Journal of Official Statistics 25(1), 2009. Le et al., "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning",
2021 (arXiv 2106.10662), whose "secure response" is `chosen` with `response` and whose "secure kernel" is
`disguised` with `null_vectors`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.errors import CryptoError

Matrix = NDArray[np.float64]

_ORTHONORMAL = 1e-6  # how far U^T U may be from the identity: honest ones are within 1e-12
_EMPTY = 1e-20  # square sum of a row of U that is taken for zero
_SINGLE = 1e-9  # weight off the diagonal below which a row of U U^T has a single non-zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many vectors and columns are drawn at most. The paper names no numbers."""

    null_vectors: int = 32  # columns of U, the paper's r
    bit_columns: int | None = None  # columns of 0 and 1 in `disguised`, the paper's l1; None: two for each of D_A
    normal_columns: int = 8  # columns of normal numbers in `disguised`, the paper's l2

    def of_plain(self, rows: int, columns: int) -> int:
        """Return how many null vectors a matrix (rows, columns) is given; 0 where it may have none."""
        return max(0, min(self.null_vectors, rows - columns))

    def of_disguised(self, rows: int, columns: int) -> tuple[int, int, int] | None:
        """Return numbers of bit columns, normal columns and null vectors for a matrix (rows, columns).

        With few rows the first, then the second, then the third shrink down to 1; None where even that is too many.
        """
        bits = 2 * columns if self.bit_columns is None else self.bit_columns
        normal, vectors = self.normal_columns, self.null_vectors
        fitted = []
        short = columns + bits + normal + vectors - rows
        for wanted in (bits, normal, vectors):
            fitted.append(max(1, wanted - max(0, short)))
            short -= wanted - fitted[-1]
        return None if short > 0 else (fitted[0], fitted[1], fitted[2])


def null_vectors(matrix: Matrix, count: int, random: Keystream) -> Matrix:
    """Draw orthonormal vectors, float64 (n, count), orthogonal to all columns of a matrix (n, columns) of any rank.

    Normal vectors less their projection on an orthonormal basis of the matrix, then QR; both twice, as after one pass
    many vectors are orthogonal to fewer digits than float64 has. Raises CryptoError unless 1 <= count <= n - columns.
    """
    rows, columns = matrix.shape
    if not 1 <= count <= rows - columns:
        raise CryptoError(f"expected 1 to {rows - columns} null vectors of {rows} rows, got {count}")
    # Q spans at least the columns of a matrix of any rank
    basis = np.linalg.qr(matrix)[0]
    vectors = normals(random, rows, count)
    for _ in range(2):
        vectors = np.linalg.qr(vectors - basis @ (basis.T @ vectors))[0]
    return vectors


def disguised(matrix: Matrix, bits: int, normal: int, random: Keystream) -> tuple[Matrix, NDArray[np.intp]]:
    """Mix a matrix's columns with `bits` columns of random 0 and 1 and `normal` ones of normal numbers.

    Returns the mixed matrix, to all of which null vectors are orthogonal, and the places of the matrix's own columns.
    """
    rows, columns = matrix.shape
    drawn = np.unpackbits(np.frombuffer(random.raw(-(-rows * bits // 8)), np.uint8), count=rows * bits)
    whole = np.concatenate([matrix, drawn.reshape(rows, bits), normals(random, rows, normal)], axis=1)
    # columns are shuffled, as the place of the matrix's own would tell them from random ones
    order = np.argsort(random.bits(64, whole.shape[1])[:, 0])
    return whole[:, order], np.argsort(order)[:columns]


def chosen(vectors: Matrix, random: Keystream) -> Matrix:
    """Pick some of the null vectors, any number of them from 1 on (secure response)."""
    # how many is random as well, from 1 to all
    count = vectors.shape[1]
    picked = np.argsort(random.bits(64, count)[:, 0])[: int(random.below(count, 1)[0, 0]) + 1]
    return vectors[:, np.sort(picked)]


def response(matrix: Matrix, vectors: Matrix) -> Matrix:
    """Return W = (I - Z Z^T) D_B for D_B (n, b) and Z (n, r')."""
    return matrix - vectors @ (vectors.T @ matrix)


def product(matrix: Matrix, answer: Matrix) -> Matrix:
    """Return D_A^T D_B, float64 (a, b), from D_A (n, a) and W (n, b)."""
    return matrix.T @ answer


def are_orthonormal(vectors: Matrix) -> bool:
    """Whether a received U is finite and has orthonormal columns, so that W is a projection."""
    if not np.isfinite(vectors).all():
        return False
    return bool(np.all(np.abs(vectors.T @ vectors - np.eye(vectors.shape[1])) <= _ORTHONORMAL))


def single_entries(vectors: Matrix) -> NDArray[np.bool_]:
    """Return which rows of U U^T have a single non-zero, bool (n,); B refuses these.

    U U^T is a projection: the squares of its row i add up to its entry (i, i), the square sum s_i of row i of U. So
    s_i - s_i^2 is the square sum off the diagonal; where it is 0 and s_i is not, s_i is 1.
    """
    # row by row: U U^T, n x n, is not formed
    on_diagonal = np.einsum("ij,ij->i", vectors, vectors)
    single: NDArray[np.bool_] = (on_diagonal > 0.5) & (on_diagonal - on_diagonal**2 <= _SINGLE)
    return single


def empty_rows(vectors: Matrix) -> NDArray[np.bool_]:
    """Return which rows of U U^T are zero, bool (n,); W shows these rows of D_B unmasked, and the paper lets it.

    Of a matrix of candidates they are rows that are the only difference of two candidates.
    """
    empty: NDArray[np.bool_] = np.einsum("ij,ij->i", vectors, vectors) <= _EMPTY
    return empty


def normals(random: Keystream, rows: int, columns: int) -> Matrix:
    """Draw standard normal numbers (Box and Muller), float64 (rows, columns)."""
    # 53 bits at the middle of their interval: never 0, of which there is no logarithm
    pairs = -(-rows * columns // 2)
    uniform = (random.bits(53, 2 * pairs)[:, 0].astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * np.pi * uniform[pairs:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return both[: rows * columns].reshape(rows, columns)
