"""Messages of FedXGBoost-LDP, and how each end sends, receives and checks them; the roles are in `fedxgboost_ldp`.

A passive party knows which rows are in a node, and the numbers of rows decide which nodes come next. So for each level
it receives only how the last one was divided.
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.conversation import Table
from treaty.messaging.exchanges import send_rows, take_rows
from treaty.messaging.messages import Array, ColumnSize, Message, bits_of, leaks, leaks_by, view
from treaty.messaging.party import Party
from treaty.systems.fedxgboost_ldp.noise import MOST_SUM
from treaty.systems.vertical.column_owner import ascending, gains_as_splits
from treaty.systems.vertical.messages import Start
from treaty.systems.vertical.training import between_trees
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import SumsSource
from treaty.trees.growth import RowPartition, RowsOfNodes
from treaty.trees.splits import Level, Splits

BITS_OF_ROW = 160
"""The most bits of a row in a `NoisyTree`: two values and its number."""


@leaks("bounds of gradients, so about the largest weight above 1", "control")
class NoiseSetup(Start):
    """The value of one fixed-point step of grad and of hess, and whether hessians carry noise as well."""

    grad_unit: Annotated[float, msgspec.Meta(gt=0)]
    hess_unit: Annotated[float, msgspec.Meta(gt=0)]
    noisy_hess: bool


@leaks("how many columns the sender has", "control")
class ColumnCount(Message):
    """The sender's number of columns."""

    count: ColumnSize


@leaks_by(
    safe=(
        "the gradient of each row in the tree's sample: about its label, no more than epsilon allows",
        "noisy",
        "epsilon, epsilon_total",
    ),
    paper=("the gradient of each row under noise, and exact totals, so that no epsilon holds", "exact", 'mode="safe"'),
)
class NoisyTree(Message):
    """A tree's gradients, its sampled rows, int32 ascending (None: all), and its columns, int32.

    Gradients and hessians are int32 if all of them fit, else int64. `hess` is None if scores do not use it. `totals`
    are the root's, int64 (3,). Many rows are sent in several messages, in order.
    """

    grad: Array
    hess: Array | None
    rows: Array | None
    columns: Array
    totals: Array


@leaks("how good the sender's best split of each node is", "aggregated")
class Scores(Message):
    """The gain of the best split of each node of the level, float64 (n,); 0: there is none."""

    best: Array


@leaks("which nodes its own split won", "noisy", guard="epsilon")
class ScoredSplitRequest(Message):
    """Nodes of the level, int32 (k,) ascending, that the receiver is to divide at its best split."""

    nodes: Array


@leaks("which of a node's rows go left at a split of the sender", "exact", guard="min_child_samples")
class ScoredSplitAnswer(Message):
    """Record numbers int32 (k,), and packed bits: which of the nodes' rows go left, node after node.

    Many rows are sent in several messages, in order.
    """

    records: Array
    left: Array


@leaks_by(
    safe=(
        "which rows of each node go left at every party's splits: exact about the split's column; about labels, no "
        "more than epsilon allows",
        "exact",
        "epsilon, for labels",
    ),
    paper=(
        "which rows of each node go left at every party's splits, and exact sums of gradients",
        "exact",
        'mode="safe"',
    ),
)
class LevelDivision(Message):
    """How the last level was divided: which nodes were, bool (n,), and packed bits of which of their rows go left.

    `totals` are those of the left children, int64 (k, 3): sums of what `NoisyTree` has (in paper mode exact ones), with
    0 for hess if scores do not use it. Many rows are sent in several messages, in order.
    """

    nodes: Array
    left: Array
    totals: Array


CONVERSATION: Table = {
    "between trees": {NoisyTree: "scored", **between_trees("between trees")},
    "scored": {
        ScoredSplitRequest: "split",
        LevelDivision: "scored",
        NoisyTree: "scored",  # no node of the level was split, or no child can be
        **between_trees("between trees"),
    },
    "split": {LevelDivision: "scored", NoisyTree: "scored", **between_trees("between trees")},
    "finished": {},
}
"""Which messages a passive party may receive after sending a level's scores ("scored"), or also splits ("split")."""


# ---------------------------------------------------------------- active party


class ScoredColumns(SumsSource):
    """A passive party's columns as the active party sees them: a source of scores, and of rows at their splits.

    `records` is the number of splits that `peer` has recorded already. With `first_order` no hessians are sent. The
    role sets `totals` (before a tree) and `divided` (before a level; None: it is the first).
    """

    def __init__(self, party: Party, peer: str, n_columns: int, records: int, *, first_order: bool) -> None:
        self._party, self.peer, self._records, self._first_order = party, peer, records, first_order
        # of the three totals, that of hessians would reveal more about labels than the scores need
        self._shown = np.array([1, not first_order, 1])
        # the owner does not show its bins
        self.offsets = np.zeros(n_columns + 1, np.int32)
        self.categorical = np.zeros(n_columns, np.bool_)
        self.totals = np.zeros(3, np.int64)
        self.divided: tuple[Flags, Flags, Integers] | None = None

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        """Send a tree's gradients; the next message to the peer shows that it is grown."""
        kept = slice(None) if rows is None else rows
        of_rows, of_hess = _short(grad[kept]), None if self._first_order else _short(hess[kept])
        of_columns, totals = Array.of(columns), Array.of(self.totals * self._shown)

        def tree(of: slice) -> NoisyTree:
            return NoisyTree(
                Array.of(of_rows[of]),
                None if of_hess is None else Array.of(of_hess[of]),
                None if rows is None else Array.of(rows[of]),
                of_columns,
                totals,
            )

        send_rows(self._party, self.peer, len(of_rows), BITS_OF_ROW, tree)

    def ask_sums(self, level: Level, rows: RowsOfNodes) -> None:
        """Send how the last level was divided; scores of a tree's first level come without asking."""
        self._n_nodes = len(level.nodes)
        if self.divided is not None:
            nodes, left, totals = self.divided
            divided, shown = Array.of(nodes), Array.of(totals * self._shown)
            send_rows(
                self._party, self.peer, len(left), 1,
                lambda of: LevelDivision(divided, Array.of(np.packbits(left[of])), shown),
            )  # fmt: skip

    def sums(self) -> NoReturn:
        raise AssertionError("a source of scores was asked for sums")

    def best(self, source: int) -> Splits:
        """Receive the score of each node's best split; left totals are computed once the owner has sent its rows."""
        scores = self._party.receive(self.peer, Scores).best
        return gains_as_splits(scores, self._n_nodes, source, self.peer, "Scores.best")

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        """Ask for the best splits of nodes, whose numbers `best` has put into `features`."""
        self._n_rows, self._n_splits = len(rows), len(features)
        self._party.send(self.peer, ScoredSplitRequest(Array.of(features)))

    def left(self) -> tuple[Int32s, Flags]:
        peer, expected = self.peer, self._records + np.arange(self._n_splits, dtype=np.int32)
        left = np.empty(self._n_rows, np.bool_)
        for of, answer in take_rows(self._party, peer, self._n_rows, 1, ScoredSplitAnswer):
            records = view(answer.records, np.int32, expected.shape, peer=peer, what="ScoredSplitAnswer.records")
            if not np.array_equal(records, expected):
                raise PeerProtocolError(
                    peer, f"expected records from {self._records} on", at="ScoredSplitAnswer.records"
                )
            left[of] = bits_of(answer.left, of.stop - of.start, peer, "ScoredSplitAnswer.left")
        self._records += self._n_splits
        return expected, left


def _short(values: Integers) -> NDArray[np.signedinteger]:
    """Return values as int32, which takes half the bytes, if all of them fit."""
    if len(values) and (values.min() < -(2**31) or values.max() >= 2**31):
        return values
    return values.astype(np.int32)


# ---------------------------------------------------------------- passive party


class TreeReader:
    """Reads and checks the active party's messages to a passive one with `n_rows` rows and `n_columns` columns."""

    def __init__(self, party: Party, n_rows: int, n_columns: int, *, first_order: bool) -> None:
        (self.active,) = party.peers
        self._party, self._n_rows, self._n_columns, self._first_order = party, n_rows, n_columns, first_order

    def tree(self, first: NoisyTree) -> tuple[TreeSample, Integers]:
        """Return a tree's gradients, 0 for rows outside its sample, and the root's totals."""
        columns = ascending(first.columns, self._n_columns, self.active, "NoisyTree.columns")
        totals = self._totals(first.totals, (3,), "NoisyTree.totals")
        all_rows, size = first.rows is None, int(totals[2])
        self.expect(size == self._n_rows if all_rows else 0 <= size <= self._n_rows, "the tree's rows", "totals")
        grad, hess = np.zeros((2, self._n_rows), np.int64)
        sampled = np.empty(0 if all_rows else size, np.int32)
        # several messages must fit together as one would
        for of, piece in take_rows(self._party, self.active, size, BITS_OF_ROW, NoisyTree, first):
            self.expect((piece.rows is None) == all_rows, "rows named or not as before", "rows")
            self.expect((piece.hess is None) == self._first_order, "hessians sent or not as agreed", "hess")
            rows: slice | Int32s = of
            if piece.rows is not None:
                rows = ascending(piece.rows, self._n_rows, self.active, "NoisyTree.rows")
                self.expect(len(rows) == of.stop - of.start, "the tree's number of rows", "rows")
                self.expect(not of.start or rows[0] > sampled[of.start - 1], "ascending rows", "rows")
                sampled[of] = rows
            grad[rows] = self._values(piece.grad, of, size, "grad")
            if piece.hess is not None:
                hess[rows] = self._values(piece.hess, of, size, "hess")
        return TreeSample(grad, hess, None if all_rows else sampled, columns), totals

    def won(self, request: ScoredSplitRequest, found: Splits) -> NDArray[np.intp]:
        """Return which nodes of a level this party is to divide, of those that it found splits for."""
        wanted = view(request.nodes, np.int32, (None,), peer=self.active, what="ScoredSplitRequest.nodes")
        fine = len(wanted) > 0 and np.isin(wanted, np.flatnonzero(found.feature >= 0)).all()
        self.expect(bool(fine and np.all(np.diff(wanted) > 0)), "nodes with a score, once, in their order")
        return wanted.astype(np.intp)

    def division(self, message: LevelDivision, level: Level, rows: RowPartition) -> tuple[Splits, Flags]:
        """Return a level's division as splits without columns, and which rows of its divided nodes go left."""
        active = self.active
        divided = view(message.nodes, np.bool_, (len(level.nodes),), peer=active, what="LevelDivision.nodes")
        nodes = level.nodes[divided]
        starts = rows.rows(nodes, sampled=False)[1]
        left = np.empty(starts[-1], np.bool_)
        for of, piece in take_rows(self._party, active, len(left), 1, LevelDivision, message):
            left[of] = bits_of(piece.left, of.stop - of.start, active, "LevelDivision.left")
        # the column of a split is its owner's secret; growth needs only which nodes are split, and the totals
        splits = Splits.none(len(divided))
        splits.feature[divided] = 0
        splits.left_totals[divided] = totals = self._totals(message.totals, (len(nodes), 3), "LevelDivision.totals")
        # these counts decide which nodes come next: a wrong one would make the two ends' trees differ. A node's sampled
        # rows come first
        stops = starts[:-1] + np.diff(rows.rows(nodes, sampled=True)[1])
        going = [np.count_nonzero(left[a:b]) for a, b in zip(starts[:-1], stops, strict=True)]
        if not np.array_equal(totals[:, 2], going):
            raise PeerProtocolError(active, "expected as many rows as go left", at="LevelDivision.totals")
        return splits, left

    def _totals(self, sent: Array, shape: tuple[int, ...], what: str) -> Integers:
        totals = view(sent, np.int64, shape, peer=self.active, what=what)
        if not np.all((-MOST_SUM < totals) & (totals < MOST_SUM)):
            raise PeerProtocolError(self.active, "expected sums below 2^62", at=what)
        return totals

    def _values(self, sent: Array, of: slice, size: int, name: str) -> Integers:
        """Return the values of a piece of a tree of `size` rows."""
        shape, what = (of.stop - of.start,), f"NoisyTree.{name}"
        kind: type[Any] = np.int32 if sent.dtype == "int32" else np.int64
        values: Integers = view(sent, kind, shape, peer=self.active, what=what)
        most = MOST_SUM // max(1, size)
        self.expect(not len(values) or (values.min() > -most and values.max() < most), "sums below 2^62", name)
        return values

    def expect(self, fine: bool, expected: str, name: str = "") -> None:
        """Raise PeerProtocolError unless what the active party sent is `fine`."""
        if not fine:
            where = f" - at NoisyTree.{name} from" if name else " - from"
            raise PeerProtocolError(self.active, f"expected {expected}{where} {self.active}")
