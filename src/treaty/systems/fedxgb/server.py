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
`Count`,              server -> all         count rows; sum labels, and where trees start:    TLS
`LabelUnits`,                               see `horizontal.start`
`TrainingStart`
`ProbeRequest`,       server -> all         probes; the bins: see `horizontal.quantiles`      TLS
`CommonBins`
`RowSummary`          server -> all         how many rows all have, which columns have gaps   TLS
`RoundStart`          server -> all         a tree (one for each class) begins, its columns   TLS
`Attendance`          user -> edge          the user is there, and may be chosen              TLS
`Sum`                 server -> edge        open the next sum                                 TLS
sums                  users -> edge ->      bin sums of the level's slots, see `sums.user`    masks, domain's sums
                      server                and `sums.server`                                 under further masks
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
sums may always be over whole groups of three users or more (`sums.cohorts`). A domain without one adds nothing to the
rest of the tree; where that is so of all domains, the tree ends there, or the round begins again, or, at last, training
ends with the model so far.

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

import numpy as np

from treaty.machine.process import stay_on_one_core
from treaty.messaging.messages import Array, encode_body
from treaty.models.checkpoints import Checkpoint
from treaty.models.trees import ModelPart
from treaty.systems.fedxgb.authority import Credentials, authority_of
from treaty.systems.fedxgb.messages import RowSummary, Task, TrainingEnd, terms_of
from treaty.systems.fedxgb.options import PAPER_LEAKS, FedXGB, check_edges
from treaty.systems.fedxgb.paper import PaperModel, check_numeric, paper_mode
from treaty.systems.fedxgb.secfind import Crowd, Users
from treaty.systems.fedxgb.secpred import HiddenModel, RowOwners, layout_of
from treaty.systems.fedxgb.trees import (
    AllRows,
    Growth,
    Model,
    ShownModel,
    forest_of,
    known,
    next_trees,
    search,
    tell_again,
)
from treaty.systems.horizontal.quantiles import pack_bins
from treaty.systems.horizontal.rows import checkpoint_with, common_rows, printed_rows
from treaty.systems.pooled.training import watched
from treaty.systems.system import RoleInput
from treaty.trees.boosting import BoostingPlan, Forest, RoundState, run_rounds
from treaty.trees.ensemble import SplitTable
from treaty.trees.slots import Cells

logger = logging.getLogger(__name__)


def server(inputs: RoleInput[FedXGB]) -> ModelPart:
    """Train as the server; go on from its checkpoint, if the keeper finds one: finished trees are told again.

    Parameters
    ----------
    inputs : RoleInput
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
    if not inputs.alone:
        stay_on_one_core()
    party, options, common, keeper = inputs.party, inputs.options, inputs.common, inputs.keeper
    schema, classes, threads = inputs.rows.table.schema, inputs.classes, inputs.threads
    edges = inputs.roles.having("edge")
    check_edges(options, len(edges))
    column_share = options.column_share(len(schema.names), common.colsample_bytree)
    if options.exposes == "paper":
        check_numeric(schema)
    if paper_mode(options):
        logger.warning("%s: %s", party.name, PAPER_LEAKS)
    rows = [common_rows(e, schema, classes, classes, party.name) for e in inputs.eval_sets]
    printed = b"" if keeper is None else printed_rows(rows, classes)
    kept = None if keeper is None else keeper.found()
    if kept is not None:
        kept.check(inputs.given, inputs.may_change, (party.name,), printed)
    task, crowd = _meet(inputs, edges, kept)
    found = search(inputs, crowd, schema) if kept is None else known(inputs, crowd, kept)
    agreed, summary = pack_bins(found.bins, found.objective), RowSummary(found.n_rows, Array.of(found.may_miss))
    crowd.tell(agreed)
    party.round += 1
    crowd.tell(summary)
    model = _model(inputs, edges, crowd, found)
    crowd.settle()
    forest = Forest(found.objective, (party.name,), classes)
    part = ModelPart(
        model_id=task.model_id, party=party.name, schema=schema, splits=SplitTable(), forest=forest,
        spent=found.spent, bins=encode_body(agreed),
    )  # fmt: skip
    growth = Growth(
        rules=common.rules(found.objective),
        cells=Cells.of(found.bins.offsets, found.may_miss, found.n_rows, found.objective),
        plan=BoostingPlan(n_columns=len(found.bins.n_bins), colsample_bytree=column_share),
        rng=np.random.default_rng(common.random_state),
        full_depth=options.hides_model,
        threads=threads,
        n_rounds=common.n_estimators,
        recording=inputs.recording,
    )
    if kept is not None:
        part, forest = kept.part, forest_of(kept)
        growth.rng.bit_generator.state = json.loads(kept.random_state or "")
        tell_again(crowd, model, part, found.bins, growth)

    def after_round(done: int) -> None:
        if keeper is not None and keeper.due:
            no_rows = np.zeros((forest.objective.n_outputs, 0))
            state = RoundState(done, no_rows, json.dumps(growth.rng.bit_generator.state))
            keeper.keep(lambda: checkpoint_with(part, inputs.given, printed, state, summary), time.perf_counter())
        if inputs.progress is not None:
            inputs.progress(done, part)

    if inputs.progress is not None:
        inputs.progress(forest.rounds, part)
    run_rounds(
        lambda: next_trees(crowd, model, part, found.bins, growth),
        forest,
        after_round,
        common.n_estimators,
        [watched(e, part.splits, threads) for e in rows],
        common.early_stopping_rounds,
        common.metrics,
    )
    crowd.tell(TrainingEnd())
    return part


def _meet(inputs: RoleInput, edges: Sequence[str], kept: Checkpoint | None) -> tuple[Task, Crowd]:
    """Check all users' keys, and tell the edge servers the task: a new one, or that of a checkpoint."""
    party, schema = inputs.party, inputs.rows.table.schema
    credentials = Credentials(party, authority_of(inputs.roles), "server")
    users = {edge: party.receive(edge, Users).of for edge in edges}
    for edge, of in users.items():
        for name, keys in of.items():
            credentials.check(name, "user", keys, edge)
    task = Task(
        kept.part.model_id if kept else secrets.token_hex(16), list(schema.names),
        [None if c is None else list(c) for c in schema.categories], inputs.classes, terms_of(inputs),
        credentials.certified, kept.rounds if kept else 0, schema.origins,
    )  # fmt: skip
    for edge in edges:
        party.send(edge, task)
    return task, Crowd(party, edges, credentials, users, inputs.vouching, task, masked=inputs.options.mode != "paper")


def _model(inputs: RoleInput[FedXGB], edges: Sequence[str], crowd: Crowd, found: AllRows) -> Model:
    """Return what takes all rows down the trees; `expose` says how much of these users and edge servers learn."""
    shown, options = ShownModel(crowd), inputs.options
    if not options.hides_model:
        return shown
    layout = layout_of(found.bins, found.may_miss)
    if options.exposes == "paper":
        return PaperModel(inputs.party, edges, layout, crowd.tell, shown.finish)
    hidden = HiddenModel(inputs.party, edges, layout, options.compares, turns=True)
    crowd.tell(RowOwners(hidden.row_owners()))
    return hidden
