"""What one party sent and received: byte counts of reports, leakage audits and tests of protocols are made from it."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from treaty.errors import ConfigError
from treaty.messaging.messages import M, decode_body

Direction = Literal["sent", "received"]


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """One message, seen from the party that keeps the transcript."""

    direction: Direction
    peer: str
    step: str  # name of the message class
    round: int
    nbytes: int  # of the encoded envelope, body included, without TLS
    seconds: float  # monotonic, since the transcript was opened
    # the encoded body, if the transcript keeps contents
    content: bytes | None = None

    def message(self, kind: type[M]) -> M | None:
        """Decode the kept content as `kind`; None when the transcript keeps no contents."""
        return None if self.content is None else decode_body(self.content, kind, peer=self.peer)


class Room:
    """How many more bytes may be kept, by all who share it; safe to use from several threads."""

    def __init__(self, most: float = math.inf, error: str = "") -> None:
        self.left, self._error, self._lock = most, error, threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Take room for so many bytes; return whether it was there. The first time not, raise the `error`, if any."""
        with self._lock:
            before, self.left = self.left, self.left - nbytes
        if before - nbytes < 0 <= before and self._error:
            raise ConfigError(self._error)
        return before >= nbytes


class Transcript:
    """Record of one party's messages; safe to use from several threads.

    With `record_content` bodies are kept too; they never leave this process by way of the transcript, and
    `keep_contents` bounds them. Received messages are recorded when they reach the party, whether or not the protocol
    reads them. Aborts are recorded, goodbyes are not: whether one still arrives is a matter of timing.
    """

    def __init__(self, party: str, *, record_content: bool = False) -> None:
        self.party = party
        self.record_content = record_content
        # seconds since 1970: when entries' `seconds` are 0
        self.began = time.time()
        self._room = Room()
        self._kinds: Collection[str] | None = None
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._entries: list[TranscriptEntry] = []

    def record(
        self, direction: Direction, peer: str, step: str, round: int, nbytes: int, content: bytes | None = None
    ) -> None:
        """Add one message; `content` is dropped unless the transcript keeps it."""
        with self._lock:
            kept = content if self.keeps(step) else None
            seconds = time.monotonic() - self._start
            self._entries.append(TranscriptEntry(direction, peer, step, round, nbytes, seconds, kept))
            # a part of the contents would look like all of them, so none is kept
            if kept is not None and not self._room.take(len(kept)):
                self.record_content = False
                self._entries = [replace(entry, content=None) for entry in self._entries]

    def keeps(self, step: str) -> bool:
        """Return whether the content of such a message is kept."""
        return self.record_content and (self._kinds is None or step in self._kinds)

    def keep_contents(self, room: Room, kinds: Collection[str] | None = None) -> None:
        """Keep contents from now on, of these kinds of messages (None: of all); without room for more, drop all."""
        with self._lock:
            self.record_content, self._room, self._kinds = True, room, kinds

    def restore(self, entries: Iterable[TranscriptEntry]) -> None:
        """Append messages that another transcript has recorded."""
        with self._lock:
            self._entries.extend(entries)

    def clear(self) -> None:
        """Forget all messages so far; a service calls it, whose messages never end."""
        with self._lock:
            self._entries.clear()

    @property
    def entries(self) -> tuple[TranscriptEntry, ...]:
        """All messages so far, in the order they were recorded."""
        with self._lock:
            return tuple(self._entries)

    def bytes_by_peer(self, direction: Direction) -> dict[str, int]:
        """Return the bytes of messages to each peer, or from each."""
        totals = Counter[str]()
        for entry in self.entries:
            if entry.direction == direction:
                totals[entry.peer] += entry.nbytes
        return dict(totals)


_MOST_STEPS = 60
_MOST_PEERS = 20
OTHERS = "others"
"""Stands for all peers beyond the twenty with the most bytes."""


class Timeline(msgspec.Struct, frozen=True):
    """Bytes by ordered pair of parties in steps of equal length."""

    # seconds since 1970 (UTC) by the party's own clock; a multiple of `step`
    began: float
    # seconds; a power of two, so that steps of two timelines fit into each other
    step: float
    # bytes in each step by "sender -> receiver", up to the last step with any
    pairs: dict[str, list[int]]


class _Event(NamedTuple):
    pair: str
    seconds: float  # since 1970
    nbytes: int


def timeline_of(transcripts: Iterable[Transcript], *directions: Direction) -> Timeline | None:
    """Return the bytes of messages of these directions over time; None if there were none."""
    events = []
    for transcript in transcripts:
        for direction in directions:
            shown = dict(Counter(transcript.bytes_by_peer(direction)).most_common(_MOST_PEERS))
            for entry in [entry for entry in transcript.entries if entry.direction == direction]:
                ends = transcript.party, entry.peer if entry.peer in shown else OTHERS
                sender, receiver = ends if direction == "sent" else reversed(ends)
                events.append(_Event(f"{sender} -> {receiver}", transcript.began + entry.seconds, entry.nbytes))
    return _in_steps(events)


def joined(timelines: Mapping[str, Timeline]) -> Timeline | None:
    """Join parties' own timelines, of both directions, so that every pair is counted once: at its sender.

    If the sender has no timeline here, the pair is counted at its receiver. Differences of clocks are not corrected.
    """
    events = []
    for party, own in timelines.items():
        for pair, steps in own.pairs.items():
            sender = pair.removesuffix(f" -> {party}")
            if pair.startswith(f"{party} -> ") or not (
                sender in timelines or (sender == OTHERS and len(timelines) > 1)
            ):
                middles = own.began + own.step * (np.arange(len(steps)) + 0.5)
                events += [
                    _Event(pair, at, nbytes) for at, nbytes in zip(middles.tolist(), steps, strict=True) if nbytes
                ]
    return _in_steps(events, max((own.step for own in timelines.values()), default=0.0))


def _in_steps(events: list[_Event], least_step: float = 0.0) -> Timeline | None:
    if not events:
        return None
    first, last = min(event.seconds for event in events), max(event.seconds for event in events)
    # powers of two: steps of one length begin at the same times at all parties
    step = max(2.0 ** math.ceil(math.log2(max(last - first, 0.01) / (_MOST_STEPS - 1))), least_step)
    start = math.floor(first / step)
    found: dict[str, list[int]] = {}
    for pair, seconds, nbytes in events:
        steps, at = found.setdefault(pair, []), math.floor(seconds / step) - start
        steps += [0] * (at + 1 - len(steps))
        steps[at] += nbytes
    return Timeline(start * step, step, found)
