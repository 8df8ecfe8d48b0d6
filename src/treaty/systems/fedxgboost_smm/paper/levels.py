"""What both published versions of FedXGBoost-SMM share: the rows of a level's nodes, and a matrix for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.errors import PeerProtocolError
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, M, Message, put_together, send_rows, take_rows, view
from treaty.messaging.party import Party
from treaty.systems.fedxgboost_smm.matrix_product import (
    Matrix,
    Sizes,
    are_orthonormal,
    chosen,
    null_vectors,
    product,
    response,
)
from treaty.systems.vertical.encrypted_columns import Bools, Int32, Int64, PassiveColumns
from treaty.systems.vertical.named_rows import send_nodes, take_nodes
from treaty.trees.columns import SumsFinder, SumsSource
from treaty.trees.partition import RowPartition
from treaty.trees.splits import (
    Level,
    SplitRules,
    Splits,
    bin_sums,
    candidate_columns,
    candidate_slots,
    count_bins,
    undivided,
    whole_numbers,
)

Rows = NDArray[np.intp]


class PaperTree(Message):
    """A tree begins. Tells a passive party which of its columns, int32, the tree may use."""

    leakage: ClassVar = MessageLeakage("which of its columns the tree may use", "control")

    columns: Array


class NullVectors(Message):
    """Null vectors of each node's gradients: int32 how many, 0 for none, and float64 vectors, node after node.

    They follow `NodeRows`; of many numbers there are several, each with the next ones. Tell a passive party of its
    gradients that they are orthogonal to the vectors: with few rows, or after some trees, the labels. A node of too few
    rows has no vectors.
    """

    leakage: ClassVar = MessageLeakage(
        "vectors orthogonal to gradients: with few rows, or after some trees, the labels", "exact"
    )

    widths: Array
    vectors: Array


class PaperColumns(PassiveColumns):
    """Columns of a passive party in paper mode: nodes' rows are named, sums come from matrix products."""

    def start_tree(self, grad: Int64, hess: Int64, rows: Int32 | None, columns: Int32) -> None:
        self.features = columns
        self._party.send(self.peer, PaperTree(Array.of(columns)))


class PaperFinder(SumsFinder):
    """The split finder of paper mode, which asks about every node and subtracts none from its parent.

    Nodes with too few rows get no sums, and their siblings would get none by subtraction. `party.round` counts trees.
    """

    def __init__(
        self, party: Party, sources: Sequence[SumsSource], n_rows: int, rules: SplitRules, threads: int = 1
    ) -> None:
        super().__init__(sources, n_rows, rules, threads)
        self._party = party

    def start_tree(self, grad: Int64, hess: Int64, rows: Int32 | None, columns: Int32) -> Int64:
        totals = super().start_tree(grad, hess, rows, columns)
        self._party.round += 1
        return totals


def every_node(level: Level) -> Level:
    """Return the level with all its nodes asked about."""
    index = np.arange(len(level.nodes), dtype=np.int32)
    return replace(
        level, asked=level.nodes, asked_totals=level.totals, asked_index=index, parent_index=np.full_like(index, -1)
    )


@dataclass(frozen=True, slots=True)
class Candidates:
    """A node's split candidates, see `trees.candidates`."""

    counts: Int32  # (slots,) rows in each slot
    slots: Int32  # (columns,) the slot of each column of the matrix
    matrix: Matrix  # (n_rows, columns), the paper's M


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """A passive party's binned columns."""

    codes: NDArray[np.uint8]  # (n_rows, n_features)
    offsets: Int32  # (n_features + 1,)
    categorical: Bools  # (n_features,)

    def candidates(self, rows: Rows, features: Int32) -> Candidates:
        """Return the candidates of a node's rows among some features."""
        codes = self.codes[rows]
        counts = count_bins(codes, features, self.offsets)
        slots = candidate_slots(counts, features, self.offsets)
        return Candidates(counts, slots, candidate_columns(codes, slots, self.offsets, self.categorical))


# ---------------------------------------------------------------- rows of nodes


class NodeRows(Message):
    """How many nodes a level has; `NamedRows` of them follow, which tell a passive party which rows are in each."""

    leakage: ClassVar = MessageLeakage("how many nodes there are", "control")

    nodes: int
    last: ClassVar[bool] = True  # a level goes at once


def tell_rows(party: Party, partition: RowPartition, nodes: Int32, n_rows: int) -> list[Rows]:
    """Tell all peers which rows are in each node of a level; return them, ascending."""
    rows, starts = partition.rows(nodes, sampled=True)
    for peer in party.peers:
        party.send(peer, NodeRows(len(nodes)))
        send_nodes(party, peer, rows, starts, n_rows)
    return [np.sort(rows[first:last]).astype(np.intp) for first, last in pairwise(starts)]


def told_rows(party: Party, active: str, asked: NodeRows, n_rows: int) -> list[Rows]:
    """Receive what `tell_rows` sends; reject a node without rows."""
    if not 0 <= asked.nodes <= n_rows:
        raise PeerProtocolError(active, f"expected at most {n_rows} nodes with rows - at NodeRows from {active}")
    found = list(take_nodes(party, active, asked.nodes, n_rows))
    rows = rows_of_nodes(np.concatenate([of[0] for of in found]), np.concatenate([of[1] for of in found]), asked.nodes)
    if not all(len(members) for members in rows):
        raise PeerProtocolError(active, f"expected rows in each of {asked.nodes} nodes - at NamedRows from {active}")
    return rows


def rows_of_nodes(rows: Rows, nodes: Int64, count: int) -> list[Rows]:
    """Return the rows of each of `count` nodes, given all rows, ascending, and the node of each."""
    order = np.argsort(nodes, kind="stable")
    ends = np.searchsorted(nodes[order], np.arange(count + 1))
    return [rows[order[first:last]] for first, last in pairwise(ends)]


# ---------------------------------------------------------------- a matrix for each node, in pieces


def send_matrices(
    party: Party, peers: Iterable[str], matrices: Sequence[Matrix], message: Callable[[Array], Message]
) -> None:
    """Send peers matrices, each row by row, in as many messages as there are pieces of their numbers."""
    values = np.concatenate([np.empty(0), *(matrix.ravel() for matrix in matrices)])
    for peer in peers:
        send_rows(party, peer, len(values), 64, lambda of: message(Array.of(values[of])))


def take_matrices(
    party: Party, peer: str, first: M, field: str, rows: Sequence[Rows], widths: Sequence[int] | Int32
) -> list[Matrix]:
    """Return received matrices, of which the message `first` has the first piece; see `cut_matrices`."""
    kind, what = type(first), f"{type(first).__name__}.{field}"
    came = [
        view(getattr(piece, field), np.float64, (of.stop - of.start,), peer=peer, what=what)
        for of, piece in take_rows(party, peer, size_of_matrices(rows, widths), 64, kind, first)
    ]
    return cut_matrices(put_together(came), rows, widths, peer, what)


def size_of_matrices(rows: Sequence[Rows], widths: Sequence[int] | Int32) -> int:
    """Return how many numbers matrices have, one per node with a row for each of its rows."""
    return sum(len(members) * int(width) for members, width in zip(rows, widths, strict=True))


def cut_matrices(
    values: NDArray[np.float64], rows: Sequence[Rows], widths: Sequence[int] | Int32, peer: str, what: str
) -> list[Matrix]:
    """Return received matrices, one per node with a row for each of its rows; reject what is not finite."""
    if not np.isfinite(values).all():
        raise PeerProtocolError(peer, f"expected finite numbers - at {what} from {peer}")
    ends = np.cumsum([0, *(len(members) * int(width) for members, width in zip(rows, widths, strict=True))])
    return [
        values[first:last].reshape(len(members), -1) if first < last else np.empty((len(members), 0))
        for (first, last), members in zip(pairwise(ends), rows, strict=True)
    ]


def widths_of_nodes(widths: Array, rows: Sequence[Rows], most: int, peer: str, what: str) -> Int32:
    """Return received numbers of null vectors of each node, perhaps 0; reject more than `most`, or as many as rows."""
    counts = view(widths, np.int32, (len(rows),), peer=peer, what=f"{what}.widths")
    sizes = np.array([len(members) for members in rows])
    if np.any(counts < 0) or np.any((counts > 0) & (counts >= sizes)):
        raise PeerProtocolError(peer, f"expected fewer vectors than rows - at {what}.widths from {peer}")
    if np.any(counts > most):
        raise PeerProtocolError(
            peer, f"expected at most {most} vectors of a node (null_vectors) - at {what}.widths from {peer}"
        )
    return counts


def take_vectors(party: Party, peer: str, first: NullVectors, rows: Sequence[Rows], most: int) -> list[Matrix]:
    """Return received null vectors of each node; reject more than `most` of a node, or not orthonormal ones."""
    what = type(first).__name__
    found = take_matrices(party, peer, first, "vectors", rows, widths_of_nodes(first.widths, rows, most, peer, what))
    if not all(are_orthonormal(matrix) for matrix in found):
        raise PeerProtocolError(peer, f"expected orthonormal columns - at {what}.vectors from {peer}")
    return found


# --------- fedXGBoost-SMM, version 1, as published: the active party sends null vectors of its gradients and gets sums
#
# `NodeRows` and `NullVectors` go to all passive parties alike, once per level; each answers `MaskedCandidates`. The
# steps are those of Le et al. 2021; what they give away is in `attacks`.

logger = logging.getLogger(__name__)


class MaskedCandidates(Message):
    """Rows in each slot, int32 (nodes, slots), and W, float64, node after node, with the columns of `candidate_slots`.

    Tells the active party the sums of grad and hess of every candidate, and, in time, which rows are in which bin. The
    paper has no counts; missing values, categories and `min_child_samples` need them. Of many numbers there are
    several, each with the next ones.
    """

    leakage: ClassVar = MessageLeakage("the sums of every candidate, and in time which rows are in which bin", "exact")

    counts: Array
    masked: Array


class GradientVectors:
    """Null vectors of the gradients, which go to all passive parties alike and are drawn once per level."""

    def __init__(self, party: Party, n_rows: int, sizes: Sizes) -> None:
        self._party, self._n_rows, self._sizes = party, n_rows, sizes
        self._level: Level | None = None

    def start_tree(self, grad: Int64, hess: Int64) -> None:
        self._gradients, self._level = np.stack([grad, hess], axis=1).astype(np.float64), None

    def ask(self, level: Level, partition: RowPartition) -> None:
        """Send all peers null vectors of the level's nodes, once (paper, step 1)."""
        if self._level is level:
            return
        self._level, random = level, Keystream()
        self.rows = tell_rows(self._party, partition, level.asked, self._n_rows)
        self.matrices = [self._gradients[rows] for rows in self.rows]
        counts = [self._sizes.of_plain(*matrix.shape) for matrix in self.matrices]
        self.asked = np.array(counts) > 0
        if not self.asked.all():
            logger.info("%d nodes have too few rows for null vectors; others offer no split there", sum(~self.asked))
        vectors = [
            null_vectors(matrix, count, random)
            for matrix, count in zip(self.matrices, counts, strict=True)
            if count > 0
        ]
        widths = Array.of(np.array(counts, np.int32))
        send_matrices(self._party, self._party.peers, vectors, lambda values: NullVectors(widths, values))


class SumsByProduct(PaperColumns):
    """The columns of a passive party as the active party sees them: a source of sums."""

    def __init__(self, party: Party, peer: str, n_rows: int, shared: GradientVectors) -> None:
        super().__init__(party, peer, n_rows)
        self._shared = shared

    def start_tree(self, grad: Int64, hess: Int64, rows: Int32 | None, columns: Int32) -> None:
        super().start_tree(grad, hess, rows, columns)
        self._shared.start_tree(grad, hess)

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        self._totals = level.asked_totals
        self._shared.ask(level, rows)

    def sums(self) -> Int64:
        """Multiply gradients with the answer (paper, step 4); sums of whole numbers are exact after rounding."""
        peer, shared = self.peer, self._shared
        answer = self._party.receive(peer, MaskedCandidates)
        counts = self._counts(answer.counts)
        slots = [candidate_slots(of_node, self.features, self.offsets) for of_node in counts]
        what, widths = "MaskedCandidates.masked", [len(of_node) for of_node in slots]
        masked = take_matrices(self._party, peer, answer, "masked", shared.rows, widths)
        sums = np.empty((len(counts), int(self.offsets[-1]), 3), np.int64)
        for node, totals in enumerate(self._totals):
            if not shared.asked[node]:
                sums[node] = undivided(totals, self.features, self.offsets)
                continue
            try:
                found = whole_numbers(product(shared.matrices[node], masked[node]))
            except ValueError as error:
                raise PeerProtocolError(peer, f"{error} - at {what} from {peer}") from None
            sums[node] = bin_sums(
                found, slots[node], counts[node], totals, self.features, self.offsets, self.categorical
            )
        return sums

    def _counts(self, array: Array) -> Int32:
        """Return rows per slot and node; reject counts that do not have each of a node's rows once for each feature."""
        shape, what = (len(self._totals), int(self.offsets[-1])), "MaskedCandidates.counts"
        counts = view(array, np.int32, shape, peer=self.peer, what=what)
        of_features = np.add.reduceat(counts.astype(np.int64), self.offsets[:-1], axis=1) if shape[1] else counts
        expected = np.zeros(of_features.shape, np.int64)
        expected[:, self.features] = (self._totals[:, 2] * self._shared.asked)[:, None]
        if np.any(counts < 0) or not np.array_equal(of_features, expected):
            raise PeerProtocolError(self.peer, f"expected every row in one slot - at {what} from {self.peer}")
        return counts


class SumsFinderByProduct(PaperFinder):
    """The split finder of version 1."""

    def best_splits(self, level: Level) -> Splits:
        return super().best_splits(every_node(level))


# ---------------------------------------------------------------- passive party


def mask_candidates(
    party: Party, active: str, asked: NodeRows, columns: OwnColumns, features: Int32, most: int
) -> None:
    """Answer as a passive party: W = M - Z (Z^T M) of each node, Z some of its vectors (paper, steps 2 and 3).

    A node may have at most `most` vectors.
    """
    rows = told_rows(party, active, asked, len(columns.codes))
    vectors = take_vectors(party, active, party.receive(active, NullVectors), rows, most)
    counts, masked, random = np.zeros((len(rows), int(columns.offsets[-1])), np.int32), [], Keystream()
    for node, (members, of_node) in enumerate(zip(rows, vectors, strict=True)):
        if of_node.shape[1]:
            candidates = columns.candidates(members, features)
            counts[node] = candidates.counts
            masked.append(response(candidates.matrix, chosen(of_node, random)))
    told = Array.of(counts)
    send_matrices(party, [active], masked, lambda values: MaskedCandidates(told, values))
