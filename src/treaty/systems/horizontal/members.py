"""Sums over the members of a job, whose terms no party sees: members mask their vectors, a collector opens the sum.

The collector may be a member itself, which then masks in place. Masks are made from keys of this run.

**Whose keys.** Over a network every party has the others' certificates pinned. Each member signs, with the key of its
certificate, a digest of the job, the system, a nonce and the whole roster, and checks that all others signed the same:
a collector cannot put itself between two members. The roster contains the verifier's own key, drawn for this run, so
that no signature of an earlier run fits, even if the keys of that run were stolen. Between threads of one process there
are no certificates.

**What masks depend on.** Every vector has its own masks, derived from its number and a digest of all that the collector
has sent to all members so far. If one of them received other messages or options, the sum is uniform.

**Lost members.** By default a lost member ends the job. With `SumRules.recover` the survivors reveal, of each lost
member, the key of the one mask that they share with it in this sum (dropout "reveal").
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.keystream import length_prefixed
from treaty.crypto.sharing.aggregator import Aggregator
from treaty.crypto.sharing.key_agreement import Advertisement, EphemeralKeys, PairSeeds
from treaty.crypto.sharing.secure_aggregation import (
    Participant,
    Round,
    RoundVoid,
    Unmasking,
    open_pairwise,
    pairwise_input,
)
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.certificates import Signer
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import Array, M, Message, encode, leaks, view
from treaty.messaging.party import Party
from treaty.systems.horizontal.masked_sums import ATTEMPTS, MaskedInput, OwnInput, SumAggregator, contribute

logger = logging.getLogger(__name__)
NONCE_BYTES = 32
# Fraction of the job's timeout to wait for a silent member; the others wait meanwhile
PATIENCE = 0.25


@leaks("a signing key of this run", "control")
class MemberKey(Message):
    """A member's signing key for this run."""

    key: bytes


@leaks("all members' signing keys, and a random number", "control")
class Roster(Message):
    """All members' signing keys, and a random number of this run."""

    nonce: bytes
    keys: dict[str, bytes]


@leaks("public keys of this run, signed", "control")
class MaskKeyPair(Message):
    """A member's public keys of this run: for sealing shares, and for making masks.

    `signature` is by its key in the roster, `vouched` by that of its certificate, on the roster.
    """

    channel: bytes
    mask: bytes
    signature: bytes
    vouched: bytes


@leaks("all members' public keys", "control")
class MaskKeyPairs(Message):
    """All members' public keys."""

    of: dict[str, MaskKeyPair]

    def advertisements(self) -> dict[str, Advertisement]:
        return {name: Advertisement(pair.channel, pair.mask, pair.signature) for name, pair in self.of.items()}


@leaks("a signature on the list of those in the sum", "control")
class SurvivorSignature(Message):
    """A member's signature on the list of survivors."""

    signature: bytes


@leaks("all survivors' signatures on that list", "control")
class SurvivorSignatures(Message):
    """Survivors' signatures on the list."""

    of: dict[str, bytes]


@leaks("that the sum is opened", "control")
class OpenedSum(Message):
    """The sum was opened."""


@leaks("that the sum is invalid and is repeated", "control")
class SumVoid(Message):
    """The sum is void: mask the vector again."""


class TranscriptDigest:
    """Digest (32 bytes) of all that a member has received from the collector; its masks depend on it.

    `first_message` is what the run begins with: options and the first message to all.
    """

    def __init__(self, first_message: bytes) -> None:
        self.digest = hashlib.sha256(length_prefixed("treaty heard", first_message)).digest()

    def update(self, message: Message) -> None:
        named = length_prefixed(self.digest, type(message).__name__, encode(message))
        self.digest = hashlib.sha256(named).digest()


@dataclass(frozen=True, slots=True)
class SumRules:
    """How sums are opened: with `recover`, without members that are lost; with `allow_two`, over two members.

    From a sum of two each member learns the other's vector.
    """

    recover: bool = False
    allow_two: bool = False

    def first_round(self, party: Party, roster: Roster) -> Round:
        """Return the round from which the rounds of all sums are derived; CryptoError if members are too few."""
        return Round(
            job_id=party.job, protocol=party.protocol, round_id=0, roster=roster.keys, length=0,
            dropout="reveal" if self.recover else "none",
            min_cohort=2 if self.allow_two else 3, allow_two=self.allow_two,
        )  # fmt: skip


class SumMember:
    """A member's secrets of one run, and its part in every sum.

    `key` introduces it; `received` digests what the collector sent; `present` are the members not reported lost. A
    member that was reported lost is not let in again.
    """

    def __init__(self, party: Party, vouching: Signer, received: TranscriptDigest, rules: SumRules) -> None:
        self.name, self.received, self.rules = party.name, received, rules
        self.present: frozenset[str] = frozenset()
        self._party, self._vouching = party, vouching
        self._signing_key = Ed25519PrivateKey.generate()
        self.key = MemberKey(self._signing_key.public_key().public_bytes_raw())
        self._number = 0

    def advertise(self, roster: Roster, peer: str) -> MaskKeyPair:
        """Sign the roster that `peer` sent, and return own public keys.

        Raises PeerProtocolError if the own key is missing or wrong, or there is no nonce.
        """
        if roster.keys.get(self.name) != self.key.key or len(roster.nonce) != NONCE_BYTES:
            raise PeerProtocolError(peer, f"expected the own key of {self.name} and a nonce - at Roster")
        party, listed = self._party, [part for name in sorted(roster.keys) for part in (name, roster.keys[name])]
        # length prefixes: no two lists of names and keys have one encoding
        named = length_prefixed("treaty members of a run", party.job, party.protocol, roster.nonce, *listed)
        self._collector, self._vouched_for = peer, hashlib.sha256(named).digest()
        self._first = self.rules.first_round(party, roster)
        self.present = frozenset(roster.keys)
        self._keys = EphemeralKeys(party.job, self.name, self._first.key_scope)
        return MaskKeyPair(*self._keys.advertise(self._signing_key), self._vouching.vouch(self._vouched_for))

    def agree(self, pairs: MaskKeyPairs) -> None:
        """Derive the seeds shared with each other member; PeerProtocolError if one has not signed this very roster."""
        for name in self._first.roster:
            pair = pairs.of.get(name)
            if pair is None or not self._vouching.check(name, pair.vouched, self._vouched_for):
                raise PeerProtocolError(
                    self._collector,
                    f"expected the members of this run signed by {name} with the key of its certificate, got no such "
                    "signature - at MaskKeyPairs",
                )
        # only now: keys without a valid signature never make a mask
        self._seeds: PairSeeds = self._keys.agree(pairs.advertisements(), self._first.roster)

    def masked(self, values: Integers) -> NDArray[np.uint64]:
        self._number += 1
        this_round = self._first.another(self._number, len(values), self.received.digest.hex(), 0)
        return pairwise_input(this_round, self._seeds, values)

    def participant(self, length: int, attempt: int) -> Participant:
        # attempts at one vector share its number, and differ by the attempt in the nonce
        self._number += attempt == 0
        this_round = self._first.another(self._number, length, self.received.digest.hex(), attempt)
        return Participant(this_round, self._seeds, self._signing_key)

    def without_lost(self, names: Collection[str], peer: str) -> None:
        """Set who takes part from now on; PeerProtocolError if `peer` lists a member that was reported lost."""
        # two attempts at one sum, with and without a member, would differ by its vector
        present = frozenset(names) | {self.name}
        if not present <= self.present:
            back = ", ".join(sorted(present - self.present))
            raise PeerProtocolError(peer, f"{peer} lists members that were reported lost: {back}")
        if present < self.present:
            logger.warning("%s continues without %s", self.name, ", ".join(sorted(self.present - present)))
        self.present = present


@dataclass(frozen=True, slots=True)
class _SignedContribution:
    member: SumMember
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
    """A member of sums that another party collects.

    `members` are those of the own job file; `first_message` is `TranscriptDigest`'s. `noted` is called with each vector
    before it is masked. The constructor raises PeerProtocolError, CryptoError if keys do not fit the members.
    """

    def __init__(
        self,
        party: Party,
        collector: str,
        members: Sequence[str],
        vouching: Signer,
        first_message: bytes,
        rules: SumRules,
        noted: Callable[[Integers], None] = lambda values: None,
    ) -> None:
        self.member = SumMember(party, vouching, TranscriptDigest(first_message), rules)
        self._party, self._collector, self._noted = party, collector, noted
        party.send(collector, self.member.key)
        roster = party.receive(collector, Roster)
        if roster.keys.keys() != set(members):
            got = ", ".join(sorted(roster.keys))
            raise PeerProtocolError(collector, f"expected keys of {', '.join(members)}, got keys of {got} - at Roster")
        party.send(collector, self.member.advertise(roster, collector))
        self.member.agree(party.receive(collector, MaskKeyPairs))

    def next(self, order: MessageOrder) -> Message:
        """Receive what the collector sends to all members next, one of the messages that `order` allows now."""
        message = self._party.receive(self._collector, *order.allowed)
        order.take(message)
        # masks depend on all that the collector has sent
        self.member.received.update(message)
        return message

    def give(self, values: Integers) -> None:
        """Contribute an int64 vector to the next sum; RoundVoid, CryptoError or PeerError if it fails."""
        party, collector, member = self._party, self._collector, self.member
        if not member.rules.recover:
            self._noted(values)
            party.send(collector, MaskedInput(Array.of(member.masked(values))))
            return
        for attempt in range(ATTEMPTS):
            mine = member.participant(len(values), attempt)
            self._noted(values)
            contribution = _SignedContribution(member, mine, values, collector)
            void = contribute(party, collector, mine, contribution, SurvivorSignatures, SumVoid)
            if void is None and isinstance(party.receive(collector, OpenedSum, SumVoid), OpenedSum):
                return
        raise RoundVoid(f"{member.name} took part in {ATTEMPTS} attempts at a sum, and all were void")


class Collector(SumAggregator):
    """Opens sums over the members, the collector among them if it is one; `first_message` is `TranscriptDigest`'s.

    `members` are those still present; `summed` those whose vectors are in the sum opened last, as members know. Members
    learn of a later loss with the next sum.
    """

    def __init__(
        self, party: Party, members: Sequence[str], vouching: Signer, first_message: bytes, rules: SumRules
    ) -> None:
        self.members, self.summed = list(members), list(members)
        self._party, self._recover = party, rules.recover
        self._patience = PATIENCE * party.timeout
        self._number = 0
        # threads pay only where a channel waits for the network
        waits = len(members) > 2 and party.channel.waits
        self._senders = ThreadPoolExecutor(len(members), thread_name_prefix="treaty-send") if waits else None
        self._sent = TranscriptDigest(first_message)
        self._own = SumMember(party, vouching, self._sent, rules) if party.name in members else None
        own, others = self._own, self._others()
        introduced = {name: party.receive(name, MemberKey) for name in others}
        if own is not None:
            introduced[party.name] = own.key
        # a fresh nonce: what was signed in another run fits no roster of this one
        roster = Roster(secrets.token_bytes(NONCE_BYTES), {name: one.key for name, one in introduced.items()})
        self.send(dict.fromkeys(others, roster))
        self._first = rules.first_round(party, roster)
        pairs = {name: party.receive(name, MaskKeyPair) for name in others}
        if own is not None:
            pairs[party.name] = own.advertise(roster, party.name)
        everyone = MaskKeyPairs(pairs)
        self.send(dict.fromkeys(others, everyone))
        if own is not None:
            own.agree(everyone)
        self._advertised = everyone.advertisements()

    def total(self, length: int, own: Integers | None = None) -> Integers:
        """Open the sum of the members' next vectors modulo 2^64, int64 (length,); with `recover`, of those in `summed`.

        `own` is the collector's own vector, if it is a member. With `recover` raises RoundVoid if too few members are
        left or repeating does not help; otherwise PeerLost or PeerTimeout if a member is lost.
        """
        self._number += 1
        if self._recover:
            return self._recovered(length, own)
        this_round, inputs = self._first.another(self._number, length, self._sent.digest.hex(), 0), {}
        if self._own is not None and own is not None:
            # the collector masks its own vector as well, so that pairwise masks cancel
            inputs[self._own.name] = self._own.masked(own)
        for name in self._others():
            message = self._party.receive(name, MaskedInput)
            inputs[name] = view(message.values, np.uint64, (length,), peer=name, what="MaskedInput.values")
        return open_pairwise(this_round, inputs)

    def _recovered(self, length: int, own: Integers | None) -> Integers:
        """Open the sum over the members that complete all steps, in up to `ATTEMPTS` attempts."""
        for attempt in range(ATTEMPTS):
            this_round, mine = self._first.another(self._number, length, self._sent.digest.hex(), attempt), None
            if self._own is not None and own is not None:
                mine = OwnInput(self._party.name, self._own.participant(length, attempt), own)
            # keys last the job: with "reveal" survivors give away masks of this attempt alone, never a key
            aggregator = Aggregator(this_round, self._advertised)
            try:
                sealed, passed = self.pass_shares(aggregator, self._advertised, mine)
                total, self.summed = self.open_sum(this_round, aggregator, sealed, mine, passed.get(self._party.name))
            except RoundVoid as void:
                logger.warning("%s: %s", self._party.name, void)
                if attempt + 1 == ATTEMPTS or len(self.members) < this_round.least:
                    raise
                self.send(dict.fromkeys(self._others(), SumVoid()))
            else:
                self.send(dict.fromkeys(self._others(), OpenedSum()))
                return total
        raise AssertionError("the last attempt returns or raises")

    def _choose(self, this_round: Round, aggregator: Aggregator, came: Mapping[str, NDArray[np.uint64]]) -> None:
        """Leave all vectors in: members agreed to sums of cohorts that differ by one."""

    def _pass_proofs(
        self, this_round: Round, aggregator: Aggregator, survivors: Sequence[str], own: OwnInput | None
    ) -> Unmasking | None:
        signatures = {name: message.signature for name, message in self._gather(SurvivorSignature).items()}
        if own is not None:
            signatures[own.name] = own.participant.sign_survivors(survivors)
        valid = aggregator.pass_signatures(signatures)
        self.send(dict.fromkeys(self._others(), SurvivorSignatures(valid)))
        return None if own is None else own.participant.unmask(valid)

    def broadcast(self, message: Message) -> None:
        """Send a message to all other members; masks depend on it from now on."""
        self._sent.update(message)
        self.send(dict.fromkeys(self._others(), message))

    def receive_all(self, kind: type[M]) -> dict[str, M]:
        """Receive a message from all other members; with `recover`, from those still present."""
        if self._recover:
            return self._gather(kind)
        return {name: self._party.receive(name, kind) for name in self._others()}

    def _gather(self, kind: type[M]) -> dict[str, M]:
        """Receive from all members still present; leave out those that are lost, silent or stop."""
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
        """Send to members; with `recover`, leave out those that nothing reaches."""
        if self._recover:
            reached = self._party.send_each(messages, self._patience)
            for name in messages:
                if name not in reached:
                    self._leave_out(name)
        elif self._senders is None:
            for name, message in messages.items():
                self._party.send(name, message)
        else:
            # threads are kept: every level of a tree has a message to all
            list(self._senders.map(self._party.send, messages, messages.values()))

    def _expel(self, error: PeerProtocolError) -> None:
        logger.warning("%s: %s", self._party.name, error)
        self._leave_out(error.peer)

    def _leave_out(self, name: str) -> None:
        logger.warning("%s continues without %s", self._party.name, name)
        self._party.leave_out(name)
        self.members.remove(name)

    def _others(self) -> list[str]:
        return [name for name in self.members if name != self._party.name]
