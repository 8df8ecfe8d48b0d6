"""Sets of categories under sealed sums: the two halves of a column, which nobody sees unless one wins.

Of each category k the *knower* (role 0) and the *owner* (role 1) have shares of G_k, H_k and its rows. A half has the
categories of enough rows that are above the node's mean, G_k / H_k > G / (H + 2 ridge), or those that are not:

    v_k = T G_k - G H_k > 0,    T = H + 2 ridge,

a linear function whose factors the knower knows. Of all sets the first half has the largest V (`sealed_sums`), but for
categories of few rows. Two comparisons of each category give shared bits; the bits choose what is added up. The sums
stay shared, and take part in the tournament like those of other candidates.

The owner of a half that has won learns its bits by a transfer of 1 of N: the knower offers its shares of the bits of
all halves of the node, under pads, of which the owner can open those of one half alone. The knower does not learn which
half it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.arithmetic import Wide, cut, from_ints, negative, prefix_sums, resized, selected, subtract
from treaty.crypto.transfer.comparison import conjunctions, negatives
from treaty.crypto.transfer.extension import joined
from treaty.crypto.transfer.sealed_sums import WORDS, Known, Widths, linear
from treaty.crypto.transfer.stock import Bits, Steps, Transfers, take, together
from treaty.machine.arrays import Words


@dataclass(frozen=True, slots=True)
class Halves:
    """Shares of halves of m columns: sums (n, 2 m, 3, 2), and which categories they have, (n, 2, categories)."""

    sums: Wide
    members: Bits


def halves_of(
    transfers: Transfers, slots: Wide, starts: NDArray[np.intp], known: Known, widths: Widths, role: int
) -> Steps[Halves]:
    """Return the halves of columns with sums of categories, (n, categories, 3, 2), the first of each at `starts`."""
    nodes, categories = slots.shape[:2]
    all_of, words = (nodes, categories), -(-widths.grad // 64)
    v = yield from linear(transfers, slots[:, :, 0], slots[:, :, 1], known, widths, role)
    few = subtract(slots[:, :, 2], from_ints([known.fewest_of_category], WORDS))
    # negative: -v of categories above the mean, and rows less the fewest of those with too few
    above, rare = yield from together(
        negatives(transfers, cut(negative(v), widths.grad).reshape(-1, words), widths.grad, role),
        negatives(transfers, cut(few, widths.count).reshape(-1, WORDS), widths.count, role),
    )
    enough = rare ^ np.uint8(1 - role)
    (first,) = yield from conjunctions(transfers, enough, above[None], role)
    # what is below follows from those with enough rows: no other conjunction, and sums are a difference
    values = np.concatenate([resized(slots, words).reshape(-1, 3, words)] * 2)
    of_slot = (widths.grad, widths.grad, widths.count)
    found = yield from selected(transfers, np.concatenate([first, enough]), values, of_slot)
    chosen = found.reshape(2, *all_of, 3, words)
    sums = np.zeros((nodes, 2 * len(starts), 3, WORDS), np.uint64)
    for column, (start, stop) in enumerate(zip(starts, [*starts[1:], categories], strict=True)):
        both = prefix_sums(np.moveaxis(chosen[:, :, start:stop], 2, 3))[..., -1, :]
        sums[:, 2 * column, :, :words] = both[0]
        sums[:, 2 * column + 1, :, :words] = subtract(both[1], both[0])
    return Halves(sums, np.stack([first, first ^ enough]).reshape(2, *all_of).swapaxes(0, 1))


def half_that_won(
    transfers: Transfers, members: Bits, starts: NDArray[np.intp], picks: NDArray[np.int64], role: int
) -> Steps[Bits]:
    """Return the owner's shares of the categories of one half of each node, uint8 (n, most categories).

    `members`, (n, 2, categories), are own shares, `picks` the owner's halves of nodes, (n,), -1 for none; the knower
    gives any, and gets zeros.
    """
    nodes, stops = len(members), [*starts[1:], members.shape[2]]
    widest = max(stop - start for start, stop in zip(starts, stops, strict=True))
    # number 0 is of nodes whose winner is no half; others are halves, column by column
    levels, words = (2 * len(starts)).bit_length(), -(-widest // 64)
    offered = np.zeros((nodes, 1 + 2 * len(starts), 64 * words), np.uint8)
    for column, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        offered[:, 2 * column + 1 : 2 * column + 3, : stop - start] = members[:, :, start:stop]
    own = np.packbits(offered, axis=2, bitorder="little").view("<u8")
    numbers = (picks + 1 if role == 1 else np.zeros(nodes, np.int64))[:, None]
    first, q, t = yield from transfers.choose((numbers >> np.arange(levels) & 1).astype(np.uint8).reshape(-1))
    blocks = -(-words // 2)
    if role == 0:
        q, delta, hidden = joined(q, levels), transfers.sender.delta, np.empty_like(own)
        for number in range(own.shape[1]):
            # the receiver's row is this one where it has chosen the number (`extension.joined`)
            bits = (np.uint64(number) >> np.arange(levels, dtype=np.uint64) & np.uint64(1))[:, None]
            offset = joined(bits * delta, levels)[0]
            hidden[:, number] = own[:, number] ^ transfers.sender.hash.rows(q, first, blocks, offset)[:, :words]
        yield [hidden]
        return np.zeros((nodes, widest), np.uint8)
    (came,) = take((yield []), (np.uint64, own.shape))
    pads: Words = transfers.receiver.hash.rows(joined(t, levels), first, blocks)[:, :words]
    mine = np.take_along_axis(own ^ came, numbers[:, :, None], axis=1)[:, 0] ^ pads
    return np.unpackbits(np.ascontiguousarray(mine).view(np.uint8), axis=1, count=widest, bitorder="little")
