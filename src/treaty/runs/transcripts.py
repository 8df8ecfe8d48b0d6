"""What a party's transcript says: input of the attacks in `privacy` and in `fedxgboost_smm.paper`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.messaging.messages import Array, M, view
from treaty.messaging.transcript import Entry, Transcript
from treaty.systems.fedxgboost_smm.paper.attacks import NodeExchange
from treaty.systems.fedxgboost_smm.paper.candidates import CandidateVectors, MaskedGradients, NodeRows
from treaty.systems.fedxgboost_smm.paper.levels import (
    PaperTree,
    Rows,
    cut_matrices,
    rows_of_nodes,
    vectors_of_nodes,
)
from treaty.systems.fedxgboost_smm.paper.sums import MaskedCandidates, NullVectors, nodes_asked
from treaty.systems.vertical.encrypted_columns import BinLayout, SplitAnswer, SplitRequest, SumsRequest, TreeStart
from treaty.trees.candidates import candidate_slots

Cells = NDArray[np.int32]


def node_sets_from_transcript(transcript: Transcript, n_rows: int) -> list[list[Cells]]:
    """Return what a passive party of SecureBoost knows of the nodes of each tree it took part in.

    Of each pair of siblings it is asked about one alone, but the other is the rest of their parent. At its own splits
    it knows both sides, for it decided them. Under a blind cipher it knows nodes at its own splits alone, and these too
    only with ``reveal="node"``.

    Parameters
    ----------
    transcript : Transcript
        The passive party's, with contents.
    n_rows : int
        Rows of the table.

    Returns
    -------
    list of list of int32 (n_rows,)
        For each tree, ever finer partitions of the rows: the number of each row's node as far as it is known after a
        message, from 0, or -1 where it is not. Messages that say nothing new are left out, the root among them.

    Raises
    ------
    ConfigError
        When the transcript keeps no contents.
    PeerProtocolError
        When a recorded message is not what the protocol sends.
    """
    trees: list[list[Cells]] = []
    rows = cells = split = np.arange(n_rows, dtype=np.int32)
    for entry in transcript.entries:
        match entry.step:
            case "TreeStart":
                sample = _content(entry, TreeStart).rows
                rows = np.arange(n_rows, dtype=np.int32) if sample is None else _read(entry, sample, "rows", None)
                cells = np.zeros(n_rows, np.int32)
                trees.append([])
            case "SumsRequest" if _names_rows(request := _content(entry, SumsRequest)):
                asked = _asked(request, entry, len(rows))
                finer = np.full(n_rows, -1, np.int64)
                finer[rows] = cells[rows] * (asked.max(initial=0) + 1) + asked
                cells = _keep_if_finer(trees[-1], cells, finer)
            case "SplitRequest":
                named = _content(entry, SplitRequest).node_of_row
                if named is not None:
                    split = _read(entry, named, "node_of_row", n_rows)
            case "SplitAnswer":  # our own, to the request before it: bits node after node, rows ascending
                divided = np.argsort(split, kind="stable")[np.count_nonzero(split < 0) :]
                left = np.frombuffer(_content(entry, SplitAnswer).left.data, np.uint8)
                finer = cells.astype(np.int64)
                finer[divided] = n_rows + 2 * split[divided] + np.unpackbits(left, count=len(divided))
                cells = _keep_if_finer(trees[-1], cells, finer)
    return trees


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

    Parameters
    ----------
    transcript : Transcript
        Of either end, with contents.
    peer : str
    n_rows : int
        Rows of the table.

    Returns
    -------
    list of list of list of SmmNode
        Of each tree, each level and each node that was not left out.

    Raises
    ------
    ConfigError
        When the transcript keeps no contents.
    PeerProtocolError
        When a recorded message is not what the protocol sends.
    """
    trees: list[list[list[SmmNode]]] = []
    offsets = features = np.empty(0, np.int32)
    rows, vectors = list[Rows](), list[NDArray[np.float64]]()
    for entry in transcript.entries:
        if entry.peer != peer:
            continue
        match entry.step:
            case "BinLayout":
                offsets = _read(entry, _content(entry, BinLayout).offsets, "offsets", None)
            case "PaperTree":
                features = _read(entry, _content(entry, PaperTree).columns, "columns", None)
                trees.append([])
            case "NullVectors":
                asked = _content(entry, NullVectors)
                rows = rows_of_nodes(_read(entry, asked.node_of_row, "node_of_row", n_rows), nodes_asked(asked))
                vectors = vectors_of_nodes(asked.widths, asked.vectors, rows, peer, entry.step)
            case "MaskedCandidates":
                answer, shape = _content(entry, MaskedCandidates), (len(rows), int(offsets[-1]))
                counts = view(answer.counts, np.int32, shape, peer=peer, what="MaskedCandidates.counts")
                slots = [candidate_slots(of_node, features, offsets) for of_node in counts]
                widths = [len(of_node) for of_node in slots]
                masked = cut_matrices(answer.masked, rows, widths, peer, "MaskedCandidates.masked")
                trees[-1].append(_nodes(rows, vectors, masked, slots, np.zeros((len(rows), 2), np.int64)))
            case "NodeRows":
                named = _content(entry, NodeRows)
                rows = rows_of_nodes(_read(entry, named.node_of_row, "node_of_row", n_rows), named.nodes)
            case "CandidateVectors":
                sent = _content(entry, CandidateVectors)
                vectors = vectors_of_nodes(sent.widths, sent.vectors, rows, peer, entry.step)
            case "MaskedGradients":
                gradients, none = _content(entry, MaskedGradients), np.empty(0, np.int32)
                totals = view(gradients.totals, np.int64, (len(rows), 2), peer=peer, what="MaskedGradients.totals")
                widths = [2 * (of_node.shape[1] > 0) for of_node in vectors]
                masked = cut_matrices(gradients.masked, rows, widths, peer, "MaskedGradients.masked")
                trees[-1].append(_nodes(rows, vectors, masked, [none] * len(rows), totals))
    return trees


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


def _keep_if_finer(tree: list[Cells], cells: Cells, finer: NDArray[np.int64]) -> Cells:
    """Return the cells renumbered; add them to the tree's partitions if they are more than before."""
    known = finer >= 0
    numbered = np.full(len(cells), -1, np.int32)
    numbered[known] = np.unique(finer[known], return_inverse=True)[1]
    if numbered.max(initial=-1) > cells.max(initial=-1):
        tree.append(numbered)
    return numbered


def _names_rows(request: SumsRequest) -> bool:
    """Whether a query says which rows are in its nodes: under a blind cipher it has a vector per node instead."""
    return not request.payload or len(request.payload[0].shape) == 1


def _asked(request: SumsRequest, entry: Entry, n_sampled: int) -> NDArray[np.int64]:
    """Return 1 + the asked node of each sampled row, 0 for rows of no asked node."""
    node = request.payload[0]
    dtype = np.uint16 if node.dtype == "uint16" else np.uint8
    slots = view(node, dtype, (n_sampled,), peer=entry.peer, what="SumsRequest.payload[0]").astype(np.int64)
    return np.where(slots == np.iinfo(dtype).max, 0, slots + 1)


def _content(entry: Entry, kind: type[M]) -> M:
    message = entry.message(kind)
    if message is None:
        raise ConfigError(f"expected a transcript with contents, got none - at {entry.step} with {entry.peer}")
    return message


def _read(entry: Entry, array: Array, field: str, length: int | None) -> Cells:
    return view(array, np.int32, (length,), peer=entry.peer, what=f"{entry.step}.{field}")
