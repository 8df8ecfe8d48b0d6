"""What parties keep of a training, on request, so that its gradients can be audited afterwards (`audit_replay`).

The active party keeps its key or its secrets, the nonces of its commitments, labels, and which leaf each row came to;
a passive party keeps what it received and how it answered splits. Both are files in their own folders. Besides the
record's number, the parties send only a signature with each tree's end, on all that the other's record will hold.

A file is a line that names its format, then parts: length (8 bytes), content, and SHA-256 of the digest before and the
content, so that a changed, moved or missing part shows; the last part is an `End`. Only its owner can read a record.
The active party's is as secret as labels and key: together with a passive party's it opens all ciphertexts. Observers
write the records while parties train.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from treaty.crypto.keystream import length_prefixed
from treaty.crypto.parameters import DEGREE
from treaty.crypto.sums.additive_sums import AdditiveSumsClient
from treaty.crypto.sums.encrypted_sums import message_bytes
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.errors import ConfigError, PeerProtocolError
from treaty.files import decoder_of, explained
from treaty.messaging.certificates import Signer
from treaty.messaging.messages import Array, Message, encode, pack, unpack
from treaty.systems.observers import Evidence, Observer, TreeFinished
from treaty.systems.options import Term
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import AuditFolder, RoleInput
from treaty.systems.vertical import messages
from treaty.systems.vertical.encrypted_columns import GradientsCommitted
from treaty.systems.vertical.setup import ClientReady, ServerReady
from treaty.systems.vertical.training import BoostingBegins
from treaty.trees.constraints import Directions
from treaty.trees.ensemble import Tree
from treaty.trees.growth import RowPartition

FORMAT = b"treaty-audit-record 2\n"
NUMBER_BYTES = 16
SUFFIX = ".audit"
_DIGEST_BYTES = 32


class ActiveHeader(Message):
    """What the active party's record begins with; arrays are float64.

    `rounds` were finished when it began, with these `margins` and this state of the sampling generator. `widths` are
    the numbers of columns by source, `seed` the public one of the lattice map, `secret_numbers` the key's, in hex.
    """

    number: bytes
    party: str
    job: str
    model_id: str
    cipher: str
    blind: bool
    terms: dict[str, Term]
    sources: list[str]
    widths: list[int]
    n_classes: int | None
    y: Array
    weight: Array | None
    rounds: int
    margins: Array
    random_state: str
    setup: list[Array]
    seed: bytes
    secret_numbers: list[str]


class PassiveHeader(Message):
    """What a passive party's record begins with; `certificate` is the active party's, empty between threads.

    `short_key_bits` is the size of keys below the secure ones that options consented to; None for secure ones.
    """

    number: bytes
    party: str
    job: str
    active: str
    model_id: str
    cipher: str
    terms: dict[str, Term]
    n_rows: int
    setup: list[Array]
    seed: bytes
    short_key_bits: int | None
    certificate: bytes


class KeptTree(Message):
    """A finished tree at the active party: int32 nodes, and the leaf of each row of the table.

    `nonce` opens its commitment, `secrets` are int8 (vectors, N) of each query of the lattice map. `directions`, int8,
    are those of monotone constraints at each node's split.
    """

    nonce: bytes
    source: Array
    record: Array
    left: Array
    leaf: Array
    secrets: list[Array]
    directions: Array


class End(Message):
    """The record is complete as far as the training went."""


# What the active party sends of a tree, and signs at its end
_SIGNED = (messages.TreeStart, messages.TreeRows, messages.SumsPiece, messages.SumsRequest)

_RECEIVED = (*_SIGNED, messages.SplitRequest, messages.NamedRows, messages.TreeEnd)
_ANSWERED = (messages.SplitAnswer, messages.SplitColumns)
PARTS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (ActiveHeader, PassiveHeader, KeptTree, End, *_RECEIVED, *_ANSWERED)
}


class _Part(msgspec.Struct, array_like=True):
    kind: str
    content: msgspec.Raw


class RecordFile:
    """A record that is being written; ConfigError if it cannot be, or becomes larger than the party allows."""

    def __init__(self, keeping: AuditFolder, party: str, number: bytes, header: Message) -> None:
        self.path = keeping.folder / f"{party}-{number.hex()}{SUFFIX}"
        self._party, self._keeping, self._size = party, keeping, 0
        try:
            keeping.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        except OSError as error:
            raise self._failed(error) from None
        self._digest = hashlib.sha256(FORMAT).digest()
        self._write(FORMAT)
        self.add(header)

    def add(self, part: Message) -> None:
        """Append a part."""
        content = msgspec.msgpack.encode(_Part(type(part).__name__, msgspec.Raw(encode(part))))
        self._size += len(content)
        if not isinstance(part, End):
            check_size(self._keeping, self._party, self._size)
        self._digest = hashlib.sha256(self._digest + content).digest()
        self._write(len(content).to_bytes(8, "little"), content, self._digest)

    def close(self) -> None:
        self.add(End())
        self._file.close()

    def _write(self, *pieces: bytes) -> None:
        try:
            for piece in pieces:
                self._file.write(piece)
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot keep a record for an audit: {error.strerror} - at {self.path}; name another folder as "
            "keep_for_audit, or leave it out",
            public="it cannot write the record for an audit that it was asked for",
        )


def read_parts(path: Path, *, unfinished: bool = False) -> Iterator[Message]:
    """Read a record part by part, without its `End`.

    ConfigError if the file is no record, is damaged, or, unless `unfinished`, ends early.
    """
    with explained(f"cannot read {path}"), path.open("rb") as file:
        if file.read(len(FORMAT)) != FORMAT:
            raise ConfigError(f"this is not a record for an audit - at {path}")
        size, digest, number = path.stat().st_size, hashlib.sha256(FORMAT).digest(), 0
        while True:
            started = file.tell()
            length = int.from_bytes(file.read(8), "little")
            if started + 8 + length + _DIGEST_BYTES > size:
                if unfinished and number:
                    return
                raise ConfigError(
                    f"the record breaks off after {number} whole parts, as where training was killed or the file was "
                    f"damaged - at {path}; --unfinished audits what is whole"
                )
            content = file.read(length)
            digest = hashlib.sha256(digest + content).digest()
            if file.read(_DIGEST_BYTES) != digest:
                raise ConfigError(f"the record is damaged: part {number + 1} is not what was written - at {path}")
            number += 1
            try:
                part = decoder_of(_Part).decode(content)
                message: Message = decoder_of(PARTS[part.kind]).decode(part.content)
            except (msgspec.MsgspecError, ValueError, KeyError) as error:
                raise ConfigError(f"expected a record of this release, got another ({error}) - at {path}") from None
            if isinstance(message, End):
                if file.read(1):
                    raise ConfigError(f"the record is damaged: something follows its end - at {path}")
                return
            yield message


class Sent:
    """A digest of what the active party sent one peer in a run, which it signs and the peer checks at a tree's end."""

    def __init__(self, job: str, number: bytes, active: str, peer: str, setup: list[Array]) -> None:
        key = msgspec.msgpack.encode(setup)
        self._digest = hashlib.sha256(length_prefixed("treaty audit", job, number, active, peer, key))

    def add(self, message: Message) -> None:
        self._digest.update(length_prefixed(type(message).__name__, encode(message)))

    def digest(self) -> bytes:
        """Return the digest of all messages so far."""
        return self._digest.digest()


def check_size(keeping: AuditFolder, party: str, nbytes: int) -> None:
    """Refuse a record that may become larger than the party's limit; ConfigError."""
    if nbytes > keeping.limit:
        least, most = (f"{size / 1e9:,.6f}".rstrip("0").rstrip(".") + " GB" for size in (nbytes, keeping.limit))
        raise ConfigError(
            f"{party}: expected a record for an audit of at most {most} (audit_gigabytes), it may take {least}: allow "
            f"more, or train fewer or shallower trees - at {keeping.folder}",
            public="the record for an audit that it was asked for may become too large",
        )


def keep_for_audit(inputs: RoleInput, keeping: AuditFolder) -> None:
    """Have a party of a training keep its record: an observer that writes down what an audit needs."""
    if inputs.party.name == inputs.roles.active:
        record = ActiveRecord(keeping, inputs.vouching)
        inputs.observers.add(record)
        inputs.evidence = record
    else:
        inputs.observers.add(PassiveRecord(keeping, inputs.vouching))


class _Recorder(Observer):
    """A party's record: nothing is kept before `_file` is opened."""

    def __init__(self, keeping: AuditFolder, vouching: Signer) -> None:
        self._keeping, self._vouching = keeping, vouching
        self._file: RecordFile | None = None

    def started(self, inputs: RoleInput) -> None:
        self._inputs = inputs

    def finished(self) -> None:
        if self._file is not None:
            self._file.close()


class ActiveRecord(_Recorder, Evidence):
    """The active party's record: its key or secrets, nonces of commitments, finished trees; signs what it sent."""

    def __init__(self, keeping: AuditFolder, vouching: Signer) -> None:
        super().__init__(keeping, vouching)
        self.number = secrets.token_bytes(NUMBER_BYTES)
        self._sent: dict[str, Sent] = {}
        self._nonce, self._secrets = b"", list[Array]()

    def started(self, inputs: RoleInput) -> None:
        """Refuse a training whose record may become too large; ConfigError."""
        super().started(inputs)
        common, n_rows, outputs = inputs.common, inputs.rows.table.n_rows, inputs.trees_a_round
        vectors = _most_vectors(common, n_rows)
        leaf = 1 if vectors <= 64 else 4
        tree = n_rows * leaf + vectors * (DEGREE + 48)
        most = 8 * n_rows * (2 + outputs) + common.most_rounds * outputs * tree
        check_size(self._keeping, inputs.party.name, most)

    def event(self, event: object) -> None:
        match event:
            case ClientReady():
                self._ready = event
            case BoostingBegins():
                self._begin(event)
            case GradientsCommitted(nonce):
                self._nonce = nonce
            case TreeFinished(tree, rows, directions):
                self._finish_tree(tree, rows, directions)

    def _begin(self, begun: BoostingBegins) -> None:
        """Begin the record, once the training is set up."""
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
            # each query's secrets are fresh and never used again, so that a record reveals no other query
            lattice.keep_secrets = lambda keys: self._secrets.append(Array.of(keys))

    def message_sent(self, peer: str, message: Message) -> None:
        if isinstance(message, _SIGNED) and self._sent:
            self._sent[peer].add(message)

    def signature(self, peer: str) -> bytes:
        """Sign all that a peer was sent; empty between threads."""
        return self._vouching.vouch(self._sent[peer].digest())

    def _finish_tree(self, tree: Tree, rows: RowPartition, directions: Directions) -> None:
        """Write down a finished tree, and each row's leaf."""
        leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
        members, starts = rows.rows(leaves, sampled=False)
        leaf = np.empty(len(members), np.int32)
        leaf[members] = np.repeat(leaves, np.diff(starts))
        source, record, left = (Array.of(of.astype(np.int32)) for of in (tree.source, tree.record, tree.left))
        of_rows = Array.of(leaf.astype(np.uint8 if len(tree.left) <= 256 else np.int32))
        assert self._file is not None
        self._file.add(KeptTree(self._nonce, source, record, left, of_rows, self._secrets, Array.of(directions)))
        self._nonce, self._secrets = b"", []


class PassiveRecord(_Recorder):
    """A passive party's record: what it received of each tree, and how it answered splits."""

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
        # the most that a tree's messages may take: vectors of nodes, or named rows, and bits of rows at splits
        blind = ciphers.hides_nodes(setup.encryption)
        one = message_bytes(setup.encryption, unpack(setup.payload, active, "Setup"))
        vectors = _most_vectors(common, n_rows) if blind else 1
        of_splits = messages.node_type(1 << min(common.depth, 31)).itemsize
        of_splits *= not ciphers.reveals_columns(setup.encryption)
        named = (0 if blind else 4 + 2 * common.depth) * n_rows  # sample, nodes of sums
        named += of_splits * n_rows * common.depth
        split = 2 * _most_vectors(common, n_rows) * (n_rows // 8 + 64)
        trees = max(0, common.most_rounds - setup.rounds) * inputs.trees_a_round
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

        Raises PeerProtocolError if the active party, at a tree's end, did not sign what is kept here.
        """
        if self._file is None or not isinstance(message, _RECEIVED):
            return
        if isinstance(message, messages.TreeEnd) and not self._vouching.check(
            peer, message.signature, self._sent.digest()
        ):
            raise PeerProtocolError(
                peer, "expected what was sent signed for an audit, got no such signature", at="TreeEnd"
            )
        if isinstance(message, _SIGNED):
            self._sent.add(message)
        self._file.add(message)

    def message_sent(self, peer: str, message: Message) -> None:
        if self._file is not None and isinstance(message, _ANSWERED):
            self._file.add(message)


def _most_vectors(common: BoostingOptions, n_rows: int) -> int:
    """Return the most nodes that are asked about in a tree: the root, and one of each pair of siblings."""
    return max(1, min(common.rules_of(1.0, 1.0).most_asked, n_rows // common.fewest_rows))
