"""FedXGBoost-SMM, version 1, as published: the active party sends null vectors of its gradients and gets sums.

`NodeRows` and `NullVectors` go to all passive parties alike, once per level; each answers `MaskedCandidates`. The
steps are those of Le et al. 2021; what they give away is in `attacks`.
"""

from __future__ import annotations

import logging

import numpy as np

from treaty.crypto.keystream import Keystream
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.systems.fedxgboost_smm.paper.levels import (
    NodeRows,
    NullVectors,
    OwnColumns,
    PaperColumns,
    PaperFinder,
    every_node,
    send_matrices,
    take_matrices,
    take_vectors,
    tell_rows,
    told_rows,
)
from treaty.systems.fedxgboost_smm.paper.matrix_product import Sizes, chosen, null_vectors, product, response
from treaty.systems.vertical.encrypted_columns import Int32, Int64
from treaty.trees.candidates import bin_sums, candidate_slots, undivided, whole_numbers
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level, Splits

logger = logging.getLogger(__name__)


class MaskedCandidates(Message):
    """Rows in each slot, int32 (nodes, slots), and W, float64, node after node, with the columns of `candidate_slots`.

    Tells the active party the sums of grad and hess of every candidate, and, in time, which rows are in which bin. The
    paper has no counts; missing values, categories and `min_child_samples` need them. Of many numbers there are
    several, each with the next ones.
    """

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
