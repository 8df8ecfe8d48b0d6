"""New leaf values, by the true labels, for trees whose splits stay (`refit`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treaty.compute import Floats, Int32s
from treaty.trees.boosting import Forest
from treaty.trees.splits import SplitRules


def refit_leaves(
    forest: Forest, leaves: Int32s, y: Floats, weight: Floats | None, rules: SplitRules, threads: int = 1
) -> None:
    """Replace all leaf values by those that boosting gives on these labels, tree after tree, with the same splits.

    `leaves`, int32 (n_rows, n_trees), is the leaf each row ends in; `rules` are in the objective's fixed point.
    """
    objective = forest.objective
    margins = np.full((len(y), objective.n_outputs), objective.base_margins)
    for first in range(0, len(forest.trees), objective.n_outputs):
        grads, hesses, _ = objective.gradients(margins, y, weight, threads)
        for output, (grad, hess) in enumerate(zip(grads, hesses, strict=True)):
            tree, of_row = forest.trees[first + output], leaves[:, first + output]
            totals = np.zeros((len(tree.left), 3), np.int64)
            np.add.at(totals, of_row, np.stack([grad, hess, np.ones_like(grad)], axis=1))
            value = np.where(tree.left < 0, rules.learning_rate * rules.leaf_weight(totals), 0.0)
            forest.trees[first + output] = replace(tree, value=value)
            margins[:, output] += value[of_row]
