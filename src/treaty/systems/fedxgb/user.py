"""A user of FedXGB; see `fedxgb` for the messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from treaty.data.columns import Category
from treaty.data.quantile_search import sorted_keys
from treaty.errors import CryptoError, PeerProtocolError
from treaty.messaging.messages import Message, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.authority import Credentials
from treaty.systems.fedxgb.paper.routing import ComparedRows, Shown, Sides
from treaty.systems.fedxgb.paper.sums import PaperUserSums, paper_mode
from treaty.systems.fedxgb.secpred.routing import Everybody, Routed, SharedRows, Turn, Valued, layout_of
from treaty.systems.fedxgb.server import (
    End,
    Here,
    Offer,
    Prepared,
    Roll,
    Splits,
    Task,
    Values,
    receive_task,
)
from treaty.systems.fedxgb.user_sums import Call, Cohort, Domain, Leaves, UserSums
from treaty.systems.horizontal.members import Heard
from treaty.systems.horizontal.quantiles import (
    MOST_ROUNDS,
    Agreed,
    Asked,
    Count,
    Opening,
    agreed_objective,
    answer_probes,
    unpack_bins,
)
from treaty.systems.horizontal.rows import common_rows, own_seed, schema_of
from treaty.systems.pooled.training import Labelled, objective_for
from treaty.systems.tree_options import TreeOptions
from treaty.trees.boosting import draw
from treaty.trees.slots import Cells, SlotShard

logger = logging.getLogger(__name__)

MOST_VALUE = 1e30  # of a leaf: sums of many rounds' values stay finite, and so do gradients


def user(
    party: Party,
    data: Labelled,
    options: TreeOptions,
    *,
    edge: str,
    server: str,
    edges: Sequence[str],
    authority: str,
    classes: list[Category] | None,
    activity: float = 1.0,
    stability: float = 1.0,
    leaves: Leaves | None = None,
) -> NDArray[np.float64]:
    """Take part as a user until training is over.

    Parameters
    ----------
    party : Party
        Connected with the authority, the own edge server and, where the model is hidden, all edge servers.
    data : Labelled
        Own rows; labels are numbers of `classes`.
    edge : str
        The own edge server.
    server : str
        Whose keys the authority certified; there is no connection to it.
    classes : list or None
        Labels by class number; None for regression.
    activity, stability : float
        From 0 to 1: how much of the time it is in use, and connected without a break.
    leaves : Leaves or None
        When to drop out of a tree.

    Returns
    -------
    float64 (n_outputs, n_rows)
        The model's margins of the own rows.

    Raises
    ------
    ConfigError, DataError
        When options or columns do not fit the task.
    CryptoError, PeerError
        When the edge server is lost, or sends what the protocol does not allow.
    """
    sums_as = PaperUserSums if paper_mode(options) else UserSums
    credentials = Credentials(party, authority, "user")
    party.send(edge, Offer(credentials.offered, activity, stability))
    task = receive_task(party, edge, server, credentials, options)
    schema = schema_of(task.names, task.categories)
    rows = common_rows(data, schema, classes, task.classes, party.name)
    sums = sums_as(party, edge, credentials, credentials.seed_with(server, task.server), leaves)
    sums.heard.hear(task)
    follower = _Follower(party, edge, edges, rows, task, options)
    at_start = sums.heard.digest
    held: Message | None = None
    kinds = (
        Domain, Cohort, Call, Count, Asked, Agreed, Prepared, Everybody, Roll, Splits, Shown, Values, Routed,
        Sides, Valued, Turn, End,
    )  # fmt: skip
    while True:
        told, held = held if held is not None else party.receive(edge, *kinds, follow=True), None
        match told:
            case Domain():
                sums.meet(told)
            case Cohort():
                sums.join(told)
            case Call():
                held = _give(party, sums, follower, told, kinds)
            case Routed() | Sides() | Valued() | Turn():
                follower.take(told)
                sums.absent("prediction")
            case _:
                if isinstance(told, Roll):
                    sums.heard = Heard(at_start)
                sums.heard.hear(told)
                follower.take(told)
                match told:
                    case Prepared() | Everybody():
                        at_start = sums.heard.digest
                    case Roll():
                        _answer_roll(party, edge, sums, fits=follower.fits)
                    case Splits():
                        sums.absent("prediction")
                    case End():
                        return follower.margins


def _give(
    party: Party, sums: UserSums, follower: _Follower, call: Call, kinds: Sequence[type[Message]]
) -> Message | None:
    """Contribute to a sum; return what the edge server said instead of the next step, if it did."""
    try:
        return sums.give(call, follower.vector(), *kinds)
    except CryptoError as error:  # another user's doing, perhaps: no reason to miss more than this tree
        logger.warning("%s sits a tree out: %s", party.name, error)
        sums.withdraw()
        return None


def _answer_roll(party: Party, edge: str, sums: UserSums, *, fits: bool) -> None:
    """Say whether it is there as a tree begins; rows that do not fit what all agreed on stay out."""
    sums.awake = True
    if not fits:
        sums.withdraw()
    elif not sums.absent("call"):
        party.send(edge, Here())


class _Follower:
    """What a user makes of the server's messages on its own rows.

    Attributes
    ----------
    fits : bool
        Whether sums may hold its rows. Not if it was away when all told their bounds and gaps, and has larger targets
        or a gap where nobody has one: then it follows the trees and takes part in none.
    """

    def __init__(
        self, party: Party, edge: str, edges: Sequence[str], rows: Labelled, task: Task, options: TreeOptions
    ) -> None:
        self._party, self._edges = party, edges
        self._shared: SharedRows | None = None
        self.fits = True
        self._compared: ComparedRows | None = None
        self._edge, self._rows, self._options, self._n_rounds = edge, rows, options, 0
        self._schema = rows.table.schema
        self._objective = objective_for(rows, task.classes, options)
        self._seed = own_seed(options, party.name)
        self._opening = Opening(self._schema, bounds=True)
        self._ordered: list[NDArray[np.uint32]] = []
        self._probed = 0
        self._agreed: Agreed | None = None
        self._shard: SlotShard | None = None
        self._depth = 0
        self._vector: Callable[[], NDArray[np.int64]] | None = None

    @property
    def margins(self) -> NDArray[np.float64]:
        """Margins of the own rows, float64 (n_outputs, n_rows)."""
        return self._trained().margins

    def vector(self) -> NDArray[np.int64]:
        """Return what the next sum is of; the same again when the sum is repeated."""
        if self._vector is None:
            raise self._wrong("something to sum before Call")
        return self._vector()

    def take(self, told: Message) -> None:
        """Follow a message."""
        table, options = self._rows.table, self._options
        match told:
            case Count():
                if self._ordered or self._vector is not None:
                    raise self._wrong("one search for bins")
                self._ordered = sorted_keys([table.columns[f] for f in self._opening.numeric], 1)
                self._vector = lambda: self._opening.of(table, self._objective)
            case Asked():
                self._probed += 1
                if self._probed > MOST_ROUNDS or self._agreed is not None:
                    raise self._wrong("the bins instead of more probes")
                counted = answer_probes(told, self._ordered, options.max_bin, self._edge, 1)
                self._vector = lambda: counted
            case Agreed():
                self._agreed, self._vector = told, None
            case Prepared():
                self._prepare(told)
            case Roll():
                self._start(told)
            case Everybody():
                if self._party.name not in told.users:
                    raise self._wrong(f"{self._party.name} among those whose rows all edge servers have")
            case Routed() if self._shared is not None:
                self._route(self._shared.left({self._edge: told}, len(self._trained().margins)))
            case Shown() if self._compared is not None:
                self._compared.compare(told, self._trained().slots, 1 << self._depth)
            case Sides() if self._compared is not None:
                self._route(self._compared.left(told, len(self._trained().margins)))
            case Valued() if self._shared is not None:
                self._value(self._shared.values({self._edge: told}, len(self._trained().margins)))
            case Turn(leaves=False) if self._shared is not None:
                self._route(self._shared.left({}, len(self._trained().margins)))
            case Turn() if self._shared is not None:
                self._value(self._shared.values({}, len(self._trained().margins)))
            case Splits():
                self._decide(told)
            case Values():
                self._finish(told)

    def _prepare(self, told: Prepared) -> None:
        if self._agreed is None or self._shard is not None or told.n_rows < self._rows.table.n_rows:
            raise self._wrong("Prepared once, after the bins, of as many rows as there are")
        bins = unpack_bins(self._agreed, self._schema, self._options.max_bin, self._edge)
        own = replace(
            self._objective,
            grad_clip=min(self._objective.grad_clip, self._agreed.grad_clip),
            weight_bound=min(self._objective.weight_bound, self._agreed.weight_bound),
        )
        objective = agreed_objective(self._agreed, own, noise=False, peer=self._edge)
        objective.check_sums(told.n_rows)
        may_miss = view(told.may_miss, np.bool_, (len(bins.n_bins),), peer=self._edge, what="Prepared.may_miss")
        codes = bins.transform(self._rows.table)
        unknown = (codes == bins.n_bins) & ~may_miss
        self.fits = own == self._objective and not unknown.any()
        codes = np.where(unknown & self._options.hides_model, bins.n_bins - 1, codes).astype(np.uint8)
        cells = Cells.of(bins.offsets, may_miss, told.n_rows, objective)
        self._shard = SlotShard(codes, self._rows.y, self._rows.weight, objective, cells)
        if self._options.expose == "paper":
            layout = layout_of(bins, may_miss)
            self._compared = ComparedRows(self._party, self._edges, self._edge, layout, codes)
        elif self._options.hides_model:
            layout = layout_of(bins, may_miss)
            self._shared = SharedRows(self._party, self._edges, layout, codes, self._options.compares)

    def _start(self, told: Roll) -> None:
        shard, n_features = self._trained(), len(self._schema.names)
        ends = view(told.last_columns, np.int32, (len(shard.margins),), peer=self._edge, what="Roll.last_columns")
        columns = view(told.columns, np.int32, (int(ends[-1]),), peer=self._edge, what="Roll.columns")
        if np.any(np.diff(ends, prepend=0) <= 0) or self._n_rounds >= self._options.n_estimators:
            raise self._wrong("columns of each tree, and no more rounds than the job has")
        of_trees = np.split(columns, ends[:-1])
        if any(np.any(np.diff(c) <= 0) or c[0] < 0 or c[-1] >= n_features for c in of_trees):
            raise self._wrong("ascending columns that there are")
        n_rows = len(shard.margins[0])
        samples = [
            None
            if self._options.subsample >= 1.0 or n_rows == 0
            else draw(np.random.default_rng([self._seed, self._n_rounds, output]), n_rows, self._options.subsample)
            for output in range(len(of_trees))
        ]
        shard.start_round(of_trees, samples)
        self._n_rounds += 1
        self._depth, self._vector = 0, lambda: shard.level(self._depth)

    def _decide(self, told: Splits) -> None:
        shard, n_slots = self._trained(), 1 << self._depth
        shape = (len(shard.margins), n_slots)
        features = view(told.features, np.int32, shape, peer=self._edge, what="Splits.features")
        packed = view(told.left_bins, np.uint8, (*shape, 32), peer=self._edge, what="Splits.left_bins")
        if (
            np.any(features < -1)
            or np.any(features >= len(self._schema.names))
            or self._depth >= self._options.max_depth
        ):
            raise self._wrong("splits on columns that there are, no deeper than the job's trees")
        for output, left_bins in enumerate(np.unpackbits(packed, axis=2).view(np.bool_)):
            shard.decide(output, features[output], left_bins)
        self._depth += 1

    def _route(self, left: NDArray[np.bool_]) -> None:
        if self._depth >= self._options.max_depth:
            raise self._wrong("no deeper trees than the job's")
        for output, of_tree in enumerate(left):
            self._trained().divide(output, of_tree)
        self._depth += 1

    def _value(self, values: NDArray[np.float64]) -> None:
        self._trained().finish(values)
        self._vector = None

    def _finish(self, told: Values) -> None:
        shard = self._trained()
        shape = (len(shard.margins), 1 << self._depth)
        values = view(told.values, np.float64, shape, peer=self._edge, what="Values.values")
        if not np.all(np.abs(values) < MOST_VALUE):
            raise self._wrong("finite leaf values")
        self._value(np.take_along_axis(values, shard.slots, axis=1))

    def _trained(self) -> SlotShard:
        if self._shard is None:
            raise self._wrong("the bins before trees")
        return self._shard

    def _wrong(self, expected: str) -> PeerProtocolError:
        return PeerProtocolError(self._edge, f"expected {expected} - from {self._edge}")
