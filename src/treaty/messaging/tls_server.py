"""The listening end of a channel: authenticates callers, takes frames in, is watched."""

from __future__ import annotations

import os
import queue
import secrets
import select
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

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
# seconds without use after which a loan of a connection ends; bytes of frames that the party's thread reads
_MOMENT, _SMALL = 0.02, 1 << 15
# seconds that a receipt or a pong, which are small, may take to leave
_ANSWER_TIMEOUT = 5.0


class Loan:
    """A connection that its thread lends to the party's: `take` returns a frame that has come, None if there is none.

    What `take` must leave to the connection's thread raises OSError, and ends the loan.
    """

    def __init__(self, line: Line, take: Callable[[], Arrival | None]) -> None:
        self.line, self.take = line, take
        self.ended = threading.Event()


class Arrivals:
    """What has come for a party, in order: put by any thread, got by the party's.

    To hand a small frame to another thread takes a fifth of its round trip. So a thread that has put a frame for which
    the party waits lends its connection: from then on the party's thread reads small frames itself when it waits. A
    loan ends when something else comes or nothing for a second, so that a slow frame gets signs of life, and when the
    party's thread has not read for a moment, as it computes.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Arrival | PeerError | None] = queue.SimpleQueue()
        # guards what follows
        self._lock = threading.Lock()
        # whether the party's thread waits for an item, or reads connections; when it last stopped reading
        self._waits, self._reads, self._used = False, False, 0.0
        self._loans: tuple[Loan, ...] = ()
        # a pipe that wakes the party's thread from reading
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        weakref.finalize(self, _close, self._woken, self._waker)
        # the loans that are polled with it, by the numbers of their sockets
        self._polled: tuple[Loan, ...] = ()
        self._poll, self._of_number = select.poll(), dict[int, Loan]()

    def put(self, item: Arrival | PeerError | None, loan: Loan | None = None) -> None:
        """Add an item. A connection's thread offers a `loan` of it; the call returns when that is over."""
        with self._lock:
            self._items.put(item)
            lent, self._waits = loan if self._waits or self._reads else None, False
            if lent is not None:
                lent.ended.clear()
                self._loans, self._used = (*self._loans, lent), time.monotonic()
            if self._reads:
                # a full one wakes it, too
                with suppress(BlockingIOError):
                    os.write(self._waker, b"0")
        while lent is not None and not lent.ended.wait(_MOMENT):
            with self._lock:
                unused = self._waits or time.monotonic() - self._used > _MOMENT
                if unused and not self._reads and lent in self._loans:
                    self._loans = tuple(loan for loan in self._loans if loan is not lent)
                    return

    def get(self, timeout: float) -> Arrival | PeerError | None:
        """Take the next item; raise `queue.Empty` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        left = timeout
        while True:
            try:
                with self._lock:
                    if left <= 0.0 or not self._items.empty():
                        return self._items.get_nowait()
                    loans = self._loans
                    self._reads, self._waits = bool(loans), not loans
                if not loans:
                    return self._items.get(True, min(left, threading.TIMEOUT_MAX))
                if (found := self._read(loans, deadline)) is not None:
                    return found
            finally:
                # in this order: from then on a loan may be taken back
                self._used = time.monotonic()
                self._reads = self._waits = False
            left = deadline - self._used

    def release(self) -> None:
        """Take what has come on loans that are not in use, and end them: their threads would only look in a moment."""
        with self._lock:
            loans, self._loans = ((), self._loans) if self._reads else (self._loans, ())
        try:
            for loan in loans:
                with suppress(OSError):
                    while True:
                        while (found := loan.take()) is not None:
                            self._items.put(found)
                        loan.line.pull()
        finally:
            for loan in loans:
                loan.ended.set()

    def _read(self, loans: tuple[Loan, ...], deadline: float) -> Arrival | None:
        """Wait for a frame of connections on loan; None if time is up, another item was put or a loan has ended."""
        if self._polled != loans:
            self._polled, self._poll = loans, select.poll()
            self._of_number = {loan.line.fileno(): loan for loan in loans}
            for number in (self._woken, *self._of_number):
                self._poll.register(number, select.POLLIN)
        until = min(deadline, time.monotonic() + _SIGN_OF_LIFE)
        ready: Iterable[Loan | None] = loans
        pulls = False
        while ready:
            for loan in ready:
                if loan is None:
                    os.read(self._woken, 1 << 12)
                    return None
                try:
                    if pulls:
                        loan.line.pull()
                    if (found := loan.take()) is not None:
                        return found
                except OSError:
                    self._end(loan)
                    return None
            left = 1000.0 * max(0.0, until - time.monotonic())
            ready, pulls = [self._of_number.get(number) for number, _ in self._poll.poll(left)], True
        self._end(*loans)
        return None

    def _end(self, *loans: Loan) -> None:
        with self._lock:
            self._loans = tuple(loan for loan in self._loans if loan not in loans)
        for loan in loans:
            loan.ended.set()


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


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

    Frames and offences of peers are put into `arrivals`. `credit` says how much each may have unread here; the
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
        arrivals: Arrivals,
        credit: Credit,
        on_receipt: Callable[[str, int], None],
        terms: Mapping[str, str] | None = None,
        job: str = "",
    ) -> None:
        self.incarnation = secrets.token_bytes(16)
        self.callers: set[str] = set()
        self._name, self._job = name, job
        welcome = units.encode(units.Welcome(self.incarnation, dict(terms or {})))
        self._welcome, self._arrivals, self._credit, self._on_receipt = welcome, arrivals, credit, on_receipt
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
        loan = Loan(line, lambda: self._take_small(peer, sender, line))
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
            sender.received += 1
            # after a long frame another may follow, which would end the loan at once
            self._arrivals.put(Arrival(peer, frame), loan if found.size <= _SMALL else None)

    def _take_small(self, peer: str, sender: _Sender, line: Line) -> Arrival | None:
        """Take a frame for the party's thread, None if it has not come; OSError for what that thread must not take."""
        try:
            found = line.peek(_SMALL)
        except ssl.SSLError:
            # OpenSSL may now wait for more: the connection's thread finds it broken off
            line.break_off()
            raise
        if found is None:
            return None
        plain = found.kind == units.FRAME and found.number == sender.received and found.size <= _SMALL
        if not plain or not self._credit.fits(peer, found.size):
            raise OSError("expected a small frame")
        self._credit.take(peer, found.size, lambda: False)
        self._on_receipt(peer, found.received)
        frame = line.content(line.header())
        sender.received += 1
        return Arrival(peer, frame)

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
            self._arrivals.put(PeerProtocolError(peer, text))
        return text
