"""FedXGB: boosting among users with a few rows each, by way of edge servers, for a server that owns the model.

Liu, Ma, Liu, Ma, Nepal, Deng, "Boosting Privately: Privacy-Preserving Federated Extreme Boosting for Mobile
Crowdsensing", ICDCS 2020 (arXiv 1907.10218).

Roles: users with rows, all columns and labels, each in the domain of an edge server; edge servers; the server, which
grows the trees; a key authority (`authority`). Output: the model, at the server alone.

====================  ====================  ================================================  =====================
message               from -> to            content                                           protection
====================  ====================  ================================================  =====================
`UserOffer`           user -> edge          certified keys, activity, stability               signatures
`Users`               edge -> server        the domain's users and their keys                 signatures
`Task`                server -> all         columns, classes, options, the server's keys      signatures
`Count`,              server -> all         count rows; probes; the bins: see                 TLS
`ProbeRequest`,                             `horizontal.quantiles`
`CommonBins`
`RowSummary`          server -> all         how many rows all have, which columns have gaps   TLS
`RoundStart`          server -> all         a tree (one for each class) begins, its columns   TLS
`Attendance`          user -> edge          the user is there, and may be chosen              TLS
`Sum`                 server -> edge        open the next sum                                 TLS
sums                  users -> edge ->      bin sums of the level's slots, see `user_sums`    masks, domain's sums
                      server                and `server_sums`                                 under further masks
`Splits`, `Values`    server -> all         (``expose="model"``) the splits; leaf values      TLS
`RowShares`, ...      see `secpred.routing` (otherwise) shares of rows, splits and leaves     secret shares
`ShownSplits`, ...    see `paper.routing`   (``expose="paper"``) columns; shares of           Shamir shares
                                            thresholds and of what they are compared with
`TrainingEnd`         server -> all         training is over                                  TLS
====================  ====================  ================================================  =====================

The tables in `messages` say which message a role may receive when. One vector per level holds grad, hess and count of
all slots, features, bins and classes. Adversary: honest but curious; server and edge servers do not collude with each
other, nor an edge server with a third of its domain, nor the server with two users of a domain (`group_size` - 1, where
that is given), who together find sums of the third of their group. The server sees sums over all domains' users; an
edge server sees who takes part; a user sees the slot at each level and the leaf value of its own rows
(``expose="model"``: the model).

**Users that vanish.** A user may vanish at any step of a sum: the sum is exactly that of the users whose vectors came.
A lost user stays out until the tree ends. No linear combination of a domain's cohorts, over all sums of the job,
isolates one user or two (with `group_size`, fewer than that); so that this never stands in the way of another tree,
sums may always be over whole groups of three users or more (`cohorts`). A domain without one adds nothing to the rest
of the tree; where that is so of all domains, the tree ends there, or the round begins again, or, at last, training ends
with the model so far.

Deviations from the paper, which reuses one mask and reveals every user's (docs/fedxgb.md): masks from keys of one sum,
used once; shares revealed only for signed lists of who is left; bins from secure quantiles, since the server cannot
enumerate values that it does not see. The published aggregation is `paper.sums` (``mode="paper"``).
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.compute import stay_on_one_core
from treaty.crypto.aggregation.round import RoundVoid
from treaty.data.binning import Bins
from treaty.data.table import Schema, Table
from treaty.messaging.messages import Array, decode_body, encode_body, view
from treaty.models.checkpoints import Checkpoint
from treaty.models.trees import ModelPart, keep_records, record_split, records_used
from treaty.systems.fedxgb.authority import Credentials, authority_of
from treaty.systems.fedxgb.layout import check_edges
from treaty.systems.fedxgb.limits import MOST_VOID
from treaty.systems.fedxgb.messages import RoundStart, RowSummary, Splits, Task, TrainingEnd, Values, terms_of
from treaty.systems.fedxgb.options import PAPER_LEAKS
from treaty.systems.fedxgb.paper.routing import PaperModel, check_numeric
from treaty.systems.fedxgb.paper.sums import paper_mode
from treaty.systems.fedxgb.replay import told
from treaty.systems.fedxgb.secpred.routing import HiddenModel, RowOwners, layout_of
from treaty.systems.fedxgb.server_sums import Crowd, Users
from treaty.systems.horizontal.quantiles import (
    MOST_ROUNDS,
    CommonBins,
    Count,
    Opening,
    choose_bins,
    pack_bins,
    told_by_search,
    unpack_bins,
)
from treaty.systems.horizontal.rows import checkpoint_with, common_rows, printed_rows
from treaty.systems.pooled.training import objective_for, watched
from treaty.systems.system import LabelledRows, Seat
from treaty.trees.boosting import BoostingPlan, Forest, RoundState, run_rounds
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.growth import NoMoreTrees
from treaty.trees.objectives import Objective
from treaty.trees.slots import Cells, SlotSplits, SlotTree
from treaty.trees.splits import SplitRules

logger = logging.getLogger(__name__)


def server(seat: Seat) -> ModelPart:
    """Train as the server; go on from its checkpoint, if the keeper finds one: finished trees are told again.

    Parameters
    ----------
    seat : Seat
        Its party is connected with the authority and all edge servers: at least two, or three unless
        ``expose="model"``. `data` says which columns all users have; its rows and labels are ignored. Labels of
        `eval_sets`, which the server watches, are numbers of `classes`.

    Returns
    -------
    ModelPart
        The whole model; that of fewer rounds, with a warning, where no domain has enough users left.

    Raises
    ------
    ConfigError
        When there are too few edge servers, or options do not fit the columns, or those of the checkpoint.
    CryptoError, PeerError
        When no domain has enough users for a first tree, or an edge server is lost or sends what the protocol does not
        allow.
    """
    if not seat.alone:
        stay_on_one_core()
    party, options, common, keeper = seat.party, seat.options, seat.common, seat.keeper
    schema, classes, threads = seat.rows.table.schema, seat.classes, seat.threads
    edges = seat.cast.having("edge")
    check_edges(options, len(edges))
    column_share = options.column_share(len(schema.names), common.colsample_bytree)
    if options.exposes == "paper":
        check_numeric(schema)
    if paper_mode(options):
        logger.warning("%s: %s", party.name, PAPER_LEAKS)
    rows = [common_rows(e, schema, classes, classes, party.name) for e in seat.eval_sets]
    printed = b"" if keeper is None else printed_rows(rows, classes)
    kept = None if keeper is None else keeper.found()
    if kept is not None:
        kept.check(seat.given, seat.may_change, (party.name,), printed)
    task, crowd = _meet(seat, edges, kept)
    found = _search(seat, crowd, schema) if kept is None else _known(seat, crowd, kept)
    agreed, summary = pack_bins(found.bins, found.objective), RowSummary(found.n_rows, Array.of(found.may_miss))
    crowd.tell(agreed)
    party.round += 1
    crowd.tell(summary)
    model = _model(seat, edges, crowd, found)
    crowd.settle()
    forest = Forest(found.objective, (party.name,), classes)
    part = ModelPart(
        model_id=task.model_id, party=party.name, schema=schema, splits=SplitTable(), forest=forest,
        spent=found.spent, bins=encode_body(agreed),
    )  # fmt: skip
    growth = _Growth(
        rules=common.rules(found.objective),
        cells=Cells.of(found.bins.offsets, found.may_miss, found.n_rows, found.objective),
        plan=BoostingPlan(n_columns=len(found.bins.n_bins), colsample_bytree=column_share),
        rng=np.random.default_rng(common.random_state),
        full_depth=options.hides_model,
        threads=threads,
        n_rounds=common.n_estimators,
    )
    if kept is not None:
        part, forest = kept.part, _forest_of(kept)
        growth.rng.bit_generator.state = json.loads(kept.random_state or "")
        _tell_again(crowd, model, part, found.bins, growth)

    def after_round(done: int) -> None:
        if keeper is not None and keeper.due:
            no_rows = np.zeros((forest.objective.n_outputs, 0))
            state = RoundState(done, no_rows, json.dumps(growth.rng.bit_generator.state))
            keeper.keep(lambda: checkpoint_with(part, seat.given, printed, state, summary), time.perf_counter())
        if seat.progress is not None:
            seat.progress(done, part)

    if seat.progress is not None:
        seat.progress(forest.rounds, part)
    run_rounds(
        lambda: _next_trees(crowd, model, part, found.bins, growth),
        forest,
        after_round,
        common.n_estimators,
        [watched(e, part.splits, threads) for e in rows],
        common.early_stopping_rounds,
        common.metrics,
    )
    crowd.tell(TrainingEnd())
    return part


def _meet(seat: Seat, edges: Sequence[str], kept: Checkpoint | None) -> tuple[Task, Crowd]:
    """Check all users' keys, and tell the edge servers the task: a new one, or that of a checkpoint."""
    party, schema = seat.party, seat.rows.table.schema
    credentials = Credentials(party, authority_of(seat.cast), "server")
    users = {edge: party.receive(edge, Users).of for edge in edges}
    for edge, of in users.items():
        for name, keys in of.items():
            credentials.check(name, "user", keys, edge)
    task = Task(
        kept.part.model_id if kept else secrets.token_hex(16), list(schema.names),
        [None if c is None else list(c) for c in schema.categories], seat.classes, terms_of(seat),
        credentials.certified, kept.rounds if kept else 0,
    )  # fmt: skip
    for edge in edges:
        party.send(edge, task)
    return task, Crowd(party, edges, credentials, users, seat.vouching, task, masked=seat.options.mode != "paper")


@dataclass(frozen=True, slots=True)
class _AllRows:
    """What the server knows of all users' rows before trees grow; `objective` has the bounds of all their gradients."""

    bins: Bins
    objective: Objective
    n_rows: int
    may_miss: NDArray[np.bool_]  # (features,): whether rows have no value
    spent: str  # in words: the smallest group of rows that the search for bins told from others


def _search(seat: Seat, crowd: Crowd, schema: Schema) -> _AllRows:
    """Open the number of rows and the bounds of gradients, then search for bins."""
    common = seat.common
    none = LabelledRows(Table(schema, [np.empty(0, np.float32)] * len(schema.names), 0), np.empty(0))
    objective = objective_for(none, seat.classes, seat.options, common)
    opening = Opening(schema, bounds=True)
    crowd.tell(Count())
    opened = crowd.total(opening.length)
    n_rows, objective = opening.rows(opened), opening.bounded(opened, objective)
    objective.check_sums(n_rows)
    bins, smallest = choose_bins(
        lambda own, length: crowd.total(length), crowd.tell, opening, opened, schema, common.max_bin,
        own=None, least_rows=common.fewest_rows, most_rounds=MOST_ROUNDS, threads=seat.threads,
    )  # fmt: skip
    fewest = int(smallest[smallest > 0].min(initial=n_rows))
    spent = told_by_search(fewest)
    return _AllRows(bins, objective, n_rows, _may_miss(opening, opened, len(schema.names), n_rows), spent)


def _known(seat: Seat, crowd: Crowd, kept: Checkpoint) -> _AllRows:
    """Return what an interrupted training knew of all rows; nothing is summed again."""
    crowd.tell(Count())
    part, name = kept.part, seat.party.name
    summary = decode_body(kept.bins, RowSummary, peer=name)
    bins = unpack_bins(decode_body(part.bins, CommonBins, peer=name), part.schema, seat.common.max_bin, name)
    may_miss = view(summary.may_miss, np.bool_, (len(bins.n_bins),), peer=name, what="RowSummary.may_miss")
    return _AllRows(bins, _forest_of(kept).objective, summary.n_rows, may_miss, part.spent)


def _forest_of(kept: Checkpoint) -> Forest:
    """Return the finished rounds of an interrupted training; later splits are dropped."""
    forest = kept.part.forest
    assert forest is not None
    forest.cut(kept.rounds)
    keep_records(kept.part.splits, records_used(forest.trees, 1)[0])
    return forest


def _tell_again(
    crowd: Crowd, model: HiddenModel | PaperModel | ShownModel, part: ModelPart, bins: Bins, growth: _Growth
) -> None:
    """Take all rows down the finished trees once more, so that users have the margins after them."""
    assert part.forest is not None
    trees, n_outputs = part.forest.trees, part.forest.objective.n_outputs
    columns = np.arange(len(bins.n_bins), dtype=np.int32)
    ends = len(columns) * np.arange(1, n_outputs + 1, dtype=np.int32)
    for first in range(0, len(trees), n_outputs):
        crowd.begin_tree(RoundStart(Array.of(np.tile(columns, n_outputs)), Array.of(ends)))
        of_round = trees[first : first + n_outputs]
        again = told(of_round, part.splits, bins, growth.rules.max_depth if growth.full_depth else None)
        for level in again.levels:
            model.split(level)
        model.finish(again.values)


def _may_miss(opening: Opening, opened: NDArray[np.int64], n_features: int, n_rows: int) -> NDArray[np.bool_]:
    """Return which features have rows without a value."""
    may_miss = np.zeros(n_features, np.bool_)
    may_miss[opening.numeric] = opening.present(opened) < n_rows
    for f, counts in opening.categories(opened).items():
        may_miss[f] = counts.sum() < n_rows
    return may_miss


def _model(seat: Seat, edges: Sequence[str], crowd: Crowd, found: _AllRows) -> HiddenModel | PaperModel | ShownModel:
    """Return what takes all rows down the trees; `expose` says how much of these users and edge servers learn."""
    shown, options = ShownModel(crowd), seat.options
    if not options.hides_model:
        return shown
    layout = layout_of(found.bins, found.may_miss)
    if options.exposes == "paper":
        return PaperModel(seat.party, edges, layout, crowd.tell, shown.finish)
    hidden = HiddenModel(seat.party, edges, layout, options.compares, turns=True)
    crowd.tell(RowOwners(hidden.row_owners()))
    return hidden


class ShownModel:
    """Tells all users the trees."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd

    def split(self, chosen: Sequence[SlotSplits]) -> None:
        """Have everybody's rows go down a level, by the splits of each tree."""
        features = np.stack([splits.features for splits in chosen])
        packed = np.packbits(np.stack([splits.left_bins for splits in chosen]), axis=2)
        self._crowd.tell(Splits(Array.of(features), Array.of(packed)))

    def finish(self, values: NDArray[np.float64]) -> None:
        """Tell the values of all leaves, float64 (trees, slots)."""
        self._crowd.tell(Values(Array.of(values)))


@dataclass(slots=True)
class _Growth:
    """How trees grow: `plan` and `rng` draw their columns; `full_depth` splits all levels, which hides the shape."""

    rules: SplitRules
    cells: Cells
    plan: BoostingPlan
    rng: np.random.Generator
    full_depth: bool
    threads: int
    n_rounds: int
    void: int = 0  # rounds begun in vain


def _next_trees(
    crowd: Crowd, model: HiddenModel | PaperModel | ShownModel, part: ModelPart, bins: Bins, growth: _Growth
) -> list[Tree]:
    """Grow a round's trees; begin the round again, `MOST_VOID` times in a job, while no domain has enough users.

    Raises `NoMoreTrees` after that; RoundVoid where there are no trees yet.
    """
    assert part.forest is not None
    while True:
        try:
            return _grow(crowd, model, part, bins, growth)
        except RoundVoid as void:
            growth.void += 1
            if growth.void <= MOST_VOID:
                continue
            if not part.forest.trees:
                raise
            logger.warning("training ends after %d of %d rounds: %s", part.forest.rounds, growth.n_rounds, void)
            raise NoMoreTrees from void


def _grow(
    crowd: Crowd, model: HiddenModel | PaperModel | ShownModel, part: ModelPart, bins: Bins, growth: _Growth
) -> list[Tree]:
    """Grow a round's trees, one per output, on sums over all users; all trees grow together, level by level.

    They end at the level at which no domain has enough users left; RoundVoid where that is the root's.
    """
    assert part.forest is not None
    cells, rules = growth.cells, growth.rules
    columns = [growth.plan.draw_columns(growth.rng) for _ in range(part.forest.objective.n_outputs)]
    ends = np.cumsum([len(c) for c in columns], dtype=np.int32)
    crowd.begin_tree(RoundStart(Array.of(np.concatenate(columns)), Array.of(ends)))

    def record(feature: int, left_bins: NDArray[np.bool_]) -> int:
        return record_split(part.splits, bins, feature, left_bins)

    trees = [SlotTree(rules, cells, c, bins.schema.categorical, record, growth.threads) for c in columns]
    depth = 0
    while depth < rules.max_depth and (growth.full_depth or any(tree.growing for tree in trees)):
        parts = _opened(crowd, [cells.length(1 << depth, c) for c in columns], root=depth == 0)
        model.split([tree.split(opened, depth) for tree, opened in zip(trees, parts, strict=True)])
        depth += 1
    finished = [tree.finish(depth) for tree in trees]
    model.finish(np.stack([values for _, values in finished]))
    return [tree for tree, _ in finished]


def _opened(crowd: Crowd, lengths: Sequence[int], *, root: bool) -> Sequence[NDArray[np.int64] | None]:
    """Return a level's sums, those of each tree int64 (length,); below the root None where nobody is left."""
    if not (root or crowd.cohort):
        return [None] * len(lengths)
    try:
        return np.split(crowd.total(sum(lengths)), np.cumsum(lengths)[:-1])
    except RoundVoid as void:
        if root:
            raise
        logger.warning("a tree ends early: %s", void)
        return [None] * len(lengths)
