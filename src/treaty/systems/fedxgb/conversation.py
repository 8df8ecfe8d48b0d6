"""Which messages of FedXGB go from whom to whom, which may come when, and how often.

`ROUTES` and `PREDICTION` say who sends what; `user_order` and `edge_order` which message a user or edge server may
receive when. `SumLimit` and `ServerLimits` count what the server asks of edge servers, and these of users: rounds,
levels and sums of the job, each once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.conversation import MessageOrder, Table
from treaty.messaging.messages import Message
from treaty.systems.fedxgb.authority import KeyCertificate, KeyRequest
from treaty.systems.fedxgb.messages import (
    MOST_VOID,
    AbsenceNotice,
    Agreement,
    Agreements,
    Attendance,
    Call,
    Cohort,
    Domain,
    HeldRows,
    KnownSplits,
    LeafShares,
    MaskKey,
    MaskKeys,
    RoundStart,
    RowCounts,
    RowOwners,
    RowSummary,
    SideShares,
    SplitShares,
    Sum,
    SurvivorReport,
    Task,
    TrainingEnd,
    Turn,
    UserOffer,
    Users,
    Values,
    ValueShares,
)
from treaty.systems.fedxgb.options import FedXGB
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
from treaty.systems.fedxgb.secfind import ATTEMPTS, UserSums
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
from treaty.systems.horizontal.members import TranscriptDigest
from treaty.systems.horizontal.quantiles import CommonBins, Count, ProbeRequest
from treaty.systems.horizontal.rows import LabelUnits, TrainingStart
from treaty.systems.leakage import Route, Routes, Stage, When, routes
from treaty.systems.observers import VectorGiven
from treaty.systems.system import RoleInput

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- from whom to whom

_SERVER, _EDGE, _USER = ("server",), ("edge",), ("user",)
_ADDITIVE = When('comparison="additive"', lambda options, common: options.compares == "additive")
_COLLUDE = "docs/fedxgb.md, Who compares: `comparison`"

_ROW_SHARES = Route(RowShares, _USER, _EDGE, reference=_COLLUDE)
_ROW_COUNTS = Route(RowCounts, _EDGE, _EDGE)
_SHARED = Route(SharedNumbers, _EDGE, _EDGE, reference=_COLLUDE)
_MODEL_SHARES = routes(Route(SplitShares, _SERVER, _EDGE), Route(LeafShares, _SERVER, _EDGE), reference=_COLLUDE)
_DEALT = routes(
    Route(WantedRows, _EDGE, _EDGE),
    Route(WantedLevel, _EDGE, _EDGE),
    Route(WantedLeaves, _EDGE, _EDGE),
    Route(DealtCorrections, _EDGE, _EDGE),
    Route(DealingEnd, _EDGE, _EDGE),
    when=_ADDITIVE,
    reference=_COLLUDE,
)

# Rows of a training on their way through trees that the server alone knows
_HIDDEN_MODEL = routes(
    _ROW_SHARES,
    Route(HeldRows, _EDGE, _SERVER),
    Route(RowOwners, _SERVER, _EDGE, "edge"),
    Route(RowOwners, _EDGE, _USER, "user"),
    _MODEL_SHARES,
    _SHARED,
    Route(SideShares, _EDGE, _USER),
    Route(ValueShares, _EDGE, _USER, "training"),
    Route(Turn, _SERVER, _EDGE, "edge"),
    Route(Turn, _EDGE, _USER, "user"),
    _DEALT,
    reference="Liu et al., ICDCS 2020, SecPred; docs/fedxgb.md, SecPred",
)

# Rows of users, predicted by a hidden model
PREDICTION: Routes = routes(
    Route(PredictionTerms, _SERVER, _EDGE, "edge"),
    Route(PredictionTerms, _EDGE, _USER, "user"),
    Route(DealerTerms, _SERVER, _EDGE, when=_ADDITIVE),
    Route(ModelSize, _SERVER, _EDGE),
    Route(QueriesLeft, _EDGE, _USER),
    _ROW_SHARES,
    _ROW_COUNTS,
    Route(RowsTaken, _EDGE, _USER),
    Route(TreesRequest, _EDGE, _SERVER),
    _MODEL_SHARES,
    _SHARED,
    Route(ValueShares, _EDGE, _USER, "prediction"),
    _DEALT,
    reference="Liu et al., ICDCS 2020, SecPred; docs/fedxgb.md, New rows",
)

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
    Route(UserOffer, _USER, _EDGE),
    Route(Users, _EDGE, _SERVER),
    Route(Domain, _EDGE, _USER),
    keys_routes(_SERVER, _EDGE),
    reference="docs/fedxgb.md, How a sum is opened",
)

_SUMS = routes(
    Route(Attendance, _USER, _EDGE),
    Route(Cohort, _EDGE, _USER),
    Route(Sum, _SERVER, _EDGE),
    Route(Call, _EDGE, _USER),
    Route(MaskKey, _USER, _EDGE),
    Route(MaskKeys, _EDGE, _USER),
    routes(
        survivors_routes(_EDGE, _USER),
        Route(MaskedInput, _USER, _EDGE, "domain"),
        Route(Agreement, _USER, _EDGE),
        Route(Agreements, _EDGE, _USER),
        when=_SAFE,
    ),
    Route(AbsenceNotice, _USER, _EDGE),
    input_routes(_EDGE, _SERVER, "group_size, min_child_samples", _SAFE),
    Route(MaskedInput, _EDGE, _SERVER, "paper", when=_PAPER),
    Route(SurvivorReport, _EDGE, _SERVER),
    reference="Liu et al., ICDCS 2020, SecBoost; docs/fedxgb.md, How a sum is opened",
)

_PAPERS_SUMS = routes(
    Route(SealedShares, _USER, _EDGE, "keys"),
    Route(PassedShares, _EDGE, _USER, "keys"),
    Route(InputAndShares, _USER, _EDGE),
    Route(LostUsers, _EDGE, _USER),
    Route(KeyShares, _USER, _EDGE),
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
        Route(KnownSplits, sender, receiver, when=_MODEL),
        Route(Values, sender, receiver, when=_TOLD_ALL),
        Route(TrainingEnd, sender, receiver),
        reference="docs/fedxgb.md, What users learn of the model",
    )


_SHOWN_MODEL = routes(
    Route(HiddenThresholds, _SERVER, _EDGE),
    Route(ComparedShares, _USER, _EDGE),
    _ROW_COUNTS,
    _SHARED,
    Route(Sides, _EDGE, _USER),
    when=_SHOWN,
    reference=f"Liu et al., ICDCS 2020, SecPred; {_COLLUDE}",
)

ROUTES: dict[Stage, Routes] = {
    "train": routes(
        _KEYS,
        _to_all(_SERVER, _EDGE),
        _to_all(_EDGE, _USER),
        _SUMS,
        _PAPERS_SUMS,
        routes(_HIDDEN_MODEL, when=_NOTHING),
        _SHOWN_MODEL,
    )
}


# ---------------------------------------------------------------- what may come when

# What the server sends to everybody before trees grow, when; sums come in between
_SEARCH: Table = {
    "counted": {LabelUnits: "labels", ProbeRequest: "search", CommonBins: "bins"},
    "labels": {TrainingStart: "search"},
    "search": {ProbeRequest: "search", CommonBins: "bins"},
}
_IN_VAIN: dict[type[Message], str] = {RoundStart: "tree", TrainingEnd: "over"}  # no sum of the round was opened


def user_order(options: FedXGB) -> Table:
    """Return which messages a user may receive from its edge server, from state "begun" to "over"."""
    sums: dict[type[Message], str | tuple[str, str]] = {**_IN_VAIN, Cohort: "tree", Call: "tree"}
    trees: dict[str, Table] = {
        "model": {"tree": {**sums, KnownSplits: "tree", Values: "between trees"}},
        "paper": {"tree": {**sums, ShownSplits: "compared", Values: "between trees"}, "compared": {Sides: "tree"}},
        "nothing": {
            "tree": {**sums, SideShares: "tree", ValueShares: "between trees", Turn: ("tree", "between trees")}
        },
    }
    return {
        "begun": {Domain: "domain"},
        "domain": {Cohort: "domain", Count: "counted"},
        **{state: {Cohort: state, Call: state, **after} for state, after in _SEARCH.items()},
        **_between(options),
        **trees[options.exposes],
    }


def edge_order(options: FedXGB, *, holds_shares: bool) -> Table:
    """Return which messages an edge server may receive from the server, from state "domain" to "over"."""
    sums: dict[type[Message], str | tuple[str, str]] = {**_IN_VAIN, Sum: "tree"}
    trees: dict[str, Table] = {
        "model": {"tree": {**sums, KnownSplits: "tree", Values: "between trees"}},
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
        **{state: {Sum: state, **after} for state, after in _SEARCH.items()},
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


# ---------------------------------------------------------------- how often


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
        """Note a request; PeerProtocolError if none is due."""
        # another attempt at the same sum
        again = number == self._number and self._attempt < attempt < ATTEMPTS
        if not again and not (self._due and number > self._number and attempt < ATTEMPTS):
            raise PeerProtocolError(
                self._asker, f"expected one sum for each level, in {ATTEMPTS} attempts, got more - from {self._asker}"
            )
        self._number, self._attempt, self._due = number, attempt, False


class ServerLimits:
    """An edge server's count of what the server sends to all edge servers."""

    def __init__(self, server: str, n_estimators: int, max_depth: int, most_probes: int) -> None:
        self._server, self._n_estimators, self._max_depth = server, n_estimators, max_depth
        self._most_probes = most_probes
        self.rounds = self.finished = self._void = self.probes = 0
        self._levels = -1  # of the round; -1 before the first
        self.sums = SumLimit(server)

    def take(self, message: Message) -> None:
        """Count a message other than one about sums; PeerProtocolError for more than the job's options allow."""
        match message:
            case Count() | LabelUnits() | TrainingStart():
                self.sums.due()
            case ProbeRequest():
                self.probes += 1
                self._check(self.probes <= self._most_probes, f"{self._most_probes} requests for probes at most")
                self.sums.due()
            case RoundStart():
                # no level came: the round begins again
                again, self._levels = self._levels == 0, 0
                self.rounds, self._void = self.rounds + (not again), self._void + again
                self._check(self.rounds <= self._n_estimators, f"{self._n_estimators} rounds at most")
                self._check(self._void <= MOST_VOID, f"{MOST_VOID} rounds at most that begin again")
                self.sums.due()
            case KnownSplits() | ShownSplits() | SplitShares() | Turn(leaves=False):
                # splits end a level, and ask for the next sum
                self._levels += 1
                self._check(self._levels <= self._max_depth, f"{self._max_depth} levels in a tree at most")
                # below the last level there is nothing to sum
                self.sums.due(one=self._levels < self._max_depth)
            case Values() | LeafShares() | Turn(leaves=True):
                self.finished = self.rounds

    def _check(self, fine: bool, expected: str) -> None:
        if not fine:
            raise PeerProtocolError(self._server, f"expected {expected}, got more - from {self._server}")


class Instructions:
    """The edge server's messages to a user, in the order that `user_order` allows.

    Calls for a sum are answered with ``vector()``, int64 (length,): the same again if the sum is repeated.
    """

    vector: Callable[[], Integers]

    def __init__(self, inputs: RoleInput[FedXGB], edge: str, sums: UserSums) -> None:
        self.edge = edge
        self._inputs, self._party, self._sums = inputs, inputs.party, sums
        self._order, self._limit = MessageOrder(user_order(inputs.options), "begun"), SumLimit(edge)
        self._chosen = False  # for the tree that grows, or the search
        self._at_start = sums.transcript.digest
        self._held: Message | None = None  # came in place of a sum's next step

    def next(self) -> Message:
        """Return the next message that is not about a sum; masks depend on all that everybody receives."""
        sums = self._sums
        while True:
            message = self._held or self._party.receive(self.edge, *self._order.allowed, follow=True)
            self._held = None
            self._order.take(message)
            match message:
                case Domain():
                    sums.meet(message)
                case Cohort():
                    sums.join(message)
                    self._chosen = True
                case Call():
                    if not self._chosen:
                        raise PeerProtocolError(
                            self.edge, f"sum requested although {self._party.name} is not in the tree's cohort"
                        )
                    self._limit.take(message.number, message.attempt)
                    # the edge server may move on while this user waits for a sum's next step
                    self._held = self._give(message)
                case SideShares() | Sides() | ValueShares() | Turn():  # for this user alone
                    self._limit.due()
                    return message
                case _:
                    self._limit.due()
                    if isinstance(message, RoundStart):
                        self._chosen = False
                        # users who missed a tree must have the masks of the next one
                        sums.transcript = TranscriptDigest(self._at_start)
                    sums.transcript.update(message)
                    if isinstance(message, RowSummary | RowOwners):
                        self._at_start = sums.transcript.digest
                    return message

    def _give(self, call: Call) -> Message | None:
        """Contribute to a sum; return the message that came in place of the sum's next step, if one did."""
        try:
            values = self.vector()
            self._inputs.observers.event(VectorGiven(values))
            return self._sums.give(call, values, *self._order.allowed)
        except CryptoError as error:  # another user may have caused it: miss no more than this tree
            logger.warning("%s takes no part in this tree: %s", self._party.name, error)
            self._sums.withdraw()
            return None
