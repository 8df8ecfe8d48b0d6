"""One tree while it grows, level by level, from node totals alone: it holds no rows and knows no parties.

Whoever drives it finds the best splits of a whole level, gives them to `take`, and divides the rows of the nodes that
`take` returns. Totals become leaf weights at the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import Int32s, Integers
from treaty.trees.ensemble import Tree
from treaty.trees.splits import Level, SplitRules, Splits


class Growth:
    """One tree while it grows, without its rows: the nodes to split next, and the totals of all others.

    `totals` (3,) are the root's sum of grad, sum of hess and number of sampled rows. `level` holds the nodes whose
    best splits are wanted next; None when the tree is complete.
    """

    def __init__(self, totals: Integers, rules: SplitRules) -> None:
        self._rules = rules
        self._totals = [totals[None]]
        self._n_nodes = 1
        # nodes of a level, their left children, records and splits
        self._divided: list[tuple[Int32s, Int32s, Int32s, Splits]] = []
        self.level = _first_level(totals[None], rules)

    def take(self, splits: Splits) -> tuple[Int32s, Int32s, Splits] | None:
        """Take the level's best splits; return nodes to divide, their left children and splits, or None for none.

        `divided` must follow before the next level.
        """
        assert self.level is not None
        kept = np.flatnonzero(splits.feature >= 0)
        level, self.level = self.level, None
        if len(kept) == 0:
            return None
        nodes, chosen, totals = level.nodes, splits, level.totals
        if len(kept) < len(nodes):
            nodes, chosen, totals = nodes[kept], splits.take(kept), totals[kept]
        children = (self._n_nodes + 2 * np.arange(len(kept))).astype(np.int32)
        of_pairs = np.empty((len(kept), 2, 3), np.int64)
        of_pairs[:, 0] = chosen.left_totals
        np.subtract(totals, chosen.left_totals, out=of_pairs[:, 1])
        self._totals.append(of_pairs.reshape(-1, 3))
        self._n_nodes += 2 * len(kept)
        self.level = _next_level(level.depth + 1, of_pairs, children, kept, self._rules)
        self._taken = nodes, children, chosen
        return self._taken

    def divided(self, records: Int32s) -> None:
        """Record the owners' record numbers of the splits that `take` returned."""
        nodes, children, chosen = self._taken
        self._divided.append((nodes, children, records, chosen))

    def tree(self) -> Tree:
        """Return the tree as far as it is grown."""
        totals = np.concatenate(self._totals)
        source, gain = np.full(len(totals), -1, np.int16), np.zeros(len(totals))
        record, left = np.full(len(totals), -1, np.int32), np.full(len(totals), -1, np.int32)
        for nodes, children, records, chosen in self._divided:
            source[nodes], record[nodes], left[nodes], gain[nodes] = chosen.source, records, children, chosen.gain
        return Tree(
            source=source,
            record=record,
            left=left,
            value=np.where(left < 0, self._rules.learning_rate * self._rules.leaf_weight(totals), 0.0),
            gain=gain,
            cover=(totals[:, 1] * self._rules.hess_unit).astype(np.float64),
            count=totals[:, 2],
        )


def _first_level(total: Integers, rules: SplitRules) -> Level | None:
    if rules.max_depth < 1 or total[0, 2] < 2 * rules.min_child_samples:
        return None
    root = np.zeros(1, np.int32)
    return Level(0, root, total, root, total, root, root - 1)


def _next_level(
    depth: int, totals: Integers, children: Int32s, parents: NDArray[np.intp], rules: SplitRules
) -> Level | None:
    """List the children still to be split, and of each pair the smaller one, whose sums are computed.

    ``totals`` are (n_pairs, 2, 3), ``children`` the left ones' numbers, ``parents`` positions in the last level.
    """
    counts = totals[:, :, 2]
    wanted = counts >= 2 * rules.min_child_samples
    asked = wanted.any(axis=1)
    if depth >= rules.max_depth or not asked.any():
        return None
    smaller = (counts[:, 0] > counts[:, 1]).astype(np.int32)
    sides = np.arange(2, dtype=np.int32)
    asked_index = np.repeat(np.cumsum(asked, dtype=np.int32)[:, None] - 1, 2, axis=1)
    parent_index = np.where(sides == smaller[:, None], -1, parents[:, None]).astype(np.int32)
    return Level(
        depth,
        (children[:, None] + sides)[wanted],
        totals[wanted],
        (children + smaller)[asked],
        totals[np.arange(len(totals)), smaller][asked],
        asked_index[wanted],
        parent_index[wanted],
    )
