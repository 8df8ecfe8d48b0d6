"""What both roles do in every training on columns of several parties: agree, keep checkpoints, end together.

An active party's program opens a training (`open_training`), sets up sources of sums, grows the trees of each round of
`boosting_of`, and calls `finish`. A passive party's calls `agree_on_terms`, sends its layout, receives the system's
`Start`, and answers the active party by `Follower.follow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.exchanges import Term, agree
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models.checkpoints import Checkpoint, checkpoint_of, checkpoint_of_model, fingerprint
from treaty.models.trees import ModelPart, keep_records
from treaty.privacy.randomised_response import RandomisedRows
from treaty.systems.observers import CheckpointReached
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.constraints import own_constraints
from treaty.systems.pooled.continuing import CheckpointReceipt, CheckpointRequest, part_after
from treaty.systems.pooled.system import Training, begin
from treaty.systems.system import PartySpec, RoleInput, Roles
from treaty.systems.vertical.messages import ColumnConstraints, SplitRequest, Start
from treaty.systems.vertical.prediction import DecideRequest, Finish, RowSets, ask_all, decided_by_all, shown_rows
from treaty.trees.boosting import Boosting, EvalSet, RoundState
from treaty.trees.columns import SumsSource
from treaty.trees.constraints import Constraints
from treaty.trees.ensemble import SplitTable
from treaty.trees.splits import SplitRules


@dataclass(frozen=True, slots=True)
class BoostingBegins:
    """Event at the active party: trees will be grown from this state on."""

    part: ModelPart
    state: RoundState


def agree_on_terms(inputs: RoleInput) -> None:
    """Compare all options but the sampling seed, numbers of rows, and trees of a round, before all else is sent.

    A passive party then states the constraints on its columns, if the job has any.
    """
    eval_rows = ", ".join(str(rows.table.n_rows) for rows in inputs.eval_sets)
    sizes: dict[str, Term] = {
        "training rows": inputs.rows.table.n_rows,
        "eval rows": eval_rows,
        "trees of a round": inputs.trees_a_round,
        "earlier model": "none" if inputs.part is None else inputs.part.model_id,
    }
    agree(inputs.party, {**inputs.public_terms, **sizes})
    party, active = inputs.party, inputs.roles.active
    if inputs.common.constrained and party.name != active:
        schema = inputs.rows.table.schema
        stated = own_constraints(inputs.common, inputs.directions, schema, party.name, inputs.roles.owners)
        if getattr(getattr(inputs.options, "ciphers", None), "sealed", False):
            # it rejects own candidates itself, on shares: to the active party all columns are free and in all groups
            stated = np.zeros_like(stated[0]), np.ones_like(stated[1])
        party.send(active, ColumnConstraints(*map(Array.of, stated)))


def _stated_by(inputs: RoleInput, owner: str) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    """Return what is asked of the columns of an owner, as the active party: its own, or what a passive party states."""
    common, party = inputs.common, inputs.party
    if owner == party.name:
        return own_constraints(common, inputs.directions, inputs.rows.table.schema, owner, inputs.roles.owners)
    stated, what = party.receive(owner, ColumnConstraints), "ColumnConstraints"
    directions = view(stated.directions, np.int8, (None,), peer=owner, what=f"{what}.directions")
    shape = len(common.interaction_constraints or ()), len(directions)
    groups = view(stated.groups, np.bool_, shape, peer=owner, what=f"{what}.groups")
    if np.any((directions < -1) | (directions > 1)) or (directions.any() and not common.monotone_constraints):
        raise PeerProtocolError(owner, "expected directions -1, 0 and 1, as the job has", at=what)
    return directions, groups


def open_training(inputs: RoleInput) -> Training:
    """Agree on terms, then begin or resume the training over all owners of columns, in the job's order.

    Raises ConfigError also if the labels have other classes than the job says, as a round has a tree for each class.
    """
    found = len(inputs.classes or ())
    if (found if found > 2 else 1) != inputs.n_outputs:
        raise ConfigError(
            f"{inputs.party.name}: expected labels of {inputs.n_classes} classes, as the job says, got {found}: a "
            "round has a tree for each, which owners of columns count; name "
            f'classes = {max(found, 2)} in every party\'s job file, or task = "regression" to predict numbers',
            public="its labels have another number of classes than the job says; `classes` is 2 where it is left out",
        )
    agree_on_terms(inputs)
    training = begin(inputs, inputs.party.name, tuple(inputs.roles.owners))
    if not inputs.common.constrained:
        return training
    return replace(training, constraints=Constraints.over([_stated_by(inputs, name) for name in inputs.roles.owners]))


def start_of(training: Training, peer: str) -> tuple[str, bool, int, int]:
    """Return the fields of `Start` for one of the passive parties."""
    return training.part.model_id, training.resume is not None, training.records[peer], training.forest.rounds


def boosting_of(
    inputs: RoleInput, training: Training, sources: Sequence[SumsSource], rules: SplitRules | None = None
) -> Boosting:
    """Return the training's rounds over `sources`, those of all owners in the job's order.

    All owners decide eval rows. After a round every passive party is asked to keep a checkpoint, if one is due; the
    active party writes its own only once all others have theirs. `rules` are given where sums have another fixed point
    than the objective's.
    """
    party, data, keeper = inputs.party, inputs.rows, inputs.keeper
    part, forest, threads = training.part, training.forest, inputs.threads
    last = len(inputs.eval_sets)  # training rows come after the eval sets
    if training.constraints is not None:
        widths = zip(inputs.roles.owners, np.diff(training.constraints.first), sources, strict=True)
        for name in [name for name, width, source in widths if width != len(source.categorical)]:
            raise PeerProtocolError(name, "expected directions of all its columns", at="ColumnConstraints")

    def on_round(state: RoundState) -> None:
        if keeper is not None and keeper.due:
            began = time.perf_counter()
            for peer in party.peers:
                party.send(peer, CheckpointRequest(state.rounds))
            for peer in party.peers:
                party.receive(peer, CheckpointReceipt)
            training.keep(inputs, state, began)
        inputs.observers.round_finished(state.rounds, part)

    inputs.observers.round_finished(forest.rounds, part)
    boosting = Boosting(
        data.y, data.weight, forest, rules or inputs.common.rules(forest.objective),
        inputs.common.plan(sum(len(source.categorical) for source in sources)),
        base_margin=data.base_margin,
        eval_sets=[
            EvalSet(
                rows.name, rows.y, rows.weight, decided_by_all(party, part, rows.table, number, threads),
                rows.base_margin,
            )
            for number, rows in enumerate(inputs.eval_sets)
        ],
        on_round=on_round, threads=threads,
        resume=training.state(inputs, decided_by_all(party, part, data.table, last, threads)),
        earlier=training.earlier(inputs, lambda trees: ask_all(party, part, trees, data.table, last, threads)),
    )  # fmt: skip
    inputs.observers.event(BoostingBegins(part, boosting.state))
    return boosting


def finish(party: Party) -> None:
    """End the training at all passive parties."""
    for peer in party.peers:
        party.send(peer, Finish())


# ----------------- roles in systems split by column: the active party has the labels, all others with rows are passive


def roles_by_column(
    places: Mapping[str, PartySpec], active: str, options: SystemOptions, *, helper: str | None = None
) -> Roles:
    """Give every party its role; a `helper` without rows keeps the role that the job names for it.

    Raises ConfigError if the job names a role or edge server for any other party, if fewer than two parties have rows,
    and if a party other than the helper has none.
    """
    owners = [name for name in places if name != helper]
    wishing = [name for name in owners if places[name].role or places[name].edge]
    missing = [name for name in owners if not places[name].has_rows]
    if wishing:
        raise ConfigError(
            f"expected no role and edge with protocol {options.system!r}, got them at {', '.join(wishing)}"
        )
    if active not in owners:
        raise ConfigError(f"expected active to be one of {', '.join(owners)}, got {active!r}")
    if len(owners) < 2:
        raise ConfigError(
            f"expected at least two parties with rows, got {', '.join(owners)}: one party's table is trained on under "
            "protocol 'pooled'"
        )
    if missing:
        raise ConfigError(f"expected rows at every party, got none at {', '.join(missing)}: name their tables")
    roles = {name: "active" if name == active else "passive" for name in owners}
    return Roles(active, {name: roles.get(name) or str(places[name].role) for name in places}, owners)


def fellow_owners(roles: Roles, options: Any, name: str) -> list[str]:
    """Return all passive parties to each of them where they share masks: their keys pass through the active party."""
    passive = [owner for owner in roles.owners if owner != roles.active]
    masks = options.ciphers.sealed or options.hides_decisions
    return passive if masks and name in passive and len(passive) > 1 else []


# --------------- how much the active party may ask of an owner of columns: no more than the options that both agreed to
#
# The owner itself counts trees, levels, nodes, splits and checkpoints; `prediction.RowSets` counts how often rows are
# decided. Which message may come when is in each system's table of messages.


def grown_a_round(inputs: RoleInput) -> int:
    """Return how many trees are grown in a round: of multi-output trees one for all outputs."""
    return inputs.trees_a_round // (inputs.n_outputs if inputs.common.multi_output else 1)


class _Limits:
    def __init__(self, active: str) -> None:
        self._active = active

    def _check(self, fine: bool, expected: str) -> None:
        if not fine:
            raise PeerProtocolError(self._active, f"expected {expected} - from {self._active}")


class TrainingLimits(_Limits):
    """How many trees, splits and checkpoints an owner of columns takes part in.

    A round has a tree for each class where there are more than two. `kept_rounds` are those that a resumed training
    begins with; `alone_rounds`, the first ones, are grown without this party.
    """

    def __init__(self, active: str, inputs: RoleInput, kept_rounds: int, alone_rounds: int = 0) -> None:
        common = inputs.common
        super().__init__(active)
        self._rounds, self._trees_a_round = common.most_rounds, grown_a_round(inputs)
        self._check(kept_rounds <= self._rounds, f"at most {self._rounds} rounds kept")
        self._begun_with = self._kept = kept_rounds
        # rounds that are kept, or grown by the active party alone, do not count
        self._most_trees = max(0, self._rounds - max(kept_rounds, alone_rounds)) * self._trees_a_round
        # each leaf has at least `fewest_rows` rows
        leaves = max(1, inputs.rows.table.n_rows // common.fewest_rows)
        self._splits_a_tree = min(common.max_leaves or 1 << common.depth, leaves) - 1
        self._trees = self._splits = 0

    def tree(self) -> None:
        """Count a tree that begins."""
        self._trees += 1
        self._check(self._trees <= self._most_trees, f"at most {self._most_trees} trees, as the job's options say")

    def checkpoint(self, rounds: int) -> None:
        """Count a checkpoint after `rounds` rounds; there is at most one for a round."""
        self._check(self._kept < rounds <= self._rounds, f"a checkpoint a round, of {self._rounds} at most")
        self._kept = rounds

    def chosen(self, splits: int, rounds: int) -> None:
        """Count splits chosen in trees of which the last belongs to the round after `rounds` finished ones."""
        self._check(splits > 0 and 0 <= rounds <= self._rounds, f"splits of at most {self._rounds} rounds")
        self._splits += splits
        grown = min(rounds + 1, self._rounds) - self._begun_with
        most = max(0, grown) * self._trees_a_round * self._splits_a_tree
        self._check(self._splits <= most, f"at most {most} splits in the trees so far, as the job's options say")


class TreeLimits(_Limits):
    """How much the active party may ask of an owner of columns within a tree.

    Children have `min_child_samples` rows at least, so a node to be split has at least twice as many. A tree with
    `max_leaves` may have a level for each of its splits, and as many nodes asked about in all of them. Nodes count once
    for each of the tree's `outputs`.
    """

    def __init__(self, active: str, rules: SplitRules, outputs: int = 1) -> None:
        super().__init__(active)
        self._outputs = outputs
        self._fewest_rows, self._leaves = rules.min_child_samples, rules.max_leaves
        self._max_levels = rules.most_asked if rules.max_leaves else rules.max_depth

    def start(self, columns: NDArray[np.int32], trees: int = 1, spare: int = 0) -> None:
        """Begin with a tree, or with `trees` that grow together; `spare` is as in `SumsServer`."""
        self._trees, self._spare = trees, trees * spare
        self._columns, self._levels, self._nodes, self._last_row = columns, 0, 0, -1
        self._asked, self._split = 0, 0

    def sampled(self, rows: NDArray[np.int32]) -> None:
        """Record some rows of the tree's sample, ascending; reject those that are not beyond the ones before."""
        if len(rows):
            self._check(rows[0] > self._last_row, "rows of a sample that ascend from message to message")
            self._last_row = int(rows[-1])

    def asked(self, nodes: int) -> None:
        """Reject a piece of a request for sums of more nodes than the level may have, before it costs anything."""
        self._check(self._levels < self._max_levels, f"{self._max_levels} levels in a tree at most")
        most = self._most
        self._check(self._nodes + nodes <= most + self._spare, f"1 to {most} nodes of this level")

    def sums(self, nodes: int, *, last: bool) -> None:
        """Record a request for sums of `nodes` nodes of the level, `last` with its last ones; reject too many."""
        self._check(self._levels < self._max_levels, f"{self._max_levels} levels in a tree at most")
        self._nodes += nodes
        self._check(0 < nodes and self._nodes <= self._most + self._spare, f"1 to {self._most} nodes of this level")
        self._levels += last
        self._asked += self._nodes - self._spare if last else 0
        self._nodes = 0 if last else self._nodes

    @property
    def _most(self) -> int:
        """The most nodes that may be asked about in this level."""
        if self._leaves:
            return self._outputs * self._max_levels - self._asked
        return self._outputs * self._trees << self._levels

    def split(self, request: SplitRequest) -> None:
        """Reject splits of other columns than the tree's, or of too many nodes."""
        features = view(request.features, np.int32, (None,), peer=self._active, what="SplitRequest.features")
        most = self._leaves - 1 - self._split if self._leaves else self._trees << (self._levels - 1)
        self._check(len(features) <= most, "no more splits than the level may have nodes")
        self._split += len(features)
        self._check(bool(np.isin(features, self._columns).all()), "splits of the tree's columns")
        self._check(len(features) > 0, "nodes that are split")

    def node_sizes(self, sizes: NDArray[np.int64]) -> None:
        """Reject nodes to be split with too few rows."""
        self._check(bool(np.all(sizes >= 2 * self._fewest_rows)), f"nodes of {2 * self._fewest_rows} rows at least")


# ---------------------------------------------------------------- passive

Answer = Message | Iterable[Message] | None
# The function for each class of message: it takes the message and returns the answer to send, or None
Handlers = Mapping[type[Message], Callable[[Any], Answer]]


def between_trees(state: str) -> dict[type[Message], str | tuple[str, str]]:
    """Return what every order of messages allows between trees: to decide rows and keep checkpoints, or to finish."""
    return {DecideRequest: state, CheckpointRequest: state, Finish: "finished"}


class Follower:
    """A passive party once it has the active one's `start`; raises ConfigError if its checkpoint is another's.

    `part` is new, or resumed and then cut to the records of the rounds that the active party kept. `limits` count what
    the active party asks for. `released` are training rows as they were released under noise.
    """

    def __init__(self, inputs: RoleInput, start: Start, released: RandomisedRows | None = None) -> None:
        (self._active,), self._inputs, table = inputs.party.peers, inputs, inputs.rows.table
        # trees that are refreshed are not grown
        alone = inputs.common.most_rounds * inputs.common.refreshes or getattr(inputs.options, "rl_trees", None) or 0
        self.limits = TrainingLimits(self._active, inputs, start.rounds, alone)
        if start.resumed:
            self.part = self._resumed(start)
        elif inputs.part is not None:
            self.part = part_after(inputs, inputs.party.name, start.model_id, start.records)
        else:
            self.part = ModelPart(
                model_id=start.model_id, party=inputs.party.name, schema=table.schema, splits=SplitTable(),
                trees_a_round=inputs.n_outputs,
            )  # fmt: skip
        # row sets that `DecideRequest` numbers: eval sets, and the training rows after them, with refit or, at the
        # splits of an earlier model alone, to go on from that
        refit = bool(getattr(inputs.options, "refit", None))
        goes_on = inputs.part is not None and not start.resumed
        asked = [*inputs.eval_sets, *([inputs.rows] if refit or goes_on else [])]
        self._known = start.records if goes_on else None
        self._row_sets = RowSets(self._active, [shown_rows(released, rows) for rows in asked])
        self._first, self._trees = start.rounds, 0  # rounds that were there, trees since

    def report(self, rounds: int | None = None) -> None:
        """Report how many rounds are done; by default those of finished trees."""
        done = self._first + self._trees // grown_a_round(self._inputs) if rounds is None else rounds
        self._inputs.observers.round_finished(done, self.part)

    def next_tree(self) -> None:
        """Report the rounds so far; from here on the party's round is the new tree's number, from 1."""
        self.report()
        self._trees += 1
        self._inputs.party.round = self._trees

    def follow(self, order: MessageOrder, handlers: Handlers) -> ModelPart:
        """Answer the active party until `Finish`; it, `DecideRequest` and `CheckpointRequest` have handlers already."""
        splits, threads = self.part.splits, self._inputs.threads
        handlers = {
            DecideRequest: lambda request: self._row_sets.decide(
                request, splits, threads, self._known if request.rows == len(self._inputs.eval_sets) else None
            ),
            CheckpointRequest: self.keep,
            Finish: lambda _: self.report(),
            **handlers,
        }
        while order.allowed:
            self._answer(order, handlers)
        return self.part

    def keep(self, request: CheckpointRequest) -> CheckpointReceipt:
        """Report this party's checkpoint, which its runner writes if it keeps any."""
        self.limits.checkpoint(request.rounds)
        given = self._inputs.given

        def current() -> Checkpoint:
            return checkpoint_of(self.part, given, self._fingerprint)

        self._inputs.observers.event(CheckpointReached(current))
        return CheckpointReceipt()

    @cached_property
    def _fingerprint(self) -> bytes:
        tables = [rows.table for rows in (self._inputs.rows, *self._inputs.eval_sets)]
        earlier = self._inputs.part
        return fingerprint([(table, ()) for table in tables], [] if earlier is None else [earlier.model_id])

    def _answer(self, order: MessageOrder, handlers: Handlers) -> None:
        # a method of its own, so that no message, perhaps of many ciphertexts, is held while the next is awaited
        party, active = self._inputs.party, self._active
        message = party.receive(active, *order.allowed)
        order.take(message)
        answer = handlers[type(message)](message)
        for part in [answer] if isinstance(answer, Message) else answer or []:
            party.send(active, part)

    def _resumed(self, start: Start) -> ModelPart:
        inputs, model_id = self._inputs, start.model_id
        found = checkpoint_of_model(inputs.keeper, model_id, start.records, "splits", lambda of: len(of.part.splits))
        found.check(inputs.given, inputs.may_change, (), self._fingerprint)
        keep_records(found.part.splits, start.records)
        return found.part
