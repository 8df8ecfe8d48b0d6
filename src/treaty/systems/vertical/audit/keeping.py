"""How parties keep their records for an audit while they train, as observers; `record` says what is in them."""

from __future__ import annotations

import secrets

import numpy as np

from treaty.crypto.parameters import DEGREE
from treaty.crypto.sums.additive_sums import AdditiveSumsClient
from treaty.crypto.sums.encrypted_sums import message_bytes
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.certificates import Signer
from treaty.messaging.messages import Array, Message, pack, unpack
from treaty.systems.observers import Evidence, Observer, TreeFinished
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import AuditFolder, RoleInput
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
    GradientsCommitted,
    SplitAnswer,
    SplitColumns,
    SplitRequest,
    SumsPiece,
    SumsRequest,
    TreeEnd,
    TreeRows,
    TreeStart,
)
from treaty.systems.vertical.named_rows import NamedRows, node_type
from treaty.systems.vertical.setup import ClientReady, ServerReady
from treaty.systems.vertical.training import BoostingBegins
from treaty.trees.ensemble import Tree
from treaty.trees.growth import RowPartition


def keep_for_audit(inputs: RoleInput, keeping: AuditFolder) -> None:
    """Have a party of a training keep its record: an observer that writes down what an audit needs."""
    if inputs.party.name == inputs.roles.active:
        record = ActiveRecord(keeping, inputs.vouching)
        inputs.observers.add(record)
        inputs.evidence = record
    else:
        inputs.observers.add(PassiveRecord(keeping, inputs.vouching))


class ActiveRecord(Observer, Evidence):
    """The active party's record: its key or secrets, nonces of commitments, finished trees; signs what it sent."""

    def __init__(self, keeping: AuditFolder, vouching: Signer) -> None:
        self.number = secrets.token_bytes(NUMBER_BYTES)
        self._keeping, self._vouching = keeping, vouching
        self._file: RecordFile | None = None
        self._sent: dict[str, Sent] = {}
        self._nonce, self._secrets = b"", list[Array]()

    def started(self, inputs: RoleInput) -> None:
        """Refuse a training whose record may become too large; ConfigError."""
        self._inputs = inputs
        common, n_rows, outputs = inputs.common, inputs.rows.table.n_rows, inputs.trees_a_round
        vectors = _most_vectors(common, n_rows)
        leaf = 1 if vectors <= 64 else 4
        tree = n_rows * leaf + vectors * (DEGREE + 48)
        most = 8 * n_rows * (2 + outputs) + common.n_estimators * outputs * tree
        check_size(self._keeping, inputs.party.name, most)

    def event(self, event: object) -> None:
        match event:
            case ClientReady():
                self._ready = event
            case BoostingBegins():
                self._begin(event)
            case GradientsCommitted(nonce):
                self._nonce = nonce
            case TreeFinished(tree, rows):
                self._finish_tree(tree, rows)

    def _begin(self, begun: BoostingBegins) -> None:
        """Begin the record of a training that is set up."""
        inputs, client, start = self._inputs, self._ready.client, begun.state
        party, job = inputs.party, inputs.party.job
        setup, y, weight = pack(client.setup()), inputs.rows.y, inputs.rows.weight
        lattice = client if isinstance(client, LatticeSumsClient) else None
        header = ActiveHeader(
            number=self.number, party=party.name, job=job, model_id=begun.part.model_id, cipher=begun.part.encryption,
            blind=client.blind, terms=inputs.public_terms, sources=list(inputs.roles.owners),
            widths=self._ready.widths, n_classes=None if inputs.classes is None else len(inputs.classes),
            y=Array.of(y), weight=None if weight is None else Array.of(weight),
            rounds=start.rounds, margins=Array.of(start.margins), random_state=start.random_state,
            setup=setup, seed=lattice.seed if lattice else b"",
            secret_numbers=[hex(x) for x in client.secret_numbers] if isinstance(client, AdditiveSumsClient) else [],
        )  # fmt: skip
        self._sent = {peer: Sent(job, self.number, party.name, peer, setup) for peer in party.peers}
        self._file = RecordFile(self._keeping, party.name, self.number, header)
        if lattice:
            lattice.keep_secrets = lambda keys: self._secrets.append(Array.of(keys))  # they are not used again

    def message_sent(self, peer: str, message: Message) -> None:
        if isinstance(message, _OF_TREES) and self._sent:
            self._sent[peer].add(message)

    def signature(self, peer: str) -> bytes:
        """Sign all that a peer was sent; empty between threads."""
        return self._vouching.vouch(self._sent[peer].digest())

    def _finish_tree(self, tree: Tree, rows: RowPartition) -> None:
        """Write down a finished tree, and each row's leaf."""
        leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
        members, starts = rows.rows(leaves, sampled=False)
        leaf = np.empty(len(members), np.int32)
        leaf[members] = np.repeat(leaves, np.diff(starts))
        source, record, left = (Array.of(of.astype(np.int32)) for of in (tree.source, tree.record, tree.left))
        of_rows = Array.of(leaf.astype(np.uint8 if len(tree.left) <= 256 else np.int32))
        assert self._file is not None
        self._file.add(KeptTree(self._nonce, source, record, left, of_rows, self._secrets))
        self._nonce, self._secrets = b"", []

    def finished(self) -> None:
        if self._file is not None:
            self._file.close()


_OF_TREES = (TreeStart, TreeRows, SumsPiece, SumsRequest)
"""What the active party sends of a tree, and signs at its end."""


class PassiveRecord(Observer):
    """A passive party's record: what it received of each tree, and how it answered splits."""

    def __init__(self, keeping: AuditFolder, vouching: Signer) -> None:
        self._keeping, self._vouching = keeping, vouching
        self._file: RecordFile | None = None

    def started(self, inputs: RoleInput) -> None:
        self._inputs = inputs

    def event(self, event: object) -> None:
        if isinstance(event, ServerReady):
            self._begin(event)

    def _begin(self, ready: ServerReady) -> None:
        """Begin the record; ConfigError where the active party keeps none, or this one may become too large."""
        inputs, setup, ciphers = self._inputs, ready.setup, ready.ciphers
        party, (active,), n_rows, common = inputs.party, inputs.party.peers, inputs.rows.table.n_rows, inputs.common
        if len(setup.audit) != NUMBER_BYTES:
            raise ConfigError(
                f"{party.name} is to keep a record for an audit, but {active} keeps none, without which nothing can be "
                f"opened: have it name parties.{active}.keep_for_audit, or take out {party.name}'s",
                public=f"it is to keep a record for an audit, and {active} keeps none (keep_for_audit)",
            )
        blind = ciphers.hides_nodes(setup.encryption)
        one = message_bytes(setup.encryption, unpack(setup.payload, active, "Setup"))
        vectors = _most_vectors(common, n_rows) if blind else 1
        of_splits = node_type(1 << min(common.max_depth, 31)).itemsize
        of_splits *= not ciphers.reveals_columns(setup.encryption)
        named = (0 if blind else 4 + 2 * common.max_depth) * n_rows  # sample, nodes of sums
        named += of_splits * n_rows * common.max_depth
        split = 2 * _most_vectors(common, n_rows) * (n_rows // 8 + 64)
        trees = max(0, common.n_estimators - setup.rounds) * inputs.trees_a_round
        check_size(self._keeping, party.name, trees * (vectors * one + named + split))
        pinned, server = self._vouching.pinned, ready.server
        header = PassiveHeader(
            number=setup.audit, party=party.name, job=party.job, active=active, model_id=setup.model_id,
            cipher=setup.encryption, terms=inputs.public_terms, n_rows=n_rows, setup=setup.payload,
            seed=server.seed if isinstance(server, LatticeSumsServer) else b"",
            short_key_bits=ciphers.insecure_test_key_bits,
            certificate=b"" if pinned is None else pinned[active],
        )  # fmt: skip
        self._sent = Sent(party.job, setup.audit, active, party.name, setup.payload)
        self._file = RecordFile(self._keeping, party.name, setup.audit, header)

    def message_received(self, peer: str, message: Message) -> None:
        """Keep messages of trees.

        Raises PeerProtocolError where the active party did not sign, at a tree's end, what is kept here.
        """
        if self._file is None or not isinstance(message, (*_OF_TREES, SplitRequest, NamedRows, TreeEnd)):
            return
        if isinstance(message, TreeEnd) and not self._vouching.check(peer, message.signature, self._sent.digest()):
            raise PeerProtocolError(
                peer, f"expected what was sent signed for an audit, got no such signature - at TreeEnd from {peer}"
            )
        if isinstance(message, _OF_TREES):
            self._sent.add(message)
        self._file.add(message)

    def message_sent(self, peer: str, message: Message) -> None:
        if self._file is not None and isinstance(message, SplitAnswer | SplitColumns):
            self._file.add(message)

    def finished(self) -> None:
        if self._file is not None:
            self._file.close()


def _most_vectors(common: BoostingOptions, n_rows: int) -> int:
    """Return the most nodes that are asked about in a tree: the root, and one of each pair of siblings."""
    return max(1, min(1 << common.max_depth - 1, n_rows // common.fewest_rows))
