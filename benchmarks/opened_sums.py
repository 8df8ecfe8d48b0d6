"""Trees grown in one place, and what an active party of SecureBoost would have opened of the passive one's columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from treaty import GBDTClassifier, SecureBoost
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.models.trees import record_split
from treaty.privacy.exact_sums import OpenedNode
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical import encrypted
from treaty.systems.vertical.exact_sums import WatchedColumns
from treaty.trees.boosting import Forest, boost
from treaty.trees.columns import ColumnSource, SumsFinder, SumsSource
from treaty.trees.ensemble import SplitTable
from treaty.trees.objectives import make_objective


def columns_of(x: NDArray[np.float64], max_bin: int) -> ColumnSource:
    """Bin a table of numbers."""
    table, splits = to_table(x), SplitTable()
    bins = fit_bins(table, max_bin)
    return ColumnSource(
        bins.transform(table), bins.offsets, table.schema.categorical, lambda *split: record_split(splits, bins, *split)
    )


def grow(
    active: ColumnSource,
    passive: ColumnSource,
    y: NDArray[np.int64],
    changes: dict[str, object],
    watched: type[WatchedColumns] = WatchedColumns,
    loss: str = "logistic",
) -> list[OpenedNode]:
    """Train on both parties' columns; return what was opened of the passive one's, tree after tree."""
    options = BoostingOptions(**{"random_state": 0, **changes}).checked(SecureBoost())
    labels = y.astype(np.float64)
    objective = make_objective(loss, labels, None, n_classes=len(np.unique(y)), fractional_bits=options.fractional_bits)
    nodes: list[OpenedNode] = []
    rules, forest = options.rules(objective), Forest(objective, ("active", "passive"))
    finder = SumsFinder([active, watched(passive, nodes.append)], len(y), rules, own=0)
    columns = len(active.categorical) + len(passive.categorical)
    boost(finder, labels, None, forest, rules, options.plan(columns))
    return nodes


def opened_by_job(
    system: SystemOptions, tables: dict[str, NDArray[np.float64]], y: NDArray[np.int64]
) -> list[OpenedNode]:
    """Train between two parties, the first active; return what it opened of the other's columns."""
    nodes: list[OpenedNode] = []

    def watching(sources: Sequence[SumsSource], *given: Any, **named: Any) -> SumsFinder:
        passive = encrypted.PassiveColumns
        watched = [WatchedColumns(of, nodes.append) if isinstance(of, passive) else of for of in sources]
        return SumsFinder(watched, *given, **named)

    with patch.object(encrypted, "SumsFinder", watching):
        GBDTClassifier(system, base_score=0.5, random_state=0).fit(tables, y)
    return nodes


def of_first_trees(nodes: list[OpenedNode], trees: int) -> list[OpenedNode]:
    """Return the nodes of the first trees."""
    known: dict[int, int] = {}
    return [node for node in nodes if known.setdefault(id(node.grad), len(known)) < trees]
