"""The interface of a transport, and the mailbox that both transports share."""

import heapq
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from treaty.errors import LocalProtocolError, PeerError
from treaty.messaging.messages import Frame


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame and the peer that sent it, as the transport has authenticated it."""

    sender: str
    frame: Frame


class Channel(Protocol):
    """One party's end of the transport: authenticated, in order per pair, and it notices a peer's death.

    A channel knows nothing of jobs, goodbyes or message types; those are the business of `Party`.
    """

    @property
    def name(self) -> str:
        """The party this end belongs to."""

    @property
    def waits(self) -> bool:
        """Whether sending takes a round trip to the peer, so that sending to several peers at once pays."""

    @property
    def frame_bytes(self) -> int | None:
        """Most bytes of a frame; longer messages travel in parts. None where a frame may have any length."""

    def refusal(self, sender: str, nbytes: int, frames: int) -> str | None:
        """Return why a peer's message of so many frames can never be taken in whole, None if it can."""

    def send(self, to: str, frame: bytes, timeout: float) -> None:
        """Deliver an encoded envelope to a peer's mailbox; returns when it is there.

        Waits while the peer has not read enough of what it got before. Raises PeerLost when the peer is gone,
        PeerTimeout when it took nothing for `timeout` seconds (the text says whether its connection stood meanwhile),
        PeerProtocolError when it refuses to talk to us, and
        LocalProtocolError when `to` is unknown, the frame is larger than the peer accepts, or this channel is closed.
        """

    def receive(self, timeout: float) -> Arrival | None:
        """Return the next frame of any peer, or None when `timeout` seconds have passed.

        Raises PeerLost once for each peer that is gone, after the frames it delivered before, PeerProtocolError when a
        peer tried something the transport refuses (oversized frame, false name), and LocalProtocolError when this
        channel is closed.
        """

    def is_up(self, peer: str) -> bool:
        """Whether the connection with a peer stands, as far as is known; one that broke may come back."""

    def mark_read(self, sender: str, nbytes: int) -> None:
        """Record that the role has read a frame of a peer, which may send as many bytes more."""

    def close(self) -> None:
        """Leave; every peer's channel notices. Closing twice is fine."""


class Inbox:
    """Arrivals and notices of trouble, in order; filled by any thread, emptied by the party's."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        self._items: list[tuple[float, int, Arrival | PeerError]] = []  # a heap: due time, then order of `put`
        self._count = 0
        self._closed = False
        self._unread: dict[str, int] = {}  # bytes by sender

    def wait_for_room(self, sender: str, nbytes: int, limit: float, timeout: float) -> bool:
        """Wait until a sender's unread bytes are within a limit with so many more, or none are; False if never.

        They count as unread from then on, until `mark_read`. A closed inbox has room.
        """
        with self._changed:
            fits = self._changed.wait_for(
                lambda: self._closed or not (before := self._unread.get(sender, 0)) or before + nbytes <= limit,
                min(timeout, threading.TIMEOUT_MAX),
            )
            if fits:
                self._unread[sender] = self._unread.get(sender, 0) + nbytes
            return fits

    def mark_read(self, sender: str, nbytes: int) -> None:
        """Note that bytes of a sender are read."""
        with self._changed:
            self._unread[sender] = self._unread.get(sender, 0) - nbytes
            self._changed.notify_all()

    def put(self, item: Arrival | PeerError, due: float = 0.0) -> None:
        """Add an arrival, or an error that `get` raises in its turn; dropped when closed.

        `get` does not see it before the monotonic time `due`; items come out by `due`, equal ones in the order of
        `put`.
        """
        with self._changed:
            if not self._closed:
                heapq.heappush(self._items, (due, self._count, item))
                self._count += 1
                self._changed.notify_all()  # senders wait here, too: one woken in vain would keep the receiver asleep

    def get(self, timeout: float) -> Arrival | None:
        """Take the first item that is due, waiting up to `timeout` seconds; see `Channel.receive`."""
        now = time.monotonic()
        deadline = now + timeout
        with self._changed:
            while not self._items or self._items[0][0] > now:
                if self._closed:
                    raise LocalProtocolError(f"expected an open channel, got one that {self._owner} has closed")
                now = time.monotonic()
                until = min(deadline, self._items[0][0]) if self._items else deadline
                if until > now:
                    self._changed.wait(min(until - now, threading.TIMEOUT_MAX))
                    now = time.monotonic()
                elif now >= deadline:
                    return None
            item = heapq.heappop(self._items)[2]
        if isinstance(item, PeerError):
            raise item
        return item

    def close(self) -> None:
        """Drop everything and wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
