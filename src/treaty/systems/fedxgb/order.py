"""Which message may come when in FedXGB, and how often: what edge servers and users check.

`user_order` and `edge_order` say which message a user or edge server may receive when. `SumLimit` and `ServerLimits`
count what the server asks of edge servers, and these of users: each round, level and sum of the job once.
"""

from __future__ import annotations

from treaty.errors import PeerProtocolError
from treaty.messaging.conversation import Table
from treaty.messaging.messages import Message
from treaty.systems.fedxgb.messages import (
    MOST_VOID,
    Call,
    Cohort,
    Domain,
    KnownSplits,
    LeafShares,
    RoundStart,
    RowOwners,
    RowSummary,
    SideShares,
    SplitShares,
    Sum,
    TrainingEnd,
    Values,
    ValueShares,
)
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.paper import HiddenThresholds, ShownSplits, Sides
from treaty.systems.fedxgb.secfind import ATTEMPTS
from treaty.systems.horizontal.held_out import HeldOutRequest
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.systems.horizontal.quantiles import CommonBins, Count, ProbeRequest
from treaty.systems.horizontal.rows import LabelUnits, TrainingStart
from treaty.systems.observers import Observer

# ---------------------------------------------------------------- what may come when

# What the server sends to all before trees grow; sums come in between
_SEARCH: Table = {
    "counted": {LabelUnits: "labels", ProbeRequest: "search", CommonBins: "bins"},
    "labels": {TrainingStart: "search"},
    "search": {ProbeRequest: "search", CommonBins: "bins"},
}
_IN_VAIN: dict[type[Message], str] = {RoundStart: "tree", TrainingEnd: "over"}  # no sum of the round was opened


def user_order(options: FedXGB) -> Table:
    """Return which messages a user may receive from its edge server, from state "begun" to "over"."""
    if options.adds_noise:
        # users may come late to the domain at any time
        known: list[type[Message]] = [Domain, Cohort, Call]
        return {
            "begun": {Domain: "domain"},
            **{state: {**dict.fromkeys(known, state), **after} for state, after in _under_noise(options).items()},
        }
    sums: dict[type[Message], str | tuple[str, str]] = {**_IN_VAIN, Cohort: "tree", Call: "tree"}
    trees: dict[str, Table] = {
        "model": {"tree": {**sums, KnownSplits: "tree", Values: "between trees"}},
        "paper": {"tree": {**sums, ShownSplits: "compared", Values: "between trees"}, "compared": {Sides: "tree"}},
        "nothing": {"tree": {**sums, SideShares: "tree", ValueShares: "between trees"}},
    }
    return {
        "begun": {Domain: "domain"},
        "domain": {Cohort: "domain", Count: "counted"},
        **{state: {Cohort: state, Call: state, **after} for state, after in _SEARCH.items()},
        **_between(options, Cohort, Call),
        **trees[options.exposes],
    }


def edge_order(options: FedXGB) -> Table:
    """Return which messages an edge server may receive from the server, from state "domain" to "over"."""
    if options.adds_noise:
        return {state: {Sum: state, **after} for state, after in _under_noise(options).items()}
    sums: dict[type[Message], str | tuple[str, str]] = {**_IN_VAIN, Sum: "tree"}
    trees: dict[str, Table] = {
        "model": {"tree": {**sums, KnownSplits: "tree", Values: "between trees"}},
        "paper": {"tree": {**sums, ShownSplits: "shown", Values: "between trees"}, "shown": {HiddenThresholds: "tree"}},
        "nothing": {
            "tree": {**sums, SplitShares: "below"},
            "below": {Sum: "below", SplitShares: "below", LeafShares: "between trees"},
        },
    }
    return {
        "domain": {Count: "counted"},
        **{state: {Sum: state, **after} for state, after in _SEARCH.items()},
        **_between(options, Sum),
        **trees[options.exposes],
    }


def _under_noise(options: FedXGB) -> Table:
    """Return what the server sends to all if sums have noise, without those that it asks for."""
    counts: dict[type[Message], str] = {HeldOutRequest: "trees"} if options.holds_out_rows else {}
    return {
        "domain": {Count: "search"},
        "search": _SEARCH["search"],
        "bins": {RandomStep: "trees", TrainingEnd: "over"},
        "trees": {RandomStep: "trees", TrainingEnd: "over", **counts},
    }


def _between(options: FedXGB, *of_sums: type[Message]) -> Table:
    """Return what may come before and between trees; `of_sums` are messages about a sum."""
    shares_rows = options.exposes == "nothing"
    after: dict[type[Message], str] = {RoundStart: "tree", TrainingEnd: "over"}
    counts: Table = {
        "between trees": {**after, HeldOutRequest: "counting"},
        "counting": {**after, **dict.fromkeys(of_sums, "counting")},
    }
    return {
        "bins": {RowSummary: "rows" if shares_rows else "between trees"},
        "rows": {RowOwners: "between trees"},
        "between trees": after,
        **(counts if options.holds_out_rows else {}),
    }


# ---------------------------------------------------------------- how often


class SumLimit:
    """Allows one sum after each message that is followed by one, in a few attempts; numbers of sums only rise.

    The difference of two sums of one level, over different users, would be the sum of those in only one of them.
    """

    def __init__(self, asker: str) -> None:
        self._asker, self._number, self._attempt, self._due = asker, -1, ATTEMPTS, False

    def due(self, *, one: bool = True) -> None:
        """Allow one more sum, or none, and no further attempt at the last one."""
        self._due, self._attempt = one, ATTEMPTS

    def take(self, number: int, attempt: int = 0) -> None:
        """Note a request; PeerProtocolError if none is due."""
        again = number == self._number and self._attempt < attempt < ATTEMPTS
        if not again and not (self._due and number > self._number and attempt < ATTEMPTS):
            raise PeerProtocolError(
                self._asker, f"expected one sum for each level, in {ATTEMPTS} attempts, got more - from {self._asker}"
            )
        self._number, self._attempt, self._due = number, attempt, False


class ServerLimits:
    """An edge server's count of what the server sends to all edge servers; observers are notified of its rounds."""

    def __init__(
        self, server: str, n_estimators: int, max_depth: int, most_probes: int, observers: Observer | None = None
    ) -> None:
        self._server, self._n_estimators, self._max_depth = server, n_estimators, max_depth
        self._most_probes, self._observers = most_probes, observers or Observer()
        self.rounds = self._void = self.probes = 0
        self._levels = -1  # of the round; -1 before the first
        self.sums = SumLimit(server)

    def take(self, message: Message) -> None:
        """Count a message that is not about sums; PeerProtocolError for more than the job's options allow."""
        match message:
            case Count() | LabelUnits() | TrainingStart() | HeldOutRequest():
                self.sums.due()
            case ProbeRequest():
                self.probes += 1
                self._check(self.probes <= self._most_probes, f"{self._most_probes} requests for probes at most")
                self.sums.due()
            case RandomStep():
                # sums of the last trees follow without new ones; a tree may have no split
                grows = message.features.shape[:1] > (0,)
                self.rounds, self._void = self.rounds + grows, self._void + (not grows)
                most = max(self.rounds, self._void - 1)
                self._check(most <= self._n_estimators, f"{self._n_estimators} rounds at most")
                self.sums.due(one=grows)
                self._observers.round_finished(self.rounds - grows, None)
            case RoundStart():
                # no level came: the round begins again
                again, self._levels = self._levels == 0, 0
                self.rounds, self._void = self.rounds + (not again), self._void + again
                self._check(self.rounds <= self._n_estimators, f"{self._n_estimators} rounds at most")
                self._check(self._void <= MOST_VOID, f"{MOST_VOID} rounds at most that begin again")
                self.sums.due()
            case KnownSplits() | ShownSplits() | SplitShares():
                # splits end a level, and ask for the next sum
                self._levels += 1
                self._check(self._levels <= self._max_depth, f"{self._max_depth} levels in a tree at most")
                # below the last level there is nothing to sum
                self.sums.due(one=self._levels < self._max_depth)
            case Values() | LeafShares():
                self._observers.round_finished(self.rounds, None)

    def _check(self, fine: bool, expected: str) -> None:
        if not fine:
            raise PeerProtocolError(self._server, f"expected {expected}, got more - from {self._server}")
