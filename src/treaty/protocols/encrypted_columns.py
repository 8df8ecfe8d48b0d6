"""Columns of a passive party whose sums the active one gets under encryption: both ends of the conversation.

The active party's end is a source of sums (`trees.columns.SumsSource`), so that the grower cannot tell it from columns
at hand. What each message tells is in its docstring, the order in which they come in `secureboost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.encrypted_sums import SumsClient
from treaty.data.binning import Bins
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import DTYPES, Array, Message, view
from treaty.messaging.party import Party
from treaty.models import record_split
from treaty.privacy.commitment import COMMITMENT_BYTES, commit
from treaty.trees.ensemble import SplitTable
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level


class Layout(Message):
    """A passive party's bins: int32 first slot of each feature, bool kind. Tells how many columns and bins it has."""

    offsets: Array
    categorical: Array


class Hint(Message):
    """The cipher's answer to the set-up. Tells what the cipher's page says (OU: which bin of a feature is fullest)."""

    payload: list[Array]


class TreeStart(Message):
    """Encrypted gradients of a tree. Tells a passive party the tree's sample of rows (int32; none: all) and columns.

    The commitment tells nothing; on dispute it holds the active party to these gradients (`privacy.commitment`).
    """

    rows: Array | None
    columns: Array
    commitment: bytes
    payload: list[Array]


class TreeEnd(Message):
    """The tree is grown. Tells nothing new; the passive party lets go of its gradients."""


class SumsRequest(Message):
    """The nodes of a level. Tells a passive party which rows are in each."""

    payload: list[Array]


class Sums(Message):
    """Encrypted bin sums. Tell the active party sum of grad, hess and count of every bin of every node asked."""

    payload: list[Array]


class SplitRequest(Message):
    """Nodes the owner won: int32 features (k,), packed bits of bins left (k, 32), int32 node (or -1) per row."""

    features: Array
    left_bins: Array
    node_of_row: Array


class SplitAnswer(Message):
    """Record numbers int32 (k,) and packed bits, node after node and its rows ascending. Tells which rows go left."""

    records: Array
    left: Array


# ---------------------------------------------------------------- the active party's end


class EncryptedGradients:
    """What all passive parties are sent alike: encrypted once per tree, queried once per level.

    Attributes
    ----------
    commitment : bytes
        To the current tree's gradients.
    openings : dict of int to bytes
        Of each tree's commitment, by the tree's number within the model; for an auditor alone.
    """

    def __init__(self, party: Party, client: SumsClient, n_rows: int, first_tree: int = 0) -> None:
        self.client = client
        self.openings: dict[int, bytes] = {}
        self._next_tree = first_tree
        self._party = party
        self._told = 0
        self._n_rows = n_rows
        self._tree: NDArray[np.int64] | None = None
        self._level: Level | None = None

    def start_tree(
        self, grad: NDArray[np.int64], hess: NDArray[np.int64], rows: NDArray[np.int32] | None
    ) -> list[Array]:
        """Return the encrypted gradients of the sampled rows."""
        if self._tree is not grad:
            self._tree, self._level = grad, None
            self._ciphertexts: list[Array] = []  # the last tree's are given back before this one's are made
            self._position = None
            if rows is not None:
                self._position = np.full(self._n_rows, -1, np.int32)
                self._position[rows] = np.arange(len(rows), dtype=np.int32)
                grad, hess = grad[rows], hess[rows]
            self.commitment, self.openings[self._next_tree] = commit(grad, hess, self._next_tree)
            self._next_tree += 1
            self._ciphertexts = pack(self.client.begin_tree(grad, hess))
        return self._ciphertexts

    def told(self) -> None:
        """Note that one more peer has the tree's gradients; with the last of them the tree's round begins."""
        self._told += 1
        if self._told == len(self._party.peers):
            self._told = 0
            self._party.round += 1

    def query(self, level: Level, partition: RowPartition) -> SumsRequest:
        """Return the level's query."""
        if self._level is not level:
            self._level = level
            members, starts = partition.rows(level.asked, sampled=True)
            positions = members if self._position is None else self._position[members]
            self._query = SumsRequest(pack(self.client.query(positions, starts.astype(np.int32))))
        return self._query


class PassiveColumns:
    """The columns of a passive party, as the active party sees them: a source of sums (`trees.columns.SumsSource`)."""

    def __init__(self, party: Party, peer: str, gradients: EncryptedGradients, n_rows: int) -> None:
        self.peer = peer
        self._party = party
        self._gradients = gradients
        self._n_rows = n_rows
        layout = party.receive(peer, Layout)
        self.categorical = view(layout.categorical, np.bool_, (None,), peer=peer, what="Layout.categorical")
        n_features = len(self.categorical)
        self.offsets = view(layout.offsets, np.int32, (n_features + 1,), peer=peer, what="Layout.offsets")
        sizes = np.diff(self.offsets)
        if self.offsets[0] != 0 or np.any(sizes < 1) or np.any(sizes > 256):
            raise PeerProtocolError(peer, f"expected 1 to 256 slots per feature - at Layout.offsets from {peer}")
        hint = party.receive(peer, Hint)
        gradients.client.accept_hint(peer, unpack(hint.payload, peer, "Hint"), self.offsets)

    def start_tree(
        self,
        grad: NDArray[np.int64],
        hess: NDArray[np.int64],
        rows: NDArray[np.int32] | None,
        columns: NDArray[np.int32],
    ) -> None:
        """See `SumsSource`."""
        sample = None if rows is None else Array.of(rows)
        ciphertexts = self._gradients.start_tree(grad, hess, rows)
        self._party.send(self.peer, TreeStart(sample, Array.of(columns), self._gradients.commitment, ciphertexts))
        self._gradients.told()

    def end_tree(self) -> None:
        """See `SumsSource`."""
        self._party.send(self.peer, TreeEnd())

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        """See `SumsSource`."""
        self._totals = level.asked_totals
        self._party.send(self.peer, self._gradients.query(level, rows))

    def sums(self) -> NDArray[np.int64]:
        """See `SumsSource`: decrypt the answer."""
        answer = self._party.receive(self.peer, Sums)
        return self._gradients.client.open(self.peer, unpack(answer.payload, self.peer, "Sums"), self._totals)

    def ask_left(
        self,
        features: NDArray[np.int32],
        left_bins: NDArray[np.bool_],
        rows: NDArray[np.int32],
        starts: NDArray[np.int64],
    ) -> None:
        """See `SumsSource`."""
        node_of_row = np.full(self._n_rows, -1, np.int32)
        node_of_row[rows] = np.repeat(np.arange(len(features), dtype=np.int32), np.diff(starts))
        self._asked = rows, starts
        packed = np.packbits(left_bins, axis=1)
        self._party.send(self.peer, SplitRequest(Array.of(features), Array.of(packed), Array.of(node_of_row)))

    def left(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """See `SumsSource`."""
        rows, starts = self._asked
        answer = self._party.receive(self.peer, SplitAnswer)
        records = view(answer.records, np.int32, (len(starts) - 1,), peer=self.peer, what="SplitAnswer.records")
        if np.any(records < 0):
            raise PeerProtocolError(self.peer, f"expected record numbers from 0 - at SplitAnswer from {self.peer}")
        packed = view(answer.left, np.uint8, (-(-len(rows) // 8),), peer=self.peer, what="SplitAnswer.left")
        bits = np.unpackbits(packed, count=len(rows)).astype(np.bool_)
        left = np.empty(len(rows), np.bool_)  # the answer is in ascending order of rows, the partition need not be
        for first, last in pairwise(starts):
            left[first + np.argsort(rows[first:last], kind="stable")] = bits[first:last]
        return records, left


# ---------------------------------------------------------------- the owner's end


@dataclass(slots=True)
class TreeOrder:
    """What the active party may ask of an owner, and when: within a tree, per level sums and then at most one split.

    Parameters
    ----------
    lead : str
        The active party.
    max_depth : int
    fewest_rows : int
        Least rows of a child, so that a node that is split has twice as many.
    """

    lead: str
    max_depth: int
    fewest_rows: int
    _growing: bool = False
    _levels: int = 0
    _may_split: bool = False

    def start(self) -> None:
        """Take note of `TreeStart`."""
        self._check(not self._growing, "TreeEnd before the next TreeStart")
        self._growing, self._levels, self._may_split = True, 0, False

    def end(self) -> None:
        """Take note of `TreeEnd`."""
        self._check(self._growing, "TreeStart before TreeEnd")
        self._growing = False

    def sums(self) -> None:
        """Take note of `SumsRequest`."""
        self._check(self._growing and self._levels < self.max_depth, f"{self.max_depth} SumsRequests in a tree at most")
        self._levels += 1
        self._may_split = True

    def split(self, request: SplitRequest) -> None:
        """Take note of `SplitRequest`."""
        self._check(self._growing and self._may_split, "SumsRequest before SplitRequest, and one of it")
        self._may_split = False
        node_of_row = view(request.node_of_row, np.int32, (None,), peer=self.lead, what="SplitRequest.node_of_row")
        sizes = np.bincount(node_of_row[node_of_row >= 0], minlength=1)
        self._check(bool(np.all(sizes >= 2 * self.fewest_rows)), f"nodes of {2 * self.fewest_rows} rows at least")

    def _check(self, fine: bool, expected: str) -> None:
        if not fine:
            raise PeerProtocolError(self.lead, f"expected {expected} - from {self.lead}")


def checked_sample(
    start: TreeStart, lead: str, n_rows: int, n_features: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the tree's rows and columns, ascending numbers within the table."""
    if len(start.commitment) != COMMITMENT_BYTES:
        raise PeerProtocolError(lead, f"expected {COMMITMENT_BYTES} bytes - at TreeStart.commitment from {lead}")
    if start.rows is None:
        rows = np.arange(n_rows, dtype=np.int32)
    else:
        rows = view(start.rows, np.int32, (None,), peer=lead, what="TreeStart.rows")
    columns = view(start.columns, np.int32, (None,), peer=lead, what="TreeStart.columns")
    for name, values, limit in (("rows", rows, n_rows), ("columns", columns, n_features)):
        if len(values) and (values[0] < 0 or values[-1] >= limit or np.any(np.diff(values) <= 0)):
            raise PeerProtocolError(lead, f"expected ascending numbers below {limit} - at TreeStart.{name} from {lead}")
    return rows, columns


def divide(request: SplitRequest, lead: str, codes: NDArray[np.uint8], bins: Bins, splits: SplitTable) -> SplitAnswer:
    """Look up each node's split, write its record, decide its rows (paper, Algorithm 2)."""
    features = view(request.features, np.int32, (None,), peer=lead, what="SplitRequest.features")
    k = len(features)
    packed = view(request.left_bins, np.uint8, (k, 32), peer=lead, what="SplitRequest.left_bins")
    node_of_row = view(request.node_of_row, np.int32, (len(codes),), peer=lead, what="SplitRequest.node_of_row")
    if np.any(features < 0) or np.any(features >= codes.shape[1]):
        raise PeerProtocolError(lead, f"expected features below {codes.shape[1]} - at SplitRequest from {lead}")
    if np.any(node_of_row < -1) or np.any(node_of_row >= k):
        raise PeerProtocolError(lead, f"expected nodes below {k} - at SplitRequest.node_of_row from {lead}")
    left_bins = np.unpackbits(packed, axis=1).astype(np.bool_)
    for feature, going in zip(features, left_bins, strict=True):
        present = going[: bins.n_bins[feature]]
        threshold = bins.cuts[feature] is not None
        if not present.any() or (threshold and not present[: np.count_nonzero(present)].all()):
            raise PeerProtocolError(
                lead, f"expected the lowest bins to go left - at SplitRequest.left_bins from {lead}"
            )
    rows = np.argsort(node_of_row, kind="stable")[np.count_nonzero(node_of_row < 0) :]
    node = node_of_row[rows]
    left = left_bins[node, codes[rows, features[node]]]
    records = [record_split(splits, bins, int(f), going) for f, going in zip(features, left_bins, strict=True)]
    return SplitAnswer(Array.of(np.array(records, np.int32)), Array.of(np.packbits(left)))


# ---------------------------------------------------------------- both


def pack(payload: Sequence[NDArray]) -> list[Array]:  # type: ignore[type-arg]
    """Wrap a cipher's arrays for sending."""
    return [Array.of(values) for values in payload]


def unpack(payload: Sequence[Array], peer: str, what: str) -> list[NDArray]:  # type: ignore[type-arg]
    """View a cipher's arrays, whose shapes and values the cipher itself checks."""
    for k, array in enumerate(payload):
        if array.dtype not in DTYPES:
            raise PeerProtocolError(
                peer, f"expected an element type of {sorted(DTYPES)} - at {what}.payload[{k}] from {peer}"
            )
    return [
        view(array, np.dtype(array.dtype), (None,) * len(array.shape), peer=peer, what=f"{what}.payload[{k}]")
        for k, array in enumerate(payload)
    ]
