"""The key authority: it certifies everybody's signing key of a run, and everybody checks that.

The authority sees keys, no data, and leaves when all are certified. Everybody trusts it to have checked who speaks:
over a network, by the certificate pinned for each name. It could certify a key of its own in any user's name; it is
assumed not to collude with an edge server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from treaty.crypto.keystream import length_prefixed
from treaty.crypto.sharing.key_agreement import agree, verifies
from treaty.errors import PeerProtocolError
from treaty.machine.process import stay_on_one_core
from treaty.messaging.messages import M, Message, MessageLeakage
from treaty.messaging.party import Party
from treaty.systems.system import RoleInput, Roles

logger = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds; a tenth of the job's timeout if that is less


class KeyRequest(Message):
    """Role and signing key for this run. Tells nothing else."""

    leakage: ClassVar = MessageLeakage("its role, and a signing key of this run", "control")

    role: str
    key: bytes


class KeyCertificate(Message):
    """The authority's key and its signature on the receiver's."""

    leakage: ClassVar = MessageLeakage("a signature on its own key, name and role", "control")

    authority: bytes
    signature: bytes


class CertifiedKeys(Message):
    """A certified signing key, and an X25519 key of this run, signed with it."""

    key: bytes
    certificate: bytes
    channel: bytes
    signature: bytes


def authority(inputs: RoleInput) -> None:
    """Certify everybody's keys; a party that does not ask, or asks for another role, gets no certificate.

    Parameters
    ----------
    inputs : RoleInput
        Its party is connected with all others. Users have twice `patience` to ask, since they read their tables first;
        without the others there is no job, so these have the party's `timeout`.
    """
    if not inputs.alone:
        stay_on_one_core()
    roles = {name: role for name, role in inputs.roles.of.items() if role != "authority"}
    certify(inputs.party, roles, 2 * patience_of(inputs))


def authority_of(roles: Roles) -> str:
    """Return the key authority's name."""
    (name,) = roles.having("authority")
    return name


def patience_of(inputs: RoleInput) -> float:
    """Return after how many seconds a user is dropped: for this tree if silent, for the job if it accepts no message.

    With users lost one after another, others wait up to ten times as long: their `timeout` must not be shorter.
    """
    return min(PATIENCE, inputs.party.timeout / 10) if inputs.patience is None else inputs.patience


def certify(party: Party, roles: Mapping[str, str], patience: float) -> None:
    """Certify keys of these parties for these roles; wait `patience` seconds for users, `timeout` for the others."""
    party.may_lose(roles)
    # a key for this run alone: certificates of another run are worth nothing here
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    # users may stay away; without the others there is no job
    users = [name for name, role in roles.items() if role == "user"]
    requests = gather_sound(party, roles.keys() - set(users), KeyRequest, timeout=party.timeout)
    requests |= gather_sound(party, users, KeyRequest, timeout=patience)
    certified = {
        name: KeyCertificate(public, key.sign(_certificate(party.job, name, roles[name], request.key)))
        for name, request in requests.items()
        if request.role == roles[name]
    }
    reached = party.send_each(certified, timeout=patience)
    for name in roles:
        if name not in reached:
            logger.warning("%s certifies nobody as %s: it did not ask as %s", party.name, name, roles[name])
            party.leave_out(name)


class Credentials:
    """A party's certified keys of one run: `signing_key`, and `certified`, which others are shown.

    Making them asks the authority, a peer, for a certificate as `role`.
    """

    def __init__(self, party: Party, authority: str, role: str) -> None:
        self._name, self._job = party.name, party.job
        self.signing_key, self._channel = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
        key, channel = self.signing_key.public_key().public_bytes_raw(), self._channel.public_key().public_bytes_raw()
        party.send(authority, KeyRequest(role, key))
        certificate = party.receive(authority, KeyCertificate)
        self._authority = certificate.authority
        self.certified = CertifiedKeys(
            key, certificate.signature, channel, self.signing_key.sign(_channel(self._job, self._name, channel))
        )
        self.check(self._name, role, self.certified, authority)

    def check(self, name: str, role: str, keys: CertifiedKeys, peer: str) -> None:
        """Raise PeerProtocolError about `peer`, which sent the keys, unless they are certified for name and role."""
        certificate = _certificate(self._job, name, role, keys.key)
        if not (
            verifies(self._authority, keys.certificate, certificate)
            and verifies(keys.key, keys.signature, _channel(self._job, name, keys.channel))
        ):
            raise PeerProtocolError(
                peer, f"expected keys of {name} as {role} that the authority certified, got others - from {peer}"
            )

    def seed_with(self, name: str, keys: CertifiedKeys) -> bytes:
        """Return the 32 bytes shared with another party."""
        return agree(self._channel, keys.channel, self._job, *sorted([self._name, name]))


def _certificate(job: str, name: str, role: str, key: bytes) -> bytes:
    return length_prefixed("treaty crowd certificate", job, name, role, key)


def _channel(job: str, name: str, channel: bytes) -> bytes:
    return length_prefixed("treaty crowd channel", job, name, channel)


def gather_sound(party: Party, users: Iterable[str], *kinds: type[M], timeout: float) -> dict[str, M]:
    """Receive messages of these kinds from users, as many as come in time; leave out users who send anything else."""
    waiting = [name for name in users if name in party.peers]
    # one deadline for all of them
    until = time.monotonic() + timeout  # however many are left out meanwhile
    while True:
        try:
            return party.gather(waiting, *kinds, timeout=until - time.monotonic())
        except PeerProtocolError as error:
            if error.peer not in waiting:
                raise
            logger.warning("%s continues without %s: %s", party.name, error.peer, error)
            party.leave_out(error.peer)
            waiting.remove(error.peer)


def send_each_or_leave_out(party: Party, messages: Mapping[str, Message], timeout: float) -> None:
    """Send to users; leave out those who are gone, or do not take their message in time."""
    reached = party.send_each(messages, timeout=timeout)
    for name in messages.keys() - set(reached):
        logger.warning("%s continues without %s, which has not taken a message", party.name, name)
        party.leave_out(name)
