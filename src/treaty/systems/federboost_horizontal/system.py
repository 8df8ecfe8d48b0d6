"""FederBoost by row as a system."""

from __future__ import annotations

from collections.abc import Mapping

from treaty.errors import ConfigError
from treaty.models.trees import ModelPart
from treaty.privacy.ledger import DEFAULT_DELTA
from treaty.systems.expected import ROUND_TRIP, Expected, Shape, Trees
from treaty.systems.federboost_horizontal.federboost_horizontal import leader, member
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.federboost_horizontal.setup import check_members
from treaty.systems.federboost_horizontal.trees import ModelEnd, TreeStep
from treaty.systems.horizontal import leakage, members
from treaty.systems.horizontal.held_out import NOISY_ODDS, HeldOutRequest
from treaty.systems.horizontal.leakage import KEPT_BACK, NOISY, PLAIN
from treaty.systems.horizontal.masked_sums import MaskedInput
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.systems.horizontal.rows import ModelBegin, RowsDescription
from treaty.systems.horizontal.sum_noise import looks
from treaty.systems.leakage import AGREEMENT, Route, Routes, Stage, When, between, routes
from treaty.systems.pooled.continuing import checkpoints_routes
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import PartySpec, Roles, System

# ---------------------------------------------------------------- what parties can work out from messages together


def conclusions(
    roles: Roles, options: FederBoostHorizontal, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    """Return what each party can work out; the leader's `part` has what the search parted, or what noise cost."""
    of_leader = _of_leader(roles, options, common, "" if part is None else part.spent)
    of_member = ["no sum; with three participants or more, nothing that can be attributed to one of them"]
    found_by_leader, found_by_member = leakage.learned_in_search(options, common)
    of_all = []  # what leader and members alike can work out about single rows
    if common.fewest_rows < 20 and options.epsilon_total is None:
        of_all.append(
            f"leaves of as few as {common.fewest_rows} training rows (min_child_samples is below 20), so that splits "
            "and leaf values may describe single rows"
        )
    if options.epsilon_total is None:
        of_all.append(
            "from the model's first round, for most leaves, how many rows of each class they have (the model has no "
            "counts of later rounds and inner nodes)"
        )
    else:
        of_all.append(
            f"about any single row, from sums and model together, no more than ({options.epsilon_total:g}, "
            f"{options.delta or DEFAULT_DELTA:g}) differential privacy permits (sent without noise: names "
            "of columns, their categories, which are empty or have numbers beyond float32, classes, and whether an "
            "earlier training had the same rows)"
            + ("; each row is trained on or counted, whatever other rows there are" if options.holds_out_rows else "")
        )
    others = {name: [*of_member, *found_by_member, *of_all] for name in roles.owners if name != roles.active}
    return {roles.active: [*of_leader, *found_by_leader, *of_all], **others}


def _of_leader(roles: Roles, options: FederBoostHorizontal, common: BoostingOptions, spent: str) -> list[str]:
    """Return what the leader can work out; `spent` is what noise cost, or what the search for quantiles parted."""
    noisy, has_rows = options.epsilon_total is not None, roles.active in roles.owners
    learned = ["if it colludes with all other participants but one, the sums of that one"]
    if has_rows and len(roles.owners) > 2:
        learned.append("the others' sums together: the total minus its own")
    if len(roles.owners) == 2:
        learned.append(
            f"the other participant's sums{', but for its noise' if noisy else ' exactly'}: a sum of two less its own"
            if has_rows
            else "sums of two participants only: by colluding with one, the sums of the other"
        )
    if options.holds_out_rows:
        learned.append(leakage.kept_back(options, common))
    if spent:
        learned.append(
            f"how many rows lie between trial values in the search for bin edges, under noise ({spent})"
            if noisy
            else f"{spent}, whose values are known to lie between two trial values"
        )
    if options.dropout == "accept":
        learned.append(
            "if a participant is lost and training continues: its sums, by comparing those before and after "
            f"""(dropout="accept"){", under the noise of both" if noisy else ""}"""
        )
    return learned


# ---------------------------------------------------------------- what a training is expected to take


def expected(roles: Roles, options: FederBoostHorizontal, common: BoostingOptions, shape: Shape) -> Expected:
    """Return traffic, memory and time, with as many rows at every participant."""
    found, lead = Expected(), roles.active
    trees = Trees.of(common, shape, shape.rows * len(roles.owners))
    sums = leakage.sums_of_rows(options, common, shape, trees)
    computing = sums.growing(trees, shape)
    watched = len(looks(options, common)) if options.holds_out_rows else 0
    cells = 2 * (NOISY_ODDS[0] if options.adds_noise else 256)
    for owner in roles.owners:
        found.memory[owner] = 60.0 * shape.rows + 24.0 * max(shape.slots.values()) * max(trees.nodes)
        if owner == lead:
            continue
        found.agree([(owner, lead)])
        # of held-out rows, two labels by bins of scores
        found.send(owner, lead, 8.0 * (sums.numbers + watched * cells), sums.sums + watched)
        found.send(lead, owner, sums.received, sums.sums + watched)
    masks = len(roles.owners) * sums.numbers * 10e-9
    found.seconds = computing + masks + sums.sums * 2 * ROUND_TRIP
    return found


# ---------------------------------------------------------------- messages


_LEADER, _MEMBER = ("leader",), ("member",)
_NONE_KEPT_BACK = When(
    "without epsilon_total and validation_fraction",
    lambda options, common: options.epsilon_total is None and options.validation_fraction is None,
)
_COUNTED = PLAIN & KEPT_BACK

ROUTES: dict[Stage, Routes] = {
    "train": routes(
        AGREEMENT,
        Route(RowsDescription, _MEMBER, _LEADER),
        Route(ModelBegin, _LEADER, _MEMBER),
        routes(leakage.keys_routes(_LEADER, _MEMBER), reference="docs/federboost.md, Masks"),
        leakage.search_routes(_LEADER, _MEMBER),
        Route(MaskedInput, _MEMBER, _LEADER, "sum", when=_NONE_KEPT_BACK, guard="epsilon_total, min_child_samples"),
        Route(MaskedInput, _MEMBER, _LEADER, "held_out", when=_COUNTED, guard="min_child_samples, validation_fraction"),
        Route(MaskedInput, _MEMBER, _LEADER, "noisy", when=NOISY, guard="epsilon_total"),
        routes(
            leakage.survivors_routes(_LEADER, _MEMBER),
            Route(members.SurvivorSignature, _MEMBER, _LEADER),
            between(_LEADER, _MEMBER, members.SurvivorSignatures, members.OpenedSum, members.SumVoid),
            when=When('dropout="accept"', lambda options, common: options.dropout == "accept"),
            reference="docs/federboost.md, When a participant is lost",
        ),
        Route(HeldOutRequest, _LEADER, _MEMBER, when=KEPT_BACK),
        Route(TreeStep, _LEADER, _MEMBER, when=PLAIN),
        Route(RandomStep, _LEADER, _MEMBER, when=NOISY),
        checkpoints_routes("leader", _MEMBER),
        Route(ModelEnd, _LEADER, _MEMBER),
        reference="arXiv 2011.02796; docs/federboost.md, Who learns what by row",
    )
}


# ---------------------------------------------------------------- system


def roles(places: Mapping[str, PartySpec], active: str, options: FederBoostHorizontal) -> Roles:
    """Make the active party the leader, which needs no rows, and all others members.

    Raises ConfigError when another party has no rows, a role is given, or members are too few for sums to hide any.
    """
    wished = [name for name, place in places.items() if place.role or place.edge]
    if wished:
        raise ConfigError(
            f"expected no role and edge with protocol {options.system!r}, got them at {', '.join(wished)}"
        )
    without = [name for name, place in places.items() if not place.has_rows and name != active]
    if without:
        raise ConfigError(
            f"expected a table of every party but the active one, got none of {', '.join(without)}: in a horizontal "
            "job parties.NAME.table says who brings rows, in every party's copy of the file (only its own is read)"
        )
    owners = [name for name, place in places.items() if place.has_rows]
    check_members(options, owners)
    return Roles(active, dict.fromkeys(places, "member") | {active: "leader"}, owners)


SYSTEM = System(
    name="federboost-horizontal",
    options=FederBoostHorizontal,
    common=BoostingOptions,
    split="rows",
    train={"leader": leader, "member": member},
    assign=roles,
    conclusions=conclusions,
    routes=ROUTES,
    expected=expected,
    on_clusters=lambda options: frozenset({"leader", "member"}),
    has_model=frozenset({"leader", "member"}),
    may_lose=lambda roles, options: [
        name for name in roles.owners if name != roles.active and options.dropout == "accept"
    ],
    # members also check the keys of parties that they are not connected with
    vouched=lambda roles, options, name: roles.owners,
    cannot={
        "explain": "contributions need the number of rows in each node, which a federboost-horizontal model does not "
        "have: participants could infer each other's rows from it. Under epsilon_total it has noisy ones: load the "
        "model in Python"
    },
    warm_up=lambda options: [FederBoostHorizontal()],
)
