"""SecPred: users' rows go down a tree that the server alone knows, on shares among the edge servers.

Liu et al., "Boosting Privately", ICDCS 2020. Every tree is filled up to a complete one, so that its shape is hidden.
All rows go down, also those of users who take no part in it, so that these can return. Holders of shares are all edge
servers, or the first two, to whom the third deals random numbers; `shares` says who may collude. The steps:

1. u -> each holder: shares of its binned rows, once.
2. Holders -> S -> all: whose rows all holders have.
3. For each level, S -> each holder: shares of the splits of all slots.
4. After the last level, S -> each holder: shares of the leaf values of all slots.
5. For each level, holders: compare each row with the split of its slot, on shares.
6. Each holder -> u: shares of the side to which each of its rows goes.
7. Holders: find the leaf value of each row, on shares.
8. Each holder -> u: shares of its rows' leaf values.

A user, and parties that may collude with it, learn from its shares only the values that they open to. Holders learn how
many rows each user has. Results and rows travel in pieces of bounded size (`pieces`).
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.shamir import Words
from treaty.data.binning import Bins
from treaty.errors import DataError, PeerProtocolError
from treaty.messaging.exchanges import take_rows
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.domain import gather_sound
from treaty.systems.fedxgb.messages import HeldRows, LeafShares, SideShares, SplitShares, ValueShares
from treaty.systems.fedxgb.pieces import Layout, PieceForm, RowShares, gather_rest, pieces_of, send_shares
from treaty.systems.fedxgb.shares import Shares, routing_of
from treaty.trees.slots import VALUE_BITS, SlotSplits

_MOST_VALUE = 2.0 ** (61 - VALUE_BITS)
_AT_ONCE = 1 << 16  # comparisons: their random numbers take up to a kilobyte each
_SLOTS_AT_ONCE = 1 << 21  # of these rows: edge servers send each other up to 16 bytes for each

Results = TypeVar("Results", SideShares, ValueShares)


def layout_of(bins: Bins, may_miss: NDArray[np.bool_]) -> Layout:
    """Return how rows and splits are encoded."""
    return Layout(n_bins=bins.n_bins.tolist(), categorical=bins.schema.categorical.tolist(), may_miss=may_miss.tolist())


def row_key(seed: bytes, encoded: NDArray[np.int64], holders: Sequence[str]) -> bytes:
    """Return the key of the randomness with which rows are shared: another one for other rows, or other holders."""
    # the shape as well: the same bytes in another shape are other rows
    head = msgspec.msgpack.encode([encoded.shape, list(holders)])
    return hmac.digest(seed, hashlib.sha256(head).digest() + np.ascontiguousarray(encoded).tobytes(), "sha256")


# ---------------------------------------------------------------- user


class SharedRows:
    """A user's part: shares its rows, `codes` uint8 (n_rows, n_features), and opens the results that holders send.

    The same rows have the same shares under the same secret `seed`; None: shares are new each time.
    """

    def __init__(self, party: Party, shares: Shares, codes: NDArray[np.uint8], seed: bytes | None = None) -> None:
        self._party, self._n_rows, self._of = party, len(codes), shares
        # [SecPred, step 1] u -> each holder: shares of the bins of its rows, and of which values are missing
        encoded = shares.layout.encode_rows(codes)
        # the same rows get the same shares again, so that holders know them by their digest when training resumes
        key = None if seed is None else row_key(seed, encoded, shares.holders)
        of_holders = zip(shares.holders, shares.share(encoded, key), strict=True)
        send_shares(party, RowShares, dict(of_holders), axis=0)

    def left(self, first: Mapping[str, SideShares], trees: int) -> NDArray[np.bool_]:
        """Return which rows go left in each tree, bool (trees, n_rows); `first` has pieces that have already come."""
        left = np.empty((trees, self._n_rows), np.bool_)
        number = self._of.number if self._of.bit is np.uint64 else ()
        for rows, shares in self._pieces(SideShares, first, self._of.bit, trees, number):
            # only this user has shares of all holders, so only it opens them
            left[:, rows] = self._of.bits(shares)
        return left

    def values(self, first: Mapping[str, ValueShares], trees: int) -> NDArray[np.float64]:
        """Return the rows' leaf values in each tree, float64 (trees, n_rows); `first` as in `left`."""
        values = np.empty((trees, self._n_rows))
        for rows, shares in self._pieces(ValueShares, first, np.uint64, trees, self._of.number):
            values[:, rows] = self._of.integers(shares) / 2.0**VALUE_BITS
        return values

    def _pieces(
        self, kind: type[Results], first: Mapping[str, Results], dtype: type[Any], trees: int, number: tuple[int, ...]
    ) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Receive pieces of all holders in turn; yield their rows and shares (holders, trees, rows, *number)."""
        # pieces are cut by the size of a row's shares
        bits = 8 * np.dtype(dtype).itemsize * trees * math.prod(number)
        take = partial(take_rows, self._party, n_rows=self._n_rows, bits=bits, kind=kind)
        for pieces in zip(*(take(edge, first=first.get(edge)) for edge in self._of.holders), strict=True):
            rows = pieces[0][0]
            shape = trees, rows.stop - rows.start, *number
            yield rows, np.stack([
                view(piece.shares, dtype, shape, peer=edge, what=f"{kind.__name__}.shares")
                for edge, (_, piece) in zip(self._of.holders, pieces, strict=True)
            ])  # fmt: skip


# ---------------------------------------------------------------- server


class HiddenModel:
    """The server's part: shares splits and leaf values of trees, anew for each committee; `shares` has one for each."""

    def __init__(self, party: Party, shares: Sequence[Shares]) -> None:
        self._party, self._shares = party, shares

    def row_owners(self, users: Sequence[Collection[str]]) -> list[str]:
        """Return users whose rows all holders have, given each committee's; PeerProtocolError when there are none."""
        # [SecPred, step 2] holders -> S -> all: whose rows all holders have, in the order in which they keep them
        holders = dict.fromkeys(edge for of in self._shares for edge in of.holders)
        have = {edge: self._party.receive(edge, HeldRows).users for edge in holders}
        found = []
        for of, own in zip(self._shares, users, strict=True):
            first, *others = (have[edge] for edge in of.holders)
            # the same number of rows at all holders, or shares do not fit together
            found += [n for n, rows in first.items() if n in own and all(other.get(n) == rows for other in others)]
        if not found:
            raise PeerProtocolError(next(iter(holders)), "expected some users whose rows all holders have, got none")
        return found

    def split(self, chosen: Sequence[SlotSplits]) -> None:
        """Take all rows down a level, by the splits of each tree."""
        # [SecPred, step 3] S -> each holder: shares of every slot's split, dummies included: a one-hot selector of the
        # column, with the bins of a categorical split or the side of missing values, and a threshold
        layout = self._shares[0].layout
        encoded = [
            [layout.encode_split(int(f), left) for f, left in zip(of.features, of.left_bins, strict=True)]
            for of in chosen
        ]
        weights = np.array([[split[0] for split in of_tree] for of_tree in encoded])
        thresholds = np.array([[split[1] for split in of_tree] for of_tree in encoded])
        for of in self._shares:
            # shares of their own for each committee: those of two tell an edge server of both nothing more
            shares = of.share(weights, None), of.share(thresholds, None)
            for edge, of_weights, of_thresholds in zip(of.holders, *shares, strict=True):
                self._party.send(edge, SplitShares(Array.of(of_weights), Array.of(of_thresholds)))

    def finish(self, values: NDArray[np.float64]) -> None:
        """Have every user learn the values of its rows, given those of all leaves, float64 (trees, slots)."""
        if np.any(np.abs(values) >= _MOST_VALUE):
            raise DataError(
                f"expected leaf values below {_MOST_VALUE:g}, which shares can hold, got {np.abs(values).max():g}: "
                "scale targets down"
            )
        # [SecPred, step 4] S -> each holder: shares of the leaf values of all slots
        scaled = np.rint(values * 2.0**VALUE_BITS).astype(np.int64)
        for of in self._shares:
            for edge, shares in zip(of.holders, of.share(scaled, None), strict=True):
                self._party.send(edge, LeafShares(Array.of(shares)))


# ---------------------------------------------------------------- edge server


def view_splits(splits: SplitShares, trees: int | None, slots: int, shares: Shares, server: str) -> tuple[Words, Words]:
    """Return shares of the weights and thresholds of all slots; PeerProtocolError if shapes do not fit."""
    shape = trees, slots, shares.layout.columns, *shares.number
    weights = view(splits.weights, np.uint64, shape, peer=server, what="SplitShares.weights")
    of_slots = len(weights), slots, *shares.number
    return weights, view(splits.thresholds, np.uint64, of_slots, peer=server, what="SplitShares.thresholds")


class HolderRows:
    """A holder's shares of all users' rows, and of where they are in the trees of a round.

    `parts` says which of the `n_rows` rows are whose; `routing` computes with the other holders. Results are made as
    they are sent.
    """

    def __init__(self, party: Party, server: str, shares: Shares, threads: int = 1) -> None:
        self._party, self._server, self._shares = party, server, shares
        self.routing = routing_of(shares, party, threads)
        self._of: dict[str, list[Words]] = {}
        self.parts: dict[str, slice] = {}
        self.n_rows = 0
        self._paths: Words | None = None

    def receive(self, users: Sequence[str], most: int, patience: float) -> dict[str, list[Words]]:
        """Receive users' rows, in pieces, at most `most` of each; users who send others, or are late, are left out."""
        shape = None, self._shares.layout.columns, *self._shares.number
        form = PieceForm(shape, self._shares.check, lambda name, n_rows: n_rows <= most)
        first = gather_sound(self._party, users, RowShares, timeout=patience)
        return gather_rest(self._party, RowShares, first, form, patience)

    def take(self, users: Mapping[str, list[Words]]) -> dict[str, int]:
        """Take users' rows as they were received; return how many each has."""
        self._of |= users
        return {name: sum(map(len, pieces)) for name, pieces in self._of.items()}

    def keep(self, users: Sequence[str]) -> None:
        """Keep the rows of some users, in this order; CryptoError or PeerError when a user's are missing."""
        if not self._of.keys() >= set(users):
            raise PeerProtocolError(self._server, "expected users whose rows are here", at="RowOwners")
        # where each user's rows are among all
        ends = np.cumsum([0, *(sum(map(len, self._of[name])) for name in users)]).tolist()
        self.parts = {name: slice(a, b) for name, a, b in zip(users, ends[:-1], ends[1:], strict=True)}
        none = np.empty((0, self._shares.layout.columns, *self._shares.number), np.uint64)
        rows = np.concatenate([none, *(piece for name in users for piece in self._of[name])])
        self._of, self.n_rows = {}, len(rows)
        self.routing.keep(rows)
        self.routing.end_batch()

    def start(self) -> None:
        """Put all rows at the root again."""
        self._paths = None

    def route(self, hidden: SplitShares) -> dict[str, Iterator[Message]]:
        """Take all rows down a level; return each user's results, `SideShares`.

        Raises PeerProtocolError or CryptoError when the server or another edge server broke the protocol.
        """
        n_slots = 1 if self._paths is None else self._paths.shape[1]
        weights, thresholds = view_splits(hidden, None, n_slots, self._shares, self._server)
        bits, paths = [], []
        for part in self._pieces(len(weights), n_slots):
            before = None if self._paths is None else self._paths[:, :, part]
            # [SecPred, step 5] holders: select the slot's value, compare it with the threshold, extend the path bits
            routed = self.routing.level(part, weights, thresholds, before)
            bits.append(routed[0])
            paths.append(routed[1])
        self.routing.end_batch()
        # sides are for users; paths stay with the holders
        whole, self._paths = np.concatenate(bits, axis=1), np.concatenate(paths, axis=2)
        # [SecPred, step 6] each holder -> u: shares of the sides of its own rows, which it alone opens
        return {name: pieces_of(SideShares, whole, own) for name, own in self.parts.items()}

    def value(self, leaves: LeafShares) -> dict[str, Iterator[Message]]:
        """Find the leaf values of all rows, below at least one level; return each user's results, `ValueShares`."""
        assert self._paths is not None
        trees, n_slots = self._paths.shape[:2]
        shape = trees, n_slots, *self._shares.number
        values = view(leaves.values, np.uint64, shape, peer=self._server, what="LeafShares.values")
        # [SecPred, step 7] holders: the path bits of each row times the shared leaf values
        found = [
            np.concatenate([
                self.routing.leaves(self._paths[tree][:, part], values[tree]) for part in self._pieces(1, n_slots)
            ])
            for tree in range(trees)
        ]  # fmt: skip
        self.routing.end_batch()
        whole = np.stack(found)
        # [SecPred, step 8] each holder -> u: shares of the leaf values of its own rows
        return {name: pieces_of(ValueShares, whole, own) for name, own in self.parts.items()}

    def _pieces(self, trees: int, slots: int) -> list[slice]:
        # random numbers for comparisons, and slots, bound how many rows are worked on at once
        length = max(1, min(_AT_ONCE // trees, _SLOTS_AT_ONCE // (trees * slots)))
        return [slice(start, start + length) for start in range(0, max(1, self.n_rows), length)]
