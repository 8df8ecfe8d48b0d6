"""FedXGBoost-SMM in safe mode: the published method's secure matrix product, made secure, and exact.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021 (arXiv
2106.10662), gets all left sums of a node as a product: with one column of M in {0,1}^(n x l) per candidate of a passive
party and V = [g h] of the active one, they are M'V. It computes the product by null vectors (Karr, Lin, Reiter, Sanil,
2009), which shows each party the other's matrix (`fedxgboost_smm`, the published form). Here the product is the
same and so are the roles and who gets the result, the active party (version 1); but it is made by one of three
exchangeable means, all of them exact in integers:

============  =====================================================================================================
`backend`     how M'V is hidden
============  =====================================================================================================
"lattice"     the lattice map of `crypto.lattice_sums`: M is hinted once, V_node encrypted per node. Nobody else needed
"dealer"      `crypto.matrix_triples`: a third role deals random matrices; M is masked once per job, V_node per node
"ou"          `crypto.blind_sums`: every row encrypted afresh for every node, Okamoto-Uchiyama
============  =====================================================================================================

M has a column per bin: candidates' sums are sums of bins'. V_node is V with zeros outside the node, the counting 1
included, over all rows: *blind nodes*, in which a passive party learns of no row whether it is in a node.

Roles: one active party (labels, perhaps features), any number of passive parties (features), under "dealer" a dealer
without data (`smm_dealer`). Rows are aligned. Output: the active party gets the trees and all leaf weights, every party
its own splits. The trees are, bit for bit, those of the plain grower on the joined table.

Messages are those of `secureboost` under a blind cipher, with the backend's payloads:

====================  =============  =====================================================  =====================
message               from -> to     content                                                protection
====================  =============  =====================================================  =====================
`Layout`, `Setup`     both ways      bins per feature; model id, backend, bounds            TLS
`Hint`, `HintTaken`   passive ->     dealer: F = M - B, 8 bytes per bin and row             one-time pad B
`TreeStart`           active ->      sampled columns                                        TLS
`SumsRequest`         active ->      dealer: E = V_node - A of all nodes of the level       one-time pad A
`Sums`                passive ->     dealer: S = M E + D of all nodes                       one-time pad C
`SplitRequest`        active ->      of each node the owner won: feature, bins going left   TLS
`SplitColumns`        passive ->     which rows of the table go left; each column once      TLS
====================  =============  =====================================================  =====================

and, under "dealer", those of `smm_dealer`. With ``reveal="node"`` a split's owner is told the node's rows instead, and
answers for these alone (`SplitAnswer`).

Adversary: honest but curious, no party colluding with the active one; the dealer colludes with nobody: with the active
party it has every passive party's bins, with a passive party all gradients and nodes. What each learns is in
`disclosures`. Deviations from the paper: results go to the active party alone; all nodes of a level in one message, of
two siblings only the smaller is asked for; leaf weights as in `secureboost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.packing import SumsBounds
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.payload import Payload
from treaty.crypto.sums.encrypted_sums import SumsClient, SumsServer
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.messaging.agreement import agree
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart
from treaty.systems.fedxgboost_smm import dealer as smm_dealer
from treaty.systems.pooled.training import Labelled, Progress
from treaty.systems.secureboost import roles as secureboost
from treaty.systems.secureboost.roles import Steps
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical.active import public_options


def active(
    party: Party,
    data: Labelled,
    options: TreeOptions,
    *,
    parties: Sequence[str],
    classes: list[Category] | None,
    dealer: str | None = None,
    eval_sets: Sequence[Labelled] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    store: HintStore | None = None,
    hinting: Steps | None = None,
) -> ModelPart:
    """Train as the active party.

    Parameters
    ----------
    party : Party
        Connected with every passive party, and with the dealer.
    parties : sequence of str
        All parties with data in the job's order.
    dealer : str or None
        Who deals, under ``backend="dealer"``.
    data, options, classes, eval_sets, threads, progress, keeper, store, hinting
        See `secureboost.active`.

    Returns
    -------
    ModelPart
        Own splits, all trees and leaf weights.

    Raises
    ------
    ConfigError, PeerProtocolError
        When parties disagree on parameters or rows, there is no dealer or one too many, or a party sends what the
        protocol does not allow.
    CryptoError
        When sums do not fit the backend, or a passive party's answer or the dealer's shares do not add up.
    """
    _meet_dealer(party, options, dealer)

    def client_of(bounds: SumsBounds, offsets: Mapping[str, NDArray[np.int32]]) -> SumsClient:
        slots = {peer: int(of_peer[-1]) for peer, of_peer in offsets.items()}
        return smm_dealer.asker(party, str(dealer), bounds, slots, threads)

    part = secureboost.active(
        party, data, options, parties=parties, classes=classes, eval_sets=eval_sets, threads=threads,
        progress=progress, keeper=keeper, store=store, hinting=hinting, client_of=client_of if dealer else None,
    )  # fmt: skip
    if dealer is not None:
        party.send(dealer, smm_dealer.DealEnd())
    return part


def passive(
    party: Party,
    table: Table,
    options: TreeOptions,
    *,
    dealer: str | None = None,
    eval_tables: Sequence[Table] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    store: HintStore | None = None,
    hinting: Steps | None = None,
) -> ModelPart:
    """Train as a passive party: answer the active one until it is done.

    Parameters
    ----------
    party : Party
        Connected with the active party, and with the dealer.
    dealer : str or None
        Who deals, under ``backend="dealer"``.
    table, options, eval_tables, threads, progress, keeper, store, hinting
        See `secureboost.passive`.

    Returns
    -------
    ModelPart
        Own splits.
    """
    _meet_dealer(party, options, dealer)

    def server_of(setup: Payload, codes: NDArray[np.uint8], offsets: NDArray[np.int32]) -> SumsServer:
        return smm_dealer.holder(party, str(dealer), setup, codes, offsets, threads)

    return secureboost.passive(
        party, table, options, eval_tables=eval_tables, threads=threads, progress=progress, keeper=keeper,
        store=store, hinting=hinting, server_of=server_of if dealer else None,
    )  # fmt: skip


def _meet_dealer(party: Party, options: TreeOptions, dealer: str | None) -> None:
    """Compare options with the dealer, if there is to be one, and set it apart from the parties with data."""
    if options.has_dealer != (dealer is not None):
        expected = "a dealer" if options.has_dealer else "no dealer"
        raise ConfigError(f"backend={options.cipher!r}: expected {expected} among the parties, got {dealer or 'none'}")
    if dealer is not None:
        party.set_aside(dealer)
        agree(party, public_options(options), peers=[dealer])
