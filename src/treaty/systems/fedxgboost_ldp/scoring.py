"""Both ends of a tree whose parties score their own candidates: FedXGBoost-LDP between its set-up and its end.

The owner of columns follows the tree: to compute scores it knows which rows are in a node, and which nodes come next
follows from their numbers of rows. So for each level it is told only how the last one was divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from treaty.errors import PeerProtocolError
from treaty.messaging.conversation import Table
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.messaging.row_pieces import bits_of, row_pieces, send_rows, take_rows
from treaty.systems.fedxgboost_ldp.noise import ScoresFinder, TreeGradients
from treaty.systems.vertical.column_owner import ascending
from treaty.systems.vertical.encrypted_columns import Bools, Int32, Int64
from treaty.systems.vertical.passive import between_trees
from treaty.trees.columns import ColumnSource, SumsSource
from treaty.trees.ensemble import Tree
from treaty.trees.growth import Growth
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level, SplitRules, Splits

MOST_SUM = 2**62
_BITS = 160
"""Most bits of a row in a `NoisyTree`: two values and its number."""


class NoisyTree(Message):
    """A tree's gradients, of its sampled rows, int32 ascending (None: all), and columns, int32.

    Gradients and hessians are int32 where all of them fit, else int64. `hess` is None where scores leave it out.
    `totals` are the root's, int64 (3,), see `LevelDivision`. Of many rows there are several, each with the next ones.
    """

    leakage: ClassVar = {
        "safe": MessageLeakage(
            "of each row of the tree's sample the gradient under noise, so of its label no more than epsilon "
            "lets through",
            "noisy",
            guard="epsilon, epsilon_total",
        ),
        "paper": MessageLeakage(
            "of each row the gradient under noise, and exact totals beside them, so that no epsilon holds",
            "exact",
            guard='mode="safe"',
        ),
    }

    grad: Array
    hess: Array | None
    rows: Array | None
    columns: Array
    totals: Array


class Scores(Message):
    """Of each node of the level the gain of its best split, float64 (n,), 0 where it has none."""

    leakage: ClassVar = MessageLeakage("of each node how good the sender's best split is", "aggregated")

    best: Array


class ScoredSplitRequest(Message):
    """Nodes of the level, int32 (k,) ascending, that the receiver is to split at the best split it found."""

    leakage: ClassVar = MessageLeakage("which nodes its own split won", "noisy", guard="epsilon")

    nodes: Array


class ScoredSplitAnswer(Message):
    """Record numbers int32 (k,), and packed bits: which of the nodes' rows go left, node after node.

    Of many rows there are several, each about the next ones.
    """

    leakage: ClassVar = MessageLeakage(
        "which of a node's rows go left at a split of the sender",
        "exact",
        guard="min_child_samples",
    )

    records: Array
    left: Array


class LevelDivision(Message):
    """How the last level was divided: which nodes were, bool (n,), and packed bits of which of their rows go left.

    `totals` are those of the left children, int64 (k, 3): sums of what `NoisyTree` has, exact ones in paper mode alone,
    and 0 for hess where scores leave it out. Of many rows there are several, each about the next ones.
    """

    leakage: ClassVar = {
        "safe": MessageLeakage(
            "which rows of each node go left at a split, whoever owns its column: of that column exact, of "
            "labels no more than epsilon lets through",
            "exact",
            guard="epsilon, for labels",
        ),
        "paper": MessageLeakage(
            "which rows of each node go left at a split, whoever owns its column, and exact sums of gradients",
            "exact",
            guard='mode="safe"',
        ),
    }

    nodes: Array
    left: Array
    totals: Array


# ---------------------------------------------------------------- active party


class ScoredColumns:
    """A passive party's columns: a source of scores, which decides rows at the splits it is asked for.

    `records` is how many splits `peer` has recorded already.
    """

    def __init__(self, party: Party, peer: str, n_columns: int, records: int) -> None:
        self._party, self._peer, self._records = party, peer, records
        self.offsets = np.zeros(n_columns + 1, np.int32)  # the owner tells nothing of its bins
        self.categorical = np.zeros(n_columns, np.bool_)
        self.totals = np.zeros(3, np.int64)  # of the tree that is to start
        self.divided: tuple[Bools, Bools, Int64] | None = None
        self.has_hess = True

    def start_tree(self, grad: Int64, hess: Int64, rows: Int32 | None, columns: Int32) -> None:
        """Send a tree's gradients."""
        kept = slice(None) if rows is None else rows
        of_rows, of_hess = _short(grad[kept]), _short(hess[kept]) if self.has_hess else None
        of_columns, totals = Array.of(columns), Array.of(self._shown(self.totals))

        def tree(of: slice) -> NoisyTree:
            return NoisyTree(
                Array.of(of_rows[of]),
                None if of_hess is None else Array.of(of_hess[of]),
                None if rows is None else Array.of(rows[of]),
                of_columns,
                totals,
            )

        send_rows(self._party, self._peer, len(of_rows), _BITS, tree)

    def end_tree(self) -> None:
        """See `SumsSource`; nothing is sent."""

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        """Tell how the last level was divided; scores of a tree's first level come unasked."""
        self._n_nodes = len(level.nodes)
        if self.divided is not None:
            nodes, left, totals = self.divided
            divided, shown = Array.of(nodes), Array.of(self._shown(totals))
            send_rows(
                self._party,
                self._peer,
                len(left),
                1,
                lambda of: LevelDivision(divided, Array.of(np.packbits(left[of])), shown),
            )

    def _shown(self, totals: Int64) -> Int64:
        return totals if self.has_hess else totals * np.array([1, 0, 1])

    def sums(self) -> Int64:
        """See `SumsSource`; there are none."""
        raise AssertionError("a source of scores was asked for sums")

    def best(self, source: int) -> Splits:
        """Return the scores as splits; as nothing else is known of them, `feature` holds the node's number."""
        peer = self._peer
        scores = view(
            self._party.receive(peer, Scores).best, np.float64, (self._n_nodes,), peer=peer, what="Scores.best"
        )
        if not np.all(np.isfinite(scores) & (scores >= 0.0)):
            raise PeerProtocolError(peer, f"expected finite scores of 0 or more - at Scores.best from {peer}")
        found = Splits.none(len(scores), source)
        found.gain[:] = scores
        found.feature[:] = np.where(scores > 0.0, np.arange(len(scores)), -1)
        return found

    def ask_left(self, features: Int32, left_bins: Bools, rows: Int32, starts: Int64) -> None:
        """Ask for the best splits of nodes, whose numbers are in `features`; see `best`."""
        self._n_rows, self._n_splits = len(rows), len(features)
        self._party.send(self._peer, ScoredSplitRequest(Array.of(features)))

    def left(self) -> tuple[Int32, Bools]:
        peer, expected = self._peer, self._records + np.arange(self._n_splits, dtype=np.int32)
        left = np.empty(self._n_rows, np.bool_)
        for of, answer in take_rows(self._party, peer, self._n_rows, 1, ScoredSplitAnswer):
            records = view(answer.records, np.int32, expected.shape, peer=peer, what="ScoredSplitAnswer.records")
            if not np.array_equal(records, expected):
                raise PeerProtocolError(
                    peer, f"expected records from {self._records} on - at ScoredSplitAnswer.records from {peer}"
                )
            left[of] = bits_of(answer.left, of.stop - of.start, peer, "ScoredSplitAnswer.left")
        self._records += self._n_splits
        return expected, left

    def refuse(self) -> NoReturn:
        """Raise PeerProtocolError for a split that is not as good as its score."""
        raise PeerProtocolError(
            self._peer, f"expected a split as good as its score, of children with enough rows - from {self._peer}"
        )


class ScoreSplits(ScoresFinder):
    """The split finder of the active party: owners report scores, and only the best one's owner splits the node.

    `sources` are in party order, those of others `ScoredColumns`. ``release(grad, hess, rows)`` makes a tree's
    gradients, or raises `NoMoreTrees`. With `first_order` scores leave hess out, which is not sent then; with `exact`
    (paper mode) all are told exact totals.
    """

    def __init__(
        self,
        party: Party,
        sources: Sequence[SumsSource],
        n_rows: int,
        rules: SplitRules,
        threads: int,
        release: Callable[[Int64, Int64, Int32 | None], TreeGradients],
        *,
        first_order: bool,
        exact: bool,
    ) -> None:
        super().__init__(sources, n_rows, rules, threads)
        self._party, self._release, self._exact = party, release, exact
        self._others = [source for source in sources if isinstance(source, ScoredColumns)]
        self._is_other = np.array([isinstance(source, ScoredColumns) for source in sources])
        for source in self._others:
            source.has_hess = not first_order

    def start_tree(self, grad: Int64, hess: Int64, rows: Int32 | None, columns: Int32) -> Int64:
        """See `SplitFinder`: make the tree's gradients, and send them."""
        gradients = self._release(grad, hess, rows)
        # outside paper mode the totals of nodes are sums of what is scored, so own splits have them already
        self._scored = gradients.counted_grad is gradients.grad and gradients.counted_hess is gradients.hess
        totals = gradients.totals(rows)
        for source in self._others:
            source.totals, source.divided = totals, None
        self.start(gradients, rows, columns)
        self._party.round += 1
        return totals

    def best_splits(self, level: Level) -> Splits:
        """See `SplitFinder`: compare scores, have winners split, and compute the children's totals from that."""
        found = super().best_splits(level)
        kept = np.flatnonzero(found.feature >= 0)
        self._level_size, self._kept = len(level.nodes), kept
        if len(kept):
            nodes, chosen = level.nodes[kept], found.take(kept)
            self._records, self._left = self.decide(nodes, chosen)
            unknown = np.flatnonzero(self._is_other[chosen.source]) if self._scored else np.arange(len(kept))
            chosen.left_totals[unknown] = self.left_totals(nodes, self._left, unknown)
            found.left_totals[kept] = self._left_totals = chosen.left_totals
            self._check(level.totals[kept[unknown]], chosen.take(unknown))
        return found

    def divide(self, nodes: Int32, children: Int32, chosen: Splits) -> Int32:
        """See `SplitFinder`; rows are decided already."""
        self.apply(nodes, children, self._left)
        divided = np.zeros(self._level_size, np.bool_)
        divided[self._kept] = True
        for source in self._others:
            source.divided = divided, self._left, self._left_totals
        return self._records

    def finish(self, tree: Tree, margins: NDArray[np.float64]) -> None:
        super().finish(tree, margins)
        self._left = np.zeros(0, np.bool_)

    def _scan(self, k: int, level: Level) -> Splits:
        source = self._sources[k]
        return source.best(k) if isinstance(source, ScoredColumns) else super()._scan(k, level)

    def _check(self, totals: Int64, chosen: Splits) -> None:
        """Reject splits with too few rows on a side, or worse than their score, which kept others from splitting."""
        left = chosen.left_totals
        fewest = np.minimum(left[:, 2], totals[:, 2] - left[:, 2])
        wrong = fewest < self._rules.min_child_samples
        if not self._exact:
            # both sides compute the same operations on the same integers; processors may differ in the last bits
            score = chosen.gain
            wrong |= ~(np.abs(self._rules.gain(totals, left) - score) <= 1e-6 * score + 1e-8)
        for k in chosen.source[wrong].tolist():
            source = self._sources[k]
            assert isinstance(source, ScoredColumns)
            source.refuse()


# ---------------------------------------------------------------- owner of columns

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
"""What an owner of columns may be sent when. "scored": its scores of a level are sent; "split": so are its splits."""


class ScoringOwner:
    """A passive party's end of one tree after another; what it may be sent when is in `CONVERSATION`.

    `columns` record their splits; `rules` are those of scores (`noise.scoring_rules`).
    """

    def __init__(
        self, party: Party, columns: ColumnSource, n_rows: int, rules: SplitRules, threads: int, *, first_order: bool
    ) -> None:
        (self._active,) = party.peers
        self._party, self._n_rows, self._rules = party, n_rows, rules
        self._n_columns = len(columns.categorical)
        self._first_order = first_order
        self._finder = ScoresFinder([columns], n_rows, rules, threads)

    def start(self, tree: NoisyTree) -> Scores | None:
        """Take a tree's gradients; return the root's score, None where it is a leaf."""
        columns = ascending(tree.columns, self._n_columns, self._active, "NoisyTree.columns")
        totals = self._totals(tree.totals, (3,), "NoisyTree.totals")
        all_rows = tree.rows is None
        size = int(totals[2])
        self._expect(size == self._n_rows if all_rows else 0 <= size <= self._n_rows, "the tree's rows", "totals")
        grad, hess = np.zeros((2, self._n_rows), np.int64)  # 0 for rows that are not of the sample
        sampled = np.empty(0 if all_rows else size, np.int32)
        for of, piece in take_rows(self._party, self._active, size, _BITS, NoisyTree, tree):
            self._expect((piece.rows is None) == all_rows, "rows named or not as before", "rows")
            self._expect((piece.hess is None) == self._first_order, "hessians sent or not as agreed", "hess")
            rows: slice | Int32 = of
            if piece.rows is not None:
                rows = ascending(piece.rows, self._n_rows, self._active, "NoisyTree.rows")
                self._expect(len(rows) == of.stop - of.start, "the tree's number of rows", "rows")
                self._expect(not of.start or rows[0] > sampled[of.start - 1], "ascending rows", "rows")
                sampled[of] = rows
            grad[rows] = self._values(piece.grad, of, size, "grad")
            if piece.hess is not None:
                hess[rows] = self._values(piece.hess, of, size, "hess")
        self._finder.start(TreeGradients(grad, hess, grad, hess), None if all_rows else sampled, columns)
        self._growth = Growth(totals, self._rules)
        return None if self._growth.level is None else self._scored(self._growth.level)

    def split(self, request: ScoredSplitRequest) -> Iterator[ScoredSplitAnswer]:
        """Record and decide the best splits of the nodes that this party has won."""
        wanted = view(request.nodes, np.int32, (None,), peer=self._active, what="ScoredSplitRequest.nodes")
        with_score = np.flatnonzero(self._found.feature >= 0)
        fine = len(wanted) > 0 and np.isin(wanted, with_score).all() and np.all(np.diff(wanted) > 0)
        self._expect(bool(fine), "nodes with a score, once, in their order")
        records, left = self._finder.decide(self._level.nodes[wanted], self._found.take(wanted.astype(np.intp)))
        told = Array.of(records)
        return (ScoredSplitAnswer(told, Array.of(np.packbits(left[of]))) for of in row_pieces(len(left), 1))

    def divide(self, message: LevelDivision) -> Scores:
        """Follow the division of a level; return the scores of the next."""
        level, growth, active = self._level, self._growth, self._active
        divided = view(message.nodes, np.bool_, (len(level.nodes),), peer=active, what="LevelDivision.nodes")
        nodes = level.nodes[divided]
        left = np.empty(self._finder.n_rows_of(nodes), np.bool_)
        for of, piece in take_rows(self._party, active, len(left), 1, LevelDivision, message):
            left[of] = bits_of(piece.left, of.stop - of.start, active, "LevelDivision.left")
        splits = Splits.none(len(divided))
        splits.feature[divided] = 0
        splits.left_totals[divided] = totals = self._totals(message.totals, (len(nodes), 3), "LevelDivision.totals")
        going = self._finder.count_left(nodes, left)
        if not np.array_equal(totals[:, 2], going):
            raise PeerProtocolError(active, f"expected as many rows as go left - at LevelDivision.totals from {active}")
        taken = growth.take(splits)
        self._expect(taken is not None and growth.level is not None, "a division with a level below it")
        assert taken is not None
        assert growth.level is not None
        self._finder.apply(taken[0], taken[1], left)
        return self._scored(growth.level)

    def _scored(self, level: Level) -> Scores:
        """Find the own best split of every node of the level; return their gains."""
        self._level = level
        self._found = self._finder.best_splits(level)
        return Scores(Array.of(self._found.gain))

    def _totals(self, sent: Array, shape: tuple[int, ...], what: str) -> Int64:
        totals = view(sent, np.int64, shape, peer=self._active, what=what)
        if not np.all((-MOST_SUM < totals) & (totals < MOST_SUM)):
            raise PeerProtocolError(self._active, f"expected sums below 2^62 - at {what} from {self._active}")
        return totals

    def _values(self, sent: Array, of: slice, size: int, name: str) -> NDArray[np.int32] | Int64:
        """Return the values of a piece of a tree of `size` rows."""
        shape, what = (of.stop - of.start,), f"NoisyTree.{name}"
        values: NDArray[np.int32] | Int64
        if sent.dtype == "int32":
            values = view(sent, np.int32, shape, peer=self._active, what=what)
        else:
            values = view(sent, np.int64, shape, peer=self._active, what=what)
        most = MOST_SUM // max(1, size)
        self._expect(not len(values) or (values.min() > -most and values.max() < most), "sums below 2^62", name)
        return values

    def _expect(self, fine: bool, expected: str, name: str = "") -> None:
        if not fine:
            where = f" - at NoisyTree.{name} from" if name else " - from"
            raise PeerProtocolError(self._active, f"expected {expected}{where} {self._active}")


def _short(values: Int64) -> NDArray[np.signedinteger]:
    """Return int32 where all values fit: half the bytes."""
    if len(values) and (values.min() < -(2**31) or values.max() >= 2**31):
        return values
    return values.astype(np.int32)
