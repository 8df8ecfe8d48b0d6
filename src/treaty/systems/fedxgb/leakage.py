"""What the messages of FedXGB tell in a training; those of predictions on shares are in `secpred.told`."""

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
from treaty.systems.horizontal.leakage import SUMS, input_told, keys_told, search_told, survivors_told
from treaty.systems.horizontal.masked_sums import MaskedInput, PassedShares, SealedShares
from treaty.systems.told import Lines, Played, Told, When, lines

# ------------------------- what messages tell of rows on shares: the way through a hidden model, and predictions by it

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


# ---------------------------------------------------------------- leakage


_ALL, _AUTHORITY = ("server", "edge", "user"), ("authority",)
_SAFE = When('mode="safe"', lambda options, common: options.mode != "paper")
_PAPER = When('mode="paper"', lambda options, common: options.mode == "paper")
_NOTHING = When('expose="nothing"', lambda options, common: options.exposes == "nothing")
_SHOWN = When('expose="paper"', lambda options, common: options.exposes == "paper")
_MODEL = When('expose="model"', lambda options, common: options.exposes == "model")
_TOLD_ALL = When('expose="model" or "paper"', lambda options, common: options.exposes != "nothing")


_KEYS = lines(
    Told(KeyRequest, _ALL, _AUTHORITY, "its role, and a signing key of this run", "control"),
    Told(KeyCertificate, _AUTHORITY, _ALL, "a signature on its own key, name and role", "control"),
    Told(UserOffer, USER, EDGE, "its keys; how active and steady it says it is", "control"),
    Told(Users, EDGE, SERVER, "who the users of a domain are, and their keys", "control"),
    Told(Domain, EDGE, USER, "who the users of its domain are, and their keys", "control"),
    keys_told(SERVER, EDGE),
    reference="docs/fedxgb.md, How a sum is opened",
)

_SUMS = lines(
    Told(Attendance, USER, EDGE, "that the user is there for the round", "control"),
    Told(Cohort, EDGE, USER, "who of its domain takes part", "control"),
    Told(Sum, SERVER, EDGE, "that a sum of so many numbers is opened next", "control"),
    Told(Call, EDGE, USER, "that its next vector is wanted", "control"),
    Told(MaskKey, USER, EDGE, "a public key of this sum", "control"),
    Told(MaskKeys, EDGE, USER, "everybody's public keys of this sum", "control"),
    lines(
        survivors_told(EDGE, USER),
        Told(
            MaskedInput,
            USER,
            EDGE,
            "nothing alone; together with all others of the domain a sum under masks that the server alone can remove",
            "masked",
        ),
        Told(Agreement, USER, EDGE, "tags on the list of those in the sum", "control"),
        Told(Agreements, EDGE, USER, "others' tags on that list", "control"),
        when=_SAFE,
    ),
    Told(AbsenceNotice, USER, EDGE, "that the user takes no further part in this tree", "control"),
    input_told(EDGE, SERVER, "group_size, min_child_samples", _SAFE),
    Told(
        MaskedInput,
        EDGE,
        SERVER,
        "in every bin at every node the sums over the users of one domain, who may be a single one",
        "aggregated",
        'mode="safe"',
        when=_PAPER,
    ),
    Told(SurvivorReport, EDGE, SERVER, "whose vectors are in the domain's sum", "control", guard="group_size"),
    reference="Liu et al., ICDCS 2020, SecBoost; docs/fedxgb.md, How a sum is opened",
)

_PAPERS_SUMS = lines(
    Told(SealedShares, USER, EDGE, "shares of masks and keys, sealed for others", "encrypted"),
    Told(PassedShares, EDGE, USER, "its shares of others' masks and keys", "masked"),
    Told(
        InputAndShares,
        USER,
        EDGE,
        f"the user's own vector, as its mask is the same in all numbers and shares of it come along: {SUMS}, of this "
        "user alone",
        "exact",
    ),
    Told(LostUsers, EDGE, USER, "whose vectors have not come", "control"),
    Told(KeyShares, USER, EDGE, "private keys of lost users, and so their vectors", "exact"),
    when=_PAPER,
    guard='mode="safe"',
    reference="Liu et al., ICDCS 2020; docs/fedxgb.md, Paper mode",
)


def _to_all(sender: tuple[str, ...], receiver: tuple[str, ...]) -> Lines:
    """Return the lines of what the server tells all users, by way of their edge servers, who see it, too."""
    return lines(
        Told(Task, sender, receiver, "names of columns, categories, classes, options; the server's keys", "control"),
        search_told(sender, receiver),
        Told(
            RowSummary,
            sender,
            receiver,
            "how many rows all users have, and which columns have missing values anywhere",
            "aggregated",
        ),
        Told(RoundStart, sender, receiver, "that a round begins, with which columns", "control"),
        Told(
            ShownSplits, sender, receiver, "columns of a level's splits", "aggregated", 'expose="nothing"', when=_SHOWN
        ),
        Told(Splits, sender, receiver, "a level's splits", "aggregated", 'expose="nothing"', when=_MODEL),
        Told(Values, sender, receiver, "leaf values", "aggregated", 'expose="nothing"', when=_TOLD_ALL),
        Told(TrainingEnd, sender, receiver, "that training is over", "control"),
        reference="docs/fedxgb.md, What users learn of the model",
    )


_SHOWN_MODEL = lines(
    Told(HiddenThresholds, SERVER, EDGE, "shares of thresholds", "masked"),
    Told(ComparedShares, USER, EDGE, "shares of the values that a user's rows compare", "masked"),
    ROW_COUNTS,
    SHARED,
    Told(
        Sides,
        EDGE,
        USER,
        "which of its own rows go left; with rows made up for that, thresholds",
        "exact",
        guard='expose="nothing"',
    ),
    when=_SHOWN,
    reference=f"Liu et al., ICDCS 2020, SecPred; {COLLUDE}",
)

TOLD: dict[Played, Lines] = {
    "train": lines(
        _KEYS,
        _to_all(SERVER, EDGE),
        _to_all(EDGE, USER),
        _SUMS,
        _PAPERS_SUMS,
        lines(HIDDEN_MODEL, when=_NOTHING),
        _SHOWN_MODEL,
    )
}
