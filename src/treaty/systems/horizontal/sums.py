"""Opening sums of members' masked vectors; see `masked_members` for the messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import Advertisement
from treaty.crypto.aggregation.participant import Participant
from treaty.crypto.aggregation.round import Round, RoundVoid, Unmasking, open_pairwise
from treaty.crypto.aggregation.secure_aggregation import Aggregator
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import M, Message, view
from treaty.messaging.party import Party
from treaty.systems.horizontal.members import (
    ATTEMPTS,
    Advertised,
    Again,
    Cohort,
    Heard,
    Introduced,
    Keys,
    Masked,
    Member,
    Opened,
    Passed,
    Roster,
    Shares,
    Signatures,
    Signed,
    Survivors,
    Unmasked,
    Vouching,
)

logger = logging.getLogger(__name__)

PATIENCE = 0.25  # of the job's timeout, with a member that is silent: the others wait for the collector meanwhile


class Collector:
    """Opens sums over the members.

    Parameters
    ----------
    party : Party
    members : sequence of str
        All of them, the collector among them if it is one.
    vouching : Vouching
    begun : bytes
        What the run began with, see `Heard`.
    recover, allow_two
        See `Cohort`.

    Attributes
    ----------
    members : list of str
        Those still there.
    summed : list of str
        Those whose vectors are in the sum opened last. Members were told so: one that is lost since they will hear of
        with the next sum.
    """

    def __init__(
        self,
        party: Party,
        members: Sequence[str],
        vouching: Vouching,
        begun: bytes,
        *,
        recover: bool = False,
        allow_two: bool = False,
    ) -> None:
        self.members, self.summed = list(members), list(members)
        self._party, self._recover = party, recover
        self._patience = PATIENCE * party.timeout
        self._number = 0
        waits = len(members) > 2 and party.channel.waits
        self._senders = ThreadPoolExecutor(len(members), thread_name_prefix="treaty-send") if waits else None
        self._heard = Heard(begun)
        own = self._own = Member(party.name, party.job, vouching, self._heard) if party.name in members else None
        others = [name for name in members if name != party.name]
        introduced = {name: party.receive(name, Introduced) for name in others}
        if own is not None:
            introduced[party.name] = own.introduced
        roster = Roster(
            {k: one.key for k, one in introduced.items()}, {k: one.vouched for k, one in introduced.items()}
        )
        self._send(dict.fromkeys(others, roster))
        self._cohort = Cohort(party.job, party.protocol, roster.keys, recover, allow_two)
        advertised = {name: party.receive(name, Advertised) for name in others}
        if own is not None:
            advertised[party.name] = own.advertise(roster, recover, allow_two, party.name, party.protocol)
        self._send(dict.fromkeys(others, Keys(advertised)))
        if own is not None:
            own.agree(Keys(advertised))
        self._advertised = {name: Advertisement(of.channel, of.mask, of.signature) for name, of in advertised.items()}

    def total(self, length: int, own: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Open the sum of the members' next vectors, modulo 2^64.

        Parameters
        ----------
        length : int
        own : int64 (length,) or None
            The collector's own vector, if it is a member.

        Returns
        -------
        int64 (length,)
            With `recover` over the members in `summed`.

        Raises
        ------
        RoundVoid
            With `recover`, when too few members are left or repeating does not help.
        PeerLost, PeerTimeout
            Without, when a member is lost.
        """
        self._number += 1
        if self._recover:
            return self._recovered(length, own)
        this_round = self._cohort.round(self._number, length, self._heard)
        inputs = {}
        if self._own is not None and own is not None:
            inputs[self._own.name] = self._own.masked(own)
        for name in self._others():
            message = self._party.receive(name, Masked)
            inputs[name] = view(message.values, np.uint64, (length,), peer=name, what="Masked.values")
        return open_pairwise(this_round, inputs)

    def _recovered(self, length: int, own: NDArray[np.int64] | None) -> NDArray[np.int64]:
        for attempt in range(ATTEMPTS):
            this_round = self._cohort.round(self._number, length, self._heard, attempt)
            mine = None if self._own is None else self._own.participant(length, attempt)
            try:
                total = self._attempt(this_round, mine, own)
            except RoundVoid as void:
                logger.warning("%s: %s", self._party.name, void)
                if attempt + 1 == ATTEMPTS or len(self.members) < this_round.least:
                    raise
                self._send_all(Again())
            else:
                self._send_all(Opened())
                return total
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, this_round: Round, mine: Participant | None, own: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Try to open the sum over whoever gets through all steps."""
        me, aggregator = self._party.name, Aggregator(this_round, self._advertised)
        sealed = {name: message.sealed for name, message in self._gather(Shares).items()}
        if mine is not None:
            sealed[me] = mine.share()
        passed = aggregator.pass_shares(sealed)
        self._send({name: Passed(passed[name]) for name in self._others()})
        for name, message in self._gather(Masked).items():
            try:
                vector = view(message.values, np.uint64, (this_round.length,), peer=name, what="Masked.values")
            except PeerProtocolError as error:
                logger.warning("%s: %s", me, error)
                self._leave_out(name)
            else:
                aggregator.add_input(name, vector)
        if mine is not None and own is not None:
            aggregator.add_input(me, mine.masked_input(own, passed[me]))
        survivors = aggregator.survivors()
        self._send_all(Survivors(survivors))
        signatures = {name: message.signature for name, message in self._gather(Signed).items()}
        if mine is not None:
            signatures[me] = mine.sign_survivors(survivors)
        valid = aggregator.pass_signatures(signatures)
        self._send_all(Signatures(valid))
        answers = {name: Unmasking(told.survivors, told.lost) for name, told in self._gather(Unmasked).items()}
        if mine is not None:
            answers[me] = mine.unmask(valid)
        total = aggregator.open(answers)
        self.summed = list(survivors)
        return total

    def tell_all(self, message: Message) -> None:
        """Send a message to all other members; masks depend on it from now on."""
        self._heard.hear(message)
        self._send_all(message)

    def _send_all(self, message: Message) -> None:
        self._send(dict.fromkeys(self._others(), message))

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
        except PeerProtocolError as error:  # one that sends what no member does is as good as lost
            logger.warning("%s: %s", self._party.name, error)
            self._leave_out(error.peer)
            return self._gather(kind)
        for name in others:
            if name not in came:
                self._leave_out(name)
        return came

    def _send(self, messages: Mapping[str, Message]) -> None:
        if not self._recover:
            if self._senders is None:
                for name, message in messages.items():
                    self._party.send(name, message)
            else:  # threads that stay: there is a message to all for every level
                list(self._senders.map(self._party.send, messages, messages.values()))
            return
        reached = self._party.send_each(messages, self._patience)
        for name in messages:
            if name not in reached:
                self._leave_out(name)

    def _leave_out(self, name: str) -> None:
        logger.warning("%s goes on without %s", self._party.name, name)
        self._party.leave_out(name)
        self.members.remove(name)

    def _others(self) -> list[str]:
        return [name for name in self.members if name != self._party.name]
