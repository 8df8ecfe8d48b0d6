"""FedXGB: boosting among users with a few rows each, by way of edge servers, for a server that owns the model.

Liu, Ma, Liu, Ma, Nepal, Deng, "Boosting Privately: Privacy-Preserving Federated Extreme Boosting for Mobile
Crowdsensing", ICDCS 2020 (arXiv 1907.10218).

Roles: users u with rows, all columns and labels, each in the domain of an edge server e; the server S, which grows the
trees; a key authority T (`authority`). Output: the model, at the server alone. SecBoost:

1. T certifies a signing key of this run for every party.
2. u -> e -> S, e -> u: the users of a domain and their keys.
3. S -> e -> u: the task, that is columns, classes and options; all compare these with their own.
4. Bins from secure quantiles (`horizontal.quantiles`), since S cannot enumerate values that it does not see; how many
   rows there are, and which columns have missing values.
5. S -> e -> u: a round begins, with the columns of its trees. Users answer if they are there; e chooses its cohort.
6. SecFind on each level (`secfind`): the sum over all users of grad, hess and rows by slot, column and bin; its splits.
7. SecPred on each level (`secpred`): all rows go down. Users learn the slots of their own rows, or all splits
   (`expose`).
8. The leaf values; each user adds those of its rows to its margins, which give the next round's gradients. With
   ``validation_fraction`` a sum of the held-out rows follows, by score and label.

Adversary: honest but curious; server and edge servers do not collude with each other, nor an edge server with a third
of its domain, nor the server with two users of a domain (`group_size` - 1, if that is given), who together find sums of
the third of their group. `conversation` says which message may come when.

**Users that vanish.** A user may vanish at any step of a sum: the sum is that of the users whose vectors came. A lost
user stays out until the tree ends. No linear combination of a domain's cohorts, over all sums of the job, isolates one
user or two (`cohorts`). A domain without a permitted cohort adds nothing to the rest of the tree. If no domain has one,
the tree ends there, or the round begins again, or, at last, training ends with the model so far.

Deviations from the paper, which reuses one mask and reveals every user's (docs/fedxgb.md): masks come from keys of one
sum and are used once; shares are revealed only for lists of survivors that all agree on. The published aggregation is
in `paper`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from treaty.machine.arrays import Floats, Int32s, Integers
from treaty.machine.process import stay_on_one_core
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import Array, encode
from treaty.models.trees import ModelPart, record_split
from treaty.systems.fedxgb import conversation, messages, noisy
from treaty.systems.fedxgb.cohorts import drop_earlier_files
from treaty.systems.fedxgb.domain import Credentials, authority_of, patience_of
from treaty.systems.fedxgb.noisy import CrowdNoise, NoisyCrowd, NoisyDomainSums, NoisyUserSums
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.order import ServerLimits, edge_order
from treaty.systems.fedxgb.paper import HiddenThresholds, PaperDomainSums, PaperUserSums, Sides, paper_mode
from treaty.systems.fedxgb.roles import check_edges
from treaty.systems.fedxgb.rows import CrowdMetrics, EdgeRows, Model, UserRows, resend_trees, server_model
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, UserSums, find_splits, give_domain_sum
from treaty.systems.horizontal import quantiles
from treaty.systems.horizontal.held_out import ScoreCells, chosen, drawn_back
from treaty.systems.horizontal.members import TranscriptDigest
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.systems.horizontal.own_rows import new_part, rounds_of
from treaty.systems.horizontal.quantiles import FoundBins
from treaty.systems.horizontal.rows import OwnLabels, common_rows
from treaty.systems.horizontal.sum_noise import looks
from treaty.systems.observers import TreeOpened, VectorGiven
from treaty.systems.pooled.constraints import constraints_of
from treaty.systems.system import RoleInput
from treaty.trees.boosting import draw
from treaty.trees.ensemble import Tree
from treaty.trees.slots import Cells, SlotTree

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------- server


def server(inputs: RoleInput[FedXGB]) -> ModelPart:
    """Train as the server; resume from its checkpoint, if there is one: finished trees are sent again.

    The party is connected with the authority and all edge servers: at least two, or three unless ``expose="model"``.
    `data` says which columns all users have; its rows and labels are ignored. Labels of `eval_sets`, which the server
    watches, are numbers of `classes`. Returns the whole model; with a warning that of fewer rounds, if no domain has
    enough users left.

    Raises ConfigError if there are too few edge servers, the checkpoint does not fit, or the options want an insecure
    form without consent; CryptoError, PeerError if too few users remain for the first tree, or a peer is lost or sends
    what the protocol does not allow.
    """
    party, common, classes = inputs.party, inputs.common, inputs.classes
    schema, edges = inputs.rows.table.schema, inputs.roles.having("edge")
    if not inputs.alone:
        stay_on_one_core()
    column_share = conversation.check_options(inputs)
    evals = [common_rows(e, schema, classes, classes, party.name) for e in inputs.eval_sets]
    written = conversation.ServerCheckpoints(inputs, evals)
    kept = written.found

    # [SecBoost, step 1] T certifies a signing key of this run for every party
    credentials = Credentials(party, authority_of(inputs.roles), "server")
    # [SecBoost, step 2] u -> e -> S, e -> u: the users of each domain and their keys (`open_domain`, `join_domain`)
    users = {edge: party.receive(edge, messages.Users).of for edge in edges}
    for edge, of in users.items():
        for name, keys in of.items():
            credentials.check(name, "user", keys, edge)
    # [SecBoost, step 3] S -> e -> u: columns, classes, options
    task = conversation.new_task(inputs, credentials, kept)
    for edge in edges:
        party.send(edge, task)
    noise = CrowdNoise.plan(inputs, task)
    if noise is not None:
        everybody = NoisyCrowd(inputs.roles.edges, party, credentials, users, inputs.vouching, task)
        return noisy.lead(inputs, everybody, task, noise, evals, column_share)
    crowd = Crowd(party, credentials, users, inputs.vouching, task, masked=inputs.options.mode != "paper")
    # [SecBoost, step 4] bins from secure quantiles; how many rows there are, and where values are missing
    if kept is not None:
        found = conversation.known_bins(inputs, crowd, kept)
    else:
        found = quantiles.lead_search(inputs, crowd, schema, classes, None)
    summary = messages.RowSummary(found.n_rows, Array.of(found.may_miss))
    party.round += 1
    crowd.broadcast(summary)
    model = server_model(inputs, crowd, found)
    crowd.settle()

    rng = np.random.default_rng(common.random_state)
    if kept is not None:
        part = kept.part
        resend_trees(inputs, crowd, model, found.bins, kept, rng)
    else:
        spent, bins = quantiles.shown_by_search(found.fewest), encode(found.message)
        part = new_part(inputs, task.model_id, schema, classes, found.objective, spent, bins)
    back = None
    if inputs.options.holds_out_rows:
        cells = ScoreCells.of(found.objective, schema, inputs.options.validation_group)
        back = CrowdMetrics(crowd, cells, looks(inputs.options, common))
    rounds = rounds_of(inputs, part, back, evals, partial(written.write, part, rng, summary))

    def grow() -> list[Tree]:
        columns = [draw(rng, len(schema.names), column_share) for _ in range(found.objective.n_outputs)]
        return grow_round(inputs, crowd, model, part, found, columns)

    conversation.grow_all(rounds, grow, iter(range(messages.MOST_VOID)))
    crowd.broadcast(messages.TrainingEnd())
    part.held_out = None if back is None else back.result(rounds.forest.rounds)
    return part


def grow_round(
    inputs: RoleInput[FedXGB], crowd: Crowd, model: Model, part: ModelPart, found: FoundBins, columns: Sequence[Int32s]
) -> list[Tree]:
    """Grow a round's trees, one per output, on sums over all users; all trees grow together, level by level.

    They end at the level at which no domain has enough users left; RoundVoid if that is the root's.
    """
    bins = found.bins
    rules = inputs.common.rules(found.objective, constraints_of(inputs.common, bins.schema))
    cells = Cells.of(bins.offsets, found.may_miss, found.n_rows, found.objective)
    opened: list[dict[int, Integers]] = [{} for _ in columns]
    trees = [
        SlotTree(
            rules, cells, of, bins.schema.categorical, lambda f, left: record_split(part.splits, bins, f, left),
            inputs.threads, of_nodes.__setitem__,
        )
        for of, of_nodes in zip(columns, opened, strict=True)
    ]  # fmt: skip
    # [SecBoost, step 5] S -> e -> u: a round begins; users answer if they are there, and e chooses among them
    # trees of a round, one for each output, have columns of their own
    ends = np.cumsum([len(of) for of in columns], dtype=np.int32)
    crowd.broadcast(messages.RoundStart(Array.of(np.concatenate(columns)), Array.of(ends)))
    depth = 0
    while depth < rules.max_depth and (inputs.options.hides_model or any(tree.growing for tree in trees)):
        # [SecBoost, step 6] SecFind: sums of all slots of the level over all users, and the best splits
        splits = find_splits(crowd, trees, [cells.length(1 << depth, of) for of in columns], depth)
        # [SecBoost, step 7] SecPred: all rows go down the level
        model.split(splits)
        depth += 1
    # [SecBoost, step 8] the leaf values of users' rows, from which come the gradients of the next round
    finished = [tree.finish(depth) for tree in trees]
    model.finish(np.stack([values for _, values in finished]))
    for of_nodes, (tree, _) in zip(opened, finished, strict=True):
        inputs.observers.event(TreeOpened(of_nodes, tree.left, bins))
    return [tree for tree, _ in finished]


# ---------------------------------------------------------------- edge server


def edge(inputs: RoleInput[FedXGB]) -> None:
    """Serve a domain until training is over.

    The party is connected with the authority, the server, the domain's users and, if the model is hidden, all users and
    edge servers. `vouching` checks edge servers' certificates.

    Raises ConfigError if options differ; CryptoError, PeerError if too few users of the domain come, or the server or
    another edge server is lost or sends what the protocol does not allow.
    """
    party, options, roles, patience = inputs.party, inputs.options, inputs.roles, patience_of(inputs)
    server, authority, edges = roles.active, authority_of(roles), roles.having("edge")
    if not (inputs.alone or options.hides_model):  # else edge servers compute, on the rows of all users
        stay_on_one_core()
    check_edges(options, len(edges))
    sums_as = NoisyDomainSums if options.adds_noise else PaperDomainSums if paper_mode(options) else DomainSums
    here = conversation.open_domain(inputs, sums_as)  # steps 1 to 3
    task, domain = here.task, here.sums
    at_start, bins = domain.transcript.digest, None
    rows = EdgeRows(inputs, domain, here.file, patience)
    order = MessageOrder(edge_order(options), "domain")
    searches = quantiles.most_rounds(task.origins, inputs.common.most_bins, exact=options.exact_bins)
    limits = ServerLimits(server, inputs.common.most_rounds, inputs.common.depth, searches, inputs.observers)
    noise, late = CrowdNoise.plan(inputs, task), noisy.LateUsers(inputs, here, patience)
    inputs.observers.round_finished(0, None)
    while order.state != "over":
        message = party.receive(server, *order.allowed, follow=True)
        order.take(message)
        limits.take(message)
        if isinstance(message, messages.Sum):  # SecFind
            limits.sums.take(message.number)
            masks = None if paper_mode(options) else here.edges
            opened = give_domain_sum(party, server, domain, message, masks)
            inputs.observers.event(VectorGiven(opened))
            continue
        # SecPred
        if isinstance(message, HiddenThresholds | messages.SplitShares | messages.LeafShares):
            rows.move(message)
            continue
        # all other messages are for all users: pass them on, and masks depend on them from now on
        users = [name for name in party.peers if name not in (server, authority, *edges)]
        here.edges.member.received.update(message)
        # what was late for the last round is dropped unread
        if isinstance(message, messages.RowSummary | messages.RoundStart | RandomStep):
            party.drop_earlier(users)
        if isinstance(message, messages.RoundStart | RandomStep):
            domain.transcript = TranscriptDigest(at_start)
        domain.transcript.update(message)
        if noise is not None:
            assert isinstance(domain, NoisyDomainSums)
            domain.deviations = partial(noise.deviations, message)
            if isinstance(message, RandomStep):
                late.let_in()
            late.note(message)
        domain.send(dict.fromkeys(domain.there, message))
        match message:
            case quantiles.ProbeRequest():
                usual = quantiles.MOST_ROUNDS * (1 + options.exact_bins)
                inputs.observers.set_up("searching for bins", limits.probes, usual)
            case quantiles.CommonBins():
                bins = message
                if noise is not None:
                    at_start = domain.transcript.digest
            case RandomStep():
                domain.choose(domain.attending(messages.Attendance))
            case messages.RowSummary():
                assert bins is not None  # by the order of messages
                rows.receive(users, bins, message, here.schema, resumed=task.rounds > 0)
                if order.state != "rows":  # otherwise `RowOwners` is still to come
                    at_start = domain.transcript.digest
            case messages.RowOwners():
                rows.keep(message)
                at_start = domain.transcript.digest
            case messages.RoundStart():  # users who are there, and among them the cohort
                rows.start()
                domain.choose(domain.attending(messages.Attendance))
                drop_earlier_files(inputs.keeper, task.model_id, limits.rounds)


# ---------------------------------------------------------------- user


def user(inputs: RoleInput[FedXGB]) -> Floats:
    """Take part as a user until training is over; return the model's margins of own rows, float64 (n_outputs, n_rows).

    The party is connected with the authority, its edge server and, if the model is hidden, all edge servers; not with
    the server, whose keys the authority certifies. `absence` is a `Leaves` or None.

    Raises ConfigError, DataError if options or columns do not fit the task; CryptoError, PeerError if the edge server
    is lost, or sends what the protocol does not allow.
    """
    if not inputs.alone:
        stay_on_one_core()
    party, options, edge = inputs.party, inputs.options, inputs.roles.edges[inputs.party.name]
    sums_as = NoisyUserSums if options.adds_noise else PaperUserSums if paper_mode(options) else UserSums
    joined = conversation.join_domain(inputs, edge, sums_as)  # steps 1 to 3
    rows, sums = joined.rows, joined.sums
    back = drawn_back(len(rows.y), options.validation_fraction or 0.0, party.name)
    trained = chosen(rows, ~back)
    labels = OwnLabels(inputs, trained, joined.task.classes, edge)
    instructions = conversation.Instructions(inputs, edge, sums)
    noise = CrowdNoise.plan(inputs, joined.task)
    if noise is not None:
        return noisy.follow(inputs, joined, instructions, noise)
    answers = quantiles.SearchAnswers(inputs, trained, labels, edge)
    while not isinstance(bins := instructions.next(), quantiles.CommonBins):
        instructions.vector = answers.vector(bins)
    summary = instructions.next()
    assert isinstance(summary, messages.RowSummary)
    own = UserRows(inputs, rows, back, labels.starting(bins.start, "CommonBins"), bins, summary, joined.seed)
    instructions.vector = own.vector
    inputs.observers.round_finished(0, None)
    while not isinstance(message := instructions.next(), messages.TrainingEnd):
        own.take(message)
        if isinstance(message, messages.RoundStart):
            sums.awake = True
            if not own.fits:
                sums.withdraw()
            elif not sums.absent("call"):
                party.send(edge, messages.Attendance())
        elif isinstance(message, Sides | messages.KnownSplits | messages.SideShares | messages.ValueShares):
            sums.absent("prediction")
    return own.shard.margins
