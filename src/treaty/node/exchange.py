"""Conversations between nodes: one between each two, kept open while both run.

A conversation is one bidirectional gRPC stream under mutual TLS. The node that knows the other's address opens it, and
retries with growing pauses. It carries proposals, and each node's status of the jobs of both. A status is complete, so
losing one or sending it twice does no harm: after an interruption both nodes send theirs again.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from treaty.errors import TreatyError
from treaty.files import decoder_of
from treaty.messaging.grpc_wire import DaemonThreads, grpc, limiting_options, ping_options
from treaty.messaging.messages import clean
from treaty.node.cards import Card
from treaty.node.identity import Own
from treaty.node.proposals import Back, HeadNote, Heartbeat, Hello, JobStatus, Note, Proposed, Wanted

logger = logging.getLogger(__name__)

# Version of the notes; both nodes must have the same.
VERSION = 2
TALK = "treaty.Node"
# Maximum seconds between two attempts to open a conversation.
LONGEST_PAUSE = 15.0
# Sustained rate of a peer's notes; a faster peer is slowed down. Costly or long notes count as several.
NOTES_A_SECOND = 100
# Sustained rate at which a peer may open conversations; further ones are refused.
CALLS_A_MINUTE = 30
# Maximum simultaneous conversations of a peer, also those without Hello yet; the oldest ends.
MOST_CONVERSATIONS = 4
# Seconds for a peer to send Hello.
HELLO_TIMEOUT = 10.0
# Seconds without any note after which a conversation ends; nodes send `Heartbeat` every five.
SILENCE = 60.0
# Maximum unread notes for a peer; then the conversation ends.
MOST_UNSENT = 1000
# A longer note counts as several.
_NOTE_BYTES = 4 << 10
_STRANGER = "it is not trusted any more, or has another key"
_HEARTBEAT = 5.0  # seconds

_COSTS: dict[type[Note], float] = {Proposed: 20.0, Wanted: 5.0, Back: 5.0}


# What an exchange reports, from several threads: ("connected", peer, conversation, hello), ("note", peer, conversation,
# note), and ("lost", peer, why) at the end of the last conversation with a peer.
Notify = Callable[..., None]


class NodeConversation:
    """One end of a conversation: notes to send, and jobs whose status has changed.

    `peer` is the name to whose card the certificate of the other end belongs, `incarnation` identifies its process
    (empty before Hello), `received` is the time of its last note, and `call` is the gRPC call, which can be cancelled.
    """

    def __init__(self, peer: str, certificate: bytes) -> None:
        self.peer, self.certificate, self.received = peer, certificate, time.monotonic()
        self.incarnation = b""
        self.call: Any = None
        self._changed = threading.Condition()
        self._notes: deque[Note] = deque()
        self._jobs: dict[str, None] = {}
        self._ended = False

    def send(self, note: Note) -> None:
        """Queue a note."""
        with self._changed:
            self._notes.append(note)
            self._changed.notify()
            unread = len(self._notes) > MOST_UNSENT
        if unread:
            logger.warning("%s does not read its notes: conversation closed", self.peer)
            self.break_off()

    def send_status(self, job: str) -> None:
        """Queue the status of a job; it is read when it is sent."""
        with self._changed:
            self._jobs[job] = None
            self._changed.notify()

    def end(self) -> None:
        """End after the queued notes are sent."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def break_off(self) -> None:
        """End at once, even if the peer does not read."""
        with self._changed:
            self._notes.clear()
            self._jobs.clear()
        self.end()
        if self.call is not None:
            self.call.cancel()

    def to_send(self, view: Callable[[str], JobStatus]) -> Iterator[bytes]:
        """Yield encoded notes until the end, each taken from the queue only when it can be sent."""
        while True:
            note: Note | None = None
            job = ""
            with self._changed:
                if not (self._notes or self._jobs or self._ended):
                    self._changed.wait(_HEARTBEAT)
                if self._notes:
                    note = self._notes.popleft()
                elif self._jobs:
                    job = next(iter(self._jobs))
                    del self._jobs[job]
                elif self._ended:
                    return
            # A status is read only now, so that the newest one is sent; outside the lock, as it reads the database.
            yield msgspec.msgpack.encode(note or (view(job) if job else Heartbeat()))


class _TokenBucket:
    """A token bucket: `most` per `seconds`, and at most as much at once."""

    def __init__(self, most: float, seconds: float) -> None:
        self._most, self._rate = most, most / seconds
        self._left, self._at = most, time.monotonic()

    def take(self, cost: float) -> float:
        """Take tokens; return the seconds until they are there, 0 if they are."""
        # Refill for the time since the last call; a negative balance is a debt that the caller waits out.
        now = time.monotonic()
        self._left, self._at = min(self._most, self._left + (now - self._at) * self._rate) - cost, now
        return max(0.0, -self._left / self._rate)

    def has(self, cost: float) -> bool:
        """Take tokens if they are there; return whether they were."""
        if self.take(cost) == 0.0:
            return True
        self._left += cost
        return False


class Exchange:
    """A node's conversations: it answers at the `listen` socket, and dials peers that have a `dial` socket.

    `trusted` returns the present cards of peers; conversations with others end. `status` returns the status of a job
    here, and `head` the newest entry of the audit log, signed; both are sent.
    """

    def __init__(
        self,
        own: Own,
        trusted: Callable[[], Mapping[str, Card]],
        notify: Notify,
        status: Callable[[str], JobStatus],
        head: Callable[[], HeadNote],
        listen: Path,
        dial: Mapping[str, Path],
        version: str,
    ) -> None:
        self._own, self._trusted, self._notify, self._status, self._head = own, trusted, notify, status, head
        self._hello = Hello(VERSION, own.name, version, secrets.token_bytes(16))
        self._lock = threading.Lock()
        # By peer: conversations after Hello, and the rate at which they may be opened.
        self._talks: dict[str, list[NodeConversation]] = {}
        self._arrivals: dict[str, _TokenBucket] = {}
        # All conversations, oldest first.
        self._open: list[NodeConversation] = []
        self._closing = threading.Event()
        self._served: dict[str, Card] = {}
        self._threads = DaemonThreads()
        handler = grpc.stream_stream_rpc_method_handler(self._answer)
        self._server = grpc.server(
            self._threads,
            handlers=[grpc.method_handlers_generic_handler(TALK, {"Talk": handler})],
            options=[*_options(), *limiting_options(max(1, len(self._trusted())))],
        )
        credentials = grpc.dynamic_ssl_server_credentials(
            self._configuration(self._trusted()), self._reconfigured, require_client_authentication=True
        )
        self._server.add_secure_port(f"unix:{listen}", credentials)
        self._callers = [
            threading.Thread(target=self._call, args=(peer, path), name=f"treaty-call-{peer}", daemon=True)
            for peer, path in dial.items()
        ]
        self._callers.append(threading.Thread(target=self._watch, name="treaty-conversations", daemon=True))

    def start(self) -> None:
        """Start to answer and to dial."""
        self._server.start()
        for caller in self._callers:
            caller.start()

    def close(self) -> None:
        self._closing.set()
        for talk in self._all():
            talk.end()
        self._server.stop(grace=1.0).wait()
        self._threads.shutdown()
        for talk in self._all():
            talk.break_off()

    def send_status(self, peer: str, job: str) -> None:
        """Send the status of a job to a peer, if it is connected; otherwise it is sent when it connects."""
        if talk := self._newest(peer):
            talk.send_status(job)

    def send(self, peer: str, note: Note) -> bool:
        """Send a note over the newest conversation with a peer; False if there is none."""
        if talk := self._newest(peer):
            talk.send(note)
        return talk is not None

    def is_up(self, peer: str) -> bool:
        return self._newest(peer) is not None

    def _all(self) -> list[NodeConversation]:
        with self._lock:
            return list(self._open)

    def _watch(self) -> None:
        """End conversations with peers that are silent or not trusted any more."""
        while not self._closing.wait(1.0):
            for talk in self._all():
                patience = SILENCE if talk.incarnation else HELLO_TIMEOUT
                silent = time.monotonic() - talk.received > patience
                if silent or not self._trusts(talk):
                    why = "it is silent" if silent else _STRANGER
                    logger.warning("closed the conversation with %s: %s", talk.peer, why)
                    talk.break_off()

    def _trusts(self, talk: NodeConversation) -> bool:
        card = self._trusted().get(talk.peer)
        return card is not None and _der(card.certificate.encode()) == talk.certificate

    def _newest(self, peer: str) -> NodeConversation | None:
        with self._lock:
            return next(reversed(self._talks.get(peer, [])), None)

    def _configuration(self, trusted: Mapping[str, Card]) -> Any:
        self._served = dict(trusted)
        roots = [card.certificate for card in trusted.values()] or [self._own.card.certificate]
        identity = self._own.identity
        return grpc.ssl_server_certificate_configuration(
            [(identity.key, identity.certificate)], root_certificates="".join(roots).encode()
        )

    def _reconfigured(self) -> Any:
        """Return the new TLS configuration if trusted cards have changed; called before each handshake."""
        try:
            trusted = dict(self._trusted())
        except TreatyError as error:
            logger.warning("cannot read the keys of peers: %s", error)
            return None
        return None if trusted == self._served else self._configuration(trusted)

    def _answer(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Run a conversation that a peer has opened."""
        # TLS has checked the certificate; which peer it belongs to is decided by the trusted cards.
        presented = _der(context.auth_context()["x509_pem_cert"][0])
        owners = (name for name, card in self._trusted().items() if _der(card.certificate.encode()) == presented)
        peer = next(owners, "")
        if not peer:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate presented is not trusted here")
        with self._lock:
            welcome = self._arrivals.setdefault(peer, _TokenBucket(CALLS_A_MINUTE, 60.0)).has(1.0)
        if not welcome:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many conversations were opened")
        talk = NodeConversation(peer, presented)
        talk.call = context
        context.add_callback(talk.end)
        self._opened(talk)
        threading.Thread(target=self._listen, args=(talk, requests), daemon=True).start()
        yield msgspec.msgpack.encode(self._hello)
        yield from talk.to_send(self._status)

    def _call(self, peer: str, path: Path) -> None:
        """Open a conversation with a peer again and again, until `close`."""
        pause = 0.5
        while not self._closing.wait(pause * random.uniform(0.7, 1.3)):  # noqa: S311 - no secret
            began = time.monotonic()
            try:
                card = self._trusted().get(peer)
                why = "" if card is None else self._converse(peer, path, card)
            except Exception as error:
                # Else this thread would end, and the peer would not be dialled again.
                logger.exception("cannot open a conversation with %s", peer)
                why = f"unexpected error ({type(error).__name__})"
            if why and not self.is_up(peer):
                self._notify("lost", peer, why)
            pause = 0.5 if time.monotonic() - began > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)

    def _converse(self, peer: str, path: Path, card: Card) -> str:
        """Run one conversation with a peer; return why it ended."""
        identity = self._own.identity
        credentials = grpc.ssl_channel_credentials(card.certificate.encode(), identity.key, identity.certificate)
        target = ("grpc.ssl_target_name_override", peer)
        with grpc.secure_channel(f"unix:{path}", credentials, [*_options(), target]) as channel:
            talk = NodeConversation(peer, _der(card.certificate.encode()))
            talk.send(self._hello)
            talk.call = channel.stream_stream(f"/{TALK}/Talk")(talk.to_send(self._status))
            self._opened(talk)
            try:
                return self._listen(talk, talk.call)
            finally:
                talk.call.cancel()

    def _opened(self, talk: NodeConversation) -> None:
        with self._lock:
            self._open.append(talk)
            of_peer = [other for other in self._open if other.peer == talk.peer]
        # The oldest go: a peer that restarts opens new ones before its old ones are known to be dead.
        for old in of_peer[:-MOST_CONVERSATIONS]:
            old.break_off()

    def _listen(self, talk: NodeConversation, notes: Iterator[bytes]) -> str:
        """Handle all notes of one conversation; return why it ended."""
        why, peer = "", talk.peer
        try:
            why = self._handle_all(talk, notes)
        except grpc.RpcError as error:
            error.__traceback__ = None
            why = clean(error.details() or "", 300) if isinstance(error, grpc.Call) else "its connection broke"
        except (ValueError, RecursionError, TreatyError) as error:
            why = f"it sent an invalid note: {clean(str(error), 300)}"
            logger.warning("%s: %s", peer, why)
        finally:
            talk.end()
            with self._lock:
                self._open.remove(talk)
                talks = self._talks.get(peer, [])
                was_there = talk in talks
                if was_there:
                    talks.remove(talk)
                last = was_there and not talks
            if not self._trusts(talk):
                why = _STRANGER
            if (last or (why and not was_there and not talks)) and not self._closing.is_set():
                self._notify("lost", peer, why or "it has ended the conversation")
        return why

    def _handle_all(self, talk: NodeConversation, notes: Iterator[bytes]) -> str:
        allowance, decoder = _TokenBucket(NOTES_A_SECOND, 1.0), decoder_of(Note)
        for data in notes:
            note: Note = decoder.decode(data)
            talk.received = time.monotonic()
            # Sleeping here slows a fast peer down by back-pressure, without dropping its notes.
            time.sleep(allowance.take(max(_COSTS.get(type(note), 1.0), len(data) / _NOTE_BYTES)))
            if not self._trusts(talk):
                return _STRANGER
            if talk.incarnation:
                self._notify("note", talk.peer, talk, note)
                continue
            if not isinstance(note, Hello) or note.name != talk.peer:
                raise ValueError(f"expected Hello of {talk.peer}, got {type(note).__name__}")
            if note.version != VERSION:
                return f"its notes have version {note.version}, not {VERSION}: install the same version of Treaty"
            talk.incarnation = note.incarnation
            with self._lock:
                self._talks.setdefault(talk.peer, []).append(talk)
            talk.send(self._head())
            self._notify("connected", talk.peer, talk, note)
        return ""


def _options() -> list[tuple[str, Any]]:
    return [
        *ping_options(10.0, 8.0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        # No compression: the size after decompression is not bounded.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_metadata_size", 8 << 10),
    ]


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
