"""The listening end of a gRPC channel: authenticates callers, takes frames in, is watched."""

import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging import grpc_wire as wire
from treaty.messaging.certificates import Identity
from treaty.messaging.channel import Arrival, Credit, Inbox
from treaty.messaging.grpc_wire import grpc
from treaty.messaging.messages import Frame, clean

# seconds a delivery waits for an earlier, broken one of the same sender to be noticed
_TURN_TIMEOUT = 60.0


class _Sender:
    """The server's state of one pinned peer."""

    def __init__(self) -> None:
        # held during a delivery: one at a time per sender
        self.turn = threading.Lock()
        self.incarnation: bytes | None = None
        # number of the newest delivery that reached the inbox
        self.last = -1
        self.calls = 0  # under way
        # ends its newest watch
        self.watch: threading.Event | None = None
        # whether the inbox has an error about it: one is enough
        self.offended = False


class Server:
    """Takes frames of pinned peers into an inbox; starts listening at once, at `address` with the actual port.

    Arrivals and offences of peers go to the inbox. `credit` says how much each may have unread here; the reader gives
    it back. A caller is pinged after `keepalive_time` seconds of silence. `incarnation` are 16 random bytes, `callers`
    the peers that have dialled us; they get our `terms`. A call for another `job` is refused. A peer has one watch, the
    newest, and `CALLS` calls at a time, so that it leaves room for others. ConfigError if the address cannot be
    listened at.
    """

    def __init__(
        self,
        name: str,
        address: str,
        identity: Identity,
        pinned: Mapping[str, x509.Certificate],
        inbox: Inbox,
        credit: Credit,
        keepalive_time: float,
        terms: Mapping[str, str] | None = None,
        job: str = "",
    ) -> None:
        self.incarnation = secrets.token_bytes(16)
        self.callers: set[str] = set()
        self._name, self._job = name, job
        self._terms = dict(terms or {})
        self._inbox = inbox
        self._credit = credit
        self._owner = {certificate.public_bytes(Encoding.DER): peer for peer, certificate in pinned.items()}
        # as connections present them
        self._owner_by_pem: dict[bytes, str] = {}
        self._senders = {peer: _Sender() for peer in pinned}
        self._lock = threading.Lock()
        self._closing = False
        self._threads = wire.DaemonThreads()
        self._server = grpc.server(
            self._threads,
            handlers=[
                grpc.method_handlers_generic_handler(
                    wire.SERVICE,
                    {
                        "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
                        "Deliver": grpc.stream_unary_rpc_method_handler(self._deliver),
                        "Post": grpc.unary_unary_rpc_method_handler(self._post),
                    },
                )
            ],
            # Without so_reuseport=0 a second process could listen at the same port unnoticed.
            options=[
                *wire.ping_options(keepalive_time),
                ("grpc.so_reuseport", 0),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", wire.WINDOW),
                *wire.limiting_options(len(pinned)),
            ],
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
                f"{name} cannot listen at {address}: in use by another process, or no address of this machine; where "
                f'others reach it at another address, name its own as well: parties.{name}.listen = "0.0.0.0:7000", say'
            ) from error
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def close(self) -> None:
        """Notify all watchers and stop listening; deliveries under way get one second."""
        with self._lock:
            self._closing = True
            watches = [sender.watch for sender in self._senders.values()]
        for watch in watches:
            if watch is not None:
                watch.set()
        self._server.stop(grace=1.0).wait()
        self._threads.shutdown()

    def _watch(self, request: bytes, context: Any) -> Iterator[bytes]:
        with self._call(context) as peer:
            self._check(peer, _decoded(request, wire.Introduction, context), context)
            ended = threading.Event()
            with self._lock:
                # a newer watch replaces the older one, which a broken connection may have left open
                earlier, self._senders[peer].watch = self._senders[peer].watch, ended
                self.callers.add(peer)
                if self._closing:
                    ended.set()
            if earlier is not None:
                earlier.set()
            # else the caller has gone already
            if context.add_callback(ended.set):
                yield wire.encode(wire.Notice(self.incarnation, closing=False, terms=self._terms))
                ended.wait()
                if self._closing:
                    yield wire.encode(wire.Notice(self.incarnation, closing=True))

    def _deliver(self, requests: Iterator[bytes], context: Any) -> bytes:
        with self._call(context) as peer:
            try:
                first = next(requests, b"")
            except grpc.RpcError:  # the connection broke
                return b""
            return self._take(peer, _decoded(first, wire.Announcement, context), requests, context)

    def _post(self, request: bytes, context: Any) -> bytes:
        with self._call(context) as peer:
            parcel = _decoded(request, wire.Parcel, context)
            return self._take(peer, parcel.announcement, [parcel.frame], context)

    @contextmanager
    def _call(self, context: Any) -> Iterator[str]:
        """Count a call of the peer whose certificate its connection has, before anything of the call is read."""
        peer = self._owner_of(context)
        sender = self._senders[peer]
        with self._lock:
            sender.calls += 1
            many = sender.calls > wire.CALLS
        try:
            if many:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{peer} has {wire.CALLS} calls under way already")
            yield peer
        finally:
            with self._lock:
                sender.calls -= 1

    def _take(self, peer: str, announced: wire.Announcement, pieces: Iterable[Frame], context: Any) -> bytes:
        """Take one frame in; one already taken in (a resend after a lost answer) is dropped by its number."""
        self._check(peer, announced.introduction, context)
        sender = self._senders[peer]
        if not sender.turn.acquire(timeout=_TURN_TIMEOUT):
            context.abort(grpc.StatusCode.UNAVAILABLE, "an earlier delivery is still under way")
        try:
            # the frame came through, its answer did not: the sender repeats it
            if announced.number <= sender.last:
                return b""
            # a frame that could never fit is an offence, not a wait
            refused = self._credit.refusal(peer, announced.size)
            if refused is not None:
                self._offence(peer, grpc.StatusCode.OUT_OF_RANGE, refused, context)
            if not self._credit.take(peer, announced.size, context.is_active):
                return b""
            frame = None
            try:
                frame = _gather(pieces, announced.size, context)
                # the caller has given up or is resending
                if frame is not None and not context.is_active():
                    frame = None
            finally:
                if frame is None:
                    self._credit.give_back(peer, announced.size)
            if frame is not None:
                sender.last = announced.number
                self._inbox.put(Arrival(peer, frame))
        finally:
            sender.turn.release()
        return b""

    def _owner_of(self, context: Any) -> str:
        pem = context.auth_context()["x509_pem_cert"][0]
        owner = self._owner_by_pem.get(pem)
        if owner is None:  # parsed once, not for every message
            owner = self._owner.get(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER))
            if owner is not None:
                self._owner_by_pem[pem] = owner
        # TLS admits only pinned certificates; this check does not rely on it
        if owner is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate presented is not pinned here")
            raise AssertionError("abort raises")
        return owner

    def _check(self, owner: str, introduction: wire.Introduction, context: Any) -> None:
        """Check a caller's introduction against its certificate, our version and its earlier introduction."""
        if introduction.sender != owner:
            claimed = clean(introduction.sender, 60)
            self._offence(
                owner,
                grpc.StatusCode.UNAUTHENTICATED,
                f"expected {owner} to call itself so, got {claimed!r} under the certificate of {owner}",
                context,
            )
        if introduction.version != wire.VERSION:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"expected transport version {wire.VERSION}, got {introduction.version}; "
                "install the same release everywhere",
            )
        if introduction.job != self._job:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "expected a connection for this job, got one for another: its first line was changed on the way",
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

    def _offence(self, peer: str, code: Any, text: str, context: Any) -> NoReturn:
        """Report at both sides what an authenticated peer did wrong."""
        sender = self._senders[peer]
        with self._lock:
            first, sender.offended = not sender.offended, True
        if first:
            self._inbox.put(PeerProtocolError(peer, text))
        context.abort(code, text)
        raise AssertionError("abort raises")


def _decoded(data: bytes, kind: type[Any], context: Any) -> Any:
    try:
        return wire.decode(data, kind)
    except ValueError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"expected {kind.__name__}: {clean(str(error))}")


def _gather(pieces: Iterable[Frame], size: int, context: Any) -> Frame | None:
    """Join the pieces in one buffer allocated at once; None when the caller has gone.

    The frame ends at a multiple of 8 bytes: the array with which a message ends, its largest, is then aligned, and
    `view` need not copy it.
    """
    # not zeroed: pages are allocated only as chunks arrive
    whole = np.empty(size + 7, np.uint8)
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
