"""FederBoost on columns: the active party trains alone on noisy buckets that the others sent once.

Tian, Zhang, Hou, Lyu, Zhang, Liu, Ren, "FederBoost: Private Federated Learning for GBDT" (arXiv 2011.02796; IEEE TDSC).

Trees need the order of values, not the values. Roles: one active party (labels, perhaps features), any number of
passive parties (features). Rows are aligned. Each passive party cuts its columns into tie-aware buckets, randomises
every row's bucket by k-ary randomised response (`privacy.randomised_response`) and sends the result to the active
party, once for all trainings on the same table. Output: the active party gets the trees and all leaf weights, every
party its own splits, in terms of true values.

The active party keeps buckets for later trainings and offers their hashes (`buckets`). It sends each owner its splits
(`ChosenSplits`) and asks it which eval rows go left. At the end owners confirm how many records they have.

Adversary: honest but curious. The noise also holds against an active party that departs from the protocol, and against
any collusion. Epsilon is per value, given the buckets' edges; the epsilons of a person's values in all columns add up.
The sides of eval rows and of rows to predict would undo the noise on persons in the training. So these persons are
recognised by their ids, in training and by the saved model, and decided by their noisy buckets. Without ids, rows with
the values of training rows are refused where organisations play their own parties.

Deviations from the paper: buckets are tie-aware, not of equal counts by rank; only their number is sent; missing values
are a bucket of their own, randomised with the rest.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.sums import ClusterHistograms
from treaty.data.binning import Bins, fit_bins
from treaty.errors import PeerProtocolError
from treaty.messaging.conversation import MessageOrder, Table
from treaty.models.checkpoints import ledger_folder
from treaty.models.trees import ModelPart
from treaty.privacy.randomised_response import BucketCost, BucketLedger, KnownRows, RandomisedRows
from treaty.systems.federboost_vertical import buckets
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.pooled.continuing import CheckpointReceipt, CheckpointRequest
from treaty.systems.pooled.system import own_columns
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import SplitOwner
from treaty.systems.vertical.messages import Start
from treaty.systems.vertical.prediction import Finish, RecordCount, check_unknown
from treaty.systems.vertical.training import (
    Follower,
    agree_on_terms,
    between_trees,
    boosting_of,
    finish,
    open_training,
    start_of,
)
from treaty.trees.columns import ColumnSource, JoinedColumns, SplitSearch, grow_tree

CONVERSATION: Table = {"training": {buckets.ChosenSplits: "training", **between_trees("training")}, "finished": {}}
"""Which messages a passive party may receive when."""


def _release(
    inputs: RoleInput[FederBoostVertical],
) -> tuple[Bins, NDArray[np.uint8], RandomisedRows | None, BucketCost]:
    """Send noisy buckets as a passive party; return bins, true buckets, the released rows, and the cost."""
    party, table, options, threads = inputs.party, inputs.rows.table, inputs.options, inputs.threads
    (active,) = party.peers
    epsilons = options.epsilons(table.schema.names, party.name, inputs.roles.owners)
    most = list(map(options.most_buckets, epsilons.values()))
    bins = fit_bins(table, most, threads, max_categories=inputs.common.most_categories)
    codes = bins.transform(table, threads)  # [Vertical, step 1] the tie-aware bucket of every value
    numbers = np.arange(table.n_rows) if inputs.rows.numbers is None else inputs.rows.numbers
    # persons whose rows are decided by their released buckets from now on
    known = None
    if any(epsilon < math.inf for epsilon in epsilons.values()):
        known = KnownRows.of(table.matrix(), inputs.rows.ids and inputs.rows.ids(), inputs.rows.ids_of)
        # before anything about training rows is sent
        for rows in inputs.eval_sets:
            check_unknown(inputs, known, rows)
    kept = None if inputs.store is None else ledger_folder(inputs.store, party.name, "noise")
    ledger = BucketLedger(kept, inputs.epsilon_limits)
    # [Vertical, step 2] keep a bucket with probability e^epsilon / (e^epsilon + k - 1), else draw another one
    pieces, noisy, cost = buckets.noisy_buckets(
        codes, bins, epsilons, most, ledger, numbers, party.job, inputs.rows.digest or b""
    )  # fmt: skip
    buckets.send_buckets(party, active, pieces)  # [Vertical, step 3] once for all trainings on the same table
    released = None if known is None else RandomisedRows(known, noisy.ravel(), buckets.stand_ins(bins))
    return bins, codes, released, cost


def active(inputs: RoleInput[FederBoostVertical]) -> ModelPart:
    """Train as the active party, alone on the passive parties' noisy buckets; these decide eval rows."""
    party, data, options, common, threads = inputs.party, inputs.rows, inputs.options, inputs.common, inputs.threads
    options.epsilons((), party.name, inputs.roles.owners)  # its own columns carry no noise, and must have no epsilon
    training = open_training(inputs)
    part, forest, n_rows = training.part, training.forest, data.table.n_rows
    noisy, store = dict[str, buckets.NoisyColumns](), inputs.store
    held = {peer: buckets.offer_held(party, peer, store) for peer in party.peers}
    for peer, of_peer in held.items():  # sent now, or in an earlier training
        sent = None if store is None else list[bytes]()
        pieces = buckets.take_buckets(party, peer, of_peer, sent)
        noisy[peer] = buckets.NoisyColumns(party, peer, pieces, n_rows, threads)
        if store is not None and sent:
            buckets.keep_buckets(party, peer, store, of_peer, sent)
    for peer, columns in noisy.items():
        columns.records = training.records[peer]
        party.send(peer, Start(*start_of(training, peer)))
    own = own_columns(data.table, common, part.splits, threads)
    owners: list[ColumnSource] = [noisy.get(name, own) for name in inputs.roles.owners]
    # one pass over all columns; a cluster's workers sum over all of them, too
    joined = JoinedColumns(owners, threads, ClusterHistograms.of_columns(inputs.shards, "all"))
    rules = common.rules(forest.objective, training.constraints and training.constraints.joined())
    # owners need their splits at once if they decide eval rows or keep checkpoints, else after a while
    at_once = bool(inputs.eval_sets) or inputs.keeper is not None

    for a_round in boosting_of(inputs, training, owners):  # [Vertical, step 4] on noisy buckets, alone
        for sample in a_round.trees():
            tree, rows = grow_tree(SplitSearch([joined], sample, rules, threads), sample, rules, threads)
            joined.name_owners(tree)
            a_round.add(tree, rows)
            for columns in noisy.values():
                columns.send_splits(forest.rounds, now=at_once)

    for columns in noisy.values():  # [Vertical, step 5] to each owner: the feature and buckets left of its splits
        columns.send_splits(forest.rounds, now=True)
    finish(party)
    # the model is complete only once the owners have recorded their splits
    for peer, columns in noisy.items():
        recorded = party.receive(peer, RecordCount).records
        if recorded != columns.records:
            expected = f"expected {columns.records} records, got {recorded}"
            raise PeerProtocolError(peer, expected, at="RecordCount")
    return part


def passive(inputs: RoleInput[FederBoostVertical]) -> ModelPart:
    """Send noisy buckets as a passive party, then record splits and decide eval rows until the active one has finished.

    `inputs.store` has the key of the noise and the ledger of its cost, for all jobs; without it, both are of this
    training only. The rows' `numbers` show which of them are copies of one row of the party's file, which is randomised
    once. Raises DataError in safe mode if eval sets without ids have the values of training rows and `apart` is set.
    """
    party = inputs.party
    (active,) = party.peers
    agree_on_terms(inputs)
    bins, codes, released, cost = _release(inputs)
    start = party.receive(active, Start)
    follower = Follower(inputs, start, released)
    part = follower.part
    part.randomised, part.spent = released, str(cost)
    owner = SplitOwner(active, codes, bins, part.splits)
    follower.report(0)

    def record(chosen: buckets.ChosenSplits) -> None:
        features, left_bins = owner.asked(chosen)
        follower.limits.chosen(len(features), chosen.rounds)
        owner.record(features, left_bins)  # [Vertical, step 6] the bucket's edge becomes a threshold
        follower.report(chosen.rounds)

    def keep(request: CheckpointRequest) -> CheckpointReceipt:
        receipt = follower.keep(request)
        follower.report(request.rounds)
        return receipt

    def end(_: Finish) -> RecordCount:
        follower.report(inputs.common.most_rounds)
        return RecordCount(len(part.splits))

    return follower.follow(
        MessageOrder(CONVERSATION, "training"), {buckets.ChosenSplits: record, CheckpointRequest: keep, Finish: end}
    )
