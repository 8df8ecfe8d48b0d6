"""Channels between threads of one process, carrying the same encoded frames as the network does."""

from collections.abc import Iterable

from treaty.errors import LocalProtocolError, PeerLost
from treaty.messaging.channel import Arrival, Inbox


def memory_channels(names: Iterable[str]) -> dict[str, "MemoryChannel"]:
    """Connect parties of one process, each with each.

    Parameters
    ----------
    names : iterable of str
        Party names, all different.

    Returns
    -------
    dict of str to MemoryChannel
        One end per party.

    Raises
    ------
    LocalProtocolError
        When a name occurs twice.
    """
    names = list(names)
    if len(set(names)) != len(names):
        raise LocalProtocolError(f"expected different party names, got {names}")
    inboxes = {name: Inbox(name) for name in names}
    return {name: MemoryChannel(name, inboxes) for name in names}


class MemoryChannel:
    """One party's end; made by `memory_channels`. Closing it tells all others that this party is gone."""

    def __init__(self, name: str, inboxes: dict[str, Inbox]) -> None:
        self._name = name
        self._inboxes = inboxes  # shared by all ends: a party that has closed is no longer in it
        self._own = inboxes[name]
        self._names = frozenset(inboxes)

    @property
    def name(self) -> str:
        """The party this end belongs to."""
        return self._name

    def send(self, to: str, frame: bytes, timeout: float) -> None:
        """Put the frame into the peer's inbox; never waits. See `Channel.send`."""
        if to not in self._names or to == self._name:
            raise LocalProtocolError(f"expected a peer of {self._name}, got {to!r} - at send")
        if self._name not in self._inboxes:
            raise LocalProtocolError(f"expected an open channel, got one that {self._name} has closed")
        inbox = self._inboxes.get(to)
        if inbox is None:
            raise PeerLost(to, f"{to} is lost: it has closed its channel")
        inbox.put(Arrival(self._name, frame))

    def receive(self, timeout: float) -> Arrival | None:
        """Take the next frame or notice; see `Channel.receive`."""
        return self._own.get(timeout)

    def close(self) -> None:
        """Leave; see `Channel.close`."""
        if self._inboxes.pop(self._name, None) is not None:
            self._own.close()
            for inbox in list(self._inboxes.values()):
                inbox.put(PeerLost(self._name, f"{self._name} is lost: it has closed its channel"))
