"""The two forms in which rows and a hidden model are shared among edge servers, and who computes on the shares.

============  =========================================  ==============================================================
`comparison`  who has shares                             who may collude
============  =========================================  ==============================================================
"shamir"      all edge servers                           at most (edges - 1) // 2 edge servers, with users, or with the
                                                         server, who knows the model
"additive"    the first two edge servers; the third      no two of the first three edge servers; each with users, or
              deals random numbers (`dealer`)            with the server, who knows the model
============  =========================================  ==============================================================

A user who colludes adds what it is told of its own rows, and nothing else. Under "additive" this holds because the
first two re-randomise shares before they send them (`fresh_shares`): from the shares as they compute them, the dealer
and a user would find the model.

With three edge servers both mean the same: one of them alone has nothing. With five, two may collude under "shamir"
only. Under "shamir" a wrong share is often noticed, under "additive" never. The server could deal as well, being
assumed not to collude with edge servers; but then it would learn for how many rows predictions are asked, and together
with one edge server all rows, while with one it now learns none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing import additive_routing, secure_routing
from treaty.crypto.sharing import shamir_field as field
from treaty.crypto.sharing.hidden_splits import Layout
from treaty.crypto.sharing.secure_comparison import Program, Setting, prepare
from treaty.crypto.sharing.shamir_field import Words
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.messaging.row_pieces import row_pieces

Comparison = Literal["shamir", "additive"]
Bits = NDArray[Any]
"""Shares of bits: of `Shares.bit`, uint64 or uint8."""

Result = TypeVar("Result")


class SharedNumbers(Message):
    """Shares of some of the numbers of one round among edge servers, uint64."""

    numbers: Array


class Share(Protocol):
    """Shares numbers."""

    def __call__(self, values: NDArray[np.int64], key: bytes | None = None, /) -> Words:
        """Share int64 (...), with the randomness of a secret key that serves these alone, or of a fresh one."""
        ...


@dataclass(frozen=True, slots=True)
class Shares:
    """How numbers and bits are shared and opened."""

    holders: list[str]  # the edge servers that have shares, in order
    dealer: str | None  # deals random numbers to them, if they need any
    number: tuple[int, ...]  # shape of a share of a number, uint64: two words, or one
    bit: type[np.uint64] | type[np.uint8]  # of a share of a bit for users: shared as a number is, or in one piece
    share: Share  # int64 (...) -> uint64 (holders, ..., *number)
    check: Callable[[Words, str], None]  # CryptoError for numbers that cannot be shares; the text says of what
    integers: Callable[[Words], NDArray[np.int64]]  # opens numbers; CryptoError for shares seen to be inconsistent
    bits: Callable[[Bits], NDArray[np.bool_]]  # opens bits


class Routing(Protocol):
    """Computation on shares, at an edge server together with the others; see `secure_routing` for shapes.

    Every call raises CryptoError or PeerError when shapes do not match, or another edge server is lost or breaks the
    protocol.
    """

    def keep(self, rows: Words) -> None:
        """Take everybody's rows, uint64 (n, columns, *number)."""
        ...

    def at_root(self, trees: int, rows: int) -> Words:
        """Return where rows are at first, uint64 (trees, 1, rows, *number)."""
        ...

    def level(self, part: slice, weights: Words, thresholds: Words, paths: Words | None) -> tuple[Bits, Words]:
        """Take some of the rows a level down, from the root where `paths` is None; return sides and paths.

        Shares of sides tell users nothing but sides, whoever helps them; paths are not for users.
        """
        ...

    def leaves(self, paths: Words, values: Words) -> Words:
        """Find leaf values: uint64 (leaves, n, *number) and (leaves, *number) -> (n, *number).

        Shares tell users nothing but values, as do sums of them.
        """
        ...

    def add(self, a: Words, b: Words) -> Words:
        """Add numbers."""
        ...

    def rest(self) -> None:
        """Tell the dealer that nothing more is wanted for now; called after `keep`, too."""
        ...


def setting_of(layout: Layout, edges: int) -> Setting:
    """Return what edge servers agree on before they compare Shamir shares."""
    return Setting(servers=edges, degree=(edges - 1) // 2, bits=layout.bits)


def holders_of(comparison: Comparison, edges: Sequence[str]) -> list[str]:
    """Return the edge servers that have shares, in order."""
    return list(edges[:2] if comparison == "additive" else edges)


def shares_of(comparison: Comparison, layout: Layout, edges: Sequence[str]) -> Shares:
    """Return how numbers are shared among some edge servers."""
    if comparison == "additive":
        return Shares(
            holders=holders_of(comparison, edges),
            dealer=edges[2],
            number=(),
            bit=np.uint8,
            share=additive_routing.share_integers,
            check=lambda shares, what: None,  # every number is a share
            integers=additive_routing.open_integers,
            bits=additive_routing.open_bits,
        )
    setting = setting_of(layout, len(edges))
    return Shares(
        holders=holders_of(comparison, edges),
        dealer=None,
        number=(2,),
        bit=np.uint64,
        share=partial(secure_routing.share_integers, setting),
        check=field.check_numbers,
        integers=partial(secure_routing.open_integers, setting),
        bits=partial(secure_routing.open_bits, setting),
    )


class ShamirRouting:
    """Computation on Shamir shares, among all edge servers; see `Routing`."""

    def __init__(self, party: Party, edges: Sequence[str], layout: Layout, threads: int) -> None:
        self._party, self._edges, self._own = party, list(edges), list(edges).index(party.name)
        self._setting, self._threads = setting_of(layout, len(edges)), threads
        self._rows = np.empty((0, layout.columns, 2), np.uint64)

    def keep(self, rows: Words) -> None:
        self._rows = rows

    def at_root(self, trees: int, rows: int) -> Words:
        """See `Routing`; a constant is a share of itself."""
        return np.broadcast_to(field.constant(1), (trees, 1, rows, 2)).copy()

    def level(self, part: slice, weights: Words, thresholds: Words, paths: Words | None) -> tuple[Bits, Words]:
        rows = self._rows[part]
        ready = self._run(prepare(self._setting, self._own, len(weights) * len(rows)))
        program = secure_routing.route_level(
            self._setting, self._own, rows, weights, thresholds, paths, ready, self._threads
        )
        return self._run(program)

    def leaves(self, paths: Words, values: Words) -> Words:
        return self._run(secure_routing.leaf_values(self._setting, self._own, paths, values))

    def add(self, a: Words, b: Words) -> Words:
        return field.add(np.ascontiguousarray(a), b)

    def rest(self) -> None:
        """See `Routing`; does nothing, as Shamir shares need no dealer."""

    def _run(self, program: Program[Result]) -> Result:
        return play_among(self._party, self._edges, program)


def play_among(party: Party, edges: Sequence[str], program: Program[Result]) -> Result:
    """Play a program with the other edge servers; `edges` are in its order."""
    try:
        outgoing = next(program)
        while True:
            outgoing = program.send(_exchange(party, edges, outgoing))
    except StopIteration as stopped:
        result: Result = stopped.value
        return result


def _exchange(party: Party, edges: Sequence[str], outgoing: Mapping[int, Words]) -> dict[int, Words]:
    """Send numbers to other edge servers, of one shape, and return theirs, of the same: in every program it is so.

    A piece of all of them comes before the next is sent, so that none has to hold what others are ahead.
    """
    shape = next(iter(outgoing.values())).shape
    replies = {sender: np.empty(shape, np.uint64) for sender in outgoing}
    flat = {edges[other]: np.ascontiguousarray(numbers).reshape(-1) for other, numbers in outgoing.items()}
    room = {edges[other]: numbers.reshape(-1) for other, numbers in replies.items()}
    for of in row_pieces(math.prod(shape), 64):
        for name, numbers in flat.items():
            party.send(name, SharedNumbers(Array.of(numbers[of])))
        for name, numbers in room.items():
            came, length = party.receive(name, SharedNumbers).numbers, (of.stop - of.start,)
            numbers[of] = view(came, np.uint64, length, peer=name, what="SharedNumbers.numbers")
    return replies
