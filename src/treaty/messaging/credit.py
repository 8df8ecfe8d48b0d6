"""How much of a party's memory its peers may fill with messages that its role has not read yet."""

import threading
from collections.abc import Callable, Collection

from treaty.errors import ConfigError

INBOX_LIMIT = 2 << 30
"""Default bytes of what all peers together may have unread at a party, 2 GiB."""

OVERHEAD = 2048
"""Bytes that each waiting message counts besides its own: what Python keeps of it, so that empty ones cost, too."""

_LEAST = 4 * OVERHEAD  # bytes of a share with which parties can agree on terms and take their leave


class Credit:
    """The bytes of a party's inbox, divided among its peers: each has a share that no other can use up.

    A peer whose share is full waits until the role has read something of it. All shares together are `limit`.
    ConfigError when it is too little for so many peers.
    """

    def __init__(self, owner: str, limit: int, peers: Collection[str]) -> None:
        self._owner, self._limit = owner, limit
        self._changed = threading.Condition()
        self._unread = dict.fromkeys(peers, 0)
        self._shares: dict[str, int] = {}
        self._closed = False
        self.divide()

    def divide(self, may_lose: Collection[str] = ()) -> None:
        """Give equal shares, but half of the whole to those in `may_lose` together, who may be many and small."""
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
        """Wait until a frame fits into a peer's share, and enter it; False when nobody wants it any more."""
        with self._changed:
            while not self._closed and self._unread[peer] + nbytes + OVERHEAD > self._shares[peer]:
                self._changed.wait(1.0)
                if not still_wanted():
                    return False
            self._unread[peer] += nbytes + OVERHEAD
            return not self._closed

    def give_back(self, peer: str, nbytes: int) -> None:
        """Take out a frame that was entered: it was read, or has not come."""
        with self._changed:
            self._unread[peer] -= nbytes + OVERHEAD
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
