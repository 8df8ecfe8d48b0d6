"""Both ends of the search for a horizontal job's bins; `horizontal_bins` says what is summed and what that shows."""

from __future__ import annotations

from dataclasses import dataclass

from treaty.data.binning import Bins
from treaty.data.columns import Category
from treaty.data.quantile_search import sorted_keys
from treaty.data.table import Schema
from treaty.errors import PeerProtocolError
from treaty.messaging.party import Party
from treaty.systems.federboost_horizontal.noise import SEARCH_ROUNDS, SumNoise
from treaty.systems.horizontal.members import Membership
from treaty.systems.horizontal.quantiles import (
    MOST_ROUNDS,
    Agreed,
    Asked,
    Count,
    Opening,
    answer_probes,
    choose_bins,
)
from treaty.systems.horizontal.sums import Collector
from treaty.systems.pooled.training import Labelled, objective_for
from treaty.systems.tree_options import TreeOptions
from treaty.trees.objectives import Objective


@dataclass(frozen=True, slots=True)
class FoundBins:
    """What the search found.

    Attributes
    ----------
    bins : Bins
    objective : Objective
        With the bounds of everybody's gradients.
    spent : str
        In words: what the search parted, or what all noise of the training costs.
    """

    bins: Bins
    objective: Objective
    spent: str


def agree_on_bins(
    collector: Collector,
    rows: Labelled,
    has_rows: bool,
    schema: Schema,
    classes: list[Category] | None,
    options: TreeOptions,
    noise: SumNoise,
    threads: int,
) -> FoundBins:
    """Open how many rows there are and what bounds gradients, then search for bins, as the leader."""
    own_objective = objective_for(rows, classes, options)
    opening = Opening(schema, bounds=noise.budget is None)
    own = opening.of(rows.table, own_objective)
    while True:
        collector.tell_all(Count())
        opened = collector.total(opening.length, noise.on_opening(own) if has_rows else None)
        cohort = collector.summed
        objective = opening.bounded(opened, own_objective)
        objective.check_sums(opening.rows(opened))
        bins, smallest = choose_bins(
            lambda own, length: collector.total(length, own if own is None else noise.on_search(own)),
            collector.tell_all,
            opening,
            opened,
            schema,
            options.max_bin,
            own=rows.table if has_rows else None,
            least_rows=options.fewest_rows,
            most_rounds=_search_rounds(noise),
            threads=threads,
        )
        if collector.summed == cohort:  # what was opened with somebody's rows does not fit what is opened without
            break
    if noise.budget is not None:
        return FoundBins(bins, objective, str(noise.budget))
    fewest = int(smallest[smallest > 0].min(initial=opening.rows(opened)))
    return FoundBins(bins, objective, f"the search for quantiles parted groups of as few as {fewest} rows")


def answer_search(
    party: Party,
    leader: str,
    rows: Labelled,
    objective: Objective,
    noise: SumNoise,
    sums: Membership,
    max_bin: int,
    threads: int,
) -> Agreed:
    """Take part in the search for bins, until the leader tells them.

    Raises
    ------
    PeerProtocolError
        When the leader begins anew without need, or asks for more than a search takes.
    """
    opening = Opening(rows.table.schema, bounds=noise.budget is None)
    ordered = sorted_keys([rows.table.columns[f] for f in opening.numeric], threads)
    rounds, cohort = 0, frozenset[str]()
    while True:
        match party.receive(leader, Count, Asked, Agreed):
            case Count() as count:
                sums.hear(count)
                if sums.member.there == cohort:
                    raise PeerProtocolError(
                        leader, f"expected the search to go on, got another - at Count from {leader}"
                    )
                rounds, cohort = _search_rounds(noise), sums.member.there
                sums.give(noise.on_opening(opening.of(rows.table, objective)))
            case Asked() as asked:
                sums.hear(asked)
                if rounds == 0:
                    raise PeerProtocolError(leader, f"expected the bins, got more probes - at Asked from {leader}")
                rounds -= 1
                sums.give(noise.on_search(answer_probes(asked, ordered, max_bin, leader, threads)))
            case Agreed() as agreed:
                return agreed


def _search_rounds(noise: SumNoise) -> int:
    """Return how many rounds the search for quantiles may take."""
    return MOST_ROUNDS if noise.budget is None else SEARCH_ROUNDS
