"""What messages tell that systems split by row share: keys, masked sums, and the search for common bins."""

from __future__ import annotations

from dataclasses import dataclass

from treaty.systems.expected import Shape, Trees
from treaty.systems.horizontal.masked_sums import MaskedInput, MaskShares, PassedShares, SealedShares, Survivors
from treaty.systems.horizontal.members import (
    MaskKeyPair,
    MaskKeyPairs,
    MemberKey,
    OpenedSum,
    Roster,
    SumVoid,
    SurvivorSignature,
    SurvivorSignatures,
)
from treaty.systems.horizontal.quantiles import CommonBins, Count, LabelUnits, ProbeRequest, TrainingStart
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.told import Lines, Told, When, lines

SUMS = (
    "of each bin of each column in each node the sum of gradients, sum of hessians and number of rows, over all rows "
    "in the sum; before, numbers of rows below points that are tried"
)
"""What opened sums are about."""


def keys_told(collector: tuple[str, ...], members: tuple[str, ...]) -> Lines:
    """Return the lines of the keys that members of sums make for a job."""
    return lines(
        Told(MemberKey, members, collector, "a signing key of this run", "control"),
        Told(Roster, collector, members, "everybody's signing key, and a random number", "control"),
        Told(MaskKeyPair, members, collector, "public keys of this run, signed", "control"),
        Told(MaskKeyPairs, collector, members, "everybody's public keys", "control"),
    )


def survivors_told(aggregator: tuple[str, ...], members: tuple[str, ...]) -> Lines:
    """Return the lines of sums that open though some vectors do not come, but for what proves who is in them."""
    return lines(
        Told(SealedShares, members, aggregator, "shares of masks, sealed for others", "encrypted"),
        Told(PassedShares, aggregator, members, "its shares of others' masks", "masked"),
        Told(Survivors, aggregator, members, "whose vectors are in the sum", "control"),
        Told(
            MaskShares, members, aggregator, "what removes the masks from this sum, and from no vector in it", "masked"
        ),
    )


def lost_told(collector: tuple[str, ...], members: tuple[str, ...]) -> Lines:
    """Return the lines of sums among members that go on without lost ones."""
    return lines(
        survivors_told(collector, members),
        Told(SurvivorSignature, members, collector, "a signature on the list of those in the sum", "control"),
        Told(SurvivorSignatures, collector, members, "everybody's signatures on that list", "control"),
        Told(OpenedSum, collector, members, "that the sum is opened", "control"),
        Told(SumVoid, collector, members, "that the sum is void and comes again", "control"),
    )


def input_told(sender: tuple[str, ...], receiver: tuple[str, ...], guard: str = "", when: When | None = None) -> Told:
    """Return the line of masked vectors whose sum the receiver opens."""
    return Told(
        MaskedInput, sender, receiver, f"nothing alone; with all others: {SUMS}", "aggregated", guard, when=when
    )


def search_told(lead: tuple[str, ...], others: tuple[str, ...]) -> Lines:
    """Return the lines of the search for common bins and for where training starts."""
    return lines(
        Told(Count, lead, others, "that the search for bins begins", "control"),
        Told(LabelUnits, lead, others, "the size of the largest label and weight, roughly", "aggregated", "base_score"),
        Told(TrainingStart, lead, others, "the mean of all labels, or classes' shares", "aggregated", "base_score"),
        Told(ProbeRequest, lead, others, "about where quantiles of all rows lie", "aggregated", "max_bin"),
        Told(
            CommonBins,
            lead,
            others,
            "quantiles of all rows, which categories are frequent, the order of magnitude of the largest target and "
            "weight; without base_score where training starts",
            "aggregated",
            "max_bin, base_score",
        ),
    )


# ----------------------------------------------------------------
# What sums over owners of rows are expected to take: numbers that each sends, and rounds; the same in all systems.

_PROBES = 8
"""Of the search for bins, by column and bin: numbers in all rounds together."""
_SEARCHES = 14
"""Sums before the first tree."""
_OPENING = 1000
"""Numbers of the first sums, whatever the columns."""
STEP_BYTES = 400
"""What the leader tells of a level, beside its splits."""


@dataclass(frozen=True, slots=True)
class SumsOfRows:
    """Of one owner of rows: numbers that it adds to all sums, and how many sums there are; bytes that it is told."""

    numbers: float
    sums: int
    told: float


def sums_of_rows(common: BoostingOptions, shape: Shape, trees: Trees) -> SumsOfRows:
    """Return what sums of histograms take, and the search for bins before them."""
    columns, slots = max(shape.columns.values()), max(shape.slots.values())
    probes = _PROBES * common.most_bins * columns
    told = 4.0 * (probes + slots) + trees.count * (trees.depth * STEP_BYTES + trees.splits * 120)
    return SumsOfRows(
        probes + _OPENING + trees.count * trees.asked * 3.0 * slots, _SEARCHES + trees.count * trees.depth, told
    )
