"""Which values an owner of columns decides rows by: its own, and of rows told under noise what it told of them."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from treaty.errors import DataError
from treaty.privacy.remembered_rows import KnownRows, RandomisedRows
from treaty.systems.system import LabelledRows, Seat

logger = logging.getLogger(__name__)


def check_unknown(seat: Seat, known: KnownRows, rows: LabelledRows) -> None:
    """Refuse rows that cannot be told from training rows, as they have the values of some and no ids.

    Raises DataError in safe mode where other organisations play the other parties; elsewhere it warns.
    """
    if known.have_ids and rows.ids is not None:
        return
    found, name = known.with_equal_values(rows.table.matrix()), seat.party.name
    if not found:
        return
    text = (
        f"{name}: {found} of {rows.table.n_rows} rows have the values of rows trained on, in all of its columns, and "
        "no ids: if they are the same persons, their true side at each split undoes the noise on what was told of them"
    )
    if seat.apart and seat.options.mode == "safe":
        raise DataError(
            f"{text}; align by ids ([align]), by which the same persons are recognised, or leave such rows out",
            public="rows to decide have the values of rows trained on, and no ids; align by ids, or leave them out",
        )
    logger.warning("%s", text)


def shown_matrix(told: RandomisedRows | None, rows: LabelledRows) -> NDArray[np.float32]:
    """Return the rows, float32 (n_rows, n_features), as an owner decides them: training rows as `told` under noise."""
    matrix = rows.table.matrix()
    if told is None or rows.ids is None or not told.known.have_ids:
        return matrix
    return told.in_place_of_values(matrix, rows.ids())
