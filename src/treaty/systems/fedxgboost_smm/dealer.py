"""The dealer: a third party without data that gives active and passive parties matching random matrices.

It learns how many rows there are, how many bins each passive party has, and how many nodes are asked about. It must not
tell either end what it gave the other: `crypto.sums.triple_sums` says what they could compute then.

====================  ==============  ==========================================================  =================
message               from -> to      content                                                     protection
====================  ==============  ==========================================================  =================
`DealOrder`           active ->       rows; bins of each passive party                            TLS
`AskerSeed`           -> active       seed of all A and C                                         TLS
`HolderSeed`          -> passive      seed of B                                                   TLS
`DealRequest`         active ->       deal for the next so many vectors                           TLS
`DealtShares`         -> passive      D = B A - C of these                                        TLS
`DealEnd`             active ->       training is over                                            TLS
====================  ==============  ==========================================================  =================
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload, SumsBounds, check_payload
from treaty.crypto.sums.triple_sums import (
    SEED_BYTES,
    VECTOR_WORDS,
    TripleDealer,
    TripleSumsClient,
    TripleSumsServer,
    Words,
)
from treaty.errors import PeerProtocolError
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party, agree
from treaty.systems.sizes import MOST_ROWS, MOST_SLOTS
from treaty.systems.system import RoleInput

DEALER = "dealer"
"""Name of the dealer that `fit` plays."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class DealOrder(Message):
    """The number of rows, and of bins of each passive party. Tells these numbers."""

    leakage: ClassVar = MessageLeakage("how many rows there are, and bins at each passive party", "control")

    rows: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)]
    slots: dict[str, Annotated[int, msgspec.Meta(ge=0, le=MOST_SLOTS)]]


class AskerSeed(Message):
    """Seed of the active party's masks A and C (`crypto.sums.triple_sums`). Tells nothing."""

    leakage: ClassVar = MessageLeakage("a seed of its masks", "nothing")

    seed: bytes


class HolderSeed(Message):
    """Seed of a passive party's mask B. Tells nothing."""

    leakage: ClassVar = MessageLeakage("a seed of its mask", "nothing")

    seed: bytes


class DealRequest(Message):
    """Deal for `count` vectors from number `first` on. Tells how many nodes are asked about."""

    leakage: ClassVar = MessageLeakage("how many nodes are asked about", "control")

    first: _Count
    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class DealtShares(Message):
    """Shares uint64 (vectors, 2, bins) for the vectors from number `first` on. Tell how many nodes there are."""

    leakage: ClassVar = MessageLeakage("how many nodes there are; random numbers", "masked")

    first: _Count
    shares: Array


class DealEnd(Message):
    """Training is over."""

    leakage: ClassVar = MessageLeakage("that training is over", "control")


def dealer(inputs: RoleInput) -> None:
    """Deal until the active party is done; all parties are the dealer's peers."""
    party, active = inputs.party, inputs.roles.active
    agree(party, inputs.public_terms)
    wanted = party.receive(active, DealOrder)
    holders = [peer for peer in party.peers if peer != active]
    if sorted(wanted.slots) != sorted(holders):
        raise PeerProtocolError(active, f"expected the bins of {', '.join(holders)} - at DealOrder.slots from {active}")
    made = TripleDealer(wanted.rows, wanted.slots, inputs.threads)
    party.send(active, AskerSeed(made.asker_seed))
    for holder, seed in made.holder_seeds.items():
        party.send(holder, HolderSeed(seed))
    made.prepare()
    # a vector for every node of every tree
    dealt, most = 0, inputs.common.n_estimators * inputs.trees_a_round * ((1 << inputs.common.max_depth) - 1)
    while isinstance(request := party.receive(active, DealRequest, DealEnd, follow=True), DealRequest):
        dealt += request.count
        of_level = 1 << max(0, inputs.common.max_depth - 1)
        if request.count > of_level:
            raise PeerProtocolError(
                active, f"expected vectors of at most {of_level} nodes of a level - at DealRequest.count from {active}"
            )
        if dealt > most:
            raise PeerProtocolError(
                active, f"expected at most {most} vectors, as the job's options say - at DealRequest from {active}"
            )
        for holder, shares in made.deal(request.first, request.count).items():
            party.send(holder, DealtShares(request.first, Array.of(shares)))
        made.prepare()  # ahead of the next request, while the others compute


def asker(party: Party, name: str, bounds: SumsBounds, slots: dict[str, int], threads: int) -> TripleSumsClient:
    """Return the active party's end of the sums; the dealer, party `name`, gives it its masks."""
    party.send(name, DealOrder(bounds.n_rows, slots))
    seed = _seed(party.receive(name, AskerSeed), name)

    def deal(first: int, count: int) -> None:
        party.send(name, DealRequest(first, count))

    return TripleSumsClient(bounds, seed, deal, threads=threads)


def holder(
    party: Party, name: str, setup: Payload, codes: NDArray[np.uint8], offsets: NDArray[np.int32], threads: int
) -> TripleSumsServer:
    """Return a passive party's end of the sums; the dealer, party `name`, gives it its mask and shares."""
    check_payload(setup, "the set-up", (np.int64, (3,)))
    bounds, slots = SumsBounds(*(int(x) for x in setup[0])), int(offsets[-1])
    seed = _seed(party.receive(name, HolderSeed), name)

    def shares(first: int, count: int) -> Words:
        dealt = party.receive(name, DealtShares)
        if dealt.first != first:
            raise PeerProtocolError(
                name, f"expected shares for vector {first}, got {dealt.first} - at DealtShares.first from {name}"
            )
        return view(dealt.shares, np.uint64, (count, VECTOR_WORDS, slots), peer=name, what="DealtShares.shares")

    return TripleSumsServer(bounds, codes, offsets, seed, shares, threads=threads)


def _seed(message: AskerSeed | HolderSeed, name: str) -> bytes:
    if len(message.seed) != SEED_BYTES:
        raise PeerProtocolError(name, f"expected {SEED_BYTES} bytes - at {type(message).__name__}.seed from {name}")
    return message.seed
