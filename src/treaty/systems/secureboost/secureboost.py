"""SecureBoost: lossless boosting on columns of several parties, over encrypted gradients. Both roles, as in the paper.

Cheng, Fan, Jin, Liu, Chen, Papadopoulos, Yang, "SecureBoost: A Lossless Federated Learning Framework", IEEE
Intelligent Systems 2021 (arXiv 1901.08755); packing after Chen et al., SecureBoost+ (arXiv 2110.10927).

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned.
Output: the active party gets the trees and all leaf weights, every party its own splits. The trees are, bit for bit,
those of the plain grower on the joined table (but for `rl_trees` and `purity_guard`, which leave splits out).

Comments give the lines of the paper's algorithms; every line of a printed listing counts, with `for`, `end for` and
comments. All nodes of a level are asked about in one message, and of two siblings only the smaller, as the other's sums
are the parent's less these. "Blind" below means the lattice map (docs/lattice.md): a node is an encrypted vector, so
that passive parties do not see its rows. Under sealed sums (``sums="sealed"``) the search compares sums under seal and
opens none: what `set_up_active` and `set_up_passive` return then are another kind of search and another owner
(`vertical/sealed`), and the algorithms are the same.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`BinLayout`           passive ->     bins per feature, which are categorical, what       TLS
                                     exact sums will show by an estimate
`LinkProbe`           active ->      nothing, to measure the link (cipher "auto",        TLS
                                     sealed sums)
`LinkEcho`            passive ->     how much its answers may still leak                 TLS
`Setup`               active ->      model id, which cipher, its key and field widths    TLS
`Seed...`             both ways      lattice: a public seed of all (`public_seed`)       commitments
`Hint`                passive ->     the cipher's own set-up answer, in pieces           TLS; lattice: cipher
`HintReceipt`         active ->      the piece has arrived                               TLS
`TreeStart`           active ->      sampled rows and columns, encrypted gradients;      cipher
                                     blind: sampled columns
`TreeRows`            active ->      more of both, where rows are many                   cipher
`SumsPiece`           active ->      as `SumsRequest`, of some rows                      as `SumsRequest`
`SumsRequest`         active ->      which rows are in each node of the level;           TLS: the passive party
                                     blind: an encrypted vector per node                 learns them; cipher
`Sums`                passive ->     encrypted bin sums of all nodes asked               cipher, re-randomised
                                                                                         or flooded
`SplitRequest`        active ->      of each node the owner won: feature, bins going     TLS
                                     left
`NamedRows`           active ->      the nodes' rows (reveal="column": not sent)         TLS
`SplitAnswer`         passive ->     record numbers, which rows of the nodes go left     TLS
`SplitColumns`        passive ->     reveal="column": which rows of the table go left    TLS
`TreeEnd`             active ->      the tree is grown                                   TLS
`CheckpointRequest`,  both ways      write a checkpoint; it is written                   TLS
`CheckpointReceipt`
`DecideRequest`       active ->      record numbers (eval rows, prediction)              TLS
`Decisions`           passive ->     which rows go left at each record                   TLS
`Finish`              active ->      training is over                                    TLS
====================  =============  ==================================================  ========================

Adversary: honest but curious, no party colluding with the active one. What each party
learns is stated at each message's class, and what follows from it in `system.py`.
Deviations from the paper: candidates are not shuffled, for their sums are nested and show the order anyway; the active
party computes leaf weights from its own gradients; missing values and categories. ``mode="paper"`` has the paper's
cipher, keys, and answers without re-randomisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.messaging.messages import Message
from treaty.models.trees import ModelPart, margins
from treaty.privacy.label_leaks import mixed_nodes
from treaty.systems.observers import TreeFinished
from treaty.systems.secureboost.hidden_prediction import hidden_active, hidden_passive
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import EncryptedOwner, bin_own_columns
from treaty.systems.vertical.messages import Sums, SumsPiece, SumsRequest, TreeEnd, TreeRows, TreeStart
from treaty.systems.vertical.prediction import collect, predict_passive
from treaty.systems.vertical.setup import set_up_active, set_up_passive
from treaty.systems.vertical.training import boosting_of, open_training
from treaty.trees.columns import MayShow, SplitSearch
from treaty.trees.growth import Growth, RowPartition
from treaty.trees.splits import Level, Splits

# ---------------------------------------------------------------- training


def active(inputs: RoleInput[SecureBoost]) -> ModelPart:
    """Train as the active party; with `label_rr` the labels are those after noise."""
    may_show, alone_rounds = _guard(inputs), inputs.options.rl_trees or 0
    training = open_training(inputs)
    with set_up_active(inputs, training, alone_rounds=alone_rounds) as hidden:  # keys, layouts of bins, hints
        for a_round in boosting_of(inputs, training, hidden.sources):
            # Reduced-Leakage SecureBoost (section 6): the first trees reveal most about labels, so they are grown on
            # the active party's own columns and passive parties see nothing of them; later trees fit residuals.
            alone = a_round.number < alone_rounds
            for sample in a_round.trees():
                rows, growth = sample.partition(inputs.threads), Growth(sample.totals, hidden.rules)
                search = hidden.search(sample, alone=alone, may_show=may_show)  # sends <g_i>, <h_i>, unless alone
                while growth.level is not None:
                    search.ask(growth.level, rows)  # algorithm 1, at every passive party that may see the node
                    chosen = growth.take(find_splits(search, growth.level))  # None: no node of the level has a split
                    if chosen is not None:
                        split_nodes(search, growth, rows, *chosen)
                search.end()
                tree = growth.tree()  # leaf weights follow from the active party's own gradients
                a_round.add(tree, rows)
                inputs.observers.event(TreeFinished(tree, rows))
    return training.part


def passive(inputs: RoleInput[SecureBoost]) -> ModelPart:
    """Train as a passive party: answer the active one until it is done."""
    bins, codes = bin_own_columns(inputs)  # [Alg. 1, lines 1-3] S_k: cuts at quantiles of each feature k, once a job
    with set_up_passive(inputs, bins, codes) as owner:
        return owner.follow({
            TreeStart: owner.start_tree,  # <g_i>, <h_i> of the first rows ...
            TreeRows: owner.add_rows,  # ... and of more
            SumsPiece: owner.add_piece,  # a part of the rows of I, where these are many
            owner.asks: partial(aggregate, owner),  # `SumsRequest`, or that of sealed sums
            owner.names: partial(partition_rows, owner),  # `SplitRequest`, or `WonCandidates`
            TreeEnd: owner.end_tree,
        })  # fmt: skip


def _guard(inputs: RoleInput[SecureBoost]) -> MayShow | None:
    if inputs.options.purity_guard is None:
        return None
    if inputs.classes is None:
        raise ConfigError("purity_guard is about classes; a regression has none: leave it out (None)")
    return mixed_nodes(inputs.rows.y, len(inputs.classes), inputs.options.purity_guard)


# ---------------------------------------------------------------- algorithm 1: aggregate encrypted gradient statistics


def aggregate(owner: EncryptedOwner, request: SumsRequest) -> Sums | None:
    """Return encrypted sums of gradients over every bin of every feature, of all nodes of a level."""
    # [Alg. 1, lines 4-7] <G_kv> and <H_kv> are products of the ciphertexts of the rows of I in bin v of feature k.
    # Blind: the table of bins times the encrypted vector of the node. Answers are re-randomised, or flooded, so that
    # the active party does not know its ciphertexts again. None: the level's last request is still to come.
    return owner.sums(request)


# ---------------------------------------------------------------- algorithm 2: split finding


def find_splits(search: SplitSearch, level: Level) -> Splits:
    """Return the best split of every node of a level, as the active party."""
    # [Alg. 2, lines 1-2] g and h, the sums over I, are `level.totals`
    # [Alg. 2, lines 3-9] for each party i, in the job's order, for each feature k, for each bin v:
    # [Alg. 2, line 10] D(<G_kv>) and D(<H_kv>) are opened (`EncryptedGradients.sums`, `client.open`); under seal they
    # stay shares of two parties
    # [Alg. 2, lines 11-12] g_l and h_l are prefix sums, g_r and h_r the node's less these (`trees.splits.scan`)
    # [Alg. 2, line 13] the score g_l^2 / (h_l + lambda) + g_r^2 / (h_r + lambda) - g^2 / (h + lambda), compared exactly
    # [Alg. 2, lines 14-16] the largest score wins, of equal ones that of the first party, feature and bin
    return search.choose(level)


def partition_rows(owner: EncryptedOwner, message: Any) -> Iterator[Message]:
    """Record the splits that a message names, and say which rows go left, as the passive party i_opt."""
    splits = owner.chosen(
        message
    )  # [Alg. 2, lines 17-18] k_opt and v_opt have come; under seal the active party has only shares of them
    # [Alg. 2, line 19] cut v_opt of feature k_opt is a value of its own, by which it partitions I
    # [Alg. 2, line 20] it records that value, and returns [record id, I_L]
    yield from owner.divide(splits)


def split_nodes(
    search: SplitSearch,
    growth: Growth,
    rows: RowPartition,
    nodes: NDArray[np.int32],
    children: NDArray[np.int32],
    splits: Splits,
) -> None:
    """Have the owners of the chosen splits partition their nodes, and divide all rows, as the active party."""
    records, left = search.decide(nodes, splits, rows)
    rows.divide(nodes, children, left)  # [Alg. 2, lines 21-22] I is split by I_L ...
    growth.divided(records)  # ... and the node gets [party id, record id]; `growth.take` kept the party
    search.shown.divided(nodes, children, rows)  # purity_guard: children of one class are hidden from now on


# ---------------------------------------------------------------- federated inference (section 5)
#
# The paper walks down the trees node by node, asking each node's owner. Here the active party asks every owner once,
# for the sides of all rows at all of its records in use, and walks alone: one round trip, and owners see no paths. The
# active party learns sides off a row's path, too; `he_inference` hides all of them.


def predict(inputs: RoleInput[SecureBoost]) -> NDArray[np.float64]:
    """Return margins (n_rows, n_outputs) as the active party; with `he_inference` from encrypted leaf weights."""
    if inputs.options.hides_decisions:
        return hidden_active(inputs)
    return margins(collect(inputs), inputs.part.forest.objective, inputs.threads)


def follow_prediction(inputs: RoleInput[SecureBoost]) -> None:
    """Take part in a prediction as a passive party, see `predict`."""
    return hidden_passive(inputs) if inputs.options.hides_decisions else predict_passive(inputs)
