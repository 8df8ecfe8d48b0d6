"""Messages of FedXGB besides those of sums, and which message a user or edge server may receive when."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from treaty.data.columns import Category
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.conversation import Table
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, ModelId
from treaty.systems.fedxgb.authority import CertifiedKeys, Credentials
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.paper import HiddenThresholds, ShownSplits, Sides
from treaty.systems.fedxgb.secfind import ATTEMPTS, Call, Cohort, Domain, Sum
from treaty.systems.fedxgb.secpred import LeafShares, RowOwners, SideShares, SplitShares, Turn, ValueShares
from treaty.systems.horizontal.quantiles import CommonBins, Count, LabelUnits, ProbeRequest, TrainingStart
from treaty.systems.horizontal.rows import Categories, Origins
from treaty.systems.system import RoleInput


class UserOffer(Message):
    """A user's certified keys, and how active and how steadily connected it is, from 0 to 1."""

    leakage: ClassVar = MessageLeakage("its keys; how active and steady it says it is", "control")

    keys: CertifiedKeys
    activity: Annotated[float, msgspec.Meta(ge=0, le=1)]
    stability: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Task(Message):
    """What is trained: columns, classes, options; the server's keys; how many `rounds` an interrupted training has."""

    leakage: ClassVar = MessageLeakage("names of columns, categories, classes, options; the server's keys", "control")

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

    leakage: ClassVar = MessageLeakage(
        "how many rows all users have, and which columns have missing values anywhere", "aggregated"
    )

    n_rows: int
    may_miss: Array


class RoundStart(Message):
    """A round begins: int32 columns of its trees, tree after tree, and int32 (n_outputs,) where each tree's end."""

    leakage: ClassVar = MessageLeakage("that a round begins, with which columns", "control")

    columns: Array
    last_columns: Array


class Attendance(Message):
    """The user is there for the round, and takes part if the edge server chooses it."""

    leakage: ClassVar = MessageLeakage("that the user is there for the round", "control")


class Splits(Message):
    """Splits of a level: int32 features (n_outputs, n_slots), uint8 packed bits (n_outputs, n_slots, 32): bins left."""

    leakage: ClassVar = MessageLeakage("a level's splits", "aggregated", guard='expose="nothing"')

    features: Array
    left_bins: Array


class Values(Message):
    """Leaf values: float64 (n_outputs, n_slots) of the slots below the last level."""

    leakage: ClassVar = MessageLeakage("leaf values", "aggregated", guard='expose="nothing"')

    values: Array


class TrainingEnd(Message):
    """Training is over."""

    leakage: ClassVar = MessageLeakage("that training is over", "control")


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
        "paper": {"tree": {**sums, ShownSplits: "shown", Values: "between trees"}, "shown": {HiddenThresholds: "tree"}},
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


def receive_task(inputs: RoleInput, sender: str, credentials: Credentials) -> Task:
    """Receive the task from the server, or from the edge server that passes it on.

    Raises ConfigError when it has other options, PeerProtocolError when the server's keys are not certified.
    """
    party, server = inputs.party, inputs.roles.active
    task = party.receive(sender, Task)
    credentials.check(server, "server", task.server, sender)
    if task.options != terms_of(inputs):
        raise ConfigError(f"expected the options of {server}, got others at {party.name}; compare the job files")
    return task


def terms_of(inputs: RoleInput) -> bytes:
    """Return the options on which everybody must agree, encoded."""
    return msgspec.json.encode(inputs.public_terms, order="sorted")


# ----------------------------------------------------------------
# How much the server may ask of edge servers, and these of users: rounds, levels and sums of the job, each once.
#
# What may come when is in the tables of `messages`; here is how often.

MOST_VOID = 10  # times that rounds without a level are begun again in a job: no domain had enough users


class SumLimit:
    """One sum after each message that is followed by one, in a few attempts; numbers of sums only rise.

    Of two sums over one level by different users, the difference would be the sum of those who are in one of them only.
    """

    def __init__(self, asker: str) -> None:
        self._asker, self._number, self._attempt, self._due = asker, -1, ATTEMPTS, False

    def due(self, *, one: bool = True) -> None:
        """Let one more sum be asked for, or none; no attempt at the last one."""
        self._due, self._attempt = one, ATTEMPTS

    def take(self, number: int, attempt: int = 0) -> None:
        """Note a request; PeerProtocolError where none is due."""
        again = number == self._number and self._attempt < attempt < ATTEMPTS
        if not again and not (self._due and number > self._number and attempt < ATTEMPTS):
            raise PeerProtocolError(
                self._asker, f"expected one sum for each level, in {ATTEMPTS} attempts, got more - from {self._asker}"
            )
        self._number, self._attempt, self._due = number, attempt, False


class ServerLimits:
    """What an edge server counts of what the server tells all edge servers."""

    def __init__(self, server: str, n_estimators: int, max_depth: int, most_probes: int) -> None:
        self._server, self._n_estimators, self._max_depth = server, n_estimators, max_depth
        self._most_probes = most_probes
        self.rounds = self.finished = self._void = self.probes = 0
        self._levels = -1  # of the round; -1 before the first
        self.sums = SumLimit(server)

    def take(self, told: Message) -> None:
        """Count a message other than one about sums; PeerProtocolError for more than the job's options say."""
        match told:
            case Count() | LabelUnits() | TrainingStart():
                self.sums.due()
            case ProbeRequest():
                self.probes += 1
                self._check(self.probes <= self._most_probes, f"{self._most_probes} requests for probes at most")
                self.sums.due()
            case RoundStart():
                again, self._levels = self._levels == 0, 0
                self.rounds, self._void = self.rounds + (not again), self._void + again
                self._check(self.rounds <= self._n_estimators, f"{self._n_estimators} rounds at most")
                self._check(self._void <= MOST_VOID, f"{MOST_VOID} rounds at most that begin again")
                self.sums.due()
            case Splits() | ShownSplits() | SplitShares() | Turn(leaves=False):
                self._levels += 1
                self._check(self._levels <= self._max_depth, f"{self._max_depth} levels in a tree at most")
                self.sums.due(one=self._levels < self._max_depth)
            case Values() | LeafShares() | Turn(leaves=True):
                self.finished = self.rounds

    def _check(self, fine: bool, expected: str) -> None:
        if not fine:
            raise PeerProtocolError(self._server, f"expected {expected}, got more - from {self._server}")
