"""A party's own part in a training by row, fresh or resumed: the leader's checkpoint decides, all bring their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treaty.cluster.sums import ClusterHistograms
from treaty.data.binning import Bins
from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Int32s
from treaty.messaging.messages import decode_body
from treaty.models.checkpoints import ANEW, Checkpoint, Keeper
from treaty.models.trees import ModelPart, keep_records, record_split, records_used
from treaty.systems.horizontal.quantiles import CommonBins, unpack_bins
from treaty.systems.horizontal.rows import own_seed
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Forest, draw
from treaty.trees.ensemble import Tree, join_splits, margins_from_values
from treaty.trees.slots import RowShard


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
