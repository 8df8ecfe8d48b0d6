"""What users and edge servers tell each other of rows, in pieces of bounded size, where users may vanish in between.

`row_pieces` cuts a user's rows alike at both ends. Edge servers do not know how many a user has, so it says that in
each message (`RowPiece`). They keep what came, make no room for what is only announced, and take no piece that is
shorter than it should be: a user that wants them to hold or to wait for much must send as much, in limited time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.shamir import Words
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.process import concurrently
from treaty.messaging.messages import Array, Message, MessageLeakage, row_pieces, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.authority import gather_sound
from treaty.systems.fedxgb.messages import RowCounts
from treaty.systems.sizes import RowSize

logger = logging.getLogger(__name__)

_MOMENT = 0.05  # seconds that a next piece is waited for at first, so that a silent user does not hold up the others


class RowShares(Message):
    """The receiver's shares of some of a user's `n_rows` rows, uint64 (rows, columns, *), see `secpred.routing`."""

    leakage: ClassVar = MessageLeakage("how many rows the user has; shares of their bins", "masked")

    shares: Array
    n_rows: RowSize


class ComparedShares(Message):
    """The receiver's shares of what slots compare of some of a user's `n_rows` rows, uint64 (trees, rows, 2)."""

    leakage: ClassVar = MessageLeakage("shares of the values that a user's rows compare", "masked")

    shares: Array
    n_rows: RowSize


RowPiece = RowShares | ComparedShares
P = TypeVar("P", RowShares, ComparedShares)


@dataclass(frozen=True, slots=True)
class PieceForm:
    """What `RowPiece.shares` have to be.

    Attributes
    ----------
    shape : tuple
        None where rows are.
    check : callable
        ``check(shares, what)`` raises CryptoError for numbers that are no shares.
    fits : callable
        ``fits(user, n_rows)`` says whether a user may have so many rows.
    """

    shape: tuple[int | None, ...]
    check: Callable[[Words, str], None]
    fits: Callable[[str, int], bool]

    @property
    def axis(self) -> int:
        """Where rows are."""
        return self.shape.index(None)

    @property
    def bits(self) -> int:
        """Of a row."""
        return 64 * math.prod(length for length in self.shape if length is not None)


# ---------------------------------------------------------------- from users


def send_shares(party: Party, kind: type[RowPiece], shares: Mapping[str, Words], axis: int) -> None:
    """Send edge servers their shares of own rows, which are along an axis; each piece to all of them before the next.

    So that all wait equally long.
    """
    whole = next(iter(shares.values()))
    n_rows, before = whole.shape[axis], (slice(None),) * axis
    for of in row_pieces(n_rows, 64 * math.prod(whole.shape[:axis] + whole.shape[axis + 1 :])):
        for edge, own in shares.items():
            party.send(edge, kind(Array.of(np.ascontiguousarray(own[(*before, of)])), n_rows))


def gather_rows(
    party: Party, users: Iterable[str], kind: type[P], form: PieceForm, patience: float
) -> dict[str, list[Words]]:
    """Receive what users send with `send_shares`; see `gather_rest`. First pieces have `patience` seconds, too."""
    return gather_rest(party, kind, gather_sound(party, users, kind, timeout=patience), form, patience)


def gather_rest(
    party: Party, kind: type[P], first: Mapping[str, P], form: PieceForm, patience: float
) -> dict[str, list[Words]]:
    """Receive the pieces after users' first ones; return the shares in all of them, of users who sent what they should.

    The others are left out: those who sent something else, vanished, or were not done after `patience` seconds, which
    are for all pieces of all users together.
    """
    # nothing is allocated for rows that are only announced
    coming = {name: _Coming(name, message.n_rows, form) for name, message in first.items()}
    sent, until, moment = dict(first), time.monotonic() + patience, _MOMENT
    while True:
        for name, message in sent.items():
            try:
                coming[name].take(message)
            except (PeerProtocolError, CryptoError) as error:
                _leave_out(party, name, str(error))
                del coming[name]
        waiting = [name for name, of in coming.items() if of.missing]
        asked = time.monotonic()
        wait = min(moment, until - asked)
        if not waiting or wait <= 0.0:
            break
        sent = gather_sound(party, waiting, kind, timeout=wait)
        # a silent user must not hold up the others' pieces: wait a little longer each time nothing comes
        moment = _MOMENT if sent else 2 * moment
        if time.monotonic() - asked < 0.9 * wait:  # nothing of the others can come any more
            for name in set(waiting) - sent.keys():
                _leave_out(party, name, "it has gone before its last rows came")
                del coming[name]
    for name in waiting:
        _leave_out(party, name, f"its last rows have not come within {patience:g} s")
    return {name: of.pieces for name, of in coming.items() if not of.missing}


class _Coming:
    """One user's rows as they come."""

    def __init__(self, name: str, n_rows: int, form: PieceForm) -> None:
        self._name, self._n_rows, self._form = name, n_rows, form
        self._came = 0
        self.pieces: list[Words] = []

    @property
    def missing(self) -> bool:
        """Whether there are more to come."""
        return self._came < self._n_rows

    def take(self, message: RowPiece) -> None:
        """Take the next piece; PeerProtocolError or CryptoError when it is not what it should be."""
        # a user may not change how many rows it has once the first piece is here
        form, kind = self._form, type(message).__name__
        if message.n_rows != self._n_rows or not form.fits(self._name, self._n_rows):
            raise PeerProtocolError(
                self._name, f"expected as many rows as before, and as there may be, got others - at {kind}.n_rows"
            )
        shares = view(message.shares, np.uint64, form.shape, peer=self._name, what=f"{kind}.shares")
        rows, left = shares.shape[form.axis], self._n_rows - self._came
        # where a cut of one row more than came would end: known from how many came, not from how many are announced
        right = row_pieces(min(left, rows + 1), form.bits)[0].stop
        if rows != right:
            raise PeerProtocolError(
                self._name, f"expected a piece of another length, got {rows} of {left} rows - at {kind}.shares"
            )
        form.check(shares, f"{kind}.shares")
        self.pieces.append(shares)
        self._came += rows


# ---------------------------------------------------------------- to users


def pieces_of(kind: Callable[[Array], Message], whole: NDArray[Any], rows: slice) -> Iterator[Message]:
    """Yield messages with a user's `rows` of an array (trees, n, *) of all users' rows."""
    # pieces are cut as the user expects them, from its number of rows
    own, numbers = whole[:, rows], len(whole) * math.prod(whole.shape[2:])
    for of in row_pieces(own.shape[1], 8 * whole.itemsize * numbers):
        yield kind(Array.of(np.ascontiguousarray(own[:, of])))


def send_pieces_or_leave_out(party: Party, pieces: Mapping[str, Iterable[Message]], patience: float) -> None:
    """Send users their messages; leave out those who are gone, or have not taken all within `patience` seconds."""

    def reach(name: str) -> bool:
        # all pieces of a user have this time together
        left, until = patience, time.monotonic() + patience
        for message in pieces[name]:
            if not party.send_each({name: message}, timeout=left):
                return False
            left = max(0.0, until - time.monotonic())
        return True

    reached = concurrently(reach, pieces, len(pieces) if party.channel.waits else 1)
    for name, was in zip(pieces, reached, strict=True):
        if not was:
            _leave_out(party, name, "it has not taken the results of its rows")


def _leave_out(party: Party, name: str, why: str) -> None:
    logger.warning("%s continues without %s: %s", party.name, name, why)
    party.leave_out(name)


# ---------------------------------------------------------------- whose rows came to all edge servers


def come_to_all(party: Party, edges: Sequence[str], users: Mapping[str, int]) -> list[str]:
    """Return users of whom all edge servers have equally many rows, sorted; `users` are those of this edge server."""
    return of_all(users, exchange_counts(party, edges, RowCounts(dict(users))))


def exchange_counts(party: Party, edges: Sequence[str], counts: RowCounts) -> dict[str, RowCounts]:
    """Send the other edge servers own counts; return theirs, by name."""
    others = [edge for edge in edges if edge != party.name]
    for edge in others:
        party.send(edge, counts)
    return {edge: party.receive(edge, RowCounts) for edge in others}


def of_all(users: Mapping[str, int], others: Mapping[str, RowCounts]) -> list[str]:
    """Return users of whom all others have as many rows, sorted."""
    return sorted(name for name, rows in users.items() if all(of.users.get(name) == rows for of in others.values()))
