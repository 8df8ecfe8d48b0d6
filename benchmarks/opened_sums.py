"""Trees grown in one place, and what an active party of SecureBoost would have opened of the passive one's columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treaty import GBDTClassifier, SecureBoost
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.models.trees import record_split
from treaty.privacy.exact_sums import OpenedNode
from treaty.systems.observers import Recording, observing
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.trees.boosting import Boosting, Forest
from treaty.trees.columns import ColumnSource, SumsSource, grow_trees
from treaty.trees.ensemble import SplitTable
from treaty.trees.growth import RowPartition
from treaty.trees.objectives import make_objective
from treaty.trees.splits import Level, complete_sums


def columns_of(x: NDArray[np.float64], max_bin: int) -> ColumnSource:
    """Bin a table of numbers."""
    table, splits = to_table(x), SplitTable()
    bins = fit_bins(table, max_bin)
    return ColumnSource(
        bins.transform(table), bins.offsets, table.schema.categorical, lambda *split: record_split(splits, bins, *split)
    )


class WatchedColumns:
    """A source of sums whose opened sums are noted: of the nodes asked about, and of their siblings by subtraction.

    The grower, or the active party, uses it as `columns`, a `SumsSource`; `note` is called with each node.
    """

    def __init__(self, columns: SumsSource, note: Callable[[OpenedNode], None]) -> None:
        self.columns = columns
        self.offsets: Int32s = columns.offsets
        self.categorical: Flags = columns.categorical
        self._note = note

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        self._gradients = grad.copy(), hess.copy()
        self._parents: Integers | None = None
        self.columns.start_tree(grad, hess, rows, columns)

    def end_tree(self) -> None:
        self.columns.end_tree()

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        followed = level.parent_index >= 0
        self._level, self._followed = level, followed
        members, starts = rows.rows(np.concatenate([level.asked, level.nodes[followed]]), sampled=True)
        self._rows = [members[first:last].copy() for first, last in pairwise(starts)]
        self.columns.ask_sums(level, rows)

    def sums(self) -> Integers:
        asked = self.columns.sums()
        self._parents = complete_sums(self._level, asked, self._parents)
        for rows, sums in zip(self._rows, [*asked, *self._parents[self._followed]], strict=True):
            self._note(OpenedNode(rows, *self._gradients, sums.copy()))
        return asked

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        self.columns.ask_left(features, left_bins, rows, starts)

    def left(self) -> tuple[Int32s, Flags]:
        return self.columns.left()


def grow(
    active: ColumnSource,
    passive: ColumnSource,
    y: NDArray[np.int64],
    changes: dict[str, object],
    watched: type[WatchedColumns] = WatchedColumns,
    loss: str = "logistic",
) -> list[OpenedNode]:
    """Train on both parties' columns; return what was opened of the passive one's, tree after tree."""
    options = BoostingOptions(**{"n_estimators": 20, "max_depth": 3, "random_state": 0, **changes}).checked(
        SecureBoost()
    )
    labels = y.astype(np.float64)
    objective = make_objective(loss, labels, None, n_classes=len(np.unique(y)), fractional_bits=options.fractional_bits)
    nodes: list[OpenedNode] = []
    rules, forest = options.rules(objective), Forest(objective, ("active", "passive"))
    columns = len(active.categorical) + len(passive.categorical)
    grow_trees(Boosting(labels, None, forest, rules, options.plan(columns)), [active, watched(passive, nodes.append)])
    return nodes


def opened_by_job(
    system: SystemOptions, tables: dict[str, NDArray[np.float64]], y: NDArray[np.int64]
) -> list[OpenedNode]:
    """Train between two parties, the first active; return what it opened of the other's columns."""
    recording, first = Recording(), next(iter(tables))
    with observing(lambda inputs: [recording] if inputs.party.name == first else []):
        GBDTClassifier(system, n_estimators=20, max_depth=3, learning_rate=0.3, base_score=0.5, random_state=0).fit(
            tables, y
        )
    (nodes,) = recording.nodes.values()
    return nodes


def of_first_trees(nodes: list[OpenedNode], trees: int) -> list[OpenedNode]:
    """Return the nodes of the first trees."""
    known: dict[int, int] = {}
    return [node for node in nodes if known.setdefault(id(node.grad), len(known)) < trees]
