"""Sums over the members of a job of which nobody sees the terms.

The collector receives masked vectors and opens sums (`sums`); it may be a member itself, which then masks in place.

====================  =================  ================================================  ===========================
message               from -> to         content                                           protection
====================  =================  ================================================  ===========================
`MemberKey`           member ->          Ed25519 key of this run                           vouching
`Roster`              collector -> all   everybody's, and a nonce                          vouching
`MaskKeyPair`         member ->          two X25519 keys, signed; the roster, vouched for  signature
                                         by the key of the member's certificate
`MaskKeyPairs`        collector -> all   everybody's                                       signatures
`MaskedInput`         member ->          a vector under masks                              masks, each used once
shares, `Survivors`,  both ways          (``dropout="accept"``) see `masked_sums`          see there
`MaskShares`
`SurvivorSignature`,  both ways          (``dropout="accept"``) signatures on the list of  they are signatures
`SurvivorSignatures`                     survivors
`OpenedSum`,          collector -> all   (``dropout="accept"``) it worked; or mask again   TLS
`SumVoid`
====================  =================  ================================================  ===========================

Who vouches: over a network every party has the others' certificates pinned. Each member signs, with the key of its
certificate, a digest of the job, the system, the nonce and the whole roster, and checks that all others signed the
same, so that a collector cannot put itself between two members. A roster holds the verifier's own key, drawn for this
run: what a member vouched for in another run fits no roster of this one, even if the keys of that run were stolen.
Between threads of one process there are no certificates, and nobody to deceive.

With ``dropout="accept"`` keys last the job; survivors reveal, of each lost member, the key of the one mask that they
share with it in this sum (`crypto.aggregation.secure_aggregation`, "reveal").
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import Advertisement, EphemeralKeys, PairSeeds
from treaty.crypto.aggregation.masks import length_prefixed
from treaty.crypto.aggregation.participant import Participant
from treaty.crypto.aggregation.round import Round, RoundVoid, Unmasking, pairwise_input
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.conversation import Order
from treaty.messaging.messages import Array, Message, encode_body
from treaty.messaging.party import Party
from treaty.systems.horizontal.masked_sums import ATTEMPTS, MaskedInput, contribute
from treaty.systems.system import Signer

logger = logging.getLogger(__name__)


NONCE_BYTES = 32


class MemberKey(Message):
    """A member's signing key for this run. Tells nothing else."""

    key: bytes


class Roster(Message):
    """All members' signing keys, and a random number of this run."""

    nonce: bytes
    keys: dict[str, bytes]


class MaskKeyPair(Message):
    """A member's public keys of this run: for sealing shares, and for making masks.

    `signature` is by its key in the roster, `vouched` by that of its certificate, on the roster.
    """

    channel: bytes
    mask: bytes
    signature: bytes
    vouched: bytes


class MaskKeyPairs(Message):
    """All members' public keys."""

    of: dict[str, MaskKeyPair]

    def advertisements(self) -> dict[str, Advertisement]:
        """Return them in the form in which `crypto.aggregation` takes them."""
        return {name: Advertisement(pair.channel, pair.mask, pair.signature) for name, pair in self.of.items()}


class SurvivorSignature(Message):
    """A member's signature on the list of survivors."""

    signature: bytes


class SurvivorSignatures(Message):
    """Survivors' signatures on the list."""

    of: dict[str, bytes]


class OpenedSum(Message):
    """Tells that the sum was opened; it holds nothing."""


class SumVoid(Message):
    """The sum is void, not opened: mask the vector again."""


class ToldDigest:
    """Digest (32 bytes) of all that a member was told so far; its masks depend on it.

    Masks cancel only between members that were told the same: a collector that tells one of them something else than
    the others, options included, gets a uniform sum. `told_first` is what the run begins with: options and the first
    message to all.
    """

    def __init__(self, told_first: bytes) -> None:
        self.digest = hashlib.sha256(length_prefixed("treaty heard", told_first)).digest()

    def hear(self, message: Message) -> None:
        named = length_prefixed(self.digest, type(message).__name__, encode_body(message))
        self.digest = hashlib.sha256(named).digest()


@dataclass(frozen=True, slots=True)
class SumRules:
    """How sums are opened: with `recover`, without members that are lost; with `allow_two`, over two members.

    Of a sum of two each member sees the other's vector.
    """

    recover: bool = False
    allow_two: bool = False

    def first_round(self, party: Party, roster: Roster) -> Round:
        """Return the round that those of all sums are derived from; CryptoError when members are too few."""
        return Round(
            job_id=party.job, protocol=party.protocol, round_id=0, roster=roster.keys, length=0,
            dropout="reveal" if self.recover else "none",
            min_cohort=2 if self.allow_two else 3, allow_two=self.allow_two,
        )  # fmt: skip


class Member:
    """A member's secrets of one run, and its part in every sum.

    `key` introduces it; `told` digests all it was told; `there` are the members not reported lost: whoever was is not
    let in again.
    """

    def __init__(self, party: Party, vouching: Signer, told: ToldDigest, rules: SumRules) -> None:
        self.name, self.told, self.rules = party.name, told, rules
        self.there: frozenset[str] = frozenset()
        self._party, self._vouching = party, vouching
        self._signing_key = Ed25519PrivateKey.generate()
        key = self._signing_key.public_key().public_bytes_raw()
        self.key = MemberKey(key)
        self._number = 0

    def advertise(self, roster: Roster, peer: str) -> MaskKeyPair:
        """Vouch for who takes part, by the roster that `peer` sent, and return own public keys.

        Raises PeerProtocolError when the own key is missing or another, or there is no nonce.
        """
        if roster.keys.get(self.name) != self.key.key or len(roster.nonce) != NONCE_BYTES:
            raise PeerProtocolError(peer, f"expected the own key of {self.name} and a nonce - at Roster")
        self._collector, self._vouched_for = peer, _digest_of(self._party, roster)
        self._first = self.rules.first_round(self._party, roster)
        self.there = frozenset(roster.keys)
        self._keys = EphemeralKeys(self._party.job, self.name, self._first.key_scope)
        return MaskKeyPair(*self._keys.advertise(self._signing_key), self._vouching.vouch(self._vouched_for))

    def agree(self, pairs: MaskKeyPairs) -> None:
        """Derive what is shared with each other member.

        Raises PeerProtocolError when a member has not vouched for this very roster.
        """
        for name in self._first.roster:
            pair = pairs.of.get(name)
            if pair is None or not self._vouching.check(name, pair.vouched, self._vouched_for):
                raise PeerProtocolError(
                    self._collector,
                    f"expected the members of this run signed by {name} with the key of its certificate, got no such "
                    "signature - at MaskKeyPairs",
                )
        self._seeds: PairSeeds = self._keys.agree(pairs.advertisements(), self._first.roster)

    def masked(self, values: Integers) -> NDArray[np.uint64]:
        """Mask the next vector, where no member may be lost."""
        self._number += 1
        return pairwise_input(self._round(len(values)), self._seeds, values)

    def participant(self, length: int, attempt: int) -> Participant:
        """Take part in an attempt at the next vector, where members may be lost."""
        self._number += attempt == 0
        return Participant(self._round(length, attempt), self._seeds, self._signing_key)

    def _round(self, length: int, attempt: int = 0) -> Round:
        return self._first.another(self._number, length, self.told.digest.hex(), attempt)

    def without_lost(self, names: Collection[str], peer: str) -> None:
        """Note who takes part from now on.

        Raises PeerProtocolError when somebody reported lost is back: the difference of two sums would be its vector.
        """
        there = frozenset(names) | {self.name}
        if not there <= self.there:
            raise PeerProtocolError(peer, f"expected nobody who was lost before, got some - from {peer}")
        if there < self.there:
            logger.warning("%s goes on without %s", self.name, ", ".join(sorted(self.there - there)))
        self.there = there


@dataclass(frozen=True, slots=True)
class _SignedContribution:
    """A member's vector of one attempt, and its signature on the survivors."""

    member: Member
    mine: Participant
    values: Integers
    collector: str

    def vector(self, sharers: Collection[str]) -> Integers:
        self.member.without_lost(sharers, self.collector)
        return self.values

    def prove(self, survivors: Sequence[str]) -> Message:
        signature = self.mine.sign_survivors(survivors)
        self.member.without_lost(survivors, self.collector)
        return SurvivorSignature(signature)

    def unmask(self, proofs: SurvivorSignatures) -> Unmasking:
        return self.mine.unmask(proofs.of)


class Membership:
    """A member's end of sums that another party collects: `join` makes it.

    `note` is called with each vector before it is masked, where its user has asked for a record.
    """

    def __init__(self, party: Party, collector: str, member: Member) -> None:
        self.member = member
        self.note: Callable[[Integers], None] | None = None
        self._party, self._collector = party, collector

    def hear(self, message: Message) -> None:
        """Make masks depend on what the collector told all members."""
        self.member.told.hear(message)

    def next(self, order: Order) -> Message:
        """Receive what the collector tells all members next, one of the messages that `order` allows now."""
        message = self._party.receive(self._collector, *order.allowed)
        order.take(message)
        self.hear(message)
        return message

    def give(self, values: Integers) -> None:
        """Contribute an int64 vector to the next sum.

        Raises RoundVoid, CryptoError, PeerError when it fails, or the collector asks for what the protocol does not
        allow.
        """
        party, collector = self._party, self._collector
        if not self.member.rules.recover:
            self._noted(values)
            party.send(collector, MaskedInput(Array.of(self.member.masked(values))))
            return
        for attempt in range(ATTEMPTS):
            mine = self.member.participant(len(values), attempt)
            self._noted(values)
            contribution = _SignedContribution(self.member, mine, values, collector)
            void = contribute(party, collector, mine, contribution, SurvivorSignatures, SumVoid)
            if void is None and isinstance(party.receive(collector, OpenedSum, SumVoid), OpenedSum):
                return
        raise RoundVoid(f"{self.member.name} took part in {ATTEMPTS} attempts at a sum, and all were void")

    def _noted(self, values: Integers) -> None:
        if self.note is not None:
            self.note(values)


def join(
    party: Party, collector: str, members: Sequence[str], vouching: Signer, told_first: bytes, rules: SumRules
) -> Membership:
    """Become a member of sums that another party collects, with masks made from keys of this run alone.

    `members` are those of the own job file; `told_first` is `ToldDigest`'s.

    Raises PeerProtocolError, CryptoError when keys are not those of the members.
    """
    member = Member(party, vouching, ToldDigest(told_first), rules)
    party.send(collector, member.key)
    roster = party.receive(collector, Roster)
    if roster.keys.keys() != set(members):
        raise PeerProtocolError(collector, f"expected keys of {', '.join(members)}, got others' - at Roster")
    party.send(collector, member.advertise(roster, collector))
    member.agree(party.receive(collector, MaskKeyPairs))
    return Membership(party, collector, member)


def _digest_of(party: Party, roster: Roster) -> bytes:
    """Digest what members vouch for: the run, by its names and nonce, and everybody's key of it."""
    listed = (part for name in sorted(roster.keys) for part in (name, roster.keys[name]))
    return hashlib.sha256(
        length_prefixed("treaty members of a run", party.job, party.protocol, roster.nonce, *listed)
    ).digest()
