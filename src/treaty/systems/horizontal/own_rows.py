"""One party's rows in a training by row, with its part of the model and its random draws; a leader's rounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treaty.cluster.sums import ClusterHistograms
from treaty.data.binning import Bins
from treaty.data.columns import Category
from treaty.data.table import Schema
from treaty.machine.arrays import Floats, Int32s
from treaty.models.trees import ModelPart, record_split, walk_tables
from treaty.systems.horizontal.held_out import NOISY_ERRORS, NOISY_ODDS, HeldBack, ScoreCells, SummedMetrics
from treaty.systems.horizontal.random_trees import LeafShard
from treaty.systems.horizontal.rows import own_seed
from treaty.systems.horizontal.sum_noise import SumNoise, looks
from treaty.systems.pooled.system import watched
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Forest, Rounds, WatchedRows, draw
from treaty.trees.ensemble import SplitTable, Tree, Walk, join_splits
from treaty.trees.objectives import Objective
from treaty.trees.slots import RowShard


def new_part(
    inputs: RoleInput, model_id: str, schema: Schema, classes: list[Category] | None, objective: Objective, spent: str,
    bins: bytes = b"",
) -> ModelPart:  # fmt: skip
    """Return a part without trees."""
    name = inputs.party.name
    forest = Forest(objective, (name,), classes, parallel=inputs.common.num_parallel_tree)
    return ModelPart(
        model_id=model_id, party=name, schema=schema, splits=SplitTable(), forest=forest, spent=spent, bins=bins
    )


def rounds_of(
    inputs: RoleInput, part: ModelPart, back: SummedMetrics | None, evals: Sequence[LabelledRows],
    keep: Callable[[int], None] = lambda done: None,
) -> Rounds:  # fmt: skip
    """Return the rounds that a leader grows, which watch rows kept `back` and eval sets, and are reported.

    ``keep(done)`` is called after each round.
    """
    common, forest = inputs.common, part.grown

    def after_round(done: int) -> None:
        keep(done)
        inputs.observers.round_finished(done, part)

    inputs.observers.round_finished(forest.rounds, part)
    # early stopping goes by the last of them
    watching: list[WatchedRows] = [] if back is None else [back]
    watching += [watched(of, part.splits, inputs.threads) for of in evals]
    return Rounds(
        forest, common.most_rounds, eval_sets=watching, early_stopping_rounds=common.early_stopping_rounds,
        early_stopping_min_delta=common.early_stopping_min_delta, metrics=common.metrics, after_round=after_round,
    )  # fmt: skip


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
        """The draws' state as a checkpoint keeps it."""
        return json.dumps([None if self.rng is None else self.rng.bit_generator.state, self.seed])


@dataclass(frozen=True, slots=True)
class OwnRows:
    """A party's rows in training, perhaps none, with common bins, its part of the model and its random draws.

    Each tree of a round has its own sample of a `subsample` fraction of the rows.
    """

    part: ModelPart
    bins: Bins
    shard: RowShard
    draws: Draws
    subsample: float = 1.0

    @classmethod
    def of(cls, inputs: RoleInput, rows: LabelledRows, part: ModelPart, bins: Bins, draws: Draws) -> OwnRows:
        """Bin rows and take them down the trees of `part`."""
        codes, threads = bins.transform(rows.table, inputs.threads), inputs.threads
        histograms = ClusterHistograms.of_rows(inputs.shards, codes, bins.offsets)
        # under noise rows go down random trees
        kind = LeafShard if inputs.options.adds_noise else RowShard
        shard = kind(codes, bins.offsets, rows.y, rows.weight, part.grown.objective, threads, histograms)
        if part.grown.trees:
            # margins after the trees so far, as if these had been grown now
            margins = np.ascontiguousarray(shard.margins.T)
            splits = join_splits([part.splits], [len(rows.table.columns)])
            walk_tables(Walk(part.grown.trees, splits), [rows.table], margins, threads)
            shard.margins[:] = margins.T
        return cls(part, bins, shard, draws, inputs.common.subsample)

    def held_back(self, inputs: RoleInput[Any], rows: LabelledRows, noise: SumNoise) -> HeldBack:
        """Return own held-out rows, as they are counted after rounds."""
        cells, when = self.cells(inputs, noise), looks(inputs.options, inputs.common)
        return HeldBack(rows, cells, self.forest, self.part.splits, when, inputs.threads, noise.on_scores)

    def cells(self, inputs: RoleInput[Any], noise: SumNoise) -> ScoreCells:
        """Return how held-out rows are counted."""
        leaves, scores, group = noise.leaves, None, inputs.options.validation_group
        if leaves is not None:
            scores = NOISY_ODDS if leaves.half_range is None else (NOISY_ERRORS, leaves.half_range)
        return ScoreCells.of(self.forest.objective, self.part.schema, group, scores)

    @property
    def forest(self) -> Forest:
        """The trees so far."""
        return self.part.grown

    def draw_columns(self, share: float) -> list[Int32s]:
        """Draw, as the leader, the columns of each tree of the next round."""
        rng = self.draws.rng
        assert rng is not None, "the leader draws columns"
        return [draw(rng, len(self.bins.n_bins), share) for _ in range(self.forest.trees_a_round)]

    def sample(self) -> list[Int32s | None]:
        """Draw the own rows of each tree of the next round; None is all of them."""
        n_trees, n_rows = self.forest.trees_a_round, self.shard.margins.shape[1]
        if self.subsample >= 1.0 or n_rows == 0:
            return [None] * n_trees
        # each tree of each round has draws of its own, so that a resumed training draws the same
        seeds = [[self.draws.seed, self.forest.rounds, number] for number in range(n_trees)]
        return [draw(np.random.default_rng(seed), n_rows, self.subsample) for seed in seeds]

    def finish(self, values: Sequence[Floats], gains: Sequence[Floats]) -> list[Tree]:
        """Record the round's splits and return its trees, given each node's value and gain."""
        # records of all trees are numbered in one table
        first = len(self.part.splits)
        for feature, left_bins in self.shard.splits():
            record_split(self.part.splits, self.bins, feature, left_bins)
        return self.shard.finish(values, gains, first)
