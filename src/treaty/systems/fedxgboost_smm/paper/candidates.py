"""FedXGBoost-SMM, version 2, as published: passive parties send null vectors of their candidates and get sums.

Each computes the gains of its own candidates and tells only the best. Messages of a level: `NodeRows` to all passive
parties, `CandidateVectors` back, `MaskedGradients` to each, `BestGains` back; `WonNodes` to the owners of winning
splits, `SplitAnswer` back. The steps are those of Le et al. 2021; what they give away is in `attacks`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.errors import PeerProtocolError
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.systems.fedxgboost_smm.matrix_product import (
    Matrix,
    Sizes,
    chosen,
    disguised,
    empty_rows,
    null_vectors,
    product,
    response,
    single_entries,
)
from treaty.systems.fedxgboost_smm.paper.levels import (
    Candidates,
    NodeRows,
    NullVectors,
    OwnColumns,
    PaperColumns,
    PaperFinder,
    Rows,
    every_node,
    send_matrices,
    take_matrices,
    take_vectors,
    tell_rows,
    told_rows,
)
from treaty.systems.vertical.column_owner import SplitOwner
from treaty.systems.vertical.encrypted_columns import Bools, Int32, Int64, SplitAnswer, SplitRequest
from treaty.systems.vertical.named_rows import send_nodes, take_nodes
from treaty.systems.vertical.passive import TreeLimits
from treaty.trees.columns import SumsSource
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level, SplitRules, Splits, best_of, bin_sums, scan, undivided, whole_numbers

logger = logging.getLogger(__name__)

_SAME_GAIN = 1e-9


class CandidateVectors(NullVectors):
    """Null vectors of each node's candidates, as `NullVectors` are of its gradients.

    Tell the active party that every candidate's column is orthogonal to them. A row that is the only difference of two
    candidates is 0 in all vectors.
    """

    leakage: ClassVar = MessageLeakage("vectors orthogonal to every candidate's column of bins", "exact")


class MaskedGradients(Message):
    """Int64 sums of grad and hess of each node, (nodes, 2), and W, float64, node after node.

    Tells a passive party the sums of grad and hess of its candidates and of the node, and, in one tree or less, the
    gradients of every row, so the labels. Of many numbers there are several, each with the next ones.
    """

    leakage: ClassVar = MessageLeakage(
        "the sums of its candidates and of the node, and, in one tree or less, every row's gradients, so the labels",
        "exact",
    )

    totals: Array
    masked: Array


class BestGains(Message):
    """The gain of the best split of each node, float64 (nodes,), 0 for none. Tells the active party just that."""

    leakage: ClassVar = MessageLeakage("the gain of the sender's best split of each node", "aggregated")

    gains: Array


class WonNodes(Message):
    """Nodes of the level, int32 (k,), whose best split is the receiver's; `NamedRows` of them follow."""

    leakage: ClassVar = MessageLeakage("which nodes its split won", "exact")

    nodes: Array


class CandidatesByProduct(PaperColumns):
    """The columns of a passive party as the active party sees them: a source of best gains.

    `most_vectors` are those a node may have.
    """

    def __init__(self, party: Party, peer: str, n_rows: int, most_vectors: int) -> None:
        super().__init__(party, peer, n_rows)
        self._most = most_vectors

    def respond(self, rows: Sequence[Rows], gradients: Int64) -> None:
        """Receive null vectors of each node; answer with the masked gradients of its rows (paper, steps 4 and 5).

        Raises PeerProtocolError when a row of U U^T has a single non-zero, as the paper does, or U is not orthonormal.
        """
        peer, random = self.peer, Keystream()
        vectors = take_vectors(self._party, peer, self._party.receive(peer, CandidateVectors), rows, self._most)
        totals, masked, shown = np.zeros((len(rows), 2), np.int64), [], 0
        for node, (members, of_node) in enumerate(zip(rows, vectors, strict=True)):
            if not of_node.shape[1]:
                continue
            if single_entries(of_node).any():
                raise PeerProtocolError(
                    peer, f"expected no row of U U^T with a single non-zero - at CandidateVectors.vectors from {peer}"
                )
            shown += int(empty_rows(of_node).sum())
            totals[node] = gradients[members].sum(axis=0)
            masked.append(response(gradients[members].astype(np.float64), chosen(of_node, random)))
        if shown:
            logger.info("gradients of %d rows reach %s as they are: candidates single them out", shown, peer)
        send_matrices(self._party, [peer], masked, lambda values: MaskedGradients(Array.of(totals), values))

    def best(self, n_nodes: int, source: int) -> Splits:
        """Return the best split of each node; its owner tells only the gain."""
        peer, what = self.peer, "BestGains.gains"
        gains = view(self._party.receive(peer, BestGains).gains, np.float64, (n_nodes,), peer=peer, what=what)
        if not np.all(np.isfinite(gains) & (gains >= 0.0)):
            raise PeerProtocolError(peer, f"expected gains from 0 on - at {what} from {peer}")
        found = Splits.none(n_nodes, source)
        found.gain[:] = gains
        found.feature[gains > 0.0] = 0  # which one, only the owner knows
        return found

    def take(self, won: Int32, nodes: Int32, partition: RowPartition) -> None:
        """Ask for the left rows of nodes, `won` by number within the level (paper, step 7)."""
        self._asked = partition.rows(nodes, sampled=False)
        self._party.send(self.peer, WonNodes(Array.of(won)))
        send_nodes(self._party, self.peer, *self._asked, self._n_rows)

    def taken(self) -> Bools:
        """Return which rows of the nodes asked about go left, in the partition's order."""
        self._left = super().left()
        return self._left[1]

    def ask_left(self, features: Int32, left_bins: Bools, rows: Int32, starts: Int64) -> None:
        """See `SumsSource`; `take` has asked already."""

    def left(self) -> tuple[Int32, Bools]:
        return self._left


class CandidatesFinder(PaperFinder):
    """The split finder of version 2: own columns by their sums, others' by the gains that their owners tell."""

    def __init__(
        self, party: Party, sources: Sequence[SumsSource], n_rows: int, rules: SplitRules, threads: int = 1
    ) -> None:
        super().__init__(party, sources, n_rows, rules, threads)
        self._others = {k: source for k, source in enumerate(sources) if isinstance(source, CandidatesByProduct)}

    def start_tree(self, grad: Int64, hess: Int64, rows: Int32 | None, columns: Int32) -> Int64:
        self._values = np.stack([grad, hess, np.ones_like(grad)], axis=1)
        if rows is not None:
            self._values[np.setdiff1d(np.arange(len(grad)), rows)] = 0
        return super().start_tree(grad, hess, rows, columns)

    def best_splits(self, level: Level) -> Splits:
        """See `SplitFinder`: have every owner find its best split, then ask the winners which rows go left."""
        level = every_node(level)
        rows = tell_rows(self._party, self._rows, level.nodes, self._n_rows)
        own = [source for k, source in self._sources.items() if k not in self._others]
        for source in own:
            source.ask_sums(level, self._rows)
        for other in self._others.values():
            other.respond(rows, self._values[:, :2])
        best = best_of([
            self._others[k].best(len(level.nodes), k) if k in self._others else self._scan(k, level)
            for k in self._sources
        ])  # fmt: skip
        won = {k: np.flatnonzero((best.source == k) & (best.feature >= 0)).astype(np.int32) for k in self._others}
        for k, nodes in won.items():
            if len(nodes):
                self._others[k].take(nodes, level.nodes[nodes], self._rows)
        for k, nodes in won.items():
            if len(nodes):
                self._check(k, nodes, level, best)
        return best

    def _check(self, k: int, won: Int32, level: Level, best: Splits) -> None:
        """Receive the left rows of nodes that a party won; reject rows whose gains differ from those it named."""
        other = self._others[k]
        left = other.taken()
        rows, starts = self._rows.rows(level.nodes[won], sampled=False)
        sums = np.add.reduceat(np.concatenate([self._values[rows] * left[:, None], np.zeros((1, 3), np.int64)]), starts)
        best.left_totals[won] = sums[: len(won)]
        totals, of_left = level.totals[won], best.left_totals[won]
        fewest = np.minimum(of_left, totals - of_left)[:, 2].min()
        same = np.allclose(self._rules.gain(totals, of_left), best.gain[won], rtol=_SAME_GAIN, atol=_SAME_GAIN)
        if not same or fewest < self._rules.min_child_samples:
            raise PeerProtocolError(
                other.peer, f"expected left rows with the gains it named - at SplitAnswer.left from {other.peer}"
            )


# ---------------------------------------------------------------- passive party


@dataclass(frozen=True, slots=True)
class _Node:
    """A node whose sums a passive party gets: its candidates, the matrix they are mixed into, their places in it."""

    candidates: Candidates
    mixed: Matrix
    places: NDArray[np.intp]
    vectors: Matrix


class CandidatesOwner:
    """A passive party's end: mixes its candidates, finds its best splits and decides rows at those that win."""

    def __init__(
        self, party: Party, columns: OwnColumns, owner: SplitOwner, rules: SplitRules, sizes: Sizes, threads: int = 1
    ) -> None:
        (self._active,) = party.peers
        self._party, self._columns, self._owner = party, columns, owner
        self._rules, self._sizes, self._threads = rules, sizes, threads
        self._best = Splits.none(0)

    def find(self, asked: NodeRows, features: Int32) -> None:
        """Find the best split of each node of a level with the active party's help (paper, steps 2, 3, 6 and 7)."""
        party, active, columns = self._party, self._active, self._columns
        rows = told_rows(party, active, asked, len(columns.codes))
        nodes = self._mixed(rows, features)
        widths = [0 if node is None else node.vectors.shape[1] for node in nodes]
        vectors = [node.vectors for node in nodes if node is not None]
        told = Array.of(np.array(widths, np.int32))
        send_matrices(party, [active], vectors, lambda values: CandidateVectors(told, values))
        answer = party.receive(active, MaskedGradients)
        totals = np.zeros((len(rows), 3), np.int64)
        totals[:, :2] = view(answer.totals, np.int64, (len(rows), 2), peer=active, what="MaskedGradients.totals")
        totals[:, 2] = [len(members) for members in rows]
        widths = [0 if node is None else 2 for node in nodes]
        masked = take_matrices(party, active, answer, "masked", rows, widths)
        sums = np.stack([self._sums(*of_node, features) for of_node in zip(nodes, masked, totals, strict=True)])
        self._best = scan(
            sums, totals, features, columns.offsets, columns.categorical, self._rules, threads=self._threads
        )
        party.send(active, BestGains(Array.of(self._best.gain)))

    def decide(self, won: WonNodes, limits: TreeLimits) -> Iterator[SplitAnswer]:
        """Record the splits of nodes that were won, and say which of their rows go left."""
        active, what = self._active, "WonNodes.nodes"
        nodes = view(won.nodes, np.int32, (None,), peer=active, what=what)
        if np.any(nodes < 0) or np.any(nodes >= len(self._best.gain)) or np.any(np.diff(nodes) <= 0):
            raise PeerProtocolError(active, f"expected ascending nodes of the level - at {what} from {active}")
        best = self._best.take(nodes.astype(np.intp))
        if np.any(best.feature < 0):
            raise PeerProtocolError(active, f"expected nodes that have a split - at {what} from {active}")
        request = SplitRequest(Array.of(best.feature), Array.of(np.packbits(best.left_bins, axis=1)))
        limits.split(request)
        named = take_nodes(self._party, active, len(nodes), len(self._columns.codes))
        return self._owner.divide_nodes(request, named, limits.node_sizes)

    def _mixed(self, rows: Sequence[Rows], features: Int32) -> list[_Node | None]:
        """Mix each node's candidates with random columns and draw null vectors; None for nodes with too few rows."""
        random, nodes, short = Keystream(), list[_Node | None](), 0
        for members in rows:
            candidates = self._columns.candidates(members, features)
            sizes = self._sizes.of_disguised(*candidates.matrix.shape)
            if sizes is None or not len(candidates.slots):
                short += sizes is None
                nodes.append(None)
                continue
            bits, normal, count = sizes
            mixed, places = disguised(candidates.matrix, bits, normal, random)
            nodes.append(_Node(candidates, mixed, places, null_vectors(mixed, count, random)))
        if short:
            logger.info("%d nodes have fewer rows than candidates, and get no split here", short)
        return nodes

    def _sums(self, node: _Node | None, masked: Matrix, totals: Int64, features: Int32) -> Int64:
        """Return the bin sums of a node, int64 (slots, 3), rounded to whole numbers."""
        columns = self._columns
        if node is None:
            return undivided(totals, features, columns.offsets)
        try:
            found = whole_numbers(product(node.mixed, masked)[node.places])
        except ValueError as error:
            raise PeerProtocolError(self._active, f"{error} - at MaskedGradients.masked from {self._active}") from None
        of_node = node.candidates
        return bin_sums(found.T, of_node.slots, of_node.counts, totals, features, columns.offsets, columns.categorical)
