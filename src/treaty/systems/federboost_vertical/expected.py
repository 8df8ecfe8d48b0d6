"""What a training on noisy buckets is expected to take; messages are those of `roles`."""

from __future__ import annotations

import math

from treaty.systems.expected import Expected, Shape, Trees
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast


def expected(cast: Cast, options: FederBoostVertical, common: BoostingOptions, shape: Shape) -> Expected:
    """Return it; buckets are sent once, then the active party trains alone."""
    found, active, n = Expected(), cast.active, shape.rows
    trees = Trees.of(common, shape, n)
    columns = sum(shape.columns.values())
    for peer in cast.owners:
        if peer == active:
            continue
        features = shape.columns[peer]
        buckets = max(2.0, shape.slots[peer] / max(1, features) - 1)
        found.agree([(active, peer)])
        found.send(active, peer, 36.0 * trees.count * trees.splits * features / max(1, columns), 10)
        found.send(peer, active, n * features * math.log2(buckets) / 8, 4)
        found.memory[peer] = 30.0 * n * features
        for name in (active, peer):
            found.kept[name] = found.kept.get(name, 0.0) + n * features
    found.memory[active] = 80.0 * n + 2.0 * n * columns
    found.seconds = trees.growing(n, columns) / shape.threads + n * columns * 60e-9
    return found
