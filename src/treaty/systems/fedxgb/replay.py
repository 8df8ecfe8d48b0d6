"""Going on with an interrupted training: finished trees are told again.

All roles start anew, with new keys. The server has the model so far, and takes all rows down its trees once more, by
the messages of training without those of sums, so that users have their margins again. `kept` has what the others keep.
"""

from __future__ import annotations

import numpy as np

from treaty.data.binning import Bins
from treaty.messaging.messages import Array
from treaty.models.checkpoints import Checkpoint
from treaty.models.trees import ModelPart, keep_records, records_used
from treaty.systems.fedxgb.complete_trees import complete_tree, depth_of
from treaty.systems.fedxgb.growth import Growth, Model
from treaty.systems.fedxgb.messages import RoundStart
from treaty.systems.fedxgb.sums.server import Crowd
from treaty.trees.boosting import Forest


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
