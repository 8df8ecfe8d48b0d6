"""What parties keep of a training, on request, so that its gradients can be audited afterwards (`audit`).

The active party keeps its key or its secrets, the nonces of its commitments, labels, and which leaf each row came to;
a passive party keeps what it received and how it answered splits. Both are files of their own folders: nothing more is
sent but the record's number, and, with the tree's end, a signature on all that the record of the other will hold.

A file is a line that names its format, then parts: length (8 bytes), content, and SHA-256 of the digest before and the
content, so that a changed, moved or missing part shows; the last part is an `End`. A record is readable to its owner
alone. The active party's is as secret as labels and key: whoever has it and a passive party's opens all ciphertexts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from treaty.crypto.keystream import length_prefixed
from treaty.errors import ConfigError
from treaty.files import decoder_of
from treaty.messaging.messages import Array, Message, encode_body
from treaty.systems.options import Term
from treaty.systems.system import AuditFolder
from treaty.systems.vertical.encrypted_columns import (
    SplitAnswer,
    SplitColumns,
    SplitRequest,
    SumsPiece,
    SumsRequest,
    TreeEnd,
    TreeRows,
    TreeStart,
)
from treaty.systems.vertical.named_rows import NamedRows

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

    `nonce` opens its commitment, `secrets` are int8 (vectors, N) of each query of the lattice map.
    """

    nonce: bytes
    source: Array
    record: Array
    left: Array
    leaf: Array
    secrets: list[Array]


class End(Message):
    """The record is complete as far as the training went."""


PARTS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        ActiveHeader, PassiveHeader, KeptTree, End,
        TreeStart, TreeRows, SumsPiece, SumsRequest, SplitRequest, NamedRows, SplitAnswer, SplitColumns, TreeEnd,
    )
}  # fmt: skip


class _Part(msgspec.Struct, array_like=True):
    kind: str
    content: msgspec.Raw


class RecordFile:
    """A record while it is written; ConfigError where it cannot be, or becomes larger than the party allows."""

    def __init__(self, keeping: AuditFolder, party: str, number: bytes, header: Message) -> None:
        self.path = keeping.folder / f"{party}-{number.hex()}{SUFFIX}"
        self._party, self._keeping, self._size = party, keeping, 0
        try:
            keeping.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file = os.fdopen(handle, "wb")
        except OSError as error:
            raise self._failed(error) from None
        self._digest = hashlib.sha256(FORMAT).digest()
        self._write(FORMAT)
        self.add(header)

    def add(self, part: Message) -> None:
        """Append a part."""
        content = msgspec.msgpack.encode(_Part(type(part).__name__, msgspec.Raw(encode_body(part))))
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

    ConfigError for a file that is no record, is damaged, or ends early; with `unfinished` what is whole counts.
    """
    try:
        with path.open("rb") as file:
            yield from _parts(file, path, unfinished)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _parts(file: BinaryIO, path: Path, unfinished: bool) -> Iterator[Message]:
    if file.read(len(FORMAT)) != FORMAT:
        raise ConfigError(f"expected a record for an audit, got something else - at {path}")
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
        self._digest.update(length_prefixed(type(message).__name__, encode_body(message)))

    def digest(self) -> bytes:
        """Return the digest of all messages so far."""
        return self._digest.digest()


def check_size(keeping: AuditFolder, party: str, nbytes: int) -> None:
    """Refuse a record that may become larger than the party's limit; ConfigError."""
    if nbytes > keeping.limit:
        raise ConfigError(
            f"{party}: expected a record for an audit of at most {_gigabytes(keeping.limit)} (audit_gigabytes), it "
            f"may take {_gigabytes(nbytes)}: allow more, or train fewer or shallower trees - at {keeping.folder}",
            public="the record for an audit that it was asked for may become too large",
        )


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.6f}".rstrip("0").rstrip(".") + " GB"
