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
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from treaty.errors import PeerProtocolError
from treaty.files import Format, read_cached, write_cached
from treaty.messaging.messages import Message, decode_body, digests_in, encode_body
from treaty.messaging.party import Party
from treaty.models.checkpoints import checkpoint_file
from treaty.systems.federboost_vertical.buckets import Buckets

logger = logging.getLogger(__name__)

MOST_KEPT = 4
"""Messages that are kept of each partner: of as many numbers of buckets or epsilons, say. The oldest goes first."""

FORMAT = Format("noisy-buckets", 1)


class HeldBuckets(Message):
    """SHA-256 of each message of the receiver's buckets that the sender kept, one after the other; empty for none."""

    digests: bytes


class SameBuckets(Message):
    """The sender's buckets are those with this SHA-256. Tells that nothing about them has changed."""

    digest: bytes


class _Kept(msgspec.Struct):
    """The file: encoded `Buckets`, the oldest first."""

    messages: list[bytes]


Held = Mapping[bytes, bytes]
"""Encoded `Buckets` of one partner by their SHA-256, the oldest first."""


def kept_file(store: Path, party: str, peer: str) -> Path:
    """Return where `party` keeps buckets of `peer`."""
    return checkpoint_file(store, party).with_suffix(".buckets") / f"{quote(peer, safe=' ')}.buckets"


# ---------------------------------------------------------------- active party


def offer_held(party: Party, peer: str, store: Path | None) -> Held:
    """Tell a partner which of its buckets are held already, and return these; none without a `store`."""
    held = {} if store is None else _read(kept_file(store, party.name, peer), party.name)
    party.send(peer, HeldBuckets(b"".join(held)))
    return held


def take_buckets(party: Party, peer: str, held: Held) -> Buckets:
    """Return a partner's buckets: those it sends, or those among `held` that it says are the same."""
    message = party.receive(peer, Buckets, SameBuckets)
    if not isinstance(message, SameBuckets):
        assert isinstance(message, Buckets)
        return message
    if message.digest not in held:
        raise PeerProtocolError(peer, f"expected buckets that were offered, got others - at SameBuckets from {peer}")
    logger.info("%s has sent its buckets in an earlier training, and sends none", peer)
    return decode_body(held[message.digest], Buckets, peer=peer)


def keep_buckets(party: Party, peer: str, store: Path | None, held: Held, message: Buckets) -> None:
    """Keep a partner's buckets beside those `held`, unless they are among them or there is no `store`."""
    if store is None:
        return
    body = encode_body(message)
    if _digest(body) in held:
        return
    newest = [*held.values(), body][-MOST_KEPT:]
    write_cached(kept_file(store, party.name, peer), _Kept(newest), FORMAT, party.name)


def _read(file: Path, owner: str) -> dict[bytes, bytes]:
    kept = read_cached(file, _Kept, FORMAT, owner)
    return {} if kept is None else {_digest(body): body for body in kept.messages[-MOST_KEPT:]}


# ---------------------------------------------------------------- passive party


def send_buckets(party: Party, active: str, message: Buckets) -> None:
    """Send own buckets, unless the active party holds them."""
    told = party.receive(active, HeldBuckets).digests
    held = digests_in(told, MOST_KEPT, peer=active, what="HeldBuckets")
    digest = _digest(encode_body(message)) if held else b""
    party.send(active, SameBuckets(digest) if digest in held else message)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
