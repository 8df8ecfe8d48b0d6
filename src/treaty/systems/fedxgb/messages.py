"""Messages of FedXGB besides those of sums, and which message a user or edge server may receive when."""

from __future__ import annotations

from typing import Annotated

import msgspec

from treaty.data.columns import Category
from treaty.errors import ConfigError
from treaty.messaging.conversation import Table
from treaty.messaging.messages import Array, Message, ModelId
from treaty.systems.fedxgb.authority import CertifiedKeys, Credentials
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.paper.routing import HiddenThresholds, ShownSplits, Sides
from treaty.systems.fedxgb.secpred.routing import LeafShares, RowOwners, SideShares, SplitShares, Turn, ValueShares
from treaty.systems.fedxgb.sums.server import Sum
from treaty.systems.fedxgb.sums.user import Call, Cohort, Domain
from treaty.systems.horizontal.quantiles import CommonBins, Count, ProbeRequest
from treaty.systems.horizontal.rows import Categories, Origins
from treaty.systems.horizontal.start import LabelUnits, TrainingStart
from treaty.systems.system import Seat


class UserOffer(Message):
    """A user's certified keys, and how active and how steadily connected it is, from 0 to 1."""

    keys: CertifiedKeys
    activity: Annotated[float, msgspec.Meta(ge=0, le=1)]
    stability: Annotated[float, msgspec.Meta(ge=0, le=1)]


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


class RowSummary(Message):
    """How many rows all users have, and bool (features,) which columns have missing values anywhere."""

    n_rows: int
    may_miss: Array


class RoundStart(Message):
    """A round begins: int32 columns of its trees, tree after tree, and int32 (n_outputs,) where each tree's end."""

    columns: Array
    last_columns: Array


class Attendance(Message):
    """The user is there for the round, and takes part if the edge server chooses it."""


class Splits(Message):
    """Splits of a level: int32 features (n_outputs, n_slots), uint8 packed bits (n_outputs, n_slots, 32): bins left."""

    features: Array
    left_bins: Array


class Values(Message):
    """Leaf values: float64 (n_outputs, n_slots) of the slots below the last level."""

    values: Array


class TrainingEnd(Message):
    """Training is over."""


_SEARCH: Table = {
    "counted": {LabelUnits: "labels", ProbeRequest: "search", CommonBins: "bins"},
    "labels": {TrainingStart: "search"},
    "search": {ProbeRequest: "search", CommonBins: "bins"},
}
"""What the server tells everybody before trees grow, when; sums come in between."""
_IN_VAIN: dict[type[Message], str] = {RoundStart: "tree", TrainingEnd: "over"}  # where no sum of the round was opened


def user_order(options: FedXGB) -> Table:
    """Return which messages a user may receive from its edge server, from state "begun" to "over"."""
    sums: dict[type[Message], str | tuple[str, str]] = {**_IN_VAIN, Cohort: "tree", Call: "tree"}
    trees: dict[str, Table] = {
        "model": {"tree": {**sums, Splits: "tree", Values: "between trees"}},
        "paper": {"tree": {**sums, ShownSplits: "compared", Values: "between trees"}, "compared": {Sides: "tree"}},
        "nothing": {
            "tree": {**sums, SideShares: "tree", ValueShares: "between trees", Turn: ("tree", "between trees")}
        },
    }
    return {
        "begun": {Domain: "domain"},
        "domain": {Cohort: "domain", Count: "counted"},
        **{state: {Cohort: state, Call: state, **told} for state, told in _SEARCH.items()},
        **_between(options),
        **trees[options.exposes],
    }


def edge_order(options: FedXGB, *, holds_shares: bool) -> Table:
    """Return which messages an edge server may receive from the server, from state "domain" to "over"."""
    sums: dict[type[Message], str | tuple[str, str]] = {**_IN_VAIN, Sum: "tree"}
    trees: dict[str, Table] = {
        "model": {"tree": {**sums, Splits: "tree", Values: "between trees"}},
        "paper": {
            "tree": {**sums, ShownSplits: "shown", Values: "between trees"},
            "shown": {HiddenThresholds: "tree"},
        },
        "nothing": {
            "tree": {**sums, SplitShares: "below"},
            "below": {Sum: "below", SplitShares: "below", LeafShares: "between trees"},
        }
        if holds_shares
        else {"tree": {**sums, Turn: ("tree", "between trees")}},
    }
    return {
        "domain": {Count: "counted"},
        **{state: {Sum: state, **told} for state, told in _SEARCH.items()},
        **_between(options),
        **trees[options.exposes],
    }


def _between(options: FedXGB) -> Table:
    shares_rows = options.exposes == "nothing"
    return {
        "bins": {RowSummary: "rows" if shares_rows else "between trees"},
        "rows": {RowOwners: "between trees"},
        "between trees": {RoundStart: "tree", TrainingEnd: "over"},
    }


def receive_task(seat: Seat, sender: str, credentials: Credentials) -> Task:
    """Receive the task from the server, or from the edge server that passes it on.

    Raises ConfigError when it has other options, PeerProtocolError when the server's keys are not certified.
    """
    party, server = seat.party, seat.cast.active
    task = party.receive(sender, Task)
    credentials.check(server, "server", task.server, sender)
    if task.options != terms_of(seat):
        raise ConfigError(f"expected the options of {server}, got others at {party.name}; compare the job files")
    return task


def terms_of(seat: Seat) -> bytes:
    """Return the options on which everybody must agree, encoded."""
    return msgspec.json.encode(seat.public_terms, order="sorted")
