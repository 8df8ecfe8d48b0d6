"""SecureBoost: lossless vertical boosting on encrypted gradients.

Cheng, Fan, Jin, Liu, Chen, Papadopoulos, Yang, "SecureBoost: A Lossless Federated Learning Framework", IEEE
Intelligent Systems 2021 (arXiv 1901.08755); packing after Chen et al., SecureBoost+ (arXiv 2110.10927).

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned.
Output: the active party gets the trees and all leaf weights, every party its own splits. The trees are, bit for bit,
those of the plain grower on the joined table.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`Layout`              passive ->     bins per feature, which are categorical             TLS
`Setup`               active ->      model id, public key and field widths               TLS
`Hint`                passive ->     the cipher's own set-up answer                      TLS
`TreeStart`           active ->      sampled rows and columns, encrypted gradients       cipher
`SumsRequest`         active ->      which rows are in each node of the level            TLS: the passive party
                                                                                         learns them
`Sums`                passive ->     encrypted bin sums of all nodes asked               cipher, re-randomised
`SplitRequest`        active ->      of each node the owner won: feature, bins going     TLS
                                     left, the node's rows
`SplitAnswer`         passive ->     record numbers, which rows go left                  TLS
`TreeEnd`             active ->      the tree is grown                                   TLS
`Keep`, `Kept`        both ways      write a checkpoint; it is written                   TLS
`DecideRequest`       active ->      record numbers (eval rows, prediction)              TLS
`Decisions`           passive ->     which rows go left at each record                   TLS
`Finish`              active ->      training is over                                    TLS
====================  =============  ==================================================  ========================

All nodes of a level travel in one message each way, of each pair of siblings only the smaller is asked for.

Reduced leakage (`rl_trees`, paper, section 6): the active party grows the first rounds' trees on its own columns, and
the others hear of them nothing at all. With `purity_guard` they are not asked about nodes that would show labels.

Adversary: honest but curious, no party colluding with the active one. What each learns is in `disclosures`.
Deviations from the paper: candidates are not shuffled (nested sums sort themselves); the active party computes leaf
weights from its own gradients. The messages of a tree and both their ends are in `encrypted_columns`; prediction, and
the eval sets watched in training, in `decisions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from treaty.checkpoints import Keeper, checkpoint_of, fingerprint
from treaty.crypto.encrypted_sums import SumsBounds, SumsClient, make_client, make_server
from treaty.data.binning import fit_bins
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Array, Message
from treaty.messaging.party import Party
from treaty.models import ModelPart, keep_records
from treaty.options import TreeOptions
from treaty.privacy.guard import mixed_nodes
from treaty.protocols.decisions import DecideRequest, Finish, decide, decided_by_all
from treaty.protocols.encrypted_columns import (
    EncryptedGradients,
    Hint,
    Layout,
    PassiveColumns,
    SplitRequest,
    Sums,
    SumsRequest,
    TreeEnd,
    TreeOrder,
    TreeStart,
    checked_sample,
    divide,
    pack,
    unpack,
)
from treaty.protocols.pooled import Labelled, Progress, begin, objective_for, own_columns
from treaty.trees.boosting import EvalSet, Progressed, boost
from treaty.trees.columns import MayShow, SumsFinder
from treaty.trees.ensemble import SplitTable
from treaty.trees.objectives import Objective


class Setup(Message):
    """The model's id and the cipher's public set-up. Tells key and bounds, so a weight above 1 to a power of two.

    A resumed training has `resumed` set, and says how many of the passive party's records its kept rounds use.
    """

    model_id: str
    resumed: bool
    records: Annotated[int, msgspec.Meta(ge=0)]
    payload: list[Array]


class Keep(Message):
    """A round is finished: write a checkpoint. Tells how many rounds there are."""

    rounds: int


class Kept(Message):
    """The checkpoint is written, if one is."""


# ---------------------------------------------------------------- active party


def active(
    party: Party,
    data: Labelled,
    options: TreeOptions,
    *,
    parties: Sequence[str],
    classes: list[Category] | None,
    eval_sets: Sequence[Labelled] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
) -> ModelPart:
    """Train as the active party.

    Parameters
    ----------
    party : Party
        Connected with every passive party, `party.peers`.
    parties : sequence of str
        All parties in the job's order, which is that of the joined table's columns and of ties.
    data : Labelled
        Own columns (perhaps none), labels (for `label_rr` the noisy ones), weights.
    classes : list or None
        Labels by class number; None for regression.
    eval_sets : sequence of Labelled
        Rows every party holds as well, in the same order.
    keeper : Keeper or None
        Where checkpoints go, and come from.

    Returns
    -------
    ModelPart
        Own splits, all trees and leaf weights.

    Raises
    ------
    ConfigError, PeerProtocolError
        When parties disagree on parameters or rows, or one sends what the protocol does not allow.
    """
    n_rows = data.table.n_rows
    agree(party, terms(options, n_rows, [e.table.n_rows for e in eval_sets]))
    objective = objective_for(data, classes, options)
    objective.check_sums(n_rows)
    begun = begin(data, objective, options, party.name, tuple(parties), classes, eval_sets, keeper)
    part, forest = begun.part, begun.forest
    own = own_columns(data.table, options, part.splits, threads)
    alone_trees = (options.rl_trees or 0) * objective.n_outputs
    if alone_trees and len(own.categorical) == 0:
        raise ConfigError("rl_trees needs columns at the active party, which grows those trees alone; it has none")
    client = _make_client(objective, n_rows, options, threads)
    gradients = EncryptedGradients(party, client, n_rows, first_tree=max(alone_trees, len(forest.trees)))
    payload = pack(client.setup())
    records = dict(zip(parties, begun.records, strict=True))
    for peer in party.peers:
        party.send(peer, Setup(part.model_id, begun.resume is not None, records[peer], payload))
    sources = [own if name == party.name else PassiveColumns(party, name, gradients, n_rows) for name in parties]
    rules = options.rules(objective)
    finder = SumsFinder(
        sources,
        n_rows,
        rules,
        threads,
        own=list(parties).index(party.name),
        alone_trees=alone_trees,
        may_show=_guard(data, classes, options),
        first_tree=len(forest.trees),
    )

    def on_round(progressed: Progressed) -> None:
        if keeper is not None and keeper.due:
            for peer in party.peers:
                party.send(peer, Keep(progressed.rounds))
            for peer in party.peers:
                party.receive(peer, Kept)
            begun.keep(keeper, options, progressed)
        if progress is not None:
            progress(progressed.rounds, part)

    if progress is not None:
        progress(forest.rounds, part)
    boost(
        finder,
        data.y,
        data.weight,
        forest,
        rules,
        n_columns=sum(len(source.categorical) for source in sources),
        eval_sets=[
            EvalSet(rows.name, rows.y, rows.weight, decided_by_all(party, part, rows.table, number, threads))
            for number, rows in enumerate(eval_sets)
        ],
        on_round=on_round,
        resume=begun.resume,
        threads=threads,
        **options.sampling(),
    )
    for peer in party.peers:
        party.send(peer, Finish())
    return part


def _make_client(objective: Objective, n_rows: int, options: TreeOptions, threads: int) -> SumsClient:
    """Make the key's owner; the bounds hold for gradients that one-side sampling multiplies, too."""
    factor = 1.0 if options.one_side is None else max(1.0, options.one_side.factor)
    bounds = SumsBounds(n_rows, math.ceil(objective.grad_bound * factor), math.ceil(objective.hess_bound * factor))
    return make_client(
        options.cipher,
        bounds,
        threads=threads,
        insecure_test_key_bits=options.insecure_test_key_bits,
        key_bits=options.key_bits,
    )


def _guard(data: Labelled, classes: list[Category] | None, options: TreeOptions) -> MayShow | None:
    if options.purity_guard is None:
        return None
    if classes is None:
        raise ConfigError("purity_guard is about classes; a regression has none: leave it out (None)")
    return mixed_nodes(data.y, len(classes), options.purity_guard)


# ---------------------------------------------------------------- passive party


def passive(
    party: Party,
    table: Table,
    options: TreeOptions,
    *,
    eval_tables: Sequence[Table] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
) -> ModelPart:
    """Train as a passive party: answer the active one, `party.peers[0]`, until it is done.

    Parameters
    ----------
    table : Table
        Own columns of the aligned training rows.
    eval_tables : sequence of Table
        Own columns of the eval sets, in the active party's order.
    keeper : Keeper or None
        Where checkpoints go, and come from.

    Returns
    -------
    ModelPart
        Own splits.
    """
    (lead,) = party.peers
    agree(party, terms(options, table.n_rows, [t.n_rows for t in eval_tables]))
    bins = fit_bins(table, options.max_bin, threads)
    codes = bins.transform(table, threads)
    categorical = np.array([c is not None for c in table.schema.categories], np.bool_)
    party.send(lead, Layout(Array.of(bins.offsets), Array.of(categorical)))
    setup = party.receive(lead, Setup)
    printed = b"" if keeper is None else fingerprint([(rows, ()) for rows in (table, *eval_tables)])
    if setup.resumed:
        part = _resumed_part(setup, keeper, options, printed)
    else:
        part = ModelPart(model_id=setup.model_id, party=party.name, schema=table.schema, splits=SplitTable())
    server = make_server(
        options.cipher,
        unpack(setup.payload, lead, "Setup"),
        codes,
        bins.offsets,
        threads=threads,
        insecure_test_key_bits=options.insecure_test_key_bits,
        rerandomise=options.rerandomise is not False,
    )
    party.send(lead, Hint(pack(server.hint())))
    matrices = [t.matrix() for t in eval_tables]
    trees = 0
    order = TreeOrder(lead, options.max_depth, options.fewest_rows)
    while True:
        match party.receive(lead, TreeStart, TreeEnd, SumsRequest, SplitRequest, DecideRequest, Keep, Finish):
            case TreeStart() as start:
                if progress is not None:
                    progress(trees, part)
                order.start()
                trees += 1
                party.round = trees
                sample, columns = checked_sample(start, lead, table.n_rows, len(categorical))
                server.begin_tree(unpack(start.payload, lead, "TreeStart"), sample, columns)
                del start  # or it would keep the ciphertexts until the next tree's are here
            case TreeEnd():
                order.end()
                server.end_tree()
            case SumsRequest() as request:
                order.sums()
                party.send(lead, Sums(pack(server.answer(unpack(request.payload, lead, "SumsRequest")))))
            case SplitRequest() as request:
                order.split(request)
                party.send(lead, divide(request, lead, codes, bins, part.splits))
            case DecideRequest() as request:
                party.send(lead, decide(request, lead, matrices, part.splits, threads))
            case Keep():
                if keeper is not None:
                    keeper.keep(lambda: checkpoint_of(part, options, printed))
                party.send(lead, Kept())
            case Finish():
                if progress is not None:
                    progress(trees, part)
                return part


def _resumed_part(setup: Setup, keeper: Keeper | None, options: TreeOptions, table: bytes) -> ModelPart:
    """Return the part to go on with: the records of the rounds that the active party kept."""
    found = None if keeper is None else keeper.found()
    if found is None or found.part.model_id != setup.model_id or len(found.part.splits) < setup.records:
        raise ConfigError(
            f"cannot resume: expected a checkpoint of model {setup.model_id[:8]} with {setup.records} splits, got "
            + ("none" if found is None else f"one of model {found.part.model_id[:8]} with {len(found.part.splits)}")
            + f" - at {keeper.path if keeper else 'this party, which keeps none'}",
            public="it has no checkpoint of the training to resume",
        )
    found.check(options, (), table)
    keep_records(found.part.splits, setup.records)
    return found.part


# ---------------------------------------------------------------- both


def terms(options: TreeOptions, n_rows: int, eval_rows: Sequence[int]) -> Mapping[str, str | int | float | bool | None]:
    """Return what all parties must agree on before anything is sent: every option but the sampling seed, and rows."""
    public = {name: getattr(options, name) for name in options.__struct_fields__ if name != "random_state"}
    return {**public, "training rows": n_rows, "eval rows": ", ".join(map(str, eval_rows))}


def disclosures(lead: str, others: Sequence[str], options: TreeOptions) -> dict[str, list[str]]:
    """Say in words what each party of a training learned beyond its own data and its own splits."""
    learned = {
        lead: [
            "of every column of the others (by number, not name): how many bins it has, which of them is fullest, and "
            "at every node the sum of gradients, sum of hessians and number of rows in each bin",
            "of every split another party won: which of the node's training rows go left; for eval sets and at "
            "prediction, each row's side at every such split",
            "the shape of all trees and all leaf weights",
        ]
    }
    if options.he_inference:
        learned[lead][1] = (
            "of every split another party won: which of the node's training rows go left, and of eval sets each row's "
            "side; at prediction one sum of leaf weights per row, which gives away the decisions on the row's paths "
            "unless the model is large (docs/prediction.md)"
        )
    if options.rerandomise is False:
        learned[lead].append("which rows are in a bin, if it looks: answers were not re-randomised")
    if options.mode == "safe" and options.fewest_rows < 20:
        learned[lead].append(
            f"leaves of as few as {options.fewest_rows} training rows (min_child_samples was lowered from 20), so that "
            "sums and splits may describe single rows"
        )
    rows = f"which training rows are together in each node {lead} asked it about, and so in part which have similar "
    kept_from = (
        f"labels, as randomised with epsilon {options.epsilon:g} (gradients stay encrypted; all trees together tell no "
        "more of a label than that; true labels of eval sets, and weights that depend on labels, are not covered)"
        if options.epsilon is not None
        else "labels (gradients and labels themselves stay encrypted)"
    )
    for name in others:
        learned[name] = [
            rows + kept_from,
            "which of its own columns and bins were chosen, at how many nodes",
            "the number of trees and levels, and each tree's sample of rows and of its own columns",
        ]
        if options.rl_trees:
            learned[name].append(f"nothing of the trees of the first {options.rl_trees} rounds")
        if options.purity_guard is not None:
            learned[name].append(
                f"nothing of nodes below a split with a child whose class shares differ from the table's by more than "
                f"{options.purity_guard:g}, but that there is such a child; at a split of its own, which rows are in it"
            )
        if options.goss:
            learned[name].append(
                "that rows in many trees' samples have large gradients: they are predicted worst (goss)"
            )
    return learned
