"""Routes and costs of the messages that systems split by row share: keys, masked sums, the search for common bins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treaty.data.noisy_quantiles import ROUNDS
from treaty.systems.expected import Shape, Trees
from treaty.systems.horizontal.held_out import NOISY_ODDS
from treaty.systems.horizontal.masked_sums import MaskShares, PassedShares, SealedShares, Survivors
from treaty.systems.horizontal.members import MaskKeyPair, MaskKeyPairs, MemberKey, Roster
from treaty.systems.horizontal.quantiles import CommonBins, Count, ProbeRequest
from treaty.systems.horizontal.rows import LabelUnits, TrainingStart, starts_from_sums
from treaty.systems.horizontal.sum_noise import looks
from treaty.systems.leakage import Route, Routes, When, between, routes
from treaty.systems.pooled.options import BoostingOptions


def keys_routes(collector: tuple[str, ...], members: tuple[str, ...]) -> Routes:
    return routes(
        Route(MemberKey, members, collector),
        Route(Roster, collector, members),
        Route(MaskKeyPair, members, collector),
        Route(MaskKeyPairs, collector, members),
    )


def survivors_routes(aggregator: tuple[str, ...], members: tuple[str, ...]) -> Routes:
    """Return the routes of sums that survive lost vectors, without those of the proofs of who is in them."""
    return routes(
        Route(SealedShares, members, aggregator, "masks"),
        Route(PassedShares, aggregator, members, "masks"),
        Route(Survivors, aggregator, members),
        Route(MaskShares, members, aggregator),
    )


NOISY = When("epsilon_total", lambda options, common: options.adds_noise)
PLAIN = When("without epsilon_total", lambda options, common: not options.adds_noise)
KEPT_BACK = When("validation_fraction", lambda options, common: options.holds_out_rows)
_ESTIMATED_START = When("base_score=None without epsilon_total", starts_from_sums)


def search_routes(lead: tuple[str, ...], others: tuple[str, ...]) -> Routes:
    return routes(
        Route(Count, lead, others),
        routes(between(lead, others, LabelUnits, TrainingStart), when=_ESTIMATED_START),
        between(lead, others, ProbeRequest, CommonBins),
    )


_SUMS_OF_LABELS = (
    "the sums of labels and of weights over all rows, or of the weights of each class's rows, from which follows where "
    "training starts (base_score=None)"
)
_START = "where training starts: the mean of all labels, or how frequent each class is (base_score=None)"
_VALUES_BESIDE_CUTS = (
    "of each column of numbers the two values next to every cut, and how many rows have each; of a column with no more "
    "than max_bin values, all of them (bins='exact')"
)
_MIDDLES_OF_VALUES = "the middle between the two values next to every cut, and so each from the other (bins='exact')"


def learned_in_search(options: Any, common: BoostingOptions) -> tuple[list[str], list[str]]:
    """Return what the party that leads the search for a start and for bins can work out, and what all others can."""
    lead, others = [], []
    for holds, of_lead, of_others in (
        (starts_from_sums(options, common), _SUMS_OF_LABELS, _START),
        (options.exact_bins, _VALUES_BESIDE_CUTS, _MIDDLES_OF_VALUES),
    ):
        lead += [of_lead] * holds
        others += [of_others] * holds
    return lead, others


def kept_back(options: Any, common: BoostingOptions) -> str:
    """Return in words what the party that opens sums can work out of owners' held-out rows."""
    when, bins = "after each round", 256
    if options.adds_noise:
        when, bins = f"under noise, after {len(looks(options, common))} rounds", NOISY_ODDS[0]
    groups = "" if options.validation_group is None else f", of each category of {options.validation_group}"
    return (
        f"{when}, how many of the held-out rows ({options.validation_fraction:g} of all) have a label and a "
        f"score in each of {bins} bins{groups}: bins may hold few rows"
    )


# Measured on trainings of all systems split by row: numbers in all rounds of the search for bins, by column and bin,
# and sums before the first tree, of searches that are approximate and exact; numbers of the first sums whatever the
# columns; bytes that the leader sends about a level besides its splits
_PROBES, _SEARCHES, _OPENING, STEP_BYTES = (8, 50), (14, 70), 1000, 400


# Of a column in a round of the noisy search, one for each power of two at first
_CELLS = 250


@dataclass(frozen=True, slots=True)
class SumsOfRows:
    """Of one owner of rows: numbers that it adds to all sums, how many sums there are, and bytes that it receives."""

    numbers: float
    sums: int
    received: float
    # seconds of one core to go down a level of a random tree, for each row; None: trees grow on histograms
    a_level: float | None = None

    def growing(self, trees: Trees, shape: Shape) -> float:
        """Return the seconds in which an owner computes its sums."""
        if self.a_level is not None:
            return trees.count * shape.rows * trees.depth * self.a_level
        return trees.growing(shape.rows, max(shape.columns.values())) / shape.threads


def sums_of_rows(options: Any, common: BoostingOptions, shape: Shape, trees: Trees) -> SumsOfRows:
    """Return what sums of histograms, or of the leaves of random trees, cost, and the search for bins before them."""
    columns, slots, exact = max(shape.columns.values()), max(shape.slots.values()), options.exact_bins
    if options.adds_noise:
        # splits and the last round's sums come back
        numbers, cells = trees.count * 2.0 * (1 << common.depth), _CELLS * columns * ROUNDS
        return SumsOfRows(numbers + cells, ROUNDS + 1 + common.most_rounds, 8.0 * numbers + 4.0 * cells, a_level=5e-9)
    probes = _PROBES[exact] * common.most_bins * columns
    received = 4.0 * (probes + slots) + trees.count * (trees.rounds * STEP_BYTES + trees.splits * 120)
    numbers = probes + _OPENING + trees.count * trees.asked * 3.0 * slots
    return SumsOfRows(numbers, _SEARCHES[exact] + trees.count * trees.rounds, received)
