"""Mask keys made anew for every round, and statements of members, authenticated by channels that last the job.

A signature by each member and round, checked by every other, costs n^2 checks a round. Members whose channel keys were
signed once share a secret with each other; a tag under it proves as much, to that one peer, for a fiftieth of the
time::

    tag for v = HMAC-SHA256(key, SHA-256(label, scope, u, content), v)
    key       = HMAC-SHA256(seed of the channel u-v, "treaty tags")

The content is u's mask key, or the list of survivors. For both it is enough that each member is told by the others
themselves, since nobody has to prove it to a third: an honest member vouches for one list a round, to everybody.

* *Assumption*: HMAC, and what `key_agreement` assumes of the channels. The aggregator, which passes keys and tags on,
  can neither make nor change one; it can leave some out.
* *Who learns what*: nobody anything beyond public keys. Seeds are those of `key_agreement`, of this round's keys.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from treaty.crypto.aggregation.key_agreement import Advertisement, PairSeeds, agree_with, transcript
from treaty.crypto.aggregation.masks import length_prefixed
from treaty.errors import CryptoError


class RoundKeys:
    """A member's mask key of one round (``Round.key_scope``), new in every object; `public` has 32 bytes.

    `channels` are the seeds shared with the other members of the round, see `PairSeeds.channel`.
    """

    def __init__(self, job_id: str, name: str, scope: bytes, channels: Mapping[str, bytes]) -> None:
        self._job_id, self._name, self._scope, self._channels = job_id, name, scope, channels
        self._tag_keys = {peer: hmac.digest(seed, b"treaty tags", "sha256") for peer, seed in channels.items()}
        self._secret = X25519PrivateKey.generate()
        self.public = self._secret.public_key().public_bytes_raw()

    def tags(self) -> dict[str, bytes]:
        """Return the tag of the key for each other member."""
        return self._tags("treaty round keys", self.public)

    def vouch(self, content: bytes) -> dict[str, bytes]:
        """Return tags of what this member vouches for, such as `Participant.take_survivors`, by other member."""
        return self._tags("treaty round vouching", content)

    def vouched(self, content: bytes, tags: Mapping[str, bytes]) -> list[str]:
        """Return who vouches for the same, by tags made for this member, who is among them."""
        return [self._name, *(name for name in tags if self._right("treaty round vouching", name, content, tags))]

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
            if not self._right("treaty round keys", name, key, tags):
                raise CryptoError(f"expected keys by members of this round, got others - at the keys of {name}")
        return PairSeeds(
            name=self._name,
            scope=self._scope,
            channel={name: self._channels[name] for name in others},
            mask=agree_with(self._secret, others, self._job_id, self._name),
            mask_secret=self._secret.private_bytes_raw(),
            transcript=transcript(unsigned(keys), self._scope),
        )

    def _tags(self, label: str, content: bytes) -> dict[str, bytes]:
        said = _said(label, self._scope, self._name, content)
        return {peer: _tag(key, said, peer) for peer, key in self._tag_keys.items()}

    def _right(self, label: str, sender: str, content: bytes, tags: Mapping[str, bytes]) -> bool:
        if sender not in self._tag_keys:
            return False
        right = _tag(self._tag_keys[sender], _said(label, self._scope, sender, content), self._name)
        return hmac.compare_digest(right, tags.get(sender, b""))


def _said(label: str, scope: bytes, sender: str, content: bytes) -> bytes:
    return hashlib.sha256(length_prefixed(label, scope, sender, content)).digest()


def _tag(key: bytes, said: bytes, receiver: str) -> bytes:
    return hmac.digest(key, said + receiver.encode(), "sha256")


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
