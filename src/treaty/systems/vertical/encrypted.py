"""Training over encrypted sums: both roles as SecureBoost and FedXGBoost-SMM have them, for any cipher.

====================  =============  ==================================================  ========================
message               from -> to     content                                             protection
====================  =============  ==================================================  ========================
`BinLayout`           passive ->     bins per feature, which are categorical, what      TLS
                                     exact sums will show by an estimate
`LinkProbe`           active ->      nothing, to measure the link (cipher "auto",        TLS
                                     sealed sums)
`LinkEcho`            passive ->     how much its answers may still leak                 TLS
`Setup`               active ->      model id, which cipher, its key and field widths    TLS
`Seed...`             both ways      lattice: a public seed of all (`public_seed`)       commitments
`Hint`                passive ->     the cipher's own set-up answer, in pieces           TLS; lattice: cipher
`HintReceipt`         active ->      the piece has arrived                               TLS
`TreeStart`           active ->      sampled rows and columns, encrypted gradients;      cipher
                                     blind: sampled columns
`TreeRows`            active ->      more of both, where rows are many                   cipher
`SumsPiece`           active ->      as `SumsRequest`, of some rows                      as `SumsRequest`
`SumsRequest`         active ->      which rows are in each node of the level;           TLS: the passive party
                                     blind: an encrypted vector per node                 learns them; cipher
`Sums`                passive ->     encrypted bin sums of all nodes asked               cipher, re-randomised
                                                                                         or flooded
`SplitRequest`        active ->      of each node the owner won: feature, bins going     TLS
                                     left
`NamedRows`           active ->      the nodes' rows (reveal="column": not sent)         TLS
`SplitAnswer`         passive ->     record numbers, which rows of the nodes go left     TLS
`SplitColumns`        passive ->     reveal="column": which rows of the table go left    TLS
`TreeEnd`             active ->      the tree is grown                                   TLS
`CheckpointRequest`, `CheckpointReceipt`        both ways      write a checkpoint; it is written                   TLS
`DecideRequest`       active ->      record numbers (eval rows, prediction)              TLS
`Decisions`           passive ->     which rows go left at each record                   TLS
`Finish`              active ->      training is over                                    TLS
====================  =============  ==================================================  ========================

All nodes of a level travel in one round, in messages of at most 64 MB; of each pair of siblings only the smaller is
asked for. A blind cipher encrypts all rows for each node, so that passive parties do not see which rows are in it. The
trees are, bit for bit, those of the plain grower on the joined table. What each message tells is in its docstring
(`encrypted_columns`); each system's `roles` has its adversary and assumptions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.sums import ClusterHistograms, over_cluster
from treaty.crypto.lattice.parameters import LEAK_LIMIT
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.payload import Payload, SumsBounds
from treaty.crypto.sums.encrypted_sums import ALONE, SumsClient, SumsServer, make_client, make_server
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.conversation import Order
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Arrays, Message, pack, unpack, view
from treaty.messaging.party import Party
from treaty.models.checkpoints import hints_folder, sides_folder
from treaty.models.trees import ModelPart
from treaty.systems.pooled.training import Training, own_columns
from treaty.systems.system import RoleInput
from treaty.systems.vertical.active import Start, finish, grow, open_training, start_of
from treaty.systems.vertical.audit.keeping import (
    KeepingFinder,
    PassiveRecord,
    check_active_size,
    from_the_start,
    keep_active,
    keep_passive,
    new_number,
)
from treaty.systems.vertical.cipher_choice import JobSize, beyond_lattice, choose_cipher, tell_cost_of_sealing
from treaty.systems.vertical.cipher_options import CipherOptions
from treaty.systems.vertical.column_owner import (
    SplitOwner,
    ascending,
    bin_own_columns,
    checked_sample,
    encrypted_table,
    send_hint,
    show_layout,
)
from treaty.systems.vertical.encrypted_columns import (
    EncryptedGradients,
    PassiveColumns,
    SplitRequest,
    Sums,
    SumsPiece,
    SumsRequest,
    ToldShare,
    TreeEnd,
    TreeRows,
    TreeStart,
    sums_bounds,
    take_hints,
)
from treaty.systems.vertical.exact_sums import check_share, check_sides, expected_share, watched
from treaty.systems.vertical.links import PROBES, LinkEcho, LinkProbe
from treaty.systems.vertical.named_rows import take_nodes
from treaty.systems.vertical.passive import Answer, Follower, TreeLimits
from treaty.systems.vertical.public_seed import agree_on_seed, follow_seed
from treaty.systems.vertical.sealed.active import SealedFinder, SealedGradients, SealedPeer, make_ends
from treaty.systems.vertical.sealed.level import SealedSumsRequest, WonCandidates
from treaty.systems.vertical.sealed.passive import SealedOwner
from treaty.systems.vertical.told_sides import ToldSides
from treaty.trees.columns import MayShow, SumsFinder

logger = logging.getLogger(__name__)

MakeClient = Callable[[SumsBounds, Mapping[str, NDArray[np.int32]]], SumsClient]
"""Makes the active party's end of a cipher from bounds and the first slots of every peer's features."""
Divide = Callable[[SplitRequest], Iterator[Message]]
"""Records splits; returns the messages that say which rows go left."""
MakeServer = Callable[[Payload, NDArray[np.uint8], NDArray[np.int32]], SumsServer]
"""Makes a passive party's end from the set-up, its codes and its features' first slots."""


class Setup(Start):
    """The cipher's public set-up. Tells the public key and bounds, and so the largest weight above 1 to a power of two.

    `encryption` is the cipher, which the active party chose where the job leaves it open; `audit` is the number of the
    record that it keeps for an audit of gradients, empty where it keeps none.
    """

    leakage: ClassVar = MessageLeakage(
        "the model's number, the cipher, its public key, and the largest weight above 1 to a power of two",
        "control",
    )

    encryption: str
    payload: Arrays
    audit: bytes = b""


def _open_store(inputs: RoleInput, options: CipherOptions) -> HintStore:
    """Open the store of the lattice map's hints and of what answers leaked; without a folder it lasts for this job."""
    kept = inputs.store is not None and options.may_hint
    return HintStore(hints_folder(inputs.store, inputs.party.name) if kept and inputs.store is not None else None)


# ---------------------------------------------------------------- active party


def train_active(
    inputs: RoleInput,
    options: CipherOptions,
    *,
    alone_rounds: int = 0,
    may_show: MayShow | None = None,
    client_of: MakeClient | None = None,
) -> ModelPart:
    """Train as the active party.

    The first `alone_rounds` rounds use own columns alone; `may_show` says which nodes passive parties may be asked
    about. `client_of` makes the active party's end of the sums; None: by the cipher that is named or chosen.
    """
    training = open_training(inputs)
    data, common, threads = inputs.rows, inputs.common, inputs.threads
    part, forest, n_rows = training.part, training.forest, data.table.n_rows
    forest.objective.check_sums(n_rows)
    histograms = ClusterHistograms.of_columns(inputs.shards, inputs.party.name)
    own = own_columns(data.table, common.most_bins, part.splits, threads, histograms)
    alone_trees = alone_rounds * forest.objective.n_outputs
    if alone_trees and len(own.categorical) == 0:
        raise ConfigError("rl_trees needs columns at the active party, which grows those trees alone; it has none")
    with _open_store(inputs, options) as store:
        first_tree = max(alone_trees, len(forest.trees))
        number = b"" if inputs.audit is None else new_number()
        if inputs.audit is not None:
            check_active_size(inputs, inputs.audit, forest)
        others, gradients = _columns_of_others(inputs, options, training, first_tree, store, client_of, number)
        sources = [others.get(name, own) for name in inputs.roles.owners]
        for columns in others.values():
            columns.recording = inputs.recording
        seen = sources if options.sealed else watched(inputs.recording, sources, others)
        finder = (SealedFinder if options.sealed else SumsFinder if inputs.audit is None else KeepingFinder)(
            seen, n_rows, common.rules(forest.objective), threads, own=inputs.roles.owners.index(inputs.party.name),
            alone_trees=alone_trees, may_show=may_show, first_tree=len(forest.trees),
        )  # fmt: skip
        if isinstance(finder, SealedFinder) and isinstance(gradients, SealedGradients):
            finder.gradients = gradients
        with ExitStack() as held:
            if inputs.audit is not None and isinstance(finder, KeepingFinder):
                training = from_the_start(training, common, n_rows)
                widths = [len(source.categorical) for source in sources]
                record = keep_active(inputs, inputs.audit, training, number, gradients, widths)
                finder.on_tree = record.finish_tree
                for columns in others.values():
                    columns.notes = record
                held.callback(record.file.close)
            grow(inputs, training, finder, sources)
            finish(inputs.party)
    for peer in others:
        part.sides[peer] = inputs.party.receive(peer, ToldShare).share
    return part


def _columns_of_others(
    inputs: RoleInput,
    options: CipherOptions,
    training: Training,
    first_tree: int,
    store: HintStore,
    client_of: MakeClient | None,
    audit: bytes,
) -> tuple[dict[str, PassiveColumns], EncryptedGradients]:
    """Set up a cipher with every passive party; return their columns as the grower sees them, and what goes to all.

    `audit` is the number of the record for an audit, empty without one.
    """
    party, common, n_rows, part = inputs.party, inputs.common, inputs.rows.table.n_rows, training.part
    objective = training.forest.objective
    others = {peer: (SealedPeer if options.sealed else PassiveColumns)(party, peer, n_rows) for peer in party.peers}
    for peer, columns in others.items():
        part.exact_sums[peer] = 0.0 if options.sealed else 1.0 if columns.known is None else columns.known
        check_share(inputs, peer, part.exact_sums[peer])
    layouts = {peer: columns.offsets for peer, columns in others.items()}
    trees = max(0, common.n_estimators * objective.n_outputs - first_tree)
    job = JobSize(sums_bounds(n_rows, objective, common), common.rules(objective), trees, inputs.threads)
    if options.sealed and (unfit := beyond_lattice(job.bounds, layouts, trees, common.max_depth, sealed=True)):
        raise ConfigError(
            f"sums cannot be sealed here: {unfit}; or take {options.to_open}; docs/secureboost.md has what it shows",
            public="sums cannot be sealed: the lattice map does not hold so many rows, columns or trees, or weights",
        )
    choice = choose_cipher(party, options, common, job, layouts, store, one_node=bool(audit))
    part.encryption, part.choice = choice.cipher, choice.why
    if not options.sealed and (why := inputs.options.why_open(common)):
        part.choice += f"; sums are open: {why}"
        logger.info("%s: sums are open: %s (docs/secureboost.md has what they show)", party.name, why)
    if client_of is not None:
        client = client_of(job.bounds, layouts)
    else:
        client = make_client(
            choice.cipher, job.bounds, threads=inputs.threads, key_bits=options.key_bits,
            insecure_test_key_bits=options.insecure_test_key_bits, store=store,
            blind=options.hides_nodes(choice.cipher), sealed=options.sealed, nodes=choice.nodes,
            ends=ALONE if inputs.shards is None else over_cluster(inputs.shards),
        )  # fmt: skip
    payload = pack(client.setup())
    for peer in party.peers:
        party.send(peer, Setup(*start_of(training, peer), choice.cipher, payload, audit))
    if isinstance(client, LatticeSumsClient):
        agree_on_seed(party, client, layouts)
    take_hints(client, list(others.values()), party, inputs.steps("hints"))
    sealed = {name: columns for name, columns in others.items() if isinstance(columns, SealedPeer)}
    if sealed:
        make_ends(party, sealed, choice.links, job.bounds, job.rules)
        of_a_tree = {name: common.colsample_bytree * columns.count_candidates() for name, columns in sealed.items()}
        step = next(iter(sealed.values())).end.step
        part.choice = tell_cost_of_sealing(party.name, choice.links, of_a_tree, job, step, options.to_open)
    gradients = (SealedGradients if sealed else EncryptedGradients)(party, client, n_rows, first_tree)
    for columns in others.values():
        columns.gradients, columns.by_column = gradients, options.reveals_columns(choice.cipher)
    return others, gradients


# ---------------------------------------------------------------- passive party


def train_passive(inputs: RoleInput, options: CipherOptions, *, server_of: MakeServer | None = None) -> ModelPart:
    """Train as a passive party; `server_of` makes the other end of the active party's `client_of`."""
    with _open_store(inputs, options) as store:
        return _train_passive(inputs, options, store, server_of)


def _train_passive(
    inputs: RoleInput, options: CipherOptions, store: HintStore, server_of: MakeServer | None
) -> ModelPart:
    party, table, common = inputs.party, inputs.rows.table, inputs.common
    (active,) = party.peers
    bins, codes = bin_own_columns(inputs)
    share = 0.0 if options.sealed else expected_share(codes, common, inputs.trees_a_round, varied=inputs.varied)
    check_share(inputs, party.name, share)  # before anything is sent
    show_layout(inputs, bins, share)
    left = 0.0 if options.sealed else LEAK_LIMIT - store.spent(table.schema.names)  # told to choose a cipher, if at all
    setup = _set_up(party, active, options, left)
    follower = Follower(inputs, setup)
    follower.part.encryption, follower.part.exact_sums = setup.encryption, {party.name: share}
    payload = unpack(setup.payload, active, "Setup")
    if server_of is not None:
        server = server_of(payload, codes, bins.offsets)
    else:
        server = make_server(
            setup.encryption, payload, codes, bins.offsets, threads=inputs.threads,
            insecure_test_key_bits=options.insecure_test_key_bits, rerandomise=options.rerandomise,
            names=table.schema.names, store=store,
            blind=options.hides_nodes(setup.encryption), sealed=options.sealed,
            ends=ALONE if inputs.shards is None else over_cluster(inputs.shards),
        )  # fmt: skip
    told = ToldSides(None if inputs.store is None else sides_folder(inputs.store, party.name), bins, codes)
    owner = SplitOwner(active, codes, bins, follower.part.splits, told)
    grown = 0.0  # by the last tree
    limits = TreeLimits(active, common.max_depth, common.fewest_rows)
    by_column = options.reveals_columns(setup.encryption)

    record: PassiveRecord | None = None
    sealed: SealedOwner | None = None
    follower.part.sides = {party.name: told.share}

    def kept(*messages: Message) -> None:
        if record is not None:
            record.note(*messages)

    def start_tree(start: TreeStart) -> None:
        follower.limits.tree()
        check_sides(inputs, follower.part.sides[party.name], grown)
        follower.next_tree()
        kept(start)
        sample, columns = checked_sample(start, active, *codes.shape)
        limits.start(columns)
        if sample is not None:
            limits.sampled(sample)
        server.begin_tree(unpack(start.payload, active, "TreeStart"), sample, columns, start.n_rows)

    add_rows, add_sums, answer_sums = _answering(server, limits, active, table.n_rows, kept)

    def divide(request: SplitRequest) -> Iterator[Message]:
        if by_column:
            return owner.divide_table(request)
        named = take_nodes(party, active, request.features.shape[0], table.n_rows, kept)
        return owner.divide_nodes(request, named, limits.node_sizes)

    def answer_split(request: SplitRequest, divide: Divide = divide) -> Iterator[Message]:
        limits.split(request)
        kept(request)
        for answer in divide(request):
            kept(answer)
            yield answer

    def end_tree(end: TreeEnd) -> None:
        if record is not None:
            record.end_tree(end)
        if sealed is not None and not by_column:
            sealed.end_tree(end)
        nonlocal grown
        grown = told.share - follower.part.sides[party.name]
        follower.part.sides[party.name] = told.share
        server.end_tree()

    with ExitStack() as held:
        held.enter_context(closing(server))  # so that an aborted job, too, gives back what it reserved in the ledger
        if isinstance(server, LatticeSumsServer):
            follow_seed(party, server)
        if inputs.audit is not None:
            seed = server.seed if isinstance(server, LatticeSumsServer) else b""
            record = keep_passive(inputs, inputs.audit, setup, options.hides_nodes(setup.encryption), seed)
            held.callback(record.file.close)
        send_hint(party, server.hint(inputs.steps("hints")))
        handlers: dict[type[Message], Callable[[Any], Answer]] = {
            TreeStart: start_tree, TreeRows: add_rows, SumsPiece: add_sums, TreeEnd: end_tree,
        }  # fmt: skip
        if not isinstance(server, LatticeSumsServer) or not options.sealed:
            handlers |= {SumsRequest: answer_sums, SplitRequest: answer_split}
            follower.follow(Order(encrypted_table(SumsRequest, SplitRequest), "between trees"), handlers)
            return _with_share(party, active, follower.part)
        sealed = SealedOwner(inputs, server, bins.offsets, owner)
        held.callback(sealed.end_tree, None)
        answer = answer_split if by_column else partial(answer_split, divide=sealed.divide)
        handlers |= _under_seal(inputs, server, sealed, start_tree, answer_sums, answer)
        states = encrypted_table(SealedSumsRequest, WonCandidates)
        follower.follow(Order(states, "between trees"), handlers)
        return _with_share(party, active, follower.part)


def _with_share(party: Party, active: str, part: ModelPart) -> ModelPart:
    """Tell the active party the part's count of what sides tell, and return the part."""
    party.send(active, ToldShare(part.sides[party.name]))
    return part


def _answering(
    server: SumsServer, limits: TreeLimits, active: str, n_rows: int, kept: Callable[[Message], None]
) -> tuple[Callable[[TreeRows], None], Callable[[SumsPiece], None], Callable[[SumsRequest], Sums]]:
    """Return what a passive party does with more rows of a tree, a piece of a question, and its last one."""

    def add_rows(rows: TreeRows) -> None:
        kept(rows)
        more = None if rows.rows is None else ascending(rows.rows, n_rows, active, "TreeRows.rows")
        if more is not None:
            limits.sampled(more)
        server.add_rows(unpack(rows.payload, active, "TreeRows"), more)

    def take(piece: SumsPiece | SumsRequest) -> int:
        kept(piece)
        query = unpack(piece.payload, active, type(piece).__name__)
        # a vector of all rows for each node, where there are any, is work and memory: limits come first
        vectors = len(query[0]) if query and query[0].ndim > 1 else 0
        limits.asked(vectors + server.spare * (vectors - 1) if vectors else 0)
        return server.add(query)

    def add_sums(piece: SumsPiece) -> None:
        take(piece)

    def answer_sums(request: SumsRequest) -> Sums:
        limits.sums(take(request) - (server.spare if request.last else 0), last=request.last)
        return Sums(pack(server.answer()))

    return add_rows, add_sums, answer_sums


def _under_seal(
    inputs: RoleInput,
    server: LatticeSumsServer,
    sealed: SealedOwner,
    start_tree: Callable[[TreeStart], None],
    answer_sums: Callable[[SumsRequest], Sums],
    answer_split: Callable[[SplitRequest], Iterator[Message]],
) -> dict[type[Message], Callable[[Any], Answer]]:
    """Return what a passive party does under sealed sums, made of what it does under open ones."""
    party, (active,) = inputs.party, inputs.party.peers

    def start(message: TreeStart) -> None:
        start_tree(message)
        sealed.start_tree(view(message.columns, np.int32, (None,), peer=active, what="TreeStart.columns"))

    def find(request: SealedSumsRequest) -> None:
        party.send(active, answer_sums(request))
        sealed.find(request, server.shares)

    def won(message: WonCandidates) -> Iterator[Message]:
        return answer_split(sealed.won(message))

    return {TreeStart: start, SealedSumsRequest: find, WonCandidates: won}


def _set_up(party: Party, active: str, options: CipherOptions, left: float) -> Setup:
    """Let the active party measure the link, then take its set-up; `left` is what answers may still leak."""
    probes, cipher = 0, options.cipher
    while isinstance(message := party.receive(active, LinkProbe, Setup), LinkProbe):
        probes += 1
        if probes > (PROBES if cipher == "auto" or options.sealed else 0):
            raise PeerProtocolError(active, f"expected Setup, got a probe of the link too many - from {active}")
        party.send(active, LinkEcho(message.filler, left))
    assert isinstance(message, Setup)
    if message.encryption not in (("lattice", "ou") if cipher == "auto" else (cipher,)):
        raise PeerProtocolError(
            active, f"expected encryption {cipher!r}, got {message.encryption!r} - at Setup from {active}"
        )
    return message
