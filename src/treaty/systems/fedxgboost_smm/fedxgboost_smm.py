"""FedXGBoost-SMM in its safe form: split sums by a secure matrix product, exact in integers.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021 (arXiv
2106.10662), gets all left sums of a node as a product M^T V: M in {0,1}^(n x l) has a column per candidate of a passive
party, V = [g h] is the active party's. The paper computes the product by null vectors, which show each party the
other's matrix (`published`, ``mode="paper"``). Here the product, the roles and the receiver of the result (the active
party, as in version 1) are the same, but one of three exchangeable backends computes it:

============  =====================================================================================================
`backend`     how M^T V is hidden
============  =====================================================================================================
"lattice"     the hinted lattice map (`crypto.sums.lattice_sums`): M is hinted once, V_node encrypted per node
"dealer"      a third role deals random matrices (`crypto.sums.triple_sums`): M is masked once, V_node per node
"ou"          Okamoto-Uchiyama (`crypto.sums.additive_sums`): every row encrypted again for every node
============  =====================================================================================================

M has a column per bin, because candidates' sums are sums over bins. V_node has all rows of V, with zeros outside the
node (also in the column of ones that counts rows). So a passive party does not learn which rows a node has.

Roles: one active party (labels, perhaps features), any number of passive parties (features), and under "dealer" a
dealer without data. Rows are aligned. Output: the active party gets the trees and all leaf weights, every party its own
splits. The trees are, bit for bit, those of the plain grower on the joined table. Messages are those of SecureBoost
under a blind cipher, with the backend's payloads, and the dealer's below.

Adversary: honest but curious, no party colluding with the active one. The dealer colludes with no party: with the
active party it has every passive party's bins, with a passive party all gradients and nodes. Deviations from the paper:
results go to the active party alone; all nodes of a level travel in one message, of two siblings only the smaller is
asked for; the active party computes leaf weights from its own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload, SumsBounds, check_payload
from treaty.crypto.sums.triple_sums import SEED_BYTES, VECTOR_WORDS, TripleDealer, TripleSumsClient, TripleSumsServer
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Int32s, Words
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import MOST_ROWS, MOST_SLOTS, Array, Message, leaks, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.systems.fedxgboost_smm import published
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.observers import TreeFinished
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import bin_own_columns
from treaty.systems.vertical.messages import SumsPiece, TreeEnd, TreeRows, TreeStart
from treaty.systems.vertical.setup import set_up_active, set_up_passive
from treaty.systems.vertical.training import boosting_of, open_training
from treaty.trees.lockstep import Lockstep, LockstepRows, joined_sample

DEALER = "dealer"
"""Name of the dealer that `fit` plays."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


@leaks("how many rows there are, and bins at each passive party", "control")
class DealOrder(Message):
    """The number of rows, and the number of bins of each passive party."""

    rows: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)]
    slots: dict[str, Annotated[int, msgspec.Meta(ge=0, le=MOST_SLOTS)]]


@leaks("a seed of its masks", "nothing")
class AskerSeed(Message):
    """Seed of the active party's masks A and C."""

    seed: bytes


@leaks("a seed of its mask", "nothing")
class HolderSeed(Message):
    """Seed of a passive party's mask B."""

    seed: bytes


@leaks("how many nodes are asked about", "control")
class DealRequest(Message):
    """A request for the shares of `count` vectors, from number `first` on."""

    first: _Count
    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


@leaks("how many nodes there are; random numbers", "masked")
class DealtShares(Message):
    """Shares uint64 (vectors, 2, bins) for the vectors from number `first` on."""

    first: _Count
    shares: Array


@leaks("that training is over", "control")
class DealEnd(Message):
    """The end of the training."""


# ---------------------------------------------------------------- the dealer


def dealer(inputs: RoleInput[FedXGBoostSMM]) -> None:
    """Deal random matrices until the active party has finished."""
    party, active, threads = inputs.party, inputs.roles.active, inputs.threads
    agree(party, inputs.public_terms)
    wanted = party.receive(active, DealOrder)
    holders = [peer for peer in party.peers if peer != active]
    if sorted(wanted.slots) != sorted(holders):
        raise PeerProtocolError(active, f"expected the bins of {', '.join(holders)}", at="DealOrder.slots")
    made = TripleDealer(wanted.rows, wanted.slots, threads)
    party.send(active, AskerSeed(made.asker_seed))
    for holder, seed in made.holder_seeds.items():
        party.send(holder, HolderSeed(seed))  # [SMM safe, step 1] once: a random B for each passive party
    made.prepare()
    common, dealt = inputs.common, 0
    of_level = common.rules_of(1.0, 1.0).most_asked
    # every node of every tree takes one vector: a party that asks for more does not train
    most = common.most_rounds * inputs.trees_a_round * (2 * of_level - 1)
    while isinstance(request := party.receive(active, DealRequest, DealEnd, follow=True), DealRequest):
        dealt += request.count
        # bounds hold before anything is computed: a request may not make the dealer work without end
        if request.count > of_level:
            raise PeerProtocolError(
                active, f"expected vectors of at most {of_level} nodes of a level", at="DealRequest.count"
            )
        if dealt > most:
            raise PeerProtocolError(
                active, f"expected at most {most} vectors, as the job's options say", at="DealRequest"
            )
        # [SMM safe, step 2] for each node a fresh A, and shares C + D = B A; A and C come from the active party's seed
        for holder, shares in made.deal(request.first, request.count).items():
            party.send(holder, DealtShares(request.first, Array.of(shares)))
        # the next numbers are drawn while the parties compute, before they ask
        made.prepare()


def _client(
    party: Party, name: str, threads: int, bounds: SumsBounds, offsets: Mapping[str, Int32s]
) -> TripleSumsClient:
    """Return the active party's end of the sums, whose masks come from the dealer, party `name`."""
    party.send(name, DealOrder(bounds.n_rows, {peer: int(of_peer[-1]) for peer, of_peer in offsets.items()}))
    seed = _seed(party.receive(name, AskerSeed), name)
    return TripleSumsClient(bounds, seed, lambda *vectors: party.send(name, DealRequest(*vectors)), threads=threads)


def _server(
    party: Party, name: str, threads: int, setup: Payload, codes: NDArray[np.uint8], offsets: Int32s
) -> TripleSumsServer:
    """Return a passive party's end of the sums, whose mask and shares come from the dealer, party `name`."""
    check_payload(setup, "the set-up", (np.int64, (3,)))
    bounds, slots = SumsBounds(*(int(x) for x in setup[0])), int(offsets[-1])
    seed = _seed(party.receive(name, HolderSeed), name)

    def shares(first: int, count: int) -> Words:
        dealt = party.receive(name, DealtShares)
        if dealt.first != first:
            raise PeerProtocolError(
                name, f"expected shares for vector {first}, got {dealt.first}", at="DealtShares.first"
            )
        return view(dealt.shares, np.uint64, (count, VECTOR_WORDS, slots), peer=name, what="DealtShares.shares")

    return TripleSumsServer(bounds, codes, offsets, seed, shares, threads=threads)


def _seed(message: AskerSeed | HolderSeed, name: str) -> bytes:
    if len(message.seed) != SEED_BYTES:
        raise PeerProtocolError(name, f"expected {SEED_BYTES} bytes", at=f"{type(message).__name__}.seed")
    return message.seed


# ---------------------------------------------------------------- active party


def active(inputs: RoleInput[FedXGBoostSMM]) -> ModelPart:
    """Train as the active party, in the options' mode; its peers are the passive parties and the dealer, if any.

    Raises CryptoError if sums do not fit the backend, or a passive party's answer or the dealer's shares do not add up.
    """
    if inputs.options.mode == "paper":
        return published.active(inputs)
    party, dealer, training = inputs.party, _meet_dealer(inputs), open_training(inputs)
    client_of = None if dealer is None else partial(_client, party, dealer, inputs.threads)
    # [SMM safe, step 3] F = M^T - B from every passive party, once; without a dealer its hint of M, or nothing
    with set_up_active(inputs, training, client_of=client_of) as columns:
        for a_round in boosting_of(inputs, training, columns.sources):
            for samples in a_round.batches(columns.together):
                rows, growth = LockstepRows(samples, inputs.threads), Lockstep(samples, columns.rules)
                search = columns.search(joined_sample(samples))
                while growth.level is not None:
                    search.ask(growth.level, rows)  # [SMM safe, step 4] E = V_node - A of each node to be asked about
                    # [SMM safe, step 5] each passive party answers S = M^T E + D
                    # [SMM safe, step 6] M^T V_node = S + F A + C; gains, and the best of all parties
                    chosen = growth.take(search.choose(growth.level))
                    if chosen is not None:
                        nodes, children, splits = chosen
                        records, left = search.decide(nodes, splits, rows)
                        rows.divide(nodes, children, left)
                        growth.divided(records)
                search.end()
                for (tree, directions), of_tree in zip(growth.trees(), rows.of_trees, strict=True):
                    a_round.add(tree, of_tree)
                    inputs.observers.event(TreeFinished(tree, of_tree, directions))
    if dealer is not None:
        party.send(dealer, DealEnd())
    return training.part


# ---------------------------------------------------------------- passive party


def passive(inputs: RoleInput[FedXGBoostSMM]) -> ModelPart:
    """Train as a passive party, in the options' mode: answer the active one until it is done."""
    if inputs.options.mode == "paper":
        return published.passive(inputs)
    dealer = _meet_dealer(inputs)
    server_of = None if dealer is None else partial(_server, inputs.party, dealer, inputs.threads)
    bins, codes = bin_own_columns(inputs)  # M
    with set_up_passive(inputs, bins, codes, server_of=server_of) as owner:  # step 3
        return owner.follow({
            TreeStart: owner.start_tree,
            TreeRows: owner.add_rows,
            SumsPiece: owner.add_piece,
            owner.sums_request: owner.sums,  # step 5
            owner.split_request: lambda message: owner.divide(owner.named_splits(message)),
            TreeEnd: owner.end_tree,
        })  # fmt: skip


def _meet_dealer(inputs: RoleInput) -> str | None:
    """Compare options with the dealer, if there is one, and take it out of the peers: it has no data."""
    dealer = inputs.roles.holder("dealer")
    if dealer is not None:
        inputs.party.set_aside(dealer)
        agree(inputs.party, inputs.public_terms, peers=[dealer])
    return dealer
