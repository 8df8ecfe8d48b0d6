"""What the server finds out about all users' rows before trees grow: how many there are, bounds, bins."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.data.table import Schema, Table
from treaty.messaging.messages import decode_body, view
from treaty.models.checkpoints import Checkpoint
from treaty.systems.fedxgb.messages import RowSummary
from treaty.systems.fedxgb.replay import forest_of
from treaty.systems.fedxgb.sums.server import Crowd
from treaty.systems.horizontal.quantiles import (
    CommonBins,
    Count,
    Opening,
    ProbeRequest,
    choose_bins,
    most_rounds,
    note_search,
    told_by_search,
    unpack_bins,
)
from treaty.systems.horizontal.start import OwnLabels, agreed_start
from treaty.systems.system import LabelledRows, Seat
from treaty.trees.objectives import Objective


@dataclass(frozen=True, slots=True)
class AllRows:
    """What the server knows of all users' rows before trees grow; `objective` has the bounds of all their gradients."""

    bins: Bins
    objective: Objective
    n_rows: int
    may_miss: NDArray[np.bool_]  # (features,): whether rows have no value
    spent: str  # in words: the smallest group of rows that the search for bins told from others


def search(seat: Seat, crowd: Crowd, schema: Schema) -> AllRows:
    """Open the number of rows, where training starts and the bounds of gradients, then search for bins."""
    common = seat.common
    none = LabelledRows(Table(schema, [np.empty(0, np.float32)] * len(schema.names), 0), np.empty(0))
    labels = OwnLabels(seat, none, seat.classes, seat.party.name)
    opening = Opening(schema, bounds=labels.n_bounds)

    def total(own: NDArray[np.int64] | None, length: int) -> NDArray[np.int64]:
        return crowd.total(length)

    crowd.tell(Count())
    opened = crowd.total(opening.length)
    n_rows = opening.rows(opened)
    objective = agreed_start(labels, opening, opened, total, crowd.tell, has_rows=False)
    objective.check_sums(n_rows)
    asked = count(1)

    def ask(probes: ProbeRequest) -> None:
        note_search(seat.phase, next(asked))
        crowd.tell(probes)

    bins, smallest = choose_bins(
        total, ask, opening, opened, schema, common.max_bin,
        own=None, least_rows=common.fewest_rows, most_rounds=most_rounds(schema.origins), threads=seat.threads,
    )  # fmt: skip
    fewest = int(smallest[smallest > 0].min(initial=n_rows))
    spent = told_by_search(fewest)
    return AllRows(bins, objective, n_rows, _may_miss(opening, opened, len(schema.names), n_rows), spent)


def known(seat: Seat, crowd: Crowd, kept: Checkpoint) -> AllRows:
    """Return what an interrupted training knew of all rows; nothing is summed again."""
    crowd.tell(Count())
    part, name = kept.part, seat.party.name
    summary = decode_body(kept.bins, RowSummary, peer=name)
    bins = unpack_bins(decode_body(part.bins, CommonBins, peer=name), part.schema, seat.common.max_bin, name)
    may_miss = view(summary.may_miss, np.bool_, (len(bins.n_bins),), peer=name, what="RowSummary.may_miss")
    return AllRows(bins, forest_of(kept).objective, summary.n_rows, may_miss, part.spent)


def _may_miss(opening: Opening, opened: NDArray[np.int64], n_features: int, n_rows: int) -> NDArray[np.bool_]:
    """Return which features have rows without a value."""
    may_miss = np.zeros(n_features, np.bool_)
    may_miss[opening.numeric] = opening.present(opened) < n_rows
    for f, counts in opening.categories(opened).items():
        may_miss[f] = counts.sum() < n_rows
    return may_miss
