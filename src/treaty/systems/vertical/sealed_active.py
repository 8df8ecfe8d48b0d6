"""The active party's end of sealed sums: it learns which splits are best, and no passive party's sum.

Level by level, for all passive parties that have columns in the tree, in the job's order:

1. Masked sums of the nodes asked about; siblings follow from the parents' shares.
2. With each, at the same time, a tournament among its candidates. In the first one's the active party's bound takes
   part, which a split has to pass. The own best split takes part after the columns before it; if interaction
   constraints have groups, the best of each run of own columns that are in the same ones.
3. The winner so far is compared with the next passive party's, and so on.
4. The active party learns whose split each node has; the owner learns which, and says which rows go left. Sums of
   the children, and gains, follow from rows and own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload
from treaty.crypto.sums.lattice_sums import LatticeSumsClient
from treaty.crypto.transfer.ahead import Ahead
from treaty.crypto.transfer.arithmetic import Wide, add
from treaty.crypto.transfer.category_sets import half_that_won
from treaty.crypto.transfer.sealed_sums import NUMBER, OWNER, Known, KnownEntry, Widths, fitted, opened, winner_of
from treaty.crypto.transfer.stock import Bits, Paths, Steps, open_transfers
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.exchanges import take_columns
from treaty.messaging.messages import Array, Message, column_pieces, pack, row_pieces, view
from treaty.messaging.party import Party
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical import messages
from treaty.systems.vertical.cipher_choice import JobSize, Link, OfTrees, best_step, sends_little
from treaty.systems.vertical.encrypted_columns import EncryptedGradients, PassiveColumns, bits_at
from treaty.systems.vertical.sealed import LevelResult, SealedEnd, find_best, places_of, take_rest, take_steps
from treaty.systems.vertical.sealed_candidates import Candidates, ColumnGroups, share_groups
from treaty.trees.columns import SplitSearch
from treaty.trees.growth import RowsOfNodes
from treaty.trees.lockstep import LockstepRows
from treaty.trees.splits import Level, Splits, best_of, bound, fraction, scan

# Numbers of owners: no split is good enough, that of party k - 1 is best; after all parties', the own entries' numbers
_NOBODY, _FIRST_PEER = 0, 1


@dataclass(frozen=True, slots=True)
class Order:
    """The nodes of a level as both ends count them, first those asked about, then their siblings.

    `nodes` are their numbers in the tree; `totals` are (nodes, 3); `wanted` is the place of each among the level's
    nodes, -1 where a node is not to be split. `parents`, int32 (asked,), are places in the last level's order.
    """

    nodes: Int32s
    totals: Integers
    wanted: Int32s
    parents: Int32s

    @classmethod
    def of(cls, level: Level, last: Order | None) -> tuple[Order, Level]:
        """Return the order of a level, and the level with what is asked in it; `last` is the last level's, if any.

        Nodes asked about follow their parents' places: the tree's order would reveal which siblings are left ones.
        """
        place = {int(node): k for k, node in enumerate(level.nodes)}
        if last is None:
            wanted = np.array([place[int(node)] for node in level.asked], np.int32)
            return cls(level.asked, level.asked_totals, wanted, np.full(len(level.asked), -1, np.int32)), level
        siblings = np.flatnonzero(level.parent_index >= 0)
        before = {int(place): k for k, place in enumerate(last.wanted) if place >= 0}
        parents = np.array([before[int(parent)] for parent in level.parent_index[siblings]], np.int32)
        # by the place of their parents, which both ends know, not by their numbers in the tree
        siblings, parents = siblings[np.argsort(parents)].astype(np.int32), np.sort(parents)
        places = level.asked_index[siblings]  # in the order of parents; `index` is the inverse
        index = np.empty(len(places), np.int32)
        index[places] = np.arange(len(places), dtype=np.int32)
        asked, totals = level.asked[places], level.asked_totals[places]
        order = cls(
            np.concatenate([asked, level.nodes[siblings]]),
            np.concatenate([totals, level.totals[siblings]]),
            np.concatenate([np.array([place.get(int(node), -1) for node in asked], np.int32), siblings]),
            parents,
        )
        return order, replace(level, asked=asked, asked_totals=totals, asked_index=index[level.asked_index])


class SealedGradients(EncryptedGradients):
    """Queries to all passive parties, whose answers open to shares of sums.

    `order` is that of the level's nodes, `chain` are the passive parties with columns in the tree; `own_place` is how
    many of these come before the active party's columns, of which `entries` take part. `rows` are those of the nodes;
    `turns` has, of each level below the root, uint8 (trees * n_rows,) whether rows are in the sibling of a node asked
    about. `ends` are those of computing with each party, of which `far` ones have slow links. After `last_tree` nothing
    is made ahead.
    """

    client: LatticeSumsClient
    order: Order
    chain: Sequence[str]
    own_place: int
    entries: int
    rows: LockstepRows
    turns: list[Bits]
    ends: Mapping[str, SealedEnd]
    far: Set[str]
    last_tree: int

    def _request(self, peer: str, query: Payload, piece: slice, *, last: bool) -> Message:
        parents, chain, ahead = Array.of(self.order.parents[piece]), "\0".join(self.chain), self.ends[peer].ahead
        # on a near link each message costs more than it saves; before a first tree nobody knows what one takes
        more = peer in self.far and self._next_tree < self.last_tree
        ahead.nbytes = min(messages.MOST_AHEAD, max(1, ahead.evenly)) if more else 0
        return messages.SealedSumsRequest(pack(query), last, parents, chain, ahead.nbytes, *self.counts(peer))

    def counts(self, peer: str) -> tuple[int, int]:
        """Return how many own entries come before a party's candidates, and after them."""
        place = self.chain.index(peer) if peer in self.chain else -1
        # what splits have to pass comes before the first party's
        before = 1 + self.entries * (self.own_place == 0) if place == 0 else 0
        return before, self.entries * (self.own_place == place + 1 > 0)

    def _open(self, peer: str, answer: Payload, totals: Integers) -> NDArray[Any]:
        """Return own shares of the sums of a piece of the level's nodes."""
        return self.client.open_shares(peer, answer, self._columns[peer])


class SealedPeer(PassiveColumns):
    """The columns of a passive party, whose sums nobody opens; sides are fetched when a level's splits are found."""

    gradients: SealedGradients
    end: SealedEnd
    missing: Flags
    candidates: Candidates
    members: Bits  # own shares of the halves of the last level's nodes
    onehot_below: int

    def introduce(self) -> tuple[bytes, bytes]:
        """Take which columns have missing values; return the party's key for moving shares, and its signature."""
        columns = self._party.receive(self.peer, messages.SealedColumns)
        shape = (len(self.categorical),)
        self.missing = view(columns.missing, np.bool_, shape, peer=self.peer, what="SealedColumns.missing").copy()
        return columns.key

    def count_candidates(self, onehot_below: int) -> tuple[int, int]:
        """Return how many candidates all columns have, and how many slots those that are split by halves."""
        columns = np.arange(len(self.categorical), dtype=np.int32)
        found = Candidates(self.offsets, self.categorical, self.missing, columns, onehot_below)
        return len(found), len(found.halved_slots)

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        super().start_tree(grad, hess, rows, columns)
        self.end.ahead.begin_tree()
        self.candidates = Candidates(self.offsets, self.categorical, self.missing, columns, self.onehot_below)
        self.slots: Wide | None = None
        self._paths = Paths(self.end.transfers, grad.size)
        self._sizes: list[Integers] = []

    def ask_won(
        self, nodes: Int32s, places: Int32s, numbers: NDArray[np.uint64], rows: LockstepRows
    ) -> Steps[Any] | None:
        """Send the party shares of the candidates that won; return the steps by which it learns the sets among them.

        Nodes are named by their places, ascending: the tree's order would reveal which siblings are left ones.
        """
        self._asked, self._order = rows.rows(nodes, sampled=False), np.argsort(nodes)
        self._ways, _ = rows.rows_of_trees(nodes, sampled=False)
        self._party.send(self.peer, messages.WonCandidates(Array.of(places), Array.of(numbers)))
        if not len(starts_of_halves := self.candidates.halved_starts):
            return None
        none = np.full(len(places), -1, np.int64)
        return half_that_won(self.end.transfers, self.members[places], starts_of_halves, none, self.end.role)

    def choose_sides(self) -> None:
        """Choose sides of the nodes' rows, unless the party decides all rows."""
        for turns in () if self.by_column else self.gradients.turns[self._paths.levels :]:
            for of in row_pieces(len(turns), messages.CHOICE_BITS):
                message, flips = self._paths.choose(turns[of], of)
                self._party.send(self.peer, messages.SideChoices(Array.of(message), Array.of(flips)))
            self._paths.levels += 1

    def _left_of_nodes(self) -> tuple[Int32s, Flags]:
        """Take the sides of the nodes' rows."""
        (rows, starts), columns, records = self._asked, [], np.empty(0, np.int32)
        pads = self._paths.own_pads(self._paths.next_level())
        for part in column_pieces(len(starts) - 1, self._n_rows):
            first, count = self._party.receive(self.peer, messages.SplitSides), part.stop - part.start
            records = self._records(first, len(starts) - 1)
            columns += list(take_columns(
                self._party, self.peer, self._n_rows, count, first, lambda m: m.left, count, "SplitSides.left"
            ))  # fmt: skip
        # a side is under the pad of the row's way through the tree, which this party holds for the way that it chose
        left = bits_at(columns, rows, starts) ^ pads[self._ways].astype(np.bool_)
        going = np.add.reduceat(left, starts[:-1], dtype=np.int64)
        self._sizes.append(np.stack([going, np.diff(starts) - going], axis=1))
        self._report_sides(left)
        return records, left

    def end_tree(self) -> None:
        """End the tree; report about how many rows of the nodes won went left and right."""
        sizes = np.concatenate([np.empty((0, 2), np.int64), *self._sizes])
        of_table = np.clip(np.round(8 * np.log2(self._n_rows / np.maximum(sizes, 1))), 0, 255).astype(np.uint8)
        self._party.send(self.peer, messages.TreeEnd() if self.by_column else messages.TreeEnd(rows=Array.of(of_table)))

    def fetch_left(self) -> Flags:
        """Return which rows of the nodes won go left, node after node, bool (n,)."""
        records, left = super().left()
        of_nodes = np.split(left, self._asked[1][1:-1])
        self._answered = records[self._order], np.concatenate([of_nodes[node] for node in self._order])
        return left

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        """Do nothing: what was fetched is of these nodes, the nodes won, and `left` has their order."""

    def left(self) -> tuple[Int32s, Flags]:
        return self._answered


def make_ends(
    party: Party, peers: Mapping[str, SealedPeer], links: Mapping[str, Link], job: JobSize, common: BoostingOptions
) -> tuple[OfTrees, int]:
    """Introduce passive parties to each other, and make transfers with each.

    Return the candidates that each has in a tree, and as how many comparisons a step is counted. Raises ConfigError if
    `reg_lambda` is too large beside the units of hess for gains to be compared exactly.
    """
    bounds, rules = job.bounds, job.rules
    if not rules.exact:
        raise ConfigError(
            f"comparing gains exactly, as sealed sums do, needs reg_lambda to be less, got {rules.reg_lambda:g}; "
            'or take sums="open"'
        )
    keys = {name: peer.introduce() for name, peer in peers.items()}
    counted = {name: np.array(peer.count_candidates(rules.onehot_below)) for name, peer in peers.items()}
    candidates = {name: tuple((common.colsample_bytree * of).tolist()) for name, of in counted.items()}
    step = best_step(links, candidates, job)
    for name in peers:
        others = {other: key for other, key in keys.items() if other != name}
        party.send(name, messages.TournamentTerms(rules.ridge, step, others))
    made = take_steps(party, {name: open_transfers(0, short=sends_little(links[name])) for name in peers}, {})
    places, widths, monotone = places_of(bounds), Widths.of(bounds, rules.ridge), bool(common.monotone_constraints)
    for name, peer in peers.items():
        peer.onehot_below = rules.onehot_below
        peer.end = SealedEnd(0, made[name], Ahead(made[name]), places, widths, step, monotone)
    return candidates, step


class SealedSearch(SplitSearch):
    """The search for a tree's splits among own columns and those of `SealedPeer`s, as the module describes."""

    _own: int
    _order: Order | None
    _peers: dict[int, SealedPeer]
    _chain: list[int]  # of passive parties, those with columns in the tree
    _groups: Flags  # of interaction constraints, (groups, own columns of the tree)
    _runs: list[Int32s]  # own columns whose best split takes part as one entry
    gradients: SealedGradients

    def ask(self, level: Level, rows: RowsOfNodes) -> None:
        """Ask passive parties for masked sums, in the order that both ends share; sum up own columns."""
        if level.depth == 0:
            self._begin()
        assert isinstance(rows, LockstepRows)
        self._rows, own = rows, self.columns[self._own]
        # which groups are left below the root is known only on shares; of equal splits the lower column's comes first,
        # so that an entry is of columns that are neighbours
        apart = (self._groups[:, 1:] != self._groups[:, :-1]).any(axis=0) if level.depth else np.zeros(0, np.bool_)
        self._runs = list(np.split(own, np.flatnonzero(apart) + 1))
        self._shown_of_level, for_others = self.shown.part(level)
        self._asks_others = bool(self._chain and len(for_others.nodes))
        if self._asks_others:
            self._order, in_order = Order.of(for_others, self._order)
            self.gradients.order, self.gradients.entries, self.gradients.rows = self._order, len(self._runs), rows
            if level.depth:
                of_siblings, _ = rows.rows_of_trees(self._order.nodes[len(self._order.parents) :], sampled=False)
                self.gradients.turns.append(np.bincount(of_siblings, minlength=self.sample.grad.size).astype(np.uint8))
            self.gradients.ask(in_order, rows)
        self._asked = {self._own: level}
        self.sources[self._own].ask_sums(level, rows)

    def _begin(self) -> None:
        """Find the passive parties with columns in the tree, which compare their bests one after another."""
        assert self.own is not None
        self._own, self._order = self.own, None
        constraints, columns = self.rules.constraints, self.columns[self.own]
        self._groups = np.zeros((0, len(columns)), np.bool_)
        if constraints is not None:
            self._groups = constraints.groups[:, constraints.first[self.own] + columns]
        self._peers = {k: source for k, source in self.sources.items() if isinstance(source, SealedPeer)}
        self._chain = [k for k, peer in self._peers.items() if len(peer.candidates)]
        for peer in self._peers.values():
            self.gradients = peer.gradients
        if self._peers:
            self.gradients.chain, self.gradients.turns = [self._peers[k].peer for k in self._chain], []
            self.gradients.own_place = sum(k < self._own for k in self._chain)

    def choose(self, level: Level) -> Splits:
        """Return the best splits, of which passive parties' are known by the rows that they send left alone."""
        source = self.sources[self._own]
        parts: list[list[Splits]] = [[] for _ in self._runs]
        for totals, sums, limits in self.sums(self._own):
            for run, of in zip(self._runs, parts, strict=True):
                of.append(scan(
                    sums, totals, run, source.offsets, source.categorical, self.rules,
                    limits=limits, source=self._own, threads=self.threads,
                ))  # fmt: skip
        found = [self.of_level(self._own, of, level) for of in parts]
        best = best_of(found, level.totals, self.rules)
        if self._asks_others:
            self._settle(np.flatnonzero(self._shown_of_level), level, best, found)
        return best

    def _settle(self, shown: NDArray[np.intp], level: Level, found: Splits, own: Sequence[Splits]) -> None:
        """Put passive parties' splits in the place of own ones that are worse, in place.

        `shown` are the nodes, among the level's, that passive parties are asked about, `own` the splits of each run of
        own columns, of which only some may be allowed.
        """
        owners, numbers = self._tournament(shown, level, own)
        # `place` is where the common order has each node of the level, -1 for hidden ones
        place, order = np.full(len(level.nodes), -1, np.int32), self._order
        assert order is not None
        wanted = order.wanted >= 0
        place[shown[order.wanted[wanted]]] = np.flatnonzero(wanted)
        winner = np.where(place >= 0, owners[place], -1)
        found.gain[winner == _NOBODY], found.feature[winner == _NOBODY] = 0.0, -1
        for number, of in enumerate(own, self._first_own):
            for name in Splits.__slots__:
                getattr(found, name)[winner == number] = getattr(of, name)[winner == number]
        won_by = {k: np.flatnonzero(winner == k + _FIRST_PEER) for k in self._chain}
        won_by = {k: won[np.argsort(place[won])] for k, won in won_by.items() if len(won)}
        # all owners are asked before any answer is awaited, so that they work at the same time
        openings: dict[str, Steps[Any]] = {}
        for k, won in won_by.items():
            opening = self._peers[k].ask_won(level.nodes[won], place[won], numbers[k][place[won]], self._rows)
            if opening is not None:
                openings[self._peers[k].peer] = opening
        self._steps(openings)
        for k in won_by:
            self._peers[k].choose_sides()
        for k, won in won_by.items():
            totals, (grad, hess) = level.totals[won], map(np.atleast_2d, (self.sample.grad, self.sample.hess))
            of_left = self._rows.left_totals(grad, hess, level.nodes[won], self._peers[k].fetch_left())
            # the owner won with a candidate that passed these limits, so that other sides are not those of its split
            least = np.array([self.rules.least_hess, self.rules.min_child_samples])
            if np.any(of_left[:, 1:] < least) or np.any((totals - of_left)[:, 1:] < least):
                name, what = self._peers[k].peer, "splits with enough rows and weight in each child"
                raise PeerProtocolError(name, f"expected {what}", at="which rows go left,")
            # whether its column has a direction is not shown, and bounds nothing below the root
            found.source[won], found.feature[won], found.left_bins[won], found.direction[won] = k, 0, False, 0
            found.left_totals[won], found.gain[won] = of_left, self.rules.gain(totals, of_left)

    def _tournament(
        self, shown: NDArray[np.intp], level: Level, own: Sequence[Splits]
    ) -> tuple[Integers, dict[int, NDArray[np.uint64]]]:
        """Return whose split is best at each node of the level's order, and own shares of candidates' numbers."""
        order, names, party = self._order, {k: self._peers[k].peer for k in self._chain}, self.gradients.party
        assert order is not None
        bounds, ours = self._own_entries(order, shown, own)
        parts: dict[int, Wide] = {k: self.gradients.sums(peer.peer) for k, peer in self._peers.items()}
        ends, first, last = {}, self._chain[0], self._chain[-1]
        limits, fewest = self._limits(order), self.rules.fewest_of_category
        groups = self._share_groups(order, shown, level)
        for k in self._chain:
            peer = self._peers[k]
            counts = self.gradients.counts(peer.peer)
            before, after = [bounds, *ours][: counts[0]], ours[: counts[1]]
            known = Known(order.totals, self.rules.ridge, *limits, k + _FIRST_PEER, before, after, fewest)
            ends[peer.peer] = find_best(
                peer.end, parts[k], order.parents, peer.slots, peer.candidates, known, groups.get(peer.peer)
            )
        found: dict[str, LevelResult] = self._steps(ends)
        best = {k: found[name].best for k, name in names.items()}
        for k, name in names.items():
            self._peers[k].slots, self._peers[k].members = found[name].slots, found[name].members
        numbers = {k: shares[:, NUMBER, 0] for k, shares in best.items()}
        so_far = best[first]
        for k, after_k in pairwise(self._chain):
            # the other half of the best so far passes from one passive party to the next, under their common mask
            moved = party.receive(names[k], messages.MovedShares).shares
            added = view(moved, np.uint64, so_far.shape, peer=names[k], what="MovedShares.shares")
            so_far = fitted(add(so_far, added), self._peers[k].end.widths)
            end, entries = self._peers[after_k].end, np.stack([so_far, best[after_k]], axis=1)
            steps = winner_of(end.transfers, entries, end.widths, end.role, end.step)
            so_far = self._steps({names[after_k]: steps})[names[after_k]]
        shares, came = so_far[:, OWNER, 0], party.receive(names[last], messages.OwnerShares).shares
        theirs = view(came, np.uint64, shares.shape, peer=names[last], what="OwnerShares.shares")
        owners = opened(shares, theirs, OWNER).astype(np.int64)
        ours_too = range(self._first_own, self._first_own + len(own))
        if not np.isin(owners, [_NOBODY, *(k + _FIRST_PEER for k in self._chain), *ours_too]).all():
            name = names[last]
            raise PeerProtocolError(name, "expected shares of whose splits are best", at="OwnerShares")
        return owners, numbers

    def _steps(self, ends: Mapping[str, Steps[Any]]) -> dict[str, Any]:
        ahead, party = {peer: end.ahead for peer, end in self.gradients.ends.items()}, self.gradients.party
        results = take_steps(party, ends, ahead)
        take_rest(party, ahead)
        return results

    @property
    def _first_own(self) -> int:
        return _FIRST_PEER + len(self.columns)

    def _share_groups(self, order: Order, shown: NDArray[np.intp], level: Level) -> dict[str, ColumnGroups]:
        """Return own parts of which columns may split the nodes, for each passive party, if constraints have groups."""
        if level.depth == 0 or level.limits is None or not len(self._groups):
            return {}
        within, wanted = np.zeros((len(order.nodes), len(self._groups)), np.uint8), order.wanted >= 0
        within[wanted] = level.limits.within[shown[order.wanted[wanted]]]
        runs = np.split(self._groups.T, np.cumsum([len(run) for run in self._runs[:-1]]))
        ours = [run[0] if len(run) else np.zeros(len(self._groups), np.bool_) for run in runs]
        peers = {self._peers[k].peer: len(self.columns[k]) for k in self._chain}
        return share_groups(self.gradients.party, peers, self.gradients.counts, within, ours)

    def _own_entries(
        self, order: Order, shown: NDArray[np.intp], own: Sequence[Splits]
    ) -> tuple[KnownEntry, list[KnownEntry]]:
        """Return what a split has to pass at each node, and the best split of each run of own columns."""
        rules, nodes = self.rules, range(len(order.nodes))
        bounds = [bound(totals, rules.ridge, rules.threshold_in_units) for totals in order.totals]
        places = [-1 if wanted < 0 else int(shown[wanted]) for wanted in order.wanted]
        ours = []
        for number, of in enumerate(own, self._first_own):
            # 0 / 1 beats nothing before it
            has = [place >= 0 and of.feature[place] >= 0 for place in places]
            fractions = [
                fraction(order.totals[k], of.left_totals[places[k]], rules.ridge) if has[k] else (0, 1) for k in nodes
            ]
            ours.append(KnownEntry(fractions, [number if there else _NOBODY for there in has]))
        return KnownEntry(bounds, [_NOBODY for _ in nodes]), ours

    def _limits(self, order: Order) -> tuple[Integers, Integers]:
        """Return the least hess and rows of a left child, and one more than the most, int64 (2, nodes) each."""
        limits = []
        for part, least in ((1, self.rules.least_hess), (2, self.rules.min_child_samples)):
            # a node that is not to be split gets an empty range, which no candidate is in
            most = np.where(order.wanted >= 0, order.totals[:, part] - least + 1, least)
            limits.append(np.stack([np.full(len(most), least), np.maximum(most, least)]))
        return limits[0], limits[1]
