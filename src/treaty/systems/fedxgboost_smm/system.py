"""FedXGBoost-SMM as a system, in both modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from treaty.crypto.transfer import ring_products
from treaty.errors import ConfigError
from treaty.models.trees import ModelPart
from treaty.systems.expected import Expected, Shape, Trees, not_expected
from treaty.systems.fedxgboost_smm import node_products
from treaty.systems.fedxgboost_smm.fedxgboost_smm import (
    DEALER,
    AskerSeed,
    DealEnd,
    DealOrder,
    DealRequest,
    DealtShares,
    HolderSeed,
    active,
    dealer,
    passive,
)
from treaty.systems.fedxgboost_smm.options import PAPER_LEAKS, FedXGBoostSMM
from treaty.systems.leakage import ACTIVE, AGREEMENT, PAPER, PASSIVE, SAFE, Route, When, between, routes
from treaty.systems.options import learned_from_test_key
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import PartySpec, Roles, System
from treaty.systems.vertical import leakage
from treaty.systems.vertical.cipher_options import unaudited as unaudited_ciphers
from treaty.systems.vertical.contributions import IN_THE_CLEAR
from treaty.systems.vertical.expected_sums import expected_of_sums
from treaty.systems.vertical.messages import Hint, NamedRows
from treaty.systems.vertical.training import fellow_owners, roles_by_column


def conclusions(
    roles: Roles, options: FedXGBoostSMM, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    """Return what each party can conclude; `part` has the estimate of what exact sums showed."""
    if options.mode == "paper":
        return _of_matrix_products(roles, options.version)
    learned = leakage.conclusions_from_sums(roles, options.ciphers, common, options.cipher, part)
    learned[roles.active] += leakage.small_leaves(options.mode, common)
    for name in roles.having("passive"):
        learned[name] += leakage.order_of_splits(common) + leakage.told_by_sets(common)
    for name in learned:
        learned[name] += learned_from_test_key(options.insecure_test_key_bits)
    dealer = roles.holder("dealer")
    if dealer is None:
        return learned
    # the dealer knows each end's masks, and so removes the one-time pads of what that end sends
    helped = f"only by colluding with {dealer}, which is not allowed: "
    learned[roles.active].append(helped + "every bin of every row of the others")
    for name in roles.having("passive"):
        learned[name].append(helped + "all gradients, and so labels, and the rows of every node")
    learned[dealer] = ["nothing about any party's data: it is trusted not to collude with any party"]
    return learned


def _of_matrix_products(roles: Roles, version: int | None) -> dict[str, list[str]]:
    """Return what the published protocol reveals, as measured by the attacks in `treaty.attacks.hidden_values`."""
    if version == 2:
        of_active = "from the others' null vectors, in small nodes, which rows are alone in a bin"
        of_passive = (
            "from its null vectors, of two or three levels together, every row's gradient and hessian exactly, so "
            "every label, and in the first tree from one level, most of the time"
        )
    else:
        of_active = (
            "the bin of every row in every column of the others, exactly: by rounding answers in the first tree, or "
            "from the roots of several trees together"
        )
        of_passive = "where null vectors are nearly as many as a node has rows, every row's label"
    learned = {roles.active: [of_active, "the shape of all trees and all leaf weights", PAPER_LEAKS]}
    return learned | {name: [of_passive, PAPER_LEAKS] for name in roles.having("passive")}


# ---------------------------------------------------------------- what a training takes, and which messages it has


def expected(roles: Roles, options: FedXGBoostSMM, common: BoostingOptions, shape: Shape) -> Expected:
    """Return what a training is expected to take; raise ConfigError in paper mode."""
    if options.mode == "paper":
        raise not_expected("the published form")
    found = expected_of_sums(roles, options.ciphers, common, shape)
    dealer = roles.holder("dealer")
    if dealer is not None:
        trees = Trees.of(common, shape, shape.rows)
        found.agree((dealer, name) for name in roles.owners)
        found.send(roles.active, dealer, 0.0, trees.count * trees.rounds)
        # two words of 8 bytes for each bin and node
        for name in roles.owners:
            if name != roles.active:
                found.send(
                    dealer, name, 16.0 * shape.slots[name] * trees.count * trees.asked, trees.count * trees.rounds
                )
        found.memory[dealer] = 8.0 * shape.rows * max(shape.slots.values())
    return found


_DEALER = ("dealer",)
_FIRST = When("version=1", lambda options, common: options.version != 2)
_SECOND = When("version=2", lambda options, common: options.version == 2)

_DEALT = routes(
    Route(DealOrder, ACTIVE, _DEALER),
    Route(AskerSeed, _DEALER, ACTIVE),
    Route(HolderSeed, _DEALER, PASSIVE),
    Route(Hint, PASSIVE, ACTIVE, "dealer"),
    Route(DealRequest, ACTIVE, _DEALER),
    Route(DealtShares, _DEALER, PASSIVE),
    Route(DealEnd, ACTIVE, _DEALER),
    when=When('backend="dealer"', lambda options, common: options.has_dealer),
    reference="docs/fedxgboost.md, With a dealer",
)

_PUBLISHED = routes(
    AGREEMENT,
    leakage.CONSTRAINTS,
    leakage.LAYOUT,
    between(ACTIVE, PASSIVE, node_products.PaperSetup, node_products.PaperTree, node_products.NodeRows),
    Route(NamedRows, ACTIVE, PASSIVE, "all_nodes"),
    routes(
        Route(node_products.NullVectors, ACTIVE, PASSIVE),
        Route(node_products.MaskedCandidates, PASSIVE, ACTIVE),
        leakage.SPLITS,
        when=_FIRST,
    ),
    routes(
        Route(node_products.CandidateVectors, PASSIVE, ACTIVE),
        Route(node_products.MaskedGradients, ACTIVE, PASSIVE),
        Route(node_products.BestGains, PASSIVE, ACTIVE),
        Route(node_products.WonNodes, ACTIVE, PASSIVE),
        when=_SECOND,
    ),
    leakage.SPLIT_ANSWER,
    leakage.TREE_END,
    leakage.CHECKPOINTS,
    leakage.DECISIONS,
    leakage.FINISH,
    guard='mode="safe"',
    reference="arXiv 2106.10662; docs/fedxgboost.md, What leaks in paper mode",
)

_SAFELY = routes(
    *(
        replace(one, reference="docs/fedxgboost.md, Who learns what in safe mode")
        if one.reference.startswith("docs/secureboost.md, Who") or one.reference.startswith("arXiv")
        else one
        for one in leakage.encrypted(
            seal='reveal="argmax"', hide='backend="lattice"', guards='reveal="column"', blind=True
        )
    ),
    _DEALT,
)

ROUTES = leakage.by_stage(routes(routes(_SAFELY, when=SAFE), routes(_PUBLISHED, when=PAPER)))


def cast_roles(places: Mapping[str, PartySpec], active: str, options: FedXGBoostSMM) -> Roles:
    """Give every party its role; with ``backend="dealer"`` one party without data deals."""
    dealers = [name for name, place in places.items() if place.role == "dealer"]
    if len(dealers) > options.has_dealer:
        raise ConfigError(
            'expected role = "dealer" at one party at most, and only with protocol "fedxgboost-smm" and backend = '
            f'"dealer"; got it at {", ".join(dealers)}'
        )
    if not options.has_dealer:
        return roles_by_column(places, active, options)
    if not dealers:
        raise ConfigError('backend = "dealer" needs a party without data: add one with role = "dealer"')
    (name,) = dealers
    if name == active or places[name].has_rows or len(places) < 3:
        raise ConfigError(
            f"{name} cannot be the dealer: a dealer has no table, is not the active party, and needs an active and at "
            "least one passive party"
        )
    return roles_by_column(places, active, options, helper=name)


def dealer_of(owners: Iterable[str], options: FedXGBoostSMM) -> dict[str, PartySpec]:
    """Return the dealer that `fit` plays, if the options need one."""
    if not options.has_dealer:
        return {}
    if DEALER in owners:
        raise ConfigError(f"fit adds a dealer of the name {DEALER!r}: rename your party of that name")
    return {DEALER: PartySpec(role="dealer", has_rows=False)}


def warm_up(options: FedXGBoostSMM | None) -> list[FedXGBoostSMM]:
    """Return the options of small trainings that compile what these options need; None: every backend."""
    if options is not None and options.ciphers.sealed:
        ring_products.compile_kernels()  # of which a small training makes none
        return [FedXGBoostSMM(reveal="argmax")]
    of_each = {
        "ou": FedXGBoostSMM(backend="ou", insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True),
        "lattice": FedXGBoostSMM(backend="lattice", allow_exact_sums=True),
        "dealer": FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    }
    return [*of_each.values()] if options is None else [of_each[options.cipher]]


def unaudited(options: FedXGBoostSMM) -> str:
    """Return why no record can be kept for an audit of gradients; nothing where it can."""
    if options.mode == "paper":
        return "paper mode shows gradients, there is nothing to open"
    return "a dealer's masks have no key that opens them" if options.has_dealer else unaudited_ciphers(options.ciphers)


SYSTEM = System(
    name="fedxgboost-smm",
    options=FedXGBoostSMM,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive, "dealer": dealer},
    assign=cast_roles,
    vouched=fellow_owners,
    conclusions=conclusions,
    routes=ROUTES,
    expected=expected,
    named_roles=frozenset({"dealer"}),
    lossless=True,
    on_clusters=lambda options: frozenset(
        {"active", "passive"} if options.mode != "paper" and not options.has_dealer else ()
    ),
    has_model=frozenset({"active", "passive"}),
    helpers=dealer_of,
    **IN_THE_CLEAR,
    unaudited=unaudited,
    warm_up=warm_up,
)
