"""The two forms in which rows and a hidden model are shared among edge servers, and who computes on the shares.

============  =========================================  ==============================================================
`comparison`  who has shares                             who may collude
============  =========================================  ==============================================================
"shamir"      all edge servers of a committee            at most (committee - 1) // 2 of its edge servers, with users,
                                                         or with the server, who knows the model
"additive"    the first two of a committee; the third    no two of a committee's three edge servers; each with users, or
              deals random numbers (`Dealer`)            with the server, who knows the model
============  =========================================  ==============================================================

A committee (`options.committees_of`) has the rows of one domain's users, or of all. Splits are shared anew for each, so
an edge server in several has one share of each of several independent sharings. Two edge servers that share no
committee have nothing together.

A user who colludes adds the results of its own rows, and nothing else. Under "additive" this holds because the first
two edge servers re-randomise shares before they send them (`FreshShares`), under a seed that they alone have, a new one
each time that rows are kept. From the shares as they compute them, the dealer and a user would find the model. The
dealer learns no more than numbers of rows, columns, trees and slots. Adversary: honest but curious.

In committees of three both forms protect alike: one edge server alone has nothing. In one of five, two may collude
under "shamir". Under "shamir" a wrong share is often noticed, under "additive" never. The server does not deal, though
it is assumed not to collude with edge servers: it would learn for how many rows predictions are asked, and all rows
together with one edge server.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import FreshShares
from treaty.crypto.sharing import additive_routing, shamir_routing
from treaty.crypto.sharing import shamir as field
from treaty.crypto.sharing.shamir import Words
from treaty.crypto.sharing.shamir_routing import Program, ServerSetting, prepare
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.messages import Array, Message, leaks, row_pieces, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.options import Comparison
from treaty.systems.fedxgb.pieces import Layout
from treaty.systems.fedxgb.roles import holders_of

Bits = NDArray[Any]  # shares of bits: of `Shares.bit`, uint64 or uint8
Result = TypeVar("Result")


@leaks("shares of intermediate numbers", "masked")
class SharedNumbers(Message):
    """Shares of some of the numbers of one round among edge servers, uint64."""

    numbers: Array


@dataclass(frozen=True, slots=True)
class Shares:
    """How rows and numbers are laid out, shared and opened.

    ``share(values, key)`` takes int64 (...) and returns uint64 (holders, ..., *number); the randomness is that of a
    secret key that serves these values alone; None: of a fresh one. ``check(numbers, what)`` raises CryptoError for
    numbers that cannot be shares. `integers` and `bits` open shares; CryptoError for shares seen to be inconsistent.
    """

    layout: Layout
    holders: list[str]  # the edge servers that have shares, in order
    others: list[str]  # the first of these deals random numbers to the holders
    number: tuple[int, ...]  # shape of a share of a number, uint64: two words, or one
    bit: type[np.uint64] | type[np.uint8]  # of a share of a bit for users: shared as a number is, or in one piece
    share: Callable[[Integers, bytes | None], Words]
    check: Callable[[Words, str], None]
    add: Callable[[Words, Words], Words]
    integers: Callable[[Words], Integers]
    bits: Callable[[Bits], NDArray[np.bool_]]


def setting_of(bits: int, edges: int) -> ServerSetting:
    """Return what edge servers agree on before they compare Shamir shares of numbers of so many bits."""
    return ServerSetting(servers=edges, degree=(edges - 1) // 2, bits=bits)


def shares_of(comparison: Comparison, layout: Layout, edges: Sequence[str]) -> Shares:
    """Return how numbers are shared among some edge servers."""
    if comparison == "additive":
        return Shares(
            layout=layout,
            holders=holders_of(comparison, edges),
            others=list(edges[2:]),
            number=(),
            bit=np.uint8,
            share=additive_routing.share_integers,
            check=lambda shares, what: None,  # every number is a share
            add=np.add,
            integers=additive_routing.open_integers,
            bits=additive_routing.open_bits,
        )
    # degree (edges - 1) // 2: so many edge servers learn nothing, one more rebuilds
    setting = setting_of(layout.bits, len(edges))
    return Shares(
        layout=layout,
        holders=holders_of(comparison, edges),
        others=[],
        number=(2,),
        bit=np.uint64,
        share=partial(shamir_routing.share_integers, setting),
        check=field.check_numbers,
        add=field.add,
        integers=partial(shamir_routing.open_integers, setting),
        bits=partial(shamir_routing.open_bits, setting),
    )


class ShamirRouting:
    """Computation on Shamir shares, at an edge server together with all others; shapes as in `shamir_routing`.

    `one` is the own share of 1. Methods raise CryptoError or PeerError if shapes do not match, or another edge server
    is lost or breaks the protocol.
    """

    def __init__(self, party: Party, shares: Shares, threads: int) -> None:
        self._party, self._edges, self._own = party, shares.holders, shares.holders.index(party.name)
        self._setting, self._threads = setting_of(shares.layout.bits, len(shares.holders)), threads
        self._rows = np.empty((0, shares.layout.columns, 2), np.uint64)
        self.one = field.constant(1)  # a constant is a share of itself

    def keep(self, rows: Words) -> None:
        """Take the rows of all users, uint64 (n, columns, *number)."""
        self._rows = rows

    def level(self, part: slice, weights: Words, thresholds: Words, paths: Words | None) -> tuple[Bits, Words]:
        """Take some of the rows a level down, from the root where `paths` is None; return sides and paths.

        Shares of sides give users nothing but sides, even together with other parties; paths are not for users.
        """
        setting, own, rows = self._setting, self._own, self._rows[part]
        # random bits and products for the comparisons, made before any row is used
        ready = play_among(self._party, self._edges, prepare(setting, own, len(weights) * len(rows)))
        program = shamir_routing.route_level(setting, own, rows, weights, thresholds, paths, ready, self._threads)
        return play_among(self._party, self._edges, program)

    def leaves(self, paths: Words, values: Words) -> Words:
        """Find leaf values: uint64 (leaves, n, *number) and (leaves, *number) -> (n, *number).

        Shares, and sums of them, give users nothing but values.
        """
        program = shamir_routing.leaf_values(self._setting, self._own, paths, values)
        return play_among(self._party, self._edges, program)

    def end_batch(self) -> None:
        """Tell the dealer, if there is one, that no more requests follow for now; called after `keep`, too."""


def play_among(party: Party, edges: Sequence[str], program: Program[Result]) -> Result:
    """Play a program with the other edge servers; `edges` are in the order of its servers."""
    try:
        outgoing = next(program)
        while True:
            outgoing = program.send(_exchange(party, edges, outgoing))
    except StopIteration as stopped:
        result: Result = stopped.value
        return result


def _exchange(party: Party, edges: Sequence[str], outgoing: Mapping[int, Words]) -> dict[int, Words]:
    """Send numbers to other edge servers, and return theirs."""
    # in every program all numbers of a round have one shape
    shape = next(iter(outgoing.values())).shape
    replies = {sender: np.empty(shape, np.uint64) for sender in outgoing}
    flat = {edges[other]: np.ascontiguousarray(numbers).reshape(-1) for other, numbers in outgoing.items()}
    room = {edges[other]: numbers.reshape(-1) for other, numbers in replies.items()}
    # all sides send a piece before anyone sends the next: no party has to hold what others are ahead
    for of in row_pieces(math.prod(shape), 64):
        for name, numbers in flat.items():
            party.send(name, SharedNumbers(Array.of(numbers[of])))
        for name, numbers in room.items():
            came, length = party.receive(name, SharedNumbers).numbers, (of.stop - of.start,)
            numbers[of] = view(came, np.uint64, length, peer=name, what="SharedNumbers.numbers")
    return replies


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_NONE = np.empty(0, np.uint64)
_MOST_MASKS = 1 << 30  # of the rows of all users, 8 GB
_MOST_NUMBERS = 1 << 28  # of some rows and trees, 2 GB
_OF_A_COMPARISON = 128


@leaks("how many rows there are", "control")
class WantedRows(Message):
    """Deal a mask for all `rows` rows."""

    rows: _Count


@leaks("how many rows go down how many slots of how many trees", "control")
class WantedLevel(Message):
    """Deal for `rows` rows, from number `start` on, to go down a level of `trees` trees with `slots` slots each."""

    start: _Count
    rows: _Count
    trees: _AtLeastOne
    slots: _AtLeastOne


@leaks("how many rows and leaves there are", "control")
class WantedLeaves(Message):
    """Deal for the leaf values of `rows` rows, each one of `leaves` leaves."""

    rows: _Count
    leaves: _Count


@leaks("that no more requests follow", "control")
class DealingEnd(Message):
    """Nothing more is wanted for now."""


@leaks("random numbers", "nothing")
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
                    # the dealer keeps the mask: it deals products with it, level by level
                    self._mask, keys = additive_routing.deal_mask(rows, self._layout.columns)
                    self._deal(keys, _NONE)
                case WantedLevel(start=start, rows=rows, trees=trees, slots=slots):
                    if start + rows > len(self._mask):
                        few = f"expected at most {len(self._mask)} rows, got {start + rows}"
                        raise PeerProtocolError(first, few, at="WantedLevel.rows")
                    # what would be drawn, before anything is: a hostile request must not fill memory
                    drawn = trees * slots * (self._layout.columns + 2 * rows) + trees * rows * _OF_A_COMPARISON
                    self._check(drawn, _MOST_NUMBERS, "WantedLevel")
                    of_rows = self._mask[start : start + rows]
                    self._deal(*additive_routing.deal_level(of_rows, trees, slots, self._layout.bits))
                case WantedLeaves(rows=rows, leaves=leaves):
                    self._check(rows * leaves, _MOST_NUMBERS, "WantedLeaves")
                    self._deal(*additive_routing.deal_leaves(rows, 1, leaves))
                case _:
                    return

    def _check(self, numbers: int, most: int, what: str) -> None:
        if numbers > most:
            first = self._edges[0]
            raise PeerProtocolError(first, f"expected at most {most} numbers at once", at=what)

    def _deal(self, keys: additive_routing.Keys, corrections: Words) -> None:
        self._party.send(self._edges[0], DealtCorrections(keys[0], Array.of(_NONE)))
        self._party.send(self._edges[1], DealtCorrections(keys[1], Array.of(corrections)))


class AdditiveRouting:
    """Computation on additive shares, at one of the first two edge servers; methods as those of `ShamirRouting`."""

    def __init__(self, party: Party, shares: Shares) -> None:
        self._party, self._edges, self._dealer = party, shares.holders, shares.others[0]
        self._own, self._bits = self._edges.index(party.name), shares.layout.bits
        empty = np.empty((0, shares.layout.columns), np.uint64)
        self._rows = additive_routing.MaskedRows(empty, empty)
        self._fresh = FreshShares(self._own, secrets.token_bytes(32))
        self._messages = count()  # numbers of messages to users, none used twice
        self.one = np.array(1 - self._own, np.uint64)

    def keep(self, rows: Words) -> None:
        key, _ = self._dealt(WantedRows(len(rows)), 0)
        # both computing servers open rows less a mask that neither knows
        self._rows, seed = play_among(self._party, self._edges, additive_routing.mask_rows(self._own, rows, key))
        self._fresh = FreshShares(self._own, seed)

    def level(self, part: slice, weights: Words, thresholds: Words, paths: Words | None) -> tuple[Bits, Words]:
        rows, (trees, slots) = self._rows.part(part), weights.shape[:2]
        wanted = WantedLevel(part.indices(len(self._rows))[0], len(rows), trees, slots)
        # random products of the third server, which learns how much is wanted, and nothing of rows or splits
        dealt = self._dealt(wanted, additive_routing.numbers_of_level(len(rows), trees, slots, self._bits))
        program = additive_routing.route_level(self._own, rows, weights, thresholds, paths, self._bits, *dealt)
        left, paths = play_among(self._party, self._edges, program)
        # as computed, shares depend on the dealer's numbers alone: users get fresh ones
        return self._fresh.bits(next(self._messages), left), paths

    def leaves(self, paths: Words, values: Words) -> Words:
        leaves, rows = paths.shape
        dealt = self._dealt(WantedLeaves(rows, leaves), rows)
        program = additive_routing.leaf_values(self._own, paths[None], values[None], *dealt)
        (found,) = play_among(self._party, self._edges, program)
        return self._fresh.numbers(next(self._messages), found)

    def end_batch(self) -> None:
        if self._own == 0:
            self._party.send(self._dealer, DealingEnd())

    def _dealt(self, wanted: Message, corrections: int) -> tuple[bytes, Words]:
        """Ask the dealer; return its key and, at the second edge server, `corrections` numbers, uint64."""
        if self._own == 0:
            self._party.send(self._dealer, wanted)
        # the first server's numbers come from its key alone; the second gets corrections
        dealt, shape = self._party.receive(self._dealer, DealtCorrections), (self._own * corrections,)
        return dealt.key, view(
            dealt.corrections, np.uint64, shape, peer=self._dealer, what="DealtCorrections.corrections"
        )


Routing = ShamirRouting | AdditiveRouting


def routing_of(shares: Shares, party: Party, threads: int) -> Routing:
    """Return a holder's computation on its shares."""
    return AdditiveRouting(party, shares) if shares.others else ShamirRouting(party, shares, threads)
