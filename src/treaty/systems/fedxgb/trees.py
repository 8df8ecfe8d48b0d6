"""How the server's trees grow, on sums over all users, and how users are told them where they learn the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.data.binning import Bins
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.messaging.messages import Array, decode_body, view
from treaty.models.checkpoints import Checkpoint
from treaty.models.trees import ModelPart, keep_records, record_split, records_used
from treaty.systems.fedxgb.messages import MOST_VOID, RoundStart, RowSummary, Splits, Values
from treaty.systems.fedxgb.paper import PaperModel
from treaty.systems.fedxgb.secfind import Crowd
from treaty.systems.fedxgb.secpred import HiddenModel
from treaty.systems.horizontal.quantiles import (
    CommonBins,
    Count,
    Opening,
    OwnLabels,
    ProbeRequest,
    agreed_start,
    choose_bins,
    most_rounds,
    note_search,
    told_by_search,
    unpack_bins,
)
from treaty.systems.observers import Recording
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import BoostingPlan, Forest
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.growth import NoMoreTrees
from treaty.trees.objectives import Objective
from treaty.trees.slots import Cells, SlotSplits, SlotTree
from treaty.trees.splits import SplitRules

# ----------------------------------------------------------------
# A finished model's trees, filled up to complete ones with splits on bins: the form in which a model is shared.


def depth_of(tree: Tree) -> int:
    """Return how many levels of splits a tree has."""
    depth = np.zeros(len(tree.left), np.int64)
    for node in np.flatnonzero(tree.left >= 0).tolist():  # children come after their parents
        depth[tree.left[node] : tree.left[node] + 2] = depth[node] + 1
    return int(depth.max())


def complete_tree(
    tree: Tree, splits: SplitTable, bins: Bins, depth: int
) -> tuple[list[SlotSplits], NDArray[np.float64]]:
    """Fill a tree up to a depth with dummy splits, at which rows go right.

    Returns the splits of all slots of each level, and float64 (2^depth,) the values of the slots below the last level.
    Raises ConfigError when a split is not at a cut of the training's bins.
    """
    levels = [SlotSplits(np.full(1 << k, -1, np.int32), np.zeros((1 << k, 256), np.bool_)) for k in range(depth)]
    values = np.zeros(1 << depth)
    slot, level = np.zeros((2, len(tree.left)), np.int64)
    for node, left in enumerate(tree.left.tolist()):
        at, k = int(slot[node]), int(level[node])
        if left < 0:
            values[((at + 1) << (depth - k)) - 1] = tree.value[node]
            continue
        record = int(tree.record[node])
        levels[k].features[at], levels[k].left_bins[at] = splits.feature[record], _left_bins(splits, record, bins)
        slot[left : left + 2], level[left : left + 2] = (2 * at, 2 * at + 1), k + 1
    return levels, values


def _left_bins(splits: SplitTable, record: int, bins: Bins) -> NDArray[np.bool_]:
    """Return which bins go left at a split, bool (256,), as `record_split` was given them."""
    feature, going, threshold = splits.feature[record], splits.category_left[record], splits.threshold[record]
    n_bins, cuts, of_category = int(bins.n_bins[feature]), bins.cuts[feature], bins.category_bins[feature]
    left = np.zeros(256, np.bool_)
    if going is not None and of_category is not None and len(going) == len(of_category):
        left[of_category] = np.frombuffer(going, np.uint8) != 0
    elif going is None and cuts is not None and (threshold == np.inf or threshold in cuts):
        left[: n_bins if threshold == np.inf else int(np.searchsorted(cuts, threshold)) + 1] = True
    else:
        raise ConfigError("expected splits at cuts of the bins of training, got others; the bins are another model's")
    left[n_bins] = splits.missing_left[record]
    return left


# ---------------------------------------------------------------- trees


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


# ------------------------------------------------ going on with an interrupted training: finished trees are told again
#
# All roles start anew, with new keys. The server has the model so far, and takes all rows down its trees once more, by
# the messages of training without those of sums, so that users have their margins again. `kept` has what the others
# keep.


def forest_of(kept: Checkpoint) -> Forest:
    """Return the finished rounds of an interrupted training; later splits are dropped."""
    forest = kept.part.forest
    assert forest is not None
    forest.cut(kept.rounds)
    keep_records(kept.part.splits, records_used(forest.trees, 1)[0])
    return forest


def tell_again(crowd: Crowd, model: Model, part: ModelPart, bins: Bins, growth: Growth) -> None:
    """Take all rows down the finished trees once more, so that users have the margins after them."""
    assert part.forest is not None
    trees, n_outputs = part.forest.trees, part.forest.objective.n_outputs
    columns = np.arange(len(bins.n_bins), dtype=np.int32)
    ends = len(columns) * np.arange(1, n_outputs + 1, dtype=np.int32)
    for first in range(0, len(trees), n_outputs):
        crowd.begin_tree(RoundStart(Array.of(np.tile(columns, n_outputs)), Array.of(ends)))
        of_round = trees[first : first + n_outputs]
        depth = growth.rules.max_depth if growth.full_depth else max(1, *map(depth_of, of_round))
        complete = [complete_tree(tree, part.splits, bins, depth) for tree in of_round]
        for level in range(depth):
            model.split([splits[level] for splits, _ in complete])
        model.finish(np.stack([values for _, values in complete]))


# ----------------- what the server finds out about all users' rows before trees grow: how many there are, bounds, bins


@dataclass(frozen=True, slots=True)
class AllRows:
    """What the server knows of all users' rows before trees grow; `objective` has the bounds of all their gradients."""

    bins: Bins
    objective: Objective
    n_rows: int
    may_miss: NDArray[np.bool_]  # (features,): whether rows have no value
    spent: str  # in words: the smallest group of rows that the search for bins told from others


def search(inputs: RoleInput, crowd: Crowd, schema: Schema) -> AllRows:
    """Open the number of rows, where training starts and the bounds of gradients, then search for bins."""
    common = inputs.common
    none = LabelledRows(Table(schema, [np.empty(0, np.float32)] * len(schema.names), 0), np.empty(0))
    labels = OwnLabels(inputs, none, inputs.classes, inputs.party.name)
    opening = Opening(schema, bounds=labels.n_bounds)

    def total(own: NDArray[np.int64] | None, length: int) -> NDArray[np.int64]:
        return crowd.total(length)

    crowd.tell(Count())
    opened = crowd.total(opening.length)
    n_rows = opening.rows(opened)
    objective = agreed_start(labels, opening, opened, total, crowd.tell, has_rows=False)
    objective.check_sums(n_rows)
    asked = count(1)

    def ask(probes: ProbeRequest) -> None:
        note_search(inputs.phase, next(asked))
        crowd.tell(probes)

    bins, smallest = choose_bins(
        total, ask, opening, opened, schema, common.most_bins,
        own=None, least_rows=common.fewest_rows, most_rounds=most_rounds(schema.origins), threads=inputs.threads,
    )  # fmt: skip
    fewest = int(smallest[smallest > 0].min(initial=n_rows))
    spent = told_by_search(fewest)
    return AllRows(bins, objective, n_rows, _may_miss(opening, opened, len(schema.names), n_rows), spent)


def known(inputs: RoleInput, crowd: Crowd, kept: Checkpoint) -> AllRows:
    """Return what an interrupted training knew of all rows; nothing is summed again."""
    crowd.tell(Count())
    part, name = kept.part, inputs.party.name
    summary = decode_body(kept.bins, RowSummary, peer=name)
    bins = unpack_bins(decode_body(part.bins, CommonBins, peer=name), part.schema, inputs.common.most_bins, name)
    may_miss = view(summary.may_miss, np.bool_, (len(bins.n_bins),), peer=name, what="RowSummary.may_miss")
    return AllRows(bins, forest_of(kept).objective, summary.n_rows, may_miss, part.spent)


def _may_miss(opening: Opening, opened: NDArray[np.int64], n_features: int, n_rows: int) -> NDArray[np.bool_]:
    """Return which features have rows without a value."""
    may_miss = np.zeros(n_features, np.bool_)
    may_miss[opening.numeric] = opening.present(opened) < n_rows
    for f, counts in opening.categories(opened).items():
        may_miss[f] = counts.sum() < n_rows
    return may_miss
