"""All users' rows on their way down the trees: what the server sends, what edge servers compute, what users do.

With ``expose="model"`` users get the splits (`ShownModel`). Otherwise edge servers take the rows down on shares
(`secpred`), or, in the published form, with the columns in the open (`paper`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.data.binning import Bins
from treaty.data.table import Schema
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Flags, Floats, Integers, Words
from treaty.messaging.messages import Array, Message, view
from treaty.models.checkpoints import Checkpoint
from treaty.systems.fedxgb import messages
from treaty.systems.fedxgb.cohorts import DomainFile, drop_earlier_files
from treaty.systems.fedxgb.domain import DomainCohort
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.paper import ComparedRows, HiddenThresholds, PaperModel, SeenRows, ShownSplits, Sides
from treaty.systems.fedxgb.pieces import send_pieces_or_leave_out
from treaty.systems.fedxgb.roles import Committee, committee_of, committees_of
from treaty.systems.fedxgb.secfind import Crowd
from treaty.systems.fedxgb.secpred import HiddenModel, HolderRows, SharedRows, layout_of
from treaty.systems.fedxgb.shares import Dealer, shares_of
from treaty.systems.horizontal.held_out import HeldOutRequest, ScoreCells, SummedMetrics, chosen
from treaty.systems.horizontal.quantiles import CommonBins, FoundBins, agreed_objective, sent_clips, unpack_bins
from treaty.systems.horizontal.rows import own_seed
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Forest, draw
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.objectives import Objective
from treaty.trees.slots import Cells, SlotShard, SlotSplits

logger = logging.getLogger(__name__)

MOST_VALUE = 1e30  # of a leaf: sums of many rounds' values stay finite, and so do gradients


# ---------------------------------------------------------------- server


class ShownModel:
    """The server's part where users learn the model."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd

    def split(self, chosen: Sequence[SlotSplits]) -> None:
        """Take all rows down a level, by the splits of each tree."""
        features = np.stack([splits.features for splits in chosen])
        packed = np.packbits(np.stack([splits.left_bins for splits in chosen]), axis=2)
        self._crowd.broadcast(messages.KnownSplits(Array.of(features), Array.of(packed)))

    def finish(self, values: Floats) -> None:
        self._crowd.broadcast(messages.Values(Array.of(values)))


# What takes all rows down the trees: users learn nothing of them, part of them, or all
Model = HiddenModel | PaperModel | ShownModel


def server_model(inputs: RoleInput[FedXGB], crowd: Crowd, found: FoundBins) -> Model:
    """Return what takes all rows down the trees; `expose` says how much users and edge servers learn of them."""
    options, edges = inputs.options, inputs.roles.having("edge")
    if not options.hides_model:
        return ShownModel(crowd)
    layout = layout_of(found.bins, found.may_miss)
    if options.exposes == "paper":
        return PaperModel(inputs.party, crowd, edges, layout)
    committees = committees_of(options, edges)
    hidden = HiddenModel(inputs.party, [shares_of(options.compares, layout, of.edges) for of in committees])
    users = [[name for name, edge in inputs.roles.edges.items() if edge in of.domains] for of in committees]
    crowd.broadcast(messages.RowOwners(hidden.row_owners(users)))
    return hidden


class CrowdMetrics(SummedMetrics):
    """The held-out rows, as the server watches them; without a cohort the metrics are those of before."""

    def measure(self, forest: Forest, new: Sequence[Tree]) -> dict[str, float]:
        """Have all users count their rows; return the metrics."""
        try:
            return super().measure(forest, new)
        except RoundVoid as void:
            logger.warning("held-out rows are not counted after round %d: %s", forest.rounds, void)
            return self._known


def resend_trees(
    inputs: RoleInput[FedXGB], crowd: Crowd, model: Model, bins: Bins, kept: Checkpoint, rng: np.random.Generator
) -> None:
    """Take all rows down the finished trees of an interrupted training, by the messages of training except sums.

    `rng` continues from the checkpoint's state.
    """
    forest = kept.part.grown
    rng.bit_generator.state = json.loads(kept.random_state or "")
    trees, n_outputs = forest.trees, forest.objective.n_outputs
    # the columns drawn then are not kept; rows go down by the splits alone
    columns = np.arange(len(bins.n_bins), dtype=np.int32)
    ends = len(columns) * np.arange(1, n_outputs + 1, dtype=np.int32)
    for first in range(0, len(trees), n_outputs):
        crowd.broadcast(messages.RoundStart(Array.of(np.tile(columns, n_outputs)), Array.of(ends)))
        of_round = trees[first : first + n_outputs]
        depth = inputs.common.depth if inputs.options.hides_model else max(1, *map(depth_of, of_round))
        take_down(model, of_round, kept.part.splits, bins, depth)


def take_down(model: Model, trees: Sequence[Tree], splits: SplitTable, bins: Bins, depth: int) -> None:
    """Take all rows down some trees, each filled up to a depth; ConfigError if a split is not at a cut of the bins."""
    complete = [complete_tree(tree, splits, bins, depth) for tree in trees]
    for level in range(depth):
        model.split([levels[level] for levels, _ in complete])
    model.finish(np.stack([values for _, values in complete]))


def depth_of(tree: Tree) -> int:
    """Return how many levels of splits a tree has."""
    depth = np.zeros(len(tree.left), np.int64)
    for node in np.flatnonzero(tree.left >= 0).tolist():  # children come after their parents
        depth[tree.left[node] : tree.left[node] + 2] = depth[node] + 1
    return int(depth.max())


def complete_tree(tree: Tree, splits: SplitTable, bins: Bins, depth: int) -> tuple[list[SlotSplits], Floats]:
    """Fill a tree up to a depth with dummy splits, at which rows go right.

    Returns the splits of all slots of each level, and float64 (2^depth,) the values of the slots below the last level.
    Raises ConfigError if a split is not at a cut of the training's bins.
    """
    levels = [SlotSplits(np.full(1 << k, -1, np.int32), np.zeros((1 << k, 256), np.bool_)) for k in range(depth)]
    values = np.zeros(1 << depth)
    # by node of the tree: where it is in the complete tree
    slot, level = np.zeros((2, len(tree.left)), np.int64)
    for node, left in enumerate(tree.left.tolist()):
        at, k = int(slot[node]), int(level[node])
        if left < 0:
            # a row that reaches the leaf goes right at every dummy below: to the last slot of the leaf's subtree
            values[((at + 1) << (depth - k)) - 1] = tree.value[node]
            continue
        record = int(tree.record[node])
        levels[k].features[at], levels[k].left_bins[at] = splits.feature[record], _left_bins(splits, record, bins)
        slot[left : left + 2], level[left : left + 2] = (2 * at, 2 * at + 1), k + 1
    return levels, values


def _left_bins(splits: SplitTable, record: int, bins: Bins) -> Flags:
    """Return which bins go left at a split, bool (256,), as `record_split` was given them."""
    feature, going, threshold = splits.feature[record], splits.category_left[record], splits.threshold[record]
    n_bins, cuts, of_category = int(bins.n_bins[feature]), bins.cuts[feature], bins.category_bins[feature]
    left = np.zeros(256, np.bool_)
    if going is not None and of_category is not None and len(going) == len(of_category):
        left[of_category] = np.frombuffer(going, np.uint8) != 0
    elif going is None and cuts is not None and (threshold == np.inf or threshold in cuts):
        left[: n_bins if threshold == np.inf else int(np.searchsorted(cuts, threshold)) + 1] = True
    else:
        raise ConfigError("expected splits at cuts of the bins of training, got others; the bins are another model's")
    left[n_bins] = splits.missing_left[record]
    return left


# ---------------------------------------------------------------- edge server


class EdgeRows:
    """An edge server's part in taking all rows down trees; none if users know the model."""

    def __init__(self, inputs: RoleInput[FedXGB], domain: DomainCohort, file: DomainFile, patience: float) -> None:
        self._inputs, self._party, self._domain, self._file = inputs, inputs.party, domain, file
        self._patience = patience
        self._seen: SeenRows | None = None
        # of the committees that this edge server is in, in the order of play
        self._parts: list[tuple[Committee, HolderRows | Dealer]] = []

    def receive(
        self, users: Sequence[str], bins: CommonBins, summary: messages.RowSummary, schema: Schema, *, resumed: bool
    ) -> None:
        """Prepare for trees that users do not know; a holder of shares receives those of the `users`' rows.

        If the training is resumed, they must be those of the first run. A user that claims more rows than all have
        together is left out.
        """
        inputs, party, server = self._inputs, self._party, self._inputs.roles.active
        if not inputs.options.hides_model:
            return
        edges, options, homes = inputs.roles.having("edge"), inputs.options, inputs.roles.edges
        found = unpack_bins(bins, schema, inputs.common.bin_limits, server)
        may_miss = view(summary.may_miss, np.bool_, (len(found.n_bins),), peer=server, what="RowSummary.may_miss")
        layout, most = layout_of(found, may_miss), options.most_rows(summary.n_rows)
        if options.exposes == "paper":
            self._seen = SeenRows(inputs, users, layout, most)
            return
        held: dict[str, int] = {}
        for of in [of for of in committees_of(options, edges) if party.name in of.edges]:
            shares = shares_of(options.compares, layout, of.edges)
            if party.name not in shares.holders:
                self._parts.append((of, Dealer(party, of.edges, layout)))
                continue
            hidden = HolderRows(party, server, shares, inputs.threads if inputs.alone else 1)
            own = [name for name in users if homes.get(name) in of.domains]
            came = hidden.receive(own, most, self._patience)
            held |= hidden.take(self._known(came, resumed=resumed))
            self._parts.append((of, hidden))
        self._domain.only(party.peers)
        party.send(server, messages.HeldRows(held))

    def _known(self, came: dict[str, list[Words]], *, resumed: bool) -> dict[str, list[Words]]:
        """Note whose rows came, or, in a training that is `resumed`, return those that came in the first run."""
        # numbers were packed for the first run's rows: new ones would be led down all finished trees
        digests = {}
        for name, pieces in came.items():
            whole = hashlib.sha256()
            for piece in pieces:
                whole.update(np.ascontiguousarray(piece).reshape(-1).data)
            digests[name] = whole.digest()
        if not resumed:
            self._file.shares |= digests
        others = [name for name in came if digests[name] != self._file.shares.get(name)]
        for name in others:
            logger.warning(
                "%s continues without %s: its rows are not those that it shared in the first run",
                self._party.name, name,
            )  # fmt: skip
        return {name: pieces for name, pieces in came.items() if name not in others}

    def keep(self, owners: messages.RowOwners) -> None:
        """Keep the rows of users whose rows all holders have, and continue with these users alone."""
        homes = self._inputs.roles.edges
        for of, part in self._parts:
            if isinstance(part, Dealer):
                part.serve()
            else:
                part.keep([name for name in owners.users if homes.get(name) in of.domains])
        self._domain.only(owners.users)
        self._domain.keep()

    def start(self) -> None:
        """Put all rows at the root again."""
        for part in (self._seen, *(part for _, part in self._parts)):
            if isinstance(part, SeenRows | HolderRows):
                part.start()

    def move(self, message: HiddenThresholds | messages.SplitShares | messages.LeafShares) -> None:
        """Take all rows down a level, or find their leaf values; send each user the results of its rows."""
        party, domain = self._party, self._domain
        if isinstance(message, HiddenThresholds):
            assert self._seen is not None  # by the order of messages
            sides = self._seen.route(message)
            domain.only(self._seen.users)
            send_pieces_or_leave_out(party, {name: sides[name] for name in domain.there}, self._patience)
            domain.only(party.peers)
            return
        # of the committees, the message has the shares of the first in which this edge server has any
        current: messages.SplitShares | messages.LeafShares | None = message
        for _, part in self._parts:
            if isinstance(part, Dealer):
                part.serve()
                continue
            of = current or party.receive(self._inputs.roles.active, type(message))
            results = part.route(of) if isinstance(of, messages.SplitShares) else part.value(of)
            there = {name: pieces for name, pieces in results.items() if name in party.peers}
            send_pieces_or_leave_out(party, there, self._patience)
            current = None
        domain.only(party.peers)


# ---------------------------------------------------------------- user


class UserRows:
    """A user's own rows on their way down the trees.

    `fits` says whether sums may contain them. They may not if the user was away when bounds and missing values were
    counted, and has larger gradients or weights, or missing values in a column where no other user has any. Then its
    rows go down the trees and are part of no sum. Rows kept `back`, bool (n_rows,), are counted alone. `rounds` counts
    rounds that have begun.
    """

    def __init__(
        self,
        inputs: RoleInput[FedXGB],
        rows: LabelledRows,
        back: Flags,
        objective: Objective,
        agreed: CommonBins,
        summary: messages.RowSummary,
        seed: bytes,
    ) -> None:
        self._inputs, self._party, self._common = inputs, inputs.party, inputs.common
        self._edge = edge = inputs.roles.edges[inputs.party.name]
        self._back, self._kept, self._trained = back, chosen(rows, back), np.flatnonzero(~back).astype(np.int32)
        if summary.n_rows < len(self._trained):
            raise self._wrong("the number of all users' rows, not fewer than this user has")
        options, schema = inputs.options, rows.table.schema
        bins = unpack_bins(agreed, schema, self._common.bin_limits, edge)
        theirs = sent_clips(agreed, objective, edge)
        own = objective.agreed(
            [min(mine, of_all) for mine, of_all in zip(objective.clips, theirs, strict=True)],
            min(objective.weight_bound, agreed.weight_bound),
        )
        common = agreed_objective(agreed, own, noise=False, peer=edge)
        common.check_sums(summary.n_rows)
        may_miss = view(summary.may_miss, np.bool_, (len(bins.n_bins),), peer=edge, what="RowSummary.may_miss")
        codes = bins.transform(rows.table)
        # missing values in a column in which no counted user has any: sums have no cell for them
        unknown = (codes == bins.n_bins) & ~may_miss
        # larger gradients than agreed would overflow the sums' cells
        self.fits = own == objective and not unknown[self._trained].any()
        codes = np.where(unknown & options.hides_model, bins.n_bins - 1, codes).astype(np.uint8)
        cells = Cells.of(bins.offsets, may_miss, summary.n_rows, common)
        self.shard, self._objective = SlotShard(codes, rows.y, rows.weight, common, cells), common
        self._counts: Integers | None = None  # of held-out rows, when they are asked for
        self._seed = own_seed(self._common.random_state, self._party.name)
        self._n_features, self.rounds, self._void, self._depth = len(schema.names), 0, 0, 0
        self._path: ComparedRows | SharedRows | None = None  # down trees that users do not know
        layout, edges = layout_of(bins, may_miss), inputs.roles.having("edge")
        if options.exposes == "paper":
            self._path = ComparedRows(self._party, edges, edge, layout, codes)
        elif options.hides_model:
            shares = shares_of(options.compares, layout, committee_of(options, edges, edge).edges)
            self._path = SharedRows(self._party, shares, codes, seed)

    def vector(self) -> Integers:
        """Return this user's part of the next sum, int64 (length,)."""
        if self._counts is not None:
            return self._counts
        if self._depth >= self._common.depth:
            raise self._wrong("sums of no deeper levels than the job's")
        return self.shard.level(self._depth)

    def take(self, message: Message) -> None:
        """Begin a round, go down a level, add leaf values or count held-out rows, as a message says."""
        trees = len(self.shard.margins)
        match message, self._path:
            case messages.RowOwners(), _:
                if self._party.name not in message.users:
                    raise self._wrong(f"{self._party.name} among the users whose rows all holders of shares have")
            case messages.RoundStart(), _:
                self._start(message)
            case messages.KnownSplits(), _:
                self._decide(message)
            case messages.Values(), _:
                self._finish(message)
            case HeldOutRequest(), _:
                if message.rounds != self.rounds:
                    raise self._wrong(f"counts after round {self.rounds}")
                kept, group = self._kept, self._inputs.options.validation_group
                predicted = self._objective.predictions(self.shard.margins[:, self._back].T)
                self._counts = ScoreCells.of(self._objective, kept.table.schema, group).count(kept, predicted)
            case ShownSplits(), ComparedRows() as path:
                path.compare(message, self.shard.slots, 1 << self._depth)
            case Sides(), ComparedRows() as path:
                self._go_down(path.left(message, trees))
            case messages.SideShares(), SharedRows() as path:
                self._go_down(path.left({self._edge: message}, trees))
            case messages.ValueShares(), SharedRows() as path:
                self._add(path.values({self._edge: message}, trees))

    def _start(self, start: messages.RoundStart) -> None:
        shard, common, edge = self.shard, self._common, self._edge
        ends = view(start.last_columns, np.int32, (len(shard.margins),), peer=edge, what="RoundStart.last_columns")
        columns = view(start.columns, np.int32, (int(ends[-1]),), peer=edge, what="RoundStart.columns")
        # no level was done: the round begins again
        again = self.rounds > 0 and self._depth == 0
        self.rounds, self._void = self.rounds + (not again), self._void + again
        if np.any(np.diff(ends, prepend=0) <= 0) or self.rounds > common.most_rounds or self._void > messages.MOST_VOID:
            raise self._wrong("columns of each tree, and no more rounds than the job has")
        of_trees = np.split(columns, ends[:-1])
        if any(np.any(np.diff(c) <= 0) or c[0] < 0 or c[-1] >= self._n_features for c in of_trees):
            raise self._wrong("ascending numbers of existing columns")
        # drawn by each user for itself, the same again if the round is repeated
        rngs = [np.random.default_rng([self._seed, self.rounds - 1, output]) for output in range(len(of_trees))]
        samples = [self._trained[draw(rng, len(self._trained), common.subsample)] for rng in rngs]
        shard.start_round(of_trees, samples)
        self._depth, self._counts = 0, None
        drop_earlier_files(self._inputs.keeper, self._inputs.model_id, self.rounds)

    def _decide(self, splits: messages.KnownSplits) -> None:
        shape = (len(self.shard.margins), 1 << self._depth)
        features = view(splits.features, np.int32, shape, peer=self._edge, what="KnownSplits.features")
        packed = view(splits.left_bins, np.uint8, (*shape, 32), peer=self._edge, what="KnownSplits.left_bins")
        if np.any(features < -1) or np.any(features >= self._n_features) or self._depth >= self._common.depth:
            raise self._wrong("splits on existing columns, no deeper than the job's trees")
        for output, left_bins in enumerate(np.unpackbits(packed, axis=2).view(np.bool_)):
            self.shard.decide(output, features[output], left_bins)
        self._depth += 1

    def _go_down(self, left: NDArray[np.bool_]) -> None:
        if self._depth >= self._common.depth:
            raise self._wrong("no deeper trees than the job's")
        for output, of_tree in enumerate(left):
            self.shard.divide(output, of_tree)
        self._depth += 1

    def _finish(self, leaves: messages.Values) -> None:
        shape = (len(self.shard.margins), 1 << self._depth)
        values = view(leaves.values, np.float64, shape, peer=self._edge, what="Values.values")
        if not np.all(np.abs(values) < MOST_VALUE):
            raise self._wrong("finite leaf values")
        self._add(np.take_along_axis(values, self.shard.slots, axis=1))

    def _add(self, values: Floats) -> None:
        """Add each row's leaf values, float64 (n_outputs, n_rows), which end a round."""
        self.shard.margins += values
        self._inputs.observers.round_finished(self.rounds, None)

    def _wrong(self, expected: str) -> PeerProtocolError:
        return PeerProtocolError(self._edge, f"expected {expected} - from {self._edge}")
