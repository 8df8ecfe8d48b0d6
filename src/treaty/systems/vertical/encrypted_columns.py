"""A passive party's columns as the active party sees them: a source of sums whose answers are encrypted.

They are a `trees.columns.SumsSource`: a search for splits cannot tell them from columns at hand. The owner's end of the
conversation is in `column_owner`, the messages are in `messages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload, SumsBounds
from treaty.crypto.sums.encrypted_sums import SumsClient
from treaty.crypto.sums.lattice_sums import LatticeSumsClient
from treaty.data.binning import MOST_BINS, MOST_CATEGORIES
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers, pieces
from treaty.messaging.exchanges import take_columns, take_rows
from treaty.messaging.messages import MOST_COLUMNS, MOST_SLOTS, Array, Message, bits_of, pack, unpack, view
from treaty.messaging.party import Party
from treaty.privacy.exact_sums import commit
from treaty.systems.observers import Evidence, Observers, SidesLearned, SumsOpened
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical import messages
from treaty.trees.growth import RowsOfNodes
from treaty.trees.histograms import width_of
from treaty.trees.lockstep import LockstepRows
from treaty.trees.objectives import Objective
from treaty.trees.outputs import join_outputs, of_output
from treaty.trees.splits import Level


@dataclass(frozen=True, slots=True)
class GradientsCommitted:
    """Event: a tree's gradients are committed to; `nonce` opens the commitment."""

    nonce: bytes


class EncryptedGradients:
    """Gradients and queries that go to all passive parties alike: encrypted once per tree, asked once per level.

    `commitment` is to the current tree's gradients. Sums of many outputs are asked for one after another, which needs a
    cipher that hides nodes: its queries have the gradients in them. `lockstep` says that gradients of more than one
    dimension are of trees that grow together, not of the outputs of one.
    """

    lockstep = False

    def __init__(
        self, party: Party, client: SumsClient, n_rows: int, first_tree: int = 0, observers: Observers | None = None
    ) -> None:
        self.client, self.party, self.observers = client, party, observers or Observers()
        self._next_tree, self._n_rows = first_tree, n_rows
        self._ready = 0  # peers whose columns of the tree are known
        self._tree: Integers | None = None
        self._sampled: tuple[Integers, Integers] | None = None
        self._outputs: list[tuple[Integers, Integers]] = []
        self._columns: dict[str, Int32s] = {}
        self._level: Level | None = None

    def start_tree(self, peer: str, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        """Send one peer the tree's samples and the cipher's payload; a round begins when all peers have theirs."""
        blind = self.client.blind
        if self._tree is not grad:
            self._tree, self._level = grad, None
            self._position = None
            sampled = (grad, hess) if rows is None else (grad[..., rows], hess[..., rows])
            self._outputs = list(zip(grad, hess, strict=True)) if grad.ndim > 1 and not self.lockstep else []
            self.trees = len(grad) if grad.ndim > 1 and self.lockstep else 1
            self.commitment, nonce = commit(*sampled, self._next_tree)
            self._next_tree += self.trees
            self.observers.event(GradientsCommitted(nonce))
            # queries name sampled rows by their place in the sample, unless they hold a ciphertext for every row
            if rows is not None and not blind:
                self._position = np.full(self._n_rows, -1, np.int32)
                self._position[rows] = np.arange(len(rows), dtype=np.int32)
            self._sampled = (grad, hess) if blind else sampled
        self._columns[peer] = columns
        self._ready += 1
        if self._ready == len(self.party.peers):
            self._ready = 0
            try:
                self._start(None if blind else rows)
            except CryptoError as error:
                error.public = "its gradients cannot be encrypted; it has the details"
                raise

    def _start(self, rows: Int32s | None) -> None:
        """Send all peers the tree's start: each piece is encrypted once and goes to all of them."""
        sampled, self._sampled, sent = self._sampled, None, 0
        assert sampled is not None
        for number, piece in enumerate(self.client.begin_tree(*(self._outputs or [sampled])[0])):
            packed, of_piece = pack(piece), None
            if rows is not None:
                of_piece = Array.of(rows[sent : sent + len(piece[0])])
                sent += len(piece[0])
            for peer in self.party.peers:
                columns = Array.of(self._columns[peer])
                n_rows = sampled[0].shape[-1]
                first = messages.TreeStart(of_piece, n_rows, columns, self.commitment, packed, self.trees)
                self.party.send(peer, messages.TreeRows(of_piece, packed) if number else first)
            # the tree's first message begins its round
            self.party.round += self.trees if number == 0 else 0

    def ask(self, level: Level, partition: RowsOfNodes) -> None:
        """Ask all peers for the sums of a level's nodes, once; many nodes go in pieces, of which two are under way."""
        if self._level is level:
            return
        self._level = level
        self._sums: dict[str, list[NDArray[Any]]] = {peer: [] for peer in self.party.peers}
        # answers to a piece are taken before the next but one is sent, so that no more than two are in memory
        trees, parts = None, pieces(len(level.asked), self.client.nodes_at_a_time)
        if self.trees > 1:
            assert isinstance(partition, LockstepRows)
            assert isinstance(self.client, LatticeSumsClient)
            trees = partition.trees(level.asked)
            parts = self.client.parts(trees)
        self._pieces = [(piece, output) for piece in parts for output in range(max(1, len(self._outputs)))]
        for number, (piece, output) in enumerate(self._pieces):
            if self._outputs:
                # what begins a tree is sent already
                self.client.begin_tree(*self._outputs[output])
            if number > 1:
                for peer in self.party.peers:
                    self._take(peer)
            members, starts = partition.rows(level.asked[piece], sampled=True)
            positions = members if self._position is None else self._position[members]
            query = self._query(positions, starts.astype(np.int32), None if trees is None else trees[piece])
            # the last part is a `SumsRequest`, so each part waits until there is another one
            held = next(query)
            for following in query:
                for peer in self.party.peers:
                    self.party.send(peer, messages.SumsPiece(pack(held)))
                held = following
            for peer in self.party.peers:
                self.party.send(peer, self._request(peer, held, piece, last=number + 1 == len(self._pieces)))

    def _query(self, positions: Int32s, starts: Int32s, trees: Int32s | None) -> Iterator[Payload]:
        if trees is None:
            return self.client.query(positions, starts)
        assert isinstance(self.client, LatticeSumsClient)
        return self.client.query(positions, starts, trees)

    def _request(self, peer: str, query: Payload, piece: slice, *, last: bool) -> Message:
        """Return the question for a piece of the level's nodes."""
        return messages.SumsRequest(pack(query), last)

    def sums(self, peer: str) -> NDArray[Any]:
        """Return what a peer answered: int64 (nodes, slots, 3), of K outputs (nodes, slots, 2 K + 1)."""
        while len(self._sums[peer]) < len(self._pieces):
            self._take(peer)
        found, self._sums[peer] = self._sums[peer], []
        if n_outputs := len(self._outputs):
            found = [join_outputs(found[k : k + n_outputs]) for k in range(0, len(found), n_outputs)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _take(self, peer: str) -> None:
        assert self._level is not None
        answer = self.party.receive(peer, messages.Sums)
        piece, output = self._pieces[len(self._sums[peer])]
        totals = of_output(self._level.asked_totals[piece], output)
        self._sums[peer].append(self._open(peer, unpack(answer.payload, peer, "Sums"), totals))

    def _open(self, peer: str, answer: Payload, totals: Integers) -> NDArray[Any]:
        """Return the sums of a piece of the level's nodes."""
        return self.client.open(peer, answer, totals, self._columns[peer])


class PassiveColumns:
    """The columns of passive party `peer`: a source of sums.

    `gradients` is set before the first tree, once the cipher is set up for the layouts of all peers. With `by_column`
    the owner decides all rows at a split and does not see the node's (``reveal="column"``). `known` is the share of
    bins that their owner expects exact sums to show. `evidence` signs what was sent, at the end of a tree.
    """

    gradients: EncryptedGradients
    evidence = Evidence()

    def __init__(self, party: Party, peer: str, n_rows: int, observers: Observers | None = None) -> None:
        self.peer, self.by_column, self.observers = peer, False, observers or Observers()
        self._party, self._n_rows = party, n_rows
        self._decided: list[NDArray[np.uint8]] = []  # columns of bits that were sent, one for each distinct split
        layout = party.receive(peer, messages.BinLayout)
        self.known = layout.known
        self.categorical = view(layout.categorical, np.bool_, (None,), peer=peer, what="BinLayout.categorical")
        n_features = len(self.categorical)
        if n_features > MOST_COLUMNS:
            raise PeerProtocolError(peer, f"expected at most {MOST_COLUMNS} columns", at="BinLayout")
        self.offsets = view(layout.offsets, np.int32, (n_features + 1,), peer=peer, what="BinLayout.offsets")
        sizes = np.diff(self.offsets.astype(np.int64))
        most = np.where(self.categorical, MOST_CATEGORIES, MOST_BINS) + 1
        if self.offsets[0] != 0 or np.any(sizes < 1) or np.any(sizes > most):
            expected = f"expected 1 to {MOST_BINS + 1} slots per feature, of categories {MOST_CATEGORIES + 1}"
            raise PeerProtocolError(peer, expected, at="BinLayout.offsets")
        if self.offsets[-1] > MOST_SLOTS:
            raise PeerProtocolError(peer, f"expected at most {MOST_SLOTS} slots", at="BinLayout.offsets")

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        self.gradients.start_tree(self.peer, grad, hess, rows, columns)

    def end_tree(self) -> None:
        self._party.send(self.peer, messages.TreeEnd(self.evidence.signature(self.peer)))

    def ask_sums(self, level: Level, rows: RowsOfNodes) -> None:
        self._level = level, rows
        self.gradients.ask(level, rows)

    def sums(self) -> Integers:
        """Return the decrypted sums, int64 (nodes, slots, 3)."""
        found = self.gradients.sums(self.peer)
        self.observers.event(SumsOpened(self.peer, *self._level, found))
        return found

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        self._asked = rows, starts
        packed = np.packbits(left_bins[:, : width_of(self.offsets)], axis=1)
        self._party.send(self.peer, messages.SplitRequest(Array.of(features), Array.of(packed)))
        if not self.by_column:
            messages.send_nodes(self._party, self.peer, rows, starts, self._n_rows)

    def left(self) -> tuple[Int32s, Flags]:
        return self._left_of_columns() if self.by_column else self._left_of_nodes()

    def _left_of_nodes(self) -> tuple[Int32s, Flags]:
        rows, starts = self._asked
        bits, records = np.empty(len(rows), np.bool_), np.empty(0, np.int32)
        for of, answer in take_rows(self._party, self.peer, len(rows), 1, messages.SplitAnswer):
            records = self._records(answer, len(starts) - 1)
            bits[of] = bits_of(answer.left, of.stop - of.start, self.peer, "SplitAnswer.left")
        # the answer has the table's order, the partition its own
        named, going = np.zeros((2, self._n_rows), np.bool_)
        named[rows] = True
        going[named] = bits
        self._report_sides(going[rows])
        return records, going[rows]

    def _report_sides(self, left: Flags) -> None:
        rows, starts = self._asked
        for first, last in pairwise(starts):
            self.observers.event(SidesLearned(self.peer, rows[first:last], left[first:last]))

    def _left_of_columns(self) -> tuple[Int32s, Flags]:
        (rows, starts), peer = self._asked, self.peer
        count = len(starts) - 1
        records, numbers = np.empty(0, np.int32), np.empty(0, np.int32)
        while len(records) < count:
            answer = self._party.receive(peer, messages.SplitColumns)
            found = self._records(answer, None)
            n_new = answer.new.shape[0] if answer.new.shape else 0
            if n_new > len(found) or not 0 < len(found) <= count - len(records):
                raise PeerProtocolError(peer, "expected at most a new column per split", at="SplitColumns")
            new = take_columns(
                self._party, peer, self._n_rows, len(found), answer, lambda m: m.new, n_new, "SplitColumns.new"
            )
            # a view would keep its whole message in memory
            self._decided.extend(new.copy())
            for column in new:
                of_all = np.unpackbits(column, count=self._n_rows).view(np.bool_)
                self.observers.event(SidesLearned(peer, np.arange(self._n_rows, dtype=np.int32), of_all))
            of_splits = view(answer.columns, np.int32, (len(found),), peer=peer, what="SplitColumns.columns")
            if np.any(of_splits < 0) or np.any(of_splits >= len(self._decided)):
                raise PeerProtocolError(peer, "expected numbers of columns sent", at="SplitColumns.columns")
            records, numbers = np.append(records, found), np.append(numbers, of_splits)
        return records, bits_at([self._decided[number] for number in numbers], rows, starts)

    def _records(
        self, answer: messages.SplitAnswer | messages.SplitColumns | messages.SplitSides, count: int | None
    ) -> Int32s:
        what = f"{type(answer).__name__}.records"
        records = view(answer.records, np.int32, (count,), peer=self.peer, what=what)
        if np.any(records < 0):
            raise PeerProtocolError(self.peer, "expected record numbers from 0", at=what)
        return records


def bits_at(columns: Sequence[NDArray[np.uint8]], rows: Int32s, starts: Integers) -> Flags:
    """Return the bits of each node's rows in its column of packed bits; node k has rows[starts[k] : starts[k + 1]]."""
    found = np.empty(len(rows), np.bool_)
    for column, (first, last) in zip(columns, pairwise(starts), strict=True):
        of_node = rows[first:last]
        # bit 0 of a row is the highest of its byte, as `np.packbits` writes it
        found[first:last] = (column[of_node >> 3] >> (7 - (of_node & 7))) & 1
    return found


def sums_bounds(n_rows: int, objective: Objective, common: BoostingOptions) -> SumsBounds:
    """Return the bounds of a training's sums, which are public."""
    # one-side sampling multiplies the gradients of drawn rows
    factor = 1.0 if common.one_side is None else max(1.0, common.one_side.factor)
    return SumsBounds(n_rows, math.ceil(objective.grad_bound * factor), math.ceil(objective.hess_bound * factor))


def take_hints(
    client: SumsClient, sources: Sequence[PassiveColumns], party: Party, progress: Callable[[int, int], None]
) -> None:
    """Receive every passive party's hint, piece by piece in turn, so that one piece of each is on its way at most."""
    left = {source: int(source.offsets[-1]) for source in sources}
    slots, waiting = sum(left.values()), list(sources)
    while waiting:
        for source in waiting:
            piece = unpack(party.receive(source.peer, messages.Hint).payload, source.peer, "Hint")
            left[source] = client.accept_hint(source.peer, piece, source.offsets)
            party.send(source.peer, messages.HintReceipt())
            progress(slots - sum(left.values()), slots)
        waiting = [source for source in waiting if left[source]]
