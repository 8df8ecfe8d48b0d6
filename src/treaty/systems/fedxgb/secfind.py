"""SecFind: one sum over the users of all domains, and the splits that the server finds on it.

Liu et al., "Boosting Privately", ICDCS 2020. Here all nodes, candidates and classes of a level are one vector, and all
masks are made for this sum alone. The steps, where e is an edge server with its domain of users u, v, and S the server:

1. S -> e -> u: the next sum is wanted; e calls the cohort that it has chosen.
2. u -> e -> v: X25519 mask keys of this sum, with a tag for each peer under the channel that both share.
3. u -> e -> v: shares of the mask key and of the seed of the own mask, sealed for v.
4. u -> e: the vector under the own mask, a mask with each peer, and one with S, so that e cannot read the sum.
5. e -> u -> e -> v: the users whose vectors came, and tags that prove to each peer which list a user received. No user
   agrees to a list which, together with earlier ones, would isolate one user or two of its domain (`cohorts`).
6. u -> e: of each survivor a share of its seed, of each lost user a share of its mask key; never both for one user.
7. e -> S: the sum of the domain, under masks among edge servers, and whose vectors are in it.
8. S: adds the domains up, which cancels these masks, and removes the masks that it shares with the users.
9. S: sums of all bins by slot, prefix sums, gains, the best split of each slot.

A user shares masks only with users whose keys the authority certified.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import UsedNonces, add_masks, mask_key
from treaty.crypto.sharing.aggregator import Aggregator
from treaty.crypto.sharing.key_agreement import RoundKeys, is_mask_key, unsigned
from treaty.crypto.sharing.secure_aggregation import Participant, Round, RoundVoid, Unmasking, enough
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.certificates import Signer
from treaty.messaging.messages import Array, M, Message
from treaty.messaging.party import Party
from treaty.systems.fedxgb.cohorts import LEAST
from treaty.systems.fedxgb.domain import MOST_PATIENCE, Credentials, DomainCohort, UserCohort, server_mask, sum_round
from treaty.systems.fedxgb.messages import (
    Agreement,
    Agreements,
    Call,
    CertifiedKeys,
    MaskKey,
    MaskKeys,
    RoundStart,
    Sum,
    SurvivorReport,
)
from treaty.systems.fedxgb.roles import Leaves
from treaty.systems.horizontal.masked_sums import MaskedInput, OwnInput, contribute
from treaty.systems.horizontal.members import Collector, Membership, SumRules, TranscriptDigest
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.trees.slots import SlotSplits, SlotTree

logger = logging.getLogger(__name__)

# At one sum: each may lose users that were there in the one before, and continue with fewer
ATTEMPTS = 6


# ---------------------------------------------------------------- edge server


@dataclass(frozen=True, slots=True)
class SumSetup:
    """What an edge server has once shares are passed on: mask keys by user, sealed shares by sender and receiver."""

    round: Round
    keys: dict[str, bytes]
    sealed: dict[str, dict[str, bytes]]
    aggregator: Aggregator


class DomainSums(DomainCohort):
    """An edge server's part: sums over its domain, which look uniformly random to it, as S has a mask on each."""

    surplus_parts = 0

    def total(self, number: int, length: int) -> tuple[Integers, list[str], int]:
        """Open sum `number` of the cohort's next vectors, of `length` numbers.

        Returns the sum int64 (length,), zeros if none could be opened; whose vectors are in it, sorted; and the attempt
        at which it was opened.
        """
        why = ""
        self._until = time.monotonic() + MOST_PATIENCE * self._patience
        for attempt in range(ATTEMPTS):
            try:
                call = Call(number, attempt)
                this_round = self._round(call, length)
                if len(self._running) < this_round.least:  # a smaller cohort can
                    self._form(self._cohorts.keep(self._running) or ())
                    this_round = self._round(call, length)
                opened, users = self._attempt(this_round, call)
            except CryptoError as void:
                why = str(void)
                logger.info("%s: sum %d, attempt %d: %s", self._party.name, number, attempt, why)
                if time.monotonic() > self._until:
                    break
                continue
            self._counted(users)
            self._idle = False
            return opened, users, attempt
        self._skip_rest_of_tree(why)
        self._running = []
        self._counted([])
        return self._nothing(length), [], 0

    def _nothing(self, length: int) -> Integers:
        return np.zeros(length, np.int64)

    def _round(self, call: Call, length: int) -> Round:
        if len(self._cohort) < LEAST:
            raise RoundVoid(f"the round is void: expected {LEAST} users or more, got {len(self._cohort)}")
        roster = {name: self._users[name].key for name in self._cohort}
        return sum_round(self._party, call, roster, length, self.transcript, self.surplus_parts)

    def _begin(self, this_round: Round, call: Call) -> SumSetup:
        # [SecFind, step 1] e -> u: the next sum is wanted
        self.send(dict.fromkeys(self._running, call))
        # [SecFind, step 2] u -> e -> v: mask keys of this sum, with a tag for each peer
        made = self._checked(self._gather(MaskKey), lambda m, _: is_mask_key(m.public), "a mask key")
        keys = {name: message.public for name, message in made.items()}
        aggregator = Aggregator(this_round, unsigned(keys), signed=False)
        self.send({
            name: MaskKeys(keys, {u: m.tags.get(name, b"") for u, m in made.items() if u != name}) for name in made
        })  # fmt: skip
        # [SecFind, step 3] u -> e -> v: sealed shares of the mask key and of the own mask's seed
        sealed, _ = self.pass_shares(aggregator, keys)
        return SumSetup(this_round, keys, sealed, aggregator)

    def _attempt(self, this_round: Round, call: Call) -> tuple[Integers, list[str]]:
        # open the sum of the running cohort's vectors, once; return also whose they are
        setup = self._begin(this_round, call)
        # [SecFind, steps 4-6] masked vectors; survivors, whose proofs `_pass_proofs` passes on; what removes the masks
        return self.open_sum(this_round, setup.aggregator, setup.sealed)

    def _pass_proofs(
        self, this_round: Round, aggregator: Aggregator, survivors: Sequence[str], own: OwnInput | None
    ) -> None:
        agreed = {name: message.tags for name, message in self._gather(Agreement).items()}
        enough(len(agreed), this_round.threshold, "users who agree")
        self.send({to: Agreements({u: tags[to] for u, tags in agreed.items() if to in tags}) for to in agreed})


def give_domain_sum(party: Party, server: str, domain: DomainSums, wanted: Sum, edges: Membership | None) -> Integers:
    """Open the domain's next sum, send it to the server and return it.

    Masks among the `edges` cancel over all domains; None in paper mode, which has none.
    """
    # uniform to the edge server: every vector in it has the server's mask
    opened, survivors, attempt = domain.total(wanted.number, wanted.length)
    # [SecFind, step 7] e -> S: the domain's sum, under masks among edge servers, and whose vectors are in it
    if edges is None:
        party.send(server, MaskedInput(Array.of(opened.view(np.uint64))))
    else:
        edges.give(opened)
    party.send(server, SurvivorReport(survivors, attempt, domain.joined()))
    return opened


# ---------------------------------------------------------------- user


class UserSums(UserCohort):
    """A user's part in its domain's sums; `server_seed` is shared with the server."""

    surplus_parts = 0

    def __init__(
        self, party: Party, edge: str, credentials: Credentials, server_seed: bytes, leaves: Leaves | None = None
    ) -> None:
        super().__init__(party, edge, credentials, leaves)
        self._server_seed, self._used = server_seed, UsedNonces()

    def give(self, call: Call, values: Integers, *others: type[M]) -> M | None:
        """Contribute an int64 vector to a sum.

        `others` are messages that the edge server may send in place of the sum's next step, if it continues without
        this user or begins again. Returns the one that came, if any.

        Raises CryptoError, PeerError if keys, shares or tags are not what the protocol allows.
        """
        party, edge = self._party, self._edge
        if self.absent("setup"):
            return None
        this_round = self._round(call, len(values))
        keys = self._round_keys(this_round)
        party.send(edge, MaskKey(keys.public, keys.tags()))
        passed: Message = party.receive(edge, MaskKeys, *others, follow=True)
        if not isinstance(passed, MaskKeys):
            return passed  # type: ignore[return-value]
        values, secret = self._outgoing(values, this_round)
        mine = Participant(this_round, keys.agree(passed.public, passed.tags), self._credentials.signing_key, secret)
        contribution = _TaggedContribution(self, call, keys, mine, values)
        return contribute(party, edge, mine, contribution, Agreements, *others, absent=self.absent, follow=True)

    def _outgoing(self, values: Integers, this_round: Round) -> tuple[Integers, list[bytes]]:
        # a vector as it is hidden, and secrets of noise in it (`noisy`)
        return values, []

    def hide(self, call: Call, values: Integers) -> Integers:
        """Put the server's mask of this attempt on a vector; CryptoError if it was made before."""
        nonce = server_mask(self._party, call.number, call.attempt, self.transcript.digest)
        # two vectors under one mask would show their difference: refuse the second
        self._used.use(nonce)
        # modulo 2^64
        hidden = values.astype(np.uint64)
        add_masks(hidden, [mask_key(self._server_seed, nonce)], [])
        return hidden.view(np.int64)

    def _round(self, call: Call, length: int) -> Round:
        roster = {name: self._keys[name] for name in self._cohort}
        return sum_round(self._party, call, roster, length, self.transcript, self.surplus_parts)

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
    values: Integers
    agreed: bytes = b""

    def vector(self, sharers: Collection[str]) -> Integers:
        return self.sums.hide(self.call, self.values)

    def prove(self, survivors: Sequence[str]) -> Message:
        # checks that enough are left, and binds the tags to this list
        self.agreed = self.mine.take_survivors(survivors)
        self.sums.permit(survivors)
        return Agreement(self.keys.vouch(self.agreed))

    def unmask(self, proofs: Agreements) -> Unmasking:
        return self.mine.unmask_for(self.keys.vouched(self.agreed, proofs.tags))


# ---------------------------------------------------------------- server


class Crowd:
    """All users, as the server reaches them through their edge servers.

    `users` are their checked keys, by edge server and name; `vouching` is for masks among edge servers; `first` is the
    first message to all; `masked` whether domains' sums lie under masks shared with their users (not in paper mode).
    `cohort` has the users whose vectors are in the last total, `summed` the edge servers.
    """

    def __init__(
        self,
        party: Party,
        credentials: Credentials,
        users: Mapping[str, Mapping[str, CertifiedKeys]],
        vouching: Signer,
        first: Message,
        *,
        masked: bool = True,
    ) -> None:
        self.cohort: list[str] = []
        self.summed = list(users)
        self._party, self._edges = party, list(users)
        self._domains = {edge: set(of) for edge, of in users.items()}
        self._seeds = {
            name: credentials.seed_with(name, offered) for of in users.values() for name, offered in of.items()
        }
        self._collector = Collector(party, self._edges, vouching, b"fedxgb edges", SumRules(allow_two=True))
        self._number, self._masked = 0, masked
        self._transcript = TranscriptDigest(b"")
        self._transcript.update(first)
        self._at_start = self._transcript.digest

    def broadcast(self, message: Message) -> None:
        """Send to all edge servers and users; masks depend on it from now on, and on no message of the last tree."""
        if isinstance(message, RoundStart | RandomStep):
            self._party.round += 1
            self._transcript = TranscriptDigest(self._at_start)
        self._transcript.update(message)
        self._collector.broadcast(message)

    def settle(self) -> None:
        """Take all messages so far as known to all users, also to those who miss a tree."""
        self._at_start = self._transcript.digest

    def total(self, length: int, own: Integers | None = None) -> Integers:
        """Open the sum of the next vectors of all who are there, int64 (length,); the server has no vector of its own.

        Raises RoundVoid if no user is left, PeerProtocolError if an edge server names users that are not its own.
        """
        self._number += 1
        for edge in self._edges:
            self._party.send(edge, Sum(self._number, length))
        # [SecFind, step 8] S: masks among edge servers cancel in the total; remove those shared with the survivors
        total = self._collector.total(length).view(np.uint64)
        self.cohort = []
        for edge in self._edges:
            survived = self._party.receive(edge, SurvivorReport)
            self._let_in(edge, survived.joined)
            if not self._domains[edge] >= set(survived.users) or len(set(survived.users)) < len(survived.users):
                raise PeerProtocolError(edge, "expected users of the domain, got others", at="SurvivorReport")
            # the attempt is part of the nonce: an edge server that repeats a sum gets other masks
            nonce = server_mask(self._party, self._number, survived.attempt, self._transcript.digest)
            # only survivors' masks are in the sum
            keys = [mask_key(self._seeds[name], nonce) for name in survived.users if self._masked]
            add_masks(total, [], keys)
            self.cohort += survived.users
        if not self.cohort:
            raise RoundVoid(
                "no domain has enough users left to open a sum: one of its groups, of three users or a few more, must "
                "be there"
            )
        return total.view(np.int64)

    def _let_in(self, edge: str, joined: Mapping[str, CertifiedKeys]) -> None:
        if joined:
            raise PeerProtocolError(edge, "expected no users who came late", at="SurvivorReport")


def find_splits(crowd: Crowd, trees: Sequence[SlotTree], lengths: Sequence[int], depth: int) -> list[SlotSplits]:
    """Return the splits of a level of each tree, whose sums have these `lengths`.

    Below the root the trees end if no domain has enough users left; RoundVoid if that is so at the root.
    """
    sums: Sequence[NDArray[np.int64] | None] = [None] * len(trees)
    if depth == 0 or crowd.cohort:
        try:
            sums = np.split(crowd.total(sum(lengths)), np.cumsum(lengths)[:-1])
        except RoundVoid as void:
            if depth == 0:
                raise
            logger.warning("a tree ends early: %s", void)
    # [SecFind, step 9] S: prefix sums, gains, the best split of each slot
    return [tree.split(opened, depth) for tree, opened in zip(trees, sums, strict=True)]
