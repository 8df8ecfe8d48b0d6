"""The largest of shared fractions U^2 / (a (T - a)), of which only the place is opened, and only to one party.

The *knower* (role 0) knows T and what a fraction must pass; the *chooser* (role 1) learns which of its candidates won,
or that none did. Both hold shares of every candidate's U, sum of hess and number of rows.

1. Squares, products a (T - a), and comparisons of hess and rows with the least and most that a child may have. The
   numerator of a candidate that may not be chosen becomes 0.
2. A tournament: of each group, all pairs are compared by their cross products, exactly, and the winner is selected. The
   first of equal fractions wins.
3. The winner's number is opened to the chooser.

Wide groups take fewer steps and more work. Honest but curious parties; nothing fails by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sealed.arithmetic import products, selected, squares
from treaty.crypto.sealed.comparison import conjunctions, negatives
from treaty.crypto.sealed.steps import Steps, take, together
from treaty.crypto.sealed.transfers import Bits, Transfers
from treaty.crypto.sealed.wide import Wide, add, cut, from_ints, subtract, wide

Shares = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Widths:
    """Bits of shares: |U| < 2^(grad - 2), 0 < a <= T < 2^(hess - 1), rows below 2^(count - 1)."""

    count: int
    hess: int
    grad: int

    @property
    def top(self) -> int:
        """Bits of a guarded numerator."""
        return 2 * self.grad - 3

    @property
    def below(self) -> int:
        """Bits of a guarded denominator."""
        return 2 * self.hess - 3

    @property
    def difference(self) -> int:
        """Bits of the difference of two cross products."""
        return self.top + self.below - 1

    @property
    def words(self) -> int:
        """Words that hold it."""
        return -(-self.difference // 64)


@dataclass(frozen=True, slots=True)
class Known:
    """What the knower adds of n nodes: L, T (n,), the range of a left child's hess and rows, and fractions to pass.

    `constants`, int64 (n,), come off every U of a node. `hess` and `count`, int64 (2, n), are the least and one more
    than the most, not below the least. `first` are fractions that a candidate must pass, `last` those that must pass
    all candidates, or none (len 0). At the chooser all are zeros.
    """

    ridge: int
    constants: NDArray[np.int64]
    whole: NDArray[np.int64]
    hess: NDArray[np.int64]
    count: NDArray[np.int64]
    first: Sequence[tuple[int, int]]
    last: Sequence[tuple[int, int]]

    @classmethod
    def nothing(cls, nodes: int, *, last: bool) -> Known:
        """Return what the chooser adds."""
        zeros, none = np.zeros((2, nodes), np.int64), [(0, 0)] * nodes
        return cls(0, zeros[0], zeros[0], zeros, zeros, none, none if last else [])


def best_of_shared(
    transfers: Transfers, u: Shares, hess: Shares, count: Shares, known: Known, widths: Widths, role: int, group: int
) -> Steps[NDArray[np.int64]]:
    """Return at the chooser the number of each node's best candidate (n,), -1 for none of them; nothing else elsewhere.

    Shares are (n, candidates), modulo 2^64 or any multiple of their widths' moduli.
    """
    nodes, candidates = u.shape
    u = u - known.constants.astype(np.uint64)[:, None]
    words, all_of = widths.words, (nodes, candidates)
    a = cut(wide((hess + np.uint64(known.ridge)).reshape(-1), words), widths.hess)
    whole = np.broadcast_to(known.whole[:, None], all_of).reshape(-1)
    rest = cut(subtract(wide(whole, words), a), widths.hess)
    top, below, fit_hess, fit_count = yield from together(
        squares(transfers, cut(wide(u.reshape(-1), words), widths.grad), widths.grad, widths.top, role),
        products(transfers, a, rest[:, None], widths.hess, widths.hess, widths.below),
        _within(transfers, hess, known.hess, widths.hess, role),
        _within(transfers, count, known.count, widths.count, role),
    )
    (fit,) = yield from conjunctions(transfers, fit_hess, fit_count[None], role)
    top = cut((yield from selected(transfers, fit, top[:, None])), widths.top)
    values = np.zeros((nodes, 1 + candidates + bool(known.last), 3, words), np.uint64)
    values[:, 1 : 1 + candidates, 0] = top.reshape(nodes, candidates, words)
    values[:, 1 : 1 + candidates, 1] = below.reshape(nodes, candidates, words)
    for place, fractions in ((0, known.first), (-1, known.last)):
        for part in (0, 1) if fractions else ():
            values[:, place, part] = from_ints([fraction[part] for fraction in fractions], words)
    if role == 0:
        values[:, :, 2, 0] = np.arange(values.shape[1])
    while values.shape[1] > 1:
        size, groups, byes = _groups(values.shape[1], group)
        missing = size * groups + byes - values.shape[1]
        if missing:  # 0 / 1 beats nothing that comes before
            padding = np.zeros((nodes, missing, 3, words), np.uint64)
            padding[:, :, 1, 0] = 1 - role
            values = np.concatenate([values, padding], axis=1)
        playing = np.ascontiguousarray(values[:, : size * groups]).reshape(nodes * groups, size, 3, words)
        won = (yield from _winners(transfers, playing, widths, role)).reshape(nodes, groups, 3, words)
        values = np.concatenate([won, values[:, size * groups :]], axis=1)
    number = values[:, 0, 2, 0].astype(np.uint32)
    if role == 0:
        take((yield [number]))
        return np.zeros(0, np.int64)
    (came,) = take((yield []), (np.uint32, number.shape))
    opened = (number + came).astype(np.int64) - 1
    return np.where(opened < candidates, opened, -1)


def _within(transfers: Transfers, shares: Shares, limits: NDArray[np.int64], bits: int, role: int) -> Steps[Bits]:
    """Return shares of whether numbers (n, candidates) are at least `limits[0]` and below `limits[1]`, (n,) each.

    Whoever is below the first is below the second, too, so that exclusive or serves for the difference.
    """
    apart = shares[None] - limits.astype(np.uint64)[:, :, None]
    found = yield from negatives(transfers, cut(apart.reshape(-1, 1), bits), bits, role)
    return found[: shares.size] ^ found[shares.size :]


def _groups(count: int, group: int) -> tuple[int, int, int]:
    """Return the size and number of groups, and how many go on without playing (one at most)."""
    size = min(count, group)
    groups, rest = divmod(count, size)
    return (size, groups + 1, 0) if rest > 1 else (size, groups, rest)


def _winners(transfers: Transfers, values: Wide, widths: Widths, role: int) -> Steps[Wide]:
    """Return the winner of each group: shares of numerator, denominator and number, (n, 3, words).

    `values` are (n, size, 3, words).
    """
    n, size, _, words = values.shape
    others = np.array([[j for j in range(size) if j != i] for i in range(size)])
    tops = np.ascontiguousarray(values[:, :, 0][:, others]).reshape(n * size, size - 1, words)
    below = np.ascontiguousarray(values[:, :, 1]).reshape(n * size, words)
    cross = yield from products(transfers, below, tops, widths.below, widths.top, widths.difference)
    cross = cross.reshape(n, size, size - 1, words)  # [i, j]: the denominator of i, the numerator of others[i, j]
    pairs = list(combinations(range(size), 2))
    apart = np.concatenate([subtract(cross[:, j, i], cross[:, i, j - 1]) for i, j in pairs])
    later = (yield from negatives(transfers, cut(apart, widths.difference), widths.difference, role)).reshape(-1, n)
    beats = dict(zip(pairs, later, strict=True))  # (i, j): j, the later one, is larger than i
    won = np.stack([
        np.stack([beats[i, j] if i < j else beats[j, i] ^ np.uint8(1 - role) for i in range(size) if i != j])
        for j in range(1, size)
    ], axis=1)  # fmt: skip
    while len(won) > 1:
        half = len(won) // 2
        (found,) = yield from conjunctions(transfers, won[:half].ravel(), won[half : 2 * half].reshape(1, -1), role)
        won = np.concatenate([found.reshape(half, size - 1, n), won[2 * half :]])
    more = subtract(values[:, 1:], values[:, :1]).swapaxes(0, 1).reshape(-1, 3, words)
    chosen = (yield from selected(transfers, won[0].ravel(), more)).reshape(size - 1, n, 3, words)
    out = values[:, 0]
    for part in chosen:
        out = add(out, part)
    out[:, 0], out[:, 1] = cut(out[:, 0], widths.top), cut(out[:, 1], widths.below)
    return out
