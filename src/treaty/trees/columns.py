"""Sources of bin sums, the finder that scans them, and the plainest source: binned columns at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.compute import share
from treaty.trees.ensemble import Tree
from treaty.trees.kernels import add_histograms, gather_pairs, look_up_left
from treaty.trees.partition import RowPartition
from treaty.trees.splits import Level, SplitRules, Splits, best_of, complete_sums, scan


class SumsSource(Protocol):
    """The columns of one party: gives bin sums of nodes and decides rows at its own splits.

    What takes a message to answer is cut in two, asking and fetching, so that all sources work at the same time.

    Attributes
    ----------
    offsets : int32 (n_features + 1,)
        First slot of each feature in a node's sums; each feature's last slot is missing values.
    categorical : bool (n_features,)
    """

    offsets: NDArray[np.int32]
    categorical: NDArray[np.bool_]

    def start_tree(
        self,
        grad: NDArray[np.int64],
        hess: NDArray[np.int64],
        rows: NDArray[np.int32] | None,
        columns: NDArray[np.int32],
    ) -> None:
        """Take the tree's gradients (n_rows,), sampled rows (None: all) and columns (of this source, ascending)."""

    def end_tree(self) -> None:
        """Let go of the tree's gradients."""

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        """Ask for the sums of ``level.asked``."""

    def sums(self) -> NDArray[np.int64]:
        """Return what was asked: int64 (n_asked, slots, 3)."""

    def ask_left(
        self,
        features: NDArray[np.int32],
        left_bins: NDArray[np.bool_],
        rows: NDArray[np.int32],
        starts: NDArray[np.int64],
    ) -> None:
        """Ask which of ``rows[starts[k]:starts[k + 1]]`` go left at the split of node k, and have it recorded."""

    def left(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return what was asked: record numbers (n_nodes,) and left mask (n_rows,)."""


class ColumnSource:
    """Binned columns held here.

    Parameters
    ----------
    codes : uint8 (n_rows, n_features)
        Bin of each value; the number of bins is the code of a missing one.
    offsets : int32 (n_features + 1,)
    categorical : bool (n_features,)
    record : callable
        ``record(feature, left_bins) -> int`` writes a chosen split into the owner's lookup table.
    threads : int
    """

    def __init__(
        self,
        codes: NDArray[np.uint8],
        offsets: NDArray[np.int32],
        categorical: NDArray[np.bool_],
        record: Callable[[int, NDArray[np.bool_]], int],
        threads: int = 1,
    ) -> None:
        self.offsets = offsets
        self.categorical = categorical
        self._columns = np.ascontiguousarray(codes.T)
        self._record = record
        self._threads = threads

    def start_tree(
        self,
        grad: NDArray[np.int64],
        hess: NDArray[np.int64],
        rows: NDArray[np.int32] | None,
        columns: NDArray[np.int32],
    ) -> None:
        """See `SumsSource`."""
        self._grad, self._hess, self._features = grad, hess, columns

    def end_tree(self) -> None:
        """See `SumsSource`."""
        del self._grad, self._hess

    def ask_sums(self, level: Level, rows: RowPartition) -> None:
        """Compute the sums at once."""
        members, starts = rows.rows(level.asked, sampled=True)
        pairs = np.empty((len(members), 2), np.int64)
        share(
            lambda a, b: gather_pairs(self._grad, self._hess, members, a, b, pairs),
            len(members),
            self._threads,
            1 << 15,
        )
        sums = np.zeros((len(level.asked), int(self.offsets[-1]), 3), np.int64)
        share(
            lambda a, b: add_histograms(
                self._columns, pairs, members, starts, self._features, self.offsets, a, b, sums
            ),
            len(self._features),
            self._threads,
        )
        self._sums = sums

    def sums(self) -> NDArray[np.int64]:
        """See `SumsSource`."""
        return self._sums

    def ask_left(
        self,
        features: NDArray[np.int32],
        left_bins: NDArray[np.bool_],
        rows: NDArray[np.int32],
        starts: NDArray[np.int64],
    ) -> None:
        """Decide at once."""
        left = np.empty(len(rows), np.bool_)
        share(
            lambda a, b: look_up_left(self._columns, rows, starts, features, left_bins, a, b, left),
            len(rows),
            self._threads,
            1 << 17,
        )
        records = [self._record(int(feature), bins) for feature, bins in zip(features, left_bins, strict=True)]
        self._left = np.array(records, np.int32), left

    def left(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """See `SumsSource`."""
        return self._left


class SumsFinder:
    """The split finder over sources of bin sums, holding the row partition.

    Parameters
    ----------
    sources : sequence of SumsSource
        In party order, which is also how ties are broken.
    n_rows : int
    rules : SplitRules
    threads : int
    """

    def __init__(self, sources: Sequence[SumsSource], n_rows: int, rules: SplitRules, threads: int = 1) -> None:
        self._sources = sources
        self._n_rows = n_rows
        self._rules = rules
        self._threads = threads
        self._first_column = np.cumsum([0, *(len(source.categorical) for source in sources)])

    def start_tree(
        self,
        grad: NDArray[np.int64],
        hess: NDArray[np.int64],
        rows: NDArray[np.int32] | None,
        columns: NDArray[np.int32],
    ) -> NDArray[np.int64]:
        """See `SplitFinder`."""
        self._rows = RowPartition(self._n_rows, rows, self._threads)
        self._parents: list[NDArray[np.int64]] | None = None
        self._features = [
            (columns[(columns >= first) & (columns < last)] - first).astype(np.int32)
            for first, last in zip(self._first_column[:-1], self._first_column[1:], strict=True)
        ]
        for source, features in zip(self._sources, self._features, strict=True):
            source.start_tree(grad, hess, rows, features)
        if rows is None:
            return np.array([grad.sum(), hess.sum(), len(grad)])
        return np.array([grad[rows].sum(), hess[rows].sum(), len(rows)])

    def best_splits(self, level: Level) -> Splits:
        """See `SplitFinder`: ask every source, complete the siblings, scan all with the same kernel."""
        for source in sorted(self._sources, key=lambda s: isinstance(s, ColumnSource)):
            source.ask_sums(level, self._rows)  # columns at hand last: they are summed while the others work
        sums, found = [], []
        for position, (source, features) in enumerate(zip(self._sources, self._features, strict=True)):
            parents = None if self._parents is None else self._parents[position]
            sums.append(complete_sums(level, source.sums(), parents))
            found.append(
                scan(
                    sums[-1],
                    level.totals,
                    features,
                    source.offsets,
                    source.categorical,
                    self._rules,
                    source=position,
                    threads=self._threads,
                )
            )
        self._parents = sums
        return best_of(found)

    def divide(self, nodes: NDArray[np.int32], children: NDArray[np.int32], chosen: Splits) -> NDArray[np.int32]:
        """See `SplitFinder`: every owner decides its own nodes' rows."""
        rows, starts = self._rows.rows(nodes, sampled=False)
        left = np.empty(len(rows), np.bool_)
        records = np.empty(len(nodes), np.int32)
        mine = [np.flatnonzero(chosen.source == position) for position in range(len(self._sources))]
        for source, own in zip(self._sources, mine, strict=True):
            if len(own):
                pieces = [rows[starts[k] : starts[k + 1]] for k in own]
                own_starts = np.cumsum([0, *(len(piece) for piece in pieces)])
                own_rows = rows if len(own) == len(nodes) else np.concatenate(pieces)
                source.ask_left(chosen.feature[own], chosen.left_bins[own], own_rows, own_starts)
        for source, own in zip(self._sources, mine, strict=True):
            if len(own):
                records[own], own_left = source.left()
                if len(own) == len(nodes):
                    left = own_left
                    continue
                at = 0
                for k in own:
                    size = starts[k + 1] - starts[k]
                    left[starts[k] : starts[k + 1]] = own_left[at : at + size]
                    at += size
        self._rows.divide(nodes, children, left)
        return records

    def finish(self, tree: Tree, margins: NDArray[np.float64]) -> None:
        """See `SplitFinder`."""
        for source in self._sources:
            source.end_tree()
        leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
        self._rows.add_to(margins, leaves, tree.value[leaves])
