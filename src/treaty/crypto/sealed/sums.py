"""Shares of bin sums as integers, from an opening under masks.

The holder of a table adds a uniform mask to each answer of the lattice map, over the whole ring, before the other party
opens it (`crypto.sums.lattice_sums`). With v what was opened and p the mask's negative, v + p has four fields side by
side: the opening's noise, count, hess and grad. But a field's shares lack the carry from the field below, and wrap
around where they have one to give. Each field is guarded: its number is below half of the field, so that the shares
wrap around if either has its top bit set:

    n = v_n + p_n - w_n 2^bits,   c = v_c + p_c + w_n - w_c 2^bits,   w = a + b - a b for the top bits a and b.

Of the noise, only what it carries matters. The other party adds a quarter of its field, which is more than noise falls
below zero. The holder adds 1 to its shares of count and hess, so that c - w_n and h - w_c are not negative, and a
quarter of the field to that of grad, which has a sign; these come off here. Nothing is opened, and nothing fails by
chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import SumsBounds
from treaty.crypto.sealed.arithmetic import both_of
from treaty.crypto.sealed.steps import Steps
from treaty.crypto.sealed.transfers import Transfers
from treaty.crypto.wide import Wide, add, from_ints, only, shifted, subtract, wide

WORDS = 2
"""Of a share of a sum: shares are modulo 2^128, which no product with a node's own sums passes."""


@dataclass(frozen=True, slots=True)
class Places:
    """Bits of the fields of sealed sums, the lowest first."""

    noise: int
    count: int
    hess: int
    grad: int


@dataclass(frozen=True, slots=True)
class Widths:
    """Bits of shares of n rows' sums, T = H + 2 ridge and V = T G_L - G a, all of them public.

    |G| < 2^(node_grad - 1), 0 < a <= T < 2^(hess - 1), rows below 2^(count - 1), |V| < 2^(grad - 2). `hess` and `grad`
    are at least 3, so that products are no narrower than their factors.
    """

    count: int
    hess: int
    node_grad: int

    @classmethod
    def of(cls, bounds: SumsBounds, ridge: int) -> Widths:
        """Return the widths of a job's sums."""
        n = bounds.n_rows
        whole = n * bounds.hess_bound + 2 * ridge
        return cls(n.bit_length() + 1, whole.bit_length() + 1, (n * bounds.grad_bound).bit_length() + 1)

    @property
    def grad(self) -> int:
        """Bits of V, which is the difference of a node's b G_L and a G_R, with a + b = T."""
        return self.hess + self.node_grad

    @property
    def top(self) -> int:
        """Bits of a guarded numerator, V^2."""
        return 2 * self.grad - 3

    @property
    def below(self) -> int:
        """Bits of a guarded denominator, a b."""
        return 2 * self.hess - 3

    @property
    def difference(self) -> int:
        """Bits of the difference of two cross products."""
        return self.top + self.below - 1

    @property
    def words(self) -> int:
        """Words that hold it."""
        return -(-self.difference // 64)


def integer_shares(transfers: Transfers, parts: NDArray[np.uint64], places: Places, role: int) -> Steps[Wide]:
    """Return shares modulo 2^128 of grad, hess and count, (..., 3, 2), from fields' shares, (..., 4): two steps.

    Role 0 has opened the answers, role 1 has the masks.
    """
    bits = np.array([places.grad, places.hess, places.count, places.noise], np.uint64)
    tops = (parts >> (bits - np.uint64(1))).astype(np.uint8)
    both = yield from both_of(transfers, tops.reshape(-1), WORDS, role)
    one = from_ints([1], WORDS)
    wraps = subtract(only(tops, np.broadcast_to(one, (*tops.shape, WORDS))), both.reshape(*tops.shape, WORDS))
    out = wide(parts[..., :3], WORDS)
    for place, width in enumerate((places.grad, places.hess, places.count)):
        out[..., place, :] = subtract(out[..., place, :], shifted(wraps[..., place, :], width))
    out = add(out, wraps[..., 1:, :])
    return subtract(out, from_ints([1 << places.grad - 2, 1, 1], WORDS)) if role == 0 else out
