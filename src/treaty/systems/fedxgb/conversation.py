"""How server, edge servers and users of FedXGB talk: how a training begins, which message may come when, how often.

A training begins fresh or resumed; all roles make new keys either way. The server's checkpoint has the model: it sends
the finished trees again, without sums, so that users have their margins.

`user_order` and `edge_order` say which message a user or edge server may receive when. `SumLimit` and `ServerLimits`
count what the server asks of edge servers, and these of users: each round, level and sum of the job once.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.data.table import Schema
from treaty.errors import ConfigError, CryptoError, PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.conversation import MessageOrder, Table
from treaty.messaging.messages import Message, decode_body, view
from treaty.messaging.party import Party
from treaty.models.checkpoints import Checkpoint
from treaty.models.trees import ModelPart, keep_records, records_used
from treaty.systems.fedxgb.cohorts import AnyCohorts, DomainFile, Rules, UserStanding, seed_of_rows
from treaty.systems.fedxgb.domain import Credentials, authority_of, gather_sound, patience_of, send_each_or_leave_out
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
    Task,
    TrainingEnd,
    UserOffer,
    Users,
    Values,
    ValueShares,
)
from treaty.systems.fedxgb.noisy_sums import NoisyDomainSums, NoisyUserSums
from treaty.systems.fedxgb.options import PAPER_LEAKS, FedXGB, check_edges, domains
from treaty.systems.fedxgb.paper import HiddenThresholds, PaperDomainSums, PaperUserSums, ShownSplits, Sides, paper_mode
from treaty.systems.fedxgb.secfind import ATTEMPTS, Crowd, DomainSums, UserSums
from treaty.systems.horizontal.held_out import HeldOutRequest
from treaty.systems.horizontal.members import Membership, SumRules, TranscriptDigest
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.systems.horizontal.quantiles import CommonBins, Count, FoundBins, ProbeRequest, unpack_bins
from treaty.systems.horizontal.rows import (
    LabelUnits,
    TrainingStart,
    checkpoint_with,
    common_rows,
    printed_rows,
    schema_of,
)
from treaty.systems.horizontal.sum_noise import within_declared
from treaty.systems.observers import Observer, VectorGiven
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import RoundState

logger = logging.getLogger(__name__)

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


class Instructions:
    """The edge server's messages to a user, in the order that `user_order` allows.

    Calls for a sum are answered with ``vector()``, int64 (length,), which is the same again if the sum is repeated.
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
        """Return the next message that is not about a sum; masks depend on all messages that go to all users."""
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
                case SideShares() | Sides() | ValueShares():  # for this user alone
                    self._limit.due()
                    return message
                case _:
                    self._limit.due()
                    if isinstance(message, RoundStart | RandomStep):
                        self._chosen = False
                        # users who missed a tree must have the masks of the next one
                        sums.transcript = TranscriptDigest(self._at_start)
                    sums.transcript.update(message)
                    if isinstance(message, RowSummary | RowOwners) or (
                        isinstance(message, CommonBins) and isinstance(sums, NoisyUserSums)
                    ):
                        self._at_start = sums.transcript.digest
                    return message

    def _give(self, call: Call) -> Message | None:
        # the message that came in place of the sum's next step, if one did
        try:
            values = self.vector()
            self._inputs.observers.event(VectorGiven(values))
            return self._sums.give(call, values, *self._order.allowed)
        except CryptoError as error:  # another user may have caused it: miss no more than this tree
            logger.warning("%s takes no part in this tree: %s", self._party.name, error)
            self._sums.withdraw()
            return None


# ---------------------------------------------------------------- how a training begins


def terms_of(inputs: RoleInput) -> bytes:
    """Return the options on which all parties must agree, encoded."""
    return msgspec.json.encode(inputs.public_terms, order="sorted")


def receive_task(inputs: RoleInput, sender: str, credentials: Credentials) -> Task:
    """Receive the task from the server, or from the edge server that passes it on.

    Raises ConfigError if it has other options, PeerProtocolError if the server's keys are not certified.
    """
    party, server = inputs.party, inputs.roles.active
    task = party.receive(sender, Task)
    credentials.check(server, "server", task.server, sender)
    if task.options != terms_of(inputs):
        raise ConfigError(f"expected the options of {server}, got others at {party.name}; compare the job files")
    inputs.model_id = task.model_id
    return task


def check_options(inputs: RoleInput[FedXGB]) -> float:
    """Refuse options that do not fit the server's columns; return the share of columns drawn for each tree."""
    options, schema = inputs.options, inputs.rows.table.schema
    check_edges(options, len(inputs.roles.having("edge")))
    share = options.column_share(len(schema.names), inputs.common.colsample_bytree)
    categorical = [name for name, of in zip(schema.names, schema.categories, strict=True) if of is not None]
    # the splits of categories have no threshold
    if options.exposes == "paper" and categorical:
        raise ConfigError(
            f'expected numeric columns under expose="paper", which compares with thresholds alone, got categorical '
            f'{", ".join(categorical[:5])}; encode them as numbers, or take expose="nothing"',
            public='expose="paper" takes no categorical columns; encode them as numbers',
        )
    if paper_mode(options):
        logger.warning("%s: %s", inputs.party.name, PAPER_LEAKS)
    return share


class ServerCheckpoints:
    """The server's checkpoints, if it keeps any; `found` is that of an interrupted training.

    Raises ConfigError if it is of other options, parties or eval sets.
    """

    def __init__(self, inputs: RoleInput, evals: Sequence[LabelledRows]) -> None:
        self._inputs, self._keeper = inputs, inputs.keeper
        self._printed = b"" if self._keeper is None else printed_rows(evals, inputs.classes)
        self.found = None if self._keeper is None else self._keeper.found()
        if self.found is not None:
            self.found.check(inputs.given, inputs.may_change, (inputs.party.name,), self._printed)

    def write(self, part: ModelPart, rng: np.random.Generator, summary: RowSummary, rounds: int) -> None:
        """Write a checkpoint if one is due."""
        if self._keeper is not None and self._keeper.due:
            assert part.forest is not None
            # the server has no rows, hence no margins to keep
            no_rows, given = np.zeros((part.forest.objective.n_outputs, 0)), self._inputs.given
            state = RoundState(rounds, no_rows, json.dumps(rng.bit_generator.state))
            self._keeper.keep(lambda: checkpoint_with(part, given, self._printed, state, summary), time.perf_counter())


def new_task(inputs: RoleInput, credentials: Credentials, kept: Checkpoint | None) -> Task:
    """Return the task of a new training, or of the one of a checkpoint."""
    schema = inputs.rows.table.schema
    return Task(
        kept.part.model_id if kept else secrets.token_hex(16), list(schema.names),
        [None if c is None else list(c) for c in schema.categories], inputs.classes, terms_of(inputs),
        credentials.certified, kept.rounds if kept else 0, schema.origins,
    )  # fmt: skip


def known_bins(inputs: RoleInput, crowd: Crowd, kept: Checkpoint) -> FoundBins:
    """Send all parties what an interrupted training found out about all rows, and return it; nothing is summed again.

    The checkpoint's splits of later rounds are dropped: trees after it are grown again.
    """
    part, name, forest = kept.part, inputs.party.name, kept.part.forest
    assert forest is not None
    summary, message = decode_body(kept.bins, RowSummary, peer=name), decode_body(part.bins, CommonBins, peer=name)
    bins = unpack_bins(message, part.schema, inputs.common.bin_limits, name)
    may_miss = view(summary.may_miss, np.bool_, (len(bins.n_bins),), peer=name, what="RowSummary.may_miss")
    crowd.broadcast(Count())
    crowd.broadcast(message)
    forest.cut(kept.rounds)
    keep_records(part.splits, records_used(forest.trees, 1)[0])
    return FoundBins(message, bins, forest.objective, summary.n_rows, may_miss, 0)


@dataclass(frozen=True, slots=True)
class OpenDomain:
    """An edge server's domain, ready for sums; `edges` is its membership in masks among edge servers."""

    credentials: Credentials
    task: Task
    schema: Schema
    sums: DomainSums
    edges: Membership
    file: DomainFile


def open_domain(inputs: RoleInput[FedXGB]) -> OpenDomain:
    """Collect the users' keys, send them the task, and choose whose rows are in the first sum."""
    party, options, roles, patience = inputs.party, inputs.options, inputs.roles, patience_of(inputs)
    server, edges, paper = roles.active, roles.having("edge"), paper_mode(options)
    party.may_lose([name for name in party.peers if name not in (server, *edges)])
    credentials = Credentials(party, authority_of(roles), "edge")
    offers = _offers(party, credentials, domains(roles)[party.name], options, patience)
    party.send(server, Users({name: offer.keys for name, offer in offers.items()}))
    task = receive_task(inputs, server, credentials)
    # masks among edge servers, of which two are enough: the domains' sums are masked already
    membership = Membership(party, server, edges, inputs.vouching, b"fedxgb edges", SumRules(allow_two=True))
    standings = {name: UserStanding() for name in offers}
    file = DomainFile(inputs.keeper, party.name, task.model_id, standings)
    send_each_or_leave_out(party, dict.fromkeys(offers, task), patience)
    keys = {name: offer.keys for name, offer in offers.items() if name in party.peers}
    rules = Rules(most=options.max_users, least_change=options.group, whole=options.group_size is not None)
    # cohorts whose sums the first run opened count in this one
    known = file.read(rules, np.random.default_rng()) if task.rounds else None
    if options.adds_noise:
        known = AnyCohorts(rules, np.random.default_rng())
    sums_as = NoisyDomainSums if options.adds_noise else PaperDomainSums if paper else DomainSums
    domain = sums_as(party, keys, standings, rules, patience, known, file.write)
    domain.transcript.update(task)
    if not task.rounds:
        domain.choose(domain.there, everybody=True)  # a user that misses the first sum takes no part later
    return OpenDomain(credentials, task, schema_of(task.names, task.categories, task.origins), domain, membership, file)


def _offers(
    party: Party, credentials: Credentials, users: Sequence[str], options: FedXGB, patience: float
) -> dict[str, UserOffer]:
    # users without keys that the authority certified are left out; under noise they may come late
    offers = gather_sound(party, users, UserOffer, timeout=patience)
    for name in users:
        try:
            if name in offers:
                credentials.check(name, "user", offers[name].keys, name)
                continue
            logger.warning("%s begins without %s, which has sent no keys", party.name, name)
            if options.adds_noise:
                continue
        except PeerProtocolError as error:
            logger.warning("%s: %s", party.name, error)
            del offers[name]
        party.leave_out(name)
    if len(offers) < options.group:
        raise RoundVoid(
            f"expected {options.group} users or more to come to the domain of {party.name}, got {len(offers)}"
        )
    return offers


@dataclass(frozen=True, slots=True)
class JoinedUser:
    """A user's rows in the common columns and classes, the seed of their shares, and its part in sums."""

    task: Task
    rows: LabelledRows
    seed: bytes
    sums: UserSums


def join_domain(inputs: RoleInput[FedXGB], edge: str) -> JoinedUser:
    """Send the edge server certified keys, receive the task, and fit own rows to its columns and classes."""
    party, name = inputs.party, inputs.party.name
    published, noisy = paper_mode(inputs.options), inputs.options.adds_noise
    sums_as = NoisyUserSums if noisy else PaperUserSums if published else UserSums
    credentials = Credentials(party, authority_of(inputs.roles), "user")
    party.send(edge, UserOffer(credentials.certified))
    task = receive_task(inputs, edge, credentials)
    schema = schema_of(task.names, task.categories, task.origins)
    data = within_declared(inputs.options, inputs.rows, inputs.classes, name)
    rows = common_rows(data, schema, inputs.classes, task.classes, name)
    printed = printed_rows([rows], task.classes)
    # holders of shares know a user's rows again by their shares, which depend on this seed
    seed = seed_of_rows(inputs.keeper, name, task.model_id, printed, resumed=task.rounds > 0)
    sums = sums_as(party, edge, credentials, credentials.seed_with(inputs.roles.active, task.server), inputs.absence)
    sums.transcript.update(task)
    return JoinedUser(task, rows, seed, sums)
