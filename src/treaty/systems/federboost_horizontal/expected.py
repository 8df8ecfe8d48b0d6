"""What a training on participants' sums is expected to take; messages are those of `roles`."""

from __future__ import annotations

from treaty.systems.expected import ROUND_TRIP, Expected, Shape, Trees
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.horizontal.expected import sums_of_rows
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast


def expected(cast: Cast, options: FederBoostHorizontal, common: BoostingOptions, shape: Shape) -> Expected:
    """Return it, with as many rows at every participant."""
    found, lead = Expected(), cast.active
    trees = Trees.of(common, shape, shape.rows * len(cast.owners))
    sums = sums_of_rows(common, shape, trees)
    for member in cast.owners:
        found.memory[member] = 60.0 * shape.rows + 24.0 * max(shape.slots.values()) * max(trees.nodes)
        if member == lead:
            continue
        found.agree([(member, lead)])
        found.send(member, lead, 8.0 * sums.numbers, sums.sums)
        found.send(lead, member, sums.told, sums.sums)
    masks = len(cast.owners) * sums.numbers * 10e-9
    computing = trees.growing(shape.rows, max(shape.columns.values())) / shape.threads
    found.seconds = computing + masks + sums.sums * 2 * ROUND_TRIP
    return found
