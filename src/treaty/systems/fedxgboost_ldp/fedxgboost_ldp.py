"""FedXGBoost-LDP: passive parties choose splits themselves, on gradients that carry noise.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021
(arXiv 2106.10662), the protocol with local differential privacy.

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned. The
active party puts noise on every row's gradient, once for each tree (`noise.NoisyGradients`), and sends the result in
the clear. Every party computes the scores of its own candidates; the owner of the best one splits. Output: the active
party gets the trees and all leaf values, every party its own splits.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`NoiseSetup`          active ->      model id, records of kept rounds, fixed point       TLS
`ColumnCount`         passive ->     how many columns it has                             TLS
`NoisyTree`           active ->      noisy gradients of the tree's rows; hessians, for   local differential
                                     scores of the second order; their totals; sampled   privacy, epsilon a tree
                                     rows, columns
`Scores`              passive ->     of each node of the level, its best score           TLS
`ScoredSplitRequest`  active ->      the nodes that the receiver splits                  TLS
`ScoredSplitAnswer`   passive ->     record numbers, which rows of the nodes go left     TLS
`LevelDivision`       active ->      which nodes of the last level were split, and how:  TLS; made of what was
                                     which of their rows go left, and their totals       sent
`CheckpointRequest`, `CheckpointReceipt`        both ways      write a checkpoint; it is written                   TLS
`DecideRequest`       active ->      record numbers (eval rows, prediction, `refit`)     TLS
`Decisions`           passive ->     which rows go left at each record                   TLS
`Finish`              active ->      training is over                                    TLS
====================  =============  ==================================================  ========================

All nodes of a level travel in one message each way, and in one more to and from those who split.

**What epsilon covers.** Scores, splits, totals of nodes, leaf values, and so the margins that the next gradients are
computed from, are made of noisy gradients and columns alone. So all that passive parties see, row sets and the number
of trees included, depends on labels only through what epsilon covers. True labels are used for two things: gradients
before their noise, and, with `refit`, leaf values of the finished model, which nobody is sent. Epsilon does not cover
columns (which rows go left at each split is told as it is), labels of eval sets where they stop training early, and the
order of magnitude of the largest weight or target (the fixed point of what is sent).

Adversary: honest but curious; the noise holds whatever passive parties do and whoever colludes with whom.

Deviations from the paper: no exact sum is sent, for noise beside exact sums of nested nodes protects nothing. The score
of the first order takes the right child's sum from its own rows: as printed, from the exact total, it is wrong by the
variance of the left sum over lambda on average, and prefers splits with many rows on the left. Denominators are not
below lambda / 2. Gradients are sent once for each tree, not for each node. ``mode="paper"`` has the published form.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from treaty.errors import BudgetSpent, PeerProtocolError
from treaty.machine.arrays import Floats, Int32s
from treaty.messaging.conversation import Order
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message
from treaty.models.checkpoints import noise_folder
from treaty.models.trees import ModelPart, leaves
from treaty.privacy.ledger import Ledger
from treaty.systems.fedxgboost_ldp.noise import NoisyGradients, scoring_rules
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP, check_consent
from treaty.systems.fedxgboost_ldp.scoring import (
    CONVERSATION,
    LevelDivision,
    NoisyTree,
    ScoredColumns,
    ScoredSplitRequest,
    Scores,
    ScoreSplits,
    ScoringOwner,
)
from treaty.systems.pooled.training import own_columns
from treaty.systems.sizes import ColumnSize
from treaty.systems.system import RoleInput
from treaty.systems.vertical.active import Start, agree_on_terms, finish, grow, open_training, start_of
from treaty.systems.vertical.decisions import ask_all
from treaty.systems.vertical.passive import Follower, Handlers
from treaty.trees.boosting import Forest
from treaty.trees.splits import SplitRules

# ------------------------------------------ new leaf values, by the true labels, for trees whose splits stay (`refit`)


def refit_leaves(
    forest: Forest, leaves: Int32s, y: Floats, weight: Floats | None, rules: SplitRules, threads: int = 1
) -> None:
    """Replace all leaf values by those that boosting gives on these labels, tree after tree, with the same splits.

    `leaves`, int32 (n_rows, n_trees), is the leaf each row ends in; `rules` are in the objective's fixed point.
    """
    objective = forest.objective
    margins = np.full((len(y), objective.n_outputs), objective.base_margins)
    for first in range(0, len(forest.trees), objective.n_outputs):
        grads, hesses, _ = objective.gradients(margins, y, weight, threads)
        for output, (grad, hess) in enumerate(zip(grads, hesses, strict=True)):
            tree, of_row = forest.trees[first + output], leaves[:, first + output]
            totals = np.zeros((len(tree.left), 3), np.int64)
            np.add.at(totals, of_row, np.stack([grad, hess, np.ones_like(grad)], axis=1))
            value = np.where(tree.left < 0, rules.learning_rate * rules.leaf_weight(totals), 0.0)
            forest.trees[first + output] = replace(tree, value=value)
            margins[:, output] += value[of_row]


# ---------------------------------------------------------------- roles


logger = logging.getLogger(__name__)


class ColumnCount(Message):
    """How many columns the sender has."""

    leakage: ClassVar = MessageLeakage("how many columns the sender has", "control")

    count: ColumnSize


class NoiseSetup(Start):
    """The values of one fixed-point step of grad and hess. Tells bounds, so a largest weight above 1 to a power of two.

    `noisy_hess` says whether hessians carry noise as well.
    """

    leakage: ClassVar = MessageLeakage("bounds of gradients, so about the largest weight above 1", "control")

    grad_unit: Annotated[float, msgspec.Meta(gt=0)]
    hess_unit: Annotated[float, msgspec.Meta(gt=0)]
    noisy_hess: bool


# ---------------------------------------------------------------- active party


def active(inputs: RoleInput[FedXGBoostLDP]) -> ModelPart:
    """Train as the active party.

    Parameters
    ----------
    inputs : RoleInput
        With labels (for `label_rr` the noisy ones), own columns (perhaps none), and every passive party as a peer. Its
        `store` has the ledger: the key of the noise, and what was paid in all jobs; without one, for this training.

    Returns
    -------
    ModelPart
        Own splits, all trees and leaf values; `spent` says what was paid.

    Raises
    ------
    ConfigError, PeerProtocolError
        When parties disagree on parameters or rows, no round can be paid for, or a party sends what the protocol does
        not allow.
    """
    party, data, options, common, threads = inputs.party, inputs.rows, inputs.options, inputs.common, inputs.threads
    check_consent(options)
    training = open_training(inputs)
    part, forest, n_rows = training.part, training.forest, data.table.n_rows
    noise = NoisyGradients(
        Ledger(None if inputs.store is None else noise_folder(inputs.store, party.name), inputs.epsilon_limits),
        options,
        forest.objective, n_rows,
        weighted=data.weight is not None, model_id=part.model_id, job=party.job, first_tree=len(forest.trees),
        threads=threads,
    )  # fmt: skip
    rules = common.rules_of(*noise.units)
    others = {}
    for peer in party.peers:
        party.send(peer, NoiseSetup(*start_of(training, peer), *noise.units, noise.noisy_hess))
        others[peer] = ScoredColumns(party, peer, party.receive(peer, ColumnCount).count, training.records[peer])
    own = own_columns(data.table, common.most_bins, part.splits, threads)
    sources = [others.get(name, own) for name in inputs.roles.owners]
    finder = ScoreSplits(
        party,
        sources,
        n_rows,
        scoring_rules(rules, first_order=options.first_order, noisy_hess=noise.noisy_hess),
        threads,
        noise.of,
        first_order=options.first_order,
        exact=options.mode == "paper",
    )
    grow(inputs, training, finder, sources, rules)
    part.spent = noise.told(forest.rounds)
    if noise.stopped and forest.rounds == 0:
        raise BudgetSpent(f"no round can be paid for: {noise.stopped}")
    if noise.stopped:
        logger.warning("training ended after %d rounds: %s", forest.rounds, noise.stopped)
    if options.refit:
        _refit(inputs, part)
    finish(party)
    return part


def _refit(inputs: RoleInput, part: ModelPart) -> None:
    """Replace leaf values by those of true labels, in the own model alone."""
    forest, data = part.forest, inputs.rows
    assert forest is not None
    after_eval_sets = len(inputs.eval_sets)  # the number of the training rows among sets to decide
    found = ask_all(inputs.party, part, forest.trees, data.table.matrix(), after_eval_sets, inputs.threads)
    rules = inputs.common.rules(forest.objective)
    refit_leaves(forest, leaves(found, inputs.threads), data.y, data.weight, rules, inputs.threads)


# ---------------------------------------------------------------- passive party


def passive(inputs: RoleInput[FedXGBoostLDP]) -> ModelPart:
    """Train as a passive party: answer the active one until it is done."""
    party, options, common, table = inputs.party, inputs.options, inputs.common, inputs.rows.table
    check_consent(options)
    (active,) = party.peers
    agree_on_terms(inputs)
    setup = party.receive(active, NoiseSetup)
    follower = Follower(inputs, setup)
    columns = own_columns(table, common.most_bins, follower.part.splits, inputs.threads)
    if not math.isfinite(setup.grad_unit) or not math.isfinite(setup.hess_unit):
        raise PeerProtocolError(active, f"expected finite units - at NoiseSetup from {active}")
    rules = scoring_rules(
        common.rules_of(setup.grad_unit, setup.hess_unit), first_order=options.first_order, noisy_hess=setup.noisy_hess
    )
    owner = ScoringOwner(party, columns, table.n_rows, rules, inputs.threads, first_order=options.first_order)
    party.send(active, ColumnCount(len(columns.categorical)))
    order = Order(CONVERSATION, "between trees")

    def start_tree(tree: NoisyTree) -> Scores | None:
        follower.limits.tree()
        scores = owner.start(tree)
        follower.next_tree()
        if scores is None:  # the root is a leaf
            order.state = "between trees"
        return scores

    handlers: Handlers = {NoisyTree: start_tree, ScoredSplitRequest: owner.split, LevelDivision: owner.divide}
    return follower.follow(order, handlers)
