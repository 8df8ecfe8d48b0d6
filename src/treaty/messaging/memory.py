"""Channels between threads of one process, carrying the same encoded frames as the network does.

They are as fast as the machine unless a `Link` says how slow the parties' lines are.
"""

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from treaty.errors import ConfigError, LocalProtocolError, PeerLost, PeerTimeout
from treaty.messaging.channel import Arrival, Inbox

_UNREAD = 256 << 20
"""Bytes of one party that another may have unread before the next message waits: what is made piece by piece is not
made faster than it is read, and a single message of any size always goes."""

_SMALL = 4096  # bytes of a frame that never waits: the last word of a party, say


@dataclass(frozen=True, slots=True)
class Link:
    """The uplink of every party, as at a home or an office: scarce, and shared by what it sends to all peers.

    A frame of n bytes waits until the frames sent before it, to any peer, have left; takes ``8 n / bits_per_second``
    to leave; and arrives `delay` seconds after that (a round trip of 100 ms has ``delay=0.05``), all in real time.
    Left out: the downlink (usually many times faster, but a leader that receives from 32 parties at once may find it
    scarce too), losses and TCP's slow start, the bytes of TLS and TCP. `send` does not wait for the line, as if a
    socket's buffer had much room; `GrpcChannel.send` waits for an acknowledgment, one round trip a message.
    """

    bits_per_second: float
    delay: float

    def __post_init__(self) -> None:
        if not (self.bits_per_second > 0 and self.delay >= 0):
            raise ConfigError(
                f"expected bits_per_second above 0 and delay of 0 or more, got {self.bits_per_second} and "
                f"{self.delay} - at Link"
            )


def memory_channels(names: Iterable[str], link: Link | None = None) -> dict[str, "MemoryChannel"]:
    """Connect parties of one process, each with each; names must differ. Without a link, frames arrive at once."""
    names = list(names)
    if len(set(names)) != len(names):
        raise LocalProtocolError(f"expected different party names, got {names}")
    inboxes = {name: Inbox(name) for name in names}
    departures: dict[str, float] = {}
    return {name: MemoryChannel(name, inboxes, departures, link) for name in names}


class MemoryChannel:
    """One party's end; made by `memory_channels`. Closing it tells all others that this party is gone.

    Over a `Link` that news travels as an empty frame behind the frames sent before; until it arrives, what others send
    to the party vanishes without an error.
    """

    def __init__(self, name: str, inboxes: dict[str, Inbox], departures: dict[str, float], link: Link | None) -> None:
        self._name = name
        self._inboxes = inboxes  # shared by all ends: a party that has closed is no longer in it
        self._departures = departures  # shared too: when the others hear that a party has closed
        self._own = inboxes[name]
        self._names = frozenset(inboxes)
        self._link = link
        self._queueing = threading.Lock()
        self._uplink_free = 0.0  # monotonic time at which all frames sent so far have left

    @property
    def name(self) -> str:
        """The party this end belongs to."""
        return self._name

    @property
    def waits(self) -> bool:
        return False

    @property
    def frame_bytes(self) -> None:
        return None

    def refusal(self, sender: str, nbytes: int, frames: int) -> None:
        return None

    def send(self, to: str, frame: bytes, timeout: float) -> None:
        """Put the frame into the peer's inbox, at the time it arrives. See `Channel.send`.

        It waits only where the peer has `_UNREAD` bytes of this party's that it has not read.
        """
        if to not in self._names or to == self._name:
            raise LocalProtocolError(f"expected a peer of {self._name}, got {to!r} - at send")
        if self._name not in self._inboxes:
            raise LocalProtocolError(f"expected an open channel, got one that {self._name} has closed")
        inbox = self._inboxes.get(to)
        if inbox is None and time.monotonic() >= self._departures[to]:
            raise PeerLost(to, f"{to} is lost: it has closed its channel")
        limit = _UNREAD if len(frame) > _SMALL else math.inf
        if inbox is not None and not inbox.wait_for_room(self._name, len(frame), limit, timeout):
            raise PeerTimeout(to, f"{to} has not read what {self._name} sent it for {timeout:g} s")
        due = 0.0 if self._link is None else self._due(len(frame), self._link)
        if inbox is not None:
            inbox.put(Arrival(self._name, frame), due)

    def receive(self, timeout: float) -> Arrival | None:
        """Take the next frame or notice; see `Channel.receive`."""
        return self._own.get(timeout)

    def is_up(self, peer: str) -> bool:
        return peer in self._inboxes

    def mark_read(self, sender: str, nbytes: int) -> None:
        """Let a peer send more; see `Channel.mark_read`."""
        self._own.mark_read(sender, nbytes)

    def close(self) -> None:
        due = 0.0 if self._link is None else self._due(0, self._link)
        self._departures.setdefault(self._name, due)  # before it is missing from the inboxes
        if self._inboxes.pop(self._name, None) is not None:
            self._own.close()
            for inbox in list(self._inboxes.values()):
                inbox.put(PeerLost(self._name, f"{self._name} is lost: it has closed its channel"), due)

    def _due(self, nbytes: int, link: Link) -> float:
        """Queue a frame at the uplink; return when it arrives."""
        with self._queueing:
            self._uplink_free = max(self._uplink_free, time.monotonic()) + 8 * nbytes / link.bits_per_second
            return self._uplink_free + link.delay
