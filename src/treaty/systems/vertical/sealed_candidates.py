"""Candidates for splits of passive columns under sealed sums, and which of them a node may have, at both ends.

Candidates are in the order in which the plain grower breaks ties (`trees.scanning.scan_splits`): column by column,
missing values right before left, cuts ascending among the former and descending among the latter. Of a numeric column
the bins up to a cut go left, of a categorical one a single category, against the rest; where it has many, one of two
halves (`crypto.transfer.category_sets`), of which missing values may be a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import slots_of
from treaty.crypto.transfer.arithmetic import Wide, add, prefix_sums
from treaty.crypto.transfer.comparison import all_of, conjunctions
from treaty.crypto.transfer.stock import Bits, Steps, Transfers
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.messaging.messages import view
from treaty.messaging.party import Party
from treaty.systems.vertical.messages import MovedGroups
from treaty.trees.constraints import Directions
from treaty.trees.histograms import width_of


class Candidates:
    """Candidates of a tree's columns.

    `offsets`, int32 (features + 1,), has the first slot of each of the party's features, whose last slot is missing
    values; `categorical` and `missing`, bool (features,), say which are categories, and have missing values at all.
    `columns`, ascending, are the tree's; of those with `onehot_below` categories or more, halves are candidates. These
    columns' slots begin at `halved_starts` among `halved_slots`, which are those of all of them. `directions` are those
    of monotone constraints on the party's features, which it knows alone.
    """

    def __init__(
        self, offsets: Int32s, categorical: Flags, missing: Flags, columns: Int32s, onehot_below: int,
        directions: Directions | None = None,
    ) -> None:  # fmt: skip
        self._columns, self._categorical, self._missing = columns, categorical, missing
        self._offsets = offsets
        self._width = width_of(offsets)
        self._bins = (np.diff(offsets) - 1)[columns]
        self._halved = categorical[columns] & (self._bins >= onehot_below)
        self._numbers = [_HALVES if halved else _numbers(int(bins), *has) for bins, halved, *has in zip(
            self._bins, self._halved, categorical[columns], missing[columns], strict=True)]  # fmt: skip
        self._first = np.cumsum([0, *map(len, self._numbers)])
        self._directions = np.zeros(len(columns), np.int8) if directions is None else directions[columns]
        sizes = self._bins + 1
        self.halved_slots = np.flatnonzero(np.repeat(self._halved, sizes))
        self.halved_starts = (np.cumsum(sizes[self._halved]) - sizes[self._halved]).astype(np.intp)

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def slots(self) -> int:
        """How many slots the tree's columns have."""
        return int((self._bins + 1).sum())

    @property
    def features(self) -> Int32s:
        """The tree's columns, by their numbers among the party's features."""
        return self._columns

    @property
    def slot_numbers(self) -> Integers:
        """The tree's columns' slots, by their numbers among those of all features."""
        return slots_of(self._offsets, self._columns.astype(np.int64))

    @property
    def first_width(self) -> int:
        """How many of them are the first column's."""
        return int(self._bins[0]) + 1

    def sums(self, slots: Wide, halves: Wide) -> Wide:
        """Return shares of left children's sums, (nodes, candidates, 3, 2), from those of slots, (nodes, slots, 3, 2).

        Slots are those of the tree's columns alone; `halves`, (nodes, k, 3, 2), are the sums of halves.
        """
        # all of it is linear in the slots, so that each end adds up its own shares
        found, first = [np.zeros((len(slots), 0, *slots.shape[2:]), np.uint64)], 0
        of_column = iter(np.split(halves, halves.shape[1] // 2, axis=1) if halves.shape[1] else ())
        for column, bins, halved, numbers in zip(self._columns, self._bins, self._halved, self._numbers, strict=True):
            if halved:
                found.append(next(of_column))
                first += int(bins) + 1
                continue
            present = slots[:, first : first + bins]
            if not self._categorical[column]:
                present = prefix_sums(present.swapaxes(1, 2)).swapaxes(1, 2)
            with_missing = add(present, slots[:, first + bins : first + bins + 1])
            right = np.array([k for k, side in numbers if not side], np.intp)
            left = np.array([k for k, side in numbers if side], np.intp)
            found += [present[:, right], with_missing[:, left]]
            first += int(bins) + 1
        return np.concatenate(found, axis=1)

    @property
    def columns(self) -> NDArray[np.intp]:
        """The column of each candidate, (candidates,), by its place among the tree's."""
        return np.repeat(np.arange(len(self._columns)), np.diff(self._first))

    @property
    def directions(self) -> NDArray[np.uint8]:
        """Which candidates have a direction, and which of these are falling, (2, candidates)."""
        of = self._directions[self.columns]
        for first, bins, numbers in zip(self._first, self._bins, self._numbers, strict=False):
            # present values left and missing ones right have no order
            of[first : first + len(numbers)] *= [number != (bins - 1, False) for number in numbers]
        return np.array([of != 0, of < 0], np.uint8)

    def halves(self, numbers: Int32s) -> NDArray[np.int64]:
        """Return which of the halves candidates are, (k,), -1 for others."""
        place = np.searchsorted(self._first, numbers, side="right") - 1
        before = np.cumsum(self._halved) - 1
        return np.where(self._halved[place], 2 * before[place] + numbers - self._first[place], -1).astype(np.int64)

    def splits(self, numbers: Int32s, members: Flags) -> tuple[Int32s, Flags]:
        """Return columns, int32 (k,), and bins that go left, bool (k, width), of candidates.

        `members`, (k, categories), are those of the halves among them.
        """
        place = np.searchsorted(self._first, numbers, side="right") - 1
        left_bins = np.zeros((len(numbers), self._width), np.bool_)
        for row, (at, number) in enumerate(zip(place, numbers, strict=True)):
            k, side = self._numbers[at][number - self._first[at]]
            bins = int(self._bins[at])
            if self._halved[at]:
                left_bins[row, : bins + 1] = members[row, : bins + 1]
                continue
            # a number's bins up to the cut, of a category itself alone
            left_bins[row, (k if self._categorical[self._columns[at]] else 0) : k + 1] = True
            left_bins[row, bins] = side
        return self._columns[place].astype(np.int32), left_bins


_HALVES = [(0, False), (1, False)]


def _numbers(bins: int, categorical: bool, missing: bool) -> list[tuple[int, bool]]:
    """Return a column's candidates: the last bin, or the category, that goes left, and whether missing values do."""
    # without missing values the last cut would send nothing right
    last = bins if categorical or missing else bins - 1
    right = [(k, False) for k in range(last)]
    left = [(k, True) for k in reversed(range(bins if categorical else bins - 1))]
    return right + left if missing else right


# ----------------- interaction constraints: which columns may split a node, which nobody sees; bits are shared by xor
#
# A group has all columns used above a node if it has those that each party used, and each party knows its own. A column
# may split the node if one of its groups is such, or if it is of no group and alone was used above; whose column it is
# knows which groups it is in. With several passive parties, each shares its bits with all others: it sends them under
# masks to the active party, and the masks are the other passive parties' shares (`sealed.MovingKey`).


@dataclass(frozen=True, slots=True)
class ColumnGroups:
    """One end's part of which columns may split n nodes, uint8; at each end zeros stand for what the other one knows.

    `within`, (parties, n, groups), are shares of whether a group has all columns that a party used above a node;
    `groups`, (columns, groups), says which columns are in which group, and `alone`, (n, columns), which columns of no
    group may be used.
    """

    within: Bits
    groups: Bits
    alone: Bits


def allowed_columns(transfers: Transfers, given: ColumnGroups, role: int) -> Steps[Bits]:
    """Return shares of which columns may split which nodes, (n, columns)."""
    left = yield from all_of(transfers, given.within, role)
    shape = (given.groups.shape[1], *given.alone.shape)
    of_nodes, of_columns = np.broadcast_to(left.T[:, :, None], shape), np.broadcast_to(given.groups.T[:, None], shape)
    (fits,) = yield from conjunctions(transfers, of_columns.reshape(-1), of_nodes.reshape(1, -1), role)
    # no group fits if all of them do not
    one = np.uint8(1 - role)
    none = yield from all_of(transfers, fits.reshape(shape) ^ one, role)
    return none ^ one ^ given.alone


class GroupsLeft:
    """Columns of a passive party used above the nodes of a level.

    `groups`, bool (groups, n), are those of all its columns; `columns` are the tree's. `within`, uint8 (nodes, groups),
    says which groups have all its columns used above, `of_columns` (columns, groups) which have the tree's columns, and
    `alone` (nodes, columns) which columns of no group may be used again, as no other column was, whosever it is.
    """

    def __init__(self, groups: Flags, columns: Int32s, roots: int = 1) -> None:
        self._groups, self._columns, self._root = groups, columns, True
        self.within, self._won = np.ones((roots, len(groups)), np.uint8), np.full(roots, -1, np.int32)
        self._only, self.of_columns = self._won, groups[:, columns].T.astype(np.uint8)

    def won(self, nodes: Int32s, columns: Int32s) -> None:
        """Note the columns that won nodes of the level."""
        self._won[nodes] = columns

    def descend(self, parents: Int32s) -> None:
        """Go on to the children of these nodes, those asked about first, then their siblings."""
        column = self._won[parents]
        kept = self._groups[:, column].T | (column < 0)[:, None]
        self.within = np.tile(self.within[parents] & kept, (2, 1))
        same, self._root = self._root | (self._only[parents] == column), False
        self._only = np.tile(np.where(same, column, -1), 2)
        self._won = np.full(2 * len(parents), -1, np.int32)

    @property
    def alone(self) -> Bits:
        again: Flags = (self._only[:, None] == self._columns) & ~self.of_columns.any(axis=1)
        return again.astype(np.uint8)


def share_groups(
    party: Party, peers: Mapping[str, int], counts: Callable[[str], tuple[int, int]], within: Bits,
    ours: Sequence[Flags],
) -> dict[str, ColumnGroups]:  # fmt: skip
    """Take passive parties' shares of groups; return the active party's part for each of them.

    `peers` are those of the chain, with their numbers of columns in the tree. ``counts(peer)`` are own entries before
    and after its candidates: the first is what splits have to pass, others have the groups `ours`. `within`, (nodes,
    groups), are the groups that have all own columns used above.
    """
    moved, found = {}, {}
    for name in peers if len(peers) > 1 else ():
        shape = len(peers) - 1, *within.shape
        moved[name] = view(party.receive(name, MovedGroups).bits, np.uint8, shape, peer=name, what="MovedGroups.bits")
    for place, (peer, columns) in enumerate(peers.items()):
        # a party sends bits for all others, in their order
        others = [bits[place - (at < place)] & np.uint8(1) for at, bits in enumerate(moved.values()) if at != place]
        before, after = counts(peer)
        entries = np.array([np.zeros(within.shape[1]), *ours][:before] + [*ours][:after], np.uint8)
        entries = entries.reshape(-1, within.shape[1])
        # of own columns of no group, the scan has left out those that may not be used
        alone = np.append(1 - entries.any(axis=1), np.zeros(columns)).astype(np.uint8)
        found[peer] = ColumnGroups(
            np.stack([within, np.zeros_like(within), *others]),
            np.pad(entries, ((0, columns), (0, 0))),
            np.broadcast_to(alone, (len(within), len(alone))),
        )
    return found
