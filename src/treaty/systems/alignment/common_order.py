"""The common order of rows, and the check that both sides have the same ids in it: step 7 of `alignment.roles`.

Each side hashes the double-encrypted values of the common ids, as it has them, in two orders: the common one, whose key
the active party draws, and another, whose key the passive party draws once all matches are told. A cheat does not know
where in either order an id belongs that it only claims to hold, and cannot choose both keys. So with n true matches and
k such ids it gets all places right with a probability of n! / (n + k)! at most, whatever it tries.

Neither side can copy the other's hash or fit its own to it: the passive party commits to its own, then sees the active
party's, then opens the commitment (the "seal"). Each side's hash names its role.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.psi import hashing
from treaty.data.ids import Ids
from treaty.data.large import WORDS, Scratch, SortedRecords, records
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, Message
from treaty.messaging.party import Party
from treaty.systems.alignment.blinded_lists import array_of, bytes_of, to_bytes

RANKED = np.dtype([("drawn", np.uint64, (2,)), ("value", np.uint64, (2,)), ("number", np.int32), ("row", np.int64)])
"""A common id in an order: its pseudorandom place, double-encrypted value, number, and first row."""


class Challenge(Message):
    """Key uint8 (32,) of the second order; commitment (32,) to the own digest. Tell nothing."""

    key: Array
    sealed: Array


class OrderDigest(Message):
    """SHA-256 (32,) of the values in both orders. Tells whether both have the same ids in the same order."""

    digest: Array


class SealOpening(Message):
    """Opens the commitment, uint8 (32,). Tells whether both have the same ids in the same order."""

    opening: Array


def ranked(ids: Ids, matches: SortedRecords, key: bytes, threads: int, scratch: Scratch) -> SortedRecords:
    """Sort common ids, of type `PAIR` and by number, by a pseudorandom function under `key`; return type `RANKED`."""
    order = scratch.sorted(RANKED, "drawn", WORDS, len(matches))
    for part in matches.parts():
        if len(part):
            number = part["number"].astype(np.int64)
            first, last = int(number[0]), int(number[-1])
            drawn = hashing.digests(*ids.strings(first, last + 1), number - first, key, threads)
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
    """Step 7 of a passive party: check that the active one has the same ids, then show it the same; see `prove`."""
    key, opening = secrets.token_bytes(32), secrets.token_bytes(32)
    other = ranked(ids, matches, key, threads, scratch)
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
