"""FederBoost on tables split by column as a system."""

from __future__ import annotations

import math
from dataclasses import replace

from treaty.models.trees import ModelPart
from treaty.privacy.randomised_response import chances
from treaty.systems.expected import Expected, Forecast, Shape, Trees
from treaty.systems.federboost_vertical.buckets import Buckets, ChosenSplits, HeldBuckets, SameBuckets
from treaty.systems.federboost_vertical.federboost_vertical import active, passive
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, between, routes
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles, System
from treaty.systems.vertical import leakage
from treaty.systems.vertical.contributions import IN_THE_CLEAR
from treaty.systems.vertical.messages import Start
from treaty.systems.vertical.training import roles_by_column

# of what noisy columns tell less, that which others do not tell as well
_USUAL_SHARE = 0.4


def conclusions(
    roles: Roles, options: FederBoostVertical, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    cost = (
        f"epsilon {options.epsilon_person:g} per person, shared by the party's columns"
        if options.epsilon_person is not None
        else f"epsilon {options.value_epsilon:g} per value, and per person this times the party's number of columns "
        "(its report has the sum)"
    )
    if options.column_epsilon:
        single = (f"{name} {epsilon:g}" for name, epsilon in options.column_epsilon.items())
        cost += f"; of single columns (column_epsilon) {', '.join(single)}"
    shown = (
        "the order of all values in every column of the others, to within buckets, in the clear (epsilon=inf)"
        if options.epsilon == math.inf
        else f"the bucket of every value in the others' columns, true or randomised: {cost}, however it is used later. "
        "This is data about each aligned person, under local differential privacy"
    )
    sides = (
        "the true one"
        if options.epsilon == math.inf
        else "for training rows that are recognised by their ids, that of the bucket above; for all others, the true "
        "one"
    )
    learned = {
        roles.active: [
            shown,
            "if it has a folder for later trainings, a copy of these buckets, which it keeps there (NAME.buckets)",
            f"for eval sets and at prediction, each row's side at every split in use: {sides}",
            "the shape of all trees and all leaf weights",
        ]
    }
    of_labels = "nothing about labels, gradients or rows of nodes, except what the choice of its buckets suggests"
    return learned | {name: [of_labels] for name in roles.having("passive")}


def expected(roles: Roles, options: FederBoostVertical, common: BoostingOptions, shape: Shape) -> Expected:
    """Return what a training is expected to take."""
    found, active, n = Expected(), roles.active, shape.rows
    trees = Trees.of(common, shape, n)
    columns = sum(shape.columns.values())
    for peer in roles.owners:
        if peer == active:
            continue
        # every row's bucket, in log2 of their number of bits; kept at both ends for later trainings
        features = shape.columns[peer]
        each = options.value_epsilon if options.epsilon_person is None else options.epsilon_person / max(1, features)
        buckets = max(2.0, min(shape.slots[peer] / max(1, features) - 1, options.most_buckets(each)))
        found.agree([(active, peer)])
        found.send(active, peer, 36.0 * trees.count * trees.splits * features / max(1, columns), 10)
        found.send(peer, active, n * features * math.log2(buckets) / 8, 4)
        found.memory[peer] = 30.0 * n * features
        for name in (active, peer):
            found.kept[name] = found.kept.get(name, 0.0) + n * features
    found.memory[active] = 80.0 * n + 2.0 * n * columns
    found.seconds = trees.growing(n, columns) / shape.threads + n * columns * 60e-9
    return found


def forecast(
    roles: Roles, options: FederBoostVertical, common: BoostingOptions, shape: Shape, epsilon: float | None
) -> Forecast:
    """Forecast what noise costs: a noisy column tells as much less as its buckets are mixed up."""
    own = options if epsilon is None else replace(options, epsilon=epsilon, epsilon_person=None)
    paid, unknown, columns = dict[str, float](), 0.0, sum(shape.columns.values())
    for peer in roles.owners:
        if peer != roles.active:
            # names are known of columns with an epsilon of their own alone
            named = [name.removeprefix(f"{peer}.") for name in own.column_epsilon or () if name.startswith(f"{peer}.")]
            names = [*named, *map("\0{}".format, range(shape.columns[peer] - len(named)))]
            each = own.epsilons(names, peer, roles.owners).values()
            paid[peer] = math.fsum(each)
            unknown += sum(1.0 - chances(own.most_buckets(of), of)[1] for of in each) / max(1, columns)
    # how much of what can be learned is in the noisy columns is not known beforehand
    return Forecast(paid, _USUAL_SHARE * unknown, (0.0, unknown))


ROUTES = leakage.by_stage(
    routes(
        AGREEMENT,
        leakage.CONSTRAINTS,
        Route(HeldBuckets, ACTIVE, PASSIVE),
        between(PASSIVE, ACTIVE, Buckets, SameBuckets),
        Route(Start, ACTIVE, PASSIVE),
        Route(ChosenSplits, ACTIVE, PASSIVE),
        leakage.RECORDS,
        leakage.CHECKPOINTS,
        leakage.DECISIONS,
        leakage.FINISH,
        reference="arXiv 2011.02796; docs/federboost.md, Who learns what by column",
    )
)


SYSTEM = System(
    name="federboost-vertical",
    options=FederBoostVertical,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive},
    assign=roles_by_column,
    conclusions=conclusions,
    routes=ROUTES,
    expected=expected,
    forecast=forecast,
    on_clusters=lambda options: frozenset({"active"}),
    has_model=frozenset({"active", "passive"}),
    pays_once=True,
    # the same rows in the same order have the same buckets as in an earlier job
    orders_by_id=True,
    **IN_THE_CLEAR,
    warm_up=lambda options: [FederBoostVertical()],
)
