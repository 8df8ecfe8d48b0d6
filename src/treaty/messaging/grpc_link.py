"""The dialling end of a gRPC channel: one connection to one peer, watched until the peer is gone."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from treaty.errors import LocalProtocolError, PeerError, PeerLost, PeerProtocolError, PeerTimeout
from treaty.messaging import grpc_wire as wire
from treaty.messaging.certificates import Identity, fingerprint
from treaty.messaging.exchanges import differences
from treaty.messaging.grpc_wire import grpc
from treaty.messaging.messages import clean

RETRY_PAUSE = 0.25
"""Seconds between attempts to dial."""

LEAST_PATIENCE = 1.0
"""Least seconds for an attempt to watch a peer again."""

RESEND_LIMIT = 10
"""Least attempts to deliver one frame before a peer that can be watched, or was never reached, counts as lost."""

# seconds that each thread of a link may take to end
_CLOSE_TIMEOUT = 5.0

_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)

_HUNG_UP = ("socket closed", "connection reset", "broken pipe", "handshake failed")

_DIAL = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # do not share connections
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # how long one attempt to connect may take
    ("grpc.min_reconnect_backoff_ms", 5000),
    # never: when a connection is wanted again there may be no room for it
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
]


@dataclass(frozen=True, slots=True)
class Pings:
    """When a silent peer counts as lost: pinged every `time` seconds, `timeout` to answer, `reconnect` to return."""

    time: float
    timeout: float
    reconnect: float


class PeerLink:
    """The connection of one party to one peer.

    `pinned` is the only certificate accepted of the peer; `on_lost` is called once, with the error, when the peer
    counts as lost. `terms` are compared with those of the peer.
    """

    def __init__(
        self,
        introduction: wire.Introduction,
        peer: str,
        address: str,
        identity: Identity,
        pinned: x509.Certificate,
        pings: Pings,
        on_lost: Callable[[PeerError], None],
        terms: Mapping[str, str] | None = None,
    ) -> None:
        self.peer = peer
        # whether the peer has answered at least once
        self.connected = False
        # whether the peer is being watched just now
        self.up = threading.Event()
        # why the peer is gone, and why the last attempt to dial failed
        self.lost: PeerError | None = None
        self.trouble = f"{peer} has not answered yet"
        # monotonic time since which attempts fail for a reason that waiting does not mend
        self.refused_since: float | None = None
        # between the peer's terms and ours
        self.differences: list[str] = []
        self._terms = dict(terms or {})
        self._introduction = introduction
        self._address = address
        self._pings = pings
        self._on_lost = on_lost
        self._fingerprints = (
            f"compare fingerprints: {introduction.sender} has {fingerprint(identity.certificate)}, "
            f"pinned for {peer} is {fingerprint(pinned.public_bytes(Encoding.PEM))}"
        )
        self._incarnation: bytes | None = None
        self._number = 0
        self._sending = threading.Lock()
        self._ended = threading.Event()  # lost or closed
        credentials = grpc.ssl_channel_credentials(
            root_certificates=pinned.public_bytes(Encoding.PEM),
            private_key=identity.key,
            certificate_chain=identity.certificate,
        )
        # Two connections: on one, pings would queue behind frames and a slow link would look dead.
        self._channels = [
            grpc.secure_channel(address, credentials, [*_DIAL, ("grpc.ssl_target_name_override", peer), *ping])
            for ping in (wire.ping_options(pings.time, pings.timeout), wire.ping_options(pings.time))
        ]
        self._watch_call = self._channels[0].unary_stream(wire.WATCH)
        self._deliver_call = self._channels[1].stream_unary(wire.DELIVER)
        self._post_call = self._channels[1].unary_unary(wire.POST)
        self._watcher = threading.Thread(target=self._watch, name=f"treaty-watch-{peer}", daemon=True)

    def start(self) -> None:
        """Begin to dial and watch; the connection for frames is made now, too, not with the first of them."""
        self._watcher.start()
        self._channels[1].subscribe(self._ready, try_to_connect=True)

    def deliver(self, frame: bytes, timeout: float) -> None:
        """Deliver a frame; frames go one at a time. Errors as of `Channel.send`."""
        deadline = time.monotonic() + timeout
        trouble, attempts, failing_since = "", 0, time.monotonic()
        if not self._sending.acquire(timeout=timeout):
            raise self._not_taken(timeout, trouble)
        try:
            # Resending repeats this number, by which the receiver drops what it has already taken in.
            announcement = wire.Announcement(self._introduction, self._number, len(frame))
            self._number += 1
            while not self._hopeless(attempts, failing_since):
                self._raise_if_ended()
                try:
                    failed = self._hand_over(announcement, frame, max(0.0, deadline - time.monotonic()))
                except ValueError:
                    # gRPC raises it for a connection that we have closed
                    self._raise_if_ended()
                    raise
                if failed is None:
                    return
                code, details = failed
                self._raise_if_refused(code, details)
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise self._not_taken(timeout, trouble)
                trouble, attempts = details, attempts + 1
                # a refused attempt fails before its time is looked at
                if time.monotonic() >= deadline:
                    raise self._not_taken(timeout, trouble)
                if attempts == 1:
                    failing_since = time.monotonic()
                self._ended.wait(min(RETRY_PAUSE, max(0.0, deadline - time.monotonic())))
            self._raise_if_ended()
            raise _lost(self.peer, f"{attempts} deliveries failed", trouble)
        finally:
            self._sending.release()

    def close(self) -> None:
        """Close both connections.

        The C library waits for what it was just writing, to a stopped process as long as a ping may take
        (`BULK_PING_TIMEOUT`): we do not.
        """
        self._ended.set()
        closing = [threading.Thread(target=channel.close, daemon=True) for channel in self._channels]
        for thread in closing:
            thread.start()
        for thread in (*closing, self._watcher):
            if thread.is_alive():
                thread.join(_CLOSE_TIMEOUT)

    def _ready(self, state: Any) -> None:
        """Stop watching the connection for frames once it stands; grpc polls it five times a second until then."""
        if state is grpc.ChannelConnectivity.READY:
            self._channels[1].unsubscribe(self._ready)

    def _hopeless(self, attempts: int, failing_since: float) -> bool:
        """Return whether to give a frame up; while a connection is broken, the watch finds out if the peer is gone."""
        if attempts < RESEND_LIMIT or not self.connected:
            return attempts >= RESEND_LIMIT
        return self.up.is_set() and time.monotonic() - failing_since >= self._pings.reconnect

    def _not_taken(self, timeout: float, trouble: str) -> PeerTimeout:
        """Return the error for a frame that did not arrive in time; its public text has no addresses."""
        text = f"{self.peer} took no message for {timeout:g} s"
        if self.up.is_set() and not trouble:
            return PeerTimeout(self.peer, f"{text}, though its connection is alive")
        text = f"{text}: its connection broke and has not come back"
        error = PeerTimeout(self.peer, f"{text} ({trouble or self.trouble})")
        error.public = text
        return error

    def _hand_over(self, announcement: wire.Announcement, frame: bytes, timeout: float) -> tuple[Any, str] | None:
        """Make one attempt to deliver; return why it failed. Closing the connection ends the attempt."""
        try:
            if len(frame) <= wire.CHUNK:
                # This thread waits for the answer itself; for a `future`, grpc starts one that does.
                self._post_call(wire.encode(wire.Parcel(announcement, memoryview(frame))), timeout=timeout)
            else:
                # If an interrupt ends the waiting, a `future` still ends; without it, the feeding thread would stay.
                self._deliver_call.future(wire.chunks(announcement, frame), timeout=timeout).result()
        except grpc.RpcError as error:
            return _outcome(error)
        return None

    def _watch(self) -> None:
        """Keep a watch open; when it ends and no new one opens within `reconnect` seconds, the peer is lost."""
        last_answer = time.monotonic()
        while not self._ended.is_set():
            try:
                answered = self._watch_once(last_answer + self._pings.reconnect)
            except ValueError:  # closed meanwhile
                return
            finally:
                self.up.clear()
            if answered:
                last_answer = time.monotonic()
            elif self.connected and time.monotonic() - last_answer >= self._pings.reconnect:
                self._lose(_lost(self.peer, "its connection broke", self.trouble))
            self._ended.wait(RETRY_PAUSE)

    def _watch_once(self, until: float) -> bool:
        """Hold one watch until it ends; return whether the peer answered, for which it has time `until`."""
        answered = False
        call = self._watch_call(wire.encode(self._introduction))
        patience = threading.Timer(max(LEAST_PATIENCE, until - time.monotonic()), call.cancel)
        # a stopped process still accepts connections, so dialling may take forever
        if self.connected:
            patience.start()
        try:
            for data in call:
                patience.cancel()
                answered = True
                self._take_notice(data)
                if self._ended.is_set():
                    break
        except grpc.RpcError as error:
            self._explain(*_outcome(error))
        finally:
            patience.cancel()
            call.cancel()
        return answered

    def _take_notice(self, data: bytes) -> None:
        """Handle a notice: the peer is there, or it is leaving."""
        try:
            notice = wire.decode(data, wire.Notice)
        except ValueError:
            self._lose(PeerProtocolError(self.peer, f"expected a Notice, got other bytes - from {self.peer}"))
            return
        gone = None
        if notice.closing:
            gone = "it has closed its channel"
        elif self._incarnation not in (None, notice.incarnation):
            gone = "it was restarted, another process answers now"
        # it still acknowledges what it has taken in
        if gone is not None:
            self._lose(PeerLost(self.peer, f"{self.peer} is lost: {gone}"), cancel=False)
            return
        self._incarnation = notice.incarnation
        self.differences = differences(self._introduction.sender, self._terms, self.peer, notice.terms)
        self.refused_since = None
        self.connected = True
        self.up.set()

    def _lose(self, error: PeerError, *, cancel: bool = True) -> None:
        if not self._ended.is_set():
            self.lost = error
            self._ended.set()
            # first: closing may wait, see `close`
            self._on_lost(error)
            if cancel:
                self._channels[1].close()

    def _explain(self, code: Any, details: str) -> None:
        """Describe a failed attempt to dial, and note whether waiting may help: it may once the peer has answered."""
        if code is grpc.StatusCode.CANCELLED:
            return  # by ourselves; the trouble is already noted
        lower = details.lower()
        where = f"{self.peer} at {self._address}"
        refused = True
        if "wrong_version_number" in lower:
            self.trouble = f"TLS handshake with {where} failed: it does not speak TLS; check the address"
        elif "verif" in lower or "hostname" in lower:
            self.trouble = (
                f"TLS handshake with {where} failed: it did not present the certificate pinned for "
                f"{self.peer}; {self._fingerprints}"
            )
        elif code in _REFUSALS:
            self.trouble = f"{where} refuses us: {details}"
        elif self.connected or "handshake read failed" in lower or not any(sign in lower for sign in _HUNG_UP):
            # also a forwarder that accepts connections before the peer behind it does
            self.trouble = f"{where} was not reachable: {_plainly(details)}"
            refused = False
        else:
            # With TLS 1.3 the dialling side does not learn why the other one, having shown its certificate, hung up.
            self.trouble = (
                f"TLS handshake failed: {where} hung up on us, most likely because it pins another certificate "
                f"for {self._introduction.sender}; {self._fingerprints}"
            )
        if not refused or self.connected:
            self.refused_since = None
        elif self.refused_since is None:
            self.refused_since = time.monotonic()

    def _raise_if_refused(self, code: Any, details: str) -> None:
        if code is grpc.StatusCode.OUT_OF_RANGE:
            raise LocalProtocolError(f"{self.peer} refused a message: {details}")
        if code in _REFUSALS:
            raise PeerProtocolError(self.peer, f"{self.peer} refused a message: {details}")

    def _raise_if_ended(self) -> None:
        if self.lost is not None:
            again = PeerLost(self.peer, str(self.lost))
            again.public = self.lost.public
            raise again
        if self._ended.is_set():
            raise LocalProtocolError(f"expected an open channel, got one that {self._introduction.sender} has closed")


def _outcome(error: Any) -> tuple[Any, str]:
    """Return code and details of a failed call.

    The error is the call itself, which its traceback's frames refer to. In that cycle it would live until the process
    ends; the thread that serves it may have been stopped with its lock held by then, and its end would wait forever.
    """
    error.__traceback__ = None
    return error.code(), clean(error.details() or "")


def _plainly(details: str) -> str:
    """Return why the peer was not reached, without gRPC's list of what it tried: "Connection refused", say."""
    last = details.removesuffix(".").rpartition("last error: ")[2]
    return last.rpartition("Failed to connect to remote host: ")[2]


def _lost(peer: str, event: str, trouble: str) -> PeerLost:
    """Return the error for a lost peer; its public text has no addresses, which `trouble` may hold."""
    error = PeerLost(peer, f"{peer} is lost: {event} ({trouble})")
    error.public = f"{peer} is lost: {event}"
    return error
