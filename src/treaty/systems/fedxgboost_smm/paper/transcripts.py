"""What either end's transcript says of the published matrix products: the input of `attacks`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.messaging.messages import Array, view
from treaty.messaging.transcript import Transcript
from treaty.systems.fedxgboost_smm.paper.attacks import NodeExchange
from treaty.systems.fedxgboost_smm.paper.candidates import CandidateVectors, MaskedGradients
from treaty.systems.fedxgboost_smm.paper.levels import (
    MaskedCandidates,
    NodeRows,
    NullVectors,
    PaperTree,
    Rows,
    cut_matrices,
    rows_of_nodes,
    size_of_matrices,
    widths_of_nodes,
)
from treaty.systems.vertical.encrypted_columns import BinLayout
from treaty.systems.vertical.exact_sums import array_of, content_of
from treaty.systems.vertical.named_rows import NamedNodes, NamedRows
from treaty.trees.splits import candidate_slots


@dataclass(frozen=True, slots=True, eq=False)
class SmmNode:
    """What both ends of a node's product in FedXGBoost-SMM as published have of it.

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
    """Return the products of FedXGBoost-SMM as published between the transcript's party and a peer.

    Returns them by tree, level and node, without nodes that were left out. `transcript` is of either end; raises as
    `vertical.transcripts.node_sets_from_transcript` does.
    """
    trees: list[list[list[SmmNode]]] = []
    offsets = features = np.empty(0, np.int32)
    rows, vectors, values = list[Rows](), list[NDArray[np.float64]](), np.empty(0)
    named, count = NamedNodes(n_rows, 0), 0
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
                values = _joined(values, sent.vectors, peer, entry.step)
                if len(values) == size_of_matrices(rows, widths):
                    vectors, values = cut_matrices(values, rows, widths, peer, entry.step), values[:0]
            case "MaskedCandidates":
                answer, shape = content_of(entry, MaskedCandidates), (len(rows), int(offsets[-1]))
                counts = view(answer.counts, np.int32, shape, peer=peer, what="MaskedCandidates.counts")
                slots = [candidate_slots(of_node, features, offsets) for of_node in counts]
                widths = [len(of_node) for of_node in slots]
                values = _joined(values, answer.masked, peer, entry.step)
                if len(values) == size_of_matrices(rows, widths):
                    masked, values = cut_matrices(values, rows, widths, peer, entry.step), values[:0]
                    trees[-1].append(_nodes(rows, vectors, masked, slots, np.zeros((len(rows), 2), np.int64)))
            case "MaskedGradients":
                gradients, none = content_of(entry, MaskedGradients), np.empty(0, np.int32)
                totals = view(gradients.totals, np.int64, (len(rows), 2), peer=peer, what="MaskedGradients.totals")
                widths = [2 * (of_node.shape[1] > 0) for of_node in vectors]
                values = _joined(values, gradients.masked, peer, entry.step)
                if len(values) == size_of_matrices(rows, widths):
                    masked, values = cut_matrices(values, rows, widths, peer, entry.step), values[:0]
                    trees[-1].append(_nodes(rows, vectors, masked, [none] * len(rows), totals))
    return trees


def _joined(before: NDArray[np.float64], more: Array, peer: str, step: str) -> NDArray[np.float64]:
    """Return the numbers of matrices that have come so far."""
    return np.append(before, view(more, np.float64, (None,), peer=peer, what=step))


def _nodes(
    rows: list[Rows],
    vectors: list[NDArray[np.float64]],
    masked: list[NDArray[np.float64]],
    slots: list[NDArray[np.int32]],
    totals: NDArray[np.int64],
) -> list[SmmNode]:
    return [
        SmmNode(NodeExchange(rows[k], vectors[k], masked[k]), slots[k], totals[k].astype(np.float64))
        for k in range(len(rows))
        if vectors[k].shape[1]
    ]
