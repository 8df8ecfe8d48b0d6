"""What a passive party's transcript tells of the rows of nodes: the input of the attacks in `treaty.privacy`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.messages import Array, M, view
from treaty.messaging.transcript import Entry, Transcript
from treaty.systems.vertical.encrypted_columns import (
    SplitAnswer,
    SplitRequest,
    SumsPiece,
    SumsRequest,
    TreeRows,
    TreeStart,
)
from treaty.systems.vertical.named_rows import NamedNodes, NamedRows

Cells = NDArray[np.int32]


def node_sets_from_transcript(transcript: Transcript, n_rows: int) -> list[list[Cells]]:
    """Return what a passive party of SecureBoost knows of the nodes of each tree it took part in.

    Of each pair of siblings it is asked about one alone, but the other is the rest of their parent. At its own splits
    it knows both sides, for it decided them. Under a blind cipher it knows nodes at its own splits alone, and these too
    only with ``reveal="node"``.

    Returns, for each tree, ever finer partitions of the rows, int32 (n_rows,): the number of each row's node as far as
    it is known after a message, from 0, or -1 where it is not. Messages that say nothing new are left out, the root
    among them. `transcript` is the passive party's; raises ConfigError when it keeps no contents, PeerProtocolError
    when a recorded message is not what the system sends.
    """
    trees: list[list[Cells]] = []
    pieces: list[Array] = []
    rows = cells = np.arange(n_rows, dtype=np.int32)
    split, bits = NamedNodes(n_rows, 0), np.empty(0, np.bool_)
    for entry in transcript.entries:
        match entry.step:
            case "TreeStart":
                sample = content_of(entry, TreeStart).rows
                rows = np.arange(n_rows, dtype=np.int32) if sample is None else array_of(entry, sample, "rows", None)
                cells = np.zeros(n_rows, np.int32)
                trees.append([])
            case "TreeRows" if (more := content_of(entry, TreeRows).rows) is not None:
                rows = np.append(rows, array_of(entry, more, "rows", None))
            case "SumsPiece" if _names_rows(piece := content_of(entry, SumsPiece)):
                pieces.append(piece.payload[0])
            case "SumsRequest" if _names_rows(request := content_of(entry, SumsRequest)):
                asked, pieces = _asked([*pieces, *request.payload[:1]], entry, len(rows)), []
                finer = np.full(n_rows, -1, np.int64)
                finer[rows] = cells[rows] * (asked.max(initial=0) + 1) + asked
                cells = _keep_if_finer(trees[-1], cells, finer)
            case "SplitRequest":
                split, bits = NamedNodes(n_rows, content_of(entry, SplitRequest).features.shape[0]), bits[:0]
            case "NamedRows":
                split.add(content_of(entry, NamedRows), entry.peer)
            case "SplitAnswer":  # our own, to the request before it
                left = np.frombuffer(content_of(entry, SplitAnswer).left.data, np.uint8)
                bits = np.append(bits, np.unpackbits(left))
                if len(bits) >= len(split.rows):
                    finer = cells.astype(np.int64)
                    finer[split.rows] = n_rows + 2 * split.nodes + bits[: len(split.rows)]
                    cells = _keep_if_finer(trees[-1], cells, finer)
    return trees


def _keep_if_finer(tree: list[Cells], cells: Cells, finer: NDArray[np.int64]) -> Cells:
    """Return the cells renumbered; add them to the tree's partitions if they are more than before."""
    known = finer >= 0
    numbered = np.full(len(cells), -1, np.int32)
    numbered[known] = np.unique(finer[known], return_inverse=True)[1]
    if numbered.max(initial=-1) > cells.max(initial=-1):
        tree.append(numbered)
    return numbered


def _names_rows(request: SumsRequest | SumsPiece) -> bool:
    """Whether a query says which rows are in its nodes: under a blind cipher it has a vector per node instead."""
    return not request.payload or len(request.payload[0].shape) == 1


def _asked(pieces: list[Array], entry: Entry, n_sampled: int) -> NDArray[np.int64]:
    """Return 1 + the asked node of each sampled row, 0 for rows of no asked node."""
    dtype = np.uint16 if any(piece.dtype == "uint16" for piece in pieces) else np.uint8
    what = "SumsRequest.payload[0]"
    parts = [view(piece, dtype, (None,), peer=entry.peer, what=what) for piece in pieces]
    slots = np.concatenate([np.empty(0, dtype), *parts]).astype(np.int64)
    if len(slots) != n_sampled:
        raise PeerProtocolError(
            entry.peer, f"expected {n_sampled} rows, got {len(slots)} - at {what} from {entry.peer}"
        )
    return np.where(slots == np.iinfo(dtype).max, 0, slots + 1)


def content_of(entry: Entry, kind: type[M]) -> M:
    """Return a recorded message; raise ConfigError when the transcript keeps no contents."""
    message = entry.message(kind)
    if message is None:
        raise ConfigError(f"expected a transcript with contents, got none - at {entry.step} with {entry.peer}")
    return message


def array_of(entry: Entry, array: Array, field: str, length: int | None) -> Cells:
    """Return an int32 field of a recorded message, checked."""
    return view(array, np.int32, (length,), peer=entry.peer, what=f"{entry.step}.{field}")
