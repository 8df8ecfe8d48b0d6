"""What a party of a training has seen in the clear, kept where its user asks for it: the input of `treaty.attacks`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from treaty.data.binning import Bins
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.privacy.exact_sums import OpenedNode


@dataclass(slots=True)
class Recording:
    """Sums that a party has opened; its messages are in its transcript.

    Attributes
    ----------
    nodes : dict of str to list of OpenedNode
        At the active party of tables split by column: sums of each other party's columns, tree after tree.
    offsets : dict of str to int32 (n_columns + 1,)
        First slots of these columns.
    trees : list of (dict of int to int64 (slots, 3), int32 (n_nodes,))
        At the leader of tables split by row, of each tree: the opened sums by node, and each node's left child.
    bins : Bins or None
        Those of the columns there.
    sides : dict of str to list of (int32 (n,), bool (n,))
        There, at each other party's splits: the rows whose sides were told, and which of them go left; at a party whose
        own sides were transferred, at its own.
    given : list of int64 (n,)
        At a party that contributes to sums under masks: its vectors without the masks, in the order it gave them.
    room : float
        Bytes that may still be noted. Once it is below 0, everything is dropped and nothing more is noted.
    """

    nodes: dict[str, list[OpenedNode]] = field(default_factory=dict)
    offsets: dict[str, Int32s] = field(default_factory=dict)
    trees: list[tuple[dict[int, Integers], Int32s]] = field(default_factory=list)
    bins: Bins | None = None
    given: list[Integers] = field(default_factory=list)
    sides: dict[str, list[tuple[Int32s, Flags]]] = field(default_factory=dict)

    room: float = math.inf

    def note_node(self, owner: str, node: OpenedNode) -> None:
        """Note the opened sums of a node, without the gradients that all nodes of a tree share."""
        if self._fits(node.rows.nbytes + node.sums.nbytes):
            self.nodes[owner].append(node)

    def note_sides(self, owner: str, rows: Int32s, left: Flags) -> None:
        if self._fits(rows.nbytes + left.nbytes):
            self.sides.setdefault(owner, []).append((rows, left))

    def note_tree(self, asked: dict[int, Integers], left: Int32s, bins: Bins) -> None:
        """Note a tree's opened sums by node."""
        self.bins = bins
        if self._fits(left.nbytes + sum(sums.nbytes for sums in asked.values())):
            self.trees.append((asked, left))

    def note_given(self, values: Integers) -> None:
        """Note a vector that is about to be masked."""
        if self._fits(8 * values.size):
            self.given.append(values.astype(np.int64))

    def _fits(self, nbytes: int) -> bool:
        self.room -= nbytes
        if self.room < 0:
            self.trees, self.given, self.nodes, self.sides = [], [], {name: [] for name in self.nodes}, {}
        return self.room >= 0
