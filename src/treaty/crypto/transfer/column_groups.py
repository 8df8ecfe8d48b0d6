"""Interaction constraints under sealed sums: which columns may split a node, which nobody sees.

A group has all columns used above a node if it has those that each party used, and each party knows its own. A column
may split the node if one of its groups is such, or if it is of no group and alone was used above; whose column it is
knows which groups it is in. All bits are shared exclusively.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treaty.crypto.transfer.comparison import all_of, conjunctions
from treaty.crypto.transfer.stock import Bits, Steps, Transfers


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
    allowed: Bits = none ^ one ^ given.alone
    return allowed
