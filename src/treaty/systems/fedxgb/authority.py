"""Who is who in a crowd: a key authority certifies everybody's signing key, and everybody checks that.

====================  ====================  ================================================  =====================
message               from -> to            content                                           protection
====================  ====================  ================================================  =====================
`Introduced`          all -> authority      role, Ed25519 key of this run                     TLS
`Certified`           authority -> all      its own key, signature on name, role and key      TLS
`Offered`             with others           key, certificate, X25519 key of this run          both signatures
====================  ====================  ================================================  =====================

The authority sees keys, no data, and leaves when all are certified. Everybody trusts it to have checked who speaks:
over a network, by the certificate pinned for each name. It could let itself in as anybody's user; it is assumed not to
collude with an edge server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.crypto.aggregation.key_agreement import agree, verifies
from treaty.crypto.aggregation.masks import length_prefixed
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import M, Message
from treaty.messaging.party import Party

logger = logging.getLogger(__name__)

CrowdRole = Literal["server", "edge", "user"]


class Introduced(Message):
    """Role and signing key for this run. Tells nothing else."""

    role: str
    key: bytes


class Certified(Message):
    """The authority's key and its signature on the receiver's."""

    authority: bytes
    signature: bytes


class Offered(Message):
    """A certified signing key, and an X25519 key of this run, signed with it."""

    key: bytes
    certificate: bytes
    channel: bytes
    signature: bytes


def authority(party: Party, roles: Mapping[str, CrowdRole], patience: float = 60.0) -> None:
    """Certify everybody's keys; whoever does not ask, or is somebody else, gets none.

    Parameters
    ----------
    party : Party
        Connected with all.
    roles : mapping of str to {"server", "edge", "user"}
        Who is to be what.
    patience : float
        Seconds it waits for users who do not ask, or do not take what it sends. Without the others there is no job, so
        they have the party's `timeout`.
    """
    party.may_lose(roles)
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    users = [name for name, role in roles.items() if role == "user"]
    asked = gather_sound(party, roles.keys() - set(users), Introduced, timeout=party.timeout)
    asked |= gather_sound(party, users, Introduced, timeout=patience)
    certified = {
        name: Certified(public, key.sign(_certificate(party.job, name, roles[name], introduced.key)))
        for name, introduced in asked.items()
        if introduced.role == roles[name]
    }
    reached = party.send_each(certified, timeout=patience)
    for name in roles:
        if name not in reached:
            logger.warning("%s certifies nobody as %s: it did not ask as %s", party.name, name, roles[name])
            party.leave_out(name)


class Credentials:
    """A party's certified keys of one run.

    Parameters
    ----------
    party : Party
    authority : str
        A peer.
    role : {"server", "edge", "user"}

    Attributes
    ----------
    signing_key : Ed25519PrivateKey
    offered : Offered
        What others are shown.
    """

    def __init__(self, party: Party, authority: str, role: CrowdRole) -> None:
        self._name, self._job = party.name, party.job
        self.signing_key, self._channel = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
        key, channel = self.signing_key.public_key().public_bytes_raw(), self._channel.public_key().public_bytes_raw()
        party.send(authority, Introduced(role, key))
        certified = party.receive(authority, Certified)
        self._authority = certified.authority
        self.offered = Offered(
            key, certified.signature, channel, self.signing_key.sign(_channel(self._job, self._name, channel))
        )
        self.check(self._name, role, self.offered, authority)

    def check(self, name: str, role: CrowdRole, offered: Offered, peer: str) -> None:
        """Refuse keys that the authority has not certified for this name and role.

        Raises
        ------
        PeerProtocolError
            About `peer`, from which they came.
        """
        certificate = _certificate(self._job, name, role, offered.key)
        if not (
            verifies(self._authority, offered.certificate, certificate)
            and verifies(offered.key, offered.signature, _channel(self._job, name, offered.channel))
        ):
            raise PeerProtocolError(
                peer, f"expected keys of {name} as {role} that the authority certified, got others - from {peer}"
            )

    def seed_with(self, name: str, offered: Offered) -> bytes:
        """Return what is shared with another party, 32 bytes."""
        return agree(self._channel, offered.channel, self._job, *sorted([self._name, name]))


def _certificate(job: str, name: str, role: str, key: bytes) -> bytes:
    return length_prefixed("treaty crowd certificate", job, name, role, key)


def _channel(job: str, name: str, channel: bytes) -> bytes:
    return length_prefixed("treaty crowd channel", job, name, channel)


def gather_sound(party: Party, users: Iterable[str], *kinds: type[M], timeout: float) -> dict[str, M]:
    """Receive from users what comes in time; who sends something else is left out."""
    waiting = [name for name in users if name in party.peers]
    until = time.monotonic() + timeout  # however many are left out meanwhile
    while True:
        try:
            return party.gather(waiting, *kinds, timeout=until - time.monotonic())
        except PeerProtocolError as error:
            if error.peer not in waiting:
                raise
            logger.warning("%s goes on without %s: %s", party.name, error.peer, error)
            party.leave_out(error.peer)
            waiting.remove(error.peer)


def send_each_or_leave_out(party: Party, messages: Mapping[str, Message], timeout: float) -> None:
    """Send to users; who does not take its message in time, or is gone, is left out."""
    reached = party.send_each(messages, timeout=timeout)
    for name in messages.keys() - set(reached):
        logger.warning("%s goes on without %s, which has not taken a message", party.name, name)
        party.leave_out(name)
