"""How much the active party may ask of an owner of columns: no more than the job's options, which both agreed to.

Options are compared before anything else is sent. What follows from them is counted here by the owner itself: trees,
levels, nodes, splits and checkpoints; how often rows are decided, in `decisions`. What may come when is in each
system's table of messages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.errors import PeerProtocolError
from treaty.messaging.messages import view
from treaty.systems.system import Seat
from treaty.systems.vertical.encrypted_columns import SplitRequest


class TrainingLimits:
    """How many trees an owner takes part in, and how many splits and checkpoints it is told of.

    A round has a tree for each class where there are more than two. `kept_rounds` are those that a resumed training
    begins with; `alone_rounds`, the first ones, are grown without this party.
    """

    def __init__(self, active: str, seat: Seat, kept_rounds: int, alone_rounds: int = 0) -> None:
        common = seat.common
        self._active, self._rounds, self._trees_a_round = active, common.n_estimators, seat.trees_a_round
        self._check(kept_rounds <= self._rounds, f"at most {self._rounds} rounds kept")
        self._begun_with = self._told = kept_rounds
        self._most_trees = max(0, self._rounds - max(kept_rounds, alone_rounds)) * self._trees_a_round
        leaves = max(1, seat.rows.table.n_rows // common.fewest_rows)  # each has `fewest_rows` rows at least
        self._splits_a_tree = min(1 << common.max_depth, leaves) - 1
        self._trees = self._splits = 0

    def tree(self) -> None:
        """Count a tree that begins."""
        self._trees += 1
        self._check(self._trees <= self._most_trees, f"at most {self._most_trees} trees, as the job's options say")

    def checkpoint(self, rounds: int) -> None:
        """Note a request to keep what there is after `rounds` rounds; there is one for a round at most."""
        self._check(self._told < rounds <= self._rounds, f"a checkpoint a round, of {self._rounds} at most")
        self._told = rounds

    def chosen(self, splits: int, rounds: int) -> None:
        """Count splits chosen in trees of which the last belongs to the round after `rounds` finished ones."""
        self._check(splits > 0 and 0 <= rounds <= self._rounds, f"splits of at most {self._rounds} rounds")
        self._splits += splits
        grown = min(rounds + 1, self._rounds) - self._begun_with
        most = max(0, grown) * self._trees_a_round * self._splits_a_tree
        self._check(self._splits <= most, f"at most {most} splits in the trees so far, as the job's options say")

    def _check(self, fine: bool, expected: str) -> None:
        if not fine:
            raise PeerProtocolError(self._active, f"expected {expected}, got more - from {self._active}")


class TreeLimits:
    """How much the active party may ask of an owner of columns within a tree; what may come when is in `tree_table`.

    Children have `fewest_rows` rows at least, so a node to be split has at least twice as many.
    """

    def __init__(self, active: str, max_depth: int, fewest_rows: int) -> None:
        self._active, self._max_depth, self._fewest_rows = active, max_depth, fewest_rows

    def start(self, columns: NDArray[np.int32]) -> None:
        self._columns, self._levels, self._nodes, self._last_row = columns, 0, 0, -1

    def sampled(self, rows: NDArray[np.int32]) -> None:
        """Record some rows of the tree's sample, ascending; reject those that are not beyond the ones before."""
        if len(rows):
            self._check(rows[0] > self._last_row, "rows of a sample that ascend from message to message")
            self._last_row = int(rows[-1])

    def asked(self, nodes: int) -> None:
        """Reject a piece of a request for sums of more nodes than the level may have, before it costs anything."""
        self._check(self._levels < self._max_depth, f"{self._max_depth} levels in a tree at most")
        most = 1 << self._levels
        self._check(self._nodes + nodes <= most, f"1 to {most} nodes of this level")

    def sums(self, nodes: int, *, last: bool) -> None:
        """Record a request for sums of `nodes` nodes of the level, `last` with its last ones; reject too many."""
        self._check(self._levels < self._max_depth, f"{self._max_depth} levels in a tree at most")
        self._nodes += nodes
        self._check(nodes > 0 and self._nodes <= 1 << self._levels, f"1 to {1 << self._levels} nodes of this level")
        self._levels += last
        self._nodes = 0 if last else self._nodes

    def split(self, request: SplitRequest) -> None:
        """Reject splits of other columns than the tree's, or of too many nodes."""
        active = self._active
        features = view(request.features, np.int32, (None,), peer=active, what="SplitRequest.features")
        self._check(len(features) <= 1 << (self._levels - 1), "no more splits than the level may have nodes")
        self._check(bool(np.isin(features, self._columns).all()), "splits of the tree's columns")
        self._check(len(features) > 0, "nodes that are split")

    def node_sizes(self, sizes: NDArray[np.int64]) -> None:
        """Reject nodes to be split with too few rows."""
        self._check(bool(np.all(sizes >= 2 * self._fewest_rows)), f"nodes of {2 * self._fewest_rows} rows at least")

    def _check(self, fine: bool, expected: str) -> None:
        if not fine:
            raise PeerProtocolError(self._active, f"expected {expected} - from {self._active}")
