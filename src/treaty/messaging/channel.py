"""The interface of a transport, what transports share, and the channels between threads of one process.

Channels between threads carry the same encoded frames as the network, as fast as the machine unless a `LinkSpeed` says
how slow the parties' lines are.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from treaty.errors import ConfigError, LocalProtocolError, PeerError, PeerLost, PeerTimeout
from treaty.messaging.messages import Frame


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame and the peer that sent it, as the transport has authenticated it."""

    sender: str
    frame: Frame


class Channel(Protocol):
    """One party's end of the transport: authenticated, in order per pair, and it notices a peer's death.

    A channel knows nothing of jobs, goodbyes or message types; those are the business of `Party`. `name` is the party
    this end belongs to. `waits` says whether sending may have to wait for the peer, so that sending to several peers at
    once pays. `frame_bytes` are the most of a frame, None for any length; longer messages are sent in parts.
    """

    name: str
    waits: bool
    frame_bytes: int | None

    def refusal(self, sender: str, nbytes: int, frames: int) -> str | None:
        """Return why a peer's message of so many bytes and frames can never be received, None if it can."""

    def send(self, to: str, frame: bytes, timeout: float, *, receipt: bool = False) -> None:
        """Send an encoded envelope to a peer's mailbox, where it arrives once; with `receipt`, wait until it has.

        Waits while too much that was sent to the peer is unread. Raises PeerLost if the peer is gone, PeerTimeout if it
        took nothing for `timeout` seconds (the text says whether its connection stood), PeerProtocolError if it refuses
        the connection or has refused a frame, as one larger than it accepts, and LocalProtocolError if `to` is unknown
        or this channel is closed.
        """

    def receive(self, timeout: float) -> Arrival | None:
        """Return the next frame of any peer, or None after `timeout` seconds.

        Raises PeerLost once for each peer that is gone, after the frames it delivered before, PeerProtocolError if a
        peer tried something the transport refuses (oversized frame, false name), and LocalProtocolError if this channel
        is closed.
        """

    def is_up(self, peer: str) -> bool:
        """Return whether the connection with a peer stands, as far as is known; a broken one may come back."""

    def mark_read(self, sender: str, nbytes: int) -> None:
        """Record that the role has read a frame of a peer, which may then send as many bytes more."""

    def close(self) -> None:
        """Leave; every peer's channel notices. A second call does nothing."""


class Inbox:
    """Arrivals and notices of trouble, in order; filled by any thread, emptied by the party's."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        # a heap: due time, then the number of the `put`, which keeps items of one time in order, and errors uncompared
        self._items: list[tuple[float, int, Arrival | PeerError]] = []
        self._count = 0
        self._closed = False
        self._unread: dict[str, int] = {}  # bytes by sender

    def wait_for_room(self, sender: str, nbytes: int, limit: float, timeout: float) -> bool:
        """Wait until a sender may add so many bytes, which then count as unread until `mark_read`; False on timeout.

        It may while its unread bytes stay within a limit, or are none. A closed inbox has room.
        """
        with self._changed:
            # a party with nothing unread may always send: else a message longer than the limit never could be
            fits = self._changed.wait_for(
                lambda: self._closed or not (before := self._unread.get(sender, 0)) or before + nbytes <= limit,
                min(timeout, threading.TIMEOUT_MAX),
            )
            if fits:
                self._unread[sender] = self._unread.get(sender, 0) + nbytes
            return fits

    def mark_read(self, sender: str, nbytes: int) -> None:
        """Record that bytes of a sender were read."""
        with self._changed:
            self._unread[sender] = self._unread.get(sender, 0) - nbytes
            self._changed.notify_all()

    def put(self, item: Arrival | PeerError, due: float = 0.0) -> None:
        """Add an arrival, or an error that `get` raises in its turn; dropped if the inbox is closed.

        Items come out from the monotonic time `due` on, sorted by it, equal ones in the order of `put`.
        """
        with self._changed:
            if not self._closed:
                heapq.heappush(self._items, (due, self._count, item))
                self._count += 1
                # senders wait here, too: waking one thread alone might wake a sender, and leave the receiver asleep
                self._changed.notify_all()

    def get(self, timeout: float) -> Arrival | None:
        """Take the first item that is due, waiting up to `timeout` seconds; errors as of `Channel.receive`."""
        now = time.monotonic()
        deadline = now + timeout
        with self._changed:
            while not self._items or self._items[0][0] > now:
                if self._closed:
                    raise LocalProtocolError(f"expected an open channel, got one that {self._owner} has closed")
                now = time.monotonic()
                # sleep until the next item is due, or time is up
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


INBOX_LIMIT = 2 << 30
"""Default bytes that all peers together may have unread at a party, 2 GiB."""

OVERHEAD = 2048
"""Bytes added to each waiting message for what Python keeps of it, so that empty ones count, too."""

# bytes of a share that suffice to agree on terms and say goodbye
_LEAST = 4 * OVERHEAD


class Credit:
    """The bytes of a party's inbox, divided among its peers: each has a share that no other can use up.

    A peer whose share is full waits until the role has read some of its messages. All shares together are `limit`;
    ConfigError if it is too little for so many peers.
    """

    def __init__(self, owner: str, limit: int, peers: Collection[str]) -> None:
        self._owner, self._limit = owner, limit
        self._changed = threading.Condition()
        self._unread = dict.fromkeys(peers, 0)
        self._shares: dict[str, int] = {}
        self._closed = False
        self.divide()

    def divide(self, may_lose: Collection[str] = ()) -> None:
        """Give equal shares, but half of the whole to the peers in `may_lose` together, which may be many and small."""
        few = [peer for peer in self._unread if peer not in may_lose]
        many = [peer for peer in self._unread if peer in may_lose]
        for group in (few, many):
            whole = self._limit // 2 if few and many else self._limit
            for peer in group:
                self._shares[peer] = whole // len(group)
        least = min(self._shares.values())
        if least < _LEAST:
            raise ConfigError(
                f"expected an inbox_limit that leaves each of {len(self._unread)} peers {_LEAST} bytes or more, got "
                f"{self._limit} bytes, {least} for one of them - at {self._owner}; raise it"
            )

    def largest(self, peer: str, frames: int = 1) -> int:
        """Return the bytes of the largest message that a peer may send in so many frames."""
        return self._shares[peer] - frames * OVERHEAD

    def limit_for(self, peer: str, nbytes: int, frames: int = 1) -> int:
        """Return the limit under which a peer's share would take a message of so many bytes."""
        return -(-(nbytes + frames * OVERHEAD) * self._limit // self._shares[peer])

    def refusal(self, peer: str, nbytes: int, frames: int = 1) -> str | None:
        """Return why a peer's message would never fit into its share, None if it would."""
        largest = self.largest(peer, frames)
        if nbytes <= largest:
            return None
        return (
            f"expected at most {largest} bytes, the share of {peer} in the inbox_limit of {self._owner}, got a message "
            f"of {nbytes} bytes announced by {peer}; if it is meant to be so large, raise inbox_limit to "
            f"{-(-self.limit_for(peer, nbytes, frames) >> 20)} MiB or more"
        )

    def take(self, peer: str, nbytes: int, still_wanted: Callable[[], bool]) -> bool:
        """Wait until a frame fits into a peer's share, and count it; False once the caller no longer wants it."""
        with self._changed:
            while not self._closed and self._unread[peer] + nbytes + OVERHEAD > self._shares[peer]:
                self._changed.wait(1.0)
                if not still_wanted():
                    return False
            self._unread[peer] += nbytes + OVERHEAD
            return not self._closed

    def give_back(self, peer: str, nbytes: int) -> None:
        """Stop counting a frame: it was read, or has not come."""
        with self._changed:
            self._unread[peer] -= nbytes + OVERHEAD
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# bytes of one party that another may have unread before the next message waits: pieces are made as they are read
_UNREAD = 256 << 20

# bytes of a frame that never waits, such as a goodbye
_SMALL = 4096


# bytes of a packet by those of frames in it
_PACKET = 1500 / 1448


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The uplink of every party, shared by what it sends to all peers, as at a home or an office.

    A frame of n bytes waits until the frames sent before it, to any peer, have left; takes ``8.3 n / bits_per_second``
    to leave, as packets have headers; and arrives `delay` seconds after that (a round trip of 100 ms has
    ``delay=0.05``), all in real time. The downlink, losses and TCP's slow start are not modelled. `send` does not wait
    for the line, as if a socket's buffer had much room.
    """

    bits_per_second: float
    delay: float

    def __post_init__(self) -> None:
        if not (self.bits_per_second > 0 and self.delay >= 0):
            raise ConfigError(
                f"expected bits_per_second above 0 and delay of 0 or more, got {self.bits_per_second} and "
                f"{self.delay} - at LinkSpeed"
            )


def memory_channels(names: Iterable[str], link: LinkSpeed | None = None) -> dict[str, MemoryChannel]:
    """Connect parties of one process, each with each; without a link, frames arrive at once."""
    names = list(names)
    if len(set(names)) != len(names):
        raise LocalProtocolError(f"expected different party names, got {names}")
    inboxes = {name: Inbox(name) for name in names}
    departures: dict[str, float] = {}
    return {name: MemoryChannel(name, inboxes, departures, link) for name in names}


class MemoryChannel:
    """One party's end; made by `memory_channels`.

    Over a `LinkSpeed`, the news that a party has closed is an empty frame behind the frames sent before. Until
    it arrives, what others send to the party vanishes without an error.
    """

    waits = False

    def __init__(
        self, name: str, inboxes: dict[str, Inbox], departures: dict[str, float], link: LinkSpeed | None
    ) -> None:
        self.name = name
        self.frame_bytes: int | None = None
        # shared by all ends: a party that has closed is no longer in it
        self._inboxes = inboxes
        # shared, too: when the others learn that a party has closed
        self._departures = departures
        self._own = inboxes[name]
        self._names = frozenset(inboxes)
        self._link = link
        self._queueing = threading.Lock()
        # monotonic time at which all frames sent so far have left
        self._uplink_free = 0.0

    def refusal(self, sender: str, nbytes: int, frames: int) -> None:
        return None

    def send(self, to: str, frame: bytes, timeout: float, *, receipt: bool = False) -> None:
        """Put the frame into the peer's inbox, for the time it arrives; waits only for `_UNREAD` bytes to be read."""
        if to not in self._names or to == self.name:
            raise LocalProtocolError(f"expected a peer of {self.name}, got {to!r} - at send")
        if self.name not in self._inboxes:
            raise LocalProtocolError(f"expected an open channel, got one that {self.name} has closed")
        inbox = self._inboxes.get(to)
        if inbox is None and time.monotonic() >= self._departures[to]:
            raise PeerLost(to, f"{to} is lost: it has closed its channel")
        limit = _UNREAD if len(frame) > _SMALL else math.inf
        if inbox is not None and not inbox.wait_for_room(self.name, len(frame), limit, timeout):
            raise PeerTimeout(to, f"{to} has not read what {self.name} sent it for {timeout:g} s")
        due = 0.0 if self._link is None else self._due(len(frame), self._link)
        if inbox is not None:
            inbox.put(Arrival(self.name, frame), due)

    def receive(self, timeout: float) -> Arrival | None:
        return self._own.get(timeout)

    def is_up(self, peer: str) -> bool:
        return peer in self._inboxes

    def mark_read(self, sender: str, nbytes: int) -> None:
        self._own.mark_read(sender, nbytes)

    def close(self) -> None:
        due = 0.0 if self._link is None else self._due(0, self._link)
        # before the inbox goes: a sender that misses it reads when the party closed
        self._departures.setdefault(self.name, due)
        if self._inboxes.pop(self.name, None) is not None:
            self._own.close()
            for inbox in list(self._inboxes.values()):
                inbox.put(PeerLost(self.name, f"{self.name} is lost: it has closed its channel"), due)

    def _due(self, nbytes: int, link: LinkSpeed) -> float:
        """Queue a frame at the uplink; return its time of arrival."""
        with self._queueing:
            self._uplink_free = max(self._uplink_free, time.monotonic()) + 8 * nbytes * _PACKET / link.bits_per_second
            return self._uplink_free + link.delay
