"""Sums of `secfind` under noise: noise of every user that survives lost ones, any cohort, and users who come late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treaty.crypto.sharing.secure_aggregation import Round
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.privacy.discrete_gaussian import discrete_gaussian
from treaty.privacy.surplus_noise import MOST_PARTS, draw_noise, removable_noise
from treaty.systems.fedxgb.cohorts import LEAST
from treaty.systems.fedxgb.domain import Credentials, Deviations
from treaty.systems.fedxgb.messages import Call, CertifiedKeys
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, UserSums
from treaty.systems.horizontal.members import TranscriptDigest
from treaty.systems.horizontal.noisy_rounds import RandomStep

# Users of a domain who may tell the server their noise
MAY_HELP = LEAST - 2


class NoisyDomainSums(DomainSums):
    """An edge server's part; `deviations` returns those of the noise on the domain's next sum, float64 (length,)."""

    surplus_parts = MOST_PARTS
    deviations: Deviations

    def _attempt(self, this_round: Round, call: Call) -> tuple[Integers, list[str]]:
        setup = self._begin(this_round, call)
        opened, users = self.open_sum(this_round, setup.aggregator, setup.sealed)
        sigma, removed = self.deviations(this_round.length), this_round.removed(len(users))
        for secret in setup.aggregator.surplus.values():
            opened -= removable_noise(sigma, this_round.counts, MAY_HELP, removed, secret)
        return opened, users

    def _nothing(self, length: int) -> Integers:
        # other domains' noise is not enough for all
        return discrete_gaussian(self.deviations(length))


class NoisyUserSums(UserSums):
    """A user's part, with the same `deviations`."""

    surplus_parts = MOST_PARTS
    deviations: Deviations

    def permit(self, survivors: Sequence[str]) -> None:
        """Agree to any cohort: noise protects each user, or each row."""

    def _outgoing(self, values: Integers, this_round: Round) -> tuple[Integers, list[bytes]]:
        # anew for each attempt: two sums under the same noise would show their difference
        noise, secret = draw_noise(self.deviations(len(values)), this_round.counts, MAY_HELP)
        return values + noise, secret


class NoisyCrowd(Crowd):
    """All users, also those who come late; `homes` has the edge server of each user of the job."""

    def __init__(self, homes: Mapping[str, str], party: Party, credentials: Credentials, *given: Any) -> None:
        super().__init__(party, credentials, *given)
        self._homes, self._credentials = homes, credentials

    def broadcast(self, message: Message) -> None:
        if isinstance(message, RandomStep):
            # as `begin_tree`, for trees that are drawn
            self._party.round += 1
            self._transcript = TranscriptDigest(self._at_start)
        super().broadcast(message)

    def _let_in(self, edge: str, joined: Mapping[str, CertifiedKeys]) -> None:
        for name, keys in joined.items():
            if self._homes.get(name) != edge or name in self._seeds:
                raise PeerProtocolError(edge, f"expected users of {edge} who came late", at="SurvivorReport")
            self._credentials.check(name, "user", keys, edge)
            self._seeds[name] = self._credentials.seed_with(name, keys)
            self._domains[edge].add(name)
