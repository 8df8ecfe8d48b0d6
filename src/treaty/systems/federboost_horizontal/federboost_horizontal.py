"""FederBoost on rows: participants hold rows of the same columns, and a leader grows trees on sums of their histograms.

Tian, Zhang, Hou, Lyu, Zhang, Liu, Ren, "FederBoost: Private Federated Learning for GBDT" (arXiv 2011.02796; IEEE TDSC).

Roles: participants with rows, all columns and labels; a leader, which is one of them or brings no data. Output: the
whole model, the same at all of them.

==================  =============  ===================================================  ===============================
message             from -> to     content                                              protection
==================  =============  ===================================================  ===============================
`RowsDescription`   member ->      names and categories of columns, classes; SHA-256    TLS
                                   of bins kept of earlier trainings (`kept_bins`)
`ModelBegin`        leader -> all  those of all, model id; which bins are used again    TLS
keys                both ways      see `horizontal.members`                             signatures, vouching
sums                member ->      rows, labels, values below probes (`horizontal.      masks; noise, if asked for
                                   quantiles`); bin sums of grad, hess and rows of a
                                   level's nodes
`Count`,            leader -> all  the search for bins begins; probes; the bins         TLS
`LabelUnits`,                      (none of them where bins are used again); labels
`TrainingStart`,                   are summed, and where trees start (`horizontal.
`ProbeRequest`,                    start`)
`CommonBins`
`TreeStep`          leader -> all  splits of the last level or values of finished       TLS
                                   trees, and which nodes' sums come next
`CheckpointRequest`, `CheckpointReceipt`      both ways      write a checkpoint; it is written                    TLS
`ModelEnd`          leader -> all  how many rounds the model has                        TLS
==================  =============  ===================================================  ===============================

One sum per level serves all nodes, features, bins and classes. Bins are searched for once: a later training on the same
rows, with other options of boosting perhaps, begins with the trees. Adversary: honest but curious, members and leader.
The leader with all members but one sees that one's histograms, whatever is done. Of a node smaller than
`min_child_samples` nothing enters the model; what the leader sees of it in sums is not hidden.

**Lost participants.** Masks cancel only if all vectors come. By default a lost one ends the job: checkpoints are kept,
and training resumes when everybody is back. With ``dropout="accept"`` sums are opened over those still there, and the
round's trees are restarted: from the sums before and after, the leader can tell the lost one's histograms. That is why
it must be asked for.

Deviations from the paper: masks are fresh for every vector (there, one pairwise secret serves twice); quantiles of all
features are sought at once, tie-aware; all bounds are checked before training; exported trees say nothing of covers.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from treaty.data.binning import Bins
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.process import stay_on_one_core
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.conversation import Table as OrderTable
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Message, encode_body
from treaty.messaging.party import Term, agree
from treaty.models.checkpoints import Checkpoint
from treaty.models.trees import ModelPart
from treaty.privacy.ledger import model_job
from treaty.systems.federboost_horizontal.noise import SumNoise, check_noise, pay, plan_noise
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.federboost_horizontal.setup import (
    KeptBins,
    agree_on_bins,
    agreed_bins,
    answer_search,
    bins_for_rows,
    chosen_bins,
    keep_bins,
    offered,
)
from treaty.systems.federboost_horizontal.trees import (
    Draws,
    OwnRows,
    TreeLeader,
    TreeMember,
    TreeStep,
    leaders_checkpoint,
    members_checkpoint,
    resume,
)
from treaty.systems.horizontal.members import Collector, Membership, SumRules, join
from treaty.systems.horizontal.quantiles import (
    CommonBins,
    Count,
    LabelUnits,
    OwnLabels,
    ProbeRequest,
    TrainingStart,
    agreed_objective,
    pack_bins,
    unpack_bins,
)
from treaty.systems.horizontal.rows import (
    ModelBegin,
    RowsDescription,
    all_classes,
    all_columns,
    checkpoint_with,
    common_rows,
    describe,
    printed_rows,
    schema_of,
)
from treaty.systems.pooled.system import CheckpointReceipt, CheckpointRequest
from treaty.systems.pooled.training import watched
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.boosting import Forest, RoundState, run_rounds
from treaty.trees.ensemble import SplitTable
from treaty.trees.objectives import Objective

logger = logging.getLogger(__name__)

_FEW_CELLS = 1 << 20  # of a participant's table: summing them takes less time than the messages about it


class ModelEnd(Message):
    """The model is finished; how many rounds it has."""

    leakage: ClassVar = MessageLeakage("how many rounds the model has", "control")

    rounds: Annotated[int, msgspec.Meta(ge=0)]


CONVERSATION: OrderTable = {
    "new": {Count: "counted", CommonBins: "rounds"},
    "counted": {LabelUnits: "labels", ProbeRequest: "search", Count: "counted", CommonBins: "rounds"},
    "labels": {TrainingStart: "search"},
    "search": {ProbeRequest: "search", Count: "counted", CommonBins: "rounds"},
    "resumed": {CommonBins: "rounds"},
    "rounds": {TreeStep: "rounds", CheckpointRequest: "rounds", ModelEnd: "finished"},
    "finished": {},
}
"""What the leader may tell a member when, once keys are agreed on; `TreeMember` checks what a `TreeStep` says."""


def may_be_two(options: FederBoostHorizontal) -> bool:
    """Whether two participants are allowed, each of whom can tell the other's histograms from the sum."""
    return options.mode == "paper" or options.epsilon_total is not None


def check_members(options: FederBoostHorizontal, members: Sequence[str]) -> None:
    """Refuse too few participants: a sum would show what one of them has, or none could be lost."""
    least = 2 if may_be_two(options) else 3
    if len(members) < least:
        raise ConfigError(
            f"expected {least} participants with data or more, got {len(members)}: "
            + (
                "of a sum of two each sees the other's part; add noise (epsilon_total), or allow it (mode='paper')"
                if len(members) > 1
                else "one participant's table is trained on under protocol 'pooled'"
            )
        )
    if options.dropout == "accept" and len(members) < 4:
        raise ConfigError(
            f'dropout="accept" goes on without a lost participant: expected 4 participants or more, got {len(members)}'
        )
    if options.dropout == "accept" and options.epsilon_total is not None:
        raise ConfigError(
            'dropout="accept" restarts trees after a loss, which would cost more than epsilon_total: leave out either'
        )


# ---------------------------------------------------------------- leader


def leader(inputs: RoleInput[FederBoostHorizontal]) -> ModelPart:
    """Train as the leader, connected with all other participants; return the whole model.

    The role's `data` is None where the leader brings no rows; `classes` are then those of its eval sets, which it alone
    watches. The first owner's columns are everybody's.

    Raises ConfigError when parties disagree on options, or are too few for a sum to hide anything; CryptoError or
    PeerError when a participant is lost, or sends what the protocol does not allow.
    """
    _meet(inputs)
    setup, found, kept = _begin(inputs)
    message, noise = setup.message, setup.noise
    told_first, rules = _told_first(inputs, message), _sum_rules(inputs.options)
    collector = Collector(inputs.party, inputs.roles.owners, inputs.vouching, told_first, rules)
    rows, watching = _leaders_rows(inputs, setup)
    printed = b"" if inputs.keeper is None else printed_rows([rows, *watching], message.classes)
    if kept is not None:
        own, told = _on_kept_bins(inputs, setup, rows, kept)
    else:
        if found is not None:
            own = resume(inputs, found, message.rounds or 0, rows, printed)
        else:
            own = _lead_search(inputs, collector, rows, setup)
        told = pack_bins(own.bins, own.forest.objective)
        collector.tell_all(told)
    _lead_rounds(inputs, collector, own, noise, watching, partial(_keep, inputs, own, told, printed))
    collector.tell_all(ModelEnd(own.forest.rounds))
    if noise.budget is not None and not any(np.any(tree.left >= 0) for tree in own.forest.trees):
        logger.warning("no split stood out from the noise: the model has none. Raise epsilon_total or lower max_bin")
    return own.part


def _begin(inputs: RoleInput[FederBoostHorizontal]) -> tuple[_ModelSetup, Checkpoint | None, KeptBins | None]:
    """Receive the participants' descriptions, pay for noise, and tell all which model begins or is resumed.

    Return the checkpoint to resume from, and the kept bins that a fresh training uses, if any.
    """
    party, members, data = inputs.party, inputs.roles.owners, inputs.data
    described = {name: party.receive(name, RowsDescription) for name in members if name != party.name}
    own_bins = bins_for_rows(inputs)
    if data is not None:
        described[party.name] = describe(data, inputs.classes, offered(own_bins))
        check_noise(inputs.options, data, inputs.classes)
    labels = all_classes(described)
    names, categories, origins = all_columns([described[name] for name in members])
    found = leaders_checkpoint(inputs.keeper, noisy=inputs.options.epsilon_total is not None)
    model_id = secrets.token_hex(16) if found is None else found.part.model_id
    rounds = None if found is None else min(found.rounds, inputs.common.n_estimators)
    message = ModelBegin(model_id, names, categories, labels, rounds, origins=origins)
    offers = {n: d.bins for n, d in described.items()}
    kept = None if found is not None else chosen_bins(inputs, own_bins, offers, message)
    setup = _set_up(inputs, message if kept is None else msgspec.structs.replace(message, bins=kept.digest))
    for peer in party.peers:
        party.send(peer, setup.message)
    return setup, found, kept


def _lead_search(inputs: RoleInput, collector: Collector, rows: LabelledRows, setup: _ModelSetup) -> OwnRows:
    """Search for bins, and keep them for later trainings; return a training without trees."""
    search = agree_on_bins(inputs, collector, rows, setup.message.classes, setup.noise)
    if set(collector.summed) == set(inputs.roles.owners):
        told = pack_bins(search.bins, search.objective)
        keep_bins(inputs, setup.message, told, all_rows=search.all_rows, spent=search.spent)
    return _fresh(inputs, setup, rows, search.bins, search.objective, setup.paid or search.spent)


def _leaders_rows(inputs: RoleInput, setup: _ModelSetup) -> tuple[LabelledRows, list[LabelledRows]]:
    """Return own rows, none where the leader brings none, and eval sets, in everybody's columns and classes."""
    name, schema, classes = inputs.party.name, setup.schema, setup.message.classes
    none = LabelledRows(Table(schema, [np.empty(0, np.float32)] * len(schema.names), 0), np.empty(0))
    rows = none if inputs.data is None else common_rows(inputs.data, schema, inputs.classes, classes, name)
    return rows, [common_rows(watched_rows, schema, inputs.classes, classes, name) for watched_rows in inputs.eval_sets]


def _lead_rounds(
    inputs: RoleInput,
    collector: Collector,
    own: OwnRows,
    noise: SumNoise,
    watching: Sequence[LabelledRows],
    keep: Callable[[int, float], None],
) -> None:
    """Grow the rounds that are missing; have everybody keep a checkpoint when one is due."""
    part, forest, common, keeper, progress = own.part, own.forest, inputs.common, inputs.keeper, inputs.progress
    objective = forest.objective
    rules = noise.rules(common.rules(objective), objective, common.most_bins)
    own_noise = None if inputs.data is None else partial(noise.on_trees, objective=objective)
    trees = TreeLeader(collector, own, rules, own_noise, common.colsample_bytree, inputs.threads, inputs.recording)

    def after_round(done: int) -> None:
        forest.clipped_rows = max(forest.clipped_rows, own.shard.clipped)
        if keeper is not None and keeper.due:
            began = time.perf_counter()
            trees.flush()
            collector.tell_all(CheckpointRequest(done))
            collector.hear_all(CheckpointReceipt)
            keep(done, began)
        if progress is not None:
            progress(done, part)

    if progress is not None:
        progress(forest.rounds, part)
    evals = [watched(rows, part.splits, inputs.threads) for rows in watching]
    run_rounds(
        trees.grow, forest, after_round, common.n_estimators, evals, common.early_stopping_rounds, common.metrics
    )
    trees.flush()


# ---------------------------------------------------------------- participant


def member(inputs: RoleInput[FederBoostHorizontal]) -> ModelPart:
    """Train as a participant other than the leader, with own rows, connected with the leader; return the whole model.

    Errors are as of `leader`; ConfigError also when there is no checkpoint of a training that the leader resumes.
    """
    _meet(inputs)
    rows, sums, setup, kept = _join(inputs)
    printed = b"" if inputs.keeper is None else printed_rows([rows], setup.message.classes)
    if kept is not None:
        order = MessageOrder(CONVERSATION, "rounds")
        own, told = _on_kept_bins(inputs, setup, rows, kept)
    elif setup.message.rounds is None:
        order = MessageOrder(CONVERSATION, "new")
        own, told = _search(inputs, sums, order, rows, setup)
    else:
        order = MessageOrder(CONVERSATION, "resumed")
        own, told = _resume_with_leader(inputs, sums, order, rows, setup.message, printed)
    _follow_rounds(inputs, sums, order, own, setup.noise, partial(_keep, inputs, own, told, printed))
    own.forest.clipped_rows = own.shard.clipped
    return own.part


def _join(inputs: RoleInput[FederBoostHorizontal]) -> tuple[LabelledRows, Membership, _ModelSetup, KeptBins | None]:
    """Describe own rows, bring them to everybody's columns and classes, become a member of the sums, pay for noise.

    Return also the kept bins that the training uses, if any.
    """
    party, lead, data, members = inputs.party, inputs.roles.active, inputs.rows, inputs.roles.owners
    own_bins = bins_for_rows(inputs)
    party.send(lead, describe(data, inputs.classes, offered(own_bins)))
    message = party.receive(lead, ModelBegin)
    schema = schema_of(message.names, message.categories, message.origins)
    rows = common_rows(data, schema, inputs.classes, message.classes, party.name)
    check_noise(inputs.options, rows, message.classes)
    if message.rounds is not None and inputs.options.epsilon_total is not None:
        raise ConfigError("cannot resume with epsilon_total: sums would be opened again, at a further cost; begin anew")
    kept = agreed_bins(inputs, own_bins, message) if message.bins and message.rounds is None else None
    sums = join(party, lead, members, inputs.vouching, _told_first(inputs, message), _sum_rules(inputs.options))
    sums.note = None if inputs.recording is None else inputs.recording.note_given
    return rows, sums, _set_up(inputs, message), kept


def _search(
    inputs: RoleInput, sums: Membership, order: MessageOrder, rows: LabelledRows, setup: _ModelSetup
) -> tuple[OwnRows, CommonBins]:
    """Take part in the search for bins; return a training without trees, and the bins as told."""
    lead, classes = inputs.roles.active, setup.message.classes
    labels = OwnLabels(inputs, rows, classes, lead)
    told = answer_search(inputs, sums, order, rows, labels, setup.noise)
    bins = unpack_bins(told, setup.schema, inputs.common.most_bins, lead)
    own = labels.starting(told.start, "CommonBins")
    objective = agreed_objective(told, own, noise=setup.noise.budget is not None, peer=lead)
    keep_bins(inputs, setup.message, told)
    return _fresh(inputs, setup, rows, bins, objective, setup.paid), told


def _resume_with_leader(
    inputs: RoleInput,
    sums: Membership,
    order: MessageOrder,
    rows: LabelledRows,
    message: ModelBegin,
    printed: bytes,
) -> tuple[OwnRows, CommonBins]:
    """Resume the training that the leader resumes; return also the bins as told, which are the checkpoint's."""
    lead, told = inputs.roles.active, sums.next(order)
    assert isinstance(told, CommonBins)
    found = members_checkpoint(inputs.keeper, message.model_id, message.rounds or 0)
    own = resume(inputs, found, message.rounds or 0, rows, printed)
    if found.bins != encode_body(told):
        raise PeerProtocolError(lead, f"expected the checkpoint's bins, got others - at CommonBins from {lead}")
    return own, told


def _follow_rounds(
    inputs: RoleInput,
    sums: Membership,
    order: MessageOrder,
    own: OwnRows,
    noise: SumNoise,
    keep: Callable[[int], None],
) -> None:
    """Do what the leader asks for until the model is finished."""
    lead, common, progress, forest = inputs.roles.active, inputs.common, inputs.progress, own.forest
    trees = TreeMember(
        own, lead, most_rounds=common.n_estimators, max_depth=common.max_depth, cohort=lambda: sums.member.there
    )
    if progress is not None:
        progress(forest.rounds, own.part)
    while order.allowed:
        match sums.next(order):
            case TreeStep() as step:
                before = forest.rounds
                vector = trees.take(step)
                if vector is not None:
                    sums.give(noise.on_trees(vector, forest.objective))
                if forest.rounds > before and progress is not None:
                    progress(forest.rounds, own.part)
            case CheckpointRequest() as due:
                if due.rounds != forest.rounds:
                    raise PeerProtocolError(
                        lead, f"expected {forest.rounds} rounds, got others - at CheckpointRequest from {lead}"
                    )
                if inputs.keeper is not None:
                    keep(due.rounds)
                inputs.party.send(lead, CheckpointReceipt())
            case ModelEnd() as end:
                forest.cut(end.rounds)


# ---------------------------------------------------------------- both


@dataclass(frozen=True, slots=True)
class _ModelSetup:
    """What is fixed before sums: the leader's message, everybody's columns, the noise, in words what it cost."""

    message: ModelBegin
    schema: Schema
    noise: SumNoise
    paid: str


def _meet(inputs: RoleInput[FederBoostHorizontal]) -> None:
    """Compare terms with all others, and refuse too few participants."""
    cells = 0 if inputs.data is None else inputs.data.table.n_rows * len(inputs.data.table.columns)
    if not inputs.alone and cells < _FEW_CELLS:
        stay_on_one_core()
    agree(inputs.party, _terms(inputs))
    check_members(inputs.options, inputs.roles.owners)


def _set_up(inputs: RoleInput[FederBoostHorizontal], message: ModelBegin) -> _ModelSetup:
    """Plan the training's noise and enter it in the own ledger, before any sum is opened."""
    schema = schema_of(message.names, message.categories, message.origins)
    members, search = len(inputs.roles.owners), not message.bins
    noise = plan_noise(inputs.options, inputs.common, schema, message.classes, members, search=search)
    store, name = None if inputs.data is None else inputs.store, inputs.party.name
    paid = pay(noise, store, name, model_job(inputs.party.job, message.model_id), inputs.epsilon_limits)
    return _ModelSetup(message, schema, noise, paid)


def _sum_rules(options: FederBoostHorizontal) -> SumRules:
    return SumRules(recover=options.dropout == "accept", allow_two=may_be_two(options))


def _fresh(
    inputs: RoleInput, setup: _ModelSetup, rows: LabelledRows, bins: Bins, objective: Objective, spent: str
) -> OwnRows:
    """Return a training without trees."""
    message, name = setup.message, inputs.party.name
    part = ModelPart(
        model_id=message.model_id, party=name, schema=setup.schema, splits=SplitTable(),
        forest=Forest(objective, (name,), message.classes), spent=spent,
    )  # fmt: skip
    return OwnRows.of(inputs, rows, part, bins, Draws.fresh(inputs))


def _on_kept_bins(
    inputs: RoleInput, setup: _ModelSetup, rows: LabelledRows, kept: KeptBins
) -> tuple[OwnRows, CommonBins]:
    """Return a training without trees on bins of an earlier one, and the bins as they were told then."""
    name, told = inputs.party.name, kept.told(inputs.party.name)
    own = OwnLabels(inputs, rows, setup.message.classes, name).starting(told.start, "CommonBins")
    objective = agreed_objective(told, own, noise=setup.noise.budget is not None, peer=name)
    objective.check_sums(kept.all_rows)
    bins = unpack_bins(told, setup.schema, inputs.common.most_bins, name)
    logger.info("%s: bins are those of an earlier training", name)
    return _fresh(inputs, setup, rows, bins, objective, setup.paid or kept.spent), told


def _keep(
    inputs: RoleInput, own: OwnRows, told: CommonBins, printed: bytes, rounds: int, began: float | None = None
) -> None:
    """Write a checkpoint after `rounds` rounds; `began` is `Keeper.keep`'s."""
    assert inputs.keeper is not None
    kept, given = RoundState(rounds, own.shard.margins.copy(), own.draws.state), inputs.given
    inputs.keeper.keep(lambda: checkpoint_with(own.part, given, printed, kept, told), began)


def _told_first(inputs: RoleInput, message: ModelBegin) -> bytes:
    """Encode what all were told at the beginning: masks cancel only between those told the same."""
    return msgspec.json.encode(_terms(inputs), order="sorted") + encode_body(message)


def _terms(inputs: RoleInput) -> dict[str, Term]:
    """Return what all must agree on before anything is sent."""
    return {**inputs.public_terms, "participants": list(inputs.roles.owners)}
