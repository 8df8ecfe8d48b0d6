"""Sums over the members of a job that nobody sees the terms of: `crypto.secure_aggregation` between parties.

The collector receives masked vectors and opens sums; it may be a member itself, which then masks in place.

====================  =================  ================================================  ===========================
message               from -> to         content                                           protection
====================  =================  ================================================  ===========================
`Introduced`          member ->          Ed25519 key of this run, vouched for by the key   TLS
                                         of the member's certificate
`Roster`              collector -> all   everybody's                                       vouching
`Advertised`          member ->          two X25519 keys, signed                           signature
`Keys`                collector -> all   everybody's                                       signatures
`Masked`              member ->          a vector under masks                              masks, each used once
`Shares`, `Passed`    member -> member   (``dropout="accept"``) sealed shares of the       AES-GCM
                                         self-mask's seed
`Survivors`,          both ways          (``dropout="accept"``) whose vectors came, signed  signature
`Signed`, `Signatures`
`Unmasked`            member ->          (``dropout="accept"``) shares of survivors'        TLS
                                         seeds, keys of single masks with those lost
`Opened`, `Again`     collector -> all   (``dropout="accept"``) it worked; or it is void   TLS
====================  =================  ================================================  ===========================

Who vouches: over a network every party has the others' certificates pinned, and a member checks that each key of the
roster is signed with the key of its owner's certificate, so that a collector cannot put itself between two members.
Between threads of one process there are no certificates, and nobody to deceive.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import Advertisement, EphemeralKeys, PairSeeds
from treaty.crypto.aggregation.masks import length_prefixed
from treaty.crypto.aggregation.participant import Participant
from treaty.crypto.aggregation.round import Dropout, Round, RoundVoid, pairwise_input
from treaty.errors import PeerProtocolError
from treaty.messaging.certificates import Identity, vouch, vouches
from treaty.messaging.messages import Array, Message, encode_body
from treaty.messaging.party import Party

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # at one sum, before a void round ends the job


class Introduced(Message):
    """A member's signing key for this run. Tells nothing else."""

    key: bytes
    vouched: bytes


class Roster(Message):
    """All members' signing keys."""

    keys: dict[str, bytes]
    vouched: dict[str, bytes]


class Advertised(Message):
    """A member's public keys of this run."""

    channel: bytes
    mask: bytes
    signature: bytes


class Keys(Message):
    """All members' public keys."""

    of: dict[str, Advertised]


class Masked(Message):
    """A vector uint64 (n,) under masks: uniform to whoever lacks them."""

    values: Array


class Shares(Message):
    """Sealed shares by receiver. Tell the collector nothing."""

    sealed: dict[str, bytes]


class Passed(Message):
    """Sealed shares by sender."""

    sealed: dict[str, bytes]


class Survivors(Message):
    """Whose vectors are in the sum."""

    names: list[str]


class Signed(Message):
    """A member's signature on the list of survivors."""

    signature: bytes


class Signatures(Message):
    """Survivors' signatures on the list."""

    of: dict[str, bytes]


class Unmasked(Message):
    """What removes the masks of this one sum: by survivor a share of its seed, by lost member the key of one mask."""

    survivors: dict[str, bytes]
    lost: dict[str, bytes]


class Opened(Message):
    """The sum is open."""


class Again(Message):
    """The sum is void, not opened: mask the vector anew."""


@dataclass(frozen=True, slots=True)
class Vouching:
    """Whose certificates are pinned.

    Parameters
    ----------
    identity : Identity or None
        The party's own; None between threads of one process.
    pinned : mapping of str to bytes
        Every member's certificate, PEM.
    """

    identity: Identity | None = None
    pinned: Mapping[str, bytes] | None = None

    def vouch(self, content: bytes) -> bytes:
        """Sign with the key of the own certificate; empty without one."""
        return b"" if self.identity is None else vouch(self.identity, content)

    def check(self, name: str, vouched: bytes, content: bytes) -> bool:
        """Tell whether a member vouched for `content`."""
        return self.pinned is None or (name in self.pinned and vouches(self.pinned[name], vouched, content))


class Cohort:
    """What all agree on: whose vectors are summed, and how loss is met.

    Parameters
    ----------
    job, protocol : str
    roster : mapping of str to bytes
        Ed25519 keys of the members.
    recover : bool
        Whether sums go on without members that are lost.
    allow_two : bool
        Two members are enough: each sees the other's vector in the sum.

    Attributes
    ----------
    roster : dict of str to bytes
    key_scope : bytes
        What the members' keys are made for: all rounds of the job.

    Raises
    ------
    CryptoError
        When members are too few.
    """

    def __init__(self, job: str, protocol: str, roster: Mapping[str, bytes], recover: bool, allow_two: bool) -> None:
        dropout: Dropout = "reveal" if recover else "none"
        self._first = Round(
            job_id=job, protocol=protocol, round_id=0, roster=roster, length=0, dropout=dropout,
            min_cohort=2 if allow_two else 3, allow_two=allow_two,
        )  # fmt: skip
        self.roster, self.key_scope = self._first.roster, self._first.key_scope

    def round(self, number: int, length: int, heard: Heard, attempt: int = 0) -> Round:
        """Return the round of secure aggregation in which vector `number` is summed."""
        return self._first.another(number, length, heard.digest.hex(), attempt)


class Heard:
    """Digest of all that the collector told a member so far, which its masks depend on.

    Masks cancel only between members that were told the same: a collector that asks one of them for something else than
    the others, or tells it other options, gets a sum that is uniform.

    Parameters
    ----------
    begun : bytes
        What the run began with: options and the first message to all.

    Attributes
    ----------
    digest : bytes of length 32
    """

    def __init__(self, begun: bytes) -> None:
        self.digest = hashlib.sha256(length_prefixed("treaty heard", begun)).digest()

    def hear(self, message: Message) -> None:
        """Take in the next message."""
        named = length_prefixed(self.digest, type(message).__name__, encode_body(message))
        self.digest = hashlib.sha256(named).digest()


class Member:
    """A member's secrets of one run, and its part in every sum.

    Attributes
    ----------
    introduced : Introduced
    heard : Heard
    there : frozenset of str
        Members that have not been reported lost; who was is not let in again.
    """

    def __init__(self, name: str, job: str, vouching: Vouching, heard: Heard) -> None:
        self.name, self.heard = name, heard
        self.there: frozenset[str] = frozenset()
        self._job, self._vouching = job, vouching
        self._signing_key = Ed25519PrivateKey.generate()
        key = self._signing_key.public_key().public_bytes_raw()
        self.introduced = Introduced(key, vouching.vouch(_introduction(job, name, key)))
        self._number = 0

    def advertise(self, roster: Roster, recover: bool, allow_two: bool, peer: str, protocol: str) -> Advertised:
        """Check who takes part and return own public keys.

        Raises
        ------
        PeerProtocolError
            When a key is not vouched for by its owner, or the own one is missing.
        """
        if roster.keys.get(self.name) != self.introduced.key or roster.vouched.keys() != roster.keys.keys():
            raise PeerProtocolError(peer, f"expected the own key of {self.name} among the members' - at Roster")
        for name, key in roster.keys.items():
            if not self._vouching.check(name, roster.vouched[name], _introduction(self._job, name, key)):
                raise PeerProtocolError(
                    peer, f"expected a key of {name} signed with the key of its certificate, got another - at Roster"
                )
        self._cohort = Cohort(self._job, protocol, roster.keys, recover, allow_two)
        self.there = frozenset(roster.keys)
        self._keys = EphemeralKeys(self._job, self.name, self._cohort.key_scope)
        return Advertised(*self._keys.advertise(self._signing_key))

    def agree(self, keys: Keys) -> None:
        """Derive what is shared with each other member."""
        advertised = {name: Advertisement(of.channel, of.mask, of.signature) for name, of in keys.of.items()}
        self._seeds: PairSeeds = self._keys.agree(advertised, self._cohort.roster)

    def masked(self, values: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Mask the next vector, where no member may be lost."""
        self._number += 1
        return pairwise_input(self._cohort.round(self._number, len(values), self.heard), self._seeds, values)

    def participant(self, length: int, attempt: int) -> Participant:
        """Take part in an attempt at the next vector, where members may be lost."""
        self._number += attempt == 0
        this_round = self._cohort.round(self._number, length, self.heard, attempt)
        return Participant(this_round, self._seeds, self._signing_key)

    def without_lost(self, names: Collection[str], peer: str) -> None:
        """Note who takes part from now on.

        Raises
        ------
        PeerProtocolError
            When somebody is among them who was reported lost: the difference of two sums would be its vector.
        """
        there = frozenset(names) | {self.name}
        if not there <= self.there:
            raise PeerProtocolError(peer, f"expected nobody who was lost before, got some - at Passed from {peer}")
        if there < self.there:
            logger.warning("%s goes on without %s", self.name, ", ".join(sorted(self.there - there)))
        self.there = there


class Membership:
    """A member's end of sums that another party collects: `join` makes it.

    Attributes
    ----------
    member : Member
    """

    def __init__(self, party: Party, collector: str, member: Member, *, recover: bool) -> None:
        self.member = member
        self._party, self._collector, self._recover = party, collector, recover

    def hear(self, message: Message) -> None:
        """Take in what the collector told all members."""
        self.member.heard.hear(message)

    def give(self, values: NDArray[np.int64]) -> None:
        """Contribute an int64 vector to the next sum.

        Raises
        ------
        RoundVoid, CryptoError, PeerError
            When it fails, or the collector asks for what the protocol does not allow.
        """
        if self._recover:
            self._take_part(values)
        else:
            self._party.send(self._collector, Masked(Array.of(self.member.masked(values))))

    def _take_part(self, values: NDArray[np.int64]) -> None:
        """Contribute to a sum of which members may be lost; `Again` begins it anew from any step."""
        party, collector = self._party, self._collector
        for attempt in range(ATTEMPTS):
            mine = self.member.participant(len(values), attempt)
            party.send(collector, Shares(mine.share()))
            said: Message = party.receive(collector, Passed, Again)
            if isinstance(said, Passed):
                self.member.without_lost(said.sealed, collector)
                party.send(collector, Masked(Array.of(mine.masked_input(values, said.sealed))))
                said = party.receive(collector, Survivors, Again)
            if isinstance(said, Survivors):
                signature = mine.sign_survivors(said.names)
                self.member.without_lost(said.names, collector)
                party.send(collector, Signed(signature))
                said = party.receive(collector, Signatures, Again)
            if isinstance(said, Signatures):
                party.send(collector, Unmasked(*mine.unmask(said.of)))
                said = party.receive(collector, Opened, Again)
            if isinstance(said, Opened):
                return
        raise RoundVoid(f"{self.member.name} took part in {ATTEMPTS} attempts at a sum, and all were void")


def join(
    party: Party,
    collector: str,
    members: Sequence[str],
    vouching: Vouching,
    begun: bytes,
    *,
    recover: bool = False,
    allow_two: bool = False,
) -> Membership:
    """Become a member of sums that another party collects.

    Parameters
    ----------
    members : sequence of str
        All of them, by the own job file.
    begun : bytes
        What the run began with, see `Heard`.
    recover, allow_two
        See `Cohort`.

    Returns
    -------
    Membership
        Its masks are made from keys of this run alone.

    Raises
    ------
    PeerProtocolError, CryptoError
        When keys are not those of the members.
    """
    member = Member(party.name, party.job, vouching, Heard(begun))
    party.send(collector, member.introduced)
    roster = party.receive(collector, Roster)
    if roster.keys.keys() != set(members):
        raise PeerProtocolError(collector, f"expected keys of {', '.join(members)}, got others' - at Roster")
    party.send(collector, member.advertise(roster, recover, allow_two, collector, party.protocol))
    member.agree(party.receive(collector, Keys))
    return Membership(party, collector, member, recover=recover)


def _introduction(job: str, name: str, key: bytes) -> bytes:
    return length_prefixed("treaty member", job, name, key)
