"""Routes of the messages that systems split by column share, and what parties can conclude from them.

Splits, decisions, predictions, and sums under a cipher; each system adds what is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treaty.data.binning import MOST_BINS
from treaty.models.trees import ModelPart
from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, Routes, Stage, When, between, routes
from treaty.systems.pooled.continuing import checkpoints_routes
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles
from treaty.systems.vertical import contributions, messages, prediction, setup
from treaty.systems.vertical.cipher_options import CipherOptions

SECUREBOOST = "arXiv 1901.08755"
_WHO = "docs/secureboost.md, Who learns what"
SIDES = "docs/sealed.md, What splits reveal"

# ---------------------------------------------------------------- decisions and predictions

FINISH = Route(prediction.Finish, ACTIVE, PASSIVE, reference="docs/prediction.md, Plain")

# Rows of eval sets in a training, and rows to predict
DECISIONS = routes(
    Route(prediction.DecideRequest, ACTIVE, PASSIVE),
    Route(prediction.Decisions, PASSIVE, ACTIVE),
    reference="docs/prediction.md, What each learns, and who may collude",
)

CHECKPOINTS = checkpoints_routes("active", PASSIVE)

RECORDS = Route(prediction.RecordCount, PASSIVE, ACTIVE, reference="docs/prediction.md, Plain")

PREDICT: Routes = routes(AGREEMENT, RECORDS, DECISIONS, FINISH)

EXPLAIN: Routes = routes(
    PREDICT,
    Route(contributions.ColumnsRequest, ACTIVE, PASSIVE),
    Route(contributions.ColumnNumbers, PASSIVE, ACTIVE),
    Route(contributions.OwnContributions, ACTIVE, PASSIVE),
    reference="docs/interpretation.md, Who learns what",
)

ONLINE: Routes = routes(
    AGREEMENT,
    RECORDS,
    Route(prediction.OnlineRows, ACTIVE, PASSIVE),
    DECISIONS,
    FINISH,
    reference="docs/serving.md, Models with splits of partners",
)


def by_stage(train: Routes) -> dict[Stage, Routes]:
    """Return the routes of a system whose training has these, and where parties send decisions as they are."""
    return {"train": train, "predict": PREDICT, "explain": EXPLAIN, "online": ONLINE}


# ---------------------------------------------------------------- sums under a cipher

LATTICE = When("the lattice map", lambda options, common: options.ciphers.may_hint)
KEYED = When("a cipher with keys", lambda options, common: options.cipher in ("auto", "ou", "paillier"))
SEALED = When("sealed sums", lambda options, common: options.ciphers.sealed)
OPEN = When("open sums", lambda options, common: not options.ciphers.sealed)
HIDDEN = When("hidden nodes", lambda options, common: _maybe(options, options.ciphers.hides_nodes(options.cipher)))
NAMED = When("named nodes", lambda options, common: _maybe(options, not options.ciphers.hides_nodes(options.cipher)))
BY_COLUMN = When(
    "whole columns answered", lambda options, common: _maybe(options, options.ciphers.reveals_columns(options.cipher))
)
BY_NODE = When("nodes answered", lambda options, common: _maybe(options, options.ciphers.names_rows(options.cipher)))
TRANSFERRED = When("sides transferred", lambda options, common: options.ciphers.transfers_sides)
# What the cipher decides; the active party chooses it where options say "auto", and so either may be
PROBED = When(
    'encryption="auto", or sealed sums', lambda options, common: options.cipher == "auto" or options.ciphers.sealed
)


def _maybe(options: Any, so: bool) -> bool:
    return so or options.cipher == "auto"


LAYOUT = Route(messages.BinLayout, PASSIVE, ACTIVE)
_CONSTRAINED = When("constraints", lambda options, common: common.constrained)
_GROUPED = When("interaction constraints", lambda options, common: bool(common.interaction_constraints))
CONSTRAINTS = Route(
    messages.ColumnConstraints, PASSIVE, ACTIVE, "open", reference="docs/growth.md, Constraints", when=_CONSTRAINED
)
TREE_END = Route(messages.TreeEnd, ACTIVE, PASSIVE, "plain")
SPLITS = Route(messages.SplitRequest, ACTIVE, PASSIVE)
NODES_OF_SPLITS = Route(messages.NamedRows, ACTIVE, PASSIVE, "own_splits")
SPLIT_ANSWER = Route(messages.SplitAnswer, PASSIVE, ACTIVE)


def encrypted(seal: str, hide: str, guards: str, *, blind: bool = False) -> Routes:
    """Return the routes of a training over sums under a cipher, open or sealed.

    The arguments name options: `seal` seals sums, `hide` has nodes hidden, `guards` lessen what sets of rows reveal. In
    a `blind` system nodes are hidden under any cipher.
    """
    set_up = routes(
        routes(CONSTRAINTS, when=OPEN),
        routes(replace(CONSTRAINTS, variant="sealed"), when=SEALED),
        LAYOUT,
        Route(messages.Setup, ACTIVE, PASSIVE),
        routes(Route(messages.LinkProbe, ACTIVE, PASSIVE), Route(messages.LinkEcho, PASSIVE, ACTIVE), when=PROBED),
        routes(
            Route(setup.SeedOffer, ACTIVE, PASSIVE),
            Route(setup.SeedCommitment, PASSIVE, ACTIVE),
            Route(setup.SeedCommitments, ACTIVE, PASSIVE),
            Route(setup.SeedShare, PASSIVE, ACTIVE),
            Route(setup.SeedShares, ACTIVE, PASSIVE),
            reference="docs/lattice.md, For the cryptographer",
            when=LATTICE,
        ),
        Route(messages.Hint, PASSIVE, ACTIVE, "keyed", guard=hide, when=KEYED),
        Route(messages.Hint, PASSIVE, ACTIVE, "lattice", when=LATTICE),
        Route(messages.HintReceipt, ACTIVE, PASSIVE),
    )
    hidden_nodes = routes(
        Route(messages.TreeStart, ACTIVE, PASSIVE, "hidden"),
        Route(messages.SumsRequest, ACTIVE, PASSIVE, "hidden", when=OPEN),
        Route(messages.SumsPiece, ACTIVE, PASSIVE, "hidden"),
        when=HIDDEN,
        reference="docs/lattice.md, What the passive party sees",
    )
    named_nodes = routes(
        Route(messages.TreeStart, ACTIVE, PASSIVE, "named"),
        Route(messages.TreeRows, ACTIVE, PASSIVE),
        Route(messages.SumsRequest, ACTIVE, PASSIVE, "named", guard=f"{hide}, {guards}"),
        Route(messages.SumsPiece, ACTIVE, PASSIVE, "named", guard=hide),
        when=NAMED,
        reference=f"{SECUREBOOST}, algorithm 1",
    )
    exact_sums, sealed_docs = "docs/secureboost.md, What exact sums show", "docs/sealed.md, Who learns what"
    sealed_sums = routes(
        Route(messages.SealedSumsRequest, ACTIVE, PASSIVE),
        Route(messages.SealedColumns, PASSIVE, ACTIVE),
        between(ACTIVE, PASSIVE, messages.TournamentTerms, messages.SealedStep),
        between(PASSIVE, ACTIVE, messages.SealedStep, messages.MovedShares),
        Route(messages.MovedGroups, PASSIVE, ACTIVE, when=_GROUPED),
        Route(messages.OwnerShares, PASSIVE, ACTIVE),
        Route(messages.WonCandidates, ACTIVE, PASSIVE),
        when=SEALED,
        reference=sealed_docs,
    )
    transferred_sides = routes(
        Route(messages.SideChoices, ACTIVE, PASSIVE),
        Route(messages.SplitSides, PASSIVE, ACTIVE),
        Route(messages.TreeEnd, ACTIVE, PASSIVE, "transferred"),
        when=TRANSFERRED,
        reference=SIDES,
    )
    return routes(
        set_up,
        hidden_nodes,
        () if blind else named_nodes,
        Route(messages.Sums, PASSIVE, ACTIVE, "open", guard=seal, reference=exact_sums, when=OPEN),
        Route(messages.Sums, PASSIVE, ACTIVE, "sealed", reference=sealed_docs, when=SEALED),
        sealed_sums,
        routes(SPLITS, when=OPEN, reference=_WHO),
        routes(Route(messages.SplitColumns, PASSIVE, ACTIVE), when=BY_COLUMN, reference=_WHO),
        routes(replace(NODES_OF_SPLITS, guard=guards), SPLIT_ANSWER, when=BY_NODE, reference=_WHO),
        transferred_sides,
        Route(messages.RevealedShare, PASSIVE, ACTIVE, reference=SIDES),
        TREE_END,
        CHECKPOINTS,
        DECISIONS,
        FINISH,
        AGREEMENT,
        reference="docs/secureboost.md, How it works",
    )


# ------------------- what parties can work out wherever the active one gets encrypted sums; systems add what is theirs


def conclusions_from_sums(
    roles: Roles, options: CipherOptions, common: BoostingOptions, cipher: str, part: ModelPart | None,
    label_epsilon: float | None = None,
) -> dict[str, list[str]]:  # fmt: skip
    """Return what follows for each party, in sentences.

    `cipher` is the one used; `part` has the estimate of what exact sums showed; `label_epsilon` is of labels randomised
    once, None where labels are as they are.
    """
    of_active = [
        "the shape of all trees and all leaf weights",
        "bins of single rows of the others, with certainty, from the sides of these rows at splits: "
        + _shown_by_sides(part.sides if part is not None else {}),
    ]
    if options.sealed:
        of_active.append(
            "in training, no sum, row count or gain of the others' columns, not the column or cut of a split, and "
            "nothing about splits that are not chosen"
        )
        if common.interaction_constraints:
            of_active.append("if one of its columns is chosen, that one of its groups has all columns used above")
    else:
        of_active.append(
            "bins of single rows of the others, with certainty, from exact sums: "
            + _estimates({} if part is None else part.exact_sums)
        )
    learned = {roles.active: of_active}
    if not options.names_rows(cipher):
        of_labels = (
            "in training, no label, and not which rows are in a node; but the choice of its columns and bins hints at "
            "labels"
        )
    elif label_epsilon is None:
        of_labels = "what rows of the same node suggest about labels; gradients and labels stay encrypted"
    else:
        of_labels = (
            f"about a label, no more than epsilon {label_epsilon:g} permits, from all trees together: labels were "
            "randomised (true labels of eval sets, and weights that depend on labels, are not covered)"
        )
    for name in roles.having("passive"):
        learned[name] = [of_labels]
        if options.sealed and len(roles.having("passive")) > 1:
            learned[name].append(
                f"only by colluding with {roles.active}, which is not allowed: how good the best split of the parties "
                "before it is at every node, as a fraction"
                + ", and which groups have the columns that each other party used"
                * bool(common.interaction_constraints)
            )
        learned[name] += told_of_weights(part)
    return learned


def told_of_weights(part: ModelPart | None) -> list[str]:
    """Return what a passive party learns of rows' weights."""
    if part is None or part.forest is None or part.forest.objective.weight_bound <= 1.0:
        return []
    most = f"{part.forest.objective.weight_bound:g}"
    return [f"that the largest weight of a row is above half of {most} and at most {most}"]


def told_by_sets(common: BoostingOptions) -> list[str]:
    """Return what a passive party learns of labels if categories are split by sets."""
    if common.onehot_below > MOST_BINS:
        return []
    fewest = (common.fewest_rows + 1) // 2
    enough = f"at least {fewest} rows" if common.category_sets == "halves" and fewest > 1 else "rows"
    return [
        f"if a set of its categories wins a node: for each category with {enough} in the node, whether its gradients "
        "are above or below a limit, and so which label is more frequent"
        + ("" if enough != "rows" else "; for a category with one row, its label")
    ]


def _shown_by_sides(shares: Mapping[str, float]) -> str:
    """Return how much of each passive party's bins sides of splits revealed, if counted, in words."""
    if not shares:
        return "more with each of their splits (docs/sealed.md, What splits reveal). Each of them keeps a count"
    each = ", ".join(f"{share:.2g} of {name}'s" for name, share in shares.items())
    return f"{each}, by their count over this and earlier jobs"


def _estimates(shares: Mapping[str, float]) -> str:
    """Return how much of each passive party's bins exact sums give away, if estimated, in words."""
    if not shares:
        return (
            "nearly all in small tables, and in any table for columns with few or rare values (docs/secureboost.md, "
            "What exact sums show)"
        )
    each = ", ".join(f"{share:.2g} of {name}'s" if share else f"none of {name}'s" for name, share in shares.items())
    return f"by an estimate, {each}, of all rows and columns"


def order_of_splits(common: BoostingOptions) -> list[str]:
    """Return what a passive party learns where trees grow by best gain."""
    return ["in which order nodes are divided, and so which of its splits gain more (max_leaves)"] * bool(
        common.max_leaves
    )


def small_leaves(mode: str, common: BoostingOptions) -> list[str]:
    """Return what the active party learns if leaves may be smaller than safe mode's own limit."""
    if mode != "safe" or common.fewest_rows >= 20:
        return []
    return [
        f"leaves of as few as {common.fewest_rows} training rows (min_child_samples was lowered from 20), so that "
        "sums and splits may describe single rows"
    ]
