"""A part's trees made ready once, to be walked by rows that come one at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treaty.models.trees import ModelPart
from treaty.trees.boosting import Forest
from treaty.trees.ensemble import Walk, join_splits


def absent_owners(part: ModelPart) -> tuple[str, ...]:
    """Return the other parties whose splits a part's trees use."""
    forest = forest_of_active(part)
    used = {int(source) for tree in forest.trees for source in np.unique(tree.source) if source >= 0}
    return tuple(name for source, name in enumerate(forest.sources) if source in used and name != part.party)


def whole_walk(part: ModelPart) -> Walk:
    """Make a part's trees ready, whose splits in use are all its own: in the walk it is the only owner."""
    forest = forest_of_active(part)
    trees = [replace(tree, source=np.where(tree.source < 0, -1, 0).astype(np.int16)) for tree in forest.trees]
    return Walk(trees, join_splits([part.splits], [len(part.schema.names)]))


def forest_of_active(part: ModelPart) -> Forest:
    """Return the forest that an active party's part has."""
    assert part.forest is not None, "the active party's part holds the trees"
    return part.forest
