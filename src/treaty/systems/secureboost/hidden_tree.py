"""Trees of which neither party learns which rows are in a node: both ends run this, step by step alike.

Margins, gradients, sums and the rows' nodes are shared. What is opened: whose split each node has, to both; its column
and cut, to their owner; and, after the tree, the leaves' weights to the active party. Further parties have columns and
hold no shares: what the ends do with them is in `hidden_further`.

Node u of a level has the children 2 u (left) and 2 u + 1 (right) in the next. A node without a split sends all its rows
left, so that every level has all its nodes, and the messages of a tree depend on public numbers and owners alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.lattice_sums import lattice_fields
from treaty.crypto.sums.shared_sums import Further, SharedSums
from treaty.crypto.transfer.arithmetic import Wide, add, both_of, cut, from_ints, shifted, subtract, times_wide, wide
from treaty.crypto.transfer.hidden_best import SplitTerms, best_of_hidden, left_sums, weights_of
from treaty.crypto.transfer.hidden_rows import SharedNodes
from treaty.crypto.transfer.sealed_sums import NUMBER, OWNER, WORDS, Places, Widths, integer_shares, opened
from treaty.crypto.transfer.shared_pieces import FRACTION, NUMBER_BITS, Pieces, values_of
from treaty.crypto.transfer.stock import Bits, Correlation, OpenedArrays, Steps, Transfers, take, together
from treaty.data.binning import Bins
from treaty.errors import CryptoError
from treaty.machine.arrays import Bytes, Codes, Flags, Int32s, Integers, Words, pieces
from treaty.models.trees import record_split
from treaty.systems.vertical.sealed_candidates import Candidates
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.splits import SplitRules

_ROWS_AT_ONCE = 1 << 17  # whose gradients are computed in one step
_CANDIDATES_AT_ONCE = 1 << 12  # some 26 kB each are in memory


@dataclass(frozen=True, slots=True)
class LossShares:
    """A loss on shares, in units of 2^-`fraction`: the logistic one in `pieces`, or without them half a squared error.

    Values of pieces are p 2^f + h in one number, f bits for h and f + 2 for p + 1. `labels`, int64 (n_rows,), are in
    the same units, None at the passive party. So are the rows' `weights`, from 1 to `heaviest`; if that is 1, there
    are none.
    """

    pieces: Pieces | None
    fraction: int
    heaviest: int = 1
    labels: NDArray[np.int64] | None = None
    weights: NDArray[np.int64] | None = None

    @classmethod
    def logistic(cls, pieces: NDArray[np.int64], fraction: int, *known: Any) -> LossShares:
        """Take base and slope of each piece for p, then for h, (2, 2, 16), as `logistic_pieces.pieces_of` has them."""
        # p plus 1, so that a carry from h never borrows from it
        base, slope = ((pieces[0] << fraction) + pieces[1]).view(np.uint64)
        return cls(Pieces(base + np.uint64(1 << fraction), slope, 2 * fraction + 2), fraction, *known)


class FurtherParties(Further, Protocol):
    """What an end does with further parties in a tree."""

    def win(self, numbers: Sequence[Words]) -> Steps[tuple[Sequence[Integers], Sequence[Sequence[Bytes]]]]:
        """Open to each the numbers of its candidates that won, by own shares, if it has any.

        Return of each own shares, by xor: of these numbers, and of which rows of each set go right at its splits,
        packed bits (splits, bytes).
        """


@dataclass(frozen=True, slots=True)
class HiddenEnd:
    """One end of a training, `role` 0 at the active party.

    `candidates` are those of all owners in the job's order. In it are, at `places`, the active party, the other end,
    and `further` parties. `codes`, (n_rows, features), are own columns; `rate` is the learning rate in units of leaf
    weights.
    """

    role: int
    transfers: Transfers
    sums: SharedSums
    bounds: SumsBounds
    loss: LossShares
    codes: Codes
    candidates: Sequence[Candidates]
    places: Sequence[int]
    terms: SplitTerms
    rate: int
    depth: int
    step: int
    further: FurtherParties | None = None

    @property
    def place(self) -> int:
        return self.places[self.role]

    @property
    def others(self) -> list[int]:
        """The other end's place, then those of further parties."""
        return [self.places[1 - self.role], *self.places[2:]]

    @property
    def of_further(self) -> list[int]:
        """The numbers of further parties' candidates."""
        return [len(self.candidates[place]) for place in self.places[2:]]

    @property
    def blocks(self) -> list[slice]:
        """Each owner's candidates among all."""
        first = [0, *accumulate(map(len, self.candidates))]
        return [slice(*of) for of in pairwise(first)]

    @property
    def widths(self) -> Widths:
        return Widths.of(self.bounds, self.terms.ridge)


@dataclass(frozen=True, slots=True)
class HiddenLevel:
    """What an end learns of a level: the `owner` of each node's split, by place in the job's order, -1 for none.

    `columns` int32 (n,) and `left_bins` bool (n, width) are those of own splits, in the order of their nodes. At the
    nodes that are `further` parties', sides of rows are shared: `lines` are own shares, of each set of rows, packed
    bits (n, bytes), 1 for right.
    """

    owner: NDArray[np.int64]
    columns: Int32s
    left_bins: Flags
    further: Flags
    lines: Sequence[Bytes]


def gradients(end: HiddenEnd, margins: NDArray[np.uint32]) -> Steps[Wide]:
    """Return shares of each row's count, hess and grad, packed as sums are, (n_rows, 1, 2), from shares of margins."""
    parts, derive = [], _of_number if end.loss.pieces is None else _of_class
    for of in pieces(len(margins), _ROWS_AT_ONCE):
        hess, grad = yield from derive(end, margins[of])
        if end.loss.labels is not None:
            grad = subtract(grad, wide(end.loss.labels[of], WORDS))
        weights = None if end.loss.weights is None else end.loss.weights[of]
        parts.append((yield from _packed(end, hess, grad, weights)))
    return np.concatenate(parts)[:, None]


def _of_class(end: HiddenEnd, margins: NDArray[np.uint32]) -> Steps[tuple[Wide, Wide]]:
    """Return shares of h and p, (n, 2)."""
    f = end.loss.fraction
    assert end.loss.pieces is not None
    values = yield from values_of(end.transfers, margins, end.loss.pieces, end.role)
    h, p = values & np.uint64((1 << f) - 1), values >> np.uint64(f)
    # whether shares of h and of p wrap around: both are guarded
    of_h, of_p = yield from together(
        _wraps(end, h >> np.uint64(f - 1), 1, f), _wraps(end, p >> np.uint64(f + 1), 2, f + 2)
    )
    # values have p plus 1
    whole = subtract(add(wide(p, WORDS), of_h), from_ints([1 - end.role], WORDS))
    return subtract(wide(h, WORDS), shifted(of_h, f)), subtract(whole, shifted(of_p, f + 2))


def _of_number(end: HiddenEnd, margins: NDArray[np.uint32]) -> Steps[tuple[Wide, Wide]]:
    """Return shares of h = 1 and of margins in units of gradients, (n, 2): one step."""
    one, offset = ((1 << bits) * (1 - end.role) for bits in (end.loss.fraction, NUMBER_BITS - 2))
    # far from the ends of the ring, so that the number plus the offset is guarded
    x = (margins + np.uint32(offset)) & np.uint32((1 << NUMBER_BITS) - 1)
    scale = end.loss.fraction - FRACTION
    wraps = yield from _wraps(end, x >> np.uint32(NUMBER_BITS - 1), 2, NUMBER_BITS + scale)
    whole = subtract(wide(x, WORDS), add(shifted(wraps, NUMBER_BITS), from_ints([offset], WORDS)))
    hess = np.broadcast_to(from_ints([one], WORDS), whole.shape)
    return hess, shifted(whole, scale)


def _wraps(end: HiddenEnd, tops: NDArray[np.unsignedinteger], field: int, shift: int) -> Steps[Wide]:
    """Return shares of whether guarded shares wrap around, (n, 2), by their top bits: as `field` / 2^`shift` counts."""
    fields, bits = lattice_fields(end.bounds, sealed=True)
    both = yield from both_of(end.transfers, tops.astype(np.uint8), WORDS, bits - fields[field].shift - shift, end.role)
    return subtract(wide(tops.astype(np.int64), WORDS), both)


def _packed(end: HiddenEnd, hess: Wide, grad: Wide, weights: NDArray[np.int64] | None) -> Steps[Wide]:
    """Return shares modulo 2^bits of 1 + 2^x hess w + 2^y grad w, (n, 2)."""
    fields, bits = lattice_fields(end.bounds, sealed=True)
    packed = add(shifted(hess, fields[1].shift), shifted(grad, fields[2].shift))
    if end.loss.heaviest > 1:
        kind = Correlation(end.loss.heaviest.bit_length(), 1, WORDS, bits, one_way=True)
        factors = np.zeros_like(packed) if weights is None else wide(weights, WORDS)
        packed = (yield from times_wide(end.transfers, kind, factors, packed[:, None], end.role))[:, 0]
    return cut(add(packed, from_ints([1 - end.role], WORDS)), bits)


Grown = tuple[list[HiddenLevel], SharedNodes, Words]
"""A tree's levels, the rows' nodes, and own shares of the leaves' weights (`weights_of`), uint64 (2^depth,)."""


def grow_together(
    ends: Sequence[HiddenEnd], margins: NDArray[np.uint32], sampled: Sequence[Flags | None]
) -> Steps[list[Grown]]:
    """Grow a tree of each class, step by step at once, on shared margins of the classes, uint32 (classes, n_rows).

    Of a class, rows that are not `sampled`, (n_rows,), count in no sum.
    """
    ends[0].transfers.rekey()
    return (yield from together(*(_grow(*of_class) for of_class in zip(ends, margins, sampled, strict=True))))


def _grow(end: HiddenEnd, margins: NDArray[np.uint32], sampled: Flags | None) -> Steps[Grown]:
    values = yield from gradients(end, margins)
    if sampled is not None:
        values[~sampled] = 0
    rows, levels = SharedNodes(end.transfers, len(margins)), []
    slots = yield from _slots(end, values)
    while True:
        left, totals = _candidates_of(end, slots)
        owners, numbers, lines = yield from _opened(end, (yield from _best(end, left, totals)))
        level, goes_right = _sides(end, owners, numbers, lines)
        levels.append(level)
        # whether this end, and the other, know sides or shares of them; of the root's the other may know none
        beyond = bool(level.further.any())
        owns = beyond or bool((owners == end.role + 1).any()), beyond or bool((owners == 2 - end.role).any())
        chooses = owns if len(levels) == 1 else (True, True)
        bits = yield from rows.side_of_rows(goes_right, owns)
        if len(levels) == end.depth:
            yield from rows.multiplied(bits, None, end.sums.bits, chooses)
            return levels, rows, (yield from _weights(end, left, totals, owners, numbers))
        right = yield from rows.multiplied(bits, values, end.sums.bits, chooses)
        # sums of right children; left ones are the parents' less these
        asked = yield from _slots(end, cut(right, end.sums.bits))
        slots = _in_turn(subtract(slots, asked), asked)
        if len(levels) + 1 < end.depth:
            # the last level has more of them than all others, and needs sums alone
            both = np.stack([subtract(values, right), right], axis=2)
            values = cut(both, end.sums.bits).reshape(len(values), -1, WORDS)


def _weights(end: HiddenEnd, left: Wide, totals: Wide, owners: Bits, numbers: NDArray[np.int64]) -> Steps[Words]:
    blocks = [end.blocks[place] for place in end.places[2:]]
    of_left = yield from left_sums(end.transfers, left, owners, numbers, end.role, blocks)
    # sums of grad and hess; without a split all rows went left
    whole, none = totals[:, :2, 0], owners == 0
    of_left[none] = whole[none]
    leaves = _in_turn(of_left, whole - of_left)
    return (yield from weights_of(end.transfers, leaves, end.rate, end.terms.ridge, end.widths, end.role))


def _in_turn(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.stack([left, right], axis=1).reshape(-1, *left.shape[1:])


def _slots(end: HiddenEnd, values: Wide) -> Steps[Wide]:
    """Return shares of sums of all columns' slots, (n, slots, 3, 2), in the job's order."""
    others = [end.candidates[place].slot_numbers for place in end.others]
    own, opened = yield from end.sums.sums(values, end.candidates[end.place].features, others, end.further)
    found = {end.place: own}
    found |= dict(zip(end.others, np.split(opened, np.cumsum([len(of) for of in others[:-1]]), axis=1), strict=True))
    parts = np.concatenate([found[place] for place in range(len(found))], axis=1)
    places = Places(*(last - first for first, last in pairwise(end.sums.places)))
    return (yield from integer_shares(end.transfers, parts, places, end.role))


def _candidates_of(end: HiddenEnd, slots: Wide) -> tuple[Wide, Wide]:
    """Return shares of the candidates' left sums, (n, candidates, 3, 2), and of the nodes' totals, (n, 3, 2)."""
    found, first = [], 0
    no_halves = np.zeros((len(slots), 0, 3, WORDS), np.uint64)
    for of_party in end.candidates:
        found.append(of_party.sums(slots[:, first : first + of_party.slots], no_halves))
        first += of_party.slots
    # every sampled row is in one slot of the first column
    width = next(of_party.first_width for of_party in end.candidates if of_party.slots)
    totals = slots[:, 0]
    for slot in range(1, width):
        totals = add(totals, slots[:, slot])
    return np.concatenate(found, axis=1), totals


def _best(end: HiddenEnd, left: Wide, totals: Wide) -> Steps[Wide]:
    # numbers are of all owners' candidates together
    owners = np.repeat(np.argsort(end.places) + 1, [len(of) for of in end.candidates]).astype(np.uint8)
    found = []
    if not left.shape[1]:
        # nobody's
        return np.zeros((len(left), 4, end.widths.words), np.uint64)
    for part in pieces(len(left), max(1, _CANDIDATES_AT_ONCE // left.shape[1])):
        best = best_of_hidden(
            end.transfers, left[part], totals[part], owners, end.terms, end.widths, end.role, end.step
        )
        found.append((yield from best))
    return np.concatenate(found)


def _opened(end: HiddenEnd, best: Wide) -> Steps[tuple[Bits, NDArray[np.int64], list[Bytes]]]:
    """Open the owner of each node's best split, 1 and 2 for role 0 and 1, 0 for none, and own splits' numbers.

    From 3 on owners are further parties, of whose numbers shares by xor are returned, and of each set of rows own
    shares of their sides.
    """
    own = np.ascontiguousarray(best[:, OWNER, 0])
    (came,) = take((yield OpenedArrays([own])), (np.uint64, own.shape))
    owners = opened(own, came, OWNER)
    if np.any(owners > len(end.places)):
        raise CryptoError("expected shares of whose splits are best")
    theirs, mine = owners == 2 - end.role, owners == 1 + end.role
    numbers = np.ascontiguousarray(best[theirs, NUMBER, 0])
    (came,) = take((yield OpenedArrays([numbers])), (np.uint64, (int(mine.sum()),)))
    found, block = np.full(len(best), -1, np.int64), end.blocks[end.place]
    found[mine] = opened(best[mine, NUMBER, 0], came, NUMBER).astype(np.int64)
    if np.any(found[mine] < block.start) or np.any(found[mine] >= block.stop):
        raise CryptoError("expected shares of numbers of own candidates")
    lines = list[Bytes]()
    if end.further is not None and np.any(owners > 2):
        # numbers among its own candidates, from 0
        starts = [end.blocks[place].start if end.role == 0 else 0 for place in end.places[2:]]
        nodes = [np.flatnonzero(owners == 3 + k) for k in range(len(starts))]
        shares = [best[of, NUMBER, 0] - np.uint64(start) for of, start in zip(nodes, starts, strict=True)]
        of_numbers, sides = yield from end.further.win(shares)
        order, all_nodes = np.argsort(np.concatenate(nodes)), np.concatenate(nodes)
        found[all_nodes] = np.concatenate(of_numbers)
        lines = [np.concatenate(of_set)[order] for of_set in zip(*sides, strict=True)]
    return owners.astype(np.uint8), found, lines


def _sides(
    end: HiddenEnd, owners: Bits, numbers: NDArray[np.int64], lines: list[Bytes]
) -> tuple[HiddenLevel, NDArray[np.uint32]]:
    """Return the level, and which rows go right at own splits, bit u at node u; of further parties' own shares."""
    mine, further = np.flatnonzero(owners == end.role + 1), owners > 2
    own = (numbers[mine] - end.blocks[end.place].start).astype(np.int32)
    columns, left_bins = end.candidates[end.place].splits(own, np.zeros((len(own), 0), np.bool_))
    goes_right = np.zeros(len(end.codes), np.uint32)
    for node, column, left in zip(mine.tolist(), columns, left_bins, strict=True):
        goes_right |= (~left[end.codes[:, column]]).astype(np.uint32) << np.uint32(node)
    for node, line in zip(np.flatnonzero(further).tolist(), lines[0] if lines else (), strict=True):
        goes_right |= np.unpackbits(line, count=len(goes_right)).astype(np.uint32) << np.uint32(node)
    place = np.append(end.places, -1)[owners.astype(np.int64) - 1]
    return HiddenLevel(place, columns, left_bins, further, lines), goes_right


def add_weights(
    grown: Sequence[Grown],
    margins: NDArray[np.uint32],
    weights: Sequence[NDArray[np.int64]] | None,
    *,
    shared: bool = False,
) -> Steps[NDArray[np.uint32]]:
    """Return shares of the classes' margins plus the weights of the rows' leaves.

    The active party gives the weights; if they are `shared`, each gives its shares.
    """
    given = [None] * len(grown) if weights is None else [of_tree[None] for of_tree in weights]
    found = yield from together(*(
        rows.weight_of_rows(of, shared=shared)
        for (_, rows, _), of in zip(grown, given, strict=True)
    ))  # fmt: skip
    return np.asarray((margins + np.stack(found)) & np.uint32((1 << NUMBER_BITS) - 1))


# ---------------------------------------------------------------- the tree of a model


def record(splits: SplitTable, bins: Bins, levels: list[HiddenLevel]) -> list[list[int]]:
    """Record own splits, level by level; return their record numbers."""
    return [
        [record_split(splits, bins, int(column), left) for column, left in zip(of.columns, of.left_bins, strict=True)]
        for of in levels
    ]


def numbers_of(levels: list[HiddenLevel], place: int, first: int) -> tuple[list[list[int]], int]:
    """Return the record numbers of another party's splits, which it counts in the same order, and the next one."""
    numbers = []
    for level in levels:
        count = int(np.count_nonzero(level.owner == place))
        numbers.append(list(range(first, first + count)))
        first += count
    return numbers, first


def build_tree(
    levels: list[HiddenLevel], weights: NDArray[Any], records: Mapping[int, list[list[int]]], rules: SplitRules
) -> Tree:
    """Return the tree, by the weights of the nodes below the last level, (2^depth,), in units of `leaf_unit`.

    `records` are the splits' numbers by owner and level. Gains, and hess and rows of nodes, are not known: they are 0.
    """
    depth, nodes = len(levels), [(0, 0)]
    source, record, left, value = [], [], [], []
    waiting = {owner: [iter(of_level) for of_level in numbers] for owner, numbers in records.items()}
    for level, node in nodes:
        owner = int(levels[level].owner[node]) if level < depth else -1
        source.append(owner)
        record.append(next(waiting[owner][level]) if owner >= 0 else -1)
        left.append(len(nodes) if owner >= 0 else -1)
        # without a split all rows went left
        value.append(0.0 if owner >= 0 else weights[node << depth - level] * rules.leaf_unit)
        if owner >= 0:
            nodes += [(level + 1, 2 * node), (level + 1, 2 * node + 1)]
    unknown = np.zeros(len(nodes))
    return Tree(
        source=np.array(source, np.int16), record=np.array(record, np.int32), left=np.array(left, np.int32),
        value=np.array(value), gain=unknown, cover=unknown.copy(), count=np.zeros(len(nodes), np.int64),
    )  # fmt: skip
