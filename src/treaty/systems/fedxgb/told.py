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
from treaty.systems.fedxgb.paper.routing import HiddenThresholds, ShownSplits, Sides
from treaty.systems.fedxgb.paper.sums import InputAndShares, KeyShares, LostUsers
from treaty.systems.fedxgb.pieces import ComparedShares
from treaty.systems.fedxgb.secpred.told import COLLUDE, EDGE, HIDDEN_MODEL, ROW_COUNTS, SERVER, SHARED, USER
from treaty.systems.fedxgb.sums.server import Sum, SurvivorReport, Users
from treaty.systems.fedxgb.sums.user import (
    AbsenceNotice,
    Agreement,
    Agreements,
    Call,
    Cohort,
    Domain,
    MaskKey,
    MaskKeys,
)
from treaty.systems.horizontal.masked_sums import MaskedInput, PassedShares, SealedShares
from treaty.systems.horizontal.told import SUMS, input_told, keys_told, search_told, survivors_told
from treaty.systems.told import Lines, Played, Told, When, lines

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
