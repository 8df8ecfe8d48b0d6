"""Computing on shares against plain whole numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from treaty.crypto.sealed.arithmetic import both_of, products, selected, squares
from treaty.crypto.sealed.best import Known, Widths, best_of_shared
from treaty.crypto.sealed.comparison import negatives
from treaty.crypto.sealed.steps import Steps
from treaty.crypto.sealed.transfers import Transfers, open_transfers
from treaty.crypto.sealed.wide import from_ints

WIDTHS = Widths(16, 30, 34)


def play(one: Steps[Any], other: Steps[Any]) -> tuple[Any, Any]:
    """Take the steps of both ends; return their results."""
    results: list[Any] = [None, None]
    given: list[Any] = [None, None]
    while True:
        sent = []
        for k, end in enumerate((one, other)):
            try:
                sent.append(end.send(given[k]))
            except StopIteration as stop:
                results[k] = stop.value
        if not sent:
            return results[0], results[1]
        assert len(sent) == 2
        given = sent[::-1]


@pytest.fixture(scope="module")
def ends() -> tuple[Transfers, Transfers]:
    return play(open_transfers(), open_transfers())


def shared(numbers: list[int], bits: int, words: int = 2) -> tuple[np.ndarray, np.ndarray]:
    masks = [random.randrange(1 << bits) for _ in numbers]
    return from_ints([(x - m) % (1 << bits) for x, m in zip(numbers, masks, strict=True)], words), from_ints(
        masks, words
    )


def opened(shares: tuple[np.ndarray, np.ndarray], bits: int) -> list[int]:
    ints = [[int.from_bytes(row.tobytes(), "little") for row in s.reshape(-1, s.shape[-1])] for s in shares]
    return [(x + y) % (1 << bits) for x, y in zip(*ints, strict=True)]


def test_products_and_squares(ends: tuple[Transfers, Transfers]) -> None:
    x = [0, (1 << 56) - 1, 1, *(random.randrange(1 << 56) for _ in range(60))]
    y = [(1 << 64) - 1, (1 << 64) - 1, 0, *(random.randrange(1 << 64) for _ in range(60))]
    xs, ys = shared(x, 57), shared(y, 65)
    found = play(*(products(ends[k], xs[k], ys[k][:, None], 57, 65, 121) for k in (0, 1)))
    assert opened(found, 121) == [a * b % (1 << 121) for a, b in zip(x, y, strict=True)]
    u = [0, -1, (1 << 32) - 1, 1 - (1 << 32), *(random.randrange(1 - (1 << 32), 1 << 32) for _ in range(60))]
    us = shared([a % (1 << 34) for a in u], 34)
    assert opened(play(*(squares(ends[k], us[k], 34, 65, k) for k in (0, 1))), 65) == [a * a for a in u]


@pytest.mark.parametrize("bits", [2, 5, 17, 64, 121])
def test_negatives(ends: tuple[Transfers, Transfers], bits: int) -> None:
    z = [0, -1, 1, *(random.randrange(-(1 << bits - 1), 1 << bits - 1) for _ in range(40))]
    z = [max(-(1 << bits - 1), min(x, (1 << bits - 1) - 1)) for x in z]
    zs = shared([x % (1 << bits) for x in z], bits)
    one, other = play(*(negatives(ends[k], zs[k], bits, k) for k in (0, 1)))
    assert (one ^ other).tolist() == [int(x < 0) for x in z]


def test_selection_and_conjunction(ends: tuple[Transfers, Transfers]) -> None:
    values = [random.randrange(1 << 100) for _ in range(30)]
    vs, bits = shared(values, 128), np.random.default_rng(0).integers(0, 2, (2, 30), dtype=np.uint8)
    found = play(*(selected(ends[k], bits[k], vs[k][:, None]) for k in (0, 1)))
    assert opened(found, 128) == [v * int(b) for v, b in zip(values, bits[0] ^ bits[1], strict=True)]
    one, other = play(*(both_of(ends[k], bits[k, :29], k) for k in (0, 1)))
    assert (one + other).tolist() == (bits[0] & bits[1])[:29].tolist()


@pytest.mark.parametrize("seed", range(40))
def test_best_is_that_of_plain_fractions(ends: tuple[Transfers, Transfers], seed: int) -> None:
    rng, ridge = np.random.default_rng(seed), 3
    nodes, candidates = int(rng.integers(1, 5)), int(rng.integers(1, 20))
    tied, last, group = bool(seed % 2), bool(seed // 2 % 2), int(rng.integers(2, 6))
    whole = rng.integers(50, 100, nodes) if tied else rng.integers(1 << 27, 1 << 29, nodes)
    hess = np.stack([rng.integers(0, t - 2 * ridge + 1, candidates) for t in whole])
    size = 9 if tied else 1 << 32
    u = rng.integers(1 - size, size, (nodes, candidates))
    count = rng.integers(0, 1 << 15, (nodes, candidates))
    low = np.full(nodes, 5)
    limits = np.stack([low, np.maximum(whole - 2 * ridge - 4, low)])
    counts = np.tile([[20], [(1 << 15) - 20]], nodes)
    known = Known(
        ridge, np.zeros(nodes, np.int64), whole, limits, counts, [(0, 1)] * nodes, [(1, 3)] * nodes if last else []
    )
    expected = []
    for b in range(nodes):
        best, top, below = -1, *known.first[b]
        for j in range(candidates):
            if limits[0, b] <= hess[b, j] < limits[1, b] and counts[0, b] <= count[b, j] < counts[1, b]:
                a = int(hess[b, j]) + ridge
                new = int(u[b, j]) ** 2, a * (int(whole[b]) - a)
                if new[0] * below > top * new[1]:
                    best, (top, below) = j, new
        expected.append(-1 if last and below > 3 * top else best)
    masks = rng.integers(0, 1 << 62, (3, nodes, candidates), dtype=np.uint64)
    plain = np.stack([u, hess, count]).astype(np.uint64)
    _, found = play(
        best_of_shared(ends[0], *masks, known, WIDTHS, 0, group),
        best_of_shared(ends[1], *(plain - masks), Known.nothing(nodes, last=last), WIDTHS, 1, group),
    )
    assert found.tolist() == expected
