"""Users' rows go down a tree that the server alone knows, on shares among the edge servers (SecPred).

====================  ====================  ================================================  =====================
message               from -> to            content                                           protection
====================  ====================  ================================================  =====================
`Rows`                user -> each edge     shares of its binned rows, once                   Shamir shares
`Have`, `Everybody`   edges -> server ->    whose rows all edge servers have                  TLS
                      all
`Hidden`              server -> each edge   shares of a level's splits in all slots           Shamir shares
`Exchanged`           edge <-> edge         what `secure_routing` says                        Shamir shares
`Routed`              each edge -> user     shares of the side its rows go to                 for that user alone
`HiddenLeaves`        server -> each edge   shares of the leaf values in all slots            Shamir shares
`Valued`              each edge -> user     shares of its rows' leaf values                   for that user alone
====================  ====================  ================================================  =====================

Rows of everybody go down every tree, also of those who take no part in it: whoever returns has followed. Edge servers
learn how many rows each user has. At most (edges - 1) // 2 of them may collude.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.hidden_splits import Layout
from treaty.crypto.secure_comparison import Program, Setting, prepare
from treaty.crypto.secure_routing import leaf_values, open_bits, open_integers, route_level, share_integers
from treaty.crypto.shamir_field import Words, check_numbers
from treaty.data.binning import Bins
from treaty.errors import CryptoError, DataError, PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.trees.slots import VALUE_BITS, SlotSplits

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_MOST_VALUE = 2.0 ** (61 - VALUE_BITS)
_AT_ONCE = 1 << 16  # comparisons: their random numbers take a kilobyte each


class Rows(Message):
    """A user's rows, uint64 (n, columns, 2): the receiver's shares of them. Tell how many there are."""

    shares: Array


class Have(Message):
    """Users whose rows an edge server has, and how many."""

    users: dict[str, int]


class Everybody(Message):
    """Users whose rows all edge servers have, in the order in which these keep them."""

    users: list[str]


class Hidden(Message):
    """Splits of a level, the receiver's shares: weights (trees, slots, columns, 2), thresholds (trees, slots, 2)."""

    weights: Array
    thresholds: Array


class HiddenLeaves(Message):
    """Leaf values, the receiver's shares: uint64 (trees, slots, 2)."""

    values: Array


class Exchanged(Message):
    """Numbers of one round among edge servers."""

    numbers: Array


class Came(Message):
    """Whose rows reached the sending edge server, and how many."""

    users: dict[str, int]


class Routed(Message):
    """The sender's shares of whether the receiver's rows go left, uint64 (trees, n, 2)."""

    shares: Array


class Valued(Message):
    """The sender's shares of the leaf values of the receiver's rows, uint64 (trees, n, 2)."""

    shares: Array


def layout_of(bins: Bins, may_miss: NDArray[np.bool_]) -> Layout:
    """Return how rows and splits are encoded."""
    return Layout(
        n_bins=bins.n_bins.tolist(),
        categorical=[c is not None for c in bins.schema.categories],
        may_miss=may_miss.tolist(),
    )


def setting_of(layout: Layout, edges: int) -> Setting:
    """Return what edge servers agree on before they compare."""
    return Setting(servers=edges, degree=(edges - 1) // 2, bits=layout.bits)


# ---------------------------------------------------------------- server


class HiddenModel:
    """The server's end: shares splits and leaf values of trees among the edge servers.

    Parameters
    ----------
    party : Party
    edges : sequence of str
    layout : Layout
    """

    def __init__(self, party: Party, edges: Sequence[str], layout: Layout) -> None:
        self._party, self._edges, self._layout = party, edges, layout
        self._setting = setting_of(layout, len(edges))

    def everybody(self) -> list[str]:
        """Return users whose rows all edge servers have.

        Raises
        ------
        PeerProtocolError
            When there are none.
        """
        have = [self._party.receive(edge, Have).users for edge in self._edges]
        both = [name for name, rows in have[0].items() if all(users.get(name) == rows for users in have[1:])]
        if not both:
            raise PeerProtocolError(self._edges[0], "expected some users whose rows all edge servers have, got none")
        return both

    def split(self, chosen: Sequence[SlotSplits]) -> None:
        """Have everybody's rows go down a level, by the splits of each tree."""
        encoded = [
            [self._layout.encode_split(int(f), left) for f, left in zip(of.features, of.left_bins, strict=True)]
            for of in chosen
        ]
        weights = np.array([[split[0] for split in of_tree] for of_tree in encoded])
        thresholds = np.array([[split[1] for split in of_tree] for of_tree in encoded])
        shares = share_integers(self._setting, weights), share_integers(self._setting, thresholds)
        for edge, of_weights, of_thresholds in zip(self._edges, *shares, strict=True):
            self._party.send(edge, Hidden(Array.of(of_weights), Array.of(of_thresholds)))

    def finish(self, values: NDArray[np.float64]) -> None:
        """Tell every user the values of its rows, float64 (trees, slots) being those of all leaves."""
        if np.any(np.abs(values) >= _MOST_VALUE):
            raise DataError(
                f"expected leaf values below {_MOST_VALUE:g}, which shares can hold, got {np.abs(values).max():g}: "
                "scale targets down"
            )
        scaled = np.rint(values * 2.0**VALUE_BITS).astype(np.int64)
        for edge, shares in zip(self._edges, share_integers(self._setting, scaled), strict=True):
            self._party.send(edge, HiddenLeaves(Array.of(shares)))


# ---------------------------------------------------------------- edge server


class HiddenRows:
    """An edge server's shares of everybody's rows, and of where they are in the trees of a round.

    Parameters
    ----------
    party : Party
        Connected with all edge servers and users.
    edges : sequence of str
        All of them, in the job's order.
    server : str
    layout : Layout
    threads : int

    Attributes
    ----------
    rows : uint64 (n, columns, 2)
        Its shares of the rows of those who are kept.
    parts : dict of str to slice
        Which of them are whose.
    """

    def __init__(self, party: Party, edges: Sequence[str], server: str, layout: Layout, threads: int = 1) -> None:
        self._party, self._edges, self._server = party, list(edges), server
        self._own = self._edges.index(party.name)
        self._layout, self._setting, self._threads = layout, setting_of(layout, len(edges)), threads
        self._of: dict[str, Words] = {}
        self.rows = np.empty((0, layout.columns, 2), np.uint64)
        self.parts: dict[str, slice] = {}
        self._paths: Words | None = None

    def take(self, users: Mapping[str, Rows]) -> dict[str, int]:
        """Take users' rows; return how many there are of those whose shares are what the protocol allows."""
        for name, rows in users.items():
            try:
                shares = view(rows.shares, np.uint64, (None, self._layout.columns, 2), peer=name, what="Rows.shares")
                check_numbers(shares, "shares of rows")
            except (PeerProtocolError, CryptoError):
                continue
            self._of[name] = shares
        return {name: len(shares) for name, shares in self._of.items()}

    def keep(self, users: Sequence[str]) -> None:
        """Keep the rows of some users, in this order.

        Raises
        ------
        PeerProtocolError
            When there are none of a user.
        """
        if not self._of.keys() >= set(users):
            raise PeerProtocolError(
                self._server, f"expected users whose rows are here - at Everybody from {self._server}"
            )
        ends = np.cumsum([0, *(len(self._of[name]) for name in users)]).tolist()
        self.parts = {name: slice(a, b) for name, a, b in zip(users, ends[:-1], ends[1:], strict=True)}
        self.rows = np.concatenate([np.empty((0, self._layout.columns, 2), np.uint64), *(self._of[u] for u in users)])
        self._of = {}

    def start(self) -> None:
        """Put all rows at the root again."""
        self._paths = None

    def route(self, hidden: Hidden) -> dict[str, Routed]:
        """Take all rows down a level; return what each user is told.

        Raises
        ------
        PeerProtocolError, CryptoError
            When what the server or another edge server sent is not what the protocol allows.
        """
        columns, n_slots = self._layout.columns, 1 if self._paths is None else self._paths.shape[1]
        weights = view(hidden.weights, np.uint64, (None, n_slots, columns, 2), peer=self._server, what="Hidden.weights")
        trees = len(weights)
        thresholds = view(
            hidden.thresholds, np.uint64, (trees, n_slots, 2), peer=self._server, what="Hidden.thresholds"
        )
        bits, paths = [], []
        for part in self._pieces(trees):
            rows = self.rows[part]
            before = None if self._paths is None else self._paths[:, :, part]
            ready = self._run(prepare(self._setting, self._own, trees * len(rows)))
            routed = self._run(
                route_level(self._setting, self._own, rows, weights, thresholds, before, ready, self._threads)
            )
            bits.append(routed[0])
            paths.append(routed[1])
        whole, self._paths = np.concatenate(bits, axis=1), np.concatenate(paths, axis=2)
        return {name: Routed(Array.of(np.ascontiguousarray(whole[:, part]))) for name, part in self.parts.items()}

    def value(self, leaves: HiddenLeaves) -> dict[str, Valued]:
        """Find the leaf values of all rows; return what each user is told."""
        if self._paths is None:
            raise PeerProtocolError(self._server, f"expected splits before leaf values - from {self._server}")
        trees, n_slots = self._paths.shape[:2]
        values = view(leaves.values, np.uint64, (trees, n_slots, 2), peer=self._server, what="HiddenLeaves.values")
        found = [
            np.concatenate([
                self._run(leaf_values(self._setting, self._own, self._paths[tree][:, part], values[tree]))
                for part in self._pieces(1)
            ])
            for tree in range(trees)
        ]  # fmt: skip
        whole = np.stack(found)
        return {name: Valued(Array.of(np.ascontiguousarray(whole[:, part]))) for name, part in self.parts.items()}

    def _pieces(self, trees: int) -> list[slice]:
        length = max(1, _AT_ONCE // trees)
        return [slice(start, start + length) for start in range(0, max(1, len(self.rows)), length)]

    def _run(self, program: Program[Result]) -> Result:
        return play_among(self._party, self._edges, program)


def play_among(party: Party, edges: Sequence[str], program: Program[Result]) -> Result:
    """Play a program with the other edge servers.

    Raises
    ------
    CryptoError, PeerError
        What the program raises, and when an edge server is lost.
    """
    try:
        outgoing = next(program)
        while True:
            for receiver, numbers in outgoing.items():
                party.send(edges[receiver], Exchanged(Array.of(np.ascontiguousarray(numbers))))
            replies = {}
            for sender in outgoing:
                name = edges[sender]
                came = party.receive(name, Exchanged).numbers
                replies[sender] = view(came, np.uint64, came.shape, peer=name, what="Exchanged.numbers")
            outgoing = program.send(replies)
    except StopIteration as stopped:
        result: Result = stopped.value
        return result


def come_to_all(party: Party, edges: Sequence[str], users: Mapping[str, int]) -> list[str]:
    """Return users of whom all edge servers have as many rows, in the same order at all; `users` are the own ones."""
    others = [edge for edge in edges if edge != party.name]
    for edge in others:
        party.send(edge, Came(dict(users)))
    told = [party.receive(edge, Came).users for edge in others]
    return sorted(name for name, rows in users.items() if all(of.get(name) == rows for of in told))


# ---------------------------------------------------------------- user


class SharedRows:
    """A user's end: shares its rows, and opens what the edge servers tell it of them.

    Parameters
    ----------
    party : Party
        Connected with all edge servers.
    edges : sequence of str
    layout : Layout
    codes : uint8 (n_rows, n_features)
    """

    def __init__(self, party: Party, edges: Sequence[str], layout: Layout, codes: NDArray[np.uint8]) -> None:
        self._party, self._edges, self._n_rows = party, list(edges), len(codes)
        self._setting = setting_of(layout, len(edges))
        for edge, shares in zip(edges, share_integers(self._setting, layout.encode_rows(codes)), strict=True):
            party.send(edge, Rows(Array.of(np.ascontiguousarray(shares))))

    def left(self, own: Routed, edge: str, trees: int) -> NDArray[np.bool_]:
        """Return which rows go left in each tree, bool (trees, n_rows), the own edge server having told its shares."""
        return open_bits(self._setting, self._shares(own, edge, trees))

    def values(self, own: Valued, edge: str, trees: int) -> NDArray[np.float64]:
        """Return the rows' leaf values in each tree, float64 (trees, n_rows)."""
        opened = open_integers(self._setting, self._shares(own, edge, trees))
        return opened / 2.0**VALUE_BITS

    def _shares(self, own: Routed | Valued, edge: str, trees: int) -> Words:
        told = {e: own if e == edge else self._party.receive(e, type(own)) for e in self._edges}
        shape = (trees, self._n_rows, 2)
        return np.stack([
            view(said.shares, np.uint64, shape, peer=e, what=f"{type(said).__name__}.shares")
            for e, said in told.items()
        ])  # fmt: skip
