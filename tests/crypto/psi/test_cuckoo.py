"""Cuckoo tables hold every item once, in one of its bins; where they cannot, they say so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.transfer import oprf


def digests(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, (count, 2), dtype=np.uint64)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 1000))
def test_every_item_is_in_one_of_its_bins(count: int, seed: int) -> None:
    items, bins = digests(count, seed), oprf.bins_for(max(count, 1024), 1)
    table = oprf.placed(items, bins)
    assert table is not None
    full = np.flatnonzero(table >= 0)
    assert sorted(table[full]) == list(range(count))
    assert all(bin in oprf.places(items, bins)[table[bin]] for bin in full)


def test_places_are_parts_of_the_digest_in_three_tables() -> None:
    items, bins = digests(500, 1), oprf.bins_for(500, 64)
    length = bins // 3
    for (low, high), found in zip(items.tolist(), oprf.places(items, bins).tolist(), strict=True):
        whole = high << 64 | low
        assert found == [((whole >> 40 * k) % 2**40 * length >> 40) + k * length for k in range(3)]


def test_places_are_spread_evenly() -> None:
    counts = np.bincount(oprf.places(digests(40_000, 2), 300).reshape(-1), minlength=300)
    assert np.all(np.abs(counts - 400) < 6 * 20)


@pytest.mark.parametrize(("items", "multiple"), [(1024, 512), (1025, 1), (1 << 25, 512)])
def test_bins_are_thirteen_tenths_of_the_items(items: int, multiple: int) -> None:
    bins = oprf.bins_for(items, multiple)
    assert bins % (3 * multiple) == 0
    assert 1.3 * items <= bins < 1.3 * items + 3 * multiple


def test_items_that_do_not_fit_are_told() -> None:
    same = np.repeat(digests(1, 3), 4, axis=0)  # four items, three bins
    assert oprf.placed(same, 3000) is None
    assert oprf.placed(same[:3], 3000) is not None
    assert oprf.placed(digests(301, 3), 300) is None


def test_tables_of_the_shortest_lists_do_not_fail() -> None:
    bins = oprf.bins_for(1024, 1)
    assert all(oprf.placed(digests(1024, seed), bins) is not None for seed in range(2000))
