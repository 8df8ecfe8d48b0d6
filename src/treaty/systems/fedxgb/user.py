"""A user of FedXGB; see `server` for the messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from treaty.data.quantile_search import sorted_keys
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.process import stay_on_one_core
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import Message, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.authority import Credentials, authority_of
from treaty.systems.fedxgb.kept import ROUNDS, seed_of_rows
from treaty.systems.fedxgb.messages import (
    MOST_VOID,
    Attendance,
    RoundStart,
    RowSummary,
    Splits,
    SumLimit,
    TrainingEnd,
    UserOffer,
    Values,
    receive_task,
    user_order,
)
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.paper import ComparedRows, PaperUserSums, ShownSplits, Sides, paper_mode
from treaty.systems.fedxgb.secfind import Call, Cohort, Domain, UserSums
from treaty.systems.fedxgb.secpred import RowOwners, SharedRows, SideShares, Turn, ValueShares, layout_of
from treaty.systems.horizontal.members import ToldDigest
from treaty.systems.horizontal.quantiles import (
    CommonBins,
    LabelUnits,
    Opening,
    OwnLabels,
    ProbeRequest,
    TrainingStart,
    agreed_objective,
    answer_probes,
    most_rounds,
    note_search,
    told_clips,
    unpack_bins,
)
from treaty.systems.horizontal.rows import common_rows, own_seed, printed_rows, schema_of
from treaty.systems.system import LabelledRows, Phase, RoleInput
from treaty.trees.boosting import draw
from treaty.trees.objectives import Objective
from treaty.trees.slots import Cells, SlotShard

logger = logging.getLogger(__name__)

MOST_VALUE = 1e30  # of a leaf: sums of many rounds' values stay finite, and so do gradients


def user(inputs: RoleInput[FedXGB]) -> NDArray[np.float64]:
    """Take part as a user until training is over.

    Parameters
    ----------
    inputs : RoleInput
        Its party is connected with the authority, its edge server and, where the model is hidden, all edge servers;
        not with the server, whose keys the authority certifies. `absence` is a `Leaves` or None.

    Returns
    -------
    float64 (n_outputs, n_rows)
        The model's margins of its own rows.

    Raises
    ------
    ConfigError, DataError
        When options or columns do not fit the task.
    CryptoError, PeerError
        When the edge server is lost, or sends what the protocol does not allow.
    """
    if not inputs.alone:
        stay_on_one_core()
    party, options, common = inputs.party, inputs.options, inputs.common
    sums_as = PaperUserSums if paper_mode(options) else UserSums
    edge = inputs.roles.edges[party.name]
    credentials = Credentials(party, authority_of(inputs.roles), "user")
    party.send(edge, UserOffer(credentials.certified, activity=1.0, stability=1.0))  # neither is measured here
    task = receive_task(inputs, edge, credentials)
    inputs.model_id = task.model_id
    schema = schema_of(task.names, task.categories, task.origins)
    rows = common_rows(inputs.rows, schema, inputs.classes, task.classes, party.name)
    printed = printed_rows([rows], task.classes)
    seed = seed_of_rows(inputs.keeper, party.name, task.model_id, printed, resumed=task.rounds > 0)
    labels = OwnLabels(inputs, rows, task.classes, edge)
    sums = sums_as(party, edge, credentials, credentials.seed_with(inputs.roles.active, task.server), inputs.absence)
    sums.heard.hear(task)
    instructions = _Instructions(inputs, edge, sums, MessageOrder(user_order(options), "begun"))
    agreed = _answer_search(instructions, rows, labels, common.most_bins, inputs.phase)
    summary = instructions.next()
    assert isinstance(summary, RowSummary)
    follower = _Follower(inputs, rows, labels.starting(agreed.start, "CommonBins"), agreed, summary, seed)
    instructions.vector = follower.vector
    progress = inputs.progress or (lambda done, part: None)
    progress(0, None)
    while not isinstance(told := instructions.next(), TrainingEnd):
        before = follower.finished
        follower.take(told)
        if follower.finished > before:
            progress(follower.finished, None)
        if isinstance(told, RoundStart):
            _answer_start(party, edge, sums, fits=follower.fits)
            if inputs.keeper is not None and follower.rounds == ROUNDS:
                inputs.keeper.keep_only(task.model_id)
        elif isinstance(told, Splits | SideShares | Sides | ValueShares | Turn):
            sums.absent("prediction")
    return follower.shard.margins


class _Instructions:
    """The edge server's messages, in the order that `user_order` allows; calls to sum are answered with `vector()`."""

    vector: Callable[[], NDArray[np.int64]]
    """Returns this user's part of the next sum, int64 (length,); the same again when the sum is repeated."""

    def __init__(self, inputs: RoleInput, edge: str, sums: UserSums, order: MessageOrder) -> None:
        self.edge = edge
        self._party, self._sums = inputs.party, sums
        self._note = None if inputs.recording is None else inputs.recording.note_given
        self._order, self._limit = order, SumLimit(edge)
        self._chosen = False  # for the tree that grows, or the search
        self._at_start = sums.heard.digest
        self._held: Message | None = None  # came in place of a sum's next step

    def next(self) -> Message:
        """Return the next message that is not about a sum; masks depend on all that everybody is told."""
        sums = self._sums
        while True:
            told = self._held or self._party.receive(self.edge, *self._order.allowed, follow=True)
            self._held = None
            self._order.take(told)
            match told:
                case Domain():
                    sums.meet(told)
                case Cohort():
                    sums.join(told)
                    self._chosen = True
                case Call():
                    self._expect(self._chosen, "no call but of a tree's cohort")
                    self._limit.take(told.number, told.attempt)
                    self._held = self._give(told)
                case SideShares() | Sides() | ValueShares() | Turn():  # not said to everybody by the server
                    self._limit.due()
                    return told
                case _:
                    self._limit.due()
                    if isinstance(told, RoundStart):
                        self._chosen = False
                        sums.heard = ToldDigest(self._at_start)
                    sums.heard.hear(told)
                    if isinstance(told, RowSummary | RowOwners):
                        self._at_start = sums.heard.digest
                    return told

    def _expect(self, fine: bool, expected: str) -> None:
        if not fine:
            raise PeerProtocolError(self.edge, f"expected {expected}, got another - from {self.edge}")

    def _give(self, call: Call) -> Message | None:
        """Contribute to a sum; return the message that came in place of the sum's next step, if one did."""
        try:
            values = self.vector()
            if self._note is not None:
                self._note(values)
            return self._sums.give(call, values, *self._order.allowed)
        except CryptoError as error:  # another user may have caused it: miss no more than this tree
            logger.warning("%s takes no part in this tree: %s", self._party.name, error)
            self._sums.withdraw()
            return None


def _answer_search(
    instructions: _Instructions, rows: LabelledRows, labels: OwnLabels, max_bin: int, phase: Phase | None
) -> CommonBins:
    """Contribute to the search for a start and for bins; return the ones agreed on."""
    opening, edge = Opening(rows.table.schema, bounds=labels.n_bounds), instructions.edge
    instructions.next()  # Count
    ordered = sorted_keys([rows.table.columns[f] for f in opening.numeric], 1)
    instructions.vector = lambda: opening.of(rows.table, labels.bounds)
    asked = 0
    note_search(phase, asked)
    while asked <= most_rounds(rows.table.schema.origins):
        match told := instructions.next():
            case CommonBins():
                return told
            case LabelUnits() | TrainingStart():  # checked when asked for a sum: who missed the first is in none
                instructions.vector = partial(labels.answer, told)
            case _:
                assert isinstance(told, ProbeRequest)
                counted, asked = answer_probes(told, ordered, max_bin, edge, 1), asked + 1
                instructions.vector = partial(np.asarray, counted)
                note_search(phase, asked)
    raise PeerProtocolError(edge, f"expected the bins instead of more probes - from {edge}")


def _answer_start(party: Party, edge: str, sums: UserSums, *, fits: bool) -> None:
    """Tell the edge server whether this user takes part in a tree; it does not where its rows do not fit."""
    sums.awake = True
    if not fits:
        sums.withdraw()
    elif not sums.absent("call"):
        party.send(edge, Attendance())


class _Follower:
    """A user's own rows on their way down the trees.

    `fits` says whether sums may contain them. They may not if the user was away when bounds and missing values were
    counted, and has larger gradients or weights, or missing values in a column where nobody else has: then its rows go
    down the trees and are part of no sum.
    """

    def __init__(
        self,
        inputs: RoleInput[FedXGB],
        rows: LabelledRows,
        objective: Objective,
        agreed: CommonBins,
        summary: RowSummary,
        seed: bytes,
    ) -> None:
        self._party, self._common, self._edge = inputs.party, inputs.common, inputs.roles.edges[inputs.party.name]
        if summary.n_rows < rows.table.n_rows:
            raise self._wrong("the number of all users' rows, not fewer than this user has")
        options, schema, edge = inputs.options, rows.table.schema, self._edge
        bins = unpack_bins(agreed, schema, self._common.most_bins, edge)
        told = told_clips(agreed, objective, edge)
        own = objective.agreed(
            [min(mine, theirs) for mine, theirs in zip(objective.clips, told, strict=True)],
            min(objective.weight_bound, agreed.weight_bound),
        )
        common = agreed_objective(agreed, own, noise=False, peer=edge)
        common.check_sums(summary.n_rows)
        may_miss = view(summary.may_miss, np.bool_, (len(bins.n_bins),), peer=edge, what="RowSummary.may_miss")
        codes = bins.transform(rows.table)
        unknown = (codes == bins.n_bins) & ~may_miss
        self.fits = own == objective and not unknown.any()
        codes = np.where(unknown & options.hides_model, bins.n_bins - 1, codes).astype(np.uint8)
        cells = Cells.of(bins.offsets, may_miss, summary.n_rows, common)
        self.shard = SlotShard(codes, rows.y, rows.weight, common, cells)
        self._seed = own_seed(self._common.random_state, self._party.name)
        self._n_features, self.rounds, self._void, self._depth = len(schema.names), 0, 0, 0
        self.finished = 0  # rounds whose leaf values the rows have
        self._way: ComparedRows | SharedRows | None = None  # down trees that users do not know
        layout, edges = layout_of(bins, may_miss), inputs.roles.having("edge")
        if options.exposes == "paper":
            self._way = ComparedRows(self._party, edges, edge, layout, codes)
        elif options.hides_model:
            self._way = SharedRows(self._party, edges, layout, codes, options.compares, seed)

    def vector(self) -> NDArray[np.int64]:
        """Return this user's part of the next sum, int64 (length,)."""
        if self._depth >= self._common.max_depth:
            raise self._wrong("sums of no deeper levels than the job's")
        return self.shard.level(self._depth)

    def take(self, told: Message) -> None:
        """Do to the rows what a message says: begin a round, go down a level, add leaf values."""
        trees = len(self.shard.margins)
        match told, self._way:
            case RowOwners(), _:
                if self._party.name not in told.users:
                    raise self._wrong(f"{self._party.name} among the users whose rows all holders of shares have")
            case RoundStart(), _:
                self._start(told)
            case Splits(), _:
                self._decide(told)
            case Values(), _:
                self._finish(told)
            case ShownSplits(), ComparedRows() as way:
                way.compare(told, self.shard.slots, 1 << self._depth)
            case Sides(), ComparedRows() as way:
                self._route(way.left(told, trees))
            case SideShares(), SharedRows() as way:
                self._route(way.left({self._edge: told}, trees))
            case ValueShares(), SharedRows() as way:
                self._add(way.values({self._edge: told}, trees))
            case Turn(leaves=False), SharedRows() as way:
                self._route(way.left({}, trees))
            case Turn(), SharedRows() as way:
                self._add(way.values({}, trees))

    def _start(self, told: RoundStart) -> None:
        shard, common = self.shard, self._common
        ends = view(told.last_columns, np.int32, (len(shard.margins),), peer=self._edge, what="RoundStart.last_columns")
        columns = view(told.columns, np.int32, (int(ends[-1]),), peer=self._edge, what="RoundStart.columns")
        again = self.rounds > 0 and self._depth == 0
        self.rounds, self._void = self.rounds + (not again), self._void + again
        if np.any(np.diff(ends, prepend=0) <= 0) or self.rounds > common.n_estimators or self._void > MOST_VOID:
            raise self._wrong("columns of each tree, and no more rounds than the job has")
        of_trees = np.split(columns, ends[:-1])
        if any(np.any(np.diff(c) <= 0) or c[0] < 0 or c[-1] >= self._n_features for c in of_trees):
            raise self._wrong("ascending numbers of existing columns")
        n_rows = len(shard.margins[0])
        samples = [
            None
            if common.subsample >= 1.0 or n_rows == 0
            else draw(np.random.default_rng([self._seed, self.rounds - 1, output]), n_rows, common.subsample)
            for output in range(len(of_trees))
        ]
        shard.start_round(of_trees, samples)
        self._depth = 0

    def _decide(self, told: Splits) -> None:
        shape = (len(self.shard.margins), 1 << self._depth)
        features = view(told.features, np.int32, shape, peer=self._edge, what="Splits.features")
        packed = view(told.left_bins, np.uint8, (*shape, 32), peer=self._edge, what="Splits.left_bins")
        if np.any(features < -1) or np.any(features >= self._n_features) or self._depth >= self._common.max_depth:
            raise self._wrong("splits on existing columns, no deeper than the job's trees")
        for output, left_bins in enumerate(np.unpackbits(packed, axis=2).view(np.bool_)):
            self.shard.decide(output, features[output], left_bins)
        self._depth += 1

    def _route(self, left: NDArray[np.bool_]) -> None:
        if self._depth >= self._common.max_depth:
            raise self._wrong("no deeper trees than the job's")
        for output, of_tree in enumerate(left):
            self.shard.divide(output, of_tree)
        self._depth += 1

    def _finish(self, told: Values) -> None:
        shape = (len(self.shard.margins), 1 << self._depth)
        values = view(told.values, np.float64, shape, peer=self._edge, what="Values.values")
        if not np.all(np.abs(values) < MOST_VALUE):
            raise self._wrong("finite leaf values")
        self._add(np.take_along_axis(values, self.shard.slots, axis=1))

    def _add(self, values: NDArray[np.float64]) -> None:
        """Add each row's leaf values, float64 (n_outputs, n_rows), which end a round."""
        self.shard.finish(values)
        self.finished = self.rounds

    def _wrong(self, expected: str) -> PeerProtocolError:
        return PeerProtocolError(self._edge, f"expected {expected} - from {self._edge}")
