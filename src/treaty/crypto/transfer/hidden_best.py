"""The best split of each node where its totals are shared, too, as all sums of candidates are.

As in `sealed_sums`, whose tournament it is: with a = H_L + ridge, b = H_R + ridge and V = b G_L - a G_R the best split
has the largest V^2 / (a b). V takes two products of shared numbers here. A split has to pass

    (G^2 ridge + (H + 2 ridge) (H + ridge) threshold) / (H + ridge),

which is a gain of the threshold on the same scale (`trees.splits.bound`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer.arithmetic import (
    Wide,
    add,
    as_numbers,
    cut,
    from_ints,
    resized,
    selected,
    shifted,
    subtract,
    times,
)
from treaty.crypto.transfer.comparison import all_of, negatives
from treaty.crypto.transfer.extension import joined
from treaty.crypto.transfer.hidden_rows import bit_patterns
from treaty.crypto.transfer.sealed_sums import BELOW, NUMBER, OWNER, TOP, WORDS, Widths, contest
from treaty.crypto.transfer.shared_products import products, squares
from treaty.crypto.transfer.stock import Bits, OpenedArrays, Steps, Transfers, take, together
from treaty.errors import CryptoError
from treaty.machine.arrays import Words

GRAD, HESS, COUNT = range(3)


@dataclass(frozen=True, slots=True)
class SplitTerms:
    """What a split must have: `ridge` of hess is added to each child, which has at least so much hess and rows.

    Its gain is above `threshold`, in units of squared grad over hess.
    """

    ridge: int
    least_hess: int
    least_rows: int
    threshold: int = 0


def best_of_hidden(
    transfers: Transfers, left: Wide, totals: Wide, owners: Bits, terms: SplitTerms, widths: Widths, role: int,
    step: int,
) -> Steps[Wide]:  # fmt: skip
    """Return shares of each node's best entry, (n, 4, words), from left children's sums, (n, candidates, 3, 2).

    `totals`, (n, 3, 2), are the nodes'. `owners`, (candidates,), are numbers from 1; number and owner of the winner
    are 0 where no split is good enough.
    """
    nodes, candidates = left.shape[:2]
    ridge = from_ints([terms.ridge if role == 0 else 0], WORDS)[0]
    right = subtract(totals[:, None], left)
    a, b = (add(of[:, :, HESS], ridge) for of in (left, right))

    def values() -> Steps[Wide]:
        of_bound, tops, below = yield from together(
            _bound(transfers, totals, terms, widths, role),
            _tops(transfers, left, right, a, b, widths, role),
            _denominators(transfers, a, b, widths),
        )
        of_all = np.zeros((nodes, 1 + candidates, 4, widths.words), np.uint64)
        of_all[:, 0, : BELOW + 1] = of_bound
        of_all[:, 1:, TOP, : tops.shape[-1]] = tops.reshape(nodes, candidates, -1)
        of_all[:, 1:, BELOW, : below.shape[-1]] = below.reshape(nodes, candidates, -1)
        if role == 0:
            of_all[:, 1:, NUMBER, 0], of_all[:, 1:, OWNER, 0] = np.arange(candidates), owners
        return of_all

    fit = _fit(transfers, left, right, terms, widths, role)
    return (yield from contest(transfers, values(), fit, (nodes, 1 + candidates), widths, role, step))


def _tops(transfers: Transfers, left: Wide, right: Wide, a: Wide, b: Wide, widths: Widths, role: int) -> Steps[Wide]:
    """Return shares of V^2, (n * candidates, words): two steps."""
    words, guarded = -(-widths.grad // 64), widths.node_grad + 1
    # products are of numbers that are not negative: G + 2^(bits - 1)
    offset = from_ints([(1 << widths.node_grad - 1) * (1 - role)], WORDS)[0]
    factors = cut(resized(np.stack([b, a]).reshape(-1, WORDS), words), widths.hess)
    grads = np.stack([add(of[:, :, GRAD], offset) for of in (left, right)]).reshape(-1, WORDS)
    grads = cut(resized(grads, words), guarded)
    of_left, of_right = np.split((yield from products(
        transfers, factors, grads[:, None], widths.hess, guarded, widths.grad))[:, 0], 2)  # fmt: skip
    # of whole shares: those of the factors are modulo 2^hess alone
    apart = resized(subtract(b, a).reshape(-1, WORDS), words)
    v = subtract(subtract(of_left, of_right), shifted(apart, widths.node_grad - 1))
    top_words = -(-widths.top // 64)
    return (yield from squares(transfers, resized(cut(v, widths.grad), top_words), widths.grad, widths.top, role))


def _denominators(transfers: Transfers, a: Wide, b: Wide, widths: Widths) -> Steps[Wide]:
    words = -(-widths.below // 64)
    left, right = (cut(resized(of.reshape(-1, WORDS), words), widths.hess) for of in (a, b))
    return (yield from products(transfers, left, right[:, None], widths.hess, widths.hess, widths.below))[:, 0]


def _bound(transfers: Transfers, totals: Wide, terms: SplitTerms, widths: Widths, role: int) -> Steps[Wide]:
    """Return shares of what a split has to pass, (n, 2, words), numerator and denominator: one step."""
    words, top_words = widths.words, -(-widths.top // 64)
    # as wide as V, so that the square is shared modulo as much as V^2
    grad = cut(resized(totals[:, GRAD], top_words), widths.grad)
    ridge = from_ints([terms.ridge if role == 0 else 0], WORDS)[0]
    below = add(totals[:, HESS], ridge)
    found = [squares(transfers, grad, widths.grad, widths.top, role)]
    if terms.threshold:
        x, y = (cut(resized(of, top_words), widths.grad) for of in (below, add(below, ridge)))
        found.append(products(transfers, x, y[:, None], widths.grad, widths.grad, widths.top))
    # no gain reaches this, whose numerators fit
    most = 1 << max(0, 2 * widths.node_grad - 1 - terms.ridge.bit_length())
    top = np.zeros((len(totals), words), np.uint64)
    for of, factor in zip((yield from together(*found)), (terms.ridge, min(terms.threshold, most)), strict=False):
        top = add(top, times(resized(of.reshape(len(totals), -1), words), from_ints([factor], words)))
    out = np.zeros((len(totals), 2, words), np.uint64)
    out[:, TOP], out[:, BELOW] = cut(top, widths.top), cut(resized(below, words), widths.below)
    return out


def _fit(transfers: Transfers, left: Wide, right: Wide, terms: SplitTerms, widths: Widths, role: int) -> Steps[Bits]:
    """Return shares of which entries may win, (n, 1 + candidates): whose children have enough hess and rows."""
    nodes, candidates = left.shape[:2]
    short = yield from together(*(
        _below(transfers, np.stack([left[:, :, part], right[:, :, part]]), least, bits, role)
        for part, least, bits in ((HESS, terms.least_hess, widths.hess), (COUNT, terms.least_rows, widths.count))
    ))  # fmt: skip
    enough = np.concatenate(short).reshape(4, nodes, candidates) ^ np.uint8(1 - role)
    fit = yield from all_of(transfers, enough, role)
    return np.concatenate([np.full((nodes, 1), 1 - role, np.uint8), fit], axis=1)


def _below(transfers: Transfers, shares: Wide, least: int, bits: int, role: int) -> Steps[Bits]:
    """Return shares of whether numbers are below a public one, (n,)."""
    # all numbers are below 2^(bits - 1), and a larger limit would wrap around
    limit = from_ints([min(least, 1 << bits - 1) if role == 0 else 0], WORDS)[0]
    return (yield from negatives(transfers, cut(subtract(shares, limit).reshape(-1, WORDS), bits), bits, role))


def left_sums(
    transfers: Transfers, left: Wide, owners: Bits, numbers: NDArray[np.int64], role: int, blocks: Sequence[slice] = ()
) -> Steps[Words]:
    """Return shares modulo 2^64 of grad and hess of the winners' left children, uint64 (n, 2): two steps.

    `owners`, (n,), are 1 and 2 for role 0 and 1, and 0 where no split is good enough; `numbers`, (n,), are the winners'
    where they are own. The winner's owner takes the other party's share by a transfer of 1 of all candidates.

    From 3 on owners are further parties, whose candidates are in `blocks`. Numbers in these are shared, by xor: each
    party offers its share in the order of its share of the number, and takes the other's at it.
    """
    nodes, candidates = left.shape[:2]
    shares, count = np.ascontiguousarray(left[:, :, (GRAD, HESS), 0]), max(1, (candidates - 1).bit_length())
    own, beyond = owners == role + 1, owners > 2
    size = 1 << count if beyond.any() else candidates
    wanted = np.where(own | beyond, numbers, 0)
    bits = ((wanted[:, None] >> np.arange(count)) & 1).astype(np.uint8)
    _, q, t = yield from transfers.choose(bits.reshape(-1))
    q, t, first = joined(q, count), joined(t, count), transfers.tweaks(nodes * size)
    others, mine = np.flatnonzero((owners > 0) & ~own), np.flatnonzero(own | beyond)
    masks = Keystream().bits(64, 2 * len(others)).reshape(-1, 2)
    table = np.empty((len(others), size, 2), np.uint64)
    patterns = bit_patterns(transfers.sender.delta, count)[:size]
    for place, node in enumerate(others):
        offered = np.zeros((size, 2), np.uint64)
        of = shares[node, blocks[owners[node] - 3]] if beyond[node] else shares[node]
        offered[: len(of)] = of
        if beyond[node]:
            offered = offered[np.arange(size) ^ wanted[node]]
        pads = transfers.sender.hash.rows(q[node] ^ patterns, first + int(node) * size)
        table[place] = (offered - masks[place]) ^ pads
    (came,) = take((yield [table]), (np.uint64, (len(mine), size, 2)))
    out = np.zeros((nodes, 2), np.uint64)
    out[others] = masks
    for place, node in enumerate(mine):
        number = int(wanted[node])
        pad = transfers.receiver.hash.rows(t[node : node + 1], first + int(node) * size + number)[0]
        out[node] += came[place, number] ^ pad
        if own[node]:
            out[node] += shares[node, number]
    return out


_DIGIT_BITS = (3, 4, 4, 4)  # of a weight, the topmost first: each takes as many comparisons as it has other values
WEIGHT_BITS = sum(_DIGIT_BITS)


def quotient_bits(widths: Widths, rate: int) -> int:
    """Return the bits of what `weights_of` divides; CryptoError beyond 64."""
    bits = max(widths.node_grad + rate.bit_length(), widths.hess + WEIGHT_BITS) + 3
    if bits > 64:
        raise CryptoError(
            f"weights of leaves take {bits} bits, expected at most 64 - lower reg_lambda or learning_rate"
        )
    return bits


def weights_of(transfers: Transfers, sums: Words, rate: int, ridge: int, widths: Widths, role: int) -> Steps[Words]:
    """Return shares modulo 2^64 of leaves' weights plus 2^14, uint64 (n,), from those of grad and hess, (n, 2).

    A weight is -grad rate / (hess + ridge), rounded to the nearest whole number, halves up, and brought within -2^14
    and 2^14 - 1 (`trees.splits.whole_weights`). Of the quotient (-2 rate grad + (2^15 + 1) (hess + ridge)) /
    (2 (hess + ridge)) a few bits are found at a time, the topmost first, as on paper: the divisor times each value of
    the digit is compared with what is left, and taken off as often as it fits.
    """
    bits = quotient_bits(widths, rate)
    half = sums[:, 1] + np.uint64(ridge * (1 - role))
    divisor = half << np.uint64(1)
    left = (divisor << np.uint64(WEIGHT_BITS - 1)) + half - sums[:, 0] * np.uint64(2 * rate)
    quotient, above = np.zeros(len(sums), np.uint64), WEIGHT_BITS
    for count in _DIGIT_BITS:
        above -= count
        step, digits = divisor << np.uint64(above), np.arange(1, 1 << count, dtype=np.uint64)[:, None]
        apart = (left - step * digits).reshape(-1, 1)
        fits = (yield from negatives(transfers, cut(apart, bits), bits, role)) ^ np.uint8(1 - role)
        # as many ones and steps as the digit has
        values = np.broadcast_to(np.stack([np.full_like(step, 1 - role), step], axis=1), (len(digits), len(step), 2))
        found = yield from selected(transfers, fits, np.ascontiguousarray(values).reshape(-1, 2, 1), [64, 64])
        digit, taken = found.reshape(len(digits), -1, 2).sum(axis=0).T
        left, quotient = left - taken, quotient + (digit << np.uint64(above))
    return quotient


# A reach of 2^10 is that of the largest weights, and 1 that of the smallest: thousands of such trees are within margins
REACH_BITS = 11
_REACHES = REACH_BITS - 1


def reach_of(transfers: Transfers, weights: Words, role: int) -> Steps[Words]:
    """Return shares modulo 2^32, uint64 (trees,), of how far a tree's largest weight reaches, in units of 2^4.

    `weights`, (trees, leaves), are shares. The least power of two that none of them reaches, from 1 to 2^10, follows
    from comparisons with all but the last of them.
    """
    trees, powers = len(weights), np.arange(WEIGHT_BITS - REACH_BITS, WEIGHT_BITS - 1, dtype=np.uint64)
    limits, none = np.uint64(1 - role) << powers, np.uint64(0)
    apart = np.stack([of - limits[:, None, None] for of in (weights, none - weights)])
    # below the limits, as numbers and as their negatives
    short = yield from negatives(transfers, cut(apart.reshape(-1, 1), WEIGHT_BITS + 2), WEIGHT_BITS + 2, role)
    each = np.moveaxis(short.reshape(2, _REACHES, trees, -1), 3, 1).reshape(-1, _REACHES, trees)
    inside = yield from all_of(transfers, np.ascontiguousarray(each), role)
    outside = (inside ^ np.uint8(1 - role)).reshape(-1)
    bits = (yield from as_numbers(transfers, outside, 32, role)).reshape(_REACHES, trees)
    reach: Words = (bits << np.arange(_REACHES, dtype=np.uint64)[:, None]).sum(axis=0) + np.uint64(1 - role)
    return reach & np.uint64((1 << 32) - 1)


def opened_reach(transfers: Transfers, total: Words, limits: Words, role: int) -> Steps[bool]:
    """Open whether one of some shared numbers, (n,), reaches its limit, which role 0 alone gives."""
    apart = cut((total - limits).reshape(-1, 1), 32)
    below = yield from negatives(transfers, apart, 32, role)
    within = np.ascontiguousarray((yield from all_of(transfers, below[:, None], role)).reshape(-1))
    (came,) = take((yield OpenedArrays([within])), (np.uint8, (1,)))
    return not int(within[0] ^ came[0]) & 1
