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
`LinkProbe`, -`d`     both ways      nothing, to measure the link (encryption "auto")    TLS
`Setup`               active ->      model id, which cipher, its key and field widths    TLS
`Seed...`             both ways      lattice: a public seed of all (`public_seed`)       commitments
`Hint`, `HintTaken`   passive ->     the cipher's own set-up answer                      TLS; lattice: cipher
`TreeStart`           active ->      sampled rows and columns, encrypted gradients;      cipher
                                     lattice: sampled columns
`SumsRequest`         active ->      which rows are in each node of the level;           TLS: the passive party
                                     lattice: an encrypted vector per node               learns them; cipher
`Sums`                passive ->     encrypted bin sums of all nodes asked               cipher, re-randomised
                                                                                         or flooded
`SplitRequest`        active ->      of each node the owner won: feature, bins going     TLS
                                     left, the node's rows (lattice, column: not)
`SplitAnswer`         passive ->     record numbers, which rows of the nodes go left     TLS
`SplitColumns`        passive ->     lattice, column: which rows of the table go left    TLS
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.lattice.parameters import LEAK_LIMIT
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.payload import Payload
from treaty.crypto.sums.encrypted_sums import (
    SumsBounds,
    SumsClient,
    SumsServer,
    make_client,
    make_server,
)
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.data.binning import fit_bins
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Array
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart
from treaty.privacy.guard import mixed_nodes
from treaty.systems.pooled.training import Begun, Labelled, Progress, begin, own_columns
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical.active import Keep, Start, finish, grow, terms
from treaty.systems.vertical.cipher_choice import LinkProbe, LinkProbed, choose_cipher
from treaty.systems.vertical.column_owner import SplitOwner, TreeOrder, checked_sample, send_hint
from treaty.systems.vertical.decisions import DecideRequest, Finish
from treaty.systems.vertical.encrypted_columns import (
    EncryptedGradients,
    Layout,
    PassiveColumns,
    SplitRequest,
    Sums,
    SumsRequest,
    TreeEnd,
    TreeStart,
    pack,
    take_hints,
    unpack,
)
from treaty.systems.vertical.passive import Following
from treaty.systems.vertical.public_seed import agree_on_seed, follow_seed
from treaty.trees.columns import MayShow, SumsFinder
from treaty.trees.objectives import Objective

Steps = Callable[[int, int], None]
MakeClient = Callable[[SumsBounds, Mapping[str, NDArray[np.int32]]], SumsClient]
"""Makes the active party's end of a cipher from bounds and the first slots of every peer's features."""
MakeServer = Callable[[Payload, NDArray[np.uint8], NDArray[np.int32]], SumsServer]
"""Makes a passive party's end from the set-up, its codes and its features' first slots."""


class Setup(Start):
    """The cipher's public set-up. Tells key and bounds, so a weight above 1 to a power of two.

    `encryption` is the cipher, which the active party chose where the job leaves it to it.
    """

    encryption: str
    payload: list[Array]


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
    store: HintStore | None = None,
    hinting: Steps | None = None,
    client_of: MakeClient | None = None,
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
    store : HintStore or None
        Keeps hints of the lattice map for later jobs. None: for this one.
    hinting : callable or None
        Called while hints come in, with steps done and steps in all.
    client_of : callable or None
        What hides the sums. None: the cipher that the options name or leave open.

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
    begun = begin(data, options, party.name, tuple(parties), classes, eval_sets, keeper)
    part, forest = begun.part, begun.forest
    objective = forest.objective
    objective.check_sums(n_rows)
    own = own_columns(data.table, options, part.splits, threads)
    alone_trees = (options.rl_trees or 0) * objective.n_outputs
    if alone_trees and len(own.categorical) == 0:
        raise ConfigError("rl_trees needs columns at the active party, which grows those trees alone; it has none")
    first_tree = max(alone_trees, len(forest.trees))
    others = _columns_of_others(party, options, begun, n_rows, first_tree, store, hinting, threads, client_of)
    sources = [own if name == party.name else others[name] for name in parties]
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

    grow(party, data, options, begun, finder, sources, eval_sets, threads, progress, keeper)
    finish(party)
    return part


def _columns_of_others(
    party: Party,
    options: TreeOptions,
    begun: Begun,
    n_rows: int,
    first_tree: int,
    store: HintStore | None,
    hinting: Steps | None,
    threads: int,
    client_of: MakeClient | None,
) -> dict[str, PassiveColumns]:
    """Set up a cipher with every passive party; return their columns as the grower sees them."""
    others = {peer: PassiveColumns(party, peer, n_rows) for peer in party.peers}
    layouts = {peer: columns.offsets for peer, columns in others.items()}
    part, objective = begun.part, begun.forest.objective
    bounds = _bounds(objective, n_rows, options)
    trees = (options.n_estimators - begun.forest.rounds) * objective.n_outputs
    choice = choose_cipher(party, options, bounds, layouts, trees, store, threads)
    part.encryption, part.choice = choice.cipher, choice.why
    client = (
        client_of(bounds, layouts)
        if client_of is not None
        else make_client(
            choice.cipher,
            bounds,
            threads=threads,
            insecure_test_key_bits=options.insecure_test_key_bits,
            key_bits=options.key_bits,
            store=store,
            blind=options.hides_nodes(choice.cipher),
        )
    )
    payload = pack(client.setup())
    for peer in party.peers:
        party.send(peer, Setup(part.model_id, begun.resume is not None, begun.records[peer], choice.cipher, payload))
    if isinstance(client, LatticeSumsClient):
        agree_on_seed(party, client, layouts)
    take_hints(client, list(others.values()), party, hinting)
    gradients = EncryptedGradients(party, client, n_rows, first_tree)
    for columns in others.values():
        columns.gradients, columns.by_column = gradients, options.reveals_columns(choice.cipher)
    return others


def _bounds(objective: Objective, n_rows: int, options: TreeOptions) -> SumsBounds:
    """Return what sums hold at most, gradients that one-side sampling multiplies too."""
    factor = 1.0 if options.one_side is None else max(1.0, options.one_side.factor)
    return SumsBounds(n_rows, math.ceil(objective.grad_bound * factor), math.ceil(objective.hess_bound * factor))


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
    store: HintStore | None = None,
    hinting: Steps | None = None,
    server_of: MakeServer | None = None,
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
    store : HintStore or None
        Keeps hints of the lattice map for later jobs, and what answers leaked. None: for this one.
    hinting : callable or None
        Called while a hint is made, with steps done and steps in all.
    server_of : callable or None
        The other end of the active party's `client_of`.

    Returns
    -------
    ModelPart
        Own splits.
    """
    (lead,) = party.peers
    agree(party, terms(options, table.n_rows, [t.n_rows for t in eval_tables]))
    bins = fit_bins(table, options.max_bin, threads)
    codes = bins.transform(table, threads)
    categorical = table.schema.categorical
    party.send(lead, Layout(Array.of(bins.offsets), Array.of(categorical)))
    left = LEAK_LIMIT - (store.spent(table.schema.names) if store is not None else 0.0)
    setup = _set_up(party, lead, options, left)
    following = Following(party, setup, table, options, eval_tables, keeper)
    part = following.part
    part.encryption = setup.encryption
    payload = unpack(setup.payload, lead, "Setup")
    server = (
        server_of(payload, codes, bins.offsets)
        if server_of is not None
        else make_server(
            setup.encryption,
            payload,
            codes,
            bins.offsets,
            threads=threads,
            insecure_test_key_bits=options.insecure_test_key_bits,
            rerandomise=options.rerandomise is not False,
            names=table.schema.names,
            store=store,
            blind=options.hides_nodes(setup.encryption),
        )
    )
    owner = SplitOwner(lead, codes, bins, part.splits)
    trees = 0
    order = TreeOrder(lead, options.max_depth, options.fewest_rows, options.reveals_columns(setup.encryption))
    with closing(server):  # an aborted job gives back what it reserved of the ledger, too
        if isinstance(server, LatticeSumsServer):
            follow_seed(party, server)
        send_hint(party, server.hint(hinting))
        while True:
            match party.receive(lead, TreeStart, TreeEnd, SumsRequest, SplitRequest, DecideRequest, Keep, Finish):
                case TreeStart() as start:
                    if progress is not None:
                        progress(trees, part)
                    sample, columns = checked_sample(start, lead, table.n_rows, len(categorical))
                    order.start(columns)
                    trees += 1
                    party.round = trees
                    server.begin_tree(unpack(start.payload, lead, "TreeStart"), sample, columns)
                    del start  # or it would keep the ciphertexts until the next tree's are here
                case TreeEnd():
                    order.end()
                    server.end_tree()
                case SumsRequest() as request:
                    query = unpack(request.payload, lead, "SumsRequest")
                    order.sums(request, server.nodes_of(query))
                    party.send(lead, Sums(pack(server.answer(query))))
                case SplitRequest() as request:
                    order.split(request)
                    party.send(lead, owner.divide(request))
                case DecideRequest() as request:
                    following.decide(request, threads)
                case Keep():
                    following.keep()
                case Finish():
                    if progress is not None:
                        progress(trees, part)
                    return part


def _set_up(party: Party, lead: str, options: TreeOptions, left: float) -> Setup:
    """Let the active party measure the link, and take its set-up."""
    while not isinstance(message := party.receive(lead, LinkProbe, Setup), Setup):
        party.send(lead, LinkProbed(left))
    if message.encryption not in (("lattice", "ou") if options.cipher == "auto" else (options.cipher,)):
        raise PeerProtocolError(
            lead, f"expected encryption {options.cipher!r}, got {message.encryption!r} - at Setup from {lead}"
        )
    return message
