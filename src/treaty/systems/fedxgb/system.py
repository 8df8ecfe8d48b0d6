"""FedXGB as a system: its roles, and what a runner has to know of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

from treaty.systems.expected import ROUND_TRIP, Expected, Shape, Trees, not_expected
from treaty.systems.fedxgb import messages, paper, pieces, prediction, shares
from treaty.systems.fedxgb.conclusions import conclusions, conclusions_of_prediction
from treaty.systems.fedxgb.domain import authority
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.prediction import QueryRecord, queries_folder
from treaty.systems.fedxgb.roles import (
    committees_of,
    domains,
    dropouts,
    helpers,
    holders_of,
    links,
    links_of_prediction,
    only_simulated,
    refused,
    roles_of,
    roles_of_prediction,
)
from treaty.systems.fedxgb.secboost import edge, server, user
from treaty.systems.horizontal import leakage
from treaty.systems.horizontal.held_out import HeldOutRequest
from treaty.systems.horizontal.leakage import KEPT_BACK, NOISY, PLAIN
from treaty.systems.horizontal.masked_sums import MaskedInput, PassedShares, SealedShares
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.systems.leakage import PAPER, SAFE, Route, Routes, Stage, When, between, routes
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import RoleInput, Roles, Service, System

# ---------------------------------------------------------------- messages, from whom to whom


_SERVER, _EDGE, _USER = ("server",), ("edge",), ("user",)
_ALL, _AUTHORITY = ("server", "edge", "user"), ("authority",)
_COLLUDE = "docs/fedxgb.md, Comparison on shares"
_ADDITIVE = When('comparison="additive"', lambda options, common: options.compares == "additive")
_NOTHING = When('expose="nothing"', lambda options, common: options.exposes == "nothing")
_SHOWN = When('expose="paper"', lambda options, common: options.exposes == "paper")
_MODEL = PLAIN & When('expose="model"', lambda options, common: options.exposes == "model")
_NOT_HIDDEN = PLAIN & When('expose="model" or "paper"', lambda options, common: options.exposes != "nothing")
_NONE_KEPT_BACK = When("without validation_fraction", lambda options, common: not options.holds_out_rows)
_ALL_TRAINED = SAFE & PLAIN & _NONE_KEPT_BACK
_ROW_SHARES = Route(pieces.RowShares, _USER, _EDGE, reference=_COLLUDE)
_ROW_COUNTS = Route(messages.RowCounts, _EDGE, _EDGE)
_SHARED = Route(shares.SharedNumbers, _EDGE, _EDGE, reference=_COLLUDE)
_MODEL_SHARES = routes(between(_SERVER, _EDGE, messages.SplitShares, messages.LeafShares), reference=_COLLUDE)
_DEALT = routes(
    between(
        _EDGE,
        _EDGE,
        shares.WantedRows,
        shares.WantedLevel,
        shares.WantedLeaves,
        shares.DealtCorrections,
        shares.DealingEnd,
    ),
    when=_ADDITIVE,
    reference=_COLLUDE,
)

_KEYS = routes(
    Route(messages.KeyRequest, _ALL, _AUTHORITY),
    Route(messages.KeyCertificate, _AUTHORITY, _ALL),
    Route(messages.UserOffer, _USER, _EDGE),
    Route(messages.Users, _EDGE, _SERVER),
    Route(messages.Domain, _EDGE, _USER),
    leakage.keys_routes(_SERVER, _EDGE),
    reference="docs/fedxgb.md, How a sum is opened",
)

_SUMS = routes(
    Route(messages.Attendance, _USER, _EDGE),
    Route(messages.Cohort, _EDGE, _USER),
    Route(messages.Sum, _SERVER, _EDGE),
    Route(messages.Call, _EDGE, _USER),
    Route(messages.MaskKey, _USER, _EDGE),
    Route(messages.MaskKeys, _EDGE, _USER),
    routes(
        leakage.survivors_routes(_EDGE, _USER),
        Route(MaskedInput, _USER, _EDGE, "domain"),
        Route(messages.Agreement, _USER, _EDGE),
        Route(messages.Agreements, _EDGE, _USER),
        when=SAFE,
    ),
    Route(messages.AbsenceNotice, _USER, _EDGE),
    Route(MaskedInput, _EDGE, _SERVER, "sum", when=_ALL_TRAINED, guard="epsilon_total, group_size, min_child_samples"),
    Route(MaskedInput, _EDGE, _SERVER, "held_out", when=PLAIN & KEPT_BACK, guard="group_size, validation_fraction"),
    Route(MaskedInput, _EDGE, _SERVER, "noisy", when=NOISY, guard="epsilon_total"),
    Route(MaskedInput, _EDGE, _SERVER, "paper", when=PAPER),
    Route(messages.SurvivorReport, _EDGE, _SERVER),
    reference="Liu et al., ICDCS 2020, SecBoost; docs/fedxgb.md, How a sum is opened",
)

_PAPERS_SUMS = routes(
    Route(SealedShares, _USER, _EDGE, "keys"),
    Route(PassedShares, _EDGE, _USER, "keys"),
    Route(paper.InputAndShares, _USER, _EDGE),
    Route(paper.LostUsers, _EDGE, _USER),
    Route(paper.KeyShares, _USER, _EDGE),
    when=PAPER,
    guard='mode="safe"',
    reference="Liu et al., ICDCS 2020; docs/fedxgb.md, Paper mode",
)


def _to_all(sender: tuple[str, ...], receiver: tuple[str, ...]) -> Routes:
    """Return the lines of what the server sends to all users, by way of their edge servers, who see it, too."""
    return routes(
        Route(messages.Task, sender, receiver),
        leakage.search_routes(sender, receiver),
        routes(between(sender, receiver, messages.RowSummary, messages.RoundStart), when=PLAIN),
        Route(RandomStep, sender, receiver, when=NOISY),
        Route(paper.ShownSplits, sender, receiver, when=_SHOWN),
        Route(messages.KnownSplits, sender, receiver, when=_MODEL),
        Route(messages.Values, sender, receiver, when=_NOT_HIDDEN),
        Route(HeldOutRequest, sender, receiver, when=KEPT_BACK),
        Route(messages.TrainingEnd, sender, receiver),
        reference="docs/fedxgb.md, What users learn about the model",
    )


# Rows of a training on their way down trees that the server alone knows
_HIDDEN_MODEL = routes(
    _ROW_SHARES,
    Route(messages.HeldRows, _EDGE, _SERVER),
    Route(messages.RowOwners, _SERVER, _EDGE),
    Route(messages.RowOwners, _EDGE, _USER),
    _MODEL_SHARES,
    _SHARED,
    Route(messages.SideShares, _EDGE, _USER),
    Route(messages.ValueShares, _EDGE, _USER, "training"),
    _DEALT,
    reference="Liu et al., ICDCS 2020, SecPred; docs/fedxgb.md, SecPred",
    when=_NOTHING,
)

_SHOWN_MODEL = routes(
    Route(paper.HiddenThresholds, _SERVER, _EDGE),
    Route(pieces.ComparedShares, _USER, _EDGE),
    _ROW_COUNTS,
    _SHARED,
    Route(paper.Sides, _EDGE, _USER),
    when=_SHOWN,
    reference=f"Liu et al., ICDCS 2020, SecPred; {_COLLUDE}",
)

ROUTES: dict[Stage, Routes] = {
    "train": routes(
        # so long the authority waits for users who come late
        Route(messages.TrainingEnd, _SERVER, _AUTHORITY, when=NOISY, reference="docs/fedxgb.md, Under noise"),
        _KEYS,
        _to_all(_SERVER, _EDGE),
        _to_all(_EDGE, _USER),
        _SUMS,
        _PAPERS_SUMS,
        _HIDDEN_MODEL,
        _SHOWN_MODEL,
    )
}

# Rows of users, predicted by a hidden model
PREDICTION: Routes = routes(
    Route(messages.PredictionTerms, _SERVER, _EDGE, "edge"),
    Route(messages.PredictionTerms, _EDGE, _USER, "user"),
    Route(messages.DealerTerms, _SERVER, _EDGE, when=_ADDITIVE),
    Route(messages.ModelSize, _SERVER, _EDGE),
    Route(messages.QueriesLeft, _EDGE, _USER),
    _ROW_SHARES,
    _ROW_COUNTS,
    Route(messages.RowsTaken, _EDGE, _USER),
    Route(messages.TreesRequest, _EDGE, _SERVER),
    _MODEL_SHARES,
    _SHARED,
    Route(messages.ValueShares, _EDGE, _USER, "prediction"),
    _DEALT,
    reference="Liu et al., ICDCS 2020, SecPred; docs/fedxgb.md, New rows",
)


# ---------------------------------------------------------------- prediction of users' rows by a hidden model


def _edge(inputs: RoleInput[FedXGB]) -> None:
    """Play an edge server of a prediction; its count of queries is in the role's `store`."""
    counts = inputs.party.name in holders_of(inputs.options.compares, inputs.roles.having("edge"))
    folder = queries_folder(inputs.store, inputs.party.name) if inputs.store is not None and counts else None
    prediction.edge(inputs, QueryRecord(folder))


SERVICE = Service(
    programs={"server": prediction.server, "edge": _edge, "user": prediction.user},
    assign=roles_of_prediction,
    links=links_of_prediction,
    conclusions=conclusions_of_prediction,
    routes=PREDICTION,
    refused=refused,
)


# ---------------------------------------------------------------- what a training is expected to take


# Bytes of a sum's keys, shares and lists, each way between a user and its edge server: once, and by user of the domain
_OF_A_SUM, _OF_A_NEIGHBOUR = 350.0, 340.0


def expected(roles: Roles, options: FedXGB, common: BoostingOptions, shape: Shape) -> Expected:
    """Return what a training is expected to take if all users have as many rows; raise ConfigError in paper mode."""
    if options.mode == "paper" or options.exposes == "paper":
        raise not_expected("the published form")
    found, server, edges = Expected(), roles.active, roles.having("edge")
    trees = Trees.of(common, shape, shape.rows * len(roles.owners))
    sums = leakage.sums_of_rows(options, common, shape, trees)
    if options.holds_out_rows:
        # two labels by bins of scores
        sums = replace(sums, numbers=sums.numbers + 512.0 * common.most_rounds, sums=sums.sums + common.most_rounds)
    users_of = domains(roles)
    for edge_server, users in users_of.items():
        beside = sums.sums * (_OF_A_SUM + _OF_A_NEIGHBOUR * len(users))
        found.send(edge_server, server, 8.0 * sums.numbers + 160.0 * sums.sums)
        found.send(server, edge_server, sums.received, sums.sums)
        found.memory[edge_server] = 8.0 * sums.numbers / max(1, sums.sums) * len(users)
        for owner in users:
            found.send(owner, edge_server, 8.0 * sums.numbers + beside)
            found.send(edge_server, owner, sums.received + beside, sums.sums)
            found.memory[owner] = 100.0 * shape.rows
    most = max(map(len, users_of.values()))
    masks = most * sums.numbers * 10e-9
    found.seconds = masks * 2 + sums.growing(trees, shape) + sums.sums * 8 * ROUND_TRIP
    if options.exposes == "nothing":
        found.seconds += _route(found, roles, options, trees, shape, edges)
    return found


def _route(found: Expected, roles: Roles, options: FedXGB, trees: Trees, shape: Shape, edges: list[str]) -> float:
    """Count what it takes to take rows down a hidden model on shares; return its seconds."""
    rows, columns = shape.rows, max(shape.columns.values())
    levels, shamir, made = trees.count * trees.depth, options.compares == "shamir", committees_of(options, edges)
    if shamir:
        of_a_row = sum(400.0 + 40 * level + 8 * level**2 for level in range(trees.depth)) + 16
    else:
        of_a_row = sum(29.0 + 48 * (2**level - 1) for level in range(trees.depth)) + 17.0 * 2**trees.depth
    for of in made:
        owners, holders = [name for name in roles.owners if roles.edges[name] in of.domains], of.edges
        of_rows = trees.count * rows * len(owners) * of_a_row * (3 / len(of.edges) if shamir else 1 / 3)
        pairs = list(permutations(of.edges, 2))
        if not shamir:
            first, second, dealer = of.edges
            holders, pairs = [first, second], [(first, second), (second, first), (dealer, second)]
            of_rows += 16.0 * columns * rows * len(owners) / 3
        for owner, edge_server in product(owners, holders):
            found.send(owner, edge_server, rows * columns * (16.0 if shamir else 8.0), 1)
            of_results = levels * rows * (16.0 if shamir else 1.3) + trees.count * rows * (16 if shamir else 8)
            found.send(edge_server, owner, of_results)
        for one, other in pairs:
            found.send(one, other, of_rows)
        for edge_server in of.edges:
            found.memory[edge_server] += rows * len(owners) * (columns * 16.0 + 500.0)
    # committees that share no edge server compute at the same time
    one_after_another = len(made[0].edges) if len(made) > 1 else 1
    all_rows = rows * len(roles.owners) * one_after_another / len(made)
    seconds = levels * all_rows * (1.5e-6 + 0.033e-6 * columns if shamir else 0.6e-6)
    return seconds / shape.threads + levels * one_after_another * 6 * ROUND_TRIP


# ---------------------------------------------------------------- system


SYSTEM = System(
    name="fedxgb",
    options=FedXGB,
    common=BoostingOptions,
    split="rows",
    train={"server": server, "edge": edge, "user": user, "authority": authority},
    assign=roles_of,
    helpers=helpers,
    links=links,
    conclusions=conclusions,
    by_role=True,
    routes=ROUTES,
    expected=expected,
    has_model=frozenset({"server"}),
    until_kept=frozenset({"edge", "user"}),
    named_roles=frozenset({"server", "edge", "authority"}),
    shows_columns=frozenset({"server"}),
    # a training continues without users
    may_lose=lambda roles, options: roles.owners,
    may_be_absent=lambda roles, options: roles.owners,
    # masks between edge servers depend on each other's certificates
    vouched=lambda roles, options, name: roles.having("edge") if roles.of[name] in ("server", "edge") else [],
    service=SERVICE,
    absences=dropouts,
    only_simulated=only_simulated,
    warm_up=lambda options: [FedXGB()],
)
