"""The conversation of two parties, checked message by message; no I/O here.

Each message is checked against the place it claims. When it comes in: job, protocol, sender (the name the channel
has authenticated), receiver, and ``seq``, which must be exactly the next number of its ordered pair. When the role
asks for it: round and message class. Whatever does not fit is a `PeerProtocolError`.

`MessageOrder` says which classes a role may ask for when: a table of states, the messages allowed in each, and the
state that follows. In use::

    order = MessageOrder(TABLE, "between trees")
    message = party.receive(active, *order.allowed)  # refuses every other message
    order.take(message)

A message longer than a channel's frames is sent in `Part`s, pieces of its encoded envelope, which has the number of the
first of them. Parts count as unread, like other frames, until the role reads their message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from treaty.errors import PeerProtocolError
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
    encode,
)


class Conversation:
    """One party's conversation with one peer, both in the same job and protocol.

    `left`: the peer said goodbye or aborted and sends nothing more; `abort_reason` says why, if it stopped the job.
    `missed` is the last round that this party finished without a message of the peer, -1 if none; see `drop_late`.
    `unread` has the messages that wait for `read`, with the bytes of their frames. `on_read` is called with the bytes
    of each frame that was read or dropped: the peer may send as many more. `refusal` says why a message of so many
    bytes and frames is too long, if it is.
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
        self.me, self.peer, self.job, self.protocol = me, peer, job, protocol
        self.left = False
        self.abort_reason: str | None = None
        self.missed = -1
        self.unread: deque[tuple[Envelope[msgspec.Raw], list[int]]] = deque()
        self._sent = self._received = 0
        self._on_read, self._refusal = on_read, refusal
        # a message that is coming in: bytes of its frames; if it comes in parts, its buffer and how much is full
        self._frames: list[int] = []
        self._room: memoryview | None = None
        self._filled = 0

    def write(self, message: Message, round: int, frame_bytes: int | None = None) -> Iterator[bytes]:
        """Encode the next message to the peer: one frame, or several of at most `frame_bytes` of it.

        The caller calls `wrote` after each delivery, before it takes the next frame.
        """
        kind = type(message).__name__
        whole = encode(Envelope(self.job, self.protocol, round, kind, self.me, self.peer, self._sent, message))
        if frame_bytes is None or len(whole) <= frame_bytes:
            yield whole
            return
        for start in range(0, len(whole), frame_bytes):
            part = Part(memoryview(whole)[start : start + frame_bytes], len(whole))
            step = Part.__name__
            yield encode(Envelope(self.job, self.protocol, round, step, self.me, self.peer, self._sent, part))

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
        # every frame has the next number of its ordered pair, so nothing is repeated, lost or reordered unnoticed
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
            # only a sender that gives up the message may leave before its last part
            raise self._error(f"expected the rest of a message that comes in parts, got {clean(envelope.step)}")
        frames, self._frames = self._frames, []
        if envelope.step == Goodbye.__name__:
            decode_body(envelope.body, Goodbye, peer=self.peer)
            self.left, self._room = True, None
            for nbytes in frames:
                self._on_read(nbytes)
        else:
            self.unread.append((envelope, frames))
        return envelope, sum(frames)

    def drop_late(self, round: int) -> None:
        """Drop unread messages for rounds before `round` up to the last `missed` one."""
        while self.unread and self.unread[0][0].round <= self.missed and self.unread[0][0].round < round:
            self.drop_first()

    def drop_first(self) -> None:
        """Drop the oldest unread message, which `peek` has returned."""
        for nbytes in self.unread.popleft()[1]:
            self._on_read(nbytes)

    def drop_unread(self) -> None:
        """Drop all unread messages of a peer that was left out; `on_read` is not called, so it may send no more."""
        self.unread.clear()
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
        envelope, _ = self.unread[0]
        kind = next((kind for kind in kinds if kind.__name__ == envelope.step), None)
        if kind is None or envelope.round != round:
            raise self._error(
                f"expected {' or '.join(kind.__name__ for kind in kinds)} of round {round}, got "
                f"{clean(envelope.step)} of round {envelope.round} - at message number {envelope.seq}"
            )
        return decode_body(envelope.body, kind, peer=self.peer)

    def _join(self, part: Part) -> memoryview | None:
        """Add a part; return the whole frame after the last."""
        if self._room is None:
            # the bytes that count for this message, if all its frames are like the first
            frames = -(-part.nbytes // max(1, part.content.nbytes))
            envelopes = frames * (self._frames[-1] - part.content.nbytes)
            text = self._refusal(part.nbytes + envelopes, frames)
            if text is not None:
                raise PeerProtocolError(self.peer, text)
            # pages take memory only as they are filled: a false length costs the peer as much as this party
            pages = np.empty(part.nbytes + 7, np.uint8)
            # the end is at a multiple of 8 bytes, so that `view` need not copy the last array, usually the largest
            skipped = -(pages.ctypes.data + part.nbytes) % 8
            self._room, self._filled = pages.data[skipped : skipped + part.nbytes], 0
        whole, end = self._room, self._filled + part.content.nbytes
        if part.nbytes != len(whole) or end > len(whole) or not part.content.nbytes:
            raise self._error(f"the parts do not add up to the {len(whole)} bytes announced - at Part")
        whole[self._filled : end] = part.content
        self._filled = end
        if end < len(whole):
            return None
        self._room = None
        return whole.toreadonly()

    def _addressed(self, frame: Frame) -> Envelope[msgspec.Raw]:
        """Decode an envelope that must be of this conversation."""
        envelope = decode_envelope(frame, peer=self.peer)
        place = {"job": self.job, "protocol": self.protocol, "sender": self.peer, "receiver": self.me}
        for what, expected in place.items():
            got = getattr(envelope, what)
            if got != expected:
                raise self._error(f"expected {what} {expected!r}, got {clean(got)!r} - at the envelope")
        return envelope

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
"""State -> message -> next state; for messages in pieces, the states after a piece with `last` false and true."""


class MessageOrder:
    """The state of a conversation in its table."""

    def __init__(self, table: Table, state: str) -> None:
        self._table, self.state = table, state

    @property
    def allowed(self) -> tuple[type[Message], ...]:
        """The classes that may come now; none when the conversation is over."""
        return tuple(self._table[self.state])

    def take(self, message: Any) -> None:
        """Move to the state after `message`, one of those `allowed`."""
        following = self._table[self.state][type(message)]
        self.state = following if isinstance(following, str) else following[message.last]
