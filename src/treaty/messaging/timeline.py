"""When how many bytes went from whom to whom: a transcript in short, as a report keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from treaty.messaging.transcript import Direction, Transcript

_MOST_STEPS = 60
_MOST_PEERS = 20
OTHERS = "others"
"""Stands for all peers beyond the twenty with the most bytes."""


class Timeline(msgspec.Struct, frozen=True):
    """Bytes by ordered pair of parties in steps of equal length.

    Attributes
    ----------
    began : float
        Seconds since 1970 (UTC) by the party's own clock; a multiple of `step`.
    step : float
        Seconds; a power of two, so that steps of two timelines fit into each other.
    pairs : dict of str to list of int
        Bytes in each step by "sender -> receiver", up to the last step with any.
    """

    began: float
    step: float
    pairs: dict[str, list[int]]


class _Event(NamedTuple):
    pair: str
    seconds: float  # since 1970
    nbytes: int


def timeline_of(transcripts: Iterable[Transcript], *directions: Direction) -> Timeline | None:
    """Return when messages of these directions were sent or came; None where there were none."""
    events = []
    for transcript in transcripts:
        for direction in directions:
            entries = [entry for entry in transcript.entries if entry.direction == direction]
            shown = _largest({entry.peer: 0 for entry in entries}, [(entry.peer, entry.nbytes) for entry in entries])
            for entry in entries:
                ends = transcript.party, entry.peer if entry.peer in shown else OTHERS
                sender, receiver = ends if direction == "sent" else reversed(ends)
                events.append(_Event(f"{sender} -> {receiver}", transcript.began + entry.seconds, entry.nbytes))
    return _in_steps(events)


def joined(timelines: Mapping[str, Timeline]) -> Timeline | None:
    """Put parties' own timelines, of both directions, into one in which every pair is told once: by its sender.

    Where the sender has none here, by its receiver. Clocks of several machines may differ; nothing is moved for that.
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


def _largest(totals: dict[str, int], amounts: list[tuple[str, int]]) -> set[str]:
    for name, amount in amounts:
        totals[name] += amount
    return set(sorted(totals, key=lambda name: -totals[name])[:_MOST_PEERS])


def _in_steps(events: list[_Event], least_step: float = 0.0) -> Timeline | None:
    if not events:
        return None
    first, last = min(event.seconds for event in events), max(event.seconds for event in events)
    step = max(2.0 ** math.ceil(math.log2(max(last - first, 0.01) / (_MOST_STEPS - 1))), least_step)
    start = math.floor(first / step)
    found: dict[str, list[int]] = {}
    for pair, seconds, nbytes in events:
        steps, at = found.setdefault(pair, []), math.floor(seconds / step) - start
        steps += [0] * (at + 1 - len(steps))
        steps[at] += nbytes
    return Timeline(start * step, step, found)
