"""How server, edge servers and users of FedXGB talk: how a training begins, and what the edge server tells a user.

A training begins fresh or resumed; all roles make new keys either way. The server's checkpoint has the model: it sends
the finished trees again, without sums, so that users have their margins.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.data.table import Schema
from treaty.errors import ConfigError, CryptoError, PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import Message, decode_body, view
from treaty.models.checkpoints import Checkpoint
from treaty.models.trees import ModelPart, keep_records, records_used
from treaty.systems.fedxgb import messages
from treaty.systems.fedxgb.cohorts import AnyCohorts, DomainFile, Rules, UserStanding, seed_of_rows
from treaty.systems.fedxgb.domain import (
    Credentials,
    authority_of,
    certified,
    gather_sound,
    patience_of,
    send_each_or_leave_out,
)
from treaty.systems.fedxgb.options import PAPER_LEAKS, FedXGB
from treaty.systems.fedxgb.order import SumLimit, user_order
from treaty.systems.fedxgb.paper import Sides, paper_mode
from treaty.systems.fedxgb.roles import check_edges, domains
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, UserSums
from treaty.systems.horizontal.members import Membership, SumRules, TranscriptDigest
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.systems.horizontal.quantiles import CommonBins, Count, FoundBins, unpack_bins
from treaty.systems.horizontal.rows import checkpoint_with, common_rows, printed_rows, schema_of
from treaty.systems.horizontal.sum_noise import within_declared
from treaty.systems.observers import VectorGiven
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Rounds, RoundState
from treaty.trees.ensemble import Tree

logger = logging.getLogger(__name__)


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
                case messages.Domain():
                    sums.meet(message)
                case messages.Cohort():
                    sums.join(message)
                    self._chosen = True
                case messages.Call():
                    if not self._chosen:
                        raise PeerProtocolError(
                            self.edge, f"sum requested although {self._party.name} is not in the tree's cohort"
                        )
                    self._limit.take(message.number, message.attempt)
                    # the edge server may move on while this user waits for a sum's next step
                    self._held = self._give(message)
                case messages.SideShares() | Sides() | messages.ValueShares():  # for this user alone
                    self._limit.due()
                    return message
                case _:
                    self._limit.due()
                    if isinstance(message, messages.RoundStart | RandomStep):
                        self._chosen = False
                        # users who missed a tree must have the masks of the next one
                        sums.transcript = TranscriptDigest(self._at_start)
                    sums.transcript.update(message)
                    if isinstance(message, messages.RowSummary | messages.RowOwners) or (
                        isinstance(message, CommonBins) and self._inputs.options.adds_noise
                    ):
                        self._at_start = sums.transcript.digest
                    return message

    def _give(self, call: messages.Call) -> Message | None:
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


def grow_all(rounds: Rounds, grow: Callable[[], list[Tree]], again: Iterator[int]) -> None:
    """Grow all rounds; begin one again where no domain has enough users, as often as `again` has numbers in all.

    After that training ends, with a warning; RoundVoid if there is no tree yet.
    """
    for trees in rounds:
        while not trees:
            try:
                trees += grow()
            except RoundVoid as error:
                if next(again, None) is not None:
                    continue
                if not rounds.forest.trees:
                    raise
                logger.warning(
                    "training ends after %d of %d rounds: %s", rounds.forest.rounds, rounds.n_estimators, error
                )
                rounds.stop()
                break


def terms_of(inputs: RoleInput) -> bytes:
    """Return the options on which all parties must agree, encoded."""
    return msgspec.json.encode(inputs.public_terms, order="sorted")


def receive_task(inputs: RoleInput, sender: str, credentials: Credentials) -> messages.Task:
    """Receive the task from the server, or from the edge server that passes it on.

    Raises ConfigError if it has other options, PeerProtocolError if the server's keys are not certified.
    """
    party, server = inputs.party, inputs.roles.active
    task = party.receive(sender, messages.Task)
    credentials.check(server, "server", task.server, sender)
    if task.options != terms_of(inputs):
        raise ConfigError(f"expected the options of {server}, got others at {party.name}; compare the job files")
    inputs.model_id = task.model_id
    return task


def check_options(inputs: RoleInput[FedXGB]) -> float:
    """Refuse options that do not fit the server's columns; return the share of columns drawn for each tree."""
    options, schema = inputs.options, inputs.rows.table.schema
    check_edges(options, len(inputs.roles.having("edge")))
    share, sample, n_columns = inputs.common.colsample_bytree, options.feature_sample, len(schema.names)
    if sample is not None:
        if sample > n_columns:
            raise ConfigError(f"expected feature_sample of at most {n_columns} columns, got {sample}")
        share = sample / n_columns
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

    def write(self, part: ModelPart, rng: np.random.Generator, summary: messages.RowSummary, rounds: int) -> None:
        """Write a checkpoint if one is due."""
        if self._keeper is not None and self._keeper.due:
            # the server has no rows, hence no margins to keep
            no_rows, given = np.zeros((part.grown.objective.n_outputs, 0)), self._inputs.given
            state = RoundState(rounds, no_rows, json.dumps(rng.bit_generator.state))
            self._keeper.keep(lambda: checkpoint_with(part, given, self._printed, state, summary), time.perf_counter())


def new_task(inputs: RoleInput, credentials: Credentials, kept: Checkpoint | None) -> messages.Task:
    """Return the task of a new training, or of the one of a checkpoint."""
    schema = inputs.rows.table.schema
    return messages.Task(
        kept.part.model_id if kept else secrets.token_hex(16), list(schema.names),
        [None if c is None else list(c) for c in schema.categories], inputs.classes, terms_of(inputs),
        credentials.certified, kept.rounds if kept else 0, schema.origins,
    )  # fmt: skip


def known_bins(inputs: RoleInput, crowd: Crowd, kept: Checkpoint) -> FoundBins:
    """Send all parties what an interrupted training found out about all rows, and return it; nothing is summed again.

    The checkpoint's splits of later rounds are dropped: trees after it are grown again.
    """
    part, name, forest = kept.part, inputs.party.name, kept.part.grown
    summary = decode_body(kept.bins, messages.RowSummary, peer=name)
    message = decode_body(part.bins, CommonBins, peer=name)
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
    task: messages.Task
    schema: Schema
    sums: DomainSums
    edges: Membership
    file: DomainFile


def open_domain(inputs: RoleInput[FedXGB], sums_as: type[DomainSums]) -> OpenDomain:
    """Collect the users' keys, send them the task, and choose whose rows are in the first sum."""
    party, options, roles, patience = inputs.party, inputs.options, inputs.roles, patience_of(inputs)
    server, edges = roles.active, roles.having("edge")
    party.may_lose([name for name in party.peers if name not in (server, *edges)])
    credentials = Credentials(party, authority_of(roles), "edge")
    users = domains(roles)[party.name]
    offers = gather_sound(party, users, messages.UserOffer, timeout=patience)
    for name in users:
        if name not in offers:
            logger.warning("%s begins without %s, which has sent no keys", party.name, name)
            # under noise it may come late
            if not options.adds_noise:
                party.leave_out(name)
    keys = certified(party, credentials, offers)
    if len(keys) < options.group:
        raise RoundVoid(
            f"expected {options.group} users or more to come to the domain of {party.name}, got {len(keys)}"
        )
    party.send(server, messages.Users(keys))
    task = receive_task(inputs, server, credentials)
    # masks among edge servers, of which two are enough: the domains' sums are masked already
    membership = Membership(party, server, edges, inputs.vouching, b"fedxgb edges", SumRules(allow_two=True))
    standings = {name: UserStanding() for name in keys}
    file = DomainFile(inputs.keeper, party.name, task.model_id, standings)
    send_each_or_leave_out(party, dict.fromkeys(keys, task), patience)
    keys = {name: of for name, of in keys.items() if name in party.peers}
    rules = Rules(most=options.max_users, least_change=options.group, whole=options.group_size is not None)
    # cohorts whose sums the first run opened count in this one
    known = file.read(rules, np.random.default_rng()) if task.rounds else None
    if options.adds_noise:
        known = AnyCohorts(rules, np.random.default_rng())
    domain = sums_as(party, keys, standings, rules, patience, known, file.write)
    domain.transcript.update(task)
    if not task.rounds:
        domain.choose(domain.there, everybody=True)  # a user that misses the first sum takes no part later
    return OpenDomain(credentials, task, schema_of(task.names, task.categories, task.origins), domain, membership, file)


@dataclass(frozen=True, slots=True)
class JoinedUser:
    """A user's rows in the common columns and classes, the seed of their shares, and its part in sums."""

    task: messages.Task
    rows: LabelledRows
    seed: bytes
    sums: UserSums


def join_domain(inputs: RoleInput[FedXGB], edge: str, sums_as: type[UserSums]) -> JoinedUser:
    """Send the edge server certified keys, receive the task, and fit own rows to its columns and classes."""
    party, name = inputs.party, inputs.party.name
    credentials = Credentials(party, authority_of(inputs.roles), "user")
    party.send(edge, messages.UserOffer(credentials.certified))
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
