"""How many rows a split may divide, as its owner counts them from its own splits above."""

from __future__ import annotations

import numpy as np
import pandas as pd

from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.systems.vertical.column_owner import SplitOwner
from treaty.systems.vertical.exact_sums import RevealedSides
from treaty.trees.ensemble import SplitTable


def going_left(*bins: int) -> np.ndarray:
    left = np.zeros(256, np.bool_)
    left[list(bins)] = True
    return left


def test_rows_that_a_split_above_sent_elsewhere_are_not_counted():
    table = to_table(pd.DataFrame({"a": np.repeat([0.0, 1.0, 2.0, 3.0], [1, 2, 3, 4]), "b": np.tile([0.0, 1.0], 5)}))
    bins = fit_bins(table, 8)
    codes = bins.transform(table)
    owner = SplitOwner("bank", codes, bins, SplitTable(), RevealedSides(None, bins, codes))
    owner.record(np.array([0, 0, 1], np.int32), np.stack([going_left(0, 1), going_left(0), going_left(0)]))
    low, lowest, other = range(3)
    assert owner.may_divide(low, []) == (3.0, 7.0)
    assert owner.may_divide(lowest, [low]) == (1.0, 2.0)  # within the lowest two bins: the other child has one side
    assert owner.may_divide(other, [low]) == (5.0, 5.0)  # a split of another column leaves any row
