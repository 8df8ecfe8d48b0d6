"""What the messages of FedXGB tell in a training; those of predictions on shares are in `secpred.leakage`."""

from __future__ import annotations

from treaty.systems.fedxgb.authority import KeyCertificate, KeyRequest
from treaty.systems.fedxgb.messages import (
    Attendance,
    RoundStart,
    RowSummary,
    Splits,
    Task,
    TrainingEnd,
    UserOffer,
    Values,
)
from treaty.systems.fedxgb.paper import HiddenThresholds, InputAndShares, KeyShares, LostUsers, ShownSplits, Sides
from treaty.systems.fedxgb.pieces import ComparedShares, RowShares
from treaty.systems.fedxgb.prediction import (
    DealerTerms,
    ModelSize,
    PredictionTerms,
    QueriesLeft,
    RowsTaken,
    TreesRequest,
)
from treaty.systems.fedxgb.secfind import (
    AbsenceNotice,
    Agreement,
    Agreements,
    Call,
    Cohort,
    Domain,
    MaskKey,
    MaskKeys,
    Sum,
    SurvivorReport,
    Users,
)
from treaty.systems.fedxgb.secpred import (
    HeldRows,
    LeafShares,
    RowCounts,
    RowOwners,
    SideShares,
    SplitShares,
    Turn,
    ValueShares,
)
from treaty.systems.fedxgb.shares import (
    DealingEnd,
    DealtCorrections,
    SharedNumbers,
    WantedLeaves,
    WantedLevel,
    WantedRows,
)
from treaty.systems.horizontal.leakage import input_routes, keys_routes, search_routes, survivors_routes
from treaty.systems.horizontal.masked_sums import MaskedInput, PassedShares, SealedShares
from treaty.systems.leakage import Route, Routes, Stage, When, routes

# ------------------------- what messages tell of rows on shares: the way through a hidden model, and predictions by it

SERVER, EDGE, USER = ("server",), ("edge",), ("user",)
_ADDITIVE = When('comparison="additive"', lambda options, common: options.compares == "additive")
COLLUDE = "docs/fedxgb.md, Who compares: `comparison`"

ROW_SHARES = Route(RowShares, USER, EDGE, reference=COLLUDE)
ROW_COUNTS = Route(RowCounts, EDGE, EDGE)
SHARED = Route(SharedNumbers, EDGE, EDGE, reference=COLLUDE)
MODEL_SHARES: Routes = routes(
    Route(SplitShares, SERVER, EDGE),
    Route(LeafShares, SERVER, EDGE),
    reference=COLLUDE,
)
DEALT: Routes = routes(
    Route(WantedRows, EDGE, EDGE),
    Route(WantedLevel, EDGE, EDGE),
    Route(WantedLeaves, EDGE, EDGE),
    Route(DealtCorrections, EDGE, EDGE),
    Route(DealingEnd, EDGE, EDGE),
    when=_ADDITIVE,
    reference=COLLUDE,
)

HIDDEN_MODEL: Routes = routes(
    ROW_SHARES,
    Route(HeldRows, EDGE, SERVER),
    Route(RowOwners, SERVER, EDGE, "edge"),
    Route(RowOwners, EDGE, USER, "user"),
    MODEL_SHARES,
    SHARED,
    Route(SideShares, EDGE, USER),
    Route(ValueShares, EDGE, USER, "training"),
    Route(Turn, SERVER, EDGE, "edge"),
    Route(Turn, EDGE, USER, "user"),
    DEALT,
    reference="Liu et al., ICDCS 2020, SecPred; docs/fedxgb.md, SecPred",
)
"""Rows of a training on their way through trees that the server alone knows."""

PREDICTION: Routes = routes(
    Route(PredictionTerms, SERVER, EDGE, "edge"),
    Route(PredictionTerms, EDGE, USER, "user"),
    Route(DealerTerms, SERVER, EDGE, when=_ADDITIVE),
    Route(ModelSize, SERVER, EDGE),
    Route(QueriesLeft, EDGE, USER),
    ROW_SHARES,
    ROW_COUNTS,
    Route(RowsTaken, EDGE, USER),
    Route(TreesRequest, EDGE, SERVER),
    MODEL_SHARES,
    SHARED,
    Route(ValueShares, EDGE, USER, "prediction"),
    DEALT,
    reference="Liu et al., ICDCS 2020, SecPred; docs/fedxgb.md, New rows",
)
"""Rows of users, predicted by a hidden model."""


# ---------------------------------------------------------------- leakage


_ALL, _AUTHORITY = ("server", "edge", "user"), ("authority",)
_SAFE = When('mode="safe"', lambda options, common: options.mode != "paper")
_PAPER = When('mode="paper"', lambda options, common: options.mode == "paper")
_NOTHING = When('expose="nothing"', lambda options, common: options.exposes == "nothing")
_SHOWN = When('expose="paper"', lambda options, common: options.exposes == "paper")
_MODEL = When('expose="model"', lambda options, common: options.exposes == "model")
_TOLD_ALL = When('expose="model" or "paper"', lambda options, common: options.exposes != "nothing")


_KEYS = routes(
    Route(KeyRequest, _ALL, _AUTHORITY),
    Route(KeyCertificate, _AUTHORITY, _ALL),
    Route(UserOffer, USER, EDGE),
    Route(Users, EDGE, SERVER),
    Route(Domain, EDGE, USER),
    keys_routes(SERVER, EDGE),
    reference="docs/fedxgb.md, How a sum is opened",
)

_SUMS = routes(
    Route(Attendance, USER, EDGE),
    Route(Cohort, EDGE, USER),
    Route(Sum, SERVER, EDGE),
    Route(Call, EDGE, USER),
    Route(MaskKey, USER, EDGE),
    Route(MaskKeys, EDGE, USER),
    routes(
        survivors_routes(EDGE, USER),
        Route(MaskedInput, USER, EDGE, "domain"),
        Route(Agreement, USER, EDGE),
        Route(Agreements, EDGE, USER),
        when=_SAFE,
    ),
    Route(AbsenceNotice, USER, EDGE),
    input_routes(EDGE, SERVER, "group_size, min_child_samples", _SAFE),
    Route(MaskedInput, EDGE, SERVER, "paper", when=_PAPER),
    Route(SurvivorReport, EDGE, SERVER),
    reference="Liu et al., ICDCS 2020, SecBoost; docs/fedxgb.md, How a sum is opened",
)

_PAPERS_SUMS = routes(
    Route(SealedShares, USER, EDGE, "keys"),
    Route(PassedShares, EDGE, USER, "keys"),
    Route(InputAndShares, USER, EDGE),
    Route(LostUsers, EDGE, USER),
    Route(KeyShares, USER, EDGE),
    when=_PAPER,
    guard='mode="safe"',
    reference="Liu et al., ICDCS 2020; docs/fedxgb.md, Paper mode",
)


def _to_all(sender: tuple[str, ...], receiver: tuple[str, ...]) -> Routes:
    """Return the lines of what the server tells all users, by way of their edge servers, who see it, too."""
    return routes(
        Route(Task, sender, receiver),
        search_routes(sender, receiver),
        Route(RowSummary, sender, receiver),
        Route(RoundStart, sender, receiver),
        Route(ShownSplits, sender, receiver, when=_SHOWN),
        Route(Splits, sender, receiver, when=_MODEL),
        Route(Values, sender, receiver, when=_TOLD_ALL),
        Route(TrainingEnd, sender, receiver),
        reference="docs/fedxgb.md, What users learn of the model",
    )


_SHOWN_MODEL = routes(
    Route(HiddenThresholds, SERVER, EDGE),
    Route(ComparedShares, USER, EDGE),
    ROW_COUNTS,
    SHARED,
    Route(Sides, EDGE, USER),
    when=_SHOWN,
    reference=f"Liu et al., ICDCS 2020, SecPred; {COLLUDE}",
)

ROUTES: dict[Stage, Routes] = {
    "train": routes(
        _KEYS,
        _to_all(SERVER, EDGE),
        _to_all(EDGE, USER),
        _SUMS,
        _PAPERS_SUMS,
        routes(HIDDEN_MODEL, when=_NOTHING),
        _SHOWN_MODEL,
    )
}
