"""A passive party's end of sealed sums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treaty.crypto.sums.lattice_sums import LatticeSumsServer
from treaty.crypto.transfer.arithmetic import Wide
from treaty.crypto.transfer.sealed_sums import NUMBER, OWNER, Known, Widths, fitted, winner_of
from treaty.crypto.transfer.stock import Paths, open_transfers
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Int32s
from treaty.messaging.messages import Array, Message, column_pieces, row_pieces, take_rows, view
from treaty.systems.observers import SidesLearned
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import EncryptedOwner, SplitOwner
from treaty.systems.vertical.encrypted_columns import SplitRequest, SumsRequest, TreeEnd, TreeStart
from treaty.systems.vertical.exact_sums import ToldSides
from treaty.systems.vertical.sealed.level import (
    CHOICE_BITS,
    Candidates,
    LevelResult,
    MovedShares,
    MovingKey,
    OwnerShares,
    SealedColumns,
    SealedEnd,
    SealedSumsRequest,
    SideChoices,
    SplitSides,
    TournamentTerms,
    WonCandidates,
    find_best,
    places_of,
    take_steps,
)
from treaty.systems.vertical.training import Follower


class SealedOwner(EncryptedOwner):
    """Finds the best splits of own columns together with the active party, and learns those that won.

    Made after the hint is sent. `offsets` has the first slot of each own feature.
    """

    asks = SealedSumsRequest
    names = WonCandidates

    def __init__(
        self,
        inputs: RoleInput,
        follower: Follower,
        server: LatticeSumsServer,
        splits: SplitOwner,
        told: ToldSides,
        *,
        by_column: bool,
        offsets: Int32s,
    ) -> None:
        super().__init__(inputs, follower, server, splits, told, by_column=by_column)
        party = inputs.party
        self._party, self._key, self._shares_of = party, MovingKey(party, inputs.vouching), server
        self._divided: list[tuple[int, float, float, int]] = []  # a tree's splits: record, rows it may divide, depth
        self._columns = offsets, inputs.rows.table.schema.categorical, server.have_missing
        party.send(self._active, SealedColumns(Array.of(server.have_missing), self._key.signed()))
        terms = party.receive(self._active, TournamentTerms)
        if set(terms.keys) != set(inputs.others) - {party.name}:
            raise PeerProtocolError(
                self._active,
                f"expected keys of the job's other passive parties - at TournamentTerms from {self._active}",
            )
        try:
            self._key.meet(terms.keys)
        except CryptoError as error:
            raise PeerProtocolError(self._active, f"{error} - at TournamentTerms from {self._active}") from None
        transfers = take_steps(party, {self._active: open_transfers()})[self._active]
        self._end = SealedEnd(1, transfers, places_of(server.bounds), Widths.of(server.bounds, terms.ridge), terms.step)

    def start_tree(self, start: TreeStart) -> None:
        super().start_tree(start)
        columns = view(start.columns, np.int32, (None,), peer=self._active, what="TreeStart.columns")
        self._candidates = Candidates(*self._columns, columns)
        self._before: Wide | None = None
        self._parts: list[Wide] = []
        self._parents: list[Int32s] = []
        self._numbers = np.zeros(0, np.uint64)
        self._trails: list[list[int]] = [[]]  # of each node of the level, own splits above it, by record number
        self._paths, self._paths_of_nodes = Paths(self._end.transfers, self._n_rows), np.zeros((1, 0), np.uint8)

    def sums(self, request: SumsRequest) -> None:
        """Send the masked sums of nodes of a level; after its last ones, find its best splits."""
        assert isinstance(request, SealedSumsRequest)
        answer = super().sums(request)
        assert answer is not None
        self._party.send(self._active, answer)
        shares = self._shares_of.shares
        if not len(self._candidates):  # none of its columns is in the tree's sample
            return
        parents = view(request.parents, np.int32, (len(shares),), peer=self._active, what="SealedSumsRequest.parents")
        nodes = 0 if self._before is None else len(self._before)
        of_level = parents == -1 if nodes == 0 else (parents >= 0) & (parents < nodes)
        self._parts.append(shares)
        self._parents.append(parents)
        told = np.concatenate(self._parents)  # a parent twice would be two nodes whose sides are under the same pads
        once = len(np.unique(told)) == len(told)
        if not (once and of_level.all()) or not {request.before, request.after} <= self._key.others | {""}:
            what = "nodes of the last level, each once, and parties of the job"
            raise PeerProtocolError(self._active, f"expected {what} - at SealedSumsRequest from {self._active}")
        if request.last:
            self._find_level(request)

    def _find_level(self, request: SealedSumsRequest) -> None:
        parts, parents = np.concatenate(self._parts), np.concatenate(self._parents)
        self._parts, self._parents = [], []
        if self._before is not None:  # those asked about, then their siblings
            self._trails = [list(self._trails[parent]) for parent in parents] * 2
            above = self._paths_of_nodes[parents]
            below = [np.pad(above, ((0, 0), (0, 1)), constant_values=turn) for turn in (0, 1)]
            self._paths_of_nodes = np.concatenate(below)
        nodes = len(parts) if self._before is None else 2 * len(parts)
        alone = not request.before  # its own best is the first so far
        known = Known.nothing(nodes, int(alone), int(alone and request.own_after))
        end, active = self._end, self._active
        found: LevelResult = take_steps(
            self._party, {active: find_best(end, parts, parents, self._before, self._candidates, known)}
        )[active]
        self._before, self._numbers = found.slots, found.best[:, NUMBER, 0]
        best = found.best
        if request.before:
            so_far = fitted(self._key.mask(request.before, best.shape), end.widths)
            entries = [so_far, best, *[np.zeros_like(best)] * request.own_after]
            steps = winner_of(end.transfers, np.stack(entries, axis=1), end.widths, end.role, end.step)
            best = take_steps(self._party, {active: steps})[active]
        if request.after:
            self._party.send(active, MovedShares(Array.of(self._key.without_mask(request.after, best))))
        else:
            self._party.send(active, OwnerShares(Array.of(best[:, OWNER, 0])))

    def chosen(self, message: WonCandidates) -> SplitRequest:
        """Open own candidates at the nodes that they won; return the splits as a request names them."""
        active, what = self._active, "WonCandidates"
        nodes = view(message.nodes, np.int32, (None,), peer=active, what=f"{what}.nodes")
        shares = view(message.numbers, np.uint64, (len(nodes),), peer=active, what=f"{what}.numbers")
        if not len(nodes) or nodes[0] < 0 or nodes[-1] >= len(self._numbers) or np.any(np.diff(nodes) <= 0):
            raise PeerProtocolError(active, f"expected ascending nodes of the level - at {what}.nodes from {active}")
        self._won = nodes.copy()
        numbers = shares + self._numbers[nodes]
        if np.any(numbers >= len(self._candidates)):
            raise PeerProtocolError(active, f"expected shares of candidates' numbers - at {what}.numbers from {active}")
        columns, left_bins = self._candidates.splits(numbers.astype(np.int32))
        return SplitRequest(Array.of(columns), Array.of(np.packbits(left_bins, axis=1)))

    def divide(self, request: SplitRequest) -> Iterator[Message]:
        """Record splits; yield which rows go left, unless all rows are decided under pads: see `_offer`."""
        if self._by_column:
            return super().divide(request)
        self._limits.split(request)
        return self._offer(request)

    def _offer(self, request: SplitRequest) -> Iterator[SplitSides]:
        """Record the splits that `chosen` returned; offer the sides of all rows, of which the other end reads some."""
        party, active, paths, n_rows = self._party, self._active, self._paths, self._n_rows
        while paths.levels < self._paths_of_nodes.shape[1]:
            for of, choices in take_rows(party, active, n_rows, CHOICE_BITS, SideChoices):
                message = view(choices.message, np.uint64, (None, None), peer=active, what="SideChoices.message")
                words = (-(-(of.stop - of.start) // 64),)
                flips = view(choices.flips, np.uint64, words, peer=active, what="SideChoices.flips")
                paths.accept(message, flips, of)
            paths.levels += 1
        features, left_bins = self._splits.asked(request)
        records, first = self._splits.record(features, left_bins), paths.next_level()
        for place, record in zip(self._won, np.frombuffer(records.data, np.int32).tolist(), strict=True):
            self._divided.append((record, *self._splits.may_divide(record, self._trails[place]), paths.levels + 1))
            self._trails[place] = [*self._trails[place], record]
        for part in column_pieces(len(features), n_rows):
            nodes = self._paths_of_nodes[self._won[part]]
            for of in row_pieces(n_rows, part.stop - part.start):
                sides = self._splits.sides(features[part], left_bins[part], of)
                rows = np.arange(of.start, of.stop, dtype=np.int32)
                for left in np.unpackbits(sides, axis=1, count=len(rows)).view(np.bool_):
                    self._inputs.observers.event(SidesLearned(party.name, rows, left))
                yield SplitSides(records, Array.of(paths.hide(sides, nodes, first, of)))

    def end_tree(self, end: TreeEnd) -> None:
        if not self._by_column:
            self._count(end)
        super().end_tree(end)

    def close(self) -> None:
        self._count(None)

    def _count(self, end: TreeEnd | None) -> None:
        """Count what the sides of the tree's splits tell, by the numbers of rows that went left and right.

        Of a tree that was broken off (None) nobody says them: each split is taken to halve a node's rows.
        """
        if end is None:
            sizes = np.array([(8 * depth, 8 * depth) for *_, depth in self._divided], np.uint8).reshape(-1, 2)
        else:
            sent = Array.of(np.empty((0, 2), np.uint8)) if end.rows is None else end.rows
            sizes = view(sent, np.uint8, (len(self._divided), 2), peer=self._active, what="TreeEnd.rows")
        rows = self._n_rows * 0.5 ** (sizes / 8.0)
        self._splits.tell(
            (record, min(1.0, left / max(1.0, below)), min(1.0, right / max(1.0, above)))
            for (record, below, above, _), (left, right) in zip(self._divided, rows.tolist(), strict=True)
        )
        self._divided = []
