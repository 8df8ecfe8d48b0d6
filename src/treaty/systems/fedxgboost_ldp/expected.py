"""What a training with noisy gradients is expected to take; messages are those of `roles`."""

from __future__ import annotations

from treaty.systems.expected import ROUND_TRIP, Expected, Shape, Trees
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast


def expected(cast: Cast, options: FedXGBoostLDP, common: BoostingOptions, shape: Shape) -> Expected:
    """Return it; every party scores its own columns, at the same time."""
    found, active, n = Expected(), cast.active, shape.rows
    trees = Trees.of(common, shape, n)
    columns, levels = sum(shape.columns.values()), trees.count * trees.depth
    for peer in cast.owners:
        if peer == active:
            continue
        found.agree([(active, peer)])
        won = levels * min(1.0, 2.0 * shape.columns[peer] / max(1, columns))
        gradients = (4.0 if options.first_order else 8.0) * n
        found.send(active, peer, trees.count * (gradients + (trees.depth - 1) * n / 8), 2 * levels + trees.count)
        found.send(peer, active, won * n / 8, levels + won)
        found.memory[peer] = 50.0 * n
    found.memory[active] = 80.0 * n
    most = max(shape.columns.values())
    found.seconds = trees.growing(n, most) / shape.threads + trees.count * n * 60e-9 + levels * 2 * ROUND_TRIP
    return found
