"""Both ends of the search for where a horizontal job's trees start, and for its bins.

`horizontal.start` and `horizontal.quantiles` say what is summed, and what that shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treaty.data.binning import Bins
from treaty.data.columns import Category
from treaty.data.quantile_search import sorted_keys
from treaty.errors import PeerProtocolError
from treaty.messaging.conversation import Order
from treaty.systems.federboost_horizontal.noise import SEARCH_ROUNDS, SumNoise
from treaty.systems.horizontal.members import Membership
from treaty.systems.horizontal.quantiles import (
    CommonBins,
    Count,
    Opening,
    ProbeRequest,
    answer_probes,
    choose_bins,
    most_rounds,
    told_by_search,
)
from treaty.systems.horizontal.start import LabelUnits, OwnLabels, TrainingStart, agreed_start
from treaty.systems.horizontal.sums import Collector
from treaty.systems.system import LabelledRows, Seat
from treaty.trees.objectives import Objective


@dataclass(frozen=True, slots=True)
class FoundBins:
    """What a search ends with: bins, and the loss with bounds that hold for the gradients of all of so many rows.

    `spent` says in words how small the groups were that the search parted, or what all noise of the training costs.
    """

    bins: Bins
    objective: Objective
    all_rows: int
    spent: str


def agree_on_bins(
    seat: Seat, collector: Collector, rows: LabelledRows, classes: list[Category] | None, noise: SumNoise
) -> FoundBins:
    """As the leader, with own `rows`: open the number of rows, the start and bounds, then search for bins."""
    common, has_rows, schema = seat.common, seat.data is not None, rows.table.schema
    labels = OwnLabels(seat, rows, classes, seat.party.name)
    opening = Opening(schema, bounds=labels.n_bounds if noise.budget is None else 0)
    own = opening.of(rows.table, labels.bounds)
    while True:
        collector.tell_all(Count())
        opened = collector.total(opening.length, noise.on_opening(own) if has_rows else None)
        cohort = collector.summed
        objective = agreed_start(
            labels, opening, opened, lambda own, length: collector.total(length, own), collector.tell_all,
            has_rows=has_rows,
        )  # fmt: skip
        all_rows = opening.rows(opened)
        objective.check_sums(all_rows)
        bins, smallest = choose_bins(
            lambda own, length: collector.total(length, own if own is None else noise.on_search(own)),
            collector.tell_all, opening, opened, schema, common.max_bin, own=rows.table if has_rows else None,
            least_rows=common.fewest_rows, most_rounds=_search_rounds(noise, schema.origins), threads=seat.threads,
        )  # fmt: skip
        if collector.summed == cohort:  # sums with and without a lost member do not fit together
            break
    if noise.budget is not None:
        return FoundBins(bins, objective, all_rows, str(noise.budget))
    fewest = int(smallest[smallest > 0].min(initial=all_rows))
    spent = told_by_search(fewest)
    return FoundBins(bins, objective, all_rows, spent)


def answer_search(
    seat: Seat, sums: Membership, order: Order, rows: LabelledRows, labels: OwnLabels, noise: SumNoise
) -> CommonBins:
    """Take part in the search for a start and for bins, until the leader tells them.

    Raises PeerProtocolError when the leader restarts although nobody was lost, or asks for more than a search takes.
    """
    leader, max_bin, threads = seat.cast.active, seat.common.max_bin, seat.threads
    opening = Opening(rows.table.schema, bounds=labels.n_bounds if noise.budget is None else 0)
    ordered = sorted_keys([rows.table.columns[f] for f in opening.numeric], threads)
    rounds, cohort = 0, frozenset[str]()
    while True:
        match sums.next(order):
            case Count():
                if sums.member.there == cohort:
                    raise PeerProtocolError(leader, f"expected one search for bins - at Count from {leader}")
                rounds, cohort = _search_rounds(noise, rows.table.schema.origins), sums.member.there
                sums.give(noise.on_opening(opening.of(rows.table, labels.bounds)))
            case LabelUnits() | TrainingStart() as told:  # never under noise
                sums.give(labels.answer(told))
            case ProbeRequest() as asked:
                if rounds == 0:
                    raise PeerProtocolError(leader, f"expected no more probes - at ProbeRequest from {leader}")
                rounds -= 1
                sums.give(noise.on_search(answer_probes(asked, ordered, max_bin, leader, threads)))
            case CommonBins() as bins:
                return bins


def _search_rounds(noise: SumNoise, origins: Mapping[str, int]) -> int:
    """Return how many rounds the search for quantiles may take."""
    return most_rounds(origins) if noise.budget is None else SEARCH_ROUNDS
