"""Attacks on the messages of FedXGBoost-SMM as published, which make paper mode insecure.

A party that sent null vectors U (n, r) of a matrix of its own gets W = D - Z (Z^T D) for the other's matrix D (n, c),
where Z is some of U's columns. In version 1, D is a passive party's candidates (0 and 1); the active party attacks W,
the passive party U. In version 2, D is the gradients, and the passive party attacks W. `products_from_transcript` reads
both from what either end recorded.

References
----------
Le et al., "FedXGBoost", 2021 (arXiv 2106.10662); Karr et al., Journal of Official Statistics 25(1), 2009.
Zadik, Song, Wein, Bruna, "Lattice-Based Methods Surpass Sum-of-Squares in Clustering", COLT 2022, on vectors of two
values in subspaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.messaging.messages import Array, view
from treaty.messaging.transcript import Transcript
from treaty.systems.fedxgboost_smm.node_products import (
    CandidateVectors,
    MaskedCandidates,
    MaskedGradients,
    NodeRows,
    NullVectors,
    PaperTree,
    Rows,
    cut_matrices,
    rows_of_nodes,
    size_of_matrices,
    widths_of_nodes,
)
from treaty.systems.vertical.exact_sums import array_of, content_of
from treaty.systems.vertical.messages import BinLayout, NamedNodes, NamedRows
from treaty.trees.splits import candidate_slots

Matrix = NDArray[np.float64]

_ZERO = 1e-9  # of a product with W, relative to W
_KNOWN = 1e-6  # error with which a row counts as found


@dataclass(frozen=True, slots=True, eq=False)
class NodeExchange:
    """One node's exchange, as seen by the party that sent null vectors."""

    rows: NDArray[np.intp]  # (n,) the node's rows
    vectors: Matrix  # (n, r) all vectors that were sent
    masked: Matrix  # (n, c) the answer W

    @property
    def used(self) -> Matrix:
        """Z, the vectors that the answer was made with, float64 (n, r'): secret according to the paper."""
        return self.vectors[:, vectors_used(self)]


def vectors_used(answered: NodeExchange) -> NDArray[np.bool_]:
    """Return which vectors are in Z, bool (r,): those orthogonal to W."""
    seen = np.abs(answered.vectors.T @ answered.masked).max(axis=1, initial=0.0)
    used: NDArray[np.bool_] = seen <= _ZERO * np.abs(answered.masked).max(initial=0.0) * np.sqrt(len(answered.masked))
    return used


def shown_as_they_are(answered: NodeExchange) -> NDArray[np.bool_]:
    """Return which rows of W are the other party's own, bool (n,): those that are zero in all vectors."""
    shown: NDArray[np.bool_] = np.einsum("ij,ij->i", answered.vectors, answered.vectors) <= 1e-20
    return shown


def rounded(answered: NodeExchange, values: tuple[float, float] = (0.0, 1.0), steps: int = 1) -> Matrix:
    """Guess a matrix of two known values by rounding W, float64 (n, c).

    `values` are 0 and 1 for candidates, the two gradients for a first tree. W lacks the matrix's projection on Z: each
    step of iterative decoding adds that of the rounded matrix and rounds again; 0 steps round W alone.
    """
    low, high = values
    used = answered.used

    def nearest(matrix: Matrix) -> Matrix:
        return np.where(matrix > (low + high) / 2, high, low)

    guess = nearest(answered.masked)
    for _ in range(steps):
        guess = nearest(answered.masked + used @ (used.T @ guess))
    return guess


def solved(answers: Sequence[NodeExchange], n_rows: int) -> tuple[Matrix, NDArray[np.bool_]]:
    """Solve for a matrix that stayed the same over several answers: candidates over trees, gradients over levels.

    Each answer says (I - Z Z^T) D = W for its rows. The sum of the equations has n_rows unknowns; with random Z of a
    share s of the rows, 1 / (1 - s) answers determine them. Returns float64 (n_rows, c) and which rows are determined.
    """
    columns = answers[0].masked.shape[1]
    # normal equations: I - Z Z^T is a projection, so its sum over answers is positive once every direction was seen
    left, right = np.zeros((n_rows, n_rows)), np.zeros((n_rows, columns))
    for answered in answers:
        used = answered.used
        left[np.ix_(answered.rows, answered.rows)] -= used @ used.T
        left[answered.rows, answered.rows] += 1.0
        right[answered.rows] += answered.masked
    probe = np.random.default_rng(0).normal(size=(n_rows, 1))  # found again where a row is determined
    both = np.concatenate([right, left @ probe], axis=1)
    left[np.diag_indices(n_rows)] += 1e-13
    found = np.linalg.solve(left, both)
    return found[:, :-1], np.abs(found[:, -1] - probe[:, 0]) <= _KNOWN


def from_totals(answered: NodeExchange, totals: NDArray[np.float64]) -> Matrix:
    """Solve for the gradients of a node, float64 (n, c), where one null vector was sent and the totals are known.

    A passive party may pretend to have n - 1 columns, which have one null vector; the active party cannot check that. W
    then lacks one number per column, which follows from the totals.
    """
    (vector,) = answered.used.T
    missing = (totals - answered.masked.sum(axis=0)) / vector.sum()
    found: Matrix = answered.masked + vector[:, None] * missing
    return found


def left_over(vectors: Matrix, seed: int = 0) -> Matrix:
    """Return an orthonormal basis of the columns that null vectors are orthogonal to, float64 (n, n - r)."""
    rng, (n_rows, sent) = np.random.default_rng(seed), vectors.shape
    basis: Matrix = rng.normal(size=(n_rows, n_rows - sent))
    for _ in range(2):  # one pass loses half the digits where vectors are many
        basis = np.linalg.qr(basis - vectors @ (vectors.T @ basis)).Q
    return basis


def two_valued(basis: Matrix, tries: int = 60, steps: int = 200, seed: int = 0) -> NDArray[np.float64]:
    """Find a column of two values, float64 (n,) up to its sign, in the span of an orthonormal `basis` (n, dimensions).

    In the first tree gradients have two values, one per class, and are orthogonal to the null vectors that a passive
    party gets. Where few other columns are (`left_over`), two-valued ones are among those whose skewness or kurtosis is
    furthest from a normal number's; fixed-point iterations from `tries` random starts find these. (With one row in five
    of the other value there is skewness but no kurtosis, with half of them the reverse.) Two-valued columns alone have
    a kurtosis of 1 plus the square of skewness.
    """
    rng, n_rows = np.random.default_rng(seed), len(basis)
    of_constant = np.linalg.qr(basis.sum(axis=0)[:, None], mode="complete")[0]
    basis = basis @ of_constant[:, 1:] * np.sqrt(n_rows)  # leaves out the constant column: first hessians
    found = np.concatenate(
        [basis @ _turned(basis, rng.normal(size=(basis.shape[1], tries)), power, steps) for power in (2, 3)], axis=1
    )
    more = (found**4).mean(axis=0) - (found**3).mean(axis=0) ** 2
    best: NDArray[np.float64] = found[:, np.argmin(more)]
    return best


def _turned(basis: Matrix, directions: Matrix, power: int, steps: int) -> Matrix:
    """Turn directions, a column each, towards skewness (power 2) or kurtosis (3) by fixed-point iteration."""
    for _ in range(steps):
        directions = directions / np.linalg.norm(directions, axis=0)
        columns = basis @ directions
        moved = basis.T @ (columns * columns if power == 2 else columns * columns * columns) / len(basis)
        directions = moved if power == 2 else moved - 3.0 * directions
    turned: Matrix = directions / np.linalg.norm(directions, axis=0)
    return turned


# ---------------------------------------------------------------- from transcripts


@dataclass(frozen=True, slots=True, eq=False)
class SmmNode:
    """What both ends have of a node's product.

    Attributes
    ----------
    answered : NodeExchange
        Rows, null vectors and what came back for them.
    slots : int (columns,)
        Version 1: which slot each column that came back is about.
    totals : float64 (2,)
        Version 2: sums of grad and of hess, which came along.
    """

    answered: NodeExchange
    slots: NDArray[np.int32]
    totals: NDArray[np.float64]


def products_from_transcript(transcript: Transcript, peer: str, n_rows: int) -> list[list[list[SmmNode]]]:
    """Return the products between the transcript's party and a peer, by tree, level and node.

    Nodes without a product are left out. `transcript` is of either end. Raises ConfigError if it was recorded without
    contents.
    """
    trees: list[list[list[SmmNode]]] = []
    offsets = features = np.empty(0, np.int32)
    rows, vectors, pending = list[Rows](), list[Matrix](), np.empty(0)
    named, count = NamedNodes(n_rows, 0), 0

    def whole(step: str, more: Array, widths: Sequence[int]) -> list[Matrix] | None:
        """Add some numbers of a level's matrices; return these once the last has arrived."""
        nonlocal pending
        pending = np.append(pending, view(more, np.float64, (None,), peer=peer, what=step))
        if len(pending) != size_of_matrices(rows, widths):
            return None
        found, pending = cut_matrices(pending, rows, widths, peer, step), pending[:0]
        return found

    def add(masked: list[Matrix] | None, slots: list[NDArray[np.int32]], totals: NDArray[np.int64]) -> None:
        if masked is not None:
            nodes = [k for k in range(len(rows)) if vectors[k].shape[1]]
            trees[-1].append([
                SmmNode(NodeExchange(rows[k], vectors[k], masked[k]), slots[k], totals[k].astype(np.float64))
                for k in nodes
            ])  # fmt: skip

    for entry in transcript.entries:
        if entry.peer != peer:
            continue
        match entry.step:
            case "BinLayout":
                offsets = array_of(entry, content_of(entry, BinLayout).offsets, "offsets", None)
            case "PaperTree":
                features = array_of(entry, content_of(entry, PaperTree).columns, "columns", None)
                trees.append([])
            case "NodeRows":
                count = content_of(entry, NodeRows).nodes
                named, rows = NamedNodes(n_rows, count), []
            case "NamedRows" if not rows:
                named.add(content_of(entry, NamedRows), peer)
            case "NullVectors" | "CandidateVectors":
                sent = content_of(entry, NullVectors if entry.step == "NullVectors" else CandidateVectors)
                rows = rows or rows_of_nodes(named.rows, named.nodes, count)
                widths = widths_of_nodes(sent.widths, rows, n_rows, peer, entry.step).tolist()
                vectors = whole(entry.step, sent.vectors, widths) or vectors
            case "MaskedCandidates":
                answer, shape = content_of(entry, MaskedCandidates), (len(rows), int(offsets[-1]))
                counts = view(answer.counts, np.int32, shape, peer=peer, what="MaskedCandidates.counts")
                slots = [candidate_slots(of_node, features, offsets) for of_node in counts]
                masked = whole(entry.step, answer.masked, [len(of_node) for of_node in slots])
                add(masked, slots, np.zeros((len(rows), 2), np.int64))
            case "MaskedGradients":
                gradients = content_of(entry, MaskedGradients)
                totals = view(gradients.totals, np.int64, (len(rows), 2), peer=peer, what="MaskedGradients.totals")
                masked = whole(entry.step, gradients.masked, [2 * (of_node.shape[1] > 0) for of_node in vectors])
                add(masked, [np.empty(0, np.int32)] * len(rows), totals)
    return trees
