"""What an end of a computation on shares receives, and what it does with messages that no honest end sends."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from crypto.sealed.test_sealed import play
from treaty.crypto.parameters import DEGREE
from treaty.crypto.transfer.comparison import make_quads
from treaty.crypto.transfer.shared_products import make
from treaty.crypto.transfer.stock import Arrays, RingEnd, Steps, Stock, Transfers, open_transfers
from treaty.errors import CryptoError

RARE = 1e-9  # of one check among a few hundred: a false alarm of any has a probability below 1e-6

Computation = Callable[[int], Steps[Any]]


def noted(steps: Steps[Any], seen: list[Arrays]) -> Steps[Any]:
    """Take all steps; append what comes at each."""
    came: Arrays | None = None
    while True:
        try:
            sent = next(steps) if came is None else steps.send(came)
        except StopIteration as stop:
            return stop.value
        came = yield sent
        seen.append([array.copy() for array in came])


def views(make: Computation) -> list[tuple[list[Arrays], Any]]:
    """Return what each role receives, step by step, and its result."""
    seen: list[list[Arrays]] = [[], []]
    return list(zip(seen, play(*(noted(make(role), seen[role]) for role in (0, 1))), strict=True))


def counts(*arrays: np.ndarray) -> np.ndarray:
    """Count half bytes, (16,)."""
    raw = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
    return np.bincount(np.concatenate([raw & 15, raw >> 4]), minlength=16)


def uniform(*arrays: np.ndarray) -> bool:
    """Tell whether all half bytes come about as often (chi-squared)."""
    found = counts(*arrays)
    expected = found.sum() / 16
    assert expected > 20
    return bool(chi2.sf(((found - expected) ** 2).sum() / expected, 15) > RARE)


def even(bits: np.ndarray) -> bool:
    """Tell whether bits of 0 and 1 are even, one by one and four by four."""
    whole = bits.reshape(-1)[: bits.size // 8 * 8]
    return uniform(np.packbits(whole))


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Tell whether counts may be of one distribution (chi-squared)."""
    both, total = one + other, one.sum() + other.sum()
    kept = both > 0
    distance = sum(
        ((of - both * (of.sum() / total))[kept] ** 2 / (both * (of.sum() / total))[kept]).sum() for of in (one, other)
    )
    return bool(chi2.sf(distance, max(1, kept.sum() - 1)) > RARE)


def filled() -> tuple[Transfers, Transfers]:
    """Return two ends with so much in stock that `again` is in step."""
    ends = play(open_transfers(0), open_transfers(1))
    fill(ends)
    return ends


def fill(ends: tuple[Transfers, Transfers], transfers: int = 1 << 18) -> None:
    """Make so many transfers, and quads, that no step of a small computation goes to making more."""

    def quads(end: Transfers) -> Steps[None]:
        return end.quads.reserve(transfers >> 4, lambda count: make_quads(end, count))

    play(*(quads(end) for end in ends))
    play(*(end.reserve(transfers) for end in ends))
    for kind in [kind for kind, ring in ends[0].rings.items() if ring.made]:
        play(*(end.rings[kind].stock.reserve(DEGREE, partial(make, end, kind)) for end in ends))


def again(end: Transfers) -> Transfers:
    """Return an end that draws from the stock what this one will, as if a computation that fails had not been."""
    out = copy(end)
    out.sender, out.receiver = copy(end.sender), copy(end.receiver)
    out.rows, out.quads = (replace(stock, _made=deque(stock._made)) for stock in (end.rows, end.quads))
    out.products, out.rings = defaultdict(Stock), defaultdict(RingEnd)
    return out


def garbage(came: Arrays) -> Iterator[Arrays]:
    """Change a message: arrays missing, too many, of other types and shapes."""
    yield [*came, np.zeros(1, np.uint8)]
    for k, array in enumerate(came):
        for changed in (
            array.astype(np.float64), array.astype(np.int8), array[..., None], array[:-1], np.array(0, array.dtype),
            np.concatenate([array, array]), array[:0],
        ):  # fmt: skip
            if changed.dtype != array.dtype or changed.shape != array.shape:
                yield [*came[:k], changed, *came[k + 1 :]]
    if came:
        yield came[:-1]
        yield []


def spoilt(steps: Steps[Any], place: int, way: int) -> Steps[Any]:
    """Take all steps, but give another message at one."""
    came: Arrays | None = None
    for number in range(1 << 20):
        try:
            sent = next(steps) if came is None else steps.send(came)
        except StopIteration as stop:
            return stop.value
        came = yield sent
        if number == place:
            ways = list(garbage(came))
            came = ways[way % len(ways)]
    raise AssertionError


def assert_refuses_garbage(make: Computation, role: int, tries: int | None = None) -> None:
    """Fail unless an end raises `CryptoError` for every message of another type or shape, at any step.

    All ways of all steps are played, or so many of each step. Computations are made `again` and again.
    """
    ways = [len(list(garbage(came))) for came in views(make)[role][0]]
    assert ways
    for place, count in enumerate(ways):
        for way in range(count) if tries is None else range(place, place + tries):
            ends = [spoilt(make(k), place, way) if k == role else make(k) for k in (0, 1)]
            with pytest.raises(CryptoError):
                play(*ends)
