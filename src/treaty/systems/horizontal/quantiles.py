"""The same bins at all participants of a job split by row, from sums alone.

Tian et al., "FederBoost" (arXiv 2011.02796), section 4.2. The paper seeks one quantile after the other, each by a
binary search between the least and the largest value. Here all quantiles of all features are sought together and aware
of ties (`data.quantile_search`), with one masked sum per round:

1. The leader begins. The search covers all float32 numbers, so that no domain has to be declared. Participants
   add up an opening vector: rows, present values, categories, bounds of gradients and weights (`rows`).
2. The leader sends probes of all quantiles of all features.
3. Participants add up, under masks, how many of their rows lie below each probe.
4. The leader halves every interval, or ends at the resolution, or where an interval holds too few rows to be probed.
5. The leader sends the cuts; values that fill a bin have it to themselves.

The leader learns how many rows of all participants lie below each probe, see `data.quantile_search`. An exact search
ends with the cuts of the pooled table; any other ends sooner, and probes no interval of few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins, category_bins_of
from treaty.data.columns import Category
from treaty.data.noisy_quantiles import MOST_PROBES, ROUNDS, NoisyQuantiles, SearchNoise, between
from treaty.data.quantile_search import Probes, QuantileSearch, count_below, sorted_keys
from treaty.data.table import Schema
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Flags, Integers
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.systems.horizontal.rows import (
    LabelUnits,
    OpenedCounts,
    Opening,
    OwnLabels,
    SumOpener,
    TrainingStart,
    agreed_start,
    no_rows,
)
from treaty.systems.horizontal.sum_noise import EXPONENTS
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.objectives import Objective

Search = QuantileSearch | NoisyQuantiles
MOST_ROUNDS = 34  # of the quantile search among float32 numbers


@leaks("that the search for bins begins", "control")
class Count(Message):
    """The search for bins begins, or restarts: contribute the first vector."""


@leaks("about where quantiles of all rows lie", "aggregated", guard="max_bin")
class ProbeRequest(Message):
    """Probes: uint32 keys of float32 numbers, or int64, of float64 ones; int32 (numeric features + 1,) each first."""

    keys: Array
    offsets: Array


@leaks(
    "quantiles of all rows, which categories occur (if some are joined: which are frequent), the order of magnitude"
    " of the largest target and weight; without base_score where training starts",
    "aggregated",
    guard="max_bin, base_score",
)
class CommonBins(Message):
    """Bins: int32 (features,) how many; float32 (or float64) cuts and int16 bins of categories, feature after feature.

    Also the loss's `clips`, float64, and where training starts, float64, a number or one of each class.
    """

    n_bins: Array
    cuts: Array
    category_bins: Array
    has_other: Array
    clips: Array
    weight_bound: float
    start: Array


def shown_by_search(fewest: int) -> str:
    """Say what a search without noise has shown its leader; `fewest` are the rows of the smallest group."""
    found = "single rows" if fewest == 1 else f"groups of as few as {fewest} rows"
    return f"the search for bin edges separated {found}"


def most_rounds(origins: Mapping[str, int], max_bin: int, *, exact: bool) -> int:
    # float64 keys have 32 bits more to halve
    halvings = MOST_ROUNDS + 32 * bool(origins)
    # heavy values come first, then, in the worst case one after the other, all cuts, then the values beside them
    return halvings * (max_bin + 2) if exact else halvings


def most_probes(max_bin: int, *, exact: bool = False) -> int:
    """Return how many probes a round of the search has of one feature at most."""
    # one per bin, or on both sides of each cut; each perhaps with the next key
    return (4 if exact else 2) * max_bin


@dataclass(frozen=True, slots=True)
class FoundBins:
    """The result of a search: the message to all, bins, and the loss with bounds that hold for all `n_rows` rows.

    `may_miss`, bool (features,), marks features of which rows have no value; `fewest` rows are the smallest group that
    the search parted from others.
    """

    message: CommonBins
    bins: Bins
    objective: Objective
    n_rows: int
    may_miss: Flags
    fewest: int


# ---------------------------------------------------------------- the leader


def lead_search(
    inputs: RoleInput[Any],
    sums: SumOpener,
    schema: Schema,
    classes: list[Category] | None,
    own: LabelledRows | None,
    noise: SearchNoise | None = None,
) -> FoundBins:
    """Search for a start and for bins as the leader, with `own` rows or none; all participants have the result."""
    common, rows, threads, exact = inputs.common, own or no_rows(schema), inputs.threads, inputs.options.exact_bins
    labels = OwnLabels(inputs, rows, classes, inputs.party.name)
    opening = Opening(schema, bounds=labels.n_bounds if noise is None else 0)
    # columns beyond float32 are searched among float64 numbers, which takes twice as many rounds
    wide = np.array([schema.names[f] in schema.origins for f in opening.numeric], np.bool_)
    limit = most_rounds(schema.origins, common.most_bins, exact=exact)
    ordered = None if own is None else sorted_keys([rows.table.columns[f] for f in opening.numeric], threads)
    while True:
        # [Quantiles, step 1] begin; open rows, present values, categories, bounds, and from sums of labels the start
        sums.broadcast(Count())
        mine = None if own is None else opening.of(rows.table, labels.bounds)
        if mine is not None and noise is not None:
            mine = noise.on_opening(mine)
        opened, rounds = opening.read(sums.total(opening.length, mine)), 0
        cohort, n_rows = sums.summed, opened.rows
        objective = agreed_start(sums, labels, opened, has_rows=own is not None)
        objective.check_sums(n_rows)
        search: Search = QuantileSearch(
            len(wide), common.most_bins, least_rows=common.fewest_rows, exact=exact, most_rounds=limit, wide=wide
        )
        if noise is not None:
            search = NoisyQuantiles(common.most_bins, sigma=noise.sigma, wide=wide)
        search.present(opened.present)
        while (probes := search.probes()) is not None:
            rounds += 1
            inputs.observers.set_up("searching for bins", rounds, MOST_ROUNDS * (1 + exact))
            # [Quantiles, step 2] leader -> all: probes of all quantiles of all features
            sums.broadcast(ProbeRequest(Array.of(probes.keys), Array.of(probes.offsets)))
            # [Quantiles, step 3] participants -> leader, under fresh masks: rows below each probe (`SearchAnswers`)
            below = None if ordered is None else count_below(ordered, probes, threads)
            if below is not None and noise is not None:
                below = noise.on_counts(between(below, probes.offsets))
            counts = sums.total(len(probes.keys), below)
            # [Quantiles, step 4] halve every interval; end at the resolution or where too few rows are left
            search.take(counts)
        # sums with and without a lost member do not fit together; under noise the budget is for one search
        if sums.summed == cohort or noise is not None:
            break
    # [Quantiles, step 5] leader -> all: the cuts; a value that fills a bin has it to itself
    bins = _bins_found(search, opening.numeric, opened, schema, common.most_categories)
    message = pack_bins(bins, objective)
    sums.broadcast(message)
    may_miss = np.zeros(len(schema.names), np.bool_)
    may_miss[opening.numeric] = opened.present < n_rows
    # categories count unknown values as well: whatever is missing from the sum has no value
    for f, of_categories in opened.categories.items():
        may_miss[f] = of_categories.sum() < n_rows
    smallest = search.smallest_interval()
    return FoundBins(message, bins, objective, n_rows, may_miss, int(smallest[smallest > 0].min(initial=n_rows)))


def _bins_found(
    search: Search, numeric: Sequence[int], opened: OpenedCounts, schema: Schema, max_categories: int
) -> Bins:
    n_features = len(schema.names)
    n_bins = np.zeros(n_features, np.int32)
    cuts: list[NDArray[Any] | None] = [None] * n_features
    category_bins: list[NDArray[np.int16] | None] = [None] * n_features
    has_other = [False] * n_features
    for k, (f, found) in enumerate(zip(numeric, search.cuts(), strict=True)):
        # noise may put a cut beyond all numbers
        cuts[f] = finite = found[np.isfinite(found)]
        n_bins[f] = len(finite) + 1 if opened.present[k] > 0 else 0
    for f, counts in opened.categories.items():
        category_bins[f], has_other[f], n_bins[f] = category_bins_of(counts, max_categories)
    return Bins(schema, tuple(cuts), tuple(category_bins), tuple(has_other), n_bins)


# ---------------------------------------------------------------- a participant


class SearchAnswers:
    """A participant's vectors when the `leader` asks for them; `labels` are its own."""

    def __init__(
        self,
        inputs: RoleInput[Any],
        rows: LabelledRows,
        labels: OwnLabels,
        leader: str,
        noise: SearchNoise | None = None,
        threads: int = 1,
    ) -> None:
        self._inputs, self._table, self._labels = inputs, rows.table, labels
        self._leader, self._noise, self._threads = leader, noise, threads
        self._opening = Opening(self._table.schema, bounds=labels.n_bounds if noise is None else 0)
        self._ordered = sorted_keys([self._table.columns[f] for f in self._opening.numeric], threads)
        max_bin, origins, exact = inputs.common.most_bins, self._table.schema.origins, inputs.options.exact_bins
        self._limit = most_rounds(origins, max_bin, exact=exact) if noise is None else ROUNDS
        self._most = most_probes(max_bin, exact=exact) if noise is None else MOST_PROBES
        self._usual, self._rounds = MOST_ROUNDS * (1 + exact), 0

    def vector(self, asked: Message) -> Callable[[], Integers]:
        """Return what makes the vector that the leader asks for; the same again if the sum is repeated.

        Raises PeerProtocolError if it asks for more than a search takes.
        """
        # Never under noise. Answers are checked as they are made: a participant that missed the first sum is in none,
        # and its labels need not fit.
        if isinstance(asked, LabelUnits | TrainingStart):
            return partial(self._labels.answer, asked)
        if isinstance(asked, Count):
            self._rounds, on = 0, None if self._noise is None else self._noise.on_opening
            counted = partial(self._opening.of, self._table, self._labels.bounds)
        else:
            assert isinstance(asked, ProbeRequest)
            self._rounds += 1
            if self._rounds > self._limit:
                raise PeerProtocolError(self._leader, f"expected the bins instead of more probes - from {self._leader}")
            on = None if self._noise is None else self._noise.on_counts
            below = answer_probes(asked, self._ordered, self._most, self._leader, self._threads)
            if on is not None:
                below = between(below, view(asked.offsets, np.int32, (None,), peer=self._leader, what="ProbeRequest"))
            counted = partial(np.asarray, below)
        self._inputs.observers.set_up("searching for bins", self._rounds, self._usual)
        return counted if on is None else lambda: on(counted())


def answer_probes(asked: ProbeRequest, ordered: list[NDArray[Any]], most: int, lead: str, threads: int) -> Integers:
    """Count a participant's rows below each probe, int64 (probes,).

    Raises PeerProtocolError for more than `most` probes of a feature, and for others than a search has.
    """
    offsets = view(asked.offsets, np.int32, (len(ordered) + 1,), peer=lead, what="ProbeRequest.offsets")
    kind = np.int64 if any(of.dtype == np.int64 for of in ordered) else np.uint32
    keys: NDArray[Any] = view(asked.keys, kind, (None,), peer=lead, what="ProbeRequest.keys")
    if offsets[0] != 0 or offsets[-1] != len(keys) or np.any(np.diff(offsets) < 0):
        raise PeerProtocolError(lead, "probes are not ordered by feature", at="ProbeRequest")
    # ascending within each feature; the first probe of a feature may be below the last one before
    first = np.zeros(len(keys), np.bool_)
    first[offsets[:-1][np.diff(offsets) > 0]] = True
    if np.any(np.diff(offsets) > most) or np.any((keys[1:] <= keys[:-1]) & ~first[1:]):
        raise PeerProtocolError(lead, f"expected at most {most} ascending probes of a feature", at="ProbeRequest")
    return count_below(ordered, Probes(keys, offsets), threads)


# ---------------------------------------------------------------- the message about bins


def agreed_objective(agreed: CommonBins, own: Objective, *, noise: bool, peer: str) -> Objective:
    """Return the objective with the bounds in a message.

    Raises PeerProtocolError if they are no powers of two, or below the own ones; with noise, whose scale depends on
    them, if they are not the own ones.
    """
    clips = sent_clips(agreed, own, peer)
    sent, mine = (*clips, agreed.weight_bound), (*own.clips, own.weight_bound)
    allowed = [2.0**exponent for exponent in EXPONENTS]
    if (noise and sent != mine) or any(t not in allowed or t < m for t, m in zip(sent, mine, strict=True)):
        raise PeerProtocolError(peer, "bounds of gradients do not hold for all rows", at="CommonBins")
    return own.agreed(clips, agreed.weight_bound)


def sent_clips(agreed: CommonBins, own: Objective, peer: str) -> list[float]:
    clips = view(agreed.clips, np.float64, (len(own.clips),), peer=peer, what="CommonBins.clips")
    return [float(clip) for clip in clips]


def pack_bins(bins: Bins, objective: Objective) -> CommonBins:
    empty, none = np.empty(0, np.float64 if bins.schema.origins else np.float32), np.empty(0, np.int16)
    return CommonBins(
        Array.of(bins.n_bins),
        Array.of(np.concatenate([empty, *(c for c in bins.cuts if c is not None)])),
        Array.of(np.concatenate([none, *(c for c in bins.category_bins if c is not None)])),
        Array.of(np.array(bins.has_other, np.bool_)),
        Array.of(np.array(objective.clips)),
        objective.weight_bound,
        Array.of(np.array(objective.start, np.float64)),
    )


def unpack_bins(agreed: CommonBins, schema: Schema, limits: tuple[int, int], peer: str) -> Bins:
    """Return the bins in a message.

    `limits` are the most bins of a number and of a categorical column. Raises PeerProtocolError for more, and for bins
    that are not those of the schema's features.
    """
    n_features = len(schema.names)
    n_bins = view(agreed.n_bins, np.int32, (n_features,), peer=peer, what="CommonBins.n_bins")
    kind = np.float64 if schema.origins else np.float32
    cuts: NDArray[Any] = view(agreed.cuts, kind, (None,), peer=peer, what="CommonBins.cuts")
    of_category = view(agreed.category_bins, np.int16, (None,), peer=peer, what="CommonBins.category_bins")
    has_other = view(agreed.has_other, np.bool_, (n_features,), peer=peer, what="CommonBins.has_other")
    numeric = np.array([c is None for c in schema.categories], np.bool_)
    sizes = np.array([0 if c is None else len(c) + 1 for c in schema.categories], np.int64)
    # a feature with n bins has n - 1 cuts
    n_cuts = np.where(numeric, np.maximum(n_bins - 1, 0), 0)
    # each category has at most a bin of its own, and unknown ones another
    most = np.where(numeric, limits[0], np.minimum(sizes, limits[1]))
    if np.any((n_bins < 0) | (n_bins > most)) or len(cuts) != n_cuts.sum() or len(of_category) != sizes.sum():
        raise PeerProtocolError(peer, f"expected bins of {n_features} features, got others", at="CommonBins")
    by_cut = np.split(cuts, np.cumsum(n_cuts)[:-1]) if n_features else []
    # wide columns keep float64 cuts, all others were sent as float64 only because the array is
    by_cut = [of if schema.names[f] in schema.origins else of.astype(np.float32) for f, of in enumerate(by_cut)]
    by_category = np.split(of_category, np.cumsum(sizes)[:-1]) if n_features else []
    for f in range(n_features):
        ascending = np.all(np.isfinite(by_cut[f])) and np.all(np.diff(by_cut[f]) > 0) if numeric[f] else True
        if not ascending or np.any((by_category[f] < 0) | (by_category[f] > n_bins[f])):
            raise PeerProtocolError(peer, "expected ascending cuts and existing bins", at="CommonBins")
    return Bins(
        schema,
        tuple(c if numeric[f] else None for f, c in enumerate(by_cut)),
        tuple(None if numeric[f] else c for f, c in enumerate(by_category)),
        tuple(bool(other) for other in has_other),
        n_bins.copy(),
    )
