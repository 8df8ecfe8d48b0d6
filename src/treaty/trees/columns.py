"""Sources of bin sums, the search for a tree's splits among several of them, and the loop that grows trees on them.

The simplest source is binned columns held locally. Roles of published systems write the loop themselves, line by line
with their paper; plain trainings use `grow_trees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from treaty.machine.arrays import Codes, Flags, Int32s, Integers, contiguous, pieces, side_by_side
from treaty.machine.shared_work import share
from treaty.trees.boosting import Boosting, TreeSample
from treaty.trees.constraints import NodeConstraints
from treaty.trees.ensemble import Tree
from treaty.trees.growth import Growth, RowPartition, RowsOfNodes, look_up_left
from treaty.trees.histograms import Histograms
from treaty.trees.outputs import join_outputs
from treaty.trees.splits import Level, SplitRules, Splits, best_of, complete_sums, end_to_end, kept_sums, scan

# of sums of a tree's last level that are completed and scanned at a time
_SCANNED_BYTES = 64 << 20


class SumsSource(Protocol):
    """The columns of one party: gives bin sums of nodes and decides rows at its own splits.

    Requests that take a message are split into asking and fetching, so that all sources work at the same time.
    `offsets`, int32 (n_features + 1,), has the first slot of each feature in a node's sums; its last slot is for
    missing values. `categorical` is bool (n_features,).
    """

    offsets: Int32s
    categorical: Flags

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        """Take the tree's gradients (n_rows,), sampled rows (None: all) and columns (of this source, ascending)."""

    def end_tree(self) -> None:
        """Release the tree's gradients, if the source holds any."""
        return

    def ask_sums(self, level: Level, rows: RowsOfNodes) -> None:
        """Ask for the sums of ``level.asked``."""

    def sums(self) -> Integers:
        """Return the sums asked for: int64 (n_asked, slots, 3)."""

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        """Ask which of ``rows[starts[k]:starts[k + 1]]`` go left at node k's split; its owner records it."""

    def left(self) -> tuple[Int32s, Flags]:
        """Return the answer: record numbers (n_nodes,) and left mask (n_rows,)."""


class BinSums(Protocol):
    """Adds up gradients over bins: `Histograms`, or a cluster."""

    def start_tree(self, grad: Integers, hess: Integers, features: Int32s) -> None: ...
    def end_tree(self) -> None: ...
    def sums(self, rows: Int32s, starts: Integers, firsts: Integers | None = None) -> Integers: ...


MakeSums = Callable[[Codes, Int32s], BinSums]


class ColumnSource:
    """Binned columns held locally.

    `codes`, uint8 or uint16 (n_rows, n_features), are bins; a feature's number of bins is the code of a missing value.
    ``record(feature, left_bins) -> int`` writes a chosen split into the owner's lookup table. `histograms` makes what
    adds up such codes and offsets elsewhere; None: it is done here.
    """

    def __init__(
        self, codes: Codes, offsets: Int32s, categorical: Flags, record: Callable[[int, Flags], int], threads: int = 1,
        histograms: MakeSums | None = None,
    ) -> None:  # fmt: skip
        self._given, self.codes, self._elsewhere = codes, contiguous(codes), histograms
        self.offsets, self.categorical, self.record, self._threads = offsets, categorical, record, threads

    @cached_property
    def _columns(self) -> Codes:
        return contiguous(self._given.T)

    @cached_property
    def _histograms(self) -> BinSums:
        if self._elsewhere is not None:
            return self._elsewhere(self.codes, self.offsets)
        return Histograms(self.codes, self._columns, self.offsets, self._threads)

    def start_tree(self, grad: Integers, hess: Integers, rows: Int32s | None, columns: Int32s) -> None:
        self._gradients = list(zip(grad, hess, [columns] * len(grad), strict=True)) if grad.ndim > 1 else []
        self._histograms.start_tree(*(self._gradients or [(grad, hess, columns)])[0])

    def end_tree(self) -> None:
        self._histograms.end_tree()
        self._gradients.clear()

    def ask_sums(self, level: Level, rows: RowsOfNodes) -> None:
        of_trees = []
        for outputs, places in rows.parts(level.asked):
            found = [] if self._gradients else [self._histograms.sums(*places)]
            for output in self._gradients[outputs]:
                self._histograms.end_tree()
                self._histograms.start_tree(*output)
                found.append(self._histograms.sums(*places))
            of_trees.append(join_outputs(found))
        self._sums = of_trees[0] if len(of_trees) == 1 else np.concatenate(of_trees)

    def sums(self) -> Integers:
        # so large that the caller decides how long they live
        sums = self._sums
        del self._sums
        return sums

    def ask_left(self, features: Int32s, left_bins: Flags, rows: Int32s, starts: Integers) -> None:
        left = np.empty(len(rows), np.bool_)

        def work(first: int, last: int) -> None:
            look_up_left(self._columns, rows, starts, features, left_bins, first, last, left)

        share(work, len(rows), self._threads, least=1 << 14)
        records = [self.record(int(feature), bins) for feature, bins in zip(features, left_bins, strict=True)]
        self._left = np.array(records, np.int32), left

    def left(self) -> tuple[Int32s, Flags]:
        return self._left


MayShow = Callable[[Int32s, Integers], Flags]
"""``may_show(rows, starts)`` returns for each node, ``rows[starts[k]:starts[k + 1]]``, whether others may see it."""


class ShownNodes:
    """Which nodes of a tree other parties may be asked about: all, or those that `may_show` allows.

    Others are asked about a pair of siblings only when both may be shown, as one and the parent reveal the other.
    Everything below a hidden node is hidden. `sampled` says whether the tree is grown on a sample of rows.
    """

    def __init__(self, may_show: MayShow | None, *, sampled: bool) -> None:
        self._may_show, self._sampled = may_show, sampled
        self._hidden: set[int] = set()
        self._before = np.zeros(0, np.bool_)

    def part(self, level: Level) -> tuple[Flags, Level]:
        """Return which nodes of a level are shown, bool (n_nodes,), and the level without the others.

        Call it once for each level, in order.
        """
        shown = np.array([node not in self._hidden for node in level.nodes.tolist()], np.bool_)
        # else `parent_index` counts nodes that others have not seen
        all_along = shown.all() and self._before.all()
        part = level if all_along else level.only(shown, self._before)
        self._before = shown
        return shown, part

    def divided(self, nodes: Int32s, children: Int32s, rows: RowsOfNodes) -> None:
        """Hide new pairs of nodes of which one must not be shown."""
        if self._may_show is None:
            return
        pairs = np.stack([children, children + 1], axis=1)
        shown = self._may_show(*rows.rows(pairs.ravel(), sampled=False))
        if self._sampled:
            # other parties sum the sampled rows alone, but decide all
            shown &= self._may_show(*rows.rows(pairs.ravel(), sampled=True))
        for node, pair, fit in zip(nodes.tolist(), pairs.tolist(), shown.reshape(-1, 2), strict=True):
            if not fit.all() or node in self._hidden:
                self._hidden.update(pair)


class SplitSearch:
    """The search for one tree's splits among the columns of several sources, which it starts for the tree.

    `sources` are in party order, which breaks ties. `own` is the position of the source that sees every node. With
    `alone` the tree is grown on that source alone (reduced leakage); `may_show` limits the nodes that others are asked
    about (`ShownNodes`).
    """

    def __init__(
        self, sources: Sequence[SumsSource], sample: TreeSample, rules: SplitRules, threads: int = 1, *,
        own: int | None = None, alone: bool = False, may_show: MayShow | None = None,
    ) -> None:  # fmt: skip
        self.sample, self.rules, self.threads, self.own = sample, rules, threads, own
        self.shown = ShownNodes(may_show, sampled=sample.rows is not None)
        self.sources = {k: source for k, source in enumerate(sources) if not alone or k == own}
        first = np.cumsum([0, *(len(source.categorical) for source in sources)])
        # the tree's sample of each source's columns
        self.columns = [
            (sample.columns[(sample.columns >= a) & (sample.columns < b)] - a).astype(np.int32)
            for a, b in pairwise(first)
        ]
        self._asked: dict[int, Level] = {}
        self._shown_of_level = np.zeros(0, np.bool_)
        # each source's complete sums of the last level, and of nodes that may be divided later
        self._parents: dict[int, Integers] = {}
        for k, source in self.sources.items():
            source.start_tree(sample.grad, sample.hess, sample.rows, self.columns[k])

    def ask(self, level: Level, rows: RowsOfNodes) -> None:
        """Ask every source for the sums of a level's nodes."""
        self._shown_of_level, for_others = self.shown.part(level)
        parts = {k: level if k == self.own else for_others for k in self.sources}
        self._asked = {k: part for k, part in parts.items() if len(part.nodes)}
        # local columns last: they are summed while the other parties work
        for k in sorted(self._asked, key=lambda k: isinstance(self.sources[k], ColumnSource)):
            self.sources[k].ask_sums(self._asked[k], rows)

    def choose(self, level: Level) -> Splits:
        """Return the best split of each node that was asked about."""
        found = [self.scan(k, level) for k in self._asked]
        if not found:
            return Splits.none(len(level.nodes), numbers=level.totals.shape[1])
        return best_of(found, level.totals, self.rules)

    def asked(self) -> list[tuple[int, SumsSource]]:
        """Return the sources that were asked about nodes of the level, in party order, with their positions."""
        return [(k, self.sources[k]) for k in self._asked]

    def scan(self, k: int, level: Level) -> Splits:
        """Return source k's best split of each node of the level."""
        source, found = self.sources[k], []
        for totals, sums, limits in self.sums(k):
            found.append(scan(
                sums, totals, self.columns[k], source.offsets, source.categorical, self.rules,
                limits=limits, source=k, threads=self.threads,
            ))  # fmt: skip
        return self.of_level(k, found, level)

    def sums(self, k: int) -> Iterator[tuple[Integers, Integers, NodeConstraints | None]]:
        """Yield totals (n, 3), bin sums (n, slots, 3) and limits of the nodes that source k was asked about, by parts.

        Sums of the siblings of asked nodes are completed. Sums of a whole level are kept for the next one alone. The
        last level, the largest, is completed a few nodes at a time, which saves the memory of half its nodes' sums.
        """
        part, parents = self._asked[k], self._parents.pop(k, None)
        asked = self.sources[k].sums()
        at_a_time = max(self.threads, _SCANNED_BYTES // max(1, asked[0].nbytes)) if part.last else len(part.nodes)
        for nodes in pieces(len(part.nodes), at_a_time):
            sums = complete_sums(part, asked, parents, nodes, self.threads)
            yield part.totals[nodes], sums, None if part.limits is None else part.limits.take(nodes)
            if not part.last:
                self._parents[k] = kept_sums(part, parents, sums)

    def of_level(self, k: int, found: Sequence[Splits], level: Level) -> Splits:
        """Join source k's splits of the nodes that `sums` yielded; nodes that it may not see get none."""
        whole = end_to_end(found)
        return whole if self._asked[k] is level else whole.spread(self._shown_of_level)

    def decide(self, nodes: Int32s, splits: Splits, rows: RowsOfNodes) -> tuple[Int32s, Flags]:
        """Let the owners of splits record them and decide their nodes' rows.

        Returns record numbers int32 (n_nodes,), and which rows go left, bool (n_rows,), node after node as
        ``rows.rows(nodes, sampled=False)`` has them.
        """
        members, starts = rows.rows(nodes, sampled=False)
        left, records = np.empty(len(members), np.bool_), np.empty(len(nodes), np.int32)
        mine = {k: of for k in self.sources if len(of := np.flatnonzero(splits.source == k))}
        places: dict[int, Any] = dict.fromkeys(mine, slice(None))
        for k, own in mine.items():
            if len(own) < len(nodes):
                places[k] = np.concatenate([np.arange(starts[node], starts[node + 1]) for node in own])
            own_starts = np.cumsum([0, *np.diff(starts)[own]])
            self.sources[k].ask_left(splits.feature[own], splits.left_bins[own], members[places[k]], own_starts)
        for k, own in mine.items():
            records[own], left[places[k]] = self.sources[k].left()
        return records, left

    def end(self) -> None:
        """End the tree at all sources."""
        for source in self.sources.values():
            source.end_tree()
        # not empty if the tree ended early
        self._parents.clear()


def grow_tree(
    search: SplitSearch, sample: TreeSample, rules: SplitRules, threads: int = 1
) -> tuple[Tree, RowPartition]:
    """Grow a tree level by level; return it, and which node each row is in."""
    rows, growth = sample.partition(threads), Growth(sample.totals, rules)
    while growth.level is not None:
        search.ask(growth.level, rows)
        chosen = growth.take(search.choose(growth.level))
        if chosen is not None:
            nodes, children, splits = chosen
            records, left = search.decide(nodes, splits, rows)
            rows.divide(nodes, children, left)
            search.shown.divided(nodes, children, rows)
            growth.divided(records)
    search.end()
    return growth.tree(), rows


def grow_trees(boosting: Boosting, sources: Sequence[SumsSource]) -> None:
    """Grow all trees of a training on the columns of `sources`."""
    for a_round in boosting:
        for sample in a_round.trees():
            search = SplitSearch(sources, sample, boosting.rules, boosting.threads)
            a_round.add(*grow_tree(search, sample, boosting.rules, boosting.threads))


class JoinedColumns(ColumnSource):
    """Columns of several owners held together, as one source: one pass over them, not one for each.

    The `owners`, in party order, only record their splits. `histograms` as in `ColumnSource`. Records count the tree's
    splits until `name_owners` gives a finished tree its splits' owners.
    """

    def __init__(self, owners: Sequence[ColumnSource], threads: int = 1, histograms: MakeSums | None = None) -> None:
        widths = [len(owner.categorical) for owner in owners]
        slots = np.cumsum([0, *(owner.offsets[-1] for owner in owners)])
        ends = [first + owner.offsets[1:] for owner, first in zip(owners, slots[:-1], strict=True)]
        self._owners = owners
        self._owner_of = np.repeat(np.arange(len(owners)), widths).tolist()
        self._first_of = np.cumsum([0, *widths]).tolist()
        # the owner of each of the tree's records, and its number there
        self._recorded: list[tuple[int, int]] = []
        super().__init__(
            side_by_side([owner.codes for owner in owners]), np.concatenate([[0], *ends]).astype(np.int32),
            np.concatenate([owner.categorical for owner in owners]), self._record_at_owner, threads, histograms,
        )  # fmt: skip

    def _record_at_owner(self, feature: int, left_bins: Flags) -> int:
        owner = self._owner_of[feature]
        self._recorded.append((owner, self._owners[owner].record(feature - self._first_of[owner], left_bins)))
        return len(self._recorded) - 1

    def name_owners(self, tree: Tree) -> None:
        """Write the owners of a finished tree's splits, and their record numbers, into the tree."""
        inner = tree.left >= 0
        if self._recorded:
            tree.source[inner], tree.record[inner] = np.array(self._recorded)[tree.record[inner]].T
            self._recorded.clear()
