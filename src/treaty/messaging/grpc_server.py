"""The listening end of a gRPC channel: authenticates callers, takes frames in, is watched."""

import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any, NoReturn

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.certificates import Identity
from treaty.messaging.channel import Arrival, Inbox
from treaty.messaging.grpc_wire import (
    SERVICE,
    VERSION,
    WINDOW,
    Announcement,
    Introduction,
    Notice,
    Parcel,
    decode,
    encode,
    grpc,
    ping_options,
)
from treaty.messaging.messages import Frame, clean

_TURN_TIMEOUT = 60.0  # seconds a delivery waits for an earlier, broken one of the same sender to be noticed


class _Sender:
    """The server's state of one pinned peer."""

    def __init__(self) -> None:
        self.turn = threading.Lock()  # held during a delivery: one at a time per sender
        self.incarnation: bytes | None = None
        self.last = -1  # number of the newest delivery that reached the inbox
        self.unread = 0  # bytes in the inbox


class Server:
    """Takes frames of pinned peers into an inbox; starts listening at once, at `address` with the actual port.

    Arrivals and offences of peers go to the inbox. `max_message_bytes` is the largest frame accepted, and the most one
    peer may have unread here; a caller is pinged after `keepalive_time` seconds of silence. `incarnation` are 16
    random bytes, `callers` the peers that have dialled us. Raises ConfigError when the address cannot be listened at.
    """

    def __init__(
        self,
        name: str,
        address: str,
        identity: Identity,
        pinned: Mapping[str, x509.Certificate],
        inbox: Inbox,
        max_message_bytes: int,
        keepalive_time: float,
    ) -> None:
        self.incarnation = secrets.token_bytes(16)
        self.callers: set[str] = set()
        self._name = name
        self._inbox = inbox
        self._max = max_message_bytes
        self._owner = {certificate.public_bytes(Encoding.DER): peer for peer, certificate in pinned.items()}
        self._owner_by_pem: dict[bytes, str] = {}  # as connections present them
        self._senders = {peer: _Sender() for peer in pinned}
        self._lock = threading.Lock()
        self._watchers: set[threading.Event] = set()
        self._closing = False
        self._threads = _DaemonThreads()
        self._server = grpc.server(
            self._threads,
            handlers=[
                grpc.method_handlers_generic_handler(
                    SERVICE,
                    {
                        "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
                        "Deliver": grpc.stream_unary_rpc_method_handler(self._deliver),
                        "Post": grpc.unary_unary_rpc_method_handler(self._post),
                    },
                )
            ],
            # Without so_reuseport=0 a second process could listen at the same port unnoticed.
            options=[
                *ping_options(keepalive_time),
                ("grpc.so_reuseport", 0),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", WINDOW),
            ],
            maximum_concurrent_rpcs=8 * len(pinned) + 8,
        )
        credentials = grpc.ssl_server_credentials(
            [(identity.key, identity.certificate)],
            root_certificates=b"".join(c.public_bytes(Encoding.PEM) for c in pinned.values()),
            require_client_auth=True,
        )
        try:
            port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"{name} cannot listen at {address}: in use by another process, or no address of this machine"
            ) from error
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def mark_read(self, sender: str, nbytes: int) -> None:
        """Record that a frame has left the inbox."""
        with self._lock:
            self._senders[sender].unread -= nbytes

    def close(self) -> None:
        """Tell all watchers and stop listening; deliveries under way get one second."""
        with self._lock:
            self._closing = True
            watchers = list(self._watchers)
        for woken in watchers:
            woken.set()
        self._server.stop(grace=1.0).wait()
        self._threads.shutdown()

    def _watch(self, request: bytes, context: Any) -> Iterator[bytes]:
        peer = self._authenticate(_decoded(request, Introduction, context), context)
        woken = threading.Event()
        with self._lock:
            self._watchers.add(woken)
            self.callers.add(peer)
            if self._closing:
                woken.set()
        try:
            if context.add_callback(woken.set):  # else the caller has gone already
                yield encode(Notice(self.incarnation, closing=False))
                woken.wait()
                yield encode(Notice(self.incarnation, closing=True))
        finally:
            with self._lock:
                self._watchers.discard(woken)

    def _deliver(self, requests: Iterator[bytes], context: Any) -> bytes:
        try:
            first = next(requests, b"")
        except grpc.RpcError:  # the connection broke
            return b""
        return self._take(_decoded(first, Announcement, context), requests, context)

    def _post(self, request: bytes, context: Any) -> bytes:
        parcel = _decoded(request, Parcel, context)
        return self._take(parcel.announcement, [parcel.frame], context)

    def _take(self, announced: Announcement, pieces: Iterable[Frame], context: Any) -> bytes:
        """Take one frame in; one already taken in (a resend after a lost answer) is dropped by its number."""
        peer = self._authenticate(announced.introduction, context)
        sender = self._senders[peer]
        if not sender.turn.acquire(timeout=_TURN_TIMEOUT):
            context.abort(grpc.StatusCode.UNAVAILABLE, "an earlier delivery is still under way")
        try:
            if announced.number <= sender.last:
                return b""
            self._refuse_oversized(announced.size, peer, sender, context)
            frame = _gather(pieces, announced.size, context)
            if frame is not None and context.is_active():  # else the caller has given up or is resending
                sender.last = announced.number
                with self._lock:
                    sender.unread += announced.size
                self._inbox.put(Arrival(peer, frame))
        finally:
            sender.turn.release()
        return b""

    def _authenticate(self, introduction: Introduction, context: Any) -> str:
        """Compare the name claimed with the certificate presented; return the name."""
        pem = context.auth_context()["x509_pem_cert"][0]
        owner = self._owner_by_pem.get(pem)
        if owner is None:  # parsed once, not for every message
            owner = self._owner.get(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER))
            if owner is not None:
                self._owner_by_pem[pem] = owner
        if owner is None:  # TLS admits only pinned certificates; this check does not rely on it
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate presented is not pinned here")
            raise AssertionError("abort raises")
        if introduction.sender != owner:
            claimed = clean(introduction.sender, 60)
            self._offence(
                owner,
                grpc.StatusCode.UNAUTHENTICATED,
                f"expected {owner} to call itself so, got {claimed!r} under the certificate of {owner}",
                context,
            )
        if introduction.version != VERSION:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"expected transport version {VERSION}, got {introduction.version}; "
                "install the same release everywhere",
            )
        sender = self._senders[owner]
        with self._lock:
            if sender.incarnation is None:
                sender.incarnation = introduction.incarnation
            known = sender.incarnation == introduction.incarnation
        if not known:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{self._name} has already talked to another process of {owner}; restart the job",
            )
        return owner

    def _refuse_oversized(self, size: int, peer: str, sender: _Sender, context: Any) -> None:
        with self._lock:
            unread = sender.unread
        if unread + size > self._max:
            waiting = f" while {unread} bytes from it are still unread" if unread else ""
            self._offence(
                peer,
                grpc.StatusCode.OUT_OF_RANGE,
                f"expected at most {self._max} bytes (max_message_bytes of {self._name}), "
                f"got {size} bytes announced by {peer}{waiting}",
                context,
            )

    def _offence(self, peer: str, code: Any, text: str, context: Any) -> NoReturn:
        """Report at both sides what an authenticated peer did wrong."""
        self._inbox.put(PeerProtocolError(peer, text))
        context.abort(code, text)
        raise AssertionError("abort raises")


def _decoded(data: bytes, kind: type[Any], context: Any) -> Any:
    try:
        return decode(data, kind)
    except ValueError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"expected {kind.__name__}: {clean(str(error))}")


def _gather(pieces: Iterable[Frame], size: int, context: Any) -> Frame | None:
    """Join the pieces in one buffer allocated at once; None when the caller has gone.

    The frame ends at a multiple of 8 bytes: the array with which a message ends, its largest, is then aligned, and
    `view` need not copy it.
    """
    whole = np.empty(size + 7, np.uint8)  # not zeroed: pages are allocated only as chunks arrive
    skipped = -(whole.ctypes.data + size) % 8
    buffer = whole.data[skipped : skipped + size]
    filled = 0
    try:
        for chunk in pieces:
            if filled + len(chunk) > size:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"expected {size} bytes, got more")
            buffer[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
    except grpc.RpcError:  # the connection broke
        return None
    if filled < size:
        context.abort(grpc.StatusCode.DATA_LOSS, f"expected {size} bytes, got {filled}")
    return buffer.toreadonly()


class _DaemonThreads(futures.Executor):
    """Runs calls in daemon threads, as many as calls were ever under way at once.

    No call waits for another, and an open one does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # counts the threads that wait for a task

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "futures.Future[Any]":
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
