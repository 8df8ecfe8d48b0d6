"""What the active party has of a partner's columns once it has opened their sums: the input of `privacy.exact_sums`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from treaty.compute import Flags, Int32s, Integers
from treaty.privacy.exact_sums import OpenedNode
from treaty.trees.columns import SumsSource
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level, complete_sums


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
        """See `SumsSource`."""
        self._gradients = grad.copy(), hess.copy()
        self._parents: Integers | None = None
        self.columns.start_tree(grad, hess, rows, columns)

    def end_tree(self) -> None:
        """See `SumsSource`."""
        self.columns.end_tree()

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        """See `SumsSource`."""
        followed = level.parent_index >= 0
        self._level, self._followed = level, followed
        members, starts = rows.rows(np.concatenate([level.asked, level.nodes[followed]]), sampled=True)
        self._rows = [members[first:last].copy() for first, last in pairwise(starts)]
        self.columns.ask_sums(level, rows)

    def sums(self) -> Integers:
        """See `SumsSource`."""
        asked = self.columns.sums()
        self._parents = complete_sums(self._level, asked, self._parents)
        for rows, sums in zip(self._rows, [*asked, *self._parents[self._followed]], strict=True):
            self._note(OpenedNode(rows, *self._gradients, sums.copy()))
        return asked

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        """See `SumsSource`."""
        self.columns.ask_left(features, left_bins, rows, starts)

    def left(self) -> tuple[Int32s, Flags]:
        """See `SumsSource`."""
        return self.columns.left()
