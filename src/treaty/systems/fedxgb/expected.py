"""What a training of a crowd is expected to take; `server` and `secpred` have the messages."""

from __future__ import annotations

from itertools import permutations

from treaty.systems.expected import ROUND_TRIP, Expected, Shape, Trees, not_expected
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.horizontal.expected import sums_of_rows
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast

_OF_A_SUM, _OF_A_NEIGHBOUR = 350.0, 340.0
"""Bytes of a sum's keys, shares and lists, each way between a user and its edge server: once, and by user there."""


def expected(cast: Cast, options: FedXGB, common: BoostingOptions, shape: Shape) -> Expected:
    """Return it, with as many rows at every user; raise ConfigError in paper mode."""
    if options.mode == "paper" or options.exposes == "paper":
        raise not_expected("the published form")
    found, server, edges = Expected(), cast.active, cast.having("edge")
    trees = Trees.of(common, shape, shape.rows * len(cast.owners))
    sums = sums_of_rows(common, shape, trees)
    domains = {edge: [user for user in cast.owners if cast.edges[user] == edge] for edge in edges}
    for edge, users in domains.items():
        beside = sums.sums * (_OF_A_SUM + _OF_A_NEIGHBOUR * len(users))
        found.send(edge, server, 8.0 * sums.numbers + 160.0 * sums.sums)
        found.send(server, edge, sums.told, sums.sums)
        found.memory[edge] = 8.0 * sums.numbers / max(1, sums.sums) * len(users)
        for user in users:
            found.send(user, edge, 8.0 * sums.numbers + beside)
            found.send(edge, user, sums.told + beside, sums.sums)
            found.memory[user] = 100.0 * shape.rows
    most = max(map(len, domains.values()))
    masks = most * sums.numbers * 10e-9
    found.seconds = masks * 2 + trees.growing(shape.rows, max(shape.columns.values())) + sums.sums * 8 * ROUND_TRIP
    if options.exposes == "nothing":
        found.seconds += _route(found, cast, options, trees, shape, edges)
    return found


def _route(found: Expected, cast: Cast, options: FedXGB, trees: Trees, shape: Shape, edges: list[str]) -> float:
    """Count what it takes to lead rows down a hidden model on shares; return its seconds."""
    rows, columns = shape.rows, max(shape.columns.values())
    levels, all_rows = trees.count * trees.depth, rows * len(cast.owners)
    shamir = options.compares == "shamir"
    holders = edges if shamir else edges[:2]
    for user in cast.owners:
        for edge in holders:
            found.send(user, edge, rows * columns * (16.0 if shamir else 8.0), 1)
            found.send(
                edge, user, levels * rows * (16.0 if shamir else 1.3) + trees.count * rows * (16 if shamir else 8)
            )
    if shamir:
        of_a_row = sum(400.0 + 40 * level + 8 * level**2 for level in range(trees.depth)) + 16
        for one, other in permutations(edges, 2):
            found.send(one, other, trees.count * all_rows * of_a_row * 3 / len(edges))
        seconds = levels * all_rows * (1.5e-6 + 0.033e-6 * columns)
    else:
        of_a_row = sum(29.0 + 48 * (2**level - 1) for level in range(trees.depth)) + 17.0 * 2**trees.depth
        masks = 16.0 * columns * all_rows
        first, second, dealer = edges[:3]
        for one, other in ((first, second), (second, first), (dealer, second)):
            found.send(one, other, (trees.count * all_rows * of_a_row + masks) / 3)
        seconds = levels * all_rows * 0.6e-6
    for edge in edges:
        found.memory[edge] += all_rows * (columns * 16.0 + 500.0)
    return seconds / shape.threads + levels * 6 * ROUND_TRIP
