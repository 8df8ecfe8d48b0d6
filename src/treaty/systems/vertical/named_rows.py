"""Which rows are in the nodes that a message is about, told to a passive party in pieces of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Int32s, Integers
from treaty.messaging.messages import Array, Message, MessageLeakage, send_rows, take_rows, view
from treaty.messaging.party import Party

Positions = NDArray[np.intp]


class NamedRows(Message):
    """The node of each of some rows, in the table's order, by its number in the message before; the rest follows.

    Of fewer than 256 nodes uint8, of fewer than 65,536 uint16, else uint32; the type's largest number stands for rows
    of no node. Tells which rows are in each node.
    """

    leakage: ClassVar = {
        "all_nodes": MessageLeakage("which rows are in each node", "exact"),
        "own_splits": MessageLeakage(
            "which rows are in the nodes of its splits, so in part which have similar labels",
            "exact",
        ),
    }

    nodes: Array


def node_type(count: int) -> np.dtype[np.unsignedinteger]:
    """Return the type in which numbers of `count` nodes are sent."""
    return np.dtype(next(kind for kind in (np.uint8, np.uint16, np.uint32) if count <= np.iinfo(kind).max))


def send_nodes(party: Party, peer: str, rows: Int32s, starts: Integers, n_rows: int) -> None:
    """Tell a peer the node of each of the table's `n_rows` rows; node k has rows[starts[k] : starts[k + 1]]."""
    count = len(starts) - 1
    kind = node_type(count)
    nodes = np.full(n_rows, np.iinfo(kind).max, kind)
    nodes[rows] = np.repeat(np.arange(count).astype(kind), np.diff(starts))
    send_rows(party, peer, n_rows, 8 * kind.itemsize, lambda of: NamedRows(Array.of(nodes[of])))


def take_nodes(
    party: Party, active: str, count: int, n_rows: int, kept: Callable[[NamedRows], None] = lambda _: None
) -> Iterator[tuple[Positions, Integers]]:
    """Receive what `send_nodes` sends; of each piece yield the rows in nodes, ascending, and the node of each.

    `kept` is called with each message. Raises PeerProtocolError for a node that is not one of `count`.
    """
    for of, named in take_rows(party, active, n_rows, 8 * node_type(count).itemsize, NamedRows):
        kept(named)
        rows, nodes = read_nodes(named, count, of.stop - of.start, active)
        yield rows + of.start, nodes


def read_nodes(named: NamedRows, count: int, n_rows: int, active: str) -> tuple[Positions, Integers]:
    """Return which of a piece's `n_rows` rows are in one of `count` nodes, ascending, and in which."""
    kind = node_type(count)
    nodes = view(named.nodes, kind, (n_rows,), peer=active, what="NamedRows.nodes")
    rows = np.flatnonzero(nodes != np.iinfo(kind).max)
    found = nodes[rows].astype(np.int64)
    if len(found) and found.max() >= count:
        raise PeerProtocolError(active, f"expected nodes below {count} - at NamedRows.nodes from {active}")
    return rows, found


class NamedNodes:
    """The rows of nodes in recorded messages of `send_nodes`; `rows` and their `nodes` are those of the pieces so far.

    The pieces are as long as they were when they were sent, which is not asked here.
    """

    def __init__(self, n_rows: int, count: int) -> None:
        self._left, self._count = n_rows, count
        self._n_rows = n_rows
        self.rows: Positions = np.empty(0, np.intp)
        self.nodes: Integers = np.empty(0, np.int64)

    def add(self, named: NamedRows, active: str) -> None:
        """Take the next piece; PeerProtocolError where it has more rows than are left."""
        length = named.nodes.shape[0] if len(named.nodes.shape) == 1 else 0
        if not 0 < length <= self._left:
            expected = f"expected 1 to {self._left} rows, got {length}"
            raise PeerProtocolError(active, f"{expected} - at NamedRows.nodes from {active}")
        rows, nodes = read_nodes(named, self._count, length, active)
        self.rows = np.append(self.rows, rows + self._n_rows - self._left)
        self.nodes = np.append(self.nodes, nodes)
        self._left -= length
