"""Noisy buckets of earlier trainings, kept by the active party, so that a later training is not sent them again.

A passive party's noise is a function of its key and of what is randomised (`privacy.bucket_rr`), so the buckets that it
would send for the same rows, columns, edges and epsilons are those it has sent. The active party keeps them, in
`NAME.buckets` beside the noise keys and ledgers, and begins a training by telling each partner the SHA-256 of what it
has of it. A partner that finds its own among these sends `SameBuckets` alone. If anything differs, the rows' order for
instance, so does the hash, and buckets are sent: those of columns that differ with new noise, which is paid for. A
passive party keeps nothing but its key and ledger for this.

A file that is missing or damaged is no loss but of time: buckets are sent again, with the noise that they had.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from treaty.errors import PeerProtocolError
from treaty.files import Format, read_cached, write_cached
from treaty.messaging.messages import Message, decode_body, digests_in, encode_body
from treaty.messaging.party import Party
from treaty.models.checkpoints import checkpoint_file
from treaty.systems.federboost_vertical.buckets import Buckets, Pieces

logger = logging.getLogger(__name__)

MOST_KEPT = 4
"""Tables of buckets that are kept of each partner: of as many numbers of buckets or epsilons, say. The oldest goes
first."""

FORMAT = Format("noisy-buckets", 2)


class HeldBuckets(Message):
    """SHA-256 of each table of the receiver's buckets that the sender kept, one after the other; empty for none."""

    digests: bytes


class SameBuckets(Message):
    """The sender's buckets are those with this SHA-256. Tells that nothing about them has changed."""

    digest: bytes


class _Kept(msgspec.Struct):
    """The file: encoded `Buckets` of each table, the oldest first."""

    tables: list[list[bytes]]


Held = Mapping[bytes, list[bytes]]
"""Encoded `Buckets` of one partner's tables by their SHA-256, the oldest first."""


def kept_file(store: Path, party: str, peer: str) -> Path:
    """Return where `party` keeps buckets of `peer`."""
    return checkpoint_file(store, party).with_suffix(".buckets") / f"{quote(peer, safe=' ')}.buckets"


# ---------------------------------------------------------------- active party


def offer_held(party: Party, peer: str, store: Path | None) -> Held:
    """Tell a partner which of its buckets are held already, and return these; none without a `store`."""
    held = {} if store is None else _read(kept_file(store, party.name, peer), party.name)
    party.send(peer, HeldBuckets(b"".join(held)))
    return held


def take_buckets(party: Party, peer: str, held: Held, sent: list[bytes] | None) -> Iterator[Buckets]:
    """Yield a partner's buckets piece by piece: those it sends, or those among `held` that it says are the same.

    Encoded ones that it sends are added to `sent`, unless this is None.
    """
    message = party.receive(peer, Buckets, SameBuckets)
    if isinstance(message, SameBuckets):
        if message.digest not in held:
            raise PeerProtocolError(
                peer, f"expected buckets that were offered, got others - at SameBuckets from {peer}"
            )
        logger.info("%s has sent its buckets in an earlier training, and sends none", peer)
        yield from (decode_body(body, Buckets, peer=peer) for body in held[message.digest])
        raise PeerProtocolError(peer, f"expected buckets of as many rows - at SameBuckets from {peer}")
    while True:
        assert isinstance(message, Buckets)
        if sent is not None:
            sent.append(encode_body(message))
        yield message
        message = party.receive(peer, Buckets)


def keep_buckets(party: Party, peer: str, store: Path, held: Held, sent: list[bytes]) -> None:
    """Keep what a partner has sent beside the buckets `held`."""
    if _digest(sent) not in held:
        newest = [*held.values(), sent][-MOST_KEPT:]
        write_cached(kept_file(store, party.name, peer), _Kept(newest), FORMAT, party.name)


def _read(file: Path, owner: str) -> dict[bytes, list[bytes]]:
    kept = read_cached(file, _Kept, FORMAT, owner)
    return {} if kept is None else {_digest(bodies): bodies for bodies in kept.tables[-MOST_KEPT:]}


# ---------------------------------------------------------------- passive party


def send_buckets(party: Party, active: str, pieces: Pieces) -> None:
    """Send own buckets, unless the active party holds them."""
    told = party.receive(active, HeldBuckets).digests
    held = digests_in(told, MOST_KEPT, peer=active, what="HeldBuckets")
    digest = _digest(map(encode_body, pieces())) if held else b""
    for message in [SameBuckets(digest)] if digest in held else pieces():
        party.send(active, message)


def _digest(bodies: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for body in bodies:
        digest.update(body)
    return digest.digest()
