"""What both published versions of FedXGBoost-SMM share: the rows of a level's nodes, and a matrix for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.systems.fedxgboost_smm.paper.matrix_product import Matrix, are_orthonormal
from treaty.systems.vertical.encrypted_columns import Bools, Int32, Int64, PassiveColumns, number_nodes
from treaty.trees.candidates import candidate_columns, candidate_slots, count_bins
from treaty.trees.columns import SumsFinder, SumsSource
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level, SplitRules

Rows = NDArray[np.intp]


class PaperTree(Message):
    """A tree begins. Tells a passive party which of its columns, int32, the tree may use."""

    columns: Array


class PaperColumns(PassiveColumns):
    """Columns of a passive party in paper mode: nodes' rows are named, sums come from matrix products."""

    def start_tree(self, grad: Int64, hess: Int64, rows: Int32 | None, columns: Int32) -> None:
        """See `SumsSource`."""
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
        """See `SplitFinder`."""
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


def name_rows(partition: RowPartition, nodes: Int32, n_rows: int, *, sampled: bool) -> Int32:
    """Return the position in `nodes` of each row's node, int32 (n_rows,), -1 for rows of none."""
    return number_nodes(*partition.rows(nodes, sampled=sampled), n_rows)


def rows_of_nodes(node_of_row: Int32, n_nodes: int) -> list[Rows]:
    """Return each node's rows, ascending."""
    order = np.argsort(node_of_row, kind="stable")
    ends = np.searchsorted(node_of_row[order], np.arange(n_nodes + 1))
    return [order[first:last] for first, last in pairwise(ends)]


def named_rows(array: Array, n_rows: int, n_nodes: int, active: str, what: str) -> list[Rows]:
    """Return the rows of each received node; reject a node without rows."""
    node_of_row = view(array, np.int32, (n_rows,), peer=active, what=what)
    if not 0 <= n_nodes <= n_rows:
        raise PeerProtocolError(active, f"expected at most {n_rows} nodes with rows - at {what} from {active}")
    if n_rows and (node_of_row.min() < -1 or node_of_row.max() >= n_nodes):
        raise PeerProtocolError(active, f"expected nodes below {n_nodes} - at {what} from {active}")
    rows = rows_of_nodes(node_of_row, n_nodes)
    if not all(len(members) for members in rows):
        raise PeerProtocolError(active, f"expected rows in each of {n_nodes} nodes - at {what} from {active}")
    return rows


# ---------------------------------------------------------------- a matrix for each node, in one array


def join_matrices(matrices: Sequence[Matrix]) -> Array:
    """Return matrices concatenated, each row by row."""
    return Array.of(np.concatenate([np.empty(0), *(matrix.ravel() for matrix in matrices)]))


def cut_matrices(
    array: Array, rows: Sequence[Rows], widths: Sequence[int] | Int32, peer: str, what: str
) -> list[Matrix]:
    """Return received matrices, one per node with a row for each of its rows; reject what is not finite."""
    sizes = [len(members) * int(width) for members, width in zip(rows, widths, strict=True)]
    values = view(array, np.float64, (sum(sizes),), peer=peer, what=what)
    if not np.isfinite(values).all():
        raise PeerProtocolError(peer, f"expected finite numbers - at {what} from {peer}")
    ends = np.cumsum([0, *sizes])
    return [
        values[first:last].reshape(len(members), -1) if first < last else np.empty((len(members), 0))
        for (first, last), members in zip(pairwise(ends), rows, strict=True)
    ]


def vectors_of_nodes(
    widths: Array, vectors: Array, rows: Sequence[Rows], most: int, peer: str, what: str
) -> list[Matrix]:
    """Return received null vectors of each node, perhaps none; reject more than `most`, or not orthonormal ones."""
    counts = view(widths, np.int32, (len(rows),), peer=peer, what=f"{what}.widths")
    sizes = np.array([len(members) for members in rows])
    if np.any(counts < 0) or np.any((counts > 0) & (counts >= sizes)):
        raise PeerProtocolError(peer, f"expected fewer vectors than rows - at {what}.widths from {peer}")
    if np.any(counts > most):
        raise PeerProtocolError(
            peer, f"expected at most {most} vectors of a node (null_vectors) - at {what}.widths from {peer}"
        )
    found = cut_matrices(vectors, rows, counts, peer, f"{what}.vectors")
    if not all(are_orthonormal(matrix) for matrix in found):
        raise PeerProtocolError(peer, f"expected orthonormal columns - at {what}.vectors from {peer}")
    return found
