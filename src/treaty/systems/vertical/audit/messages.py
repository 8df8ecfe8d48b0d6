"""The messages of a tree, as a passive party recorded them, compared with what they should hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload
from treaty.crypto.sums.encrypted_sums import OpenedEntries
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.certificates import vouches
from treaty.messaging.messages import Array, Message, unpack, view
from treaty.privacy.exact_sums import check_opening
from treaty.systems.vertical.audit.record import KeptTree, PassiveHeader, Sent
from treaty.systems.vertical.audit.tree import SampledNodes, Shape
from treaty.systems.vertical.encrypted_columns import (
    SplitAnswer,
    SplitColumns,
    SplitRequest,
    SumsPiece,
    SumsRequest,
    TreeEnd,
    TreeRows,
    TreeStart,
)
from treaty.systems.vertical.named_rows import NamedNodes, NamedRows


class Opener(Protocol):
    """What opens a cipher's messages: `DisclosedLattice` or `DisclosedKey`."""

    def begin_tree(self, grad: Integers, hess: Integers) -> None: ...
    def open(self, query: Payload, secrets: NDArray[np.int8] | None) -> OpenedEntries: ...


@dataclass(frozen=True, slots=True)
class Expected:
    """What follows from the labels for a tree: grad and hess (n_rows,), the drawn rows (None: all) and columns."""

    number: int
    grad: Integers
    hess: Integers
    rows: Int32s | None
    columns: Int32s

    @property
    def sampled(self) -> Int32s:
        """The drawn rows, int32, ascending."""
        return np.arange(len(self.grad), dtype=np.int32) if self.rows is None else self.rows


@dataclass(slots=True)
class Found:
    """What was found in a tree: how many vectors were opened, and sentences about differences."""

    vectors: int = 0
    findings: list[str] = field(default_factory=list)
    wrong: int = 0  # vectors with entries that hold something else
    strange: int = 0  # vectors, or named sets of rows, that are no node


class ReceivedTrees:
    """A passive party's record, from its first tree on; its columns are `width` from `first` in the joined table."""

    def __init__(
        self, header: PassiveHeader, parts: Iterator[Message], opener: Opener, blind: bool, first: int, width: int
    ) -> None:
        self._header, self._parts, self._opener, self._blind = header, parts, opener, blind
        self._first, self._width = first, width
        self._sent = Sent(header.job, header.number, header.active, header.party, header.setup)
        self._decided: list[Flags] = []  # the columns of bits that it sent in this run
        self._coming: list[NDArray[np.uint8]] = []  # pieces of more of them, (columns, bytes)
        self._sides: dict[int, tuple[Flags, Flags]] = {}  # of its record of a split: which rows it decided, and left

    def compare(self, expected: Expected, kept: KeptTree, shape: Shape, place: int) -> Found | None:
        """Compare the next tree; None where the record has no more. `place` is the party's among the sources.

        Raises CryptoError, PeerProtocolError for messages that the protocol does not have.
        """
        start = next(self._parts, None)
        if start is None:
            return None
        if not isinstance(start, TreeStart):
            raise self._unexpected(start)
        self._sent.add(start)
        found, sampled = Found(), np.zeros(len(expected.grad), np.bool_)
        sampled[expected.sampled] = True
        self._compare_start(start, *self._ciphertexts(start, len(expected.grad)), expected, kept, found)
        nodes, secrets = SampledNodes(shape, sampled), iter(kept.secrets)
        wrong: Flags = np.zeros(len(sampled), np.bool_)
        self._sides.clear()
        named, bits = NamedNodes(len(sampled), 0), np.empty(0, np.bool_)
        pieces: list[Payload] = []
        for part in self._parts:
            match part:
                case SumsPiece() | SumsRequest():
                    self._sent.add(part)
                    pieces.append(unpack(part.payload, self._header.active, type(part).__name__))
                    if isinstance(part, SumsPiece):
                        continue
                    query, pieces = self._joined(pieces), []
                    if self._blind:
                        wrong = wrong | self._open_nodes(query, next(secrets, None), nodes, found)
                    else:
                        self._named_nodes(query, expected, nodes, found)
                case SplitRequest():
                    named, bits = NamedNodes(len(sampled), part.features.shape[0]), bits[:0]
                case NamedRows():
                    named.add(part, self._header.active)
                case SplitColumns():
                    self._take_columns(part, len(sampled))
                case SplitAnswer():
                    bits = self._take_sides(part, bits, named, len(sampled))
                case TreeEnd():
                    self._check_signature(part, found)
                    break
                case _:
                    raise self._unexpected(part)
        if wrong.any():
            found.findings.append(
                f"{int(wrong.sum())} of {len(wrong)} rows, in {found.wrong} of {found.vectors} vectors of nodes, hold "
                "other gradients than the labels imply"
            )
        if found.strange:
            found.findings.append(f"{found.strange} times sums were asked of rows that are no node of the tree")
        self._compare_sides(shape, place, found)
        return found

    def _ciphertexts(self, start: TreeStart, n_rows: int) -> tuple[Payload, Int32s | None]:
        """Return a tree's start whole, with the pieces that follow it, and the rows that it names; `n_rows` are all.

        Those may not be the rows that were drawn, which is for the comparison to find.
        """
        active = self._header.active
        n_rows = n_rows if start.rows is None else start.n_rows
        pieces, told = [unpack(start.payload, active, "TreeStart")], [start.rows]
        while not self._blind and 0 < sum(len(piece[0]) for piece in pieces if piece) < n_rows:
            part = next(self._parts, None)
            if not isinstance(part, TreeRows):
                raise self._unexpected(part or start)
            self._sent.add(part)
            pieces.append(unpack(part.payload, active, "TreeRows"))
            told.append(part.rows)
        named = [view(rows, np.int32, (None,), peer=active, what="TreeStart.rows") for rows in told if rows is not None]
        return self._joined(pieces), np.concatenate(named) if named else None

    def _joined(self, pieces: list[Payload]) -> Payload:
        """Return what came in pieces, some rows after the others, as if it had come at once."""
        if len(pieces) == 1 or not all(pieces):
            return pieces[0]
        first = pieces[0][0]
        axis = 0 if not self._blind else first.ndim - 1 if first.dtype == np.uint32 else 1
        return [np.concatenate([piece[0] for piece in pieces], axis=axis), *pieces[0][1:]]

    def _compare_start(
        self,
        start: TreeStart,
        payload: Payload,
        told: Int32s | None,
        expected: Expected,
        kept: KeptTree,
        found: Found,
    ) -> None:
        """Compare the commitment, the samples and, unless the cipher is blind, the ciphertexts."""
        active, rows = self._header.active, expected.sampled
        opened = expected.grad[rows], expected.hess[rows]
        if not check_opening(start.commitment, kept.nonce, *opened, expected.number):
            found.findings.append("its commitment does not open to the gradients that the labels imply")
        columns = view(start.columns, np.int32, (None,), peer=active, what="TreeStart.columns")
        drawn = expected.columns - self._first
        if not np.array_equal(columns, drawn[(drawn >= 0) & (drawn < self._width)]):
            found.findings.append("its sample of columns is not the one drawn")
        if self._blind:
            self._opener.begin_tree(expected.grad, expected.hess)
            return
        if told is not None and not np.array_equal(told, rows):
            found.findings.append("its sample of rows is not the one drawn")
        self._opener.begin_tree(*opened)
        ciphertexts = self._opener.open(payload, None)
        found.vectors += 1
        found.findings += ciphertexts.faults
        wrong = int((~ciphertexts.held).sum())
        if wrong:
            found.findings.append(
                f"{wrong} of {len(rows)} rows were sent with other gradients than the labels imply, first at place "
                f"{int(np.argmin(ciphertexts.held[0]))} of the sample"
            )

    def _open_nodes(self, query: Payload, keys: Array | None, nodes: SampledNodes, found: Found) -> Flags:
        """Open vectors of nodes; return in which rows one of them holds something else."""
        active = self._header.active
        secrets = None if keys is None else view(keys, np.int8, (None, None), peer=active, what="KeptTree.secrets")
        opened = self._opener.open(query, secrets)
        found.findings += opened.faults
        for held, wrong in zip(opened.held, opened.wrong, strict=True):
            found.vectors += 1
            found.wrong += bool(wrong.any())
            found.strange += not (bool(wrong.any()) or nodes.has(held))
        wrong_rows: Flags = np.logical_or.reduce(opened.wrong, axis=0)
        return wrong_rows

    def _named_nodes(self, query: Payload, expected: Expected, nodes: SampledNodes, found: Found) -> None:
        """Check the rows of nodes that a query names, by number: the largest is of no node."""
        slots = query[0]
        for node in np.unique(slots[slots != np.iinfo(slots.dtype).max]):
            rows = np.zeros(len(expected.grad), np.bool_)
            rows[expected.sampled[slots == node]] = True
            found.strange += not nodes.has(rows)

    def _take_columns(self, answer: SplitColumns, n_rows: int) -> None:
        """Note how all rows go at splits, by the own answer with columns of bits."""
        party = self._header.party
        records = view(answer.records, np.int32, (None,), peer=party, what="SplitColumns.records")
        numbers = view(answer.columns, np.int32, (len(records),), peer=party, what="SplitColumns.columns")
        self._coming.append(view(answer.new, np.uint8, (None, None), peer=party, what="SplitColumns.new"))
        if sum(piece.shape[1] for piece in self._coming) < -(-n_rows // 8):  # the rest of the rows follows
            return
        new, self._coming = np.concatenate(self._coming, axis=1), []
        self._decided += [np.unpackbits(bits, count=n_rows).astype(np.bool_) for bits in new]
        for record, number in zip(records.tolist(), numbers.tolist(), strict=True):
            self._sides[record] = np.ones(n_rows, np.bool_), self._decided[number]

    def _take_sides(self, answer: SplitAnswer, before: Flags, named: NamedNodes, n_rows: int) -> Flags:
        """Note how named rows go at splits, once the own answers have all of them; return their bits so far."""
        party, rows = self._header.party, named.rows
        records = view(answer.records, np.int32, (None,), peer=party, what="SplitAnswer.records")
        packed = view(answer.left, np.uint8, (None,), peer=party, what="SplitAnswer.left")
        bits = np.append(before, np.unpackbits(packed).astype(np.bool_))
        if not len(rows):
            raise self._unexpected(answer)
        if len(bits) >= len(rows):
            left, asked = np.zeros((2, n_rows), np.bool_)
            left[rows] = bits[: len(rows)]
            for node, record in enumerate(records.tolist()):
                asked[rows] = named.nodes == node
                self._sides[record] = asked.copy(), left
        return bits

    def _compare_sides(self, shape: Shape, place: int, found: Found) -> None:
        """Check that rows went at this party's splits where it said they go."""
        strayed, unknown = 0, 0
        for node in np.flatnonzero((shape.source == place) & (shape.left >= 0)).tolist():
            decided = self._sides.get(int(shape.record[node]))
            if decided is None:
                unknown += 1
                continue
            asked, left = decided
            inside, went_left = shape.rows(node), shape.rows(int(shape.left[node]))
            strayed += int((inside & ~(asked & (left == went_left))).sum())
        if strayed:
            found.findings.append(f"{strayed} times a row went another way than {self._header.party} decided")
        if unknown:
            found.findings.append(f"{self._header.party} has decided nothing at {unknown} splits said to be its own")

    def _check_signature(self, end: TreeEnd, found: Found) -> None:
        certificate = self._header.certificate
        if certificate and not vouches(certificate, end.signature, self._sent.digest()):
            found.findings.append(
                f"{self._header.active} did not sign what {self._header.party}'s record has: the record was changed "
                "after the training"
            )

    def _unexpected(self, part: Message) -> PeerProtocolError:
        return PeerProtocolError(
            self._header.party, f"expected a tree's messages in their order, got {type(part).__name__}"
        )
