"""Steps 7 and 8 of an `alignment`: the common order of rows, its check, and the rows of repeated ids.

Step 7. Each side hashes the double-encrypted values of the common ids in two orders: the common one, whose key the
active party draws, and another, whose key the passive party draws once all matches are sent (`Challenge`). A cheat does
not know where in either order an id belongs that it only claims to hold, and cannot choose both keys. With n true
matches and k false ones it gets all places right with probability at most n! / (n + k)!.

Neither side can copy the other's hash or adapt its own to it: the passive party commits to its hash, then sees the
active party's (`OrderDigest`), then opens the commitment (`SealOpening`). Each side's hash includes its role.

Step 8, with ``on_duplicate="expand"``. An id in m rows of one party and n of another has m * n rows in the joined
table. Every party sends the active one how many rows it has of each common id (`Copies`), and learns where its own rows
go (`JoinLayout`): one after another, each `repeats` times, and all of them again until there are `totals`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer import sodium
from treaty.data.ids import Ids
from treaty.data.large import WORDS, Scratch, SortedRecords, records
from treaty.errors import DataError, PeerProtocolError
from treaty.machine.arrays import Integers, pieces
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.systems.alignment.ecdh import array_of, bytes_of, to_bytes

RANKED = np.dtype([("drawn", np.uint64, (2,)), ("value", np.uint64, (2,)), ("number", np.int32), ("row", np.int64)])
"""A common id in an order: its pseudorandom place, double-encrypted value, number, and first row."""

# rows of the joined table: each takes a few bytes at every party
_MOST_ROWS = 1 << 27


@leaks("a key, and a commitment", "nothing")
class Challenge(Message):
    """The key of the second order, uint8 (32,), and a commitment to the sender's digest, uint8 (32,)."""

    key: Array
    sealed: Array


@leaks("whether both have the same common ids in the same order", "control")
class OrderDigest(Message):
    """The active party's SHA-256 of the values in both orders, uint8 (32,)."""

    digest: Array


@leaks("whether both have the same common ids in the same order", "control")
class SealOpening(Message):
    """What opens the commitment, uint8 (32,)."""

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
    """Step 7 of the active party: prove to a passive one that both have the same ids, then check its proof.

    `matches` are the common ids by number (`PAIR`), `common` the same in the common order (`RANKED`). Raises
    PeerProtocolError if the peer has other ids or another order.
    """
    # the peer draws the key after `Matches`, so this party could not have chosen false matches for it
    challenge = party.receive(peer, Challenge)
    key, sealed = bytes_of(challenge.key, peer, "Challenge.key"), bytes_of(challenge.sealed, peer, "Challenge.sealed")
    other = ranked(ids, matches, key, threads, scratch)
    party.send(peer, OrderDigest(array_of(_digest("active", key, _values(common, other)))))
    opening = bytes_of(party.receive(peer, SealOpening).opening, peer, "SealOpening.opening")
    _check(sealed, _seal(opening, _digest("passive", key, _values(common, other))), peer, "SealOpening")
    other.close()


def verify(
    party: Party, active: str, ids: Ids, matches: SortedRecords, common: SortedRecords, threads: int, scratch: Scratch
) -> None:
    """Step 7 of a passive party: check that the active one has the same ids, then prove the same to it."""
    key, opening = secrets.token_bytes(32), secrets.token_bytes(32)
    other = ranked(ids, matches, key, threads, scratch)
    # a commitment before the other digest is seen, which this party could copy otherwise
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
        raise PeerProtocolError(peer, "expected the same ids in the same order", at=what)


@leaks("how many rows the sender has of each common id", "exact")
class Copies(Message):
    """The sender's number of rows of each common id, int64 (n,)."""

    counts: Array


@leaks("how many rows all parties together have of each common id", "exact")
class JoinLayout(Message):
    """For each common id: rows in the joined table, and how often each row of the receiver repeats, int64 (n,)."""

    totals: Array
    repeats: Array


def arrange(party: Party, own: Integers, batch: int) -> tuple[Integers, Integers]:
    """Step 8 of the active party: lay out the joined rows of each id; own rows change slowest, then each peer's.

    `own` is this party's number of rows of each common id. Returns totals and own repeats, int64 (n,).
    """
    counts = [own]
    for peer in party.peers:
        copies = np.empty(len(own), np.int64)
        for part in pieces(len(own), batch):
            sent, length = party.receive(peer, Copies).counts, part.stop - part.start
            copies[part] = view(sent, np.int64, (length,), peer=peer, what="Copies.counts")
        if np.any(copies < 1) or np.any(copies >= _MOST_ROWS):
            raise PeerProtocolError(peer, "expected at least one row of a common id", at="Copies.counts")
        counts.append(copies)
    # in float64 first: the product may exceed 64 bits
    rows = float(np.prod(np.array(counts, np.float64), axis=0).sum())
    if rows >= _MOST_ROWS:
        raise DataError(
            f"expected fewer than {_MOST_ROWS} joined rows, got about {rows:,.0f}: ids are repeated at several parties",
            public="joining all repeated ids gives too many rows",
        )
    totals = np.prod(counts, axis=0, dtype=np.int64)
    # like the digits of a number: parties with 2, 3 and 4 rows have repeats of 12, 4 and 1
    repeats = totals // np.cumprod(counts, axis=0, dtype=np.int64)
    for peer, own_repeats in zip(party.peers, repeats[1:], strict=True):
        for part in pieces(len(own), batch):
            party.send(peer, JoinLayout(Array.of(totals[part]), Array.of(own_repeats[part])))
    return totals, repeats[0]


def arranged(party: Party, active: str, own: Integers, batch: int) -> tuple[Integers, Integers]:
    """Step 8 of a passive party: send its number of rows of each common id; return the totals and repeats received."""
    totals, repeats = np.empty(len(own), np.int64), np.empty(len(own), np.int64)
    for part in pieces(len(own), batch):
        party.send(active, Copies(Array.of(own[part])))
    for part in pieces(len(own), batch):
        layout = party.receive(active, JoinLayout)
        length = part.stop - part.start
        totals[part] = view(layout.totals, np.int64, (length,), peer=active, what="JoinLayout.totals")
        repeats[part] = view(layout.repeats, np.int64, (length,), peer=active, what="JoinLayout.repeats")
    # bounds are checked before products of the received numbers, which could overflow
    wrong = np.any(repeats < 1) or np.any(repeats >= _MOST_ROWS) or np.any(totals < 1) or np.any(totals >= _MOST_ROWS)
    if wrong or np.any(totals % (repeats * own)) or totals.sum() >= _MOST_ROWS:
        raise PeerProtocolError(active, "expected whole blocks of joined rows", at="JoinLayout")
    return totals, repeats


def rows_of(ids: Ids, common: SortedRecords, lay_out: Callable[[Integers], tuple[Integers, Integers]]) -> Integers:
    """Return own rows in the common order: one of each id or, with "expand", all, laid out by their numbers."""
    if ids.on_duplicate != "expand":
        return common.column("row")
    numbers = common.column("number")
    copies = np.diff(ids.starts)[numbers]
    totals, repeats = lay_out(copies)
    # for each joined row, the common id and the place among that id's joined rows
    common_id = np.repeat(np.arange(len(numbers)), totals)
    place = np.arange(len(common_id)) - np.repeat(np.cumsum(totals) - totals, totals)
    rows: Integers = ids.rows[ids.starts[numbers[common_id]] + place // repeats[common_id] % copies[common_id]]
    return rows
