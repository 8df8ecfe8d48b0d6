"""What the active party does in every system split by column: agree on terms, grow trees, have all keep checkpoints.

A system's role program uses it like this::

    training = open_training(inputs)
    ...  # set up sources of sums
    for a_round in boosting_of(inputs, training, sources):
        ...  # grow trees
    finish(inputs.party)
    return training.part
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec

from treaty.errors import ConfigError
from treaty.messaging.agreement import Term, agree
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message, ModelId
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.system import CheckpointReceipt, CheckpointRequest
from treaty.systems.pooled.training import Training, begin
from treaty.systems.system import PartySpec, RoleInput, Roles
from treaty.systems.vertical.decisions import Finish, decided_by_all
from treaty.trees.boosting import Boosting, EvalSet, RoundState
from treaty.trees.columns import SumsSource
from treaty.trees.splits import SplitRules


class Start(Message):
    """The model's id; each system's set-up message is a subclass.

    `resumed` is set for a resumed training, and `records` says how many of the passive party's records (splits of its
    own columns) the kept `rounds` use.
    """

    leakage: ClassVar = MessageLeakage("the model's number; how many of its splits kept rounds use", "control")

    model_id: ModelId
    resumed: bool
    records: Annotated[int, msgspec.Meta(ge=0)]
    rounds: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class BoostingBegins:
    """Event at the active party: trees will be grown from this state on."""

    part: ModelPart
    state: RoundState


def agree_on_terms(inputs: RoleInput) -> None:
    """Compare all options but the sampling seed, numbers of rows, and trees of a round, before all else is sent."""
    eval_rows = ", ".join(str(rows.table.n_rows) for rows in inputs.eval_sets)
    sizes: dict[str, Term] = {
        "training rows": inputs.rows.table.n_rows,
        "eval rows": eval_rows,
        "trees of a round": inputs.trees_a_round,
    }
    agree(inputs.party, {**inputs.public_terms, **sizes})


def open_training(inputs: RoleInput) -> Training:
    """Agree on terms, then begin or resume the training over all owners of columns, in the job's order.

    Raises ConfigError also where the labels have other classes than the job says: owners count on trees for those.
    """
    found = len(inputs.classes or ())
    if (found if found > 2 else 1) != inputs.trees_a_round:
        raise ConfigError(
            f"{inputs.party.name}: expected labels of {inputs.n_classes} classes, as the job says, got {found}: a "
            "round has a tree for each, which owners of columns count; name "
            f"classes = {max(found, 2)} in everybody's job file",
            public="its labels have another number of classes than the job says; `classes` is 2 where it is left out",
        )
    agree_on_terms(inputs)
    return begin(inputs, inputs.party.name, tuple(inputs.roles.owners))


def start_of(training: Training, peer: str) -> tuple[str, bool, int, int]:
    """Return the fields of `Start` for one of the passive parties."""
    return training.part.model_id, training.resume is not None, training.records[peer], training.forest.rounds


def boosting_of(
    inputs: RoleInput, training: Training, sources: Sequence[SumsSource], rules: SplitRules | None = None
) -> Boosting:
    """Return the training's rounds over `sources`, those of all owners in the job's order.

    All owners decide eval rows. After a round every passive party is asked to keep a checkpoint, where one is due.
    `rules` are given where sums have another fixed point than the objective's.
    """
    party, data, keeper = inputs.party, inputs.rows, inputs.keeper
    part, forest = training.part, training.forest

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
        eval_sets=[
            EvalSet(rows.name, rows.y, rows.weight, decided_by_all(party, part, rows.table, number, inputs.threads))
            for number, rows in enumerate(inputs.eval_sets)
        ],
        on_round=on_round, resume=training.resume, threads=inputs.threads,
    )  # fmt: skip
    inputs.observers.event(BoostingBegins(part, boosting.state))
    return boosting


def finish(party: Party) -> None:
    """Tell all passive parties that training is over."""
    for peer in party.peers:
        party.send(peer, Finish())


# ----------------- roles in systems split by column: the active party has the labels, all others with rows are passive


def roles_by_column(
    places: Mapping[str, PartySpec], active: str, options: SystemOptions, *, helper: str | None = None
) -> Roles:
    """Give every party its role; a `helper` without rows keeps the role that the job names for it.

    Raises ConfigError where the job names a role or edge server for any other party, where fewer than two parties have
    rows, and where a party other than the helper has none.
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
    """Return the passive parties of sealed sums, to each of them: their keys pass through the active party's hands."""
    passive = [owner for owner in roles.owners if owner != roles.active]
    return passive if options.ciphers.sealed and name in passive and len(passive) > 1 else []
