"""The conversation of two parties, checked message by message; no I/O here.

Each message is checked against the place it claims. When it comes in: job, protocol, sender (the name the channel
has authenticated), receiver, and ``seq``, which must be exactly the next number of its ordered pair. When the role
asks for it: round and message class. Whatever does not fit is a `PeerProtocolError`.

`MessageOrder` says which classes a role may ask for when: a table of states, the messages allowed in each, and the
state that follows. In use::

    order = MessageOrder(TABLE, "between trees")
    message = party.receive(active, *order.allowed)  # refuses every other message
    order.take(message)

A message longer than a channel's frames travels in `Part`s, pieces of its encoded envelope, which has the number of the
first of them. Parts count as unread, like other frames, until the role reads their message.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.messages import (
    Abort,
    Envelope,
    Frame,
    Goodbye,
    M,
    Message,
    Part,
    clean,
    decode_body,
    decode_envelope,
    encode_envelope,
)


class Conversation:
    """One party's conversation with one peer, both in the same job and protocol.

    `left`: the peer said goodbye or aborted and sends nothing more; `abort_reason` says why, if it stopped the job.
    `missed` is the last round that went on without a message of the peer, -1 if none; see `drop_late`. `on_read` is
    told the bytes of each frame that the role has read or let pass: the peer may send as many more. `refusal` says
    why a message of so many bytes and frames is too long, if it is.
    """

    def __init__(
        self,
        me: str,
        peer: str,
        job: str,
        protocol: str,
        on_read: Callable[[int], None] = lambda _: None,
        refusal: Callable[[int, int], str | None] = lambda nbytes, frames: None,
    ) -> None:
        self.me = me
        self.peer = peer
        self.job = job
        self.protocol = protocol
        self.left = False
        self.abort_reason: str | None = None
        self.missed = -1
        self._sent = 0
        self._received = 0
        self._on_read, self._refusal = on_read, refusal
        # with the bytes of its frames
        self._unread: deque[tuple[Envelope[msgspec.Raw], list[int]]] = deque()
        # bytes of the frames of a message that is coming in
        self._frames: list[int] = []
        # for that message, if it comes in parts
        self._room: memoryview | None = None
        self._filled = 0  # bytes of it

    @property
    def has_unread(self) -> bool:
        """Whether a message waits for `read`."""
        return bool(self._unread)

    @property
    def next_round(self) -> int:
        """The round of the oldest unread message."""
        return self._unread[0][0].round

    def write(self, message: Message, round: int, frame_bytes: int | None = None) -> Iterator[bytes]:
        """Encode the next message to the peer: one frame, or several of at most `frame_bytes` of it.

        Call `wrote` when one is delivered, before the next is taken.
        """
        kind = type(message).__name__
        whole = encode_envelope(Envelope(self.job, self.protocol, round, kind, self.me, self.peer, self._sent, message))
        if frame_bytes is None or len(whole) <= frame_bytes:
            yield whole
            return
        for start in range(0, len(whole), frame_bytes):
            part = Part(memoryview(whole)[start : start + frame_bytes], len(whole))
            step = Part.__name__
            yield encode_envelope(Envelope(self.job, self.protocol, round, step, self.me, self.peer, self._sent, part))

    def wrote(self) -> None:
        """Record that a frame from `write` has been delivered."""
        self._sent += 1

    def take_in(self, frame: Frame) -> tuple[Envelope[msgspec.Raw], int] | None:
        """Check everything in a frame that does not depend on what the role expects, and queue it, body undecoded.

        Returns the message and the bytes of its frames, None while parts of it are missing. A goodbye or abort sets
        `left` and `abort_reason` and is not queued. Raises PeerProtocolError for a frame that is malformed, of another
        job or protocol, not from `peer` to `me`, or not the next.
        """
        envelope = self._addressed(frame)
        # An abort's number is not checked: the send it interrupts may or may not have used that number up.
        if envelope.step == Abort.__name__:
            self.abort_reason = clean(decode_body(envelope.body, Abort, peer=self.peer).reason, 600)
            self.left = True
            self._on_read(len(frame))
            return envelope, len(frame)
        self._expect_next(envelope, self._received)
        self._received += 1
        self._frames.append(len(frame))
        if envelope.step == Part.__name__:
            whole = self._join(decode_body(envelope.body, Part, peer=self.peer))
            if whole is None:
                return None
            envelope = self._addressed(whole)
            self._expect_next(envelope, self._received - len(self._frames))
        elif self._room is not None and envelope.step != Goodbye.__name__:
            # who gave up sending may leave
            raise self._error(f"expected the rest of a message that comes in parts, got {clean(envelope.step)}")
        frames, self._frames = self._frames, []
        if envelope.step == Goodbye.__name__:
            decode_body(envelope.body, Goodbye, peer=self.peer)
            self.left, self._room = True, None
            self._let_pass(frames)
        else:
            self._unread.append((envelope, frames))
        return envelope, sum(frames)

    def drop_late(self, round: int) -> None:
        """Drop, unread, what the peer sent for rounds before `round` that it missed."""
        while self._unread and self.next_round <= self.missed and self.next_round < round:
            self.drop_first()

    def drop_first(self) -> None:
        """Drop the oldest unread message, which `peek` has returned."""
        self._let_pass(self._unread.popleft()[1])

    def drop_unread(self) -> None:
        """Drop everything that waits for `read`, of a peer that is not listened to any more: it may send no more."""
        self._unread.clear()
        self._room, self._frames = None, []

    def read(self, kinds: Sequence[type[M]], round: int) -> M:
        """Decode the oldest unread message as one of those the role expects now, and take it; see `peek`."""
        message = self.peek(kinds, round)
        self.drop_first()
        return message

    def peek(self, kinds: Sequence[type[M]], round: int) -> M:
        """Decode the oldest unread message as one of those the role expects now; it stays unread.

        Raises PeerProtocolError for another class or round, or a body that is not exactly one of that class.
        """
        envelope, _ = self._unread[0]
        kind = next((kind for kind in kinds if kind.__name__ == envelope.step), None)
        if kind is None or envelope.round != round:
            raise self._error(
                f"expected {' or '.join(kind.__name__ for kind in kinds)} of round {round}, got "
                f"{clean(envelope.step)} of round {envelope.round} - at message number {envelope.seq}"
            )
        return decode_body(envelope.body, kind, peer=self.peer)

    def _let_pass(self, frames: Sequence[int]) -> None:
        for nbytes in frames:
            self._on_read(nbytes)

    def _join(self, part: Part) -> memoryview | None:
        """Add a part; return the whole frame after the last. It ends at a multiple of 8 bytes, see `view`."""
        if self._room is None:
            # if all are like the first
            frames = -(-part.nbytes // max(1, part.content.nbytes))
            envelopes = frames * (self._frames[-1] - part.content.nbytes)
            text = self._refusal(part.nbytes + envelopes, frames)
            if text is not None:
                raise PeerProtocolError(self.peer, text)
            # in memory only as they are filled
            pages = np.empty(part.nbytes + 7, np.uint8)
            skipped = -(pages.ctypes.data + part.nbytes) % 8
            self._room, self._filled = pages.data[skipped : skipped + part.nbytes], 0
        whole, end = self._room, self._filled + part.content.nbytes
        if part.nbytes != len(whole) or end > len(whole) or not part.content.nbytes:
            raise self._error(f"expected parts of {len(whole)} bytes together, got others - at Part")
        whole[self._filled : end] = part.content
        self._filled = end
        if end < len(whole):
            return None
        self._room = None
        return whole.toreadonly()

    def _addressed(self, frame: Frame) -> Envelope[msgspec.Raw]:
        """Decode an envelope that must be of this conversation."""
        envelope = decode_envelope(frame, peer=self.peer)
        self._expect("job", self.job, envelope.job)
        self._expect("protocol", self.protocol, envelope.protocol)
        self._expect("sender", self.peer, envelope.sender)
        self._expect("receiver", self.me, envelope.receiver)
        return envelope

    def _expect(self, what: str, expected: str, got: str) -> None:
        if got != expected:
            raise self._error(f"expected {what} {expected!r}, got {clean(got)!r} - at the envelope")

    def _expect_next(self, envelope: Envelope[msgspec.Raw], number: int) -> None:
        step = clean(envelope.step)
        if self.left:
            raise self._error(f"expected nothing after its goodbye, got {step}")
        if envelope.seq != number:
            again = " again" if envelope.seq < number else ""
            raise self._error(f"expected message number {number}, got number {envelope.seq}{again} - at {step}")

    def _error(self, text: str) -> PeerProtocolError:
        return PeerProtocolError(self.peer, f"{text} from {self.peer} to {self.me}")


Table = Mapping[str, Mapping[type[Message], str | tuple[str, str]]]
"""State -> message -> next state. A pair is for messages that come in pieces: the state after a piece whose `last` is
false, and after the last one."""


class MessageOrder:
    """Where a conversation stands in its table."""

    def __init__(self, table: Table, state: str) -> None:
        self._table, self.state = table, state

    @property
    def allowed(self) -> tuple[type[Message], ...]:
        """Messages that may come now; none when the conversation is over."""
        return tuple(self._table[self.state])

    def take(self, message: Any) -> None:
        """Move to the state after `message`, one of those `allowed`."""
        following = self._table[self.state][type(message)]
        self.state = following if isinstance(following, str) else following[message.last]


# ------------------------ how much of a party's memory its peers may fill with messages that its role has not read yet

INBOX_LIMIT = 2 << 30
"""Default bytes of what all peers together may have unread at a party, 2 GiB."""

OVERHEAD = 2048
"""Bytes that each waiting message counts besides its own: what Python keeps of it, so that empty ones cost, too."""

# bytes of a share with which parties can agree on terms and take their leave
_LEAST = 4 * OVERHEAD


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
        """Wait until a frame fits into a peer's share, and enter it; False when the caller no longer wants it."""
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
        """End all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
