"""Eval sets under ``membership="hidden"``: rows' margins stay shared, and the active party opens the loss of all.

After each round the new trees are walked on shared rows (`hidden_forest`). Of classes a row's loss is looked up in a
table of pieces, as derivatives are (`crypto.transfer.shared_pieces`), at its margin, or at minus that where the row is
of the class. Of numbers it is the square of a shared number. The sum over all rows and classes is rounded down on
shares, before it is opened, to 15 bits or so, as a leaf's weight has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.arithmetic import bits_of, both_of, products, selected_with_rows
from treaty.crypto.transfer.comparison import carries
from treaty.crypto.transfer.shared_pieces import NUMBER_BITS, Pieces, values_of
from treaty.crypto.transfer.stock import Steps, Transfers
from treaty.data.table import Table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Floats, Integers, Words, pieces
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.systems.secureboost.hidden_forest import (
    Lines,
    SharedForest,
    decide_rows,
    in_blocks,
    margin_shares,
    with_lines,
)
from treaty.systems.secureboost.hidden_setup import HiddenLoss
from treaty.systems.secureboost.hidden_tree import HiddenLevel
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import RoleInput
from treaty.systems.vertical.hidden_cost import MOST_WEIGHT
from treaty.systems.vertical.sealed import compute
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.logistic_pieces import loss_pieces, loss_shift
from treaty.trees.losses import bound_of_weights
from treaty.trees.number_losses import SquaredErrorSteps, squares_shift

FEWEST_ROWS, MOST_SETS = 100, 2  # the loss of few rows tells their margins, and so do sets that differ by few rows
_ROWS_AT_ONCE = 1 << 17  # whose losses are computed in one step
_WHOLE = np.uint32((1 << NUMBER_BITS) - 1)


@leaks("the loss of each eval set after each round, that of all rows together, as a whole number", "aggregated")
class EvalLoss(Message):
    """A share of an eval set's loss, uint64 (1,), which the active party opens."""

    share: Array


def loss_of_rows(
    transfers: Transfers, margins: NDArray[np.uint32], labels: NDArray[np.bool_] | None, fraction: int, role: int
) -> Steps[Words]:
    """Return a share of the loss of all rows, in units of 2^shift / 2^fraction (`loss_shift`), uint64 (1,).

    `margins`, (n,), are shares modulo 2^20; the active party gives the labels.
    """
    n, (base, slope) = len(margins), loss_pieces(fraction).view(np.uint64)
    # a row's loss is below 8, and the sum is guarded
    bits, total = (n << fraction + 3).bit_length() + 1, np.zeros(1, np.uint64)
    for of in pieces(n, _ROWS_AT_ONCE):
        known = np.zeros(of.stop - of.start, np.uint8) if labels is None else labels[of].astype(np.uint8)
        values = margins[of].astype(np.uint64)[:, None, None]
        chooses = role == 0, role == 1
        positive, _, _ = yield from selected_with_rows(transfers, known, values, [NUMBER_BITS], chooses)
        turned = (margins[of] - (positive[:, 0, 0].astype(np.uint32) << np.uint32(1))) & _WHOLE
        found = yield from values_of(transfers, turned, Pieces(base, slope, bits), role)
        total += found.sum(dtype=np.uint64)
    return (yield from _rounded_down(transfers, total, bits, loss_shift(n, fraction), role))


def squares_of_rows(
    transfers: Transfers, margins: NDArray[np.uint32], labels: Integers | None, role: int
) -> Steps[Words]:
    """Return a share of the squared errors of all rows, in units of 2^`squares_shift`, uint64 (1,).

    `margins`, (n,), are shares modulo 2^20; the active party gives the labels, in the same units. An error is below
    2^17.
    """
    bits, total = max(2 * NUMBER_BITS, 34 + len(margins).bit_length() + 1), np.zeros(1, np.uint64)
    for of in pieces(len(margins), _ROWS_AT_ONCE):
        x = margins[of].astype(np.uint64)
        if labels is not None:
            # an error plus 2^18 is guarded
            x += np.uint64(1 << 18) - labels[of].astype(np.uint64)
        x &= np.uint64(_WHOLE)
        top = (x >> np.uint64(NUMBER_BITS - 1)).astype(np.uint8)
        both = yield from both_of(transfers, top, 1, 64 - NUMBER_BITS, role)
        lifted = x - ((top - both[:, 0]) << np.uint64(NUMBER_BITS))
        y = lifted & np.uint64((1 << bits - NUMBER_BITS) - 1)
        found = yield from products(transfers, x[:, None], y[:, None, None], NUMBER_BITS, bits - NUMBER_BITS, bits)
        # (x - 2^18)^2
        total += (found[:, 0, 0] - (lifted << np.uint64(19)) + np.uint64((1 - role) << 36)).sum(dtype=np.uint64)
    return (yield from _rounded_down(transfers, total, bits, squares_shift(len(margins)), role))


def rounded(
    transfers: Transfers, shares: NDArray[np.unsignedinteger], nbytes: int, dropped: int, role: int
) -> Steps[Words]:
    """Return shares of margins at the middle of steps of 2^dropped units, from shares modulo 2^(8 nbytes).

    Margins are below a quarter of the ring, those of `margin_shares` modulo 2^64.
    """
    bits, out = 8 * nbytes, np.empty(shares.size, np.uint64)
    whole = np.uint64((1 << bits) - 1)
    for of in pieces(len(out), _ROWS_AT_ONCE):
        # guarded numbers are positive
        lifted = shares.reshape(-1)[of].astype(np.uint64) + np.uint64((1 - role) << bits - 2) & whole
        out[of] = (yield from _rounded_down(transfers, lifted, bits, dropped, role)) << np.uint64(dropped)
    back = (1 << dropped - 1) - (1 << bits - 2)
    return out.reshape(shares.shape) + np.uint64((1 - role) * back % (1 << 64))


def _rounded_down(transfers: Transfers, shares: Words, bits: int, dropped: int, role: int) -> Steps[Words]:
    """Return shares modulo 2^64 of guarded numbers without their lowest bits, (n,), from shares modulo 2^bits."""
    shares = shares & np.uint64((1 << bits) - 1)
    top, carry = (shares >> np.uint64(bits - 1)).astype(np.uint8), np.zeros(len(shares), np.uint8)
    carry = yield from carries(transfers, bits_of(shares[:, None], dropped), role)
    both = yield from both_of(transfers, np.concatenate([top, carry]), 1, 64, role)
    of_top, of_carry = np.split(both[:, 0], 2)
    # the shares wrap around if either has its top bit; the carry is shared by xor
    wraps, carried = top - of_top, carry - (of_carry << np.uint64(1))
    out: Words = (shares >> np.uint64(dropped)) + carried - (wraps << np.uint64(bits - dropped))
    return out


GrownTree = tuple[Sequence[HiddenLevel], Sequence[Sequence[int]]]
"""A tree's levels, and the record numbers of own splits of each."""


def forest_of_trees(trees: Sequence[GrownTree], place: int, held: int) -> SharedForest:
    """Return what a party at this place knows of a round's trees, one of each output and all of one depth.

    Records of own splits are below `held`. From there on are splits of further parties, in the order of trees, levels
    and nodes.
    """
    depth, lines = len(trees[0][0]), held
    records = np.full((len(trees), (1 << depth) - 1), -1, np.int32)
    for of_tree, (levels, numbers) in zip(records, trees, strict=True):
        for level, (of, own) in enumerate(zip(levels, numbers, strict=True)):
            at, further = of_tree[(1 << level) - 1 : (2 << level) - 1], np.flatnonzero(of.further)
            at[of.owner == place] = own
            at[further] = np.arange(lines, lines + len(further))
            lines += len(further)
    # the other party decides, or has shares of sides
    others = [any(not np.isin(levels[k].owner, (-1, place)).all() for levels, _ in trees) for k in range(depth)]
    return SharedForest(records, held, others, len(trees))


class EvalRows:
    """An eval set at either party, by its number: own shares of its rows' margins, uint32 (n_outputs, n_rows)."""

    def __init__(
        self, table: Table, transfers: Transfers, splits: SplitTable, threads: int, n_outputs: int, number: int,
        shared: bool = False,
    ) -> None:  # fmt: skip
        self.n_rows, self._transfers, self._splits, self._number = table.n_rows, transfers, splits, number
        self._own = partial(decide_rows, splits, table, threads)
        self._shared = shared  # whether leaf weights are
        self.margins = np.zeros((n_outputs, table.n_rows), np.uint32)

    def add(self, party: Party, forest: SharedForest, weights: Integers | None, lines: Sequence[Lines]) -> None:
        """Add trees, of which the active party gives the weights, or each its shares.

        `lines` make shared sides of the next rows.
        """
        own = with_lines(self._own, forest.held, self.n_rows, lines)
        steps = margin_shares(self._transfers, self.n_rows, own, forest, weights, self._shared)
        self.margins = (self.margins + compute(party, steps).T) & _WHOLE

    def add_round(self, party: Party, trees: Sequence[GrownTree], place: int, weights: Integers | None) -> None:
        """Add the trees of a round."""
        lines = [of.lines[1 + self._number] for levels, _ in trees for of in levels if of.lines]
        self.add(party, forest_of_trees(trees, place, len(self._splits)), weights, in_blocks(lines))

    def loss(self, party: Party, objective: HiddenLoss, y: Floats | None, role: int) -> Words:
        """Return a share of the loss of all rows, of which the active party gives the labels."""
        margins = self.margins.reshape(-1)
        if isinstance(objective, SquaredErrorSteps):
            labels = None if y is None else objective.in_units(y, 0.5)
            return np.asarray(compute(party, squares_of_rows(self._transfers, margins, labels, role)))
        positive = None if y is None else objective.positive(y).T.reshape(-1)
        return np.asarray(
            compute(party, loss_of_rows(self._transfers, margins, positive, objective.fractional_bits, role))
        )


@dataclass(slots=True)
class WatchedShares:
    """An eval set at the active party, whose trees so far are in its rows' margins (`trees.boosting.WatchedRows`).

    `last` are the trees of the latest round, by the end at this `place` that grew them, and their weights.
    """

    name: str
    y: Floats
    rows: EvalRows
    party: Party
    place: int
    last: list[tuple[GrownTree, Integers]]

    def begin(self, forest: Forest, metrics: Sequence[str]) -> Sequence[str]:
        return [forest.objective.metric]

    def measure(self, forest: Forest, new: Sequence[Tree]) -> Mapping[str, float]:
        peer, objective = self.party.peers[0], forest.objective
        assert isinstance(objective, HiddenLoss)
        if self.last:
            trees, weights = zip(*self.last, strict=True)
            self.rows.add_round(self.party, trees, self.place, np.stack(weights))
        share = self.rows.loss(self.party, objective, self.y, 0)
        came = view(self.party.receive(peer, EvalLoss).share, np.uint64, (1,), peer=peer, what="EvalLoss.share")
        if (loss := objective.loss_of(int((share + came)[0]), len(self.y))) >= objective.most_loss:
            raise PeerProtocolError(peer, f"expected a share of a loss below {objective.most_loss:g}", at="EvalLoss")
        return {objective.metric: loss}


def check_rows(inputs: RoleInput[SecureBoost]) -> int:
    """Return a power of two that no row's weight exceeds; ConfigError for weights and eval sets that do not fit."""
    ids = [Counter(() if rows.ids is None else rows.ids()) for rows in inputs.eval_sets]
    for number, (rows, of_set) in enumerate(zip(inputs.eval_sets, ids, strict=True), 1):
        # joined by ids that are there again and again, a set of many rows could be about one person
        most = max(of_set.values(), default=1)
        if rows.weight is not None or rows.table.n_rows < FEWEST_ROWS * most or number > MOST_SETS:
            raise ConfigError(
                f'membership="hidden" takes at most {MOST_SETS} eval sets, without weights, and of at least '
                f"{FEWEST_ROWS} rows for each row of an id, so that their margins stay hidden: leave out the weights, "
                f"repeated ids, or {rows.name}"
            )
    # the difference of two losses is that of the rows that are not in both sets
    apart = (ids[0] - ids[1]) + (ids[1] - ids[0]) if len(ids) == MOST_SETS else Counter[str]()
    if apart.total() < FEWEST_ROWS * max(apart.values(), default=0):
        raise ConfigError(
            f'membership="hidden" takes eval sets that differ by {FEWEST_ROWS} rows at least, so that margins of those '
            "in one of them stay hidden: leave out a set, or more of the rows that are in both"
        )
    if (weight := inputs.rows.weight) is None:
        return 1
    unfit = weight[(weight != np.rint(weight)) | (weight < 1.0) | (weight > MOST_WEIGHT)]
    if len(unfit):
        raise ConfigError(
            f'membership="hidden" takes whole weights from 1 to {MOST_WEIGHT}, got {unfit[0]:g} and '
            f"{len(unfit) - 1} others: multiply all weights, reg_lambda and min_child_weight by one number, and round "
            "the weights"
        )
    return int(bound_of_weights(weight))
