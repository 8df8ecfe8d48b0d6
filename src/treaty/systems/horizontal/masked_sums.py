"""One sum under double masks from which contributors may drop out (`crypto.sharing.secure_aggregation`), as messages.

Two kinds of sums have these steps: those of a job's members (`members`) and those of the users of an edge server
(FedXGB). The aggregator collects shares, then masked vectors, lists the survivors, and opens their sum. The kinds
differ in how keys are introduced, what proves the list of survivors, when a contributor counts as lost, and how a void
sum is repeated: see `SumAggregator` and `Contribution`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import KEY_BYTES
from treaty.crypto.sharing.aggregator import Aggregator
from treaty.crypto.sharing.secure_aggregation import SHARE_BYTES, Participant, Round, Unmasking
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.messages import Array, M, Message, leaks, leaks_by, view
from treaty.messaging.party import Party

ATTEMPTS = 3  # at one sum

Proofs = TypeVar("Proofs", bound=Message)
ProofsGiven = TypeVar("ProofsGiven", bound=Message, contravariant=True)


@leaks_by(
    masks=("shares of masks, sealed for others", "encrypted"),
    keys=("shares of masks and keys, sealed for others", "encrypted"),
)
class SealedShares(Message):
    """Shares of the sender's mask secrets, each sealed for its receiver."""

    sealed: dict[str, bytes]


@leaks_by(masks=("its shares of others' masks", "masked"), keys=("its shares of others' masks and keys", "masked"))
class PassedShares(Message):
    """The shares that others sealed for the receiver, by sender."""

    sealed: dict[str, bytes]


_SUM_OF_ROWS = (
    "nothing alone; with all others: for each bin of each column in each node, the sum of gradients, sum of hessians "
    "and number of rows, over all rows in the sum; during the search for bins, how many rows lie below trial values"
)


@leaks_by(
    sum=(_SUM_OF_ROWS, "aggregated"),
    held_out=(
        f"{_SUM_OF_ROWS}; after each round, how many held-out rows have each score and label",
        "aggregated",
    ),
    noisy=(
        "nothing alone; with all others: in each leaf of trees drawn at random, the sums of gradients and of hessians, "
        "over all rows in the sum; during the search for bins, how many rows lie between trial values; and, with "
        "validation_fraction, how many held-out rows have each score and label",
        "noisy",
    ),
    paper=(
        "in every bin at every node, the sums over the users of one domain, which may be a single user",
        "aggregated",
        'mode="safe"',
    ),
    domain=(
        "nothing alone; together with all others of the domain a sum under masks that the server alone can remove",
        "masked",
    ),
)
class MaskedInput(Message):
    """A vector uint64 (n,) under masks."""

    values: Array


@leaks("whose vectors are in the sum", "control")
class Survivors(Message):
    """Whose vectors are in the sum."""

    names: list[str]


@leaks("what removes the masks from this sum, but from no single vector", "masked")
class MaskShares(Message):
    """What removes masks: by survivor a share of its seed; by lost contributor a share of its key, or one mask.

    In sums with noise, shares of secrets of surplus noise follow those of seeds.
    """

    survivors: dict[str, bytes]
    lost: dict[str, bytes]


class Contribution(Protocol[ProofsGiven]):
    """A contributor's part that differs between kinds of sums; each method may refuse what the aggregator sent."""

    def vector(self, sharers: Collection[str]) -> Integers:
        """Return the vector to be masked, once others have shared."""

    def prove(self, survivors: Sequence[str]) -> Message:
        """Return what proves to the others which list of survivors this contributor received."""

    def unmask(self, proofs: ProofsGiven) -> Unmasking:
        """Return what removes the masks of that list, if enough others prove that they received the same."""


def contribute(
    party: Party,
    aggregator: str,
    mine: Participant,
    contribution: Contribution[Proofs],
    proofs: type[Proofs],
    *others: type[M],
    absent: Callable[[Literal["shared", "masked"]], bool] = lambda stage: False,
    follow: bool = False,
) -> M | None:
    """Take part in one attempt at a sum; return one of `others` if it came in place of the next step.

    `absent` decides whether to drop out, before the vector is sent or after; `follow` is `Party.receive`'s.
    """
    party.send(aggregator, SealedShares(mine.share()))
    passed: Message = party.receive(aggregator, PassedShares, *others, follow=follow)
    if not isinstance(passed, PassedShares):
        return passed  # type: ignore[return-value]
    if absent("shared"):
        return None
    # masks are shared with those who have shared secrets, so that every mask can be removed again
    vector = contribution.vector(passed.sealed)
    party.send(aggregator, MaskedInput(Array.of(mine.masked_input(vector, passed.sealed))))
    gone = absent("masked")
    listed: Message = party.receive(aggregator, Survivors, *others, follow=follow)
    if not isinstance(listed, Survivors):
        return listed  # type: ignore[return-value]
    # the aggregator has the vector, and lists it before it reads that its sender has left
    if gone:
        return None
    # shares that remove masks go out only for a list that enough survivors have proved to have received as well:
    # otherwise an aggregator could get both the self-mask and the pairwise masks of one contributor
    party.send(aggregator, contribution.prove(listed.names))
    proved: Message = party.receive(aggregator, proofs, *others, follow=follow)
    if not isinstance(proved, proofs):
        return proved  # type: ignore[return-value]
    party.send(aggregator, MaskShares(*contribution.unmask(proved)))
    return None


class OwnInput(NamedTuple):
    """The vector, int64 (length,), of an aggregator that contributes as well."""

    name: str
    participant: Participant
    values: Integers


class SumAggregator(ABC):
    """The aggregator's steps, `pass_shares` and `open_sum`; subclasses reach contributors and decide who is lost."""

    @abstractmethod
    def send(self, messages: Mapping[str, Message]) -> None:
        """Send to contributors, some of whom may be gone."""

    @abstractmethod
    def _gather(self, kind: type[M]) -> dict[str, M]:
        """Receive a message from every remaining contributor, and drop those that send none."""

    @abstractmethod
    def _expel(self, error: PeerProtocolError) -> None:
        """Continue without ``error.peer``, which sent something invalid."""

    @abstractmethod
    def _choose(self, this_round: Round, aggregator: Aggregator, came: Mapping[str, NDArray[np.uint64]]) -> None:
        """Remove vectors that must not be in the sum, before survivors are listed."""

    @abstractmethod
    def _pass_proofs(
        self, this_round: Round, aggregator: Aggregator, survivors: Sequence[str], own: OwnInput | None
    ) -> Unmasking | None:
        """Have survivors prove to each other which list they received; return what removes masks by `own`."""

    def _checked(self, came: Mapping[str, M], right: Callable[[M, str], bool], expected: str) -> dict[str, M]:
        """Expel contributors whose message is not `expected`; return the messages of all others."""
        wrong = [name for name, message in came.items() if not right(message, name)]
        for name in wrong:
            self._expel(PeerProtocolError(name, f"{name} did not send {expected}"))
        return {name: message for name, message in came.items() if name not in wrong}

    def pass_shares(
        self, aggregator: Aggregator, keys: Collection[str], own: OwnInput | None = None
    ) -> tuple[dict[str, dict[str, bytes]], dict[str, dict[str, bytes]]]:
        """Pass on shares among contributors with `keys`; return them by sender, and by receiver."""
        shares = self._checked(
            self._gather(SealedShares), lambda m, name: m.sealed.keys() == set(keys) - {name}, "a share for each other"
        )
        sealed = {name: message.sealed for name, message in shares.items()}
        if own is not None:
            sealed[own.name] = own.participant.share()
        passed = aggregator.pass_shares(sealed)
        self.send({name: PassedShares(boxes) for name, boxes in passed.items() if name in shares})
        return sealed, passed

    def open_sum(
        self,
        this_round: Round,
        aggregator: Aggregator,
        sharers: Collection[str],
        own: OwnInput | None = None,
        passed: Mapping[str, bytes] | None = None,
    ) -> tuple[Integers, list[str]]:
        """Open the sum of the vectors that come, int64 (length,); return also whose they are, sorted.

        `sharers` have shared their masks' secrets; `passed` is what others sealed for `own`.

        Raises RoundVoid, CryptoError if too few are left, or their shares open nothing.
        """
        came = {}
        for name, message in self._gather(MaskedInput).items():
            try:
                came[name] = view(message.values, np.uint64, (this_round.length,), peer=name, what="MaskedInput.values")
            except PeerProtocolError as error:
                self._expel(error)
            else:
                aggregator.add_input(name, came[name])
        if own is not None:
            aggregator.add_input(own.name, own.participant.masked_input(own.values, passed or {}))
        self._choose(this_round, aggregator, came)
        # from here on the list is closed: what comes later is dropped unread
        survivors = aggregator.survivors()
        self.send({name: Survivors(survivors) for name in survivors if name in came})
        own_answer = self._pass_proofs(this_round, aggregator, survivors, own)

        # a survivor's self-mask is removed by its seed, what a lost one left in others' vectors by its key or masks
        lost = sorted(set(sharers) - set(survivors))
        of_seed = 2 * SHARE_BYTES if this_round.removed(len(survivors)) else SHARE_BYTES
        of_lost = SHARE_BYTES if this_round.dropout == "share" else KEY_BYTES
        shares = self._checked(
            self._gather(MaskShares),
            lambda m, _: _of_length(m.survivors, survivors, of_seed) and _of_length(m.lost, lost, of_lost),
            "the shares that were asked for, and no others",
        )
        answers = {name: Unmasking(m.survivors, m.lost) for name, m in shares.items()}
        if own is not None and own_answer is not None:
            answers[own.name] = own_answer
        return aggregator.open(answers), survivors


def _of_length(shares: Mapping[str, bytes], names: Sequence[str], length: int) -> bool:
    """Say whether there is one share of the right length for each of `names`, and no other."""
    return shares.keys() == set(names) and all(len(share) == length for share in shares.values())
