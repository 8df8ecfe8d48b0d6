"""How the server's trees grow, on sums over all users, and how users are told them where they learn the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.round import RoundVoid
from treaty.data.binning import Bins
from treaty.messaging.messages import Array
from treaty.models.trees import ModelPart, record_split
from treaty.systems.fedxgb.limits import MOST_VOID
from treaty.systems.fedxgb.messages import RoundStart, Splits, Values
from treaty.systems.fedxgb.paper.routing import PaperModel
from treaty.systems.fedxgb.secpred.routing import HiddenModel
from treaty.systems.fedxgb.sums.server import Crowd
from treaty.systems.recording import Recording
from treaty.trees.boosting import BoostingPlan
from treaty.trees.ensemble import Tree
from treaty.trees.growth import NoMoreTrees
from treaty.trees.slots import Cells, SlotSplits, SlotTree
from treaty.trees.splits import SplitRules

logger = logging.getLogger(__name__)


class ShownModel:
    """Tells all users the trees."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd

    def split(self, chosen: Sequence[SlotSplits]) -> None:
        """Have everybody's rows go down a level, by the splits of each tree."""
        features = np.stack([splits.features for splits in chosen])
        packed = np.packbits(np.stack([splits.left_bins for splits in chosen]), axis=2)
        self._crowd.tell(Splits(Array.of(features), Array.of(packed)))

    def finish(self, values: NDArray[np.float64]) -> None:
        """Tell the values of all leaves, float64 (trees, slots)."""
        self._crowd.tell(Values(Array.of(values)))


Model = HiddenModel | PaperModel | ShownModel
"""What takes all rows down the trees: tells users nothing of them, part of them, or all."""


@dataclass(slots=True)
class Growth:
    """How trees grow: `plan` and `rng` draw their columns; `full_depth` splits all levels, which hides the shape."""

    rules: SplitRules
    cells: Cells
    plan: BoostingPlan
    rng: np.random.Generator
    full_depth: bool
    threads: int
    n_rounds: int
    void: int = 0  # rounds begun in vain
    recording: Recording | None = None  # where the server's user wants to see what it opens


def next_trees(crowd: Crowd, model: Model, part: ModelPart, bins: Bins, growth: Growth) -> list[Tree]:
    """Grow a round's trees; begin the round again, `MOST_VOID` times in a job, while no domain has enough users.

    Raises `NoMoreTrees` after that; RoundVoid where there are no trees yet.
    """
    assert part.forest is not None
    while True:
        try:
            return _grow(crowd, model, part, bins, growth)
        except RoundVoid as void:
            growth.void += 1
            if growth.void <= MOST_VOID:
                continue
            if not part.forest.trees:
                raise
            logger.warning("training ends after %d of %d rounds: %s", part.forest.rounds, growth.n_rounds, void)
            raise NoMoreTrees from void


def _grow(crowd: Crowd, model: Model, part: ModelPart, bins: Bins, growth: Growth) -> list[Tree]:
    """Grow a round's trees, one per output, on sums over all users; all trees grow together, level by level.

    They end at the level at which no domain has enough users left; RoundVoid where that is the root's.
    """
    assert part.forest is not None
    cells, rules = growth.cells, growth.rules
    columns = [growth.plan.draw_columns(growth.rng) for _ in range(part.forest.objective.n_outputs)]
    ends = np.cumsum([len(c) for c in columns], dtype=np.int32)
    crowd.begin_tree(RoundStart(Array.of(np.concatenate(columns)), Array.of(ends)))

    def record(feature: int, left_bins: NDArray[np.bool_]) -> int:
        return record_split(part.splits, bins, feature, left_bins)

    opened: list[dict[int, NDArray[np.int64]]] = [{} for _ in columns]
    trees = [
        SlotTree(
            rules, cells, c, bins.schema.categorical, record, growth.threads,
            None if growth.recording is None else of_tree.__setitem__,
        )
        for c, of_tree in zip(columns, opened, strict=True)
    ]  # fmt: skip
    depth = 0
    while depth < rules.max_depth and (growth.full_depth or any(tree.growing for tree in trees)):
        parts = _opened(crowd, [cells.length(1 << depth, c) for c in columns], root=depth == 0)
        model.split([tree.split(sums, depth) for tree, sums in zip(trees, parts, strict=True)])
        depth += 1
    finished = [tree.finish(depth) for tree in trees]
    model.finish(np.stack([values for _, values in finished]))
    if growth.recording is not None:
        for of_tree, (tree, _) in zip(opened, finished, strict=True):
            growth.recording.note_tree(of_tree, tree.left, bins)
    return [tree for tree, _ in finished]


def _opened(crowd: Crowd, lengths: Sequence[int], *, root: bool) -> Sequence[NDArray[np.int64] | None]:
    """Return a level's sums, those of each tree int64 (length,); below the root None where nobody is left."""
    if not (root or crowd.cohort):
        return [None] * len(lengths)
    try:
        return np.split(crowd.total(sum(lengths)), np.cumsum(lengths)[:-1])
    except RoundVoid as void:
        if root:
            raise
        logger.warning("a tree ends early: %s", void)
        return [None] * len(lengths)
