"""What a sealed computation uses: no pad, tweak, row of transfers or thing from a stock may serve twice."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from treaty.crypto.transfer.aes import Hash
from treaty.crypto.transfer.stock import Stock, Transfers


class Used:
    """What is hashed from now on, by the hash (tweaks, rows, and rows with their offsets), and drawn from stocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashed, self.drawn = defaultdict[int, list[np.ndarray]](list), list[np.ndarray]()
        self._kept = list[Hash]()  # or another could have the number of one that is gone
        honest, honest_bits, honest_draw = Hash.rows, Hash.low_bits, Stock.draw

        def rows(of: Hash, rows: np.ndarray, first: int, blocks: int = 1, offset: np.ndarray | None = None) -> Any:
            self._note(of, rows, first, np.zeros(2, np.uint64) if offset is None else offset)
            return honest(of, rows, first, blocks, offset)

        def low_bits(of: Hash, rows: np.ndarray, first: int, offsets: np.ndarray, width: int) -> np.ndarray:
            for offset in offsets:
                self._note(of, rows, first, offset)
            return honest_bits(of, rows, first, offsets, width)

        def draw(stock: Stock, count: int) -> list[Any]:
            parts = honest_draw(stock, count)
            for part in parts:
                # an array of each thing's own
                self.drawn.append(
                    part if isinstance(part, np.ndarray) else part.r if hasattr(part, "r") else part.random
                )
            return parts

        monkeypatch.setattr(Hash, "rows", rows)
        monkeypatch.setattr(Hash, "low_bits", low_bits)
        monkeypatch.setattr(Stock, "draw", draw)

    def _note(self, of: Hash, rows: np.ndarray, first: int, offset: np.ndarray) -> None:
        self._kept.append(of)
        numbers = np.arange(first, first + len(rows), dtype=np.uint64)
        self.hashed[id(of)].append(np.column_stack([numbers, rows, rows ^ offset]))

    def clear(self) -> None:
        self.hashed.clear()
        self.drawn.clear()

    def assert_nothing_twice(self, least: int = 0) -> None:
        """Fail if a hash had a pad, tweak or row twice, or fewer rows than `least`, or a stock gave a thing twice."""
        for parts in self.hashed.values():
            of = np.concatenate(parts)
            assert len(np.unique(of[:, [0, 3, 4]], axis=0)) == len(of)  # one pad, one use
            pairs, tweaks, rows = (
                len(np.unique(of[:, part], axis=0)) for part in (slice(0, 3), slice(0, 1), slice(1, 3))
            )
            assert pairs == tweaks == rows >= least  # a row of its own under each tweak
        # parts of what was made, by where they are in memory
        places = sorted((part.ctypes.data, part.nbytes) for part in self.drawn if part.nbytes)
        assert all(place + size <= after for (place, size), (after, _) in pairwise(places))


def use_all(end: Transfers) -> None:
    """Draw what is left of an end's stocks, and hash rows."""
    left = end.drawn(end.rows.left)
    left.sender.hash.rows(left.q, left.first)
    left.receiver.hash.rows(left.t, left.first)
    for stock in (end.quads, *end.products.values(), *(ring.stock for ring in end.rings.values())):
        stock.draw(stock.left)
