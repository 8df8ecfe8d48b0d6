"""The listening end of a channel: authenticates callers, takes frames in, is watched."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from treaty.errors import PeerError, PeerProtocolError
from treaty.messaging import units
from treaty.messaging.certificates import Identity
from treaty.messaging.channel import Arrival, Credit
from treaty.messaging.messages import clean
from treaty.messaging.tls import Line, Listener, tls_context

# seconds for which a connection waits until an earlier, broken one of the same sender is noticed
_TURN_TIMEOUT = 10.0
# seconds after which a peer whose frame comes in slowly gets a sign of life
_SIGN_OF_LIFE = 1.0
# seconds that a receipt or a pong, which are small, may take to leave
_ANSWER_TIMEOUT = 5.0


class _Sender:
    """The server's state of one pinned peer."""

    def __init__(self) -> None:
        # held by the connection that takes frames
        self.turn = threading.Lock()
        self.incarnation: bytes | None = None
        # frames that have arrived
        self.received = 0
        # the newest connection of each purpose
        self.lines: dict[str, Line] = {}
        # whether an error about it was reported: one is enough
        self.offended = False


class Server:
    """Takes frames of pinned peers; starts listening at once, at `address` with the actual port.

    `arrived` is called with arrivals and offences of peers. `credit` says how much each may have unread here; the
    reader gives it back. `on_receipt` is called with a peer and the number of frames that it has got. `incarnation` are
    16 random bytes, `callers` the peers that have dialled us; they get our `terms`. A call for another `job` is
    refused. A peer has one connection for frames and one watch, the newest. ConfigError if the address cannot be
    listened at.
    """

    def __init__(
        self,
        name: str,
        address: str,
        identity: Identity,
        pinned: Mapping[str, x509.Certificate],
        arrived: Callable[[Arrival | PeerError], None],
        credit: Credit,
        on_receipt: Callable[[str, int], None],
        terms: Mapping[str, str] | None = None,
        job: str = "",
    ) -> None:
        self.incarnation = secrets.token_bytes(16)
        self.callers: set[str] = set()
        self._name, self._job = name, job
        welcome = units.encode(units.Welcome(self.incarnation, dict(terms or {})))
        self._welcome, self._arrived, self._credit, self._on_receipt = welcome, arrived, credit, on_receipt
        self._owner = {certificate.public_bytes(Encoding.DER): peer for peer, certificate in pinned.items()}
        self._senders = {peer: _Sender() for peer in pinned}
        self._lock = threading.Lock()
        self._closing = False
        context = tls_context(identity, [c.public_bytes(Encoding.PEM) for c in pinned.values()], listens=True)
        self._listener = Listener(name, address, lambda: context, self._serve, len(pinned))
        self.address = self._listener.address

    def received(self, peer: str) -> int:
        """Return how many frames of a peer have come."""
        return self._senders[peer].received

    def close(self) -> None:
        """Stop listening, send last receipts, notify all watchers and end all connections."""
        with self._lock:
            self._closing = True
        self._listener.close()
        for sender in self._senders.values():
            for purpose, line in sorted(sender.lines.items()):
                if purpose == "frames":
                    self._receipt(line, sender)
                else:
                    self._answer(line, units.header(units.CLOSING))
            for line in sender.lines.values():
                line.break_off()

    def _serve(self, line: Line, content: memoryview) -> None:
        """Serve a connection whose handshake is done."""
        # TLS admits only pinned certificates; this check does not rely on it
        peer = self._owner.get(line.certificate)
        if peer is None:
            return line.refuse("the certificate presented is not pinned here")
        try:
            introduction = units.decode(content, units.Introduction)
        except ValueError as error:
            return line.refuse(f"expected Introduction: {clean(str(error))}")
        if (refusal := self._refusal(peer, introduction)) is not None:
            return line.refuse(refusal)
        sender = self._senders[peer]
        with self._lock:
            if self._closing:
                return
            # a newer connection replaces the older one, which may be broken and not yet known to be
            earlier, sender.lines[introduction.purpose] = sender.lines.get(introduction.purpose), line
            if introduction.purpose == "watch":
                self.callers.add(peer)
        if earlier is not None:
            earlier.break_off()
        if introduction.purpose == "watch":
            self._welcome_to(line, sender)
            self._answer_pings(line)
        elif sender.turn.acquire(timeout=_TURN_TIMEOUT):
            try:
                self._welcome_to(line, sender)
                self._take_frames(peer, sender, line)
            finally:
                sender.turn.release()

    def _welcome_to(self, line: Line, sender: _Sender) -> None:
        head = units.header(units.WELCOME, len(self._welcome), received=sender.received)
        line.send(head, self._welcome, time.monotonic() + _ANSWER_TIMEOUT)

    def _answer_pings(self, line: Line) -> None:
        while line.header().kind == units.PING:
            line.send(units.header(units.PONG), deadline=time.monotonic() + _ANSWER_TIMEOUT)

    def _take_frames(self, peer: str, sender: _Sender, line: Line) -> None:
        """Take frames until the connection ends; what is amiss raises OSError."""
        while True:
            found = line.header()
            if found.kind == units.ASK:
                if not self._receipt(line, sender):
                    return None
                continue
            if found.kind != units.FRAME or found.number != sender.received:
                text = f"expected frame number {sender.received}, got unit {found.kind} with number {found.number}"
                return line.refuse(self._report(peer, text))
            # a frame that could never fit is an offence, not a wait
            refused = self._credit.refusal(peer, found.size)
            if refused is not None:
                return line.refuse(self._report(peer, refused))
            self._on_receipt(peer, found.received)
            if not self._credit.take(peer, found.size, lambda: self._receipt(line, sender)):
                return None
            try:
                frame = self._content(line, sender, found)
            except BaseException:
                self._credit.give_back(peer, found.size)
                raise
            self._arrived(Arrival(peer, frame))
            sender.received += 1

    def _content(self, line: Line, sender: _Sender, found: units.Header) -> memoryview:
        """Return a frame; its sender gets a sign of life while it comes in."""
        while True:
            try:
                return line.content(found, time.monotonic() + _SIGN_OF_LIFE)
            except TimeoutError:
                if not self._receipt(line, sender):
                    raise

    def _receipt(self, line: Line, sender: _Sender) -> bool:
        """Send a receipt; return whether the connection stands."""
        return self._answer(line, units.header(units.RECEIPT, received=sender.received))

    @staticmethod
    def _answer(line: Line, unit: bytes) -> bool:
        try:
            line.send(unit, deadline=time.monotonic() + _ANSWER_TIMEOUT)
        except OSError:
            return False
        return True

    def _refusal(self, owner: str, introduction: units.Introduction) -> str | None:
        """Check a caller's introduction against its certificate, our version and its earlier introduction."""
        if introduction.sender != owner:
            claimed = clean(introduction.sender, 60)
            text = f"expected {owner} to call itself so, got {claimed!r} under the certificate of {owner}"
            return self._report(owner, text)
        if introduction.version != units.VERSION:
            return (
                f"expected transport version {units.VERSION}, got {introduction.version}; "
                "install the same release everywhere"
            )
        if introduction.job != self._job:
            return "expected a connection for this job, got one for another: its first line was changed on the way"
        sender = self._senders[owner]
        with self._lock:
            if sender.incarnation is None:
                sender.incarnation = introduction.incarnation
            known = sender.incarnation == introduction.incarnation
        if known:
            return None
        return f"{self._name} has already talked to another process of {owner}; restart the job"

    def _report(self, peer: str, text: str) -> str:
        """Report here what an authenticated peer did wrong; return it, to be said there."""
        sender = self._senders[peer]
        with self._lock:
            first, sender.offended = not sender.offended, True
        if first:
            self._arrived(PeerProtocolError(peer, text))
        return text
