"""Steps 7 and 8 of the table in `alignment`: the common order of rows, its check, and the rows of repeated ids.

Step 7. Each side hashes the double-encrypted values of the common ids, as it has them, in two orders: the common one,
whose key the active party draws, and another, whose key the passive party draws once all matches are sent. A cheat does
not know where in either order an id belongs that it only claims to hold, and cannot choose both keys. So with n true
matches and k such ids it gets all places right with a probability of n! / (n + k)! at most, whatever it tries.

Neither side can copy the other's hash or fit its own to it: the passive party commits to its own, then sees the active
party's, then opens the commitment (the "seal"). Each side's hash names its role.

Step 8, with ``on_duplicate="expand"``. An id in m rows of one party and n of another has m * n rows in the joined
table. Every party sends the active one how often it has each common id, and learns where its own rows go: one after
another, each `repeats` times, and all of them over again until there are `totals`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer import sodium
from treaty.data.ids import Ids
from treaty.data.large import WORDS, Scratch, SortedRecords, records
from treaty.errors import DataError, PeerProtocolError
from treaty.machine.arrays import Integers, pieces
from treaty.messaging.messages import Array, Message, MessageLeakage, view
from treaty.messaging.party import Party
from treaty.systems.alignment.ecdh import array_of, bytes_of, to_bytes

RANKED = np.dtype([("drawn", np.uint64, (2,)), ("value", np.uint64, (2,)), ("number", np.int32), ("row", np.int64)])
"""A common id in an order: its pseudorandom place, double-encrypted value, number, and first row."""

_MOST_ROWS = 1 << 27  # of the joined table: each takes a few bytes at every party


class Challenge(Message):
    """Key uint8 (32,) of the second order; commitment (32,) to the own digest."""

    leakage: ClassVar = MessageLeakage("a key, and a commitment", "nothing")

    key: Array
    sealed: Array


class OrderDigest(Message):
    """SHA-256 (32,) of the values in both orders."""

    leakage: ClassVar = MessageLeakage("whether both have the same common ids in the same order", "control")

    digest: Array


class SealOpening(Message):
    """Opens the commitment, uint8 (32,)."""

    leakage: ClassVar = MessageLeakage("whether both have the same common ids in the same order", "control")

    opening: Array


def ranked(ids: Ids, matches: SortedRecords, key: bytes, threads: int, scratch: Scratch) -> SortedRecords:
    """Sort common ids, of type `PAIR` and by number, by a pseudorandom function under `key`; return type `RANKED`."""
    order = scratch.sorted(RANKED, "drawn", WORDS, len(matches))
    for part in matches.parts():
        if len(part):
            number = part["number"].astype(np.int64)
            first, last = int(number[0]), int(number[-1])
            drawn = sodium.digests(*ids.strings(first, last + 1), number - first, key, threads)
            rows = ids.first_rows(first, last + 1)[number - first]
            order.add(records(RANKED, drawn=drawn, value=part["value"], number=number, row=rows))
    return order


def prove(
    party: Party, peer: str, ids: Ids, matches: SortedRecords, common: SortedRecords, threads: int, scratch: Scratch
) -> None:
    """Step 7 of the active party: show a passive one that both have the same ids, then check what it shows.

    `matches` are the common ids by number (`PAIR`), `common` the same in the common order (`RANKED`). Raises
    PeerProtocolError when the peer has other ids, or another order.
    """
    challenge = party.receive(peer, Challenge)  # drawn after `Matches`, so the peer could not plan for it
    key, sealed = bytes_of(challenge.key, peer, "Challenge.key"), bytes_of(challenge.sealed, peer, "Challenge.sealed")
    other = ranked(ids, matches, key, threads, scratch)
    party.send(peer, OrderDigest(array_of(_digest("active", key, _values(common, other)))))
    opening = bytes_of(party.receive(peer, SealOpening).opening, peer, "SealOpening.opening")
    _check(sealed, _seal(opening, _digest("passive", key, _values(common, other))), peer, "SealOpening")
    other.close()


def verify(
    party: Party, active: str, ids: Ids, matches: SortedRecords, common: SortedRecords, threads: int, scratch: Scratch
) -> None:
    """Step 7 of a passive party: check that the active one has the same ids, then show it the same; see `prove`."""
    key, opening = secrets.token_bytes(32), secrets.token_bytes(32)
    other = ranked(ids, matches, key, threads, scratch)
    # committed to before the other digest is seen, or this party could copy it
    own = _digest("passive", key, _values(common, other))
    party.send(active, Challenge(array_of(key), array_of(_seal(opening, own))))
    theirs = bytes_of(party.receive(active, OrderDigest).digest, active, "OrderDigest.digest")
    _check(theirs, _digest("active", key, _values(common, other)), active, "OrderDigest")
    party.send(active, SealOpening(array_of(opening)))
    other.close()


def _values(*orders: SortedRecords) -> Iterator[NDArray[np.uint64]]:
    return (part["value"] for order in orders for part in order.parts())


def _digest(role: str, key: bytes, orders: Iterable[NDArray[np.uint64]]) -> bytes:
    digest = hashlib.sha256(f"treaty-alignment-order-{role}\0".encode() + key)
    for values in orders:
        digest.update(to_bytes(values).tobytes())
    return digest.digest()


def _seal(opening: bytes, digest: bytes) -> bytes:
    return hashlib.sha256(b"treaty-alignment-seal\0" + opening + digest).digest()


def _check(theirs: bytes, own: bytes, peer: str, what: str) -> None:
    if not hmac.compare_digest(own, theirs):
        raise PeerProtocolError(peer, f"expected the same ids in the same order - at {what} from {peer}")


# ---------------------------------------------------------------- rows of repeated ids


class Copies(Message):
    """How many rows the sender has of each common id, int64 (n,)."""

    leakage: ClassVar = MessageLeakage("how many rows the sender has of each common id", "exact")

    counts: Array


class JoinLayout(Message):
    """Of each common id: rows in the joined table, and how often each row of the receiver repeats, int64 (n,)."""

    leakage: ClassVar = MessageLeakage("of each common id how many rows all parties together have", "exact")

    totals: Array
    repeats: Array


def arrange(party: Party, own: Integers, batch: int) -> tuple[Integers, Integers]:
    """Step 8 of the active party: lay out the joined rows of each id; own rows change slowest, then each peer's.

    `own` is how many rows each common id has here. Return totals and own repeats, int64 (n,).
    """
    counts = [own]
    for peer in party.peers:
        copies = np.empty(len(own), np.int64)
        for part in pieces(len(own), batch):
            sent, length = party.receive(peer, Copies).counts, part.stop - part.start
            copies[part] = view(sent, np.int64, (length,), peer=peer, what="Copies.counts")
        if np.any(copies < 1) or np.any(copies >= _MOST_ROWS):
            raise PeerProtocolError(peer, f"expected at least one row of a common id - at Copies.counts from {peer}")
        counts.append(copies)
    # in float64 first: the product may exceed 64 bits
    rows = float(np.prod(np.array(counts, np.float64), axis=0).sum())
    if rows >= _MOST_ROWS:
        raise DataError(
            f"expected fewer than {_MOST_ROWS} joined rows, got about {rows:,.0f}: ids are repeated at several parties",
            public="joining all repeated ids gives too many rows",
        )
    totals = np.prod(counts, axis=0, dtype=np.int64)
    # of parties with 2, 3 and 4 rows: repeats 12, 4 and 1, as digits of a number count
    repeats = totals // np.cumprod(counts, axis=0, dtype=np.int64)
    for peer, own_repeats in zip(party.peers, repeats[1:], strict=True):
        for part in pieces(len(own), batch):
            party.send(peer, JoinLayout(Array.of(totals[part]), Array.of(own_repeats[part])))
    return totals, repeats[0]


def arranged(party: Party, active: str, own: Integers, batch: int) -> tuple[Integers, Integers]:
    """Step 8 of a passive party: send how many rows each common id has here; return the totals and repeats received."""
    totals, repeats = np.empty(len(own), np.int64), np.empty(len(own), np.int64)
    for part in pieces(len(own), batch):
        party.send(active, Copies(Array.of(own[part])))
    for part in pieces(len(own), batch):
        layout = party.receive(active, JoinLayout)
        length = part.stop - part.start
        totals[part] = view(layout.totals, np.int64, (length,), peer=active, what="JoinLayout.totals")
        repeats[part] = view(layout.repeats, np.int64, (length,), peer=active, what="JoinLayout.repeats")
    # bounds come before products of the numbers received
    wrong = np.any(repeats < 1) or np.any(repeats >= _MOST_ROWS) or np.any(totals < 1) or np.any(totals >= _MOST_ROWS)
    if wrong or np.any(totals % (repeats * own)) or totals.sum() >= _MOST_ROWS:
        raise PeerProtocolError(active, f"expected whole blocks of joined rows - at JoinLayout from {active}")
    return totals, repeats


def joined(ids: Ids, common: Integers, totals: Integers, repeats: Integers) -> Integers:
    """Return the own row in each row of the joined table, from what `JoinLayout` has."""
    number = np.repeat(np.arange(len(common)), totals)  # of each joined row the common id, and its place among them
    place = np.arange(len(number)) - np.repeat(np.cumsum(totals) - totals, totals)
    copies = np.diff(ids.starts)[common]
    return ids.rows[ids.starts[common[number]] + place // repeats[number] % copies[number]]


def rows_of(ids: Ids, common: SortedRecords, lay_out: Callable[[Integers], tuple[Integers, Integers]]) -> Integers:
    """Return own rows in the common order: one of each id or, with "expand", all, laid out by their numbers."""
    if ids.on_duplicate != "expand":
        return common.column("row")
    number = common.column("number")
    return joined(ids, number, *lay_out(np.diff(ids.starts)[number]))
