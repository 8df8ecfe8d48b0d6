"""What a sealed computation hashes: no pad, tweak or row of transfers may serve twice."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from treaty.crypto.transfer.aes import Hash

Hashed = dict[int, list[np.ndarray]]


def noted(monkeypatch: pytest.MonkeyPatch) -> Hashed:
    """Return what will be hashed from now on, by the hash: tweaks, rows of transfers, and rows with their offsets."""
    found, kept = defaultdict[int, list[np.ndarray]](list), list[Hash]()
    honest, honest_bits = Hash.rows, Hash.low_bits

    def note(of: Hash, rows: np.ndarray, first: int, offset: np.ndarray) -> None:
        kept.append(of)  # or another could have the number of one that is gone
        numbers = np.arange(first, first + len(rows), dtype=np.uint64)
        found[id(of)].append(np.column_stack([numbers, rows, rows ^ offset]))

    def rows(self: Hash, rows: np.ndarray, first: int, blocks: int = 1, offset: np.ndarray | None = None) -> np.ndarray:
        note(self, rows, first, np.zeros(2, np.uint64) if offset is None else offset)
        return honest(self, rows, first, blocks, offset)

    def low_bits(self: Hash, rows: np.ndarray, first: int, offsets: np.ndarray, width: int) -> np.ndarray:
        for offset in offsets:
            note(self, rows, first, offset)
        return honest_bits(self, rows, first, offsets, width)

    monkeypatch.setattr(Hash, "rows", rows)
    monkeypatch.setattr(Hash, "low_bits", low_bits)
    return found


def assert_nothing_twice(hashed: Hashed, more_than: int = 0) -> None:
    """Fail if a hash had a pad, a tweak or a row twice, or no more rows than these."""
    for parts in hashed.values():
        of = np.concatenate(parts)
        assert len(np.unique(of[:, [0, 3, 4]], axis=0)) == len(of)  # one pad, one use
        pairs, tweaks, rows = (len(np.unique(of[:, part], axis=0)) for part in (slice(0, 3), slice(0, 1), slice(1, 3)))
        assert pairs == tweaks == rows > more_than  # a row of its own under each tweak
