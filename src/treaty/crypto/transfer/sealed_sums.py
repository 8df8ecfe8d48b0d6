"""Sealed sums: shares of bin sums as integers, and the best split of each node among candidates whose sums are shared.

*Integers.* The holder of a table adds a uniform mask to each answer of the lattice map, over the whole ring, before the
other party opens it (`sums.lattice_sums`). With the opened v and the mask's negative p, v + p has four fields side by
side: the opening's noise, count, hess and grad. But a field's shares lack the carry from the field below, and wrap
around if they carry into the next. Each field is guarded (`arithmetic`). Of the noise only the carry matters: the other
party adds a quarter of its field, which is more than noise falls below zero. The holder adds 1 to its shares of count
and hess, and a quarter of the field to that of grad, which has a sign; these are subtracted here.

*The best split.* The *knower* (role 0, the active party) knows G, H and what a candidate must pass; the *owner* (role
1) has the columns. With a = H_L + ridge, T = H + 2 ridge and V = T G_L - G a, the gain of a candidate is, except for
factors and terms that all candidates of the node have in common, V^2 / (a (T - a)) (`trees.scanning`): the largest such
fraction is the best split, exactly. A tournament finds it: in each group, all pairs are compared by their cross
products, exactly, and the winner is selected; the first of equal fractions wins. The result stays shared.

Honest but curious parties; no sum, gain or loser is opened, and nothing fails by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import SumsBounds
from treaty.crypto.transfer.arithmetic import (
    Wide,
    add,
    both_of,
    cut,
    from_ints,
    negative,
    only,
    resized,
    selected,
    shifted,
    subtract,
    times_known,
    wide,
)
from treaty.crypto.transfer.comparison import all_of, comparison_steps, conjunctions, negatives, steps_of_all
from treaty.crypto.transfer.shared_products import products, squares
from treaty.crypto.transfer.stock import Bits, Steps, Transfers, together
from treaty.machine.arrays import Integers, Words

# what an entry of a tournament has: numerator, denominator, number of the candidate, number of its owner
TOP, BELOW, NUMBER, OWNER = range(4)
_ENTRY_BITS = {NUMBER: 32, OWNER: 16}

WORDS = 2  # of a share of a sum: shares are modulo 2^128, which no product with a node's own sums passes


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
    grad: int = field(init=False)  # of V, the difference of a node's b G_L and a G_R, with a + b = T
    top: int = field(init=False)  # of a guarded numerator, V^2
    below: int = field(init=False)  # of a guarded denominator, a b
    difference: int = field(init=False)  # of the difference of two cross products
    words: int = field(init=False)  # that hold such a difference

    def __post_init__(self) -> None:
        grad = self.hess + self.node_grad
        top, below = 2 * grad - 3, 2 * self.hess - 3
        derived = {"grad": grad, "top": top, "below": below, "difference": top + below - 1}
        for name, bits in (derived | {"words": -(-(top + below - 1) // 64)}).items():
            object.__setattr__(self, name, bits)

    @property
    def of_entry(self) -> tuple[int, int, int, int]:
        """Bits of each part of an entry in a tournament."""
        return self.top, self.below, _ENTRY_BITS[NUMBER], _ENTRY_BITS[OWNER]

    @classmethod
    def of(cls, bounds: SumsBounds, ridge: int) -> Widths:
        n = bounds.n_rows
        whole = n * bounds.hess_bound + 2 * ridge
        return cls(n.bit_length() + 1, whole.bit_length() + 1, (n * bounds.grad_bound).bit_length() + 1)


def integer_shares(transfers: Transfers, parts: NDArray[np.uint64], places: Places, role: int) -> Steps[Wide]:
    """Return shares modulo 2^128 of grad, hess and count, (..., 3, 2), from fields' shares, (..., 4): two steps.

    Role 0 has opened the answers, role 1 has the masks.
    """
    bits = np.array([places.grad, places.hess, places.count, places.noise], np.uint64)
    # whether a field's shares wrap around is the disjunction of their top bits, as fields are guarded
    tops = (parts >> (bits - np.uint64(1))).astype(np.uint8)
    # n = v_n + p_n - w_n 2^bits, c = v_c + p_c + w_n - w_c 2^bits, w = a + b - a b for the top bits a and b
    both = yield from both_of(transfers, tops.reshape(-1), WORDS, 64 * WORDS, role)
    one = from_ints([1], WORDS)
    wraps = subtract(only(tops, np.broadcast_to(one, (*tops.shape, WORDS))), both.reshape(*tops.shape, WORDS))
    out = wide(parts[..., :3], WORDS)
    for place, width in enumerate((places.grad, places.hess, places.count)):
        out[..., place, :] = subtract(out[..., place, :], shifted(wraps[..., place, :], width))
    # the carry from the field below
    out = add(out, wraps[..., 1:, :])
    return subtract(out, from_ints([1 << places.grad - 2, 1, 1], WORDS)) if role == 0 else out


# -------------------------------------------------- the best split

_LARGEST = 24  # a group: the work grows with its square


@dataclass(frozen=True, slots=True)
class KnownEntry:
    """An entry of every node that the knower knows: fractions, and the number of each one's owner."""

    fractions: Sequence[tuple[int, int]]
    owners: Sequence[int]


@dataclass(frozen=True, slots=True)
class Known:
    """The knower's input for n nodes.

    `totals`, int64 (n, 3), are sums of grad, hess and rows. `hess` and `count`, int64 (2, n), are the least that a left
    child may have and one more than the most, which is not below the least. `owner` is the number of the candidates'
    owner. `before` and `after` are entries before and after the candidates, of n fractions each; the owner has as many,
    of zeros. A category needs `fewest_of_category` rows to be in a set.
    """

    totals: Integers
    ridge: int
    hess: Integers
    count: Integers
    owner: int
    before: list[KnownEntry] = field(default_factory=list)
    after: list[KnownEntry] = field(default_factory=list)
    fewest_of_category: int = 0

    def only(self, part: slice) -> Known:
        """Return the input for some of the nodes."""
        before, after = (
            [KnownEntry(e.fractions[part], e.owners[part]) for e in entries] for entries in (self.before, self.after)
        )
        limits = self.hess[:, part], self.count[:, part]
        return Known(self.totals[part], self.ridge, *limits, self.owner, before, after, self.fewest_of_category)

    @classmethod
    def nothing(cls, nodes: int, before: int, after: int) -> Known:
        """Return the owner's input, zeros."""
        none = KnownEntry([(0, 0)] * nodes, [0] * nodes)
        zeros = np.zeros((2, nodes), np.int64)
        return cls(np.zeros((nodes, 3), np.int64), 0, zeros, zeros, 0, [none] * before, [none] * after)


def best_of_shared(
    transfers: Transfers, sums: Wide, known: Known, widths: Widths, role: int, step: int,
    allowed: Bits | None = None, directions: Bits | None = None,
) -> Steps[Wide]:  # fmt: skip
    """Return shares of each node's best entry, (n, 4, words), from sums of candidates, (n, candidates, 3, 2).

    An entry `before` that loses to no candidate wins, and so does one of equal fractions that comes first. `allowed`,
    (n, entries + candidates), are shares of which may win, first the known entries; None for all. `directions`, (2,
    candidates), are the owner's, and zeros the knower's: which candidates have one, and which of these are falling.
    """
    entries = [entry_of(entry, widths) for entry in (*known.before, *known.after)]
    before, after = entries[: len(known.before)], entries[len(known.before) :]
    left_hess = add(sums[:, :, 1], from_ints([known.ridge], WORDS))
    v = yield from linear(transfers, sums[:, :, 0], left_hess, known, widths, role)

    def values() -> Steps[Wide]:
        of_candidates = yield from _fractions(transfers, v, left_hess, known, widths, role)
        return np.concatenate([*before, of_candidates, *after], axis=1)

    fit, count = _fit(transfers, sums, v, known, widths, role, directions, allowed), len(entries) + sums.shape[1]
    return (yield from contest(transfers, values(), fit, (len(sums), count), widths, role, step))


def contest(
    transfers: Transfers, values: Steps[Wide], fit: Steps[Bits], shape: tuple[int, int], widths: Widths, role: int,
    step: int,
) -> Steps[Wide]:  # fmt: skip
    """Return shares of the largest entry that fits, (n, 4, words), of `shape` (nodes, entries).

    The protocols give the entries, (n, entries, 4, words), and shares of which may win, (n, entries).
    """
    nodes, entries = shape
    rounds = rounds_of(entries, nodes, widths.difference, step)
    size, groups = rounds[0] if rounds else (1, 1)

    def first_round() -> Steps[tuple[Wide, Bits]]:
        padded = _padded((yield from values), size * groups, role)
        return padded, (yield from _later(transfers, _grouped(padded, size, groups), widths, role))

    # which entries may win at all is not needed before the first pairs are compared
    (playing, later), fits = yield from together(first_round(), fit)
    may = np.pad(fits, ((0, 0), (0, playing.shape[1] - fits.shape[1])))
    playing = yield from _picked(transfers, playing, size, groups, later, widths, role, may)
    return (yield from _played(transfers, playing, rounds[1:], widths, role))


def _fractions(transfers: Transfers, v: Wide, a: Wide, known: Known, widths: Widths, role: int) -> Steps[Wide]:
    """Return the candidates' entries, (n, candidates, 4, words): one step."""
    nodes, candidates = v.shape[:2]
    # no more words than numbers need: messages grow with them
    of_top, of_below = (-(-bits // 64) for bits in (widths.top, widths.below))
    whole = np.broadcast_to((known.totals[:, 1] + 2 * known.ridge)[:, None], v.shape[:2]).reshape(-1)
    left = cut(resized(a.reshape(-1, WORDS), of_below), widths.hess)
    right = cut(subtract(wide(whole, of_below), left), widths.hess)
    top, below = yield from together(
        squares(transfers, resized(v.reshape(-1, v.shape[-1]), of_top), widths.grad, widths.top, role),
        products(transfers, left, right[:, None], widths.hess, widths.hess, widths.below),
    )
    values = np.zeros((nodes, candidates, 4, widths.words), np.uint64)
    values[:, :, TOP, :of_top] = top.reshape(nodes, candidates, of_top)
    values[:, :, BELOW, :of_below] = below.reshape(nodes, candidates, of_below)
    if role == 0:
        values[:, :, NUMBER, 0], values[:, :, OWNER, 0] = np.arange(candidates), known.owner
    return values


def _fit(
    transfers: Transfers, sums: Wide, v: Wide, known: Known, widths: Widths, role: int, directions: Bits | None,
    allowed: Bits | None,
) -> Steps[Bits]:  # fmt: skip
    """Return shares of which entries may win, (n, entries): whose children are large enough, and other conditions."""
    nodes, candidates = sums.shape[:2]
    conditions = [
        _within(transfers, sums[:, :, 1], known.hess, widths.hess, role),
        _within(transfers, sums[:, :, 2], known.count, widths.count, role),
    ]
    if directions is not None:
        conditions.append(_in_direction(transfers, v, widths, role, directions))
    hold = np.stack((yield from together(*conditions)))
    first, entries = len(known.before), len(known.before) + len(known.after)
    of_entries = np.full((nodes, entries), 1 - role, np.uint8)  # may always win
    if allowed is not None:
        of_entries = allowed[:, :entries]
        hold = np.concatenate([hold, allowed[:, entries:].reshape(1, -1)])
    of_candidates = (yield from all_of(transfers, hold, role)).reshape(nodes, candidates)
    return np.concatenate([of_entries[:, :first], of_candidates, of_entries[:, first:]], axis=1)


def entry_of(entry: KnownEntry, widths: Widths) -> Wide:
    """Return the knower's shares of an entry that it knows, (n, 1, 4, words); the owner's are zeros.

    A numerator beyond all candidates' is cut to the largest that fits: with a denominator of H + ridge, at most any
    a (T - a), no candidate is larger.
    """
    values, most = np.zeros((len(entry.owners), 1, 4, widths.words), np.uint64), (1 << widths.top - 1) - 1
    for part in (TOP, BELOW):
        values[:, 0, part] = from_ints([min(fraction[part], most) for fraction in entry.fractions], widths.words)
    values[:, 0, OWNER, 0] = np.array(entry.owners, np.uint64)
    return values


def winner_of(transfers: Transfers, values: Wide, widths: Widths, role: int, step: int) -> Steps[Wide]:
    """Return shares of each node's largest entry, (n, 4, words), from entries (n, entries, 4, words).

    `step` says how many comparisons take as long as a step does, see `rounds_of`.
    """
    # the same rounds at both parties, from public numbers alone
    rounds = rounds_of(values.shape[1], len(values), widths.difference, step)
    return (yield from _played(transfers, values, rounds, widths, role))


def _played(
    transfers: Transfers, values: Wide, rounds: Sequence[tuple[int, int]], widths: Widths, role: int
) -> Steps[Wide]:
    for size, groups in rounds:
        values = _padded(values, size * groups, role)
        later = yield from _later(transfers, _grouped(values, size, groups), widths, role)
        values = yield from _picked(transfers, values, size, groups, later, widths, role)
    return values[:, 0]


def _padded(values: Wide, entries: int, role: int) -> Wide:
    """Return values with so many entries at least: 0 / 1 beats no entry before it."""
    padding = _nothing(values, len(values), max(0, entries - values.shape[1]), role)
    return np.concatenate([values, padding], axis=1)


def _nothing(values: Wide, n: int, entries: int, role: int) -> Wide:
    """Return entries 0 / 1 of nobody, (n, entries, 4, words), of as many words as `values` have."""
    out = np.zeros((n, entries, *values.shape[2:]), np.uint64)
    out[:, :, BELOW, 0] = 1 - role
    return out


def _grouped(values: Wide, size: int, groups: int) -> Wide:
    """Return the entries that play a round, (nodes * groups, size, 4, words)."""
    return np.ascontiguousarray(values[:, : size * groups]).reshape(len(values) * groups, size, *values.shape[2:])


@cache
def rounds_of(entries: int, nodes: int, bits: int, step: int) -> tuple[tuple[int, int], ...]:
    """Return the rounds of a tournament that take the least time: sizes of groups, and how many of them play.

    An entry in no group stays for the next round. A round takes the comparisons of all pairs in its groups, and steps,
    each of which takes as long as `step` comparisons of `bits` bits.
    """
    # by entries left: time, and the first round
    best: dict[int, tuple[int, int, int]] = {1: (0, 0, 0)}

    def time_for(left: int) -> int:
        if left not in best:
            options = []
            for size in range(2, min(left, _LARGEST) + 1):
                groups, rest = divmod(left, size)
                groups, rest = (groups + 1, 0) if rest > 1 else (groups, rest)
                took = step * steps_of(size, bits) + nodes * groups * size * (size - 1) // 2
                options.append((took + time_for(groups + rest), size, groups))
            best[left] = min(options)
        return best[left][0]

    # large groups take fewer steps, and work that grows with the square of their size
    time_for(entries)
    rounds: list[tuple[int, int]] = []
    while entries > 1:
        _, size, groups = best[entries]
        rounds.append((size, groups))
        entries = max(entries - size * groups, 0) + groups
    return tuple(rounds)


def steps_of(size: int, bits: int) -> int:
    """Return the steps of a round whose groups have this size: products, a comparison, conjunctions, a selection."""
    return 2 + comparison_steps(bits) + steps_of_all(size - 1)


def _in_direction(transfers: Transfers, v: Wide, widths: Widths, role: int, directions: Bits) -> Steps[Bits]:
    """Return shares of whether candidates keep to their directions, (n * candidates,)."""
    # weights are -G_L / a and -(G - G_L) / (T - a): they fall from left to right where V is negative
    falls = yield from negatives(transfers, v.reshape(-1, v.shape[-1]), widths.grad, role)
    has, falling = np.tile(directions, len(v))
    against: Bits
    (against,) = yield from conjunctions(transfers, falls ^ falling, has[None], role)
    return against ^ np.uint8(1 - role)


def linear(transfers: Transfers, grad: Wide, hess: Wide, known: Known, widths: Widths, role: int) -> Steps[Wide]:
    """Return shares modulo 2^grad of T x - G y, (n, k, words), from shares of x and y, (n, k, 2): one step."""
    nodes, words = len(grad), -(-widths.grad // 64)
    # the factors are the knower's alone
    factors = [*(known.totals[:, 1] + 2 * known.ridge).tolist(), *known.totals[:, 0].tolist()]
    numbers = resized(np.concatenate([grad, negative(hess)]), words)
    bits = max(widths.hess, widths.node_grad)
    parts = yield from times_known(transfers, factors, bits, numbers, widths.grad, role)
    return cut(add(parts[:nodes], parts[nodes:]), widths.grad)


def _within(transfers: Transfers, shares: Wide, limits: Integers, bits: int, role: int) -> Steps[Bits]:
    """Return shares of whether numbers (n, candidates) are at least `limits[0]` and below `limits[1]`, (n,) each."""
    # a number below the first limit is below the second, too, so exclusive or says whether it is between
    apart = subtract(shares[None], wide(limits, WORDS)[:, :, None])
    found = yield from negatives(transfers, cut(apart.reshape(-1, WORDS), bits), bits, role)
    half = len(found) // 2
    return found[:half] ^ found[half:]


def _later(transfers: Transfers, playing: Wide, widths: Widths, role: int) -> Steps[Bits]:
    """Return shares of whether the later of two entries is larger, for all pairs of each group, (pairs, groups)."""
    n, size, _, words = playing.shape
    if size == 1:
        return np.zeros((0, n), np.uint8)
    others = np.array([[j for j in range(size) if j != i] for i in range(size)])
    tops = np.ascontiguousarray(playing[:, :, TOP][:, others]).reshape(n * size, size - 1, words)
    below = np.ascontiguousarray(playing[:, :, BELOW]).reshape(n * size, words)
    # x / y > z / w iff x w > z y, as denominators are positive
    cross = yield from products(transfers, below, tops, widths.below, widths.top, widths.difference)
    # [i, j]: the denominator of i times the numerator of others[i, j]
    cross = cross.reshape(n, size, size - 1, words)
    apart = np.concatenate([subtract(cross[:, j, i], cross[:, i, j - 1]) for i, j in combinations(range(size), 2)])
    found = yield from negatives(transfers, cut(apart, widths.difference), widths.difference, role)
    return found.reshape(-1, n)


def _picked(
    transfers: Transfers, values: Wide, size: int, groups: int, later: Bits, widths: Widths, role: int,
    may: Bits | None = None,
) -> Steps[Wide]:  # fmt: skip
    """Return shares of the winner of each group, and of the entries in no group, (nodes, left, 4, words).

    Where shares are given of which entries may win, (nodes, entries), others lose, and 0 / 1 is there where none may.
    """
    nodes, playing, rest = len(values), _grouped(values, size, groups), values[:, size * groups :]
    n, others = len(playing), [[i for i in range(size) if i != j] for j in range(size)]
    beaten = _beaten(later, others, n, role)
    if may is None:
        # the first entry plus the winner's difference from it, which is zero if the first wins
        wins, start, choices = (yield from all_of(transfers, beaten[:, 1:], role)), playing[:, :1], playing[:, 1:]
    else:
        fit = np.moveaxis(may[:, : size * groups].reshape(n, size), 0, 1)
        # an entry beats all that may not win
        if size > 1:
            one, of_others = np.uint8(1 - role), np.stack([fit[of] for of in others], axis=1)
            (lost,) = yield from conjunctions(transfers, of_others.ravel(), (beaten ^ one).reshape(1, -1), role)
            beaten = lost.reshape(beaten.shape) ^ one
        wins = yield from all_of(transfers, np.concatenate([fit[None], beaten]), role)
        start, choices = _nothing(values, n, 1, role), playing
    bits, more, kept = wins.ravel(), subtract(choices, start).swapaxes(0, 1).reshape(-1, *values.shape[2:]), rest
    if may is not None:
        kept = _nothing(values, nodes, rest.shape[1], role)
        more = np.concatenate([more, subtract(rest, kept).reshape(-1, *values.shape[2:])])
        bits = np.concatenate([bits, may[:, size * groups :].ravel()])
    chosen = yield from selected(transfers, bits, more, widths.of_entry)
    out = start[:, 0]
    for part in chosen[: wins.size].reshape(len(wins), n, *values.shape[2:]):
        out = add(out, part)
    if may is not None:
        kept = add(kept, chosen[wins.size :].reshape(rest.shape))
    return fitted(np.concatenate([out.reshape(nodes, groups, *values.shape[2:]), kept], axis=1), widths)


def _beaten(later: Bits, others: list[list[int]], n: int, role: int) -> Bits:
    """Return shares of which of the `others` each entry of a group beats, (size - 1, size, n)."""
    size, one = len(others), np.uint8(1 - role)
    not_smaller = np.zeros((size, size, n), np.uint8)  # [i, j]: j beats i, as it is larger, or equal and earlier
    for (i, j), larger in zip(combinations(range(size), 2), later, strict=True):
        not_smaller[i, j], not_smaller[j, i] = larger, larger ^ one
    return np.stack([not_smaller[of, j] for j, of in enumerate(others)], axis=1)


def fitted(entries: Wide, widths: Widths) -> Wide:
    """Return entries, (..., 4, words), whose shares are cut to their widths."""
    return np.stack([cut(entries[..., part, :], width) for part, width in enumerate(widths.of_entry)], axis=-2)


def opened(own: Words, others: Words, part: int) -> Words:
    """Return the numbers of candidates or owners, uint64 (n,), whose shares, `part` of an entry, were opened."""
    return (own + others) & np.uint64((1 << _ENTRY_BITS[part]) - 1)
