"""The estimate of what exact sums give away, beside what the attack finds."""

from __future__ import annotations

import numpy as np
import pytest

from treaty.privacy.exact_sums import estimated_share


def even(rows: int, *bins: int) -> list[np.ndarray]:
    return [np.full(count, rows / count) for count in bins]


def test_more_trees_depth_and_bins_give_more_away_and_more_rows_less() -> None:
    base = estimated_share(even(3000, 16, 32), 3, 20)
    assert 0.05 < base < 0.95
    assert estimated_share(even(3000, 16, 32), 3, 5) < base < estimated_share(even(3000, 16, 32), 3, 50)
    assert estimated_share(even(3000, 16, 32), 2, 20) < base < estimated_share(even(3000, 16, 32), 5, 20)
    assert estimated_share(even(30_000, 16, 32), 3, 20) < base < estimated_share(even(800, 16, 32), 3, 20)
    assert base < estimated_share(even(3000, 32, 255), 3, 20)


def test_few_filled_bins_count_more_than_many_declared_ones() -> None:
    """A column of a rare value is known by one split, whatever the table's length."""
    rare = [np.array([97_000, 2000, 500, 300, 200])]
    assert estimated_share(rare, 3, 20) > 0.8 > 0.1 > estimated_share(even(100_000, 32), 3, 20)


def test_a_column_of_one_bin_has_nothing_to_tell() -> None:
    assert estimated_share([np.array([500, 0])], 3, 20) == 0.0
    assert estimated_share([*even(500, 8), np.array([500])], 3, 20) == estimated_share(even(500, 8), 3, 20)
    assert estimated_share([], 3, 20) == 0.0


@pytest.mark.parametrize(("rows", "depth", "trees"), [(1, 1, 1), (10**7, 24, 1000), (10**7, 1, 0.05), (50, 24, 10**6)])
def test_sizes_beyond_the_simulated_ones_have_a_share(rows: int, depth: int, trees: float) -> None:
    assert 0.0 <= estimated_share([np.array([rows, rows + 1, 2 * rows])], depth, trees) <= 1.0


def test_beyond_the_simulated_trees_and_depths_more_is_known() -> None:
    of_many = even(10_000_000, 32)
    assert estimated_share(of_many, 8, 5) < estimated_share(of_many, 17, 5) < estimated_share(of_many, 19, 5)
    assert estimated_share(of_many, 2, 100) < estimated_share(of_many, 2, 300)
