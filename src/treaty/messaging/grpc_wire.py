"""What both ends of the gRPC transport share: method names, the transport's own structs, options.

Three methods, bytes in and out, no generated stubs:

``/treaty.Mail/Watch``
    request: `Introduction`; response stream: a `Notice` at once, with the server's terms, and one with
    ``closing=True`` when it closes. In between the stream stays open: its break is how a death is noticed.
``/treaty.Mail/Deliver``
    request stream: an `Announcement`, then the frame in chunks of `CHUNK` bytes; response: empty, sent when the
    frame is in the receiver's mailbox.
``/treaty.Mail/Post``
    request: a `Parcel`, an announcement and its frame in one, which costs both ends a fraction; response: as above.
    For frames of at most `CHUNK` bytes.
"""

from __future__ import annotations

import os

# gRPC's C library reports every failed handshake and lost connection on standard error; we report them as
# errors. It reads the variable when it is loaded, so this comes first; what the user has set stays.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import queue
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Annotated, Any, TypeVar

import grpc as grpc
import msgspec

from treaty.files import decoder_of

SERVICE = "treaty.Mail"
WATCH = f"/{SERVICE}/Watch"
DELIVER = f"/{SERVICE}/Deliver"
POST = f"/{SERVICE}/Post"
VERSION = 5
FRAME_BYTES = 60_000_000
"""Most bytes of a message's content in one frame: after a break of the connection no more is sent again."""
CHUNK = 1 << 18
"""Bytes. Frames in one piece take less than half the time of chunks, for which gRPC starts a thread each time.

Chunks of a megabyte save a quarter more for long frames, but leave up to a frame's size in the C library's heap.
"""
WINDOW = 16 * CHUNK
"""Bytes of a frame under way at once. By default the C library widens it, at the receiver's cost in memory."""
BULK_PING_TIMEOUT = 60.0
"""Seconds a ping may take on a connection that carries frames: on a slow link it queues behind megabytes."""

T = TypeVar("T", bound=msgspec.Struct)
_Size = Annotated[int, msgspec.Meta(ge=0)]


Terms = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=100)], Annotated[str, msgspec.Meta(max_length=4000)]],
    msgspec.Meta(max_length=300),
]
"""What parties must agree on, by name; a notice with more or longer terms is refused."""


class Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The caller: transport version (both ends must have the same), party name, incarnation, and job.

    The connection must have the certificate pinned for the name. The incarnation, drawn when the sender's channel was
    made, distinguishes a lost connection from a restarted process. Doors of nodes route a connection by a line in clear
    before TLS; the job is repeated here, so that nobody on the way can lead it to another job of the two parties.
    """

    version: int
    sender: Annotated[str, msgspec.Meta(max_length=200)]
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    job: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a watched server reports: which incarnation it is, whether it is closing, and its terms."""

    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    closing: bool
    terms: Terms = {}


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frame to come: its sender, its number among all deliveries of that sender here, its bytes."""

    introduction: Introduction
    number: _Size
    size: _Size


class Parcel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """A small frame and its announcement."""

    announcement: Announcement
    frame: memoryview


def encode(value: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode one of the structs above; raise ValueError unless the bytes are exactly one `kind`."""
    try:
        value: T = decoder_of(kind).decode(data)
        return value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def chunks(announcement: Announcement, frame: bytes) -> Iterator[bytes]:
    """Cut a frame for the wire, its announcement first."""
    yield encode(announcement)
    whole = memoryview(frame)
    for start in range(0, len(frame), CHUNK):
        yield bytes(whole[start : start + CHUNK])


def ping_options(time: float, timeout: float = BULK_PING_TIMEOUT) -> list[tuple[str, Any]]:
    """Return options of either end: ping a connection every `time` seconds, close it after `timeout` without answer.

    The C library answers pings in its own threads, without Python's lock: a party that computes for minutes still
    answers, a stopped process does not. Two options give the timeout because on some releases the second alone decides
    about pings (1.85: the first is ignored, and the second's default is a minute).
    """
    return [
        ("grpc.keepalive_time_ms", int(time * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeout * 1000)),
        ("grpc.http2.ping_timeout_ms", int(timeout * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", 2 * CHUNK),
        # a chunk in one frame of HTTP/2, not in 16
        ("grpc.http2.max_frame_size", WINDOW),
    ]


HANDSHAKE_TIMEOUT = 10.0
"""Seconds a connection may take to show its certificate; the C library's own default is two minutes."""

CALLS = 8
"""Calls that one peer may have under way, on all its connections. It needs two, and two more when it dials again."""

# as many as are asked for: some systems name a hard limit that they do not grant
_DESCRIPTORS = 1 << 16
_CONNECTIONS = 4096  # the most, whatever the system allows
# connections: a watch and one for frames, twice while it dials again
_OF_A_PEER = 4


def raise_descriptors() -> int:
    """Raise this process's limit of open files to what the system allows; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            # macOS grants less than its hard limit
            return soft
        return wanted
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def limiting_options(peers: int) -> list[tuple[str, Any]]:
    """Return a server's options: half of the open files are kept for tables, models and the party's own connections.

    A connection beyond the limit is closed at once; those that came before stay open.
    """
    connections = max(_OF_A_PEER * peers + 16, min(raise_descriptors() // 2, _CONNECTIONS))
    return [
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT * 1000)),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_concurrent_streams", CALLS),
    ]


class DaemonThreads(futures.Executor):
    """Runs calls in daemon threads: no call waits for another, and an open one does not keep a process from ending."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # counts the threads that wait for a task
        self._idle = threading.Semaphore(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Run a call in a thread that waits for one, else in a new one; see `futures.Executor.submit`."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(run)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name="treaty-grpc-call", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End each thread when it is idle; nothing may be submitted afterwards."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # releases the call
            self._idle.release()
        self._tasks.put(None)  # for the next thread
