"""A user's end of the sums of its domain: double masking with keys made anew for every sum, and a mask for the server.

====================  ====================  ================================================  =======================
message               from -> to            content                                           protection
====================  ====================  ================================================  =======================
`Domain`              edge -> users         certified keys of all users of the domain         both signatures
`RoundStart`,         both ways             a tree begins; the user is there: see `messages`  TLS
`Attendance`
`Cohort`              edge -> chosen        who takes part, in the tree or in the rest of it  masks depend on it
`Call`                edge -> cohort        the next sum, or another attempt at it            TLS
`MaskKey`,            user -> edge -> all   X25519 key of this sum, a tag for each peer       tags under the channels
`MaskKeys`
`SealedShares` ...    user -> edge -> user  see `horizontal.masked_sums`: shares of this      see there
`MaskShares`                                sum's mask key and self-mask; the vector, under
                                            the server's mask too; what removes masks, of
                                            lost users shares of their mask keys
`Agreement`,          user -> edge -> all   tags on the list of survivors, for each peer      tags under the channels
`Agreements`
`AbsenceNotice`              user -> edge          it takes no further part in this tree             TLS
====================  ====================  ================================================  =======================

The edge server learns who takes part. The sum it opens lies under one mask per user that the server alone can remove;
the server sees sums over all domains. A user shares masks only with users whose keys the authority certified, and
agrees to no list which, together with those that it agreed to before, would isolate one user or two of its domain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import UsedNonces, add_masks, mask_key, mask_nonce
from treaty.crypto.sharing.key_agreement import RoundKeys
from treaty.crypto.sharing.secure_aggregation import Participant, Round, RoundVoid, Unmasking
from treaty.errors import PeerProtocolError
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import M, Message
from treaty.messaging.party import Party
from treaty.systems.fedxgb.authority import CertifiedKeys, Credentials
from treaty.systems.fedxgb.cohorts import Opened
from treaty.systems.fedxgb.options import Leaves, Stage
from treaty.systems.horizontal.masked_sums import contribute
from treaty.systems.horizontal.members import Collector, SumRules, ToldDigest
from treaty.systems.system import Signer

ATTEMPTS = 6
"""At one sum: each may lose users that were there in the one before, and go on with fewer."""


class Domain(Message):
    """Certified keys of all users of a domain."""

    leakage: ClassVar = MessageLeakage("who the users of its domain are, and their keys", "control")

    users: dict[str, CertifiedKeys]
    least_change: Annotated[int, msgspec.Meta(ge=3)]


class Cohort(Message):
    """Who takes part in a tree, or in the rest of it where too few of those told before are left."""

    leakage: ClassVar = MessageLeakage("who of its domain takes part", "control")

    users: list[str]


class Call(Message):
    """Contribute the vector that comes next; `number` is the sum's, higher than any before."""

    leakage: ClassVar = MessageLeakage("that its next vector is wanted", "control")

    number: Annotated[int, msgspec.Meta(ge=0)]
    attempt: Annotated[int, msgspec.Meta(ge=0)]


class AbsenceNotice(Message):
    """The sender takes no further part in this tree."""

    leakage: ClassVar = MessageLeakage("that the user takes no further part in this tree", "control")


class MaskKey(Message):
    """A user's mask key of one sum, and its tags by peer."""

    leakage: ClassVar = MessageLeakage("a public key of this sum", "control")

    public: bytes
    tags: dict[str, bytes]


class MaskKeys(Message):
    """All mask keys of one sum, and the tags made for the receiver."""

    leakage: ClassVar = MessageLeakage("everybody's public keys of this sum", "control")

    public: dict[str, bytes]
    tags: dict[str, bytes]


class Agreement(Message):
    """A user's tags on the list of survivors, by peer."""

    leakage: ClassVar = MessageLeakage("tags on the list of those in the sum", "control")

    tags: dict[str, bytes]


class Agreements(Message):
    """Tags on the list of survivors made for the receiver, by those on it."""

    leakage: ClassVar = MessageLeakage("others' tags on that list", "control")

    tags: dict[str, bytes]


def server_mask(party: Party, number: int, attempt: int, heard: bytes) -> bytes:
    """Return the nonce of the mask that a user and the server share for one attempt at a sum."""
    return mask_nonce(party.job, party.protocol, number, attempt, f"server {heard.hex()}")


def sum_round(party: Party, call: Call, roster: Mapping[str, bytes], length: int, told: ToldDigest) -> Round:
    """Return the round of secure aggregation that edge server and users of `roster` agree on for a call."""
    return Round(
        job_id=party.job, protocol=party.protocol, round_id=call.number,
        roster=roster, length=length, vector_id=told.digest.hex(),
    ).repeated(call.attempt)  # fmt: skip


class UserSums:
    """A user's part in its domain's sums; `server_seed` is shared with the server, `leaves` says when to drop out.

    `heard` digests what the server told everybody, on which masks depend. `awake` is False once the user has dropped
    out of a tree, to be set when the next one begins.
    """

    def __init__(
        self, party: Party, edge: str, credentials: Credentials, server_seed: bytes, leaves: Leaves | None = None
    ) -> None:
        self.heard = ToldDigest(b"")
        self.awake = True
        self._party, self._edge, self._credentials, self._leaves = party, edge, credentials, leaves
        self._server_seed, self._used = server_seed, UsedNonces()
        self._keys: dict[str, bytes] = {}
        self._channels: dict[str, bytes] = {}
        self._agreed_to = Opened()
        self._cohort: list[str] = []

    def meet(self, domain: Domain) -> None:
        """Check the keys of the domain's users; PeerProtocolError when one is not certified, or its own is missing."""
        me = self._party.name
        if me not in domain.users or domain.users[me].key != self._credentials.certified.key:
            raise PeerProtocolError(self._edge, f"expected the keys that {me} sent among the users' - at Domain")
        for name, offered in domain.users.items():
            if name != me:
                self._credentials.check(name, "user", offered, self._edge)
                self._channels[name] = self._credentials.seed_with(name, offered)
            self._keys[name] = offered.key
        self._agreed_to = Opened(domain.least_change)

    def join(self, cohort: Cohort) -> None:
        """Join the cohort of a tree; PeerProtocolError unless it has users of the domain alone, this user included."""
        if self._party.name not in cohort.users or not self._keys.keys() >= set(cohort.users):
            raise PeerProtocolError(
                self._edge, f"expected users of the domain, {self._party.name} among them - at Cohort from {self._edge}"
            )
        self._cohort = sorted(set(cohort.users))

    def absent(self, stage: Stage) -> bool:
        """Drop out if `leaves` says so at this stage; return whether this user has dropped out."""
        if self.awake and self._leaves is not None and self._leaves(max(0, self._party.round - 1), stage):
            self.withdraw()
        return not self.awake

    def withdraw(self) -> None:
        """Take no further part in this tree."""
        self._party.send(self._edge, AbsenceNotice())
        self.awake = False

    def give(self, call: Call, values: NDArray[np.int64], *others: type[M]) -> M | None:
        """Contribute an int64 vector to a sum.

        `others` are messages that the edge server may send in place of the sum's next step, where it goes on without
        this user or begins anew. Returns the one that came, if any.

        Raises CryptoError, PeerError when keys, shares or tags are not what the protocol allows.
        """
        party, edge = self._party, self._edge
        if self.absent("setup"):
            return None
        this_round = self._round(call, len(values))
        keys = self._round_keys(this_round)
        party.send(edge, MaskKey(keys.public, keys.tags()))
        said: Message = party.receive(edge, MaskKeys, *others, follow=True)
        if not isinstance(said, MaskKeys):
            return said  # type: ignore[return-value]
        mine = Participant(this_round, keys.agree(said.public, said.tags), self._credentials.signing_key)
        contribution = _TaggedContribution(self, call, keys, mine, values)
        return contribute(party, edge, mine, contribution, Agreements, *others, absent=self.absent, follow=True)

    def hide(self, call: Call, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put the server's mask of this attempt on a vector; CryptoError when it was made before."""
        nonce = server_mask(self._party, call.number, call.attempt, self.heard.digest)
        self._used.use(nonce)
        hidden = values.astype(np.uint64)
        add_masks(hidden, [mask_key(self._server_seed, nonce)], [])
        return hidden.view(np.int64)

    def permit(self, survivors: Sequence[str]) -> None:
        """Record whose sum is opened; PeerProtocolError if this sum and earlier ones would isolate a few users."""
        if not self._agreed_to.permits(survivors):
            raise PeerProtocolError(
                self._edge,
                "expected a cohort that differs by three users or more from earlier ones, or equals one, and all of "
                "which together isolate nobody - at Survivors",
            )
        self._agreed_to.add(survivors)

    def _round(self, call: Call, length: int) -> Round:
        return sum_round(self._party, call, {name: self._keys[name] for name in self._cohort}, length, self.heard)

    def _round_keys(self, this_round: Round) -> RoundKeys:
        me = self._party.name
        peers = {name: self._channels[name] for name in self._cohort if name != me}
        return RoundKeys(self._party.job, me, this_round.key_scope, peers)


@dataclass(slots=True)
class _TaggedContribution:
    """A user's vector of one attempt, under the server's mask, and its tags on the survivors."""

    sums: UserSums
    call: Call
    keys: RoundKeys
    mine: Participant
    values: NDArray[np.int64]
    agreed: bytes = b""

    def vector(self, sharers: Collection[str]) -> NDArray[np.int64]:
        return self.sums.hide(self.call, self.values)

    def prove(self, survivors: Sequence[str]) -> Message:
        self.agreed = self.mine.take_survivors(survivors)
        self.sums.permit(survivors)
        return Agreement(self.keys.vouch(self.agreed))

    def unmask(self, proofs: Agreements) -> Unmasking:
        return self.mine.unmask_for(self.keys.vouched(self.agreed, proofs.tags))


# -------------- the server's end of sums: what it tells everybody, and totals over all domains, which nobody else sees


class Users(Message):
    """An edge server's users and their certified keys."""

    leakage: ClassVar = MessageLeakage("who the users of a domain are, and their keys", "control")

    of: dict[str, CertifiedKeys]


class Sum(Message):
    """Open the next sum of the domain's vectors, of `length` numbers, and add it to the other domains'."""

    leakage: ClassVar = MessageLeakage("that a sum of so many numbers is opened next", "control")

    number: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 27)]


class SurvivorReport(Message):
    """Whose vectors are in the domain's sum, none where it could not be opened, and the attempt that opened it."""

    leakage: ClassVar = MessageLeakage("whose vectors are in the domain's sum", "control", guard="group_size")

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
