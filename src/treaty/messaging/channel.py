"""What a party needs of a transport, and the mailbox both transports share."""

import threading
import time
from collections import deque
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

    def send(self, to: str, frame: bytes, timeout: float) -> None:
        """Hand `frame` over to the peer's mailbox; returns when it is there.

        Parameters
        ----------
        to : str
            A peer of this channel.
        frame : bytes
            One encoded envelope.
        timeout : float
            Seconds after which a peer that is alive but takes nothing is given up.

        Raises
        ------
        PeerLost
            When the peer is gone.
        PeerTimeout
            When `timeout` has passed.
        PeerProtocolError
            When the peer refuses to talk to us.
        LocalProtocolError
            When `to` is unknown, the frame is larger than the peer takes, or this channel is closed.
        """

    def receive(self, timeout: float) -> Arrival | None:
        """Return the next frame of any peer, or None when `timeout` seconds have passed.

        Raises
        ------
        PeerLost
            Once for each peer that is gone, after the frames it delivered before.
        PeerProtocolError
            When a peer tried something the transport refuses (oversized frame, false name).
        LocalProtocolError
            When this channel is closed.
        """

    def close(self) -> None:
        """Leave; every peer's channel notices. Closing twice is fine."""


class Inbox:
    """Arrivals and notices of trouble, in order; filled by any thread, emptied by the party's.

    Parameters
    ----------
    owner : str
        The party, for the error message.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        self._items: deque[Arrival | PeerError] = deque()
        self._closed = False

    def put(self, item: Arrival | PeerError) -> None:
        """Append an arrival, or an error that `get` raises in its turn; dropped when closed."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify()

    def get(self, timeout: float) -> Arrival | None:
        """Take the oldest item, waiting up to `timeout` seconds; see `Channel.receive`."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._items:
                if self._closed:
                    raise LocalProtocolError(f"expected an open channel, got one that {self._owner} has closed")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
            item = self._items.popleft()
        if isinstance(item, PeerError):
            raise item
        return item

    def close(self) -> None:
        """Drop everything and wake whoever waits."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
