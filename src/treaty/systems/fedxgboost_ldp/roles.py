"""FedXGBoost-LDP: passive parties choose splits themselves, on gradients that carry noise.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021
(arXiv 2106.10662), the protocol with local differential privacy.

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned. The
active party puts noise on every row's gradient, once for each tree (`noisy_gradients`), and sends what comes out in the
clear. Everybody computes the scores of its own candidates; who has the best one splits. Output: the active party gets
the trees and all leaf values, every party its own splits.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`Columns`             passive ->     how many there are                                  TLS
`Begin`               active ->      model id, records of kept rounds, fixed point       TLS
`NoisyTree`           active ->      noisy gradients of the tree's rows; hessians, for   local differential
                                     scores of the second order; their totals; sampled   privacy, epsilon a tree
                                     rows, columns
`Scores`              passive ->     of each node of the level, its best score           TLS
`SplitRequest`        active ->      the nodes that the receiver splits                  TLS
`SplitAnswer`         passive ->     record numbers, which rows of the nodes go left     TLS
`Divided`             active ->      which nodes of the last level were split, and how:  TLS; made of what was
                                     which of their rows go left, and their totals       sent
`Keep`, `Kept`        both ways      write a checkpoint; it is written                   TLS
`DecideRequest`       active ->      record numbers (eval rows, prediction, `refit`)     TLS
`Decisions`           passive ->     which rows go left at each record                   TLS
`Finish`              active ->      training is over                                    TLS
====================  =============  ==================================================  ========================

All nodes of a level travel in one message each way, and in one more to and from those who split.

**Public track.** Scores, splits, totals of nodes, leaf values and so the margins that the next gradients come of are
made of noisy gradients and columns alone. So all that passive parties see of labels is made of what epsilon covers, row
sets and the number of trees included. Of columns, all parties' own, it covers nothing: which rows go left at each split
is told as it is. True labels are used for two things: gradients before their noise, and, with `refit`,
leaf values of the model that is left, which nobody is sent. What epsilon does not cover: labels of eval sets where they
stop training early, the order of magnitude of the largest weight or target (the fixed point of what is sent).

Adversary: honest but curious; the noise holds whatever passive parties do and whoever colludes with whom.

Deviations from the paper: no exact sum is sent, for noise beside exact sums of nested nodes protects nothing. The score
of the first order takes the right child's sum from its own rows: as printed, from the exact total, it is wrong by the
variance of the left sum over lambda on average, and prefers splits with many rows on the left. Denominators are not
below lambda / 2. Gradients are sent once for each tree, not for each node. ``mode="paper"`` has the published form.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart
from treaty.privacy.ledger import Ledger
from treaty.systems.fedxgboost_ldp.noise import NoisyGradients, scoring_rules
from treaty.systems.fedxgboost_ldp.scoring import (
    Divided,
    NoisyTree,
    ScoredColumns,
    ScoreSplits,
    ScoringOwner,
    SplitRequest,
)
from treaty.systems.pooled.training import Labelled, Progress, begin, own_columns
from treaty.systems.tree_options import TreeOptions, check_ldp_consent
from treaty.systems.vertical.active import Keep, Start, finish, grow, terms
from treaty.systems.vertical.decisions import DecideRequest, Finish, ask_all, leaves
from treaty.systems.vertical.passive import Following
from treaty.trees.refit import refit_leaves

logger = logging.getLogger(__name__)


class Columns(Message):
    """How many columns the sender has."""

    count: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Begin(Start):
    """What one step of what is sent is worth. Tells bounds, so a weight above 1 to a power of two.

    `noisy_hess` says whether hessians carry noise as well.
    """

    grad_unit: Annotated[float, msgspec.Meta(gt=0)]
    hess_unit: Annotated[float, msgspec.Meta(gt=0)]
    noisy_hess: bool


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
    ledger: Ledger | None = None,
) -> ModelPart:
    """Train as the active party.

    Parameters
    ----------
    ledger : Ledger or None
        The key of the noise, and what was paid in all jobs. None: for this training.
    party, data, options, parties, classes, eval_sets, threads, progress, keeper
        See `secureboost.active`.

    Returns
    -------
    ModelPart
        Own splits, all trees and leaf values; `spent` says what was paid.

    Raises
    ------
    ConfigError, PeerProtocolError
        When parties disagree on parameters or rows, `epsilon_total` does not suffice for one round, or a party sends
        what the protocol does not allow.
    """
    check_ldp_consent(options)
    n_rows = data.table.n_rows
    agree(party, terms(options, n_rows, [e.table.n_rows for e in eval_sets]))
    begun = begin(data, options, party.name, tuple(parties), classes, eval_sets, keeper)
    part, forest = begun.part, begun.forest
    noise = NoisyGradients(
        ledger or Ledger(None), options, forest.objective, n_rows,
        weighted=data.weight is not None, model_id=part.model_id, job=party.job, first_tree=len(forest.trees),
        threads=threads,
    )  # fmt: skip
    scoring = scoring_rules(options, noise.units, noisy_hess=noise.noisy_hess)
    others = {}
    for peer in party.peers:
        records = begun.records[peer]
        party.send(peer, Begin(part.model_id, begun.resume is not None, records, *noise.units, noise.noisy_hess))
        others[peer] = ScoredColumns(party, peer, party.receive(peer, Columns).count, records)
    own = own_columns(data.table, options, part.splits, threads)
    sources = [others.get(name, own) for name in parties]
    finder = ScoreSplits(
        party, sources, n_rows, scoring, threads, noise.of,
        first_order=options.split_score == "first_order", exact=options.mode == "paper",
    )  # fmt: skip
    grow(party, data, options, begun, finder, sources, eval_sets, threads, progress, keeper, noise.rules())
    part.spent = noise.told(forest.rounds)
    if noise.stopped and forest.rounds == 0:
        raise ConfigError(f"epsilon_total does not suffice for one round: {noise.stopped}")
    if noise.stopped:
        logger.warning("training ended after %d rounds: %s", forest.rounds, noise.stopped)
    if options.refit:
        _refit(party, part, data, options, len(eval_sets), threads)
    finish(party)
    return part


def _refit(party: Party, part: ModelPart, data: Labelled, options: TreeOptions, number: int, threads: int) -> None:
    """Replace leaf values by those of true labels, for the own model alone."""
    assert part.forest is not None
    decided = ask_all(party, part, part.forest.trees, data.table.matrix(), number, threads)
    rules = options.rules(part.forest.objective)
    refit_leaves(part.forest, leaves(decided, threads), data.y, data.weight, rules, threads)


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
) -> ModelPart:
    """Train as a passive party: answer the active one, `party.peers[0]`, until it is done.

    Parameters
    ----------
    party, table, options, eval_tables, threads, progress, keeper
        See `secureboost.passive`.

    Returns
    -------
    ModelPart
        Own splits.
    """
    check_ldp_consent(options)
    (lead,) = party.peers
    agree(party, terms(options, table.n_rows, [t.n_rows for t in eval_tables]))
    begun = party.receive(lead, Begin)
    following = Following(party, begun, table, options, eval_tables, keeper)
    part = following.part
    columns = own_columns(table, options, part.splits, threads)
    if not math.isfinite(begun.grad_unit) or not math.isfinite(begun.hess_unit):
        raise PeerProtocolError(lead, f"expected finite units - at Begin from {lead}")
    owner = ScoringOwner(
        lead, columns, table.n_rows,
        scoring_rules(options, (begun.grad_unit, begun.hess_unit), noisy_hess=begun.noisy_hess), threads,
        first_order=options.split_score == "first_order",
    )  # fmt: skip
    party.send(lead, Columns(len(columns.categorical)))
    trees = 0
    while True:
        match party.receive(lead, NoisyTree, SplitRequest, Divided, DecideRequest, Keep, Finish):
            case NoisyTree() as tree:
                if progress is not None:
                    progress(trees, part)
                trees += 1
                party.round = trees
                scores = owner.start(tree)
                if scores is not None:
                    party.send(lead, scores)
            case SplitRequest() as request:
                party.send(lead, owner.split(request))
            case Divided() as divided:
                party.send(lead, owner.divide(divided))
            case DecideRequest() as request:
                following.decide(request, threads)
            case Keep():
                following.keep()
            case Finish():
                if progress is not None:
                    progress(trees, part)
                return part
