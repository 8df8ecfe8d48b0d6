"""How parties keep their records for an audit while they train; `record` says what is in them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.lattice.parameters import DEGREE
from treaty.crypto.sums.additive_sums import AdditiveSumsClient
from treaty.crypto.sums.encrypted_sums import message_bytes
from treaty.crypto.sums.lattice_sums import LatticeSumsClient
from treaty.errors import ConfigError, PeerProtocolError
from treaty.machine.arrays import Floats
from treaty.messaging.messages import Array, Message, pack, unpack
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.training import Training
from treaty.systems.system import AuditFolder, RoleInput, Signer
from treaty.systems.vertical.audit.record import (
    NUMBER_BYTES,
    ActiveHeader,
    KeptTree,
    PassiveHeader,
    RecordFile,
    Sent,
    check_size,
)
from treaty.systems.vertical.encrypted_columns import (
    EncryptedGradients,
    SumsPiece,
    SumsRequest,
    TreeEnd,
    TreeRows,
    TreeStart,
)
from treaty.systems.vertical.named_rows import node_type
from treaty.trees.boosting import Forest, RoundState
from treaty.trees.columns import SumsFinder
from treaty.trees.ensemble import Tree


@dataclass(slots=True)
class ActiveRecord:
    """The active party's record while its trees grow; `sent` is by peer."""

    file: RecordFile
    sent: dict[str, Sent]
    vouching: Signer
    _nonce: bytes = b""
    _secrets: list[Array] = field(default_factory=list)

    def note(self, peer: str, message: Message) -> None:
        self.sent[peer].add(message)

    def begin_tree(self, nonce: bytes) -> None:
        """Note what opens the next tree's commitment."""
        self._nonce = nonce

    def add_secrets(self, keys: NDArray[np.int8]) -> None:
        """Note a query's secrets, which are not used again."""
        self._secrets.append(Array.of(keys))

    def signature(self, peer: str) -> bytes:
        """Sign all that a peer was sent; empty between threads."""
        return self.vouching.vouch(self.sent[peer].digest())

    def finish_tree(self, tree: Tree, leaf: NDArray[np.int32]) -> None:
        """Write down a finished tree, and each row's leaf."""
        source, record, left = (Array.of(of.astype(np.int32)) for of in (tree.source, tree.record, tree.left))
        of_rows = Array.of(leaf.astype(np.uint8 if len(tree.left) <= 256 else np.int32))
        self.file.add(KeptTree(self._nonce, source, record, left, of_rows, self._secrets))
        self._nonce, self._secrets = b"", []


class KeepingFinder(SumsFinder):
    """A split finder that tells `on_tree` of each finished tree in which leaf every row is."""

    on_tree: Callable[[Tree, NDArray[np.int32]], None]

    def finish(self, tree: Tree, margins: Floats) -> None:
        super().finish(tree, margins)
        leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
        rows, starts = self.leaf_rows(leaves)
        leaf = np.empty(self._n_rows, np.int32)
        leaf[rows] = np.repeat(leaves, np.diff(starts))
        self.on_tree(tree, leaf)


def new_number() -> bytes:
    """Return the number of a new record, by which the parties' records are put together."""
    return secrets.token_bytes(NUMBER_BYTES)


def from_the_start(training: Training, common: BoostingOptions, n_rows: int) -> Training:
    """Return the training with its first margins and sampling generator drawn already, so that they can be kept."""
    if training.resume is not None:
        return training
    objective, rng = training.forest.objective, np.random.default_rng(common.random_state)
    margins = np.full((objective.n_outputs, n_rows), objective.base_margins[:, None])
    return replace(training, resume=RoundState(0, margins, json.dumps(rng.bit_generator.state)))


def keep_active(
    inputs: RoleInput,
    keeping: AuditFolder,
    training: Training,
    number: bytes,
    gradients: EncryptedGradients,
    widths: list[int],
) -> ActiveRecord:
    """Begin the active party's record of a training that is set up, of columns by source as in `widths`."""
    client, part, start = gradients.client, training.part, training.resume
    assert start is not None
    setup, y, weight = pack(client.setup()), inputs.rows.y, inputs.rows.weight
    lattice = client if isinstance(client, LatticeSumsClient) else None
    header = ActiveHeader(
        number=number, party=inputs.party.name, job=inputs.party.job, model_id=part.model_id, cipher=part.encryption,
        blind=client.blind, terms=inputs.public_terms, sources=list(inputs.roles.owners), widths=widths,
        n_classes=None if inputs.classes is None else len(inputs.classes),
        y=Array.of(y), weight=None if weight is None else Array.of(weight),
        rounds=start.rounds, margins=Array.of(start.margins), random_state=start.random_state,
        setup=setup, seed=lattice.seed if lattice else b"",
        secret_numbers=[hex(x) for x in client.secret_numbers] if isinstance(client, AdditiveSumsClient) else [],
    )  # fmt: skip
    sent = {peer: Sent(inputs.party.job, number, inputs.party.name, peer, setup) for peer in inputs.party.peers}
    record = ActiveRecord(RecordFile(keeping, inputs.party.name, number, header), sent, inputs.vouching)
    gradients.notes = record
    if lattice:
        lattice.keep_secrets = record.add_secrets
    return record


@dataclass(slots=True)
class PassiveRecord:
    """A passive party's record while it answers `active`."""

    file: RecordFile
    sent: Sent
    active: str
    vouching: Signer

    def note(self, *messages: Message) -> None:
        """Keep messages; the active party signs its own at a tree's end."""
        for message in messages:
            if isinstance(message, TreeStart | TreeRows | SumsPiece | SumsRequest):
                self.sent.add(message)
            self.file.add(message)

    def end_tree(self, end: TreeEnd) -> None:
        """Keep a tree's end.

        Raises PeerProtocolError where the active party did not sign what is kept here.
        """
        if not self.vouching.check(self.active, end.signature, self.sent.digest()):
            raise PeerProtocolError(
                self.active, f"expected what was sent signed for an audit, got no such signature - at TreeEnd from "
                f"{self.active}"
            )  # fmt: skip
        self.file.add(end)


class Announced(Protocol):
    """The active party's set-up message."""

    @property
    def model_id(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    @property
    def encryption(self) -> str: ...
    @property
    def payload(self) -> list[Array]: ...
    @property
    def audit(self) -> bytes: ...


def keep_passive(inputs: RoleInput, keeping: AuditFolder, setup: Announced, blind: bool, seed: bytes) -> PassiveRecord:
    """Begin a passive party's record, under a public seed of the lattice map.

    ConfigError where the active party keeps none, or this one may become too large.
    """
    party, (active,), n_rows = inputs.party, inputs.party.peers, inputs.rows.table.n_rows
    if len(setup.audit) != NUMBER_BYTES:
        raise ConfigError(
            f"{party.name} is to keep a record for an audit, but {active} keeps none, without which nothing can be "
            f"opened: have it name parties.{active}.keep_for_audit, or take out {party.name}'s",
            public=f"it is to keep a record for an audit, and {active} keeps none (keep_for_audit)",
        )
    common: BoostingOptions = inputs.common
    one = message_bytes(setup.encryption, unpack(setup.payload, active, "Setup"))
    vectors = _most_vectors(common, n_rows) if blind else 1
    of_splits = node_type(1 << min(common.max_depth, 31)).itemsize
    of_splits *= not inputs.options.ciphers.reveals_columns(setup.encryption)
    named = (0 if blind else 4 + 2 * common.max_depth) * n_rows  # sample, nodes of sums
    named += of_splits * n_rows * common.max_depth
    split = 2 * _most_vectors(common, n_rows) * (n_rows // 8 + 64)
    trees = max(0, common.n_estimators - setup.rounds) * inputs.trees_a_round
    check_size(keeping, party.name, trees * (vectors * one + named + split))
    pinned = inputs.vouching.pinned
    header = PassiveHeader(
        number=setup.audit, party=party.name, job=party.job, active=active, model_id=setup.model_id,
        cipher=setup.encryption, terms=inputs.public_terms, n_rows=n_rows, setup=setup.payload, seed=seed,
        short_key_bits=inputs.options.ciphers.insecure_test_key_bits,
        certificate=b"" if pinned is None else pinned[active],
    )  # fmt: skip
    sent = Sent(party.job, setup.audit, active, party.name, setup.payload)
    return PassiveRecord(RecordFile(keeping, party.name, setup.audit, header), sent, active, inputs.vouching)


def check_active_size(inputs: RoleInput, keeping: AuditFolder, forest: Forest) -> None:
    """Refuse a training whose record at the active party may become too large; ConfigError."""
    common: BoostingOptions = inputs.common
    n_rows, outputs = inputs.rows.table.n_rows, forest.objective.n_outputs
    vectors = _most_vectors(common, n_rows)
    leaf = 1 if vectors <= 64 else 4
    tree = n_rows * leaf + vectors * (DEGREE + 48)
    check_size(keeping, inputs.party.name, 8 * n_rows * (2 + outputs) + common.n_estimators * outputs * tree)


def _most_vectors(common: BoostingOptions, n_rows: int) -> int:
    """Return the most nodes that are asked about in a tree: the root, and one of each pair of siblings."""
    return max(1, min(1 << common.max_depth - 1, n_rows // common.fewest_rows))
