"""How a training of FedXGB begins, fresh or resumed, at the server, at edge servers and at users.

All roles start with new keys when a training resumes. The server's checkpoint has the model; it sends the finished
trees again, without sums, so that users have their margins.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.data.table import Schema
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.messages import decode_body, view
from treaty.messaging.party import Party
from treaty.models.checkpoints import Checkpoint
from treaty.models.trees import ModelPart, keep_records, records_used
from treaty.systems.fedxgb.authority import (
    Credentials,
    authority_of,
    gather_sound,
    patience_of,
    send_each_or_leave_out,
)
from treaty.systems.fedxgb.cohorts import Rules, UserStanding
from treaty.systems.fedxgb.kept import DomainFile, seed_of_rows
from treaty.systems.fedxgb.messages import RowSummary, Task, UserOffer, Users
from treaty.systems.fedxgb.options import PAPER_LEAKS, FedXGB, check_edges, domains
from treaty.systems.fedxgb.paper import PaperDomainSums, PaperUserSums, paper_mode
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, UserSums
from treaty.systems.horizontal.members import Membership, SumRules
from treaty.systems.horizontal.quantiles import CommonBins, Count, FoundBins, unpack_bins
from treaty.systems.horizontal.rows import checkpoint_with, common_rows, printed_rows, schema_of
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Forest, RoundState

logger = logging.getLogger(__name__)


def terms_of(inputs: RoleInput) -> bytes:
    """Return the options on which everybody must agree, encoded."""
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


# ---------------------------------------------------------------- server


def check_numeric(schema: Schema) -> None:
    """Raise ConfigError when there are categories, whose splits have no threshold."""
    categorical = [name for name, of in zip(schema.names, schema.categories, strict=True) if of is not None]
    if categorical:
        raise ConfigError(
            f'expected numeric columns under expose="paper", which compares with thresholds alone, got categorical '
            f'{", ".join(categorical[:5])}; encode them as numbers, or take expose="nothing"',
            public='expose="paper" takes no categorical columns; encode them as numbers',
        )


def check_options(inputs: RoleInput[FedXGB]) -> float:
    """Refuse options that do not fit the server's columns; return the share of columns drawn for each tree."""
    options, schema = inputs.options, inputs.rows.table.schema
    check_edges(options, len(inputs.roles.having("edge")))
    share = options.column_share(len(schema.names), inputs.common.colsample_bytree)
    if options.exposes == "paper":
        check_numeric(schema)
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
    """Send everybody what an interrupted training found out about all rows, and return it; nothing is summed again."""
    part, name = kept.part, inputs.party.name
    summary, message = decode_body(kept.bins, RowSummary, peer=name), decode_body(part.bins, CommonBins, peer=name)
    bins = unpack_bins(message, part.schema, inputs.common.most_bins, name)
    may_miss = view(summary.may_miss, np.bool_, (len(bins.n_bins),), peer=name, what="RowSummary.may_miss")
    crowd.broadcast(Count())
    crowd.broadcast(message)
    return FoundBins(message, bins, forest_of(kept).objective, summary.n_rows, may_miss, 0)


def forest_of(kept: Checkpoint) -> Forest:
    """Return the finished rounds of an interrupted training; later splits are dropped."""
    forest = kept.part.forest
    assert forest is not None
    # trees after the checkpoint are grown again
    forest.cut(kept.rounds)
    keep_records(kept.part.splits, records_used(forest.trees, 1)[0])
    return forest


# ---------------------------------------------------------------- edge server


@dataclass(frozen=True, slots=True)
class OpenDomain:
    """An edge server's domain, ready for sums; `edges` is its part in masks among edge servers."""

    task: Task
    schema: Schema
    sums: DomainSums
    edges: Membership
    file: DomainFile


def open_domain(inputs: RoleInput[FedXGB]) -> OpenDomain:
    """Collect the domain's users and their keys, send them the task, and choose whose rows are in the first sum."""
    party, options, roles, patience = inputs.party, inputs.options, inputs.roles, patience_of(inputs)
    server, edges, paper = roles.active, roles.having("edge"), paper_mode(options)
    party.may_lose([name for name in party.peers if name not in (server, *edges)])
    credentials = Credentials(party, authority_of(roles), "edge")
    offers = receive_offers(party, credentials, domains(roles)[party.name], options.group, patience)
    party.send(server, Users({name: offer.keys for name, offer in offers.items()}))
    task = receive_task(inputs, server, credentials)
    # masks among edge servers, of which two are enough: the domains' sums are masked already
    membership = Membership(party, server, edges, inputs.vouching, b"fedxgb edges", SumRules(allow_two=True))
    # what users say of themselves; the edge server counts calls and losses
    standings = {name: UserStanding(offer.activity, offer.stability) for name, offer in offers.items()}
    file = DomainFile(inputs.keeper, party.name, task.model_id, standings)
    send_each_or_leave_out(party, dict.fromkeys(offers, task), patience)
    keys = {name: offer.keys for name, offer in offers.items() if name in party.peers}
    rules = Rules(most=options.max_users, least_change=options.group, whole=options.group_size is not None)
    # cohorts whose sums the first run opened count in this one
    known = file.read(rules, np.random.default_rng()) if task.rounds else None
    domain = (PaperDomainSums if paper else DomainSums)(party, keys, standings, rules, patience, known, file.write)
    domain.transcript.update(task)
    if known is None:
        domain.choose(domain.there, everybody=True)  # nobody who misses the first sum takes part later
    return OpenDomain(task, schema_of(task.names, task.categories, task.origins), domain, membership, file)


def receive_offers(
    party: Party, credentials: Credentials, users: Sequence[str], least: int, patience: float
) -> dict[str, UserOffer]:
    """Receive the users' keys; leave out users without keys that the authority certified."""
    offers = gather_sound(party, users, UserOffer, timeout=patience)
    for name in users:
        try:
            if name in offers:
                credentials.check(name, "user", offers[name].keys, name)
                continue
            logger.warning("%s begins without %s, which has sent no keys", party.name, name)
        except PeerProtocolError as error:
            logger.warning("%s: %s", party.name, error)
            del offers[name]
        party.leave_out(name)
    if len(offers) < least:
        raise RoundVoid(f"expected {least} users or more to come to the domain of {party.name}, got {len(offers)}")
    return offers


# ---------------------------------------------------------------- user


@dataclass(frozen=True, slots=True)
class JoinedUser:
    """A user's rows in everybody's columns and classes, the seed of their shares, and its part in sums."""

    task: Task
    rows: LabelledRows
    seed: bytes
    sums: UserSums


def join_domain(inputs: RoleInput[FedXGB], edge: str) -> JoinedUser:
    """Send the edge server certified keys, receive the task, and bring own rows to its columns and classes."""
    party, name = inputs.party, inputs.party.name
    sums_as = PaperUserSums if paper_mode(inputs.options) else UserSums
    credentials = Credentials(party, authority_of(inputs.roles), "user")
    party.send(edge, UserOffer(credentials.certified, activity=1.0, stability=1.0))  # neither is measured here
    task = receive_task(inputs, edge, credentials)
    schema = schema_of(task.names, task.categories, task.origins)
    rows = common_rows(inputs.rows, schema, inputs.classes, task.classes, name)
    printed = printed_rows([rows], task.classes)
    # holders of shares know a user's rows again by their shares, which depend on this seed
    seed = seed_of_rows(inputs.keeper, name, task.model_id, printed, resumed=task.rounds > 0)
    sums = sums_as(party, edge, credentials, credentials.seed_with(inputs.roles.active, task.server), inputs.absence)
    sums.transcript.update(task)
    return JoinedUser(task, rows, seed, sums)
