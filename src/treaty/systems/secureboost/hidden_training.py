"""Training in which neither party learns which rows are in a node (``membership="hidden"``), at the active party.

Two parties compute: the active one has the labels, and perhaps columns; its partner, the first passive party, columns
(`hidden_partner`). Margins, gradients, sums and the nodes of rows are shared; `hidden_tree` grows a tree step by step
at both ends alike. What further passive parties do is in `hidden_further`. Trees are, bit for bit, those of the plain
grower on the joined table with the same objective (but for the rows of nodes, which nobody counts).

====  =============  =============================================================================================
step  message        what
====  =============  =============================================================================================
1     HiddenColumns  each party's numbers of bins, to those who compute
2     HiddenStart    the model's number, from the active party
3     SealedStep     a public seed that both draw, hints of both parties' columns, base transfers
4     HiddenTree     a tree begins
5     SealedStep     the tree's steps; `OpenedStep` where splits are opened: each node's owner to both, a candidate's
                     number to its owner
6     WeightShares     the passive party's shares of the leaves' weights, which the active party opens, unless they
                     stay shared; then it is opened whether margins may become too large (`opened_reach`)
7     SealedStep     weights are added to the shared margins
====  =============  =============================================================================================

Adversary: honest but curious. What each learns is in docs/hidden.md.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.ahead import Ahead
from treaty.crypto.transfer.hidden_best import REACH_BITS, WEIGHT_BITS
from treaty.crypto.transfer.sealed_sums import Widths
from treaty.crypto.transfer.shared_pieces import NUMBER_BITS
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Integers, Words, pieces
from treaty.messaging.messages import Array, Arrays, Message, leaks, view
from treaty.models.trees import ModelPart, used_records
from treaty.systems.pooled.continuing import CheckpointReceipt, CheckpointRequest
from treaty.systems.pooled.system import Training
from treaty.systems.secureboost import hidden_tree
from treaty.systems.secureboost.hidden_evaluation import (
    EvalRows,
    GrownTree,
    WatchedShares,
    check_rows,
)
from treaty.systems.secureboost.hidden_forest import (
    SharedLeaves,
    decide_rows,
    depth_of,
    leaf_weights,
    margin_shares,
    show_forest,
    with_lines,
)
from treaty.systems.secureboost.hidden_further import (
    Answers,
    FurtherTree,
    Relaying,
    hints_of,
)
from treaty.systems.secureboost.hidden_setup import (
    Columns,
    HiddenLoss,
    HiddenStart,
    TreeSamples,
    losses_of,
    make_ends,
    note_rows,
)
from treaty.systems.secureboost.hidden_tree import (
    HiddenLevel,
    build_tree,
    numbers_of,
    record,
)
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.shared_prediction import MaskedSides
from treaty.systems.system import RoleInput
from treaty.systems.vertical.cipher_choice import FAR, JobSize, comparisons_of_a_step, measure, sends_little
from treaty.systems.vertical.encrypted_columns import sums_bounds
from treaty.systems.vertical.hidden_cost import HiddenRows, tell_cost
from treaty.systems.vertical.messages import MOST_AHEAD, SignedKey
from treaty.systems.vertical.prediction import take_decisions
from treaty.systems.vertical.sealed import compute
from treaty.systems.vertical.training import finish, open_training, start_of
from treaty.trees.boosting import Rounds, RoundState
from treaty.trees.ensemble import Tree
from treaty.trees.number_losses import STEPS_REACH

CLASSES_AT_ONCE = 8  # whose trees grow together: messages and memory grow with them


@leaks("the tree's sample of rows and of columns", "control")
class HiddenTree(Message):
    """A tree begins: columns of the sender and of the receiver, int32, and packed bits of its rows (None: all).

    At each of its steps about `ahead` bytes are sent either way for later ones. `further` are columns of further
    parties.
    """

    active: Array
    passive: Array
    rows: Array | None
    ahead: Annotated[int, msgspec.Meta(ge=0, le=MOST_AHEAD)]
    further: Arrays = msgspec.field(default_factory=list)


@leaks("the weight of each leaf", "exact", guard="min_child_samples")
class WeightShares(Message):
    """Shares of the leaves' weights, uint64 (leaves,), which the active party opens."""

    shares: Array


def train_active(inputs: RoleInput[SecureBoost]) -> ModelPart:
    """Train as the active party."""
    heaviest = check_rows(inputs)
    training = open_training(inputs)
    grower, common = _Grower(inputs, training, heaviest), inputs.common
    inputs.observers.round_finished(training.forest.rounds, training.part)
    rounds = Rounds(
        training.forest, common.most_rounds, eval_sets=grower.eval_sets,
        early_stopping_rounds=common.early_stopping_rounds, early_stopping_min_delta=common.early_stopping_min_delta,
        metrics=common.metrics, after_round=partial(_after_round, inputs, training, grower.samples),
    )  # fmt: skip
    for trees in rounds:
        trees += grower.grow()
    finish(inputs.party)
    return training.part


class _Grower:
    """The active party's part of all rounds: an end for each class, shares of margins, and what it counts.

    `heaviest` is a bound of rows' weights. `samples` are those of trees.
    """

    def __init__(self, inputs: RoleInput[SecureBoost], training: Training, heaviest: int) -> None:
        party, (peer, *further), owners, common = inputs.party, inputs.others, inputs.roles.owners, inputs.common
        forest, self._training = training.forest, training
        objective, n_rows = _check(forest.objective), inputs.rows.table.n_rows
        self._party, self._peer, self._rules = party, peer, common.rules(objective)
        self._shared = inputs.options.shares_leaves
        self._columns = Columns(inputs)
        keys = self._columns.exchange(inputs, None)
        bounds = sums_bounds(n_rows, objective, common)
        link = measure(party, peer)[0]
        step = comparisons_of_a_step(link, Widths.of(bounds, self._rules.ridge))
        for name in inputs.others:
            key = keys[peer] if name != peer else None
            party.send(name, HiddenStart(*start_of(training, name), step, heaviest, objective.grad_clip, key))
        note_rows(inputs, training.part)
        losses = losses_of(objective, inputs.rows.y, inputs.rows.weight if heaviest > 1 else None)
        layouts = dict(zip(owners, self._columns.layouts, strict=True))
        slots = {name: int(of.offsets[-1]) for name, of in layouts.items()}
        hints = hints_of(party, {name: slots[name] for name in further}, bounds) if further else None
        self._ends = make_ends(
            inputs, self._columns, bounds, self._rules, step, losses, short=sends_little(link), hints=hints
        )
        end, outputs = self._ends[0], len(self._ends)
        if left := common.most_rounds - forest.rounds:
            job = JobSize(bounds, self._rules, left * outputs, inputs.threads)
            order = party.name, peer, *further
            sizes = [len(layouts[name].categorical) for name in order], [slots[name] for name in order]
            candidates = common.colsample_bytree * sum(map(len, end.candidates))
            watched = sum(of.table.n_rows for of in inputs.eval_sets)
            also = HiddenRows(watched, heaviest.bit_length() if heaviest > 1 else 0)
            training.part.choice = tell_cost(party.name, job, *sizes, candidates, link, step, outputs, also)
        # gradients of numbers count from the start
        start = np.zeros(1) if inputs.classes is None else objective.base_margins
        unit = self._rules.leaf_unit
        units = np.rint(start / unit).astype(np.int64) % (1 << NUMBER_BITS)
        self._margins = np.repeat(units.astype(np.uint32)[:, None], n_rows, axis=1)
        self.last: list[tuple[GrownTree, Integers]] = []
        splits = training.part.splits
        self.eval_sets = [
            WatchedShares(
                of.name, of.y,
                EvalRows(of.table, end.transfers, splits, inputs.threads, outputs, number, self._shared), party,
                end.place, self.last,
            )
            for number, of in enumerate(inputs.eval_sets)
        ]  # fmt: skip
        for of_set in self.eval_sets:
            of_set.rows.margins += self._margins[:, :1]
        self._further, self._grown = further, 0
        self._sets = [n_rows, *(of.table.n_rows for of in inputs.eval_sets)]
        # shared margins are from -128 to below 120 (`crypto.transfer.shared_pieces`), or gradients have a bound
        self._most = 120.0 if inputs.classes is not None else (STEPS_REACH - 1) * objective.grad_clip
        limits = ((self._most - np.abs(start)) / unit).astype(np.int64) >> WEIGHT_BITS - REACH_BITS
        self._leaves = SharedLeaves(party, training.part, len(self._ends), len(forest.trees), 0, limits)
        if forest.trees:
            self._add_earlier(inputs, keys, unit)
        self._records = {owners.index(name): training.records[name] for name in inputs.others}
        largest = np.array([np.abs(tree.value).max() for tree in forest.trees]).reshape(-1, outputs)
        self._reach = np.abs(start) + largest.sum(axis=0)
        self._last = common.most_rounds if link.step > FAR else 0  # a round without others after it
        self._ahead, self.samples = Ahead(end.transfers), TreeSamples(inputs, training, self._columns)

    def _add_earlier(self, inputs: RoleInput[SecureBoost], keys: Mapping[str, SignedKey], unit: float) -> None:
        """Add the trees of a checkpoint or of an earlier model to the margins, which nobody has kept."""
        party, training, table, outputs = self._party, self._training, inputs.rows.table, len(self._ends)
        trees, splits, sources = training.forest.trees, training.part.splits, inputs.roles.owners
        if self._shared:
            # these weights cannot be looked at, nor be put into other steps
            earlier = training.forest if inputs.part is None else inputs.part.grown
            fit = earlier.objective.grad_clip == training.forest.objective.grad_clip
        else:
            fit = not any(np.any(np.remainder(tree.value, unit)) for tree in trees)
        if not fit:
            raise ConfigError("expected labels as far from the start as the earlier model's: its steps are others")
        used = used_records(trees, len(sources))
        further = {name: used[sources.index(name)] for name in self._further}
        held = {party.name: len(splits), self._peer: training.records[self._peer]}
        shared = show_forest(party, trees, sources, held, further, keys if further else {}, outputs)
        transfers, depth = self._ends[0].transfers, depth_of(trees)
        if self._shared:
            weights = self._leaves.of_earlier(transfers, len(trees), depth)
        else:
            weights = leaf_weights(trees, depth, unit)
        lines = [
            (len(of), partial(take_decisions, party, name, MaskedSides, len(of)))
            for name, of in further.items()
            if len(of)
        ]
        own = with_lines(partial(decide_rows, splits, table, inputs.threads), shared.held, table.n_rows, lines)
        steps = margin_shares(transfers, table.n_rows, own, shared, weights, self._shared)
        self._margins += compute(party, steps).T
        for of_set in self.eval_sets:
            of_set.rows.add(party, shared, weights, lines)

    def grow(self) -> list[Tree]:
        """Grow the trees of the next round, one of each class, and add their weights to the margins."""
        party, ahead, samples = self._party, self._ahead, [self.samples.draw() for _ in self._ends]
        # a far link is to be busy while steps wait, but for the first tree, of which nobody knows what it takes
        ahead.nbytes = int(self._training.forest.rounds + 1 < self._last)
        ahead.begin_tree()
        ahead.nbytes *= min(MOST_AHEAD, max(1, ahead.evenly))
        first, places = self._grown + 1, self._ends[0].places
        for sampled, columns in samples:
            packed = None if sampled is None else Array.of(np.packbits(sampled))
            own, others, *further = (Array.of(columns[place]) for place in places)
            party.send(self._peer, HiddenTree(own, others, packed, ahead.nbytes, further))
            for name, on in zip(self._further, further, strict=True):
                party.send(name, FurtherTree(on))
            party.round += 1
            self._grown += 1
        trees: list[Tree] = []
        self.last.clear()
        for of in pieces(len(samples), CLASSES_AT_ONCE):
            ends = [self._columns.of_tree(end, on) for end, (_, on) in zip(self._ends[of], samples[of], strict=True)]
            if self._further:
                numbers = range(first + of.start, first + of.stop)
                answers = Answers(party, numbers)
                ends = [
                    replace(end, further=Relaying(answers, self._further, number, self._sets, end.of_further))
                    for end, number in zip(ends, numbers, strict=True)
                ]
            steps = hidden_tree.grow_together(ends, self._margins[of], [sampled for sampled, _ in samples[of]])
            grown = compute(party, steps, ahead)
            if self._shared:
                weights = self._leaves.of_trees([shares for *_, shares in grown])
            else:
                weights = [self._opened(shares) for *_, shares in grown]
            trees += [self._recorded(levels, own) for (levels, *_), own in zip(grown, weights, strict=True)]
            if self._shared:
                too_far = self._leaves.reach_too_far(ends[0].transfers, of)
            else:
                self._reach[of] += [np.abs(tree.value).max() for tree in trees[of]]
                too_far = self._reach.max() >= self._most
            if too_far:
                # margins of these classes may be larger than those that are shared
                raise ConfigError(
                    f'margins may pass {self._most:g}, the largest that membership="hidden" can share: lower '
                    f"learning_rate or n_estimators, or raise reg_lambda (after {self._training.forest.rounds} rounds)"
                )
            add = hidden_tree.add_weights(grown, self._margins[of], weights, shared=self._shared)
            self._margins[of] = compute(party, add)
        return trees

    def _opened(self, shares: Words) -> NDArray[np.int64]:
        """Return leaf weights in whole units, by the other party's shares of them."""
        sent, peer = self._party.receive(self._peer, WeightShares).shares, self._peer
        came = view(sent, np.uint64, shares.shape, peer=peer, what="WeightShares.shares")
        weights = (shares + came).view(np.int64) - (1 << WEIGHT_BITS - 1)
        if np.any(weights >> WEIGHT_BITS - 1 != weights >> 63):
            raise PeerProtocolError(peer, f"expected shares of weights of {WEIGHT_BITS} bits", at="WeightShares")
        return weights

    def _recorded(self, levels: list[HiddenLevel], weights: NDArray[np.int64]) -> Tree:
        """Record a tree's own splits, and count other parties'; return the tree."""
        place = self._ends[0].place
        numbers = {place: record(self._training.part.splits, self._columns.bins, levels)}
        self.last.append(((levels, numbers[place]), weights))
        for other, before in self._records.items():
            numbers[other], self._records[other] = numbers_of(levels, other, before)
        # a share is no weight, and nothing is to take another number for one
        return build_tree(levels, weights * np.nan if self._shared else weights, numbers, self._rules)


def _after_round(inputs: RoleInput[SecureBoost], training: Training, samples: TreeSamples, done: int) -> None:
    """Have both parties keep a checkpoint, if one is due: trees and splits alone, margins are made again of these."""
    keeper, party = inputs.keeper, inputs.party
    if keeper is not None and keeper.due:
        began = time.perf_counter()
        for peer in party.peers:
            party.send(peer, CheckpointRequest(done))
            party.receive(peer, CheckpointReceipt)
        training.keep(inputs, RoundState(done, np.zeros((1, 0)), samples.state), began)
    inputs.observers.round_finished(done, training.part)


def _check(objective: object) -> HiddenLoss:
    assert isinstance(objective, HiddenLoss), "the options' check has refused others"
    return objective
