"""A user's end of the sums of its domain: double masking with keys made anew for every sum, and a mask for the server.

====================  ====================  ================================================  =======================
message               from -> to            content                                           protection
====================  ====================  ================================================  =======================
`Domain`              edge -> users         certified keys of all users of the domain         both signatures
`Roll`, `Here`        both ways             a tree begins; the user is there                  TLS
`Cohort`              edge -> chosen        who takes part                                    masks depend on it
`Call`                edge -> cohort        the next sum, or another attempt at it            TLS
`MaskKey`,            user -> edge -> all   X25519 key of this sum, a tag for each peer       tags under the channels
`MaskKeys`
`SealedShares`,       user -> edge -> user  shares of this sum's mask key and self-mask       AES-256-GCM
`PassedShares`
`MaskedInput`         user -> edge          the vector under all masks, the server's too      masks, each used once
`Remaining`,          both ways             whose vectors came; a tag on the list for each    tags under the channels
`Agreement`,                                peer
`Agreements`
`Answer`              user -> edge          of who is left the share of the self-mask, of     never both for one
                                            who is lost that of the mask key
`Absent`              user -> edge          it takes no further part in this tree             TLS
====================  ====================  ================================================  =======================

The edge server learns who takes part. The sum it opens lies under one mask per user that the server alone can remove;
the server sees sums over all domains. A user goes on with nobody whose keys the authority has not certified, and agrees
to no list that would make its domain's cohort differ by fewer than `least_change` users from one that it signed before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.aggregation_participant import Participant
from treaty.crypto.aggregation.aggregation_round import Round
from treaty.crypto.aggregation.masks import UsedNonces, add_masks, mask_key, mask_nonce
from treaty.crypto.aggregation.round_keys import RoundKeys
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, M, Message
from treaty.messaging.party import Party
from treaty.systems.fedxgb.authority import CertifiedKeys, Credentials
from treaty.systems.fedxgb.cohorts import permitted
from treaty.systems.horizontal.members import Heard

Stage = Literal["call", "setup", "shared", "masked", "prediction"]
"""Where a user may drop out of a tree: as it begins; before it has made a key, before its vector, after it; later."""

Leaves = Callable[[int, Stage], bool]
"""``leaves(tree, stage)``, trees counted from 1: whether a user drops out then, in a simulation or because it must."""


class Domain(Message):
    """Certified keys of all users of a domain."""

    users: dict[str, CertifiedKeys]
    least_change: Annotated[int, msgspec.Meta(ge=3)]


class Cohort(Message):
    """Who takes part in a tree."""

    users: list[str]


class Call(Message):
    """Contribute the vector that comes next; `number` is the sum's, higher than any before."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    attempt: Annotated[int, msgspec.Meta(ge=0)]


class Absent(Message):
    """The sender takes no further part in this tree."""


class MaskKey(Message):
    """A user's mask key of one sum, and its tags by peer."""

    public: bytes
    tags: dict[str, bytes]


class MaskKeys(Message):
    """All mask keys of one sum, and the tags made for the receiver."""

    public: dict[str, bytes]
    tags: dict[str, bytes]


class SealedShares(Message):
    """Shares by receiver. Tell the edge server nothing."""

    sealed: dict[str, bytes]


class PassedShares(Message):
    """Shares by sender."""

    sealed: dict[str, bytes]


class MaskedInput(Message):
    """A vector uint64 (n,) under masks."""

    values: Array


class Remaining(Message):
    """Whose vectors are in the sum."""

    users: list[str]


class Agreement(Message):
    """A user's tags on that list, by peer."""

    tags: dict[str, bytes]


class Agreements(Message):
    """Tags on the list made for the receiver, by those on it."""

    tags: dict[str, bytes]


class Answer(Message):
    """Shares that remove the masks of one sum: by remaining user of its self-mask, by lost one of its mask key."""

    remaining: dict[str, bytes]
    lost: dict[str, bytes]


def server_mask(party: Party, number: int, attempt: int, heard: bytes) -> bytes:
    """Name the mask between a user and the server of one attempt at a sum."""
    return mask_nonce(party.job, party.protocol, number, attempt, f"server {heard.hex()}")


class UserSums:
    """A user's part in its domain's sums.

    Parameters
    ----------
    party : Party
    edge : str
        Its edge server.
    credentials : Credentials
    server_seed : bytes
        Shared with the server.
    leaves : Leaves or None
        When to drop out.

    Attributes
    ----------
    heard : Heard
        Digest of what the server told everybody, on which masks depend.
    awake : bool
        False once it has dropped out of a tree, to be set when the next one begins.
    """

    def __init__(
        self, party: Party, edge: str, credentials: Credentials, server_seed: bytes, leaves: Leaves | None = None
    ) -> None:
        self.heard = Heard(b"")
        self.awake = True
        self._party, self._edge, self._credentials, self._leaves = party, edge, credentials, leaves
        self._server_seed, self._used = server_seed, UsedNonces()
        self._keys: dict[str, bytes] = {}
        self._channels: dict[str, bytes] = {}
        self._agreed_to: set[frozenset[str]] = set()
        self._least_change = 3
        self._cohort: list[str] = []

    def meet(self, domain: Domain) -> None:
        """Check the keys of the domain's users.

        Raises
        ------
        PeerProtocolError
            When they are not certified, or the own ones are missing.
        """
        me = self._party.name
        if me not in domain.users or domain.users[me].key != self._credentials.certified.key:
            raise PeerProtocolError(self._edge, f"expected the own keys of {me} among the users' - at Domain")
        for name, offered in domain.users.items():
            if name != me:
                self._credentials.check(name, "user", offered, self._edge)
                self._channels[name] = self._credentials.seed_with(name, offered)
            self._keys[name] = offered.key
        self._least_change = domain.least_change

    def join(self, cohort: Cohort) -> None:
        """Take part in a tree with these users.

        Raises
        ------
        PeerProtocolError
            When they are not users of the domain, this one among them.
        """
        if self._party.name not in cohort.users or not self._keys.keys() >= set(cohort.users):
            raise PeerProtocolError(
                self._edge, f"expected users of the domain, {self._party.name} among them - at Cohort from {self._edge}"
            )
        self._cohort = sorted(set(cohort.users))

    def absent(self, stage: Stage) -> bool:
        """Drop out, where that is wanted now; return whether it was."""
        if self.awake and self._leaves is not None and self._leaves(max(0, self._party.round - 1), stage):
            self.withdraw()
        return not self.awake

    def withdraw(self) -> None:
        """Take no further part in this tree."""
        self._party.send(self._edge, Absent())
        self.awake = False

    def give(self, call: Call, values: NDArray[np.int64], *others: type[M]) -> M | None:
        """Contribute an int64 vector to a sum.

        Parameters
        ----------
        call : Call
        values : int64 (n,)
        *others : types of Message
            What the edge server may send instead of the next step: it goes on without this user, or begins anew.

        Returns
        -------
        Message or None
            One of `others`, if that came.

        Raises
        ------
        CryptoError, PeerError
            When keys, shares or signatures are not what the protocol allows.
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
        party.send(edge, SealedShares(mine.share()))
        said = party.receive(edge, PassedShares, *others, follow=True)
        if not isinstance(said, PassedShares):
            return said  # type: ignore[return-value]
        if self.absent("shared"):
            return None
        nonce = server_mask(party, call.number, call.attempt, self.heard.digest)
        self._used.use(nonce)
        hidden = values.astype(np.uint64)
        add_masks(hidden, [mask_key(self._server_seed, nonce)], [])
        party.send(edge, MaskedInput(Array.of(mine.masked_input(hidden.view(np.int64), said.sealed))))
        gone = self.absent("masked")
        said = party.receive(edge, Remaining, *others, follow=True)
        if not isinstance(said, Remaining):
            return said  # type: ignore[return-value]
        if gone:  # the edge server has the vector, and asks before it reads that the user went
            return None
        agreed = mine.take_survivors(said.users)
        if not permitted(said.users, self._agreed_to, self._least_change):
            raise PeerProtocolError(
                edge, f"expected a cohort that differs by {self._least_change} users or more, or by none - at Remaining"
            )
        self._agreed_to.add(frozenset(said.users))
        party.send(edge, Agreement(keys.vouch(agreed)))
        said = party.receive(edge, Agreements, *others, follow=True)
        if not isinstance(said, Agreements):
            return said  # type: ignore[return-value]
        party.send(edge, Answer(*mine.unmask_for(keys.vouched(agreed, said.tags))))
        return None

    def _round(self, call: Call, length: int) -> Round:
        party = self._party
        return Round(
            job_id=party.job, protocol=party.protocol, round_id=call.number, attempt=call.attempt,
            roster={name: self._keys[name] for name in self._cohort}, length=length,
            vector_id=self.heard.digest.hex(),
        )  # fmt: skip

    def _round_keys(self, this_round: Round) -> RoundKeys:
        me = self._party.name
        peers = {name: self._channels[name] for name in self._cohort if name != me}
        return RoundKeys(self._party.job, me, this_round.key_scope, peers)
