"""An edge server's end of the sums of its domain: who takes part, what they send each other, what is opened.

See `sums.user` for the messages. The sums opened here look uniformly random to the edge server: each user's vector lies
under a mask that the user shares with the server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.key_agreement import is_mask_key, unsigned
from treaty.crypto.sharing.secure_aggregation import Aggregator, Round, RoundVoid, enough
from treaty.errors import CryptoError, PeerProtocolError
from treaty.messaging.messages import M, Message
from treaty.messaging.party import Party
from treaty.systems.fedxgb.authority import CertifiedKeys
from treaty.systems.fedxgb.cohorts import LEAST, Cohorts, Rules, Standing, select
from treaty.systems.fedxgb.secfind import (
    ATTEMPTS,
    AbsenceNotice,
    Agreement,
    Agreements,
    Call,
    Cohort,
    Domain,
    MaskKey,
    MaskKeys,
    sum_round,
)
from treaty.systems.horizontal.masked_sums import OwnInput, SumAggregator
from treaty.systems.horizontal.members import ToldDigest

logger = logging.getLogger(__name__)

MOST_SILENCES = 3  # in a row, after which a user is no longer waited for: all others would wait each time
_MOMENT = 0.05  # seconds given to such users once all others have answered
FIRST_PATIENCE = 3  # times `patience` a user has for a step of a job's first sum
MOST_PATIENCE = 4  # times `patience` a sum waits for users lost one after another; others wait for the edge server


class SumSetup(NamedTuple):
    """What an edge server has once shares are passed on: mask keys by user, sealed shares by sender and receiver."""

    round: Round
    keys: dict[str, bytes]
    sealed: dict[str, dict[str, bytes]]
    aggregator: Aggregator


class DomainSums(SumAggregator):
    """A domain's cohort and its sums.

    `users` have their keys, already checked. A user silent for `patience` seconds counts as lost for the tree, and is
    asked again as the next begins; one that takes no message for so long is lost for good. `heard` digests what users
    were told, as they do; `there` are those not lost for good. `cohorts` are those of a training that goes on; `keep`
    is called with them before another sum is opened.
    """

    def __init__(
        self,
        party: Party,
        users: Mapping[str, CertifiedKeys],
        standings: dict[str, Standing],
        rules: Rules,
        patience: float,
        cohorts: Cohorts | None = None,
        keep: Callable[[Cohorts], None] = lambda _: None,
    ) -> None:
        self.heard = ToldDigest(b"")
        self.there = list(users)
        self._party, self._users, self._standings = party, users, standings
        self._rules, self._patience = rules, patience
        self._rng = np.random.default_rng()
        self._cohorts, self._keep = cohorts or Cohorts(rules, self._rng), keep
        self._cohort: list[str] = []  # as the tree began, or as it went on with fewer
        self._running: list[str] = sorted(self._cohorts.running)  # those of them still there
        self._silent: dict[str, int] = {}
        self._idle = False  # gave nothing to the last sum
        self._until = float("inf")  # monotonic time at which the sum under way is given up
        self.send(dict.fromkeys(self.there, Domain(dict(users), rules.least_change)))

    def choose(self, answered: Sequence[str], *, everybody: bool = False) -> None:
        """Choose the cohort of a tree among those who answered, and tell it; with `everybody`, all of them."""
        counted = frozenset(self.there if self._cohorts.users is None else self._cohorts.users)
        standings = {name: self._standings[name] for name in answered if name in counted}
        ordered = select(standings, self._running, self._rules, self._rng)
        away = sorted(counted.intersection(self.there).difference(answered))
        before = self._cohorts.running
        cohort = sorted(ordered) if everybody else self._cohorts.begin(ordered, away)
        if cohort is None:
            self._sit_out(f"no permitted cohort among {len(ordered)} users")
        for name in cohort or ():
            self._standings[name].called += 1
        if before != self._cohorts.running:
            self.keep()
        self._form(cohort or ())

    def keep(self) -> None:
        """Keep the cohorts for a training that goes on, once there are any."""
        if self._cohorts.users is not None:
            self._keep(self._cohorts)

    def _form(self, cohort: Collection[str]) -> None:
        """Go on with a cohort, and tell it."""
        self._cohort, self._running = list(cohort), list(cohort)
        self.send(dict.fromkeys(self._cohort, Cohort(self._cohort)))

    def total(self, number: int, length: int) -> tuple[NDArray[np.int64], list[str], int]:
        """Open sum `number` of the cohort's next vectors, of `length` numbers.

        Returns the sum int64 (length,), zeros where none could be opened; whose vectors are in it, sorted; and the
        attempt at which it was opened.
        """
        why = ""
        self._until = time.monotonic() + MOST_PATIENCE * self._patience
        for attempt in range(ATTEMPTS):
            try:
                call = Call(number, attempt)
                this_round = self._round(call, length)
                if len(self._running) < this_round.least:  # a smaller cohort can
                    self._form(self._cohorts.keep(self._running) or ())
                    this_round = self._round(call, length)
                opened, users = self._attempt(this_round, call)
            except CryptoError as void:
                why = str(void)
                logger.info("%s: sum %d, attempt %d: %s", self._party.name, number, attempt, why)
                if time.monotonic() > self._until:
                    break
                continue
            self._count(users)
            self._idle = False
            return opened, users, attempt
        self._sit_out(why)
        self._running = []
        self._count([])
        return np.zeros(length, np.int64), [], 0

    def _count(self, users: Sequence[str]) -> None:
        """Note whose rows are in the first sum."""
        if self._cohorts.users is None:
            self._cohorts.users = frozenset(users)
            self.keep()

    def _sit_out(self, why: str) -> None:
        """Warn that the domain adds nothing, once until it adds again: that may last hundreds of trees."""
        level = logging.INFO if self._idle else logging.WARNING
        logger.log(level, "%s adds nothing to the rest of a tree: %s", self._party.name, why)
        self._idle = True

    def _round(self, call: Call, length: int) -> Round:
        if len(self._cohort) < LEAST:
            raise RoundVoid(f"the round is void: expected {LEAST} users or more, got {len(self._cohort)}")
        return sum_round(self._party, call, {name: self._users[name].key for name in self._cohort}, length, self.heard)

    def _attempt(self, this_round: Round, call: Call) -> tuple[NDArray[np.int64], list[str]]:
        """Open the sum of the running cohort's vectors, once; return also whose they are."""
        self.send(dict.fromkeys(self._running, call))
        setup = self._begin(this_round)
        return self.open_sum(this_round, setup.aggregator, setup.sealed)

    def _begin(self, this_round: Round) -> SumSetup:
        """Pass on mask keys and shares."""
        made = self._sound(self._gather(MaskKey), lambda m, _: is_mask_key(m.public), "a mask key")
        keys = {name: message.public for name, message in made.items()}
        aggregator = Aggregator(this_round, unsigned(keys), signed=False)
        self.send({
            name: MaskKeys(keys, {u: m.tags.get(name, b"") for u, m in made.items() if u != name}) for name in made
        })  # fmt: skip
        sealed, _ = self.pass_shares(aggregator, keys)
        return SumSetup(this_round, keys, sealed, aggregator)

    def _choose(self, this_round: Round, aggregator: Aggregator, came: Mapping[str, NDArray[np.uint64]]) -> None:
        """Leave users out until the sum of the others may be opened after the earlier sums."""
        kept = self._cohorts.keep(came) or []
        self._running = [name for name in self._running if name in kept]
        enough(len(kept), this_round.least, "inputs of a permitted cohort")
        for name in came.keys() - set(kept):
            aggregator.take_back(name, came[name])
        if self._cohorts.open(kept):
            self._keep(self._cohorts)  # before the sum is opened

    def _pass_proofs(
        self, this_round: Round, aggregator: Aggregator, survivors: Sequence[str], own: OwnInput | None
    ) -> None:
        agreed = {name: message.tags for name, message in self._gather(Agreement).items()}
        enough(len(agreed), this_round.threshold, "users who agree")
        self.send({to: Agreements({u: tags[to] for u, tags in agreed.items() if to in tags}) for to in agreed})

    def send(self, messages: Mapping[str, Message]) -> None:
        """Send to users, some of whom may be gone."""
        reached = self._party.send_each(
            {name: messages[name] for name in messages if name in self.there}, timeout=self._patience
        )
        for name in messages:
            if name not in reached and name in self.there:
                self.lose_for_good(name)

    def only(self, users: Collection[str]) -> None:
        """Go on with these users alone."""
        for name in [name for name in self.there if name not in users]:
            self.lose_for_good(name)

    def lose_for_good(self, name: str) -> None:
        """Go on without a user, whose connection is lost or who sent what no user does."""
        logger.warning("%s goes on without %s", self._party.name, name)
        self._party.leave_out(name)
        self.there.remove(name)
        self._lose([name])

    def attending(self, kind: type[Message]) -> list[str]:
        """Return the users who say with a message of this kind that they are there for a tree."""
        silent = [name for name in self.there if self._silent.get(name, 0) >= MOST_SILENCES]
        came = self.gather([name for name in self.there if name not in silent], kind)
        return [*came, *self.gather(silent, kind, _MOMENT)]

    def gather(self, names: Sequence[str], kind: type[M], patience: float | None = None) -> dict[str, M]:
        """Receive messages of a kind from users, those in time; users who send anything else are lost for good."""
        until = time.monotonic() + (self._patience if patience is None else patience)  # however many are expelled
        while True:
            try:
                came = self._party.gather(
                    [name for name in names if name in self.there],
                    kind,
                    AbsenceNotice,
                    timeout=until - time.monotonic(),
                )
            except PeerProtocolError as error:
                self._expel(error)
            else:
                for name in names:
                    self._silent[name] = 0 if name in came else self._silent.get(name, 0) + 1
                return {name: message for name, message in came.items() if isinstance(message, kind)}

    def _gather(self, kind: type[M]) -> dict[str, M]:
        """Receive from the running cohort; absent users are lost for the tree."""
        if time.monotonic() > self._until:
            raise RoundVoid(f"the round is void: users were waited for {MOST_PATIENCE * self._patience:g} s in all")
        first = self._cohorts.users is None  # who misses it misses the job
        came = self.gather(self._running, kind, FIRST_PATIENCE * self._patience if first else self._patience)
        self._lose([name for name in self._running if name not in came])
        return came

    def _expel(self, error: PeerProtocolError) -> None:
        if error.peer not in self.there:
            raise error
        logger.warning("%s: %s", self._party.name, error)
        self.lose_for_good(error.peer)

    def _lose(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._running:
                self._standings[name].lost += 1
        self._running = [name for name in self._running if name not in names]
