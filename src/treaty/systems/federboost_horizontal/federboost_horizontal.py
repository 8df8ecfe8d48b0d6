"""FederBoost on rows: participants hold rows of the same columns, and a leader grows trees on sums of their histograms.

Tian, Zhang, Hou, Lyu, Zhang, Liu, Ren, "FederBoost: Private Federated Learning for GBDT" (arXiv 2011.02796; IEEE TDSC).

Roles: participants with rows, all columns and labels; a leader, which is one of them or brings no data. Output: the
whole model, the same at all of them. First the distributed search for quantiles (`horizontal.quantiles`), then, for
each level of the trees of a round:

1. Every participant computes gradients of its own rows from the model so far, and their sums by node, feature and bin.
2. Participants send the vector of all sums of grad, hess and rows to the leader under masks.
3. The leader opens the sum over all participants and finds splits, or the values of leaves.
4. The leader sends the level (feature, bins that go left) and which nodes' sums come next; all divide their own rows.

One sum per level serves all nodes, features, bins and classes. A later training on the same rows, with other options of
boosting perhaps, begins with the trees (`setup`). With ``epsilon_total`` splits are drawn at random, and only the sums
of leaves are opened, under noise (`horizontal.noisy_rounds`).

Adversary: honest but curious, members and leader. The leader together with all members but one learns that one's
histograms, whatever is done. Nothing of a node smaller than `min_child_samples` enters the model, but the leader sees
its sums.

**Lost participants.** Masks cancel only if all vectors come. By default a lost participant ends the job: checkpoints
are kept, and training resumes when all are back. With ``dropout="accept"`` sums are opened over those still present,
and the round's trees are restarted: from the sums before and after, the leader can derive the lost one's histograms.

Deviations from the paper: masks are fresh for every vector (there, one pairwise secret serves twice); quantiles of all
features are sought at once, aware of ties; all bounds are checked before training; exported trees have no covers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Int32s, Integers
from treaty.messaging.conversation import MessageOrder
from treaty.models.checkpoints import checkpoint_of_model
from treaty.models.trees import ModelPart
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.federboost_horizontal.setup import (
    ModelSetup,
    SharedCheckpoints,
    agree_on_model,
    compare_terms,
    fresh,
    join_model,
    keep_bins,
    leaders_rows,
    on_kept_bins,
    resumed,
    sum_rules,
)
from treaty.systems.federboost_horizontal.trees import (
    CONVERSATION,
    NOISY_CONVERSATION,
    ModelEnd,
    StepSender,
    TreeMember,
    TreeStep,
    level_vector,
)
from treaty.systems.horizontal import quantiles
from treaty.systems.horizontal.held_out import HeldBack, HeldOutRequest, SummedMetrics
from treaty.systems.horizontal.members import Collector, Membership
from treaty.systems.horizontal.noisy_rounds import LeafMember, LeafSender, RandomStep, random_round
from treaty.systems.horizontal.own_rows import OwnRows, rounds_of
from treaty.systems.horizontal.rows import OwnLabels
from treaty.systems.horizontal.sum_noise import SumNoise
from treaty.systems.observers import TreeOpened, VectorGiven
from treaty.systems.pooled.constraints import constraints_of
from treaty.systems.pooled.continuing import CheckpointRequest
from treaty.systems.system import LabelledRows, RoleInput
from treaty.trees.ensemble import Tree
from treaty.trees.growth import Growth
from treaty.trees.histograms import width_of
from treaty.trees.slots import LevelSplits
from treaty.trees.splits import SplitRules, complete_sums, kept_sums, scan

# ---------------------------------------------------------------- leader


def leader(inputs: RoleInput[FederBoostHorizontal]) -> ModelPart:
    """Train as the leader, connected with all other participants; return the whole model.

    The leader may bring no rows: its classes are then those of its eval sets, which it alone watches. The columns are
    those of the first owner.

    Raises ConfigError if parties disagree on options, or are too few for a sum to hide anything; CryptoError or
    PeerError if a participant is lost, or sends what the protocol does not allow.
    """
    compare_terms(inputs)
    setup, found, kept = agree_on_model(inputs)
    noise, classes = setup.noise, setup.message.classes
    collector = Collector(
        inputs.party, inputs.roles.owners, inputs.vouching, setup.first_message(inputs), sum_rules(inputs.options)
    )
    rows, held_out, watching = leaders_rows(inputs, setup)
    written = SharedCheckpoints(inputs, [rows, *watching], classes)
    n_rows = 0
    if kept is not None:
        own, bins = on_kept_bins(inputs, setup, rows, kept)
        n_rows = kept.all_rows
    elif found is not None:
        own = resumed(inputs, found, setup.message.rounds or 0, rows, written.printed)
        bins = quantiles.pack_bins(own.bins, own.forest.objective)
        collector.broadcast(bins)
    else:
        search = quantiles.lead_search(
            inputs, collector, setup.schema, classes, None if inputs.data is None else rows, noise.of_search
        )
        shown = quantiles.shown_by_search(search.fewest) if noise.budget is None else str(noise.budget)
        bins, n_rows = search.message, search.n_rows
        # bins found without a lost participant's rows are of no use to a later training with it
        if set(collector.summed) == set(inputs.roles.owners):
            keep_bins(inputs, setup.message, bins, all_rows=search.n_rows, spent=shown)
        own = fresh(inputs, setup, rows, search.bins, search.objective, setup.paid or shown)

    forest, shard, width = own.forest, own.shard, width_of(own.bins.offsets)
    rules = inputs.common.rules(forest.objective, constraints_of(inputs.common, setup.schema))
    steps: StepSender | LeafSender
    grow: Callable[[], list[Tree]]
    if noise.leaves is None:
        steps = StepSender(collector, width)
        grow = partial(grow_round, inputs, collector, steps, own, rules)
    else:
        steps = LeafSender(collector, width)
        grow = partial(random_round, inputs, collector, steps, own, rules, noise.leaves, n_rows)

    def keep(done: int) -> None:
        forest.clipped_rows = max(forest.clipped_rows, shard.clipped)
        written.request(collector, steps, own, bins, done)

    back, of_all = None if held_out is None else own.held_back(inputs, held_out, noise), None
    if back is not None:
        mine = None if inputs.data is None else back
        sigma = noise.scores * np.sqrt(len(inputs.roles.owners) / noise.honest)
        of_all = SummedMetrics(collector, back.cells, back.looks, mine, steps.flush, sigma)
    for new in rounds_of(inputs, own.part, of_all, watching, keep):
        new += grow()
    steps.flush()
    collector.broadcast(ModelEnd(forest.rounds))
    if of_all is not None:
        own.part.held_out = of_all.result(forest.rounds)
    return own.part


def grow_round(
    inputs: RoleInput[FederBoostHorizontal], collector: Collector, steps: StepSender, own: OwnRows, rules: SplitRules
) -> list[Tree]:
    """Grow the trees of a round on sums over all participants; restart if one of them is lost meanwhile."""
    columns = own.draw_columns(inputs.common.colsample_bytree)
    while (grown := _attempt(inputs, collector, steps, own, columns, rules)) is None:
        # later sums lack the lost one's rows: the trees begin again
        steps.splits = []
    return own.finish(*steps.finish(grown))


def _attempt(
    inputs: RoleInput[FederBoostHorizontal],
    collector: Collector,
    steps: StepSender,
    own: OwnRows,
    columns: list[Int32s],
    rules: SplitRules,
) -> list[Tree] | None:
    """Grow the trees together, level by level; None if a participant is lost."""
    shard, bins, slots = own.shard, own.bins, int(own.bins.offsets[-1])
    asked = [(output, np.zeros(1, np.int32)) for output in range(len(columns))]
    steps.send(columns, asked)
    # [Training, step 1] every participant: gradients from the model so far; sums of own rows by node, feature and bin
    totals: Integers | None = shard.start_round(columns, own.sample())
    growths: list[Growth] = []
    cohort: list[str] = []  # whose rows are in the first sum
    parents: list[Integers | None] = [None] * len(columns)
    opened_nodes: list[dict[int, Integers]] = [{} for _ in columns]
    while True:
        # [Training, step 2] participants -> leader, under masks: one vector of all sums of the level (`follow_rounds`)
        # grad, hess and rows of every slot of the nodes asked for; at the root also each tree's totals
        sizes = [3 * slots * len(nodes) for _, nodes in asked]
        vector = None if inputs.data is None else level_vector(shard, asked, totals)
        opened = collector.total(sum(sizes) + (0 if totals is None else totals.size), vector)
        *sums, rest = np.split(opened, np.cumsum(sizes))
        if totals is not None:
            # below the root totals follow from the splits; the members in the first sum must be in all of the round
            growths, totals, cohort = [Growth(total, rules) for total in rest.reshape(-1, 3)], None, collector.summed
        if collector.summed != cohort:
            return None
        # [Training, step 3] leader: prefix sums, gains and the best split of each node, for every tree of the round
        for (output, _), flat in zip(asked, sums, strict=True):
            level, of_tree = growths[output].level, flat.reshape(-1, slots, 3)
            # too few rows for any split
            if level is None:
                continue
            opened_nodes[output].update(zip(level.asked.tolist(), of_tree, strict=True))
            complete = complete_sums(level, of_tree, parents[output])
            parents[output] = kept_sums(level, parents[output], complete)
            best = scan(
                complete, level.totals, columns[output], bins.offsets, bins.schema.categorical, rules,
                limits=level.limits, threads=inputs.threads,
            )  # fmt: skip
            taken = growths[output].take(best)
            if taken is not None:
                nodes, children, chosen = taken
                growths[output].divided(np.zeros(len(nodes), np.int32))  # `RowShard.finish` numbers records
                divided = LevelSplits(nodes, children, chosen.feature, chosen.left_bins)
                shard.divide(output, divided)
                steps.splits.append((output, divided))
        asked = [(output, growth.level.asked) for output, growth in enumerate(growths) if growth.level is not None]
        if not asked:
            break
        # [Training, step 4] leader -> all: the level's splits, by which all divide their rows; which sums come next
        steps.send([], asked)
    grown = [growth.tree() for growth in growths]
    for of_nodes, tree in zip(opened_nodes, grown, strict=True):
        inputs.observers.event(TreeOpened(of_nodes, tree.left, bins))
    return grown


# ---------------------------------------------------------------- participant


def member(inputs: RoleInput[FederBoostHorizontal]) -> ModelPart:
    """Train as a participant other than the leader, with own rows, connected with the leader; return the whole model.

    Errors are as of `leader`; ConfigError also if there is no checkpoint of a training that the leader resumes.
    """
    compare_terms(inputs)
    rows, held_out, setup, kept = join_model(inputs)
    sums = Membership(
        inputs.party, inputs.roles.active, inputs.roles.owners, inputs.vouching, setup.first_message(inputs),
        sum_rules(inputs.options), lambda values: inputs.observers.event(VectorGiven(values)),
    )  # fmt: skip
    written, rounds = SharedCheckpoints(inputs, [rows], setup.message.classes), setup.message.rounds
    conversation = CONVERSATION if setup.noise.leaves is None else NOISY_CONVERSATION
    if kept is not None:
        order = MessageOrder(conversation, "rounds")
        own, bins = on_kept_bins(inputs, setup, rows, kept)
    elif rounds is not None:
        order = MessageOrder(conversation, "resumed")
        received = sums.next(order)
        assert isinstance(received, quantiles.CommonBins)
        model_id, bins = setup.message.model_id, received
        found = checkpoint_of_model(inputs.keeper, model_id, rounds, "rounds", lambda kept: kept.rounds)
        own = resumed(inputs, found, rows=rows, rounds=rounds, printed=written.printed, bins=bins)
    else:
        order = MessageOrder(conversation, "new")
        own, bins = answer_search(inputs, sums, order, rows, setup)
    back = None if held_out is None else own.held_back(inputs, held_out, setup.noise)
    follow_rounds(inputs, sums, order, own, bins, setup.noise, written, back)
    own.forest.clipped_rows = own.shard.clipped
    return own.part


def answer_search(
    inputs: RoleInput[FederBoostHorizontal],
    sums: Membership,
    order: MessageOrder,
    rows: LabelledRows,
    setup: ModelSetup,
) -> tuple[OwnRows, quantiles.CommonBins]:
    """Take part in the search for a start and for bins; return a training without trees, and the message about bins."""
    leader, noise = inputs.roles.active, setup.noise
    labels = OwnLabels(inputs, rows, setup.message.classes, leader)
    answers = quantiles.SearchAnswers(inputs, rows, labels, leader, noise.of_search, inputs.threads)
    cohort = frozenset[str]()
    while not isinstance(asked := sums.next(order), quantiles.CommonBins):
        if isinstance(asked, quantiles.Count):
            # the budget of noise is for one search
            if sums.member.present == cohort or (cohort and noise.budget is not None):
                why = "no member was lost" if noise.budget is None else "noise is for one search"
                raise PeerProtocolError(leader, f"the search restarts although {why} - from {leader}")
            cohort = sums.member.present
        sums.give(answers.vector(asked)())
    bins = quantiles.unpack_bins(asked, setup.schema, inputs.common.bin_limits, leader)
    start = labels.starting(asked.start, "CommonBins")
    objective = quantiles.agreed_objective(asked, start, noise=noise.budget is not None, peer=leader)
    keep_bins(inputs, setup.message, asked)
    return fresh(inputs, setup, rows, bins, objective, setup.paid), asked


def follow_rounds(
    inputs: RoleInput[FederBoostHorizontal],
    sums: Membership,
    order: MessageOrder,
    own: OwnRows,
    bins: quantiles.CommonBins,
    noise: SumNoise,
    written: SharedCheckpoints,
    held_back: HeldBack | None,
) -> None:
    """Answer the leader's requests until the model is finished."""
    leader, forest = inputs.roles.active, own.forest
    trees: TreeMember | LeafMember
    if noise.leaves is None:
        trees = TreeMember(own, leader, inputs.common, lambda: sums.member.present)
    else:
        trees = LeafMember(own, leader, inputs.common, noise.leaves)
    inputs.observers.round_finished(forest.rounds, own.part)
    while order.allowed:
        match sums.next(order):
            # divide own rows by the last level's splits, or by trees drawn at random, then sum what is asked for
            case TreeStep() | RandomStep() as step:
                before = forest.rounds
                vector = trees.take(step)  # type: ignore[arg-type] # `order` permits one of both
                if vector is not None:
                    sums.give(vector if noise.leaves is None else noise.leaves.on(vector, forest.objective))
                if forest.rounds > before:
                    inputs.observers.round_finished(forest.rounds, own.part)
            case HeldOutRequest() as asked:
                if held_back is None:
                    raise PeerProtocolError(leader, "this job has no held-out rows", at="HeldOutRequest")
                sums.give(held_back.answer(asked, leader))
            case CheckpointRequest() as due:
                written.answer(own, bins, due)
            case ModelEnd() as end:
                if end.rounds > forest.rounds:
                    raise PeerProtocolError(leader, f"expected {forest.rounds} rounds at most", at="ModelEnd")
                forest.cut(end.rounds)
