"""Opening sums of members' masked vectors; see `members` and `masked_sums` for the messages."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.round import Round, RoundVoid, Unmasking, open_pairwise
from treaty.crypto.aggregation.secure_aggregation import Aggregator
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.messages import M, Message, view
from treaty.messaging.party import Party
from treaty.systems.horizontal.masked_sums import ATTEMPTS, MaskedInput, OwnInput, SumAggregator
from treaty.systems.horizontal.members import (
    NONCE_BYTES,
    MaskKeyPair,
    MaskKeyPairs,
    Member,
    MemberKey,
    OpenedSum,
    Roster,
    SumRules,
    SumVoid,
    SurvivorSignature,
    SurvivorSignatures,
    ToldDigest,
)
from treaty.systems.system import Signer

logger = logging.getLogger(__name__)

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
