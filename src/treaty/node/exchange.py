"""Conversations between nodes: one between each two, kept open while both run.

A conversation is one connection under mutual TLS, with a note in each unit. The node that knows the other's address
opens it, and retries with growing pauses. It carries proposals, and each node's status of the jobs of both. A status is
complete, so losing one or sending it twice does no harm: after an interruption both nodes send theirs again.
"""

from __future__ import annotations

import logging
import random
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from treaty.errors import TreatyError
from treaty.files import decoder_of
from treaty.messaging import units
from treaty.messaging.messages import clean
from treaty.messaging.tls import HANDSHAKE_TIMEOUT, Line, Listener, dial, reason_of, tls_context
from treaty.node.cards import Card
from treaty.node.identity import Own
from treaty.node.proposals import Back, HeadNote, Heartbeat, Hello, JobStatus, Note, Proposed, Wanted

logger = logging.getLogger(__name__)

# Version of the notes; both nodes must have the same.
VERSION = 3
# Maximum bytes of a note.
MOST_BYTES = 512 << 10
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
SILENCE = 20.0
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
    (empty before Hello), and `received` is the time of its last note.
    """

    def __init__(self, peer: str, line: Line) -> None:
        self.peer, self.line, self.received = peer, line, time.monotonic()
        self.incarnation = b""
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
        self.line.break_off()

    def write(self, view: Callable[[str], JobStatus]) -> None:
        """Send notes until the end, each taken from the queue only when it can be sent."""
        with suppress(OSError):
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
                        break
                # A status is read only now, so that the newest one is sent; outside the lock, as it reads the database.
                content = msgspec.msgpack.encode(note or (view(job) if job else Heartbeat()))
                self.line.send(units.header(units.FRAME, len(content)), content)
        self.line.break_off()


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
        # the cards that the present TLS context admits
        self._admitted: tuple[dict[str, Card], ssl.SSLContext] | None = None
        self._listen_at = f"unix:{listen}"
        self._listener: Listener | None = None
        self._callers = [
            threading.Thread(target=self._call, args=(peer, path), name=f"treaty-call-{peer}", daemon=True)
            for peer, path in dial.items()
        ]
        self._callers.append(threading.Thread(target=self._watch, name="treaty-conversations", daemon=True))

    def start(self) -> None:
        """Start to answer and to dial."""
        self._listener = Listener(self._own.name, self._listen_at, self._context, self._answer)
        for caller in self._callers:
            caller.start()

    def close(self) -> None:
        self._closing.set()
        for talk in self._all():
            talk.end()
        if self._listener is not None:
            self._listener.close()
        deadline = time.monotonic() + 1.0
        while self._all() and time.monotonic() < deadline:
            time.sleep(0.01)
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
        return card is not None and _der(card.certificate.encode()) == talk.line.certificate

    def _newest(self, peer: str) -> NodeConversation | None:
        with self._lock:
            return next(reversed(self._talks.get(peer, [])), None)

    def _context(self) -> ssl.SSLContext:
        """Return the TLS context for the next handshake, which admits the cards that are trusted now."""
        try:
            trusted = dict(self._trusted())
        except TreatyError as error:
            logger.warning("cannot read the keys of peers: %s", error)
            trusted = {} if self._admitted is None else self._admitted[0]
        if self._admitted is None or trusted != self._admitted[0]:
            pinned = [card.certificate.encode() for card in trusted.values()]
            context = tls_context(self._own.identity, pinned or [self._own.identity.certificate], listens=True)
            self._admitted = trusted, context
        return self._admitted[1]

    def _answer(self, line: Line, hello: memoryview) -> None:
        """Run a conversation that a peer has opened."""
        # TLS has checked the certificate; which peer it belongs to is decided by the trusted cards.
        certificates = {name: _der(card.certificate.encode()) for name, card in self._trusted().items()}
        peer = next((name for name, certificate in certificates.items() if certificate == line.certificate), "")
        if not peer:
            line.refuse("the certificate presented is not trusted here")
            return
        with self._lock:
            welcome = self._arrivals.setdefault(peer, _TokenBucket(CALLS_A_MINUTE, 60.0)).has(1.0)
        if not welcome:
            line.refuse("too many conversations were opened")
            return
        talk = NodeConversation(peer, line)
        talk.send(self._hello)
        self._run(talk, hello)

    def _run(self, talk: NodeConversation, first: memoryview | None = None) -> str:
        """Run a conversation until it ends; return why it did."""
        self._opened(talk)
        writing = threading.Thread(target=talk.write, args=(self._status,), name="treaty-notes", daemon=True)
        writing.start()
        try:
            return self._listen(talk, _notes(talk.line, first))
        finally:
            writing.join(1.0)
            talk.line.break_off()

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
        certificate, deadline = card.certificate.encode(), time.monotonic() + HANDSHAKE_TIMEOUT
        try:
            context = tls_context(self._own.identity, [certificate], listens=False)
            with closing(dial(f"unix:{path}", context, _der(certificate), deadline)) as line:
                hello = msgspec.msgpack.encode(self._hello)
                line.send(units.header(units.HELLO, len(hello)), hello, deadline)
                return self._run(NodeConversation(peer, line))
        except OSError as error:
            return reason_of(error)

    def _opened(self, talk: NodeConversation) -> None:
        with self._lock:
            self._open.append(talk)
            of_peer = [other for other in self._open if other.peer == talk.peer]
        # The oldest go: a peer that restarts opens new ones before its old ones are known to be dead.
        for old in of_peer[:-MOST_CONVERSATIONS]:
            old.break_off()

    def _listen(self, talk: NodeConversation, notes: Iterator[memoryview]) -> str:
        """Handle all notes of one conversation; return why it ended."""
        why, peer = "", talk.peer
        try:
            why = self._handle_all(talk, notes)
        except OSError as error:
            why = reason_of(error)
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

    def _handle_all(self, talk: NodeConversation, notes: Iterator[memoryview]) -> str:
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


def _notes(line: Line, first: memoryview | None) -> Iterator[memoryview]:
    """Yield the encoded notes that come; `first` has been read before."""
    if first is not None:
        yield first
    while True:
        found = line.header()
        if found.kind != units.FRAME or found.size > MOST_BYTES:
            raise ValueError(f"expected a note of at most {MOST_BYTES} bytes, got unit {found.kind} of {found.size}")
        yield line.content(found)


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
