"""The same bins at all participants of a horizontal job, from sums alone (Tian et al. 2020, FederBoost, section 4.2).

First all add up a vector: rows, rows in which each feature is present, rows of each category, and, in unary, powers of
two that bound gradients, or labels (`start`), and weights. Then comes the quantile search of `data.quantile_search`,
with a summed vector of counts per round. Last the leader tells all participants the bins.

The leader learns sums over all participants: how many rows lie below each probe. `data.quantile_search` says what
limits that and what does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins, category_bins_of
from treaty.data.columns import Category
from treaty.data.quantile_search import Probes, QuantileSearch, count_below, sorted_keys
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, view
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.training import loss_of, objective_for
from treaty.systems.system import LabelledRows, Phase, RoleInput
from treaty.trees.losses.fixed_point import TallyUnits, bound_of_weights
from treaty.trees.objectives import Objective

MOST_ROUNDS = 34  # of the quantile search among float32 numbers
EXPONENTS = range(-128, 96)  # of the powers of two that bound gradients: leaf values stay far below overflow

Total = Callable[[Integers | None, int], Integers]


def told_by_search(fewest: int) -> str:
    """Say what a search without noise has shown its leader; `fewest` are the rows of the smallest group."""
    found = "lies a single row" if fewest == 1 else f"lie as few as {fewest} rows"
    return f"between two values that the search for bin edges tried {found}"


def most_rounds(origins: Mapping[str, int]) -> int:
    """Return how many rounds the quantile search may take: 32 more among float64 numbers."""
    return MOST_ROUNDS + 32 * bool(origins)


class Count(Message):
    """The search for bins begins, or restarts: contribute the first vector."""

    leakage: ClassVar = MessageLeakage("that the search for bins begins", "control")


class ProbeRequest(Message):
    """Probes: uint32 keys of float32 numbers, or int64, of float64 ones; int32 (numeric features + 1,) each first.

    They tell participants about where quantiles of all rows lie.
    """

    leakage: ClassVar = MessageLeakage("about where quantiles of all rows lie", "aggregated", guard="max_bin")

    keys: Array
    offsets: Array


class CommonBins(Message):
    """Bins: int32 (features,) how many; float32 (or float64) cuts and int16 bins of categories, feature after feature.

    Also the loss's `clips`, float64, and where training starts, float64, a number or one of each class. They tell
    participants the quantiles of all rows, which categories are frequent, the order of magnitude of the largest target
    and weight, and, where the start is estimated, the mean of all labels, or the classes' shares.
    """

    leakage: ClassVar = MessageLeakage(
        "quantiles of all rows, which categories are frequent, the order of magnitude of the largest target and"
        " weight; without base_score where training starts",
        "aggregated",
        guard="max_bin, base_score",
    )

    n_bins: Array
    cuts: Array
    category_bins: Array
    has_other: Array
    clips: Array
    weight_bound: float
    start: Array


def in_unary(bound: float) -> Integers:
    """Return a power of two as a vector whose sums tell how many have which: int64 (len(EXPONENTS),)."""
    exponent = max(round(math.log2(bound)), EXPONENTS[0])
    if exponent > EXPONENTS[-1]:
        raise DataError(f"expected targets and weights below 2^{EXPONENTS[-1]}; scale them down")
    return np.array([int(exponent == e) for e in EXPONENTS])


def largest_in(total: Integers) -> float:
    """Return the largest power of two in a sum of `in_unary`."""
    return 2.0 ** EXPONENTS[int(np.flatnonzero(total)[-1])]


class Opening:
    """The first vector that is summed; it tells, in unary, as many powers of two as there are `bounds`."""

    def __init__(self, schema: Schema, *, bounds: int) -> None:
        self.numeric = [f for f, categories in enumerate(schema.categories) if categories is None]
        self._categorical = [(f, len(c) + 1) for f, c in enumerate(schema.categories) if c is not None]
        sizes = [1, len(self.numeric), *(size for _, size in self._categorical), *[len(EXPONENTS)] * bounds]
        self._starts = np.cumsum([0, *sizes])
        self._bounds = bounds
        self.length = int(self._starts[-1])

    def of(self, table: Table, bounds: Sequence[float]) -> Integers:
        """Return a participant's vector; `bounds` are of derivatives, or labels, and of weights."""
        columns = table.columns
        parts = [[table.n_rows], [int(np.count_nonzero(~np.isnan(columns[f]))) for f in self.numeric]]
        for f, size in self._categorical:
            codes = columns[f][~np.isnan(columns[f])].astype(np.intp)
            parts.append(np.bincount(codes, minlength=size).tolist())
        told = [in_unary(bound) for bound in bounds] if self._bounds else []
        return np.concatenate([*(np.array(part, np.int64) for part in parts), *told])

    def rows(self, total: Integers) -> int:
        """Return how many rows all have together."""
        return max(int(total[0]), 0)

    def present(self, total: Integers) -> Integers:
        """Return in how many rows each numeric feature is present."""
        return self._part(total, 1)

    def categories(self, total: Integers) -> dict[int, Integers]:
        """Return of each categorical feature how many rows each category has, unknown ones last."""
        return {f: np.maximum(self._part(total, 2 + k), 0) for k, (f, _) in enumerate(self._categorical)}

    def bounds(self, total: Integers) -> list[float]:
        """Return the largest bounds among all participants."""
        return [largest_in(self._part(total, k)) for k in range(-self._bounds, 0)]

    def bounded(self, total: Integers, objective: Objective) -> Objective:
        """Return the objective with bounds that hold for all participants' gradients."""
        if not self._bounds:
            return objective
        *clips, weight = self.bounds(total)
        return objective.agreed(clips, weight)

    def _part(self, total: Integers, k: int) -> Integers:
        k %= len(self._starts) - 1
        return total[self._starts[k] : self._starts[k + 1]]


def choose_bins(
    total: Total,
    ask: Callable[[ProbeRequest], None],
    opening: Opening,
    opened: Integers,
    schema: Schema,
    max_bin: int,
    *,
    own: Table | None,
    least_rows: int,
    most_rounds: int,
    threads: int,
) -> tuple[Bins, Integers]:
    """Search for quantiles as the leader; return the bins and, of each numeric feature, the fewest rows in an interval.

    `opened` is the sum of all participants' `opening` vectors. In each round of the search ``ask(probes)`` sends probes
    to the participants, and ``total(counts, length)`` adds their counts to those of the leader's `own` rows (None: it
    has none) and returns the sum. `least_rows` and `most_rounds` are `QuantileSearch`'s. The second result, int64
    (n_numeric,), is over intervals between neighbouring probes.
    """
    wide = np.array([schema.names[f] in schema.origins for f in opening.numeric], np.bool_)
    search = QuantileSearch(len(wide), max_bin, least_rows=least_rows, most_rounds=most_rounds, wide=wide)
    search.present(opening.present(opened))
    ordered = None if own is None else sorted_keys([own.columns[f] for f in opening.numeric], threads)
    while (probes := search.probes()) is not None:
        ask(ProbeRequest(Array.of(probes.keys), Array.of(probes.offsets)))
        counted = None if ordered is None else count_below(ordered, probes, threads)
        search.take(total(counted, len(probes.keys)))
    n_features, present = len(schema.names), opening.present(opened)
    n_bins = np.zeros(n_features, np.int32)
    cuts: list[NDArray[Any] | None] = [None] * n_features
    category_bins: list[NDArray[np.int16] | None] = [None] * n_features
    has_other = [False] * n_features
    for k, (f, found) in enumerate(zip(opening.numeric, search.cuts(), strict=True)):
        cuts[f] = finite = found[np.isfinite(found)]  # noise may put a cut beyond all numbers
        n_bins[f] = len(finite) + 1 if present[k] > 0 else 0
    for f, counts in opening.categories(opened).items():
        category_bins[f], has_other[f], n_bins[f] = category_bins_of(counts, max_bin)
    bins = Bins(schema, tuple(cuts), tuple(category_bins), tuple(has_other), n_bins)
    return bins, search.smallest_interval()


def note_search(phase: Phase | None, rounds: int) -> None:
    """Tell a role's `phase` how many rounds of the search for bins there were; it may end after fewer than the most."""
    if phase is not None:
        phase("searching for bins", rounds, MOST_ROUNDS)


def most_probes(max_bin: int) -> int:
    """Return how many probes a round of the search has of one feature: one per bin, each perhaps with the next key."""
    return 2 * max_bin


def answer_probes(asked: ProbeRequest, ordered: list[NDArray[Any]], max_bin: int, lead: str, threads: int) -> Integers:
    """Count a participant's rows below each probe, int64 (probes,).

    Raises PeerProtocolError when more is asked about a feature than a search for `max_bin` bins needs.
    """
    offsets = view(asked.offsets, np.int32, (len(ordered) + 1,), peer=lead, what="ProbeRequest.offsets")
    kind = np.int64 if any(of.dtype == np.int64 for of in ordered) else np.uint32
    keys: NDArray[Any] = view(asked.keys, kind, (None,), peer=lead, what="ProbeRequest.keys")
    if offsets[0] != 0 or offsets[-1] != len(keys) or np.any(np.diff(offsets) < 0):
        raise PeerProtocolError(lead, f"expected probes feature by feature, got others - at ProbeRequest from {lead}")
    first = np.zeros(len(keys), np.bool_)
    first[offsets[:-1][np.diff(offsets) > 0]] = True
    if np.any(np.diff(offsets) > most_probes(max_bin)) or np.any((keys[1:] <= keys[:-1]) & ~first[1:]):
        expected = f"expected at most {most_probes(max_bin)} ascending probes of a feature"
        raise PeerProtocolError(lead, f"{expected} - at ProbeRequest from {lead}")
    return count_below(ordered, Probes(keys, offsets), threads)


def agreed_objective(agreed: CommonBins, own: Objective, *, noise: bool, peer: str) -> Objective:
    """Return the objective with the bounds that a message tells.

    Raises PeerProtocolError when they are no powers of two, or below the own ones; with noise, whose scale depends on
    them, when they are not the own ones.
    """
    clips = told_clips(agreed, own, peer)
    told, mine = (*clips, agreed.weight_bound), (*own.clips, own.weight_bound)
    allowed = [2.0**exponent for exponent in EXPONENTS]
    if (noise and told != mine) or any(t not in allowed or t < m for t, m in zip(told, mine, strict=True)):
        raise PeerProtocolError(peer, f"expected bounds of everybody's gradients - at CommonBins from {peer}")
    return own.agreed(clips, agreed.weight_bound)


def told_clips(agreed: CommonBins, own: Objective, peer: str) -> list[float]:
    """Return the loss's `clips` that a message tells."""
    shape = (len(own.clips),)
    clips: list[float] = view(agreed.clips, np.float64, shape, peer=peer, what="CommonBins.clips").tolist()
    return clips


def pack_bins(bins: Bins, objective: Objective) -> CommonBins:
    """Return the message that tells a participant the bins."""
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


def unpack_bins(agreed: CommonBins, schema: Schema, max_bin: int, peer: str) -> Bins:
    """Return the bins that a message tells.

    Raises PeerProtocolError when they are not those of the schema's features, or more than `max_bin`.
    """
    n_features = len(schema.names)
    n_bins = view(agreed.n_bins, np.int32, (n_features,), peer=peer, what="CommonBins.n_bins")
    kind = np.float64 if schema.origins else np.float32
    cuts: NDArray[Any] = view(agreed.cuts, kind, (None,), peer=peer, what="CommonBins.cuts")
    of_category = view(agreed.category_bins, np.int16, (None,), peer=peer, what="CommonBins.category_bins")
    has_other = view(agreed.has_other, np.bool_, (n_features,), peer=peer, what="CommonBins.has_other")
    numeric = np.array([c is None for c in schema.categories], np.bool_)
    sizes = np.array([0 if c is None else len(c) + 1 for c in schema.categories], np.int64)
    n_cuts = np.where(numeric, np.maximum(n_bins - 1, 0), 0)
    if np.any((n_bins < 0) | (n_bins > max_bin)) or len(cuts) != n_cuts.sum() or len(of_category) != sizes.sum():
        raise PeerProtocolError(peer, f"expected bins of {n_features} features, got others - at CommonBins from {peer}")
    by_cut = np.split(cuts, np.cumsum(n_cuts)[:-1]) if n_features else []
    by_cut = [of if schema.names[f] in schema.origins else of.astype(np.float32) for f, of in enumerate(by_cut)]
    by_category = np.split(of_category, np.cumsum(sizes)[:-1]) if n_features else []
    for f in range(n_features):
        ascending = np.all(np.isfinite(by_cut[f])) and np.all(np.diff(by_cut[f]) > 0) if numeric[f] else True
        if not ascending or np.any((by_category[f] < 0) | (by_category[f] > n_bins[f])):
            raise PeerProtocolError(peer, f"expected ascending cuts and bins there are - at CommonBins from {peer}")
    return Bins(
        schema,
        tuple(c if numeric[f] else None for f, c in enumerate(by_cut)),
        tuple(None if numeric[f] else c for f, c in enumerate(by_category)),
        tuple(bool(other) for other in has_other),
        n_bins.copy(),
    )


# ----------------- where a training by row starts if `base_score` is left out: from sums over all participants' labels
#
# A party that has all labels estimates it from them: see `tallies` and `start_of` of a loss. Where several have them,
# they add up the same whole numbers: once the number of rows, the largest label and the largest weight are known, the
# leader tells units (`LabelUnits`), and participants answer with their sums of weights and of weighted labels, or of
# each class's weights; then the leader tells where training starts (`TrainingStart`), and they answer with bounds of
# their gradients from there. Each row's part is rounded by itself, so that the start is that of one table, bit for bit.
#
# The leader learns these sums, and in unary the orders of magnitude of participants' largest labels; participants learn
# the start. Under noise nothing is estimated, as sums of labels would have to be paid for.

SUMS_OF_LABELS = (
    "the sums of labels and of weights over all rows, or of the weights of each class's rows, from which follows where "
    "training starts (base_score=None)"
)
START = "where training starts: the mean of all labels, or how frequent each class is (base_score=None)"


class LabelUnits(Message):
    """Contribute sums of labels in these units: powers of two no less than any label and weight; bits of a row's part.

    They tell participants the order of magnitude of the largest label and weight.
    """

    leakage: ClassVar = MessageLeakage(
        "the size of the largest label and weight, roughly", "aggregated", guard="base_score"
    )

    label: float
    weight: float
    bits: Annotated[int, msgspec.Meta(ge=0, le=60)]


class TrainingStart(Message):
    """Contribute the bound of gradients, where training starts from `start`, float64, a number or one of each class.

    It tells participants the mean of all labels, or the classes' shares.
    """

    leakage: ClassVar = MessageLeakage("the mean of all labels, or classes' shares", "aggregated", guard="base_score")

    start: Array


def starts_from_sums(options: SystemOptions, common: BoostingOptions) -> bool:
    """Whether where a training starts is estimated from sums of labels."""
    return common.base_score is None and options.estimates_base_score


class OwnLabels:
    """One party's labels, perhaps none, and what it does with them when the `leader`, named in errors, asks."""

    def __init__(self, inputs: RoleInput, rows: LabelledRows, classes: list[Category] | None, leader: str) -> None:
        self._inputs, self._rows, self._classes, self._leader = inputs, rows, classes, leader
        self.loss = loss_of(np.empty(0), None, None if classes is None else len(classes), None, inputs.common)
        self.summed = starts_from_sums(inputs.options, inputs.common)
        self.n_bounds = 2 if self.summed else len(self.loss.clips) + 1
        """How many `bounds` there are."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """What the opening says: bounds of labels, or else of derivatives; and of weights."""
        if not self.summed:
            given = self.given
            return *given.clips, given.weight_bound
        y, weight = self._rows.y, self._rows.weight
        label = self.loss.label_bound(y) if self._classes is not None or np.any(y) else 2.0 ** EXPONENTS[0]
        return label, bound_of_weights(weight)

    @property
    def given(self) -> Objective:
        """The loss with bounds of own gradients, where nothing is estimated."""
        return objective_for(self._rows, self._classes, self._inputs.options, self._inputs.common)

    def sums(self, units: TallyUnits) -> Integers:
        """Return the own part of the sums of labels."""
        return self.loss.tallies(self._rows.y, self._rows.weight, units)

    def answer(self, told: LabelUnits | TrainingStart) -> Integers:
        """Return what the leader asks for; PeerProtocolError where it fits no training that both agreed to."""
        if isinstance(told, TrainingStart):
            return clips_in_unary(self.starting(told.start, "TrainingStart"))
        allowed, n_rows = [2.0**exponent for exponent in EXPONENTS], len(self._rows.y)
        fits = all(u in allowed and u >= own for u, own in zip((told.label, told.weight), self.bounds, strict=True))
        if not self.summed or not fits or told.bits > TallyUnits.of(n_rows, told.label, told.weight).bits:
            raise self._wrong("units that everybody's labels fit, where base_score is left out", "LabelUnits")
        return self.sums(TallyUnits(told.label, told.weight, told.bits))

    def starting(self, start: Array, where: str) -> Objective:
        """Return the loss that starts where it was told in `where`, with bounds of own gradients."""
        shape = (len(self.loss.start),)
        told = view(start, np.float64, shape, peer=self._leader, what=f"{where}.start").tolist()
        if not self.summed:
            if tuple(told) != self.given.start:
                raise self._wrong("the start of the job's base_score", where)
            return self.given
        try:
            self.loss.starting(told).check()
        except ConfigError:
            raise self._wrong("a start that the loss can have", where) from None
        return objective_for(self._rows, self._classes, self._inputs.options, self._inputs.common, told)

    def _wrong(self, expected: str, where: str) -> PeerProtocolError:
        leader = self._leader
        return PeerProtocolError(leader, f"expected {expected}, got another - at {where} from {leader}")


def agreed_start(
    own: OwnLabels, opening: Opening, opened: Integers, total: Total, tell: Callable[[Message], None], *, has_rows: bool
) -> Objective:
    """Return, as the leader, the loss with a start and bounds that hold for all participants' labels.

    `opened` is the sum of all `opening` vectors. ``tell(message)`` tells participants what to sum next, and
    ``total(vector, length)`` adds what they answer to the leader's own vector (None: it has no rows).
    """
    if not own.summed:
        return opening.bounded(opened, own.given)
    label, weight = opening.bounds(opened)
    units = TallyUnits.of(opening.rows(opened), label, weight)
    mine = own.sums(units)
    tell(LabelUnits(units.label, units.weight, units.bits))
    sums = total(mine if has_rows else None, len(mine))
    told = Array.of(np.array(own.loss.start_of(sums.tolist(), units.label)))
    objective = own.starting(told, "TrainingStart")
    tell(TrainingStart(told))
    n_clips = len(objective.clips)
    clips = total(clips_in_unary(objective) if has_rows else None, n_clips * len(EXPONENTS))
    return objective.agreed([largest_in(of) for of in np.split(clips, n_clips)], weight)


def clips_in_unary(objective: Objective) -> Integers:
    """Return the loss's `clips`, one `in_unary` after the other."""
    return np.concatenate([in_unary(clip) for clip in objective.clips])
