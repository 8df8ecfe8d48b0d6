"""SecureBoost as a system."""

from __future__ import annotations

from treaty.crypto.transfer import ring_products
from treaty.models.trees import ModelPart
from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, Routes, Stage, When, between, routes
from treaty.systems.options import learned_from_test_key
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost import (
    hidden_evaluation,
    hidden_forest,
    hidden_further,
    hidden_setup,
    hidden_training,
    shared_prediction,
)
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.secureboost import (
    active,
    follow_online,
    follow_prediction,
    passive,
    predict,
    predict_online,
)
from treaty.systems.system import Roles, System
from treaty.systems.vertical import leakage, messages
from treaty.systems.vertical.cipher_options import unaudited
from treaty.systems.vertical.contributions import IN_THE_CLEAR
from treaty.systems.vertical.expected_sums import expected_of_sums
from treaty.systems.vertical.hidden_cost import expected_of_hidden
from treaty.systems.vertical.messages import Sums
from treaty.systems.vertical.prediction import OnlineRows
from treaty.systems.vertical.training import fellow_owners, roles_by_column

# ----------------------------- what each party of a SecureBoost training learns beyond its own data and its own splits


def conclusions(
    roles: Roles, options: SecureBoost, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    """Return what each party can work out.

    `part` says which cipher was used; without it, the options' cipher is meant, for "auto" one with keys.
    """
    if options.hides_rows:
        return _conclusions_of_hidden_rows(roles, options, part)
    ciphers = options.ciphers
    cipher = part.encryption if part is not None and part.encryption else ciphers.cipher
    learned = leakage.conclusions_from_sums(roles, ciphers, common, cipher, part, options.epsilon)
    if options.hides_decisions:
        learned[roles.active].append(
            "at prediction, from a row's sum of leaf weights, the decisions on its paths, unless the model is large "
            "(docs/prediction.md)"
        )
        partner, *further = roles.having("passive")
        if further:
            learned[partner].append(
                f"only by colluding with {roles.active}, which is not allowed: at prediction, sides of rows at splits "
                f"of {' and '.join(further)}"
            )
    if not ciphers.rerandomise:
        learned[roles.active].append("which rows are in a bin, because answers were not re-randomised")
    learned[roles.active] += leakage.small_leaves(options.mode, common)
    if cipher != "lattice":
        for name in learned:
            learned[name] += learned_from_test_key(options.short_key_bits)
    for name in roles.having("passive"):
        learned[name] += leakage.order_of_splits(common) + leakage.told_by_sets(common)
        if options.rl_trees:
            learned[name].append(f"nothing of the trees of the first {options.rl_trees} rounds")
        if options.purity_guard is not None:
            learned[name].append(
                f"nothing of nodes below a split with a child whose class shares differ from the table's by more than "
                f"{options.purity_guard:g}, but that there is such a child"
                + ("; at a split of its own, which rows are in it" if ciphers.names_rows(cipher) else "")
            )
        if common.goss and not ciphers.hides_nodes(cipher):
            learned[name].append(
                "that rows in many trees' samples have large gradients: they are predicted worst (goss)"
            )
    return learned


def _conclusions_of_hidden_rows(roles: Roles, options: SecureBoost, part: ModelPart | None) -> dict[str, list[str]]:
    partner, *further = roles.having("passive")
    others = "others'" if further else "the other's"
    nothing = f"in training, no sum, no row of a node, and no column or cut of {others} splits"
    no_label = f"{nothing}; no label and no gradient, but the choice of its columns and bins hints at labels"
    margins = "a row's margin", "training rows are refused"
    if options.rounds_margins:
        margins = "a row's rounded margin", "training rows are not refused"
    leaves = "leaf weights of 15 bits each, which reveal something about rows that it knows to be in a leaf"
    if options.shares_leaves:
        leaves = "no leaf weight"
    learned = {
        roles.active: [
            f"the shape of all trees, the owner of each node's split, and {leaves}",
            nothing,
            f"at prediction, from {margins[0]}, the decisions on its paths, unless the model is large; {margins[1]} "
            "(docs/hidden.md)",
        ],
        partner: ["the owner of each node's split, and so the shape of all trees", no_label],
        **{name: ["at which levels of trees its own splits are", no_label] for name in further},
    }
    if further:
        learned[partner].append(
            f"only by colluding with {roles.active}, which is not allowed: all sums, rows of nodes, and sides of rows "
            f"at splits of {' and '.join(further)}"
        )
    for name in (partner, *further):
        learned[name] += leakage.told_of_weights(part)
    return learned


# ---------------------------------------------------------------- routes of SecureBoost's messages


_PLAIN = When('inference="plain"', lambda options, common: not options.hides_decisions)
_SHARED = When('inference="shared"', lambda options, common: options.hides_decisions)

_SHARED_PREDICTION = routes(
    AGREEMENT,
    between(
        PASSIVE, ACTIVE, shared_prediction.SharingKey, shared_prediction.MaskedSides, messages.SealedStep,
        shared_prediction.MarginShares,
    ),
    between(
        ACTIVE, PASSIVE, hidden_forest.HiddenForest, hidden_forest.FurtherLines, hidden_forest.SidesRequest,
        messages.SealedStep,
    ),
    leakage.FINISH,
    when=_SHARED,
    reference="docs/prediction.md, Shared",
)  # fmt: skip
_KNOWN_ROWS = When('membership="known"', lambda options, common: not options.hides_rows)
_HIDDEN_ROWS = When('membership="hidden"', lambda options, common: options.hides_rows)
_OPENED_LEAVES = When(
    'membership="hidden", leaves="opened"', lambda options, common: options.hides_rows and not options.shares_leaves
)
_PLAIN_ANSWERS = When("answers not re-randomised", lambda options, common: not options.ciphers.rerandomise)

ROUTES: dict[Stage, Routes] = {
    "train": routes(
        routes(
            leakage.encrypted(
                seal='sums="sealed"', hide='encryption="lattice"', guards='rl_trees, purity_guard, mechanism="label_rr"'
            ),
            Route(
                Sums, PASSIVE, ACTIVE, "not_rerandomised", reference="docs/audit.md, The attacks", when=_PLAIN_ANSWERS
            ),
            when=_KNOWN_ROWS,
        ),
        routes(
            AGREEMENT,
            between(
                ACTIVE,
                PASSIVE,
                hidden_setup.HiddenColumns,
                hidden_setup.HiddenStart,
                messages.LinkProbe,
                messages.SealedStep,
                messages.OpenedStep,
                hidden_training.HiddenTree,
                hidden_further.FurtherTree,
                hidden_forest.FurtherLines,
                hidden_forest.SidesRequest,
            ),
            between(
                PASSIVE,
                ACTIVE,
                hidden_setup.HiddenColumns,
                messages.LinkEcho,
                messages.SealedStep,
                messages.OpenedStep,
                hidden_evaluation.EvalLoss,
                shared_prediction.MaskedSides,
            ),
            Route(hidden_forest.HiddenForest, ACTIVE, PASSIVE),
            Route(hidden_training.WeightShares, PASSIVE, ACTIVE, when=_OPENED_LEAVES),
            leakage.CHECKPOINTS,
            leakage.FINISH,
            when=_HIDDEN_ROWS,
            reference="docs/hidden.md, Who learns what",
        ),
    ),
    "predict": routes(
        routes(leakage.PREDICT, when=_PLAIN),
        _SHARED_PREDICTION,
    ),
    "explain": routes(leakage.EXPLAIN, when=_PLAIN),
    "online": routes(
        routes(leakage.ONLINE, when=_PLAIN),
        _SHARED_PREDICTION,
        Route(OnlineRows, ACTIVE, PASSIVE, when=_SHARED, reference="docs/serving.md, Models with splits of partners"),
    ),
}


# ---------------------------------------------------------------- system


def warm_up(options: SecureBoost | None) -> list[SecureBoost]:
    """Return options of small trainings that compile what is needed under these options, or under any."""
    sealed, hidden = (SecureBoost(sums="sealed", membership=rows) for rows in (None, "hidden"))
    if options is None or options.ciphers.sealed:
        ring_products.compile_kernels()  # of which a small training makes none
    if options is not None and options.ciphers.sealed:
        return [hidden if options.hides_rows else sealed]
    lattice = SecureBoost(encryption="lattice", allow_exact_sums=True)
    if options is not None and options.cipher in ("auto", "lattice"):  # which "auto" nearly always is
        return [lattice]
    keyed = SecureBoost(encryption="ou", insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True)
    return [keyed, lattice, sealed, hidden] if options is None else [keyed]


SYSTEM = System(
    name="secureboost",
    options=SecureBoost,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive},
    assign=roles_by_column,
    vouched=fellow_owners,
    conclusions=conclusions,
    routes=ROUTES,
    lossless=True,
    on_clusters=lambda options: frozenset() if options.hides_rows else frozenset({"active", "passive"}),
    has_model=frozenset({"active", "passive"}),
    pays_once=True,
    **IN_THE_CLEAR
    | {
        "predict": {"active": predict, "passive": follow_prediction},
        "online": {"active": predict_online, "passive": follow_online},
    },
    unaudited=lambda options: unaudited(options.ciphers),
    warm_up=warm_up,
    expected=lambda roles, options, common, shape: (
        expected_of_hidden(roles, common, shape)
        if options.hides_rows
        else expected_of_sums(roles, options.ciphers, common, shape, alone=options.rl_trees or 0)
    ),
)
