"""A recorded tree as an auditor sees it: how it grows once more, and whether its messages hold what they should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload
from treaty.crypto.sums.encrypted_sums import DisclosedKey, DisclosedLattice
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.certificates import vouches
from treaty.messaging.messages import Array, Message, unpack, view
from treaty.privacy.exact_sums import check_opening
from treaty.systems.vertical import messages
from treaty.systems.vertical.audit_record import KeptTree, PassiveHeader, Sent
from treaty.systems.vertical.exact_sums import NamedNodes
from treaty.trees.boosting import TreeSample
from treaty.trees.constraints import Directions
from treaty.trees.ensemble import LeafRows, Tree
from treaty.trees.growth import Growth
from treaty.trees.splits import Level, SplitRules, Splits

_NOT_ALLOWED = "it has splits that the job's options do not allow"


class Unsound(Exception):
    """What the active party's record says cannot have been; the text says what."""


@dataclass(frozen=True, slots=True)
class AuditShape:
    """A tree's nodes, and its leaves counted from left to right.

    Node k has the leaves ``first[k]`` to ``stop[k] - 1``; `leaf` is the node of each row's leaf, `place` its count.
    """

    source: Int32s
    record: Int32s
    left: Int32s
    direction: Directions
    first: Integers
    stop: Integers
    leaf: Integers
    place: Integers

    def inside(self, node: int) -> Flags:
        """Return which rows are in a node, bool (n_rows,)."""
        inside: Flags = (self.place >= self.first[node]) & (self.place < self.stop[node])
        return inside


def shape_of(tree: KeptTree, n_rows: int, party: str) -> AuditShape:
    """Return a recorded tree's shape; Unsound where its nodes are no tree, or rows are in none of its leaves."""

    def read(array: Array, what: str, dtype: type[np.integer]) -> Integers:
        return view(array, dtype, (None,), peer=party, what=f"KeptTree.{what}").astype(np.int64)

    left = read(tree.left, "left", np.int32)
    source, record = read(tree.source, "source", np.int32), read(tree.record, "record", np.int32)
    leaf = read(tree.leaf, "leaf", np.uint8 if tree.leaf.dtype == "uint8" else np.int32)
    direction = read(tree.directions, "directions", np.int8).astype(np.int8)
    inner = np.flatnonzero(left >= 0)
    below = np.sort(np.concatenate([left[inner], left[inner] + 1]))
    one_tree = len(left) > 0 and np.array_equal(below, np.arange(1, len(left))) and (left[inner] > inner).all()
    if not one_tree or not len(source) == len(record) == len(direction) == len(left):
        raise Unsound("its nodes form no tree")
    if len(leaf) != n_rows or (leaf < 0).any() or (leaf >= len(left)).any() or (left[leaf] >= 0).any():
        raise Unsound(f"it does not have a leaf for each of {n_rows} rows")
    leaves = np.ones(len(left), np.int64)
    # children have higher numbers than their parents: from the last node up, then from the root down
    for node in inner[::-1]:
        leaves[node] = leaves[left[node]] + leaves[left[node] + 1]
    first = np.zeros(len(left), np.int64)
    for node in inner:
        first[left[node]] = first[node]
        first[left[node] + 1] = first[node] + leaves[left[node]]
    return AuditShape(
        source.astype(np.int32), record.astype(np.int32), left.astype(np.int32), direction,
        first, first + leaves, leaf, first[leaf],
    )  # fmt: skip


class SampledNodes:
    """The nodes of a tree by their sampled rows, bool (n_rows,)."""

    def __init__(self, shape: AuditShape, sampled: Flags) -> None:
        self._shape, self._sampled = shape, sampled
        self._spans = set(zip(shape.first.tolist(), shape.stop.tolist(), strict=True))
        in_leaf = np.bincount(shape.place[sampled], minlength=int(shape.stop.max(initial=1)))
        self._up_to = np.cumsum([0, *in_leaf])

    def has(self, rows: Flags) -> bool:
        """Return whether these are all sampled rows of a node."""
        places = self._shape.place[rows]
        if not len(places) or (rows & ~self._sampled).any():
            return False
        # a node's leaves are neighbours: its rows span them, and no sampled row of the span is left out
        first, stop = int(places.min()), int(places.max()) + 1
        return (first, stop) in self._spans and len(places) == self._up_to[stop] - self._up_to[first]


class Replay(LeafRows):
    """A tree that grows once more with the splits of a record, on the gradients that are expected.

    Raises Unsound for splits that the job's options do not allow: deeper, or into children of fewer than `fewest_rows`.
    """

    def __init__(self, shape: AuditShape, sample: TreeSample, fewest_rows: int) -> None:
        super().__init__(shape.left, shape.leaf)
        self._shape, self._fewest_rows = shape, fewest_rows
        self._totals = self.totals(sample.grad, sample.hess, sample.rows)

    def grow(self, rules: SplitRules) -> Tree:
        """Return the tree, whose leaf weights follow from the expected gradients."""
        if rules.max_leaves:
            return self._by_gain(rules)
        growth = Growth(self._totals[0], rules)
        while growth.level is not None:
            chosen = growth.take(self._recorded_splits(growth.level))
            if chosen is not None:
                nodes, children, _ = chosen
                if not np.array_equal(self._shape.left[nodes], children):
                    raise Unsound("its nodes are in another order than a tree's grow in")
                growth.divided(self._shape.record[nodes])
        tree = growth.tree()
        if not np.array_equal(tree.left, self._shape.left):
            raise Unsound(_NOT_ALLOWED)
        return tree

    def _by_gain(self, rules: SplitRules) -> Tree:
        """Return the tree as recorded: the order of its nodes follows from gains, which a record does not have."""
        shape, totals = self._shape, self._totals
        inner, depths = np.flatnonzero(shape.left >= 0), np.zeros(len(shape.left), np.int64)
        for node in inner:
            depths[shape.left[node] : shape.left[node] + 2] = depths[node] + 1
        few = totals[1:, 2].min(initial=self._fewest_rows) < self._fewest_rows
        if few or len(inner) >= rules.max_leaves or depths.max() > rules.max_depth:
            raise Unsound(_NOT_ALLOWED)
        return Tree(
            source=shape.source.astype(np.int16), record=shape.record, left=shape.left,
            value=np.where(shape.left < 0, rules.leaf_value(totals), 0.0),
            gain=np.zeros(len(depths)), cover=(totals[:, 1] * rules.hess_unit).astype(np.float64), count=totals[:, 2],
        )  # fmt: skip

    def _recorded_splits(self, level: Level) -> Splits:
        shape, splits = self._shape, Splits.none(len(level.nodes))
        for k, node in enumerate(level.nodes.tolist()):
            if node < len(shape.left) and shape.left[node] >= 0:
                child = shape.left[node]
                if self._totals[child : child + 2, 2].min() < self._fewest_rows:
                    raise Unsound(_NOT_ALLOWED)
                splits.feature[k], splits.direction[k] = 0, shape.direction[node]
                splits.left_totals[k] = self._totals[child]
        return splits


def sampled_rows(sample: TreeSample) -> Int32s:
    """Return the drawn rows, int32, ascending."""
    return np.arange(len(sample.grad), dtype=np.int32) if sample.rows is None else sample.rows


@dataclass(slots=True)
class Found:
    """What was found in a tree: how many vectors were opened, and sentences about differences."""

    vectors: int = 0
    findings: list[str] = field(default_factory=list)
    wrong: int = 0  # vectors with entries that hold something else
    strange: int = 0  # vectors, or named sets of rows, that are no node


class ReceivedTrees:
    """A passive party's record, from its first tree on; its columns are `width` from `first` in the joined table.

    `blind` says that nodes are vectors under the cipher, which `opener` opens.
    """

    def __init__(
        self, header: PassiveHeader, parts: Iterator[Message], opener: DisclosedLattice | DisclosedKey, blind: bool,
        first: int, width: int,
    ) -> None:  # fmt: skip
        self._header, self._parts, self._opener, self._blind = header, parts, opener, blind
        self._first, self._width = first, width
        self._sent = Sent(header.job, header.number, header.active, header.party, header.setup)
        self._decided: list[Flags] = []  # the columns of bits that it sent in this run
        self._coming: list[NDArray[np.uint8]] = []  # pieces of more of them, (columns, bytes)
        self._sides: dict[int, tuple[Flags, Flags]] = {}  # of its record of a split: which rows it decided, and left

    def compare(self, number: int, expected: TreeSample, kept: KeptTree, shape: AuditShape, place: int) -> Found | None:
        """Compare tree `number` with what follows from labels; None where the record has no more.

        `expected` are its gradients and samples, `place` is the party's among the sources.

        Raises CryptoError, PeerProtocolError for messages that the protocol does not have.
        """
        start = next(self._parts, None)
        if start is None:
            return None
        if not isinstance(start, messages.TreeStart):
            raise self._unexpected(start)
        self._sent.add(start)
        found, sampled = Found(), np.zeros(len(expected.grad), np.bool_)
        sampled[sampled_rows(expected)] = True
        payload, named_rows = self._ciphertexts(start, len(expected.grad))
        if not check_opening(start.commitment, kept.nonce, *self._opened(expected), number):
            found.findings.append("its commitment does not open to the gradients that the labels imply")
        self._compare_start(start, payload, named_rows, expected, found)
        nodes, secrets = SampledNodes(shape, sampled), iter(kept.secrets)
        wrong: Flags = np.zeros(len(sampled), np.bool_)
        self._sides.clear()
        named, bits = NamedNodes(len(sampled), 0), np.empty(0, np.bool_)
        pieces: list[Payload] = []
        for part in self._parts:
            match part:
                case messages.SumsPiece() | messages.SumsRequest():
                    self._sent.add(part)
                    pieces.append(unpack(part.payload, self._header.active, type(part).__name__))
                    if isinstance(part, messages.SumsPiece):
                        continue
                    query, pieces = self._joined(pieces), []
                    if self._blind:
                        wrong = wrong | self._open_nodes(query, next(secrets, None), nodes, found)
                    else:
                        self._named_nodes(query, expected, nodes, found)
                case messages.SplitRequest():
                    named, bits = NamedNodes(len(sampled), part.features.shape[0]), bits[:0]
                case messages.NamedRows():
                    named.add(part, self._header.active)
                case messages.SplitColumns():
                    self._take_columns(part, len(sampled))
                case messages.SplitAnswer():
                    bits = self._take_sides(part, bits, named, len(sampled))
                case messages.TreeEnd():
                    certificate = self._header.certificate
                    if certificate and not vouches(certificate, part.signature, self._sent.digest()):
                        found.findings.append(
                            f"{self._header.active} did not sign what {self._header.party}'s record has: the record "
                            "was changed after the training"
                        )
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

    def _ciphertexts(self, start: messages.TreeStart, n_rows: int) -> tuple[Payload, Int32s | None]:
        """Return a tree's start whole, with the pieces that follow it, and the rows that it names; `n_rows` are all.

        Those may not be the rows that were drawn, which is for the comparison to find.
        """
        active = self._header.active
        n_rows = n_rows if start.rows is None else start.n_rows
        pieces, sent = [unpack(start.payload, active, "TreeStart")], [start.rows]
        while not self._blind and 0 < sum(len(piece[0]) for piece in pieces if piece) < n_rows:
            part = next(self._parts, None)
            if not isinstance(part, messages.TreeRows):
                raise self._unexpected(part or start)
            self._sent.add(part)
            pieces.append(unpack(part.payload, active, "TreeRows"))
            sent.append(part.rows)
        named = [view(rows, np.int32, (None,), peer=active, what="TreeStart.rows") for rows in sent if rows is not None]
        return self._joined(pieces), np.concatenate(named) if named else None

    def _joined(self, pieces: list[Payload]) -> Payload:
        """Return what came in pieces, some rows after the others, as if it had come at once."""
        if len(pieces) == 1 or not all(pieces):
            return pieces[0]
        first = pieces[0][0]
        # pieces are of rows: the first axis of ciphertexts, the last one of vectors of nodes
        axis = 0 if not self._blind else first.ndim - 1 if first.dtype == np.uint32 else 1
        return [np.concatenate([piece[0] for piece in pieces], axis=axis), *pieces[0][1:]]

    def _opened(self, expected: TreeSample) -> tuple[Integers, Integers]:
        rows = sampled_rows(expected)
        return expected.grad[rows], expected.hess[rows]

    def _compare_start(
        self, start: messages.TreeStart, payload: Payload, named: Int32s | None, expected: TreeSample, found: Found
    ) -> None:
        """Compare the samples and, unless nodes are vectors, the ciphertexts."""
        active, rows = self._header.active, sampled_rows(expected)
        columns = view(start.columns, np.int32, (None,), peer=active, what="TreeStart.columns")
        drawn = expected.columns - self._first
        if not np.array_equal(columns, drawn[(drawn >= 0) & (drawn < self._width)]):
            found.findings.append("its sample of columns is not the one drawn")
        if self._blind:
            self._opener.begin_tree(expected.grad, expected.hess)
            return
        if named is not None and not np.array_equal(named, rows):
            found.findings.append("its sample of rows is not the one drawn")
        self._opener.begin_tree(*self._opened(expected))
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
        """Open vectors of nodes; return in which rows one of them holds another gradient."""
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

    def _named_nodes(self, query: Payload, expected: TreeSample, nodes: SampledNodes, found: Found) -> None:
        """Check the rows of nodes that a query names, by number: the largest is of no node."""
        slots, sampled = query[0], sampled_rows(expected)
        for node in np.unique(slots[slots != np.iinfo(slots.dtype).max]):
            rows = np.zeros(len(expected.grad), np.bool_)
            rows[sampled[slots == node]] = True
            found.strange += not nodes.has(rows)

    def _take_columns(self, answer: messages.SplitColumns, n_rows: int) -> None:
        """Note how all rows go at splits, by the own answer with columns of bits."""
        party = self._header.party
        records = view(answer.records, np.int32, (None,), peer=party, what="SplitColumns.records")
        numbers = view(answer.columns, np.int32, (len(records),), peer=party, what="SplitColumns.columns")
        self._coming.append(view(answer.new, np.uint8, (None, None), peer=party, what="SplitColumns.new"))
        # a column of more rows than fit a message comes in several, whose bytes lie side by side
        if sum(piece.shape[1] for piece in self._coming) < -(-n_rows // 8):
            return
        new, self._coming = np.concatenate(self._coming, axis=1), []
        self._decided += [np.unpackbits(bits, count=n_rows).astype(np.bool_) for bits in new]
        for record, number in zip(records.tolist(), numbers.tolist(), strict=True):
            self._sides[record] = np.ones(n_rows, np.bool_), self._decided[number]

    def _take_sides(self, answer: messages.SplitAnswer, before: Flags, named: NamedNodes, n_rows: int) -> Flags:
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

    def _compare_sides(self, shape: AuditShape, place: int, found: Found) -> None:
        """Check that rows went at this party's splits where it sent them."""
        strayed, unknown = 0, 0
        for node in np.flatnonzero((shape.source == place) & (shape.left >= 0)).tolist():
            decided = self._sides.get(int(shape.record[node]))
            if decided is None:
                unknown += 1
                continue
            asked, left = decided
            inside, went_left = shape.inside(node), shape.inside(int(shape.left[node]))
            strayed += int((inside & ~(asked & (left == went_left))).sum())
        if strayed:
            found.findings.append(f"{strayed} times a row went another way than {self._header.party} decided")
        if unknown:
            found.findings.append(f"{self._header.party} has decided nothing at {unknown} splits recorded as its own")

    def _unexpected(self, part: Message) -> PeerProtocolError:
        return PeerProtocolError(
            self._header.party, f"expected a tree's messages in their order, got {type(part).__name__}"
        )
