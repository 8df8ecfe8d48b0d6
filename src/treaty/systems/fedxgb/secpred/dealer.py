"""Two edge servers compute on additive shares of rows and a hidden model, with a third one's random numbers.

====================  ====================  ================================================  =====================
message               from -> to            content                                           protection
====================  ====================  ================================================  =====================
`WantedRows`,         first edge -> third   how many rows there are; how many of them go      TLS
`WantedLevel`,                              down a level of how many slots; how many leaves
`WantedLeaves`                              there are
`DealtCorrections`    third edge -> the     a key, and for the second edge server products    for that one alone
                      first two             of random numbers, see `additive_routing`
`SharedNumbers`       first <-> second      what `additive_routing` says; at first a seed     one-time masks; TLS
`DealingEnd`          first edge -> third   nothing more is wanted now                        TLS
====================  ====================  ================================================  =====================

The third edge server, the dealer, learns no more than numbers of rows, columns, trees and slots. It sees nothing that
the other two have or exchange. These re-randomise shares for users under a seed that they alone have (`fresh_shares`),
a new one each time that rows are kept: otherwise the dealer and one user would learn the model.
Adversary: honest but curious, of the three no two together; one of them with any users.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import count
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from treaty.crypto.sharing.additive_comparison import FreshShares
from treaty.crypto.sharing.additive_routing import (
    Keys,
    MaskedRows,
    at_root,
    deal_leaves,
    deal_level,
    deal_mask,
    leaf_values,
    mask_rows,
    numbers_of_level,
    route_level,
)
from treaty.crypto.sharing.hidden_splits import Layout
from treaty.crypto.sharing.secure_comparison import Program
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.secpred.shares import Bits, play_among

Result = TypeVar("Result")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_NONE = np.empty(0, np.uint64)
_MOST_MASKS = 1 << 30  # of the rows of all users, 8 GB
_MOST_NUMBERS = 1 << 28  # of some rows and trees, 2 GB
_OF_A_COMPARISON = 128


class WantedRows(Message):
    """A mask is wanted for all `rows` rows."""

    rows: _Count


class WantedLevel(Message):
    """`rows` rows, from number `start` on, go down a level of `trees` trees with `slots` slots each."""

    start: _Count
    rows: _Count
    trees: _AtLeastOne
    slots: _AtLeastOne


class WantedLeaves(Message):
    """The leaf values of `rows` rows are wanted, each one of `leaves` leaves."""

    rows: _Count
    leaves: _Count


class DealingEnd(Message):
    """Nothing more is wanted for now."""


class DealtCorrections(Message):
    """Secret random numbers for the receiver alone: a key, and uint64 shares of products for the second edge server."""

    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    corrections: Array


class Dealer:
    """The third edge server's part: deals random numbers to the first two of `edges`."""

    def __init__(self, party: Party, edges: Sequence[str], layout: Layout) -> None:
        self._party, self._edges, self._layout = party, edges, layout
        self._mask = np.empty((0, layout.columns), np.uint64)

    def serve(self) -> None:
        """Deal until the first edge server wants no more; PeerError if one is lost or the first breaks the protocol."""
        first = self._edges[0]
        while True:
            match self._party.receive(first, WantedRows, WantedLevel, WantedLeaves, DealingEnd):
                case WantedRows(rows=rows):
                    self._check(rows * self._layout.columns, _MOST_MASKS, "WantedRows")
                    self._mask, keys = deal_mask(rows, self._layout.columns)
                    self._deal(keys, _NONE)
                case WantedLevel(start=start, rows=rows, trees=trees, slots=slots):
                    if start + rows > len(self._mask):
                        there = f"at most {len(self._mask)} rows"
                        raise PeerProtocolError(
                            first, f"expected {there}, got {start + rows} - at WantedLevel.rows from {first}"
                        )
                    drawn = trees * slots * (self._layout.columns + 2 * rows) + trees * rows * _OF_A_COMPARISON
                    self._check(drawn, _MOST_NUMBERS, "WantedLevel")
                    self._deal(*deal_level(self._mask[start : start + rows], trees, slots, self._layout.bits))
                case WantedLeaves(rows=rows, leaves=leaves):
                    self._check(rows * leaves, _MOST_NUMBERS, "WantedLeaves")
                    self._deal(*deal_leaves(rows, 1, leaves))
                case _:
                    return

    def _check(self, numbers: int, most: int, what: str) -> None:
        """Refuse to draw more numbers at once than edge servers ask for, before any is drawn."""
        if numbers > most:
            first = self._edges[0]
            raise PeerProtocolError(first, f"expected at most {most} numbers at once - at {what} from {first}")

    def _deal(self, keys: Keys, corrections: Words) -> None:
        self._party.send(self._edges[0], DealtCorrections(keys[0], Array.of(_NONE)))
        self._party.send(self._edges[1], DealtCorrections(keys[1], Array.of(corrections)))


class AdditiveRouting:
    """Computation on additive shares, at one of the first two edge servers; see `shares.Routing` for the methods."""

    def __init__(self, party: Party, edges: Sequence[str], layout: Layout) -> None:
        self._party, self._edges, self._dealer = party, list(edges[:2]), edges[2]
        self._own, self._bits = self._edges.index(party.name), layout.bits
        empty = np.empty((0, layout.columns), np.uint64)
        self._rows, self._fresh = MaskedRows(empty, empty), FreshShares(self._own, secrets.token_bytes(32))
        self._messages = count()  # numbers of messages to users, none used twice

    def keep(self, rows: Words) -> None:
        key, _ = self._dealt(WantedRows(len(rows)), 0)
        self._rows, seed = self._run(mask_rows(self._own, rows, key))
        self._fresh = FreshShares(self._own, seed)

    def at_root(self, trees: int, rows: int) -> Words:
        return at_root(self._own, trees, rows)

    def level(self, part: slice, weights: Words, thresholds: Words, paths: Words | None) -> tuple[Bits, Words]:
        rows, (trees, slots) = self._rows.part(part), weights.shape[:2]
        wanted = WantedLevel(part.indices(len(self._rows))[0], len(rows), trees, slots)
        dealt = self._dealt(wanted, numbers_of_level(len(rows), trees, slots, self._bits))
        paths = self.at_root(trees, len(rows)) if paths is None else paths
        left, paths = self._run(route_level(self._own, rows, weights, thresholds, paths, self._bits, *dealt))
        return self._fresh.bits(next(self._messages), left), paths

    def leaves(self, paths: Words, values: Words) -> Words:
        leaves, rows = paths.shape
        dealt = self._dealt(WantedLeaves(rows, leaves), rows)
        found = self._run(leaf_values(self._own, paths[None], values[None], *dealt))[0]
        return self._fresh.numbers(next(self._messages), found)

    def add(self, a: Words, b: Words) -> Words:
        return a + b

    def rest(self) -> None:
        if self._own == 0:
            self._party.send(self._dealer, DealingEnd())

    def _dealt(self, wanted: Message, corrections: int) -> tuple[bytes, Words]:
        """Ask the dealer; return its key and, at the second edge server, `corrections` numbers, uint64."""
        if self._own == 0:
            self._party.send(self._dealer, wanted)
        dealt, shape = self._party.receive(self._dealer, DealtCorrections), (self._own * corrections,)
        return dealt.key, view(
            dealt.corrections, np.uint64, shape, peer=self._dealer, what="DealtCorrections.corrections"
        )

    def _run(self, program: Program[Result]) -> Result:
        return play_among(self._party, self._edges, program)
