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
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.keystream import length_prefixed
from treaty.crypto.sharing.key_agreement import Advertisement, EphemeralKeys, PairSeeds
from treaty.crypto.sharing.secure_aggregation import (
    Aggregator,
    Participant,
    Round,
    RoundVoid,
    Unmasking,
    open_pairwise,
    pairwise_input,
)
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, M, Message, encode_body, view
from treaty.messaging.party import Party
from treaty.systems.horizontal.masked_sums import ATTEMPTS, MaskedInput, OwnInput, SumAggregator, contribute
from treaty.systems.system import Signer

logger = logging.getLogger(__name__)


NONCE_BYTES = 32


class MemberKey(Message):
    """A member's signing key for this run. Tells nothing else."""

    leakage: ClassVar = MessageLeakage("a signing key of this run", "control")

    key: bytes


class Roster(Message):
    """All members' signing keys, and a random number of this run."""

    leakage: ClassVar = MessageLeakage("everybody's signing key, and a random number", "control")

    nonce: bytes
    keys: dict[str, bytes]


class MaskKeyPair(Message):
    """A member's public keys of this run: for sealing shares, and for making masks.

    `signature` is by its key in the roster, `vouched` by that of its certificate, on the roster.
    """

    leakage: ClassVar = MessageLeakage("public keys of this run, signed", "control")

    channel: bytes
    mask: bytes
    signature: bytes
    vouched: bytes


class MaskKeyPairs(Message):
    """All members' public keys."""

    leakage: ClassVar = MessageLeakage("everybody's public keys", "control")

    of: dict[str, MaskKeyPair]

    def advertisements(self) -> dict[str, Advertisement]:
        """Return them in the form in which `crypto.aggregation` takes them."""
        return {name: Advertisement(pair.channel, pair.mask, pair.signature) for name, pair in self.of.items()}


class SurvivorSignature(Message):
    """A member's signature on the list of survivors."""

    leakage: ClassVar = MessageLeakage("a signature on the list of those in the sum", "control")

    signature: bytes


class SurvivorSignatures(Message):
    """Survivors' signatures on the list."""

    leakage: ClassVar = MessageLeakage("everybody's signatures on that list", "control")

    of: dict[str, bytes]


class OpenedSum(Message):
    """Tells that the sum was opened; it holds nothing."""

    leakage: ClassVar = MessageLeakage("that the sum is opened", "control")


class SumVoid(Message):
    """The sum is void, not opened: mask the vector again."""

    leakage: ClassVar = MessageLeakage("that the sum is void and comes again", "control")


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

    def next(self, order: MessageOrder) -> Message:
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


# --------------------------- opening sums of members' masked vectors; see `members` and `masked_sums` for the messages

PATIENCE = 0.25  # fraction of the job's timeout to wait for a silent member; the others wait meanwhile


class Collector(SumAggregator):
    """Opens sums over the members, the collector among them if it is one; `told_first` is `ToldDigest`'s.

    `members` are those still there; `summed` those whose vectors are in the sum opened last, as members were told. Of a
    later loss they learn with the next sum.
    """

    def __init__(
        self, party: Party, members: Sequence[str], vouching: Signer, told_first: bytes, rules: SumRules
    ) -> None:
        self.members, self.summed = list(members), list(members)
        self._party, self._recover = party, rules.recover
        self._patience = PATIENCE * party.timeout
        self._number = 0
        waits = len(members) > 2 and party.channel.waits
        self._senders = ThreadPoolExecutor(len(members), thread_name_prefix="treaty-send") if waits else None
        self._told = ToldDigest(told_first)
        self._own = Member(party, vouching, self._told, rules) if party.name in members else None
        self._introduce(rules)

    def _introduce(self, rules: SumRules) -> None:
        """Pass on the members' signing keys, then their mask keys."""
        party, own, others = self._party, self._own, self._others()
        introduced = {name: party.receive(name, MemberKey) for name in others}
        if own is not None:
            introduced[party.name] = own.key
        roster = Roster(secrets.token_bytes(NONCE_BYTES), {name: one.key for name, one in introduced.items()})
        self.send(dict.fromkeys(others, roster))
        self._first = rules.first_round(party, roster)
        pairs = {name: party.receive(name, MaskKeyPair) for name in others}
        if own is not None:
            pairs[party.name] = own.advertise(roster, party.name)
        told = MaskKeyPairs(pairs)
        self.send(dict.fromkeys(others, told))
        if own is not None:
            own.agree(told)
        self._advertised = told.advertisements()

    def total(self, length: int, own: Integers | None = None) -> Integers:
        """Open the sum of the members' next vectors modulo 2^64, int64 (length,); with `recover`, of those in `summed`.

        `own` is the collector's own vector, if it is a member. With `recover` raises RoundVoid when too few members are
        left or repeating does not help; without, PeerLost or PeerTimeout when a member is lost.
        """
        self._number += 1
        if self._recover:
            return self._recovered(length, own)
        this_round = self._round(length)
        inputs = {}
        if self._own is not None and own is not None:
            inputs[self._own.name] = self._own.masked(own)
        for name in self._others():
            message = self._party.receive(name, MaskedInput)
            inputs[name] = view(message.values, np.uint64, (length,), peer=name, what="MaskedInput.values")
        return open_pairwise(this_round, inputs)

    def _recovered(self, length: int, own: Integers | None) -> Integers:
        """Open the sum over the members that complete all steps, in up to `ATTEMPTS` attempts."""
        for attempt in range(ATTEMPTS):
            this_round = self._round(length, attempt)
            mine = None
            if self._own is not None and own is not None:
                mine = OwnInput(self._party.name, self._own.participant(length, attempt), own)
            aggregator = Aggregator(this_round, self._advertised)
            try:
                sealed, passed = self.pass_shares(aggregator, self._advertised, mine)
                total, self.summed = self.open_sum(this_round, aggregator, sealed, mine, passed.get(self._party.name))
            except RoundVoid as void:
                logger.warning("%s: %s", self._party.name, void)
                if attempt + 1 == ATTEMPTS or len(self.members) < this_round.least:
                    raise
                self._send_all(SumVoid())
            else:
                self._send_all(OpenedSum())
                return total
        raise AssertionError("the last attempt returns or raises")

    def _round(self, length: int, attempt: int = 0) -> Round:
        return self._first.another(self._number, length, self._told.digest.hex(), attempt)

    def _choose(self, this_round: Round, aggregator: Aggregator, came: Mapping[str, NDArray[np.uint64]]) -> None:
        """Leave all vectors in: members agreed to sums of cohorts that differ by one."""

    def _pass_proofs(
        self, this_round: Round, aggregator: Aggregator, survivors: Sequence[str], own: OwnInput | None
    ) -> Unmasking | None:
        signatures = {name: message.signature for name, message in self._gather(SurvivorSignature).items()}
        if own is not None:
            signatures[own.name] = own.participant.sign_survivors(survivors)
        valid = aggregator.pass_signatures(signatures)
        self._send_all(SurvivorSignatures(valid))
        return None if own is None else own.participant.unmask(valid)

    def tell_all(self, message: Message) -> None:
        """Send a message to all other members; masks depend on it from now on."""
        self._told.hear(message)
        self._send_all(message)

    def _send_all(self, message: Message) -> None:
        self.send(dict.fromkeys(self._others(), message))

    def hear_all(self, kind: type[M]) -> dict[str, M]:
        """Receive a message from all other members; with `recover`, from those still there."""
        if self._recover:
            return self._gather(kind)
        return {name: self._party.receive(name, kind) for name in self._others()}

    def _gather(self, kind: type[M]) -> dict[str, M]:
        """Receive from all members still there; leave out whoever is lost, silent or stops."""
        others = self._others()
        try:
            came = self._party.gather(others, kind, timeout=self._patience)
        except PeerProtocolError as error:
            self._expel(error)
            return self._gather(kind)
        for name in others:
            if name not in came:
                self._leave_out(name)
        return came

    def send(self, messages: Mapping[str, Message]) -> None:
        """Send to members; with `recover`, leave out whom nothing reaches."""
        if self._recover:
            reached = self._party.send_each(messages, self._patience)
            for name in messages:
                if name not in reached:
                    self._leave_out(name)
        elif self._senders is None:
            for name, message in messages.items():
                self._party.send(name, message)
        else:  # with threads that are kept: every level of a tree has a message to all
            list(self._senders.map(self._party.send, messages, messages.values()))

    def _expel(self, error: PeerProtocolError) -> None:
        """Leave out a member that sent something invalid, as if it were lost."""
        logger.warning("%s: %s", self._party.name, error)
        self._leave_out(error.peer)

    def _leave_out(self, name: str) -> None:
        logger.warning("%s goes on without %s", self._party.name, name)
        self._party.leave_out(name)
        self.members.remove(name)

    def _others(self) -> list[str]:
        return [name for name in self.members if name != self._party.name]
