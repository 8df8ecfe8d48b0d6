"""FedXGBoost-SMM as published (``mode="paper"``): split sums by matrix products with null vectors. Insecure.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021
(arXiv 2106.10662), on the product of Karr, Lin, Reiter, Sanil, Journal of Official Statistics 25(1), 2009
(`matrix_product`).

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned. Of a
node with n rows, V = [g h] (n, 2) is the active party's and M (n, l), a column of 0 and 1 for each split candidate, a
passive party's; the left sums of all its candidates are M^T V. In version 1 the active party sends null vectors of V
and gets the sums; in version 2 each passive party sends null vectors of M, mixed with random columns, gets the sums of
its candidates and says its best gain. Output: the active party gets the trees and all leaf weights, every party its own
splits. The trees are those of the plain grower, bit for bit, but where nodes have too few rows for the product.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`BinLayout`           passive ->     bins per feature, which are categorical             TLS
`PaperSetup`          active ->      model id, records of kept rounds, the fixed point   TLS
`PaperTree`           active ->      which columns the tree may use                      TLS
`NodeRows`            active ->      how many nodes a level has                          TLS
`NamedRows`           active ->      rows of each node of a level, or of nodes won       TLS
1 `NullVectors`       active ->      U with V^T U = 0                                    too little, see below
1 `MaskedCandidates`  passive ->     rows in each bin, W = (I - Z Z^T) M                 too little, see below
2 `CandidateVectors`  passive ->     U with M*^T U = 0, M* = [M M' Y] with M' random     too little, see below
                                     bits, Y normal numbers
2 `MaskedGradients`   active ->      sums of grad and hess of each node,                 too little, see below
                                     W = (I - Z Z^T) V
2 `BestGains`         passive ->     the gain of the best own split of each node         TLS
1 `SplitRequest`      active ->      of each node the owner won: feature, bins going     TLS
                                     left
2 `WonNodes`          active ->      which nodes the owner won                           TLS
`SplitAnswer`         passive ->     record numbers, which rows of the nodes go left     TLS
`TreeEnd`, `CheckpointRequest`, `CheckpointReceipt`, `DecideRequest`, `Decisions`, `Finish`: as in `vertical.encrypted`
====================  =============  ==================================================  ========================

Z are some of U's columns, picked at random. All nodes of a level travel in one round, in messages of at most 64 MB; no
sums are obtained by subtraction. How many columns U, M' and Y have are options (`null_vectors`, `bit_columns`,
`normal_columns`); they shrink where a node has few rows, and where even the least do not fit, the party offers no split
there, which is logged.

It is secure against no adversary. The receiver of W tells Z from U (u is in Z when u^T W = 0) and rounds W to 0 and 1,
or to the two values of a first tree's gradients. The root's M, the same in all trees, and a row's g and h, the same at
all levels, follow exactly by linear algebra. `attacks` does so with recorded messages, see docs/fedxgboost.md. So
paper mode needs ``allow_insecure=True`` of every party.

Deviations from the paper: the active party is told how many rows each bin has (version 1), for missing values,
categories and `min_child_samples`; candidates are those of tie-aware bins, not of quantiles; sums are rounded
to whole numbers, so that splits equal the plain grower's; H^L is not overwritten where H^R is meant (an error in both
listings); version 2 checks the winner's rows against the gain it named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits

from treaty.errors import ConfigError
from treaty.messaging.conversation import Order
from treaty.messaging.leakage import MessageLeakage
from treaty.models.trees import ModelPart
from treaty.systems.fedxgboost_smm.options import PAPER_LEAKS, FedXGBoostSMM, check_consent
from treaty.systems.fedxgboost_smm.paper.candidates import (
    CandidatesByProduct,
    CandidatesFinder,
    CandidatesOwner,
    WonNodes,
)
from treaty.systems.fedxgboost_smm.paper.levels import (
    GradientVectors,
    NodeRows,
    OwnColumns,
    PaperColumns,
    PaperFinder,
    PaperTree,
    SumsByProduct,
    SumsFinderByProduct,
    mask_candidates,
)
from treaty.systems.pooled.training import own_columns
from treaty.systems.system import RoleInput
from treaty.systems.vertical.active import Start, finish, grow, open_training, start_of
from treaty.systems.vertical.column_owner import SplitOwner, ascending, bin_own_columns, show_layout, tree_table
from treaty.systems.vertical.encrypted_columns import SplitAnswer, SplitRequest, TreeEnd
from treaty.systems.vertical.named_rows import take_nodes
from treaty.systems.vertical.passive import Follower, TreeLimits

logger = logging.getLogger(__name__)

MOST_SUM_BITS = 46
"""Of sums in float64, which has 53, so that rounding errors stay far below 1."""


class PaperSetup(Start):
    """The values of one step of fixed-point grad and hess. Tells the labels' order of magnitude."""

    leakage: ClassVar = MessageLeakage("the order of magnitude of labels", "control")

    grad_unit: Annotated[float, msgspec.Meta(gt=0, lt=2.0**64)]
    hess_unit: Annotated[float, msgspec.Meta(gt=0, lt=2.0**64)]


# ---------------------------------------------------------------- active party


def active(inputs: RoleInput[FedXGBoostSMM]) -> ModelPart:
    """Train as the active party, see `fedxgboost_smm.fedxgboost_smm.active`."""
    _warn(inputs)
    party, common, threads, sizes = inputs.party, inputs.common, inputs.threads, inputs.options.sizes
    training = open_training(inputs)
    part, objective, n_rows = training.part, training.forest.objective, inputs.rows.table.n_rows
    objective.check_sums(n_rows)
    factor = 1.0 if common.one_side is None else max(1.0, common.one_side.factor)
    _check_sums(n_rows, factor * max(objective.grad_bound, objective.hess_bound), common.fractional_bits)
    own = own_columns(inputs.rows.table, common.most_bins, part.splits, threads)
    others: dict[str, PaperColumns]
    if inputs.options.version == 2:
        others = {peer: CandidatesByProduct(party, peer, n_rows, sizes.null_vectors) for peer in party.peers}
    else:
        shared = GradientVectors(party, n_rows, sizes)
        others = {peer: SumsByProduct(party, peer, n_rows, shared) for peer in party.peers}
    units = objective.grad_unit, objective.hess_unit
    for peer in party.peers:
        party.send(peer, PaperSetup(*start_of(training, peer), *units))
    sources = [others.get(name, own) for name in inputs.roles.owners]
    make: type[PaperFinder] = CandidatesFinder if inputs.options.version == 2 else SumsFinderByProduct
    finder = make(party, sources, n_rows, common.rules(objective), threads)
    # all parties of one process multiply side by side; one of them sets the process's limit, while all others follow
    with nullcontext() if inputs.alone else threadpool_limits(1, user_api="blas"):
        grow(inputs, training, finder, sources)
    finish(party)
    return part


def _check_sums(n_rows: int, bound: float, fractional_bits: int) -> None:
    """Refuse a job whose sums, of values up to `bound`, float64 does not hold exactly."""
    bits = (int(n_rows * bound) - 1).bit_length()
    if bits > MOST_SUM_BITS:
        raise ConfigError(
            f"sums of {n_rows} gradients at fractional_bits={fractional_bits} have {bits} bits, and matrix "
            f"products in float64 are exact up to {MOST_SUM_BITS}; lower fractional_bits"
        )


# ---------------------------------------------------------------- passive party


def passive(inputs: RoleInput[FedXGBoostSMM]) -> ModelPart:
    """Train as a passive party, see `fedxgboost_smm.fedxgboost_smm.passive`."""
    _warn(inputs)
    party, common, sizes = inputs.party, inputs.common, inputs.options.sizes
    (active,) = party.peers
    bins, codes = bin_own_columns(inputs)
    show_layout(inputs, bins)
    columns = OwnColumns(codes, bins.offsets, inputs.rows.table.schema.categorical)
    setup = party.receive(active, PaperSetup)
    follower = Follower(inputs, setup)
    owner = SplitOwner(active, codes, bins, follower.part.splits)
    rules = common.rules_of(setup.grad_unit, setup.hess_unit)
    finding = CandidatesOwner(party, columns, owner, rules, sizes, inputs.threads)
    limits = TreeLimits(active, common.max_depth, common.fewest_rows)
    features = np.empty(0, np.int32)

    def start_tree(tree: PaperTree) -> None:
        nonlocal features
        follower.limits.tree()
        follower.next_tree()
        features = ascending(tree.columns, codes.shape[1], active, "PaperTree.columns")
        limits.start(features)

    def split(request: SplitRequest) -> Iterator[SplitAnswer]:
        limits.split(request)
        named = take_nodes(party, active, request.features.shape[0], len(codes))
        return owner.divide_nodes(request, named, limits.node_sizes)

    def find(asked: NodeRows) -> None:
        limits.sums(asked.nodes, last=True)
        if inputs.options.version == 2:
            finding.find(asked, features)
        else:
            mask_candidates(party, active, asked, columns, features, sizes.null_vectors)

    order = tree_table(PaperTree, NodeRows, WonNodes if inputs.options.version == 2 else SplitRequest)
    return follower.follow(
        Order(order, "between trees"),
        {
            PaperTree: start_tree,
            TreeEnd: lambda _: None,
            SplitRequest: split,
            NodeRows: find,
            WonNodes: lambda won: finding.decide(won, limits),
        },
    )


def _warn(inputs: RoleInput[FedXGBoostSMM]) -> None:
    check_consent(inputs.options)
    logger.warning("insecure, with consent: %s", PAPER_LEAKS)
