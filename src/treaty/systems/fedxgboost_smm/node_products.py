"""What FedXGBoost-SMM as published sends: the rows of a level's nodes, and a matrix for each node.

Both ends read and check messages here; the protocol is in `published`, its algebra in `matrix_product`. The matrices
of a level travel one after another, row by row, in messages of at most 64 MB. A node with too few rows has no matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.messages import Array, M, Message, MessageLeakage, put_together, send_rows, take_rows, view
from treaty.messaging.party import Party
from treaty.systems.fedxgboost_smm.matrix_product import Matrix, are_orthonormal, product
from treaty.systems.vertical.encrypted_columns import PassiveColumns
from treaty.systems.vertical.messages import SplitRequest, Start, send_nodes, take_nodes
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import SumsSource
from treaty.trees.growth import RowPartition
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
Widths = Sequence[int] | Int32s
"""How many columns each node's matrix has; 0: it has none."""


class PaperSetup(Start):
    """The values of one step of fixed-point grad and hess."""

    leakage: ClassVar = MessageLeakage("the order of magnitude of labels", "control")

    grad_unit: Annotated[float, msgspec.Meta(gt=0, lt=2.0**64)]
    hess_unit: Annotated[float, msgspec.Meta(gt=0, lt=2.0**64)]


class PaperTree(Message):
    """A tree begins on these columns of the receiver, int32."""

    leakage: ClassVar = MessageLeakage("which of its columns the tree may use", "control")

    columns: Array


class NodeRows(Message):
    """How many nodes a level has; `NamedRows` of them follow."""

    leakage: ClassVar = MessageLeakage("how many nodes there are", "control")

    nodes: int
    last: ClassVar[bool] = True  # a level goes at once


class NullVectors(Message):
    """Null vectors of each node's gradients: int32 how many, 0 for none, and float64 vectors, node after node.

    They follow `NodeRows`. Of many numbers there are several messages, each with the next ones.
    """

    leakage: ClassVar = MessageLeakage(
        "vectors orthogonal to gradients: with few rows, or after some trees, the labels", "exact"
    )

    widths: Array
    vectors: Array


class MaskedCandidates(Message):
    """Rows in each slot, int32 (nodes, slots), and W, float64, node after node, with the columns of `candidate_slots`.

    The paper has no counts; missing values, categories and `min_child_samples` need them. Of many numbers there are
    several messages, each with the next ones.
    """

    leakage: ClassVar = MessageLeakage("the sums of every candidate, and in time which rows are in which bin", "exact")

    counts: Array
    masked: Array


class CandidateVectors(NullVectors):
    """Null vectors of each node's candidates, as `NullVectors` are of its gradients.

    A row that is the only difference of two candidates is 0 in all vectors.
    """

    leakage: ClassVar = MessageLeakage("vectors orthogonal to every candidate's column of bins", "exact")


class MaskedGradients(Message):
    """Int64 sums of grad and hess of each node, (nodes, 2), and W, float64, node after node.

    Of many numbers there are several messages, each with the next ones.
    """

    leakage: ClassVar = MessageLeakage(
        "the sums of its candidates and of the node, and, in one tree or less, every row's gradients, so the labels",
        "exact",
    )

    totals: Array
    masked: Array


class BestGains(Message):
    """The gain of the best split of each node, float64 (nodes,), 0 for none."""

    leakage: ClassVar = MessageLeakage("the gain of the sender's best split of each node", "aggregated")

    gains: Array


class WonNodes(Message):
    """Nodes of the level, int32 (k,), whose best split is the receiver's; `NamedRows` of them follow."""

    leakage: ClassVar = MessageLeakage("which nodes its split won", "exact")

    nodes: Array


# ---------------------------------------------------------------- rows of nodes


def every_node(level: Level) -> Level:
    """Return the level with all its nodes asked about.

    None is obtained by subtraction: a node with too few rows gets no sums, and its sibling would get none either.
    """
    index = np.arange(len(level.nodes), dtype=np.int32)
    return replace(
        level, asked=level.nodes, asked_totals=level.totals, asked_index=index, parent_index=np.full_like(index, -1)
    )


def named_rows(party: Party, active: str, asked: NodeRows, n_rows: int) -> list[Rows]:
    """Receive which rows are in each node of a level, ascending; reject a node without rows."""
    if not 0 <= asked.nodes <= n_rows:
        raise PeerProtocolError(active, f"expected at most {n_rows} nodes with rows - at NodeRows from {active}")
    found = list(take_nodes(party, active, asked.nodes, n_rows))
    rows = rows_of_nodes(np.concatenate([of[0] for of in found]), np.concatenate([of[1] for of in found]), asked.nodes)
    if not all(len(members) for members in rows):
        raise PeerProtocolError(active, f"expected rows in each of {asked.nodes} nodes - at NamedRows from {active}")
    return rows


def rows_of_nodes(rows: Rows, nodes: Integers, count: int) -> list[Rows]:
    """Return the rows of each of `count` nodes, given all rows, ascending, and the node of each."""
    order = np.argsort(nodes, kind="stable")  # keeps the rows of each node ascending
    ends = np.searchsorted(nodes[order], np.arange(count + 1))
    return [rows[order[first:last]] for first, last in pairwise(ends)]


# ---------------------------------------------------------------- a matrix for each node, in pieces


def send_matrices(
    party: Party, peers: Iterable[str], matrices: Sequence[Matrix], message: Callable[[Array], Message]
) -> None:
    """Send peers matrices in as many messages as their numbers need."""
    values = np.concatenate([np.empty(0), *(matrix.ravel() for matrix in matrices)])
    for peer in peers:
        send_rows(party, peer, len(values), 64, lambda of: message(Array.of(values[of])))


def take_matrices(party: Party, peer: str, first: M, field: str, rows: Sequence[Rows], widths: Widths) -> list[Matrix]:
    """Return received matrices, of which the message `first` has the first piece; see `cut_matrices`."""
    kind, what = type(first), f"{type(first).__name__}.{field}"
    came = [
        view(getattr(piece, field), np.float64, (of.stop - of.start,), peer=peer, what=what)
        for of, piece in take_rows(party, peer, size_of_matrices(rows, widths), 64, kind, first)
    ]
    return cut_matrices(put_together(came), rows, widths, peer, what)


def size_of_matrices(rows: Sequence[Rows], widths: Widths) -> int:
    """Return how many numbers matrices have, one per node with a row for each of its rows."""
    return sum(len(members) * int(width) for members, width in zip(rows, widths, strict=True))


def cut_matrices(
    values: NDArray[np.float64], rows: Sequence[Rows], widths: Widths, peer: str, what: str
) -> list[Matrix]:
    """Return received matrices, one per node with a row for each of its rows; reject numbers that are not finite."""
    if not np.isfinite(values).all():
        raise PeerProtocolError(peer, f"expected finite numbers - at {what} from {peer}")
    ends = np.cumsum([0, *(len(members) * int(width) for members, width in zip(rows, widths, strict=True))])
    return [
        values[first:last].reshape(len(members), -1) if first < last else np.empty((len(members), 0))
        for (first, last), members in zip(pairwise(ends), rows, strict=True)
    ]


def widths_of_nodes(widths: Array, rows: Sequence[Rows], most: int, peer: str, what: str) -> Int32s:
    """Return received numbers of null vectors of each node; reject more than `most`, or as many as rows."""
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


# ---------------------------------------------------------------- a passive party's columns, at either end


@dataclass(frozen=True, slots=True)
class NodeCandidates:
    """A node's split candidates, see `trees.splits.candidate_columns`."""

    counts: Int32s  # (slots,) rows in each slot
    slots: Int32s  # (columns,) the slot of each column of the matrix
    matrix: Matrix  # (n_rows, columns), the paper's M


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """A passive party's binned columns."""

    codes: NDArray[np.uint8]  # (n_rows, n_features)
    offsets: Int32s  # (n_features + 1,)
    categorical: Flags  # (n_features,)

    def candidates(self, rows: Rows, features: Int32s) -> NodeCandidates:
        """Return the candidates of a node's rows among some features."""
        codes = self.codes[rows]
        counts = count_bins(codes, features, self.offsets)
        slots = candidate_slots(counts, features, self.offsets)
        return NodeCandidates(counts, slots, candidate_columns(codes, slots, self.offsets, self.categorical))


class CandidateSums(PassiveColumns):
    """A passive party's columns in version 1, as the active party sees them: a source of sums."""

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        self.features = columns
        self._party.send(self.peer, PaperTree(Array.of(columns)))

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        """Keep the nodes' totals; null vectors go to all parties alike."""
        self._totals = level.asked_totals

    def expect(self, rows: Sequence[Rows], gradients: Sequence[Matrix], asked: Flags) -> None:
        """Take the rows and the gradients V of a level's nodes, and which of them have null vectors."""
        self._rows, self._gradients, self._asked_nodes = rows, gradients, asked

    def sums(self) -> Integers:
        """Receive W of each node; return V^T W as bin sums: those of whole numbers are exact after rounding."""
        peer, what = self.peer, "MaskedCandidates.masked"
        answer = self._party.receive(peer, MaskedCandidates)
        counts = self._counts(answer.counts)
        slots = [candidate_slots(of_node, self.features, self.offsets) for of_node in counts]
        # which columns of M come back, both ends work out from the rows in each bin
        widths = [len(of_node) for of_node in slots]
        masked = take_matrices(self._party, peer, answer, "masked", self._rows, widths)
        sums = np.empty((len(counts), int(self.offsets[-1]), 3), np.int64)
        for node, totals in enumerate(self._totals):
            if not self._asked_nodes[node]:
                sums[node] = undivided(totals, self.features, self.offsets)
                continue
            # of whole numbers below 2^46, so rounding takes away what float64 added
            try:
                found = whole_numbers(product(self._gradients[node], masked[node]))
            except ValueError as error:
                raise PeerProtocolError(peer, f"{error} - at {what} from {peer}") from None
            sums[node] = bin_sums(
                found, slots[node], counts[node], totals, self.features, self.offsets, self.categorical
            )
        return sums

    def _counts(self, array: Array) -> Int32s:
        """Return rows per slot and node; reject counts that do not have each of a node's rows once for each feature."""
        shape, what = (len(self._totals), int(self.offsets[-1])), "MaskedCandidates.counts"
        counts = view(array, np.int32, shape, peer=self.peer, what=what)
        of_features = np.add.reduceat(counts.astype(np.int64), self.offsets[:-1], axis=1) if shape[1] else counts
        expected = np.zeros(of_features.shape, np.int64)
        expected[:, self.features] = (self._totals[:, 2] * self._asked_nodes)[:, None]
        if np.any(counts < 0) or not np.array_equal(of_features, expected):
            raise PeerProtocolError(self.peer, f"expected every row in one slot - at {what} from {self.peer}")
        return counts


class CandidateGains(CandidateSums):
    """A passive party's columns in version 2: a source of the best gain of each node, of which it keeps the split."""

    def best(self, n_nodes: int, source: int) -> Splits:
        """Receive gains as splits; as the owner alone knows the column, `feature` holds the node's number."""
        peer, what = self.peer, "BestGains.gains"
        gains = view(self._party.receive(peer, BestGains).gains, np.float64, (n_nodes,), peer=peer, what=what)
        if not np.all(np.isfinite(gains) & (gains >= 0.0)):
            raise PeerProtocolError(peer, f"expected gains from 0 on - at {what} from {peer}")
        found = Splits.none(n_nodes, source)
        found.gain[:] = gains
        found.feature[:] = np.where(gains > 0.0, np.arange(n_nodes), -1)
        return found

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        """Ask for the left rows of nodes, whose numbers are in `features`, as `best` has it."""
        self._asked = rows, starts
        self._party.send(self.peer, WonNodes(Array.of(features)))
        send_nodes(self._party, self.peer, rows, starts, self._n_rows)


def counted_values(sample: TreeSample) -> Integers:
    """Return grad, hess and 1 of each row, int64 (n_rows, 3), and zeros for rows outside the sample."""
    values = np.stack([sample.grad, sample.hess, np.ones_like(sample.grad)], axis=1)
    if sample.rows is not None:
        values[np.setdiff1d(np.arange(len(values)), sample.rows)] = 0
    return values


def left_totals(values: Integers, rows: RowPartition, nodes: Int32s, left: Flags) -> Integers:
    """Return the totals int64 (n_nodes, 3) of the left children."""
    members, starts = rows.rows(nodes, sampled=False)
    # a row of zeros after the last node, which `reduceat` needs where `starts` ends
    going = np.concatenate([values[members] * left[:, None], np.zeros((1, 3), np.int64)])
    found: Integers = np.add.reduceat(going, starts)[: len(nodes)]
    return found


def check_gains(
    sources: Sequence[SumsSource], totals: Integers, left: Integers, splits: Splits, rules: SplitRules
) -> None:
    """Reject rows of splits of others whose gains differ from those that their owners named."""
    # both ends compute the same operations on the same integers; processors may differ in the last bits
    fine = np.isclose(rules.gain(totals, left), splits.gain, rtol=1e-9, atol=1e-9)
    fine &= np.minimum(left, totals - left)[:, 2] >= rules.min_child_samples
    for k in splits.source[~fine]:
        source = sources[k]
        if isinstance(source, CandidateGains):
            what = f"SplitAnswer.left from {source.peer}"
            raise PeerProtocolError(source.peer, f"expected left rows with the gains it named - at {what}")


def own_splits(won: WonNodes, best: Splits, active: str) -> SplitRequest:
    """Return the best splits of the nodes that this party won."""
    what = "WonNodes.nodes"
    nodes = view(won.nodes, np.int32, (None,), peer=active, what=what)
    if np.any(nodes < 0) or np.any(nodes >= len(best.gain)) or np.any(np.diff(nodes) <= 0):
        raise PeerProtocolError(active, f"expected ascending nodes of the level - at {what} from {active}")
    splits = best.take(nodes.astype(np.intp))
    if np.any(splits.feature < 0):
        raise PeerProtocolError(active, f"expected nodes that have a split - at {what} from {active}")
    return SplitRequest(Array.of(splits.feature), Array.of(np.packbits(splits.left_bins, axis=1)))
