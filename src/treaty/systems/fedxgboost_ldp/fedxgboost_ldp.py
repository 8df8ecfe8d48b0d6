"""FedXGBoost-LDP: passive parties choose splits themselves, on gradients that carry noise.

Le, Liu, Nguyen, Liu, Liu, Cai, Hirche, "FedXGBoost: Privacy-Preserving XGBoost for Federated Learning", 2021
(arXiv 2106.10662), the protocol with local differential privacy.

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned. The
active party adds noise to every row's gradient, once for each tree (`noise.NoisyGradients`), and sends the result in
the clear. Every party computes the scores of its own candidates; the owner of the best one splits. Output: the active
party gets the trees and all leaf values, every party its own splits. All nodes of a level travel in one message each
way, and in one more to and from the parties that split. The messages are in `scoring`.

**What epsilon covers.** Scores, splits, totals of nodes, leaf values, and so the margins of the next gradients, are
computed from noisy gradients and columns alone. So everything that passive parties see, row sets and the number of
trees included, depends on labels only through what epsilon covers. True labels are used for gradients before their
noise and, with `refit`, for leaf values of the finished model, which are sent to no party. Epsilon does not cover
columns (each split shows which rows go left), labels of eval sets that stop training early, or the order of magnitude
of the largest weight or target (the fixed point of what is sent).

Adversary: honest but curious; the noise holds whatever passive parties do, and against any collusion.

Deviations from the paper: no exact sum is sent, because noise next to exact sums of nested nodes protects nothing. The
first-order score takes the right child's sum from its own rows. As printed, from the exact total, it is wrong by the
variance of the left sum over lambda on average, and prefers splits with many rows on the left. Denominators are at
least lambda / 2. Gradients are sent once for each tree, not for each node. ``mode="paper"`` is the published form.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from treaty.errors import BudgetSpent, PeerProtocolError
from treaty.machine.arrays import Floats, Int32s, Integers
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import Array, row_pieces
from treaty.models.checkpoints import ledger_folder
from treaty.models.trees import ModelPart, leaves
from treaty.privacy.ledger import Ledger
from treaty.systems.fedxgboost_ldp.noise import NoisyGradients, scoring_rules
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP, check_consent
from treaty.systems.fedxgboost_ldp.scoring import (
    CONVERSATION,
    ColumnCount,
    LevelDivision,
    NoiseSetup,
    NoisyTree,
    ScoredColumns,
    ScoredSplitAnswer,
    ScoredSplitRequest,
    Scores,
    TreeReader,
)
from treaty.systems.pooled.system import Training, own_columns
from treaty.systems.system import RoleInput
from treaty.systems.vertical.prediction import ask_all
from treaty.systems.vertical.training import (
    Follower,
    Handlers,
    agree_on_terms,
    boosting_of,
    finish,
    open_training,
    start_of,
)
from treaty.trees.boosting import Forest
from treaty.trees.columns import ColumnSource, SplitSearch
from treaty.trees.growth import Growth
from treaty.trees.splits import Level, SplitRules, Splits, best_of

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- active party


def active(inputs: RoleInput[FedXGBoostLDP]) -> ModelPart:
    """Train as the active party; labels that are randomised once are the noisy ones already.

    `inputs.store` has the ledger: the key of the noise, and the cost of all jobs; without it, the ledger is new.
    """
    party, options, common, threads = inputs.party, inputs.options, inputs.common, inputs.threads
    check_consent(options)
    training = open_training(inputs)
    part, forest, table = training.part, training.forest, inputs.rows.table
    noise = _noise(inputs, training)
    others = _columns_of_others(inputs, training, noise)
    own = own_columns(table, common, part.splits, threads)
    sources = [others.get(name, own) for name in inputs.roles.owners]
    # scores have their own rules: leaf weights need hessians even if scores do not
    rules = common.rules_of(*noise.units)
    scoring = scoring_rules(rules, first_order=options.first_order, noisy_hess=noise.noisy_hess)

    boosting = boosting_of(inputs, training, sources, rules)
    for a_round in boosting:
        for sample in a_round.trees():
            # paid for before it is sent; drawn from the ledger's key, so that a resumed training sends the same
            noisy = noise.of(sample, boosting.margins)
            if noisy is None:  # the budget is spent: the model is the rounds so far
                boosting.stop()
                break
            sent, counted = noisy  # the same outside paper mode
            for columns in others.values():
                columns.totals, columns.divided = counted.totals, None
            search = SplitSearch(sources, sent, scoring, threads)  # [Alg. 5, step 1] g*, h* to all, once a tree
            party.round += 1
            # nodes' totals, and so leaf weights and the next gradients, are computed from what was sent
            rows, growth = sample.partition(threads), Growth(counted.totals, rules)
            while growth.level is not None:
                level = growth.level
                search.ask(level, rows)  # [Alg. 5, step 2] the rows of its nodes: how the last level was divided
                scores = [  # [Alg. 5, step 3] of each party the best score of each node, and nothing else
                    source.best(k) if isinstance(source, ScoredColumns) else search.scan(k, level)
                    for k, source in enumerate(sources)
                ]
                best = best_of(scores, level.totals, scoring)
                won = np.flatnonzero(best.feature >= 0)
                nodes, splits = level.nodes[won], best.take(won)
                # [Alg. 5, step 4] the best party records its split and sends which rows go left
                records, left = search.decide(nodes, splits, rows)
                # own splits have their left totals by the scan, unless that was over other gradients (paper mode)
                foreign = [isinstance(sources[k], ScoredColumns) or counted is not sent for k in splits.source]
                unknown = np.flatnonzero(foreign)
                splits.left_totals[unknown] = rows.left_totals(counted.grad, counted.hess, nodes, left, unknown)
                best.left_totals[won] = splits.left_totals
                _check_scores(sources, level.totals[won[unknown]], splits.take(unknown), scoring, options.mode)
                divided = growth.take(best)
                if divided is not None:
                    nodes, children, splits = divided
                    rows.divide(nodes, children, left)
                    growth.divided(records)
                    for columns in others.values():
                        columns.divided = np.isin(np.arange(len(level.nodes)), won), left, splits.left_totals
            search.end()
            a_round.add(growth.tree(), rows)  # [Alg. 5, step 5] leaf weights, from what was sent

    part.spent = noise.report(forest.rounds)
    if common.penalty == options.default_lambda > 1.0:
        part.spent += f". reg_lambda={common.penalty:g} follows from the noise"
    if noise.stopped and forest.rounds == 0:
        raise BudgetSpent(f"no round can be paid for: {noise.stopped}")
    if noise.stopped:
        logger.warning("training ended after %d rounds: %s", forest.rounds, noise.stopped)
    if options.refit:
        after_eval_sets = len(inputs.eval_sets)  # the number of the training rows among sets to decide
        found = ask_all(party, part, forest.trees, table, after_eval_sets, threads)
        refit_leaves(
            forest, leaves(found, threads), inputs.rows.y, inputs.rows.weight, common.rules(forest.objective), threads
        )
    finish(party)
    return part


def _noise(inputs: RoleInput[FedXGBoostLDP], training: Training) -> NoisyGradients:
    """Return the noise on this training's gradients, which is paid for in the party's ledger."""
    folder = None if inputs.store is None else ledger_folder(inputs.store, inputs.party.name, "noise")
    return NoisyGradients(
        Ledger(folder, inputs.epsilon_limits), inputs.options, training.forest.objective, inputs.rows.table.n_rows,
        weighted=inputs.rows.weight is not None, model_id=training.part.model_id, job=inputs.party.job,
        first_tree=len(training.forest.trees), threads=inputs.threads,
    )  # fmt: skip


def _columns_of_others(
    inputs: RoleInput[FedXGBoostLDP], training: Training, noise: NoisyGradients
) -> dict[str, ScoredColumns]:
    """Send every passive party the set-up; return their columns as sources of scores."""
    party, others = inputs.party, {}
    for peer in party.peers:
        party.send(peer, NoiseSetup(*start_of(training, peer), *noise.units, noise.noisy_hess))
        n_columns, records = party.receive(peer, ColumnCount).count, training.records[peer]
        others[peer] = ScoredColumns(party, peer, n_columns, records, first_order=inputs.options.first_order)
    return others


def _check_scores(
    sources: list[ScoredColumns | ColumnSource], totals: Integers, splits: Splits, scoring: SplitRules, mode: str
) -> None:
    """Reject splits with too few rows on a side, or worse than their score, which kept others from splitting."""
    left = splits.left_totals
    wrong = np.minimum(left[:, 2], totals[:, 2] - left[:, 2]) < scoring.min_child_samples
    # in paper mode totals are exact, and not those that were scored
    if mode != "paper":
        # both sides compute the same operations on the same integers; processors may differ in the last bits
        wrong |= ~(np.abs(scoring.gain(totals, left) - splits.gain) <= 1e-6 * splits.gain + 1e-8)
    for k in splits.source[wrong].tolist():
        source = sources[k]
        assert isinstance(source, ScoredColumns)
        raise PeerProtocolError(
            source.peer, f"expected a split as good as its score, of children with enough rows - from {source.peer}"
        )


# ---------------------------------------------------------------- passive party


def passive(inputs: RoleInput[FedXGBoostLDP]) -> ModelPart:
    """Train as a passive party: answer the active party until it has finished."""
    party, options, common, table = inputs.party, inputs.options, inputs.common, inputs.rows.table
    check_consent(options)
    (active,) = party.peers
    agree_on_terms(inputs)
    setup = party.receive(active, NoiseSetup)
    follower = Follower(inputs, setup)
    columns = own_columns(table, common, follower.part.splits, inputs.threads)
    if not math.isfinite(setup.grad_unit) or not math.isfinite(setup.hess_unit):
        raise PeerProtocolError(active, "expected finite units", at="NoiseSetup")
    rules = scoring_rules(
        common.rules_of(setup.grad_unit, setup.hess_unit), first_order=options.first_order, noisy_hess=setup.noisy_hess
    )
    reader = TreeReader(party, table.n_rows, len(columns.categorical), first_order=options.first_order)
    owner = _Owner(columns, reader, rules, inputs.threads)
    party.send(active, ColumnCount(len(columns.categorical)))
    order = MessageOrder(CONVERSATION, "between trees")

    def start_tree(tree: NoisyTree) -> Scores | None:
        follower.limits.tree()
        scores = owner.start(tree)
        follower.next_tree()
        if scores is None:  # the root is a leaf
            order.state = "between trees"
        return scores

    handlers: Handlers = {NoisyTree: start_tree, ScoredSplitRequest: owner.split, LevelDivision: owner.divide}
    return follower.follow(order, handlers)


class _Owner:
    """A passive party within a tree: it grows the same tree as the active one, but scores only its own columns."""

    def __init__(self, columns: ColumnSource, reader: TreeReader, rules: SplitRules, threads: int) -> None:
        self._columns, self._reader, self._rules, self._threads = columns, reader, rules, threads

    def start(self, tree: NoisyTree) -> Scores | None:
        """Take a tree's gradients (step 1); return the root's score, or None if it is a leaf."""
        sample, totals = self._reader.tree(tree)
        self._search = SplitSearch([self._columns], sample, self._rules, self._threads)
        self._rows, self._growth = sample.partition(self._threads), Growth(totals, self._rules)
        return None if self._growth.level is None else self._score(self._growth.level)

    def divide(self, message: LevelDivision) -> Scores:
        """Divide a level as the active party did (step 2); return the scores of the next level."""
        splits, left = self._reader.division(message, self._level, self._rows)
        divided, below = self._growth.take(splits), self._growth.level
        if divided is None or below is None:
            active = self._reader.active
            raise PeerProtocolError(active, f"expected a division with a level below it - from {active}")
        self._rows.divide(*divided[:2], left)
        return self._score(below)

    def _score(self, level: Level) -> Scores:
        """Find this party's best split of every node of the level (step 3); return only the gains."""
        self._level = level
        self._search.ask(level, self._rows)
        self._found = self._search.choose(level)
        return Scores(Array.of(self._found.gain))

    def split(self, request: ScoredSplitRequest) -> Iterator[ScoredSplitAnswer]:
        """Record the splits of the nodes that this party has won, and decide their rows (step 4)."""
        won = self._reader.won(request, self._found)
        records, left = self._search.decide(self._level.nodes[won], self._found.take(won), self._rows)
        recorded = Array.of(records)
        return (ScoredSplitAnswer(recorded, Array.of(np.packbits(left[of]))) for of in row_pieces(len(left), 1))


# ---------------------------------------------------------------- new leaf values from true labels (`refit`)


def refit_leaves(
    forest: Forest, leaves: Int32s, y: Floats, weight: Floats | None, rules: SplitRules, threads: int = 1
) -> None:
    """Replace all leaf values by those that boosting gives on these labels, tree after tree, with the same splits.

    `leaves`, int32 (n_rows, n_trees), has the leaf of each row; `rules` are in the objective's fixed point.
    """
    objective = forest.objective
    margins = np.full((len(y), objective.n_outputs), objective.base_margins)
    for first in range(0, len(forest.trees), objective.n_outputs):
        grads, hesses, _ = objective.gradients(margins, y, weight, threads)
        for output, (grad, hess) in enumerate(zip(grads, hesses, strict=True)):
            tree, of_row = forest.trees[first + output], leaves[:, first + output]
            totals = np.zeros((len(tree.left), 3), np.int64)
            np.add.at(totals, of_row, np.stack([grad, hess, np.ones_like(grad)], axis=1))
            value = np.where(tree.left < 0, rules.leaf_value(totals), 0.0)
            forest.trees[first + output] = replace(tree, value=value)
            margins[:, output] += value[of_row]
