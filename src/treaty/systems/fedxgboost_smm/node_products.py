"""Matrix products of FedXGBoost-SMM as published: their algebra, their messages, and how both ends read these.

The product hides less than it is meant to. Party A holds D_A (n, a), party B holds D_B (n, b), and rows correspond. A
draws orthonormal columns U with D_A^T U = 0 and sends them. B picks some of them, Z, and answers W = (I - Z Z^T) D_B. A
computes D_A^T W = D_A^T D_B. `treaty.attacks.hidden_values` shows what W reveals of D_B, and U of D_A.

The matrices of a level travel one after another, row by row, in messages of at most 64 MB. A node with too few rows has
no matrix. The protocol is in `published`.

References: Karr, Lin, Reiter, Sanil, "Privacy-Preserving Analysis of Vertically Partitioned Data Using Secure Matrix
Products", Journal of Official Statistics 25(1), 2009. Le et al., "FedXGBoost", 2021 (arXiv 2106.10662), whose "secure
response" is `chosen` with `response` and whose "secure kernel" is `disguised` with `null_vectors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.exchanges import send_rows, take_rows
from treaty.messaging.messages import Array, M, Message, leaks, put_together, view
from treaty.messaging.party import Party
from treaty.systems.vertical.column_owner import gains_as_splits
from treaty.systems.vertical.encrypted_columns import PassiveColumns
from treaty.systems.vertical.messages import SplitRequest, Start, send_nodes, take_nodes
from treaty.trees.columns import SumsSource
from treaty.trees.growth import RowsOfNodes
from treaty.trees.histograms import bin_sums, candidate_columns, candidate_slots, count_bins, undivided, whole_numbers
from treaty.trees.splits import Level, SplitRules, Splits

Rows = NDArray[np.intp]
Matrix = NDArray[np.float64]
Widths = Sequence[int] | Int32s
"""The number of columns of each node's matrix; 0: the node has no matrix."""

# how far U^T U may be from the identity: honest ones are within 1e-12
_ORTHONORMAL = 1e-6
# square sum of a row of U that is taken for zero, and weight off the diagonal below which a row of U U^T is single
_EMPTY, _SINGLE = 1e-20, 1e-9


def null_vectors(matrix: Matrix, count: int, random: Keystream) -> Matrix:
    """Draw orthonormal vectors, float64 (n, count), orthogonal to all columns of a matrix (n, columns) of any rank.

    Raises CryptoError unless 1 <= count <= n - columns.
    """
    rows, columns = matrix.shape
    if not 1 <= count <= rows - columns:
        raise CryptoError(f"expected 1 to {rows - columns} null vectors of {rows} rows, got {count}")
    # Q spans at least the columns of a matrix of any rank
    basis = np.linalg.qr(matrix)[0]
    vectors = normals(random, rows, count)
    # twice: after one pass many vectors are orthogonal to fewer digits than float64 has
    for _ in range(2):
        vectors = np.linalg.qr(vectors - basis @ (basis.T @ vectors))[0]
    return vectors


_DRAWS = 8  # of random columns


def disguised(matrix: Matrix, bits: int, normal: int, random: Keystream) -> tuple[Matrix, NDArray[np.intp]]:
    """Mix a matrix's columns with `bits` columns of random 0 and 1 and `normal` ones of normal numbers.

    Returns the mixed matrix, to all of which null vectors are orthogonal, and the places of the matrix's own columns.
    """
    rows, columns = matrix.shape
    drawn = np.unpackbits(np.frombuffer(random.raw(-(-rows * bits // 8)), np.uint8), count=rows * bits)
    whole = np.concatenate([matrix, drawn.reshape(rows, bits), normals(random, rows, normal)], axis=1)
    # shuffled: places would tell the matrix's own columns from the random ones
    order = np.argsort(random.bits(64, whole.shape[1])[:, 0])
    return whole[:, order], np.argsort(order)[:columns]


def hidden_among(
    matrix: Matrix, fitting: tuple[int, int, int], random: Keystream
) -> tuple[Matrix, NDArray[np.intp], Matrix] | None:
    """Return a disguised matrix, the places of the own columns and its null vectors; None if B would refuse these.

    `fitting` are how many columns of bits and of normal numbers there are, and how many null vectors.
    """
    bits, normal, count = fitting
    for _ in range(_DRAWS):
        mixed, places = disguised(matrix, bits, normal, random)
        vectors = null_vectors(mixed, count, random)
        # by chance no column of a small node has a row, which a null vector singles out
        if not single_entries(vectors).any():
            return mixed, places, vectors
    return None


def chosen(vectors: Matrix, random: Keystream) -> Matrix:
    """Pick a random number of the null vectors, from 1 to all (secure response)."""
    count = vectors.shape[1]
    picked = np.argsort(random.bits(64, count)[:, 0])[: int(random.below(count, 1)[0, 0]) + 1]
    return vectors[:, np.sort(picked)]


def response(matrix: Matrix, vectors: Matrix) -> Matrix:
    """Return W = (I - Z Z^T) D_B for D_B (n, b) and Z (n, r')."""
    # from the right: Z Z^T is n x n, and is never formed
    return matrix - vectors @ (vectors.T @ matrix)


def are_orthonormal(vectors: Matrix) -> bool:
    """Whether a received U is finite and has orthonormal columns, so that W is a projection."""
    if not np.isfinite(vectors).all():
        return False
    return bool(np.all(np.abs(vectors.T @ vectors - np.eye(vectors.shape[1])) <= _ORTHONORMAL))


def single_entries(vectors: Matrix) -> NDArray[np.bool_]:
    """Return which rows of U U^T have a single non-zero, bool (n,); B refuses these."""
    # U U^T is a projection: the squares of its row i add up to its entry (i, i), the square sum s_i of row i of U. So
    # s_i - s_i^2 is the square sum off the diagonal; where that is 0 and s_i is not, s_i is 1
    on_diagonal = np.einsum("ij,ij->i", vectors, vectors)
    single: NDArray[np.bool_] = (on_diagonal > 0.5) & (on_diagonal - on_diagonal**2 <= _SINGLE)
    return single


def empty_rows(vectors: Matrix) -> NDArray[np.bool_]:
    """Return which rows of U U^T are zero, bool (n,): W shows these rows of D_B unmasked, which the paper allows.

    In a matrix of candidates, they are the rows by which alone two candidates differ.
    """
    empty: NDArray[np.bool_] = np.einsum("ij,ij->i", vectors, vectors) <= _EMPTY
    return empty


def normals(random: Keystream, rows: int, columns: int) -> Matrix:
    """Draw standard normal numbers (Box and Muller), float64 (rows, columns)."""
    # 53 bits at the middle of their interval: never 0, which has no logarithm
    pairs = -(-rows * columns // 2)
    uniform = (random.bits(53, 2 * pairs)[:, 0].astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * np.pi * uniform[pairs:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return both[: rows * columns].reshape(rows, columns)


# ---------------------------------------------------------------- messages


@leaks("the order of magnitude of labels", "control")
class PaperSetup(Start):
    """The value of one fixed-point step of grad and of hess."""

    grad_unit: Annotated[float, msgspec.Meta(gt=0, lt=2.0**64)]
    hess_unit: Annotated[float, msgspec.Meta(gt=0, lt=2.0**64)]


@leaks("which of its columns the tree may use", "control")
class PaperTree(Message):
    """The start of a tree: the receiver's columns that it may use, int32."""

    columns: Array


@leaks("how many nodes there are", "control")
class NodeRows(Message):
    """The number of nodes of a level; their `NamedRows` follow."""

    nodes: int
    last: ClassVar[bool] = True  # a level goes at once


@leaks("vectors orthogonal to gradients: with few rows, or after some trees, the labels", "exact")
class NullVectors(Message):
    """Null vectors of each node's gradients: how many, int32 (nodes,), and the vectors, float64, node after node.

    They follow `NodeRows`. Many numbers are sent in several messages, in order, as are those of the next messages.
    """

    widths: Array
    vectors: Array


@leaks("the sums of every candidate, and in time which rows are in which bin", "exact")
class MaskedCandidates(Message):
    """Rows in each slot, int32 (nodes, slots), and W, float64, node after node, with the columns of `candidate_slots`.

    The paper has no counts; missing values, categories and `min_child_samples` need them.
    """

    counts: Array
    masked: Array


@leaks("vectors orthogonal to every candidate's column of bins", "exact")
class CandidateVectors(NullVectors):
    """Null vectors of each node's candidates; a row by which alone two candidates differ is 0 in all of them."""


@leaks(
    "the sums of its candidates and of the node, and, in one tree or less, every row's gradients, so the labels",
    "exact",
)
class MaskedGradients(Message):
    """Sums of grad and hess of each node, int64 (nodes, 2), and W, float64, node after node."""

    totals: Array
    masked: Array


@leaks("the gain of the sender's best split of each node", "aggregated")
class BestGains(Message):
    """The gain of the best split of each node, float64 (nodes,); 0: there is none."""

    gains: Array


@leaks("which nodes its split won", "exact")
class WonNodes(Message):
    """The nodes of the level, int32 (k,), whose best split is the receiver's; their `NamedRows` follow."""

    nodes: Array


# ---------------------------------------------------------------- rows of nodes, and a matrix for each


def every_node(level: Level) -> Level:
    """Return the level with all its nodes asked about."""
    # none is obtained by subtraction: a node with too few rows gets no sums, and its sibling would get none either
    index = np.arange(len(level.nodes), dtype=np.int32)
    return replace(
        level, asked=level.nodes, asked_totals=level.totals, asked_index=index, parent_index=np.full_like(index, -1)
    )


def every_column(rows: Sequence[Rows], features: Int32s) -> list[Rows]:
    """Return the rows of each product of version 2: of every node, one for each of a passive party's columns."""
    # one of all columns' candidates needs more rows than deep nodes have; a party without columns has an empty one
    return [members for members in rows for _ in range(max(1, len(features)))]


def named_rows(party: Party, active: str, asked: NodeRows, n_rows: int) -> list[Rows]:
    """Receive which rows are in each node of a level, ascending; reject a node without rows."""
    if not 0 <= asked.nodes <= n_rows:
        raise PeerProtocolError(active, f"expected at most {n_rows} nodes with rows", at="NodeRows")
    named, nodes = zip(*take_nodes(party, active, asked.nodes, n_rows), strict=True)
    rows = rows_of_nodes(np.concatenate(named), np.concatenate(nodes), asked.nodes)
    if not all(len(members) for members in rows):
        raise PeerProtocolError(active, f"expected rows in each of {asked.nodes} nodes", at="NamedRows")
    return rows


def rows_of_nodes(rows: Rows, nodes: Integers, count: int) -> list[Rows]:
    """Return the rows of each of `count` nodes, given all rows, ascending, and the node of each."""
    # a stable sort keeps the rows of each node ascending
    order = np.argsort(nodes, kind="stable")
    ends = np.searchsorted(nodes[order], np.arange(count + 1))
    return [rows[order[first:last]] for first, last in pairwise(ends)]


def send_matrices(
    party: Party, peers: Iterable[str], matrices: Sequence[Matrix], message: Callable[[Array], Message]
) -> None:
    """Send the peers matrices, in as many messages as their numbers need."""
    values = np.concatenate([np.empty(0), *(matrix.ravel() for matrix in matrices)])
    for peer in peers:
        send_rows(party, peer, len(values), 64, lambda of: message(Array.of(values[of])))


def take_matrices(party: Party, peer: str, first: M, field: str, rows: Sequence[Rows], widths: Widths) -> list[Matrix]:
    """Receive the rest of matrices whose first piece is in the message `first`; return them by node."""
    kind, what = type(first), f"{type(first).__name__}.{field}"
    came = [
        view(getattr(piece, field), np.float64, (of.stop - of.start,), peer=peer, what=what)
        for of, piece in take_rows(party, peer, int(ends_of_matrices(rows, widths)[-1]), 64, kind, first)
    ]
    return cut_matrices(put_together(came), rows, widths, peer, what)


def ends_of_matrices(rows: Sequence[Rows], widths: Widths) -> Integers:
    """Return where each node's numbers begin and end among those of a level, int64 (nodes + 1,)."""
    return np.cumsum([0, *(len(members) * int(width) for members, width in zip(rows, widths, strict=True))])


def cut_matrices(
    values: NDArray[np.float64], rows: Sequence[Rows], widths: Widths, peer: str, what: str
) -> list[Matrix]:
    """Return a level's numbers as one matrix per node, a row for each of its rows; reject what is not finite."""
    if not np.isfinite(values).all():
        raise PeerProtocolError(peer, "expected finite numbers", at=what)
    return [
        values[first:last].reshape(len(members), -1) if first < last else np.empty((len(members), 0))
        for (first, last), members in zip(pairwise(ends_of_matrices(rows, widths)), rows, strict=True)
    ]


def widths_of_nodes(widths: Array, rows: Sequence[Rows], most: int, peer: str, what: str) -> Int32s:
    """Return the number of null vectors of each node; reject more than `most`, or as many as the node has rows."""
    counts, sizes = view(widths, np.int32, (len(rows),), peer=peer, what=f"{what}.widths"), [*map(len, rows)]
    for wrong, expected in (
        (np.any(counts < 0) or np.any((counts > 0) & (counts >= sizes)), "fewer vectors than rows"),
        (np.any(counts > most), f"at most {most} vectors of a node (null_vectors)"),
    ):
        if wrong:
            raise PeerProtocolError(peer, f"expected {expected}", at=f"{what}.widths")
    return counts


def take_vectors(party: Party, peer: str, first: NullVectors, rows: Sequence[Rows], most: int) -> list[Matrix]:
    """Return the null vectors of each node; reject more than `most` of a node, and ones that are not orthonormal."""
    what = type(first).__name__
    found = take_matrices(party, peer, first, "vectors", rows, widths_of_nodes(first.widths, rows, most, peer, what))
    if not all(are_orthonormal(matrix) for matrix in found):
        raise PeerProtocolError(peer, "expected orthonormal columns", at=f"{what}.vectors")
    return found


@dataclass(frozen=True, slots=True)
class NodeCandidates:
    """A node's split candidates: rows in each slot, and M (n_rows, columns) with the slot of each column."""

    counts: Int32s
    slots: Int32s
    matrix: Matrix


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """A passive party's bins (n_rows, n_features), with the first slot of each feature."""

    codes: NDArray[np.uint8]
    offsets: Int32s
    categorical: Flags

    def candidates(self, rows: Rows, features: Int32s) -> NodeCandidates:
        """Return the candidates of a node's rows among some features."""
        codes = self.codes[rows]
        counts = count_bins(codes, features, self.offsets)
        slots = candidate_slots(counts, features, self.offsets)
        return NodeCandidates(counts, slots, candidate_columns(codes, slots, self.offsets, self.categorical))


class CandidateSums(PassiveColumns):
    """A passive party's columns in version 1, as the active party sees them: a source of sums.

    The role sets `level`: the rows and gradients V of the level's nodes, and which nodes have null vectors.
    """

    level: tuple[Sequence[Rows], Sequence[Matrix], Flags]

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        self.features = columns
        self._party.send(self.peer, PaperTree(Array.of(columns)))

    def ask_sums(self, level: Level, rows: RowsOfNodes) -> None:
        """Keep the nodes' totals; null vectors go to all parties alike."""
        self._totals = level.asked_totals

    def sums(self) -> Integers:
        """Receive W of each node; return V^T W as bin sums."""
        peer, what, (rows, gradients, asked) = self.peer, "MaskedCandidates.masked", self.level
        answer = self._party.receive(peer, MaskedCandidates)
        counts = self._counts(answer.counts, asked)
        slots = [candidate_slots(of_node, self.features, self.offsets) for of_node in counts]
        # both ends work out from the rows in each bin which columns of M come back
        masked = take_matrices(self._party, peer, answer, "masked", rows, [len(of_node) for of_node in slots])
        sums = np.empty((len(counts), int(self.offsets[-1]), 3), np.int64)
        for node, totals in enumerate(self._totals):
            if not asked[node]:
                sums[node] = undivided(totals, self.features, self.offsets)
                continue
            # the sums are whole numbers below 2^46, so rounding removes the error of float64
            try:
                found = whole_numbers(gradients[node].T @ masked[node])
            except ValueError as error:
                raise PeerProtocolError(peer, str(error), at=what) from None
            sums[node] = bin_sums(
                found, slots[node], counts[node], totals, self.features, self.offsets, self.categorical
            )
        return sums

    def _counts(self, array: Array, asked: Flags) -> Int32s:
        """Return rows per slot and node; reject counts that do not have each of a node's rows once for each feature."""
        shape, what = (len(self._totals), int(self.offsets[-1])), "MaskedCandidates.counts"
        counts = view(array, np.int32, shape, peer=self.peer, what=what)
        of_features = np.add.reduceat(counts.astype(np.int64), self.offsets[:-1], axis=1) if shape[1] else counts
        expected = np.zeros(of_features.shape, np.int64)
        expected[:, self.features] = (self._totals[:, 2] * asked)[:, None]
        if np.any(counts < 0) or not np.array_equal(of_features, expected):
            raise PeerProtocolError(self.peer, "expected every row in one slot", at=what)
        return counts


class CandidateGains(CandidateSums):
    """A passive party's columns in version 2: a source of the best gain of each node; the split stays with it."""

    def best(self, n_nodes: int, source: int) -> Splits:
        """Receive the gain of each node's best split."""
        gains = self._party.receive(self.peer, BestGains).gains
        return gains_as_splits(gains, n_nodes, source, self.peer, "BestGains.gains")

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        """Ask for the left rows of nodes, whose numbers `best` has put into `features`."""
        self._asked = rows, starts
        self._party.send(self.peer, WonNodes(Array.of(features)))
        send_nodes(self._party, self.peer, rows, starts, self._n_rows)


def check_gains(
    sources: Sequence[SumsSource], totals: Integers, left: Integers, splits: Splits, rules: SplitRules
) -> None:
    """Check that other parties' splits have the gains that their owners sent."""
    # both ends compute the same operations on the same integers; processors may differ in the last bits
    fine = np.isclose(rules.gain(totals, left), splits.gain, rtol=1e-9, atol=1e-9)
    fine &= np.minimum(left, totals - left)[:, 2] >= rules.min_child_samples
    for k in splits.source[~fine]:
        source = sources[k]
        if isinstance(source, CandidateGains):
            what = f"SplitAnswer.left from {source.peer}"
            raise PeerProtocolError(source.peer, f"expected left rows with the gain it sent - at {what}")


def own_splits(won: WonNodes, best: Splits, active: str) -> SplitRequest:
    """Return the best splits of the nodes that this party won."""
    what = "WonNodes.nodes"
    nodes = view(won.nodes, np.int32, (None,), peer=active, what=what)
    if np.any(nodes < 0) or np.any(nodes >= len(best.gain)) or np.any(np.diff(nodes) <= 0):
        raise PeerProtocolError(active, "expected ascending nodes of the level", at=what)
    splits = best.take(nodes.astype(np.intp))
    if np.any(splits.feature < 0):
        raise PeerProtocolError(active, "expected nodes that have a split", at=what)
    return SplitRequest(Array.of(splits.feature), Array.of(np.packbits(splits.left_bins, axis=1)))
