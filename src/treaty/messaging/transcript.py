"""What one party sent and received.

The one source of byte counts in reports, of leakage audits and of protocol tests about what was sent.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from treaty.messaging.messages import M, decode_body

Direction = Literal["sent", "received"]
Key = TypeVar("Key", bound=Hashable)


class Pair(NamedTuple):
    """An ordered pair of parties."""

    sender: str
    receiver: str


class Total(NamedTuple):
    """Messages and bytes that went over the wire."""

    messages: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One message, seen from the party that keeps the transcript."""

    direction: Direction
    peer: str
    step: str  # name of the message class
    round: int
    nbytes: int  # of the encoded envelope, body included, without TLS
    seconds: float  # monotonic, since the transcript was opened
    content: bytes | None = None  # the encoded body, if the transcript keeps contents

    def message(self, kind: type[M]) -> M | None:
        """Decode the kept content as `kind`; None when the transcript keeps no contents."""
        return None if self.content is None else decode_body(self.content, kind, peer=self.peer)


class Transcript:
    """Record of one party's messages; safe to use from several threads.

    With `record_content` bodies are kept too; they never leave this process by way of the transcript. Received
    messages are recorded when the party takes them in, whether or not the protocol reads them: an audit asks what
    reached the party. `keep_contents` bounds them. Goodbyes are not recorded (whether one is still taken in is a
    matter of timing), aborts are.
    """

    def __init__(self, party: str, *, record_content: bool = False) -> None:
        self.party = party
        self.record_content = record_content
        self.began = time.time()  # seconds since 1970: when entries' `seconds` are 0
        self._room = float("inf")  # bytes of contents that may still be kept
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._entries: list[Entry] = []

    def record(
        self, direction: Direction, peer: str, step: str, round: int, nbytes: int, content: bytes | None = None
    ) -> None:
        """Add one message; `content` is dropped unless the transcript keeps contents."""
        with self._lock:
            kept = content if self.record_content else None
            seconds = time.monotonic() - self._start
            self._entries.append(Entry(direction, peer, step, round, nbytes, seconds, kept))
            self._room -= 0 if kept is None else len(kept)
            if self._room < 0 and self.record_content:
                self.record_content = False
                self._entries = [replace(entry, content=None) for entry in self._entries]

    def keep_contents(self, most: int) -> None:
        """Keep contents from now on, until they are more than `most` bytes: then all are dropped, and none is kept."""
        with self._lock:
            self.record_content, self._room = True, most

    def restore(self, entries: Iterable[Entry]) -> None:
        """Take over messages that another transcript has recorded."""
        with self._lock:
            self._entries.extend(entries)

    def clear(self) -> None:
        """Forget all messages so far: of a service there are ever more."""
        with self._lock:
            self._entries.clear()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All messages so far, in the order they were recorded."""
        with self._lock:
            return tuple(self._entries)

    def by_pair(self, direction: Direction | None = None) -> dict[Pair, Total]:
        """Return messages and bytes per ordered pair of parties, sent, received or both (None).

        The "sent" totals of all parties together cover every message of a job once.
        """
        return self._totals(direction, self._pair)

    def by_type(self, direction: Direction | None = None) -> dict[str, Total]:
        """Return messages and bytes per message class name; `direction` as in `by_pair`."""
        return self._totals(direction, lambda entry: entry.step)

    def _pair(self, entry: Entry) -> Pair:
        return Pair(self.party, entry.peer) if entry.direction == "sent" else Pair(entry.peer, self.party)

    def _totals(self, direction: Direction | None, key: Callable[[Entry], Key]) -> dict[Key, Total]:
        totals: dict[Key, Total] = {}
        for entry in self.entries:
            if direction in (None, entry.direction):
                messages, nbytes = totals.get(key(entry), Total(0, 0))
                totals[key(entry)] = Total(messages + 1, nbytes + entry.nbytes)
        return totals
