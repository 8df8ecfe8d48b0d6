"""FederBoost on columns: the active party trains alone on noisy buckets that the others sent once.

Tian, Zhang, Hou, Lyu, Zhang, Liu, Ren, "FederBoost: Private Federated Learning for GBDT" (arXiv 2011.02796; IEEE TDSC).

Trees need the order of values, not the values. Roles: one active party (labels, perhaps features), any number of
passive parties (features). Rows are aligned. Each passive party cuts its columns into tie-aware buckets, randomises
every row's bucket by k-ary randomised response (`privacy.bucket_rr`) and sends the result to the active party, once for
all trainings on the same table. Output: the active party gets the trees and all leaf weights, every party its own
splits, in terms of true values.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`HeldBuckets`         active ->      SHA-256 of the buckets it kept of earlier           TLS
                                     trainings (`kept_buckets`)
`Buckets`             passive ->     of each column its number of buckets and epsilon,   local differential
                                     and every row's noisy bucket, packed                privacy, epsilon a value
`SameBuckets`         passive ->     in place of `Buckets`: they are kept ones           TLS
`Start`               active ->      model id, records of kept rounds                    TLS
`UsedColumns`         passive ->     if `unbiased` and resumed: the columns that those   TLS
                                     records split on
`ChosenSplits`        active ->      of each split on their columns in the last trees:   TLS
                                     feature, buckets going left
`CheckpointRequest`, `CheckpointReceipt`        both ways      write a checkpoint; it is written                   TLS
`DecideRequest`       active ->      record numbers (eval rows, prediction)              TLS
`Decisions`           passive ->     which rows go left at each record: by true values,  TLS; of rows trained on,
                                     rows trained on by their noisy buckets              epsilon as above
`Finish`              active ->      training is over                                    TLS
`RecordCount`         passive ->     how many records it has: as many as were chosen     TLS
====================  =============  ==================================================  ========================

Adversary: honest but curious; the noise holds against an active party that departs from the protocol as well, and
against any collusion. Epsilon is per value, given the buckets' edges; a person's values in all columns add up.
Sides of eval rows and of rows to predict would undo the noise on persons trained on, so these are recognised by their
ids, in training and by the saved model, and decided by their noisy buckets (`privacy.remembered_rows`). Without ids,
rows with the values of rows trained on are refused where organisations play their own parties.

Deviations from the paper: buckets are tie-aware, not of equal counts by rank; only their number is sent; missing values
are a bucket of their own, randomised with the rest. Sums are corrected for the noise on request (`unbiased`), for the
choice of splits alone, and only those of columns that no split has used yet: below such a split rows are selected by
the column's noise, and in later trees their gradients depend on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.cluster.sums import ClusterHistograms
from treaty.data.binning import fit_bins
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.conversation import Order, Table
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.messaging.row_pieces import put_together, row_pieces
from treaty.models.checkpoints import noise_folder
from treaty.models.trees import ModelPart
from treaty.privacy.label_rr import BucketLedger, chances, unbiased
from treaty.privacy.remembered_rows import KnownRows, RandomisedRows
from treaty.systems.federboost_vertical.buckets import (
    Buckets,
    bits_of_row,
    keep_buckets,
    noisy_buckets,
    offer_held,
    send_buckets,
    stand_ins,
    take_buckets,
    unpack_buckets,
)
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.pooled.system import CheckpointReceipt, CheckpointRequest
from treaty.systems.pooled.training import own_columns
from treaty.systems.sizes import MOST_COLUMNS
from treaty.systems.system import RoleInput
from treaty.systems.vertical.active import Start, agree_on_terms, finish, grow, open_training, start_of
from treaty.systems.vertical.column_owner import SplitOwner
from treaty.systems.vertical.decisions import Finish, RecordCount, check_unknown
from treaty.systems.vertical.passive import Follower, between_trees
from treaty.trees.columns import ColumnSource, JoinedFinder, MakeSums, SumsFinder
from treaty.trees.objectives import Objective

TELL_EVERY = 0.25
"""Seconds between messages about chosen splits, where nobody needs them sooner: small trees take a millisecond."""

MOST_LONE = 1 << 28
"""Numbers of rows in columns of one bucket: they are told in no bytes, and kept in one each."""


class UsedColumns(Message):
    """Which of the sender's k columns its splits of kept rounds are on: bool (k,).

    Tells nothing new, as the active party chose these splits; its checkpoint has no list of them.
    """

    leakage: ClassVar = MessageLeakage(
        "nothing new: which of the sender's columns have splits, which the active party chose",
        "nothing",
    )

    columns: Array


class ChosenSplits(Message):
    """Splits that trees use: int32 features (k,), uint8 packed bits (k, 32) of buckets left. Tells which and how often.

    `rounds` were finished before the last of these trees.
    """

    leakage: ClassVar = MessageLeakage("which of its columns and buckets splits are on, and how often", "exact")

    features: Array
    left_bins: Array
    rounds: Annotated[int, msgspec.Meta(ge=0)]


CONVERSATION: Table = {"training": {ChosenSplits: "training", **between_trees("training")}, "finished": {}}
"""Which messages a passive party may receive when."""


# ---------------------------------------------------------------- active party


class NoisyColumns(ColumnSource):
    """Columns of the passive party `peer` as noisy buckets: sums are computed here, splits recorded by their owner.

    `histograms` as in `ColumnSource`. Raises PeerProtocolError where `pieces`, its messages, are not of `n_rows` rows,
    or not what its own sizes say.
    """

    def __init__(
        self,
        party: Party,
        peer: str,
        pieces: Iterator[Buckets],
        n_rows: int,
        threads: int,
        histograms: MakeSums | None = None,
    ) -> None:
        message = next(pieces)
        present = view(message.present, np.int32, (None,), peer=peer, what="Buckets.present")
        flags = [
            view(array, np.bool_, (len(present),), peer=peer, what=f"Buckets.{name}")
            for name, array in (("categorical", message.categorical), ("missing", message.missing))
        ]
        sizes = present + flags[1]
        if np.any(present < 0) or np.any(present > 255) or np.any(sizes < 1):
            raise PeerProtocolError(peer, f"expected 1 to 256 buckets of each column - at Buckets.present from {peer}")
        lone = int(np.count_nonzero(sizes == 1))  # whose buckets take no bytes
        if len(sizes) > MOST_COLUMNS or lone * n_rows > MOST_LONE:
            expected = f"expected at most {MOST_COLUMNS} columns, few of them of one bucket alone"
            raise PeerProtocolError(peer, f"{expected} - at Buckets.present from {peer}")
        epsilon = view(message.epsilon, np.float64, (len(present),), peer=peer, what="Buckets.epsilon")
        if not np.all(epsilon > 0.0):
            raise PeerProtocolError(peer, f"expected epsilons above 0 - at Buckets.epsilon from {peer}")
        came = []
        for of in row_pieces(n_rows, bits_of_row(sizes)):
            packed = (next(pieces) if of.start else message).packed
            came.append(unpack_buckets(packed, sizes, of.stop - of.start, peer))
        codes = put_together(came)
        self._party, self._peer = party, peer
        self._sizes, self._epsilon = sizes, epsilon
        self._corrected = np.zeros(len(sizes), np.bool_)
        self._chosen: list[tuple[int, NDArray[np.bool_]]] = []
        self._told = 0.0
        self._records = 0
        offsets = np.concatenate([[0], np.cumsum(present + 1)]).astype(np.int32)
        super().__init__(codes, offsets, flags[0], self._choose, threads, histograms)

    def begin(self, records: int) -> None:
        """Count on from the number of `records` that the owner has of kept rounds."""
        self._records = records

    def correct(self, objective: Objective, n_rows: int, *, resumed: bool) -> None:
        """Correct sums for the noise from now on; in a resumed training, not those of `UsedColumns`."""
        self._corrected = (self._sizes > 1) & (self._epsilon < np.inf)
        bound = n_rows * max(objective.grad_bound, objective.hess_bound)
        for size, epsilon in zip(self._sizes[self._corrected], self._epsilon[self._corrected], strict=True):
            # buckets to the left of a split sum up to less than 2 / (p - r) times the bound, the others to 3 / (p - r)
            if bound >= 2**61 * chances(int(size), float(epsilon))[1]:
                raise ConfigError(
                    f"sums of {n_rows} gradients, corrected for the noise of {size} buckets at epsilon={epsilon:g}, do "
                    "not fit 64 bits; lower fractional_bits, raise epsilon or leave out unbiased"
                )
        if resumed:
            used = self._party.receive(self._peer, UsedColumns).columns
            self._corrected &= ~view(used, np.bool_, self._corrected.shape, peer=self._peer, what="UsedColumns.columns")

    def for_gains(self, sums: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return unbiased estimates of the true buckets' sums of grad and hess, for corrected columns.

        Counts are not corrected: `min_child_samples` is about the rows that actually go left.
        """
        columns = np.flatnonzero(self._corrected).tolist()
        if not columns:
            return sums
        seen = sums.copy()
        for column in columns:
            size = int(self._sizes[column])
            slots = slice(self.offsets[column], self.offsets[column] + size)
            estimates = unbiased(sums[:, slots, :2], totals[:, :2], size, float(self._epsilon[column]))
            np.maximum(estimates[..., 1], 0.0, out=estimates[..., 1])
            seen[:, slots, :2] = np.rint(estimates)
        return seen

    def check(self, count: RecordCount) -> None:
        """Raise PeerProtocolError where the owner has another number of records than it was told to make."""
        if count.records != self._records:
            raise PeerProtocolError(
                self._peer, f"expected {self._records} records, got {count.records} - at RecordCount from {self._peer}"
            )

    def _choose(self, feature: int, left_bins: NDArray[np.bool_]) -> int:
        self._chosen.append((feature, left_bins))
        self._corrected[feature] = False
        self._records += 1
        return self._records - 1

    def tell(self, rounds: int, *, now: bool) -> None:
        """Tell the owner its splits in the trees since the last message; unless `now`, `TELL_EVERY` seconds apart."""
        if self._chosen and (now or time.monotonic() - self._told >= TELL_EVERY):
            features = np.array([feature for feature, _ in self._chosen], np.int32)
            packed = np.packbits(np.stack([left for _, left in self._chosen]), axis=1)
            self._party.send(self._peer, ChosenSplits(Array.of(features), Array.of(packed), rounds))
            self._chosen = []
            self._told = time.monotonic()


def active(inputs: RoleInput[FederBoostVertical]) -> ModelPart:
    """Train as the active party, on the others' noisy buckets; passive parties decide eval rows."""
    party, data, common, threads = inputs.party, inputs.rows, inputs.common, inputs.threads
    training = open_training(inputs)
    part, forest, n_rows = training.part, training.forest, data.table.n_rows
    noisy = _columns_of_others(inputs, n_rows)
    for peer, columns in noisy.items():
        columns.begin(training.records[peer])
        party.send(peer, Start(*start_of(training, peer)))
    if inputs.options.unbiased:
        for columns in noisy.values():
            columns.correct(forest.objective, n_rows, resumed=training.resume is not None)
    at_workers = partial(ClusterHistograms.of_columns, inputs.shards)
    own = own_columns(
        data.table, common.most_bins, part.splits, threads, at_workers(party.name) if inputs.options.unbiased else None
    )
    sources: list[ColumnSource] = [noisy.get(name, own) for name in inputs.roles.owners]

    def tell(*, now: bool = bool(inputs.eval_sets) or inputs.keeper is not None) -> None:
        for columns in noisy.values():
            columns.tell(forest.rounds, now=now)

    given = sources, n_rows, common.rules(forest.objective), threads
    if inputs.options.unbiased:  # each owner's sums are corrected in its own way
        finder = SumsFinder(*given, after_tree=tell)
    else:
        finder = JoinedFinder(*given, after_tree=tell, histograms=at_workers("all"))
    grow(inputs, training, finder, sources)
    tell(now=True)
    finish(party)
    for peer, columns in noisy.items():  # the model is complete only once the others have recorded their splits
        columns.check(party.receive(peer, RecordCount))
    return part


def _columns_of_others(inputs: RoleInput[FederBoostVertical], n_rows: int) -> dict[str, NoisyColumns]:
    """Return every passive party's columns: as it sends them, or as it sent them to an earlier training."""
    party, store, noisy = inputs.party, inputs.store, {}
    held = {peer: offer_held(party, peer, store) for peer in party.peers}
    for peer, of_peer in held.items():
        sent = None if store is None else list[bytes]()
        at_workers = ClusterHistograms.of_columns(inputs.shards if inputs.options.unbiased else None, peer)
        noisy[peer] = NoisyColumns(
            party, peer, take_buckets(party, peer, of_peer, sent), n_rows, inputs.threads, at_workers
        )  # fmt: skip
        if store is not None and sent:
            keep_buckets(party, peer, store, of_peer, sent)
    return noisy


# ---------------------------------------------------------------- passive party


def passive(inputs: RoleInput[FederBoostVertical]) -> ModelPart:
    """Send noisy buckets as a passive party, then record splits and decide eval rows until the active one is done.

    Buckets that the active party has kept of an earlier training are not sent again.

    Parameters
    ----------
    inputs : RoleInput
        With own columns of the aligned rows, and the active party as the only peer. Its `store` has the key of the
        noise and the ledger of its cost, for all jobs; without one, both are of this training alone. `row_numbers` say
        which rows are copies of one row of the party's file, which is randomised once, `rows_digest` who they are;
        `ids` of its rows and eval sets say who is who.

    Returns
    -------
    ModelPart
        Own splits; `spent` says what the noise cost, `randomised` what was told of whom.

    Raises
    ------
    DataError
        In safe mode, when eval sets without ids have the values of rows trained on and `apart` is set.
    """
    party, table, options, threads = inputs.party, inputs.rows.table, inputs.options, inputs.threads
    (active,) = party.peers
    agree_on_terms(inputs)
    bins = fit_bins(table, inputs.common.most_bins, threads)
    codes = bins.transform(table, threads)
    numbers = np.arange(table.n_rows) if inputs.row_numbers is None else inputs.row_numbers
    epsilons = options.epsilons(table.schema.names)
    known = None
    if any(epsilon < math.inf for epsilon in epsilons.values()):
        known = KnownRows.of(table.matrix(), None if inputs.rows.ids is None else inputs.rows.ids())
        for rows in inputs.eval_sets:  # before anything is told of training rows
            check_unknown(inputs, known, rows)
    persons = inputs.rows_digest or b""
    kept = None if inputs.store is None else noise_folder(inputs.store, party.name)
    ledger = BucketLedger(kept, inputs.epsilon_limits)
    pieces, noisy, spent = noisy_buckets(codes, bins, epsilons, ledger, numbers, party.job, persons)
    send_buckets(party, active, pieces)
    start = party.receive(active, Start)
    told = None if known is None else RandomisedRows(known, noisy.ravel(), stand_ins(bins))
    follower = Follower(inputs, start, told)
    part = follower.part
    part.randomised = told
    if start.resumed and options.unbiased:
        party.send(active, UsedColumns(Array.of(np.isin(np.arange(len(table.schema.names)), part.splits.feature))))
    part.spent = str(spent)
    follower.report(0)
    owner = SplitOwner(active, codes, bins, part.splits)

    def record(chosen: ChosenSplits) -> None:
        features, left_bins = owner.asked(chosen)
        follower.limits.chosen(len(features), chosen.rounds)
        owner.record(features, left_bins)
        follower.report(chosen.rounds)

    def keep(request: CheckpointRequest) -> CheckpointReceipt:
        kept = follower.keep(request)
        follower.report(request.rounds)
        return kept

    def end(_: Finish) -> RecordCount:
        follower.report(inputs.common.n_estimators)
        return RecordCount(len(part.splits))

    return follower.follow(
        Order(CONVERSATION, "training"), {ChosenSplits: record, CheckpointRequest: keep, Finish: end}
    )
