"""The count of what sides of splits reveal, for columns of thousands of bins."""

from __future__ import annotations

import numpy as np
import pytest

from treaty.data.binning import fit_bins
from treaty.data.table import Schema, Table
from treaty.models.trees import record_split
from treaty.systems.vertical import exact_sums
from treaty.systems.vertical.exact_sums import RevealedSides
from treaty.trees.ensemble import SplitTable


@pytest.mark.parametrize("seed", range(4))
def test_columns_of_too_many_bins_for_pairs_count_bins_that_whole_splits_parted(monkeypatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = tuple(f"k{k}" for k in range(30))
    table = Table(Schema(("code",), (names,)), [rng.integers(0, 30, 300).astype(np.float32)], 300)
    bins = fit_bins(table)
    splits, shares = SplitTable(), []
    for _ in range(6):
        left = np.zeros(256, np.bool_)
        left[: len(names)] = rng.random(len(names)) < 0.5
        shares.append((record_split(splits, bins, 0, left), 1.0, 1.0))
    by_pairs = RevealedSides(None, bins, bins.transform(table))
    by_pairs.add(splits, shares)
    monkeypatch.setattr(exact_sums, "_PAIRS", 8)
    by_class = RevealedSides(None, bins, bins.transform(table))
    by_class.add(splits, shares)
    assert by_class.share == pytest.approx(by_pairs.share)
    assert 0.0 < by_class.share < 1.0
