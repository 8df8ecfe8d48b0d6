"""FedXGBoost-LDP as a system."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treaty.errors import ConfigError
from treaty.models.trees import ModelPart
from treaty.privacy.mechanisms import MECHANISMS, noise_variance, randomise
from treaty.systems.expected import ROUND_TRIP, Expected, Forecast, Shape, Trees
from treaty.systems.fedxgboost_ldp import scoring
from treaty.systems.fedxgboost_ldp.fedxgboost_ldp import active, passive
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.systems.leakage import ACTIVE, AGREEMENT, PAPER, PASSIVE, SAFE, Route, routes
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles, System
from treaty.systems.vertical.contributions import IN_THE_CLEAR
from treaty.systems.vertical.leakage import CHECKPOINTS, DECISIONS, FINISH, by_stage
from treaty.systems.vertical.training import roles_by_column


def conclusions(
    roles: Roles, options: FedXGBoostLDP, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    active, mechanism, epsilon = roles.active, options.noise_mechanism, options.noise_epsilon
    most = "" if options.epsilon_total is None else f", {options.epsilon_total:g} at most with all in {active}'s ledger"
    if options.label_range is not None:
        low, high = options.label_range
        cost = (
            f"labels, clipped to the range from {low:g} to {high:g} and randomised "
            f"once with epsilon {epsilon:g} each, which is also the cost of a person"
        )
    elif mechanism == "label_rr":
        cost = f"labels, randomised once with epsilon {epsilon:g} each, which is also the cost of a person"
    else:
        cost = (
            f"gradients under noise ({mechanism}): epsilon {epsilon:g} per value, and per person this times the number "
            f"of trees{most} ({active}'s report has the sum)"
        )
    if options.mode == "paper":
        cost += "; and exact sums of gradients, so that no epsilon holds (mode='paper')"
    learned = {active: ["the shape of all trees and all leaf values"]}
    if options.refit:
        learned[active].append("the side of all training rows, also outside the node, at every split (refit)")
    for name in roles.having("passive"):
        learned[name] = [
            cost,
            "not covered by epsilon: when training stops early by labels of eval sets"
            + (", and the order of magnitude of the largest weight or target" if options.adds_noise else ""),
        ]
    return learned


def expected(roles: Roles, options: FedXGBoostLDP, common: BoostingOptions, shape: Shape) -> Expected:
    """Return what a training is expected to take."""
    found, active, n = Expected(), roles.active, shape.rows
    trees = Trees.of(common, shape, n)
    columns, levels = sum(shape.columns.values()), trees.count * trees.depth
    for peer in roles.owners:
        if peer == active:
            continue
        found.agree([(active, peer)])
        won = levels * min(1.0, 2.0 * shape.columns[peer] / max(1, columns))
        # int32 gradients, and hessians for scores of the second order; one bit a row for each further level
        gradients = (4.0 if options.first_order else 8.0) * n
        found.send(active, peer, trees.count * (gradients + (trees.depth - 1) * n / 8), 2 * levels + trees.count)
        found.send(peer, active, won * n / 8, levels + won)
        found.memory[peer] = 50.0 * n
    # all parties score their own columns at the same time: the party with most columns takes longest
    found.memory[active] = 80.0 * n
    most = max(shape.columns.values())
    found.seconds = trees.growing(n, most) / shape.threads + trees.count * n * 60e-9 + levels * 2 * ROUND_TRIP
    return found


# ---------------------------------------------------------------- what noise is expected to cost


# n rows leave out the share _LEFT / n^_POWER of what can be learned; columns hardly mattered (docs/jobs.md)
_LEFT, _POWER = 4.0, 0.6
# variance of numbers in their stated range, in units of half the range
_USUAL_SPREAD = 0.16


def forecast(
    roles: Roles, options: FedXGBoostLDP, common: BoostingOptions, shape: Shape, epsilon: float | None
) -> Forecast:
    """Forecast what noise costs: labels with noise are worth as much as fewer labels without."""
    own = options if epsilon is None else replace(options, epsilon=epsilon)
    if own.mode == "paper":
        raise ConfigError("mode='paper' sends exact sums next to the noise, so that no epsilon holds: use mode='safe'")
    noise, trees = noise_variance(own.noise_mechanism, own.noise_epsilon), 1
    if own.adds_noise:
        # each tree's noise is its own, and half of the trees average it out
        trees = common.most_rounds * (shape.classes if shape.classes > 2 else 1)
        noise /= max(1.0, common.most_rounds / 2.0)
    spread = _USUAL_SPREAD if own.label_range is not None else 4.0 * shape.rarer * (1.0 - shape.rarer)
    left, least = (_LEFT * (more / shape.rows) ** _POWER for more in (1.0 + noise / spread, 1.0))
    lost = min(1.0, left - least)
    return Forecast({roles.active: trees * own.noise_epsilon}, lost, (lost / 3.0, min(1.0, 3.0 * lost)))


ROUTES = by_stage(
    routes(
        AGREEMENT,
        Route(scoring.NoiseSetup, ACTIVE, PASSIVE),
        Route(scoring.ColumnCount, PASSIVE, ACTIVE),
        Route(scoring.NoisyTree, ACTIVE, PASSIVE, "safe", when=SAFE),
        Route(scoring.NoisyTree, ACTIVE, PASSIVE, "paper", when=PAPER),
        Route(scoring.Scores, PASSIVE, ACTIVE),
        Route(scoring.ScoredSplitRequest, ACTIVE, PASSIVE),
        Route(scoring.ScoredSplitAnswer, PASSIVE, ACTIVE),
        Route(scoring.LevelDivision, ACTIVE, PASSIVE, "safe", when=SAFE),
        Route(scoring.LevelDivision, ACTIVE, PASSIVE, "paper", when=PAPER),
        CHECKPOINTS,
        DECISIONS,
        FINISH,
        reference="arXiv 2106.10662; docs/fedxgboost.md, Who learns what",
    )
)


def warm_up(options: FedXGBoostLDP | None) -> list[FedXGBoostLDP]:
    """Compile all mechanisms, of which a training uses only one; return the options of a small training."""
    for mechanism in MECHANISMS:
        randomise(mechanism, np.zeros(1), 1.0)
    return [FedXGBoostLDP()]


SYSTEM = System(
    name="fedxgboost-ldp",
    options=FedXGBoostLDP,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive},
    assign=roles_by_column,
    conclusions=conclusions,
    routes=ROUTES,
    expected=expected,
    forecast=forecast,
    has_model=frozenset({"active", "passive"}),
    pays_once=True,
    **IN_THE_CLEAR,
    warm_up=warm_up,
)
