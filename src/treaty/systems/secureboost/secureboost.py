"""SecureBoost: lossless boosting on columns of several parties, over encrypted gradients. Both roles, as in the paper.

Cheng, Fan, Jin, Liu, Chen, Papadopoulos, Yang, "SecureBoost: A Lossless Federated Learning Framework", IEEE
Intelligent Systems 2021 (arXiv 1901.08755); packing after Chen et al., SecureBoost+ (arXiv 2110.10927).

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned.
Output: the active party gets the trees and all leaf weights, every party its own splits. The trees are, bit for bit,
those of the plain grower on the joined table (but for `rl_trees` and `purity_guard`, which leave splits out).

Comments give the lines of the paper's algorithms; every line of a printed listing counts, with `for`, `end for` and
comments. The active party asks about all nodes of a level in one message, and of two siblings only about the smaller:
the other's sums are the parent's minus these. Under the lattice map (docs/lattice.md) a node is an encrypted vector, so
that passive parties do not see its rows. Sealed sums (``sums="sealed"``) follow the same algorithms on shares that
nobody opens (`vertical/sealed_active.py`).

Comments name the messages where they are sent; docs/secureboost.md lists them, and what each reveals. Adversary:
honest but curious, no party colludes with the active one; `system.py` says what each party can conclude. Deviations
from the paper: candidates are not shuffled, as their nested sums show the order anyway; the active party computes leaf
weights from its own gradients; missing values and categories. ``mode="paper"`` has the paper's cipher, keys, and
answers without re-randomisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.messaging.messages import Message
from treaty.models.trees import ModelPart, margins
from treaty.privacy.leaks import mixed_nodes
from treaty.systems.observers import TreeFinished
from treaty.systems.secureboost import shared_prediction
from treaty.systems.secureboost.hidden_partner import train_passive
from treaty.systems.secureboost.hidden_training import train_active
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import RoleInput
from treaty.systems.vertical import messages
from treaty.systems.vertical.column_owner import ColumnOwner, bin_own_columns
from treaty.systems.vertical.prediction import collect, online_active, online_passive, predict_passive
from treaty.systems.vertical.sealed_active import SealedSearch
from treaty.systems.vertical.setup import set_up_active, set_up_passive
from treaty.systems.vertical.training import boosting_of, open_training
from treaty.trees.columns import MayShow, SplitSearch
from treaty.trees.lockstep import Lockstep, LockstepRows, joined_sample
from treaty.trees.splits import Level, Splits, best_of, scan

# ---------------------------------------------------------------- training


def active(inputs: RoleInput[SecureBoost]) -> ModelPart:
    """Train as the active party; with `label_rr` the labels are those after noise."""
    if inputs.options.hides_rows:
        return train_active(inputs)
    may_show, alone_rounds = _guard(inputs), inputs.options.rl_trees or 0
    training = open_training(inputs)
    # `Setup`, keys and public seeds go to the passive parties; `BinLayout` and `Hint` come from them
    with set_up_active(inputs, training, alone_rounds=alone_rounds) as columns:
        for a_round in boosting_of(inputs, training, columns.sources):
            # Reduced-Leakage SecureBoost (section 6): the first trees reveal most about labels, so they are grown on
            # the active party's own columns and passive parties see nothing of them; later trees fit residuals.
            alone = a_round.number < alone_rounds
            # independent trees of a round, those of its classes, grow together under the lattice map
            for samples in a_round.batches(1 if alone or may_show else columns.together):
                rows, growth = LockstepRows(samples, inputs.threads), Lockstep(samples, columns.rules)
                # <g_i> and <h_i> go to the passive parties, unless alone: `TreeStart`, `TreeRows`
                search = columns.search(joined_sample(samples), alone=alone, may_show=may_show)
                while growth.level is not None:
                    # algorithm 1, at every passive party that may see the node: `SumsRequest`, in parts `SumsPiece`
                    search.ask(growth.level, rows)
                    chosen = growth.take(find_splits(search, growth.level))  # None: no node of the level has a split
                    if chosen is not None:
                        split_nodes(search, growth, rows, *chosen)
                search.end()  # `TreeEnd` to the passive parties
                # leaf weights follow from the active party's own gradients
                for (tree, directions), of_tree in zip(growth.trees(), rows.of_trees, strict=True):
                    a_round.add(tree, of_tree)
                    inputs.observers.event(TreeFinished(tree, of_tree, directions))
    return training.part


def passive(inputs: RoleInput[SecureBoost]) -> ModelPart:
    """Train as a passive party: answer the active one until it is done."""
    if inputs.options.hides_rows:
        return train_passive(inputs)
    bins, codes = bin_own_columns(inputs)  # [Alg. 1, lines 1-3] S_k: cuts at quantiles of each feature k, once a job
    with set_up_passive(inputs, bins, codes) as owner:
        return owner.follow({
            messages.TreeStart: owner.start_tree,  # <g_i>, <h_i> of the first rows ...
            messages.TreeRows: owner.add_rows,  # ... and of more
            messages.SumsPiece: owner.add_piece,  # a part of the rows of I, where these are many
            owner.sums_request: partial(aggregate, owner),  # `SumsRequest`, or `SealedSumsRequest`
            owner.split_request: partial(partition_rows, owner),  # `SplitRequest`, or `WonCandidates`
            messages.TreeEnd: owner.end_tree,
        })  # fmt: skip


def _guard(inputs: RoleInput[SecureBoost]) -> MayShow | None:
    if inputs.options.purity_guard is None:
        return None
    if inputs.classes is None:
        raise ConfigError("purity_guard is about classes; a regression has none: leave it out (None)")
    return mixed_nodes(inputs.rows.y, len(inputs.classes), inputs.options.purity_guard)


# ---------------------------------------------------------------- algorithm 1: aggregate encrypted gradient statistics


def aggregate(owner: ColumnOwner, request: messages.SumsRequest) -> messages.Sums | None:
    """Return encrypted sums of gradients over every bin of every feature, of all nodes of a level."""
    # [Alg. 1, lines 4-7] <G_kv> and <H_kv> are products of the ciphertexts of the rows of I in bin v of feature k.
    # Under the lattice map: the table of bins times the encrypted vector of the node. Answers are re-randomised, or
    # flooded with noise, so that the active party does not recognise its ciphertexts. `Sums` go to the active party;
    # None under seal, where the masked sums are sent before the shares are compared.
    return owner.sums(request)


# ---------------------------------------------------------------- algorithm 2: split finding


def find_splits(search: SplitSearch, level: Level) -> Splits:
    """Return the best split of every node of a level, as the active party."""
    if isinstance(search, SealedSearch):
        return search.choose(level)  # compares shares of the scores: nobody opens sums or scores
    found, rules = [], search.rules
    # [Alg. 2, lines 1-2] g and h, the sums over I of each node, are `level.totals`
    for i, party in search.asked():  # [Alg. 2, lines 3-4] each party i, in the job's order; the own columns are one
        of_party = []
        for g_h, sums, limits in search.sums(i):  # some nodes at a time
            # [Alg. 2, lines 5-9] `scan` loops over the features k, and over the bins v of each, in one compiled pass;
            # categories are candidates alone, and missing values go left as well as right
            # [Alg. 2, line 10] sums[node, kv] are D(<G_kv>), D(<H_kv>), decrypted when `Sums` came from the party
            # [Alg. 2, lines 11-12] g_l += D(<G_kv>), h_l += D(<H_kv>); g_r = g - g_l, h_r = h - h_l
            # [Alg. 2, line 13] score = max(score, g_l^2/(h_l + lambda) + g_r^2/(h_r + lambda) - g^2/(h + lambda)),
            # compared as fractions of whole numbers, so that rounding decides nothing
            best = scan(
                sums, g_h, search.columns[i], party.offsets, party.categorical, rules,
                limits=limits, source=i, threads=search.threads,
            )  # fmt: skip
            of_party.append(best)
        found.append(search.of_level(i, of_party, level))
    return best_of(found, level.totals, rules)  # [Alg. 2, lines 14-16] i_opt, k_opt, v_opt; the first of equal scores


def partition_rows(owner: ColumnOwner, message: messages.SplitRequest | messages.WonCandidates) -> Iterator[Message]:
    """Record the splits that a message names, and return which rows go left, as the passive party i_opt."""
    # [Alg. 2, lines 17-18] k_opt and v_opt have come; under seal both parties have shares of them, opened here
    splits = owner.named_splits(message)
    # [Alg. 2, line 19] cut v_opt of feature k_opt is a value of its own, by which it partitions I
    # [Alg. 2, line 20] it records that value, and returns [record id, I_L]: `SplitAnswer`, or `SplitColumns` about all
    # rows, or `SplitSides` under pads
    yield from owner.divide(splits)


def split_nodes(
    search: SplitSearch,
    growth: Lockstep,
    rows: LockstepRows,
    nodes: NDArray[np.int32],
    children: NDArray[np.int32],
    splits: Splits,
) -> None:
    """Have the owners of the chosen splits partition their nodes, and divide all rows, as the active party."""
    # `SplitRequest` goes to each owner, and `NamedRows` unless it decides all rows of the table
    records, left = search.decide(nodes, splits, rows)
    rows.divide(nodes, children, left)  # [Alg. 2, lines 21-22] I is split by I_L ...
    growth.divided(records)  # ... and the node gets [party id, record id]; `growth.take` kept the party
    search.shown.divided(nodes, children, rows)  # purity_guard: children of one class are hidden from now on


# ---------------------------------------------------------------- federated inference (section 5)
#
# The paper walks down the trees node by node, asking each node's owner. Here the active party asks every owner once,
# for the sides of all rows at all of its records in use (`DecideRequest`, answered by `Decisions`), and walks alone:
# one round trip, and owners see no paths. The active party learns sides off a row's path, too; with
# ``inference="shared"`` it learns none.


def predict(inputs: RoleInput[SecureBoost]) -> NDArray[np.float64]:
    """Return margins (n_rows, n_outputs) as the active party."""
    if inputs.options.hides_decisions:
        return shared_prediction.predict_active(inputs)
    return margins(collect(inputs), inputs.part.forest.objective, inputs.threads)


def follow_prediction(inputs: RoleInput[SecureBoost]) -> None:
    """Take part in a prediction as a passive party."""
    if inputs.options.hides_decisions:
        return shared_prediction.follow(inputs, "rows to predict")
    return predict_passive(inputs)


def predict_online(inputs: RoleInput[SecureBoost]) -> None:
    """Predict rows as they are asked for, as the active party."""
    return shared_prediction.online_active(inputs) if inputs.options.hides_decisions else online_active(inputs)


def follow_online(inputs: RoleInput[SecureBoost]) -> None:
    """Take part in predictions of rows as they are asked for, as a passive party."""
    return shared_prediction.follow(inputs, "rows") if inputs.options.hides_decisions else online_passive(inputs)
