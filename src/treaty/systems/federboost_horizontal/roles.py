"""FederBoost on rows: participants hold rows of the same columns, and a leader grows trees on sums of their histograms.

Tian, Zhang, Hou, Lyu, Zhang, Liu, Ren, "FederBoost: Private Federated Learning for GBDT" (arXiv 2011.02796; IEEE TDSC).

Roles: participants with rows, all columns and labels; a leader, which is one of them or brings no data. Output: the
whole model, the same at all of them.

==================  =============  ===================================================  ===============================
message             from -> to     content                                              protection
==================  =============  ===================================================  ===============================
`Described`         member ->      names and categories of columns, classes             TLS
`Begin`             leader -> all  those of all, model id                               TLS
keys                both ways      see `masked_members`                                 signatures, vouching
sums                member ->      rows, values below probes (`horizontal_bins`);        masks; noise, if asked for
                                   bin sums of grad, hess and rows of a level's nodes
`Count`, `Asked`,   leader -> all  the search begins; probes; the bins                  TLS
`Agreed`
`Step`              leader -> all  splits of the last level or values of finished        TLS
                                   trees, and which nodes' sums come next
`Keep`, `Kept`      both ways      write a checkpoint; it is written                    TLS
`End`               leader -> all  how many rounds the model has                        TLS
==================  =============  ===================================================  ===============================

One sum per level serves all nodes, features, bins and classes. Adversary: honest but curious, members and leader;
the leader with all members but one sees that one's histograms, whatever is done. Of a node smaller than
`min_child_samples` nothing enters the model; what the leader sees of it in sums is not hidden.

**Lost participants.** Masks cancel only if all vectors come. By default a lost one ends the job: checkpoints are kept,
and it goes on when everybody is back. With ``dropout="accept"`` sums are opened over those still there, and the round's
trees are begun anew: from the sums before and after, the leader can tell the lost one's histograms. That is why it must
be asked for.

Deviations from the paper: masks are fresh for every vector (there, one pairwise secret serves twice); quantiles of all
features are sought at once, tie-aware; all bounds are checked before training; exported trees say nothing of covers.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from treaty.data.columns import Category
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.agreement import Term, agree
from treaty.messaging.messages import Message, encode_body
from treaty.messaging.party import Party
from treaty.models.checkpoints import ANEW, Checkpoint, Keeper
from treaty.models.trees import ModelPart
from treaty.privacy.ledger import Ledger, model_job
from treaty.systems.federboost_horizontal.noise import SumNoise, check_noise, pay, plan_noise
from treaty.systems.federboost_horizontal.search import agree_on_bins, answer_search
from treaty.systems.federboost_horizontal.trees import Step, TreeLeader, TreeMember
from treaty.systems.horizontal.members import Membership, Vouching, join
from treaty.systems.horizontal.quantiles import Agreed, agreed_objective, pack_bins, unpack_bins
from treaty.systems.horizontal.rows import (
    Begin,
    Categories,
    Described,
    all_classes,
    all_columns,
    checkpoint_with,
    common_rows,
    describe,
    kept_here,
    led,
    own_seed,
    printed_rows,
    sampler,
    schema_of,
    shard_of,
    taken_up,
)
from treaty.systems.horizontal.sums import Collector
from treaty.systems.pooled.training import Labelled, Progress, objective_for, watched
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical.active import Keep, Kept
from treaty.trees.boosting import Forest, RoundState, run_rounds
from treaty.trees.ensemble import SplitTable
from treaty.trees.objectives import Objective
from treaty.trees.shard import RowShard

logger = logging.getLogger(__name__)


class End(Message):
    """The model is finished, and has so many rounds."""

    rounds: Annotated[int, msgspec.Meta(ge=0)]


def may_be_two(options: TreeOptions) -> bool:
    """Whether two participants are enough: each sees the other's histograms in the sum."""
    return options.mode == "paper" or options.epsilon_total is not None


def check_members(options: TreeOptions, members: Sequence[str]) -> None:
    """Refuse so few participants that a sum shows what one of them has.

    Raises
    ------
    ConfigError
    """
    least = 2 if may_be_two(options) else 3
    if len(members) < least:
        raise ConfigError(
            f"expected {least} participants with data or more, got {len(members)}: of a sum of two each sees the "
            "other's part; add noise (epsilon_total), or permit it (mode='paper')"
        )
    if options.dropout == "accept" and len(members) < 4:
        raise ConfigError(
            f'dropout="accept" goes on without a lost participant: expected 4 or more, got {len(members)}'
        )
    if options.dropout == "accept" and options.epsilon_total is not None:
        raise ConfigError(
            'dropout="accept" begins trees anew, which would cost more than epsilon_total: leave one of them out'
        )


# ---------------------------------------------------------------- leader


def lead(
    party: Party,
    data: Labelled | None,
    options: TreeOptions,
    *,
    members: Sequence[str],
    classes: list[Category] | None,
    eval_sets: Sequence[Labelled] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    vouching: Vouching,
    ledger: Ledger | None = None,
) -> ModelPart:
    """Train as the leader.

    Parameters
    ----------
    party : Party
        Connected with all other participants, `party.peers`.
    data : Labelled or None
        Own rows; labels are numbers of `classes`. None: the leader brings no data.
    members : sequence of str
        All participants with data, in the job's order; the first one's columns are everybody's.
    classes : list or None
        Labels by class number; None for regression. A leader without data names those of its eval sets.
    eval_sets : sequence of Labelled
        Watched by the leader alone.
    keeper : Keeper or None
        Where checkpoints go, and come from.
    vouching : Vouching
        Whose certificates are pinned; nobody's between threads.
    ledger : Ledger or None
        Where noise is entered, if there is any. None: nowhere.

    Returns
    -------
    ModelPart
        The whole model.

    Raises
    ------
    ConfigError
        When parties disagree on options, or are too few for a sum to hide anything.
    CryptoError, PeerError
        When a participant is lost, or sends what the protocol does not allow.
    """
    agree(party, _terms(options, members))
    check_members(options, members)
    labels, names, categories = _labels_and_columns(party, data, options, members, classes)
    schema = schema_of(names, categories)
    noise = plan_noise(options, schema, labels, len(members))
    found = _found(keeper, noise)
    model_id = secrets.token_hex(16) if found is None else found.part.model_id
    paid = pay(noise, None if data is None else ledger, model_job(party.job, model_id))
    begin = _begin(party, model_id, found, names, categories, labels, options.n_estimators)
    collector = Collector(
        party, members, vouching, _begun(options, members, begin),
        recover=options.dropout == "accept", allow_two=may_be_two(options),
    )  # fmt: skip
    table = Table(schema, [np.empty(0, np.float32)] * len(schema.names), 0)
    rows = common_rows(data, schema, classes, labels, party.name) if data is not None else Labelled(table, np.empty(0))
    watching = [common_rows(e, schema, classes, labels, party.name) for e in eval_sets]
    printed = b"" if keeper is None else printed_rows([rows, *watching], labels)
    if found is None:
        new = agree_on_bins(collector, rows, data is not None, schema, labels, options, noise, threads)
        bins, part = new.bins, _without_trees(begin, schema, new.objective, party.name, paid or new.spent)
        rng, seed = np.random.default_rng(options.random_state), own_seed(options, party.name)
    else:
        kept = taken_up(found, begin.rounds or 0, options, printed, party.name)
        assert kept.rng is not None
        part, bins, rng, seed = kept.part, kept.bins, kept.rng, kept.seed
    assert part.forest is not None
    forest = part.forest
    agreed = pack_bins(bins, forest.objective)
    collector.tell_all(agreed)
    shard = shard_of(rows, bins, part, threads)
    rules = noise.rules(options.rules(forest.objective), forest.objective, options.max_bin)
    leader = TreeLeader(
        collector, shard, data is not None, bins, part.splits, rules,
        sampler(shard, forest, options, seed), partial(noise.on_trees, objective=forest.objective),
        options.colsample_bytree, rng, threads,
    )  # fmt: skip

    def keep(done: int) -> None:
        if keeper is None or not keeper.due:
            return
        began = time.perf_counter()
        leader.flush()
        collector.tell_all(Keep(done))
        collector.hear_all(Kept)
        progressed = RoundState(done, shard.margins.copy(), json.dumps([rng.bit_generator.state, seed]))
        keeper.keep(lambda: checkpoint_with(part, options, printed, progressed, agreed), began)

    _grow_rounds(leader, shard, part, options, watching, keep, progress, threads)
    collector.tell_all(End(forest.rounds))
    if noise.budget is not None and not any(np.any(tree.left >= 0) for tree in forest.trees):
        logger.warning("no split stood out from the noise: the model has none. Raise epsilon_total or lower max_bin")
    return part


def _labels_and_columns(
    party: Party,
    data: Labelled | None,
    options: TreeOptions,
    members: Sequence[str],
    classes: list[Category] | None,
) -> tuple[list[Category] | None, list[str], Categories]:
    """Hear what classes and columns participants have; return those of all: labels, names of columns, categories."""
    described = {name: party.receive(name, Described) for name in members if name != party.name}
    if data is not None:
        described[party.name] = describe(data, classes)
        check_noise(options, data, classes)
    labels = all_classes(described)
    names, categories = all_columns([described[name] for name in members])
    return labels, names, categories


def _found(keeper: Keeper | None, noise: SumNoise) -> Checkpoint | None:
    """Return the leader's checkpoint to go on from, if there is one; refuse a participant's, and any under noise."""
    found = None if keeper is None else keeper.found()
    if found is not None and not led(found):
        raise ConfigError(
            f"{found.part.party}: cannot resume as the leader: its checkpoint is of a training that another party led; "
            f"set active back to that party, or {ANEW}",
            public="it cannot resume as the leader: another party led the training of its checkpoint",
        )
    if found is not None and noise.budget is not None:
        raise ConfigError(
            "cannot resume with epsilon_total: sums opened since the checkpoint would be opened again, at a further "
            "cost; begin anew without these checkpoints, which costs a whole epsilon_total again"
        )
    return found


def _begin(
    party: Party,
    model_id: str,
    found: Checkpoint | None,
    names: list[str],
    categories: Categories,
    labels: list[Category] | None,
    n_estimators: int,
) -> Begin:
    """Tell all participants what model begins, or which of its rounds are kept."""
    rounds = None if found is None else min(found.rounds, n_estimators)
    begin = Begin(model_id, names, categories, labels, rounds)
    for peer in party.peers:
        party.send(peer, begin)
    return begin


def _grow_rounds(
    leader: TreeLeader,
    shard: RowShard,
    part: ModelPart,
    options: TreeOptions,
    watching: Sequence[Labelled],
    keep: Callable[[int], None],
    progress: Progress | None,
    threads: int,
) -> None:
    """Grow the rounds that are missing; `keep` is called with how many there are, after each."""
    assert part.forest is not None
    forest = part.forest

    def after_round(done: int) -> None:
        forest.clipped_rows = max(forest.clipped_rows, shard.clipped)
        keep(done)
        if progress is not None:
            progress(done, part)

    if progress is not None:
        progress(forest.rounds, part)
    evals = [watched(e, part.splits, threads) for e in watching]
    run_rounds(leader.grow, forest, after_round, options.n_estimators, evals, options.early_stopping_rounds)
    leader.flush()


# ---------------------------------------------------------------- participant


def participate(
    party: Party,
    data: Labelled,
    options: TreeOptions,
    *,
    members: Sequence[str],
    classes: list[Category] | None,
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    vouching: Vouching,
    ledger: Ledger | None = None,
) -> ModelPart:
    """Train as a participant other than the leader; parameters as `lead` has them.

    Returns
    -------
    ModelPart
        The whole model.
    """
    (leader,) = party.peers
    agree(party, _terms(options, members))
    check_members(options, members)
    party.send(leader, describe(data, classes))
    begun = party.receive(leader, Begin)
    schema = schema_of(begun.names, begun.categories)
    rows = common_rows(data, schema, classes, begun.classes, party.name)
    check_noise(options, rows, begun.classes)
    if begun.rounds is not None and options.epsilon_total is not None:
        raise ConfigError("cannot resume with epsilon_total: sums would be opened again, at a further cost; begin anew")
    sums = join(
        party, leader, members, vouching, _begun(options, members, begun),
        recover=options.dropout == "accept", allow_two=may_be_two(options),
    )  # fmt: skip
    noise = plan_noise(options, schema, begun.classes, len(members))
    paid = pay(noise, ledger, model_job(party.job, begun.model_id))
    printed = b"" if keeper is None else printed_rows([rows], begun.classes)
    objective = objective_for(rows, begun.classes, options)
    if begun.rounds is None:
        agreed = answer_search(party, leader, rows, objective, noise, sums, options.max_bin, threads)
        bins = unpack_bins(agreed, schema, options.max_bin, leader)
        objective = agreed_objective(agreed, objective, noise=noise.budget is not None, peer=leader)
        part = _without_trees(begun, schema, objective, party.name, paid)
        seed = own_seed(options, party.name)
    else:
        agreed = party.receive(leader, Agreed)
        found = kept_here(keeper, begun.model_id, begun.rounds)
        kept = taken_up(found, begun.rounds, options, printed, party.name)
        if found.bins != encode_body(agreed):
            raise PeerProtocolError(
                leader, f"expected the bins of the checkpoint, got others - at Agreed from {leader}"
            )
        part, bins, seed = kept.part, kept.bins, kept.seed
    assert part.forest is not None
    forest = part.forest
    sums.hear(agreed)
    shard = shard_of(rows, bins, part, threads)
    member = TreeMember(
        shard, bins, part.splits, forest, sampler(shard, forest, options, seed), leader,
        most_rounds=options.n_estimators, max_depth=options.max_depth, cohort=lambda: sums.member.there,
    )  # fmt: skip

    def keep(done: int) -> None:
        if keeper is not None:
            progressed = RoundState(done, shard.margins.copy(), json.dumps([None, seed]))
            keeper.keep(lambda: checkpoint_with(part, options, printed, progressed, agreed))

    _follow_rounds(party, leader, sums, member, part, noise, keep, progress)
    forest.clipped_rows = shard.clipped
    return part


def _follow_rounds(
    party: Party,
    leader: str,
    sums: Membership,
    member: TreeMember,
    part: ModelPart,
    noise: SumNoise,
    keep: Callable[[int], None],
    progress: Progress | None,
) -> None:
    """Do what the leader asks for until the model is finished; `keep` writes a checkpoint of so many rounds."""
    assert part.forest is not None
    forest = part.forest
    if progress is not None:
        progress(forest.rounds, part)
    while True:
        match party.receive(leader, Step, Keep, End):
            case Step() as step:
                sums.hear(step)
                before = forest.rounds
                asked = member.take(step)
                if asked is not None:
                    sums.give(noise.on_trees(asked, forest.objective))
                if forest.rounds > before and progress is not None:
                    progress(forest.rounds, part)
            case Keep() as told:
                sums.hear(told)
                if told.rounds != forest.rounds:
                    raise PeerProtocolError(
                        leader, f"expected {forest.rounds} rounds, got others - at Keep from {leader}"
                    )
                keep(told.rounds)
                party.send(leader, Kept())
            case End() as end:
                forest.cut(end.rounds)
                return


# ---------------------------------------------------------------- both


def _without_trees(begin: Begin, schema: Schema, objective: Objective, party: str, spent: str) -> ModelPart:
    """Return a party's part of the model that begins."""
    return ModelPart(
        model_id=begin.model_id, party=party, schema=schema, splits=SplitTable(),
        forest=Forest(objective, (party,), begin.classes), spent=spent,
    )  # fmt: skip


def _begun(options: TreeOptions, members: Sequence[str], begin: Begin) -> bytes:
    """Return what all were told at the beginning: masks cancel only between those with the same."""
    return msgspec.json.encode(_terms(options, members), order="sorted") + encode_body(begin)


def _terms(options: TreeOptions, members: Sequence[str]) -> Mapping[str, Term]:
    """Return what all must agree on before anything is sent."""
    public = {name: getattr(options, name) for name in options.__struct_fields__ if name != "random_state"}
    return {**public, "participants": list(members)}
