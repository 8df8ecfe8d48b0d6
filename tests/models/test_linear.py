"""Linear models as they are kept."""

from __future__ import annotations

import numpy as np
import pytest

import treaty
from tables import real_table
from treaty.data.table import Table, to_table


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_row_has_the_same_margin_whatever_rows_are_beside_it():
    """As a server asks for single rows of what a batch had together."""
    X, y = real_table("binary")
    model = treaty.LogisticRegression("pooled", max_iter=3).fit(X, y)
    (part,) = model.parts_.values()
    table = to_table(X.to_numpy() * np.pi, party="p", schema=part.schema)
    whole = part.margins(table)
    for rows in (1, 2, 7):
        few = Table(table.schema, [column[:rows] for column in table.columns], rows)
        np.testing.assert_array_equal(part.margins(few), whole[:rows])
