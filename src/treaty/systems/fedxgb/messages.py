"""Messages of FedXGB, besides those of masked vectors, row pieces (`pieces`), the dealer (`shares`) and paper mode."""

from __future__ import annotations

from typing import Annotated

import msgspec

from treaty.data.binning import MOST_BINS
from treaty.data.columns import Category
from treaty.messaging.messages import MOST_COLUMNS, Array, Message, ModelId, leaks, leaks_by
from treaty.systems.fedxgb.options import Comparison
from treaty.systems.horizontal.quantiles import CommonBins
from treaty.systems.horizontal.rows import Categories, Origins
from treaty.trees.objectives import Objective

MOST_VOID = 10  # times that rounds without a level begin again in a job: no domain had enough users


# ---------------------------------------------------------------- keys, tasks and sums


@leaks("its role, and a signing key of this run", "control")
class KeyRequest(Message):
    """The sender's role and its signing key for this run."""

    role: str
    key: bytes


@leaks("a signature on its own key, name and role", "control")
class KeyCertificate(Message):
    """The authority's key and its signature on the receiver's."""

    authority: bytes
    signature: bytes


class CertifiedKeys(Message):
    """A certified signing key, and an X25519 key of this run, signed with it."""

    key: bytes
    certificate: bytes
    channel: bytes
    signature: bytes


@leaks("its keys", "control")
class UserOffer(Message):
    """A user's certified keys."""

    keys: CertifiedKeys


@leaks("who the users of a domain are, and their keys", "control")
class Users(Message):
    """An edge server's users and their certified keys."""

    of: dict[str, CertifiedKeys]


@leaks("who the users of its domain are, and their keys", "control")
class Domain(Message):
    """Certified keys of all users of a domain."""

    users: dict[str, CertifiedKeys]
    least_change: Annotated[int, msgspec.Meta(ge=3)]


@leaks("names of columns, categories, classes, options; the server's keys", "control")
class Task(Message):
    """What is trained: columns, classes, options; the server's keys; how many `rounds` an interrupted training has."""

    model_id: ModelId
    names: list[str]
    categories: Categories
    classes: list[Category] | None
    options: bytes
    server: CertifiedKeys
    rounds: int = 0
    origins: Origins = msgspec.field(default_factory=dict)


@leaks("how many rows all users have, and which columns have missing values anywhere", "aggregated")
class RowSummary(Message):
    """How many rows all users have, and bool (features,) which columns have missing values anywhere."""

    n_rows: int
    may_miss: Array


@leaks("that a round begins, with which columns", "control")
class RoundStart(Message):
    """A round begins: int32 columns of its trees, tree after tree, and int32 (n_outputs,) where each tree's end."""

    columns: Array
    last_columns: Array


@leaks("that the user takes part in the round", "control")
class Attendance(Message):
    """The user is there for the round, and takes part if the edge server chooses it."""


@leaks("which users of its domain take part", "control")
class Cohort(Message):
    """Who takes part in a tree, or in the rest of it if too few of the earlier cohort are left."""

    users: list[str]


@leaks("that a sum of so many numbers is opened next", "control")
class Sum(Message):
    """Open the next sum of the domain's vectors, of `length` numbers, and add it to the other domains'."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 27)]


@leaks("a request for its next vector", "control")
class Call(Message):
    """Contribute the vector that comes next; `number` is the sum's, higher than any before."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    attempt: Annotated[int, msgspec.Meta(ge=0)]


@leaks("a public key of this sum", "control")
class MaskKey(Message):
    """A user's mask key of one sum, and its tags by peer."""

    public: bytes
    tags: dict[str, bytes]


@leaks("all members' public keys of this sum", "control")
class MaskKeys(Message):
    """All mask keys of one sum, and the tags made for the receiver."""

    public: dict[str, bytes]
    tags: dict[str, bytes]


@leaks("tags on the list of those in the sum", "control")
class Agreement(Message):
    """A user's tags on the list of survivors, by peer."""

    tags: dict[str, bytes]


@leaks("others' tags on that list", "control")
class Agreements(Message):
    """Tags on the list of survivors made for the receiver, by those on it."""

    tags: dict[str, bytes]


@leaks("that the user takes no further part in this tree", "control")
class AbsenceNotice(Message):
    """The sender takes no further part in this tree."""


@leaks("whose vectors are in the domain's sum", "control", guard="group_size")
class SurvivorReport(Message):
    """Whose vectors are in the domain's sum, none where it could not be opened, and the attempt that opened it.

    `joined` has the keys of users who came late, once.
    """

    users: list[str]
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    joined: dict[str, CertifiedKeys] = msgspec.field(default_factory=dict)


@leaks("a level's splits", "aggregated", guard='expose="nothing"')
class KnownSplits(Message):
    """Splits of a level: int32 features (n_outputs, n_slots), uint8 packed bits (n_outputs, n_slots, 32): bins left."""

    features: Array
    left_bins: Array


@leaks("leaf values", "aggregated", guard='expose="nothing"')
class Values(Message):
    """Leaf values: float64 (n_outputs, n_slots) of the slots below the last level."""

    values: Array


@leaks("that training is over", "control")
class TrainingEnd(Message):
    """Training is over."""


# ---------------------------------------------------------------- rows on shares (`secpred`)

# Axes `*` are those of a share of a number (`Shares.number`): 2, or none
RowCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


@leaks("whose rows edge servers have, and how many", "control")
class HeldRows(Message):
    """Users whose rows a holder has, and how many."""

    users: dict[str, int]


@leaks("whose rows all edge servers have that need them", "control")
class RowOwners(Message):
    """Users whose rows all holders of their shares have, in the order in which the holders keep them."""

    users: list[str]


@leaks("shares of the splits of a level in all slots", "masked")
class SplitShares(Message):
    """Shares of a level's splits, uint64: weights (trees, slots, columns, *), thresholds (trees, slots, *)."""

    weights: Array
    thresholds: Array


@leaks("shares of leaf values in all slots", "masked")
class LeafShares(Message):
    """Shares of leaf values, uint64 (trees, slots, *)."""

    values: Array


@leaks("whose rows came, and how many; of predictions, over all runs", "control")
class RowCounts(Message):
    """Whose rows reached the sender, and how many; of a prediction, how many it has `asked` for over all runs."""

    users: dict[str, int]
    asked: dict[str, RowCount] = msgspec.field(default_factory=dict)


@leaks("to which side its own rows go at a level", "exact", guard="max_depth")
class SideShares(Message):
    """The sender's shares of whether rows of the receiver go left, uint64 (trees, rows, 2) or uint8 (trees, rows)."""

    shares: Array


@leaks_by(
    training=("the leaf values of its own rows", "exact", "max_depth"),
    prediction=("the predictions of its own rows; with many, an imitation of the model", "exact", "max_queries"),
)
class ValueShares(Message):
    """The sender's shares of the leaf values of some of the receiver's rows, uint64 (trees, rows, *)."""

    shares: Array


# ---------------------------------------------------------------- prediction of new rows (`prediction`)

_MOST_OUTPUTS = 1 << 10
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_ModelId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


@leaks_by(
    edge=("names, categories and bins of all columns, loss and classes, as in training; which model", "aggregated"),
    user=(
        "names, categories and bins of all columns, loss and classes, as users of the training have them; which model",
        "aggregated",
    ),
)
class PredictionTerms(Message):
    """What users and edge servers know; bins as users of the training have them."""

    model_id: _ModelId
    names: list[str]
    categories: Categories
    bins: CommonBins
    objective: Objective
    classes: list[Category] | None
    max_queries: _AtLeastOne
    comparison: Comparison
    origins: Origins = msgspec.field(default_factory=dict)


@leaks("how many bins each column has, and which have categories; which model", "control")
class DealerTerms(Message):
    """What the dealer of random numbers knows of the columns: numbers of bins, and which have categories."""

    model_id: _ModelId
    n_bins: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MOST_BINS)]], msgspec.Meta(max_length=MOST_COLUMNS)]
    categorical: Annotated[list[bool], msgspec.Meta(max_length=MOST_COLUMNS)]
    outputs: Annotated[int, msgspec.Meta(ge=1, le=_MOST_OUTPUTS)]
    max_queries: _AtLeastOne
    comparison: Comparison


@leaks("how many trees there are, and how deep the deepest is", "control")
class ModelSize(Message):
    """How many trees there are, and how many levels of splits each has, dummies included."""

    trees: _AtLeastOne
    depth: Annotated[int, msgspec.Meta(ge=0, le=24)]


@leaks("how many rows it may still ask for", "control")
class QueriesLeft(Message):
    """How many rows the receiver may still have predicted by this model, by the sender's count."""

    rows: Annotated[int, msgspec.Meta(ge=0)]


@leaks("whether its rows are predicted", "control")
class RowsTaken(Message):
    """Whether the receiver's rows are predicted: they came to all holders of shares, and it has that many left."""

    taken: bool


@leaks("that it is ready for more trees", "control")
class TreesRequest(Message):
    """The sender is ready for more trees."""
