"""A passive party's end of a training on its columns: which messages may come when, and which rows go left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload
from treaty.crypto.sums.encrypted_sums import SumsServer
from treaty.data.binning import Bins, fit_bins
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Codes
from treaty.messaging.conversation import MessageOrder, Table
from treaty.messaging.messages import Array, Message, column_pieces, pack, row_pieces, unpack, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, record_split
from treaty.privacy.exact_sums import COMMITMENT_BYTES
from treaty.systems.system import RoleInput
from treaty.systems.vertical import messages
from treaty.systems.vertical.exact_sums import RevealedSides, check_sides
from treaty.systems.vertical.training import (
    Follower,
    Handlers,
    TreeLimits,
    agree_on_terms,
    between_trees,
    grown_a_round,
)
from treaty.trees.ensemble import SplitTable
from treaty.trees.histograms import width_of
from treaty.trees.splits import Splits


def bin_own_columns(inputs: RoleInput) -> tuple[Bins, Codes]:
    """Return bins of own columns, and the columns as numbers of bins, `Bins.code_type` (n_rows, n_features)."""
    common = inputs.common
    bins = fit_bins(inputs.rows.table, common.most_bins, inputs.threads, max_categories=common.most_categories)
    return bins, bins.transform(inputs.rows.table, inputs.threads)


def show_layout(inputs: RoleInput, bins: Bins, known: float | None = None) -> None:
    """Agree on terms, then send the active party the layout of own columns; `known` is as in `BinLayout`."""
    agree_on_terms(inputs)
    (active,), categorical = inputs.party.peers, inputs.rows.table.schema.categorical
    inputs.party.send(active, messages.BinLayout(Array.of(bins.offsets), Array.of(categorical), known))


def tree_table(start: type[Message], sums: type[Message], split: type[Message]) -> Table:
    """Return which messages may come to a passive party in each state: per level sums, then at most one split.

    The arguments are a system's own messages: `start` begins a tree, `sums` asks about nodes of a level (the level's
    last request has `last` set), `split` names splits.
    """
    return {
        "between trees": {start: "new level", **between_trees("between trees")},
        "new level": {sums: ("new level", "level asked"), messages.TreeEnd: "between trees"},
        "level asked": {sums: ("new level", "level asked"), split: "new level", messages.TreeEnd: "between trees"},
        "finished": {},
    }


def encrypted_table(sums: type[Message], split: type[Message], *, waiting: bool) -> Table:
    """Return `tree_table` for a system in which a tree's rows, and what `sums` asks, come in pieces.

    Nodes may be `waiting` to be divided, whose sums were asked for before others.
    """
    table = {state: dict(allowed) for state, allowed in tree_table(messages.TreeStart, sums, split).items()}
    table["between trees"][messages.TreeStart] = "tree begun"
    table["tree begun"] = {messages.TreeRows: "tree begun", messages.SumsPiece: "in a query", **table["new level"]}
    for state in ("new level", "level asked"):
        table[state][messages.SumsPiece] = "in a query"
    table["in a query"] = {messages.SumsPiece: "in a query", sums: ("new level", "level asked")}
    if waiting:
        # the last children may all be hidden
        table["new level"][split] = "new level"
    return table


def checked_sample(
    start: messages.TreeStart, active: str, n_rows: int, n_features: int
) -> tuple[NDArray[np.int32] | None, NDArray[np.int32]]:
    """Return the rows of a tree's first gradients (None: all) and its columns, int32, ascending, within the table."""
    if len(start.commitment) != COMMITMENT_BYTES:
        raise PeerProtocolError(active, f"expected {COMMITMENT_BYTES} bytes", at="TreeStart.commitment")
    rows = None if start.rows is None else ascending(start.rows, n_rows, active, "TreeStart.rows")
    return rows, ascending(start.columns, n_features, active, "TreeStart.columns")


def ascending(sent: Array, limit: int, active: str, what: str) -> NDArray[np.int32]:
    """Return received numbers of rows or columns, int32, checked to be ascending and below `limit`."""
    numbers = view(sent, np.int32, (None,), peer=active, what=what)
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= limit or np.any(np.diff(numbers) <= 0)):
        raise PeerProtocolError(active, f"expected ascending numbers below {limit}", at=what)
    return numbers


def gains_as_splits(sent: Array, n_nodes: int, source: int, peer: str, what: str) -> Splits:
    """Return the gains of an owner's best splits, 0 for none, as splits of which nothing else is known."""
    gains = view(sent, np.float64, (n_nodes,), peer=peer, what=what)
    if not np.all(np.isfinite(gains) & (gains >= 0.0)):
        raise PeerProtocolError(peer, "expected finite gains of 0 or more", at=what)
    found = Splits.none(n_nodes, source)
    found.gain[:] = gains
    # only the owner knows the column: the node's number stands for it when rows are asked for
    found.feature[:] = np.where(gains > 0.0, np.arange(n_nodes), -1)
    return found


class NamedSplits(Protocol):
    """A message that names splits: int32 features (k,), packed bits of bins left (k, width / 8)."""

    @property
    def features(self) -> Array: ...
    @property
    def left_bins(self) -> Array: ...


class SplitOwner:
    """Decides rows at splits of own columns, and records the splits in `splits` (SecureBoost, Algorithm 2).

    `codes` are the binned columns, uint8 (n_rows, n_features); `active` is the active party. `revealed` counts what the
    sides of rows reveal; None: they reveal nothing.
    """

    def __init__(
        self, active: str, codes: Codes, bins: Bins, splits: SplitTable, revealed: RevealedSides | None = None
    ) -> None:
        self._active, self._codes, self.bins, self._splits, self.revealed = active, codes, bins, splits, revealed
        self._left: dict[int, tuple[int, NDArray[np.bool_]]] = {}  # of each record, its feature and bins going left
        self._sent: dict[tuple[int, bytes], int] = {}  # numbers of the columns of bits that were sent, by their split

    def divide_table(self, request: NamedSplits) -> Iterator[messages.SplitColumns]:
        """Record each split, and decide all rows of the table, in messages of at most 60 MB."""
        features, left_bins = self.asked(request)
        for part in column_pieces(len(features), len(self._codes)):
            yield from self._columns(features[part], left_bins[part])

    def divide_nodes(
        self,
        request: NamedSplits,
        nodes: Iterable[tuple[NDArray[np.intp], NDArray[np.int64]]],
        check: Callable[[NDArray[np.int64]], None],
    ) -> Iterator[messages.SplitAnswer]:
        """Record each node's split, and decide the rows of the nodes, of which `take_nodes` yields `nodes`.

        ``check(sizes)`` is called with the nodes' numbers of rows, int64 (k,), before anything is answered.
        """
        features, left_bins = self.asked(request)
        sizes, decided = np.zeros(len(features), np.int64), [np.empty(0, np.bool_)]
        # rows of each node in each bin of its split's column
        width = left_bins.shape[1]
        seen = np.zeros((len(features), width), np.int64)
        for rows, node in nodes:
            sizes += np.bincount(node, minlength=len(features))
            own = self._codes[rows, features[node]]
            decided.append(left_bins[node, own])
            seen += np.bincount(node * width + own, minlength=seen.size).reshape(seen.shape)
        check(sizes)
        records, left = self.record(features, left_bins), np.concatenate(decided)
        if self.revealed is not None:
            # the sides of a node's rows reveal a share of the table's rows in the same bins, on each side of the cut
            shares = []
            for record, feature, going, rows in zip(records.tolist(), features, left_bins, seen, strict=True):
                of_table = self.revealed.counts[feature]
                there = rows[: len(of_table)]
                may = of_table * (there > 0)
                sides = (going[: len(of_table)], ~going[: len(of_table)])
                below, above = (float(there[side].sum() / max(1, may[side].sum())) for side in sides)
                shares.append((record, below, above))
            self.count_revealed(shares)
        for of in row_pieces(len(left), 1):
            yield messages.SplitAnswer(Array.of(records), Array.of(np.packbits(left[of])))

    def asked(self, request: NamedSplits) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return features int32 (k,) and bins going left, bool (k, width), of a request; reject impossible splits."""
        active, bins, what = self._active, self.bins, type(request).__name__
        features = view(request.features, np.int32, (None,), peer=active, what=f"{what}.features")
        shape = len(features), width_of(bins.offsets) // 8
        packed = view(request.left_bins, np.uint8, shape, peer=active, what=f"{what}.left_bins")
        if np.any(features < 0) or np.any(features >= self._codes.shape[1]):
            raise PeerProtocolError(active, f"expected features below {self._codes.shape[1]}", at=f"{what}.features")
        left_bins = np.unpackbits(packed, axis=1).astype(np.bool_)
        # a threshold sends the lowest bins left, a category any set of bins; an empty side would be no split
        for feature, going in zip(features, left_bins, strict=True):
            present = going[: bins.n_bins[feature]]
            if bins.cuts[feature] is None:  # missing values are a category
                fits = going[: len(present) + 1].any()
            else:
                fits = present.any() and present[: np.count_nonzero(present)].all()
            if not fits:
                raise PeerProtocolError(active, "expected the lowest bins to go left", at=f"{what}.left_bins")
        return features, left_bins

    def record(self, features: NDArray[np.int32], left_bins: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Record splits; return their record numbers, int32 (k,)."""
        records = []
        for feature, going in zip(features.tolist(), left_bins, strict=True):
            records.append(record_split(self._splits, self.bins, feature, going))
            self._left[records[-1]] = feature, going[: int(self.bins.n_bins[feature]) + 1]
        return np.array(records, np.int32)

    def may_divide(self, record: int, above: Sequence[int]) -> tuple[float, float]:
        """Return how many rows of the table may go left at a split, and right, as own splits above leave them."""
        assert self.revealed is not None
        feature, left = self._left[record]
        may = np.ones(len(left), np.bool_)
        for earlier, of in (self._left[number] for number in above):
            # which child of the earlier split it is was not sent, but only one of them can be divided in this way
            sides = [may & side for side in (of, ~of)] if earlier == feature else []
            fit = [side for side in sides if (side & left).any() and (side & ~left).any()]
            may = fit[0] if len(fit) == 1 else may
        counts = self.revealed.counts[feature]
        return float(counts[may & left].sum()), float(counts[may & ~left].sum())

    def count_revealed(self, shares: Iterable[tuple[int, float, float]]) -> None:
        """Count revealed sides, as `RevealedSides.add` takes them."""
        if self.revealed is not None:
            self.revealed.add(self._splits, shares)

    def sides(self, features: NDArray[np.int32], left_bins: NDArray[np.bool_], of: slice) -> NDArray[np.uint8]:
        """Return which of some rows go left at splits, packed bits uint8 (k, bytes)."""
        decided = np.empty((len(features), -(-(of.stop - of.start) // 8)), np.uint8)
        for bits, feature, going in zip(decided, features, left_bins, strict=True):
            bits[:] = np.packbits(going[self._codes[of, feature]])
        return decided

    def _columns(self, features: NDArray[np.int32], left_bins: NDArray[np.bool_]) -> Iterator[messages.SplitColumns]:
        """Decide all rows of the table, once for each distinct split."""
        numbers, new = [], []
        for number, (feature, going) in enumerate(zip(features, left_bins, strict=True)):
            key = int(feature), going[: self.bins.n_bins[feature] + 1].tobytes()
            if key not in self._sent:
                self._sent[key] = len(self._sent)
                new.append(number)
            numbers.append(self._sent[key])
        records, columns = self.record(features, left_bins), Array.of(np.array(numbers, np.int32))
        self.count_revealed((record, 1.0, 1.0) for record in records.tolist())
        for of in row_pieces(len(self._codes), len(features)):
            sides = Array.of(self.sides(features[new], left_bins[new], of))
            yield messages.SplitColumns(Array.of(records), columns, sides)


def send_hint(party: Party, hint: Iterator[Payload]) -> None:
    """Send a cipher's answer to the set-up piece by piece; the next is made while the last is on its way."""
    (active,) = party.peers
    for number, piece in enumerate(hint):
        if number:
            party.receive(active, messages.HintReceipt)
        party.send(active, messages.Hint(pack(piece)))
    party.receive(active, messages.HintReceipt)


class ColumnOwner:
    """A passive party's end of a training on hidden sums: checks what it is asked, and answers.

    `server` is its end of the cipher, `splits` decide rows and count what their sides give away. With `by_column` it
    decides all rows at a split. At most `most_trees` grow together. `sums_request` and `split_request` are the messages
    that ask for sums and name splits.
    """

    sums_request: type[messages.SumsRequest] = messages.SumsRequest
    split_request: type[messages.SplitRequest | messages.WonCandidates] = messages.SplitRequest

    def __init__(
        self, inputs: RoleInput, follower: Follower, server: SumsServer, splits: SplitOwner, *, by_column: bool,
        most_trees: int,
    ) -> None:  # fmt: skip
        (self._active,), self._party, self._most_trees = inputs.party.peers, inputs.party, most_trees
        self._inputs, self._follower, self._server, self._splits = inputs, follower, server, splits
        self._by_column, self._n_rows = by_column, inputs.rows.table.n_rows
        outputs = inputs.trees_a_round // grown_a_round(inputs)
        self._limits = TreeLimits(self._active, inputs.common.rules_of(1.0, 1.0), outputs)
        self._grown = 0.0  # share of bins that the last tree gave away

    def follow(self, handlers: Handlers) -> ModelPart:
        """Answer the active party until it is done."""
        waiting = self._inputs.common.max_leaves is not None
        order = MessageOrder(encrypted_table(self.sums_request, self.split_request, waiting=waiting), "between trees")
        return self._follower.follow(order, handlers)

    def start_tree(self, start: messages.TreeStart) -> None:
        """Take a tree's sample and its first encrypted gradients."""
        if start.trees > self._most_trees:
            raise PeerProtocolError(
                self._active, f"expected at most {self._most_trees} trees together", at="TreeStart.trees"
            )
        check_sides(self._inputs, self._follower.part.sides[self._party.name], self._grown)
        for _ in range(start.trees):
            self._follower.limits.tree()
            self._follower.next_tree()
        n_columns = len(self._inputs.rows.table.schema.names)
        sample, columns = checked_sample(start, self._active, self._n_rows, n_columns)
        self._limits.start(columns, start.trees, self._server.spare)
        if sample is not None:
            self._limits.sampled(sample)
        self._server.begin_tree(unpack(start.payload, self._active, "TreeStart"), sample, columns, start.n_rows)

    def add_rows(self, rows: messages.TreeRows) -> None:
        """Take more of the tree's sample and encrypted gradients."""
        more = None if rows.rows is None else ascending(rows.rows, self._n_rows, self._active, "TreeRows.rows")
        if more is not None:
            self._limits.sampled(more)
        self._server.add_rows(unpack(rows.payload, self._active, "TreeRows"), more)

    def add_piece(self, piece: messages.SumsPiece) -> None:
        """Take some rows' part of a request for sums."""
        self._add(piece)

    def _add(self, piece: messages.SumsPiece | messages.SumsRequest) -> int:
        """Return the number of nodes that a request is about, 0 before its last part."""
        query = unpack(piece.payload, self._active, type(piece).__name__)
        # a vector of all rows for each node, where there are any, is work and memory: limits come first
        vectors = len(query[0]) if query and query[0].ndim > 1 else 0
        self._limits.asked(vectors * (1 + self._server.spare))
        return self._server.add(query)

    def sums(self, request: messages.SumsRequest) -> messages.Sums | None:
        """Return the encrypted bin sums of nodes of a level."""
        self._limits.sums(self._add(request), last=request.last)
        return messages.Sums(pack(self._server.answer()))

    def named_splits(self, message: messages.SplitRequest | messages.WonCandidates) -> messages.SplitRequest:
        """Return the splits that a message names."""
        assert isinstance(message, messages.SplitRequest)
        return message

    def divide(self, request: messages.SplitRequest) -> Iterator[Message]:
        """Record splits; yield which rows go left."""
        self._limits.split(request)
        return self._splits.divide_table(request) if self._by_column else self._divide_nodes(request)

    def _divide_nodes(self, request: messages.SplitRequest) -> Iterator[Message]:
        named = messages.take_nodes(self._party, self._active, request.features.shape[0], self._n_rows)
        return self._splits.divide_nodes(request, named, self._limits.node_sizes)

    def end_tree(self, _: messages.TreeEnd) -> None:
        """Drop the tree's gradients; note what its splits gave away."""
        sides, name, revealed = self._follower.part.sides, self._party.name, self._splits.revealed
        assert revealed is not None
        self._grown, sides[name] = revealed.share - sides[name], revealed.share
        self._server.end_tree()
