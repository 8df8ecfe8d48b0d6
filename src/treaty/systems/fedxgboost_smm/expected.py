"""What a training by secure matrix products is expected to take: hidden sums, and a dealer's shares."""

from __future__ import annotations

from treaty.systems.expected import Expected, Shape, Trees, not_expected
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast
from treaty.systems.vertical.expected_sums import expected_of_sums


def expected(cast: Cast, options: FedXGBoostSMM, common: BoostingOptions, shape: Shape) -> Expected:
    """Return it; raise ConfigError in paper mode."""
    if options.mode == "paper":
        raise not_expected("the published form")
    found = expected_of_sums(cast, options.ciphers, common, shape)
    dealer = cast.holder("dealer")
    if dealer is not None:
        trees = Trees.of(common, shape, shape.rows)
        found.agree((dealer, name) for name in cast.owners)
        found.send(cast.active, dealer, 0.0, trees.count * trees.depth)
        for name in cast.owners:
            if name != cast.active:
                found.send(
                    dealer, name, 16.0 * shape.slots[name] * trees.count * trees.asked, trees.count * trees.depth
                )
        found.memory[dealer] = 8.0 * shape.rows * max(shape.slots.values())
    return found
