"""FedXGBoost-SMM in safe mode: the published method's secure matrix product, made secure, and exact.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021 (arXiv
2106.10662), gets all left sums of a node as a product M'V: M in {0,1}^(n x l) has a column per candidate of a passive
party, V = [g h] is the active party's. It computes the product by null vectors (Karr, Lin, Reiter, Sanil,
2009), which shows each party the other's matrix (`published`, which ``mode="paper"`` plays). Here
product, roles and receiver of the result, the active party (version 1), are the same; but one of three exchangeable
backends computes it, all of them exact in integers:

============  =====================================================================================================
`backend`     how M'V is hidden
============  =====================================================================================================
"lattice"     the hinted lattice map (`crypto.sums.lattice_sums`): M is hinted once, V_node encrypted per node
"dealer"      a third role deals random matrices (`crypto.vectors.matrix_triples`): M is masked once, V_node per node
"ou"          Okamoto-Uchiyama (`crypto.sums.additive_sums`): every row encrypted afresh for every node
============  =====================================================================================================

M has a column per bin, as candidates' sums are sums over bins. V_node is V with zeros outside the node (also in the
column of ones that counts), over all rows: *blind nodes*, of which a passive party does not learn the rows.

Roles: one active party (labels, perhaps features), any number of passive parties (features), under "dealer" a dealer
without data (`dealer`). Rows are aligned. Output: the active party gets the trees and all leaf weights, every party
its own splits. The trees are, bit for bit, those of the plain grower on the joined table.

Messages are those of SecureBoost under a blind cipher, with the backend's payloads:

====================  =============  =====================================================  =====================
message               from -> to     content                                                protection
====================  =============  =====================================================  =====================
`BinLayout`, `Setup`  both ways      bins per feature; model id, backend, bounds            TLS
`Hint`                passive ->     dealer: F = M - B, 8 bytes per bin and row             one-time pad B
`HintReceipt`         active ->      a piece of the hint has arrived                        TLS
`TreeStart`           active ->      sampled columns                                        TLS
`SumsRequest`         active ->      dealer: E = V_node - A of all nodes of the level       one-time pad A
`Sums`                passive ->     dealer: S = M E + D of all nodes                       one-time pad C
`SplitRequest`        active ->      of each node the owner won: feature, bins going left   TLS
`SplitColumns`        passive ->     which rows of the table go left; each column once      TLS
====================  =============  =====================================================  =====================

and, under "dealer", those of `dealer`. With ``reveal="node"`` a split's owner is told the node's rows instead, and
answers for these alone (`SplitAnswer`).

Adversary: honest but curious, no party colluding with the active one; the dealer colludes with nobody: with the active
party it has every passive party's bins, with a passive party all gradients and nodes. What each learns is in
`disclosures`. Deviations from the paper: results go to the active party alone; all nodes of a level in one message, of
two siblings only the smaller is asked for; the active party computes leaf weights from its own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload, SumsBounds
from treaty.crypto.sums.encrypted_sums import SumsClient, SumsServer
from treaty.messaging.party import agree
from treaty.models.trees import ModelPart
from treaty.systems.fedxgboost_smm import dealer as dealing
from treaty.systems.fedxgboost_smm import published
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.observers import TreeFinished
from treaty.systems.system import RoleInput
from treaty.systems.vertical.active import boosting_of, open_training
from treaty.systems.vertical.column_owner import bin_own_columns
from treaty.systems.vertical.encrypted_columns import SumsPiece, TreeEnd, TreeRows, TreeStart
from treaty.systems.vertical.setup import set_up_active, set_up_passive
from treaty.trees.columns import grow_tree


def active(inputs: RoleInput[FedXGBoostSMM]) -> ModelPart:
    """Train as the active party, in the options' mode.

    Parameters
    ----------
    inputs : RoleInput
        With labels, own columns (perhaps none), and as peers every passive party and the dealer, where there is one.

    Returns
    -------
    ModelPart
        Own splits, all trees and leaf weights.

    Raises
    ------
    ConfigError, PeerProtocolError
        When parties disagree on parameters or rows, or a party sends what the protocol does not allow; in paper mode
        when consent is missing or sums do not fit float64.
    CryptoError
        When sums do not fit the backend, or a passive party's answer or the dealer's shares do not add up.
    """
    if inputs.options.mode == "paper":
        return published.active(inputs)
    party, dealer, training = inputs.party, _meet_dealer(inputs), open_training(inputs)

    def client_of(bounds: SumsBounds, offsets: Mapping[str, NDArray[np.int32]]) -> SumsClient:
        assert dealer is not None
        slots = {peer: int(of_peer[-1]) for peer, of_peer in offsets.items()}
        return dealing.asker(party, dealer, bounds, slots, inputs.threads)

    with set_up_active(inputs, training, client_of=None if dealer is None else client_of) as sums:
        for a_round in boosting_of(inputs, training, sums.sources):
            for sample in a_round.trees():
                tree, rows = grow_tree(sums.search(sample), sample, sums.rules, inputs.threads)
                a_round.add(tree, rows)
                inputs.observers.event(TreeFinished(tree, rows))
    if dealer is not None:
        party.send(dealer, dealing.DealEnd())
    return training.part


def passive(inputs: RoleInput[FedXGBoostSMM]) -> ModelPart:
    """Train as a passive party, in the options' mode: answer the active one until it is done."""
    if inputs.options.mode == "paper":
        return published.passive(inputs)
    dealer = _meet_dealer(inputs)

    def server_of(setup: Payload, codes: NDArray[np.uint8], offsets: NDArray[np.int32]) -> SumsServer:
        assert dealer is not None
        return dealing.holder(inputs.party, dealer, setup, codes, offsets, inputs.threads)

    bins, codes = bin_own_columns(inputs)
    with set_up_passive(inputs, bins, codes, server_of=None if dealer is None else server_of) as owner:
        return owner.follow({
            TreeStart: owner.start_tree,
            TreeRows: owner.add_rows,
            SumsPiece: owner.add_piece,
            owner.asks: owner.sums,
            owner.names: lambda message: owner.divide(owner.chosen(message)),
            TreeEnd: owner.end_tree,
        })  # fmt: skip


def _meet_dealer(inputs: RoleInput) -> str | None:
    """Compare options with the dealer, where there is one, and set it apart from the parties with data."""
    dealer = inputs.roles.holder("dealer")
    if dealer is not None:
        inputs.party.set_aside(dealer)
        agree(inputs.party, inputs.public_terms, peers=[dealer])
    return dealer
