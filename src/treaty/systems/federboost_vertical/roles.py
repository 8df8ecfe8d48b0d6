"""FederBoost on columns: the active party trains alone on noisy buckets that the others sent once.

Tian, Zhang, Hou, Lyu, Zhang, Liu, Ren, "FederBoost: Private Federated Learning for GBDT" (arXiv 2011.02796; IEEE TDSC).

Trees need the order of values, not the values. Roles: one active party (labels, perhaps features), any number of
passive parties (features). Rows are aligned. Each passive party cuts its columns into tie-aware buckets, sends every
row's bucket through k-ary randomised response (`privacy.bucket_rr`), and what comes out to the active party. Output:
the active party gets the trees and all leaf weights, every party its own splits, in terms of true values.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`Buckets`             passive ->     of each column its number of buckets and epsilon,   local differential
                                     and every row's noisy bucket, packed                privacy, epsilon a value
`Begin`               active ->      model id, records of kept rounds                    TLS
`Used`                passive ->     `unbiased` and training goes on: which columns      TLS
                                     those records are of
`Chosen`              active ->      of each split on their columns in the last trees:   TLS
                                     feature, buckets going left
`Keep`, `Kept`        both ways      write a checkpoint; it is written                   TLS
`DecideRequest`       active ->      record numbers (eval rows, prediction)              TLS
`Decisions`           passive ->     which rows go left at each record, by true values   TLS
`Finish`              active ->      training is over                                    TLS
`Held`                passive ->     how many records it has: as many as were chosen     TLS
====================  =============  ==================================================  ========================

Adversary: honest but curious; the noise holds against an active party that departs from the protocol as well, and
against any collusion. Epsilon is of a value given the buckets' edges; a person's values in all columns add up.

Deviations from the paper: buckets are tie-aware, not of equal counts by rank; only their number is sent; missing values
are a bucket of their own, randomised with the rest. Sums are corrected for the noise on request (`unbiased`), for the
choice of splits alone, and only those of columns that no split has used yet: below such a split rows are selected by
the column's noise, and in later trees their gradients depend on it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins, fit_bins
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart
from treaty.privacy.bucket_rr import BucketCost, BucketLedger, Column, chances, unbiased
from treaty.systems.pooled.training import Labelled, Progress, begin, own_columns
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical.active import Keep, Start, finish, grow, terms
from treaty.systems.vertical.column_owner import SplitOwner
from treaty.systems.vertical.decisions import DecideRequest, Finish, Held
from treaty.systems.vertical.passive import Following
from treaty.trees.columns import ColumnSource, JoinedFinder, SumsFinder
from treaty.trees.objectives import Objective

logger = logging.getLogger(__name__)

FEW_BUCKETS = 4
TELL_EVERY = 0.25
"""Seconds between messages about chosen splits, where nobody needs them sooner: small trees take a millisecond."""
DEFAULT_EPSILON = 4.0


class Buckets(Message):
    """Noisy buckets: int32 buckets of present values (k,), bool kind, bool whether some are missing, float64 epsilon.

    Then packed bits: column after column, row after row, each in ceil(log2(buckets)) bits, a column's first byte being
    its own. Tells how many buckets each column has and, with epsilon-local differential privacy, which one each row is
    in.
    """

    present: Array
    categorical: Array
    missing: Array
    epsilon: Array
    packed: Array


class Begin(Start):
    """Training begins; there is nothing to set up."""


class Used(Message):
    """Columns that the records of kept rounds are of: bool (k,). The active party chose them, and has forgotten."""

    columns: Array


class Chosen(Message):
    """Splits that trees use: int32 features (k,), packed bits of buckets left (k, 32). Tells which and how often.

    `rounds` were finished before the last of these trees.
    """

    features: Array
    left_bins: Array
    rounds: Annotated[int, msgspec.Meta(ge=0)]


def epsilons(options: TreeOptions, names: Sequence[str]) -> dict[str, float]:
    """Return what a value of each column costs: `epsilon`, or an even share of `epsilon_person`."""
    if options.epsilon_person is not None:
        return dict.fromkeys(names, options.epsilon_person / max(1, len(names)))
    return dict.fromkeys(names, DEFAULT_EPSILON if options.epsilon is None else options.epsilon)


# ---------------------------------------------------------------- active party


class NoisyColumns(ColumnSource):
    """Columns of a passive party as noisy buckets: a source of sums at hand whose splits their owner records.

    Parameters
    ----------
    party : Party
    peer : str
        Whose columns; its `Buckets` is the next message.
    n_rows : int
    threads : int
    """

    def __init__(self, party: Party, peer: str, n_rows: int, threads: int) -> None:
        message = party.receive(peer, Buckets)
        present = view(message.present, np.int32, (None,), peer=peer, what="Buckets.present")
        flags = [
            view(array, np.bool_, (len(present),), peer=peer, what=f"Buckets.{name}")
            for name, array in (("categorical", message.categorical), ("missing", message.missing))
        ]
        sizes = present + flags[1]
        if np.any(present < 0) or np.any(present > 255) or np.any(sizes < 1):
            raise PeerProtocolError(peer, f"expected 1 to 256 buckets of each column - at Buckets.present from {peer}")
        epsilon = view(message.epsilon, np.float64, (len(present),), peer=peer, what="Buckets.epsilon")
        if not np.all(epsilon > 0.0):
            raise PeerProtocolError(peer, f"expected epsilons above 0 - at Buckets.epsilon from {peer}")
        codes = _unpack(message.packed, sizes, n_rows, peer)
        self._party, self._peer = party, peer
        self._sizes, self._epsilon = sizes, epsilon
        self._corrected = np.zeros(len(sizes), np.bool_)
        self._chosen: list[tuple[int, NDArray[np.bool_]]] = []
        self._told = 0.0
        self._records = 0
        offsets = np.concatenate([[0], np.cumsum(present + 1)]).astype(np.int32)
        super().__init__(codes, offsets, flags[0], self._choose, threads)

    def begin(self, records: int) -> None:
        """Go on from so many records."""
        self._records = records

    def correct(self, objective: Objective, n_rows: int, *, resumed: bool) -> None:
        """Correct sums for the noise from now on; take `Used` where training goes on."""
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
            used = self._party.receive(self._peer, Used).columns
            self._corrected &= ~view(used, np.bool_, self._corrected.shape, peer=self._peer, what="Used.columns")

    def for_gains(self, sums: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sums of grad and hess over true buckets, right on average, of the columns that are to be corrected.

        Counts stay those of rows that go left, which are what `min_child_samples` is about.
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

    def check(self, held: Held) -> None:
        """Refuse to finish where the owner has other records than it was told of."""
        if held.records != self._records:
            raise PeerProtocolError(
                self._peer, f"expected {self._records} records, got {held.records} - at Held from {self._peer}"
            )

    def _choose(self, feature: int, left_bins: NDArray[np.bool_]) -> int:
        self._chosen.append((feature, left_bins))
        self._corrected[feature] = False
        self._records += 1
        return self._records - 1

    def tell(self, rounds: int, *, now: bool) -> None:
        """Tell the owner which of its splits the trees since the last time use; nothing where that was just now."""
        if self._chosen and (now or time.monotonic() - self._told >= TELL_EVERY):
            features = np.array([feature for feature, _ in self._chosen], np.int32)
            packed = np.packbits(np.stack([left for _, left in self._chosen]), axis=1)
            self._party.send(self._peer, Chosen(Array.of(features), Array.of(packed), rounds))
            self._chosen = []
            self._told = time.monotonic()


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
) -> ModelPart:
    """Train as the active party, on the others' noisy buckets; these decide eval rows by true values.

    Parameters
    ----------
    party, data, options, parties, classes, eval_sets, threads, progress, keeper
        See `secureboost.active`.

    Returns
    -------
    ModelPart
        Own splits, all trees and leaf weights.

    Raises
    ------
    ConfigError, PeerProtocolError
        When parties disagree on parameters or rows, or one sends what the protocol does not allow.
    """
    n_rows = data.table.n_rows
    agree(party, terms(options, n_rows, [e.table.n_rows for e in eval_sets]))
    begun = begin(data, options, party.name, tuple(parties), classes, eval_sets, keeper)
    part, forest = begun.part, begun.forest
    noisy = {peer: NoisyColumns(party, peer, n_rows, threads) for peer in party.peers}
    for peer, columns in noisy.items():
        columns.begin(begun.records[peer])
        party.send(peer, Begin(part.model_id, begun.resume is not None, begun.records[peer]))
    if options.unbiased:
        for columns in noisy.values():
            columns.correct(forest.objective, n_rows, resumed=begun.resume is not None)
    own = own_columns(data.table, options, part.splits, threads)
    sources: list[ColumnSource] = [noisy.get(name, own) for name in parties]

    def tell(*, now: bool = bool(eval_sets) or keeper is not None) -> None:
        for columns in noisy.values():
            columns.tell(forest.rounds, now=now)

    make = SumsFinder if options.unbiased else JoinedFinder  # each owner's sums are corrected in its own way
    finder = make(sources, n_rows, options.rules(forest.objective), threads, after_tree=tell)
    grow(party, data, options, begun, finder, sources, eval_sets, threads, progress, keeper)
    tell(now=True)
    finish(party)
    for peer, columns in noisy.items():  # a model is none before the others have their records of it
        columns.check(party.receive(peer, Held))
    return part


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
    ledger: BucketLedger | None = None,
    row_numbers: NDArray[np.int64] | None = None,
) -> ModelPart:
    """Send noisy buckets as a passive party, then record splits and decide eval rows until the active one is done.

    Parameters
    ----------
    ledger : BucketLedger or None
        The key of the noise and what it cost in all jobs. None: for this training.
    row_numbers : ndarray of int64, shape (rows,), optional
        Of each row in the party's own table, where rows were aligned: the noise goes with them.
    party, table, options, eval_tables, threads, progress, keeper
        See `secureboost.passive`.

    Returns
    -------
    ModelPart
        Own splits; `spent` says what the noise cost.
    """
    (lead,) = party.peers
    agree(party, terms(options, table.n_rows, [t.n_rows for t in eval_tables]))
    bins = fit_bins(table, options.max_bin, threads)
    codes = bins.transform(table, threads)
    numbers = np.arange(table.n_rows) if row_numbers is None else row_numbers
    message, spent = _noisy(codes, bins, options, ledger or BucketLedger(None), numbers, party.job)
    party.send(lead, message)
    begun = party.receive(lead, Begin)
    following = Following(party, begun, table, options, eval_tables, keeper)
    part = following.part
    if begun.resumed and options.unbiased:
        party.send(lead, Used(Array.of(np.isin(np.arange(len(table.schema.names)), part.splits.feature))))
    part.spent = str(spent)
    if progress is not None:
        progress(0, part)
    owner = SplitOwner(lead, codes, bins, part.splits)
    while True:
        match party.receive(lead, Chosen, DecideRequest, Keep, Finish):
            case Chosen() as chosen:
                owner.record(*owner.asked(chosen))
                if progress is not None:
                    progress(chosen.rounds, part)
            case DecideRequest() as request:
                following.decide(request, threads)
            case Keep() as kept:
                following.keep()
                if progress is not None:
                    progress(kept.rounds, part)
            case Finish():
                if progress is not None:
                    progress(options.n_estimators, part)
                party.send(lead, Held(len(part.splits)))
                return part


def _noisy(
    codes: NDArray[np.uint8],
    bins: Bins,
    options: TreeOptions,
    ledger: BucketLedger,
    row_numbers: NDArray[np.int64],
    job: str,
) -> tuple[Buckets, BucketCost]:
    """Randomise the buckets."""
    schema = bins.schema
    missing = (codes == bins.n_bins).any(axis=0)
    sizes = np.maximum(bins.n_bins + missing, 1)
    of_each = epsilons(options, schema.names)
    few = [
        name for (name, epsilon), size in zip(of_each.items(), sizes, strict=True)
        if size <= FEW_BUCKETS and epsilon < math.inf
    ]  # fmt: skip
    if few:
        logger.warning("columns of at most %d buckets, whose noisy bucket is a noisy value: %s", FEW_BUCKETS, few)
    columns = [
        Column(name, int(size), epsilon, _edges(bins, f))
        for f, (size, (name, epsilon)) in enumerate(zip(sizes, of_each.items(), strict=True))
    ]
    noisy, spent = ledger.noisy(codes, columns, row_numbers, job)
    packed = [_pack(noisy[:, f], column.size) for f, column in enumerate(columns)]
    content = np.concatenate([np.empty(0, np.uint8), *packed])
    costs = np.array([column.epsilon for column in columns], np.float64)
    return Buckets(*map(Array.of, (bins.n_bins, schema.categorical, missing, costs, content))), spent


def _edges(bins: Bins, feature: int) -> bytes:
    """Return what tells the buckets of a column."""
    cuts, of_category = bins.cuts[feature], bins.category_bins[feature]
    if of_category is not None:
        return msgspec.msgpack.encode([bins.schema.categories[feature], of_category.tolist()])
    return b"" if cuts is None else cuts.tobytes()


# ---------------------------------------------------------------- both


def _width(size: int) -> int:
    """Bits of a bucket's number."""
    return (size - 1).bit_length()


def _pack(column: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    width = _width(size)
    return np.packbits((column[:, np.newaxis] >> np.arange(width, dtype=np.uint8)) & 1)


def _unpack(packed: Array, sizes: NDArray[np.int32], n_rows: int, peer: str) -> NDArray[np.uint8]:
    """Return the buckets, uint8 (rows, columns), each below its column's number of them."""
    lengths = [-(-n_rows * _width(size) // 8) for size in sizes.tolist()]
    content = view(packed, np.uint8, (sum(lengths),), peer=peer, what="Buckets.packed")
    codes, start = np.empty((n_rows, len(sizes)), np.uint8), 0
    for column, (size, length) in enumerate(zip(sizes.tolist(), lengths, strict=True)):
        width = _width(size)
        bits = np.unpackbits(content[start : start + length], count=n_rows * width).reshape(n_rows, width)
        codes[:, column] = (bits << np.arange(width, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
        start += length
        if n_rows and codes[:, column].max() >= size:
            raise PeerProtocolError(peer, f"expected buckets below {size} - at Buckets.packed from {peer}")
    return codes
