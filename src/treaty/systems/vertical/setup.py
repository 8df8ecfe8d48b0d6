"""Setting up a training on hidden sums: both ends agree on a cipher, its keys and hints, and are made ready.

The active party measures links and chooses the cipher where the job leaves it open; all parties of the lattice map make
its public seed together (`public_seed`); passive parties send their cipher's hints. `set_up_active` yields all columns
as the active party sees them, `set_up_passive` yields a passive party's own; roles of SecureBoost and FedXGBoost-SMM
train within these blocks.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.sums import ClusterHistograms, over_cluster
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.parameters import LEAK_LIMIT
from treaty.crypto.payload import Payload, SumsBounds
from treaty.crypto.sums.encrypted_sums import ALONE, SumsClient, SumsServer, make_client, make_server
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.data.binning import Bins
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.messages import pack, unpack
from treaty.messaging.party import Party
from treaty.models.checkpoints import hints_folder, sides_folder
from treaty.models.trees import ModelPart
from treaty.systems.observers import ColumnsLearned, Observers, TreeStarted
from treaty.systems.pooled.system import Training, own_columns
from treaty.systems.system import RoleInput
from treaty.systems.vertical.cipher_choice import PROBES, JobSize, beyond_lattice, choose_cipher, tell_cost_of_sealing
from treaty.systems.vertical.cipher_options import CipherOptions
from treaty.systems.vertical.column_owner import EncryptedOwner, SplitOwner, send_hint, show_layout
from treaty.systems.vertical.encrypted_columns import EncryptedGradients, PassiveColumns, sums_bounds, take_hints
from treaty.systems.vertical.exact_sums import ToldSides, check_share, expected_share
from treaty.systems.vertical.messages import (
    LinkEcho,
    LinkProbe,
    SeedCommitment,
    SeedCommitments,
    SeedOffer,
    SeedShare,
    SeedShares,
    Setup,
    ToldShare,
)
from treaty.systems.vertical.sealed import SealedOwner
from treaty.systems.vertical.sealed_active import SealedGradients, SealedPeer, SealedSearch, make_ends
from treaty.systems.vertical.training import Follower, finish, start_of
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import MayShow, SplitSearch, SumsSource
from treaty.trees.splits import SplitRules

logger = logging.getLogger(__name__)


MakeClient = Callable[[SumsBounds, Mapping[str, NDArray[np.int32]]], SumsClient]
"""Makes the active party's end of a cipher from bounds and the first slots of every peer's features."""


MakeServer = Callable[[Payload, NDArray[np.uint8], NDArray[np.int32]], SumsServer]
"""Makes a passive party's end from the set-up, its codes and its features' first slots."""


@dataclass(frozen=True, slots=True)
class ClientReady:
    """Event at the active party: its end of the sums is set up, over columns by source as in `widths`."""

    client: SumsClient
    widths: list[int]


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Event at a passive party: its end of the sums is made from the active party's `setup`."""

    setup: Setup
    server: SumsServer
    ciphers: CipherOptions


def _open_store(inputs: RoleInput, options: CipherOptions) -> HintStore:
    """Open the store of the lattice map's hints and of what answers leaked; without a folder it lasts for this job."""
    kept = inputs.store is not None and options.may_hint
    return HintStore(hints_folder(inputs.store, inputs.party.name) if kept and inputs.store is not None else None)


# ---------------------------------------------------------------- active party
@dataclass(frozen=True, slots=True)
class HiddenSums:
    """All owners' columns in a training on hidden sums: `sources` in the job's order, the active party's at `own`."""

    sources: Sequence[SumsSource]
    own: int
    gradients: EncryptedGradients
    rules: SplitRules
    threads: int
    observers: Observers

    def search(self, sample: TreeSample, *, alone: bool = False, may_show: MayShow | None = None) -> SplitSearch:
        """Begin a tree's search for splits: passive parties get its encrypted gradients, unless it is grown `alone`."""
        self.observers.event(TreeStarted(sample.grad, sample.hess, sample.rows))
        kind: type[SplitSearch] = SealedSearch if isinstance(self.gradients, SealedGradients) else SplitSearch
        return kind(
            self.sources, sample, self.rules, self.threads, own=self.own, alone=alone, may_show=may_show
        )  # fmt: skip


@contextmanager
def set_up_active(
    inputs: RoleInput, training: Training, *, alone_rounds: int = 0, client_of: MakeClient | None = None
) -> Iterator[HiddenSums]:
    """Set up hidden sums of all passive parties' columns; end the training at all of them when the block ends well.

    The first `alone_rounds` rounds use own columns alone. `client_of` makes the active party's end of the sums; None:
    by the cipher that is named or chosen.
    """
    party, common, threads, options = inputs.party, inputs.common, inputs.threads, inputs.options.ciphers
    part, objective = training.part, training.forest.objective
    objective.check_sums(inputs.rows.table.n_rows)
    histograms = ClusterHistograms.of_columns(inputs.shards, party.name)
    own = own_columns(inputs.rows.table, common.most_bins, part.splits, threads, histograms)
    alone_trees = alone_rounds * objective.n_outputs
    if alone_trees and len(own.categorical) == 0:
        raise ConfigError("rl_trees needs columns at the active party, which grows those trees alone; it has none")
    with _open_store(inputs, options) as store:
        first_tree = max(alone_trees, len(training.forest.trees))
        others, gradients = _columns_of_others(inputs, options, training, first_tree, store, client_of)
        sources = [others.get(name, own) for name in inputs.roles.owners]
        inputs.observers.event(ClientReady(gradients.client, [len(source.categorical) for source in sources]))
        place = inputs.roles.owners.index(party.name)
        yield HiddenSums(sources, place, gradients, common.rules(objective), threads, inputs.observers)
        finish(party)
    for peer in others:
        part.sides[peer] = party.receive(peer, ToldShare).share


def _columns_of_others(
    inputs: RoleInput,
    options: CipherOptions,
    training: Training,
    first_tree: int,
    store: HintStore,
    client_of: MakeClient | None,
) -> tuple[dict[str, PassiveColumns], EncryptedGradients]:
    """Set up a cipher with every passive party; return their columns, and what goes to all of them alike."""
    party, common, part, objective = inputs.party, inputs.common, training.part, training.forest.objective
    n_rows, audit = inputs.rows.table.n_rows, inputs.evidence.number
    kind = SealedPeer if options.sealed else PassiveColumns
    others = {peer: kind(party, peer, n_rows, inputs.observers) for peer in party.peers}
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
    # an audit opens vectors of single nodes
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
    take_hints(client, list(others.values()), party, partial(inputs.observers.set_up, "hints"))
    sealed = {name: columns for name, columns in others.items() if isinstance(columns, SealedPeer)}
    if sealed:
        make_ends(party, sealed, choice.links, job.bounds, job.rules)
        of_a_tree = {name: common.colsample_bytree * columns.count_candidates() for name, columns in sealed.items()}
        step = next(iter(sealed.values())).end.step
        part.choice = tell_cost_of_sealing(party.name, choice.links, of_a_tree, job, step, options.to_open)
    gradients = (SealedGradients if sealed else EncryptedGradients)(party, client, n_rows, first_tree, inputs.observers)
    for columns in others.values():
        columns.gradients, columns.by_column = gradients, options.reveals_columns(choice.cipher)
        columns.evidence = inputs.evidence
        if not sealed:
            inputs.observers.event(ColumnsLearned(columns.peer, columns.offsets))
    return others, gradients


# ---------------------------------------------------------------- passive party
@contextmanager
def set_up_passive(
    inputs: RoleInput, bins: Bins, codes: NDArray[np.uint8], *, server_of: MakeServer | None = None
) -> Iterator[EncryptedOwner]:
    """Set up hidden sums of own columns, binned as `codes`, uint8 (n_rows, n_features), with the active party.

    `server_of` makes the other end of the active party's `client_of`. When the block ends well, the active party is
    told how much of the columns sides of splits give away.
    """
    party, table, common, options = inputs.party, inputs.rows.table, inputs.common, inputs.options.ciphers
    (active,) = party.peers
    with ExitStack() as held:
        store = held.enter_context(_open_store(inputs, options))
        share = 0.0 if options.sealed else expected_share(codes, common, inputs.trees_a_round, varied=inputs.varied)
        check_share(inputs, party.name, share)  # before anything is sent
        show_layout(inputs, bins, share)
        # how much answers may still leak: the active party needs it to choose a cipher, if at all
        left = 0.0 if options.sealed else LEAK_LIMIT - store.spent(table.schema.names)
        setup = _take_setup(party, active, options, left)
        follower = Follower(inputs, setup)
        part: ModelPart = follower.part
        part.encryption, part.exact_sums = setup.encryption, {party.name: share}
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
        part.sides = {party.name: told.share}
        held.enter_context(closing(server))  # so that an aborted job, too, gives back what it reserved in the ledger
        if isinstance(server, LatticeSumsServer):
            follow_seed(party, server)
        inputs.observers.event(ServerReady(setup, server, options))
        send_hint(party, server.hint(partial(inputs.observers.set_up, "hints")))
        given: Any = inputs, follower, server, SplitOwner(active, codes, bins, part.splits, told), told
        by_column = options.reveals_columns(setup.encryption)
        if isinstance(server, LatticeSumsServer) and options.sealed:
            owner: EncryptedOwner = SealedOwner(*given, by_column=by_column, offsets=bins.offsets)
        else:
            owner = EncryptedOwner(*given, by_column=by_column)
        held.callback(owner.close)
        yield owner
        party.send(active, ToldShare(part.sides[party.name]))


def _take_setup(party: Party, active: str, options: CipherOptions, left: float) -> Setup:
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


# ----------------------------------------- A public seed that all parties of a star make together: commit, then reveal
#
# The lattice map expands its public elements from it; whoever chose these alone could plant a trapdoor. The seed is
# uniform if one party at least draws its share honestly, as all commit before any share is told. The active party
# relays messages, and can do no more than refuse to. Where all parties kept hints of an earlier job, its seed is used
# again.
#
# =========================  ==================  ==========================================
# message                    from -> to          content
# =========================  ==================  ==========================================
# `SeedOffer`                active ->           which hint it kept earlier, if any
# `SeedCommitment`           passive ->          commitment to its share; whether it holds
#                                                the hint, for just this table
# `SeedCommitments`          active -> all       everyone's, or that kept hints serve
# `SeedShare`, `SeedShares`  passive ->, then    the shares
#                            active -> all
# =========================  ==================  ==========================================
#
# Shares are random numbers; messages tell nothing but their content.
SHARE_BYTES = 32


def agree_on_seed(party: Party, client: LatticeSumsClient, offsets: Mapping[str, NDArray[np.int32]]) -> bool:
    """Settle the seed as the active party; return whether kept hints are used again.

    `offsets` are the first slots of every passive party's features.
    """
    offered = client.offer(offsets)
    for peer in party.peers:
        party.send(peer, SeedOffer(offered[1][peer] if offered else b""))
    answers = {peer: party.receive(peer, SeedCommitment) for peer in party.peers}
    kept = offered is not None and all(answer.holds for answer in answers.values())
    own = secrets.token_bytes(SHARE_BYTES)
    commitments = [_commit(own), *(answers[peer].commitment for peer in party.peers)]
    for peer in party.peers:
        party.send(peer, SeedCommitments([] if kept else commitments, kept))
    if kept and offered is not None:
        client.settle(*offered)
        return True
    shares = [own, *(party.receive(peer, SeedShare).share for peer in party.peers)]
    for peer, commitment, share in zip(party.peers, commitments[1:], shares[1:], strict=True):
        _check(commitment, share, peer)
    for peer in party.peers:
        party.send(peer, SeedShares(shares))
    client.settle(_seed(commitments, shares))
    return False


def follow_seed(party: Party, server: LatticeSumsServer) -> None:
    """Settle the seed as a passive party."""
    (active,) = party.peers
    offer = party.receive(active, SeedOffer)
    own = secrets.token_bytes(SHARE_BYTES)
    commitment = _commit(own)
    holds = bool(offer.binding) and server.holds(offer.binding)
    party.send(active, SeedCommitment(commitment, holds))
    settled = party.receive(active, SeedCommitments)
    if settled.kept:
        if not holds:
            raise PeerProtocolError(active, f"expected a hint that is kept here - at SeedCommitments from {active}")
        server.settle(b"", kept=offer.binding)
        return
    if settled.commitments.count(commitment) != 1:
        raise PeerProtocolError(active, f"expected this party's commitment once - at SeedCommitments from {active}")
    party.send(active, SeedShare(own))
    shares = party.receive(active, SeedShares).shares
    if len(shares) != len(settled.commitments):
        raise PeerProtocolError(active, f"expected {len(settled.commitments)} shares - at SeedShares from {active}")
    place = settled.commitments.index(commitment)
    if shares[place] != own:
        raise PeerProtocolError(active, f"expected this party's share unchanged - at SeedShares from {active}")
    # all shares are checked: else the active party could choose its own after it saw this party's
    for commitment, share in zip(settled.commitments, shares, strict=True):
        _check(commitment, share, active)
    server.settle(_seed(settled.commitments, shares))


def _commit(share: bytes) -> bytes:
    """Commit to a share; binding, and hiding as the share is random."""
    return hashlib.sha256(b"treaty public seed commitment" + share).digest()


def _check(commitment: bytes, share: bytes, sender: str) -> None:
    if len(share) != SHARE_BYTES or _commit(share) != commitment:
        raise PeerProtocolError(sender, f"expected the share that was committed to - at the seed from {sender}")


def _seed(commitments: list[bytes], shares: list[bytes]) -> bytes:
    return hashlib.sha256(b"treaty public seed" + b"".join([*commitments, *shares])).digest()
