"""Both ends of growing trees on sums of participants' histograms; see `roles`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from treaty.cluster.sums import ClusterHistograms
from treaty.data.binning import Bins
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Floats, Int32s, Integers
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, decode_body, view
from treaty.models.checkpoints import ANEW, Checkpoint, Keeper
from treaty.models.trees import ModelPart, keep_records, record_split, records_used
from treaty.systems.horizontal.members import Collector
from treaty.systems.horizontal.quantiles import CommonBins, unpack_bins
from treaty.systems.horizontal.rows import own_seed
from treaty.systems.observers import Recording
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Forest, draw
from treaty.trees.ensemble import Tree, join_splits, margins_from_values
from treaty.trees.growth import Growth
from treaty.trees.slots import LevelSplits, RowShard
from treaty.trees.splits import SplitRules, complete_sums, scan

# ----------------------------------------------------------------
# A party's own part in a training by row, fresh or resumed: the leader's checkpoint decides, all bring their own.


@dataclass(frozen=True, slots=True)
class Draws:
    """A party's random draws: `rng` draws columns, at the leader alone; `seed` is of its own draws of rows."""

    rng: np.random.Generator | None
    seed: int

    @classmethod
    def fresh(cls, inputs: RoleInput) -> Draws:
        """Begin a training's draws."""
        leads, random_state = inputs.party.name == inputs.roles.active, inputs.common.random_state
        return cls(np.random.default_rng(random_state) if leads else None, own_seed(random_state, inputs.party.name))

    @classmethod
    def kept(cls, state: str) -> Draws:
        """Return the draws whose `state` a checkpoint kept."""
        columns, seed = json.loads(state)
        if columns is None:
            return cls(None, seed)
        rng = np.random.default_rng()
        rng.bit_generator.state = columns
        return cls(rng, seed)

    @property
    def state(self) -> str:
        """What a checkpoint keeps."""
        return json.dumps([None if self.rng is None else self.rng.bit_generator.state, self.seed])


@dataclass(frozen=True, slots=True)
class OwnRows:
    """A party's rows in training, perhaps none, with everybody's bins, its part of the model and its random draws.

    Each tree of a round has its own sample of a `subsample` fraction of the rows.
    """

    part: ModelPart
    bins: Bins
    shard: RowShard
    draws: Draws
    subsample: float = 1.0

    @classmethod
    def of(cls, inputs: RoleInput, rows: LabelledRows, part: ModelPart, bins: Bins, draws: Draws) -> OwnRows:
        """Bin rows and take them down the trees there are."""
        assert part.forest is not None
        codes, threads = bins.transform(rows.table, inputs.threads), inputs.threads
        histograms = ClusterHistograms.of_rows(inputs.shards, codes, bins.offsets)
        shard = RowShard(codes, bins.offsets, rows.y, rows.weight, part.forest.objective, threads, histograms)
        if part.forest.trees:
            matrix = rows.table.matrix()
            margins, splits = np.ascontiguousarray(shard.margins.T), join_splits([part.splits], [matrix.shape[1]])
            margins_from_values(part.forest.trees, splits, matrix, margins, threads)
            shard.margins[:] = margins.T
        return cls(part, bins, shard, draws, inputs.common.subsample)

    @property
    def forest(self) -> Forest:
        """The trees so far."""
        assert self.part.forest is not None
        return self.part.forest

    def sample(self) -> list[Int32s | None]:
        """Draw the own rows of each tree of the next round; None is all of them."""
        n_outputs, n_rows = self.shard.margins.shape
        if self.subsample >= 1.0 or n_rows == 0:
            return [None] * n_outputs
        seeds = [[self.draws.seed, self.forest.rounds, output] for output in range(n_outputs)]
        return [draw(np.random.default_rng(seed), n_rows, self.subsample) for seed in seeds]

    def finish(self, values: Sequence[Floats], gains: Sequence[Floats]) -> list[Tree]:
        """Record the round's splits and return its trees, given each node's value and gain."""
        first = len(self.part.splits)
        for feature, left_bins in self.shard.splits():
            record_split(self.part.splits, self.bins, feature, left_bins)
        return self.shard.finish(values, gains, first)


def leaders_checkpoint(keeper: Keeper | None, *, noisy: bool) -> Checkpoint | None:
    """Return the leader's checkpoint, if it has one to resume from; refuse a participant's, and any under noise."""
    found = None if keeper is None else keeper.found()
    if found is None:
        return None
    if Draws.kept(found.random_state or "[null, 0]").rng is None:
        raise ConfigError(
            f"{found.part.party}: cannot resume as the leader: its checkpoint is of a training that another party led; "
            f"set active back to that party, or {ANEW}",
            public="it cannot resume as the leader: another party led the training of its checkpoint",
        )
    if noisy:
        raise ConfigError(
            "cannot resume with epsilon_total: sums opened since the checkpoint would be opened again, at a further "
            "cost; begin anew without these checkpoints, which costs a whole epsilon_total again"
        )
    return found


def members_checkpoint(keeper: Keeper | None, model_id: str, rounds: int) -> Checkpoint:
    """Return the own checkpoint of a model that the leader resumes; ConfigError when none has as many rounds."""
    found = None if keeper is None else keeper.found()
    if found is None or found.part.model_id != model_id or found.part.forest is None or found.rounds < rounds:
        raise ConfigError(
            f"cannot resume: expected a checkpoint of model {model_id[:8]} with {rounds} rounds, got "
            + ("none" if found is None else f"one of model {found.part.model_id[:8]} with {found.rounds}")
            + f" - at {keeper.path if keeper else 'this party, which keeps none'}",
            public="it has no checkpoint of the training to resume",
        )
    return found


def resume(inputs: RoleInput, found: Checkpoint, rounds: int, rows: LabelledRows, printed: bytes) -> OwnRows:
    """Resume a training after `rounds` rounds; the checkpoint's later trees are dropped.

    Raises ConfigError when the checkpoint is of other options, parties or rows (`printed` is their `fingerprint`).
    """
    name, part = inputs.party.name, found.part
    found.check(inputs.given, inputs.may_change, (name,), printed)
    assert part.forest is not None
    part.forest.cut(rounds)
    keep_records(part.splits, records_used(part.forest.trees, 1)[0])
    told = decode_body(found.bins, CommonBins, peer=name)
    bins = unpack_bins(told, part.schema, inputs.common.most_bins, name)
    return OwnRows.of(inputs, rows, part, bins, Draws.kept(found.random_state or ""))


# ---------------------------------------------------------------- trees


NodesByOutput = Sequence[tuple[int, Int32s]]
"""By output, nodes of its tree whose sums are wanted."""
MOST_VALUE = 1e30  # of a leaf: sums of many rounds' values stay finite, and so do gradients
Noise = Callable[[Integers], Integers]


class TreeStep(Message):
    """What was chosen on the last sums, and what to sum next; parts are empty where there is nothing to say.

    * `outputs`, `nodes`, `children`, `features` int32 (k,), `left_bins` packed (k, 32): splits, by tree.
    * `values`, `gains` float64: of all nodes of the round's finished trees, one tree after the other.
    * `columns` int32, `last_columns` int32 (n_outputs,): features of the trees of a new round, and where each tree's
      end. Trees that were not finished are dropped.
    * `asked_outputs`, `asked_nodes` int32: whose sums come next.

    Tells participants the model, which all of them get.
    """

    leakage: ClassVar = {
        "exact": MessageLeakage(
            "the model: splits, their gains to three digits, leaf values; which of two nodes has fewer rows",
            "aggregated",
            guard="epsilon_total, min_child_samples",
        ),
        "noisy": MessageLeakage(
            "the model, made of noisy sums: splits, their gains, leaf values",
            "noisy",
            guard="epsilon_total",
        ),
    }

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


class TreeLeader:
    """Grows trees from sums, by `grow`, which `run_rounds` takes.

    `noise` adds the leader's share of noise to its own vector, None where it has no rows and is no member of the sums;
    each tree has a random `share` of the columns. Sums that are opened are noted in `recording`.
    """

    def __init__(
        self,
        collector: Collector,
        own: OwnRows,
        rules: SplitRules,
        noise: Noise | None,
        share: float,
        threads: int,
        recording: Recording | None = None,
    ) -> None:
        assert own.draws.rng is not None, "the leader draws columns"
        self._collector, self._own, self._rules, self._noise = collector, own, rules, noise
        self._share, self._rng, self._threads = share, own.draws.rng, threads
        self._shard, self._bins = own.shard, own.bins
        self._recording = recording
        self._opened: list[dict[int, Integers]] = []
        self._untold: list[tuple[int, LevelSplits]] = []
        self._values: list[Floats] = []
        self._gains: list[Floats] = []

    def grow(self) -> list[Tree]:
        """Grow a tree per output; start again when a participant is lost meanwhile."""
        every, share = np.arange(len(self._bins.schema.names), dtype=np.int32), self._share
        columns = [every if share >= 1.0 else draw(self._rng, len(every), share) for _ in self._shard.margins]
        while (grown := self._attempt(columns)) is None:
            pass
        # exact gains would be further equations about the sums that participants are not told
        self._values, self._gains = [tree.value for tree in grown], [_three_digits(tree.gain) for tree in grown]
        return self._own.finish(self._values, self._gains)

    def flush(self) -> None:
        """Tell participants of the last round, if they are not told yet."""
        if self._values:
            self._tell([], [])

    def _attempt(self, columns: list[Int32s]) -> list[Tree] | None:
        """Grow the trees level by level together; None when a participant is lost, whose rows later sums lack."""
        asked: NodesByOutput = [(output, np.zeros(1, np.int32)) for output in range(len(columns))]
        self._tell(columns, asked)
        totals, sums = self._summed(asked, self._shard.start_round(columns, self._own.sample()))
        cohort = self._collector.summed
        growths = [Growth(total, self._rules) for total in totals]
        parents: list[Integers | None] = [None] * len(columns)
        self._opened = [{} for _ in columns]
        while self._collector.summed == cohort:
            for (output, _), opened in zip(asked, sums, strict=True):
                self._split(output, growths[output], opened, parents, columns[output])
            asked = [(output, g.level.asked) for output, g in enumerate(growths) if g.level is not None]
            if not asked:
                grown = [growth.tree() for growth in growths]
                if self._recording is not None:
                    for opened_sums, tree in zip(self._opened, grown, strict=True):
                        self._recording.note_tree(opened_sums, tree.left, self._bins)
                return grown
            self._tell([], asked)
            _, sums = self._summed(asked, None)
        self._untold = []
        return None

    def _split(
        self, output: int, growth: Growth, asked: Integers, parents: list[Integers | None], columns: Int32s
    ) -> None:
        """Choose the splits of a tree's level on its opened sums, and divide own rows."""
        level = growth.level
        if level is None:  # too few rows for any split
            return
        if self._recording is not None:
            self._opened[output].update(zip(level.asked.tolist(), asked.copy(), strict=True))
        sums = complete_sums(level, asked, parents[output])
        parents[output] = sums
        bins, rules = self._bins, self._rules
        categorical = bins.schema.categorical
        found = scan(sums, level.totals, columns, bins.offsets, categorical, rules, threads=self._threads)
        taken = growth.take(found)
        if taken is not None:
            nodes, children, chosen = taken
            growth.divided(np.zeros(len(nodes), np.int32))  # `RowShard.finish` numbers records
            divided = LevelSplits(nodes, children, chosen.feature, chosen.left_bins)
            self._shard.divide(output, divided)
            self._untold.append((output, divided))

    def _summed(self, asked: NodesByOutput, totals: Integers | None) -> tuple[Integers, list[Integers]]:
        """Open the sums asked for; return the roots' totals, where they were asked for, and bin sums by tree."""
        slots = int(self._bins.offsets[-1])
        sizes = [3 * slots * len(nodes) for _, nodes in asked]
        own = None if self._noise is None else self._noise(level_vector(self._shard, asked, totals))
        opened = self._collector.total(sum(sizes) + (0 if totals is None else totals.size), own)
        *sums, rest = np.split(opened, np.cumsum(sizes))
        return rest.reshape(-1, 3), [part.reshape(-1, slots, 3) for part in sums]

    def _tell(self, columns: Sequence[Int32s], asked: NodesByOutput) -> None:
        """Send all participants the next step, with what they have not been told."""
        splits = [divided for _, divided in self._untold]
        outputs = [np.full(len(divided.nodes), output, np.int32) for output, divided in self._untold]
        left = [np.packbits(divided.left_bins, axis=1) for divided in splits]
        self._collector.tell_all(
            TreeStep(
                _joined(outputs),
                _joined([divided.nodes for divided in splits]),
                _joined([divided.children for divided in splits]),
                _joined([divided.features for divided in splits]),
                Array.of(np.concatenate([np.empty((0, 32), np.uint8), *left])),
                Array.of(np.concatenate([np.empty(0), *self._values])),
                Array.of(np.concatenate([np.empty(0), *self._gains])),
                _joined(columns),
                Array.of(np.cumsum([len(c) for c in columns], dtype=np.int32)),
                _joined([np.full(len(nodes), output, np.int32) for output, nodes in asked]),
                _joined([nodes for _, nodes in asked]),
            )
        )
        self._untold, self._values, self._gains = [], [], []


class TreeMember:
    """A participant's end: follows the leader's steps on its own rows.

    Refuses more than `most_rounds` rounds, sums of nodes at `max_depth`, and to restart an unfinished round although
    ``cohort()``, those still there, is as before.
    """

    def __init__(
        self, own: OwnRows, leader: str, *, most_rounds: int, max_depth: int, cohort: Callable[[], frozenset[str]]
    ) -> None:
        self._own, self._shard, self._bins, self._forest = own, own.shard, own.bins, own.forest
        self._leader, self._most_rounds, self._max_depth, self._cohort = leader, most_rounds, max_depth, cohort
        self._began_with: frozenset[str] = frozenset()
        self._depths: list[list[int]] = []  # of the nodes of each tree of the round that grows
        self._summed: set[tuple[int, int]] = set()

    def take(self, step: TreeStep) -> Integers | None:
        """Follow a step; return the vector that it asks for, int64, or None.

        Raises PeerProtocolError when the step does not fit the trees so far.
        """
        try:
            self._divide(step)
            self._finish(step)
            totals = self._start(step)
            asked = self._asked(step)
        except (ValueError, IndexError) as error:
            expected = f"expected a step that fits the trees, got another ({error}) - at TreeStep"
            raise PeerProtocolError(self._leader, expected) from None
        return level_vector(self._shard, asked, totals) if asked else None

    def _view(self, array: Array, what: str, length: int | None = None) -> Int32s:
        return view(array, np.int32, (length,), peer=self._leader, what=f"TreeStep.{what}")

    def _divide(self, step: TreeStep) -> None:
        outputs = self._view(step.outputs, "outputs")
        k = len(outputs)
        nodes, children = self._view(step.nodes, "nodes", k), self._view(step.children, "children", k)
        features = self._view(step.features, "features", k)
        packed = view(step.left_bins, np.uint8, (k, 32), peer=self._leader, what="TreeStep.left_bins")
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
        if len(last) != len(self._shard.margins) or last[-1] != len(columns):
            raise ValueError("columns of a wrong number of trees")
        if any(np.any(np.diff(c) <= 0) or np.any((c < 0) | (c >= n_features)) for c in of_trees):
            raise ValueError("columns that do not exist")
        if self._forest.rounds >= self._most_rounds or (self._depths and self._cohort() == self._began_with):
            raise ValueError("a round too many, or a restart although nobody was lost")
        self._began_with = self._cohort()
        self._depths, self._summed = [[0] for _ in of_trees], set()
        return self._shard.start_round(of_trees, self._own.sample())

    def _asked(self, step: TreeStep) -> NodesByOutput:
        outputs = self._view(step.asked_outputs, "asked_outputs")
        nodes = self._view(step.asked_nodes, "asked_nodes", len(outputs))
        sizes = self._shard.n_nodes()
        asked = [(output, nodes[outputs == output]) for output in np.unique(outputs).tolist()]
        if any(not 0 <= output < len(sizes) or np.any((n < 0) | (n >= sizes[output])) for output, n in asked):
            raise ValueError("nodes that do not exist")
        for node in zip(outputs.tolist(), nodes.tolist(), strict=True):
            if node in self._summed or self._depths[node[0]][node[1]] >= self._max_depth:
                raise ValueError("a node summed twice, or too deep to be split")
            self._summed.add(node)
        return asked


def level_vector(shard: RowShard, asked: NodesByOutput, totals: Integers | None) -> Integers:
    """Return what a participant adds to a sum: bin sums of the nodes asked for, then the roots' totals, if any."""
    parts = [shard.sums(output, nodes).ravel() for output, nodes in asked]
    return np.concatenate([*parts, np.empty(0, np.int64) if totals is None else totals.ravel()])


def _three_digits(numbers: Floats) -> Floats:
    return np.array([float(f"{number:.3g}") for number in numbers])


def _joined(parts: Sequence[Int32s]) -> Array:
    return Array.of(np.concatenate([np.empty(0, np.int32), *parts]))
