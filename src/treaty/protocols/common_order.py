"""The common order of rows, and the check that both sides have the same ids in it: step 7 of `alignment`.

Each side hashes the double-encrypted values of the common ids, as it has them, in two orders: the common one, whose key
the active party draws, and another, whose key the passive party draws once all matches are told. An id that a cheat
only claims to hold has a place in each order that the cheat does not know, and one of the orders it could not choose.
So of n true matches and k such ones it places all with a probability of n! / (n + k)! at most, whatever it tries.

Neither can wait for the other's hash and repeat or fit it: the passive party seals its own first, then sees the active
one's, then opens the seal. Each side's hash names its role.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import hashing
from treaty.data.ids import Ids
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.protocols.blinded_lists import to_bytes


class Challenge(Message):
    """Key uint8 (32,) of the order to prove; SHA-256 (32,) of the opening to come and the own digest. Tell nothing."""

    key: Array
    sealed: Array


class OrderDigest(Message):
    """SHA-256 (32,) of the values in both orders. Tells whether both have the same ids in the same order."""

    digest: Array


class Unsealed(Message):
    """What the seal was made with, uint8 (32,). Tells whether both have the same ids in the same order."""

    opening: Array


def ranking(ids: Ids, numbers: NDArray[np.int64], key: bytes, threads: int) -> NDArray[np.int64]:
    """Return the order of some ids under a key: by a pseudorandom function of the id, the same for all who hold it.

    Parameters
    ----------
    numbers : int64 (n,)
        Which ids.
    key : bytes of length 32

    Returns
    -------
    int64 (n,)
        Places in `numbers`.
    """
    drawn = hashing.digests(ids.data, ids.offsets, numbers, key, threads)
    return np.lexsort((drawn[:, 1], drawn[:, 0]))


def prove(
    party: Party, peer: str, ids: Ids, common: NDArray[np.int64], values: NDArray[np.uint64], threads: int
) -> None:
    """Step 7 of the active party: show a passive one that it has the same ids, then see that this one has them too.

    Parameters
    ----------
    common : int64 (n,)
        Own common ids, in the common order.
    values : uint64 (n, 2)
        Their double-encrypted values.

    Raises
    ------
    PeerProtocolError
        When the peer has others, or another order.
    """
    challenge = party.receive(peer, Challenge)
    key = view(challenge.key, np.uint8, (32,), peer=peer, what="Challenge.key").tobytes()
    sealed = view(challenge.sealed, np.uint8, (32,), peer=peer, what="Challenge.sealed").tobytes()
    order = ranking(ids, common, key, threads)
    party.send(peer, OrderDigest(_array(_digest("active", key, values, order))))
    opening = view(party.receive(peer, Unsealed).opening, np.uint8, (32,), peer=peer, what="Unsealed.opening").tobytes()
    _check(sealed, _seal(opening, _digest("passive", key, values, order)), peer, "Unsealed")


def verify(
    party: Party, lead: str, ids: Ids, common: NDArray[np.int64], values: NDArray[np.uint64], threads: int
) -> None:
    """Step 7 of a passive party: have the active one show that it has the same ids, then show it that this one has.

    Parameters and errors as of `prove`.
    """
    key, opening = secrets.token_bytes(32), secrets.token_bytes(32)
    order = ranking(ids, common, key, threads)
    party.send(lead, Challenge(_array(key), _array(_seal(opening, _digest("passive", key, values, order)))))
    theirs = view(party.receive(lead, OrderDigest).digest, np.uint8, (32,), peer=lead, what="OrderDigest.digest")
    _check(theirs.tobytes(), _digest("active", key, values, order), lead, "OrderDigest")
    party.send(lead, Unsealed(_array(opening)))


def _digest(role: str, key: bytes, values: NDArray[np.uint64], order: NDArray[np.int64]) -> bytes:
    digest = hashlib.sha256(f"treaty-alignment-order-{role}\0".encode() + key)
    digest.update(to_bytes(values).tobytes())
    digest.update(to_bytes(values[order]).tobytes())
    return digest.digest()


def _seal(opening: bytes, digest: bytes) -> bytes:
    return hashlib.sha256(b"treaty-alignment-seal\0" + opening + digest).digest()


def _check(theirs: bytes, own: bytes, peer: str, what: str) -> None:
    if not hmac.compare_digest(own, theirs):
        raise PeerProtocolError(
            peer, f"expected the same ids in the same order, got another digest - at {what} from {peer}"
        )


def _array(data: bytes) -> Array:
    return Array.of(np.frombuffer(data, np.uint8))
