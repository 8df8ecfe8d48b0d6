"""How much the server may ask of edge servers, and these of users: rounds, levels and sums of the job, each once.

What may come when is in the tables of `messages`; here is how often.
"""

from __future__ import annotations

from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Message
from treaty.systems.fedxgb.messages import RoundStart, Splits, Values
from treaty.systems.fedxgb.paper.routing import ShownSplits
from treaty.systems.fedxgb.secpred.routing import LeafShares, SplitShares, Turn
from treaty.systems.fedxgb.sums.user import ATTEMPTS
from treaty.systems.horizontal.quantiles import Count, ProbeRequest
from treaty.systems.horizontal.start import LabelUnits, TrainingStart

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
