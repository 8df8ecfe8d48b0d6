"""Mini-batches: one partition of the rows for the whole training, taken in the same order every epoch.

Batches drawn anew every epoch would give a party new equations about the labels in each of them; with one partition
it gets in total as many as it has columns, per batch. A new order would add chance to an epoch's loss, whose change
ends training: near the optimum more than the tolerance. The partition follows from a seed by SHAKE-256, so that
all parties draw the same on any machine.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Integers

SEED_BYTES = 32

ROWS_PER_COLUMN = 10
"""With fewer rows of a batch per column, a party comes near the residuals by linear algebra."""

ROWS_PER_COLUMN_OF_SMALL_BATCHES = 40
"""With fewer rows per column, labels (-1 or 1, in exact sums) are found as a short vector of a lattice."""

ALONE = 1.0 / 3.0
"""Leverage above which a row counts as dominating the gradient of its batch; see `rows_alone`."""

MANY_ROWS = 300
"""Today's reduction algorithms fail on a lattice of this many dimensions, one for each row."""


def batch_seed(random_state: int | None) -> bytes:
    """Return a seed (32 bytes) for batches: from this number, or from the system's generator for None."""
    if random_state is None:
        return secrets.token_bytes(SEED_BYTES)
    return hashlib.sha256(b"treaty batches" + random_state.to_bytes(16, "little")).digest()


def partition(n_rows: int, batch_size: int, seed: bytes) -> Integers:
    """Cut rows into batches, int64 (n_batches, batch_size), once per training; an incomplete last one is dropped.

    A `batch_size` above `n_rows` is taken as `n_rows`.
    """
    batch_size = min(batch_size, n_rows)
    n_batches = n_rows // batch_size
    numbers = np.frombuffer(hashlib.shake_256(seed + b"rows").digest(8 * n_rows), "<u8")
    drawn = np.argsort(numbers, kind="stable").astype(np.int64)
    return drawn[: n_batches * batch_size].reshape(n_batches, batch_size)


def curvature_rows(batches: Integers, at: int, size: int) -> list[Integers]:
    """Return the rows of a Hessian's product in pieces of at most a batch, int64 (n_rows,) each.

    They are the first `size` rows of batch number `at`, or, where `size` is several batches, it and those that follow.
    """
    n_batches, batch_size = batches.shape
    if size <= batch_size:
        return [batches[at, :size]]
    return [batches[(at + k) % n_batches] for k in range(min(size // batch_size, n_batches))]


def fewest_rows(n_columns: int, *, of_labels: bool) -> int:
    """Return the rows a batch must have so that the gradients of `n_columns` columns hide the rows they are sums of.

    The columns, one per category, are those of all parties who may combine their gradients. A batch needs 10 rows
    for each column; if these parties have no labels (`of_labels`), also 40 for each column, or 300 if that is less.

    With w = 0 in the first batch a party has the exact integers X^T y. Where y is -1 or 1 and X has m columns of 24
    fractional bits, y is a very short vector of a lattice of one dimension per row. Reduction (LLL, then BKZ) found
    all labels of 40 rows and 4 columns at once, of 60 and 6 in a second, of 100 and 10 in minutes, and nothing at 20
    to 30 rows for each column in a minute. Reduction gets weaker with the dimension, and from 300 rows on ten for each
    column are assumed to suffice. That is a heuristic from these trials, not a proof.
    """
    if not of_labels:
        return ROWS_PER_COLUMN * n_columns
    return max(ROWS_PER_COLUMN * n_columns, min(ROWS_PER_COLUMN_OF_SMALL_BATCHES * n_columns, MANY_ROWS))


def check_batch_size(batch_size: int, n_columns: int, whose: str, *, n_rows: int, of_labels: bool) -> None:
    """Raise ConfigError for batches so small that gradients can be solved for rows' residuals; see `fewest_rows`.

    `batch_size` is the actual one, at most `n_rows`, the rows of the table. Where gradients are of labels, none of the
    columns is the intercept, else one is. `whose` names the columns' owners. Tan et al., "Residue-based Label
    Protection Mechanisms in Vertical Logistic Regression", 2022 (arXiv 2205.04166).
    """
    least = fewest_rows(n_columns, of_labels=of_labels)
    if batch_size < least:
        own = n_columns if of_labels else n_columns - 1
        columns = f"the column of {whose}" if own == 1 else f"the {own} columns of {whose} (one per category)"
        if not of_labels:
            columns = f"{columns} and the intercept" if own else f"the intercept of {whose}"
        remedy = "raise batch_size" if least <= n_rows else f"the table has only {n_rows} rows: bring more"
        raise ConfigError(
            f"expected batches of at least {least} rows for {columns}, got {batch_size}: from smaller ones "
            f"{'labels' if of_labels else 'margins'} can be solved for; {remedy}{' or fewer columns' if own else ''}"
        )


def check_hessian_batch_size(size: int, n_columns: int) -> None:
    """Raise ConfigError for Hessian products over so few rows that the steps' part of margins can be solved for.

    `n_columns` are those of parties who may combine what they see.
    """
    least = ROWS_PER_COLUMN * n_columns
    if size < least:
        raise ConfigError(
            f"expected hessian_batch_size of at least {least} rows for {n_columns} columns, got {size}: from products "
            "over fewer the rows' part of a step can be solved for; raise hessian_batch_size or leave it out"
        )


def rows_alone(X: Floats) -> int:
    """Count the rows of a batch that dominate its gradient; X (rows, n_columns) is one party's prepared columns.

    These are the rows whose leverage, the diagonal of A (A^T A)^+ A^T for A = [X, 1], exceeds a third. From the
    gradient follows A (A^T A)^+ A^T d, in which d_i of such a row has this weight and all others together hardly more.
    """
    A = np.hstack([X, np.ones((len(X), 1))])
    values, vectors = np.linalg.eigh(A.T @ A)
    spanned = values > 1e-9 * values[-1]  # without constant columns and complete sets of categories
    half = A @ (vectors[:, spanned] / np.sqrt(values[spanned]))
    return int(np.count_nonzero(np.einsum("ij,ij->i", half, half) > ALONE))
