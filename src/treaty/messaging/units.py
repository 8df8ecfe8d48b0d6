"""The format of a connection between two parties or nodes, without any socket.

Either end sends units: a header of 25 bytes, big-endian, and its content::

    kind u8 | size of the content u64 | number u64 | received u64

========== ============== =================================================================================
kind       sent by        content and numbers
========== ============== =================================================================================
`HELLO`    who dials      an `Introduction`; the first unit of a connection
`WELCOME`  who listens    a `Welcome`; `received`: how many frames of the dialling party have come so far
`REFUSED`  who listens    text, why the connection ends
`FRAME`    who dials      an encoded envelope; `number` counts all frames to this peer from 0, `received` says how
                          many frames of the peer have come
`ASK`      who dials      asks for a receipt
`RECEIPT`  who listens    `received`: how many frames have come
`PING`     who dials      asks for a `PONG`
`PONG`     who listens    the answer
`CLOSING`  who listens    it leaves
`LOAD`     who dials      any bytes, before `HELLO`: the time until they are back measures the link
`ECHO`     who listens    as many bytes as the `LOAD` had
========== ============== =================================================================================

A connection carries frames (`HELLO`, then `FRAME` and `ASK` one way, `RECEIPT` the other way), or it is watched
(`HELLO`, then `PING` and `PONG`), so that pings never queue behind frames. Nodes send notes as `FRAME` both ways.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from treaty.files import decoder_of

VERSION = 6
HELLO, WELCOME, REFUSED, FRAME, ASK, RECEIPT, PING, PONG, CLOSING, LOAD, ECHO = range(11)

LOAD_BYTES = 1 << 20
"""Most bytes of a `LOAD`."""

# most bytes of the content of units other than frames, whose size the receiver's credit bounds
_MOST = {HELLO: 4 << 10, WELCOME: 2 << 20, REFUSED: 4 << 10, LOAD: LOAD_BYTES, ECHO: LOAD_BYTES}
_HEADER = struct.Struct("!BQQQ")
# bytes read at once; a longer content is read into its own array
_READ = 1 << 16

T = TypeVar("T", bound=msgspec.Struct)
Purpose = Literal["frames", "watch"]

Terms = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=100)], Annotated[str, msgspec.Meta(max_length=4000)]],
    msgspec.Meta(max_length=300),
]
"""What parties must agree on, by name; a welcome with more or longer terms is refused."""

_Incarnation = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The caller: transport version (both ends must have the same), party name, incarnation, job, and what it wants.

    The connection must have the certificate pinned for the name. The incarnation, drawn when the sender's channel was
    made, distinguishes a lost connection from a restarted process. Doors of nodes route a connection by a line in clear
    before TLS; the job is repeated here, so that nobody on the way can lead it to another job of the two parties.
    """

    version: int
    sender: Annotated[str, msgspec.Meta(max_length=200)]
    incarnation: _Incarnation
    job: Annotated[str, msgspec.Meta(max_length=200)] = ""
    purpose: Purpose = "frames"


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to an introduction: which incarnation listens, and its terms."""

    incarnation: _Incarnation
    terms: Terms = {}


class Header(NamedTuple):
    """The header of a unit; see the table at the top."""

    kind: int
    size: int
    number: int
    received: int


def header(kind: int, size: int = 0, number: int = 0, received: int = 0) -> bytes:
    """Encode a unit's header."""
    return _HEADER.pack(kind, size, number, received)


encode = msgspec.msgpack.encode


def decode(content: memoryview, kind: type[T]) -> T:
    """Decode one of the structs above; raise ValueError unless the bytes are exactly one `kind`."""
    try:
        value: T = decoder_of(kind).decode(content)
        return value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class UnitReader:
    """Cuts the bytes of a connection into units; the caller puts them where `room` says, and tells how many came.

    In use::

        while (found := reader.header()) is None:
            reader.came(socket.recv_into(reader.room()))
        while (content := reader.content(found)) is None:
            reader.came(socket.recv_into(reader.room()))

    No memory is taken for a content before `content` is called for its header, so that the caller can refuse it.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_READ))
        # what has come and is not yet taken
        self._start = self._end = 0
        # the content that is coming in, and how much of it has
        self._content: memoryview | None = None
        self._filled = 0

    def room(self) -> memoryview:
        """Return where the next bytes belong, one or more."""
        if self._content is not None:
            return self._content[self._filled :]
        # a header that is cut off moves to the front
        if self._start:
            held = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(held)] = held
            self._start, self._end = 0, len(held)
        return self._buffer[self._end :]

    def came(self, nbytes: int) -> None:
        """Record that so many bytes were put where `room` said."""
        if self._content is not None:
            self._filled += nbytes
        else:
            self._end += nbytes

    def header(self) -> Header | None:
        """Take the next header, None if it has not come; raise ConnectionError for one that no peer may send."""
        if self._end - self._start < _HEADER.size:
            return None
        found = Header._make(_HEADER.unpack_from(self._buffer, self._start))
        if found.kind > ECHO:
            raise ConnectionError(f"expected a unit, got one of kind {found.kind}")
        if found.kind != FRAME and found.size > _MOST.get(found.kind, 0):
            raise ConnectionError(f"expected at most {_MOST.get(found.kind, 0)} bytes, got {found.size} announced")
        self._start += _HEADER.size
        return found

    def content(self, of: Header) -> memoryview | None:
        """Return the content of the header taken last, read-only, once all of it has come.

        It ends at a multiple of 8 bytes: the array with which a message ends, its largest, is then aligned, and `view`
        need not copy it.
        """
        if self._content is None:
            # not zeroed: pages are allocated only as bytes arrive
            words = np.empty(-(-of.size // 8), np.uint64)
            self._content = words.view(np.uint8).data[-of.size % 8 :]
            self._filled = min(of.size, self._end - self._start)
            self._content[: self._filled] = self._buffer[self._start : self._start + self._filled]
            self._start += self._filled
        if self._filled < of.size:
            return None
        content, self._content = self._content, None
        return content.toreadonly()
