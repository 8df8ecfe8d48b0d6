"""What messages tell that systems split by column share: splits, decisions, predictions, and sums under a cipher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, Routes, When, routes
from treaty.systems.pooled.system import checkpoints_routes
from treaty.systems.vertical.contributions import ColumnNumbers, ColumnsRequest, OwnContributions
from treaty.systems.vertical.decisions import DecideRequest, Decisions, Finish, RecordCount
from treaty.systems.vertical.encrypted_columns import (
    BinLayout,
    Hint,
    HintReceipt,
    SplitAnswer,
    SplitColumns,
    SplitRequest,
    Sums,
    SumsPiece,
    SumsRequest,
    ToldShare,
    TreeEnd,
    TreeRows,
    TreeStart,
)
from treaty.systems.vertical.links import LinkEcho, LinkProbe
from treaty.systems.vertical.named_rows import NamedRows
from treaty.systems.vertical.online import OnlineRows
from treaty.systems.vertical.public_seed import SeedCommitment, SeedCommitments, SeedOffer, SeedShare, SeedShares
from treaty.systems.vertical.sealed.level import (
    MovedShares,
    OwnerShares,
    SealedColumns,
    SealedStep,
    SealedSumsRequest,
    SideChoices,
    SplitSides,
    TournamentTerms,
    WonCandidates,
)
from treaty.systems.vertical.setup import Setup

SECUREBOOST = "arXiv 1901.08755"
_WHO = "docs/secureboost.md, Who learns what, and who may collude"

# ---------------------------------------------------------------- decisions and predictions

FINISH = Route(Finish, ACTIVE, PASSIVE, reference="docs/prediction.md, Plain")

DECISIONS = routes(
    Route(DecideRequest, ACTIVE, PASSIVE),
    Route(Decisions, PASSIVE, ACTIVE),
    reference="docs/prediction.md, What each learns, and who may collude",
)
"""Rows of eval sets in a training, and rows to predict."""

CHECKPOINTS = checkpoints_routes("active", PASSIVE)

RECORDS = Route(RecordCount, PASSIVE, ACTIVE, reference="docs/prediction.md, Plain")

PREDICT: Routes = routes(AGREEMENT, RECORDS, DECISIONS, FINISH)

EXPLAIN: Routes = routes(
    PREDICT,
    Route(ColumnsRequest, ACTIVE, PASSIVE),
    Route(ColumnNumbers, PASSIVE, ACTIVE),
    Route(OwnContributions, ACTIVE, PASSIVE),
    reference="docs/interpretation.md, Who learns what",
)

ONLINE: Routes = routes(
    AGREEMENT,
    RECORDS,
    Route(OnlineRows, ACTIVE, PASSIVE),
    DECISIONS,
    FINISH,
    reference="docs/serving.md, Models with splits of partners",
)

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
PROBED = When(
    'encryption="auto", or sealed sums', lambda options, common: options.cipher == "auto" or options.ciphers.sealed
)
"""What the cipher decides; the active party chooses it where options say "auto", and so either may be."""


def _maybe(options: Any, so: bool) -> bool:
    return so or options.cipher == "auto"


LAYOUT = Route(BinLayout, PASSIVE, ACTIVE)
TREE_END = Route(TreeEnd, ACTIVE, PASSIVE, "plain")
SPLITS = Route(SplitRequest, ACTIVE, PASSIVE)
NODES_OF_SPLITS = Route(NamedRows, ACTIVE, PASSIVE, "own_splits")
SPLIT_ANSWER = Route(SplitAnswer, PASSIVE, ACTIVE)


def public_seed(reference: str) -> Routes:
    return routes(
        Route(SeedOffer, ACTIVE, PASSIVE),
        Route(SeedCommitment, PASSIVE, ACTIVE),
        Route(SeedCommitments, ACTIVE, PASSIVE),
        Route(SeedShare, PASSIVE, ACTIVE),
        Route(SeedShares, ACTIVE, PASSIVE),
        reference=reference,
    )


def encrypted(seal: str, hide: str, guards: str, *, blind: bool = False) -> Routes:
    """Return the lines of a training over sums under a cipher, open or sealed.

    Of options, `seal` seals sums, `hide` has nodes hidden, and `guards` are those against what row sets tell. In a
    `blind` system nodes are hidden under any cipher.
    """
    return routes(
        _set_up(hide),
        _hidden_nodes(),
        () if blind else _named_nodes(hide, guards),
        _sums(seal),
        _sealed_sums(),
        routes(SPLITS, when=OPEN, reference=_WHO),
        routes(
            Route(SplitColumns, PASSIVE, ACTIVE),
            when=BY_COLUMN,
            reference=_WHO,
        ),
        routes(replace(NODES_OF_SPLITS, guard=guards), SPLIT_ANSWER, when=BY_NODE, reference=_WHO),
        routes(
            Route(SideChoices, ACTIVE, PASSIVE),
            Route(SplitSides, PASSIVE, ACTIVE),
            Route(TreeEnd, ACTIVE, PASSIVE, "transferred"),
            when=TRANSFERRED,
            reference="docs/sealed.md, What splits tell",
        ),
        Route(ToldShare, PASSIVE, ACTIVE, reference="docs/sealed.md, What splits tell"),
        TREE_END,
        CHECKPOINTS,
        DECISIONS,
        FINISH,
        AGREEMENT,
        reference="docs/secureboost.md, What happens",
    )


def _set_up(hide: str) -> Routes:
    return routes(
        LAYOUT,
        Route(Setup, ACTIVE, PASSIVE),
        routes(
            Route(LinkProbe, ACTIVE, PASSIVE),
            Route(LinkEcho, PASSIVE, ACTIVE),
            when=PROBED,
        ),
        routes(public_seed("docs/lattice.md, For the cryptographer"), when=LATTICE),
        Route(Hint, PASSIVE, ACTIVE, "keyed", guard=hide, when=KEYED),
        Route(Hint, PASSIVE, ACTIVE, "lattice", when=LATTICE),
        Route(HintReceipt, ACTIVE, PASSIVE),
    )


def _hidden_nodes() -> Routes:
    return routes(
        Route(TreeStart, ACTIVE, PASSIVE, "hidden"),
        Route(SumsRequest, ACTIVE, PASSIVE, "hidden", when=OPEN),
        Route(SumsPiece, ACTIVE, PASSIVE, "hidden"),
        when=HIDDEN,
        reference="docs/lattice.md, What the passive party sees",
    )


def _named_nodes(hide: str, guards: str) -> Routes:
    return routes(
        Route(TreeStart, ACTIVE, PASSIVE, "named"),
        Route(TreeRows, ACTIVE, PASSIVE),
        Route(SumsRequest, ACTIVE, PASSIVE, "named", guard=f"{hide}, {guards}"),
        Route(SumsPiece, ACTIVE, PASSIVE, "named", guard=hide),
        when=NAMED,
        reference=f"{SECUREBOOST}, algorithm 1",
    )


def _sums(seal: str) -> Routes:
    return routes(
        Route(
            Sums, PASSIVE, ACTIVE, "open", guard=seal, reference="docs/secureboost.md, What exact sums show", when=OPEN
        ),
        Route(Sums, PASSIVE, ACTIVE, "sealed", reference="docs/sealed.md, Who learns what", when=SEALED),
    )


def _sealed_sums() -> Routes:
    return routes(
        Route(SealedSumsRequest, ACTIVE, PASSIVE),
        Route(SealedColumns, PASSIVE, ACTIVE),
        Route(TournamentTerms, ACTIVE, PASSIVE),
        Route(SealedStep, ACTIVE, PASSIVE),
        Route(SealedStep, PASSIVE, ACTIVE),
        Route(MovedShares, PASSIVE, ACTIVE),
        Route(OwnerShares, PASSIVE, ACTIVE),
        Route(WonCandidates, ACTIVE, PASSIVE),
        when=SEALED,
        reference="docs/sealed.md, Who learns what",
    )
