"""Mini-batches: one partition of the rows for the whole training, taken in the same order every epoch.

Batches drawn afresh every epoch would give a party new equations about the labels in each of them; with one partition
it gets as many in all as it has columns, per batch. An order drawn anew would add chance to an epoch's loss, whose
change ends training: near the optimum more than the tolerance. The partition follows from a seed by SHAKE-256, so that
all parties draw the same on any machine.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError

SEED_BYTES = 32
ROWS_PER_COLUMN = 10


def batch_seed(random_state: int | None) -> bytes:
    """Return a seed (32 bytes) for batches: of this number, or of the system's generator for None."""
    if random_state is None:
        return secrets.token_bytes(SEED_BYTES)
    return hashlib.sha256(b"treaty batches" + random_state.to_bytes(16, "little")).digest()


def partition(n_rows: int, batch_size: int, seed: bytes) -> NDArray[np.int64]:
    """Cut rows into batches, once for a whole training; what does not fill a last batch is left out.

    Parameters
    ----------
    n_rows : int
    batch_size : int
        Taken as `n_rows` where it is more.
    seed : bytes
        See `batch_seed`.

    Returns
    -------
    int64 (n_batches, batch_size)
        Row numbers; n_batches is at least 1.
    """
    batch_size = min(batch_size, n_rows)
    n_batches = n_rows // batch_size
    numbers = np.frombuffer(hashlib.shake_256(seed + b"rows").digest(8 * n_rows), "<u8")
    drawn = np.argsort(numbers, kind="stable").astype(np.int64)
    return drawn[: n_batches * batch_size].reshape(n_batches, batch_size)


def check_batch_size(batch_size: int, n_columns: int, party: str) -> None:
    """Refuse batches from whose gradients a party could solve for the residuals of rows, and read labels from them.

    Parameters
    ----------
    batch_size : int
        Rows in a batch, as they are: not more than the table has.
    n_columns : int
        The party's columns as they enter the model, one per category.

    Raises
    ------
    ConfigError
        When there are fewer than ten rows per column.

    References
    ----------
    Tan et al., "Residue-based Label Protection Mechanisms in Vertical Logistic Regression", 2022 (arXiv 2205.04166).
    """
    if batch_size < ROWS_PER_COLUMN * n_columns:
        raise ConfigError(
            f"expected batches of at least {ROWS_PER_COLUMN * n_columns} rows, {ROWS_PER_COLUMN} for each of the "
            f"{n_columns} columns of {party} (one per category), got {batch_size}: from smaller ones labels can be "
            "solved for; raise batch_size, bring more rows or fewer columns"
        )
