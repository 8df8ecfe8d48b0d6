"""Sealed sums: what both ends compute at a level, and the passive party's end.

Sums stay under masks, as shares of the active and one passive party; the two compare candidates for splits on shares,
and only whose split is best at a node is opened (`sealed_active` has the order of the steps). Nodes of a level are in
an order that both ends share: those asked about, then the sibling of each. Which of two siblings is the left one is not
revealed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream, length_prefixed
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sharing.key_agreement import agree_with
from treaty.crypto.sums.lattice_sums import LatticeSumsServer, sealed_places
from treaty.crypto.transfer import sealed_sums
from treaty.crypto.transfer.ahead import Ahead
from treaty.crypto.transfer.arithmetic import Wide, subtract
from treaty.crypto.transfer.category_sets import half_that_won, halves_of
from treaty.crypto.transfer.stock import Arrays as StepArrays
from treaty.crypto.transfer.stock import Bits, OpenedArrays, Paths, Steps, Transfers, open_transfers
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Int32s, pieces
from treaty.messaging.certificates import Signer
from treaty.messaging.exchanges import take_rows
from treaty.messaging.messages import Array, column_pieces, pack, row_pieces, unpack, view
from treaty.messaging.party import Party
from treaty.systems.observers import SidesLearned
from treaty.systems.pooled.constraints import own_constraints
from treaty.systems.vertical import messages
from treaty.systems.vertical.column_owner import ColumnOwner
from treaty.systems.vertical.sealed_candidates import Candidates, ColumnGroups, GroupsLeft, allowed_columns

# ------------------ shares that pass from one passive party to the next, by way of the active party and hidden from it
#
# Two passive parties share a seed from which each draws the same masks: one subtracts a mask from its shares and sends
# the rest to the active party, which adds it to its own; the mask is then the other passive party's share. An active
# party and a passive one that collude learn what passes between them: the best fraction so far, at every node.
#
# The active party carries the public keys that seeds are made from, too. Each is signed with the key of its owner's
# certificate, for this job and system, so that the active party cannot replace it by its own. It can replay one of an
# earlier run, whose secret no longer exists. Between threads of one process there are no certificates.


class MovingKey:
    """A passive party's key for moving shares, new for every training or prediction, which its `use` names.

    `others` are the passive parties met.
    """

    def __init__(self, party: Party, vouching: Signer, use: str) -> None:
        self._party, self._vouching, self._use = party, vouching, use
        self._secret = X25519PrivateKey.generate()
        self._seeds: dict[str, bytes] = {}
        self._drawn: dict[str, int] = {}
        self.others: frozenset[str] = frozenset()

    def signed(self) -> tuple[bytes, bytes]:
        """Return what the other passive parties need: the public key, and a signature on it."""
        key = self._secret.public_key().public_bytes_raw()
        return key, self._vouching.vouch(self.content(self._party.name, key))

    def content(self, name: str, key: bytes) -> bytes:
        """Return what a party signs of its key."""
        return length_prefixed(f"treaty key for {self._use}", self._party.job, self._party.protocol, name, key)

    def meet(self, signed: Mapping[str, tuple[bytes, bytes]]) -> None:
        """Derive a seed with each owner of these public keys; CryptoError for an invalid key or signature."""
        for name, (key, signature) in signed.items():
            if not self._vouching.check(name, signature, self.content(name, key)):
                raise CryptoError(
                    f"expected a key signed by {name} with the key of its certificate, got no such signature"
                )
        keys = {name: key for name, (key, _) in signed.items()}
        self._seeds = agree_with(self._secret, keys, self._use, self._party.name)
        self._drawn, self.others = dict.fromkeys(keys, 0), frozenset(keys)

    def bit_masks(self, other: str, shape: tuple[int, ...]) -> tuple[Bits, Bits]:
        """Return the next masks of bits that move to another passive party, and of those that come from it."""
        # both ends draw in the order of the senders' names
        drawn = {
            sender: self.mask(other, shape, sending=sender != other) for sender in sorted([other, self._party.name])
        }
        mine, theirs = ((drawn[name] & np.uint64(1)).astype(np.uint8) for name in (self._party.name, other))
        return mine, theirs

    def mask(self, other: str, shape: tuple[int, ...], *, sending: bool) -> Wide:
        """Return the next mask, uniform uint64, of shares that move to another passive party, or come from it."""
        # the active party says who moves shares to whom: without the receiver's name, two parties that move theirs to
        # each other would use one mask twice
        receiver = other if sending else self._party.name
        number, self._drawn[other] = self._drawn[other], self._drawn[other] + 1
        key = hashlib.sha256(self._seeds[other] + number.to_bytes(8, "little") + receiver.encode()).digest()
        return np.frombuffer(Keystream(key).raw(8 * int(np.prod(shape))), "<u8").astype(np.uint64).reshape(shape)

    def stream(self, other: str, what: str) -> Keystream:
        """Return the stream that both have for something: once, or what is under it would be under one pad."""
        return Keystream(hashlib.sha256(b"treaty pads\0" + self._seeds[other] + what.encode()).digest())


# ---------------------------------------------------------------- a level, at either end


# Candidates of a level that are compared at once: some 26 kB each are in memory. Each part takes steps of its own, so
# up to four times as many are where steps take long
_AT_A_TIME = 1 << 12


@dataclass(frozen=True, slots=True)
class SealedEnd:
    """One end of computing on shares with one other party, for a whole job; `role` is 0 at the active party.

    `ahead` makes the stocks of `transfers`. With `monotone`, candidates keep to directions.
    """

    role: int
    transfers: Transfers
    ahead: Ahead
    places: sealed_sums.Places
    widths: sealed_sums.Widths
    step: int
    monotone: bool


@dataclass(frozen=True, slots=True)
class LevelResult:
    """Shares of a level's nodes: of all slots, (nodes, slots, 3, 2), and of the best entry, (nodes, 4, words).

    `members`, (nodes, 2, categories), are shares of which categories are in the halves of their columns.
    """

    slots: Wide
    best: Wide
    members: Bits


def places_of(bounds: SumsBounds) -> sealed_sums.Places:
    """Return the widths of sealed sums' fields."""
    return sealed_sums.Places(*(last - first for first, last in pairwise(sealed_places(bounds))))


def find_best(
    end: SealedEnd, parts: Wide, parents: Int32s, before: Wide | None, candidates: Candidates, known: sealed_sums.Known,
    groups: ColumnGroups | None = None,
) -> Steps[LevelResult]:  # fmt: skip
    """Find each node's best entry among the candidates and those that the active party knows, as far as `groups` allow.

    `parts`, uint64 (asked, slots, 4), are fields' shares of the nodes asked about, `before` those of the last level's
    nodes, whole; `parents` says which of these are the parents of the nodes asked about.
    """
    # masked fields become shares of integers, then siblings are the parents' shares minus these
    slots = yield from sealed_sums.integer_shares(end.transfers, parts, end.places, end.role)
    if before is not None:
        slots = np.concatenate([slots, subtract(before[parents], slots)])
    allowed: Bits | None = None
    if groups is not None:
        entries = len(known.before) + len(known.after)
        of_columns = yield from allowed_columns(end.transfers, groups, end.role)
        allowed = of_columns[:, np.append(np.arange(entries), entries + candidates.columns)]
    found, categories = [], candidates.halved_slots
    members = np.zeros((len(slots), 2, len(categories)), np.uint8)
    at_once = _AT_A_TIME * min(4, 1 + end.step // 32)
    for part in pieces(len(slots), max(1, at_once // max(1, len(candidates) + len(categories)))):
        of_part, sums_of_halves = known.only(part), np.zeros((len(slots[part]), 0, 3, sealed_sums.WORDS), np.uint64)
        if len(categories):
            mine, starts = slots[part][:, categories], candidates.halved_starts
            halves = yield from halves_of(end.transfers, mine, starts, of_part, end.widths, end.role)
            sums_of_halves, members[part] = halves.sums, halves.members
        sums = candidates.sums(slots[part], sums_of_halves)
        may = None if allowed is None else allowed[part]
        directions = candidates.directions if end.monotone else None
        best = sealed_sums.best_of_shared(end.transfers, sums, of_part, end.widths, end.role, end.step, may, directions)
        found.append((yield from best))
    return LevelResult(slots, np.concatenate(found), members)


def take_steps(party: Party, ends: Mapping[str, Steps[Any]], ahead: Mapping[str, Ahead]) -> dict[str, Any]:
    """Compute with several parties at once, one step with each after another; return what each computation gives.

    What `ahead` makes for later steps is sent behind each step, and taken while the next one is on its way. What is
    left of it is taken by `take_rest`, before anything else is received.
    """
    results: dict[str, Any] = {}
    given: dict[str, StepArrays | None] = dict.fromkeys(ends)
    earlier: dict[str, list[StepArrays]] = {peer: [] for peer in ends}
    while given:
        waiting: dict[str, type[messages.Step]] = {}
        for peer, came in given.items():
            try:
                sent = next(ends[peer]) if came is None else ends[peer].send(came)
            except StopIteration as stop:
                results[peer] = stop.value
                continue
            waiting[peer] = messages.OpenedStep if isinstance(sent, OpenedArrays) else messages.SealedStep
            party.send(peer, waiting[peer](pack(sent)))
        for peer in [peer for peer in given if peer in ahead]:
            for message in earlier[peer]:
                ahead[peer].take(message)
            if peer in waiting and (made := ahead[peer].message()) is not None:
                party.send(peer, messages.SealedStep(pack(made)))
        given = {}
        for peer, kind in waiting.items():
            # those of earlier steps come first
            earlier[peer] = [_step(party, peer) for _ in range(ahead[peer].due if peer in ahead else 0)]
            given[peer] = _step(party, peer, kind)
    return results


def compute(party: Party, steps: Steps[Any], ahead: Ahead | None = None, *, partner: str = "") -> Any:
    """Compute with a `partner` as `take_steps` does, by default the first peer; take the rest of what `ahead` makes."""
    peer = partner or party.peers[0]
    made = {} if ahead is None else {peer: ahead}
    try:
        result = take_steps(party, {peer: steps}, made)[peer]
        take_rest(party, made)
    except CryptoError as error:
        raise PeerProtocolError(peer, str(error), at="a step") from None
    return result


def take_rest(party: Party, ahead: Mapping[str, Ahead]) -> None:
    """Take what the other parties have sent for later steps."""
    for peer, of_peer in ahead.items():
        while of_peer.under_way:
            of_peer.take(_step(party, peer))


def _step(party: Party, peer: str, kind: type[messages.Step] = messages.SealedStep) -> StepArrays:
    return unpack(party.receive(peer, kind).payload, peer, kind.__name__)


# ---------------------------------------------------------------- passive party


class SealedOwner(ColumnOwner):
    """Finds the best splits of own columns together with the active party, and learns those that won.

    `introduce` comes once the hint is sent, before the first tree.
    """

    sums_request, split_request = messages.SealedSumsRequest, messages.WonCandidates

    def introduce(self) -> None:
        """Exchange keys with the other passive parties by way of the active one, and make transfers with that."""
        server = self._server
        party, active = self._party, self._active
        # not an assertion: without it, a slip above would answer with open sums
        if not isinstance(server, LatticeSumsServer):
            raise PeerProtocolError(active, "expected the lattice map under sealed sums", at="Setup")
        self._key, self._shares_of = MovingKey(party, self._inputs.vouching, "sealed sums"), server
        self._divided: list[tuple[int, float, float, int]] = []  # a tree's splits: record, rows it may divide, depth
        inputs, schema = self._inputs, self._inputs.rows.table.schema
        self._columns = self._splits.bins.offsets, schema.categorical, server.have_missing
        self._directions, self._groups = own_constraints(
            inputs.common, inputs.directions, schema, party.name, inputs.roles.owners
        )
        party.send(active, messages.SealedColumns(Array.of(server.have_missing), self._key.signed()))
        terms = party.receive(active, messages.TournamentTerms)
        if set(terms.keys) != set(self._inputs.others) - {party.name}:
            wrong = "expected keys of the job's other passive parties"
            raise PeerProtocolError(active, wrong, at="TournamentTerms")
        try:
            self._key.meet(terms.keys)
        except CryptoError as error:
            raise PeerProtocolError(active, str(error), at="TournamentTerms") from None
        transfers = take_steps(party, {active: open_transfers(1)}, {})[active]
        places, widths = places_of(server.bounds), sealed_sums.Widths.of(server.bounds, terms.ridge)
        self._end = SealedEnd(
            1, transfers, Ahead(transfers), places, widths, terms.step, bool(inputs.common.monotone_constraints)
        )

    def start_tree(self, start: messages.TreeStart) -> None:
        super().start_tree(start)
        self._end.ahead.begin_tree()
        columns = view(start.columns, np.int32, (None,), peer=self._active, what="TreeStart.columns")
        self._candidates = Candidates(*self._columns, columns, self._inputs.common.onehot_below, self._directions)
        self._before: Wide | None = None
        self._parts: list[Wide] = []
        self._parents: list[Int32s] = []
        self._numbers = np.zeros(0, np.uint64)
        roots = start.trees
        self._used = GroupsLeft(self._groups, columns, roots)
        # of each node of the level: own splits above it, by record number; its tree; its way from the root
        self._trails: list[list[int]] = [[] for _ in range(roots)]
        self._trees, self._paths_of_nodes = np.arange(roots), np.zeros((roots, 0), np.uint8)
        # of each row, its way in each tree
        self._paths = Paths(self._end.transfers, roots * self._n_rows)

    def sums(self, request: messages.SumsRequest) -> None:
        """Send the masked sums of nodes of a level; after its last ones, find its best splits."""
        assert isinstance(request, messages.SealedSumsRequest)
        answer = super().sums(request)
        assert answer is not None
        self._party.send(self._active, answer)
        shares = self._shares_of.shares
        self._end.ahead.nbytes = request.ahead
        # without a column in the tree's sample the party takes no part in comparisons
        if not len(self._candidates):
            return
        parents = view(request.parents, np.int32, (len(shares),), peer=self._active, what="SealedSumsRequest.parents")
        nodes = 0 if self._before is None else len(self._before)
        of_level = parents == -1 if nodes == 0 else (parents >= 0) & (parents < nodes)
        self._parts.append(shares)
        self._parents.append(parents)
        # a parent twice would be two nodes whose sides are under the same pads
        so_far = np.concatenate(self._parents)
        once = len(np.unique(so_far)) == len(so_far) if nodes else len(so_far) <= len(self._trees)
        me, chain = self._party.name, request.parties
        chained = chain.count(me) == 1 and {*chain} <= self._key.others | {me}
        if not (once and of_level.all() and chained and len({*chain}) == len(chain)):
            what = "nodes of the last level, each once, and parties of the job"
            raise PeerProtocolError(self._active, f"expected {what}", at="SealedSumsRequest")
        if request.last:
            self._find_level(request)

    def _find_level(self, request: messages.SealedSumsRequest) -> None:
        parts, parents = np.concatenate(self._parts), np.concatenate(self._parents)
        self._parts, self._parents = [], []
        # nodes are in the common order: those asked about, then their siblings
        if self._before is None and len(parts) != len(self._trees):
            raise PeerProtocolError(self._active, "expected the roots of all trees", at="SealedSumsRequest")
        if self._before is not None:
            self._used.descend(parents)
            self._trees = np.tile(self._trees[parents], 2)
            self._trails = [list(self._trails[parent]) for parent in parents] * 2
            above = self._paths_of_nodes[parents]
            below = [np.pad(above, ((0, 0), (0, 1)), constant_values=turn) for turn in (0, 1)]
            self._paths_of_nodes = np.concatenate(below)
        nodes = len(parts) if self._before is None else 2 * len(parts)
        chain = request.parties
        at = chain.index(self._party.name)
        groups = None
        if self._before is not None and len(self._groups):
            groups = self._share_groups([*chain[:at], *chain[at + 1 :]], request.own_before + request.own_after)
        known = sealed_sums.Known.nothing(nodes, request.own_before, request.own_after)
        end, active = self._end, self._active
        found: LevelResult = take_steps(
            self._party,
            {active: find_best(end, parts, parents, self._before, self._candidates, known, groups)},
            {active: end.ahead},
        )[active]
        self._before, self._numbers, self._members = found.slots, found.best[:, sealed_sums.NUMBER, 0], found.members
        best = found.best
        if at:
            # the mask is this party's share of the best before it; the active party has the other
            so_far = sealed_sums.fitted(self._key.mask(chain[at - 1], best.shape, sending=False), end.widths)
            steps = sealed_sums.winner_of(
                end.transfers, np.stack([so_far, best], axis=1), end.widths, end.role, end.step
            )
            take_rest(self._party, {active: end.ahead})
            best = take_steps(self._party, {active: steps}, {active: end.ahead})[active]
        if at + 1 < len(chain):
            moved = subtract(best, self._key.mask(chain[at + 1], best.shape, sending=True))
            self._party.send(active, messages.MovedShares(Array.of(moved)))
        else:
            self._party.send(active, messages.OwnerShares(Array.of(best[:, sealed_sums.OWNER, 0])))
        # the active party does not wait for it
        take_rest(self._party, {active: end.ahead})

    def _share_groups(self, others: list[str], entries: int) -> ColumnGroups:
        """Share with the other passive parties which groups own columns leave; return this end's part of all."""
        within, of_columns = self._used.within, self._used.of_columns
        masks = [self._key.bit_masks(other, within.shape) for other in others]
        if others:
            moved = np.stack([within ^ mine for mine, _ in masks])
            self._party.send(self._active, messages.MovedGroups(Array.of(moved)))
        # the active party's entries are before own columns; it gives its own part of both
        return ColumnGroups(
            np.stack([np.zeros_like(within), within, *[theirs for _, theirs in masks]]),
            np.pad(of_columns, ((entries, 0), (0, 0))),
            np.pad(self._used.alone, ((0, 0), (entries, 0))),
        )

    def named_splits(self, message: messages.SplitRequest | messages.WonCandidates) -> messages.SplitRequest:
        """Open own candidates at the nodes that they won; return the splits as a request names them."""
        assert isinstance(message, messages.WonCandidates)
        active, what = self._active, "WonCandidates"
        nodes = view(message.nodes, np.int32, (None,), peer=active, what=f"{what}.nodes")
        shares = view(message.numbers, np.uint64, (len(nodes),), peer=active, what=f"{what}.numbers")
        if not len(nodes) or nodes[0] < 0 or nodes[-1] >= len(self._numbers) or np.any(np.diff(nodes) <= 0):
            raise PeerProtocolError(active, "expected ascending nodes of the level", at=f"{what}.nodes")
        self._won = nodes.copy()
        numbers = sealed_sums.opened(shares, self._numbers[nodes], sealed_sums.NUMBER)
        if np.any(numbers >= len(self._candidates)):
            raise PeerProtocolError(active, "expected shares of candidates' numbers", at=f"{what}.numbers")
        won = numbers.astype(np.int32)
        members = np.zeros((len(won), 0), np.uint8)
        if len(starts := self._candidates.halved_starts):
            picks = self._candidates.halves(won)
            steps = half_that_won(self._end.transfers, self._members[nodes], starts, picks, self._end.role)
            members = take_steps(self._party, {active: steps}, {active: self._end.ahead})[active]
            take_rest(self._party, {active: self._end.ahead})
        columns, left_bins = self._candidates.splits(won, members.astype(np.bool_))
        self._used.won(nodes, columns)
        return messages.SplitRequest(Array.of(columns), Array.of(np.packbits(left_bins, axis=1)))

    def _divide_nodes(self, request: messages.SplitRequest) -> Iterator[messages.SplitSides]:
        """Record the splits that candidates won; offer the sides of all rows, of which the other end can open some."""
        party, active, paths, n_rows = self._party, self._active, self._paths, self._n_rows
        # every row's way through the tree is transferred bit by bit: pads of sides are opened by the bits alone
        while paths.levels < self._paths_of_nodes.shape[1]:
            for of, choices in take_rows(party, active, self._paths.n_rows, messages.CHOICE_BITS, messages.SideChoices):
                message = view(choices.message, np.uint64, (None, None), peer=active, what="SideChoices.message")
                words = (-(-(of.stop - of.start) // 64),)
                flips = view(choices.flips, np.uint64, words, peer=active, what="SideChoices.flips")
                paths.accept(message, flips, of)
            paths.levels += 1
        features, left_bins = self._splits.asked(request)
        records, first = self._splits.record(features, left_bins), paths.next_level()
        for place, record in zip(self._won, records.tolist(), strict=True):
            self._divided.append((record, *self._splits.may_divide(record, self._trails[place]), paths.levels + 1))
            self._trails[place] = [*self._trails[place], record]
        for part in column_pieces(len(features), n_rows):
            nodes, trees = self._paths_of_nodes[self._won[part]], self._trees[self._won[part]]
            for of in row_pieces(n_rows, part.stop - part.start):
                sides = self._splits.sides(features[part], left_bins[part], of)
                rows = np.arange(of.start, of.stop, dtype=np.int32)
                for left in np.unpackbits(sides, axis=1, count=len(rows)).view(np.bool_):
                    self._inputs.observers.event(SidesLearned(party.name, rows, left))
                hidden = np.empty_like(sides)
                for tree in np.unique(trees).tolist():
                    mine, ways = trees == tree, slice(of.start + tree * n_rows, of.stop + tree * n_rows)
                    hidden[mine] = paths.hide(sides[mine], nodes[mine], first, ways)
                yield messages.SplitSides(Array.of(records), Array.of(hidden))

    def end_tree(self, end: messages.TreeEnd) -> None:
        if not self._by_column:
            sent = Array.of(np.empty((0, 2), np.uint8)) if end.rows is None else end.rows
            self._count(view(sent, np.uint8, (len(self._divided), 2), peer=self._active, what="TreeEnd.rows"))
        super().end_tree(end)

    def count_unfinished(self) -> None:
        """Count what a tree revealed that was broken off."""
        # the sizes of a tree that was broken off never come: each split is taken to halve a node's rows
        self._count(np.array([(8 * depth, 8 * depth) for *_, depth in self._divided], np.uint8).reshape(-1, 2))

    def _count(self, sizes: NDArray[np.uint8]) -> None:
        """Count what the sides of the tree's splits reveal, by the numbers of rows that went left and right."""
        rows = self._n_rows * 0.5 ** (sizes / 8.0)
        self._splits.count_revealed(
            (record, min(1.0, left / max(1.0, below)), min(1.0, right / max(1.0, above)))
            for (record, below, above, _), (left, right) in zip(self._divided, rows.tolist(), strict=True)
        )
        self._divided = []
