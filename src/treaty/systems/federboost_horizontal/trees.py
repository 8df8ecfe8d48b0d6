"""One party's rows in a training by row, and the messages by which the leader has all parties grow the same trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Floats, Int32s, Integers
from treaty.messaging.conversation import Table as OrderTable
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.systems.horizontal.held_out import HeldOutRequest
from treaty.systems.horizontal.members import Collector
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.systems.horizontal.own_rows import OwnRows
from treaty.systems.horizontal.quantiles import CommonBins, Count, ProbeRequest
from treaty.systems.horizontal.rows import LabelUnits, TrainingStart
from treaty.systems.pooled.continuing import CheckpointRequest
from treaty.systems.pooled.options import BoostingOptions
from treaty.trees.ensemble import Tree
from treaty.trees.histograms import width_of
from treaty.trees.slots import LevelSplits, RowShard

# By output, nodes of its tree whose sums are wanted
NodesByOutput = Sequence[tuple[int, Int32s]]
# Of a leaf: sums of many rounds' values stay finite, and so do gradients
MOST_VALUE = 1e30


@leaks(
    "the model: splits, their gains to three digits, leaf values; which of two nodes has fewer rows",
    "aggregated",
    guard="epsilon_total, min_child_samples",
)
class TreeStep(Message):
    """The splits chosen on the last sums, and what to sum next; parts without content are empty.

    * `outputs`, `nodes`, `children`, `features` int32 (k,), `left_bins` packed (k, width / 8): splits, by tree.
    * `values`, `gains` float64: of all nodes of the round's finished trees, one tree after the other.
    * `columns` int32, `last_columns` int32 (n_outputs,): features of the trees of a new round, and where each tree's
      end. Trees that were not finished are dropped.
    * `asked_outputs`, `asked_nodes` int32: nodes whose sums come next.
    """

    outputs: Array
    nodes: Array
    children: Array
    features: Array
    left_bins: Array
    values: Array
    gains: Array
    columns: Array
    last_columns: Array
    asked_outputs: Array
    asked_nodes: Array


@leaks("how many rounds the model has", "control")
class ModelEnd(Message):
    """The model is finished; how many rounds it has."""

    rounds: Annotated[int, msgspec.Meta(ge=0)]


# Which message the leader may send to a member when, once keys are agreed on; `TreeMember` checks each `TreeStep`
CONVERSATION: OrderTable = {
    "new": {Count: "counted", CommonBins: "rounds"},
    "counted": {LabelUnits: "labels", ProbeRequest: "search", Count: "counted", CommonBins: "rounds"},
    "labels": {TrainingStart: "search"},
    "search": {ProbeRequest: "search", Count: "counted", CommonBins: "rounds"},
    "resumed": {CommonBins: "rounds"},
    "rounds": {TreeStep: "rounds", HeldOutRequest: "rounds", CheckpointRequest: "rounds", ModelEnd: "finished"},
    "finished": {},
}
NOISY_CONVERSATION: OrderTable = {
    **CONVERSATION,
    "rounds": {RandomStep: "rounds", HeldOutRequest: "rounds", CheckpointRequest: "rounds", ModelEnd: "finished"},
}


def level_vector(shard: RowShard, asked: NodesByOutput, totals: Integers | None) -> Integers:
    """Return a participant's vector: bin sums of the nodes asked for, then the roots' totals, if any."""
    parts = [shard.sums(output, nodes).ravel() for output, nodes in asked]
    return np.concatenate([*parts, np.empty(0, np.int64) if totals is None else totals.ravel()])


class StepSender:
    """The leader's end of `TreeStep`: collects news for the participants, and sends them with the next request.

    `splits` are those of the last level, by tree; they travel with the request for the next sums. Those of a finished
    round, and its values, travel with the first request of the next one. `width` is the length of lists of bins.
    """

    def __init__(self, collector: Collector, width: int) -> None:
        self._collector, self._width = collector, width
        self.splits: list[tuple[int, LevelSplits]] = []
        self._values: list[Floats] = []
        self._gains: list[Floats] = []

    def finish(self, grown: Sequence[Tree]) -> tuple[list[Floats], list[Floats]]:
        """Add the finished trees' values and gains, and return them as participants get them."""
        # exact gains would be further equations about the sums, which participants do not learn
        self._gains = [np.array([float(f"{gain:.3g}") for gain in tree.gain]) for tree in grown]
        self._values = [tree.value for tree in grown]
        return self._values, self._gains

    def flush(self) -> None:
        """Send the last round to participants that do not have it."""
        if self._values:
            self.send([], [])

    def send(self, columns: Sequence[Int32s], asked: NodesByOutput) -> None:
        """Send all participants the news, the columns of trees that begin, and which nodes' sums come next."""
        splits = [divided for _, divided in self.splits]
        outputs = [np.full(len(divided.nodes), output, np.int32) for output, divided in self.splits]
        left = [np.packbits(divided.left_bins, axis=1) for divided in splits]
        self._collector.broadcast(
            TreeStep(
                _joined(outputs),
                _joined([divided.nodes for divided in splits]),
                _joined([divided.children for divided in splits]),
                _joined([divided.features for divided in splits]),
                Array.of(np.concatenate(left) if left else np.empty((0, self._width // 8), np.uint8)),
                Array.of(np.concatenate([np.empty(0), *self._values])),
                Array.of(np.concatenate([np.empty(0), *self._gains])),
                _joined(columns),
                Array.of(np.cumsum([len(c) for c in columns], dtype=np.int32)),
                _joined([np.full(len(nodes), output, np.int32) for output, nodes in asked]),
                _joined([nodes for _, nodes in asked]),
            )
        )
        self.splits, self._values, self._gains = [], [], []


def _joined(parts: Sequence[Int32s]) -> Array:
    return Array.of(np.concatenate([np.empty(0, np.int32), *parts]))


class TreeMember:
    """A participant's end: follows the leader's steps on its own rows, and refuses those that fit no tree.

    It refuses more rounds than the job has, sums of nodes at its `max_depth` or of a tree that has `max_leaves`, a
    second sum of a node, and a restart of an unfinished round if ``cohort()``, the members present, is as before:
    differences of such sums show single members.
    """

    def __init__(
        self, own: OwnRows, leader: str, common: BoostingOptions, cohort: Callable[[], frozenset[str]]
    ) -> None:
        self._own, self._shard, self._bins, self._forest = own, own.shard, own.bins, own.forest
        self._leader, self._most_rounds, self._max_depth = leader, common.most_rounds, common.depth
        self._cohort, leaves = cohort, common.max_leaves
        # a tree of n leaves has 2n - 1 nodes
        self._most_nodes = math.inf if leaves is None else 2 * leaves - 1
        self._began_with: frozenset[str] = frozenset()
        # of the nodes of each tree of the round that grows
        self._depths: list[list[int]] = []
        self._summed: set[tuple[int, int]] = set()

    def take(self, step: TreeStep) -> Integers | None:
        """Follow a step; return the vector that it asks for, int64, or None.

        Raises PeerProtocolError if the step does not fit the trees so far.
        """
        try:
            self._divide(step)
            self._finish(step)
            totals = self._start(step)
            asked = self._asked(step)
        except (ValueError, IndexError) as error:
            raise PeerProtocolError(self._leader, f"the step does not fit the trees: {error} - at TreeStep") from None
        return level_vector(self._shard, asked, totals) if asked else None

    def _view(self, array: Array, what: str, length: int | None = None) -> Int32s:
        return view(array, np.int32, (length,), peer=self._leader, what=f"TreeStep.{what}")

    def _divide(self, step: TreeStep) -> None:
        outputs = self._view(step.outputs, "outputs")
        k = len(outputs)
        nodes, children = self._view(step.nodes, "nodes", k), self._view(step.children, "children", k)
        features = self._view(step.features, "features", k)
        shape = k, width_of(self._bins.offsets) // 8
        packed = view(step.left_bins, np.uint8, shape, peer=self._leader, what="TreeStep.left_bins")
        left_bins = np.unpackbits(packed, axis=1).view(np.bool_)
        for output in np.unique(outputs).tolist():
            mine = outputs == output
            self._shard.divide(output, LevelSplits(nodes[mine], children[mine], features[mine], left_bins[mine]))
            for node in nodes[mine].tolist():
                self._depths[output] += [self._depths[output][node] + 1] * 2

    def _finish(self, step: TreeStep) -> None:
        values = view(step.values, np.float64, (None,), peer=self._leader, what="TreeStep.values")
        gains = view(step.gains, np.float64, (len(values),), peer=self._leader, what="TreeStep.gains")
        if len(values) == 0:
            return
        sizes = self._shard.n_nodes()
        if len(values) != sum(sizes) or not np.all(np.abs(values) < MOST_VALUE) or not np.all(np.isfinite(gains)):
            raise ValueError("a wrong number of values, or too large ones")
        at = np.cumsum(sizes)[:-1]
        self._forest.trees.extend(self._own.finish(np.split(values, at), np.split(gains, at)))
        self._depths = []

    def _start(self, step: TreeStep) -> Integers | None:
        last = self._view(step.last_columns, "last_columns")
        columns = self._view(step.columns, "columns")
        if len(last) == 0:
            return None
        n_features = len(self._bins.n_bins)
        of_trees = np.split(columns, last[:-1])
        if len(last) != self._forest.trees_a_round or last[-1] != len(columns):
            raise ValueError("columns of a wrong number of trees")
        if any(np.any(np.diff(c) <= 0) or np.any((c < 0) | (c >= n_features)) for c in of_trees):
            raise ValueError("columns that do not exist")
        # a restart without a loss would open two sums over one cohort
        if self._forest.rounds >= self._most_rounds or (self._depths and self._cohort() == self._began_with):
            raise ValueError("a round too many, or a restart although no member was lost")
        self._began_with = self._cohort()
        self._depths, self._summed = [[0] for _ in of_trees], set()
        return self._shard.start_round(of_trees, self._own.sample())

    def _asked(self, step: TreeStep) -> NodesByOutput:
        outputs = self._view(step.asked_outputs, "asked_outputs")
        nodes = self._view(step.asked_nodes, "asked_nodes", len(outputs))
        sizes = self._shard.n_nodes()
        # by tree, as the leader's vector is laid out
        asked = [(output, nodes[outputs == output]) for output in np.unique(outputs).tolist()]
        if any(not 0 <= output < len(sizes) or np.any((n < 0) | (n >= sizes[output])) for output, n in asked):
            raise ValueError("nodes that do not exist")
        if any(sizes[output] >= self._most_nodes for output, _ in asked):
            raise ValueError("sums of a tree that has its most leaves")
        for node in zip(outputs.tolist(), nodes.tolist(), strict=True):
            if node in self._summed or self._depths[node[0]][node[1]] >= self._max_depth:
                raise ValueError("a node summed twice, or too deep to be split")
            # a node's sums are opened once: the difference of two would show who left in between
            self._summed.add(node)
        return asked
