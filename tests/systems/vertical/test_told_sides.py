"""The count of what sides of splits tell: exact for whole columns, over jobs, whatever the bins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.errors import ConfigError
from treaty.models.trees import record_split
from treaty.systems.vertical.exact_sums import RevealedSides, estimated_sides
from treaty.trees.ensemble import SplitTable

TABLE = pd.DataFrame({
    "x": np.arange(400.0) % 20,
    "gaps": np.where(np.arange(400) % 7 == 0, np.nan, np.arange(400.0) % 11),
    "kind": pd.Categorical.from_codes(np.arange(400) % 5, list("abcde")),
})  # fmt: skip


class Owner:
    """Columns whose splits are told."""

    def __init__(self, folder: Path | None = None, max_bin: int = 32) -> None:
        table = to_table(TABLE)
        self.bins = fit_bins(table, max_bin)
        self.codes = self.bins.transform(table)
        self.splits, self.told = SplitTable(), RevealedSides(folder, self.bins, self.codes)
        self.sides: list[tuple[int, np.ndarray]] = []

    def tell(self, feature: int, below: int, missing: bool = False, left: float = 1.0, right: float = 1.0) -> float:
        """Split a column below a bin, or one of its categories from the rest; return the share that is known."""
        going, n_bins = np.zeros(256, np.bool_), int(self.bins.n_bins[feature])
        going[below - 1 if self.bins.category_bins[feature] is not None else slice(0, below)] = True
        going[n_bins] = missing
        self.sides.append((feature, going))
        record = record_split(self.splits, self.bins, feature, going)
        self.told.add(self.splits, [(record, left, right)])
        return self.told.share

    def known(self) -> float:
        """Return the share of bins that are alone in how splits of their column divide bins."""
        found = 0
        for feature, codes in enumerate(self.codes.T):
            ways = [tuple(going[code] for of, going in self.sides if of == feature) for code in np.unique(codes)]
            alone = {code for code, way in zip(np.unique(codes), ways, strict=True) if ways.count(way) == 1}
            found += int(np.isin(codes, list(alone)).sum())
        return found / self.codes.size


def test_whole_columns_are_counted_exactly() -> None:
    owner, rng = Owner(), np.random.default_rng(0)
    assert owner.told.share == 0.0
    for _ in range(40):
        feature = int(rng.integers(0, 3))
        share = owner.tell(feature, int(rng.integers(1, owner.bins.n_bins[feature])), bool(rng.integers(0, 2)))
        assert share == pytest.approx(owner.known())
    assert share > 0.5


def test_sides_that_a_limit_keeps_from_being_shown_are_not_counted(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.tell(0, 3)
    other, told = Owner(tmp_path / "elsewhere"), owner.told.share
    for below in range(1, 12):
        other.tell(0, below)

    def refuse(share: float) -> None:
        assert share > told
        raise ConfigError("its limit is reached")

    with pytest.raises(ConfigError, match="its limit"):
        owner.told.add(other.splits, [(record, 1.0, 1.0) for record in range(len(other.splits))], refuse)
    assert Owner(tmp_path).told.share == told < other.told.share


def test_a_part_of_the_rows_counts_as_such_a_part() -> None:
    owner = Owner()
    owner.tell(0, 3, left=0.5, right=0.25)
    assert owner.told.share == 0.0  # no bin lies between two cuts
    assert owner.tell(0, 4, left=0.5, right=0.5) == pytest.approx(0.25 * 20 / 1200)
    assert owner.tell(0, 3) == pytest.approx(0.5 * 20 / 1200)


def test_what_was_told_counts_in_later_jobs_whatever_their_bins(tmp_path: Path) -> None:
    first = Owner(tmp_path / "shop.sides")
    for below in (3, 4):
        first.tell(0, below)
    first.tell(2, 1)
    later = Owner(tmp_path / "shop.sides")
    assert later.told.share == pytest.approx(first.told.share)
    assert later.tell(0, 5) == pytest.approx(first.told.share + 20 / 1200)
    coarse = Owner(tmp_path / "shop.sides", max_bin=5)
    assert coarse.told.share > 0.0
    assert Owner().told.share == 0.0


def test_a_count_that_was_rolled_back_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shop.sides"
    Owner(folder).tell(0, 3)
    (folder / "sides").unlink()
    with pytest.raises(ConfigError, match="earlier splits have revealed"):
        Owner(folder)


def test_an_estimate_grows_with_trees_and_is_less_of_nodes_own_rows() -> None:
    counts = Owner().told.counts
    shares = [estimated_sides(counts, 3, trees, 2, whole=False) for trees in (0, 1, 10, 100, 10_000)]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == pytest.approx(1.0)
    assert estimated_sides(counts, 3, 10, 2, whole=True) > shares[2]
