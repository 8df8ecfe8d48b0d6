"""Keys that participants agree on through an aggregator, and signatures on what all of them must see alike.

Every participant makes two X25519 keys, one to seal messages to its peers (`channel`) and one to make masks from
(`mask`), and signs both with its Ed25519 key in the federation's roster. From each, every pair derives a secret seed::

    seed = HKDF-SHA256(X25519(own secret, peer's public), info = job_id, the two names in sorted order)

`scope` is what keys are for: a job, or one round of it. It is signed with them, so keys made for one scope are refused
in another, and `PairSeeds.transcript` ties what is signed later to the keys of this run.

*Mask keys of one round* (`RoundKeys`). A signature by each member and round, checked by every other, costs n^2 checks.
Members whose channel keys were signed once share a secret with each other. A tag under it proves as much to that peer,
for a fiftieth of the time::

    tag for v = HMAC-SHA256(key, SHA-256(label, scope, u, content), v)
    key       = HMAC-SHA256(seed of the channel u-v, "treaty tags")

The content is u's mask key, or the list of survivors. Neither has to be proved to a third member.

*Assumptions*: the roster is right (a party that chooses its keys can stand between participants); X25519, HKDF, HMAC.
The aggregator sees public keys, signatures and tags; it can leave some out, but make or change none. A colluding peer
gives away the seeds of its own pairs.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from treaty.crypto.keystream import PairStreams, UsedNonces, length_prefixed
from treaty.errors import CryptoError

SEED_BYTES = 32
_NONCE_BYTES = 12
_KEY, _LIST = "treaty round keys", "treaty round vouching"  # what a tag is of
# Ed25519 keys of small order, but for the sign in the last bit: a signature of zeros is valid under them by chance.
_SMALL_ORDER = frozenset(
    bytes.fromhex(key)
    for key in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        *(first + "ff" * 30 + "7f" for first in ("ec", "ed", "ee")),
    )
)


class Advertisement(NamedTuple):
    """A participant's public keys: 32 bytes each, and an Ed25519 signature on them, their owner and their scope."""

    channel: bytes
    mask: bytes
    signature: bytes


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PairSeeds:
    """What a participant shares with each peer."""

    name: str
    scope: bytes
    channel: Mapping[str, bytes]  # seeds of 32 bytes, by peer
    mask: Mapping[str, bytes]
    mask_secret: bytes  # the secret key behind all mask seeds
    transcript: bytes  # digest of all public keys, equal at participants that received the same ones
    used: UsedNonces = field(default_factory=UsedNonces)  # of masks already made

    @cached_property
    def streams(self) -> PairStreams:
        """Masks with all peers, for vectors of which the key of a mask is never revealed."""
        return PairStreams(self.name, self.mask)


class EphemeralKeys:
    """A participant's two keys for a scope, new in every object."""

    def __init__(self, job_id: str, name: str, scope: bytes) -> None:
        self._job_id, self._name, self._scope = job_id, name, scope
        self._channel, self._mask = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._public = tuple(key.public_key().public_bytes_raw() for key in (self._channel, self._mask))

    def advertise(self, signing_key: Ed25519PrivateKey) -> Advertisement:
        """Return the public keys, signed."""
        channel, mask = self._public
        return Advertisement(channel, mask, signing_key.sign(_advertised(self._scope, self._name, channel, mask)))

    def agree(self, advertisements: Mapping[str, Advertisement], roster: Mapping[str, bytes]) -> PairSeeds:
        """Derive the seeds shared with everyone who advertised, this participant included in `advertisements`.

        CryptoError if an advertisement is not signed by a member of the roster (Ed25519 keys) for this scope, a key
        gives an all-zero result, or this participant's own keys are missing or changed.
        """
        check_advertisements(advertisements, roster, self._scope)
        own = advertisements.get(self._name)
        if own is None or own[:2] != self._public:
            raise CryptoError(f"expected the own keys of {self._name} unchanged - at the advertised keys")
        channels = {name: keys.channel for name, keys in advertisements.items() if name != self._name}
        masks = {name: keys.mask for name, keys in advertisements.items() if name != self._name}
        return PairSeeds(
            name=self._name, scope=self._scope, channel=agree_with(self._channel, channels, self._job_id, self._name),
            mask=agree_with(self._mask, masks, self._job_id, self._name), mask_secret=self._mask.private_bytes_raw(),
            transcript=transcript(advertisements, self._scope),
        )  # fmt: skip


def agree_with(secret: X25519PrivateKey, publics: Mapping[str, bytes], job_id: str, name: str) -> dict[str, bytes]:
    """Derive the seeds that `name`, the owner of `secret`, shares with the owners of public keys."""
    return {peer: agree(secret, public, job_id, *sorted([name, peer])) for peer, public in publics.items()}


def agree(secret: X25519PrivateKey, public: bytes, job_id: str, first: str, second: str) -> bytes:
    """Derive the seed of a pair, named in sorted order, from one end's secret and the other's public key of 32 bytes.

    CryptoError if it is no key, or of small order: the result would be all zero and known to all.
    """
    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # the library refuses all-zero results itself
        raise CryptoError(
            f"expected an X25519 key of large order, got another - in the keys of {first} and {second}"
        ) from None
    return HKDF(SHA256(), SEED_BYTES, salt=None, info=length_prefixed(job_id, first, second)).derive(shared)


def seal(seed: bytes, content: bytes, bound: bytes) -> bytes:
    """Encrypt for the other end of a channel with AES-256-GCM; `bound` says for whom, from whom and for what."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(seed).encrypt(nonce, content, bound)


def unseal(seed: bytes, box: bytes, bound: bytes) -> bytes | None:
    """Decrypt what `seal` gave under the same seed and bound; None for anything else."""
    try:
        return AESGCM(seed).decrypt(box[:_NONCE_BYTES], box[_NONCE_BYTES:], bound)
    except (InvalidTag, ValueError):  # too short to be a box
        return None


def check_advertisements(
    advertisements: Mapping[str, Advertisement], roster: Mapping[str, bytes], scope: bytes
) -> None:
    """Raise CryptoError, naming the owner, for keys that their owner did not sign for this scope."""
    for name, (channel, mask, signature) in advertisements.items():
        if name not in roster:
            raise CryptoError("expected keys of members of the roster, got another sender's - at the advertised keys")
        if not verifies(roster[name], signature, _advertised(scope, name, channel, mask)):
            raise CryptoError(f"expected keys signed by their owner for this use, got others - at the keys of {name}")


def transcript(advertisements: Mapping[str, Advertisement], scope: bytes) -> bytes:
    # who advertised which keys, in sorted order
    listed = [part for name in sorted(advertisements) for part in (name, *advertisements[name][:2])]
    return hashlib.sha256(length_prefixed("treaty advertised keys", scope, *listed)).digest()


def verifies(public: bytes, signature: bytes, content: bytes) -> bool:
    """Tell whether an Ed25519 signature is valid; under a malformed key or one of small order none is."""
    # the sign is in the last bit
    if len(public) == 32 and public[:31] + bytes([public[31] & 0x7F]) in _SMALL_ORDER:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _advertised(scope: bytes, name: str, channel: bytes, mask: bytes) -> bytes:
    return length_prefixed("treaty ephemeral keys", scope, name, channel, mask)


class RoundKeys:
    """A member's mask key of one round (``Round.key_scope``), new in every object; `public` has 32 bytes.

    `channels` are the seeds shared with the other members of the round.
    """

    def __init__(self, job_id: str, name: str, scope: bytes, channels: Mapping[str, bytes]) -> None:
        self._job_id, self._name, self._scope, self._channels = job_id, name, scope, channels
        self._tag_keys = {peer: hmac.digest(seed, b"treaty tags", "sha256") for peer, seed in channels.items()}
        self._secret = X25519PrivateKey.generate()
        self.public = self._secret.public_key().public_bytes_raw()

    def tags(self) -> dict[str, bytes]:
        """Return the tag of the key for each other member."""
        return self.vouch(self.public, _KEY)

    def vouch(self, content: bytes, label: str = _LIST) -> dict[str, bytes]:
        """Return tags of what this member vouches for, as of `Participant.take_survivors`, by other member."""
        # one digest for all receivers, one tag for each
        digest = self._digest(label, self._name, content)
        return {peer: hmac.digest(key, digest + peer.encode(), "sha256") for peer, key in self._tag_keys.items()}

    def vouched(self, content: bytes, tags: Mapping[str, bytes]) -> list[str]:
        """Return this member and the others whose tags, made for it, vouch for the same content."""
        return [self._name, *(name for name in tags if self._right(_LIST, name, content, tags))]

    def agree(self, keys: Mapping[str, bytes], tags: Mapping[str, bytes]) -> PairSeeds:
        """Derive the seeds shared with everyone who made a key, for `Participant` in rounds with dropout "share".

        `keys` are mask keys by member, this one's included, `tags` what each other member made for this one.
        CryptoError if the own key is missing or changed, a key is not of a member of the round, or its tag is not by
        its owner for this member and scope.
        """
        if keys.get(self._name) != self.public:
            raise CryptoError(f"expected the own key of {self._name} unchanged - at the round's keys")
        others = {name: key for name, key in keys.items() if name != self._name}
        for name, key in others.items():
            if not self._right(_KEY, name, key, tags):
                raise CryptoError(f"expected keys by members of this round, got others - at the keys of {name}")
        return PairSeeds(
            name=self._name, scope=self._scope, channel={name: self._channels[name] for name in others},
            mask=agree_with(self._secret, others, self._job_id, self._name),
            mask_secret=self._secret.private_bytes_raw(), transcript=transcript(unsigned(keys), self._scope),
        )  # fmt: skip

    def _right(self, label: str, sender: str, content: bytes, tags: Mapping[str, bytes]) -> bool:
        if sender not in self._tag_keys:
            return False
        signed = self._digest(label, sender, content) + self._name.encode()
        return hmac.compare_digest(hmac.digest(self._tag_keys[sender], signed, "sha256"), tags.get(sender, b""))

    def _digest(self, label: str, sender: str, content: bytes) -> bytes:
        return hashlib.sha256(length_prefixed(label, self._scope, sender, content)).digest()


def is_mask_key(public: bytes) -> bool:
    """Tell whether a key gives masks: peers refuse one of another length or of small order."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def unsigned(keys: Mapping[str, bytes]) -> dict[str, Advertisement]:
    """Return mask keys in the form in which `Aggregator` takes advertisements."""
    return {name: Advertisement(b"", key, b"") for name, key in keys.items()}
