"""Setting up a training on hidden sums: both ends agree on a cipher, its keys and hints, and are made ready.

The active party measures links and chooses the cipher where the job leaves it open; all parties of the lattice map make
its public seed together; passive parties send their cipher's hints. `set_up_active` yields the columns of all parties
as the active party sees them, `set_up_passive` a passive party's own; roles of SecureBoost and FedXGBoost-SMM train
within these blocks.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

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
from treaty.machine.arrays import Codes
from treaty.messaging.messages import Message, leaks, pack, unpack
from treaty.messaging.party import Party
from treaty.models.checkpoints import ledger_folder
from treaty.models.trees import ModelPart
from treaty.systems.observers import ColumnsLearned, Observers, TreeStarted
from treaty.systems.pooled.system import Training, own_columns
from treaty.systems.system import RoleInput
from treaty.systems.vertical.cipher_choice import (
    FAR,
    PROBES,
    JobSize,
    beyond_lattice,
    choose_cipher,
    may_grow_together,
    tell_cost_of_sealing,
    trees_together,
)
from treaty.systems.vertical.cipher_options import CipherOptions
from treaty.systems.vertical.column_owner import ColumnOwner, SplitOwner, send_hint, show_layout
from treaty.systems.vertical.encrypted_columns import EncryptedGradients, PassiveColumns, sums_bounds, take_hints
from treaty.systems.vertical.exact_sums import RevealedSides, check_share, check_sides, expected_share
from treaty.systems.vertical.messages import LinkEcho, LinkProbe, RevealedShare, Setup
from treaty.systems.vertical.sealed import SealedOwner
from treaty.systems.vertical.sealed_active import SealedGradients, SealedPeer, SealedSearch, make_ends
from treaty.systems.vertical.training import Follower, finish, start_of
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import MayShow, SplitSearch, SumsSource
from treaty.trees.splits import SplitRules

logger = logging.getLogger(__name__)


# Makes the active party's end of a cipher from bounds and the first slots of every peer's features
MakeClient = Callable[[SumsBounds, Mapping[str, NDArray[np.int32]]], SumsClient]
# Makes a passive party's end from the set-up, its codes and its features' first slots
MakeServer = Callable[[Payload, Codes, NDArray[np.int32]], SumsServer]


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


# ---------------------------------------------------------------- active party


@dataclass(frozen=True, slots=True)
class TrainingColumns:
    """The columns of all parties of a training, whose sums are encrypted, masked or sealed.

    `sources` are in the job's order, the active party's own at `own`. As many trees of a round may grow `together`.
    """

    sources: Sequence[SumsSource]
    own: int
    kind: type[SplitSearch]
    rules: SplitRules
    threads: int
    observers: Observers
    together: int

    def search(self, sample: TreeSample, *, alone: bool = False, may_show: MayShow | None = None) -> SplitSearch:
        """Begin a tree's search for splits: passive parties get its encrypted gradients, unless it is grown `alone`."""
        self.observers.event(TreeStarted(sample.grad, sample.hess, sample.rows))
        return self.kind(self.sources, sample, self.rules, self.threads, own=self.own, alone=alone, may_show=may_show)


@contextmanager
def set_up_active(
    inputs: RoleInput, training: Training, *, alone_rounds: int = 0, client_of: MakeClient | None = None
) -> Iterator[TrainingColumns]:
    """Set up hidden sums of all passive parties' columns; finish the training at all of them when the block ends well.

    The first `alone_rounds` rounds use own columns alone. `client_of` makes the active party's end of the sums; by
    default it is that of the cipher which is named or chosen.
    """
    party, common, threads, options = inputs.party, inputs.common, inputs.threads, inputs.options.ciphers
    part, objective = training.part, training.forest.objective
    objective.check_sums(inputs.rows.table.n_rows)
    histograms = ClusterHistograms.of_columns(inputs.shards, party.name)
    own = own_columns(inputs.rows.table, common, part.splits, threads, histograms)
    alone_trees = alone_rounds * training.forest.trees_a_round
    if alone_trees and len(own.categorical) == 0:
        raise ConfigError("rl_trees needs columns at the active party, which grows those trees alone; it has none")
    with _hint_store(inputs) as store:
        done = common.most_rounds * training.forest.trees_a_round if common.refreshes else len(training.forest.trees)
        first_tree = max(alone_trees, done)
        slots = int(own.offsets[-1])
        others, gradients, together = _columns_of_others(inputs, training, first_tree, store, client_of, slots)
        sources = [others.get(name, own) for name in inputs.roles.owners]
        inputs.observers.event(ClientReady(gradients.client, [len(source.categorical) for source in sources]))
        place, kind = inputs.roles.owners.index(party.name), SealedSearch if options.sealed else SplitSearch
        rules = common.rules(objective, training.constraints)
        yield TrainingColumns(sources, place, kind, rules, threads, inputs.observers, together)
        finish(party)
    for peer in others:
        part.sides[peer] = party.receive(peer, RevealedShare).share


def _columns_of_others(
    inputs: RoleInput, training: Training, first_tree: int, store: HintStore, client_of: MakeClient | None,
    own_slots: int,
) -> tuple[dict[str, PassiveColumns], EncryptedGradients, int]:  # fmt: skip
    """Set up a cipher with every passive party.

    Return their columns, what goes to all of them alike, and how many trees of a round grow together.
    """
    party, common, part, objective = inputs.party, inputs.common, training.part, training.forest.objective
    options, n_rows, audit = inputs.options.ciphers, inputs.rows.table.n_rows, inputs.evidence.number
    kind = SealedPeer if options.sealed else PassiveColumns
    others = {peer: kind(party, peer, n_rows, inputs.observers) for peer in party.peers}
    for peer, columns in others.items():
        part.exact_sums[peer] = 0.0 if options.sealed else 1.0 if columns.known is None else columns.known
        check_share(inputs, peer, part.exact_sums[peer])
    layouts = {peer: columns.offsets for peer, columns in others.items()}
    trees = max(0, common.most_rounds * training.forest.trees_a_round - first_tree)
    together = 1
    # an audit opens trees one by one, and a cluster has the gradients of one
    if not audit and inputs.shards is None and client_of is None:
        slots = own_slots + sum(int(offsets[-1]) for offsets in layouts.values())
        together = trees_together(common, n_rows, slots, inputs.trees_a_round)
    job = JobSize(sums_bounds(n_rows, objective, common), common.rules(objective), trees, inputs.threads, together)
    unfit = beyond_lattice(job.bounds, layouts, trees, job.rules, sealed=True) if options.sealed else ""
    if unfit:
        raise ConfigError(
            f"sums cannot be sealed here: {unfit}; or take {options.to_open}; docs/secureboost.md has what it shows",
            public="sums cannot be sealed: the lattice map does not hold so many rows, columns or trees, or weights",
        )
    # an audit opens vectors of nodes one by one, and limits on what is asked count nodes of each output
    named = replace(options, cipher="lattice") if trees == 0 and options.cipher == "auto" else options
    choice = choose_cipher(party, named, common, job, layouts, store, one_node=bool(audit) or common.multi_output)
    part.encryption, part.choice = choice.cipher, choice.why if trees else "not used: no tree grows"
    together = together if may_grow_together(options, choice.cipher) else 1
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
        candidates, step = make_ends(party, sealed, choice.links, job, common)
        if trees:
            part.choice = tell_cost_of_sealing(party.name, choice.links, candidates, job, step, options.to_open)
    gradients = (SealedGradients if sealed else EncryptedGradients)(party, client, n_rows, first_tree, inputs.observers)
    if isinstance(gradients, SealedGradients):
        gradients.ends = {name: columns.end for name, columns in sealed.items()}
        gradients.last_tree = first_tree + trees
        gradients.far = {name for name, link in choice.links.items() if link.step > FAR}
    gradients.lockstep = together > 1
    for columns in others.values():
        columns.gradients, columns.by_column = gradients, options.reveals_columns(choice.cipher)
        columns.evidence = inputs.evidence
        if not sealed:
            inputs.observers.event(ColumnsLearned(columns.peer, columns.offsets))
    return others, gradients, together


# ---------------------------------------------------------------- passive party


@contextmanager
def set_up_passive(
    inputs: RoleInput, bins: Bins, codes: Codes, *, server_of: MakeServer | None = None
) -> Iterator[ColumnOwner]:
    """Set up hidden sums of own columns, binned as `codes`, uint8 (n_rows, n_features), with the active party.

    `server_of` makes the other end of the active party's `client_of`. When the block ends well, the active party gets
    the share of the columns' bins that sides of splits have revealed.
    """
    party, table, common, options = inputs.party, inputs.rows.table, inputs.common, inputs.options.ciphers
    (active,) = party.peers
    with ExitStack() as held:
        store = held.enter_context(_hint_store(inputs))
        hidden = options.sealed or common.refreshes  # no sums are opened
        share = 0.0 if hidden else expected_share(codes, common, inputs.trees_a_round, varied=inputs.varied)
        check_share(inputs, party.name, share)  # before anything is sent
        show_layout(inputs, bins, share)
        # the active party needs what answers may still leak to choose a cipher; masked answers leak nothing
        left = 0.0 if options.sealed else LEAK_LIMIT - store.spent(table.schema.names)
        setup = _take_setup(party, options, left)
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
        folder = None if inputs.store is None else ledger_folder(inputs.store, party.name, "sides")
        revealed = RevealedSides(folder, bins, codes)
        if inputs.part is not None and not setup.resumed:
            # the active party walks all training rows down the earlier model's trees
            sides = ((record, 1.0, 1.0) for record in range(len(part.splits)))
            revealed.add(part.splits, sides, lambda share: check_sides(inputs, share, 0.0))
        part.sides = {party.name: revealed.share}
        # so that an aborted job, too, gives back what it reserved in the ledger
        held.enter_context(closing(server))
        if isinstance(server, LatticeSumsServer):
            follow_seed(party, server)
        inputs.observers.event(ServerReady(setup, server, options))
        send_hint(party, server.hint(partial(inputs.observers.set_up, "hints")))
        splits = SplitOwner(active, codes, bins, part.splits, revealed)
        kind, most_trees = SealedOwner if options.sealed else ColumnOwner, 1
        if may_grow_together(options, setup.encryption) and server_of is None and not setup.audit:
            # by own columns: the active party's limit, by those of all parties, is no higher
            most_trees = trees_together(common, table.n_rows, int(bins.offsets[-1]), inputs.trees_a_round)
        by_column = options.reveals_columns(setup.encryption)
        owner = kind(inputs, follower, server, splits, by_column=by_column, most_trees=most_trees)
        if isinstance(owner, SealedOwner):
            owner.introduce()
            held.callback(owner.count_unfinished)
        yield owner
        party.send(active, RevealedShare(part.sides[party.name]))


def _hint_store(inputs: RoleInput) -> HintStore:
    """Open the store of the lattice map's hints and of what answers leaked; without a folder it lasts for this job."""
    if inputs.store is None or not inputs.options.ciphers.may_hint:
        return HintStore(None)
    return HintStore(ledger_folder(inputs.store, inputs.party.name, "hints"))


def _take_setup(party: Party, options: CipherOptions, left: float) -> Setup:
    """Let the active party measure the link, then take its set-up; `left` is what answers may still leak."""
    (active,) = party.peers
    probes, cipher = 0, options.cipher
    while isinstance(message := party.receive(active, LinkProbe, Setup), LinkProbe):
        probes += 1
        if probes > (PROBES if cipher == "auto" or options.sealed else 0):
            raise PeerProtocolError(active, f"expected Setup, got a probe of the link too many - from {active}")
        party.send(active, LinkEcho(message.filler, left))
    assert isinstance(message, Setup)
    if message.encryption not in (("lattice", "ou") if cipher == "auto" else (cipher,)):
        raise PeerProtocolError(active, f"expected encryption {cipher!r}, got {message.encryption!r}", at="Setup")
    return message


# ----------------------------------------- a public seed that all parties of a star make together: commit, then reveal
#
# The lattice map expands its public elements from the seed; a party that chose them alone could plant a trapdoor. The
# seed is uniform if at least one party draws its share honestly, as all commit before any share is revealed. The active
# party relays messages, and can do no more than refuse to. If all parties kept hints of an earlier job, its seed serves
# again: `SeedOffer` to each, `SeedCommitment` from each, `SeedCommitments` to all; else `SeedShare` from each and
# `SeedShares` to all follow.

SHARE_BYTES = 32


@leaks("which answer from an earlier set-up the active party has kept", "control")
class SeedOffer(Message):
    """Digest (`binding`) of the hint of this party's table that the active party kept; empty for none."""

    binding: bytes


@leaks("whether the sender has an earlier job's table and secrets", "control")
class SeedCommitment(Message):
    """Commitment to a share of the seed; `holds` says whether the sender still has the offered hint's secrets."""

    commitment: bytes
    holds: bool


@leaks("the commitments of all parties, or that all still have an earlier job's answers", "control")
class SeedCommitments(Message):
    """All commitments in the job's order of parties; `kept`: hints of an earlier job serve, no share follows."""

    commitments: list[bytes]
    kept: bool


@leaks("a random number", "nothing")
class SeedShare(Message):
    """The share committed to."""

    share: bytes


@leaks("the random numbers of all parties", "nothing")
class SeedShares(Message):
    """All shares, in the order of the commitments."""

    shares: list[bytes]


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
            raise PeerProtocolError(active, "expected a hint that is kept here", at="SeedCommitments")
        server.settle(b"", kept=offer.binding)
        return
    if settled.commitments.count(commitment) != 1:
        raise PeerProtocolError(active, "expected this party's commitment once", at="SeedCommitments")
    party.send(active, SeedShare(own))
    shares = party.receive(active, SeedShares).shares
    if len(shares) != len(settled.commitments):
        raise PeerProtocolError(active, f"expected {len(settled.commitments)} shares", at="SeedShares")
    place = settled.commitments.index(commitment)
    if shares[place] != own:
        raise PeerProtocolError(active, "expected this party's share unchanged", at="SeedShares")
    # all shares are checked: else the active party could choose its own after it saw this party's
    for commitment, share in zip(settled.commitments, shares, strict=True):
        _check(commitment, share, active)
    server.settle(_seed(settled.commitments, shares))


def _commit(share: bytes) -> bytes:
    """Commit to a share; binding, and hiding as the share is random."""
    return hashlib.sha256(b"treaty public seed commitment" + share).digest()


def _check(commitment: bytes, share: bytes, sender: str) -> None:
    if len(share) != SHARE_BYTES or _commit(share) != commitment:
        raise PeerProtocolError(sender, "expected the share that was committed to", at="the seed")


def _seed(commitments: list[bytes], shares: list[bytes]) -> bytes:
    return hashlib.sha256(b"treaty public seed" + b"".join([*commitments, *shares])).digest()
