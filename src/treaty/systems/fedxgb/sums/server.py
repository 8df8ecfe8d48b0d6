"""The server's end of sums: what it tells everybody, and totals over all domains, which nobody else sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.masks import add_masks, mask_key
from treaty.crypto.aggregation.round import RoundVoid
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.systems.fedxgb.authority import CertifiedKeys, Credentials
from treaty.systems.fedxgb.sums.user import server_mask
from treaty.systems.horizontal.members import SumRules, ToldDigest
from treaty.systems.horizontal.sums import Collector
from treaty.systems.system import Signer


class Users(Message):
    """An edge server's users and their certified keys."""

    of: dict[str, CertifiedKeys]


class Sum(Message):
    """Open the next sum of the domain's vectors, of `length` numbers, and add it to the other domains'."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 27)]


class SurvivorReport(Message):
    """Whose vectors are in the domain's sum, none where it could not be opened, and the attempt that opened it."""

    users: list[str]
    attempt: Annotated[int, msgspec.Meta(ge=0)]


class Crowd:
    """All users, as the server reaches them through their edge servers.

    `users` are their checked keys, by edge server and name; `vouching` is for masks among edge servers; `begun` is what
    everybody was told first; `masked` whether domains' sums lie under masks shared with their users (not in paper
    mode). `cohort` has the users whose vectors are in the last total.
    """

    def __init__(
        self,
        party: Party,
        edges: Sequence[str],
        credentials: Credentials,
        users: Mapping[str, Mapping[str, CertifiedKeys]],
        vouching: Signer,
        begun: Message,
        *,
        masked: bool = True,
    ) -> None:
        self.cohort: list[str] = []
        self._party, self._edges = party, list(edges)
        self._domains = {edge: frozenset(of) for edge, of in users.items()}
        self._seeds = {
            name: credentials.seed_with(name, offered) for of in users.values() for name, offered in of.items()
        }
        self._collector = Collector(party, edges, vouching, b"fedxgb edges", SumRules(allow_two=True))
        self._number, self._masked = 0, masked
        self._heard = ToldDigest(b"")
        self._heard.hear(begun)
        self._at_start = self._heard.digest

    def tell(self, message: Message) -> None:
        """Tell everybody; masks depend on it from now on."""
        self._heard.hear(message)
        self._collector.tell_all(message)

    def settle(self) -> None:
        """Take what was told so far as known to everybody, also to users who miss a tree."""
        self._at_start = self._heard.digest

    def begin_tree(self, message: Message) -> None:
        """Tell everybody that a tree begins; masks no longer depend on what was told in the last one."""
        self._party.round += 1
        self._heard = ToldDigest(self._at_start)
        self.tell(message)

    def total(self, length: int) -> NDArray[np.int64]:
        """Open the sum of the next vectors of all who are there, int64 (length,).

        Raises
        ------
        RoundVoid
            When nobody is left.
        PeerProtocolError
            When an edge server names users that are not its own.
        """
        self._number += 1
        for edge in self._edges:
            self._party.send(edge, Sum(self._number, length))
        total = self._collector.total(length).view(np.uint64)
        self.cohort = []
        for edge in self._edges:
            survived = self._party.receive(edge, SurvivorReport)
            if not self._domains[edge] >= set(survived.users) or len(set(survived.users)) < len(survived.users):
                raise PeerProtocolError(
                    edge, f"expected users of the domain, got others - at SurvivorReport from {edge}"
                )
            nonce = server_mask(self._party, self._number, survived.attempt, self._heard.digest)
            keys = [mask_key(self._seeds[name], nonce) for name in survived.users if self._masked]
            add_masks(total, [], keys)
            self.cohort += survived.users
        if not self.cohort:
            raise RoundVoid(
                "no domain has enough users left to open a sum: one of its groups, of three users or a few more, must "
                "be there"
            )
        return total.view(np.int64)
