"""Interaction constraints under sealed sums: what each end gives to compute which columns may split a node.

Every party knows its own columns used above a node and their groups (`crypto.transfer.column_groups`). With several
passive parties, each shares its bits with all others: it sends them under masks to the active party, and the masks are
the other passive parties' shares (`sealed.MovingKey`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from treaty.crypto.transfer.column_groups import ColumnGroups
from treaty.crypto.transfer.stock import Bits
from treaty.machine.arrays import Flags, Int32s
from treaty.messaging.messages import view
from treaty.messaging.party import Party
from treaty.systems.vertical.messages import MovedGroups


class GroupsLeft:
    """Columns of a passive party used above the nodes of a level.

    `groups`, bool (groups, n), are those of all its columns; `columns` are the tree's. `within`, uint8 (nodes, groups),
    says which groups have all its columns used above, `of_columns` (columns, groups) which have the tree's columns, and
    `alone` (nodes, columns) which columns of no group may be used again, as no other column was, whosever it is.
    """

    def __init__(self, groups: Flags, columns: Int32s) -> None:
        self._groups, self._columns, self._root = groups, columns, True
        self.within, self._won = np.ones((1, len(groups)), np.uint8), np.full(1, -1, np.int32)
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
    party: Party,
    peers: Mapping[str, int],
    counts: Callable[[str], tuple[int, int]],
    within: Bits,
    ours: Sequence[Flags],
) -> dict[str, ColumnGroups]:
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
