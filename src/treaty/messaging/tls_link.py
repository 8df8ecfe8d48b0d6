"""The dialling end of a channel: the connections of one party to one peer, watched until the peer is gone."""

from __future__ import annotations

import math
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from treaty.errors import LocalProtocolError, PeerError, PeerLost, PeerProtocolError, PeerTimeout
from treaty.messaging import units
from treaty.messaging.certificates import Identity, fingerprint
from treaty.messaging.exchanges import differences
from treaty.messaging.tls import HANDSHAKE_TIMEOUT, Line, LineRefused, dial, reason_of, tls_context

RETRY_PAUSE = 0.25
"""Most seconds between attempts to dial; the first ones follow sooner."""
LEAST_PATIENCE = 1.0
"""Least seconds for an attempt to dial a peer again, and most for what is still to be done on closing."""
RECEIPT_TIMEOUT = 60.0
"""Seconds without a sign of life, while a receipt is due, after which a connection for frames is dialled again."""
# frames without a receipt after which one is asked for, as it is for a quarter of the window
_MOST_FRAMES = 256
# seconds until the first attempt to dial again
_FIRST_PAUSE = 0.01


@dataclass(frozen=True, slots=True)
class Pings:
    """When a silent peer counts as lost: pinged every `time` seconds, `timeout` to answer, `reconnect` to return."""

    time: float
    timeout: float
    reconnect: float


class PeerLink:
    """The connections of one party to one peer: one carries frames, the other is watched.

    `pinned` is the only certificate accepted of the peer; `on_lost` is called once, with the error, when the peer
    counts as lost; `arrived` returns how many of the peer's frames have come. `terms` are compared with those of the
    peer. Frames without a receipt are kept, to be sent again: one, or several of `window` bytes together.
    """

    def __init__(
        self,
        introduction: units.Introduction,
        peer: str,
        address: str,
        identity: Identity,
        pinned: x509.Certificate,
        pings: Pings,
        on_lost: Callable[[PeerError], None],
        arrived: Callable[[], int],
        terms: Mapping[str, str],
        window: int,
        proxy: str | None = None,
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
        self._introduction, self._terms = introduction, terms
        self._address, self._proxy, self._pings = address, proxy, pings
        self._on_lost, self._arrived, self._window = on_lost, arrived, window
        pem = pinned.public_bytes(Encoding.PEM)
        self._pinned = pinned.public_bytes(Encoding.DER)
        self._context = tls_context(identity, [pem], listens=False)
        self._fingerprints = (
            f"compare fingerprints: {introduction.sender} has {fingerprint(identity.certificate)}, "
            f"pinned for {peer} is {fingerprint(pem)}"
        )
        self._incarnation: bytes | None = None
        self._ended = threading.Event()  # lost or closed
        self._watched: Line | None = None
        # one frame of one caller at a time; one unit at a time, also of the thread that sends frames again
        self._delivering, self._writing = threading.Lock(), threading.Lock()
        # guards what follows
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._line: Line | None = None
        # frames without a receipt, their bytes, and the number of the first; the number of the next frame, and of the
        # next to be written on the present line
        self._frames: deque[bytes] = deque()
        self._kept = self._first = self._next = self._unwritten = 0
        # how many frames the peer has if it got the one that was taken back, while that is not known
        self._void = -1
        # number of the frame with which a receipt was asked for, and when the peer last showed a sign of life
        self._asked, self._heard = 0, 0.0
        self._threads = [
            threading.Thread(target=self._keep, args=of, name=f"treaty-{of[0]}-{peer}", daemon=True)
            for of in (("watch", self._hold), ("frames", self._carry))
        ]

    def start(self) -> None:
        """Begin to dial and watch."""
        for thread in self._threads:
            thread.start()

    def deliver(self, frame: bytes, timeout: float, *, receipt: bool = False) -> None:
        """Send a frame, and with `receipt` wait until the peer has it. Errors as of `Channel.send`."""
        deadline = time.monotonic() + timeout
        if not self._delivering.acquire(timeout=timeout):
            raise self._not_taken(timeout)
        try:
            with self._lock:
                if not self._wait(lambda: not self._frames or self._kept + len(frame) <= self._window, deadline):
                    raise self._not_taken(timeout)
                self._frames.append(frame)
                self._next, self._kept = self._next + 1, self._kept + len(frame)
            written = False
            try:
                written = self._write(deadline)
            finally:
                written = written or not self._withdrawn()
            if not written or (receipt and not self._flush(deadline)):
                raise self._not_taken(timeout)
        finally:
            self._delivering.release()

    def receipted(self, received: int) -> None:
        """Take note that the peer has got so many frames in all: they need not be kept any more."""
        if received > self._first:
            with self._lock:
                self._forget(received)

    def close(self) -> None:
        """Wait a second for the last receipts, and close both connections."""
        if self._first < self._next and self._delivering.acquire(timeout=LEAST_PATIENCE):
            with suppress(PeerError, LocalProtocolError):
                self._flush(time.monotonic() + LEAST_PATIENCE)
            self._delivering.release()
        self._end()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(LEAST_PATIENCE)

    # ---------- frames

    def _write(self, deadline: float, only: Line | None = None) -> bool:
        """Write all frames that are not yet written, on `only` this connection; return whether there was time."""
        while True:
            with self._lock:
                # a peer may have left since it got the last frame: that is no error
                if self._unwritten >= self._next and self.lost is not None:
                    return True
                if not self._wait(lambda: self._unwritten >= self._next or self._line is not None, deadline):
                    return False
                if self._unwritten >= self._next or only not in (None, self._line):
                    return True
            if not self._writing.acquire(timeout=_until(deadline)):
                return False
            try:
                self._write_next(deadline)
            except TimeoutError:
                return False
            finally:
                self._writing.release()

    def _write_next(self, deadline: float) -> None:
        """Write one frame, if the connection stands; TimeoutError if it takes too long."""
        with self._lock:
            line, number = self._line, self._unwritten
            if line is None or number >= self._next:
                return
            frame = self._frames[number - self._first]
            # a receipt is asked for in time, so that the window is never full of what has long come
            asks = self._kept > self._window // 4 or number - max(self._asked, self._first) >= _MOST_FRAMES
            asks = asks or time.monotonic() - self._heard > RECEIPT_TIMEOUT / 4
            if asks:
                self._asked = number
        try:
            line.send(units.header(units.FRAME, len(frame), number, self._arrived()), frame, deadline)
            if asks:
                line.send(units.header(units.ASK), deadline=deadline)
        except OSError as error:
            # a unit half sent leaves the connection of no use
            self._broken(line)
            if isinstance(error, TimeoutError):
                raise
        with self._lock:
            if self._line is line:
                self._unwritten = max(self._unwritten, number + 1)

    def _withdrawn(self) -> bool:
        """Take back the last frame, unless it is written whole: what the peer has of it is void with its connection."""
        with self._lock:
            if self._unwritten >= self._next:
                return False
            self._void = self._next
            self._next -= 1
            self._kept -= len(self._frames.pop())
            line = self._line
        self._broken(line)
        return True

    def _forget(self, received: int) -> None:
        """Keep no longer what the peer has got: so many frames, less the one that was taken back."""
        while self._frames and self._first < received and self._first + 1 != self._void:
            self._kept -= len(self._frames.popleft())
            self._first += 1
        # a peer may lie, or be faster than the thread that writes
        self._unwritten = max(self._unwritten, self._first)
        self._changed.notify_all()

    def _flush(self, deadline: float) -> bool:
        """Wait until the peer has all frames; return whether there was time."""
        self._ask(deadline)
        try:
            with self._lock:
                return self._wait(lambda: not self._frames, deadline)
        except PeerLost:
            # a peer that leaves has sent its receipts, which may be on their way
            with self._lock:
                if self._changed.wait_for(lambda: not self._frames, LEAST_PATIENCE):
                    return True
            raise

    def _ask(self, deadline: float) -> None:
        """Ask for a receipt; who sends frames again just now asks when that is done."""
        line = self._line
        if line is not None and self._writing.acquire(blocking=False):
            try:
                line.send(units.header(units.ASK), deadline=deadline)
            except OSError:
                self._broken(line)
            finally:
                self._writing.release()

    def _resend(self, line: Line) -> None:
        """Send again, on a new connection, what was lost with another."""
        with suppress(PeerError, LocalProtocolError):
            self._write(math.inf, line)
            self._ask(math.inf)

    def _carry(self, line: Line, received: int) -> None:
        """Send frames on a new connection, on which the peer has said how many it has, and read receipts."""
        with self._lock:
            first, most = self._first, max(self._next, self._void)
            if first <= received <= most:
                # a frame that was taken back has come all the same: those after it take the numbers after its own
                came = received == self._void
                self._forget(received)
                self._first, self._next, self._void = self._first + came, self._next + came, -1
                self._line, self._unwritten, self._asked, self._heard = line, received, received, time.monotonic()
        if self._line is not line:
            text = f"expected a receipt of {first} to {most} frames, got {received} - from {self.peer}"
            self._lose(PeerProtocolError(self.peer, text))
            return
        try:
            if self._next > received:
                threading.Thread(target=self._resend, args=(line,), name="treaty-resend", daemon=True).start()
            while not self._ended.is_set():
                self.receipted(line.header().received)
                self._heard = time.monotonic()
        except LineRefused as refused:
            self._lose(PeerProtocolError(self.peer, f"{self.peer} refused a message: {refused}"))
        finally:
            self._broken(line)

    def _broken(self, line: Line | None) -> None:
        if line is not None:
            line.break_off()
            with self._lock:
                if self._line is line:
                    self._line, self._unwritten = None, self._first
                    self._changed.notify_all()

    def _check_frames(self) -> None:
        """Ask for a receipt that is due, and dial again if none has come for long: what was sent may be lost."""
        line, now = self._line, time.monotonic()
        if line is None or not self._frames:
            self._heard = now
        elif now - self._heard > RECEIPT_TIMEOUT:
            self._broken(line)
        # a peer whose inbox is full, and its socket maybe, says so every second
        elif now - self._heard > 2 * LEAST_PATIENCE:
            self._ask(now + LEAST_PATIENCE)

    # ---------- the watch

    def _hold(self, line: Line, _: int) -> None:
        """Ping the peer until its connection breaks, or it leaves."""
        self._watched, self.connected, self.refused_since = line, True, None
        self.up.set()
        try:
            while not self._ended.is_set():
                try:
                    found = line.header(time.monotonic() + self._pings.time)
                except TimeoutError:
                    deadline = time.monotonic() + self._pings.timeout
                    line.send(units.header(units.PING), deadline=deadline)
                    found = line.header(deadline)
                if found.kind == units.CLOSING:
                    lost = PeerLost(self.peer, f"{self.peer} is lost: it has closed its channel")
                    self._lose(lost, breaks=False)
                self._check_frames()
        except OSError as error:
            self._explain(error, encrypted=True)
            silent = time.monotonic() - self._heard
            if isinstance(error, TimeoutError) and silent > self._pings.timeout:
                # nothing comes through: the other connection is no better
                self._broken(self._line)
        finally:
            self.up.clear()

    # ---------- both

    def _keep(self, purpose: units.Purpose, hold: Callable[[Line, int], None]) -> None:
        """Keep a connection open; when the peer answers none for `reconnect` seconds, it is lost."""
        last, pause = time.monotonic(), _FIRST_PAUSE
        while not self._ended.is_set():
            last = last if self.connected else time.monotonic()
            left = last + self._pings.reconnect - time.monotonic()
            # a stopped process still accepts connections, so dialling may take forever
            dialled = self._dial(purpose, max(LEAST_PATIENCE, left) if self.connected else HANDSHAKE_TIMEOUT)
            if dialled is not None:
                began = time.monotonic()
                with closing(dialled[0]), suppress(OSError, PeerError, LocalProtocolError):
                    hold(*dialled)
                last = time.monotonic()
                pause = _FIRST_PAUSE if last - began > RETRY_PAUSE else pause
            elif self.connected and left <= 0.0:
                if purpose == "watch":
                    self._lose(_lost(self.peer, "its connection broke", self.trouble))
                # the watch finds out if the peer is gone; this is one that it reaches
                elif self.up.is_set():
                    self._lose(_lost(self.peer, "it takes no connection for frames", self.trouble))
            self._ended.wait(pause)
            pause = min(2 * pause, RETRY_PAUSE)

    def _dial(self, purpose: units.Purpose, patience: float) -> tuple[Line, int] | None:
        """Dial the peer once; return the connection, and how many frames have come there; None if it failed."""
        deadline = time.monotonic() + min(patience, HANDSHAKE_TIMEOUT)
        line = None
        try:
            line = dial(self._address, self._context, self._pinned, deadline, self._proxy)
            own = self._introduction
            content = units.encode(units.Introduction(own.version, own.sender, own.incarnation, own.job, purpose))
            line.send(units.header(units.HELLO, len(content)), content, deadline)
            found = line.header(deadline)
            if found.kind != units.WELCOME:
                raise ValueError(f"got a unit of kind {found.kind}")
            welcome = units.decode(line.content(found, deadline), units.Welcome)
        except OSError as error:
            self._explain(error, encrypted=line is not None)
        except ValueError:
            self._lose(PeerProtocolError(self.peer, f"expected a Welcome, got other bytes - from {self.peer}"))
        else:
            if self._incarnation in (None, welcome.incarnation):
                self._incarnation = welcome.incarnation
                self.differences = differences(own.sender, self._terms, self.peer, welcome.terms)
                return line, found.received
            self._lose(PeerLost(self.peer, f"{self.peer} is lost: it was restarted, another process answers now"))
        if line is not None:
            line.close()
        return None

    def _explain(self, error: OSError, *, encrypted: bool) -> None:
        """Describe a failed attempt to dial, and note whether waiting may help: it may once the peer has answered."""
        where = f"{self.peer} at {self._address}"
        if isinstance(error, ssl.SSLCertVerificationError):
            self.trouble = (
                f"TLS handshake with {where} failed: it did not present the certificate pinned for "
                f"{self.peer}; {self._fingerprints}"
            )
        elif isinstance(error, LineRefused):
            self.trouble = f"{where} refuses us: {error}"
        elif not encrypted and isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            self.trouble = f"TLS handshake with {where} failed: it does not speak TLS; check the address"
        elif encrypted and not self.connected and not isinstance(error, TimeoutError):
            # With TLS 1.3 the dialling side does not learn why the other one, having shown its certificate, hung up.
            self.trouble = (
                f"TLS handshake failed: {where} hung up on us, most likely because it pins another certificate "
                f"for {self._introduction.sender}; {self._fingerprints}"
            )
        else:
            # also a forwarder that accepts connections before the peer behind it does
            self.trouble, self.refused_since = f"{where} was not reachable: {reason_of(error)}", None
            return
        self.refused_since = None if self.connected else self.refused_since or time.monotonic()

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for a condition under the lock; return whether it came true in time, and raise if the link has ended."""
        came = condition()
        if not came:
            came = self._changed.wait_for(lambda: condition() or self._ended.is_set(), _until(deadline))
        self._raise_if_ended()
        return came

    def _lose(self, error: PeerError, *, breaks: bool = True) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self.lost = error
            self._ended.set()
        self._on_lost(error)
        self._end(breaks=breaks)

    def _end(self, *, breaks: bool = True) -> None:
        """Wake all that wait; without `breaks`, connections end when the peer ends them."""
        self._ended.set()
        with self._lock:
            lines = [self._line, self._watched] if breaks else []
            self._changed.notify_all()
        for line in filter(None, lines):
            line.break_off()

    def _raise_if_ended(self) -> None:
        if self.lost is not None:
            raise type(self.lost)(self.peer, str(self.lost), public=self.lost.public)
        if self._ended.is_set():
            raise LocalProtocolError(f"expected an open channel, got one that {self._introduction.sender} has closed")

    def _not_taken(self, timeout: float) -> PeerTimeout:
        """Return the error for a frame that did not leave in time; its public text has no addresses."""
        text = f"{self.peer} took no message for {timeout:g} s"
        if self.up.is_set():
            return PeerTimeout(self.peer, f"{text}, though its connection is alive")
        text = f"{text}: its connection broke and has not come back"
        return PeerTimeout(self.peer, f"{text} ({self.trouble})", public=text)


def _until(deadline: float) -> float:
    return max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))


def _lost(peer: str, event: str, trouble: str) -> PeerLost:
    """Return the error for a lost peer; its public text has no addresses, which `trouble` may hold."""
    return PeerLost(peer, f"{peer} is lost: {event} ({trouble})", public=f"{peer} is lost: {event}")
