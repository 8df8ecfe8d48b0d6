"""What messages tell of rows on shares: the way through a hidden model, and predictions by it."""

from __future__ import annotations

from treaty.systems.fedxgb.pieces import RowShares
from treaty.systems.fedxgb.secpred.dealer import DealingEnd, DealtCorrections, WantedLeaves, WantedLevel, WantedRows
from treaty.systems.fedxgb.secpred.roles import (
    DealerTerms,
    ModelSize,
    PredictionTerms,
    QueriesLeft,
    RowsTaken,
    TreesRequest,
)
from treaty.systems.fedxgb.secpred.routing import (
    HeldRows,
    LeafShares,
    RowCounts,
    RowOwners,
    SideShares,
    SplitShares,
    Turn,
    ValueShares,
)
from treaty.systems.fedxgb.secpred.shares import SharedNumbers
from treaty.systems.told import Lines, Told, When, lines

SERVER, EDGE, USER = ("server",), ("edge",), ("user",)
_ADDITIVE = When('comparison="additive"', lambda options, common: options.compares == "additive")
COLLUDE = "docs/fedxgb.md, Who compares: `comparison`"

ROW_SHARES = Told(
    RowShares, USER, EDGE, "how many rows the user has; shares of their bins", "masked", reference=COLLUDE
)
ROW_COUNTS = Told(RowCounts, EDGE, EDGE, "whose rows came, and how many; of predictions, over all runs", "control")
SHARED = Told(SharedNumbers, EDGE, EDGE, "shares of numbers that are computed with", "masked", reference=COLLUDE)
MODEL_SHARES: Lines = lines(
    Told(SplitShares, SERVER, EDGE, "shares of the splits of a level in all slots", "masked"),
    Told(LeafShares, SERVER, EDGE, "shares of leaf values in all slots", "masked"),
    reference=COLLUDE,
)
DEALT: Lines = lines(
    Told(WantedRows, EDGE, EDGE, "how many rows there are", "control"),
    Told(WantedLevel, EDGE, EDGE, "how many rows go down how many slots of how many trees", "control"),
    Told(WantedLeaves, EDGE, EDGE, "how many rows and leaves there are", "control"),
    Told(DealtCorrections, EDGE, EDGE, "random numbers", "nothing"),
    Told(DealingEnd, EDGE, EDGE, "that nothing more is wanted", "control"),
    when=_ADDITIVE,
    reference=COLLUDE,
)

HIDDEN_MODEL: Lines = lines(
    ROW_SHARES,
    Told(HeldRows, EDGE, SERVER, "whose rows edge servers have, and how many", "control"),
    Told(RowOwners, SERVER, EDGE, "whose rows all of them have", "control"),
    Told(RowOwners, EDGE, USER, "whose rows all edge servers have", "control"),
    MODEL_SHARES,
    SHARED,
    Told(SideShares, EDGE, USER, "to which side its own rows go at a level", "exact", guard="max_depth"),
    Told(ValueShares, EDGE, USER, "the leaf values of its own rows", "exact", guard="max_depth"),
    Told(Turn, SERVER, EDGE, "that rows go down a level", "control"),
    Told(Turn, EDGE, USER, "that its rows go down a level", "control"),
    DEALT,
    reference="Liu et al., ICDCS 2020, SecPred; docs/fedxgb.md, SecPred",
)
"""Rows of a training on their way through trees that the server alone knows."""

PREDICTION: Lines = lines(
    Told(
        PredictionTerms,
        SERVER,
        EDGE,
        "names, categories and bins of all columns, loss and classes, as in training; which model",
        "aggregated",
    ),
    Told(
        PredictionTerms,
        EDGE,
        USER,
        "names, categories and bins of all columns, loss and classes, as users of the training were told; which model",
        "aggregated",
    ),
    Told(
        DealerTerms,
        SERVER,
        EDGE,
        "how many bins columns have, and which have categories; which model",
        "control",
        when=_ADDITIVE,
    ),
    Told(ModelSize, SERVER, EDGE, "how many trees there are, and how deep the deepest is", "control"),
    Told(QueriesLeft, EDGE, USER, "how many rows it may still ask for", "control"),
    ROW_SHARES,
    ROW_COUNTS,
    Told(RowsTaken, EDGE, USER, "whether its rows are predicted", "control"),
    Told(TreesRequest, EDGE, SERVER, "that it is ready for more trees", "control"),
    MODEL_SHARES,
    SHARED,
    Told(
        ValueShares,
        EDGE,
        USER,
        "the predictions of its own rows; with many, an imitation of the model",
        "exact",
        guard="max_queries",
    ),
    DEALT,
    reference="Liu et al., ICDCS 2020, SecPred; docs/fedxgb.md, New rows",
)
"""Rows of users, predicted by a hidden model."""
