"""What parties send to each other: typed messages, arrays and the envelope around them.

A protocol declares one frozen struct per message, named by its content::

    class LevelQuery(Message):
        node_of_row: Array      # uint8 (rows,)
        level: int

Decoding is validation: the receiver says which type it expects, msgspec checks the struct's types, and `view` checks
dtype, shape and byte length of every array before anything is used. No class is looked up by a name on the wire and
nothing is unpickled.

Wire form (msgpack): ``Envelope(job, protocol, round, step, sender, receiver, seq, body)``, where ``step`` is
the name of the message class and ``body`` the message as a map of its fields.

A message with something of every row would grow with the table. It is sent once for each of `row_pieces` instead, as
the same class with the values of some rows, in the order of the rows. Both ends know how many rows there are, so the
receiver knows how long each piece must be, and puts it where it belongs or adds it up before the next one comes.

What a receiver learns from a message is stated once, at its class (`Message.leakage`): tables in the documentation,
`treaty disclosures`, `disclosures_` and the expectations of audits are made from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, dataclass_transform, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import LocalProtocolError, PeerProtocolError
from treaty.files import decoder_of
from treaty.machine import arrays
from treaty.machine.arrays import pieces

Form = Literal["nothing", "encrypted", "masked", "noisy", "aggregated", "exact", "control"]
"""In which form the content arrives at the receiver.

========== =============================================================================================
nothing    random numbers, commitments, receipts: nothing that it did not know
encrypted  ciphertexts whose key it does not have
masked     numbers under masks or in shares that it cannot remove alone
noisy      under the noise of a differentially private mechanism
aggregated sums, counts, quantiles or a model: over many rows, or over several parties
exact      as it is, about single rows or single splits
control    what is settled about the job: sizes, keys, options, who takes part, progress; nothing of single rows
========== =============================================================================================
"""


@dataclass(frozen=True, slots=True)
class MessageLeakage:
    """What the receiver of a message learns from it."""

    # what it learns, in a few words; the system states what colluding parties learn
    tells: str
    # see `Form`
    form: Form
    # the option that lessens it; empty where there is none
    guard: str = ""


Leakages = MessageLeakage | Mapping[str, MessageLeakage]
"""What is stated at a class of message: once, or by the name of what it depends on."""


Frame = bytes | memoryview
"""One encoded envelope as a channel carries it."""

DTYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
)
"""Element types an `Array` may have; little-endian on the wire."""

# the same by numpy's own types, whose `name` takes 30 times as long
_NAMES = {np.dtype(name): name for name in DTYPES}

LISTED_BYTES = 16 << 20
"""Most bytes of a message with lists or tables other than `Arrays`."""

PLAIN_BYTES = 1 << 20
"""Most bytes of a message of numbers and text alone."""

DIGEST_BYTES = 32
"""Of SHA-256."""

_Label = Annotated[str, msgspec.Meta(max_length=200)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
# What hostile bytes can raise: UnicodeDecodeError is a ValueError, deep nesting a RecursionError.
_MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
_UNENCODABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)

Scalar = TypeVar("Scalar", bound=np.generic)
Body = TypeVar("Body")
M = TypeVar("M", bound="Message")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """Base of everything a protocol sends; subclasses add typed fields and inherit the strictness.

    `leakage` states what the receiver learns; the decorator `leaks` sets it. Where that depends on the roles at both
    ends or on options, it is a mapping, set by `leaks_by`, and each system's routes (`System.routes`) name the entry.
    """

    leakage: ClassVar[Leakages]


def leaks(tells: str, form: Form, guard: str = "") -> Callable[[type[M]], type[M]]:
    """State what the receiver of a class of message learns; arguments as of `MessageLeakage`."""

    def stated(kind: type[M]) -> type[M]:
        kind.leakage = MessageLeakage(tells, form, guard)
        return kind

    return stated


def leaks_by(**stated: tuple[str, Form] | tuple[str, Form, str]) -> Callable[[type[M]], type[M]]:
    """State what the receiver of a class of message learns by the name of what it depends on, each as for `leaks`."""

    def all_stated(kind: type[M]) -> type[M]:
        kind.leakage = {name: MessageLeakage(*of) for name, of in stated.items()}
        return kind

    return all_stated


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """A numpy array on the wire: element type, shape, raw little-endian bytes in C order.

    A decoded `Array` is a claim of the sender: use it through `view` only. Its data points into the received frame and
    keeps that frame alive.
    """

    dtype: str
    shape: tuple[_Count, ...]
    data: memoryview

    @classmethod
    def of(cls, values: NDArray[Any]) -> Array:
        """Wrap an array of a dtype in `DTYPES`, which must not change until the message is sent.

        Nothing is copied if it is C-contiguous and little-endian. Raises LocalProtocolError for another dtype.
        """
        values = np.asarray(values, order="C")
        name = _NAMES.get(values.dtype.newbyteorder("="))
        if name is None:
            raise LocalProtocolError(
                f"expected an array of {', '.join(sorted(DTYPES))}, got {values.dtype} - at Array.of"
            )
        # the wire is little-endian on every machine
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        return cls(name, values.shape, little.reshape(-1).view(np.uint8).data)


def view(
    array: Array, dtype: type[Scalar] | np.dtype[Scalar], shape: tuple[int | None, ...], *, peer: str, what: str
) -> NDArray[Scalar]:
    """Check a received array against what the protocol expects and return it read-only, aligned, in native byte order.

    In `shape`, None accepts any length of that axis. `peer` (the sender) and `what` (the field, such as
    ``"LevelQuery.rows"``) are for the error. The result shares memory with the frame, unless its elements are unaligned
    there. PeerProtocolError if dtype, shape or number of bytes differ, or a bool is neither 0 nor 1; nothing is
    allocated before all three agree.
    """
    expected = np.dtype(dtype)
    name = _NAMES.get(expected)
    assert name is not None, f"a protocol asked for {expected}, which no Array may have"
    fits = len(array.shape) == len(shape) and all(
        length >= 0 and wanted in (None, length) for length, wanted in zip(array.shape, shape, strict=True)
    )
    if array.dtype != name or not fits:
        raise PeerProtocolError(
            peer, f"expected {name} {_tuple(shape)}, got {clean(array.dtype, 20)} {_tuple(array.shape)}", at=what
        )
    # Python's integers: a shape may claim more than 64 bits
    needed = math.prod(array.shape) * expected.itemsize
    if array.data.nbytes != needed:
        many = needed if needed < 1 << 63 else "too many"
        raise PeerProtocolError(
            peer, f"expected {many} bytes for {name} {_tuple(array.shape)}, got {array.data.nbytes}", at=what
        )
    try:
        elements = np.frombuffer(array.data, expected.newbyteorder("<")).reshape(array.shape)
    except ValueError:
        # zero elements, but an axis beyond what numpy can count
        raise PeerProtocolError(peer, f"expected axes below 2**62, got {_tuple(array.shape)}", at=what) from None
    if expected == np.bool_ and elements.size and elements.view(np.uint8).max() > 1:
        raise PeerProtocolError(peer, "expected bool bytes 0 and 1", at=what)
    # numpy's `require` takes long to find that nothing is to be done
    right = elements.dtype == expected and elements.flags.aligned
    values: NDArray[Scalar] = elements if right else np.require(elements, expected, "A")
    values.flags.writeable = False
    return values


def pack(payload: Sequence[NDArray]) -> list[Array]:  # type: ignore[type-arg]
    """Wrap arrays of any shapes for sending."""
    return [Array.of(values) for values in payload]


def unpack(payload: Sequence[Array], peer: str, what: str) -> list[NDArray]:  # type: ignore[type-arg]
    """View received arrays, whose number, shapes and values the caller checks."""
    for k, array in enumerate(payload):
        if array.dtype not in DTYPES:
            raise PeerProtocolError(peer, f"expected an element type of {sorted(DTYPES)}", at=f"{what}.payload[{k}]")
    return [
        view(array, np.dtype(array.dtype), (None,) * len(array.shape), peer=peer, what=f"{what}.payload[{k}]")
        for k, array in enumerate(payload)
    ]


Arrays = Annotated[list[Array], msgspec.Meta(max_length=1 << 16)]
"""Several arrays in one message, of a bounded number: an empty one takes ten times its bytes when decoded."""
ModelId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""Identifies a model in names of files, and its training in ledgers (`ledger.job_of`)."""


def digests_in(content: bytes, most: int, *, peer: str, what: str) -> set[bytes]:
    """Split a peer's field `what` into SHA-256 digests; PeerProtocolError for more than `most`, or a part of one."""
    count, rest = divmod(len(content), DIGEST_BYTES)
    if rest or count > most:
        raise PeerProtocolError(peer, f"expected at most {most} digests of {DIGEST_BYTES} bytes", at=what)
    return {content[k * DIGEST_BYTES : (k + 1) * DIGEST_BYTES] for k in range(count)}


class Envelope(msgspec.Struct, Generic[Body], frozen=True, forbid_unknown_fields=True, eq=False):
    """A message with its sender, receiver, job, round and number."""

    # this and the next must be those of the receiving party
    job: _Label
    protocol: _Label
    round: _Count  # the protocol's, from 0
    step: _Label  # name of the message class in `body`
    sender: _Label
    receiver: _Label
    # number of the message within its ordered pair (sender, receiver), from 0 without gaps
    seq: _Count
    # a Message to encode, or a decoded msgspec.Raw that is not yet looked into
    body: Body


@leaks("why the sender stops the job, without any value of a table", "control")
class Abort(Message):
    """The sender stops the job; `reason` may be shown to the receiver's operator."""

    reason: str


@leaks("a part of a longer message; it reveals what that message reveals", "control")
class Part(Message):
    """A piece of an encoded envelope that is too long for one message; `nbytes` is the length of the whole."""

    content: memoryview
    nbytes: _Count


@leaks("that the sender has finished", "control")
class Goodbye(Message):
    """The sender has finished its part; the end of its connection is no failure from now on."""


def encode(value: Envelope[Any] | Message) -> bytes:
    """Encode an envelope with its message in one pass, or a message alone, as the body of its envelope.

    LocalProtocolError if a field cannot be encoded, such as an integer beyond 64 bits.
    """
    try:
        return msgspec.msgpack.encode(value)
    except _UNENCODABLE as error:
        what = value.step if isinstance(value, Envelope) else type(value).__name__
        raise LocalProtocolError(f"cannot encode {what}: {clean(str(error))}") from error


def decode_envelope(frame: Frame, *, peer: str) -> Envelope[msgspec.Raw]:
    """Decode an envelope from `peer`, leaving the body untouched; raise PeerProtocolError if it is malformed."""
    try:
        envelope: Envelope[msgspec.Raw] = decoder_of(Envelope[msgspec.Raw]).decode(frame)
        return envelope
    except _MALFORMED as error:
        raise _malformed(error, "the envelope", peer) from None


def decode_body(body: Frame | msgspec.Raw, kind: type[M], *, peer: str) -> M:
    """Decode a message body, from an `Envelope` or a transcript, as the type the receiver expects.

    PeerProtocolError if the bytes are not exactly one `kind` (a missing, unknown or wrongly typed field, bytes left
    over), or, before anything is decoded, if they are more than `largest_body` allows.
    """
    most, nbytes = largest_body(kind), memoryview(body).nbytes
    if most is not None and nbytes > most:
        raise PeerProtocolError(peer, f"expected at most {most} bytes, got {nbytes}", at=kind.__name__)
    try:
        message: M = decoder_of(kind).decode(body)
        return message
    except _MALFORMED as error:
        raise _malformed(error, kind.__name__, peer) from None


@cache
def largest_body(kind: type[Message]) -> int | None:
    """Return the bytes that a message of a class may have; None for arrays alone, whose shapes `view` checks.

    Lists and tables take up to 64 times their bytes when decoded; a message without them needs few.
    """
    fields = [field.type for field in msgspec.structs.fields(kind)]
    if any(_contains(field, (list, dict)) for field in fields):
        return LISTED_BYTES
    return None if any(_contains(field, (Array, bytes, memoryview)) for field in fields) else PLAIN_BYTES


def _contains(field: Any, wanted: tuple[type, ...]) -> bool:
    """Return whether a field's type contains one of these; the list of `Arrays` does not count, as it is bounded."""
    if field is Arrays:
        return Array in wanted
    if get_origin(field) is Annotated:
        return _contains(field.__origin__, wanted)
    if field in wanted or get_origin(field) in wanted:
        return True
    nested = isinstance(field, type) and issubclass(field, msgspec.Struct) and field is not Array
    inner = [inner.type for inner in msgspec.structs.fields(field)] if nested else []
    return any(_contains(part, wanted) for part in (*get_args(field), *inner))


def clean(text: str, limit: int = 300) -> str:
    """Make a peer's text safe to show: printable, on one line, at most `limit` characters."""
    if len(text) <= limit and text.isprintable():
        return text
    shown = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _malformed(error: Exception, what: str, peer: str) -> PeerProtocolError:
    if isinstance(error, RecursionError):
        text = "Expected a message, got deeper nesting than any message has"
    elif isinstance(error, UnicodeDecodeError):
        text = "Expected UTF-8 text, got other bytes"
    else:
        text = clean(str(error))
    return PeerProtocolError(peer, f"{text} {'of' if ' - at ' in text else '- at'} {what} from {peer}")


def _tuple(shape: tuple[int | None, ...]) -> str:
    """Show a shape, which a peer may have made long."""
    lengths = ["any" if length is None else str(length) for length in shape[:8]]
    if len(shape) > 8:
        lengths.append(f"... {len(shape)} axes")
    return f"({lengths[0]},)" if len(lengths) == 1 else f"({', '.join(lengths)})"


def row_pieces(n_rows: int, bits: int) -> list[slice]:
    """Cut rows for messages with `bits` of each row and at most `arrays.PIECE_BYTES`; at least one piece."""
    # a multiple of 8 rows, so that packed bits of the rows of a piece fill whole bytes
    at_a_time = max(1, arrays.PIECE_BYTES // max(1, bits)) * 8
    return pieces(n_rows, at_a_time) or [slice(0, 0)]


def column_pieces(count: int, n_rows: int) -> list[slice]:
    """Cut columns of packed bits of all rows for messages; a column too long for one is sent in `row_pieces`."""
    return pieces(count, max(1, arrays.PIECE_BYTES // max(1, -(-n_rows // 8))))


def put_together(parts: list[NDArray[Scalar]]) -> NDArray[Scalar]:
    """Concatenate arrays along the first axis, and empty the list: each part is freed once it is copied.

    For rows whose number is a peer's claim: no memory is allocated before they have come.
    """
    if len(parts) == 1:
        return parts.pop()
    whole, filled = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype), 0
    while parts:
        part = parts.pop(0)
        whole[filled : filled + len(part)] = part
        filled += len(part)
    return whole


def bits_of(packed: Array, n_rows: int, peer: str, what: str) -> NDArray[np.bool_]:
    """Unpack a peer's bits of rows, bool (n_rows,); `what` is the field, for the error."""
    content = view(packed, np.uint8, (-(-n_rows // 8),), peer=peer, what=what)
    return np.unpackbits(content, count=n_rows).view(np.bool_)


# ---------- bounds of sizes that a party says of itself and nobody has agreed to, so that no number alone takes memory

MOST_COLUMNS = 1 << 20
"""Columns of one party."""

MOST_SLOTS = 1 << 24
"""Slots of one party's columns in a node's sums: 400 MB of them."""

MOST_ROWS = (1 << 31) - 1
"""Rows of a table: their numbers are int32."""

ColumnSize = Annotated[int, msgspec.Meta(ge=0, le=MOST_COLUMNS)]
RowSize = Annotated[int, msgspec.Meta(ge=0, le=MOST_ROWS)]
