"""FedXGB with `epsilon_total`: trees are drawn at random, and all users' sums of their leaves are opened under noise.

The steps are those of `secboost`, but for these:

* Bins are searched with noisy counts (`data.noisy_quantiles`). The server draws the trees of a round; users take their
  own rows down, and add up grad and hess by leaf (`horizontal.random_trees`). One sum is opened for a round.
* Every user adds noise for the case that a third of its domain is lost; what is too much is removed from the domain's
  sum (`privacy.surplus_noise`). Each domain's noise is of sigma / sqrt(domains). An edge server that opens no sum sends
  its domain's noise alone.
* Sums may differ by one user (`cohorts.AnyCohorts`), so that a lost user is back with the next round. Users may come
  late: their edge server sends them what they have missed, and lets the server know their keys.

The noise holds against the server with one user of each domain. With an edge server's help the server sees the sum of
that domain alone, under its part of the noise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from treaty.crypto.sharing.secure_aggregation import Round
from treaty.data.noisy_quantiles import SearchNoise
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.messages import Message, encode
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.privacy.discrete_gaussian import discrete_gaussian
from treaty.privacy.ledger import model_job
from treaty.privacy.surplus_noise import MOST_PARTS, draw_noise, least_share, removable_noise
from treaty.systems.fedxgb.cohorts import LEAST
from treaty.systems.fedxgb.conversation import Instructions, JoinedUser, OpenDomain, grow_all
from treaty.systems.fedxgb.domain import Credentials, authority_of, certified, gather_sound, send_each_or_leave_out
from treaty.systems.fedxgb.messages import Attendance, Call, CertifiedKeys, Task, TrainingEnd, UserOffer
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.roles import domains
from treaty.systems.fedxgb.rows import CrowdMetrics
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, UserSums
from treaty.systems.horizontal import quantiles
from treaty.systems.horizontal.held_out import HeldOutRequest, chosen, divided
from treaty.systems.horizontal.noisy_rounds import LeafMember, LeafSender, RandomStep, random_round
from treaty.systems.horizontal.own_rows import Draws, OwnRows, new_part, rounds_of
from treaty.systems.horizontal.random_trees import LeafNoise, row_norm
from treaty.systems.horizontal.rows import OwnLabels, no_rows, schema_of
from treaty.systems.horizontal.sum_noise import SumNoise, looks, pay, plan_noise
from treaty.systems.pooled.constraints import constraints_of
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.histograms import width_of
from treaty.trees.objectives import Objective

logger = logging.getLogger(__name__)

# Users of a domain who may tell the server their noise
MAY_HELP = LEAST - 2
# Counts are multiplied by it: many users' parts of their noise are finer than whole rows
_COUNT_UNIT = 1 << 16


@dataclass(frozen=True, slots=True)
class CrowdNoise:
    """The noise of a training with so many `domains`; `rows` is the most of a user's that count, None: all."""

    whole: SumNoise
    leaves: LeafNoise
    objective: Objective
    domains: int
    rows: int | None
    norm: float

    @classmethod
    def plan(cls, inputs: RoleInput[FedXGB], task: Task) -> CrowdNoise | None:
        """Plan a training's noise, None without any; ConfigError if it is out of reach."""
        options, common, schema = inputs.options, inputs.common, schema_of(task.names, task.categories, task.origins)
        if not options.adds_noise:
            return None
        sizes, rows = [len(users) for users in domains(inputs.roles).values()], options.user_rows
        honest = len(sizes) * least_share(max(sizes))
        whole = plan_noise(options, common, schema, task.classes, honest=honest, unit=_COUNT_UNIT, rows=rows)
        objective = OwnLabels(inputs, no_rows(schema), task.classes, inputs.roles.active).given
        one = row_norm(objective.n_outputs, classes=task.classes is not None, fractional_bits=common.fractional_bits)
        norm = (rows or 1) * one * math.sqrt(common.num_parallel_tree)
        assert whole.leaves is not None
        return cls(whole, whole.leaves, objective, len(sizes), rows, norm)

    def deviations(self, asked: Message, length: int) -> Floats:
        """Return the standard deviations of a domain's noise on the vector that `asked` asks for, (length,)."""
        if isinstance(asked, RandomStep):
            return self.leaves.deviations(length, self.objective) / math.sqrt(self.domains)
        of = {
            quantiles.Count: self.whole.opening,
            quantiles.ProbeRequest: self.whole.search,
            HeldOutRequest: self.whole.scores,
        }
        return np.full(length, of[type(asked)] / math.sqrt(self.domains))

    @property
    def of_search(self) -> SearchNoise:
        """The search as all see it; noise is added as a user's vector goes out (`UserSums.give`)."""
        return SearchNoise(np.asarray, np.asarray, self.whole.search / _COUNT_UNIT)

    def counted(self, rows: LabelledRows) -> LabelledRows:
        """Return the rows of a user that are counted, drawn anew if it has too many."""
        n_rows = len(rows.y)
        if self.rows is None or n_rows <= self.rows:
            return rows
        return chosen(rows, np.random.default_rng().permutation(n_rows) < self.rows)

    def limited(self, sums: Integers) -> Integers:
        """Return a user's sums of leaves, scaled down if they are longer than its part of a sum may be."""
        if self.rows is None:
            return sums
        units = np.tile(self.leaves.units(self.objective), len(sums) // 2)
        length = float(np.linalg.norm(sums / units))
        # towards zero, which makes no vector longer
        return sums if length <= self.norm else np.trunc(sums * (self.norm / length)).astype(np.int64)


# ---------------------------------------------------------------- sums: noise that survives lost users, any cohort


class NoisyDomainSums(DomainSums):
    """An edge server's part; `deviations` returns those of the noise on the domain's next sum, float64 (length,)."""

    surplus_parts = MOST_PARTS
    deviations: Callable[[int], Floats]

    def _attempt(self, this_round: Round, call: Call) -> tuple[Integers, list[str]]:
        setup = self._begin(this_round, call)
        opened, users = self.open_sum(this_round, setup.aggregator, setup.sealed)
        sigma, removed = self.deviations(this_round.length), this_round.removed(len(users))
        for secret in setup.aggregator.surplus.values():
            opened -= removable_noise(sigma, this_round.counts, MAY_HELP, removed, secret)
        return opened, users

    def _nothing(self, length: int) -> Integers:
        # other domains' noise is not enough for all
        return discrete_gaussian(self.deviations(length))


class NoisyUserSums(UserSums):
    """A user's part, with the same `deviations`."""

    surplus_parts = MOST_PARTS
    deviations: Callable[[int], Floats]

    def permit(self, survivors: Sequence[str]) -> None:
        """Agree to any cohort: noise protects each user, or each row."""

    def _outgoing(self, values: Integers, this_round: Round) -> tuple[Integers, list[bytes]]:
        # anew for each attempt: two sums under the same noise would show their difference
        noise, secret = draw_noise(self.deviations(len(values)), this_round.counts, MAY_HELP)
        return values + noise, secret


class NoisyCrowd(Crowd):
    """All users, also those who come late; `homes` has the edge server of each user of the job."""

    def __init__(self, homes: Mapping[str, str], party: Party, credentials: Credentials, *given: Any) -> None:
        super().__init__(party, credentials, *given)
        self._homes, self._credentials = homes, credentials

    def _let_in(self, edge: str, joined: Mapping[str, CertifiedKeys]) -> None:
        for name, keys in joined.items():
            if self._homes.get(name) != edge or name in self._seeds:
                raise PeerProtocolError(edge, f"expected users of {edge} who came late", at="SurvivorReport")
            self._credentials.check(name, "user", keys, edge)
            self._seeds[name] = self._credentials.seed_with(name, keys)
            self._domains[edge].add(name)


# ---------------------------------------------------------------- server


def lead(
    inputs: RoleInput[FedXGB],
    crowd: Crowd,
    task: Task,
    noise: CrowdNoise,
    evals: Sequence[LabelledRows],
    column_share: float,
) -> ModelPart:
    """Search for bins and grow trees as the server; return the model, with a warning that of fewer rounds."""
    inputs = replace(inputs, common=msgspec.structs.replace(inputs.common, colsample_bytree=column_share))
    common, classes, schema = inputs.common, inputs.classes, inputs.rows.table.schema
    counts = _Counts(crowd)
    found = quantiles.lead_search(inputs, counts, schema, classes, None, noise.of_search)
    crowd.settle()
    inputs.party.round += 1
    spent, bins = str(noise.whole.budget), encode(found.message)
    part = new_part(inputs, task.model_id, schema, classes, found.objective, spent, bins)
    own = OwnRows.of(inputs, no_rows(schema), part, found.bins, Draws.fresh(inputs))
    steps = LeafSender(crowd, width_of(found.bins.offsets))
    rules = common.rules(found.objective, constraints_of(common, schema))
    back = None
    if inputs.options.holds_out_rows:
        cells, sigma = own.cells(inputs, noise.whole), noise.whole.scores / _COUNT_UNIT
        back = CrowdMetrics(counts, cells, looks(inputs.options, common), None, steps.flush, sigma)
    # a sum that was asked for is not asked for again
    grow = partial(random_round, inputs, crowd, steps, own, rules, noise.leaves, found.n_rows)
    grow_all(rounds_of(inputs, part, back, evals), grow, iter(()))
    steps.flush()
    crowd.broadcast(TrainingEnd())
    inputs.party.send(authority_of(inputs.roles), TrainingEnd())
    part.held_out = None if back is None else back.result(own.forest.rounds)
    return part


class _Counts:
    """Sums of all users' counts, which are sent in units."""

    def __init__(self, crowd: Crowd) -> None:
        self.summed, self.broadcast, self._total = crowd.summed, crowd.broadcast, crowd.total

    def total(self, length: int, own: Integers | None = None) -> Integers:
        return np.rint(self._total(length) / _COUNT_UNIT).astype(np.int64)


# ---------------------------------------------------------------- edge server


class LateUsers:
    """Users of a domain who may come while trees grow, and all messages that they have missed, by round."""

    def __init__(self, inputs: RoleInput[FedXGB], here: OpenDomain, patience: float) -> None:
        self._party, self._here, self._patience = inputs.party, here, patience
        self._awaited = [name for name in domains(inputs.roles)[inputs.party.name] if name not in here.sums.there]
        self._missed: list[tuple[int, Message]] = []

    def note(self, message: Message) -> None:
        """Keep a message to all users for those who come later."""
        self._missed.append((self._party.round, message))

    def let_in(self) -> None:
        """Let users in who have come by now, with certified keys."""
        party, here = self._party, self._here
        offers = _at_round(party, 0, partial(gather_sound, party, self._awaited, UserOffer, timeout=0.0))
        self._awaited = [name for name in self._awaited if name in party.peers and name not in offers]
        came = certified(party, here.credentials, offers)
        if not came:
            return
        logger.info("%s lets in %s, who came late", party.name, ", ".join(came))
        others = list(here.sums.there)
        tasks = dict.fromkeys(came, here.task)
        _at_round(party, 0, partial(send_each_or_leave_out, party, tasks, self._patience))
        came = {name: keys for name, keys in came.items() if name in party.peers}
        here.sums.add(came)
        here.sums.introduce(others)
        _at_round(party, 0, partial(here.sums.introduce, list(came)))
        for number, message in self._missed:
            _at_round(party, number, partial(here.sums.send, dict.fromkeys(came, message)))


def _at_round(party: Party, number: int, act: Any) -> Any:
    """Do something as in an earlier round: a user who comes late counts rounds by what it receives."""
    party.round, now = number, party.round
    try:
        return act()
    finally:
        party.round = now


# ---------------------------------------------------------------- user


def follow(inputs: RoleInput[FedXGB], joined: JoinedUser, instructions: Instructions, noise: CrowdNoise) -> Floats:
    """Take part as a user; return the model's margins of the rows trained on, float64 (n_outputs, n_rows)."""
    party, common, task, edge = inputs.party, inputs.common, joined.task, instructions.edge
    spent = pay(noise.whole, inputs.store, party.name, model_job(party.job, task.model_id), inputs.epsilon_limits)
    schema, sums = joined.rows.table.schema, joined.sums
    assert isinstance(sums, NoisyUserSums)
    rows, kept_back = divided(joined.rows, inputs.options.validation_fraction, party.name, noisy=True)
    labels = OwnLabels(inputs, rows, task.classes, edge)
    answers = quantiles.SearchAnswers(inputs, noise.counted(rows), labels, edge, noise.of_search)
    while not isinstance(asked := instructions.next(), quantiles.CommonBins):
        instructions.vector = partial(_scaled, answers.vector(asked))
        sums.deviations = partial(noise.deviations, asked)
    bins = quantiles.unpack_bins(asked, schema, common.bin_limits, edge)
    objective = quantiles.agreed_objective(asked, labels.starting(asked.start, "CommonBins"), noise=True, peer=edge)
    part = new_part(inputs, task.model_id, schema, task.classes, objective, spent)
    own = OwnRows.of(inputs, rows, part, bins, Draws.fresh(inputs))
    # noise is added as the counts go out
    back = None if kept_back is None else own.held_back(inputs, kept_back, replace(noise.whole, scores=0.0))
    trees = LeafMember(own, edge, common, noise.leaves)
    inputs.observers.round_finished(0, None)
    while not isinstance(step := instructions.next(), TrainingEnd):
        if isinstance(step, HeldOutRequest):
            assert back is not None  # by the order of messages
            instructions.vector = partial(_scaled, partial(np.asarray, back.answer(step, edge)))
        else:
            assert isinstance(step, RandomStep)
            given = trees.take(step)
            instructions.vector = partial(noise.limited, np.empty(0, np.int64) if given is None else given)
            sums.awake = True
            # also for what follows a round, such as counts of held-out rows
            if not sums.absent("call"):
                party.send(edge, Attendance())
            inputs.observers.round_finished(own.forest.rounds, None)
        sums.deviations = partial(noise.deviations, step)
    return own.shard.margins


def _scaled(counts: Any) -> Integers:
    return np.asarray(counts() * _COUNT_UNIT, np.int64)
