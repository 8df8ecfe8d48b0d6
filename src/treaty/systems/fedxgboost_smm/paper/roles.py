"""FedXGBoost-SMM as published (``mode="paper"``): split sums by matrix products with null vectors. Insecure.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021
(arXiv 2106.10662), on the product of Karr, Lin, Reiter, Sanil, Journal of Official Statistics 25(1), 2009
(`crypto.matrix_product`).

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned. Of a
node with n rows, V = [g h] (n, 2) is the active party's and M (n, l), a column of 0 and 1 for each split candidate, a
passive party's; the left sums of all its candidates are M^T V. In version 1 the active party sends null vectors of V
and gets the sums; in version 2 each passive party sends null vectors of M, mixed with random columns, gets the sums of
its candidates and says its best gain. Output: the active party gets the trees and all leaf weights, every party its own
splits. The trees are those of the plain grower, bit for bit, but where nodes have too few rows for the product.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`Layout`              passive ->     bins per feature, which are categorical             TLS
`PaperSetup`          active ->      model id, records of kept rounds, the fixed point   TLS
`PaperTree`           active ->      which columns the tree may use                      TLS
1 `NullVectors`       active ->      rows of each node of a level, U with V^T U = 0      too little, see below
1 `MaskedCandidates`  passive ->     rows in each bin, W = (I - Z Z^T) M                 too little, see below
2 `NodeRows`          active ->      rows of each node of a level                        TLS
2 `CandidateVectors`  passive ->     U with M*^T U = 0, M* = [M M' Y] with M' random     too little, see below
                                     bits, Y normal numbers
2 `MaskedGradients`   active ->      sums of grad and hess of each node,                 too little, see below
                                     W = (I - Z Z^T) V
2 `BestGains`         passive ->     the gain of the best own split of each node         TLS
1 `SplitRequest`      active ->      of each node the owner won: feature, bins going     TLS
                                     left, the node's rows
2 `Won`               active ->      which nodes the owner won, their rows               TLS
`SplitAnswer`         passive ->     record numbers, which rows of the nodes go left     TLS
`TreeEnd`, `Keep`, `Kept`, `DecideRequest`, `Decisions`, `Finish`: as in `secureboost`
====================  =============  ==================================================  ========================

Z are some of U's columns, picked at random. All nodes of a level travel in one message each way; no node's sums are had
by subtraction. Sizes are those of `crypto.matrix_product.Sizes`; where a node has too few rows they shrink, and where
even the least do not fit, the party offers no split there, which is logged.

Adversary: none, it must be said. The receiver of W tells Z from U (u is in Z when u^T W = 0) and rounds W to 0 and 1,
or to the two values that gradients have in the first tree; the root's M, which is the same in all trees, and the g and
h of a row, which are the same at all levels, follow exactly by linear algebra. `privacy.smm_attacks` does all that to
recorded messages, docs/fedxgboost.md has the table. So paper mode needs ``allow_insecure=True`` of every party.

Deviations from the paper: the active party is told how many rows each bin has (version 1), for missing values,
categories and `min_child_samples`; candidates are those of `max_bin` tie-aware bins, not 20 quantiles; sums are rounded
to the whole numbers they stand for, so that splits equal the plain grower's; H^L is not overwritten where H^R is meant
(an error in both listings); version 2 holds the winner's rows against the gain it named.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from treaty.data.binning import fit_bins
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Array
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart
from treaty.systems.fedxgboost_smm.paper.candidates import (
    CandidatesByProduct,
    CandidatesFinder,
    CandidatesOwner,
    NodeRows,
    Won,
)
from treaty.systems.fedxgboost_smm.paper.levels import OwnColumns, PaperColumns, PaperFinder, PaperTree
from treaty.systems.fedxgboost_smm.paper.matrix_product import Sizes
from treaty.systems.fedxgboost_smm.paper.sums import (
    GradientVectors,
    NullVectors,
    SumsByProduct,
    SumsFinderByProduct,
    mask_candidates,
    nodes_asked,
)
from treaty.systems.pooled.training import Labelled, Progress, begin, own_columns
from treaty.systems.tree_options import SMM_PAPER_LEAKS, TreeOptions, check_smm_consent
from treaty.systems.vertical.active import Keep, Start, finish, grow, terms
from treaty.systems.vertical.column_owner import SplitOwner, TreeOrder, ascending
from treaty.systems.vertical.decisions import DecideRequest, Finish
from treaty.systems.vertical.encrypted_columns import Layout, SplitRequest, TreeEnd
from treaty.systems.vertical.passive import Following
from treaty.trees.objectives import Objective

logger = logging.getLogger(__name__)

MOST_SUM_BITS = 46
"""Of sums in float64, which has 53: what rounding errors add up to stays far below 1."""


class PaperSetup(Start):
    """What one step of a grad and of a hess sum is worth. Tells the labels' order of magnitude."""

    grad_unit: Annotated[float, msgspec.Meta(gt=0, lt=2.0**64)]
    hess_unit: Annotated[float, msgspec.Meta(gt=0, lt=2.0**64)]


# ---------------------------------------------------------------- active party


def active(
    party: Party,
    data: Labelled,
    options: TreeOptions,
    *,
    parties: Sequence[str],
    classes: list[Category] | None,
    eval_sets: Sequence[Labelled] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    sizes: Sizes | None = None,
) -> ModelPart:
    """Train as the active party.

    Parameters
    ----------
    sizes : Sizes or None
        How many null vectors are drawn (version 1); None for the defaults.
    party, data, options, parties, classes, eval_sets, threads, progress, keeper
        See `secureboost.active`.

    Returns
    -------
    ModelPart
        Own splits, all trees and leaf weights.

    Raises
    ------
    ConfigError, PeerProtocolError
        When consent is missing, parties disagree on parameters or rows, sums do not fit float64, or a party sends what
        the protocol does not allow.
    """
    check_smm_consent(options)
    logger.warning("insecure, with consent: %s", SMM_PAPER_LEAKS)
    n_rows, sizes = data.table.n_rows, sizes or Sizes()
    agree(party, terms(options, n_rows, [e.table.n_rows for e in eval_sets]))
    begun = begin(data, options, party.name, tuple(parties), classes, eval_sets, keeper)
    objective = begun.forest.objective
    _check_sums(objective, n_rows, options)
    own = own_columns(data.table, options, begun.part.splits, threads)
    others: dict[str, PaperColumns]
    if options.version == 2:
        others = {peer: CandidatesByProduct(party, peer, n_rows) for peer in party.peers}
    else:
        shared = GradientVectors(party, n_rows, sizes)
        others = {peer: SumsByProduct(party, peer, n_rows, shared) for peer in party.peers}
    units = objective.grad_unit, objective.hess_unit
    for peer in party.peers:
        party.send(peer, PaperSetup(begun.part.model_id, begun.resume is not None, begun.records[peer], *units))
    sources = [others.get(name, own) for name in parties]
    make: type[PaperFinder] = CandidatesFinder if options.version == 2 else SumsFinderByProduct
    finder = make(party, sources, n_rows, options.rules(objective), threads)
    grow(party, data, options, begun, finder, sources, eval_sets, threads, progress, keeper)
    finish(party)
    return begun.part


def _check_sums(objective: Objective, n_rows: int, options: TreeOptions) -> None:
    """Refuse a job whose sums float64 does not hold exactly."""
    objective.check_sums(n_rows)
    factor = 1.0 if options.one_side is None else max(1.0, options.one_side.factor)
    bits = (int(n_rows * factor * max(objective.grad_bound, objective.hess_bound)) - 1).bit_length()
    if bits > MOST_SUM_BITS:
        raise ConfigError(
            f"sums of {n_rows} gradients at fractional_bits={options.fractional_bits} have {bits} bits, and matrix "
            f"products in float64 are exact up to {MOST_SUM_BITS}; lower fractional_bits"
        )


# ---------------------------------------------------------------- passive party


def passive(
    party: Party,
    table: Table,
    options: TreeOptions,
    *,
    eval_tables: Sequence[Table] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    sizes: Sizes | None = None,
) -> ModelPart:
    """Train as a passive party: answer the active one, `party.peers[0]`, until it is done.

    Parameters
    ----------
    sizes : Sizes or None
        How many random columns and null vectors are drawn (version 2); None for the defaults.
    party, table, options, eval_tables, threads, progress, keeper
        See `secureboost.passive`.

    Returns
    -------
    ModelPart
        Own splits.
    """
    check_smm_consent(options)
    logger.warning("insecure, with consent: %s", SMM_PAPER_LEAKS)
    (lead,) = party.peers
    agree(party, terms(options, table.n_rows, [t.n_rows for t in eval_tables]))
    bins = fit_bins(table, options.max_bin, threads)
    categorical = table.schema.categorical
    columns = OwnColumns(bins.transform(table, threads), bins.offsets, categorical)
    party.send(lead, Layout(Array.of(bins.offsets), Array.of(categorical)))
    setup = party.receive(lead, PaperSetup)
    following = Following(party, setup, table, options, eval_tables, keeper)
    part = following.part
    owner = SplitOwner(lead, columns.codes, bins, part.splits)
    rules = options.rules_of(setup.grad_unit, setup.hess_unit)
    finding = CandidatesOwner(party, columns, owner, rules, sizes or Sizes(), threads)
    order = TreeOrder(lead, options.max_depth, options.fewest_rows, by_column=False)
    asking = (NodeRows, Won) if options.version == 2 else (NullVectors, SplitRequest)
    trees, features = 0, np.empty(0, np.int32)
    while True:
        match party.receive(lead, PaperTree, TreeEnd, *asking, DecideRequest, Keep, Finish):
            case PaperTree() as begun:
                if progress is not None:
                    progress(trees, part)
                features = ascending(begun.columns, len(categorical), lead, "PaperTree.columns")
                order.start(features)
                trees += 1
                party.round = trees
            case NullVectors() as asked:
                order.sums(asked, nodes_asked(asked))
                party.send(lead, mask_candidates(asked, lead, columns, features))
            case SplitRequest() as request:
                order.split(request)
                party.send(lead, owner.divide(request))
            case NodeRows() as asked:
                order.sums(asked, asked.nodes)
                finding.find(asked, features)
            case Won() as won:
                party.send(lead, finding.decide(won, order))
            case TreeEnd():
                order.end()
            case DecideRequest() as request:
                following.decide(request, threads)
            case Keep():
                following.keep()
            case Finish():
                if progress is not None:
                    progress(trees, part)
                return part
            case other:
                raise PeerProtocolError(lead, f"expected a message of training - at {type(other).__name__} from {lead}")
