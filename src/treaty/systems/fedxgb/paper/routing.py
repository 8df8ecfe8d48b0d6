"""Users' rows go down a tree whose thresholds alone are hidden: the paper's SecPred, for comparison with ours.

====================  ====================  ================================================  =====================
message               from -> to            content                                           protection
====================  ====================  ================================================  =====================
`ShownSplits`         server -> all         the columns of a level's splits, where missing    TLS
                                            values go
`HiddenThresholds`    server -> each edge   shares of the thresholds                          Shamir shares
`ComparedShares`      user -> each edge     shares of the bins that its rows' slots compare,  Shamir shares
                                            in pieces
`RowCounts`           edge <-> edge         whose shares came, and of how many rows           TLS
`SharedNumbers`       edge <-> edge         what `route_shown` says                           Shamir shares
`Sides`               edge -> own users     which of their rows go left, in pieces            TLS
`Values`              server -> all         the leaf values, see `server`                     TLS
====================  ====================  ================================================  =====================

Rows are shared level by level, so that nothing is agreed on before, and in pieces: see `pieces`. A user that misses a
level is lost for good, since nobody knows where its rows are then.

**Who learns what.** Users and edge servers: the shape and the columns of all trees, and all leaf values. Edge servers:
the slot of every row of everybody at each level. Users: the same of their own rows; with rows made up for that,
thresholds. At most (edges - 1) // 2 edge servers may collude. A user that shares numbers other than bins, or shares
that are inconsistent, ends the training: an edge server cannot tell whose they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.hidden_splits import Layout
from treaty.crypto.sharing.secure_comparison import Setting, prepare
from treaty.crypto.sharing.secure_routing import route_shown, share_integers
from treaty.crypto.sharing.shamir_field import Words, check_numbers
from treaty.data.table import Schema
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.messaging.row_pieces import take_rows
from treaty.systems.fedxgb.authority import gather_sound
from treaty.systems.fedxgb.pieces import ComparedShares, PieceForm, gather_rest, pieces_of, send_shares
from treaty.systems.fedxgb.secpred.routing import come_to_all
from treaty.systems.fedxgb.secpred.shares import play_among
from treaty.systems.fedxgb.sums.user import AbsenceNotice
from treaty.trees.slots import SlotSplits

_AT_ONCE = 1 << 16  # comparisons: their random numbers take a kilobyte each


class ShownSplits(Message):
    """What users know of a level: int32 columns (trees, slots), -1 for none; bool whether missing values go left."""

    features: Array
    missing_left: Array


class HiddenThresholds(Message):
    """Thresholds of a level, the receiver's shares: uint64 (trees, slots, 2)."""

    thresholds: Array


class Sides(Message):
    """Whether some of the receiver's rows go left: bool (trees, rows)."""

    left: Array


def check_numeric(schema: Schema) -> None:
    """Raise ConfigError when there are categories, whose splits have no threshold."""
    categorical = [name for name, of in zip(schema.names, schema.categories, strict=True) if of is not None]
    if categorical:
        raise ConfigError(
            f'expected numeric columns under expose="paper", which compares with thresholds alone, got categorical '
            f'{", ".join(categorical[:5])}; encode them as numbers, or take expose="nothing"',
            public='expose="paper" takes no categorical columns; encode them as numbers',
        )


def shown_setting(layout: Layout, edges: int) -> Setting:
    """Return what edge servers agree on before they compare."""
    return Setting(servers=edges, degree=(edges - 1) // 2, bits=layout.shown_bits)


# ---------------------------------------------------------------- server


class PaperModel:
    """The server's part: `tell` tells everybody the columns of splits; thresholds are shared among the edge servers.

    `tell_values` tells everybody the leaf values, float64 (trees, slots).
    """

    def __init__(
        self,
        party: Party,
        edges: Sequence[str],
        layout: Layout,
        tell: Callable[[Message], None],
        tell_values: Callable[[NDArray[np.float64]], None],
    ) -> None:
        self._party, self._edges, self._layout, self._tell = party, edges, layout, tell
        self._setting = shown_setting(layout, len(edges))
        self.finish = tell_values

    def split(self, chosen: Sequence[SlotSplits]) -> None:
        """Have everybody's rows go down a level, by the splits of each tree."""
        features = np.stack([of.features for of in chosen])
        n_bins = np.array(self._layout.n_bins)[features]
        left_bins = np.stack([of.left_bins for of in chosen])
        missing_left = np.take_along_axis(left_bins, n_bins[..., None], axis=2)[..., 0] & (features >= 0)
        self._tell(ShownSplits(Array.of(features), Array.of(missing_left)))
        thresholds = np.array([
            [self._layout.shown_threshold(int(f), left) for f, left in zip(of.features, of.left_bins, strict=True)]
            for of in chosen
        ])  # fmt: skip
        for edge, shares in zip(self._edges, share_integers(self._setting, thresholds), strict=True):
            self._party.send(edge, HiddenThresholds(Array.of(shares)))


# ---------------------------------------------------------------- edge server


class SeenRows:
    """An edge server's part: where the rows of all domains' `users` are in the trees of a round.

    A user that is silent for `patience` seconds, or says that it has more than `most` rows, is lost.
    """

    def __init__(
        self,
        party: Party,
        edges: Sequence[str],
        server: str,
        users: Sequence[str],
        layout: Layout,
        most: int,
        patience: float,
    ) -> None:
        self.users, self._most = list(users), most
        self._party, self._edges, self._server, self._patience = party, list(edges), server, patience
        self._own, self._setting = self._edges.index(party.name), shown_setting(layout, len(edges))
        self._n_slots = 1
        self._slots: dict[str, NDArray[np.intp]] = {}

    def start(self) -> None:
        """Put all rows at the root again."""
        self._n_slots, self._slots = 1, {}

    def route(self, hidden: HiddenThresholds) -> dict[str, Iterator[Message]]:
        """Take all rows down a level; return what users are told, `Sides`. `users` are those still there.

        Raises PeerProtocolError or CryptoError when the server, another edge server or a user broke the protocol.
        """
        shape = (None, self._n_slots, 2)
        thresholds = view(hidden.thresholds, np.uint64, shape, peer=self._server, what="HiddenThresholds.thresholds")
        trees = len(thresholds)
        came = self._receive(trees)
        counts = {name: shares.shape[1] for name, shares in came.items()}
        kept = come_to_all(self._party, self._edges, counts)
        for name in set(self.users) - set(kept):
            self._party.leave_out(name)
        self.users = kept
        slots = [self._slots.get(name, np.zeros((trees, counts[name]), np.intp)) for name in kept]
        of_tree = np.arange(trees)[:, None] * self._n_slots
        left = self._compare(
            np.concatenate([np.empty((0, 2), np.uint64), *(came[name].reshape(-1, 2) for name in kept)]),
            thresholds.reshape(-1, 2),
            np.concatenate([np.empty(0, np.intp), *((own + of_tree).reshape(-1) for own in slots)]),
        )
        of_users = np.split(left, np.cumsum([own.size for own in slots])[:-1])
        told = (
            {name: of.reshape(own.shape) for name, of, own in zip(kept, of_users, slots, strict=True)} if kept else {}
        )
        self._slots = {name: 2 * own + ~told[name] for name, own in zip(kept, slots, strict=True)}
        self._n_slots *= 2
        return {name: pieces_of(Sides, of, slice(None)) for name, of in told.items()}

    def _receive(self, trees: int) -> dict[str, Words]:
        """Return the shares of users that sent what the protocol allows."""
        found: dict[str, Words] = {}
        form = PieceForm((trees, None, 2), check_numbers, self._fits)
        waiting = self.users
        while waiting:
            said = gather_sound(self._party, waiting, ComparedShares, AbsenceNotice, timeout=self._patience)
            first = {name: what for name, what in said.items() if isinstance(what, ComparedShares)}
            came = gather_rest(self._party, ComparedShares, first, form, self._patience)
            found |= {name: np.concatenate(pieces, axis=1) for name, pieces in came.items()}
            # absent from sums; their rows still go down
            waiting = [name for name, what in said.items() if isinstance(what, AbsenceNotice)]
        return found

    def _fits(self, name: str, n_rows: int) -> bool:
        return n_rows == self._slots[name].shape[1] if name in self._slots else n_rows <= self._most

    def _compare(self, values: Words, thresholds: Words, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        left = []
        for start in range(0, len(values), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            ready = play_among(self._party, self._edges, prepare(self._setting, self._own, len(values[part])))
            program = route_shown(self._setting, self._own, values[part], thresholds, slots[part], ready)
            left.append(play_among(self._party, self._edges, program))
        return np.concatenate([np.empty(0, np.bool_), *left])


# ---------------------------------------------------------------- user


class ComparedRows:
    """A user's part: shares the values that its rows' slots compare; `codes` are uint8 (n_rows, n_features)."""

    def __init__(self, party: Party, edges: Sequence[str], edge: str, layout: Layout, codes: NDArray[np.uint8]) -> None:
        self._party, self._edges, self._edge, self._layout, self._codes = party, edges, edge, layout, codes
        self._setting = shown_setting(layout, len(edges))

    def compare(self, told: ShownSplits, slots: NDArray[np.int64], n_slots: int) -> None:
        """Share what is compared in the slots that rows are in, int64 (trees, n_rows).

        Raises PeerProtocolError for a column that does not exist.
        """
        shape = (len(slots), n_slots)
        features = view(told.features, np.int32, shape, peer=self._edge, what="ShownSplits.features")
        missing_left = view(told.missing_left, np.bool_, shape, peer=self._edge, what="ShownSplits.missing_left")
        if np.any(features < -1) or np.any(features >= len(self._layout.n_bins)):
            raise PeerProtocolError(self._edge, f"expected existing columns - at ShownSplits from {self._edge}")
        missing_left = missing_left & (features >= 0)
        values = np.stack([
            self._layout.encode_shown(self._codes, np.maximum(of, 0)[own], missing[own])
            for of, missing, own in zip(features, missing_left, slots, strict=True)
        ])  # fmt: skip
        shares = share_integers(self._setting, values)
        send_shares(self._party, ComparedShares, dict(zip(self._edges, shares, strict=True)), axis=1)

    def left(self, told: Sides, trees: int) -> NDArray[np.bool_]:
        """Return which rows go left in each tree, bool (trees, n_rows); `told` is the first piece."""
        left = np.empty((trees, len(self._codes)), np.bool_)
        for rows, piece in take_rows(self._party, self._edge, len(self._codes), 8 * trees, Sides, told):
            shape = trees, rows.stop - rows.start
            left[:, rows] = view(piece.left, np.bool_, shape, peer=self._edge, what="Sides.left")
        return left
